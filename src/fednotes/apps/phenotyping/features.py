"""Turn the notes of a patient into what a model reads.

This is a bag of concepts, an encoder's mean vector, or the sub-words of the notes.

    build_features  from the tables of a job
    load_features   from the recipe of a saved model: the same features for new notes

A recipe is JSON. It has the location of the dictionary or encoder, options and a
fingerprint.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from fednotes.apps.phenotyping import synthetic
from fednotes.apps.phenotyping.cohort import (
    FeatureSpace,
    SubWords,
    Vectors,
    compute_offsets,
)
from fednotes.apps.phenotyping.concepts import (
    MAX_CONCEPTS,
    Matcher,
    Notes,
    PatientInputs,
    Progress,
    collect_bags,
    compute_with_cache,
    iterate_with_progress,
    make_bags,
)
from fednotes.apps.phenotyping.context import Option
from fednotes.apps.phenotyping.dictionary import read_dictionary
from fednotes.apps.phenotyping.note_sets import NoteSet
from fednotes.core.errors import (
    ConfigError,
    DataError,
    ModelError,
    MovedError,
    naming_place,
)
from fednotes.core.numbers import PositiveInt
from fednotes.core.settings import LocalFile, build, checked, expand_path
from fednotes.core.types import Document
from fednotes.data.text import Passage, split_sentences, tokenize
from fednotes.encoders.features import FrozenEncoder, load_encoder
from fednotes.encoders.reading import split_passages
from fednotes.jobs.patient_models import (
    ComputeFeatures,
    PatientNote,
    compute_features_here,
)
from fednotes.jobs.saved_models import NoteFeatures
from fednotes.taggers.encoder_tagger import Backbone, open_backbone

SYNTHETIC: Final = "synthetic"  # the generated patients' dictionary
# Change this when the same text gives a different vector.
TEXT_RECIPE: Final = "mean-of-notes-1"


@checked(frozen=True)
class ConceptsConfig:
    """How notes become bags of concepts; the same at all sites.

    Attributes:
        dictionary: MRCONSO.RRF of the UMLS, an ontology (.obo), or a table of ids and
            terms. "synthetic" is the dictionary of the generated patients.
        format: Format of the dictionary; guessed from the name of the file if empty.
        context: What happens to mentions that are negated, hypothetical or about the
            family: "drop" leaves them out, "mark" counts them as concepts of their own,
            "off" treats them like all others.
        most: Maximum number of concepts of a patient; patients with more are left out
            and counted. Lower it if memory is short.
        processes: Number of processes that extract concepts from notes at the same
            time.
        vectors: File of public word2vec vectors (text or .bin) whose words are the
            dictionary's ids; stage 1 starts from them. Every site reads the same file.
            If it is empty, stage 1 starts from random numbers.
        language: Language of the UMLS terms to read; default "ENG".
        sources: Source vocabularies (SAB) of the UMLS to read; default: those of
            cTAKES' fast dictionary.
        types: Semantic types (TUI) of the UMLS to read. Default: those of cTAKES if
            MRSTY.RRF lies beside MRCONSO.RRF, otherwise all. `[]` reads all.
        left_out_kinds: Term types (TTY) of the UMLS to leave out; default: those that
            cTAKES leaves out.
        scopes: Scopes of an ontology's synonyms to read, from EXACT, RELATED, NARROW
            and BROAD; default ["EXACT"].
        ids: Ids of an ontology's concepts: the ontology's "own" (the default), or those
            of a kind of cross-reference such as "UMLS_CUI".
    """

    dictionary: LocalFile = ""
    format: Literal["", "umls", "obo", "table"] = ""
    context: Option = "drop"
    most: PositiveInt = MAX_CONCEPTS
    processes: PositiveInt = 1
    vectors: LocalFile = ""
    language: str | None = None
    sources: tuple[str, ...] | None = None
    types: tuple[str, ...] | None = None
    left_out_kinds: tuple[str, ...] | None = None
    scopes: tuple[str, ...] | None = None
    ids: str | None = None

    def __post_init__(self) -> None:
        if not self.dictionary:
            raise ConfigError(
                "dictionary is empty: set it to the path of a dictionary (UMLS, .obo "
                "or a table)"
            )

    @property
    def options(self) -> dict[str, Any]:
        """The options of the dictionary's format that are set."""
        options = {
            "language": self.language,
            "sources": self.sources,
            "types": self.types,
            "left_out_kinds": self.left_out_kinds,
            "scopes": self.scopes,
            "ids": self.ids,
        }
        return {name: value for name, value in options.items() if value is not None}


