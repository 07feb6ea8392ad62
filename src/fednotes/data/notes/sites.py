"""Notes of sites for pre-training: sources that are read anew at each pass, and counts.

`data/notes/deal.py` makes them of files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fednotes.data.notes import Note, NoteCounts, NoteStream, read_notes
from fednotes.data.silos import patient_of

NoteSource = Callable[[], Iterable[Note]]  # gives the notes from the first one on
_POOLED = "pooled"


@dataclass(frozen=True)
class SiteNotes:
    """One site's notes. Never leaves the site.

    train, valid: sources, whose notes share no patient; each call reads from the start.
    train_patients is the site's sample size (Liu and Miller 2020, Eq. 1). longest: characters
    of the longest note. content: the fingerprint, where it is known already.
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

    def total(name: str) -> int:
        return sum(getattr(site, name) for site in sites)

    return SiteNotes(
        _POOLED,
        lambda: chain.from_iterable(site.train() for site in sites),
        lambda: chain.from_iterable(site.valid() for site in sites),
        total("train_notes"),
        total("valid_notes"),
        total("train_patients"),
        total("valid_patients"),
        total("train_characters"),
        total("valid_characters"),
        max((site.longest for site in sites), default=0),
    )


def fingerprint(site: SiteNotes) -> str:
    """SHA-256 of a site's texts, patients and parts; reads the notes unless it is known."""
    if site.content:
        return site.content
    return content_of(map(digest_of, site.train()), map(digest_of, site.valid()))


def content_of(train: Iterable[bytes], valid: Iterable[bytes]) -> str:
    """The fingerprint of a site, from the digests of its notes."""
    sums = hashlib.sha256()
    for part in (train, valid):
        sums.update(b"\x1d")
        for digest in part:
            sums.update(digest)
    return sums.hexdigest()


def digest_of(note: Note) -> bytes:
    """SHA-256 of whose note it is and what it says, 32 bytes."""
    sums = hashlib.sha256()
    for part in (*patient_of(note), note.text):
        data = part.encode("utf-8")
        sums.update(len(data).to_bytes(8, "little"))
        sums.update(data)
    return sums.digest()


class NoteStreams(Iterator[Note]):
    """Several streams, one after the other; `counts` adds up what became of their records."""

    def __init__(self, streams: Iterable[NoteStream]) -> None:
        self._streams = iter(streams)
        self._done: list[NoteStream] = []

    def __next__(self) -> Note:
        while True:
            if self._done:
                try:
                    return next(self._done[-1])
                except StopIteration:
                    pass
            self._done.append(next(self._streams))  # its end is the end of all

    @property
    def counts(self) -> NoteCounts:
        """Of all streams so far."""
        each = [stream.counts for stream in self._done]
        names = ("notes", "empty", "errors", "other_category")
        return NoteCounts(*(sum(getattr(counts, name) for counts in each) for name in names))


def note_files(
    name: str,
    paths: Sequence[Path],
    format: str = "",
    categories: tuple[str, ...] = (),
    column: str = "",
) -> Callable[[], NoteStreams]:
    """A source of the notes of several files or folders; `name` is what their notes come from.

    Notes without a patient are told apart by path and id.
    """
    sources = [name if number == 0 else f"{name}/{number}" for number in range(len(paths))]

    def read() -> NoteStreams:
        return NoteStreams(
            read_notes(path, format or None, categories, column=column or None, source=source)
            for path, source in zip(paths, sources, strict=True)
        )

    return read
