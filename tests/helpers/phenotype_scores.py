"""Scores of invented predictions, as the sites of a phenotyping run leave them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fednotes.metrics.classification import ClassCounts, measure_rankings
from fednotes.metrics.summaries import average_scores, score_all_test_data

OUTPUTS = ("asthma", "gout", "obesity")
CONDITIONS = ("alone", "federated", "pooled")


def draw_patients(
    seed: int, patients: int = 40
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (patients, outputs) labels, predictions and scores; nobody has gout."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((patients, len(OUTPUTS))) < 0.4).astype(np.int8)
    labels[:, 1] = 0
    labels[rng.random(labels.shape) < 0.1] = -1
    scores = rng.normal(size=labels.shape) + (labels == 1)
    return labels, (scores > 0.5).astype(np.int8), scores


def site_score(seed: int, codes: bool = True) -> dict[str, Any]:
    """Return the scores of one site under one condition, as in summary.json."""
    labels, predicted, scores = draw_patients(seed)
    counts = ClassCounts.of(labels, predicted, OUTPUTS)
    scored, ranked = (
        counts.scores(),
        measure_rankings(labels, scores, OUTPUTS, samples=50),
    )
    areas = ("auroc", "auprc")
    of_codes = {
        "codes": {"loss": 0.3 + seed / 100, "auroc": 0.7 + seed / 100, "outputs": 9}
    }
    return {
        "phenotypes": scored["macro"],
        "present": scored["present"]["macro"],
        "ranking": {
            **{key: ranked["macro"][key]["value"] for key in areas},
            **{
                f"{key}_interval": [
                    ranked["macro"][key]["low"],
                    ranked["macro"][key]["high"],
                ]
                for key in areas
            },
            "outputs": ranked["macro"]["outputs"],
        },
        "calibration": {"brier": 0.1 + seed / 100},
        "by_output": {
            name: {
                **scores_of_output,
                **{key: ranked["by_output"][name][key] for key in areas},
            }
            for name, scores_of_output in scored["by_output"].items()
        },
        "class_counts": counts.to_metrics(),
    } | (of_codes if codes else {})


def codes_alone(seed: int) -> dict[str, Any]:
    """Return the scores of a site that has codes and no labels."""
    return {"codes": site_score(seed)["codes"]}


def summary_of(sites: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the summary.json of sites' scores by condition."""
    conditions = [
        c for c in CONDITIONS if any(c in site_scores for site_scores in sites.values())
    ]
    each = {c: [site_scores[c] for site_scores in sites.values()] for c in conditions}
    return {
        "title": "Three diseases",
        "method": "phenotype",
        "seed": 4,
        "seconds": 12.0,
        "bytes_up": 1_000_000,
        "bytes_down": 2_000_000,
        "sites": sites,
        "mean": {c: average_scores(scores) for c, scores in each.items()},
        "micro": {
            c: summed
            for c, scores in each.items()
            if (summed := score_all_test_data(scores))
        },
        "command": "fednotes simulate job.toml --out run",
        "notes": [],
    }


def summary() -> dict[str, Any]:
    """Return the summary of two sites under three conditions, all different."""
    return summary_of(
        {
            site: {
                c: site_score(3 * place + order) for order, c in enumerate(CONDITIONS)
            }
            for place, site in enumerate(("north", "south"))
        }
    )
