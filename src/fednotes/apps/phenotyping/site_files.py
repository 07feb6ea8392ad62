"""Read the files of one site: notes, billed codes and labels.

No message says anything about a patient: only paths and lines, names of codes and
phenotypes, and counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from fednotes.apps.phenotyping import synthetic
from fednotes.apps.phenotyping.code_tables import CodeSource
from fednotes.apps.phenotyping.concepts import (
    PatientInputs,
    Progress,
    group_by_patient,
    make_patient_note,
)
from fednotes.apps.phenotyping.ctakes import (
    Mentions,
    make_bags_of_mentions,
    read_ctakes,
)
from fednotes.apps.phenotyping.features import ConceptFeatures, Features
from fednotes.apps.phenotyping.job_tables import PatientsConfig
from fednotes.apps.phenotyping.labels import PatientLabels, read_labels
from fednotes.apps.phenotyping.note_sets import NoteSet
from fednotes.apps.phenotyping.obesity import read_obesity
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.wording import format_count
from fednotes.data.notes import Note, describe_left_out
from fednotes.jobs.job import Job
from fednotes.jobs.patient_models import PatientNote
from fednotes.jobs.site_notes import read_site_notes

T = TypeVar("T")

# ---- the contents of files -----------------------------------------------------------


class Records(ABC):
    """The contents of files about each patient, from which features are computed."""

    @property
    @abstractmethod
    def patients(self) -> KeysView[str]:
        """The patients."""

    @abstractmethod
    def combine(self, other: Self) -> Self:
        """Return the records of these patients and of others."""

    @abstractmethod
    def with_prefix(self, prefix: str) -> Self:
        """Return the records with a prefix before each patient's id."""

    @abstractmethod
    def make_inputs(
        self, features: Features, progress: Progress | None, cache: Path
    ) -> PatientInputs:
        """Return the features of the patients.

        Args:
            features: Makes features of notes.
            progress: Receives the number of notes done, and of all notes.
            cache: Folder for results.
        """


@dataclass(frozen=True, eq=False)
class Texts(Records):
    """The texts of each patient's notes, which are read when they are needed.

    Attributes:
        notes: The notes.
    """

    notes: NoteSet

    @property
    def patients(self) -> KeysView[str]:
        """The patients with notes."""
        return self.notes.by_patient.keys()

    def combine(self, other: Self) -> Self:
        """Return the notes of these patients and of others."""
        return replace(self, notes=self.notes.combine(other.notes))

    def with_prefix(self, prefix: str) -> Self:
        """Return the notes with a prefix before each patient's id."""
        return replace(self, notes=self.notes.with_prefix(prefix))

    def make_inputs(
        self, features: Features, progress: Progress | None, cache: Path
    ) -> PatientInputs:
        """Return the features of the notes."""
        return features.make(self.notes, progress, cache)


@dataclass(frozen=True, eq=False)
class Extracts(Records):
    """The mentions of concepts that cTAKES found for each patient.

    Attributes:
        by_patient: The mentions.
    """

    by_patient: Mentions

    @property
    def patients(self) -> KeysView[str]:
        """The patients with cTAKES output."""
        return self.by_patient.keys()

    def combine(self, other: Self) -> Self:
        """Return the mentions of these patients and of others."""
        return replace(self, by_patient={**self.by_patient, **other.by_patient})

    def with_prefix(self, prefix: str) -> Self:
        """Return the mentions with a prefix before each patient's id."""
        return replace(self, by_patient=_add_prefix(prefix, self.by_patient))

    def make_inputs(
        self,
        features: Features,
        progress: Progress | None,  # noqa: ARG002 - the mentions are already read
        cache: Path,  # noqa: ARG002
    ) -> PatientInputs:
        """Return the bags of the mentions.

        Raises:
            DataError: No mention has a concept of the dictionary.
        """
        # [text] with cTAKES output is refused when the job is read.
        assert isinstance(features, ConceptFeatures)
        matcher = features.matcher
        inputs = make_bags_of_mentions(
            self.by_patient,
            matcher.dictionary.concepts,
            context=matcher.context,
            max_concepts=features.max_concepts,
        )
        unknown = inputs.counts["unknown"]
        if unknown and not inputs.counts["mentions"]:
            raise DataError(
                f"none of the {unknown:,} CUIs is a concept of the dictionary: give "
                'the UMLS, or an ontology with ids = "UMLS_CUI"'
            )
        return inputs


