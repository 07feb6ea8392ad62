"""Any Hugging Face encoder, fine-tuned whole for token classification (Devlin et al.
2018, 5.3).

A word's tag is read from the state above its first sub-word by a linear classifier; the
other sub-words have no target. Words are independent given the text, so the loss is the
sum of the words' cross-entropies (`partial.py`), also for text that annotates some
types only.

The model is the library's own `…ForTokenClassification`, run whole, so that what is
saved gives the same logits there. Its parts are this module's: "classifier.weight",
"encoder.<name in the encoder>", so the first word of a name is what a job may keep
private. What is trained:

    train = "encoder"   all but the table of word embeddings, whose change tells a site's words
    train = "all"       everything, as Liu and Miller 2020 did
    train = "top"       the uppermost layers and the classifier
    train = "lora"      low-rank changes of the layers' maps, and the classifier; what is saved
                        has the changes in its weights

With context = "document" a whole document is one unit of training and prediction: what
does not fit the model's positions is read in overlapping windows, each word where it
lies deepest.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from fednotes import __version__
from fednotes.core.errors import (
    ConfigError,
    FednotesError,
    ModelError,
    readable,
    within,
)
from fednotes.core.parsing import mapping, read_json
from fednotes.core.settings import build, checked
from fednotes.core.tensors import device_of, seeded
from fednotes.core.types import Document, Scheme, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.data.tags import span_tag_mask
from fednotes.encoders.adapters import Changed, LoRA, targets
from fednotes.encoders.pretrained import (
    NO_ENCODER,
    Frame,
    Stamp,
    encoder_directory,
    open_config,
    open_pretrained,
    positions_of,
    quiet,
    require_complete,
    stamp_of,
    upper_layers,
)
from fednotes.encoders.reading import READING, reads_words_alike
from fednotes.taggers.corpora import EncoderCorpus, PreparedCorpus
from fednotes.taggers.model import (
    Kind,
    Losses,
    Model,
    ModelConfig,
    Preparing,
    evaluating,
)
from fednotes.taggers.partial import (
    added_tags,
    allowed_tags,
    word_gradients,
    word_losses,
    word_posterior,
)

AUTO = "AutoModelForTokenClassification"
NEVER = -100.0  # bias of a tag that the saved model does not know: it is not predicted


@checked(frozen=True)
class TokenClassifierConfig(ModelConfig):
    """A Hugging Face encoder with a linear classifier of words.

    Attributes:
        kind: The token classifier.
        encoder: "minilm" or a Hugging Face directory: an encoder, what pre-training
            saved, or an earlier token classifier, whose encoder is taken with its
            outputs for the types that both have.
        context: What is read together.
        train: What is trained: "encoder" is all but the word embeddings, "all"
            everything, "top" the uppermost layers and the classifier, "lora" low-rank
            changes and the classifier.
        top: Number of layers that train = "top" trains.
        rank: Rank of the changes of train = "lora": W + alpha / rank · B A.
        alpha: Scale of these changes; see `rank`.
        maps: Maps of the layers that train = "lora" changes: "all", or those of the
            queries and values ("attention").
        window: Number of sub-words that are read at once, marks included; 0 is as many
            as the model has positions.
        dropout: Every dropout rate of the encoder; if it is not given, the encoder's
            own.
        max_tokens: Number of words; longer units are cut between entities in training.
    """

    encodes: ClassVar[bool] = True

    kind: Literal["token-classifier"] = "token-classifier"
    encoder: str = "minilm"
    context: Literal["sentence", "document"] = "sentence"
    train: Literal["encoder", "all", "top", "lora"] = "encoder"
    top: Annotated[int, Ge(1)] = 2
    rank: Annotated[int, Ge(1)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    maps: Changed = "all"
    window: Annotated[int, Ge(0)] = 0
    dropout: Annotated[float, Ge(0), Lt(1)] | None = None
    max_tokens: Annotated[int, Ge(1)] = 256


@dataclass(frozen=True, eq=False)
class WordReading:
    """What the model says of the words of some units, in reading order.

    owner, corpus: whose. units, steps: how many, and words of the longest. tokens:
    (words,) of the corpus. place: (words,) in (units, steps) taken flat. logits:
    (words, tags). below: (words, width), what the classifier reads. layers: (words,
    width) above each layer, if asked for.
    """

    owner: TokenClassifier
    corpus: EncoderCorpus
    chosen: np.ndarray
    steps: int
    tokens: np.ndarray
    place: Tensor
    logits: Tensor
    below: Tensor
    layers: tuple[Tensor, ...]

    def padded(self, values: Tensor) -> Tensor:
        """(words, …) → (units, steps, …), zero elsewhere.

        Each place is written once.
        """
        units = len(self.chosen)
        flat = values.new_zeros(units * self.steps, *values.shape[1:])
        return flat.index_copy(0, self.place, values).view(
            units, self.steps, *values.shape[1:]
        )

    def _targets(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tags, what is allowed and soft targets of each word, as `word_losses` takes
        them."""
        corpus, device = self.corpus, self.logits.device
        tags = torch.from_numpy(corpus.encoded.tags[self.tokens]).to(device)
        allowed = soft = None
        if not corpus.complete:
            allowed = allowed_tags(tags, corpus.encoded.tagset, corpus.known)
        if corpus.soft is not None:
            soft = torch.from_numpy(corpus.soft.unary[self.tokens]).to(device)
        return tags, allowed, soft

    def best(self) -> np.ndarray:
        """As `Reading`."""
        return self.logits.argmax(-1).cpu().numpy()

    def chances(self, spans: np.ndarray) -> np.ndarray:
        """As `Reading`: words are independent, so a product over a span's words and its
        neighbours. An I- at its start counts where the word before is of another type,
        as `find_spans` reads it."""
        tagset = self.corpus.encoded.tagset
        of = self.padded(self.logits.float().softmax(-1)).cpu().double().numpy()
        of[..., 0] += of.sum(-1) == 0  # (units, steps, tags); O, where nothing is read
        found = []
        for unit, first, last, kind in spans.tolist():
            wanted, low = span_tag_mask(tagset, kind, last - first), max(first - 1, 0)
            part = of[unit, low : last + 1]
            each = (part * wanted[int(first == 0) :][: len(part)]).sum(-1)
            if kind >= 0:
                width = len(tagset.prefixes)
                own = 1 + kind * width + np.arange(width)  # the type's tags
                odd = of[unit, first, own[~wanted[1, own]]].sum()
                each[first - low] += odd * (
                    1 - of[unit, first - 1, own].sum() if first else 1
                )
            found.append(each.prod())
        return np.array(found)

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """As `Reading`; nothing depends on two tags."""
        _, allowed, _ = self._targets()
        assert allowed is not None
        within = word_posterior(self.logits, allowed).float().cpu().numpy()
        return within, np.zeros((len(self.chosen), 0, 0), np.float32)

    def losses(self, states: bool) -> Losses:
        """As `Model.losses`: sums over a unit's words; `outputs` has one row a word."""
        corpus = self.corpus
        of_words = word_losses(self.logits, *self._targets())
        source, target = (self.padded(loss).sum(1) for loss in of_words)  # (units,)
        if not states:
            return Losses(source, target)
        count = (
            torch.from_numpy(corpus.words[self.chosen]).to(source.device).clamp(min=1)
        )
        tags = self._targets()[0]
        return Losses(
            source,
            target,
            hidden=tuple(
                self.padded(layer).sum(1) / count[:, None] for layer in self.layers
            ),
            outputs=self.below,
            pseudo=added_tags(tags, corpus.encoded.tagset, corpus.known),
            score=self.owner.classifier,
        )

    def gradients(self) -> tuple[Tensor, Tensor]:
        """As `Model.gradients`: a unit's is Σ δ ⊗ h over its words, δ being that of the
        logits in closed form and h what the classifier reads."""
        source, target = word_gradients(self.logits, *self._targets())
        below = self.below.to(source.dtype)  # (words, width)
        delta = self.padded(source).transpose(1, 2)  # (units, tags, steps)
        return (delta @ self.padded(below)).flatten(1), (target.T @ below).flatten()


