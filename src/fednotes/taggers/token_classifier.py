"""Any Hugging Face encoder, fine-tuned for token classification.

As in Devlin et al. 2018, section 5.3, a linear classifier reads a word's tag from the
state above the word's first sub-word; the other sub-words have no target. Words are
independent given the text, so the loss is the sum of the words' cross-entropies
(`partial.py`), also for partially annotated text.

The model is the library's own `…ForTokenClassification` and is run as the library runs
it, so a saved model gives the same logits there. Its parts become parts of this module:
"classifier.weight", "encoder.<name in the encoder>". A job can keep parts private by
the first word of a parameter's name. The trained parts are:

    train = "encoder"   everything except the word embeddings, whose changes reveal a
                        site's words
    train = "all"       everything, as Liu and Miller 2020 did
    train = "top"       the uppermost layers and the classifier
    train = "biases"    the encoder's biases and the weights of its normalisation
                        layers, and the classifier (Bu et al. 2022, DP-BiTFiT)
    train = "lora"      LoRA adapters in the layers' linear maps, and the classifier. A
                        saved model has the adapters merged into its weights

With context = "document" a whole document is one unit of training and prediction. A
unit that exceeds the model's positions is read in overlapping windows, and each word is
taken from the window in which it is farthest from the edges.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fednotes import __version__
from fednotes.core.errors import (
    ConfigError,
    FednotesError,
    ModelError,
    naming_place,
    raising_if_unreadable,
)
from fednotes.core.numbers import (
    FractionBelowOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from fednotes.core.parsing import as_mapping, read_json
from fednotes.core.settings import LocalFile, build, checked
from fednotes.core.tensors import find_device, seeding_layer
from fednotes.core.types import Document, Scheme, TagSet, is_type_name
from fednotes.data.batches import Unit, encode_corpus
from fednotes.encoders.adapters import Changed, LoRA, find_linears
from fednotes.encoders.pretrained import (
    NO_ENCODER,
    Frame,
    Stamp,
    count_positions,
    find_encoder_directory,
    list_biases,
    list_upper_layers,
    open_config,
    open_pretrained,
    read_stamp,
    require_complete,
    silencing_library,
)
from fednotes.encoders.reading import READING, reads_words_alike
from fednotes.taggers.corpora import EncoderCorpus, PreparedCorpus
from fednotes.taggers.model import (
    Kind,
    ModelConfig,
    PrepareOptions,
    SavesItself,
    TaggingModel,
    evaluating,
)
from fednotes.taggers.word_reading import WordReading

AUTO = "AutoModelForTokenClassification"
# The bias of tags that a foreign model lacks, so that they are never predicted.
NEVER = -100.0


@checked(frozen=True)
class TokenClassifierConfig(ModelConfig):
    """A Hugging Face encoder with a linear classifier of words.

    Attributes:
        kind: The token classifier.
        encoder: "minilm" or a Hugging Face directory: an encoder, a model that
            pre-training saved, or an earlier token classifier, which contributes its
            encoder and its outputs for the types that both models have.
        context: Text that the encoder reads at once.
        train: Parameters to train: "encoder" all except the word embeddings; "all"
            every parameter; "top" the uppermost layers and the classifier; "biases"
            the biases and the weights of normalisation layers, and the classifier;
            "lora" LoRA adapters and the classifier. Fewer parameters need less memory
            and fewer bytes.
        top: Number of layers to train with train = "top".
        rank: Rank of the LoRA adapters with train = "lora": W + alpha / rank · B A.
            A higher rank can learn more and sends more bytes.
        alpha: Scale of the LoRA adapters; see `rank`.
        maps: Matrices of each layer that train = "lora" changes: "all", or those of
            queries and values ("attention").
        window: Number of sub-words that are read at once, including special tokens; 0
            uses all positions of the model.
        dropout: Dropout rate in all places of the encoder; default: the encoder's own
            rates.
        max_tokens: Maximum number of words in a training unit; longer units are cut
            between entities.
    """

    encodes: ClassVar[bool] = True

    kind: Literal["token-classifier"] = "token-classifier"
    encoder: LocalFile = "minilm"
    context: Unit = "sentence"
    train: Literal["encoder", "all", "top", "biases", "lora"] = "encoder"
    top: PositiveInt = 2
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    maps: Changed = "all"
    window: NonNegativeInt = 0
    dropout: FractionBelowOne | None = None
    max_tokens: PositiveInt = 256

    @property
    def trains_word_embeddings(self) -> bool:
        """Whether everything is trained, including the word embeddings."""
        return self.train == "all"

    @property
    def unit(self) -> Unit:
        """The stretch of text that is read at once: `context`."""
        return self.context

    @property
    def max_unit_words(self) -> int:
        """The maximum number of words in a unit: `max_tokens`."""
        return self.max_tokens


class TokenClassifier(TaggingModel, SavesItself):
    """A fine-tuned encoder with a linear classifier of words.

    Args:
        config: The specification.
        tagset: The tag set.
        tokenizer: The encoder's tokenizer.
        model: A `…ForTokenClassification` of the library whose labels are the tag
            set's. Its parts become parts of this module.

    Raises:
        ModelError: The model has no linear classifier or does not run.
        ConfigError: The model does not support `window` or `top`.

    Attributes:
        tokenizer: The encoder's tokenizer.
        adapted_layers: The linear layers with LoRA adapters, in their order.
    """

    transfer = "classifier.weight"
    reads = EncoderCorpus
    confidence_meaning = WordReading.confidence_meaning
    encoder: nn.Module
    classifier: nn.Linear

    def __init__(
        self, config: TokenClassifierConfig, tagset: TagSet, tokenizer: Any, model: Any
    ) -> None:
        super().__init__(config, tagset)
        where = config.encoder
        self.tokenizer = tokenizer
        self.adapted_layers: list[nn.Linear] = []
        require_classifier(where, model)
        # The model's parts become parts of this module; its base model is "encoder".
        for name, child in model.named_children():
            is_encoder = name == model.base_model_prefix
            self.add_module("encoder" if is_encoder else name, child)
        # The tuple keeps torch from registering the parts of this module twice.
        self._library = (model,)

        trained = list_trained_names(where, model, config.train, config.top)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)

        positions = count_positions(tokenizer, model)
        if config.window > positions:
            raise ConfigError(
                f"window = {config.window}: {where} reads at most {positions} sub-words"
            )
        # A window can also be too small to hold the special tokens and one sub-word.
        # `Frame.of` then raises ModelError, which becomes a ConfigError with the size
        # in use: all positions if `config.window` is 0.
        place = f"window = {config.window or positions}"
        with naming_place(place, ModelError, become=ConfigError):
            self._frame = Frame.of(where, tokenizer, model, config.window)
        self._widths = self._measure_widths()

    def _measure_widths(self) -> tuple[int, ...]:
        """Run one sub-word; return the number of columns of each layer.

        Raises:
            ModelError: The model does not run.
        """
        ids, mask = self._frame.make_padding_row(self.device)
        at = torch.zeros_like(ids[0, :1])
        try:
            with torch.no_grad(), evaluating(self.library):
                _, _, layers = self._run(ids, mask, at, all_layers=True)
        except NO_ENCODER as error:
            raise ModelError(
                f"{self.config.encoder}: does not work as a token classifier"
            ) from error
        return tuple(int(layer.shape[-1]) for layer in layers)

    def adapt(self, seed: int, name: str = "lora") -> None:
        """Add trainable LoRA adapters; those with other names are kept.

        Args:
            seed: The seed of their initial values.
            name: The name of the new part of this module.

        Raises:
            ConfigError: The model has no layers to change.
        """
        config = self.config
        self.adapted_layers = find_linears(self.library, config.maps)
        adapters = LoRA(self.adapted_layers, config.rank, config.alpha, seed, name)
        self.add_module(name, adapters.to(self.device))

    def copy_with_classifier(self, classifier: nn.Linear) -> TokenClassifier:
        """Return a copy of the model with this classifier."""
        copied = copy.deepcopy(self)
        copied.classifier = classifier
        copied.library.classifier = classifier
        return copied

    @property
    def adapters(self) -> list[LoRA]:
        """The LoRA adapters, in the order in which they were added."""
        return [part for part in self.children() if isinstance(part, LoRA)]

    @property
    def library(self) -> Any:
        """The library's model, without LoRA adapters; it shares this model's parts."""
        return self._library[0]

    def count_frozen(self) -> int:
        """Return the number of frozen parameters."""
        return sum(p.numel() for p in self.parameters() if not p.requires_grad)

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`: every layer of the encoder."""
        return self._widths

    def train(
        self,
        mode: bool = True,  # noqa: FBT001, FBT002 - as in torch
    ) -> TokenClassifier:
        """Switch training mode (dropout) on or off."""
        self.library.train(mode)
        return super().train(mode)

    def _encode(
        self, documents: tuple[Document, ...], options: PrepareOptions
    ) -> EncoderCorpus:
        """Encode documents without a cache, because training changes the states.

        For training, long units are cut between entities. Without gold, nothing is cut.
        """
        config = self.config
        encoded = encode_corpus(
            documents,
            self.tagset,
            max_tokens=config.max_tokens if options.has_gold else None,
            unit=config.context,
        )
        return EncoderCorpus.of(
            encoded,
            self.tokenizer,
            self._frame.capacity,
            pooling="first",
            progress=options.progress,
        )

    def count_tokens(
        self, corpus: PreparedCorpus, indices: Sequence[int] | np.ndarray
    ) -> int:
        """Return the number of words with a target in some units."""
        prepared: EncoderCorpus = self.require_corpus(corpus)
        return int(prepared.words[np.asarray(indices, np.int64)].sum())

    def _read_for_tags(self, corpus: EncoderCorpus, chosen: np.ndarray) -> WordReading:
        """Return a reading without states.

        The states of a single long unit may take thousands of times as much memory as
        its text.
        """
        self.batch_listeners.announce(self, corpus, chosen)
        return self._read(corpus, chosen, with_states=False)

    def _read(
        self,
        corpus: EncoderCorpus,
        chosen: np.ndarray,
        *,
        all_layers: bool = False,
        with_states: bool = True,
    ) -> WordReading:
        """Run the model on some units; see `TaggingModel._read`.

        Windows run in groups of similar length, which mix the words of several units.
        The results are then put back into the order of the units and their words.

        Args:
            corpus: The corpus.
            chosen: Indices of the units.
            all_layers: Whether to return the states above each layer.
            with_states: Whether to return the classifier's input; without it, the
                states have no columns.
        """
        device = self.device
        starts = corpus.encoded.bounds[chosen]
        steps = int((corpus.encoded.bounds[chosen + 1] - starts).max())
        # A word's place is its index in the flattened table (units, steps).
        tokens_of_groups = [np.zeros(0, np.int64)]
        places_of_groups = [np.zeros(0, np.int64)]
        # For each group: logits, states, layers.
        results_of_groups: list[tuple[Tensor, ...]] = []
        for group in corpus.pieces.iterate_groups(chosen, self._frame, device):
            used = torch.from_numpy(group.position).to(device)
            logits, states, layers = self._run(
                group.ids, group.mask, used, all_layers=all_layers
            )
            if not with_states:
                states = states.new_zeros(len(states), 0)
            results_of_groups.append((logits, states, *layers))
            tokens_of_groups.append(group.token)
            position = group.token - starts[group.sentence]
            places_of_groups.append(group.sentence * steps + position)
        if not results_of_groups:
            results_of_groups.append(self._read_nothing(all_layers=all_layers))

        places = np.concatenate(places_of_groups)
        order = np.argsort(places)
        order_on_device = torch.from_numpy(order).to(device)
        logits, states, *sorted_layers = (
            torch.cat(values)[order_on_device]
            for values in zip(*results_of_groups, strict=True)
        )
        return WordReading(
            classifier=self.classifier,
            corpus=corpus,
            chosen=chosen,
            steps=steps,
            tokens=np.concatenate(tokens_of_groups)[order],
            place=torch.from_numpy(places[order]).to(device),
            logits=logits,
            states=states,
            layers=tuple(sorted_layers),
        )

    def _read_nothing(self, *, all_layers: bool) -> tuple[Tensor, ...]:
        """Return logits, states and layers of no words."""
        empty = self.classifier.weight.new_zeros(0, self.classifier.in_features)
        layers: list[Tensor] = []
        if all_layers:
            layers = [empty.new_zeros(0, width) for width in self.widths]
        return (self.classifier(empty), empty, *layers)

    def _run(
        self, ids: Tensor, mask: Tensor, word_places: Tensor, *, all_layers: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run the library's model, with its classifier only on some sub-words.

        Args:
            ids: (windows, longest) ids.
            mask: (windows, longest) bool, False at padding.
            word_places: (words,) the positions in `ids`, flattened, of the sub-words
                that stand for words.
            all_layers: Whether to return the states above each layer.

        Returns:
            Logits (words, tags), the classifier's input (words, width), and the states
            (words, width) above each layer if `all_layers`.
        """
        inputs: list[Tensor] = []

        def pick_words(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
            inputs.append(arguments[0].flatten(0, 1).index_select(0, word_places))
            return (inputs[0],)

        model = self.library
        handle = model.classifier.register_forward_pre_hook(pick_words)
        try:
            with ExitStack() as stack:
                for adapters in self.adapters:
                    stack.enter_context(adapters.applying(self.adapted_layers))
                out = model(
                    input_ids=ids,
                    attention_mask=mask.long(),
                    output_hidden_states=all_layers,
                    return_dict=True,
                )
        finally:
            handle.remove()
        layers: list[Tensor] = []
        if all_layers:
            layers = [
                states.flatten(0, 1).index_select(0, word_places)
                for states in out.hidden_states[1:]
            ]
        return out.logits, inputs[0], layers

    @torch.no_grad()
    def compute_emissions(self, corpus: PreparedCorpus) -> np.ndarray:
        """Return (tokens, tags) float32, the logits of all words, without dropout.

        For words that the model does not read, all logits are zero, which decodes to O.
        """
        prepared: EncoderCorpus = self.require_corpus(corpus)
        shape = (len(prepared.encoded.form), len(self.tagset.tags))
        logits = np.zeros(shape, np.float32)
        with evaluating(self):
            for chosen in self._batch_by_length(prepared.lengths):
                reading = self._read_for_tags(prepared, chosen)
                logits[reading.tokens] = reading.logits.float().cpu().numpy()
        return logits

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face directory.

        `config.json` stores the settings of this package under "fednotes".
        """
        model = self.library
        if self.adapters:
            model = copy.deepcopy(model)
        for adapters in self.adapters:
            adapters.merge(find_linears(model, self.config.maps))
        settings = {
            key: value
            for key, value in asdict(self.config).items()
            if key not in ("kind", "encoder")
        }
        facts = {"version": __version__, "reading": READING}
        model.config.fednotes = facts | settings
        with silencing_library():
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def build_token_classifier(
    config: TokenClassifierConfig,
    tagset: TagSet,
    seed: int,
    device: str | torch.device = "cpu",
) -> TokenClassifier:
    """Return a new model built from a directory's encoder.

    The classifier is initialised as by the library, from a normal distribution with
    standard deviation `initializer_range` of the configuration, but drawn from the
    seed. Rows of types that an existing classifier in the directory has are copied from
    it. Models of one process share their frozen parameters.

    Raises:
        ConfigError: The window or the number of layers is impossible; or as
            `build_model`.
        ModelError: As `build_model`.
        MissingExtra: As `build_model`.
    """
    path = find_encoder_directory(config.encoder)
    find_device(device)
    tokenizer, original, is_new = _open(path, tagset, config.dropout, read_stamp(path))
    trained = list_trained_names(config.encoder, original, config.train, config.top)
    # The storage is shared, but not the parameters, so each model has its own flags.
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
        for name, parameter in original.named_parameters()
        if name not in trained
    }
    model = TokenClassifier(config, tagset, tokenizer, copy.deepcopy(original, shared))
    if config.train == "lora":
        model.adapt(seed)
    spread = float(getattr(original.config, "initializer_range", 0.02))
    with torch.no_grad(), seeding_layer(seed, "classifier"):
        weight = model.classifier.weight
        bias = model.classifier.bias
        weight[is_new] = torch.empty_like(weight).normal_(0.0, spread)[is_new]
        if bias is not None:
            bias[is_new] = 0.0
    return model.to(device)


