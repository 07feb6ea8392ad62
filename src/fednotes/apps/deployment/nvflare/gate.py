"""Restrict who may send which messages to a kit's processes; NVFlare does not.

- **Certificates.** NVFlare supports one root and no revocation.
  `install_certificate_check` makes it check certificates as `trust.py` does.
  `Connections` closes the server's connections whose certificates were withdrawn, even
  previously accepted ones. `TrustCourier` passes trust lists from one process to
  another.
- **The server.** NVFlare's server accepts a token from anyone who has it. It relays
  messages between members, and its processes obey a member's orders as each other's: a
  member could end or pause a run, declare another site dead, and read the tokens of
  all. `ServerMessageFilter` drops all messages but those that a run needs. NVFlare's
  server also ends a run whose result it cannot decode, or one of whose sites reports a
  failure; `outlive_unreadable_results` and `outlive_reported_failures` prevent that.
  `shorten_debug_texts` keeps a large message from blocking the server, and
  `limit_unfinished_messages` many messages that do not end.
- **Every process.** NVFlare builds objects of some sixty types for whoever sends a
  message, and a run needs six. An object can contain the path of any file of its
  receiver. If NVFlare sends it on, it sends the file: a site would answer a task with
  its notes. NVFlare also writes parts that the sender calls files to a folder in
  `/tmp`, and never deletes them, and fetches data for others. `refuse_odd_parts` makes
  it refuse such messages.
  NVFlare's network manager stops processes and tests their speed and memory for whoever
  asks it to. `refuse_network_orders` makes it refuse.
  For some messages, NVFlare takes as much memory as their first piece announces;
  `take_memory_as_pieces_arrive` bounds it by the pieces.
- **Submissions.** NVFlare's server stores a job with whatever facts its submitter gave
  it, such as a name that is a list, and then fails to list any job.
  `refuse_odd_submissions` makes it accept only facts that `kit.py` writes.
- **A site.** NVFlare's site obeys everyone, and checks rights only if the server asks
  it to. A server could therefore read any file of a site, delete folders of its kit and
  silence its log. `SiteMessageFilter` refuses all requests from other members, and all
  requests from the server that no run needs.
- **Jobs.** NVFlare accepts the signature of any certificate of the project, even the
  server's or a site's. `require_admins_signature` accepts only the admin's.
- **The admin.** NVFlare's server tells the admin's program what each command does. It
  could have it write downloaded files anywhere, and sign a folder that it sent before.
  `limit_transfers` makes it refuse names of files that lead elsewhere, bound the files
  that a person fetches (`permitting_download`), and sign only the job that a person
  hands in (`permitting_upload`).
- **Inside a kit.** NVFlare connects a kit's processes through an unencrypted
  loopback port, where every user of the machine can send messages in any name.
  fednotes uses the socket `KIT/inside/socket` instead, in a folder that is closed to
  others. The operating system reports which account connects. NVFlare finds the
  driver by its scheme, which the kit's `comm_config.json` names.
"""

from __future__ import annotations

import io
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Annotated, Any, ClassVar
from zipfile import BadZipFile, ZipFile, ZipInfo

from annotated_types import MaxLen
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from fednotes.apps.deployment.nvflare.certificates import list_owner_names
from fednotes.apps.deployment.nvflare.kit import INSIDE, can_name_run
from fednotes.apps.deployment.nvflare.processes import JOB_ID, KIT_VARIABLE
from fednotes.apps.deployment.nvflare.trust import (
    Trust,
    drop_expired_roots,
    install_trust,
)
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import FednotesError, RefusedError, needs
from fednotes.core.parsing import as_mapping

with needs("nvflare", "deploy"):
    from cryptography.x509 import load_pem_x509_certificate
    from nvflare.apis.client import Client
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_component import FLComponent
    from nvflare.apis.fl_constant import (
        JobConstants,
        ReservedTopic,
        ServerCommandNames,
    )
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.job_def import JobMetaKey
    from nvflare.apis.shareable import Shareable
    from nvflare.apis.utils.decomposers.flare_decomposers import ContextDecomposer
    from nvflare.fuel.f3.cellnet import cell
    from nvflare.fuel.f3.cellnet import defs as cells
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell, make_reply
    from nvflare.fuel.f3.cellnet.fqcn import FQCN
    from nvflare.fuel.f3.cellnet.net_agent import NetAgent
    from nvflare.fuel.f3.communicator import driver_mgr
    from nvflare.fuel.f3.connection import Connection, ConnState
    from nvflare.fuel.f3.drivers.driver import ConnectorInfo
    from nvflare.fuel.f3.drivers.driver_params import DriverCap
    from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler, SocketConnection
    from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
    from nvflare.fuel.f3.message import Message
    from nvflare.fuel.f3.streaming import blob_streamer, file_downloader
    from nvflare.fuel.f3.streaming.blob_streamer import BlobTask
    from nvflare.fuel.f3.streaming.byte_receiver import READ_TIMEOUT, RxTask
    from nvflare.fuel.f3.streaming.download_service import (
        OBJ_DOWNLOADER_CHANNEL,
        OBJ_DOWNLOADER_TOPIC,
    )
    from nvflare.fuel.f3.streaming.stream_const import (
        STREAM_ACK_TOPIC,
        STREAM_CHANNEL,
        STREAM_DATA_TOPIC,
        STREAM_ERROR_TOPIC,
        StreamHeaderKey,
    )
    from nvflare.fuel.f3.streaming.stream_types import Stream, StreamFuture
    from nvflare.fuel.f3.streaming.stream_utils import FastBuffer
    from nvflare.fuel.hci.client.api_status import APIStatus
    from nvflare.fuel.hci.client.file_transfer import FileTransferModule
    from nvflare.fuel.hci.proto import ProtoKey
    from nvflare.fuel.utils.admin_name_utils import is_valid_admin_client_name
    from nvflare.fuel.utils.buffer_list import ConsumableBufferList
    from nvflare.fuel.utils.class_loader import get_class_name
    from nvflare.fuel.utils.fobs import Decomposer, fobs, lobs
    from nvflare.fuel.utils.fobs.datum import (
        TEN_MEGA,
        Datum,
        DatumManager,
        DatumRef,
        DatumType,
    )
    from nvflare.fuel.utils.fobs.decomposer import (
        DATA_CONTENT,
        DataClassDecomposer,
        DictDecomposer,
        EnumTypeDecomposer,
    )
    from nvflare.lighter import utils
    from nvflare.private.admin_defs import Message as Order
    from nvflare.private.admin_defs import error_reply
    from nvflare.private.defs import RequestHeader, TrainingTopic
    from nvflare.private.fed.client.admin import RequestProcessor
    from nvflare.private.fed.client.admin_commands import AdminCommands
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
    from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
    from nvflare.private.fed.server.job_runner import JobRunner
    from nvflare.private.fed.utils import identity_utils
    from nvflare.private.stream_runner import TOPIC_STREAM_ABORT, TOPIC_STREAM_REQUEST

