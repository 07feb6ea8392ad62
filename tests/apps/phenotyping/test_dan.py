"""The deep averaging network, compared with NumPy programs that loop over patients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fednotes.apps.phenotyping.cohort import Bags
from fednotes.apps.phenotyping.dan import Dan, DanConfig, Mixtures, pool_vectors
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.tensors import copy_tensors, load_into
from fednotes.training.row_adam import RowAdam

VOCABULARY, OUTPUTS = 40, 5
CONFIG = DanConfig(embedding=7, hidden=6)


def random_lists(patients: int = 9, seed: int = 0) -> list[list[int]]:
    """Return bags with repeated concepts; the third patient has none."""
    rng = np.random.default_rng(seed)
    lists = [
        rng.integers(0, VOCABULARY, rng.integers(1, 30)).tolist()
        for _ in range(patients)
    ]
    lists[2] = []
    return lists


def random_labels(patients: int = 9, seed: int = 1) -> np.ndarray:
    """Return (patients, outputs) labels; -1 is no label."""
    return (
        np.random.default_rng(seed).integers(-1, 2, (patients, OUTPUTS)).astype(np.int8)
    )


def network(**changes: object) -> Dan:
    """Return a small network; the changes replace settings."""
    return Dan(replace(CONFIG, **changes), VOCABULARY, OUTPUTS)  # type: ignore[arg-type]


def arrays(dan: Dan) -> dict[str, np.ndarray]:
    """Return the parameters as float64 arrays."""
    return {n: p.detach().double().numpy() for n, p in dan.trainable().items()}


def numpy_dan(
    w: dict[str, np.ndarray], lists: list[list[int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute mean, dense layer and log-odds, patient by patient, in float64."""
    rows = []
    for each in lists:
        mean = (
            np.mean(w["embedding"][each], axis=0)
            if each
            else np.zeros(w["embedding"].shape[1])
        )
        hidden = np.maximum(w["hidden_weight"] @ mean + w["hidden_bias"], 0)
        rows.append((mean, hidden, w["output_weight"] @ hidden + w["output_bias"]))
    mean, hidden, logits = (np.stack(part) for part in zip(*rows, strict=True))
    return mean, hidden, logits


