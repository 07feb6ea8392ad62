"""What a person needs to know of a corpus before training. Counts only, never text.

    check_documents(documents)                  one corpus
    check_sites(sites)                          each part, each site, and all together
    for finding in …: print(finding)            "warning  psytar/train: 3 of …"

Levels: info (good to know), warning (look at it), error (training would fail or
    mislead).
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np

from fednotes.core.cleaning import joiners
from fednotes.core.errors import Problem
from fednotes.core.parsing import shipped
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.data.formats.problems import UNANNOTATED, WINDOWS, Problems
from fednotes.data.split import MIN_WORDS, sentence_keys
from fednotes.data.stats import overlapping_forms
from fednotes.data.tags import Alignment, FlattenCounts, encode, flatten, types_of
from fednotes.data.text import normalise, split_sentences, tokenize

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. code: stable name. where: corpus, site or part. counts: the
    numbers. problems: each by file and line, where they are known."""

    level: Level
    code: str
    where: str
    message: str
    counts: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        return f"{self.level:<8} {self.where}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


_TOLD = shipped("data/findings.toml")
_COUNTED = re.compile(r":[0-9]+$")  # an id that a reader made of a file and a number
_ASKED = shipped("data/identifiers.toml")
_PLACEHOLDER = re.compile(_ASKED["placeholder"])
_LISTS = {"month": _ASKED["month"], "given": "|".join(_ASKED["given"].split())}
_KINDS = {
    kind: re.compile(
        re.sub(r"\{(month|given)\}", lambda m: _LISTS[m[1]], own), re.VERBOSE
    )
    for kind, own in _ASKED["kinds"].items()
}
RARE = 20  # mentions below which a type can hardly be learnt or measured


def _finding(
    where: str,
    code: str,
    counts: Mapping[str, int],
    level: Level | None = None,
    **words: object,
) -> Finding:
    """One of `findings.toml`. level: in place of its own; words: what its sentence has
    besides."""
    own = _TOLD[code]
    told = own["told"].format_map(
        {**counts, **words, "MIN_WORDS": MIN_WORDS, "RARE": RARE}
    )
    return Finding(level or own["level"], code.split(":")[-1], where, told, counts)


def check_documents(
    documents: Sequence[Document],
    tagset: TagSet | None = None,
    name: str = "corpus",
    max_tokens: int = 256,
) -> list[Finding]:
    """Check one corpus, or one part of it.

    tagset: the tag set that the job expects; without it, the types that occur.
    max_tokens: the length in tokens at which a sentence is cut in training.
    """
    counts = CorpusCheck(name, tagset, max_tokens)
    for document in documents:
        counts.add(document)
    return counts.findings()


