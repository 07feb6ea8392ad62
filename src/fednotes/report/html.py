"""A report of one run as a single HTML file: no script, no font, nothing from a network.

Reads the result files alone (`summary.json`, and `metrics.jsonl` where there is one), so that
no note can get into it. What a file lacks is left out of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fednotes.core.cleaning import one_line
from fednotes.core.store import write_out, write_text
from fednotes.jobs.results import (
    CONDITIONS,
    RunResult,
    Scores,
    duration,
    mapping,
    number,
    read_lines,
    read_result,
    size,
)
from fednotes.report.curves import Course, Figure, dot_chart

_MEASURES = (
    ("strict", "Strict", ("precision", "recall", "f1")),
    ("relaxed", "Relaxed", ("precision", "recall", "f1")),
    ("relaxed_one_to_one", "One to one", ("f1",)),
    ("unseen", "Unseen forms", ("f1",)),
    ("masked", "Masked words", ("loss", "perplexity", "accuracy")),
    ("next_sentence", "Next sentence", ("accuracy",)),
    ("phenotypes", "Macro", ("precision", "recall", "f1")),
    ("present", "Present", ("precision", "recall", "f1")),
    ("ranking", "Ranking", ("auroc", "auprc")),
    ("calibration", "Calibration", ("brier",)),
    ("codes", "Codes (stage 1)", ("loss", "auroc")),
)
_LEADS = ("strict", "phenotypes")  # whose F1 is compared with that of the site alone
_SHORT = {"precision": "P", "recall": "R", "f1": "F1", "auroc": "AUROC", "auprc": "AUPRC"}
_DOTS = (  # kind, measure, of a chart, of a tile
    ("strict", "f1", "Strict F1", "strict F1"),
    ("relaxed", "f1", "Relaxed F1", ""),
    ("masked", "accuracy", "Masked words guessed", "words guessed"),
    ("phenotypes", "f1", "Macro F1", "macro F1"),
    ("ranking", "auroc", "AUROC", "AUROC"),
    ("codes", "auroc", "AUROC of codes", "AUROC of codes"),  # where they are all that was learnt
)
_OPEN = 3  # sites; of more, the tables of diseases are folded
_OF_A_DISEASE = ("precision", "recall", "f1", "auroc")


def write_report(run_directory: Path, output: Path | None = None) -> Path:
    """Write the report of a run, by default to `report.html` beside its results.

    Raises DataError if `summary.json` is missing or a result file is not what it should be,
    FednotesError if the report cannot be written.
    """
    page = _Page(read_result(run_directory), read_lines(run_directory))
    target = Path(output) if output is not None else run_directory / "report.html"
    (write_text if output is None else write_out)(target, page.html())
    return target


class _Page:
    """What a page shows of a run; the words and tables are in `templates/`."""

    def __init__(self, result: RunResult, lines: Sequence[Mapping[str, Any]]) -> None:
        names = {str(line.get("condition", "federated")) for line in lines}
        for table in (*result.sites.values(), result.mean):
            names.update(table)
        known = [name for name in CONDITIONS if name in names]
        self.conditions = [*known, *sorted(names - set(CONDITIONS))]
        self.result, self.lines = result, lines
        self.kinds = {kind for c in self._everything() for kind in c}

    def html(self) -> str:
        """The page."""
        environment = Environment(
            loader=PackageLoader("fednotes.report"),
            autoescape=True,
            undefined=StrictUndefined,
            # Result files hold names that other sites chose.
            finalize=lambda value: one_line(value) if type(value) is str else value,
        )
        environment.globals |= {"number": number, "most": _most}
        result = self.result
        course = Course(self.lines, self.conditions, self._of_patients())
        given = (result.command, result.config.get("command"), result.run)
        groups = [
            (name, own, mean)
            for name, site, mean in self._groups()
            if (own := {c: scores for c, scores in site.items() if scores})
        ]
        return environment.get_template("report.html").render(
            result=result,
            title=result.title or f"{result.method or 'fednotes'} run",
            command=next((str(x) for x in given if x), ""),
            conditions=self.conditions,
            tiles=list(self._tiles()),
            judged=self._judged(),
            groups=groups,
            dots=self._dots(),
            measures=[m for m in _MEASURES if self._has(m[0], m[2])],
            leads=_LEADS,
            lead=next((m[0] for m in _MEASURES if m[0] in _LEADS and self._has(m[0], m[2])), ""),
            short=_SHORT,
            training=course.training(),
            undrawn=course.undrawn,
            phenotypes=self._phenotypes(),
            types=list(self._types()),
            bytes=course.bytes_sent(result),
            settings=[
                ("Configuration", list(_flat(result.config))),
                ("Versions", list(_flat(result.versions))),
            ],
        )

    def _groups(self) -> Iterator[tuple[str, Mapping[str, Scores], bool]]:
        """A name, its scores by condition, and whether it is the mean of the others."""
        yield from ((name, site, False) for name, site in self.result.sites.items())
        if self.result.mean:
            yield "Mean of sites", self.result.mean, True

    def _everything(self) -> Iterator[Scores]:
        return (scores for _, site, _ in self._groups() for scores in site.values())

    def _has(self, kind: str, measures: Iterable[str]) -> bool:
        return any(
            number(scores, kind, measure) is not None
            for scores in self._everything()
            for measure in measures
        )

    def _of_patients(self) -> bool:
        mean = self.result.mean.values()
        if not any(mean):  # nothing was held out to be judged
            return self.result.holds == "patients"
        return any({"phenotypes", "codes"} & scores.keys() for scores in mean)

    def _judged(self) -> str:
        if "masked" in self.kinds:
            return "words"
        return "patients" if self.kinds & {"phenotypes", "codes"} else "mentions"

    def _tiles(self) -> Iterator[tuple[str, str, str]]:
        result = self.result
        for kind, measure, _, what in _DOTS:
            diseases = any("phenotypes" in scores for scores in result.mean.values())
            if not what or (diseases and kind == "codes"):
                continue  # what stage 1 learns from, not what the run is for
            alone = number(result.mean, "alone", kind, measure)
            for name in self.conditions:
                score = number(result.mean, name, kind, measure)
                if score is not None:
                    compared = alone is not None and name != "alone"
                    against = f", {score - (alone or 0):+.3f}" if compared else ""
                    yield name.capitalize(), f"{score:.3f}", f"mean {what}{against}"
        if result.sites:
            yield "Sites", str(len(result.sites)), ""
        if result.seconds is not None:
            yield "Time", duration(result.seconds), ""
        up, down = result.bytes_up, result.bytes_down
        if up is not None and down is not None:
            yield "Bytes sent", size(up + down), f"{size(up)} up, {size(down)} down"

    def _dots(self) -> Figure | None:
        charts = []
        for kind, measure, title, _ in _DOTS:
            rows = {
                name: found
                for name, site, _ in self._groups()
                if (found := self._by_condition(site, kind, measure))
            }
            if rows and not (kind == "codes" and "phenotypes" in self.kinds):
                charts.append(dot_chart(f"dots-{kind}", title, rows, self.conditions))
        what = {
            "words": "Held-out notes",
            "patients": "Scores on the test patients",
            "mentions": "F1 on the test sets",
        }[self._judged()]
        return Figure(charts, f"{what}; the axis need not begin at zero.") if charts else None

    def _by_condition(self, scores: Mapping[str, object], *path: str) -> dict[str, float]:
        """The number at a path under each condition that has it."""
        found = {c: number(scores, c, *path) for c in self.conditions}
        return {c: value for c, value in found.items() if value is not None}

    def _types(self) -> Iterator[tuple[str, list[str], list[Any]]]:
        """Of each site: the conditions, and a row for each entity type."""
        for name, site in self.result.sites.items():
            found = _tables(site, self.conditions, "by_type")
            rows = []
            for kind in sorted({kind for table in found.values() for kind in table}):
                counts = (number(table, kind, "support") for table in found.values())
                support = next((n for n in counts if n is not None), None)
                f1s = [
                    _type_f1(table.get(kind), of)
                    for of in ("strict", "relaxed")
                    for table in found.values()
                ]
                rows.append((kind, support, f1s))
            if rows:
                yield name, list(found), rows

    def _phenotypes(self) -> dict[str, Any] | None:
        """Dots and a table of diseases (means over sites), and what each site's table shows."""
        result = self.result
        mean = _tables(result.mean, self.conditions, "by_output")
        by_site = {n: _tables(s, self.conditions, "by_output") for n, s in result.sites.items()}
        diseases = _names([mean, *by_site.values()])
        if not diseases:
            return None
        charts, rows = [], []
        for key, title in (("f1", "Macro F1 of each disease"), ("auroc", "AUROC of each disease")):
            found = {d: self._by_condition(mean, d, key) for d in diseases}
            if kept := {d: row for d, row in found.items() if row}:
                charts.append(dot_chart(f"disease-{key}", title, kept, self.conditions))
        for d in diseases:
            f1 = [*self._by_condition(mean, d, "f1").values()]
            best = max(f1) if len(f1) > 1 else None
            values = [(key, number(t, d, key)) for t in mean.values() for key in _OF_A_DISEASE]
            rows.append(
                (
                    d,
                    [
                        (v, "best" if k == "f1" and v is not None and v == best else "")
                        for k, v in values
                    ],
                )
            )
        columns = zip(*([value for value, _ in values] for _, values in rows), strict=True)
        known = ([v for v in column if v is not None] for column in columns)
        return {
            "dots": Figure(
                charts,
                "Diseases on the test patients, mean of the sites; axes need not begin at zero.",
            )
            if charts
            else None,
            "conditions": list(mean),
            "heads": [_SHORT[key] for key in _OF_A_DISEASE],
            "rows": rows,
            "average": [fmean(values) if values else None for values in known],
            "sites": [
                (name, len(result.sites) > _OPEN, _classes(found), found, _names([found]))
                for name, found in by_site.items()
                if _names([found])
            ],
        }


def _tables(
    site: Mapping[str, object], conditions: Sequence[str], kind: str
) -> dict[str, Mapping[str, Any]]:
    """Of each condition that has it, a table of scores by type or by disease."""
    found = {c: mapping(mapping(site.get(c)).get(kind)) for c in conditions}
    return {c: table for c, table in found.items() if table}


def _names(groups: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Diseases, in the order of the files."""
    return list(dict.fromkeys(d for group in groups for table in group.values() for d in table))


def _classes(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The classes that any patient has of any disease."""
    kinds = ("present", "absent", "questionable")
    return [
        k for k in kinds if any(_most(found.values(), d, k, "support") for d in _names([found]))
    ]


def _most(tables: Iterable[object], *path: str) -> float:
    return max(number(table, *path) or 0 for table in tables)


def _type_f1(scores: object, of: str) -> float | None:
    """F1 under a definition; plain {precision, recall, f1} counts as strict."""
    f1 = number(scores, of, "f1")
    return number(scores, "f1") if f1 is None and of == "strict" else f1


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted key, value)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, inner in enumerate(value, 1):
            yield from _flat(inner, f"{prefix}.{place}")
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
    elif value is not None and prefix:
        yield prefix, str(value)
