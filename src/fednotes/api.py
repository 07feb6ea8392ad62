"""The functions of the Python API: read, check, init, simulate, doctor and others.

`fednotes` exports them by name. The command line uses the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from fednotes.core.errors import ConfigError, DataError, ParameterError
from fednotes.core.settings import merge_tables, require_path
from fednotes.core.types import Document
from fednotes.data import formats
from fednotes.data.encodings import AUTO
from fednotes.data.formats.gathering import make_ids_unique
from fednotes.data.formats.problems import OnError, is_refused
from fednotes.data.notes import NoteDatabase, NotePlace, make_note_place
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.card import write_cards
from fednotes.jobs.checking import Checked, check_against, check_files
from fednotes.jobs.diagnosis import Diagnosis, diagnose
from fednotes.jobs.evaluation import Evaluation
from fednotes.jobs.inputs import name_of_notes, open_inputs
from fednotes.jobs.job import Job
from fednotes.jobs.job_check import check_job
from fednotes.jobs.job_file import load_table, parse_job
from fednotes.jobs.models import find_source_folder, load, open_model
from fednotes.jobs.progress import AnyListener, to_listener
from fednotes.jobs.proposal import (
    Choices,
    FirstJob,
    ReadOptions,
    find_places,
    make_first_job,
    read_facts,
    require_output,
)
from fednotes.jobs.results import RunResult
from fednotes.jobs.saved_models import EvaluationOptions, SavedModel
from fednotes.jobs.seeds import SeedsResult, simulate_seeds
from fednotes.jobs.simulate import simulate as simulate_job
from fednotes.jobs.tracking import add_trackers
from fednotes.metrics.calibration import (
    Calibrated,
    Reliability,
    hash_weights,
)
from fednotes.metrics.calibration import calibrate as fit_calibration
from fednotes.metrics.platt import compute_platt_sums, fit_platt

PathLike = str | Path
NotesLike = PathLike | NoteDatabase


def read(
    path: NotesLike,
    format: str | None = None,
    on_error: OnError = "refuse",
    *,
    column: str | None = None,
    id_column: str | None = None,
    encoding: str = AUTO,
) -> tuple[Document, ...]:
    """Return the documents of a corpus, a table or database of notes, or texts.

    Args:
        path: The file, folder or database.
        format: A format of corpora or of notes; recognised from the content if it is
            None.
        on_error: "refuse" raises an error for data that cannot be used; "skip" leaves
            such data out.
        column: The column of a table, or the key of JSON lines, that holds the text.
        id_column: The column of a table, or the key of JSON lines, with the notes' ids.
        encoding: The encoding of files that are neither UTF-8 nor begin with a
            byte-order mark, such as "cp1252".

    Raises:
        DataError: Something is wrong with a file; the message names file and line.
        ConfigError: A parameter has an impossible value.
    """
    place = make_note_place(path)
    if isinstance(place, Path):
        if not place.exists():
            raise DataError(f"{path}: no such file or folder")
        is_corpus = format and formats.extract_format_name(format) in formats.FORMATS
        if is_corpus and column is None and id_column is None:
            return formats.read(place, format, on_error, encoding)
    inputs = open_inputs(
        name_of_notes(place),
        None,
        on_error,
        format=format,
        column=column,
        id_column=id_column,
        encoding=encoding,
    )
    return make_ids_unique(inputs.read_all())


def check(
    *targets: NotesLike,
    format: str | None = None,
    on_error: OnError = "refuse",
    settings: Sequence[str] = (),
    against: PathLike | None = None,
    encoding: str = AUTO,
    estimates_time: bool = False,
) -> Checked:
    """Check a job, a corpus, or the parts of a corpus.

    The result has counts and places, never text.

    Args:
        targets: A job's file or name; or the files, folders and databases of one
            corpus.
        format: Format of the corpus; recognised if it is None.
        on_error: As in `read`.
        settings: Assignments over the job, such as "seed=2".
        against: Another annotation of the corpus's documents, to measure agreement.
        encoding: As in `read`.
        estimates_time: Whether to estimate how long a simulation of the job takes on
            this machine. This trains a model for some seconds.

    Raises:
        DataError: A path does not exist.
        ConfigError: Parameters exclude each other.
    """
    places = _list_checked_places(targets)
    names = [str(place) for place in places]
    known_jobs = list_built_in_jobs()
    jobs = [name for name in names if name.endswith(".toml") or name in known_jobs]
    if jobs:
        if len(names) > 1:
            raise ConfigError(
                f"{jobs[0]} is a job: check it alone, without another job or corpus"
            )
        for_corpora = {
            "encoding": encoding != AUTO,
            "format": bool(format),
            "against": bool(against),
            "on_error": not is_refused(on_error),
        }
        for parameter, is_given in for_corpora.items():
            if is_given:
                raise ParameterError(
                    f"`{parameter}` applies to a corpus, not to a job, whose sites "
                    "have their own: leave it out"
                )
        return check_job(jobs[0], tuple(settings), estimates_time=estimates_time)

    if settings:
        raise ParameterError(
            "`settings` applies to a job, but this is a corpus: leave it out"
        )
    if against is None:
        return check_files(places, format or None, on_error, encoding)
    if len(names) > 1:
        raise ParameterError("`against` compares two corpora: give only one beside it")
    other = require_path(against, "a corpus to compare with")
    if not isinstance(places[0], Path):
        raise ParameterError(
            "`against` compares two annotations, and a database has none: leave it out"
        )
    return check_against(places[0], other, format or None, on_error, encoding)


def _list_checked_places(targets: Sequence[NotesLike]) -> list[NotePlace]:
    """Return the targets of `check` as paths and databases.

    Raises:
        ConfigError: A target is neither, or there is none.
    """
    for target in targets:
        if not isinstance(target, NoteDatabase):
            require_path(target, "a corpus or a job")
    if not targets or not all(str(target).strip() for target in targets):
        raise ConfigError("nothing to check: give a corpus file or folder, or a job")
    return [make_note_place(target) for target in targets]


def doctor(
    target: Job | PathLike | Mapping[str, Any], *, settings: Sequence[str] = ()
) -> Diagnosis:
    """Explain why a run learned little or federation did not help.

    The result has counts, scores and names of entity types, never text.

    Args:
        target: The folder of a run, or of the runs of several seeds; or a job that has
            not run yet, as `job` accepts it, whose data are read.
        settings: Assignments over a job's file, such as "training.epochs=3"; only if
            `target` is the path or name of a job.

    Returns:
        The likely causes by importance, each with its evidence and settings to try.

    Raises:
        DataError: A file of the run or the job cannot be used.
        ConfigError: There is no such run or job, it has a mistake, or `settings` does
            not apply to it.
    """
    if isinstance(target, Mapping):
        return diagnose(job(target), settings)
    if isinstance(target, Job):
        return diagnose(target, settings)
    return diagnose(require_path(target, "the folder of a run, or a job"), settings)


def init(
    paths: NotesLike | Sequence[NotesLike] | Mapping[str, NotesLike],
    out: PathLike | None = None,
    *,
    method: str = "",
    encoder: str = "",
    silos: int = 0,
    label_maps: Mapping[tuple[str, str], bool] | None = None,
    format: str | None = None,
    column: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
    overwrite: bool = False,
) -> FirstJob:
    """Propose a first job for the notes of several sites, and write it if asked.

    The result has counts, names of entity types and paths, never text.

    Args:
        paths: A folder with a folder for each site; one corpus, which is dealt out to
            simulated sites; or the paths or databases of several sites, optionally
            keyed by site name.
        out: The job file to write; None writes nothing.
        method: The method; proposed if it is "".
        encoder: "minilm", a directory of an encoder, or "none" for a light tagger;
            proposed if it is "".
        silos: Number of simulated sites of one corpus; proposed if it is 0.
        label_maps: Whether to rename an entity type, by site and old name; the others
            are renamed as proposed.
        format: As in `read`.
        column: As in `read`.
        on_error: As in `read`.
        encoding: As in `read`.
        overwrite: Replace the file `out` if there is one.

    Raises:
        DataError: Something is wrong with a file; the message names file and line.
        ConfigError: A parameter has an invalid value, or `out` exists.
        MissingExtra: The notes need an encoder, and none is installed.
    """
    file = None if out is None else require_path(out, "a job file to write")
    options = ReadOptions(
        format=format or "",
        column=column or "",
        on_error=on_error,
        encoding=encoding,
    )
    choices = Choices(
        method=method, encoder=encoder, silos=silos, label_maps=label_maps or {}
    )
    require_output(file, overwrite=overwrite)
    facts = read_facts(find_places(_list_paths(paths), encoding), options)
    return make_first_job(facts, choices, file, overwrite=overwrite)


def _list_paths(
    paths: NotesLike | Sequence[NotesLike] | Mapping[str, NotesLike],
) -> list[str | NoteDatabase] | dict[str, str | NoteDatabase]:
    """Return the texts of paths to notes; databases are returned unchanged.

    Args:
        paths: One path or database, several, or several by the name of the site.

    Raises:
        ConfigError: A value is neither a path nor a database, a path is empty, or there
            is no path.
    """
    if isinstance(paths, Mapping):
        named_texts = {name: name_of_notes(path) for name, path in paths.items()}
        _require_paths(list(paths.values()))
        return named_texts

    if isinstance(paths, str | Path | NoteDatabase):
        listed = [paths]
    else:
        listed = list(paths)
    texts = [name_of_notes(path) for path in listed]
    _require_paths(listed)
    return texts


def _require_paths(paths: Sequence[NotesLike]) -> None:
    """Raise ConfigError if there is no path, or if one is an empty text.

    As a `Path`, an empty text would be the working directory.
    """
    if not paths or not all(str(path).strip() for path in paths):
        raise ConfigError("no notes were given: give a file or folder of notes")


def job(source: PathLike | Mapping[str, Any] | None = None, /, **changes: Any) -> Job:
    """Return a checked job.

        fn.job("demo", seed=2, training={"epochs": 3})

    Args:
        source: A job file, the name of a built-in job such as "demo", or a job's
            tables.
        changes: Keys and tables over the source; or the whole job, if there is no
            source. Relative paths are relative to the job's file, or to the current
            folder if there is none.

    Raises:
        ConfigError: The job has a mistake; the message names table and key.
    """
    tables: Mapping[str, Any] = {}
    folder, name, where = Path.cwd(), "job", "job"
    if isinstance(source, Mapping):
        tables = source
    elif source is not None:
        tables, path = load_table(source)
        folder, name, where = path.resolve().parent, path.stem, str(path)
    try:
        # Convert to JSON and back, because a run stores its job as JSON.
        table = json.loads(json.dumps(merge_tables(tables, changes), default=_to_json))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: {error}: a job contains text, numbers, true or false, "
            "lists and tables"
        ) from error
    return parse_job(table, name, folder, where)


def _to_json(value: Any) -> str:
    """Return a path of a job as text; raise TypeError for any other value."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a job cannot hold a value of type {type(value).__name__}")


