"""Check a job before training: everything that a simulation does before round 1."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    JobProblem,
    NamesParameters,
    ParameterError,
    Problem,
)
from fednotes.data.checks import find_notes_of_several_sites
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.checking import Checked
from fednotes.jobs.duration import estimate_seconds
from fednotes.jobs.job import Job, Sites
from fednotes.jobs.job_file import load_job
from fednotes.jobs.parts import (
    Part,
    find_sampling,
    is_summed_securely,
    list_parts,
    make_method_sites,
    prepare,
)
from fednotes.jobs.results import LEFT_OUT
from fednotes.methods.base import list_models_of_sites
from fednotes.taggers.model import ModelConfig


def check_job(
    name: str, settings: tuple[str, ...] = (), *, estimates_time: bool = False
) -> Checked:
    """Check all that a simulation of a job would do before it trains.

    Args:
        name: Path of the job's file, or name of a built-in job.
        settings: Assignments such as "training.epochs=3".
        estimates_time: Whether to estimate how long a simulation takes, if there is no
            problem. This trains a model for some seconds.

    Raises:
        ConfigError: There is no such job, or an assignment is invalid.
    """
    try:
        job = load_job(name, settings)
    except ConfigError as error:
        if isinstance(error, ParameterError) or not Path(name).is_file():
            raise
        problems = _list_problems(error)
        return Checked(problems, len(problems))
    try:
        sites, _, parts = prepare(job)
    except FednotesError as error:
        problems = _list_problems(error)
        problems += tuple(each for each in _try_model(job) if each not in problems)
        return Checked(problems, len(problems), job=job)
    problems = ()
    try:
        rehearse(job, parts)
    except FednotesError as error:
        problems = _list_problems(error)
    texts = {site.id: job.kind.iterate_notes(site) for site in sites.data}
    findings = (*job.kind.check(job, sites), *find_notes_of_several_sites(texts))
    seconds = {}
    if estimates_time and not problems:
        seconds = estimate_seconds(job, parts)
    return Checked(
        problems, len(problems), findings, job=job, sites=sites, seconds=seconds
    )


def _list_problems(error: FednotesError) -> tuple[Problem, ...]:
    """Return the problems because of which a simulation would refuse a job."""
    if isinstance(error, DataError) and error.problems:
        return error.problems
    if isinstance(error, DataError | NamesParameters):
        return (Problem("", 0, "job", str(error)),)
    return (JobProblem("", 0, "job", str(error)),)


def rehearse(job: Job, parts: Iterable[Part]) -> None:
    """Make the sites and models of every part as a simulation does, without training.

    The sites also agree on what training begins with, such as its outputs. If a frozen
    encoder reads notes, one sentence of each site represents them.

    Args:
        job: The job.
        parts: The parts of its run.

    Raises:
        FednotesError: The simulation would raise the same error.
    """
    shrink = job.kind.shrink
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            is_slow = any(
                isinstance(model, ModelConfig) and model.has_frozen_encoder
                for model in list_models_of_sites(part.config)
            )
            cache = None
            if is_slow and shrink is not None:
                sites = tuple(shrink(site, 1) for site in part.sites)
                part = replace(part, sites=sites)
                cache = Path(folder)
            folders = [None] * len(part.sites)
            members = make_method_sites(job, part, folders, cache=cache)
            InProcess(
                members,
                secure=is_summed_securely(job, part),
                sampling=find_sampling(job, part),
            )
            # Without the secure sum, whose total is the same but takes longer.
            job.module.check_agreement(InProcess(members), part.config)


def _try_model(job: Job) -> tuple[Problem, ...]:
    """Return the problems with the model of a job whose notes cannot be read.

    The model is tried on one invented sentence of each site.
    """
    if job.kind.invent_site is None:
        return ()
    sites = tuple(job.kind.invent_site(name, site) for name, site in job.sites.items())
    try:
        config = job.module.configure(job.config, sites)
        # Invented sites have no test data, so none of them can be left out.
        conditions = tuple(name for name in job.conditions if name != LEFT_OUT)
        parts = list_parts(replace(job, conditions=conditions), Sites(sites), config)
        federated = [part for part in parts if part.condition == "federated"]
        rehearse(job, federated or parts[:1])
    except FednotesError as error:
        return _list_problems(error)
    return ()
