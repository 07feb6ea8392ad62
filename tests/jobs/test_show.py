"""`fednotes job show`: what a job will run with, and where each value comes from."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fednotes as fn
from fednotes.core.errors import ConfigError
from fednotes.jobs.job_file import built_in_jobs, load_job, parse_job
from fednotes.jobs.show import ShownSetting, show_job

JOB = '''\
method = "finetune"
notes = """
seed = 99
"""

[training]
cycles = 3   # fewer

[model]
window = 64

[sites.mercy]
path = "mercy/*.jsonl"
label_map = { "Körper\\u007f" = "Body \\"part\\"" }
[sites."b-2"]
path = "b"
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB, encoding="utf-8")
    return path


def found(file: Path, *settings: str) -> dict[str, ShownSetting]:
    shown = show_job(file, settings)
    return {f"{each.table}.{each.key}".lstrip("."): each for each in shown.settings}


@pytest.mark.parametrize("name", built_in_jobs())
def test_what_is_shown_is_the_job_that_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read again as a job, the text gives the same settings, method, sites and
    promises."""
    for path in built_in_jobs().values():
        for variable in re.findall(r"\$(\w+)", path.read_text("utf-8")):
            monkeypatch.setenv(variable, str(tmp_path))
    job = load_job(name)
    table = tomllib.loads(str(show_job(name)))
    again = parse_job(table, job.name, job.folder, "again")
    for part in (
        "config",
        "sites",
        "synthetic",
        "federation",
        "privacy",
        "tags",
        "silos",
    ):
        assert getattr(again, part) == getattr(job, part), part
    assert again.kind_tables == job.kind_tables
    assert (again.title, again.seed, again.method) == (job.title, job.seed, job.method)
    assert (again.conditions, again.threads) == (job.conditions, job.threads)


def test_each_value_says_where_it_comes_from(file: Path) -> None:
    shown = found(file, "training.batch_size=4", "sites.*.fraction=0.5")
    sources = {
        "method": ("finetune", "job", 1),
        "seed": (1, "default", None),  # that in the text of several lines is none
        "training.cycles": (3, "job", 7),
        "training.batch_size": (4, "setting", None),
        "training.server": ("nesterov", "preset", None),
        "training.clip": (1.0, "default", None),
        "model.window": (64, "job", 10),
        "model.train": ("lora", "preset", None),
        "model.rank": (8, "default", None),
        "sites.mercy.path": ("mercy/*.jsonl", "job", 13),
        "sites.mercy.fraction": (0.5, "setting", None),
        "sites.b-2.path": ("b", "job", 16),
        "sites.b-2.fraction": (0.5, "setting", None),
        "federation.secure_sum": (False, "default", None),
    }
    for key, expected in sources.items():
        setting = shown[key]
        assert (setting.value, setting.origin, setting.line) == expected, key
    assert shown["training.server"].source == 'preset "best"'
    assert shown["title"].value == "job"
    assert found(file, 'preset="paper"')["training.server"].source == 'preset "paper"'


def test_the_text_is_toml_with_the_sources_beside(file: Path) -> None:
    text = str(show_job(file))
    table = tomllib.loads(text)
    assert table["sites"]["mercy"]["label_map"] == {"Körper\x7f": 'Body "part"'}
    assert "# layer has no value" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("cycles = ")]
    assert line.split("#") == ["cycles = 3".ljust(46), " job, line 7"]
    assert "# dropout has no value" in text
    changed = show_job(file).to_toml(changed=True)
    assert "rank = " not in changed
    assert tomllib.loads(changed)["training"]["cycles"] == 3
    assert tomllib.loads(changed)["training"]["server"] == "nesterov"


def test_what_differential_privacy_fixes_is_named() -> None:
    table = {
        "method": "finetune",
        "synthetic": {},
        "privacy": {"noise": 1.0, "counts": 1.0},
    }
    shown = {f"{s.table}.{s.key}": s for s in show_job(table).settings}
    assert (shown["training.batch"].value, shown["training.batch"].source) == (
        "each",
        "[privacy]",
    )
    assert shown["training.cycles"].source == 'preset "best"'
    assert shown["privacy.noise"].origin == "job"


def test_the_architecture_of_a_tagger_is_named() -> None:
    model = {"tagger": "gram-cnn", "hashed_words": 8}
    shown = show_job({"method": "fedner", "synthetic": {}, "model": model})
    sources = {s.key: (s.value, s.source) for s in shown.settings if s.table == "model"}
    assert sources["cnn_widths"] == ([2, 3, 4], 'tagger "gram-cnn"')
    assert sources["lstm_units"] == (0, 'tagger "gram-cnn"')
    assert sources["char_dim"] == (100, "default")
    assert sources["kind"] == ("tagger", "default")


def test_a_job_of_real_sites_needs_no_places() -> None:
    sites: dict[str, Any] = {"a": {}, "b": {"types": ["Drug"]}, "c": {}}
    shown = show_job({"method": "fedner", "model": {"hashed_words": 8}, "sites": sites})
    keys = {f"{s.table}.{s.key}": s for s in shown.settings}
    assert keys["sites.b.types"].value == ["Drug"]
    assert keys["sites.a.valid_fraction"].value == 0.1
    assert "sites.a.path" not in keys
    assert keys["federation.secure_sum"].source == "default; true between real sites"


def test_the_command(give: Any, file: Path) -> None:
    code, out, _ = give("job", "show", str(file), "--set", "seed=2")
    assert code == 0
    assert tomllib.loads(out)["seed"] == 2
    code, out, _ = give("job", "show", "demo", "--json")
    assert json.loads(out) == show_job("demo").to_dict()
    assert fn.show_job(fn.job("demo", seed=4)).to_dict()["name"] == "demo"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dmo", (), "did you mean 'demo'"),
        ("demo", ("training.epoch=1",), "unknown key 'epoch'; did you mean 'epochs'"),
        ("demo", ("seed",), "expected KEY=VALUE"),
    ],
)
def test_a_mistake_is_told_as_elsewhere(
    give: Any, name: str, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        show_job(name, settings)
    code, out, error = give(
        "job", "show", name, *(f"--set={each}" for each in settings)
    )
    assert (code, out) == (2, "")
    assert message in error
