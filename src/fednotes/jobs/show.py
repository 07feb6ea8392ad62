"""A job as it will run: every key with its value, and where the value comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from fednotes import methods
from fednotes.core.settings import Mark, marked_fields
from fednotes.jobs.declaration import PLACE_KEYS, with_places
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import (
    DEFAULT_PRESET,
    TopConfig,
    load_table,
    model_preset,
    parse_job,
    training_preset,
)
from fednotes.jobs.reference import plain
from fednotes.taggers.tagger import TaggerConfig

Origin = Literal["job", "setting", "preset", "privacy", "tagger", "default"]
Place = tuple[str, ...]  # the tables around a key, and the key

_WIDTH = 44  # columns before a comment, where a line is not longer
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class ShownSetting:
    """One key of a job.

    Attributes:
        table: The key's table, such as "training" or "sites.mercy"; "" for the top of
            the file.
        key: The key.
        value: Its value, as in TOML; None where it has none.
        origin: Where the value comes from: "job" (the job itself), "setting" (an
            assignment over the job), "preset", "privacy" (what a [privacy] table
            fixes), "tagger" (the architecture that [model] names) or "default".
        source: The origin in words, such as `preset "best"`.
        line: Line of the job's file, where that is known.
    """

    table: str
    key: str
    value: Any
    origin: Origin
    source: str
    line: int | None = None


@dataclass(frozen=True)
class ShownJob:
    """A job as it will run. `str()` gives its TOML.

    Attributes:
        name: The job's name.
        settings: Every key, in the order of a job's file.
    """

    name: str
    settings: tuple[ShownSetting, ...]

    def to_toml(self, *, changed: bool = False) -> str:
        """Return the job as a TOML file, with the source of each value as a comment.

        Args:
            changed: Leave out what has its default.
        """
        lines: list[str] = []
        table = ""
        for setting in self.settings:
            if changed and setting.origin == "default":
                continue
            if setting.table != table:
                table = setting.table
                lines += ["", f"[{'.'.join(map(_key, table.split('.')))}]"]
            lines.append(_line(setting))
        return "\n".join(lines).strip() + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return {
            "name": self.name,
            "settings": [asdict(setting) for setting in self.settings],
        }

    def __str__(self) -> str:
        return self.to_toml()


def show_job(
    source: str | Path | Mapping[str, Any] | Job, settings: Sequence[str] = ()
) -> ShownJob:
    """Return a job as it will run, with the source of every value.

    Args:
        source: A job file, the name of a built-in job, a job's tables, or a job.
        settings: Assignments over a file or built-in job, such as "training.epochs=3".

    Returns:
        The job's settings. Sites that do not say where their notes are, as in a job for
        real sites, are shown without these keys.

    Raises:
        ConfigError: There is no such job, or it has a mistake.
    """
    if isinstance(source, Job):
        return _Showing(source).shown()
    if isinstance(source, Mapping):
        job = parse_job(with_places(source), "job", Path.cwd(), "job")
        return _Showing(job, given=source).shown()
    table, path = load_table(source, tuple(settings))
    job = parse_job(with_places(table), path.stem, path.resolve().parent, str(path))
    lines = _lines_of(path.read_text("utf-8"))
    return _Showing(job, given=table, settings=settings, lines=lines).shown()


class _Showing:
    """Collects the settings of one job.

    given: the job's tables after `settings`, as they are written. lines: of the job's
        file.
    """

    def __init__(
        self,
        job: Job,
        *,
        given: Mapping[str, Any] | None = None,
        settings: Sequence[str] = (),
        lines: Mapping[Place, int] | None = None,
    ) -> None:
        self._job = job
        self._given = job.table if given is None else given
        assigned = (setting.partition("=")[0] for setting in settings)
        self._assigned = [tuple(dotted.strip().split(".")) for dotted in assigned]
        self._lines = lines or {}
        self._preset = str(self._given.get("preset", DEFAULT_PRESET))
        self._tables = methods.find(job.method).presets[self._preset]

    def shown(self) -> ShownJob:
        return ShownJob(self._job.name, tuple(self._settings()))

    def _settings(self) -> Iterator[ShownSetting]:
        job = self._job
        top = {field.name: field.default for field in fields(TopConfig)}
        top |= {name: getattr(job, name) for name in top if hasattr(job, name)}
        yield from self._table((), top)
        yield from self._training()
        yield from self._model()
        tables: dict[str, Any] = {
            "federation": job.federation,
            "privacy": job.privacy,
            "silos": job.silos,
            "synthetic": job.synthetic,
        }
        tables.update(job.kind.collect_tables(job))
        for name, values in tables.items():
            if isinstance(values, Mapping):
                yield from self._table((name,), values)
            elif values is not None:
                yield from self._config((name,), values, self._tables.get(name, {}))
        without_places = with_places(self._given) is not self._given
        for name, site in job.sites.items():
            values = {field.name: getattr(site, field.name) for field in fields(site)}
            if without_places:
                values = {
                    key: value for key, value in values.items() if key not in PLACE_KEYS
                }
            yield from self._table(("sites", name), values)

    def _training(self) -> Iterator[ShownSetting]:
        config: Any = self._job.config
        filled_in = marked_fields(type(config), Mark.FILLED_IN)
        values = {
            field.name: getattr(config, field.name)
            for field in fields(config)
            if field.name not in filled_in
        }
        method = methods.find(self._job.method)
        preset = training_preset(method, self._tables, private=False)
        fixed: Mapping[str, Any] = {}
        if self._job.privacy is not None and method.dp is not None:
            fixed = method.dp.required_settings
        for setting in self._table(("training",), values, preset):
            if setting.key in fixed and setting.origin in ("preset", "default"):
                yield _with_origin(setting, "privacy", "[privacy]")
            else:
                yield setting

    def _model(self) -> Iterator[ShownSetting]:
        config: Any = self._job.config.model
        written = self._given.get("model", {})
        preset = model_preset(self._tables, written)
        if "kind" not in {field.name for field in fields(config)} and hasattr(
            config, "kind"
        ):
            yield from self._table(("model",), {"kind": config.kind}, preset)
        architecture = isinstance(config, TaggerConfig) and "tagger" in {
            *written,
            *preset,
        }
        plain_tagger = {field.name: field.default for field in fields(TaggerConfig)}
        for setting in self._config(("model",), config, preset):
            differs = architecture and setting.value != plain(
                plain_tagger.get(setting.key)
            )
            if differs and setting.origin == "default":
                yield _with_origin(setting, "tagger", f'tagger "{config.tagger}"')
            else:
                yield setting

    def _config(
        self, place: Place, config: Any, preset: Mapping[str, Any]
    ) -> Iterator[ShownSetting]:
        """Yield a table's keys, then those of the tables inside it."""
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        inner = {name: value for name, value in values.items() if is_dataclass(value)}
        own = {name: value for name, value in values.items() if name not in inner}
        yield from self._table(place, own, preset)
        for name, value in inner.items():
            yield from self._config((*place, name), value, preset.get(name, {}))

    def _table(
        self,
        place: Place,
        values: Mapping[str, Any],
        preset: Mapping[str, Any] | None = None,
    ) -> Iterator[ShownSetting]:
        written: Any = self._given
        for name in place:
            written = written.get(name, {})
        for key, value in values.items():
            if key in written:
                yield self._from_job(place, key, written[key])
            elif preset and key in preset:
                source = f'preset "{self._preset}"'
                yield ShownSetting(".".join(place), key, plain(value), "preset", source)
            else:
                source = self._default(place, key)
                yield ShownSetting(
                    ".".join(place), key, plain(value), "default", source
                )

    def _from_job(self, place: Place, key: str, value: Any) -> ShownSetting:
        where = (*place, key)
        if any(_covers(assigned, where) for assigned in self._assigned):
            return ShownSetting(
                ".".join(place), key, plain(value), "setting", "set over the job"
            )
        line = _line_of(self._lines, where)
        source = "job" if line is None else f"job, line {line}"
        return ShownSetting(".".join(place), key, plain(value), "job", source, line)

    def _default(self, place: Place, key: str) -> str:
        if (place, key) == ((), "title"):
            return "default: the job's name"
        if (place, key) == (("federation",), "secure_sum") and len(self._job.sites) > 2:
            return "default; true between real sites"
        return "default"


