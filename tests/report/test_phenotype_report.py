"""The report of a phenotyping run: its numbers, its gaps, its curves."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from pages import Tree, charts, report
from phenotype_scores import CONDITIONS, OUTPUTS, codes_alone, site_score, summary, summary_of


def metrics() -> list[dict[str, Any]]:
    """Two rounds of stage 1, then two of stage 2; pooled lines are of the site "pooled"."""
    lines = []
    for condition in ("federated", "pooled"):
        sites = ("north", "south") if condition == "federated" else ("pooled",)
        for n in range(4):
            judged, own = ("valid_loss", "valid_loss") if n < 2 else ("valid_f1", "f1")
            by_site = {s: {"loss": 0.5, own: 0.2 + n / 10} for s in sites}
            both = {"loss": 1 / (n + 1), judged: 0.2 + n / 10, "sites": by_site}
            lines.append({"condition": condition, "round": n, **both})
    return lines


def test_every_score_of_a_site_is_in_its_row(tmp_path: Path) -> None:
    """To three places, intervals to two behind them."""
    values = summary()
    rows = Tree(report(tmp_path, values)).rows
    start = next(n for n, row in enumerate(rows) if row[:2] == ["north", "alone"])
    site = values["sites"]["north"]
    alone = site["alone"]["phenotypes"]["f1"]
    for n, condition in enumerate(CONDITIONS):
        scores = site[condition]
        macro = scores["phenotypes"]
        expected = [f"{macro[k]:.3f}" for k in ("precision", "recall", "f1")]
        expected.append("" if condition == "alone" else f"{macro['f1'] - alone:+.3f}")
        expected += [f"{scores['present'][k]:.3f}" for k in ("precision", "recall", "f1")]
        for key in ("auroc", "auprc"):
            low, high = scores["ranking"][f"{key}_interval"]
            expected.append(f"{scores['ranking'][key]:.3f} ({low:.2f}\u2013{high:.2f})")
        expected += [f"{scores['calibration']['brier']:.3f}"]
        expected += [f"{scores['codes'][k]:.3f}" for k in ("loss", "auroc")]
        assert rows[start + n][-len(expected) - 1 :] == [condition, *expected]


def test_diseases_have_a_table_and_an_average(tmp_path: Path) -> None:
    values = summary()
    rows = Tree(report(tmp_path, values)).rows
    keys = ("precision", "recall", "f1", "auroc")
    mean = {c: values["mean"][c]["by_output"] for c in CONDITIONS}
    for name in OUTPUTS:
        cells = [mean[c][name][key] for c in CONDITIONS for key in keys]
        assert [name, *("—" if v is None else f"{v:.3f}" for v in cells)] in rows
    averages = [
        fmean(v for name in OUTPUTS if (v := mean[c][name][key]) is not None)
        for c in CONDITIONS
        for key in keys
    ]
    assert ["Average", *(f"{v:.3f}" for v in averages)] in rows


def test_a_site_shows_patients_and_intervals_of_each_disease(tmp_path: Path) -> None:
    values = summary_of({"south": {"alone": site_score(5)}})
    rows = Tree(report(tmp_path, values)).rows
    found = values["sites"]["south"]["alone"]["by_output"]["obesity"]
    expected = ["obesity", str(found["present"]["support"]), str(found["absent"]["support"])]
    row = [r for r in rows if r[:4] == [*expected, "alone"]][-1]
    scores = [
        found[kind][k] for kind in ("macro", "present") for k in ("precision", "recall", "f1")
    ]
    area = found["auroc"]
    assert row[4:10] == [f"{v:.3f}" for v in scores]
    assert row[10] == f"{area['value']:.3f} ({area['low']:.2f}\u2013{area['high']:.2f})"


def test_the_page_is_of_patients(tmp_path: Path) -> None:
    page = report(tmp_path, summary(), metrics())
    assert "<h2>Scores on the test patients</h2>" in page
    assert "not the harmonic mean" in page
    assert "F1 by entity type" not in page
    assert page.count("<h2>Phenotypes</h2>") == 1
    assert "Macro F1 on validation patients. Loss of stage 1" in page
    drawn = charts(page)
    names = [chart.get("aria-labelledby", "").split("-t ")[0] for chart in drawn]
    assert len(names) == len(set(names))
    assert {"dots-phenotypes", "dots-ranking", "disease-f1", "disease-auroc"} <= set(names)
    assert {"mean-f1", "mean-valid_loss", "mean-loss"} <= set(names)
    assert "dots-codes" not in names
    overall = drawn[names.index("mean-f1")]
    assert {m.get("class") for m in overall if "mark" in m.get("class", "")} == {
        "c1 mark",  # federated
        "c2 mark",  # pooled, whose lines are of one site that stands for all
    }


def test_stage_1_alone_has_no_section_of_diseases(tmp_path: Path) -> None:
    values = summary_of({"a": {"federated": codes_alone(1)}, "b": {"federated": codes_alone(2)}})
    page = report(tmp_path, values)
    Tree(page)
    assert "<h2>Phenotypes</h2>" not in page
    assert "AUROC of codes" in page
    assert "0.715" in page  # the mean of 0.71 and 0.72, on a tile


def test_sites_of_codes_alone_stand_beside_the_others(tmp_path: Path) -> None:
    values = summary_of({"a": {"federated": site_score(1)}, "b": {"federated": codes_alone(2)}})
    rows = Tree(report(tmp_path, values)).rows
    row = next(r for r in rows if r[:2] == ["b", "federated"])
    assert row[2:-2] == ["—", "—", "—", "", "—", "—", "—", "—", "—", "—"]
    assert row[-2:] == ["0.320", "0.720"]


def test_curves_without_test_patients_are_of_patients(tmp_path: Path) -> None:
    values = summary_of({s: {c: {} for c in CONDITIONS} for s in ("north", "south")})
    page = report(tmp_path, values, metrics())
    Tree(page)
    assert "Loss of stage 1 on the codes of validation patients" in page
    assert "masked words" not in page


@pytest.mark.parametrize("value", [None, "high", [1], {}, {"auroc": None}])
def test_what_is_no_number_is_a_gap(tmp_path: Path, value: object) -> None:
    values = summary()
    scores = values["sites"]["north"]["federated"]
    scores["ranking"] = value
    scores["by_output"]["asthma"] = value
    scores["by_output"]["gout"]["auroc"] = value
    values["mean"]["alone"]["by_output"] = value
    values["mean"]["pooled"]["by_output"] = {"asthma": value}
    page = report(tmp_path, values)
    Tree(page)
    assert "None" not in page


def test_names_are_escaped(tmp_path: Path) -> None:
    evil = '<img src=x onerror="alert(1)">'
    values = summary()
    for scores in (values["mean"]["alone"], values["sites"]["north"]["alone"]):
        scores["by_output"][evil] = scores["by_output"].pop("asthma")
    assert "<img" not in report(tmp_path, values)