class CorpusCheck:
    """Counts what is to be known of a corpus whose documents come one by one, and keeps
    no text.

    Of each sentence it keeps a hash of 8 bytes and whether it is long, of each document
    three
    hashes: repeats are found by them.

        counts = CorpusCheck("train")
        for document in documents:
            counts.add(document)
        print(*counts.findings(), sep="\\n")
    """

    def __init__(
        self, name: str = "corpus", tagset: TagSet | None = None, max_tokens: int = 256
    ) -> None:
        self.name, self.max_tokens = name, max_tokens
        self.sentences = SentenceHashes()
        self._tagset = tagset
        self._documents = 0
        self._bad = 0
        self._labels: Counter[str] = Counter()
        self._annotated = _NoteFlags()
        self._blank = 0
        self._unprintable = 0
        self._odd = _NoteFlags()
        self._identifiers: Counter[str] = Counter()
        self._identified = 0
        self._lengths: Counter[int] = Counter()
        self._alignment, self._shapes = Alignment(), FlattenCounts()
        self._ids, self._notes = array("q"), array("q")

    def add(self, document: Document) -> None:
        """Count a document."""
        self._documents += 1
        text, spans = document.text, document.spans
        bad = sum(not 0 <= s.start < s.end <= len(text) for s in spans)
        self._bad += bad
        self._labels.update(span.label for span in spans)
        self._annotated.add(document, bool(spans))
        self._blank += not text.strip()
        unseen = _unprintable(text)
        self._unprintable += unseen
        self._odd.add(document, unseen > 0)
        self._count_identifiers(text)
        if not bad:
            self._count_sentences(document)

    def _count_identifiers(self, text: str) -> None:
        """What may tell who a patient is, by kind; placeholders of de-identification
        are none."""
        text, before = _PLACEHOLDER.sub("\n", text), self._identifiers.total()
        for kind, pattern in _KINDS.items():
            if _may_hold(kind, text):
                text, number = pattern.subn("\n", text)
                self._identifiers[kind] += number
        self._identified += self._identifiers.total() > before

    def _count_sentences(self, document: Document) -> None:
        bounds = split_sentences(document)
        keys = [normalise(document.text[start:end]) for start, end in bounds]
        self.sentences.add(keys)
        self._ids.append(hash(document.id))
        if len(keys) > 1:
            self._notes.append(hash("\n".join(keys)))

        tokens = tokenize(document.text)  # (tokens, 2)
        edges = np.searchsorted(tokens[:, 0], np.array(bounds).reshape(-1, 2))
        self._lengths.update((edges[:, 1] - edges[:, 0]).tolist())
        known = self._tagset.types if self._tagset else types_of([document])
        if held := [span for span in document.spans if span.label in known]:
            flat, shapes = flatten(held, "outermost")
            self._shapes += shapes
            self._alignment += encode(flat, tokens, TagSet(known))[1]

    def findings(self) -> list[Finding]:
        """Return what was found in the documents so far."""
        name = self.name
        if not self._documents:
            return [_finding(name, "empty", {}, what="documents")]
        found: list[Finding] = []
        if self._bad:
            found.append(_finding(name, "offsets", {"mentions": self._bad}))
        types = self._tagset.types if self._tagset else tuple(sorted(self._labels))
        found += _label_findings(self._labels, types, self._tagset is not None, name)
        found += self._annotated.bare(name)
        if self._blank:
            found.append(_finding(name, "blank_documents", {"documents": self._blank}))
        if self._unprintable:
            numbers = {"characters": self._unprintable, "documents": self._odd.flagged}
            found.append(_finding(name, "unprintable", numbers))
        found += self._identifier_findings()
        if not self._bad:  # what follows relies on the offsets
            found += self._length_findings()
            found += self._repeat_findings()
        return found

    def _identifier_findings(self) -> Iterator[Finding]:
        counts = {kind: n for kind, n in self._identifiers.items() if n}
        if not counts:
            return
        shown = ", ".join(f"{kind} {n:,}" for kind, n in counts.items())
        counts = {**counts, "documents": self._identified}
        words: dict[str, Any] = {
            "shown": shown,
            "held": self._identified,
            "of": self._documents,
        }
        yield _finding(self.name, "identifiers", counts, **words)

    def _length_findings(self) -> Iterator[Finding]:
        name, fell, lengths = self.name, self._alignment, self._lengths
        if lengths:
            numbers = {"sentences": lengths.total()}
            numbers["tokens"] = sum(
                length * number for length, number in lengths.items()
            )
            for mark, percent in (("p5", 5), ("median", 50), ("p95", 95)):
                numbers[mark] = int(_percentile(lengths, percent))
            yield _finding(name, "lengths", {**numbers, "longest": max(lengths)})
        most = self.max_tokens
        if long := sum(number for length, number in lengths.items() if length > most):
            yield _finding(name, "long_sentences", {"sentences": long}, most=most)
        if moved := fell.snapped + fell.shortened:
            level: Level = "warning" if moved > 0.01 * fell.spans else "info"
            numbers = {"snapped": fell.snapped, "shortened": fell.shortened}
            yield _finding(name, "snapped", numbers, level, moved=moved, of=fell.spans)
        if gone := fell.lost + fell.merged:
            numbers = {"lost": fell.lost, "merged": fell.merged}
            yield _finding(name, "lost", numbers, gone=gone)
        kinds = ("discontinuous", "nested", "crossing", "duplicates")
        if shapes := {kind: n for kind in kinds if (n := getattr(self._shapes, kind))}:
            shown = ", ".join(f"{n} {kind}" for kind, n in shapes.items())
            yield _finding(name, "not_flat", shapes, shown=shown)

    def _repeat_findings(self) -> Iterator[Finding]:
        if again := _repeats(self._ids):
            yield _finding(self.name, "repeated_ids", {"documents": again})
        if again := _repeats(self._notes):
            yield _finding(self.name, "repeated_documents", {"documents": again})
        hashes = self.sentences.hashes
        if again := _repeats(hashes):
            numbers = {"sentences": again, "of": len(hashes)}
            yield _finding(self.name, "repeated_sentences", numbers)


