"""What a run shows in a terminal: cost, pace, tables, and remarks on scores."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from phenotype_scores import (
    CONDITIONS,
    OUTPUTS,
    codes_alone,
    site_score,
    summary,
    summary_of,
)
from rich.console import Console
from rich.table import Table
from rich.text import Text
from shown_tables import cells_of, row_of
from tiny_jobs import TABLE

from fednotes.cli import display
from fednotes.cli.display import RichDisplay, showing_runs
from fednotes.cli.shared import CleanConsole
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.checks import Finding
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.compare import Comparison
from fednotes.jobs.job import Sites, count_data
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.kinds.mention_causes import find_missed_types
from fednotes.jobs.parts import (
    Part,
    Traffic,
    explain_incomparable_conditions,
    list_parts,
)
from fednotes.jobs.progress import LARGE_BYTES
from fednotes.jobs.results import PairedDifference, RunResult
from fednotes.jobs.score_causes import find_low_pooled_scores
from fednotes.jobs.simulate import simulate
from fednotes.metrics.paired_tests import Bootstrap
from fednotes.metrics.spans import SpanCounts
from fednotes.metrics.summaries import average_scores

JOBS: dict[str, dict[str, Any]] = {
    "fedner": {
        "training": {"epochs": 3, "batch_size": 24, "evaluate_every": 2, "patience": 9}
    },
    "distill": {
        "training": {"unannotated": "marginal", "weighting": False, "rounds": 3}
    },
}


class TrafficDisplay(RichDisplay):
    """Keeps what it was told of the cost."""

    def cost(self, traffic: Traffic) -> None:
        self.traffic = traffic
        super().cost(traffic)


@pytest.mark.parametrize("method", sorted(JOBS))
def test_the_estimated_traffic_equals_the_sent_bytes(
    method: str, tmp_path: Path
) -> None:
    """Against the engine's own count of all sites, which has counts and options
    besides."""
    table = {**TABLE, "method": method, "conditions": ["federated"], **JOBS[method]}
    listener = TrafficDisplay(Console(quiet=True))
    summary = simulate(
        parse_job(table, "tiny", tmp_path, "tiny.toml"),
        tmp_path / "run",
        listener=listener,
    )
    assert summary.conditions["federated"]["rounds"] == listener.traffic.rounds
    assert 3 * listener.traffic.up == pytest.approx(summary.bytes_up, rel=0.05)
    assert 3 * listener.traffic.down == pytest.approx(summary.bytes_down, rel=0.05)
    assert 3 * listener.traffic.up <= summary.bytes_up
    assert 3 * listener.traffic.down <= summary.bytes_down


@pytest.mark.parametrize(("ask", "total", "questions_expected"), [
    (True, LARGE_BYTES + 2, 1), (True, LARGE_BYTES, 0), (False, LARGE_BYTES + 2, 0)
])  # fmt: skip
def test_large_traffic_is_confirmed_first(
    ask: bool, total: float, questions_expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked where there is nobody, and the line is told in any case."""
    questions: list[str] = []

    def confirm(text: str, abort: bool) -> None:
        questions.append(text)
        raise typer.Abort

    monkeypatch.setattr(display.typer, "confirm", confirm)
    console = Console(record=True, width=200)
    traffic = Traffic(10, int(total) // 2, int(total) // 2)
    if questions_expected:
        with pytest.raises(typer.Abort):
            RichDisplay(console, ask=ask).cost(traffic)
    else:
        RichDisplay(console, ask=ask).cost(traffic)
    assert len(questions) == questions_expected
    assert (
        "at most 10 rounds; in each, a site sends about 500 MB and receives about "
        "500 MB (10 GB per site" in (console.export_text())
    )


def test_lines_show_the_remaining_time_of_the_whole_run() -> None:
    """Three seconds a round, and six rounds left after the fourth, 18 seconds; then a
    part with twice the work, 60 seconds. What it is of both is told once on a line of
    its own."""
    out = io.StringIO()
    bar = RichDisplay(Console(file=out, width=200))
    part: Any = Part("federated", (object(),), None)
    bar.plan({"federated": 50.0, "pooled": 100.0})
    bar.begin(part, 10, 5)
    for number in range(5):
        metrics = {"loss": 1.0}
        bar.round(RoundResult(number, metrics, 1, 0, 0, 100 + 3.0 * number, True))
    bar.end()
    lines = out.getvalue().splitlines()
    assert not any("left" in line for line in lines[:3])
    assert "left" not in lines[3]
    assert lines[4] == "the whole run: about 1 min 18 s left"
    assert lines[5].endswith("about 1 min 15 s left")


@pytest.mark.parametrize(
    ("condition", "sends"), [("federated", True), ("alone", False), ("pooled", False)]
)
def test_a_line_shows_bytes_only_if_something_is_sent(
    condition: str, sends: bool
) -> None:
    out = io.StringIO()
    bar = RichDisplay(Console(file=out, width=200))
    part: Any = Part(condition, (object(),), None)
    bar.begin(part, 2, 5)
    for number in range(2):
        bar.round(RoundResult(number, {"loss": 1.0}, 1, 10, 20, 1.0 + number, True))
    first_line, line = out.getvalue().splitlines()
    assert "sentences/s" not in first_line
    assert ("↑10 B ↓20 B" in line) == sends
    assert ("↑" in line) == sends
    assert "5 sentences/s" in line


def test_findings_of_one_kind_are_grouped() -> None:
    findings = [
        Finding("warning", "rare_types", f"site{number}", "types are rare")
        for number in range(9)
    ]
    errors = [Finding("error", "offsets", f"s{n}", "outside") for n in range(5)]
    lines = [str(line) for line in display.list_findings([*findings, *errors])]
    assert lines[:5] == [f"error  s{n}: outside [offsets]" for n in range(5)]
    assert lines[5:] == [
        "warning  site0: types are rare [rare_types]",
        "         the same kind: site1, site2, site3, site4, site5, site6 and 2 more",
    ]
    assert len(display.list_findings(findings[:3])) == 3


class Observed:
    """A method whose sites are judged by their validation F1."""

    training_tasks = ("train",)

    @staticmethod
    def name_length_key(config: Any, measure: str) -> str:
        del measure
        return "epochs" if config else "rounds"

    @staticmethod
    def summarise(metrics: dict[str, float]) -> dict[str, float]:
        return {"valid_f1": metrics["f1"]}


def test_lines_in_a_file_begin_with_the_time_if_a_run_takes_days() -> None:
    out = io.StringIO()
    bar = RichDisplay(Console(file=out, width=200), has_times=True)
    part: Any = Part("federated", (object(),), None)
    bar.begin(part, 10, 5)
    bar.round(RoundResult(0, {"loss": 1.0}, 1, 0, 0, 1.0, True))
    bar.warn("site a was away")
    round_line, warning = out.getvalue().splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.match(f"{time} federated: round 1/10", round_line)
    assert re.match(f"{time} warning: site a was away", warning)


def test_square_brackets_in_names_of_sites_are_shown() -> None:
    out = io.StringIO()
    bar = RichDisplay(Console(file=out, width=200))
    part: Any = Part("alone/[red]ward", (object(),), None)
    bar.begin(part, 10, 5)
    bar.round(RoundResult(0, {"loss": 1.0}, 1, 0, 0, 1.0, True))
    bar.end()
    assert out.getvalue().startswith("alone/[red]ward: round 1/10  loss 1.000")


@pytest.mark.parametrize(
    ("epochs", "round", "rounds", "expected"),
    [
        (8, 127, 128, "federated: epoch 8/8, round 128/128  "),
        (8, 16, 128, "federated: epoch 2/8, round 17/128  "),
        (5, 0, 3, "federated: epoch 2/5, round 1/3  "),
        (8, 0, 8, "federated: round 1/8  "),
        (8, 0, 0, "federated: round 1/?  "),
        (0, 0, 10, "federated: round 1/10  "),
    ],
)
def test_progress_shows_the_epochs_of_a_method_that_counts_them(
    epochs: int, round: int, rounds: int, expected: str
) -> None:
    out = io.StringIO()
    bar = RichDisplay(Console(file=out, width=200))
    method: Any = Observed()
    config = SimpleNamespace(epochs=epochs) if epochs else None
    bar.begin(Part("federated", (object(),), config, method=method), rounds, 5)
    bar.round(RoundResult(round, {"loss": 1.0}, 1, 0, 0, 1.0, True))
    bar.end()
    assert out.getvalue().startswith(expected)


def progress_line(sites: int) -> str:
    """Return the line of a display for an evaluation of so many sites."""
    out = io.StringIO()
    bar = RichDisplay(Console(file=out, width=200))
    method: Any = Observed()
    part = Part("federated", (object(),) * sites, None, method=method)
    bar.begin(part, 10, 5)
    replies = {"evaluate": {f"site{n}": {"f1": n / 1000} for n in range(sites)}}
    bar.round(RoundResult(0, {"loss": 1.0}, sites, 0, 0, 1.0, True, replies=replies))
    bar.end()
    return out.getvalue()


def test_a_progress_line_names_up_to_ten_sites() -> None:
    line = progress_line(10)
    assert all(f"site{n} 0.{n}%" in line for n in range(10))
    assert "mean" not in line


def test_a_progress_line_of_many_sites_shows_mean_lowest_and_highest() -> None:
    """The mean of 0, 1, … 300 thousandths is 15.0%."""
    line = progress_line(301)
    assert "F1 mean of 301 sites 15.0%" in line
    assert "lowest 0.0% (site0), highest 30.0% (site300)" in line
    assert "site7 " not in line
    assert len(line) < 250


# hints

ROUNDS = {"alone": {"rounds": 60}, "pooled": {"rounds": 20}}


def mean(alone: float, pooled: float) -> dict[str, Any]:
    return {"alone": {"strict": {"f1": alone}}, "pooled": {"strict": {"f1": pooled}}}


@pytest.mark.parametrize(
    ("heads", "personal", "rounds", "expected_remarks"),
    [
        (True, 0, ROUNDS, ["an output layer for each"]),
        (False, 0, ROUNDS, ["one model serves all sites"]),
        (False, 3, ROUNDS, ["one model serves", "alone ends with 3 personal epochs"]),
        (
            True,
            0,
            ROUNDS | {"pooled": {"rounds": 19}},
            ["an output layer", "pooled took fewer rounds"],
        ),
    ],
)
def test_a_remark_explains_a_pooled_model_that_is_worse_than_training_alone(
    heads: bool, personal: int, rounds: dict[str, Any], expected_remarks: list[str]
) -> None:
    """60 rounds of three sites are 20 at each; no reason is given but what the run
    knows."""
    sites = (1, 2, 3) if heads else (1,)
    parts = [
        Part("alone", (1,), None, personal_epochs=personal),
        Part("pooled", sites, None),
    ]
    job = parse_job(TABLE, "tiny", Path(), "tiny.toml")
    (cause,) = find_low_pooled_scores(job, mean(0.7, 0.65), rounds, parts, 3)
    line = str(cause)
    assert "mean F1 65.0 against 70.0" in line
    assert f"{rounds['pooled']['rounds']} rounds against 20 at a site" in line
    every = ["an output layer", "one model serves", "personal epochs", "fewer rounds"]
    assert [remark for remark in every if remark in line] == [
        remark
        for remark in every
        if any(remark in each or each in remark for each in expected_remarks)
    ]
    for scores in (mean(0.7, 0.7), {"alone": {}, "pooled": {}}, {}):  # it is not below
        assert list(find_low_pooled_scores(job, scores, ROUNDS, [], 3)) == []


def test_a_remark_names_rare_types_that_a_site_lacks_as_a_cause() -> None:
    document = Document("a", "Took drug .", (Span(5, 9, "Drug"),))
    drugs = tuple(replace(document, id=str(number)) for number in range(40))
    rare = replace(document, spans=(Span(5, 9, "Height"),))
    full = SiteData("a", TagSet(("Drug", "Height")), (*drugs, rare), (), ())
    other = SiteData("b", TagSet(("Drug",)), drugs, (), ())
    parts = [Part("alone", (full,), None), Part("pooled", (full, other), None)]
    table = {key: value for key, value in TABLE.items() if key != "synthetic"}
    table["sites"] = {name: {"path": "notes.jsonl"} for name in "ab"}
    job = parse_job(table, "tiny", Path(), "tiny.toml")
    (cause,) = find_low_pooled_scores(job, mean(0.7, 0.65), ROUNDS, parts, 2)
    assert "some sites lack Height, so the pooled model has" in str(cause)
    assert (cause.settings[0].key, cause.settings[0].value) == ("tags.types", ["Drug"])


def site(name: str, *labels: str) -> SiteData:
    spans = tuple(Span(0, 4, label) for label in labels)
    return SiteData(
        name, TagSet(("ADE", "Drug", "Dose")), (Document("d", "text", spans),), (), ()
    )


def missed_types(scores: dict[str, Any], *sites: SiteData) -> list[str]:
    """Return the notes of a run with these scores about types that are not found."""
    job = parse_job(TABLE, "tiny", Path(), "tiny.toml")
    causes = find_missed_types(job, scores, count_data(job, sites))
    return list(map(str, causes))


def scored(f1: float, support: int, predicted: int) -> dict[str, Any]:
    return {"strict": {"f1": f1}, "support": support, "predicted": predicted}


def test_types_that_score_0_are_listed_with_their_training_mentions() -> None:
    """Drug is found and Route is not in the test data, so neither is listed."""
    by_type = {
        "Drug": scored(0.5, 9, 9),
        "ADE": scored(0.0, 4, 0),
        "Dose": scored(0.0, 2, 3),
        "Route": scored(0.0, 0, 5),
        "Form": scored(0.0, 1, 0),
    }
    scores = {"a": {"federated": {"relaxed": {"f1": 0.5}, "by_type": by_type}}}
    (remark,) = missed_types(scores, site("a", "ADE", "Dose"), site("b", "ADE", "ADE"))
    assert remark == (
        "a, federated: 3 of 4 types have F1 0: ADE (this site has 1 of 3 training "
        "mentions, never predicted), Dose (1 of 1), Form (0 of 0, never "
        "predicted): give types without training mentions their names in the training "
        "data (label_map); train longer, or annotate more mentions; a type that only this site "
        "annotates may have another name at other sites (label_map)"
    )


def test_a_site_without_any_predicted_mention_is_left_to_another_remark() -> None:
    by_type = {"ADE": scored(0.0, 4, 0)}
    scores = {"a": {"federated": {"relaxed": {"f1": 0.0}, "by_type": by_type}}}
    assert missed_types(scores, site("a", "ADE")) == []


def test_the_remark_on_missed_types_names_at_most_six() -> None:
    by_type = {f"T{i:02}": scored(0.0, 20 - i, 1) for i in range(13)} | {
        "Drug": scored(1.0, 1, 1)
    }
    scores = {"a": {"federated": {"relaxed": {"f1": 0.5}, "by_type": by_type}}}
    (remark,) = missed_types(scores, site("a", *by_type))
    assert "13 of 14 types" in remark
    assert "T05 (1 of 1) and 7 more: train longer" in remark
    assert "T06" not in remark


# tables


def result_table(values: dict[str, Any]) -> Table:
    return display.make_result_table(RunResult(**values))


def disease_table(values: dict[str, Any]) -> Table | None:
    return display.make_disease_table(RunResult(**values))


def nothing_judged(values: dict[str, Any]) -> str:
    return display.explain_missing_scores(RunResult(**values))


def rows_of(table: Table, site: str) -> dict[str, list[str]]:
    """Return the cells of each condition's row, at one site of a result table."""
    named_rows: dict[str, list[str]] = {}
    current = ""
    for row in cells_of(table):
        if row[0] not in CONDITIONS:
            current, row = row[0], row[1:]
        if current == site and row:
            named_rows[row[0]] = row[1:]
    return named_rows


def numbers(scores: dict[str, Any]) -> list[str]:
    macro = [
        f"{100 * scores['phenotypes'][key]:.1f}"
        for key in ("precision", "recall", "f1")
    ]
    return [*macro, f"{100 * scores['ranking']['auroc']:.1f}"]


def test_the_result_table_has_precision_recall_f1_and_auroc() -> None:
    values = summary()
    for site, scores in values["sites"].items():
        expected = {c: numbers(scores[c]) for c in CONDITIONS}
        assert rows_of(result_table(values), site) == expected
    expected = {c: numbers(values["mean"][c]) for c in CONDITIONS}
    assert rows_of(result_table(values), "mean") == expected


def mention_score(*pairs: tuple[int, int]) -> dict[str, Any]:
    """Return scores for ten adjacent gold mentions of ten characters, and these
    predictions."""
    text = "x" * 100
    gold = [
        Document("d", text, tuple(Span(10 * n, 10 * n + 10, "Drug") for n in range(10)))
    ]
    predicted = [
        Document("d", text, tuple(Span(start, end, "Drug") for start, end in pairs))
    ]
    return SpanCounts.of(gold, predicted).scores()


def mention_run(*scores: dict[str, Any]) -> RunResult:
    """Return a run of one condition, with a site for each of the scores."""
    sites = {f"s{n}": {"federated": each} for n, each in enumerate(scores)}
    return RunResult(sites=sites, mean={"federated": average_scores(scores)})


def test_mentions_have_precision_and_recall_under_both_definitions() -> None:
    """By hand: two of four predictions are right and the other two overlap a mention.
    Strict: 2/4 and 2/10; by any overlap: 4/4 and 4/10."""
    run = mention_run(mention_score((0, 10), (10, 20), (20, 25), (31, 39)))
    cells = ["50.0", "20.0", "28.6", "100.0", "40.0", "57.1"]
    assert rows_of(display.make_result_table(run), "s0") == {"federated": cells}


def test_one_long_mention_over_a_note_does_not_look_perfect() -> None:
    """By hand: one prediction over ten mentions is right and finds all ten by any
    overlap; one to one it has one pair: precision 1, recall 0.1, F1 2/11."""
    overlong, good = mention_score((0, 100)), mention_score((0, 10), (10, 20))
    table = display.make_result_table(mention_run(overlong, good))
    cells = ["0.0", "0.0", "0.0", *["100.0"] * 3, "100.0", "10.0", "18.2"]
    assert rows_of(table, "s0") == {"federated": cells}
    assert "one long mention can match several" in str(table.caption)
    assert "100.0 10.0 18.2" in " ".join(
        row_of(display.make_evaluation_table(overlong), "Drug")
    )
    only_good = display.make_result_table(mention_run(good))
    assert len(rows_of(only_good, "s0")["federated"]) == 6
    assert len(row_of(display.make_evaluation_table(good), "Drug")) == 7
    assert only_good.caption is None


def test_no_table_of_a_run_is_wider_than_80_columns() -> None:
    overlong = mention_score((0, 100))
    sites = {f"hospital_{n}": dict.fromkeys(CONDITIONS, overlong) for n in range(2)}
    mean = dict.fromkeys(CONDITIONS, average_scores([overlong]))
    paired = {"difference": 0.01, "low": -0.1, "high": 0.11, "p_value": 0.6}
    values = {"sites": sites, "mean": mean, "paired": {"alone": {"hospital_0": paired}}}
    for table in display.make_result_tables(RunResult(title="a job", seed=1, **values)):
        out = io.StringIO()
        Console(file=out, width=80).print(table)
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines if "hospital_0" in line)
        cut = [line for line in lines if "100.0" in line and line.count("100.0") < 4]
        assert not cut


