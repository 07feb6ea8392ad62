"""What a tracker may know of a run: settings, curves, scores and files.

Everything comes from the files of the run's folder, which hold no text of a note. Paths
of notes are left out, and of other paths only the last part remains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from fednotes.core import bounds
from fednotes.core.errors import DataError, FednotesError
from fednotes.core.parsing import as_mapping, find_number, is_within
from fednotes.core.store import write_text
from fednotes.jobs.card import CARD
from fednotes.jobs.declaration import drop_places
from fednotes.jobs.metrics_file import METRICS
from fednotes.jobs.results import SUMMARY, RunResult, read_result
from fednotes.jobs.run_files import read_run_text
from fednotes.jobs.run_folder import read_result_so_far
from fednotes.jobs.seeds import list_seed_folders
from fednotes.jobs.show import show_job
from fednotes.report.html import write_report

MEAN = "mean"  # in place of a site: the mean over all sites
_COSTS = ("rounds", "seconds", "bytes_up", "bytes_down", "examples")
# Values of an evaluation that are not curves of the whole part.
_NOT_CURVES = {"part", "condition", "round", "site", "sites", "took_part"}
_SITES_PREFIX = "sites."  # of the names of all settings in the tables of sites
_MAX_ROUNDS = 2**53  # tools store a round in 64 bits
# Where the federated model of a run is; a run may have one for each site.
_FEDERATED_MODELS = ("model", "federated/model", "federated/sites/*/model")


@dataclass(frozen=True)
class RunFacts:
    """A run before or after its end.

    Attributes:
        name: Name of the run.
        title: Title of the job.
        method: Name of the method.
        settings: The job's effective settings, by table and key.
        toml: The job as a TOML file, without paths of notes.
    """

    name: str
    title: str
    method: str
    settings: Mapping[str, str]
    toml: str


@dataclass(frozen=True)
class Point:
    """Values of one curve's place in a round.

    Attributes:
        condition: The condition, such as "federated".
        site: The site; "" for all sites of the part.
        round: Number of the round, from 1.
        values: The values by name.
    """

    condition: str
    site: str
    round: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class FinalScores:
    """Scores on test data, and other values of a condition.

    Attributes:
        condition: The condition.
        site: The site; `MEAN` for the mean over the sites, "" for values of the
            condition as a whole: its costs and its ε.
        values: The values by name.
    """

    condition: str
    site: str
    values: Mapping[str, float] = field(default_factory=dict)


# ---- settings ------------------------------------------------------------------------


def read_run_facts(folder: Path) -> RunFacts:
    """Return the facts of a run that starts or has ended.

    Raises:
        FednotesError: The folder is not that of a run.
    """
    progress = read_result_so_far(folder)
    table = _read_public_table(progress.config)
    settings: dict[str, str] = {}
    toml = ""
    try:
        shown = show_job(table)
    except FednotesError:  # a job of another version, or of a deleted application
        settings = dict(_name_values(table))
    else:
        toml = shown.to_toml()
        for setting in shown.settings:
            place = f"{setting.table}.{setting.key}".removeprefix(".")
            if setting.value is not None and not place.startswith(_SITES_PREFIX):
                settings[place] = str(setting.value)
    title = progress.title or str(table.get("title", ""))
    seed = table.get("seed", progress.seed)
    is_seed = folder in list_seed_folders(folder.parent).values()
    name = folder.parent.name if is_seed else folder.name
    if seed is not None:
        name = f"{name}, seed {seed}"
    method = progress.method or str(table.get("method", ""))
    return RunFacts(name, title or folder.name, method, settings, toml)


def _read_public_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a run's job without paths.

    Real sites' runs hold them in a declaration, under "job".
    """
    table = config
    if "method" not in config and isinstance(config.get("job"), Mapping):
        table = config["job"]
    public = {key: _drop_folders(value) for key, value in table.items()}
    sites = {
        name: drop_places(as_mapping(site))
        for name, site in as_mapping(public.get("sites")).items()
    }
    if sites:
        public["sites"] = sites
    return public


def _drop_folders(value: Any) -> Any:
    """Return a value of a table with only the last part of each path."""
    if isinstance(value, Mapping):
        return {key: _drop_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_drop_folders(item) for item in value]
    if isinstance(value, str) and (
        PurePath(value).is_absolute() or value.startswith(("~", "./", "../"))
    ):
        return PurePath(value).name
    return value


