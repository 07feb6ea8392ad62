"""A pointer network on a frozen BART, tuned by prompts: the model of Wang et al. 2023.

LightNER (Chen et al. 2022) on any Hugging Face BART directory. The encoder reads a
sentence; the decoder writes its entities as [start, end, type] each
(`taggers/pointer.py` has the exact ids) and an end token. At every step the ids are
scored against the decoder's state: end token and types by their embeddings, a position
by (encoder output + token embedding) / 2; begin and padding are masked. A type's
embedding is the mean of its words' sub-words, in a buffer of this
model: the backbone's table of embeddings is only ever read. Eq. 3 is the cross-entropy
of these scores; in training every id of the sentence competes, in use the grammar rules
some out.

The loss by origin (Eqs. 6 to 9): all three targets of an entity belong to the source
where its type is one that the site annotates, else to the target. The end token belongs
to the source, so that a complete tag set has no target loss at all.

Trained are the prompts (`prompts.q`, `prompts.w1`, `prompts.w2`) and, if asked for, the
decoder's cross-attentions (`cross.*`). The transfer parameter is `prompts.q`: the
gradients of instance weighting are with respect to q alone (section 3.3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Lt
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.settings import checked
from fednotes.core.types import Document, Span, TagSet
from fednotes.encoders.adapters import KeyValues, Prompts, joined, self_attentions
from fednotes.encoders.bart import (
    BartBackbone,
    cache_keyword,
    fixed_rows,
    load_backbone,
    own_cross_attentions,
)
from fednotes.encoders.encoder import length_batches
from fednotes.taggers.corpora import PreparedCorpus, chosen_of
from fednotes.taggers.model import (
    Kind,
    Losses,
    Model,
    ModelConfig,
    Preparing,
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
    first_position,
    repair,
)

PREDICT_BATCH = (4096, 64)  # most sub-words (with padding) and sentences of one batch
PromptMap = Mapping[nn.Module, KeyValues]


@checked(frozen=True)
class PromptBartConfig(ModelConfig):
    """A pointer network on a frozen BART with prompts.

    Attributes:
        kind: The pointer network.
        backbone: A Hugging Face BART directory.
        prompts: N_q of Eq. 15, the number of prompts.
        prompt_hidden: h of Eq. 15, the width of the layer that makes the prompts.
        tune_cross_attention: Whether the decoder's cross-attentions are trained too.
        label_words: Words whose embedding stands for a type, by type. A type that is
            not named stands for the words of its own name, divided at "_" and capitals:
            "Sign_symptom" is "sign symptom".
        max_entities: Largest number of entities of a sentence; 0 is what the backbone's
            positions allow.
        max_subwords: Largest number of sub-words of a sentence; longer ones are cut. 0
            is what the backbone's positions allow.
        dropout: Dropout rate of the backbone in training, on its states, attentions and
            feed-forward layers (bart-base was trained with 0.1).
    """

    softens: ClassVar[bool] = False

    kind: Literal["prompt-bart"] = "prompt-bart"
    backbone: str = ""
    prompts: Annotated[int, Ge(1)] = 10
    prompt_hidden: Annotated[int, Ge(1)] = 400
    tune_cross_attention: bool = False
    label_words: Mapping[str, str] = field(default_factory=dict)
    max_entities: Annotated[int, Ge(0)] = 0
    max_subwords: Annotated[int, Ge(0)] = 0
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0

    def for_types(self, types: Collection[str]) -> PromptBartConfig:
        """Without the words of types that it will not have."""
        words = {
            label: text for label, text in self.label_words.items() if label in types
        }
        return replace(self, label_words=words)


@dataclass(frozen=True, eq=False)
class Sources:
    """Some sentences as the encoder reads them: `Frame.rows`; and text: (batch,
    sub-words) ids without marks, real: bool, where there is one, offset: marks before
    the text."""

    ids: Tensor
    mask: Tensor
    text: Tensor
    real: Tensor
    offset: int

    @classmethod
    def of(
        cls, corpus: PointerCorpus, chosen: np.ndarray, bart: BartBackbone, device: Any
    ) -> Sources:
        """The sentences `chosen`, in that order."""
        lengths, frame = corpus.lengths[chosen], bart.frame
        starts = corpus.bounds[chosen]
        ids, mask = frame.rows(corpus.ids, starts, lengths, device)
        column = np.arange(int(lengths.max()))
        real = column < lengths[:, None]  # (batch, sub-words)
        at = np.where(real, starts[:, None] + column, 0)
        text = torch.from_numpy(np.where(real, corpus.ids[at], frame.pad)).to(device)
        return cls(
            ids, mask, text, torch.from_numpy(real).to(device), len(frame.prefix)
        )


@dataclass(frozen=True, eq=False)
class Targets:
    """What the decoder is to write for some sentences, padded behind.

    ids: (batch, steps) with END, then PAD. real: (batch, steps) bool. pseudo: (batch,
    steps) bool, targets of an entity whose type the site does not annotate; END is
    never one.
    """

    ids: Tensor
    real: Tensor
    pseudo: Tensor

    @classmethod
    def of(cls, corpus: PointerCorpus, chosen: np.ndarray, device: Any) -> Targets:
        """The targets of the sentences `chosen`."""
        bounds, types = corpus.entity_bounds, corpus.encoded.tagset.types
        counts = np.diff(bounds)[chosen]
        most = int(counts.max())
        real = np.arange(most) < counts[:, None]  # (batch, entities)
        at = np.where(real, bounds[chosen][:, None] + np.arange(most), 0)
        shift = first_position(len(types))
        table = corpus.entities + np.array(
            [shift, shift, FIRST_LABEL]
        )  # [tagsets eq 2]
        ids = np.full((len(chosen), 3 * most + 1), PAD)
        pseudo = np.zeros(ids.shape, bool)
        if most:
            unknown = np.array([name not in corpus.known for name in types])
            other = unknown[corpus.entities[at, 2]] & real
            ids[:, :-1] = np.where(real[..., None], table[at], PAD).reshape(
                len(chosen), -1
            )
            pseudo[:, :-1] = np.repeat(other, 3, axis=1)
        ids[np.arange(len(chosen)), 3 * counts] = END
        parts = (
            torch.from_numpy(part).to(device) for part in (ids, ids != PAD, pseudo)
        )
        return cls(*parts)

    @property
    def inputs(self) -> Tensor:
        """(batch, steps) what the decoder reads: BEGIN, then the targets but the last."""
        return torch.cat(
            [torch.full_like(self.ids[:, :1], BEGIN), self.ids[:, :-1]], dim=1
        )


@dataclass(frozen=True, eq=False)
class Memory:
    """Encoded sentences, and the rows that stand for each id as input and as output.

    states, mask: the encoder's, (batch, longest, width) and (batch, longest). inputs,
    outputs: (batch, ids, width). open: (batch, ids) bool, ids that a target may be at
    all. layers: of the encoder, where they were asked for.
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
        states: bool,
    ) -> Memory:
        """Run the encoder once. fixed: (3 + types, width) rows of the marks and the
        labels."""
        size, length = sources.text.shape
        result = bart.encoder(
            input_ids=sources.ids,
            attention_mask=sources.mask,
            output_hidden_states=states,
            prompts=prompts,
            return_dict=True,
        )
        encoded = result.last_hidden_state
        # (batch, sub-words, width)
        embedded = bart.get_input_embeddings()(sources.text)
        found = encoded[:, sources.offset : sources.offset + length]
        marks = fixed.expand(size, -1, -1)
        allowed = torch.ones(size, len(fixed), dtype=torch.bool, device=fixed.device)
        allowed[:, [BEGIN, PAD]] = False
        return cls(
            encoded,
            sources.mask,
            torch.cat([marks, embedded], dim=1),
            torch.cat([marks, (found + embedded) / 2], dim=1),
            torch.cat([allowed, sources.real], dim=1),
            tuple(result.hidden_states[1:]) if states else (),
        )

    def read(self, ids: Tensor) -> Tensor:
        """The decoder's input for (batch, steps) ids: (batch, steps, width)."""
        return self.inputs.gather(
            1, ids.unsqueeze(-1).expand(-1, -1, self.inputs.shape[-1])
        )

    def scores(self, states: Tensor) -> Tensor:
        """Decoder states (batch, steps, width) → (batch, steps, ids), -inf where none
        may be."""
        raw = states @ self.outputs.transpose(1, 2)
        return raw.masked_fill(~self.open.unsqueeze(1), -torch.inf)

    def rows(self, index: Tensor) -> Memory:
        """The sentences of these rows alone."""
        parts = (self.states, self.mask, self.inputs, self.outputs, self.open)
        states, mask, inputs, outputs, allowed = (part[index] for part in parts)
        return Memory(states, mask, inputs, outputs, allowed)


