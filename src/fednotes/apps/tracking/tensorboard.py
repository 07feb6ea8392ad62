"""TensorBoard: event files in a folder, one subfolder for each curve's site.

    FOLDER/RUN/federated          values of all sites: loss, F1, ε, bytes
    FOLDER/RUN/federated/mercy    values of a site, also of its final scores
    FOLDER/RUN                    settings, the job, and the cards of models

So TensorBoard draws the same value of all sites and conditions into one chart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fednotes.apps.tracking.facts import MEAN, FinalScores, Point, RunFacts
from fednotes.apps.tracking.tracker import Tracker
from fednotes.core.errors import ConfigError, needs
from fednotes.jobs.tracking import TrackerKind

_TEST = "test"  # the first part of the names of final scores
_UNSAFE = re.compile(r"[^\w., -]|^\.+")
_TEXT_SUFFIXES = (".md", ".toml")


class TensorBoard:
    """Writes runs as event files.

    Args:
        folder: The folder that TensorBoard shows.

    Raises:
        MissingExtra: TensorBoard is not installed.
        ConfigError: The folder is a file.
    """

    def __init__(self, folder: str | Path) -> None:
        with needs("tensorboard", "tensorboard"):
            import tensorboard  # noqa: F401 - the next import fails without a name
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class: Any = SummaryWriter
        self._folder = Path(folder)
        if self._folder.exists() and not self._folder.is_dir():
            raise ConfigError(f"{folder} is a file: give a folder for event files")
        self._run = self._folder
        self._facts: RunFacts | None = None
        self._scores: dict[str, float] = {}
        self._writers: dict[Path, Any] = {}

    def open(self, facts: RunFacts) -> None:
        """Begin a run, in a new subfolder."""
        name = _make_safe_name(facts.name)
        self._run = self._folder / name
        number = 2
        while self._run.exists():
            self._run = self._folder / f"{name} ({number})"
            number += 1
        self._facts = facts
        self._scores = {}
        lines = [f"{facts.title} ({facts.method})", "", "| setting | value |"]
        lines.append("|---|---|")
        lines += [f"| {key} | {value} |" for key, value in facts.settings.items()]
        self._find_writer().add_text("settings", "\n".join(lines))

    def add_points(self, points: Sequence[Point]) -> None:
        """Add to the curves of the run, where they can be seen at once."""
        for point in points:
            writer = self._find_writer(point.condition, point.site)
            for name, value in point.values.items():
                writer.add_scalar(name, value, point.round)
            writer.flush()

    def add_scores(self, scores: Sequence[FinalScores]) -> None:
        """Add the scores of the run that has ended."""
        for final in scores:
            writer = self._find_writer(final.condition, final.site)
            for name, value in final.values.items():
                writer.add_scalar(f"{_TEST}/{name}", value, 0)
                if final.site in (MEAN, ""):
                    parts = (_TEST, final.condition, final.site, name)
                    self._scores["/".join(part for part in parts if part)] = value

    def add_files(self, files: Sequence[Path]) -> None:
        """Add the texts among some files; TensorBoard shows no others."""
        for file in files:
            if file.suffix in _TEXT_SUFFIXES:
                text = file.read_text("utf-8")
                if file.suffix == ".toml":
                    text = "\n".join(f"    {line}" for line in text.splitlines())
                self._find_writer().add_text(file.stem, text)

    def close(self, *, is_finished: bool) -> None:
        """End the run, with its settings and scores for the page HPARAMS."""
        if is_finished and self._facts is not None:
            self._find_writer().add_hparams(
                dict(self._facts.settings), self._scores, run_name="."
            )
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _find_writer(self, *names: str) -> Any:
        """Return the writer of a subfolder of the run, or a new one."""
        folder = self._run.joinpath(*(_make_safe_name(name) for name in names if name))
        if folder not in self._writers:
            self._writers[folder] = self._writer_class(str(folder))
        return self._writers[folder]


def _make_safe_name(name: str) -> str:
    """Return a name as the name of a folder."""
    return _UNSAFE.sub("_", name) or "_"


def open_tracker(target: str) -> Tracker:
    """Return a tracker that writes event files into a folder."""
    return Tracker(TensorBoard(target))


TRACKER = TrackerKind(open_tracker, target="FOLDER")
