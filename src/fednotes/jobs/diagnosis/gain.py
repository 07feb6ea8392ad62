"""Whether a federation pays, and at which sites and entity types it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fednotes.core.parsing import mapping, number
from fednotes.core.wording import list_names
from fednotes.jobs.causes import Cause, Evidence, Importance, Setting
from fednotes.jobs.diagnosis.runs import RunEvidence
from fednotes.jobs.settings_to_try import list_personal
from fednotes.metrics.gap import WITHIN, Verdict, shown_sign

# Fewer test mentions of a type cannot tell a difference of ten points from chance.
LEAST_SUPPORT = 20
# Ten points of F1 with this many mentions are more than two standard errors.
TYPE_LOSS = 0.1
# Less than half of what pooling would gain leaves room for other settings.
SMALL_GAP = 0.5
_SHOWN_TYPES = 6


def find_gain_causes(run: RunEvidence) -> Iterator[Cause]:
    """Yield what the comparison of the federated models with the sites' own shows."""
    mean = run.result.verdict()
    if mean is None:
        return
    sites = {site: run.result.verdict(site) for site in run.result.sites}
    below = {
        site: verdict
        for site, verdict in sites.items()
        if verdict is not None and _sign(verdict) < 0
    }
    if _sign(mean) < 0:
        yield _describe_loss(run, "the mean over the sites", {"mean": mean, **below})
    elif below:
        yield _describe_loss(run, list_names(list(below)), below)
    elif _sign(mean) == 0:
        yield _describe_no_gain(run, mean)
    if _sign(mean) > 0:
        yield from _find_small_gap(run, mean)
    yield from _find_lost_types(run)


def _sign(verdict: Verdict) -> int:
    return shown_sign(verdict.low, verdict.high, verdict.p_value)


def _describe_loss(
    run: RunEvidence, where: str, verdicts: Mapping[str, Verdict]
) -> Cause:
    """Return the cause that the federated models are worse than the sites' own."""
    return Cause(
        "below_alone",
        "high" if "mean" in verdicts else "medium",
        where,
        "the federated model is worse than the models that the sites train alone",
        "the sites' notes or annotation differ: leave more of the model to each site, "
        "or look for the other causes here first",
        evidence=tuple(_show_verdict(site, each) for site, each in verdicts.items()),
        settings=list_personal(run.job),
    )


def _describe_no_gain(run: RunEvidence, verdict: Verdict) -> Cause:
    """Return the cause that no gain of the federation is shown."""
    evidence = [_show_verdict("mean", verdict)]
    message = "no gain of the federation over the sites alone is shown"
    advice = "run several seeds, and score more test notes, before you conclude"
    importance: Importance = "medium"
    gap = verdict.gap
    if gap is not None and gap.why == WITHIN:
        message += ", and one model of all notes gains nothing either"
        advice = (
            "the sites have enough notes of their own, or all models are undertrained: "
            "follow the other causes here first, then run several seeds"
        )
        importance = "low"
        means = {
            condition: _mean_f1(run.result.mean, condition)
            for condition in ("alone", "federated", "pooled")
        }
        shown = ", ".join(
            f"{condition} {100 * f1:.1f}"
            for condition, f1 in means.items()
            if f1 is not None
        )
        if shown:
            evidence.append(Evidence(f"mean F1: {shown}", "summary.json", means))
    return Cause(
        "no_gain",
        importance,
        "the mean over the sites",
        message,
        advice,
        evidence=tuple(evidence),
    )


def _mean_f1(mean: Mapping[str, Any], condition: str) -> float | None:
    """Return the mean F1 of a condition, of mentions or of phenotypes."""
    strict = number(mean, condition, "strict", "f1")
    return number(mean, condition, "phenotypes", "f1") if strict is None else strict


def _find_small_gap(run: RunEvidence, verdict: Verdict) -> Iterator[Cause]:
    """Yield a cause if the federation has little of the gain of pooling."""
    gap = verdict.gap
    if gap is None or gap.closed is None or gap.closed >= SMALL_GAP:
        return
    settings = list_personal(run.job)
    if getattr(run.job.config, "server", "") == "average":
        nesterov = Setting.of("training", "server", value="nesterov", current="average")
        settings = (nesterov, *settings)
    yield Cause(
        "gap_open",
        "medium",
        "the mean over the sites",
        f"the federation has {max(0, 100 * gap.closed):.0f} % of the gain that one "
        "model of all notes has",
        "train longer, or change how the server combines updates",
        evidence=(_show_verdict("mean", verdict),),
        settings=settings,
    )


def _show_verdict(name: str, verdict: Verdict) -> Evidence:
    """Return the gain, its interval and its p value as evidence."""
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
    """Yield the types that a site finds alone and the federated model does not."""
    losses: dict[tuple[str, str], tuple[float, float, int]] = {}
    for site, by_condition in run.scores.items():
        alone = _scores_by_type(mapping(by_condition.get("alone")))
        federated = _scores_by_type(mapping(by_condition.get("federated")))
        for label in alone.keys() & federated.keys():
            support = number(alone[label], "support") or 0
            own = _type_f1(alone[label])
            joint = _type_f1(federated[label])
            if own is None or joint is None or support < LEAST_SUPPORT:
                continue
            if own - joint >= TYPE_LOSS:
                losses[site, label] = (own, joint, int(support))
    if not losses:
        return
    largest = sorted(losses, key=lambda key: losses[key][1] - losses[key][0])
    evidence = []
    for site, label in largest[:_SHOWN_TYPES]:
        own, joint, support = losses[site, label]
        evidence.append(
            Evidence(
                f"{site}, {label}: alone {100 * own:.1f}, federated {100 * joint:.1f} "
                f"({support:,} test cases)",
                "summary.json",
                {"alone": own, "federated": joint, "support": support},
            )
        )
    types = list(dict.fromkeys(label for _, label in largest))
    yield Cause(
        "types_lost",
        "medium",
        list_names(list(dict.fromkeys(site for site, _ in largest))),
        f"the federated model is {100 * TYPE_LOSS:.0f} points or more below the site "
        f"alone for {list_names(types)}",
        "compare what the sites annotate under these names, and rename what differs by "
        "label_map; or leave more of the model to each site",
        evidence=tuple(evidence),
        settings=list_personal(run.job),
    )


def _scores_by_type(scores: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scores by entity type, or of the class "present" by phenotype."""
    if "by_type" in scores:
        return mapping(scores["by_type"])
    return {
        name: mapping(mapping(of_output).get("present"))
        for name, of_output in mapping(scores.get("by_output")).items()
    }


def _type_f1(scores: Mapping[str, Any]) -> float | None:
    strict = number(scores, "strict", "f1")
    return number(scores, "f1") if strict is None else strict
