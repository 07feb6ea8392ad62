"""Stage 1, the deep averaging network: from a patient's concepts to billing codes.

Liu, Dligach and Miller 2019, section 2.5, after Dligach and Miller 2018 and Iyyer et
al. 2015:

    embedding → mean over the patient's concepts → dense layer (ReLU) → sigmoid outputs

The values of the dense layer represent the patient; they are the features of stage 2.

A batch has no padding. It holds each patient's distinct concepts in turn, each with its
share of the mean. If `length` is set, the mean counts missing entries as unknown
concepts.

A step only changes the vectors of the batch's own concepts. Their gradient is sparse
(`updates = "rows"`), and `RowAdam` (`training/row_adam.py`) leaves the values and
moments of all other rows as they are. This is three to four times as fast as Adam over
the complete table (`updates = "dense"`), but the result differs, because dense moments
keep moving concepts that do not occur. In both cases, sites send and average complete
tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor, nn

from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    Bags,
    Rows,
    SubWords,
    Vectors,
    compute_offsets,
    find_entries,
)
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.kernels import dropout, kernel
from fednotes.core.numbers import FractionBelowOne, PositiveInt
from fednotes.core.settings import checked
from fednotes.core.tensors import seeding_layer

Singles = NDArray[np.float32]
Ints = NDArray[np.int64]
SmallInts = NDArray[np.int32]

# Initial vectors are uniform between -INITIAL_SIZE and INITIAL_SIZE, Keras' default,
# which the program of 2018 used.
INITIAL_SIZE: Final = 0.05
KNOWN: Final = "known"  # the name of `Dan.known` among tensors
CHOSEN: Final = "chosen"  # the name of the agreed outputs among tensors
MAX_LENGTH: Final = 2**31 - 1  # of the entries that a mean is padded to
_BATCH: Final = 512  # patients in a batch without training


@checked(frozen=True)
class DanConfig:
    """The network of stage 1.

    The paper gives no sizes; these are Dligach and Miller's (2018).

    Attributes:
        embedding: Width of a concept's vector.
        hidden: Width of the dense layer, which is a patient's representation.
        dropout: Dropout rate of the dense layer's values in training; neither paper
            uses dropout.
        mean: Items that the mean is taken over: all "occurrences" of concepts; or
            "concepts", each once however often it occurs, as in the program of 2018.
        length: Number of entries that the mean is taken over. Patients with fewer are
            padded with the vector of unknown concepts, as the padding of the program of
            2018 does; the mean of a patient with more is taken over all of the
            patient's entries. 0 uses each patient's number of entries.
        layer: Values of the dense layer that represent a patient: those after the ReLU
            ("rectified"), or those before it ("linear"), as in the program of 2018.
        updates: Gradients of the concepts' vectors: only the "rows" of the batch's
            concepts, which is three to four times as fast, or all rows ("dense").
    """

    embedding: PositiveInt = 300
    hidden: PositiveInt = 1000
    dropout: FractionBelowOne = 0.0
    mean: Literal["occurrences", "concepts"] = "occurrences"
    length: Annotated[int, Interval(ge=0, le=MAX_LENGTH)] = 0
    layer: Literal["rectified", "linear"] = "rectified"
    updates: Literal["rows", "dense"] = "rows"


# ---- the network's inputs ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Mixtures:
    """Each patient's distinct concepts, and their shares of the patient's mean.

    Attributes:
        concepts: (entries,) int32 rows of the network's table, patient after patient.
        shares: (entries,) float32; they sum to 1 for each patient.
        offsets: (patients + 1,) int64 bounds of the patients in `concepts`. A patient
            without concepts has no entry, and the mean is the zero vector.
        vocabulary: The number of rows of the table.
    """

    concepts: SmallInts
    shares: Singles
    offsets: Ints
    vocabulary: int

    @classmethod
    def from_bags(cls, bags: Bags, mean: str = "occurrences") -> Mixtures:
        """Count each patient's concepts, once per corpus rather than per batch.

        Args:
            bags: The patients' concepts.
            mean: As in `DanConfig`.
        """
        rows, concepts, counts = bags.count_concepts()
        offsets = compute_offsets(np.bincount(rows, minlength=len(bags)))
        if mean == "concepts":
            shares = 1 / np.diff(offsets)[rows]
        else:
            shares = counts / bags.sizes[rows]
        return cls(
            concepts=concepts.astype(np.int32),
            shares=shares.astype(np.float32),
            offsets=offsets,
            vocabulary=bags.vocabulary,
        )

    def map_to_known(
        self, known: np.ndarray, sizes: np.ndarray, length: int
    ) -> Mixtures:
        """Return the patients over a table whose row 0 stands for all unknown concepts.

        Args:
            known: (known concepts,) indices into the vocabulary, ascending; they get
                the rows from 1 on.
            sizes: (patients,) current number of entries in each mean.
            length: Minimum number of entries in a mean; row 0 pads shorter ones. 0 adds
                no padding.
        """
        row_of = np.zeros(self.vocabulary, np.int32)
        row_of[known] = np.arange(1, len(known) + 1)
        concepts = row_of[self.concepts]
        shares = self.shares
        offsets = self.offsets
        if length:
            # [phenotype padding] Σ_c v_c / L + (L − n) / L · v_unknown
            lengths = np.maximum(sizes, length)
            shares = shares * np.repeat(sizes / lengths, np.diff(offsets))
            ends = offsets[1:]
            concepts = np.insert(concepts, ends, 0)
            shares = np.insert(shares, ends, (lengths - sizes) / lengths)
            offsets = offsets + np.arange(len(offsets))
        return Mixtures(
            concepts,
            shares.astype(np.float32),
            offsets=offsets,
            vocabulary=len(known) + 1,
        )

    def __len__(self) -> int:
        """Return the number of patients."""
        return len(self.offsets) - 1

    def take(self, rows: Rows) -> Mixtures:
        """Return these patients, in the order of `rows`."""
        positions, offsets = find_entries(self.offsets, rows)
        return Mixtures(
            self.concepts[positions],
            self.shares[positions],
            offsets=offsets,
            vocabulary=self.vocabulary,
        )


NetworkInput = Mixtures | np.ndarray  # what `Dan.read` returns
Inputs = Bags | Vectors | SubWords | NetworkInput


# ---- the network ---------------------------------------------------------------------


class Dan(nn.Module):
    """The network for a public vocabulary and a number of outputs.

    Initial values are Keras' defaults: uniform vectors, Glorot's uniform weights, zero
    biases. For each layer, they depend only on the seed.

    Args:
        config: The settings.
        inputs: The number of concepts in the vocabulary, or the width of features.
        outputs: The number of outputs.
        seed: The seed of the initial values.
        known: (known concepts,) int64 indices of the concepts with a vector of their
            own, rising. All others share row 0 of the table, and the k-th known concept
            has row k + 1. None: each concept has a vector of its own.
        features: Whether patients are dense rows (patients, inputs) float32, such as
            the mean vector of a frozen encoder over their notes. The network then has
            no embedding.

    Attributes:
        table_rows: The number of rows of the table of vectors.

    Raises:
        ConfigError: There are no inputs or outputs, or known concepts are not inputs.
    """

    def __init__(
        self,
        config: DanConfig,
        inputs: int,
        outputs: int,
        seed: int = 0,
        *,
        known: np.ndarray | None = None,
        features: bool = False,
    ) -> None:
        super().__init__()
        if inputs < 1 or outputs < 1:
            raise ConfigError(
                f"inputs = {inputs}, outputs = {outputs}: a network needs at least one "
                "of each"
            )
        if known is not None:
            _require_within(known, inputs)
        elif config.length and not features:
            raise ConfigError(
                "length pads each bag with unknown concepts: pass `known` to say "
                "which concepts are known"
            )
        self.config = config
        self.inputs = inputs
        self.outputs = outputs
        self.known = known
        self.table_rows = inputs if known is None else len(known) + 1
        self.embedding: nn.Parameter | None = None
        width = inputs
        if not features:
            width = config.embedding
            with seeding_layer(seed, "dan embedding"):
                table = torch.empty(self.table_rows, width)
                table.uniform_(-INITIAL_SIZE, INITIAL_SIZE)
            self.embedding = nn.Parameter(table)

        self.hidden_weight, self.hidden_bias = _make_layer(
            width, config.hidden, seed=seed, name="dan hidden"
        )
        self.output_weight, self.output_bias = _make_layer(
            config.hidden, outputs, seed=seed, name="dan output"
        )

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.hidden_weight.device

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained and sent, sorted by name."""
        return dict(sorted(self.named_parameters()))

    def state(self) -> dict[str, Tensor]:
        """Return all tensors of the network: parameters and known concepts."""
        state: dict[str, Tensor] = {**self.trainable()}
        if self.known is not None:
            state[KNOWN] = torch.from_numpy(self.known)
        return state

    def make_network_input(self, patients: Inputs) -> NetworkInput:
        """Return patients in the network's input form.

        All other methods accept the result in place of the patients. Converting
        patients once saves counting each bag again.

        Raises:
            DataError: The patients' vocabulary or width differs from the network's.
        """
        if isinstance(patients, SubWords):
            raise DataError(
                "the network reads concepts or vectors, but received the sub-words of "
                "notes: give it the features that it was trained with"
            )
        if isinstance(patients, Vectors):
            return self._read_features(patients.values)
        if isinstance(patients, np.ndarray):
            return self._read_features(patients)
        if self.embedding is None:
            raise DataError(
                f"the network reads {self.inputs} features, but received bags of "
                "concepts: give it features"
            )
        if isinstance(patients, Mixtures):
            self._require_vocabulary(patients.vocabulary, self.table_rows)
            return patients
        self._require_vocabulary(patients.vocabulary, self.inputs)
        mixtures = Mixtures.from_bags(patients, self.config.mean)
        if self.known is None:
            return mixtures
        sizes = patients.sizes
        if self.config.mean == "concepts":
            sizes = np.diff(mixtures.offsets)
        return mixtures.map_to_known(self.known, sizes, self.config.length)

    def _read_features(self, features: np.ndarray) -> Singles:
        """Return features in float32.

        Raises:
            DataError: They have a different width, or the network reads bags.
        """
        reads_bags = self.embedding is not None
        if reads_bags or features.shape[1:] != (self.inputs,):
            expected = "bags" if reads_bags else f"(patients, {self.inputs})"
            raise DataError(
                f"the network reads {expected}, but received features of shape "
                f"{features.shape}"
            )
        return np.ascontiguousarray(features, np.float32)

    def _require_vocabulary(self, size: int, expected: int) -> None:
        """Raise DataError if a vocabulary has the wrong size."""
        if size != expected:
            raise DataError(
                f"the patients' concepts come from a dictionary of {size} concepts, "
                f"but the network was trained with one of {expected}: use that "
                "dictionary"
            )

    def average_vectors(self, patients: Inputs) -> Tensor:
        """Return (patients, embedding) means of vectors, Σ share · vector.

        A patient without concepts has the zero vector. If patients are features, the
        features themselves are returned.
        """
        mixtures = self.make_network_input(patients)
        if isinstance(mixtures, np.ndarray):
            return torch.from_numpy(mixtures).to(self.device)
        is_sparse = self.config.updates == "rows"
        return pool_vectors(cast(Tensor, self.embedding), mixtures, sparse=is_sparse)

    def run_hidden(self, patients: Inputs, layer: str = "rectified") -> Tensor:
        """Return (patients, hidden) values of the dense layer, before dropout.

        Args:
            patients: The patients.
            layer: As in `DanConfig`.
        """
        means = self.average_vectors(patients)
        values = F.linear(means, self.hidden_weight, self.hidden_bias)
        return values if layer == "linear" else F.relu(values)

    def forward(self, patients: Inputs) -> Tensor:
        """Return (patients, outputs) arguments of the sigmoids: log-odds of codes."""
        hidden = dropout(self.run_hidden(patients), self.config.dropout, self.training)
        return F.linear(hidden, self.output_weight, self.output_bias).float()

    def loss(self, patients: Inputs, labels: np.ndarray) -> Tensor:
        """Return the mean binary cross-entropy, (), over labelled pairs.

        Args:
            patients: The patients.
            labels: (patients, outputs): 1 present, 0 absent. Pairs with another label
                (-1) are unlabelled and do not count.

        Returns:
            Zero if nothing is labelled.
        """
        return compute_code_loss(self(patients), labels)

    @torch.no_grad()
    def represent(self, patients: Inputs) -> Singles:
        """Return (patients, hidden) float32 values of the dense layer."""
        # [phenotype representation]
        run = partial(self.run_hidden, layer=self.config.layer)
        return self._run_in_batches(patients, run, self.config.hidden)

    @torch.no_grad()
    def predict_probabilities(self, patients: Inputs) -> Singles:
        """Return (patients, outputs) float32 probabilities, without dropout."""

        def run(batch: Inputs) -> Tensor:
            hidden = self.run_hidden(batch)
            return F.linear(hidden, self.output_weight, self.output_bias).sigmoid()

        return self._run_in_batches(patients, run, self.outputs)

    def _run_in_batches(
        self, patients: Inputs, run: Callable[[Inputs], Tensor], width: int
    ) -> Singles:
        """Return (patients, width) float32 results of a function, batch by batch."""
        network_input = self.make_network_input(patients)
        results = np.empty((len(network_input), width), np.float32)
        for start in range(0, len(network_input), _BATCH):
            rows = np.arange(start, min(start + _BATCH, len(network_input)))
            batch = take_rows(network_input, rows)
            results[rows] = run(batch).float().cpu().numpy()
        return results


