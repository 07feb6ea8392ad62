"""Whether a mention holds for the patient now: negation, family history, hypotheses.

A small rule set of our own in the manner of NegEx (Chapman et al. 2001) and ConText (Harkema et
al. 2009); its phrases are in `context.toml`. Within a mention's sentence:

    trigger before   "denies chest pain"      reaches forward, at most 12 words
    trigger after    "pneumonia ruled out"    reaches back, at most 6 words; a trigger of one
                      word only to a mention directly before it
    terminator       "no fever but cough"     ends the reach of a trigger before it
    pseudo-trigger   "no change in"           holds a trigger's words and is none

At each word the longest phrase counts. A sentence ends at . ! ? before white space (not after
"Dr." and the like), at a semicolon, a blank line, a list item or a line that begins with a header.
Phrases are public and fixed; nothing is learnt from notes.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import product
from typing import Any, Final, Literal

Option = Literal["off", "drop", "mark"]
OPTIONS: Final = ("off", "drop", "mark")
KINDS: Final = ("negated", "family", "hypothetical")  # bits 1, 2, 4 of a mention's context
WINDOW, WINDOW_AFTER = 12, 6  # words that a trigger reaches
_LONGEST: Final = 8  # words of a phrase, no fewer than the longest one has

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
# One character first, then what must be true of it: the search skips all others.
_END = re.compile(
    r"[.!?;\n](?:(?<=;)|(?<=[.!?])(?=\s|$)(?<!\b(?:dr|mr|ms|vs|st)\.)(?<!\bmrs\.)"
    r"(?<!\b(?:e\.g|i\.e)\.)|(?<=\n)(?:[ \t]*\n|[ \t]*(?:[-*•]|\d{1,2}[.)])(?=\s)"
    r"|(?=[ \t]*[a-z][a-z /]{1,40}:)))"
)
_ANSWER = re.compile(r"\s*[:=]\s*(?:no|none|negative|neg|absent|denies|denied|never|false)\b")


@lru_cache(maxsize=1)
def phrases() -> dict[str, dict[str, tuple[str, ...]]]:
    """before, after, pseudo, terminators → kind → phrases, words in braces filled in."""
    tables: dict[str, Any] = tomllib.loads(
        files("fednotes.patients").joinpath("context.toml").read_text("utf-8")
    )
    words = tables.pop("words")

    def filled(form: str) -> list[str]:
        names = re.findall(r"{(\w+)}", form)
        lists = [words[name] for name in names]
        return [form.format(**dict(zip(names, each, strict=True))) for each in product(*lists)]

    return {
        name: {kind: tuple(p for form in of for p in filled(form)) for kind, of in table.items()}
        for name, table in tables.items()
    }


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """A hash of all rules: caches and saved models name it."""
    of = phrases()
    parts = (KINDS, WINDOW, WINDOW_AFTER, of["before"], of["after"], of["pseudo"]["all"])
    rules = ((*parts, of["terminators"]), _END.pattern, _ANSWER.pattern)
    return hashlib.sha256(repr(rules).encode()).hexdigest()


class _Node:
    """A word of some phrase: what may follow, and what a phrase that ends here does (bits)."""

    __slots__ = ("ends", "next", "phrase", "sets")

    def __init__(self) -> None:
        self.next: dict[str, _Node] = {}
        self.phrase, self.sets, self.ends = False, 0, 0

    def end_of(self, phrase: str) -> _Node:
        """The node of a phrase's last word."""
        node = self
        for word in phrase.split():
            node = node.next.setdefault(word, _Node())
        node.phrase = True
        return node


@lru_cache(maxsize=2)
def _tree(side: str) -> dict[str, _Node]:
    """Phrases that matter "before" or "after" a mention, by first word."""
    root, given = _Node(), phrases()
    for phrase in given["pseudo"]["all"]:
        root.end_of(phrase)
    for bit, kind in enumerate(KINDS):
        for phrase in given[side][kind]:
            root.end_of(phrase).sets |= 1 << bit
        for phrase in given["terminators"][kind]:
            root.end_of(phrase).ends |= 1 << bit
    return root.next


def contexts(text: str, mentions: Sequence[tuple[int, int]]) -> list[int]:
    """The context of each mention of a text, bits of KINDS; 0: it holds for the patient now.

    mentions: character offsets, in order. Only sentences that hold one are looked at, each once.
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
            sentence, number = _Sentence(plain, ends[at], ends[at + 1]), at
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

    def __init__(self, plain: str, start: int, end: int) -> None:
        found = list(_WORD.finditer(plain, start, end))
        words = [match.group().removesuffix("'s") for match in found]
        self._plain = plain
        self._starts, self._ends = [m.start() for m in found], [m.end() for m in found]
        self._before, self._after = _hits(words, _tree("before")), _hits(words, _tree("after"))

    def context(self, start: int, end: int) -> int:
        first, behind = bisect_right(self._ends, start), bisect_left(self._starts, end)
        answered = 1 if _ANSWER.match(self._plain, end) else 0
        return self._reached(first) | self._reached_back(behind) | answered

    def _reached(self, first: int) -> int:
        """The kinds whose triggers before word `first` reach it."""
        hits, kinds, begin = self._before, 0, first - WINDOW
        for at in range(bisect_left(hits, (begin - _LONGEST,)), len(hits)):
            _, stop, sets, ends = hits[at]
            if stop > first:
                break
            kinds = kinds & ~ends | (sets if stop > begin else 0)
        return kinds

    def _reached_back(self, behind: int) -> int:
        """The kinds whose triggers reach back from word `behind` on.

        A trigger of one word must stand directly behind the mention.
        """
        hits, kinds, ended = self._after, 0, 0
        for at in range(bisect_left(hits, (behind,)), len(hits)):
            start, stop, sets, ends = hits[at]
            if start >= behind + WINDOW_AFTER:
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
