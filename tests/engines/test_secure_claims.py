"""False claims of a site cannot exclude others from a secure sum or stop the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fault_net import Patience
from fault_toy import JOB
from secure_net import SITES, network, random_updates

from fednotes.core.errors import TrainingError
from fednotes.core.messages import Attached, Request, to_json_values
from fednotes.core.update import Update
from fednotes.engines.deployed import Deployed
from fednotes.engines.history import OPENED, OpenedSums, OpeningRecord
from fednotes.engines.secure import SecureSeal, SecureSum

SURVIVORS = "fednotes.engines.history.OpenedSums.find_survivors"
LOOSE = Patience(min_sites=3, timeout=10, knock=1, knock_every=0, pause=1, give_up=30)


def _claiming(claims: dict[str, Sequence[str]]) -> mock._patch[object]:
    """Let sites claim that the present sum was opened before, over sites of their
    choice."""

    def survivors(self: OpenedSums, question: bytes) -> tuple[str, ...]:
        return tuple(claims.get(self._site, ()))

    return mock.patch(SURVIVORS, survivors)


def _federation(
    folder: Path, updates: dict[str, list[Update]]
) -> tuple[Deployed, list[str]]:
    """Return an engine over four sites, any three of which open a sum, and what it
    reports."""
    net, *_ = network(folder, updates, threshold=3)
    events: list[str] = []
    engine = net.engine(
        SITES,
        LOOSE,
        summing=SecureSum(SITES, job=JOB, threshold=3, record=folder / OPENED),
        notify=lambda event: events.append(event.text),
    )
    return engine, events


@pytest.mark.parametrize("claim", ["bcd", "d", "cd", "abd"])
def test_a_site_is_left_out_for_a_claim_that_others_do_not_confirm(
    claim: str, tmp_path: Path
) -> None:
    """Three of four sites open a sum. Whoever really opened one would say so."""
    updates = random_updates(seed=1)
    engine, events = _federation(tmp_path, updates)
    with _claiming({"d": claim}):
        total = engine.sum("give")

    assert total.included == ("a", "b", "c")
    blamed = [
        text for text in events if "reports that a sum of this task was opened" in text
    ]
    assert blamed
    assert all("site 'd'" in text for text in blamed)
    assert not [text for text in events if "site 'a' was not in the sum" in text]


def test_a_sum_that_was_opened_before_is_opened_for_the_same_sites(
    tmp_path: Path,
) -> None:
    """b, c and d opened one; a, which was away, is left out of its repetition."""
    updates = random_updates(seed=1)
    (tmp_path / OPENED).write_text('{"sum":"-1 give","sites":["b","c","d"]}\n')
    engine, events = _federation(tmp_path, updates)
    with _claiming(dict.fromkeys("bcd", "bcd")):
        total = engine.sum("give")

    assert total.included == ("b", "c", "d")
    assert any(
        "site 'a' was not in the sum of this task before" in text for text in events
    )


def test_a_claim_is_accepted_only_if_the_record_of_the_server_agrees(
    tmp_path: Path,
) -> None:
    """With c away, a's word for a sum over a and c must not cost b its place."""
    sites, updates = SITES[:3], random_updates(seed=1)
    net, *_ = network(tmp_path, {site: updates[site] for site in sites}, threshold=2)
    events: list[str] = []
    engine = net.engine(
        sites,
        replace(LOOSE, min_sites=2),
        summing=SecureSum(sites, job=JOB, threshold=2),
        notify=lambda event: events.append(event.text),
    )
    net.down = {"c"}
    with _claiming({"a": "ac"}), pytest.raises(TrainingError, match="site 'a' reports"):
        engine.sum("give")
    assert not [text for text in events if "site 'b' was not in the sum" in text]


def test_a_record_survives_a_restart_and_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / OPENED
    request = Request(JOB, 0, 1, "train", round=3)
    record = OpeningRecord(path)
    record.add(request, ["a", "b"])
    record.add(request, ["b", "a"])  # the same list, which takes no second line
    with path.open("a") as file:
        file.write('{"sum":"3 tra')  # a kill in the middle of a line
    OpeningRecord(path).add(request, ["a", "c"])

    again = OpeningRecord(path)

    assert again.has(request, {"a", "b"})
    assert again.has(request, {"a", "c"})
    assert not again.has(request, {"b", "c"})
    assert not again.has(replace(request, round=4), {"a", "b"})
    assert path.read_text().count('"3 train"') == 2


