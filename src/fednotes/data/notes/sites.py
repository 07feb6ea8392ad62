"""Conversion of note corpora to sites for pre-training, without text in memory.

    scan         one pass over each corpus records the patient, the length and a hash of
                 each note; nothing else is stored
    silos        patients or notes are assigned to silos, if the job requests them
    validation   the notes of some patients of each site are kept for evaluation
    source       every later pass rereads a site's notes from the files, one at a time

This takes about 80 bytes per note, and each patient's key once: 0.2 GB for two million
notes. A silo represents a hospital: a patient's notes are in only one of them (Liu and
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

from fednotes.core.errors import ConfigError, DataError, FednotesError, naming_place
from fednotes.core.seeds import rng_of, seed_of
from fednotes.data.notes import (
    SHARED,
    Key,
    Note,
    NoteStream,
    describe_left_out,
    make_patient_key,
)
from fednotes.data.overlap import TextIndex, shares_sentence

NoteSource = Callable[[], Iterable[Note]]  # each call starts at the first note
By = Literal["patient", "document"]
_DIGEST_SIZE = 32  # bytes
_LEFT_OUT = -1  # replaces a patient or a part


@dataclass(frozen=True)
class SiteNotes:
    """One site's notes, which never leave the site.

    Attributes:
        id: The site's name.
        train: Source of the training notes.
        valid: Source of the validation notes, which share no patient with `train`.
        train_notes: Number of training notes.
        valid_notes: Number of validation notes.
        train_patients: Number of patients of the training notes, the site's sample size
            (Liu and Miller 2020, Eq. 1).
        valid_patients: Number of patients of the validation notes.
        train_characters: Number of characters of the training notes.
        valid_characters: Number of characters of the validation notes.
        longest: Number of characters of the longest note.
        content: The fingerprint; "" if not yet known.
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


def pool_notes(sites: Sequence[SiteNotes]) -> SiteNotes:
    """Return one site, "pooled", with the notes of all sites in order.

    Patients are summed, so a patient with notes at two sites counts twice.
    """
    return SiteNotes(
        id="pooled",
        train=lambda: chain.from_iterable(site.train() for site in sites),
        valid=lambda: chain.from_iterable(site.valid() for site in sites),
        train_notes=sum(site.train_notes for site in sites),
        valid_notes=sum(site.valid_notes for site in sites),
        train_patients=sum(site.train_patients for site in sites),
        valid_patients=sum(site.valid_patients for site in sites),
        train_characters=sum(site.train_characters for site in sites),
        valid_characters=sum(site.valid_characters for site in sites),
        longest=max((site.longest for site in sites), default=0),
    )


def fingerprint_notes(site: SiteNotes) -> str:
    """Return the SHA-256 of a site's texts, patients and parts.

    The notes are read unless the fingerprint is known.
    """
    return site.content or _fingerprint_digests(
        map(_digest_note, site.train()), map(_digest_note, site.valid())
    )


def _fingerprint_digests(*parts: Iterable[bytes]) -> str:
    """Return the fingerprint of a site.

    Args:
        parts: The digests of the training notes, then of the validation notes.
    """
    total = hashlib.sha256()
    for part in parts:
        total.update(b"\x1d")
        for digest in part:
            total.update(digest)
    return total.hexdigest()


def _digest_note(note: Note) -> bytes:
    """Return the SHA-256 of a note's patient and text."""
    digest = hashlib.sha256()
    for part in (*make_patient_key(note), note.text):
        data = part.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def assign_to_silos(keys: Iterable[Key], silos: int, seed: int = 0) -> dict[Key, int]:
    """Assign keys to silos at random; return the silo of each key, from 0.

    The numbers of keys per silo differ by at most one. The result depends on the seed
    and the set of keys, not on their order.

    Raises:
        ConfigError: There is less than one silo.
        DataError: There are fewer keys than silos.
    """
    if silos < 1:
        raise ConfigError(f"the number of silos must be at least 1, not {silos}")
    distinct = sorted(set(keys))
    number = len(distinct)
    if number < silos:
        raise DataError(
            f"{number} patients or notes cannot fill {silos} silos: ask for "
            f"at most {number or 'fewer'}, or give more notes"
        )
    order = rng_of(seed, "silos").permutation(number)
    return {
        distinct[index]: position % silos
        for position, index in enumerate(order.tolist())
    }