@checked(frozen=True)
class TextConfig:
    """The encoder that reads notes; the same at all sites.

    A patient is a vector: the mean over notes of each note's mean word vector. With
    [model] representation = "attention", the encoder is tuned, and reads all words.

    Attributes:
        encoder: "minilm" or a directory, as `encoders/features.py` names it. An encoder
            that is tuned must be a Hugging Face encoder.
    """

    encoder: LocalFile = "minilm"


@dataclass(frozen=True, eq=False)
class ConceptFeatures:
    """Makes bags of concepts with one matcher, which all sites share.

    Attributes:
        matcher: Finds the concepts.
        space: The meaning of the bags.
        max_concepts: Patients with more concepts are left out.
        processes: Number of processes that extract concepts from notes at the same
            time.
    """

    matcher: Matcher
    space: FeatureSpace
    max_concepts: int
    processes: int = 1

    def make(
        self, notes: Notes, progress: Progress | None = None, cache: Path | None = None
    ) -> PatientInputs:
        """Return one bag per patient.

        Args:
            notes: The notes, in any order of patients; or the texts of each patient.
            progress: Receives the number of notes done, and of all notes.
            cache: Folder for results; None keeps none.
        """
        return make_bags(
            notes,
            self.matcher,
            processes=self.processes,
            progress=progress,
            cache=cache,
            max_concepts=self.max_concepts,
        )

    def make_from_stream(
        self,
        notes: Iterable[PatientNote],
        patients: Iterable[str] = (),
        compute: ComputeFeatures | None = None,
    ) -> PatientInputs:
        """Return the bags that `make` returns, without holding the texts in memory.

        Only a patient's concepts are kept, and nothing for a patient who is left out.

        Args:
            notes: The notes, in any order of patients. No reference to a text is kept.
            patients: Patients to list first, even if they have no notes.
            compute: Computes the concepts of notes; in this process if it is None.

        Returns:
            One bag per patient, in the order of their first notes. The counts are
            `patients`, `left_out` and `without_features`.
        """
        compute = compute or partial(compute_features_here, self.compute_note_features)
        names, arrays, counts = collect_bags(
            notes, compute, self.max_concepts, patients
        )
        return PatientInputs.from_arrays(names, arrays, self.matcher.vocabulary, counts)

    def compute_note_features(self, text: str) -> NoteFeatures:
        """Return the concepts that a note mentions; see `Matcher.make_bag`."""
        return self.matcher.list_concepts(text)


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """Makes mean vectors with a frozen encoder.

    Attributes:
        encoder: The encoder.
        space: The meaning of the vectors.
    """

    encoder: FrozenEncoder
    space: FeatureSpace

    def make(
        self, notes: Notes, progress: Progress | None = None, cache: Path | None = None
    ) -> PatientInputs:
        """Return one vector per patient; zeros for a patient without words.

        Args:
            notes: The notes, in any order of patients; or the texts of each patient.
            progress: Receives the number of notes done, and of all notes.
            cache: Folder for results; None keeps none.
        """
        note_set = NoteSet.of(notes)
        number = note_set.number

        def encode_all() -> dict[str, np.ndarray]:
            stream = iterate_with_progress(note_set, number, progress)
            _, vectors = self._collect_vectors(stream, note_set.patients)
            return {"vectors": vectors}

        recipe = f"{self.space.fingerprint} 1"
        values = compute_with_cache(cache, note_set, recipe, make=encode_all)["vectors"]
        if progress is not None:
            progress(number, number)
        counts = {
            "notes": number,
            "left_out": 0,
            "without_features": int((~values.any(1)).sum()),
        }
        return PatientInputs(note_set.patients, Vectors(values), counts)

    def make_from_stream(
        self,
        notes: Iterable[PatientNote],
        patients: Iterable[str] = (),
        compute: ComputeFeatures | None = None,
    ) -> PatientInputs:
        """Return the vectors that `make` returns, without holding the texts in memory.

        Only a sum of vectors is kept for each patient.

        Args:
            notes: The notes, in any order of patients. No reference to a text is kept.
            patients: Patients to list first, even if they have no notes.
            compute: Computes the vectors of notes; in this process if it is None.

        Returns:
            One vector per patient, in the order of their first notes. The counts are
            `left_out` and `without_features`.
        """
        names, values = self._collect_vectors(notes, patients, compute)
        counts = {"left_out": 0, "without_features": int((~values.any(1)).sum())}
        return PatientInputs(names, Vectors(values), counts)

    def _collect_vectors(
        self,
        notes: Iterable[PatientNote],
        patients: Iterable[str],
        compute: ComputeFeatures | None = None,
    ) -> tuple[tuple[str, ...], np.ndarray]:
        """Return all patients, and the (patients, width) float32 means of their notes.

        The arguments are those of `make_from_stream`.
        """
        means = {patient: _RunningMean() for patient in patients}
        compute = compute or partial(compute_features_here, self.compute_note_features)
        for note, vector in compute(notes):
            mean = means.setdefault(note.patient, _RunningMean())
            if vector:
                mean.add(np.array(vector, np.float64))

        values = np.zeros((len(means), self.space.width), np.float32)
        for row, mean in enumerate(means.values()):
            if mean.number:
                values[row] = mean.compute()
        return tuple(means), values

    def compute_note_features(self, text: str) -> NoteFeatures:
        """Return the vector of a note; it is empty if the note has no words."""
        vector = self.encode_note(text)
        if vector is None:
            return ()
        values: list[float] = vector.tolist()
        return values

    def encode_note(self, text: str) -> np.ndarray | None:
        """Return the mean vector over the words of a note.

        Returns:
            (layers × dim,) float64; None if the note has no words.
        """
        passages = _split_into_passages(text)
        if not passages:
            return None
        vectors = self.encoder.encode(passages)  # (words, layers, dim)
        flat = vectors.reshape(len(vectors), -1)
        mean: np.ndarray = flat.mean(0, dtype=np.float64)
        return mean


