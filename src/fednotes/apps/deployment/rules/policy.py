"""A site's rules for what a federation may ask of it; they stand above the server's
wishes.

`check_job` judges what a job will want before the site joins, `check_difference` what
it trains on, `check_request` each request, and `check_update` what is really in a reply
before it leaves. A wish that breaks a rule raises `PolicyRefusal`, which names the
rule, both sides, and the file and key where the site alone can change it. The server is
told its `public` part, the rule alone: how few patients a site has, and what it allows,
is the site's own business. Nothing here looks at a value of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from annotated_types import Ge, Interval, MinLen

from fednotes.apps.deployment.rules.approval import Quorum
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.federation import Coverage
from fednotes.core.messages import Request
from fednotes.core.settings import build, checked
from fednotes.core.word_tables import find_word_tables

# What may be behind an update, and how messages call it.
_BEHIND = {k: k for k in ("tokens", "steps", "patients")} | {
    "batch": "examples of a mini-batch"
}
_HOURS = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
_BY_THE_JOB = "; the job can sum securely: [federation] secure_sum = true, with three sites or more"


Count = Annotated[int, Ge(0)]
Names = tuple[Annotated[str, MinLen(1)], ...]


class PolicyRefusal(RefusedError):
    """A site's policy forbids it. rule: the key of the policy that does. public: what
    the server may be told. later: whether the rule allows later what it forbids now."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule, self.later = rule, rule == "hours"
        mended = _BY_THE_JOB if rule in ("share_scores", "secure_sum") else ""
        self.public = (
            f"refused by {rule} of this site's policy; its own log says more, and only the site "
            f"can change it{mended}"
        )


