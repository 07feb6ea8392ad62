"""The interface of models that find mentions, and the base of models that tag words.

    Model           the interface between methods and models of any kind
    TaggingModel    a model that predicts a tag for each word: it needs an encoding of
                    texts and a reading of a batch, and inherits losses, gradients,
                    soft targets and prediction
    CrfReading      the reading of a batch by a model with a CRF on top; `WordReading`
                    (`word_reading.py`) is the one for models without a CRF

A kind of model is one file of this folder: its specification, a `Model`, and a constant
`KIND` that names both. No list elsewhere names it: `[model] kind = "some-kind"` is
found in the module `some_kind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.core.listeners import BatchListeners
from fednotes.core.types import Document, Span, TagSet
from fednotes.core.work import working
from fednotes.data.batches import Encoded, Unit, decode_documents, remove_mentions
from fednotes.data.tags import find_spans, make_span_mask
from fednotes.encoders.encoder import batch_similar_lengths
from fednotes.taggers.corpora import (
    Batch,
    PreparedCorpus,
    Progress,
    require_sentences,
)
from fednotes.taggers.layers import CrfOutput, append_zero_row
from fednotes.taggers.partial import (
    Soft,
    compute_source_and_target_loss,
    compute_transfer_gradients,
    mark_unknown_tags,
)

# The largest batch without gradients: sub-words with padding, and sentences.
MAX_SUBWORDS, MAX_SENTENCES = 8192, 256
# The largest block of masked emissions in `CrfReading.compute_span_probabilities`: 32
# MiB in float64.
_MAX_BLOCK_SIZE = 1 << 22


@dataclass(frozen=True)
class ModelConfig:
    """The settings of a mention model in a job's [model] table.

    Attributes:
        trains_on_posteriors: Whether the model can train on a posterior instead of a
            single best annotation; not a key.
        predicts_tags: Whether that posterior consists of the probabilities of each
            word's tags; not a key.
        finds_overlaps: Whether the model can find overlapping mentions of different
            types, and train on them; not a key.
        encodes: Whether the model is a trainable pre-trained encoder; not a key.
    """

    trains_on_posteriors: ClassVar[bool] = True
    predicts_tags: ClassVar[bool] = True
    finds_overlaps: ClassVar[bool] = False
    encodes: ClassVar[bool] = False

    def for_types(
        self,
        types: Collection[str],  # noqa: ARG002 - kinds with settings per type use it
    ) -> ModelConfig:
        """Return the configuration of a model with only these entity types."""
        return self

    def require_known_types(self, types: Collection[str]) -> None:
        """Raise ConfigError if a setting is about an entity type that no site has.

        Args:
            types: The entity types of all sites.
        """

    @property
    def has_frozen_encoder(self) -> bool:
        """Whether the model reads the states of a frozen encoder."""
        return False

    @property
    def prefers_one_thread(self) -> bool:
        """Whether prediction is slower with several threads, as in small layers."""
        return False

    @property
    def trains_word_embeddings(self) -> bool:
        """Whether updates contain a row for each sub-word of the vocabulary."""
        return False

    @property
    def unit(self) -> Unit:
        """The stretch of text that the model reads at once."""
        return "sentence"

    @property
    def max_unit_words(self) -> int | None:
        """The maximum number of words in a unit; None if units are never cut."""
        return None

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The name of the kind in a job's [model] table."""


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        config: The class of its specification.
        build: Builds a model from a specification, a tag set, a seed and a device.
        read: Builds a specification from a TOML table and the name of the table in
            messages; None if the table's keys are the fields of `config`.
    """

    config: type[Any]
    build: Callable[..., Model]
    read: Callable[[Mapping[str, Any], str], Any] | None = None


@dataclass(frozen=True)
class Losses:
    """The losses of some sentences, divided by the origin of their targets.

    The last four are for adversarial methods and are empty without `with_states=True`.

    Attributes:
        source: (sentences,) loss of the site's own annotation.
        target: (sentences,) loss of the annotation that was added for types that the
            site does not annotate; zeros where nothing was added.
        hidden: (sentences, width) for each layer that represents text, the mean over
            a sentence.
        outputs: (steps, width) states directly below the output scores, one for each
            predicted target.
        is_added: (steps,) bool, whether a step predicts an added target.
        score_states: Maps states (steps, width) to unnormalised scores (steps,
            candidates), -inf where a candidate is not allowed.
    """

    source: Tensor
    target: Tensor
    hidden: tuple[Tensor, ...] = ()
    outputs: Tensor | None = None
    is_added: Tensor | None = None
    score_states: Callable[[Tensor], Tensor] | None = None


class PrepareOptions(NamedTuple):
    """The options of `Model.prepare`.

    Attributes:
        cache: Folder for results that are computed once and cached.
        progress: Is called with the number of units done and their total.
        has_gold: Whether the documents have annotation for training.
    """

    cache: Path | None
    progress: Progress | None
    has_gold: bool


class Reading(Protocol):
    """The outputs of a model that tags words, for a batch of sentences."""

    @property
    def tokens(self) -> np.ndarray:
        """(words,) indices of the corpus's tokens that were read."""

    def find_best_tags(self) -> np.ndarray:
        """Return (words,), the predicted tags."""

    def compute_span_probabilities(self, spans: np.ndarray) -> np.ndarray:
        """Return (spans,), the probability of exactly these words with this type.

        Args:
            spans: (spans, 4) the position of the sentence in the batch, the span's
                first word in the sentence, the word after its last one, and the index
                of its type; type -1 means that none of these words is in a mention.
        """

    def compute_posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities of tags, conditioned on each word's allowed tags.

        A reading whose losses do not depend on tags returns the probabilities that
        replace the annotation of other types in its losses.

        Returns:
            (words, tags) marginals, and (sentences, tags, tags) expected transitions.
        """

    def losses(self, *, with_states: bool) -> Losses:
        """Return the losses of sentences; see `Model.losses`."""

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the transfer parameter; see `Model.gradients`."""


