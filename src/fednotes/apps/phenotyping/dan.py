"""Stage 1, the deep averaging network: from a patient's concepts to billing codes.

Liu, Dligach and Miller 2019, section 2.5, after Dligach and Miller 2018 and Iyyer et
al. 2015:

    embedding → mean over the patient's concepts → dense layer (ReLU) → sigmoid outputs

The values of the dense layer represent the patient; they are the features of stage 2. A
batch has no padding: it holds the distinct concepts of one patient after the other,
each with its share of the mean. With `length`, the mean counts missing entries as
unknown concepts.

A step touches only the vectors of the batch's own concepts. Their gradient is sparse
(`updates = "rows"`), and `RowAdam` (`training/row_adam.py`) leaves the values and
moments of all other rows as they are. That is three to four times as fast as Adam over
the table (`updates = "dense"`), and differs from it: there, moments keep moving a
concept that does not occur. Sites send and average whole tables in both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Interval
from torch import Tensor, nn

from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    Bags,
    Rows,
    Vectors,
    entries_of_rows,
    offsets_of,
)
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.kernels import dropout, kernel
from fednotes.core.settings import checked
from fednotes.core.tensors import seeded

# of the uniform initial vectors: Keras' default, which the 2018 program used
FIRST_VECTORS = 0.05
KNOWN = "known"  # the name of `Dan.known` among tensors
_PATIENTS = 512  # of a batch where nothing is trained


@checked(frozen=True)
class DanConfig:
    """The network of stage 1. The paper gives no sizes: these are Dligach and Miller's
    (2018).

    Attributes:
        embedding: Width of a concept's vector.
        hidden: Width of the dense layer, which is a patient's representation.
        dropout: Dropout rate of the dense layer's values in training; neither paper has
            it.
        mean: What the mean is over: all "occurrences" of concepts; or "concepts", each
            once however often it occurs, as the program of 2018 read them.
        length: Number of entries that the mean is over. Patients with fewer are filled
            up with the vector of unknown concepts, as that program's padding does; a
            patient with more has a mean over all of their own. 0 takes every patient's
            own number.
        layer: What of the dense layer represents a patient: its values after the ReLU
            ("rectified"), or before it ("linear"), as in that program.
        updates: Gradients of the concepts' vectors: "rows" of the batch's concepts
            alone, which is three to four times as fast, or "dense".
    """

    embedding: Annotated[int, Ge(1)] = 300
    hidden: Annotated[int, Ge(1)] = 1000
    dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    mean: Literal["occurrences", "concepts"] = "occurrences"
    length: Annotated[int, Ge(0)] = 0
    layer: Literal["rectified", "linear"] = "rectified"
    updates: Literal["rows", "dense"] = "rows"


@dataclass(frozen=True, eq=False)
class Mixtures:
    """Patients as the network reads them: each one's distinct concepts and their
    shares.

    concepts: (entries,) int32, rows of the network's table. shares: (entries,) float32;
    a patient's sum to 1. offsets: (patients + 1,) int64. A patient without concepts has
    no entry: the zero vector. vocabulary: rows of the table.
    """

    concepts: np.ndarray
    shares: np.ndarray
    offsets: np.ndarray
    vocabulary: int

    @classmethod
    def of(cls, bags: Bags, mean: str = "occurrences") -> Mixtures:
        """Count each patient's concepts; once for a corpus, not for every batch."""
        row, concepts, count = bags.counts()
        offsets = offsets_of(np.bincount(row, minlength=len(bags)))
        sizes = np.diff(offsets) if mean == "concepts" else bags.sizes
        shares = (1 if mean == "concepts" else count) / sizes[row]
        arrays = (concepts.astype(np.int32), shares.astype(np.float32), offsets)
        return cls(*arrays, bags.vocabulary)

    def over(self, known: np.ndarray, sizes: np.ndarray, length: int) -> Mixtures:
        """The same patients over a table of the `known` concepts; the others share its
        row 0.

        known: (concepts,) indices into the vocabulary, rising: row 1 and on. sizes:
        (patients,) entries that each mean was over. length: entries that it is to be
        over, where there are fewer; row 0 fills up.
        """
        place = np.zeros(self.vocabulary, np.int32)
        place[known] = np.arange(1, len(known) + 1)
        concepts, shares, offsets = place[self.concepts], self.shares, self.offsets
        if length:
            # [phenotype padding] Σ_c v_c / L + (L − n) / L · v_unknown
            whole = np.maximum(sizes, length)
            shares = shares * np.repeat(sizes / whole, np.diff(offsets))
            ends = offsets[1:]
            concepts = np.insert(concepts, ends, 0)
            shares = np.insert(shares, ends, (whole - sizes) / whole)
            offsets = offsets + np.arange(len(offsets))
        return Mixtures(concepts, shares.astype(np.float32), offsets, len(known) + 1)

    def __len__(self) -> int:
        """The number of patients."""
        return len(self.offsets) - 1

    def take(self, rows: Rows) -> Mixtures:
        """These patients, in the order of `rows`."""
        source, offsets = entries_of_rows(self.offsets, rows)
        return Mixtures(
            self.concepts[source], self.shares[source], offsets, self.vocabulary
        )


