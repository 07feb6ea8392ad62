"""Runs in MLflow and TensorBoard, read back by their own libraries."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from applications import needs_app
from tiny_jobs import JOB, TAGGER, corpus
from tracked_events import read_events

needs_app("tracking")

import fednotes as fn
from fednotes.apps.tracking import mlflow as mlflow_tool
from fednotes.apps.tracking.export import export_mlflow, export_tensorboard
from fednotes.apps.tracking.facts import Point, RunFacts, list_points, read_run_facts
from fednotes.apps.tracking.tracker import Tracker
from fednotes.core.errors import (
    ConfigError,
    DataError,
    MissingExtra,
    ParameterError,
    TrainingError,
)
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.metrics_file import read_metrics
from fednotes.jobs.parts import Part
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.results import RunResult

Command = Callable[..., tuple[int, str, str]]

# A word of the notes, part of each mention, and a folder above the notes.
SECRET = "Zyxwolan"
FOLDER = "ward-of-dr-house"


class Stopped(Exception):
    """Stands for whatever ends a run."""


def write_job(folder: Path, *, lines: str = "") -> Path:
    """Write a job of two sites whose notes and their folder have known names."""
    notes = folder / FOLDER
    notes.mkdir(parents=True)
    corpus(notes / "north.conll", "Drug", SECRET)
    corpus(notes / "south.conll", "ADE", SECRET)
    sites = "".join(
        f'[sites.{name}]\npath = "{notes / name}.conll"\n'
        for name in ("north", "south")
    )
    path = folder / "job.toml"
    text = JOB.replace('["federated"]', '["alone", "federated"]')
    path.write_text(text.replace("epochs = 1", "epochs = 2") + lines + sites, "utf-8")
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def tracked(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was tracked while it trained, beside what the tools wrote."""
    folder = tmp_path_factory.mktemp("tracked")
    fn.simulate(
        job,
        folder / "run",
        track=[f"mlflow={folder / 'store'}", f"tensorboard={folder / 'events'}"],
    )
    return folder


def read_runs(store: Path) -> list[Any]:
    """Return the runs in a store of MLflow."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=str(store))
    experiment = client.get_experiment_by_name("fednotes")
    return list(client.search_runs([experiment.experiment_id]))


def read_history(store: Path, run: Any, name: str) -> dict[int, float]:
    """Return a curve of a run in a store of MLflow, by step."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=str(store))
    history = client.get_metric_history(run.info.run_id, name)
    assert len({metric.step for metric in history}) == len(history)
    return {metric.step: metric.value for metric in history}


def artifacts_of(store: Path, run: Any) -> Path:
    """Return the folder of a run's files in a store of MLflow."""
    return Path(store, run.info.experiment_id, run.info.run_id, "artifacts")


def expected_curves(run: Path) -> dict[tuple[str, str, str], dict[int, float]]:
    """Return condition, site and name → round → value, from metrics.jsonl."""
    curves: dict[tuple[str, str, str], dict[int, float]] = {}
    for entry in read_metrics(run):
        for point in list_points(entry):
            for name, value in point.values.items():
                curve = curves.setdefault((point.condition, point.site, name), {})
                curve[point.round] = value
    return curves


# ---- what the tools read -------------------------------------------------------------


def test_mlflow_has_settings_curves_scores_and_files(tracked: Path) -> None:
    (run,) = read_runs(tracked / "store")
    assert run.info.status == "FINISHED"
    assert run.data.params["training.epochs"] == "2"
    assert run.data.params["model.lstm_units"] == "4"
    assert run.data.params["method"] == "fedner"
    assert not [name for name in run.data.params if name.startswith("sites")]
    curves = expected_curves(tracked / "run")
    sites = {(condition, site) for condition, site, _ in curves}
    assert {("alone", "north"), ("federated", "south"), ("federated", "")} <= sites
    for (condition, site, name), values in curves.items():
        key = "/".join(part for part in (condition, site, name) if part)
        assert read_history(tracked / "store", run, key) == pytest.approx(values)
    scores = json.loads((tracked / "run/summary.json").read_text())
    for site, conditions in scores["sites"].items():
        for condition, of in conditions.items():
            metrics = run.data.metrics
            f1 = metrics[f"test/{condition}/{site}/strict_f1"]
            assert f1 == pytest.approx(of["strict"]["f1"])
    mean = run.data.metrics["test/federated/mean/strict_f1"]
    assert mean == pytest.approx(scores["mean"]["federated"]["strict"]["f1"])
    assert run.data.metrics["test/federated/bytes_up"] == scores["bytes_up"]
    files = {path.name for path in artifacts_of(tracked / "store", run).iterdir()}
    assert {"summary.json", "report.html", "job.toml"} <= files
    assert any(name.startswith("model_card") for name in files)


