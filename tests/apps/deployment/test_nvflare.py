"""NVIDIA FLARE as a transport: kits and their rules, and both ends of it."""

from __future__ import annotations

import gc
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import weakref
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest

pytest.importorskip("nvflare")

import msgpack
from intruders import PROJECT, ward_job
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.decomposers.numpy_decomposers import NumpyArrayDecomposer
from nvflare.fuel.f3.cellnet import defs as cells
from nvflare.fuel.f3.cellnet.cell import Adapter
from nvflare.fuel.f3.cellnet.defs import Encoding
from nvflare.fuel.f3.cellnet.net_agent import NetAgent
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming import file_downloader
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler, BlobTask
from nvflare.fuel.f3.streaming.byte_receiver import READ_TIMEOUT, RxTask
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import (
    BlobSizeError,
    Stream,
    StreamError,
    StreamFuture,
)
from nvflare.fuel.flare_api.api_spec import JobNotRunning, NoConnection, NoReply
from nvflare.fuel.hci.client.file_transfer import FileTransferModule
from nvflare.fuel.hci.reg import CommandEntry
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.buffer_list import ConsumableBufferList
from nvflare.fuel.utils.fobs import dots, lobs
from nvflare.fuel.utils.fobs import fobs as nvflare_fobs
from nvflare.fuel.utils.fobs.builtin_decomposers import BUILTIN_TYPES
from nvflare.fuel.utils.fobs.datum import TEN_MEGA, Datum, DatumManager
from nvflare.private.admin_defs import Message as Order
from nvflare.private.admin_defs import ok_reply
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.utils.decomposers import private_decomposers
from nvflare.security.security import FLAuthorizer
from time_limits import processor_time_below

from fednotes.apps.deployment.nvflare import gate, presence, processes
from fednotes.apps.deployment.nvflare import kit as kit_files
from fednotes.apps.deployment.nvflare import server as flare
from fednotes.apps.deployment.nvflare import site as nvflare_site
from fednotes.apps.deployment.nvflare.authority import ProjectConfig, provision
from fednotes.apps.deployment.nvflare.certificates import check_kit
from fednotes.apps.deployment.nvflare.large_replies import load_stored
from fednotes.apps.deployment.rules.guard import NoRoom, NotApproved
from fednotes.apps.deployment.rules.ledger import Ledger, read_ledger_lines
from fednotes.apps.deployment.rules.policy import (
    Policy,
    PolicyRefusal,
    check_participation,
)
from fednotes.core.errors import ConfigError, FednotesError, RefusedError, TrainingError
from fednotes.core.store import LARGE_BYTES
from fednotes.core.stored_bytes import StoredBytes
from fednotes.engines import launch

ROLES = ("project_admin", "lead", "org_admin", "member")


def allowed(policy: dict[str, Any], role: str, right: str) -> bool:
    """Return NVFlare's own judgement of a policy."""
    person = Person("p@x.org", "ward", role)
    context = AuthzContext(right=right, user=person, submitter=person)
    return bool(FLAuthorizer("ward", policy).authorize(context)[0])


def local(kit: Path, name: str) -> dict[str, Any]:
    return json.loads((kit / "local" / name).read_text())


def test_no_participant_may_send_code(shared_kits: dict[str, Path]) -> None:
    for name in ("server", "h1"):
        policy = local(shared_kits[name], "authorization.json")
        for role in ROLES:
            for right in (
                "byoc",
                "server-predeployed-flwr",
                "cat",
                "tail",
                "show_errors",
            ):
                assert not allowed(policy, role, right), (name, role, right)
        assert allowed(policy, "project_admin", "submit_job")
    server = local(shared_kits["server"], "authorization.json")
    assert allowed(server, "project_admin", "download_job")
    for right in ("submit_job", "clone_job", "abort_job", "download_job"):
        # the server's own identity looks and no more
        assert not allowed(server, "lead", right)
    assert allowed(server, "lead", "list_jobs")


def test_a_message_over_4_gb_is_refused_while_it_arrives(
    shared_kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NVFlare's own program, from the first chunk on: it names the size."""
    for name in ("server", "h1"):
        kit = shared_kits[name]
        settings = json.loads((kit / kit_files.COMM_FILE).read_text())
        monkeypatch.setattr(CommConfigurator, "_config_loaded", True)
        monkeypatch.setattr(CommConfigurator, "_configuration", settings)
        limit = BlobHandler(lambda: None).max_blob_size
        assert limit == 2**32
        for size, is_refused in ((limit, False), (limit + 1, True)):
            stream: Any = SimpleNamespace(get_size=lambda size=size: size)
            future: Any = None
            with pytest.raises(BlobSizeError) if is_refused else nullcontext():
                BlobTask(future, stream, limit, preserve_chunks=True)


@pytest.mark.parametrize("encoding", [Encoding.BYTES, None])
def test_an_announced_size_takes_no_memory(encoding: str | None) -> None:
    """A message of bytes: NVFlare has a place for all of them before they arrive."""

    class Announcing(Stream):  # type: ignore[misc]
        pieces: ClassVar = [b"ab", b"c"]

        def read(self, _: int) -> bytes:
            return self.pieces.pop(0) if self.pieces else b""

    def receive(size: int) -> StreamFuture:
        stream = Announcing(size, {StreamHeaderKey.PAYLOAD_ENCODING: encoding})
        future = StreamFuture(1, stream.headers)
        handler.handle_blob_cb(future, stream, resume=False)
        return future

    handler = BlobHandler(lambda *_: None)
    assert bytes(receive(3).result(timeout=10)) == b"abc"
    tracemalloc.start()
    future = receive(2**30)
    with pytest.raises(StreamError, match="Size mismatch"):
        future.result(timeout=60)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def test_a_member_cannot_occupy_the_server_with_messages_that_do_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each occupies a thread for minutes. Other members' messages still arrive."""
    monkeypatch.setattr(RxTask, "find_or_create_task", RxTask.find_or_create_task)
    monkeypatch.setattr(RxTask, "rx_task_map", {})
    gate.limit_unfinished_messages()
    cell: Any = None

    def begin(origin: str, number: int) -> Any:
        keys = {StreamHeaderKey.STREAM_ID: number, StreamHeaderKey.SEQUENCE: 1}
        headers = {**keys, cells.MessageHeaderKey.ORIGIN: origin}
        return RxTask.find_or_create_task(Message(headers, b""), cell)

    first, *others = (begin(f"h3.{k}", k) for k in range(gate.MAX_UNFINISHED))
    assert None not in others
    assert begin("h3", 100) is None
    assert begin("h3.0", 0) is first
    assert begin("h1", 100) is not None
    first.completed = True
    assert begin("h3", 101) is not None
    assert begin("h3", 102) is None
    late = time.monotonic() + READ_TIMEOUT + 1
    monkeypatch.setattr(time, "monotonic", lambda: late)
    assert begin("h3", 103) is not None


def test_a_kit_holds_only_files_of_its_owner(shared_kits: dict[str, Path]) -> None:
    keys = list[bytes]()
    for name, kit in shared_kits.items():
        files = [p for p in kit.rglob("*") if p.is_file()]
        key_files = [p for p in files if p.suffix == ".key"]
        assert {p.name for p in key_files} <= {"server.key", "client.key"}
        assert all(p.stat().st_mode & 0o077 == 0 for p in key_files)
        assert not [p for p in files if p.suffix in (".sh", ".ipynb")]
        assert kit_files.read_kit(kit).name == name
        keys += [p.read_bytes() for p in key_files]
    assert len(set(keys)) == len(keys) == len(shared_kits) + 1
    for name in ("server", "h2"):
        resources = local(shared_kits[name], "resources.json")
        (own_class,) = resources["class_allow_list"]
        assert own_class in json.dumps(kit_files._read_tables()["job"])
        module, _, cls = own_class.rpartition(".")
        assert hasattr(importlib.import_module(module), cls)
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert resources["allow_log_streaming"] is False
        startup = next((shared_kits[name] / "startup").glob("fed_*.json"))
        assert json.loads(startup.read_text())["require_signed_jobs"] is True
        rules = {
            f"{part}.json" for part in ("authorization", "log_config", "resources")
        }
        assert {p.name for p in (shared_kits[name] / "local").iterdir()} == rules


def test_new_kits_are_added_and_existing_kits_are_unchanged(
    kits: dict[str, Path], tmp_path: Path
) -> None:
    """Nor does one that was handed over come to be a second time by itself. The
    authority keeps no key but its own."""
    out, more = kits["server"].parent, replace(PROJECT, sites=(*PROJECT.sites, "h3"))
    state = out / "authority" / "ward" / "state" / "cert.json"
    kits["h1"].rename(tmp_path / "h1")
    before = {
        path: path.read_bytes() for kit in kits.values() for path in kit.rglob("*.*")
    }
    added = provision(more, out)["h3"]
    assert {path: path.read_bytes() for path in before} == before
    assert (added / "startup/rootCA.pem").read_bytes() in before.values()
    assert check_kit(added) == []
    assert not kits["h1"].exists()
    assert keys_in(out / "authority") == 1
    assert state.stat().st_mode & 0o077 == 0
    again = provision(more, out, again=["h1"])["h1"]
    assert check_kit(again) == []
    key = Path("startup/client.key")
    assert (again / key).read_bytes() != (tmp_path / "h1" / key).read_bytes()
    for name, message in (
        ("h1", "already exists: move it away"),
        ("h9", "'h9' is not a kit"),
    ):
        with pytest.raises(ConfigError, match=message):
            provision(more, out, again=[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 1}, r"port = \d+, but the project says 1"),
        ({"admin": "new@x.org"}, 'admin = "admin@fednotes.org"'),
        ({"hosts": ("10.0.0.1",)}, r"hosts = \[\]"),
        ({"organisations": {"h1": "x"}}, 'organisations.h1 = "h1"'),
        ({"name": "other"}, 'name = "ward", but the project says "other"'),
        # no more in the project, but a kit of it is
        ({"sites": ("h10",)}, "'h1' and 'h10'"),
    ],
)
def test_kits_with_inconsistent_settings_are_refused(
    shared_kits: dict[str, Path], changes: dict[str, Any], message: str
) -> None:
    sites = changes.pop("sites", (*PROJECT.sites, "h3"))
    with pytest.raises(ConfigError, match=message):
        provision(
            replace(PROJECT, sites=sites, **changes), shared_kits["server"].parent
        )
    assert {path.name for path in shared_kits["h1"].parent.iterdir()} == set(
        PROJECT.sites
    )


