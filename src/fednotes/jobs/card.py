"""Write the card of a saved model: what it is, how it was trained, what it can do.

A card is a README.md in Hugging Face's format, for people who receive the model and
know nothing about the run. It has sums and means over the sites, and the scores of the
site that owns the model. It names no site, because only the sites themselves may
publish their sizes and scores. Its text is in `templates/card.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from fednotes.core.cleaning import clean_to_one_line
from fednotes.core.errors import ModelError
from fednotes.core.parsing import as_mapping, find_number, read_json_table
from fednotes.core.store import write_text
from fednotes.jobs.audit_result import Audit, read_audit
from fednotes.jobs.models import find_model_class, read_description
from fednotes.jobs.results import CONDITIONS, PROMISED, SUMMARY, RunResult, read_result
from fednotes.jobs.run_folder import JOB_RECORD
from fednotes.jobs.score_layouts import SCORES, format_change, format_score
from fednotes.jobs.text_templates import make_text_environment
from fednotes.metrics.gap import Verdict

CARD = "README.md"
SCORES_FILE = "scores.json"
# Where a run has models: one of a deployed run, one of a part or of a site alone, and
# one of each site of a part. Other folders, such as checkpoints, are not searched.
_MODEL_PLACES = (
    "model",
    "*/model",
    "*/*/model",
    "*/sites/*/model",
    "*/*/sites/*/model",
)

# Characters with a special meaning in Markdown.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#$&])")
# Tables and keys of a job that are not settings of its training.
_NO_SETTINGS = ("sites", "synthetic", "silos", "title", "method", "seed", "conditions")
# With two sites, a sum or mean and one site's own value reveal the other's.
_REVEALING_SITES = 2
# Number of folders above a model that are searched for its run.
_MAX_FOLDERS = 6
_MAX_CHARACTERS = 200  # maximum length of a text in a card


class OwnRun(NamedTuple):
    """What a real site knows about a run.

    Attributes:
        site: The site's name.
        result: The result of the run, without anything about other sites.
        job: The job's name as "job", and its "fingerprint".
    """

    site: str
    result: RunResult
    job: Mapping[str, str]


@dataclass(frozen=True)
class _Origin:
    """The part of a run that trained a model.

    Attributes:
        result: The result of the run; an empty one if the run is not known.
        job: The job's name as "job", and its "fingerprint".
        condition: The condition of the training.
        site: The site whose model it is; "" for a model of all sites.
        audit: The audit of the run, if it applies to the model.
    """

    result: RunResult
    job: Mapping[str, Any]
    condition: str = "federated"
    site: str = ""
    audit: Audit | None = None

    @property
    def reveals_no_site(self) -> bool:
        """Whether sums and means over the sites reveal nothing about a single site."""
        return len(self.result.sites) not in (0, _REVEALING_SITES)

    @property
    def verdict(self) -> Verdict | None:
        """The gain of a federated model from the federation, if it may be shown."""
        if self.condition != "federated":
            return None
        if self.site in self.result.sites:
            return self.result.verdict(self.site)
        return self.result.verdict() if self.reveals_no_site else None


def write_cards(run: Path, site_run: OwnRun | None = None) -> None:
    """Write a card beside each model of a run that has none.

    Existing cards stay, because a person may have edited them.

    Args:
        run: Folder of the run.
        site_run: What a real site knows about the run; None to read the folder.
    """
    folders = {folder for place in _MODEL_PLACES for folder in run.glob(place)}
    for folder in sorted(folders):
        if not (folder / CARD).exists() and read_description(folder):
            write_text(folder / CARD, render_card(folder, run, site_run))


def render_card(
    model: Path, run: Path | None = None, site_run: OwnRun | None = None
) -> str:
    """Return the card of a saved model.

    Args:
        model: Folder of the model.
        run: Folder of its run; if None, the folders above the model's are searched.
            Without a run, the card describes the model and any scores beside it.
        site_run: What a real site knows of the run; None to read the folder.

    Raises:
        ModelError: The folder contains no model.
        DataError: The run is damaged.
    """
    facts = read_description(model)
    if not facts:
        raise ModelError(f"{model}: no model here: give the folder that training wrote")
    origin = _find_origin(model, run, site_run)
    values = {
        **_describe_model(model, facts),
        **_describe_run(origin, model),
        **_describe_scores(origin, model),
    }
    return _make_environment().get_template("card.md").render(values)


def _make_environment() -> Environment:
    """Return the Jinja environment of the card, with filters that quote texts."""
    environment = make_text_environment()
    environment.filters |= {
        "plain": _to_markdown,
        "score": format_score,
        "change": format_change,
        "quoted": _to_yaml,
        "code": _to_code,
    }
    return environment


# ---- where the model comes from ------------------------------------------------------


def _find_origin(model: Path, run: Path | None, site_run: OwnRun | None) -> _Origin:
    """Return the part of a run that trained a model.

    Args:
        model: Folder of the model.
        run: Folder of its run; if None, the folders above the model's are searched.
        site_run: What a real site knows of the run; None to read the folder.
    """
    folder = run or _find_run(model)
    if site_run is not None:
        audit = None if folder is None else read_audit(folder)
        return _Origin(site_run.result, site_run.job, site=site_run.site, audit=audit)
    if folder is None:
        return _Origin(RunResult(), {})
    parts = model.resolve().relative_to(folder.resolve()).parts
    conditions = (part for part in parts if part in CONDITIONS)
    condition = next(conditions, "federated")
    is_of_site = len(parts) > 2 and parts[-3] == "sites"
    return _Origin(
        read_result(folder),
        read_json_table(folder / JOB_RECORD),
        condition=condition,
        site=parts[-2] if is_of_site else "",
        audit=read_audit(folder) if condition == "federated" else None,
    )


def _find_run(model: Path) -> Path | None:
    """Return the nearest folder above a model that holds a run, or None."""
    for folder in model.resolve().parents[:_MAX_FOLDERS]:
        if (folder / SUMMARY).is_file():
            return folder
    return None


# ---- what the card says --------------------------------------------------------------


def _describe_model(model: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's values about a model.

    Args:
        model: Folder of the model.
        facts: The content of its JSON file, which may be damaged.
    """
    saved_by = facts.get("fednotes")
    version = saved_by.get("version") if isinstance(saved_by, dict) else saved_by
    return {
        "description": find_model_class(model).describe(facts),
        "kind": facts.get("kind", "token-classifier"),
        "library": "transformers" if "id2label" in facts else "fednotes",
        "version": version or "?",
    }


