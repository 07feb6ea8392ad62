"""What a model card states and what it must not state."""

from __future__ import annotations

import json
import shutil
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
    ended = CliRunner().invoke(
        app, ["simulate", str(folder / "job.toml"), "--out", str(folder / "run")]
    )
    assert ended.exit_code == 0, ended.output
    notes = ended.output.rindex("\nnote: ")
    report = ended.output.rindex("\nreport: ")
    table_end = ended.output.rindex("mean")
    model = folder / "run/federated/sites"
    next_step = ended.output.rindex(f"\nnext: fednotes predict {model}")
    assert 0 < notes < report < table_end < next_step
    return folder / "run"


def parse_head(text: str) -> dict[str, Any]:
    """Return the YAML at the beginning of a card."""
    start, front, _ = text.split("---\n", 2)
    assert start == ""
    head: dict[str, Any] = yaml.safe_load(front)
    return head


def metrics_of(head: dict[str, Any]) -> dict[str, float]:
    """Return the metrics in the head of a card."""
    (result,) = head["model-index"][0]["results"]
    return {metric["name"]: metric["value"] for metric in result["metrics"]}


@pytest.mark.slow
def test_every_model_of_a_run_has_a_card_with_the_scores_of_the_run(run: Path) -> None:
    """The number of training examples is the sum over the sites."""
    summary = json.loads((run / "summary.json").read_text())
    cards = {path.parent.relative_to(run): path for path in run.rglob("README.md")}
    assert len(cards) == 6
    site = sorted(summary["sites"])[0]
    text = cards[Path("federated", "sites", site, "model")].read_text()
    head = parse_head(text)
    assert head["license"] == "other"
    assert head["pipeline_tag"] == "token-classification"
    metrics = metrics_of(head)
    site_scores = summary["sites"][site]["federated"]
    assert metrics["Strict f1"] == pytest.approx(site_scores["strict"]["f1"], abs=5e-5)
    assert f"| Strict | f1 | {100 * site_scores['strict']['f1']:.1f} |" in text
    total = summary["conditions"]["federated"]["examples"]
    assert total <= 3 * 30
    assert f"Trained on {total} examples from all sites" in text
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


def test_the_card_of_a_model_of_one_site_does_not_count_examples_of_all_sites(
    run: Path,
) -> None:
    for path in (run / "alone").rglob("README.md"):
        assert "examples of all sites" not in path.read_text()


@pytest.mark.parametrize("model_path", ["sites/{site}/model", "model"])
def test_sums_and_means_are_not_shown_for_two_sites(
    run: Path, tmp_path: Path, model_path: str
) -> None:
    """Each of two sites could subtract its own value. Three sites show both."""
    summary = json.loads((run / "summary.json").read_text())
    first, second, third = sorted(summary["sites"].items())
    source = run / "federated" / "sites" / first[0] / "model" / "tagger.json"
    mean = f"| {100 * summary['mean']['federated']['strict']['f1']:.1f} |"
    for sites in ((first, second), (first, second, third), ()):
        place = tmp_path / str(len(sites))
        model = place / "federated" / model_path.format(site=first[0])
        model.mkdir(parents=True)
        (place / "summary.json").write_text(
            json.dumps({**summary, "sites": dict(sites)})
        )
        (model / "tagger.json").write_bytes(source.read_bytes())
        text = render_card(model)
        site_f1 = f"| {100 * first[1]['federated']['strict']['f1']:.1f} |"
        assert ("examples from all sites" in text) == (len(sites) == 3)
        assert (mean in text.replace(site_f1, "")) == (
            len(sites) == 3 and mean != site_f1
        )
        assert ("mean over the sites" in text) == (len(sites) == 3)