def numpy_gradients(
    w: dict[str, np.ndarray], lists: list[list[int]], labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Compute the loss and its gradients by the chain rule."""
    mean, hidden, logits = numpy_dan(w, lists)
    p, y = 1 / (1 + np.exp(-logits)), (labels == 1).astype(float)
    scale = labels >= 0
    pairs = scale.sum()
    loss = -(scale * (y * np.log(p) + (1 - y) * np.log(1 - p))).sum() / pairs
    d_logits = scale * (p - y) / pairs
    d_hidden = (d_logits @ w["output_weight"]) * (hidden > 0)
    d_mean = d_hidden @ w["hidden_weight"]
    table = np.zeros_like(w["embedding"])
    for row, each in enumerate(lists):
        for concept in each:
            table[concept] += d_mean[row] / len(each)
    return loss, {
        "embedding": table,
        "hidden_weight": d_hidden.T @ mean,
        "hidden_bias": d_hidden.sum(0),
        "output_weight": d_logits.T @ hidden,
        "output_bias": d_logits.sum(0),
    }


@pytest.mark.parametrize("is_read", [False, True])
def test_outputs_equal_those_of_the_numpy_program(is_read: bool) -> None:
    """The reference is `numpy_dan`."""
    dan, lists = network(), random_lists()
    bags = Bags.from_lists(lists, VOCABULARY)
    patients = dan.make_network_input(bags) if is_read else bags
    mean, hidden, logits = numpy_dan(arrays(dan), lists)
    np.testing.assert_allclose(dan.average_vectors(patients).detach(), mean, atol=1e-7)
    np.testing.assert_allclose(dan.represent(patients), hidden, atol=1e-7)
    np.testing.assert_allclose(dan(patients).detach(), logits, atol=1e-6)
    np.testing.assert_allclose(
        dan.predict_probabilities(patients), 1 / (1 + np.exp(-logits)), atol=1e-6
    )


@pytest.mark.parametrize("updates", ["rows", "dense"])
def test_loss_and_gradients_equal_those_of_the_numpy_program(updates: str) -> None:
    """The reference is `numpy_gradients`."""
    dan, lists, labels = network(updates=updates), random_lists(), random_labels()
    loss = dan.loss(Bags.from_lists(lists, VOCABULARY), labels)
    loss.backward()
    expected, gradients = numpy_gradients(arrays(dan), lists, labels)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    for name, parameter in dan.trainable().items():
        grad = parameter.grad
        assert grad is not None
        assert grad.is_sparse == (updates == "rows" and name == "embedding")
        np.testing.assert_allclose(
            grad.to_dense(), gradients[name], atol=1e-7, err_msg=name
        )


def test_the_mean_can_be_over_distinct_concepts() -> None:
    """The reference is the NumPy program with each concept once."""
    dan, lists = network(mean="concepts"), random_lists()
    mean, _, _ = numpy_dan(arrays(dan), [sorted(set(each)) for each in lists])
    np.testing.assert_allclose(
        dan.average_vectors(Bags.from_lists(lists, VOCABULARY)).detach(),
        mean,
        atol=1e-7,
    )


def test_pooling_equals_embedding_bag() -> None:
    """The reference is torch's embedding_bag with the mean over every occurrence.

    Float64 takes the path of other devices.
    """
    bags = Bags.from_lists(random_lists(50, 3), VOCABULARY)
    table = torch.randn(VOCABULARY, 9, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.embedding_bag(
        torch.from_numpy(bags.concepts).long(),
        table,
        torch.from_numpy(bags.offsets[:-1]),
    )
    mixtures = Mixtures.from_bags(bags)
    torch.testing.assert_close(pool_vectors(table, mixtures), expected)
    torch.testing.assert_close(pool_vectors(table.double(), mixtures).float(), expected)


def test_take_selects_the_given_patients() -> None:
    """The reference reads the same patients from their lists."""
    lists, rows = random_lists(), [4, 2, 2, 0]
    selected = Mixtures.from_bags(Bags.from_lists(lists, VOCABULARY)).take(rows)
    expected = Mixtures.from_bags(Bags.from_lists([lists[r] for r in rows], VOCABULARY))
    for name in ("concepts", "shares", "offsets"):
        np.testing.assert_array_equal(getattr(selected, name), getattr(expected, name))
    assert len(selected) == 4


def test_a_patient_without_concepts_has_the_zero_vector() -> None:
    """The dense layer is the ReLU of its bias.

    No row of the embeddings gets a gradient.
    """
    dan = network()
    with torch.no_grad():
        dan.hidden_bias.copy_(torch.arange(6.0) - 2)
    bags = Bags.from_lists([[], []], VOCABULARY)
    np.testing.assert_array_equal(dan.represent(bags), [[0, 0, 0, 1, 2, 3]] * 2)
    dan.loss(bags, np.ones((2, OUTPUTS), np.int8)).backward()
    assert not dan.trainable()["embedding"].grad.to_dense().any()  # type: ignore[union-attr]


def test_a_batch_without_labels_changes_nothing() -> None:
    """The loss is 0, and Adam does not move along a zero gradient."""
    dan = network()
    before = copy_tensors(dan.trainable())
    adam = RowAdam(dan.trainable(), 0.1)
    loss = dan.loss(
        Bags.from_lists([[1], [2]], VOCABULARY), np.full((2, OUTPUTS), -1, np.int8)
    )
    assert float(loss.detach()) == 0.0
    loss.backward()
    adam.step()
    assert all(torch.equal(before[n], p) for n, p in dan.trainable().items())


def test_the_loss_of_one_labelled_pair_is_that_of_the_pair() -> None:
    """The loss is the negative log-sigmoid of the one labelled output."""
    dan, labels = network().eval(), np.full((2, OUTPUTS), -1, np.int8)
    bags = Bags.from_lists([[1], [2]], VOCABULARY)
    labels[1, 3] = 1
    logit = float(dan(bags)[1, 3].detach())
    assert float(dan.loss(bags, labels).detach()) == pytest.approx(
        np.log1p(np.exp(-logit)), rel=1e-5
    )


def test_unlabelled_pairs_do_not_count() -> None:
    """The reference is a network with the labelled outputs only.

    2 (questionable) counts as unlabelled.
    """
    dan, labels = network(), random_labels()
    bags = Bags.from_lists(random_lists(), VOCABULARY)
    labels[:, 1], labels[:, 3] = -1, 2
    labelled = [0, 2, 4]
    smaller = Dan(CONFIG, VOCABULARY, 3)
    values = copy_tensors(dan.trainable())
    for name in ("output_weight", "output_bias"):
        values[name] = values[name][labelled]
    load_into(smaller.trainable(), values)
    torch.testing.assert_close(
        dan.loss(bags, labels), smaller.loss(bags, labels[:, labelled])
    )


def test_a_network_can_read_features_in_place_of_bags() -> None:
    """The reference is two matrix products in NumPy."""
    dan = Dan(CONFIG, 11, OUTPUTS, features=True)
    x = np.random.default_rng(0).normal(size=(600, 11))
    w = arrays(dan)
    assert "embedding" not in w
    hidden = np.maximum(x @ w["hidden_weight"].T + w["hidden_bias"], 0)
    np.testing.assert_allclose(dan.represent(x), hidden, atol=1e-5)
    logits = hidden @ w["output_weight"].T + w["output_bias"]
    np.testing.assert_allclose(dan(x).detach(), logits, atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_on_rows_equals_torch(sparse: bool, dtype: torch.dtype) -> None:
    """The references are torch.optim.Adam and torch.optim.SparseAdam.

    The optimizer is saved and restored after the third step.
    """
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(12, 3, generator=generator, dtype=dtype))
    theirs = torch.nn.Parameter(ours.detach().clone())
    adam = RowAdam({"w": ours}, 0.1)
    optimizer = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(
        [theirs], lr=0.1
    )
    for step in range(6):
        grad = torch.randn(12, 3, generator=generator, dtype=dtype)
        grad[(torch.arange(12) + step) % 3 > 0] = 0
        for each in (ours, theirs):
            each.grad = grad.to_sparse(1) if sparse else grad.clone()
        rate = 0.1 / (step + 1)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        adam.step(rate=rate)
        assert ours.grad is None
        if step == 2:
            state = {n: t.clone() for n, t in adam.state().items()}
            adam = RowAdam({"w": ours}, 0.1)
            adam.restore(state)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.5, 1000.0])
def test_clipping_equals_torch(clip: float) -> None:
    """The reference clips dense gradients by clip_grad_norm_ before Adam's step."""
    lists, labels = random_lists(), random_labels()
    ours, theirs = network(updates="rows"), network(updates="dense")
    for dan in (ours, theirs):
        (dan.loss(Bags.from_lists(lists, VOCABULARY), labels) * 30).backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
    # A learning rate that shows the gradient's size: Adam's own step hardly depends on
    # it.
    RowAdam(ours.trainable(), 0.1, clip, eps=10.0).step()
    table = theirs.trainable()["embedding"]
    table.grad = table.grad.to_sparse(1)  # type: ignore[union-attr]
    RowAdam(theirs.trainable(), 0.1, eps=10.0).step()
    for name, parameter in ours.trainable().items():
        torch.testing.assert_close(
            parameter, theirs.trainable()[name], rtol=1e-5, atol=1e-8
        )


def test_gradients_of_parts_of_a_batch_add_up() -> None:
    """The gradients of two parts of a batch add up to those of the batch.

    The sparse gradients of the parts have rows in common.
    """
    lists, labels = random_lists(), np.abs(random_labels())
    undivided, parts = network(), network()
    undivided.loss(Bags.from_lists(lists, VOCABULARY), labels).backward()
    for rows in (slice(0, 4), slice(4, 9)):
        share = len(lists[rows]) / 9
        (
            parts.loss(Bags.from_lists(lists[rows], VOCABULARY), labels[rows]) * share
        ).backward()
    for dan in (undivided, parts):
        RowAdam(dan.trainable(), 0.01).step()
    for name, parameter in undivided.trainable().items():
        torch.testing.assert_close(
            parts.trainable()[name], parameter, rtol=1e-4, atol=1e-5
        )


def test_initial_values_depend_on_the_seed_and_leave_torch_alone() -> None:
    """Torch's global generator keeps its state.

    The number of outputs does not change the initial values of the other layers.
    """
    before = torch.random.get_rng_state()
    first, again, wider = network(), network(), Dan(CONFIG, VOCABULARY, OUTPUTS + 1, 0)
    assert torch.equal(before, torch.random.get_rng_state())
    for name, value in first.trainable().items():
        assert torch.equal(value, again.trainable()[name])
    for name in ("embedding", "hidden_weight"):
        assert torch.equal(first.trainable()[name], wider.trainable()[name])
    reseeded = Dan(CONFIG, VOCABULARY, OUTPUTS, 1).trainable()
    assert not torch.equal(first.trainable()["embedding"], reseeded["embedding"])


def test_initial_values_have_the_distribution_of_keras() -> None:
    """keras.layers.Embedding is uniform in ±0.05.

    Dense is uniform in ±√(6 / (inputs + outputs)), after Glorot and Bengio (2010), with
    zero biases. The largest of many draws is near the bound.
    """
    wide = Dan(replace(CONFIG, embedding=40, hidden=60), 500, 30, 3).trainable()
    bounds = {
        "embedding": 0.05,
        "hidden_weight": (6 / 100) ** 0.5,
        "output_weight": (6 / 90) ** 0.5,
    }
    for name, bound in bounds.items():
        values = wide[name].detach().double().numpy()
        assert 0.99 * bound < np.abs(values).max() <= bound * (1 + 1e-6), name
        assert np.std(values) == pytest.approx(bound / 3**0.5, rel=0.05), name
    assert not wide["hidden_bias"].any()
    assert not wide["output_bias"].any()


def test_dropout_applies_only_in_training() -> None:
    """The mean over many draws is the value without dropout."""
    dan, bags = (
        network(dropout=0.5, hidden=400),
        Bags.from_lists(random_lists(), VOCABULARY),
    )
    dan.eval()
    calm = dan(bags)
    assert torch.equal(calm, dan(bags))
    dan.train()
    torch.manual_seed(0)
    outputs = torch.stack([dan(bags) for _ in range(400)])
    assert not torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs.mean(0), calm, atol=0.01, rtol=0)


