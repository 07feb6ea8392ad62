"""What a method may ask of a model that finds mentions, and what all such models do
alike.

A kind of model is one file of this folder: its specification, a `Model`, and a constant
`KIND` that names both. Nothing elsewhere lists it: `[model] kind = "some-kind"` is
found in the module `some_kind`.
"""

from __future__ import annotations

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
from fednotes.data.batches import with_spans, without_gold
from fednotes.data.tags import find_spans, span_tag_mask
from fednotes.encoders.encoder import length_batches
from fednotes.taggers.corpora import Batch, PreparedCorpus, Progress, chosen_of
from fednotes.taggers.layers import CrfOutput, with_zero
from fednotes.taggers.partial import Soft, added_tags, split_loss, transfer_gradients

WHOLE_BATCH = (8192, 256)  # most sub-words and sentences that are predicted together
_QUERIES = 1 << 22  # numbers in one block of what is asked of a CRF (32 MiB in float64)


@dataclass(frozen=True)
class ModelConfig:
    """What a job's [model] table says of a model that finds mentions.

    Attributes:
        softens: Whether the model can train on a posterior in place of a best guess; no
            key.
        encodes: Whether the model is a pre-trained encoder that learns; no key.
    """

    softens: ClassVar[bool] = True
    encodes: ClassVar[bool] = False

    def for_types(self, types: Collection[str]) -> ModelConfig:
        """The same for a model of these types alone."""
        return self

    if TYPE_CHECKING:

        @property
        def kind(self) -> str: ...


@dataclass(frozen=True)
class Kind:
    """A kind of model: its specification, what makes a model of one, for a tag set, a
    seed and a device, and what makes one of a table if its keys are not simply the
    fields."""

    config: type[Any]
    build: Callable[..., Model]
    read: Callable[[Mapping[str, Any], str], Any] | None = None


@dataclass(frozen=True)
class Losses:
    """The loss of some sentences, split by where each target comes from.

    source: (sentences,) of what the site annotated itself. target: (sentences,) of what
    was added for types that it does not annotate; zeros where nothing was.

    Only if asked for (`states=True`), for adversarial methods:
    hidden: one (sentences, width) a layer that represents text, mean over the sentence.
    outputs: (steps, width) states right below the output scores, one for each predicted
    target. pseudo: (steps,) bool, those that predict an added target. score: (steps,
    width) → (steps, candidates) unnormalised scores, -inf where a candidate is not
    allowed.
    """

    source: Tensor
    target: Tensor
    hidden: tuple[Tensor, ...] = ()
    outputs: Tensor | None = None
    pseudo: Tensor | None = None
    score: Callable[[Tensor], Tensor] | None = None


class Preparing(NamedTuple):
    """How `Model.prepare` was asked."""

    cache: Path | None
    progress: Progress | None
    gold: bool


