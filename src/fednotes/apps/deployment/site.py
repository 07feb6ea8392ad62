"""A site's part of a deployed job.

The method's site class runs behind a host, which applies the site's policy and writes
its ledger. The site's model and its own scores are written to KIT/results/RUN/.

An error message for the server names the kind of problem, never a file, a line or a
path, because the file name of a note may contain a patient's name or record number. The
full message is in the site's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch

from fednotes.apps.deployment.problems import LineKind, mark_line
from fednotes.apps.deployment.rules.guard import (
    NotApproved,
    SiteGuard,
    require_approved,
)
from fednotes.apps.deployment.rules.policy import (
    Policy,
    PolicyRefusal,
    check_count_step,
)
from fednotes.apps.deployment.run_secrets import load_or_create_secret
from fednotes.apps.deployment.site_agreement import (
    AGREE,
    DESCRIBE,
    SCORES,
    Description,
    can_round_counts,
    compute_agreement_fingerprint,
    compute_sum_threshold,
    count_planned_rounds,
    count_sites_per_sum,
    decode_descriptions,
    derive_config,
    describe_site,
    explain_mismatch,
    make_threshold_function,
    name_key_exchange,
    pack_json,
)
from fednotes.apps.deployment.site_file import (
    SITE_FILE,
    SiteFile,
    load_site_data,
    parse_site_job,
    read_kit_site_file,
)
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    MissingExtra,
    ModelError,
    RefusedError,
    TrainingError,
)
from fednotes.core.federation import MethodSite, Option, State
from fednotes.core.kernels import compile_kernels
from fednotes.core.parsing import read_json_table
from fednotes.core.seeds import Draws
from fednotes.core.store import write_json
from fednotes.core.tables import fingerprint_table
from fednotes.core.tensors import require_deterministic_kernels
from fednotes.core.update import Tensors, Update
from fednotes.encoders.features import find_default_cache
from fednotes.engines.answer_times import AnswerTimes
from fednotes.engines.history import OPENED
from fednotes.engines.host import SiteHost, explain_error
from fednotes.engines.launch import Setup
from fednotes.engines.secure import SecureSeal
from fednotes.jobs.card import SCORES_FILE, OwnRun, write_cards
from fednotes.jobs.declaration import make_table_to_approve
from fednotes.jobs.job import Job
from fednotes.jobs.results import PROMISED, RunResult
from fednotes.jobs.run_folder import list_versions
from fednotes.training.site_sampling import count_drawn_sites

RESULTS = "results"
NOISE_KEY_FILE = "noise.key"  # in the folder of a run's state
DRAWS_KEY_FILE = "draws.key"  # in the folder of a run's state
logger = logging.getLogger("fednotes.apps.deployment.site")

# Messages of these errors mention only rules, numbers and packages, so they may leave.
_MAY_LEAVE = (RefusedError, TrainingError, MissingExtra)
_SUMMARIES: tuple[tuple[type[FednotesError], str], ...] = (
    (DataError, "its notes cannot be read"),
    (ConfigError, "its notes or its site file do not match the job"),
    (ModelError, "a model or its saved state cannot be read"),
    (FednotesError, "a file there cannot be read or written"),
)


def site_main(setup: Setup) -> SiteHost:
    """Join a job that was approved at this site, and return the host of its part.

    Raises:
        NotApproved: Nobody at the site has decided yet; the server asks again later.
        PolicyRefusal: The site's policy does not permit the job.
        FednotesError: The notes cannot be read; the message may leave the site.
    """
    with redacting_errors(setup.site):
        return _open_host(setup)


def _open_host(setup: Setup) -> SiteHost:
    """Check the job, read the site's notes, and return the host; see `site_main`."""
    file = read_kit_site_file(setup.kit)
    table = make_table_to_approve(setup.job, setup.sites, setup.min_sites)
    require_approved(setup.kit, setup.site, table, file.policy)

    job = parse_site_job(setup.job, setup.site, file)
    guard = create_guard(setup, file, table, job)

    data = _load_notes(job, file)
    guard.check_coverage(job.module.list_coverage(job.config, data))
    participation = _Participation(
        setup,
        file,
        job=job,
        table=table,
        data=data,
        description=describe_site(job, data),
        draws=load_draws(job, file.policy, setup.state),
    )
    sealer = None
    if job.federation.secure_sum:
        sealer = SecureSeal(
            setup.site,
            setup.sites,
            job=name_key_exchange(participation.fingerprint, setup.run),
            threshold=compute_sum_threshold(job, setup),
            threshold_of_drawn=make_threshold_function(job, setup),
            identity=setup.identity,
            record=setup.state / "site" / OPENED,
        )
    guard.check_examples(lambda: job.kind.encode_examples(data))
    # Otherwise the first task would take much longer than the next ones. Under steady
    # replies, all sites would then wait that long for several rounds.
    compile_kernels()
    return _create_host(participation, guard, sealer)


