"""The cost of exchanges between real sites (NVIDIA FLARE on loopback).

    python benchmarks/deployed.py [--megabytes 0.1 5 120] [--exchanges 5] [--steps 40]
        [--no-wire]

Each case is a separate job with three sites and a server, with real kits and mutual TLS:
`Deployed` at the server, and `SiteHost` with its journal at each site. In the table, a
site's task returns as many float32 numbers as it receives and computes nothing, so a row
shows the cost of an exchange alone:

    exchange    median seconds of a `federation.sum`; the first one, which contacts every site, is
                shown separately
    no network  the same engine and hosts, including the journal, but frames are passed on in one
                process, from site to site
    in process  the same with the in-process engine
    memory      MB: the peak of a process beyond what it held before the first exchange, for the
                process of the job and the process that starts jobs, at the server and at a site;
                a line below shows what the libraries of a job's processes take before it
    wire        bytes that cross one site's connection, both ways, relative to its tensors' bytes;
                a relay counts them in a separate run, without acknowledgements of TCP

The benchmark always ends its processes and removes its folder.

On loopback, every frame also passes between the two processes of each machine; no
network is involved in that.

The last line compares ten rounds of a method whose sites train 5 MB of parameters for
--steps mini-batches per round with the same ten rounds in one process, where the sites
train one after another. Each process computes on one thread: by default, each of the
three sites' processes would start a thread for each core of the machine that they share.
Processes are started once, before any measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from fednotes.apps.deployment.nvflare import kit as kit_files
from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.authority import ProjectConfig, provision
from fednotes.apps.deployment.nvflare.processes import NO_WATCH_VARIABLE
from fednotes.core.federation import Federation, State
from fednotes.core.messages import Frame
from fednotes.core.update import Tensors, Update
from fednotes.engines import launch
from fednotes.engines.deployed import Deployed
from fednotes.engines.host import SiteHost
from fednotes.engines.inprocess import InProcess
from fednotes.engines.launch import Setup
from fednotes.engines.requests import Patience

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from scratch import scratch

SITES = ("h1", "h2", "h3")
METHOD_BYTES, ROUNDS, WIDTH = 5_000_000, 10, 250
ADMIN = "admin@fednotes.org"


class Member:
    """A site that trains a matrix on random rows."""

    tasks: ClassVar[frozenset[str]] = frozenset({"step"})

    def __init__(self, name: str) -> None:
        self._id = name
        self.rows = torch.randn(
            32, WIDTH, generator=torch.Generator().manual_seed(len(name))
        )

    @property
    def id(self) -> str:
        return self._id

    def step(self, tensors: Tensors, *, steps: int) -> Update:
        """Take steps of gradient descent; with none, return the tensors that came."""
        x = tensors["x"].clone()
        weight = x[: x.numel() // WIDTH * WIDTH].view(WIDTH, -1)
        for _ in range(steps):
            weight -= 1e-4 * (self.rows.T @ torch.tanh(self.rows @ weight))
        return Update({"x": x}, 1.0, {"steps": float(steps)})

    def state(self) -> State:
        return State(0, {}, {})

    def restore(self, state: State) -> None:
        pass


def method(federation: Federation, nbytes: int, rounds: int, steps: int) -> list[float]:
    """Average the sites' updates in each round; return the seconds of each round."""
    x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(0))
    seconds = []
    for turn in federation.rounds(0, rounds):
        begin = time.perf_counter()
        x = federation.sum("step", {"x": x}, steps=steps).mean()["x"]
        turn.commit(State(turn.number + 1, {"x": x}, {}), {})
        seconds.append(time.perf_counter() - begin)
    return seconds


def memory(pid: int | str = "self") -> tuple[int, int]:
    """Return the bytes of memory that a process holds, and the most that it has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {key: value for key, _, value in (line.partition(":") for line in lines)}
    return tuple(int(status[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))  # type: ignore


def forget_peak(pid: int | str = "self") -> None:
    """Reset the peak of a process's memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


# ---- the code that the processes of a job run ----------------------------------------


def server_main(setup: Setup, transport: Any) -> None:
    """Run a case at the server, as the job's process calls it."""
    case, patience = setup.job, Patience(min_sites=len(SITES), timeout=300, give_up=300)
    engine = Deployed(
        transport, SITES, setup.state / "server", job=setup.run, patience=patience
    )
    before, _ = memory()
    forget_peak()
    seconds = method(engine, case["nbytes"], case["rounds"], case["steps"])
    engine.end()
    report = {"seconds": seconds, "memory": memory()[1] - before, "before": before}
    report |= {"frames": engine.bytes_up + engine.bytes_down}
    (setup.state / "told.json").write_text(json.dumps(report))


