"""The model of Wang et al. 2023: a pointer network on a frozen BART with prompts.

It is LightNER (Chen et al. 2022) on any Hugging Face BART directory. The encoder reads
a sentence. The decoder writes each entity as [start, end, type] (`taggers/pointer.py`
defines the ids), followed by an end token. At every step the ids are scored against the
decoder's state: the end token and the types by their embeddings, and a position by
(encoder output + token embedding) / 2. The ids of begin and padding are masked. A
type's embedding is the mean over the sub-words of its words; it is stored in a buffer
of this model, so the backbone's embeddings are never changed.

Eq. 3 is the cross-entropy of these scores. In training, all ids of the sentence
compete; in decoding, the grammar excludes some.

The loss by origin (Eqs. 6 to 9): all three targets of an entity belong to the source if
the site annotates its type, and otherwise to the target. The end token belongs to the
source, so a complete tag set has no target loss at all.

The prompts are trained (`prompts.q`, `prompts.w1`, `prompts.w2`) and, on request, the
decoder's cross-attentions (`cross.*`). The transfer parameter is `prompts.q`: the
gradients of instance weighting are with respect to q alone (section 3.3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.numbers import FractionBelowOne, NonNegativeInt, PositiveInt
from fednotes.core.settings import LocalFile, checked
from fednotes.core.types import Document, Span, TagSet
from fednotes.core.work import count_items
from fednotes.encoders.adapters import (
    KeyValues,
    Prompts,
    assign_prompts,
    find_self_attentions,
)
from fednotes.encoders.bart import (
    BartBackbone,
    copy_cross_attentions,
    find_cache_keyword,
    load_backbone,
    make_fixed_rows,
    require_known_labels,
)
from fednotes.encoders.encoder import batch_similar_lengths
from fednotes.taggers.corpora import PreparedCorpus, require_sentences
from fednotes.taggers.model import (
    Kind,
    Losses,
    Model,
    ModelConfig,
    PrepareOptions,
    evaluating,
)
from fednotes.taggers.pointer import (
    BEGIN,
    END,
    FIRST_LABEL,
    PAD,
    Grammar,
    PointerCorpus,
    PointerLimits,
    encode_pointers,
    find_first_position,
    repair,
)

# The largest batch in prediction: sub-words with padding, and sentences.
PREDICT_SUBWORDS, PREDICT_SENTENCES = 4096, 64
PromptMap = Mapping[nn.Module, KeyValues]


@checked(frozen=True)
class PromptBartConfig(ModelConfig):
    """A pointer network on a frozen BART with prompts.

    Attributes:
        kind: The pointer network.
        backbone: A Hugging Face BART directory.
        prompts: N_q of Eq. 15, the number of prompts.
        prompt_hidden: h of Eq. 15, the width of the layer that computes the prompts.
        tune_cross_attention: Whether the decoder's cross-attentions are trained too.
        label_words: Words whose embedding represents an entity type, for each type. A
            type that is not listed is represented by the words of its name, divided at
            "_" and capitals: "Sign_symptom" by "sign symptom".
        max_entities: Maximum number of entities in a sentence; 0 uses the limit of the
            backbone's positions.
        max_subwords: Maximum number of sub-words in a sentence; longer sentences are
            cut. 0 uses the limit of the backbone's positions.
        dropout: Dropout rate of the backbone in training, on its states, attentions and
            feed-forward layers (bart-base was trained with 0.1).
    """

    trains_on_posteriors: ClassVar[bool] = False
    finds_overlaps: ClassVar[bool] = True

    kind: Literal["prompt-bart"] = "prompt-bart"
    backbone: LocalFile = ""
    prompts: PositiveInt = 10
    prompt_hidden: PositiveInt = 400
    tune_cross_attention: bool = False
    label_words: Mapping[str, str] = field(default_factory=dict)
    max_entities: NonNegativeInt = 0
    max_subwords: NonNegativeInt = 0
    dropout: FractionBelowOne = 0.0

    def for_types(self, types: Collection[str]) -> PromptBartConfig:
        """Return the configuration without the words of other types."""
        words = {
            label: text for label, text in self.label_words.items() if label in types
        }
        return replace(self, label_words=words)

    def require_known_types(self, types: Collection[str]) -> None:
        """Raise ConfigError if words are of a type that no site has."""
        require_known_labels(self.label_words, types)


@dataclass(frozen=True, eq=False)
class Sources:
    """A batch of sentences in the form that the encoder reads.

    Attributes:
        ids: (batch, longest) ids with marks and padding; see `Frame.make_rows`.
        mask: (batch, longest) bool, False at padding.
        text: (batch, sub-words) ids without marks.
        real: (batch, sub-words) bool, False at padding.
        offset: Number of marks before the text.
    """

    ids: Tensor
    mask: Tensor
    text: Tensor
    real: Tensor
    offset: int

    @classmethod
    def of(
        cls, corpus: PointerCorpus, chosen: np.ndarray, bart: BartBackbone, device: Any
    ) -> Sources:
        """Return the sentences `chosen`, in that order."""
        frame = bart.frame
        lengths = corpus.lengths[chosen]
        starts = corpus.bounds[chosen]
        ids, mask = frame.make_rows(corpus.ids, starts, lengths, device)
        column = np.arange(int(lengths.max()))
        real = column < lengths[:, None]  # (batch, sub-words)
        at = np.where(real, starts[:, None] + column, 0)
        text = np.where(real, corpus.ids[at], frame.pad)
        return cls(
            ids=ids,
            mask=mask,
            text=torch.from_numpy(text).to(device),
            real=torch.from_numpy(real).to(device),
            offset=len(frame.prefix),
        )


@dataclass(frozen=True, eq=False)
class Targets:
    """The decoder's targets for some sentences, padded at the end.

    Attributes:
        ids: (batch, steps) with END, then PAD.
        real: (batch, steps) bool, False at padding.
        is_added: (batch, steps) bool, the targets of entities whose type the site does
            not annotate. END is never one of them.
    """

    ids: Tensor
    real: Tensor
    is_added: Tensor

    @classmethod
    def of(cls, corpus: PointerCorpus, chosen: np.ndarray, device: Any) -> Targets:
        """Return the targets of the sentences `chosen`."""
        bounds = corpus.entity_bounds
        types = corpus.encoded.tagset.types
        counts = np.diff(bounds)[chosen]
        max_count = int(counts.max())
        real = np.arange(max_count) < counts[:, None]  # (batch, entities)
        at = np.where(real, bounds[chosen][:, None] + np.arange(max_count), 0)
        shift = find_first_position(len(types))
        table = corpus.entities + np.array(
            [shift, shift, FIRST_LABEL]
        )  # [tagsets eq 2]

        ids = np.full((len(chosen), 3 * max_count + 1), PAD)
        is_added_id = np.zeros(ids.shape, bool)
        if max_count:
            is_unknown_type = np.array([name not in corpus.known for name in types])
            is_added = is_unknown_type[corpus.entities[at, 2]] & real
            written = np.where(real[..., None], table[at], PAD)
            ids[:, :-1] = written.reshape(len(chosen), -1)
            is_added_id[:, :-1] = np.repeat(is_added, 3, axis=1)
        ids[np.arange(len(chosen)), 3 * counts] = END
        return cls(
            ids=torch.from_numpy(ids).to(device),
            real=torch.from_numpy(ids != PAD).to(device),
            is_added=torch.from_numpy(is_added_id).to(device),
        )

    @property
    def inputs(self) -> Tensor:
        """(batch, steps) the decoder's input: BEGIN, then all targets but the last."""
        begin = torch.full_like(self.ids[:, :1], BEGIN)
        return torch.cat([begin, self.ids[:, :-1]], dim=1)


