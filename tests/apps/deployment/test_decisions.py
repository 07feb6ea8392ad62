"""What a person at a site decides about a job, and what becomes of the run.

The network is an in-memory pipe. What the server is told of a site's trouble is
searched for the names that were planted in it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hospital_jobs import QUICK, SHORT
from hospitals import Hospitals, weights
from kits import run_site_command, site_kit

import fednotes as fn
from fednotes.apps.deployment.rules.guard import (
    NotApproved,
    open_approvals,
    read_pending_jobs,
    require_approved,
)
from fednotes.apps.deployment.rules.policy import Policy
from fednotes.apps.deployment.server import PROBLEM, server_main
from fednotes.apps.deployment.site import redact_error, redacting_errors
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    LossError,
    ModelError,
    RefusedError,
)
from fednotes.core.store import write_json
from fednotes.core.tables import fingerprint_table
from fednotes.engines.history import Journal


def problem(hospitals: Hospitals) -> dict[str, Any]:
    return json.loads((hospitals.server / PROBLEM).read_text())


# a job that is rejected


@pytest.mark.slow
@pytest.mark.parametrize("least", [2, 3])
def test_a_rejection_before_the_first_round_ends_the_run(
    least: int, site_notes: Any, tmp_path: Path
) -> None:
    """All sites are needed to begin, however many are to go on.

    The remedy that is named works.
    """
    hospitals = Hospitals(tmp_path, SHORT, site_notes, least=least)
    hospitals.approve("posts", yes=False)
    with pytest.raises(
        ConfigError, match="site 'posts' has rejected this job"
    ) as stopped:
        hospitals.run()
    key = fingerprint_table(hospitals.table)[:12]
    assert "3 of 3 sites are needed to begin, so this run is over" in str(stopped.value)
    assert problem(hospitals) == {"problem": str(stopped.value), "again": False}
    kit = site_kit(hospitals.setups["posts"].kit)
    assert f"run at the site: fednotes site approve KIT {key}" in str(stopped.value)
    assert not read_pending_jobs(kit)
    run_site_command("approve", kit, key, "--yes")
    hospitals.run()
    assert weights(hospitals.results("posts") / "model")


def test_a_rejection_during_a_run_ends_it_if_it_needs_the_site(
    site_notes: Any, tmp_path: Path
) -> None:
    hospitals = Hospitals(tmp_path, QUICK, site_notes)

    reject = partial(hospitals.approve, "posts", yes=False)
    hospitals.network.meanwhile = lambda: reject() if hospitals.lines("round") else None
    with pytest.raises(
        ConfigError, match="3 of 3 sites are needed, so this run is over"
    ):
        hospitals.run()
    assert problem(hospitals)["again"] is False


@pytest.mark.slow
def test_a_rejection_withdrawn_in_time_has_no_effect(
    site_notes: Any, tmp_path: Path
) -> None:
    """Two sites are enough; the third comes back, and the run ends with its part as
    well."""
    long = QUICK.replace("rounds = 2", "rounds = 6")
    hospitals = Hospitals(tmp_path, long, site_notes, least=2)

    def decide() -> None:
        rounds = len(hospitals.lines("round"))
        if rounds in (1, 3):
            hospitals.approve("posts", yes=rounds == 3)

    hospitals.network.meanwhile = decide
    hospitals.run()
    took = [line["took_part"] for line in hospitals.lines("round")]
    assert took[0] == took[-1] == 3
    assert 2 in took
    assert hospitals.texts().count("site 'posts' has rejected this job") == 1

    missed = [line["absent"] for line in hospitals.lines("round") if "absent" in line]
    assert sum(sites["posts"] for sites in missed) == took.count(2)
    write_json(hospitals.server / "job.json", hospitals.declared)
    diagnosis = fn.doctor(hospitals.server)
    (absent,) = [each for each in diagnosis.causes if each.code == "sites_absent"]
    assert absent.where == "posts"
    assert absent.evidence[1].numbers == {"absent": took.count(2)}
    assert "the sites' data, which stay there" in diagnosis.unchecked


# the commands


def test_decisions_apply_to_the_job_with_their_fingerprint(
    site_notes: Any, tmp_path: Path
) -> None:
    """Of two jobs the one that is meant, whichever waits."""
    first = Hospitals(tmp_path, SHORT, site_notes)
    kit = site_kit(first.setups["posts"].kit)
    key = fingerprint_table(first.table)
    other_job = {**first.table, "min_sites": 2}
    with pytest.raises(NotApproved, match="has approved another form of this job"):
        require_approved(kit, "posts", other_job, Policy())
    output = run_site_command("reject", kit)  # the one that waits
    assert (
        f"rejected: job ({fingerprint_table(other_job)[:12]}), a job that was not approved"
        in output
    )
    assert f"still approved: job ({key[:12]})" in output
    output = run_site_command("approve", kit, code=2)
    assert (
        f"to approve it after all: fednotes site approve {kit} {fingerprint_table(other_job)[:12]}"
        in output
    )
    output = run_site_command("reject", kit, key[:8])
    assert f"({key[:12]}), its approval is withdrawn" in output
    assert open_approvals(kit).find_last_approval() is None
    assert f"approved: job ({key[:12]})" in run_site_command(
        "approve", kit, key[:6].upper(), "--yes"
    )
    assert open_approvals(kit).read_status(first.table) == "approved"
    assert open_approvals(kit).read_status(other_job) == "rejected"
    output = run_site_command("approve", kit, "0123", code=2)
    assert "no fingerprint begins with '0123'" in output
    assert key[:12] in output


# what the server is told


NAME = "SMITH_JANE_MRN0042"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            DataError(f"/w/{NAME}.ann:1: T1 at 0:99"),
            "its notes cannot be read (see the site's log",
        ),
        (
            ConfigError(f"{NAME}.toml [data]: x"),
            "its notes or its site file do not match the job (see",
        ),
        (
            ModelError(f"{NAME}: damaged"),
            "a model or its saved state cannot be read (see",
        ),
        (
            FednotesError(f"/w/{NAME}: cannot"),
            "a file there cannot be read or written (see",
        ),
        (ValueError(NAME), "the task failed (ValueError"),
        (OSError(28, "No space", f"/w/{NAME}"), "the task failed (OSError"),
    ],
)
def test_an_error_sent_to_the_server_names_no_file(
    error: Exception, words: str
) -> None:
    message = redact_error(error, "posts")
    assert message.startswith(f"site 'posts': {words}")
    assert NAME not in message


def test_an_error_about_a_loss_sent_to_the_server_has_no_position() -> None:
    """A server could choose parameters that make one word fail."""
    error = LossError("posts", float("nan"), "at mini-batch 3", "lower learning_rate")
    message = redact_error(error, "posts")
    assert message == "site 'posts': the loss is not finite: lower learning_rate"


def test_an_error_about_a_full_disk_is_sent_without_paths(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The operating system's own words, which name nothing; the site's log has the
    whole."""
    full = DataError(f"{NAME}: cannot be written")
    full.__cause__ = OSError(28, "No space left on device", NAME)
    with pytest.raises(DataError) as refusal, redacting_errors("posts"):
        raise full
    assert str(refusal.value) == (
        "site 'posts': its notes cannot be read (No space left on device; see the site's log)"
    )
    assert f"{NAME}: cannot be written" in caplog.text


