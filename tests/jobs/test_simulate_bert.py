"""Jobs of pre-training and fine-tuning with a tiny random BERT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_bert

from fednotes.cli.display import make_result_table, make_result_tables
from fednotes.core.errors import ConfigError, DataError
from fednotes.jobs.compare import compare as compare_runs
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.simulate import simulate
from fednotes.report.html import write_report

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("few_sentences")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), max_position_embeddings=512)


def job(bert: Path, method: str, **changes: Any) -> Job:
    table = {
        "method": method,
        "seed": 4,
        "conditions": ["federated", "pooled"],
        "synthetic": {"sites": 2, "sentences": 30},
        "model": {"encoder": str(bert)},
        "training": {"cycles": 2, "batch_size": 8, "learning_rate": 1e-3},
        **changes,
    }
    present = {key: value for key, value in table.items() if value is not None}
    return parse_job(present, "test", bert, "test.toml")


class Stop(ProgressListener):
    """Stops a run after so many rounds, as an interrupt would."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.warnings: list[str] = []

    def cost(self, traffic: Any) -> None:
        self.traffic = traffic

    def round(self, result: Any) -> None:
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_a_pretraining_job_ends_with_a_report(bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = simulate(job(bert, "pretrain"), out)
    assert len(summary.sites) == 2
    for condition in ("federated", "pooled"):
        assert 0 < summary.mean[condition]["masked"]["loss"] < 10
        transformers.AutoModel.from_pretrained(out / condition / "model")
    assert not (out / "federated" / "sites").exists()  # one model, one copy
    assert summary.micro == {}
    for site, held_out in summary.valid["federated"]["sites"].items():
        assert held_out == -summary.sites[site]["federated"]["masked"]["loss"]
    assert [*make_result_table(summary).columns[1].cells] == ["federated", "pooled"] * 3
    page = write_report(out).read_text("utf-8")
    assert "Masked words" in page
    assert "Held-out loss" in page
    lines = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    federated = [line for line in lines if line["condition"] == "federated"]
    assert len(federated) == 2
    assert all(
        set(site) >= {"loss", "valid_loss"} for site in federated[-1]["sites"].values()
    )


def personal(bert: Path, **changes: Any) -> Job:
    """A job of three sites with different types."""
    model = {"encoder": str(bert), "train": "lora", "rank": 2}
    return job(bert, "personal", model=model, **changes)


@pytest.mark.slow
def test_a_personal_run_also_shows_the_mix_of_two_own_models(
    bert: Path, tmp_path: Path
) -> None:
    """Without a word in the job. The control's scores do not depend on the partners:
    with another federation, in which less is shared, they stay as they are."""
    out = tmp_path / "run"
    assert personal(bert).conditions == ("federated", "pooled")
    default = personal(bert, conditions=None)
    assert default.conditions == ("alone", "own-mix", "federated", "pooled")
    conditions = ["alone", "own-mix", "federated"]
    training = {
        "cycles": 2,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "distil_epochs": 1,
    }
    few = {"synthetic": {"sites": 2, "sentences": 16}}
    result = simulate(
        personal(bert, conditions=conditions, training=training, **few), out
    )
    assert {*result.conditions} == {*conditions}
    for site, scores in result.sites.items():
        verdict = result.verdict(site, "own-mix")
        assert verdict is not None
        assert verdict.paired
        f1 = {c: scores[c]["strict"]["f1"] for c in conditions}
        assert verdict.gain == pytest.approx(f1["federated"] - f1["own-mix"])
        assert scores["own-mix"]["parts"]["own"]["strict"] == scores["alone"]["strict"]
    assert (
        result.conditions["own-mix"]["bytes_up"]
        < 0.1 * result.conditions["federated"]["bytes_up"]
    )
    titles = [str(table.title) for table in make_result_tables(result)]
    assert titles[-1].startswith("federated against a mix of each site's own models")
    page = write_report(out).read_text("utf-8")
    assert "Compared with a mix of each site's own models" in page
    unshared = personal(
        bert,
        conditions=["own-mix", "federated"],
        training=training | {"share_outputs": "none"},
        **few,
    )
    again = simulate(unshared, tmp_path / "other")
    assert {s: by_condition["own-mix"] for s, by_condition in again.sites.items()} == {
        s: by_condition["own-mix"] for s, by_condition in result.sites.items()
    }


def test_only_the_method_personal_accepts_the_condition_own_mix(bert: Path) -> None:
    with pytest.raises(
        ConfigError, match='"own-mix", which is a control of method = "personal"'
    ):
        job(bert, "finetune", conditions=["own-mix"])
    privacy = {"epsilon": 8.0, "rate": 0.5}
    with pytest.raises(ConfigError, match=r"without \[privacy\]"):
        personal(bert, conditions=["own-mix"], privacy=privacy)
    assert "own-mix" not in personal(bert, conditions=None, privacy=privacy).conditions
    assert job(bert, "finetune", conditions=None).conditions == (
        "alone",
        "federated",
        "pooled",
    )


def test_a_pretrained_encoder_can_be_fine_tuned(bert: Path, tmp_path: Path) -> None:
    """And every number of the run adds: micro scores are those of all sites' counts."""
    simulate(job(bert, "pretrain", conditions=["federated"]), tmp_path / "first")
    encoder = str(tmp_path / "first" / "federated" / "model")
    table = {"number": 3, "by": "document"}
    tuned = job(
        bert,
        "finetune",
        model={"encoder": encoder},
        silos=table,
        conditions=["federated"],
    )
    summary = simulate(tuned, tmp_path / "second")
    assert list(summary.sites) == ["silo1", "silo2", "silo3"]
    counts = [site["federated"]["counts"] for site in summary.sites.values()]
    right, gold = (sum(each[key] for each in counts) for key in ("strict", "gold"))
    micro = summary.micro["federated"]["strict"]
    assert micro["recall"] == pytest.approx(right / gold)
    folder = tmp_path / "second" / "federated" / "model"
    transformers.AutoModelForTokenClassification.from_pretrained(folder)
    lines = [
        json.loads(x)
        for x in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()
    ]
    last = {site: scores["f1"] for site, scores in lines[-1]["sites"].items()}
    assert summary.valid["federated"]["sites"] == last  # the last cycle's model is kept


@pytest.mark.parametrize("compression", ["none", "packed"])
def test_the_traffic_of_a_secure_sum_is_shown(
    bert: Path, tmp_path: Path, compression: str
) -> None:
    """Every number takes eight bytes; the keys add about 40 KB for each site."""
    training = {"cycles": 2, "batch_size": 32, "compression": compression}
    tables: dict[str, Any] = {"training": training, "conditions": ["federated"]}
    tables |= {
        "synthetic": {"sites": 3, "sentences": 30},
        "federation": {"secure_sum": True},
    }
    display = Stop(0)
    summary = simulate(
        job(bert, "finetune", **tables), tmp_path / "run", listener=display
    )
    assert 0 < summary.bytes_up - 3 * display.traffic.up < 150_000


@pytest.mark.parametrize("method", ["pretrain", "finetune"])
def test_a_stopped_pretraining_run_resumes_to_the_same_model(
    bert: Path, tmp_path: Path, method: str
) -> None:
    simulated_job = job(bert, method, conditions=["federated"])
    display = Stop(0)
    summary = simulate(simulated_job, tmp_path / "whole", listener=display)
    # what was told of its cost, against the engine's count of both sites
    assert summary.conditions["federated"]["rounds"] == display.traffic.rounds
    # counts travel too
    assert 2 * display.traffic.up == pytest.approx(summary.bytes_up, rel=0.05)
    assert 2 * display.traffic.down == pytest.approx(summary.bytes_down, rel=0.02)
    with pytest.raises(KeyboardInterrupt):
        simulate(simulated_job, tmp_path / "cut", listener=Stop(2))
    simulate(simulated_job, tmp_path / "cut", resume=True)
    names = ("federated/model/model.safetensors", "federated/model/config.json")
    for name in names:
        assert (tmp_path / "cut" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes()


def test_a_job_that_shares_everything_causes_a_warning(
    bert: Path, tmp_path: Path
) -> None:
    display = Stop(0)
    model = {"encoder": str(bert), "train": "all"}
    settings = {"cycles": 1, "min_tokens": 0, "min_steps": 0}
    shared_job = job(
        bert, "pretrain", model=model, training=settings, conditions=["federated"]
    )
    summary = simulate(shared_job, tmp_path / "run", listener=display)
    assert "reveal which words" in display.warnings[0]
    assert display.warnings[0] in summary.notes


def test_private_classifiers_are_saved_at_each_site(bert: Path, tmp_path: Path) -> None:
    settings = {"cycles": 1, "private": ["classifier"]}
    private_job = job(bert, "finetune", training=settings, conditions=["federated"])
    summary = simulate(private_job, tmp_path / "run")
    for site in summary.sites:
        folder = tmp_path / "run" / "federated" / "sites" / site / "model"
        model = transformers.AutoModelForTokenClassification.from_pretrained(folder)
        types = {name.partition("-")[2] for name in model.config.id2label.values()} - {
            ""
        }
        assert types == set(summary.annotated[site])


def test_no_token_of_a_note_is_in_the_files_of_a_run(
    bert: Path, tmp_path: Path
) -> None:
    """Beside the tokenizer, which is the published one."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(6):
        text = "Zyxomycin 40 mg was given. The patient quibbledorf has pain. " * 6
        (folder / f"{number}.txt").write_text(text)
    sites = {name: {"path": str(folder)} for name in ("a", "b")}
    table = {
        "synthetic": None,
        "sites": sites,
        "training": {"cycles": 1, "batch_size": 4},
    }
    simulate(job(bert, "pretrain", conditions=["federated"], **table), tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            data = path.read_bytes().lower()
            assert b"zyxomycin" not in data, path
            assert b"quibbledorf" not in data, path


@pytest.mark.slow
def test_models_of_all_sites_are_compared(bert: Path, tmp_path: Path) -> None:
    """Where one copy is kept for all sites; a language model has nothing to compare."""
    silo_job = job(bert, "finetune", silos={"number": 2, "by": "document"})
    simulate(silo_job, tmp_path / "run")
    comparisons = compare_runs(
        tmp_path / "run", tmp_path / "run", "federated", "pooled", samples=20
    ).tests
    assert list(comparisons) == ["silo1", "silo2"]
    same = compare_runs(
        tmp_path / "run", tmp_path / "run", "pooled", "pooled", samples=20
    ).tests
    assert all(test.difference == 0 for test in same.values())
    simulate(job(bert, "pretrain", conditions=["federated"]), tmp_path / "notes")
    with pytest.raises(DataError, match="finds no entities"):
        compare_runs(tmp_path / "notes", tmp_path / "notes", "federated", "federated")


def test_settings_that_do_not_fit_together_are_refused(bert: Path) -> None:
    with pytest.raises(ConfigError, match="keep_cycle"):
        job(bert, "pretrain", training={"cycles": 2, "keep_cycle": 3})
