"""The target of an attack: a job, the sites' notes, and the audited site."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from fednotes.apps.audit.listening import (
    EnoughObserved,
    Observation,
    ObservingEngine,
    recording_batches,
)
from fednotes.core.errors import ConfigError, TrainingError
from fednotes.jobs.job import Job, Sites
from fednotes.jobs.parts import Part, make_method_sites
from fednotes.methods.averaging import Averaging
from fednotes.privacy.training import DPSite
from fednotes.training.word_rows import IDS


class Scene:
    """A job on notes, seen from one of its sites.

    Attributes:
        job: The job.
        sites: The data of its sites.
        site: Name of the audited site.
        is_control: Whether the job has no defences.
        training: The job's federated training: its sites' data and its final settings.
    """

    def __init__(
        self, job: Job, sites: Sites, site: str = "", *, is_control: bool = False
    ) -> None:
        """Choose the audited site; by default the first.

        Raises:
            ConfigError: The job has no such site.
        """
        names = [data.id for data in sites.data]
        self.site = site or names[0]
        if self.site not in names:
            raise ConfigError(
                f"there is no site {site!r}: the job's sites are {', '.join(names)}"
            )
        self.job = job
        self.sites = sites
        self.is_control = is_control
        config = job.module.configure(job.config, sites.data)
        self.training = Part("federated", sites.data, config, method=job.module)
        self._control: Scene | None = None
        self._method_sites: list[Any] | None = None
        self._observations: list[Observation] | None = None

    @property
    def has_patients(self) -> bool:
        """Whether the job is on patients, and not on notes."""
        return self.job.data == "patients"

    def make_undefended(
        self, model: Mapping[str, Any] | None = None, **settings: Any
    ) -> Scene:
        """Return the same notes in a job without secure sum, noise and compression.

        Args:
            model: Changes to the model's settings. Settings that it lacks are ignored.
            **settings: Changes to the method's settings, treated in the same way.
        """
        changes: dict[str, Any] = {
            "min_tokens": 0,
            "min_steps": 0,
            "min_patients": 0,
            "compression": "none",
            "aggregation": "mean",
            "privacy": None,
        }
        if self.job.privacy:
            # A job with noise does not count codes exactly; without noise, they are
            # counted, and rare ones stay.
            changes["minimum"] = 1
        changes.update(settings)
        config: Any = self.job.config
        changes["model"] = _replace_known_settings(config.model, model or {})
        federation = replace(self.job.federation, secure_sum=False, min_sites=0)
        job = replace(
            self.job,
            config=_replace_known_settings(config, changes),
            privacy=None,
            federation=federation,
        )
        return Scene(job, self.sites, self.site, is_control=True)

    def make_one_step(self) -> Scene:
        """Return the same notes in a job whose sites send the result of one step."""
        if isinstance(self.job.config, Averaging):
            # Any fraction of an epoch is at least one step.
            return self.make_undefended(local_epochs=sys.float_info.min)
        return self.make_undefended(exchange="gradients")

    def get_control(self) -> Scene:
        """Return the job without defences: the same scene each time; it trains once."""
        if self._control is None:
            self._control = self.make_undefended()
        return self._control

    def get_method_sites(self) -> list[Any]:
        """Return the method's sites, built at the first call; they write no files."""
        if self._method_sites is None:
            folders = [None] * len(self.training.sites)
            self._method_sites = make_method_sites(self.job, self.training, folders)
        return self._method_sites

    def get_audited_site(self) -> Any:
        """Return the audited site, without the layer that adds noise."""
        return remove_noise_layer(self._get_audited_method_site())

    def observe(self) -> list[Observation]:
        """Train the first rounds once; return the server's observations in order.

        Raises:
            FednotesError: The training fails.
        """
        if self._observations is None:
            self._observations = self._train()
        return self._observations

    def list_observed_trainings(self) -> list[Observation]:
        """Return the observations in which the audited site sent an update.

        Updates for which it trained on nothing do not count.
        """
        return [
            seen
            for seen in self.observe()
            if seen.tensors and not seen.records[0].is_empty()
        ]

    @torch.no_grad()
    def restore_observed_site(self, seen: Observation) -> Any:
        """Give the audited site the parameters that it computed with, and return it.

        The server sends either a whole tensor, or some rows of a table. The numbers of
        the rows are then a tensor too, whose name ends in `IDS`.
        """
        site = self.get_audited_site()
        received = seen.sent_to_site
        for name, parameter in site.model.trainable().items():
            value = received.get(name)
            if value is not None:
                rows = received.get(name + IDS, slice(None))
                parameter[rows] = value
        return site

    def _get_audited_method_site(self) -> Any:
        """Return the audited site, with the layer that adds noise, if there is one."""
        return next(site for site in self.get_method_sites() if site.id == self.site)

    def _train(self) -> list[Observation]:
        """Train the first rounds, and return what the server observes."""
        engine = ObservingEngine(
            self.get_method_sites(),
            audited=self.site,
            secure=self.job.federation.secure_sum,
            has_patients=self.has_patients,
        )
        models: dict[int, Any] = {}
        # Sites with patients know themselves what they were trained on.
        if not self.has_patients:
            for site in self.get_method_sites():
                model = remove_noise_layer(site).model
                models[id(model)] = model
        listening = recording_batches(models.values(), lambda: engine.record)
        with listening, suppress(EnoughObserved):
            self.job.module.train(engine, self.training.config)
        require_gradients(self._get_audited_method_site())
        return engine.observations


def remove_noise_layer(site: Any) -> Any:
    """Return the site that computes, without a wrapper that adds noise."""
    return site.site if isinstance(site, DPSite) else site


def require_gradients(site: Any) -> None:
    """Refuse a site whose updates are only noise, because attacks on it prove nothing.

    Raises:
        TrainingError: The gradients of all units of a round failed, so that only noise
            was sent.
    """
    if isinstance(site, DPSite) and site.noise_only_answers:
        raise TrainingError(
            f"site {site.id!r}: {site.noise_only_answers:,} sums were only noise "
            "because no gradient could be computed: try the job without [privacy] to "
            "see the error"
        )


def _replace_known_settings(config: Any, settings: Mapping[str, Any]) -> Any:
    """Return a config with new values of those settings that it has."""
    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    return replace(config, **known)
