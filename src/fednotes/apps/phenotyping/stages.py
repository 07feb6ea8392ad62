"""The two stages of phenotyping at a site, patients → codes and patients → phenotypes;
settings."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import relu, softplus

from fednotes.apps.phenotyping.classifiers import (
    LabelledPatients,
    LinearSVMs,
    fit,
    inverse_document_frequencies,
)
from fednotes.apps.phenotyping.codes import (
    categories_of_job,
    category,
    choose,
    output_matrix,
    public_categories,
)
from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    QUESTIONABLE,
    Bags,
    Cohort,
    FeatureSpace,
    SitePatients,
)
from fednotes.apps.phenotyping.dan import KNOWN, Dan, DanConfig, Mixtures
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig, Phenotyper
from fednotes.core.counts import round_array, round_count, round_counts, scale_sum
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.seeds import Draws
from fednotes.core.settings import FilledIn, checked
from fednotes.core.tensors import require_tensor
from fednotes.core.update import Tensors, Update
from fednotes.methods.averaging import Averaging, AveragingSite
from fednotes.metrics.classification import ClassCounts, rankings
from fednotes.metrics.platt import platt_sums
from fednotes.privacy.promise import Privacy
from fednotes.privacy.secure_sum.crypto import digest
from fednotes.training.local_trainer import Optimizer, Step
from fednotes.training.row_adam import RowAdam
from fednotes.training.sites import Count, Number, Part, Rate, RMSprop, Size

PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    files("fednotes.apps.phenotyping").joinpath("phenotype.toml").read_text("utf-8")
)
Read = Mixtures | np.ndarray
# of a class, or a concept, that is agreed on; the least is 1 / MOST_WEIGHT
MOST_WEIGHT = 1e6


@checked(frozen=True)
class Config(Averaging):
    """Settings of phenotyping. Cycles, batches and learning rates are those of stage 1.

    Attributes:
        classifier_cycles: T', the number of cycles of stage 2.
        classifier_epochs: Epochs of every classifier at each site in a cycle of stage
            2.
        systems: Coding systems whose categories are candidates for the outputs of stage
            1.
        outputs: Categories of codes that are the outputs of stage 1, in place of
            `systems` and `minimum`. OMOP concepts need it, because they have no public
            list.
        minimum: Number of patients over all sites from which a category of codes
            becomes an output.
        whole_causes: Whether categories of ICD-9 external causes have four characters,
            as in the code book, in place of three (`apps/phenotyping/codes.py`).
        least_questionable: Number of patients over all sites from which "questionable"
            is a class of a disease.
        calibrate: Whether probabilities are fitted to held-out patients (Platt scaling,
            by sums alone).
        least_occurrences: Number of occurrences in the training notes of all sites from
            which a concept has a vector of its own; all other concepts share one. 0
            gives each concept of the dictionary its own. Under [privacy] it counts
            patients who have the concept, with noise.
        require_output: Whether patients without any output are left out of stage 1.
        optimizer: Optimizer of stage 1 at the sites; "rmsprop" is that of Keras and
            needs model.network.updates = "dense".
        min_patients: Smallest number of patients behind an update of the concepts'
            vectors, or of classifiers of the concepts themselves, since such an update
            tells which concepts the patients have.
        model: The model's settings.
        space, phenotypes: What the sites hold. A job fills them in.
        questionable: Phenotypes for which the sites together make "questionable" a
            class, as far as that is known before training. A job fills it in.
        vectors: Whether the sites have public vectors of concepts, from which stage 1
            starts. A job fills it in.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    cycles: Count = 10
    batch_size: Count = 50
    learning_rate: Rate = 1e-3
    warmup: Part = 0.0
    decay: Literal["linear", "constant"] = "constant"
    weight_decay: Size = 0.0
    clip: Size = 0.0
    classifier_cycles: Count = 20
    classifier_epochs: Count = 1
    systems: tuple[str, ...] = ("icd9", "icd9proc", "cpt")
    outputs: tuple[str, ...] = ()
    minimum: Count = 1001
    whole_causes: bool = False
    least_questionable: Number = 20
    calibrate: bool = False
    least_occurrences: Number = 0
    require_output: bool = False
    optimizer: Literal["adam", "rmsprop"] = "adam"
    min_patients: Number = 50
    model: FilledIn[PhenotypeConfig] = field(default_factory=PhenotypeConfig)
    space: FilledIn[FeatureSpace] = field(default_factory=lambda: FeatureSpace(0))
    phenotypes: FilledIn[tuple[str, ...]] = ()
    questionable: FilledIn[tuple[str, ...]] = ()
    vectors: FilledIn[bool] = False
    privacy: FilledIn[Privacy | None] = None
    min_sites: FilledIn[int] = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no run can have."""
        super().__post_init__()
        own, privacy = self.model.classifier, self.privacy
        if privacy and privacy.unit != "patient":
            raise ConfigError(
                f'[privacy] unit = "{privacy.unit}": an example is all that a patient has: set '
                'unit = "patient"'
            )
        if privacy and (
            own.solver != "sgd"
            or self.model.representation not in ("learn", "none")
            or (self.learns and (self.model.network.length or self.vectors))
        ):
            raise ConfigError(
                "[privacy] takes no representation that was learnt before, and no solution: set "
                'model.representation = "learn" or "none", model.classifier.solver = "sgd" and '
                "model.network.length = 0, and leave out [concepts] vectors"
            )
        counts = own.class_weights != "none" or (
            self.learns and (self.least_occurrences or not self.outputs)
        )
        if privacy and counts and not privacy.counts:
            raise ConfigError(
                "[privacy]: which codes are predicted, which concepts have a vector and what a "
                "class weighs would be told by exact counts of patients: set privacy.counts, by "
                "which they have noise; or give training.outputs, the categories of codes, set "
                'training.least_occurrences = 0 and model.classifier.class_weights = "none"'
            )
        if self.model.network.updates == "rows" and (
            self.proximal or self.weight_decay
        ):
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
            return categories_of_job(self.outputs, whole_causes=self.whole_causes)
        return public_categories(self.systems, whole_causes=self.whole_causes)

    @property
    def judges(self) -> bool:
        """Whether stage 2 runs; before sites have told what they hold, it may."""
        return bool(self.phenotypes) or not self.space.width

    @property
    def stage_1(self) -> int:
        """Cycles of stage 1."""
        return self.last_cycle if self.learns else 0


# ---- counts with noise ---------------------------------------------------------------


def counted(config: Config) -> dict[str, int]:
    """What patients are counted by under `Privacy.counts`, and how many numbers that
    is."""
    if not config.space.width:  # what sites hold is not known yet
        return {"patients": 1}
    size, own = len(config.phenotypes), dict[str, int]()
    if config.learns and not config.outputs:
        own["codes"] = len(config.candidates)
    if not config.space.dense and (config.least_occurrences or not config.learns):
        own |= {"concepts": config.space.width, "patients": 1}
    if config.model.classifier.class_weights == "balanced" and size:
        own |= {"absent": size, "present": size}
    return own


def own_counts(
    data: SitePatients, config: Config, rows: np.ndarray, places: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """What one patient counts, 1 for each thing that the patient has: their places, and
    ones.

    rows: of the training patients, all of one. places: of the candidates.
    """
    whole, labels = config.whole_causes, data.train.labels[rows]
    names = {
        category(c, whole_causes=whole)
        for at in rows
        for c in data.codes.get(data.train.patients[at], ())
    }
    bags = data.train.bags.take(rows)
    has: dict[str, Any] = {
        "codes": [places[name] for name in names if name in places],
        "concepts": np.unique(bags.concepts) if isinstance(bags, Bags) else [],
        "patients": [0],
        "absent": np.flatnonzero((labels == ABSENT).any(0)),
        "present": np.flatnonzero((labels == PRESENT).any(0)),
    }
    sizes = counted(config)
    first = np.cumsum([0, *sizes.values()])
    found = [
        at + np.array(has[name], np.int64)
        for at, name in zip(first, sizes, strict=False)
    ]
    return np.concatenate(found), np.ones(sum(map(len, found)))


def agreed(config: Config, counts: np.ndarray, deviation: float) -> Tensors:
    """What both stages begin with, of all sites' counts, each with noise of this
    deviation.

    Raises DataError where no code, or no concept, is frequent enough.
    """
    sizes = counted(config)
    of = dict(
        zip(sizes, np.split(counts, np.cumsum([*sizes.values()])[:-1]), strict=True)
    )
    told = dict[str, Tensor]()
    if "codes" in of:
        told["chosen"] = places_of(frequent_codes(of["codes"], config), config)
    if "concepts" in of and config.learns:
        told[KNOWN] = frequent(
            torch.from_numpy(of["concepts"]), config.least_occurrences
        )
    elif "concepts" in of:
        patients = max(1, round(float(of["patients"][0])))
        told["idf"] = torch.from_numpy(
            inverse_document_frequencies(of["concepts"].clip(0, patients), patients)
        )
    if "present" in of:
        # A count is as small as its noise, at least: who has one patient would weigh
        # anything.
        table = np.stack(
            [of["absent"], of["present"], np.zeros_like(of["absent"])], axis=1
        )
        classes = [(ABSENT, PRESENT)] * len(config.phenotypes)
        machines = LinearSVMs(classes, 1, config.model.classifier)
        told["weights"] = torch.from_numpy(
            machines.balance_classes(table.clip(max(1.0, deviation)))
        )
    return told


def require_agreed(config: Config, given: Tensors, site: str) -> None:
    """Raises RefusedError for what `agreed` cannot have said."""
    sizes, machines = counted(config), len(config.phenotypes)
    told = {"chosen": "codes" in sizes, KNOWN: "concepts" in sizes and config.learns}
    told |= {
        "idf": "concepts" in sizes and not config.learns,
        "weights": "present" in sizes,
    }
    numbers = {"idf": (config.space.width,), "weights": (machines, 2)}
    fits = given.keys() == {name for name, there in told.items() if there} and all(
        value.dtype == torch.float64
        and value.shape == numbers[name]
        and bool(((value > 1 / MOST_WEIGHT) & (value < MOST_WEIGHT)).all())
        for name, value in given.items()
        if name in numbers
    )
    if not fits:
        raise RefusedError(
            f"site {site!r}: what came is not what noisy counts of this job say"
        )


def frequent_codes(counts: np.ndarray, config: Config) -> tuple[str, ...]:
    """The outputs: of the candidates those that enough patients have.

    Raises DataError for none.
    """
    often = dict(
        zip(config.candidates, counts.round().astype(int).tolist(), strict=True)
    )
    return choose(often, config.minimum)


def places_of(names: Sequence[str], config: Config) -> Tensor:
    """(names,) int64: indices into the candidates, as sites are told outputs."""
    at = {name: place for place, name in enumerate(config.candidates)}
    return torch.tensor([at[name] for name in names])


def frequent(counts: Tensor, least: int) -> Tensor:
    """(concepts,) int64, rising: those that are counted so often, which have their own
    vector.

    Raises TrainingError where no concept is.
    """
    known = torch.nonzero(counts.round() >= least).flatten()
    if not len(known):
        raise TrainingError(
            f"no concept occurs {least:,} times in the training notes of all "
            f"sites (the most frequent one: {int(counts.max()):,}): lower least_occurrences"
        )
    return known


def shared_network(
    config: DanConfig,
    space: FeatureSpace,
    outputs: int,
    known: np.ndarray | None,
    device: str,
) -> Dan:
    """One network for all the sites of a process: every task begins with the server's."""
    told = None if known is None else known.astype(np.int64).tobytes()
    return _network(config, space.width, outputs, told, space.dense, device)