@dataclass(frozen=True)
class NoteCorpus:
    """A corpus of notes before the conversion to sites.

    Attributes:
        id: The name of the corpus.
        notes: Source of the notes.
        where: The files, for messages.
        valid_fraction: The fraction of patients to hold out.
        max_notes: Number of training notes to use: those with the lowest hash of (seed,
            patient, note's id). 0 uses all.
        exclude: Notes that share a sentence with this index are left out.
    """

    id: str
    notes: NoteSource
    where: str
    valid_fraction: float = 0.05
    max_notes: int = 0
    exclude: TextIndex | None = None


@dataclass(eq=False)
class _Scan:
    """The results of one pass over a corpus.

    Attributes:
        corpus: The corpus.
        patients: (notes,) indices in the table of patients, -1 for notes that are left
            out.
        lengths: (notes,) characters.
        order: (notes,) hashes that determine which notes are used; 0 without
            `max_notes`.
        digests: The digests, `_DIGEST_SIZE` bytes per note.
        left_out: A description of the omitted records.
        part_numbers: (notes,) the part of each note: 2 · site for training notes,
            2 · site + 1 for validation notes, -1 for notes that are not used.
    """

    corpus: NoteCorpus
    patients: np.ndarray
    lengths: np.ndarray
    order: np.ndarray
    digests: bytes
    left_out: str
    part_numbers: np.ndarray

    def get_digest(self, index: int) -> bytes:
        """Return the digest of one note."""
        return self.digests[index * _DIGEST_SIZE : (index + 1) * _DIGEST_SIZE]

    def read_again(self, is_wanted: bytes) -> Iterator[Note]:
        """Yield the notes whose byte in `is_wanted` is not 0.

        Raises:
            DataError: The files have changed.
        """
        changed = DataError(
            f"site {self.corpus.id!r}: the notes in {self.corpus.where} changed while "
            "they were used: start again"
        )
        index = 0
        # `enumerate` would keep a reference to the previous text.
        for note in self.corpus.notes():
            if index == len(is_wanted):
                raise changed
            if is_wanted[index]:
                if _digest_note(note) != self.get_digest(index):
                    raise changed
                yield note
            del note
            index += 1
        if index < len(is_wanted):
            raise changed


def make_sites(
    corpora: Sequence[NoteCorpus], seed: int, silos: int = 0, by: By = "patient"
) -> tuple[tuple[SiteNotes, ...], tuple[str, ...]]:
    """Return the sites of corpora, and remarks for the user.

    Each corpus is a site, unless all are distributed to silos. A fraction of each
    site's patients is held out: at least one of two or more, but not all. Equal
    arguments and files give equal sites. Each corpus is read once.

    Args:
        corpora: The corpora.
        seed: Seed of the draws.
        silos: Number of silos, which are named `silo1` and so on; 0 for none.
        by: The unit that is assigned to silos.

    Raises:
        ConfigError: A corpus has no notes, or a site no training notes.
        DataError: Files cannot be read, or, when a source is read, have changed.
    """
    table: dict[Key, int] = {}  # the indices of patients, over all corpora
    scans = [_scan_corpus(corpus, seed, table) for corpus in corpora]
    patients = list(table)
    remarks = [
        f"{scan.corpus.id}: notes left out: {scan.left_out}"
        for scan in scans
        if scan.left_out
    ]
    if silos:
        names = [f"silo{number + 1}" for number in range(silos)]
        _assign_silos(scans, patients, seed, silos, by)
        dealt = sum(int((scan.part_numbers >= 0).sum()) for scan in scans)
        remarks.append(
            f"{dealt:,} notes of {len(table):,} patients in {silos} silos by {by}"
        )
    else:
        names = [corpus.id for corpus in corpora]
        for number, scan in enumerate(scans):
            scan.part_numbers = np.where(scan.patients < 0, _LEFT_OUT, 2 * number)
    for number in range(len(names)):
        _choose_validation_notes(scans, 2 * number, patients, seed)
    for scan in scans:
        remarks += _limit_training_notes(scan)
    sites = tuple(
        _make_site(name, scans, 2 * number) for number, name in enumerate(names)
    )
    for site in sites:
        if not site.train_notes:
            raise ConfigError(
                f"site {site.id!r}: no training note is left: raise max_notes, or ask "
                "for fewer silos"
            )
        if site.train_patients == 1 and not site.valid_notes:
            remarks.append(
                f"{site.id}: only one patient, so nothing is held out for validation"
            )
    return sites, tuple(remarks)