class Reading(Protocol):
    """What a model that tags tokens makes of some sentences."""

    @property
    def tokens(self) -> np.ndarray:
        """(tokens,) of the corpus, in the order of the two below."""

    def best(self) -> np.ndarray:
        """(tokens,) the tags to predict."""

    def chances(self, spans: np.ndarray) -> np.ndarray:
        """(spans,) how probable each is: exactly its words, with its type. spans:
        (spans, 4) which of the sentences that were asked, its first word there, the one
        behind its last, its type's index; -1: that none of these words is in a mention.
        """

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, tags), given what is allowed; and (sentences, …) expected
        transitions."""

    def losses(self, states: bool) -> Losses:
        """As `Model.losses`."""

    def gradients(self) -> tuple[Tensor, Tensor]:
        """As `Model.gradients`."""


class Model(nn.Module):
    """An entity recogniser for one tag set.

    config, tagset: what it was built from; the tag set's types are those that it
        predicts.
    kind, transfer: the name of the small trainable parameter whose gradient says how
    well one loss serves another.
    reads: the corpora that `prepare` makes; every method takes only those. place: the
    key of its specification that names a frozen encoder. whole: it is saved with all
    that is frozen, by its own `save`. sure: what the confidence of a span that it
    predicts is, in words.

    A model that tags tokens has `_encode` and `_read`; all else it has from here.
    """

    transfer: ClassVar[str]
    reads: ClassVar[type[PreparedCorpus]]
    place: ClassVar[str] = ""
    whole: ClassVar[bool] = False
    sure: ClassVar[str] = (
        "the CRF's marginal: how probable exactly this span with this label is, given the text"
    )

    def __init__(self, config: Any, tagset: TagSet) -> None:
        super().__init__()
        if not tagset.types:
            raise ConfigError(
                "the tag set has no entity types: a model needs at least one"
            )
        self.config, self.tagset = config, tagset
        self.batch_listeners = BatchListeners()

    def _encode(
        self, documents: tuple[Document, ...], how: Preparing
    ) -> PreparedCorpus:
        raise NotImplementedError

    def _read(self, corpus: Any, chosen: np.ndarray, every: bool = False) -> Reading:
        """every: with the states that `Losses.hidden` needs."""
        raise NotImplementedError

    def _read_batch(self, corpus: Any, chosen: np.ndarray, every: bool = False) -> Any:
        """Announce a batch to `batch_listeners`, then read it; arguments of `_read`."""
        self.batch_listeners.announce(self, corpus, chosen)
        return self._read(corpus, chosen, every)

    def _parts(self, lengths: np.ndarray) -> Iterable[np.ndarray]:
        """Sentences of like length, as many as are read at once without gradients."""
        return length_batches(lengths.tolist(), *WHOLE_BATCH)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def frozen(self) -> int:
        """How many numbers of its backbone and tables are never trained."""
        return 0

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`."""
        return ()

    @property
    def output_width(self) -> int:
        """The columns of `Losses.outputs`."""
        return self.get_parameter(self.transfer).shape[1]

    @property
    def backbone_fingerprint(self) -> str:
        """Of the frozen encoder that `place` names; "" where there is none."""
        return ""

    def save(self, folder: Path) -> None:
        """Write itself into an empty folder, where `whole` is True."""
        raise NotImplementedError

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name → parameter, sorted by name, of everything that training changes and
        sends."""
        named = sorted(self.named_parameters(), key=lambda pair: pair[0])
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def prepare(
        self,
        documents: Sequence[Document],
        cache: Path | None = None,
        progress: Progress | None = None,
        gold: bool = True,
    ) -> PreparedCorpus:
        """Encode a corpus and look up all that training does not change; every type
        known.

        cache: folder for what can be kept. progress(done, all) is called meanwhile.
        gold=False strips the spans first, so that no boundary owes anything to them.
        Raises DataError for a label that the tag set does not have.
        """
        given = tuple(documents) if gold else without_gold(documents)
        return self._encode(given, Preparing(cache, progress, gold))

    def own(self, corpus: PreparedCorpus) -> Any:
        """The corpus, if such a model prepared it.

        Raises ModelError for another model's.
        """
        if not isinstance(corpus, self.reads):
            kind = self.config.kind
            raise ModelError(
                f"a corpus of another kind of model ({type(corpus).__name__}) was given to "
                f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}: prepare it with the model that "
                "reads it"
            )
        return corpus

    def annotate(
        self,
        corpus: PreparedCorpus,
        documents: Sequence[Document],
        known: Collection[str],
    ) -> PreparedCorpus:
        """The same texts with the spans of `documents` as the annotation."""
        self.own(corpus)
        return corpus.annotated(documents, known)

    @torch.no_grad()
    def soften(
        self, corpus: PreparedCorpus, rows: np.ndarray | None = None
    ) -> PreparedCorpus:
        """The same corpus whose target is this model's posterior, given the known
        types' spans.

        rows: of these sentences alone, and of the others nothing. Without dropout.
        Unchanged where every type is known: nothing is left to guess. Raises
        ConfigError where its specification has `softens` False.
        """
        own: PreparedCorpus = self.own(corpus)
        if own.complete or not own.sentences:
            return replace(own, soft=None)
        rows = np.arange(own.sentences) if rows is None else rows
        unary = np.zeros((len(own.encoded.form), len(self.tagset.tags)), np.float32)
        pairs = np.zeros((0, 0, 0), np.float32)
        with evaluating(self):
            for part in self._parts(own.lengths[rows]):
                read = self._read_batch(own, rows[part])
                unary[read.tokens], found = read.posterior()
                pairs = (
                    pairs
                    if len(pairs)
                    else np.zeros((own.sentences, *found.shape[1:]), "f4")
                )
                pairs[rows[part]] = found
        return replace(own, soft=Soft(unary, pairs))

    @torch.no_grad()
    def guessed(self, corpus: PreparedCorpus, rows: np.ndarray) -> np.ndarray:
        """(tokens,) tags that this model predicts for some sentences, read at once;
        else 0."""
        own: PreparedCorpus = self.own(corpus)
        ids = np.zeros(len(own.encoded.form), np.int64)
        with evaluating(self):
            read = self._read_batch(own, rows)
            ids[read.tokens] = read.best()
        return ids

    def losses(
        self,
        corpus: PreparedCorpus,
        indices: Sequence[int] | np.ndarray,
        *,
        states: bool = False,
    ) -> Losses:
        """The losses of some sentences by the origin of their targets, in the order of
        `indices`.

        Where every type is known, source is the ordinary loss and target exactly 0,
        without a gradient. Dropout (in training mode) draws from torch's global
        generator alone. Raises TrainingError for no sentences.
        """
        return self._read_batch(
            self.own(corpus), chosen_of(indices), every=states
        ).losses(states)

    @torch.no_grad()
    def gradients(
        self, corpus: PreparedCorpus, indices: Sequence[int] | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Gradients with respect to the transfer parameter alone, without dropout.

        Returns (sentences, size): of each sentence's source loss; and (size,): of the
        sum of their target losses. No parameter's `.grad` changes.
        """
        own, chosen = self.own(corpus), np.asarray(indices, np.int64)
        weight = self.get_parameter(self.transfer)
        each = weight.new_zeros(len(chosen), weight.numel())
        total = weight.new_zeros(weight.numel())
        with evaluating(self):
            for part in self._parts(own.lengths[chosen]):
                of_source, of_target = self._read_batch(own, chosen[part]).gradients()
                each[part] = of_source.to(each)
                total += of_target.to(total)
        return each, total

    @torch.no_grad()
    def predict(
        self, documents: Sequence[Document] | PreparedCorpus, confidence: bool = False
    ) -> tuple[Document, ...]:
        """The documents (or a corpus') with predicted spans in place of their own.

        Given documents, what is annotated in them is not looked at. Dropout is off.
        confidence: spans have one, which `sure` explains.
        """
        if isinstance(documents, Sequence):
            own = self.prepare(documents, gold=False)
        else:
            own = self.own(documents)
        with evaluating(self):
            return self._found(own, confidence)

    def _found(self, corpus: Any, confidence: bool) -> tuple[Document, ...]:
        encoded = corpus.encoded
        # (tokens,); O where nothing is read
        ids = np.zeros(len(encoded.form), np.int64)
        # at a span's first token
        chances = np.full(len(ids), np.nan) if confidence else None
        for indices in self._parts(corpus.lengths):
            read = self._read_batch(corpus, indices)
            ids[read.tokens] = read.best()
            if chances is not None:
                starts = encoded.bounds[indices]
                spans = np.array(
                    [
                        (row, first, last, kind)
                        for row, (a, b) in enumerate(
                            zip(starts, encoded.bounds[indices + 1], strict=True)
                        )
                        for first, last, kind in zip(
                            *find_spans(ids[a:b], self.tagset), strict=True
                        )
                    ],
                    np.int64,
                ).reshape(-1, 4)
                chances[starts[spans[:, 0]] + spans[:, 1]] = read.chances(spans)
        return with_spans(encoded, ids, chances)

    @torch.no_grad()
    def alternatives(self, document: Document, span: Span) -> dict[str, float]:
        """How probable the words of a span are as a mention of each type; and "O": that
        none of them is in any mention. What is left of 1 goes to spans with other
        boundaries.

        Raises DataError where the model reads no word, or words that it reads apart.
        """
        corpus = self.prepare([document], gold=False)
        encoded = corpus.encoded
        first = int(np.searchsorted(encoded.offsets[:, 1], span.start, side="right"))
        last = int(np.searchsorted(encoded.offsets[:, 0], span.end, side="left"))
        unit = int(np.searchsorted(encoded.bounds, first, side="right")) - 1
        place = f"characters {span.start} to {span.end}"
        if not 0 <= span.start < span.end <= len(document.text) or first >= last:
            raise DataError(
                f"{place}: there is no word of the document, so nothing to explain"
            )
        if last > encoded.bounds[unit + 1]:
            raise DataError(
                f"{place}: in two sentences, which the model reads apart: give one"
            )
        at = np.array([first, last]) - encoded.bounds[unit]
        names = ("O", *self.tagset.types)
        asked = np.array([(0, *at, kind) for kind in range(-1, len(names) - 1)])
        with evaluating(self):
            found = self._read_batch(corpus, np.array([unit])).chances(asked)
        return dict(zip(names, found.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class CrfReading:
    """What a model with a CRF on top makes of a batch.

    features: what the output's projection reads, (batch, steps, width); or (tokens,
    width), and `place` (batch, steps) says which row is whose, `tokens` at padding.
    layers: likewise, one for each of `Losses.hidden`, zero at padding.
    """

    output: CrfOutput
    batch: Batch
    features: Tensor
    layers: Sequence[Tensor]
    place: Tensor | None = None

    @property
    def tokens(self) -> np.ndarray:
        """As `Reading`."""
        return self.batch.tokens[self.batch.inside]

    def _padded(self, values: Tensor) -> Tensor:
        return values if self.place is None else with_zero(values)[self.place]

    def emissions(self) -> Tensor:
        """(batch, steps, tags) unnormalised scores."""
        return self._padded(self.output.project(self.features))

    def best(self) -> np.ndarray:
        """As `Reading`."""
        ids = self.output.crf.decode(self.emissions(), self.batch.lengths)
        return ids.cpu().numpy()[self.batch.inside]

    def chances(self, spans: np.ndarray) -> np.ndarray:
        """As `Reading`: marginals, each a sum over all sequences that have the span."""
        emissions, batch = self.emissions(), self.batch
        found = [np.zeros(0)]
        size = max(1, _QUERIES // emissions[0].numel())
        for start in range(0, len(spans), size):
            part = spans[start : start + size]
            allowed = np.ones((len(part), *emissions.shape[1:]), dtype=bool)
            for row, (_, first, last, kind) in zip(allowed, part.tolist(), strict=True):
                wanted = span_tag_mask(batch.corpus.encoded.tagset, kind, last - first)
                low = max(first - 1, 0)
                row[low : last + 1] = wanted[int(first == 0) :][: len(row) - low]
            rows = torch.from_numpy(batch.back[part[:, 0]])
            asked = torch.from_numpy(allowed)
            found.append(
                self.output.crf.chances(emissions, batch.lengths, rows, asked)
                .cpu()
                .numpy()
            )
        return np.concatenate(found)

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """As `Reading`."""
        batch = self.batch
        unary, pairs = self.output.crf.posterior(
            self.emissions(), batch.lengths, batch.allowed
        )
        asked = pairs[batch.back].float().cpu().numpy()
        return unary.float().cpu().numpy()[batch.inside], asked

    def losses(self, states: bool) -> Losses:
        """As `Model.losses`."""
        batch, back = self.batch, self.batch.back
        source, target = split_loss(self.output.crf, self.emissions(), *batch.targets())
        losses = Losses(source[back], target[back])
        if not states:
            return losses
        inside = torch.from_numpy(batch.inside[back]).to(self.features.device)
        rows = self.features if self.place is None else self.place[back][inside]
        sizes = batch.lengths[:, None]
        added = added_tags(batch.tags, batch.corpus.encoded.tagset, batch.corpus.known)
        return replace(
            losses,
            hidden=tuple((self._padded(h).sum(1) / sizes)[back] for h in self.layers),
            outputs=rows[inside] if self.place is None else self.features[rows],
            pseudo=added[back][inside],
            score=self.output.project,
        )

    def gradients(self) -> tuple[Tensor, Tensor]:
        """As `Model.gradients`."""
        crf, project, features = (
            self.output.crf,
            self.output.project,
            self._padded(self.features),
        )
        source, target = transfer_gradients(
            crf, project, features, *self.batch.targets()
        )
        return source[self.batch.back], target


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Dropout is off within, and then as it was."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
