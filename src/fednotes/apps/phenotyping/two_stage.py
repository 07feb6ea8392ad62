"""Two-stage phenotyping: sites and server.

Dianbo Liu, Dmitriy Dligach and Timothy Miller (2019), "Two-stage federated phenotyping
and patient representation learning", Algorithm 1.

    paper       here
    t           `Server.round` in stage 1, the round's number in stage 2
    T, T'       `Config.cycles`, `Config.classifier_cycles`
    K, K'       the sites of the federation; those without patients of a stage weigh nothing in it
    n_k         patients: of stage 1, with codes; of stage 2, labelled for that disease
    N           `Total.weight`; in stage 2 the sum "patients"
    M           the outputs of stage 1, agreed by `agreed_outputs`
    W_k^t       what a site returns from "train"
    f           `dan.Dan` in stage 1, `classifiers.LinearSVMs` in stage 2

Stage 1 predicts billing codes from concepts and is left out where `representation`
names a model or is "none". Stage 2 trains the classifiers of all diseases on what the
dense layer says of a patient; without phenotypes a run ends with stage 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.apps.phenotyping.classifiers import (
    CLASSES,
    LinearSVMs,
    SvmConfig,
    agree_on_classes,
    document_frequencies,
    inverse_document_frequencies,
)
from fednotes.apps.phenotyping.codes import category_counts
from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    Bags,
    ConceptVectors,
    SitePatients,
    pool_sites,
    require_alike,
)
from fednotes.apps.phenotyping.dan import KNOWN, Dan
from fednotes.apps.phenotyping.phenotyper import (
    PhenotypeConfig,
    Phenotyper,
    load_phenotyper,
    network_settings,
)
from fednotes.apps.phenotyping.stages import (
    PRESETS,
    Classifiers,
    CodeLearner,
    Config,
    agreed,
    counted,
    frequent,
    frequent_codes,
    own_counts,
    places_of,
    require_agreed,
    shared_network,
)
from fednotes.core.counts import round_array, round_count
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.federation import Coverage, Federation, MethodSite, State
from fednotes.core.seeds import Draws
from fednotes.core.settings import build
from fednotes.core.tensors import (
    below,
    load_into,
    prefixed,
    require_tensor,
    restoring,
    shapes_of,
)
from fednotes.core.update import Tensors, Total, Update, require_metrics
from fednotes.methods.averaging import (
    AveragingSite,
    AveragingWithDP,
    Server,
    run_cycles,
)
from fednotes.methods.base import Method
from fednotes.metrics.classification import ClassCounts
from fednotes.metrics.platt import MOST_PLATT_SUMS, PLATT_SUMS, fit_platt
from fednotes.privacy.promise import Unit
from fednotes.privacy.secure_sum.crypto import digest
from fednotes.privacy.units import unit_key
from fednotes.training.server_steps import by_each, for_names, gathered

__all__ = ["METHOD", "Config", "Phenotype", "PhenotypeWithDP", "Site", "train"]

# of "count_labels", in the order of CLASSES
LABELS = ("absent", "present", "questionable")


# ---- sites ---------------------------------------------------------------------------


class Site(MethodSite):
    """One hospital: its patients, and the tasks that the server may ask for.

    directory: where the finished model is written; None writes nothing. draws: of
    orders and dropout; None: the job's seed. count_step: weights and counts are sent as
    multiples of it.

    Raises ConfigError where an update of the concepts' vectors would cover too few
        patients.
    """

    rounds_counts = True
    tasks = AveragingSite.tasks | {
        *("count_codes", "count_concepts", "first_vectors", "begin_codes"),
        *("count_labels", "prepare", "calibrate"),
    }
    read_only = frozenset({"count_codes", "count_concepts", "count_labels"})

    def __init__(
        self,
        data: SitePatients,
        config: Config,
        *,
        directory: Path | None = None,
        device: str = "cpu",
        cache: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        draws: Draws | None = None,
        count_step: int = 1,
    ) -> None:
        self.draws = draws or Draws(config.seed)
        self.count_step = count_step
        self.data, self.config, self.directory, self._device = (
            data,
            config,
            directory,
            device,
        )
        self._codes: CodeLearner | None = None
        self._classifiers: Classifiers | None = None
        self._network: Tensors = {}  # the representation, once it is fixed
        self._steps = np.zeros(0, np.int64)  # of each machine, from before a restart
        # Digest of the model that was calibrated, and how often it was asked about.
        self._calibrated = ""
        self._calibrations = 0
        self._coded = data.coded(data.train)
        self._labelled = data.train.labelled()
        number = len(self._coded) if config.learns else 0
        self.num_examples = max(number, len(self._labelled) if config.phenotypes else 0)
        self._require_covered(number)
        if config.learns and config.vectors:
            self._public_vectors()  # tells before training that they do not fit
        self.scores: dict[str, Any] = {}
        # of training with differential privacy
        self.model, self.shared = nn.Module(), dict[str, nn.Parameter]()
        self.private, self.stage = dict[str, nn.Parameter](), 0
        # of a training patient in each stage, or -1
        self.rows = np.zeros((2, 0), np.int64)

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
        """Return the number of patients behind an update of this task, and steps of
        stage 1.

        A site's policy compares them with its limits. Platt scaling sums over held-out
        patients, all other tasks over training patients.
        """
        if task == "calibrate":
            return {"patients": len(self.data.valid.labelled())}
        if self._classifiers is not None or task in ("count_labels", "prepare"):
            return {"patients": len(self._labelled)}
        if self._codes is None:
            return {"patients": len(self._coded)}
        return {**self._codes.covered(task), "patients": self._codes.patients}

    def _require_covered(self, coded: int) -> None:
        """Raises ConfigError where few patients are behind numbers that tell concepts."""
        config, least = self.config, self.config.min_patients
        number, what, kind = coded, "concept vectors", "coded"
        if config.model.representation == "none" and not config.space.dense:
            number = len(self._labelled) if config.phenotypes else 0
            what, kind = "a weight for each concept", "labelled"
        if 0 < number < least:
            raise ConfigError(
                f"site {self.id!r}: an update of {what} tells which concepts its {number} "
                f"{kind} training patients have; min_patients = {least} is asked: more "
                "patients, or a smaller min_patients if they are public"
            )

    # stage 1

    def count_codes(self, tensors: Tensors) -> Update:
        """Patients of each category of codes, over the public list of categories."""
        own = {patient: self.data.codes[patient] for patient in self._coded.patients}
        counts = category_counts(
            own, self.config.candidates, whole_causes=self.config.whole_causes
        )
        return Update({"patients": self._reported(counts)}, 1.0)

    def _reported(self, counts: np.ndarray) -> Tensor:
        """Return an array of counts as it leaves the site."""
        return torch.from_numpy(round_array(counts.astype(np.float64), self.count_step))

    def count_concepts(self, tensors: Tensors) -> Update:
        """How often each of the dictionary's concepts occurs in the training patients'
        notes."""
        bags = self.data.train.bags
        assert isinstance(bags, Bags)  # the server asks for no others
        counts = np.bincount(bags.concepts, minlength=bags.vocabulary)
        return Update({"occurrences": self._reported(counts)}, 1.0)

    def first_vectors(self, tensors: Tensors) -> Update:
        """The public vectors where stage 1 starts, which tell nothing of this site."""
        table = self._public_vectors().start(self._known_concepts(tensors))
        return Update({"embedding": torch.from_numpy(table)}, 1.0)

    def _public_vectors(self) -> ConceptVectors:
        """Return the site's public vectors.

        Raises ConfigError if they do not fit the network.
        """
        vectors, width = self.data.vectors, self.config.model.network.embedding
        if vectors is None or vectors.values.shape[1] != width:
            own = (
                "none"
                if vectors is None
                else f"vectors of {vectors.values.shape[1]} numbers"
            )
            raise ConfigError(
                f"site {self.id!r}: [concepts] vectors: {own} for model.network.embedding = {width}"
            )
        return vectors

    def _known_concepts(self, tensors: Tensors) -> np.ndarray:
        """The concepts that have a vector of their own.

        Raises RefusedError for impossible ones.
        """
        given = tensors.get(KNOWN, torch.zeros(0))
        fits = given.dtype == torch.int64 and given.dim() == 1
        known = given.numpy() if fits else np.zeros(0, np.int64)
        within = len(known) and 0 <= known[0] <= known[-1] < self.data.space.width
        if not within or (np.diff(known) <= 0).any():
            raise RefusedError(
                f"site {self.id!r}: {KNOWN!r}, the concepts to know are not places in the "
                f"dictionary's list of {self.data.space.width:,}, each at most once and in order"
            )
        return known.copy()  # in one process the tensor is the server's

    def begin_codes(self, tensors: Tensors) -> Update:
        """The outputs are agreed, indices into the public list, and which concepts are
        known."""
        self.agree_codes(tensors)
        return Update()

    def agree_codes(self, tensors: Tensors) -> None:
        """Raises RefusedError for outputs or concepts that are none of the job's."""
        candidates = self.config.candidates
        given = tensors.get("chosen", torch.zeros(0))
        fits = given.dtype == torch.int64 and given.dim() == 1
        chosen = given.tolist() if fits else [-1]
        if len(set(chosen) & set(range(len(candidates)))) < len(chosen):
            raise RefusedError(
                f"site {self.id!r}: 'chosen', the codes to predict, are not places in the job's "
                f"list of {len(candidates)}, each at most once"
            )
        known = self._known_concepts(tensors) if KNOWN in tensors else None
        self._learn_codes([candidates[at] for at in chosen], known)

    def _learn_codes(self, outputs: Sequence[str], known: np.ndarray | None) -> None:
        """Raises ConfigError where too few patients are left."""
        self._codes = CodeLearner(
            self.data,
            self.config,
            outputs,
            known,
            device=self._device,
            draws=self.draws,
            count_step=self.count_step,
        )
        self._require_covered(self._codes.patients)

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """Local epochs of the stage that runs."""
        return (self._classifiers or self._learner).train(tensors, cycle=cycle)

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Held-out counts of the stage that runs."""
        return (self._classifiers or self._learner).evaluate(tensors, cycle=cycle)

    def count(self, tensors: Tensors) -> Update:
        """How many patients stage 1 learns from."""
        return self._learner.count(tensors)

    def take_share(self, tensors: Tensors, *, examples: int) -> Update:
        """Take this site's part of stage 1's mini-batch."""
        return self._learner.take_share(tensors, examples=examples)

    def send(self, tensors: Tensors, *, weight: float, sites: int) -> Update:
        """Stage 1's change in an agreed code."""
        return self._learner.send(tensors, weight=weight, sites=sites)

    def keep(self, tensors: Tensors) -> Update:
        """The cycle of stage 1 that was just judged is the one to keep."""
        return self._learner.keep(tensors)

    def finish(self, tensors: Tensors) -> Update:
        """The end of a stage: judge on the test patients; write the model after the
        last."""
        if self._classifiers is not None:
            self._classifiers.finish(tensors)
            model = self._classifiers.model
        else:
            self._learner.finish(below(tensors, "network.") or tensors)
            self._network = self._learner.told
            names = self._learner.outputs
            model = Phenotyper(self.data.space, self._learner.network, code_names=names)
        if self.directory is not None:
            model.save(self.directory / "model")
        self.scores = self.scores_on(self.data)
        return Update()

    def scores_on(self, site: SitePatients) -> dict[str, Any]:
        """The finished model on the test patients of a site."""
        codes = self._codes.scores_on(site) if self._codes is not None else {}
        return codes | (self._classifiers.scores_on(site) if self._classifiers else {})

    # stage 2

    def count_labels(self, tensors: Tensors) -> Update:
        """Labelled training patients of each class; how many have each concept."""
        cohort = self._labelled
        counts = cohort.label_counts()
        del counts["unlabelled"]
        if self.config.model.representation == "none" and isinstance(cohort.bags, Bags):
            counts["frequencies"] = document_frequencies(cohort.bags)
        sums = {name: self._reported(of) for name, of in counts.items()}
        patients = round_count(len(cohort), self.count_step)
        return Update(sums, 1.0, {"patients": float(patients)})

    def prepare(self, tensors: Tensors) -> Update:
        """The representation is fixed and the classes are agreed: compute the features."""
        self._network = below(tensors, "network.") or self._network
        config, space = self.config.model, self.data.space
        names = () if self._codes is None else self._codes.outputs
        model = Phenotyper(space, code_names=names, phenotypes=self.config.phenotypes)
        if self._network:
            settings, outputs, known = network_settings(
                self._network, config.network, space
            )
            model.network = shared_network(
                settings, space, outputs, known, self._device
            )
            load_into(model.network.state(), self._network)
            model.scale = config.scale
        elif "idf" in tensors:
            model.idf = require_tensor(
                tensors, "idf", torch.float64, space.width
            ).numpy()
        agreed = require_tensor(
            tensors, "classes", torch.float32, len(self.config.phenotypes), len(CLASSES)
        )
        classes = [
            [c for c in CLASSES if row[c]] for row in agreed.to(torch.bool).tolist()
        ]
        machines = LinearSVMs(classes, model.width, config.classifier)
        if len(self._steps) == len(machines.steps):
            machines.steps[:] = self._steps
        weights = None
        if "weights" in tensors:
            weights = require_tensor(
                tensors, "weights", torch.float64, len(machines.machines), 2
            ).numpy()
        self._classifiers = Classifiers(
            self.data,
            self.config,
            model,
            machines,
            weights=weights,
            draws=self.draws,
            count_step=self.count_step,
        )
        return Update()

    def calibrate(self, tensors: Tensors) -> Update:
        """Return the sums of Platt scaling over held-out patients.

        An honest run calibrates one model, at its end. A server that asks about several
        could choose each so that it tells one held-out patient apart from the others.

        Raises:
            RefusedError: The request is about another model than an earlier one, or is
                one more than a calibration needs.
        """
        if self._classifiers is None:
            raise TrainingError(f"site {self.id!r} has no classifiers to calibrate yet")
        update = self._classifiers.calibrate(tensors)
        model = self._classifiers.fingerprint()
        if self._calibrated not in ("", model):
            raise RefusedError(
                f"site {self.id!r}: this run has calibrated other classifiers, and a run "
                "calibrates one model: start a new run to calibrate another"
            )
        if self._calibrations == MOST_PLATT_SUMS:
            raise RefusedError(
                f"site {self.id!r}: a calibration needs at most {MOST_PLATT_SUMS} sums, "
                "and this would be one more: start a new run to calibrate again"
            )
        self._calibrated = model
        self._calibrations += 1
        return update

    def subject(self, task: str) -> str:
        """Return a digest of the model that was calibrated; "" for all other tasks."""
        return self._calibrated if task == "calibrate" else ""

    @property
    def _learner(self) -> CodeLearner:
        if self._codes is None:
            raise TrainingError(f"site {self.id!r} was not told which codes to predict")
        return self._codes

    @cached_property
    def places(self) -> dict[str, int]:
        """Of the categories of codes that may become outputs."""
        return {name: at for at, name in enumerate(self.config.candidates)}

    # training with differential privacy

    def begin_privately(self, initial: Tensors, agreed: Tensors) -> None:
        """Make the network and the classifiers from what all sites have agreed on.

        Args:
            initial: What sites share before training.
            agreed: What they agreed on by their noisy counts; empty if on nothing.
        """
        config, space = self.config, self.data.space
        coded: tuple[str, ...] = ()
        self.shared = {name: nn.Parameter(value) for name, value in initial.items()}
        if config.learns:
            every = torch.arange(len(config.candidates))
            self.agree_codes({"chosen": every, **agreed})
            learner = self._learner
            coded, self.model = learner.cohort.patients, learner.network
            for name, parameter in learner.network.trainable().items():
                self.shared[f"network.{name}"] = parameter
        if config.phenotypes:
            absent_or_present = [1.0, 1.0, 0.0]
            prepared = {
                "classes": torch.tensor([absent_or_present] * len(config.phenotypes))
            }
            if not space.dense:
                prepared["idf"] = torch.ones(space.width).double()
            prepared |= agreed
            prepared |= initial
            if KNOWN in agreed:
                prepared[f"network.{KNOWN}"] = agreed[KNOWN]
            self.prepare(prepared)
            assert self._classifiers is not None
            if config.learns:
                self._classifiers.model.network = self._learner.network

        train = self.data.train.patients
        self.rows = np.array(
            [
                _places_in(coded, train),
                _places_in(self._labelled.patients, train),
            ]
        )

    def private_loss(self, indices: np.ndarray) -> Tensor:
        """Return the mean loss of one patient in the stage that runs; 0 without data.

        Args:
            indices: The patient's rows of the training patients.
        """
        rows = self.rows[self.stage, indices]
        rows = rows[rows >= 0]
        if not len(rows):
            return torch.zeros(())
        if self.stage == 0:
            part = self._learner.some(rows)
            return part.loss([part])
        assert self._classifiers is not None
        losses = [self._classifiers.loss(self.shared, row) for row in rows.tolist()]
        return torch.stack(losses).mean()

    # what a restart must not lose

    def state(self) -> State:
        """Return stage 1's moments and outputs, or the steps of stage 2's machines."""
        codes = self._codes
        known: Tensors = {}
        facts: dict[str, Any] = {}
        if codes is not None:
            known = codes.known
            facts["outputs"] = [*codes.outputs]
        if self._calibrated:
            facts["calibrated"] = self._calibrated
            facts["calibrations"] = self._calibrations
        if self._classifiers is not None:
            steps = torch.from_numpy(self._classifiers.machines.steps)
            return State(0, {"steps": steps, **known}, facts)
        kept = State(0) if codes is None else codes.state()
        return State(kept.round, {**kept.tensors, **known}, {**kept.facts, **facts})

    def restore(self, state: State) -> None:
        """Go back to a saved state."""
        self._classifiers = None
        self._calibrated = state.facts.get("calibrated", "")
        self._calibrations = state.facts.get("calibrations", 0)
        if "outputs" in state.facts:
            known = state.tensors[KNOWN].numpy() if KNOWN in state.tensors else None
            self._learn_codes(state.facts["outputs"], known)
        if "steps" in state.tensors:
            self._steps = state.tensors["steps"].numpy()
        elif self._codes is not None:
            self._codes.restore(state)


