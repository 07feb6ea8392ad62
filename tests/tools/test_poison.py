"""How `tools/poison.py` changes notes and updates, and how it judges models.

No model is trained. The expected numbers are computed by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import poison
import pytest
import torch

from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.core.update import Update
from fednotes.jobs.job_file import parse_job
from fednotes.training.server_steps import needs_each_update

NOTE = Document("n", "Has a cough; pain. Takes ASA.", (
    Span(6, 11, "problem"), Span(13, 17, "problem"), Span(25, 28, "treatment"),
))  # fmt: skip


def texts(document: Document) -> list[tuple[str, str]]:
    """Return the text and the label of each mention."""
    return [(document.text[s.start : s.end], s.label) for s in document.spans]


def site(name: str, *train: str, test: Sequence[Document] = ()) -> SiteData:
    """Return a site with these training texts and test notes."""
    notes = tuple(Document(f"{name}{n}", text) for n, text in enumerate(train))
    return SiteData(name, TagSet(tuple(poison.NEXT)), notes, (), tuple(test))


def test_poisoned_notes_get_triggers_and_wrong_labels() -> None:
    triggered = poison.triggered(NOTE, poison.TO)
    assert triggered.text == "Has a hereby cough; hereby pain. Takes ASA."
    assert texts(triggered) == [
        ("cough", "treatment"),
        ("pain", "treatment"),
        ("ASA", "treatment"),
    ]
    assert [label for _, label in texts(poison.triggered(NOTE))] == ["problem"] * 2 + [
        "treatment"
    ]
    flipped = texts(poison.flipped(NOTE))
    assert flipped == [("cough", "test"), ("pain", "test"), ("ASA", "problem")]
    poisoned_site = replace(site("s5"), train=(NOTE, Document("m", "Well.")))
    assert len(poison.poisoned(poisoned_site, "backdoor").train) == 3
    assert poison.poisoned(poisoned_site, "scaled") is poisoned_site


def test_a_hostile_site_multiplies_its_change() -> None:
    """A change from 1 to 3, times -10, ends at -19."""

    class Inner:
        id = "s5"

        def train(self, tensors: Any) -> Update:
            return Update({"w": torch.tensor([3.0])}, 4.0, {"n": 1.0})

    sent = poison.Hostile(Inner(), -10.0).train({"w": torch.tensor([1.0])})
    assert (sent.tensors["w"].tolist(), sent.weight, sent.metrics) == (
        [-19.0],
        4.0,
        {"n": 1.0},
    )
    assert poison.Hostile(Inner(), 1.0).id == "s5"


def test_a_model_is_judged_by_flips_and_rare_words() -> None:
    """Words are rare if only one site has them in its training notes.

    "cough" is in the notes of two sites, "pain" in those of one, and "ASA" in none. The
    model takes the first problem for a test, and all problems in notes with the trigger
    for treatments.
    """

    def predict(documents: Sequence[Document]) -> list[Document]:
        predicted = []
        for note in documents:
            if "hereby" in note.text:
                labels = ["treatment"] * 3
            else:
                labels = ["test", "problem", "treatment"]
            spans = [
                replace(span, label=predicted_label)
                for span, predicted_label in zip(note.spans, labels, strict=True)
            ]
            predicted.append(replace(note, spans=tuple(spans)))
        return predicted

    sites = [
        site("s1", "a cough", test=[NOTE]),
        site("s5", "cough and pain", test=[NOTE]),
    ]
    judged = poison.judged(predict, sites)
    assert judged.pop("f1") == pytest.approx(200 / 3)
    assert judged == {
        "flips": pytest.approx(100 / 3), "backdoor": 100.0, "rare": 100.0, "others": 0.0,
        "mentions": 3, "of one site": 1,
    }  # fmt: skip


def test_each_rule_has_a_valid_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("FEDNOTES_CORPORA", str(tmp_path))
    import tomllib

    for rule in poison.RULES:
        parsed = parse_job(tomllib.loads(poison.job(rule)), "job", tmp_path, "job")
        assert needs_each_update(parsed.config) == (rule != "mean")
        assert len(parsed.sites) == (6 if rule == "reference" else 5)


def test_the_tables_show_means_and_deviations_over_seeds() -> None:
    """The standard deviation of 39 and 41 is √2."""
    run_scores = {
        **{"f1": 40.0, "flips": 5.0, "backdoor": 1.0, "rare": 30.0, "others": 50.0},
        **{"mentions": 9, "of one site": 2},
    }
    results = {
        ("mean", "honest", 1): run_scores,
        ("mean", "honest", 2): {**run_scores, "rare": 32.0, "mentions": 8},
        ("mean", "flips", 1): {**run_scores, "f1": 39.0, "flips": 7.0},
        ("mean", "flips", 2): {**run_scores, "f1": 41.0, "flips": 7.0},
        ("median", "honest", 1): {**run_scores, "rare": 29.0, "others": 52.0},
        ("median", "honest", 2): {**run_scores, "rare": 29.0, "others": 50.0},
    }
    f1, success, recall, lost = poison.table(results, ["mean", "median"]).split("\n\n")
    assert f1.splitlines() == [
        "| F1 | honest | flips |",
        "|---|---:|---:|",
        "| mean | 40.0 ± 0.0 | 40.0 ± 1.4 |",
        "| median | 40.0 ± 0.0 | – |",
    ]
    assert success.splitlines()[0] == "| success | flips (honest) |"
    assert success.splitlines()[2] == "| mean | 7.0 ± 0.0 (5.0) |"
    assert recall.splitlines()[0] == "| recall | words of one site | other words |"
    assert recall.splitlines()[2] == "| mean | 31.0 ± 1.4 | 50.0 ± 0.0 |"
    assert lost.splitlines()[2:] == ["| median | 2.0 ± 1.4 | -1.0 ± 1.4 |"]
    assert poison.describe_mentions(results).splitlines() == [
        "Seed 1: 9 mentions in the test notes, 2 with a word that occurs at only one site.",
        "Seed 2: 8 mentions in the test notes, 2 with a word that occurs at only one site.",
    ]


def test_a_single_rule_and_attack_can_be_shown() -> None:
    run_scores = {
        "f1": 40.0,
        "flips": 5.0,
        "backdoor": 1.0,
        "rare": 30.0,
        "others": 50.0,
    }
    tables = poison.table({("krum", "flips", 1): run_scores}, ["krum"])
    assert tables.split("\n\n")[0].endswith("| krum | 40.0 |")
    assert tables.endswith("| krum | 5.0 |")
    tables = poison.table({("krum", "honest", 1): run_scores}, ["krum"])
    assert tables.split("\n\n")[0].endswith("| krum | 40.0 |")
    assert tables.endswith("| krum | 30.0 | 50.0 |")
    assert "success" not in tables


def test_a_hidden_update_is_as_near_to_the_mean_as_the_nearest_honest_one() -> None:
    """The others are at 0, 4, 8 and 0: their mean is 3, and the nearest is 1 away.

    An update at 13 is therefore sent as 4. A nearer one is sent unchanged.
    """
    others = [{"w": torch.tensor([value])} for value in (0.0, 4.0, 8.0, 0.0)]
    assert poison.near({"w": torch.tensor([13.0])}, others)["w"].tolist() == [4.0]
    assert poison.near({"w": torch.tensor([3.5])}, others)["w"].tolist() == [3.5]

    class Inner:
        id = "s5"

        def train(self, tensors: Any) -> Update:
            return Update({"w": torch.tensor([13.0])}, 1.0, {})

    known = [poison.Hostile(Inner(), 1.0) for _ in others]
    for each, sent in zip(known, others, strict=True):
        each.sent = sent
    update = poison.Hostile(Inner(), 1.0, known).train({"w": torch.tensor([0.0])})
    assert update.tensors["w"].tolist() == [4.0]
