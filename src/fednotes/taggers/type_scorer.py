r"""Words scored against the names and descriptions of entity types.

The idea of GLiNER (Zaratiana et al. 2024), in the form that scores words (its
multi-task variant): there is no row of outputs for each entity type. The encoder reads
a text about each type, "name: description", and a word's scores for the type follow
from the two vectors:

    h_w          the word's vector, the mean of its sub-words' states
    g_t          the type's vector, the mean over the sub-words of its text
    e_t          V g_t
    s_{w,t,k}    (U_k h_w + c_k) · e_t / √m + b_k, for k = start, inside, end

where m is the length of e_t. The same adapted encoder reads words and types in the same
step, so that both are trained. `type_scores.py` explains the scores, their loss and how
mentions are read from them.

This suits sites with different entity types. The loss is taken over the types that a
site annotates, so missing annotation of a type does no harm. Sites need no rows in
common, and what is learned about the starts and ends of mentions serves all types.

The encoder is frozen and shared by all models of a process (`Backbone`); LoRA adapters
in all its layers' linear maps, U, c, V and b are trained and sent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, suggest_name
from fednotes.core.numbers import (
    FractionBelowOne,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
)
from fednotes.core.settings import LocalFile, checked
from fednotes.core.tensors import seeding_layer
from fednotes.core.types import Document, TagSet
from fednotes.core.work import working
from fednotes.data.batches import decode_mentions
from fednotes.data.tags import split_label, write_tags
from fednotes.data.text import Passage
from fednotes.encoders.adapters import LoRA, find_linears
from fednotes.encoders.reading import split_passages
from fednotes.taggers.corpora import Batch, EncoderCorpus, PreparedCorpus
from fednotes.taggers.encoder_tagger import (
    Backbone,
    TunedEncoder,
    compute_word_vectors,
    open_backbone,
)
from fednotes.taggers.model import (
    Kind,
    Losses,
    ModelConfig,
    evaluating,
)
from fednotes.taggers.partial import mark_unknown_tags
from fednotes.taggers.type_scores import (
    INSIDE,
    PLACES,
    compute_place_losses,
    find_best_spans,
    mark_mentions,
    mark_places,
    score_spans,
    to_probabilities,
)

# The maximum number of sub-words in the texts about all types, each padded to the
# longest text. In training, a sub-word takes about 300 KB with MiniLM.
MAX_SUBWORDS = 8192
# The initial bias b: few words start, are inside or end a mention.
INITIAL_BIAS = -2.0

_NO_MENTIONS = np.zeros((0, 3), np.int64)


@checked(frozen=True)
class TypeScorerConfig(ModelConfig):
    """An encoder with LoRA adapters that scores words against texts about the types.

    Attributes:
        kind: The type scorer.
        encoder: "minilm" or a Hugging Face directory.
        descriptions: Descriptions of entity types, which the encoder reads after the
            types' names. For a type without one, it reads only the words of the name,
            split at "_" and capitals: "sign symptom" for "Sign_symptom".
        rank: Rank of the LoRA adapters in all layers: W + alpha / rank · B A.
        alpha: Scale of the LoRA adapters; see `rank`.
        width: Length of the vectors that are compared.
        positive_weight: Weight of words in mentions in the loss; other words have
            weight 1. Raise it if too few mentions are found.
        threshold: Probability above which a word starts, continues or ends a mention.
            The default suits models that were trained on few mentions of a type, which
            are too cautious. Raise it if too many predicted mentions are wrong. With
            `choose_threshold` of the method "finetune", training chooses it.
        dropout: Dropout rate of the words' vectors.
        max_tokens: Maximum number of tokens in a sentence; longer sentences are cut
            between entities. A sentence longer than the encoder's positions is read in
            overlapping windows.
    """

    predicts_tags: ClassVar[bool] = False
    finds_overlaps: ClassVar[bool] = True
    encodes: ClassVar[bool] = True

    kind: Literal["type-scorer"] = "type-scorer"
    encoder: LocalFile = "minilm"
    descriptions: Mapping[str, str] = field(default_factory=dict)
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    width: PositiveInt = 128
    positive_weight: PositiveFloat = 1.0
    threshold: OpenFraction = 0.01
    dropout: FractionBelowOne = 0.2
    max_tokens: PositiveInt = 256

    @property
    def has_frozen_encoder(self) -> bool:
        """True, because the adapters do not change the encoder's own parameters."""
        return True

    def for_types(self, types: Collection[str]) -> TypeScorerConfig:
        """Return the configuration without the descriptions of other types."""
        descriptions = {
            label: text for label, text in self.descriptions.items() if label in types
        }
        return replace(self, descriptions=descriptions)

    def require_known_types(self, types: Collection[str]) -> None:
        """Raise ConfigError if a description is of a type that no site has."""
        _require_known(self.descriptions, types)


