"""Any Hugging Face encoder, fine-tuned whole for token classification (Devlin et al. 2018, 5.3).

A word's tag is read from the state above its first sub-word by a linear classifier; the other
sub-words have no target. Words are independent given the text, so the loss is the sum of the
words' cross-entropies: `softmax_output.py`, also for text that annotates some types only.

The model is the library's own `…ForTokenClassification`, run whole, so that what is saved gives
the same logits there. Its parts are this module's: "classifier.weight", "encoder.<name in the
encoder>", so the first word of a name is what a job may keep private. What is trained:

    train = "encoder"   all but the table of word embeddings, whose change tells a site's words
    train = "all"       everything, as Liu and Miller 2020 did
    train = "top"       the uppermost layers and the classifier

With context = "document" a whole document is one unit of training and prediction: what does
not fit the model's positions is read in overlapping windows, each word where it lies deepest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fednotes import __version__
from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.settings import build
from fednotes.core.tensors import device_of
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import encode_corpus, with_spans, without_gold
from fednotes.models.encoder_corpus import (
    EncoderCorpus,
    by_encoder,
    chosen_of,
    flat_corpus,
    read_pieces,
)
from fednotes.models.frozen import encoder_directory, length_batches, stamp_of
from fednotes.models.layers import seeded
from fednotes.models.model import Corpus, Losses
from fednotes.models.partial import Soft, added_tags, allowed_tags, require_types, retag
from fednotes.models.pretrained import quiet
from fednotes.models.softmax_output import word_gradients, word_losses, word_posterior
from fednotes.models.tagger_corpus import evaluating
from fednotes.models.token_classifier_files import (
    open_trained,
    opened,
    require_classifier,
    trained_names,
)
from fednotes.models.word_reader import WordReader, Words

KIND = "token-classifier"
WHOLE_BATCH = (8192, 256)  # most sub-words and units that are predicted together


@dataclass(frozen=True)
class TokenClassifierConfig:
    """Field names are TOML keys of a job's [model] table.

    encoder: "minilm" or a Hugging Face directory (an encoder, what pre-training saved, or an
    earlier token classifier, whose encoder is taken). context: what is read together. train,
    top: see above. window: sub-words that are read at once, marks included; 0 = as many as
    the model has positions. dropout: every rate of the encoder; not given: its own.
    max_tokens: words; longer units are cut between entities where they are trained on.
    """

    kind: Literal["token-classifier"] = "token-classifier"
    encoder: str = "minilm"
    context: Literal["sentence", "document"] = "sentence"
    train: Literal["encoder", "all", "top"] = "encoder"
    top: int = 2
    window: int = 0
    dropout: float | None = None
    max_tokens: int = 256

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no model can have."""
        for name, least in (("top", 1), ("window", 0), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: it must be at least {least}")
        if self.dropout is not None and not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout = {self.dropout}: it must be at least 0 and below 1")
        if self.context not in ("sentence", "document"):
            raise ConfigError(f"context = {self.context!r}: 'sentence' or 'document'")
        if self.train not in ("encoder", "all", "top"):
            raise ConfigError(f"train = {self.train!r}: 'encoder', 'all' or 'top'")


class TokenClassifier(nn.Module):
    """A fine-tuned encoder; see `build_token_classifier` and `open_token_classifier`.

    config, tagset, tokenizer: what it was built from. model: a `…ForTokenClassification` of the
    library whose labels are the tag set's; its parts become this module's.

    Raises ModelError (no linear classifier, does not run), ConfigError (window or top do not
    fit the model).
    """

    transfer: str = "classifier.weight"
    softens: bool = True
    encoder: nn.Module
    classifier: nn.Linear

    def __init__(
        self, config: TokenClassifierConfig, tagset: TagSet, tokenizer: Any, model: Any
    ) -> None:
        super().__init__()
        self.config, self.tagset, self.tokenizer = config, tagset, tokenizer
        require_classifier(config.encoder, model)
        for name, child in model.named_children():
            self.add_module("encoder" if name == model.base_model_prefix else name, child)
        self._whole = (model,)  # in a tuple, or its parts would be there twice
        trained = trained_names(config.encoder, model, config.train, config.top)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        self._reader = WordReader(model, tokenizer, config.window, config.encoder)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.classifier.weight.device

    @property
    def frozen(self) -> int:
        """How many numbers are never trained."""
        return sum(p.numel() for p in self.parameters() if not p.requires_grad)

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`: every layer of the encoder."""
        return self._reader.widths

    @property
    def output_width(self) -> int:
        """The columns of `Losses.outputs`."""
        return self.classifier.in_features

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name → parameter, sorted by name, of everything that training changes and sends."""
        named = sorted(self.named_parameters(), key=lambda pair: pair[0])
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def train(self, mode: bool = True) -> TokenClassifier:
        """Training mode (dropout) on or off."""
        self._whole[0].train(mode)
        return super().train(mode)

    # ---- corpora -------------------------------------------------------------------------------

    def prepare(
        self,
        documents: Sequence[Document],
        cache: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        gold: bool = True,
    ) -> EncoderCorpus:
        """Encode a corpus; every type known.

        With gold=True long units are cut between entities, to be trained on. gold=False strips
        the spans and cuts nothing. cache is not used: training changes what the encoder says.
        progress(done, all) counts units. Raises DataError for a label outside the tag set.
        """
        given = tuple(documents) if gold else without_gold(documents)
        encoded = encode_corpus(
            given,
            self.tagset,
            max_tokens=self.config.max_tokens if gold else None,
            unit=self.config.context,
        )
        pieces = read_pieces(encoded, self.tokenizer, "first", progress)
        return flat_corpus(encoded, pieces, self._reader.capacity)

    def annotate(
        self, corpus: Corpus, documents: Sequence[Document], known: Collection[str]
    ) -> EncoderCorpus:
        """The same texts with the spans of `documents` as the annotation.

        Raises ConfigError for a known type that the tag set lacks, DataError for other texts.
        """
        own, types = by_encoder(corpus, KIND), require_types(known, self.tagset)
        return replace(own, encoded=retag(own.encoded, documents, types), known=types, soft=None)

    @torch.no_grad()
    def soften(self, corpus: Corpus) -> EncoderCorpus:
        """The same corpus whose target is this model's posterior, given the known types' spans.

        Unchanged where every type is known: nothing is left to guess.
        """
        own = by_encoder(corpus, KIND)
        if own.complete(self.tagset):
            return replace(own, soft=None)
        unary = np.zeros((len(own.encoded.form), len(self.tagset.tags)), np.float32)
        with evaluating(self):
            for indices in length_batches(own.lengths.tolist(), *WHOLE_BATCH):
                words = self._reader.read(own, indices, below=False)
                _, allowed, _ = self._targets(own, words)
                assert allowed is not None
                unary[words.token] = word_posterior(words.logits, allowed).float().cpu().numpy()
        pairs = np.zeros((own.sentences, 0, 0), np.float32)  # nothing depends on two tags
        return replace(own, soft=Soft(unary, pairs))

    def tokens(self, corpus: Corpus, indices: Sequence[int] | np.ndarray) -> int:
        """How many words of these units have a target: those that the loss is a sum over."""
        return int(by_encoder(corpus, KIND).words[np.asarray(indices, np.int64)].sum())

    # ---- losses --------------------------------------------------------------------------------

    def losses(
        self, corpus: Corpus, indices: Sequence[int] | np.ndarray, *, states: bool = False
    ) -> Losses:
        """The losses of some units, in the order of `indices`: sums over their words.

        `hidden` has the output of every layer, mean over the words' first sub-words; `outputs`
        one row a word. Raises TrainingError for no units.
        """
        own = by_encoder(corpus, KIND)
        words = self._reader.read(own, chosen_of(indices), every=states)
        tags, allowed, soft = self._targets(own, words)
        of_words = word_losses(words.logits, tags, allowed, soft)
        source, target = (words.padded(loss).sum(1) for loss in of_words)  # (units,)
        if not states:
            return Losses(source, target)
        count = torch.from_numpy(own.words[np.asarray(indices, np.int64)]).to(self.device)
        return Losses(
            source,
            target,
            hidden=tuple(
                words.padded(layer).sum(1) / count.clamp(min=1)[:, None] for layer in words.layers
            ),
            outputs=words.below,
            pseudo=added_tags(tags, self.tagset, own.known),
            score=self.classifier,
        )

    @torch.no_grad()
    def gradients(
        self, corpus: Corpus, indices: Sequence[int] | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Gradients with respect to `classifier.weight`, without dropout; see `Model`.

        A unit's is Σ δ ⊗ h over its words, δ being that of the logits in closed form and h what
        the classifier reads: nothing below the classifier is gone through.
        """
        own, chosen = by_encoder(corpus, KIND), np.asarray(indices, np.int64)
        weight = self.classifier.weight
        each = weight.new_zeros(len(chosen), weight.numel())
        total = weight.new_zeros(weight.numel())
        with evaluating(self):
            for part in length_batches(own.lengths[chosen].tolist(), *WHOLE_BATCH):
                words = self._reader.read(own, chosen[part])
                source, target = word_gradients(words.logits, *self._targets(own, words))
                below = words.below.to(source.dtype)  # (words, width)
                delta = words.padded(source).transpose(1, 2)  # (units, tags, steps)
                each[part] = (delta @ words.padded(below)).flatten(1).to(each)
                total += (target.T @ below).flatten().to(total)
        return each, total

    def _targets(
        self, corpus: EncoderCorpus, words: Words
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tags, what is allowed and soft targets of each word, as `softmax_output` takes them."""
        tags = torch.from_numpy(corpus.encoded.tags[words.token]).to(self.device)
        allowed = soft = None
        if not corpus.complete(self.tagset):
            allowed = allowed_tags(tags, self.tagset, corpus.known)
        if corpus.soft is not None:
            soft = torch.from_numpy(corpus.soft.unary[words.token]).to(self.device)
        return tags, allowed, soft

    # ---- prediction ----------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, documents: Sequence[Document] | Corpus) -> tuple[Document, ...]:
        """The documents with predicted spans in place of their own: each word's best tag.

        Given documents, what is annotated in them is not looked at. Dropout is off. A sequence
        that the scheme does not allow is read as `data/tags.decode` reads it.
        """
        if isinstance(documents, Sequence):
            own = self.prepare(documents, gold=False)
        else:
            own = by_encoder(documents, KIND)
        ids = np.zeros(len(own.encoded.form), np.int64)  # (tokens,); O where nothing is read
        with evaluating(self):
            for indices in length_batches(own.lengths.tolist(), *WHOLE_BATCH):
                words = self._reader.read(own, indices, below=False)
                ids[words.token] = words.logits.argmax(-1).cpu().numpy()
        return with_spans(own.encoded, ids)

    # ---- as a directory ------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face directory; `config.json` has our settings as "fednotes"."""
        model = self._whole[0]
        own = {k: v for k, v in asdict(self.config).items() if k not in ("kind", "encoder")}
        model.config.fednotes = {"version": __version__, **own}
        with quiet():
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def build_token_classifier(
    config: TokenClassifierConfig, tagset: TagSet, seed: int, device: str | torch.device = "cpu"
) -> TokenClassifier:
    """A new model: the directory's encoder, and a classifier whose values come from the seed.

    The classifier starts as the library's would: normal, of the configuration's initializer
    range; the bias is zero. Models of one process share what they do not train. The global
    random state is left as it was.

    Raises ConfigError (no types, an impossible window or number of layers, no such device),
    ModelError (nothing usable in the directory), MissingExtra.
    """
    if not tagset.types:
        raise ConfigError("the tag set has no entity types: a tagger needs at least one")
    path = encoder_directory(config.encoder)
    device_of(device)
    tokenizer, whole = opened(path, tagset.tags, config.dropout, stamp_of(path))
    trained = trained_names(config.encoder, whole, config.train, config.top)
    # Storage is shared, the parameter is not: what is done to one model's stays there.
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
        for name, parameter in whole.named_parameters()
        if name not in trained
    }
    model = TokenClassifier(config, tagset, tokenizer, copy.deepcopy(whole, shared))
    with torch.no_grad(), seeded(seed, "classifier"):
        spread = float(getattr(whole.config, "initializer_range", 0.02))
        model.classifier.weight.normal_(0.0, spread)
        if model.classifier.bias is not None:
            model.classifier.bias.zero_()
    return model.to(device)


def open_token_classifier(directory: Path, device: str | torch.device = "cpu") -> TokenClassifier:
    """The token classifier of a Hugging Face directory, in evaluation mode: ours or others'.

    Raises ModelError (another kind of model, damaged, pickled or missing weights, labels that
    are no tags), ConfigError (no such device), MissingExtra.
    """
    device_of(device)
    tokenizer, model, tagset, own = open_trained(directory)
    table = own | {"encoder": str(directory.resolve())}
    try:
        config = build(TokenClassifierConfig, table, "config.json (fednotes)")
        return TokenClassifier(config, tagset, tokenizer, model).to(device).train(False)
    except ConfigError as error:
        raise ModelError(f"{directory}: {error}") from error