def open_token_classifier(
    directory: Path, device: str | torch.device = "cpu"
) -> TokenClassifier:
    """Return the token classifier of a Hugging Face directory, in evaluation mode.

    The directory may come from another program. Its labels may have any order: the
    classifier's rows are put into the order of the tag set.

    Raises:
        ModelError: The directory holds another kind of model, the weights are damaged,
            pickled or missing, or the labels are not tags.
        ConfigError: There is no such device.
        MissingExtra: A package is missing.
    """
    find_device(device)
    facts = _read_configuration(directory)
    names = facts.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "?"
    if not architecture.endswith("ForTokenClassification"):
        raise ModelError(
            f"{directory}: holds a {architecture}, which does not find entities yet: "
            'fine-tune it with a job whose [model] has kind = "token-classifier" and '
            "this folder as its encoder"
        )
    tokenizer, model, tagset, rows = _open_trained(directory)
    _reorder_classifier(model, tagset, rows)

    ours = facts.get("fednotes", {})
    if not isinstance(ours, dict):
        raise ModelError(
            f"{directory / 'config.json'}: damaged ('fednotes' is not a table)"
        )
    require_same_reading(directory, tokenizer, ours)
    settings = {
        key: value for key, value in ours.items() if key not in ("version", "reading")
    }
    table = settings | {"encoder": str(directory.resolve())}
    with naming_place(str(directory), ConfigError, become=ModelError):
        config = build(TokenClassifierConfig, table, "config.json (fednotes)")
        classifier = TokenClassifier(config, tagset, tokenizer, model).to(device)
        classifier.eval()
        return classifier


