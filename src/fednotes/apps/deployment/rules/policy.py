"""A site's rules for what a federation may ask of it; no server can override them.

`check_participation` checks a job's requirements before the site joins,
`check_difference` its training examples, `check_request` each request, `check_storage`
the stored files, and `check_update` the contents of a reply before it leaves. Each
raises `PolicyRefusal` if a rule is broken. The error's message names the rule, the
request, the permitted values, and the file and key where the site can change the rule.
The server receives only the error's `public` text, which names the rule alone, because
a site's number of patients and its limits are confidential. No tensor's value is read
here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

from annotated_types import Ge, MinLen

from fednotes.apps.deployment.rules.approval import Quorum
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.federation import Coverage
from fednotes.core.messages import Request
from fednotes.core.numbers import Fraction, NonNegativeInt, PositiveInt
from fednotes.core.settings import build, checked
from fednotes.core.word_tables import find_word_tables

# What a policy limits as `min_KEY`, to how messages refer to it.
_COVERAGE_WORDS = {
    "tokens": "tokens",
    "steps": "steps",
    "patients": "patients",
    "batch": "examples of a mini-batch",
}
_HOURS = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
_MINUTES_PER_DAY = 24 * 60
_SECURE_SUM_REMEDY = (
    "; the job can sum securely: [federation] secure_sum = true, with three sites or "
    "more"
)


NameTuple = tuple[Annotated[str, MinLen(1)], ...]


class LocalTime(NamedTuple):
    """A time as a site's opening hours see it.

    Attributes:
        is_open: Whether the site serves requests then.
        clock: The time in the site's time zone.
    """

    is_open: bool
    clock: datetime


class _Hours(NamedTuple):
    """The daily hours in which a site serves requests, in minutes since midnight.

    Attributes:
        start: The first minute.
        end: The minute after the last one; smaller than `start` for hours that run past
            midnight.
    """

    start: int
    end: int


class PolicyRefusal(RefusedError):
    """A site's policy forbids a request or a reply.

    Attributes:
        rule: The key of the policy that forbids it.
        public: The message for the server.
        later: Whether the rule may permit the same request later.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule
        self.later = rule == "hours"
        remedy = _SECURE_SUM_REMEDY if rule in ("share_scores", "secure_sum") else ""
        self.public = (
            f"refused by {rule} of this site's policy; its own log says more, and only "
            f"the site can change it{remedy}"
        )


