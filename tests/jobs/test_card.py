"""What stands in a model's card, and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import TABLE
from typer.testing import CliRunner

from fednotes.cli.app import app
from fednotes.core.errors import ModelError
from fednotes.jobs.audit_result import AUDIT, Audit, Leak
from fednotes.jobs.card import OwnRun, render_card, write_cards
from fednotes.jobs.results import RunResult

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three generated sites, alone and federated."""
    folder = tmp_path_factory.mktemp("cards")
    table = {
        **TABLE,
        "title": "Tiny `job`\n---\nlicense: mit",
        "conditions": ["alone", "federated"],
    }
    tables = {k: v for k, v in table.items() if isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in table.items() if k not in tables]
    for name, rows in tables.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in rows.items())]
    (folder / "job.toml").write_text("\n".join(lines))
    made = CliRunner().invoke(
        app, ["simulate", str(folder / "job.toml"), "--out", str(folder / "run")]
    )
    assert made.exit_code == 0, made.output
    end = made.output.rindex("mean")  # the table is the last that is seen
    assert 0 < made.output.rindex("\nnote: ") < made.output.rindex("\nreport: ") < end
    return folder / "run"


def head(text: str) -> dict[str, Any]:
    """The YAML at the beginning."""
    start, front, _ = text.split("---\n", 2)
    assert start == ""
    found: dict[str, Any] = yaml.safe_load(front)
    return found


def test_every_model_of_a_run_has_its_card(run: Path) -> None:
    """The numbers are those of summary.json; the size of the training data is a sum
    over sites."""
    summary = json.loads((run / "summary.json").read_text())
    cards = {path.parent.relative_to(run): path for path in run.rglob("README.md")}
    assert len(cards) == 6
    site = sorted(summary["sites"])[0]
    text = cards[Path("federated", "sites", site, "model")].read_text()
    front = head(text)
    assert front["license"] == "other"
    assert front["pipeline_tag"] == "token-classification"
    metrics = {
        m["name"]: m["value"] for m in front["model-index"][0]["results"][0]["metrics"]
    }
    own = summary["sites"][site]["federated"]
    assert metrics["Strict f1"] == pytest.approx(own["strict"]["f1"], abs=5e-5)
    assert f"| Strict | f1 | {own['strict']['f1']:.3f} |" in text
    total = summary["conditions"]["federated"]["examples"]
    assert total <= 3 * 30
    assert f"Trained on {total} examples of all sites together" in text
    assert json.loads((run / "job.json").read_text())["fingerprint"] in text
    assert "fedner" in text
    assert "Seed 2;" in text
    assert "Notes stayed at their sites" in text
    alone = cards[Path("alone", site, "sites", site, "model")].read_text()
    assert "by one site on its own notes" in alone
    assert "Notes stayed" not in alone


