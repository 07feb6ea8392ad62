"""Whether a federation pays, and at which sites and entity types it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fednotes.core.parsing import as_mapping, find_number
from fednotes.core.wording import list_names
from fednotes.jobs.causes import Cause, Evidence, Importance, Setting
from fednotes.jobs.diagnosis.evidence import RunEvidence
from fednotes.jobs.settings_to_try import list_personal_settings
from fednotes.metrics.gap import WITHIN, Verdict, find_proven_sign

# Fewer test mentions of a type cannot tell a difference of ten points from chance.
LEAST_SUPPORT = 20
# Ten points of F1 with this many mentions are more than two standard errors.
TYPE_LOSS = 0.1
# Less than half of what pooling would gain leaves room for other settings.
SMALL_GAP = 0.5
_SHOWN_TYPES = 6


@dataclass(frozen=True)
class _LostType:
    """A type that a site finds better alone than with the federated model.

    Attributes:
        site: The site.
        label: The entity type, or the phenotype.
        alone_f1: F1 of the model that the site trained alone.
        federated_f1: F1 of the federated model.
        support: Number of test cases of the type.
    """

    site: str
    label: str
    alone_f1: float
    federated_f1: float
    support: int

    @property
    def drop(self) -> float:
        """By how much F1 is lower with the federated model."""
        return self.alone_f1 - self.federated_f1


def find_gain_causes(run: RunEvidence) -> Iterator[Cause]:
    """Yield what the comparison of the federated models with the sites' own shows."""
    mean = run.result.verdict()
    if mean is None:
        return
    sites_with_loss: dict[str, Verdict] = {}
    for site in run.result.sites:
        verdict = run.result.verdict(site)
        if verdict is not None and _find_proven_sign(verdict) < 0:
            sites_with_loss[site] = verdict
    evidence = [_make_evidence(site, each) for site, each in sites_with_loss.items()]
    mean_sign = _find_proven_sign(mean)
    if mean_sign < 0:
        evidence.insert(0, _make_evidence("mean", mean))
        yield _describe_loss(run, "high", "the mean over the sites", evidence)
    elif sites_with_loss:
        yield _describe_loss(run, "medium", list_names(list(sites_with_loss)), evidence)
    elif mean_sign == 0:
        yield _describe_no_gain(run, mean)
    if mean_sign > 0:
        yield from _find_small_gap(run, mean)
    yield from _find_lost_types(run)


def _find_proven_sign(verdict: Verdict) -> int:
    """Return 1 if a gain is proven, -1 if a loss is proven, and 0 otherwise."""
    return find_proven_sign(verdict.low, verdict.high, verdict.p_value)


def _describe_loss(
    run: RunEvidence, importance: Importance, where: str, evidence: Sequence[Evidence]
) -> Cause:
    """Return the cause that the federated models are worse than the sites' own."""
    return Cause(
        "below_alone",
        importance,
        where,
        "the federated model is worse than the models that the sites train alone",
        "the sites' notes or annotation differ: keep more of the model private, "
        "or look at the other causes first",
        evidence=tuple(evidence),
        settings=list_personal_settings(run.job),
    )


def _describe_no_gain(run: RunEvidence, verdict: Verdict) -> Cause:
    """Return the cause that no gain of the federation is shown."""
    evidence = [_make_evidence("mean", verdict)]
    message = "the run does not show that federation is better than training alone"
    advice = "run several seeds, and score more test notes, before you conclude"
    importance: Importance = "medium"
    gap = verdict.gap
    if gap is not None and gap.why == WITHIN:
        message += ", and pooled training gains nothing either"
        advice = (
            "the sites have enough notes of their own, or all models are undertrained: "
            "address the other causes first; then run several seeds"
        )
        importance = "low"
        means = {
            condition: _read_mean_f1(run.result.mean, condition)
            for condition in ("alone", "federated", "pooled")
        }
        listed = ", ".join(
            f"{condition} {100 * f1:.1f}"
            for condition, f1 in means.items()
            if f1 is not None
        )
        if listed:
            evidence.append(Evidence(f"mean F1: {listed}", "summary.json", means))
    return Cause(
        "no_gain",
        importance,
        "the mean over the sites",
        message,
        advice,
        evidence=tuple(evidence),
    )


