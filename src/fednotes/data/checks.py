"""Checks of a corpus before training, reported as counts without text.

    check_documents(documents)                  one corpus
    check_sites(sites)                          each part, each site, and all sites
    for finding in …: print(finding)            "warning  psytar/train: 3 of …"

Findings have three levels: info (good to know), warning (should be inspected) and error
(training would fail or mislead).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, islice, product
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from fednotes.core.cleaning import find_joiners
from fednotes.core.errors import Problem
from fednotes.core.parsing import read_shipped_table
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.core.wording import list_names
from fednotes.data.formats.problems import UNANNOTATED, WINDOWS, Problems
from fednotes.data.identifiers import KINDS, count_identifiers
from fednotes.data.repeats import Repeats, SharedValues
from fednotes.data.split import MIN_WORDS, list_sentence_keys
from fednotes.data.stats import find_overlapping_forms
from fednotes.data.tags import (
    Alignment,
    FlattenCounts,
    encode_tags,
    flatten_for,
    keep_outermost,
    list_types,
)
from fednotes.data.text import (
    count_tokens_by_sentence,
    normalise,
    split_sentences,
    tokenize,
)

Level = Literal["info", "warning", "error"]

RARE = 20  # types with fewer mentions can hardly be learned or evaluated
# Shared notes are many from this share of the smaller site's notes; a few equal notes
# may be forms.
MANY_SHARED = 0.05
# Maximum number of site pairs to name; fifty identical sites would give 1,225.
_MAX_PAIRS = 10
# Maximum number of pairs of texts with one id to search. A note has few copies, so more
# pairs are not needed.
_MAX_TEXT_PAIRS = 10_000

_FINDINGS = read_shipped_table("data/findings.toml")
# An id that a reader composed of a file name and a number.
_NUMBERED_ID = re.compile(r":[0-9]+$")


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check of a corpus.

    Attributes:
        level: How much it matters.
        code: The stable name of the finding.
        where: The corpus, site or part.
        message: A sentence that describes it.
        counts: The numbers in the sentence, by name.
        problems: The places in files, if known.
    """

    level: Level
    code: str
    where: str
    message: str
    counts: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        return f"{self.level:<8} {self.where}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


class _Count(int):
    """A number of a sentence, which may choose the words after it."""

    def __format__(self, spec: str) -> str:
        """Return the number; with a spec "one|many", followed by one of both."""
        singular, bar, plural = spec.partition("|")
        if not bar:
            return super().__format__(spec)
        return f"{int(self)} {singular if self == 1 else plural}"


def _make_finding(
    where: str,
    code: str,
    counts: Mapping[str, int],
    level: Level | None = None,
    **words: object,
) -> Finding:
    """Return a finding with a sentence of `findings.toml`.

    Args:
        where: The corpus, site or part.
        code: Name of a table of the file.
        counts: The numbers of the finding, for the sentence.
        level: The level; None takes that of the file.
        words: Further values for the sentence.
    """
    entry = _FINDINGS[code]
    sentence: str = entry["sentence"]
    constants = {"MIN_WORDS": MIN_WORDS, "RARE": RARE}
    values = {**counts, **words, **constants}
    message = sentence.format_map(
        {
            name: _Count(value) if isinstance(value, int) else value
            for name, value in values.items()
        }
    )
    # Findings with one name may have several sentences, such as "read:repeated_ids".
    stable_name = code.split(":")[-1]
    return Finding(level or entry["level"], stable_name, where, message, counts)


# ---- one corpus ----------------------------------------------------------------------


def check_documents(
    documents: Iterable[Document],
    tagset: TagSet | None = None,
    name: str = "corpus",
    max_tokens: int = 256,
) -> list[Finding]:
    """Check one corpus or one part of it.

    Args:
        documents: The documents.
        tagset: The tag set that the job expects; None takes the types that occur.
        name: The name of the corpus in findings.
        max_tokens: Number of tokens at which training cuts a sentence.
    """
    with CorpusCheck(name, tagset, max_tokens) as check:
        for document in documents:
            check.add(document)
        return check.list_findings()