def test_the_verdict_follows_the_paired_test() -> None:
    """By the unpaired interval this run shows no difference."""
    sites = {
        "a": {
            "alone": mention_score((0, 10)),
            "federated": mention_score((0, 10), (10, 20)),
        }
    }
    mean = {c: average_scores([sites["a"][c]]) for c in sites["a"]}
    alone = RunResult.model_validate({"sites": sites, "mean": mean})
    row = row_of(display.make_verdict_table(alone), "a")
    assert " ".join(row[-3:]) == "no difference shown"
    assert row[-5] == "–"  # no p
    assert "an unpaired interval" in str(display.make_verdict_table(alone).caption)  # type: ignore[union-attr]
    paired = {"difference": 0.15, "low": 0.02, "high": 0.3, "p_value": 0.0084}
    judged = alone.model_copy(
        update={"paired": {"alone": {"a": PairedDifference(**paired)}}}
    )
    row = row_of(display.make_verdict_table(judged), "a")
    assert row[0] == "15.0"
    assert row[-3:] == ["0.0084", "–", "federated"]
    doubtful = {"a": PairedDifference(**{**paired, "p_value": 0.078})}
    judged = alone.model_copy(update={"paired": {"alone": doubtful}})
    assert (
        " ".join(row_of(display.make_verdict_table(judged), "a")[-3:])
        == "no difference shown"
    )


