"""Label-wise attention: from the words of a patient's notes to codes or phenotypes.

James Mullenbach, Sarah Wiegreffe, Jon Duke, Jimeng Sun and Jacob Eisenstein (2018),
"Explainable prediction of medical codes from clinical text" (CAML), section 2.2, in the
form of PLM-ICD (Huang, Tsai and Chen 2022, section 4.3; Edin et al. 2023, section 2.2):

    notes of any length → chunks → encoder → attention of each label → sigmoid outputs

    paper       here
    H           the states of the encoder above the sub-words of all chunks of a patient
    Z           tanh(V h), `project`
    A           the attention of each label, `weigh`: softmax over all these sub-words
    m_l         Σ_i A_il h_i, the label's mean of the states
    β_l, b_l    `weight` and `bias`: the label's linear classifier

There is no stage 2: the outputs are phenotypes, or codes if the job has no phenotypes.

The encoder is frozen and shared by all models of a process (`Backbone`); LoRA adapters
in all its layers' linear maps and the attention are trained and sent. All chunks of a
patient are read, however many there are. If a step has more chunks than the encoder
reads at once, it reads them in parts, and reads each part again for its gradient, so
that memory does not grow with the length of notes except for H. To predict for a
patient whose H would be large, or whose A would be because there are many labels, the
notes are read in pieces, and only the sums of each piece are kept (`_RunningScores`).

Without adapters (rank 0), only the attention is trained. The states of a note are then
computed once and kept, as far as `_KEPT_BYTES` allow.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fednotes.apps.phenotyping.cohort import (
    Inputs,
    SubWords,
    compute_offsets,
)
from fednotes.apps.phenotyping.dan import compute_code_loss
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.numbers import (
    FractionBelowOne,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
)
from fednotes.core.settings import checked
from fednotes.core.tensors import seeding_layer
from fednotes.core.work import count_items
from fednotes.encoders.adapters import LoRA, find_linears
from fednotes.encoders.reading import concatenate_ranges
from fednotes.taggers.encoder_tagger import Backbone
from fednotes.taggers.model import MAX_SUBWORDS, evaluating
from fednotes.training.precision import setting_precision

# The initial bias b: a probability of one in ten, because few patients have a code.
INITIAL_BIAS: Final = -2.2
_BATCH: Final = 8  # patients in a batch without training
_KEPT_BYTES: Final = (
    2**30
)  # of the states of notes that an encoder without adapters read
# The maximum number of values in H or A of the patients that are read at once without
# training: 128 MB of float32 for each copy.
_MAX_VALUES: Final = 2**25


@checked(frozen=True)
class AttentionConfig:
    """The network of representation = "attention".

    Attributes:
        length: Number of sub-words in a chunk. Each note is divided into chunks, all of
            which are read. With a smaller number, the encoder sees less context, and
            takes less time.
        chunks: Maximum number of chunks that the encoder reads at once. If a step has
            more, it reads them in parts, and reads each part twice, so that memory does
            not grow with the length of notes. Lower it if memory is short.
        rank: Rank of the LoRA adapters in all layers: W + alpha / rank · B A. With 0,
            there are none, and only the attention is trained. The encoder then reads
            each note only once instead of in each epoch, as long as the states of all
            notes fit into 1 GiB of memory, so training takes far less time.
        alpha: Scale of the LoRA adapters; see `rank`.
        width: Number of rows of the matrix V, from which the words' weights are
            computed.
        dropout: Dropout rate of the words' states.
        threshold: Probability from which a phenotype is labelled as present. The
            probabilities of rare phenotypes are low: lower it if too few are found, and
            choose it on held-out patients.
    """

    length: PositiveInt = 128
    chunks: PositiveInt = 64
    rank: NonNegativeInt = 8
    alpha: PositiveFloat = 16.0
    width: PositiveInt = 128
    dropout: FractionBelowOne = 0.2
    threshold: OpenFraction = 0.5


@lru_cache(maxsize=8)
def _find_all_linears(backbone: Backbone) -> list[nn.Linear]:
    """Return all linear layers of a backbone's stack, once per process."""
    return find_linears(backbone.model, "all")