class CorpusCheck:
    r"""Check a corpus whose documents arrive one by one.

    Memory does not grow with the corpus. No text is stored: repeated sentences and
    documents are recognised by hashes in temporary files.

        with CorpusCheck("train") as check:
            for document in documents:
                check.add(document)
            print(*check.list_findings(), sep="\n")
    """

    def __init__(
        self, name: str = "corpus", tagset: TagSet | None = None, max_tokens: int = 256
    ) -> None:
        """Start without documents.

        Args:
            name: The name of the corpus in findings.
            tagset: As in `check_documents`.
            max_tokens: As in `check_documents`.
        """
        self.name = name
        self.max_tokens = max_tokens
        self._tagset = tagset
        self._documents = 0
        self._blank_documents = 0
        self._labels: Counter[str] = Counter()
        self._annotated_notes = _NoteFlags()
        # mentions whose offsets cannot be right
        self._misplaced_mentions = 0
        self._unprintable_characters = 0
        self._unprintable_notes = _NoteFlags()
        self._identifiers: Counter[str] = Counter()
        self._documents_with_identifiers = 0
        # number of sentences of each length in tokens
        self._lengths: Counter[int] = Counter()
        self._alignment = Alignment()
        self._shapes = FlattenCounts()
        self._sentences = Repeats()
        self._ids = Repeats()
        self._texts = Repeats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the temporary files."""
        self._annotated_notes.close()
        self._unprintable_notes.close()
        self._sentences.close()
        self._ids.close()
        self._texts.close()

    def add(self, document: Document) -> None:
        """Count a document.

        Raises:
            FednotesError: The temporary folder is full.
        """
        text = document.text
        misplaced = sum(
            not 0 <= span.start < span.end <= len(text) for span in document.spans
        )
        unprintable = _count_unprintable(text)
        identifiers = count_identifiers(text)

        self._documents += 1
        self._blank_documents += not text.strip()
        self._labels.update(span.label for span in document.spans)
        self._annotated_notes.add(document, flag=bool(document.spans))
        self._misplaced_mentions += misplaced
        self._unprintable_characters += unprintable
        self._unprintable_notes.add(document, flag=unprintable > 0)
        self._identifiers.update(identifiers)
        self._documents_with_identifiers += bool(identifiers)
        if not misplaced:
            self._count_sentences(document)

    def _count_sentences(self, document: Document) -> None:
        """Count a document's sentences, their lengths and its mentions' alignment."""
        bounds = split_sentences(document)
        keys = [normalise(document.text[start:end]) for start, end in bounds]
        self._sentences.add(keys)
        self._ids.add([document.id])
        if len(keys) > 1:
            self._texts.add(["\n".join(keys)])

        tokens = tokenize(document.text)
        self._lengths.update(count_tokens_by_sentence(bounds, tokens))
        self._count_mentions(document, tokens)

    def _count_mentions(self, document: Document, tokens: np.ndarray) -> None:
        """Count the alignment of a document's mentions with its tokens."""
        types = self._tagset.types if self._tagset else list_types([document])
        known_types = frozenset(types)
        mentions = [span for span in document.spans if span.label in known_types]
        if not mentions:
            return
        tagset = self._tagset or TagSet(types)
        flat_mentions, shapes = flatten_for(tagset, mentions)
        if tagset.overlaps:
            flat_mentions = keep_outermost(mentions)
        _, alignment = encode_tags(flat_mentions, tokens, TagSet(types))
        self._shapes += shapes
        self._alignment += alignment

    def list_findings(self) -> list[Finding]:
        """Return the findings about the documents so far.

        Raises:
            FednotesError: The temporary folder is full.
        """
        if not self._documents:
            return [_make_finding(self.name, "empty", {}, what="documents")]
        types = self._tagset.types if self._tagset else tuple(sorted(self._labels))
        is_named = self._tagset is not None
        findings = [
            *self._check_offsets(),
            *_check_labels(self._labels, types, self.name, is_named=is_named),
            *self._annotated_notes.check_mentions(self.name),
            *self._check_characters(),
            *self._check_identifiers(),
        ]
        if not self._misplaced_mentions:  # the rest relies on the offsets
            findings += self._check_lengths()
            findings += self._check_alignment()
            findings += self._check_repeats()
        return findings

    def _check_offsets(self) -> Iterator[Finding]:
        """Yield a finding about mentions whose offsets cannot be right."""
        if self._misplaced_mentions:
            counts = {"mentions": self._misplaced_mentions}
            yield _make_finding(self.name, "offsets", counts)

    def _check_characters(self) -> Iterator[Finding]:
        """Yield findings about blank documents and unprintable characters."""
        if self._blank_documents:
            counts = {"documents": self._blank_documents}
            yield _make_finding(self.name, "blank_documents", counts)
        if self._unprintable_characters:
            counts = {
                "characters": self._unprintable_characters,
                "documents": self._unprintable_notes.count_flagged(),
            }
            yield _make_finding(self.name, "unprintable", counts)

    def _check_identifiers(self) -> Iterator[Finding]:
        """Yield a finding about texts that look like identifiers of patients."""
        counts = {
            kind: self._identifiers[kind] for kind in KINDS if self._identifiers[kind]
        }
        if counts:
            yield _make_finding(
                self.name,
                "identifiers",
                {**counts, "documents": self._documents_with_identifiers},
                shown=", ".join(f"{kind} {n:,}" for kind, n in counts.items()),
                held=self._documents_with_identifiers,
                of=self._documents,
            )

    def _check_lengths(self) -> Iterator[Finding]:
        """Yield findings about the lengths of sentences in tokens."""
        lengths = self._lengths
        if lengths:
            counts = {
                "sentences": lengths.total(),
                "tokens": sum(length * number for length, number in lengths.items()),
                "p5": int(_compute_percentile(lengths, 5)),
                "median": int(_compute_percentile(lengths, 50)),
                "p95": int(_compute_percentile(lengths, 95)),
                "longest": max(lengths),
            }
            yield _make_finding(self.name, "lengths", counts)
        too_long = sum(
            number for length, number in lengths.items() if length > self.max_tokens
        )
        if too_long:
            counts = {"sentences": too_long}
            yield _make_finding(
                self.name, "long_sentences", counts, limit=self.max_tokens
            )

    def _check_alignment(self) -> Iterator[Finding]:
        """Yield findings about mentions that do not fit the tokens, or overlap."""
        alignment = self._alignment
        moved = alignment.snapped + alignment.shortened
        if moved:
            yield _make_finding(
                self.name,
                "snapped",
                {"snapped": alignment.snapped, "shortened": alignment.shortened},
                level="warning" if moved > 0.01 * alignment.spans else "info",
                moved=moved,
                of=alignment.spans,
            )
        without_token = alignment.lost + alignment.merged
        if without_token:
            counts = {"lost": alignment.lost, "merged": alignment.merged}
            yield _make_finding(self.name, "lost", counts, gone=without_token)
        shapes = {
            "discontinuous": self._shapes.discontinuous,
            "nested": self._shapes.nested,
            "crossing": self._shapes.crossing,
            "duplicates": self._shapes.duplicates,
        }
        shapes = {shape: number for shape, number in shapes.items() if number}
        if shapes:
            shown = ", ".join(f"{number} {shape}" for shape, number in shapes.items())
            yield _make_finding(self.name, "not_flat", shapes, shown=shown)

    def _check_repeats(self) -> Iterator[Finding]:
        """Yield findings about repeated ids, documents and sentences."""
        repeated_ids = self._ids.count_repeats()
        if repeated_ids:
            yield _make_finding(self.name, "repeated_ids", {"documents": repeated_ids})
        repeated_texts = self._texts.count_repeats()
        if repeated_texts:
            counts = {"documents": repeated_texts}
            yield _make_finding(self.name, "repeated_documents", counts)
        repeated_sentences = self._sentences.count_repeats()
        if repeated_sentences:
            counts = {"sentences": repeated_sentences, "of": self._sentences.total}
            yield _make_finding(self.name, "repeated_sentences", counts)


