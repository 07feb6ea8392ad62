"""Several people approve, each with a key: what counts and what does not."""

from __future__ import annotations

import base64
import datetime as dt
import json
import stat
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fednotes.apps.deployment.rules.approval import (
    Approvals,
    Quorum,
    Signer,
    encode_public_key,
    make_key,
    read_signing_key,
)
from fednotes.apps.deployment.rules.policy import Policy, build_policy
from fednotes.core.errors import ConfigError

JOB = {"name": "ner", "method": "fedner"}
OTHER = {**JOB, "seed": 2}
NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
LATER = NOON + dt.timedelta(hours=1)
# Private keys of 32 equal bytes; the public parts are computed here by the library
# alone.
KEYS = {
    name: Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)
    for n, name in enumerate("abc")
}
PUBLIC = {
    name: base64.b64encode(key.public_key().public_bytes_raw()).decode()
    for name, key in KEYS.items()
}
TWO = Quorum("h1", 2, {"alice": PUBLIC["a"], "bob": PUBLIC["b"]})
ALICE, BOB = Signer("alice", KEYS["a"]), Signer("bob", KEYS["b"])


def approved_at(site: Approvals) -> datetime | None:
    decision = site.read_standing(JOB).settled
    return datetime.fromisoformat(decision.when) if decision is not None else None


NOBODY = {
    "carol": Signer("carol", KEYS["c"]),
    "as bob": Signer("bob", KEYS["c"]),
    "bob by alice": Signer("bob", KEYS["a"]),
}


@pytest.mark.parametrize(
    ("people_deciding", "status", "people"),
    [
        (["alice"], "waiting", {"alice"}),
        (["alice", "alice"], "waiting", {"alice"}),  # the same person twice
        (["alice", "bob"], "approved", set()),
        (["alice", "no"], "rejected", set()),  # one no takes every yes back
        (["alice", "no", "bob"], "waiting", {"bob"}),
        (["alice", "no", "bob", "alice"], "approved", set()),
        (["alice", "bob", "no"], "rejected", set()),
        (["alice", "without a key", *NOBODY], "waiting", {"alice"}),
        (["alice", "another job by bob"], "waiting", {"alice"}),
    ],
)
def test_two_different_people_of_the_list_are_needed(
    tmp_path: Path, people_deciding: list[str], status: str, people: set[str]
) -> None:
    site, known = Approvals(tmp_path, TWO), {"alice": ALICE, "bob": BOB, **NOBODY}
    for who in people_deciding:
        if who == "another job by bob":
            site.decide("approved", OTHER, "x", NOON, BOB)
        else:
            site.decide(
                "rejected" if who == "no" else "approved",
                JOB,
                "x",
                NOON,
                known.get(who),
            )
    assert (site.read_status(JOB), site.read_standing(JOB).people) == (status, people)
    assert (approved_at(site) is None) == (status == "waiting")
    assert (site.find_last_approval() is not None) == (status == "approved")
    if "another job by bob" not in people_deciding:
        assert site.read_status(OTHER) == (
            "changed" if status == "approved" else "unknown"
        )


def test_a_new_approval_needs_both_people(tmp_path: Path) -> None:
    """`max_rounds` counts from the newest approval: one person cannot begin it anew."""
    site = Approvals(tmp_path, TWO)
    for signer in (ALICE, BOB):
        site.decide("approved", JOB, "x", NOON, signer)
    site.decide("approved", JOB, "x", LATER, ALICE)
    assert (site.read_status(JOB), approved_at(site)) == ("approved", NOON)
    site.decide("approved", JOB, "x", LATER, BOB)
    assert approved_at(site) == LATER


@pytest.mark.parametrize(
    "forged",
    [
        {"person": "bob"},
        {"by": "y"},
        {"when": LATER.isoformat()},
        {"signature": "zz"},
        {"signature": 7},
        {"decision": "rejected"},
    ],
    ids=str,
)
def test_a_signature_is_valid_only_for_its_decision(
    tmp_path: Path, forged: dict[str, Any]
) -> None:
    quorum = Quorum("h1", 1, {"alice": PUBLIC["a"], "bob": PUBLIC["b"]})
    site = Approvals(tmp_path, quorum)
    site.decide("approved", JOB, "x", NOON, ALICE)
    assert site.read_status(JOB) == "approved"
    saved = json.loads(site.path.read_text())
    saved["decisions"][0] |= forged
    site.path.write_text(json.dumps(saved))
    if "signature" in forged and forged["signature"] == 7:
        with pytest.raises(ConfigError, match="was edited"):
            site.read_status(JOB)
    else:
        assert site.read_status(JOB) != "approved"