def test_an_error_names_wrong_inputs() -> None:
    """Messages about sizes name both sides."""
    dan, dense = network(), Dan(CONFIG, 11, OUTPUTS, features=True)
    known = np.array([1, VOCABULARY])
    for error, message, wrong in (
        (
            DataError,
            "dictionary of 41 concepts, but the network was trained with one of 40",
            lambda: dan(Bags.from_lists([[1]], 41)),
        ),
        (
            DataError,
            r"the network reads bags, but received features of shape \(2, 3\)",
            lambda: dan(np.zeros((2, 3))),
        ),
        (
            DataError,
            r"reads \(patients, 11\), but received features of shape \(2, 3\)",
            lambda: dense(np.zeros((2, 3))),
        ),
        (
            DataError,
            "reads 11 features, but received bags",
            lambda: dense(Bags.from_lists([[1]], 11)),
        ),
        (ConfigError, "hidden = 0", lambda: network(hidden=0)),
        (ConfigError, "dropout = 1", lambda: DanConfig(dropout=1.0)),
        (ConfigError, "length = -1", lambda: DanConfig(length=-1)),
        (ConfigError, "outputs = 0: a network needs", lambda: Dan(CONFIG, 3, 0)),
        (
            ConfigError,
            "known concepts",
            lambda: Dan(CONFIG, VOCABULARY, 2, known=known),
        ),
        (
            ConfigError,
            "pass `known` to say which concepts are known",
            lambda: network(length=20),
        ),
    ):
        with pytest.raises(error, match=message):
            wrong()
