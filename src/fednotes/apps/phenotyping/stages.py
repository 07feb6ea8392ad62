"""The two stages of phenotyping at a site: patients → codes, patients → phenotypes.

With representation = "attention", a tuned encoder learns either of them in one stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from fednotes.apps.phenotyping.classifiers import (
    INTERCEPT,
    LabelledFeatures,
    LinearSVMs,
    train_to_convergence,
)
from fednotes.apps.phenotyping.codes import make_output_labels
from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    QUESTIONABLE,
    Cohort,
    FeatureSpace,
    SitePatients,
)
from fednotes.apps.phenotyping.config import Config
from fednotes.apps.phenotyping.dan import KNOWN, Dan, DanConfig, take_rows
from fednotes.apps.phenotyping.label_attention import AttentionConfig, LabelAttention
from fednotes.apps.phenotyping.phenotyper import Phenotyper
from fednotes.core.counts import round_array, round_count, round_counts, scale_sum
from fednotes.core.seeds import Draws
from fednotes.core.settings import expand_path
from fednotes.core.tensors import require_tensor
from fednotes.core.update import Tensors, Update
from fednotes.methods.averaging import AveragingSite
from fednotes.metrics.classification import ClassCounts, measure_rankings
from fednotes.metrics.platt import compute_platt_sums
from fednotes.privacy.secure_sum.crypto import hash_parts
from fednotes.taggers.encoder_tagger import open_backbone
from fednotes.training.local_trainer import Optimizer, Step
from fednotes.training.row_adam import RowAdam
from fednotes.training.sites import RMSprop

# ---- one network for all sites of a process ------------------------------------------


def get_shared_network(
    config: DanConfig,
    space: FeatureSpace,
    outputs: int,
    *,
    known: np.ndarray | None,
    device: str,
) -> Dan:
    """Return a network that all sites of a process share.

    Sharing is possible because each task begins with the parameters of the server.

    Args:
        config: The settings of the network.
        space: The meaning of its inputs.
        outputs: The number of its outputs.
        known: As in `Dan`.
        device: A torch device.
    """
    known_bytes = None if known is None else known.astype(np.int64).tobytes()
    return _build_network(
        config,
        space.width,
        outputs,
        known=known_bytes,
        features=space.dense,
        device=device,
    )


def forget_shared_network() -> None:
    """Make the next call of `get_shared_network` build a new network."""
    _build_network.cache_clear()


@lru_cache(maxsize=1)
def _build_network(
    config: DanConfig,
    inputs: int,
    outputs: int,
    *,
    known: bytes | None,
    features: bool,
    device: str,
) -> Dan:
    """Return a network; `known` holds the int64 numbers of known concepts."""
    numbers = None
    if known is not None:
        numbers = np.frombuffer(bytearray(known), np.int64)
    network = Dan(config, inputs, outputs, known=numbers, features=features)
    return network.to(device)


def make_label_attention(
    config: AttentionConfig,
    space: FeatureSpace,
    labels: int,
    *,
    seed: int,
    device: str,
) -> LabelAttention:
    """Return a network of representation = "attention" at its first parameters.

    Args:
        config: The settings of the network.
        space: The meaning of its inputs; its recipe names the encoder.
        labels: The number of its outputs.
        seed: The seed of the first parameters.
        device: A torch device.
    """
    place = expand_path(str(space.recipe["encoder"]), "[text] encoder")
    backbone = open_backbone(place, device=device)
    return LabelAttention(config, backbone, labels, seed).to(device)


@lru_cache(maxsize=1)
def _share_label_attention(
    config: AttentionConfig, encoder: str, labels: int, device: str
) -> LabelAttention:
    """Return a network of representation = "attention" that sites share."""
    space = FeatureSpace(0, dense=True, recipe={"encoder": encoder})
    return make_label_attention(config, space, labels, seed=0, device=device)


# ---- stage 1 -------------------------------------------------------------------------


class OutputNetwork(Protocol):
    """A network that predicts codes or phenotypes: `Dan` or `LabelAttention`."""

    def make_network_input(self, patients: Any) -> Any:
        """Return patients in the network's input form."""

    def loss(self, patients: Any, labels: np.ndarray) -> Tensor:
        """Return the mean loss, (), over labelled pairs."""

    def predict_probabilities(self, patients: Any) -> np.ndarray:
        """Return (patients, outputs) float32 probabilities."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained and sent."""

    def train(self) -> object:
        """Turn dropout on."""

    def eval(self) -> object:
        """Turn dropout off."""


