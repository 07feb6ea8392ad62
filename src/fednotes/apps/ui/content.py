"""The content of the local web UI: runs, ledgers, a model, and its errors in notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

from fednotes.api import read
from fednotes.apps.ui.background import BackgroundWork
from fednotes.apps.ui.corrections import require_writable
from fednotes.apps.ui.patient_review import (
    PatientReview,
    make_review_loader,
    review_patients_of_run,
)
from fednotes.apps.ui.review import (
    Predict,
    Review,
    predict_notes,
    review_mentions_of_run,
)
from fednotes.apps.ui.run_list import find_runs, has_finished
from fednotes.core import plugins
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.core.types import Document
from fednotes.data.encodings import AUTO
from fednotes.data.formats.folders import name_paths
from fednotes.data.formats.problems import OnError
from fednotes.jobs.job_file import load_recorded_job
from fednotes.jobs.mention_models import MentionModel
from fednotes.jobs.models import find_model_class, load_mention_model
from fednotes.jobs.patient_models import PatientModel
from fednotes.jobs.run_folder import is_run, read_result_so_far
from fednotes.jobs.site_approvals import ApprovalDesk
from fednotes.taggers.saving import is_model

T = TypeVar("T")


class WorkOnRuns(Generic[T]):
    """Work on runs, which begins for each run when its result is first requested.

    Args:
        accepts: Returns whether the work can be done on the run in a folder.
        do_work: Does it.
    """

    def __init__(
        self, accepts: Callable[[Path], bool], do_work: Callable[[Path], T]
    ) -> None:
        self._accepts = accepts
        self._do_work = do_work
        self._by_folder: dict[Path, BackgroundWork[T]] = {}

    def find(self, folder: Path) -> BackgroundWork[T] | None:
        """Return the work on the run in a folder; None if it cannot be done there."""
        if folder not in self._by_folder:
            if not self._accepts(folder):
                return None
            work = partial(self._do_work, folder)
            self._by_folder[folder] = BackgroundWork(work)
        return self._by_folder[folder]


@dataclass
class Content:
    """The content of the pages.

    Attributes:
        about: The name of what is shown.
        runs: The folders of runs by name. A run keeps its place when others follow.
        folders: Folders that are searched for runs.
        kits: The folders of site kits by name.
        desks: Where the people of a site decide on jobs, by the name of its kit.
        review: The errors to review, or None.
        reviews_of_runs: The errors of the runs of the list.
        model: Finds mentions in documents, or None.
        confidence: A sentence that describes the model's confidences.
        patients: The labelled patients of a model or run of patients, or None.
        patients_of_runs: The labelled patients of the runs of the list.
    """

    about: str = ""
    runs: dict[str, Path] = field(default_factory=dict)
    folders: Sequence[Path] = ()
    kits: dict[str, Path] = field(default_factory=dict)
    desks: dict[str, ApprovalDesk] = field(default_factory=dict)
    review: BackgroundWork[Review] | None = None
    reviews_of_runs: WorkOnRuns[Review] = field(
        default_factory=lambda: WorkOnRuns(_finds_mentions, _review_errors)
    )
    model: Predict | None = None
    confidence: str = ""
    patients: BackgroundWork[PatientReview] | None = None
    patients_of_runs: WorkOnRuns[PatientReview] = field(
        default_factory=lambda: WorkOnRuns(_has_patients, review_patients_of_run)
    )

    def add_new_runs(self) -> None:
        """Add the runs that have appeared in the folders of runs."""
        shown = {folder.resolve() for folder in self.runs.values()}
        for folder in self.folders:
            for run in find_runs(folder):
                if run.resolve() not in shown:
                    self.runs[self._name_run(folder, run)] = run

    def _name_run(self, folder: Path, run: Path) -> str:
        """Return an unused name for a run in a folder of runs."""
        name = str(run.relative_to(folder))
        return str(run) if name in self.runs else name

    def find_review(self, run: str = "") -> BackgroundWork[Review] | None:
        """Return the errors of a listed run, or of what the pages were opened with.

        Args:
            run: The name of a run whose errors have an address of their own; "" for the
                model and notes, or the run, with which the pages were opened.

        Returns:
            None if there is no such run, or it finds no mentions.
        """
        if not run:
            return self.review
        folder = self.runs.get(run)
        return None if folder is None else self.reviews_of_runs.find(folder)

    def find_patients(self, run: str = "") -> BackgroundWork[PatientReview] | None:
        """Return the patients of a run of the list, or those of the pages.

        Args:
            run: As in `find_review`.

        Returns:
            None if there is no such run, or it has no patients.
        """
        if not run:
            return self.patients
        folder = self.runs.get(run)
        return None if folder is None else self.patients_of_runs.find(folder)

    def list_sections(self) -> list[tuple[str, str]]:
        """Return the address and name of each section that has content."""
        sections = []
        if self.runs or self.folders:
            sections.append(("/runs", "Runs"))
        if len(self.runs) > 1:
            sections.append(("/compare", "Compare"))
        if self.kits:
            sections.append(("/ledger", "Ledger"))
        if self.desks:
            sections.append(("/approvals", "Approvals"))
        if self.review is not None:
            sections.append(("/errors", "Errors"))
        if self.patients is not None:
            sections.append(("/patients", "Patients"))
        if self.model is not None:
            sections.append(("/try", "Try the model"))
        return sections


def load_content(  # noqa: PLR0913 - what a person may want to set
    paths: Sequence[Path],
    *,
    format: str | None = None,
    corrections: Path | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
    device: str = "cpu",
    backbone: str | None = None,
    labels: Path | None = None,
) -> Content:
    """Return the content of the pages for some paths.

    Notes are read immediately. They are tagged when they are first requested.

    Args:
        paths: Runs, or folders of runs; a model, perhaps with notes; kits.
        format: The format of the notes; recognised if None.
        corrections: The file of decisions; beside the notes or the run if None.
        on_error: As in `fednotes.read`.
        encoding: As in `fednotes.read`.
        device: As in `fednotes.load`.
        backbone: As in `fednotes.load`.
        labels: A table of labels for the notes of patients.

    Raises:
        ConfigError: The paths exclude each other, or decisions cannot be written.
        DataError: Notes cannot be read.
        ModelError: The model cannot be read.
    """
    sorted_paths = _sort_paths(paths)
    models = sorted_paths.models
    runs = sorted_paths.runs
    notes = sorted_paths.notes
    _require_one_model(models, notes)
    content = Content(
        about=str((models or paths)[0]),
        runs=name_paths(runs),
        folders=sorted_paths.run_folders,
        kits=name_paths(sorted_paths.kits),
    )
    content.add_new_runs()
    _add_desks(content)

    options = _ReadOptions(format, on_error, encoding, device, backbone, labels)
    file = corrections or _locate_corrections((notes or runs or paths)[0])
    if models and issubclass(find_model_class(models[0]), PatientModel):
        _add_patients(content, models[0], notes, options)
    else:
        if corrections or notes:
            require_writable(file)
        if models:
            _add_mention_model(content, models[0], notes, file=file, options=options)
    _add_errors_of_run(content, runs, file)
    return content


class _SortedPaths(NamedTuple):
    """The paths with which the pages are opened, by what they are."""

    models: list[Path]
    runs: list[Path]
    kits: list[Path]
    run_folders: list[Path]
    notes: list[Path]


def _sort_paths(paths: Sequence[Path]) -> _SortedPaths:
    """Return paths by what they are; a path that is nothing else holds notes."""
    folders = [path for path in paths if path.is_dir()]
    models = [path for path in folders if _is_saved_model(path)]
    runs = [path for path in folders if path not in models and is_run(path)]
    kits = [path for path in folders if find_ledger_reader(path) is not None]
    known = (*models, *runs, *kits)
    run_folders = [path for path in folders if path not in known and find_runs(path)]
    notes = [path for path in paths if path not in (*known, *run_folders)]
    return _SortedPaths(models, runs, kits, run_folders, notes)


def _is_saved_model(folder: Path) -> bool:
    """Return whether a folder holds a model, of mentions or of patients."""
    return is_model(folder) or issubclass(find_model_class(folder), PatientModel)


class _ReadOptions(NamedTuple):
    """How notes and models are read; see `load_content`."""

    format: str | None
    on_error: OnError
    encoding: str
    device: str
    backbone: str | None
    labels: Path | None


def _add_desks(content: Content) -> None:
    """Add where the people of each site decide on jobs."""
    for name, kit in content.kits.items():
        desk = find_desk(kit)
        if desk is not None:
            content.desks[name] = desk


def _add_patients(
    content: Content, folder: Path, files: Sequence[Path], options: _ReadOptions
) -> None:
    """Add the errors of a phenotyping model in labelled patients.

    Raises:
        ConfigError: There are no patients.
        ModelError: The model cannot be read.
    """
    if not files:
        raise ConfigError(
            f"{folder} is a phenotyping model: also give labelled patients: "
            "fednotes ui MODEL PATIENTS"
        )
    content.patients = BackgroundWork(
        make_review_loader(
            folder,
            files,
            labels=options.labels,
            encoding=options.encoding,
            device=options.device,
            backbone=options.backbone,
        )
    )


def _add_mention_model(
    content: Content,
    folder: Path,
    files: Sequence[Path],
    *,
    file: Path,
    options: _ReadOptions,
) -> None:
    """Add a model that finds mentions, and its errors in notes.

    Args:
        content: The content of the pages.
        folder: The folder of the model.
        files: The files of notes.
        file: The file of decisions.
        options: How notes and models are read.
    """
    model = load_mention_model(folder, options.device, options.backbone)
    content.model = model
    content.confidence = model.confidence
    documents = {
        name: read(path, options.format, options.on_error, encoding=options.encoding)
        for name, path in name_paths(files).items()
    }
    if documents:
        content.review = BackgroundWork(partial(_review_notes, model, documents, file))


def _add_errors_of_run(content: Content, runs: Sequence[Path], file: Path) -> None:
    """Add the errors of the first run, unless the pages show those of a model."""
    if not runs:
        return
    if content.review is None and _finds_mentions(runs[0]):
        content.review = BackgroundWork(partial(review_mentions_of_run, runs[0], file))
    if content.patients is None and _has_patients(runs[0]):
        content.patients = BackgroundWork(partial(review_patients_of_run, runs[0]))


def _review_errors(folder: Path) -> Review:
    """Return the errors of a run, with the decisions in the file beside it."""
    return review_mentions_of_run(folder, _locate_corrections(folder))


def _locate_corrections(path: Path) -> Path:
    """Return the file of decisions about notes or a run."""
    place = path.resolve()
    return place.with_name(f"{place.name}.corrections.json")


def _require_one_model(models: Sequence[Path], notes: Sequence[Path]) -> None:
    """Raise ConfigError for two models, or for notes without a model."""
    usage = "use `fednotes ui MODEL NOTES` or `fednotes ui RUN`"
    if len(models) > 1:
        raise ConfigError(f"the page shows one model at a time: {usage}")
    if notes and not models:
        raise ConfigError(
            f"{notes[0]} is neither a model, nor a run, nor a kit, nor a folder of "
            f"runs; for notes, give a model too: {usage}"
        )


def _review_notes(
    model: MentionModel, documents: dict[str, tuple[Document, ...]], file: Path
) -> Review:
    """Return a model's errors in notes.

    Args:
        model: The model.
        documents: The notes of each file, by its name.
        file: The file of decisions.
    """
    sources = [
        predict_notes(
            name, notes, types=model.types, predict=model, explain=model.explain
        )
        for name, notes in documents.items()
    ]
    return Review(sources, file, ", ".join(documents))


def _finds_mentions(run: Path) -> bool:
    """Return whether a run's models find mentions, according to its files."""
    return read_result_so_far(run).holds in ("", "documents")


def _has_patients(run: Path) -> bool:
    """Return whether a run has ended with models of patients that can be shown."""
    if not has_finished(run):
        return False
    with suppress(FednotesError):  # the page of the run says what is wrong with it
        return load_recorded_job(run).kind.review is not None
    return False


def find_desk(kit: Path) -> ApprovalDesk | None:
    """Return where the people of a site decide on jobs; None without such a place."""
    for desk in plugins.load_all("approvals", ApprovalDesk).values():
        if desk.is_site(kit):
            return cast(ApprovalDesk, desk)
    return None


def find_ledger_reader(folder: Path) -> Any:
    """Return the registered module that reads the ledger of a site's kit.

    Args:
        folder: The folder of the kit.

    Returns:
        None if the folder is not a kit.
    """
    for entry in plugins.list_entries("ledgers").values():
        module = plugins.load_module(entry, ("is_kit", "read_ledger"))
        if module.is_kit(folder):
            return module
    return None
