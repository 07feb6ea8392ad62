"""What the owner of a machine can do with its key: a server and a site that change
NVFlare.

`serve` makes a real server send its sites another job than the one that was handed in,
by the name of the run; `ask_as_others` sends messages from a site's job process under
other names.
"""

from __future__ import annotations

import gc
import io
import json
import os
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIGNATURE, SIGNER = ".__nvfl_sig.json", ".__nvfl_submitter.crt"
FOREIGN = "foreign_code.Foreign"
FORGED = "forged-order"  # the topic of a message in the server's name
Change = Callable[[Path], None]


def more_rounds(app: Path) -> None:
    path = app / "config/job.json"
    declared = json.loads(path.read_text())
    declared["job"]["rounds"] += 6
    path.write_text(json.dumps(declared))


def foreign_class(app: Path) -> None:
    path = app / "config/config_fed_client.json"
    table = json.loads(path.read_text())
    table["executors"][0]["executor"]["path"] = FOREIGN
    path.write_text(json.dumps(table))


def foreign_component(app: Path) -> None:
    path = app / "config/config_fed_client.json"
    table = json.loads(path.read_text())
    table["components"] = [{"id": "extra", "path": FOREIGN, "args": {}}]
    path.write_text(json.dumps(table))


def code(app: Path) -> None:
    (app / "custom").mkdir()
    (app / "custom/evil.py").write_text("raise SystemExit\n")


def one_more_file(app: Path) -> None:
    (app / "config/extra.json").write_text("{}")


def unsign(app: Path) -> None:
    for path in (*app.rglob(SIGNATURE), *app.rglob(SIGNER)):
        path.unlink()


def sign(app: Path, kit: Path) -> None:
    """Sign an app again, with the key and certificate of a kit."""
    from nvflare.lighter.utils import load_private_key_file, sign_folders

    unsign(app)
    (certificate,) = (kit / "startup").glob("*.crt")
    (key,) = (kit / "startup").glob("*.key")
    sign_folders(str(app), load_private_key_file(str(key)), str(certificate))


def signed_by(name: str, *changes: Change) -> Change:
    """Return changes, signed with one of the keys on the server's machine."""

    def change(app: Path) -> None:
        for each in changes:
            each(app)
        server = Path(os.environ["FEDNOTES_TEST_SERVER"])
        sign(app, server / name if name else server)

    return change


CHANGES: dict[str, Change] = {
    "number": more_rounds,
    "unsigned": unsign,
    "server-signed": signed_by("", more_rounds),
    "watch-code": signed_by("watch", code),
}


def changed(archive: bytes, change: Change) -> bytes:
    """Return the zip of an app with a change."""
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            file.extractall(folder)
        change(folder)
        with zipfile.ZipFile(out, "w") as file:
            for path in sorted(folder.rglob("*")):
                file.write(path, path.relative_to(folder))
        return out.getvalue()


def serve() -> None:
    """Make this process a server that sends sites another job; its own copy is as it
    was."""
    from nvflare.private.fed.server.job_runner import JobRunner

    honest = JobRunner._make_deploy_message

    def deploy(job: Any, app_data: bytes, app_name: str, fl_ctx: Any) -> Any:
        change = CHANGES.get(str(job.meta["name"]))
        message = honest(
            job, changed(app_data, change) if change else app_data, app_name, fl_ctx
        )
        if change:
            meta = dict(message.get_header("job_meta") or {})
            message.set_header("job_meta", meta | {"byoc": True})
        return message

    JobRunner._make_deploy_message = staticmethod(deploy)


