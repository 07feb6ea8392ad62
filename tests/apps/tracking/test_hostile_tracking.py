"""Exported runs of strangers, and MLflow servers that lie."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from applications import needs_app

needs_app("tracking")

from fednotes.apps.tracking.export import export_mlflow, export_tensorboard
from fednotes.apps.tracking.facts import list_points
from fednotes.core.errors import DataError, TrainingError
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.results import RunResult
from fednotes.jobs.tracking import TrackerKind, add_trackers

Command = Callable[..., tuple[int, str, str]]

SECRET = "key of the ward"
PASSWORD = "s3cret-7Q"
ENTRY = {"part": "federated", "condition": "federated", "loss": 0.5}


def write_run(folder: Path, *rounds: Any) -> Path:
    """Write a run that has ended, with an evaluation in each of some rounds."""
    folder.mkdir()
    RunResult(version=1, title="Two wards", method="fedner").write(folder)
    lines = [json.dumps({**ENTRY, "round": number}) + "\n" for number in rounds]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


# ---- runs of strangers ---------------------------------------------------------------


@pytest.mark.parametrize(
    "link",
    ["model/README.md", "model", "federated", "federated/sites/north/model"],
)
def test_a_link_in_place_of_a_card_is_not_followed(link: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0)
    other = tmp_path / "other"
    for folder in (other, other / "model"):
        folder.mkdir()
        (folder / "README.md").write_text(SECRET)
    path = run / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(other / "README.md" if path.suffix else other)
    with pytest.raises(DataError, match="a link to a file outside the run"):
        export_tensorboard(run, tmp_path / "events")
    with pytest.raises(DataError, match="replace the link by a copy"):
        export_mlflow(run, str(tmp_path / "store"))
    for written in ("events", "store"):
        assert SECRET.encode() not in all_bytes(tmp_path / written)


def test_a_link_within_the_run_is_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0)
    (run / "kept").mkdir()
    (run / "kept/README.md").write_text("a card")
    (run / "model").symlink_to("kept")
    export_tensorboard(run, tmp_path / "events")
    assert b"a card" in all_bytes(tmp_path / "events")


@pytest.mark.parametrize(
    "number", [float("nan"), float("inf"), 1e99, 2**63, -1, "2", [1], None]
)
def test_an_impossible_round_number_is_left_out(number: Any, tmp_path: Path) -> None:
    assert list(list_points({**ENTRY, "round": number})) == []
    run = write_run(tmp_path / "run", number, 0)
    assert export_tensorboard(run, tmp_path / "events") == 1


# ---- servers that lie ----------------------------------------------------------------


class FalseServer:
    """A server that answers each request of MLflow as it likes.

    Attributes:
        folder: The folder that it names for the files of runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answer(self, path: str) -> dict[str, Any]:
        """Return the answer to a request."""
        if "get-by-name" in path:
            return {"experiment": {"experiment_id": "0", "name": "fednotes"}}
        info = {
            "run_id": "1",
            "run_uuid": "1",
            "experiment_id": "0",
            "run_name": "\x1b[31mall of your runs",
            "artifact_uri": self.folder.as_uri(),
            "status": "RUNNING",
        }
        return {"run": {"info": info, "data": {}}, "run_info": info}


@pytest.fixture
def server(tmp_path: Path) -> FalseServer:
    return FalseServer(tmp_path / "project")


@pytest.fixture
def address(server: FalseServer) -> Iterator[str]:
    """The address of the false server, with a password."""

    class Handler(BaseHTTPRequestHandler):
        # The names are those that the library looks for.
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            content = json.dumps(server.answer(self.path)).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http_server.serve_forever)
    thread.start()
    yield f"http://ward:{PASSWORD}@127.0.0.1:{http_server.server_address[1]}"
    http_server.shutdown()
    http_server.server_close()
    thread.join()


def test_neither_passwords_nor_words_of_the_server_are_printed(
    address: str, tmp_path: Path, run_cli: Command
) -> None:
    run = write_run(tmp_path / "run", 0)
    code, out, errors = run_cli("export", "mlflow", str(run), "--uri", address)
    printed = out + errors
    assert code == 0
    assert "1 run in experiment fednotes" in printed
    assert "http://ward:***@127.0.0.1" in printed
    assert PASSWORD not in printed
    assert "all of your runs" not in printed


def test_a_server_cannot_make_an_export_replace_files_of_another_project(
    server: FalseServer, address: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", 0)
    assert export_mlflow(run, address) == 1  # a folder of a disk that both share
    assert (server.folder / "summary.json").is_file()
    job = server.folder / "summary.json"
    job.write_text("of another project")
    (server.folder / "report.html").unlink()
    with pytest.raises(TrainingError, match=r"summary\.json: MLflow's server wants"):
        export_mlflow(run, address)
    assert job.read_text() == "of another project"


def test_the_warning_about_a_failed_tracker_shows_no_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Failing(ProgressListener):
        def start(self, folder: Path) -> None:
            raise OSError(f"no route to http://ward:{PASSWORD}@tracker/api")

    warnings: list[str] = []

    class Heard(ProgressListener):
        def warn(self, text: str) -> None:
            warnings.append(text)

    kind = TrackerKind(lambda _target: Failing(), target="URI")
    monkeypatch.setattr("fednotes.core.plugins.load_entry", lambda *_: kind)
    add_trackers(Heard(), ["mlflow=x"]).start(tmp_path)
    (warning,) = warnings
    assert "no route to http://ward:***@tracker/api" in warning
    assert PASSWORD not in warning
