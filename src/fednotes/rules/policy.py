"""A site's rules for what a federation may ask of it; they stand above the server's wishes.

They are the [policy] table of the site's own file. Three moments, one function each:

    check_job       before the site joins: what the job will want
    check_request   each time the server asks for something
    check_update    before anything leaves: what is really in it

A wish that breaks a rule raises `PolicyRefusal`, which names the rule, both sides, and the
file and key where the site alone can change it. The server is told its `public` part, the rule
alone: how few patients a site has, and what it allows, is the site's own business. Nothing here
looks at a value of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, tzinfo
from fnmatch import fnmatchcase
from typing import Any, Literal
from zoneinfo import ZoneInfo

from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.settings import build
from fednotes.rules.approval import Quorum

# Names of tensors with one row (or one number) per word: what they say is which words a site
# has. The last three parts are output layers; a pre-training run leaves them out by default.
_WORD_TABLES = (
    *("*embed*", "wte.*", "*.wte.*", "words.*", "*.words.*", "shared.weight", "*.shared.weight"),
    *("*lm_head.weight", "*lm_head.bias", "*lm_head.decoder.*", "*predictions.decoder.*"),
    *("*predictions.bias", "*vocab_projector.*", "*final_logits_bias"),
)
# …and those that say "embedding" but know no words.
_WORDLESS = (
    *("*position_embeddings*", "*embed_positions*", "*token_type_embeddings*"),
    *("*layernorm*", "*layer_norm*", "characters.*", "*.characters.*"),
)
# What may be behind an update, and how messages call it.
_BEHIND = {
    "tokens": "tokens",
    "steps": "steps",
    "patients": "patients",
    "batch": "examples of a mini-batch",
}
_HOURS = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
_BY_THE_JOB = "; the job can sum securely: [federation] secure_sum = true, with three sites or more"


class PolicyRefusal(RefusedError):
    """A site's policy forbids it. rule: the key of the policy that does. public: what the
    server may be told. later: whether the rule allows later what it forbids now."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule, self.later = rule, rule == "hours"
        mended = _BY_THE_JOB if rule in ("share_scores", "secure_sum") else ""
        self.public = (
            f"refused by {rule} of this site's policy; its own log says more, and only the site "
            f"can change it{mended}"
        )


@dataclass(frozen=True)
class Policy:
    """The [policy] table of a site's file. A number that is 0 is no rule.

    min_sites: least number of sites in a sum, and least that its secure sum may be opened with.
    secure_sum: "required" for every sum; "revealing", for updates that reveal (`reveals`);
        "off", for none.
    allowed_layers, denied_layers: tensors that may leave and that may not, as patterns such
        as "lstm.*"; "lstm" means all below it too. What is in both may not.
    freeze_embeddings: tensors with a row per word stay (`word_tables`).
    min_tokens, min_steps, min_patients: least behind an update that holds tensors; one that
        does not say how many is refused. Counts alone are for share_scores to judge.
    min_batch: least examples in a mini-batch that such an update was trained with; where many
        steps are behind it, the rest of an epoch may be smaller.
    max_rounds: of a job, by the server's word and by the site's own count. max_bytes: of a
        message.
    hours: when requests are served, such as "19:00-06:00" (over midnight), the end excluded;
        empty: always. An update of a request that was served may leave later.
    timezone: of `hours`: "local" (this machine's), "UTC" or a name such as "Europe/Berlin".
    steady_replies: under a secure sum, answers leave at times that say little of how many notes
        there are (`engines/pace.py`).
    share_scores: the server may see this site's own scores, and the counts that scores are
        made of outside a secure sum.
    methods: those allowed; empty: all.
    approvals: how many different people must approve a job. approvers: name → public key of
        those who may (`rules/approval.py`); empty: whoever runs the command.
    source: how messages call the table; `read_policy` fills it in.

    Raises ConfigError for a value that is no rule.
    """

    min_sites: int = 3
    secure_sum: Literal["required", "revealing", "off"] = "revealing"
    allowed_layers: tuple[str, ...] = ("*",)
    denied_layers: tuple[str, ...] = ()
    freeze_embeddings: bool = True
    min_tokens: int = 0
    min_steps: int = 0
    min_patients: int = 0
    min_batch: int = 0
    max_rounds: int = 0
    max_bytes: int = 0
    hours: str = ""
    timezone: str = "local"
    steady_replies: bool = True
    share_scores: bool = False
    methods: tuple[str, ...] = ()
    approvals: int = 1
    approvers: Mapping[str, str] = field(default_factory=dict)
    source: str = "[policy] of the site's file"

    def __post_init__(self) -> None:
        least = [f"min_{what}" for what in _BEHIND]
        for name in (*least, "max_rounds", "max_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: 0 is no rule, below is nothing")
        if self.min_sites < 1:
            raise ConfigError(f"min_sites = {self.min_sites}: at least 1 is needed")
        for name in ("allowed_layers", "denied_layers", "methods"):
            if "" in getattr(self, name):
                raise ConfigError(f"{name}: holds an empty text, which fits nothing")
        if self.hours:
            self.window  # noqa: B018  (a wrong text raises here, not at the first request)
        self.zone  # noqa: B018
        self.quorum("")

    def quorum(self, site: str) -> Quorum:
        """Who must approve a job at this site, and how many of them."""
        return Quorum(site, self.approvals, self.approvers)

    @property
    def window(self) -> tuple[int, int]:
        """`hours` as minutes of the day, first and last (excluded)."""
        found = _HOURS.fullmatch(self.hours)
        h0, m0, h1, m1 = (int(part) for part in found.groups()) if found else (99, 0, 0, 0)
        start, end = 60 * h0 + m0, 60 * h1 + m1
        if max(m0, m1) > 59 or start >= 1440 or end > 1440:
            raise ConfigError(f'hours = {self.hours!r}: expected such as "19:00-06:00"')
        if start == end:
            raise ConfigError(
                f"hours = {self.hours!r}: starts when it ends; leave hours out to allow any time"
            )
        return start, end

    @property
    def zone(self) -> tzinfo | None:
        """The clock of `hours`; None is this machine's."""
        if self.timezone == "local":
            return None
        try:
            return ZoneInfo(self.timezone)
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(
                f'timezone = {self.timezone!r}: expected "local", "UTC" or a name such as '
                '"Europe/Berlin" that this machine knows'
            ) from error


