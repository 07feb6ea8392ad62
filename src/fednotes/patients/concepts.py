"""Notes → concepts, by dictionary: the longest terms that stand in a text.

    normalise   letters and digits, case folded, accents dropped; words parted by anything else
    match       at each word the longest term that begins there, then on behind it
    context     negated and family mentions dropped, marked or taken like others
    bag         all notes of a patient are one bag of concepts

Terms and texts are cut into the same words. A possessive 's is left out ("Crohn's" = "Crohn").
English plurals of more than four letters are taken as singulars (`singular`). Not used for
matching: terms without a letter, of one word below three characters, of one ambiguous word
(`AMBIGUOUS`), or of more than 20 words. A mention may run across a line end.

An Aho-Corasick automaton (pyahocorasick) goes over words, each written as three characters: a
third of the nodes that letters take, and every word of no term ends in its root. It gives all
matches; the leftmost longest are chosen here (the library's own choice, `iter_long`, misses some).

Bags of concepts on disk: made once for the same texts, dictionary and rules.

    <folder>/<key>/concepts.npy offsets.npy   the bags
                   kept.npy                   which patients they are of, by position
                   counts.json                what was read

The key is a hash of all texts and of what they are matched with. No text and no patient's id is
in the files, but they are as sensitive as the notes; only their owner can read them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fednotes.core.errors import ConfigError, DataError, MissingExtra, nearest
from fednotes.core.parsing import read_json
from fednotes.core.store import write_folder
from fednotes.data.notes import Note
from fednotes.patients.cohort import Bags
from fednotes.patients.context import NOTHING, OPTIONS, RULES, Option, Rules, contexts
from fednotes.patients.dictionary import (
    AMBIGUOUS,
    Dictionary,
    origin_of,
    plain_text,
    plurals_of,
    singular,
    unfit,
    words_of,
)


@dataclass(frozen=True)
class BagCounts:
    """What was read. left_out: patients with too many concepts. without: patients without one."""

    patients: int
    notes: int
    characters: int
    mentions: int
    left_out: int
    without: int


Found = tuple[Bags, np.ndarray, BagCounts]  # bags, rows of the patients that stay, counts


def key_of(notes: Mapping[str, Sequence[str]], fingerprint: str, most: int) -> str:
    """A hash of all texts, in order, and of how they are matched (`fingerprint`)."""
    state = hashlib.sha256(f"{fingerprint} {most}".encode())
    for texts in notes.values():
        state.update(len(texts).to_bytes(8, "little"))
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            state.update(len(data).to_bytes(8, "little"))
            state.update(data)
    return state.hexdigest()[:32]


def save(path: Path, made: Bags, kept: np.ndarray, counts: BagCounts) -> None:
    """A result as files that only their owner can read, whole or not at all."""

    def fill(folder: Path) -> None:
        arrays = {"concepts": made.concepts, "offsets": made.offsets, "kept": kept}
        for name, array_of in arrays.items():
            np.save(folder / f"{name}.npy", array_of, allow_pickle=False)
        (folder / "counts.json").write_text(json.dumps(asdict(counts)), encoding="utf-8")

    write_folder(path, fill)


def load(path: Path, patients: int, vocabulary: int) -> Found | None:
    """A result from the cache; None where there is none, or it is damaged."""
    try:
        names = ("concepts", "offsets", "kept")
        concepts, offsets, kept = (np.load(path / f"{n}.npy", allow_pickle=False) for n in names)
        counts = BagCounts(**read_json(path / "counts.json"))
        made = Bags(concepts, offsets, vocabulary)
    except (OSError, ValueError, TypeError, EOFError, DataError):
        return None
    fits = len(made) == len(kept) == patients - counts.left_out and counts.patients == patients
    return (made, kept, counts) if fits and (kept < patients).all() else None


MOST: Final = (
    10_000  # concepts of a patient; Liu, Dligach and Miller 2019 leave out those with more
)
RECIPE: Final = "concepts-1"  # raise it when the same text gives other concepts: caches name it

_BASE: Final = 100
_UNKNOWN: Final = "\0"


class Mention(NamedTuple):
    """A stretch of a text (characters, half-open) and the indices of its concepts."""

    start: int
    end: int
    concepts: tuple[int, ...]


class Matcher:
    """Finds a dictionary's terms.

    context: what becomes of mentions that are negated, of the family or hypothetical (`rules`):
    "off" takes them like others, "drop" leaves them out, "mark" gives them indices of their
    own, behind all concepts. It concerns bags; `find` gives every mention. plurals: whether
    plurals count as singulars. ambiguous: single words that are no terms.

    dropped: numbers of terms that are not matched, by reason. vocabulary: a bag's indices are
    below it. Raises MissingExtra without pyahocorasick, ConfigError for an unknown
    context, DataError where no term can be matched.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        *,
        context: Option = "drop",
        rules: Rules = RULES,
        plurals: bool = True,
        ambiguous: frozenset[str] = AMBIGUOUS,
    ) -> None:
        if context not in OPTIONS:
            raise ConfigError(f"context = {context!r} is unknown: {nearest(context, OPTIONS)}")
        self.dictionary, self.context, self.rules = dictionary, context, rules
        self._plurals, self._ambiguous = plurals, ambiguous
        self.vocabulary = len(dictionary) * (2 if context == "mark" else 1)
        self.dropped: Counter[str] = Counter()
        self._codes: dict[str, str] = {}
        self._build()

    def __reduce__(self) -> tuple[Any, ...]:
        """A spawned process builds its own."""
        return _again, (self.dictionary, self.context, self.rules, self._plurals, self._ambiguous)

    @property
    def fingerprint(self) -> str:
        """A hash of dictionary and rules: the same one gives the same bags."""
        parts = [RECIPE, self.dictionary.fingerprint, self.context, self.rules.fingerprint]
        parts += [str(self._plurals), *sorted(self._ambiguous)]
        return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()

    def _build(self) -> None:
        """The automaton, and each matched term's length and concepts."""
        try:
            import ahocorasick  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise MissingExtra("pyahocorasick", "concepts") from None
        self._automaton = ahocorasick.Automaton(ahocorasick.STORE_INTS)
        lengths, numbers, owners = array("B"), array("i"), array("i")
        for at, term in enumerate(self.dictionary.terms):
            words = words_of(term)
            reason = unfit(words, self._ambiguous)
            if reason:
                self.dropped[reason] += 1
                continue
            key = "".join(map(self._code, words))
            number = self._automaton.get(key, -1)
            if number < 0:
                number = len(lengths)
                self._automaton.add_word(key, number)
                lengths.append(len(words))
            numbers.append(number)
            owners.append(at)
        if not lengths:
            raise DataError(
                f"none of the dictionary's {len(self.dictionary.terms)} terms can be matched "
                f"({', '.join(self.dropped) or 'it is empty'}): is it the right file?"
            )
        self._automaton.make_automaton()
        if self._plurals:
            for word, code in list(self._codes.items()):
                self._codes.update(dict.fromkeys(plurals_of(word), code))
        self._lengths = lengths
        self._bounds, self._concepts = self._members(len(lengths), numbers, owners)

    def _code(self, word: str) -> str:
        """Three characters for a word; the first one's range tells where a word begins."""
        if self._plurals:
            word = singular(word)
        code = self._codes.get(word)
        if code is None:
            high, low = divmod(len(self._codes), _BASE)
            top, middle = divmod(high, _BASE)
            code = chr(1 + 2 * _BASE + top) + chr(1 + middle) + chr(1 + _BASE + low)
            self._codes[word] = code
        return code

    def _members(
        self, terms: int, numbers: array[int], owners: array[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(terms + 1,) int64 bounds and int32 concepts of the matched terms."""
        given = self.dictionary
        rows = np.asarray(owners, dtype=np.int64)
        sizes = np.diff(given.bounds)[rows]
        pairs = np.empty((int(sizes.sum()), 2), dtype=np.int64)  # (term, concept)
        pairs[:, 0] = np.repeat(np.asarray(numbers, dtype=np.int64), sizes)
        pairs[:, 1] = given.members[_stretches(given.bounds, rows)]
        size = max(len(given), 1)
        distinct = np.unique(pairs[:, 0] * size + pairs[:, 1])
        bounds = np.searchsorted(distinct // size, np.arange(terms + 1))
        return bounds.astype(np.int64), (distinct % size).astype(np.int32)

    def _matches(self, words: Sequence[str]) -> tuple[list[str], list[tuple[int, int, int]]]:
        """The words' codes, and leftmost longest matches as (start, end in codes, term)."""
        code, lengths = self._codes.get, self._lengths
        codes = [code(word, _UNKNOWN) for word in words]
        found = [
            (last + 1 - 3 * lengths[term], -last - 1, term)
            for last, term in self._automaton.iter("".join(codes))
        ]
        found.sort()  # by start, longer ones first
        kept: list[tuple[int, int, int]] = []
        free = 0
        for start, end, term in found:
            if start >= free:
                free = -end
                kept.append((start, free, term))
        return codes, kept

    def _placed(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Mentions as (start, end, term), in characters of the text."""
        plain = plain_text(text)
        codes, found = self._matches(plain.split())
        if not found:
            return
        ends = list(accumulate(map(len, codes)))  # (words,) each word's end in codes
        word_at = {end: at for at, end in enumerate(ends)}
        spans = [match.span() for match in _VISIBLE.finditer(plain)]
        origin = origin_of(text)
        for _, end, term in found:
            last = word_at[end]
            begin, stop = spans[last + 1 - self._lengths[term]][0], spans[last][1]
            yield (begin, stop, term) if origin is None else (*origin(begin, stop), term)

    def find(self, text: str) -> list[Mention]:
        """All mentions in a text, in order; none overlaps another."""
        bounds, concepts = self._bounds, self._concepts
        return [
            Mention(start, end, tuple(concepts[bounds[term] : bounds[term + 1]].tolist()))
            for start, end, term in self._placed(text)
        ]

    def bag(self, texts: str | Iterable[str], context: Option | None = None) -> np.ndarray:
        """(entries,) int32: the concepts of some texts in order, each as often as it occurs.

        context: "off" or "drop" instead of the matcher's own (a bag with marks has another
        vocabulary and needs a matcher of its own).
        """
        if context not in (None, "off", "drop", self.context):
            raise ConfigError(f"context = {context!r}: give it to the Matcher")
        how = context or self.context
        terms, marks = array("i"), array("b")
        for text in (texts,) if isinstance(texts, str) else texts:
            if how == "off":
                terms.extend(term for _, _, term in self._matches(words_of(text))[1])
                continue
            placed = list(self._placed(text))
            said = contexts(text, [(start, end) for start, end, _ in placed], self.rules)
            for (_, _, term), context_here in zip(placed, said, strict=True):
                holds = context_here is NOTHING
                if holds or how == "mark":
                    terms.append(term)
                    marks.append(not holds)
        rows = np.asarray(terms, dtype=np.int64)
        found = self._concepts[_stretches(self._bounds, rows)]
        if how == "mark":
            sizes = self._bounds[rows + 1] - self._bounds[rows]
            found = found + np.repeat(np.asarray(marks, dtype=np.int32), sizes) * len(
                self.dictionary
            )
        return found.astype(np.int32)


_VISIBLE = re.compile(r"[^ ]+")


def _again(
    dictionary: Dictionary, context: Option, rules: Rules, plurals: bool, ambiguous: frozenset[str]
) -> Matcher:
    return Matcher(dictionary, context=context, rules=rules, plurals=plurals, ambiguous=ambiguous)


def _stretches(bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Indices bounds[r] … bounds[r + 1] − 1 for each row r, one after the other."""
    starts, sizes = bounds[rows], bounds[rows + 1] - bounds[rows]
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))


