"""Whether a mention holds for the patient now: negation, family history, hypotheses.

A small rule set of our own in the manner of NegEx (Chapman et al. 2001) and ConText (Harkema et
al. 2009). Within a mention's sentence:

    trigger before   "denies chest pain"      reaches forward, at most `window` words
    trigger after    "pneumonia ruled out"    reaches back, at most `window_after` words; a
                      trigger of one word only to a mention directly before it
    terminator       "no fever but cough"     ends the reach of a trigger before it
    pseudo-trigger   "no change in"           holds a trigger's words and is none

At each word the longest phrase counts. A sentence ends at . ! ? before white space (not after
"Dr." and the like), at a semicolon, a blank line, a list item or a line that begins with a header.
Phrases are public and fixed; nothing is learnt from notes.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

from fednotes.core.errors import ConfigError, nearest

Bounds = tuple[int, int]
Option = Literal["off", "drop", "mark"]
OPTIONS: Final = ("off", "drop", "mark")
KINDS: Final = ("negated", "family", "hypothetical")

_KIN = (
    "mother father brother sister grandmother grandfather grandparents aunt uncle cousin niece "
    "nephew sibling siblings parents parent son daughter brothers sisters mom dad aunts uncles "
    "relative relatives"
).split()
_TELLS = "reports reported states stated says said notes noted noticed brought".split()
_WHOSE = ("", "his ", "her ", "the ", "a ", "patient ", "maternal ", "paternal ")


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split("/") if phrase.strip())


BEFORE: Final[Mapping[str, tuple[str, ...]]] = {
    "negated": (
        *(f"{kin} {verb}" for kin in _KIN for verb in ("denies", "denied")),  # whoever speaks
        *_phrases(
            "no / not / none of / never / never had / without / denies / denied / denying / "
            "deny / absence of / absent / negative for / neg for / free of / no evidence of / "
            "no sign of / no signs of / no history of / no h o / lack of / lacked / lacks / "
            "fails to reveal / failed to reveal / ruled out / rules out / ruled out for / "
            "unremarkable for / nor / does not have / did not have / doesn't / didn't / isn't / "
            "wasn't / hasn't / cannot see / unable to identify / no suspicious / no new / "
            "rather than / declines / non"
        ),
    ),
    "family": (
        *_phrases(
            "family history / family hx / fam hx / family medical history / fh / fhx / family "
            "members with / family member with / history in the family of / maternal / paternal / "
            "family with"
        ),
        *_KIN,
    ),
    "hypothetical": _phrases(
        "if / should you develop / should he develop / should she develop / should you have / "
        "should the patient develop / in case of / in the event of / return for / return to ed "
        "for / return with / call for / call with / watch for / watch out for / monitor for / "
        "monitoring for / risk of / risk for / risks of / to prevent / prevention of / "
        "prophylaxis for / prophylaxis against / prevent / screening for / screen for / "
        "rule out / r o / evaluate for / evaluation for / assess for / as needed for / prn for"
    ),
}
AFTER: Final[Mapping[str, tuple[str, ...]]] = {
    "negated": _phrases(
        "was ruled out / were ruled out / is ruled out / are ruled out / has been ruled out / "
        "have been ruled out / ruled out / is absent / was absent / were absent / are absent / "
        "absent / not present / not seen / was not seen / were not seen / not found / not "
        "detected / not identified / not noted / not observed / not demonstrated / is negative / "
        "was negative / were negative / negative / unlikely / denied / was denied / were denied / "
        "is excluded / was excluded / were excluded / excluded / has been excluded"
    ),
    "family": (
        *_phrases("runs in the family / in the family / in family / in family members"),
        *(f"{place} {whose}{kin}" for place in ("in", "of") for whose in _WHOSE for kin in _KIN),
    ),
    "hypothetical": _phrases("should occur / were to occur / would occur"),
}
PSEUDO: Final = (
    *_phrases(
        "no increase / no change / no significant change / no interval change / no definite "
        "change / no improvement / no relief / no response to / no significant interval change / "
        "not only / not certain if / not certain whether / not sure if / not necessarily / not "
        "drain / not extend / not cause / not due to / without difficulty / without any further / "
        "with or without / not ruled out / not been ruled out / cannot be ruled out / not be "
        "ruled out / cannot be excluded / not be excluded / not excluded / gram negative / no "
        "further / not rule out / can not be excluded / rh negative / family practice / family "
        "physician / family doctor / family meeting / lives with family / if not / what if / "
        "non small / non st / non hodgkin / non insulin / non alcoholic / non q / non obstructive"
    ),
    *(f"{kin} {verb}" for kin in _KIN for verb in _TELLS),
    *(f"{by} {whose}{kin}" for by in ("with", "by", "per") for whose in _WHOSE for kin in _KIN),
)
_ENDS: Final = _phrases(
    "but / however / nevertheless / yet / though / although / still / except / except for / aside "
    "from / apart from / other than / besides / otherwise / nonetheless"
)
TERMINATORS: Final[Mapping[str, tuple[str, ...]]] = {
    "negated": (
        *_ENDS,
        *_phrases(
            "as the cause of / as a cause of / as the source of / as the reason for / "
            "secondary to / due to / because of / which / who / presents with / "
            "presented with / presenting with / complains of / complained of / has a / has had / "
            "is positive for / positive for / was found to have / patient has / patient had / "
            "pt has / admits / reports / reported / history of / developed / treated with / "
            "diagnosed with / consistent with / and has / "
            "started on / suggestive of / suggesting / compatible with"
        ),
    ),
    "family": (
        *_ENDS,
        *_phrases(
            "patient / pt / social history / past medical history / pmh / "
            "presents / presented / admitted / complains of / physical examination"
        ),
    ),
    "hypothetical": (
        *_ENDS,
        *_phrases(
            "because / since / patient has / pt has / presents with / presented with / diagnosed "
            "with / which / who / showed / shows / revealed / found"
        ),
    ),
}


class Context(NamedTuple):
    """What the rules say of a mention; all false: it holds for the patient now."""

    negated: bool
    family: bool
    hypothetical: bool


NOTHING: Final = Context(False, False, False)

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
# One character first, then what must be true of it: the search skips all others.
_END = re.compile(
    r"[.!?;\n](?:(?<=;)|(?<=[.!?])(?=\s|$)(?<!\b(?:dr|mr|ms|vs|st)\.)(?<!\bmrs\.)"
    r"(?<!\b(?:e\.g|i\.e)\.)|(?<=\n)(?:[ \t]*\n|[ \t]*(?:[-*•]|\d{1,2}[.)])(?=\s)"
    r"|(?=[ \t]*[a-z][a-z /]{1,40}:)))"
)
_ANSWER = re.compile(r"\s*[:=]\s*(?:no|none|negative|neg|absent|denies|denied|never|false)\b")


class _Node:
    """A word of some phrase: what may follow, and what a phrase that ends here does (bits)."""

    __slots__ = ("ends", "next", "phrase", "sets")

    def __init__(self) -> None:
        self.next: dict[str, _Node] = {}
        self.phrase, self.sets, self.ends = False, 0, 0


_LONGEST: Final = 8  # words of a phrase, no fewer than the longest one has


@dataclass(frozen=True)
class Rules:
    """Phrases by kind, and how far triggers reach, in words.

    kinds: what is looked for, among negated, family and hypothetical.
    """

    kinds: tuple[str, ...] = KINDS
    window: int = 12
    window_after: int = 6

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(f"context {kind!r} is unknown: {nearest(kind, KINDS)}")
        if min(self.window, self.window_after) < 1:
            raise ConfigError("a context window must be 1 word at least")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all rules: caches name it."""
        parts = (self.kinds, self.window, self.window_after, BEFORE, AFTER, PSEUDO, TERMINATORS)
        return hashlib.sha256(repr((parts, _END.pattern, _ANSWER.pattern)).encode()).hexdigest()

    @cached_property
    def before(self) -> dict[str, _Node]:
        """Phrases that matter before a mention, by first word."""
        return self._tree(BEFORE)

    @cached_property
    def after(self) -> dict[str, _Node]:
        """Phrases that matter after a mention."""
        return self._tree(AFTER)

    def _tree(self, triggers: Mapping[str, tuple[str, ...]]) -> dict[str, _Node]:
        root = _Node()
        for phrase in PSEUDO:
            _end_of(root, phrase)
        for bit, kind in enumerate(KINDS):
            if kind in self.kinds:
                for phrase in triggers[kind]:
                    _end_of(root, phrase).sets |= 1 << bit
                for phrase in TERMINATORS[kind]:
                    _end_of(root, phrase).ends |= 1 << bit
        return root.next


