"""What a network of real processes refuses: false kits, orders and old frames.

The network on loopback has kits of its own. Intruders with altered kits run beside its
sites. If NVFlare alone would not refuse something, the test says so.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare")

import dishonest
import intruders
import refusal_mains
from intruders import Network, accepts_connection, log_of, until, ward_job
from nvflare.lighter.utils import verify_folder_signature
from places import files_of

from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.presence import SECOND_FILE
from fednotes.apps.deployment.nvflare.processes import LastContact, read_contact
from fednotes.core.messages import (
    Frame,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode_message,
)
from fednotes.engines.requests import Event, Participants, Patience, RunState

pytestmark = [pytest.mark.slow, pytest.mark.network]  # some two minutes: real processes

FIRST_JOB = f"""
while not {{"h1", "h2", "h4"}} <= set(server.list_sites()):
    time.sleep(0.3)
sites = server.list_sites()
{intruders.SUBMIT.strip()}
{intruders.UNTIL_FINISHED.strip()}
print(json.dumps([found["status"], sites + server.list_sites()]))
"""


@dataclass(frozen=True)
class Ward:
    """The network after its first job, which h1, h2 and h3 joined.

    h4 belongs to the project, but not to the job.

    Attributes:
        net: The network.
        port: The server's port.
        false: Kits that claim to be h3, and `unsigned`, by what is wrong with them.
        mark: A file that foreign code would write.
        status: The status of the first job.
        sites: The sites that the server reported as connected.
    """

    net: Network
    port: int
    false: Mapping[str, Path]
    mark: Path
    status: str
    sites: list[str]


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    """Start the network and the intruders, and run the first job."""
    base = tmp_path_factory.mktemp("refusals")
    mark, loose = base / "mark", base / "loose"
    loose.mkdir()
    (loose / "sitecustomize.py").write_text("import dishonest\ndishonest.serve()\n")
    path = os.pathsep.join(
        [str(loose), str(intruders.HELPERS), *filter(None, sys.path)]
    )
    with intruders.network(base / "kits", "h1", "h2", "h3", "h4") as net:
        kits, port = net.kits, net.project.port
        false = intruders.make_false_kits(base, kits["h3"], kits["h4"], port)
        net.start(
            kits["server"], PYTHONPATH=path, FEDNOTES_TEST_SERVER=str(kits["server"])
        )
        net.start(kits["h1"], kits["h4"], FEDNOTES_TEST_MARK=str(mark))
        liar = {"FEDNOTES_SITE_MAIN": "refusal_mains:dishonest_main"}
        net.start(kits["h2"], FEDNOTES_TEST_MARK=str(mark), **liar)
        net.start(*false.values())
        folder = ward_job(base, "first", ("h1", "h2", "h3"))
        status, sites = json.loads(net.admin(FIRST_JOB.strip(), folder))
        yield Ward(net, port, false, mark, status, sites)


def frames(ward: Ward, direction: str, site: str, task: str = "add") -> list[bytes]:
    """Return the first job's frames of one site and task.

    Args:
        ward: The network.
        direction: "down" for requests, "up" for replies.
        site: The site.
        task: The task.
    """
    folder = ward.net.server / "state/first/frames"
    recorded = [
        path.read_bytes() for path in sorted(folder.glob(f"*-{direction}-{site}"))
    ]
    down = [decode_request(p.read_bytes()) for p in sorted(folder.glob("*-down-*"))]
    numbers = {request.number for request in down if request.task == task}
    decode = decode_request if direction == "down" else decode_reply
    return [frame for frame in recorded if decode(frame).number in numbers]


# who may join


def test_sums_include_only_sites_of_the_job(ward: Ward) -> None:
    """The sums are those of h1 and h2.

    The expected numbers are computed without tensors and without an engine.
    """
    assert ward.status == "FINISHED:COMPLETED"
    rows = json.loads((ward.net.server / "state/first/result.json").read_text())
    assert [row["included"] for row in rows] == [["h1", "h2"]] * 3
    assert [row["steps"] for row in rows] == [2, 4, 6]
    expected = refusal_mains.total(["h1", "h2"], 3)
    np.testing.assert_allclose([row["x"][0] for row in rows], expected, rtol=1e-6)
    assert expected[-1] != refusal_mains.total(["h1", "h2", "h4"], 3)[-1]
    came = {
        p.name.split("-")[2]
        for p in (ward.net.server / "state/first/frames").glob("*-up-*")
    }
    assert came == {"h1", "h2"}
    for kit in (ward.net.kits["h4"], *ward.false.values()):  # no host ran there
        assert not list(kit.rglob("frames.txt"))
        assert not list(kit.rglob("app_*"))
    assert len(list(ward.net.server.parent.rglob("frames.txt"))) == 2


def test_a_false_kit_is_never_connected(ward: Ward) -> None:
    """h4 is connected, because the authority signed its kit."""
    assert set(ward.sites) == {"h1", "h2", "h4"}


@pytest.mark.parametrize("wrong", ["outsider", "self-signed", "expired"])
def test_the_server_closes_the_connection_of_a_wrong_certificate(
    ward: Ward, wrong: str
) -> None:
    """TLS alone does this, whatever program the other side runs."""
    assert accepts_connection(ward.port, ward.net.kits["h1"])
    assert not accepts_connection(ward.port, ward.false[wrong])


def test_a_kit_of_another_authority_does_not_connect_to_this_server(ward: Ward) -> None:
    kit = ward.false["other authority"]
    with pytest.raises(ssl.SSLCertVerificationError):
        accepts_connection(ward.port, kit)
    assert until(lambda: "CERTIFICATE_VERIFY_FAILED" in log_of(kit), 10)


def test_a_certificate_is_valid_only_for_its_own_name(ward: Ward) -> None:
    """A kit has h4's certificate and h3's configuration.

    TLS accepts the certificate; the server refuses the name.
    """
    assert accepts_connection(ward.port, ward.false["swapped"])
    message = "authenticated as 'h4' but claimed endpoint 'h3' requires identity 'h3'"
    assert message in log_of(ward.net.server)


# what a member may do


def test_a_member_cannot_impersonate_another(ward: Ward) -> None:
    """h2's process sends messages with its own token and the name of h1.

    It bypasses the rules of its own NVFlare.
    """
    answers = json.loads((ward.net.kits["h2"] / "answers.json").read_text())
    assert answers["heartbeat"] == "ok"
    assert answers["heartbeat as another"] != "ok"
    assert answers["task as another"] != "ok"
    log = log_of(ward.net.server)
    assert log.count("invalid auth token signature") >= 2
    assert "client_name='h1'" in log


def test_a_member_cannot_give_orders_to_another(ward: Ward) -> None:
    """NVFlare's server would pass orders on, and its client would obey any sender.

    `test_nvflare.py::test_a_site_obeys_only_orders_that_a_run_needs` tests that the
    site refuses them too.
    """
    answers = json.loads((ward.net.kits["h2"] / "answers.json").read_text())
    assert answers["order to oneself"] == "ok"
    for order in ("order to another", "order to another's job"):
        assert answers[order] == "timeout"
    assert "dropped an order of h2: ('admin', 'train.check_status')" in log_of(
        ward.net.server
    )


def test_a_member_cannot_give_orders_in_the_servers_name(ward: Ward) -> None:
    """A site knows the server's token, which is in every reply.

    NVFlare takes whoever presents it for the server. `audit.log` has a line for each
    order that a site obeys.
    """
    answers = json.loads((ward.net.kits["h2"] / "answers.json").read_text())
    assert answers["heard"].startswith("server")
    assert "dropped a message that h2 sent in the name of 'server'" in log_of(
        ward.net.server
    )
    assert dishonest.FORGED not in (ward.net.kits["h1"] / "audit.log").read_text()


@pytest.mark.parametrize("who", ["h1", "watch"])
def test_only_the_admin_can_submit_jobs(tmp_path: Path, ward: Ward, who: str) -> None:
    """Neither a site's key in the admin's kit nor the watch's own key suffices."""
    kit, person = ward.net.server / "watch", "watch@fednotes.org"
    if who == "h1":
        kit, person = intruders.copy_kit(ward.net.kits["admin"], tmp_path / "kit"), "h1"
        intruders.take_identity(kit, ward.net.kits["h1"])
    folder = ward_job(tmp_path, f"of-{who}")
    output = ward.net.admin(
        intruders.SUBMIT + "print('taken')", folder, kit=kit, person=person
    )
    assert "taken" not in output
    if who == "watch":
        assert "not authorized" in output
    else:  # NVFlare would store the job's file before it looks at who sent it
        upload = (
            "dropped an order of h1: ('aux_communication', 'ObjectStreamer.Request')"
        )
        assert upload in log_of(ward.net.server)


