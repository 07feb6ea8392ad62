"""A phenotyping model: notes as concepts → features → one classifier per disease.

    representation   a deep averaging network (stage 1), or TF-IDF, or the vectors themselves
    classifiers      linear machines of all diseases (stage 2); none after stage 1 alone

As a folder it is `phenotyper.json` and `phenotyper.safetensors`. The dictionary or
encoder that notes are read with is not copied: the folder names its place and
fingerprint. Both files are under a checksum, so that a name or number that was lost is
not taken for what was learnt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fednotes import __version__
from fednotes.apps.phenotyping.classifiers import Features, LinearSVMs, SvmConfig, tfidf
from fednotes.apps.phenotyping.cohort import Bags, FeatureSpace, Vectors
from fednotes.apps.phenotyping.dan import KNOWN, Dan, DanConfig
from fednotes.core.allocation import bounded_allocation
from fednotes.core.errors import ConfigError, DataError, ModelError, TrainingError
from fednotes.core.parsing import read_json
from fednotes.core.settings import build, checked
from fednotes.core.store import write_folder
from fednotes.core.tensors import below, device_of, load_into, prefixed

PHENOTYPER = "phenotyper"  # the stem of a phenotyping model's files
FORMAT = 2  # 1 had no checksum of the facts
Inputs = Bags | Vectors
Scale = Literal["none", "l2"]


@checked(frozen=True)
class PhenotypeConfig:
    """The model of a phenotyping job.

    Attributes:
        representation: "learn" represents patients by stage 1; "none" by TF-IDF of
            their concepts (or by the vectors of a text encoder as they are); anything
            else is the folder of a model whose trained network is used.
        scale: Scale of a learnt representation for the classifiers: "l2" gives each
            patient length 1, as TF-IDF has it; "none" takes the dense layer's values,
            as the paper does.
        network: The network of stage 1.
        classifier: The classifiers of stage 2.
    """

    representation: str = "learn"
    scale: Scale = "l2"
    network: DanConfig = field(default_factory=DanConfig)
    classifier: SvmConfig = field(default_factory=SvmConfig)

    def __post_init__(self) -> None:
        """Raises ConfigError without a representation."""
        if not self.representation:
            raise ConfigError(
                'representation = "": "learn", "none" or the folder of a model'
            )


@dataclass(eq=False)
class Phenotyper:
    """What phenotyping ends with, and what a site uses afterwards.

    space: what inputs mean. Patients' representation is that of network, stage 1's; or
    of idf, (vocabulary,) float64; or neither, for vectors as they are. code_names: the
    outputs of stage 1; empty where it was left out. phenotypes: the diseases; empty
    after stage 1 alone. platt: (machines, 2) calibration.
    """

    space: FeatureSpace
    network: Dan | None = None
    idf: np.ndarray | None = None
    scale: Scale = "none"
    code_names: tuple[str, ...] = ()
    phenotypes: tuple[str, ...] = ()
    machines: LinearSVMs | None = None
    platt: np.ndarray | None = None

    @property
    def width(self) -> int:
        """The number of features that the classifiers read."""
        return self.space.width if self.network is None else self.network.config.hidden

    def features(self, inputs: Inputs) -> Features:
        """(patients, width).

        Raises DataError for inputs of another kind or vocabulary.
        """
        if self.network is not None:
            dense = self.network.representation(inputs)
            if self.scale == "l2":
                length = np.linalg.norm(dense, axis=1, keepdims=True)
                dense = dense / np.where(length > 0, length, 1)
            return Features.of(dense)
        if isinstance(inputs, Bags) and self.idf is not None:
            return tfidf(inputs, self.idf)
        if isinstance(inputs, Vectors) and self.idf is None:
            return Features.of(inputs.values)
        raise DataError(
            "bags of concepts and vectors of text cannot take each other's place"
        )

    def classes(self, inputs: Inputs) -> np.ndarray:
        """(patients, diseases) int8: 1 present, 0 absent, 2 questionable, -1 nothing
        learnt."""
        return self._machines().predict(self.features(inputs))

    def probabilities(self, inputs: Inputs) -> np.ndarray:
        """(patients, diseases, 3) of absent, present, questionable.

        Uncalibrated ones of the hinge loss give an order, not chances.
        """
        return self._machines().probabilities(self.features(inputs), self.platt)

    def rank(self, inputs: Inputs) -> np.ndarray:
        """(patients, diseases) scores of "present", see `LinearSVMs.ranking`."""
        return self._machines().ranking(self.features(inputs))

    def code_probabilities(self, inputs: Inputs) -> np.ndarray:
        """(patients, codes) of stage 1's outputs; no column where there are none."""
        if self.network is None or not self.code_names:
            return np.zeros((len(inputs), 0), np.float32)
        return self.network.probabilities(inputs)

    def _machines(self) -> LinearSVMs:
        if self.machines is None:
            raise ModelError(
                "this model has a representation of patients and no classifiers: train them "
                'with [model] representation = "its folder" and [phenotypes]'
            )
        return self.machines

    def save(self, directory: Path) -> None:
        """Write the model; an earlier one in this folder stays whole until the new one
        is.

        Raises ModelError if a number is not finite or the folder holds something else.
        """
        if (
            directory.exists()
            and not is_phenotyper(directory)
            and any(directory.iterdir())
        ):
            raise ModelError(
                f"{directory}: exists and is not a model's folder; name another one"
            )
        network = self.network
        given: dict[str, Tensor] = (
            {} if self.machines is None else self.machines.trainable()
        )
        given |= {} if network is None else prefixed("network.", network.state())
        arrays = {"idf": self.idf, "platt": self.platt}
        given |= {n: torch.from_numpy(of) for n, of in arrays.items() if of is not None}
        tensors = {n: v.detach().cpu().contiguous() for n, v in given.items()}
        for name, value in tensors.items():
            if not bool(torch.isfinite(value).all()):
                raise ModelError(
                    f"{directory}: {name!r} is not finite, nothing was written"
                )
        data = tensor_bytes(tensors)
        facts: dict[str, Any] = {
            "kind": PHENOTYPER,
            "format": FORMAT,
            "fednotes": __version__,
            "space": asdict(self.space),
            "network": None if network is None else asdict(network.config),
            "scale": self.scale,
            "code_names": self.code_names,
            "phenotypes": self.phenotypes,
            "classes": None if self.machines is None else self.machines.classes,
            "classifier": None
            if self.machines is None
            else asdict(self.machines.config),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        facts["checksum"] = _checksum(facts)

        def fill(folder: Path) -> None:
            (folder / f"{PHENOTYPER}.safetensors").write_bytes(data)
            text = json.dumps(facts, indent=2, ensure_ascii=False)
            (folder / f"{PHENOTYPER}.json").write_text(text + "\n", encoding="utf-8")

        write_folder(directory, fill)


def load_phenotyper(path: Path, device: str = "cpu") -> Phenotyper:
    """Read a saved model. Raises ModelError for one that is missing, damaged or of
    another format.

    The message names the folder.
    """
    device_of(device)
    if not is_phenotyper(path):
        raise ModelError(
            f"{path}: no phenotyping model here (there is no {PHENOTYPER}.json)"
        )
    try:
        given = read_json(path / f"{PHENOTYPER}.json")
        if given["format"] != FORMAT:
            raise ModelError(
                f"format {given['format']}, this version reads {FORMAT}: use the version of "
                "fednotes that wrote it, or train it again"
            )
        if given.get("checksum") != _checksum(given):
            raise ModelError(
                f"damaged (the checksum of {PHENOTYPER}.json does not match)"
            )
        facts = build(_Facts, given, f"{PHENOTYPER}.json")
        data = (path / f"{PHENOTYPER}.safetensors").read_bytes()
        if hashlib.sha256(data).hexdigest() != facts.sha256:
            raise ModelError("damaged (the checksum of its tensors does not match)")
        tensors = parse_tensors(data)
        with bounded_allocation(sum(tensor.numel() for tensor in tensors.values())):
            return _parsed(facts, tensors, device)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except _UNREADABLE as error:
        raise ModelError(
            f"{path}: not a readable phenotyping model ({error})"
        ) from error


_UNREADABLE = (
    *(OSError, KeyError, TypeError, ValueError),
    *(SafetensorError, ConfigError, TrainingError),
)


@checked(frozen=True)
class _Facts:
    """phenotyper.json. sha256: of the tensors' file. checksum: of all the other facts."""

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


def _checksum(facts: Mapping[str, Any]) -> str:
    """SHA-256 of the facts but for itself, however the file is laid out."""
    rest = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _parsed(facts: _Facts, tensors: Mapping[str, Tensor], device: str) -> Phenotyper:
    space, network = facts.space, None
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ModelError(
                f"not a whole model: {name!r} has a number that is not finite"
            )
    if facts.network is not None:
        given = below(tensors, "network.")
        settings, outputs, known = network_settings(given, facts.network, space)
        if facts.code_names:
            _same("codes", len(facts.code_names), "the network has outputs", outputs)
        network = Dan(
            settings, space.width, outputs, known=known, features=space.dense
        ).to(device)
        load_into(network.state(), given)
        network.train(False)
    for name in {"idf", "platt"} & tensors.keys():
        if not tensors[name].is_floating_point():
            raise ModelError(
                f"not a whole model: {name!r} has type {tensors[name].dtype}"
            )
    idf, platt = (
        tensors[n].numpy() if n in tensors else None for n in ("idf", "platt")
    )
    if idf is not None:
        if idf.ndim != 1:
            raise ModelError(f"not a whole model: 'idf' of shape {idf.shape}")
        _same(
            "document frequencies", len(idf), "the dictionary has concepts", space.width
        )
    _same(
        "phenotypes", len(facts.phenotypes), "classes are of", len(facts.classes or ())
    )
    names = facts.code_names, facts.phenotypes
    model = Phenotyper(space, network, idf, facts.scale, *names, platt=platt)
    if facts.classes is not None:
        width = len(tensors["svm.weight"])
        _same("features", model.width, "the classifiers read", width)
        model.machines = machines = LinearSVMs(facts.classes, width, facts.classifier)
        load_into(machines.trainable(), {n: tensors[n] for n in machines.trainable()})
        if platt is not None and platt.shape != (len(machines.machines), 2):
            raise ModelError(f"not a whole model: calibration of shape {platt.shape}")
    return model


def _same(what: str, number: int, of: str, other: int) -> None:
    if number != other:
        raise ModelError(f"not a whole model: {number:,} {what}, {of} {other:,}")


def network_settings(
    parameters: Mapping[str, Tensor], config: DanConfig, space: FeatureSpace
) -> tuple[DanConfig, int, np.ndarray | None]:
    """The settings of a network of which `Dan.state` gave these tensors, whose widths
    are theirs; its outputs; and its known concepts.

    Raises ModelError where it reads another number of inputs than `space` has. Where
    the model comes from is the caller's to say: `load_phenotyper` names the folder.
    """
    hidden, reads = parameters["hidden_weight"].shape
    width = reads if space.dense else len(parameters.get("embedding", ()))
    odd = ("embedding" in parameters) == space.dense
    known = parameters[KNOWN].numpy() if KNOWN in parameters else None
    if known is not None:
        rising = (
            known.dtype == np.int64
            and known.ndim == 1
            and bool((np.diff(known) > 0).all())
        )
        if not rising or not len(known) or known[0] < 0 or width != len(known) + 1:
            raise ModelError(
                "not a whole model: its table and its known concepts do not agree"
            )
        odd, width = odd or bool(known[-1] >= space.width), space.width
    if odd or width != space.width:
        raise ModelError(
            f"the network reads {width:,} {'numbers' if space.dense else 'concepts'} and there "
            f"are {space.width:,}: use the dictionary or encoder that it was trained with"
        )
    found = replace(
        config, hidden=hidden, embedding=config.embedding if space.dense else reads
    )
    return found, len(parameters["output_bias"]), known


def is_phenotyper(path: Path) -> bool:
    """Return whether a folder holds a phenotyping model."""
    return (path / f"{PHENOTYPER}.json").is_file()
