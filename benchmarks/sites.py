"""Growth of a simulated round's seconds and memory with the number of sites.

    python benchmarks/sites.py [--sites 3 30 300 1000] [--rounds 5] [--drawn N]

Sites of about 100 generated sentences train the demo's light tagger by FedNER, which
exchanges gradients: a round is one mini-batch at each site. Each number of sites runs in
a separate process, on one thread. Seconds are CPU seconds.

The overhead of a site is the time of a round outside the sites' tasks, divided by the
number of sites. The memory of a site is the growth of the process, at the end of the
run, from the fewest sites to this number, divided by the number of additional sites. It
is compared with what a site must hold: its parameters, and the optimizer's moments of
the parameters that it updates itself.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fednotes as fn
from fednotes.core.federation import Option, SiteTasks
from fednotes.core.seeds import Draws
from fednotes.core.tensors import nbytes
from fednotes.core.types import SiteData
from fednotes.core.update import Tensors, Update
from fednotes.data.synthetic import generate
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import RoundResult
from fednotes.engines.sampling import RoundSampling
from fednotes.methods import fedner

SENTENCES = 100
MOST_OVERHEAD = 1e-3  # seconds of a site in a round


class Row(NamedTuple):
    """The measurement of a number of sites.

    Attributes:
        sites: The number of sites.
        round_seconds: CPU seconds of a round.
        overhead_seconds: CPU seconds of a round outside the sites' tasks, per site.
        peak_bytes: The process's peak memory.
        sites_bytes: What the sites add to the process's size, without their notes.
        state_bytes: What a site must hold.
    """

    sites: int
    round_seconds: float
    overhead_seconds: float
    peak_bytes: int
    sites_bytes: int
    state_bytes: int


class Timed(InProcess):
    """A federation that measures the seconds of the sites' tasks."""

    task_seconds = 0.0

    def run(
        self,
        site: SiteTasks,
        task: str,
        tensors: Tensors,
        options: Mapping[str, Option],
    ) -> Update:
        """Run a task at one site, and count its seconds."""
        start = time.process_time()
        update = super().run(site, task, tensors, options)
        self.task_seconds += time.process_time() - start
        return update


def make_config(data: Sequence[SiteData], rounds: int) -> Any:
    """Return the settings of a run without an evaluation before its end."""
    table = {
        "method": "fedner",
        "seed": 1,
        "synthetic": {"sites": len(data), "sentences": SENTENCES},
        "training": {
            "rounds": rounds,
            "evaluate_every": 10**6,
            "personal_epochs": 0,
            "select": "last",
        },
        "model": fn.job("demo").table["model"],
    }
    job = fn.job(table)
    return job.module.configure(job.config, data)


def measure(num_sites: int, rounds: int, drawn: int | None) -> Row:
    """Measure rounds of a number of sites in this process.

    The last round evaluates, so it is not measured, and neither is the first one.
    """
    torch.set_num_threads(1)
    generated = generate(num_sites=num_sites, sentences_per_site=SENTENCES, seed=1)
    data = [
        SiteData(site.data.id, site.data.tags, site.data.train, (), ())
        for site in generated
    ]
    config = make_config(data, rounds + 2)
    data_bytes = resident_bytes()
    members = [fedner.Site(site, config) for site in data]
    ends: list[tuple[float, float]] = []

    def end_round(_: RoundResult) -> None:
        ends.append((time.process_time(), engine.task_seconds))

    sampling = None
    if drawn is not None:
        sampling = RoundSampling(drawn, Draws(1), fedner.Site.for_all_sites)
    engine = Timed(members, observer=end_round, sampling=sampling)
    fedner.train(engine, config)

    (first, first_tasks), (last, last_tasks) = ends[0], ends[-2]
    round_seconds = (last - first) / rounds
    task_seconds = (last_tasks - first_tasks) / rounds
    site = members[0]
    # Gradients are not counted, because only one site has them at a time.
    state_bytes = nbytes(site.model.trainable()) + 2 * nbytes(site.private)
    return Row(
        sites=num_sites,
        round_seconds=round_seconds,
        overhead_seconds=(round_seconds - task_seconds) / (drawn or num_sites),
        peak_bytes=peak_bytes(),
        sites_bytes=resident_bytes() - data_bytes,
        state_bytes=state_bytes,
    )


def peak_bytes() -> int:
    """Return the process's largest resident size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Return the process's present size, without memory that was freed."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure_apart(num_sites: int, options: argparse.Namespace) -> Row:
    """Measure a number of sites in a process of its own."""
    command = [sys.executable, __file__, "--one", str(num_sites)]
    command += ["--rounds", str(options.rounds)]
    if options.drawn is not None and options.drawn < num_sites:
        command += ["--drawn", str(options.drawn)]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Row(*json.loads(completed.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 30, 300, 1000])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument(
        "--drawn", type=int, help="number of sites drawn for each round"
    )
    parser.add_argument(
        "--one",
        type=int,
        help="measure one number of sites in this process and print JSON",
    )
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.rounds, options.drawn)))
        return

    rows = []
    print("sites  s a round  overhead ms a site  peak MB  MB a site  state MB a site")
    for num_sites in options.sites:
        row = measure_apart(num_sites, options)
        rows.append(row)
        per_site = memory_of_site(rows[0], row)
        print(
            f"{row.sites:5}  {row.round_seconds:9.3f}  "
            f"{1e3 * row.overhead_seconds:18.3f}  {row.peak_bytes / 1e6:7.0f}  "
            f"{per_site / 1e6:9.3f}  {row.state_bytes / 1e6:15.3f}",
            flush=True,
        )
    last = rows[-1]
    print(
        f"sites-overhead ratio={MOST_OVERHEAD / last.overhead_seconds:.2f} "
        "against 1 ms a site a round"
    )
    print(
        f"sites-memory ratio={last.state_bytes / memory_of_site(rows[0], last):.2f} "
        "against the state of a site"
    )


def memory_of_site(fewest: Row, row: Row) -> float:
    """Return the memory of a further site in bytes, without its notes."""
    further_sites = row.sites - fewest.sites
    if not further_sites:
        return float("nan")
    return (row.sites_bytes - fewest.sites_bytes) / further_sites


if __name__ == "__main__":
    main()
