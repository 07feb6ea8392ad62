"""Before joining: does a federation pay for us? Of validation data alone; no test note is read.

    curve   each site trains by itself on fractions of its sentences, with several seeds. Of n of
            all its N it has the odds of error (1 - F1) / F1 = e (c + (1 - c) (n / N)^-b).
    pilot   the job's federation, of its whole length, on a part of each site's sentences (what
            `fraction` of [sites.NAME] leaves). A site does as if it had m times its own.
    gain    F1 of m N sentences minus F1 of N, by the curve

Before anything is trained all b, √c, log m and log s, the deviation of a run's log odds over seeds,
are equally likely: b up to `STEEPEST`, m from 1 / K to K, where all sites together have K times
this one's sentences; the bound is that of K N. Intervals hold 80 % of what is likely after it, with
the choice of validation mentions (`metrics/gap.py`; those of one note are more alike than that).

    STEEPEST  1.5  the largest b. Curves of text have 0.1 to 0.6 as a rule; a wide bound.
    LEARNT   0.05  F1 of runs that have learnt nothing yet, and are no points of a curve
    PAIRED    1.0  variance of the difference of two models on the same mentions, in variances of
                   one: half of what chance decides it decides for both. Chosen.
    DRIFT     0.1  deviation of log m each time that the data double after the pilot. Chosen.

OUT/CONDITION-FRACTION-SEED/ are runs as `simulate` leaves them, without their models.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Interval
from pydantic import BaseModel

from fednotes.core.errors import ConfigError
from fednotes.core.parsing import number
from fednotes.core.settings import build, checked, path_of
from fednotes.core.store import write_json
from fednotes.core.tensors import device_of
from fednotes.data.split import sentence_documents, subsample
from fednotes.encoders.features import default_cache
from fednotes.jobs.deployed.site_file import job_of_site, load_deployed, load_own, read_site_file
from fednotes.jobs.job import Job, Progress, Sites, load_sites
from fednotes.jobs.job_file import load_job, load_table, parse_job
from fednotes.jobs.results import SUMMARY, read_result
from fednotes.jobs.simulate import Told, Traffic, displayed, simulate, traffic
from fednotes.metrics.classification import Floats
from fednotes.metrics.gap import judged
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.saving import load_model

STEEPEST, LEARNT, PAIRED, DRIFT = 1.5, 0.05, 1.0, 0.1
_TRIED, _DRAWS = 400_000, 4_000
_OWN = re.compile(r"(alone|federated)-|forecast\.json$|\.")  # what lies in a forecast's folder
Inside = Annotated[float, Interval(gt=0, lt=1)]
Range = tuple[float, float, float]  # the low end of an interval of 80 %, the median, the high end


@checked(frozen=True)
class ForecastPlan:
    """What a forecast trains. fractions: of a site's sentences; part, the pilot's, and 1 are always
    among them. seeds: of each but 1. least: the gain in F1 that is worth joining."""

    fractions: tuple[Inside, ...] = (1 / 8, 1 / 4, 1 / 2)
    seeds: Annotated[int, Ge(2)] = 3
    part: Inside = 1 / 4
    least: Annotated[float, Gt(0)] = 0.01

    def words(self, gain: Range) -> str:
        """What a site is told."""
        low, expected, high = gain
        if high < self.least:
            return "stay alone"
        return "join" if low > 0 and expected >= self.least else "cannot tell"


class Trained(BaseModel):
    """One run: training sentences, F1 on the validation data and its standard error."""

    fraction: float
    sentences: int
    f1: float
    error: float

    @classmethod
    def of(cls, fraction: float, sentences: int, scores: Mapping[str, Any]) -> Trained:
        """Of a model's scores."""
        f1, error = judged(scores) or (0.0, 0.0)
        return cls(fraction=fraction, sentences=sentences, f1=f1, error=error)


