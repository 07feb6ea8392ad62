"""Notes → what a patient is to the models: a bag of concepts, or a vector of an encoder.

    features_for   by a job's tables
    features_of    by a recipe, which a saved model has: the same numbers of new notes

A recipe is JSON: it says which dictionary, or encoder, with which options, and its fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np

from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.core.settings import build
from fednotes.core.store import write_folder
from fednotes.core.types import Document
from fednotes.data.text import split_sentences, tokenize
from fednotes.encoders.features import FrozenEncoder, load_encoder
from fednotes.jobs.job import expand
from fednotes.jobs.patient_tables import SYNTHETIC, ConceptsConfig, TextConfig
from fednotes.patients import synthetic
from fednotes.patients.cohort import Bags, FeatureSpace, Vectors
from fednotes.patients.concepts import Matcher, bags, key_of
from fednotes.patients.context import Option
from fednotes.patients.dictionary import Dictionary, read_dictionary

Notes = Mapping[str, Sequence[str]]  # patient → texts
Progress = Callable[[int, int], None]
TEXT_RECIPE: Final = "mean-of-notes-1"  # raise it when the same text gives another vector
_OPTIONS: Final = ("language", "sources", "types", "left_out_kinds", "scopes", "ids")


class Made(NamedTuple):
    """The patients that stay, what they are, and counts.

    counts: notes, left_out (patients with too many concepts), without (patients in whose notes
    nothing was found).
    """

    patients: tuple[str, ...]
    values: Bags | Vectors
    counts: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class ConceptFeatures:
    """Bags of concepts by one matcher, which all sites share."""

    matcher: Matcher
    space: FeatureSpace
    most: int
    processes: int = 1

    def make(self, notes: Notes, progress: Progress | None, cache: Path | None) -> Made:
        """One bag a patient."""
        made = bags(notes, self.matcher, self.processes, progress, cache, self.most)
        return Made(made.patients, made.bags, vars(made.counts))


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """Mean vectors of a frozen encoder."""

    encoder: FrozenEncoder
    space: FeatureSpace

    def make(self, notes: Notes, progress: Progress | None, cache: Path | None) -> Made:
        """One vector a patient; zeros for a patient whose notes have no word."""
        key = None if cache is None else cache / key_of(notes, self.space.fingerprint, 0)
        values = None if key is None else _load(key, (len(notes), self.space.width))
        if values is None:
            values = np.zeros((len(notes), self.space.width), np.float32)
            for row, texts in enumerate(notes.values()):
                values[row] = _mean_of_notes(self.encoder, texts)
                if progress is not None and row + 1 < len(notes):
                    progress(row + 1, len(notes))
            if key is not None:
                _save(key, values)
        if progress is not None:
            progress(len(notes), len(notes))
        counts = {
            "notes": sum(map(len, notes.values())),
            "left_out": 0,
            "without": int((~values.any(1)).sum()),
        }
        return Made(tuple(notes), Vectors(values), counts)


Features = ConceptFeatures | TextFeatures


def features_for(config: ConceptsConfig | TextConfig, folder: Path) -> Features:
    """What a job's [concepts] or [text] says; relative paths are beside the job file.

    Raises ConfigError, DataError, ModelError, each with the table.
    """
    if isinstance(config, TextConfig):
        beside = folder / config.encoder
        named = str(beside.resolve()) if beside.exists() else config.encoder
        return _text_features(load_encoder(expand(named, "[text] encoder")), named)
    given = config.dictionary
    # A variable stays one in the recipe: it may stand for another folder where the model goes.
    fixed = given == SYNTHETIC or "$" in given or given.startswith("~") or Path(given).is_absolute()
    recipe = {
        "kind": "concepts",
        "dictionary": given if fixed else str((folder / given).resolve()),
        "format": config.format,
        **{k: list(v) if isinstance(v, tuple) else v for k, v in config.options.items()},
        "context": config.context,
        "most": config.most,
    }
    try:
        matcher = _matcher(recipe)
    except (DataError, ConfigError) as error:
        raise type(error)(f"[concepts] dictionary: {error}") from error
    recipe |= {"names": len(matcher.dictionary), "fingerprint": matcher.fingerprint}
    space = FeatureSpace(matcher.vocabulary, False, recipe)
    return ConceptFeatures(matcher, space, config.most, config.processes)


def features_of(
    recipe: Mapping[str, Any],
    notes_by_patient: Notes,
    *,
    dictionary: str | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> tuple[tuple[str, ...], Bags | Vectors]:
    """New notes as the numbers that a model was trained on: patients that stay, and these.

    recipe: `FeatureSpace.recipe`. dictionary: where the dictionary (or the encoder) is now, if
    it has moved. Patients with more concepts than the recipe allows are left out.

    Raises ModelError where the dictionary or encoder is missing or another one.
    """
    made = opened(recipe, dictionary).make(notes_by_patient, progress, cache)
    return made.patients, made.values


def opened(recipe: Mapping[str, Any], dictionary: str | None = None) -> Features:
    """What a recipe stands for, checked by its fingerprint.

    Raises ModelError as `features_of`, and for a value that no recipe can have.
    """
    kind = recipe.get("kind")
    if kind not in ("concepts", "text"):
        raise ModelError(f"the model's features are of the unknown kind {kind!r}")
    try:
        config = _config_of(recipe)
    except ConfigError as error:
        raise ModelError(f"the model's features cannot be made: {error}") from error
    what, option = ("dictionary", "--dictionary")
    if isinstance(config, TextConfig):
        what, option = ("encoder", "--backbone")
    named = config.encoder if isinstance(config, TextConfig) else config.dictionary
    place = dictionary or named
    try:
        if isinstance(config, TextConfig):
            made: Features = _text_features(load_encoder(expand(place, what)), named)
        else:
            matcher = _matcher({**recipe, "dictionary": place})
            space = FeatureSpace(
                matcher.vocabulary, False, {**recipe, "fingerprint": matcher.fingerprint}
            )
            made = ConceptFeatures(matcher, space, config.most)
    except (DataError, ConfigError, ModelError) as error:
        raise ModelError(
            f"the model's {what} {named} cannot be read ({error}): give its place with {option}"
        ) from error
    if made.space.fingerprint != recipe.get("fingerprint"):
        raise ModelError(
            f"the {what} {place} is not the one that the model was trained with ({named}): its "
            f"content or fednotes' rules differ; give the same file with {option}"
        )
    return made


def _config_of(recipe: Mapping[str, Any]) -> ConceptsConfig | TextConfig:
    """A recipe's settings, as a job's table has them. Raises ConfigError naming key and value."""
    facts = ("kind", "fingerprint", "names")
    settings = {key: value for key, value in recipe.items() if key not in facts}
    if not isinstance(recipe.get("fingerprint", ""), str):
        raise ConfigError(f"recipe fingerprint = {recipe['fingerprint']!r}: expected text")
    if recipe["kind"] == "text" and "encoder" not in recipe:
        raise ConfigError("recipe: the key 'encoder' is missing")
    config: type[ConceptsConfig | TextConfig]
    config = TextConfig if recipe["kind"] == "text" else ConceptsConfig
    return build(config, settings, "recipe")


def _matcher(recipe: Mapping[str, Any]) -> Matcher:
    named, context = str(recipe["dictionary"]), cast(Option, recipe.get("context", "drop"))
    options = tuple(
        (k, tuple(recipe[k]) if isinstance(recipe[k], list) else recipe[k])
        for k in _OPTIONS
        if recipe.get(k) is not None
    )
    format = str(recipe.get("format") or "")
    if named == SYNTHETIC:
        return _built(None, format, options, context, ())
    path = Path(expand(named, "dictionary"))
    return _built(path, format, options, context, _stamps(path))


def _stamps(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when the dictionary does, or its table of semantic types."""
    found = []
    for file in (path, *sorted(path.parent.glob("MRSTY.RRF*"))):
        with suppress(OSError):  # a missing file is its reader's to tell
            stat = file.stat()
            found.append((file.name, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


@lru_cache(maxsize=1)  # the UMLS takes a minute to build, a gigabyte to hold
def _built(
    path: Path | None,
    format: str,
    options: tuple[tuple[str, Any], ...],
    context: Option,
    stamps: tuple[Any, ...],
) -> Matcher:
    dictionary: Dictionary = (
        synthetic.dictionary()
        if path is None
        else read_dictionary(path, format or None, **dict(options))
    )
    return Matcher(dictionary, context=context)


def _text_features(encoder: FrozenEncoder, named: str) -> TextFeatures:
    width = encoder.layers * encoder.dim
    digest = hashlib.sha256(f"{TEXT_RECIPE}\0{encoder.fingerprint}".encode()).hexdigest()
    recipe = {"kind": "text", "encoder": named, "fingerprint": digest}
    return TextFeatures(encoder, FeatureSpace(width, True, recipe))


def _mean_of_notes(encoder: FrozenEncoder, texts: Sequence[str]) -> np.ndarray:
    """(layers × dim,) float64: the mean over notes of the mean over a note's words."""
    means = []
    for text in texts:
        words = []
        for start, end in split_sentences(Document("", text)):
            sentence = text[start:end]
            words.append([sentence[a:b] for a, b in tokenize(sentence).tolist()])
        if any(words):
            vectors = encoder.encode([s for s in words if s])  # (words, layers, dim) float16
            means.append(vectors.reshape(len(vectors), -1).mean(0, dtype=np.float64))
    mean: np.ndarray = np.mean(means, 0) if means else np.zeros(encoder.layers * encoder.dim)
    return mean


def _load(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    try:
        values: np.ndarray = np.load(path / "vectors.npy", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return values if values.shape == shape and values.dtype == np.float32 else None


def _save(path: Path, values: np.ndarray) -> None:
    """Vectors as a file that only its owner can read, whole or not at all."""

    def fill(folder: Path) -> None:
        np.save(folder / "vectors.npy", values, allow_pickle=False)

    write_folder(path, fill)
