"""Runs on the nodes of a Ray cluster: refusals, frames between processes, lost nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
from tiny_jobs import JOB, SITES, corpus
from worker_runs import read_run, wait_until

from fednotes.api import simulate
from fednotes.core.errors import (
    ConfigError,
    MissingExtra,
    ParameterError,
    WorkerError,
)
from fednotes.core.pipes import PipeClosedError
from fednotes.engines.remote_programs import wait_for_links
from fednotes.jobs.workers.actor import describe_node, read_processor
from fednotes.jobs.workers.cluster import (
    ActorProcess,
    Cluster,
    connecting_to_cluster,
    count_places,
    require_fitting_node,
    share_gpus,
)
from fednotes.jobs.workers.pool import remark_on_processors
from fednotes.jobs.workers.worker_process import WorkerProcess

# how many workers a cluster has room for


def test_a_node_has_room_for_as_many_workers_as_cores_and_gpus_allow() -> None:
    nodes = [{"CPU": 7.0, "GPU": 2.0}, {"CPU": 3.0}, {"memory": 9.0}]
    assert count_places(nodes, threads=1, gpu_share=0) == 10
    assert count_places(nodes, threads=2, gpu_share=0) == 4
    assert count_places(nodes, threads=1, gpu_share=1) == 2
    assert count_places(nodes, threads=1, gpu_share=0.3333) == 6
    assert count_places(nodes, threads=4, gpu_share=0.5) == 1


def test_workers_share_gpus_if_there_are_more_workers() -> None:
    assert share_gpus(workers=2, gpus=2) == 1
    assert share_gpus(workers=1, gpus=4) == 1
    assert share_gpus(workers=3, gpus=2) == 0.5
    for workers in range(1, 40):
        for gpus in range(1, 9):
            nodes = [{"CPU": 99.0, "GPU": float(gpus)}]
            share = share_gpus(workers, gpus)
            assert count_places(nodes, 1, share) >= workers


class RayOfNodes:
    """Says which nodes a cluster has, and what is free."""

    def __init__(self, *nodes: dict[str, float], free: dict[str, float]) -> None:
        self._nodes = [{"Alive": True, "Resources": node} for node in nodes]
        self._free = free

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 9.0}}
        return [*self._nodes, dead]

    def available_resources(self) -> dict[str, float]:
        return self._free


def test_auto_uses_the_free_cores_of_a_cluster() -> None:
    ray = RayOfNodes({"CPU": 4.0}, {"CPU": 3.0}, free={"CPU": 5.0})
    assert Cluster(ray, "cpu", "auto", threads=1).limit == 5
    assert Cluster(ray, "cpu", "auto", threads=2).limit == 2
    assert Cluster(ray, "cpu", 7, threads=1).limit == 7


def test_workers_for_which_a_cluster_has_no_room_are_refused() -> None:
    ray = RayOfNodes({"CPU": 4.0, "GPU": 1.0}, free={"CPU": 1.0})
    message = (
        "`workers` = 3: the nodes of the cluster have room for 2 workers with 2 cores "
        "each: give fewer `workers`, or start more nodes"
    )
    with pytest.raises(ParameterError, match=message):
        Cluster(ray, "cpu", 3, threads=2)
    with pytest.raises(ConfigError, match="no room for a worker with 2 cores now"):
        Cluster(ray, "cpu", "auto", threads=2)
    with pytest.raises(ConfigError, match="a worker with 1 core and 1 GPU now"):
        Cluster(ray, "cuda:*", "auto", threads=1)
    with pytest.raises(ParameterError, match=r"with 1 core and 0\.2 of a GPU each"):
        Cluster(ray, "cuda:*", 5, threads=1)
    with pytest.raises(ParameterError, match="a whole number of at least 1, or auto"):
        Cluster(ray, "cpu", 0, threads=1)


def test_ray_and_not_the_user_chooses_the_gpus_of_a_cluster() -> None:
    ray = RayOfNodes({"CPU": 4.0, "GPU": 2.0}, free={"CPU": 4.0, "GPU": 2.0})
    cluster = Cluster(ray, "cuda:*", "auto", threads=1)
    assert (cluster.limit, cluster.device) == (2, "cuda")
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ParameterError, match=r"give 'cuda:\*'"):
            Cluster(ray, device, "auto", threads=1)
    without = RayOfNodes({"CPU": 4.0}, free={"CPU": 4.0})
    with pytest.raises(ConfigError, match="have no GPU: use the device 'cpu'"):
        Cluster(without, "cuda:*", "auto", threads=1)


# refusals of a cluster


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what `connecting_to_cluster` sets for Ray."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module that stands for Ray."""
    ray = types.ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.fixture
