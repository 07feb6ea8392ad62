"""Workers on the nodes of a Ray cluster, seen by the process that starts them.

Ray places an actor for each worker (`actor.py`), which holds a worker process there.
This process must run on a node of the cluster, and all nodes must see the same folders.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from fednotes.core.errors import ConfigError, ParameterError, needs
from fednotes.core.pipes import PipeClosedError
from fednotes.jobs.workers.actor import WorkerActor, list_package_versions
from fednotes.jobs.workers.child_process import END_SECONDS
from fednotes.jobs.workers.dealing import AUTO, EVERY_GPU, require_worker_number
from fednotes.jobs.workers.worker_process import WorkerProcess

_PAGE = "docs/how-to/cluster.md"
# Seconds within which the port of a cluster must answer; Ray tries for minutes.
_CONNECT_SECONDS = 5.0
# Seconds within which Ray must find room for the workers, and they must start.
_START_SECONDS = 60.0
# Each group of an actor's methods has a thread, and keeps the order of the calls.
_REQUESTS = "requests"
_REPLIES = "replies"
_REMEDY = "give `resume` to continue the run on the other nodes"


# ---- the connection to a cluster -----------------------------------------------------


@contextmanager
def connecting_to_cluster(address: str) -> Iterator[Any]:
    """Yield the module `ray`, which is connected to a cluster within the context.

    Args:
        address: The cluster, "HOST:PORT"; "auto" is the one that the variable
            RAY_ADDRESS names.

    Raises:
        ConfigError: There is no such cluster, or it refuses this process.
        MissingExtra: Ray is not installed.
    """
    if address == "auto":
        address = _read_address()
    _require_address(address)
    # Ray reads these when it is imported.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if os.environ.setdefault("RAY_AUTH_MODE", "token").lower() != "token":
        raise ConfigError(
            f"RAY_AUTH_MODE is {os.environ['RAY_AUTH_MODE']!r}, but fednotes only uses "
            f"clusters that require a token: set RAY_AUTH_MODE=token ({_PAGE})"
        )
    with needs("ray", "ray"):
        import ray
    _require_open_port(address)
    if ray.is_initialized():
        raise ConfigError(
            "this process is connected to a Ray cluster already: call ray.shutdown() "
            "first"
        )
    with _keeping_sigterm_handler():
        _connect(ray, address)
    try:
        yield ray
    finally:
        ray.shutdown()


def _read_address() -> str:
    """Return the address in RAY_ADDRESS.

    Without it, Ray would take the address from any process of this machine that looks
    like a node, whoever owns it, and send the token there.

    Raises:
        ConfigError: The variable is not set.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        raise ConfigError(
            '`cluster` = "auto", but RAY_ADDRESS is not set: give the HOST:PORT of the '
            f"cluster's head node, or set RAY_ADDRESS ({_PAGE})"
        )
    return address


def _require_address(address: str) -> None:
    """Raise ParameterError unless an address is HOST:PORT."""
    if not re.fullmatch(r"[^\s/]+:[0-9]+", address):
        raise ParameterError(
            f"`cluster` = {address!r}: expected HOST:PORT of the cluster's head node, "
            "or auto"
        )


def _require_open_port(address: str) -> None:
    """Raise ConfigError unless the port of an address answers."""
    host, _, port = address.rpartition(":")
    try:
        place = (host.strip("[]"), int(port))
        socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _make_connection_error(address, error) from error


def _make_connection_error(address: str, error: Exception) -> ConfigError:
    """Return the error for a cluster that this process cannot connect to."""
    return ConfigError(
        f"cannot connect to the Ray cluster {address!r} ({_find_first_line(error)}): "
        f"start it, and run this command on one of its nodes with its token ({_PAGE})"
    )