# what the server may do


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("number", "does not pass signature verification"),
        ("unsigned", "unsigned job rejected"),
        ("watch-code", "which may be code: custom/"),
    ],
)
def test_each_site_refuses_a_job_that_the_admin_did_not_sign(
    tmp_path: Path, ward: Ward, run: str, message: str
) -> None:
    """The server accepts the admin's job and sends the sites another one.

    `dishonest.CHANGES` lists the changes.
    """
    status, detail = ward.net.run(ward_job(tmp_path, run))
    assert status == "FINISHED:FAILED_TO_RUN"
    assert "server: OK" in detail
    for site in ("h1", "h2"):
        assert [message in line for line in detail if line.startswith(f"{site}:")] == [
            True
        ]
        assert not (ward.net.kits[site] / "state" / run).exists()
    assert not ward.mark.exists()


def test_each_site_refuses_a_job_that_the_server_signed(
    tmp_path: Path, ward: Ward
) -> None:
    """To NVFlare, any certificate of the project may sign a job."""
    h1, message = ward.net.kits["h1"], "was signed by 'localhost'"
    ward.net.run_until(
        lambda: message in log_of(h1), ward_job(tmp_path, "server-signed")
    )
    assert not (h1 / "state/server-signed/site").exists()


def test_the_server_rejects_a_copy_of_a_connected_kit(
    tmp_path: Path, ward: Ward
) -> None:
    """NVFlare alone would replace the first process by the copy."""
    copy, first = (
        intruders.copy_kit(ward.net.kits["h4"], tmp_path / "h4"),
        ward.net.kits["h4"],
    )
    first_pid = processes.read_status(first).pid
    ward.net.start(copy)
    assert until(lambda: not processes.read_status(copy).is_running, 40)
    assert "the server refuses this site: another process of this site" in log_of(copy)
    assert "a second process of site 'h4' was refused" in log_of(ward.net.server)
    assert list(json.loads((ward.net.server / SECOND_FILE).read_text())) == ["h4"]
    since = time.time()
    assert until(
        lambda: (read_contact(first, first_pid) or LastContact()).last > since, 60
    )