@overload
def simulate(
    source: Job | PathLike | Mapping[str, Any],
    out: PathLike,
    *,
    seeds: None = None,
    progress: AnyListener = None,
    track: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    workers: int | Literal["auto"] = "auto",
    cluster: str | None = None,
    command: str = "",
) -> RunResult: ...
@overload
def simulate(
    source: Job | PathLike | Mapping[str, Any],
    out: PathLike,
    *,
    seeds: Sequence[int],
    progress: AnyListener = None,
    track: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    workers: int | Literal["auto"] = "auto",
    cluster: str | None = None,
    command: str = "",
) -> SeedsResult: ...
def simulate(
    source: Job | PathLike | Mapping[str, Any],
    out: PathLike,
    *,
    seeds: Sequence[int] | None = None,
    progress: AnyListener = None,
    track: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    workers: int | Literal["auto"] = "auto",
    cluster: str | None = None,
    command: str = "",
) -> RunResult | SeedsResult:
    """Train a job's sites alone, federated and pooled, and score the models.

    Args:
        source: A job, or what `job` accepts.
        out: Folder of the run. Each model is saved in it with its card; `write_report`
            makes a page of it.
        seeds: Run the job once with each of these seeds, in `out/seed-1` and so on, and
            return means and standard deviations over them.
        progress: A function that is called with part (such as "federated") and round
            after each round, or a `ProgressListener` (`jobs/progress.py`).
        track: Trackers of experiments and their targets, such as
            "mlflow=http://127.0.0.1:5000" or "tensorboard=events/".
        resume: Resume an interrupted run, or train conditions that were added to it.
        overwrite: Rename an earlier run in `out` to `OUT.previous`.
        device: Device to compute on, such as "cuda"; with several workers, "cuda:*"
            deals them out to all GPUs.
        workers: Number of processes that compute at the same time, for different sites.
            With 1, this process computes. With "auto", it trains the first condition,
            and processes for all free cores train the others if these take longer than
            half a minute. Results are bit-identical with any
            number of workers.
        cluster: Address of a Ray cluster on which these processes compute, such as
            "10.0.0.1:6379"; "auto" takes it from RAY_ADDRESS. There,
            `workers` = "auto" means as many as the cluster has room for.
        command: The command that repeats the run, for its record.

    Raises:
        FednotesError: The job cannot run, or the folder cannot be used.
    """
    parsed = source if isinstance(source, Job) else job(source)
    folder = require_path(out, "a folder")
    listener = add_trackers(to_listener(progress), track)
    if seeds is not None:
        return simulate_seeds(
            parsed,
            folder,
            tuple(seeds),
            listener=listener,
            resume=resume,
            overwrite=overwrite,
            device=device,
            workers=workers,
            cluster=cluster,
            command=command,
        )
    result = simulate_job(
        parsed,
        folder,
        listener=listener,
        resume=resume,
        overwrite=overwrite,
        device=device,
        workers=workers,
        cluster=cluster,
        command=command,
    )
    write_cards(folder)
    listener.finish(folder)
    return result


