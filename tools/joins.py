"""Measure what a saved model is worth to a site, or to an entity type, that joins later.

    python tools/joins.py OUT [--seeds 1 2 3] [--set KEY=VALUE ...] [--later KEY=VALUE
    ...]

MACCROBAT is divided equally among five sites (FEDNOTES_CORPORA names the folder of
corpora) and trained by `fednotes simulate` with the preset of fine-tuning. There are
five runs for each seed:

    anew         all five sites, all three types, from the encoder
    site before  four sites
    site later   all five sites, from the model that "site before" saved
    type before  all five sites without the type "treatment"
    type later   all types, from the model that "type before" saved

--set changes a key of every run, but model.encoder does not apply to the two later runs,
which start from a saved model. --later changes a key of the two later runs, such as
training.cycles=8. The name of a run's folder in OUT/runs contains everything that the
run depends on: finished runs are not repeated, and interrupted runs are resumed. The
table shows micro strict F1 in percent, with mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from maccrobat import TYPES, site_of

from fednotes.core.stopping import run_child_process
from fednotes.core.store import write_text
from fednotes.jobs.results import SUMMARY, read_result

SITES = ("s1", "s2", "s3", "s4", "s5")
OLD, KNOWN = SITES[:-1], TYPES[:-1]  # the last site, and the last type, join later
# Name of a row → F1 before, later and anew.
Measured = dict[str, list[float | None]]
ENCODER = "model.encoder="
JOB = """\
method = "finetune"
preset = "best"
conditions = ["federated"]
model.encoder = '{encoder}'
"""
SPLIT = "valid_fraction = 0.1\ntest_fraction = 0.2\n"


def job(sites: Sequence[str], types: Sequence[str], encoder: str) -> str:
    """Return a job file.

    In all jobs, a site has the same notes, and the same of them are for tests.
    """
    shares = {site: f"{place}/{len(SITES)}" for place, site in enumerate(SITES, 1)}
    parts = [site_of(site, shares[site], SPLIT, tuple(types)) for site in sites]
    return "".join([JOB.format(encoder=encoder), *parts])


def run(out: Path, name: str, text: str, settings: Sequence[str]) -> Path:
    """Simulate a job unless it was done before, and return the run's folder.

    The program ends if the run fails.
    """
    digest = hashlib.sha256("\n".join((text, *settings)).encode()).hexdigest()[:10]
    folder = out / "runs" / f"{name}-{digest}".replace(" ", "-")
    if not (folder / SUMMARY).is_file():
        print(f"{folder.name} …", file=sys.stderr, flush=True)
        file, log = (
            out / "jobs" / f"{folder.name}.{ending}" for ending in ("toml", "log")
        )
        write_text(file, text, private=False)
        command = [
            sys.executable,
            "-m",
            "fednotes",
            "simulate",
            str(file),
            "--out",
            str(folder),
        ]
        command += ["--resume"] if (folder / "job.json").is_file() else []
        command += [word for setting in settings for word in ("--set", setting)]
        with log.open("ab") as output:
            if run_child_process([*command, "--yes"], stdout=output, stderr=output):
                sys.exit(f"error: {folder.name} failed: see the end of {log}")
    return folder


def f1(folder: Path, sites: Sequence[str], types: Sequence[str]) -> tuple[float, int]:
    """Return the micro strict F1 in percent over some sites and types, and their mentions."""
    right, predicted, gold = 0.0, 0, 0
    scores = read_result(folder).sites
    for site in sites:
        for name in types:
            if type_scores := scores[site]["federated"]["by_type"].get(name):
                right += type_scores["strict"]["recall"] * type_scores["support"]
                predicted, gold = (
                    predicted + type_scores["predicted"],
                    gold + type_scores["support"],
                )
    return 200 * right / max(1, predicted + gold), gold


def measure(
    out: Path, seed: int, settings: Sequence[str], later: Sequence[str]
) -> Measured:
    """Return the F1 of each row of the table for one seed: before, later and anew.

    It is None where no model knew the site or the type before.
    """

    def f1_of_run(
        name: str, sites: Sequence[str], types: Sequence[str], before: Path | None
    ) -> Path:
        if before is None:
            encoder = "minilm"
            sets = [*settings, f"seed={seed}"]
        else:
            encoder = str((before / "federated" / "model").resolve())
            common = [each for each in settings if not each.startswith(ENCODER)]
            sets = [*common, f"seed={seed}", *later]
        return run(out, f"{name} {seed}", job(sites, types, encoder), sets)

    anew = f1_of_run("anew", SITES, TYPES, None)
    site = f1_of_run("site before", OLD, TYPES, None)
    kind = f1_of_run("type before", SITES, KNOWN, None)
    site_later = f1_of_run("site later", SITES, TYPES, site)
    kind_later = f1_of_run("type later", SITES, TYPES, kind)
    rows = {
        "a site joins: the earlier sites": (OLD, TYPES, site, site_later),
        "a site joins: the new site": (SITES[-1:], TYPES, None, site_later),
        "a type joins: the earlier types": (SITES, KNOWN, kind, kind_later),
        "a type joins: the new type": (SITES, TYPES[-1:], None, kind_later),
    }
    measured: Measured = {}
    for row, (sites, types, *folders) in rows.items():
        each = [
            f1(folder, sites, types) if folder else None for folder in (*folders, anew)
        ]
        if len({scored[1] for scored in each if scored}) > 1:
            sys.exit(f"error: seed {seed}, {row}: the runs have different test notes")
        measured[row] = [scored and scored[0] for scored in each]
    return measured


def table(measured: Sequence[Measured], seeds: Sequence[int]) -> str:
    """Return the table in Markdown."""
    lines = ["| F1 | before | later | anew |", "|---|---:|---:|---:|"]
    for row in measured[0]:
        cells = []
        for each in zip(*(values[row] for values in measured), strict=True):
            spread = (
                f" ± {stdev(each):.1f}" if len(each) > 1 and None not in each else ""
            )
            cells.append("–" if None in each else f"{fmean(each):.1f}{spread}")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"\nSeeds {', '.join(map(str, seeds))}."])


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="joins.py")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--later", action="append", default=[])
    arguments = parser.parse_args(words)
    if "FEDNOTES_CORPORA" not in os.environ:
        parser.error("FEDNOTES_CORPORA must name the folder of corpora")
    try:
        measured = [
            measure(arguments.out, seed, arguments.settings, arguments.later)
            for seed in arguments.seeds
        ]
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    print(table(measured, arguments.seeds))


if __name__ == "__main__":
    main()
