"""Whether the times of answers reveal to the server which site has more notes.

    python benchmarks/steady.py [--rounds 30] [--runs 6]

Three sites of 20, 60 and 100 generated sentences train FedNER's tagger (two epochs per
round) behind their hosts, under the secure sum of all three. The server's side measures
the time of each answer by the wall clock, and ranks the sites by their medians over the
rounds. One of six orders is right, so guessing is right in 17 % of all runs; without
`steady_replies`, the ranking is nearly always right.

The ratio is the time of a round with steady replies divided by the time without them.
Sites answer one after another here, so the ratio is larger than for sites that work at
the same time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from fednotes.core.messages import Frame, decode_request
from fednotes.core.types import SiteData, TagSet
from fednotes.data.split import make_sentence_documents
from fednotes.data.synthetic import generate
from fednotes.engines.answer_times import AnswerTimes
from fednotes.engines.deployed import Deployed
from fednotes.engines.history import OPENED
from fednotes.engines.host import SiteHost
from fednotes.engines.secure import SecureSeal, SecureSum
from fednotes.methods import fedner
from fednotes.taggers.tagger import read_tagger_config

SIZES = (20, 60, 100)
JOB = "steady"


@dataclass
class Watched:
    """A transport to hosts in this process, which measures their answers.

    Attributes:
        hosts: The hosts by site.
        seconds: Seconds of each answer to the task "train", by site.
    """

    hosts: Mapping[str, SiteHost]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def exchange(
        self, frames: Mapping[str, Frame], **options: Any
    ) -> Iterator[tuple[str, Frame]]:
        """Have the sites answer one after another."""
        for site, frame in frames.items():
            began = time.perf_counter()
            reply = self.hosts[site].handle(frame)
            if decode_request(frame).task == "train":
                self.seconds.setdefault(site, []).append(time.perf_counter() - began)
            yield site, reply


def run(rounds: int, seed: int, steady: bool, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each answer by site, the smallest site first."""
    generated = generate(num_sites=3, sentences_per_site=max(SIZES), seed=seed)
    data = [
        SiteData(
            s.data.id, s.data.tags, make_sentence_documents(s.data.train)[:size], (), ()
        )
        for s, size in zip(generated, SIZES, strict=True)
    ]
    names = tuple(site.id for site in data)
    config = fedner.Config(
        model=read_tagger_config({"tagger": "cnn-clstm-crf", "hashed_words": 4096}),
        exchange="weights",
        local_epochs=2,
        rounds=rounds,
        evaluate_every=rounds,
        tags=reduce(TagSet.union, (site.tags for site in data)),
        sites=len(data),
    )
    hosts = {
        site.id: SiteHost(
            partial(fedner.Site, site, config),
            folder / site.id,
            job=JOB,
            name=site.id,
            sealer=SecureSeal(
                site.id, names, job=JOB, threshold=3, record=folder / site.id / OPENED
            ),
            pace=AnswerTimes() if steady else None,
        )
        for site in data
    }
    watched = Watched(hosts)
    engine = Deployed(
        watched,
        names,
        folder / "server",
        job=JOB,
        summing=SecureSum(names, job=JOB, threshold=3),
    )
    fedner.train(engine, config)
    return {name: watched.seconds[name] for name in names}


def main() -> None:
    """Print how many runs are ranked right, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--runs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    took = {}
    for steady in (False, True):
        right, totals = 0, []
        for seed in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                durations = run(options.rounds, seed, steady, Path(folder))
            middle = [statistics.median(seconds) for seconds in durations.values()]
            right += middle == sorted(middle)
            totals.append(sum(map(sum, durations.values())) / options.rounds)
            listing = ", ".join(f"{1000 * mean:.1f}" for mean in middle)
            print(
                f"steady={steady} seed {seed}: median ms of {SIZES}: {listing}",
                flush=True,
            )
        took[steady] = statistics.median(totals)
        print(f"steady={steady}: {right} of {options.runs} runs ranked right")
    print(f"steady ratio={took[True] / took[False]:.2f} against at once")


if __name__ == "__main__":
    main()