def policy_from(table: Mapping[str, Any], where: str) -> Policy:
    """The policy of a [policy] table; `where` is how messages call it.

    Raises ConfigError for an unknown key (with the nearest), or a value of the wrong type.
    """
    if "source" in table:  # a field of ours, not a key of theirs
        raise ConfigError(f"{where}: unknown key 'source'")
    return replace(build(Policy, table, where), source=where)


def check_job(
    policy: Policy, method: str, sites: int, threshold: int, *, rounds: int | None, secure: bool
) -> None:
    """Whether the site may join. Raises PolicyRefusal naming the first rule that says no.

    threshold: least number of sites that a sum is opened with. rounds: None if the job does not
    say. secure: whether sums are masked; if not, the server sees what scores are made of.
    """
    if policy.methods and method not in policy.methods:
        asked = f"the job's method is {_name(method)}"
        raise _refusal(policy, "methods", asked, ", ".join(policy.methods))
    _check_sites(policy, sites, threshold)
    if policy.max_rounds and (rounds is None or rounds > policy.max_rounds):
        unknown = "does not say how many rounds it takes"
        asked = unknown if rounds is None else f"asks for {rounds:,} rounds"
        raise _refusal(policy, "max_rounds", f"the job {asked}", f"at most {policy.max_rounds:,}")
    _check_sum(policy, "the job", secure=secure, scores=not secure)


