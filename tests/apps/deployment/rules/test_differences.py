"""Test that a site refuses jobs whose examples differ by few from earlier ones.

The examples are single letters, so each expected difference is counted by hand.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
from pathlib import Path

import pytest

from fednotes.apps.deployment.rules import differences
from fednotes.apps.deployment.rules.differences import (
    RECORD,
    SECRET,
    ExampleRecord,
    JoinedRun,
    digest_examples,
)
from fednotes.apps.deployment.rules.policy import Policy, PolicyRefusal
from fednotes.core.errors import ConfigError

THREE = Policy(min_difference=3, source="[policy] of site.toml")


def join(
    rules: Path,
    letters: str,
    *,
    run: str = "run1",
    job: str = "1" * 64,
    labels: str = "",
    policy: Policy = THREE,
) -> None:
    """Join a run that trains on these letters.

    Args:
        rules: The folder of the site's rules.
        letters: The examples.
        run: Name of the run.
        job: Fingerprint of the job.
        labels: The examples in a second view, if there is one.
        policy: The site's policy.
    """
    views = {"texts": [letter.encode() for letter in letters]}
    if labels:
        views["labels"] = [label.encode() for label in labels]
    joining = JoinedRun(run, job, ("b", "a"))
    ExampleRecord(rules).compare_and_record(joining, lambda: views, policy)


def runs(rules: Path) -> list[str]:
    """Return the stored runs, oldest first."""
    return [
        entry["run"]
        for entry in json.loads((rules / "examples" / RECORD).read_text())["runs"]
    ]


@pytest.mark.parametrize(
    "letters", ["abcdef", "fedcba"], ids=["same order", "another order"]
)
def test_a_second_job_on_the_same_examples_is_allowed(
    letters: str, tmp_path: Path
) -> None:
    join(tmp_path, "abcdef")
    join(tmp_path, letters, run="run2", job="2" * 64)
    assert runs(tmp_path) == ["run1", "run2"]


@pytest.mark.parametrize(
    ("letters", "number"),
    [
        ("abcde", 1),  # f is gone
        ("abcdefg", 1),  # g is new
        ("abcdeg", 2),  # f is gone and g is new
        ("abcdeff", 1),  # f occurs once more
    ],
)
def test_a_job_with_few_different_examples_is_refused(
    letters: str, number: int, tmp_path: Path
) -> None:
    join(tmp_path, "abcdef")
    with pytest.raises(
        PolicyRefusal, match=rf"\(texts\) differ by {number} from"
    ) as refusal:
        join(tmp_path, letters, run="run2", job="2" * 64)
    assert refusal.value.rule == "min_difference"
    assert "job (111111111111, run run1)" in str(refusal.value)
    assert "on the same examples as that one, or one that differs by 3 or more" in str(
        refusal.value
    )
    assert not any(character.isdigit() for character in refusal.value.public)
    assert runs(tmp_path) == ["run1"]  # the refused run is not remembered


@pytest.mark.parametrize("letters", ["abc", "abcdefghi", "abcdgefhi", "uvwxyz"])
def test_a_job_with_enough_different_examples_is_allowed(
    letters: str, tmp_path: Path
) -> None:
    """The differences are 3, 3, 3 and 12."""
    join(tmp_path, "abcdef")
    join(tmp_path, letters, run="run2", job="2" * 64)
    assert runs(tmp_path) == ["run1", "run2"]


def test_every_earlier_run_is_compared(tmp_path: Path) -> None:
    join(tmp_path, "abcdef")
    join(tmp_path, "uvwxyz", run="run2", job="2" * 64)
    with pytest.raises(PolicyRefusal, match="run run1"):
        join(tmp_path, "abcde", run="run3", job="3" * 64)


def test_every_view_is_compared(tmp_path: Path) -> None:
    """A removed text is noticed although all labels have new names.

    A changed label is noticed although all texts are the same.
    """
    join(tmp_path, "abcdef", labels="ABCDEF")
    with pytest.raises(PolicyRefusal, match=r"\(texts\) differ by 1"):
        join(tmp_path, "abcde", labels="UVWXY", run="run2", job="2" * 64)
    with pytest.raises(PolicyRefusal, match=r"\(labels\) differ by 2"):
        join(tmp_path, "abcdef", labels="ABCDEG", run="run2", job="2" * 64)
    join(tmp_path, "abcde", run="run2", job="2" * 64, policy=Policy(min_difference=1))


def test_a_limit_of_zero_compares_and_records_nothing(tmp_path: Path) -> None:
    assert Policy().min_difference == 0
    join(tmp_path / "rules", "abcdef", policy=Policy())
    join(tmp_path / "rules", "abcde", run="run2", job="2" * 64, policy=Policy())
    assert not (tmp_path / "rules").exists()


def test_a_resumed_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    join(tmp_path, "abcdef")
    join(tmp_path, "abcdef")
    assert runs(tmp_path) == ["run1"]
    # a note changed meanwhile: later jobs are compared with both
    join(tmp_path, "abcde")
    assert runs(tmp_path) == ["run1", "run1"]
    with pytest.raises(PolicyRefusal):
        join(tmp_path, "abcde", run="run2")
    with pytest.raises(PolicyRefusal):
        # another job by the name of the same run
        join(tmp_path, "abcdef", job="2" * 64)


def test_the_record_holds_only_keyed_digests_and_names(tmp_path: Path) -> None:
    """The expected digests are computed here.

    With another secret, the digests of "a" are different.
    """
    join(tmp_path, "aab")
    text = (tmp_path / "examples" / RECORD).read_text()
    secret = (tmp_path / "examples" / SECRET).read_bytes()
    assert len(secret) == 32
    assert secret.hex() not in text
    assert json.loads(text)["runs"][0]["sites"] == ["a", "b"]

    view = hmac.new(secret, b"texts", hashlib.sha256).digest()
    expected = set()
    for letter, number in ((b"a", 1), (b"a", 2), (b"b", 1)):
        plain = hmac.new(view, letter, hashlib.sha256).digest()
        numbered = plain + bytes(7) + bytes([number])
        expected.add(hmac.new(view, numbered, hashlib.sha256).digest()[:16])
    assert digest_examples(secret, "texts", [b"a", b"b", b"a"]) == expected
    assert not expected & digest_examples(bytes(32), "texts", [b"a", b"b", b"a"])


def test_only_their_owner_can_read_the_files(tmp_path: Path) -> None:
    join(tmp_path / "rules", "abcdef")
    for path in (tmp_path / "rules").rglob("*"):
        mode = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == mode, path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def replace_a_digest(path: Path) -> None:
    """Replace the stored digests by other well-formed ones."""
    table = json.loads(path.read_text())
    for key, digest in table["sets"].items():
        table["sets"][key] = digest.swapcase()
    path.write_text(json.dumps(table))


def forget_the_runs(path: Path) -> None:
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"runs": []}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (RECORD, Path.unlink),
        (RECORD, cut),
        (RECORD, replace_a_digest),
        (RECORD, forget_the_runs),
        (RECORD, lambda path: path.write_text("[]")),
        (RECORD, lambda path: path.write_bytes(b"")),
        (SECRET, Path.unlink),
        (SECRET, cut),
        (SECRET, lambda path: path.write_bytes(bytes(32))),
    ],
)
def test_a_site_with_a_damaged_record_joins_no_run(
    name: str, damage: object, tmp_path: Path
) -> None:
    """It joins neither the same run nor one with other examples.

    Once the file is restored, runs are compared as before.
    """
    assert callable(damage)
    join(tmp_path, "abcdef")
    path = tmp_path / "examples" / name
    before = path.read_bytes()
    damage(path)
    for letters, run in (("abcdef", "run1"), ("uvwxyz", "run2")):
        with pytest.raises(
            ConfigError, match=r"missing, damaged or edited.*restore a copy"
        ):
            join(tmp_path, letters, run=run)
    path.write_bytes(before)
    with pytest.raises(PolicyRefusal):
        join(tmp_path, "abcde", run="run2")


def test_a_record_that_would_be_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal sets of examples are stored once and hardly need room."""
    many = "".join(map(chr, range(100, 1100)))
    join(tmp_path, many)
    size = (tmp_path / "examples" / RECORD).stat().st_size
    assert 1000 * 16 * 4 / 3 < size < 1000 * 16 * 4 / 3 + 1000
    monkeypatch.setattr(differences, "_MAX_BYTES", size + 1000)
    join(tmp_path, many, run="run2")
    with pytest.raises(
        ConfigError, match=r"would grow to \d\d,\d\d\d bytes.*archive this folder"
    ):
        join(tmp_path, "abcdef" * 100, run="run3")
    assert runs(tmp_path) == ["run1", "run2"]