def _compute_percentile(counts: Mapping[int, int], percent: float) -> float:
    """Return a percentile of counted numbers, interpolated linearly as in NumPy.

    Args:
        counts: How often each number occurs.
        percent: From 0 to 100.
    """
    values = np.array(sorted(counts))
    # the position after the last occurrence of each value
    ends = np.cumsum([counts[value] for value in values.tolist()])
    position = (ends[-1] - 1) * percent / 100
    neighbours = [np.floor(position), np.ceil(position)]
    low, high = values[np.searchsorted(ends, neighbours, side="right")]
    return float(low + (high - low) * (position - neighbours[0]))


class _NoteFlags:
    """Count the notes that have a property.

    The sentences of a note that was split into sentences count as one note.
    """

    def __init__(self) -> None:
        self._uncut = 0
        self._flagged_uncut = 0
        # names of notes that were split into several documents
        self._cut = Repeats()
        self._flagged_cut = Repeats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the temporary files."""
        self._cut.close()
        self._flagged_cut.close()

    def add(self, document: Document, *, flag: bool) -> None:
        """Count a document; `flag` is whether it has the property."""
        name = document.meta.get("document")
        if name is None:
            self._uncut += 1
            self._flagged_uncut += flag
            return
        self._cut.add([str(name)])
        if flag:
            self._flagged_cut.add([str(name)])

    def count_flagged(self) -> int:
        """Return the number of notes with the property."""
        return self._flagged_uncut + self._flagged_cut.count_distinct()

    def check_mentions(self, where: str) -> Iterator[Finding]:
        """Yield a finding about the notes without mentions.

        The flag must be whether a note has mentions.
        """
        notes = self._uncut + self._cut.count_distinct()
        bare = notes - self.count_flagged()
        if bare:
            counts = {"documents": bare, "of": notes}
            yield _make_finding(where, "bare_documents", counts)


def find_bare_documents(documents: Iterable[Document], where: str) -> Iterator[Finding]:
    """Yield a finding about the documents without mentions.

    The sentences of a document that was split count as one document.
    """
    with _NoteFlags() as annotated:
        for document in documents:
            annotated.add(document, flag=bool(document.spans))
        yield from annotated.check_mentions(where)


def _count_unprintable(text: str) -> int:
    """Return the number of unprintable characters in a text.

    Invisible joiners, as in some scripts and emoji, do not count.
    """
    if "".join(text.split()).isprintable():
        return 0
    odd = sum(not c.isprintable() and not c.isspace() for c in text)
    return odd - len(find_joiners(text))


def _list_counts(counts: Mapping[str, int]) -> str:
    """Return the first counts by type in words, such as "Drug 3, ADE 1 and 2 more"."""
    return list_names([f"{label} {number}" for label, number in counts.items()])


def _join_in_braces(types: Collection[str]) -> str:
    """Return types as "{a, b}"."""
    return "{" + ", ".join(types) + "}"


def _check_labels(
    counts: Counter[str], types: Sequence[str], where: str, *, is_named: bool
) -> Iterator[Finding]:
    """Yield findings about the labels of a corpus.

    Args:
        counts: The number of mentions of each label.
        types: The expected types.
        where: The name of the corpus in findings.
        is_named: Whether the job names the types; otherwise they are those that occur.
    """
    ordered = dict(sorted(counts.items()))
    total = counts.total()
    listed = _list_counts(dict(counts.most_common())) or "none"
    yield _make_finding(where, "types", dict(counts), total=total, listed=listed)
    unknown = {label: n for label, n in ordered.items() if label not in types}
    if unknown:
        yield _make_finding(
            where,
            "unknown_labels",
            unknown,
            total=sum(unknown.values()),
            unknown=_join_in_braces(unknown),
            types=_join_in_braces(types),
        )
    if counts["O"]:
        yield _make_finding(where, "outside_label", {"mentions": counts["O"]})
    if not is_named and not total:
        yield _make_finding(where, "no_mentions", {})
    rare = {label: counts[label] for label in types if counts[label] < RARE}
    if rare:
        rarest_first = dict(sorted(rare.items(), key=lambda item: item[1]))
        yield _make_finding(
            where, "rare_types", rare, listed=_list_counts(rarest_first)
        )


def report_agreement(scores: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Yield findings about the agreement of two annotations of a corpus.

    Args:
        scores: The result of `metrics.agreement.measure_agreement`.
        where: The name of the corpus in findings.
    """
    if scores["apart"]:
        yield _make_finding(where, "not_of_both", {"documents": scores["apart"]})
    counts = {
        name: scores[name] for name in ("documents", "gold", "predicted", "tokens")
    }
    yield _make_finding(
        where,
        "agreement",
        counts,
        strict=_format_rate(scores["strict"]),
        relaxed=_format_rate(scores["relaxed"]),
        kappa=_format_rate(scores["kappa"]),
    )


