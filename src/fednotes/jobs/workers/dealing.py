"""Deal sites out to workers, and workers to devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import psutil
import torch

from fednotes.core.errors import ParameterError
from fednotes.core.tensors import find_device

AUTO: Final = "auto"
EVERY_GPU = "cuda:*"
_SAMPLE_SECONDS = 0.3  # in which this process waits, so that it does not count itself


def deal_sites(sizes: Mapping[str, int], workers: int) -> list[list[str]]:
    """Deal sites out so that workers have about the same number of examples.

    The largest site comes first, and each goes to the worker that has least so far.

    Args:
        sizes: The number of training examples of each site, in the fixed order.
        workers: Number of workers.

    Returns:
        The sites of each worker that has any, in the fixed order.
    """
    hands: list[list[str]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for site in sorted(sizes, key=lambda name: -sizes[name]):
        place = loads.index(min(loads))
        hands[place].append(site)
        loads[place] += max(1, sizes[site])
    order = list(sizes)
    return [sorted(hand, key=order.index) for hand in hands if hand]


def list_devices(device: str, workers: int, gpus: int) -> list[str]:
    """Return the device of each worker; with "cuda:*", the GPUs in turn.

    Args:
        device: The device that the user chose.
        workers: Number of workers.
        gpus: Number of GPUs of this machine.
    """
    if device != EVERY_GPU:
        return [device] * workers
    return [f"cuda:{number % gpus}" for number in range(workers)]


def choose_devices(device: str, workers: int) -> list[str]:
    """Return the device of each worker, after checking that this machine has it.

    Args:
        device: The device that the user chose.
        workers: Number of workers.

    Raises:
        ConfigError: This machine has no such device.
    """
    if device == EVERY_GPU:
        return list_devices(device, workers, count_gpus())
    find_device(device)
    return list_devices(device, workers, 0)


def count_gpus() -> int:
    """Return the number of GPUs.

    Raises:
        ConfigError: This machine has none.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        find_device("cuda")  # raises the error of a machine without a GPU
    return gpus


def count_cores() -> int:
    """Return the number of cores that this process may use.

    It is limited by the process's affinity, and by the quota of a container.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(cores, _read_quota(Path("/sys/fs/cgroup/cpu.max"), cores)))


def _read_quota(path: Path, default: int) -> int:
    """Return the whole cores of a container's quota; `default` if there is none."""
    try:
        quota, period = path.read_text().split()
        return int(quota) // int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return default


def count_free_cores() -> int:
    """Return the number of cores that other work leaves over at this moment.

    The system's load average would not do: it still counts what this user's last
    command did, such as a check of the same job.
    """
    # Of all cores together.
    busy_percent: float = psutil.cpu_percent(interval=_SAMPLE_SECONDS)
    busy_cores = busy_percent / 100 * (os.cpu_count() or 1)
    return max(1, count_cores() - round(busy_cores))


def choose_worker_number(device: str, threads: int) -> int:
    """Return the number of workers that this machine has room for.

    Args:
        device: The PyTorch device that the user chose; "cuda:*" means all GPUs.
        threads: Number of threads of each worker.

    Raises:
        ConfigError: This machine has no GPU, and "cuda:*" was chosen.
    """
    if device == EVERY_GPU:
        return count_gpus()
    if device != "cpu":
        return 1  # one process uses one GPU well
    return max(1, count_free_cores() // threads)


def parse_workers(text: str) -> int | Literal["auto"]:
    """Return the number of workers in a text, or "auto".

    Raises:
        ParameterError: The text is neither.
    """
    if text == AUTO:
        return AUTO
    if not text.isdecimal():
        raise _make_number_error(text)
    return int(text)


def require_worker_number(workers: object) -> None:
    """Raise ParameterError unless a number of workers is an integer of at least 1."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise _make_number_error(workers)


def _make_number_error(workers: object) -> ParameterError:
    """Return the error for what is no number of workers."""
    return ParameterError(
        f"`workers` = {workers!r}: expected a whole number of at least 1, or auto"
    )


def check_workers(workers: int, threads: int, cores: int) -> int:
    """Check that a number of workers fits on this machine, and return it.

    Args:
        workers: Number of workers.
        threads: Number of threads of each worker.
        cores: Number of cores.

    Raises:
        ParameterError: The number is below 1, or needs more cores than there are.
    """
    require_worker_number(workers)
    if workers > 1 and workers * threads > cores:
        each = "1 thread" if threads == 1 else f"{threads} threads"
        largest = max(1, cores // threads)
        raise ParameterError(
            f"`workers` = {workers} with {each} each need {workers * threads} cores, "
            f"but this process may use {cores}: set `workers` to at most {largest}"
        )
    return workers


def count_useful_workers(sites_of_parts: Sequence[int]) -> int:
    """Return the largest number of workers that have work at the same time.

    Args:
        sites_of_parts: The number of sites of each part. A part of one site is trained
            in one worker, while others train other parts.
    """
    single = sum(sites == 1 for sites in sites_of_parts)
    return max([1, single, *sites_of_parts])


def list_divided_parts(
    work: Mapping[str, float], sites: Mapping[str, int], workers: int
) -> list[str]:
    """Return the parts whose sites several workers share.

    Workers that share a part wait for each other in each round, so a part is better
    trained in one worker, while the others train other parts. It is divided only if it
    is so long that the others would have nothing left to do meanwhile.

    Args:
        work: The planned work of each part in any unit; 0 where it is unknown.
        sites: The number of sites of each part.
        workers: Number of workers.
    """
    equal_share = sum(work.values()) / workers
    return [
        part
        for part, planned in work.items()
        if sites[part] > 1 and not 0 < planned <= equal_share
    ]


# ---- workers that the command chooses itself -----------------------------------------


class Pace:
    """How long the parts of a run take, by those that have ended.

    Args:
        work: The planned work of each part in any unit; 0 where it is unknown.
    """

    def __init__(self, work: Mapping[str, float]) -> None:
        self._work = dict(work)
        self._done = 0.0
        self._seconds = 0.0

    def record(self, part: str, seconds: float) -> None:
        """Record that a part has ended.

        Args:
            part: The part's name.
            seconds: The seconds that it took.
        """
        self._done += self._work.get(part, 0.0)
        self._seconds += seconds

    def expect(self, parts: Sequence[str]) -> float:
        """Return the seconds that further parts will take in one process.

        Parts that have ended may have done less than planned, by early stopping; the
        others are expected to do as well.

        Returns:
            The seconds; 0 if they are unknown.
        """
        if not self._done:
            return 0.0
        return sum(self._work.get(part, 0.0) for part in parts) * (
            self._seconds / self._done
        )