def _require_known(labels: Iterable[str], types: Collection[str]) -> None:
    """Raise ConfigError if a described type is not one of these."""
    for label in labels:
        if label not in types:
            raise ConfigError(
                "[model] descriptions: unknown type "
                f"{label!r}: {suggest_name(label, types)}"
            )


def make_type_texts(
    types: Sequence[str], descriptions: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the text about each type: its name in words, and its description.

    Raises:
        ConfigError: A description is of an unknown type, or two types have the same
            text.
    """
    _require_known(descriptions, types)
    texts: dict[str, str] = {}
    for label in types:
        name = split_label(label)
        description = descriptions.get(label, "").strip()
        text = f"{name}: {description}" if description else name
        if text in texts:
            raise ConfigError(
                f"the types {texts[text]!r} and {label!r} have the same text {text!r}: "
                "give one of them another description in [model] descriptions"
            )
        texts[text] = label
    return tuple(texts)


@lru_cache(maxsize=8)
def _find_all_linears(backbone: Backbone) -> list[nn.Linear]:
    """Return all linear layers of a backbone's stack, once per process."""
    return find_linears(backbone.model, "all")


class TypeClassifier(nn.Module):
    """A layer that scores word vectors for type vectors.

    Its parameters are words (U and c), types (V) and bias (b).

    Args:
        inputs: Length of the vectors of words and types.
        width: m, the length of the vectors that are compared.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.words = nn.Linear(inputs, PLACES * width)
        self.types = nn.Linear(inputs, width, bias=False)
        self.bias = nn.Parameter(torch.full((PLACES,), INITIAL_BIAS))
        self._scale = 1 / math.sqrt(width)

    def embed_types(self, vectors: Tensor) -> Tensor:
        """Return e_t / √m, (types, width), from g_t, (types, inputs)."""
        embedded: Tensor = self.types(vectors) * self._scale  # [scorer score]
        return embedded

    def forward(self, words: Tensor, types: Tensor) -> Tensor:
        """Return s, (…, types, places), in at least float32.

        Args:
            words: (…, inputs) h_w.
            types: (types, width) e_t / √m.
        """
        projected = self.words(words).unflatten(-1, (PLACES, -1))
        scores = projected @ types.T  # (…, places, types)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        return scores.transpose(-1, -2).to(dtype) + self.bias  # [scorer score]


@dataclass(frozen=True, eq=False)
class TypeReading:
    """The `Reading` of a type scorer.

    Attributes:
        classifier: Scores words for types.
        config: The model's settings: the weight of positives and the threshold.
        batch: The sentences.
        states: (batch, steps, inputs) h_w, 0 at padding.
        types: (types, width) e_t / √m.
        confidence_meaning: Describes `compute_span_probabilities`, for
            `Model.confidence_meaning`.
    """

    confidence_meaning: ClassVar[str] = (
        "the mean of three probabilities, which are independent for each label: that a "
        "mention with this label starts at the first word, that its words are inside "
        "one (their mean), and that one ends at the last word"
    )
    classifier: TypeClassifier
    config: TypeScorerConfig
    batch: Batch
    states: Tensor
    types: Tensor

    @property
    def tokens(self) -> np.ndarray:
        """The indices of the words that were read; see `Reading.tokens`."""
        return self.batch.tokens[self.batch.inside]

    @property
    def _tagset(self) -> TagSet:
        """The tag set of the corpus."""
        return self.batch.corpus.encoded.tagset

    @cached_property
    def probabilities(self) -> np.ndarray:
        """(batch, steps, types, places) float64, 0 at padding."""
        scores = self.classifier(self.states, self.types)
        return to_probabilities(scores) * self.batch.inside[..., None, None]

    def find_best_tags(self) -> np.ndarray:
        """Return the predicted tags; see `Reading.find_best_tags`."""
        tagset = self._tagset
        tags = np.zeros(self.batch.inside.shape, np.int64)
        threshold = self.config.threshold
        chosen = find_best_spans(self.probabilities, threshold, overlaps=False)
        for sentence, first, stop, kind in chosen.tolist():
            tag = 1 + kind * len(tagset.prefixes)
            write_tags(tags[sentence, first:stop], tag, tagset)
        return tags[self.batch.inside]

    def compute_span_probabilities(self, spans: np.ndarray) -> np.ndarray:
        """Return the scores of spans, as `type_scores.py` defines them.

        For type -1, the result is 1 minus the largest probability that one of the words
        is inside a mention of any type.
        """
        rows = spans.copy()
        rows[:, 0] = self.batch.request_order[spans[:, 0]]
        is_of_type = rows[:, 3] >= 0
        out = np.zeros(len(rows))
        out[is_of_type] = score_spans(self.probabilities, rows[is_of_type])
        for row in np.flatnonzero(~is_of_type):
            sentence, first, stop, _ = rows[row]
            inside = self.probabilities[sentence, first:stop, :, INSIDE]
            out[row] = 1 - inside.max()
        return out

    def compute_posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities of places as (words, types · places).

        They do not depend on the words' annotation, because types do not compete. There
        are no transitions.
        """
        inside = self.probabilities[self.batch.inside]
        nothing = np.zeros((len(self.batch.rows), 0, 0), np.float32)
        return inside.reshape(len(inside), -1).astype(np.float32), nothing

    def losses(self, *, with_states: bool) -> Losses:
        """Return the losses of sentences; see `Model.losses`."""
        scores = self.classifier(self.states, self.types)
        source, target = self._compute_losses(scores)
        in_order = self.batch.request_order
        losses = Losses(source[in_order], target[in_order])
        if not with_states:
            return losses
        inside = torch.from_numpy(self.batch.inside[in_order]).to(self.states.device)
        added = mark_unknown_tags(
            self.batch.tags, self._tagset, self.batch.corpus.known
        )
        return replace(
            losses,
            outputs=self.states[in_order][inside],
            is_added=added[in_order][inside],
            score_states=lambda states: self.classifier(states, self.types).flatten(-2),
        )

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the transfer parameter U; see `Model.gradients`.

        With δ = ∂ loss / ∂ s, a sentence's gradient of U_k is Σ δ_{w,t,k} e_t ⊗ h_w /
        √m over its words and the types.
        """
        states = self.states.detach()
        with torch.no_grad():
            scores = self.classifier(states, self.types)
        with torch.enable_grad():
            source, target = self._compute_losses(scores.requires_grad_())
        each = self._pull_back(source, scores)[self.batch.request_order]
        if not target.requires_grad:
            return each, each.new_zeros(each.shape[1])
        return each, self._pull_back(target, scores).sum(0)

    def _pull_back(self, losses: Tensor, scores: Tensor) -> Tensor:
        """Return each sentence's gradient of U, (batch, places · width · inputs)."""
        ones = torch.ones_like(losses)
        (delta,) = torch.autograd.grad(losses, scores, ones, retain_graph=True)
        types = self.types.detach().to(delta)
        # (batch, steps, places, width)
        of_projection = delta.transpose(-1, -2) @ types
        by_row = of_projection.flatten(2).transpose(1, 2)
        return (by_row @ self.states.detach().to(delta)).flatten(1)

    def _compute_losses(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source and target loss of each sentence, (batch,) each.

        If every type is known, the target is exactly 0 and has no gradient.
        """
        batch = self.batch
        corpus = batch.corpus
        if self._tagset.overlaps:
            shape = (*batch.inside.shape, len(self._tagset.types))
            marks = mark_mentions(batch.find_mentions(), shape)
        else:
            marks = mark_places(batch.tags.cpu().numpy(), self._tagset)
        targets = torch.from_numpy(marks).to(scores)
        weight = self.config.positive_weight
        is_real = torch.from_numpy(batch.inside).to(scores)[..., None]
        losses = compute_place_losses(scores, targets, weight) * is_real
        if corpus.complete:
            source = losses.sum((1, 2))
            return source, torch.zeros_like(source.detach())

        names = self._tagset.types
        is_known = scores.new_tensor([name in corpus.known for name in names])
        source = (losses * is_known).sum((1, 2))  # [scorer known]
        if corpus.soft is not None:
            unary = torch.from_numpy(corpus.soft.unary[batch.tokens]).to(scores)
            losses = compute_place_losses(scores, unary.view_as(scores)) * is_real
        target = (losses * (1 - is_known)).sum((1, 2))  # [scorer known]
        return source, target


class TypeScorer(TunedEncoder):
    """A tuned encoder that scores words for types; see `build_type_scorer`.

    Attributes:
        backbone: The shared encoder.
        lora: The LoRA adapters.
        classifier: The scores of words for types.
    """

    transfer = "classifier.words.weight"
    confidence_meaning = TypeReading.confidence_meaning

    def __init__(
        self, config: TypeScorerConfig, tagset: TagSet, seed: int, backbone: Backbone
    ) -> None:
        super().__init__(config, tagset, backbone)
        self._type_ids, self._type_lengths = self._split_type_texts()
        self.lora = LoRA(_find_all_linears(backbone), config.rank, config.alpha, seed)
        with seeding_layer(seed, "classifier"):
            self.classifier = TypeClassifier(backbone.width, config.width)

    def _split_type_texts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sub-words of the types' texts, flat, and their numbers.

        Raises:
            ConfigError: A text has no sub-words, or more than the encoder reads; or the
                texts take too much memory.
        """
        types = self.tagset.types
        texts = make_type_texts(types, self.config.descriptions)
        no_words = np.zeros((0, 2), np.int64)
        passages = [Passage(text, no_words) for text in texts]
        pieces = split_passages(self.backbone.tokenizer, passages)
        capacity = self.backbone.frame.capacity
        for label, text, length in zip(types, texts, pieces.lengths, strict=True):
            if not 0 < length <= capacity:
                raise ConfigError(
                    f"the text {text[:80]!r} about the type {label!r} has {length} "
                    f"sub-words, and the encoder reads 1 to {capacity}: change it in "
                    "[model] descriptions"
                )
        longest = int(pieces.lengths.argmax())
        if len(types) * pieces.lengths[longest] > MAX_SUBWORDS:
            raise ConfigError(
                f"the longest text about one of {len(types):,} types, that about "
                f"{types[longest][:80]!r}, has {pieces.lengths[longest]} sub-words: at "
                f"most {MAX_SUBWORDS // len(types):,} are possible with so many types: "
                "shorten it in [model] descriptions, or list fewer types in [tags] "
                "types"
            )
        return pieces.ids, pieces.lengths

    def _read(
        self,
        corpus: EncoderCorpus,
        chosen: np.ndarray,
        *,
        all_layers: bool = False,  # noqa: ARG002 - no method compares its layers
    ) -> TypeReading:
        """Run the model on some sentences; see `TaggingModel._read`."""
        batch = Batch.of(corpus, chosen, self.device)
        (vectors,) = compute_word_vectors(
            self.backbone,
            corpus,
            batch,
            run=self._run,
            dtype=self.classifier.bias.dtype,
        )
        return TypeReading(
            classifier=self.classifier,
            config=self.config,
            batch=batch,
            states=F.dropout(vectors, self.config.dropout, self.training),
            types=self.classifier.embed_types(self.compute_type_vectors()),
        )

    def _predict(self, corpus: Any, *, with_confidence: bool) -> tuple[Document, ...]:
        """Return the documents with predicted spans; see `Model._predict`."""
        mentions: list[np.ndarray] = []
        confidences: list[np.ndarray] = []
        with working("predicting sentences", len(corpus.lengths)) as count:
            for chosen, reading in self._iterate_readings(corpus):
                spans = self._find_spans(reading, self.config.threshold)
                mentions.append(_place_in_corpus(corpus, chosen, spans))
                if with_confidence:
                    confidences.append(reading.compute_span_probabilities(spans))
                count.add(len(chosen))
        return decode_mentions(
            corpus.encoded,
            np.concatenate([_NO_MENTIONS, *mentions]),
            np.concatenate([np.zeros(0), *confidences]) if with_confidence else None,
        )

    @torch.no_grad()
    def predict_by_threshold(
        self, corpus: PreparedCorpus, thresholds: Sequence[float]
    ) -> dict[float, tuple[Document, ...]]:
        """Return the predictions of `predict` at each of several thresholds.

        Each sentence is read only once.
        """
        mentions = {threshold: [_NO_MENTIONS] for threshold in thresholds}
        with evaluating(self):
            for chosen, reading in self._iterate_readings(self.require_corpus(corpus)):
                for threshold, parts in mentions.items():
                    spans = self._find_spans(reading, threshold)
                    parts.append(_place_in_corpus(corpus, chosen, spans))
        return {
            threshold: decode_mentions(corpus.encoded, np.concatenate(parts))
            for threshold, parts in mentions.items()
        }

    def _iterate_readings(
        self, corpus: PreparedCorpus
    ) -> Iterator[tuple[np.ndarray, TypeReading]]:
        """Yield the indices of the sentences of each batch, and their reading."""
        for chosen in self._batch_by_length(corpus.lengths):
            yield chosen, self._read_for_tags(corpus, chosen)

    def _find_spans(self, reading: TypeReading, threshold: float) -> np.ndarray:
        """Return the predicted mentions of a batch, (mentions, 4)."""
        overlaps = self.tagset.overlaps
        return find_best_spans(reading.probabilities, threshold, overlaps=overlaps)

    def compute_type_vectors(self) -> Tensor:
        """Return g_t, (types, inputs), means over the sub-words of the types' texts."""
        frame = self.backbone.frame
        lengths = self._type_lengths
        starts = np.cumsum(lengths) - lengths
        ids, mask = frame.make_rows(self._type_ids, starts, lengths, self.device)
        (states,) = self._run(ids, mask)
        place = np.arange(states.shape[1]) - len(frame.prefix)
        is_text = (place >= 0) & (place < lengths[:, None])  # (types, longest)
        share = torch.from_numpy(is_text / lengths[:, None]).to(self.device)
        return (states * share.to(states)[..., None]).sum(1)  # [scorer type]

    def _run(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Run the frozen encoder with its adapters; see `Backbone.compute_states`."""
        adapted = self.lora.applying(_find_all_linears(self.backbone))
        return self.backbone.compute_states(ids, mask, around=adapted)


def _place_in_corpus(
    corpus: PreparedCorpus, chosen: np.ndarray, spans: np.ndarray
) -> np.ndarray:
    """Return the mentions of a batch as those of the corpus.

    Args:
        corpus: The corpus.
        chosen: (batch,) indices of the sentences.
        spans: (mentions, 4) as in `score_spans`.

    Returns:
        (mentions, 3) as in `Encoded.mentions`.
    """
    start = corpus.encoded.bounds[chosen[spans[:, 0]]]
    return np.stack([spans[:, 1] + start, spans[:, 2] + start, spans[:, 3]], 1)


def build_type_scorer(
    config: TypeScorerConfig,
    tagset: TagSet,
    seed: int,
    device: str | torch.device = "cpu",
) -> TypeScorer:
    """Return a new model that uses the process's shared copy of the encoder.

    Raises:
        ConfigError: A description is of an unknown type, or the encoder cannot be
            tuned; or as `build_model`.
        ModelError: As `build_model`.
        MissingExtra: As `build_model`.
    """
    backbone = open_backbone(config.encoder, device=device)
    return TypeScorer(config, tagset, seed, backbone).to(device)


KIND = Kind(TypeScorerConfig, build_type_scorer)