def test_a_card_names_no_site(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for path in run.rglob("README.md"):
        words = path.read_text()
        assert not any(site in words for site in summary["sites"])
        assert str(run.parent) not in words


def test_one_site_alone_is_not_told_as_all_sites(run: Path) -> None:
    for path in (run / "alone").rglob("README.md"):
        assert "examples of all sites" not in path.read_text()


@pytest.mark.parametrize("whose", ["sites/{site}/model", "model"])
def test_of_two_sites_nothing_tells_the_others(
    run: Path, tmp_path: Path, whose: str
) -> None:
    """Neither the model of one, nor one of both; what is hidden is there with three."""
    summary = json.loads((run / "summary.json").read_text())
    first, second, third = sorted(summary["sites"].items())
    source = run / "federated" / "sites" / first[0] / "model" / "tagger.json"
    mean = f"{summary['mean']['federated']['strict']['f1']:.3f}"
    for sites in ((first, second), (first, second, third), ()):
        place = tmp_path / str(len(sites))
        model = place / "federated" / whose.format(site=first[0])
        model.mkdir(parents=True)
        (place / "summary.json").write_text(
            json.dumps({**summary, "sites": dict(sites)})
        )
        (model / "tagger.json").write_bytes(source.read_bytes())
        text = render_card(model)
        own = f"{first[1]['federated']['strict']['f1']:.3f}"
        assert ("examples of all sites together" in text) == (len(sites) == 3)
        assert (mean in text.replace(own, "")) == (len(sites) == 3 and mean != own)
        assert ("mean of the sites" in text) == (len(sites) == 3)


def test_a_real_sites_card_is_of_what_it_knows(run: Path, tmp_path: Path) -> None:
    """Of one of two sites: its own scores and their interval, the job; nothing that is
    of both."""
    summary = json.loads((run / "summary.json").read_text())
    (name, own), (other, _), _ = sorted(summary["sites"].items())
    model = tmp_path / "results" / "run1" / "model"
    model.mkdir(parents=True)
    source = run / "federated" / "sites" / name / "model" / "tagger.json"
    (model / "tagger.json").write_bytes(source.read_bytes())
    facts = {
        "sites": {name: {"federated": own["federated"]}, other: {}},
        "run": "run1",
        "seed": 2,
    }
    facts |= {
        "method": "fedner",
        "config": {"federation": {"secure_sum": True}},
        "title": "A #1",
    }
    known = OwnRun(name, RunResult(**facts), {"job": "j", "fingerprint": "abc"})
    write_cards(model.parent, known)
    text = (model / "README.md").read_text()
    f1 = own["federated"]["strict"]["f1"]
    metrics = {
        m["name"]: m["value"]
        for m in head(text)["model-index"][0]["results"][0]["metrics"]
    }
    assert metrics["Strict f1"] == pytest.approx(f1, abs=5e-5)
    assert "notes of the site whose model this is" in text
    assert "95 % interval of strict F1" in text
    assert '`fedner`, condition "federated"; 2 sites.' in text
    assert "Secure sum of the sites' updates: yes" in text
    assert "Job `j`, SHA-256 `abc`" in text
    assert "A \\#1" in text
    assert not any(
        word in text for word in ("mean", "examples", "simulated", name, other)
    )


def test_what_others_wrote_stays_a_line(run: Path) -> None:
    """A title cannot end the head, nor set the license."""
    path = next(run.rglob("README.md"))
    assert "\n# Tiny \\`job\\` --- license: mit\n" in path.read_text()
    assert head(path.read_text())["license"] == "other"


def test_a_title_of_any_characters_is_read_again(run: Path, tmp_path: Path) -> None:
    """YAML has no surrogates; Markdown reads entities."""
    summary = json.loads((run / "summary.json").read_text())
    title = "Gänge &amp; 😀 𝛽"
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "title": title}))
    model = tmp_path / "federated" / "sites" / min(summary["sites"]) / "model"
    model.mkdir(parents=True)
    (model / "tagger.json").write_bytes(next(run.rglob("tagger.json")).read_bytes())
    text = render_card(model)
    assert head(text)["model-index"][0]["name"] == title
    assert "\n# Gänge \\&amp; 😀 𝛽\n" in text


@pytest.mark.parametrize(
    "facts",
    [
        {"kind": "tagger", "tagset": {"types": 4}},
        {"kind": "phenotyper"},
        {"kind": "phenotyper", "phenotypes": 4},
    ],
)
def test_a_damaged_description_has_a_card(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(facts))
    assert f"Kind: `{facts['kind']}`" in render_card(tmp_path)


def test_a_card_that_a_person_edited_stays(run: Path) -> None:
    path = next(run.rglob("README.md"))
    written = path.read_text()
    path.write_text("mine")
    write_cards(run)
    assert path.read_text() == "mine"
    again = CliRunner().invoke(app, ["export", "card", str(path.parent), str(path)])
    assert again.exit_code == 0
    assert path.read_text() == written


def test_a_model_without_its_run_has_a_card_too(run: Path, tmp_path: Path) -> None:
    source = next((run / "federated").rglob("tagger.json")).parent
    (tmp_path / "model").mkdir()
    for name in ("tagger.json", "tagger.safetensors"):
        (tmp_path / "model" / name).write_bytes((source / name).read_bytes())
    text = render_card(tmp_path / "model")
    assert "model-index" not in head(text)
    assert "No scores are known here" in text
    with pytest.raises(ModelError, match="no model here"):
        render_card(tmp_path)


def test_a_card_tells_its_run_s_audit(run: Path) -> None:
    """Of the model of the federation; what failed undefended is said to say nothing."""
    model = next(run.glob("federated/sites/*/model"))
    assert "false alarms" not in render_card(model)
    told: dict[str, Any] = {"success": 0.5, "low": 0.25, "high": 0.75, "chance": 0.01}
    leaks = [
        Leak(attack="words | a", control=1.0, proven=True, **told),
        Leak(attack="names", control=0.2, **told),
        Leak(attack="none here", applies=False, why="no"),
        Leak(attack="success alone", success=0.5),
    ]
    (run / AUDIT).write_text(Audit(attacks=leaks).model_dump_json())
    try:
        text = render_card(model)
        alone = render_card(next(run.glob("alone/*/sites/*/model")))
    finally:
        (run / AUDIT).unlink()
    found = "it finds 0.500 (0.250 to 0.750) of what is there at 1 % false alarms."
    assert f"- Attack on one site's notes, words \\| a: {found}" in text
    guessing = "Guessing finds 0.010, and the attack without any defence"
    assert f"{guessing} 1.000.\n" in text
    assert f"{guessing} 0.200. The attack is too weak to prove anything.\n" in text
    assert "none here" not in text
    assert "success alone: it finds 0.500 of what" in text
    assert "Guessing finds 0.000. The attack is too weak to prove anything.\n" in text
    assert "false alarms" not in alone
