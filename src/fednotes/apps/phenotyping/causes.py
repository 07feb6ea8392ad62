"""Causes of poor results on patients, from scores and from counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fednotes.apps.phenotyping.cohort import SitePatients
from fednotes.apps.phenotyping.phenotyper import ATTENTION
from fednotes.core.parsing import as_mapping
from fednotes.core.wording import format_count, list_names
from fednotes.jobs.causes import Cause, Evidence, Importance, Setting, limit_importance
from fednotes.jobs.job import Job
from fednotes.jobs.settings_to_try import list_longer_training

# With fewer training patients of a class at all sites, a classifier has hardly seen it.
RARE_PATIENTS = 10
# Fewer than one patient in ten: without weights, "absent" is nearly always the better
# answer.
RARE_SHARE = 0.1


def count_training(job: Job, site: SitePatients) -> dict[str, Any]:
    """Return the counts of a site's patients from which causes are found.

    Args:
        job: The job.
        site: The site's patients.
    """
    counts: dict[str, Any] = {
        "patients": len(site.train),
        "coded": len(site.select_coded(site.train)),
        "labels": {
            phenotype: {
                "present": int((labels == 1).sum()),
                "labelled": int((labels >= 0).sum()),
            }
            for phenotype, labels in zip(
                site.phenotypes, site.train.labels.T, strict=True
            )
        },
    }
    if job.privacy is not None:
        counts["units"] = len(site.train)
    return counts


def find_score_causes(
    job: Job,
    scores: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, Any],  # noqa: ARG001 - part of the interface of SiteKind
) -> Iterator[Cause]:
    """Yield a cause for each model that misses diseases or lacks test patients.

    Args:
        job: The job.
        scores: The scores of each site by condition.
        facts: The counts of each site's patients.
    """
    for site, by_condition in scores.items():
        for condition, score in by_condition.items():
            by_disease = score.get("by_output", {}) if score else {}
            where = f"{site}, {condition}"
            yield from _find_missed_diseases(job, where, by_disease)
            yield from _find_single_classes(where, by_disease)


def _find_missed_diseases(
    job: Job, where: str, by_disease: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield a cause if a model predicts diseases of test patients for no patient.

    Args:
        job: The job.
        where: The site and the condition.
        by_disease: The scores of each disease on the site's test patients.
    """
    missed = _find_never_predicted(by_disease)
    if not missed:
        return
    support = {
        disease: _count_support(by_disease[disease], "present") for disease in missed
    }
    numbers = [f"{disease} {number:,}" for disease, number in support.items()]
    importance: Importance = "medium"
    if 2 * len(missed) >= len(by_disease):
        importance = "high"
    yield Cause(
        "types_missed",
        limit_importance(importance, sum(support.values()), RARE_PATIENTS),
        where,
        f"predicts {list_names(missed)} for no patient",
        f"train longer, or {_advise_on_rare_classes(job)}",
        evidence=(
            Evidence(
                f"test patients who have it: {list_names(numbers)}",
                "summary.json",
                {"test_patients": support},
            ),
        ),
        settings=(*_choose_weight_setting(job), *list_longer_training(job)),
    )