# Headers of messages: the number of the sender's trust list, and a trust list.
NUMBER_HEADER = "fednotes_trust_number"
TRUST_HEADER = "fednotes_trust"
SUBMITTER = "project_admin"  # the role in a certificate whose signature a job needs
# The topics of the orders that a site's main process obeys.
SITE_TOPICS = frozenset(
    {
        TrainingTopic.CHECK_STATUS,
        TrainingTopic.CHECK_RESOURCE,
        TrainingTopic.CANCEL_RESOURCE,
        TrainingTopic.DEPLOY,
        TrainingTopic.START_JOB,
        TrainingTopic.ABORT,
        TrainingTopic.NOTIFY_JOB_STATUS,
    }
)
# The orders that a job's process obeys on NVFlare's auxiliary channel. Without this
# limit, a server could fire any of NVFlare's events in it.
AUX_TOPICS = frozenset(
    {
        ReservedTopic.END_RUN,
        ReservedTopic.ABORT_ASK,
        ReservedTopic.DO_TASK,
        ReservedTopic.TASK_CHECK,
        ReservedTopic.SYNC_RUNNER,
        ReservedTopic.JOB_HEART_BEAT,
    }
)
# What members ask the server, as (channel, topic): in one message, and in a stream.
MEMBER_MESSAGES = frozenset(
    (channel, topic)
    for channel, topics in {
        cells.CellChannel.SERVER_MAIN: (
            cells.CellChannelTopic.Challenge,
            cells.CellChannelTopic.Register,
            cells.CellChannelTopic.Quit,
            cells.CellChannelTopic.HEART_BEAT,
            cells.CellChannelTopic.REPORT_JOB_FAILURE,
        ),
        cells.CellChannel.CELLNET: (cells.CellChannelTopic.Bye,),
        STREAM_CHANNEL: (STREAM_ACK_TOPIC, STREAM_ERROR_TOPIC),
    }.items()
    for topic in topics
)
# NVFlare checks the rights of whoever gives a command (HCI).
_COMMAND = (cells.CellChannel.HCI, "command")
SITE_STREAMS = frozenset(
    {
        _COMMAND,
        (cells.CellChannel.SERVER_COMMAND, ServerCommandNames.GET_TASK),
        (cells.CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE),
        (cells.CellChannel.AUX_COMMUNICATION, ReservedTopic.TASK_CHECK),
        (cells.CellChannel.AUX_COMMUNICATION, ReservedTopic.SYNC_RUNNER),
        (cells.CellChannel.AUX_COMMUNICATION, ReservedTopic.JOB_HEART_BEAT),
    }
)
# An admin's session, which hands in jobs and fetches results.
PERSON_STREAMS = frozenset(
    {
        _COMMAND,
        (OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC),
        (cells.CellChannel.AUX_COMMUNICATION, TOPIC_STREAM_REQUEST),
        (cells.CellChannel.AUX_COMMUNICATION, TOPIC_STREAM_ABORT),
    }
)
# The commands that a job's process obeys.
JOB_COMMANDS = frozenset({"check_status", "abort", "abort_task", "shutdown"})
# What a job that a server sends may take at a site. A job is a declaration of a few
# kilobytes, and the server runs one at a time.
MAX_JOB_BYTES = 64_000_000
MAX_JOB_FILES = 1_000
MAX_JOBS = 8
# The files of a packed job: its settings, and NVFlare's signatures. A folder `custom`,
# or an archive of this name, would be searched for code.
_JOB_FILE = re.compile(r"config/(?:\w[\w.-]*)?|(?:config/)?\.__nvfl_[\w.]+", re.ASCII)
# What a run that a server sends may take at the admin, packed and unpacked. A run has
# one model, whose tensors travelled in messages of up to 4 GiB, perhaps with frozen
# parts, and its records.
MAX_RESULT_BYTES = 2**34
MAX_RESULT_FILES = 10_000
# The messages of a member whose last piece has not arrived. An honest site sends one or
# two at a time; those of a process that ended count until NVFlare gives them up.
MAX_UNFINISHED = 16
# The part of a message with all but its long values. NVFlare puts each value of
# TEN_MEGA bytes or more in a section of its own, after this part.
MAX_FIRST_SECTION = 2 * TEN_MEGA
MAX_ITEMS = 100_000  # of a list or dictionary in a message, such as the sites of a run
MAX_LOGGED_STRANGERS = 100  # maximum number of strangers; each is logged once
SOCKET = "socket"  # in the folder INSIDE of the kit
_MAX_SOCKET_PATH = 100  # bytes; some systems refuse longer socket paths
_pull_by_nvflare = FileTransferModule.pull_binary_file
_push_by_nvflare = FileTransferModule.push_folder
_unpack_by_nvflare = FileTransferModule._unzip_file
_validate_by_nvflare = JobMetaValidator.validate
_verify_by_nvflare = utils.verify_cert_chain
_msgpack_of_nvflare = fobs.msgpack
_find_stream_by_nvflare = RxTask.find_or_create_task
# Each root whose certificates are checked, and the folder of trusted certificates.
_checked_roots: dict[Any, Path] = {}
logger = logging.getLogger("fednotes.gate")
_header = cells.MessageHeaderKey
_ANSWERS = (cells.MessageType.REPLY, cells.MessageType.RETURN)


def _refuse(reason: str) -> Message:
    """Return the reply that ends a message here."""
    return make_reply(cells.ReturnCode.UNAUTHENTICATED, error=reason)


# ---- certificates --------------------------------------------------------------------