def test_each_site_itself_refuses_a_foreign_class(tmp_path: Path, ward: Ward) -> None:
    """The admin has signed the job with a foreign class.

    The server, which also reports it as a job with code, lets it pass.
    """
    folder, sites = (
        ward_job(tmp_path, "class"),
        [ward.net.kits[s] for s in ("h1", "h2")],
    )
    dishonest.foreign_class(folder / "app")
    dishonest.foreign_component(folder / "app")
    message = f"Component {dishonest.FOREIGN!r} at config path"
    ward.net.run_until(lambda: all(message in log_of(site) for site in sites), folder)
    for site in sites:
        assert not (site / "state/class").exists()
    assert not ward.mark.exists()  # not so much as imported


def test_a_signature_covers_every_file(tmp_path: Path, ward: Ward) -> None:
    """Each site verifies a job's folder with this function of NVFlare."""
    authority = str(ward.net.kits["h1"] / "startup/rootCA.pem")
    signed = ward_job(tmp_path, "signed") / "app"
    dishonest.sign(signed, ward.net.kits["admin"])
    assert verify_folder_signature(str(signed), authority)
    changes = (
        dishonest.more_rounds,
        dishonest.one_more_file,
        dishonest.code,
        dishonest.unsign,
    )
    for change in changes:
        app = intruders.copy_kit(signed, tmp_path / change.__name__)
        change(app)
        assert not verify_folder_signature(str(app), authority)
    app = intruders.copy_kit(signed, tmp_path / "other")
    dishonest.sign(app, ward.false["other authority"])
    assert not verify_folder_signature(str(app), authority)


