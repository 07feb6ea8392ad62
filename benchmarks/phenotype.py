"""An epoch of stage 1 of phenotyping at the paper's scale, with and without padding.

    python benchmarks/phenotype.py                     44,211 patients, 174 codes, 10 sites
    python benchmarks/phenotype.py --vocabulary 100000 --batch 128
    python benchmarks/phenotype.py --patients 4421     a tenth of it

The patients are generated (`tools/synthetic_cohort.py`). An epoch here is a whole global
cycle of `apps/phenotyping/two_stage.py` with one local epoch, including the agreement on
outputs. "Padded" is what one would write first: concepts are padded to the longest
patient of a batch, embedded and averaged under a mask, with Adam over the whole table.
It trains `--steps` batches spread over the sites; the time of its epoch is computed from
these. Each program runs in a separate process. Peak memory is the largest resident size
of that process, including generated patients and libraries. Both must have the same loss
on the first batch. The last line is the ratio of the epochs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.cohort import Bags, Cohort, FeatureSpace, SitePatients
from fednotes.apps.phenotyping.dan import Dan, DanConfig
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig
from fednotes.engines.inprocess import InProcess

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from scratch import scratch
from synthetic_cohort import generate

RATE = 1e-3


def batches(patients: int, size: int, site: int) -> list[np.ndarray]:
    """Return the rows of each batch of an epoch; they are the same in both programs."""
    order = np.random.default_rng(site).permutation(patients)
    return np.array_split(order, -(-patients // size))


def flat_epoch(sites: Sequence[Cohort], dan: Dan, size: int) -> dict[str, float]:
    """Time a global cycle of the method, as a job runs it in the in-process engine."""
    rows = batches(len(sites[0]), size, 0)[0]
    first = float(dan.loss(sites[0].bags.take(rows), sites[0].labels[rows]).detach())
    patients = tuple(map(of_codes, sites))
    config = phenotype.Config(
        cycles=1,
        batch_size=size,
        systems=("icd9",),
        minimum=1,
        learning_rate=RATE,
        model=PhenotypeConfig(network=dan.config),
    )
    config = phenotype.METHOD.configure(config, patients)
    engine = InProcess([phenotype.Site(site, config) for site in patients])
    start = time.perf_counter()
    phenotype.train(engine, config)
    return {"seconds": time.perf_counter() - start, "loss": first}


def of_codes(cohort: Cohort) -> SitePatients:
    """Return a generated cohort as a site; the patients' outputs are billed codes."""
    codes = {
        patient: frozenset(f"icd9:{at + 1:03d}" for at in np.flatnonzero(row == 1))
        for patient, row in zip(cohort.patients, cohort.labels, strict=True)
    }
    bare = replace(cohort, labels=np.zeros((len(cohort), 0), np.int8), outputs=())
    space = FeatureSpace(cohort.bags.vocabulary, recipe={"fingerprint": "generated"})
    nobody = bare.take([])
    return SitePatients(cohort.id, space, bare, nobody, nobody, codes)


class Padded(nn.Module):
    """The network as one would write it first, with a mean under a mask."""

    def __init__(self, dan: Dan) -> None:
        super().__init__()
        vocabulary, width = dan.inputs, dan.config.embedding
        self.embedding = nn.Embedding(vocabulary + 1, width, padding_idx=vocabulary)
        self.hidden = nn.Linear(width, dan.config.hidden)
        self.output = nn.Linear(dan.config.hidden, dan.outputs)
        with torch.no_grad():
            parameters, dan_parameters = self.state_dict(), dan.trainable()
            parameters["embedding.weight"][:vocabulary] = dan_parameters["embedding"]
            for name in ("hidden", "output"):
                parameters[f"{name}.weight"].copy_(dan_parameters[f"{name}_weight"])
                parameters[f"{name}.bias"].copy_(dan_parameters[f"{name}_bias"])

    def forward(self, concepts: Tensor, mask: Tensor) -> Tensor:
        """Return logits (patients, outputs).

        Args:
            concepts: (patients, longest).
            mask: (patients, longest).
        """
        total = (self.embedding(concepts) * mask[:, :, None]).sum(1)
        mean = total / mask.sum(1, keepdim=True).clamp(min=1)
        out: Tensor = self.output(torch.relu(self.hidden(mean)))
        return out