def install_certificate_check(startup: Path) -> None:
    """Make NVFlare in this process accept only currently valid certificates.

    Expired roots are removed from the kit.

    Args:
        startup: The kit's folder with the certificates that it trusts.
    """
    drop_expired_roots(startup.parent)
    for root in Trust.read(startup).roots:
        _checked_roots[root] = startup.resolve()
    utils.verify_cert_chain = _verify_certificate
    identity_utils.verify_cert_chain = _verify_certificate


def _verify_certificate(
    leaf_cert: Any,
    intermediate_certs: Sequence[Any] | None,
    root_ca_cert: Any,
    now: Any = None,
) -> None:
    """Verify a certificate, in place of NVFlare's function with the same arguments.

    Raises:
        ValueError: The certificate is not accepted.
    """
    startup = _checked_roots.get(root_ca_cert)
    if startup is None:
        _verify_by_nvflare(leaf_cert, intermediate_certs, root_ca_cert, now)
        return
    problem = Trust.read(startup).find_problem(leaf_cert, intermediate_certs or ())
    if problem is not None:
        names = ", ".join(list_owner_names(leaf_cert))
        logger.error("the certificate of %s %s", names, problem)
        raise ValueError(f"the certificate {problem}")


_parse_certificate = lru_cache(maxsize=256)(load_pem_x509_certificate)


class Connections:
    """Closes the server's connections whose certificates were withdrawn.

    Args:
        startup: The folder of the server's kit with the certificates that it trusts.
        core: NVFlare's core of the server's main process.
    """

    def __init__(self, startup: Path, core: CoreCell) -> None:
        self._startup = startup
        self._manager = core.communicator.conn_manager
        self._pass_on = self._manager.state_change
        self._manager.state_change = self._on_state_change
        core.add_incoming_filter("*", "*", self.refuse_withdrawn)
        self.close_withdrawn()

    def close_withdrawn(self) -> None:
        """Close the connections whose certificates were withdrawn since they opened."""
        for name in list(self._manager.sfm_endpoints):
            # If a connection ends during the check, the others are still checked.
            with suppress(Exception):
                self._close_withdrawn_of(name)

    def refuse_withdrawn(self, message: Message) -> Message | None:
        """Return a refusal of a message with a withdrawn certificate, or None."""
        endpoint = message.get_prop(cells.MessagePropKey.ENDPOINT)
        if self._close_withdrawn_of(getattr(endpoint, "name", "")):
            return _refuse("the certificate was withdrawn")
        return None

    def _close_withdrawn_of(self, name: str) -> bool:
        """Close an endpoint's withdrawn connections; return whether it had any."""
        withdrawn_connections = [
            handle.conn
            for handle in self._manager.get_connections(name) or ()
            if self._is_withdrawn(handle.conn)
        ]
        for connection in withdrawn_connections:
            connection.close()
        return bool(withdrawn_connections)

    def _on_state_change(self, connection: Connection) -> None:
        """Close a new connection with a withdrawn certificate; accept all others."""
        if connection.state == ConnState.CONNECTED and self._is_withdrawn(connection):
            connection.close()
        else:
            self._pass_on(connection)

    def _is_withdrawn(self, connection: Connection) -> bool:
        """Return whether a connection has a withdrawn certificate.

        TLS accepts such certificates. A connection without a certificate comes from
        this machine.
        """
        pem = _get_certificate(connection)
        if not pem:
            return False
        certificate = _parse_certificate(pem)
        try:
            withdrawal = Trust.read(self._startup).find_withdrawal(certificate)
            problem = None if withdrawal is None else str(withdrawal)
        except FednotesError as error:
            # Without a readable trust list, accept nobody.
            problem = f"cannot be checked: {error}"
        if problem is None:
            return False
        names = ", ".join(list_owner_names(certificate))
        logger.error("closed a connection from %s: its certificate %s", names, problem)
        return True


def _get_certificate(connection: Connection) -> bytes:
    """Return the certificate that a peer presented in TLS, in PEM; b"" if none."""
    context = getattr(connection, "context", None)
    if not context:
        return b""
    certificates = context.auth_context().get("x509_pem_cert")
    return bytes(certificates[0]) if certificates else b""


class TrustCourier:
    """Passes trust lists between a kit's process and others.

    Each message names the sender's list. A receiver with a newer list sends it in its
    answer.

    Args:
        kit: The kit's folder.
    """

    def __init__(self, kit: Path) -> None:
        self._kit = kit
        self._numbers: dict[str, int] = {}  # participant -> number of its newest list

    def attach(self, message: Message, receiver: str) -> None:
        """Add to a message the number of this kit's list, and the list if needed.

        Args:
            message: A message that is about to leave.
            receiver: The participant that receives it.
        """
        try:
            trust = Trust.read(self._kit / "startup")
        except FednotesError:
            return
        message.set_header(NUMBER_HEADER, trust.number)
        if self._numbers.get(receiver, trust.number) < trust.number:
            newest_root = trust.roots[-1:]
            trust_list = Trust(newest_root, trust.bridges, trust.revocations)
            message.set_header(TRUST_HEADER, trust_list.encode())

    def receive(self, message: Message, sender: str) -> None:
        """Record the number in a message, and install its list if newer.

        Args:
            message: A message that has arrived.
            sender: The participant that sent it, by its certificate.
        """
        number = message.get_header(NUMBER_HEADER)
        trust_list = message.get_header(TRUST_HEADER)
        if not isinstance(number, int):
            return
        self._numbers[sender] = number
        try:
            is_newer = number > Trust.read(self._kit / "startup").number
            if not is_newer or not isinstance(trust_list, bytes):
                return
            if install_trust(self._kit, trust_list):
                logger.info("installed a newer trust list, which %s sent", sender)
        except Exception as error:
            logger.warning(
                "the trust list that %s sent was not installed: %s", sender, error
            )


# ---- messages of members -------------------------------------------------------------


def outlive_reported_failures() -> None:
    """Keep the runs of the server going when a site reports that its process failed.

    NVFlare ends the run of all sites. With the code of a forbidden component, it even
    marks the run as aborted by a person, so that it is never handed in again. Instead,
    the site counts as lost once its process is silent: whether a run can go on without
    it, the run decides itself.
    """
    JobRunner.is_client_outcome_pending = _note_ended_process


