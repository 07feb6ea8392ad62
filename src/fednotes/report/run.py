"""The result files of a run, read with patience: a missing key is a gap, not an error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape as html_escape
from pathlib import Path
from typing import Any

from fednotes.core.cleaning import one_line
from fednotes.core.errors import DataError
from fednotes.core.parsing import JsonError, parse_json

Json = Mapping[str, Any]

_ORDER = ("alone", "federated", "pooled")  # then any other condition, by name


@dataclass(frozen=True, slots=True)
class Run:
    """summary: summary.json. lines: metrics.jsonl.

    conditions: in their order on the page; a condition's place is also its look in charts.
    """

    summary: Json
    lines: Sequence[Json]
    conditions: tuple[str, ...]

    @property
    def sites(self) -> Json:
        return mapping(self.summary.get("sites"))

    @property
    def source(self) -> str:
        """Seed and command, or the name of a run between sites, for captions (HTML)."""
        seed = self.summary.get("seed")
        given = (self.summary.get("command"), mapping(self.summary.get("config")).get("command"))
        command = next((x for x in (*given, self.summary.get("run")) if x), None)
        parts = [f"Seed {escape(str(seed))}" if seed is not None else "Seed not recorded"]
        parts.append(f"<code>{escape(str(command))}</code>" if command else "command not recorded")
        return " · ".join(parts)


def escape(text: str) -> str:
    """Text for HTML: result files hold names that other sites chose."""
    return html_escape(one_line(text))


def read(directory: Path) -> Run:
    """Read a run's result files.

    Raises DataError if `summary.json` is missing or a file is not what it should be; half a
    last line of `metrics.jsonl` is left out.
    """
    summary = _summary(directory / "summary.json")
    lines = _lines(directory / "metrics.jsonl")
    names = {str(line.get("condition", "federated")) for line in lines}
    for site in [*mapping(summary.get("sites")).values(), summary.get("mean")]:
        names.update(name for name, value in mapping(site).items() if isinstance(value, Mapping))
    known = [name for name in _ORDER if name in names]
    return Run(summary, lines, (*known, *sorted(names - set(_ORDER))))


def _summary(path: Path) -> Json:
    if not path.is_file():
        raise DataError(
            f"{path.parent}: no summary.json there; give the folder that `fednotes simulate "
            "--out` wrote, once the run has ended"
        )
    return _object(path, 1, _text_of(path))


def _lines(path: Path) -> list[Json]:
    if not path.is_file():
        return []
    rows = [(n, row) for n, row in enumerate(_text_of(path).split("\n"), 1) if row.strip()]
    found = []
    for n, row in rows:
        try:
            found.append(_object(path, n, row))
        except DataError:
            if n != rows[-1][0]:  # a killed run may leave half a last line
                raise
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({type(error).__name__})") from error


def _object(path: Path, line: int, text: str) -> Json:
    try:
        value = parse_json(text, strict=False)
    except JsonError as error:
        raise DataError.at(path, line + error.line - 1, f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError.at(path, line, "expected a JSON object")
    return value


def mapping(value: object) -> Json:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def finite(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def get(scores: object, *path: str) -> float | None:
    """The finite number at a path of keys, or None."""
    for key in path:
        scores = mapping(scores).get(key)
    return finite(scores)


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}" if abs(count) < 99.95 else f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes any number")


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {int(seconds % 60):02d} s"
