"""Sites that are absent from rounds, or whose training is unlike that of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from fednotes.core.parsing import mapping, number
from fednotes.core.wording import list_names
from fednotes.jobs.causes import Cause, Evidence, Setting
from fednotes.jobs.diagnosis.runs import RunEvidence
from fednotes.jobs.settings_to_try import list_personal
from fednotes.training.server_steps import Aggregation, by_each

# A site that misses one evaluated round in ten misses more than a restart or two.
ABSENT_SHARE = 0.1
# Losses of sites with other kinds of notes are within a factor of two or so of each
# other; wrong labels, or an attack, keep a site's loss far above.
ODD_LOSS = 3.0
# A median of the others needs two of them.
FEWEST_SITES = 3


def find_participation_causes(run: RunEvidence) -> Iterator[Cause]:
    """Yield the sites that are absent, and those unlike the others."""
    yield from _find_absent_sites(run)
    yield from _find_odd_sites(run)


def _find_absent_sites(run: RunEvidence) -> Iterator[Cause]:
    """Yield a cause if sites are missing from rounds of a run between real sites."""
    rounds = [entry for entry in run.entries if number(entry, "took_part") is not None]
    sites = len(run.job.sites)
    counts = [int(entry["took_part"]) for entry in rounds]
    short = sum(count < sites for count in counts)
    if not rounds or short < ABSENT_SHARE * len(rounds):
        return
    absences: Counter[str] = Counter()
    for entry in rounds:
        for site, missed in mapping(entry.get("absent")).items():
            absences[str(site)] += int(missed)
    evidence = [
        Evidence(
            f"{short:,} of {len(rounds):,} evaluated rounds had fewer than {sites} "
            f"sites; the fewest were {min(counts)}",
            "metrics.jsonl",
            {"short": short, "rounds": len(rounds), "fewest": min(counts)},
        )
    ]
    evidence += [
        Evidence(
            f"{site}: absent in {missed:,} rounds",
            "metrics.jsonl",
            {"absent": missed},
        )
        for site, missed in absences.most_common()
    ]
    federation = run.job.federation
    yield Cause(
        "sites_absent",
        "high" if 2 * short >= len(rounds) else "medium",
        list_names(list(absences)) or "some sites",
        "sites drop out or answer late, so rounds go on without their notes",
        "look at `fednotes server status` and the site's log, and wait longer",
        evidence=tuple(evidence),
        settings=(
            Setting.of(
                "federation",
                "timeout",
                value=2 * federation.timeout,
                current=federation.timeout,
            ),
            Setting.of("federation", "grace", value=0.0, current=federation.grace),
        )[: 2 if federation.grace else 1],
    )


def _find_odd_sites(run: RunEvidence) -> Iterator[Cause]:
    """Yield a cause for sites whose training loss stays far above the others'."""
    evaluations = [
        entry for entry in run.entries if entry.get("condition") == "federated"
    ]
    if not evaluations:
        return
    by_site = {
        str(site): number(scores, "loss")
        for site, scores in mapping(evaluations[-1].get("sites")).items()
    }
    losses = {site: loss for site, loss in by_site.items() if loss is not None}
    if len(losses) < FEWEST_SITES:
        return
    odd = []
    for site, loss in losses.items():
        others = median(each for name, each in losses.items() if name != site)
        if others > 0 and loss >= ODD_LOSS * others:
            odd.append(site)
    if not odd:
        return
    settings = list_personal(run.job)
    config = run.job.config
    is_hidden = run.job.federation.secure_sum or run.job.privacy is not None
    # A secure sum hides the updates that a median compares.
    if isinstance(config, Aggregation) and not (by_each(config) or is_hidden):
        robust = Setting.of(
            "training", "aggregation", value="median", current=config.aggregation
        )
        settings = (*settings, robust)
    yield Cause(
        "sites_odd",
        "medium",
        list_names(odd),
        f"its training loss is {ODD_LOSS:g} times that of the other sites or more, so "
        "its labels or its notes are of another kind",
        "look at its annotation (`fednotes check`), or let it keep more of the model; "
        "if you do not trust it, use a robust aggregation",
        evidence=(
            Evidence(
                "training loss of the last evaluated round: "
                + list_names([f"{site} {loss:.3g}" for site, loss in losses.items()]),
                "metrics.jsonl",
                {"loss": losses},
            ),
        ),
        settings=settings,
    )
