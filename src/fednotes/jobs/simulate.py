"""Simulate a job on this machine: train alone, federated and pooled, and score.

A run's folder holds:

OUT/job.json           the job's tables, the versions and the machine
OUT/metrics.jsonl      a line for each evaluation
OUT/alone/SITE/ …      a folder for each part, with checkpoints/ (until the part is
                       done), done.json and sites/SITE/model; or a single model/ where
                       all sites end with the same model
OUT/summary.json       the result
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from fednotes.core.federation import EVALUATE, MethodSite
from fednotes.core.parsing import number
from fednotes.core.stopping import resumable
from fednotes.core.store import (
    hold_folder,
    write_json,
    write_text,
)
from fednotes.core.tensors import device_of
from fednotes.core.types import POOLED
from fednotes.encoders.features import default_cache
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.job import Job, Progress, Sites, load_sites
from fednotes.jobs.results import (
    BASELINES,
    HINTS,
    METRICS,
    OWN_MIX,
    VERSION,
    Outcome,
    PairedDifference,
    RunResult,
    Scores,
    add_line,
    line_of,
    rewound,
    size,
)
from fednotes.jobs.run_folder import (
    claim,
    list_versions,
    read_outcome,
    require_run_folder,
    require_usable,
    set_aside,
)
from fednotes.methods.base import Method
from fednotes.metrics.paired_tests import Bootstrap, paired_sites
from fednotes.metrics.summaries import mean_scores, summed_scores

# The user must confirm a run that takes more seconds, or more bytes per site.
LONG = 3600.0
LARGE = 10e9


@dataclass(frozen=True)
class Part:
    """Define one training run of a job: a condition, and the site if it trains alone.

    Attributes:
        condition: "alone", "own-mix", "federated" or "pooled".
        sites: Data of the sites that take part.
        config: The method's config for this part.
        site: Name of the site that trains alone; empty otherwise.
        method: The method, in simulations, which observe the sites one by one.
        unit: Short name of a training example, such as "sent".
    """

    condition: str
    sites: tuple[Any, ...] = field(repr=False)
    config: Any
    site: str = ""
    method: Method | None = None
    unit: str = "sent"

    @property
    def promised(self) -> bool:
        """Return whether the part is trained with differential privacy."""
        return getattr(self.config, "privacy", None) is not None

    @property
    def name(self) -> str:
        """Return the part's folder, relative to the run's folder."""
        return f"{self.condition}/{self.site}" if self.site else self.condition


@dataclass(frozen=True)
class Traffic:
    """Hold an upper bound on the bytes that one site exchanges in federated training.

    The larger numbers of a secure sum are included; its keys and the framing of the
    transport are not.

    Attributes:
        rounds: Largest number of rounds.
        up: Bytes from the site to the server in all rounds.
        down: Bytes from the server to the site in all rounds.
    """

    rounds: int
    up: int
    down: int

    def __str__(self) -> str:
        up, down = (size(n / max(1, self.rounds)) for n in (self.up, self.down))
        return (
            f"federated: at most {self.rounds:,} rounds, in each about {up} up and {down} down a "
            f"site: {size(self.up + self.down)} a site in all"
        )


class Display:
    """Receives the progress events of a run; this default ignores them.

    cost: the traffic of federated training is known.
    plan: the work of each part to train is known, in examples of all rounds, by the
        name of the part; 0 where it is unknown.
    begin: a part starts or resumes. Gets the largest number of rounds, and the training
        examples of all sites in a round; 0 where it is unknown.
    round: a round was committed.
    end: the part is trained.
    features: features were computed, or notes were read, for so many texts.
    warn: there is a warning to show before training.
    seed: the next of several runs starts. Gets its seed, its place among the runs, and
        the number of runs.
    """

    def cost(self, traffic: Traffic) -> None: ...
    def plan(self, work: Mapping[str, float]) -> None: ...
    def begin(self, part: Part, rounds: int, sentences: int) -> None: ...
    def round(self, result: RoundResult) -> None: ...
    def end(self) -> None: ...
    def features(self, done: int, total: int) -> None: ...
    def warn(self, text: str) -> None: ...
    def seed(self, seed: int, place: int, total: int) -> None: ...


Told = Display | Callable[[str, RoundResult], None] | None
"""Who is told of a run: a display, or a function of a part's name and each of its rounds."""