@dataclass(frozen=True, eq=False)
class SiteFiles:
    """The contents of a site's files, before features are computed.

    Attributes:
        records: The contents about each patient.
        test: Patients of a separate test part; empty if there is none.
        codes: The codes of each patient, including patients without notes; None if the
            site has no codes.
        labels: Labels that are not derived from codes.
        messages: Messages about omissions and counts.
    """

    records: Records
    test: frozenset[str] = frozenset()
    codes: Mapping[str, frozenset[str]] | None = None
    labels: PatientLabels | None = None
    messages: Sequence[str] = ()

    @property
    def patients(self) -> Collection[str]:
        """The patients with notes, as a set."""
        return self.records.patients

    def with_prefix(self, prefix: str) -> SiteFiles:
        """Return a copy with a prefix before each patient's id."""
        labels = self.labels
        if labels is not None:
            labels = replace(labels, values=_add_prefix(prefix, labels.values))
        return replace(
            self,
            records=self.records.with_prefix(prefix),
            test=frozenset(f"{prefix}{patient}" for patient in self.test),
            codes=None if self.codes is None else _add_prefix(prefix, self.codes),
            labels=labels,
        )


def _add_prefix(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return values by patient, with a prefix before each patient's id."""
    return {f"{prefix}{patient}": value for patient, value in values.items()}


def generate_site(job: Job, name: str) -> SiteFiles:
    """Return the generated patients of a site."""
    patients = synthetic.generate_patients(name, job.synthetic.patients, job.seed)
    return SiteFiles(
        Texts(NoteSet.of(patients.notes)),
        codes=patients.codes,
        labels=patients.labels,
    )


def read_site(job: Job, name: str, config: PatientsConfig) -> SiteFiles:
    """Read the files of a site.

    Args:
        job: The job.
        name: Name of the site.
        config: The site's table.

    Raises:
        ConfigError: A setting does not match the files.
        DataError: A file cannot be read, or a patient of `test` is also trained on.
    """
    return _SiteReader(job, name, config).read()


# ---- reading -------------------------------------------------------------------------


class _SiteReader:
    """Reads the files of one site, and collects messages."""

    def __init__(self, job: Job, name: str, config: PatientsConfig) -> None:
        self._job = job
        self._name = name
        self._config = config
        self._messages: list[str] = []

    def read(self) -> SiteFiles:
        """Read all files of the site."""
        labels, summaries = self._read_labels()
        records = self._read_records(summaries)
        if self._config.test:
            test_records = self._read_test_records()
            test = frozenset(test_records.patients)
            shared = len(test & records.patients)
            if shared:
                raise DataError(
                    f"{shared} patients of `test` are also among those of training: "
                    "remove them from one of the two"
                )
            records = records.combine(test_records)
        else:  # the obesity challenge has a test part of its own
            test = frozenset(
                note.id for note in summaries if "test" in note.source.lower()
            )
        if labels is not None:
            self._compare_with_labels(records.patients, labels)
        codes = self._read_codes()
        return SiteFiles(
            records, test, codes=codes, labels=labels, messages=self._messages
        )

    def _list_places(self, key: str) -> list[Path]:
        """Return the paths that a key of the site's table names, except empty ones."""
        value = getattr(self._config, key)
        texts = [value] if isinstance(value, str) else value
        where = f"sites.{self._name}.{key}"
        return [self._job.locate(text, where) for text in texts if text]

    def _read_records(self, summaries: Sequence[Note]) -> Records:
        """Read notes or cTAKES output; otherwise return the challenge's summaries."""
        if self._config.concepts:
            return self._read_extracts("concepts")
        if self._config.notes:
            return self._read_notes("notes", name="notes")
        return Texts(NoteSet.of(group_by_patient(summaries)))

    def _read_test_records(self) -> Records:
        """Read the notes or the cTAKES output of the test part."""
        if self._config.concepts:
            return self._read_extracts("test")
        return self._read_notes("test", name="test notes")

    def _read_extracts(self, key: str) -> Extracts:
        """Read the cTAKES output that a key names."""
        mentions: Mentions = {}
        for path in self._list_places(key):
            part, report = read_ctakes(path)
            mentions.update(part)
            if report.damaged:
                self._messages.append(
                    f"{path}: left out {report.damaged:,} of {report.rows:,} lines, "
                    "which are not CUIs"
                )
        return Extracts(mentions)

    def _read_notes(self, key: str, name: str) -> Texts:
        """Read the notes that a key names.

        Args:
            key: The key of the site's table.
            name: How messages refer to the notes.

        Raises:
            ConfigError: There are no notes.
        """
        where = f"sites.{self._name}.{key}"
        query = self._config.query
        omop = self._config.omop
        places = [
            self._job.locate_notes(text, where, query, omop)
            for text in getattr(self._config, key)
        ]
        open_stream = partial(read_site_notes, places, self._config, site=self._name)

        def read_again() -> Iterator[PatientNote]:
            return map(make_patient_note, open_stream())

        stream = open_stream()
        without_patient = 0

        def count_notes_without_patient() -> Iterator[PatientNote]:
            nonlocal without_patient
            for note in stream:
                without_patient += note.patient is None
                yield make_patient_note(note)

        notes = NoteSet.scan(count_notes_without_patient(), read_again)
        skipped = describe_left_out(stream.counts)
        if not notes.by_patient:
            names = ", ".join(map(str, places))
            but = f" but {skipped}" if skipped else ""
            raise ConfigError(f"found no usable notes in {names}{but}: check the paths")
        if skipped:
            self._messages.append(f"{name} left out: {skipped}")
        if without_patient:
            self._messages.append(
                f"{without_patient:,} {name} name no patient: each counts as a "
                "patient of its own, named by its id"
            )
        return Texts(notes)

    def _read_labels(self) -> tuple[PatientLabels | None, Sequence[Note]]:
        """Read labels from a table, or from a folder of the obesity challenge.

        Returns:
            The labels, and the summaries of the challenge.

        Raises:
            ConfigError: Another setting contradicts the source of the labels.
        """
        paths = self._list_places("labels")
        if not paths:
            return None, ()
        path = paths[0]
        summaries: Sequence[Note] = ()
        if path.is_dir():
            if self._config.test_labels:
                raise ConfigError(
                    f"{path}: a folder of the obesity challenge already has a test "
                    "part: leave out test_labels"
                )
            summaries, labels = read_obesity(path, self._config.judgment)
        else:
            labels = self._read_table_of_labels(path)
        self._messages += labels.list_messages()
        return labels, summaries

    def _read_table_of_labels(self, path: Path) -> PatientLabels:
        """Read labels from a table, and from that of the test part.

        Raises:
            ConfigError: The site has no notes, or has a setting that belongs to the
                challenge.
        """
        if not (self._config.notes or self._config.concepts):
            raise ConfigError(
                f"{path}: a table of labels has no notes: give `notes` or `concepts`"
            )
        if self._config.judgment != "intuitive":
            raise ConfigError(
                f"{path}: judgment applies to the obesity challenge, not to a "
                "table: leave it out"
            )
        return read_labels(
            path,
            *self._list_places("test_labels"),
            patient_column=self._config.patient_column,
        )

    def _compare_with_labels(
        self, patients: Collection[str], labels: PatientLabels
    ) -> None:
        """Add messages about patients with notes but no labels, and the reverse.

        Args:
            patients: The patients with notes.
            labels: The labels of patients.

        Raises:
            DataError: No patient has both.
        """
        without_notes = sum(patient not in patients for patient in labels.values)
        if without_notes == len(labels.values):
            raise DataError(
                f"{self._config.labels}: none of the {without_notes:,} labelled "
                "patients has notes: check that both files use the same patient ids"
            )
        if without_notes:
            self._messages.append(
                f"left out {format_count(without_notes, 'labelled patient')} without "
                "notes at this site"
            )
        # A patient without any label in the files may still be labelled: with
        # `unmentioned`, a missing phenotype has a meaning, such as "absent".
        meaning_of_unmentioned = self._config.unmentioned
        without_label = sum(
            not labels.get_labels(patient, meaning_of_unmentioned)
            for patient in patients
        )
        if without_label:
            self._messages.append(
                f"{format_count(without_label, 'patient')} without a label for any "
                "phenotype"
            )

    def _read_codes(self) -> dict[str, frozenset[str]] | None:
        """Read the codes of all paths; None if the site has none."""
        source = self._config.make_code_source()
        if source is None:
            return None
        codes: dict[str, frozenset[str]] = {}
        for path in self._list_places("codes") + self._list_places("test_codes"):
            for patient, billed in self._read_codes_of(source, path).items():
                codes[patient] = codes.get(patient, frozenset()) | billed
        return codes

    def _read_codes_of(self, source: CodeSource, path: Path) -> dict[str, set[str]]:
        """Read the codes of one path."""
        result = source.read(path)
        for table in result.tables:
            self._messages += table.list_messages()
            if table.empty:
                self._messages.append(
                    f"{table.path}: left out {format_count(table.empty, 'row')} "
                    "without a code"
                )
            if table.unknown:
                self._messages.append(
                    f"{table.path}: kept {format_count(table.unknown, 'row')} with a "
                    "code that is not in the dictionary of codes beside it"
                )
        return result.codes
