"""`fednotes audit` and its results."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from applications import needs_app
from audit_jobs import tagger_job

from fednotes.apps.audit import Attack, attacks, load_attacks
from fednotes.apps.audit.attacks import counts, word_tables
from fednotes.cli import app
from fednotes.core.errors import ConfigError, DataError
from fednotes.jobs.audit_result import Audit, Leak, read_audit
from fednotes.jobs.job import load_sites

CHANCE = 0.01


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """Write the file of a job with a light tagger."""
    path = tmp_path / "job.toml"
    settings = "".join(
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
        for name, values in tagger_job().table.items()
        if isinstance(values, dict)
    )
    path.write_text(f'method = "fedner"\nseed = 2\n{settings}')
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["fednotes", *words])
    app.main()


def test_the_command_writes_an_audit_and_its_page(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(
        "fednotes.apps.audit.run.load_attacks",
        lambda: [*word_tables.ATTACKS, *counts.ATTACKS],
    )
    out = tmp_path / "audit"
    run(monkeypatch, "audit", str(job_file), "--out", str(out))
    saved_audit = read_audit(out)
    assert saved_audit is not None
    assert [a.attack for a in saved_audit.attacks] == [
        a.name for a in (*word_tables.ATTACKS, *counts.ATTACKS)
    ]
    assert saved_audit.worst == pytest.approx(1 - CHANCE, abs=1e-3)
    page = (out / "report.html").read_text()
    assert saved_audit.fingerprint in page
    assert all(leak.attack in page for leak in saved_audit.attacks)
    assert "words from word tables" in capsys.readouterr().out
    assert (out / "audit.json").stat().st_mode & 0o077 == 0
    texts = {
        w
        for d in load_sites(tagger_job()).data[0].train
        for w in d.text.split()
        if len(w) > 8
    }
    published = (out / "audit.json").read_text() + page
    assert not [word for word in texts if word in published]


def test_the_command_prints_the_audit_as_json(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(
        "fednotes.apps.audit.run.load_attacks", lambda: [*counts.ATTACKS]
    )
    out = tmp_path / "audit"
    run(monkeypatch, "audit", str(job_file), "--out", str(out), "--json")
    saved_audit = read_audit(out)
    assert saved_audit is not None
    assert json.loads(capsys.readouterr().out) == saved_audit.model_dump(mode="json")


def test_an_error_names_what_is_missing(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    other_run = tmp_path / "run"
    other_run.mkdir()
    (other_run / "job.json").write_text(
        json.dumps({"table": {**tagger_job().table, "seed": 3}})
    )
    for words, message in (
        ((str(job_file),), "with --out"),
        (
            (str(job_file), "--out", str(tmp_path / "o"), "--site", "nobody"),
            "the job's sites are",
        ),
        ((str(job_file), "--out", str(tmp_path / "o"), "--total", "9"), "go together"),
        ((str(tmp_path / "none"), "--out", str(tmp_path / "o")), "no such job file"),
        ((str(job_file), "--out", str(job_file)), "cannot be written"),
        (
            (str(job_file), "--out", str(other_run)),
            f"{other_run} is a run of another job",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, "audit", *words)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert [path.name for path in other_run.iterdir()] == ["job.json"]


def test_a_fraction_outside_0_to_1_is_refused(tmp_path: Path) -> None:
    """A chance above 1 would hide every success."""
    for name, value in (("chance", 1e300), ("success", -1.0), ("control", 2.0)):
        table = {"attacks": [{"attack": "words", "success": 1.0, name: value}]}
        (tmp_path / "audit.json").write_text(json.dumps(table))
        with pytest.raises(DataError, match=rf"attacks\.0\.{name}: Input should be "):
            read_audit(tmp_path)


def test_attacks_that_fail_or_were_not_tried_are_listed() -> None:
    fine = Leak(attack="a", success=0.3, chance=0.01, control=1.0, proven=True)
    failed = fine.model_copy(update={"attack": "b", "proven": False, "control": 0.1})
    none = Leak(attack="c", applies=False, why="no")
    result = Audit(
        attacks=[fine, failed, none, Leak(attack="d", why="could not be tried: x")]
    )
    assert result.unproven == ["b", "d"]
    assert result.worst == pytest.approx(0.29)
    sample = fine.model_copy(update={"low": 0.1, "high": 0.6})  # a wide interval
    assert Audit(attacks=[sample]).worst == pytest.approx(0.59)


def test_a_site_audits_with_only_its_own_notes(tmp_path: Path) -> None:
    """Copies of its notes stand for those of the other site, which has no file."""
    needs_app("deployment")
    from fednotes.apps.deployment.site_file import job_at_home

    sentences = [f"Drug{number} B-Drug\nhelped O\n\n" for number in range(20)]
    (tmp_path / "north.conll").write_text("".join(sentences))
    path, site_file = tmp_path / "job.toml", tmp_path / "site.toml"
    path.write_text(
        'method = "fedner"\n'
        "[sites.north]\npath = 'north.conll'\nsplit = 'sentence'\n"
        "[sites.south]\npath = 'south.conll'\nsplit = 'sentence'\n"
    )
    site_file.write_text('[data]\npath = "north.conll"\nsplit = "sentence"\n')

    loaded = load_sites(job_at_home(path, (), "north", site_file, 100)).data

    assert [site.id for site in loaded] == ["north", "south"]
    assert len(loaded[1].train) == 100 - len(loaded[0].train)
    with pytest.raises(ConfigError, match="site 'north' alone has"):
        load_sites(job_at_home(path, (), "north", site_file, 3))
    with pytest.raises(ConfigError, match=r"no \[sites.east\]"):
        job_at_home(path, (), "east", site_file, 100)


def test_every_module_of_attacks_is_listed() -> None:
    """An attack that is not listed would silently never be tried."""
    listed = {id(attack) for attack in load_attacks()}
    for module in pkgutil.iter_modules(attacks.__path__):
        content = vars(importlib.import_module(f"{attacks.__name__}.{module.name}"))
        for value in content.values():
            group = value if isinstance(value, tuple) else (value,)
            for attack in group:
                if isinstance(attack, Attack):
                    assert id(attack) in listed, attack.name
