"""Run a job in the embedded engine: each site alone, all federated, all pooled.

OUT/job.json                     the declarative job, versions and machine
OUT/metrics.jsonl                a line per evaluation
OUT/alone/SITE/ …                each part: checkpoints/, done.json, sites/SITE/model; or
                                 model/ alone where all sites end with the same one
OUT/summary.json, OUT/report.html

What a run says beside its scores: why a number may be low, and what to try.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch

from fednotes.core.errors import FednotesError
from fednotes.core.federation import EVALUATE, Method, MethodSite
from fednotes.core.parsing import parse_json
from fednotes.core.stopping import goes_on
from fednotes.core.store import held, write_json, write_text
from fednotes.core.types import SiteData
from fednotes.encoders.features import default_cache
from fednotes.engines.inprocess import InProcess, RoundResult
from fednotes.jobs.costs import Traffic, traffic
from fednotes.jobs.documents import Sites, load_sites
from fednotes.jobs.job import POOLED, Job
from fednotes.jobs.run_folder import (
    OUTCOME,
    claim,
    finished,
    refuse,
    require_place,
    set_aside,
    versions,
)
from fednotes.metrics.compare import mean_scores as mean_scores
from fednotes.metrics.compare import summed_scores
from fednotes.report.html import write_report

_JUDGED = ("strict", "phenotypes")  # kinds of score that conditions are compared by


def pooled_below_alone(
    mean: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, float]],
    sites: Sequence[Any],
    heads: bool,
    personal: int = 0,
) -> Iterator[str]:
    """A line where one model of all notes is worse than each site's own, with what the run knows.

    mean, conditions: of the summary. sites: their data. heads: whether pooled has an output
    layer for each site. personal: epochs of its own that a site has alone, and pooled has not.
    """
    kind = next((k for k in _JUDGED if k in mean.get("alone", {})), "")
    own, pooled = (((mean.get(c) or {}).get(kind) or {}).get("f1") for c in ("alone", "pooled"))
    if own is None or pooled is None or pooled >= own:
        return
    rounds = {c: conditions[c]["rounds"] for c in ("alone", "pooled")}
    each = rounds["alone"] / len(sites)
    reasons = []
    if heads:
        reasons.append(
            "the sites annotate different types, so pooled is one trunk with an output layer for "
            "each, which is no upper bound"
        )
    elif len(sites) > 1:
        reasons.append("one model serves all sites, whose notes may differ in kind")
    if personal:
        reasons.append(f"alone ends with {personal} personal epochs, pooled has none")
    if rounds["pooled"] < each:
        reasons.append("it took fewer rounds: raise epochs or patience")
    yield (
        f"pooled is below alone (mean F1 {100 * pooled:.1f} against {100 * own:.1f}, "
        f"{rounds['pooled']:,.0f} rounds against {each:,.0f} at a site): {'; '.join(reasons)}; "
        "one seed does not tell a small difference from chance"
    )


def never_right(
    scores: Mapping[str, Mapping[str, Any]], sites: Sequence[SiteData]
) -> Iterator[str]:
    """Types of the test data that no mention was found of, where others were.

    scores: condition → score of each site. sites: their data, with annotations.
    """
    trained = {s.id: Counter(x.label for d in s.train for x in d.spans) for s in sites}
    everywhere: Counter[str] = sum(trained.values(), Counter())
    for site, by_condition in scores.items():
        for condition in ("federated", "alone", "pooled"):
            score = by_condition.get(condition)
            if score and score.get("by_type") and score["relaxed"]["f1"] > 0:
                break
        else:
            continue
        for label, of_type in score["by_type"].items():
            if not of_type["support"] or of_type["strict"]["f1"] > 0:
                continue
            here, all_sites = trained[site][label], everywhere[label]
            why = [f"{here} training mentions here, {all_sites} at all sites"]
            if not of_type["predicted"]:
                why.append("never predicted")
            remedy = "train longer or give more mentions"
            if not all_sites:
                remedy = "name it as the training data do (label_map)"
            elif here == all_sites and len(sites) > 1:
                remedy += "; if other sites have it by another name: label_map"
            yield f"{site}, {condition}: {label} scores 0 ({'; '.join(why)}): {remedy}"


def described(results: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """How much of the model travels."""
    if text := results.get("federated", {}).get("described"):
        yield f"federated: {text}"


def nothing_found(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What to try where a model found nothing."""
    for site, by_condition in scores.items():
        for condition, score in by_condition.items():
            if not score:
                yield f"{site}: nothing is held out there, so it has no score and is in no mean"
                break
            if "by_output" in score:
                yield from _phenotype_hints(f"{site}, {condition}", score)
            if "by_type" not in score:
                continue  # no mentions are judged here
            if not any(of_type["support"] for of_type in score["by_type"].values()):
                yield f"{site}: no mention in its test data, so its scores say nothing"
                break
            if score["relaxed"]["f1"] == 0:
                yield (
                    f"{site}, {condition}: no mention found: train longer (epochs or rounds of "
                    "[training]) or raise training.learning_rate"
                )