def keys_in(folder: Path) -> int:
    """Return private keys, by the first line of their PEM."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sum(path.read_bytes().count(b"PRIVATE KEY-----") for path in files) // 2


def test_keys_of_participants_are_removed_from_an_older_authority(
    kits: dict[str, Path],
) -> None:
    """It kept every participant's beside its own, and wrote down the project's name
    alone."""
    authority = kits["server"].parent / "authority"
    (authority / "project.json").write_text('{"name": "ward", "server": "localhost"}')
    state = authority / "ward" / "state" / "cert.json"
    saved_state = json.loads(state.read_text())
    for name in (
        "localhost",
        *PROJECT.sites,
        "admin@fednotes.org",
        "watch@fednotes.org",
    ):
        saved_state[name] = {"cert": "-", "pri_key": saved_state["root_pri_key"]}
    state.write_text(json.dumps(saved_state))
    shutil.rmtree(kits["h2"])
    added = provision(replace(PROJECT, sites=(*PROJECT.sites, "h3")), authority.parent)
    assert not added["h2"].exists()
    assert check_kit(added["h3"]) == []
    assert keys_in(authority) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": ("h1", "h1")}, r"sites \['h1'\]"),
        (
            {"sites": ("server", "h2")},
            r"\['server'\]: these names belong to .* such as 'server-hospital'",
        ),
        ({"sites": ()}, "sites are missing"),
        ({"sites": ("a b",)}, "site 'a b'"),
        ({"sites": ("a.b",)}, r"'a\.b': use letters, digits, '_' and '-' only"),
        # the server's certificate's name
        ({"sites": ("localhost",)}, r"sites \['localhost'\]"),
        ({"sites": ("ward",)}, r"sites \['ward'\]"),  # the authority's
        ({"sites": ("h1", "h10")}, "such as h01 and h10"),
        ({"sites": ("h1", "h1-a")}, "such as h01 and h10"),
        ({"sites": ("h1", "h1face")}, "such as h01 and h10"),
        ({"sites": ("h10", "h1")}, "such as h01 and h10"),
        ({"name": "../x"}, "name '../x'"),
        ({"port": 0}, "port 0"),
        ({"server": ""}, "server ''"),
        ({"server": "bad host"}, "server 'bad host'"),
        ({"hosts": ("-x",)}, "hosts '-x'"),
        ({"organisations": {"h2": "x"}}, "unknown site 'h2'"),
        ({"organisations": {"h1": "St. Mary"}}, "h1 = 'St. Mary'"),
        ({"admin": "root"}, "admin 'root'"),
    ],
)
def test_a_wrong_project_is_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "name": "ward",
        "server": "localhost",
        "sites": ("h1",),
    } | changes
    with pytest.raises(ConfigError, match=message):
        ProjectConfig(**fields)


def test_the_names_of_thousands_of_sites_are_compared_in_linear_time() -> None:
    names = tuple(f"h{number:05d}" for number in range(30_000))
    with processor_time_below(10):  # it was half a minute
        assert ProjectConfig("ward", "localhost", names).sites == names


@pytest.mark.parametrize("second", ["h1x", "h1A", "h1_0", "h10"])
def test_distinct_site_names_are_accepted(second: str) -> None:
    first = "h01" if second == "h10" else "h1"
    assert ProjectConfig("ward", "localhost", (first, second)).sites == (first, second)


def test_a_submitted_job_contains_only_its_declaration(tmp_path: Path) -> None:
    job = {
        "method": "fedner",
        "training": {"path": "x.Y", "note": "{APP_ROOT}", "rate": 0.1},
    }
    folder = kit_files.write_job_folder(
        tmp_path, job, run="r1", sites=["b", "a"], min_sites=2
    )
    assert {p.suffix for p in folder.rglob("*") if p.is_file()} == {".json"}
    app = tmp_path / "run" / "app"
    shutil.copytree(folder / "app", app)
    setup = launch.read_setup(app, tmp_path / "kit", "a", "id")
    assert (setup.job, setup.sites, setup.min_sites, setup.run) == (
        job,
        ("b", "a"),
        2,
        "r1",
    )
    assert setup.state == tmp_path / "kit" / "state" / "r1"
    for run in ("../x", "place"):
        (app / "config" / "job.json").write_text(
            f'{{"run": "{run}", "sites": [], "min_sites": 1, "job": {{}}}}'
        )
        with pytest.raises(ConfigError, match="cannot name a run"):
            launch.read_setup(app, tmp_path / "kit", "a", "id")
    with pytest.raises(ConfigError, match="beside the states of runs: choose another"):
        kit_files.write_job_folder(
            tmp_path, job, run="place", sites=["b", "a"], min_sites=2
        )
    with pytest.raises(ConfigError, match="min_sites = 3 of 2 sites: expected 1 to 2"):
        kit_files.write_job_folder(
            tmp_path, job, run="r1", sites=["b", "a"], min_sites=3
        )
    with pytest.raises(ConfigError, match="sites a, a: each must be named once"):
        kit_files.write_job_folder(
            tmp_path, job, run="r1", sites=["a", "a"], min_sites=1
        )
    with pytest.raises(FednotesError, match="JSON cannot represent"):
        kit_files.write_job_folder(
            tmp_path, {"x": {1, 2}}, run="r1", sites=["a"], min_sites=1
        )


def test_the_check_period_reaches_the_communicator() -> None:
    """NVFlare 2.9.0 sets another attribute than the one that it reads."""
    communicator = WFCommServer()
    flare.FednotesController(task_check_period=0.013).set_communicator(communicator)
    assert communicator._task_check_period == 0.013
    assert "_task_check_period" in WFCommServer.wait_for_task.__code__.co_names


def test_a_kits_main_process_does_without_torch() -> None:
    """It relays messages only; torch would take it a quarter of a gigabyte."""
    package = "fednotes.apps.deployment.nvflare"
    modules = ("processes", "gate", "presence", "watch", "server", "large_replies")
    names = ", ".join(f"{package}.{module}" for module in modules)
    program = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def measure_memory() -> int:
    """Return the bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_the_memory_of_the_pieces_of_a_large_frame_is_returned() -> None:
    """The last piece keeps the C library from returning it on its own."""
    pieces = [bytearray(100_000) for _ in range(500)]
    del pieces[:-1]
    before = measure_memory()
    processes.free_pieces_of(b"small")
    assert before - measure_memory() < 5_000_000
    processes.free_pieces_of(bytes(LARGE_BYTES))
    assert before - measure_memory() > 30_000_000