def _format_rate(rate: float | None) -> str:
    """Return a rate with three digits; "-" if it is undefined."""
    return "-" if rate is None else f"{rate:.3f}"


def report_problems(problems: Problems, where: str, name: str) -> Iterator[Finding]:
    """Yield findings about items that a reader left out, and its other remarks.

    Args:
        problems: The reader's problems.
        where: The name of the corpus in findings.
        name: Name of the file or folder.
    """
    if problems.number:
        left_out = _make_finding(
            where, "left_out", dict(problems.counts), problems=problems, name=name
        )
        yield replace(left_out, problems=tuple(problems.listed))
    if problems.repeated_ids:
        counts = {"documents": len(problems.repeated_ids)}
        repeated = _make_finding(where, "read:repeated_ids", counts, name=name)
        yield replace(repeated, problems=tuple(problems.repeated_ids))
    if problems.unannotated:
        counts = {"texts": len(problems.unannotated)}
        yield _make_finding(where, "texts_without_annotations", counts, name=name)
    if problems.ignored[WINDOWS]:
        yield _make_finding(
            where, "windows_line_ends", {"texts": problems.ignored[WINDOWS]}
        )
    counts = {
        kind: number
        for kind, number in sorted(problems.ignored.items())
        if number and kind not in (UNANNOTATED, WINDOWS)
    }
    if counts:
        kinds = ", ".join(f"{kind}: {number:,}" for kind, number in counts.items())
        yield _make_finding(where, "passed_over", counts, name=name, kinds=kinds)