def _connect(ray: Any, address: str) -> None:
    """Connect this process to a cluster; see `connecting_to_cluster`."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level="CRITICAL")
    except ray.exceptions.AuthenticationError:
        raise ConfigError(
            "this process has no token for the Ray cluster, or a wrong one: copy the "
            f"head node's ~/.ray/auth_token, or set RAY_AUTH_TOKEN_PATH ({_PAGE})"
        ) from None
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _make_connection_error(address, error) from error


@contextmanager
def _keeping_sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _find_first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its full stop."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.rstrip(".: ")


# ---- how many workers a cluster has room for -----------------------------------------


def count_places(
    nodes: Sequence[Mapping[str, float]], threads: int, gpu_share: float
) -> int:
    """Return the number of workers for which nodes have room.

    Args:
        nodes: The resources of each node, "CPU" and "GPU".
        threads: Number of threads of each worker.
        gpu_share: The part of a GPU that each worker needs; 0 for none.
    """
    places = 0
    for resources in nodes:
        count = int(resources.get("CPU", 0) // threads)
        if gpu_share:
            # A worker is on one GPU, so parts of several GPUs do not add up.
            count = min(
                count, int(resources.get("GPU", 0)) * math.floor(1 / gpu_share + 1e-6)
            )
        places += count
    return places


def share_gpus(workers: int, gpus: int) -> float:
    """Return the part of a GPU that each worker has if they are dealt out to all."""
    # Ray counts in units of 0.0001.
    return math.floor(10_000 / math.ceil(workers / gpus)) / 10_000


# ---- the workers ---------------------------------------------------------------------


class Cluster:
    """The Ray cluster to which this process is connected (`WorkerPlace` of `pool.py`).

    Args:
        ray: The module `ray`.
        device: "cpu", or "cuda:*" for a GPU, or a part of one, for each worker.
        number: Number of workers; "auto" for as many as have room now.
        threads: Number of threads of each worker.

    Attributes:
        device: The PyTorch device of the workers.
        limit: The largest number of workers.
        processors: The names of the processors on which workers started.

    Raises:
        ConfigError: The cluster has no room for the workers.
    """

    def __init__(
        self, ray: Any, device: str, number: int | Literal["auto"], threads: int
    ) -> None:
        if device not in ("cpu", EVERY_GPU):
            raise ParameterError(
                f"`device` = {device!r}: on a cluster, Ray chooses the GPU of each "
                f"worker: give {EVERY_GPU!r}"
            )
        self.device = "cpu" if device == "cpu" else "cuda"
        self.processors: Sequence[str] = ()
        self._ray = ray
        self._threads = threads
        self._gpu_share = 0.0
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        if device == EVERY_GPU and not gpus:
            raise ConfigError(
                "the nodes of the cluster have no GPU: use the device 'cpu', or start "
                "a node that has one"
            )
        if number == AUTO:
            self._gpu_share = 0.0 if device == "cpu" else 1.0
            self.limit = self._count_free(nodes)
        else:
            require_worker_number(number)
            if device == EVERY_GPU:
                self._gpu_share = share_gpus(number, gpus)
            self.limit = number
            self._require_places(nodes, number)

    def start(self, number: int, folders: Sequence[Path]) -> Iterator[WorkerProcess]:
        """Start workers, after checking the nodes on which Ray places them.

        Args:
            number: Number of workers.
            folders: The folders that they read and write; the last one is this run's.

        Raises:
            ConfigError: A node has other versions, no such folder, or accepts anyone.
        """
        with self._explaining_start_errors():
            places = self._reserve(number)
        ray = self._ray
        kind = ray.remote(
            num_cpus=self._threads,
            num_gpus=self._gpu_share,
            max_restarts=0,
            concurrency_groups={_REQUESTS: 1, _REPLIES: 1},
        )(WorkerActor)
        actors = [kind.options(scheduling_strategy=place).remote() for place in places]
        nodes = self._find_nodes(places)
        self._check_nodes(actors, nodes, folders)
        for worker, (actor, node) in enumerate(zip(actors, nodes, strict=True), 1):
            connection = ActorProcess(ray, actor, node["NodeManagerAddress"])
            yield WorkerProcess(connection, worker, self.device, remedy=_REMEDY)

    def _count_free(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """Return the number of workers for which there is room now."""
        free = self._ray.available_resources()
        places = min(
            count_places(nodes, self._threads, self._gpu_share),
            count_places([free], self._threads, self._gpu_share),
        )
        if not places:
            raise ConfigError(
                f"the cluster has no room for a worker with {self._describe_share()} "
                "now: wait until other work has ended, or start more nodes"
            )
        return places

    def _require_places(
        self, nodes: Sequence[Mapping[str, float]], number: int
    ) -> None:
        """Raise ParameterError unless the nodes are large enough for the workers."""
        places = count_places(nodes, self._threads, self._gpu_share)
        if number > places:
            raise ParameterError(
                f"`workers` = {number}: the nodes of the cluster have room for "
                f"{places} workers with {self._describe_share()} each: give fewer "
                "`workers`, or start more nodes"
            )

    def _describe_share(self) -> str:
        """Return what each worker needs, in words."""
        cores = "1 core" if self._threads == 1 else f"{self._threads} cores"
        if not self._gpu_share:
            return cores
        gpu = "1 GPU" if self._gpu_share == 1 else f"{self._gpu_share:g} of a GPU"
        return f"{cores} and {gpu}"

    def _reserve(self, number: int) -> list[Any]:
        """Let Ray reserve a place for each worker, spread over the nodes."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share: dict[str, float] = {"CPU": self._threads}
        if self._gpu_share:
            share["GPU"] = self._gpu_share
        group = placement_group([share] * number, strategy="SPREAD")
        if not group.wait(_START_SECONDS):
            raise ConfigError(
                f"the cluster found no room for {number} workers with "
                f"{self._describe_share()} each in {_START_SECONDS:.0f} s: give fewer "
                "workers, or wait until other work has ended"
            )
        return [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
            for place in range(number)
        ]

    def _find_nodes(self, places: Sequence[Any]) -> list[Mapping[str, Any]]:
        """Return what Ray says of the node of each place."""
        from ray.util.placement_group import placement_group_table

        nodes = {node["NodeID"]: node for node in self._ray.nodes()}
        ids = placement_group_table(places[0].placement_group)["bundles_to_node_id"]
        return [nodes[ids[place]] for place in range(len(places))]

    def _check_nodes(
        self,
        actors: Sequence[Any],
        nodes: Sequence[Mapping[str, Any]],
        folders: Sequence[Path],
    ) -> None:
        """Raise ConfigError unless the nodes of workers fit this process."""
        # A folder of the same name on another disk does not have this file.
        with tempfile.NamedTemporaryFile(prefix=".cluster-", dir=folders[-1]) as file:
            paths = [str(folder.absolute()) for folder in folders]
            message = json.dumps([*paths, os.path.abspath(file.name)]).encode()
            with self._explaining_start_errors():
                descriptions = self._ray.get(
                    [actor.describe.remote(message) for actor in actors],
                    timeout=_START_SECONDS,
                )
        processors = set()
        for node, description in zip(nodes, descriptions, strict=True):
            values = json.loads(description)
            require_fitting_node(node["NodeManagerAddress"], values)
            processors.add(_describe_processor(values["processor"], node["Resources"]))
        self.processors = sorted(processors)

    @contextmanager
    def _explaining_start_errors(self) -> Iterator[None]:
        """Turn errors of Ray within the context into one that names a remedy."""
        try:
            yield
        except (RuntimeError, self._ray.exceptions.RayError) as error:
            raise ConfigError(
                f"Ray cannot start the workers ({_find_first_line(error)}): install "
                f"fednotes in the Python environment of every node ({_PAGE})"
            ) from error