def _read_mean_f1(mean: Mapping[str, Any], condition: str) -> float | None:
    """Return the mean F1 of a condition: of mentions, or else of phenotypes."""
    strict = find_number(mean, condition, "strict", "f1")
    return (
        find_number(mean, condition, "phenotypes", "f1") if strict is None else strict
    )


def _find_small_gap(run: RunEvidence, verdict: Verdict) -> Iterator[Cause]:
    """Yield a cause if the federation has little of the gain of pooling."""
    gap = verdict.gap
    if gap is None or gap.closed is None or gap.closed >= SMALL_GAP:
        return
    settings = list_personal_settings(run.job)
    if getattr(run.job.config, "server", "") == "average":
        nesterov = Setting.of("training", "server", value="nesterov", current="average")
        settings = (nesterov, *settings)
    yield Cause(
        "gap_open",
        "medium",
        "the mean over the sites",
        f"federated training achieves {max(0, 100 * gap.closed):.0f} % of the gain of "
        "pooled training",
        "train longer, or change how the server combines updates",
        evidence=(_make_evidence("mean", verdict),),
        settings=settings,
    )


def _make_evidence(name: str, verdict: Verdict) -> Evidence:
    """Return the evidence that states a gain, its interval and its p value.

    Args:
        name: The site, or "mean" for the mean over the sites.
        verdict: The comparison of federated with alone.
    """
    test = f"p {verdict.p_value:.4f}" if verdict.p_value is not None else "unpaired"
    return Evidence(
        f"{name}: {100 * verdict.gain:+.1f} points (95 % {100 * verdict.low:+.1f} to "
        f"{100 * verdict.high:+.1f}, {test})",
        "summary.json",
        {
            "gain": verdict.gain,
            "low": verdict.low,
            "high": verdict.high,
            "p_value": verdict.p_value,
        },
    )


def _find_lost_types(run: RunEvidence) -> Iterator[Cause]:
    """Yield a cause if sites find types much better alone than federated."""
    lost = sorted(_list_lost_types(run), key=lambda each: -each.drop)
    if not lost:
        return
    sites = list(dict.fromkeys(each.site for each in lost))
    types = list(dict.fromkeys(each.label for each in lost))
    evidence = [
        Evidence(
            f"{each.site}, {each.label}: alone {100 * each.alone_f1:.1f}, federated "
            f"{100 * each.federated_f1:.1f} ({each.support:,} test cases)",
            "summary.json",
            {
                "alone": each.alone_f1,
                "federated": each.federated_f1,
                "support": each.support,
            },
        )
        for each in lost[:_SHOWN_TYPES]
    ]
    yield Cause(
        "types_lost",
        "medium",
        list_names(sites),
        f"the federated model is {100 * TYPE_LOSS:.0f} points or more below the site "
        f"alone for {list_names(types)}",
        "compare what the sites annotate under these names; use label_map for labels "
        "that differ in meaning, or keep more of the model private",
        evidence=tuple(evidence),
        settings=list_personal_settings(run.job),
    )


def _list_lost_types(run: RunEvidence) -> Iterator[_LostType]:
    """Yield the types with enough test cases whose F1 drops by at least `TYPE_LOSS`."""
    for site, by_condition in run.scores.items():
        alone = _read_scores_by_type(as_mapping(by_condition.get("alone")))
        federated = _read_scores_by_type(as_mapping(by_condition.get("federated")))
        for label in sorted(alone.keys() & federated.keys()):
            support = int(find_number(alone[label], "support") or 0)
            alone_f1 = _read_type_f1(alone[label])
            federated_f1 = _read_type_f1(federated[label])
            if alone_f1 is None or federated_f1 is None or support < LEAST_SUPPORT:
                continue
            candidate = _LostType(site, label, alone_f1, federated_f1, support)
            if candidate.drop >= TYPE_LOSS:
                yield candidate


def _read_scores_by_type(scores: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scores of each entity type, or of each phenotype's class "present"."""
    if "by_type" in scores:
        return as_mapping(scores["by_type"])
    return {
        name: as_mapping(as_mapping(of_output).get("present"))
        for name, of_output in as_mapping(scores.get("by_output")).items()
    }


def _read_type_f1(scores: Mapping[str, Any]) -> float | None:
    """Return the F1 of an entity type, or of a phenotype's class."""
    strict = find_number(scores, "strict", "f1")
    return find_number(scores, "f1") if strict is None else strict
