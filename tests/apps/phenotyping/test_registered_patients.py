"""The core discovers patients, their tables and their models by entry points."""

from __future__ import annotations

from pathlib import Path

import pytest
from patient_files import save_model

from fednotes.apps.phenotyping.data_kind import KIND
from fednotes.apps.phenotyping.model import PhenotypeModel
from fednotes.core import plugins
from fednotes.jobs import kinds
from fednotes.jobs.models import find_model_class


def test_the_kind_of_sites_is_registered_under_its_name() -> None:
    assert kinds.find("patients") is KIND
    assert KIND in kinds.list_kinds()


def test_a_saved_model_is_recognised(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "synthetic", tmp_path, "asthma")
    assert find_model_class(folder) is PhenotypeModel


def test_a_job_may_have_only_the_tables_of_registered_kinds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the package that registers patients, [phenotypes] is no table of a job."""
    from fednotes.jobs.job_file import list_table_names

    assert {"tags", "phenotypes", "silos"} <= list_table_names()
    monkeypatch.setattr(plugins, "list_added_entries", lambda group, built_in: {})
    assert list_table_names() >= {"tags", "silos"}
    assert "phenotypes" not in list_table_names()
