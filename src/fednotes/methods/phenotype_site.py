"""The site side of two-stage phenotyping: the tasks, and what a restart must not lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.tensors import load_into, taken
from fednotes.core.update import Tensors, Update
from fednotes.data.codes import category_counts, count_vector
from fednotes.data.cohort import Bags
from fednotes.data.patient_sites import SitePatients
from fednotes.federation import State
from fednotes.methods.averaging_site import AveragingSite
from fednotes.methods.phenotype_config import Config
from fednotes.methods.phenotype_stages import (
    Classifiers,
    CodeLearner,
    coded,
    labelled,
    shared_network,
)
from fednotes.models.dan import KNOWN
from fednotes.models.phenotyper import Phenotyper, Representation, network_settings
from fednotes.models.svm import CLASSES, LinearSVMs
from fednotes.models.tfidf import document_frequencies


class Site:
    """One hospital: its patients, and the tasks that the server may ask for.

    directory: where the finished model is written; None writes nothing.

    Raises ConfigError where an update of the concepts' vectors would cover too few patients.
    """

    tasks = AveragingSite.tasks | {
        *("count_codes", "count_concepts", "first_vectors", "begin_codes"),
        *("count_labels", "prepare", "calibrate"),
    }

    def __init__(
        self,
        data: SitePatients,
        config: Config,
        *,
        directory: Path | None = None,
        device: str = "cpu",
        cache: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.data, self.config, self.directory, self._device = data, config, directory, device
        self._codes: CodeLearner | None = None
        self._classifiers: Classifiers | None = None
        self._network: Tensors = {}  # the representation, once it is fixed
        self._steps = np.zeros(0, np.int64)  # of each machine, from before a restart
        number = len(coded(data.train, data)) if config.learns else 0
        self.num_examples = max(number, len(labelled(data.train)) if config.phenotypes else 0)
        self._require_covered(number)
        self.scores: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self.data.id

    def described(self) -> str:
        """What is shared."""
        sent = sum(value.numel() for value in self._network.values())
        machines = self._classifiers.machines.weight.size if self._classifiers else 0
        return f"{sent:,} numbers of the representation and {machines:,} of the classifiers"

    def covered(self, task: str) -> dict[str, int]:
        """Patients behind an update of this task, and local steps of stage 1; a site's policy
        asks."""
        if self._classifiers is not None or task in ("count_labels", "prepare"):
            return {"patients": len(labelled(self.data.train))}
        if self._codes is None:
            return {"patients": len(coded(self.data.train, self.data))}
        return {**self._codes.covered(task), "patients": self._codes.patients}

    def _require_covered(self, coded_patients: int) -> None:
        """Raises ConfigError where few patients are behind numbers that tell concepts."""
        config, least = self.config, self.config.min_patients
        known = len(labelled(self.data.train)) if config.phenotypes else 0
        told = [(coded_patients, "concept vectors", "coded")] if config.learns else []
        if config.model.representation == "none" and not config.space.dense:
            told = [(known, "a weight for each concept", "labelled")]
        for number, what, kind in told:
            if 0 < number < least:
                raise ConfigError(
                    f"site {self.id!r}: an update of {what} tells which concepts its {number} "
                    f"{kind} training patients have; min_patients = {least} is asked: more "
                    "patients, or a smaller min_patients if they are public"
                )

    # stage 1

    def count_codes(self, tensors: Tensors) -> Update:
        """Patients of each category of codes, over the public list of categories."""
        cohort = coded(self.data.train, self.data)
        own = {patient: self.data.codes[patient] for patient in cohort.patients}
        counts = category_counts(own, self.config.whole_causes)
        vector, _ = count_vector(counts, self.config.candidates)
        return Update({"patients": torch.from_numpy(vector.astype(np.float64))}, 1.0)

    def count_concepts(self, tensors: Tensors) -> Update:
        """How often each of the dictionary's concepts occurs in the training patients' notes."""
        bags = self.data.train.bags
        assert isinstance(bags, Bags)  # the server asks for no others
        counts = np.bincount(bags.concepts, minlength=bags.vocabulary)
        return Update({"occurrences": torch.from_numpy(counts.astype(np.float64))}, 1.0)

    def first_vectors(self, tensors: Tensors) -> Update:
        """The public vectors where stage 1 starts, which tell nothing of this site."""
        vectors, width = self.data.vectors, self.config.model.network.embedding
        if vectors is None or vectors.values.shape[1] != width:
            own = "none" if vectors is None else f"vectors of {vectors.values.shape[1]} numbers"
            raise ConfigError(
                f"site {self.id!r}: [concepts] vectors: {own} for model.network.embedding = {width}"
            )
        table = vectors.start(self._known_concepts(tensors))
        return Update({"embedding": torch.from_numpy(table)}, 1.0)

    def _known_concepts(self, tensors: Tensors) -> np.ndarray:
        """The concepts that have a vector of their own. Raises RefusedError for impossible ones."""
        given = tensors.get(KNOWN, torch.zeros(0))
        fits = given.dtype == torch.int64 and given.dim() == 1
        known = given.numpy() if fits else np.zeros(0, np.int64)
        within = len(known) and 0 <= known[0] <= known[-1] < self.data.space.width
        if not within or (np.diff(known) <= 0).any():
            raise RefusedError(
                f"site {self.id!r}: the concepts to know are not places in the dictionary's "
                f"list of {self.data.space.width:,}, each at most once and in order"
            )
        return known.copy()  # in one process the tensor is the server's

    def begin_codes(self, tensors: Tensors) -> Update:
        """The outputs are agreed, indices into the public list, and which concepts are known."""
        candidates = self.config.candidates
        given = tensors.get("chosen")
        chosen = given.tolist() if given is not None and given.dim() == 1 else [-1]
        if len(set(chosen) & set(range(len(candidates)))) < len(chosen):
            raise RefusedError(
                f"site {self.id!r}: the codes to predict are not places in the job's list of "
                f"{len(candidates)}, each at most once"
            )
        outputs = [candidates[at] for at in chosen]
        known = self._known_concepts(tensors) if KNOWN in tensors else None
        self._learn_codes(outputs, known)
        return Update()

    def _learn_codes(self, outputs: Sequence[str], known: np.ndarray | None) -> None:
        """Raises ConfigError where too few patients are left."""
        self._codes = CodeLearner(self.data, self.config, outputs, known, self._device)
        self._require_covered(self._codes.patients)

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """Local epochs of the stage that runs."""
        return self._now().train(tensors, cycle=cycle)

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Held-out counts of the stage that runs."""
        return self._now().evaluate(tensors, cycle=cycle)

    def send(self, tensors: Tensors) -> Update:
        """Stage 1's change in an agreed code."""
        return self._learner().send(tensors)

    def keep(self, tensors: Tensors) -> Update:
        """The cycle of stage 1 that was just judged is the one to keep."""
        return self._learner().keep(tensors)

    def finish(self, tensors: Tensors) -> Update:
        """The end of a stage: judge on the test patients; write the model after the last."""
        if self._classifiers is not None:
            self._classifiers.finish(tensors)
            self._save(self._classifiers.model)
        else:
            learner = self._learner()
            learner.finish(tensors)
            self._network = learner.told
            representation = Representation(learner.network)
            self._save(Phenotyper(self.data.space, representation, code_names=learner.outputs))
        self.scores = self.scores_on(self.data)
        return Update()

    def scores_on(self, site: SitePatients) -> dict[str, Any]:
        """The finished model on the test patients of a site."""
        codes = self._codes.scores_on(site) if self._codes is not None else {}
        return codes | (self._classifiers.scores_on(site) if self._classifiers else {})

    # stage 2

    def count_labels(self, tensors: Tensors) -> Update:
        """Labelled training patients of each class; how many have each concept."""
        cohort = labelled(self.data.train)
        counts = cohort.label_counts()
        sums = {n: torch.from_numpy(counts[n].astype(np.float64)) for n in counts}
        del sums["unlabelled"]
        if self.config.model.representation == "none" and isinstance(cohort.bags, Bags):
            frequencies = document_frequencies(cohort.bags).astype(np.float64)
            sums["frequencies"] = torch.from_numpy(frequencies)
        return Update(sums, 1.0, {"patients": float(len(cohort))})

    def prepare(self, tensors: Tensors) -> Update:
        """The representation is fixed and the classes are agreed: compute the features."""
        given = {n.removeprefix("network."): v for n, v in tensors.items() if n[:8] == "network."}
        self._network = given or self._network
        representation = self._representation(tensors)
        agreed = taken(tensors, "classes", torch.float32, len(self.config.phenotypes), len(CLASSES))
        code_names = () if self._codes is None else self._codes.outputs
        classes = [[c for c in CLASSES if row[c]] for row in agreed.to(torch.bool).tolist()]
        width = representation.width(self.data.space)
        machines = LinearSVMs(classes, width, self.config.model.classifier)
        if len(self._steps) == len(machines.steps):
            machines.steps[:] = self._steps
        weights = None
        if "weights" in tensors:
            weights = taken(tensors, "weights", torch.float64, len(machines.machines), 2).numpy()
        self._classifiers = Classifiers(
            self.data, self.config, representation, machines, weights, code_names
        )
        return Update()

    def calibrate(self, tensors: Tensors) -> Update:
        """Sums of Platt scaling over held-out patients."""
        if self._classifiers is None:
            raise TrainingError(f"site {self.id!r} has no classifiers to calibrate yet")
        return self._classifiers.calibrate(tensors)

    def _representation(self, tensors: Tensors) -> Representation:
        config, space = self.config.model, self.data.space
        if self._network:
            settings, outputs, known = network_settings(self._network, config.network, space)
            network = shared_network(settings, space, outputs, known, self._device)
            load_into(network.state(), self._network)
            return Representation(network, scale=config.scale)
        if "idf" not in tensors:
            return Representation()
        return Representation(idf=taken(tensors, "idf", torch.float64, space.width).numpy())

    def _now(self) -> CodeLearner | Classifiers:
        return self._learner() if self._classifiers is None else self._classifiers

    def _learner(self) -> CodeLearner:
        if self._codes is None:
            raise TrainingError(f"site {self.id!r} was not told which codes to predict")
        return self._codes

    def _save(self, model: Phenotyper) -> None:
        if self.directory is not None:
            model.save(self.directory / "model")

    # what a restart must not lose

    def state(self) -> State:
        """Stage 1's moments and outputs, or the steps of stage 2's machines."""
        facts: dict[str, Any] = {}
        if self._codes is not None:
            facts["outputs"] = list(self._codes.outputs)
        if self._classifiers is not None:
            steps = {"steps": torch.from_numpy(self._classifiers.machines.steps)}
            return State(0, {**steps, **self._known_now()}, facts)
        if self._codes is None:
            return State(0, {}, facts)
        kept = self._codes.state()
        return State(kept.round, {**kept.tensors, **self._known_now()}, {**kept.facts, **facts})

    def _known_now(self) -> Tensors:
        return {} if self._codes is None else self._codes.known

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        self._classifiers = None
        if "outputs" in state.facts:
            known = state.tensors[KNOWN].numpy() if KNOWN in state.tensors else None
            self._learn_codes(state.facts["outputs"], known)
        if "steps" in state.tensors:
            self._steps = state.tensors["steps"].numpy()
        elif self._codes is not None:
            self._codes.restore(state)


def require_trainable(data: SitePatients, config: Config) -> None:
    """Raises ConfigError for a site that cannot be trained by itself."""
    lacks = []
    if config.learns and not len(coded(data.train, data)):
        lacks.append("no training patient with billing codes")
    elif config.learns and config.keep_cycle < 0 and not len(coded(data.valid, data)):
        lacks.append("no held-out patient with billing codes, by whom keep_cycle = -1 is chosen")
    if config.phenotypes and not len(labelled(data.train)):
        lacks.append("no training patient labelled for a phenotype")
    if lacks:
        raise ConfigError(
            f"site {data.id!r} has {' and '.join(lacks)}, so it cannot learn alone: leave 'alone' "
            "out of conditions"
        )
