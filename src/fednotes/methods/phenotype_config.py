"""Settings of two-stage phenotyping, and those of the papers.

The preset "paper" is the program of Dligach and Miller (2018), "Learning patient representations
from text", which Liu, Dligach and Miller (2019) adapted, since their own paper gives no sizes and
rates. docs/papers.md says where each value stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fednotes.core.errors import ConfigError
from fednotes.data.codes import categories_of_job, public_categories
from fednotes.data.patient_sites import FeatureSpace
from fednotes.methods.averaging import Averaging
from fednotes.models.phenotyper import PhenotypeConfig


@dataclass(frozen=True)
class Config(Averaging):
    """Settings of both stages; those of `Averaging` are stage 1's.

    classifier_cycles: T'; in each, `classifier_epochs` epochs of every classifier at each site.
    systems: of the billing codes; or outputs: these categories of codes and no others, for
        concepts that have no public list. minimum: patients with a category of codes over all
        sites that make it an output. whole_causes: see `data/codes.py`.
    least_questionable: patients over all sites that make "questionable" a class of a disease.
    calibrate: fit probabilities to held-out patients (Platt scaling, by sums alone).
    least_occurrences: of a concept in the training patients' notes at all sites together, that give
        it a vector of its own; all others share one. 0: each of the dictionary has its own.
    require_output: leave out patients of stage 1 who have none of its outputs.
    optimizer: of stage 1 at the sites; "rmsprop" is Keras' and wants dense updates.
    min_patients: the least that a site's update of the concepts' vectors, or of classifiers of
        the concepts themselves, may cover, for it tells which concepts its patients have.
    space, phenotypes: what the sites hold. questionable: the phenotypes for which the sites
        together make "questionable" a class, as far as that is known before training. vectors:
        whether they have public ones of concepts, where stage 1 starts.
    """

    cycles: int = 10
    batch_size: int = 50
    learning_rate: float = 1e-3
    warmup: float = 0.0
    decay: Any = "constant"
    weight_decay: float = 0.0
    clip: float = 0.0
    classifier_cycles: int = 20
    classifier_epochs: int = 1
    systems: tuple[str, ...] = ("icd9", "icd9proc", "cpt")
    outputs: tuple[str, ...] = ()
    minimum: int = 1001
    whole_causes: bool = False
    least_questionable: int = 20
    calibrate: bool = False
    least_occurrences: int = 0
    require_output: bool = False
    optimizer: Literal["adam", "rmsprop"] = "adam"
    min_patients: int = 50
    model: PhenotypeConfig = field(default_factory=PhenotypeConfig)
    space: FeatureSpace = field(default_factory=lambda: FeatureSpace(0))
    phenotypes: tuple[str, ...] = ()
    questionable: tuple[str, ...] = ()
    vectors: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no run can have."""
        super().__post_init__()
        for name in ("classifier_cycles", "classifier_epochs", "minimum"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        for name in ("least_questionable", "min_patients", "least_occurrences"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 0 is needed")
        if self.decay not in ("linear", "constant"):
            raise ConfigError(f"decay = {self.decay!r}: 'linear' or 'constant'")
        if self.model.network.updates == "rows" and (self.proximal or self.weight_decay):
            raise ConfigError(
                "proximal and weight_decay pull on every concept in each step: set "
                'model.network.updates = "dense", which steps over the whole table'
            )
        if self.optimizer == "rmsprop" and (
            self.weight_decay or self.model.network.updates == "rows"
        ):
            raise ConfigError(
                'optimizer = "rmsprop" has no weight_decay, and moves the whole table: set '
                'model.network.updates = "dense"'
            )
        if (self.model.network.length or self.vectors) and not self.least_occurrences:
            raise ConfigError(
                "network.length and [concepts] vectors want a vector for unknown concepts: set "
                "training.least_occurrences to 1 or more"
            )
        _ = self.candidates  # raises ConfigError for codes or systems that are none

    @property
    def learns(self) -> bool:
        """Whether there is a stage 1."""
        return self.model.representation == "learn"

    @property
    def candidates(self) -> tuple[str, ...]:
        """Categories of codes that may become outputs; public."""
        if self.outputs:
            return categories_of_job(self.outputs, self.whole_causes)
        return public_categories(self.systems, self.whole_causes)

    @property
    def stage_1(self) -> int:
        """Cycles of stage 1."""
        return self.last_cycle if self.learns else 0


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "concepts": {"context": "off", "most": 10_000},
        "training": {
            "systems": ["icd9", "icd9proc", "cpt"],
            "minimum": 1001,
            "whole_causes": False,
            "least_occurrences": 101,
            "require_output": True,
            "cycles": 75,
            "local_epochs": 1,
            "keep_cycle": 0,
            "batch_size": 50,
            "optimizer": "rmsprop",
            "learning_rate": 1e-3,
            "warmup": 0.0,
            "decay": "constant",
            "weight_decay": 0.0,
            "clip": 0.0,
            "server": "average",
            "classifier_cycles": 20,
            "classifier_epochs": 1,
            "least_questionable": 20,
            "calibrate": False,
            "min_patients": 0,
        },
        "model": {
            "scale": "none",
            "network": {
                "embedding": 300,
                "hidden": 1000,
                "dropout": 0.0,
                "mean": "concepts",
                "length": 1387,
                "layer": "linear",
                "updates": "dense",
            },
            "classifier": {
                "loss": "hinge",
                "learning_rate": "optimal",
                "alpha": 1e-4,
                "class_weights": "none",
                "solver": "sgd",
            },
        },
    },
    "best": {
        "training": {
            "cycles": 20,
            "local_epochs": 3,
            "keep_cycle": -1,
            "classifier_cycles": 60,
            "evaluate_every": 5,
            "calibrate": True,
        },
        "model": {
            "classifier": {"learning_rate": "invscaling", "eta0": 5.0, "class_weights": "balanced"}
        },
    },
}
