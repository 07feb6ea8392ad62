"""Two-stage phenotyping: the method, and the server side of its algorithm.

Dianbo Liu, Dmitriy Dligach and Timothy Miller (2019), "Two-stage federated phenotyping
and patient representation learning", Algorithm 1.

    paper       here
    t           `Server.round` in stage 1, the round's number in stage 2
    T, T'       `Config.cycles`, `Config.classifier_cycles`
    K, K'       the sites of the federation; those without patients of a stage have
                weight 0 in it
    n_k         patients: of stage 1, with codes; of stage 2, labelled for that disease
    N           `Total.weight`; in stage 2 the sum "patients"
    M           the outputs of stage 1, agreed by `agree_on_outputs`
    W_k^t       what a site returns from "train"
    f           `dan.Dan` in stage 1, `classifiers.LinearSVMs` in stage 2

Stage 1 predicts billing codes from concepts. It is left out if `representation` names a
model or is "none". Stage 2 trains the classifiers of all diseases on the values of the
dense layer. Without phenotypes, a run ends with stage 1.

If `representation` is "attention", an encoder is tuned instead of both stages
(`label_attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fednotes.apps.phenotyping.classifiers import (
    CLASSES,
    INTERCEPT,
    LinearSVMs,
    SvmConfig,
    agree_on_classes,
    compute_idf,
)
from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    SitePatients,
    pool_sites,
    require_alike,
)
from fednotes.apps.phenotyping.config import PRESETS, Config
from fednotes.apps.phenotyping.counting import (
    agree_from_counts,
    choose_codes,
    choose_known_concepts,
    compute_count_sizes,
    count_patient,
    find_candidates,
    require_agreement,
)
from fednotes.apps.phenotyping.dan import CHOSEN, KNOWN, Dan
from fednotes.apps.phenotyping.phenotyper import (
    PhenotypeConfig,
    is_phenotyper,
    load_phenotyper,
)
from fednotes.apps.phenotyping.site import NETWORK, Site
from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.federation import Coverage, Federation, State
from fednotes.core.settings import build
from fednotes.core.tensors import (
    add_prefix,
    list_shapes,
    require_tensor,
    restoring,
    select_prefix,
)
from fednotes.core.update import Tensors, Total, require_metrics
from fednotes.methods.averaging import (
    BEST,
    KEEP_BEST,
    AveragingWithDP,
    Server,
    run_cycles,
)
from fednotes.methods.base import Method
from fednotes.metrics.classification import ClassCounts
from fednotes.metrics.platt import PLATT_SUMS, fit_platt
from fednotes.privacy.promise import Unit
from fednotes.privacy.secure_sum.crypto import hash_parts
from fednotes.privacy.units import make_unit_key
from fednotes.training.server_steps import (
    fill_in_sites,
    needs_each_update,
    sum_or_combine,
)

__all__ = ["METHOD", "Config", "Phenotype", "PhenotypeWithDP", "Site", "train"]

# Names of the counts of "count_labels", in the order of CLASSES.
LABEL_NAMES: Final = ("absent", "present", "questionable")


# ---- server --------------------------------------------------------------------------


def train(federation: Federation, config: Config) -> State:
    """Run Algorithm 1: learn a representation of patients, then classify diseases.

    Args:
        federation: The sites.
        config: The settings of the run.

    Returns:
        The server's last state.
    """
    resumed = federation.resume()
    if config.has_attention:
        return _tune_encoder(federation, config, resumed)
    if config.has_stage_1:
        representation = _train_network(federation, config, resumed)
    else:
        representation = _load_representation(config)
    if not config.phenotypes:
        return representation

    is_in_stage_2 = resumed is not None and _read_stage(resumed) == 2
    sites_have_network = config.has_stage_1 and not is_in_stage_2
    network = {} if sites_have_network else representation.tensors
    return _train_classifiers(
        federation,
        config,
        network=network,
        representation=representation,
        resumed=resumed,
    )


def _read_stage(state: State) -> int:
    """Return the stage, 1 or 2, in which a state was saved."""
    return state.fact("stage", int)


# ---- stage 1 -------------------------------------------------------------------------


def agree_on_outputs(federation: Federation, config: Config) -> tuple[str, ...]:
    """Return the categories of codes that enough patients across all sites have.

    Sites count over a public list, so the sum reveals no category that only one site
    has.
    """
    total = federation.sum("count_codes")
    total.require({"patients": (len(config.list_candidates()),)})
    return choose_codes(total.tensors["patients"].numpy(), config)


def agree_on_known_concepts(federation: Federation, config: Config) -> Tensor | None:
    """Return the concepts that occur often enough to have a vector of their own.

    Returns:
        (known,) int64 numbers, ascending. None if the job does not require it, or
        patients are vectors of text.

    Raises:
        TrainingError: No concept is frequent enough.
    """
    if not config.least_occurrences or config.space.dense:
        return None
    total = federation.sum("count_concepts")
    total.require({"occurrences": (config.space.width,)})
    return choose_known_concepts(total.tensors["occurrences"], config.least_occurrences)


class _CodeServer(Server):
    """Averages the network; its state also has the outputs and the known concepts."""

    outputs: tuple[str, ...]
    known: Tensors

    def state(self) -> State:
        """Return everything that the next cycle depends on."""
        state = super().state()
        facts = {**state.facts, "stage": 1, "outputs": list(self.outputs)}
        return replace(state, tensors={**state.tensors, **self.known}, facts=facts)


def _train_network(
    federation: Federation, config: Config, resumed: State | None
) -> State:
    """Run stage 1; return its network and outputs for stage 2."""
    if resumed is not None and _read_stage(resumed) == 2:
        network = select_prefix(NETWORK, resumed.tensors)
        facts = {"outputs": resumed.fact("outputs", list)}
        return State(config.last_cycle, add_prefix(NETWORK, network), facts)

    known: Tensors
    if resumed is None:
        outputs, known = _begin_network(federation, config)
    else:
        outputs = tuple(resumed.fact("outputs", list))
        tensors = dict(resumed.tensors)
        known = {KNOWN: tensors.pop(KNOWN)} if KNOWN in tensors else {}
        resumed = replace(resumed, tensors=tensors)
    parameters = make_initial_parameters(config, len(outputs), known.get(KNOWN))
    if config.vectors and resumed is None:
        total = _combine_first_parameters(federation, config, "first_vectors", known)
        total.require({"embedding": tuple(parameters["embedding"].shape)})
        parameters |= total.mean()

    server = _CodeServer(config, parameters, summarise_held_out, resumed)
    server.outputs = outputs
    server.known = known
    run_cycles(federation, server)  # [phenotype algorithm 1 stage 1]
    network = add_prefix(NETWORK, {**server.result, **server.known})
    return State(server.round, network, {"stage": 1, "outputs": list(outputs)})


def _begin_network(
    federation: Federation, config: Config
) -> tuple[tuple[str, ...], Tensors]:
    """Agree on outputs and known concepts, send them to the sites and return them."""
    outputs = agree_on_outputs(federation, config)
    numbers = agree_on_known_concepts(federation, config)
    known: Tensors = {} if numbers is None else {KNOWN: numbers}
    federation.sum("begin_codes", {CHOSEN: find_candidates(outputs, config), **known})
    return outputs, known


def make_initial_parameters(
    config: Config, outputs: int, known: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the network's first parameters, which all sites share.

    Args:
        config: The settings of the run.
        outputs: The number of outputs.
        known: (known,) int64 numbers of the known concepts; None if all are known.
    """
    network = Dan(
        config.model.network,
        config.space.width,
        outputs,
        config.seed,
        known=None if known is None else known.numpy(),
        features=config.space.dense,
    )
    return {name: value.detach() for name, value in network.trainable().items()}