@dataclass(frozen=True, eq=False)
class Memory:
    """Encoded sentences, and the vectors that stand for each id as input and output.

    Attributes:
        states: (batch, longest, width) the encoder's output.
        mask: (batch, longest) bool, False at padding.
        inputs: (batch, ids, width) the decoder's input vector for each id.
        outputs: (batch, ids, width) the vectors with which its states are compared.
        open: (batch, ids) bool, the ids that can be targets.
        layers: The states of the encoder's layers; empty unless requested.
    """

    states: Tensor
    mask: Tensor
    inputs: Tensor
    outputs: Tensor
    open: Tensor
    layers: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls,
        bart: Any,
        sources: Sources,
        fixed: Tensor,
        prompts: PromptMap | None,
        *,
        with_states: bool,
    ) -> Memory:
        """Run the encoder once.

        Args:
            bart: The backbone.
            sources: The sentences.
            fixed: (3 + types, width) vectors of the marks and the types.
            prompts: The prompts of each attention.
            with_states: Whether to keep the states of the layers.
        """
        size, length = sources.text.shape
        result = bart.encoder(
            input_ids=sources.ids,
            attention_mask=sources.mask,
            output_hidden_states=with_states,
            prompts=prompts,
            return_dict=True,
        )
        encoded = result.last_hidden_state
        # (batch, sub-words, width), both
        embedded = bart.get_input_embeddings()(sources.text)
        encoded_text = encoded[:, sources.offset : sources.offset + length]
        marks = fixed.expand(size, -1, -1)
        can_follow = torch.ones(size, len(fixed), dtype=torch.bool, device=fixed.device)
        can_follow[:, [BEGIN, PAD]] = False
        return cls(
            states=encoded,
            mask=sources.mask,
            inputs=torch.cat([marks, embedded], dim=1),
            outputs=torch.cat([marks, (encoded_text + embedded) / 2], dim=1),
            open=torch.cat([can_follow, sources.real], dim=1),
            layers=tuple(result.hidden_states[1:]) if with_states else (),
        )

    def read(self, ids: Tensor) -> Tensor:
        """Return (batch, steps, width), the decoder's input for (batch, steps) ids."""
        width = self.inputs.shape[-1]
        return self.inputs.gather(1, ids.unsqueeze(-1).expand(-1, -1, width))

    def score(self, states: Tensor) -> Tensor:
        """Return scores, (batch, steps, ids), -inf where an id is impossible.

        Args:
            states: (batch, steps, width) the decoder's states.
        """
        raw = states @ self.outputs.transpose(1, 2)
        return raw.masked_fill(~self.open.unsqueeze(1), -torch.inf)

    def select_rows(self, index: Tensor) -> Memory:
        """Return a subset of the sentences, without the layers' states."""
        return Memory(
            states=self.states[index],
            mask=self.mask[index],
            inputs=self.inputs[index],
            outputs=self.outputs[index],
            open=self.open[index],
        )


