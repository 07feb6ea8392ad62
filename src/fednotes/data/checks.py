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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, Literal

import numpy as np

from fednotes.core.cleaning import joiners
from fednotes.core.errors import Problem
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.data.formats.problems import Problems
from fednotes.data.split import MIN_WORDS, sentence_keys
from fednotes.data.stats import overlapping_forms
from fednotes.data.tags import Alignment, FlattenCounts, encode, flatten, types_of
from fednotes.data.text import split_sentences, tokenize

Level = Literal["info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")


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

    @property
    def worst(self) -> Level:
        """The most serious level that occurs ("info" if nothing was found)."""
        return max((f.level for f in self.findings), key=LEVELS.index, default="info")

    def of(self, code: str) -> tuple[Finding, ...]:
        """The findings with that code."""
        return tuple(f for f in self.findings if f.code == code)


_WITHOUT_MENTIONS: tuple[tuple[str, Level, str, str], ...] = (  # part, level, code, effect
    ("train", "error", "no_mentions", ""),
    ("valid", "warning", "no_valid_mentions", ": no round can be chosen, the last model is kept"),
    ("test", "warning", "no_test_mentions", ": nothing can be measured here"),
)
_COUNTED = re.compile(r":[0-9]+$")  # an id that a reader made of a file and a number
_REMEDY = ": what is measured there is known from there; keep each in one part"
RARE = 20  # mentions below which a type can hardly be learnt or measured


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
    found = [
        *_offsets(documents, name),
        *_labels(documents, tagset, name),
        *_text(documents, name),
    ]
    if any(f.code == "offsets" for f in found):
        return Report(tuple(found))  # what follows relies on the offsets
    types = tagset.types if tagset else types_of(documents)
    found += [
        *_lengths_and_alignment(documents, types, name, max_tokens),
        *_repeats(documents, name),
    ]
    return Report(tuple(found))


def _offsets(documents: Sequence[Document], where: str) -> Iterable[Finding]:
    bad = sum(not 0 <= s.start < s.end <= len(d.text) for d in documents for s in d.spans)
    if bad:
        yield Finding(
            "error",
            "offsets",
            where,
            f"{bad} mentions lie outside their document's text or are empty",
            {"mentions": bad},
        )


def _labels(documents: Sequence[Document], tagset: TagSet | None, where: str) -> Iterable[Finding]:
    counts = Counter(s.label for d in documents for s in d.spans)
    mentions = sum(counts.values())
    listed = ", ".join(f"{label} {n}" for label, n in sorted(counts.items()))
    yield Finding("info", "types", where, f"{mentions} mentions: {listed or 'none'}", dict(counts))
    if tagset is not None:
        unknown = {label: n for label, n in sorted(counts.items()) if label not in tagset.types}
        if unknown:
            yield Finding(
                "error",
                "unknown_labels",
                where,
                f"labels {{{', '.join(unknown)}}} ({sum(unknown.values())} mentions) are not in "
                f"the tag set {{{', '.join(tagset.types)}}}: add a label map",
                unknown,
            )
    elif not mentions:
        yield Finding("error", "no_mentions", where, "nothing is annotated")
    rare = {t: counts[t] for t in (tagset.types if tagset else sorted(counts)) if counts[t] < RARE}
    if rare:
        shown = ", ".join(f"{label} {n}" for label, n in rare.items())
        yield Finding(
            "warning", "rare_types", where, f"types with fewer than {RARE} mentions: {shown}", rare
        )
    yield from bare_documents(documents, where)


def problem_findings(problems: Problems, where: str, name: str) -> Iterable[Finding]:
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
    annotated: dict[str, bool] = {}
    for number, document in enumerate(documents):
        name = _counted_as(document, number)
        annotated[name] = annotated.get(name, False) or bool(document.spans)
    if bare := sum(not found for found in annotated.values()):
        yield Finding(
            "info",
            "bare_documents",
            where,
            f"{bare} of {len(annotated)} documents have no mention",
            {"documents": bare, "of": len(annotated)},
        )