class _RunningMean:
    """The mean of vectors that are added one by one.

    Attributes:
        number: Number of added vectors.
    """

    def __init__(self) -> None:
        self.number = 0
        self._sum: np.ndarray | None = None

    def add(self, vector: np.ndarray) -> None:
        """Add a float64 vector."""
        self.number += 1
        if self._sum is None:
            self._sum = vector.copy()
        else:
            self._sum += vector

    def compute(self) -> np.ndarray:
        """Return the mean.

        Raises:
            ValueError: No vector was added.
        """
        if self._sum is None:
            raise ValueError("a mean needs at least one vector")
        return self._sum / self.number


def _split_into_passages(text: str) -> list[Passage]:
    """Return the sentences of a text that have words."""
    sentences = [text[start:end] for start, end in split_sentences(Document("", text))]
    passages = [Passage(sentence, tokenize(sentence)) for sentence in sentences]
    return [passage for passage in passages if len(passage.words)]


@dataclass(frozen=True, eq=False)
class SubWordFeatures:
    """Divides notes into the sub-words that an encoder reads.

    Attributes:
        backbone: The encoder, of which only the tokenizer is used here.
        space: The meaning of the sub-words.
    """

    backbone: Backbone
    space: FeatureSpace

    def make(
        self,
        notes: Notes,
        progress: Progress | None = None,
        cache: Path | None = None,  # noqa: ARG002 - a cache would contain the texts
    ) -> PatientInputs:
        """Return the sub-words of each patient's notes.

        Args:
            notes: The notes, in any order of patients; or the texts of each patient.
            progress: Receives the number of notes done, and of all notes.
            cache: Not used.
        """
        note_set = NoteSet.of(notes)
        stream = iterate_with_progress(note_set, note_set.number, progress)
        inputs = self.make_from_stream(stream, note_set.patients)
        if progress is not None:
            progress(note_set.number, note_set.number)
        return inputs._replace(counts={**inputs.counts, "notes": note_set.number})

    def make_from_stream(
        self,
        notes: Iterable[PatientNote],
        patients: Iterable[str] = (),
        compute: ComputeFeatures | None = None,
    ) -> PatientInputs:
        """Return the sub-words of each patient's notes, with one text in memory.

        The sub-words of all notes are kept, in about as much memory as the texts.

        Args:
            notes: The notes, in any order of patients. No reference to a text is kept.
            patients: Patients to list first, even if they have no notes.
            compute: Computes the sub-words of notes; in this process if it is None.

        Returns:
            The patients, in the order of their first notes. The counts are `left_out`
            and `without_features`.
        """
        compute = compute or partial(compute_features_here, self.compute_note_features)
        ids: dict[str, array[int]] = {patient: array("i") for patient in patients}
        lengths: dict[str, list[int]] = {patient: [] for patient in ids}
        for note, sub_words in compute(notes):
            ids.setdefault(note.patient, array("i")).extend(map(int, sub_words))
            lengths.setdefault(note.patient, []).append(len(sub_words))

        ids_by_patient = [np.array(each, np.int32) for each in ids.values()]
        values = SubWords(
            np.concatenate([np.zeros(0, np.int32), *ids_by_patient]),
            compute_offsets([size for each in lengths.values() for size in each]),
            offsets=compute_offsets([len(each) for each in lengths.values()]),
            width=self.space.width,
        )
        num_without_words = int((values.sizes == 0).sum())
        counts = {"left_out": 0, "without_features": num_without_words}
        return PatientInputs(tuple(ids), values, counts)

    def compute_note_features(self, text: str) -> NoteFeatures:
        """Return the ids of a note's sub-words."""
        passage = Passage(text, np.zeros((0, 2), np.int64))
        ids: list[int] = split_passages(self.backbone.tokenizer, [passage]).ids.tolist()
        return ids