def compare_size(name: str, sentences: int, expected: int) -> Finding:
    """Return a finding about a corpus whose size differs from the published one.

    A difference of up to 5 % may come from another way of splitting sentences; more is
    a warning.

    Args:
        name: The name of the corpus in the finding.
        sentences: The number of sentences in the files.
        expected: The number of sentences in the publication.
    """
    difference = 100 * (sentences - expected) / expected
    return _make_finding(
        name,
        "other_size",
        {"sentences": sentences, "expected": expected},
        level="info" if abs(difference) <= 5 else "warning",
        difference=f"{difference:+.1f}",
    )


# ---- parts and sites -----------------------------------------------------------------

# How often each sentence occurs in a part, by its normalised text.
_SentenceCounts = Counter[str]


def check_sites(
    sites: Sequence[SiteData],
    max_tokens: int = 256,
    sites_with_split: Collection[str] = (),
) -> list[Finding]:
    """Check each part of each site, and the overlap of parts and sites.

    Args:
        sites: The sites.
        max_tokens: As in `check_documents`.
        sites_with_split: Sites that were split by a user-specified unit, such as
            sentences. For these, a note in two parts is a warning, not an error.
    """
    if not sites:
        return [_make_finding("job", "empty", {}, what="sites")]
    findings: list[Finding] = []
    sentences: dict[tuple[str, str], _SentenceCounts] = {}
    for site in sites:
        parts = _list_parts(site)
        for part, documents in parts.items():
            findings += _check_part(site, part, documents, max_tokens)
            sentences[site.id, part] = _count_sentences(documents)
        findings += _compare_parts(
            {part: sentences[site.id, part] for part in parts}, site.id
        )
        level: Level = "warning" if site.id in sites_with_split else "error"
        findings += find_shared_notes(parts, site.id, level)
        findings += find_unlearnt_types(site)
        findings += _find_parts_without_mentions(parts, site.id)
    return [*findings, *_compare_sites(sites, sentences)]