class CodedPatients(NamedTuple):
    """Patients whose codes are predicted.

    Attributes:
        network_input: The patients in the network's input form.
        labels: (patients, outputs) int8.
    """

    network_input: Any
    labels: np.ndarray


@dataclass(frozen=True)
class PatientBatch(Step):
    """Some patients, and the codes to predict for them.

    Attributes:
        network: The network that is trained.
        network_input: The patients in the network's input form.
        labels: (patients, outputs) int8.
    """

    network: OutputNetwork
    network_input: Any
    labels: np.ndarray

    @property
    def examples(self) -> int:
        """The number of patients."""
        return len(self.labels)

    def loss(self, batch: Sequence[PatientBatch]) -> Tensor:
        """Return this step's share of the mean loss over the batch's patients, ()."""
        share = self.examples / sum(part.examples for part in batch)
        return self.network.loss(self.network_input, self.labels) * share


class CodeLearner(AveragingSite):
    """Stage 1 at a site: its coded patients, and the tasks of averaging.

    Args:
        data: The patients of the site.
        config: The settings of the run.
        outputs: The categories of codes to predict.
        known: (known concepts,) int64 numbers of the concepts that have a vector of
            their own; None if all have.
        device: A torch device.
        draws: Random draws for orders and dropout.
        count_step: As in `AveragingSite`.

    Attributes:
        known: The known concepts as a tensor by name; empty if there is no list.
        network: The network that is trained.
        cohort: The patients to train on.
        train_data: These patients in the network's input form, with their codes.
        patients: n_k, the number of these patients.
    """

    def __init__(
        self,
        data: SitePatients,
        config: Config,
        outputs: Sequence[str],
        known: np.ndarray | None,
        *,
        device: str,
        draws: Draws,
        count_step: int = 1,
    ) -> None:
        self.data = data
        self.config = config
        self.outputs = tuple(outputs)
        self.known: Tensors = {} if known is None else {KNOWN: torch.from_numpy(known)}
        if config.privacy is not None:
            # In this case, each site needs its own network, because the parameters of
            # one stage persist between rounds of the other.
            forget_shared_network()
        self.network = self._get_network(known, device)
        self.cohort, labels = self.label_patients(data.train, data)
        self.train_data = CodedPatients(
            self.network.make_network_input(self.cohort.bags), labels
        )
        self.patients = len(labels)
        self._held_out: CodedPatients | None = None  # read at the first evaluation

        parameters = self.network.trainable()
        steps_over_rows = config.has_stage_1 and config.model.network.updates == "rows"
        # `RowAdam` does its own clipping.
        averaging = replace(config, clip=0.0) if steps_over_rows else config
        super().__init__(
            data.id,
            averaging,
            parameters,
            weight=self.patients,
            examples=self.patients,
            device=device,
            optimizer=_make_optimizer(config, parameters),
            draws=draws,
            count_step=count_step,
        )

    def _get_network(self, known: np.ndarray | None, device: str) -> OutputNetwork:
        """Return the network, which all sites of a process share."""
        model = self.config.model
        if self.config.has_attention:
            encoder = str(self.data.space.recipe["encoder"])
            return _share_label_attention(
                model.attention, encoder, len(self.outputs), device
            )
        return get_shared_network(
            model.network,
            self.data.space,
            len(self.outputs),
            known=known,
            device=device,
        )

    # Patients and their codes.

    def _read_patients(self, cohort: Cohort, site: SitePatients) -> CodedPatients:
        """Return the patients of a cohort in the network's input form."""
        cohort, labels = self.label_patients(cohort, site)
        return CodedPatients(self.network.make_network_input(cohort.bags), labels)

    def label_patients(
        self, cohort: Cohort, site: SitePatients
    ) -> tuple[Cohort, np.ndarray]:
        """Return patients whose outputs are known, and their labels.

        Args:
            cohort: Patients of a site.
            site: The site that has their codes.

        Returns:
            The coded patients, or only those with an output if the settings require it,
            and their (patients, outputs) int8 labels.
        """
        cohort = site.select_coded(cohort)
        labels = self.make_labels(cohort, site)
        if not self.config.require_output:
            return cohort, labels
        has_output = (labels == PRESENT).any(axis=1)
        return cohort.take(has_output), labels[has_output]

    def make_labels(self, cohort: Cohort, site: SitePatients) -> np.ndarray:
        """Return (patients, outputs) int8 labels, -1 for patients without codes."""
        return make_output_labels(
            cohort.patients,
            site.codes,
            self.outputs,
            whole_causes=self.config.whole_causes,
        )

    # Training.

    def get_received_tensors(self) -> Tensors:
        """Return the parameters that the server sent last, and the known concepts.

        Raises:
            TrainingError: Nothing has been sent since a restart.
        """
        return {**self._choose_parameters({}), **self.known}

    def iterate_steps(self, epoch: int, first: int = 0) -> Iterator[list[Step]]:
        """Yield the epoch's mini-batches, in an order drawn for this epoch."""
        self.network.train()
        rng = self.draws.rng_of("order", self.id, epoch)
        order = rng.permutation(self.patients)
        for start in range(first * self.share, len(order), self.share):
            rows = order[start : start + self.share]
            yield [
                self.select(rows[at : at + self._part_size])
                for at in range(0, len(rows), self._part_size)
            ]

    def select(self, rows: np.ndarray) -> PatientBatch:
        """Return some of the training patients, and the codes to predict for them."""
        network_input, labels = self.train_data
        return PatientBatch(self.network, take_rows(network_input, rows), labels[rows])

    # Evaluation.

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Return the sum of held-out cross-entropies, and its number of pairs.

        Args:
            tensors: The parameters to evaluate.
            cycle: Not used.
        """
        del cycle
        self.load(tensors)
        if self._held_out is None:
            self._held_out = self._read_patients(self.data.valid, self.data)
        scores = self._score(self._held_out)
        outputs = len(self.outputs)
        metrics = {
            "loss": scale_sum(scores.loss, scores.pairs, self.count_step, outputs),
            "pairs": float(round_count(scores.pairs, self.count_step, outputs)),
        }
        return Update(metrics=metrics)

    def finish(self, tensors: Tensors) -> Update:
        """Adopt the network that was kept."""
        self.load_kept(tensors)
        return Update()

    def make_model(self) -> Phenotyper:
        """Return the model, as it is saved."""
        space = self.data.space
        if isinstance(self.network, LabelAttention):
            return Phenotyper(space, code_names=self.outputs, attention=self.network)
        assert isinstance(self.network, Dan)
        return Phenotyper(space, self.network, code_names=self.outputs)

    def score_on(self, site: SitePatients) -> dict[str, Any]:
        """Return the loss and AUROC of codes for a site's test patients.

        Returns:
            The scores; empty if there are no such patients.
        """
        patients = self._read_patients(site.test, site)
        scores = self._score(patients)
        if not scores.pairs:
            return {}
        ranked = measure_rankings(
            patients.labels, scores.probabilities, self.outputs, samples=0
        )["macro"]
        return {
            "codes": {
                "loss": scores.loss / scores.pairs,
                "auroc": ranked["auroc"]["value"],
                "outputs": ranked["outputs"],
            }
        }

    def _score(self, patients: CodedPatients) -> _CodeScores:
        """Predict the codes of patients, and compare them with the billed ones."""
        self.network.eval()
        probabilities = self.network.predict_probabilities(patients.network_input)
        labels = patients.labels
        is_known = (labels == ABSENT) | (labels == PRESENT)
        p = probabilities[is_known].astype(np.float64).clip(1e-7, 1 - 1e-7)
        losses = -np.log(np.where(labels[is_known] == PRESENT, p, 1 - p))
        return _CodeScores(float(losses.sum()), int(is_known.sum()), probabilities)


class _CodeScores(NamedTuple):
    """Scores of predicted codes.

    Attributes:
        loss: The sum of cross-entropies.
        pairs: Its number of pairs of patient and code.
        probabilities: (patients, outputs) float32.
    """

    loss: float
    pairs: int
    probabilities: np.ndarray


def _make_optimizer(
    config: Config, parameters: Mapping[str, nn.Parameter]
) -> Optimizer | None:
    """Return the optimizer of stage 1; None for the default of averaging."""
    if config.optimizer == "rmsprop":
        return RMSprop(parameters, config.learning_rate)
    if config.has_stage_1 and config.model.network.updates == "rows":
        return RowAdam(parameters, config.learning_rate, config.clip)
    return None


# ---- phenotypes without a second stage -----------------------------------------------


class PhenotypeLearner(CodeLearner):
    """Learns phenotypes from words, with the labelled patients of a site.

    The label "questionable" is not learned, and counts as unlabelled.
    """

    def label_patients(
        self, cohort: Cohort, site: SitePatients
    ) -> tuple[Cohort, np.ndarray]:
        """Return the labelled patients, and their (patients, phenotypes) labels."""
        labelled = cohort.select_labelled()
        return labelled, self.make_labels(labelled, site)

    def make_labels(
        self,
        cohort: Cohort,
        site: SitePatients,  # noqa: ARG002 - those of codes need it
    ) -> np.ndarray:
        """Return the (patients, phenotypes) labels of patients."""
        return cohort.labels

    def make_model(self) -> Phenotyper:
        """Return the model, as it is saved."""
        assert isinstance(self.network, LabelAttention)
        return Phenotyper(
            self.data.space, phenotypes=self.outputs, attention=self.network
        )

    def score_on(self, site: SitePatients) -> dict[str, Any]:
        """Return scores on a site's test patients, as `Classifiers.score_on` does."""
        cohort, labels = self.label_patients(site.test, site)
        if not len(cohort):
            return {}
        model = self.make_model()
        predicted = model.predict(cohort.bags)
        present = predicted.probabilities[:, :, PRESENT]
        classes = _list_counted_classes(self.config, model.classes or ())
        counts = ClassCounts.of(labels, predicted.classes, self.outputs, classes)
        ranked = measure_rankings(labels, present, self.outputs, seed=self.config.seed)
        return _summarise(counts, ranked)