def _require_run_name(name: str) -> str:
    """Return a name; raise ValueError unless it can be that of a run."""
    if not can_name_run(name):
        raise ValueError("no run can have this name")
    return name


class _SubmittedFacts(BaseModel):
    """The facts of a job in its `meta.json`, as `kit.write_job_folder` writes them.

    Attributes:
        name: The name of the run.
        resource_spec: Nothing.
        min_clients: The fewest sites with which the job begins.
        deploy_map: The sites and the server, by the name of the job's app.
        byoc: Whether the job has code; NVFlare sets it, and refuses such a job later.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, AfterValidator(_require_run_name)]
    resource_spec: Annotated[dict[str, Any], MaxLen(0)]
    min_clients: int
    deploy_map: dict[str, list[str]]
    byoc: bool = False


def refuse_odd_submissions() -> None:
    """Make the server store only jobs that a run needs, whoever submits them."""
    JobMetaValidator.validate = _validate_submission


def _validate_submission(
    validator: JobMetaValidator, job_name: str, job_data: bytes | str
) -> tuple[bool, str, dict[str, Any]]:
    """Validate a job, in place of NVFlare's function with the same arguments.

    `zipfile` unpacks no more bytes of a file than the archive's directory says.

    Returns:
        Whether the job is accepted, why it is not, and its facts.
    """
    archive = io.BytesIO(job_data) if isinstance(job_data, bytes) else job_data
    try:
        with ZipFile(archive) as packed:
            problem = _find_excess(packed.infolist())
    except (BadZipFile, OSError, ValueError, NotImplementedError):
        problem = "the job cannot be unpacked"
    if problem:
        return False, problem, {}
    is_valid, error, facts = _validate_by_nvflare(validator, job_name, job_data)
    if is_valid:
        try:
            _SubmittedFacts.model_validate(facts)
        except ValidationError as invalid:
            place = ".".join(map(str, invalid.errors()[0]["loc"]))
            error = (
                f"meta.json: {clean(place, NAME)!r} is not what a run needs: submit "
                "the job with fednotes run"
            )
            is_valid = False
    return is_valid, error, facts


def _note_ended_process(runner: JobRunner, job_id: str, client_name: str) -> bool:
    """Note that a site's process of a job has ended, however it ended.

    NVFlare asks this before it lets a site's report decide about a run.

    Returns:
        False, which tells NVFlare that no report is awaited, so that it ignores this
        one.
    """
    with runner.lock:
        pending = runner._pending_client_outcomes.get(job_id, set())
        is_pending = client_name in pending
        pending.discard(client_name)
    if is_pending:
        logger.info("%s reports that its process of job %s ended", client_name, job_id)
    return False


class ServerMessageFilter(FLComponent):
    """Makes the server's main process drop messages that a member may not send.

    A member may not send a message in another's name. NVFlare identifies senders by
    token alone, and the server's own token is in messages that every member receives.
    Nor may a member send what no run needs: NVFlare's processes obey orders of members
    that they should only take from each other.
    """

    def __init__(self) -> None:
        super().__init__()
        outlive_reported_failures()
        refuse_odd_submissions()
        limit_unfinished_messages()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Install the filter when the server starts."""
        if event_type == EventType.SYSTEM_START:
            core = fl_ctx.get_engine().get_cell().core_cell
            core.add_incoming_filter("*", "*", self.refuse_unneeded)

    def refuse_unneeded(self, message: Message) -> Message | None:
        """Return a refusal for a message that its sender may not send; otherwise None.

        For a connection from outside, TLS provides the name in the certificate. An
        admin's session has a name of its own, which NVFlare does not give to sites.
        """
        certified_name = message.get_prop(cells.MessagePropKey.COMMON_NAME)
        if certified_name in (None, "", "N/A"):
            # A job's process sent it through the kit's own socket (`KitSocketDriver`).
            return None
        origin = str(message.get_header(_header.ORIGIN) or "")
        member, _, _ = origin.partition(".")  # a job's process appends the job's id
        endpoint = message.get_prop(cells.MessagePropKey.ENDPOINT)
        endpoint_name = getattr(endpoint, "name", None)
        is_own_session = is_valid_admin_client_name(origin) and origin == endpoint_name
        is_own_name = is_own_session or member == certified_name
        if not is_own_name:
            logger.error(
                "dropped a message that %s sent in the name of %.80r",
                certified_name,
                origin,
            )
            return _refuse("this sender may not send this message")
        # Only certificates of people have an e-mail address as their name.
        streams = PERSON_STREAMS if "@" in str(certified_name) else SITE_STREAMS
        if _is_needed(message, streams):
            return None
        logger.error(
            "dropped an order of %s: %.80r",
            certified_name,
            _get_channel_and_topic(message),
        )
        return _refuse("this sender may not send this message")


def _is_part_of_stream(message: Message) -> bool:
    """Return whether a message is a piece of a stream."""
    channel = message.get_header(_header.CHANNEL)
    topic = message.get_header(_header.TOPIC)
    return bool((channel, topic) == (STREAM_CHANNEL, STREAM_DATA_TOPIC))


def _get_channel_and_topic(message: Message) -> tuple[str, str]:
    """Return the channel and the topic of a message, or of the stream it is part of."""
    channel_header = _header.CHANNEL
    topic_header = _header.TOPIC
    if _is_part_of_stream(message):
        channel_header = StreamHeaderKey.CHANNEL
        topic_header = StreamHeaderKey.TOPIC
    channel = message.get_header(channel_header)
    topic = message.get_header(topic_header)
    return str(channel or ""), str(topic or "")


def _is_needed(message: Message, streams: Collection[tuple[str, str]]) -> bool:
    """Return whether a run needs a message of a member.

    Args:
        message: The message.
        streams: The channels and topics of the streams that this member sends.
    """
    if message.get_header(_header.MSG_TYPE) in _ANSWERS:
        return True  # NVFlare drops an answer for which there is no request
    receiver = str(message.get_header(_header.DESTINATION) or "")
    if receiver.partition(".")[0] != FQCN.ROOT_SERVER:
        return False
    name = _get_channel_and_topic(message)
    if not _is_part_of_stream(message):
        return name in MEMBER_MESSAGES
    channel, _ = name
    return channel == cells.CellChannel.RETURN_ONLY or name in streams


