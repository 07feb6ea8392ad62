"""The model of phenotyping: from a patient's concepts to one classifier per disease.

    representation  a deep averaging network (stage 1), TF-IDF, or unchanged vectors
    classifiers     linear classifiers of diseases (stage 2); none after stage 1 alone

    attention       instead of both: a tuned encoder with attention of each disease

A saved model is a folder with `phenotyper.json` and `phenotyper.safetensors`. The
dictionary or encoder that reads notes is not copied: the folder has its location and
its fingerprint. Checksums protect both files against undetected damage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fednotes import __version__
from fednotes.apps.phenotyping.classifiers import (
    Features,
    LinearSVMs,
    SvmConfig,
    compute_tfidf,
    list_classifiers,
)
from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    Bags,
    FeatureSpace,
    Inputs,
    Vectors,
)
from fednotes.apps.phenotyping.dan import KNOWN, Dan, DanConfig
from fednotes.apps.phenotyping.features import SubWordFeatures, load_features
from fednotes.apps.phenotyping.label_attention import AttentionConfig, LabelAttention
from fednotes.core.allocation import limiting_allocation
from fednotes.core.errors import ConfigError, DataError, ModelError, TrainingError
from fednotes.core.parsing import read_json, read_regular
from fednotes.core.settings import LocalFile, build, checked
from fednotes.core.store import write_folder
from fednotes.core.tensors import add_prefix, find_device, load_into, select_prefix
from fednotes.taggers.encoder_tagger import open_backbone

PHENOTYPER: Final = "phenotyper"  # the name of a model's files, without their endings
FORMAT: Final = 2  # format 1 had no checksum of the facts
ATTENTION: Final = "attention"  # a representation, and the prefix of its tensors
Scale = Literal["none", "l2"]


@checked(frozen=True)
class PhenotypeConfig:
    """The model of a phenotyping job.

    Attributes:
        representation: Representation of patients for the classifiers: "learn" trains
            stage 1; "none" uses TF-IDF of the concepts (or the vectors of a text
            encoder as they are); "attention" tunes the encoder of [text] instead of
            both stages; anything else is the folder of a model whose trained network is
            used.
        scale: Scaling of a learned representation for the classifiers: "l2" scales each
            patient's vector to length 1, as with TF-IDF; "none" uses the values of the
            dense layer, as the paper does.
        network: The network of stage 1.
        attention: The network of representation = "attention".
        classifier: The classifiers of stage 2.
    """

    representation: LocalFile = "learn"
    scale: Scale = "l2"
    network: DanConfig = field(default_factory=DanConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    classifier: SvmConfig = field(default_factory=SvmConfig)

    def __post_init__(self) -> None:
        if not self.representation:
            raise ConfigError(
                'representation = "": expected "learn", "none", "attention" or the '
                "folder of a model"
            )


class Prediction(NamedTuple):
    """The predictions of patients.

    Attributes:
        classes: (patients, diseases) int8 labels: 1 present, 0 absent, 2 questionable,
            -1 if nothing was learned.
        probabilities: (patients, diseases, 3) of absent, present and questionable.
            Without calibration, the values for the hinge loss only rank patients and
            are not probabilities.
    """

    classes: np.ndarray
    probabilities: np.ndarray


@dataclass(eq=False)
class Phenotyper:
    """A trained phenotyping model.

    A patient is represented by the network; without a network, by TF-IDF with `idf`;
    with neither, by the input vector. A model with attention has neither representation
    nor classifiers.

    Attributes:
        space: The meaning of the inputs.
        network: The network of stage 1.
        idf: (vocabulary,) float64 inverse document frequencies.
        scale: Scale of the network's representation, as in `PhenotypeConfig`.
        code_names: The outputs of stage 1; empty if it was left out.
        phenotypes: The diseases; empty after stage 1 alone.
        svms: The classifiers of stage 2; None after stage 1 alone.
        platt: (classifiers, 2) calibration; None if the classifiers are not calibrated.
        attention: The tuned encoder, whose labels are the phenotypes, or else the
            codes.
    """

    space: FeatureSpace
    network: Dan | None = None
    idf: np.ndarray | None = None
    scale: Scale = "none"
    code_names: tuple[str, ...] = ()
    phenotypes: tuple[str, ...] = ()
    svms: LinearSVMs | None = None
    platt: np.ndarray | None = None
    attention: LabelAttention | None = None

    @property
    def classes(self) -> tuple[tuple[int, ...], ...] | None:
        """The classes of each disease; None if the model predicts no diseases."""
        if self.svms is not None:
            return self.svms.classes
        if self._phenotype_attention is not None:
            return ((ABSENT, PRESENT),) * len(self.phenotypes)
        return None

    @property
    def _phenotype_attention(self) -> LabelAttention | None:
        """The tuned encoder, if its labels are phenotypes."""
        return self.attention if self.phenotypes else None

    @property
    def width(self) -> int:
        """The number of features that the classifiers read."""
        return self.space.width if self.network is None else self.network.config.hidden

    def compute_features(self, inputs: Inputs) -> Features:
        """Return the (patients, width) features that the classifiers read.

        Raises:
            DataError: The inputs have another kind or vocabulary.
        """
        if self.network is not None:
            dense: np.ndarray = self.network.represent(inputs)
            if self.scale == "l2":
                lengths = np.linalg.norm(dense, axis=1, keepdims=True)
                dense = dense / np.where(lengths > 0, lengths, 1)
            return Features.from_dense(dense)
        if isinstance(inputs, Bags) and self.idf is not None:
            return compute_tfidf(inputs, self.idf)
        if isinstance(inputs, Vectors) and self.idf is None:
            return Features.from_dense(inputs.values)
        raise DataError(
            "the input does not match this model: a model of concepts reads bags, a "
            "model of text reads vectors, or sub-words if its encoder was tuned"
        )

    def predict(self, inputs: Inputs) -> Prediction:
        """Return the predicted labels of patients, and the probabilities of labels."""
        attention = self._phenotype_attention
        if attention is not None:
            present = attention.predict_probabilities(inputs).astype(np.float64)
            return Prediction(
                (present >= attention.config.threshold).astype(np.int8),
                np.stack([1 - present, present, np.zeros_like(present)], axis=2),
            )
        svms = self._require_classifiers()
        features = self.compute_features(inputs)
        return Prediction(
            svms.predict(features), svms.predict_probabilities(features, self.platt)
        )

    def predict_classes(self, inputs: Inputs) -> np.ndarray:
        """Return the (patients, diseases) predicted labels; see `Prediction`."""
        if self._phenotype_attention is not None:
            return self.predict(inputs).classes
        return self._require_classifiers().predict(self.compute_features(inputs))

    def predict_probabilities(self, inputs: Inputs) -> np.ndarray:
        """Return the (patients, diseases, 3) probabilities; see `Prediction`."""
        return self.predict(inputs).probabilities

    def rank(self, inputs: Inputs) -> np.ndarray:
        """Return (patients, diseases) scores of "present", only to rank them."""
        attention = self._phenotype_attention
        if attention is not None:
            return attention.compute_logits(inputs)
        return self._require_classifiers().score_for_ranking(
            self.compute_features(inputs)
        )

    def predict_code_probabilities(self, inputs: Inputs) -> np.ndarray:
        """Return the (patients, codes) probabilities of codes.

        The result has no columns if the model predicts no codes.
        """
        if self.attention is not None and self.code_names:
            return self.attention.predict_probabilities(inputs)
        if self.network is None or not self.code_names:
            return np.zeros((len(inputs), 0), np.float32)
        return self.network.predict_probabilities(inputs)

    def _require_classifiers(self) -> LinearSVMs:
        """Return the classifiers.

        Raises:
            ModelError: The model has no classifiers.
        """
        if self.svms is None:
            raise ModelError(
                "this model represents patients but has no classifiers: train "
                'classifiers with [model] representation = "its folder" and '
                "[phenotypes]"
            )
        return self.svms

    def save(self, directory: Path) -> None:
        """Write the model to a folder.

        An earlier model in the folder stays complete until the new one is complete.

        Raises:
            ModelError: A number is not finite, or the folder contains something else.
        """
        is_other = directory.exists() and not is_phenotyper(directory)
        if is_other and any(directory.iterdir()):
            raise ModelError(
                f"{directory} exists and is not a model's folder: choose another one"
            )
        tensors = self._collect_tensors()
        for name, value in tensors.items():
            if not bool(torch.isfinite(value).all()):
                raise ModelError(
                    f"{directory}: {name!r} is not finite, so nothing was written"
                )
        data = tensor_bytes(tensors)
        facts = self._collect_facts(data)

        def fill(folder: Path) -> None:
            (folder / f"{PHENOTYPER}.safetensors").write_bytes(data)
            text = json.dumps(facts, indent=2, ensure_ascii=False)
            (folder / f"{PHENOTYPER}.json").write_text(text + "\n", encoding="utf-8")

        write_folder(directory, fill)

    def _collect_tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the model, on the CPU."""
        tensors: dict[str, Tensor] = {}
        if self.svms is not None:
            tensors |= self.svms.trainable()
        if self.network is not None:
            tensors |= add_prefix("network.", self.network.state())
        if self.attention is not None:
            tensors |= add_prefix(f"{ATTENTION}.", self.attention.state())
        if self.idf is not None:
            tensors["idf"] = torch.from_numpy(self.idf)
        if self.platt is not None:
            tensors["platt"] = torch.from_numpy(self.platt)
        return {
            name: value.detach().cpu().contiguous() for name, value in tensors.items()
        }

    def _collect_facts(self, data: bytes) -> dict[str, Any]:
        """Return the facts that a saved model has besides its tensors.

        Args:
            data: The content of the tensor file, whose hash is one of the facts.
        """
        network = self.network
        svms = self.svms
        facts: dict[str, Any] = {
            "kind": PHENOTYPER,
            "format": FORMAT,
            "fednotes": __version__,
            "space": asdict(self.space),
            "network": None if network is None else asdict(network.config),
            "scale": self.scale,
            "code_names": self.code_names,
            "phenotypes": self.phenotypes,
            "classes": None if svms is None else svms.classes,
            "classifier": None if svms is None else asdict(svms.config),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        if self.attention is not None:
            facts[ATTENTION] = asdict(self.attention.config)
        return {**facts, "checksum": _compute_checksum(facts)}


def is_phenotyper(path: Path) -> bool:
    """Return whether a folder holds a phenotyping model."""
    return (path / f"{PHENOTYPER}.json").is_file()


# ---- loading -------------------------------------------------------------------------


@checked(frozen=True)
class _Facts:
    """The content of phenotyper.json.

    Attributes:
        sha256: Digest of the file of tensors.
        checksum: Digest of all other facts.
        attention: Settings of the tuned encoder; None in other models.
    """

    kind: Literal["phenotyper"]
    format: int
    fednotes: str
    space: FeatureSpace
    network: DanConfig | None
    scale: Scale
    code_names: tuple[str, ...]
    phenotypes: tuple[str, ...]
    classes: tuple[tuple[int, ...], ...] | None
    classifier: SvmConfig | None
    sha256: str
    checksum: str
    attention: AttentionConfig | None = None


# What reading a damaged model raises.
_READ_ERRORS = (
    OSError,
    KeyError,
    TypeError,
    ValueError,
    SafetensorError,
    ConfigError,
    TrainingError,
)


def load_phenotyper(
    path: Path, device: str = "cpu", place: str | None = None
) -> Phenotyper:
    """Read a saved model.

    Args:
        path: The model's folder.
        device: A torch device.
        place: New location of a tuned encoder, if it has moved.

    Raises:
        ModelError: The model is missing, damaged or of another format, or its tuned
            encoder is not found; the message names the folder.
    """
    find_device(device)
    if not is_phenotyper(path):
        raise ModelError(
            f"{path}: not the folder of a phenotyping model (there is no "
            f"{PHENOTYPER}.json)"
        )
    try:
        facts = _read_facts(path)
        data = read_regular(path / f"{PHENOTYPER}.safetensors")
        if hashlib.sha256(data).hexdigest() != facts.sha256:
            raise ModelError("damaged (the checksum of its tensors does not match)")
        tensors = parse_tensors(data)
        if facts.attention is not None:
            return _build_attention_model(facts, tensors, place, device=device)
        with limiting_allocation(sum(tensor.numel() for tensor in tensors.values())):
            return _build_model(facts, tensors, device)
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error
    except _READ_ERRORS as error:
        raise ModelError(
            f"{path}: not a readable phenotyping model ({error})"
        ) from error


def _read_facts(path: Path) -> _Facts:
    """Read and check phenotyper.json.

    Raises:
        ModelError: The file has another format, or its checksum does not match.
    """
    values = read_json(path / f"{PHENOTYPER}.json")
    if values["format"] != FORMAT:
        raise ModelError(
            f"has format {values['format']}, but this version reads {FORMAT}: use the "
            "version of fednotes that wrote it, or train it again"
        )
    if values.get("checksum") != _compute_checksum(values):
        raise ModelError(f"damaged (the checksum of {PHENOTYPER}.json does not match)")
    return build(_Facts, values, f"{PHENOTYPER}.json")


def _compute_checksum(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 digest of all other facts, however the file is laid out."""
    others = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _build_model(
    facts: _Facts, tensors: Mapping[str, Tensor], device: str
) -> Phenotyper:
    """Return the model that facts and tensors describe.

    Raises:
        ModelError: They contradict each other, or a number is not finite.
    """
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ModelError(f"damaged: {name!r} has a number that is not finite")
    network = None
    if facts.network is not None:
        network = _build_network(facts, facts.network, tensors, device=device)
    elif facts.code_names:
        raise ModelError("damaged: it names codes, but has no network to predict them")
    idf = _read_array(tensors, "idf")
    platt = _read_array(tensors, "platt")
    if idf is not None:
        if idf.ndim != 1:
            raise ModelError(f"damaged: 'idf' has shape {idf.shape}")
        _require_equal(
            "document frequencies",
            len(idf),
            "concepts in the dictionary",
            facts.space.width,
        )
    _require_equal(
        "phenotypes",
        len(facts.phenotypes),
        "lists of classes",
        len(facts.classes or ()),
    )
    model = Phenotyper(
        facts.space,
        network,
        idf=idf,
        scale=facts.scale,
        code_names=facts.code_names,
        phenotypes=facts.phenotypes,
        platt=platt,
    )
    if facts.classes is not None:
        # NumPy would allocate any shape, so it is checked before the classifiers exist.
        width, columns = tensors["svm.weight"].shape
        _require_equal(
            "features", model.width, "features that the classifiers read", width
        )
        _require_equal(
            "classifiers",
            len(list_classifiers(facts.classes)),
            "columns of 'svm.weight'",
            columns,
        )
        svms = LinearSVMs(facts.classes, width, facts.classifier)
        targets = svms.trainable()
        load_into(targets, {name: tensors[name] for name in targets})
        model.svms = svms
        if platt is not None and platt.shape != (len(svms.classifiers), 2):
            raise ModelError(f"damaged: the calibration has shape {platt.shape}")
    return model


def _build_attention_model(
    facts: _Facts, tensors: Mapping[str, Tensor], place: str | None, *, device: str
) -> Phenotyper:
    """Return the model that facts and tensors of a tuned encoder describe.

    Raises:
        ModelError: They contradict each other, or the encoder is not found.
    """
    assert facts.attention is not None
    features = load_features(facts.space.recipe, place)
    if not isinstance(features, SubWordFeatures):
        raise ModelError("damaged: it has attention, but reads no sub-words")
    labels = facts.phenotypes or facts.code_names
    bias = tensors[f"{ATTENTION}.attention.bias"]
    _require_equal("names of labels", len(labels), "labels", len(bias))
    backbone = open_backbone(str(features.backbone.directory), device=device)
    with limiting_allocation(sum(tensor.numel() for tensor in tensors.values())):
        attention = LabelAttention(facts.attention, backbone, len(labels)).to(device)
    state = select_prefix(f"{ATTENTION}.", tensors)
    for name, value in state.items():
        if not bool(torch.isfinite(value).all()):
            raise ModelError(f"damaged: {name!r} has a number that is not finite")
    load_into(attention.state(), state)
    attention.eval()
    return Phenotyper(
        facts.space,
        code_names=facts.code_names,
        phenotypes=facts.phenotypes,
        attention=attention,
    )


def _read_array(tensors: Mapping[str, Tensor], name: str) -> np.ndarray | None:
    """Return a tensor of floating-point numbers as an array; None if it is missing.

    Raises:
        ModelError: The tensor has another type.
    """
    if name not in tensors:
        return None
    tensor = tensors[name]
    if not tensor.is_floating_point():
        raise ModelError(f"damaged: {name!r} has type {tensor.dtype}")
    array: np.ndarray = tensor.numpy()
    return array


def _build_network(
    facts: _Facts, config: DanConfig, tensors: Mapping[str, Tensor], *, device: str
) -> Dan:
    """Return the network of a saved model.

    Raises:
        ModelError: The tensors contradict the facts.
    """
    parameters = select_prefix("network.", tensors)
    shape = derive_network_shape(parameters, config, facts.space)
    if facts.code_names:
        _require_equal(
            "codes", len(facts.code_names), "outputs of the network", shape.outputs
        )
    network = Dan(
        shape.config,
        facts.space.width,
        shape.outputs,
        known=shape.known,
        features=facts.space.dense,
    ).to(device)
    load_into(network.state(), parameters)
    network.eval()
    return network


def _require_equal(what: str, number: int, other_what: str, other: int) -> None:
    """Raise ModelError if two numbers in a saved model differ."""
    if number != other:
        raise ModelError(f"damaged: {number:,} {what}, but {other:,} {other_what}")


class NetworkShape(NamedTuple):
    """The shape of a network, derived from its tensors.

    Attributes:
        config: Its settings, with the widths of the tensors.
        outputs: The number of its outputs.
        known: (known concepts,) int64 indices into the vocabulary; None if the network
            knows all concepts, or reads vectors.
    """

    config: DanConfig
    outputs: int
    known: np.ndarray | None


def derive_network_shape(
    parameters: Mapping[str, Tensor], config: DanConfig, space: FeatureSpace
) -> NetworkShape:
    """Return the shape of a network, derived from the tensors of `Dan.state`.

    Args:
        parameters: The tensors.
        config: The settings of the network, whose widths may differ.
        space: The inputs that the network should read.

    Raises:
        ModelError: The network reads another number of inputs. The caller adds the
            origin of the model.
    """
    hidden, inputs = parameters["hidden_weight"].shape
    # A network either looks concepts up in its table, or reads vectors.
    has_table = "embedding" in parameters
    fits = has_table != space.dense
    width = inputs if space.dense else len(parameters.get("embedding", ()))

    known = _read_known_concepts(parameters)
    if known is not None:
        # The table has a row for each known concept, and one for all others. The
        # network reads the complete vocabulary.
        if width != len(known) + 1:
            raise _make_table_error()
        last_known = int(known[-1])
        fits = fits and last_known < space.width
        width = space.width

    if not fits or width != space.width:
        inputs_text = "numbers" if space.dense else "concepts"
        raise ModelError(
            f"the network reads {width:,} {inputs_text}, but the input has "
            f"{space.width:,}: use the dictionary or encoder that it was "
            "trained with"
        )
    embedding = config.embedding if space.dense else inputs
    return NetworkShape(
        replace(config, hidden=hidden, embedding=embedding),
        outputs=len(parameters["output_bias"]),
        known=known,
    )


def _read_known_concepts(parameters: Mapping[str, Tensor]) -> np.ndarray | None:
    """Return the known concepts of a network; None if it has no list of them.

    Raises:
        ModelError: The list does not contain ascending indices.
    """
    if KNOWN not in parameters:
        return None
    known: np.ndarray = parameters[KNOWN].numpy()
    is_list = known.dtype == np.int64 and known.ndim == 1 and len(known) > 0
    if not is_list or known[0] < 0 or not bool((np.diff(known) > 0).all()):
        raise _make_table_error()
    return known


def _make_table_error() -> ModelError:
    """Return the error for a table whose rows do not match the known concepts."""
    return ModelError("damaged: its table and its known concepts do not agree")