class PatientBags(NamedTuple):
    """Patients that stay, their bags in the same order, and the counts."""

    patients: tuple[str, ...]
    bags: Bags
    counts: BagCounts


def by_patient(notes: Iterable[Note]) -> dict[str, list[str]]:
    """Texts by patient, in order; a note without a patient counts as one of its own (its id)."""
    found: dict[str, list[str]] = {}
    for note in notes:
        key = note.id if note.patient is None else note.patient
        found.setdefault(key, []).append(note.text)
    return found


def bags(
    notes_by_patient: Mapping[str, Sequence[str]],
    matcher: Matcher,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
    cache: Path | None = None,
    most: int = MOST,
) -> PatientBags:
    """One bag of concepts a patient.

    processes: patients are shared out to so many; the result does not depend on it. progress:
    called with patients done and all. cache: a folder for results, which hold no text; it and
    its files can be read by their owner only. most: patients with more concepts are left out.
    Raises ConfigError for fewer than one process.
    """
    if processes < 1:
        raise ConfigError(f"processes = {processes}: give 1 at least")
    patients = tuple(notes_by_patient)
    path = None if cache is None else cache / key_of(notes_by_patient, matcher.fingerprint, most)
    found = None if path is None else load(path, len(patients), matcher.vocabulary)
    if found is None:
        found = _collect(notes_by_patient, matcher, processes, progress, most)
        if path is not None:
            save(path, *found)
    elif progress is not None:
        progress(len(patients), len(patients))
    made, kept, counts = found
    return PatientBags(tuple(patients[row] for row in kept.tolist()), made, counts)


