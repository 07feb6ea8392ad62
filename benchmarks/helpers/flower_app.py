"""The job of `benchmarks/flower.py`, in one process and in Flower's simulation.

It is a separate module, because Flower's actors import it by its name.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sites import SENTENCES, make_config

from fednotes.core.federation import Option, State
from fednotes.core.tensors import fingerprint_tensors
from fednotes.core.types import SiteData, TagSet
from fednotes.core.update import Tensors, Update
from fednotes.data.formats import jsonl, read
from fednotes.data.synthetic import generate
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import RoundResult
from fednotes.engines.simulation import Simulation
from fednotes.engines.site_programs import SiteUpdate, run_task
from fednotes.methods import fedner

CONTENTS = "contents.json"


class Result(NamedTuple):
    """What a program printed about its run.

    Attributes:
        round_seconds: Wall-clock seconds of a round after the first one.
        fingerprint: SHA-256 of the server's final parameters.
        versions: The program's packages with their versions.
    """

    round_seconds: float
    fingerprint: str
    versions: str


# ---- the job -------------------------------------------------------------------------


def write_sites(folder: Path, num_sites: int) -> None:
    """Write the training sentences of generated sites, a file for each."""
    generated = generate(num_sites=num_sites, sentences_per_site=SENTENCES, seed=1)
    contents = [[site.data.id, site.data.tags.types] for site in generated]
    (folder / CONTENTS).write_text(json.dumps(contents), encoding="utf-8")
    for index, site in enumerate(generated):
        jsonl.write(site.data.train, folder / f"{index}.jsonl")


@functools.cache
def list_sites(folder: Path) -> tuple[SiteData, ...]:
    """Return the sites' names and entity types, without their notes."""
    contents = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
    return tuple(
        SiteData(name, TagSet(tuple(types)), (), (), ()) for name, types in contents
    )


@functools.cache
def read_config(folder: Path, rounds: int) -> Any:
    """Return the settings of a run with this number of measured rounds."""
    # The first round is not measured, and neither is the last one, which evaluates.
    return make_config(list_sites(folder), rounds + 2)


@functools.cache
def prepare_site(folder: Path, index: int, rounds: int) -> fedner.Site:
    """Return a site with its notes, prepared once in this process."""
    empty = list_sites(folder)[index]
    train = tuple(read(folder / f"{index}.jsonl"))
    data = SiteData(empty.id, empty.tags, train, (), ())
    return fedner.Site(data, read_config(folder, rounds))


class RoundClock:
    """Records when each round ends."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def end_round(self, _: RoundResult) -> None:
        """Record the end of a round."""
        self._ends.append(time.perf_counter())

    def mean_seconds(self) -> float:
        """Return the mean seconds of a round, without the first and the last one."""
        return (self._ends[-2] - self._ends[0]) / (len(self._ends) - 2)

    def make_result(self, state: State, versions: str) -> Result:
        """Return the result of a finished run."""
        fingerprint = fingerprint_tensors(state.tensors).hex()
        return Result(self.mean_seconds(), fingerprint, versions)


def run_fednotes(folder: Path, rounds: int) -> Result:
    """Run the job in this process."""
    num_sites = len(list_sites(folder))
    sites = [prepare_site(folder, index, rounds) for index in range(num_sites)]
    clock = RoundClock()
    engine = InProcess(sites, observer=clock.end_round)
    state = fedner.train(engine, read_config(folder, rounds))
    return clock.make_result(state, f"fednotes {version('fednotes')}")


# ---- the job in Flower ---------------------------------------------------------------


class FlowerPrograms:
    """Site programs that run as Flower's clients; see `SitePrograms`.

    It has no `states` and no `restore`, because this benchmark writes no checkpoints.

    Args:
        grid: Flower's `Grid`, which carries the messages.
        folder: The job's folder.
        rounds: The number of measured rounds.
    """

    def __init__(self, grid: Any, folder: Path, rounds: int) -> None:
        self.names = tuple(site.id for site in list_sites(folder))
        self._grid = grid
        self._job = {"folder": str(folder), "rounds": rounds}

    def run(
        self,
        task: str,
        tensors: Tensors,
        options: Mapping[str, Option],
        sites: Collection[str] | None = None,
    ) -> Iterator[SiteUpdate]:
        """Run a task at all clients; yield their updates in the order of the sites."""
        from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

        assert sites is None, "all sites take part"
        request = {**self._job, "task": task, "options": json.dumps(dict(options))}
        records = {
            "tensors": ArrayRecord(dict(tensors)),
            "request": ConfigRecord(request),
        }
        messages = [
            Message(RecordDict(records), node, "train")
            for node in self._grid.get_node_ids()
        ]
        updates = {}
        for reply in self._grid.send_and_receive(messages):
            assert not reply.has_error(), reply.error
            facts = reply.content["facts"]
            updates[facts["index"]] = Update(
                reply.content["tensors"].to_torch_state_dict(),
                facts["weight"],
                json.loads(facts["metrics"]),
            )
        for index, site in enumerate(self.names):
            yield SiteUpdate(site, updates[index])


def run_task_at_client(message: Any, context: Any) -> Any:
    """Run a task at the site of a client, as Flower's `ClientApp` calls it.

    Args:
        message: Flower's message with the task.
        context: Flower's context of the client, which stores the site's state.

    Returns:
        The reply, with the site's update.
    """
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    torch.set_num_threads(1)
    request = message.content["request"]
    index = int(context.node_config["partition-id"])
    site = prepare_site(Path(request["folder"]), index, request["rounds"])
    if "state" in context.state:
        saved = context.state["state"]
        tensors = context.state["tensors"].to_torch_state_dict()
        site.restore(State(saved["round"], tensors, json.loads(saved["facts"])))

    tensors = message.content["tensors"].to_torch_state_dict()
    update = run_task(site, request["task"], tensors, json.loads(request["options"]))

    state = site.state()
    context.state["tensors"] = ArrayRecord(dict(state.tensors))
    context.state["state"] = ConfigRecord(
        {"round": state.round, "facts": json.dumps(dict(state.facts))}
    )
    facts = {
        "index": index,
        "weight": float(update.weight),
        "metrics": json.dumps(dict(update.metrics)),
    }
    content = {
        "tensors": ArrayRecord(dict(update.tensors)),
        "facts": ConfigRecord(facts),
    }
    return Message(RecordDict(content), reply_to=message)


def run_flower(folder: Path, rounds: int) -> Result:
    """Run the job in Flower's simulation, with an actor for each core."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    client_app = ClientApp()
    client_app.train()(run_task_at_client)
    server_app = ServerApp()
    clock = RoundClock()
    ended: list[State] = []

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        del context
        engine = Simulation(
            FlowerPrograms(grid, folder, rounds), observer=clock.end_round
        )
        ended.append(fedner.train(engine, read_config(folder, rounds)))

    cores = len(os.sched_getaffinity(0))
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores},
    }
    run_simulation(
        server_app, client_app, len(list_sites(folder)), backend_config=backend
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("flwr", "ray"))
    return clock.make_result(ended[0], versions)