def test_tensorboard_has_settings_curves_and_scores(tracked: Path) -> None:
    (run,) = (tracked / "events").iterdir()
    for (condition, site, name), values in expected_curves(tracked / "run").items():
        events = read_events(run.joinpath(*filter(None, (condition, site))))
        scalars = events.Scalars(name)
        assert {s.step: s.value for s in scalars} == pytest.approx(values, rel=1e-5)
    scores = json.loads((tracked / "run/summary.json").read_text())
    (f1,) = read_events(run / "federated/north").Scalars("test/strict_f1")
    expected = scores["sites"]["north"]["federated"]["strict"]["f1"]
    assert f1.value == pytest.approx(expected, rel=1e-5)
    texts = read_events(run)
    (settings,) = texts.Tensors("settings/text_summary")
    assert b"training.epochs | 2" in settings.tensor_proto.string_val[0]
    assert texts.Tensors("job/text_summary")
    assert any("model_card" in tag for tag in texts.Tags()["tensors"])


def test_a_later_export_equals_live_tracking(tracked: Path, tmp_path: Path) -> None:
    assert export_mlflow(tracked / "run", str(tmp_path / "store")) == 1
    (live,), (later,) = read_runs(tracked / "store"), read_runs(tmp_path / "store")
    assert later.data.params == live.data.params
    assert later.data.metrics == live.data.metrics
    assert export_tensorboard(tracked / "run", tmp_path / "events") == 1
    assert export_tensorboard(tracked / "run", tmp_path / "events") == 1
    folders = sorted(path.name for path in (tmp_path / "events").iterdir())
    assert folders == ["run, seed 3", "run, seed 3 (2)"]


def test_commands_export_a_run(tracked: Path, tmp_path: Path, run_cli: Command) -> None:
    needs_app("serving")  # whose command `export` is
    store, run = tmp_path / "store", tracked / "run"
    code, out, error = run_cli("export", "mlflow", run, "--uri", store)
    assert code == 0, error
    assert "1 run in experiment fednotes" in out + error
    assert len(read_runs(store)) == 1
    code, _, error = run_cli("export", "tensorboard", run, tmp_path / "events")
    assert code == 0, error
    assert list((tmp_path / "events").iterdir())


def test_a_command_tracks_a_run(job: Path, tmp_path: Path, run_cli: Command) -> None:
    track = ("--track", f"tensorboard={tmp_path / 'events'}")
    code, _, error = run_cli("simulate", job, "--out", tmp_path / "run", *track)
    assert code == 0, error
    (run,) = (tmp_path / "events").iterdir()
    assert read_events(run / "federated/north").Scalars("f1")


# ---- what no tool gets ---------------------------------------------------------------


