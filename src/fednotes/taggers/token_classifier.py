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

Directories that the library opens as `…ForTokenClassification`.

A new model takes a directory's encoder. A trained one, saved here or elsewhere, is taken whole:
its labels may stand in any order in `config.json`, the classifier's rows are put in the order of
the tag set, so the same labels get the same scores as there.

A `…ForTokenClassification` run on a corpus: its scores of every word.

A word is read above its first sub-word. What does not fit the model's positions is read in
overlapping windows, each sub-word from the one where it lies deepest. The library's model is
run whole, so its scores are the library's, but its classifier only where a word begins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fednotes import __version__
from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.parsing import read_json
from fednotes.core.settings import build
from fednotes.core.tensors import device_of
from fednotes.core.types import Document, Scheme, TagSet
from fednotes.data.batches import encode_corpus, with_spans, without_gold
from fednotes.encoders.encoder import marks_of, positions_of
from fednotes.encoders.frozen import encoder_directory, length_batches, stamp_of
from fednotes.encoders.pretrained import open_config, open_pretrained, quiet, require_complete
from fednotes.taggers.corpora import (
    EncoderCorpus,
    by_encoder,
    chosen_of,
    evaluating,
    flat_corpus,
    padded_windows,
    read_pieces,
    window_groups,
)
from fednotes.taggers.layers import seeded
from fednotes.taggers.model import Corpus, Losses
from fednotes.taggers.partial import (
    Soft,
    added_tags,
    allowed_tags,
    require_types,
    retag,
    word_gradients,
    word_losses,
    word_posterior,
)

AUTO = "AutoModelForTokenClassification"
NEVER = -100.0  # bias of a tag that the saved model does not know: it is not predicted


@lru_cache(maxsize=2)
def opened(path: Path, tags: tuple[str, ...], dropout: float | None, stamp: Any) -> tuple[Any, Any]:
    """Tokenizer and model to be copied. `stamp` makes a directory that changed a new one."""
    settings: dict[str, Any] = {} if dropout is None else _rates(open_config(path), dropout)
    tokenizer, model, missing = open_pretrained(
        path,
        AUTO,
        num_labels=len(tags),
        id2label=dict(enumerate(tags)),
        label2id={tag: i for i, tag in enumerate(tags)},
        ignore_mismatched_sizes=True,  # the classifier of an earlier tag set
        **settings,
    )
    require_complete(path, tuple(n for n in missing if not n.startswith("classifier.")))
    require_classifier(path, model)
    return tokenizer, model.requires_grad_(False)


def _rates(config: Any, dropout: float) -> dict[str, float]:
    """Every dropout rate that a configuration has, set to this one."""
    return {
        name: dropout
        for name, value in config.to_dict().items()
        if "dropout" in name and type(value) in (int, float, type(None))
    }


def trained_names(where: str, model: Any, train: str, top: int) -> set[str]:
    """Names of a model's parameters that are trained; see `TokenClassifierConfig`.

    Raises ConfigError where there are no such layers. where: how messages call the model.
    """
    named = dict(model.named_parameters())
    if train == "all":
        return set(named)
    if train == "encoder":
        words = model.get_input_embeddings().weight
        return {name for name, parameter in named.items() if parameter is not words}
    depth = int(getattr(model.config, "num_hidden_layers", 0))
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if not stacks:
        raise ConfigError(f"{where}: its layers cannot be told apart; train = 'encoder'")
    if top > depth:
        raise ConfigError(f"top = {top}: {where} has {depth} layers")
    upper = {id(p) for stack in stacks for p in stack[-top:].parameters()}
    below = f"{model.base_model_prefix}."
    return {n for n, p in named.items() if id(p) in upper or not n.startswith(below)}


