"""What every test shares: one thread, a cache of its own, the real corpora where they
are."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from scratch import ended_with_us
from tiny_models import save_bart, save_bert

RunCli = Callable[..., tuple[int, str, str]]

# Helpers that need an application lie with its tests, and are deleted with them.
sys.path[:0] = sorted(map(str, Path(__file__).parent.glob("apps/*/helpers")))

# xdist's, of no screen: what is printed is as in a pipe
os.environ.pop("COLUMNS", None)


def pytest_collection() -> None:
    """Import all test modules and their packages without looking for garbage.

    Nothing of a million objects would be found, which takes a third of the time.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage again, but no longer among what was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The order of additions, and so the last bit, depends on the number of threads.

    FEDNOTES_TEST_THREADS asks for more: what is compared within a test is then equal
    still.
    """
    torch.set_num_threads(int(os.environ.get("FEDNOTES_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    """A run chooses deterministic algorithms for its process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def _no_process_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests start in their folders ends with them, also where they are killed."""
    with ended_with_us(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's cache of frozen features."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDNOTES_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora, $FEDNOTES_CORPORA; skips where it is unset."""
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


@pytest.fixture
def instant_disk() -> Iterator[None]:
    """Nothing waits until its bytes are on the disk."""
    with mock.patch("os.fsync"):
        yield


@pytest.fixture
def one_process(instant_disk: None) -> Iterator[None]:
    """For jobs that are deployed in this process: torch is then as it was before them."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run_cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCli:
    """RunCli a command in this process: exit code, stdout, stderr."""
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
    """file(content, name) writes a file below a folder of the test's and gives its
    path."""

    def make(content: str | bytes, name: str = "f.txt") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


@pytest.fixture(scope="session")
def make_bart() -> Callable[..., Path]:
    """make_bart(folder, **changes of its configuration) writes a tiny random BART."""
    pytest.importorskip("transformers")
    return save_bart


@pytest.fixture(scope="session")
def bart(
    make_bart: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """One such directory for all tests; they only read it."""
    return make_bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT with its prediction heads; tests only read it."""
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def bare_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without prediction heads, as encoders are often published."""
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("bare_bert"), head=False)
