"""Fixtures of all tests: one thread, a separate cache, the real corpora if present."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from postgres import Postgres, running_postgres
from scratch import ended_with_us
from tiny_models import save_bart, save_bert

RunCli = Callable[..., tuple[int, str, str]]

# Helpers that need an application lie with its tests, and are deleted with them.
sys.path[:0] = sorted(map(str, Path(__file__).parent.glob("apps/*/helpers")))

# xdist's, of no screen: what is printed is as in a pipe
os.environ.pop("COLUMNS", None)


def pytest_collection() -> None:
    """Import all test modules and their packages with garbage collection off.

    The imports make a million objects and no garbage; looking for it takes a third of
    the time.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among what was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Compute in one thread, because the last bit depends on the order of additions.

    FEDNOTES_TEST_THREADS sets more threads; what one test compares is then still equal.
    """
    torch.set_num_threads(int(os.environ.get("FEDNOTES_TEST_THREADS", "1")))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Start a PostgreSQL server, which tests share; skip where there is none."""
    pytest.importorskip("psycopg")
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def _no_worker_by_itself() -> Iterator[None]:
    """Keep runs in this process, which has what tests change, unless they give a number.

    A machine that is busy has no free cores.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "cpu_percent", lambda **_: 100.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _short_trials() -> Iterator[None]:
    """Let an estimate of a run's time end after two rounds."""
    from fednotes.jobs import duration

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duration, "TRIAL_SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    """Undo a run's choice of deterministic algorithms, which holds for the process."""
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="session", autouse=True)
def _no_process_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """End the processes that tests start in their folders, even if tests are killed."""
    with ended_with_us(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests from reading or filling the user's cache of frozen features."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDNOTES_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def corpora() -> Path:
    """Return the folder of real corpora, $FEDNOTES_CORPORA; skip if it is unset."""
    value = os.environ.get("FEDNOTES_CORPORA")
    if not value:
        pytest.skip(
            "FEDNOTES_CORPORA is unset: it names the folder of the real corpora"
        )
    folder = Path(value).resolve()
    if not folder.is_dir():
        pytest.fail(
            f"FEDNOTES_CORPORA={value} is not a folder: name the corpora's or unset it"
        )
    return folder


@pytest.fixture(scope="module")
def few_sentences() -> Iterator[None]:
    """Generate corpora with fewer sentences in valid and test than users have.

    Scoring these takes most of the time of a job that trains on thirty sentences.
    """
    from fednotes.data import synthetic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "MIN_PART_SIZES", (1, 10, 40))
        yield


@pytest.fixture(scope="session", autouse=True)
def _instant_disk() -> Iterator[None]:
    """Do not wait until bytes are on the disk: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture
def run_cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCli:
    """Return a function that runs a command in this process.

    The function returns the exit code, stdout and stderr.
    """
    from fednotes.cli import app  # once COLUMNS is gone

    def run_command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fednotes", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            app.main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        return (code, *capsys.readouterr())

    return run_command


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a file below the test's folder and returns its
    path."""

    def make(content: str | bytes, name: str = "f.txt") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


@pytest.fixture(scope="session")
def make_bart() -> Callable[..., Path]:
    """Return a function that writes a tiny random BART: make_bart(folder, **config)."""
    pytest.importorskip("transformers")
    return save_bart


@pytest.fixture(scope="session")
def bart(
    make_bart: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the folder of a tiny BART that all tests share and only read."""
    return make_bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random BERT with prediction heads; tests only read
    it."""
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def bare_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same without prediction heads, as encoders are often published."""
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("bare_bert"), head=False)