class UnprintableChunk(bytearray):
    """A piece of a message whose text nobody may make."""

    def __repr__(self) -> str:
        raise AssertionError("the bytes were written as text")


def test_the_server_makes_no_text_of_a_message_that_arrives() -> None:
    """NVFlare would make one for its debug log, even if that log is off."""
    flare.FednotesController()
    wire = fobs.dumps(Shareable({flare.FRAME: b"123"}))
    chunks = ConsumableBufferList([UnprintableChunk(wire)])
    headers = {StreamHeaderKey.PAYLOAD_ENCODING: cells.Encoding.FOBS}
    future = SimpleNamespace(headers=headers, result=lambda: chunks)
    receiver = SimpleNamespace(
        get_fobs_context=lambda props: props,
        decode_pass_through_channels=(),
        decode_pass_through_topics=(),
    )
    received = list[bytes]()
    adapter = Adapter(lambda m: received.append(m.payload["frame"]), None, receiver)
    adapter.call(future)
    assert received == [b"123"]


def test_a_frame_is_sent_as_bytes_without_pickle() -> None:
    frame = os.urandom(5_000_000)
    wire = fobs.dumps(Shareable({flare.FRAME: frame}))
    assert len(wire) < 1.001 * len(frame)
    assert frame in wire
    assert fobs.loads(wire)[flare.FRAME] == frame


class Pretend(flare.FednotesController):
    """A controller whose sites answer in threads: site → (delay in seconds, its reply)."""

    def __init__(
        self, plan: dict[str, tuple[float, Callable[[bytes], Shareable]]]
    ) -> None:
        super().__init__()
        self.plan, self.sent, self.cancelled = plan, [], []
        self.communicator = SimpleNamespace(check_tasks=lambda: None)
        self._contacts = dict.fromkeys(plan, time.monotonic())

    def broadcast(self, task: Any, fl_ctx: Any, targets: Any = None, **_: Any) -> None:
        self.sent.append((task.data[flare.FRAME], list(targets)))
        for site in targets:
            delay, reply = self.plan[site]
            answer = SimpleNamespace(
                client=SimpleNamespace(name=site), result=reply(task.data[flare.FRAME])
            )
            facts = {"client_task": answer, "fl_ctx": None}  # as NVFlare passes them
            threading.Timer(delay, task.result_received_cb, kwargs=facts).start()

    def cancel_task(self, task: Any, *_: Any, **__: Any) -> None:
        self.cancelled.append(task)


def answer(frame: bytes) -> Shareable:
    return Shareable({flare.FRAME: frame[::-1]})


def fails(_: bytes) -> Shareable:
    return make_reply("EXECUTION_EXCEPTION", headers={flare.REASON: "not approved"})


def dies(_: bytes) -> Shareable:
    return make_reply("EXECUTION_EXCEPTION")


def transport(
    controller: Pretend, tmp_path: Path, stop: bool = False
) -> flare.FlareTransport:
    sites = tuple(controller.plan)
    setup = launch.Setup(tmp_path, "", {}, "id", "r", sites, 1, tmp_path, tmp_path)
    return flare.FlareTransport(
        controller, None, SimpleNamespace(triggered=stop), setup
    )


def test_replies_arrive_as_sites_answer(tmp_path: Path) -> None:
    plan = {"a": (0.3, answer), "b": (0.0, answer), "c": (0.1, fails), "d": (0.1, dies)}
    controller = Pretend(plan)
    sent = transport(controller, tmp_path)
    same, second_frame = b"12", b"34"
    frames = {"a": same, "b": second_frame, "c": same, "d": same}
    replies = list(sent.exchange(frames, timeout=9, grace=9, enough=4))
    assert replies == [("b", b"43"), ("a", b"21")]
    # A code of NVFlare's is told in words: what goes wrong before the executor can say
    # why.
    died = "its process failed: see its log (a full disk?)"
    assert sent.failed == {"c": "not approved", "d": died}
    # one task a frame
    assert controller.sent == [(same, ["a", "c", "d"]), (second_frame, ["b"])]
    assert len(controller.cancelled) == 2


class Forgetful(Pretend):
    """A controller that notes for each task, as NVFlare does, which sites have it."""

    def broadcast(self, task: Any, fl_ctx: Any, targets: Any = None, **_: Any) -> None:
        self.task = weakref.ref(task)
        for site in targets:
            client_task = ClientTask(Client(site, ""), task)
            task.client_tasks.append(client_task)
            task.last_client_task_map[site] = client_task
            client_task.result = answer(task.data[flare.FRAME])
            task.result_received_cb(client_task=client_task, fl_ctx=fl_ctx)

    def cancel_task(self, task: Any, *_: Any, **__: Any) -> None:
        pass


def test_a_large_frame_is_freed_when_its_exchange_is_over(tmp_path: Path) -> None:
    controller = Forgetful({"a": (0.0, answer)})
    frames = {"a": bytes(LARGE_BYTES)}
    gc.disable()
    try:
        replies = transport(controller, tmp_path).exchange(
            frames, timeout=9, grace=9, enough=1
        )
        assert [site for site, _ in replies] == ["a"]
        assert controller.task() is None
    finally:
        gc.enable()


def test_an_exchange_ends_if_the_disk_has_no_room_for_a_reply(tmp_path: Path) -> None:
    sent = transport(Pretend({"a": (9.0, answer)}), tmp_path)
    problem = FednotesError("the disk is full")
    threading.Timer(0.2, sent.end_with, [problem]).start()
    start = time.monotonic()
    with pytest.raises(FednotesError, match="the disk is full"):
        list(sent.exchange({"a": b"1"}, timeout=9, grace=9, enough=1))
    assert time.monotonic() - start < 5


def test_watchers_of_a_run_learn_why_it_pauses(tmp_path: Path) -> None:
    """Once; and not before the run has made progress, of which a line is the sign."""
    sent = transport(Pretend({"a": (0.0, answer), "b": (0.0, answer)}), tmp_path)
    order = {"sites": ["b", "stranger"]}
    assert sent.answer_command(flare.PAUSE, order, None)["lines"] == []
    assert sent.pause.is_set()
    sent.pause.clear()
    sent.publish({"kind": "plan"})
    for _ in range(2):
        lines = sent.answer_command(flare.PAUSE, order, None)["lines"]
    (_, line) = lines
    assert line == {
        "kind": "event",
        "text": "'b' is back: the run pauses when the other sites have finished their "
        "step, and then resumes with all sites",
    }