class SiteForecast(BaseModel):
    """alone, bound: F1 of all its own sentences, and of as many like its own as all sites have.
    worth: m. pilot: empty at home before there was one."""

    curve: list[Trained]
    pilot: list[Trained]
    alone: Range
    bound: Range
    worth: Range
    gain: Range
    words: str


class Forecast(BaseModel):
    """forecast.json: fractions, not percent. cost: of the full run, at most. seconds: it takes at
    the pilot's pace; None where that is not known."""

    version: int = 1
    title: str
    command: str
    sites: dict[str, SiteForecast]
    cost: Traffic
    seconds: float | None


def forecast(
    source: Job | Mapping[str, Any] | str | Path,
    out: str | Path,
    plan: ForecastPlan | Mapping[str, Any] | None = None,
    *,
    settings: Sequence[str] = (),
    site: str = "",
    site_file: str | Path | None = None,
    total: int = 0,
    pilots: str | Path | Sequence[str | Path] = (),
    progress: Told = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    command: str = "",
) -> Forecast:
    """Train curves and pilot of a job, and say of each site what it may gain; forecast.json.

    source: a job, its table, or its file, with settings such as "seed=2". plan: one, or its keys.
    site: the one whose notes are here, if the others' are not; then the job's file says who they
    are, `total` how many training sentences all have together; site_file: the site's own file;
    pilots: what one or more runs with `plan.part` of the sentences left here, folders with a model
    and, if known, their summary.json. progress and the others: as in `simulate`.
    Raises ConfigError for a job that nothing can be said of; as `simulate`.
    """
    if bool(site) != bool(total) or ((site_file or pilots) and not site):
        raise ConfigError("--site and --total go together, and --site-file and --pilot with them")
    if settings and isinstance(source, Job | Mapping):
        raise ConfigError("settings are of a job's file or name; change this job or table itself")
    if not isinstance(plan, ForecastPlan):
        plan = build(ForecastPlan, {} if plan is None else plan, "plan")
    out = path_of(out, "a folder")
    if out.exists() and not (out.is_dir() and all(_OWN.match(p.name) for p in out.iterdir())):
        raise ConfigError(f"{out} is not the folder of a forecast, nor empty: give another --out")
    if isinstance(source, Mapping):
        source = parse_job(source, "job", Path.cwd(), "job")
    display = displayed(progress)
    device_of(device)
    options: Any = {"resume": resume, "overwrite": overwrite, "device": device, "command": command}
    if not isinstance(source, Job):
        home = site, site_file, total
        job = at_home(source, settings, *home) if site else load_job(source, tuple(settings))
    elif site:
        raise ConfigError(f"--site {site}: name the job's file, which the other sites have too")
    else:
        job = source
    if job.kind.name != "documents":
        told = f"a forecast is of mentions that are found; this method's sites hold {job.kind.name}"
        raise ConfigError(f"method = {job.method!r}: {told}")
    if getattr(getattr(job.config, "model", None), "context", "sentence") != "sentence":
        raise ConfigError('a forecast trains on parts of the sentences: set context = "sentence"')
    read = load_sites(job, display.features)
    sites = [replace(site, train=sentence_documents(site.train)) for site in read.data]
    sites = [replace(site, test=site.valid, test_types=()) for site in sites]
    own = {each.id: each for each in sites if site in ("", each.id)}
    if len(sites) < 2:
        raise ConfigError("the job has one site: there is nobody to federate with")
    if blind := [name for name, site in own.items() if not any(d.spans for d in site.valid)]:
        told = "holds out no annotated note for validation, by which a forecast judges"
        raise ConfigError(f"site {blind[0]!r} {told}: raise valid_fraction, or give it `valid`")
    config, every = job.module.for_sites(job.config, sites), sum(len(s.train) for s in sites)
    cost = traffic(replace(job, conditions=("federated",)), config, sites)
    assert cost is not None  # all methods that find mentions tell it
    single, at = job, range(job.seed, job.seed + plan.seeds)
    if site:  # by itself as it is beside the others; the method may be another then
        by_itself = job.module.alone(config, sites)[0]
        method = type(by_itself).__module__.rpartition(".")[2]
        single = replace(job, config=by_itself, method=method)
    runs = [("alone", fraction, s) for fraction in {*plan.fractions, plan.part} for s in at]
    runs = [*sorted(runs), ("alone", 1.0, job.seed)]
    runs += [("federated", plan.part, seed) for seed in at if not site]
    made = {name: dict[str, list[Trained]](alone=[], federated=[]) for name in own}
    left = [*map(Path, [pilots] if isinstance(pilots, str | Path) else pilots)]
    spent = [read_result(folder) for folder in left if (folder / SUMMARY).is_file()]
    for folder in left:
        model, mine = load_model(folder / "model"), own[site]
        said = model.predict(model.prepare(mine.test, cache=default_cache(), gold=False))
        scores = SpanCounts.of(mine.test, said, types=mine.tags.types).scores()
        size = round(plan.part * len(mine.train))
        made[site]["federated"].append(Trained.of(plan.part, size, scores))
    for place, (condition, fraction, seed) in enumerate(runs):
        held = tuple(replace(s, train=subsample(s.train, fraction, seed)) for s in own.values())
        given = Sites(held, findings=() if place else read.findings)
        run = _run(single, condition, given, fraction, seed, every)
        folder = out / f"{condition}-{fraction:.8g}-{seed}"
        result = simulate(run, folder, display=display, **options)
        spent += [result] if condition == "federated" else []
        for each in held:
            scores = result.sites[each.id][condition]
            made[each.id][condition].append(Trained.of(fraction, len(each.train), scores))
        for saved in [*folder.rglob("model")]:  # many, which nobody asked for
            shutil.rmtree(saved)
    known = [number(result.conditions, "federated", "seconds") for result in spent]
    took = [seconds for seconds in known if seconds]
    seconds = fmean(took) / plan.part if took else None
    each_site = {n: outlook(of["alone"], of["federated"], every, plan) for n, of in made.items()}
    found = Forecast(title=job.title, command=command, sites=each_site, cost=cost, seconds=seconds)
    write_json(out / "forecast.json", found.model_dump())
    return found