class Model(nn.Module, ABC):
    """A model that finds mentions of the entity types of one tag set.

    Attributes:
        config: The specification from which it was built.
        tagset: The tag set whose types it predicts.
        batch_listeners: Callbacks that receive each batch before the model reads it.
        transfer: Name of the small trainable parameter whose gradients show how well
            training on one loss also reduces another.
        reads: The class of the corpora that `prepare` returns. Every method refuses a
            corpus of another class.
        encoder_key: The key of the specification that names a frozen encoder; "" if
            there is none.
        confidence_meaning: A description of a predicted span's confidence. The readings
            define such texts: `CrfReading.confidence_meaning` and
            `WordReading.confidence_meaning`.
    """

    transfer: ClassVar[str]
    reads: ClassVar[type[PreparedCorpus]]
    encoder_key: ClassVar[str] = ""
    confidence_meaning: ClassVar[str] = (
        "the probability of exactly this span with this label, given the text"
    )

    def __init__(self, config: Any, tagset: TagSet) -> None:
        super().__init__()
        if not tagset.types:
            raise ConfigError(
                "the tag set has no entity types: a model needs at least one"
            )
        self.config = config
        self.tagset = tagset
        self.batch_listeners = BatchListeners()

    # ---- defined by each kind of model ----

    @abstractmethod
    def _encode(
        self, documents: tuple[Document, ...], options: PrepareOptions
    ) -> PreparedCorpus:
        """Encode documents for `prepare`, with every type known."""

    @abstractmethod
    def _predict(self, corpus: Any, *, with_confidence: bool) -> tuple[Document, ...]:
        """Return the corpus's documents with predicted spans, without dropout."""

    @abstractmethod
    def losses(
        self,
        corpus: PreparedCorpus,
        indices: Sequence[int] | np.ndarray,
        *,
        with_states: bool = False,
    ) -> Losses:
        """Return the losses of some sentences by the origin of their targets.

        If every type is known, `source` is the ordinary loss and `target` is exactly 0,
        without a gradient. In training mode, dropout draws only from torch's global
        generator.

        Args:
            corpus: A corpus prepared by a model of this kind.
            indices: Indices of the sentences, in the order of the losses.
            with_states: Whether to add the states that adversarial methods need.

        Raises:
            TrainingError: There are no sentences.
        """

    @abstractmethod
    def gradients(
        self, corpus: PreparedCorpus, indices: Sequence[int] | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return gradients with respect to the transfer parameter, without dropout.

        No parameter's `.grad` changes.

        Returns:
            (sentences, size) the gradient of each sentence's source loss, and (size,)
            the gradient of the sum of their target losses.
        """

    @abstractmethod
    def soften(
        self, corpus: PreparedCorpus, rows: np.ndarray | None = None
    ) -> PreparedCorpus:
        """Return the corpus with this model's posterior as the target, without dropout.

        The posterior is conditioned on the spans of the known types. If every type is
        known, the annotation remains the target.

        Args:
            corpus: A corpus prepared by a model of this kind.
            rows: Indices of the sentences to compute it for; others get zeros. None
                computes it for all.

        Raises:
            ConfigError: The specification has `trains_on_posteriors` = False.
        """

    @abstractmethod
    def predict_tags(self, corpus: PreparedCorpus, rows: np.ndarray) -> np.ndarray:
        """Return (tokens,), the tags predicted for some sentences; 0 for the others.

        The sentences are read in one batch.
        """

    @abstractmethod
    def compute_alternatives(self, document: Document, span: Span) -> dict[str, float]:
        """Return the probability that a span's words are a mention, by type.

        "O" has the probability that none of these words is in any mention. The
        remaining probability belongs to spans with other boundaries.

        Raises:
            DataError: The span has no word, or its words are in two sentences.
        """

    # ---- the same for all kinds ----

    @property
    def device(self) -> torch.device:
        """The device that holds the parameters."""
        return next(self.parameters()).device

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of columns of each layer of `Losses.hidden`.

        By default, a kind has no such layers and cannot be trained by the method
        "adversarial".
        """
        return ()

    @property
    def output_width(self) -> int:
        """The number of columns of `Losses.outputs`."""
        return self.get_parameter(self.transfer).shape[1]

    @property
    def backbone_fingerprint(self) -> str:
        """The fingerprint of the encoder that `encoder_key` names; "" without one."""
        return ""

    def count_frozen(self) -> int:
        """Return the number of frozen numbers in its backbone and tables."""
        return 0

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return all parameters that are trained and sent, sorted by name."""
        named = sorted(self.named_parameters(), key=lambda pair: pair[0])
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def prepare(
        self,
        documents: Sequence[Document],
        cache: Path | None = None,
        progress: Progress | None = None,
        *,
        gold: bool = True,
    ) -> PreparedCorpus:
        """Encode documents, and compute everything that training does not change.

        Every type of the tag set counts as annotated; see `annotate`.

        Args:
            documents: Texts with their annotation.
            cache: Folder for results that are computed once and cached.
            progress: Is called meanwhile with the number of units done and their total.
            gold: False removes the annotation first, so that sentence boundaries do not
                depend on it.

        Raises:
            DataError: A label is not in the tag set.
        """
        texts = tuple(documents) if gold else remove_mentions(documents)
        return self._encode(texts, PrepareOptions(cache, progress, gold))

    def require_corpus(self, corpus: PreparedCorpus) -> Any:
        """Return the corpus if a model of this kind prepared it.

        Raises:
            ModelError: Another kind of model prepared it.
        """
        if isinstance(corpus, self.reads):
            return corpus
        kind = self.config.kind
        raise ModelError(
            f"models of kind {kind!r} cannot read a corpus that another kind of model "
            f"prepared ({type(corpus).__name__}): prepare it with this model"
        )

    def annotate(
        self,
        corpus: PreparedCorpus,
        documents: Sequence[Document],
        known: Collection[str],
    ) -> PreparedCorpus:
        """Return the same texts with the spans of `documents` as their annotation.

        Args:
            corpus: A corpus prepared by a model of this kind.
            documents: The same texts, in the same order.
            known: The types that the site annotates itself.
        """
        self.require_corpus(corpus)
        return corpus.annotate(documents, known)

    @torch.no_grad()
    def predict(
        self,
        documents: Sequence[Document] | PreparedCorpus,
        *,
        confidence: bool = False,
    ) -> tuple[Document, ...]:
        """Return the documents with predicted spans in place of their annotation.

        The documents' annotation is not used. Dropout is off.

        Args:
            documents: Documents, or a corpus prepared by a model of this kind.
            confidence: Whether spans get a confidence, as `confidence_meaning`
                describes it.
        """
        if isinstance(documents, Sequence):
            corpus = self.prepare(documents, gold=False)
        else:
            corpus = self.require_corpus(documents)
        with evaluating(self):
            return self._predict(corpus, with_confidence=confidence)


class SavesItself(ABC):
    """Mixin for models that are saved with all their frozen parts."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the model into an empty folder."""


class TaggingModel(Model):
    """A model that predicts a tag for each word.

    A kind of model defines `_encode` and `_read`; the rest follows from these two.
    """

    @abstractmethod
    def _read(
        self, corpus: Any, chosen: np.ndarray, *, all_layers: bool = False
    ) -> Reading:
        """Run the model on some sentences.

        Args:
            corpus: A corpus of the class `reads`.
            chosen: Indices of the sentences, at least one.
            all_layers: Whether to keep the states that `Losses.hidden` needs.

        Returns:
            A `CrfReading` for a model with a CRF on top; a `WordReading`
            (`word_reading.py`) if the words' tags are independent given the text, as
            with a softmax.
        """

    def _read_batch(
        self, corpus: Any, chosen: np.ndarray, *, all_layers: bool = False
    ) -> Any:
        """Announce a batch to `batch_listeners`, then run `_read`."""
        self.batch_listeners.announce(self, corpus, chosen)
        return self._read(corpus, chosen, all_layers=all_layers)

    def _read_for_tags(self, corpus: Any, chosen: np.ndarray) -> Any:
        """Return a reading that is used only for tags and their probabilities.

        A model whose readings also contain large states can omit them here.
        """
        return self._read_batch(corpus, chosen)

    def _batch_by_length(self, lengths: np.ndarray) -> Iterable[np.ndarray]:
        """Group sentences of similar length into batches, for use without gradients."""
        return batch_similar_lengths(lengths.tolist(), MAX_SUBWORDS, MAX_SENTENCES)

    def losses(
        self,
        corpus: PreparedCorpus,
        indices: Sequence[int] | np.ndarray,
        *,
        with_states: bool = False,
    ) -> Losses:
        """Return the losses of sentences; see `Model.losses`."""
        prepared = self.require_corpus(corpus)
        chosen = require_sentences(indices)
        reading = self._read_batch(prepared, chosen, all_layers=with_states)
        losses: Losses = reading.losses(with_states=with_states)
        return losses

    @torch.no_grad()
    def gradients(
        self, corpus: PreparedCorpus, indices: Sequence[int] | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the transfer parameter; see `Model.gradients`."""
        prepared: PreparedCorpus = self.require_corpus(corpus)
        chosen = np.asarray(indices, np.int64)
        weight = self.get_parameter(self.transfer)
        each = weight.new_zeros(len(chosen), weight.numel())
        total = weight.new_zeros(weight.numel())

        with evaluating(self):
            for part in self._batch_by_length(prepared.lengths[chosen]):
                reading = self._read_batch(prepared, chosen[part])
                of_source, of_target = reading.gradients()
                each[part] = of_source.to(each)
                total += of_target.to(total)
        return each, total

    @torch.no_grad()
    def soften(
        self, corpus: PreparedCorpus, rows: np.ndarray | None = None
    ) -> PreparedCorpus:
        """Return the corpus with this model's posterior; see `Model.soften`."""
        prepared: PreparedCorpus = self.require_corpus(corpus)
        if prepared.complete or not prepared.sentences:
            return replace(prepared, soft=None)
        if rows is None:
            rows = np.arange(prepared.sentences)

        tokens = len(prepared.encoded.form)
        unary: np.ndarray | None = None
        pairs: np.ndarray | None = None
        with evaluating(self):
            for part in self._batch_by_length(prepared.lengths[rows]):
                reading = self._read_for_tags(prepared, rows[part])
                marginals, transitions = reading.compute_posterior()
                if unary is None or pairs is None:
                    unary = np.zeros((tokens, marginals.shape[1]), np.float32)
                    shape = (prepared.sentences, *transitions.shape[1:])
                    pairs = np.zeros(shape, np.float32)
                unary[reading.tokens] = marginals
                pairs[rows[part]] = transitions

        if unary is None or pairs is None:
            unary = np.zeros((tokens, len(self.tagset.tags)), np.float32)
            pairs = np.zeros((0, 0, 0), np.float32)
        return replace(prepared, soft=Soft(unary, pairs))

    @torch.no_grad()
    def predict_tags(self, corpus: PreparedCorpus, rows: np.ndarray) -> np.ndarray:
        """Return the predicted tags of some sentences; see `Model.predict_tags`."""
        prepared: PreparedCorpus = self.require_corpus(corpus)
        ids = np.zeros(len(prepared.encoded.form), np.int64)
        with evaluating(self):
            reading = self._read_for_tags(prepared, rows)
            ids[reading.tokens] = reading.find_best_tags()
        return ids

    @torch.no_grad()
    def compute_alternatives(self, document: Document, span: Span) -> dict[str, float]:
        """Return probabilities of types; see `Model.compute_alternatives`."""
        corpus = self.prepare([document], gold=False)
        sentence, first, last = _find_sentence(corpus.encoded, document, span)
        names = ("O", *self.tagset.types)
        spans = np.array([(0, first, last, index - 1) for index in range(len(names))])
        with evaluating(self):
            reading = self._read_for_tags(corpus, np.array([sentence]))
            probabilities = reading.compute_span_probabilities(spans)
        return dict(zip(names, probabilities.tolist(), strict=True))

    def _predict(self, corpus: Any, *, with_confidence: bool) -> tuple[Document, ...]:
        """Return the documents with predicted spans; see `Model._predict`."""
        encoded: Encoded = corpus.encoded
        # Words that the model does not read remain O.
        ids = np.zeros(len(encoded.form), np.int64)
        # (tokens,), at the first token of each predicted span
        confidences = np.full(len(ids), np.nan) if with_confidence else None

        with working("predicting sentences", len(corpus.lengths)) as count:
            for chosen in self._batch_by_length(corpus.lengths):
                reading = self._read_for_tags(corpus, chosen)
                ids[reading.tokens] = reading.find_best_tags()
                if confidences is not None:
                    spans = self._collect_spans(encoded, ids, chosen)
                    first_tokens = encoded.bounds[chosen][spans[:, 0]] + spans[:, 1]
                    confidences[first_tokens] = reading.compute_span_probabilities(
                        spans
                    )
                count.add(len(chosen))
        return decode_documents(encoded, ids, confidences)

    def _collect_spans(
        self, encoded: Encoded, ids: np.ndarray, chosen: np.ndarray
    ) -> np.ndarray:
        """Return the spans that tags encode, (spans, 4) as in `Reading`.

        Args:
            encoded: The corpus.
            ids: (tokens,) tags of the corpus's tokens.
            chosen: Indices of the sentences to search.
        """
        rows: list[tuple[int, int, int, int]] = []
        for row, sentence in enumerate(chosen):
            start = encoded.bounds[sentence]
            end = encoded.bounds[sentence + 1]
            firsts, lasts, kinds = find_spans(ids[start:end], self.tagset)
            for first, last, kind in zip(firsts, lasts, kinds, strict=True):
                rows.append((row, first, last, kind))
        return np.array(rows, np.int64).reshape(-1, 4)


def _find_sentence(
    encoded: Encoded, document: Document, span: Span
) -> tuple[int, int, int]:
    """Return a span's sentence, first word, and the word after its last one.

    Raises:
        DataError: There are no words, or they are in two sentences.
    """
    first = int(np.searchsorted(encoded.offsets[:, 1], span.start, side="right"))
    last = int(np.searchsorted(encoded.offsets[:, 0], span.end, side="left"))
    sentence = int(np.searchsorted(encoded.bounds, first, side="right")) - 1
    place = f"characters {span.start} to {span.end}"
    if not 0 <= span.start < span.end <= len(document.text) or first >= last:
        raise DataError(
            f"{place} contain no word of the document: give a span that contains one"
        )
    if last > encoded.bounds[sentence + 1]:
        raise DataError(
            f"{place}: the words are in two sentences, which the model reads "
            "separately: give a span within one sentence"
        )
    start = int(encoded.bounds[sentence])
    return sentence, first - start, last - start


@dataclass(frozen=True, eq=False)
class CrfReading:
    """The `Reading` of a model with a CRF on top.

    Attributes:
        output: The projection to tags, and the CRF.
        batch: The sentences.
        features: The projection's input, (batch, steps, width), or (tokens, width) if
            `feature_rows` is given.
        layers: Like `features`, one for each layer of `Losses.hidden`, zero at padding.
        feature_rows: (batch, steps) each token's row of `features`, or the number of
            tokens at padding. None if `features` is padded.
        confidence_meaning: Describes `compute_span_probabilities`, for
            `Model.confidence_meaning`.
    """

    confidence_meaning: ClassVar[str] = (
        "the CRF's marginal: the probability of exactly this span with "
        "this label, given the text"
    )
    output: CrfOutput
    batch: Batch
    features: Tensor
    layers: Sequence[Tensor]
    feature_rows: Tensor | None = None

    @property
    def tokens(self) -> np.ndarray:
        """The indices of the words that were read; see `Reading.tokens`."""
        return self.batch.tokens[self.batch.inside]

    def _pad(self, values: Tensor) -> Tensor:
        """Return `values` as (batch, steps, …), zero at padding."""
        if self.feature_rows is None:
            return values
        return append_zero_row(values)[self.feature_rows]

    def compute_emissions(self) -> Tensor:
        """Return the unnormalised scores of the tags, (batch, steps, tags).

        They are not rounded to the precision of autocast, because a CRF adds them up.
        """
        project = self.output.project
        with torch.autocast(self.features.device.type, enabled=False):
            return self._pad(project(self.features.to(project.weight.dtype)))

    def find_best_tags(self) -> np.ndarray:
        """Return the predicted tags; see `Reading.find_best_tags`."""
        ids = self.output.crf.find_best_tags(
            self.compute_emissions(), self.batch.lengths
        )
        return ids.cpu().numpy()[self.batch.inside]

    def compute_span_probabilities(self, spans: np.ndarray) -> np.ndarray:
        """Return spans' probabilities, summed over all sequences with the span."""
        crf = self.output.crf
        batch = self.batch
        emissions = self.compute_emissions()
        probabilities = [np.zeros(0)]
        block_size = max(1, _MAX_BLOCK_SIZE // emissions[0].numel())

        for start in range(0, len(spans), block_size):
            block = spans[start : start + block_size]
            allowed = self._find_tags_of_spans(block, tuple(emissions.shape[1:]))
            rows = torch.from_numpy(batch.request_order[block[:, 0]])
            part = crf.compute_probability_within(
                emissions, batch.lengths, rows, torch.from_numpy(allowed)
            )
            probabilities.append(part.cpu().numpy())
        return np.concatenate(probabilities)

    def _find_tags_of_spans(
        self, spans: np.ndarray, shape: tuple[int, ...]
    ) -> np.ndarray:
        """Return the tags allowed if a sentence contains exactly a given span.

        Args:
            spans: (spans, 4), as in `Reading.compute_span_probabilities`.
            shape: (steps, tags).

        Returns:
            (spans, steps, tags) bool.
        """
        tagset = self.batch.corpus.encoded.tagset
        allowed = np.ones((len(spans), *shape), dtype=bool)
        for row, (_, first, last, kind) in zip(allowed, spans.tolist(), strict=True):
            # One row for the word before the span, one per word, one for the word after
            # it.
            wanted = make_span_mask(tagset, kind, last - first)
            if first == 0:
                wanted = wanted[1:]
            before = max(first - 1, 0)
            row[before : last + 1] = wanted[: len(row) - before]
        return allowed

    def compute_posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities of tags; see `Reading.compute_posterior`."""
        batch = self.batch
        unary, pairs = self.output.crf.compute_posterior(
            self.compute_emissions(), batch.lengths, batch.allowed
        )
        marginals = unary.float().cpu().numpy()[batch.inside]
        transitions = pairs[batch.request_order].float().cpu().numpy()
        return marginals, transitions

    def losses(self, *, with_states: bool) -> Losses:
        """Return the losses of sentences; see `Model.losses`."""
        batch = self.batch
        in_order = batch.request_order
        source, target = compute_source_and_target_loss(
            self.output.crf, self.compute_emissions(), *batch.make_targets()
        )
        losses = Losses(source[in_order], target[in_order])
        if not with_states:
            return losses

        inside = torch.from_numpy(batch.inside[in_order]).to(self.features.device)
        if self.feature_rows is None:
            outputs = self.features[inside]
        else:
            outputs = self.features[self.feature_rows[in_order][inside]]
        sizes = batch.lengths[:, None]
        means = [self._pad(layer).sum(1) / sizes for layer in self.layers]
        added = mark_unknown_tags(
            batch.tags, batch.corpus.encoded.tagset, batch.corpus.known
        )
        return replace(
            losses,
            hidden=tuple(mean[in_order] for mean in means),
            outputs=outputs,
            is_added=added[in_order][inside],
            score_states=self.output.project,
        )

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the transfer parameter; see `Model.gradients`."""
        source, target = compute_transfer_gradients(
            self.output.crf,
            self.output.project,
            self._pad(self.features),
            *self.batch.make_targets(),
        )
        return source[self.batch.request_order], target


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Disable dropout in the context, and restore the module's mode afterwards."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