def _load_notes(job: Job, file: SiteFile) -> Any:
    """Return the site's notes as its kind of data has them; log what readers report.

    Also set the number of threads, and whether torch may use nondeterministic
    algorithms, for the whole process.
    """
    torch.set_num_threads(file.threads or job.threads)
    require_deterministic_kernels(file.device)
    loaded = load_site_data(job, cache=file.cache)
    for message in loaded.messages:
        logger.info("%s", message)
    (data,) = loaded.data
    return data


def _create_host(
    participation: _Participation, guard: SiteGuard, sealer: SecureSeal | None
) -> SiteHost:
    """Return the host that answers the server's requests.

    Args:
        participation: The site's part in the run.
        guard: The site's policy and ledger.
        sealer: The site's part in a secure sum; None without one.
    """
    setup = participation.setup
    job = participation.job
    packed_description = pack_json(asdict(participation.description))

    def make_agreed_site() -> Any:
        """Build the site in its initial state; its notes are not read again."""
        agreed_site = AgreedSite(
            participation.data.id,
            job,
            setup.sites,
            description=participation.description,
            make_site=lambda config: participation.make_method_site(
                config, lambda: host.question
            ),
            results=participation.results,
            write_card=participation.write_card,
        )
        guard.count_covered = agreed_site.count_covered
        guard.find_model_digest = agreed_site.find_model_digest
        return agreed_site

    pace = None
    if participation.file.policy.steady_replies:
        pace = AnswerTimes(longest=job.federation.timeout)
    host = SiteHost(
        make_agreed_site,
        setup.state / "site",
        job=participation.fingerprint,
        name=setup.site,
        guard=guard,
        sealer=sealer,
        public={
            DESCRIBE: lambda _: {"description": packed_description},
            SCORES: partial(_share_scores, setup.kit),
        },
        read_only=job.module.site_class.read_only,
        builds_on=job.module.site_class.builds_on,
        max_norm=job.federation.max_norm,
        pace=pace,
        tell=lambda line: logger.info("%s", line),
        tell_refusal=_log_refusal,
        explain_to_server=redact_error,
    )
    return host


def _log_refusal(line: str, task: str, error: Exception) -> None:
    """Log a request that was refused, and whether that is a problem of the site.

    A missing approval has its own line in the status, and no site need share its
    scores.

    Args:
        line: The line to log.
        task: The task that was requested.
        error: Why it was refused.
    """
    kind: LineKind = "problem"
    if task == SCORES or isinstance(error, NotApproved):
        kind = "state"
    logger.info("%s", line, extra=mark_line(kind))


def create_guard(
    setup: Setup, file: SiteFile, table: Mapping[str, Any], job: Job
) -> SiteGuard:
    """Return this run's guard after it has checked the job; no notes are read yet.

    Args:
        setup: Start-up data of this side of the job.
        file: The site's own file.
        table: The table that was approved.
        job: The job as this site reads it.

    Raises:
        PolicyRefusal: The site's policy does not permit the job.
        Withheld: A file of the site is damaged.
    """
    config: Any = job.config
    if job.privacy:
        config = replace(config, sites=len(setup.sites))
    num_sites = count_sites_per_sum(job, setup)
    guard = SiteGuard(
        setup.kit,
        setup.site,
        setup.run,
        table,
        lambda: _read_policy_during_run(setup.kit, file.policy.count_step),
        secure=job.federation.secure_sum,
        threshold=compute_sum_threshold(job, setup, num_sites),
        drawn=count_drawn_sites(job.config),
        promise=job.module.make_promise(config),
        folders=(setup.state, setup.kit / RESULTS / setup.run),
    )
    check_count_step(file.policy, job.method, rounds_counts=can_round_counts(job))
    guard.check_job(
        job.method,
        num_sites,
        count_planned_rounds(job, job.config),
        inspects_each=job.module.needs_each_update(job.config),
    )
    return guard