def at_home(
    name: str | Path, given: Sequence[str], site: str, file: str | Path | None, total: int
) -> Job:
    """A job as one site can read it: its notes where the job's table or its own file says, and in
    place of the other sites' copies, `total` training examples in all (sentences, notes or
    patients). Raises ConfigError."""
    settings = tuple(given)
    table, path = load_table(name, settings)
    sites = table.get("sites")
    if not isinstance(sites, Mapping) or site not in sites or "silos" in table:
        raise ConfigError(f"--site {site}: {path} has no [sites.{site}] with notes of its own")
    if file is not None:
        job = job_of_site(load_deployed(name, settings)[1], site, read_site_file(Path(file)))
    else:
        own = {**table, "sites": {site: sites[site]}}
        job = parse_job(own, path.stem, path.resolve().parent, str(path))

    def load(_: Job, progress: Progress | None, cache: Path | None) -> Sites:
        found = load_own(job, cache)
        mine, others = found.data[0], [name for name in sites if name != site]
        rest = (total - job.kind.size(mine)) // max(1, len(others))
        if rest < 1:
            raise ConfigError(f"--total {total}: this site alone has {job.kind.size(mine)}")
        return replace(found, data=(mine, *(job.kind.stand_in(mine, n, rest) for n in others)))

    return replace(job, kind=replace(job.kind, load=load))


