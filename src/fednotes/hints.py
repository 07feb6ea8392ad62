"""What a run says beside its scores: why a number may be low, and what to try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fednotes.core.types import SiteData

_JUDGED = ("strict", "phenotypes")  # kinds of score that conditions are compared by


def pooled_below_alone(
    mean: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, float]],
    sites: Sequence[Any],
    heads: bool,
    personal: int = 0,
) -> Iterator[str]:
    """A line where one model of all notes is worse than each site's own, with what the run knows.

    mean, conditions: of the summary. sites: their data. heads: whether pooled has an output
    layer for each site. personal: epochs of its own that a site has alone, and pooled has not.
    """
    kind = next((k for k in _JUDGED if k in mean.get("alone", {})), "")
    own, pooled = (((mean.get(c) or {}).get(kind) or {}).get("f1") for c in ("alone", "pooled"))
    if own is None or pooled is None or pooled >= own:
        return
    rounds = {c: conditions[c]["rounds"] for c in ("alone", "pooled")}
    each = rounds["alone"] / len(sites)
    reasons = []
    if heads:
        reasons.append(
            "the sites annotate different types, so pooled is one trunk with an output layer for "
            "each, which is no upper bound"
        )
    elif len(sites) > 1:
        reasons.append("one model serves all sites, whose notes may differ in kind")
    if personal:
        reasons.append(f"alone ends with {personal} personal epochs, pooled has none")
    if rounds["pooled"] < each:
        reasons.append("it took fewer rounds: raise epochs or patience")
    yield (
        f"pooled is below alone (mean F1 {100 * pooled:.1f} against {100 * own:.1f}, "
        f"{rounds['pooled']:,.0f} rounds against {each:,.0f} at a site): {'; '.join(reasons)}; "
        "one seed does not tell a small difference from chance"
    )


def never_right(
    scores: Mapping[str, Mapping[str, Any]], sites: Sequence[SiteData]
) -> Iterator[str]:
    """Types of the test data that no mention was found of, where others were.

    scores: condition → score of each site. sites: their data, with annotations.
    """
    trained = {s.id: Counter(x.label for d in s.train for x in d.spans) for s in sites}
    everywhere: Counter[str] = sum(trained.values(), Counter())
    for site, by_condition in scores.items():
        for condition in ("federated", "alone", "pooled"):
            score = by_condition.get(condition)
            if score and score.get("by_type") and score["relaxed"]["f1"] > 0:
                break
        else:
            continue
        for label, of_type in score["by_type"].items():
            if not of_type["support"] or of_type["strict"]["f1"] > 0:
                continue
            here, all_sites = trained[site][label], everywhere[label]
            why = [f"{here} training mentions here, {all_sites} at all sites"]
            if not of_type["predicted"]:
                why.append("never predicted")
            remedy = "train longer or give more mentions"
            if not all_sites:
                remedy = "name it as the training data do (label_map)"
            elif here == all_sites and len(sites) > 1:
                remedy += "; if other sites have it by another name: label_map"
            yield f"{site}, {condition}: {label} scores 0 ({'; '.join(why)}): {remedy}"


def described(results: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """How much of the model travels."""
    if text := results.get("federated", {}).get("described"):
        yield f"federated: {text}"


def nothing_found(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What to try where a model found nothing."""
    for site, by_condition in scores.items():
        for condition, score in by_condition.items():
            if not score:
                yield f"{site}: nothing is held out there, so it has no score and is in no mean"
                break
            if "by_output" in score:
                yield from _phenotype_hints(f"{site}, {condition}", score)
            if "by_type" not in score:
                continue  # no mentions are judged here
            if not any(of_type["support"] for of_type in score["by_type"].values()):
                yield f"{site}: no mention in its test data, so its scores say nothing"
                break
            if score["relaxed"]["f1"] == 0:
                yield (
                    f"{site}, {condition}: no mention found: train longer (epochs or rounds of "
                    "[training]) or raise training.learning_rate"
                )


def _phenotype_hints(where: str, score: Mapping[str, Any]) -> Iterator[str]:
    """Diseases whose score says little, by name."""
    never, alone = [], []
    for disease, found in score["by_output"].items():
        present, absent = (found.get(name, {}).get("support", 0) for name in ("present", "absent"))
        if present and not found["present"].get("predicted", 1):
            never.append(disease)
        if not (present and absent):
            alone.append(disease)
    if never:
        yield f"{where}: predicts nobody to have {_named(never)}: train longer, or weigh classes"
    if alone:
        yield (
            f"{where}: the test patients are all present or all absent for {_named(alone)}: "
            "these have no AUROC"
        )


def _named(names: Sequence[str], shown: int = 6) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
