"""No method gives a site away by the sums of two jobs; `two_jobs.py` has the attack."""

from __future__ import annotations

from pathlib import Path

import pytest
from method_cases import CASES
from tiny_models import save_bert
from two_jobs import LEAST, MOST, remaining

from fednotes.methods import names


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("two jobs") / "bert")


def test_every_method_has_a_case() -> None:
    assert {name.partition(",")[0] for name in CASES} == set(names())


@pytest.mark.parametrize("name", CASES)
def test_draws_of_the_job_give_a_site_away(
    name: str, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDNOTES_CACHE", str(tmp_path))
    assert remaining(CASES[name](bert), "job") < MOST


@pytest.mark.parametrize("name", CASES)
def test_secret_draws_do_not(
    name: str, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDNOTES_CACHE", str(tmp_path))
    assert remaining(CASES[name](bert), "secret") > LEAST