def _places_in(cohort: Sequence[str], patients: Sequence[str]) -> list[int]:
    """Return each patient's place in a cohort, or -1."""
    place_of = {patient: place for place, patient in enumerate(cohort)}
    return [place_of.get(patient, -1) for patient in patients]


# ---- server --------------------------------------------------------------------------


def train(federation: Federation, config: Config) -> State:
    """Algorithm 1: a representation of patients, then a classifier for each disease."""
    resumed = federation.resume()
    first = _codes(federation, config, resumed) if config.learns else _prepared(config)
    if not config.phenotypes:
        return first
    told = config.learns and (resumed is None or resumed.fact("stage", int) == 1)
    return _phenotypes(
        federation, config, {} if told else first.tensors, first, resumed
    )


# ---- stage 1 -------------------------------------------------------------------------


def agreed_outputs(federation: Federation, config: Config) -> tuple[str, ...]:
    """The categories of codes that enough patients of all sites have.

    Sites count over a public list, so the sum names no category that a site alone has.
    """
    total = federation.sum("count_codes")
    total.require({"patients": (len(config.candidates),)})
    return frequent_codes(total.tensors["patients"].numpy(), config)


def agreed_concepts(federation: Federation, config: Config) -> Tensor | None:
    """(concepts,) int64, rising: those frequent enough over all sites to have their own
    vector.

    None where the job asks for no such number, or patients are vectors of text.
    Raises TrainingError where no concept is frequent enough.
    """
    if not config.least_occurrences or config.space.dense:
        return None
    total = federation.sum("count_concepts")
    total.require({"occurrences": (config.space.width,)})
    return frequent(total.tensors["occurrences"], config.least_occurrences)