@lru_cache(maxsize=2)
def _open(
    path: Path,
    tagset: TagSet,
    dropout: float | None,
    stamp: Stamp,  # noqa: ARG001 - a directory that changed on disk is read anew
) -> tuple[Any, Any, Tensor]:
    """Open an encoder for fine-tuning.

    Returns:
        The tokenizer; the model, to be copied; and (tags,) bool, whether the tag's row
        of the classifier is to be initialised.
    """
    settings: dict[str, Any] = {}
    if dropout is not None:
        settings = _choose_dropout_rates(path, dropout)
    if read_earlier_types(path):
        tokenizer, model, rows = _open_for_more_types(path, tagset, settings)
    else:
        tokenizer, model, rows = _open_untrained(path, tagset, settings)
    return tokenizer, model.requires_grad_(requires_grad=False), torch.tensor(rows) < 0


def _choose_dropout_rates(path: Path, rate: float) -> dict[str, Any]:
    """Set every dropout rate of a configuration to `rate`."""
    return {
        name: rate
        for name, value in open_config(path).to_dict().items()
        if "dropout" in name and type(value) in (int, float, type(None))
    }


def _open_for_more_types(
    path: Path, tagset: TagSet, settings: Mapping[str, Any]
) -> tuple[Any, Any, tuple[int, ...]]:
    """Open an existing token classifier, to train it for a tag set.

    Returns:
        The tokenizer; the model, whose classifier has a row for each tag; and the row
        that each tag had before, or -1.
    """
    tokenizer, model, earlier, earlier_rows = _open_trained(path, **settings)
    for name, value in model.classifier.named_parameters():
        if not torch.isfinite(value).all():
            raise ModelError(
                f"{path}: 'classifier.{name}' is not finite: training diverged"
            )
    row_of = {
        tag: row
        for tag, row in zip(earlier.tags, earlier_rows, strict=True)
        if row >= 0
    }
    # A type is continued only if all its tags, including O, have a row.
    continued: set[str] = set()
    for label in tagset.types:
        tags = TagSet((label,), tagset.scheme).tags
        if row_of.keys() >= set(tags):
            continued.update(tags)
    rows = tuple(row_of[tag] if tag in continued else -1 for tag in tagset.tags)
    _reorder_classifier(model, tagset, rows)
    return tokenizer, model, rows