@dataclass(frozen=True)
class _Participation:
    """One site's part in one run.

    Attributes:
        setup: Start-up data of this side of the job.
        file: The site's own file.
        job: The job as this site reads it.
        table: The table that was approved.
        data: The site's notes.
        description: The public facts of this site.
        draws: The site's secret random draws; None if draws are derived from the job's
            seed.
    """

    setup: Setup
    file: SiteFile
    job: Job
    table: Mapping[str, Any]
    data: Any
    description: Description
    draws: Draws | None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the approved table."""
        return fingerprint_table(self.table)

    @property
    def results(self) -> Path:
        """The folder of the site's model and scores."""
        return self.setup.kit / RESULTS / self.setup.run

    def make_method_site(self, config: Any, name_request: Callable[[], Any]) -> Any:
        """Return a new instance of the method's site class.

        Args:
            config: The configuration on which all sites agreed.
            name_request: Returns an identifier of the request being answered; noise is
                drawn once for each identifier.
        """
        options: dict[str, Any] = {
            "cache": self.file.cache or find_default_cache(),
            "device": self.file.device,
        }
        if self.draws is not None:
            options["draws"] = self.draws
            torch.manual_seed(self.draws.seed_of("what a method does not seed"))
        if self.file.policy.count_step > 1:
            options["count_step"] = self.file.policy.count_step
        if self.job.privacy is not None:
            options["secret"] = load_or_create_secret(self.setup.state / NOISE_KEY_FILE)
            options["name_request"] = name_request
        return self.job.module.make_site(
            self.data, config, directory=self.results, **options
        )

    def write_card(self) -> None:
        """Write the model card beside the site's model."""
        scores = read_json_table(self.results / SCORES_FILE)
        sites: dict[str, Any] = {name: {} for name in self.setup.sites}
        sites[self.setup.site] = {"federated": scores}
        result = RunResult(
            sites=sites,
            run=self.setup.run,
            versions=list_versions(),
            method=self.job.method,
            holds=self.job.kind.name,
            seed=self.job.seed,
            title=self.job.title,
            # With the tables of the site's own file.
            config={**self.table["job"], "sites": self.job.table["sites"]},
        )
        declaration = {
            "job": str(self.table["name"]),
            "fingerprint": self.fingerprint,
        }
        run = OwnRun(self.setup.site, result, declaration)
        write_cards(self.results, run)


def load_draws(job: Job, policy: Policy, state: Path) -> Draws | None:
    """Return this site's random draws for a run, from a secret in the run's state.

    A run that resumes after a restart has the same secret and therefore the same draws.
    If the file of the secret is lost, the run resumes with new draws. Its result is
    then no longer bit-identical to that of an uninterrupted run.

    Args:
        job: The job as this site reads it.
        policy: The site's rules; `draws = "job"` creates no secret.
        state: The folder of the run's state at this site.

    Returns:
        The draws, or None if they are derived from the job's seed.

    Raises:
        PolicyRefusal: The method's site class accepts no draws, so its draws would be
            derived from the job's seed.
    """
    if policy.draws == "job":
        return None
    policy.require(
        accepts_option(job.module.inner_site_class, "draws"),
        "draws",
        f"sites of the method {job.method} take no `draws`, so their batches and "
        "dropout would follow from the job's seed, which everybody knows",
        "draws that are its own secret",
    )
    return Draws.of_secret(load_or_create_secret(state / DRAWS_KEY_FILE))


def accepts_option(site: type[Any], option: str) -> bool:
    """Return whether a method's site class accepts an option, by name or `**kwargs`."""
    return any(
        parameter.name == option or parameter.kind is Parameter.VAR_KEYWORD
        for parameter in signature(site.__init__).parameters.values()
    )


def _read_policy(kit: Path) -> Policy:
    """Return a site's current policy, whose refusals do not name the kit's path."""
    return replace(read_kit_site_file(kit).policy, source=f"[policy] of {SITE_FILE}")


