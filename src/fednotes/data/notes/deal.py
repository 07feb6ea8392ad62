"""Corpora of notes → sites, streamed: no text stays in memory.

    scan      one pass over each corpus: whose notes, how long, a hash of each; nothing else stays
    homes     patients, or notes, dealt into silos where these are asked for
    held out  patients of each site, to judge a model by
    source    every later pass takes a site's notes from the files again, one at a time

Per note about 80 bytes are kept, and each patient's key once: 0.2 GB for two million notes.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.seeds import seed_of
from fednotes.data.notes import Note, NoteCounts
from fednotes.data.notes.sites import NoteSource, NoteStreams, SiteNotes, content_of, digest_of
from fednotes.data.overlap import TextIndex, shares_sentence
from fednotes.data.silos import Key, assign, patient_of

By = Literal["patient", "document"]
_DIGEST = 32  # bytes


@dataclass(frozen=True)
class NoteCorpus:
    """Notes before they are dealt out.

    where: the files, for messages. valid_fraction: of the patients. max_notes: of the training
    notes, those with the lowest hash of (seed, patient, note's id); 0 is all. exclude: notes
    that share a sentence with it are left out.
    """

    id: str
    notes: NoteSource
    where: str
    valid_fraction: float = 0.05
    max_notes: int = 0
    exclude: TextIndex | None = None


@dataclass(frozen=True, eq=False)
class _Scan:
    """What one pass over a corpus leaves, by note: (notes,) each.

    patients: positions in the table of patients, -1 where the note is left out. order: the
    hash that chooses among notes, zeros where none is chosen. digests: _DIGEST bytes a note.
    """

    patients: np.ndarray
    lengths: np.ndarray
    order: np.ndarray
    digests: bytes
    excluded: int
    counts: NoteCounts

    def digest(self, at: int) -> bytes:
        return self.digests[at * _DIGEST : (at + 1) * _DIGEST]


def site_notes(
    corpora: Sequence[NoteCorpus], seed: int, silos: int = 0, by: By = "patient"
) -> tuple[tuple[SiteNotes, ...], tuple[str, ...]]:
    """A site for each corpus, or the silos that all of them are dealt into; and what was done.

    silos: 0 for none, else `silo1` …, by `data/silos.assign`. Of each site a share of patients
    is held out, at least one of two or more, fewer than all. Equal arguments and files give
    equal sites. Each corpus is read once here.

    Raises ConfigError for a corpus without notes and a site without training notes; DataError
    for files that cannot be read, and later, from a source, if they have changed.
    """
    table: dict[Key, int] = {}  # patients' positions, over all corpora
    scans = [_scanned(corpus, seed, table) for corpus in corpora]
    told = [
        line for corpus, scan in zip(corpora, scans, strict=True) for line in _left(corpus, scan)
    ]
    names, homes = _homes(corpora, scans, list(table), seed, silos, by)
    if silos:
        kept = sum(int((home >= 0).sum()) for home in homes)
        told.append(f"{kept:,} notes of {len(table):,} patients in {silos} silos by {by}")
    held = _held_out(corpora, scans, homes, list(table), len(names), seed)
    codes = [np.where(home < 0, -1, 2 * home + out) for home, out in zip(homes, held, strict=True)]
    for corpus, scan, code in zip(corpora, scans, codes, strict=True):
        told += _chosen(corpus, scan, code)
    sites = tuple(
        _site(name, corpora, scans, codes, 2 * number) for number, name in enumerate(names)
    )
    for site in sites:
        if not site.train_notes:
            raise ConfigError(
                f"site {site.id!r}: no training note is left; raise max_notes, or ask for fewer "
                "silos"
            )
        if site.train_patients == 1 and not site.valid_notes:
            told.append(f"{site.id}: one patient, so nothing is held out to judge a model by")
    return sites, tuple(told)


def _scanned(corpus: NoteCorpus, seed: int, table: dict[Key, int]) -> _Scan:
    patients, lengths, order, digests = array("q"), array("q"), array("Q"), bytearray()
    excluded = 0
    try:
        stream = corpus.notes()
        for note in stream:
            key = patient_of(note)
            if corpus.exclude is not None and shares_sentence(note.text, corpus.exclude):
                excluded += 1
                patients.append(-1)
            else:
                patients.append(table.setdefault(key, len(table)))
            lengths.append(len(note.text))
            order.append(seed_of(seed, "max_notes", *key, note.id) if corpus.max_notes else 0)
            digests += digest_of(note)
            del note  # or two texts would be in memory while the next one is read
    except FednotesError as error:
        raise type(error)(f"site {corpus.id!r}: {error}") from error
    counts = stream.counts if isinstance(stream, NoteStreams) else NoteCounts(len(patients))
    if len(patients) == excluded:
        gone = _reasons(counts, excluded)
        raise ConfigError(
            f"site {corpus.id!r}: there is no note in {corpus.where}"
            + (f" but {gone}" if gone else ": it is empty")
        )
    return _Scan(
        np.array(patients), np.array(lengths), np.array(order), bytes(digests), excluded, counts
    )


def _reasons(counts: NoteCounts, excluded: int) -> str:
    numbers = {
        "without text": counts.empty,
        "marked as errors": counts.errors,
        "of another category": counts.other_category,
        "that share a sentence with an excluded corpus": excluded,
    }
    return ", ".join(f"{number:,} {what}" for what, number in numbers.items() if number)


def _left(corpus: NoteCorpus, scan: _Scan) -> Iterator[str]:
    if gone := _reasons(scan.counts, scan.excluded):
        yield f"{corpus.id}: notes left out: {gone}"


def _homes(
    corpora: Sequence[NoteCorpus],
    scans: Sequence[_Scan],
    patients: Sequence[Key],
    seed: int,
    silos: int,
    by: By,
) -> tuple[list[str], list[np.ndarray]]:
    """The sites' names, and the site of each corpus' notes, (notes,); -1 for none."""
    if not silos:
        homes = [np.where(scan.patients < 0, -1, at) for at, scan in enumerate(scans)]
        return [corpus.id for corpus in corpora], homes
    keys = [list(_units(c, s, patients, by)) for c, s in zip(corpora, scans, strict=True)]
    try:
        where = assign((key for own in keys for key in own if key is not None), silos, seed)
    except DataError as error:
        raise ConfigError(f"[silos] number = {silos}: {error}") from error
    homes = [np.array([-1 if k is None else where[k] for k in own], np.int64) for own in keys]
    return [f"silo{number + 1}" for number in range(silos)], homes


def _units(
    corpus: NoteCorpus, scan: _Scan, patients: Sequence[Key], by: By
) -> Iterator[Key | None]:
    """What is never parted, for each note; None for one that is left out.

    A note is told from others by its hash, and from one like it by its number.
    """
    seen: Counter[bytes] = Counter()
    for at, patient in enumerate(scan.patients.tolist()):
        if patient < 0:
            yield None
        elif by == "patient":
            yield patients[patient]
        else:
            digest = scan.digest(at)
            seen[digest] += 1
            yield (corpus.id, digest.hex(), str(seen[digest]))


def _held_out(
    corpora: Sequence[NoteCorpus],
    scans: Sequence[_Scan],
    homes: Sequence[np.ndarray],
    patients: Sequence[Key],
    sites: int,
    seed: int,
) -> list[np.ndarray]:
    """Whether each corpus' notes are held out, (notes,) bool.

    A patient's chance is its corpus' fraction: those with the lowest -log(u) / fraction, with a
    hash of seed and patient as u (Efraimidis and Spirakis 2006), are held out.
    """
    held = [np.zeros(len(home), bool) for home in homes]
    for site in range(sites):
        fractions: dict[int, float] = {}
        for corpus, scan, home in zip(corpora, scans, homes, strict=True):
            for patient in np.unique(scan.patients[home == site]).tolist():
                fractions[patient] = max(corpus.valid_fraction, fractions.get(patient, 0.0))
        drawn = {p: f for p, f in fractions.items() if f}
        number = min(len(fractions) - 1, max(round(sum(drawn.values())), 1 if drawn else 0))
        ranks = {p: -math.log(_uniform(seed, patients[p])) / f for p, f in drawn.items()}
        chosen = np.array(sorted(ranks, key=ranks.__getitem__)[:number], np.int64)
        for scan, home, out in zip(scans, homes, held, strict=True):
            out |= (home == site) & np.isin(scan.patients, chosen)
    return held


def _uniform(seed: int, key: Key) -> float:
    return (seed_of(seed, "valid", *key) + 1) / (2**63 + 1)


def _chosen(corpus: NoteCorpus, scan: _Scan, code: np.ndarray) -> Iterator[str]:
    """Leaves out, in place, all but `max_notes` of a corpus' training notes."""
    training = np.flatnonzero((code >= 0) & (code % 2 == 0))
    if 0 < corpus.max_notes < len(training):
        by_hash = training[np.argsort(scan.order[training], kind="stable")]
        code[by_hash[corpus.max_notes :]] = -1
        yield f"{corpus.id}: {corpus.max_notes:,} of {len(training):,} training notes are used"


def _site(
    name: str,
    corpora: Sequence[NoteCorpus],
    scans: Sequence[_Scan],
    codes: Sequence[np.ndarray],
    train: int,
) -> SiteNotes:
    """A site whose training notes have the code `train`, and whose others the next one."""
    whole = list(zip(corpora, scans, codes, strict=True))
    counts: dict[str, int] = {}
    digests = []
    for part, code in (("train", train), ("valid", train + 1)):
        notes = [np.flatnonzero(own == code) for own in codes]
        found = [scan.patients[at] for scan, at in zip(scans, notes, strict=True)]
        sizes = np.concatenate([s.lengths[at] for s, at in zip(scans, notes, strict=True)])
        counts |= {
            f"{part}_notes": len(sizes),
            f"{part}_patients": len(np.unique(np.concatenate(found))),
            f"{part}_characters": int(sizes.sum()),
            "longest": max(counts.get("longest", 0), int(sizes.max(initial=0))),
        }
        digests.append(
            [s.digest(i) for s, at in zip(scans, notes, strict=True) for i in at.tolist()]
        )
    return SiteNotes(
        name,
        _source(whole, train),
        _source(whole, train + 1),
        **counts,
        content=content_of(*digests),
    )


def _source(whole: Sequence[tuple[NoteCorpus, _Scan, np.ndarray]], wanted: int) -> NoteSource:
    """The notes of one code, in the order of the corpora and their files."""
    concerned = [item for item in whole if (item[2] == wanted).any()]

    def read() -> Iterator[Note]:
        for corpus, scan, code in concerned:
            yield from _again(corpus, scan, (code == wanted).tobytes())

    return read


def _again(corpus: NoteCorpus, scan: _Scan, wanted: bytes) -> Iterator[Note]:
    """The notes of a corpus at which `wanted` is not 0. Raises DataError if files changed."""
    at = 0
    for note in corpus.notes():  # not by enumerate, which holds on to the text before
        if at == len(wanted):
            raise _changed(corpus)
        if wanted[at]:
            if digest_of(note) != scan.digest(at):
                raise _changed(corpus)
            yield note
        del note
        at += 1
    if at < len(wanted):
        raise _changed(corpus)


def _changed(corpus: NoteCorpus) -> DataError:
    return DataError(
        f"site {corpus.id!r}: the notes in {corpus.where} changed while they were used: start again"
    )