def _list_parts(site: SiteData) -> dict[str, tuple[Document, ...]]:
    """Return the documents of each part of a site by its name."""
    return {"train": site.train, "valid": site.valid, "test": site.test}


def _check_part(
    site: SiteData, part: str, documents: Sequence[Document], max_tokens: int
) -> list[Finding]:
    """Return the findings about one part of a site."""
    where = f"{site.id}/{part}"
    if not documents and part != "train":
        return [_make_finding(where, "empty_part", {})]
    types = site.scored_types if part == "test" else site.tags.types
    tagset = replace(site.tags, types=types)
    findings = check_documents(documents, tagset, where, max_tokens)
    if part == "train":
        return findings
    # Unknown labels are not errors in the other parts, where `find_unlearnt_types`
    # reports them.
    return [finding for finding in findings if finding.code != "unknown_labels"]


def _find_parts_without_mentions(
    parts: Mapping[str, Sequence[Document]], site: str
) -> Iterator[Finding]:
    """Yield a finding about each part with documents but no mentions."""
    for part, documents in parts.items():
        if documents and not any(document.spans for document in documents):
            code = "no_mentions" if part == "train" else f"no_{part}_mentions"
            yield _make_finding(f"{site}/{part}", code, {})


def find_unlearnt_types(site: SiteData) -> Iterator[Finding]:
    """Yield a finding about valid and test if they have types that train lacks.

    This applies to jobs that do not name the types.
    """
    for part, types in (("valid", site.tags.types), ("test", site.scored_types)):
        labels = Counter(
            span.label
            for document in _list_parts(site)[part]
            for span in document.spans
        )
        unknown = {
            label: n for label, n in sorted(labels.items()) if label not in types
        }
        if unknown:
            yield _make_finding(
                f"{site.id}/{part}",
                "unlearnt_types",
                unknown,
                total=sum(unknown.values()),
                types=", ".join(unknown),
            )


def _count_sentences(documents: Iterable[Document]) -> _SentenceCounts:
    """Count how often each sentence occurs in the documents of a part."""
    return Counter(
        key for document in documents for key in list_sentence_keys(document)
    )


def find_leaks(
    parts: Mapping[str, Sequence[Document]], where: str
) -> Iterator[Finding]:
    """Yield a finding about the sentences that each pair of parts shares.

    Args:
        parts: The documents of each part by its name.
        where: The name of the corpus in findings.
    """
    sentences = {part: _count_sentences(documents) for part, documents in parts.items()}
    yield from _compare_parts(sentences, where)


def _compare_parts(
    sentences: Mapping[str, _SentenceCounts], where: str
) -> Iterator[Finding]:
    """Yield a finding about the sentences that each pair of parts shares."""
    for a, b in combinations(sentences, 2):
        yield from _find_shared_sentences(
            sentences[a], sentences[b], where, "leakage", a=a, b=b
        )