def test_a_signature_is_valid_at_one_site_only(tmp_path: Path) -> None:
    single_approver = replace(TWO, needed=1)
    Approvals(tmp_path, single_approver).decide("approved", JOB, "x", NOON, ALICE)
    assert Approvals(tmp_path, single_approver).read_status(JOB) == "approved"
    assert (
        Approvals(tmp_path, replace(single_approver, site="h2")).read_status(JOB)
        == "unknown"
    )


def test_changed_rules_apply_at_once(tmp_path: Path) -> None:
    """A person who is listed no more has approved nothing; without rules anybody's yes
    counts."""
    site = Approvals(tmp_path, TWO)
    for signer in (ALICE, BOB):
        site.decide("approved", JOB, "x", NOON, signer)
    people = {"alice": PUBLIC["a"], "carol": PUBLIC["c"]}
    assert Approvals(tmp_path, Quorum("h1", 2, people)).read_status(JOB) == "waiting"
    assert Approvals(tmp_path).read_status(JOB) == "approved"


def test_decisions_of_earlier_versions_are_read(tmp_path: Path) -> None:
    site = Approvals(tmp_path)
    key = site.decide("approved", JOB, "x", NOON)
    decision = {
        "fingerprint": key,
        "decision": "approved",
        "by": "x",
        "when": NOON.isoformat(),
    }
    saved = json.loads(site.path.read_text())
    assert saved["decisions"] == [decision | {"ledger": ""}]
    site.path.write_text(json.dumps(saved | {"decisions": [decision]}))
    assert site.read_status(JOB) == "approved"


# the rules


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ({"approvals": 0}, "approvals = 0: expected at least 1"),
        ({"approvals": 2}, "approvals = 2, but approvers lists 0"),
        (
            {"approvals": 2, "approvers": {"alice": PUBLIC["a"]}},
            "lists 1: list everyone who may",
        ),
        ({"approvers": {"alice": "YQ=="}}, "'alice' = 'YQ==': expected NAME"),
        ({"approvers": {"alice": "é"}}, "expected NAME"),
        ({"approvers": {"": PUBLIC["a"]}}, "expected NAME"),
        (
            {"approvers": {"a": PUBLIC["a"], "b": PUBLIC["a"]}},
            "two names share a key",
        ),
        ({"approvers": {"a": 3}}, "expected text"),
    ],
)
def test_rules_that_no_decision_could_satisfy_are_refused(
    table: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=r"\[policy\]") as refusal:
        build_policy(table, "[policy]")
    assert wrong in str(refusal.value)


def test_rules_are_parsed_as_written() -> None:
    table = {"approvals": 2, "approvers": {"alice": PUBLIC["a"], "bob": PUBLIC["b"]}}
    assert build_policy(table, "x").make_quorum("h1") == TWO
    assert Policy().make_quorum("h1") == Quorum("h1")


# keys


def never() -> str:
    raise AssertionError("asked for a passphrase")


def test_only_its_owner_can_read_a_key(tmp_path: Path) -> None:
    path = tmp_path / "alice.key"
    public = make_key(path, "alice")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = read_signing_key(path, never)
    assert encode_public_key(key) == public
    assert Quorum("h1", 1, {"alice": public}).find_person(key, path) == "alice"
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        make_key(path, "alice")
    assert path.read_bytes() == before
    path.chmod(0o640)
    with pytest.raises(
        ConfigError, match="other users can read this file: run chmod 600"
    ):
        read_signing_key(path, never)


def test_a_passphrase_locks_a_key(tmp_path: Path) -> None:
    path = tmp_path / "alice.key"
    public = make_key(path, "alice", "s3cret")
    assert b"ENCRYPTED" in path.read_bytes()
    assert encode_public_key(read_signing_key(path, lambda: "s3cret")) == public
    for wrong in ("S3cret", ""):
        with pytest.raises(ConfigError, match="the passphrase is wrong"):
            read_signing_key(path, lambda wrong=wrong: wrong)


def test_unknown_missing_and_invalid_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not among the approvers .*\(alice, bob\)"):
        TWO.find_person(KEYS["c"], tmp_path / "c.key")
    with pytest.raises(ConfigError, match="No such file"):
        read_signing_key(tmp_path / "none", never)
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(ConfigError, match="it contains no private key"):
        read_signing_key(tmp_path / "text", never)
    with pytest.raises(ConfigError, match="letters, digits"):
        make_key(tmp_path / "x", "../x")