def test_the_gain_of_each_site_is_shown_in_a_table() -> None:
    values = summary()
    verdicts = display.make_verdict_table(RunResult(**values))
    for site, scores in values["sites"].items():
        gain = 100 * (
            scores["federated"]["phenotypes"]["f1"]
            - scores["alone"]["phenotypes"]["f1"]
        )
        row = row_of(verdicts, site)
        assert abs(float(row[0]) - abs(gain)) < 0.06  # signs are not words
        assert " ".join(row[-3:]) == "no difference shown"
    assert row_of(verdicts, "mean")
    assert (
        display.make_verdict_table(
            RunResult(**summary_of({"a": {"federated": codes_alone(1)}}))
        )
        is None
    )
    assert len(display.make_result_tables(RunResult(**values))) == 3


def test_a_run_of_stage_1_alone_shows_loss_and_auroc_of_codes() -> None:
    values = summary_of(
        {"a": {"federated": codes_alone(1)}, "b": {"federated": codes_alone(3)}}
    )
    values["title"] = "ADR [/v2]"
    table = result_table(values)
    assert rows_of(table, "b") == {"federated": ["0.330", "73.0"]}
    heads = next(line for line in cells_of(table) if "AUROC" in line)
    assert heads[-3:] == ["loss", "AUROC", "%"]
    assert rows_of(table, "mean") == {"federated": ["0.320", "72.0"]}
    assert disease_table(values) is None
    title = result_table(values).title  # square brackets are no markup
    assert isinstance(title, str)
    assert Text.from_markup(title).plain.startswith("ADR [/v2] (")


