"""Train one part of a run, wherever its sites run, and score its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fednotes.core.federation import MethodSite
from fednotes.core.types import POOLED
from fednotes.engines.rounds import RoundResult
from fednotes.engines.simulation import Simulation
from fednotes.engines.site_programs import ProgramsHere, SitePrograms, run_task
from fednotes.jobs.job import Job, Progress
from fednotes.jobs.parts import (
    Part,
    find_sampling,
    is_summed_securely,
    make_method_sites,
    plan_rounds,
)
from fednotes.jobs.results import Outcome


@dataclass(frozen=True)
class PartRun:
    """A part to train, and where.

    Attributes:
        job: The job.
        part: The part.
        out: The folder of the run.
        resume: Whether to resume from the part's checkpoints.
    """

    job: Job
    part: Part
    out: Path
    resume: bool

    @property
    def folder(self) -> Path:
        """The folder of the part's checkpoints and models."""
        return self.out / self.part.name

    def list_site_folders(self) -> list[Path | None]:
        """Return the folder of each site; None for a site that saves no model.

        A site saves its model in `model` of its folder.
        """
        if self.job.module.ends_with_one_model(self.part.config):
            # The first site saves the model of all.
            other_folders = [None] * (len(self.part.sites) - 1)
            return [self.folder, *other_folders]
        return [self.folder / "sites" / site.id for site in self.part.sites]


class PartEvents(Protocol):
    """Receives the events of a part, in the order of these methods."""

    def begin(self, first_round: int, rounds: int, examples: int) -> None:
        """Be notified that training starts or resumes.

        Args:
            first_round: The round that comes first, above 0 after a resume.
            rounds: Largest number of rounds.
            examples: Training examples of all sites in a round; 0 if it is unknown.
        """

    def round(self, result: RoundResult) -> None:
        """Receive a committed round, before its checkpoint is saved."""

    def end(self) -> None:
        """Be notified that training has ended."""


@dataclass(frozen=True)
class SiteReport:
    """What the outcome of a part says of one of its sites, after training.

    Attributes:
        id: The site's name.
        examples: Number of training examples.
        described: Description of how much of the model is sent.
        eta: Fraction of the model that is trained and sent.
        valid: Validation score of the model; None without validation data.
        reading: Counts of how the model reads the training data.
        scores: Site to the model's scores on its test data. A pooled model is scored on
            all sites, another one on its own site.
        documents: Site to the counts of each of its test documents, if it has these.
    """

    id: str
    examples: int
    described: str
    eta: float | None
    valid: float | None
    reading: Mapping[str, int]
    scores: Mapping[str, dict[str, Any]]
    documents: Mapping[str, list[list[int]]]


class PartSites(Protocol):
    """The sites of a part, wherever they run.

    Attributes:
        programs: The site programs.
        sizes: Number of training examples of each site.
    """

    programs: SitePrograms
    sizes: Sequence[int]

    def report(self) -> list[SiteReport]:
        """Score the trained models, and return the report of each site."""


class SitesHere:
    """The sites of a part in this process.

    Args:
        run: The part, and where it is trained.
        data: Data of all sites of the job; a pooled model is scored on each of them.
        device: PyTorch device to train on.
        progress: Receives the progress of computing features.
        only: Names of the sites of the part that this process has; None for all.
    """

    def __init__(
        self,
        run: PartRun,
        data: Sequence[Any],
        device: str,
        progress: Progress | None = None,
        only: Sequence[str] | None = None,
    ) -> None:
        chosen = [
            (site, folder)
            for site, folder in zip(
                run.part.sites, run.list_site_folders(), strict=True
            )
            if only is None or site.id in only
        ]
        self.members = make_method_sites(
            run.job,
            run.part,
            [folder for _, folder in chosen],
            device,
            progress=progress,
            sites=[site for site, _ in chosen],
        )
        self._data = data
        self.programs: SitePrograms = ProgramsHere(self.members, run_task)
        self.sizes: Sequence[int] = [site.num_examples for site in self.members]

    def report(self) -> list[SiteReport]:
        """Score the trained models, and return the report of each site."""
        return [report_site(site, self._data) for site in self.members]


def report_site(site: MethodSite, data: Sequence[Any]) -> SiteReport:
    """Score the trained model of a site, and return the site's report.

    Args:
        site: The site.
        data: Data of all sites of the job.
    """
    if site.id == POOLED:
        scores = {each.id: site.score_on(each) for each in data}
    else:
        scores = {site.id: dict(site.scores)}
    documents = {}
    for name in scores:
        counts = site.find_document_counts(name)
        if counts is not None:
            documents[name] = counts.tolist()
    return SiteReport(
        id=site.id,
        examples=site.num_examples,
        described=site.describe_parameters(),
        eta=site.eta,
        valid=site.valid_score,
        reading=dict(site.measure_reading()),
        scores=scores,
        documents=documents,
    )


def train_part(run: PartRun, sites: PartSites, events: PartEvents) -> Outcome:
    """Train a part, and score its models on their sites' test data.

    Args:
        run: The part, and where it is trained.
        sites: The sites of the part.
        events: Receives the events.
    """
    method = run.job.module
    part = run.part
    engine = Simulation(
        sites.programs,
        directory=run.folder / "checkpoints",
        resume=run.resume,
        observer=events.round,
        secure=is_summed_securely(run.job, part),
        sampling=find_sampling(run.job, part),
    )
    state = engine.resume()
    sizes = sites.sizes
    rounds, examples = plan_rounds(method, part.config, sizes, len(sizes))
    events.begin(state.round if state else 0, rounds, examples)
    final_state = method.train(engine, part.config)
    events.end()

    reports = sites.report()
    scores: dict[str, dict[str, Any]] = {}
    documents: dict[str, list[list[int]]] = {}
    for report in reports:
        scores.update(report.scores)
        documents.update(report.documents)
    first_report, *_ = reports
    return Outcome(
        scores=scores,
        documents=documents,
        rounds=final_state.round,
        seconds=engine.seconds,
        bytes_up=engine.bytes_up,
        bytes_down=engine.bytes_down,
        examples=sum(report.examples for report in reports),
        described=first_report.described,
        eta=first_report.eta,
        valid={report.id: report.valid for report in reports},
        reading={report.id: dict(report.reading) for report in reports},
    )
