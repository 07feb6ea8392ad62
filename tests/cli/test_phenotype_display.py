"""Tables and hints of phenotyping runs in a terminal, from invented scores."""

from __future__ import annotations

import io
import re
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from phenotype_patients import DISEASES, SPACE, VOCABULARY, sites_of
from phenotype_scores import CONDITIONS, OUTPUTS, codes_alone, site_score, summary, summary_of
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fednotes.cli import display
from fednotes.cli.display import count_tables
from fednotes.jobs.kinds.patients import KIND
from fednotes.jobs.results import RunResult
from fednotes.jobs.simulate import nothing_found
from fednotes.patients.cohort import Bags, Cohort, SitePatients


def result_table(values: dict[str, Any]) -> Table:
    return display.result_table(RunResult(**values))


def disease_table(values: dict[str, Any]) -> Table | None:
    return display.disease_table(RunResult(**values))


def nothing_judged(values: dict[str, Any]) -> str:
    return display.nothing_judged(RunResult(**values))


def shown(table: Table | None, width: int = 200) -> list[list[str]]:
    """The words of each row that has any."""
    assert table is not None
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    rows = [re.sub(r"[^\w.,/–… %-]", " ", line).split() for line in out.getvalue().splitlines()]
    return [row for row in rows if row]


def row(table: Table | None, name: str) -> list[str]:
    return next(r[1:] for r in shown(table) if r[0] == name)


def numbers(scores: dict[str, Any]) -> list[str]:
    return [f"{100 * scores['phenotypes']['f1']:.1f}", f"{scores['ranking']['auroc']:.3f}"]


def test_the_result_table_has_macro_f1_and_auroc() -> None:
    values = summary()
    for site, scores in values["sites"].items():
        assert row(result_table(values), site) == [
            cell for c in CONDITIONS for cell in numbers(scores[c])
        ]
    assert row(result_table(values), "mean") == [
        cell for c in CONDITIONS for cell in numbers(values["mean"][c])
    ]


def test_a_title_is_shown_as_it_is() -> None:
    """Square brackets are no markup."""
    values = summary_of({"a": {"federated": codes_alone(1)}}) | {"title": "ADR [/v2]"}
    title = result_table(values).title
    assert isinstance(title, str)
    assert Text.from_markup(title).plain.startswith("ADR [/v2] (")


def test_stage_1_alone_shows_its_codes() -> None:
    values = summary_of({"a": {"federated": codes_alone(1)}, "b": {"federated": codes_alone(3)}})
    assert row(result_table(values), "b") == ["0.330", "0.730"]
    assert row(result_table(values), "mean") == ["0.320", "0.720"]
    assert disease_table(values) is None


def test_sites_without_labels_are_counted_not_shown() -> None:
    sites = {"a": {"federated": site_score(1)}, "codes": {"federated": codes_alone(2)}, "n": {}}
    sites["n"] = {"federated": {}}
    lines = shown(result_table(summary_of(sites)))
    words = " ".join(word for line in lines for word in line)
    assert "2 more sites have no labelled test patient" in words
    assert not {"codes", "n"} & {line[0] for line in lines}


def test_without_test_patients_it_is_said() -> None:
    """No table of masked words for patients; a run with any score has nothing to say."""
    bare = summary_of({"a": {"alone": {}, "federated": {}}, "b": {"alone": {}, "federated": {}}})
    assert nothing_judged(bare).startswith("no test patient has a label or a code")
    assert nothing_judged(bare | {"method": "pretrain"}).startswith("nothing is held out")
    assert nothing_judged(summary()) == ""
    assert nothing_judged(summary_of({"a": {"alone": {}}, "b": {"alone": codes_alone(1)}})) == ""


def test_a_number_that_does_not_exist_is_a_dash() -> None:
    values = summary_of({"a": {"federated": site_score(1) | {"ranking": {"auroc": None}}}})
    assert row(result_table(values), "a")[1] == "–"