def test_a_condition_that_is_not_a_bound_is_marked_in_the_table() -> None:
    values = {**summary(), "marks": {"pooled": "It has none of [4] epochs"}}
    table = result_table(values)
    trained = [str(cell) for cell in table.columns[1].cells]
    assert trained == ["alone", "federated", "pooled *"] * (len(values["sites"]) + 1)
    words = " ".join(word for line in cells_of(table) for word in line)
    # brackets are no markup, `shown` drops them
    assert "It has none of 4 epochs" in words


def parts_with_personal_epochs(epochs: int) -> list[Part]:
    """Return the parts of a FedNER job whose sites end with epochs of their own."""
    sites = tuple(site(name, "ADE") for name in "ab")
    table = {
        "method": "fedner",
        "training": {"personal_epochs": epochs},
        "model": {"hashed_words": 8},
        "synthetic": {},
    }
    job = parse_job(table, "j", Path(), "j.toml")
    return list_parts(job, Sites(sites), job.module.configure(job.config, sites))


def test_a_pooled_model_without_personal_epochs_is_marked() -> None:
    marks = explain_incomparable_conditions(parts_with_personal_epochs(4))
    assert [*marks] == ["pooled"]
    assert "without the 4 personal epochs at the end of alone and federated" in str(
        marks
    )


