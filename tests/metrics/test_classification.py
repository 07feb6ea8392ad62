"""Scores of classes and rankings, compared with scikit-learn; comparisons of runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from phenotype_scores import OUTPUTS, codes_alone, draw_patients, site_score
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    precision_recall_fscore_support,
    precision_score,
    recall_score,
    roc_auc_score,
)
from time_limits import processor_time_below

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, Span
from fednotes.core.update import Total, Update
from fednotes.metrics import classification
from fednotes.metrics.classification import CLASSES, ClassCounts, measure_rankings
from fednotes.metrics.paired_tests import (
    Bootstrap,
    bootstrap_documents,
    bootstrap_patients,
    bootstrap_sites,
)
from fednotes.metrics.spans import SpanCounts
from fednotes.metrics.summaries import average_scores, score_all_test_data, summarise

NAMES = (
    "Asthma",
    "Venous/Insufficiency",
    "Gout",
    "one class",
    "never predicted",
    "unlabelled",
)


def random_labels(patients: int = 80, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and predictions; the last outputs are what their names say."""
    rng = np.random.default_rng(seed)
    labels = rng.choice([-1, 0, 0, 1, 1, 2], (patients, len(NAMES)))
    predicted = np.where(
        rng.random(labels.shape) < 0.6, np.maximum(labels, 0), labels[::-1] % 3
    )
    labels[:, 3] = predicted[:, 3] = 1
    predicted[:, 4] = 0
    labels[:, 5] = -1
    return labels.astype(np.int8), predicted.astype(np.int8)