def compute_code_loss(logits: Tensor, labels: np.ndarray) -> Tensor:
    """Return the mean binary cross-entropy, (), over labelled pairs.

    Args:
        logits: (patients, outputs) log-odds.
        labels: (patients, outputs): 1 present, 0 absent. Pairs with another label are
            unlabelled and do not count.

    Returns:
        Zero if nothing is labelled.
    """
    targets = torch.from_numpy(np.ascontiguousarray(labels)).to(logits.device)
    present = (targets == PRESENT).float()
    labelled = present + (targets == ABSENT).float()  # (patients, outputs)
    # [phenotype cross-entropy] −Σ_j Σ_p y log f(x) + (1 − y) log(1 − f(x)), as a mean
    total = F.binary_cross_entropy_with_logits(
        logits, present, labelled, reduction="sum"
    )
    return total / labelled.sum().clamp(min=1.0)  # [phenotype cross-entropy]


def take_rows(
    patients: NetworkInput | SubWords, rows: np.ndarray
) -> NetworkInput | SubWords:
    """Return these patients, in the order of `rows`."""
    if isinstance(patients, Mixtures | SubWords):
        return patients.take(rows)
    return patients[rows]


def _require_within(known: np.ndarray, inputs: int) -> None:
    """Raise ConfigError unless known concepts are valid, ascending input indices."""
    if not len(known) or not 0 <= known[0] <= known[-1] < inputs:
        raise ConfigError(
            f"known concepts must be ascending numbers from 0 to {inputs - 1}"
        )