def head() -> Iterator[str]:
    """Return the address of a port that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def connect_to(address: str) -> None:
    with connecting_to_cluster(address):
        raise AssertionError("connected")


def test_an_address_is_a_host_with_a_port_or_auto(environment: None) -> None:
    for address in ("head", "ray://head:10001", "local", "head:port", ""):
        with pytest.raises(ParameterError, match="expected HOST:PORT of the cluster"):
            connect_to(address)


def test_auto_takes_no_address_from_the_processes_of_the_machine(
    environment: None, module: Any
) -> None:
    """Ray would trust any process that looks like a node of a cluster."""
    module.is_initialized = lambda: False
    with pytest.raises(ConfigError, match="but RAY_ADDRESS is not set: give the HOST"):
        connect_to("auto")


def test_auto_starts_no_cluster_whatever_the_environment_says(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would start one, with a dashboard."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(ParameterError, match="`cluster` = 'local': expected HOST:PORT"):
        connect_to("auto")


def test_without_ray_the_error_names_the_extra(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"fednotes\[ray\]"):
        connect_to("127.0.0.1:1")


def test_a_cluster_without_a_token_is_refused_before_ray_is_imported(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="set RAY_AUTH_MODE=token"):
        connect_to("127.0.0.1:1")


def test_a_port_that_does_not_answer_is_an_error(
    environment: None, module: Any
) -> None:
    """Ray would try for minutes."""
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1' \(.*refused\): start it"):
        connect_to("127.0.0.1:1")


def test_usage_statistics_are_off_and_a_token_is_required(
    environment: None, module: Any, head: str
) -> None:
    module.is_initialized = lambda: True
    with pytest.raises(ConfigError, match=r"call ray\.shutdown\(\) first"):
        connect_to(head)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_the_handler_of_sigterm_remains_when_ray_connects(
    environment: None, module: Any, head: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    module.is_initialized = lambda: False
    module.init = lambda **_: signal.signal(signal.SIGTERM, signal.SIG_DFL)
    module.shutdown = lambda: None

    def handler(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, handler)
    try:
        with connecting_to_cluster(head):
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nodes_with_other_versions_folders_or_without_a_token_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    require_fitting_node("10.0.0.2", describe_node([str(tmp_path)]))

    witness = tmp_path / ".cluster-abc"
    node = describe_node([str(tmp_path), str(witness)])
    message = f"10.0.0.2 does not see the folder {tmp_path} of this process: put it on"
    with pytest.raises(ConfigError, match=message):
        require_fitting_node("10.0.0.2", node)

    for package, there in (("torch", "1.0"), ("fednotes", "9.9"), ("numpy", "")):
        node = describe_node([])
        node["versions"][package] = there
        with pytest.raises(
            ConfigError, match=rf"node a has {package} ({there}|\(not installed\)), but"
        ):
            require_fitting_node("a", node)

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="anyone who reaches its ports can run code"):
        require_fitting_node("a", describe_node([]))


def test_the_processor_is_the_one_that_the_system_names(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name\t: Fast 9000 @ 2GHz\n")
    assert read_processor(file) == "Fast 9000 @ 2GHz"
    assert read_processor(tmp_path / "none")


def test_different_processors_are_a_remark_of_the_run() -> None:
    assert list(remark_on_processors(["A"])) == []
    (remark,) = remark_on_processors(["A", "B"])
    assert "different processors (A; B)" in remark


# frames


class RayError(Exception):
    """Stands for Ray's error of an actor that was lost."""