def _combine_first_parameters(
    federation: Federation, config: Config, task: str, tensors: Tensors
) -> Total:
    """Combine parameters that are the same at all honest sites, by the job's rule.

    They are whole parameters, not changes, so `norm_bound` does not limit them: the
    rule "norm-bound" uses their median length.

    Args:
        federation: The sites.
        config: The settings of the run.
        task: The task that returns the parameters.
        tensors: The tensors to send to the sites.
    """
    rule = replace(config, norm_bound=0.0)
    return sum_or_combine(federation, rule, task, tensors, {})


def _tune_encoder(
    federation: Federation, config: Config, resumed: State | None
) -> State:
    """Train the network of representation = "attention", which has no stage 2.

    The server does not have the encoder, so the sites send the first parameters. They
    follow from the job's seed, and are the same at all sites.
    """
    if resumed is None:
        outputs = config.phenotypes
        if config.learns_codes:
            outputs, _ = _begin_network(federation, config)
        first = _combine_first_parameters(federation, config, "first_parameters", {})
        parameters = first.mean()
    else:
        outputs = tuple(resumed.fact("outputs", list))
        parameters = select_prefix("shared.", resumed.tensors)

    server = _CodeServer(config, parameters, summarise_held_out, resumed)
    server.outputs = outputs
    server.known = {}
    run_cycles(federation, server)
    network = add_prefix(NETWORK, server.result)
    return State(server.round, network, {"stage": 1, "outputs": list(outputs)})