def scikit_learn(labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Return (precision, recall, f1): the mean of each output's macro scores."""
    rows = []
    for gold, predictions in zip(labels.T, predicted.T, strict=True):
        is_labelled = gold >= 0
        if is_labelled.any():
            scores = precision_recall_fscore_support(
                gold[is_labelled],
                predictions[is_labelled],
                average="macro",
                zero_division=0,
            )
            rows.append(scores[:3])
    return np.mean(rows, axis=0)


def values(scores: dict[str, float]) -> list[float]:
    return [scores[name] for name in ("precision", "recall", "f1")]


def test_macro_scores_equal_scikit_learn() -> None:
    """Oracle: precision_recall_fscore_support(average="macro"), disease by disease."""
    labels, predicted = random_labels()
    scores = ClassCounts.of(labels, predicted, NAMES).scores()
    assert values(scores["macro"]) == pytest.approx(scikit_learn(labels, predicted))
    assert scores["outputs"] == 5
    assert scores["macro"]["support"] == (labels >= 0).sum()
    for column, name in enumerate(NAMES[:5]):
        gold, predictions = labels[:, column], predicted[:, column]
        is_labelled = gold >= 0
        expected = precision_recall_fscore_support(
            gold[is_labelled], predictions[is_labelled], zero_division=0
        )
        present = np.unique([gold[is_labelled], predictions[is_labelled]])
        for c, row in zip(present, np.transpose(expected), strict=True):
            class_scores = scores["by_output"][name][CLASSES[c]]
            assert [*values(class_scores), class_scores["support"]] == pytest.approx(
                row
            )
            assert class_scores["predicted"] == (predictions[is_labelled] == c).sum()
        assert values(scores["by_output"][name]["macro"]) == pytest.approx(
            np.mean(np.transpose(expected)[:, :3], axis=0)
        )
        assert set(scores["by_output"][name]) == {
            "macro",
            *(CLASSES[c] for c in present),
        }
    assert "unlabelled" not in scores["by_output"]


def test_micro_scores_and_scores_of_the_present_class_equal_scikit_learn() -> None:
    """Oracle: micro averages over all pairs; binary scores of the class present."""
    labels, predicted = random_labels()
    scores = ClassCounts.of(labels, predicted, NAMES).scores()
    is_labelled = labels >= 0
    gold, predictions = labels[is_labelled], predicted[is_labelled]
    three = (precision_score, recall_score, f1_score)
    assert values(scores["micro"]) == pytest.approx(
        [f(gold, predictions, average="micro") for f in three]
    )
    binary = [f(gold == 1, predictions == 1, zero_division=0) for f in three]
    assert values(scores["present"]["micro"]) == pytest.approx(binary)
    columns = [
        (labels[k, c] == 1, predicted[k, c] == 1)
        for c, k in enumerate(is_labelled.T)
        if k.any()
    ]
    macro = np.mean(
        [[f(g, s, zero_division=0) for f in three] for g, s in columns], axis=0
    )
    assert values(scores["present"]["macro"]) == pytest.approx(macro)


def test_counts_of_sites_add_up_to_those_of_all_patients() -> None:
    """Oracle: all patients at one site; through the metrics of an Update and back."""
    labels, predicted = random_labels()
    together = ClassCounts.of(labels, predicted, NAMES)
    parts = [
        ClassCounts.of(labels[r], predicted[r], NAMES)
        for r in (slice(0, 9), slice(9, 80))
    ]
    total = Total.of([Update(metrics=p.to_metrics() | {"loss": 1.0}) for p in parts])
    received = ClassCounts.from_metrics(
        total.metrics | {"classes/x": 1.0, "classes/x/y/z": 1.0}
    )
    assert received.scores() == together.scores()
    assert (parts[0] + parts[1]).scores() == together.scores()
    assert (ClassCounts() + together).scores() == together.scores()
    empty = ClassCounts.of(labels[:0], predicted[:0], NAMES)
    assert empty.to_metrics().keys() == together.to_metrics().keys()
    assert empty.scores()["outputs"] == 0
    assert ClassCounts().scores()["macro"] == {
        "precision": 0,
        "recall": 0,
        "f1": 0,
        "support": 0,
    }


def test_questionable_labels_are_left_out_and_a_missing_prediction_scores_0() -> None:
    """Oracle: scikit-learn on the pairs that are left; -1 as a fourth class without a
    score."""
    labels, predicted = random_labels()
    labels, predicted = labels[:, :2], np.minimum(predicted[:, :2], 1)
    counts = ClassCounts.of(labels, predicted, NAMES[:2], ((0, 1), (0, 1)))
    expected = scikit_learn(np.where(labels == 2, -1, labels), predicted)
    assert values(counts.scores()["macro"]) == pytest.approx(expected)
    withheld = predicted.copy()
    withheld[::3] = -1
    scores = ClassCounts.of(labels, withheld, NAMES[:2]).scores()["by_output"][NAMES[0]]
    is_labelled = labels[:, 0] >= 0
    _, recall, _, _ = precision_recall_fscore_support(
        labels[is_labelled, 0],
        withheld[is_labelled, 0],
        labels=[0, 1, 2],
        zero_division=0,
    )
    assert [scores[c]["recall"] for c in CLASSES] == pytest.approx(recall)


def test_the_average_of_the_paper_is_the_mean_over_diseases() -> None:
    """Oracle: Table 3 of the paper, whose last line says .753, .715 and .724; its F1 is
    no harmonic mean of precision and recall (Gallstones), so it is a mean over classes.
    """
    table = np.array(
        """.941 .919 .930 .605 .606 .605 .583 .588 .585 .844 .774 .801 .879 .873 .876 .578 .543
        .558 .775 .619 .650 .948 .929 .938 .891 .894 .892 .877 .854 .865 .725 .519 .524 .531 .520
        .525 .627 .594 .609 .900 .894 .897 .590 .604 .596 .763 .712 .734""".split(),
        float,
    ).reshape(16, 3)
    assert table.mean(0) == pytest.approx([0.753, 0.715, 0.724], abs=1.1e-3)
    precision, recall, f1 = table[6]
    assert abs(2 * precision * recall / (precision + recall) - f1) > 0.03
    gold = np.array([1] * 10 + [0] * 90)[:, None]
    # as rare a disease: high precision, low recall
    predictions = np.array([1] * 2 + [0] * 98)[:, None]
    macro = ClassCounts.of(gold, predictions, ["d"]).scores()["macro"]
    assert macro["f1"] == pytest.approx(np.mean([2 * 2 / 12, 2 * 90 / 188]))
    assert macro["f1"] < 2 / (1 / macro["precision"] + 1 / macro["recall"]) - 0.05


# ---- bootstrap -----------------------------------------------------------------------


def is_the_loop(
    bootstrap: Bootstrap, score: Callable[..., float], a: Any, b: Any, units: int
) -> None:
    """Compare with a loop over the same draws (seed 5) that scores each one anew."""
    draws = np.random.default_rng(5).integers(0, units, (bootstrap.samples, units))
    each = [score(draw, a) - score(draw, b) for draw in draws]
    everyone = np.arange(units)
    observed = score(everyone, a) - score(everyone, b)
    assert (bootstrap.f1_a, bootstrap.f1_b) == pytest.approx(
        (score(everyone, a), score(everyone, b))
    )
    assert bootstrap.difference == pytest.approx(observed)
    assert (bootstrap.low, bootstrap.high) == pytest.approx(
        tuple(np.quantile(each, (0.025, 0.975)))
    )
    extreme = sum(abs(d - observed) >= abs(observed) - 1e-12 for d in each)
    assert bootstrap.p_value == pytest.approx((1 + extreme) / (1 + bootstrap.samples))


def test_the_paired_test_of_macro_f1_equals_a_plain_loop() -> None:
    labels, a = random_labels(30)
    b = np.where(np.random.default_rng(3).random(a.shape) < 0.2, 0, a).astype(np.int8)
    bootstrap = bootstrap_patients(labels, a, b, samples=60, seed=5)
    is_the_loop(
        bootstrap,
        lambda draw, predictions: scikit_learn(labels[draw], predictions[draw])[2],
        a,
        b,
        30,
    )


def test_the_paired_test_of_areas_equals_a_plain_loop() -> None:
    """scikit-learn's area where both classes are."""
    rng = np.random.default_rng(1)
    labels = (rng.random((40, 3)) < 0.3).astype(np.int8)
    labels[rng.random((40, 3)) < 0.1] = -1
    # nobody has the last one
    labels[:, 2] = np.where(labels[:, 2] == 1, 0, labels[:, 2])
    labels[0, 2] = 2
    a, b = (labels * s + rng.normal(size=labels.shape).round(1) for s in (1.5, 0.2))

    def area(draw: np.ndarray, scores: np.ndarray) -> float:
        each = []
        for c in range(3):
            labelled = draw[np.isin(labels[draw, c], (0, 1))]
            if len(np.unique(labels[labelled, c])) == 2:
                each.append(roc_auc_score(labels[labelled, c], scores[labelled, c]))
        return float(np.mean(each))

    is_the_loop(
        bootstrap_patients(labels, a, b, "auroc", samples=60, seed=5), area, a, b, 40
    )


# ---- rankings ------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_areas_equal_scikit_learn(ties: bool) -> None:
    """Oracle: roc_auc_score and average_precision_score, unlabelled and questionable
    left out."""
    rng = np.random.default_rng(0)
    labels = rng.choice([-1, 0, 0, 1, 2], 200)
    scores = rng.normal(size=200) + (labels == 1)
    scores = np.round(scores) if ties else scores
    is_labelled = (labels == 0) | (labels == 1)
    ranked = measure_rankings(labels[:, None], scores[:, None], ["d"], samples=0)[
        "by_output"
    ]["d"]
    for name, area in (("auroc", roc_auc_score), ("auprc", average_precision_score)):
        assert ranked[name]["value"] == pytest.approx(
            area(labels[is_labelled], scores[is_labelled])
        )


def test_intervals_equal_a_plain_loop() -> None:
    """Oracle: a loop over the same draws, scikit-learn's areas in each that has both
    classes."""
    rng = np.random.default_rng(0)
    labels = rng.choice([-1, 0, 0, 0, 1], (40, 3))
    labels[:, 2] = 0
    labels[:2, 2] = 1  # so rare that some draws have none
    scores = np.round(rng.normal(size=labels.shape) + labels, 1)
    ranked = measure_rankings(labels, scores, ["a", "b", "c"], samples=100, seed=2)
    areas = {"auroc": roc_auc_score, "auprc": average_precision_score}
    for name, area in areas.items():
        per_draw = np.full((101, 3), np.nan)
        draws = np.random.default_rng(2).integers(0, 40, (100, 40))
        for i, draw in enumerate([np.arange(40), *draws]):
            for c in range(3):
                y, s = labels[draw, c], scores[draw, c]
                if len(np.unique(y[y >= 0])) == 2:
                    per_draw[i, c] = area(y[y >= 0], s[y >= 0])
        for c, output in enumerate("abc"):
            interval, values_drawn = ranked["by_output"][output][name], per_draw[1:, c]
            assert interval["value"] == pytest.approx(per_draw[0, c])
            expected = np.quantile(
                values_drawn[~np.isnan(values_drawn)], (0.025, 0.975)
            )
            assert [interval["low"], interval["high"]] == pytest.approx(expected)
        assert np.isnan(per_draw[1:, 2]).any()
        macro, means = ranked["macro"][name], np.nanmean(per_draw, axis=1)
        assert macro["value"] == pytest.approx(means[0])
        assert [macro["low"], macro["high"]] == pytest.approx(
            np.quantile(means[1:], (0.025, 0.975))
        )
    assert ranked["by_output"]["c"]["present"] == 2
    assert ranked["by_output"]["c"]["absent"] == 38


def test_an_output_with_one_class_has_no_area() -> None:
    """Oracle: scikit-learn refuses; here None, and the macro mean goes without it."""
    labels = np.array([[1, 0, -1], [1, 1, -1], [1, 0, 2]])
    scores = np.array([[0.1, 0.2, 0.3], [0.2, 0.9, 0.3], [0.3, 0.3, 0.3]])
    ranked = measure_rankings(labels, scores, ["all", "some", "none"], samples=20)
    nothing = {"value": None, "low": None, "high": None}
    for name in ("all", "none"):
        assert (
            ranked["by_output"][name]["auroc"]
            == ranked["by_output"][name]["auprc"]
            == nothing
        )
    assert ranked["macro"]["outputs"] == 1
    assert (
        ranked["macro"]["auroc"]["value"]
        == ranked["by_output"]["some"]["auroc"]["value"]
        == 1
    )
    assert (
        measure_rankings(labels[:0], scores[:0], ["a", "b", "c"])["macro"]["auroc"]
        == nothing
    )
    assert (
        measure_rankings(labels, scores, ["a", "b", "c"], samples=0)["macro"]["auroc"][
            "low"
        ]
        is None
    )
    assert measure_rankings(labels[:, :0], scores[:, :0], [])["macro"]["outputs"] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda z: ClassCounts.of(z, z[:, :1], "ab"),
            r"labels \(4, 2\) and predictions \(4, 1\) for",
        ),
        (lambda z: ClassCounts.of(z + 3, z, "ab"), "a label is not one of"),
        (lambda z: ClassCounts.of(z, z - 2, "ab"), "a prediction is not one of"),
        (lambda z: ClassCounts.of(z, z, "ab", [(0, 1)]), "classes of 1 outputs for 2"),
        (lambda z: bootstrap_patients(z, z, z, samples=0), "at least one sample"),
        (lambda z: bootstrap_patients(z[:0], z[:0], z[:0]), "at least one patient"),
        (lambda z: bootstrap_patients(z, z[:, :1], z, "auroc"), "must be alike"),
        (lambda z: measure_rankings(z, np.zeros((4, 3)), "ab"), r"scores \(4, 3\)"),
        (
            lambda z: measure_rankings(z, np.full((4, 2), np.nan), "ab"),
            "not a finite number",
        ),
        (
            lambda z: bootstrap_documents(*systems(3, (0.1, 0.1)), "relaxd"),
            "did you mean 'relaxed'",
        ),
        (
            lambda z: bootstrap_documents(*systems(3, (0.1, 0.1)), samples=0),
            "at least one sample",
        ),
        (lambda z: bootstrap_documents([], [], []), "at least one document"),
        (
            lambda z: bootstrap_documents(*systems(3, (0, 0))[:2], []),
            "3 gold documents but 0",
        ),
    ],
)
def test_an_error_describes_both_mismatched_arguments(
    call: Callable[[np.ndarray], object], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        call(np.zeros((4, 2), np.int8))


# ---- repeats and the paired bootstrap against slow explicit programs


def systems(
    documents: int, errors: tuple[float, float], seed: int = 0
) -> list[list[Document]]:
    """Return gold, and two systems that shift or miss mentions with a probability."""
    rng = np.random.default_rng(seed)
    sides: list[list[Document]] = [[], [], []]
    for i in range(documents):
        gold = [Span(s, s + 5, "T") for s in range(0, 40, 8) if rng.random() < 0.5]
        sides[0].append(Document(str(i), "x" * 50, tuple(gold)))
        for side, error in zip(sides[1:], errors, strict=True):
            predictions = [
                Span(s.start + int(rng.random() < error), s.end, "T")
                for s in gold
                if rng.random() > error / 2
            ]
            side.append(Document(str(i), "x" * 50, tuple(predictions)))
    return sides


def test_mean_and_deviation_over_seeds_equal_the_statistics_module() -> None:
    """Expected: the standard library's `statistics`."""
    f1 = [0.5, 0.61, 0.58]
    runs: list[dict[str, Any]] = [
        {
            "method": "fedner",
            "done": True,
            "seconds": 10 + i,
            "sites": {"h1": {"strict": {"f1": x}}},
        }
        for i, x in enumerate(f1)
    ]
    del runs[2]["seconds"]

    def spread(numbers: list[float]) -> dict[str, Any]:
        mean, std = statistics.mean(numbers), statistics.stdev(numbers)
        return {
            "mean": pytest.approx(mean),
            "std": pytest.approx(std),
            "n": len(numbers),
        }

    sites = {"h1": {"strict": {"f1": spread(f1)}}}
    assert summarise(runs) == {"seconds": spread([10, 11]), "sites": sites}
    assert summarise([{"f1": 0.5}]) == {"f1": {"mean": 0.5, "std": None, "n": 1}}
    assert summarise([]) == {}
    with pytest.raises(DataError, match="'f1' is a number in one run"):
        summarise([{"f1": 0.5}, {"f1": {"micro": 0.5}}])


@pytest.mark.parametrize("metric", ["strict", "relaxed", "relaxed_one_to_one"])
def test_the_bootstrap_equals_explicit_resampling(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each resampled corpus is built and scored anew."""
    gold, a, b = systems(15, (0.1, 0.4))

    def f1(draw: np.ndarray, system: list[Document]) -> float:
        gold_drawn, system_drawn = [gold[i] for i in draw], [system[i] for i in draw]
        return float(SpanCounts.of(gold_drawn, system_drawn).scores()[metric]["f1"])

    # all at once, and seven resamples at a time
    for chunk in (classification._CHUNK, 15 * 7):
        monkeypatch.setattr(classification, "_CHUNK", chunk)
        is_the_loop(bootstrap_documents(gold, a, b, metric, 60, 5), f1, a, b, 15)


def test_p_values_are_uniform_for_equal_systems() -> None:
    """Two systems of one error rate: about one in ten comparisons has p < 0.1.

    Of 100 comparisons, more than 24 or fewer than 2 has a probability below 1e-4
    (binomial).
    """
    p = [
        bootstrap_documents(
            *systems(60, (0.3, 0.3), seed), samples=200, seed=seed
        ).p_value
        for seed in range(100)
    ]
    assert 2 <= sum(x < 0.1 for x in p) <= 24


def test_a_large_corpus_is_resampled_quickly() -> None:
    """10,000 resamples over 5,000 documents (about a second; the bound is for slow
    machines)."""
    gold, a, b = systems(5000, (0.2, 0.21))
    with processor_time_below(15):
        bootstrap_documents(gold, a, b)


# ---- means over sites and sums of their counts, by scikit-learn and by hand


def test_a_mean_covers_the_sites_that_report_the_score() -> None:
    """By hand: a site of codes alone is in the mean of codes and in no other."""
    a, b = site_score(1), site_score(2)
    means = average_scores([a, codes_alone(5), b, {}])
    assert means["codes"]["loss"] == pytest.approx((0.31 + 0.35 + 0.32) / 3)
    assert means["calibration"] == {"brier": pytest.approx(0.115)}
    for kind, key in (
        ("phenotypes", "f1"),
        ("present", "recall"),
        ("ranking", "auroc"),
    ):
        assert means[kind][key] == pytest.approx((a[kind][key] + b[kind][key]) / 2)
    for name in OUTPUTS:
        mean_score = means["by_output"][name]
        assert mean_score["sites"] == 2
        assert mean_score["f1"] == pytest.approx(
            fmean(each["by_output"][name]["macro"]["f1"] for each in (a, b))
        )


def test_the_mean_of_a_score_that_no_site_reports_is_none() -> None:
    """Nobody has gout, so it has no AUROC; a site without one does not count."""
    a, b = site_score(1), site_score(2)
    assert average_scores([a, b])["by_output"]["gout"]["auroc"] is None
    a["ranking"]["auroc"] = None
    assert average_scores([a, b])["ranking"]["auroc"] == b["ranking"]["auroc"]
    b["ranking"]["auroc"] = None
    assert average_scores([a, b])["ranking"]["auroc"] is None


def test_the_mean_over_diseases_equals_the_macro_score() -> None:
    """An identity where all sites judge the same diseases: the mean of means, either
    way."""
    means = average_scores([site_score(seed) for seed in (1, 2, 3)])
    for key in ("precision", "recall", "f1"):
        each = [disease[key] for disease in means["by_output"].values()]
        assert fmean(each) == pytest.approx(means["phenotypes"][key])


def test_an_interval_is_kept_only_if_all_sites_report_the_same() -> None:
    area = site_score(1)["by_output"]["asthma"]["auroc"]
    equal_sites = average_scores([site_score(1), site_score(1)])["by_output"]["asthma"]
    assert equal_sites["auroc_interval"] == [area["low"], area["high"]]
    assert (
        "auroc_interval"
        not in average_scores([site_score(1), site_score(2)])["by_output"]["gout"]
    )
    assert (
        "auroc_interval"
        not in average_scores([site_score(1), site_score(2)])["by_output"]["asthma"]
    )


def test_summed_scores_equal_the_scores_of_all_patients_together() -> None:
    """Oracle: scikit-learn's macro F1 of each disease over both sites' labelled
    patients."""
    parts = [draw_patients(seed) for seed in (1, 2)]
    labels, predicted = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    summed = score_all_test_data([site_score(1), codes_alone(3), site_score(2)])
    each = []
    for column, name in enumerate(OUTPUTS):
        known = labels[:, column] >= 0
        each.append(
            f1_score(labels[known, column], predicted[known, column], average="macro")
        )
        assert summed["by_output"][name]["macro"]["f1"] == pytest.approx(each[-1])
    assert summed["phenotypes"]["f1"] == pytest.approx(fmean(each))


def test_scores_without_counts_cannot_be_summed() -> None:
    score = site_score(1)
    del score["class_counts"]
    assert score_all_test_data([score, site_score(2)]) == {}
    assert score_all_test_data([codes_alone(1)]) == {}
    assert score_all_test_data([{}]) == {}


def document_table(seed: int, documents: int) -> np.ndarray:
    """Return (documents, 4) counts: right, predicted, found, gold."""
    rng = np.random.default_rng(seed)
    gold, predicted = rng.integers(3, 9, (2, documents))
    right = np.minimum(gold, predicted) - rng.integers(0, 3, documents)
    return np.stack([right, predicted, right, gold], axis=1)


def test_means_over_sites_are_compared_by_resampling_each_site() -> None:
    """Oracle: another generator, and a loop over resamples of each site by itself.

    Two sites have the same counts of documents. Their draws must not go together: the
    deviation of the mean of the two would be √2 larger. 2,000 resamples estimate a
    deviation to 2 %.
    """
    sizes = {"a": 40, "c": 25, "empty": 0}
    counts = {
        site: (document_table(2 * n, size), document_table(2 * n + 1, size))
        for n, (site, size) in enumerate(sizes.items())
    }
    counts = {
        "a": counts["a"],
        "b": counts["a"],
        "c": counts["c"],
        "empty": counts["empty"],
    }
    each, mean = bootstrap_sites(counts, 2000, 7)
    assert list(each) == ["a", "b", "c"]
    assert mean is not None

    def f1(table: np.ndarray) -> float:
        right, predicted, _, gold = table.sum(axis=0)
        return 2 * right / (predicted + gold)

    gains = {s: f1(a) - f1(b) for s, (a, b) in counts.items() if len(a)}
    assert {s: test.difference for s, test in each.items()} == pytest.approx(gains)
    assert mean.difference == pytest.approx(sum(gains.values()) / 4)
    rng = np.random.default_rng(123)
    mean_differences = []
    for _ in range(2000):
        differences = [0.0]
        for a, b in counts.values():
            if len(a):
                rows = rng.integers(0, len(a), len(a))
                differences.append(f1(a[rows]) - f1(b[rows]))
        mean_differences.append(sum(differences) / 4)
    low, high = np.quantile(mean_differences, (0.025, 0.975))
    assert mean.high - mean.low == pytest.approx(high - low, rel=0.1)
    assert (mean.low, mean.high) == pytest.approx((low, high), abs=0.01)


def test_sites_without_test_documents_are_not_compared() -> None:
    empty = np.zeros((0, 4), np.int64)
    assert bootstrap_sites({"a": (empty, empty)}) == ({}, None)
    assert bootstrap_sites({}) == ({}, None)
