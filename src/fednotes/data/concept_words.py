"""Words as terms and texts share them: folded, without accents, plurals as singulars.

`plain` keeps a text's length wherever each character stands for one: `origin` leads back.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

# Single words that are terms of some dictionary and mean something else, or nothing, in notes.
AMBIGUOUS: Final = frozenset(
    "a about after all also an and any are as at back bad be been before best but by can care "
    "case cat control could date day did discharge disease diseases disorder disorders do "
    "does done due each end etc face fall fast feel felt few fig find finding findings first "
    "fit for from fund gas get give given go good had has have he her here him his history "
    "home hot how ii iii illness in increased is it its job lab large last left level like "
    "line long low lump made male man map may mean men met mg might mild ml moderate month "
    "more most must name negative new no none normal nos not note now of off old on once one "
    "only or other our out over par past patient patients per plan positive post pre present "
    "problem rate rest right s said scale see seen sequela sequelae set severe she short "
    "should sign since site so some son spot stable state still such sun syndrome tag tan "
    "test than that the their them then there these they thin this those time tip to today "
    "too top two type under unit until up us use used very via was way we week well were what "
    "when where which while white who will with woman work would year years yes you your".split()
)
_SHORTEST: Final = 3
_MOST_WORDS: Final = 20

_ACCENTS: Final = range(0x300, 0x370)
_APOSTROPHES: Final = "'’ʼ"


class _Characters(dict[int, str]):
    """Code point → what stands for it: letters and digits folded, an apostrophe, or a space."""

    def __missing__(self, code: int) -> str:
        if chr(code) in _APOSTROPHES:
            made = "'"
        elif code in _ACCENTS:
            made = ""  # an accent
        else:
            folded = unicodedata.normalize("NFKD", chr(code).casefold())
            kept = [c for c in folded if ord(c) not in _ACCENTS]
            made = "".join(c if _in_word(c) else " " for c in kept) or " "
        self[code] = made
        return made


def _in_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character)[0] == "M"


_CHARACTERS: Final = _Characters()
for _code in range(128):
    _CHARACTERS[_code]


def plain_text(text: str) -> str:
    """Words parted by spaces, with one space at the end."""
    plain = text.translate(_CHARACTERS) + " "
    if "'" in plain:
        plain = plain.replace("'s ", "   ").replace("'", " ")
    return plain


def words_of(text: str) -> list[str]:
    """The normalised words of a text, plurals as they stand."""
    return plain_text(text).split()


def singular(word: str) -> str:
    """A word without the ending of an English plural; four letters and fewer stay as they are.

    biopsies → biopsy, abscesses → abscess, reflexes → reflex, stenoses → stenosis, metastases →
    metastasis, tumors → tumor; words in -ss, -us and -is stay. Both sides of a match go through
    it, so what it makes need not be a word ("diabete").
    """
    if len(word) < 5 or word[-1] != "s":
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith(("sses", "xes")):
        return word[:-2]
    if word.endswith("stases") or (word.endswith("oses") and len(word) > 6):
        return word[:-2] + "is"
    return word if word.endswith(("ss", "us", "is")) else word[:-1]


def plurals_of(word: str) -> list[str]:
    """All words that `singular` takes to this one."""
    forms = [word, word + "s", word + "es", word[:-1] + "ies", word[:-2] + "es"]
    return [form for form in dict.fromkeys(forms) if singular(form) == word]


def unfit(words: Sequence[str], ambiguous: frozenset[str]) -> str | None:
    """Why a term of these words is not matched; None where it is."""
    if not words or not any(c.isalpha() for word in words for c in word):
        return "no letter"
    if len(words) > _MOST_WORDS:
        return "long"
    if len(words) == 1 and len(words[0]) < _SHORTEST:
        return "short"
    return "ambiguous" if len(words) == 1 and words[0] in ambiguous else None


def origin_of(text: str) -> Callable[[int, int], tuple[int, int]] | None:
    """Offsets in the plain text → in the text; None where they are the same."""
    if text.isascii() or all(len(_CHARACTERS[ord(c)]) == 1 for c in set(text)):
        return None
    lengths = np.fromiter((len(_CHARACTERS[ord(c)]) for c in text), np.int64, count=len(text))
    places = np.concatenate(([0], np.cumsum(lengths)))  # (characters + 1,) starts in the plain text

    def origin(start: int, end: int) -> tuple[int, int]:
        # The last character that begins there: those before it are dropped accents.
        first = int(np.searchsorted(places, start, side="right")) - 1
        last = int(np.searchsorted(places, end - 1, side="right"))
        while last < len(text) and places[last] == end and not lengths[last]:
            last += 1  # an accent on the last letter belongs to it
        return first, last

    return origin
