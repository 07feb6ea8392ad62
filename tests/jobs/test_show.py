"""`fednotes job show`: the values of a job and where each comes from."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from applications import loadable

import fednotes as fn
from fednotes.core.errors import ConfigError
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.job_file import load_job, parse_job
from fednotes.jobs.show import ShownJob, ShownSetting, show_job

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
    """Return a job file with keys of every origin."""
    path = tmp_path / "job.toml"
    path.write_text(JOB, encoding="utf-8")
    return path


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that all variables of the built-in jobs name."""
    for path in list_built_in_jobs().values():
        for variable in re.findall(r"\$(\w+)", path.read_text("utf-8")):
            monkeypatch.setenv(variable, str(tmp_path))
    return tmp_path


def settings_by_key(job: ShownJob) -> dict[str, ShownSetting]:
    """Return the settings of a job by table and key, such as "training.cycles"."""
    return {f"{each.table}.{each.key}".lstrip("."): each for each in job.settings}


@pytest.mark.parametrize("name", loadable(list_built_in_jobs()))
@pytest.mark.usefixtures("corpora")
def test_the_shown_text_parses_to_the_same_job(name: str) -> None:
    job = load_job(name)
    table = tomllib.loads(str(show_job(name)))
    again = parse_job(table, job.name, job.folder, "again")
    assert (again.title, again.seed, again.method) == (job.title, job.seed, job.method)
    assert (again.conditions, again.threads) == (job.conditions, job.threads)
    assert (again.config, again.sites) == (job.config, job.sites)
    assert (again.synthetic, again.silos) == (job.synthetic, job.silos)
    assert (again.federation, again.privacy) == (job.federation, job.privacy)
    assert (again.tags, again.kind_tables) == (job.tags, job.kind_tables)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("method", ("finetune", "job", 1)),
        ("seed", (1, "default", None)),  # the one inside a multi-line text is no key
        ("training.cycles", (3, "job", 7)),
        ("training.batch_size", (4, "setting", None)),
        ("training.server", ("nesterov", "preset", None)),
        ("training.clip", (1.0, "default", None)),
        ("model.window", (64, "job", 10)),
        ("model.train", ("lora", "preset", None)),
        ("model.rank", (8, "default", None)),
        ("sites.mercy.path", ("mercy/*.jsonl", "job", 13)),
        ("sites.mercy.fraction", (0.5, "setting", None)),
        ("sites.b-2.path", ("b", "job", 16)),
        ("sites.b-2.fraction", (0.5, "setting", None)),
        ("federation.secure_sum", (False, "default", None)),
    ],
)
def test_a_value_is_shown_with_its_origin_and_line(
    file: Path, key: str, expected: tuple[Any, str, int | None]
) -> None:
    report = show_job(file, ("training.batch_size=4", "sites.*.fraction=0.5"))
    setting = settings_by_key(report)[key]
    assert (setting.value, setting.origin, setting.line) == expected


def test_the_preset_that_sets_a_value_is_shown(file: Path) -> None:
    server = settings_by_key(show_job(file))["training.server"]
    assert server.source == 'preset "best"'
    server = settings_by_key(show_job(file, ('preset="paper"',)))["training.server"]
    assert server.source == 'preset "paper"'


def test_a_job_without_a_title_shows_its_name(file: Path) -> None:
    title = settings_by_key(show_job(file))["title"]
    assert (title.value, title.source) == ("job", "default: the job's name")


def test_the_text_is_toml_with_sources_as_comments(file: Path) -> None:
    text = str(show_job(file))
    table = tomllib.loads(text)
    assert table["sites"]["mercy"]["label_map"] == {"Körper\x7f": 'Body "part"'}
    (line,) = [line for line in text.splitlines() if line.startswith("cycles = ")]
    assert line.split("#") == ["cycles = 3".ljust(46), " job, line 7"]


def test_a_key_without_a_value_is_a_comment(file: Path) -> None:
    text = str(show_job(file))
    assert "# dropout has no value" in text
    assert "# layer has no value" not in text


def test_defaults_can_be_left_out(file: Path) -> None:
    text = show_job(file).to_toml(changed=True)
    assert "rank = " not in text
    assert tomllib.loads(text)["training"]["cycles"] == 3
    assert tomllib.loads(text)["training"]["server"] == "nesterov"


def test_a_value_that_differential_privacy_fixes_shows_its_table() -> None:
    table = {
        "method": "finetune",
        "synthetic": {},
        "privacy": {"noise": 1.0, "counts": 1.0},
    }
    settings = settings_by_key(show_job(table))
    batch = settings["training.batch"]
    assert (batch.value, batch.source) == ("each", "[privacy]")
    assert settings["training.cycles"].source == 'preset "best"'
    assert settings["privacy.noise"].origin == "job"


def test_a_value_of_an_architecture_shows_the_architecture() -> None:
    model = {"tagger": "gram-cnn", "hashed_words": 8}
    settings = settings_by_key(
        show_job({"method": "fedner", "synthetic": {}, "model": model})
    )
    sources = {
        key.removeprefix("model."): (setting.value, setting.source)
        for key, setting in settings.items()
    }
    assert sources["cnn_widths"] == ([2, 3, 4], 'tagger "gram-cnn"')
    assert sources["lstm_units"] == (0, 'tagger "gram-cnn"')
    assert sources["char_dim"] == (100, "default")
    assert sources["kind"] == ("tagger", "default")


def test_sites_without_paths_are_shown_without_these_keys() -> None:
    sites: dict[str, Any] = {"a": {}, "b": {"types": ["Drug"]}, "c": {}}
    table = {"method": "fedner", "model": {"hashed_words": 8}, "sites": sites}
    settings = settings_by_key(show_job(table))
    assert settings["sites.b.types"].value == ["Drug"]
    assert settings["sites.a.valid_fraction"].value == 0.1
    assert "sites.a.path" not in settings
    secure_sum = settings["federation.secure_sum"]
    assert secure_sum.source == "default; true between real sites"


def test_the_command_prints_toml_or_json(run_cli: Any, file: Path) -> None:
    code, out, _ = run_cli("job", "show", str(file), "--set", "seed=2")
    assert code == 0
    assert tomllib.loads(out)["seed"] == 2
    code, out, _ = run_cli("job", "show", "demo", "--json")
    assert code == 0
    assert json.loads(out) == show_job("demo").to_dict()


def test_a_job_of_the_python_api_can_be_shown() -> None:
    report = fn.show_job(fn.job("demo", seed=4))
    assert report.to_dict()["name"] == "demo"
    assert settings_by_key(report)["seed"].value == 4


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dmo", (), "did you mean 'demo'"),
        ("demo", ("training.epoch=1",), "unknown key 'epoch': did you mean 'epochs'"),
        ("demo", ("seed",), "expected KEY=VALUE"),
    ],
)
def test_a_mistake_is_reported_as_by_other_commands(
    run_cli: Any, name: str, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        show_job(name, settings)
    options = [f"--set={setting}" for setting in settings]
    code, out, error = run_cli("job", "show", name, *options)
    assert (code, out) == (2, "")
    assert message in error