def _make_layer(
    inputs: int, outputs: int, *, seed: int, name: str
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the initial weight (outputs, inputs) and bias (outputs,) of a layer."""
    with seeding_layer(seed, name):
        weight = nn.init.xavier_uniform_(torch.empty(outputs, inputs))
    return nn.Parameter(weight), nn.Parameter(torch.zeros(outputs))


# ---- the mean of vectors -------------------------------------------------------------


def pool_vectors(table: Tensor, patients: Mixtures, *, sparse: bool = False) -> Tensor:
    """Return (patients, width) means of vectors, Σ share · table[concept].

    Args:
        table: (rows, width) vectors of the concepts.
        patients: The patients' concepts.
        sparse: Whether the table's gradient is sparse.
    """
    if table.is_cpu and table.dtype == torch.float32:
        pooled = _Pool.apply(table, patients, sparse)  # type: ignore[no-untyped-call]
        return cast(Tensor, pooled)
    device = table.device
    concepts = torch.from_numpy(patients.concepts.astype(np.int64)).to(device)
    offsets = torch.from_numpy(patients.offsets[:-1]).to(device)
    shares = torch.from_numpy(patients.shares).to(device)
    return F.embedding_bag(
        concepts,
        table,
        offsets,
        mode="sum",
        per_sample_weights=shares.to(table.dtype),
        sparse=sparse,
    )


class _Pool(torch.autograd.Function):
    """`pool_vectors` and its derivative, computed by compiled kernels."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, patients: Mixtures, sparse: bool) -> Tensor:  # noqa: FBT001 - `apply` takes no keywords
        ctx.shape = table.shape
        ctx.patients = patients
        ctx.sparse = sparse
        means = torch.empty(len(patients), table.shape[1])
        vectors = table.detach().contiguous().numpy()
        _average_vectors(
            vectors,
            patients.concepts,
            patients.shares,
            patients.offsets,
            means.numpy(),
        )
        return means

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].float().contiguous().numpy()
        if ctx.sparse:
            return _make_sparse_gradient(grad, ctx.patients, ctx.shape), None, None
        gradient = torch.zeros(ctx.shape)
        patients: Mixtures = ctx.patients
        _spread_gradients(
            grad,
            patients.concepts,
            patients.shares,
            patients.offsets,
            gradient.numpy(),
        )
        return gradient, None, None


