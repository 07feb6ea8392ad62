"""The connection between the processes of a kit is closed to other users.

The intruder is another account, in a process of its own, that speaks NVFlare's protocol
in the server's name. It was let in at a port on loopback, was told the site's token,
and took the place of the server's own connection.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare")

import intruders
import msgpack
import psutil
import refusal_mains
from intruders import SUBMIT, UNTIL_FINISHED, log_of, until, ward_job

from fednotes.apps.deployment.nvflare import gate, processes
from fednotes.apps.deployment.nvflare.kit import INSIDE
from fednotes.apps.deployment.nvflare.processes import KIT_VARIABLE

NOBODY = 65534
ROUNDS = 60
needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can become another user"
)


def hello(name: str) -> bytes:
    """Return NVFlare's first frame of a connection: lengths, type 4, …, and the
    speaker."""
    greeting = msgpack.packb({"endpoint_name": name, "timestamp": 0.0, "fqcn": name})
    return struct.pack(">IHBBHHHH", 16 + len(greeting), 0, 4, 0, 0, 1, 0, 0) + greeting


def intrude(address: str | tuple[str, int], name: str) -> str:
    """Say hello at an address as another user; return "told N bytes", or the error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as door:
                door.settimeout(5)
                door.connect(address)
                door.sendall(hello(name))
                reply = f"told {len(door.recv(4096))} bytes"
        except OSError as error:
            reply = type(error).__name__
        finally:
            os.write(writing, reply.encode())
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def ports(kit: Path) -> set[int]:
    """Return the TCP ports at which the processes of a kit listen."""
    running = [
        psutil.Process(pid) for pid, _ in processes.list_processes(kit.resolve())
    ]
    return {
        connection.laddr.port
        for process in running
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that everybody can walk through, as after careless unpacking."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
@pytest.mark.network
def test_another_user_cannot_connect_to_a_site_or_server(open_folder: Path) -> None:
    """Neither at a site nor at the server, while a run goes on; and it goes on to its
    end."""
    names = ("server", "h1", "h2")
    with intruders.network(open_folder / "kits", *names[1:]) as net:
        kits, port = net.kits, net.project.port
        for name in names:
            for folder in (kits[name], *kits[name].parents[: 1 + (name != "server")]):
                folder.chmod(0o755)
        net.start(*(kits[name] for name in names))
        waiting = "while len(server.list_sites()) < 2:\n    time.sleep(0.3)\n"
        folder = ward_job(open_folder, "r", rounds=ROUNDS)
        job = net.admin(waiting + SUBMIT + "print(job)", folder)
        frames = kits["server"] / "state/r/frames"
        assert until(lambda: len(list(frames.glob("*"))) > 8, 300)
        assert [ports(kits[name]) for name in names] == [{port}, set(), set()]
        for name, spoken in (("server", "server.x"), ("h1", "server"), ("h1", "h1.x")):
            assert (
                intrude(str(kits[name] / INSIDE / gate.SOCKET), spoken)
                == "PermissionError"
            )
            assert stat.S_IMODE((kits[name] / INSIDE).stat().st_mode) == 0o700
            kits[name].chmod(0o755)  # which its start had closed
            (kits[name] / INSIDE).chmod(0o777)  # the system's word of who it is remains
            (kits[name] / INSIDE / gate.SOCKET).chmod(0o777)
            reply = intrude(str(kits[name] / INSIDE / gate.SOCKET), spoken)
            assert reply in ("told 0 bytes", "ConnectionResetError", "BrokenPipeError")
            assert f"user {NOBODY} of this machine was refused" in log_of(kits[name])
            (kits[name] / INSIDE).chmod(0o700)
        assert not (kits["server"] / "state/r/result.json").exists()
        lines = "job = sys.argv[1]" + UNTIL_FINISHED
        assert json.loads(net.admin(lines, job))[0] == "FINISHED:COMPLETED"
    rows = json.loads((kits["server"] / "state/r/result.json").read_text())
    assert [row["included"] for row in rows] == [["h1", "h2"]] * ROUNDS
    expected = refusal_mains.total(["h1", "h2"], ROUNDS)
    assert [row["x"][0] for row in rows] == pytest.approx(expected, rel=1e-5)


@needs_root
def test_a_process_of_another_user_is_not_counted_as_part_of_a_kit(
    shared_kits: dict[str, Path],
) -> None:
    """Whatever words it gives itself: the kit would not start, nor end, by them."""
    kit = shared_kits["h1"].resolve()
    # `read` is a part of the shell: another process of these words would be found too.
    words = ["sh", "-c", "read line", f"{processes.JOB_MODULES}x", str(kit)]
    for user, is_listed in ((NOBODY, False), (os.getuid(), True)):
        false = subprocess.Popen(
            words, user=user, start_new_session=True, stdin=subprocess.PIPE
        )
        try:
            assert [pid for pid, _ in processes.list_processes(kit)] == [
                false.pid
            ] * is_listed
        finally:
            os.killpg(false.pid, signal.SIGKILL)
            false.communicate()


@pytest.mark.parametrize("depth", [1, 12])
def test_the_socket_is_fresh_and_private_whatever_the_depth_of_the_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Linux takes 107 bytes of a path.

    What a killed process left is in nobody's way.
    """
    kit = tmp_path.joinpath(*["a-long-folder"] * depth)
    kit.mkdir(parents=True)
    monkeypatch.setenv(KIT_VARIABLE, str(kit))
    (kit / INSIDE).mkdir(mode=0o755)
    for _ in range(2):
        (kit / INSIDE).chmod(0o755)
        listener = gate._Listener(
            gate.KitSocketDriver(), SimpleNamespace(), kit / INSIDE
        )
        assert stat.S_IMODE((kit / INSIDE).stat().st_mode) == 0o700
        with (
            socket.socket(socket.AF_UNIX) as door,
            gate.shortening_socket_path(kit / INSIDE) as address,
        ):
            door.connect(address)
            accepted, _ = listener.get_request()
            assert listener.verify_request(accepted, None)
            with monkeypatch.context() as patch:
                patch.setattr(os, "getuid", lambda: NOBODY)
                assert not listener.verify_request(accepted, None)
            accepted.close()
        listener.server_close()
    assert (kit / INSIDE / gate.SOCKET).is_socket()