def _limit_training_notes(scan: _Scan) -> list[str]:
    """Leave out training notes beyond `max_notes`; return remarks about this."""
    limit = scan.corpus.max_notes
    training = np.flatnonzero(scan.part_numbers % 2 == 0)
    if not 0 < limit < len(training):
        return []
    by_hash = training[np.argsort(scan.order[training], kind="stable")]
    scan.part_numbers[by_hash[limit:]] = _LEFT_OUT
    return [f"{scan.corpus.id}: {limit:,} of {len(training):,} training notes are used"]


def _scan_corpus(corpus: NoteCorpus, seed: int, table: dict[Key, int]) -> _Scan:
    """Read a corpus once; return the facts about its notes.

    Args:
        corpus: The corpus.
        seed: Seed of the draws.
        table: The indices of patients; those of the corpus are added.
    """
    patients = array("q")
    lengths = array("q")
    order = array("Q")
    digests = bytearray()
    excluded = 0
    with naming_place(f"site {corpus.id!r}", FednotesError):
        stream = corpus.notes()
        for note in stream:
            key = make_patient_key(note)
            is_excluded = corpus.exclude is not None and shares_sentence(
                note.text, corpus.exclude
            )
            if is_excluded:
                excluded += 1
                patients.append(_LEFT_OUT)
            else:
                patients.append(table.setdefault(key, len(table)))
            lengths.append(len(note.text))
            order.append(
                seed_of(seed, "max_notes", *key, note.id) if corpus.max_notes else 0
            )
            digests += _digest_note(note)
            del note  # otherwise two texts would be in memory while the next is read
    counts = stream.counts if isinstance(stream, NoteStream) else {}
    left_out = describe_left_out({**counts, SHARED: excluded})
    if len(patients) == excluded:
        but = f" but {left_out}" if left_out else ""
        raise ConfigError(
            f"site {corpus.id!r}: found no usable notes in {corpus.where}{but}: check "
            "the path"
        )
    return _Scan(
        corpus=corpus,
        patients=np.array(patients),
        lengths=np.array(lengths),
        order=np.array(order),
        digests=bytes(digests),
        left_out=left_out,
        part_numbers=np.array([]),
    )


def _assign_silos(
    scans: Sequence[_Scan], patients: Sequence[Key], seed: int, silos: int, by: By
) -> None:
    """Make each note that is not left out a training note of a silo.

    Args:
        scans: The corpora; the parts of their notes change.
        patients: The keys of all patients.
        seed: Seed of the draws.
        silos: Number of silos.
        by: The unit that is assigned.
    """
    keys_of_scans = [list(_list_units(scan, patients, by)) for scan in scans]
    all_keys = (key for keys in keys_of_scans for key in keys if key is not None)
    with naming_place(f"[silos] number = {silos}", DataError, become=ConfigError):
        silo_of = assign_to_silos(all_keys, silos, seed)
    for scan, keys in zip(scans, keys_of_scans, strict=True):
        numbers = [_LEFT_OUT if key is None else 2 * silo_of[key] for key in keys]
        scan.part_numbers = np.array(numbers, np.int64)