def _phenotype_hints(where: str, score: Mapping[str, Any]) -> Iterator[str]:
    """Diseases whose score says little, by name."""
    never, alone = [], []
    for disease, found in score["by_output"].items():
        present, absent = (found.get(name, {}).get("support", 0) for name in ("present", "absent"))
        if present and not found["present"].get("predicted", 1):
            never.append(disease)
        if not (present and absent):
            alone.append(disease)
    if never:
        yield f"{where}: predicts nobody to have {_named(never)}: train longer, or weigh classes"
    if alone:
        yield (
            f"{where}: the test patients are all present or all absent for {_named(alone)}: "
            "these have no AUROC"
        )


def _named(names: Sequence[str], shown: int = 6) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


@dataclass(frozen=True)
class Part:
    """One training run of a job: a condition, and the site if it trains alone.

    method: of runs on this machine, whose sites are observed one by one.
    """

    condition: str
    sites: tuple[Any, ...]
    config: Any
    site: str = ""
    method: Method | None = None

    @property
    def name(self) -> str:
        """The part's folder below the run's."""
        return f"{self.condition}/{self.site}" if self.site else self.condition


class Display(Protocol):
    """Who is told how a run goes."""

    def cost(self, traffic: Traffic) -> None: ...

    def begin(self, part: Part, rounds: int, sentences: int) -> None: ...

    def round(self, result: RoundResult) -> None: ...

    def end(self) -> None: ...

    def features(self, done: int, total: int) -> None: ...

    def warn(self, text: str) -> None: ...