class _CodeServer(Server):
    """Averages the network; its state names the outputs, and which concepts are known,
    too."""

    outputs: tuple[str, ...]
    known: Tensors

    def state(self) -> State:
        state = super().state()
        facts = {**state.facts, "stage": 1, "outputs": list(self.outputs)}
        return replace(state, tensors={**state.tensors, **self.known}, facts=facts)


def _codes(federation: Federation, config: Config, resumed: State | None) -> State:
    """Stage 1 to its end; network and outputs, ready for stage 2."""
    if resumed is not None and resumed.fact("stage", int) == 2:
        tensors = prefixed("network.", below(resumed.tensors, "network."))
        return State(
            config.last_cycle, tensors, {"outputs": resumed.fact("outputs", list)}
        )
    if resumed is None:
        outputs = agreed_outputs(federation, config)
        chosen = places_of(outputs, config)
        known = agreed_concepts(federation, config)
        told = {} if known is None else {KNOWN: known}
        federation.sum("begin_codes", {"chosen": chosen, **told})
    else:
        outputs = tuple(resumed.fact("outputs", list))
        kept = {**resumed.tensors}
        told = {KNOWN: kept.pop(KNOWN)} if KNOWN in kept else {}
        resumed = replace(resumed, tensors=kept)
    parameters = initial(config, len(outputs), told.get(KNOWN))
    if config.vectors and resumed is None:
        total = gathered(federation, config, "first_vectors", told, {})
        total.require({"embedding": tuple(parameters["embedding"].shape)})
        parameters |= total.mean()
    server = _CodeServer(config, parameters, judged, resumed)
    server.outputs, server.known = outputs, told
    run_cycles(federation, server)  # [phenotype algorithm 1 stage 1]
    tensors = prefixed("network.", {**server.result, **server.known})
    return State(server.round, tensors, {"stage": 1, "outputs": list(outputs)})