def _load_representation(config: Config) -> State:
    """Return the representation with which a job without stage 1 begins.

    Raises:
        ConfigError: The model that the job names has no network, or does not match the
            job.
    """
    name = config.model.representation
    if name == "none":
        return State(0, {}, {"outputs": []})
    if not is_phenotyper(Path(name)):
        raise ConfigError(
            f"representation = {name!r}: there is no phenotyping model in this folder: "
            'set it to the folder of one, or to "learn", "none" or "attention"'
        )
    model = load_phenotyper(Path(name))
    network = model.network
    if network is None:
        raise ConfigError(
            f"representation = {name!r}: this model was trained on the concepts "
            "themselves, so it has no representation: give a model that stage 1 "
            "trained"
        )
    if model.space.fingerprint != config.space.fingerprint:
        raise ConfigError(
            f"representation = {name!r} reads notes with a different dictionary or "
            "encoder: give the job the one of that model"
        )
    trained_with = network.config
    expected = config.model.network
    for setting, theirs, ours in (
        ("mean", trained_with.mean, expected.mean),
        ("length", trained_with.length, expected.length),
        ("layer", trained_with.layer, expected.layer),
    ):
        if theirs != ours:
            raise ConfigError(
                f"representation = {name!r} was trained with {setting} = {theirs!r}, "
                f"but this job has {ours!r}: set model.network.{setting} to {theirs!r}"
            )
    state = {name: value.detach() for name, value in network.state().items()}
    return State(0, add_prefix(NETWORK, state), {"outputs": list(model.code_names)})


# ---- stage 2 -------------------------------------------------------------------------


