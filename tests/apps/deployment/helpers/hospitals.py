"""Three hospitals in three folders, and a network in this process between them and a
server."""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fednotes.apps.deployment.rules.guard import settle_job
from fednotes.apps.deployment.server import server_main
from fednotes.apps.deployment.site import site_main
from fednotes.apps.deployment.site_file import SITE_FILE, install_site_file
from fednotes.core.errors import FednotesError, TrainingError
from fednotes.core.messages import Frame
from fednotes.engines.host import SiteHost, explain_error, remove_folders
from fednotes.engines.launch import Setup
from fednotes.jobs.declaration import make_table_to_approve
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import simulate

OPEN = (
    "min_sites = 2\nsecure_sum = 'off'\nfreeze_embeddings = false\nshare_scores = true\n"
    "draws = 'job'\n"
)


class ServerKilled(BaseException):
    """Ends the server's part at once, as kill -9 would."""


class Network:
    """What NVFlare would be: asks sites one after the other, and starts those that are
    not up.

    A site that raises when it starts, or is in `down`, does not answer. kill: (a site
    or "server", after so many more answers). failed: why sites have no answer.
    """

    def __init__(self, setups: Mapping[str, Setup]) -> None:
        self.setups = setups
        self.members: dict[str, SiteHost] = {}
        self.down: set[str] = set()
        self.failed: dict[str, str] = {}
        self.lines: list[Mapping[str, Any]] = []
        self.frames: list[bytes] = []
        self.pause = threading.Event()
        self.kill: tuple[str, int] = ("", 0)
        self.silent = 0  # exchanges in a row without an answer
        self.exchanges = 0  # exchanges
        self.meanwhile: Any = lambda: None  # called before each exchange

    def publish(self, line: Mapping[str, Any]) -> None:
        json.dumps(line)
        self.lines.append(line)

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterator[tuple[str, bytes]]:
        self.exchanges += 1
        self.meanwhile()
        self.silent += 1
        assert self.silent < 100, self.failed  # nobody answers any more
        self.failed = {}
        for site, frame in frames.items():
            if site in self.down:
                continue
            try:
                if site not in self.members:
                    self.members[site] = site_main(self.setups[site])
                reply = self.members[site].handle(bytes(frame))
            except FednotesError as error:
                # as a site's executor
                self.failed[site] = remove_folders(explain_error(error, site))
                continue
            self.frames += [bytes(frame), reply]
            who, remaining = self.kill
            self.kill = (who, remaining - 1)
            if who and remaining == 1:
                self.kill = ("", 0)
                if who == "server":
                    raise ServerKilled
                self.members.pop(who)
                if who == site:
                    continue
            self.silent = 0
            yield site, reply


class Hospitals:
    """Kits of a server and of sites below `folder`, for one job.

    data: site → its [data] table. files: the table [files] of every site and of the
    server.
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        data: Mapping[str, Mapping[str, Any]],
        *,
        policy: str = OPEN,
        files: str = "",
        run: str = "run1",
        least: int = 0,
        approve: bool = True,
    ) -> None:
        self.folder, self.names = folder, tuple(data)
        self.declared = {"name": "job", "job": tomllib.loads(job)}
        self.least = least or len(data)
        self.setups = {name: self._setup(name, run) for name in ("", *data)}
        (self.setups[""].kit / "server.toml").write_text(files)
        for name, table in data.items():
            source = folder / f"{name}.toml"
            source.write_text(f"{files}[data]\n{lines(table)}[policy]\n{policy}")
            install_site_file(source, self.setups[name].kit)
            if approve:
                self.approve(name)
        self.network = Network(self.setups)

    def _setup(self, name: str, run: str) -> Setup:
        kit = self.folder / "kits" / (name or "server")
        out = kit / "job" / "fednotes"
        out.mkdir(parents=True, exist_ok=True)
        return Setup(
            kit,
            name,
            self.declared,
            "id",
            run,
            self.names,
            self.least,
            out,
            kit / "state" / run,
        )

    @property
    def table(self) -> dict[str, Any]:
        return make_table_to_approve(self.declared, self.names, self.least)

    def approve(self, name: str, yes: bool = True) -> None:
        settle_job(self.setups[name].kit, self.table, approve=yes, by="tester")

    def run(self) -> None:
        """Run the server's part, and start it again whenever it is killed."""
        while True:
            try:
                server_main(self.setups[""], self.network)
                return
            except ServerKilled:
                continue

    def refusal(self) -> str:
        """Run until a site has no answer; return the reason that the server learns."""

        def stop() -> None:
            if failures := list(self.network.failed.values()):
                raise TrainingError(failures[0])

        self.network.meanwhile = stop
        with pytest.raises(TrainingError) as stopped:
            self.run()
        assert not any((self.results(name) / "model").exists() for name in self.names)
        return str(stopped.value)

    def change(self, name: str, original: str, replacement: str) -> None:
        """Edit a site's own file once."""
        path = self.setups[name].kit / SITE_FILE
        text = path.read_text()
        path.write_text(
            text
            if replacement and replacement in text
            else text.replace(original, replacement)
        )

    def lines(self, kind: str) -> list[Mapping[str, Any]]:
        """What travelled to whoever watches, of one kind."""
        return [line for line in self.network.lines if line["kind"] == kind]

    def texts(self) -> str:
        """Return the texts of all events."""
        return "\n".join(line["text"] for line in self.lines("event"))

    def ends(self) -> dict[str, dict[str, bytes]]:
        """Return every site's model."""
        return {name: weights(self.results(name) / "model") for name in self.names}

    def results(self, name: str) -> Path:
        return self.setups[name].kit / "results" / self.setups[name].run

    @property
    def server(self) -> Path:
        return self.setups[""].folder


def lines(table: Mapping[str, Any]) -> str:
    """A table as TOML."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


def simulated_one(job: str, data: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Run the same job in one process."""
    table = tomllib.loads(job)
    table["sites"] = {
        name: {**table["sites"][name], **site_table}
        for name, site_table in data.items()
    }
    table["conditions"] = ["federated"]
    simulate(parse_job(table, "job", out.parent, "job.toml"), out)


def weights(folder: Path) -> dict[str, bytes]:
    """Return every number of a saved model."""
    bytes_by_tensor = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for name, value in load_file(path).items():
            bytes_by_tensor[f"{path.name}/{name}"] = value.numpy().tobytes()
    assert bytes_by_tensor
    return bytes_by_tensor


def simulated(
    job: str, data: Mapping[str, Mapping[str, Any]], out: Path
) -> dict[str, dict[str, bytes]]:
    """Return every site's model after a simulation."""
    simulated_one(job, data, out)
    return {
        name: weights(out / "federated" / "sites" / name / "model") for name in data
    }