class _Rounds(Display):
    def __init__(self, told: Callable[[str, RoundResult], None]) -> None:
        self._told, self._part, self._run = told, "", ""

    def begin(self, part: Part, rounds: int, sentences: int) -> None:
        self._part = self._run + part.name

    def seed(self, seed: int, place: int, total: int) -> None:
        self._run = f"seed-{seed}/"

    def round(self, result: RoundResult) -> None:
        self._told(self._part, result)


def displayed(told: Told) -> Display:
    """Return a display for a display, a function or None."""
    return _Rounds(told) if callable(told) else told or Display()


def simulate(
    job: Job,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    display: Told = None,
    command: str = "",
) -> RunResult:
    """Train and score every part of a job, and write the results.

    Args:
        job: The job.
        out: Folder of the run: a new one, or with `resume` that of an unfinished run of
            the same job.
        resume: Whether to resume an unfinished run.
        overwrite: Whether to move an earlier run in `out` to `OUT.previous`; this
            happens once the sites' data have been read.
        device: PyTorch device to train on.
        display: Receives the progress.
        command: Command that repeats this run, for the report.

    Returns:
        The content of summary.json.

    Raises:
        ConfigError: `out` holds another run.
        BusyError: Another process is running in `out`.
    """
    display = displayed(display)
    device_of(device)
    replace_old = overwrite and not resume
    require_run_folder(out)
    with ExitStack() as mine:
        mine.enter_context(hold_folder(out))
        require_usable(job, out, resume=resume, overwrite=replace_old)
        sites, config, parts = prepare(job, display.features)
        sizes = [job.kind.count_examples(site) for site in sites.data]
        warnings = (
            *job.module.list_warnings(config),
            *job.module.list_size_warnings(config, sizes),
        )
        for text in (*sites.warnings, *warnings):
            display.warn(text)
        sites = replace(sites, remarks=(*sites.remarks, *warnings))
        if cost := traffic(job, config, sites.data):
            display.cost(cost)
        if replace_old and set_aside(out):
            # The lock moved away with the earlier run, so lock the new folder too.
            mine.enter_context(hold_folder(out))
        claim(job, out, sites, resume=resume)
        with resumable(f"{command} --resume"):
            run = _Run(job, out, resume, device, display)
            result = _result(
                job, sites, parts, run.outcomes(parts, sites.data), command
            )
            result.write(out)
    return result


def prepare(
    job: Job, progress: Progress | None = None
) -> tuple[Sites, Any, list[Part]]:
    """Read a job's data, configure its method and list the parts, without training.

    Args:
        job: The job.
        progress: Progress callback of `load_sites`.

    Returns:
        The sites, the method's config for them, and the parts of the run.

    Raises:
        FednotesError: The data cannot be read, or do not fit the job.
    """
    sites = load_sites(job, progress)
    config = job.module.configure(job.config, sites.data)
    return sites, config, parts_of(job, sites, config)


def traffic(job: Job, config: Any, sites: Sequence[Any]) -> Traffic | None:
    """Estimate the traffic of a job's federated part.

    Args:
        job: The job.
        config: The method's config, completed with the facts of all sites.
        sites: The sites' data.

    Returns:
        The traffic of one site; None if the job has no federated part or the method
        cannot estimate it.
    """
    if "federated" not in job.conditions:
        return None
    sizes = [job.kind.count_examples(site) for site in sites]
    told = job.module.estimate_traffic(config, sizes)
    # A secure sum sends eight bytes per number, which doubles four-byte numbers.
    if told and job.federation.secure_sum:
        whole = (
            job.privacy is not None or getattr(config, "compression", "") == "packed"
        )
        told = told[0] * (1 if whole else 2), told[1]
    return told and Traffic(job.module.plan_rounds(config, sizes)[0], *told)