def simulate(
    job: Job,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    display: Display | None = None,
    cache: Path | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Train and judge every part of a job; returns what summary.json holds.

    out: the run's folder; new, or with `resume` that of an unfinished run of the same job.
    overwrite: an earlier run there becomes `OUT.previous`, once the sites could be read.
    cache: folder of frozen features and concepts; the user's default one if None.
    command: how a person repeats this run, for the report.
    Raises ConfigError if `out` holds another run, BusyError while a run goes on there.
    """
    replace_old = overwrite and not resume
    require_place(out)
    with ExitStack() as mine:
        mine.enter_context(held(out))
        refuse(job, out, resume, replace_old)
        sites, config, parts = prepare(job, display.features if display else None, cache)
        for text in (*sites.warnings, *job.module.warnings(job.config)):
            if display:
                display.warn(text)
        if display and (cost := traffic(job, config, sites.data)):
            display.cost(cost)
        if replace_old and set_aside(out):
            mine.enter_context(held(out))  # a new folder, for the other one went with its lock
        claim(job, out, sites, resume)
        with goes_on(f"{command} --resume"):
            results = _train(job, sites, parts, out, resume, device, display, cache)
            summary = _summary(job, sites, parts, results) | {"command": command}
            write_json(out / "summary.json", summary)
            write_report(out)
    return summary


def prepare(
    job: Job, progress: Callable[[int, int], None] | None = None, cache: Path | None = None
) -> tuple[Sites, Any, list[Part]]:
    """A job's data, its method's settings for them, and the parts of its run; nothing is trained.

    progress, cache: of `load_sites`. Raises FednotesError for what cannot be.
    """
    sites = load_sites(job, progress, cache)
    config = job.module.for_sites(job.config, sites.data)
    return sites, config, parts_of(job, sites, config)


def _train(
    job: Job,
    sites: Sites,
    parts: Sequence[Part],
    out: Path,
    resume: bool,
    device: str,
    display: Display | None,
    cache: Path | None,
) -> dict[str, dict[str, Any]]:
    """The outcome of each part by its name, a finished one's as it is."""
    torch.set_num_threads(job.threads)
    torch.use_deterministic_algorithms(device == "cpu")
    log = _Log(out / "metrics.jsonl", resume)
    results = {}
    for part in parts:
        folder = out / part.name
        outcome = finished(folder / "done.json") if resume else None
        if outcome is None:
            outcome = _run(job, part, folder, resume, device, display, cache, log, sites)
            write_json(folder / "done.json", outcome)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        results[part.name] = outcome
    return results


def parts_of(job: Job, sites: Sites, config: Any) -> list[Part]:
    """The training runs of the asked conditions."""
    parts = []
    if "alone" in job.conditions:
        own = job.module.alone(config, sites.data)
        parts += [
            Part("alone", (site,), settings, site.id)
            for site, settings in zip(sites.data, own, strict=True)
        ]
    if "federated" in job.conditions:
        parts.append(Part("federated", sites.data, config))
    if "pooled" in job.conditions:
        together = job.module.pooled(config, sites.data, sites.complete)
        parts.append(Part("pooled", *together))
    return [replace(part, method=job.module) for part in parts]


def _folders(job: Job, part: Part, folder: Path) -> list[Path | None]:
    """Where each site of a part writes its model; one alone where all models are equal."""
    if job.module.one_model(part.config):
        return [folder, *[None] * (len(part.sites) - 1)]
    return [folder / "sites" / data.id for data in part.sites]


def _run(
    job: Job,
    part: Part,
    folder: Path,
    resume: bool,
    device: str,
    display: Display | None,
    cache: Path | None,
    log: _Log,
    sites: Sites,
) -> dict[str, Any]:
    """Train one part and score it on every site's test data."""
    progress = display.features if display else None
    members = members_of(job, part, _folders(job, part, folder), device, cache, progress)
    sizes = [member.num_examples for member in members]
    engine = InProcess(
        members,
        directory=folder / "checkpoints",
        resume=resume,
        observer=lambda result: _observe(result, part, log, display),
        secure=summed_securely(job, part),
    )
    state = engine.resume()
    log.rewind(part, state.round if state else 0)
    if display:
        display.begin(part, *job.module.planned(part.config, sizes))
    final = job.module.train(engine, part.config)
    if display:
        display.end()
    scores = {member.id: member.scores for member in members}
    if members[0].id == POOLED:
        scores = {site.id: members[0].scores_on(site) for site in sites.data}
    return {
        "scores": scores,
        "rounds": final.round,
        "seconds": engine.seconds,
        "bytes_up": engine.bytes_up,
        "bytes_down": engine.bytes_down,
        "described": members[0].described(),
        "eta": members[0].eta,
        "valid": {member.id: member.valid_score for member in members},
    }


def members_of(
    job: Job,
    part: Part,
    folders: Sequence[Path | None],
    device: str = "cpu",
    cache: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[MethodSite]:
    """The sites of a part with their models and encoded data. Raises FednotesError."""
    return [
        job.module.Site(
            data,
            part.config,
            directory=directory,
            device=device,
            cache=cache or default_cache(),
            progress=progress,
        )
        for data, directory in zip(part.sites, folders, strict=True)
    ]


def summed_securely(job: Job, part: Part) -> bool:
    """Whether a part's sums are secure."""
    return job.federation.secure_sum and part.condition == "federated"


def _observe(result: RoundResult, part: Part, log: _Log, display: Display | None) -> None:
    if result.evaluated:
        log.write(part, result)
    if display:
        display.round(result)


class _Log:
    """metrics.jsonl, without lines that a resumed run will write again."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        if not (resume and path.exists()):
            write_text(path, "")

    def rewind(self, part: Part, round: int) -> None:
        """Drop the part's lines from `round` on, and a line cut short by a kill."""
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                entry = parse_json(line, strict=False)
                if entry["part"] != part.name or entry["round"] < round:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
        write_text(self.path, "".join(line + "\n" for line in kept))

    def write(self, part: Part, result: RoundResult) -> None:
        entry = {
            "part": part.name,
            "condition": part.condition,
            **({"site": part.site} if part.site else {}),
            "round": result.round,
            **result.metrics,
            "sites": site_metrics(result, part),
            "bytes_up": result.bytes_up,
            "bytes_down": result.bytes_down,
            "seconds": round(result.seconds, 3),
        }
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise FednotesError(f"{self.path}: cannot be written ({error.strerror})") from error


def site_metrics(result: RoundResult, part: Part) -> dict[str, dict[str, float]]:
    """Each site's training loss and what its validation data say; simulations only."""
    found: dict[str, dict[str, float]] = {}
    if part.method is None:
        return found
    for task in part.method.trains:
        for site, metrics in result.replies.get(task, {}).items():
            if metrics["examples"]:  # else it had nothing to learn from in this round
                found[site] = {"loss": metrics["loss"] / metrics["examples"]}
    for site, metrics in result.replies.get(EVALUATE, {}).items():
        judged = part.method.judged(metrics)
        judged.pop("held_out", None)
        if "valid_f1" in judged:
            judged["f1"] = judged.pop("valid_f1")
        found.setdefault(site, {}).update(judged)
    return found


def _summary(
    job: Job, sites: Sites, parts: Sequence[Part], results: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """What summary.json holds; fractions, not percent."""
    ids = [site.id for site in sites.data]
    scores: dict[str, dict[str, Any]] = {site: {} for site in ids}
    conditions: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        condition = name.split("/")[0]
        for site, score in result["scores"].items():
            scores[site][condition] = score
        spent = conditions.setdefault(condition, {})
        for key in sorted(OUTCOME - {"scores"}):
            spent[key] = spent.get(key, 0) + result[key]
    federated = conditions.get("federated", {})
    mean = {c: mean_scores([scores[s][c] for s in ids]) for c in conditions}
    heads = any(part.condition == "pooled" and len(part.sites) > 1 for part in parts)
    epochs = {part.condition: getattr(part.config, "personal_epochs", 0) for part in parts}
    personal = epochs.get("alone", 0) - epochs.get("pooled", 0)
    return {
        "title": job.title,
        "method": job.method,
        "seed": job.seed,
        "seconds": sum(c["seconds"] for c in conditions.values()),
        "bytes_up": federated.get("bytes_up", 0),
        "bytes_down": federated.get("bytes_down", 0),
        "eta": results.get("federated", {}).get("eta"),
        "annotated": {s.id: list(s.tags.types) for s in sites.data if hasattr(s, "tags")},
        "sites": scores,
        "mean": mean,
        "valid": {c: _validation(results, c) for c in conditions},
        "micro": {
            c: found for c in conditions if (found := summed_scores([scores[s][c] for s in ids]))
        },
        "conditions": conditions,
        "config": job.table,
        "versions": versions(),
        "notes": [
            *sites.told,
            *job.module.warnings(job.config),
            *described(results),
            *nothing_found(scores),
            *(never_right(scores, sites.data) if job.data == "documents" else ()),
            *pooled_below_alone(mean, conditions, sites.data, heads, max(0, personal)),
        ],
    }


def _validation(results: Mapping[str, dict[str, Any]], condition: str) -> dict[str, Any]:
    """What validation data say of the models that were kept, more being better: settings are
    chosen by it. Sites that hold nothing out have None and are in no mean."""
    parts = [r for name, r in results.items() if name.split("/")[0] == condition]
    sites = {site: score for part in parts for site, score in part.get("valid", {}).items()}
    judged = [score for score in sites.values() if score is not None]
    return {"mean": fmean(judged) if judged else None, "sites": sites}