def pad(bags: Bags, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the concepts of patients, padded to the longest one, and their mask."""
    lists = [
        torch.from_numpy(bags.concepts[bags.offsets[r] : bags.offsets[r + 1]])
        for r in rows
    ]
    padded = nn.utils.rnn.pad_sequence(
        lists, batch_first=True, padding_value=bags.vocabulary
    )
    return padded.long(), (padded != bags.vocabulary).float()


def padded_epoch(
    sites: Sequence[Cohort], dan: Dan, size: int, steps: int
) -> dict[str, float]:
    """Train some batches of the padded network.

    Returns the seconds that all batches of an epoch would take.
    """
    model = Padded(dan)
    adam = torch.optim.Adam(model.parameters(), lr=RATE)
    every = [
        (s, rows) for n, s in enumerate(sites) for rows in batches(len(s), size, n)
    ]
    chosen = every[:: max(1, len(every) // steps)]
    first, start = 0.0, time.perf_counter()
    for site, rows in chosen:
        logits = model(*pad(site.bags, rows))
        loss = F.binary_cross_entropy_with_logits(
            logits, torch.from_numpy(site.labels[rows]).float()
        )
        first = first or float(loss.detach())
        adam.zero_grad()
        loss.backward()
        adam.step()
    seconds = (time.perf_counter() - start) / len(chosen) * len(every)
    return {"seconds": seconds, "loss": first, "steps": len(chosen), "all": len(every)}


def measure(arguments: argparse.Namespace) -> None:
    """Measure one program in this process, and print a line of JSON."""
    torch.set_num_threads(arguments.threads)
    sites = generate(
        arguments.patients,
        10,
        174,
        arguments.vocabulary,
        mean_concepts=arguments.concepts,
    )
    entries = sum(len(site.bags.concepts) for site in sites)
    before = peak()
    dan = Dan(DanConfig(updates=arguments.updates), arguments.vocabulary, 174)
    if arguments.only == "padded":
        epoch = padded_epoch(sites, dan, arguments.batch, arguments.steps)
    else:
        epoch = flat_epoch(sites, dan, arguments.batch)
    print(json.dumps(epoch | {"peak": peak(), "before": before, "entries": entries}))


def peak() -> float:
    """Return the process's largest resident size so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="an epoch of stage 1 without padding")
    parser.add_argument("--patients", type=int, default=44_211)
    parser.add_argument("--vocabulary", type=int, default=20_000)
    parser.add_argument(
        "--concepts", type=float, default=500.0, help="concepts per patient, on average"
    )
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument(
        "--steps", type=int, default=40, help="steps of the padded program"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--updates", choices=("rows", "dense"), default="rows")
    parser.add_argument(
        "--only", choices=("flat", "padded"), help="run one program and print JSON"
    )
    arguments = parser.parse_args()
    if arguments.only:
        measure(arguments)
        return
    results = {}
    for name in ("flat", "padded"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        with scratch() as folder:
            completed = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder
            )
        results[name] = json.loads(completed.stdout.splitlines()[-1])
    flat, padded = results["flat"], results["padded"]
    if abs(flat["loss"] - padded["loss"]) > 1e-5:
        raise SystemExit(
            f"the first losses differ: {flat['loss']} and {padded['loss']}"
        )
    print(
        f"{arguments.patients} patients, {flat['entries'] / 1e6:.1f} million concepts of "
        f"{arguments.vocabulary}, batches of {arguments.batch}, {arguments.threads} threads"
    )
    print(
        f"fednotes  {flat['seconds']:8.1f} s an epoch over 10 sites, peak {flat['peak']:.2f} GB "
        f"({flat['before']:.2f} before)"
    )
    print(
        f"padded    {padded['seconds']:8.1f} s, from {padded['steps']} of {padded['all']} steps; "
        f"peak {padded['peak']:.2f} GB"
    )
    print(
        f"phenotype ratio={padded['seconds'] / flat['seconds']:.1f} against a padded implementation"
    )


if __name__ == "__main__":
    main()