def _train_classifiers(
    federation: Federation,
    config: Config,
    *,
    network: Tensors,
    representation: State,
    resumed: State | None,
) -> State:
    """Run stage 2.

    Args:
        federation: The sites.
        config: The settings of the run.
        network: Tensors of the network, if the sites do not have it.
        representation: The result of stage 1.
        resumed: The state to resume from, if any.

    Returns:
        The server's last state.
    """
    counts = federation.sum("count_labels")
    svms, prepared = _make_classifiers(config, representation, counts)
    total = federation.sum("prepare", {**network, **prepared})
    ready = set(total.included)  # sites that have begun stage 2

    first = representation.round
    last = first + config.classifier_cycles
    shared: Tensors = svms.to_float32()
    start = first
    if resumed is not None and _read_stage(resumed) == 2:
        start = resumed.round
        shared = _restore_classifiers(shared, resumed)
    for cycle in federation.rounds(start, last):
        # [phenotype algorithm 1 stage 2] W'_k
        total = federation.sum("train", shared, cycle=cycle.number)
        shared = average_classifiers(shared, total)  # [phenotype algorithm 1 stage 2]
        if not ready.issuperset(total.included):
            # A site that was away at the start of the stage has come back.
            tensors = {**representation.tensors, **prepared}
            ready |= set(federation.sum("prepare", tensors).included)
        metrics = {"loss": total.metric("loss") / max(1.0, total.metric("examples"))}
        number = cycle.number + 1 - first
        is_last = number == config.classifier_cycles
        is_evaluated = is_last or number % config.evaluate_every == 0
        if is_evaluated:
            metrics |= _evaluate_classifiers(federation, shared, cycle.number)
        state = State(
            cycle.number + 1,
            {**representation.tensors, **shared},
            {**representation.facts, "stage": 2},
        )
        cycle.commit(state, metrics, evaluated=is_evaluated)

    platt = _calibrate(federation, config, svms, shared)
    federation.sum("finish", {**shared, **platt})
    facts = {"outputs": representation.facts["outputs"]}
    return State(last, {**representation.tensors, **shared}, facts)


def _evaluate_classifiers(
    federation: Federation, shared: Tensors, cycle: int
) -> dict[str, float]:
    """Return the finite scores of classifiers on the sites' held-out patients."""
    counts = federation.sum("evaluate", shared, cycle=cycle)
    scores = summarise_held_out(counts.metrics)
    return {name: score for name, score in scores.items() if math.isfinite(score)}


def _restore_classifiers(shared: Tensors, resumed: State) -> Tensors:
    """Return the classifiers of a saved state, with names and shapes of `shared`."""
    with restoring("the newest checkpoint"):
        return {
            name: require_tensor(resumed.tensors, name, value.dtype, *value.shape)
            for name, value in shared.items()
        }


def average_classifiers(shared: Tensors, total: Total) -> dict[str, Tensor]:
    """Return each classifier's mean over the patients who are labelled for its disease.

    This is Eq. 1 for the classifiers. A classifier that no site trained stays
    unchanged.

    Args:
        shared: The classifiers before the cycle.
        total: The sum of the sites' classifiers, each times its number of patients.
    """
    total.require({**list_shapes(shared), "patients": tuple(shared[INTERCEPT].shape)})
    patients = total.tensors["patients"]  # (classifiers,) N' of each classifier
    divisors = patients.clamp(min=1)  # a classifier without patients is not divided
    return {
        # [phenotype eq 1] W_ag = Σ_k n_k / N · W_k
        name: torch.where(patients > 0, (total.tensors[name] / divisors).float(), value)
        for name, value in shared.items()
    }


def _make_classifiers(
    config: Config, representation: State, counted: Total
) -> tuple[LinearSVMs, dict[str, Tensor]]:
    """Return classifiers at zero, and the tensors from which sites build the same ones.

    Args:
        config: The settings of the run.
        representation: The result of stage 1.
        counted: The sum of "count_labels".

    Raises:
        TrainingError: No patient is labelled.
    """
    by_concept = config.model.representation == "none" and not config.space.dense
    shapes = dict.fromkeys(LABEL_NAMES, (len(config.phenotypes),))
    if by_concept:
        shapes["frequencies"] = (config.space.width,)
    counted.require(shapes)
    counts = {name: counted.tensors[name].numpy() for name in LABEL_NAMES}
    _require_label_counts(counts)
    if not any(of_label.any() for of_label in counts.values()):
        raise TrainingError(
            "no training patient is labelled for any phenotype at any site: give "
            "labels, or leave [phenotypes] out"
        )

    classes = agree_on_classes(counts, config.least_questionable)
    has_class = [[float(each in row) for each in CLASSES] for row in classes]
    prepared = {"classes": torch.tensor(has_class)}
    width = config.space.width
    hidden_bias = representation.tensors.get(f"{NETWORK}hidden_bias")
    if hidden_bias is not None:
        width = len(hidden_bias)
    elif by_concept:
        frequencies = counted.tensors["frequencies"].numpy()
        patients = round(counted.metric("patients"))
        _require_frequencies(frequencies, patients)
        idf = compute_idf(frequencies, patients)
        prepared["idf"] = torch.from_numpy(idf)
    svms = LinearSVMs(classes, width, config.model.classifier)
    if config.model.classifier.class_weights == "balanced":
        table = np.stack([counts[name] for name in LABEL_NAMES], axis=1)
        prepared["weights"] = torch.from_numpy(svms.compute_class_weights(table))
    return svms, prepared