_COUNTED: Final = ("notes", "characters", "mentions", "left_out", "without")


def _collect(
    notes: Mapping[str, Sequence[str]],
    matcher: Matcher,
    processes: int,
    progress: Callable[[int, int], None] | None,
    most: int,
) -> Found:
    arrays: list[np.ndarray] = []
    kept: list[int] = []
    total = Counter[str]()
    with _pool(matcher, min(processes, max(len(notes), 1))) as run:
        for row, (bag, texts) in enumerate(zip(run(notes.values()), notes.values(), strict=True)):
            total.update(notes=len(texts), characters=sum(map(len, texts)), mentions=len(bag))
            total.update(left_out=len(bag) > most, without=not len(bag))
            if len(bag) <= most:
                kept.append(row)
                arrays.append(bag)
            if progress is not None:
                progress(row + 1, len(notes))
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(bag) for bag in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
    counts = BagCounts(patients=len(notes), **{name: int(total[name]) for name in _COUNTED})
    return Bags(flat, offsets, matcher.vocabulary), np.array(kept, dtype=np.int64), counts


_Run = Callable[[Iterable[Sequence[str]]], Iterator[np.ndarray]]
_worker: Matcher | None = None  # a pool's process has one


@contextmanager
def _pool(matcher: Matcher, processes: int) -> Iterator[_Run]:
    """How to make bags: here, or in a pool.

    Forked processes share the automaton's memory; where there is no fork each builds its own.
    """
    if processes == 1:
        yield lambda patients: (matcher.bag(texts) for texts in patients)
        return
    forks = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    with context.Pool(processes, initializer=_start, initargs=(matcher,)) as pool:
        yield lambda patients: pool.imap(_bag, patients, chunksize=4)


def _start(matcher: Matcher) -> None:
    global _worker
    _worker = matcher


def _bag(texts: Sequence[str]) -> np.ndarray:
    assert _worker is not None
    return _worker.bag(texts)