def _counted_as(document: Document, number: int) -> str:
    """What a document counts as: the note that it was cut out of, or itself, the number-th."""
    return str(document.meta.get("document", f"#{number}"))


def note_of(document: Document) -> str:
    """The id of the note that a document is, or was cut out of."""
    return str(document.meta.get("document", document.id))


def _text(documents: Sequence[Document], where: str) -> Iterable[Finding]:
    blank = sum(not d.text.strip() for d in documents)
    if blank:
        yield Finding(
            "warning",
            "blank_documents",
            where,
            f"{blank} documents are blank",
            {"documents": blank},
        )
    odd = 0
    held: set[str] = set()
    for place, document in enumerate(documents):
        if document.text.isprintable():
            continue
        number = sum(not c.isprintable() and not c.isspace() for c in document.text)
        number -= len(joiners(document.text))
        odd += number
        held |= {_counted_as(document, place)} if number else set()
    if odd:
        yield Finding(
            "warning",
            "unprintable",
            where,
            f"{odd} characters in {len(held)} documents cannot be printed (control characters, "
            "byte-order marks, private use)",
            {"characters": odd, "documents": len(held)},
        )


def _lengths_and_alignment(
    documents: Sequence[Document], types: tuple[str, ...], where: str, max_tokens: int
) -> Iterable[Finding]:
    tagset = TagSet(types)
    lengths: list[int] = []
    alignment, flat = Alignment(), FlattenCounts()
    for document in documents:
        tokens = tokenize(document.text)  # (tokens, 2)
        bounds = split_sentences(document)
        edges = np.searchsorted(tokens[:, 0], [start for start, _ in bounds])
        ends = np.searchsorted(tokens[:, 0], [end for _, end in bounds])
        lengths += (ends - edges).tolist()
        known = [s for s in document.spans if s.label in types]
        if known:
            spans, counts = flatten(known, "outermost")
            flat += counts
            alignment += encode(spans, tokens, tagset)[1]
    if lengths:
        yield _length_finding(np.array(lengths), where)
    too_long = sum(n > max_tokens for n in lengths)
    if too_long:
        yield Finding(
            "warning",
            "long_sentences",
            where,
            f"{too_long} sentences have more than {max_tokens} tokens; they are cut in training",
            {"sentences": too_long},
        )
    yield from _alignment_findings(alignment, flat, where)


def _length_finding(lengths: np.ndarray, where: str) -> Finding:
    low, median, high = np.percentile(lengths, [5, 50, 95]).astype(int).tolist()
    longest = int(lengths.max())
    return Finding(
        "info",
        "lengths",
        where,
        f"{len(lengths)} sentences of {median} tokens (median; 5 % under {low}, 5 % over {high}, "
        f"longest {longest})",
        {
            "sentences": len(lengths),
            "tokens": int(lengths.sum()),
            "p5": low,
            "median": median,
            "p95": high,
            "longest": longest,
        },
    )


def _alignment_findings(alignment: Alignment, flat: FlattenCounts, where: str) -> Iterable[Finding]:
    moved = alignment.snapped + alignment.shortened
    if moved:
        yield Finding(
            "warning" if moved > 0.01 * alignment.spans else "info",
            "snapped",
            where,
            f"{moved} of {alignment.spans} mentions do not fall on token boundaries; they are "
            "moved outward",
            {"snapped": alignment.snapped, "shortened": alignment.shortened},
        )
    gone = alignment.lost + alignment.merged
    if gone:
        yield Finding(
            "warning",
            "lost",
            where,
            f"{gone} mentions have no token of their own and are lost",
            {"lost": alignment.lost, "merged": alignment.merged},
        )
    shapes = {k: getattr(flat, k) for k in ("discontinuous", "nested", "crossing", "duplicates")}
    shapes = {k: n for k, n in shapes.items() if n}
    if shapes:
        shown = ", ".join(f"{n} {kind}" for kind, n in shapes.items())
        yield Finding(
            "info",
            "not_flat",
            where,
            f"mentions that one tag per token cannot hold: {shown}; the flatten rule decides",
            shapes,
        )


