"""What a terminal shows of patients: counts, and remarks on scores."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from phenotype_patients import DISEASES, SPACE, VOCABULARY, sites_of
from phenotype_scores import codes_alone, site_score
from shown_tables import cells_of, row_of

from fednotes.apps.phenotyping.causes import find_score_causes
from fednotes.apps.phenotyping.cohort import Bags, Cohort, SitePatients
from fednotes.apps.phenotyping.data_kind import KIND
from fednotes.cli.display import make_count_tables
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.score_causes import find_empty_scores

JOB = parse_job({"method": "phenotype", "synthetic": {}}, "tiny", Path(), "tiny.toml")


def score_notes(scores: dict[str, Any]) -> list[str]:
    """Return the notes of a run with these scores."""
    return list(map(str, find_score_causes(JOB, scores, {})))


def test_remarks_name_phenotypes_that_are_never_predicted() -> None:
    score = site_score(1)
    score["by_output"]["asthma"]["present"]["predicted"] = 0
    never, lone = score_notes({"north": {"federated": score}})
    assert never.startswith("north, federated: predicts asthma for no patient:")
    assert "all test patients have the same label for gout" in lone
    assert list(find_empty_scores(JOB, {"north": {"federated": score}})) == []
    assert score_notes({"north": {"federated": codes_alone(1)}}) == []


def test_patients_are_counted_by_part() -> None:
    """Counts by plain loops over the patients."""
    sites = sites_of(2)
    counted = cells_of(make_count_tables(KIND.tabulate_counts(sites))[0])
    lines = [line for line in counted if {"train", "valid", "test"} & {*line}]
    for place, site in enumerate(sites):
        for at, part in enumerate(("train", "valid", "test")):
            cohort = getattr(site, part)
            sizes = [
                int(cohort.bags.offsets[i + 1] - cohort.bags.offsets[i])
                for i in range(len(cohort))
            ]
            expected = [
                len(cohort),
                sum(p in site.codes for p in cohort.patients),
                sum(
                    any(label >= 0 for label in labels)
                    for labels in cohort.labels.tolist()
                ),
                sizes.count(0),
                f"{fmean(sizes):.1f}",
                max(sizes),
            ]
            assert lines[3 * place + at][-6:] == list(map(str, expected))


def test_labels_of_test_patients_are_counted_in_a_table() -> None:
    """By hand; a site without labels is left out, and no table is made without any."""
    labels = np.array([[1, 0, 2], [1, 1, -1], [0, -1, -1]], np.int8)
    bags = Bags.from_lists([[0], [1], []], VOCABULARY)
    cohort = Cohort("a", ("x", "y", "z"), bags, labels, DISEASES)
    empty = cohort.take([])
    bare = Cohort(
        "b", ("u",), Bags.from_lists([[]], VOCABULARY), np.full((1, 3), -1), DISEASES
    )
    sites = (
        SitePatients("a", SPACE, empty, empty, cohort, {}),
        SitePatients("b", SPACE, empty, empty, bare, {}),
    )
    assert row_of(make_count_tables(KIND.tabulate_counts(sites))[1], "asthma") == [
        "2/1/0"
    ]
    assert row_of(make_count_tables(KIND.tabulate_counts(sites))[1], "gout") == [
        "0/0/1"
    ]
    assert len(KIND.tabulate_counts(sites[1:])) == 1
    assert ["valid", "0", "0", "0", "0", "–", "–"] in cells_of(
        make_count_tables(KIND.tabulate_counts(sites))[0]
    )
