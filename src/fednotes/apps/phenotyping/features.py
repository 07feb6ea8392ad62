"""Notes → what a patient is to the models: a bag of concepts, or a vector of an
encoder.

    features_for   by a job's tables
    load_features         by a recipe, which a saved model has: the same numbers of new notes

A recipe is JSON: it says which dictionary, or encoder, with which options, and its
fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from annotated_types import Ge

from fednotes.apps.phenotyping import synthetic
from fednotes.apps.phenotyping.cohort import FeatureSpace, Vectors
from fednotes.apps.phenotyping.concepts import (
    MOST,
    Made,
    Matcher,
    Notes,
    Option,
    Progress,
    bags,
    kept_arrays,
    told,
)
from fednotes.apps.phenotyping.dictionary import read_dictionary
from fednotes.core.errors import ConfigError, DataError, ModelError, within
from fednotes.core.settings import build, checked, expand
from fednotes.core.types import Document
from fednotes.data.text import Passage, split_sentences, tokenize
from fednotes.encoders.features import FrozenEncoder, load_encoder

SYNTHETIC: Final = "synthetic"  # the generated patients' dictionary
# raise it when the same text gives another vector
TEXT_RECIPE: Final = "mean-of-notes-1"


@checked(frozen=True)
class ConceptsConfig:
    """How notes become bags of concepts; the same at all sites.

    Attributes:
        dictionary: MRCONSO.RRF of the UMLS, an ontology (.obo), or a table of ids and
            terms. Relative paths are relative to the job file; `$NAME` stands for an
            environment variable. "synthetic" is the dictionary of the generated
            patients.
        format: Format of the dictionary; guessed from the name of the file if empty.
        context: What happens to negated, hypothetical and family mentions.
        most: Patients with more concepts are left out, and counted.
        processes: Number of processes that read notes.
        vectors: File of public word2vec vectors (text or .bin) whose words are the
            dictionary's ids; stage 1 starts from them. Every site reads the same file.
            If it is empty, stage 1 starts from random numbers.
        language: Language of the terms that are read from the UMLS; "ENG" if it is not
            given.
        sources: Source vocabularies (SAB) that are read from the UMLS; those of cTAKES'
            fast dictionary if they are not given.
        types: Semantic types (TUI) that are read from the UMLS. If they are not given:
            those of cTAKES where MRSTY.RRF lies beside MRCONSO.RRF, else all. `[]`
            reads all.
        left_out_kinds: Term types (TTY) that are not read from the UMLS; if they are
            not given, those that cTAKES leaves out.
        scopes: Scopes of the synonyms that are read from an ontology, of EXACT,
            RELATED, NARROW and BROAD; ["EXACT"] if they are not given.
        ids: How concepts of an ontology are named: by its "own" ids, which is the
            default, or by a kind of cross-reference such as "UMLS_CUI".
    """

    dictionary: str = ""
    format: Literal["", "umls", "obo", "table"] = ""
    context: Option = "drop"
    most: Annotated[int, Ge(1)] = MOST
    processes: Annotated[int, Ge(1)] = 1
    vectors: str = ""
    language: str | None = None
    sources: tuple[str, ...] | None = None
    types: tuple[str, ...] | None = None
    left_out_kinds: tuple[str, ...] | None = None
    scopes: tuple[str, ...] | None = None
    ids: str | None = None

    def __post_init__(self) -> None:
        if not self.dictionary:
            raise ConfigError(
                "dictionary: name the file of a dictionary (UMLS, .obo, table)"
            )

    @property
    def options(self) -> dict[str, Any]:
        """The options of the dictionary's reader that are given."""
        given = {f.name: getattr(self, f.name) for f in fields(self)[6:]}
        return {name: value for name, value in given.items() if value is not None}


@checked(frozen=True)
class TextConfig:
    """Patients as vectors: the mean over a patient's notes of each note's mean word
    vector.

    Attributes:
        encoder: A frozen encoder: "minilm" or a directory, as `encoders/features.py`
            names it.
    """

    encoder: str = "minilm"


@dataclass(frozen=True, eq=False)
class ConceptFeatures:
    """Bags of concepts by one matcher, which all sites share."""

    matcher: Matcher
    space: FeatureSpace
    most: int
    processes: int = 1

    def make(
        self, notes: Notes, progress: Progress | None = None, cache: Path | None = None
    ) -> Made:
        """One bag a patient."""
        return bags(notes, self.matcher, self.processes, progress, cache, self.most)


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """Mean vectors of a frozen encoder."""

    encoder: FrozenEncoder
    space: FeatureSpace

    def make(
        self, notes: Notes, progress: Progress | None = None, cache: Path | None = None
    ) -> Made:
        """One vector a patient; zeros for a patient whose notes have no word."""

        def vectors() -> dict[str, np.ndarray]:
            means = told(map(self._mean_of, notes.values()), len(notes), progress)
            return {
                "vectors": np.array([*means], np.float32).reshape(-1, self.space.width)
            }

        values = kept_arrays(cache, notes, f"{self.space.fingerprint} 1", vectors)[
            "vectors"
        ]
        if progress is not None:
            progress(len(notes), len(notes))
        counts = {"notes": sum(map(len, notes.values())), "left_out": 0}
        counts["without"] = int((~values.any(1)).sum())
        return Made(tuple(notes), Vectors(values), counts)

    def _mean_of(self, texts: Sequence[str]) -> np.ndarray:
        """(layers × dim,) float64: the mean over notes of the mean over a note's words."""
        means = []
        for text in texts:
            parts = [
                text[start:end] for start, end in split_sentences(Document("", text))
            ]
            passages = [Passage(part, tokenize(part)) for part in parts]
            sentences = [passage for passage in passages if len(passage.words)]
            if sentences:
                vectors = self.encoder.encode(sentences)  # (words, layers, dim)
                means.append(
                    vectors.reshape(len(vectors), -1).mean(0, dtype=np.float64)
                )
        mean: np.ndarray = np.mean(means, 0) if means else np.zeros(self.space.width)
        return mean


