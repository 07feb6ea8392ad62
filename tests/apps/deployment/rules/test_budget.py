"""Test a site's budget of ε over all jobs.

ε is spent before an answer leaves, once for each different answer.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import TABLE, Guarded

from fednotes.apps.deployment.rules.guard import (
    Budget,
    SiteGuard,
    Withheld,
    read_spending,
)
from fednotes.apps.deployment.rules.policy import Policy, PolicyRefusal
from fednotes.core.errors import ConfigError
from fednotes.core.messages import encode_message
from fednotes.core.update import Update
from fednotes.privacy.promise import COUNTS, Privacy, Promise

ANY = Policy(min_sites=1, share_scores=True, secure_sum="off")
PROMISE = Promise.of(Privacy(noise=1.0, rate=0.1, where="site"), 3, 4)


def answers(number: int) -> list[Update]:
    """Return different updates of two numbers."""
    return [Update({"w": torch.tensor([7, n])}) for n in range(number)]


class Spender(Guarded):
    """A guarded site whose job guarantees privacy."""

    promise: Promise | None = PROMISE

    def restart(self) -> None:
        super().restart()
        options: Any = {"secure": self.secure, "threshold": self.threshold}
        table = (self.kit, self.site, self.run, self.table)
        self.guard = SiteGuard(
            *table, lambda: self.policy, promise=self.promise, **options
        )
        self.host._guard = self.guard
        self.guard.count_covered = lambda task: self.covered

    @property
    def spent(self) -> dict[str, Any]:
        path = self.kit / "rules" / "privacy.json"
        return json.loads(path.read_text()) if path.exists() else {}


def test_each_different_answer_spends_epsilon_and_one_too_many_is_refused(
    tmp_path: Path,
) -> None:
    site = Spender(tmp_path, ANY, answers(5))
    last_number = 0
    for number in (1, 2, 3):
        assert site.ask("train", number, last_number).refusal == ""
        last_number = number
        ((spending,),) = [[*site.spent.values()]]
        assert len(spending["answers"]) == number
        assert spending["epsilon"] == pytest.approx(PROMISE.compute_epsilon(number))
        assert spending["delta"] == 1e-5
    assert "refused by max_epsilon" in site.ask("train", 4, 3).refusal
    assert "covers at most 3 answers" in site.messages[-1]
    assert len(next(iter(site.spent.values()))["answers"]) == 3
    site.restart()  # a killed process forgets nothing
    assert "refused by max_epsilon" in site.ask("train", 5, 3).refusal


def test_an_answer_sent_again_costs_nothing_but_a_recomputed_one_does(
    tmp_path: Path,
) -> None:
    site = Spender(tmp_path, ANY, answers(5))
    first_reply = site.ask("train", 1, 0)
    before = site.spent
    site.restart()
    assert encode_message(site.ask("train", 1, 0)) == encode_message(first_reply)
    assert site.spent == before
    # The server calls it undone, and asks for the same round: the next update is
    # another one.
    site.updates.insert(0, Update({"w": torch.tensor([0, 0])}))
    site.restart()
    assert site.ask("train", 2, 0).refusal == ""
    assert len(next(iter(site.spent.values()))["answers"]) == 2


def test_a_message_without_numbers_costs_no_epsilon(tmp_path: Path) -> None:
    site = Spender(tmp_path, ANY, [Update()])
    assert site.ask("evaluate", 1).refusal == ""
    assert site.spent == {}


def test_the_epsilon_of_several_jobs_adds_up(tmp_path: Path) -> None:
    full_epsilon = PROMISE.compute_epsilon()
    budget = full_epsilon + PROMISE.compute_epsilon(1) + 1e-6
    first = Spender(tmp_path, replace(ANY, max_epsilon=budget), answers(3))
    for number in (1, 2, 3):
        assert first.ask("train", number, number - 1).refusal == ""
    second = Spender(
        tmp_path,
        first.policy,
        answers(3),
        run="run2",
        table={**TABLE, "name": "another"},
    )
    with pytest.raises(
        PolicyRefusal, match=r"ε of all jobs at this site would be .*max_epsilon"
    ):
        second.guard.check_job("fedner", 4, 3)
    assert second.ask("train", 1, 0).refusal == ""  # the first round is within it
    expected = sum(job["epsilon"] for job in second.spent.values())
    assert expected == pytest.approx(full_epsilon + PROMISE.compute_epsilon(1))
    assert "refused by max_epsilon" in second.ask("train", 2, 1).refusal
    assert sum(job["epsilon"] for job in second.spent.values()) == pytest.approx(
        expected
    )
    second.policy = replace(ANY, max_epsilon=full_epsilon * 2.1)
    second.guard.check_job("fedner", 4, 3)
    assert second.ask("train", 3, 1).refusal == ""


def test_the_delta_of_several_jobs_adds_up(tmp_path: Path) -> None:
    """A job could guarantee a small ε at a large δ, and so with little noise."""
    path = tmp_path / "privacy.json"
    policy = replace(ANY, max_delta=2e-5)
    budgets = [Budget(path, job, PROMISE) for job in "abc"]
    for budget in budgets[:2]:
        budget.require_enough(policy)
        budget.spend("1" * 64, policy)
        budget.spend("2" * 64, policy)  # the δ of a job is that of all its answers
    refused = pytest.raises(
        PolicyRefusal, match=r"δ of all jobs at this site would be 3e-05.*max_delta"
    )
    with refused:
        budgets[2].require_enough(policy)
    with refused:
        budgets[2].spend("1" * 64, policy)
    assert read_spending(path).keys() == {"a", "b"}
    large = Promise.of(Privacy(noise=1.0, delta=0.01, where="site"), 3, 4)
    with pytest.raises(PolicyRefusal, match=r"would be 0\.01;"):
        Budget(tmp_path / "other.json", "d", large).require_enough(policy)
    with pytest.raises(PolicyRefusal, match="the job guarantees no δ"):
        Budget(path, "e", None).require_enough(policy)


def test_a_budget_may_be_used_up_but_not_exceeded(tmp_path: Path) -> None:
    """Three jobs cost three times the ε of one, whatever the last bit of the sum.

    A budget that is smaller by a thousandth is too small.
    """
    full_epsilon = PROMISE.compute_epsilon()
    enough, less = (
        replace(ANY, max_epsilon=3 * full_epsilon * part) for part in (1.0, 0.999)
    )
    path = tmp_path / "privacy.json"
    budgets = [Budget(path, job, PROMISE) for job in "abc"]
    for budget in budgets:
        budget.require_enough(enough)
        for answer in ("1" * 64, "2" * 64):
            budget.spend(answer, enough)
    for budget in budgets[:2]:
        budget.spend("3" * 64, less)
    for refused in (
        lambda: budgets[2].require_enough(less),
        lambda: budgets[2].spend("3" * 64, less),
    ):
        with pytest.raises(PolicyRefusal, match="ε of all jobs at this site would be"):
            refused()
    budgets[2].spend("3" * 64, enough)
    assert sum(job.epsilon for job in read_spending(path).values()) == pytest.approx(
        3 * full_epsilon
    )


def test_a_job_without_a_guarantee_exceeds_any_budget(tmp_path: Path) -> None:
    class Other(Spender):
        promise = None

    site = Other(tmp_path, replace(ANY, max_epsilon=100.0), answers(2))
    with pytest.raises(PolicyRefusal, match=r"the job guarantees no ε"):
        site.guard.check_job("fedner", 4, 3)
    assert "refused by max_epsilon" in site.ask("train", 1, 0).refusal
    site.policy = ANY
    assert site.ask("train", 2, 0).refusal == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"a": {"epsilon": "x"}}',
        '{"a": {"epsilon": -9}}',
        '{"a": {"b": 1}}',
    ],
)
def test_nothing_leaves_while_the_file_is_damaged(tmp_path: Path, text: str) -> None:
    site = Spender(tmp_path, ANY, answers(2))
    assert site.ask("train", 1, 0).refusal == ""
    path = tmp_path / "rules" / "privacy.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        read_spending(path)
    site.policy = replace(ANY, max_epsilon=50.0)
    with pytest.raises(Withheld):
        site.guard.check_job("fedner", 4, 3)
    assert site.ask("train", 2, 1).refusal == "site 'b' cannot read its own file"
    assert path.read_text() == text


def test_a_deleted_file_does_not_renew_the_budget(tmp_path: Path) -> None:
    """The ledger completes an earlier copy of the file that was put back.

    Without any file, no job's answer leaves.
    """
    site = Spender(tmp_path, ANY, answers(5))
    path, last_number = tmp_path / "rules" / "privacy.json", 0
    copies = []
    for number in (1, 2):
        assert site.ask("noisy_gradients", number, last_number).refusal == ""
        copies.append(path.read_text())
        last_number = number
    path.write_text(copies[0])
    assert site.ask("noisy_gradients", 3, 2).refusal == ""
    assert len(next(iter(site.spent.values()))["answers"]) == 3
    assert "refused by max_epsilon" in site.ask("noisy_gradients", 4, 3).refusal
    path.unlink()
    assert (
        site.ask("noisy_gradients", 5, 3).refusal == "site 'b' cannot read its own file"
    )
    again: Any = {"run": "run2", "table": {**TABLE, "name": "another"}}
    second = Spender(tmp_path, replace(ANY, max_epsilon=50.0), answers(3), **again)
    with pytest.raises(Withheld, match="deleted, so the ε that was spent is unknown"):
        second.guard.check_job("fedner", 4, 3)
    assert not path.exists()


def test_an_older_copy_frees_no_epsilon_after_a_new_approval(tmp_path: Path) -> None:
    """The ledger holds the answers of this job and of others.

    An older copy of the file therefore frees no ε of either.
    """
    limit = PROMISE.compute_epsilon(3) + PROMISE.compute_epsilon(2) + 1e-6
    rules = replace(ANY, max_epsilon=limit)
    path = tmp_path / "rules" / "privacy.json"
    again: Any = {"run": "run2", "table": {**TABLE, "name": "another"}}
    second = Spender(tmp_path, rules, answers(3), **again)
    for number in (1, 2, 3):
        assert second.ask("noisy_gradients", number, number - 1).refusal == ""
    before = second.spent
    site = Spender(tmp_path, rules, answers(9))
    assert site.ask("noisy_gradients", 1, 0).refusal == ""
    copy = path.read_text()
    assert site.ask("noisy_gradients", 2, 1).refusal == ""
    spent = site.spent
    for text in (copy, "{}"):
        path.write_text(text)
        site.approve()
        site.restart()
        with pytest.raises(PolicyRefusal, match="ε of all jobs at this site"):
            site.guard.check_job("fedner", 4, 3)
        refusal = site.ask("noisy_gradients", 9, 2).refusal
        assert "refused by max_epsilon" in refusal
    site.policy = replace(ANY, max_epsilon=2 * limit)
    assert site.ask("noisy_gradients", 10, 2).refusal == ""
    for key, job in before.items():
        assert site.spent[key]["epsilon"] == job["epsilon"]
    (first_run,) = spent.keys() - before.keys()
    assert len(site.spent[first_run]["answers"]) == 3
    assert site.spent[first_run]["epsilon"] == pytest.approx(PROMISE.compute_epsilon(3))


def test_lines_of_the_ledger_record_the_spent_epsilon(tmp_path: Path) -> None:
    site = Spender(tmp_path, ANY, answers(2))
    for number in (1, 2):
        assert site.ask("noisy_gradients", number, number - 1).refusal == ""
    assert [line["spent"] for line in site.ledger] == [
        {"epsilon": PROMISE.compute_epsilon(number), "delta": 1e-5} for number in (1, 2)
    ]
    without_promise = Guarded(tmp_path / "other", ANY, answers(1))
    assert without_promise.ask("train", 1, 0).refusal == ""
    assert all("spent" not in line for line in without_promise.ledger)


@pytest.mark.parametrize(
    ("unit", "fits"),
    [
        ("patient", "patient document sentence"),
        ("document", "document sentence"),
        ("sentence", "sentence"),
    ],
)
def test_a_site_chooses_the_smallest_unit_of_epsilon(
    tmp_path: Path, unit: Any, fits: str
) -> None:
    """ε of a sentence does not protect a patient, who has many."""
    promise = Promise.of(Privacy(noise=1.0, rate=0.1, where="site", unit=unit), 3, 4)
    budget = Budget(tmp_path / "privacy.json", "a", promise)
    for least in ("patient", "document", "sentence"):
        policy = replace(ANY, epsilon_unit=least)
        if least in fits.split():
            budget.require_enough(policy)
        else:
            with pytest.raises(
                PolicyRefusal, match=f"each {unit}; this site allows each {least}"
            ):
                budget.require_enough(policy)


def test_noisy_counts_leave_a_site_once(tmp_path: Path) -> None:
    """A job with counts may send them once, beside its rounds.

    The same answer may leave again. A job without counts may send none.
    """
    path = tmp_path / "privacy.json"
    with_counts = replace(PROMISE, privacy=replace(PROMISE.privacy, counts=4.0))
    counting, without_counts = (
        Budget(path, "a", with_counts),
        Budget(path, "b", PROMISE),
    )
    first = Budget(path, "c", with_counts)  # of a method that begins with its counts
    first.spend("1" * 64, ANY, task=COUNTS)
    assert (
        read_spending(path)["c"].epsilon
        == with_counts.compute_epsilon(1)
        > PROMISE.compute_epsilon(1)
    )
    counting.spend("1" * 64, ANY)
    counting.spend("2" * 64, ANY, task=COUNTS)
    counting.spend("2" * 64, ANY, task=COUNTS)
    with pytest.raises(PolicyRefusal, match=r"at most 1 answers .* would be number 2"):
        counting.spend("3" * 64, ANY, task=COUNTS)
    counting.spend("3" * 64, ANY)
    with pytest.raises(PolicyRefusal, match="covers at most 0 answers"):
        without_counts.spend("2" * 64, ANY, task=COUNTS)
    spent = read_spending(path)["a"]
    assert (len(spent.answers), len(spent.counts)) == (2, 1)
    assert spent.epsilon == with_counts.compute_epsilon(2) > PROMISE.compute_epsilon(2)


def test_two_processes_share_one_budget_file(tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    first, second = Budget(path, "a", PROMISE), Budget(path, "b", PROMISE)
    first.spend("1" * 64, ANY)
    second.spend("1" * 64, ANY)
    first.spend("2" * 64, ANY)
    assert {
        key: len(spending.answers) for key, spending in read_spending(path).items()
    } == {
        "a": 2,
        "b": 1,
    }
    assert path.stat().st_mode & 0o077 == 0