def evaluate(
    model: SavedModel | PathLike,
    documents: NotesLike | Sequence[Document],
    *,
    types: Sequence[str] = (),
    label_map: Mapping[str, str] | None = None,
    labels: PathLike | None = None,
    format: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> Evaluation:
    """Score a model on annotated documents, or on labelled patients.

    Args:
        model: An open model, or its folder.
        documents: Annotated documents, or a file or folder of them. For a model of
            patients: a file or folder of labelled patients, or of their notes, which
            may be in a database.
        types: The entity types to score; by default all types of the model that the
            documents annotate.
        label_map: New names of the documents' labels.
        labels: A table of the patients' labels, if `documents` holds notes.
        format: As in `read`; for annotated documents only.
        on_error: As in `read`; for annotated documents only.
        encoding: As in `read`.

    Raises:
        DataError: The documents have none of the model's labels.
        ConfigError: A parameter does not apply to the model.
    """
    options = EvaluationOptions(
        types=types,
        label_map=label_map,
        labels=None if labels is None else require_path(labels, "a table of labels"),
        format=format,
        on_error=on_error,
        encoding=encoding,
    )
    return open_model(model).evaluate(documents, options)


def reliability(
    model: SavedModel | PathLike,
    documents: PathLike | Sequence[Document],
    *,
    label_map: Mapping[str, str] | None = None,
    encoding: str = AUTO,
) -> Reliability:
    """Measure how reliable a model's confidences are.

    Args:
        model: An open model that finds mentions, or its folder.
        documents: Annotated documents that the model was not trained on, or a file or
            folder of them.
        label_map: New names of the documents' labels.
        encoding: As in `read`.

    Raises:
        ConfigError: The model finds phenotypes of patients.
        DataError: The documents have none of the model's labels.
    """
    judged = open_model(model).judge_confidences(documents, label_map, encoding)
    confidences, is_right, owners = judged
    return Reliability.of(confidences, is_right, len(np.unique(owners)))


def calibrate(
    path: SavedModel | PathLike,
    notes: PathLike | Sequence[Document],
    *,
    label_map: Mapping[str, str] | None = None,
    device: str = "cpu",
    backbone: str | None = None,
    encoding: str = AUTO,
) -> Calibrated:
    """Calibrate a saved model's confidences by Platt scaling of their log-odds.

    The calibration is saved in the model's folder, as `calibration.json`, if five-fold
    cross-validation shows a log loss that is lower by more than its standard error.
    Otherwise nothing is written. An open model does not change.

    Args:
        path: The model's folder, or an open model that was loaded from one.
        notes: Annotated notes that the model was not trained on, at least five; or a
            file or folder of them.
        label_map: New names of the notes' labels.
        device: Device to compute on.
        backbone: Folder of the model's frozen encoder, if it has moved.
        encoding: As in `read`.

    Raises:
        ConfigError: The model finds phenotypes of patients.
        DataError: There are fewer than five notes, or none of the model's labels.
    """
    folder = find_source_folder(path)
    model = load(folder, device, backbone, calibrated=False)
    confidences, is_right, owners = model.judge_confidences(notes, label_map, encoding)
    weights = hash_weights(folder)
    calibrated = fit_calibration(confidences, is_right, owners, _fit_platt, weights)
    if calibrated.calibration is not None:
        calibrated.calibration.write(folder)
    return calibrated


def _fit_platt(odds: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Return the slope and the intercept of Platt scaling.

    Args:
        odds: (predictions,) log-odds of the confidences.
        right: (predictions,) whether each prediction is right.
    """
    scores = odds[:, None]
    targets = np.where(right, 1, -1)[:, None]
    fitted = fit_platt(lambda platt: compute_platt_sums(platt, scores, targets), 1)
    slope, intercept = fitted[0].tolist()
    return slope, intercept
