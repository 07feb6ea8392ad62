"""Train shadow models and let them score what they may remember.

Each model is trained only at the audited site, with the job's own method, settings and
privacy budget, on a random half of the site's units and on its own secrets. No other
site's notes dilute what it remembers; a federated model usually knows less about a
single site.

The control is a model that does remember: it is trained without noise on few units,
each repeated several times.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fednotes.apps.audit.scene import Scene, remove_noise_layer, require_gradients
from fednotes.apps.audit.shadow.mentions import AnnotatedNotes
from fednotes.apps.audit.shadow.notes import PlainNotes
from fednotes.apps.audit.shadow.secrets import (
    Planted,
    Secret,
    SecretKind,
    draw_secrets,
)
from fednotes.apps.audit.shadow.subject import Subject, convert_to_log_odds
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import rng_of
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job import Job
from fednotes.jobs.parts import Part, make_method_sites

MODELS = 8  # for the job, and as many for its control; twice as many for patients
UNITS = 200  # number of units whose membership is judged
CONTROL_UNITS = 24  # the same for the control
CONTROL_REPEATS = 5  # number of copies of each of them


@dataclass(frozen=True, eq=False)
class ShadowScores:
    """Scores of shadow models for units and secrets that they may be trained on.

    Attributes:
        is_member: (units, models) whether each unit was in each model's training data.
        units: By criterion, (units, models) scores: log p / (1 − p) for notes, log p
            for patients, nan if nothing is known about a patient.
        secrets: By kind and number of copies, for each secret of each model (guesses,)
            log-odds, the true value first.
    """

    is_member: np.ndarray
    units: dict[str, np.ndarray] = field(default_factory=dict)
    secrets: dict[tuple[SecretKind, int], list[np.ndarray]] = field(
        default_factory=dict
    )

    @property
    def num_models(self) -> int:
        """Number of models."""
        return int(self.is_member.shape[1])


@lru_cache(maxsize=4)
def train_shadow_models(scene: Scene, control_of: str = "") -> ShadowScores:
    """Train shadow models for a job, and return their scores.

    The results are cached by argument.

    Args:
        scene: The job, or its control.
        control_of: For the control on patients, the criterion of membership: "codes" or
            "labels".

    Raises:
        FednotesError: The site has too few units, training fails, or sites send
            predictions in place of parameters.
    """
    if scene.job.module.reads_public_notes:
        raise ConfigError(
            "no parameter leaves a site, and the audit has no attack on predictions yet"
        )
    copies = CONTROL_REPEATS if scene.is_control else 1
    rng = rng_of(scene.job.seed, "audit", scene.site)
    subject, job = _make_subject(scene, rng, control_of)
    models = 2 * MODELS if scene.has_patients else MODELS
    if len(subject.judged_units) < models:
        units = "patients" if scene.has_patients else "notes"
        raise DataError(
            f"site {scene.site!r} has {len(subject.judged_units)} {units}, and an "
            f"audit of membership needs {models} or more: audit a site with "
            "more of them"
        )

    # Memberships are drawn independently: with a fixed number of members, one could be
    # inferred from the others.
    is_member = rng.random((len(subject.judged_units), models)) < 0.5
    scores = ShadowScores(is_member)
    with TemporaryDirectory() as cache:
        for model in range(models):
            secrets = list(draw_secrets(rng, subject.kinds, subject.num_carriers))
            data = subject.make_training_data(
                is_member[:, model],
                _list_planted(secrets, copies),
                copies=copies,
                # The control trains on few units, and so remembers each of them.
                with_others=not scene.is_control,
            )
            # Anyone who knows a job on patients knows its seed, so all its models share
            # the seed.
            seed = job.seed if scene.has_patients else job.seed + model
            site = _train_alone(scene, job, data, seed=seed, cache=Path(cache))
            _add_scores(scores, subject, site, secrets, model)
    return scores


def _make_subject(
    scene: Scene, rng: np.random.Generator, control_of: str
) -> tuple[Subject, Job]:
    """Return the audited site's data in units, and the job of the models."""
    job = scene.job
    data = next(each for each in scene.sites.data if each.id == scene.site)
    max_units = CONTROL_UNITS if scene.is_control else UNITS
    if job.kind.make_audit_subject is not None:
        return job.kind.make_audit_subject(scene, data, rng, max_units, control_of)
    if job.data == "notes":
        return PlainNotes(data, rng, max_units), job
    unit = "document" if len(data.train) >= CONTROL_UNITS else "sentence"
    if job.privacy:
        unit = job.privacy.unit
    return AnnotatedNotes(data, rng, max_units, unit), job


def _list_planted(secrets: list[Secret], copies: int) -> list[Planted]:
    """Return each secret with each text that carries it.

    Args:
        secrets: The secrets of one model.
        copies: How often the carrier of a secret that is planted once is repeated.
    """
    planted = []
    for secret in secrets:
        repeats = copies if secret.times == 1 else 1
        planted += [(secret, carrier) for carrier in secret.carriers * repeats]
    return planted


def _train_alone(scene: Scene, job: Job, data: Any, *, seed: int, cache: Path) -> Any:
    """Train a site alone on `data`.

    Returns:
        The method's site without its DP wrapper.
    """
    settings: Any = replace(job.config, seed=seed)  # type: ignore[type-var]
    configured = job.module.configure(settings, (data,))
    (config,) = job.module.configure_alone(configured, (data,))
    part = Part("alone", (data,), config, scene.site)
    site: Any = make_method_sites(job, part, folders=[None], cache=cache)[0]
    job.module.train(InProcess([site]), config)
    require_gradients(site)
    return remove_noise_layer(site)


@torch.no_grad()
def _add_scores(
    scores: ShadowScores, subject: Subject, site: Any, secrets: list[Secret], model: int
) -> None:
    """Add one model's scores for all units and its own secrets."""
    for criterion, column in subject.score_units(site).items():
        table = scores.units.setdefault(criterion, np.zeros(scores.is_member.shape))
        table[:, model] = column
    for secret in secrets:
        guesses = convert_to_log_odds(subject.measure_guess_losses(site, secret))
        scores.secrets.setdefault((secret.kind, secret.times), []).append(guesses)
