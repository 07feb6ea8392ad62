"""Count the contents of each site's notes; the result has no text of a note."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median_low
from typing import Any, Literal, NamedTuple

from fednotes.core.errors import DataError
from fednotes.core.types import Document
from fednotes.data import encodings
from fednotes.data.encodings import AUTO, HEAD, resolve_encoding
from fednotes.data.formats import FORMATS, examine
from fednotes.data.formats.files import open_bytes
from fednotes.data.formats.folders import list_files
from fednotes.data.formats.problems import OnError, Problems
from fednotes.data.notes import FORMATS as NOTE_FORMATS
from fednotes.data.notes import (
    Note,
    NoteDatabase,
    NotePlace,
    describe_left_out,
    find_unused_columns,
    make_patient_key,
    read_notes,
)
from fednotes.data.split import choose_unit
from fednotes.data.tags import FlattenCounts, flatten
from fednotes.data.text import tokenize
from fednotes.jobs import kinds
from fednotes.jobs.input_readers import find_note_format, guess_corpus_format
from fednotes.jobs.job import FoundLabels, SiteConfig
from fednotes.jobs.kinds.annotated_files import PARTS
from fednotes.jobs.kinds.site_parts import split_parts
from fednotes.jobs.proposal.places import Place, Places

Holds = Literal["mentions", "patients", "notes"]

_SEED = 1  # seed of the proposed job, used for splitting
_SENTENCE = "sentence"
_DEFAULTS = SiteConfig(path="any")


@dataclass(frozen=True)
class ReadOptions:
    """How the files are read; the proposed job reads them in the same way.

    Attributes:
        format: Format of the files; recognised if it is "".
        column: The column of a table, or the key of JSON lines, that holds the text;
            recognised if it is "".
        on_error: "refuse" raises an error for data that cannot be used; "skip" leaves
            such data out.
        encoding: Encoding of files without a byte-order mark that are not UTF-8.
    """

    format: str = ""
    column: str = ""
    on_error: OnError = "refuse"
    encoding: str = AUTO


@dataclass(frozen=True)
class Lengths:
    """Lengths of notes.

    Attributes:
        total: Their sum.
        median: Their median.
        longest: The largest one.
    """

    total: int = 0
    median: int = 0
    longest: int = 0

    @classmethod
    def of(cls, values: Sequence[int]) -> Lengths:
        """Return statistics of the lengths of notes."""
        if not values:
            return cls()
        return cls(sum(values), median_low(values), max(values))


@dataclass(frozen=True)
class SiteFacts:
    """Facts about the notes of a site.

    Attributes:
        name: The site's name.
        root: The file or folder of all its notes, or their database.
        parts: Its files or folders by key of a job: "path" alone, or "train", "test"
            and perhaps "valid". A database has none.
        holds: "mentions" if entities are annotated, "patients" if there are labels of
            patients beside the notes, otherwise "notes".
        format: Format of the files.
        notes: Number of notes.
        are_sentences: Whether each note is one sentence, as in a CoNLL file without
            marks of documents.
        patients: Number of patients; 0 if the files do not name them.
        words: Lengths of notes in words.
        characters: Lengths of notes in characters.
        types: Number of mentions by entity type, the most frequent first.
        labels: The labels of patients beside the notes, if any.
        overlapping: Number of mentions that overlap another one.
        discontinuous: Number of mentions with several pieces.
        encodings: Encodings of the files, such as "utf-8".
        left_out: Amount of unusable data that was left out, by kind.
        unused_columns: Columns of tables of notes that nothing reads.
        split_by: The unit that the job must not divide when it splits the notes: "" for
            the job's default, or "sentence" if there are too few notes.
        units: Number of notes (or patients) in each part after splitting.
    """

    name: str
    root: NotePlace
    parts: Mapping[str, Path]
    holds: Holds
    format: str
    notes: int
    patients: int
    words: Lengths
    characters: Lengths
    types: Mapping[str, int] = field(default_factory=dict)
    labels: FoundLabels | None = None
    are_sentences: bool = False
    overlapping: int = 0
    discontinuous: int = 0
    encodings: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    unused_columns: tuple[str, ...] = ()
    split_by: str = ""
    units: Mapping[str, int] = field(default_factory=dict)

    @property
    def mentions(self) -> int:
        """The number of annotated mentions."""
        return sum(self.types.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = asdict(replace(self, labels=None))
        if self.labels is not None:
            values["labels"] = dict(self.labels.counts)
        values["root"] = str(self.root)
        values["parts"] = {part: str(path) for part, path in self.parts.items()}
        return values


@dataclass(frozen=True)
class Facts:
    """Facts about the notes of all sites.

    Attributes:
        sites: The facts of each site.
        options: How the files were read.
        remarks: Remarks about the search for the sites, as in `Places`.
    """

    sites: tuple[SiteFacts, ...]
    options: ReadOptions
    remarks: tuple[str, ...] = ()


def read_facts(places: Places, options: ReadOptions) -> Facts:
    """Read the notes of sites and count their contents.

    Args:
        places: The locations of each site's notes.
        options: How to read them.

    Raises:
        DataError: Files cannot be read or used; the error names them.
        ConfigError: There is no such format or encoding.
    """
    resolve_encoding(options.encoding)
    sites = tuple(_read_site(place, options) for place in places.sites)
    return Facts(sites, options, places.remarks)


def _read_site(place: Place, options: ReadOptions) -> SiteFacts:
    """Return the facts of one site, which is an annotated corpus or plain notes."""
    is_table = bool(options.column) or _is_only_of_notes(options.format)
    if is_table or isinstance(place.root, NoteDatabase):
        return _read_notes(place, options)
    formats = [_find_format(path, options) for path in place.parts.values()]
    if None in formats:
        return _read_notes(place, options)
    corpus = _read_corpus(place, options)
    if corpus.mentions:
        names = dict.fromkeys(name for name in formats if name)
        return _count_corpus(place, corpus, ", ".join(names))
    try:
        return _read_notes(place, options)
    except DataError:
        raise DataError(
            f"{place.root}: no entity is annotated in these files: check them with "
            "`fednotes check`, or name another format"
        ) from None


def _is_only_of_notes(format: str) -> bool:
    """Return whether files of a format never have annotated mentions."""
    return format in NOTE_FORMATS and format not in FORMATS


def _find_format(path: Path, options: ReadOptions) -> str | None:
    """Return the format of an annotated corpus; None for notes without annotations."""
    return options.format or guess_corpus_format(path, options.encoding)


# ---- annotated corpora ---------------------------------------------------------------


@dataclass(frozen=True)
class _Corpus:
    """The documents of a site.

    Attributes:
        parts: The documents by part.
        left_out: Data that cannot be used, by kind.
        encodings: Encodings of the files.
    """

    parts: Mapping[str, tuple[Document, ...]]
    left_out: Counter[str]
    encodings: tuple[str, ...]

    @property
    def mentions(self) -> int:
        """The number of annotated mentions."""
        return sum(len(document.spans) for document in self)

    def __iter__(self) -> Iterator[Document]:
        return chain.from_iterable(self.parts.values())


def _read_corpus(place: Place, options: ReadOptions) -> _Corpus:
    """Return the documents of a site.

    Raises:
        DataError: Some data are unusable; the error has the problems of all files.
    """
    parts = {}
    problems = Problems()
    for part, path in place.parts.items():
        documents, problems_of_part = examine(
            path, options.format or None, options.encoding
        )
        problems.include(problems_of_part)
        parts[part] = documents
    everything = tuple(chain.from_iterable(parts.values()))
    problems.raise_if_refused(options.on_error, everything)
    if not everything:
        raise DataError(
            f"{place.root}: no document in these files: give files of notes"
        )
    encodings_of_files = _list_encodings(place.parts.values(), options.encoding)
    return _Corpus(parts, problems.counts, encodings_of_files)


def _count_corpus(place: Place, corpus: _Corpus, format: str) -> SiteFacts:
    """Return the facts of a site whose mentions are annotated."""
    lengths = _LengthCounter()
    labels: Counter[str] = Counter()
    changes = FlattenCounts()
    for document in corpus:
        lengths.add(document.text)
        labels.update(span.label for span in document.spans)
        _, counts = flatten(document.spans, _DEFAULTS.flatten)
        changes += counts
    patients = {document.patient for document in corpus} - {None}
    split = _choose_split(place, corpus.parts)
    return SiteFacts(
        name=place.name,
        root=place.root,
        parts=place.parts,
        holds="mentions",
        format=format,
        notes=sum(len(documents) for documents in corpus.parts.values()),
        patients=len(patients),
        words=Lengths.of(lengths.words),
        characters=Lengths.of(lengths.characters),
        types=dict(sorted(labels.items(), key=lambda item: (-item[1], item[0]))),
        are_sentences=all(len(document.sentences) == 1 for document in corpus),
        overlapping=changes.nested + changes.crossing,
        discontinuous=changes.discontinuous,
        encodings=corpus.encodings,
        left_out=dict(corpus.left_out),
        split_by=split.by,
        units=split.num_units,
    )


class _Split(NamedTuple):
    """A way to split a site's notes.

    Attributes:
        by: The unit that is not divided: "sentence", or "" for the default.
        num_units: Each part's number of patients, or of notes without known patients.
    """

    by: str
    num_units: dict[str, int]


def _choose_split(place: Place, parts: Mapping[str, tuple[Document, ...]]) -> _Split:
    """Return a way to split a site's notes that leaves mentions for training.

    Raises:
        DataError: The notes are too few, even if sentences are split.
    """
    if "valid" in parts:
        num_units = {part: _count_units(parts[part]) for part in PARTS}
        return _Split("", num_units)
    default_config = _DEFAULTS
    if "train" in parts:
        default_config = SiteConfig(train="any", test="any")
    for by in ("", _SENTENCE):
        config = replace(default_config, split=by)
        try:
            split_documents = split_parts(config, parts, _SEED)
        except DataError:
            continue
        if any(document.spans for document in split_documents["train"]):
            num_units = {part: _count_units(split_documents[part]) for part in PARTS}
            return _Split(by, num_units)
    undivided = parts["path"] if "path" in parts else parts["train"]
    raise DataError(
        f"{place.root}: too few notes ({len(undivided):,}) to be split into "
        "training, validation and test data: give more notes"
    )


def _count_units(documents: tuple[Document, ...]) -> int:
    """Return the number of patients, or of notes if patients are unknown."""
    if choose_unit(documents) == "patient":
        patients = {document.patient for document in documents} - {None}
        num_unknown = sum(document.patient is None for document in documents)
        return len(patients) + num_unknown
    notes = {str(document.meta.get("document", document.id)) for document in documents}
    return len(notes)


# ---- notes without annotations -------------------------------------------------------


def _read_notes(place: Place, options: ReadOptions) -> SiteFacts:
    """Return the facts about notes without annotations, which are read one by one.

    Raises:
        DataError: The notes cannot be read.
        ConfigError: There is no such format.
    """
    root = place.root
    column = options.column or None
    format = options.format or None
    if isinstance(root, Path):
        format = find_note_format(root, format, column, options.encoding)
    problems = Problems()
    notes = read_notes(
        root, format, column=column, encoding=options.encoding, problems=problems
    )
    counter = _NoteCounter()
    for note in notes:
        counter.add(note)
    problems.raise_if_refused(options.on_error)
    if not counter.notes:
        raise _make_no_notes_error(root, notes.counts)

    files = _FileFacts(format=format or "database")
    if isinstance(root, Path):
        files = _describe_files(root, format, options)
    site = SiteFacts(
        name=place.name,
        root=root,
        parts=files.parts,
        holds="notes",
        format=files.format,
        notes=counter.notes,
        patients=counter.patients if counter.has_patients else 0,
        words=Lengths.of(counter.lengths.words),
        characters=Lengths.of(counter.lengths.characters),
        encodings=files.encodings,
        left_out=dict(problems.counts),
        unused_columns=files.unused_columns,
        units={"train": counter.patients},
    )
    return site if files.labels is None else _add_labels(site, files.labels)


class _NoteCounter:
    """Counts the notes of a site, and their patients.

    Attributes:
        lengths: The lengths of the notes.
        has_patients: Whether a note names its patient.
    """

    def __init__(self) -> None:
        self.lengths = _LengthCounter()
        self.has_patients = False
        self._patient_hashes: set[int] = set()  # take less memory than names

    def add(self, note: Note) -> None:
        """Count a note."""
        self.lengths.add(note.text)
        self._patient_hashes.add(hash(make_patient_key(note)))
        self.has_patients = self.has_patients or note.patient is not None

    @property
    def notes(self) -> int:
        """The number of notes."""
        return len(self.lengths.words)

    @property
    def patients(self) -> int:
        """The number of patients; a note without one is a patient of its own."""
        return len(self._patient_hashes)


@dataclass(frozen=True)
class _FileFacts:
    """Facts about the files of a site's notes; the defaults are those of a database.

    Attributes:
        format: The format of the notes; "database" for a database.
        parts: As in `SiteFacts`.
        encodings: As in `SiteFacts`.
        unused_columns: As in `SiteFacts`.
        labels: As in `SiteFacts`.
    """

    format: str
    parts: Mapping[str, Path] = field(default_factory=dict)
    encodings: tuple[str, ...] = ()
    unused_columns: tuple[str, ...] = ()
    labels: FoundLabels | None = None


def _describe_files(root: Path, format: str | None, options: ReadOptions) -> _FileFacts:
    """Return the facts about the files of notes.

    Args:
        root: The file or folder.
        format: The format of the file, as `find_note_format` returns it; None for a
            folder.
        options: How the files are read.
    """
    return _FileFacts(
        format=format or _list_formats_in_folder(root, options.encoding),
        parts={"path": root},
        encodings=_list_encodings([root], options.encoding),
        unused_columns=find_unused_columns(
            root, format, options.column or None, options.encoding
        ),
        labels=_find_labels(root),
    )


def _list_formats_in_folder(folder: Path, encoding: str) -> str:
    """Return the formats of the notes in a folder, joined with commas.

    Subfolders are searched, too. Files that are not notes are ignored. If there is
    another format, plain-text files are also ignored, because they may be a licence or
    a description.
    """
    formats = set()
    for file in list_files(folder, recursive=True):
        try:
            format = find_note_format(file, None, column=None, encoding=encoding)
        except DataError:
            continue  # not a file of notes
        if format is not None:  # it is None only for a folder
            formats.add(format)

    formats_without_text = formats - {"text"}
    return ", ".join(sorted(formats_without_text or formats))


def _make_no_notes_error(root: NotePlace, counts: Mapping[str, int]) -> DataError:
    """Return the error for files or a database without a note that can be used.

    Args:
        root: The file, the folder or the database.
        counts: The number of records that were left out, by reason.
    """
    left_out = describe_left_out(counts)
    if left_out:
        return DataError(
            f"{root}: none of its records is a note ({left_out}): give others"
        )
    if isinstance(root, NoteDatabase):
        return DataError(f"{root}: there are no rows: give another table or query")
    files = "the files have" if root.is_dir() else "the file has"
    return DataError(
        f"{root}: {files} no notes, or a header and no rows below it: give notes"
    )


def _find_labels(path: Path) -> FoundLabels | None:
    """Return the labels of patients that lie beside notes."""
    if not path.is_dir():
        return None
    for kind in kinds.list_kinds():
        labels = kind.find_labels(path)
        if labels is not None:
            return labels
    return None


def _add_labels(site: SiteFacts, labels: FoundLabels) -> SiteFacts:
    """Return the facts of a site with the labels of its patients."""
    number = labels.patients
    # The job holds out a tenth of the patients for validation, and a fifth for testing.
    units = {"train": number * 7 // 10, "valid": number // 10, "test": number // 5}
    return replace(
        site,
        holds="patients",
        parts={labels.notes_key: site.parts["path"], labels.labels_key: labels.path},
        labels=labels,
        units=units,
    )


class _LengthCounter:
    """Collects the lengths of notes.

    Attributes:
        words: The words of each note.
        characters: The characters of each note.
    """

    def __init__(self) -> None:
        self.words = array("q")
        self.characters = array("q")

    def add(self, text: str) -> None:
        """Count a note."""
        self.words.append(len(tokenize(text)))
        self.characters.append(len(text))


# ---- encodings -----------------------------------------------------------------------


def _list_encodings(paths: Iterable[Path], encoding: str) -> tuple[str, ...]:
    """Return the sorted encodings of those files that are texts.

    Args:
        paths: Files and folders.
        encoding: Encoding of files without a byte-order mark that are not UTF-8.
    """
    names: set[str] = set()
    for path in paths:
        files = list_files(path, recursive=True) if path.is_dir() else [path]
        for file in files:
            try:
                with open_bytes(file) as stream:
                    head = stream.read(HEAD)
                    codec, mark = encodings.choose_codec_of_stream(
                        stream, head, resolve_encoding(encoding)
                    )
            except (DataError, OSError):
                continue  # not a text, such as a Parquet file
            names.add(f"{codec} with byte-order mark" if mark else codec)
    return tuple(sorted(names))
