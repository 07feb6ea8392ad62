"""Show a job as it will run: every key, its value, and where the value comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fednotes import methods
from fednotes.core.settings import Mark, list_marked_fields
from fednotes.jobs.declaration import PLACE_KEYS, add_placeholders, lacks_places
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import (
    DEFAULT_PRESET,
    TopConfig,
    find_model_defaults,
    find_training_defaults,
    load_table,
    parse_job,
)
from fednotes.jobs.reference import to_toml_value
from fednotes.jobs.toml_text import format_key, format_value
from fednotes.taggers.model import ModelConfig
from fednotes.taggers.tagger import TaggerConfig

Origin = Literal["job", "setting", "preset", "privacy", "tagger", "default"]
# The tables around a key, and the key.
Place = tuple[str, ...]

# Column at which comments start after lines that are shorter.
_WIDTH = 44
_HEADING = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?")
_KEY = re.compile(r"\s*([\w.\"' -]+?)\s*=")


@dataclass(frozen=True)
class ShownSetting:
    """One key of a job.

    Attributes:
        table: The key's table, such as "training" or "sites.mercy"; "" for the top of
            the file.
        key: The key.
        value: Its value, as in TOML; None if it has none.
        origin: Where the value comes from: "job" (the job itself), "setting" (an
            assignment over the job), "preset", "privacy" (what a [privacy] table
            fixes), "tagger" (the architecture that [model] names) or "default".
        source: The origin in words, such as `preset "best"`.
        line: Line in the job's file, if known.
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
            changed: Whether to leave out keys that have their defaults.
        """
        lines: list[str] = []
        table = ""
        for setting in self.settings:
            if changed and setting.origin == "default":
                continue
            if setting.table != table:
                table = setting.table
                lines += ["", f"[{'.'.join(map(format_key, table.split('.')))}]"]
            lines.append(_format_line(setting))
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
        lister = _SettingsLister(source, source.table)
    elif isinstance(source, Mapping):
        job = parse_job(add_placeholders(source), "job", Path.cwd(), "job")
        lister = _SettingsLister(job, source)
    else:
        table, path = load_table(source, tuple(settings))
        folder = path.resolve().parent
        job = parse_job(add_placeholders(table), path.stem, folder, str(path))
        assigned = [setting.partition("=")[0].strip() for setting in settings]
        lister = _SettingsLister(
            job,
            table,
            assigned=tuple(tuple(dotted.split(".")) for dotted in assigned),
            lines=_find_lines(path.read_text("utf-8")),
        )
    return ShownJob(lister.job.name, tuple(lister.list_settings()))


@dataclass(frozen=True)
class _SettingsLister:
    """Lists the settings of one job.

    Attributes:
        job: The job.
        written: The job's tables as written, after assignments.
        assigned: Places set by assignments over the job.
        lines: Line of each key and table in the job's file.
    """

    job: Job
    written: Mapping[str, Any]
    assigned: Sequence[Place] = ()
    lines: Mapping[Place, int] = field(default_factory=dict)

    @property
    def preset_name(self) -> str:
        """The preset that the job starts from."""
        return str(self.written.get("preset", DEFAULT_PRESET))

    @property
    def preset(self) -> Mapping[str, Any]:
        """The tables of the job's preset."""
        return methods.find_method(self.job.method).presets[self.preset_name]

    def list_settings(self) -> Iterator[ShownSetting]:
        """Yield every key of the job, in the order of a job's file."""
        yield from self._list_top()
        yield from self._list_training()
        yield from self._list_model()
        yield from self._list_other_tables()
        yield from self._list_sites()

    def _list_top(self) -> Iterator[ShownSetting]:
        """Yield the keys outside tables."""
        job = self.job
        # A job has defaults for the other keys, or they come from the tables.
        top = TopConfig(
            method=job.method,
            title=job.title,
            seed=job.seed,
            conditions=job.conditions,
            threads=job.threads,
        )
        yield from self._list_keys((), _read_field_values(top))

    def _list_training(self) -> Iterator[ShownSetting]:
        """Yield the keys of [training]."""
        config: Any = self.job.config
        filled_in = list_marked_fields(type(config), Mark.FILLED_IN)
        values = {
            key: value
            for key, value in _read_field_values(config).items()
            if key not in filled_in
        }
        method = methods.find_method(self.job.method)
        preset = find_training_defaults(method, self.preset, private=False)
        fixed: Mapping[str, Any] = {}
        if self.job.privacy is not None and method.dp is not None:
            fixed = method.dp.required_settings
        for setting in self._list_keys(("training",), values, preset):
            if setting.key in fixed and setting.origin in ("preset", "default"):
                yield replace(setting, origin="privacy", source="[privacy]")
            else:
                yield setting

    def _list_model(self) -> Iterator[ShownSetting]:
        """Yield the keys of [model], and of the tables inside it."""
        config: Any = self.job.config.model
        written = self.written.get("model", {})
        preset = find_model_defaults(self.preset, written)
        has_kind_key = any(field.name == "kind" for field in fields(config))
        if isinstance(config, ModelConfig) and not has_kind_key:
            yield from self._list_keys(("model",), {"kind": config.kind}, preset)

        settings = self._list_config(("model",), config, preset)
        names_architecture = "tagger" in written or "tagger" in preset
        if isinstance(config, TaggerConfig) and names_architecture:
            settings = _mark_architecture(settings, config.tagger)
        yield from settings

    def _list_other_tables(self) -> Iterator[ShownSetting]:
        """Yield the keys of the tables other than [training], [model] and sites."""
        tables: dict[str, Any] = {
            "federation": self.job.federation,
            "left_out": self.job.left_out,
            "privacy": self.job.privacy,
            "silos": self.job.silos,
            "synthetic": self.job.synthetic,
        }
        tables.update(self.job.kind.collect_tables(self.job))
        for name, values in tables.items():
            if isinstance(values, Mapping):
                yield from self._list_keys((name,), values)
            elif values is not None:
                yield from self._list_config((name,), values, self.preset.get(name, {}))

    def _list_sites(self) -> Iterator[ShownSetting]:
        """Yield the keys of each [sites.NAME]."""
        hidden = PLACE_KEYS if lacks_places(self.written) else frozenset()
        for name, site in self.job.sites.items():
            values = {
                key: value
                for key, value in _read_field_values(site).items()
                if key not in hidden
            }
            yield from self._list_keys(("sites", name), values)

    def _list_config(
        self, place: Place, config: Any, preset: Mapping[str, Any]
    ) -> Iterator[ShownSetting]:
        """Yield a table's keys, then those of the tables inside it."""
        values = _read_field_values(config)
        inner = {key: value for key, value in values.items() if is_dataclass(value)}
        keys = {key: value for key, value in values.items() if key not in inner}
        yield from self._list_keys(place, keys, preset)
        for name, value in inner.items():
            yield from self._list_config((*place, name), value, preset.get(name, {}))

    def _list_keys(
        self,
        place: Place,
        values: Mapping[str, Any],
        preset: Mapping[str, Any] | None = None,
    ) -> Iterator[ShownSetting]:
        """Yield the keys of one table.

        Args:
            place: The table, and the tables around it.
            values: The values of its keys.
            preset: The preset's values of the table.
        """
        written: Any = self.written
        for name in place:
            written = written.get(name, {})
        table = ".".join(place)
        for key, value in values.items():
            if key in written:
                yield self._show_written(place, key, written[key])
            elif preset and key in preset:
                source = f'preset "{self.preset_name}"'
                yield ShownSetting(table, key, to_toml_value(value), "preset", source)
            else:
                source = self._describe_default(place, key)
                yield ShownSetting(table, key, to_toml_value(value), "default", source)

    def _show_written(self, place: Place, key: str, value: Any) -> ShownSetting:
        """Return a key that the job's file or an assignment sets."""
        table = ".".join(place)
        where = (*place, key)
        if any(_covers(assigned, where) for assigned in self.assigned):
            source = "overrides the job"
            return ShownSetting(table, key, to_toml_value(value), "setting", source)
        line = _find_line(self.lines, where)
        source = "job" if line is None else f"job, line {line}"
        return ShownSetting(table, key, to_toml_value(value), "job", source, line)

    def _describe_default(self, place: Place, key: str) -> str:
        """Return the origin of a default, in words."""
        if (place, key) == ((), "title"):
            return "default: the job's name"
        if (place, key) == (("federation",), "secure_sum") and len(self.job.sites) > 2:
            return "default; true between real sites"
        return "default"