def _make_sparse_gradient(
    grad: Singles, patients: Mixtures, shape: torch.Size
) -> Tensor:
    """Return the gradient of a table as a sparse tensor of the rows that occur.

    Args:
        grad: (patients, width) gradient of the means.
        patients: The patients' concepts.
        shape: The shape of the table.
    """
    place_of = np.zeros(shape[0], np.int32)
    place_of[patients.concepts] = 1
    occurring = np.flatnonzero(place_of)
    place_of[occurring] = np.arange(len(occurring), dtype=np.int32)
    gradient = torch.zeros(len(occurring), shape[1])
    _spread_gradients(
        grad,
        place_of[patients.concepts],
        patients.shares,
        patients.offsets,
        gradient.numpy(),
    )
    return torch.sparse_coo_tensor(
        torch.from_numpy(occurring)[None],
        gradient,
        shape,
        is_coalesced=True,
        check_invariants=False,
    )


@kernel("void(f4[:,::1], i4[::1], f4[::1], i8[::1], f4[:,::1])")
def _average_vectors(
    table: Singles,
    concepts: SmallInts,
    shares: Singles,
    offsets: Ints,
    means: Singles,
) -> None:
    """Write the (patients, width) means of vectors."""
    width = table.shape[1]
    for patient in range(means.shape[0]):
        for d in range(width):
            means[patient, d] = 0.0
        for entry in range(offsets[patient], offsets[patient + 1]):
            row = concepts[entry]
            share = shares[entry]
            for d in range(width):
                means[patient, d] += share * table[row, d]  # [phenotype dan]


@kernel("void(f4[:,::1], i4[::1], f4[::1], i8[::1], f4[:,::1])")
def _spread_gradients(
    grad: Singles,
    rows: SmallInts,
    shares: Singles,
    offsets: Ints,
    gradient: Singles,
) -> None:
    """Add the gradients of means to the (rows, width) gradient of vectors."""
    width = gradient.shape[1]
    for patient in range(grad.shape[0]):
        for entry in range(offsets[patient], offsets[patient + 1]):
            row = rows[entry]
            share = shares[entry]
            for d in range(width):
                gradient[row, d] += share * grad[patient, d]