def _find_shared_sentences(
    train: _SentenceCounts,
    test: _SentenceCounts,
    where: str,
    code: str,
    **words: str,
) -> Iterator[Finding]:
    """Yield a finding about the sentences of `test` that occur in `train`.

    Args:
        train: The sentences of one part or site.
        test: The sentences of the other one.
        where: The name of the corpus in the finding.
        code: The code of the finding.
        words: Further values for the sentence of the finding.
    """
    shared = {key: number for key, number in test.items() if key in train}
    if not shared:
        return
    long = sum(n for key, n in shared.items() if len(key.split()) >= MIN_WORDS)
    counts = {"sentences": sum(shared.values()), "of": test.total(), "long": long}
    yield _make_finding(where, code, counts, "warning" if long else "info", **words)


def find_shared_notes(
    parts: Mapping[str, Sequence[Document]], where: str, level: Level = "error"
) -> Iterator[Finding]:
    """Yield findings about patients and notes that two parts have in common.

    A note is recognised by its text or by its id. Two kinds of ids are ignored: line or
    sentence numbers in a file, and plain file names (brat).

    Args:
        parts: The documents of each part by its name.
        where: The name of the corpus in findings.
        level: How much it matters.
    """
    patients = {part: _collect_patients(documents) for part, documents in parts.items()}
    notes = {part: _group_by_note(documents) for part, documents in parts.items()}
    texts = {
        part: {text for document in documents if (text := _normalise_note(document))}
        for part, documents in parts.items()
    }
    for a, b in combinations(parts, 2):
        shared_patients = len(patients[a] & patients[b])
        if shared_patients:
            counts = {"patients": shared_patients}
            yield _make_finding(where, "shared_patients", counts, level, a=a, b=b)

        shared_names = notes[a].keys() & notes[b].keys()
        shared_ids = {
            name
            for name in shared_names
            if _is_one_note(notes[a][name], notes[b][name])
        }
        same_text = sum(
            document.id not in shared_ids and _normalise_note(document) in texts[a]
            for document in parts[b]
        )
        shared_notes = len(shared_ids) + same_text
        if shared_notes:
            counts = {"notes": shared_notes}
            yield _make_finding(where, "shared_notes", counts, level, a=a, b=b)


def _collect_patients(documents: Iterable[Document]) -> set[str]:
    """Return the ids of the patients whose notes these are."""
    return {document.patient for document in documents if document.patient is not None}


def _group_by_note(documents: Iterable[Document]) -> dict[str, list[Document]]:
    """Group documents by note, ignoring ids that do not identify a note."""
    notes: dict[str, list[Document]] = {}
    for document in documents:
        name = str(document.meta.get("document", document.id))
        if not _NUMBERED_ID.search(name):
            notes.setdefault(name, []).append(document)
    return notes


def _is_one_note(one: Sequence[Document], two: Sequence[Document]) -> bool:
    """Return whether documents with the same id are the same note.

    The id alone decides, unless it may be a mere file name: two hospitals may each have
    a 001.txt. An id may be a file name if some of the documents are whole notes, and
    each of these has no mentions or was read from brat. Then the texts decide: a text
    of one part must equal, contain or be contained in a text of the other part. At most
    `_MAX_TEXT_PAIRS` pairs are searched for a text that contains the other.

    Args:
        one: The documents with the id in one part.
        two: The documents with the id in the other part.
    """
    whole_notes = [
        document for document in (*one, *two) if "document" not in document.meta
    ]
    id_is_reliable = any(
        document.spans and "brat" not in document.meta for document in whole_notes
    )
    if not whole_notes or id_is_reliable:
        return True
    texts, other_texts = (
        dict.fromkeys(document.text for document in documents if document.text)
        for documents in (one, two)
    )
    if not texts.keys().isdisjoint(other_texts):
        return True
    pairs = islice(product(texts, other_texts), _MAX_TEXT_PAIRS)
    return any(a in b or b in a for a, b in pairs)