def test_a_job_that_ends_does_not_block_the_server() -> None:
    """NVFlare's server waits for a job's process as long as a session may take, under a
    lock that every site's sign of life needs. A late reply is none; a lost connection
    shows elsewhere."""
    waits: list[float] = []

    def command(*words: Any) -> Any:
        assert waits[-1] == flare.TELL_SECONDS
        raise answers.pop(0)

    session = SimpleNamespace(set_timeout=waits.append, do_app_command=command)
    answers: list[Exception] = [
        NoConnection("late"),
        NoReply("late"),
        JobNotRunning("gone"),
    ]
    admin = flare.Admin(session)
    assert (
        admin.read_progress("j")
        == admin.read_progress("j")
        == {"lines": [], "sites": []}
    )
    assert admin.read_progress("j") is None
    assert waits == [flare.TELL_SECONDS, flare.COMMAND_SECONDS] * 3
    answers.append(ValueError("x"))
    with pytest.raises(TrainingError):
        admin.read_progress("j")


@pytest.mark.parametrize(
    ("timeout", "grace", "enough", "sites", "at_most"),
    [(9, 0.2, 1, ["a"], 1.0), (9, 1.5, 1, ["a", "b"], 3.0), (0.5, 9, 2, ["a"], 1.2)],
)
def test_an_exchange_ends_within_its_deadlines(
    tmp_path: Path,
    timeout: float,
    grace: float,
    enough: int,
    sites: list[str],
    at_most: float,
) -> None:
    """`a` answers at once, `b` after 0.8 s, `c` after 4 s."""
    plan = {"a": (0.0, answer), "b": (0.8, answer), "c": (4.0, answer)}
    sent, start = transport(Pretend(plan), tmp_path), time.monotonic()
    frames = dict.fromkeys(plan, b"x")
    answered = [
        s for s, _ in sent.exchange(frames, timeout=timeout, grace=grace, enough=enough)
    ]
    assert answered == sites
    assert time.monotonic() - start < at_most


def test_an_exchange_does_not_wait_for_a_lost_site(tmp_path: Path) -> None:
    controller = Pretend({"a": (0.0, answer), "b": (60.0, answer)})
    controller._contacts["b"] -= flare.JOB_LOST_SECONDS + 1
    sent, start = transport(controller, tmp_path), time.monotonic()
    replies = list(
        sent.exchange({"a": b"1", "b": b"1"}, timeout=30, grace=30, enough=2)
    )
    assert [site for site, _ in replies] == ["a"]
    assert time.monotonic() - start < 2
    assert sent.list_present_sites() == ("a",)
    controller._contacts.pop("a")
    assert sent.list_present_sites() == ()


def test_stopping_a_job_ends_its_exchange(tmp_path: Path) -> None:
    sent = transport(Pretend({"a": (9.0, answer)}), tmp_path, stop=True)
    with pytest.raises(TrainingError, match="NVFlare ended this submission"):
        list(sent.exchange({"a": b"1"}, timeout=30, grace=30, enough=1))


# a site's executor, whose refusals are in the ledger before they leave


def context(kit: Path) -> Any:
    """Return what NVFlare gives an executor, as far as it is needed."""
    workspace = SimpleNamespace(
        get_app_dir=lambda job: kit / job, get_root_dir=lambda: str(kit)
    )
    return SimpleNamespace(
        get_workspace=lambda: workspace,
        get_job_id=lambda: "job-id",
        get_identity_name=lambda: "h1",
    )


def raises(error: Exception) -> Any:
    raise error


def refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> nvflare_site.FednotesExecutor:
    """Return an executor whose host does not start."""
    monkeypatch.setattr(
        nvflare_site, "require_admins_signature", lambda *_: raises(error)
    )
    return nvflare_site.FednotesExecutor()


def request_setup(executor: nvflare_site.FednotesExecutor, kit: Path) -> str | None:
    reply = executor.execute(
        flare.TASK, Shareable({flare.FRAME: b"x"}), context(kit), None
    )
    assert flare.FRAME not in reply
    reason: str | None = reply.get_header(flare.REASON)
    return reason


def test_a_refusal_of_the_executor_is_recorded_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time it leaves, and with the rule's name alone."""
    try:
        policy = Policy(min_sites=7, source="[policy] of /srv/x")
        check_participation(policy, "fedner", 6, 6, rounds=None, secure=False)
    except PolicyRefusal as error:
        executor = refused(monkeypatch, error)
    for number in (1, 2):
        reason = request_setup(executor, tmp_path)
        assert reason is not None
        assert reason.startswith("refused by min_sites of this site's policy")
        assert "7" not in reason
        lines = list(read_ledger_lines(Ledger.in_kit(tmp_path).path))
        assert len(lines) == number
        entry = (
            lines[-1]["run"],
            lines[-1]["refusal"],
            lines[-1]["receiver"],
            lines[-1]["bytes"],
        )
        assert entry == ("job-id", True, "server", len(reason))
        assert lines[-1]["sha256"] == hashlib.sha256(reason.encode()).hexdigest()
    assert "this site allows 7 sites or more" in caplog.text
    assert "/srv/x" in caplog.text


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (NotApproved("site 'a' has not approved this job"), "INFO"),
        (RefusedError("closed today"), "ERROR"),
    ],
)
def test_a_site_that_waits_for_an_approval_logs_no_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    level: str,
) -> None:
    caplog.set_level("INFO")
    request_setup(refused(monkeypatch, error), tmp_path)
    levels = [each.levelname for each in caplog.records if str(error) in each.message]
    assert levels == [level]


def test_nothing_leaves_without_a_record_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = refused(monkeypatch, ConfigError(f"{tmp_path}/site.toml: no such file"))
    assert request_setup(executor, tmp_path) == "site.toml: no such file"
    ledger = Ledger.in_kit(tmp_path).path
    good = ledger.read_bytes()
    ledger.write_bytes(good[:-9])
    assert request_setup(executor, tmp_path) is None
    ledger.write_bytes(good)
    assert request_setup(executor, tmp_path) == "site.toml: no such file"


def test_a_server_that_repeats_a_request_cannot_fill_the_ledger(tmp_path: Path) -> None:
    """A refusal in the same words leaves again, though not from an edited ledger."""
    executor, host = nvflare_site.FednotesExecutor(), mock.Mock()
    executor._kit, executor._host = tmp_path, host

    def answer(reason: str) -> str | None:
        host.handle = lambda frame: raises(RefusedError(reason))
        reply = executor.execute(flare.TASK, Shareable({flare.FRAME: b"x"}), None, None)
        reply_reason: str | None = reply.get_header(flare.REASON)
        return reply_reason

    ledger = Ledger.in_kit(tmp_path)
    assert {answer("closed today") for _ in range(50)} == {"closed today"}
    assert ledger.read_head().lines == nvflare_site.SAME_REASON_LINES
    good = ledger.path.read_bytes()
    ledger.path.write_bytes(good[:-9])
    assert answer("closed today") is None
    ledger.path.write_bytes(good)
    with mock.patch.object(nvflare_site, "REASON_LINES", 30):
        reasons = [answer(f"closed on day {number}") for number in range(50)]
        assert (
            reasons == [f"closed on day {number}" for number in range(10)] + [None] * 40
        )
        assert ledger.read_head().lines == 30
        assert answer("closed on day 3") == "closed on day 3"
        assert ledger.read_head().lines == 30