@checked(frozen=True)
class Policy:
    """The [policy] table of a site's file. A number that is 0 is no rule.

    min_sites: in a sum, and least that a secure sum may be opened with. secure_sum:
    "required" for every sum, or for updates that say much of single notes
    ("revealing"). allowed_layers,
    denied_layers: patterns such as "lstm.*"; "lstm" means all below it too; what is in
    both may not leave. freeze_embeddings: tensors with a row per word stay. min_tokens,
    min_steps,
    min_patients: behind an update that holds tensors; min_batch: examples of a
    mini-batch (of many steps the rest of an epoch may have fewer); not said is refused.
    min_difference: the least number of this site's training examples by which a job may
    differ from an earlier one, if it differs at all
    (`apps/deployment/rules/differences.py`). max_rounds: by the server's word and by
    the site's own count. max_epsilon: of differential privacy, over all jobs together
    (`apps/deployment/rules/guard.py`); a job without [privacy] is then refused.
    epsilon_unit: the smallest that ε may be promised of. hours: such as "19:00-06:00",
    the end excluded; an update of a request that was served may leave later.
    timezone: "local", "UTC" or a name. draws: "secret": what shapes this site's updates
    by chance follows from a secret of the site, a new one for each run; "job": from the
    job's seed, so that a run has the bits of its simulation. audit: "required": a
    person can approve a job with an audit of it alone (`audit/`), no attack of which
    succeeds by more than audit_bound above chance.
    count_step: this site's weight and counts leave as multiples of it
        (`core/counts.py`).
    steady_replies: under a secure sum, answers leave at times that say little of how
    many notes there are. share_scores: the server may see this site's scores, and
    outside a secure sum the counts that they are made of. individual_updates: the
    server may look at this site's own update (`aggregation` of a job), where
    `secure_sum` lets it leave unmasked. methods: empty: all.
    approvals, approvers: how many people must approve a job, and their public keys
    (`apps/deployment/rules/approval.py`). source: how messages call the table; no key
    of it. docs/deploy.md says more.

    Raises ConfigError for a value that is no rule.
    """

    min_sites: Annotated[int, Ge(1)] = 3
    secure_sum: Literal["required", "revealing", "off"] = "revealing"
    allowed_layers: Names = ("*",)
    denied_layers: Names = ()
    freeze_embeddings: bool = True
    min_tokens: Count = 0
    min_steps: Count = 0
    min_patients: Count = 0
    min_batch: Count = 0
    min_difference: Count = 0
    max_rounds: Count = 0
    max_bytes: Count = 0
    max_epsilon: Annotated[float, Ge(0)] = 0.0
    epsilon_unit: Literal["", "patient", "document", "sentence"] = ""
    hours: str = ""
    timezone: str = "local"
    draws: Literal["secret", "job"] = "secret"
    audit: Literal["required", "off"] = "off"
    audit_bound: Annotated[float, Interval(ge=0, le=1)] = 0.1
    count_step: Annotated[int, Ge(1)] = 1
    steady_replies: bool = True
    share_scores: bool = False
    individual_updates: bool = False
    methods: Names = ()
    approvals: Annotated[int, Ge(1)] = 1
    approvers: Mapping[str, str] = field(default_factory=dict)
    source: str = "[policy] of the site's file"

    def __post_init__(self) -> None:
        # wrong hours raise here, not at the first request
        self.open_at(datetime.now(UTC))
        self.quorum("")

    def quorum(self, site: str) -> Quorum:
        """Who must approve a job at this site, and how many of them."""
        return Quorum(site, self.approvals, self.approvers)

    def open_at(self, now: datetime) -> tuple[bool, datetime]:
        """Whether `hours` are now, and what their clock says. now: with a time zone."""
        try:
            clock = now.astimezone(
                None if self.timezone == "local" else ZoneInfo(self.timezone)
            )
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(
                f'timezone = {self.timezone!r}: expected "local", "UTC" or a name such as '
                '"Europe/Berlin" that this machine knows'
            ) from error
        if not self.hours:
            return True, clock
        found = _HOURS.fullmatch(self.hours)
        h0, m0, h1, m1 = (
            (int(part) for part in found.groups()) if found else (99, 0, 0, 0)
        )
        start, end, minute = 60 * h0 + m0, 60 * h1 + m1, 60 * clock.hour + clock.minute
        if max(m0, m1) > 59 or start >= 1440 or end > 1440:
            raise ConfigError(f'hours = {self.hours!r}: expected such as "19:00-06:00"')
        if start == end:
            raise ConfigError(
                f"hours = {self.hours!r}: starts when it ends; leave hours out to allow any time"
            )
        return (
            start <= minute < end if start < end else not end <= minute < start
        ), clock

    def require(self, holds: object, rule: str, asked: str, allowed: str) -> None:
        """Raises PolicyRefusal unless a rule holds: with what was asked, and what is
        allowed."""
        if not holds:
            raise PolicyRefusal(
                rule,
                f"refused by the site's policy: {asked}; this site allows {allowed}. "
                f"Only the site can change this: {rule} in {self.source}",
            )


def policy_from(table: Mapping[str, Any], where: str) -> Policy:
    """The policy of a [policy] table; `where` is how messages call it.

    Raises ConfigError for an unknown key (with the nearest), or a value of the wrong
        type.
    """
    if "source" in table:  # a field of ours, not a key of theirs
        raise ConfigError(f"{where}: unknown key 'source'")
    return replace(build(Policy, table, where), source=where)


def check_job(
    policy: Policy,
    method: str,
    sites: int,
    threshold: int,
    *,
    rounds: int | None,
    secure: bool,
    each: bool = False,
) -> None:
    """Whether the site may join. Raises PolicyRefusal naming the first rule that says
    no.

    threshold: least number of sites that a sum is opened with. rounds: None if the job
    does not say. secure: whether sums are masked; if not, the server sees what scores
    are made of. each: whether the server looks at each site's update.
    """
    methods, most = policy.methods, policy.max_rounds
    known = not methods or method in methods
    policy.require(
        known, "methods", f"the job's method is {_name(method)}", ", ".join(methods)
    )
    _check_sites(policy, sites, threshold)
    wants = "does not say how many rounds it takes" if rounds is None else ""
    wants = wants or f"asks for {rounds:,} rounds"
    few = not most or (rounds is not None and rounds <= most)
    policy.require(few, "max_rounds", f"the job {wants}", f"at most {most:,}")
    _check_each(policy, "the job", each)
    _check_sum(policy, "the job", secure=secure, scores=not secure)


