"""Define sites of notes without annotations, and read them.

A site's notes are a source that each pass reads again, never a list, because the files
may be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path

from fednotes.core.types import Document
from fednotes.data import synthetic
from fednotes.data.formats import read
from fednotes.data.notes import Note
from fednotes.data.notes.sites import (
    NoteCorpus,
    SiteNotes,
    fingerprint_notes,
    make_sites,
)
from fednotes.data.overlap import TextIndex, index_documents
from fednotes.jobs.job import (
    CountTable,
    Job,
    NotesConfig,
    Progress,
    SiteKind,
    Sites,
    SyntheticConfig,
)
from fednotes.jobs.site_notes import read_site_notes
from fednotes.privacy.secure_sum.crypto import join_parts


def load_note_sites(job: Job, _progress: Progress | None, _cache: Path | None) -> Sites:
    """Read the notes of a job's sites once, and deal them into silos if it has them.

    Args:
        job: The job.

    Raises:
        DataError: A file cannot be used; the message names the site.
        ConfigError: A setting does not match the files; the message names the site.
    """
    corpora = list(_generate_corpora(job) if job.synthetic else _open_corpora(job))
    if job.silos is None:
        sites, remarks = make_sites(corpora, job.seed)
    else:
        by = job.silos.by or "patient"
        sites, remarks = make_sites(corpora, job.seed, job.silos.number, by)
    return Sites(sites, None, remarks)


def _open_corpora(job: Job) -> Iterator[NoteCorpus]:
    """Yield the files of each site as a corpus."""

    # Cached, because sites may exclude the same corpora.
    @cache
    def index_corpora(paths: tuple[str, ...]) -> TextIndex | None:
        """Return an index of the texts of corpora; None if there are none."""
        if not paths:
            return None
        documents = (read(job.locate(path, "exclude")) for path in paths)
        return index_documents(chain.from_iterable(documents))

    for name, site in job.sites.items():
        assert isinstance(site, NotesConfig)
        paths = [
            job.locate_notes(path, f"sites.{name}.path", site.query, site.omop)
            for path in site.files
        ]
        yield NoteCorpus(
            name,
            partial(read_site_notes, paths, site, site=name),
            ", ".join(map(str, paths)),
            site.valid_fraction,
            site.max_notes,
            index_corpora(site.exclude),
        )


def _generate_corpora(job: Job) -> Iterator[NoteCorpus]:
    """Yield the training and validation texts of generated sites as corpora."""
    generated = synthetic.generate(
        job.synthetic.sites, job.synthetic.sentences, job.seed
    )
    for site in generated:
        name = site.data.id
        documents = (*site.data.train, *site.data.valid)
        source = partial(_to_notes, name, documents)
        yield NoteCorpus(name, source, "generated notes")


def _to_notes(name: str, documents: tuple[Document, ...]) -> Iterator[Note]:
    """Yield documents as notes, with the name of their site as the source."""
    for document in documents:
        yield Note(document.id, document.text, document.patient, None, name)


def _tabulate_counts(sites: Sequence[SiteNotes]) -> list[CountTable]:
    """Return a table of the numbers of training notes and held-out notes."""
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


def _count_notes(site: SiteNotes) -> int:
    """Return the number of a site's training notes."""
    return site.train_notes


def _iterate_notes(site: SiteNotes) -> Iterator[str]:
    """Yield the texts of the training and validation notes."""
    return (note.text for note in chain(site.train(), site.valid()))


def encode_training_examples(site: SiteNotes) -> Mapping[str, Iterator[bytes]]:
    """Return the training notes of a site as bytes."""
    return {"notes": (join_parts(note.text) for note in site.train())}


KIND = SiteKind(
    name="notes",
    site_config=NotesConfig,
    synthetic_config=SyntheticConfig,
    load=load_note_sites,
    fingerprint=fingerprint_notes,
    tabulate_counts=_tabulate_counts,
    source_keys=("path", "paths"),
    source_placeholder={"path": "notes"},
    count_examples=_count_notes,
    iterate_notes=_iterate_notes,
    encode_examples=encode_training_examples,
)