def test_a_site_without_room_for_a_refusal_sends_no_reply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or a server that asks again and again would fill its disk with refusals."""
    executor, host = nvflare_site.FednotesExecutor(), mock.Mock()
    executor._kit, executor._host = tmp_path, host
    host.handle = lambda frame: raises(NoRoom("this site allows at most 7 bytes"))
    reply = executor.execute(flare.TASK, Shareable({flare.FRAME: b"x"}), None, None)
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert reply.get_header(flare.REASON) is None
    assert not Ledger.in_kit(tmp_path).path.exists()
    assert "this site allows at most 7 bytes" in caplog.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("Mrs Planted"), "KeyError at test_nvflare.py"),
        (RefusedError("hours"), "hours"),
    ],
)
def test_an_error_of_a_site_is_reported_without_its_data(
    error: Exception, message: str, tmp_path: Path
) -> None:
    executor, host = nvflare_site.FednotesExecutor(), mock.Mock()
    executor._kit, executor._host = tmp_path, host
    host.handle = lambda frame: raises(error)  # its message quotes the data
    reply = executor.execute(flare.TASK, Shareable({flare.FRAME: b"x"}), None, None)
    assert message in reply.get_header(flare.REASON)
    assert "Planted" not in json.dumps(reply[ReservedHeaderKey.HEADERS])


# the server's gate, states and audit


@pytest.mark.parametrize(
    ("certified", "origin", "channel", "topic", "passes"),
    [
        ("h1", "h1", "task", "heart_beat", True),
        ("h1", "h1.job-id", "sm__STREAM server_command", "get_task", True),
        ("h1", "h1.job-id", "sm__STREAM return_only", "anything", True),
        ("h1", "h2", "task", "heart_beat", False),
        ("h1", "h2.job-id", "sm__STREAM server_command", "get_task", False),
        # `bulk_test` of 10^9: as many messages in memory
        ("h1", "h1", "_net_manager", "bulk_test", False),
        # messages in one, which no filter would see
        ("h1", "h1", "cellnet.channel", "bulk", False),
        # what only the server's processes tell each other
        ("h1", "h1", "server_parent_listener", "get_clients", False),
        ("h1", "h1", "server_parent_listener", "sm__DATA", False),
        ("h1", "h1.job-id", "server_command", "abort", False),
        ("h1", "h1.job-id", "sm__STREAM server_command", "abort", False),
        ("h1", "h1.job-id", "sm__STREAM aux_communication", "fed.event", False),
        # NVFlare checks the rights of whoever gives a command
        ("h1", "h1", "sm__STREAM hci_channel", "command", True),
        # what only a person's session does
        ("h1", "h1", "sm__STREAM aux_communication", "ObjectStreamer.Request", False),
        ("a@x.org", "a@x.org", "sm__STREAM server_command", "submit_update", False),
        # by the kit's own socket
        (None, "server.job-id", "_net_manager", "bulk_test", True),
        (None, "server.job-id", "server_parent_listener", "get_clients", True),
    ],
)
def test_a_member_can_send_only_messages_of_a_run_in_its_own_name(
    certified: str | None, origin: str, channel: str, topic: str, passes: bool
) -> None:
    """The names are those in NVFlare's messages, also in the headers of a stream."""
    stream, _, channel_of_stream = channel.partition(" ")
    headers = {"origin": origin, "channel": channel, "topic": topic}
    if channel_of_stream:
        headers |= {"channel": stream, "topic": "sm__DATA"}
        headers |= {"sm__ch": channel_of_stream, "sm__tp": topic}
    names = {"origin": cells.MessageHeaderKey.ORIGIN}
    names |= {"channel": cells.MessageHeaderKey.CHANNEL}
    names |= {"topic": cells.MessageHeaderKey.TOPIC}
    message = Message({names.get(key, key): headers[key] for key in headers}, 10**9)
    message.set_header(cells.MessageHeaderKey.MSG_TYPE, cells.MessageType.REQ)
    message.set_header(cells.MessageHeaderKey.DESTINATION, "server.job-id")
    message.set_prop(cells.MessagePropKey.COMMON_NAME, certified)
    assert (gate.ServerMessageFilter().refuse_unneeded(message) is None) == passes


@pytest.mark.parametrize(
    ("receiver", "kind", "passes"),
    [
        ("server", "req", True),
        ("server.job-id", "req", True),
        ("h2.job-id", "req", False),
        ("a@x.org", "req", False),
        ("serverless", "req", False),
        ("h2.job-id", "reply", True),  # NVFlare drops it if there was no question
    ],
)
def test_a_member_can_send_requests_only_to_the_server(
    receiver: str, kind: str, passes: bool
) -> None:
    keys = cells.MessageHeaderKey
    headers = {keys.ORIGIN: "h1", keys.CHANNEL: "task", keys.TOPIC: "heart_beat"}
    headers |= {keys.MSG_TYPE: kind, keys.DESTINATION: receiver}
    message = Message(headers, None)
    message.set_prop(cells.MessagePropKey.COMMON_NAME, "h1")
    assert (gate.ServerMessageFilter().refuse_unneeded(message) is None) == passes


@pytest.mark.parametrize("code", [1, 101, 102, 103, 104, 9, 0])
def test_a_failure_reported_by_a_site_is_logged_and_does_not_end_the_run(
    code: int,
) -> None:
    """By NVFlare's own function, which would fail or abort the run of all sites."""
    gate.ServerMessageFilter()
    runner = JobRunner("workspace")
    runner._pending_client_outcomes = {"job-1": {"h1", "h2"}}
    runner.fail_run = runner.stop_run = mock.Mock()
    server = mock.Mock()
    server.engine.job_runner = runner
    server.client_manager.clients = {"token": SimpleNamespace(name="h1")}
    headers = {CellMessageHeaderKeys.TOKEN: "token"}
    report = Message(headers, {"job_id": "job-1", "code": code})
    reply = FederatedServer.process_job_failure(server, report)
    assert reply.get_header(cells.MessageHeaderKey.RETURN_CODE) == cells.ReturnCode.OK
    runner.fail_run.assert_not_called()
    assert runner.get_client_outcome_jobs("h1") == set()
    assert runner.get_client_outcome_jobs("h2") == {"job-1"}


def test_two_processes_cannot_share_the_state_of_a_run(tmp_path: Path) -> None:
    with (
        launch.holding_state(tmp_path / "r"),
        pytest.raises(TrainingError, match="still ending"),
    ):
        launch.holding_state(tmp_path / "r").__enter__()
    with launch.holding_state(tmp_path / "r"):
        pass


def test_the_audit_log_lists_commands_but_no_queries(tmp_path: Path) -> None:
    """By NVFlare's own auditor, on the commands that a run shared_kits in three minutes."""
    log = tmp_path / "audit.log"
    auditor = AuditService.initialize(str(log))
    try:
        presence.skip_queries_in_audit()
        for command in (
            "list_jobs -d",
            "check_status server",
            "app_command 1-2 fednotes.progress",
        ):
            auditor.add_event("watch@x.org", command)
        assert log.read_text() == ""
        commands = (
            "_cert_login a@x.org",
            "job_mgmt.submit_job ner",
            "app_command 1 fednotes.pause",
        )
        for command in commands:
            assert auditor.add_event("a@x.org", command)
        assert [line.rpartition("[A:")[2] for line in log.read_text().splitlines()] == [
            f"{command}]" for command in commands
        ]
    finally:
        AuditService.close()


# a site's gate