def _repeats(documents: Sequence[Document], where: str) -> Iterable[Finding]:
    ids = len(documents) - len({d.id for d in documents})
    if ids:
        yield Finding(
            "warning", "repeated_ids", where, f"{ids} documents repeat an id", {"documents": ids}
        )
    per_document = [sentence_keys(d) for d in documents]
    notes = Counter("\n".join(keys) for keys in per_document if len(keys) > 1)
    repeated = sum(notes.values()) - len(notes)
    if repeated:
        yield Finding(
            "warning",
            "repeated_documents",
            where,
            f"{repeated} documents of several sentences repeat an earlier one",
            {"documents": repeated},
        )
    keys = Counter(key for keys in per_document for key in keys)
    total = sum(keys.values())
    again = total - len(keys)
    if again:
        yield Finding(
            "info",
            "repeated_sentences",
            where,
            f"{again} of {total} sentences repeat an earlier one; split() keeps them together",
            {"sentences": again, "of": total},
        )


def check_sites(
    sites: Sequence[SiteData], max_tokens: int = 256, chosen: Collection[str] = ()
) -> Report:
    """Check every part of every site, then what the parts and the sites share.

    chosen: sites that were split by a unit of the user's choice, such as sentences: that a note
    is in two parts is then a warning.
    """
    if not sites:
        return Report((Finding("error", "empty", "job", "no sites"),))
    report = Report()
    keys: dict[tuple[str, str], Counter[str]] = {}
    for site in sites:
        for part, documents in _parts(site).items():
            where = f"{site.id}/{part}"
            if documents or part == "train":
                types = site.scored_types if part == "test" else site.tags.types
                tagset = TagSet(types, site.tags.scheme)
                found = check_documents(documents, tagset, where, max_tokens).findings
                if part != "train":  # not wrong: `unlearnt` says what becomes of them
                    found = tuple(f for f in found if f.code != "unknown_labels")
                report += Report(found)
            else:
                report += Report((Finding("warning", "empty_part", where, "no documents"),))
            keys[site.id, part] = Counter(k for d in documents for k in sentence_keys(d))
        report += Report(tuple(_site_findings(site, keys, site.id in chosen)))
    return report + Report(tuple(_between(sites, keys)))


def _parts(site: SiteData) -> dict[str, tuple[Document, ...]]:
    return {"train": site.train, "valid": site.valid, "test": site.test}


def _site_findings(
    site: SiteData, keys: Mapping[tuple[str, str], Counter[str]], chosen: bool
) -> Iterable[Finding]:
    """Leakage between the parts of one site, and parts that can teach or measure nothing."""
    yield from _leaks({part: keys[site.id, part] for part in _parts(site)}, site.id)
    yield from in_two_parts(_parts(site), site.id, "warning" if chosen else "error")
    yield from unlearnt(site)
    for part, level, code, effect in _WITHOUT_MENTIONS:
        documents = _parts(site)[part]
        if documents and not any(d.spans for d in documents):
            yield Finding(level, code, f"{site.id}/{part}", f"nothing is annotated{effect}")


def unlearnt(site: SiteData) -> Iterable[Finding]:
    """Mentions held out whose types no training mention has, where the job names no types."""
    for part, types in (("valid", site.tags.types), ("test", site.scored_types)):
        labels = Counter(s.label for d in _parts(site)[part] for s in d.spans)
        unknown = {label: n for label, n in sorted(labels.items()) if label not in types}
        if unknown:
            yield Finding(
                "warning",
                "unlearnt_types",
                f"{site.id}/{part}",
                f"{sum(unknown.values())} mentions are of types that no training mention has "
                f"({', '.join(unknown)}): they are not scored; map them to others (label_map), or "
                "name all types of the site (types)",
                unknown,
            )