def initial(
    config: Config, outputs: int, known: Tensor | None = None
) -> dict[str, Tensor]:
    """The network's first parameters, the same ones at server and sites."""
    network, space = config.model.network, config.space
    given = None if known is None else known.numpy()
    dan = Dan(
        network, space.width, outputs, config.seed, known=given, features=space.dense
    )
    return {name: value.detach() for name, value in dan.trainable().items()}


def _prepared(config: Config) -> State:
    """The representation that the job begins with in place of stage 1."""
    if config.model.representation == "none":
        return State(0, {}, {"outputs": []})
    told = f"representation = {config.model.representation!r}"
    model = load_phenotyper(Path(config.model.representation))
    network = model.network
    if network is None:
        reason = "this model was trained on the concepts themselves, it has no representation"
        raise ConfigError(f"{told}: {reason}")
    if model.space.fingerprint != config.space.fingerprint:
        raise ConfigError(
            f"{told} reads notes with another dictionary or encoder than this job: give the job "
            "the same one"
        )
    for name in ("mean", "length", "layer"):
        theirs, ours = (
            getattr(c, name) for c in (network.config, config.model.network)
        )
        if theirs != ours:
            raise ConfigError(
                f"{told} was trained with {name} = {theirs!r}, this job has {ours!r}: set "
                f"model.network.{name} to the former"
            )
    tensors = prefixed("network.", {n: v.detach() for n, v in network.state().items()})
    return State(0, tensors, {"outputs": list(model.code_names)})