Features = ConceptFeatures | TextFeatures | SubWordFeatures


# ---- from a job ----------------------------------------------------------------------


def build_features(
    config: ConceptsConfig | TextConfig, folder: Path, *, tunes_encoder: bool = False
) -> Features:
    """Return the maker of features that a job's [concepts] or [text] describes.

    Args:
        config: The table.
        folder: Folder of the job file, to which paths are relative.
        tunes_encoder: Whether the encoder of [text] is tuned, and reads all words.

    Raises:
        ConfigError: A setting is impossible; the message names the table.
        DataError: The dictionary cannot be read; the message names the table.
        ModelError: The encoder cannot be loaded.
    """
    if isinstance(config, TextConfig):
        beside = folder / config.encoder
        name = str(beside.resolve()) if beside.exists() else config.encoder
        make = _make_sub_word_features if tunes_encoder else _make_text_features
        return make({"encoder": name}, expand_path(name, "[text] encoder"))

    options = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in config.options.items()
    }
    place = _choose_recipe_place(config.dictionary, folder)
    recipe = {
        "kind": "concepts",
        "dictionary": place,
        "format": config.format,
        **options,
        "context": config.context,
        "most": config.most,
    }
    with naming_place("[concepts] dictionary", DataError, ConfigError):
        return _make_concept_features(config, recipe, expand_path(place, "dictionary"))


def _choose_recipe_place(dictionary: str, folder: Path) -> str:
    """Return a dictionary's location in a recipe: an absolute path, or as written.

    Variables are kept, because they may stand for another folder where the model is
    used.
    """
    is_fixed = (
        dictionary == SYNTHETIC
        or "$" in dictionary
        or dictionary.startswith("~")
        or Path(dictionary).is_absolute()
    )
    return dictionary if is_fixed else str((folder / dictionary).resolve())


# ---- from a recipe -------------------------------------------------------------------


class _RecipeKind(NamedTuple):
    """A kind of recipe.

    Attributes:
        settings: Class of the settings in it.
        place: Key of the location of the dictionary or encoder.
        parameter: Parameter for a new location.
    """

    settings: type[ConceptsConfig | TextConfig]
    place: str
    parameter: str


_RECIPE_KINDS: Final = {
    "concepts": _RecipeKind(ConceptsConfig, "dictionary", "dictionary"),
    "text": _RecipeKind(TextConfig, "encoder", "backbone"),
    "sub-words": _RecipeKind(TextConfig, "encoder", "backbone"),
}
# Keys of a recipe that are not settings.
_RECIPE_FACTS: Final = ("kind", "fingerprint", "names")


def load_features(recipe: Mapping[str, Any], dictionary: str | None = None) -> Features:
    """Return the features for a recipe, checked by its fingerprint.

    Args:
        recipe: The recipe of a saved model.
        dictionary: New location of the dictionary or encoder, if it has moved.

    Raises:
        ModelError: The dictionary or encoder is missing or a different one, or the
            recipe has an invalid value.
    """
    name = recipe.get("kind")
    if not isinstance(name, str) or name not in _RECIPE_KINDS:
        raise ModelError(f"the model has features of an unknown kind, {name!r}")
    kind = _RECIPE_KINDS[name]
    with naming_place(
        "the model's features cannot be computed", ConfigError, become=ModelError
    ):
        config = _read_settings(recipe, kind)

    original = recipe[kind.place]
    place = dictionary or original
    try:
        path = expand_path(place, kind.place)
        features: Features
        if name == "sub-words":
            features = _make_sub_word_features(recipe, path)
        elif isinstance(config, TextConfig):
            features = _make_text_features(recipe, path)
        else:
            features = _make_concept_features(config, recipe, path)
    except (DataError, ConfigError, ModelError) as error:
        raise MovedError(
            f"the model's {kind.place} {original} cannot be read ({error}): if it has "
            f"moved, give its new path with `{kind.parameter}`"
        ) from error
    if features.space.fingerprint != recipe.get("fingerprint"):
        raise MovedError(
            f"the {kind.place} {place} is not the one that the model was trained with "
            f"({original}): its content or fednotes' rules differ; give the path of "
            f"the same file with `{kind.parameter}`"
        )
    return features