def _run(job: Job, condition: str, sites: Sites, fraction: float, seed: int, total: int) -> Job:
    """One condition of the job on these sites, as a job of its own."""
    sizes = ", ".join(f"{len(site.train):,}" for site in sites.data)
    title = f"{job.title}: {condition}, {fraction:.4g} of the sentences ({sizes} of {total:,})"
    config: Any = replace(job.config, seed=seed)  # type: ignore[type-var]
    table = {**job.table, "title": title, "seed": seed, "conditions": [condition]}
    kind = replace(job.kind, load=lambda job, progress, cache: sites)
    given: Any = {"seed": seed, "conditions": (condition,), "kind": kind, "table": table}
    return replace(job, title=title, config=config, **given)


def outlook(
    curve: list[Trained], pilot: list[Trained], total: int, plan: ForecastPlan
) -> SiteForecast:
    """What a site may expect. curve: its own runs, that of all its sentences last. pilot: the
    federation's, all of one part. total: sentences of all sites."""
    rng, last = np.random.default_rng(1), curve[-1]
    steep, floor = rng.uniform(0, STEEPEST, _TRIED), rng.uniform(0, 1, _TRIED) ** 2
    most = float(np.log(max(1.0, total / last.sentences)))
    more = rng.uniform(-most, most, _TRIED)  # log m
    variance = np.exp(2 * rng.uniform(np.log(0.01), 0, _TRIED))  # s², with all sentences

    def gained(times: Floats | float) -> Floats:
        """Of log odds with so many times all its sentences."""
        return np.asarray(-np.log(floor + (1 - floor) * np.asarray(times) ** -steep))

    rows = []  # of each point: what it lies off the level, its variance
    for point in (point for point in curve if point.f1 >= LEARNT or point is last):
        size = point.sentences / last.sentences
        rows.append((gained(size) - _logit(point.f1), variance / np.sqrt(size)))
    if pilot and min(point.f1 for point in pilot) >= LEARNT:
        size = fmean(point.sentences for point in pilot) / last.sentences
        noise = variance / np.sqrt(size) / len(pilot) + PAIRED * _error(pilot[0]) ** 2
        seen = fmean(_logit(point.f1) for point in pilot)
        rows.append((gained(np.exp(more) * size) - seen, noise))
        more = (more + rng.normal(0, DRIFT * np.log2(1 / size), _TRIED)).clip(-most, most)
    # Any level is equally likely before, so it is normal, given all else, and need not be tried.
    known = np.sum([1 / noise for _, noise in rows], axis=0)
    middle = -np.sum([gap / noise for gap, noise in rows], axis=0) / known
    off = np.log(known)  # -2 log likelihood
    for gap, noise in rows:
        off += (middle + gap) ** 2 / noise + np.log(noise)
    level = middle + rng.normal(0, 1, _TRIED) / np.sqrt(known)
    chance = np.exp((off.min() - off) / 2)
    fits = rng.choice(_TRIED, _DRAWS, p=chance / chance.sum())

    at = level[fits] + rng.normal(0, _error(last), _DRAWS)
    seeds = rng.normal(0, np.sqrt(2 * variance[fits]))  # of the two runs that are compared
    ends = (at, at + gained(np.exp(most))[fits], at + gained(np.exp(more))[fits] + seeds)
    alone, bound, federated = (1 / (1 + np.exp(-logits)) for logits in ends)
    draws = {"alone": alone, "bound": bound, "worth": np.exp(more[fits])}
    draws["gain"] = federated - alone
    told: Any = {n: tuple(np.quantile(of, (0.1, 0.5, 0.9)).tolist()) for n, of in draws.items()}
    learnt = all(point.f1 >= LEARNT for point in (last, *pilot))
    words = plan.words(told["gain"]) if learnt else "cannot tell"
    return SiteForecast(curve=curve, pilot=pilot, words=words, **told)


def _error(point: Trained) -> float:
    f1 = min(max(point.f1, LEARNT), 1 - LEARNT)
    return max(0.01, point.error) / (f1 * (1 - f1))  # of log odds


def _logit(f1: float) -> float:
    f1 = min(max(f1, 0.005), 0.995)
    return float(np.log(f1 / (1 - f1)))