# ---- stage 2 -------------------------------------------------------------------------


def _phenotypes(
    federation: Federation,
    config: Config,
    network: Tensors,
    first: State,
    resumed: State | None,
) -> State:
    """Stage 2. network: of the representation, what sites were not told at stage 1's
    end."""
    counted = federation.sum("count_labels")
    machines, prepared = _first_machines(config, first, counted)
    federation.sum("prepare", {**network, **prepared})
    shared = machines.to_float32()
    before = first.round
    start = before
    if resumed is not None and resumed.fact("stage", int) == 2:
        start = resumed.round
        with restoring("the newest checkpoint"):
            shared = {
                n: require_tensor(resumed.tensors, n, v.dtype, *v.shape)
                for n, v in shared.items()
            }
    for cycle in federation.rounds(start, before + config.classifier_cycles):
        # [phenotype algorithm 1 stage 2] W'_k
        total = federation.sum("train", shared, cycle=cycle.number)
        shared = averaged(shared, total)  # [phenotype algorithm 1 stage 2]
        metrics = {"loss": total.metric("loss") / max(1.0, total.metric("examples"))}
        number = cycle.number + 1 - before
        evaluated = (
            number % config.evaluate_every == 0 or number == config.classifier_cycles
        )
        if evaluated:
            found = judged(
                federation.sum("evaluate", shared, cycle=cycle.number).metrics
            )
            metrics |= {
                name: value for name, value in found.items() if math.isfinite(value)
            }
        state = State(
            cycle.number + 1, {**first.tensors, **shared}, {**first.facts, "stage": 2}
        )
        cycle.commit(state, metrics, evaluated=evaluated)
    federation.sum(
        "finish", {**shared, **_calibrated(federation, config, machines, shared)}
    )
    facts = {"outputs": first.facts["outputs"]}
    return State(before + config.classifier_cycles, {**first.tensors, **shared}, facts)