def check_request(
    policy: Policy,
    task: str,
    round: int,
    sites: int,
    threshold: int,
    *,
    secure: bool,
    now: datetime,
) -> None:
    """Whether the site may serve a request. round: from 0. now: with a time zone.

    Raises PolicyRefusal.
    """
    what = f"task {_name(task)} of round {round}"
    _check_sites(policy, sites, threshold)
    if policy.max_rounds and round >= policy.max_rounds:
        last = f"rounds 0 to {policy.max_rounds - 1:,}"
        raise _refusal(policy, "max_rounds", f"{what} was asked for", last)
    if policy.hours:
        if now.tzinfo is None:
            raise ValueError("the time of a request needs a time zone")
        start, end = policy.window
        clock = now.astimezone(policy.zone)
        minute = 60 * clock.hour + clock.minute
        if not (start <= minute < end if start < end else not end <= minute < start):
            asked = f"{what} was asked for at {clock:%H:%M}"
            raise _refusal(policy, "hours", asked, f"{policy.hours} ({policy.timezone} time)")
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

    tensors: their names. behind: tokens, steps and patients of training, and batch, the examples
    of a mini-batch; without those that are not known. size: bytes on the wire. scores: whether
    the server will see this site's own scores, or the counts that they are made of. left: updates
    of this task that left in the job, with this one, as the site counted; None: it did not.
    """
    what = f"the reply to task {_name(task)} of round {round}"
    _check_sum(policy, what, secure=secure, scores=scores, revealed=_revealed(tensors, behind))
    if denied := [n for n in sorted(tensors) if _layer(n, policy.denied_layers)]:
        allowed = f"all but {', '.join(policy.denied_layers)}"
        raise _refusal(policy, "denied_layers", f"{what} holds {_names(denied)}", allowed)
    if others := [n for n in sorted(tensors) if not _layer(n, policy.allowed_layers)]:
        allowed = ", ".join(policy.allowed_layers) or "no tensor at all"
        raise _refusal(policy, "allowed_layers", f"{what} holds {_names(others)}", allowed)
    if policy.freeze_embeddings and (tables := word_tables(tensors)):
        asked = f"{what} holds a table of words, {_names(tables)}"
        raise _refusal(policy, "freeze_embeddings", asked, "none to leave")
    for key, words in _BEHIND.items() if tensors else ():  # counts alone have no training
        least, number = getattr(policy, f"min_{key}"), behind.get(key)
        if least and (number is None or number < least):
            told = "an unknown number of" if number is None else f"{number:,}"
            asked = f"{what} has {told} {words} behind it"
            raise _refusal(policy, f"min_{key}", asked, f"{least:,} and more")
    if policy.max_rounds and left is not None and left > policy.max_rounds:
        asked = f"{what} would be number {left:,} of this job"
        allowed = f"{policy.max_rounds:,} rounds; a new approval counts anew"
        raise _refusal(policy, "max_rounds", asked, allowed)
    if policy.max_bytes and size > policy.max_bytes:
        asked = f"{what} has {size:,} bytes"
        raise _refusal(policy, "max_bytes", asked, f"at most {policy.max_bytes:,}")


def word_tables(names: Iterable[str]) -> tuple[str, ...]:
    """Those tensors that have a row per word, by their names, sorted.

    Anything called an embedding counts unless it is known to be of positions, segments,
    characters or a layer norm; so do output layers over the vocabulary, and their bias.
    """
    return tuple(sorted(n for n in names if _fits(n, _WORD_TABLES) and not _fits(n, _WORDLESS)))


def _revealed(tensors: Collection[str], behind: Mapping[str, int]) -> str:
    """What an update says of single notes: it holds a word table, whose changed rows are the
    words that occurred, or is the gradient of one step (as is one of which that is not known),
    which can be inverted. "" for neither."""
    if word_tables(tensors):
        return "a table of words"
    return "the gradient of one step" if tensors and behind.get("steps", 1) <= 1 else ""


def _check_sites(policy: Policy, sites: int, threshold: int) -> None:
    asked = ""
    if sites < policy.min_sites:
        asked = f"the sum would be over {sites} sites"
    elif threshold < policy.min_sites:
        asked = f"the sum may be opened with {threshold} of {sites} sites"
    if asked:
        raise _refusal(policy, "min_sites", asked, f"{policy.min_sites} sites and more")


def _check_sum(
    policy: Policy, what: str, *, secure: bool, scores: bool, revealed: str = ""
) -> None:
    """What the server may see of this site alone. revealed: what an update says of notes."""
    if policy.secure_sum == "required" and not secure:
        asked = f"{what} is without a secure sum"
        raise _refusal(policy, "secure_sum", asked, "masked replies only")
    if policy.secure_sum == "revealing" and not secure and revealed:
        asked = f"{what} would show {revealed} without a secure sum"
        raise _refusal(policy, "secure_sum", asked, "such replies only masked")
    if scores and not policy.share_scores:
        asked = f"{what} would show the server the counts of this site's own evaluations"
        allowed = "them in a secure sum only ([federation] secure_sum = true, three sites or more)"
        raise _refusal(policy, "share_scores", asked, allowed)


def _refusal(policy: Policy, rule: str, asked: str, allowed: str) -> PolicyRefusal:
    return PolicyRefusal(
        rule,
        f"refused by the site's policy: {asked}; this site allows {allowed}. "
        f"Only the site can change this: {rule} in {policy.source}",
    )


def _layer(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)


def _names(names: Iterable[str]) -> str:
    """The first name, and how many others there are."""
    first, *others = names
    return _name(first) + (f" and {len(others)} more" if others else "")


def _name(name: str) -> str:
    """A name from outside, in quotes."""
    return f"'{clean(name, NAME)}'"