def outlive_unreadable_results() -> None:
    """Keep the server's process of a job when it cannot decode a site's result.

    NVFlare ends the process, and with it the run of all sites. Instead, the site's
    result counts as not received.
    """
    cell._is_server_job_cell = lambda _: False


def shorten_debug_texts() -> None:
    """Leave the bytes of received messages out of the lines of NVFlare's debug log.

    NVFlare builds these lines even if that log is off. A message of 120 MB would become
    a text of 400 MB, which no other thread can interrupt.
    """
    ConsumableBufferList.__repr__ = lambda chunks: f"<{len(chunks)} chunks>"


class _Facts(DataClassDecomposer):
    """Decodes an object of a class with exactly its own attributes.

    NVFlare's decomposer would set any attribute that the sender names.

    Args:
        data_type: The class.
        attributes: The names of its attributes.
    """

    def __init__(self, data_type: type, *attributes: str) -> None:
        super().__init__(data_type)
        self._attributes = frozenset(attributes)

    def recompose(self, data: Any, manager: Any = None) -> Any:
        """Return the object.

        Raises:
            ValueError: The message does not contain exactly the attributes.
        """
        facts = data.get(DATA_CONTENT) if isinstance(data, dict) else None
        if (
            not isinstance(facts, dict)
            or len(data) != 1
            or facts.keys() != self._attributes
        ):
            raise ValueError("the message has an object with unexpected attributes")
        return super().recompose(data, manager)


class _SeparateValue(_Facts):
    """Decodes a reference to a value of 10 MB or more, which follows the message.

    The value takes the reference's place at once.
    """

    def __init__(self) -> None:
        super().__init__(DatumRef, "datum_id", "unwrap")

    def recompose(self, data: Any, manager: Any = None) -> Any:
        """Return the value.

        Raises:
            ValueError: The reference is to the object around the value, which a site
                would keep, or to no value.
        """
        reference = super().recompose(data)
        is_known = isinstance(reference.datum_id, str) and manager is not None
        datum = manager.get_datum(reference.datum_id) if is_known else None
        if datum is None or reference.unwrap is not True:
            raise ValueError("the message refers to a value that it does not contain")
        return datum.value


# The types of objects in the messages of a run, by name. They are harmless in every
# process, so there is one list for all: no object of them does anything by itself.
_DECOMPOSERS: dict[str, Decomposer] = {
    get_class_name(decomposer.supported_type()): decomposer
    for decomposer in (
        # A dictionary: tasks, results, and what sites and the server ask each other.
        DictDecomposer(Shareable),
        # The facts of the sender's process, such as its name and its run: when a site
        # registers, asks for a task or sends a result.
        ContextDecomposer(),
        # An order of the server to a site's main process, and the answer.
        _Facts(Order, "id", "topic", "body", "headers"),
        # The sites of a run, which the server's main process tells the run's process.
        _Facts(Client, "name", "token", "last_connect_time", "props"),
        # A key of the facts of a job, in the order to start it.
        EnumTypeDecomposer(JobMetaKey),
        # An update or parameters of 10 MB or more.
        _SeparateValue(),
    )
}


class _BoundedMsgpack:
    """Decodes the part of a message with all but its long values, in place of msgpack.

    One byte of a message can become an object of 64 bytes, and five bytes can announce
    a list of millions of items, for which msgpack takes memory at once.
    """

    packb = staticmethod(_msgpack_of_nvflare.packb)

    @staticmethod
    def unpackb(data: Any, **options: Any) -> Any:
        """Decode a message, as `msgpack.unpackb` does.

        Raises:
            ValueError: The message is too long, or has a list that is too long.
        """
        if len(data) > MAX_FIRST_SECTION:
            raise ValueError(
                f"a message has {len(data):,} bytes apart from long values"
            )
        return _msgpack_of_nvflare.unpackb(
            data, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, **options
        )


def refuse_odd_parts() -> None:
    """Make this process refuse messages with parts that no run needs.

    NVFlare knows some sixty types of objects, whose modules it loads when a message
    names them. Some have effects: a datum that a sender made has a path of the sender's
    choice, and NVFlare reads this file when it sends the datum on, as a site does with
    the cookies of a task. A decomposer of arrays fetches data from wherever the message
    says. Only the types in `_DECOMPOSERS` are decoded.

    NVFlare would also write a part that the sender calls a file to a folder that other
    users of the machine may have created, under a name of the sender's choice, and keep
    it. For a part with an object type, it would fetch data.

    Nor does this process send a file in a message.
    """
    # NVFlare encodes with them too, and registers its own only if there are none.
    fobs._decomposers.update(_DECOMPOSERS)
    fobs.Packer.unpack = _decode_object
    fobs.msgpack = _BoundedMsgpack
    DatumManager.add_datum = _add_datum
    lobs.get_datum_dir = _refuse_file
    lobs.get_dot_handler = lambda _: None  # NVFlare then refuses the message


def _decode_object(packer: Any, encoded: Any) -> Any:
    """Decode an object in a message, in place of NVFlare's method.

    The inner objects are already decoded. NVFlare would search the whole content of
    each object for references, so a message of nested objects would take very long.

    Args:
        packer: Decodes one message.
        encoded: A dictionary in the message, which may describe an object.

    Raises:
        ValueError: No run needs an object of this type.
    """
    if fobs.FOBS_TYPE not in encoded:
        return encoded
    name = encoded[fobs.FOBS_TYPE]
    decomposer = _DECOMPOSERS.get(name) if isinstance(name, str) else None
    if decomposer is None:
        type_name = clean(name, NAME)
        raise ValueError(f"the message contains a {type_name}, which no run needs")
    data = encoded.get(fobs.FOBS_DATA)
    manager = packer.manager if isinstance(decomposer, _SeparateValue) else None
    return decomposer.recompose(data, manager)


def _add_datum(manager: DatumManager, datum: Datum) -> None:
    """Add a separate part to a message, in place of NVFlare's method.

    Raises:
        ValueError: The part is a file.
    """
    if datum.datum_type == DatumType.FILE:
        _refuse_file()
    manager.datums[datum.datum_id] = datum