def check_audit(policy: Policy, worst: float | None) -> None:
    """Whether a person may approve a job. Raises PolicyRefusal.

    worst: by how much the best attack of its audit at this site succeeds above chance;
    None: there is none that tried every attack.
    """
    if policy.audit == "required":
        asked = "there is no audit of this job at this site, or not every attack could be tried"
        allowed = "approvals with one alone (`fednotes audit`, `fednotes site approve --audit`)"
        policy.require(worst is not None, "audit", asked, allowed)
        asked = f"an attack of the audit may succeed {worst or 0:.3f} above chance"
        small = (worst or 0) <= policy.audit_bound
        policy.require(small, "audit_bound", asked, f"{policy.audit_bound:g} at most")


def check_counts(policy: Policy, method: str, rounds_counts: bool) -> None:
    """Check that the sites of a method can send their counts as the policy asks.

    Args:
        policy: The site's rules.
        method: The name of the job's method.
        rounds_counts: `rounds_counts` of the method's site class.

    Raises:
        PolicyRefusal: Exact counts would leave, and the policy has a `count_step` above
            1.
    """
    policy.require(
        policy.count_step == 1 or rounds_counts,
        "count_step",
        f"sites of the method {_name(method)} send exact weights and counts, because their class "
        "has no `rounds_counts = True`",
        f"multiples of {policy.count_step:,} (another method, or count_step = 1)",
    )


def check_difference(policy: Policy, number: int, view: str, earlier: str) -> None:
    """Check a job's training examples against those of one earlier job.

    Args:
        policy: The site's rules.
        number: The number of examples that only one of the two jobs trains on.
        view: What the examples are, such as "sentences".
        earlier: What messages call the earlier job.

    Raises:
        PolicyRefusal: They differ, and by fewer examples than `min_difference`.
    """
    least = policy.min_difference
    policy.require(
        number == 0 or number >= least,
        "min_difference",
        f"the site's training examples ({view}) differ by {number:,} from those of {earlier}, so "
        "the sums of both jobs would tell these few",
        f"a job on the same examples as that one, or one that differs by {least:,} and more",
    )


def check_coverage(policy: Policy, update: Coverage) -> None:
    """Check how many patients an update will cover, before the site joins.

    Args:
        policy: The site's rules.
        update: The update, as the method describes it.

    Raises:
        PolicyRefusal: It would cover fewer patients than `min_patients`.
    """
    least = policy.min_patients
    policy.require(
        update.patients >= least,
        "min_patients",
        f"{update.what} would cover {update.patients:,} {update.kind}",
        f"{least:,} and more ({update.remedy})",
    )


def check_request(
    policy: Policy,
    request: Request,
    sites: int,
    threshold: int,
    *,
    secure: bool,
    now: datetime,
) -> None:
    """Whether the site may serve a request. now: with a time zone.

    Raises PolicyRefusal.
    """
    what, most = (
        f"task {_name(request.task)} of round {request.round}",
        policy.max_rounds,
    )
    _check_sites(policy, sites, threshold)
    few = not most or request.round < most
    policy.require(
        few, "max_rounds", f"{what} was asked for", f"rounds 0 to {most - 1:,}"
    )
    is_open, clock = policy.open_at(now)
    asked, allowed = (
        f"{what} was asked for at {clock:%H:%M}",
        f"{policy.hours} ({policy.timezone}",
    )
    policy.require(is_open, "hours", asked, f"{allowed} time)")
    _check_each(policy, what, request.each)
    _check_sum(policy, what, secure=secure, scores=not secure)


