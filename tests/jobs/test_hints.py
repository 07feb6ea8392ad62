"""What a run says beside its scores; and the time left where progress is written by lines."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fednotes.cli.display import RichDisplay
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.checks import check_documents
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.kinds.documents import never_right
from fednotes.jobs.simulate import Part, pooled_below_alone

ROUNDS = {"alone": {"rounds": 60}, "pooled": {"rounds": 20}}


def mean(alone: float, pooled: float) -> dict[str, Any]:
    return {"alone": {"strict": {"f1": alone}}, "pooled": {"strict": {"f1": pooled}}}


@pytest.mark.parametrize(
    ("heads", "personal", "rounds", "said"),
    [
        (True, 0, ROUNDS, ["an output layer for each"]),
        (False, 0, ROUNDS, ["one model serves all sites"]),
        (False, 3, ROUNDS, ["one model serves", "alone ends with 3 personal epochs"]),
        (True, 0, ROUNDS | {"pooled": {"rounds": 19}}, ["an output layer", "it took fewer rounds"]),
    ],
)
def test_pooled_below_alone(
    heads: bool, personal: int, rounds: dict[str, Any], said: list[str]
) -> None:
    """60 rounds of three sites are 20 at each; no reason is given but what the run knows."""
    own = SimpleNamespace(personal_epochs=personal)
    sites = (1, 2, 3) if heads else (1,)
    parts = [Part("alone", (1,), own), Part("pooled", sites, SimpleNamespace())]
    (line,) = pooled_below_alone(mean(0.7, 0.65), rounds, parts, 3)
    assert "mean F1 65.0 against 70.0" in line
    assert f"{rounds['pooled']['rounds']} rounds against 20 at a site" in line
    every = ["an output layer", "one model serves", "personal epochs", "fewer rounds"]
    assert [what for what in every if what in line] == [
        what for what in every if any(what in each or each in what for each in said)
    ]


@pytest.mark.parametrize("scores", [mean(0.7, 0.7), {"alone": {}, "pooled": {}}, {}])
def test_nothing_is_said_where_pooled_is_not_below(scores: dict[str, Any]) -> None:
    assert list(pooled_below_alone(scores, ROUNDS, [], 3)) == []


def site(name: str, *labels: str) -> SiteData:
    spans = tuple(Span(0, 4, label) for label in labels)
    return SiteData(name, TagSet(("ADE", "Drug", "Dose")), (Document("d", "text", spans),), (), ())


def scored(f1: float, support: int, predicted: int) -> dict[str, Any]:
    return {"strict": {"f1": f1}, "support": support, "predicted": predicted}


def test_types_that_score_nothing() -> None:
    """Named with their training mentions; not those that the test data lack, nor those found."""
    by_type = {
        "Drug": scored(0.5, 9, 9),
        "ADE": scored(0.0, 4, 0),
        "Dose": scored(0.0, 2, 3),
        "Route": scored(0.0, 0, 5),
        "Form": scored(0.0, 1, 0),
    }
    scores = {"a": {"federated": {"relaxed": {"f1": 0.5}, "by_type": by_type}}}
    told = list(never_right(scores, [site("a", "ADE", "Dose"), site("b", "ADE", "ADE")]))
    assert len(told) == 3
    assert "ADE scores 0 (1 training mentions here, 3 at all sites; never predicted)" in told[0]
    assert "label_map" not in told[0]
    assert "Dose scores 0 (1 training mentions here, 1 at all sites)" in told[1]
    assert "if other sites have it by another name: label_map" in told[1]
    assert "Form scores 0 (0 training mentions here, 0 at all sites; never" in told[2]
    assert "name it as the training data do (label_map)" in told[2]
    nothing = {"a": {"federated": {"relaxed": {"f1": 0.0}, "by_type": by_type}}}
    assert list(never_right(nothing, [site("a")])) == []  # another note says so


def test_lines_tell_the_time_left() -> None:
    """Three seconds a round, and seven rounds left after the third: 21 seconds."""
    out = io.StringIO()
    display = RichDisplay(Console(file=out, width=200))
    part: Any = Part("federated", (object(),), None)
    display.begin(part, 10, 5)
    for number in range(3):
        metrics = {"loss": 1.0}
        display.round(RoundResult(number, metrics, 1, 0, 0, 100 + 3.0 * number, True))
    display.end()
    lines = out.getvalue().splitlines()
    assert "left" not in lines[0]  # the first says nothing of the pace
    assert lines[2].endswith("21.0 s left at most")


def test_the_joiner_of_an_emoji_is_printable() -> None:
    """U+200D between two pictures is seen as one; alone it is not."""
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    report = check_documents([Document("a", f"well {family}"), Document("b", "a\u200db \u0007")])
    (found,) = (f for f in report.findings if f.code == "unprintable")
    assert found.counts == {"characters": 2, "documents": 1}
