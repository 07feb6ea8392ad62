"""Label-wise attention over the words of a patient's notes.

Expected values are from a program in NumPy that reads the states of the encoder chunk by
chunk, without adapters; from runs that must be equal; or written here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patients_of_words import (
    SMALL,
    attention_config,
    features_of,
    make_cohort,
    sites_of_words,
    sub_words,
    write_notes,
)
from tiny_models import WORDS

from fednotes.apps.phenotyping import label_attention
from fednotes.apps.phenotyping.cohort import SitePatients, SubWords, Vectors
from fednotes.apps.phenotyping.config import Config
from fednotes.apps.phenotyping.label_attention import (
    AttentionConfig,
    LabelAttention,
    cut_into_chunks,
)
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig, Phenotyper
from fednotes.apps.phenotyping.two_stage import METHOD, Site
from fednotes.core import work
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.update import Update
from fednotes.core.work import reporting_to
from fednotes.engines.inprocess import InProcess
from fednotes.taggers.encoder_tagger import Backbone

LABELS = 3
NOTES = {
    "long": [" ".join(WORDS), " ".join(WORDS[::-1])],  # five chunks each
    "none": [],
    "empty": ["", " "],
    "short": ["patient has asthma"],
}


def network_of(bert: Path, config: AttentionConfig = SMALL) -> LabelAttention:
    """Return a network whose parameters are all different from zero."""
    network = LabelAttention(config, features_of(bert).backbone, LABELS, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in network.trainable().items():
            if name != "lora.up":
                parameter += torch.randn(parameter.shape, generator=generator) * 0.5
    return network.eval()


def adapted_network_of(bert: Path, config: AttentionConfig = SMALL) -> LabelAttention:
    """Return the same network with adapters that change the states."""
    network = network_of(bert, config)
    generator = torch.Generator().manual_seed(5)
    assert network.lora is not None
    with torch.no_grad():
        up = network.lora.up
        up += torch.randn(up.shape, generator=generator) * 0.3
    return network


def count_read_chunks(
    network: LabelAttention, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Return a list to which each call of the encoder adds its number of chunks."""
    read: list[int] = []
    compute = Backbone.compute_states

    def count(backbone: Backbone, ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        read.append(len(ids))
        return compute(backbone, ids, *rest, **more)

    monkeypatch.setattr(type(network.backbone), "compute_states", count)
    return read


# ---- the same numbers by NumPy -------------------------------------------------------


def read_states(bert: Path, patients: SubWords, row: int, length: int) -> np.ndarray:
    """Return (sub-words, width) float64 states of a patient, one chunk at a time."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(bert).eval()
    tokenizer = AutoTokenizer.from_pretrained(bert)
    parts = [np.zeros((0, model.config.hidden_size))]
    for note in range(*patients.offsets[row : row + 2]):
        ids = patients.ids[slice(*patients.bounds[note : note + 2])].tolist()
        for start in range(0, len(ids), length):
            chunk = ids[start : start + length]
            marked = [tokenizer.cls_token_id, *chunk, tokenizer.sep_token_id]
            with torch.no_grad():
                states = model(torch.tensor([marked])).last_hidden_state
            parts.append(states[0, 1:-1].double().numpy())
    return np.concatenate(parts)


def score_by_numpy(parameters: dict[str, np.ndarray], states: np.ndarray) -> np.ndarray:
    """Return (labels,) log-odds: β_l · Σ_i A_il h_i + b_l."""
    logits = []
    for label in range(LABELS):
        total = parameters["attention.bias"][label]
        if len(states):
            hidden = np.tanh(states @ parameters["attention.project.weight"].T)
            scores = hidden @ parameters["attention.weigh.weight"][label]
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            mean = (shares[:, None] * states).sum(0)
            total = total + parameters["attention.weight"][label] @ mean
        logits.append(total)
    return np.array(logits)


def loss_by_numpy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean of −y log p − (1 − y) log (1 − p) over pairs with a label."""
    chances = 1 / (1 + np.exp(-logits))
    losses = [
        -np.log(chances[at] if labels[at] == 1 else 1 - chances[at])
        for at in np.ndindex(*labels.shape)
        if labels[at] in (0, 1)
    ]
    return float(np.mean(losses))


def numbers_of(network: LabelAttention) -> dict[str, np.ndarray]:
    return {
        name: value.detach().double().numpy()
        for name, value in network.trainable().items()
    }


def test_log_odds_equal_those_of_the_numpy_program(bert: Path) -> None:
    """Each label has its own mean over the sub-words of all chunks of all notes."""
    patients = sub_words(bert, NOTES)
    network = network_of(bert)
    expected = [
        score_by_numpy(
            numbers_of(network), read_states(bert, patients, row, SMALL.length)
        )
        for row in range(len(NOTES))
    ]
    assert np.allclose(network.compute_logits(patients), expected, atol=2e-5)
    assert np.ptp(expected) > 0.1  # the labels differ, and so do the patients
    chances = network.predict_probabilities(patients)
    assert np.allclose(chances, 1 / (1 + np.exp(-np.array(expected))), atol=1e-5)


def test_the_attention_of_a_label_equals_the_numpy_program(bert: Path) -> None:
    """It sums to one over all sub-words of a patient."""
    patients = sub_words(bert, NOTES)
    network = network_of(bert)
    states = read_states(bert, patients, 0, SMALL.length)
    attention = network.attention.attend(torch.from_numpy(states).float())
    numbers = numbers_of(network)
    scores = np.tanh(states @ numbers["attention.project.weight"].T)
    scores = scores @ numbers["attention.weigh.weight"].T
    shares = np.exp(scores) / np.exp(scores).sum(0)
    assert np.allclose(attention.detach().numpy(), shares, atol=1e-6)
    assert np.allclose(attention.sum(0).detach().numpy(), 1)


def test_loss_and_gradients_equal_those_of_the_numpy_program(bert: Path) -> None:
    """Gradients by differences of the program's loss."""
    patients = sub_words(bert, NOTES)
    labels = np.array([[1, 0, -1], [0, 1, 0], [-1, -1, -1], [1, 1, 2]], np.int8)
    network = network_of(bert)
    loss = network.loss(patients, labels)
    loss.backward()

    states = [read_states(bert, patients, row, SMALL.length) for row in range(4)]
    numbers = numbers_of(network)

    def measure() -> float:
        logits = np.array([score_by_numpy(numbers, each) for each in states])
        return loss_by_numpy(logits, labels)

    assert loss.item() == pytest.approx(measure(), abs=1e-5)
    rng = np.random.default_rng(1)
    for name, parameter in network.trainable().items():
        if name.startswith("lora"):
            continue
        assert parameter.grad is not None
        gradient = parameter.grad.numpy()
        for _ in range(4):
            at = tuple(rng.integers(size) for size in gradient.shape)
            values = []
            for step in (1e-4, -1e-4):
                numbers[name][at] += step
                values.append(measure())
                numbers[name][at] -= step
            slope = (values[0] - values[1]) / 2e-4
            assert gradient[at] == pytest.approx(slope, abs=2e-5), name


# ---- chunks --------------------------------------------------------------------------


def test_notes_are_cut_into_chunks_that_hold_every_sub_word_once() -> None:
    """Compared with a loop over notes of all small lengths."""
    sizes = [0, 1, 3, 4, 5, 8, 9, 0]
    bounds = np.cumsum([0, *sizes])
    patients = SubWords(
        np.arange(bounds[-1], dtype=np.int32), bounds, np.array([0, 3, 3, 8]), width=1
    )
    expected = [
        [start, min(4, end - start)]
        for first, end in itertools.pairwise(bounds.tolist())
        for start in range(first, end, 4)
    ]
    assert cut_into_chunks(patients, 4).tolist() == expected


def test_reading_chunks_in_parts_changes_neither_scores_nor_gradients(
    bert: Path,
) -> None:
    """Parts of two chunks, whose states are computed again for the gradient."""
    patients = sub_words(bert, NOTES)
    labels = np.array([[1, 0, 1]] * 4, np.int8)
    found = []
    for chunks in (100, 2):
        network = adapted_network_of(bert, replace(SMALL, chunks=chunks))
        loss = network.loss(patients, labels)
        loss.backward()
        gradients = {n: p.grad for n, p in network.trainable().items()}
        found.append((network.compute_logits(patients), loss, gradients))
    (whole, loss, gradients), (in_parts, loss_in_parts, gradients_in_parts) = found
    assert np.allclose(whole, in_parts, atol=1e-5)
    assert torch.isclose(loss, loss_in_parts, atol=1e-6)
    for name, gradient in gradients.items():
        other = gradients_in_parts[name]
        assert gradient is not None
        assert other is not None
        assert gradient.abs().max() > 0, name
        # Parts have other shapes, for which kernels add up in another order; old
        # processors differ by up to 3e-5 of the norm after two layers in float32.
        assert (gradient - other).norm() < 1e-4 * gradient.norm(), name


def test_only_as_many_chunks_as_the_settings_say_are_read_at_once(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_of(bert, replace(SMALL, chunks=3))
    read = count_read_chunks(network, monkeypatch)
    network.loss(sub_words(bert, NOTES), np.zeros((4, LABELS), np.int8)).backward()
    forward = read[: len(read) // 2]
    assert max(read) == 3
    assert sum(forward) == len(cut_into_chunks(sub_words(bert, NOTES), SMALL.length))
    assert sum(read) == 2 * sum(forward)  # once more, for the gradient


def test_a_saved_model_cannot_have_all_chunks_read_at_once(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file may name a million chunks."""
    patients = sub_words(bert, NOTES)
    network = adapted_network_of(bert, replace(SMALL, chunks=1_000_000))
    expected = network.compute_logits(patients)
    monkeypatch.setattr(label_attention, "MAX_SUBWORDS", 2 * SMALL.length)
    read: list[int] = []
    compute = type(network.backbone).compute_states

    def count(backbone: object, ids: torch.Tensor, *rest: object, **more: object):  # type: ignore[no-untyped-def]
        read.append(len(ids))
        return compute(backbone, ids, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(network.backbone), "compute_states", count)
    found = network.compute_logits(patients)
    assert max(read) == 2
    np.testing.assert_allclose(found, expected, atol=1e-5)


class _Stops:
    """Stops the work that it watches when two items of it are done."""

    def begin(self, name: str, _total: int | None) -> None:
        assert name == "reading chunks"

    def advance(self, done: int) -> None:
        if done == 2:
            raise InterruptedError

    def end(self) -> None:
        pass


def test_reading_can_be_stopped_between_chunks(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "INTERVAL", 0.0)
    network = adapted_network_of(bert, replace(SMALL, chunks=1)).train()
    chunks_per_call = count_read_chunks(network, monkeypatch)
    patients = sub_words(bert, NOTES)
    with pytest.raises(InterruptedError), reporting_to(_Stops()):
        network.compute_logits(patients)
    assert len(chunks_per_call) == 2
    assert network.training
    with reporting_to(_Stops()):  # a step of training reports no work of its own
        network.loss(patients, np.zeros((4, LABELS), np.int8))


@pytest.mark.parametrize("rank", [2, 0])
def test_long_notes_and_many_labels_are_read_in_pieces(
    bert: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Scores are the same, and no tensor is larger than a piece needs."""
    notes = NOTES | {"longest": [" ".join(WORDS * 3)], "last": ["chest pain"]}
    patients = sub_words(bert, notes)
    network = network_of(bert, replace(SMALL, rank=rank))
    with torch.no_grad():
        network.attention.weigh.weight *= 20  # attention to few words
    expected = network.compute_logits(patients)
    max_values = 20 * network.backbone.width
    monkeypatch.setattr(label_attention, "_MAX_VALUES", max_values)
    monkeypatch.setattr(label_attention, "MAX_SUBWORDS", 2 * SMALL.length)
    rows_of_attention: list[int] = []
    score_words = label_attention.LabelClassifier.score_words

    def count(classifier: Any, states: torch.Tensor) -> torch.Tensor:
        rows_of_attention.append(len(states))
        return score_words(classifier, states)

    monkeypatch.setattr(label_attention.LabelClassifier, "score_words", count)
    logits = network.compute_logits(patients)
    assert max(rows_of_attention) <= 20
    assert sum(rows_of_attention) == len(patients.ids)
    np.testing.assert_allclose(logits, expected, atol=1e-5)

    monkeypatch.setattr(label_attention, "_MAX_VALUES", LABELS)  # as with many labels
    rows_of_attention.clear()
    logits = network.compute_logits(patients)
    assert max(rows_of_attention) == 1
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_the_order_of_notes_does_not_matter(bert: Path) -> None:
    texts = NOTES["long"]
    patients = sub_words(bert, {"a": texts, "b": texts[::-1]})
    first, second = adapted_network_of(bert).compute_logits(patients)
    assert np.allclose(first, second, atol=1e-5)


def test_a_patient_is_scored_as_among_others(bert: Path) -> None:
    patients = sub_words(bert, write_notes("x", 20, 1))
    network = adapted_network_of(bert)
    together = network.compute_logits(patients)
    for row in range(20):
        assert np.allclose(
            network.compute_logits(patients.take([row])), together[[row]], atol=1e-5
        )


# ---- an encoder without adapters -----------------------------------------------------


@pytest.fixture
def kept_states(monkeypatch: pytest.MonkeyPatch) -> label_attention._KeptStates:
    """Return the empty store of the states that networks of this test read."""
    states = label_attention._KeptStates(10**6)
    monkeypatch.setattr(label_attention, "_kept_states", states)
    return states


@pytest.mark.usefixtures("kept_states")
def test_without_adapters_scores_equal_those_of_the_numpy_program(bert: Path) -> None:
    """The states are rounded to float16."""
    patients = sub_words(bert, NOTES)
    network = network_of(bert, replace(SMALL, rank=0))
    assert not [name for name in network.trainable() if name.startswith("lora")]
    expected = [
        score_by_numpy(
            numbers_of(network), read_states(bert, patients, row, SMALL.length)
        )
        for row in range(len(NOTES))
    ]
    assert np.allclose(network.compute_logits(patients), expected, atol=2e-2)


@pytest.mark.usefixtures("kept_states")
def test_without_adapters_each_note_is_read_once(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in another precision, for a patient alone, and by another network."""
    patients = sub_words(bert, NOTES)
    networks = [network_of(bert, replace(SMALL, rank=0)) for _ in range(2)]
    read = count_read_chunks(networks[0], monkeypatch)
    labels = np.zeros((4, LABELS), np.int8)
    first = networks[0].compute_logits(patients)
    number = sum(read)
    assert number == len(cut_into_chunks(patients, SMALL.length))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        networks[0].loss(patients, labels).backward()
    assert np.array_equal(networks[1].compute_logits(patients), first)
    networks[1].compute_logits(patients.take([3]))
    assert sum(read) == number


def test_without_adapters_states_do_not_depend_on_the_precision_of_training(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder first reads the notes in training, or first in prediction."""
    patients = sub_words(bert, NOTES)
    network = network_of(bert, replace(SMALL, rank=0))
    logits = []
    for trains_first in (True, False):
        kept = label_attention._KeptStates(10**6)
        monkeypatch.setattr(label_attention, "_kept_states", kept)
        if trains_first:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                network.loss(patients, np.zeros((4, LABELS), np.int8))
        logits.append(network.compute_logits(patients))
    assert np.array_equal(*logits)


def test_states_that_do_not_fit_are_computed_again(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two long notes fits."""
    patients = sub_words(bert, NOTES)
    longest = 0.75 * patients.sizes.max() * 32 * 2  # bytes
    kept = label_attention._KeptStates(int(longest))
    monkeypatch.setattr(label_attention, "_kept_states", kept)
    network = network_of(bert, replace(SMALL, rank=0))
    read = count_read_chunks(network, monkeypatch)
    first = network.compute_logits(patients)
    number = sum(read)
    assert np.array_equal(network.compute_logits(patients), first)
    assert number < sum(read)
    assert kept.size <= longest


# ---- patients without words, and other inputs ----------------------------------------


def test_a_patient_without_words_has_the_log_odds_of_the_bias(bert: Path) -> None:
    patients = sub_words(bert, {"none": [], "empty": ["", "  "]})
    network = adapted_network_of(bert)
    bias = network.attention.bias.detach().numpy()
    assert np.array_equal(network.compute_logits(patients), [bias, bias])
    network.loss(patients, np.ones((2, LABELS), np.int8)).backward()
    for name, parameter in network.trainable().items():
        gradient = parameter.grad
        is_trained = gradient is not None and bool(gradient.abs().max() > 0)
        assert is_trained == (name == "attention.bias"), name


def test_a_new_network_finds_every_code_rare(bert: Path) -> None:
    network = LabelAttention(SMALL, features_of(bert).backbone, LABELS)
    patients = sub_words(bert, {"none": []})
    assert np.allclose(network.predict_probabilities(patients), 0.1, atol=1e-3)


def test_initial_values_follow_from_the_seed(bert: Path) -> None:
    backbone = features_of(bert).backbone
    first, same, other = (
        LabelAttention(SMALL, backbone, LABELS, seed).trainable() for seed in (1, 1, 2)
    )
    for name, value in first.items():
        assert torch.equal(value, same[name])
        is_constant = name in ("attention.bias", "lora.up")
        assert torch.equal(value, other[name]) == is_constant, name


def test_chunks_that_the_encoder_cannot_read_are_refused(bert: Path) -> None:
    config = replace(SMALL, length=63)
    with pytest.raises(ConfigError, match="length = 63: the encoder reads only 62"):
        LabelAttention(config, features_of(bert).backbone, LABELS)


def test_other_inputs_are_refused(bert: Path) -> None:
    network = network_of(bert)
    vectors = Vectors(np.zeros((1, 32), np.float32))
    others = replace(sub_words(bert, NOTES), width=16)
    for patients in (vectors, others):
        with pytest.raises(DataError, match="sub-words of an encoder of width 32"):
            network.compute_logits(patients)


# ---- a site, and a model -------------------------------------------------------------


def test_the_first_parameters_follow_from_the_seed_of_the_job(bert: Path) -> None:
    """Also at a site whose network has been trained."""
    (data,) = sites_of_words(bert, 1)
    config = METHOD.configure(attention_config(seed=7), [data])
    site = Site(data, config)
    before = site.first_parameters({}).tensors
    site.train(before, cycle=0)
    expected = LabelAttention(SMALL, features_of(bert).backbone, 2, seed=7)
    for name, value in site.first_parameters({}).tensors.items():
        assert torch.equal(value, before[name])
        assert torch.equal(value, expected.trainable()[name])


def find_sent_parameters(
    sites: list[SitePatients], config: Config, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """Return the parameters with which sites are asked to train first."""
    received: list[Any] = []
    train = Site.train

    def record(site: Site, tensors: Any, **options: Any) -> Update:
        received.append(dict(tensors))
        return train(site, tensors, **options)

    monkeypatch.setattr(Site, "train", record)
    METHOD.train(InProcess([Site(site, config) for site in sites]), config)
    return received[0]


def test_the_median_drops_first_parameters_of_one_site(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sites_of_words(bert, 3)
    config = METHOD.configure(attention_config(cycles=1, aggregation="median"), data)
    honest = Site.first_parameters
    expected = Site(data[0], config).first_parameters({}).tensors

    def send_parameters(site: Site, tensors: Any) -> Update:
        update = honest(site, tensors)
        if site.id != data[1].id:
            return update
        return replace(update, tensors={n: -v for n, v in update.tensors.items()})

    monkeypatch.setattr(Site, "first_parameters", send_parameters)
    sent = find_sent_parameters(data, config, monkeypatch)
    for name, value in expected.items():
        torch.testing.assert_close(sent[name], value)


@pytest.mark.parametrize(
    ("rank", "parts"), [(2, "the adapters and the attention"), (0, "the attention")]
)
def test_a_site_describes_what_it_shares(bert: Path, rank: int, parts: str) -> None:
    data = sites_of_words(bert, 1)
    model = PhenotypeConfig(
        representation="attention", attention=replace(SMALL, rank=rank)
    )
    config = METHOD.configure(attention_config(cycles=1, model=model), data)
    (site,) = (Site(each, config) for each in data)
    state = METHOD.train(InProcess([site]), config)
    number = sum(value.numel() for value in state.tensors.values())
    assert site.describe_parameters() == f"{number:,} numbers of {parts}"


def test_a_bound_of_changes_does_not_limit_the_first_parameters(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sites_of_words(bert, 2)
    settings = attention_config(cycles=1, aggregation="norm-bound", norm_bound=0.1)
    config = METHOD.configure(settings, data)
    expected = Site(data[0], config).first_parameters({}).tensors
    sent = find_sent_parameters(data, config, monkeypatch)
    for name, value in expected.items():
        torch.testing.assert_close(sent[name], value)


def test_sites_are_weighted_by_their_labelled_patients(bert: Path) -> None:
    """One cycle of two sites is the weighted mean of what each has trained by itself."""
    sites = sites_of_words(bert, 2)
    config = METHOD.configure(attention_config(cycles=1), sites)
    both, *single = (
        METHOD.train(InProcess([Site(site, config) for site in trained]), config)
        for trained in (sites, sites[:1], sites[1:])
    )
    sizes = [int((site.train.labels >= 0).any(1).sum()) for site in sites]
    assert sizes[0] != sizes[1] != len(sites[1].train)
    for name, value in both.tensors.items():
        total = sum(
            state.tensors[name].double() * size
            for state, size in zip(single, sizes, strict=True)
        )
        assert torch.equal(value, (total / sum(sizes)).float()), name


@pytest.mark.slow
def test_a_federation_learns_phenotypes_from_words(bert: Path) -> None:
    """The notes name the diseases, among other words and in random order."""
    space = features_of(bert).space
    data = [
        SitePatients(
            name,
            space,
            *(
                make_cohort(bert, name, size, 10 * at + part, longest=8)
                for part, size in enumerate((60, 12, 20))
            ),
            {},
        )
        for at, name in enumerate("abc")
    ]
    config = attention_config(cycles=12, keep_cycle=-1, warmup=0.0, seed=2)
    config = METHOD.configure(config, data)
    sites = [Site(each, config) for each in data]
    METHOD.train(InProcess(sites), config)
    areas = [site.scores["ranking"]["auroc"] for site in sites]
    assert np.mean(areas) > 0.9


def test_the_threshold_decides_what_is_present(bert: Path) -> None:
    patients = sub_words(bert, write_notes("x", 30, 3))
    network = adapted_network_of(bert)
    chances = network.predict_probabilities(patients)
    threshold = float(np.quantile(chances, 0.2))
    network.config = replace(SMALL, threshold=threshold)
    model = Phenotyper(
        features_of(bert).space, phenotypes=("a", "b", "c"), attention=network
    )
    assert model.classes == ((0, 1),) * 3
    found = model.predict_classes(patients)
    assert np.array_equal(found, chances >= threshold)
    assert found.mean() > 0.6
    both = model.predict_probabilities(patients)
    assert np.allclose(both[:, :, 1], chances)
    assert np.allclose(both.sum(2), 1)
    assert np.array_equal(model.rank(patients), network.compute_logits(patients))


# ---- sub-words -----------------------------------------------------------------------


def test_sub_words_of_patients_are_taken_and_joined(bert: Path) -> None:
    """Compared with the ids of each note, as the tokenizer has them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bert)
    notes = write_notes("x", 9, 2)
    ids = [
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        for texts in notes.values()
    ]
    patients = sub_words(bert, notes)
    rows = [4, 0, 8, 3]
    joined = SubWords.join([patients.take(rows), patients])
    for row, expected in enumerate([*(ids[row] for row in rows), *ids]):
        assert joined.get_ids(row).tolist() == [i for note in expected for i in note]
        assert np.diff(joined.offsets)[row] == len(expected)
    assert joined.sizes.tolist()[4:] == [sum(map(len, texts)) for texts in ids]
    assert len(patients.take([])) == 0
    assert len(patients.take(np.arange(9) % 2 == 0)) == 5
