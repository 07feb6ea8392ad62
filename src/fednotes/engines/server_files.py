"""What the server keeps of a run: two checkpoints, and how often it was started.

run.json             the number of starts, which sites know as the run
round-00000012/      core/store.py: the method's state, and where every site stood
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.parsing import read_json
from fednotes.core.settings import build
from fednotes.core.store import load_state, restoring, save_state, write_json
from fednotes.core.update import Tensors
from fednotes.engines.inprocess import KEPT_CHECKPOINTS, parted
from fednotes.federation import Option, State


@dataclass(frozen=True)
class Asked:
    """A request of the time before the first round, which a site that joins later is to do."""

    task: str
    tensors: Tensors
    options: Mapping[str, Option]


@dataclass(frozen=True)
class Progress:
    """Where a run stands. number: of the checkpoint's request. counted, prepared: by site, the
    last request that counts, and how many of `prologue` it has done."""

    number: int
    counted: Mapping[str, int]
    prepared: Mapping[str, int]
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    summing: Mapping[str, Any] = field(default_factory=dict)  # `Summing.state`

    @classmethod
    def start(cls, sites: Sequence[str]) -> Progress:
        """Before the first request."""
        return cls(0, dict.fromkeys(sites, 0), dict.fromkeys(sites, 0))


@dataclass(frozen=True)
class Kept:
    """A checkpoint."""

    state: State
    progress: Progress
    prologue: tuple[Asked, ...] = field(default_factory=tuple)


class ServerFiles:
    """The server's folder of one job.

    Raises ModelError if it holds another job, FednotesError where it cannot be written.
    """

    def __init__(self, directory: Path, job: str) -> None:
        self._directory, self._job = directory, job

    def start(self) -> int:
        """Count this start; the new run's number, on disk before any site hears of it."""
        path, run = self._directory / "run.json", 0
        if path.exists():
            try:
                kept = read_json(path)
                run, job = int(kept["run"]), str(kept["job"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ModelError(
                    f"{path}: damaged; write the number of this job's starts into it, or more: "
                    f'{{"job": "{self._job}", "run": 1000}}'
                ) from error
            if job != self._job:
                raise ModelError(
                    f"{self._directory}: holds job {job[:12]}, this is job {self._job[:12]}: "
                    "take another folder"
                )
        write_json(path, {"job": self._job, "run": run + 1})
        return run + 1

    def clear(self) -> None:
        """Forget the checkpoints; starts are counted on."""
        for folder in self._directory.glob("*round-*"):
            shutil.rmtree(folder)

    def save(self, kept: Kept) -> None:
        """Write a checkpoint, then delete all but the newest two."""
        tensors = {f"server/{name}": value for name, value in kept.state.tensors.items()}
        for index, asked in enumerate(kept.prologue):
            tensors |= {f"asked{index}/{name}": value for name, value in asked.tensors.items()}
        facts = {
            "round": kept.state.round,
            "server": dict(kept.state.facts),
            "progress": asdict(kept.progress),
            "prologue": [[asked.task, dict(asked.options)] for asked in kept.prologue],
        }
        save_state(self._directory / f"round-{kept.state.round:08d}", tensors, facts)
        for old in self._folders()[KEPT_CHECKPOINTS:]:
            shutil.rmtree(old)

    def newest(self) -> Kept | None:
        """The newest whole checkpoint; those after it are deleted.

        Raises ModelError if all are damaged.
        """
        for cut in self._directory.glob(".round-*"):  # a killed run's, half-written
            shutil.rmtree(cut, ignore_errors=True)
        folders, why = self._folders(), ""
        for folder in folders:
            try:
                tensors, facts = load_state(folder)
                with restoring(folder):
                    kept = _kept(tensors, facts)
            except ModelError as error:
                why = why or str(error)
                continue
            for damaged in folders[: folders.index(folder)]:
                shutil.rmtree(damaged)
            return kept
        if folders:
            raise ModelError(
                f"{self._directory}: every checkpoint is damaged: start a new run "
                f"(the newest: {why})"
            )
        return None

    def marks(self) -> Iterator[int]:
        """The request numbers of the checkpoints."""
        for folder in reversed(self._folders()):
            try:
                facts = read_json(folder / "facts.json", strict=False)
                yield int(facts["progress"]["number"])
            except (OSError, ValueError, KeyError, TypeError):
                continue

    def _folders(self) -> list[Path]:
        """From the newest."""
        return sorted(self._directory.glob("round-*"), reverse=True)


def _kept(tensors: Tensors, facts: Mapping[str, Any]) -> Kept:
    parts = parted(tensors)
    prologue = tuple(
        Asked(str(task), parts.get(f"asked{index}", {}), dict(options))
        for index, (task, options) in enumerate(facts["prologue"])
    )
    state = State(facts["round"], parts.get("server", {}), facts["server"])
    try:
        return Kept(state, build(Progress, facts["progress"], "progress"), prologue)
    except ConfigError as error:
        raise ModelError(str(error)) from error
