"""Jobs that train on sampled sites in each round: training, records and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_jobs import TABLE
from worker_runs import check_same_files, read_run

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.seeds import Draws
from fednotes.engines.rounds import RoundResult
from fednotes.engines.sampling import RoundSampling
from fednotes.jobs.diagnosis.participation import find_participation_causes
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.parts import list_parts, plan_rounds, prepare
from fednotes.jobs.simulate import simulate
from fednotes.methods import fedner
from fednotes.training.site_sampling import SiteSampling, remove_sampling

SITES = ("discharge", "reports", "posts", "mixed4", "mixed5")  # as they are generated


def job_of(drawn: int | None = 2, **changes: Any) -> Job:
    """Return a FedNER job of five generated sites that exchanges weights."""
    training = {"exchange": "weights", "rounds": 6, "evaluate_every": 3}
    training |= changes.pop("training", {})
    if drawn is not None:
        training["sites_per_round"] = drawn
    table = TABLE | {
        "synthetic": {"sites": 5, "sentences": 30},
        "conditions": ["federated"],
        "training": TABLE["training"] | training,
    }
    return parse_job(table | changes, "job", Path(), "job.toml")


def drawn_sites(round: int, drawn: int = 2) -> tuple[str, ...]:
    return RoundSampling(drawn, Draws(2), frozenset()).draw_sites(round, SITES)


def read_lines(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# ---- training ------------------------------------------------------------------------


def test_a_round_averages_the_drawn_sites_by_their_sentences(
    tmp_path: Path,
) -> None:
    """Σ |S_i| θ_i / Σ |S_j| by NumPy's average of what the two drawn sites train to by
    themselves, from one round of a whole simulation."""
    job = job_of(training={"rounds": 1, "select": "last"})
    states: list[Any] = []
    original = fedner.train

    def train(federation: Any, config: Any) -> Any:
        state = original(federation, config)
        states.append(state)
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedner, "train", train)
        simulate(job, tmp_path)
    (state,) = states

    sites, config, _ = prepare(job)
    members = {site.id: fedner.Site(site, config) for site in sites.data}
    assert tuple(members) == SITES
    sizes = {name: site.num_examples for name, site in members.items()}
    assert len(set(sizes.values())) > 1
    trained = {}
    for name in drawn_sites(0):
        site = members[name]
        site.take_share({}, examples=sum(sizes.values()))
        trained[name] = site.train(
            fedner.make_initial_parameters(config), round=0
        ).tensors
    weights = [sizes[name] for name in trained]
    for parameter in fedner.make_initial_parameters(config):
        each = [tensors[parameter].double().numpy() for tensors in trained.values()]
        np.testing.assert_allclose(
            state.tensors[f"shared.{parameter}"],
            np.average(each, axis=0, weights=weights),
            rtol=1e-6,
            atol=1e-7,
        )


@pytest.mark.slow
def test_a_job_that_exchanges_rows_of_words_marks_them_in_each_round(
    tmp_path: Path,
) -> None:
    """Rows that other sites marked in the round before would not be enough: the run has
    the bits of one whose tables are sent whole."""
    from fednotes.training import word_rows

    table = {"model": TABLE["model"] | {"hashed_words": 600}}
    job = job_of(training={"exchange": "gradients", "private": []}, **table)
    runs = {}
    for name, least in (("rows", 1), ("whole", 10**9)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(word_rows, "LEAST", least)
            simulate(job, tmp_path / name)
        files = read_run(tmp_path / name)
        runs[name] = {k: v for k, v in files.items() if k.endswith(".safetensors")}
    assert runs["rows"] == runs["whole"]


@pytest.mark.slow
def test_workers_do_not_change_the_files_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fednotes.jobs.workers import pool

    monkeypatch.setattr(pool, "count_cores", lambda: 8)
    check_same_files(job_of(), tmp_path)


@pytest.mark.slow
def test_a_killed_simulation_resumes_with_the_same_sites(tmp_path: Path) -> None:
    simulate(job_of(), tmp_path / "whole")

    def stop(part: str, result: RoundResult) -> None:
        if result.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(job_of(), tmp_path / "killed", listener=stop)
    simulate(job_of(), tmp_path / "killed", resume=True)
    assert read_run(tmp_path / "killed") == read_run(tmp_path / "whole")


def test_other_conditions_do_not_draw_sites() -> None:
    """Alone, pooled and the control train as without the key."""
    job = job_of(conditions=["alone", "federated", "pooled"])
    sites, config, parts = prepare(job)
    assert {part.config.sites_per_round for part in parts} == {None, 2}
    for part in parts:
        is_federated = part.condition == "federated"
        assert (part.config.sites_per_round == 2) == is_federated
    unsampled = list_parts(job, sites, remove_sampling(config))
    for part, other in zip(parts, unsampled, strict=True):
        assert repr(part.config) == repr(other.config)


def test_the_key_is_not_in_the_text_of_the_settings() -> None:
    """That text is part of the key of a private site's noise: with the key and without
    it, a job of an earlier version has the same noise."""
    config = fedner.Config(sites_per_round=2)
    assert repr(config) == repr(fedner.Config())
    assert "sites_per_round" not in repr(config)
    assert "sites_per_round" in SiteSampling.__dataclass_fields__


def test_a_progress_bar_expects_the_examples_of_the_drawn_sites() -> None:
    job = job_of()
    rounds, all_examples = job.module.plan_rounds(job.config, [30] * 5)
    assert plan_rounds(job.module, job.config, [30] * 5, 5) == (
        rounds,
        2 * all_examples // 5,
    )


# ---- what is recorded ----------------------------------------------------------------


@pytest.mark.slow
def test_metrics_record_how_often_each_site_was_drawn(tmp_path: Path) -> None:
    simulate(job_of(), tmp_path)
    first, second = read_lines(tmp_path)
    for line, rounds in ((first, (0, 1, 2)), (second, (3, 4, 5))):
        expected: dict[str, int] = {}
        for round in rounds:
            for site in drawn_sites(round):
                expected[site] = expected.get(site, 0) + 1
        assert line["drawn"] == expected
        last = drawn_sites(rounds[-1])
        assert {site for site, row in line["sites"].items() if "loss" in row} == {*last}
        assert {site for site, row in line["sites"].items() if "f1" in row} == {*SITES}


@pytest.mark.slow
def test_without_the_key_no_draw_is_recorded(tmp_path: Path) -> None:
    simulate(job_of(None), tmp_path)
    assert all("drawn" not in line for line in read_lines(tmp_path))


@pytest.mark.parametrize(("took_part", "is_found"), [(2, False), (1, True)])
def test_sites_that_were_not_drawn_are_not_reported_as_absent(
    took_part: int, is_found: bool
) -> None:
    """A doctor's finding is about drawn sites that did not answer."""

    class Evidence:
        job = parse_job(
            {
                "method": "fedner",
                "training": {"sites_per_round": 2},
                "sites": {name: {"path": "x"} for name in SITES},
            },
            "job",
            Path(),
            "job.toml",
        )
        entries: tuple[Mapping[str, Any], ...] = tuple(
            {"round": round, "took_part": took_part, "drawn": {"site1": 1}}
            for round in range(30)
        )

    evidence: Any = Evidence()
    causes = [cause.code for cause in find_participation_causes(evidence)]
    assert ("sites_absent" in causes) == is_found


