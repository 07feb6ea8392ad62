"""A seeded generator of clinical text for several sites. No text of anyone's is in it.

Sites differ as real ones do: in genre (discharge summaries, case reports, patients' posts,
mixtures beyond three), in which names and phrasings they use often (long-tailed, each site
with its own ranks), in what they annotate (overlapping tag sets), in size, and in the care
they take (annotation noise, in train only). A finding is an ADE, a Disease or a Symptom by its
context; companies, devices and lab values look like drugs and doses. So a site alone sees
too little, and the other sites hold much of what it lacks.

    sites = generate(3, sentences_per_site=250, seed=0)
    sites[0].data        what the site annotates: its own tag set, noise in train
    sites[0].complete    the same texts, every type, no noise: pooled training's upper bound
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fednotes.core.errors import ConfigError
from fednotes.core.seeds import rng_of
from fednotes.core.types import Document, Scheme, SiteData, Span, TagSet
from fednotes.data.synthetic_lexicon import Lexicon, make_lexicon
from fednotes.data.synthetic_writer import GENRE_TYPES, GENRES, TYPES, Writer

SIZE_FACTORS = (1.5, 0.9, 0.6)


@dataclass(frozen=True, slots=True)
class SyntheticSite:
    """One site twice over the same texts.

    data: the site's own annotation. complete: noise-free labels of all `TYPES`.
    genres: the share of each genre in its notes.
    """

    data: SiteData
    complete: SiteData
    genres: tuple[tuple[str, float], ...]


def generate(
    num_sites: int = 3,
    sentences_per_site: int | Sequence[int] = 250,
    seed: int = 0,
    *,
    noise: float = 0.08,
    schemes: Sequence[Scheme] = ("BIO",),
    lexicon_size: int = 1500,
) -> tuple[SyntheticSite, ...]:
    """Corpora of `num_sites` sites; the same arguments give the same bytes.

    sentences_per_site: training sentences, the mean over sites (they are unequal), or one
        number for each site. Valid has a fifth of it (at least 40), test a quarter (at least
        200). Parts share no patient and no sentence, within and across sites.
    noise: the share of training mentions that the site annotates wrongly: dropped, cut or
        grown by a word, or of another type.
    schemes: tagging schemes, dealt to the sites in turn.

    Raises ConfigError for numbers that make no corpus.
    """
    sizes = _sizes(num_sites, sentences_per_site)
    if not 0 <= noise < 1 or not schemes or lexicon_size < 50:
        raise ConfigError("synthetic corpora need 0 <= noise < 1, a scheme, 50 names or more")
    lexicon = make_lexicon(rng_of(seed, "lexicon"), lexicon_size)
    used: dict[str, str] = {}
    return tuple(
        _site(index, size, seed, noise, schemes[index % len(schemes)], lexicon, used)
        for index, size in enumerate(sizes)
    )


def _sizes(num_sites: int, sentences: int | Sequence[int]) -> list[int]:
    if isinstance(sentences, int):
        cycle = [SIZE_FACTORS[i % len(SIZE_FACTORS)] for i in range(num_sites)]
        sizes = [max(1, round(sentences * factor)) if sentences > 0 else 0 for factor in cycle]
    else:
        sizes = list(sentences)
    if num_sites < 1 or len(sizes) != num_sites or min(sizes) < 1:
        raise ConfigError(
            f"synthetic corpora need one site or more and a sentence or more for each, "
            f"not {num_sites} site(s) with {sentences} sentences"
        )
    return sizes


def _site(
    index: int,
    size: int,
    seed: int,
    noise: float,
    scheme: Scheme,
    lexicon: Lexicon,
    used: dict[str, str],
) -> SyntheticSite:
    rng = rng_of(seed, "synthetic", index)
    name, shares, types = _profile(index, rng)
    writers = [Writer(genre, seed, rng, lexicon) for genre in GENRES]
    counts = {"train": size, "valid": max(40, size // 5), "test": max(200, size // 4)}
    parts: dict[str, tuple[Document, ...]] = {}
    for part, count in counts.items():
        parts[part] = _notes(f"{name}-{part}", part, count, shares, writers, rng, used)
    own = {part: _annotated(notes, types) for part, notes in parts.items()}
    own["train"] = _noisy(own["train"], types, noise, rng_of(seed, "noise", index))
    return SyntheticSite(
        SiteData(name, TagSet(types, scheme), own["train"], own["valid"], own["test"]),
        SiteData(name, TagSet(TYPES, scheme), parts["train"], parts["valid"], parts["test"]),
        tuple(zip(GENRES, shares, strict=True)),
    )


def _profile(index: int, rng: np.random.Generator) -> tuple[str, list[float], tuple[str, ...]]:
    """A site's name, genre shares and tag set: one genre each for three, then mixtures."""
    if index < len(GENRES):
        genre = GENRES[index]
        return genre, [float(g == genre) for g in GENRES], GENRE_TYPES[genre]
    shares = rng.dirichlet([0.7] * len(GENRES)).tolist()
    other = [t for t in TYPES if t != "Drug"]
    chosen = rng.permutation(len(other))[: int(rng.integers(2, 4))].tolist()
    return f"mixed{index + 1}", shares, tuple(sorted(["Drug", *(other[i] for i in chosen)]))