@lru_cache(maxsize=1)
def _network(
    config: DanConfig,
    inputs: int,
    outputs: int,
    known: bytes | None,
    dense: bool,
    device: str,
) -> Dan:
    given = None if known is None else np.frombuffer(bytearray(known), np.int64)
    return Dan(config, inputs, outputs, known=given, features=dense).to(device)


@dataclass(frozen=True)
class _Patients(Step):
    """Some patients and the codes to predict for them."""

    network: Dan
    read: Read
    labels: np.ndarray

    @property
    def examples(self) -> int:
        return len(self.labels)

    def loss(self, batch: Sequence[_Patients]) -> Tensor:
        """Patients count alike in the whole batch."""
        share = self.examples / sum(part.examples for part in batch)
        return self.network.loss(self.read, self.labels) * share


class CodeLearner(AveragingSite):
    """Stage 1 at a site: its coded patients and the tasks of averaging.

    known: the concepts that have a vector of their own; None: all.
    """

    def __init__(
        self,
        data: SitePatients,
        config: Config,
        outputs: Sequence[str],
        known: np.ndarray | None,
        device: str,
        draws: Draws,
        count_step: int = 1,
    ) -> None:
        self.data, self.config, self.outputs = data, config, tuple(outputs)
        self.known: Tensors = {} if known is None else {KNOWN: torch.from_numpy(known)}
        settings = config.model.network
        if config.privacy is not None:
            # each site has one of its own, whose parameters rest apart
            _network.cache_clear()
        self.network = shared_network(settings, data.space, len(outputs), known, device)
        self.cohort = self._predicted(data.coded(data.train), data)[0]
        self._read, self._labels = self._taken(self.cohort, data)
        self.patients = len(self._labels)  # n_k
        parameters, rows = self.network.trainable(), settings.updates == "rows"
        optimizer: Optimizer | None = None  # averaging's own
        if config.optimizer == "rmsprop":
            optimizer = RMSprop(parameters, config.learning_rate)
        elif rows:
            optimizer = RowAdam(parameters, config.learning_rate, config.clip)
        super().__init__(
            data.id,
            replace(config, clip=0.0) if rows else config,
            parameters,
            weight=self.patients,
            examples=self.patients,
            device=device,
            optimizer=optimizer,
            draws=draws,
            count_step=count_step,
        )

    @property
    def told(self) -> Tensors:
        """The parameters that the server sent last, and which concepts are known."""
        return {**self._received({}), **self.known}

    def _taken(self, cohort: Cohort, site: SitePatients) -> tuple[Read, np.ndarray]:
        """Patients as the network reads them, and their labels (patients, outputs)
        int8."""
        cohort, labels = self._predicted(cohort, site)
        return self.network.read(cohort.bags), labels

    def _predicted(
        self, cohort: Cohort, site: SitePatients
    ) -> tuple[Cohort, np.ndarray]:
        whole = self.config.whole_causes
        labels = output_matrix(
            cohort.patients, site.codes, self.outputs, whole_causes=whole
        )
        if not self.config.require_output:
            return cohort, labels
        some = (labels == PRESENT).any(axis=1)
        return cohort.take(some), labels[some]

    @cached_property
    def _held_out(self) -> tuple[Read, np.ndarray]:
        """The validation patients: judged in every cycle, read once."""
        return self._taken(self.data.valid, self.data)

    def steps(self, epoch: int, first: int = 0) -> Iterator[list[Step]]:
        """The epoch's mini-batches, in an order of its own."""
        size, part = self.share, self._part_size
        self.network.train(True)
        order = self.draws.rng_of("order", self.id, epoch).permutation(
            len(self._labels)
        )
        for start in range(first * size, len(order), size):
            rows = order[start : start + size]
            yield [self.some(rows[at : at + part]) for at in range(0, len(rows), part)]

    def some(self, rows: np.ndarray) -> _Patients:
        """These patients and the codes to predict for them."""
        read = self._read
        chosen = read.take(rows) if isinstance(read, Mixtures) else read[rows]
        return _Patients(self.network, chosen, self._labels[rows])

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Sum of cross-entropies over held-out pairs of patient and code, and their
        number."""
        self.load(tensors)
        loss, pairs, _ = self._judge(*self._held_out)
        metrics = {
            "loss": scale_sum(loss, pairs, self.count_step),
            "pairs": float(round_count(pairs, self.count_step)),
        }
        return Update(metrics=metrics)

    def finish(self, tensors: Tensors) -> Update:
        """Take the network that was kept."""
        self.load_kept(tensors)
        return Update()

    def scores_on(self, site: SitePatients) -> dict[str, Any]:
        """Loss and AUROC of the codes of a site's test patients; empty without any."""
        read, labels = self._taken(site.test, site)
        loss, pairs, predicted = self._judge(read, labels)
        if not pairs:
            return {}
        ranked = rankings(labels, predicted, self.outputs, samples=0)["macro"]
        area = ranked["auroc"]["value"]
        return {
            "codes": {"loss": loss / pairs, "auroc": area, "outputs": ranked["outputs"]}
        }

    def _judge(self, read: Read, labels: np.ndarray) -> tuple[float, int, np.ndarray]:
        """Σ cross-entropy, over how many pairs; (patients, outputs) probabilities."""
        self.network.train(False)
        predicted = self.network.probabilities(read)
        known = (labels == ABSENT) | (labels == PRESENT)
        p = np.clip(predicted[known].astype(np.float64), 1e-7, 1 - 1e-7)
        loss = -np.log(np.where(labels[known] == PRESENT, p, 1 - p)).sum()
        return float(loss), int(known.sum()), predicted