def require_classifier(where: str | Path, model: Any) -> None:
    """Raises ModelError where the model is no encoder with a linear classifier on top."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{where}: is an encoder-decoder; give an encoder")
    if not isinstance(getattr(model, "classifier", None), nn.Linear):
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ModelError(f"{where}: models of the kind {kind!r} have no linear token classifier")


def saved_by_us(directory: Path) -> bool:
    """Whether `save_model` wrote this Hugging Face directory."""
    try:
        facts = read_json(directory / "config.json", strict=False)
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and "fednotes" in facts


def open_trained(directory: Path) -> tuple[Any, Any, TagSet, dict[str, Any]]:
    """Tokenizer, model, its tag set, and the settings that `TokenClassifier.save` left there.

    Raises ModelError (another kind of model, damaged, pickled or missing weights, labels that
    are no tags), MissingExtra.
    """
    facts = _facts(directory)
    names = facts.get("architectures") or ["?"]
    if not str(names[0]).endswith("ForTokenClassification"):
        raise ModelError(
            f"{directory}: holds a {names[0]}, which does not find entities yet; fine-tune it: "
            'a job with [model] kind = "token-classifier" and this folder as its encoder'
        )
    # Shapes that do not fit count as missing, with a clearer line than the library's.
    tokenizer, model, missing = open_pretrained(directory, AUTO, ignore_mismatched_sizes=True)
    require_complete(directory, missing)
    require_classifier(directory, model)
    tagset, rows = tagset_of(directory, model.config.id2label, model.classifier.out_features)
    _order(model, tagset, rows)
    own = facts.get("fednotes", {})
    if not isinstance(own, dict):
        raise ModelError(f"{directory / 'config.json'}: damaged ('fednotes' is no table)")
    return tokenizer, model, tagset, {k: v for k, v in own.items() if k != "version"}


def tagset_of(
    directory: Path, labels: Mapping[int, str], size: int
) -> tuple[TagSet, tuple[int, ...]]:
    """The tag set that some labels write, and the classifier's row of each of its tags.

    labels: row → "O", "B-x", "I-x", "E-x" or "S-x". Types are in the order of their first row;
    the scheme is the smallest that has all prefixes. A tag that is not among them has row -1.
    Raises ModelError for other labels.
    """
    row_of = {label: row for row, label in sorted(labels.items())}
    types: dict[str, None] = {}
    prefixes = set()
    for label in row_of:
        prefix, dash, name = label.partition("-")
        if label != "O" and (prefix not in ("B", "I", "E", "S") or not dash or not name):
            raise ModelError(
                f"{directory}: its label {label!r} is no tag; O, B-…, I-… (E-…, S-…) are needed: "
                "name them so in config.json (id2label), if that is what the model was trained on"
            )
        if label != "O":
            types.setdefault(name)
            prefixes.add(prefix)
    if not types or "O" not in row_of or len(row_of) != size or max(labels, default=0) >= size:
        raise ModelError(
            f"{directory}: {len(row_of)} distinct labels, {len(types)} of them entity types, for a "
            f"classifier of {size} rows: config.json (id2label) must name each row, one of them O"
        )
    scheme: Scheme = "BIOES" if prefixes & {"E", "S"} else "BIO" if "B" in prefixes else "IO"
    tagset = TagSet(tuple(types), scheme)
    return tagset, tuple(row_of.get(tag, -1) for tag in tagset.tags)


@torch.no_grad()
def _order(model: Any, tagset: TagSet, rows: tuple[int, ...]) -> None:
    """Put the classifier's rows and the labels in the tag set's order."""
    old: nn.Linear = model.classifier
    if rows != tuple(range(old.out_features)):
        at = torch.tensor(rows)
        new = nn.utils.skip_init(nn.Linear, old.in_features, len(rows))
        new.weight.copy_(torch.where((at < 0)[:, None], 0.0, old.weight[at]))
        bias = torch.zeros(old.out_features) if old.bias is None else old.bias
        new.bias.copy_(torch.where(at < 0, NEVER, bias[at]))
        model.classifier = new
    model.num_labels = len(rows)
    model.config.id2label = dict(enumerate(tagset.tags))
    model.config.label2id = {tag: i for i, tag in enumerate(tagset.tags)}


def _facts(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        facts = read_json(file, strict=False)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{file}: damaged (not JSON: {error}); copy the folder again") from error
    if not isinstance(facts, dict):
        raise ModelError(f"{file}: not a model's configuration")
    return facts


@dataclass(frozen=True, eq=False)
class Words:
    """What the model says of the words of some units, in reading order.

    units, steps: how many, and words of the longest. token: (words,) of the corpus. place:
    (words,) in (units, steps) taken flat. logits: (words, tags). below: (words, width), what
    the classifier reads. layers: (words, width) above each layer, if asked for.
    """

    units: int
    steps: int
    token: np.ndarray
    place: Tensor
    logits: Tensor
    below: Tensor
    layers: tuple[Tensor, ...]

    def padded(self, values: Tensor) -> Tensor:
        """(words, …) → (units, steps, …), zero elsewhere. Each place is written once."""
        flat = values.new_zeros(self.units * self.steps, *values.shape[1:])
        flat = flat.index_copy(0, self.place, values)
        return flat.view(self.units, self.steps, *values.shape[1:])


class WordReader:
    """Runs a `…ForTokenClassification` whose `classifier` is linear.

    window: sub-words read at once, marks included; 0 = as many as the model has positions.
    capacity: those that fit between the marks. widths: columns of each of its layers.

    Raises ConfigError (a window that is too large or small), ModelError (it does not run).
    where: how messages call the model.
    """

    def __init__(self, model: Any, tokenizer: Any, window: int, where: str) -> None:
        self._model, self._where = model, where
        before, after = marks_of(tokenizer)
        self._marks = (tuple(before), tuple(after))
        self._pad = tokenizer.pad_token_id or 0
        positions = positions_of(tokenizer, model)
        if window > positions:
            raise ConfigError(f"window = {window}: {where} reads {positions} sub-words at most")
        self.capacity = (window or positions) - len(before) - len(after)
        if self.capacity < 1:
            raise ConfigError(
                f"window = {window or positions}: no room for a word beside the "
                f"{len(before) + len(after)} marks"
            )
        self.widths = self._probe()

    @property
    def _classifier(self) -> nn.Linear:
        head: nn.Linear = self._model.classifier
        return head

    @property
    def _device(self) -> torch.device:
        return self._classifier.weight.device

    def read(
        self, corpus: EncoderCorpus, chosen: np.ndarray, every: bool = False, below: bool = True
    ) -> Words:
        """Run some units, their windows in groups of like length. below: keep those states."""
        bounds, device = corpus.encoded.bounds, self._device
        steps = int((bounds[chosen + 1] - bounds[chosen]).max())
        token, place = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        parts: list[tuple[Tensor, ...]] = []  # of each group: logits, below, layers
        for group in window_groups(corpus, chosen, self._rows, len(self._marks[0]), device):
            at = torch.from_numpy(group.at).to(device)
            logits, states, layers = self._run(group.ids, group.mask, at, every)
            parts.append((logits, states if below else states[:0].clone(), *layers))
            token.append(group.token)
            place.append(group.sentence * steps + group.token - bounds[chosen][group.sentence])
        if not parts:
            head = self._classifier
            empty = head.weight.new_zeros(0, head.in_features)
            layers = [empty.new_zeros(0, width) for width in self.widths if every]
            parts.append((head(empty), empty, *layers))
        where = np.concatenate(place)
        order = np.argsort(where)
        turn = torch.from_numpy(order).to(device)
        whole = [torch.cat(part) for part in zip(*parts, strict=True)]
        logits, states, *others = (v[turn] if len(v) == len(turn) else v for v in whole)
        there = torch.from_numpy(where[order]).to(device)
        tokens = np.concatenate(token)[order]
        return Words(len(chosen), steps, tokens, there, logits, states, tuple(others))

    def _rows(
        self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        padded, mask = padded_windows(ids, starts, lengths, self._marks, self._pad)
        return padded.to(self._device), mask.to(self._device)

    def _run(
        self, ids: Tensor, mask: Tensor, at: Tensor, every: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The whole model, its classifier at some sub-words alone.

        ids, mask: (windows, longest). at: (words,) in them taken flat. Returns logits
        (words, tags), what the classifier read (words, width), and if asked for each layer's
        states (words, width).
        """
        read: list[Tensor] = []

        def pick(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            read.append(inputs[0].flatten(0, 1).index_select(0, at))
            return (read[0],)

        handle = self._classifier.register_forward_pre_hook(pick)
        try:
            out = self._model(
                input_ids=ids,
                attention_mask=mask.long(),
                output_hidden_states=every,
                return_dict=True,
            )
        finally:
            handle.remove()
        layers = out.hidden_states[1:] if every else ()
        return out.logits, read[0], [s.flatten(0, 1).index_select(0, at) for s in layers]

    @torch.no_grad()
    def _probe(self) -> tuple[int, ...]:
        """One sub-word through the model: whether it runs, and how wide its layers are."""
        ids, mask = self._rows(np.full(1, self._pad), np.zeros(1, np.int64), np.ones(1, np.int64))
        at = torch.zeros(1, dtype=torch.long, device=self._device)
        try:
            with evaluating(self._model):
                _, _, layers = self._run(ids, mask, at, every=True)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise ModelError(f"{self._where}: does not work as a token classifier") from error
        return tuple(int(layer.shape[-1]) for layer in layers)


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