Inputs = Bags | Vectors | Mixtures | np.ndarray


class Dan(nn.Module):
    """The network for a public vocabulary of `inputs` concepts and a number of outputs.

    known: (concepts,) the indices that have a vector of their own, rising; all others
    share row 0 of the table, and the k-th known concept has row k + 1. None: each
    concept has its own.
    features: patients come as dense rows (patients, inputs) float32 instead, such as
    the mean vector of a frozen encoder over their notes; then there is no embedding.
    Initial values (Keras' defaults: uniform vectors, Glorot's uniform weights, zero
    biases) depend on the seed alone, layer by layer.
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
                f"a network of {inputs} inputs and {outputs} outputs learns nothing"
            )
        self.config, self.inputs, self.outputs, self.known = (
            config,
            inputs,
            outputs,
            known,
        )
        self.rows = inputs if known is None else len(known) + 1  # of the table
        self.embedding: nn.Parameter | None = None
        if known is not None and not (
            len(known) and 0 <= known[0] <= known[-1] < inputs
        ):
            raise ConfigError(
                f"known concepts of a network must be some of its {inputs}"
            )
        if config.length and known is None and not features:
            raise ConfigError(
                "length fills up with unknown concepts: say which are known"
            )
        if not features:
            with seeded(seed, "dan embedding"):
                start = torch.empty(self.rows, config.embedding)
                self.embedding = nn.Parameter(
                    start.uniform_(-FIRST_VECTORS, FIRST_VECTORS)
                )
        width = inputs if features else config.embedding
        self.hidden_weight, self.hidden_bias = _dense(
            width, config.hidden, seed, "dan hidden"
        )
        self.output_weight, self.output_bias = _dense(
            config.hidden, outputs, seed, "dan output"
        )

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.hidden_weight.device

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name → parameter, sorted by name: all that training changes and sends."""
        return dict(sorted(self.named_parameters()))

    def state(self) -> dict[str, Tensor]:
        """Name → tensor of all that makes the network: what is trained, and what is
        known."""
        known = {} if self.known is None else {KNOWN: torch.from_numpy(self.known)}
        return {**self.trainable(), **known}

    def read(self, patients: Inputs) -> Mixtures | np.ndarray:
        """Patients as the network takes them; give it the result, it counts no bag
        twice.

        Raises DataError for another vocabulary or width than the network's.
        """
        patients = patients.values if isinstance(patients, Vectors) else patients
        if isinstance(patients, np.ndarray):
            if self.embedding is not None or patients.shape[1:] != (self.inputs,):
                wanted = (
                    f"(patients, {self.inputs})" if self.embedding is None else "bags"
                )
                raise DataError(
                    f"features of shape {patients.shape} for a network that reads {wanted}"
                )
            return np.ascontiguousarray(patients, np.float32)
        if self.embedding is None:
            raise DataError(
                f"bags of concepts for a network that reads {self.inputs} features"
            )
        own = self.inputs if isinstance(patients, Bags) else self.rows
        if patients.vocabulary != own:
            raise DataError(
                f"bags over {patients.vocabulary} concepts for a network over {own}: "
                "use the dictionary that the network was trained with"
            )
        if not isinstance(patients, Bags):
            return patients
        found = Mixtures.of(patients, self.config.mean)
        if self.known is None:
            return found
        once = self.config.mean == "concepts"
        sizes = np.diff(found.offsets) if once else patients.sizes
        return found.over(self.known, sizes, self.config.length)

    def mean(self, patients: Inputs) -> Tensor:
        """(patients, embedding) the mean of each patient's vectors, or the features
        given."""
        read = self.read(patients)
        if isinstance(read, np.ndarray):
            return torch.from_numpy(read).to(self.device)
        # the average pooling layer: Σ share · vector, zero without concepts
        return pool(cast(Tensor, self.embedding), read, self.config.updates == "rows")

    def dense(self, patients: Inputs, layer: str = "rectified") -> Tensor:
        """(patients, hidden) the dense layer, before dropout; "linear": before its ReLU
        too."""
        values = F.linear(self.mean(patients), self.hidden_weight, self.hidden_bias)
        return values if layer == "linear" else F.relu(values)

    def forward(self, patients: Inputs) -> Tensor:
        """(patients, outputs) the sigmoids' arguments, the log-odds of each code."""
        hidden = dropout(self.dense(patients), self.config.dropout, self.training)
        return F.linear(hidden, self.output_weight, self.output_bias).float()

    def loss(self, patients: Inputs, labels: np.ndarray) -> Tensor:
        """() mean binary cross-entropy over the labelled pairs of patient and output.

        labels: (patients, outputs), 1 present, 0 absent; others (-1) are unlabelled and
        do not count. Zero where nothing is labelled.
        """
        logits = self(patients)
        given = torch.from_numpy(np.ascontiguousarray(labels)).to(self.device)
        present = (given == PRESENT).float()
        counts = present + (given == ABSENT).float()  # (patients, outputs)
        # [phenotype cross-entropy] −Σ_j Σ_p y log f(x) + (1 − y) log(1 − f(x)), as a
        # mean
        total = F.binary_cross_entropy_with_logits(
            logits, present, counts, reduction="sum"
        )
        return total / counts.sum().clamp(min=1.0)  # [phenotype cross-entropy]

    @torch.no_grad()
    def representation(self, patients: Inputs) -> np.ndarray:
        """(patients, hidden) float32: the values of the dense layer, the weights
        frozen."""
        # [phenotype representation]
        layer = partial(self.dense, layer=self.config.layer)
        return self._in_batches(patients, layer, self.config.hidden)

    @torch.no_grad()
    def probabilities(self, patients: Inputs) -> np.ndarray:
        """(patients, outputs) float32, without dropout."""

        def sigmoids(part: Inputs) -> Tensor:
            return F.linear(
                self.dense(part), self.output_weight, self.output_bias
            ).sigmoid()

        return self._in_batches(patients, sigmoids, self.outputs)

    def _in_batches(
        self, patients: Inputs, run: Callable[[Inputs], Tensor], width: int
    ) -> np.ndarray:
        read = self.read(patients)
        out = np.empty((len(read), width), np.float32)
        for start in range(0, len(read), _PATIENTS):
            rows = np.arange(start, min(start + _PATIENTS, len(read)))
            part = read.take(rows) if isinstance(read, Mixtures) else read[rows]
            out[rows] = run(part).float().cpu().numpy()
        return out


