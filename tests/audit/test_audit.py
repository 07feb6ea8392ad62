"""`fednotes audit`: each attack succeeds without defence, and falls to chance with the one that its
page names."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_jobs import TABLE
from tiny_models import save_bert

from fednotes.audit import Scene, Trial, attacks
from fednotes.cli import app
from fednotes.core.errors import ConfigError
from fednotes.jobs.job import Job, load_sites
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.results import Audit, Leak, read_audit

CHANCE = 0.01


def job(**tables: Any) -> Job:
    """Three generated sites, with word tables that are trained; `tables` change it."""
    table = copy.deepcopy(TABLE)
    for name, values in tables.items():
        table[name] = {**table.get(name, {}), **values} if isinstance(values, dict) else values
    return parse_job(table, "job", Path(), "job")


def leak(of: Job, name: str) -> Leak:
    """One attack on a job."""
    attack = next(attack for attack in attacks() if name in attack.name)
    return attack.on(Scene(of, load_sites(of)))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


def tuned(encoder: Path, model: dict[str, Any], **training: Any) -> Job:
    """Fine-tuning of a tiny encoder on the same sites."""
    table = {
        "method": "finetune",
        "seed": 2,
        "synthetic": TABLE["synthetic"],
        "training": {"cycles": 1, "batch": "each", "batch_size": 2, **training},
        "model": {"kind": "token-classifier", "encoder": str(encoder), **model},
    }
    return parse_job(table, "job", Path(), "job")


WORDS = {"hashed_words": 4096}
PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "unit": "document", "rate": 0.5}


def test_success_is_what_is_named_at_one_percent_of_false_alarms() -> None:
    """By hand: of 200 decoys one may be named for each half percent, so two of them."""
    decoys = [*range(200)]
    assert Trial.of([250.0, 198.5, 197.5, -1.0], decoys).success == 0.75
    assert Trial.of([250.0, 198.5, 196.5, -1.0], decoys).success == 0.5
    # Ten decoys: one of them is 10 %. Half of the targets is above all, so are a tenth of a tenth
    # of those between the first two decoys.
    found = Trial.of([20.0, 8.5], [*range(10)])
    assert found.success == pytest.approx(0.5)
    assert Trial.of([20.0, 9.0], [*range(10)]).success == pytest.approx(0.5 + 0.1 * 0.5)
    assert found.details["auc"] == pytest.approx((1 + 0.9) / 2)


def test_who_sees_nothing_has_the_chance() -> None:
    assert Trial.of([0.0] * 30, [0.0] * 70).success == pytest.approx(CHANCE)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, 20_000, generator=generator)
    found = Trial.of(noise[0], noise[1])
    assert found.low < CHANCE < found.high
    with pytest.raises(ConfigError, match="something that is not"):
        Trial.of([1.0], [])


def test_the_interval_is_that_of_wilson() -> None:
    """Newcombe 1998, table I: 81 of 263 has 0.2553 to 0.3662, 0 of 20 has 0 to 0.1611."""
    found = Trial.share(81 / 263, 263, 0.0)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    none = Trial.share(0.0, 20, 0.0)
    assert (none.low, none.high) == pytest.approx((0.0, 0.1611), abs=5e-5)


# ---- words ---------------------------------------------------------------------------------------


def test_rows_that_change_are_the_words_of_the_mini_batch() -> None:
    """All of them, also from a secure sum, which hides alone whose they are."""
    for settings in ({}, {"federation": {"secure_sum": True}}):
        found = leak(job(model=WORDS, **settings), "word tables")
        assert found.proven
        assert found.control == found.success == 1.0


def test_so_they_are_of_a_cycle_of_fine_tuning_that_trains_all(bert: Path) -> None:
    """All that occur; in few bits, which round the smallest changes away, nearly all."""
    for compression, least in (("none", 1.0), ("packed", 0.9)):
        free = {"min_tokens": 0, "min_steps": 0, "compression": compression}
        found = leak(tuned(bert, {"train": "all"}, **free), "word tables")
        assert found.control == 1.0
        assert found.success is not None
        assert found.success >= least


def test_noise_hides_words() -> None:
    found = leak(job(model=WORDS, privacy=PRIVATE), "word tables")
    assert found.control == 1.0
    assert found.success is not None
    assert found.success < 0.1
    assert found.details["auc"] == pytest.approx(0.5, abs=0.15)


def test_frozen_tables_have_none(bert: Path) -> None:
    for of in (job(model={"hashed_words": 0}), tuned(bert, {"train": "encoder"})):
        found = leak(of, "word tables")
        assert not found.applies
        assert "no table" in found.why


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A job's file."""
    path = tmp_path / "job.toml"
    settings = "".join(
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
        for name, values in {**TABLE, "model": {**TABLE["model"], **WORDS}}.items()
        if isinstance(values, dict)
    )
    path.write_text(f'method = "fedner"\nseed = 2\n{settings}')
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["fednotes", *words])
    app.main()


def test_the_command_leaves_an_audit_and_its_page(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "audit"
    run(monkeypatch, "audit", str(written), "--out", str(out))
    found = read_audit(out)
    assert found is not None
    assert [a.attack for a in found.attacks] == [attack.name for attack in attacks()]
    assert found.worst == pytest.approx(1 - CHANCE)
    page = (out / "report.html").read_text()
    assert found.fingerprint in page
    assert all(attack.name in page for attack in attacks())
    assert "words of word tables" in capsys.readouterr().out
    assert (out / "audit.json").stat().st_mode & 0o077 == 0
    tokens = {w for d in load_sites(job()).data[0].train for w in d.text.split() if len(w) > 8}
    told = (out / "audit.json").read_text() + page
    assert not [word for word in tokens if word in told]


def test_the_command_says_what_is_missing(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for words, told in (
        ((str(written),), "give --out"),
        ((str(written), "--out", str(tmp_path / "o"), "--site", "nobody"), "the job's sites are"),
        ((str(written), "--out", str(tmp_path / "o"), "--total", "9"), "go together"),
        ((str(tmp_path / "none"), "--out", str(tmp_path / "o")), "no such job file"),
        ((str(written), "--out", str(written)), "cannot be written"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, "audit", *words)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_what_is_not_tried_or_fails_is_told() -> None:
    fine = Leak(attack="a", success=0.3, chance=0.01, control=1.0, proven=True)
    failed = fine.model_copy(update={"attack": "b", "proven": False, "control": 0.1})
    none = Leak(attack="c", applies=False, why="no")
    found = Audit(attacks=[fine, failed, none, Leak(attack="d", why="could not be tried: x")])
    assert found.unproven == ["b", "d"]
    assert found.worst == pytest.approx(0.29)