def _all_bytes(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


@pytest.mark.parametrize("where", ["store", "events"])
def test_no_word_of_a_note_and_no_path_of_notes_is_tracked(
    where: str, tracked: Path
) -> None:
    contents = list(_all_bytes(tracked / where))
    assert contents
    for path, content in contents:
        for word in (SECRET, f"{SECRET}ol", FOLDER, str(Path.home())):
            assert word.encode() not in content.replace(b"\0", b""), path
    # The run itself has the path, so the test would find it.
    assert FOLDER in (tracked / "run/job.json").read_text()


@pytest.mark.slow
def test_nothing_is_tracked_unless_requested(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    fn.simulate(job, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_mlflow_sends_no_telemetry_and_opens_no_other_connection(
    tracked: Path, tmp_path: Path
) -> None:
    """In a process of its own, since MLflow reads its environment at import."""
    program = f"""
import socket
def refuse(*arguments, **options):
    raise AssertionError(f"a connection to {{arguments}}")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
from fednotes.apps.tracking.export import export_mlflow
export_mlflow({str(tracked / "run")!r}, {str(tmp_path / "store")!r})
from mlflow.telemetry.client import get_telemetry_client
from mlflow.telemetry.utils import is_telemetry_disabled
assert is_telemetry_disabled()
assert get_telemetry_client() is None
import threading
print([thread.name for thread in threading.enumerate()])
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(read_runs(tmp_path / "store")) == 1


# ---- private runs, seeds, runs that stop ---------------------------------------------


@pytest.mark.slow
def test_the_epsilon_of_a_private_run_is_tracked(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    table = {
        "method": "fedner",
        "seed": 2,
        "conditions": ["federated"],
        "synthetic": {"sites": 3, "sentences": 30},
        "training": {"epochs": 1, "batch_size": 24},
        "privacy": {"epsilon": 8.0},
        "model": TAGGER,
    }
    store = tmp_path / "store"
    result = fn.simulate(fn.job(table), tmp_path / "run", track=[f"mlflow={store}"])
    (run,) = read_runs(store)
    epsilon = run.data.metrics["test/federated/epsilon"]
    assert epsilon == pytest.approx(result.privacy["federated"]["epsilon"])


@pytest.mark.slow
def test_each_seed_is_tracked_as_a_run(tmp_path: Path, job: Path) -> None:
    store = tmp_path / "store"
    fn.simulate(job, tmp_path / "runs", seeds=[1, 2], track=[f"mlflow={store}"])
    names = sorted(run.info.run_name for run in read_runs(store))
    assert names == ["runs, seed 1", "runs, seed 2"]
    assert export_mlflow(tmp_path / "runs", str(tmp_path / "again")) == 2


def test_a_stopped_run_is_closed_and_the_remainder_tracked_later(
    tmp_path: Path, job: Path
) -> None:
    store = tmp_path / "store"

    def stop(part: str, result: Any) -> None:
        if part == "federated" and result.round == 1:
            raise Stopped

    track = [f"mlflow={store}"]
    with pytest.raises(Stopped):
        fn.simulate(job, tmp_path / "run", progress=stop, track=track)
    (stopped,) = read_runs(store)
    assert stopped.info.status == "KILLED"
    assert export_mlflow(tmp_path / "run", str(tmp_path / "unfinished")) == 1
    fn.simulate(job, tmp_path / "run", resume=True, track=track)
    (resumed,) = [run for run in read_runs(store) if run.info.status == "FINISHED"]
    for (condition, site, name), values in expected_curves(tmp_path / "run").items():
        key = "/".join(part for part in (condition, site, name) if part)
        assert read_history(store, resumed, key).keys() == values.keys()


# ---- trackers that fail --------------------------------------------------------------


class Heard(ProgressListener):
    """Remembers warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def unused_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def test_a_server_that_is_down_costs_one_warning(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    heard = Heard()
    result = fn.simulate(
        job,
        tmp_path / "run",
        progress=heard,
        track=[f"mlflow=http://127.0.0.1:{unused_port()}"],
    )
    assert result.mean["federated"]
    (warning,) = [text for text in heard.warnings if "mlflow failed" in text]
    assert warning.endswith("to track it afterwards: fednotes export mlflow")
    assert "\n" not in warning
    with pytest.raises(TrainingError, match="cannot be exported"):
        export_mlflow(tmp_path / "run", f"http://127.0.0.1:{unused_port()}")


def test_a_full_disk_costs_one_warning(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", refuse)
    heard = Heard()
    result = fn.simulate(
        job,
        tmp_path / "run",
        progress=heard,
        track=[f"tensorboard={tmp_path / 'events'}", f"mlflow={tmp_path / 'store'}"],
    )
    assert result.mean["federated"]
    (warning,) = [text for text in heard.warnings if "tensorboard failed" in text]
    assert "No space left on device" in warning
    assert len(read_runs(tmp_path / "store")) == 1  # the other tracker goes on


@pytest.mark.parametrize(
    ("track", "error", "message"),
    [
        ("mlfow=x", ConfigError, "unknown tracker 'mlfow': did you mean 'mlflow'"),
        ("mlflow", ParameterError, "mlflow needs a target: give mlflow=URI"),
        ("tensorboard=", ParameterError, "give tensorboard=FOLDER"),
        ("mlflow= ", ConfigError, "the tracking URI is empty"),
    ],
)
def test_an_invalid_tracker_is_refused_before_training(
    track: str, error: type[Exception], message: str, tmp_path: Path, job: Path
) -> None:
    with pytest.raises(error, match=message):
        fn.simulate(job, tmp_path / "run", track=[track])
    assert not (tmp_path / "run").exists()


def test_a_missing_library_is_reported_before_training(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtra, match=r"fednotes\[mlflow\]"):
        fn.simulate(job, tmp_path / "run", track=["mlflow=x"])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run there: give the folder of a run"):
        export_tensorboard(tmp_path, tmp_path / "events")


# ---- what a tracker is told ----------------------------------------------------------


class Recorder:
    """A tool that remembers what it gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.points: list[Point] = []

    def open(self, facts: RunFacts) -> None:
        self.calls.append(f"open {facts.name}")

    def add_points(self, points: Sequence[Point]) -> None:
        self.points += points

    def add_scores(self, scores: Sequence[Any]) -> None:
        self.calls.append("scores")

    def add_files(self, files: Sequence[Path]) -> None:
        self.calls.append("files")

    def close(self, *, is_finished: bool) -> None:
        self.calls.append(f"close {is_finished}")


def test_a_run_between_real_sites_is_tracked(tmp_path: Path) -> None:
    """Its folder has the job's declaration, and its rounds have no values by site."""
    declared = {"method": "fedner", "seed": 4, "title": "Two wards"}
    record = {"name": "two-wards", "job": declared, "fingerprint": "ab"}
    (tmp_path / "job.json").write_text(json.dumps(record))
    entry = {"part": "federated", "condition": "federated", "round": 0, "loss": 0.5}
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({**entry, "valid_f1": 0.25, "took_part": 2, "bytes_up": 10}) + "\n"
    )
    facts = read_run_facts(tmp_path)
    assert (facts.title, facts.method) == ("Two wards", "fedner")
    recorder = Recorder()
    tracker = Tracker(recorder)
    tracker.start(tmp_path)
    assert recorder.points == [
        Point("federated", "", 1, {"loss": 0.5, "valid_f1": 0.25, "bytes_up": 10.0})
    ]
    tracker.begin(Part("federated", ("north", "south"), None), 4, 0)
    for number, evaluated in ((0, True), (1, False), (2, True)):
        tracker.round(RoundResult(number, {"loss": 0.25}, 2, 30, 40, 1.5, evaluated))
    new = {"loss": 0.25, "bytes_up": 30.0, "bytes_down": 40.0, "seconds": 1.5}
    assert recorder.points[1:] == [Point("federated", "", 3, new)]
    RunResult(version=1, title="Two wards", method="fedner").write(tmp_path)
    tracker.finish(tmp_path)
    assert recorder.calls[1:] == ["scores", "files", "close True"]


def test_a_job_is_not_submitted_if_its_tracker_is_invalid(
    tmp_path: Path, run_cli: Command
) -> None:
    needs_app("deployment")
    words = ("run", "demo", "--on", tmp_path, "--out", tmp_path / "out")
    code, _, error = run_cli(*words, "--track", "mlfow=x")
    assert code != 0
    assert "unknown tracker 'mlfow'" in error


def test_names_that_mlflow_refuses_are_replaced() -> None:
    assert mlflow_tool._make_name("test", "St. Mary's (north)", "f1") == (
        "test/St. Mary_s _north_/f1"
    )