class Measured:
    """A site's host that reports the peak of its memory."""

    def __init__(self, setup: Setup) -> None:
        site = setup.site
        self._host = SiteHost(
            lambda: Member(site), setup.state / "site", job=setup.run, name=site
        )
        self._path, (self._before, _) = setup.state / "told.json", memory()
        forget_peak()

    def handle(self, frame: bytes) -> bytes:
        reply = self._host.handle(frame)
        report = {"memory": memory()[1] - self._before, "before": self._before}
        self._path.write_text(json.dumps(report))
        return reply

    def close(self) -> None:
        pass


def site_main(setup: Setup) -> Measured:
    """Return a site's host, as the job's process calls it."""
    return Measured(setup)


# ---- the network ---------------------------------------------------------------------


class Relay:
    """A port that forwards to another one and counts the bytes."""

    def __init__(self, to: int) -> None:
        self._to, self.nbytes = to, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("localhost", self._to))
            for source, target in ((near, far), (far, near)):
                threading.Thread(
                    target=self._pass, args=(source, target), daemon=True
                ).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(2**18):
                self.nbytes += len(data)
                target.sendall(data)
        except OSError:
            pass
        source.close()
        target.close()


def start(kit: Path) -> None:
    """Start the processes of a kit."""
    script = Path(__file__).resolve()
    variables = {
        launch.SERVER_MAIN: f"{script.stem}:server_main",
        launch.SITE_MAIN: f"{script.stem}:site_main",
        NO_WATCH_VARIABLE: "1",
        "OMP_NUM_THREADS": "1",  # three sites share the cores of this machine
        "PYTHONPATH": os.pathsep.join([str(script.parent), *filter(None, sys.path)]),
    }
    processes.start(kit, variables)


@contextmanager
def network(base: Path) -> Iterator[tuple[dict[str, Path], int]]:
    """Yield the kits of a running network and the server's port; then end its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    project = ProjectConfig("bench", "localhost", SITES, port=port)
    kits = provision(project, base / "kits")
    try:
        for name in ("server", *SITES):
            start(kits[name])
        yield kits, port
    finally:
        for name in ("server", *SITES):
            processes.stop(kits[name], patience=5)


RUN = """
import sys, time
from pathlib import Path
from fednotes.apps.deployment.nvflare.server import connecting_to_server
with connecting_to_server(Path(sys.argv[1]), sys.argv[2], 30) as server:
    while set(server.list_sites(within=15)) != set(sys.argv[4:]):
        time.sleep(0.3)
    job = server.submit(Path(sys.argv[3]))
    while not server.read_status(job).startswith("FINISHED"):
        time.sleep(0.3)
    print(server.read_status(job))
"""


def run(
    kits: Mapping[str, Path], name: str, nbytes: int, rounds: int, steps: int
) -> list[Any]:
    """Run a case as a job; return the seconds of its rounds, and bytes of memory.

    The bytes are the peaks of the server's job, the server, a site's job and the site,
    and what the jobs of the server and the site took before the first exchange.
    """
    base = kits["server"].parents[1]
    case = {"nbytes": nbytes, "rounds": rounds, "steps": steps}
    folder = kit_files.write_job_folder(
        base / "jobs", case, run=name, sites=SITES, min_sites=len(SITES)
    )
    pids = {who: processes.read_status(kits[who]).pid for who in ("server", "h2")}
    before = {}
    for who, pid in pids.items():
        before[who], _ = memory(pid or "self")
        forget_peak(pid or "self")
    command = [
        sys.executable,
        "-c",
        RUN,
        str(kits["admin"]),
        ADMIN,
        str(folder),
        *SITES,
    ]
    completed = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ
    )
    if not completed.stdout.endswith("FINISHED:COMPLETED\n"):
        raise SystemExit(
            f"{name}: {completed.stdout}{(kits['server'] / 'fednotes.log').read_text()}"
        )
    reports = [
        json.loads((kits[w] / "state" / name / "told.json").read_text()) for w in pids
    ]
    peaks = [memory(pid or "self")[1] - before[who] for who, pid in pids.items()]
    return [
        reports[0]["seconds"],
        reports[0]["memory"],
        peaks[0],
        reports[1]["memory"],
        peaks[1],
        reports[0]["before"],
        reports[1]["before"],
    ]


def through(
    kits: Mapping[str, Path], port: int, sizes: Sequence[int]
) -> dict[int, float]:
    """Return the bytes on h1's connection divided by those of its tensors, by size."""
    relay, per_byte = Relay(port), {}
    processes.stop(kits["h1"], patience=5)
    path = kits["h1"] / kit_files.KIT_FILE  # NVFlare's files are written from it
    path.write_text(json.dumps({**json.loads(path.read_text()), "port": relay.port}))
    start(kits["h1"])
    for nbytes in sizes:
        rounds = 20 if nbytes < 2**24 else 2
        quiet = [
            run_counted(kits, relay, nbytes, n, f"wire-{nbytes}-{n}")
            for n in (1, 1 + rounds)
        ]
        per_byte[nbytes] = (quiet[1] - quiet[0]) / (2 * rounds * nbytes)
    return per_byte


