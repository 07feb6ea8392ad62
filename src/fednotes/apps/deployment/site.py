"""A site's part of a deployed job: the method's site behind its host, its rules and its
ledger.

KIT/results/RUN/ holds its model and its own scores. What a site tells the server of an
error says what it is about, and never a file, a line or a path: a note's file name may
hold a patient's name or record number, so no name of a file leaves, of whatever file.
The whole message is in the site's own log.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch

from fednotes.apps.deployment.agreement import (
    AGREE,
    DESCRIBE,
    SCORES,
    Description,
    agreed_config,
    agreement_of,
    can_round_counts,
    describe,
    from_text,
    mismatch,
    packed,
    planned_rounds,
    threshold,
)
from fednotes.apps.deployment.rules.guard import SiteGuard, require_approved
from fednotes.apps.deployment.rules.policy import Policy, PolicyRefusal, check_counts
from fednotes.apps.deployment.site_file import SITE_FILE, job_of_site, load_own, of_kit
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
from fednotes.core.parsing import read_json_table
from fednotes.core.seeds import Draws
from fednotes.core.store import private_folder, replace_file, write_json
from fednotes.core.tables import table_fingerprint
from fednotes.core.update import Tensors, Update
from fednotes.encoders.features import default_cache
from fednotes.engines.history import OPENED
from fednotes.engines.host import SiteHost, explained
from fednotes.engines.launch import Setup
from fednotes.engines.secure import AnswerTimes, SecureSeal
from fednotes.jobs.card import SCORES_FILE, OwnRun, write_cards
from fednotes.jobs.declaration import table_to_approve
from fednotes.jobs.job import Job
from fednotes.jobs.results import PROMISED, RunResult
from fednotes.jobs.simulate import versions
from fednotes.privacy.secure_sum.crypto import KEY_BYTES

RESULTS = "results"
SECRET = "noise.key"  # in a run's state
DRAWS = "draws.key"  # beside it
logger = logging.getLogger("fednotes.apps.deployment.site")
# they speak of rules, numbers and packages
_OPEN = (RefusedError, TrainingError, MissingExtra)
_ABOUT: tuple[tuple[type[FednotesError], str], ...] = (
    (DataError, "its notes cannot be read"),
    (ConfigError, "its notes or its file do not fit the job"),
    (ModelError, "a model or a kept state of it cannot be read"),
    (FednotesError, "a file there cannot be read or written"),
)


def site_main(setup: Setup) -> SiteHost:
    """Join a job that was approved here, with this site's own notes.

    Raises NotApproved (asked again later), PolicyRefusal, or what reading the notes
    raises, in words that may leave the site.
    """
    with discreet(setup.site):
        return _host(setup)


def _host(setup: Setup) -> SiteHost:
    kit, site = setup.kit, setup.site
    file = of_kit(kit)
    table = table_to_approve(setup.job, setup.sites, setup.min_sites)
    require_approved(kit, site, table, file.policy)
    job, key = job_of_site(setup.job, site, file), table_fingerprint(table)
    least, secure = threshold(job, setup), job.federation.secure_sum
    asked: Any = job.config
    of_all = replace(asked, sites=len(setup.sites)) if job.privacy else asked
    guard = SiteGuard(
        kit,
        site,
        setup.run,
        table,
        lambda: _rules_in_run(kit, file.policy.count_step),
        secure=secure,
        threshold=least,
        promise=job.module.promise(of_all),
    )
    check_counts(file.policy, job.method, can_round_counts(job))
    rounds, each = planned_rounds(job, job.config), job.module.each(job.config)
    guard.job(job.method, len(setup.sites), rounds, each)
    torch.set_num_threads(file.threads or job.threads)
    torch.use_deterministic_algorithms(file.device == "cpu")
    loaded = load_own(job, cache=file.cache)
    for note in loaded.told:
        logger.info("%s", note)
    data, results = loaded.data[0], kit / RESULTS / setup.run
    guard.coverage(job.module.covers(job.config, data))
    described = describe(job, data)
    told = packed(asdict(described))

    draws = draws_of(job, file.policy, setup.state)

    def member(config: Any) -> Any:
        given: dict[str, Any] = {
            "cache": file.cache or default_cache(),
            "device": file.device,
        }
        if draws is not None:
            given["draws"] = draws
            torch.manual_seed(draws.seed_of("what a method does not seed"))
        if file.policy.count_step > 1:
            given["count_step"] = file.policy.count_step
        if job.privacy is not None:
            secret = kept_secret(setup.state / SECRET)
            given |= {"secret": secret, "question": lambda: host.question}
        return job.module.Site(data, config, directory=results, **given)

    def lay() -> None:
        scores = read_json_table(results / SCORES_FILE)
        sites = {
            name: {"federated": scores} if name == site else {} for name in setup.sites
        }
        facts: Any = {"sites": sites, "run": setup.run, "versions": versions()}
        facts |= {"method": job.method, "holds": job.kind.name, "seed": job.seed}
        facts |= {"title": job.title, "config": table["job"]}
        named = {"job": str(table["name"]), "fingerprint": key}
        write_cards(results, OwnRun(site, RunResult(**facts), named))

    def make() -> Any:  # anew, on notes that are read once
        made = AgreedSite(data.id, job, setup.sites, described, member, results, lay)
        guard.covered = made.covered
        guard.subject = made.subject
        return made

    sealer, kept = None, setup.state / "site" / OPENED
    if secure:
        own = setup.identity
        sealer = SecureSeal(
            site, setup.sites, job=key, threshold=least, identity=own, kept=kept
        )
    guard.examples(lambda: job.kind.training_examples(data))
    host = SiteHost(
        make,
        setup.state / "site",
        job=key,
        name=site,
        guard=guard,
        sealer=sealer,
        public={
            DESCRIBE: lambda made: {"description": told},
            SCORES: partial(_scores, kit),
        },
        max_norm=job.federation.max_norm,
        pace=AnswerTimes(longest=job.federation.timeout)
        if file.policy.steady_replies
        else None,
        tell=lambda line: logger.info("%s", line),
        outward=outward,
    )
    return host


def draws_of(job: Job, policy: Policy, state: Path) -> Draws | None:
    """Return the draws of this run at this site, which follow from a secret in the
    run's state.

    A run that goes on after a restart finds the same secret there, and so has the same
    bits. Where the file is lost the run goes on with new draws, which changes its bits
    and nothing else.

    Args:
        job: The job as this site reads it.
        policy: The site's rules; `draws = "job"` makes no secret.
        state: The folder of the run's state at this site.

    Returns:
        The draws, or None where they follow from the job's seed.

    Raises:
        PolicyRefusal: The method's sites take no draws, so they would draw by the job's
            seed.
    """
    if policy.draws == "job":
        return None
    policy.require(
        takes(job.module.Site, "draws"),
        "draws",
        f"sites of the method {job.method} take no `draws`, so their batches and dropout would "
        "follow from the job's seed, which everybody knows",
        "draws that are its own secret",
    )
    return Draws.of_secret(kept_secret(state / DRAWS))


def takes(site: type[Any], option: str) -> bool:
    """Return whether the sites of a method can be given an option, by name or with all
    others."""
    parameters = signature(getattr(site, "made", site).__init__).parameters.values()
    return any(p.name == option or p.kind is Parameter.VAR_KEYWORD for p in parameters)


def kept_secret(path: Path) -> bytes:
    """Return the secret of a run at a site: the same after a restart. A file that is
    not whole is made anew; noise of a new secret is spent anew."""
    kept = path.read_bytes() if path.is_file() else b""
    if len(kept) != KEY_BYTES:
        kept = secrets.token_bytes(KEY_BYTES)
        private_folder(path.parent)
        replace_file(path, kept)
    return kept


def _rules(kit: Path) -> Policy:
    """A site's policy as it is now; its refusals do not say where the site's kit lies."""
    return replace(of_kit(kit).policy, source=f"[policy] of {SITE_FILE}")


def _rules_in_run(kit: Path, count_step: int) -> Policy:
    """Return a site's policy as it is now, for a run that reports counts in steps.

    Args:
        kit: The site's kit.
        count_step: The step that the site joined the run with.

    Raises:
        PolicyRefusal: The policy asks for larger steps by now, which take a start of
            the site.
    """
    policy = _rules(kit)
    policy.require(
        count_step % policy.count_step == 0,
        "count_step",
        f"the site has joined this run with counts in multiples of {count_step:,}",
        f"multiples of {policy.count_step:,}, which it sends once it is started again",
    )
    return policy


def _scores(kit: Path, made: Any) -> Tensors:
    """The site's own scores, where its policy lets them go. Raises RefusedError."""
    policy = _rules(kit)
    if not policy.share_scores:
        raise PolicyRefusal(
            "share_scores",
            f"this site's scores stay here; only the site can change this: share_scores in "
            f"{policy.source}",
        )
    policy.require(
        policy.count_step == 1,
        "count_step",
        "the server asks for this site's own scores, which follow from exact counts",
        f"multiples of {policy.count_step:,} to leave",
    )
    scores = getattr(made.site, "scores", None)
    if not scores:
        raise RefusedError(f"site {made.id!r} has no scores yet")
    return {"scores": packed(scores)}