def _describe_run(origin: _Origin, model: Path) -> dict[str, Any]:
    """Return the template's values about the training of a model."""
    result = origin.result
    condition = origin.condition
    promise = as_mapping(result.privacy.get(condition))
    promise = promise or read_json_table(model.parent / PROMISED)

    costs = dict(as_mapping(result.conditions.get(condition)))
    # Under "alone", the number covers the separate trainings of all sites. A privacy
    # guarantee covers the number of examples, too.
    if condition == "alone" or not origin.reveals_no_site or promise:
        costs.pop("examples", None)

    settings = [
        (key, value)
        for key, value in _list_public_settings(_select_settings(origin))
        if key.split(".")[0] not in _NO_SETTINGS
    ]
    return {
        "result": result,
        "condition": condition,
        "costs": costs,
        "promise": promise,
        "audit": origin.audit,
        "is_secure": bool(
            as_mapping(result.config.get("federation")).get("secure_sum")
        ),
        "settings": settings,
        "job": {key: str(origin.job.get(key, "")) for key in ("job", "fingerprint")},
    }


def _select_settings(origin: _Origin) -> Mapping[str, Any]:
    """Return the job's tables with the model and settings of the model's own site."""
    tables = dict(origin.result.config)
    if origin.condition == "pooled":
        return tables
    own = as_mapping(as_mapping(tables.get("sites")).get(origin.site))
    if own.get("model"):
        tables["model"] = own["model"]
    training = as_mapping(own.get("training"))
    tables["training"] = {**as_mapping(tables.get("training")), **training}
    return tables


