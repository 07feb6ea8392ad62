"""Rounds on sampled sites between real sites, and the rules that bound the sampling."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import Guarded
from hospital_jobs import FEDNER, PRIVATE
from hospitals import OPEN, Hospitals, simulated
from kits import site_kit

from fednotes.apps.deployment.approval_requests import find_refusal
from fednotes.apps.deployment.rules.guard import Budget, RequestedJob, SiteGuard
from fednotes.apps.deployment.rules.ledger import Ledger, read_ledger_lines
from fednotes.apps.deployment.rules.policy import Policy, PolicyRefusal
from fednotes.apps.deployment.server import SAMPLING_KEY_FILE
from fednotes.core.errors import ConfigError
from fednotes.core.messages import decode_request
from fednotes.core.seeds import Draws
from fednotes.core.tables import fingerprint_table
from fednotes.core.update import Update
from fednotes.data.synthetic import generate, write_sites
from fednotes.engines.sampling import RoundSampling
from fednotes.jobs.declaration import load_declared
from fednotes.jobs.job_file import parse_job
from fednotes.privacy.promise import Privacy, Promise

SEED = 3  # of the jobs of `hospital_jobs`
DRAWN = FEDNER.replace("[training]", "[training]\nsites_per_round = 2")


def with_seed_as_secret(hospitals: Hospitals) -> None:
    """Let the server draw the sites that a simulation draws from the job's seed."""
    state = hospitals.setups[""].state
    state.mkdir(parents=True, exist_ok=True)
    (state / SAMPLING_KEY_FILE).write_bytes(SEED.to_bytes(32, "big"))


def four_sites(folder: Path) -> dict[str, dict[str, str]]:
    """Write generated notes of four sites; return their tables."""
    sites = generate(num_sites=4, sentences_per_site=30, seed=1)
    write_sites(sites, folder, "conll")
    return {
        site.data.id: {
            part: str(folder / site.data.id / f"{part}.conll")
            for part in ("train", "valid", "test")
        }
        for site in sites
    }


def for_sites(job: str, data: Any) -> str:
    """Return a job of `hospital_jobs` for other sites."""
    head, _, _ = job.partition("[sites.")
    return head + "".join(f"[sites.{name}]\n" for name in data)


def trained_by_round(hospitals: Hospitals) -> dict[int, set[str]]:
    """Return the sites that answered a training task, by round."""
    rounds: dict[int, set[str]] = {}
    for name in hospitals.names:
        for line in read_ledger_lines(Ledger.in_kit(hospitals.setups[name].kit).path):
            if line["task"] in ("gradients", "noisy_gradients") and not line["refusal"]:
                rounds.setdefault(line["round"], set()).add(name)
    return rounds


# ---- runs ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_deployed_run_equals_its_simulation(site_notes: Any, tmp_path: Path) -> None:
    """With the job's seed as the server's secret, and draws of the job at the sites."""
    expected = simulated(DRAWN, site_notes, tmp_path / "simulation")
    hospitals = Hospitals(tmp_path, DRAWN, site_notes)
    with_seed_as_secret(hospitals)
    hospitals.run()
    assert hospitals.ends() == expected
    sampling = RoundSampling(2, Draws(SEED), frozenset())
    rounds = trained_by_round(hospitals)
    assert len(rounds) > 3
    for round, sites in rounds.items():
        assert sites == set(sampling.draw_sites(round, hospitals.names))
    lines = hospitals.lines("round")
    evaluated = [line for line in lines if line["evaluated"]]
    assert evaluated
    assert sum(sum(line["drawn"].values()) for line in evaluated) == 2 * len(rounds)
    assert all("absent" not in line for line in evaluated)
    assert {line["took_part"] for line in lines} == {2}


@pytest.mark.slow
def test_the_secret_of_the_server_is_saved_with_its_state_and_differs_between_runs(
    site_notes: Any, tmp_path: Path
) -> None:
    """A run that is killed resumes with the same draws; nobody else learns the secret."""
    secrets, draws = set(), []
    for run in ("run1", "run2"):
        hospitals = Hospitals(tmp_path / run, DRAWN, site_notes, run=run)
        hospitals.network.kill = ("server", 25)
        hospitals.run()
        assert hospitals.network.kill[0] == ""  # it was
        key_file = hospitals.setups[""].state / SAMPLING_KEY_FILE
        secret = key_file.read_bytes()
        secrets.add(secret)
        assert key_file.stat().st_mode & 0o077 == 0
        sent = b"".join(hospitals.network.frames)
        assert secret not in sent
        assert secret.hex().encode() not in sent
        sampling = RoundSampling(2, Draws.of_secret(secret), frozenset())
        rounds = trained_by_round(hospitals)
        for round, sites in rounds.items():
            assert sites == set(sampling.draw_sites(round, hospitals.names))
        draws.append(rounds)
    assert len(secrets) == 2
    assert draws[0] != draws[1]