def averaged(shared: Tensors, total: Total) -> dict[str, Tensor]:
    """Eq. 1 for the classifiers: each one's mean over the patients labelled for its
    disease.

    Sites send sums over their patients; a classifier that no site trained stays as it
    is.
    """
    total.require(
        {**shapes_of(shared), "patients": tuple(shared["svm.intercept"].shape)}
    )
    patients = total.tensors["patients"]  # (machines,) N' of each classifier
    safe = patients.clamp(min=1)
    return {
        # [phenotype eq 1] W_ag = Σ_k n_k / N · W_k
        name: torch.where(patients > 0, (total.tensors[name] / safe).float(), value)
        for name, value in shared.items()
    }


def _first_machines(
    config: Config, first: State, counted: Total
) -> tuple[LinearSVMs, dict[str, Tensor]]:
    """Classifiers at zero, and what sites need to make the same ones.

    Raises TrainingError where no patient is labelled.
    """
    by_concept = config.model.representation == "none" and not config.space.dense
    shapes = dict.fromkeys(LABELS, (len(config.phenotypes),))
    counted.require(
        shapes | ({"frequencies": (config.space.width,)} if by_concept else {})
    )
    counts = {name: counted.tensors[name].numpy() for name in LABELS}
    if not sum(float(each.sum()) for each in counts.values()):
        raise TrainingError(
            "no training patient is labelled for any phenotype at any site"
        )
    classes = agree_on_classes(counts, config.least_questionable)
    prepared = {
        "classes": torch.tensor(
            [[float(c in each) for c in CLASSES] for each in classes]
        )
    }
    width = config.space.width
    if "network.hidden_bias" in first.tensors:
        width = len(first.tensors["network.hidden_bias"])
    elif not config.space.dense:
        frequencies = counted.tensors["frequencies"].numpy()
        patients = round(counted.metric("patients"))
        prepared["idf"] = torch.from_numpy(
            inverse_document_frequencies(frequencies, patients)
        )
    machines = LinearSVMs(classes, width, config.model.classifier)
    if config.model.classifier.class_weights == "balanced":
        table = np.stack([counts[name] for name in LABELS], axis=1)
        prepared["weights"] = torch.from_numpy(machines.balance_classes(table))
    return machines, prepared


def _calibrated(
    federation: Federation, config: Config, machines: LinearSVMs, shared: Tensors
) -> dict[str, Tensor]:
    """Platt scaling of each classifier, from sums over the sites' held-out patients."""
    if not config.calibrate:
        return {}

    def sums(platt: np.ndarray) -> np.ndarray:
        sent = {**shared, "platt": torch.from_numpy(platt)}
        total = federation.sum("calibrate", sent)
        total.require({"sums": (len(machines.machines), PLATT_SUMS)})
        return total.tensors["sums"].numpy()

    return {"platt": torch.from_numpy(fit_platt(sums, len(machines.machines)))}