def test_no_condition_is_marked_if_there_are_no_personal_epochs() -> None:
    assert explain_incomparable_conditions(parts_with_personal_epochs(0)) == {}


@pytest.mark.parametrize(
    ("low", "p", "disagreements"), [(0.01, 0.08, 1), (0.01, 0.01, 0), (-0.1, 0.5, 0)]
)
def test_the_table_notes_if_interval_and_p_value_disagree(
    low: float, p: float, disagreements: int
) -> None:
    test = Bootstrap(0.5, 0.4, 0.1, low, 0.2, p, 100)
    table = display.make_comparison_table(
        Comparison("strict F1", "a", "b", 100, {"x": test}, {}, {}, {})
    )
    words = " ".join(word for line in cells_of(table) for word in line)
    assert words.count("claim no difference") == disagreements


def test_a_comparison_of_two_runs_names_both() -> None:
    test = Bootstrap(0.5, 0.4, 0.1, 0.05, 0.2, 0.01, 100)
    runs = ("first", "second")
    of_two = Comparison("AUROC", "pooled", "pooled", 100, {"x": test}, {}, {}, {}, runs)
    words = " ".join(
        word
        for line in cells_of(display.make_comparison_table(of_two))
        for word in line
    )
    assert "pooled of first minus pooled of second" in words
    assert words.count("first") == words.count("second") == 2

    of_one = of_two._replace(against="alone", runs=())
    words = " ".join(
        word
        for line in cells_of(display.make_comparison_table(of_one))
        for word in line
    )
    assert "pooled minus alone" in words