# ---- stage 2 -------------------------------------------------------------------------


class Classifiers:
    """Stage 2 at a site: features, computed once, and the classifiers of all diseases.

    Args:
        data: The patients of the site.
        config: The settings of the run.
        model: The model with its representation, to which the classifiers are added.
        svms: The classifiers.
        weights: (classifiers, 2) weights of negative and positive patients; 1 if None.
        draws: Random draws for orders.
        count_step: Counts leave the site as multiples of it.

    Attributes:
        train_data: Features and labels of the patients to train on.
        held_out_data: Features and labels of held-out patients.
        targets: (patients, classifiers) targets of `train_data`, as in `make_targets`.
    """

    def __init__(
        self,
        data: SitePatients,
        config: Config,
        model: Phenotyper,
        svms: LinearSVMs,
        *,
        weights: np.ndarray | None,
        draws: Draws,
        count_step: int = 1,
    ) -> None:
        self.id = data.id
        self.config = config
        self.model = model
        self.svms = svms
        self.weights = weights
        self.draws = draws
        self.count_step = count_step
        model.svms = svms
        self._train_cohort = data.train.select_labelled()
        self._held_out_cohort = data.valid.select_labelled()
        self.train_data = self._represent(self._train_cohort)
        self.held_out_data = self._represent(self._held_out_cohort)
        self.targets = svms.make_targets(self._train_cohort.labels)
        # (classifiers,) n_k of each
        self._patients = np.count_nonzero(self.targets, axis=0)
        # The digest is computed now, together with the features, because sites may
        # share a network.
        self._representation = self._digest_representation()

    @property
    def fewest_patients(self) -> int:
        """The smallest nonzero number of patients behind a classifier at this site.

        Each classifier leaves the site as a separate part of the update.
        """
        return min((int(number) for number in self._patients if number), default=0)

    @property
    def fewest_held_out(self) -> int:
        """The smallest nonzero number of held-out patients with a classifier's labels.

        Each classifier's sums leave the site as a separate part of the update, so the
        policy must hold for the part with the fewest patients.
        """
        # A target is 0 if the patient has no label for the classifier.
        targets = self.svms.make_targets(self.held_out_data.labels)
        numbers = np.count_nonzero(targets, axis=0)
        return min((int(number) for number in numbers if number), default=0)

    def _represent(self, cohort: Cohort) -> LabelledFeatures:
        """Return the features and labels of patients."""
        return LabelledFeatures(self.model.compute_features(cohort.bags), cohort.labels)

    def _digest_representation(self) -> str:
        """Return a digest of the representation that the classifiers read."""
        tensors: dict[str, Tensor] = {}
        if self.model.network is not None:
            tensors |= self.model.network.state()
        if self.model.idf is not None:
            tensors["idf"] = torch.from_numpy(self.model.idf)
        settings = (self.svms.classes, self.model.scale)
        return _digest_tensors(tensors, repr(settings))

    # Training.

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """Train the classifiers of a cycle, starting from those that the server sent.

        They are trained for `classifier_epochs` epochs of stochastic gradient descent,
        or to convergence if the settings require it.

        Args:
            tensors: The classifiers.
            cycle: The number of the cycle, from which the order of patients is derived.

        Returns:
            Each classifier times its number of training patients at this site, and
            these numbers, because patients without a label for a disease contribute
            nothing to its classifier.
        """
        self.svms.load(tensors)
        if self.svms.config.solver == "converged":
            loss, pairs = train_to_convergence(
                self.svms,
                self.train_data,
                self.held_out_data,
                weights=self.weights,
                C=self.svms.config.C,
            )
        else:
            loss, pairs = self._train_epochs(cycle)

        counts = round_array(self._patients.astype(np.float64), self.count_step)
        patients = torch.from_numpy(counts)
        # A float32 value times a count is exact in float64, so the mean over one site
        # is that site's own value.
        sums: dict[str, Tensor] = {
            name: value.double() * patients
            for name, value in self.svms.to_float32().items()
        }
        sums["patients"] = patients
        times = self._count_uses()
        metrics = {
            "loss": scale_sum(loss, pairs, self.count_step, times),
            "examples": float(round_count(pairs, self.count_step, times)),
        }
        return Update(sums, 1.0, metrics)

    def _count_uses(self) -> int:
        """Return how often a cycle uses a patient who is labelled for each disease."""
        epochs = self.config.classifier_epochs
        if self.svms.config.solver == "converged":
            epochs = 1
        return max(1, epochs * len(self.svms.classifiers))

    def _train_epochs(self, cycle: int) -> tuple[float, int]:
        """Train a cycle's epochs; return the sum of losses and its number of terms."""
        total_loss = 0.0
        total_pairs = 0
        epochs = self.config.classifier_epochs
        for epoch in range(cycle * epochs, (cycle + 1) * epochs):
            rng = self.draws.rng_of("phenotypes", self.id, epoch)
            order = rng.permutation(len(self._train_cohort))
            loss, pairs = self.svms.train_epoch(
                self.train_data.features,
                self.train_data.labels,
                order,
                weights=self.weights,
            )
            total_loss += loss
            total_pairs += pairs
        return total_loss, total_pairs

    def measure_patient_loss(self, tensors: Mapping[str, Tensor], row: int) -> Tensor:
        """Return the mean loss, (), of all labels of one training patient.

        The patient's representation is computed without any other patient.

        Args:
            tensors: Classifiers, as `LinearSVMs.to_float32` names them.
            row: The patient's row in `train_data`.
        """
        x = self.model.compute_features(self._train_cohort.bags.take([row]))
        values = torch.from_numpy(x.values).float()
        columns = torch.from_numpy(x.columns)
        # (classifiers,)
        score = values @ tensors["svm.weight"][columns] + tensors[INTERCEPT]
        sign = torch.from_numpy(self.targets[row]).float()
        if self.svms.config.loss == "log":
            losses = softplus(-sign * score)
        else:
            losses = relu(1 - sign * score)

        loss_weights = sign.abs()  # 0 for classifiers without a label
        if self.weights is not None:
            rows = np.arange(len(sign))
            of_class = self.weights[rows, (self.targets[row] > 0).astype(int)]
            loss_weights = loss_weights * torch.from_numpy(of_class).float()
        return (losses * loss_weights).sum() / sign.abs().sum().clamp(min=1)

    # Evaluation and calibration.

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Return counts of predictions for held-out patients of each class.

        Args:
            tensors: The classifiers to evaluate.
            cycle: Not used.
        """
        del cycle
        self.svms.load(tensors)
        predicted = self.svms.predict(self.held_out_data.features)
        counts = self._count_classes(self._held_out_cohort, predicted).to_metrics()
        return Update(metrics=round_counts(counts, self.count_step))

    def calibrate(self, tensors: Tensors) -> Update:
        """Return the sums of Platt scaling over the held-out patients.

        Args:
            tensors: The classifiers, and "platt", the scaling so far.
        """
        self.svms.load(tensors)
        platt = self._read_platt(tensors)
        scores = self.svms.score(self.held_out_data.features)
        targets = self.svms.make_targets(self.held_out_data.labels)
        if self.count_step == 1:
            sums = compute_platt_sums(platt, scores, targets)
        else:
            sums = self._compute_rounded_platt_sums(platt, scores, targets)
        return Update({"sums": torch.from_numpy(sums)}, 1.0)

    def _compute_rounded_platt_sums(
        self, platt: np.ndarray, scores: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """Return `compute_platt_sums`, scaled to the rounded numbers of patients.

        Each positive patient of a classifier counts reported / exact times, and so does
        each negative one. Like a loss (`scale_sum`), the sums have float32 precision.
        """
        parts: list[np.ndarray] = []
        for is_in_class in (targets > 0, targets < 0):
            exact = is_in_class.sum(axis=0)
            reported = round_array(exact.astype(np.float64), self.count_step)
            times = reported / np.maximum(exact, 1)
            sums = compute_platt_sums(platt, scores, np.where(is_in_class, targets, 0))
            parts.append(times[:, None] * sums)
        total = np.sum(parts, axis=0)
        return np.asarray(total.astype(np.float32), np.float64)

    def _read_platt(self, tensors: Tensors) -> np.ndarray:
        """Return the (classifiers, 2) scaling that the server sent."""
        count = len(self.svms.classifiers)
        return require_tensor(tensors, "platt", torch.float64, count, 2).numpy()

    def compute_fingerprint(self) -> str:
        """Return a digest of the classifiers and of the representation."""
        return _digest_tensors(self.svms.to_float32(), self._representation)

    # The end.

    def finish(self, tensors: Tensors) -> None:
        """Adopt the final classifiers."""
        self.svms.load(tensors)
        self.model.platt = self._read_platt(tensors) if "platt" in tensors else None

    def score_on(self, site: SitePatients) -> dict[str, Any]:
        """Return scores on a site's test patients.

        Patients are ranked by the classifiers' own scores, because probabilities are
        only for display.

        Returns:
            The scores; empty if no test patient is labelled.
        """
        cohort = site.test.select_labelled()
        if not len(cohort):
            return {}
        features, labels = self._represent(cohort)
        counts = self._count_classes(cohort, self.svms.predict(features))
        ranked = measure_rankings(
            labels,
            self.svms.score_for_ranking(features),
            self.config.phenotypes,
            seed=self.config.seed,
        )
        scores = _summarise(counts, ranked)

        is_known = (labels == ABSENT) | (labels == PRESENT)
        has_meaning = self.model.platt is not None or self.svms.config.loss == "log"
        if has_meaning and is_known.any():
            chances = self.svms.predict_probabilities(features, self.model.platt)
            present = chances[:, :, PRESENT][is_known]
            errors = (present - (labels[is_known] == PRESENT)) ** 2
            scores["calibration"] = {"brier": float(errors.mean())}
        return scores

    def _count_classes(self, cohort: Cohort, predicted: np.ndarray) -> ClassCounts:
        """Return counts of labels by predictions.

        They cover the same pairs of patient and disease, whatever this model has
        learned: questionable patients count if they are a class at this site or over
        all sites.
        """
        classes = _list_counted_classes(self.config, self.svms.classes)
        return ClassCounts.of(cohort.labels, predicted, self.config.phenotypes, classes)


def _list_counted_classes(
    config: Config, learned: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Return the classes of each disease whose test patients count.

    Args:
        config: The settings of the run.
        learned: The classes of each disease that the model has learned.
    """
    classes: list[tuple[int, ...]] = []
    for name, of_disease in zip(config.phenotypes, learned, strict=True):
        if QUESTIONABLE in of_disease or name in config.questionable:
            classes.append((ABSENT, PRESENT, QUESTIONABLE))
        else:
            classes.append((ABSENT, PRESENT))
    return classes