class Recorded(RequestProcessor):
    """Stands for NVFlare's processor of an order, and records the orders."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.orders: list[Order] = []

    def get_topics(self) -> list[str]:
        return [self.topic]

    def process(self, req: Order, app_ctx: Any) -> Order:
        self.orders.append(req)
        return ok_reply()


ORDERED_JOB = "01234567-89ab-cdef-0123-456789abcdef"


def order(
    topic: str,
    body: Any = b"",
    jobs: int = 0,
    running: tuple[str, ...] = (),
    facts: Any = MappingProxyType({"job_id": ORDERED_JOB}),
) -> tuple[str, bool]:
    """Give a site an order; return the answer, and whether NVFlare got it.

    jobs: how many run at the site. running: the ids of further ones. facts: those of
    the job in the order.
    """
    inner = Recorded(topic)
    processors = ClientRequestProcessors.request_processors
    ids = [*map(str, range(jobs)), *running]
    engine = SimpleNamespace(get_all_job_ids=lambda: ids)
    with mock.patch.object(ClientRequestProcessors, "request_processors", [inner]):
        gate.limit_orders()
        (checked,) = ClientRequestProcessors.request_processors
        message = Order(topic, body)
        message.set_header("job_id", ORDERED_JOB)
        message.set_header("job_meta", facts)
        answer = checked.process(message, engine)
    assert ClientRequestProcessors.request_processors is processors
    return str(answer.body), bool(inner.orders)


def packed(*files: tuple[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        for name, content in files:
            written.writestr(name, content)
    return archive.getvalue()


def validate_submission(
    folder: Path, facts: dict[str, Any] | None = None, **files: bytes
) -> tuple[bool, str]:
    """Return whether the server accepts a job, and why not.

    facts: changes of meta.json. files: further files.
    """
    gate.refuse_odd_submissions()
    run = folder.name
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (facts or {})))
    content = {
        f"{run}/{file.relative_to(folder)}": file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    files[""] = b""  # the folder, which NVFlare looks for
    content |= {f"{run}/app/config/{name}": data for name, data in files.items()}
    is_valid, error, _ = JobMetaValidator().validate(run, packed(*content.items()))
    return is_valid, error


def test_the_server_accepts_the_job_that_the_admins_program_writes(
    tmp_path: Path,
) -> None:
    assert validate_submission(ward_job(tmp_path, "ward-1")) == (True, "")


@pytest.mark.parametrize(
    ("facts", "place"),
    [
        ({"name": "../../elsewhere"}, "name"),
        ({"name": ["a"]}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": "sites.json"}, "name"),
        ({"name": None}, "name"),
        ({"resource_spec": {"h1": {"num_gpus": 1}}}, "resource_spec"),
        ({"min_clients": "2"}, "min_clients"),
        ({"deploy_map": {"app": [{"sites": ["server", "h1", "h2"]}]}}, "deploy_map"),
        ({"scope": "x"}, "scope"),
        ({"job_id": "another"}, "job_id"),
    ],
)
def test_the_server_refuses_a_job_with_other_facts(
    facts: dict[str, Any], place: str, tmp_path: Path
) -> None:
    """With a name that is a list, it could not list any job any more."""
    is_valid, error = validate_submission(ward_job(tmp_path, "ward-1"), facts)
    assert not is_valid
    assert f"meta.json: '{place}" in error
    assert "fednotes run" in error


def test_the_server_refuses_a_submission_that_unpacks_to_too_much(
    tmp_path: Path,
) -> None:
    folder = ward_job(tmp_path, "ward-1")
    is_valid, error = validate_submission(folder, bomb=bytes(70_000_000))
    assert not is_valid
    assert re.fullmatch(r"the job has \d files of 70,00\d,\d{3} bytes", error)


def test_a_job_that_unpacks_to_too_much_is_refused() -> None:
    """NVFlare unpacks what a server sends before it looks at the signature: here, half
    a megabyte to half a gigabyte, and 2,000 files."""
    assert order("train.deploy", packed(("config/job.json", b"{}")))[1]
    zeros = bytes(2**20)
    bomb = packed(*((f"{number}.bin", zeros) for number in range(500)))
    assert len(bomb) < 10**6
    answer, is_unpacked = order("train.deploy", bomb)
    assert answer == "the job has 500 files of 524,288,000 bytes"
    assert not is_unpacked
    many = packed(*((f"{number}", b"") for number in range(2000)))
    assert not order("train.deploy", many)[1]
    for broken in (b"PK", None, "text"):
        assert not order("train.deploy", broken)[1]


@pytest.mark.parametrize(
    "name",
    [
        "custom/sitecustomize.py",
        "custom",
        "./custom/a.py",
        "config/../custom/a.py",
        "config/custom/a.py",
        "/custom/a.py",
        "CUSTOM/a.py",
        "a.pth",
    ],
)
def test_a_job_with_code_is_not_unpacked(name: str) -> None:
    """NVFlare unpacks code to where processes of the job import from, then refuses it:
    a process that starts in between runs it."""
    files = [
        "config/",
        "config/config_fed_client.json",
        "config/.__nvfl_sig.json",
        ".__nvfl_submitter.crt",
    ]
    declaration = [(file, b"") for file in files]
    assert order("train.deploy", packed(*declaration)) == ("ok", True)
    answer, is_unpacked = order("train.deploy", packed(*declaration, (name, b"")))
    assert answer == f"the job has a file that no run needs, which may be code: {name}"
    assert not is_unpacked


def test_a_running_job_is_not_replaced() -> None:
    """Its process would read another job than the one whose signature it checked."""
    body = packed(("config/job.json", b"{}"))
    assert order("train.deploy", body, jobs=1)[1]
    answer, is_unpacked = order("train.deploy", body, running=(ORDERED_JOB,))
    assert answer == "the job is already running"
    assert not is_unpacked


@pytest.mark.parametrize("topic", ["train.deploy", "train.start_job"])
@pytest.mark.parametrize("facts", [{"job_id": "another"}, {}, None, ["job_id"]])
def test_the_facts_of_an_order_name_its_job(topic: str, facts: Any) -> None:
    """NVFlare lets the job's process import from the folder of the job in the facts."""
    body = packed(("config/job.json", b"{}"))
    assert order(topic, body)[1]
    answer, is_passed_on = order(topic, body, facts=facts)
    assert answer == "the facts of the job name another job"
    assert not is_passed_on


def test_a_job_starts_only_after_it_is_unpacked() -> None:
    """NVFlare processes orders in several threads."""
    starts, unpacking, waiting = [], threading.Event(), threading.Event()

    class Unpacking(Recorded):
        def process(self, req: Order, app_ctx: Any) -> Order:
            unpacking.set()
            assert not waiting.wait(0.5)
            assert starts == []
            return super().process(req, app_ctx)

    class Starting(Recorded):
        def process(self, req: Order, app_ctx: Any) -> Order:
            starts.append(req)
            waiting.set()
            return super().process(req, app_ctx)

    engine = SimpleNamespace(get_all_job_ids=list)
    deploys, begins = (
        gate._OrderCheck(Unpacking("train.deploy")),
        gate._OrderCheck(Starting("train.start_job")),
    )
    body = packed(("config/job.json", b"{}"))
    with ThreadPoolExecutor(2) as pool:
        deployed = pool.submit(deploys.process, Order("train.deploy", body), engine)
        assert unpacking.wait(10)
        started = pool.submit(begins.process, Order("train.start_job", {}), engine)
        assert deployed.result(10).body == started.result(10).body == "ok"


def test_a_server_can_start_few_processes_at_a_site() -> None:
    assert order("train.start_job", {}, jobs=gate.MAX_JOBS - 1)[1]
    answer, is_started = order("train.start_job", {}, jobs=gate.MAX_JOBS)
    assert answer == "8 jobs are already running"
    assert not is_started


# the admin's downloads


class LyingServer:
    """Stands for an admin's session with a server that names the files of a run.

    Attributes:
        files: Their names.
        transfer: The number of the transfer.
    """

    def __init__(self, folder: Path, files: tuple[str, ...], transfer: str) -> None:
        self.files, self.transfer = files, transfer
        self.module = FileTransferModule(str(folder), str(folder))
        self.command = ""
        self.client_key = self.client_cert = self.problem = ""
        self.results: list[dict[str, Any]] = []

    def context(self) -> Any:
        entry = mock.Mock(spec=CommandEntry, usage="")
        entry.full_command_name.return_value = "download_job"
        return SimpleNamespace(
            get_command_entry=lambda: entry,
            get_api=lambda: self,
            get_command=lambda: self.command,
            set_requester=lambda requester: setattr(self, "requester", requester),
            set_command_result=self.results.append,
        )

    def debug(self, text: str) -> None: ...

    def fire_session_event(self, kind: str, text: str) -> None: ...

    def server_execute(self, command: str, cmd_ctx: Any = None) -> dict[str, Any]:
        if cmd_ctx is not None:
            self.requester.send_request(self, None, cmd_ctx)
            return self.results[-1] if self.results else {"status": "SUCCESS"}
        files = [[name, f"ref-{name}"] for name in self.files]
        meta = {"files": files, "tx_id": self.transfer, "source_fqcn": "server"}
        return {"status": "SUCCESS", "meta": meta}

    def do_command(self, command: str) -> dict[str, Any]:
        self.command = command
        answer: dict[str, Any] = self.module.pull_binary_file(
            shlex.split(command), self.context()
        )
        return answer

    def download_file(self, source: str, ref: str, path: str) -> int | None:
        """As NVFlare's, which makes the folders that it needs."""
        consumer = file_downloader._ChunkConsumer(str(self.module.download_dir))
        try:
            for chunk in self.chunks(ref):
                consumer.consume(ref, {}, chunk)
        except ValueError as error:
            self.problem = str(error)
            consumer.download_failed(ref, self.problem)
            Path(consumer.file_path).unlink()
            return None
        consumer.download_completed(ref)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(consumer.file_path, path)
        return consumer.total_bytes

    def chunks(self, ref: str) -> Iterable[bytes]:
        """Return what the server sends for a file."""
        return [ref.encode()]

    def fetch(self) -> dict[str, Any]:
        gate.limit_transfers()
        with gate.permitting_download():
            return self.pull()

    def pull(self) -> dict[str, Any]:
        """Do what NVFlare does for a command that downloads."""
        answer: dict[str, Any] = self.module.pull_folder(
            ["download_job", "job-1"], self.context()
        )
        return answer