def run_counted(
    kits: Mapping[str, Path], relay: Relay, nbytes: int, rounds: int, name: str
) -> int:
    """Run a case; return the bytes that the relay forwarded."""
    before = relay.nbytes
    run(kits, name, nbytes, rounds, 0)
    return relay.nbytes - before


def alone(nbytes: int, rounds: int, steps: int) -> list[float]:
    """Run a case with the in-process engine; return the seconds of its rounds."""
    return method(InProcess([Member(site) for site in SITES]), nbytes, rounds, steps)


class Direct:
    """A transport without a network: the hosts answer in this process, one by one."""

    def __init__(self, hosts: Mapping[str, SiteHost]) -> None:
        self._hosts = hosts

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterator[tuple[str, Frame]]:
        for site, frame in frames.items():
            yield site, self._hosts[site].handle(frame)


def handed_over(base: Path, nbytes: int, rounds: int, steps: int) -> list[float]:
    """Run a case with the engine of real sites in this process; return the seconds of rounds.

    It leaves no files.
    """
    with tempfile.TemporaryDirectory(dir=base) as name:
        hosts = {
            site: SiteHost(
                partial(Member, site), Path(name) / site, job="direct", name=site
            )
            for site in SITES
        }
        engine = Deployed(Direct(hosts), SITES, Path(name) / "server", job="direct")
        return method(engine, nbytes, rounds, steps)


def clock(task: Callable[[], list[float]], repeats: int = 3) -> float:
    """Return the seconds of all rounds, as the median over repeats."""
    return statistics.median(sum(task()) for _ in range(repeats))


def table(kits: Mapping[str, Path], sizes: Sequence[int], exchanges: int) -> None:
    """Print the table of the cost of exchanges."""
    print(
        f"{'':>10}{'seconds an exchange':>44}{'peak memory beyond the start, MB':>50}"
    )
    print(
        f"{'MB':>10}{'deployed':>12}{'first':>8}{'no network':>12}{'in process':>12}"
        f"{'server job':>14}{'server':>10}{'site job':>12}{'site':>10}"
    )
    for nbytes in sizes:
        seconds, *peaks = run(kits, f"size-{nbytes}", nbytes, exchanges + 1, 0)
        base = kits["server"].parents[1]
        direct = statistics.median(handed_over(base, nbytes, exchanges + 1, 0)[1:])
        in_process = statistics.median(alone(nbytes, exchanges + 1, 0)[1:])
        job, parent, site, own_peak, *before = (peak / 1e6 for peak in peaks)
        print(
            f"{nbytes / 1e6:>10g}{statistics.median(seconds[1:]):>12.3f}{seconds[0]:>8.2f}"
            f"{direct:>12.3f}{in_process:>12.4f}{job:>14.0f}{parent:>10.0f}{site:>12.0f}{own_peak:>10.0f}",
            flush=True,
        )
    server_before, site_before = before
    print(
        f"before the first exchange: {server_before:.0f} MB of the server's job, "
        f"{site_before:.0f} MB of a site's"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 5, 120])
    parser.add_argument("--exchanges", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=40, help="mini-batches per site and round"
    )
    parser.add_argument(
        "--no-wire", action="store_true", help="do not count the bytes on the wire"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [int(megabytes * 1e6) for megabytes in options.megabytes]
    with scratch() as folder, network(folder) as (kits, port):
        table(kits, sizes, options.exchanges)
        far, *_ = run(kits, "method", METHOD_BYTES, ROUNDS, options.steps)
        near = clock(lambda: alone(METHOD_BYTES, ROUNDS, options.steps))
        small = [size for size in sizes if size < 2**24]
        counted = {} if options.no_wire else through(kits, port, small)
        for nbytes, ratio in counted.items():
            print(f"wire, {nbytes / 1e6:g} MB: {ratio:.4f} times the tensors' bytes")
    print(
        f"{ROUNDS} rounds of {METHOD_BYTES / 1e6:g} MB, {options.steps} steps: {sum(far):.2f} s "
        f"deployed, {near:.2f} s in process, {(sum(far) - near) / ROUNDS:.3f} s more a round"
    )
    print(f"deployed ratio={sum(far) / near:.2f} against plain loop")


if __name__ == "__main__":
    main()