def make_empty_update(tensors: Tensors) -> Update:
    """Return the result of `Classifiers.train` for classifiers without any patient.

    Args:
        tensors: The classifiers that the server sent.
    """
    sums: dict[str, Tensor] = {
        name: torch.zeros_like(value, dtype=torch.float64)
        for name, value in tensors.items()
    }
    sums["patients"] = torch.zeros_like(sums[INTERCEPT])
    return Update(sums, 1.0, {"loss": 0.0, "examples": 0.0})


def _digest_tensors(tensors: Tensors, about: str) -> str:
    """Return a digest of tensors by their names, and of a text about them."""
    parts: list[str | bytes] = [about]
    for name, value in sorted(tensors.items()):
        parts += [name, value.detach().cpu().contiguous().numpy().tobytes()]
    return hash_parts(*parts).hex()


def _summarise(counts: ClassCounts, ranked: Mapping[str, Any]) -> dict[str, Any]:
    """Return one site's scores in the form that reports read.

    A disease whose test patients all have one class is left out of means: always
    predicting that class is correct without any learning.
    """
    informative_counts = ClassCounts(
        {
            name: table
            for name, table in counts.by_output.items()
            if (table.sum(1) > 0).sum() > 1
        }
    )
    scores = informative_counts.scores()
    macro = ranked["macro"]
    areas = {name: macro[name]["value"] for name in ("auroc", "auprc")}
    intervals = {
        f"{name}_interval": [macro[name]["low"], macro[name]["high"]] for name in areas
    }
    summary: dict[str, Any] = {}
    if informative_counts.by_output:
        summary["phenotypes"] = scores["macro"]
        summary["present"] = scores["present"]["macro"]
    summary["ranking"] = {**areas, **intervals, "outputs": macro["outputs"]}
    summary["by_output"] = {
        name: {**of_output, **{n: ranked["by_output"][name][n] for n in areas}}
        for name, of_output in scores["by_output"].items()
    }
    summary["class_counts"] = informative_counts.to_metrics()
    return summary
