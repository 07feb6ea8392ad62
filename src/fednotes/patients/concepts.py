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

Bags may be kept in a folder, made once for the same texts, dictionary and rules: its name is a
hash of these. No text and no patient's id is in the files, but they are as sensitive as the notes;
only their owner can read them.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from fednotes.core.errors import DataError, MissingExtra, ModelError
from fednotes.core.tensors import load_state, save_state
from fednotes.data.notes import Note
from fednotes.patients.cohort import Bags, offsets_of, stretches
from fednotes.patients.context import Option, contexts
from fednotes.patients.context import fingerprint as fingerprint_of_rules
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

MOST: Final = 10_000  # concepts of a patient; Liu, Dligach and Miller 2019 leave out more
RECIPE: Final = "concepts-1"  # raise it when the same text gives other concepts: caches name it

Notes = Mapping[str, Sequence[str]]  # patient → texts
Progress = Callable[[int, int], None]  # told of patients done, and of all
_BASE: Final = 100
_UNKNOWN: Final = "\0"
_VISIBLE = re.compile(r"[^ ]+")


class Matcher:
    """Finds a dictionary's terms.

    context: what becomes of mentions that are negated, of the family or hypothetical: "off" takes
    them like others, "drop" leaves them out, "mark" gives them indices of their own, behind all
    concepts. It concerns bags; `find` gives every mention.

    dropped: numbers of terms that are not matched, by reason. vocabulary: a bag's indices are
    below it. Raises MissingExtra without pyahocorasick, DataError where no term can be matched.
    """

    def __init__(self, dictionary: Dictionary, context: Option = "drop") -> None:
        self.dictionary, self.context = dictionary, context
        self.vocabulary = len(dictionary) * (2 if context == "mark" else 1)
        self.dropped: Counter[str] = Counter()
        self._codes: dict[str, str] = {}
        self._build()

    def __reduce__(self) -> tuple[Any, ...]:
        """A spawned process builds its own."""
        return Matcher, (self.dictionary, self.context)

    @property
    def fingerprint(self) -> str:
        """A hash of dictionary and rules: the same one gives the same bags."""
        parts = [RECIPE, self.dictionary.fingerprint, self.context, fingerprint_of_rules()]
        parts += ["True", *sorted(AMBIGUOUS)]  # plurals are singulars
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
            if reason := unfit(words):
                self.dropped[reason] += 1
                continue
            key = "".join(self._code(singular(word)) for word in words)
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
        for word, code in list(self._codes.items()):
            self._codes.update(dict.fromkeys(plurals_of(word), code))
        self._lengths = lengths
        self._bounds, self._concepts = self._members(len(lengths), numbers, owners)

    def _code(self, word: str) -> str:
        """Three characters for a word; the first one's range tells where a word begins."""
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
        source, offsets = stretches(given.bounds, np.asarray(owners, dtype=np.int64))
        term = np.repeat(np.asarray(numbers, dtype=np.int64), np.diff(offsets))
        distinct = np.unique(term * len(given) + given.members[source])  # (term, concept)
        bounds = np.searchsorted(distinct // len(given), np.arange(terms + 1))
        return bounds.astype(np.int64), (distinct % len(given)).astype(np.int32)

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

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Mentions as (start, end, term), in characters of the text; none overlaps another."""
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

    def concepts_of(self, terms: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The concepts of some matched terms, one term behind the other, and their bounds."""
        source, bounds = stretches(self._bounds, terms)
        return self._concepts[source], bounds

    def bag(self, texts: str | Iterable[str]) -> np.ndarray:
        """(entries,) int32: the concepts of some texts in order, each as often as it occurs."""
        terms, marks = array("i"), array("b")
        for text in (texts,) if isinstance(texts, str) else texts:
            if self.context == "off":
                terms.extend(term for _, _, term in self._matches(words_of(text))[1])
                continue
            placed = list(self.find(text))
            said = contexts(text, [(start, end) for start, end, _ in placed])
            for (_, _, term), context in zip(placed, said, strict=True):
                if not context or self.context == "mark":
                    terms.append(term)
                    marks.append(bool(context))
        found, bounds = self.concepts_of(terms)
        if self.context == "mark":
            moved = np.asarray(marks, dtype=np.int32) * len(self.dictionary)
            found = found + np.repeat(moved, np.diff(bounds))
        return found.astype(np.int32)


# ---- patients --------------------------------------------------------------------------------


class PatientBags(NamedTuple):
    """Patients that stay, their bags in the same order, and counts.

    counts: patients, notes, characters, mentions; left_out: patients with too many concepts;
    without: patients without one.
    """

    patients: tuple[str, ...]
    bags: Bags
    counts: Mapping[str, int]


def by_patient(notes: Iterable[Note]) -> dict[str, list[str]]:
    """Texts by patient, in order; a note without a patient counts as one of its own (its id)."""
    found: dict[str, list[str]] = {}
    for note in notes:
        found.setdefault(note.id if note.patient is None else note.patient, []).append(note.text)
    return found


def bags(
    notes_by_patient: Notes,
    matcher: Matcher,
    processes: int = 1,
    progress: Progress | None = None,
    cache: Path | None = None,
    most: int = MOST,
) -> PatientBags:
    """One bag of concepts a patient.

    processes: patients are shared out to so many; the result does not depend on it. cache: a
    folder for results. most: patients with more concepts are left out.
    """
    patients = tuple(notes_by_patient)
    key = f"{matcher.fingerprint} {most}"

    def made() -> dict[str, np.ndarray]:
        return _collect(notes_by_patient, matcher, processes, progress, most)

    found = kept_arrays(cache, notes_by_patient, key, made)
    counts = dict(zip(_COUNTED, found["counts"].tolist(), strict=True))
    if progress is not None:
        progress(len(patients), len(patients))
    own = Bags(found["concepts"], found["offsets"], matcher.vocabulary)
    return PatientBags(tuple(patients[row] for row in found["kept"].tolist()), own, counts)


_COUNTED: Final = ("patients", "notes", "characters", "mentions", "left_out", "without")


def _collect(
    notes: Notes, matcher: Matcher, processes: int, progress: Progress | None, most: int
) -> dict[str, np.ndarray]:
    arrays: list[np.ndarray] = [np.zeros(0, np.int32)]
    kept: list[int] = []
    total = Counter[str](patients=len(notes))
    with _pool(matcher, min(processes, max(len(notes), 1))) as run:
        for row, (bag, texts) in enumerate(zip(run(notes.values()), notes.values(), strict=True)):
            total.update(notes=len(texts), characters=sum(map(len, texts)), mentions=len(bag))
            total.update(left_out=len(bag) > most, without=not len(bag))
            if len(bag) <= most:
                kept.append(row)
                arrays.append(bag)
            if progress is not None and row + 1 < len(notes):
                progress(row + 1, len(notes))
    return {
        "concepts": np.concatenate(arrays),
        "offsets": offsets_of([len(bag) for bag in arrays[1:]]),
        "kept": np.array(kept, dtype=np.int64),
        "counts": np.array([total[name] for name in _COUNTED], dtype=np.int64),
    }


_Run = Callable[[Iterable[Sequence[str]]], Iterator[np.ndarray]]
_worker: Matcher | None = None  # a pool's process has one


@contextmanager
def _pool(matcher: Matcher, processes: int) -> Iterator[_Run]:
    """How to make bags: here, or in a pool.

    Forked processes share the automaton's memory; where there is no fork each builds its own.
    """
    if processes == 1:
        yield lambda patients: map(matcher.bag, patients)
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


def kept_arrays(
    cache: Path | None, notes: Notes, how: str, make: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """What was made of some notes: from a folder, or made and put there.

    how: what the notes are read with. A damaged or missing result is made anew.
    """
    if cache is None:
        return make()
    state = hashlib.sha256(how.encode())
    for texts in notes.values():
        state.update(len(texts).to_bytes(8, "little"))
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            state.update(len(data).to_bytes(8, "little") + data)
    path = cache / state.hexdigest()[:32]
    try:
        tensors, _ = load_state(path)
        return {name: value.numpy() for name, value in tensors.items()}
    except ModelError:
        found = make()
        save_state(path, {name: torch.from_numpy(of) for name, of in found.items()}, {})
        return found