# frames that were there before


class FixedTransport:
    """A transport that returns the same frames, whatever is asked."""

    def __init__(self, *frames: tuple[str, Frame]) -> None:
        self.frames = frames

    def exchange(
        self, frames: Mapping[str, Frame], **_: Any
    ) -> Iterable[tuple[str, Frame]]:
        return self.frames


def changed(frame: bytes, **fields: Any) -> bytes:
    return encode_message(replace(decode_reply(frame), **fields))


REPLAYS = {
    "of an earlier request": ("late", lambda h1, h2: h1[0]),
    "of a later request": ("late", lambda h1, h2: h1[2]),
    "of another run": ("late", lambda h1, h2: changed(h1[1], server_start=2)),
    "of another job": ("late", lambda h1, h2: changed(h1[1], job="job-2")),
    "of another site": ("refused", lambda h1, h2: h2[1]),
    "in another's name": ("refused", lambda h1, h2: changed(h2[1], site="h3")),
    "cut short": ("damaged", lambda h1, h2: h1[1][:-64]),
    "a request": (
        "damaged",
        lambda h1, h2: encode_message(Request("refusals", 1, 1, "add")),
    ),
}


@pytest.mark.parametrize("which", REPLAYS)
def test_the_server_accepts_no_reply_twice(ward: Ward, which: str) -> None:
    """Replies of the first job arrive again over h1's connection."""
    kind, choose = REPLAYS[which]
    h1, h2 = frames(ward, "up", "h1"), frames(ward, "up", "h2")
    request = decode_request(frames(ward, "down", "h1")[1])
    genuine = h1[1]
    transport = FixedTransport(
        ("h1", choose(h1, h2)), ("h1", genuine), ("h1", genuine), ("h3", genuine)
    )
    events: list[Event] = []
    stands = {
        "job": request.job,
        "server_start": request.server_start,
        "progress": RunState(0, {"h1": 0}, {"h1": 0}),
    }
    members = Participants(transport, Patience(timeout=1), events.append, **stands)
    answers = members.ask({"h1": request}, least=1)
    assert [event.kind for event in events] == [kind, "duplicate", "refused"]
    assert list(answers.replies) == ["h1"]
    assert not answers.refused
    updates = [reply.update for reply in (answers.replies["h1"], decode_reply(genuine))]
    actual, expected = (update.tensors["x"] for update in updates if update)
    np.testing.assert_array_equal(actual, expected)


def test_a_site_runs_no_request_twice(
    tmp_path: Path, ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h1's requests are sent again to a host with the state that h1 has on disk."""
    site_state = tmp_path / "h1"
    shutil.copytree(ward.net.kits["h1"] / "state/first/site", site_state)
    requests, replies = frames(ward, "down", "h1"), frames(ward, "up", "h1")
    monkeypatch.delattr(refusal_mains.Ward, "add")
    host, before = refusal_mains.host(site_state, "h1"), files_of(site_state)
    assert host.handle(requests[-1]) == replies[-1]
    for earlier_request in requests[:-1]:
        reply: Reply = decode_reply(host.handle(earlier_request))
        assert reply.update is None
        assert "is old" in reply.refusal
    newest = decode_request(requests[-1])
    for wrong, message in (
        (replace(newest, server_start=0), "is old"),
        (replace(newest, job="job-2"), "has approved job"),
        (replace(newest, counted={"h2": 1}), "does not name site 'h1'"),
    ):
        assert message in decode_reply(host.handle(encode_message(wrong))).refusal
    assert host.handle(requests[-1]) == replies[-1]
    assert files_of(site_state) == before