def run_teacher_forced(
    bart: Any, memory: Memory, targets: Targets, prompts: PromptMap | None
) -> Tensor:
    """Run the decoder with the true targets before each step; return its states.

    Padding follows the targets, where a causal decoder does not attend.

    Returns:
        (batch, steps, width).
    """
    result = bart.decoder(
        inputs_embeds=memory.read(targets.inputs),
        encoder_hidden_states=memory.states,
        encoder_attention_mask=memory.mask,
        use_cache=False,
        prompts=prompts,
        return_dict=True,
    )
    states: Tensor = result.last_hidden_state
    return states


class Stepper:
    """Run the decoder step by step, with cached keys and values of earlier steps."""

    def __init__(self, bart: Any, memory: Memory, prompts: PromptMap | None) -> None:
        self.memory = memory
        self._bart = bart
        self._prompts = prompts
        self._cache: Any = None
        self._cache_keyword = find_cache_keyword(bart.decoder)

    def step(self, ids: Tensor) -> Tensor:
        """Return scores of the next ids, (batch, ids), after the ids (batch,)."""
        result = self._bart.decoder(
            inputs_embeds=self.memory.read(ids[:, None]),
            encoder_hidden_states=self.memory.states,
            encoder_attention_mask=self.memory.mask,
            use_cache=True,
            prompts=self._prompts,
            return_dict=True,
            **{self._cache_keyword: self._cache},
        )
        self._cache = result[self._cache_keyword]
        return self.memory.score(result.last_hidden_state)[:, 0]

    def keep_rows(self, rows: Tensor) -> None:
        """Continue with only these sentences."""
        self.memory = self.memory.select_rows(rows)
        if self._cache is not None:
            self._cache.batch_select_indices(rows)


def decode_greedily(
    stepper: Stepper, grammar: Grammar
) -> tuple[list[np.ndarray], np.ndarray]:
    """Choose the best id at each step among those that the grammar allows.

    Finished sentences leave the batch.

    Returns:
        Each sentence's (steps,) ids without END; and (batch, max steps), the
        probability of each chosen id among those allowed.
    """
    size = len(grammar.starts)
    device = grammar.starts.device
    max_steps = 3 * int(grammar.max_entities.max())
    alive = torch.arange(size, device=device)
    written = torch.full((size, max_steps), PAD, device=device)
    probabilities = torch.ones(size, max_steps, device=device)
    chosen = torch.full((size,), BEGIN, device=device)

    for step in range(max_steps):
        scores = stepper.step(chosen)
        scores = scores.masked_fill(~grammar.find_allowed(), -torch.inf)
        chosen = scores.argmax(dim=-1)  # [tagsets eq 4]
        probability = scores.softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
        goes_on = chosen != END
        # END can occur only in place of a start, so all sentences stay in lockstep.
        if not bool(goes_on.all()):
            rows = goes_on.nonzero().squeeze(1)
            if not len(rows):
                break
            stepper.keep_rows(rows)
            alive = alive[rows]
            chosen = chosen[rows]
            probability = probability[rows]
            grammar = grammar.select_rows(rows)
        written[alive, step] = chosen
        probabilities[alive, step] = probability
        grammar = grammar.advance(chosen)

    table = written.cpu().numpy()
    return [row[row != PAD] for row in table], probabilities.cpu().double().numpy()