@checked(frozen=True)
class Policy:
    """The [policy] table of a site's file.

    0 disables a limit. docs/deploy.md explains each key to its users.

    Attributes:
        min_sites: Minimum number of sites in a sum, and for opening a secure sum. If a
            job draws the sites of each round, these count, and not all of its sites.
        secure_sum: Which updates must be masked: `"required"` for all, `"revealing"`
            for those that reveal much about single notes, `"off"` for none.
        allowed_layers: Name patterns of the tensors that may leave, such as `"lstm.*"`;
            `"lstm"` includes everything below it.
        denied_layers: Patterns of tensors that may not leave, even if they are allowed.
        freeze_embeddings: Whether tables with a row for each word stay.
        min_tokens: Minimum number of tokens behind an update that holds tensors. For
            this limit and the next three, an update with an unknown number is refused.
        min_steps: Minimum number of training steps behind an update with tensors.
        min_patients: Minimum number of patients behind an update with tensors.
        min_batch: Minimum number of examples in a mini-batch. The last of several
            batches of an epoch may have fewer.
        min_difference: Minimum number of this site's training examples by which a job
            must differ from an earlier one, if it differs at all
            (`apps/deployment/rules/differences.py`).
        max_rounds: Maximum number of rounds, as the server claims and as the site
            counts them.
        max_bytes: Maximum size of a reply.
        max_stored_bytes: Maximum size of all files that the site stores for a run:
            states, requests, replies, results and lines of the ledger.
        max_epsilon: Privacy budget of all jobs together
            (`apps/deployment/rules/guard.py`); a job without [privacy] is then refused.
        max_delta: Maximum δ of all jobs together, the probability with which their ε
            may be exceeded; a job without [privacy] is then refused.
        epsilon_unit: Smallest unit to which a job's ε may apply.
        hours: The daily hours in which requests are served, such as `"19:00-06:00"`,
            excluding the end. An update that was requested in time may leave later.
        timezone: The time zone of `hours`: `"local"`, `"UTC"` or a name such as
            `"Europe/Berlin"`.
        draws: With `"secret"`, random draws are derived from a secret of the site that
            is new for each run. With `"job"`, they are derived from the job's seed, so
            a run is bit-identical to its simulation.
        audit: With `"required"`, a job can only be approved with an audit of it
            (`audit/`).
        audit_bound: How far above the success rate of guessing the best attack of the
            audit may succeed.
        count_step: Step in which the site's weight and counts are rounded before they
            leave (`core/counts.py`); 1 sends them exactly.
        steady_replies: Whether replies under a secure sum leave at times that reveal
            little about the number of notes.
        share_scores: Whether the server may see this site's scores and, outside a
            secure sum, the counts behind them.
        individual_updates: Whether the server may inspect this site's update on its own
            (`aggregation` of a job), if `secure_sum` lets it leave unmasked.
        methods: Names of the permitted methods; empty for all.
        approvals: Number of people who must approve a job.
        approvers: The people who may approve, and their public keys
            (`apps/deployment/rules/approval.py`).
        source: How messages refer to the table; not a key of it.

    Raises:
        ConfigError: A value is not valid.
    """

    min_sites: PositiveInt = 3
    secure_sum: Literal["required", "revealing", "off"] = "revealing"
    allowed_layers: NameTuple = ("*",)
    denied_layers: NameTuple = ()
    freeze_embeddings: bool = True
    min_tokens: NonNegativeInt = 0
    min_steps: NonNegativeInt = 0
    min_patients: NonNegativeInt = 0
    min_batch: NonNegativeInt = 0
    min_difference: NonNegativeInt = 0
    max_rounds: NonNegativeInt = 0
    max_bytes: NonNegativeInt = 0
    max_stored_bytes: NonNegativeInt = 50_000_000_000
    max_epsilon: Annotated[float, Ge(0)] = 0.0
    max_delta: Annotated[float, Ge(0)] = 0.0
    epsilon_unit: Literal["", "patient", "document", "sentence"] = ""
    hours: str = ""
    timezone: str = "local"
    draws: Literal["secret", "job"] = "secret"
    audit: Literal["required", "off"] = "off"
    audit_bound: Fraction = 0.1
    count_step: PositiveInt = 1
    steady_replies: bool = True
    share_scores: bool = False
    individual_updates: bool = False
    methods: NameTuple = ()
    approvals: PositiveInt = 1
    approvers: Mapping[str, str] = field(default_factory=dict)
    source: str = "[policy] of the site's file"

    def __post_init__(self) -> None:
        # Raise for invalid values now, not at the first request.
        self.to_local_time(datetime.now(UTC))
        self.make_quorum("")

    def make_quorum(self, site: str) -> Quorum:
        """Return who must approve a job at this site, and how many of them."""
        return Quorum(site, self.approvals, self.approvers)

    def to_local_time(self, now: datetime) -> LocalTime:
        """Convert a time to the site's time zone, and check it against its hours.

        Args:
            now: The time, with a time zone.

        Raises:
            ConfigError: `timezone` or `hours` is not valid.
        """
        try:
            zone = None if self.timezone == "local" else ZoneInfo(self.timezone)
            clock = now.astimezone(zone)
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(
                f'timezone = {self.timezone!r}: expected "local", "UTC" or a name such '
                'as "Europe/Berlin" that this machine knows'
            ) from error
        if not self.hours:
            return LocalTime(is_open=True, clock=clock)
        start, end = self._parse_hours()
        minute = 60 * clock.hour + clock.minute
        if start < end:
            return LocalTime(start <= minute < end, clock)
        # The opening hours run past midnight.
        return LocalTime(minute >= start or minute < end, clock)

    def _parse_hours(self) -> _Hours:
        """Parse and return `hours`.

        Raises:
            ConfigError: `hours` is not a span of time.
        """
        invalid_hours = ConfigError(
            f'hours = {self.hours!r}: expected a span such as "19:00-06:00"'
        )
        match = _HOURS.fullmatch(self.hours)
        if match is None:
            raise invalid_hours
        start_hour, start_minute, end_hour, end_minute = map(int, match.groups())
        start = 60 * start_hour + start_minute
        end = 60 * end_hour + end_minute
        if start_minute > 59 or end_minute > 59:
            raise invalid_hours
        if start >= _MINUTES_PER_DAY or end > _MINUTES_PER_DAY:
            raise invalid_hours
        if start == end:
            raise ConfigError(
                f"hours = {self.hours!r}: the start and the end are the same time: "
                "leave hours out to allow any time"
            )
        return _Hours(start, end)

    def require(self, is_met: object, rule: str, request: str, allowed: str) -> None:
        """Raise PolicyRefusal unless a rule is met.

        Args:
            is_met: Whether the rule is met.
            rule: The key of the policy.
            request: What the job or the server requests, for the message.
            allowed: What this site permits, for the message.
        """
        if not is_met:
            raise PolicyRefusal(
                rule,
                f"refused by the site's policy: {request}; this site allows {allowed}. "
                f"Only the site can change this: {rule} in {self.source}",
            )


