"""A PostgreSQL server of one test session, on a socket in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PASSWORD = "only-in-tests-7Q"
USER = "tester"
# Besides those in PATH, where Debian puts the programs of a server.
_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
_ACCOUNTS = ("postgres", "nobody")  # PostgreSQL refuses to run as root


@dataclass(frozen=True)
class Postgres:
    """A running server.

    Attributes:
        socket: The folder of its socket; it listens on no port.
    """

    socket: str

    def url(self, password: str = PASSWORD, database: str = "postgres") -> str:
        """The address of a database on the server, with a password."""
        return f"postgresql+psycopg://{USER}:{password}@/{database}?host={self.socket}"


def _find_program(name: str) -> str:
    for folder in _FOLDERS:
        if (folder / name).exists():
            return str(folder / name)
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"PostgreSQL is not installed: there is no program {name}")
    return program


def _find_account() -> pwd.struct_passwd | None:
    """The account that runs the server; None for that of the test."""
    if os.geteuid():
        return None
    for name in _ACCOUNTS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    pytest.skip("PostgreSQL does not run as root, and there is no other account")


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Start a server, and end it however the context ends; skip without PostgreSQL.

    The kernel ends it too if the test's process is killed.
    """
    initdb, server = _find_program("initdb"), _find_program("postgres")
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("util-linux is not installed: there is no program setpriv")
    account = _find_account()
    start = [setpriv, "--pdeathsig", "INT"]
    folder = tempfile.mkdtemp(prefix="fednotes-pg-")
    try:
        password_file = Path(folder, "password")
        password_file.write_text(PASSWORD, "utf-8")
        if account is not None:
            start += ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid)]
            start += ["--clear-groups"]
            for path in (folder, password_file):
                os.chown(path, account.pw_uid, account.pw_gid)
        data = f"{folder}/data"
        subprocess.run(
            [*start, initdb, "-D", data, "-U", USER, "--auth=scram-sha-256"]
            + [f"--pwfile={password_file}", "--no-sync", "--encoding=UTF8"]
            + ["--locale=C", "--no-instructions"],
            check=True,
            capture_output=True,
            cwd=folder,
        )
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": folder,
            "fsync": "off",
            "shared_buffers": "8MB",
            "max_connections": "20",
        }
        options = [part for item in settings.items() for part in ("-c", "=".join(item))]
        process = subprocess.Popen(
            [*start, server, "-D", data, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
        )
        try:
            postgres = Postgres(folder)
            _wait_until_ready(postgres, process)
            yield postgres
        finally:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_ready(postgres: Postgres, process: subprocess.Popen[bytes]) -> None:
    import psycopg

    address = postgres.url().replace("+psycopg", "")
    for _ in range(300):
        assert process.poll() is None, "the server has ended"
        try:
            psycopg.connect(address).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.05)
    raise AssertionError("the server does not answer")
