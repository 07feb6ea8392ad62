"""False kits, made from real ones, and networks of processes that must refuse them.

`Network.stop` ends every process that is started here.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from fednotes.apps.deployment.nvflare import kit as kit_files
from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.authority import (
    Authority,
    ProjectConfig,
    open_authority,
    provision,
    refuse_passphrase,
)
from fednotes.apps.deployment.nvflare.certificates import read_certificate, read_kit_key
from fednotes.apps.deployment.nvflare.processes import NO_WATCH_VARIABLE
from fednotes.apps.deployment.nvflare.renewal import create_key_pem
from fednotes.engines import launch

HELPERS = Path(__file__).parent
ADMIN = "admin@fednotes.org"
PEM = serialization.Encoding.PEM


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def project(port: int, *sites: str) -> ProjectConfig:
    return ProjectConfig("ward", "localhost", sites, port=port)


# The project of the fixtures `shared_kits` and `kits`.
PROJECT = project(free_port(), "a", "b", "c", "d", "h1", "h2")


# ---- what an authority does ----------------------------------------------------------


def trust_list_of(kits: Mapping[str, Path]) -> bytes:
    """Return the newest trust list of the authority of these kits."""
    return (kits["server"].parent / "trust.pem").read_bytes()


def revoke(
    kits: Mapping[str, Path], *names: str, project_of_kits: ProjectConfig = PROJECT
) -> bytes:
    """Revoke some of these kits at the authority; return its new trust list."""
    provision(project_of_kits, kits["server"].parent, revoke=names)
    return trust_list_of(kits)


def replace_root(kits: Mapping[str, Path], overlap: int) -> bytes:
    """Replace the authority's root; return the new trust list.

    overlap: days for which the old root stays valid.
    """
    authority = open_authority(PROJECT, kits["server"].parent)
    authority.replace_root(overlap)
    authority.save()
    return trust_list_of(kits)


# ---- false kits ----------------------------------------------------------------------


def reissue(
    issuer: x509.Certificate,
    signer: Any,
    certificate: x509.Certificate,
    key: Any,
    days: tuple[float, float],
) -> bytes:
    """Return a certificate as the old one is, for another key and other days.

    issuer: whose name it bears. signer: the key that signs. days: from and to, counted
    from now.
    """
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder(issuer.subject, certificate.subject, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days[0]))
        .not_valid_after(now + datetime.timedelta(days[1]))
    )
    for extension in certificate.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(signer, hashes.SHA256()).public_bytes(PEM)


def copy_kit(kit: Path, to: Path) -> Path:
    """Copy a kit, without the socket of a running process; return the copy."""
    shutil.copytree(kit, to, ignore=shutil.ignore_patterns(kit_files.INSIDE))
    return to


def redate(
    kit: Path, days: tuple[float, float], stem: str = "client", out: Path | None = None
) -> None:
    """Give a kit a certificate of its authority for other days, counted from now.

    out: the folder of the authority's kits, if the kit is not in it.
    """
    path = kit / "startup" / stem
    out = out or next(
        folder for folder in kit.parents if (folder / "authority").exists()
    )
    authority = Authority.open(
        out / "authority", "ward", refuse_passphrase, create=False
    )
    certificate = reissue(
        authority.root,
        authority.load_key(),
        read_certificate(path),
        read_kit_key(path),
        days,
    )
    path.with_suffix(".crt").write_bytes(certificate)


def take_identity(kit: Path, other_kit: Path) -> None:
    """Put another kit's key and certificate into a kit; its configuration stays."""
    for name in ("client.key", "client.crt"):
        shutil.copyfile(other_kit / "startup" / name, kit / "startup" / name)


def self_sign(kit: Path) -> None:
    """Give a kit a new key and a certificate that no authority signed."""
    path = kit / "startup/client"
    certificate = read_certificate(path)
    path.with_suffix(".key").write_bytes(create_key_pem())
    key = read_kit_key(path)
    path.with_suffix(".crt").write_bytes(
        reissue(certificate, key, certificate, key, (-1, 100))
    )


def make_false_kits(
    base: Path, genuine: Path, member: Path, port: int
) -> dict[str, Path]:
    """Make kits in the name of a true one, each wrong in one way.

    member: the kit of another site of the project.
    """
    outsider_kit = provision(project(port, genuine.name), base / "other")[genuine.name]
    false = {"other authority": outsider_kit}
    sources = {
        "outsider": outsider_kit,
        "self-signed": outsider_kit,
        "expired": genuine,
        "swapped": genuine,
    }
    for name, source in sources.items():
        false[name] = copy_kit(source, base / name)
        shutil.copyfile(
            genuine / "startup/rootCA.pem", false[name] / "startup/rootCA.pem"
        )
    self_sign(false["self-signed"])
    redate(false["expired"], (-30, -1), out=genuine.parents[1])
    take_identity(false["swapped"], member)
    return false


