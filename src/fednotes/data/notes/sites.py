"""Corpora of notes → sites for pre-training, streamed: no text stays in memory.

    scan      one pass over each corpus: whose notes, how long, a hash of each; nothing else stays
    homes     patients, or notes, dealt into silos where these are asked for
    held out  patients of each site, to judge a model by
    source    every later pass takes a site's notes from the files again, one at a time

Per note about 80 bytes are kept, and each patient's key once: 0.2 GB for two million
notes. A silo stands for a hospital: a patient's notes are in one of them only (Liu and
Miller 2020, section 3.2).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from fednotes.core.errors import ConfigError, DataError, FednotesError, within
from fednotes.core.seeds import rng_of, seed_of
from fednotes.data.notes import SHARED, Key, Note, NoteStream, left_out, patient_of
from fednotes.data.overlap import TextIndex, shares_sentence

NoteSource = Callable[[], Iterable[Note]]  # gives the notes from the first one on
By = Literal["patient", "document"]
_DIGEST = 32  # bytes


@dataclass(frozen=True)
class SiteNotes:
    """One site's notes. Never leaves the site.

    train, valid: sources, whose notes share no patient; each call reads from the start.
    train_patients is the site's sample size (Liu and Miller 2020, Eq. 1). longest:
    characters of the longest note. content: the fingerprint, where it is known already.
    """

    id: str
    train: NoteSource
    valid: NoteSource
    train_notes: int
    valid_notes: int
    train_patients: int
    valid_patients: int
    train_characters: int
    valid_characters: int
    longest: int
    content: str = ""


def pooled_notes(sites: Sequence[SiteNotes]) -> SiteNotes:
    """One site, called "pooled", with the sites' notes in their order, part by part.

    Patients are added up: one whose notes lie at two sites counts twice.
    """
    sums = ("notes", "patients", "characters")
    names = [f"{part}_{what}" for part in ("train", "valid") for what in sums]
    return SiteNotes(
        "pooled",
        lambda: chain.from_iterable(site.train() for site in sites),
        lambda: chain.from_iterable(site.valid() for site in sites),
        **{name: sum(getattr(site, name) for site in sites) for name in names},
        longest=max((site.longest for site in sites), default=0),
    )


def fingerprint(site: SiteNotes) -> str:
    """SHA-256 of a site's texts, patients and parts; reads the notes unless it is
    known."""
    return site.content or _content(
        map(_digest, site.train()), map(_digest, site.valid())
    )


def _content(*parts: Iterable[bytes]) -> str:
    """The fingerprint of a site, from the digests of its training notes and of those
    held out."""
    sums = hashlib.sha256()
    for part in parts:
        sums.update(b"\x1d")
        for digest in part:
            sums.update(digest)
    return sums.hexdigest()


def _digest(note: Note) -> bytes:
    """SHA-256 of whose note it is and what it says, 32 bytes."""
    sums = hashlib.sha256()
    for part in (*patient_of(note), note.text):
        data = part.encode("utf-8")
        sums.update(len(data).to_bytes(8, "little") + data)
    return sums.digest()


def assign(keys: Iterable[Key], silos: int, seed: int = 0) -> dict[Key, int]:
    """A silo (from 0) for each key; silos' numbers of keys differ by one at most.

    Deals depend on the seed and on which keys there are, not on their order. Raises
    ConfigError for fewer than one silo, DataError for fewer keys than silos.
    """
    if silos < 1:
        raise ConfigError(f"the number of silos must be at least 1, not {silos}")
    distinct = sorted(set(keys))
    if (number := len(distinct)) < silos:
        told = f"{number} patients or notes cannot fill {silos} silos"
        raise DataError(
            f"{told}: ask for {number or 'fewer'} at most, or give more notes"
        )
    order = rng_of(seed, "silos").permutation(number)
    return {
        distinct[at]: position % silos for position, at in enumerate(order.tolist())
    }


@dataclass(frozen=True)
class NoteCorpus:
    """Notes before they are dealt out.

    where: the files, for messages. valid_fraction: of the patients. max_notes: of the
    training notes, those with the lowest hash of (seed, patient, note's id); 0 is all.
    exclude: notes that share a sentence with it are left out.
    """

    id: str
    notes: NoteSource
    where: str
    valid_fraction: float = 0.05
    max_notes: int = 0
    exclude: TextIndex | None = None


@dataclass(eq=False)
class _Scan:
    """What one pass over a corpus leaves, by note: (notes,) each.

    patients: positions in the table of patients, -1 where the note is left out. order:
    the hash that chooses among notes, zeros where none is chosen. digests: _DIGEST
    bytes a note.
    code: 2 · site for its training notes, one more for those held out, -1 for others.
    """

    corpus: NoteCorpus
    patients: np.ndarray
    lengths: np.ndarray
    order: np.ndarray
    digests: bytes
    left_out: str
    code: np.ndarray

    def digest(self, at: int) -> bytes:
        return self.digests[at * _DIGEST : (at + 1) * _DIGEST]

    def again(self, wanted: bytes) -> Iterator[Note]:
        """The notes at which `wanted` is not 0. Raises DataError if files changed."""
        told = f"the notes in {self.corpus.where} changed while they were used: start again"
        changed = DataError(f"site {self.corpus.id!r}: {told}")
        at = 0
        # not by enumerate, which holds on to the text before
        for note in self.corpus.notes():
            if at == len(wanted):
                raise changed
            if wanted[at]:
                if _digest(note) != self.digest(at):
                    raise changed
                yield note
            del note
            at += 1
        if at < len(wanted):
            raise changed


def site_notes(
    corpora: Sequence[NoteCorpus], seed: int, silos: int = 0, by: By = "patient"
) -> tuple[tuple[SiteNotes, ...], tuple[str, ...]]:
    """A site for each corpus, or the silos that all of them are dealt into; and what
    was done.

    silos: 0 for none, else `silo1` …, by `assign`. Of each site a share of patients is
    held out, at least one of two or more, fewer than all. Equal arguments and files
    give equal sites. Each corpus is read once here.

    Raises ConfigError for a corpus without notes and a site without training notes;
    DataError for files that cannot be read, and later, from a source, if they have
    changed.
    """
    table: dict[Key, int] = {}  # patients' positions, over all corpora
    scans = [_scanned(corpus, seed, table) for corpus in corpora]
    patients = list(table)
    told = [f"{s.corpus.id}: notes left out: {s.left_out}" for s in scans if s.left_out]
    if silos:
        names = [f"silo{number + 1}" for number in range(silos)]
        _deal(scans, patients, seed, silos, by)
        kept = sum(int((scan.code >= 0).sum()) for scan in scans)
        told.append(
            f"{kept:,} notes of {len(table):,} patients in {silos} silos by {by}"
        )
    else:
        names = [corpus.id for corpus in corpora]
        for number, scan in enumerate(scans):
            scan.code = np.where(scan.patients < 0, -1, 2 * number)
    for number in range(len(names)):
        _hold_out(scans, 2 * number, patients, seed)
    for scan in scans:
        most, training = scan.corpus.max_notes, np.flatnonzero(scan.code % 2 == 0)
        if 0 < most < len(training):
            by_hash = training[np.argsort(scan.order[training], kind="stable")]
            scan.code[by_hash[most:]] = -1
            told.append(
                f"{scan.corpus.id}: {most:,} of {len(training):,} training notes are used"
            )
    sites = tuple(_site(name, scans, 2 * number) for number, name in enumerate(names))
    for site in sites:
        if not site.train_notes:
            remedy = "raise max_notes, or ask for fewer silos"
            raise ConfigError(f"site {site.id!r}: no training note is left; {remedy}")
        if site.train_patients == 1 and not site.valid_notes:
            told.append(
                f"{site.id}: one patient, so nothing is held out to judge a model by"
            )
    return sites, tuple(told)


def _scanned(corpus: NoteCorpus, seed: int, table: dict[Key, int]) -> _Scan:
    patients, lengths, order, digests = array("q"), array("q"), array("Q"), bytearray()
    excluded = 0
    with within(f"site {corpus.id!r}", FednotesError):
        stream = corpus.notes()
        for note in stream:
            key = patient_of(note)
            out = corpus.exclude is not None and shares_sentence(
                note.text, corpus.exclude
            )
            excluded += out
            patients.append(-1 if out else table.setdefault(key, len(table)))
            lengths.append(len(note.text))
            order.append(
                seed_of(seed, "max_notes", *key, note.id) if corpus.max_notes else 0
            )
            digests += _digest(note)
            del note  # or two texts would be in memory while the next one is read
    counts = stream.counts if isinstance(stream, NoteStream) else {}
    gone = left_out({**counts, SHARED: excluded})
    if len(patients) == excluded:
        why = f" but {gone}" if gone else ": it is empty"
        raise ConfigError(
            f"site {corpus.id!r}: there is no note in {corpus.where}{why}"
        )
    arrays = (np.array(patients), np.array(lengths), np.array(order))
    return _Scan(corpus, *arrays, bytes(digests), gone, np.array([]))


def _deal(
    scans: Sequence[_Scan], patients: Sequence[Key], seed: int, silos: int, by: By
) -> None:
    """Send each note that is not left out to a silo."""
    keys = [list(_units(scan, patients, by)) for scan in scans]
    with within(f"[silos] number = {silos}", DataError, become=ConfigError):
        where = assign(
            (key for own in keys for key in own if key is not None), silos, seed
        )
    for scan, own in zip(scans, keys, strict=True):
        scan.code = np.array(
            [-1 if key is None else 2 * where[key] for key in own], np.int64
        )


def _units(scan: _Scan, patients: Sequence[Key], by: By) -> Iterator[Key | None]:
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
            yield (scan.corpus.id, digest.hex(), str(seen[digest]))


def _hold_out(
    scans: Sequence[_Scan], code: int, patients: Sequence[Key], seed: int
) -> None:
    """Hold out notes of one site.

    A patient's chance is its corpus' fraction: those with the lowest -log(u) /
    fraction, with a hash of seed and patient as u (Efraimidis and Spirakis 2006), are
    held out.
    """
    fractions: dict[int, float] = {}
    for scan in scans:
        for patient in np.unique(scan.patients[scan.code == code]).tolist():
            fractions[patient] = max(
                scan.corpus.valid_fraction, fractions.get(patient, 0.0)
            )
    drawn = {p: f for p, f in fractions.items() if f}
    number = min(len(fractions) - 1, max(round(sum(drawn.values())), 1 if drawn else 0))

    def rank(patient: int) -> float:
        uniform = (seed_of(seed, "valid", *patients[patient]) + 1) / (2**63 + 1)
        return -math.log(uniform) / drawn[patient]

    chosen = np.array(sorted(drawn, key=rank)[:number], np.int64)
    for scan in scans:
        scan.code[(scan.code == code) & np.isin(scan.patients, chosen)] += 1


def _site(name: str, scans: Sequence[_Scan], train: int) -> SiteNotes:
    """A site whose training notes have the code `train`, and whose others the next one."""
    counts: dict[str, int] = {"longest": 0}
    digests = []
    for part, code in (("train", train), ("valid", train + 1)):
        notes = [(scan, np.flatnonzero(scan.code == code)) for scan in scans]
        sizes = np.concatenate([scan.lengths[at] for scan, at in notes])
        found = np.concatenate([scan.patients[at] for scan, at in notes])
        counts |= {
            f"{part}_notes": len(sizes),
            f"{part}_patients": len(np.unique(found)),
            f"{part}_characters": int(sizes.sum()),
            "longest": max(counts["longest"], int(sizes.max(initial=0))),
        }
        digests.append([scan.digest(i) for scan, at in notes for i in at.tolist()])
    return SiteNotes(
        name,
        _source(scans, train),
        _source(scans, train + 1),
        **counts,
        content=_content(*digests),
    )


def _source(scans: Sequence[_Scan], code: int) -> NoteSource:
    """The notes of one code, in the order of the corpora and their files."""
    concerned = [scan for scan in scans if (scan.code == code).any()]
    return lambda: chain.from_iterable(
        scan.again((scan.code == code).tobytes()) for scan in concerned
    )