class Calls:
    """An actor's method, each call of which runs in a thread."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def options(self, **_: object) -> Calls:
        return self

    def remote(self, *arguments: Any) -> Result:
        result: Future[Any] = Future()
        # A call that waits for a frame must not keep the tests from ending.
        Thread(target=self._run, args=(result, arguments), daemon=True).start()
        return Result(result)

    def _run(self, result: Future[Any], arguments: tuple[Any, ...]) -> None:
        try:
            result.set_result(self._call(*arguments))
        except RayError as error:
            result.set_exception(error)


class Result:
    """What a call will return."""

    def __init__(self, result: Future[Any]) -> None:
        self._result = result

    def future(self) -> Future[Any]:
        return self._result


class Actor:
    """An actor that repeats frames, and is lost or ended by some."""

    def __init__(self) -> None:
        self._frames: SimpleQueue[bytes] = SimpleQueue()
        self.ended = False
        self.send = Calls(self._frames.put)
        self.receive = Calls(self._receive)
        self.describe_end = Calls(lambda: b"was ended by SIGKILL")
        self.end = Calls(lambda: setattr(self, "ended", True))

    def _receive(self) -> bytes:
        frame = self._frames.get()
        if frame == b"lose":
            raise RayError
        return b"" if frame == b"end" else frame


class Ray:
    """Stands for the module."""

    exceptions = types.SimpleNamespace(RayError=RayError)

    def __init__(self) -> None:
        self.killed: list[Actor] = []

    def get(self, result: Result, timeout: float) -> Any:
        return result.future().result(timeout)

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


def test_frames_of_an_actor_make_its_connection_readable() -> None:
    ray, actors = Ray(), [Actor(), Actor()]
    links = [ActorProcess(ray, actor, "10.0.0.2") for actor in actors]
    for frame in (b"one", b"two"):
        links[1].send(frame)
        assert wait_for_links(links) == [links[1]]
        assert links[1].receive() == bytearray(frame)
    for link in links:
        link.close()
    actors[0].send.remote(b"late")
    for link in links:
        link.wait()
    assert all(actor.ended for actor in actors)
    assert ray.killed == actors


@pytest.mark.parametrize(
    ("frame", "end"),
    [
        (b"end", r"was ended by SIGKILL on node 10\.0\.0\.2: try again"),
        (b"lose", r"was lost: its node 10\.0\.0\.2 has gone, or Ray ended it"),
    ],
)
def test_a_process_that_ends_on_a_cluster_is_one_error(frame: bytes, end: str) -> None:
    connection = ActorProcess(Ray(), Actor(), "10.0.0.2")
    worker = WorkerProcess(connection, 2, "cpu", remedy="try again")
    worker.duty = "computed for site 'a'"
    worker.send(frame)
    message = rf"^worker process 2, which computed for site 'a', {end}"
    with pytest.raises(WorkerError, match=message):
        worker.receive()
    worker.close()
    worker.wait()


def test_a_connection_that_was_lost_is_closed_like_a_pipe() -> None:
    connection = ActorProcess(Ray(), Actor(), "a")
    connection.send(b"lose")
    with pytest.raises(PipeClosedError):
        connection.receive()
    connection.close()
    connection.wait()


# real nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Start a cluster of two nodes with one core each."""
    pytest.importorskip("ray.scripts.scripts")
    from ray_nodes import ray_nodes

    with ray_nodes(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a job of two sites that trains for some seconds."""
    folder = tmp_path_factory.mktemp("job")
    corpus(folder / "north.conll", "DRUG", "vol")
    corpus(folder / "south.conll", "DRUG", "tal")
    text = JOB.replace('["federated"]', '["alone", "federated"]').replace(
        "epochs = 1", "epochs = 20"
    )
    (folder / "job.toml").write_text(text + SITES)
    return folder / "job.toml"


@pytest.fixture(scope="module")
def in_one_process(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    simulate(job_file, out)
    return out


class Run:
    """A simulation on a cluster, in a process of its own."""

    def __init__(self, nodes: Any, job_file: Path, out: Path, *words: str) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "fednotes", "simulate", str(job_file),
                "--out", str(out), "--yes", "--cluster", nodes.address, *words,
            ],
            cwd=out.parent, env=nodes.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._out = out

    def wait_for_part(self, name: str) -> None:
        """Wait until a part has logged an evaluation."""
        log = self._out / "metrics.jsonl"
        wait_until(lambda: log.exists() and f'"{name}' in log.read_text())

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and stderr."""
        _, printed = self._process.communicate(timeout=120)
        return self._process.returncode, printed


def read_files(out: Path) -> dict[str, Any]:
    """Return the files of a run but its report, which shows the command."""
    files = read_run(out)
    files.pop("report.html", None)
    return files


@pytest.mark.network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_on_a_cluster_outlives_the_command(
    number: int, nodes: Any, job_file: Path, tmp_path: Path
) -> None:
    # Far longer than the search for workers takes, however busy the machine is.
    endless = ("--set", "training.epochs=5000", "--set", "training.select=last")
    run = Run(nodes, job_file, tmp_path / "run", *endless)
    run.wait_for_part("alone")
    assert len(nodes.find_workers()) == 2
    run.send(number)
    code, printed = run.wait()
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code == 128 + number
        assert "stopped; to resume: fednotes simulate " in printed
        assert f"--cluster {nodes.address} --resume" in printed
    wait_until(lambda: nodes.find_workers() == [], seconds=30)


@pytest.mark.network
def test_a_run_resumes_to_the_same_bits_after_a_node_was_killed(
    nodes: Any, job_file: Path, in_one_process: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = Run(nodes, job_file, out, "--workers", "2")
    run.wait_for_part("federated")
    nodes.kill(1)
    code, printed = run.wait()
    assert code == 2
    (error,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    # With both sites, if it trained the whole condition beside another one.
    assert re.search("which computed for sites? '", error)
    assert "was lost: its node " in error
    assert "give --resume to continue the run on the other nodes" in printed

    assert Run(nodes, job_file, out, "--resume").wait()[0] == 0
    record = json.loads((out / "job.json").read_text("utf-8"))
    assert (record["workers"], record["processors"]) == (1, [read_processor()])
    assert read_files(out) == read_files(in_one_process)
    assert nodes.find_workers() == []