def _with_origin(setting: ShownSetting, origin: Origin, source: str) -> ShownSetting:
    return ShownSetting(setting.table, setting.key, setting.value, origin, source)


def _covers(assigned: Place, where: Place) -> bool:
    """Whether an assignment sets this key, or a table around it; "*" stands for any
    table."""
    return len(assigned) <= len(where) and all(
        name in ("*", part) for name, part in zip(assigned, where, strict=False)
    )


# ---- lines of a job's file -----------------------------------------------------------


def _lines_of(text: str) -> dict[Place, int]:
    """Return the line of each key and table of a TOML file, counted from 1.

    A key within an inline table or a multi-line value is not found by itself.
    """
    found: dict[Place, int] = {}
    table: Place = ()
    inside = ""  # the quotes of a text of several lines
    for number, line in enumerate(text.split("\n"), 1):
        if not inside:
            if heading := re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line):
                table = _dotted(heading[1])
                found.setdefault(table, number)
            elif key := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
                found.setdefault((*table, *_dotted(key[1])), number)
        for quotes in ('"""', "'''"):
            if inside in ("", quotes) and line.count(quotes) % 2:
                inside = "" if inside else quotes
    return found


def _dotted(text: str) -> Place:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _line_of(lines: Mapping[Place, int], where: Place) -> int | None:
    """Return the line of a key, or of the innermost table around it that has a line."""
    for length in range(len(where), 0, -1):
        if where[:length] in lines:
            return lines[where[:length]]
    return None


# ---- TOML ----------------------------------------------------------------------------


def _line(setting: ShownSetting) -> str:
    if setting.value is None:
        return f"{f'# {setting.key} has no value':<{_WIDTH}}  # {setting.source}"
    pair = f"{_key(setting.key)} = {_value(setting.value)}"
    return f"{pair:<{_WIDTH}}  # {setting.source}"


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    """Return a value as TOML has it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        pairs = ", ".join(
            f"{_key(key)} = {_value(each)}" for key, each in value.items()
        )
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each) for each in value)}]"
    return repr(value)
