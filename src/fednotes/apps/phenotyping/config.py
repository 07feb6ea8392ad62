"""The settings of phenotyping, and their effect on a run."""

from __future__ import annotations

import tomllib
from dataclasses import field
from importlib.resources import files
from typing import Any, Final, Literal

from fednotes.apps.phenotyping.codes import list_job_categories, list_public_categories
from fednotes.apps.phenotyping.cohort import FeatureSpace
from fednotes.apps.phenotyping.phenotyper import ATTENTION, PhenotypeConfig
from fednotes.core.errors import ConfigError
from fednotes.core.numbers import (
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from fednotes.core.settings import FilledIn, checked
from fednotes.methods.averaging import Averaging
from fednotes.privacy.promise import Privacy

_PRESET_FILE = files("fednotes.apps.phenotyping").joinpath("phenotype.toml")
PRESETS: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    _PRESET_FILE.read_text("utf-8")
)


@checked(frozen=True)
class Config(Averaging):
    """Settings of phenotyping.

    Cycles, batches and learning rates are those of stage 1, or of the encoder that is
    tuned with representation = "attention".

    Attributes:
        classifier_cycles: T', the number of cycles of stage 2.
        classifier_epochs: Number of epochs of every classifier at each site in a cycle
            of stage 2.
        systems: Coding systems whose categories are candidates for the outputs of stage
            1.
        outputs: Categories of codes that stage 1 predicts, instead of `systems` and
            `minimum`. It is required for OMOP concepts, which have no public list of
            categories.
        minimum: Minimum number of patients, over all sites, who must have a code of a
            category for it to become an output of stage 1.
        whole_causes: Whether categories of ICD-9 external causes have four characters,
            as in the code book, instead of three (`apps/phenotyping/codes.py`).
        least_questionable: Minimum number of patients, over all sites, who must have
            the label "questionable" for a disease, so that it becomes a class of this
            disease.
        calibrate: Whether probabilities are calibrated on held-out patients (Platt
            scaling, computed from sums over the sites).
        least_occurrences: Minimum number of occurrences in the training notes of all
            sites for a concept to get its own vector; all rarer concepts share one. 0
            gives every concept of the dictionary its own vector. Under [privacy],
            patients who have the concept are counted instead, with noise.
        require_output: Whether patients who have none of the categories that stage 1
            predicts are left out of it.
        optimizer: Optimizer of stage 1 at the sites; "rmsprop" is that of Keras and
            needs model.network.updates = "dense".
        min_patients: Minimum number of patients behind an update of the concepts'
            vectors, or of classifiers that use the concepts themselves as features.
            Such an update reveals which concepts the patients have, so a site refuses
            to send one that is based on fewer patients. Lower it only for public notes.
        model: The model's settings.
        space, phenotypes: What the sites hold. A job fills them in.
        questionable: Phenotypes for which the sites together make "questionable" a
            class, as far as that is known before training. A job fills it in.
        vectors: Whether the sites have public vectors of concepts, from which stage 1
            starts. A job fills it in.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    cycles: PositiveInt = 10
    batch_size: PositiveInt = 50
    learning_rate: PositiveFloat = 1e-3
    warmup: FractionBelowOne = 0.0
    decay: Literal["linear", "constant"] = "constant"
    weight_decay: NonNegativeFloat = 0.0
    clip: NonNegativeFloat = 0.0
    classifier_cycles: PositiveInt = 20
    classifier_epochs: PositiveInt = 1
    systems: tuple[str, ...] = ("icd9", "icd9proc", "cpt")
    outputs: tuple[str, ...] = ()
    minimum: PositiveInt = 1001
    whole_causes: bool = False
    least_questionable: NonNegativeInt = 20
    calibrate: bool = False
    least_occurrences: NonNegativeInt = 0
    require_output: bool = False
    optimizer: Literal["adam", "rmsprop"] = "adam"
    min_patients: NonNegativeInt = 50
    model: FilledIn[PhenotypeConfig] = field(default_factory=PhenotypeConfig)
    space: FilledIn[FeatureSpace] = field(default_factory=lambda: FeatureSpace(0))
    phenotypes: FilledIn[tuple[str, ...]] = ()
    questionable: FilledIn[tuple[str, ...]] = ()
    vectors: FilledIn[bool] = False
    privacy: FilledIn[Privacy | None] = None
    min_sites: FilledIn[int] = 0

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: No run can have these settings.
        """
        super().__post_init__()
        if self.privacy is not None:
            self._check_privacy(self.privacy)
        self._check_updates()
        self.list_candidates()  # raises ConfigError for unknown codes or systems

    def _check_privacy(self, privacy: Privacy) -> None:
        """Check the requirements of training with differential privacy.

        Raises:
            ConfigError: Differential privacy does not support a setting.
        """
        if privacy.unit != "patient":
            raise ConfigError(
                f'[privacy] unit = "{privacy.unit}": phenotyping protects patients, '
                'whose notes are one example: set unit = "patient"'
            )

        if self.has_attention:
            raise ConfigError(
                '[privacy] does not support representation = "attention", because the '
                "server does not have the encoder from which the first parameters "
                'follow: set model.representation = "learn" or "none"'
            )
        classifier = self.model.classifier
        has_given_representation = self.model.representation not in ("learn", "none")
        trains_to_convergence = classifier.solver != "sgd"
        if (
            trains_to_convergence
            or has_given_representation
            or (self.has_stage_1 and self._needs_unknown_vector)
        ):
            raise ConfigError(
                "[privacy] supports neither a representation from elsewhere nor "
                'training to convergence: set model.representation = "learn" or '
                '"none", model.classifier.solver = "sgd" and model.network.length = 0, '
                "and leave out [concepts] vectors"
            )

        counts_codes_or_concepts = self.has_stage_1 and (
            self.least_occurrences > 0 or not self.outputs
        )
        counts_labels = classifier.class_weights != "none"
        if (counts_codes_or_concepts or counts_labels) and not privacy.counts:
            raise ConfigError(
                "[privacy]: exact counts of patients would reveal which codes are "
                "predicted, which concepts have a vector and what a class weighs: set "
                "privacy.counts, which adds noise to the counts; or give "
                "training.outputs, the categories of codes, and set "
                "training.least_occurrences = 0 and "
                'model.classifier.class_weights = "none"'
            )

    def _check_updates(self) -> None:
        """Check the optimizer's settings, and those of the concepts' vectors.

        Raises:
            ConfigError: Two settings contradict each other.
        """
        if self.has_attention:
            return  # it has no vectors of concepts
        network = self.model.network
        steps_over_rows = network.updates == "rows"
        if steps_over_rows and (self.proximal or self.weight_decay):
            raise ConfigError(
                "proximal and weight_decay change the vectors of all concepts in "
                'each step: set model.network.updates = "dense", which updates '
                "the whole table"
            )
        if self.optimizer == "rmsprop" and (self.weight_decay or steps_over_rows):
            raise ConfigError(
                'optimizer = "rmsprop" has no weight_decay and updates the whole '
                'table: set weight_decay = 0 and model.network.updates = "dense"'
            )
        if self._needs_unknown_vector and not self.least_occurrences:
            raise ConfigError(
                "network.length and [concepts] vectors need a vector for unknown "
                "concepts: set training.least_occurrences to 1 or more"
            )

    @property
    def _needs_unknown_vector(self) -> bool:
        """Whether the network has a vector for concepts without one of their own."""
        return bool(self.model.network.length) or self.vectors

    @property
    def has_attention(self) -> bool:
        """Whether an encoder is tuned, instead of both stages."""
        return self.model.representation == ATTENTION

    @property
    def has_stage_1(self) -> bool:
        """Whether stage 1 trains a network."""
        return self.model.representation == "learn"

    @property
    def has_stage_2(self) -> bool:
        """Whether stage 2 runs; True while the sites' data are not known."""
        if self.has_attention:
            return False
        return bool(self.phenotypes) or not self.space.width

    @property
    def learns_codes(self) -> bool:
        """Whether a network learns codes: that of stage 1, or attention to codes."""
        return self.has_stage_1 or (self.has_attention and not self.phenotypes)

    @property
    def network_cycles(self) -> int:
        """The number of cycles of stage 1, or of the tuned encoder."""
        return self.last_cycle if self.has_stage_1 or self.has_attention else 0

    def list_candidates(self) -> tuple[str, ...]:
        """Return the categories of codes that may become outputs; they are public.

        Raises:
            ConfigError: A code or a coding system is unknown.
        """
        if self.outputs:
            return list_job_categories(self.outputs, whole_causes=self.whole_causes)
        return list_public_categories(self.systems, whole_causes=self.whole_causes)
