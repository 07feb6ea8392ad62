"""Every preset "paper" and job on a paper's corpora has the settings of docs/papers.md.

A table below a heading `### Preset "paper"` has a line for each setting:
`METHOD.TABLE.KEY` (of the preset) or `JOB KEY` (of a built-in job, `*` for every site),
its value as in TOML, and where the paper states it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from applications import needs_app

from fednotes import methods
from fednotes.core.settings import read_toml
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.job_file import load_job, parse_job

TEXT = (Path(__file__).parents[2] / "docs" / "papers.md").read_text("utf-8")
# by the section of docs/papers.md; a section that is not here has a test of its own
METHODS = {
    "FedNER": ("fedner",),
    "Federated domain adaptation with heterogeneous tag sets": (
        "distill",
        "adversarial",
    ),
    "Federated pre-training and fine-tuning of BERT": ("pretrain", "finetune"),
}
JOBS = {
    "fedner/paper": "FedNER",
    "tagsets/ontonotes": "Federated domain adaptation with heterogeneous tag sets",
    "tagsets/clinic": "Federated domain adaptation with heterogeneous tag sets",
    "bert/mimic": "Federated pre-training and fine-tuning of BERT",
    "bert/i2b2-2010": "Federated pre-training and fine-tuning of BERT",
    "bert/i2b2-2012": "Federated pre-training and fine-tuning of BERT",
}
SECTION = re.compile(
    r'^## (.+?)\n(?:(?!^## )[\s\S])*?^### Preset "paper"\n([\s\S]*?)(?=^##|\Z)', re.M
)
LINE = re.compile(r"^\| (`.+?`) \| `(.+?)` \| (.+?) \|$", re.M)
# What is no setting of the paper: where files are, how this project names things.
UNDOCUMENTED = (
    "title",
    "method",
    "preset",
    "seed",
    "conditions",
    "label_map",
    "where",
    "format",
)


class Row(NamedTuple):
    """One setting."""

    setting: str
    value: Any
    source: str


def rows(section: str) -> tuple[Row, ...]:
    """Return a section's table; a line may name several settings of one value."""
    (table,) = [body for title, body in SECTION.findall(TEXT) if title == section]
    table_rows = []
    for settings, value, source in LINE.findall(table):
        value = tomllib.loads(f"value = {value}")["value"]
        table_rows += [
            Row(s, value, source) for s in re.findall(r"`([^`]+)`", settings)
        ]
    lines = sum(line.startswith("| `") for line in table.splitlines())
    assert len(LINE.findall(table)) == lines, (
        f"{section}: a line of the table cannot be read"
    )
    return tuple(table_rows)


def settings_below(section: str, start: str) -> dict[str, Any]:
    """Return the values of the settings that begin so."""
    matches = [row for row in rows(section) if row.setting.startswith(start)]
    assert len(matches) == len({row.setting for row in matches}), (
        "a setting is listed twice"
    )
    return {row.setting.removeprefix(start): row.value for row in matches}


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"a.b": 1} for {"a": {"b": 1}}."""
    settings = {}
    for key, value in table.items():
        inner = flat(value) if isinstance(value, Mapping) else {"": value}
        settings |= {f"{key}.{name}".rstrip("."): each for name, each in inner.items()}
    return settings


def listed(value: Any) -> Any:
    """Return tuples as lists, as TOML has them."""
    return list(value) if isinstance(value, tuple) else value


def settings_of(config: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "model":
            yield from (
                (f"model.{f.name}", getattr(value, f.name)) for f in fields(value)
            )
        else:
            yield f"training.{field.name}", value


EACH = [(section, method) for section, names in METHODS.items() for method in names]


@pytest.mark.parametrize(
    ("section", "method"), EACH, ids=[method for _, method in EACH]
)
def test_each_preset_equals_its_table(section: str, method: str) -> None:
    """In both directions, and what a job gets of it, which names neither."""
    table_settings = settings_below(section, f"{method}.")
    preset = flat(methods.find_method(method).presets["paper"])
    preset = {
        key.replace("with_word_vectors.", "model."): v for key, v in preset.items()
    }
    assert preset == table_settings
    model = {"fedner": {"word_vectors": "v.txt"}, "distill": {"backbone": "b"}}.get(
        method, {}
    )
    sites = {f"site{i}": {"path": "x"} for i in range(3)}
    table = {"method": method, "preset": "paper", "model": model, "sites": sites}
    preset_settings = dict(settings_of(parse_job(table, "j", Path(), "j.toml").config))
    assert {
        key: listed(preset_settings[key]) for key in table_settings
    } == table_settings
    # a job that names the preset's own model gets it too
    for key in ("kind", "tagger"):
        if name := preset.get(f"model.{key}"):
            again = parse_job(
                table | {"model": {**model, key: name}}, "j", Path(), "j.toml"
            )
            assert dict(settings_of(again.config)) == preset_settings


@pytest.mark.parametrize("name", JOBS)
def test_each_job_on_the_corpora_of_a_paper_equals_its_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_app("experiments")
    for variable in (
        "FEDNOTES_CORPORA",
        "CLINIC",
        "ONTONOTES",
        "MIMIC_III",
        "I2B2_2010",
    ):
        monkeypatch.setenv(variable, str(tmp_path))
    for variable in ("I2B2_2012", "BERT_BASE"):
        monkeypatch.setenv(variable, str(tmp_path))
    table_settings = settings_below(JOBS[name], f"{name} ")
    job = load_job(name)
    for setting, value in table_settings.items():
        table, key = setting.split(".", 1)
        if table != "sites":
            table_config = job.config.model if table == "model" else getattr(job, table)
            assert listed(getattr(table_config, key)) == value, setting
            continue
        site, key = key.split(".")
        for each in job.sites.values() if site == "*" else [job.sites[site]]:
            assert listed(getattr(each, key)) == value, setting
    raw = read_toml(list_built_in_jobs()[name])
    assert raw["preset"] == "paper"
    for setting, value in flat(
        {k: v for k, v in raw.items() if k not in UNDOCUMENTED}
    ).items():
        if isinstance(value, str) and "$" in value:
            continue  # a path
        parts = setting.split(".")
        if parts[0] == "sites" and parts[2] in UNDOCUMENTED:
            continue
        names = {setting, ".".join([parts[0], "*", *parts[2:]]), ".".join(parts[:2])}
        assert names & table_settings.keys(), (
            f"{name}: {setting} is not in docs/papers.md"
        )


def test_label_words_name_every_type() -> None:
    needs_app("experiments")
    raw = read_toml(list_built_in_jobs()["tagsets/ontonotes"])
    assert list(raw["model"]["label_words"]) == raw["tags"]["types"]
    assert len(raw["tags"]["types"]) == 18


def test_every_setting_of_a_table_belongs_to_a_preset_or_job() -> None:
    known = tuple([f"{method}." for _, method in EACH] + [f"{name} " for name in JOBS])
    for section in METHODS:
        for row in rows(section):
            assert row.setting.startswith(known), row.setting
            assert len(row.source) > 5, row.setting