def ask_as_others(mine: str, other_site: str, job_id: str) -> dict[str, str]:
    """Send messages that a site's job process may not send; return the answers."""
    from nvflare.apis.shareable import Shareable
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell
    from nvflare.fuel.f3.cellnet.defs import (
        CellChannel,
        CellChannelTopic,
        MessageHeaderKey,
    )
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import CellMessageHeaderKeys, new_cell_message

    cell = CoreCell.ALL_CELLS[f"{mine}.{job_id}"]
    claim, name, heard = "test.claim", CellMessageHeaderKeys.CLIENT_NAME, {}

    def claims(message: Any) -> None:
        """After NVFlare's own, which puts the site's true name there."""
        message.add_headers(message.get_header(claim) or {})

    def hears(message: Any) -> None:
        """Keep what the server proves itself with: it says so in every reply."""
        proof = (
            name,
            CellMessageHeaderKeys.TOKEN,
            CellMessageHeaderKeys.TOKEN_SIGNATURE,
        )
        if message.get_header(name) not in (None, mine):
            heard.update({key: message.get_header(key) for key in proof})

    cell.add_outgoing_request_filter("*", "*", claims)
    cell.add_incoming_reply_filter("*", "*", hears)
    cell.add_incoming_request_filter("*", "*", hears)

    def ask(
        channel: str, topic: str, target: str, body: Any = None, **false: Any
    ) -> str:
        # The server drops what claims to be another's, or is for another.
        is_honest = not false and target in ("server", mine)
        claimed = {name: false["name"]} if "name" in false else false.get("headers", {})
        request = new_cell_message({claim: claimed} if claimed else {}, body)
        reply = cell.send_request(
            channel,
            topic,
            target,
            request,
            timeout=1.5 if is_honest else 0.5,
            optional=True,
        )
        return str(reply.get_header(MessageHeaderKey.RETURN_CODE))

    status = Message(topic="train.check_status", body="")
    main, admin = CellChannel.SERVER_MAIN, CellChannel.CLIENT_MAIN
    beat, task = CellChannelTopic.HEART_BEAT, CellChannelTopic.GET_TASK
    command, job = CellChannel.CLIENT_COMMAND, f"{other_site}.{job_id}"
    answers = {
        "heartbeat": ask(main, beat, "server", Shareable()),
        "heartbeat as another": ask(main, beat, "server", Shareable(), name=other_site),
        "task as another": ask(
            CellChannel.SERVER_COMMAND, task, f"server.{job_id}", None, name=other_site
        ),
        "order to oneself": ask(admin, status.topic, mine, status),
        "order to another": ask(admin, status.topic, other_site, status),
        "order to another's job": ask(command, "check_status", job, Shareable()),
    }
    as_server = {**heard, MessageHeaderKey.ORIGIN: "server"}
    order = Message(topic=FORGED, body="")
    ask(
        admin, FORGED, other_site, order, headers=as_server
    )  # its answer goes to the server
    return answers | {"heard": str(heard.get(name))}


def give_orders() -> None:
    """Let this server give site h1 the orders of a file, and keep what each was
    answered in another: JSON lists of [topic, body, job], and of text."""
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import CellChannel, new_cell_message

    def ask(topic: str, body: str, job: str) -> str | None:
        order = Message(topic=topic, body=body)
        if job:
            order.set_headers(
                {"job_id": job, "job_meta": {"name": "first"}, "app_name": "app"}
            )
        cell, request = CoreCell.ALL_CELLS.get("server"), new_cell_message({}, order)
        to = (CellChannel.CLIENT_MAIN, topic, "h1")
        try:
            reply = cell and cell.send_request(*to, request, timeout=5.0, optional=True)
        except RuntimeError:  # it has just begun
            return None
        return str(reply.payload.body) if reply and reply.payload is not None else None

    def give() -> None:
        while ask("train.check_status", "", "") is None:
            time.sleep(0.5)  # the site is not there yet
        orders = json.loads(Path(os.environ["FEDNOTES_TEST_ORDERS"]).read_text())
        path = Path(os.environ["FEDNOTES_TEST_ANSWERS"])
        path.with_suffix(".part").write_text(
            json.dumps([ask(*order) for order in orders])
        )
        path.with_suffix(".part").rename(path)

    threading.Thread(target=give, daemon=True).start()


def _cell_of(mine: str, job_id: str) -> Any:
    """Return the cell of a site's job process, by which it speaks to the server."""
    from nvflare.fuel.f3.cellnet.cell import Cell
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell

    core = CoreCell.ALL_CELLS[f"{mine}.{job_id}"]
    (cell,) = [
        each
        for each in gc.get_objects()
        if isinstance(each, Cell) and each.core_cell is core
    ]
    return cell