class _KeptStates:
    """The states of the notes that were read last, in float16, up to a size.

    Args:
        limit: The maximum number of bytes.

    Attributes:
        size: The number of bytes.
    """

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._states: OrderedDict[tuple[str, int, bytes], Tensor] = OrderedDict()

    def get(self, key: tuple[str, int, bytes]) -> Tensor | None:
        """Return the states of a note; None if they are not kept."""
        states = self._states.get(key)
        if states is not None:
            self._states.move_to_end(key)
        return states

    def keep(self, key: tuple[str, int, bytes], states: Tensor) -> None:
        """Keep the states of a note, and drop those that were not used for longest."""
        self._states[key] = states
        self.size += states.nbytes
        while self.size > self._limit:
            _, dropped = self._states.popitem(last=False)
            self.size -= dropped.nbytes


_kept_states = _KeptStates(_KEPT_BYTES)  # of all networks of a process


class LabelClassifier(nn.Module):
    """Classifiers of labels, each with an attention of its own.

    Its parameters are project (V), weigh (U), weight (β) and bias (b).

    Args:
        inputs: Length of a state.
        width: Number of rows of V.
        labels: The number of labels.
    """

    def __init__(self, inputs: int, width: int, labels: int) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, width, bias=False)
        self.weigh = nn.Linear(width, labels, bias=False)
        self.weight = nn.Parameter(
            (torch.rand(labels, inputs) * 2 - 1) / math.sqrt(inputs)
        )
        self.bias = nn.Parameter(torch.full((labels,), INITIAL_BIAS))

    def score_words(self, states: Tensor) -> Tensor:
        """Return U Z, (sub-words, labels), the scores of which A is the softmax.

        Args:
            states: (sub-words, inputs) H.
        """
        scores: Tensor = self.weigh(torch.tanh(self.project(states)))
        return scores

    def attend(self, states: Tensor) -> Tensor:
        """Return A, (sub-words, labels), of the states of one patient.

        Args:
            states: (sub-words, inputs) H.
        """
        # [attention weights] Σ_i A_il = 1
        return self.score_words(states).float().softmax(dim=0)

    def vote(self, states: Tensor) -> Tensor:
        """Return β_l · h_i, (sub-words, labels) float32."""
        return F.linear(states, self.weight).float()

    def forward(self, states: Tensor) -> Tensor:
        """Return (labels,) log-odds of one patient; b if there is no sub-word."""
        # β_l · m_l = Σ_i A_il (β_l · h_i), which needs no m_l
        # [attention score]
        return (self.attend(states) * self.vote(states)).sum(0) + self.bias


