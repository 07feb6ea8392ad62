"""The card of a saved model: what it is, how it was made, what it can do, as a
README.md.

It is written for people who get the model and know nothing of the run, in Hugging
Face's form. It has sums and means over sites, the scores of the site whose model it is,
and no name of a site: the others' sizes and scores are theirs to tell.
`templates/card.md` has the words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from fednotes.core.cleaning import one_line
from fednotes.core.errors import ModelError
from fednotes.core.parsing import mapping, number, read_json_table
from fednotes.core.store import write_text
from fednotes.jobs.audit_result import read_audit
from fednotes.jobs.patient_models import file_names, kind_of
from fednotes.jobs.results import CONDITIONS, PROMISED, SUMMARY, RunResult, read_result
from fednotes.jobs.score_layouts import SCORES

CARD, SCORES_FILE = "README.md", "scores.json"
# Files that describe a model which finds mentions, in the order in which they are
# looked for.
_DESCRIBED = ("tagger.json", "model.json", "config.json")
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#$&])")  # in Markdown
# of a job
_HIDDEN = ("sites", "synthetic", "silos", "title", "method", "seed", "conditions")
# sites of which what is one's own, and the sum or the mean, tell the other's
_TELLING = 2
_ABOVE = 6  # folders in which a model's run is looked for


def write_cards(run: Path, own: OwnRun | None = None) -> None:
    """Lay a card beside each model of a run that has none: a person may have edited
    one.

    own: what a real site knows of the run, in place of what its folder says.
    """
    for folder in sorted(run.rglob("model")):
        if not (folder / CARD).exists() and _described(folder):
            write_text(folder / CARD, card(folder, run, own))


class OwnRun(NamedTuple):
    """What a real site knows of a run: its own name, the result without what is of
    other sites, and the job's name and fingerprint."""

    site: str
    result: RunResult
    job: Mapping[str, str]


def card(model: Path, run: Path | None = None, known: OwnRun | None = None) -> str:
    """The card of a saved model.

    run: its run's folder; looked for above the model's if not given. Without one the
    card says what the model is, and the scores that lie beside it; known: and what a
    site knows of its run. Raises ModelError where there is no model, DataError for a
    damaged run.
    """
    facts = _described(model)
    if not facts:
        raise ModelError(f"{model}: no model here; name the folder that training wrote")
    above = [p for p in model.resolve().parents[:_ABOVE] if (p / SUMMARY).is_file()]
    place = run or next(iter(above), None)
    result, job, condition, site = RunResult(), dict[str, Any](), "federated", ""
    if known is not None:
        site, result, job = known.site, known.result, dict(known.job)
    elif place is not None:
        result, job = read_result(place), read_json_table(place / "job.json")
        parts = model.resolve().relative_to(place.resolve()).parts
        condition = next((p for p in parts if p in CONDITIONS), condition)
        site = parts[-2] if len(parts) > 2 and parts[-3] == "sites" else ""
    own = mapping(mapping(result.sites.get(site)).get(condition))
    own = own or read_json_table(model.parent / SCORES_FILE)
    of_all = len(result.sites) not in (0, _TELLING)  # whether sums and means are told
    whole = mapping(result.mean.get(condition)) if of_all else {}
    spent = mapping(result.conditions.get(condition))
    promised = mapping(mapping(result.model_dump().get("privacy")).get(condition))
    promised = promised or read_json_table(model.parent / PROMISED)
    # Alone, they are of trainings that are not this one; of what is private none may be
    # counted.
    if condition == "alone" or not of_all or promised:
        spent = {key: value for key, value in spent.items() if key != "examples"}
    environment = Environment(
        loader=PackageLoader("fednotes.jobs"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"plain": _plain, "quoted": _quoted, "code": _code}
    named = site in result.sites
    verdict = result.verdict(site if named else None) if named or of_all else None
    return environment.get_template("card.md").render(
        **_model(model, facts),
        result=result,
        verdict=verdict if condition == "federated" else None,
        condition=condition,
        of_site=bool(own),
        scores=list(_scores(own or whole)),
        mean=list(_scores(whole)) if own else [],
        types=list(_types(own or whole)),
        interval=result.interval(site, condition),
        spent=spent,
        mark=result.marks.get(condition, ""),
        audit=read_audit(place)
        if place is not None and condition == "federated"
        else None,
        secure=bool(mapping(result.config.get("federation")).get("secure_sum")),
        promised=promised,
        settings=[
            (k, v) for k, v in _flat(result.config) if k.split(".")[0] not in _HIDDEN
        ],
        job={key: str(job.get(key, "")) for key in ("job", "fingerprint")},
    )


def _described(model: Path) -> dict[str, Any]:
    """Return what a model's folder says of itself; nothing if it is no model's folder."""
    for name in (*file_names(), *_DESCRIBED):
        if facts := read_json_table(model / name):
            return facts
    return {}


def _model(model: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kind, labels and version of a model.

    Args:
        model: The model's folder.
        facts: What the folder says of itself.
    """
    labels = mapping(facts.get("tagset")).get("types")
    if "id2label" in facts:
        tags = [str(tag) for tag in mapping(facts["id2label"]).values()]
        labels = [*dict.fromkeys(tag.partition("-")[2] for tag in tags if "-" in tag)]
    own = facts.get("fednotes")
    patient_model = kind_of(model)
    if patient_model is not None:
        labels = patient_model.described_types(facts)
    return {
        "kind": facts.get("kind", "token-classifier"),
        "library": "transformers" if "id2label" in facts else "fednotes",
        "labels": [*map(str, labels)] if isinstance(labels, list | tuple) else [],
        "patients": patient_model is not None,
        "version": own.get("version", "?") if isinstance(own, dict) else own or "?",
    }


def _scores(scores: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Kind, measure and value of whatever was measured."""
    for kind, of in SCORES.items():
        for measure in of.measures:
            if (value := number(scores, kind, measure)) is not None:
                yield of.title, measure, value


def _types(
    scores: Mapping[str, Any],
) -> Iterator[tuple[str, float | None, float | None]]:
    """Of each type strict and relaxed F1; of each disease F1 and AUROC."""
    for name, of in mapping(scores.get("by_type")).items():
        yield name, number(of, "strict", "f1"), number(of, "relaxed", "f1")
    for name, of in mapping(scores.get("by_output")).items():
        yield name, number(of, "f1"), number(of, "auroc")


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            text = str(value)
            with suppress(ValueError):  # a place is nobody's business
                text = Path(text).name if "/" in text else text
            yield f"{above}{key}", text


def _plain(value: object) -> str:
    """Anybody's text as a line of Markdown."""
    return _SPECIAL.sub(r"\\\1", one_line(value, 200))


def _code(value: object) -> str:
    """Anybody's text between backticks."""
    return one_line(value, 200).replace("`", "'")


def _quoted(value: object) -> str:
    """Anybody's text in YAML, which has no halves of characters."""
    return json.dumps(one_line(value, 200), ensure_ascii=False)
