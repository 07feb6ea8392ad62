"""The HTML report: well-formed, self-contained, escaped, and equal to its files."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from pages import SVG, Tree, charts, report
from phenotype_scores import CONDITIONS, OUTPUTS, codes_alone, site_score
from phenotype_scores import summary as diseases
from phenotype_scores import summary_of as of_patients

from fednotes.core.errors import DataError
from fednotes.jobs.results import read_result
from fednotes.jobs.seeds import read_seeds
from fednotes.report.html import choose_ticks, format_tick, write_report


def three(f1: float) -> dict[str, float]:
    return {"precision": f1 + 0.0301, "recall": f1 - 0.0202, "f1": f1}


def summary() -> dict[str, Any]:
    """Return two sites under three conditions; every number differs from every
    other."""
    sites: dict[str, Any] = {}
    for i, site in enumerate(("psytar", "ncbi")):
        sites[site] = {}
        for j, condition in enumerate(("pooled", "alone", "federated")):
            f1 = 0.5 + 0.1 * i + 0.0111 * j
            by_type = {
                "ADR": {
                    "strict": three(f1 + 0.2003),
                    "relaxed": three(f1 + 0.3),
                    "support": 41 + i,
                }
            }
            sites[site][condition] = {
                "strict": three(f1),
                "relaxed": three(f1 + 0.0507),
                "by_type": by_type,
            }
    mean = {
        c: {"strict": three(0.61), "relaxed": three(0.7)}
        for c in ("alone", "federated", "pooled")
    }
    return {
        "method": "fedner",
        "seed": 7,
        "seconds": 3725.0,
        "bytes_up": 3_000_000,
        "bytes_down": 4_500_000,
        "sites": sites,
        "mean": mean,
        "title": "Three sites",
        "command": "fednotes simulate job.toml --out run",
        "config": {
            "model": {"preset": "elmoner"},
            "private": ["lstm", "crf"],
            "sites": [{"id": "a"}],
        },
        "versions": {"fednotes": "0.1.0"},
        "notes": ["one seed"],
    }


def metrics() -> list[dict[str, Any]]:
    return [
        {
            "condition": condition,
            "round": 10 * n - 1,  # from 0
            "loss": 5 / n,
            "valid_f1": 0.1 * n,
            "sites": {s: {"loss": 4 / n, "f1": 0.11 * n} for s in ("psytar", "ncbi")},
            "bytes_up": 1_000_000 * n,
            "bytes_down": 1_500_000 * n,
            "seconds": 60.0 * n,
        }
        for condition in ("alone", "federated")
        for n in (1, 2, 3)
    ]


def test_tables_show_the_numbers_of_the_summary(tmp_path: Path) -> None:
    """Every score of the summary, in percent with one decimal, in the row of its site."""
    values = summary()
    rows = Tree(report(tmp_path, values)).rows
    site = ""
    rows_shown: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if len(row) > 2 and row[1] in ("alone", "federated", "pooled"):
            site, row = row[0], row[1:]
        if row[0] in ("alone", "federated", "pooled"):
            rows_shown.setdefault((site, row[0]), row[1:])
    for name, conditions in {
        **values["sites"],
        "Mean of sites": values["mean"],
    }.items():
        alone = conditions["alone"]["strict"]["f1"]
        for condition, scores in conditions.items():
            strict, relaxed = (
                [f"{100 * scores[key][m]:.1f}" for m in ("precision", "recall", "f1")]
                for key in ("strict", "relaxed")
            )
            change = (
                ""
                if condition == "alone"
                else f"{100 * strict_change(scores, alone):+.1f}"
            )
            assert rows_shown[name, condition] == [*strict, change, *relaxed]
    starts = [place for place, row in enumerate(rows) if row[0] == "ADR"]
    for start, name in zip(starts, ("psytar", "ncbi"), strict=True):
        trained = ("alone", "federated", "pooled")
        counts = [values["sites"][name][c]["by_type"]["ADR"] for c in trained]
        expected = [
            [
                f"{100 * c[key][m]:.1f}"
                for key in ("strict", "relaxed")
                for m in ("precision", "recall", "f1")
            ]
            for c in counts
        ]
        first, *others = rows[start : start + 3]
        assert first == ["ADR", str(counts[0]["support"]), "alone", *expected[0]]
        assert others == [
            [c, *e] for c, e in zip(trained[1:], expected[1:], strict=True)
        ]
    assert ["model.preset", "elmoner"] in rows
    assert ["private", "lstm, crf"] in rows
    assert ["sites.1.id", "a"] in rows


def strict_change(scores: dict[str, Any], alone: float) -> float:
    return float(scores["strict"]["f1"] - alone)


def test_the_page_is_self_contained_and_accessible(tmp_path: Path) -> None:
    """Nothing to fetch, no script; charts parse as XML and carry title and description."""
    page = report(tmp_path, summary(), metrics())
    tree = Tree(page)
    assert not re.search(
        r"https?:|//[a-z]|@import|url\(", page.replace(SVG.strip("{}"), "")
    )
    tags = {tag for tag, _, _ in tree.attributes}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "a"}
    assert "<script" not in page
    assert not [
        name for _, name, _ in tree.attributes if name in ("src", "href", "onload")
    ]
    page_charts = charts(page)
    assert len(page_charts) == 2 + 2 + 2 + 2 + 1, (
        "dots, all sites, F1 and loss by site, bytes"
    )
    identities = [value for _, name, value in tree.attributes if name == "id"]
    assert len(identities) == len(set(identities))
    for chart in page_charts:
        title, description = chart.find(f"{SVG}title"), chart.find(f"{SVG}desc")
        assert title is not None
        assert description is not None
        assert title.text
        assert description.text
        assert (
            chart.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        )
    assert not re.search(r"<th(?![^>]*scope=)[ >]", page), (
        "every header cell has a scope"
    )
    assert "prefers-color-scheme: dark" in page
    assert (
        page.count("Seed 7 · <code>fednotes simulate job.toml --out run</code>")
        == 1 + 5
    )


def test_curves_are_drawn_at_the_values_of_the_metrics(tmp_path: Path) -> None:
    """Tooltips of the markers repeat metrics.jsonl; markers of rising F1 rise."""
    page = report(tmp_path, summary(), metrics())
    chart = next(c for c in charts(page) if c.find(f"{SVG}title").get("id") == "f1-0-t")  # type: ignore[union-attr]
    marks = [m for m in chart if "c1 mark" in m.get("class", "")]
    assert [m.find(f"{SVG}title").text for m in marks] == [  # type: ignore[union-attr]
        f"federated, round {10 * n}: {11 * n}" for n in (1, 2, 3)
    ]
    x, y = ([float(m.get(key, "nan")) for m in marks] for key in ("cx", "cy"))
    assert x[2] - x[1] == pytest.approx(x[1] - x[0], abs=0.2)
    assert y[1] - y[2] == pytest.approx(y[0] - y[1], abs=0.2)
    assert y[0] > y[1]
    (loss_chart,) = (
        c
        for c in charts(report(tmp_path, summary(), [{"round": 1, "loss": 0.5}]))
        if c.get("aria-labelledby") == "mean-loss-t mean-loss-d"
    )  # a point is a chart
    mark = next(m for m in loss_chart if "mark" in m.get("class", ""))
    assert 0 < float(mark.get("cx", "nan")) < 460
    assert 0 < float(mark.get("cy", "nan")) < 230


def test_curves_are_also_shown_as_tables(tmp_path: Path) -> None:
    """Over all sites and for each site; a long run has a row for every nth round."""
    rows = Tree(report(tmp_path, summary(), metrics())).rows
    heads = [row for row in rows if row[0] == "Round"]
    assert heads[2][:3] == ["Round", "F1 in %, alone", "F1 in %, federated"]
    of_federated = [line for line in metrics() if line["condition"] == "federated"]
    for line in of_federated:
        value = f"{round(100 * line['valid_f1'], 1):.4g}"
        assert any(row[0] == str(line["round"] + 1) and value in row for row in rows)
    lines = [{"round": n, "loss": 1 / (n + 1)} for n in range(999)]
    rows = Tree(report(tmp_path, summary(), lines)).rows
    start = rows.index(["Round", "federated"])
    table = [row for row in rows[start + 1 :] if len(row) == 2 and row[0].isdigit()]
    assert len(table) <= 61
    assert table[0] == ["1", "1"]
    assert table[-1] == ["999", "0.001001"]


def test_the_traffic_chart_is_cumulative(tmp_path: Path) -> None:
    page = report(tmp_path, summary(), metrics())
    assert (
        "from the sites (up): 3 MB at the end; to the sites (down): 4.5 MB at the end"
        in page
    )
    ups = re.findall(r"from the sites \(up\), round (\d+): ([\d.]+) MB", page)
    assert ups == [("10", "1"), ("20", "2"), ("30", "3")]


def test_names_and_values_are_escaped(tmp_path: Path) -> None:
    """Names from job files are text, whatever they hold."""
    evil = '<img src=x onerror="alert(1)">&'
    values = summary()
    values["title"] = values["command"] = evil
    values["notes"] = [evil, f"`{evil}`"]
    values["config"] = {evil: [evil], "inner": {evil: evil}}
    site = values["sites"].pop("ncbi")
    site[evil] = site.pop("pooled")
    site["alone"]["by_type"] = {evil: {"strict": three(0.5)}}
    values["sites"][evil] = site
    # unknown keys are not shown
    values["text"] = site["alone"]["errors"] = "patient took aspirin"
    lines = metrics()
    for line in lines:
        line["examples"] = ["patient took aspirin"]
        line["sites"] = {evil: line["sites"]["ncbi"]}
        line["condition"] = evil
    page = report(tmp_path, values, lines)
    tree = Tree(page)
    assert "<img" not in page
    assert "aspirin" not in page
    assert not any(
        tag == "img" or name == "onerror" for tag, name, _ in tree.attributes
    )
    assert any(evil in cell for row in tree.rows for cell in row)
    assert charts(page)


@pytest.mark.parametrize("value", [1e17, -1e17, 1e300])
def test_very_large_numbers_are_drawn(tmp_path: Path, value: float) -> None:
    """Half of a round is less than the last digit of such numbers."""
    rows = [{"condition": "federated", "round": value, "loss": value}]
    assert charts(report(tmp_path, summary(), rows))


def test_backticks_in_a_remark_become_code_elements(tmp_path: Path) -> None:
    remark = "lower `learning_rate`, or see `fednotes check`"
    page = report(tmp_path, summary() | {"notes": [remark]}, metrics())
    markup = "lower <code>learning_rate</code>, or see <code>fednotes check</code>"
    assert f"<li>{markup}</li>" in page


@pytest.mark.parametrize("key", [*summary(), *metrics()[0], "all"])
def test_missing_keys_leave_gaps(tmp_path: Path, key: str) -> None:
    """Whatever a summary or all but one line lacks, the page is whole."""
    values, lines = summary(), metrics()
    for table in (values, *lines[1:]):
        for name in list(table):
            if key in (name, "all"):
                del table[name]
    page = report(tmp_path, values, lines)
    Tree(page)
    assert charts(page)


@pytest.mark.parametrize(
    "value", [None, "high", True, float("nan"), float("inf"), [1], {}]
)
def test_a_value_that_is_not_a_number_leaves_a_gap(
    tmp_path: Path, value: object
) -> None:
    values = summary()
    values["mean"]["alone"]["strict"] = value
    values["sites"]["ncbi"]["alone"]["strict"] = {"f1": value}
    values["sites"]["ncbi"]["federated"] = {"strict": value}
    lines = metrics()
    lines[1].update(round=value, loss=value, sites=value, bytes_up=value)
    phenotyping = diseases()
    scores = phenotyping["sites"]["north"]["federated"]
    scores["ranking"] = value
    scores["by_output"]["asthma"] = value
    scores["by_output"]["gout"]["auroc"] = value
    phenotyping["mean"]["alone"]["by_output"] = value
    phenotyping["mean"]["pooled"]["by_output"] = {"asthma": value}
    for page in (
        report(tmp_path, values, lines),
        report(tmp_path, phenotyping, stages()),
    ):
        Tree(page)
        assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
        assert "None" not in page
        assert "—" in page
        assert charts(page)


def test_lines_of_a_single_site_are_left_out_of_the_mean(tmp_path: Path) -> None:
    """Sites that train alone write a line each; the chart of all sites leaves them out."""
    lines = [line for line in metrics() if line["condition"] == "federated"]
    for site in ("psytar", "ncbi"):
        for n in (1, 2):
            site_line = {
                "valid_f1": 0.3,
                "loss": 1.0,
                "sites": {site: {"f1": 0.3, "loss": 1.0}},
            }
            lines.append({"condition": "alone", "round": n, "site": site, **site_line})
    charts_by_id = {
        c.get("aria-labelledby", "").split()[0]: c
        for c in charts(report(tmp_path, summary(), lines))
    }
    looks = {
        ident: {m.get("class") for m in chart if "mark" in m.get("class", "")}
        for ident, chart in charts_by_id.items()
    }
    assert looks["mean-f1-t"] == {"c1 mark"}
    assert looks["f1-1-t"] == {"c0 mark", "c1 mark"}


def test_a_page_of_many_sites_and_rounds_stays_small(tmp_path: Path) -> None:
    values = summary()
    values["sites"] = {f"site{i}": values["sites"]["ncbi"] for i in range(100)}
    lines = [
        {
            "condition": "federated",
            "round": n,
            "sites": {s: {"f1": 0.5} for s in values["sites"]},
        }
        for n in range(500)
    ]
    page = report(tmp_path, values, lines)
    assert "76 more sites are not drawn here" in page
    assert len(page) < 1_500_000


def test_an_error_names_a_missing_or_damaged_file(tmp_path: Path) -> None:
    """Half a last line (a killed run) is left out; any other bad line is named."""
    with pytest.raises(DataError, match=r"no summary\.json there"):
        write_report(tmp_path)
    good = "\n".join(json.dumps(line) for line in metrics())
    report(tmp_path, summary())
    target = tmp_path / "pages" / "run.html"
    assert write_report(tmp_path, target) == target
    # and nothing half-written
    file_names = {"summary.json", "report.html", "pages", "run.html"}
    assert {p.name for p in tmp_path.rglob("*")} == file_names
    (tmp_path / "metrics.jsonl").write_text(good + '\n{"round": 9')
    write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"round": 9\n' + good)
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: not JSON"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("[1]\n" + good)
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: expected a JSON object"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text('{\n"seed": 7,,}')
    with pytest.raises(DataError, match=r"summary\.json:2: not JSON"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text('{"bytes_up": NaN}')
    with pytest.raises(DataError, match=r"summary\.json: bytes_up"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0.503, 0.751), (3, 3), (0, 0), (-2, 7e6), (1e-9, 2e-9), (99.9, 100.1)],
)
def test_ticks_are_round_numbers_that_enclose_the_values(
    low: float, high: float
) -> None:
    """Equal steps of 1, 2, 2.5 or 5 times a power of ten, by decimal digits."""
    marks = choose_ticks(low, high, 5)
    assert marks[0] <= low <= high <= marks[-1]
    assert 2 <= len(marks) <= 13
    steps = {f"{b - a:.3e}" for a, b in pairwise(marks)}
    assert len(steps) == 1
    assert steps.pop().split("e")[0] in ("1.000", "2.000", "2.500", "5.000")


def test_ticks_separate_thousands_by_thin_spaces() -> None:
    assert [format_tick(v) for v in (0.25, 1500.0, 2_000_000.0)] == [
        "0.25",
        "1\u202f500",
        "2\u202f000\u202f000",
    ]


# patients


def stages() -> list[dict[str, Any]]:
    """Return two rounds of stage 1 and two of stage 2; pooled lines are of site
    "pooled"."""
    lines = []
    for condition in ("federated", "pooled"):
        sites = ("north", "south") if condition == "federated" else ("pooled",)
        for n in range(4):
            judged, site_metric = (
                ("valid_loss", "valid_loss") if n < 2 else ("valid_f1", "f1")
            )
            by_site = {s: {"loss": 0.5, site_metric: 0.2 + n / 10} for s in sites}
            line_metrics = {"loss": 1 / (n + 1), judged: 0.2 + n / 10, "sites": by_site}
            lines.append({"condition": condition, "round": n, **line_metrics})
    return lines


def test_every_score_of_a_site_is_in_its_row(tmp_path: Path) -> None:
    """In percent with one decimal, except losses and Brier scores."""
    values = diseases()
    rows = Tree(report(tmp_path, values)).rows
    start = next(n for n, row in enumerate(rows) if row[:2] == ["north", "alone"])
    site = values["sites"]["north"]
    alone = site["alone"]["phenotypes"]["f1"]
    for n, condition in enumerate(CONDITIONS):
        scores = site[condition]
        macro = scores["phenotypes"]
        expected = [f"{100 * macro[k]:.1f}" for k in ("precision", "recall", "f1")]
        expected.append(
            "" if condition == "alone" else f"{100 * (macro['f1'] - alone):+.1f}"
        )
        expected += [
            f"{100 * scores['present'][k]:.1f}" for k in ("precision", "recall", "f1")
        ]
        for key in ("auroc", "auprc"):
            low, high = scores["ranking"][f"{key}_interval"]
            interval = f"({100 * low:.1f}\u2013{100 * high:.1f})"
            expected.append(f"{100 * scores['ranking'][key]:.1f} {interval}")
        expected += [f"{scores['calibration']['brier']:.3f}"]
        codes = scores["codes"]
        expected += [f"{codes['loss']:.3f}", f"{100 * codes['auroc']:.1f}"]
        assert rows[start + n][-len(expected) - 1 :] == [condition, *expected]


def test_the_gain_of_the_federation_has_a_table_and_a_tile(tmp_path: Path) -> None:
    """Of masked words: of a loss of 3 nats alone and 2 pooled, 2.25 closes three
    quarters."""
    losses = {"alone": 3.0, "federated": 2.25, "pooled": 2.0}
    scores = {
        c: {"masked": {"loss": x, "perplexity": 9.0, "accuracy": 0.5, "tokens": 90_000}}
        for c, x in losses.items()
    }
    spent = {"federated": {"bytes_up": 2e6, "bytes_down": 3e6, "seconds": 7.0}}
    values = {
        "method": "pretrain",
        "sites": {"north": scores},
        "mean": scores,
        "conditions": spent,
    }
    tree = Tree(report(tmp_path, values))
    north = next(row for row in tree.rows if row[:2] == ["north", "+0.750"])
    # a loss / the root of the tokens is its error
    by = 1.96 * (3**2 + 2.25**2) ** 0.5 / 300
    interval = f"{0.75 - by:+.3f} to {0.75 + by:+.3f}"
    assert north[2:] == [interval, "—", "0.75", "5 MB, 7.0 s", "federated"]
    assert "75 %" in (tmp_path / "report.html").read_text("utf-8")


def test_diseases_are_shown_in_a_table_with_an_average(tmp_path: Path) -> None:
    values = diseases()
    rows = Tree(report(tmp_path, values)).rows
    keys = ("precision", "recall", "f1", "auroc")
    mean = {c: values["mean"][c]["by_output"] for c in CONDITIONS}
    for name in OUTPUTS:
        cells = [mean[c][name][key] for c in CONDITIONS for key in keys]
        assert [name, *("—" if v is None else f"{100 * v:.1f}" for v in cells)] in rows
    averages = [
        fmean(v for name in OUTPUTS if (v := mean[c][name][key]) is not None)
        for c in CONDITIONS
        for key in keys
    ]
    assert ["Average", *(f"{100 * v:.1f}" for v in averages)] in rows


def test_each_disease_of_a_site_shows_its_patients_and_intervals(
    tmp_path: Path,
) -> None:
    values = of_patients({"south": {"alone": site_score(5)}})
    rows = Tree(report(tmp_path, values)).rows
    obesity = values["sites"]["south"]["alone"]["by_output"]["obesity"]
    expected = [
        "obesity",
        str(obesity["present"]["support"]),
        str(obesity["absent"]["support"]),
    ]
    row = [r for r in rows if r[:4] == [*expected, "alone"]][-1]
    scores = [
        obesity[kind][k]
        for kind in ("macro", "present")
        for k in ("precision", "recall", "f1")
    ]
    area = obesity["auroc"]
    assert row[4:10] == [f"{100 * v:.1f}" for v in scores]
    low, high = 100 * area["low"], 100 * area["high"]
    assert row[10] == f"{100 * area['value']:.1f} ({low:.1f}\u2013{high:.1f})"


def test_the_page_of_a_phenotyping_run_speaks_of_patients(tmp_path: Path) -> None:
    page = report(tmp_path, diseases(), stages())
    assert "<h2>Scores on the test patients</h2>" in page
    assert "not the harmonic mean" in page
    assert "by entity type" not in page
    assert page.count("<h2>Phenotypes</h2>") == 1
    assert "Macro F1 on validation patients. Loss of the network on" in page
    page_charts = charts(page)
    names = [chart.get("aria-labelledby", "").split("-t ")[0] for chart in page_charts]
    assert len(names) == len(set(names))
    assert {"dots-phenotypes", "dots-ranking", "disease-f1", "disease-auroc"} <= set(
        names
    )
    assert {"mean-f1", "mean-valid_loss", "mean-loss"} <= set(names)
    assert "dots-codes" not in names
    overall = page_charts[names.index("mean-f1")]
    assert {m.get("class") for m in overall if "mark" in m.get("class", "")} == {
        "c1 mark",  # federated
        "c2 mark",  # pooled, whose lines are of one site that stands for all
    }


def test_a_run_of_stage_1_alone_has_no_section_of_diseases(tmp_path: Path) -> None:
    values = of_patients(
        {"a": {"federated": codes_alone(1)}, "b": {"federated": codes_alone(2)}}
    )
    page = report(tmp_path, values)
    Tree(page)
    assert "<h2>Phenotypes</h2>" not in page
    assert "AUROC of codes" in page
    assert "71.5 %" in page  # the mean of 0.71 and 0.72, on a tile


def test_sites_with_codes_alone_are_listed_beside_the_others(tmp_path: Path) -> None:
    values = of_patients(
        {"a": {"federated": site_score(1)}, "b": {"federated": codes_alone(2)}}
    )
    rows = Tree(report(tmp_path, values)).rows
    row = next(r for r in rows if r[:2] == ["b", "federated"])
    assert row[2:-2] == ["—", "—", "—", "", "—", "—", "—", "—", "—", "—"]
    assert row[-2:] == ["0.320", "72.0"]


def test_curves_without_test_patients_name_validation_patients(tmp_path: Path) -> None:
    values = of_patients({s: {c: {} for c in CONDITIONS} for s in ("north", "south")})
    page = report(tmp_path, values, stages())
    Tree(page)
    assert "Loss of the network on validation patients" in page
    assert "masked words" not in page


def test_a_summary_of_too_many_sites_is_refused(tmp_path: Path) -> None:
    sites = {str(number): {} for number in range(10_001)}
    (tmp_path / "summary.json").write_text(json.dumps({"sites": sites}))
    with pytest.raises(DataError, match=r"sites: .*at most 10000"):
        read_result(tmp_path)


@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json"])
def test_a_run_of_very_many_conditions_is_refused(file: str, tmp_path: Path) -> None:
    """A page would have a column for each of them, and search all lines for each."""
    conditions = [f"c{number}" for number in range(11)]
    lines = [{"condition": each, "round": 1, "loss": 0.5} for each in conditions]
    sites = {"a": {each: {"strict": {"f1": 0.5}} for each in conditions}}
    is_summary = file == "summary.json"
    report(tmp_path, _with_f1(0.5), lines[:8])
    with pytest.raises(DataError, match=r"this run name 1[12] conditions"):
        report(
            tmp_path,
            {"sites": sites} if is_summary else {},
            [] if is_summary else lines,
        )


@pytest.mark.parametrize("kind", ["by_type", "by_output"])
def test_types_that_differ_between_conditions_make_no_huge_table(
    kind: str, tmp_path: Path
) -> None:
    many = {f"t{number}": {"f1": 0.5} for number in range(30_000)}
    other = {f"c{number}": {kind: {"x": {"f1": 0.5}}} for number in range(4)}
    sites = {"a": {**other, "alone": {kind: many}}}
    with pytest.raises(DataError, match="tables of 150,005 cells are not shown"):
        report(tmp_path, {"sites": sites})


def test_a_summary_with_a_huge_table_of_left_out_sites_is_refused(
    tmp_path: Path,
) -> None:
    """Each site has a model of its own name, so 400 of them make 160,000 cells."""
    left_out = {f"s{n}": {f"m{n}": {"strict": {"f1": 0.5}}} for n in range(400)}
    (tmp_path / "summary.json").write_text(json.dumps({"left_out": left_out}))
    with pytest.raises(DataError, match=r"left_out: .*400 sites and 400 models"):
        read_result(tmp_path)
    (tmp_path / "seeds.json").write_text(json.dumps({"left_out": left_out}))
    with pytest.raises(DataError, match=r"left_out: .*400 sites and 400 models"):
        read_seeds(tmp_path)


def _with_f1(*values: float) -> dict[str, Any]:
    """Return a summary whose sites have these scores, alone and federated."""
    sites = {
        str(place): {
            condition: {"strict": {"f1": f1}} for condition in ("alone", "federated")
        }
        for place, f1 in enumerate(values)
    }
    return {"sites": sites, "mean": sites["0"]}


@pytest.mark.parametrize(
    "values",
    [(0.0, 5e-324), (-1e308, 1e308), (1e-300, -1e-300), (0.0, 1e100), (10**400, 0.5)],
)
def test_extreme_scores_are_drawn_or_left_out(
    values: tuple[float, float], tmp_path: Path
) -> None:
    page = report(tmp_path, _with_f1(*values))
    Tree(page)


@pytest.mark.parametrize("key", ["seconds", "bytes_up", "bytes_down", "eta"])
def test_a_number_of_hundreds_of_digits_is_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(summary() | {key: 10**400}))
    with pytest.raises(DataError, match=key):
        write_report(tmp_path)


def test_an_absurdly_large_epsilon_is_left_out(tmp_path: Path) -> None:
    promised = {"federated": {"epsilon": 1e308, "delta": 1e-5, "unit": "patient"}}
    page = report(tmp_path, summary() | {"privacy": promised})
    Tree(page)
    assert "ε guaranteed" not in page


@pytest.mark.parametrize("version", [["long" * 10_000], "\x1b[2J", 1.5])
def test_a_version_that_is_not_an_integer_is_not_quoted(
    tmp_path: Path, version: object
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"version": version}))
    with pytest.raises(DataError) as refused:
        read_result(tmp_path)
    assert str(refused.value).endswith(
        "its version is not an integer: copy the run's folder again"
    )