def _dense(
    inputs: int, outputs: int, seed: int, layer: str
) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight (outputs, inputs) and bias (outputs,) of one layer."""
    with seeded(seed, layer):
        weight = nn.init.xavier_uniform_(torch.empty(outputs, inputs))
    return nn.Parameter(weight), nn.Parameter(torch.zeros(outputs))


# ---- the mean of vectors -------------------------------------------------------------


def pool(table: Tensor, patients: Mixtures, rows: bool = False) -> Tensor:
    """(patients, width) Σ share · table[concept]; rows: the table's gradient is sparse."""
    if table.is_cpu and table.dtype == torch.float32:
        return cast(Tensor, _Pool.apply(table, patients, rows))
    arrays = (
        patients.concepts.astype(np.int64),
        patients.offsets[:-1],
        patients.shares,
    )
    concepts, offsets, shares = (torch.from_numpy(a).to(table.device) for a in arrays)
    weights = shares.to(table.dtype)
    return F.embedding_bag(
        concepts, table, offsets, mode="sum", per_sample_weights=weights, sparse=rows
    )


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, patients: Mixtures, rows: bool) -> Tensor:
        ctx.shape, ctx.patients, ctx.rows = table.shape, patients, rows
        out = torch.empty(len(patients), table.shape[1])
        values = table.detach().contiguous().numpy()
        _pool(values, patients.concepts, patients.shares, patients.offsets, out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        patients, grad = ctx.patients, grads[0].float().contiguous().numpy()
        arrays = (patients.shares, patients.offsets)
        if not ctx.rows:
            out = torch.zeros(ctx.shape)
            _spread(grad, patients.concepts, *arrays, out.numpy())
            return out, None, None
        place = np.zeros(ctx.shape[0], np.int32)
        place[patients.concepts] = 1
        touched = np.flatnonzero(place)
        place[touched] = np.arange(len(touched), dtype=np.int32)
        part = torch.zeros(len(touched), ctx.shape[1])
        _spread(grad, place[patients.concepts], *arrays, part.numpy())
        indices = torch.from_numpy(touched)[None]
        sparse = torch.sparse_coo_tensor(
            indices, part, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return sparse, None, None


@kernel("void(f4[:,::1], i4[::1], f4[::1], i8[::1], f4[:,::1])")
def _pool(table, concepts, shares, offsets, out):
    width = table.shape[1]
    for patient in range(out.shape[0]):
        for d in range(width):
            out[patient, d] = 0.0
        for e in range(offsets[patient], offsets[patient + 1]):
            row, share = concepts[e], shares[e]
            for d in range(width):
                out[patient, d] += share * table[row, d]  # [phenotype dan]


@kernel("void(f4[:,::1], i4[::1], f4[::1], i8[::1], f4[:,::1])")
def _spread(grad, rows, shares, offsets, out):
    width = out.shape[1]
    for patient in range(grad.shape[0]):
        for e in range(offsets[patient], offsets[patient + 1]):
            row, share = rows[e], shares[e]
            for d in range(width):
                out[row, d] += share * grad[patient, d]