@pytest.mark.slow
def test_a_secure_sum_covers_the_sampled_sites(tmp_path: Path) -> None:
    """Three of four; the bits are those of the simulation under the secure sum."""
    pytest.importorskip("cryptography")
    data = four_sites(tmp_path / "notes")
    job = DRAWN.replace("sites_per_round = 2", "sites_per_round = 3")
    job = for_sites(
        job.replace("[federation]", "[federation]\nsecure_sum = true"), data
    )
    expected = simulated(job, data, tmp_path / "simulation")
    policy = OPEN.replace("'off'", "'required'").replace(
        "min_sites = 2", "min_sites = 3"
    )
    hospitals = Hospitals(tmp_path, job, data, policy=policy)
    with_seed_as_secret(hospitals)
    hospitals.run()
    assert hospitals.ends() == expected
    sampling = RoundSampling(3, Draws(SEED), frozenset())
    for frame in hospitals.network.frames[::2]:
        request = decode_request(frame)
        if request.task == "gradients":
            drawn = sampling.draw_sites(request.round, hospitals.names)
            assert tuple(n for n in hospitals.names if n in request.counted) == drawn


# ---- the policy ----------------------------------------------------------------------


@pytest.mark.parametrize("min_sites", [3, 4])
def test_a_site_refuses_a_job_that_samples_fewer_sites_than_it_demands(
    min_sites: int, site_notes: Any, tmp_path: Path
) -> None:
    """The job has three sites, but a sum is over two of them. Nothing is sent."""
    policy = OPEN.replace("min_sites = 2", f"min_sites = {min_sites}")
    hospitals = Hospitals(tmp_path, DRAWN, site_notes, policy=policy)
    assert "refused by min_sites of this site's policy" in hospitals.refusal()
    for name in hospitals.names:
        assert not Ledger.in_kit(hospitals.setups[name].kit).path.exists()


def test_approval_warns_if_a_job_samples_fewer_sites_than_the_policy_demands(
    site_notes: Any, tmp_path: Path
) -> None:
    """The person sees it before the approval, and the site would not join."""
    policy = OPEN.replace("min_sites = 2", "min_sites = 3")
    hospitals = Hospitals(tmp_path, DRAWN, site_notes, policy=policy, approve=False)
    kit = site_kit(hospitals.setups["posts"].kit)
    job = RequestedJob(fingerprint_table(hospitals.table), hospitals.table)
    refusal = find_refusal(kit, job)
    assert "the sum would be over 2 sites; this site allows 3 sites or more" in refusal
    hospitals.change("posts", "min_sites = 3", "min_sites = 2")
    assert find_refusal(kit, job) == ""


def test_a_submission_needs_as_many_sampled_sites_as_the_secure_sum(
    tmp_path: Path,
) -> None:
    """Between real sites the secure sum is on by default."""
    path = tmp_path / "job.toml"
    path.write_text(DRAWN)
    with pytest.raises(ConfigError, match="on by default between real sites"):
        load_declared(path)
    plain = DRAWN.replace("[federation]", "[federation]\nsecure_sum = false")
    path.write_text(plain)
    assert load_declared(path).job.config.sites_per_round == 2
    path.write_text(plain.replace("[federation]", "[federation]\nmin_sites = 3"))
    with pytest.raises(ConfigError, match="min_sites = 3 sites must answer"):
        load_declared(path)


class Drawn(Guarded):
    """A site of a job of four sites, of which three are drawn for a round."""

    def restart(self) -> None:
        super().restart()
        self.guard = SiteGuard(
            self.kit,
            self.site,
            self.run,
            self.table,
            lambda: self.policy,
            secure=True,
            threshold=3,
            drawn=3,
        )
        self.host._guard = self.guard
        self.guard.count_covered = lambda task: self.covered


def test_a_request_with_another_number_of_sites_is_refused(
    tmp_path: Path,
) -> None:
    """A server that names fewer sites in a request than the approved job draws."""
    policy = Policy(min_sites=2, share_scores=True, secure_sum="off")
    site = Drawn(tmp_path, policy, [Update({"w": torch.ones(2)}, 1)])
    two = {"b": 0, "c": 0}
    refusal = site.ask("train", 1, two).refusal
    assert "over 2 sites, but the approved job draws 3 of 4 sites" in refusal
    site.policy = Policy(min_sites=3, share_scores=True, secure_sum="off")
    assert "refused by the site's policy" in site.messages[-1] or site.ask(
        "train", 2, two
    ).refusal.startswith("refused by min_sites")
    # Sites of other jobs do not count.
    padded = {"b": 0, "c": 0, "x": 0}
    assert "min_sites" in site.ask("train", 3, padded).refusal
    assert all(line["refusal"] for line in site.ledger)
    assert site.ask("train", 4, {"a": 0, "b": 0, "c": 0}).refusal == ""
    assert site.ask("evaluate", 5, {"a": 0, "b": 4, "c": 0, "d": 0}).refusal == ""