class AgreedSite:
    """A site that has a method's tasks once all have agreed.

    sites: all of the job's, in its order. make: builds the method's site of its
        configuration.
    own: what it said of itself. results: the folder that its own scores are written to.
    lay: puts a card beside its model.
    """

    def __init__(
        self,
        id: str,
        job: Job,
        sites: tuple[str, ...],
        own: Description,
        make: Callable[[Any], MethodSite],
        results: Path,
        lay: Callable[[], None],
    ) -> None:
        self.id, self._job, self._own, self._make = id, job, own, make
        self._sites, self._results, self._lay = sites, results, lay
        self.tasks: frozenset[str] = frozenset({AGREE}) | job.module.Site.tasks
        self._text = ""
        self.site: Any = None

    def agree(self, tensors: Tensors, *, descriptions: str, agreed: str) -> Update:
        """Take all the sites' descriptions, and become a site of the method.

        Raises RefusedError where this side makes something else of them than the
            server.
        """
        self._become(descriptions, agreed)
        return Update(metrics={"agreed": 1.0})

    def _become(self, text: str, agreed: str) -> None:
        all_sites = from_text(text)
        # how many there are bounds a part of a batch
        if tuple(all_sites) != self._sites:
            raise RefusedError(
                f"site {self.id!r} is told of {len(all_sites)} sites that agree; the approved job "
                f"is of {', '.join(self._sites)}, in this order"
            )
        theirs = all_sites[self.id]
        if theirs != self._own:
            labels = mismatch(
                self.id, self._own, theirs, ("this site", "the agreement")
            )
            raise RefusedError(
                labels
                or f"site {self.id!r} was described with another dictionary, encoder or version "
                "than it has now"
            )
        if agreement_of(self._job, all_sites) != agreed:
            raise RefusedError(
                f"site {self.id!r} makes another configuration of this job than the server: "
                "start both from the same job and the same version of fednotes"
            )
        self.site = self._make(agreed_config(self._job, all_sites))
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("tasks", ()):
            raise AttributeError(name)
        if self.site is None:
            raise TrainingError(f"site {self.id!r} has not agreed with the others yet")
        return getattr(self.site, name)

    def finish(self, tensors: Tensors, **options: Option) -> Update:
        """The method's own; the site's scores are then in its own folder."""
        update: Update = self.__getattr__("finish")(tensors, **options)
        if self.site.scores:
            write_json(self._results / SCORES_FILE, self.site.scores)
        if promise := getattr(self.site, "promise", None):
            logger.info("%s", promise)
            write_json(
                self._results / PROMISED, {"promise": str(promise), **promise.told()}
            )
        self._lay()
        return update

    def covered(self, task: str) -> Mapping[str, int]:
        """Tokens, steps and patients behind an update of this task, as far as known."""
        return {} if self.site is None else self.site.covered(task)

    def subject(self, task: str) -> str:
        """Return a digest of the model that an update of this task is about, or ""."""
        if self.site is None:
            return ""
        subject: str = self.site.subject(task)
        return subject

    def state(self) -> State:
        """The agreement, and what the method's site keeps."""
        kept: State = self.site.state() if self.site is not None else State(0)
        facts = {"descriptions": self._text, "own": dict(kept.facts)}
        return State(kept.round, kept.tensors, facts)

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        if text := state.facts["descriptions"]:
            self._become(text, agreement_of(self._job, from_text(text)))
            self.site.restore(State(state.round, state.tensors, state.facts["own"]))


# ---- words that may leave ------------------------------------------------------------


def outward(error: Exception, site: str) -> str:
    """One line for an error, as it may leave the site."""
    if isinstance(error, _OPEN) or not isinstance(error, FednotesError):
        return explained(error, site)
    about = next(words for kind, words in _ABOUT if isinstance(error, kind))
    cause = error.__cause__
    disk = (
        f"{cause.strerror}; " if isinstance(cause, OSError) and cause.strerror else ""
    )
    return f"site {site!r}: {about} ({disk}see the site's log)"


@contextmanager
def discreet(site: str) -> Iterator[None]:
    """An error keeps its kind, and says no more than `outward`; the whole goes to the
    log."""
    try:
        yield
    except FednotesError as error:
        told = outward(error, site)
        if told == str(error):
            raise
        logger.error("%s", error)
        kind = RefusedError if isinstance(error, RefusedError) else type(error)
        raise kind(told) from error