def _require_label_counts(counts: Mapping[str, np.ndarray]) -> None:
    """Check that no sum of label counts is negative.

    A secure sum hides which site sent a negative count.

    Raises:
        TrainingError: A sum is negative.
    """
    for name, of_label in counts.items():
        smallest = float(of_label.min(initial=0.0))
        if smallest < 0:
            raise TrainingError(
                f"the sites counted {smallest:,.0f} patients with the label {name!r}: "
                "a site sent a negative number; find out which one, and start the run "
                "again without it"
            )


def _require_frequencies(frequencies: np.ndarray, patients: int) -> None:
    """Check that each concept's count is between 0 and the number of patients.

    Raises:
        TrainingError: A count is outside this range.
    """
    lowest = int(frequencies.min())
    highest = int(frequencies.max())
    if not 0 <= lowest <= highest <= patients:
        raise TrainingError(
            f"the sites counted {patients:,} patients ('patients'), but {lowest:,} to "
            f"{highest:,} with each concept: all sites must run the same job with the "
            "same version of fednotes"
        )


def _calibrate(
    federation: Federation, config: Config, svms: LinearSVMs, shared: Tensors
) -> Tensors:
    """Return the Platt scaling of each classifier, if the settings require it.

    It is computed from sums over the sites' held-out patients.
    """
    if not config.calibrate:
        return {}

    def sum_over_sites(platt: np.ndarray) -> np.ndarray:
        tensors = {**shared, "platt": torch.from_numpy(platt)}
        total = federation.sum("calibrate", tensors)
        total.require({"sums": (len(svms.classifiers), PLATT_SUMS)})
        sums: np.ndarray = total.tensors["sums"].numpy()
        return sums

    platt = fit_platt(sum_over_sites, len(svms.classifiers))
    return {"platt": torch.from_numpy(platt)}