class Classifiers:
    """Stage 2 at a site: features computed once, and the machines of all diseases."""

    def __init__(
        self,
        data: SitePatients,
        config: Config,
        model: Phenotyper,
        machines: LinearSVMs,
        weights: np.ndarray | None,
        draws: Draws,
        count_step: int = 1,
    ) -> None:
        self.draws = draws
        self.count_step = count_step
        self.id, self.config, self.model, self.machines = (
            data.id,
            config,
            model,
            machines,
        )
        model.machines, self._weights = machines, weights
        self._train, self._valid = data.train.labelled(), data.valid.labelled()
        self._features = model.features(self._train.bags)
        self._held_out = model.features(self._valid.bags)
        # taken together with the features, because sites may share a network
        representation = {} if model.network is None else model.network.state()
        if model.idf is not None:
            representation["idf"] = torch.from_numpy(model.idf)
        self._representation = _digest_of(
            representation, repr((machines.classes, model.scale))
        )
        self._targets = machines.make_targets(self._train.labels)
        # (machines,) n_k of each
        self._patients = np.count_nonzero(self._targets, axis=0)

    def loss(self, weights: Mapping[str, Tensor], row: int) -> Tensor:
        """The mean loss of all labels of one patient, by machines that are tensors;
        what represents the patient is computed without any other one."""
        x, settings = (
            self.model.features(self._train.bags.take([row])),
            self.machines.config,
        )
        values, columns = (
            torch.from_numpy(x.values).float(),
            torch.from_numpy(x.columns),
        )
        # (machines,)
        score = values @ weights["svm.weight"][columns] + weights["svm.intercept"]
        sign = torch.from_numpy(self._targets[row]).float()
        each = (
            softplus(-sign * score)
            if settings.loss == "log"
            else relu(1 - sign * score)
        )
        counted = sign.abs()  # (machines,)
        if self._weights is not None:
            of = self._weights[
                np.arange(len(sign)), (self._targets[row] > 0).astype(int)
            ]
            counted = counted * torch.from_numpy(of).float()
        return (each * counted).sum() / sign.abs().sum().clamp(min=1)

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """`classifier_epochs` epochs of stochastic gradient descent from the given
        machines; or the solutions, where the classifiers are the reference that is
        fitted to its end.

        Returns each machine times the number of patients it was trained on here, and
            that
        number: patients without a label of a disease say nothing of its classifier.
        """
        config, labels, loss, pairs = self.config, self._train.labels, 0.0, 0
        self.machines.load(tensors)
        if self.machines.config.solver == "converged":
            loss, pairs = fit(
                self.machines,
                LabelledPatients(self._features, labels),
                LabelledPatients(self._held_out, self._valid.labels),
                weights=self._weights,
                C=self.machines.config.C,
            )
        else:
            for local in range(config.classifier_epochs):
                epoch = cycle * config.classifier_epochs + local
                rng = self.draws.rng_of("phenotypes", self.id, epoch)
                order = rng.permutation(len(self._train))
                found = self.machines.train_epoch(
                    self._features, labels, order, self._weights
                )
                loss, pairs = loss + found[0], pairs + found[1]
        counts = round_array(self._patients.astype(np.float64), self.count_step)
        patients = torch.from_numpy(counts)
        # A float32 value times a count is exact in float64: one site's mean is its own
        # value.
        sent = {
            n: value.double() * patients
            for n, value in self.machines.to_float32().items()
        }
        metrics = {
            "loss": scale_sum(loss, pairs, self.count_step),
            "examples": float(round_count(pairs, self.count_step)),
        }
        return Update({**sent, "patients": patients}, 1.0, metrics)

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """How held-out patients of each class are predicted, as counts."""
        self.machines.load(tensors)
        predicted = self.machines.predict(self._held_out)
        counts = self._counts(self._valid, predicted).to_metrics()
        return Update(metrics=round_counts(counts, self.count_step))

    def calibrate(self, tensors: Tensors) -> Update:
        """What Platt scaling needs of the held-out patients."""
        self.machines.load(tensors)
        scores = self.machines.scores(self._held_out)
        targets = self.machines.make_targets(self._valid.labels)
        if self.count_step == 1:
            sums = platt_sums(self._platt(tensors), scores, targets)
        else:
            sums = self._rounded_platt_sums(self._platt(tensors), scores, targets)
        return Update({"sums": torch.from_numpy(sums)}, 1.0)

    def fingerprint(self) -> str:
        """Return a digest of the classifiers, and of what represents a patient to
        them."""
        return _digest_of(self.machines.to_float32(), self._representation)

    def _rounded_platt_sums(
        self, platt: np.ndarray, scores: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """Return `platt_sums` as if each machine's positive patients were as many as is
        reported of them, and so its negative ones: each patient counts reported / exact
        times.

        Like a loss (`scale_sum`) the sums have the precision of float32.
        """
        parts = []
        for of_class in (targets > 0, targets < 0):
            exact = of_class.sum(axis=0)
            reported = round_array(exact.astype(np.float64), self.count_step)
            times = reported / np.maximum(exact, 1)
            sums = platt_sums(platt, scores, np.where(of_class, targets, 0))
            parts.append(times[:, None] * sums)
        sums = np.sum(parts, axis=0)
        return np.asarray(sums.astype(np.float32), np.float64)

    def finish(self, tensors: Tensors) -> None:
        """Take the final machines."""
        self.machines.load(tensors)
        self.model.platt = self._platt(tensors) if "platt" in tensors else None

    def _platt(self, tensors: Tensors) -> np.ndarray:
        return require_tensor(
            tensors, "platt", torch.float64, len(self.machines.machines), 2
        ).numpy()

    def scores_on(self, site: SitePatients) -> dict[str, Any]:
        """Scores on a site's test patients; empty without labelled ones.

        Patients are ranked by the machines' own scores: probabilities are for people.
        """
        cohort = site.test.labelled()
        if not len(cohort):
            return {}
        features = self.model.features(cohort.bags)
        counts = self._counts(cohort, self.machines.predict(features))
        scores = self.machines.ranking(features)
        ranked = rankings(
            cohort.labels, scores, self.config.phenotypes, seed=self.config.seed
        )
        found = _scores(counts, ranked)
        known = (cohort.labels == ABSENT) | (cohort.labels == PRESENT)
        calibrated = self.model.platt is not None or self.machines.config.loss == "log"
        if calibrated and known.any():
            chances = self.machines.probabilities(features, self.model.platt)[
                :, :, PRESENT
            ]
            error = (chances[known] - (cohort.labels[known] == PRESENT)) ** 2
            found["calibration"] = {"brier": float(error.mean())}
        return found

    def _counts(self, cohort: Cohort, predicted: np.ndarray) -> ClassCounts:
        """Labels against predictions, over the same pairs whatever this model has
        learnt.

        Questionable patients count where they are a class: here, or for all sites
        together.
        """
        config = self.config
        classes = [
            (ABSENT, PRESENT, QUESTIONABLE)
            if QUESTIONABLE in own or name in config.questionable
            else (ABSENT, PRESENT)
            for name, own in zip(config.phenotypes, self.machines.classes, strict=True)
        ]
        return ClassCounts.of(cohort.labels, predicted, config.phenotypes, classes)


def _digest_of(tensors: Tensors, about: str) -> str:
    """Return a digest of tensors by their names, and of a text about them."""
    parts: list[str | bytes] = [about]
    for name, value in sorted(tensors.items()):
        parts += [name, value.detach().cpu().contiguous().numpy().tobytes()]
    return digest(*parts).hex()


def _scores(counts: ClassCounts, ranked: Mapping[str, Any]) -> dict[str, Any]:
    """One site's scores, as the report reads them.

    A disease whose test patients are all of one class is in no mean: who calls all of
    them so is right without having learnt anything.
    """
    told = ClassCounts(
        {
            name: table
            for name, table in counts.by_output.items()
            if (table.sum(1) > 0).sum() > 1
        }
    )
    scores, macro = told.scores(), ranked["macro"]
    areas = {name: macro[name]["value"] for name in ("auroc", "auprc")}
    bounds = {f"{n}_interval": [macro[n]["low"], macro[n]["high"]] for n in areas}
    by_output = {
        name: {**of, **{n: ranked["by_output"][name][n] for n in areas}}
        for name, of in scores["by_output"].items()
    }
    means = {"phenotypes": scores["macro"], "present": scores["present"]["macro"]}
    return {
        **(means if told.by_output else {}),
        "ranking": {**areas, **bounds, "outputs": macro["outputs"]},
        "by_output": by_output,
        "class_counts": told.to_metrics(),
    }