class SentenceHashes:
    """Hashes of a part's sentences. long: of each, whether it has `MIN_WORDS` words or
    more."""

    def __init__(self) -> None:
        self.hashes, self.long = array("q"), array("b")

    def add(self, keys: Sequence[str]) -> None:
        """Take in the sentences of a document, by their normalised texts."""
        self.hashes.extend(map(hash, keys))
        self.long.extend(key.count(" ") + 1 >= MIN_WORDS for key in keys)

    def leak_into(
        self, other: SentenceHashes, where: str, **words: str
    ) -> Iterator[Finding]:
        """How many of another part's sentences occur in this one."""
        own, theirs = _as_numbers(self.hashes), _as_numbers(other.hashes)
        shared = np.isin(theirs, own)
        if leaked := int(shared.sum()):
            long = int((shared & (np.frombuffer(other.long, np.int8) > 0)).sum())
            counts = {"sentences": leaked, "of": len(theirs), "long": long}
            yield _finding(
                where, "leakage", counts, "warning" if long else "info", **words
            )


def _as_numbers(hashes: array[int]) -> np.ndarray:
    return np.frombuffer(hashes, np.int64) if hashes else np.zeros(0, np.int64)


def _repeats(hashes: array[int]) -> int:
    """How many of these an earlier one equals."""
    return len(hashes) - len(np.unique(_as_numbers(hashes)))


def _percentile(counts: Mapping[int, int], percent: float) -> float:
    """The percentile of numbers that are counted, linear between neighbours as NumPy's
    is."""
    values = np.array(sorted(counts))
    # positions behind each value
    last = np.cumsum([counts[value] for value in values.tolist()])
    at = (last[-1] - 1) * percent / 100
    below, above = np.floor(at), np.ceil(at)
    low, high = values[np.searchsorted(last, [below, above], side="right")]
    return float(low + (high - low) * (at - below))


class _NoteFlags:
    """Which notes have a property; sentences of a note that was cut count as one note."""

    def __init__(self) -> None:
        self._whole = self._flagged_whole = 0
        self._cut: dict[str, bool] = {}

    def add(self, document: Document, flag: bool) -> None:
        name = document.meta.get("document")
        if name is None:
            self._whole += 1
            self._flagged_whole += flag
        else:
            self._cut[str(name)] = self._cut.get(str(name), False) or flag

    @property
    def flagged(self) -> int:
        """How many notes have it."""
        return self._flagged_whole + sum(self._cut.values())

    def bare(self, where: str) -> Iterator[Finding]:
        """How many notes have no mention, if having one is the property."""
        number = self._whole + len(self._cut)
        if bare := number - self.flagged:
            yield _finding(where, "bare_documents", {"documents": bare, "of": number})


def _unprintable(text: str) -> int:
    """How many characters cannot be printed; those that join others in some scripts may
    be."""
    if "".join(text.split()).isprintable():
        return 0
    return sum(not c.isprintable() and not c.isspace() for c in text) - len(
        joiners(text)
    )