def _read_policy_during_run(kit: Path, count_step: int) -> Policy:
    """Return a site's current policy, for a run that reports counts in steps.

    Args:
        kit: The site's kit.
        count_step: The step with which the site joined the run.

    Raises:
        PolicyRefusal: The policy now requires larger steps, which only apply once the
            site is started again.
    """
    policy = _read_policy(kit)
    policy.require(
        count_step % policy.count_step == 0,
        "count_step",
        f"the site has joined this run with counts in multiples of {count_step:,}",
        f"multiples of {policy.count_step:,}, which it sends once it is started again",
    )
    return policy


def _share_scores(kit: Path, agreed_site: Any) -> Tensors:
    """Return the site's own scores as a reply to the server.

    Args:
        kit: The site's kit.
        agreed_site: The running `AgreedSite`.

    Returns:
        The tensor "scores" with the scores' JSON text.

    Raises:
        PolicyRefusal: The site's policy does not let its scores leave.
        RefusedError: The site has no scores yet.
    """
    policy = _read_policy(kit)
    if not policy.share_scores:
        raise PolicyRefusal(
            "share_scores",
            "this site's scores stay here; only the site can change this: "
            f"share_scores in {policy.source}",
        )
    policy.require(
        policy.count_step == 1,
        "count_step",
        "the server asks for this site's own scores, which follow from exact counts",
        f"multiples of {policy.count_step:,} to leave",
    )
    scores = getattr(agreed_site.site, "scores", None)
    if not scores:
        raise RefusedError(f"site {agreed_site.id!r} has no scores yet")
    return {"scores": pack_json(scores)}