def _read_settings(
    recipe: Mapping[str, Any], kind: _RecipeKind
) -> ConceptsConfig | TextConfig:
    """Return the settings that a recipe holds, as a job's table would.

    Raises:
        ConfigError: A value is missing or impossible.
    """
    if not isinstance(recipe.get("fingerprint", ""), str):
        raise ConfigError(
            f"recipe fingerprint = {recipe['fingerprint']!r}: expected text"
        )
    if kind.place not in recipe:
        raise ConfigError(f"recipe: the key {kind.place!r} is missing")
    settings = {
        name: value for name, value in recipe.items() if name not in _RECIPE_FACTS
    }
    return build(kind.settings, settings, "recipe")


# ---- dictionaries and encoders -------------------------------------------------------


def _make_text_features(recipe: Mapping[str, Any], place: str) -> TextFeatures:
    """Return the features of an encoder.

    Args:
        recipe: A recipe that names the encoder.
        place: Location of the encoder.
    """
    encoder = load_encoder(place)
    digest = hashlib.sha256(f"{TEXT_RECIPE}\0{encoder.fingerprint}".encode())
    complete = {
        "kind": "text",
        "encoder": recipe["encoder"],
        "fingerprint": digest.hexdigest(),
    }
    width = encoder.layers * encoder.dim
    return TextFeatures(encoder, FeatureSpace(width, dense=True, recipe=complete))


def _make_sub_word_features(recipe: Mapping[str, Any], place: str) -> SubWordFeatures:
    """Return the features of an encoder that is tuned.

    Args:
        recipe: A recipe that names the encoder.
        place: Location of the encoder.
    """
    backbone = open_backbone(place)
    complete = {
        "kind": "sub-words",
        "encoder": recipe["encoder"],
        "fingerprint": backbone.fingerprint,
    }
    space = FeatureSpace(backbone.width, dense=True, recipe=complete)
    return SubWordFeatures(backbone, space)


def _make_concept_features(
    config: ConceptsConfig, recipe: Mapping[str, Any], place: str
) -> ConceptFeatures:
    """Return the features of a dictionary.

    Args:
        config: How the dictionary is read.
        recipe: The recipe, to which the fingerprint is added.
        place: Location of the dictionary.
    """
    path = None if place == SYNTHETIC else Path(place)
    matcher = _get_matcher(
        path,
        config.format,
        options=tuple(config.options.items()),
        context=config.context,
        stamps=() if path is None else _read_stamps(path),
    )
    complete = {
        **recipe,
        "names": len(matcher.dictionary),
        "fingerprint": matcher.fingerprint,
    }
    space = FeatureSpace(matcher.vocabulary, dense=False, recipe=complete)
    return ConceptFeatures(
        matcher, space, max_concepts=config.most, processes=config.processes
    )


def _read_stamps(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Return values that change if the dictionary or its semantic types do."""
    stamps = []
    for file in (path, *sorted(path.parent.glob("MRSTY.RRF*"))):
        with suppress(OSError):  # the reader reports a missing file
            status = file.stat()
            stamps.append((file.name, status.st_mtime_ns, status.st_size))
    return tuple(stamps)


@lru_cache(maxsize=1)  # the UMLS's takes a minute to build and a gigabyte of memory
def _get_matcher(
    path: Path | None,
    format: str,
    options: tuple[tuple[str, Any], ...],
    context: Option,
    stamps: tuple[Any, ...],  # noqa: ARG001 - a changed file is another argument
) -> Matcher:
    """Return a dictionary's matcher; without a path, that of generated patients."""
    if path is None:
        return Matcher(synthetic.build_synthetic_dictionary(), context)
    return Matcher(read_dictionary(path, format, **dict(options)), context)