_RECORD_WORDS = (
    "mrn",
    "ssn",
    "record",
    "unit",
    "chart",
    "account",
    "patient",
    "case",
    "insurance",
)
_DATE_PARTS = re.compile(r"[0-9][/.-][0-9]")
_MONTHS = tuple("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split())


def _may_hold(kind: str, text: str) -> bool:
    """Whether a text may hold what a kind's pattern finds; a pattern takes much longer."""
    if kind == "e-mail addresses":
        return "@" in text
    if kind == "record numbers":
        folded = text.casefold()
        return any(word in folded for word in _RECORD_WORDS) or bool(
            _DATE_PARTS.search(text)
        )
    if kind == "dates":
        return bool(_DATE_PARTS.search(text)) or any(month in text for month in _MONTHS)
    if kind == "telephone numbers":
        return "(" in text or "+" in text or bool(_DATE_PARTS.search(text))
    return True


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{label} {n}" for label, n in counts.items())


def _braces(types: Collection[str]) -> str:
    return "{" + ", ".join(types) + "}"


def agreement(scores: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """How well two annotations agree. scores: as `jobs.checking.agreed` counts them."""
    if apart := scores["apart"]:
        yield _finding(where, "not_of_both", {"documents": apart})
    kinds = ("documents", "gold", "predicted", "tokens")
    rates = ("strict", "relaxed", "kappa")
    told: dict[str, Any] = {
        k: "-" if scores[k] is None else f"{scores[k]:.3f}" for k in rates
    }
    yield _finding(where, "agreement", {kind: scores[kind] for kind in kinds}, **told)


def _label_findings(
    counts: Counter[str], types: Sequence[str], is_named: bool, where: str
) -> Iterator[Finding]:
    """What the labels of a corpus say. is_named: whether the types are asked for, not
    only those that occur."""
    ordered, total = dict(sorted(counts.items())), counts.total()
    yield _finding(
        where, "types", dict(counts), total=total, listed=_listed(ordered) or "none"
    )
    unknown = {label: n for label, n in ordered.items() if label not in types}
    if unknown:
        words: dict[str, Any] = {"unknown": _braces(unknown), "types": _braces(types)}
        yield _finding(
            where, "unknown_labels", unknown, total=sum(unknown.values()), **words
        )
    if number := counts["O"]:
        yield _finding(where, "outside_label", {"mentions": number})
    if not is_named and not total:
        yield _finding(where, "no_mentions", {})
    if rare := {label: counts[label] for label in types if counts[label] < RARE}:
        yield _finding(where, "rare_types", rare, listed=_listed(rare))


def problem_findings(problems: Problems, where: str, name: str) -> Iterator[Finding]:
    """What the reader of a corpus left out, and what else it noted. name: of file or
    folder."""
    if problems.number:
        left = _finding(
            where, "left_out", dict(problems.counts), problems=problems, name=name
        )
        yield replace(left, problems=tuple(problems.listed))
    if repeated := tuple(problems.repeated_ids):
        again = _finding(
            where, "read:repeated_ids", {"documents": len(repeated)}, name=name
        )
        yield replace(again, problems=repeated)
    if problems.unannotated:
        counts = {"texts": len(problems.unannotated)}
        yield _finding(where, "texts_without_annotations", counts, name=name)
    if windows := problems.ignored[WINDOWS]:
        yield _finding(where, "windows_line_ends", {"texts": windows})
    known = (UNANNOTATED, WINDOWS)
    counts = {k: n for k, n in sorted(problems.ignored.items()) if n and k not in known}
    if counts:
        kinds = ", ".join(f"{kind}: {number:,}" for kind, number in counts.items())
        yield _finding(where, "passed_over", counts, name=name, kinds=kinds)


def bare_documents(documents: Iterable[Document], where: str) -> Iterator[Finding]:
    """How many documents have no mention; sentences of a document that was cut count
    once."""
    annotated = _NoteFlags()
    for document in documents:
        annotated.add(document, bool(document.spans))
    yield from annotated.bare(where)


def other_size(name: str, sentences: int, expected: int) -> Finding:
    """Return what to know of a corpus that has another size than a publication counts.

    A difference of up to 5 % may come from another way to find sentences; above, it is
    a warning.
    """
    difference = 100 * (sentences - expected) / expected
    return _finding(
        name,
        "other_size",
        {"sentences": sentences, "expected": expected},
        level="info" if abs(difference) <= 5 else "warning",
        difference=f"{difference:+.1f}",
    )


def check_sites(
    sites: Sequence[SiteData], max_tokens: int = 256, chosen: Collection[str] = ()
) -> list[Finding]:
    """Check every part of every site, then what the parts and the sites share.

    chosen: sites that were split by a unit of the user's choice, such as sentences:
    that a note is in two parts is then a warning.
    """
    if not sites:
        return [_finding("job", "empty", {}, what="sites")]
    found: list[Finding] = []
    keys: dict[tuple[str, str], Counter[str]] = {}
    for site in sites:
        parts = _parts(site)
        for part, documents in parts.items():
            where = f"{site.id}/{part}"
            if documents or part == "train":
                types = site.scored_types if part == "test" else site.tags.types
                tagset = TagSet(types, site.tags.scheme)
                own = check_documents(documents, tagset, where, max_tokens)
                # In other parts not wrong: `unlearnt` says what becomes of them.
                found += [
                    f for f in own if part == "train" or f.code != "unknown_labels"
                ]
            else:
                found.append(_finding(where, "empty_part", {}))
            keys[site.id, part] = _sentences(documents)
        found += _leaks({part: keys[site.id, part] for part in parts}, site.id)
        found += in_two_parts(
            parts, site.id, "warning" if site.id in chosen else "error"
        )
        found += unlearnt(site)
        for part, documents in parts.items():
            if documents and not any(d.spans for d in documents):
                code = "no_mentions" if part == "train" else f"no_{part}_mentions"
                found.append(_finding(f"{site.id}/{part}", code, {}))
    return [*found, *_between(sites, keys)]


def _parts(site: SiteData) -> dict[str, tuple[Document, ...]]:
    return {"train": site.train, "valid": site.valid, "test": site.test}


def _sentences(documents: Iterable[Document]) -> Counter[str]:
    return Counter(key for document in documents for key in sentence_keys(document))


def unlearnt(site: SiteData) -> Iterator[Finding]:
    """Mentions held out whose types no training mention has, where the job names no
    types."""
    for part, types in (("valid", site.tags.types), ("test", site.scored_types)):
        labels = Counter(s.label for d in _parts(site)[part] for s in d.spans)
        unknown = {
            label: n for label, n in sorted(labels.items()) if label not in types
        }
        if unknown:
            words: dict[str, Any] = {
                "total": sum(unknown.values()),
                "types": ", ".join(unknown),
            }
            yield _finding(f"{site.id}/{part}", "unlearnt_types", unknown, **words)


def leaks(parts: Mapping[str, Sequence[Document]], where: str) -> Iterator[Finding]:
    """Sentences that are in two parts, each pair of parts by itself."""
    return _leaks({part: _sentences(own) for part, own in parts.items()}, where)


def _leaks(keys: Mapping[str, Counter[str]], where: str) -> Iterator[Finding]:
    for a, b in combinations(keys, 2):
        yield from _leak(keys[a], keys[b], where, "leakage", a=a, b=b)


def _leak(
    train: Mapping[str, int], test: Counter[str], where: str, code: str, **words: str
) -> Iterator[Finding]:
    shared = [key for key in test if key in train]
    if leaked := sum(test[key] for key in shared):
        long = sum(test[key] for key in shared if len(key.split()) >= MIN_WORDS)
        counts = {"sentences": leaked, "of": test.total(), "long": long}
        yield _finding(where, code, counts, "warning" if long else "info", **words)


def in_two_parts(
    parts: Mapping[str, Sequence[Document]], where: str, level: Level = "error"
) -> Iterator[Finding]:
    """Patients and notes that are in two parts. A note is known by its text, or by its
    id where that is no number of a line or sentence of its file, and no mere file name
    (brat)."""
    patients = {
        p: {d.patient for d in own if d.patient is not None} for p, own in parts.items()
    }
    notes = {part: _by_note(own) for part, own in parts.items()}
    texts = {p: {text for d in own if (text := _whole(d))} for p, own in parts.items()}
    for a, b in combinations(parts, 2):
        if shared := len(patients[a] & patients[b]):
            yield _finding(
                where, "shared_patients", {"patients": shared}, level, a=a, b=b
            )
        both = notes[a].keys() & notes[b].keys()
        ids = {name for name in both if _one_note(notes[a][name], notes[b][name])}
        again = sum(d.id not in ids and _whole(d) in texts[a] for d in parts[b])
        if shared := len(ids) + again:
            yield _finding(where, "shared_notes", {"notes": shared}, level, a=a, b=b)


def _by_note(documents: Iterable[Document]) -> dict[str, list[Document]]:
    found: dict[str, list[Document]] = {}
    for document in documents:
        name = str(document.meta.get("document", document.id))
        if not _COUNTED.search(name):
            found.setdefault(name, []).append(document)
    return found


def _one_note(one: Sequence[Document], two: Sequence[Document]) -> bool:
    """Whether documents of one id are one note. Ids that are file names do not say so
    by themselves: two hospitals have a 001.txt each."""
    whole = [document for document in (*one, *two) if "document" not in document.meta]
    if not whole or any(own.spans and "brat" not in own.meta for own in whole):
        return True
    return any(
        a.text and b.text and (a.text in b.text or b.text in a.text)
        for a in one
        for b in two
    )


def _whole(document: Document) -> str:
    """The text of a note of several sentences without regard to case and white space,
    else ""."""
    keys = sentence_keys(document)
    return "\n".join(keys) if len(keys) > 1 else ""


def _between(
    sites: Sequence[SiteData], keys: Mapping[tuple[str, str], Counter[str]]
) -> Iterator[Finding]:
    """What sites have, or do not have, in common."""
    for name, number in Counter(site.id for site in sites).items():
        if number > 1:
            yield _finding(name, "site_ids", {"sites": number})
    if len(sites) < 2:
        return
    for a in sites:
        others = [b for b in sites if b is not a]
        known = sorted({t for b in others for t in b.tags.types})
        if not set(a.tags.types) & set(known):
            words: dict[str, Any] = {
                "own": _braces(a.tags.types),
                "known": _braces(known),
            }
            yield _finding(a.id, "no_shared_types", {}, **words)
        pooled = sum((keys[b.id, "train"] for b in others), Counter[str]())
        yield from _leak(pooled, keys[a.id, "test"], a.id, "leakage_between_sites")
    forms = len(overlapping_forms(site.train for site in sites))
    yield _finding("all sites", "overlapping_forms", {"forms": forms})
