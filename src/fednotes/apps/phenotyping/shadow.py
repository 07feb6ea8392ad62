"""The patients of a site as the subject of an audit.

An audit trains shadow models with and without some of the patients. It judges a patient
by how likely the patient's codes, or labels, are under a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np

from fednotes.apps.phenotyping.classifiers import C_CHOICES
from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT, SitePatients
from fednotes.jobs.job import Job

# With these settings the models of the control memorise their patients.
CONTROL_SETTINGS: Final[dict[str, Any]] = {
    "cycles": 10,
    "local_epochs": 20,
    "classifier_epochs": 50,
    "batch_size": 8,
    "learning_rate": 0.01,
    "weight_decay": 0.0,
    "proximal": 0.0,
    "keep_cycle": 0,
    "calibrate": False,
}


def make_audit_subject(
    scene: Any,
    data: SitePatients,
    rng: np.random.Generator,
    max_patients: int,
    control_of: str,
) -> tuple[Patients, Job]:
    """Return the subject of an audit, and the job of its shadow models.

    Args:
        scene: The audit's scene: the job, its sites and the audited site.
        data: The site's patients.
        rng: The generator that the choice of judged patients is drawn with.
        max_patients: The most patients to judge.
        control_of: What the control judges by: "codes" or "labels".
    """
    patients = Patients(scene, data, rng, max_patients, control_of=control_of)
    return patients, patients.job


class Patients:
    """A subject of an audit (`SiteKind.make_audit_subject`) whose units are patients.

    A patient can be judged if the site knows their codes or labels. No secrets are
    planted among patients.

    Args:
        scene: The audit's scene: the job, its sites and the audited site.
        data: The site's patients.
        rng: The generator that the choice of judged patients is drawn with.
        max_patients: The most patients to judge.
        control_of: What the control judges by: "codes" or "labels".

    Attributes:
        job: The job that the models are trained with.
        judged_units: (judged_units,) rows of the judged patients in the training data.
    """

    kinds: ClassVar[tuple[Any, ...]] = ()
    num_carriers = 0

    def __init__(
        self,
        scene: Any,
        data: SitePatients,
        rng: np.random.Generator,
        max_patients: int,
        *,
        control_of: str,
    ) -> None:
        self.job = _make_shadow_job(scene, control_of)
        learns_codes = scene.training.config.learns_codes
        has_codes = [patient in data.codes for patient in data.train.patients]
        has_labels = (data.train.labels >= 0).any(1)
        is_usable = has_labels | (np.array(has_codes, bool) & learns_codes)
        order = rng.permutation(np.flatnonzero(is_usable))
        if scene.is_control:
            # Patients with a disease come first, because healthy ones cannot be
            # distinguished by their labels.
            is_healthy = ~(data.train.labels[order] == PRESENT).any(1)
            order = order[np.argsort(is_healthy, kind="stable")]
        self.judged_units, self._others = np.split(order, [max_patients])
        self._data = data
        self._cohort = data.train.take(self.judged_units)

    def make_training_data(
        self,
        is_member: np.ndarray,
        planted: Sequence[Any],  # noqa: ARG002 - part of the interface of subjects
        *,
        copies: int,  # noqa: ARG002 - a patient occurs only once in a cohort
        with_others: bool,
    ) -> SitePatients:
        """Return the site with only the patients on which one model is trained.

        Args:
            is_member: (judged_units,) whether the model is trained on each patient.
            planted: Not used: there are no secrets.
            copies: Not used: each member is trained on once.
            with_others: Whether it is also trained on the patients who are not judged.
        """
        rows = self.judged_units[is_member]
        if with_others:
            rows = np.append(rows, self._others)
        train = self._data.train.take(np.sort(rows))
        return replace(self._data, train=train, test=self._data.test.take([]))

    def score_units(self, site: Any) -> dict[str, np.ndarray]:
        """Return (judged_units,) log-likelihoods of predicted codes and labels."""
        cohort = self._cohort
        scores: dict[str, np.ndarray] = {}
        learner = site.code_learner
        if learner is not None:
            labels = learner.make_labels(cohort, self._data)
            signs = (labels == PRESENT) * 1 - (labels == ABSENT)
            logits = learner.network.eval()(cohort.bags).numpy()
            criterion = "codes" if learner.config.learns_codes else "labels"
            scores[criterion] = _compute_log_likelihood(logits, signs)
        classifiers = site.classifiers
        if classifiers is not None:
            svms = classifiers.svms
            margins = svms.score(classifiers.model.compute_features(cohort.bags))
            scores["labels"] = _compute_log_likelihood(
                margins, svms.make_targets(cohort.labels)
            )
        return scores

    def measure_guess_losses(
        self,
        site: Any,  # noqa: ARG002 - part of the interface of subjects
        secret: Any,  # noqa: ARG002
    ) -> np.ndarray:
        """Raise TypeError, because no secret is planted among patients."""
        raise TypeError("patients have no secrets to guess")


def _make_shadow_job(scene: Any, control_of: str) -> Job:
    """Return the job for training shadow models.

    The control trains for many epochs on few patients, without a defence. If it judges
    by labels, its classifiers read the concepts themselves.
    """
    config = scene.training.config
    job: Job = scene.job
    settings: dict[str, Any] = {"least_occurrences": min(1, config.least_occurrences)}
    if config.learns_codes and scene.observe():
        # The codes that all sites have agreed on, which are public.
        settings["outputs"] = scene.get_audited_site().code_learner.outputs
        settings["minimum"] = 1
    if scene.is_control:
        model: dict[str, Any] = {
            "classifier": replace(config.model.classifier, C=C_CHOICES[-1]),
            "network": replace(config.model.network, dropout=0.0),
            "attention": replace(config.model.attention, dropout=0.0),
        }
        if control_of == "labels" and not config.has_attention:
            model["representation"] = "none"
        job = scene.make_undefended(model, **CONTROL_SETTINGS).job
    config = replace(job.config, **settings)  # type: ignore[type-var]
    return replace(job, config=config)


def _compute_log_likelihood(scores: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return (patients,) the log-likelihood of each patient's codes or labels.

    Args:
        scores: (patients, outputs) log-odds or margins.
        signs: (patients, outputs) 1 if the patient has it, −1 if not, 0 if unknown.

    Returns:
        (patients,) log p; nan for a patient without known outputs.
    """
    losses = np.logaddexp(0, -signs * scores) * np.abs(signs)
    return np.where(signs.any(1), -losses.sum(1), np.nan)
