"""The site side of two-stage phenotyping: the tasks that a server may ask for.

The tasks come in this order:

    count_codes, count_concepts     counts for choosing the outputs and known concepts
    begin_codes, first_vectors      stage 1 begins
    first_parameters                or the tuning of an encoder, instead of both stages
    train, evaluate, keep, finish   its cycles and its end
    count_labels                    counts for the classes and their weights
    prepare                         stage 2 begins
    train, evaluate                 its cycles; `prepare` again if a site has come back
    calibrate, finish               its end

What a site computes in each stage is in `stages.py`, and the server side of Algorithm 1
in `two_stage.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.apps.phenotyping.classifiers import (
    CLASSES,
    INTERCEPT,
    LinearSVMs,
    count_document_frequencies,
)
from fednotes.apps.phenotyping.codes import count_categories
from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    Bags,
    ConceptVectors,
    SitePatients,
)
from fednotes.apps.phenotyping.config import Config
from fednotes.apps.phenotyping.dan import CHOSEN, KNOWN, Dan
from fednotes.apps.phenotyping.phenotyper import Phenotyper, derive_network_shape
from fednotes.apps.phenotyping.stages import (
    Classifiers,
    CodeLearner,
    PhenotypeLearner,
    get_shared_network,
    make_empty_update,
    make_label_attention,
)
from fednotes.core.counts import round_array, round_count
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.federation import TRAIN, MethodSite, State
from fednotes.core.seeds import Draws
from fednotes.core.tensors import (
    add_prefix,
    copy_tensors,
    load_into,
    require_tensor,
    select_prefix,
)
from fednotes.core.update import Tensors, Update
from fednotes.methods.averaging import AveragingSite
from fednotes.metrics.platt import MOST_PLATT_SUMS

NETWORK: Final = "network."  # prefix of the names of the network's tensors
_PREPARED: Final = ("classes", "weights", "idf")  # other tensors of `prepare`


class Site(MethodSite):
    """One hospital: its patients, and the tasks that the server may ask for.

    Args:
        data: The patients of the site.
        config: The settings of the run.
        directory: Folder for the finished model; None writes none.
        device: A torch device.
        cache: Unused: nothing is worth caching.
        progress: Unused: no step takes long.
        draws: Random draws for orders and dropout; derived from the job's seed if None.
        count_step: Weights and counts leave the site as multiples of it.

    Attributes:
        code_learner: Stage 1; None until the codes to predict are agreed.
        classifiers: Stage 2; None until the classes are agreed.
        model, shared, private: For training with differential privacy: the network, the
            shared tensors, and the private ones (none).
        stage: For training with differential privacy: 0 in stage 1, 1 in stage 2.
        rows_by_stage: For training with differential privacy: (2, training patients)
            row of each training patient in the data of each stage, or -1.

    Raises:
        ConfigError: An update of the concepts' vectors would cover too few patients, or
            public vectors do not match the network.
    """

    rounds_counts = True
    tasks = AveragingSite.tasks | {
        "count_codes",
        "count_concepts",
        "first_vectors",
        "first_parameters",
        "begin_codes",
        "count_labels",
        "prepare",
        "calibrate",
    }
    for_all_sites = AveragingSite.for_all_sites
    builds_on = AveragingSite.builds_on
    read_only = frozenset({"count_codes", "count_concepts", "count_labels"})
    counting = read_only

    def __init__(  # noqa: PLR0913 - what every method's site takes
        self,
        data: SitePatients,
        config: Config,
        *,
        directory: Path | None = None,
        device: str = "cpu",
        cache: Path | None = None,  # noqa: ARG002 - other methods use it
        progress: Callable[[int, int], None] | None = None,  # noqa: ARG002
        draws: Draws | None = None,
        count_step: int = 1,
    ) -> None:
        self.data = data
        self.config = config
        self.directory = directory
        self.draws = draws or Draws(config.seed)
        self.count_step = count_step
        self._device = device
        self.code_learner: CodeLearner | None = None
        self.classifiers: Classifiers | None = None
        self._network: Tensors = {}  # the representation, once fixed
        self._prepared: Tensors = {}  # initial tensors of stage 2, except the network
        self._steps = np.zeros(0, np.int64)  # steps of the classifiers before a restart
        # The digest of the model that was calibrated, and how many sums were sent.
        self._calibrated = ""
        self._calibrations = 0
        self._coded = data.select_coded(data.train)
        self._labelled = data.train.select_labelled()
        coded = len(self._coded) if config.learns_codes else 0
        labelled = len(self._labelled) if config.phenotypes else 0
        self.num_examples = max(coded, labelled)
        self._require_covered(coded)
        if config.has_stage_1 and config.vectors:
            self._require_public_vectors()  # raise before training
        self.scores: dict[str, Any] = {}

        self.model = nn.Module()
        self.shared: dict[str, nn.Parameter] = {}
        self.private: dict[str, nn.Parameter] = {}
        self.stage = 0
        self.rows_by_stage = np.zeros((2, 0), np.int64)
        if config.has_attention and config.phenotypes:
            self._make_code_learner(config.phenotypes, None)

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self.data.id

    def describe_parameters(self) -> str:
        """Describe how many numbers the site shares."""
        of_network = sum(value.numel() for value in self._network.values())
        if self.config.has_attention:
            has_adapters = self.config.model.attention.rank > 0
            adapters = "the adapters and " if has_adapters else ""
            return f"{of_network:,} numbers of {adapters}the attention"
        of_classifiers = 0
        if self.classifiers is not None:
            of_classifiers = self.classifiers.svms.weight.size
        return (
            f"{of_network:,} numbers of the representation and {of_classifiers:,} of "
            "the classifiers"
        )

    def count_covered(self, task: str) -> dict[str, int]:
        """Return the number of patients behind an update, and of its training steps.

        A site's policy compares them with its limits. Platt scaling sums over held-out
        patients, all other tasks over training patients. Only stage 1 has steps.
        """
        if task == "calibrate":
            if self.classifiers is None:
                return {"patients": self.data.valid.fewest_labelled}
            return {"patients": self.classifiers.fewest_held_out}
        if self.classifiers is not None and task == TRAIN:
            return {"patients": self.classifiers.fewest_patients}
        if self.classifiers is not None or task in ("count_labels", "prepare"):
            return {"patients": len(self._labelled)}
        if self.code_learner is None:
            return {"patients": len(self._coded)}
        amounts = self.code_learner.count_covered(task)
        return {**amounts, "patients": self.code_learner.patients}

    def _require_covered(self, coded: int) -> None:
        """Check that enough patients are behind an update that reveals their concepts.

        Args:
            coded: The number of training patients of stage 1.

        Raises:
            ConfigError: There are fewer patients than `min_patients`.
        """
        config = self.config
        if config.has_attention:
            return  # words are not trained, only adapters and classifiers
        number = coded
        content = "concept vectors"
        kind = "coded"
        if config.model.representation == "none" and not config.space.dense:
            number = len(self._labelled) if config.phenotypes else 0
            content = "a weight for each concept"
            kind = "labelled"
        if 0 < number < config.min_patients:
            raise ConfigError(
                f"site {self.id!r}: an update of {content} would reveal the concepts "
                f"of its {number} {kind} training patients, fewer than min_patients = "
                f"{config.min_patients}: use more patients, or lower min_patients if "
                "these concepts are public"
            )

    # Stage 1.

    def count_codes(self, tensors: Tensors) -> Update:
        """Return the number of patients with each candidate code of the public list."""
        del tensors
        codes = {patient: self.data.codes[patient] for patient in self._coded.patients}
        counts = count_categories(
            codes,
            self.config.list_candidates(),
            whole_causes=self.config.whole_causes,
        )
        return Update({"patients": self._round_counts(counts)}, 1.0)

    def _round_counts(self, counts: np.ndarray) -> Tensor:
        """Return an array of counts, rounded for sending."""
        return torch.from_numpy(round_array(counts.astype(np.float64), self.count_step))

    def count_concepts(self, tensors: Tensors) -> Update:
        """Return how often each concept occurs in the notes of training patients."""
        del tensors
        bags = self.data.train.bags
        assert isinstance(bags, Bags)  # a job on vectors counts no concepts
        counts = np.bincount(bags.concepts, minlength=bags.vocabulary)
        return Update({"occurrences": self._round_counts(counts)}, 1.0)

    def first_vectors(self, tensors: Tensors) -> Update:
        """Return the public vectors from which stage 1 starts.

        They reveal nothing about this site.

        Args:
            tensors: The known concepts.
        """
        table = self._require_public_vectors().make_table(
            self._read_known_concepts(tensors)
        )
        return Update({"embedding": torch.from_numpy(table)}, 1.0)

    def first_parameters(self, tensors: Tensors) -> Update:
        """Return the first parameters of the network of representation = "attention".

        They follow from the job's seed, and reveal nothing about this site.
        """
        del tensors
        network = make_label_attention(
            self.config.model.attention,
            self.data.space,
            len(self._require_code_learner().outputs),
            seed=self.config.seed,
            device="cpu",
        )
        parameters = network.trainable().items()
        return Update({name: value.detach() for name, value in parameters}, 1.0)

    def _require_public_vectors(self) -> ConceptVectors:
        """Return the site's public vectors.

        Raises:
            ConfigError: The site has none, or they do not match the network.
        """
        vectors = self.data.vectors
        width = self.config.model.network.embedding
        if vectors is None or vectors.values.shape[1] != width:
            actual = "none"
            if vectors is not None:
                actual = f"vectors of {vectors.values.shape[1]} numbers"
            raise ConfigError(
                f"site {self.id!r}: [concepts] vectors: {actual} for "
                f"model.network.embedding = {width}: set it to the width of the "
                "vectors, or use other ones"
            )
        return vectors

    def _read_known_concepts(self, tensors: Tensors) -> np.ndarray:
        """Return (known,) int64 numbers of the concepts with a vector of their own.

        Raises:
            RefusedError: The server did not send a valid list.
        """
        known = _read_numbers(tensors, KNOWN)
        size = self.data.space.width
        is_list = (
            known is not None
            and len(known) > 0
            and 0 <= known[0] <= known[-1] < size
            and bool((np.diff(known) > 0).all())
        )
        if known is None or not is_list:
            raise RefusedError(
                f"site {self.id!r}: {KNOWN!r} must list known concepts as ascending "
                f"positions in the dictionary, which has {size:,} concepts"
            )
        # A copy: if all sites run in one process, the tensor is the server's own.
        return known.copy()

    def begin_codes(self, tensors: Tensors) -> Update:
        """Begin stage 1 with the outputs and known concepts that the sites agreed on.

        Args:
            tensors: "chosen", the numbers of the outputs among the candidates, and
                "known", those of concepts.
        """
        self.agree_on_codes(tensors)
        return Update()

    def agree_on_codes(self, tensors: Tensors) -> None:
        """Build the network of stage 1; see `begin_codes`.

        Raises:
            RefusedError: The outputs or concepts are not those of the job.
            ConfigError: Too few patients are left.
        """
        candidates = self.config.list_candidates()
        chosen = _read_numbers(tensors, CHOSEN)
        numbers = [] if chosen is None else chosen.tolist()
        is_valid = all(0 <= number < len(candidates) for number in numbers)
        is_distinct = len(set(numbers)) == len(numbers)
        if chosen is None or not is_valid or not is_distinct:
            raise RefusedError(
                f"site {self.id!r}: {CHOSEN!r} must list the codes to predict as "
                f"positions in the job's list of {len(candidates):,} codes, each at "
                "most once"
            )
        known = self._read_known_concepts(tensors) if KNOWN in tensors else None
        self._make_code_learner([candidates[number] for number in numbers], known)

    def _make_code_learner(
        self, outputs: Sequence[str], known: np.ndarray | None
    ) -> None:
        """Build the network of stage 1, or the one that is trained instead.

        Raises:
            ConfigError: Too few patients are left.
        """
        learner = CodeLearner if self.config.learns_codes else PhenotypeLearner
        self.code_learner = learner(
            self.data,
            self.config,
            outputs,
            known,
            device=self._device,
            draws=self.draws,
            count_step=self.count_step,
        )
        self._require_covered(self.code_learner.patients)

    def _require_code_learner(self) -> CodeLearner:
        """Return stage 1.

        Raises:
            TrainingError: It has not begun.
        """
        if self.code_learner is None:
            raise TrainingError(
                f"site {self.id!r} does not know yet which codes to predict: start the "
                "run again"
            )
        return self.code_learner

    @cached_property
    def candidate_numbers(self) -> dict[str, int]:
        """The number of each candidate, a category of codes, by its name."""
        return {name: k for k, name in enumerate(self.config.list_candidates())}

    # The tasks of both stages.

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """Run the local epochs of the current stage.

        A site that was away when stage 2 began does not train, and returns classifiers
        with no patients behind them. The server then sends the missing tensors
        (`prepare`).
        """
        if self.classifiers is None and INTERCEPT in tensors:
            return make_empty_update(tensors)
        return self._get_current_stage().train(tensors, cycle=cycle)

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Return held-out counts of the current stage."""
        return self._get_current_stage().evaluate(tensors, cycle=cycle)

    def _get_current_stage(self) -> CodeLearner | Classifiers:
        """Return stage 2 if it has begun, otherwise stage 1.

        Raises:
            TrainingError: Neither stage has begun.
        """
        return self.classifiers or self._require_code_learner()

    def count(self, tensors: Tensors) -> Update:
        """Return the number of training patients of stage 1."""
        return self._require_code_learner().count(tensors)

    def take_share(self, tensors: Tensors, *, examples: int) -> Update:
        """Set this site's share of stage 1's mini-batch."""
        return self._require_code_learner().take_share(tensors, examples=examples)

    def send(self, tensors: Tensors, *, weight: float, sites: int) -> Update:
        """Return stage 1's change, encoded in an agreed code."""
        return self._require_code_learner().send(tensors, weight=weight, sites=sites)

    def keep(self, tensors: Tensors) -> Update:
        """Keep the cycle of stage 1 that was just evaluated."""
        return self._require_code_learner().keep(tensors)

    def finish(self, tensors: Tensors) -> Update:
        """End a stage: save the model so far, and score it on the test patients."""
        if self.classifiers is not None:
            self.classifiers.finish(tensors)
            model = self.classifiers.model
        else:
            learner = self._require_code_learner()
            learner.finish(select_prefix(NETWORK, tensors) or tensors)
            self._network = learner.get_received_tensors()
            model = learner.make_model()
        if self.directory is not None:
            model.save(self.directory / "model")
        self.scores = self.score_on(self.data)
        return Update()

    def score_on(self, site: SitePatients) -> dict[str, Any]:
        """Return the finished model's scores on the test patients of a site."""
        scores: dict[str, Any] = {}
        if self.code_learner is not None:
            scores |= self.code_learner.score_on(site)
        if self.classifiers is not None:
            scores |= self.classifiers.score_on(site)
        return scores

    # Stage 2.

    def count_labels(self, tensors: Tensors) -> Update:
        """Return the rounded number of training patients with each label.

        With representation = "none", patients with concepts are represented by TF-IDF.
        The rounded number of patients with each concept is then returned, too.
        """
        del tensors
        cohort = self._labelled
        counts = cohort.count_labels()
        del counts["unlabelled"]
        has_no_network = self.config.model.representation == "none"
        if has_no_network and isinstance(cohort.bags, Bags):  # represented by TF-IDF
            counts["frequencies"] = count_document_frequencies(cohort.bags)
        sums = {name: self._round_counts(of_label) for name, of_label in counts.items()}
        patients = round_count(len(cohort), self.count_step)
        return Update(sums, weight=1.0, metrics={"patients": float(patients)})

    def prepare(self, tensors: Tensors) -> Update:
        """Begin stage 2: the representation is fixed, so compute the features.

        Args:
            tensors: "classes" that the sites agreed on; "weights" of classes and "idf"
                of concepts if used; the network if the site does not have it.
        """
        self._network = select_prefix(NETWORK, tensors) or self._network
        model = self._make_model(tensors)
        phenotypes = len(self.config.phenotypes)
        agreed = require_tensor(
            tensors, "classes", torch.float32, phenotypes, len(CLASSES)
        )
        classes = [
            [each for each in CLASSES if row[each]]
            for row in agreed.to(torch.bool).tolist()
        ]
        svms = LinearSVMs(classes, model.width, self.config.model.classifier)
        if self.classifiers is not None:
            # A server that resumes a run prepares its sites again; their steps
            # continue.
            self._steps = self.classifiers.svms.steps
        if len(self._steps) == len(svms.steps):
            svms.steps[:] = self._steps
        weights = None
        if "weights" in tensors:
            weights = self._read_weights(tensors, len(svms.classifiers))
        self.classifiers = Classifiers(
            self.data,
            self.config,
            model,
            svms,
            weights=weights,
            draws=self.draws,
            count_step=self.count_step,
        )
        self._prepared = {name: tensors[name] for name in _PREPARED if name in tensors}
        return Update()

    def _read_weights(self, tensors: Tensors, num_classifiers: int) -> np.ndarray:
        """Return (classifiers, 2) weights of negative and of positive patients.

        Raises:
            RefusedError: A weight is negative. With it, the classifier would learn the
                opposite of a label.
        """
        weights = require_tensor(tensors, "weights", torch.float64, num_classifiers, 2)
        if bool((weights < 0).any()):
            raise RefusedError(
                f"site {self.id!r}: the server sent a negative weight of a class: "
                "start the run again, with the same version of fednotes at the server "
                "and all sites"
            )
        return np.asarray(weights.numpy())

    def _make_model(self, tensors: Tensors) -> Phenotyper:
        """Return the model with its representation of patients, without classifiers.

        Patients are represented by the network, or by TF-IDF, or else by the vectors of
        an encoder, for which the model needs no parameters.

        Args:
            tensors: Those of the task that begins stage 2; "idf" is for TF-IDF.
        """
        config = self.config.model
        space = self.data.space
        names = () if self.code_learner is None else self.code_learner.outputs
        model = Phenotyper(space, code_names=names, phenotypes=self.config.phenotypes)
        if self._network:
            shape = derive_network_shape(self._network, config.network, space)
            model.network = get_shared_network(
                shape.config,
                space,
                shape.outputs,
                known=shape.known,
                device=self._device,
            )
            load_into(model.network.state(), self._network)
            model.scale = config.scale
        elif "idf" in tensors:
            idf = require_tensor(tensors, "idf", torch.float64, space.width)
            model.idf = idf.numpy()
        return model

    def calibrate(self, tensors: Tensors) -> Update:
        """Return the sums of Platt scaling over held-out patients.

        An honest run calibrates one model, at its end. A server that asks about several
        could choose each so that it isolates one held-out patient.

        Raises:
            RefusedError: The request is about a different model than an earlier one, or
                exceeds the number that a calibration needs.
        """
        if self.classifiers is None:
            raise TrainingError(
                f"site {self.id!r} has no classifiers to calibrate yet: start the run "
                "again"
            )
        update = self.classifiers.calibrate(tensors)
        model = self.classifiers.compute_fingerprint()
        if self._calibrated not in ("", model):
            raise RefusedError(
                f"site {self.id!r}: this run has already calibrated other classifiers, "
                "and a run can calibrate only one model: start a new run to calibrate "
                "another"
            )
        if self._calibrations == MOST_PLATT_SUMS:
            raise RefusedError(
                f"site {self.id!r}: a calibration needs at most {MOST_PLATT_SUMS} "
                "sums, but this would be one more: start a new run to calibrate again"
            )
        self._calibrated = model
        self._calibrations += 1
        return update

    def find_model_digest(self, task: str) -> str:
        """Return a digest of the model that was calibrated; "" for all other tasks."""
        return self._calibrated if task == "calibrate" else ""

    # Training with differential privacy.

    def begin_privately(self, initial: Tensors, agreed: Tensors) -> None:
        """Build the network and the classifiers from the agreement of all sites.

        Args:
            initial: The shared tensors before training.
            agreed: The agreement from noisy counts; empty if there is none.
        """
        self.shared = {name: nn.Parameter(value) for name, value in initial.items()}
        coded: tuple[str, ...] = ()
        if self.config.has_stage_1:
            candidates = torch.arange(len(self.config.list_candidates()))
            self.agree_on_codes({CHOSEN: candidates, **agreed})
            learner = self._require_code_learner()
            coded = learner.cohort.patients
            assert isinstance(learner.network, Dan)
            self.model = learner.network
            for name, parameter in learner.network.trainable().items():
                self.shared[f"{NETWORK}{name}"] = parameter
        if self.config.phenotypes:
            self.prepare(self._make_tensors_to_prepare(initial, agreed))
            if self.config.has_stage_1:
                # Features depend on the network that is trained.
                network = self._require_code_learner().network
                assert isinstance(network, Dan)
                self._require_classifiers().model.network = network

        patients = self.data.train.patients
        self.rows_by_stage = np.array(
            [
                _find_places(coded, patients),
                _find_places(self._labelled.patients, patients),
            ]
        )

    def _make_tensors_to_prepare(self, initial: Tensors, agreed: Tensors) -> Tensors:
        """Return the tensors of the task `prepare`; see `begin_privately`.

        Each disease has the classes "absent" and "present".
        """
        absent_and_present = [float(each in (ABSENT, PRESENT)) for each in CLASSES]
        classes = [absent_and_present] * len(self.config.phenotypes)
        tensors: dict[str, Tensor] = {"classes": torch.tensor(classes)}
        space = self.data.space
        if not space.dense:
            tensors["idf"] = torch.ones(space.width).double()
        tensors |= agreed
        tensors |= initial
        if KNOWN in agreed:
            tensors[f"{NETWORK}{KNOWN}"] = agreed[KNOWN]
        return tensors

    def _require_classifiers(self) -> Classifiers:
        """Return stage 2.

        Raises:
            TrainingError: It has not begun.
        """
        if self.classifiers is None:
            raise TrainingError(
                f"site {self.id!r} has no classifiers yet: start the run again"
            )
        return self.classifiers

    def measure_private_loss(self, indices: np.ndarray) -> Tensor:
        """Return the mean loss, (), of one patient in the current stage.

        Args:
            indices: The patient's rows in the training data.

        Returns:
            The loss; 0 if the patient has no data for this stage.
        """
        rows = self.rows_by_stage[self.stage, indices]
        rows = rows[rows >= 0]
        if not len(rows):
            return torch.zeros(())
        if self.stage == 0:
            batch = self._require_code_learner().select(rows)
            return batch.loss([batch])
        classifiers = self._require_classifiers()
        losses = [
            classifiers.measure_patient_loss(self.shared, row) for row in rows.tolist()
        ]
        return torch.stack(losses).mean()

    # State that must survive a restart.

    def state(self) -> State:
        """Return the outputs, and the state of the current stage.

        In stage 1, this is the state of averaging. In stage 2, it is the network, the
        initial tensors of the classifiers, and their steps.
        """
        learner = self.code_learner
        # In one process, all sites receive the server's own tensors, and a checkpoint
        # cannot contain the same tensor twice.
        tensors = add_prefix(NETWORK, copy_tensors(self._network))
        facts: dict[str, Any] = {}
        if learner is not None:
            tensors |= learner.known
            facts["outputs"] = [*learner.outputs]
        if self._calibrated:
            facts["calibrated"] = self._calibrated
            facts["calibrations"] = self._calibrations
        if self.classifiers is not None:
            tensors |= copy_tensors(self._prepared)
            tensors["steps"] = torch.from_numpy(self.classifiers.svms.steps)
            return State(0, tensors, facts)
        of_learner = State(0) if learner is None else learner.state()
        return State(
            of_learner.round,
            {**of_learner.tensors, **tensors},
            {**of_learner.facts, **facts},
        )

    def restore(self, state: State) -> None:
        """Return to a saved state."""
        self.classifiers = None
        self._network = select_prefix(NETWORK, state.tensors)
        self._steps = np.zeros(0, np.int64)
        self._calibrated = state.facts.get("calibrated", "")
        self._calibrations = state.facts.get("calibrations", 0)
        if "outputs" in state.facts:
            known = state.tensors[KNOWN].numpy() if KNOWN in state.tensors else None
            self._make_code_learner(state.facts["outputs"], known)
        if "steps" in state.tensors:
            self._steps = state.tensors["steps"].numpy()
            if "classes" in state.tensors:  # not in states of earlier versions
                self.prepare(state.tensors)
        elif self.code_learner is not None:
            self.code_learner.restore(state)


def _read_numbers(tensors: Tensors, name: str) -> np.ndarray | None:
    """Return a flat int64 tensor as an array; None if there is no such tensor."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != torch.int64 or tensor.dim() != 1:
        return None
    numbers: np.ndarray = tensor.numpy()
    return numbers


def _find_places(cohort: Sequence[str], patients: Sequence[str]) -> list[int]:
    """Return each patient's index in a cohort, or -1."""
    place_of = {patient: place for place, patient in enumerate(cohort)}
    return [place_of.get(patient, -1) for patient in patients]
