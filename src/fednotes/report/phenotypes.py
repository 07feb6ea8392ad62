"""The part of the report that shows phenotypes: each disease over the sites, then site by site."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fednotes.report.charts import dot_chart, figure, legend
from fednotes.report.run import Json, Run, escape, get, mapping
from fednotes.report.scores import cell, interval

_OPEN = 3  # sites; of more, the tables are folded
_DOTS = (("f1", "Macro F1 of each disease"), ("auroc", "AUROC of each disease"))
_MEANS = (("precision", "P"), ("recall", "R"), ("f1", "F1"), ("auroc", "AUROC"))
_CLASSES = ("present", "absent", "questionable")
_SCORES = ("precision", "recall", "f1")
_DEFINED = (
    "<b>P, R, F1</b> of a disease: the mean over its classes, as in Table 3 of Liu, Dligach and "
    "Miller 2019; the last row is the plain mean of the diseases. A class counts where it is in "
    "labels or predictions; a patient without a label for a disease does not count for it."
)


def phenotype_scores(run: Run) -> str:
    """Dots and a table of diseases (means over sites), then a table for each site.

    Empty where no disease was judged.
    """
    diseases = _diseases(run)
    if not diseases:
        return ""
    mean = {c: _of(mapping(run.summary.get("mean")), c) for c in run.conditions}
    conditions = [c for c in run.conditions if mean[c]]
    looks = {name: look for look, name in enumerate(run.conditions)}
    charts = []
    for key, title in _DOTS:
        rows = [
            (d, found)
            for d in diseases
            if (found := {c: v for c in conditions if (v := get(mean[c], d, key)) is not None})
        ]
        if rows:
            charts.append(dot_chart(f"disease-{key}", title, f"{title} by condition", rows, looks))
    picture = ""
    if charts:
        caption = "Diseases on the test patients, mean of the sites; axes need not begin at zero."
        picture = legend(run.conditions) + figure(charts, caption, run.source)
    tables = "".join(_site_table(run, name, mapping(site)) for name, site in run.sites.items())
    return (
        f"<section>\n<h2>Phenotypes</h2>\n<p>{_DEFINED}</p>\n{picture}"
        f"{_mean_table(diseases, conditions, mean)}{tables}</section>\n"
    )


def _of(scores: Json, condition: str) -> Json:
    """Disease → scores, of a site or of the mean, under a condition."""
    return mapping(mapping(scores.get(condition)).get("by_output"))


def _diseases(run: Run) -> list[str]:
    """In the order of the files."""
    groups = [mapping(run.summary.get("mean")), *map(mapping, run.sites.values())]
    return list(dict.fromkeys(d for g in groups for c in run.conditions for d in _of(g, c)))


def _mean_table(diseases: Sequence[str], conditions: Sequence[str], mean: Json) -> str:
    """The paper's Table 3 with a group of columns for each condition."""
    if not conditions:
        return ""
    top = "".join(
        f'<th scope="colgroup" colspan="{len(_MEANS)}">{escape(c)}</th>' for c in conditions
    )
    second = "".join(f'<th scope="col">{head}</th>' for _, head in _MEANS) * len(conditions)
    rows = [_disease_row(d, conditions, mean) for d in diseases]
    average = "".join(
        cell(_average([get(mean[c], disease, key) for disease in diseases]))
        for c in conditions
        for key, _ in _MEANS
    )
    return (
        '<div class="wide">\n<table>\n<thead>\n'
        f'<tr><th scope="col" class="text" rowspan="2">Disease</th>{top}</tr>\n'
        f"<tr>{second}</tr>\n</thead>\n<tbody>\n{''.join(rows)}</tbody>\n"
        f'<tbody class="mean">\n<tr><th scope="row">Average</th>{average}</tr>\n</tbody>\n'
        "</table>\n</div>\n"
    )


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _disease_row(disease: str, conditions: Sequence[str], mean: Json) -> str:
    known = [v for c in conditions if (v := get(mean[c], disease, "f1")) is not None]
    best = max(known, default=None) if len(known) > 1 else None
    cells = []
    for condition in conditions:
        for key, _ in _MEANS:
            value = get(mean[condition], disease, key)
            bold = key == "f1" and value is not None and value == best
            cells.append(cell(value, "best" if bold else ""))
    return f'<tr><th scope="row" class="sub">{escape(disease)}</th>{"".join(cells)}</tr>\n'


def _site_table(run: Run, name: str, site: Json) -> str:
    """Each disease under each condition, with what a decision needs: of "present" too."""
    found = {c: tables for c in run.conditions if (tables := _of(site, c))}
    diseases = list(dict.fromkeys(d for tables in found.values() for d in tables))
    if not diseases:
        return ""
    kinds = [
        kind
        for kind in _CLASSES
        if any(get(t, d, kind, "support") for t in found.values() for d in diseases)
    ]
    heads = "".join(f'<th scope="col" rowspan="2">{kind.capitalize()}</th>' for kind in kinds)
    three = '<th scope="col">P</th><th scope="col">R</th><th scope="col">F1</th>'
    bodies = "".join(_site_rows(d, kinds, found) for d in diseases)
    opened = " open" if len(run.sites) <= _OPEN else ""
    return (
        f"<details{opened}>\n<summary>{escape(name)}</summary>\n"
        '<div class="wide">\n<table>\n<thead>\n'
        f'<tr><th scope="col" class="text" rowspan="2">Disease</th>{heads}'
        '<th scope="col" class="text" rowspan="2">Trained</th>'
        '<th scope="colgroup" colspan="3">Macro</th>'
        '<th scope="colgroup" colspan="3">Present alone</th>'
        '<th scope="col" rowspan="2">AUROC</th><th scope="col" rowspan="2">AUPRC</th></tr>\n'
        f"<tr>{three}{three}</tr>\n</thead>\n{bodies}</table>\n</div>\n</details>\n"
    )


def _site_rows(disease: str, kinds: Sequence[str], found: dict[str, Json]) -> str:
    """A group of rows, a condition each; the numbers of patients stand in the first."""
    rows = []
    first = f' rowspan="{len(found)}"'
    counts = [max(get(t, disease, kind, "support") or 0 for t in found.values()) for kind in kinds]
    patients = "".join(f"<td{first}>{count:.0f}</td>" for count in counts)
    for place, (condition, tables) in enumerate(found.items()):
        scores = mapping(tables.get(disease))
        head = f'<th scope="rowgroup"{first} class="sub">{escape(disease)}</th>{patients}'
        cells = [cell(get(scores, kind, m)) for kind in ("macro", "present") for m in _SCORES]
        for key in ("auroc", "auprc"):
            area = mapping(scores.get(key))
            bounds = interval([area.get("low"), area.get("high")])
            cells.append(cell(get(area, "value"), "", bounds))
        rows.append(
            f"<tr>{head if place == 0 else ''}"
            f'<th scope="row" class="sub">{escape(condition)}</th>{"".join(cells)}</tr>\n'
        )
    return f"<tbody>\n{''.join(rows)}</tbody>\n"