def find_word_edges(
    corpus: PointerCorpus, chosen: np.ndarray, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return where words begin and where they end, each (batch, longest) bool."""
    counts = corpus.encoded.lengths[chosen]
    row = np.repeat(np.arange(len(chosen)), counts)
    skipped = np.repeat(
        corpus.encoded.bounds[chosen] - (np.cumsum(counts) - counts), counts
    )
    words = np.arange(len(row)) + skipped
    starts = np.zeros((len(chosen), longest), bool)
    ends = np.zeros((len(chosen), longest), bool)
    starts[row, corpus.first[words]] = True
    ends[row, corpus.last[words]] = True
    return starts, ends


@dataclass(frozen=True, eq=False)
class FrozenBart:
    """The frozen part of a model. It is not a module, so it is not saved or sent.

    Attributes:
        backbone: The weights that all models of a process share.
        view: This model's modules, which use the shared weights.
        attentions: The self-attentions of the view that take prompts.
    """

    backbone: BartBackbone
    view: Any
    attentions: list[nn.Module]


class PromptBart(Model):
    """The pointer model for one tag set; see `build_prompt_bart`."""

    transfer = "prompts.q"
    reads = PointerCorpus
    encoder_key = "backbone"
    confidence_meaning = (
        "the product of the probabilities of its start, end and label, "
        "each among all choices at that step"
    )

    def __init__(
        self,
        config: PromptBartConfig,
        tagset: TagSet,
        seed: int,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(config, tagset)
        backbone = load_backbone(config.backbone, device)
        shape = backbone.model.config
        heads = [shape.encoder_attention_heads] * shape.encoder_layers
        heads += [shape.decoder_attention_heads] * shape.decoder_layers
        self.prompts = Prompts(
            len(heads),
            heads,
            shape.d_model,
            count=config.prompts,
            hidden=config.prompt_hidden,
            seed=seed,
        ).to(device)

        self._fixed: Tensor  # (3 + types, width)
        rows = make_fixed_rows(backbone, tagset.types, config.label_words)
        self.register_buffer("_fixed", rows, persistent=False)

        view = backbone.make_view(config.dropout)
        if config.tune_cross_attention:
            self.cross = nn.ModuleList(copy_cross_attentions(view))
        self.frozen = FrozenBart(backbone, view, find_self_attentions(view))
        self.train(self.training)

    def count_frozen(self) -> int:
        """Return the number of the backbone's parameters that are not trained."""
        total = sum(p.numel() for p in self.frozen.backbone.model.parameters())
        tuned = sum(
            p.numel()
            for name, p in self.named_parameters()
            if name.startswith("cross.")
        )
        return total - tuned

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of columns of each layer of the encoder."""
        shape = self.frozen.backbone.model.config
        return (int(shape.d_model),) * int(shape.encoder_layers)

    @property
    def limits(self) -> PointerLimits:
        """The largest numbers of sub-words and entities of one sentence."""
        config = self.config
        max_subwords = self.frozen.backbone.frame.capacity
        max_entities = (self.frozen.backbone.steps - 1) // 3
        return PointerLimits(
            subwords=min(config.max_subwords or max_subwords, max_subwords),
            entities=min(config.max_entities or max_entities, max_entities),
        )

    def train(
        self,
        mode: bool = True,  # noqa: FBT001, FBT002 - as in torch
    ) -> PromptBart:
        """Switch training mode on or off.

        The backbone follows only if the configuration has dropout.
        """
        super().train(mode)
        self.frozen.view.train(mode and self.config.dropout > 0)
        return self

    @property
    def backbone_fingerprint(self) -> str:
        """SHA-256 over the backbone's files."""
        return self.frozen.backbone.fingerprint

    def _encode(
        self, documents: tuple[Document, ...], options: PrepareOptions
    ) -> PointerCorpus:
        """Encode documents without a cache."""
        corpus = encode_pointers(
            documents, self.tagset, self.frozen.backbone.split, self.limits
        )
        if options.progress is not None:
            options.progress(len(documents), len(documents))
        return corpus

    def soften(
        self,
        corpus: PreparedCorpus,  # noqa: ARG002 - refused
        rows: np.ndarray | None = None,  # noqa: ARG002
    ) -> NoReturn:
        """Raise ConfigError, because a pointer model has no tractable posterior."""
        raise ConfigError(
            'soft distillation needs a model with a CRF: set kind = "tagger" or '
            '"encoder-tagger", or switch it off'
        )

    def predict_tags(
        self,
        corpus: PreparedCorpus,  # noqa: ARG002 - refused
        rows: np.ndarray,  # noqa: ARG002
    ) -> NoReturn:
        """Raise ModelError, because a pointer model predicts spans, not tags."""
        raise ModelError(
            "a pointer network predicts spans and not a tag for each word: use a "
            "tagger or a token classifier"
        )

    def compute_alternatives(
        self,
        document: Document,  # noqa: ARG002 - refused
        span: Span,  # noqa: ARG002
    ) -> NoReturn:
        """Raise ModelError, because a pointer network scores only its own output."""
        raise ModelError(
            "a pointer network writes its mentions one after the other and has no "
            "score of what it did not write: explain with a tagger or a token "
            "classifier"
        )

    def losses(
        self,
        corpus: PreparedCorpus,
        indices: Sequence[int] | np.ndarray,
        *,
        with_states: bool = False,
    ) -> Losses:
        """Return each sentence's cross-entropies, by origin; see `Model.losses`.

        `hidden` is each encoder layer's output, averaged over the sentence's sub-words.
        `outputs` are the decoder's last states, grouped by sentence. The candidates of
        `score` are the ids of `pointer.py`.
        """
        prepared = self.require_corpus(corpus)
        chosen = require_sentences(indices)
        return self._compute_losses(
            prepared, chosen, self.prompts(), with_states=with_states
        )

    def _compute_losses(
        self,
        corpus: PointerCorpus,
        chosen: np.ndarray,
        pairs: Sequence[KeyValues],
        *,
        with_states: bool = False,
    ) -> Losses:
        """Compute `losses` with these prompts, one pair per attention."""
        view = self.frozen.view
        prompts = assign_prompts(self.frozen.attentions, pairs)
        sources = Sources.of(corpus, chosen, self.frozen.backbone, self.device)
        targets = Targets.of(corpus, chosen, self.device)
        memory = Memory.of(view, sources, self._fixed, prompts, with_states=with_states)
        # (batch, steps, width)
        outputs = run_teacher_forced(view, memory, targets, prompts)
        scores = memory.score(outputs)
        wanted = targets.ids.masked_fill(~targets.real, END)
        # [tagsets eq 3]
        nll = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none")
        nll = nll.view(wanted.shape)  # (batch, steps)
        source = (nll * (targets.real & ~targets.is_added)).sum(dim=1)  # [tagsets eq 8]
        target = (nll * targets.is_added).sum(dim=1)  # [tagsets eq 9]
        if not with_states:
            return Losses(source, target)

        real = targets.real

        def score_steps(steps: Tensor) -> Tensor:
            # The scores of a step depend on its sentence, so put it back there first.
            padded = torch.zeros_like(outputs).masked_scatter(real.unsqueeze(-1), steps)
            return memory.score(padded)[real]

        inside = sources.real.unsqueeze(-1)  # (batch, sub-words, 1)
        text = slice(sources.offset, sources.offset + inside.shape[1])
        return Losses(
            source,
            target,
            hidden=tuple(
                (layer[:, text] * inside).sum(1) / inside.sum(1)
                for layer in memory.layers
            ),
            outputs=outputs[real],
            is_added=targets.is_added[real],
            score_states=score_steps,
        )

    @torch.enable_grad()
    def gradients(
        self, corpus: PreparedCorpus, indices: Sequence[int] | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of q, whose size is N_q · d; see `Model.gradients`.

        Sentences with a target loss are read apart from the others, because only they
        need a second backward pass.
        """
        prepared = self.require_corpus(corpus)
        chosen = require_sentences(indices)
        q = self.prompts.q
        source = q.new_zeros(len(chosen), q.numel())
        target = q.new_zeros(q.numel())

        is_added = Targets.of(prepared, chosen, self.device).is_added
        has_target = is_added.any(dim=1).cpu().numpy()
        with evaluating(self):
            for with_target in (True, False):
                rows = np.flatnonzero(has_target == with_target)
                if not len(rows):
                    continue
                losses, leaves = self._compute_losses_of_copies(prepared, chosen[rows])
                of_source = torch.autograd.grad(
                    losses.source.sum(), leaves, retain_graph=with_target
                )
                at = torch.from_numpy(rows).to(self.device)
                source[at] = self.prompts.pull_back(of_source).flatten(1)
                if with_target:
                    of_target = torch.autograd.grad(losses.target.sum(), leaves)
                    sums = [part.sum(dim=0, keepdim=True) for part in of_target]
                    target = self.prompts.pull_back(sums).flatten()
        return source, target

    def _compute_losses_of_copies(
        self, corpus: PointerCorpus, chosen: np.ndarray
    ) -> tuple[Losses, list[Tensor]]:
        """Compute `losses` with a copy of the prompts for each sentence.

        One backward pass through the backbone then gives the gradient of each sentence
        with respect to its copy, and one vector-Jacobian product maps these to q.

        Returns:
            The losses, and the copies of each layer's keys and values, after the
            projections.
        """
        parts = [part.detach() for pair in self.prompts() for part in pair]
        leaves = [
            part.expand(len(chosen), *part.shape).requires_grad_() for part in parts
        ]
        pairs = list(zip(leaves[::2], leaves[1::2], strict=True))
        return self._compute_losses(corpus, chosen, pairs), leaves

    def _predict(
        self, corpus: PointerCorpus, *, with_confidence: bool
    ) -> tuple[Document, ...]:
        """Return the documents with predicted spans; see `Model._predict`."""
        predicted: list[list[Span]] = [[] for _ in corpus.documents]
        pairs = self.prompts()
        groups = batch_similar_lengths(
            corpus.lengths.tolist(), PREDICT_SUBWORDS, PREDICT_SENTENCES
        )
        for chosen in count_items(groups, "predicting batches"):
            decoded, probabilities = self._decode(corpus, chosen, pairs)
            for sentence, ids, each in zip(
                chosen.tolist(), decoded, probabilities, strict=True
            ):
                spans = self._make_spans(corpus, sentence, ids)
                if with_confidence:
                    # Under the grammar, no repair is needed: each entity has three ids,
                    # in the order of the spans.
                    confidences = each[: len(ids)].reshape(-1, 3).prod(1).tolist()
                    spans = [
                        replace(span, confidence=confidence)
                        for span, confidence in zip(spans, confidences, strict=True)
                    ]
                predicted[corpus.encoded.sentence_document[sentence]] += spans
        return tuple(
            replace(document, spans=tuple(sorted(spans)))
            for document, spans in zip(corpus.documents, predicted, strict=True)
        )

    def _make_spans(
        self, corpus: PointerCorpus, sentence: int, ids: np.ndarray
    ) -> list[Span]:
        """Return the spans that the ids of one sentence encode."""
        length = int(corpus.lengths[sentence])
        entities = repair(ids.tolist(), len(self.tagset.types), length)
        return corpus.make_spans(sentence, entities) if len(entities) else []

    def _decode(
        self, corpus: PointerCorpus, chosen: np.ndarray, pairs: Sequence[KeyValues]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the ids that `decode_greedily` writes for some sentences."""
        view = self.frozen.view
        prompts = assign_prompts(self.frozen.attentions, pairs)
        sources = Sources.of(corpus, chosen, self.frozen.backbone, self.device)
        memory = Memory.of(view, sources, self._fixed, prompts, with_states=False)
        starts, ends = find_word_edges(corpus, chosen, sources.text.shape[1])
        grammar = Grammar.begin(
            len(self.tagset.types),
            torch.from_numpy(starts).to(self.device),
            torch.from_numpy(ends).to(self.device),
            self.limits.entities,
        )
        return decode_greedily(Stepper(view, memory, prompts), grammar)


def build_prompt_bart(
    config: PromptBartConfig,
    tagset: TagSet,
    seed: int,
    device: str | torch.device = "cpu",
) -> PromptBart:
    """Return a new model.

    Raises:
        ConfigError: No backbone is named, or label words belong to no type or are the
            same for two; or as `build_model`.
        ModelError: As `build_model`.
        MissingExtra: As `build_model`.
    """
    if not config.backbone:
        raise ConfigError(
            'kind = "prompt-bart" needs backbone = a Hugging Face BART directory'
        )
    return PromptBart(config, tagset, seed, device)


KIND = Kind(PromptBartConfig, build_prompt_bart)