def summarise_held_out(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the scores to show for an evaluation on held-out patients.

    Args:
        metrics: The sum of "evaluate", in stage 1 or stage 2.

    Returns:
        "held_out", where higher is better and -inf means that nothing is held out;
        "valid_loss" of codes, or "valid_f1" of phenotypes.
    """
    counts = ClassCounts.from_metrics(metrics)
    if counts.by_output:
        scores = counts.scores()
        if not scores["outputs"]:
            return {"held_out": -math.inf}
        f1 = scores["macro"]["f1"]
        return {"held_out": f1, "valid_f1": f1}
    if not metrics.get("pairs"):
        return {"held_out": -math.inf}
    require_metrics(metrics, "loss")
    loss = metrics["loss"] / metrics["pairs"]
    return {"held_out": -loss, "valid_loss": loss}


# ---- training with differential privacy ----------------------------------------------


class PhenotypeWithDP(AveragingWithDP):
    """Both stages with differential privacy, one after the other.

    The agreement before training is derived from noisy counts. Stage 1 trains only the
    network, and stage 2 only the classifiers.
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
    can_average_rounds = False
    example_names = ("batch", "patients")

    def make_initial_parameters(
        self, config: Config, agreed: Tensors
    ) -> dict[str, Tensor]:
        """Return the initial network, if stage 1 is trained, and the classifiers.

        All weights of the classifiers are zero. Each disease has the classes "absent"
        and "present".
        """
        tensors: dict[str, Tensor] = {}
        if config.has_stage_1:
            outputs = len(agreed.get(CHOSEN, config.list_candidates()))
            network = make_initial_parameters(config, outputs, agreed.get(KNOWN))
            tensors |= add_prefix(NETWORK, network)
        if config.phenotypes:
            width = config.space.width
            if config.has_stage_1:
                width = config.model.network.hidden
            classes = [(ABSENT, PRESENT)] * len(config.phenotypes)
            tensors |= LinearSVMs(classes, width, config.model.classifier).to_float32()
        return tensors

    def group_units(self, site: Site, unit: Unit) -> list[np.ndarray]:
        """Return the training rows of each patient who has codes or labels."""
        train = site.data.train
        is_labelled = np.any(train.labels >= 0, axis=1) & site.config.has_stage_2
        rows: dict[tuple[str, ...], list[int]] = {}
        for row, patient in enumerate(train.patients):
            is_coded = site.config.has_stage_1 and patient in site.data.codes
            if is_labelled[row] or is_coded:
                rows.setdefault(make_unit_key(patient, "", unit), []).append(row)
        return [np.array(each) for each in rows.values()]

    def hash_data(self, data: SitePatients) -> bytes:
        """Return a digest of the training patients and of all codes."""
        codes = repr(sorted((p, sorted(c)) for p, c in data.codes.items()))
        return hash_parts(data.train.compute_fingerprint(), codes)

    def begin(self, site: Site, agreed: Tensors) -> None:
        """Build the site's network and classifiers from the agreement of all sites.

        The agreement is checked before any patient's features are computed with it.
        Otherwise, a server could send a number that causes an error only for patients
        with a certain concept, and the error would reveal that the site has such
        patients.

        Args:
            site: The site.
            agreed: The agreement from noisy counts; empty if there is none.

        Raises:
            RefusedError: The agreement cannot have come from noisy counts.
        """
        if agreed:
            require_agreement(site.config, agreed, site.id)
        site.begin_privately(self.make_initial_parameters(site.config, agreed), agreed)

    def count_rounds(self, config: Config, sums_per_epoch: int) -> int:
        """Return how many noisy sums both stages take."""
        return sum(self.count_rounds_by_stage(config, sums_per_epoch))

    def count_rounds_by_stage(
        self, config: Config, sums_per_epoch: int
    ) -> tuple[int, int]:
        """Return how many noisy sums each stage takes.

        Args:
            config: The settings of the run.
            sums_per_epoch: The number of noisy sums per epoch.
        """
        of_network = 0
        if config.has_stage_1:
            of_network = super().count_rounds(config, sums_per_epoch)
        of_classifiers = 0
        if config.has_stage_2:
            epochs = config.classifier_cycles * config.classifier_epochs
            of_classifiers = epochs * sums_per_epoch
        return of_network, of_classifiers

    def prepare_round(self, site: Site, round: int, memory: Tensors) -> Tensors:
        """Make the network trainable in stage 1, and the classifiers in stage 2."""
        privacy = site.config.privacy
        assert privacy is not None
        of_network, _ = self.count_rounds_by_stage(site.config, privacy.epoch)
        site.stage = int(round >= of_network)
        for name, parameter in site.shared.items():
            parameter.requires_grad_(name.startswith("svm.") == bool(site.stage))
        return memory

    def loss(self, site: Site, indices: np.ndarray) -> Tensor:
        """Return the mean loss of one patient's codes, or labels; 0 without any."""
        return site.measure_private_loss(indices)

    # The noisy counts with which training begins.

    def count_size(self, config: Config) -> int:
        """Return the total number of counts of codes, concepts and labels."""
        return sum(compute_count_sizes(config).values())

    def group_counted_units(self, site: Site, unit: Unit) -> list[np.ndarray]:
        """Return the training rows of each patient."""
        return self.group_units(site, unit)

    def count_unit(
        self, site: Site, items: np.ndarray
    ) -> tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]:
        """Count one patient's codes, concepts and labels.

        Args:
            site: The site.
            items: The patient's training rows, an element of `group_counted_units`.

        Returns:
            The positions in the vector of noisy counts (length `count_size`) that the
            patient adds to, and the amounts.
        """
        return count_patient(
            site.data,
            site.config,
            rows=items,
            candidate_numbers=site.candidate_numbers,
        )

    def agree(self, config: Config, counts: np.ndarray, deviation: float) -> Tensors:
        """Return outputs, known concepts and weights derived from noisy counts."""
        return agree_from_counts(config, counts, deviation)


