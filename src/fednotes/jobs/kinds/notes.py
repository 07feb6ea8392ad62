"""A job's sites of notes without annotations: files or generated notes → `SiteNotes`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path

from fednotes.core.types import Document
from fednotes.data import synthetic
from fednotes.data.formats import read
from fednotes.data.notes import Note, read_notes
from fednotes.data.notes.sites import NoteCorpus, SiteNotes, fingerprint, site_notes
from fednotes.data.overlap import TextIndex, index_documents
from fednotes.jobs.job import (
    CountTable,
    Job,
    NotesConfig,
    SiteKind,
    Sites,
    SyntheticConfig,
)
from fednotes.privacy.secure_sum.crypto import joined


def load_note_sites(
    job: Job, progress: object = None, cache: Path | None = None
) -> Sites:
    """The notes of a job's sites, or of the silos that they are dealt into; read in
    passing.

    Raises DataError for a bad file, ConfigError for a setting that does not fit it,
    each with the site.
    """
    corpora = list(_generated(job) if job.synthetic else _from_files(job))
    number, by = (job.silos.number, job.silos.by) if job.silos else (0, None)
    sites, told = site_notes(corpora, job.seed, number, by or "patient")
    return Sites(sites, None, told)


def _from_files(job: Job) -> Iterator[NoteCorpus]:
    @cache
    def index(paths: tuple[str, ...], where: str) -> TextIndex | None:
        if not paths:
            return None
        return index_documents(
            chain.from_iterable(read(job.locate(p, where)) for p in paths)
        )

    for name, site in job.sites.items():
        assert isinstance(site, NotesConfig)
        paths = [job.locate(path, f"sites.{name}.path") for path in site.files]
        source = partial(
            read_notes,
            paths,
            site.format,
            site.categories,
            column=site.column or None,
            source=name,
            encoding=site.encoding,
        )
        yield NoteCorpus(
            name,
            source,
            ", ".join(map(str, paths)),
            site.valid_fraction,
            site.max_notes,
            index(site.exclude, "exclude"),
        )


def _generated(job: Job) -> Iterator[NoteCorpus]:
    """The texts of generated sites as their notes (training and validation data)."""
    for site in synthetic.generate(
        job.synthetic.sites, job.synthetic.sentences, job.seed
    ):
        name, documents = site.data.id, (*site.data.train, *site.data.valid)
        yield NoteCorpus(name, partial(_notes, name, documents), "generated notes")


def _notes(name: str, documents: tuple[Document, ...]) -> Iterator[Note]:
    return (Note(d.id, d.text, d.patient, None, name) for d in documents)


def _counts(sites: Sequence[SiteNotes]) -> list[CountTable]:
    """To train on, and held out to judge a model by."""
    rows: list[tuple[str, ...]] = []
    for site in sites:
        train = (
            site.train_notes,
            site.train_patients,
            site.train_characters,
            site.longest,
        )
        valid = (site.valid_notes, site.valid_patients, site.valid_characters)
        rows.append((site.id, "train", *(f"{number:,}" for number in train)))
        rows.append(("", "held out", *(f"{number:,}" for number in valid), ""))
    heads = ("site", "part", "notes", "patients", "characters", "longest note")
    return [CountTable(heads, rows, words=2)]


def training_examples(site: SiteNotes) -> dict[str, Iterator[bytes]]:
    """Return the training notes of a site as bytes."""
    return {"notes": (joined(note.text) for note in site.train())}


KIND = SiteKind(
    name="notes",
    site_config=NotesConfig,
    synthetic_config=SyntheticConfig,
    load=load_note_sites,
    fingerprint=fingerprint,
    tabulate_counts=_counts,
    source_keys=("path", "paths"),
    source_placeholder={"path": "notes"},
    count_examples=lambda site: site.train_notes,
    encode_examples=training_examples,
)