class _RunningScores:
    """The log-odds of a patient whose states are added in pieces.

    The softmax over all sub-words follows from sums over the pieces, each relative to
    the largest score so far.

    Args:
        classifier: The classifiers of the labels.
        max_values: The maximum number of values of A that are computed at once.
    """

    def __init__(self, classifier: LabelClassifier, max_values: int) -> None:
        self._classifier = classifier
        self._rows = max(1, max_values // len(classifier.bias))
        self._largest = torch.full_like(classifier.bias, -torch.inf)
        self._shares = torch.zeros_like(classifier.bias)  # Σ_i exp(score − largest)
        self._votes = torch.zeros_like(classifier.bias)  # the same, times β_l · h_i

    def add(self, states: Tensor) -> None:
        """Add (sub-words, inputs) states of the patient."""
        for rows in states.split(self._rows):
            scores = self._classifier.score_words(rows).float()
            largest = torch.maximum(self._largest, scores.amax(0))
            shrink = (self._largest - largest).exp()
            shares = (scores - largest).exp()
            votes = self._classifier.vote(rows) * shares
            self._shares = self._shares * shrink + shares.sum(0)
            self._votes = self._votes * shrink + votes.sum(0)
            self._largest = largest

    def compute_logits(self) -> Tensor:
        """Return (labels,) log-odds, as `LabelClassifier.forward`."""
        return self._votes / self._shares + self._classifier.bias


class LabelAttention(nn.Module):
    """A tuned encoder whose words each label attends to.

    Args:
        config: The settings.
        backbone: The shared encoder.
        labels: The number of labels.
        seed: The seed of the initial values.

    Raises:
        ConfigError: There are no labels, or chunks are longer than the encoder reads.
    """

    def __init__(
        self, config: AttentionConfig, backbone: Backbone, labels: int, seed: int = 0
    ) -> None:
        super().__init__()
        if labels < 1:
            raise ConfigError(f"labels = {labels}: a network needs at least one")
        if config.length > backbone.frame.capacity:
            raise ConfigError(
                f"[model.attention] length = {config.length}: the encoder reads only "
                f"{backbone.frame.capacity} sub-words at once: set length to at most "
                "this number"
            )
        self.config = config
        self.backbone = backbone
        self.labels = labels
        self.lora: LoRA | None = None
        if config.rank:
            linears = _find_all_linears(backbone)
            self.lora = LoRA(linears, config.rank, config.alpha, seed)
        with seeding_layer(seed, "attention"):
            self.attention = LabelClassifier(backbone.width, config.width, labels)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.attention.bias.device

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained and sent, sorted by name."""
        return dict(sorted(self.named_parameters()))

    def state(self) -> dict[str, Tensor]:
        """Return all tensors of the network besides the encoder's."""
        return {**self.trainable()}

    def make_network_input(self, patients: Inputs) -> SubWords:
        """Return patients unchanged, after a check that they are sub-words.

        Raises:
            DataError: They are bags or vectors, or another encoder's.
        """
        if not isinstance(patients, SubWords) or patients.width != self.backbone.width:
            raise DataError(
                f"the network reads sub-words of an encoder of width "
                f"{self.backbone.width}, but received other features: give it notes "
                "read by that encoder"
            )
        return patients

    # The states of the encoder.

    def compute_states(self, patients: SubWords) -> Tensor:
        """Return H of all patients, (sub-words, width), patient after patient."""
        if self.lora is not None:
            return self._read(patients)
        notes = [
            self._read_once(patients.ids[start:end])
            for start, end in pairwise(patients.bounds.tolist())
        ]
        empty = torch.zeros(0, self.backbone.width)
        return torch.cat([empty, *notes]).float().to(self.device)

    @torch.no_grad()
    def _read_once(self, ids: np.ndarray) -> Tensor:
        """Return (sub-words, width) float16 states of a note, by an encoder as it is.

        They are the same in training and in prediction, whatever the precision of
        training.

        Args:
            ids: (sub-words,) the note.
        """
        key = (self.backbone.fingerprint, self.config.length, ids.tobytes())
        states = _kept_states.get(key)
        if states is None:
            ends = np.array([0, len(ids)])
            note = SubWords(ids, ends, np.array([0, 1]), self.backbone.width)
            states = self._read_as_it_is(note)
            _kept_states.keep(key, states)
        return states

    def _read_as_it_is(self, patients: SubWords) -> Tensor:
        """Return (sub-words, width) float16 states by an encoder without adapters."""
        with setting_precision("float32", self.device):
            return self._read(patients).half().cpu()

    def _read(self, patients: SubWords) -> Tensor:
        """Return H of all patients, which the encoder computes without the cache."""
        chunks = cut_into_chunks(patients, self.config.length)
        if not len(chunks):
            return torch.zeros(0, self.backbone.width, device=self.device)
        # Chunks of similar length are read together, which leaves little padding.
        order = np.argsort(-chunks[:, 1], kind="stable")
        states = []
        places = []
        max_chunks = self._limit_chunks()
        is_in_parts = len(order) > max_chunks
        parts: Iterable[np.ndarray] = np.split(
            order, range(max_chunks, len(order), max_chunks)
        )
        if not torch.is_grad_enabled():
            parts = count_items(parts, "reading chunks")
        for part in parts:
            starts, lengths = chunks[part].T
            ids, mask = self.backbone.frame.make_rows(
                patients.ids, starts, lengths, self.device
            )
            is_text = self._find_text(lengths, ids.shape[1])
            if is_in_parts and torch.is_grad_enabled():
                part_states: Tensor = checkpoint(
                    self._read_chunks, ids, mask, is_text, use_reentrant=False
                )
            else:
                part_states = self._read_chunks(ids, mask, is_text)
            states.append(part_states)
            places.append(concatenate_ranges(starts, lengths))
        # Put the states back into the order of the notes' sub-words.
        original_order = torch.from_numpy(np.argsort(np.concatenate(places)))
        return torch.cat(states).index_select(0, original_order.to(self.device))

    def _limit_chunks(self) -> int:
        """Return the maximum number of chunks that the encoder reads at once.

        A saved model may name any number, so without gradients it is also bounded by
        the size of a batch.
        """
        if torch.is_grad_enabled():
            return self.config.chunks
        return min(self.config.chunks, max(1, MAX_SUBWORDS // self.config.length))

    def _find_text(self, lengths: np.ndarray, longest: int) -> Tensor:
        """Return (chunks, longest) bool: True at sub-words of text, False at marks."""
        before = len(self.backbone.frame.prefix)
        step = np.arange(longest) - before
        is_text = (step >= 0) & (step < lengths[:, None])
        return torch.from_numpy(is_text).to(self.device)

    def _read_chunks(self, ids: Tensor, mask: Tensor, is_text: Tensor) -> Tensor:
        """Return the states above the sub-words of some chunks, (sub-words, width)."""
        applying: AbstractContextManager[None] = nullcontext()
        if self.lora is not None:
            applying = self.lora.applying(_find_all_linears(self.backbone))
        (states,) = self.backbone.compute_states(ids, mask, around=applying)
        return states[is_text]

    # Training and prediction.

    def forward(self, patients: Inputs) -> Tensor:
        """Return (patients, labels) arguments of the sigmoids: log-odds of labels."""
        words = self.make_network_input(patients)
        states = F.dropout(
            self.compute_states(words), self.config.dropout, self.training
        )
        parts = states.split(words.sizes.tolist())
        return torch.stack([self.attention(part) for part in parts])

    def loss(self, patients: Inputs, labels: np.ndarray) -> Tensor:
        """Return the mean binary cross-entropy, (), over labelled pairs.

        Args:
            patients: The patients.
            labels: (patients, labels), as in `compute_code_loss`.
        """
        return compute_code_loss(self(patients), labels)

    def compute_logits(self, patients: Inputs) -> np.ndarray:
        """Return (patients, labels) float32 log-odds, without dropout."""
        words = self.make_network_input(patients)
        logits = np.empty((len(words), self.labels), np.float32)
        max_subwords = max(1, _MAX_VALUES // max(self.backbone.width, self.labels))
        with evaluating(self), torch.no_grad():
            for rows in _iterate_batches(words.sizes, max_subwords):
                batch = words.take(rows)
                if batch.sizes.sum() > max_subwords:
                    logits[rows[0]] = self._score_in_pieces(batch).cpu().numpy()
                else:
                    logits[rows] = self(batch).cpu().numpy()
        return logits

    def _score_in_pieces(self, patient: SubWords) -> Tensor:
        """Return (labels,) log-odds of one patient, without all states in memory."""
        running = _RunningScores(self.attention, _MAX_VALUES)
        chunks = cut_into_chunks(patient, self.config.length)
        in_piece = max(1, MAX_SUBWORDS // self.config.length)
        for first in range(0, len(chunks), in_piece):
            starts, lengths = chunks[first : first + in_piece].T
            bounds = compute_offsets(lengths)  # each chunk is a note of its own
            ids = patient.ids[starts[0] : starts[0] + bounds[-1]]
            piece = SubWords(ids, bounds, np.array([0, len(lengths)]), patient.width)
            if self.lora is None:
                states = self._read_as_it_is(piece).to(self.device).float()
            else:
                states = self._read(piece)
            running.add(states)
        return running.compute_logits()

    def predict_probabilities(self, patients: Inputs) -> np.ndarray:
        """Return (patients, labels) float32 probabilities, without dropout."""
        logits = torch.from_numpy(self.compute_logits(patients))
        probabilities: np.ndarray = logits.sigmoid().numpy()
        return probabilities


def _iterate_batches(sizes: np.ndarray, max_subwords: int) -> Iterator[np.ndarray]:
    """Yield the rows of each batch of patients.

    Args:
        sizes: (patients,) the number of sub-words of each patient.
        max_subwords: The maximum number of sub-words of a batch. A patient who has more
            is a batch alone.
    """
    start = 0
    while start < len(sizes):
        totals = np.cumsum(sizes[start : start + _BATCH])
        count = max(1, int(np.searchsorted(totals, max_subwords, side="right")))
        yield np.arange(start, start + count)
        start += count


def cut_into_chunks(patients: SubWords, length: int) -> np.ndarray:
    """Return the chunks of all notes, in order; a note without sub-words has none.

    Args:
        patients: The patients.
        length: The number of sub-words of a chunk; the last one of a note may have
            fewer.

    Returns:
        (chunks, 2) int64: the first sub-word of each chunk, and its number of
        sub-words.
    """
    sizes = np.diff(patients.bounds)
    counts = -(-sizes // length)  # chunks of each note
    within = np.arange(counts.sum()) - np.repeat(compute_offsets(counts)[:-1], counts)
    starts = np.repeat(patients.bounds[:-1], counts) + within * length
    ends = np.minimum(starts + length, np.repeat(patients.bounds[1:], counts))
    return np.stack([starts, ends - starts], axis=1)