def _refuse_file() -> str:
    """Refuse a part that is a file, in place of NVFlare's choice of a folder for it.

    Raises:
        ValueError: Always.
    """
    raise ValueError("a part of the message is a file, which no run needs")


def limit_unfinished_messages() -> None:
    """Drop further messages of a member that has `MAX_UNFINISHED` unfinished ones.

    NVFlare reads messages in a fixed number of threads, each of which waits minutes for
    the next piece. Without a limit, a member could occupy all of them with messages of
    one piece, so that the server would receive nothing from anyone.
    """
    RxTask.find_or_create_task = _find_stream


def _find_stream(message: Message, cell: CoreCell) -> RxTask | None:
    """Return the message that a piece belongs to, in place of NVFlare's function.

    Returns:
        The message; None if the piece is dropped.
    """
    origin = str(message.get_header(_header.ORIGIN) or "")
    number = message.get_header(StreamHeaderKey.STREAM_ID)
    member, _, _ = origin.partition(".")  # a job's process appends the job's id
    with RxTask.map_lock:
        is_new = (origin, number) not in RxTask.rx_task_map
        if is_new and _count_unfinished(member) >= MAX_UNFINISHED:
            logger.error(
                "dropped a message from %.80r, which has %d unfinished messages",
                member,
                MAX_UNFINISHED,
            )
            return None
    stream: RxTask | None = _find_stream_by_nvflare(message, cell)
    if is_new and stream is not None:
        stream.begun = time.monotonic()
    return stream


def _count_unfinished(member: str) -> int:
    """Return the number of a member's messages whose last piece has not arrived.

    Messages without a first piece, which NVFlare would keep, are given up as late as
    others.
    """
    number = 0
    for key, stream in list(RxTask.rx_task_map.items()):
        if str(key[0]).partition(".")[0] != member or stream.completed or stream.failed:
            continue
        age = time.monotonic() - getattr(stream, "begun", time.monotonic())
        if stream.stream_future is None and age > READ_TIMEOUT:
            del RxTask.rx_task_map[key]
        else:
            number += 1
    return number


def refuse_network_orders() -> None:
    """Make NVFlare's network manager in this process refuse all requests.

    With them, a server could end a site's process, or make it and the admin's program
    take any amount of memory for a test of the network.
    """
    for name in list(vars(NetAgent)):
        if name.startswith("_do_"):
            setattr(NetAgent, name, _refuse_network_order)


def _refuse_network_order(_agent: NetAgent, _request: Message) -> Message:
    """Refuse a request, in place of NVFlare's method with the same arguments."""
    return _refuse("no run needs this")


class _GrowingTask(BlobTask):
    """Receives a message into memory that grows with its pieces.

    NVFlare's task does so only for encoded objects. For others, it would first take as
    much memory as the sender announces.
    """

    def __init__(
        self,
        future: StreamFuture,
        stream: Stream,
        max_size: int = 0,
        *,
        preserve_chunks: bool = False,
    ) -> None:
        super().__init__(future, stream, max_size, preserve_chunks=True)
        if not preserve_chunks:
            self.preserve_chunks = False
            self.buffer = FastBuffer()


def take_memory_as_pieces_arrive() -> None:
    """Make this process take no memory for a message before its pieces arrive."""
    blob_streamer.BlobTask = _GrowingTask


def obey_only_the_server(fl_ctx: FLContext) -> None:
    """Make this site's process refuse every request from another member.

    The process also refuses requests of the server on the auxiliary channel, unless a
    run needs them.

    The sender itself states its name (the origin of the message). The server compares
    this name with the sender's certificate before it relays a message
    (`ServerMessageFilter`).
    """
    site = str(fl_ctx.get_identity_name())
    strangers: set[str] = set()

    def refuse_unneeded(message: Message) -> Message | None:
        """Return a refusal of a request; None if it is permitted."""
        origin = str(message.get_header(_header.ORIGIN) or "")
        member, _, _ = origin.partition(".")  # a job's process appends the job's id
        if member in ("server", site):
            channel, topic = _get_channel_and_topic(message)
            is_aux = channel == cells.CellChannel.AUX_COMMUNICATION
            if not is_aux or topic in AUX_TOPICS:
                return None
            return _refuse("no run needs this")
        if origin not in strangers and len(strangers) < MAX_LOGGED_STRANGERS:
            strangers.add(origin)
            logger.error(
                "refused a request from %.80r: only the server may send requests",
                origin,
            )
        return _refuse("only the server gives orders")

    core = fl_ctx.get_engine().get_cell().core_cell
    core.add_incoming_request_filter("*", "*", refuse_unneeded)


class _OrderCheck(RequestProcessor):
    """Passes an order on to NVFlare only if it cannot harm the site.

    NVFlare deletes the folder of a job in the kit before the job is deployed. Without a
    check of the job's id, a server could make it delete the folder `rules`, `state` or
    `startup`. NVFlare also unpacks a job before it checks the signature, and starts a
    process for each job that the server names.

    NVFlare unpacks code into a folder from which the job's process imports, before it
    finds that the job may have none. A process that started at this moment would run
    the code. A job with code is therefore not unpacked, and a job that is running, or
    about to start, is not replaced: otherwise, its process could read a job other than
    the one whose signature it has checked. NVFlare also lets the process import from
    the folder of the job that the facts of the order name, which must be the same job.

    Args:
        inner: NVFlare's processor of the order.
    """

    # Held from the check of an order until NVFlare has processed it: the running jobs
    # must not change in between.
    _lock: ClassVar = threading.Lock()

    def __init__(self, inner: RequestProcessor) -> None:
        self._inner = inner

    def get_topics(self) -> list[str]:
        """Return the topics of the orders that are processed."""
        return list(self._inner.get_topics())

    def process(self, req: Order, app_ctx: Any) -> Order:
        """Process an order, and return NVFlare's reply or the reason for a refusal.

        Args:
            req: The order.
            app_ctx: NVFlare's engine of the site.
        """
        job = req.get_header(RequestHeader.JOB_ID)
        if job is not None and not JOB_ID.fullmatch(str(job)):
            logger.error(
                "refused an order from the server for %.80r: it does not name a job",
                str(job),
            )
            return error_reply("it does not name a job")
        if req.topic not in (TrainingTopic.DEPLOY, TrainingTopic.START_JOB):
            return self._inner.process(req, app_ctx)
        with self._lock:
            running_jobs = app_ctx.get_all_job_ids()
            problem = ""
            is_deployment = req.topic == TrainingTopic.DEPLOY
            facts = as_mapping(req.get_header(RequestHeader.JOB_META))
            if facts.get(JobConstants.JOB_ID) != job:
                problem = "the facts of the job name another job"
            elif is_deployment and job in running_jobs:
                problem = "the job is already running"
            elif is_deployment:
                problem = _find_fault(req.body)
            elif len(running_jobs) >= MAX_JOBS:
                problem = f"{len(running_jobs)} jobs are already running"
            if problem:
                logger.error("refused an order from the server: %s", problem)
                return error_reply(problem)
            return self._inner.process(req, app_ctx)