def _end_of(root: _Node, phrase: str) -> _Node:
    """The node of a phrase's last word."""
    node = root
    for word in phrase.split():
        node = node.next.setdefault(word, _Node())
    node.phrase = True
    return node


RULES: Final = Rules()


def context_of(text: str, start: int, end: int, rules: Rules = RULES) -> Context:
    """The context of the mention text[start:end]."""
    return contexts(text, [(start, end)], rules)[0]


def contexts(text: str, mentions: Sequence[Bounds], rules: Rules = RULES) -> list[Context]:
    """The context of each mention of a text; mentions are character offsets, in order.

    Only sentences that hold a mention are looked at, each once.
    """
    if not mentions:
        return []
    plain = _plain(text)
    ends = [0, *(found.end() for found in _END.finditer(plain)), len(plain) + 1]
    sentence, number = None, -1
    result = []
    for start, end in mentions:
        at = bisect_right(ends, start) - 1
        if sentence is None or at != number:
            sentence, number = _Sentence(plain, ends[at], ends[at + 1], rules), at
        result.append(sentence.context(start, end))
    return result


def _plain(text: str) -> str:
    """Lower case, a character for a character."""
    low = text.lower()
    if len(low) != len(text):
        low = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
    return low.replace("’", "'")


class _Sentence:
    """A sentence's words and where the rules match them."""

    def __init__(self, plain: str, start: int, end: int, rules: Rules) -> None:
        found = list(_WORD.finditer(plain, start, end))
        words = [match.group().removesuffix("'s") for match in found]
        self._plain, self._rules = plain, rules
        self._starts, self._ends = [m.start() for m in found], [m.end() for m in found]
        self._before, self._after = _hits(words, rules.before), _hits(words, rules.after)

    def context(self, start: int, end: int) -> Context:
        first, behind = bisect_right(self._ends, start), bisect_left(self._starts, end)
        kinds = self._reached(first) | self._reached_back(behind)
        if "negated" in self._rules.kinds and _ANSWER.match(self._plain, end):
            kinds |= 1
        return Context(bool(kinds & 1), bool(kinds & 2), bool(kinds & 4)) if kinds else NOTHING

    def _reached(self, first: int) -> int:
        """The kinds (bits) whose triggers before word `first` reach it."""
        hits, kinds = self._before, 0
        begin = first - self._rules.window
        for at in range(bisect_left(hits, (begin - _LONGEST,)), len(hits)):
            _, stop, sets, ends = hits[at]
            if stop > first:
                break
            kinds = kinds & ~ends | (sets if stop > begin else 0)
        return kinds

    def _reached_back(self, behind: int) -> int:
        """The kinds (bits) whose triggers reach back from word `behind` on.

        A trigger of one word must stand directly behind the mention.
        """
        hits, kinds, ended = self._after, 0, 0
        for at in range(bisect_left(hits, (behind,)), len(hits)):
            start, stop, sets, ends = hits[at]
            if start >= behind + self._rules.window_after:
                break
            if start == behind or stop > start + 1:
                kinds |= sets & ~ended
            ended |= ends
        return kinds


def _hits(words: Sequence[str], rules: Mapping[str, _Node]) -> list[tuple[int, ...]]:
    """Where phrases stand, the longest at each word: (first word, word behind, sets, ends)."""
    hits: list[tuple[int, ...]] = []
    free = 0
    for at, word in enumerate(words):
        if word not in rules or at < free:
            continue
        node: _Node | None = rules[word]
        behind = at + 1
        while node is not None:
            if node.phrase:
                free, longest = behind, node
            node = node.next.get(words[behind]) if behind < len(words) else None
            behind += 1
        if free > at:
            hits.append((at, free, longest.sets, longest.ends))
    return hits