def parts_of(job: Job, sites: Sites, config: Any) -> list[Part]:
    """Return the parts of a run: one for each condition, and each site alone."""
    found: list[Part] = []
    told: Any = {"method": job.module, "unit": job.kind.example_name}
    if "alone" in job.conditions:
        own = zip(
            sites.data, job.module.configure_alone(config, sites.data), strict=True
        )
        found += [
            Part("alone", (site,), settings, site.id, **told) for site, settings in own
        ]
    if OWN_MIX in job.conditions:
        found.append(
            Part(OWN_MIX, sites.data, job.module.configure_control(config), **told)
        )
    if "federated" in job.conditions:
        found.append(Part("federated", sites.data, config, **told))
    if "pooled" in job.conditions:
        pooled = job.module.configure_pooled(config, sites.data, sites.complete)
        found.append(Part("pooled", *pooled, **told))
    return found


def members_of(
    job: Job,
    part: Part,
    folders: Sequence[Path | None],
    device: str = "cpu",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> list[MethodSite]:
    """Make the sites of a part, with their models and encoded data.

    Args:
        job: The job.
        part: The part.
        folders: Folder for each site's model; None for a site that saves no model.
        device: PyTorch device.
        cache: Folder in which encoded data are cached; None uses the default.
        progress: Called with the features computed so far and their total.

    Raises:
        FednotesError: A site cannot be made from its data and config.
    """
    given: Any = {
        "device": device,
        "cache": cache or default_cache(),
        "progress": progress,
    }
    return [
        job.module.make_site(data, part.config, directory=directory, **given)
        for data, directory in zip(part.sites, folders, strict=True)
    ]


def summed_securely(job: Job, part: Part) -> bool:
    """Return whether the server adds up a part's updates by a secure sum."""
    return job.federation.secure_sum and part.condition == "federated"


@dataclass(frozen=True)
class _Run:
    """Trains the parts of a job in the folder of a run."""

    job: Job
    out: Path
    resume: bool
    device: str
    display: Display

    def outcomes(
        self, parts: Sequence[Part], sites: Sequence[Any]
    ) -> dict[str, Outcome]:
        """Train the parts that are not finished, and return all outcomes by part name.

        Args:
            parts: Parts of the run.
            sites: Data of all sites, on which a pooled model is scored.
        """
        torch.set_num_threads(self.job.threads)
        torch.use_deterministic_algorithms(self.device == "cpu")
        if not (self.resume and (self.out / METRICS).exists()):
            write_text(self.out / METRICS, "")
        self.display.plan(self._work(parts))
        results = {}
        for part in parts:
            folder = self.out / part.name
            outcome = read_outcome(folder / "done.json") if self.resume else None
            if outcome is None:
                outcome = self._trained(part, folder, sites)
                write_json(folder / "done.json", outcome.model_dump())
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            results[part.name] = outcome
        return results

    def _work(self, parts: Sequence[Part]) -> dict[str, float]:
        """Return the examples that each unfinished part reads in all of its rounds."""
        work = {}
        for part in parts:
            if self.resume and (self.out / part.name / "done.json").exists():
                continue
            sizes = [self.job.kind.count_examples(site) for site in part.sites]
            rounds, examples = self.job.module.plan_rounds(part.config, sizes)
            work[part.name] = float(rounds * examples)
        return work

    def _trained(self, part: Part, folder: Path, sites: Sequence[Any]) -> Outcome:
        """Train one part and score it on the test data of its sites."""

        def observe(result: RoundResult) -> None:
            if result.evaluated:
                own: dict[str, Any] = {"site": part.site} if part.site else {}
                own["sites"] = site_metrics(result, part)
                line = line_of(result, part.name, part.condition, **own)
                add_line(self.out / METRICS, line)
            self.display.round(result)

        module = self.job.module
        folders: list[Path | None] = [folder / "sites" / data.id for data in part.sites]
        if module.ends_with_one_model(part.config):
            folders = [folder, *[None] * (len(part.sites) - 1)]
        told = self.display.features
        members = members_of(self.job, part, folders, self.device, progress=told)
        engine = InProcess(
            members,
            directory=folder / "checkpoints",
            resume=self.resume,
            observer=observe,
            secure=summed_securely(self.job, part),
        )
        state = engine.resume()
        rewound(self.out / METRICS, part.name, state.round if state else 0)
        self.display.begin(
            part,
            *module.plan_rounds(
                part.config, [member.num_examples for member in members]
            ),
        )
        final = module.train(engine, part.config)
        self.display.end()
        scores = {member.id: dict(member.scores) for member in members}
        judges = {member.id: member for member in members}
        if members[0].id == POOLED:
            scores = {site.id: members[0].scores_on(site) for site in sites}
            judges = {site.id: members[0] for site in sites}
        by_document = {id: judge.document_counts(id) for id, judge in judges.items()}
        return Outcome(
            scores=scores,
            documents={
                id: c.tolist() for id, c in by_document.items() if c is not None
            },
            rounds=final.round,
            seconds=engine.seconds,
            bytes_up=engine.bytes_up,
            bytes_down=engine.bytes_down,
            examples=sum(member.num_examples for member in members),
            described=members[0].described(),
            eta=members[0].eta,
            valid={member.id: member.valid_score for member in members},
        )


def site_metrics(result: RoundResult, part: Part) -> dict[str, dict[str, float]]:
    """Return each site's training loss and validation scores in a simulated round."""
    found: dict[str, dict[str, float]] = {}
    if part.method is None:
        return found
    for task in part.method.training_tasks:
        for site, metrics in result.replies.get(task, {}).items():
            # a site without examples in this round has no loss
            if metrics["examples"]:
                found[site] = {"loss": metrics["loss"] / metrics["examples"]}
    for site, metrics in result.replies.get(EVALUATE, {}).items():
        judged = part.method.summarise(metrics)
        judged.pop("held_out", None)
        if "valid_f1" in judged:
            judged["f1"] = judged.pop("valid_f1")
        found.setdefault(site, {}).update(judged)
    return found


def _result(
    job: Job,
    sites: Sites,
    parts: Sequence[Part],
    outcomes: Mapping[str, Outcome],
    command: str,
) -> RunResult:
    ids = [site.id for site in sites.data]
    by = defaultdict[str, list[Outcome]](list)
    for name, outcome in outcomes.items():
        by[name.split("/")[0]].append(outcome)
    each = {
        c: {s: of for o in own for s, of in o.scores.items()} for c, own in by.items()
    }
    scores = {site: {c: of[site] for c, of in each.items()} for site in ids}
    spent = ("bytes_down", "bytes_up", "examples", "rounds", "seconds")
    conditions = {
        c: {k: sum(getattr(o, k) for o in own) for k in spent} for c, own in by.items()
    }
    mean = {c: mean_scores([of[site] for site in ids]) for c, of in each.items()}
    federated = outcomes.get("federated")
    paired = {c: _paired(by, c) for c in BASELINES if c in by}
    sites_paired = {c: each for c, (each, _) in paired.items() if each}
    means_paired = {c: whole for c, (_, whole) in paired.items() if whole is not None}
    return RunResult(
        version=VERSION,
        title=job.title,
        method=job.method,
        holds=job.kind.name,
        seed=job.seed,
        command=command,
        seconds=sum(c["seconds"] for c in conditions.values()),
        bytes_up=federated.bytes_up if federated else 0,
        bytes_down=federated.bytes_down if federated else 0,
        eta=federated.eta if federated else None,
        annotated={s.id: list(s.tags.types) for s in sites.data if hasattr(s, "tags")},
        sites=scores,
        mean=mean,
        micro={
            c: sums
            for c, of in each.items()
            if (sums := summed_scores([of[s] for s in ids]))
        },
        valid={c: _validation(own) for c, own in by.items()},
        privacy={
            part.condition: promise.told()
            for part in parts
            if (promise := job.module.make_promise(part.config)) is not None
        },
        conditions=conditions,
        marks=marks(parts),
        paired=sites_paired,
        paired_mean=means_paired,
        config=dict(job.table),
        versions=list_versions(),
        notes=[
            *sites.messages,
            *(
                [f"federated: {federated.described}"]
                if federated and federated.described
                else ()
            ),
            *nothing_found(scores),
            *job.kind.find_hints(scores, sites.data),
            *pooled_below_alone(mean, conditions, parts, len(ids)),
        ],
    )


def _paired(
    by: Mapping[str, Sequence[Outcome]], against: str
) -> tuple[dict[str, PairedDifference], PairedDifference | None]:
    """Compare each site's federated model with another condition's by a paired test.

    Args:
        by: Outcomes of the parts of each condition.
        against: The other condition.

    Returns:
        The difference at each site, and the difference of the means over the sites.
        These are {} and None if one of the conditions was not trained or a site has no
        counts of its test documents.
    """
    counts: dict[str, dict[str, Any]] = {}
    for condition in ("federated", against):
        found = {
            site: rows
            for outcome in by.get(condition, ())
            for site, rows in outcome.documents.items()
        }
        counts[condition] = {s: np.reshape(rows, (-1, 4)) for s, rows in found.items()}
    federated, other = counts["federated"], counts[against]
    if federated.keys() != other.keys():
        return {}, None
    sites, mean = paired_sites(
        {site: (federated[site], other[site]) for site in federated}
    )
    told = {site: _difference_of(found) for site, found in sites.items()}
    return told, None if mean is None else _difference_of(mean)


def _difference_of(found: Bootstrap) -> PairedDifference:
    return PairedDifference(
        difference=found.difference,
        low=found.low,
        high=found.high,
        p_value=found.p_value,
    )


def _validation(parts: Sequence[Outcome]) -> dict[str, Any]:
    """Return the validation scores of the selected models, by which settings are chosen.

    Higher is better. A site without validation data has None and does not enter the
    mean.

    Returns:
        "mean": the mean over the sites; "sites": the score of each site.
    """
    sites = {site: score for part in parts for site, score in part.valid.items()}
    judged = [score for score in sites.values() if score is not None]
    return {"mean": fmean(judged) if judged else None, "sites": sites}


# ---- remarks on the scores of a run: why a number may be low, and what to try --------


def marks(parts: Sequence[Part]) -> dict[str, str]:
    """Return why a condition's scores are not comparable with the others', if so."""
    epochs = _personal_epochs(parts)
    longer = {name: n for name, n in epochs.items() if n > epochs.get("pooled", n)}
    if not longer:
        return {}
    told = {"epochs": max(longer.values()), "others": " and ".join(longer)}
    return {"pooled": HINTS["without_personal_epochs"].format(**told)}


def _personal_epochs(parts: Sequence[Part]) -> dict[str, int]:
    return {
        part.condition: getattr(part.config, "personal_epochs", 0) for part in parts
    }


def pooled_below_alone(
    mean: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, float]],
    parts: Sequence[Part],
    sites: int,
) -> Iterator[str]:
    """Yield a remark if the pooled model scores below the sites' own models.

    Args:
        mean: Mean scores of each condition, as in the result.
        conditions: Rounds and costs of each condition, as in the result.
        parts: Parts of the run.
        sites: Number of sites.
    """
    kind = next((k for k in ("strict", "phenotypes") if k in mean.get("alone", {})), "")
    own, pooled = (
        number(mean, condition, kind, "f1") for condition in ("alone", "pooled")
    )
    if own is None or pooled is None or pooled >= own:
        return
    rounds = conditions["pooled"]["rounds"]
    each = conditions["alone"]["rounds"] / sites
    epochs = _personal_epochs(parts)
    personal = epochs.get("alone", 0) - epochs.get("pooled", 0)
    heads = any(part.condition == "pooled" and len(part.sites) > 1 for part in parts)
    reasons = {
        "an_output_layer_each": heads,
        "one_model": sites > 1 and not heads,
        "personal_epochs": personal > 0,
        "fewer_rounds": rounds < each,
    }
    told = "; ".join(
        HINTS[why].format(epochs=personal) for why, holds in reasons.items() if holds
    )
    f1 = {"pooled": 100 * pooled, "alone": 100 * own}
    yield HINTS["pooled_below_alone"].format(
        rounds=rounds, each=each, reasons=told, **f1
    )


def nothing_found(scores: Mapping[str, Mapping[str, Scores]]) -> Iterator[str]:
    """Yield a remark for each site without test data, mentions or correct predictions."""
    for site, by_condition in scores.items():
        for condition, score in by_condition.items():
            if not score:
                yield HINTS["nothing_held_out"].format(site=site)
                break
            # scores of patients have no mentions
            if "by_type" not in score:
                continue
            if not any(of_type["support"] for of_type in score["by_type"].values()):
                yield HINTS["no_mentions"].format(site=site)
                break
            if score["relaxed"]["f1"] == 0:
                yield HINTS["nothing_found"].format(site=site, condition=condition)