def _notes(
    prefix: str,
    part: str,
    sentences: int,
    shares: Sequence[float],
    writers: Sequence[Writer],
    rng: np.random.Generator,
    used: dict[str, str],
) -> tuple[Document, ...]:
    """Patients of one to three notes of three to nine sentences each, `sentences` in all."""
    documents: list[Document] = []
    edges = np.cumsum(shares).tolist()
    left, patient, notes_left = sentences, 0, 0
    writer = writers[0]
    while left:
        if notes_left == 0:
            patient, notes_left = patient + 1, int(rng.integers(1, 4))
            writer = writers[min(bisect_right(edges, rng.random() * edges[-1]), len(edges) - 1)]
        length = min(left, int(rng.integers(3, 10)))
        who = f"{prefix}-p{patient:04d}"
        documents.append(writer.note(f"{who}-n{notes_left}", who, length, part, used))
        left, notes_left = left - length, notes_left - 1
    return tuple(documents)


def _annotated(notes: Sequence[Document], types: Sequence[str]) -> tuple[Document, ...]:
    return tuple(
        replace(note, spans=tuple(s for s in note.spans if s.label in types)) for note in notes
    )


def _noisy(
    notes: Sequence[Document], types: Sequence[str], noise: float, rng: np.random.Generator
) -> tuple[Document, ...]:
    return tuple(
        replace(
            note,
            spans=_apart(
                [m for s in note.spans for m in (_mistaken(note, s, types, noise, rng),) if m]
            ),
        )
        for note in notes
    )


def _mistaken(
    note: Document, span: Span, types: Sequence[str], noise: float, rng: np.random.Generator
) -> Span | None:
    """The mention as a hurried annotator has it: mostly right."""
    if rng.random() >= noise:
        return span
    kind = rng.random()
    if kind < 0.5:
        return None
    if kind < 0.75:
        return Span(span.start, span.end, types[int(rng.integers(len(types)))])
    cut = note.text.find(" ", span.start, span.end)
    if cut > 0:
        return Span(cut + 1, span.end, span.label)
    first = max(a for a, _ in note.sentences if a <= span.start)
    word = re.search(r"\w+ $", note.text[first : span.start])
    return Span(first + word.start(), span.end, span.label) if word else span


def _apart(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Without the mentions that a mistake made overlap the one before."""
    kept: list[Span] = []
    for span in sorted(spans):
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
    return tuple(kept)


def write_sites(
    sites: Sequence[SyntheticSite],
    directory: str | Path,
    format: str = "conll",
    complete: bool = False,
) -> tuple[Path, ...]:
    """Write `<directory>/<site>/{train,valid,test}.<format>`; returns the sites' folders.

    complete: write the complete labels instead of the site's own.
    Raises ConfigError for a format that has no writer.
    """
    from fednotes.data import formats

    writer = getattr(formats.FORMATS.get(format), "write", None)
    if writer is None:
        raise ConfigError(f"cannot write {format!r}: choose conll, brat or jsonl")
    folders = []
    for site in sites:
        data = site.complete if complete else site.data
        folder = Path(directory) / data.id
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if format == "brat" else f".{format}"
        for part in ("train", "valid", "test"):
            writer(getattr(data, part), folder / f"{part}{suffix}")
        folders.append(folder)
    return tuple(folders)