def _list_units(scan: _Scan, patients: Sequence[Key], by: By) -> Iterator[Key | None]:
    """Yield the unit of each note that is assigned to a silo; None if it is left out.

    If notes are assigned one by one, the unit is the hash of the note and a number that
    distinguishes equal notes.
    """
    seen: Counter[bytes] = Counter()
    for index, patient in enumerate(scan.patients.tolist()):
        if patient < 0:
            yield None
        elif by == "patient":
            yield patients[patient]
        else:
            digest = scan.get_digest(index)
            seen[digest] += 1
            yield (scan.corpus.id, digest.hex(), str(seen[digest]))


def _choose_validation_notes(
    scans: Sequence[_Scan], part_number: int, patients: Sequence[Key], seed: int
) -> None:
    """Make the notes of a fraction of one site's patients its validation notes.

    A patient's probability is the fraction of the corpus: patients with the lowest
    −log(u) / fraction are held out, where u is a hash of seed and patient (Efraimidis
    and Spirakis 2006).

    Args:
        scans: The corpora; the parts of their notes change.
        part_number: The number of the site's training part.
        patients: The keys of all patients.
        seed: Seed of the draws.
    """
    fractions: dict[int, float] = {}
    for scan in scans:
        for patient in np.unique(
            scan.patients[scan.part_numbers == part_number]
        ).tolist():
            previous = fractions.get(patient, 0.0)
            fractions[patient] = max(scan.corpus.valid_fraction, previous)
    candidates = {patient: f for patient, f in fractions.items() if f}
    number = round(sum(candidates.values()))
    if candidates:
        number = max(number, 1)
    number = min(number, len(fractions) - 1)

    def rank(patient: int) -> float:
        """Return a random number of a patient; the lowest ones are chosen."""
        uniform = (seed_of(seed, "valid", *patients[patient]) + 1) / (2**63 + 1)
        return -math.log(uniform) / candidates[patient]

    chosen = np.array(sorted(candidates, key=rank)[:number], np.int64)
    for scan in scans:
        is_validation = (scan.part_numbers == part_number) & np.isin(
            scan.patients, chosen
        )
        scan.part_numbers[is_validation] += 1


def _make_site(name: str, scans: Sequence[_Scan], part_number: int) -> SiteNotes:
    """Return a site.

    Args:
        name: The name of the site.
        scans: The corpora.
        part_number: The number of its training part; its validation part is the next.
    """
    train = _Part(scans, part_number)
    valid = _Part(scans, part_number + 1)
    return SiteNotes(
        id=name,
        train=train.make_source(),
        valid=valid.make_source(),
        train_notes=len(train.lengths),
        valid_notes=len(valid.lengths),
        train_patients=len(np.unique(train.patients)),
        valid_patients=len(np.unique(valid.patients)),
        train_characters=int(train.lengths.sum()),
        valid_characters=int(valid.lengths.sum()),
        longest=max(
            int(train.lengths.max(initial=0)), int(valid.lengths.max(initial=0))
        ),
        content=_fingerprint_digests(train.list_digests(), valid.list_digests()),
    )


class _Part:
    """The notes of one part of a site, in the order of the corpora and their files.

    Args:
        scans: The corpora.
        part_number: The number of the part, as in `_Scan`.
    """

    def __init__(self, scans: Sequence[_Scan], part_number: int) -> None:
        self._scans = scans
        self._part_number = part_number
        self._indices = [
            np.flatnonzero(scan.part_numbers == part_number) for scan in scans
        ]
        pairs = list(zip(scans, self._indices, strict=True))
        self.lengths = np.concatenate([scan.lengths[at] for scan, at in pairs])
        self.patients = np.concatenate([scan.patients[at] for scan, at in pairs])

    def list_digests(self) -> Iterator[bytes]:
        """Yield the digests of the notes."""
        for scan, indices in zip(self._scans, self._indices, strict=True):
            for index in indices.tolist():
                yield scan.get_digest(index)

    def make_source(self) -> NoteSource:
        """Return a source that reads the notes from their files."""
        part_number = self._part_number
        scans = [
            scan for scan in self._scans if (scan.part_numbers == part_number).any()
        ]
        return lambda: chain.from_iterable(
            scan.read_again((scan.part_numbers == part_number).tobytes())
            for scan in scans
        )
