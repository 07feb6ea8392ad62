"""A method that is one file in a folder is discovered and trained by a job.

It also passes the contract of methods.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from method_cases import TAGGER, documents
from method_contract import MethodContract
from method_runs import Case

from fednotes import methods
from fednotes.core.errors import ConfigError
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import simulate

METHOD = Path(__file__).parents[1] / "data" / "samples" / "plain_averaging.py.txt"
JOB = {
    "method": "plain_averaging",
    "conditions": ["federated", "pooled"],
    "synthetic": {"sites": 2, "sentences": 40},
    "model": {
        "hashed_words": 50,
        "word_dim": 4,
        "char_dim": 4,
        "char_filters": 4,
        "lstm_units": 4,
    },
}


def test_a_method_in_a_separate_folder_is_discovered_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_averaging.py").write_text(METHOD.read_text())
    (tmp_path / "no_method.py").write_text("")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "fednotes.methods.plain_averaging", raising=False)
    assert {"fedner", "plain_averaging"} <= set(methods.list_method_names())
    with pytest.raises(
        ConfigError, match=r"plain_averagin': did you mean 'plain_averaging'\?"
    ):
        methods.find_method("plain_averagin")
    with pytest.raises(ConfigError, match="unknown method 'no_method'"):
        methods.find_method("no_method")
    job = parse_job(JOB, "job", tmp_path, "job.toml")
    simulate(job, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [
        json.loads(line)["loss"] for line in lines if '"part": "federated"' in line
    ]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    federated = tmp_path / "run" / "federated"
    assert (federated / "model" / "tagger.safetensors").is_file()
    assert not (federated / "sites").exists()  # all sites end with this model


def make_case(bert: Path) -> Case:
    """Return a job of the method, loaded from its file as a module."""
    del bert
    module = ModuleType("plain_averaging_of_this_test")
    sys.modules[module.__name__] = module  # where its settings look up their types
    exec(METHOD.read_text(), module.__dict__)
    method = module.METHOD
    settings = method.config_class(model=TAGGER, seed=3)
    return Case(
        method,
        lambda sites: method.configure(settings, sites),
        documents(),
        "train",
        is_change=True,
    )


class TestContract(MethodContract):
    cases: ClassVar = {"plain averaging": make_case}
    private: ClassVar = ("plain averaging",)