# ---- the method's interface for jobs -------------------------------------------------


class Phenotype(Method):
    """Two-stage phenotyping as in Liu, Dligach and Miller 2019, for a job."""

    config_class = Config
    site_class = Site
    presets = PRESETS
    holds = "patients"
    dp = PhenotypeWithDP()
    keep_best = KEEP_BEST

    def train(self, federation: Federation, config: Config) -> State:
        """Run Algorithm 1."""
        return train(federation, config)

    def read_model_config(self, table: Mapping[str, Any]) -> PhenotypeConfig:
        """Return the settings of network and classifiers."""
        config: PhenotypeConfig = build(PhenotypeConfig, table, where="")
        return config

    def list_models(self) -> Mapping[str, type[Any]]:
        """Return the only class of model settings."""
        return {"": PhenotypeConfig}

    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the held-out loss of codes, or macro F1 of phenotypes."""
        return summarise_held_out(metrics)

    def configure(self, config: Config, sites: Sequence[SitePatients]) -> Config:
        """Return the settings, completed with the facts of the sites.

        Raises:
            DataError: The sites differ.
            ConfigError: There is nothing to learn, or nothing to count.
        """
        require_alike(sites)
        if config.has_stage_1 and not any(site.codes for site in sites):
            raise ConfigError(
                'representation = "learn" predicts billing codes, but no site has any: '
                'give `codes`, or set model.representation = "none" (TF-IDF) or to the '
                "folder of a model"
            )
        phenotypes = sites[0].phenotypes
        if config.has_attention and not phenotypes:
            if not any(site.codes for site in sites):
                raise ConfigError(
                    "there is nothing to learn: no site has phenotypes or codes: give "
                    "[phenotypes], `labels` or `codes`"
                )
        elif not config.has_stage_1 and not phenotypes:
            raise ConfigError(
                "there is nothing to learn: the job has no [phenotypes] and no labels, "
                f"and representation = {config.model.representation!r} leaves stage 1 "
                "out"
            )
        completed = fill_in_sites(
            config,
            [site.id for site in sites],
            space=sites[0].space,
            vectors=config.has_stage_1 and sites[0].vectors is not None,
            phenotypes=phenotypes,
            questionable=_list_questionable(config, sites),
        )
        if (
            config.privacy
            and config.privacy.counts
            and not compute_count_sizes(completed)
        ):
            raise ConfigError(
                "[privacy] counts: this job counts nothing, because its codes are "
                "given, and neither concepts nor classes are weighted: leave it out"
            )
        return completed

    def check_agreement(self, federation: Federation, config: Config) -> None:
        """Count codes and concepts as stage 1 does, unless the counts have noise.

        Raises:
            DataError: No category of codes has `minimum` patients.
            TrainingError: No concept is frequent enough.
        """
        if config.learns_codes and config.privacy is None:
            agree_on_outputs(federation, config)
            agree_on_known_concepts(federation, config)

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
        """Return the pooled data and the settings of centralised training."""
        del complete
        pooled = replace(config, min_patients=0, aggregation="mean")
        return (pool_sites(sites),), pooled

    def plan_rounds(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the cycles of all stages, and the patients of each at all sites."""
        classifier_cycles = config.classifier_cycles if config.has_stage_2 else 0
        return config.network_cycles + classifier_cycles, sum(sizes)

    def name_length_key(self, config: Config, measure: str) -> str:
        """Return the key that limits the cycles of stage 1, or those of stage 2."""
        has_stage_2 = measure != "valid_loss" and not config.has_attention
        return "classifier_cycles" if has_stage_2 else "cycles"

    def list_warnings(self, config: Config) -> tuple[str, ...]:
        """Return warnings about unused settings and about what updates reveal."""
        warnings: list[str] = []
        if needs_each_update(config) and config.phenotypes and config.has_stage_2:
            warnings.append(
                "aggregation only applies to stage 1: the classifier of a disease is a "
                "sum over its patients, which a hostile site can move as far as it "
                "likes"
            )
        if config.privacy:
            unused = _list_unused_settings(config)
            if unused:
                warnings.append(
                    "[privacy] trains classifiers at training.learning_rate: "
                    f"{', '.join(unused)} of [model.classifier] have no effect"
                )
            return tuple(warnings)

        if config.has_stage_1:
            what = "an update of concept vectors"
        elif config.model.representation == "none":
            what = "a classifier of bags of concepts"
        else:
            return tuple(warnings)
        warnings.append(
            f"{what} reveals which concepts the site's patients have: between "
            "hospitals, use the secure sum (min_patients is the smallest number of "
            "patients behind an update)"
        )
        return tuple(warnings)

    def ends_with_one_model(self, config: Config) -> bool:
        """Return True, because no layer is private."""
        del config
        return True

    def list_coverage(self, config: Config, site: SitePatients) -> tuple[Coverage, ...]:
        """Return how many held-out patients the calibration covers, if there is one."""
        if not (config.calibrate and site.phenotypes and config.has_stage_2):
            return ()
        return (
            Coverage(
                what="the calibration",
                patients=site.valid.fewest_labelled,
                kind="held-out patients with a label for one of the phenotypes",
                remedy="hold out more patients, or set training.calibrate = false in "
                "the job",
            ),
        )

    def needs_each_update(self, config: Config) -> bool:
        """Return whether the aggregation of stage 1 inspects each site's update."""
        return needs_each_update(config)


