"""MLflow: runs on a tracking server, or in a folder.

MLflow's telemetry is switched off. Nothing is sent anywhere but to the server that the
user names, and to where this server keeps files. Nothing of this machine is recorded:
no user, no script, no commit.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fednotes.apps.tracking.facts import FinalScores, Point, RunFacts
from fednotes.apps.tracking.tracker import Tracker
from fednotes.core.errors import ConfigError, TrainingError, needs
from fednotes.jobs.tracking import TrackerKind

EXPERIMENT = "fednotes"
_TEST = "test"  # the first part of the names of final scores
_MAX_BATCH = 100  # settings or values in a request; MLflow accepts no more settings
_MAX_VALUE = 500  # characters of a setting, the bound of older servers
_MAX_NAME = 250
_NOT_IN_NAMES = re.compile(r"[^\w. -]")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_ENVIRONMENT = {
    # Without these, a server that is down would hold a run up for minutes.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    # It would print the address with its password, and the run's name uncleaned.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def prepare_environment(uri: str) -> None:
    """Set MLflow's environment variables, which it reads when it is imported.

    Args:
        uri: The tracking URI.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    scheme = _SCHEME.match(uri)
    if scheme is None or scheme[1].lower() == "file":
        # Version 3 wants a confirmation that runs may be in a folder.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")


class MLflow:
    """Writes runs to MLflow.

    Args:
        uri: The tracking URI: an address such as http://127.0.0.1:5000, or a folder.
        experiment: Name of the experiment to which the runs belong.

    Raises:
        MissingExtra: MLflow is not installed.
        ConfigError: The URI is empty.
    """

    def __init__(self, uri: str, experiment: str = EXPERIMENT) -> None:
        if not uri.strip():
            raise ConfigError("the tracking URI is empty: give a server or a folder")
        prepare_environment(uri)
        with needs("mlflow", "mlflow"):
            from mlflow.tracking import MlflowClient
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._experiment = experiment
        self._run = ""

    def open(self, facts: RunFacts) -> None:
        """Begin a run."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            experiment_id = self._client.create_experiment(self._experiment)
        else:
            experiment_id = experiment.experiment_id
        tags = {"fednotes.title": facts.title, "fednotes.method": facts.method}
        run = self._client.create_run(experiment_id, tags=tags, run_name=facts.name)
        self._run = run.info.run_id
        self._add_settings(facts)

    def _add_settings(self, facts: RunFacts) -> None:
        """Add the job's settings to the run."""
        from mlflow.entities import Param

        settings = [
            Param(_make_name(key), value[:_MAX_VALUE])
            for key, value in facts.settings.items()
        ]
        for start in range(0, len(settings), _MAX_BATCH):
            self._client.log_batch(
                self._run, params=settings[start : start + _MAX_BATCH]
            )

    def add_points(self, points: Sequence[Point]) -> None:
        """Add to the curves of the run."""
        self._add_values(
            [
                (_make_name(point.condition, point.site, name), value, point.round)
                for point in points
                for name, value in point.values.items()
            ]
        )

    def add_scores(self, scores: Sequence[FinalScores]) -> None:
        """Add the scores of the run that has ended."""
        self._add_values(
            [
                (_make_name(_TEST, final.condition, final.site, name), value, 0)
                for final in scores
                for name, value in final.values.items()
            ]
        )

    def _add_values(self, values: Sequence[tuple[str, float, int]]) -> None:
        """Add values to the curves of the run, given as (name, value, step)."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value, step in values]
        for start in range(0, len(metrics), _MAX_BATCH):
            self._client.log_batch(
                self._run, metrics=metrics[start : start + _MAX_BATCH]
            )

    def add_files(self, files: Sequence[Path]) -> None:
        """Add files, such as the report.

        Raises:
            TrainingError: The server names a folder of this machine that has a file of
                the same name.
        """
        store = self._open_file_store()
        folder = getattr(store, "artifact_dir", None)  # of a store in a folder
        for file in files:
            if folder is not None:
                _require_new(Path(folder, file.name))
            store.log_artifact(str(file))

    def _open_file_store(self) -> Any:
        """Return MLflow's store for the run's files, at the address that the run names.

        The address is read only once, because a lying server could name another one the
        second time.
        """
        from mlflow.store.artifact.artifact_repository_registry import (
            get_artifact_repository,
        )
        from mlflow.utils.uri import add_databricks_profile_info_to_artifact_uri

        tracking_uri = self._client.tracking_uri
        address = add_databricks_profile_info_to_artifact_uri(
            self._client.get_run(self._run).info.artifact_uri, tracking_uri
        )
        return get_artifact_repository(address, tracking_uri=tracking_uri)

    def close(self, *, is_finished: bool) -> None:
        """End the run."""
        status = "FINISHED" if is_finished else "KILLED"
        self._client.set_terminated(self._run, status=status)


def _require_new(path: Path) -> None:
    """Raise TrainingError if a file of a new run is there already.

    The folder of a new run is empty. A server that lies could have a file of another
    project replaced.
    """
    if os.path.lexists(path):
        raise TrainingError(
            f"{path}: MLflow's server wants the run's files in a folder that has "
            "files of another run or project, which would be replaced: check the "
            "server's address and its setting for artifacts"
        )


def _make_name(*parts: str) -> str:
    """Return a name that MLflow accepts, with a slash between the parts."""
    safe = (_NOT_IN_NAMES.sub("_", part) for part in parts if part)
    return "/".join(safe)[:_MAX_NAME]


def open_tracker(target: str) -> Tracker:
    """Return a tracker that writes to a tracking URI."""
    return Tracker(MLflow(target))


TRACKER = TrackerKind(open_tracker, target="URI")