def test_sites_without_labels_are_counted_but_not_listed() -> None:
    sites = {
        "a": {"federated": site_score(1) | {"ranking": {"auroc": None}}},
        "codes": {"federated": codes_alone(2)},
        "n": {"federated": {}},
    }
    table = result_table(summary_of(sites))
    lines = cells_of(table)
    assert rows_of(table, "a")["federated"][-1] == "–"  # a number that does not exist
    words = " ".join(word for line in lines for word in line)
    assert "2 more sites have no labelled test patient" in words
    assert not {"codes", "n"} & {line[0] for line in lines}


def test_a_run_without_test_patients_prints_a_remark() -> None:
    """No table of masked words for patients; a run with any score has nothing to say."""
    bare = summary_of(
        {"a": {"alone": {}, "federated": {}}, "b": {"alone": {}, "federated": {}}}
    )
    assert nothing_judged(bare).startswith("no test patient has a label or a code")
    assert nothing_judged(bare | {"method": "pretrain"}).startswith(
        "nothing is held out"
    )
    assert nothing_judged(summary()) == ""
    assert (
        nothing_judged(summary_of({"a": {"alone": {}}, "b": {"alone": codes_alone(1)}}))
        == ""
    )


def test_the_disease_table_has_the_layout_of_the_paper() -> None:
    """Each cell by hand from the sites' scores; the average is of the rows above it."""
    values = summary()
    table = disease_table(values)
    columns: list[list[float]] = []
    for name in OUTPUTS:
        cells = []
        for c in CONDITIONS:
            site_scores = [
                values["sites"][s][c]["by_output"][name] for s in ("north", "south")
            ]
            cells += [
                100 * fmean(each["macro"][k] for each in site_scores)
                for k in ("precision", "recall", "f1")
            ]
            areas = [each["auroc"]["value"] for each in site_scores]
            cells.append(np.nan if None in areas else 100 * fmean(areas))
        columns.append(cells)
        assert row_of(table, name) == [
            "–" if np.isnan(v) else f"{v:.1f}" for v in cells
        ]
    means = np.nanmean(np.array(columns), axis=0)
    assert row_of(table, "average") == [f"{mean:.1f}" for mean in means]


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_shortens_names_and_not_numbers(width: int) -> None:
    values = summary()
    for scores in values["mean"].values():
        scores["by_output"]["Hypertriglyceridemia"] = scores["by_output"].pop("obesity")
    lines = cells_of(disease_table(values), width)
    wide = {
        tuple(line[-12:]) for line in cells_of(disease_table(values)) if len(line) == 13
    }
    narrow = {tuple(line[-12:]) for line in lines if len(line) == 13}
    assert narrow == wide
    assert len(narrow) == 5  # the heads, three diseases, the average


