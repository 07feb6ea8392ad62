"""What CONTRIBUTING.md shows works: a format, a tagger, a method and a carrier, a file each."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fault_toy import JOB, SITES, Toy

from fednotes.core.types import Span
from fednotes.data import formats
from fednotes.data.formats.files import Problems
from fednotes.engines.deployed import Deployed
from fednotes.engines.host import SiteHost
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.results import number
from fednotes.jobs.simulate import simulate
from fednotes.taggers.saving import load_model

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
Add = Callable[[str, str], ModuleType]
SITE_TABLES = {name: {"path": f"{name}.jsonl"} for name in ("north", "south")}


def shown(heading: str) -> str:
    """The code below a heading."""
    found = re.search(
        rf"^### {heading}$.*?```python\n(.*?)```", PAGE.read_text("utf-8"), re.S | re.M
    )
    assert found is not None
    return found[1]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    """add(heading, module) writes the code where its package finds a module."""

    def write(heading: str, module: str) -> ModuleType:
        package, _, name = module.rpartition(".")
        folder = tmp_path / "added" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(shown(heading), "utf-8")
        parent = importlib.import_module(package)
        monkeypatch.setattr(parent, "__path__", [*parent.__path__, str(folder)])
        monkeypatch.setattr(parent, name, None, raising=False)
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]
        return importlib.import_module(module)

    return write


def notes(folder: Path) -> None:
    """Forty sentences a site; a word of its own begins each mention."""
    for name in SITE_TABLES:
        rows = [
            f'{{"id": "{name}{n}", "text": "case {n} took {name}ol now .", "spans": '
            f'[{{"start": {11 + len(str(n))}, "end": {18 + len(str(n))}, "label": "drug"}}]}}\n'
            for n in range(40)
        ]
        (folder / f"{name}.jsonl").write_text("".join(rows), "utf-8")


def run(folder: Path, **tables: Any) -> float:
    """Strict F1 of a job on these notes."""
    notes(folder)
    table = {"seed": 1, "conditions": ["federated"], "sites": SITE_TABLES, **tables}
    result = simulate(parse_job(table, "added", folder, "added.toml"), folder / "run")
    f1 = number(result.mean, "federated", "strict", "f1")
    assert f1 is not None
    return f1


def test_a_format(add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add("A format", "fednotes.data.formats.oneline")
    monkeypatch.setattr(formats, "FORMATS", formats.discover())
    path = tmp_path / "ward.txt"
    path.write_text("no pain, aspirin\t9-16:drug\t3-7:sign\nbroken\n", "utf-8")
    documents, problems = formats.examine(path)
    assert [d.spans for d in documents] == [(Span(9, 16, "drug"), Span(3, 7, "sign"))]
    assert isinstance(problems, Problems)
    assert str(problems) == "1 line"
    assert problems.found[0].line == 2


def test_a_tagger(add: Add, tmp_path: Path) -> None:
    """It learns which words are mentions, and is the same when it is loaded."""
    add("A tagger", "fednotes.taggers.plain")
    model = {"kind": "plain", "words": 64}
    training = {"rounds": 4, "batch_size": 8, "learning_rate": 0.05}
    assert run(tmp_path, method="distill", model=model, training=training) == 1.0
    saved = next((tmp_path / "run").rglob("*.safetensors")).parent
    loaded = load_model(saved)
    assert type(loaded).__name__ == "Plain"
    document = formats.read(tmp_path / "north.jsonl")[0]
    assert loaded.predict([document])[0].spans == document.spans


def test_a_method(add: Add, tmp_path: Path) -> None:
    add("A method", "fednotes.methods.fedavg")
    model = {
        "hashed_words": 64,
        "word_dim": 8,
        "characters": False,
        "cnn_filters": 0,
        "lstm_units": 0,
    }
    training = {"rounds": 12, "learning_rate": 1.0}
    assert run(tmp_path, method="fedavg", model=model, training=training) == 1.0


def test_a_carrier(tmp_path: Path) -> None:
    """A sum over a shared folder is the sum in one process."""
    carrier: dict[str, Any] = {}
    exec(shown("A carrier"), carrier)  # the page's own code, in a namespace of its own
    pipe, stop = tmp_path / "pipe", threading.Event()
    pipe.mkdir()
    hosts = {n: SiteHost(lambda n=n: Toy(n), tmp_path / n, job=JOB, name=n) for n in SITES}
    threads = [
        threading.Thread(target=carrier["serve"], args=(pipe, name, host, stop.is_set))
        for name, host in hosts.items()
    ]
    for thread in threads:
        thread.start()
    try:
        engine = Deployed(carrier["SharedFolder"](pipe), SITES, tmp_path / "server", job=JOB)
        x = {"x": torch.arange(4.0)}
        totals = [f.sum("train", x, round=0) for f in (engine, InProcess([Toy(n) for n in SITES]))]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert totals[0].metrics == totals[1].metrics
    assert all(torch.equal(totals[0].tensors[n], totals[1].tensors[n]) for n in totals[1].tensors)