def send_unreadable(mine: str, job_id: str) -> None:
    """Send the server's part of a job what is no result: bytes that cannot be decoded,
    a number, a list in lists, and a result without all that NVFlare adds."""
    from nvflare.apis.fl_constant import ServerCommandNames
    from nvflare.apis.shareable import Shareable
    from nvflare.fuel.f3.cellnet.defs import CellChannel, Encoding
    from nvflare.fuel.f3.message import Message
    from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
    from nvflare.fuel.utils import fobs

    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    payloads = [b"\xc1" * 100, *map(fobs.dumps, (7, nested, Shareable()))]
    for payload in payloads:
        sent = _cell_of(mine, job_id).send_blob(
            CellChannel.SERVER_COMMAND,
            ServerCommandNames.SUBMIT_UPDATE,
            f"server.{job_id}",
            Message({StreamHeaderKey.PAYLOAD_ENCODING: Encoding.FOBS}, payload),
        )
        sent.exception(timeout=10)


def order_the_server(mine: str, other_site: str, job_id: str) -> dict[str, str]:
    """Give the server's processes orders that only they give each other; return the
    answers."""
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import FedEventHeader, ReservedKey
    from nvflare.apis.fl_constant import ServerCommandKey as Key
    from nvflare.apis.shareable import Shareable
    from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
    from nvflare.private.defs import CellMessageHeaderKeys, new_cell_message
    from nvflare.widgets.fed_event import FED_EVENT_TOPIC

    cell = _cell_of(mine, job_id)
    answers: dict[str, str] = {}

    def ask(name: str, channel: str, topic: str, target: str, body: Any) -> None:
        request = new_cell_message({CellMessageHeaderKeys.JOB_ID: job_id}, body)
        reply = cell.send_request(
            channel=channel, topic=topic, target=target, request=request, timeout=0.2
        )
        code = reply.get_header(MessageHeaderKey.RETURN_CODE)
        answers[name] = f"{code} {reply.payload!r:.300}"

    def event(kind: str) -> Shareable:
        request = Shareable()
        request.set_header(FedEventHeader.TIMESTAMP, time.time())
        request.set_header(FedEventHeader.EVENT_TYPE, kind)
        request.set_peer_props({ReservedKey.IDENTITY_NAME: mine})
        return request

    dead, pause, log = Shareable(), Shareable(), Shareable()
    dead.set_header(Key.FL_CLIENT, other_site)
    pause[Key.TOPIC], pause[Key.DATA] = "fednotes.pause", {}
    log.set_header("job_log_config", "CRITICAL")
    job, command = f"server.{job_id}", CellChannel.SERVER_COMMAND
    parent, failed = CellChannel.SERVER_PARENT_LISTENER, {"execution_error": True}
    aux = CellChannel.AUX_COMMUNICATION
    ask("tokens of all sites", parent, "get_clients", "server", {})
    ask("what only the admin may read", command, "app_command", job, pause)
    ask("silence", command, "configure_job_log", job, log)
    ask("another site's death", command, "handle_dead_job", job, dead)
    ask("failure", parent, "update_run_status", "server", failed)
    fatal = event(EventType.FATAL_SYSTEM_ERROR)
    ask("event", aux, FED_EVENT_TOPIC, job, fatal)
    ask("event of the main process", aux, FED_EVENT_TOPIC, "server", fatal)
    ask("end", command, "abort", job, Shareable())
    return answers


def report_failure(mine: str, job_id: str) -> None:
    """Tell the server that this site's process of a job failed, in each way that
    NVFlare knows."""
    from nvflare.fuel.common.exit_codes import ProcessExitCode
    from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic
    from nvflare.private.defs import JobFailureMsgKey, new_cell_message

    cell = _cell_of(mine, job_id)
    for code in (ProcessExitCode.UNSAFE_COMPONENT, ProcessExitCode.EXCEPTION):
        body = {JobFailureMsgKey.JOB_ID: job_id, JobFailureMsgKey.CODE: code}
        cell.send_request(
            channel=CellChannel.SERVER_MAIN,
            topic=CellChannelTopic.REPORT_JOB_FAILURE,
            target="server",
            request=new_cell_message({}, body),
            timeout=5,
        )
