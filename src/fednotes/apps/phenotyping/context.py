"""Whether a mention holds for the patient now: negation, family and hypothesis.

The rules are a small set of our own, in the manner of NegEx (Chapman et al. 2001) and
ConText (Harkema et al. 2009). Their phrases are in `context.toml`. They apply within
the sentence of a mention:

    trigger before   "denies chest pain"      reaches forward, at most 12 words
    trigger after    "pneumonia ruled out"    reaches back, at most 6 words; a trigger
                      of one word reaches only a mention directly before it
    terminator       "no fever but cough"     ends the reach of a trigger before it
    pseudo-trigger   "no change in"           contains a trigger's words, but is none

At each word, the longest phrase counts. A sentence ends at . ! ? before white space
(not after abbreviations such as "Dr."), at a semicolon, a blank line, a list item or a
line that begins with a header.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import product
from typing import Any, Final, Literal, NamedTuple

# Treatment of mentions that do not hold: used like others, left out, or marked.
Option = Literal["off", "drop", "mark"]
# The context of a mention is a set of these kinds, as bits 1, 2 and 4.
KINDS: Final = ("negated", "family", "hypothetical")
_NEGATED: Final = 1
WINDOW: Final = 12  # how many words ahead a trigger reaches
WINDOW_AFTER: Final = 6  # how many words back a trigger reaches
_LONGEST_PHRASE: Final = 8  # no phrase has more words

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
# The pattern begins with a character class, so the search is fast; conditions follow.
_SENTENCE_END = re.compile(
    r"[.!?;\n](?:(?<=;)|(?<=[.!?])(?=\s|$)(?<!\b(?:dr|mr|ms|vs|st)\.)(?<!\bmrs\.)"
    r"(?<!\b(?:e\.g|i\.e)\.)|(?<=\n)(?:[ \t]*\n|[ \t]*(?:[-*•]|\d{1,2}[.)])(?=\s)"
    r"|(?=[ \t]*[a-z][a-z /]{1,40}:)))"
)
# "chest pain: none", as in forms
_NEGATIVE_ANSWER = re.compile(
    r"\s*[:=]\s*(?:no|none|negative|neg|absent|denies|denied|never|false)\b"
)


# ---- phrases -------------------------------------------------------------------------


@lru_cache(maxsize=1)
def read_phrases() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the phrases of `context.toml`, with the words in braces filled in.

    Returns:
        The phrases of each kind, in the tables "before", "after", "pseudo" and
        "terminators".
    """
    text = (
        files("fednotes.apps.phenotyping").joinpath("context.toml").read_text("utf-8")
    )
    tables: dict[str, Any] = tomllib.loads(text)
    words = tables.pop("words")
    return {
        name: {kind: _fill_in_all(forms, words) for kind, forms in table.items()}
        for name, table in tables.items()
    }


