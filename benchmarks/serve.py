"""Speed of `fednotes serve`: one request at a time, many at once, and an overload.

    python benchmarks/serve.py [--model FOLDER] [--clients 50] [--seconds 10]

`fednotes serve` runs as a separate process with the default limits of the command. Notes
have ten generated sentences, with one note per request. The model is the one that
`--model` names, or the demo's, which is trained here in a few seconds. The loads, one
after another:

    one at a time  a client that sends the next request once it has an answer
    together       --clients of these; the model processes waiting requests together
    flood          requests at three times the rate of the row above, without waiting for answers;
                   each is answered with its prediction or with 429, and none is lost

All clients are one process; with two cores or more, it takes no time from the server.
"CPU, ms" is the time that the server's process spends on a prediction, including its
refusals; it is also valid on a machine with other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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

import fednotes as fn
from fednotes.data.synthetic import generate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from scratch import scratch

SENTENCES, NOTES, FLOOD, PATIENCE = 10, 64, 3, 120.0


@dataclass
class LoadTotals:
    """The results of a load.

    Attributes:
        seconds: Seconds until each prediction arrived.
        codes: The number of answers by status code.
        took: Seconds of the load.
        cpu: Seconds that the server computed.
    """

    seconds: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    took: float = 0.0
    cpu: float = 0.0

    @property
    def rate(self) -> float:
        """Predictions per second."""
        return self.codes["200"] / self.took

    def row(self, name: str) -> str:
        """Return a row of the table.

        It has the rate, the median, the 99th percentile and the server's CPU time in
        milliseconds, and the codes.
        """
        cuts = statistics.quantiles(self.seconds, n=100)
        codes = ", ".join(
            f"{code}: {number:,}" for code, number in sorted(self.codes.items())
        )
        cpu_time = 1000 * self.cpu / self.codes["200"]
        times = f"{1000 * cuts[49]:>10.1f}{1000 * cuts[98]:>10.1f}{cpu_time:>10.1f}"
        return f"{name:>14}{self.rate:>10.1f}{times}   {codes}"


def notes() -> list[str]:
    """Return generated notes."""
    (site,) = generate(num_sites=1, sentences_per_site=SENTENCES * NOTES, seed=1)
    sentences = [document.text for document in site.data.train]
    return [" ".join(sentences[n::NOTES][:SENTENCES]) for n in range(NOTES)]


@contextmanager
def served(model: Path) -> Iterator[tuple[str, int]]:
    """Run a server; yield its address and the id of its process."""
    command = [sys.executable, "-m", "fednotes", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "listening at " not in line:
            raise SystemExit(f"error: the server did not start: {line}")
        try:
            yield line.split("listening at ")[1].strip(), process.pid
        finally:
            process.terminate()


async def ask(address: str, note: str, totals: LoadTotals) -> None:
    """Send a request over a connection of its own.

    The connection pool of a library would take more time than the server.
    """
    host, _, port = address.removeprefix("http://").partition(":")
    body, begin = json.dumps({"text": note}).encode(), time.perf_counter()
    head = (
        f"POST /predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    )
    head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            answer = await reader.read()
            writer.close()
    except OSError as error:  # including TimeoutError
        totals.codes[type(error).__name__] += 1
        return
    code = (
        answer[9:12].decode()
        if b'"results":' in answer or answer[9:12] != b"200"
        else "cut off"
    )
    totals.codes[code] += 1
    if code == "200":
        totals.seconds.append(time.perf_counter() - begin)


async def by_turns(address: str, clients: int, seconds: float) -> LoadTotals:
    """Run clients, each of which sends the next request after an answer."""
    totals, texts, begin = LoadTotals(), cycle(notes()), time.perf_counter()

    async def send_notes() -> None:
        """Be one of the clients."""
        while time.perf_counter() - begin < seconds:
            await ask(address, next(texts), totals)

    await asyncio.gather(*(send_notes() for _ in range(clients)))
    totals.took = time.perf_counter() - begin
    return totals


async def flood(address: str, rate: float, seconds: float) -> tuple[LoadTotals, int]:
    """Send requests at a rate without waiting for answers; also return their number."""
    totals, texts, begin = LoadTotals(), cycle(notes()), time.perf_counter()
    asking = []
    while (passed := time.perf_counter() - begin) < seconds:
        while len(asking) < passed * rate:
            asking.append(asyncio.create_task(ask(address, next(texts), totals)))
        await asyncio.sleep(0.001)
    await asyncio.gather(*asking)
    totals.took = time.perf_counter() - begin
    return totals, len(asking)


def busy(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    address: str, pid: int, clients: int, seconds: float
) -> tuple[float, float]:
    """Measure all loads; return the predictions per second, together and one at a time."""
    await by_turns(address, 1, 1.0)
    heads = ("a second", "p50, ms", "p99, ms", "CPU, ms")
    print(f"{'':>14}{''.join(f'{head:>10}' for head in heads)}   answers")
    begin = busy(pid)
    single = await by_turns(address, 1, seconds)
    single.cpu, begin = busy(pid) - begin, busy(pid)
    print(single.row("one at a time"), flush=True)
    together = await by_turns(address, clients, seconds)
    together.cpu, begin = busy(pid) - begin, busy(pid)
    print(together.row("together"), flush=True)
    much, sent = await flood(address, FLOOD * together.rate, seconds)
    much.cpu = busy(pid) - begin
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
            together, single = asyncio.run(
                measure(address, pid, options.clients, options.seconds)
            )
            status = Path(f"/proc/{pid}/status").read_text()
            peak = next(
                line.split()[1] for line in status.splitlines() if "VmHWM" in line
            )
            print(f"the server held {int(peak) / 1024:.0f} MB at most")
    print(f"serve ratio={together / single:.2f} against one at a time")


if __name__ == "__main__":
    main()
