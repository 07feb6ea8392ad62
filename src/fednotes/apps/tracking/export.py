"""Runs that have ended, or stopped, in tracking tools."""

from __future__ import annotations

from pathlib import Path

from fednotes.apps.tracking.mlflow import EXPERIMENT, MLflow
from fednotes.apps.tracking.tensorboard import TensorBoard
from fednotes.apps.tracking.tracker import Tool, Tracker
from fednotes.core.errors import DataError, FednotesError, TrainingError
from fednotes.core.settings import require_path
from fednotes.jobs.run_folder import is_run
from fednotes.jobs.seeds import list_seed_folders


def export_mlflow(run: str | Path, uri: str, *, experiment: str = EXPERIMENT) -> int:
    """Add a run to MLflow, and return the number of runs that were added.

    Args:
        run: The folder of a run, or of runs with several seeds.
        uri: The tracking URI: the address of a server, or a folder.
        experiment: Name of the experiment.

    Raises:
        DataError: There is no run in the folder.
        MissingExtra: MLflow is not installed.
        TrainingError: The server or the folder cannot be written to.
    """
    return _export(MLflow(uri, experiment), require_path(run, "a run's folder"))


def export_tensorboard(run: str | Path, folder: str | Path) -> int:
    """Write a run as event files, and return the number of runs that were written.

    Args:
        run: The folder of a run, or of runs with several seeds.
        folder: The folder that TensorBoard shows; the run gets a new one in it.

    Raises:
        DataError: There is no run in the folder.
        MissingExtra: TensorBoard is not installed.
        TrainingError: The folder cannot be written to.
    """
    tool = TensorBoard(require_path(folder, "a folder for event files"))
    return _export(tool, require_path(run, "a run's folder"))


def _export(tool: Tool, folder: Path) -> int:
    """Write the runs in a folder with a tool; return how many there are."""
    runs = [folder] if is_run(folder) else list(list_seed_folders(folder).values())
    runs = [run for run in runs if is_run(run)]
    if not runs:
        raise DataError(f"{folder}: no run there: give the folder of a run")
    tracker = Tracker(tool)
    for run in runs:
        try:
            tracker.start(run)
            tracker.finish(run)
        except FednotesError:
            raise
        except Exception as error:  # tools raise exception classes of their own
            raise TrainingError(
                f"{run}: cannot be exported ({error}): check the address or the folder"
            ) from error
    return len(runs)