def judged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Numbers for people from what held-out patients say: of codes, or of phenotypes."""
    if counts := ClassCounts.from_metrics(metrics).by_output:
        scores = ClassCounts(counts).scores()
        if not scores["outputs"]:
            return {"held_out": -math.inf}
        return {"held_out": scores["macro"]["f1"], "valid_f1": scores["macro"]["f1"]}
    if not metrics.get("pairs"):
        return {"held_out": -math.inf}
    require_metrics(metrics, "loss")
    loss = metrics["loss"] / metrics["pairs"]
    return {"held_out": -loss, "valid_loss": loss}


# ---- training with differential privacy ----------------------------------------------


class PhenotypeWithDP(AveragingWithDP):
    """Both stages with differential privacy, one after the other.

    What sites agree on before training follows from noisy counts. In each stage only
    the network, or only the classifiers, are trained.
    """

    required_settings = MappingProxyType(
        {
            **AveragingWithDP.required_settings,
            "calibrate": False,
            "min_patients": 0,
            "optimizer": "adam",
        }
    )
    counts_before_training = True
    example_names = ("batch", "patients")

    def initial(self, config: Config, agreed: Tensors) -> dict[str, Tensor]:
        """Return the network, if it learns, and classifiers at zero.

        Each disease has the classes "absent" and "present".
        """
        tensors: dict[str, Tensor] = {}
        if config.learns:
            outputs = len(agreed.get("chosen", config.candidates))
            network = initial(config, outputs, agreed.get(KNOWN))
            tensors |= prefixed("network.", network)
        if config.phenotypes:
            width = config.space.width
            if config.learns:
                width = config.model.network.hidden
            classes = [(ABSENT, PRESENT)] * len(config.phenotypes)
            tensors |= LinearSVMs(classes, width, config.model.classifier).to_float32()
        return tensors

    def units(self, site: Site, unit: Unit) -> list[np.ndarray]:
        """Return the training rows of each patient who has codes or labels."""
        train = site.data.train
        is_labelled = np.any(train.labels >= 0, axis=1) & site.config.judges
        rows: dict[tuple[str, ...], list[int]] = {}
        for row, patient in enumerate(train.patients):
            is_coded = site.config.learns and patient in site.data.codes
            if is_labelled[row] or is_coded:
                rows.setdefault(unit_key(patient, "", unit), []).append(row)
        return [np.array(each) for each in rows.values()]

    def digest(self, data: SitePatients) -> bytes:
        """Return a digest of the training patients and of all codes."""
        codes = repr(sorted((p, sorted(c)) for p, c in data.codes.items()))
        return digest(data.train.fingerprint(), codes)

    def begin(self, site: Site, agreed: Tensors) -> None:
        """Make the site's network and classifiers from what all sites have agreed on.

        Raises:
            RefusedError: The tensors are others than agreed ones, whoever the patients
                are: a number with which only some features can be computed would tell
                who has the concept.
        """
        if agreed:
            require_agreed(site.config, agreed, site.id)
        site.begin_privately(self.initial(site.config, agreed), agreed)

    def count_rounds(self, config: Config, epoch: int) -> int:
        """Return the noisy sums of both stages, with `epoch` of them to an epoch."""
        return sum(self.count_rounds_by_stage(config, epoch))

    def count_rounds_by_stage(self, config: Config, epoch: int) -> tuple[int, int]:
        """Return the noisy sums of stage 1 and of stage 2."""
        network = super().count_rounds(config, epoch) if config.learns else 0
        classifiers = 0
        if config.judges:
            classifiers = config.classifier_cycles * config.classifier_epochs * epoch
        return network, classifiers

    def prepare_round(self, site: Site, round: int, memory: Tensors) -> Tensors:
        """Let the network learn in stage 1, and the classifiers in stage 2."""
        privacy = site.config.privacy
        assert privacy is not None
        of_network, _ = self.count_rounds_by_stage(site.config, privacy.epoch)
        site.stage = int(round >= of_network)
        for name, parameter in site.shared.items():
            parameter.requires_grad_(name.startswith("svm.") == bool(site.stage))
        return memory

    def loss(self, site: Site, indices: np.ndarray) -> Tensor:
        """Return the mean loss of one patient's codes, or labels; 0 without any."""
        return site.private_loss(indices)

    # The noisy counts, with which training begins.

    def count_size(self, config: Config) -> int:
        """Return how many numbers are counted, of codes, concepts and labels."""
        return sum(counted(config).values())

    def counted_units(self, site: Site, unit: Unit) -> list[np.ndarray]:
        """Return the training rows of each patient."""
        return self.units(site, unit)

    def count_unit(
        self, site: Site, counted: np.ndarray
    ) -> tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]:
        """Return the places of one patient's counts, and the counts there."""
        return own_counts(site.data, site.config, counted, site.places)

    def agree(self, config: Config, counts: np.ndarray, deviation: float) -> Tensors:
        """Return outputs, known concepts and weights that follow from noisy counts."""
        return agreed(config, counts, deviation)


# ---- what a job asks of a method -----------------------------------------------------


