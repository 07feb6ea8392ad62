"""Means over sites and sums of their counts, by scikit-learn and by hand."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from phenotype_scores import OUTPUTS, codes_alone, drawn, site_score
from sklearn.metrics import f1_score

from fednotes.metrics.compare import mean_scores, summed_scores


def test_means_are_over_the_sites_that_have_the_number() -> None:
    """By hand: a site of codes alone is in the mean of codes and in no other."""
    a, b = site_score(1), site_score(2)
    means = mean_scores([a, codes_alone(5), b, {}])
    assert means["codes"]["loss"] == pytest.approx((0.31 + 0.35 + 0.32) / 3)
    assert means["calibration"] == {"brier": pytest.approx(0.115)}
    for kind, key in (("phenotypes", "f1"), ("present", "recall"), ("ranking", "auroc")):
        assert means[kind][key] == pytest.approx((a[kind][key] + b[kind][key]) / 2)
    for name in OUTPUTS:
        found = means["by_output"][name]
        assert found["sites"] == 2
        assert found["f1"] == pytest.approx(
            fmean(each["by_output"][name]["macro"]["f1"] for each in (a, b))
        )


def test_a_number_that_exists_nowhere_is_none() -> None:
    """Nobody has gout, so it has no AUROC; a site without one does not count."""
    a, b = site_score(1), site_score(2)
    assert mean_scores([a, b])["by_output"]["gout"]["auroc"] is None
    a["ranking"]["auroc"] = None
    assert mean_scores([a, b])["ranking"]["auroc"] == b["ranking"]["auroc"]
    b["ranking"]["auroc"] = None
    assert mean_scores([a, b])["ranking"]["auroc"] is None


def test_the_mean_of_the_diseases_is_the_macro_score() -> None:
    """An identity where all sites judge the same diseases: the mean of means, either way."""
    means = mean_scores([site_score(seed) for seed in (1, 2, 3)])
    for key in ("precision", "recall", "f1"):
        each = [found[key] for found in means["by_output"].values()]
        assert fmean(each) == pytest.approx(means["phenotypes"][key])


def test_intervals_stay_where_all_sites_say_the_same() -> None:
    area = site_score(1)["by_output"]["asthma"]["auroc"]
    alike = mean_scores([site_score(1), site_score(1)])["by_output"]["asthma"]
    assert alike["auroc_interval"] == [area["low"], area["high"]]
    assert "auroc_interval" not in mean_scores([site_score(1), site_score(2)])["by_output"]["gout"]
    assert (
        "auroc_interval" not in mean_scores([site_score(1), site_score(2)])["by_output"]["asthma"]
    )


def test_sums_are_the_scores_of_all_patients_together() -> None:
    """Oracle: scikit-learn's macro F1 of each disease over both sites' labelled patients."""
    parts = [drawn(seed) for seed in (1, 2)]
    labels, predicted = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    found = summed_scores([site_score(1), codes_alone(3), site_score(2)])
    each = []
    for column, name in enumerate(OUTPUTS):
        known = labels[:, column] >= 0
        each.append(f1_score(labels[known, column], predicted[known, column], average="macro"))
        assert found["by_output"][name]["macro"]["f1"] == pytest.approx(each[-1])
    assert found["phenotypes"]["f1"] == pytest.approx(fmean(each))


def test_without_counts_there_is_no_sum() -> None:
    score = site_score(1)
    del score["class_counts"]
    assert summed_scores([score, site_score(2)]) == {}
    assert summed_scores([codes_alone(1)]) == {}
    assert summed_scores([{}]) == {}