def _find_fault(archive: Any) -> str:
    """Return why a packed job may not be unpacked; "" if it may.

    `zipfile` unpacks no more bytes of a file than the archive's directory says.
    """
    if not isinstance(archive, bytes | bytearray):
        return "it contains no job"
    try:
        with ZipFile(io.BytesIO(archive)) as packed:
            files = packed.infolist()
    except (BadZipFile, ValueError, NotImplementedError):
        return "the job cannot be unpacked"
    excess = _find_excess(files)
    if excess:
        return excess
    for file in files:
        if not _JOB_FILE.fullmatch(file.filename):
            name = clean(file.filename, NAME)
            return f"the job has a file that no run needs, which may be code: {name}"
    return ""


def _find_excess(files: Sequence[ZipInfo]) -> str:
    """Return that a packed job has too many files or bytes; "" if it has not."""
    size = sum(file.file_size for file in files)
    if size > MAX_JOB_BYTES or len(files) > MAX_JOB_FILES:
        return f"the job has {len(files):,} files of {size:,} bytes"
    return ""


def limit_orders() -> None:
    """Make this process obey only the orders that a run needs, whoever sends them.

    Replaces the contents of NVFlare's lists in place. A site's main process then checks
    that an order which names a job gives a valid id. Calling this again changes
    nothing.
    """
    processors = ClientRequestProcessors.request_processors
    permitted = [
        each for each in processors if SITE_TOPICS.issuperset(each.get_topics())
    ]
    processors[:] = [
        each if isinstance(each, _OrderCheck) else _OrderCheck(each)
        for each in permitted
    ]
    commands = AdminCommands.commands
    commands[:] = [each for each in commands if each.get_command_name() in JOB_COMMANDS]


class SiteMessageFilter(FLComponent):
    """Makes a site's main process obey only the server's orders that a run needs."""

    def __init__(self) -> None:
        super().__init__()
        limit_orders()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Install the filter when the site starts."""
        if event_type == EventType.SYSTEM_START:
            obey_only_the_server(fl_ctx)


def require_admins_signature(app: Path, root: Path) -> None:
    """Require that the project's admin signed every file of a job's folder.

    A run that the watch resubmits keeps the signature of its first submission.

    Args:
        app: The job's folder.
        root: The file of the project's roots in the kit.

    Raises:
        RefusedError: A signature is missing, is not valid, or is not the admin's.
    """
    install_certificate_check(root.parent)
    is_signed, signers = utils.verify_folder_signature_and_get_signers(
        str(app), str(root)
    )
    if not is_signed or not signers:
        raise RefusedError(
            "the job's signature is not valid: it must be submitted again"
        )
    for name, _, role in signers:
        if role != SUBMITTER:
            raise RefusedError(
                f"the job was signed by {name!r}, who is not an admin of the project"
            )


# ---- the admin's transfers -----------------------------------------------------------

# The job folders that a person hands in at this moment.
_permitted_uploads: set[str] = set()
# The downloads that a person waits for at this moment.
_permitted_downloads: list[Download] = []


@dataclass(slots=True)
class Download:
    """What the server may still send while a run's files are fetched.

    Attributes:
        bytes_left: Bytes of files, as they are sent.
        unpacked_left: Bytes of files, once they are unpacked.
        files_left: Number of files, both as they are sent and once they are unpacked.
    """

    bytes_left: int = MAX_RESULT_BYTES
    unpacked_left: int = MAX_RESULT_BYTES
    files_left: int = MAX_RESULT_FILES

    def receive(self, size: int) -> None:
        """Count bytes of a file that arrived; raise ValueError beyond the limit."""
        self.bytes_left -= size
        if self.bytes_left < 0:
            raise _make_size_error(
                f"the server sends more than {MAX_RESULT_BYTES:,} bytes"
            )

    def unpack(self, archive: str) -> None:
        """Count the content of an archive; raise ValueError beyond a limit.

        `zipfile` unpacks no more bytes of a file than the archive's directory says.
        """
        with ZipFile(archive) as packed:
            files = packed.infolist()
        size = sum(file.file_size for file in files)
        self.unpacked_left -= size
        self.files_left -= len(files)
        if self.unpacked_left < 0 or self.files_left < 0:
            raise _make_size_error(
                f"the run has {len(files):,} files of {size:,} bytes, more than "
                f"{MAX_RESULT_FILES:,} files or {MAX_RESULT_BYTES:,} bytes"
            )


def _make_size_error(problem: str) -> ValueError:
    """Return the error that ends a download, and log it: NVFlare hides some errors."""
    logger.error("a run was not fetched: %s", problem)
    return ValueError(problem)


class _BoundedConsumer(file_downloader._ChunkConsumer):
    """Writes a file that the server sends, as long as the download permits."""

    def consume(self, ref_id: str, state: dict[str, Any], data: Any) -> dict[str, Any]:
        """Write a chunk of the file, unless it is beyond what the download permits."""
        _permitted_downloads[-1].receive(len(data))  # raises beyond the limit
        result: dict[str, Any] = super().consume(ref_id, state, data)
        return result


def limit_transfers() -> None:
    """Make this process transfer only what its person means to.

    Downloads are written into one folder. The server names the files and part of the
    folder, and NVFlare joins the names to a path as they are, so a server could
    overwrite any file of the person who fetches a run. Files are downloaded only within
    `permitting_download`, which bounds them: the server names the commands that
    download, so it could fill the disk with the answer to a status query.

    Only folders of `permitting_upload` are signed and sent. The server names the
    commands that send a folder, so it could make a status query one of them, and get a
    job of its own signed by the admin.
    """
    FileTransferModule.pull_binary_file = _pull_permitted
    FileTransferModule.push_folder = _push_permitted
    FileTransferModule._unzip_file = staticmethod(_unpack_permitted)
    file_downloader._ChunkConsumer = _BoundedConsumer


@contextmanager
def permitting_upload(folder: str) -> Iterator[None]:
    """Let NVFlare sign and send a job's folder while the context is open."""
    _permitted_uploads.add(folder)
    try:
        yield
    finally:
        _permitted_uploads.discard(folder)