def test_refusals_by_rules_are_reported_unchanged() -> None:
    error = RefusedError("site 'posts' does not take part in secure sums")
    with pytest.raises(RefusedError) as refusal, redacting_errors("posts"):
        raise error
    assert refusal.value is error


@pytest.mark.slow
def test_the_run_waits_while_the_disk_of_a_site_is_full(
    site_notes: Any, tmp_path: Path
) -> None:
    """A person who watches the run sees why it waits."""
    hospitals = Hospitals(tmp_path, SHORT, site_notes)
    adding, calls = Journal.add, [0]

    def add(self: Any, *args: Any) -> None:
        if "/posts/" in str(vars(self)):
            calls[0] += 1
            if calls[0] in (2, 3):
                full = OSError(28, "No space left on device")
                raise FednotesError(f"states/{NAME}: cannot be written") from full
        adding(self, *args)

    with mock.patch.object(Journal, "add", add):
        hospitals.run()
    log_text = hospitals.texts()
    assert (
        log_text.count("No space left on device; see the site's log); asked again") == 1
    )
    assert "site 'posts': a file there cannot be read or written" in log_text
    assert NAME not in log_text
    assert weights(hospitals.results("posts") / "model")


# files of the server's


@pytest.mark.slow
def test_a_file_that_the_server_lacks_is_reported_before_sites_are_asked(
    site_notes: Any, tmp_path: Path
) -> None:
    job = SHORT.replace("[model]", f'[model]\nword_vectors = "{tmp_path}/vectors.txt"')
    hospitals = Hospitals(tmp_path, job, site_notes)
    with pytest.raises(ModelError) as stopped:
        server_main(hospitals.setups[""], hospitals.network)
    assert "[model]: word_vectors names a file" in str(stopped.value)
    assert "fednotes server start KIT --server-file FILE" in str(stopped.value)
    assert problem(hospitals)["again"] is False
    assert hospitals.network.frames == []
    (tmp_path / "here.txt").write_text("a 1 2\nb 3 4\n")
    (hospitals.setups[""].kit / "server.toml").write_text(
        '[files]\nword_vectors = "../../here.txt"'
    )
    # Now the sites are asked, who lack it too.
    assert "its notes or its site file do not match the job" in hospitals.refusal()


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("encoder", "$TOKEN"),
        ("word_vectors", "$TOKEN/x"),
        ("contextual", "$UNSET"),
        ("backbone", "~/x"),
        ("word_vectors", "/etc/passwd"),
        ("tagger", "$TOKEN"),
    ],
)
def test_a_job_opens_no_file_and_reads_no_variable_of_the_server(
    key: str,
    place: str,
    site_notes: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The admin, who reads the problem, learns neither a variable's value nor whether a
    file exists, and no site has to approve the job for that."""
    monkeypatch.setenv("TOKEN", "hunter2")
    hospitals = Hospitals(tmp_path, SHORT, site_notes)
    hospitals.declared["job"]["model"][key] = place
    with pytest.raises(ModelError) as stopped:
        server_main(hospitals.setups[""], hospitals.network)
    for text in (str(stopped.value), str(problem(hospitals))):
        assert "hunter2" not in text
        assert "passwd" not in text
        assert "not set" not in text
    assert hospitals.network.frames == []