@pytest.mark.parametrize(
    ("file", "transfer"),
    [
        ("{}/home/.bashrc", "t"),
        ("../../home/.bashrc", "t"),
        ("..", "t"),
        ("site/../../../home/.bashrc", "t"),
        ("..\\home\\.bashrc", "t"),
        ("workspace", "/../../home"),
    ],
)
def test_a_server_cannot_write_a_file_of_the_admin(
    file: str, transfer: str, tmp_path: Path
) -> None:
    """NVFlare joins the server's names to a path: `/home/a/.bashrc` is one, too."""
    downloads, home = tmp_path / "downloads", tmp_path / "home"
    downloads.mkdir()
    home.mkdir()
    (home / ".bashrc").write_text("mine")
    server = LyingServer(downloads, ("meta", file.format(tmp_path)), transfer)
    answer = server.fetch()
    assert answer["status"] != "SUCCESS"
    assert "leads to another folder" in answer["details"]
    assert (home / ".bashrc").read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [
        home / ".bashrc"
    ]


def test_the_admin_signs_only_the_submitted_folder(
    shared_kits: dict[str, Path], tmp_path: Path
) -> None:
    """It says which commands send a folder: with a status query, the admin's program
    would sign what the server had it download before, in the folder of transfers."""
    server = LyingServer(tmp_path, (), "t")
    (key,) = (shared_kits["admin"] / "startup").glob("*.key")
    (certificate,) = (shared_kits["admin"] / "startup").glob("client.crt")
    server.client_key, server.client_cert = str(key), str(certificate)
    sent: list[str] = []
    server.server_execute = lambda command, cmd_ctx=None: sent.append(command) or {}  # type: ignore[method-assign, func-returns-value]
    for name in ("of the server", "handed in"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text("{}")
    gate.limit_transfers()

    def push(folder: Path) -> Any:
        return server.module.push_folder(["status", str(folder)], server.context())

    with gate.permitting_upload(str(tmp_path / "handed in")):
        refused = push(tmp_path / "of the server")
        assert not list((tmp_path / "of the server").rglob(".__nvfl*"))
        assert not sent
        push(tmp_path / "handed in")
    assert "that this command does not send" in refused["details"]
    assert list((tmp_path / "handed in").rglob(".__nvfl_sig.json"))
    assert len(sent) == 1
    assert "that this command does not send" in push(tmp_path / "handed in")["details"]
    assert len(sent) == 1


class EndlessServer(LyingServer):
    """Sends one file whose archive, or whose number of bytes, is far too large."""

    def __init__(self, folder: Path, chunks: Iterable[bytes]) -> None:
        super().__init__(folder, ("workspace.zip",), "t")
        self.sent = chunks

    def chunks(self, ref: str) -> Iterable[bytes]:
        return self.sent


def test_a_run_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = bytes(2**20)
    bomb = packed(*((f"{number}.bin", zeros) for number in range(50)))
    many = packed(*((f"{number}", b"") for number in range(2000)))
    monkeypatch.setattr(gate, "Download", partial(gate.Download, 2**25, 2**25, 1000))
    for archive in (bomb, many):
        answer = EndlessServer(tmp_path, [archive]).fetch()
        assert answer["status"] != "SUCCESS"
        assert "files of" in answer["details"]
        assert not list(tmp_path.iterdir())
    answer = EndlessServer(tmp_path, [packed(("a.txt", b"mine"))]).fetch()
    folder = Path(answer["meta"]["location"])
    assert (folder / "workspace" / "a.txt").read_bytes() == b"mine"


def test_a_server_cannot_fill_the_disk_of_the_admin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with a file without an end, nor with files without number, nor with the
    answer to a command that fetches nothing."""
    monkeypatch.setattr(gate, "Download", partial(gate.Download, 2**20, 2**20, 100))
    endless = EndlessServer(tmp_path, itertools.repeat(bytes(2**16)))
    assert endless.fetch()["status"] != "SUCCESS"
    assert endless.problem.startswith("the server sends more than")
    many = LyingServer(tmp_path, tuple(f"{number}" for number in range(101)), "t")
    assert "more than 10,000 files" in many.fetch()["details"]
    unasked = LyingServer(tmp_path, ("meta",), "t")
    assert "nobody fetches" in unasked.pull()["details"]
    assert not list(tmp_path.iterdir())


def test_temporary_files_of_the_admin_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare writes it to the folder of temporary files, readable by everyone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with flare.using_private_temporary_files():
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert tempfile.gettempdir() == str(folder)
        (folder / "of the run").write_text("x")
    assert not list(tmp_path.iterdir())
    assert tempfile.gettempdir() == str(tmp_path)


def test_the_files_of_a_run_are_downloaded(tmp_path: Path) -> None:
    answer = LyingServer(tmp_path, ("meta", "site/job.txt"), "4d").fetch()
    folder = Path(answer["meta"]["location"])
    assert folder == tmp_path / "job-1"
    assert (folder / "meta").read_text() == "ref-meta"
    assert (folder / "site/job.txt").read_text() == "ref-site/job.txt"


# a site and those who give it orders


def test_the_network_manager_of_a_process_refuses_all_orders() -> None:
    """NVFlare's ends the process, or tests the network with as much memory as a message
    says."""
    orders: dict[str, Any] = {}
    cell = SimpleNamespace(
        register_request_cb=lambda channel, topic, cb: orders.update({topic: cb})
    )
    NetAgent(cell)
    assert {"stop", "stop_cell", "speed", "stress", "config_vars"} <= set(orders)
    for obey in orders.values():
        answer = obey(Message({}, {"to": "server", "num": 1, "size": 1}))
        assert answer.get_header(cells.MessageHeaderKey.ERROR) == "no run needs this"


def encode(value: Any) -> bytes:
    """Return a message of a sender that is not bound to NVFlare's types."""
    content: bytes = msgpack.packb(value)
    header: bytes = lobs.HEADER_STRUCT.pack(lobs.MARKER_MAIN, 0, len(content))
    return header + content


def encode_object(name: str, data: Any, decomposer: str = "DataClass") -> Any:
    return {
        "__fobs_type__": name,
        "__fobs_data__": data,
        "__fobs_dc__": f"nvflare.fuel.utils.fobs.decomposer.{decomposer}Decomposer",
    }


DATUM = "nvflare.fuel.utils.fobs.datum.Datum"


def test_a_task_cannot_make_a_site_send_a_file(tmp_path: Path) -> None:
    """A site sends the cookies of a task back. NVFlare reads the file that a datum
    names when it sends the datum."""
    note = tmp_path / "note.txt"
    note.write_text("a note")
    facts = {"datum_id": "0", "datum_type": 3, "dot": 0, "value": str(note)}
    datum = encode_object(DATUM, {"data": facts})
    with pytest.raises(ValueError, match=r"contains a nvflare.*Datum, which no run"):
        fobs.loads(encode({"cookies": datum}))
    with pytest.raises(ValueError, match="a file, which no run needs"):
        fobs.dumps({"cookies": Datum.file_datum(str(note))})


KNOWN_TYPES = BUILTIN_TYPES | {"builtins.tuple", "builtins.set", "os.PathLike"}
NEEDED_TYPES = {
    "nvflare.apis.client.Client",
    "nvflare.apis.fl_context.FLContext",
    "nvflare.apis.job_def.JobMetaKey",
    "nvflare.apis.shareable.Shareable",
    "nvflare.fuel.utils.fobs.datum.DatumRef",
    "nvflare.private.admin_defs.Message",
}


@pytest.mark.parametrize("name", sorted(KNOWN_TYPES - NEEDED_TYPES))
def test_a_message_with_an_object_that_no_run_needs_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a module is loaded, also within objects that a run needs, and in a large
    message that arrives in a file."""

    def refuse_loading(*_: Any) -> Any:
        pytest.fail("NVFlare loaded the module of a type")

    monkeypatch.setattr(nvflare_fobs, "load_class", refuse_loading)
    for decomposer in ("DataClass", "EnumType", "Dict"):
        inner = encode_object(name, {"data": {}}, decomposer)
        outer = encode_object("nvflare.apis.shareable.Shareable", {"a": [inner]})
        for message in map(encode, (inner, outer)):
            with pytest.raises(ValueError, match="which no run needs"):
                fobs.loads(message)
            stored = StoredBytes(tmp_path)
            stored.append(message)
            with pytest.raises(ValueError, match="which no run needs"):
                load_stored(stored)


def test_all_types_that_nvflare_registers_are_refused_unless_a_run_needs_them() -> None:
    """NVFlare accepts the types that its programs registered from anyone."""
    flare_decomposers.register()
    common_decomposers.register()
    private_decomposers.register()
    fobs.loads(fobs.dumps(1))  # registers those of Python's own types
    registered = set(nvflare_fobs._decomposers)
    assert len(registered) > 15
    for name in sorted(registered - NEEDED_TYPES):
        with pytest.raises(ValueError, match="which no run needs"):
            fobs.loads(encode(encode_object(name, {})))


def test_objects_that_a_run_needs_arrive(tmp_path: Path) -> None:
    context = FLContext()
    context.set_prop("name", "h1", private=False)
    order = Order("train.deploy", b"zip")
    order.set_header("job", {"sites": [1, 2]})
    client = Client("h1", "token")
    long_value = bytes(TEN_MEGA)
    task = Shareable({"frame": long_value, "inner": Shareable({"x": long_value})})
    objects = [context, order, client, JobMetaKey.JOB_CLIENTS, task]
    message = fobs.dumps(objects)
    stored = StoredBytes(tmp_path)
    stored.append(message)
    for received in (fobs.loads(message), load_stored(stored)):
        assert [type(each) for each in received] == [type(each) for each in objects]
        assert received[0].props == context.props
        assert vars(received[1]) == vars(order)
        assert vars(received[2]) == vars(client)
        assert received[3] is JobMetaKey.JOB_CLIENTS
        assert bytes(received[4]["frame"]) == long_value
        assert bytes(received[4]["inner"]["x"]) == long_value


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        (
            "nvflare.private.admin_defs.Message",
            {"data": {"get_header": 1}},
            "unexpected attributes",
        ),
        ("nvflare.private.admin_defs.Message", 7, "unexpected attributes"),
        (
            "nvflare.fuel.utils.fobs.datum.DatumRef",
            {"data": {}},
            "unexpected attributes",
        ),
        (
            "nvflare.fuel.utils.fobs.datum.DatumRef",
            {"data": {"datum_id": "0", "unwrap": True}},
            "a value that it does not contain",
        ),
        (["a", "list"], {}, "which no run needs"),
        ("x" * 10_000, {}, "x{40}.{0,50}, which no run needs"),
    ],
)
def test_an_object_with_unexpected_content_is_refused(
    name: Any, data: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        fobs.loads(encode(encode_object(name, data)))


def test_a_message_cannot_announce_more_than_it_contains() -> None:
    """msgpack would take memory for the announced number of items at each level."""
    levels = b"\xdd\x00\x0f\x00\x00" * 100
    content = levels + bytes(2_000_000)
    header = lobs.HEADER_STRUCT.pack(lobs.MARKER_MAIN, 0, len(content))
    with pytest.raises(ValueError, match="max_array_len"):
        fobs.loads(header + content)
    content = b"\xc4" + bytes(gate.MAX_FIRST_SECTION)
    header = lobs.HEADER_STRUCT.pack(lobs.MARKER_MAIN, 0, len(content))
    with pytest.raises(ValueError, match="apart from long values"):
        fobs.loads(header + content)


def test_nested_objects_are_decoded_in_linear_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVFlare would search the whole content of each object for references."""
    nested: Any = ["x"] * 1000
    for _ in range(100):
        data = {"a": nested}
        nested = encode_object("nvflare.apis.shareable.Shareable", data, "Dict")
    search = mock.Mock(side_effect=lambda value: value)
    monkeypatch.setattr(DatumManager, "internalize", search)
    fobs.loads(encode(nested))
    assert search.call_count <= 1100


@pytest.mark.parametrize(
    ("marker", "object_type", "problem"),
    [
        (lobs.MARKER_DATUM_FILE, 0, "a file, which no run needs"),
        (lobs.MARKER_DATUM_TEXT, dots.NUMPY_DOWNLOAD, "cannot find handler"),
    ],
)
def test_a_message_with_parts_that_no_run_needs_is_refused(
    marker: int,
    object_type: int,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVFlare writes files of a message to a folder, and never deletes them. For other
    parts, it fetches data from wherever they say."""
    monkeypatch.setenv("NVFLARE_DATUM_DIR", str(tmp_path))
    fobs.register(NumpyArrayDecomposer)
    name = bytes(range(16))
    message: bytes = fobs.dumps({"a": 1})
    part = name + b"content"
    header = lobs.HEADER_STRUCT.pack(marker, object_type, len(part))
    with pytest.raises((ValueError, RuntimeError), match=problem):
        fobs.loads(message + header + part)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("origin", "channel", "topic", "refusal"),
    [
        ("server", "admin", "train.deploy", ""),
        ("server.job-id", "client_command", "abort", ""),
        ("h1.job-id", "server_command", "get_task", ""),  # its own processes
        ("server.job-id", "aux_communication", "__end_run__", ""),
        ("h2", "admin", "train.check_status", "only the server gives orders"),
        ("h2.job-id", "client_command", "abort", "only the server gives orders"),
        # any of NVFlare's events, and files
        ("server", "aux_communication", "fed.event", "no run needs this"),
        ("server", "aux_communication", "ObjectStreamer.Request", "no run needs this"),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_site_obeys_only_orders_that_a_run_needs(
    origin: str,
    channel: str,
    topic: str,
    refusal: str,
    is_stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The message of a stream has the names of the stream in headers of its own."""
    judges: list[Any] = []
    core = SimpleNamespace(
        add_incoming_request_filter=lambda channel, topic, judge: judges.append(judge)
    )
    engine = SimpleNamespace(get_cell=lambda: SimpleNamespace(core_cell=core))
    context: Any = SimpleNamespace(
        get_identity_name=lambda: "h1", get_engine=lambda: engine
    )
    gate.obey_only_the_server(context)
    keys, names = cells.MessageHeaderKey, (channel, topic)
    headers = {keys.ORIGIN: origin}
    if is_stream:
        headers |= {"sm__ch": channel, "sm__tp": topic}
        names = ("sm__STREAM", "sm__DATA")
    headers |= dict(zip((keys.CHANNEL, keys.TOPIC), names, strict=True))
    (judge,) = judges
    answer = judge(Message(headers, None))
    assert (answer is None) == (refusal == "")
    if answer is not None:
        assert answer.get_header(keys.ERROR) == refusal
    is_stranger = origin.startswith("h2")
    assert ("only the server may send requests" in caplog.text) == is_stranger