def _find_single_classes(where: str, by_disease: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield a cause if all test patients have the same label for some diseases.

    Args:
        where: The site and the condition.
        by_disease: The scores of each disease on the site's test patients.
    """
    alike = _find_without_both_classes(by_disease)
    if not alike:
        return
    yield Cause(
        "no_auroc",
        "low",
        where,
        f"all test patients have the same label for {list_names(alike)}",
        "these have no AUROC",
        evidence=(
            Evidence(
                f"{len(alike)} of {format_count(len(by_disease), 'phenotype')}",
                "summary.json",
                {"phenotypes": alike},
            ),
        ),
    )


def _advise_on_rare_classes(job: Job) -> str:
    """Return the advice with which rare classes are predicted more often."""
    if job.config.model.representation == ATTENTION:
        return "lower the threshold"
    return "give rare classes more weight"


def _choose_weight_setting(job: Job) -> tuple[Setting, ...]:
    """Return the setting that favours rare classes; () if the job favours them.

    This is their weight, or the threshold if an encoder is tuned.
    """
    if job.config.model.representation == ATTENTION:
        threshold = job.config.model.attention.threshold
        return (
            Setting.of(
                "model",
                "attention",
                "threshold",
                value=round(threshold / 2, 4),
                current=threshold,
            ),
        )
    current = job.config.model.classifier.class_weights
    if current == "balanced":
        return ()
    return (
        Setting.of(
            "model", "classifier", "class_weights", value="balanced", current=current
        ),
    )


def find_data_causes(job: Job, facts: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield what the counts of the sites' patients show about learning.

    Args:
        job: The job.
        facts: The counts of each site's patients; empty if they are unknown.
    """
    present: Counter[str] = Counter()
    labelled: Counter[str] = Counter()
    for of_site in facts.values():
        for phenotype, counts in as_mapping(of_site.get("labels")).items():
            present[phenotype] += counts["present"]
            labelled[phenotype] += counts["labelled"]
    if not present:
        return
    yield from _find_rare_phenotypes(job, present, labelled)
    yield from _find_unlabelled_sites(facts)


def _find_rare_phenotypes(
    job: Job, present: Mapping[str, int], labelled: Mapping[str, int]
) -> Iterator[Cause]:
    """Yield a cause if few training patients of all sites have some phenotypes.

    Args:
        job: The job.
        present: Number of patients who have each phenotype.
        labelled: Number of patients with a label for it.
    """
    rare = {}
    for phenotype, number in present.items():
        is_rare = number < max(RARE_PATIENTS, RARE_SHARE * labelled[phenotype])
        if labelled[phenotype] and is_rare:
            rare[phenotype] = number
    if not rare:
        return
    numbers = [f"{each} {n:,} of {labelled[each]:,}" for each, n in rare.items()]
    yield Cause(
        "types_rare",
        "medium",
        "all sites",
        f"{len(rare)} of {format_count(len(present), 'phenotype')} "
        f"({list_names(list(rare))}) "
        f"{'is' if len(rare) == 1 else 'are'} present in fewer than "
        f"{RARE_PATIENTS} training patients, or in under {RARE_SHARE:.0%}",
        f"label more patients who have them, or {_advise_on_rare_classes(job)}",
        evidence=(
            Evidence(
                f"training patients: {list_names(numbers)}",
                "job.json",
                {"present": rare, "labelled": {each: labelled[each] for each in rare}},
            ),
        ),
        settings=_choose_weight_setting(job),
    )


def _find_unlabelled_sites(facts: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield a cause if the training patients of some sites have no labels."""
    patients = {}  # of the sites without labels
    for site, of_site in facts.items():
        labels = as_mapping(of_site["labels"])
        if not any(counts["labelled"] for counts in labels.values()):
            patients[site] = of_site["patients"]
    if not patients:
        return
    yield Cause(
        "sites_unlabelled",
        "medium",
        list_names(list(patients)),
        "no training patient has a label, so these sites add nothing to stage 2",
        "give their labels, or check that patient ids match those of the notes",
        evidence=tuple(
            Evidence(
                f"{site}: 0 of {number:,} training patients",
                "job.json",
                {"patients": number},
            )
            for site, number in patients.items()
        ),
    )


def _find_never_predicted(by_disease: Mapping[str, Any]) -> list[str]:
    """Return the diseases that some test patients have and the model never predicts."""
    return [
        disease
        for disease, score in by_disease.items()
        if _count_support(score, "present") and not score["present"].get("predicted", 1)
    ]


def _find_without_both_classes(by_disease: Mapping[str, Any]) -> list[str]:
    """Return the diseases that all test patients have, or that no test patient has."""
    return [
        disease
        for disease, score in by_disease.items()
        if not (_count_support(score, "present") and _count_support(score, "absent"))
    ]


def _count_support(score: Mapping[str, Any], label: str) -> int:
    """Return the number of test patients with a label."""
    number: int = score.get(label, {}).get("support", 0)
    return number