class TokenClassifier(Model):
    """A fine-tuned encoder. model: a `…ForTokenClassification` of the library whose
    labels are the tag set's; its parts become this module's.

    Raises ModelError (no linear classifier, does not run), ConfigError (window or top
    do not fit the model).
    """

    transfer = "classifier.weight"
    reads = EncoderCorpus
    whole = True
    sure = (
        "the product of its words' probabilities of the tags that make exactly this span with this "
        "label, given the text"
    )
    encoder: nn.Module
    classifier: nn.Linear

    def __init__(
        self, config: TokenClassifierConfig, tagset: TagSet, tokenizer: Any, model: Any
    ) -> None:
        super().__init__(config, tagset)
        self.tokenizer, where = tokenizer, config.encoder
        require_classifier(where, model)
        for name, child in model.named_children():
            self.add_module(
                "encoder" if name == model.base_model_prefix else name, child
            )
        self._whole = (model,)  # in a tuple, or its parts would be there twice
        trained = trained_names(where, model, config.train, config.top)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        positions = positions_of(tokenizer, model)
        if config.window > positions:
            raise ConfigError(
                f"window = {config.window}: {where} reads {positions} sub-words at most"
            )
        with within(
            f"window = {config.window or positions}", ModelError, become=ConfigError
        ):
            self._frame = Frame.of(where, tokenizer, model, config.window)
        one, frame = np.ones(1, np.int64), self._frame
        ids, mask = frame.rows(np.full(1, frame.pad), 0 * one, one, self.device)
        try:  # one sub-word: whether it runs, and how wide its layers are
            with torch.no_grad(), evaluating(model):
                _, _, layers = self._run(
                    ids, mask, torch.zeros_like(ids[0, :1]), every=True
                )
        except NO_ENCODER as error:
            raise ModelError(f"{where}: does not work as a token classifier") from error
        self._widths = tuple(int(layer.shape[-1]) for layer in layers)

    def adapt(self, seed: int, name: str = "lora") -> None:
        """Let low-rank changes be trained, which add to those that are there by another
        name.

        Raises ConfigError where there is nothing to change.
        """
        (model,) = self._whole
        config = self.config
        self._maps = targets(model, config.maps)
        changes = LoRA(self._maps, config.rank, config.alpha, seed, name)
        self.add_module(name, changes.to(self.device))

    def copied(self, classifier: nn.Linear) -> TokenClassifier:
        """A copy with this classifier."""
        found = copy.deepcopy(self)
        for holder in (found, *found._whole):
            holder.classifier = classifier
        return found

    @property
    def changes(self) -> list[LoRA]:
        """The low-rank changes, in the order in which they were added."""
        return [part for part in self.children() if isinstance(part, LoRA)]

    @property
    def library(self) -> Any:
        """The library's model, whose parts are this module's; without low-rank changes."""
        return self._whole[0]

    @property
    def frozen(self) -> int:
        """How many numbers are never trained."""
        return sum(p.numel() for p in self.parameters() if not p.requires_grad)

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`: every layer of the encoder."""
        return self._widths

    def train(self, mode: bool = True) -> TokenClassifier:
        """Training mode (dropout) on or off."""
        self._whole[0].train(mode)
        return super().train(mode)

    def _encode(self, documents: tuple[Document, ...], how: Preparing) -> EncoderCorpus:
        """Long units are cut between entities, to be trained on; without gold nothing
        is cut. cache is not used: training changes what the encoder says."""
        config = self.config
        encoded = encode_corpus(
            documents,
            self.tagset,
            max_tokens=config.max_tokens if how.gold else None,
            unit=config.context,
        )
        capacity = self._frame.capacity
        return EncoderCorpus.of(
            encoded, self.tokenizer, capacity, "first", how.progress
        )

    def tokens(
        self, corpus: PreparedCorpus, indices: Sequence[int] | np.ndarray
    ) -> int:
        """How many words of these units have a target: those that the loss is a sum
        over."""
        return int(self.own(corpus).words[np.asarray(indices, np.int64)].sum())

    def _read(
        self, corpus: EncoderCorpus, chosen: np.ndarray, every: bool = False
    ) -> WordReading:
        """Run some units, their windows in groups of like length."""
        bounds, device = corpus.encoded.bounds, self.device
        steps = int((bounds[chosen + 1] - bounds[chosen]).max())
        token, place = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        parts: list[tuple[Tensor, ...]] = []  # of each group: logits, below, layers
        for group in corpus.pieces.groups(chosen, self._frame, device):
            at = torch.from_numpy(group.at).to(device)
            logits, states, layers = self._run(group.ids, group.mask, at, every)
            parts.append((logits, states, *layers))
            token.append(group.token)
            place.append(
                group.sentence * steps + group.token - bounds[chosen][group.sentence]
            )
        if not parts:
            empty = self.classifier.weight.new_zeros(0, self.classifier.in_features)
            layers = [empty.new_zeros(0, width) for width in self.widths if every]
            parts.append((self.classifier(empty), empty, *layers))
        where = np.concatenate(place)
        order = np.argsort(where)
        turn = torch.from_numpy(order).to(device)
        logits, states, *others = (
            torch.cat(part)[turn] for part in zip(*parts, strict=True)
        )
        there = torch.from_numpy(where[order]).to(device)
        tokens = np.concatenate(token)[order]
        return WordReading(
            self, corpus, chosen, steps, tokens, there, logits, states, tuple(others)
        )

    def _run(
        self, ids: Tensor, mask: Tensor, at: Tensor, every: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The library's model run whole, but its classifier at some sub-words alone.

        ids, mask: (windows, longest). at: (words,) in them taken flat. Returns logits,
        what the classifier read, and if asked for each layer's states, (words, ·) all.
        """
        read: list[Tensor] = []

        def pick(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            read.append(inputs[0].flatten(0, 1).index_select(0, at))
            return (read[0],)

        (model,) = self._whole
        handle = model.classifier.register_forward_pre_hook(pick)
        try:
            with ExitStack() as stack:
                for changes in self.changes:
                    stack.enter_context(changes.applied(self._maps))
                out = model(
                    input_ids=ids,
                    attention_mask=mask.long(),
                    output_hidden_states=every,
                    return_dict=True,
                )
        finally:
            handle.remove()
        layers = out.hidden_states[1:] if every else ()
        return (
            out.logits,
            read[0],
            [s.flatten(0, 1).index_select(0, at) for s in layers],
        )

    @torch.no_grad()
    def emissions(self, corpus: PreparedCorpus) -> np.ndarray:
        """(tokens, tags) logits of all words, without dropout; zeros, so O, where none
        is read."""
        own = self.own(corpus)
        found = np.zeros((len(own.encoded.form), len(self.tagset.tags)), np.float32)
        with evaluating(self):
            for indices in self._parts(own.lengths):
                read = self._read_batch(own, indices)
                found[read.tokens] = read.logits.float().cpu().numpy()
        return found

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face directory; `config.json` has our settings as
        "fednotes"."""
        (model,) = self._whole
        if self.changes:
            model = copy.deepcopy(model)
        for changes in self.changes:
            changes.merge(targets(model, self.config.maps))
        own = {
            k: v for k, v in asdict(self.config).items() if k not in ("kind", "encoder")
        }
        model.config.fednotes = {"version": __version__, "reading": READING} | own
        with quiet():
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def build_token_classifier(
    config: TokenClassifierConfig,
    tagset: TagSet,
    seed: int,
    device: str | torch.device = "cpu",
) -> TokenClassifier:
    """A new model: the directory's encoder, and a classifier that starts as the
    library's would, normal, of the configuration's initializer range, but from the
    seed, and for types that an earlier classifier there has as it is there. Models of
    one process share what they do not train. Raises as `build_model`; ConfigError also
    for an impossible window or number of layers.
    """
    path = encoder_directory(config.encoder)
    device_of(device)
    tokenizer, whole, new = _opened(path, tagset, config.dropout, stamp_of(path))
    trained = trained_names(config.encoder, whole, config.train, config.top)
    # Storage is shared, the parameter is not: what is done to one model's stays there.
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
        for name, parameter in whole.named_parameters()
        if name not in trained
    }
    model = TokenClassifier(config, tagset, tokenizer, copy.deepcopy(whole, shared))
    if config.train == "lora":
        model.adapt(seed)
    with torch.no_grad(), seeded(seed, "classifier"):
        spread = float(getattr(whole.config, "initializer_range", 0.02))
        weight, bias = model.classifier.weight, model.classifier.bias
        weight[new] = torch.empty_like(weight).normal_(0.0, spread)[new]
        if bias is not None:
            bias[new] = 0.0
    return model.to(device)


def open_token_classifier(
    directory: Path, device: str | torch.device = "cpu"
) -> TokenClassifier:
    """The token classifier of a Hugging Face directory, in evaluation mode: ours or
    others'.

    Its labels may stand in any order: the classifier's rows are put in that of the tag
    set.
    Raises ModelError (another kind of model, damaged, pickled or missing weights,
    labels that are no tags), ConfigError (no such device), MissingExtra.
    """
    device_of(device)
    facts = _settings(directory)
    names = facts.get("architectures") or ["?"]
    if not str(names[0]).endswith("ForTokenClassification"):
        raise ModelError(
            f"{directory}: holds a {names[0]}, which does not find entities yet; fine-tune it: "
            'a job with [model] kind = "token-classifier" and this folder as its encoder'
        )
    tokenizer, model, tagset, rows = _trained(directory)
    _order(model, tagset, rows)
    own = facts.get("fednotes", {})
    if not isinstance(own, dict):
        raise ModelError(
            f"{directory / 'config.json'}: damaged ('fednotes' is no table)"
        )
    require_reading(directory, tokenizer, own)
    settings = {
        key: value for key, value in own.items() if key not in ("version", "reading")
    }
    table = settings | {"encoder": str(directory.resolve())}
    with within(str(directory), ConfigError, become=ModelError):
        config = build(TokenClassifierConfig, table, "config.json (fednotes)")
        return TokenClassifier(config, tagset, tokenizer, model).to(device).train(False)


@lru_cache(maxsize=2)
def _opened(
    path: Path, tagset: TagSet, dropout: float | None, stamp: Stamp
) -> tuple[Any, Any, Tensor]:
    """Tokenizer and model to be copied, and (tags,) whether the tag's row of the
    classifier is to start anew. `stamp` makes a directory that changed a new one."""
    settings: dict[str, Any] = {}
    if dropout is not None:  # every rate that the configuration has
        settings = {
            name: dropout
            for name, value in open_config(path).to_dict().items()
            if "dropout" in name and type(value) in (int, float, type(None))
        }
    if earlier_types(path):
        tokenizer, model, known, places = _trained(path, **settings)
        for name, value in model.classifier.named_parameters():
            if not torch.isfinite(value).all():
                raise ModelError(
                    f"{path}: 'classifier.{name}' is not finite: training diverged"
                )
        row_of = {
            tag: row for tag, row in zip(known.tags, places, strict=True) if row >= 0
        }
        # with "O"
        whole = [TagSet((label,), tagset.scheme).tags for label in tagset.types]
        kept = {tag for own in whole if row_of.keys() >= set(own) for tag in own}
        rows = tuple(row_of[tag] if tag in kept else -1 for tag in tagset.tags)
        _order(model, tagset, rows)
    else:
        named, rows = dict(enumerate(tagset.tags)), (-1,) * len(tagset.tags)
        settings |= {"num_labels": len(named), "id2label": named}
        settings |= {"label2id": {tag: row for row, tag in named.items()}}
        settings["ignore_mismatched_sizes"] = True  # of a classifier of something else
        tokenizer, model, missing = open_pretrained(path, AUTO, **settings)
        require_complete(
            path, tuple(n for n in missing if not n.startswith("classifier."))
        )
        require_classifier(path, model)
    return tokenizer, model.requires_grad_(False), torch.tensor(rows) < 0


def _trained(
    directory: Path, **settings: Any
) -> tuple[Any, Any, TagSet, tuple[int, ...]]:
    """Tokenizer and model of a token classifier, complete; its tags, and the row of
    each."""
    # Shapes that do not fit count as missing, with a clearer line than the library's.
    settings["ignore_mismatched_sizes"] = True
    tokenizer, model, missing = open_pretrained(directory, AUTO, **settings)
    require_complete(directory, missing)
    require_classifier(directory, model)
    labels = model.config.id2label
    return (
        tokenizer,
        model,
        *tagset_of(directory, labels, model.classifier.out_features),
    )


def earlier_types(encoder: str | Path) -> tuple[str, ...]:
    """The entity types of the token classifier that an encoder's directory is; none
    where it is another model, or is not here."""
    facts: dict[str, Any] = {}
    with suppress(FednotesError):
        facts = _settings(encoder_directory(str(encoder)))
    if "ForTokenClassification" not in str(facts.get("architectures")):
        return ()
    labels = mapping(facts.get("id2label")).values()
    found = (re.fullmatch("[BIES]-(.+)", str(label), re.DOTALL) for label in labels)
    return tuple(dict.fromkeys(match[1] for match in found if match))


def trained_names(where: str, model: Any, train: str, top: int) -> set[str]:
    """Names of a model's parameters that are trained; see `TokenClassifierConfig`.

    Raises ConfigError where there are no such layers. where: how messages call the
        model.
    """
    named = dict(model.named_parameters())
    if train == "all":
        return set(named)
    if train == "encoder":
        words = model.get_input_embeddings().weight
        return {name for name, parameter in named.items() if parameter is not words}
    upper = upper_layers(where, model, top) if train == "top" else set()
    below = f"{model.base_model_prefix}."
    return {name for name in named if name in upper or not name.startswith(below)}


def require_reading(directory: Path, tokenizer: Any, facts: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that was trained on another reading of text than
    today's.

    Earlier versions gave words to the tokenizer one by one. What a byte-level or
    SentencePiece tokenizer makes of that is not the text: such a model would see other
    sub-words than those that it learnt, and silently find less. With WordPiece the two
    readings agree but for words beside symbols ("37°C"), so these models are read on.

    Args:
        directory: The model's folder, for the message.
        tokenizer: Its tokenizer.
        facts: What `config.json` says under "fednotes"; empty for models of other
            programs, which are read as text like any other.
    """
    if not facts or facts.get("reading") == READING or reads_words_alike(tokenizer):
        return
    if "reading" in facts:
        raise ModelError(
            f"{directory}: was trained on another reading of text ({facts['reading']!r}) than this "
            f"version of fednotes has ({READING!r}): install the version that wrote it "
            f"({facts.get('version', '?')})"
        )
    raise ModelError(
        f"{directory}: was trained by fednotes {facts.get('version', '?')}, which gave words to "
        "the tokenizer one by one, without the blanks between them; this version reads the text "
        "itself: train the model again, or install the version that wrote it"
    )


def require_classifier(where: str | Path, model: Any) -> None:
    """Raises ModelError where the model is no encoder with a linear classifier on top."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{where}: is an encoder-decoder; give an encoder")
    if not isinstance(getattr(model, "classifier", None), nn.Linear):
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ModelError(
            f"{where}: models of the kind {kind!r} have no linear token classifier"
        )


def tagset_of(
    directory: Path, labels: Mapping[int, str], size: int
) -> tuple[TagSet, tuple[int, ...]]:
    """The tag set that some labels write, and the classifier's row of each of its tags.

    labels: row → "O", "B-x", "I-x", "E-x" or "S-x". Types are in the order of their
    first row; the scheme is the smallest that has all prefixes. A tag that is not among
    them has row -1.
    Raises ModelError for other labels.
    """
    row_of = {label: row for row, label in sorted(labels.items())}
    types: dict[str, None] = {}
    prefixes = set()
    for label in row_of:
        prefix, dash, name = str(label).partition("-")
        if label != "O" and (
            prefix not in ("B", "I", "E", "S") or not dash or not name
        ):
            raise ModelError(
                f"{directory}: its label {label!r} is no tag; O, B-…, I-… (E-…, S-…) are needed: "
                "name them so in config.json (id2label), if that is what the model was trained on"
            )
        if label != "O":
            types.setdefault(name)
            prefixes.add(prefix)
    if (
        not types
        or "O" not in row_of
        or len(row_of) != size
        or max(labels, default=0) >= size
    ):
        raise ModelError(
            f"{directory}: {len(row_of)} distinct labels, {len(types)} of them entity types, for a "
            f"classifier of {size} rows: config.json (id2label) must name each row, one of them O"
        )
    scheme: Scheme = (
        "BIOES" if prefixes & {"E", "S"} else "BIO" if "B" in prefixes else "IO"
    )
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


def _settings(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        with readable(file, ModelError):
            facts = read_json(file, strict=False)
    except ValueError as error:
        raise ModelError(
            f"{file}: damaged (not JSON: {error}); copy the folder again"
        ) from error
    if not isinstance(facts, dict):
        raise ModelError(f"{file}: not a model's configuration")
    return facts


KIND = Kind(TokenClassifierConfig, build_token_classifier)
