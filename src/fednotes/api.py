"""What a person does with jobs, corpora and runs, as functions; `fednotes` gives them
by name.

The commands of the command line stand above the same functions of `jobs/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.settings import over, path_of
from fednotes.core.types import Document
from fednotes.data import formats
from fednotes.data.encodings import AUTO
from fednotes.data.formats.gathering import with_unique_ids
from fednotes.data.formats.problems import OnError, refuses
from fednotes.jobs import simulate as simulating
from fednotes.jobs.card import write_cards
from fednotes.jobs.checking import Checked, check_against, check_files, check_job
from fednotes.jobs.evaluation import Evaluation
from fednotes.jobs.inputs import inputs_of
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import built_in_jobs, load_table, parse_job
from fednotes.jobs.models import MentionModel, PatientModel, folder_of, load
from fednotes.jobs.predict import evaluate_documents, gold_of
from fednotes.jobs.results import RunResult
from fednotes.jobs.seeds import SeedsResult, simulate_seeds
from fednotes.metrics.calibration import (
    Calibrated,
    Calibration,
    Reliability,
    judged,
    weights_digest,
)
from fednotes.metrics.calibration import calibrate as fit_calibration
from fednotes.metrics.platt import fit_platt, platt_sums

PathLike = str | Path


def read(
    path: PathLike,
    format: str | None = None,
    on_error: OnError = "refuse",
    *,
    column: str | None = None,
    encoding: str = AUTO,
) -> tuple[Document, ...]:
    """Return the documents of a file or folder: a corpus, a table of notes, plain text
    files.

    Args:
        path: The file or folder.
        format: Of corpora or of notes; recognised from the content if it is None.
        on_error: With "skip", what cannot be used is left out.
        column: The column of a table, or the key of JSON lines, that holds the text.
        encoding: Of files without a byte-order mark that are not UTF-8, such as
            "cp1252".

    Raises:
        DataError: Something is wrong with the files; with file and line.
        ConfigError: A parameter is none of those that are possible.
    """
    if not path_of(path, "a file or folder of notes").exists():
        raise DataError(f"{path}: no such file or folder")
    if format in formats.FORMATS and column is None:
        return formats.read(path, format, on_error, encoding)
    inputs = inputs_of(
        str(path), None, on_error, format=format, column=column, encoding=encoding
    )
    return with_unique_ids(inputs.all())


def check(
    *targets: PathLike,
    format: str | None = None,
    on_error: OnError = "refuse",
    settings: Sequence[str] = (),
    against: PathLike | None = None,
    encoding: str = AUTO,
    heard: Callable[[int], None] | None = None,
) -> Checked:
    """What is wrong with a job (its file or name), or with a corpus or the parts of
    one.

    format, on_error, encoding: of a corpus. settings: of a job, such as "seed=2".
    against: another annotation of a corpus's documents, whose agreement with it is
    told. Counts and places, never text. heard: is told, from time to time, how many
    documents of a corpus were read.
    Raises DataError for a path that does not exist.
    """
    for target in targets:
        path_of(target, "a corpus or a job")
    names = [str(target) for target in targets]
    if not names or not all(map(str.strip, names)):
        raise ConfigError("name a corpus file or folder, or a job")
    known = built_in_jobs()
    if named := [name for name in names if name.endswith(".toml") or name in known]:
        if len(names) > 1:
            raise ConfigError(
                f"{named[0]}: check one job at a time, and nothing beside it"
            )
        if format or against or not refuses(on_error) or encoding != AUTO:
            option = "--format" if format else "--against" if against else "--on-error"
            if encoding != AUTO:
                option = "--encoding"
            raise ConfigError(f"{option} is for a corpus; a job's sites have their own")
        return check_job(named[0], tuple(settings))
    if settings:
        raise ConfigError("--set is for a job; this is a corpus")
    if against is None:
        return check_files(
            [Path(name) for name in names], format or None, on_error, encoding, heard
        )
    if len(names) > 1:
        raise ConfigError("--against compares one corpus with another: name one")
    other = path_of(against, "a corpus to compare with")
    return check_against(Path(names[0]), other, format or None, on_error, encoding)


def job(source: PathLike | Mapping[str, Any] | None = None, /, **changes: Any) -> Job:
    """A job of a file, of a built-in name such as "demo", or of a table; checked.

    changes: keys and tables over it, or all of it: `job("demo", seed=2,
    training={"epochs": 3})`. Relative paths are from the job's file; without one, from
    the current folder. Raises ConfigError that names table and key.
    """
    given = source if isinstance(source, Mapping) else {}
    folder, name, where = Path.cwd(), "job", "job"
    if source is not None and not isinstance(source, Mapping):
        given, path = load_table(source)
        folder, name, where = path.resolve().parent, path.stem, str(path)
    try:  # a run keeps it as JSON
        table = json.loads(json.dumps(over(given, changes), default=_plain))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: {error}: a job has text, numbers, lists and tables"
        ) from error
    return parse_job(table, name, folder, where)


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a job")


@overload
def simulate(
    source: Job | PathLike | Mapping[str, Any],
    out: PathLike,
    *,
    seeds: None = None,
    progress: simulating.Told = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    command: str = "",
) -> RunResult: ...
@overload
def simulate(
    source: Job | PathLike | Mapping[str, Any],
    out: PathLike,
    *,
    seeds: Sequence[int],
    progress: simulating.Told = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    command: str = "",
) -> SeedsResult: ...
def simulate(
    source: Job | PathLike | Mapping[str, Any],
    out: PathLike,
    *,
    seeds: Sequence[int] | None = None,
    progress: simulating.Told = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    command: str = "",
) -> RunResult | SeedsResult:
    """Train and judge a job's sites on this machine: alone, federated, pooled.

    source: a job, or what `job` makes one of.
    out: the run's folder: its models lie in it, each with its card; `report` makes its
        page.
    progress(part, round): called after each round of each part, such as "federated"; or
        a Display.
    resume: go on after a stop. overwrite: an earlier run there becomes `OUT.previous`.
    command: how a person repeats it. seeds: run the job once with each of these seeds,
    in `out/seed-1` and so on, and return means and deviations over them. Raises
    FednotesError.
    """
    made = source if isinstance(source, Job) else job(source)
    options: Any = {
        "resume": resume,
        "overwrite": overwrite,
        "device": device,
        "command": command,
    }
    if seeds is not None:
        folder = path_of(out, "a folder")
        options |= {"display": progress, "after_run": write_cards}
        return simulate_seeds(made, folder, tuple(seeds), **options)
    result = simulating.simulate(
        made, path_of(out, "a folder"), display=progress, **options
    )
    write_cards(Path(out))
    return result


def evaluate(
    model: MentionModel | PatientModel | PathLike,
    documents: PathLike | Sequence[Document],
    *,
    types: Sequence[str] = (),
    label_map: Mapping[str, str] | None = None,
    labels: PathLike | None = None,
    format: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> Evaluation:
    """Scores of a model on annotated documents, or a file or folder of them; or on
    patients.

    model: opened, or its folder. Scored are its types that they annotate, or `types`.
    label_map: labels by other names. format, on_error, encoding: as `read`. A model of
    patients takes a file or folder of labelled patients, or of notes, with a table of
    `labels` beside it, and the first four options of none. Raises DataError where no
    label is common.
    """
    if not isinstance(model, MentionModel | PatientModel):
        model = load(model)
    if isinstance(model, PatientModel):
        if format or types or not refuses(on_error):
            option = "--format" if format else "--types" if types else "--on-error"
            raise ConfigError(
                f"{option} is for annotated text, not for labelled patients"
            )
        if not isinstance(documents, str | Path):
            raise ConfigError("patients are scored in a file or folder")
        beside = None if labels is None else path_of(labels, "a table of labels")
        return model.evaluate(Path(documents), label_map, beside, encoding)
    if labels is not None:
        named = model.folder or "the model"
        raise ConfigError(
            f"--labels: {named} is no phenotyping model: it finds mentions"
        )
    given, where, skipped = _documents(documents, format, on_error, encoding)
    return evaluate_documents(
        model.model, given, where, label_map, types=types, skipped=skipped
    )


def _documents(
    given: PathLike | Sequence[Document],
    format: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> tuple[tuple[Document, ...], str, str]:
    """Documents, what messages call them, and what of them could not be read."""
    if isinstance(given, str | Path):
        documents, problems = formats.examine(given, format, encoding)
        problems.refuse(on_error, documents)
        return documents, str(given), str(problems)
    held = tuple(given) if isinstance(given, Iterable) else (given,)
    if wrong := next((each for each in held if not isinstance(each, Document)), None):
        raise DataError(
            f"expected annotated Documents, not {type(wrong).__name__}; `read` gives them"
        )
    return held, "the corpus", ""


def reliability(
    model: MentionModel | PatientModel | PathLike,
    documents: PathLike | Sequence[Document],
    *,
    label_map: Mapping[str, str] | None = None,
    encoding: str = AUTO,
) -> Reliability:
    """How far the model's confidences are what they say, on annotated documents that it
    did not learn from. Arguments and errors as of `evaluate`; ConfigError for a model
    of patients."""
    if not isinstance(model, MentionModel | PatientModel):
        model = load(model)
    if not isinstance(model, MentionModel):
        raise ConfigError(
            "confidences are of mentions, and this model finds phenotypes"
        )
    chances, right, owner = _judged(
        model, documents, label_map, model.calibration, encoding
    )
    return Reliability.of(chances, right, len(np.unique(owner)))


def calibrate(
    path: MentionModel | PatientModel | PathLike,
    notes: PathLike | Sequence[Document],
    *,
    label_map: Mapping[str, str] | None = None,
    device: str = "cpu",
    backbone: str | None = None,
    encoding: str = AUTO,
) -> Calibrated:
    """Calibrate a saved model's confidences on annotated notes that it did not learn
    from.

    Platt scaling of their log-odds. Kept, as `calibration.json` in the model's folder,
    where five-fold cross-validation shows a log loss that is lower by more than its
    standard error; else nothing is written; a model that is open stays as it is. Raises
    DataError as `evaluate`, and for fewer than five notes. encoding: as of `read`.
    """
    folder = folder_of(path)
    model = load(folder, device, backbone, calibrated=False)
    if not isinstance(model, MentionModel):
        raise ConfigError(
            f"{folder}: phenotypes are calibrated in training ([training] calibrate = true)"
        )
    weights = weights_digest(folder)
    found = fit_calibration(
        *_judged(model, notes, label_map, None, encoding), _platt, weights
    )
    if found.calibration is not None:
        found.calibration.write(folder)
    return found


def _judged(
    model: MentionModel,
    documents: PathLike | Sequence[Document],
    label_map: Mapping[str, str] | None,
    calibration: Calibration | None,
    encoding: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    given, where, _ = _documents(documents, encoding=encoding)
    gold, scored, _ = gold_of(model.model, given, where, label_map)
    predicted = model.model.predict(gold, confidence=True)
    chances, right, owner = judged(gold, predicted, scored)
    return calibration.values(chances) if calibration else chances, right, owner


def _platt(odds: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    scores, targets = odds[:, None], np.where(right, 1, -1)[:, None]
    slope, intercept = fit_platt(lambda platt: platt_sums(platt, scores, targets), 1)[
        0
    ].tolist()
    return slope, intercept