def check_update(
    policy: Policy,
    task: str,
    round: int,
    tensors: Collection[str],
    behind: Mapping[str, int],
    *,
    size: int,
    secure: bool,
    scores: bool,
    left: int | None,
) -> None:
    """Whether a reply may leave. Raises PolicyRefusal.

    tensors: their names. behind: tokens, steps and patients of training, and batch, the
    examples of a mini-batch; without those that are not known. size: bytes on the wire.
    scores: whether the server will see this site's own scores, or the counts that they
    are made of. left: updates of this task that left in the job, with this one, as the
    site counted; None: it did not.
    """
    what = f"the reply to task {_name(task)} of round {round}"
    tables, names = find_word_tables(tensors), sorted(tensors)
    # as one of which that is not known
    one_step = tensors and behind.get("steps", 1) <= 1
    revealed = (
        "a table of words" if tables else "the gradient of one step" if one_step else ""
    )
    _check_sum(policy, what, secure=secure, scores=scores, revealed=revealed)
    denied = [name for name in names if _layer(name, policy.denied_layers)]
    others = [name for name in names if not _layer(name, policy.allowed_layers)]
    frozen = tables if policy.freeze_embeddings else ()
    for rule, odd, allowed in (
        ("denied_layers", denied, f"all but {', '.join(policy.denied_layers)}"),
        (
            "allowed_layers",
            others,
            ", ".join(policy.allowed_layers) or "no tensor at all",
        ),
        ("freeze_embeddings", frozen, "none to leave"),
    ):
        kind = "a table of words, " if odd is frozen else ""
        policy.require(not odd, rule, f"{what} holds {kind}{_names(odd)}", allowed)
    # counts alone have no training
    for key, words in _BEHIND.items() if tensors else ():
        least, number = getattr(policy, f"min_{key}"), behind.get(key)
        told = "an unknown number of" if number is None else f"{number:,}"
        enough = not least or (number is not None and number >= least)
        asked = f"{what} has {told} {words} behind it"
        policy.require(enough, f"min_{key}", asked, f"{least:,} and more")
    few = not policy.max_rounds or left is None or left <= policy.max_rounds
    asked = f"{what} would be number {left or 0:,} of this job"
    allowed = f"{policy.max_rounds:,} rounds; a new approval counts anew"
    policy.require(few, "max_rounds", asked, allowed)
    small = not policy.max_bytes or size <= policy.max_bytes
    asked, allowed = f"{what} has {size:,} bytes", f"at most {policy.max_bytes:,}"
    policy.require(small, "max_bytes", asked, allowed)


def _check_sites(policy: Policy, sites: int, threshold: int) -> None:
    asked = f"the sum may be opened with {threshold} of {sites} sites"
    if sites < policy.min_sites:
        asked = f"the sum would be over {sites} sites"
    enough = min(sites, threshold) >= policy.min_sites
    policy.require(enough, "min_sites", asked, f"{policy.min_sites} sites and more")


def _check_each(policy: Policy, what: str, each: bool) -> None:
    asked, permitted = f"{what} has the server look at each site's update", not each
    permitted = permitted or policy.individual_updates
    policy.require(
        permitted, "individual_updates", asked, "its update to be one of a sum"
    )


def _check_sum(
    policy: Policy, what: str, *, secure: bool, scores: bool, revealed: str = ""
) -> None:
    """What the server may see of this site alone. revealed: what an update says of
    single notes: the rows of a word table that changed are the words that occurred, and
    the gradient of one step can be inverted."""
    masked = secure or policy.secure_sum != "required"
    asked = f"{what} is without a secure sum"
    policy.require(masked, "secure_sum", asked, "masked replies only")
    hidden = secure or not revealed or policy.secure_sum != "revealing"
    asked = f"{what} would show {revealed} without a secure sum"
    policy.require(hidden, "secure_sum", asked, "such replies only masked")
    asked = f"{what} would show the server the counts of this site's own evaluations"
    allowed = "them in a secure sum only ([federation] secure_sum = true, three sites or more)"
    policy.require(not scores or policy.share_scores, "share_scores", asked, allowed)


def _layer(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)


def _names(names: Iterable[str]) -> str:
    """The first name, and how many others there are."""
    first, *others = names or ("",)
    return _name(first) + (f" and {len(others)} more" if others else "")


def _name(name: str) -> str:
    """A name from outside, in quotes."""
    return f"'{clean(name, NAME)}'"
