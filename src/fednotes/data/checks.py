"""What a person needs to know of a corpus before training. Counts only, never text.

    report = check_documents(documents)              one corpus
    report = check_sites(sites)                      each part, each site, and all together
    for finding in report.findings: print(finding)   "warning  psytar/train: 3 of …"

Levels: `data/checks.py`.

What a check found: a level, a name that stays, a place, a sentence and its numbers.

Levels: info (good to know), warning (look at it), error (training would fail or mislead).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, Literal

import numpy as np

from fednotes.core.cleaning import joiners
from fednotes.core.errors import Problem
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.data.formats.files import Problems
from fednotes.data.split import MIN_WORDS, sentence_keys
from fednotes.data.stats import overlapping_forms
from fednotes.data.tags import Alignment, FlattenCounts, encode, flatten, types_of
from fednotes.data.text import split_sentences, tokenize

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. code: stable name. where: corpus, site or part. counts: the numbers.
    problems: each by file and line, where they are known."""

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


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order of the checks. Reports add."""

    findings: tuple[Finding, ...] = ()

    def __add__(self, other: Report) -> Report:
        return Report(self.findings + other.findings)


_WITHOUT_MENTIONS: tuple[tuple[str, Level, str, str], ...] = (  # part, level, code, effect
    ("train", "error", "no_mentions", ""),
    ("valid", "warning", "no_valid_mentions", ": no round can be chosen, the last model is kept"),
    ("test", "warning", "no_test_mentions", ": nothing can be measured here"),
)
_COUNTED = re.compile(r":[0-9]+$")  # an id that a reader made of a file and a number
_REMEDY = ": what is measured there is known from there; keep each in one part"
RARE = 20  # mentions below which a type can hardly be learnt or measured

# One line of a check: it is a finding if the first, a number of something, is not zero. Then
# level, code, message and counts.
Row = tuple[int, Level, str, str, Mapping[str, int]]


def _found(where: str, rows: Iterable[Row]) -> tuple[Finding, ...]:
    return tuple(
        Finding(level, code, where, message, counts)
        for number, level, code, message, counts in rows
        if number
    )


def check_documents(
    documents: Sequence[Document],
    tagset: TagSet | None = None,
    name: str = "corpus",
    max_tokens: int = 256,
) -> Report:
    """Check one corpus, or one part of it.

    tagset: the tag set that the job expects; without it, the types that occur.
    max_tokens: the length in tokens at which a sentence is cut in training.
    """
    if not documents:
        return Report((Finding("error", "empty", name, "no documents"),))
    types = tagset.types if tagset else types_of(documents)
    bad = sum(not 0 <= s.start < s.end <= len(d.text) for d in documents for s in d.spans)
    told = f"{bad} mentions lie outside their document's text or are empty"
    rows: list[Row] = [
        (bad, "error", "offsets", told, {"mentions": bad}),
        *_labels(documents, types, tagset is not None),
        *_bare(documents),
        *_text(documents),
    ]
    if not bad:  # what follows relies on the offsets
        rows += [*_lengths_and_alignment(documents, types, max_tokens), *_repeats(documents)]
    return Report(_found(name, rows))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{label} {n}" for label, n in counts.items())


def _braces(types: Collection[str]) -> str:
    return "{" + ", ".join(types) + "}"


def _labels(documents: Sequence[Document], types: Sequence[str], told: bool) -> Iterator[Row]:
    """told: whether the types are asked for, not only those that occur."""
    counts = Counter(s.label for d in documents for s in d.spans)
    ordered = dict(sorted(counts.items()))
    mentions = counts.total()
    yield 1, "info", "types", f"{mentions} mentions: {_listed(ordered) or 'none'}", dict(counts)
    unknown = {label: n for label, n in ordered.items() if label not in types}
    message = (
        f"labels {_braces(unknown)} ({sum(unknown.values())} mentions) are not in "
        f"the tag set {_braces(types)}: add a label map"
    )
    yield len(unknown), "error", "unknown_labels", message, unknown
    yield not told and not mentions, "error", "no_mentions", "nothing is annotated", {}
    rare = {label: counts[label] for label in types if counts[label] < RARE}
    message = f"types with fewer than {RARE} mentions: {_listed(rare)}"
    yield len(rare), "warning", "rare_types", message, rare


def problem_findings(problems: Problems, where: str, name: str) -> Iterator[Finding]:
    """What the reader of a corpus left out, and what else it noted. name: of file or folder."""
    if problems.number:
        told = f"{problems} of {name} cannot be used: left out"
        found = tuple(problems.found)
        yield Finding("warning", "left_out", where, told, dict(problems.counts), found)
    if repeated := len(problems.repeated):
        told = f"{repeated} documents of {name} repeat an id; the later ones get another"
        counts = {"documents": repeated}
        yield Finding("error", "repeated_ids", where, told, counts, tuple(problems.repeated))
    if problems.without:
        told = f"{problems.without} texts of {name} have no annotations beside them: passed over"
        counts = {"texts": problems.without}
        yield Finding("warning", "texts_without_annotations", where, told, counts)


def bare_documents(documents: Sequence[Document], where: str) -> Iterable[Finding]:
    """How many documents have no mention; sentences of a document that was cut count once."""
    return _found(where, _bare(documents))


def _bare(documents: Sequence[Document]) -> Iterator[Row]:
    annotated: dict[str, bool] = {}
    for number, document in enumerate(documents):
        name = _counted_as(document, number)
        annotated[name] = annotated.get(name, False) or bool(document.spans)
    bare = sum(not found for found in annotated.values())
    told = f"{bare} of {len(annotated)} documents have no mention"
    yield bare, "info", "bare_documents", told, {"documents": bare, "of": len(annotated)}


def _counted_as(document: Document, number: int) -> str:
    """What a document counts as: the note that it was cut out of, or itself, the number-th."""
    return str(document.meta.get("document", f"#{number}"))


def _text(documents: Sequence[Document]) -> Iterator[Row]:
    blank = sum(not d.text.strip() for d in documents)
    told = f"{blank} documents are blank"
    yield blank, "warning", "blank_documents", told, {"documents": blank}
    odd: Counter[str] = Counter()
    for place, document in enumerate(documents):
        if not document.text.isprintable():
            unseen = sum(not c.isprintable() and not c.isspace() for c in document.text)
            odd[_counted_as(document, place)] += unseen - len(joiners(document.text))
    held = sum(number > 0 for number in odd.values())
    told = (
        f"{odd.total()} characters in {held} documents cannot be printed (control characters, "
        "byte-order marks, private use)"
    )
    counts = {"characters": odd.total(), "documents": held}
    yield odd.total(), "warning", "unprintable", told, counts


def _lengths_and_alignment(
    documents: Sequence[Document], types: tuple[str, ...], max_tokens: int
) -> Iterator[Row]:
    lengths: list[int] = []
    fell, flat = Alignment(), FlattenCounts()
    for document in documents:
        tokens = tokenize(document.text)  # (tokens, 2)
        edges = np.searchsorted(tokens[:, 0], np.array(split_sentences(document)).reshape(-1, 2))
        lengths += (edges[:, 1] - edges[:, 0]).tolist()
        known = [s for s in document.spans if s.label in types]
        if known:
            spans, counts = flatten(known, "outermost")
            flat += counts
            fell += encode(spans, tokens, TagSet(types))[1]
    if lengths:
        yield _lengths(np.array(lengths))
    long = sum(n > max_tokens for n in lengths)
    told = f"{long} sentences have more than {max_tokens} tokens; they are cut in training"
    yield long, "warning", "long_sentences", told, {"sentences": long}
    moved = fell.snapped + fell.shortened
    level: Level = "warning" if moved > 0.01 * fell.spans else "info"
    told = f"{moved} of {fell.spans} mentions do not fall on token boundaries; they are "
    numbers = {"snapped": fell.snapped, "shortened": fell.shortened}
    yield moved, level, "snapped", f"{told}moved outward", numbers
    gone = fell.lost + fell.merged
    told = f"{gone} mentions have no token of their own and are lost"
    yield gone, "warning", "lost", told, {"lost": fell.lost, "merged": fell.merged}
    kinds = ("discontinuous", "nested", "crossing", "duplicates")
    shapes = {kind: n for kind in kinds if (n := getattr(flat, kind))}
    shown = ", ".join(f"{n} {kind}" for kind, n in shapes.items())
    told = f"mentions that one tag per token cannot hold: {shown}; the flatten rule decides"
    yield len(shapes), "info", "not_flat", told, shapes


def _lengths(lengths: np.ndarray) -> Row:
    low, median, high = np.percentile(lengths, [5, 50, 95]).astype(int).tolist()
    counts = {
        "sentences": len(lengths),
        "tokens": int(lengths.sum()),
        "p5": low,
        "median": median,
        "p95": high,
        "longest": int(lengths.max()),
    }
    told = (
        f"{len(lengths)} sentences of {median} tokens (median; 5 % under {low}, 5 % over {high}, "
        f"longest {counts['longest']})"
    )
    return 1, "info", "lengths", told, counts


def _repeats(documents: Sequence[Document]) -> Iterator[Row]:
    ids = len(documents) - len({d.id for d in documents})
    told = f"{ids} documents repeat an id"
    yield ids, "warning", "repeated_ids", told, {"documents": ids}
    notes = [text for d in documents if (text := _whole(d))]
    again = len(notes) - len(set(notes))
    told = f"{again} documents of several sentences repeat an earlier one"
    yield again, "warning", "repeated_documents", told, {"documents": again}
    keys = [key for d in documents for key in sentence_keys(d)]
    again = len(keys) - len(set(keys))
    told = f"{again} of {len(keys)} sentences repeat an earlier one; split() keeps them together"
    yield again, "info", "repeated_sentences", told, {"sentences": again, "of": len(keys)}


def check_sites(
    sites: Sequence[SiteData], max_tokens: int = 256, chosen: Collection[str] = ()
) -> Report:
    """Check every part of every site, then what the parts and the sites share.

    chosen: sites that were split by a unit of the user's choice, such as sentences: that a note
    is in two parts is then a warning.
    """
    if not sites:
        return Report((Finding("error", "empty", "job", "no sites"),))
    found: list[Finding] = []
    keys: dict[tuple[str, str], Counter[str]] = {}
    for site in sites:
        parts = _parts(site)
        for part, documents in parts.items():
            where = f"{site.id}/{part}"
            if documents or part == "train":
                types = site.scored_types if part == "test" else site.tags.types
                tagset = TagSet(types, site.tags.scheme)
                own = check_documents(documents, tagset, where, max_tokens).findings
                # In other parts not wrong: `unlearnt` says what becomes of them.
                found += [f for f in own if part == "train" or f.code != "unknown_labels"]
            else:
                found.append(Finding("warning", "empty_part", where, "no documents"))
            keys[site.id, part] = Counter(k for d in documents for k in sentence_keys(d))
        found += _found(site.id, _leaks({part: keys[site.id, part] for part in parts}))
        found += in_two_parts(parts, site.id, "warning" if site.id in chosen else "error")
        found += unlearnt(site)
        for part, level, code, effect in _WITHOUT_MENTIONS:
            if parts[part] and not any(d.spans for d in parts[part]):
                told = f"nothing is annotated{effect}"
                found.append(Finding(level, code, f"{site.id}/{part}", told))
    return Report((*found, *_between(sites, keys)))


def _parts(site: SiteData) -> dict[str, tuple[Document, ...]]:
    return {"train": site.train, "valid": site.valid, "test": site.test}


def unlearnt(site: SiteData) -> Iterator[Finding]:
    """Mentions held out whose types no training mention has, where the job names no types."""
    for part, types in (("valid", site.tags.types), ("test", site.scored_types)):
        labels = Counter(s.label for d in _parts(site)[part] for s in d.spans)
        unknown = {label: n for label, n in sorted(labels.items()) if label not in types}
        told = (
            f"{sum(unknown.values())} mentions are of types that no training mention has "
            f"({', '.join(unknown)}): they are not scored; map them to others (label_map), or "
            "name all types of the site (types)"
        )
        row: Row = (len(unknown), "warning", "unlearnt_types", told, unknown)
        yield from _found(f"{site.id}/{part}", [row])


def leaks(parts: Mapping[str, Sequence[Document]], where: str) -> Iterable[Finding]:
    """Sentences that are in two parts, each pair of parts by itself."""
    keys = {p: Counter(k for d in own for k in sentence_keys(d)) for p, own in parts.items()}
    return _found(where, _leaks(keys))


def _leaks(keys: Mapping[str, Counter[str]]) -> Iterator[Row]:
    for a, b in combinations(keys, 2):
        yield _leak(keys[a], keys[b], "leakage", f"sentences of {b} occur in {a}")


def _leak(train: Mapping[str, int], test: Mapping[str, int], code: str, what: str) -> Row:
    shared = [key for key in test if key in train]
    total, leaked = sum(test.values()), sum(test[key] for key in shared)
    long = sum(test[key] for key in shared if len(key.split()) >= MIN_WORDS)
    told = f"{leaked} of {total} {what} ({long} of them with {MIN_WORDS} words or more)"
    counts = {"sentences": leaked, "of": total, "long": long}
    return leaked, "warning" if long else "info", code, told, counts


def in_two_parts(
    parts: Mapping[str, Sequence[Document]], where: str, level: Level = "error"
) -> Iterable[Finding]:
    """Patients and notes that are in two parts. A note is known by its text, or by its id where
    that is no number of a line or sentence of its file."""
    rows: list[Row] = []
    patients = {p: {d.patient for d in own if d.patient is not None} for p, own in parts.items()}
    names = {part: set(map(note_of, own)) for part, own in parts.items()}
    notes = {p: {name for name in own if not _COUNTED.search(name)} for p, own in names.items()}
    texts = {p: {text for d in own if (text := _whole(d))} for p, own in parts.items()}
    for a, b in combinations(parts, 2):
        shared = len(patients[a] & patients[b])
        told = f"{shared} patients are in {a} and in {b}{_REMEDY}"
        rows.append((shared, level, "shared_patients", told, {"patients": shared}))
        ids = notes[a] & notes[b]
        shared = len(ids) + sum(d.id not in ids and _whole(d) in texts[a] for d in parts[b])
        told = f"{shared} notes are in {a} and in {b}, by their ids or texts{_REMEDY}"
        rows.append((shared, level, "shared_notes", told, {"notes": shared}))
    return _found(where, rows)


def note_of(document: Document) -> str:
    """The id of the note that a document is, or was cut out of."""
    return str(document.meta.get("document", document.id))


def _whole(document: Document) -> str:
    """The text of a note of several sentences without regard to case and white space, else ""."""
    keys = sentence_keys(document)
    return "\n".join(keys) if len(keys) > 1 else ""


def _between(
    sites: Sequence[SiteData], keys: Mapping[tuple[str, str], Counter[str]]
) -> Iterator[Finding]:
    """What sites have, or do not have, in common."""
    for name, number in Counter(site.id for site in sites).items():
        if number > 1:
            told = f"{number} sites have this id"
            yield Finding("error", "site_ids", name, told, {"sites": number})
    if len(sites) < 2:
        return
    for a in sites:
        others = [b for b in sites if b is not a]
        known = sorted({t for b in others for t in b.tags.types})
        told = (
            f"its types {_braces(a.tags.types)} occur at no other site ({_braces(known)}): "
            "if some mean the same, add a label map"
        )
        apart: Row = (not set(a.tags.types) & set(known), "warning", "no_shared_types", told, {})
        pooled = sum((keys[b.id, "train"] for b in others), Counter[str]())
        told = "sentences of test occur in another site's train"
        leaked = _leak(pooled, keys[a.id, "test"], "leakage_between_sites", told)
        yield from _found(a.id, [apart, leaked])
    forms = len(overlapping_forms(site.train for site in sites))
    told = f"{forms} entity names are annotated in train at two sites or more"
    yield Finding("info", "overlapping_forms", "all sites", told, {"forms": forms})
