"""Causes that the learning curves of a run show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from statistics import fmean

from fednotes.core.wording import format_count, list_names
from fednotes.jobs.causes import Cause, Evidence, Importance, Setting
from fednotes.jobs.diagnosis.evidence import Curve, RunEvidence
from fednotes.jobs.diagnosis.plan import find_rates, list_lower_rates
from fednotes.jobs.job import Job
from fednotes.jobs.settings_to_try import list_keep_best_settings, list_longer_training

# The last quarter of the evaluations: long enough to average out noise, short enough to
# be about the end of training.
TAIL = 0.25
# Validation F1 that rises by one point in the tail has not settled.
RISE = 0.01
# A rise of ten points means that training has only begun, so it is to be much longer.
STEEP_RISE = 0.1
# Five points change what a person concludes from a run.
CLEAR_RISE = 0.05
# Held-out losses have no common scale; two percent are visible in any of them.
LOSS_FALL = 0.02
# If nothing is found yet, a training loss that falls by a tenth in the tail still
# approaches the first correct prediction.
EARLY_FALL = 0.1
# The loss of a mini-batch varies by a factor of two with the lengths of its sentences;
# one that ends at three times its first value has exploded.
EXPLODED = 3.0
# A score that ends at less than half of its best has collapsed.
COLLAPSED = 0.5
# Smaller F1 is that of a model that has learned nothing, whose loss says more.
NOTHING = 0.02
# Two points of F1 are more than the noise of a usual validation set.
PAST_BEST = 0.02
# Of two evaluations the second one is mostly better, so only a clear rise shows that
# training was too short, and nothing shows that it was long enough.
FEWEST_EVALUATIONS = 3
_SHOWN = 6  # number of values of a curve that evidence shows


def find_learning_causes(run: RunEvidence) -> Iterator[Cause]:
    """Yield the causes that the learning curves of a run show."""
    curves = run.curves
    diverged: list[Curve] = []
    others: list[Curve] = []
    for curve in curves:
        if _has_diverged(curve):
            diverged.append(curve)
        else:
            others.append(curve)
    if diverged or run.failure.get("diverged"):
        yield _describe_divergence(run, diverged)
    elif run.failure:
        yield _describe_failure(run)
    for measure in dict.fromkeys(curve.measure for curve in others):
        comparable = [curve for curve in others if curve.measure == measure]
        # The federated curves decide, if there are any: the federated model may have
        # settled although that of a site alone still improves.
        deciding = _list_federated(comparable) or comparable
        if any(_is_undertrained(curve) for curve in deciding):
            rising = [curve for curve in comparable if _is_undertrained(curve)]
            yield _describe_undertraining(run.job, measure, rising)
        past = [curve for curve in comparable if _is_past_its_best(run.job, curve)]
        if past:
            yield _describe_past_best(run.job, past)


def _list_federated(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves of the federated training."""
    return [curve for curve in curves if curve.condition == "federated"]


# ---- diverged ------------------------------------------------------------------------


def _has_diverged(curve: Curve) -> bool:
    """Return whether the loss ended far above its start, or the score collapsed."""
    losses = curve.losses
    if len(losses) >= FEWEST_EVALUATIONS:
        tail = max(2, _measure_tail(losses))
        if losses[0] > 0 and fmean(losses[-tail:]) > EXPLODED * losses[0]:
            return True
    scores = curve.scores
    if curve.measure != "valid_f1" or len(scores) < FEWEST_EVALUATIONS:
        return False
    best = max(scores)
    # An untrained model may find mentions by chance. Once it learns that most words are
    # outside, its F1 drops while its loss falls, and that is no divergence.
    at_best = scores.index(best)
    still_learns = len(losses) == len(scores) and losses[-1] < losses[at_best]
    has_collapsed = best > STEEP_RISE and scores[-1] < COLLAPSED * best
    return has_collapsed and not still_learns


