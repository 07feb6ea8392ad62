"""Kinds of sites and models of patients are found by entry points; the core names none
of them."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fednotes.core import plugins
from fednotes.core.errors import ConfigError
from fednotes.jobs import kinds
from fednotes.jobs.job import SiteKind
from fednotes.jobs.patient_models import is_patient_model, kind_of


def test_the_built_in_kinds_come_before_the_registered_ones() -> None:
    names = [kind.name for kind in kinds.all_kinds()]
    assert names == ["documents", "notes", "patients"]
    for name in names:
        assert isinstance(kinds.find(name), SiteKind)
        assert kinds.find(name).name == name


def test_a_kind_that_no_package_registers_is_refused() -> None:
    with pytest.raises(ConfigError, match="registers sites that hold images"):
        kinds.find("images")


def test_a_job_may_have_the_tables_of_registered_kinds_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the package that registers patients, [phenotypes] is no table of a job."""
    from fednotes.jobs.job_file import table_names

    assert {"tags", "phenotypes", "silos"} <= table_names()
    monkeypatch.setattr(plugins, "added", lambda group, built_in: {})
    assert table_names() >= {"tags", "silos"}
    assert "phenotypes" not in table_names()


def registered_as(target: str) -> dict[str, EntryPoint]:
    return {"scorer": EntryPoint("scorer", target, "fednotes.models")}


def test_a_patient_model_is_recognised_by_the_file_that_bears_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "fednotes.apps.phenotyping.model:PhenotypeModel"
    monkeypatch.setattr(plugins, "registered", lambda group: registered_as(target))
    assert kind_of(tmp_path) is None
    assert not is_patient_model(tmp_path)
    (tmp_path / "scorer.json").write_text("{}")
    assert is_patient_model(tmp_path)
    kind = kind_of(tmp_path)
    assert kind is not None
    assert kind.__name__ == "PhenotypeModel"


def test_a_registered_class_must_be_a_patient_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plugins, "registered", lambda group: registered_as("pathlib:Path")
    )
    (tmp_path / "scorer.json").write_text("{}")
    with pytest.raises(ConfigError, match="pathlib:Path is not a subclass"):
        kind_of(tmp_path)