def test_the_progress_bar_shows_planning_and_then_the_runs() -> None:
    """Only the runs are left on the terminal when all have ended."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    with showing_runs(console, "tiny") as bar:
        bar.show_planning("first, alone", 0, 2)
        bar.show_planning("second, alone", 1, 2)
        bar.show_planning("", 2, 2)
        bar("first, alone, seed 1", 1, 4)
    last_frame = output.getvalue().rpartition("tiny")[2]
    assert "1/4" in last_frame
    assert "first, alone, seed 1" in last_frame
    assert "planning" not in last_frame


def test_planning_prints_one_line_if_the_output_is_not_a_terminal() -> None:
    output = io.StringIO()
    with showing_runs(Console(file=output, width=120), "tiny") as bar:
        bar.show_planning("first, alone", 0, 2)
        bar.show_planning("second, alone", 1, 2)
        bar.show_planning("", 2, 2)
        bar("first, alone, seed 1", 1, 4)
    assert output.getvalue().splitlines() == [
        "tiny: planning the runs",
        "tiny: 1/4 first, alone, seed 1",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_square_brackets_in_the_names_of_runs_are_shown(is_terminal: bool) -> None:
    output = io.StringIO()
    console = Console(
        file=output, force_terminal=is_terminal, color_system=None, width=120
    )
    with showing_runs(console, "[tiny] jobs") as bar:
        bar.show_planning("[red]ward[/red], alone", 0, 1)
        bar.show_planning("", 1, 1)
        bar("[red]ward[/red], alone, seed 1", 1, 4)
    printed = output.getvalue()
    assert "[tiny] jobs" in printed
    assert "[red]ward[/red], alone, seed 1" in printed
    if is_terminal:
        assert "[red]ward[/red], alone " in printed


def test_control_characters_in_names_are_escaped_in_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A type of a stranger's corpus could clear the screen or imitate a result."""
    table = Table("\x1b]0;title\x07", "type")
    table.add_row("\u202eGURD", "\x1b[2JDRUG\x00")
    console = CleanConsole(file=io.StringIO(), width=200)
    console.print(table)
    console.print("[red]\x9b2J", Text("\x1b[31m"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("\\x1b]0;title", "\\u202eGURD", "\\x1b[2JDRUG\\x00", "\\x9b2J"):
        assert word in shown
    assert all(line.isprintable() for line in shown.split("\n"))