def _list_questionable(
    config: Config, sites: Sequence[SitePatients]
) -> tuple[str, ...]:
    """Return the phenotypes for which "questionable" is a class.

    It is one if at least `least_questionable` training patients of all sites together
    have this label.
    """
    counts = np.sum(
        [site.train.count_labels()["questionable"] for site in sites], axis=0
    )
    # If the minimum is 0, a class still needs a patient.
    is_class = counts >= max(config.least_questionable, 1)
    names = zip(sites[0].phenotypes, is_class, strict=True)
    return tuple(name for name, questionable in names if questionable)


def _list_missing(config: Config, site: SitePatients) -> list[str]:
    """Describe what a site lacks for training alone."""
    missing: list[str] = []
    needs_held_out = config.keep_cycle == BEST
    if config.learns_codes and not len(site.select_coded(site.train)):
        missing.append("no training patient with billing codes")
    elif (
        config.learns_codes
        and needs_held_out
        and not len(site.select_coded(site.valid))
    ):
        missing.append(
            "no held-out patient with billing codes, which keep_cycle = -1 needs"
        )
    if config.phenotypes and not len(site.train.select_labelled()):
        missing.append("no training patient labelled for a phenotype")
    elif (
        config.has_attention
        and config.phenotypes
        and needs_held_out
        and not len(site.valid.select_labelled())
    ):
        missing.append(
            "no held-out patient labelled for a phenotype, which keep_cycle = -1 needs"
        )
    return missing


def _list_unused_settings(config: Config) -> list[str]:
    """Return the changed settings of the classifiers that [privacy] does not use."""
    classifier = config.model.classifier
    default = SvmConfig()
    is_changed = {
        "learning_rate": classifier.learning_rate != default.learning_rate,
        "eta0": classifier.eta0 != default.eta0,
        "power_t": classifier.power_t != default.power_t,
        "alpha": classifier.alpha != default.alpha,
    }
    return [name for name, changed in is_changed.items() if changed]


METHOD = Phenotype()