class Phenotype(Method):
    """Two-stage phenotyping as in Liu, Dligach and Miller 2019, for a job."""

    config_class = Config
    site_class = Site
    presets = PRESETS
    holds = "patients"
    dp = PhenotypeWithDP()

    def train(self, federation: Federation, config: Config) -> State:
        """Run Algorithm 1."""
        return train(federation, config)

    def read_model_config(self, table: Mapping[str, Any]) -> PhenotypeConfig:
        """Return the settings of network and classifiers."""
        config: PhenotypeConfig = build(PhenotypeConfig, table, where="model")
        return config

    def list_models(self) -> Mapping[str, type[Any]]:
        """Return the only settings of a model."""
        return {"": PhenotypeConfig}

    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the held-out loss of codes, or macro F1 of phenotypes."""
        return judged(metrics)

    def configure(self, config: Config, sites: Sequence[SitePatients]) -> Config:
        """Return the settings with what the sites hold.

        Raises:
            DataError: The sites differ.
            ConfigError: There is nothing to learn, or nothing to count.
        """
        require_alike(sites)
        if config.learns and not any(site.codes for site in sites):
            raise ConfigError(
                'representation = "learn" predicts billing codes, and no site has any: '
                'give `codes`, or set model.representation = "none" (TF-IDF) or to the '
                "folder of a model"
            )
        phenotypes = sites[0].phenotypes
        if not config.learns and not phenotypes:
            raise ConfigError(
                "there is nothing to learn: the job has no [phenotypes] and no labels, "
                f"and representation = {config.model.representation!r} leaves stage 1 "
                "out"
            )
        questionable = sum(site.train.label_counts()["questionable"] for site in sites)
        least = max(config.least_questionable, 1)
        completed = for_names(
            config,
            [site.id for site in sites],
            space=sites[0].space,
            vectors=config.learns and sites[0].vectors is not None,
            phenotypes=phenotypes,
            questionable=tuple(
                name
                for name, patients in zip(
                    phenotypes, np.asarray(questionable), strict=True
                )
                if patients >= least
            ),
        )
        if config.privacy and config.privacy.counts and not counted(completed):
            raise ConfigError(
                "[privacy] counts: this job counts nothing: codes are given, no "
                "concept is weighed and no class: leave it out"
            )
        return completed

    def configure_alone(
        self, config: Config, sites: Sequence[SitePatients]
    ) -> tuple[Config, ...]:
        """Return each site's settings: the paper's single source.

        Raises:
            ConfigError: A site cannot be trained alone.
        """
        for site in sites:
            missing = _list_missing(config, site)
            if missing:
                raise ConfigError(
                    f"site {site.id!r} has {' and '.join(missing)}, so it cannot learn "
                    "alone: leave 'alone' out of conditions"
                )
        # Nothing leaves the site.
        alone = replace(config, min_patients=0, aggregation="mean")
        return (alone,) * len(sites)

    def configure_pooled(
        self,
        config: Config,
        sites: Sequence[SitePatients],
        complete: Sequence[SitePatients] | None,
    ) -> tuple[tuple[SitePatients, ...], Config]:
        """Return the settings of the paper's centralised training."""
        del complete
        pooled = replace(config, min_patients=0, aggregation="mean")
        return (pool_sites(sites),), pooled

    def plan_rounds(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the cycles of both stages, and the patients of each at all sites."""
        classifier_cycles = config.classifier_cycles if config.judges else 0
        return config.stage_1 + classifier_cycles, sum(sizes)

    def list_warnings(self, config: Config) -> tuple[str, ...]:
        """Warn of what robust aggregation, privacy and updates of concepts do not do."""
        warnings: list[str] = []
        if by_each(config) and config.phenotypes:
            warnings.append(
                "aggregation is of stage 1 alone: each disease's classifier is a sum "
                "over its patients, which a hostile site can move as far as it likes"
            )
        if config.privacy:
            unused = _list_unused_settings(config)
            if unused:
                warnings.append(
                    "[privacy] trains classifiers by training.learning_rate: "
                    f"{', '.join(unused)} of [model.classifier] do nothing"
                )
            return tuple(warnings)

        if config.learns:
            what = "an update of concept vectors"
        elif config.model.representation == "none":
            what = "a classifier of bags of concepts"
        else:
            return tuple(warnings)
        warnings.append(
            f"{what} tells which concepts the site's patients have: between hospitals "
            "run it under the secure sum (min_patients is the least behind an update)"
        )
        return tuple(warnings)

    def ends_with_one_model(self, config: Config) -> bool:
        """Return True: nothing is private."""
        del config
        return True

    def list_coverage(self, config: Config, site: SitePatients) -> tuple[Coverage, ...]:
        """Return how many held-out patients the calibration covers, if there is one."""
        if not (config.calibrate and site.phenotypes):
            return ()
        return (
            Coverage(
                what="the calibration",
                patients=len(site.valid.labelled()),
                kind="held-out patients with a label",
                remedy="hold out more patients, or set training.calibrate = false in "
                "the job",
            ),
        )

    def needs_each_update(self, config: Config) -> bool:
        """Return whether the aggregation of stage 1 looks at each site's update."""
        return by_each(config)


def _list_missing(config: Config, site: SitePatients) -> list[str]:
    """Return what a site lacks to be trained alone, in words."""
    missing = []
    if config.learns and not len(site.coded(site.train)):
        missing.append("no training patient with billing codes")
    elif config.learns and config.keep_cycle < 0 and not len(site.coded(site.valid)):
        missing.append(
            "no held-out patient with billing codes, by whom keep_cycle = -1 is chosen"
        )
    if config.phenotypes and not len(site.train.labelled()):
        missing.append("no training patient labelled for a phenotype")
    return missing


def _list_unused_settings(config: Config) -> list[str]:
    """Return the classifiers' settings that [privacy] does not use, if they were set."""
    classifier, default = config.model.classifier, SvmConfig()
    names = ("learning_rate", "eta0", "power_t", "alpha")
    return [n for n in names if getattr(classifier, n) != getattr(default, n)]


METHOD = Phenotype()