def build_policy(table: Mapping[str, Any], where: str) -> Policy:
    """Return the policy of a [policy] table.

    Args:
        table: The table.
        where: How messages refer to the table.

    Raises:
        ConfigError: A key is unknown, or a value has the wrong type.
    """
    if "source" in table:  # a field of the class that is not a key of the file
        raise ConfigError(f"{where}: unknown key 'source'")
    return replace(build(Policy, table, where), source=where)


def check_participation(
    policy: Policy,
    method: str,
    sites: int,
    threshold: int,
    *,
    rounds: int | None,
    secure: bool,
    inspects_each: bool = False,
) -> None:
    """Check whether the site may join a job.

    Args:
        policy: The site's rules.
        method: The job's method.
        sites: Number of sites of a round.
        threshold: Minimum number of sites with which a sum is opened.
        rounds: Number of rounds; None if the job does not say.
        secure: Whether sums are masked. If not, the server sees the counts behind
            scores.
        inspects_each: Whether the server inspects each site's update.

    Raises:
        PolicyRefusal: A rule forbids it; the message names the first such rule.
    """
    policy.require(
        not policy.methods or method in policy.methods,
        "methods",
        f"the job's method is {_quote_name(method)}",
        ", ".join(policy.methods),
    )
    _check_sites(policy, sites, threshold)
    limit = policy.max_rounds
    request = "the job does not say how many rounds it takes"
    if rounds is not None:
        request = f"the job asks for {rounds:,} rounds"
    policy.require(
        not limit or (rounds is not None and rounds <= limit),
        "max_rounds",
        request,
        f"at most {limit:,}",
    )
    _check_individual_updates(policy, "the job", inspects_each=inspects_each)
    _check_sum(policy, "the job", secure=secure, scores=not secure)


def check_audit(policy: Policy, best_gain: float | None) -> None:
    """Check that a job's audit permits a person to approve the job.

    Args:
        policy: The site's rules.
        best_gain: How far above the success rate of guessing the best attack of the
            job's audit at this site succeeds; None if there is no audit that tried
            every attack.

    Raises:
        PolicyRefusal: An audit is missing, or an attack succeeds too often.
    """
    if policy.audit != "required":
        return
    policy.require(
        best_gain is not None,
        "audit",
        "there is no audit of this job at this site, or not every attack could be "
        "tried",
        "only approvals with an audit (`fednotes audit`, `fednotes site "
        "approve --audit`)",
    )
    policy.require(
        (best_gain or 0) <= policy.audit_bound,
        "audit_bound",
        f"the success of an attack in the audit may be {best_gain or 0:.3f} above "
        "chance",
        f"{policy.audit_bound:g} at most",
    )


def check_count_step(policy: Policy, method: str, *, rounds_counts: bool) -> None:
    """Check that a method's site class can round counts, if the policy requires it.

    Args:
        policy: The site's rules.
        method: The name of the job's method.
        rounds_counts: Attribute `rounds_counts` of the method's site class.

    Raises:
        PolicyRefusal: Exact counts would leave although the policy's `count_step` is
            above 1.
    """
    policy.require(
        policy.count_step == 1 or rounds_counts,
        "count_step",
        f"sites of the method {_quote_name(method)} send exact weights and counts, "
        "because their class has no `rounds_counts = True`",
        f"multiples of {policy.count_step:,} (another method, or count_step = 1)",
    )