def _read_field_values(config: Any) -> dict[str, Any]:
    """Return the values of a dataclass by field, in the order of its fields."""
    return {each.name: getattr(config, each.name) for each in fields(config)}


def _mark_architecture(
    settings: Iterator[ShownSetting], tagger: str
) -> Iterator[ShownSetting]:
    """Yield the settings of a light tagger.

    A default that differs from that of the tagger's class was set by its architecture,
    and gets the origin "tagger".
    """
    defaults = {each.name: each.default for each in fields(TaggerConfig)}
    for setting in settings:
        differs = setting.value != to_toml_value(defaults.get(setting.key))
        if differs and setting.origin == "default":
            yield replace(setting, origin="tagger", source=f'tagger "{tagger}"')
        else:
            yield setting


def _covers(assigned: Place, where: Place) -> bool:
    """Return whether an assignment sets a key, or a table around the key.

    Args:
        assigned: The assigned place; "*" stands for any table.
        where: The place of the key.
    """
    return len(assigned) <= len(where) and all(
        name in ("*", part) for name, part in zip(assigned, where, strict=False)
    )


# ---- lines of a job's file -----------------------------------------------------------


def _find_lines(text: str) -> dict[Place, int]:
    """Return the line of each key and table of a TOML file, counted from 1.

    A key within an inline table or a multi-line value has no line of its own.
    """
    lines: dict[Place, int] = {}
    table: Place = ()
    open_quotes = ""  # quotes of a string that spans several lines
    for number, line in enumerate(text.split("\n"), 1):
        if not open_quotes:
            heading = _HEADING.fullmatch(line)
            assignment = _KEY.match(line)
            if heading:
                table = _split_dotted(heading[1])
                lines.setdefault(table, number)
            elif assignment:
                key = _split_dotted(assignment[1])
                lines.setdefault((*table, *key), number)
        open_quotes = _find_open_quotes(line, open_quotes)
    return lines


def _find_open_quotes(line: str, open_quotes: str) -> str:
    """Return the quotes of a string that goes on after a line; "" if none does.

    Args:
        line: The line.
        open_quotes: The quotes of a string that goes on from the line before.
    """
    for quotes in ('"""', "'''"):
        has_odd_number = line.count(quotes) % 2 == 1
        if has_odd_number and open_quotes == quotes:
            open_quotes = ""
        elif has_odd_number and not open_quotes:
            open_quotes = quotes
    return open_quotes


def _split_dotted(text: str) -> Place:
    """Return the parts of a dotted key without their quotes."""
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _find_line(lines: Mapping[Place, int], where: Place) -> int | None:
    """Return the line of a key, or of the innermost table around it that has a line."""
    for length in range(len(where), 0, -1):
        if where[:length] in lines:
            return lines[where[:length]]
    return None


# ---- TOML ----------------------------------------------------------------------------


def _format_line(setting: ShownSetting) -> str:
    """Return a setting as a line of TOML, with its source as a comment."""
    if setting.value is None:
        text = f"# {setting.key} has no value"
    else:
        text = f"{format_key(setting.key)} = {format_value(setting.value)}"
    return f"{text:<{_WIDTH}}  # {setting.source}"