def teacher_forced(
    bart: Any, memory: Memory, targets: Targets, prompts: PromptMap | None
) -> Tensor:
    """The decoder's last states, (batch, steps, width), each step given the true ones
    before.

    Padding stands behind, where a causal decoder does not look.
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
    """The decoder one step at a time, keys and values of earlier steps kept."""

    def __init__(self, bart: Any, memory: Memory, prompts: PromptMap | None) -> None:
        self._bart, self._prompts, self.memory = bart, prompts, memory
        self._cache: Any = None
        self._cache_keyword = cache_keyword(bart.decoder)

    def step(self, ids: Tensor) -> Tensor:
        """(batch,) ids just written → (batch, ids) scores of what comes next."""
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
        return self.memory.scores(result.last_hidden_state)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.memory = self.memory.rows(rows)
        if self._cache is not None:
            self._cache.batch_select_indices(rows)


def greedy(stepper: Stepper, grammar: Grammar) -> tuple[list[np.ndarray], np.ndarray]:
    """The best id at each step among those that the grammar allows.

    Returns each sentence's (steps,) ids, without END; and (batch, most steps) how
    probable each was among them. Sentences that are done leave the batch.
    """
    size, device = len(grammar.starts), grammar.starts.device
    most = int(grammar.most.max())
    alive = torch.arange(size, device=device)
    written = torch.full((size, 3 * most), PAD, device=device)
    sure = torch.ones(size, 3 * most, device=device)
    chosen = torch.full((size,), BEGIN, device=device)
    for step in range(3 * most):
        scores = stepper.step(chosen)
        scores = scores.masked_fill(~grammar.allowed(), -torch.inf)
        chosen = scores.argmax(dim=-1)  # [tagsets eq 4]
        best = scores.softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
        going = chosen != END
        if not bool(going.all()):  # only in place of a start, so all stay in step
            rows = going.nonzero().squeeze(1)
            if not len(rows):
                break
            stepper.keep(rows)
            alive, chosen, grammar = alive[rows], chosen[rows], grammar.rows(rows)
            best = best[rows]
        written[alive, step], sure[alive, step] = chosen, best
        grammar = grammar.after(chosen)
    table = written.cpu().numpy()
    return [row[row != PAD] for row in table], sure.cpu().double().numpy()


def word_edges(
    corpus: PointerCorpus, chosen: np.ndarray, longest: int
) -> Sequence[np.ndarray]:
    """(batch, longest) bool twice: where a word of the sentence begins, and where one
    ends."""
    counts = corpus.encoded.lengths[chosen]
    row = np.repeat(np.arange(len(chosen)), counts)
    skipped = np.repeat(
        corpus.encoded.bounds[chosen] - (np.cumsum(counts) - counts), counts
    )
    words = np.arange(len(row)) + skipped
    edges = []
    for at in (corpus.first, corpus.last):
        mask = np.zeros((len(chosen), longest), bool)
        mask[row, at[words]] = True
        edges.append(mask)
    return edges


class PromptBart(Model):
    """The pointer model for one tag set; see `build_prompt_bart`.

    The backbone is no part of the module: it is shared, never saved and never sent.
    """

    transfer = "prompts.q"
    reads = PointerCorpus
    place = "backbone"
    sure = (
        "the product of the probabilities of its start, its end and its label when each was "
        "written, among what could stand there"
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
            len(heads), heads, shape.d_model, config.prompts, config.prompt_hidden, seed
        ).to(device)
        self._fixed: Tensor
        rows = fixed_rows(backbone, tagset.types, config.label_words)
        self.register_buffer("_fixed", rows, persistent=False)  # (3 + types, d)
        view = backbone.view(config.dropout)
        if config.tune_cross_attention:
            self.cross = nn.ModuleList(own_cross_attentions(view))
        # In a tuple, so that it is no submodule: neither saved nor sent with this
        # model.
        self._frozen = (backbone, view, self_attentions(view))
        self.train(self.training)

    @property
    def frozen(self) -> int:
        """Parameters of the backbone but those of which this model trains a copy."""
        tuned = sum(
            p.numel()
            for name, p in self.named_parameters()
            if name.startswith("cross.")
        )
        return sum(p.numel() for p in self._frozen[0].model.parameters()) - tuned

    @property
    def widths(self) -> tuple[int, ...]:
        """d for each layer of the encoder."""
        shape = self._frozen[0].model.config
        return (int(shape.d_model),) * int(shape.encoder_layers)

    @property
    def limits(self) -> PointerLimits:
        """The most sub-words and entities of one sentence."""
        backbone, config = self._frozen[0], self.config
        room = (backbone.steps - 1) // 3
        return PointerLimits(
            min(
                config.max_subwords or backbone.frame.capacity, backbone.frame.capacity
            ),
            min(config.max_entities or room, room),
        )

    def train(self, mode: bool = True) -> PromptBart:
        """Training mode; the backbone follows only where the configuration has dropout."""
        super().train(mode)
        self._frozen[1].train(mode and self.config.dropout > 0)
        return self

    @property
    def backbone_fingerprint(self) -> str:
        """SHA-256 over the backbone's files."""
        return self._frozen[0].fingerprint

    def _encode(self, documents: tuple[Document, ...], how: Preparing) -> PointerCorpus:
        """Nothing is kept in `cache`."""
        corpus = encode_pointers(
            documents, self.tagset, self._frozen[0].split, self.limits
        )
        if how.progress is not None:
            how.progress(len(documents), len(documents))
        return corpus

    def soften(
        self, corpus: PreparedCorpus, rows: np.ndarray | None = None
    ) -> NoReturn:
        """Raises ConfigError: a pointer model has no posterior that can be summed."""
        raise ConfigError(
            'soft distillation needs a model with a CRF: set kind = "tagger" or '
            '"encoder-tagger", or switch it off'
        )

    def losses(
        self,
        corpus: PreparedCorpus,
        indices: Sequence[int] | np.ndarray,
        *,
        states: bool = False,
    ) -> Losses:
        """Sums of each sentence's cross-entropies, by origin; see `Losses`.

        hidden: each encoder layer's output, mean over the sentence's sub-words.
        outputs: the decoder's last states, a sentence's steps together. The candidates
        of `score` are the ids of `pointer.py`.
        """
        return self._losses(
            self.own(corpus), chosen_of(indices), self.prompts(), states
        )

    def _losses(
        self,
        corpus: PointerCorpus,
        chosen: np.ndarray,
        pairs: Sequence[KeyValues],
        states: bool = False,
    ) -> Losses:
        backbone, view, attentions = self._frozen
        prompts = joined(attentions, pairs)
        sources = Sources.of(corpus, chosen, backbone, self.device)
        targets = Targets.of(corpus, chosen, self.device)
        memory = Memory.of(view, sources, self._fixed, prompts, states)
        # (batch, steps, width)
        outputs = teacher_forced(view, memory, targets, prompts)
        scores = memory.scores(outputs)
        wanted = targets.ids.masked_fill(~targets.real, END)
        # [tagsets eq 3]
        nll = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none")
        nll = nll.view(wanted.shape)  # (batch, steps)
        source = (nll * (targets.real & ~targets.pseudo)).sum(dim=1)  # [tagsets eq 8]
        target = (nll * targets.pseudo).sum(dim=1)  # [tagsets eq 9]
        if not states:
            return Losses(source, target)

        def score(steps: Tensor) -> Tensor:
            padded = torch.zeros_like(outputs).masked_scatter(
                targets.real.unsqueeze(-1), steps
            )
            return memory.scores(padded)[targets.real]

        at = sources.real.unsqueeze(-1)  # (batch, sub-words, 1)
        text = slice(sources.offset, sources.offset + at.shape[1])
        hidden = tuple((h[:, text] * at).sum(1) / at.sum(1) for h in memory.layers)
        real = targets.real
        return Losses(
            source, target, hidden, outputs[real], targets.pseudo[real], score
        )

    @torch.enable_grad()
    def gradients(
        self, corpus: PreparedCorpus, indices: Sequence[int] | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """See `Model.gradients`; size = N_q · d.

        Each sentence gets its own copy of every layer's prompt keys and values, behind
        the
        projections: one backward pass through the backbone gives the gradient with
        respect to each copy, one vector-Jacobian product takes them to q. The target
        takes a second pass.
        """
        with evaluating(self):
            parts = [part.detach() for pair in self.prompts() for part in pair]
            leaves = [
                part.expand(len(indices), *part.shape).requires_grad_()
                for part in parts
            ]
            pairs = list(zip(leaves[::2], leaves[1::2], strict=True))
            losses = self._losses(self.own(corpus), chosen_of(indices), pairs)
        added = bool(losses.target.detach().any())
        own = torch.autograd.grad(losses.source.sum(), leaves, retain_graph=added)
        source = self.prompts.pull(own).flatten(1)
        if not added:
            return source, torch.zeros_like(source[0])
        other = torch.autograd.grad(losses.target.sum(), leaves)
        total = self.prompts.pull([part.sum(dim=0, keepdim=True) for part in other])
        return source, total.flatten()

    def alternatives(self, document: Document, span: Span) -> NoReturn:
        """Raises ModelError: a pointer network scores only what it writes itself."""
        raise ModelError(
            "a pointer network writes its mentions one after the other and has no score of what it "
            "did not write: explain with a tagger or a token classifier"
        )

    def _found(self, corpus: PointerCorpus, confidence: bool) -> tuple[Document, ...]:
        found: list[list[Span]] = [[] for _ in corpus.documents]
        pairs = self.prompts()
        for chosen in length_batches(corpus.lengths.tolist(), *PREDICT_BATCH):
            decoded, sure = self._decode(corpus, chosen, pairs)
            for sentence, ids, each in zip(chosen.tolist(), decoded, sure, strict=True):
                length = int(corpus.lengths[sentence])
                entities = repair(ids.tolist(), len(self.tagset.types), length)
                spans = corpus.spans(sentence, entities) if len(entities) else []
                if confidence:  # the grammar leaves nothing to repair: three ids an entity, in order
                    chances = each[: len(ids)].reshape(-1, 3).prod(1).tolist()
                    both = zip(spans, chances, strict=True)
                    spans = [replace(span, confidence=chance) for span, chance in both]
                found[corpus.encoded.sentence_document[sentence]] += spans
        return tuple(
            replace(document, spans=tuple(sorted(spans)))
            for document, spans in zip(corpus.documents, found, strict=True)
        )

    def _decode(
        self, corpus: PointerCorpus, chosen: np.ndarray, pairs: Sequence[KeyValues]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The ids that the model writes for some sentences, and how sure it is: see
        `greedy`."""
        backbone, view, attentions = self._frozen
        prompts = joined(attentions, pairs)
        sources = Sources.of(corpus, chosen, backbone, self.device)
        memory = Memory.of(view, sources, self._fixed, prompts, states=False)
        edges = word_edges(corpus, chosen, sources.text.shape[1])
        starts, ends = (torch.from_numpy(edge).to(self.device) for edge in edges)
        grammar = Grammar.begin(
            len(self.tagset.types), starts, ends, self.limits.entities
        )
        return greedy(Stepper(view, memory, prompts), grammar)


def build_prompt_bart(
    config: PromptBartConfig,
    tagset: TagSet,
    seed: int,
    device: str | torch.device = "cpu",
) -> PromptBart:
    """A new model. Raises as `build_model`; ConfigError also for label words of no type
    or alike for two."""
    if not config.backbone:
        raise ConfigError(
            'kind = "prompt-bart" needs backbone = a Hugging Face BART directory'
        )
    return PromptBart(config, tagset, seed, device)


KIND = Kind(PromptBartConfig, build_prompt_bart)