def _open_untrained(
    path: Path, tagset: TagSet, settings: Mapping[str, Any]
) -> tuple[Any, Any, tuple[int, ...]]:
    """Open an encoder with a new classifier for a tag set.

    Returns:
        The tokenizer, the model, and -1 for each tag.
    """
    names = dict(enumerate(tagset.tags))
    tokenizer, model, missing = open_pretrained(
        path,
        AUTO,
        **settings,
        num_labels=len(names),
        id2label=names,
        label2id={tag: row for row, tag in names.items()},
        # The directory may have a classifier of other labels.
        ignore_mismatched_sizes=True,
    )
    missing_encoder = [name for name in missing if not name.startswith("classifier.")]
    require_complete(path, tuple(missing_encoder))
    require_classifier(path, model)
    return tokenizer, model, (-1,) * len(names)


def _open_trained(
    directory: Path, **settings: Any
) -> tuple[Any, Any, TagSet, tuple[int, ...]]:
    """Open a complete token classifier.

    Returns:
        The tokenizer, the model, its tag set, and the classifier's row of each tag.
    """
    tokenizer, model, missing = open_pretrained(
        directory,
        AUTO,
        **settings,
        # Mismatched weights then count as missing, with a clearer message.
        ignore_mismatched_sizes=True,
    )
    require_complete(directory, missing)
    require_classifier(directory, model)
    labels = model.config.id2label
    tagset, rows = derive_tagset(directory, labels, model.classifier.out_features)
    return tokenizer, model, tagset, rows