# ---- processes -----------------------------------------------------------------------


UNTIL_FINISHED = """
while not server.read_status(job).startswith("FINISHED"):
    time.sleep(0.3)
found, = [j for j in server.list_jobs() if j["job_id"] == job]
print(json.dumps([found["status"], found.get("job_deploy_detail", [])]))
"""
SUBMIT = "job = server.submit(Path(sys.argv[1]))\n"


def run_as_admin(
    kit: Path, code: str, *arguments: object, person: str = ADMIN, seconds: int = 30
) -> subprocess.CompletedProcess[str]:
    """Run a few lines as the admin, in a process of their own, as a command would."""
    program = (
        "import json, sys, time\nfrom pathlib import Path\n"
        "from fednotes.apps.deployment.nvflare.server import connecting_to_server\n"
        f"with connecting_to_server(Path({str(kit)!r}), {person!r}, {seconds}) as server:\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
    )
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
    )


@dataclass
class Network:
    """The kits of one network, and the processes that were started for it."""

    kits: dict[str, Path]
    project: ProjectConfig
    started: list[Path] = field(default_factory=list)

    @property
    def server(self) -> Path:
        return self.kits["server"]

    def start(self, *kits: Path, **variables: str) -> None:
        """Start the processes of these kits without a check of their certificates.

        variables: added to their environment.
        """
        ours = {
            launch.SERVER_MAIN: "refusal_mains:server_main",
            launch.SITE_MAIN: "refusal_mains:site_main",
            NO_WATCH_VARIABLE: "1",
            "PYTHONPATH": os.pathsep.join([str(HELPERS), *filter(None, sys.path)]),
        }
        for kit in kits:
            self.started.append(kit)
            processes.start(kit, ours | variables, check=False)

    def stop(self, *kits: Path) -> None:
        """End the processes of these kits, or of all."""
        for kit in kits or dict.fromkeys(self.started):
            processes.stop(kit, patience=5)

    def admin(
        self,
        code: str,
        *arguments: object,
        kit: Path | None = None,
        person: str = ADMIN,
    ) -> str:
        """Run a few lines as the admin; return the last line that they print.

        If they fail, it is the last line of the error.
        """
        completed = run_as_admin(
            kit or self.kits["admin"], code, *arguments, person=person, seconds=20
        )
        printed = completed.stderr if completed.returncode else completed.stdout
        return printed.strip().splitlines()[-1]

    def run(self, folder: Path) -> tuple[str, list[str]]:
        """Submit a job and wait for its end; return its status and NVFlare's details."""
        status, detail = json.loads(self.admin(SUBMIT + UNTIL_FINISHED.strip(), folder))
        return status, list(detail)

    def run_until(self, condition: Callable[[], bool], folder: Path) -> None:
        """Submit a job, and abort it as soon as something has happened."""
        job = self.admin(SUBMIT + "print(job)", folder)
        has_happened = until(condition, 300)
        self.admin("print(server.abort(sys.argv[1]))", job)
        assert has_happened


def accepts_connection(port: int, kit: Path) -> bool:
    """Return whether the server accepts a connection with a kit's certificate.

    With TLS 1.3 a server checks the certificate after the client's handshake. If it
    accepts the certificate, it sends the first frame of HTTP/2; otherwise it closes the
    connection. Raises SSLError if the kit's authority did not sign the server.
    """
    context = ssl.create_default_context(cafile=str(kit / "startup/rootCA.pem"))
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(kit / "startup/client.crt", kit / "startup/client.key")
    with (
        socket.create_connection(("localhost", port), 5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        secured.settimeout(5)
        return bool(secured.recv(9))


def log_of(kit: Path) -> str:
    """Return what a kit's processes wrote to the log and printed."""
    files = [*sorted(kit.rglob(kit_files.LOG_FILE)), *kit.glob(processes.OUTPUT_FILE)]
    return "\n".join(f.read_text(errors="replace") for f in files)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until something has happened, or for some seconds; return whether it has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.3)
    return condition()


def ward_job(
    out: Path,
    run: str,
    sites: Sequence[str] = ("h1", "h2"),
    rounds: int = 3,
    least: int = 2,
    **more: int,
) -> Path:
    """Write a job for `refusal_mains`; return its folder. more: further settings."""
    job = {"rounds": rounds, **more}
    return kit_files.write_job_folder(out, job, run=run, sites=sites, min_sites=least)


@contextmanager
def network(out: Path, *sites: str) -> Iterator[Network]:
    """Make the kits of a network; stop all its processes in the end."""
    config = project(free_port(), *sites)
    net = Network(provision(config, out), config)
    try:
        yield net
    finally:
        net.stop()