def _normalise_note(document: Document) -> str:
    """Return the text of a note for comparison, ignoring case and white space.

    For a note of a single sentence it returns "", because equal sentences do not imply
    equal notes.
    """
    keys = list_sentence_keys(document)
    return "\n".join(keys) if len(keys) > 1 else ""


def _compare_sites(
    sites: Sequence[SiteData], sentences: Mapping[tuple[str, str], _SentenceCounts]
) -> Iterator[Finding]:
    """Yield findings about unwanted and missing overlap between sites.

    Args:
        sites: The sites.
        sentences: The sentences of each part, by site and part.
    """
    for site_id, number in Counter(site.id for site in sites).items():
        if number > 1:
            yield _make_finding(site_id, "site_ids", {"sites": number})
    if len(sites) < 2:
        return
    for site in sites:
        others = [other for other in sites if other is not site]
        other_types = sorted({t for other in others for t in other.tags.types})
        if set(site.tags.types).isdisjoint(other_types):
            yield _make_finding(
                site.id,
                "no_shared_types",
                {},
                own=_join_in_braces(site.tags.types),
                known=_join_in_braces(other_types),
            )
        other_train = sum(
            (sentences[other.id, "train"] for other in others), Counter[str]()
        )
        test = sentences[site.id, "test"]
        yield from _find_shared_sentences(
            other_train, test, site.id, "leakage_between_sites"
        )
    forms = len(find_overlapping_forms(site.train for site in sites))
    yield _make_finding("all sites", "overlapping_forms", {"forms": forms})


class _SharedNotes(NamedTuple):
    """The notes that two sites have in common.

    Attributes:
        number: The number of common notes.
        of: The number of notes of the smaller site.
        smaller: Name of the smaller site.
        larger: Name of the other site.
    """

    number: int
    of: int
    smaller: str
    larger: str


def find_notes_of_several_sites(
    texts_by_site: Mapping[str, Iterable[str]],
) -> Iterator[Finding]:
    """Yield a warning for each pair of sites that have many notes in common.

    Notes are compared ignoring case and white space; notes of fewer than `MIN_WORDS`
    words are ignored. Memory does not grow with the number of notes.

    Args:
        texts_by_site: The texts of each site's notes by the site's name.

    Raises:
        FednotesError: The temporary folder is full.
    """
    if len(texts_by_site) < 2:
        return
    with SharedValues() as notes:
        for site, texts in texts_by_site.items():
            notes.add(site, _normalise_long(texts))
        sizes = notes.count_distinct()
        shared = [
            _SharedNotes(number, min(sizes[a], sizes[b]), *_order_by_size(a, b, sizes))
            for (a, b), number in notes.count_shared().items()
        ]
    many = [pair for pair in shared if pair.number >= MANY_SHARED * pair.of]
    many.sort(key=lambda pair: -pair.number)
    for pair in many[:_MAX_PAIRS]:
        counts = {"notes": pair.number, "of": pair.of}
        sites = f"{pair.smaller}, {pair.larger}"
        yield _make_finding(sites, "equal_notes", counts, a=pair.smaller, b=pair.larger)
    if len(many) > _MAX_PAIRS:
        counts = {"pairs": len(many) - _MAX_PAIRS}
        yield _make_finding("all sites", "more:equal_notes", counts)


def _normalise_long(texts: Iterable[str]) -> Iterator[str]:
    """Yield normalised texts of at least `MIN_WORDS` words for comparison."""
    for text in map(normalise, texts):
        if text.count(" ") >= MIN_WORDS - 1:
            yield text


def _order_by_size(a: str, b: str, sizes: Mapping[str, int]) -> tuple[str, str]:
    """Return the names of two sites, the smaller site first."""
    return (a, b) if sizes[a] <= sizes[b] else (b, a)