def read_earlier_types(encoder: str | Path) -> tuple[str, ...]:
    """Return the entity types of the token classifier in an encoder's directory.

    It is empty if the directory holds another model or does not exist.
    """
    facts: dict[str, Any] = {}
    with suppress(FednotesError):
        facts = _read_configuration(find_encoder_directory(str(encoder)))
    if "ForTokenClassification" not in str(facts.get("architectures")):
        return ()
    labels = as_mapping(facts.get("id2label")).values()
    matches = [re.fullmatch("[BIES]-(.+)", str(label), re.DOTALL) for label in labels]
    return tuple(dict.fromkeys(match[1] for match in matches if match))


def list_trained_names(where: str, model: Any, train: str, top: int) -> set[str]:
    """Return the names of the parameters that are trained.

    Args:
        where: The name of the model in messages.
        model: The library's model.
        train: The part to train; see `TokenClassifierConfig`.
        top: The number of layers that train = "top" trains.

    Raises:
        ConfigError: The model has no such layers.
    """
    parameters = dict(model.named_parameters())
    if train == "all":
        return set(parameters)
    if train == "encoder":
        words = model.get_input_embeddings().weight
        return {name for name, value in parameters.items() if value is not words}
    of_encoder: set[str] = set()  # LoRA adapters are not parts of the encoder
    if train == "top":
        of_encoder = list_upper_layers(where, model, top)
    elif train == "biases":
        of_encoder = list_biases(model)
    encoder = f"{model.base_model_prefix}."
    return {
        name
        for name in parameters
        if name in of_encoder or not name.startswith(encoder)
    }