@pytest.mark.parametrize(
    "name", ["@time x", "@time 99", "@time ", "@times", "@", "@other"]
)
def test_a_site_with_an_impossible_count_name_is_left_out_of_the_sum(
    name: str, tmp_path: Path
) -> None:
    updates = random_updates(seed=1)
    updates["d"] = [
        Update(update.tensors, update.weight, {**update.metrics, name: 1.0})
        for update in updates["d"]
    ]
    engine, events = _federation(tmp_path, updates)

    total = engine.sum("give")

    assert total.included == ("a", "b", "c")
    assert any("site 'd' sent a count" in e and "name" in e for e in events)


@pytest.mark.parametrize(
    "names",
    [
        [f"{number}" for number in range(10_037)],
        [f"{number:01000}" for number in range(600)],
    ],
    ids=["many", "long"],
)
def test_a_site_with_too_many_counts_is_refused(
    names: list[str], tmp_path: Path
) -> None:
    """Names of all sites are agreed on and sent to each, so one site must not fill the
    message."""
    engine, events = _federation(tmp_path, random_updates(seed=1))

    with _answers({"d": {"names": names, "again": "other counts", "message": None}}):
        total = engine.sum("give")

    assert total.included == ("a", "b", "c")
    assert not set(names) & total.metrics.keys()
    assert any("site 'd' sent more than 10,036 counts" in text for text in events)


@pytest.mark.parametrize(
    "claim",
    [
        {"again": "x" * 2001, "wide": False},
        {"before": ["a", "b", "x" * 2000]},
    ],
    ids=["reason", "sites"],
)
def test_a_site_with_an_oversized_claim_is_refused(
    claim: dict[str, Any], tmp_path: Path
) -> None:
    """People at the server read the reason, and the names of sites."""
    engine, events = _federation(tmp_path, random_updates(seed=1))

    with _answers({"d": {**claim, "message": None}}):
        total = engine.sum("give")

    assert total.included == ("a", "b", "c")
    assert not any("xxx" in text for text in events)
    assert any("site 'd' sent names of unknown sites or too long" in e for e in events)


def _answers(facts: dict[str, dict[str, Any]]) -> mock._patch[object]:
    """Let sites replace facts of their answers to a task; without a message there are
    no words."""
    sealed = SecureSeal._mask

    def claimed(self: SecureSeal, *arguments: Any) -> Attached:
        answer = sealed(self, *arguments)
        changed = facts.get(self._site)
        if changed is None:
            return answer
        changed_facts = {**answer.facts, **changed}
        return Attached(
            changed_facts, answer.tensors if changed_facts["message"] else {}
        )

    return mock.patch.object(SecureSeal, "_mask", claimed)


def _reports(histories: dict[str, bytes]) -> mock._patch[object]:
    """Let sites report another history than theirs after each sum."""
    return _answers(
        {
            site: {"history": to_json_values(history)}
            for site, history in histories.items()
        }
    )


@pytest.mark.parametrize("liar", SITES)
def test_one_site_cannot_choose_the_history_of_all(liar: str, tmp_path: Path) -> None:
    """Sites that lost their disks take on the history that the server passes on."""
    updates = random_updates(seed=1)
    honest, *_ = network(tmp_path / "honest", updates, threshold=4)
    server = SecureSum(SITES, job=JOB, threshold=4)
    honest.engine(SITES, summing=server).sum("give")
    lying, *_ = network(tmp_path / "lying", updates, threshold=4)
    deceived = SecureSum(SITES, job=JOB, threshold=4)

    with _reports({liar: b"\1" * 32}):
        lying.engine(SITES, summing=deceived).sum("give")

    assert server.state()["history"]
    assert deceived.state()["history"] == server.state()["history"]


def test_a_history_without_a_majority_does_not_replace_the_earlier_one(
    tmp_path: Path,
) -> None:
    updates = random_updates(seed=1)
    net, *_ = network(tmp_path, updates, threshold=4)
    server = SecureSum(SITES, job=JOB, threshold=4)
    engine = net.engine(SITES, summing=server)
    engine.sum("give")
    earlier = server.state()["history"]

    with _reports({site: site.encode() * 32 for site in SITES}):
        engine.sum("give")

    assert earlier
    assert server.state()["history"] == earlier