def test_a_real_site_writes_its_card_from_its_own_facts(
    run: Path, tmp_path: Path
) -> None:
    """One of two sites shows its scores, their interval and the job, and no mean."""
    summary = json.loads((run / "summary.json").read_text())
    (name, conditions), (other_name, _), _ = sorted(summary["sites"].items())
    model = tmp_path / "results" / "run1" / "model"
    model.mkdir(parents=True)
    source = run / "federated" / "sites" / name / "model" / "tagger.json"
    (model / "tagger.json").write_bytes(source.read_bytes())
    facts = {
        "sites": {name: {"federated": conditions["federated"]}, other_name: {}},
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
    f1 = conditions["federated"]["strict"]["f1"]
    metrics = metrics_of(parse_head(text))
    assert metrics["Strict f1"] == pytest.approx(f1, abs=5e-5)
    assert "notes of the site whose model this is" in text
    assert "95 % interval of strict F1" in text
    assert '`fedner`, condition "federated"; 2 sites.' in text
    assert "Secure sum of the sites' updates: yes" in text
    assert "Job `j`, SHA-256 `abc`" in text
    assert "A \\#1" in text
    assert not any(
        word in text for word in ("mean", "examples", "simulated", name, other_name)
    )


def test_a_title_cannot_end_the_head_or_set_the_license(run: Path) -> None:
    path = next(run.rglob("README.md"))
    assert "\n# Tiny \\`job\\` --- license: mit\n" in path.read_text()
    assert parse_head(path.read_text())["license"] == "other"


def test_a_title_may_have_any_characters(run: Path, tmp_path: Path) -> None:
    """YAML has no surrogates, and Markdown replaces entities."""
    summary = json.loads((run / "summary.json").read_text())
    title = "Gänge &amp; 😀 𝛽"
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "title": title}))
    model = tmp_path / "federated" / "sites" / min(summary["sites"]) / "model"
    model.mkdir(parents=True)
    (model / "tagger.json").write_bytes(next(run.rglob("tagger.json")).read_bytes())
    text = render_card(model)
    assert parse_head(text)["model-index"][0]["name"] == title
    assert "\n# Gänge \\&amp; 😀 𝛽\n" in text


@pytest.mark.parametrize(
    "facts",
    [
        {"kind": "tagger", "tagset": {"types": 4}},
        {"kind": "phenotyper"},
        {"kind": "phenotyper", "phenotypes": 4},
    ],
)
def test_a_model_with_a_damaged_description_has_a_card(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(facts))
    assert f"Kind: `{facts['kind']}`" in render_card(tmp_path)


def test_an_edited_card_is_not_replaced(run: Path) -> None:
    path = next(run.rglob("README.md"))
    edited = path.read_text()
    path.write_text("mine")
    write_cards(run)
    assert path.read_text() == "mine"
    path.unlink()
    write_cards(run)
    assert path.read_text() == edited


def test_each_model_of_a_run_has_a_card_but_copies_elsewhere_have_none(
    run: Path,
) -> None:
    """Cards are written where runs save models; nothing else of a run is searched."""
    models = [path.parent for path in run.rglob("tagger.json")]
    assert len(models) > 3
    for model in models:
        (model / "README.md").unlink(missing_ok=True)
    copy = run / "federated" / "checkpoints" / "7" / "copy" / "model"
    copy.mkdir(parents=True)
    (copy / "tagger.json").write_bytes((models[0] / "tagger.json").read_bytes())

    write_cards(run)

    cards = {path.parent for path in run.rglob("README.md")}
    shutil.rmtree(copy.parents[1])
    assert cards == set(models)


def test_a_model_outside_its_run_has_a_card(run: Path, tmp_path: Path) -> None:
    source = next((run / "federated").rglob("tagger.json")).parent
    (tmp_path / "model").mkdir()
    for name in ("tagger.json", "tagger.safetensors"):
        (tmp_path / "model" / name).write_bytes((source / name).read_bytes())
    text = render_card(tmp_path / "model")
    assert "model-index" not in parse_head(text)
    assert "No scores are stored with this model" in text
    assert "The scores hold" not in text
    with pytest.raises(ModelError, match="no model here"):
        render_card(tmp_path)


def test_the_card_of_a_federated_model_shows_the_audit_of_its_run(run: Path) -> None:
    """An attack that fails without any defence is called too weak."""
    model = next(run.glob("federated/sites/*/model"))
    assert "false-alarm rate" not in render_card(model)
    rates: dict[str, Any] = {"success": 0.5, "low": 0.25, "high": 0.75, "chance": 0.01}
    leaks = [
        Leak(attack="words | a", control=1.0, proven=True, **rates),
        Leak(attack="names", control=0.2, **rates),
        Leak(attack="none here", applies=False, why="no"),
        Leak(attack="success alone", success=0.5),
    ]
    (run / AUDIT).write_text(Audit(attacks=leaks).model_dump_json())
    try:
        text = render_card(model)
        alone = render_card(next(run.glob("alone/*/sites/*/model")))
    finally:
        (run / AUDIT).unlink()
    attack_result = "it identifies 50.0 % (25.0 to 75.0 %) of the items in the notes, at a false-alarm rate of 1 %."
    assert f"- Attack on one site's notes, words \\| a: {attack_result}" in text
    guessing = "Guessing identifies 1.0 %, and the attack without any defence"
    assert f"{guessing} 100.0 %.\n" in text
    assert f"{guessing} 20.0 %. The attack is too weak to prove anything.\n" in text
    assert "none here" not in text
    assert "success alone: it identifies 50.0 % of the items" in text
    assert (
        "Guessing identifies 0.0 %. The attack is too weak to prove anything.\n" in text
    )
    assert "false-alarm rate" not in alone