# ---- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("drawn", "changes", "message"),
    [
        (5, {}, "must be lower than the number of sites, 5"),
        (9, {}, "lower than the number of sites, 5"),
        (
            2,
            {"federation": {"min_sites": 3}},
            r"\[federation\] min_sites = 3 sites must answer in each round",
        ),
        (
            2,
            {"federation": {"secure_sum": True}},
            "the secure sum .* needs 3 sites in each round",
        ),
        (0, {}, "sites_per_round = 0: expected at least 1"),
        (True, {}, "expected a whole number"),
    ],
)
def test_a_number_of_sites_that_cannot_be_drawn_is_refused(
    drawn: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(job_of(drawn, **changes))


@pytest.mark.parametrize(
    ("drawn", "training", "message"),
    [
        (
            2,
            {"aggregation": "reference", "reference": "site1"},
            '"reference" needs the site .site1. in each round',
        ),
        (2, {"aggregation": "median"}, "needs 3 sites in each round"),
        (4, {"aggregation": "krum"}, "needs 5 sites in each round"),
    ],
)
def test_a_rule_that_needs_more_sites_than_are_drawn_is_refused(
    drawn: int, training: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(job_of(drawn, training=training))


def test_instance_weights_need_three_drawn_sites() -> None:
    table = TABLE | {
        "method": "distill",
        "synthetic": {"sites": 5, "sentences": 30},
        "training": {
            "rounds": 1,
            "unannotated": "pseudo",
            "weighting": True,
            "sites_per_round": 2,
        },
    }
    with pytest.raises(RefusedError, match="need 3 sites, but there are 2"):
        prepare(parse_job(table, "job", Path(), "job.toml"))


def test_noisy_counts_after_training_are_refused() -> None:
    privacy = {"noise": 1.0, "unit": "document", "counts": 4.0}
    with pytest.raises(ConfigError, match="a site does not know which round is its"):
        job_of(privacy=privacy, training={"exchange": "gradients"})


@pytest.mark.slow
def test_a_secure_sum_of_drawn_sites_trains_the_same_model(tmp_path: Path) -> None:
    """Up to the rounding of the secure sum."""
    pytest.importorskip("cryptography")
    from safetensors.torch import load_file

    models = []
    for name, federation in (("plain", {}), ("secure", {"secure_sum": True})):
        simulate(job_of(3, federation=federation), tmp_path / name)
        files = sorted((tmp_path / name).rglob("*.safetensors"))
        assert files
        models.append([load_file(path) for path in files])
    for plain, secure in zip(*models, strict=True):
        for key, value in plain.items():
            torch.testing.assert_close(secure[key], value, rtol=1e-4, atol=1e-5)