def leaks(parts: Mapping[str, Sequence[Document]], where: str) -> Iterable[Finding]:
    """Sentences that are in two parts, each pair of parts by itself."""
    keys = {p: Counter(k for d in own for k in sentence_keys(d)) for p, own in parts.items()}
    yield from _leaks(keys, where)


def _leaks(keys: Mapping[str, Counter[str]], where: str) -> Iterable[Finding]:
    for a, b in combinations(keys, 2):
        yield from _leak(keys[a], keys[b], "leakage", where, f"sentences of {b} occur in {a}")


def in_two_parts(
    parts: Mapping[str, Sequence[Document]], where: str, level: Level = "error"
) -> Iterable[Finding]:
    """Patients and notes that are in two parts. A note is known by its text, or by its id where
    that is no number of a line or sentence of its file."""
    patients = {p: {d.patient for d in own if d.patient is not None} for p, own in parts.items()}
    notes = {part: _notes(documents) for part, documents in parts.items()}
    for a, b in combinations(parts, 2):
        if shared := len(patients[a] & patients[b]):
            told = f"{shared} patients are in {a} and in {b}{_REMEDY}"
            yield Finding(level, "shared_patients", where, told, {"patients": shared})
        ids = notes[a][0] & notes[b][0]
        same = sum(d.id not in ids and _whole(d) in notes[a][1] for d in parts[b])
        if shared := len(ids) + same:
            told = f"{shared} notes are in {a} and in {b}, by their ids or texts{_REMEDY}"
            yield Finding(level, "shared_notes", where, told, {"notes": shared})


def _notes(documents: Sequence[Document]) -> tuple[set[str], set[str]]:
    """The ids of notes that tell something, and the texts of whole notes."""
    ids = {note_of(d) for d in documents}
    texts = {text for d in documents if (text := _whole(d))}
    return {name for name in ids if not _COUNTED.search(name)}, texts


def _whole(document: Document) -> str:
    """The text of a note of several sentences without regard to case and white space, else ""."""
    keys = sentence_keys(document)
    return "\n".join(keys) if len(keys) > 1 else ""


def _leak(
    train: Mapping[str, int], test: Mapping[str, int], code: str, where: str, what: str
) -> Iterable[Finding]:
    shared = [key for key in test if key in train]
    if not shared:
        return
    total, leaked = sum(test.values()), sum(test[key] for key in shared)
    long = sum(test[key] for key in shared if len(key.split()) >= MIN_WORDS)
    yield Finding(
        "warning" if long else "info",
        code,
        where,
        f"{leaked} of {total} {what} ({long} of them with {MIN_WORDS} words or more)",
        {"sentences": leaked, "of": total, "long": long},
    )


def _between(
    sites: Sequence[SiteData], keys: Mapping[tuple[str, str], Counter[str]]
) -> Iterable[Finding]:
    """What sites have, or do not have, in common."""
    names = Counter(site.id for site in sites)
    for name, number in names.items():
        if number > 1:
            yield Finding(
                "error", "site_ids", name, f"{number} sites have this id", {"sites": number}
            )
    if len(sites) < 2:
        return
    for a in sites:
        others = [b for b in sites if b is not a]
        if not any(set(a.tags.types) & set(b.tags.types) for b in others):
            known = sorted({t for b in others for t in b.tags.types})
            yield Finding(
                "warning",
                "no_shared_types",
                a.id,
                f"its types {_braces(a.tags.types)} occur at no other site ({_braces(known)}): "
                "if some mean the same, add a label map",
            )
        pooled: Counter[str] = Counter()
        for b in others:
            pooled += keys[b.id, "train"]
        yield from _leak(
            pooled,
            keys[a.id, "test"],
            "leakage_between_sites",
            a.id,
            "sentences of test occur in another site's train",
        )
    forms = len(overlapping_forms(site.train for site in sites))
    yield Finding(
        "info",
        "overlapping_forms",
        "all sites",
        f"{forms} entity names are annotated in train at two sites or more",
        {"forms": forms},
    )


def _braces(types: Collection[str]) -> str:
    return "{" + ", ".join(types) + "}"