def _fill_in_all(
    forms: Sequence[str], words: dict[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return the phrases for several forms."""
    return tuple(phrase for form in forms for phrase in _fill_in(form, words))


def _fill_in(form: str, words: dict[str, Sequence[str]]) -> list[str]:
    """Return the phrases for a form such as "no {sign} of"."""
    names = re.findall(r"{(\w+)}", form)
    choices = product(*(words[name] for name in names))
    return [form.format(**dict(zip(names, each, strict=True))) for each in choices]


@lru_cache(maxsize=1)
def compute_rules_fingerprint() -> str:
    """Return a digest of all rules, for caches and saved models."""
    tables = read_phrases()
    rules = (
        (
            KINDS,
            WINDOW,
            WINDOW_AFTER,
            tables["before"],
            tables["after"],
            tables["pseudo"]["all"],
            tables["terminators"],
        ),
        _SENTENCE_END.pattern,
        _NEGATIVE_ANSWER.pattern,
    )
    return hashlib.sha256(repr(rules).encode()).hexdigest()


class _Effect(NamedTuple):
    """The effect of a phrase: the kinds that it sets, and those that it ends."""

    sets: int = 0
    ends: int = 0


class _Rules(NamedTuple):
    """The phrases that matter on one side of a mention.

    Attributes:
        effects: The effect of each phrase. A pseudo-trigger has none.
        longest: The length of the longest phrase in words, by its first word.
    """

    effects: dict[tuple[str, ...], _Effect]
    longest: dict[str, int]


@lru_cache(maxsize=2)
def _select_rules(side: Literal["before", "after"]) -> _Rules:
    """Return the phrases that matter before, or after, a mention."""
    tables = read_phrases()
    effects = {tuple(phrase.split()): _Effect() for phrase in tables["pseudo"]["all"]}
    for bit, kind in enumerate(KINDS):
        for phrase in tables[side][kind]:
            words = tuple(phrase.split())
            effect = effects.get(words, _Effect())
            effects[words] = effect._replace(sets=effect.sets | 1 << bit)
        for phrase in tables["terminators"][kind]:
            words = tuple(phrase.split())
            effect = effects.get(words, _Effect())
            effects[words] = effect._replace(ends=effect.ends | 1 << bit)

    longest: dict[str, int] = {}
    for words in effects:
        longest[words[0]] = max(len(words), longest.get(words[0], 0))
    return _Rules(effects, longest)


# ---- mentions ------------------------------------------------------------------------


def find_contexts(text: str, mentions: Sequence[tuple[int, int]]) -> list[int]:
    """Return the context of each mention of a text.

    Args:
        text: The text.
        mentions: Start and end of each mention in characters of the text, in order.

    Returns:
        Bits of KINDS for each mention; 0 if the mention holds for the patient now.
    """
    if not mentions:
        return []
    plain = _lower_case(text)
    ends = [match.end() for match in _SENTENCE_END.finditer(plain)]
    bounds = [0, *ends, len(plain) + 1]

    # Only sentences with a mention are read, each once.
    sentences: dict[int, _Sentence] = {}
    result = []
    for start, end in mentions:
        number = bisect_right(bounds, start) - 1
        if number not in sentences:
            sentences[number] = _Sentence(plain, bounds[number], bounds[number + 1])
        result.append(sentences[number].find_context(start, end))
    return result


def _lower_case(text: str) -> str:
    """Return a text in lower case, with as many characters as before."""
    lower = text.lower()
    if len(lower) != len(text):
        lower = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
    return lower.replace("’", "'")


class _Hit(NamedTuple):
    """A phrase in a sentence: its first word, the word after it, and its effect."""

    start: int
    stop: int
    effect: _Effect


class _Sentence:
    """The words of a sentence, and where the rules match them."""

    def __init__(self, plain: str, start: int, end: int) -> None:
        matches = list(_WORD.finditer(plain, start, end))
        words = [match.group().removesuffix("'s") for match in matches]
        self._plain = plain
        self._word_starts = [match.start() for match in matches]
        self._word_ends = [match.end() for match in matches]
        self._hits_before = _find_phrases(words, _select_rules("before"))
        self._hits_after = _find_phrases(words, _select_rules("after"))

    def find_context(self, start: int, end: int) -> int:
        """Return the kinds of context of a mention, as bits of KINDS."""
        first_word = bisect_right(self._word_ends, start)
        next_word = bisect_left(self._word_starts, end)
        context = self._find_kinds_before(first_word) | self._find_kinds_after(
            next_word
        )
        if _NEGATIVE_ANSWER.match(self._plain, end):
            context |= _NEGATED
        return context

    def _find_kinds_before(self, first_word: int) -> int:
        """Return the kinds whose triggers reach a mention from before it."""
        hits = self._hits_before
        window = first_word - WINDOW
        kinds = 0
        for at in range(_find_first_hit(hits, window - _LONGEST_PHRASE), len(hits)):
            hit = hits[at]
            if hit.stop > first_word:
                break
            kinds &= ~hit.effect.ends
            if hit.stop > window:
                kinds |= hit.effect.sets
        return kinds

    def _find_kinds_after(self, next_word: int) -> int:
        """Return the kinds whose triggers reach a mention from after it."""
        hits = self._hits_after
        kinds = 0
        ended = 0
        for at in range(_find_first_hit(hits, next_word), len(hits)):
            hit = hits[at]
            if hit.start >= next_word + WINDOW_AFTER:
                break
            has_several_words = hit.stop > hit.start + 1
            if hit.start == next_word or has_several_words:
                kinds |= hit.effect.sets & ~ended
            ended |= hit.effect.ends
        return kinds


def _find_first_hit(hits: Sequence[_Hit], word: int) -> int:
    """Return the index of the first hit that does not begin before a word."""
    return bisect_left(hits, word, key=lambda hit: hit.start)


def _find_phrases(words: Sequence[str], rules: _Rules) -> list[_Hit]:
    """Return the phrases that matter in a sentence: the longest at each word.

    Phrases do not overlap, so a pseudo-trigger hides the triggers inside it.
    """
    effects, longest = rules
    hits: list[_Hit] = []
    free = 0
    for start, word in enumerate(words):
        if word not in longest or start < free:
            continue
        furthest = min(start + longest[word], len(words))
        for stop in range(furthest, start, -1):
            effect = effects.get(tuple(words[start:stop]))
            if effect is not None:
                hits.append(_Hit(start, stop, effect))
                free = stop
                break
    return hits
