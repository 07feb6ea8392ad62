"""Find the concepts of a dictionary in notes.

    match    find the longest term that begins at each word, and continue after it
    context  omit negated and family mentions, mark them, or use them like others
    bag      all notes of a patient become one bag of concepts

Terms and texts are divided into the same words. A possessive 's is left out ("Crohn's"
= "Crohn"). English plurals of more than four letters count as singulars
(`make_singular`). Some terms are not matched: those without a letter, with more than 20
words, or with a single word that is ambiguous (`AMBIGUOUS`) or has fewer than three
characters. A mention may run across the end of a line.

An Aho-Corasick automaton (pyahocorasick) reads words, each written as three characters.
It needs a third of the nodes that letters would need, and every word that is in no term
leads back to its root. It returns all matches, from which we choose the leftmost
longest ones, because the library's own `iter_long` misses some.

`context.py` decides whether a mention holds for the patient now.

Bags may be kept in a cache folder. The name of an entry is a digest of the texts, the
dictionary and the rules. The files contain no text and no patient's id, but they are as
sensitive as the notes; only their owner can read them.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import numpy as np
import torch

from fednotes.apps.phenotyping.cohort import (
    Bags,
    Inputs,
    compute_offsets,
    find_entries,
)
from fednotes.apps.phenotyping.context import (
    Option,
    compute_rules_fingerprint,
    find_contexts,
)
from fednotes.apps.phenotyping.dictionary import Dictionary
from fednotes.apps.phenotyping.note_sets import NoteSet
from fednotes.apps.phenotyping.words import (
    AMBIGUOUS,
    explain_no_match,
    list_plurals,
    make_origin_finder,
    make_plain_text,
    make_singular,
    split_into_words,
)
from fednotes.core.errors import DataError, ModelError, TrainingError, needs
from fednotes.core.tensors import load_state, save_state
from fednotes.data.notes import Note
from fednotes.encoders.features import open_cache
from fednotes.jobs.patient_models import (
    ComputeFeatures,
    PatientNote,
    compute_features_here,
)
from fednotes.jobs.prediction_windows import FILE_BATCH, cut_windows
from fednotes.jobs.saved_models import NoteFeatures

# Patients with more concepts are left out, as in Liu, Dligach and Miller 2019.
MAX_CONCEPTS: Final = 10_000
# Change this when the same text gives different concepts: the names of cache entries
# depend on it.
RECIPE: Final = "concepts-1"

Notes = NoteSet | Mapping[str, Sequence[str]]  # notes, or the texts of each patient
Progress = Callable[[int, int], None]  # receives the notes done, and their total
T = TypeVar("T")

_BASE: Final = 100
_CODE_LENGTH: Final = 3  # characters of a word's code
_UNKNOWN: Final = "\0"  # the code of a word that is in no term
_MOST_REPORTS: Final = 1000  # of progress, about
_VISIBLE = re.compile(r"[^ ]+")


# ---- terms ---------------------------------------------------------------------------


class Match(NamedTuple):
    """A term in a text: its start, its end and its number."""

    start: int
    end: int
    term: int


class Matcher:
    """Finds the terms of a dictionary.

    Args:
        dictionary: The dictionary.
        context: What happens to mentions that are negated, of the family or
            hypothetical: "off" uses them like others, "drop" leaves them out, "mark"
            gives them indices of their own, after those of all concepts. It applies to
            bags; `find` returns every mention.

    Attributes:
        dictionary: The dictionary.
        context: As above.
        vocabulary: Upper bound of the indices in a bag.
        dropped: Number of terms that are not matched, by reason.

    Raises:
        MissingExtra: pyahocorasick is not installed.
        DataError: No term can be matched.
    """

    def __init__(self, dictionary: Dictionary, context: Option = "drop") -> None:
        self.dictionary = dictionary
        self.context = context
        self.vocabulary = len(dictionary) * (2 if context == "mark" else 1)
        self.dropped: Counter[str] = Counter()
        self._codes: dict[str, str] = {}  # the code of each word
        self._build_automaton()

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a spawned process build its own matcher."""
        return Matcher, (self.dictionary, self.context)

    @property
    def fingerprint(self) -> str:
        """A digest of dictionary and rules; equal digests mean equal bags."""
        parts = [
            RECIPE,
            self.dictionary.fingerprint,
            self.context,
            compute_rules_fingerprint(),
            "True",  # plurals count as singulars
            *sorted(AMBIGUOUS),
        ]
        return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()

    def _build_automaton(self) -> None:
        """Build the automaton, and the length and the concepts of each matched term.

        A matched term is a sequence of singular words. Several terms of the dictionary
        may reduce to the same matched term.
        """
        with needs("pyahocorasick", "concepts"):
            import ahocorasick  # type: ignore[import-not-found, unused-ignore]
        self._automaton = ahocorasick.Automaton(ahocorasick.STORE_INTS)
        self._lengths = array("B")  # words of each matched term
        # For each matchable dictionary term, the number of its normalised form,
        numbers = array("i")
        # and the term's row in the dictionary.
        rows = array("i")
        for row, term in enumerate(self.dictionary.terms):
            words = split_into_words(term)
            reason = explain_no_match(words)
            if reason is not None:
                self.dropped[reason] += 1
                continue
            numbers.append(self._add_term(words))
            rows.append(row)
        if not self._lengths:
            raise DataError(
                f"none of the dictionary's {len(self.dictionary.terms)} terms can be "
                f"matched ({', '.join(self.dropped) or 'it is empty'}): check that "
                "it is the right file"
            )
        self._automaton.make_automaton()
        for word, code in list(self._codes.items()):
            self._codes.update(dict.fromkeys(list_plurals(word), code))
        self._set_concepts(np.asarray(numbers, np.int64), np.asarray(rows, np.int64))

    def _add_term(self, words: Sequence[str]) -> int:
        """Add a term to the automaton unless it is there; return its number."""
        key = "".join(self._get_code(make_singular(word)) for word in words)
        number: int = self._automaton.get(key, -1)
        if number < 0:
            number = len(self._lengths)
            self._automaton.add_word(key, number)
            self._lengths.append(len(words))
        return number

    def _set_concepts(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Store the distinct concepts of each matched term, sorted.

        Args:
            numbers: (terms,) the matched term of each term that can be matched.
            rows: (terms,) the row of each such term in the dictionary.
        """
        concepts = len(self.dictionary)
        entries, offsets = find_entries(self.dictionary.bounds, rows)
        number_of_entry = np.repeat(numbers, np.diff(offsets))
        pairs = np.unique(number_of_entry * concepts + self.dictionary.members[entries])
        self._bounds = np.searchsorted(
            pairs // concepts, np.arange(len(self._lengths) + 1)
        )
        self._concepts = (pairs % concepts).astype(np.int32)

    def _get_code(self, word: str) -> str:
        """Return the three characters for a word; assign them to a new word.

        They come from disjoint ranges, so a match can begin only where a word begins.
        """
        code = self._codes.get(word)
        if code is None:
            high, low = divmod(len(self._codes), _BASE)
            top, middle = divmod(high, _BASE)
            code = chr(1 + 2 * _BASE + top) + chr(1 + middle) + chr(1 + _BASE + low)
            self._codes[word] = code
        return code

    def _match_words(self, words: Sequence[str]) -> tuple[list[str], list[Match]]:
        """Find the leftmost longest terms in a sequence of words.

        Returns:
            The code of each word, and the matches with positions in the joined codes.
        """
        code_of_word = self._codes.get
        lengths = self._lengths
        codes = [code_of_word(word, _UNKNOWN) for word in words]
        candidates = [
            (last + 1 - _CODE_LENGTH * lengths[term], -last - 1, term)
            for last, term in self._automaton.iter("".join(codes))
        ]
        candidates.sort()  # by start, then longer ones first
        matches: list[Match] = []
        free = 0
        for start, negative_end, term in candidates:
            if start >= free:
                free = -negative_end
                matches.append(Match(start, free, term))
        return codes, matches

    def find(self, text: str) -> Iterator[Match]:
        """Yield the mentions in a text, in characters, without overlap."""
        plain = make_plain_text(text)
        codes, matches = self._match_words(plain.split())
        if not matches:
            return
        code_ends = accumulate(map(len, codes))
        word_of_end = {end: word for word, end in enumerate(code_ends)}
        spans = [match.span() for match in _VISIBLE.finditer(plain)]
        origin = make_origin_finder(text)
        for match in matches:
            last_word = word_of_end[match.end]
            first_word = last_word + 1 - self._lengths[match.term]
            start = spans[first_word][0]
            end = spans[last_word][1]
            if origin is not None:
                start, end = origin(start, end)
            yield Match(start, end, match.term)

    def find_concepts(self, terms: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concepts of matched terms.

        Args:
            terms: Numbers of terms, as in a `Match`.

        Returns:
            The (entries,) concepts, term after term, and the (terms + 1,) bounds of the
            terms among them.
        """
        entries, bounds = find_entries(self._bounds, terms)
        return self._concepts[entries], bounds

    def make_bag(self, texts: str | Iterable[str]) -> np.ndarray:
        """Return the concepts that are mentioned in texts, as one bag.

        Returns:
            (entries,) int32 indices in the order of the texts; a concept is repeated
            for each occurrence.
        """
        if isinstance(texts, str):
            texts = (texts,)
        terms = array("i")
        marks = array("b")  # 1 for a mention that does not hold for the patient now
        for text in texts:
            if self.context == "off":
                _, matches = self._match_words(split_into_words(text))
                terms.extend(match.term for match in matches)
                continue
            mentions = list(self.find(text))
            places = [(mention.start, mention.end) for mention in mentions]
            for mention, context in zip(
                mentions, find_contexts(text, places), strict=True
            ):
                if not context or self.context == "mark":
                    terms.append(mention.term)
                    marks.append(bool(context))

        concepts, bounds = self.find_concepts(terms)
        if self.context == "mark":
            shifts = np.asarray(marks, dtype=np.int32) * len(self.dictionary)
            concepts = concepts + np.repeat(shifts, np.diff(bounds))
        return concepts

    def list_concepts(self, text: str) -> NoteFeatures:
        """Return the bag of a text as a list."""
        concepts: list[int] = self.make_bag(text).tolist()
        return concepts


# ---- patients ------------------------------------------------------------------------


class PatientInputs(NamedTuple):
    """The models' inputs for each patient.

    Attributes:
        patients: The remaining patients.
        values: Their bags, vectors or sub-words, in the same order.
        counts: Numbers of `patients`, `notes`, `characters` and `mentions`; of patients
            with too many concepts (`left_out`) and of those without any concept
            (`without_features`); of CUIs outside the vocabulary (`unknown`). Not every
            source counts all of these.
    """

    patients: tuple[str, ...]
    values: Inputs
    counts: Mapping[str, int]

    @classmethod
    def from_arrays(
        cls,
        patients: Sequence[str],
        arrays: Mapping[str, np.ndarray],
        vocabulary: int,
        counts: Mapping[str, int],
    ) -> Self:
        """Return the inputs of the remaining patients, whose bags are given as arrays.

        Args:
            patients: All patients.
            arrays: The result of `join_bags`.
            vocabulary: Size of the vocabulary.
            counts: As above.
        """
        bags = Bags(arrays["concepts"], arrays["offsets"], vocabulary)
        remaining = tuple(patients[row] for row in arrays["kept"].tolist())
        return cls(remaining, bags, dict(counts))


def group_by_patient(notes: Iterable[Note]) -> dict[str, list[str]]:
    """Return the texts of each patient, in the order of the notes.

    A note without a patient is the only note of a patient named by the note's id.
    """
    texts: dict[str, list[str]] = {}
    for note in notes:
        texts.setdefault(get_patient_name(note), []).append(note.text)
    return texts


def get_patient_name(note: Note) -> str:
    """Return the name of a note's patient; of a note without one, the note's id."""
    return note.id if note.patient is None else note.patient


def make_patient_note(note: Note) -> PatientNote:
    """Return a note as a note of its patient; see `get_patient_name`."""
    return PatientNote(get_patient_name(note), note.text)


def iterate_with_progress(
    items: Iterable[T], number: int, progress: Progress | None
) -> Iterator[T]:
    """Yield items, and report before some of them how many are done."""
    step = max(1, number // _MOST_REPORTS)
    for done, item in enumerate(items):
        if progress is not None and done and done % step == 0:
            progress(done, number)
        yield item


# Names of the counts, in the order of the numbers in a cache entry.
_COUNTED: Final = (
    "patients",
    "notes",
    "characters",
    "left_out",
    "without_features",
)


def make_bags(
    notes: Notes,
    matcher: Matcher,
    processes: int = 1,
    progress: Progress | None = None,
    cache: Path | None = None,
    max_concepts: int = MAX_CONCEPTS,
) -> PatientInputs:
    """Return one bag of concepts per patient, without holding the texts in memory.

    Args:
        notes: The notes, in any order of patients; or the texts of each patient.
        matcher: Finds the concepts.
        processes: Number of processes that read notes. The result does not depend on
            it.
        progress: Receives the number of notes done, and of all notes.
        cache: Folder for results; None keeps none.
        max_concepts: Patients with more concepts are left out.

    Raises:
        TrainingError: A process has ended before its time.
    """
    note_set = NoteSet.of(notes)
    number = note_set.number

    def read_all() -> dict[str, np.ndarray]:
        stream = iterate_with_progress(note_set, number, progress)
        with _starting_pool(matcher, min(processes, max(number, 1))) as compute:
            collected = collect_bags(stream, compute, max_concepts, note_set.patients)
        counts = collected.counts
        counts["notes"] = number
        counts["characters"] = note_set.characters
        numbers = [counts[name] for name in _COUNTED]
        return {**collected.arrays, "counts": np.array(numbers, np.int64)}

    recipe = f"{matcher.fingerprint} {max_concepts}"
    arrays = compute_with_cache(cache, note_set, recipe, make=read_all)
    if progress is not None:
        progress(number, number)
    counts = dict(zip(_COUNTED, arrays["counts"].tolist(), strict=True))
    return PatientInputs.from_arrays(
        note_set.patients, arrays, matcher.vocabulary, counts
    )


class CollectedBags(NamedTuple):
    """The bags of patients whose notes were read in any order.

    Attributes:
        patients: All patients, those to list first and then in the order of their first
            notes.
        arrays: As from `join_bags`, of the patients who are not left out.
        counts: Numbers of `patients`, of those left out (`left_out`) and of those
            without concepts (`without_features`).
    """

    patients: tuple[str, ...]
    arrays: dict[str, np.ndarray]
    counts: Counter[str]


def collect_bags(
    notes: Iterable[PatientNote],
    compute: ComputeFeatures,
    max_concepts: int,
    patients: Iterable[str] = (),
) -> CollectedBags:
    """Add up the concepts of each patient's notes.

    Only a patient's concepts are kept, and nothing for a patient who is left out.

    Args:
        notes: The notes, in any order of patients. No reference to a text is kept.
        compute: Yields notes with their concepts.
        max_concepts: Patients with more concepts are left out.
        patients: Patients to list first, even if they have no notes.
    """
    concepts = {patient: array("i") for patient in patients}
    left_out: set[str] = set()

    def select_needed_notes() -> Iterator[PatientNote]:
        for note in notes:
            concepts.setdefault(note.patient, array("i"))
            if note.patient not in left_out:
                yield note

    for note, found in compute(select_needed_notes()):
        # Some notes of a patient may be under way when the patient is left out.
        if note.patient in left_out:
            continue
        bag = concepts[note.patient]
        bag.extend(map(int, found))
        if len(bag) > max_concepts:
            left_out.add(note.patient)
            del bag[:]

    names = tuple(concepts)
    rows = [row for row, patient in enumerate(names) if patient not in left_out]
    counts = Counter(patients=len(names), left_out=len(left_out))
    # Each patient's concepts are freed once they are copied.
    bags = (np.array(concepts.pop(names[row]), np.int32) for row in rows)
    arrays = join_bags(bags, counts, max_concepts)
    del counts["mentions"]  # incomplete: it lacks the mentions of excluded patients
    arrays["kept"] = np.array(rows, np.int64)
    return CollectedBags(names, arrays, counts)


def join_bags(
    bags: Iterable[np.ndarray], counts: Counter[str], max_concepts: int
) -> dict[str, np.ndarray]:
    """Join the bags of all patients who do not have too many concepts.

    Args:
        bags: Concepts of each patient.
        counts: Receives the numbers of mentions, of patients left out, and of patients
            without concepts.
        max_concepts: Maximum number of a patient's concepts.

    Returns:
        `concepts` and `offsets`, as in `Bags`; and `kept`, the rows of the remaining
        patients.
    """
    counts.update(mentions=0, left_out=0, without_features=0)  # even without bags
    arrays: list[np.ndarray] = [np.zeros(0, np.int32)]
    rows: list[int] = []
    for row, bag in enumerate(bags):
        is_too_large = len(bag) > max_concepts
        counts["mentions"] += len(bag)
        counts["left_out"] += is_too_large
        counts["without_features"] += not len(bag)
        if not is_too_large:
            rows.append(row)
            arrays.append(bag)
    return {
        "concepts": np.concatenate(arrays),
        "offsets": compute_offsets([len(bag) for bag in arrays[1:]]),
        "kept": np.array(rows, dtype=np.int64),
    }


@contextmanager
def _starting_pool(matcher: Matcher, processes: int) -> Iterator[ComputeFeatures]:
    """Yield a function that finds the concepts of notes, in several processes.

    With one process, it works in this process.

    Forked processes share the memory of the automaton, which takes a minute and a
    gigabyte for the UMLS. If the system cannot fork, each process builds its own.
    """
    if processes == 1:
        yield partial(compute_features_here, matcher.list_concepts)
        return
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if can_fork else "spawn")
    with ProcessPoolExecutor(
        processes, context, initializer=_matchers.append, initargs=(matcher,)
    ) as pool:
        yield partial(_find_concepts_in_pool, pool, processes * _WINDOWS_OF_PROCESS)


def _find_concepts_in_pool(
    pool: ProcessPoolExecutor, limit: int, notes: Iterable[PatientNote]
) -> Iterator[tuple[PatientNote, NoteFeatures]]:
    """Yield notes with their concepts, in order.

    Args:
        pool: The processes.
        limit: The largest number of windows of notes that are under way.
        notes: The notes.

    Raises:
        TrainingError: A process has ended before its time.
    """
    under_way: deque[tuple[Sequence[PatientNote], Future[list[np.ndarray]]]] = deque()
    windows = cut_windows(notes, FILE_BATCH)
    try:
        while True:
            for window in islice(windows, limit - len(under_way)):
                texts = [note.text for note in window]
                under_way.append((window, pool.submit(_make_bags_in_process, texts)))
            if not under_way:
                return
            window, future = under_way.popleft()
            for note, bag in zip(window, future.result(), strict=True):
                yield note, bag.tolist()
    except BrokenProcessPool:
        raise TrainingError(
            "a process that found concepts was killed (the system does this when "
            "memory runs out): set `processes` of [concepts] to fewer"
        ) from None
    finally:
        for _, future in under_way:
            future.cancel()


# Windows under way for each process: its own, and others that wait for their turn.
_WINDOWS_OF_PROCESS: Final = 3
_matchers: list[Matcher] = []  # the matcher of a process in a pool


def _make_bags_in_process(texts: Sequence[str]) -> list[np.ndarray]:
    """Return the bag of each text, in a process of a pool."""
    return [_matchers[0].make_bag(text) for text in texts]


def compute_with_cache(
    cache: Path | None,
    notes: NoteSet,
    recipe: str,
    make: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Return arrays computed from notes, from the cache if possible.

    A missing or damaged cache entry is computed again.

    Args:
        cache: The cache folder; None disables the cache.
        notes: The notes.
        recipe: Identifies the computation; an entry is only used for the same recipe.
        make: Computes the arrays.

    Raises:
        FednotesError: The cache cannot be written, or belongs to another user.
    """
    if cache is None:
        return make()
    open_cache(cache)
    path = cache / _make_cache_key(notes, recipe)
    try:
        tensors, _ = load_state(path)
    except ModelError:
        arrays = make()
        tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
        save_state(path, tensors, {})
        return arrays
    return {name: values.numpy() for name, values in tensors.items()}


def _make_cache_key(notes: NoteSet, recipe: str) -> str:
    """Return the name of a cache entry: a digest of all texts and the recipe."""
    state = hashlib.sha256(recipe.encode())
    state.update(notes.compute_digest())
    return state.hexdigest()[:32]