def _describe_scores(origin: _Origin, model: Path) -> dict[str, Any]:
    """Return the template's values about the scores of a model."""
    result = origin.result
    condition = origin.condition
    site_scores = as_mapping(result.sites.get(origin.site, {}).get(condition))
    site_scores = site_scores or read_json_table(model.parent / SCORES_FILE)
    mean: Mapping[str, Any] = {}
    if origin.reveals_no_site:
        mean = as_mapping(result.mean.get(condition))
    shown = site_scores or mean
    means = {(title, measure): value for title, measure, value in _list_scores(mean)}
    return {
        "is_of_site": bool(site_scores),
        "scores": list(_list_scores(shown)),
        "means": means if site_scores else {},
        "lead_score": _find_lead_score(shown),
        "interval": result.interval(origin.site, condition),
        "verdict": origin.verdict,
        "mark": result.marks.get(condition, ""),
        "types": _make_type_table(shown),
    }


def _list_scores(scores: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield the title, measure and value of each available score."""
    for kind, layout in SCORES.items():
        for measure in layout.measures:
            value = find_number(scores, kind, measure)
            if value is not None:
                yield layout.title, measure, value


def _find_lead_score(scores: Mapping[str, Any]) -> str:
    """Return the name of the score for comparing models; "" if there is none."""
    for kind, layout in SCORES.items():
        if kind in scores and layout.is_lead and layout.dots is not None:
            return layout.dots.tile
    return ""


class _TypeTable(NamedTuple):
    """A table with two scores of each entity type, or of each disease.

    Attributes:
        heads: The headings of its three columns.
        rows: A name and its two scores; None for a missing score.
    """

    heads: tuple[str, str, str]
    rows: list[tuple[str, float | None, float | None]]


def _make_type_table(scores: Mapping[str, Any]) -> _TypeTable | None:
    """Return the scores of each entity type or disease; None if there are none."""
    by_type = as_mapping(scores.get("by_type"))
    if by_type:
        rows = [
            (
                name,
                find_number(type_scores, "strict", "f1"),
                find_number(type_scores, "relaxed", "f1"),
            )
            for name, type_scores in by_type.items()
        ]
        return _TypeTable(("type", "strict F1", "relaxed F1"), rows)
    by_disease = as_mapping(scores.get("by_output"))
    if by_disease:
        rows = [
            (name, find_number(disease, "f1"), find_number(disease, "auroc"))
            for name, disease in by_disease.items()
        ]
        return _TypeTable(("label", "F1", "AUROC"), rows)
    return None


def _list_public_settings(
    table: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables as text, under names such as "model.kind".

    A path is reduced to its last part, because the locations of files are private.
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _list_public_settings(value, f"{prefix}{key}.")
        else:
            text = str(value)
            yield f"{prefix}{key}", Path(text).name if "/" in text else text


# ---- text that anybody may have written ----------------------------------------------


def _to_markdown(value: object) -> str:
    """Return a value as one line of Markdown that shows it literally."""
    return _SPECIAL.sub(r"\\\1", clean_to_one_line(value, _MAX_CHARACTERS))


def _to_code(value: object) -> str:
    """Return a value as one line of text that can stand between backticks."""
    return clean_to_one_line(value, _MAX_CHARACTERS).replace("`", "'")


def _to_yaml(value: object) -> str:
    """Return a value as a quoted string of YAML."""
    return json.dumps(clean_to_one_line(value, _MAX_CHARACTERS), ensure_ascii=False)
