"""The parts of a run and the estimate of its traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import TAGGER

from fednotes.jobs.job_file import parse_job
from fednotes.jobs.parts import Part, Traffic, estimate_traffic, prepare


def prepared(**tables: Any) -> tuple[Traffic | None, list[Part]]:
    """Return the traffic and the parts of a FedNER job on three generated sites."""
    table = {
        "method": "fedner",
        "synthetic": {"sites": 3, "sentences": 30},
        "model": TAGGER,
        **tables,
    }
    job = parse_job(table, "j", Path(), "j.toml")
    sites, config, parts = prepare(job)
    return estimate_traffic(job, config, sites.data), parts


def traffic(**tables: Any) -> Traffic:
    estimated, _ = prepared(**tables)
    assert estimated is not None
    return estimated


SECURE = {"secure_sum": True}
CLASSIFIER = {
    "method": "finetune",
    "model": {"kind": "token-classifier", "train": "lora", "rank": 2},
}


def test_a_secure_sum_doubles_what_a_site_sends() -> None:
    plain = traffic()
    secure = traffic(federation=SECURE)
    assert secure.up == 2 * plain.up
    assert (secure.down, secure.rounds) == (plain.down, plain.rounds)


def test_a_secure_sum_does_not_enlarge_packed_updates() -> None:
    for compression, factor in (("packed", 1), ("none", 2)):
        training = {"compression": compression}
        plain = traffic(**CLASSIFIER, training=training)
        secure = traffic(**CLASSIFIER, training=training, federation=SECURE)
        assert secure.up == factor * plain.up


def test_a_secure_sum_does_not_enlarge_updates_with_noise() -> None:
    privacy = {"epsilon": 8.0, "where": "site"}
    plain = traffic(privacy=privacy)
    assert traffic(privacy=privacy, federation=SECURE) == plain


def test_a_job_without_a_federated_part_has_no_traffic() -> None:
    estimated, parts = prepared(conditions=["alone"])
    assert estimated is None
    assert {part.condition for part in parts} == {"alone"}
    assert [part.name for part in parts] == [f"alone/{part.site}" for part in parts]


@pytest.mark.parametrize("privacy", [None, {"epsilon": 8.0, "where": "site"}])
def test_parts_have_the_differential_privacy_of_the_job(
    privacy: dict[str, Any] | None,
) -> None:
    tables = {} if privacy is None else {"privacy": privacy}
    _, parts = prepared(**tables)
    assert [part.is_private for part in parts] == [privacy is not None] * len(parts)


def test_parts_know_the_personal_epochs_at_their_end() -> None:
    _, parts = prepared(training={"personal_epochs": 3})
    epochs = {part.condition: part.personal_epochs for part in parts}
    assert epochs == {"alone": 3, "federated": 3, "pooled": 0}