def require_same_reading(
    directory: Path, tokenizer: Any, facts: Mapping[str, Any]
) -> None:
    """Raise ModelError if a model was trained with another reading of text.

    Earlier versions passed words to the tokenizer one by one. With a byte-level or
    SentencePiece tokenizer the sub-words then differ from those of the text, and such a
    model would silently find fewer mentions. With WordPiece the two readings agree
    except for words next to symbols ("37°C"), so these models are accepted.

    Args:
        directory: The model's folder, for the message.
        tokenizer: Its tokenizer.
        facts: The table "fednotes" in `config.json`; empty for models of other
            programs, which read plain text.
    """
    if not facts or facts.get("reading") == READING or reads_words_alike(tokenizer):
        return
    version = facts.get("version", "?")
    if "reading" in facts:
        raise ModelError(
            f"{directory}: was trained by a version of fednotes that reads text "
            f"differently ({facts['reading']!r}, here {READING!r}): install the "
            f"version that wrote it ({version})"
        )
    raise ModelError(
        f"{directory}: was trained by fednotes {version}, which passed "
        "words to the tokenizer one by one, without the spaces between "
        "them; this version reads the text itself: train the model "
        "again, or install the version that wrote it"
    )


def require_classifier(where: str | Path, model: Any) -> None:
    """Raise ModelError if a model is not an encoder with a linear classifier on top."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{where}: is an encoder-decoder: give an encoder")
    if not isinstance(getattr(model, "classifier", None), nn.Linear):
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ModelError(
            f"{where}: models of kind {kind!r} have no linear token classifier"
        )


def derive_tagset(
    directory: Path, labels: Mapping[int, str], size: int
) -> tuple[TagSet, tuple[int, ...]]:
    """Return the tag set that a model's labels encode.

    Args:
        directory: The model's folder, for messages.
        labels: Each row's label: "O", "B-x", "I-x", "E-x" or "S-x".
        size: The number of rows of the classifier.

    Returns:
        The tag set, with types in the order of their first row and the smallest scheme
        that has all prefixes; and the classifier's row of each of its tags, or -1.

    Raises:
        ModelError: The labels are not tags, or do not name every row.
    """
    row_of: dict[str, int] = {}
    types: dict[str, None] = {}
    prefixes: set[str] = set()
    for row, label in sorted(labels.items()):
        # A label may be unhashable, such as a list.
        row_of[str(label)] = row
        if label == "O":
            continue
        prefix, dash, name = str(label).partition("-")
        is_prefix = prefix in ("B", "I", "E", "S") and bool(dash)
        if not is_prefix or not is_type_name(name):
            raise ModelError(
                f"{directory}: its label {label!r} is not a tag; O, B-…, I-… (E-…, "
                "S-…) are needed: correct id2label in config.json, if the model was "
                "trained on such tags"
            )
        types.setdefault(name)
        prefixes.add(prefix)

    names_every_row = len(row_of) == size and max(labels, default=0) < size
    if not types or "O" not in row_of or not names_every_row:
        raise ModelError(
            f"{directory}: {len(row_of)} distinct labels, {len(types)} of them entity "
            f"types, for a classifier of {size} rows: config.json (id2label) must name "
            "each row, one of them O"
        )
    tagset = TagSet(tuple(types), _find_smallest_scheme(prefixes))
    return tagset, tuple(row_of.get(tag, -1) for tag in tagset.tags)


def _find_smallest_scheme(prefixes: set[str]) -> Scheme:
    """Return the smallest scheme that has all these prefixes."""
    if prefixes & {"E", "S"}:
        return "BIOES"
    return "BIO" if "B" in prefixes else "IO"


@torch.no_grad()
def _reorder_classifier(model: Any, tagset: TagSet, rows: tuple[int, ...]) -> None:
    """Put a classifier's rows and the labels into the order of a tag set.

    Args:
        model: The library's model.
        tagset: The tag set.
        rows: The current row of each tag; -1 for a tag that the model lacks.
    """
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


def _read_configuration(directory: Path) -> dict[str, Any]:
    """Return the content of a directory's config.json."""
    file = directory / "config.json"
    try:
        with raising_if_unreadable(file, ModelError):
            facts = read_json(file, strict=False)
    except ValueError as error:
        raise ModelError(
            f"{file}: damaged (not JSON: {error}): copy the folder again"
        ) from error
    if not isinstance(facts, dict):
        raise ModelError(f"{file}: not a model's configuration")
    return facts


KIND = Kind(TokenClassifierConfig, build_token_classifier)