def check_difference(policy: Policy, number: int, view: str, earlier: str) -> None:
    """Check a job's training examples against those of one earlier job.

    Args:
        policy: The site's rules.
        number: The number of examples that only one of the two jobs trains on.
        view: What the examples are, such as "sentences".
        earlier: How messages refer to the earlier job.

    Raises:
        PolicyRefusal: The two jobs differ, but by fewer examples than `min_difference`.
    """
    minimum = policy.min_difference
    policy.require(
        number == 0 or number >= minimum,
        "min_difference",
        f"the site's training examples ({view}) differ by {number:,} from those of "
        f"{earlier}, so the sums of both jobs would reveal these few",
        "a job on the same examples as that one, or one that differs by "
        f"{minimum:,} or more",
    )


def check_coverage(policy: Policy, update: Coverage) -> None:
    """Check how many patients an update will cover, before the site joins.

    Args:
        policy: The site's rules.
        update: The update, as the method describes it.

    Raises:
        PolicyRefusal: It would cover fewer patients than `min_patients`.
    """
    minimum = policy.min_patients
    policy.require(
        update.patients >= minimum,
        "min_patients",
        f"{update.what} would cover {update.patients:,} {update.kind}",
        f"{minimum:,} or more ({update.remedy})",
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
    """Check whether the site may serve a request.

    Args:
        policy: The site's rules.
        request: The request.
        sites: Number of sites whose updates are in the sum.
        threshold: Minimum number of sites with which the sum is opened.
        secure: Whether the sum is masked.
        now: The time, with a time zone.

    Raises:
        PolicyRefusal: A rule forbids it.
    """
    what = f"task {_quote_name(request.task)} of round {request.round}"
    _check_sites(policy, sites, threshold)
    limit = policy.max_rounds
    policy.require(
        not limit or request.round < limit,
        "max_rounds",
        f"{what} was asked for",
        f"rounds 0 to {limit - 1:,}",
    )
    local = policy.to_local_time(now)
    policy.require(
        local.is_open,
        "hours",
        f"{what} was asked for at {local.clock:%H:%M}",
        f"{policy.hours} ({policy.timezone} time)",
    )
    _check_individual_updates(policy, what, inspects_each=request.each)
    _check_sum(policy, what, secure=secure, scores=not secure)


def check_storage(policy: Policy, size: int) -> None:
    """Check how much the site stores for a run.

    Args:
        policy: The site's rules.
        size: Number of bytes that would be stored.

    Raises:
        PolicyRefusal: The size exceeds `max_stored_bytes`.
    """
    limit = policy.max_stored_bytes
    policy.require(
        not limit or size <= limit,
        "max_stored_bytes",
        f"the site would store {size:,} bytes for this run",
        f"at most {limit:,}",
    )


def check_update(  # noqa: PLR0913 - the facts of a reply, for each of which there is a rule
    policy: Policy,
    task: str,
    round: int,
    tensors: Collection[str],
    covered: Mapping[str, int],
    *,
    size: int,
    secure: bool,
    scores: bool,
    num_sent: int | None,
) -> None:
    """Check whether a reply may leave.

    Args:
        policy: The site's rules.
        task: The task that the reply answers.
        round: The round, as the server numbers it.
        tensors: The names of the tensors.
        covered: How much training produced them: "tokens", "steps", "patients" and
            "batch", the examples of a mini-batch. Unknown numbers are absent.
        size: Size of the encoded reply, in bytes.
        secure: Whether the reply is masked.
        scores: Whether the server will see this site's own scores, or the counts behind
            them.
        num_sent: Number of updates of this task in the job, including this one, as
            counted by the site; None if it did not count them.

    Raises:
        PolicyRefusal: A rule forbids the reply.
    """
    what = f"the reply to task {_quote_name(task)} of round {round}"
    word_tables = find_word_tables(tensors)
    # An unknown number of steps counts as one.
    is_of_one_step = bool(tensors) and covered.get("steps", 1) <= 1
    revealed = ""
    if word_tables:
        revealed = "a table of words"
    elif is_of_one_step:
        revealed = "the gradient of one step"
    _check_sum(policy, what, secure=secure, scores=scores, revealed=revealed)
    _check_layers(policy, what, tensors=tensors, word_tables=word_tables)
    if tensors:  # no training is behind a reply with counts alone
        _check_training(policy, what, covered)

    if num_sent is not None:
        check_rounds(policy, what, num_sent)
    policy.require(
        not policy.max_bytes or size <= policy.max_bytes,
        "max_bytes",
        f"{what} has {size:,} bytes",
        f"at most {policy.max_bytes:,}",
    )


def check_rounds(policy: Policy, what: str, num_sent: int) -> None:
    """Check whether a job has rounds left for one more reply.

    Args:
        policy: The site's rules.
        what: How messages refer to the reply.
        num_sent: Number of replies to this task in the job, including this one.

    Raises:
        PolicyRefusal: There are more replies than `max_rounds`.
    """
    policy.require(
        not policy.max_rounds or num_sent <= policy.max_rounds,
        "max_rounds",
        f"{what} would be number {num_sent:,} of this job",
        f"{policy.max_rounds:,} rounds; a new approval starts the count again",
    )


def _check_layers(
    policy: Policy, what: str, *, tensors: Collection[str], word_tables: Iterable[str]
) -> None:
    """Check the names of the tensors that would leave."""
    names = sorted(tensors)
    denied = [name for name in names if _matches_any(name, policy.denied_layers)]
    policy.require(
        not denied,
        "denied_layers",
        f"{what} contains {_summarise_names(denied)}",
        f"all except {', '.join(policy.denied_layers)}",
    )
    unlisted = [name for name in names if not _matches_any(name, policy.allowed_layers)]
    policy.require(
        not unlisted,
        "allowed_layers",
        f"{what} contains {_summarise_names(unlisted)}",
        ", ".join(policy.allowed_layers) or "no tensor at all",
    )
    frozen_tables = list(word_tables) if policy.freeze_embeddings else []
    policy.require(
        not frozen_tables,
        "freeze_embeddings",
        f"{what} contains a table of words, {_summarise_names(frozen_tables)}",
        "no such table to leave",
    )


def _check_training(policy: Policy, what: str, covered: Mapping[str, int]) -> None:
    """Check that enough training is behind an update."""
    for key, words in _COVERAGE_WORDS.items():
        minimum = getattr(policy, f"min_{key}")
        number = covered.get(key)
        number_text = "an unknown number of" if number is None else f"{number:,}"
        policy.require(
            not minimum or (number is not None and number >= minimum),
            f"min_{key}",
            f"{what} covers {number_text} {words}",
            f"{minimum:,} or more",
        )


def _check_sites(policy: Policy, sites: int, threshold: int) -> None:
    """Check that a sum covers enough sites, even if some drop out."""
    request = f"the sum may be opened with {threshold} of {sites} sites"
    if sites < policy.min_sites:
        request = f"the sum would be over {sites} sites"
    policy.require(
        min(sites, threshold) >= policy.min_sites,
        "min_sites",
        request,
        f"{policy.min_sites} sites or more",
    )


def _check_individual_updates(
    policy: Policy, what: str, *, inspects_each: bool
) -> None:
    """Check whether the server may inspect each site's update."""
    policy.require(
        not inspects_each or policy.individual_updates,
        "individual_updates",
        f"{what} lets the server see each site's update",
        "its update only as part of a sum",
    )


def _check_sum(
    policy: Policy, what: str, *, secure: bool, scores: bool, revealed: str = ""
) -> None:
    """Check that the server may see this site's update and counts as they would arrive.

    Args:
        policy: The site's rules.
        what: How messages refer to the request or the reply.
        secure: Whether the sum is masked.
        scores: Whether the server would see the counts behind this site's scores.
        revealed: The part of an update that reveals single notes; "" for none. The
            changed rows of a word table show which words occurred, and the gradient of
            one step can be inverted.
    """
    policy.require(
        secure or policy.secure_sum != "required",
        "secure_sum",
        f"{what} is without a secure sum",
        "only masked replies",
    )
    policy.require(
        secure or not revealed or policy.secure_sum != "revealing",
        "secure_sum",
        f"{what} would show {revealed} without a secure sum",
        "such replies only if they are masked",
    )
    policy.require(
        not scores or policy.share_scores,
        "share_scores",
        f"{what} would show the server the counts of this site's own evaluations",
        "them in a secure sum only ([federation] secure_sum = true, three sites or "
        "more)",
    )


def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a tensor, or a layer that contains it, matches any pattern."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        for pattern in patterns
    )


def _summarise_names(names: Iterable[str]) -> str:
    """Return the first name, and the number of others."""
    first, *others = names or ("",)
    more = f" and {len(others)} more" if others else ""
    return f"{_quote_name(first)}{more}"


def _quote_name(name: str) -> str:
    """Return a name from outside, sanitised and in quotes."""
    return f"'{clean(name, NAME)}'"
