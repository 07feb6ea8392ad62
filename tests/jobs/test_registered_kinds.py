"""The core discovers kinds of sites and models of patients by entry points."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, ParameterError
from fednotes.jobs import kinds
from fednotes.jobs.job import SiteKind
from fednotes.jobs.models import MentionModel, find_model_class
from fednotes.jobs.patient_models import PatientModel
from fednotes.jobs.saved_models import LoadOptions, NoteSource, PredictionOutput


def test_the_built_in_kinds_come_before_the_registered_ones() -> None:
    names = [kind.name for kind in kinds.list_kinds()]
    assert names[:2] == ["documents", "notes"]
    assert set(names[2:]) == set(plugins.list_entries("site_kinds"))
    for name in names:
        assert isinstance(kinds.find(name), SiteKind)
        assert kinds.find(name).name == name


def test_a_kind_that_no_package_registers_is_refused() -> None:
    with pytest.raises(ConfigError, match="registers sites that hold images"):
        kinds.find("images")


class Scorer(PatientModel):
    """A phenotyping model as a package registers it."""


def registered_as(target: str) -> dict[str, EntryPoint]:
    return {"scorer": EntryPoint("scorer", target, "fednotes.models")}


def test_a_patient_model_is_recognised_by_the_name_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tests_of_kinds", sys.modules[__name__])
    target = "tests_of_kinds:Scorer"
    monkeypatch.setattr(plugins, "list_entries", lambda group: registered_as(target))
    assert find_model_class(tmp_path) is MentionModel
    (tmp_path / "scorer.json").write_text("{}")
    assert find_model_class(tmp_path) is Scorer


def test_a_patient_model_that_uses_no_workers_refuses_them(tmp_path: Path) -> None:
    for workers in (2, 16):
        with pytest.raises(ParameterError, match="reads all notes in one process"):
            Scorer.write_predictions(
                tmp_path,
                NoteSource(text="No pain."),
                PredictionOutput(),
                LoadOptions(workers=workers),
            )


def test_a_registered_class_must_be_a_patient_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plugins, "list_entries", lambda group: registered_as("pathlib:Path")
    )
    (tmp_path / "scorer.json").write_text("{}")
    with pytest.raises(ConfigError, match="pathlib:Path is not a subclass"):
        find_model_class(tmp_path)