def _describe_divergence(run: RunEvidence, curves: Sequence[Curve]) -> Cause:
    """Return the cause that training diverged."""
    evidence = [evidence for curve in curves for evidence in _make_evidence(curve)]
    places = [curve.part for curve in curves]
    if run.failure.get("diverged"):
        part = str(run.failure.get("part", ""))
        places.insert(0, part)
        problem = str(run.failure.get("problem", ""))
        evidence.insert(0, Evidence(f"{part}: {problem}", "failure.json"))
    rates = find_rates(run.job)
    if rates is not None:
        evidence.append(rates.to_evidence(run.job.method))
    return Cause(
        "diverged",
        "high",
        list_names(list(dict.fromkeys(places))),
        "training diverged: it lost what it had learned",
        "lower the learning rate",
        evidence=tuple(evidence),
        settings=list_lower_rates(run.job),
    )


def _describe_failure(run: RunEvidence) -> Cause:
    """Return the cause that an error ended the training."""
    part = str(run.failure.get("part", ""))
    problem = str(run.failure.get("problem", ""))
    return Cause(
        "failed",
        "high",
        part,
        "an error ended the training",
        "do what the error says, then resume the run",
        evidence=(Evidence(problem, "failure.json"),),
    )


# ---- still learning ------------------------------------------------------------------


def _is_undertrained(curve: Curve) -> bool:
    """Return whether a curve still improves at its end."""
    scores = curve.scores
    if not curve.measure:
        # Losses of single mini-batches say little until there are several.
        return not _is_too_short(curve) and _is_falling(curve.losses, LOSS_FALL)
    if curve.measure == "valid_loss":
        best_before, best_in_tail = _split_best(scores)
        return best_in_tail - best_before > LOSS_FALL * abs(best_before)
    if max(scores) <= NOTHING:
        return _is_falling(curve.losses, EARLY_FALL)
    least_rise = CLEAR_RISE if _is_too_short(curve) else RISE
    return _measure_rise(curve) >= least_rise


def _measure_rise(curve: Curve) -> float:
    """Return by how much the best score of the tail exceeds all earlier ones."""
    best_before, best_in_tail = _split_best(curve.scores)
    return best_in_tail - best_before


def _split_best(scores: Sequence[float]) -> tuple[float, float]:
    """Return the best score before the tail, and the best one in the tail.

    Both are 0 if there is only one evaluation.
    """
    if len(scores) < 2:
        return 0.0, 0.0
    tail = _measure_tail(scores)
    return max(scores[:-tail]), max(scores[-tail:])


def _is_falling(losses: Sequence[float], share: float) -> bool:
    """Return whether a training loss falls by a share of its value in its tail."""
    if len(losses) < 2:
        return False
    tail = _measure_tail(losses)
    before = min(losses[:-tail])
    return before - fmean(losses[-tail:]) > share * abs(before)


def _describe_undertraining(job: Job, measure: str, curves: Sequence[Curve]) -> Cause:
    """Return the cause that training ended too early."""
    first = curves[0]
    rise = _measure_rise(first) if measure == "valid_f1" else 0.0
    finds_nothing = measure == "valid_f1" and max(first.scores) <= NOTHING
    is_early = rise >= STEEP_RISE or finds_nothing
    importance: Importance = "high" if is_early or rise >= CLEAR_RISE else "medium"
    settings = list_longer_training(job, measure, factor=4 if is_early else 2)
    rates = find_rates(job)
    advice = "train longer"
    if rates is not None and rates.is_low:
        advice = "raise the learning rate, which is far below those of the presets"
        rate = Setting.of(
            "training", "learning_rate", value=rates.low, current=rates.rate
        )
        settings = (rate, *settings)
    return Cause(
        "undertrained",
        importance,
        list_names([curve.part for curve in curves]),
        "training ended while the model was still improving",
        advice,
        evidence=tuple(each for curve in curves[:3] for each in _make_evidence(curve)),
        settings=settings,
    )