def test_the_disease_table_is_that_of_the_paper() -> None:
    """Each cell by hand from the sites' scores; the average is of the rows above it."""
    values = summary()
    table = disease_table(values)
    columns: list[list[float]] = []
    for name in OUTPUTS:
        cells = []
        for c in CONDITIONS:
            both = [values["sites"][s][c]["by_output"][name] for s in ("north", "south")]
            cells += [
                100 * fmean(each["macro"][k] for each in both)
                for k in ("precision", "recall", "f1")
            ]
            areas = [each["auroc"]["value"] for each in both]
            cells.append(np.nan if None in areas else 100 * fmean(areas))
        columns.append(cells)
        assert row(table, name) == ["–" if np.isnan(v) else f"{v:.1f}" for v in cells]
    means = np.nanmean(np.array(columns), axis=0)
    assert row(table, "average") == [f"{mean:.1f}" for mean in means]


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_cuts_names_not_numbers(width: int) -> None:
    values = summary()
    for scores in values["mean"].values():
        scores["by_output"]["Hypertriglyceridemia"] = scores["by_output"].pop("obesity")
    lines = shown(disease_table(values), width)
    wide = {tuple(line[-12:]) for line in shown(disease_table(values)) if len(line) == 13}
    narrow = {tuple(line[-12:]) for line in lines if len(line) == 13}
    assert narrow == wide
    assert len(narrow) == 5  # the heads, three diseases, the average


def test_hints_name_what_was_never_found() -> None:
    score = site_score(1)
    score["by_output"]["asthma"]["present"]["predicted"] = 0
    (never, lone) = nothing_found({"north": {"federated": score}})
    assert never.startswith("north, federated: predicts nobody to have asthma:")
    assert "all present or all absent for gout" in lone
    assert list(nothing_found({"north": {"federated": codes_alone(1)}})) == []


# what `check` shows


def test_patients_are_counted_by_part() -> None:
    """Counts by plain loops over the patients."""
    sites = sites_of(2)
    counted = shown(count_tables(KIND.counts(sites))[0])
    lines = [line for line in counted if {"train", "valid", "test"} & {*line}]
    for place, site in enumerate(sites):
        for at, part in enumerate(("train", "valid", "test")):
            cohort = getattr(site, part)
            sizes = [
                int(cohort.bags.offsets[i + 1] - cohort.bags.offsets[i]) for i in range(len(cohort))
            ]
            expected = [
                len(cohort),
                sum(p in site.codes for p in cohort.patients),
                sum(any(label >= 0 for label in labels) for labels in cohort.labels.tolist()),
                sizes.count(0),
                f"{fmean(sizes):.1f}",
                max(sizes),
            ]
            assert lines[3 * place + at][-6:] == list(map(str, expected))


def test_labels_of_test_patients() -> None:
    """By hand; a site without labels is left out, and no table is made without any."""
    labels = np.array([[1, 0, 2], [1, 1, -1], [0, -1, -1]], np.int8)
    bags = Bags.of([[0], [1], []], VOCABULARY)
    cohort = Cohort("a", ("x", "y", "z"), bags, labels, DISEASES)
    empty = cohort.take([])
    bare = Cohort("b", ("u",), Bags.of([[]], VOCABULARY), np.full((1, 3), -1), DISEASES)
    sites = (
        SitePatients("a", SPACE, empty, empty, cohort, {}),
        SitePatients("b", SPACE, empty, empty, bare, {}),
    )
    assert row(count_tables(KIND.counts(sites))[1], "asthma") == ["2/1/0"]
    assert row(count_tables(KIND.counts(sites))[1], "gout") == ["0/0/1"]
    assert len(KIND.counts(sites[1:])) == 1
    assert ["valid", "0", "0", "0", "0", "–", "–"] in shown(count_tables(KIND.counts(sites))[0])