def _name_values(
    table: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the name of each value in nested tables, and the value as text.

    A name is the keys that lead to the value, joined by dots. The tables of sites are
    left out.

    Args:
        table: The tables.
        prefix: The beginning of the names.
    """
    for key, value in table.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            yield name, str(value)
        elif f"{name}." != _SITES_PREFIX:
            yield from _name_values(value, f"{name}.")


# ---- curves and scores ---------------------------------------------------------------


def list_points(entry: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the points of an evaluation, as metrics.jsonl has it.

    An evaluation in a round that no run has, as a damaged file names it, has none.
    """
    condition = str(entry.get("condition") or "federated")
    round_index = find_number(entry, "round") if "round" in entry else 0.0
    if round_index is None or not 0 <= round_index < _MAX_ROUNDS:
        return
    round_number = int(round_index) + 1
    scores_of_part = {
        key: value for key, value in entry.items() if key not in _NOT_CURVES
    }
    by_site = {str(entry.get("site") or ""): _keep_numbers(scores_of_part)}
    for site, of_site in as_mapping(entry.get("sites")).items():
        # A site that trains alone has the values of the whole part, too.
        by_site.setdefault(str(site), {}).update(_keep_numbers(as_mapping(of_site)))
    for site, values in by_site.items():
        if values:
            yield Point(condition, site, round_number, values)


def list_final_scores(result: RunResult) -> Iterator[FinalScores]:
    """Yield the scores on test data, the costs and the ε of a run that has ended."""
    for row in result.table():
        values = _keep_numbers(row)
        if values:
            yield FinalScores(str(row["condition"]), str(row["site"]), values)
    for condition in dict.fromkeys((*result.conditions, *result.privacy)):
        costs = as_mapping(result.conditions.get(condition))
        values = _keep_numbers({name: costs.get(name) for name in _COSTS})
        guarantee = as_mapping(result.privacy.get(condition))
        values |= _keep_numbers(
            {name: guarantee.get(name) for name in ("epsilon", "delta")}
        )
        if values:
            yield FinalScores(condition, "", values)


def _keep_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    numbers = {}
    for key in values:
        value = find_number(values, key)
        if value is not None:
            numbers[str(key)] = float(value)
    return numbers


# ---- files ---------------------------------------------------------------------------


def write_artifacts(folder: Path, out: Path) -> list[Path]:
    """Write those files of a run that a tracker keeps to an empty folder.

    These are job.toml and, once the run has ended, summary.json, report.html and the
    cards of the federated models, all without paths of notes.

    Args:
        folder: Folder of the run.
        out: The empty folder.

    Returns:
        The files.

    Raises:
        DataError: A file of the run is damaged, or a card is another file of this
            machine.
    """
    toml = read_run_facts(folder).toml
    if toml:
        write_text(out / "job.toml", toml)
    if (folder / SUMMARY).is_file():
        result = read_result(folder)
        config = _read_public_table(result.config)
        result.model_copy(update={"config": config, "command": ""}).write(out)
        if (folder / METRICS).is_file():
            write_text(out / METRICS, read_run_text(folder / METRICS))
        write_report(out)
        (out / METRICS).unlink(missing_ok=True)
        for model in _find_federated_models(folder):
            site = model.parent.name if model.parent.parent.name == "sites" else ""
            name = f"model_card_{site}.md" if site else "model_card.md"
            write_text(out / name, _read_card(model / CARD, folder))
    return sorted(path for path in out.iterdir() if path.is_file())


def _read_card(card: Path, run: Path) -> str:
    """Return the text of a model's card.

    The tracker's server and its users will read it. In a run of a stranger, a link may
    be in its place, or in that of a folder above it.

    Raises:
        DataError: The card is not in the run's folder, is too large, or is not text.
    """
    if not is_within(card, (run,)):
        raise DataError(
            f"{card}: is a link to a file outside the run, which would be "
            "sent: replace the link by a copy of that file if you trust it"
        )
    text = read_run_text(card)
    if len(text) > bounds.FILE:
        raise DataError(f"{card}: over {bounds.FILE:,} characters: shorten it")
    return text


def _find_federated_models(folder: Path) -> Iterator[Path]:
    """Yield the folders of the federated models that have a card."""
    for place in _FEDERATED_MODELS:
        for model in sorted(folder.glob(place)):
            if (model / CARD).is_file():
                yield model