Features = ConceptFeatures | TextFeatures


def features_for(config: ConceptsConfig | TextConfig, folder: Path) -> Features:
    """What a job's [concepts] or [text] says; relative paths are beside the job file.

    Raises ConfigError, DataError, ModelError, each with the table.
    """
    if isinstance(config, TextConfig):
        beside = folder / config.encoder
        named = str(beside.resolve()) if beside.exists() else config.encoder
        return _features(config, {"encoder": named}, expand(named, "[text] encoder"))
    given = config.dictionary
    # A variable stays one in the recipe: it may stand for another folder where the
    # model goes.
    fixed = (
        given == SYNTHETIC
        or "$" in given
        or given.startswith("~")
        or Path(given).is_absolute()
    )
    recipe = {
        "kind": "concepts",
        "dictionary": given if fixed else str((folder / given).resolve()),
        "format": config.format,
        **{
            k: list(v) if isinstance(v, tuple) else v for k, v in config.options.items()
        },
        "context": config.context,
        "most": config.most,
    }
    with within("[concepts] dictionary", DataError, ConfigError):
        return _features(
            config, recipe, expand(str(recipe["dictionary"]), "dictionary")
        )


def load_features(recipe: Mapping[str, Any], dictionary: str | None = None) -> Features:
    """What a recipe stands for, checked by its fingerprint.

    dictionary: where the dictionary (or the encoder) is now, if it has moved. Raises
    ModelError where it is missing or another one, and for a value that no recipe can
    have.
    """
    kinds: dict[Any, tuple[type[ConceptsConfig | TextConfig], str, str]] = {
        "concepts": (ConceptsConfig, "dictionary", "--dictionary"),
        "text": (TextConfig, "encoder", "--backbone"),
    }
    kind = recipe.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ModelError(f"the model's features are of the unknown kind {kind!r}")
    settings, what, option = kinds[kind]
    facts = ("kind", "fingerprint", "names")
    with within("the model's features cannot be made", ConfigError, become=ModelError):
        if not isinstance(recipe.get("fingerprint", ""), str):
            raise ConfigError(
                f"recipe fingerprint = {recipe['fingerprint']!r}: expected text"
            )
        if what not in recipe:
            raise ConfigError(f"recipe: the key {what!r} is missing")
        config = build(
            settings, {n: v for n, v in recipe.items() if n not in facts}, "recipe"
        )
    named = recipe[what]
    place = dictionary or named
    try:
        made = _features(config, recipe, expand(place, what))
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


def _features(
    config: ConceptsConfig | TextConfig, recipe: Mapping[str, Any], place: str
) -> Features:
    """What reads notes. place: of the dictionary or encoder."""
    if isinstance(config, TextConfig):
        encoder = load_encoder(place)
        digest = hashlib.sha256(
            f"{TEXT_RECIPE}\0{encoder.fingerprint}".encode()
        ).hexdigest()
        text = {"kind": "text", "encoder": recipe["encoder"], "fingerprint": digest}
        return TextFeatures(
            encoder, FeatureSpace(encoder.layers * encoder.dim, True, text)
        )
    path = None if place == SYNTHETIC else Path(place)
    stamps = () if path is None else _stamps(path)
    options = tuple(config.options.items())
    matcher = _matcher(path, config.format, options, config.context, stamps)
    recipe = {
        **recipe,
        "names": len(matcher.dictionary),
        "fingerprint": matcher.fingerprint,
    }
    space = FeatureSpace(matcher.vocabulary, False, recipe)
    return ConceptFeatures(matcher, space, config.most, config.processes)


def _stamps(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when the dictionary does, or its table of semantic types."""
    found = []
    for file in (path, *sorted(path.parent.glob("MRSTY.RRF*"))):
        with suppress(OSError):  # a missing file is its reader's to tell
            stat = file.stat()
            found.append((file.name, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


@lru_cache(maxsize=1)  # the UMLS takes a minute to build, a gigabyte to hold
def _matcher(
    path: Path | None,
    format: str,
    options: tuple[tuple[str, Any], ...],
    context: Option,
    stamps: tuple[Any, ...],
) -> Matcher:
    if path is None:
        return Matcher(synthetic.dictionary(), context)
    return Matcher(read_dictionary(path, format, **dict(options)), context)
