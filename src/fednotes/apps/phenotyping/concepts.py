"""Notes → concepts, by dictionary: the longest terms that stand in a text; or what
cTAKES found.

    normalise   letters and digits, case folded, accents dropped; words parted by anything else
    match       at each word the longest term that begins there, then on behind it
    context     negated and family mentions dropped, marked or taken like others
    bag         all notes of a patient are one bag of concepts

Terms and texts are cut into the same words. A possessive 's is left out ("Crohn's" =
"Crohn"). English plurals of more than four letters are taken as singulars (`singular`).
Not used for
matching: terms without a letter, of one word below three characters, of one ambiguous
word (`AMBIGUOUS`), or of more than 20 words. A mention may run across a line end.

An Aho-Corasick automaton (pyahocorasick) goes over words, each written as three
characters: a third of the nodes that letters take, and every word of no term ends in
its root. It gives all matches; the leftmost longest are chosen here (the library's own
choice, `iter_long`, misses some).

Whether a mention holds for the patient now is told by a small rule set of our own in
the manner of NegEx (Chapman et al. 2001) and ConText (Harkema et al. 2009); its phrases
are in `context.toml`. Within a mention's sentence:

    trigger before   "denies chest pain"      reaches forward, at most 12 words
    trigger after    "pneumonia ruled out"    reaches back, at most 6 words; a trigger of one
                      word only to a mention directly before it
    terminator       "no fever but cough"     ends the reach of a trigger before it
    pseudo-trigger   "no change in"           holds a trigger's words and is none

At each word the longest phrase counts. A sentence ends at . ! ? before white space (not
after "Dr." and the like), at a semicolon, a blank line, a list item or a line that
begins with a header.

Bags may be kept in a folder, made once for the same texts, dictionary and rules: its
name is a hash of these. No text and no patient's id is in the files, but they are as
sensitive as the notes; only their owner can read them.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import re
import tomllib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate, product
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from fednotes.apps.phenotyping.cohort import Bags, Vectors, entries_of_rows, offsets_of
from fednotes.apps.phenotyping.dictionary import (
    AMBIGUOUS,
    Dictionary,
    origin_of,
    plain_text,
    plurals_of,
    singular,
    unfit,
    words_of,
)
from fednotes.apps.phenotyping.tables import Damaged, TableReport, elements, lines
from fednotes.core.errors import DataError, ModelError, needs
from fednotes.core.tensors import load_state, save_state
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.notes import Note

# concepts of a patient; Liu, Dligach and Miller 2019 leave out more
MOST: Final = 10_000
# raise it when the same text gives other concepts: caches name it
RECIPE: Final = "concepts-1"

Notes = Mapping[str, Sequence[str]]  # patient → texts
Progress = Callable[[int, int], None]  # told of patients done, and of all
T = TypeVar("T")
_BASE: Final = 100
_UNKNOWN: Final = "\0"
_VISIBLE = re.compile(r"[^ ]+")


# ---- context -------------------------------------------------------------------------

Option = Literal["off", "drop", "mark"]
OPTIONS: Final = ("off", "drop", "mark")
# bits 1, 2, 4 of a mention's context
KINDS: Final = ("negated", "family", "hypothetical")
WINDOW, WINDOW_AFTER = 12, 6  # words that a trigger reaches
_LONGEST_PHRASE: Final = 8  # words of a phrase, no fewer than the longest one has

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
# One character first, then what must be true of it: the search skips all others.
_END = re.compile(
    r"[.!?;\n](?:(?<=;)|(?<=[.!?])(?=\s|$)(?<!\b(?:dr|mr|ms|vs|st)\.)(?<!\bmrs\.)"
    r"(?<!\b(?:e\.g|i\.e)\.)|(?<=\n)(?:[ \t]*\n|[ \t]*(?:[-*•]|\d{1,2}[.)])(?=\s)"
    r"|(?=[ \t]*[a-z][a-z /]{1,40}:)))"
)
_ANSWER = re.compile(
    r"\s*[:=]\s*(?:no|none|negative|neg|absent|denies|denied|never|false)\b"
)


@lru_cache(maxsize=1)
def phrases() -> dict[str, dict[str, tuple[str, ...]]]:
    """before, after, pseudo, terminators → kind → phrases, words in braces filled in."""
    tables: dict[str, Any] = tomllib.loads(
        files("fednotes.apps.phenotyping").joinpath("context.toml").read_text("utf-8")
    )
    words = tables.pop("words")

    def filled(form: str) -> list[str]:
        names = re.findall(r"{(\w+)}", form)
        lists = [words[name] for name in names]
        return [
            form.format(**dict(zip(names, each, strict=True)))
            for each in product(*lists)
        ]

    return {
        name: {
            kind: tuple(p for form in of for p in filled(form))
            for kind, of in table.items()
        }
        for name, table in tables.items()
    }


@lru_cache(maxsize=1)
def fingerprint_of_rules() -> str:
    """A hash of all rules: caches and saved models name it."""
    of = phrases()
    parts = (
        KINDS,
        WINDOW,
        WINDOW_AFTER,
        of["before"],
        of["after"],
        of["pseudo"]["all"],
    )
    rules = ((*parts, of["terminators"]), _END.pattern, _ANSWER.pattern)
    return hashlib.sha256(repr(rules).encode()).hexdigest()


@lru_cache(maxsize=2)
def _rules(side: str) -> tuple[dict[tuple[str, ...], list[int]], dict[str, int]]:
    """Phrases that matter "before" or "after" a mention, as words: the kinds that each
    sets and those whose reach it ends (bits of KINDS); and how long those of a first
    word are at most."""
    given = phrases()
    rules: dict[tuple[str, ...], list[int]] = {
        tuple(p.split()): [0, 0] for p in given["pseudo"]["all"]
    }
    for bit, kind in enumerate(KINDS):
        for at, table in enumerate((side, "terminators")):
            for phrase in given[table][kind]:
                rules.setdefault(tuple(phrase.split()), [0, 0])[at] |= 1 << bit
    longest: dict[str, int] = {}
    for words in rules:
        longest[words[0]] = max(len(words), longest.get(words[0], 0))
    return rules, longest


def contexts(text: str, mentions: Sequence[tuple[int, int]]) -> list[int]:
    """The context of each mention of a text, bits of KINDS; 0: it holds for the patient
    now.

    mentions: character offsets, in order. Only sentences that hold one are looked at,
        each once.
    """
    if not mentions:
        return []
    plain = _plain(text)
    ends = [0, *(found.end() for found in _END.finditer(plain)), len(plain) + 1]
    sentences: dict[int, _Sentence] = {}
    result = []
    for start, end in mentions:
        at = bisect_right(ends, start) - 1
        if at not in sentences:
            sentences[at] = _Sentence(plain, ends[at], ends[at + 1])
        result.append(sentences[at].context(start, end))
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
        self._before, self._after = _hits(words, "before"), _hits(words, "after")

    def context(self, start: int, end: int) -> int:
        """The kinds whose triggers reach a mention, or that a table's answer behind it
        says."""
        first, behind = bisect_right(self._ends, start), bisect_left(self._starts, end)
        before = kinds = ended = 0
        begin = first - WINDOW
        for at in range(
            bisect_left(self._before, (begin - _LONGEST_PHRASE,)), len(self._before)
        ):
            _, stop, sets, ends = self._before[at]
            if stop > first:
                break
            before = before & ~ends | (sets if stop > begin else 0)
        for at in range(bisect_left(self._after, (behind,)), len(self._after)):
            begin, stop, sets, ends = self._after[at]
            if begin >= behind + WINDOW_AFTER:
                break
            if begin == behind or stop > begin + 1:  # of one word only directly behind
                kinds |= sets & ~ended
            ended |= ends
        return before | kinds | (1 if _ANSWER.match(self._plain, end) else 0)


def _hits(words: Sequence[str], side: str) -> list[tuple[int, ...]]:
    """Where phrases stand, the longest at each word: (first word, word behind, sets,
    ends)."""
    hits: list[tuple[int, ...]] = []
    rules, longest = _rules(side)
    free = 0
    for at, word in enumerate(words):
        if word in longest and at >= free:
            for stop in range(min(at + longest[word], len(words)), at, -1):
                if does := rules.get(tuple(words[at:stop])):
                    hits.append((at, stop, *does))
                    free = stop
                    break
    return hits


# ---- terms ---------------------------------------------------------------------------


class Matcher:
    """Finds a dictionary's terms.

    context: what becomes of mentions that are negated, of the family or hypothetical:
    "off" takes them like others, "drop" leaves them out, "mark" gives them indices of
    their own, behind all concepts. It concerns bags; `find` gives every mention.

    dropped: numbers of terms that are not matched, by reason. vocabulary: a bag's
    indices are below it. Raises MissingExtra without pyahocorasick, DataError where no
    term can be matched.
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
        parts = [
            RECIPE,
            self.dictionary.fingerprint,
            self.context,
            fingerprint_of_rules(),
        ]
        parts += ["True", *sorted(AMBIGUOUS)]  # plurals are singulars
        return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()

    def _build(self) -> None:
        """The automaton, and each matched term's length and concepts."""
        with needs("pyahocorasick", "concepts"):
            import ahocorasick  # type: ignore[import-not-found, unused-ignore]
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
        self._lengths, given = lengths, self.dictionary
        source, offsets = entries_of_rows(
            given.bounds, np.asarray(owners, dtype=np.int64)
        )
        own = np.repeat(np.asarray(numbers, dtype=np.int64), np.diff(offsets))
        # (term, concept)
        distinct = np.unique(own * len(given) + given.members[source])
        self._bounds = np.searchsorted(
            distinct // len(given), np.arange(len(lengths) + 1)
        )
        self._concepts = (distinct % len(given)).astype(np.int32)

    def _code(self, word: str) -> str:
        """Three characters for a word; the first one's range tells where a word begins."""
        code = self._codes.get(word)
        if code is None:
            high, low = divmod(len(self._codes), _BASE)
            top, middle = divmod(high, _BASE)
            code = chr(1 + 2 * _BASE + top) + chr(1 + middle) + chr(1 + _BASE + low)
            self._codes[word] = code
        return code

    def _matches(
        self, words: Sequence[str]
    ) -> tuple[list[str], list[tuple[int, int, int]]]:
        """The words' codes, and leftmost longest matches as (start, end in codes,
        term)."""
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
        """Mentions as (start, end, term), in characters of the text; none overlaps
        another."""
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
            yield (
                (begin, stop, term) if origin is None else (*origin(begin, stop), term)
            )

    def concepts_of(self, terms: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The concepts of some matched terms, one term behind the other, and their
        bounds."""
        source, bounds = entries_of_rows(self._bounds, terms)
        return self._concepts[source], bounds

    def bag(self, texts: str | Iterable[str]) -> np.ndarray:
        """(entries,) int32: the concepts of some texts in order, each as often as it
        occurs."""
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
        return found


# ---- patients ------------------------------------------------------------------------


class Made(NamedTuple):
    """The patients that stay, what they are to the models, in the same order, and
    counts.

    counts: patients, notes, characters, mentions; left_out: patients with too many
        concepts;
    without: patients in whose notes nothing was found; unknown: CUIs outside the
        vocabulary.
    """

    patients: tuple[str, ...]
    values: Bags | Vectors
    counts: Mapping[str, int]


def by_patient(notes: Iterable[Note]) -> dict[str, list[str]]:
    """Texts by patient, in order; a note without a patient counts as one of its own
    (its id)."""
    found: dict[str, list[str]] = {}
    for note in notes:
        found.setdefault(note.id if note.patient is None else note.patient, []).append(
            note.text
        )
    return found


def told(items: Iterable[T], number: int, progress: Progress | None) -> Iterator[T]:
    """The items; `progress` hears of each that is done, but for the last."""
    for done, item in enumerate(items):
        if progress is not None and done:
            progress(done, number)
        yield item


def bags(
    notes: Notes,
    matcher: Matcher,
    processes: int = 1,
    progress: Progress | None = None,
    cache: Path | None = None,
    most: int = MOST,
) -> Made:
    """One bag of concepts a patient.

    processes: patients are shared out to so many; the result does not depend on it.
    cache: a folder for results. most: patients with more concepts are left out.
    """

    def made() -> dict[str, np.ndarray]:
        texts = [text for own in notes.values() for text in own]
        total = Counter(
            patients=len(notes), notes=len(texts), characters=sum(map(len, texts))
        )
        with _pool(matcher, min(processes, max(len(notes), 1))) as run:
            own = _gathered(
                told(run(notes.values()), len(notes), progress), total, most
            )
        return {**own, "counts": np.array([total[name] for name in _COUNTED], np.int64)}

    found = kept_arrays(cache, notes, f"{matcher.fingerprint} {most}", made)
    if progress is not None:
        progress(len(notes), len(notes))
    counts = dict(zip(_COUNTED, found["counts"].tolist(), strict=True))
    return _made(tuple(notes), found, matcher.vocabulary, counts)


_COUNTED: Final = ("patients", "notes", "characters", "mentions", "left_out", "without")


def _gathered(
    bags: Iterable[np.ndarray], total: Counter[str], most: int
) -> dict[str, np.ndarray]:
    """The bags of at most `most` concepts in one array; which ones they are; `total`
    with them."""
    arrays: list[np.ndarray] = [np.zeros(0, np.int32)]
    kept: list[int] = []
    for row, bag in enumerate(bags):
        total.update(mentions=len(bag), left_out=len(bag) > most, without=not len(bag))
        if len(bag) <= most:
            kept.append(row)
            arrays.append(bag)
    return {
        "concepts": np.concatenate(arrays),
        "offsets": offsets_of([len(bag) for bag in arrays[1:]]),
        "kept": np.array(kept, dtype=np.int64),
    }


def _made(
    patients: Sequence[str],
    found: Mapping[str, np.ndarray],
    vocabulary: int,
    counts: Mapping[str, int],
) -> Made:
    own = Bags(found["concepts"], found["offsets"], vocabulary)
    return Made(tuple(patients[row] for row in found["kept"].tolist()), own, counts)


_Run = Callable[[Iterable[Sequence[str]]], Iterator[np.ndarray]]


@contextmanager
def _pool(matcher: Matcher, processes: int) -> Iterator[_Run]:
    """How to make bags: here, or in a pool.

    Forked processes share the automaton's memory; where there is no fork each builds
    its own.
    """
    if processes == 1:
        yield lambda patients: map(matcher.bag, patients)
        return
    forks = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    with context.Pool(
        processes, initializer=_matchers.append, initargs=(matcher,)
    ) as pool:
        yield lambda patients: pool.imap(_bag, patients, chunksize=4)


_matchers: list[Matcher] = []  # a pool's process has one


def _bag(texts: Sequence[str]) -> np.ndarray:
    return _matchers[0].bag(texts)


def kept_arrays(
    cache: Path | None,
    notes: Notes,
    how: str,
    make: Callable[[], dict[str, np.ndarray]],
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


# ---- cTAKES ----------------------------------------------------------------------------------
# XMI: one file a note: textsem:…Mention → ontologyConceptArr → refsem:UmlsConcept cui. A mention
# does not hold for the patient now where its polarity is −1, its subject another than the patient,
# or where it is conditional. Flat: a line a patient or note, an id, then CUIs; or a folder of files
# NAME.txt of CUIs only; a CUI with a minus before it (-C0011849) is negated.

_CUI = re.compile(r"C\d{7}")
_ITEM = re.compile(r"(-?)(C\d{7})")
_PARTS = re.compile(r"[\s,;|]+")


class Mention(NamedTuple):
    """One mention: its distinct CUIs, and whether it holds for the patient now."""

    cuis: tuple[str, ...]
    holds: bool = True


Mentions = dict[str, list[Mention]]  # by patient or note, in the order of the text


def read_ctakes(path: Path) -> tuple[Mentions, TableReport]:
    """What cTAKES found, from an XMI file, a flat file, or a folder of either.

    XMI files and CUI-only files are named by their file (without .xmi, .xml, .txt).
    Several lines of one id add up. Raises DataError for a file that is neither, or
    broken XML.
    """
    found, report = Mentions(), TableReport(path)
    files = [path]
    if path.is_dir():
        files = find_corpus_files(
            path, lambda p: _is_xmi(p) or p.suffix.lower() == ".txt", "cTAKES output"
        )
    xmi = [file for file in files if _is_xmi(file)]
    for file in xmi:
        name = file.name[: -len(file.suffix)].removesuffix(".txt")
        if name in found:
            raise DataError(
                f"{file}: another file has the same name: give one folder at a time"
            )
        found[name] = _xmi(file)
        report.rows += 1
    for file in files if not xmi else ():
        _flat(file, found, report, file.stem if path.is_dir() else "")
    if not found or 2 * report.damaged > report.rows:
        what = (
            "CUIs alone, one file a patient or note"
            if path.is_dir()
            else "an id and CUIs"
        )
        first = report.examples[0].line if report.examples and not path.is_dir() else 0
        reason = f"{report.damaged} of {report.rows} lines are no CUIs such as C0011849"
        reason += f": expected lines of {what}: is it the right file?"
        raise DataError.at(path, first, reason)
    return found, report


def _is_xmi(path: Path) -> bool:
    return path.suffix.lower() in (".xmi", ".xml")


def _xmi(path: Path) -> list[Mention]:
    """The mentions that have a CUI, by their place in the text.

    Raises DataError for a file that is no XMI, not whole, or has a DOCTYPE.
    """
    whole = False
    cuis: dict[str, str] = {}  # xmi:id → CUI
    lists: dict[str, list[str]] = {}  # xmi:id of a list → xmi:ids
    found: list[tuple[int, int, list[str], bool]] = []
    for line, tag, attrs, _ in elements(path, doctype=False):
        if attrs is None:
            continue
        prefix, _, name = tag.rpartition(":")
        id, references = (
            attrs.get("xmi:id", ""),
            attrs.get("ontologyConceptArr", "").split(),
        )
        if name == "XMI":
            whole = True
        elif name == "UmlsConcept":
            if _CUI.fullmatch(attrs.get("cui", "")):
                cuis[id] = attrs["cui"]
        elif name in ("FSArray", "NonEmptyFSList") and "elements" in attrs:
            lists[id] = attrs["elements"].split()
        elif prefix == "textsem" and references:
            try:
                place = int(attrs.get("begin", "")), int(attrs.get("end", ""))
            except ValueError:
                reason = "a mention has no begin and end: is it XMI?"
                raise DataError.at(path, line, reason) from None
            denied = attrs.get("polarity") == "-1" or attrs.get("conditional") == "true"
            holds = not denied and attrs.get("subject", "").lower() in ("", "patient")
            found.append((*place, references, holds))
    if not whole:
        raise DataError(f"{path}: this is no XMI of cTAKES (no element xmi:XMI)")
    made = []
    for _, _, references, holds in sorted(found, key=lambda mention: mention[:2]):
        every = (one for ref in references for one in lists.get(ref, (ref,)))
        # a concept of another kind has no CUI
        if own := dict.fromkeys(cuis[one] for one in every if one in cuis):
            made.append(Mention(tuple(own), holds))
    return made


def _flat(path: Path, found: Mentions, report: TableReport, name: str) -> None:
    """Lines of CUIs, parted by tabs, spaces, commas, semicolons or bars. name: of whom
    all lines are; if empty, each begins with an id, and the first one may be a header.
    """
    if name:
        found[name] = []
    for number, line in lines(path):
        if line is not None and not line.strip():
            continue
        items = _PARTS.split(line.strip()) if line is not None else [""]
        who = name or items.pop(0)
        matches = [_ITEM.fullmatch(item) for item in items if item or name]
        if not name and number == 1 and items and not any(matches):
            continue  # a header
        report.rows += 1
        if line is None or not who or _ITEM.fullmatch(who) or not all(matches):
            report.damage(Damaged(number, "no CUIs"))
            continue
        own = (Mention((match[2],), not match[1]) for match in matches if match)
        found.setdefault(who, []).extend(own)


def bags_of_mentions(
    mentions: Mapping[str, Iterable[Mention]],
    concepts: Sequence[str],
    context: Option = "drop",
    most: int = MOST,
) -> Made:
    """One bag a patient or note.

    concepts: the vocabulary's CUIs, public: never those that occur here. context: what
    becomes of mentions that do not hold, as for a Matcher. most: patients with more
    concepts are left out.
    """
    index = {concept: at for at, concept in enumerate(concepts)}
    counts = Counter(
        patients=len(mentions), mentions=0, unknown=0, left_out=0, without=0
    )

    def bag(found: Iterable[Mention]) -> np.ndarray:
        own: list[int] = []
        for one in found:
            if one.holds or context != "drop":
                moved = 0 if one.holds or context == "off" else len(concepts)
                places = [index[cui] + moved for cui in one.cuis if cui in index]
                counts["unknown"] += len(one.cuis) - len(places)
                own += places
        return np.array(own, dtype=np.int32)

    found = _gathered(map(bag, mentions.values()), counts, most)
    vocabulary = len(concepts) * (2 if context == "mark" else 1)
    return _made(tuple(mentions), found, vocabulary, dict(counts))
