"""Requests of many at a time against one at a time, and what becomes of too many.

    python benchmarks/serve.py [--model FOLDER] [--clients 50] [--seconds 10]

`fednotes serve` as a process of its own, with the limits of the command; notes of ten generated
sentences, one a request; the model that `--model` names, or the demo's, trained here in a few
seconds. In turn:

    one at a time  a client that asks again once it is answered
    together       --clients of these; requests that wait are put to the model together
    flood          requests at three times the rate of the row above, whoever is answered; each is
                   answered with its prediction or with 429, and none is lost

The clients are one process too: with two cores or more it takes none of the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import httpx2

import fednotes as fn
from fednotes.data.synthetic import generate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from scratch import scratch

SENTENCES, NOTES, FLOOD, PATIENCE = 10, 64, 3, 120.0


@dataclass
class Told:
    """What clients saw: seconds of what was predicted, and how many were answered how."""

    seconds: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    took: float = 0.0

    @property
    def rate(self) -> float:
        """Predictions a second."""
        return self.codes["200"] / self.took

    def row(self, name: str) -> str:
        """Rate, median and 99th percentile in milliseconds, and the codes."""
        cuts = statistics.quantiles(self.seconds, n=100)
        codes = ", ".join(f"{code}: {number:,}" for code, number in sorted(self.codes.items()))
        times = f"{1000 * cuts[49]:>10.1f}{1000 * cuts[98]:>10.1f}"
        return f"{name:>14}{self.rate:>10.1f}{times}   {codes}"


def notes() -> list[str]:
    (site,) = generate(num_sites=1, sentences_per_site=SENTENCES * NOTES, seed=1)
    sentences = [document.text for document in site.data.train]
    return [" ".join(sentences[n::NOTES][:SENTENCES]) for n in range(NOTES)]


@contextmanager
def served(model: Path) -> Iterator[tuple[str, int]]:
    """A running server's address and process."""
    command = [sys.executable, "-m", "fednotes", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "listening at " not in line:
            raise SystemExit(f"the server did not start: {line}")
        try:
            yield line.split("listening at ")[1].strip(), process.pid
        finally:
            process.terminate()


async def ask(client: httpx2.AsyncClient, note: str, told: Told) -> None:
    begin = time.perf_counter()
    try:
        answer = await client.post("/predict", json={"text": note})
    except httpx2.HTTPError as error:
        told.codes[type(error).__name__] += 1
        return
    told.codes[str(answer.status_code)] += 1
    if answer.status_code == 200:
        told.seconds.append(time.perf_counter() - begin)


async def by_turns(client: httpx2.AsyncClient, clients: int, seconds: float) -> Told:
    """Each asks again once it is answered."""
    told, texts, begin = Told(), cycle(notes()), time.perf_counter()

    async def one() -> None:
        while time.perf_counter() - begin < seconds:
            await ask(client, next(texts), told)

    await asyncio.gather(*(one() for _ in range(clients)))
    told.took = time.perf_counter() - begin
    return told


async def flood(client: httpx2.AsyncClient, rate: float, seconds: float) -> tuple[Told, int]:
    """Requests at a rate, whoever is answered; and how many were sent."""
    told, texts, begin = Told(), cycle(notes()), time.perf_counter()
    asking = []
    while (passed := time.perf_counter() - begin) < seconds:
        while len(asking) < passed * rate:
            asking.append(asyncio.create_task(ask(client, next(texts), told)))
        await asyncio.sleep(0.001)
    await asyncio.gather(*asking)
    told.took = time.perf_counter() - begin
    return told, len(asking)


async def measure(address: str, clients: int, seconds: float) -> tuple[float, float]:
    """Predictions a second, together and one at a time."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=address, limits=limits, timeout=PATIENCE) as client:
        await by_turns(client, 1, 1.0)
        print(f"{'':>14}{'a second':>10}{'p50, ms':>10}{'p99, ms':>10}   answers")
        single = await by_turns(client, 1, seconds)
        print(single.row("one at a time"), flush=True)
        together = await by_turns(client, clients, seconds)
        print(together.row("together"), flush=True)
        much, sent = await flood(client, FLOOD * together.rate, seconds)
        print(much.row("flood"), flush=True)
        answered = much.codes["200"] + much.codes["429"]
        print(
            f"flood: {sent:,} sent in {seconds:g} s, {answered:,} answered, {sent - answered} lost"
        )
        if sent != answered:
            raise SystemExit("requests were lost")
        return together.rate, single.rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    with scratch() as folder:
        model = options.model or folder / "run/pooled/sites/pooled/model"
        if options.model is None:
            job = fn.job("demo", conditions=["pooled"], training={"epochs": 5})
            fn.simulate(job, folder / "run")
        with served(model) as (address, pid):
            together, single = asyncio.run(measure(address, options.clients, options.seconds))
            status = Path(f"/proc/{pid}/status").read_text()
            peak = next(line.split()[1] for line in status.splitlines() if "VmHWM" in line)
            print(f"the server held {int(peak) / 1024:.0f} MB at most")
    print(f"serve ratio={together / single:.2f} against one at a time")


if __name__ == "__main__":
    main()
