"""A saved phenotyping model, registered as a phenotyping model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from fednotes.apps.phenotyping.patient_notes import (
    StreamedPatientNotes,
    read_patient_notes,
)
from fednotes.apps.phenotyping.phenotyper import load_phenotyper
from fednotes.apps.phenotyping.predict import (
    PatientReader,
    evaluate_patients,
    read_labelled,
)
from fednotes.apps.phenotyping.review import describe_probabilities, review_patients
from fednotes.data.encodings import AUTO
from fednotes.data.notes import NotePlace
from fednotes.jobs.evaluation import Evaluation
from fednotes.jobs.patient_models import (
    ComputeFeatures,
    PatientFinding,
    PatientModel,
    PatientNote,
)
from fednotes.jobs.patient_reviews import ReviewedPatients
from fednotes.jobs.saved_models import LoadOptions, NoteFeatures, NoteSource
from fednotes.jobs.workers.dealing import choose_devices
from fednotes.jobs.workers.predictions import require_possible_workers


class PhenotypeModel(PatientModel):
    """A phenotyping model, and the dictionary or encoder that it reads notes with.

    Attributes:
        reader: The model with its dictionary or encoder.
        folder: Folder of the saved model; None if it was not loaded from one.
        options: How it was loaded.
    """

    uses_workers: ClassVar[bool] = True

    def __init__(
        self,
        reader: PatientReader,
        folder: Path | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        self.reader = reader
        self.folder = folder
        self.options = options or LoadOptions()

    @classmethod
    def load(cls, folder: Path, options: LoadOptions) -> Self:
        """Load the model in a folder."""
        require_possible_workers(options)
        (device,) = choose_devices(options.device, 1)
        place = options.dictionary or options.backbone
        model = load_phenotyper(folder, device, place)
        return cls(PatientReader.load(folder, model, place), folder, options)

    @staticmethod
    def described_types(facts: Mapping[str, Any]) -> Sequence[str]:
        """Return the phenotypes of a saved model; after stage 1 alone, the codes."""
        names = facts.get("phenotypes") or facts.get("code_names")
        return names if isinstance(names, list) else ()

    @staticmethod
    def read_notes(source: NoteSource) -> StreamedPatientNotes:
        """Return the notes in a file or folder, read one at a time."""
        return read_patient_notes(
            source.path,
            source.text,
            format=source.format,
            column=source.column,
            id_column=source.id_column,
            encoding=source.encoding,
        )

    @property
    def types(self) -> tuple[str, ...]:
        """The phenotypes that the model predicts; after stage 1 alone, the codes."""
        model = self.reader.model
        return model.phenotypes or model.code_names

    @property
    def confidence(self) -> str:
        """Description of the model's probabilities."""
        return describe_probabilities(self.reader.model)

    def compute_note_features(self, text: str) -> NoteFeatures:
        """Return the concepts, the vector or the sub-words of a note."""
        return self.reader.features.compute_note_features(text)

    @property
    def feature_threads(self) -> int:
        """One thread if notes are searched for concepts; otherwise the encoder's."""
        return super().feature_threads if self.reader.model.space.dense else 1

    def find_in_stream(
        self,
        notes: Iterable[PatientNote],
        patients: Iterable[str] = (),
        compute: ComputeFeatures | None = None,
    ) -> list[PatientFinding]:
        """Return a finding for each patient; it is empty for excluded patients."""
        names = dict.fromkeys(patients)

        def collect_names() -> Iterator[PatientNote]:
            for note in notes:
                names.setdefault(note.patient)
                yield note

        inputs = self.reader.read(collect_names(), names, compute)
        if not names:
            return []
        rows = {row["patient"]: row for row in self.reader.predict_rows(inputs)}
        findings = []
        for patient in names:
            row = rows.get(patient, {})
            findings.append(
                PatientFinding(
                    patient,
                    probabilities=row.get("probabilities", {}),
                    labels=row.get("labels", {}),
                    concepts=row.get("concepts"),
                )
            )
        return findings

    def format_findings(self, notes: Iterable[PatientNote], format: str) -> str:
        """Return the findings as JSON lines or CSV."""
        inputs = self.reader.read(notes, compute=self.compute_features)
        return self.reader.format_results(inputs, format)

    def review_file(
        self,
        path: Path,
        labels: Path | None = None,
        encoding: str = AUTO,
    ) -> ReviewedPatients:
        """Return labelled patients with the model's predictions."""
        labelled = read_labelled(self.reader, path, labels=labels, encoding=encoding)
        model = self.reader.model
        return review_patients(
            path.name,
            model,
            labelled.inputs.patients,
            inputs=labelled.inputs.values,
            labels=labelled.labels,
            features=self.reader.features,
        )

    def evaluate_file(
        self,
        path: NotePlace,
        label_map: Mapping[str, str] | None = None,
        labels: Path | None = None,
        encoding: str = AUTO,
    ) -> Evaluation:
        """Score the model on labelled patients."""
        return evaluate_patients(self.reader, path, label_map, labels, encoding)