def test_an_equal_answer_in_a_sum_over_other_sites_counts_as_a_round(
    tmp_path: Path,
) -> None:
    """Nothing is drawn at the site, so its answers are equal. From the sums over all
    lists of three sites, a server computes each site's answer."""
    update = Update({"w": torch.ones(2)}, 1)
    policy = Policy(min_sites=3, secure_sum="required", max_rounds=1)
    site = Drawn(tmp_path, policy, [update])
    first, second = (dict.fromkeys(sites, 0) for sites in ("abc", "bcd"))
    assert site.ask("train", 1, first).refusal == ""
    site.restart()
    assert site.ask("train", 2, first).refusal == ""
    assert "refused by max_rounds" in site.ask("train", 3, second).refusal
    in_another_run = site.in_another_run("run2", [update])
    assert "refused by max_rounds" in in_another_run.ask("train", 1, second).refusal
    assert "refused by max_rounds" in in_another_run.ask("train", 2, first).refusal


# ---- differential privacy ------------------------------------------------------------

PROMISE = Promise.of(Privacy(noise=1.0, rate=0.1, where="site"), rounds=8, sites=3)


def test_a_site_budgets_for_every_round_and_spends_only_for_answered_ones(
    tmp_path: Path,
) -> None:
    """A site of a job of eight rounds takes part in three. It joins only if its budget
    covers all eight, because it might be drawn for each; the ledger has the ε of three
    rounds, without any amplification by the draw of sites."""
    kit = tmp_path / "kit"
    budget = Budget(kit / "rules" / "privacy.json", "job", PROMISE)
    worst = PROMISE.compute_epsilon()
    with pytest.raises(PolicyRefusal, match="ε of all jobs"):
        budget.require_enough(Policy(max_epsilon=0.99 * worst))
    policy = Policy(max_epsilon=worst)
    budget.require_enough(policy)
    for number in range(3):
        spent = budget.spend(f"answer {number}", policy)
        assert spent is not None
        assert spent.epsilon == PROMISE.compute_epsilon(number + 1)
    assert spent.epsilon < worst
    # The rest is left for another job, once this one is over.
    other = Budget(kit / "rules" / "privacy.json", "other", PROMISE)
    with pytest.raises(PolicyRefusal):
        other.require_enough(policy)
    other.require_enough(Policy(max_epsilon=worst + PROMISE.compute_epsilon(3)))


@pytest.mark.slow
def test_a_private_run_records_the_rounds_of_each_site(tmp_path: Path) -> None:
    """Each site's record has as many answers as rounds for which it was drawn, and their
    ε; the noise is that of a job of as many sites as are drawn."""
    pytest.importorskip("dp_accounting")
    pytest.importorskip("cryptography")
    data = four_sites(tmp_path / "notes")
    job = for_sites(PRIVATE, data).replace(
        "[training]", "[training]\nsites_per_round = 3"
    )
    policy = OPEN.replace("'off'", "'required'").replace(
        "min_sites = 2", "min_sites = 3"
    )
    hospitals = Hospitals(tmp_path, job, data, policy=policy + "max_epsilon = 8.0\n")
    hospitals.run()
    rounds = trained_by_round(hospitals)
    declared = hospitals.declared["job"]
    table = {**declared, "sites": data, "conditions": ["federated"]}
    parsed = parse_job(table, "job", tmp_path, "job.toml")
    promise = parsed.module.make_promise(replace(parsed.config, sites=4))
    assert promise is not None
    assert promise.shares == 2  # three sites of a round, without the colluding one
    assert len(rounds) == promise.rounds
    numbers = []
    for name in hospitals.names:
        answered = sum(name in sites for sites in rounds.values())
        numbers.append(answered)
        record = json.loads(
            (hospitals.setups[name].kit / "rules" / "privacy.json").read_text()
        )
        (spent,) = record.values()
        assert len(spent["answers"]) == answered
        assert spent["epsilon"] == pytest.approx(
            promise.compute_epsilon(max(1, answered))
        )
    assert sum(numbers) == 3 * promise.rounds
    assert min(numbers) < promise.rounds