def list_unjudged_lengths(run: RunEvidence) -> Iterator[str]:
    """Yield why the length of a training cannot be judged, with a setting to try.

    A curve of one or two evaluations that does not clearly rise may belong to a model
    that has settled as well as to one that has hardly begun.
    """
    # A curve that diverged or still rises has been judged, however short it is.
    remaining = [
        curve
        for curve in _list_federated(run.curves) or run.curves
        if not (_has_diverged(curve) or _is_undertrained(curve))
    ]
    for measure in dict.fromkeys(curve.measure for curve in remaining):
        short = [
            curve
            for curve in remaining
            if curve.measure == measure and _is_too_short(curve)
        ]
        if not short:
            continue
        fewest = min(len(curve.entries) for curve in short)
        factor = ceil(FEWEST_EVALUATIONS / fewest)
        settings = list_longer_training(run.job, measure, factor=factor)
        remedy = f"try {settings[0]}" if settings else "train longer"
        evaluations = format_count(fewest, "evaluation")
        parts = list_names([curve.part for curve in short])
        yield (
            f"whether training was long enough: {evaluations} of {parts}, and "
            f"{FEWEST_EVALUATIONS} are needed to judge; {remedy}"
        )


def _is_too_short(curve: Curve) -> bool:
    """Return whether a curve has too few evaluations to show that it has settled."""
    return len(curve.entries) < FEWEST_EVALUATIONS


# ---- past its best -------------------------------------------------------------------


def _is_past_its_best(job: Job, curve: Curve) -> bool:
    """Return whether the last model is kept although an earlier one was better."""
    scores = curve.scores
    if curve.measure != "valid_f1" or len(scores) < FEWEST_EVALUATIONS:
        return False
    # A job that keeps the best model already has no setting for it to propose.
    keeps_last = bool(list_keep_best_settings(job))
    return keeps_last and max(scores) - scores[-1] >= PAST_BEST


def _describe_past_best(job: Job, curves: Sequence[Curve]) -> Cause:
    """Return the cause that the last model is kept instead of the best one."""
    lost = max(max(curve.scores) - curve.scores[-1] for curve in curves)
    importance: Importance = "medium" if lost >= STEEP_RISE / 2 else "low"
    return Cause(
        "past_best",
        importance,
        list_names([curve.part for curve in curves]),
        "the last model is kept, but an earlier one was better",
        "keep the model of the best evaluation",
        evidence=tuple(each for curve in curves[:3] for each in _make_evidence(curve)),
        settings=list_keep_best_settings(job),
    )


# ---- evidence ------------------------------------------------------------------------


def _measure_tail(values: Sequence[float]) -> int:
    """Return how many of the values are the tail, the end that is judged."""
    return ceil(TAIL * len(values))


def _make_evidence(curve: Curve) -> list[Evidence]:
    """Return the evidence that states a curve's last scores and training losses.

    The list has one element, or none if the curve has no values.
    """
    shown = []
    if curve.measure == "valid_f1":
        points = ", ".join(f"{100 * score:.1f}" for score in curve.scores[-_SHOWN:])
        shown.append(f"validation F1 {points}")
    elif curve.measure == "valid_loss":
        points = ", ".join(f"{-score:.3g}" for score in curve.scores[-_SHOWN:])
        shown.append(f"held-out loss {points}")
    losses = curve.losses
    if losses:
        points = ", ".join(f"{loss:.3g}" for loss in losses[-_SHOWN:])
        shown.append(f"training loss {points}")
    if not shown:
        return []
    rounds = [int(entry["round"]) + 1 for entry in curve.entries if "round" in entry]
    return [
        Evidence(
            f"{curve.part}, up to round {rounds[-1]:,}: {'; '.join(shown)}",
            "metrics.jsonl",
            {
                "part": curve.part,
                "rounds": rounds,
                curve.measure or "score": curve.scores,
                "loss": losses,
            },
        )
    ]
