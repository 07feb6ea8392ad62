"""`fednotes.open_ui`, called from a program or a notebook."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from every_kind import DOCUMENTS, make
from tiny_jobs import TABLE

import fednotes as fn
from fednotes.apps.ui import pages
from fednotes.core.errors import ConfigError
from fednotes.data.formats import jsonl
from fednotes.taggers.saving import save_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "run"
    table = TABLE | {"conditions": ["alone", "federated"], "synthetic": {"sites": 2}}
    job = fn.job(table, seed=5, synthetic={"sentences": 30}, training={"epochs": 1})
    fn.simulate(job, folder)
    return folder


def test_an_opened_model_is_accepted_in_place_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(make("tagger", tmp_path), tmp_path / "model")
    jsonl.write(DOCUMENTS, tmp_path / "notes.jsonl")
    model = fn.load(tmp_path / "model")
    assert isinstance(model, fn.MentionModel)
    paths_loaded: list[Any] = []
    monkeypatch.setattr(
        pages,
        "load_content",
        lambda paths, **_: paths_loaded.append(paths) or pages.Content(),
    )
    monkeypatch.setattr(pages, "serve_application", lambda *_, **__: None)
    fn.open_ui(model, tmp_path / "notes.jsonl")
    assert paths_loaded == [[tmp_path / "model", tmp_path / "notes.jsonl"]]
    with pytest.raises(ConfigError, match=r"expected .*, not MentionModel$"):
        fn.open_ui(fn.MentionModel(model.model))


def test_data_that_cannot_be_shown_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="expected a run, a model or notes, not NoneType"
    ):
        fn.open_ui(None)
    with pytest.raises(ConfigError, match="is neither a model, nor a run, nor a kit"):
        fn.open_ui(tmp_path)
    model = run / "federated" / "sites" / "reports" / "model"
    with pytest.raises(ConfigError, match="device 'gpu' is not available here"):
        fn.open_ui(model, device="gpu")


def test_only_a_browser_with_the_address_sees_the_page(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would listen where nobody else's computer reaches it; its token is told to the
    caller."""
    testclient, lines, heard = pytest.importorskip("starlette.testclient"), [], []

    def listen(page: Any, host: str, port: int, ready: Any, extra: str) -> None:
        heard.append((page, host, port, extra))
        ready("http://127.0.0.1:8080")

    monkeypatch.setattr("fednotes.apps.ui.pages.serve_application", listen)
    fn.open_ui(run, port=8080, tell=lines.append)
    (page, *address), words = heard[0], lines[0].split()
    assert address == ["127.0.0.1", 8080, "ui"]
    client = testclient.TestClient(page, base_url="http://127.0.0.1:8080")
    assert client.get(words[1].partition("?")[0]).status_code == 403
    assert "discharge" in client.get(words[1]).text


def test_the_page_is_shown_from_a_notebook(run: Path) -> None:
    """A loop runs there already; interrupting the cell ends the page and not the
    kernel."""
    pytest.importorskip("uvicorn")
    status, main = list[int](), threading.main_thread().ident
    assert main is not None

    def look(line: str) -> None:
        def fetch_page() -> None:
            try:
                urlopen(line.split()[1], timeout=20)
            except HTTPError as error:  # it sends no cookie when it is led on
                status.append(error.code)
            finally:
                signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=fetch_page).start()

    async def cell() -> str:
        fn.open_ui(run, tell=look)
        return "next cell"

    loop = asyncio.new_event_loop()
    # some shells ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert loop.run_until_complete(cell()) == "next cell"
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert status == [403]
    with pytest.raises(ConfigError, match="give a run"):
        fn.open_ui()


WORKING = """
import sys, time, torch
from fednotes.apps.ui import pages
from fednotes.apps.ui.background import BackgroundWork
from fednotes.cli.app import main

def work():
    lstm = torch.nn.LSTM(64, 64)
    while True:
        lstm(torch.randn(50, 16, 64))[0].sum().backward()

def open_ui(*_, **__):
    BackgroundWork(work).get()
    print("ready", flush=True)
    time.sleep(60)

pages.open_ui = open_ui
sys.argv = ["fednotes", "ui", "runs/first"]
main()
"""


@pytest.mark.slow
def test_the_command_ends_cleanly_while_a_page_computes(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKING],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, "stopped\n")
