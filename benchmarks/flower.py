"""Seconds and memory of simulated rounds in fednotes and in Flower.

    python benchmarks/flower.py --flower PYTHON [--sites 3 30 300 1000] [--rounds 3]

PYTHON is the interpreter of a separate environment that contains `flwr[simulation]` and
fednotes; by default, the one that the variable FEDNOTES_FLOWER names. Without either,
nothing is measured.

The job is that of `sites.py`: sites of about 100 generated sentences train the demo's
light tagger by FedNER. The server and the sites run the same code under both programs;
only the engine between them differs. The final parameters of both are compared by
SHA-256.

Flower runs its clients in Ray actors, one for each core. Any actor may run a client in
the next round, so a client's private module travels in the client's context. An actor
keeps the sites that it has prepared: this takes memory, but preparing them again in each
round would take more time. fednotes runs all sites in one process. Each process computes
on one thread.

Seconds are wall-clock seconds of the rounds after the first one, so use an idle machine.
Memory is the largest sum over all processes of a run, including those that
Ray starts; memory that processes share counts once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from flower_app import Result, run_fednotes, run_flower, write_sites
from scratch import scratch, working_in

BENCHMARKS = Path(__file__).resolve().parent
SAMPLE_SECONDS = 0.5  # between two measurements of memory


class MemoryMeter(threading.Thread):
    """Measures the memory of all processes that work in a folder.

    Attributes:
        peak: The largest sum of their proportional set sizes so far, in bytes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._folder = folder
        self._end = threading.Event()

    def run(self) -> None:
        """Measure until `stop`."""
        while not self._end.wait(SAMPLE_SECONDS):
            total = sum(read_memory(number) for number in working_in(self._folder))
            self.peak = max(self.peak, total)

    def stop(self) -> int:
        """End the measurements; return the peak."""
        self._end.set()
        self.join()
        return self.peak


def read_memory(process: int) -> int:
    """Return a process's proportional set size in bytes; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def measure(
    interpreter: str, program: str, folder: Path, rounds: int
) -> tuple[Result, int]:
    """Run a program in processes of its own; return its result and peak memory."""
    command = [interpreter, str(Path(__file__).resolve()), "--run", program]
    command += ["--folder", str(folder), "--rounds", str(rounds)]
    settings = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    search = [BENCHMARKS, BENCHMARKS / "helpers", os.environ.get("PYTHONPATH", "")]
    settings["PYTHONPATH"] = os.pathsep.join(map(str, search))  # for Flower's actors
    settings |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    meter = MemoryMeter(folder)
    meter.start()
    errors = folder / f"{program}-errors.txt"
    with errors.open("w") as error_file:
        completed = subprocess.run(
            command,
            check=False,
            cwd=folder,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=error_file,
            text=True,
        )
    peak = meter.stop()
    if completed.returncode:
        sys.exit(f"{program} failed: {errors.read_text()[-2000:]}")
    return Result(*json.loads(completed.stdout.splitlines()[-1])), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--flower",
        default=os.environ.get("FEDNOTES_FLOWER"),
        help="interpreter of an environment with flwr",
    )
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 30, 300, 1000])
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    parser.add_argument(
        "--run", choices=("fednotes", "flower"), help="run one program in this process"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of sites that an earlier run wrote"
    )
    options = parser.parse_args()
    if options.run:
        torch.set_num_threads(1)
        run = run_fednotes if options.run == "fednotes" else run_flower
        print(json.dumps(run(options.folder, options.rounds)))
        return
    if options.flower is None:
        print("left out: give --flower the interpreter of an environment with flwr")
        return

    print("sites  fednotes s a round  MB  Flower s a round  MB")
    for num_sites in options.sites:
        with scratch() as folder:
            write_sites(folder, num_sites)
            here, memory = measure(sys.executable, "fednotes", folder, options.rounds)
            there, more = measure(options.flower, "flower", folder, options.rounds)
        assert here.fingerprint == there.fingerprint
        print(
            f"{num_sites:5}  {here.round_seconds:18.3f}  {memory / 1e6:6.0f}  "
            f"{there.round_seconds:16.3f}  {more / 1e6:6.0f}",
            flush=True,
        )
    print(f"{here.versions}; {there.versions}")
    print(f"flower-memory ratio={more / memory:.2f} against Flower's simulation")
    print(
        f"flower-seconds ratio={there.round_seconds / here.round_seconds:.2f} "
        "against Flower's simulation"
    )


if __name__ == "__main__":
    main()