class AgreedSite:
    """A site that performs a method's tasks once all sites have agreed.

    The instance of the method's site class is created after the agreement, because its
    configuration depends on the descriptions of all sites.

    Args:
        id: The site's name.
        job: The job as this site reads it.
        sites: The names of all sites of the job, in its order.
        description: The description of this site.
        make_site: Returns the method's site, given the configuration on which all sites
            agreed.
        results: The folder to which this site's own scores are written.
        write_card: Writes a model card beside the site's model.

    Attributes:
        id: The site's name.
        tasks: The names of the tasks that the server may request.
        site: The method's site; None before the agreement.
    """

    def __init__(
        self,
        id: str,
        job: Job,
        sites: tuple[str, ...],
        *,
        description: Description,
        make_site: Callable[[Any], MethodSite],
        results: Path,
        write_card: Callable[[], None],
    ) -> None:
        self.id = id
        self.tasks: frozenset[str] = frozenset({AGREE}) | job.module.site_class.tasks
        self.site: Any = None
        self._job = job
        self._sites = sites
        self._description = description
        self._make_site = make_site
        self._results = results
        self._write_card = write_card
        self._descriptions_text = ""  # of all sites, as the server sent them

    def agree(self, tensors: Tensors, *, descriptions: str, agreed: str) -> Update:  # noqa: ARG002 - every task takes tensors
        """Read all sites' descriptions, and create the method's site from them.

        Args:
            tensors: Unused.
            descriptions: All descriptions, as text.
            agreed: The server's fingerprint of the agreement.

        Raises:
            RefusedError: This site derives a different agreement from the descriptions
                than the server.
        """
        self._create_method_site(descriptions, agreed)
        return Update(metrics={"agreed": 1.0})

    def _create_method_site(
        self, descriptions_text: str, server_fingerprint: str
    ) -> None:
        """Check an agreement, and create the method's site; see `agree`."""
        descriptions = decode_descriptions(descriptions_text)
        # The number of sites determines a site's share of a mini-batch.
        if tuple(descriptions) != self._sites:
            raise RefusedError(
                f"site {self.id!r}: the server lists {len(descriptions)} sites that "
                f"agree, but the approved job is for {', '.join(self._sites)}, in this "
                "order"
            )
        self._require_described(descriptions[self.id])
        if compute_agreement_fingerprint(self._job, descriptions) != server_fingerprint:
            raise RefusedError(
                f"site {self.id!r} builds a different configuration of this job "
                "than the server does: start both from the same job and the same "
                "version of fednotes"
            )
        self.site = self._make_site(derive_config(self._job, descriptions))
        self._descriptions_text = descriptions_text

    def _require_described(self, server_description: Description) -> None:
        """Raise RefusedError unless the server describes this site correctly."""
        if server_description == self._description:
            return
        problem = explain_mismatch(
            self.id,
            self._description,
            server_description,
            names=("this site", "the agreement"),
        )
        if not problem:
            problem = (
                f"site {self.id!r} was described with another dictionary, encoder or "
                "version than it has now: start the run again"
            )
        raise RefusedError(problem)

    # The host looks tasks up by name, and the method determines which tasks exist.
    def __getattr__(self, name: str) -> Any:
        """Return a task of the method's site."""
        return self._get_task(name)

    def _get_task(self, name: str) -> Any:
        """Return a task of the method's site, which exists once the sites agree."""
        if name not in self.__dict__.get("tasks", ()):
            raise AttributeError(name)
        if self.site is None:
            raise TrainingError(f"site {self.id!r} has not agreed with the others yet")
        return getattr(self.site, name)

    def finish(self, tensors: Tensors, **options: Option) -> Update:
        """Run the method's task "finish"; write scores, privacy guarantee and card.

        Args:
            tensors: The tensors that the server sends.
            options: The task's options.
        """
        # The name `finish` refers to this method, so `__getattr__` does not apply.
        finish_task = self._get_task("finish")
        update: Update = finish_task(tensors, **options)
        if self.site.scores:
            write_json(self._results / SCORES_FILE, self.site.scores)
        promise = getattr(self.site, "promise", None)
        if promise:
            logger.info("%s", promise)
            write_json(
                self._results / PROMISED, {"promise": str(promise), **promise.to_dict()}
            )
        self._write_card()
        return update

    def count_covered(self, task: str) -> Mapping[str, int]:
        """Return the numbers of tokens, steps and patients behind a task's update.

        Unknown numbers are absent.
        """
        return {} if self.site is None else self.site.count_covered(task)

    def find_model_digest(self, task: str) -> str:
        """Return a digest of the model that a task's update is about, or ""."""
        if self.site is None:
            return ""
        digest: str = self.site.find_model_digest(task)
        return digest

    def state(self) -> State:
        """Return the agreement and the state of the method's site."""
        state: State = self.site.state() if self.site is not None else State(0)
        facts = {"descriptions": self._descriptions_text, "own": dict(state.facts)}
        return State(state.round, state.tensors, facts)

    def restore(self, state: State) -> None:
        """Restore a saved state in a site that has just been created.

        If the sites had agreed when the state was saved, the agreement is restored from
        their descriptions before the state of the method's site.

        Raises:
            RefusedError: This site or its job has changed since the sites agreed.
        """
        text = state.facts["descriptions"]
        if not text:
            # The sites had not agreed yet, and neither has a new site.
            return
        # `_create_method_site` compares this site's fingerprint of the agreement with
        # the server's, which is not saved. The two were equal when the sites agreed, so
        # this site's is passed in place of the server's.
        fingerprint = compute_agreement_fingerprint(
            self._job, decode_descriptions(text)
        )
        self._create_method_site(text, fingerprint)
        self.site.restore(State(state.round, state.tensors, state.facts["own"]))


# ---- messages that may leave the site ------------------------------------------------


def redact_error(error: Exception, site: str) -> str:
    """Return a line about an error that reveals nothing of the site's files."""
    if isinstance(error, _MAY_LEAVE) or not isinstance(error, FednotesError):
        return explain_error(error, site)
    # The last class of _SUMMARIES is FednotesError, so there is always a summary.
    summary = next(text for kind, text in _SUMMARIES if isinstance(error, kind))
    cause = error.__cause__
    reason = ""
    if isinstance(cause, OSError) and cause.strerror:
        reason = f"{cause.strerror}; "
    return f"site {site!r}: {summary} ({reason}see the site's log)"


@contextmanager
def redacting_errors(site: str) -> Iterator[None]:
    """Raise an error again with the message of `redact_error`; log its full message.

    The class of the error stays the same; a subclass of RefusedError becomes
    RefusedError.
    """
    try:
        yield
    except FednotesError as error:
        message = redact_error(error, site)
        if message == str(error):
            raise
        logger.error("%s", error)
        error_class = type(error)
        if isinstance(error, RefusedError):
            error_class = RefusedError  # its subclasses take other arguments
        raise error_class(message) from error