def _describe_processor(processor: str, resources: Mapping[str, float]) -> str:
    """Return the name of a node's processor, with the kind of its GPUs."""
    kinds = [
        name.partition(":")[2]
        for name in resources
        if name.startswith("accelerator_type:")
    ]
    return ", ".join([processor, *kinds])


def require_fitting_node(node: str, description: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a node may compute for this process.

    Args:
        node: Address of the node.
        description: What `describe_node` returned there.
    """
    if not description["has_token"]:
        raise ConfigError(
            f"the Ray node {node} runs without token authentication, so anyone who "
            "reaches its ports can run code on it and read the notes: start the "
            f"cluster again with RAY_AUTH_MODE=token ({_PAGE})"
        )
    for package, own_version in list_package_versions().items():
        node_version = description["versions"].get(package, "")
        if node_version != own_version:
            raise ConfigError(
                f"the Ray node {node} has {package} "
                f"{node_version or '(not installed)'}, but this process "
                f"{own_version or '(not installed)'}: install the same versions on all "
                "nodes"
            )
    if description["missing"]:
        folder = Path(description["missing"][0])
        if folder.name.startswith(".cluster-"):
            folder = folder.parent
        raise ConfigError(
            f"the Ray node {node} does not see the folder {folder} of this process: "
            "put it on a file system that all nodes share, at the same path"
        )


class ActorProcess:
    """A worker process in a Ray actor, a `Connection` of `worker_process.py`.

    The actor always has a call that waits for the next frame. When Ray has its result,
    a byte in a pipe makes the connection readable.

    Args:
        ray: The module `ray`.
        actor: The actor, a `WorkerActor`.
        node: Address of its node, for messages.
    """

    def __init__(self, ray: Any, actor: Any, node: str) -> None:
        self._ray = ray
        self._actor = actor
        self._node = node
        self._is_lost = False
        self._readable, self._writable = os.pipe()
        self._lock = threading.Lock()  # Ray calls back from a thread of its own
        self._is_open = True
        self._wait_for_frame()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a frame comes."""
        return self._readable

    def send(self, frame: bytes) -> None:
        """Send a frame; see `Connection`. `receive` says whether the process ended."""
        self._actor.send.options(concurrency_group=_REQUESTS).remote(frame)

    def receive(self) -> bytearray:
        """Wait for the next frame and return it; see `Connection`."""
        os.read(self._readable, 1)
        try:
            frame = self._frame.result()
        except self._ray.exceptions.RayError:
            self._is_lost = True
            raise PipeClosedError from None
        if not frame:
            raise PipeClosedError
        self._wait_for_frame()
        return bytearray(frame)

    def close(self) -> None:
        """Let the process end."""
        if not self._is_lost:
            self._end = self._actor.end.remote()

    def wait(self) -> None:
        """Wait until the process has ended, and end the actor."""
        if not self._is_lost:
            with suppress(self._ray.exceptions.RayError):
                self._ray.get(self._end, timeout=2 * END_SECONDS)
        # A process whose actor is killed ends as well, because its stdin closes.
        self._ray.kill(self._actor)
        with self._lock:
            self._is_open = False
            os.close(self._readable)
            os.close(self._writable)

    def describe_end(self) -> str:
        """Return how the process ended; see `Connection`."""
        if not self._is_lost:
            with suppress(self._ray.exceptions.RayError):
                words = self._actor.describe_end.remote()
                end = self._ray.get(words, timeout=2 * END_SECONDS).decode()
                return f"{end} on node {self._node}"
        return (
            f"was lost: its node {self._node} has gone, or Ray ended it because memory "
            "ran out"
        )

    def _wait_for_frame(self) -> None:
        """Let the actor wait for the next frame."""
        call = self._actor.receive.options(concurrency_group=_REPLIES).remote()
        self._frame = call.future()
        self._frame.add_done_callback(self._make_readable)

    def _make_readable(self, _: object) -> None:
        """Write a byte into the pipe, once Ray has the next frame."""
        with self._lock:
            if self._is_open:
                os.write(self._writable, b".")
