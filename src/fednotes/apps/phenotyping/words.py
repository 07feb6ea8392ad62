"""The words of terms and texts, by which they are matched.

Words are folded to lower case, without accents, and separated by anything but letters
and digits. `make_plain_text` keeps the length of a text if each character folds to one
character; otherwise `make_origin_finder` maps positions back to the text.
`make_singular` removes the endings of English plurals.
"""

from __future__ import annotations

import tomllib
import unicodedata
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Final

import numpy as np

from fednotes.apps.phenotyping.cohort import compute_offsets

_LISTS = tomllib.loads(
    files("fednotes.apps.phenotyping").joinpath("dictionary.toml").read_text("utf-8")
)
AMBIGUOUS: Final[frozenset[str]] = frozenset(_LISTS["ambiguous"])

_SHORTEST: Final = 3  # minimum length of a one-word term
_MAX_WORDS: Final = 20  # maximum length of a term in words
_ACCENTS: Final = range(0x300, 0x370)
_APOSTROPHES: Final = "'’ʼ"


class _Characters(dict[int, str]):
    """The plain-text replacement of each character, by code point.

    Folded letters and digits, nothing for an accent, an apostrophe, or a space.
    """

    def __missing__(self, code: int) -> str:
        """Compute and store the replacement of a character when it is first needed."""
        plain = _simplify_character(chr(code))
        self[code] = plain
        return plain


def _simplify_character(character: str) -> str:
    """Return a character's replacement in plain text."""
    if character in _APOSTROPHES:
        return "'"
    if ord(character) in _ACCENTS:
        return ""
    folded = unicodedata.normalize("NFKD", character.casefold())
    without_accents = [c for c in folded if ord(c) not in _ACCENTS]
    return "".join(c if _is_in_word(c) else " " for c in without_accents) or " "


def _is_in_word(character: str) -> bool:
    """Return whether a character is a letter, a digit or a mark."""
    return character.isalnum() or unicodedata.category(character)[0] == "M"


_CHARACTERS: Final = _Characters()


def make_plain_text(text: str) -> str:
    """Return the words of a text separated by spaces, with one space at the end."""
    plain = text.translate(_CHARACTERS) + " "
    if "'" in plain:
        plain = plain.replace("'s ", "   ").replace("'", " ")
    return plain


def make_origin_finder(text: str) -> Callable[[int, int], tuple[int, int]] | None:
    """Return a function that maps stretches of the plain text to the original text.

    Returns:
        A function that maps a start and end in the plain text to those in `text`; None
        if the positions are the same in both texts.
    """
    if text.isascii() or all(len(_CHARACTERS[ord(c)]) == 1 for c in set(text)):
        return None
    lengths = np.fromiter(
        (len(_CHARACTERS[ord(c)]) for c in text), np.int64, count=len(text)
    )
    places = compute_offsets(lengths)  # (characters + 1,) starts in the plain text

    def find_origin(start: int, end: int) -> tuple[int, int]:
        # Several characters may begin at `start`. All but the last are accents, which
        # are dropped.
        first = int(np.searchsorted(places, start, side="right")) - 1
        stop = int(np.searchsorted(places, end - 1, side="right"))
        # Accents on the last letter belong to it.
        while stop < len(text) and places[stop] == end and not lengths[stop]:
            stop += 1
        return first, stop

    return find_origin


def split_into_words(text: str) -> list[str]:
    """Return the normalised words of a text, with plurals unchanged."""
    return make_plain_text(text).split()


def make_singular(word: str) -> str:
    """Return a word without the ending of an English plural.

    biopsies → biopsy, abscesses → abscess, reflexes → reflex, stenoses → stenosis,
    metastases → metastasis, tumors → tumor. Words in -ss, -us and -is do not change,
    nor do words of four letters or fewer. The same change applies to terms and texts,
    so the result need not be a word ("diabete").
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


def list_plurals(word: str) -> list[str]:
    """Return all words whose `make_singular` is this word."""
    forms = [word, word + "s", word + "es", word[:-1] + "ies", word[:-2] + "es"]
    return [form for form in dict.fromkeys(forms) if make_singular(form) == word]


def explain_no_match(words: Sequence[str]) -> str | None:
    """Return why a term of these words is not matched; None if it is."""
    has_letter = any(c.isalpha() for word in words for c in word)
    if not has_letter:
        return "no letter"
    if len(words) > _MAX_WORDS:
        return "long"
    if len(words) == 1 and len(words[0]) < _SHORTEST:
        return "short"
    if len(words) == 1 and words[0] in AMBIGUOUS:
        return "ambiguous"
    return None