@contextmanager
def permitting_download() -> Iterator[None]:
    """Let NVFlare download the files of one run while the context is open."""
    _permitted_downloads.append(Download())
    try:
        yield
    finally:
        _permitted_downloads.pop()


def _push_permitted(
    module: FileTransferModule, args: Sequence[str], ctx: Any
) -> dict[str, Any]:
    """Send a signed folder, in place of NVFlare's function with the same arguments."""
    if set(args[1:2]) <= _permitted_uploads:
        sent: dict[str, Any] = _push_by_nvflare(module, args, ctx)
        return sent
    logger.error("the server asked for the folder %.80r, which was not sent", args[1])
    return _refuse_transfer(
        "the server asked for a folder that this command does not send"
    )


def _pull_permitted(
    module: FileTransferModule, args: Sequence[str], ctx: Any
) -> dict[str, Any]:
    """Download a file, in place of NVFlare's function with the same arguments."""
    if not _permitted_downloads:
        logger.error("the server sent a file that nobody fetches")
        return _refuse_transfer("the server sends a file that nobody fetches")
    download = _permitted_downloads[-1]
    download.files_left -= 1
    if download.files_left < 0:
        return _refuse_transfer(f"the run has more than {MAX_RESULT_FILES:,} files")
    # NVFlare passes the command, the sender, the transfer, the reference, the folder
    # and the file. It joins the transfer, the folder and the file to a path.
    folders = (*args[2:3], *args[4:5])
    files = args[5:6]
    odd = [name for name in folders if not _is_plain_name(name)]
    odd += [path for path in files if not all(map(_is_plain_name, path.split("/")))]
    if not odd:
        downloaded: dict[str, Any] = _pull_by_nvflare(module, args, ctx)
        return downloaded
    logger.error("the server's file %.80r was not downloaded", odd[0])
    return _refuse_transfer(
        f"the name of a file, {clean(odd[0], NAME)!r}, leads to another folder"
    )


def _unpack_permitted(api: Any, file_path: str) -> None:
    """Unpack a file, in place of NVFlare's function with the same arguments.

    Raises:
        ValueError: The file unpacks to more than the download permits.
    """
    _permitted_downloads[-1].unpack(file_path)
    _unpack_by_nvflare(api, file_path)


def _refuse_transfer(problem: str) -> dict[str, Any]:
    """Return the result of a transfer that was refused."""
    return {ProtoKey.STATUS: APIStatus.ERROR_RUNTIME, ProtoKey.DETAILS: problem}


def _is_plain_name(name: str) -> bool:
    """Return whether a name is one of a file in a folder, on any system."""
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


# ---- the connection inside a kit -----------------------------------------------------


@contextmanager
def shortening_socket_path(folder: Path) -> Iterator[str]:
    """Yield a path of the socket in a folder, short enough for the system.

    The path is valid only while the context is open.
    """
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


class _Listener(ThreadingUnixStreamServer):
    """The main process's end of the socket.

    Attributes:
        ssl_context: None; NVFlare's handler reads it.

    Args:
        driver: The driver that gets the connections.
        connector: NVFlare's facts about the driver.
        folder: The folder of the socket.
    """

    ssl_context = None

    def __init__(
        self, driver: KitSocketDriver, connector: ConnectorInfo, folder: Path
    ) -> None:
        self.driver = driver
        self.connector = connector
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        # A killed process leaves its socket.
        (folder / SOCKET).unlink(missing_ok=True)
        with shortening_socket_path(folder) as address:
            super().__init__(address, ConnectionHandler)

    def verify_request(
        self,
        request: Any,
        client_address: Any,  # noqa: ARG002 - the base class's signature
    ) -> bool:
        """Return whether the peer has this process's account.

        If the system does not report the account, the folder's permissions must
        suffice.
        """
        if not hasattr(socket, "SO_PEERCRED"):
            return True
        credentials = request.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            logger.error(
                "user %d of this machine was refused at the inner socket", user
            )
        return bool(user == os.getuid())


class KitSocketDriver(TcpDriver):
    """NVFlare's driver for streams, over the kit's own socket."""

    @staticmethod
    def supported_transports() -> list[str]:
        """Return the scheme of the driver's addresses."""
        return [INSIDE]

    @staticmethod
    def capabilities() -> dict[str, Any]:
        """Return the driver's capabilities: it sends heartbeats, and has no TLS."""
        return {
            DriverCap.SEND_HEARTBEAT.value: True,
            DriverCap.SUPPORT_SSL.value: False,
        }

    @staticmethod
    def get_urls(
        scheme: str,
        resources: dict[str, Any],  # noqa: ARG004 - NVFlare's signature
    ) -> tuple[str, str]:
        """Return the addresses of both ends, which are equal: a process has one kit."""
        return f"{scheme}://kit", f"{scheme}://kit"

    def listen(self, connector: ConnectorInfo) -> None:
        """Serve the kit's socket until `shutdown`."""
        self.connector = connector
        self.server = _Listener(self, connector, _get_socket_folder())
        self.server.serve_forever()

    def connect(self, connector: ConnectorInfo) -> None:
        """Connect to the kit's main process, and read until the connection ends."""
        self.connector = connector
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with shortening_socket_path(_get_socket_folder()) as address:
            stream.connect(address)
        connection = SocketConnection(stream, connector)
        self.add_connection(connection)
        connection.read_loop()
        self.close_connection(connection)


def _get_socket_folder() -> Path:
    """Return the folder of the socket in the kit of this process."""
    return Path(os.environ[KIT_VARIABLE]) / INSIDE


driver_mgr.register(KitSocketDriver)
refuse_odd_parts()
refuse_network_orders()
take_memory_as_pieces_arrive()
