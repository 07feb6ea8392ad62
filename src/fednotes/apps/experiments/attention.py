"""Table 2 of Liu and Miller 2020: do differently pre-trained models attend similarly?

All models read the same drawn passages of notes. For each head, the mean entropy of its
attention and its Jensen–Shannon divergence from every other head of the model are
measured; for each pair of models, Spearman's correlation of the entropies and the
distance between the divergence matrices.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.apps.experiments.attention_maps import (
    Batch,
    Traits,
    compute_attention_maps,
    open_attention_model,
    require_comparable,
)
from fednotes.apps.experiments.figures import plot_entropy
from fednotes.apps.experiments.head_measures import (
    Floats,
    Heads,
    compare_models,
    measure_heads,
)
from fednotes.apps.experiments.passages import draw_passages
from fednotes.apps.experiments.tables import join_paragraphs
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    MissingExtra,
    ParameterError,
    raising_os_errors_as,
)
from fednotes.core.store import follow_links, write_text
from fednotes.data.notes import NotePlace, read_notes
from fednotes.report.markdown import format_markdown_table

# Receives the model, the number of texts that it has read, and the total.
ReadingProgress = Callable[[str, int, int], None]

PAPER_MODELS = ("BERTbase", "ClinicalBERT", "Fed_ClinicalBERT")
PAPER_SPEARMAN = ((1.0,), (0.25, 1.0), (0.96, 0.27, 1.0))
PAPER_DISTANCE = ((0.0,), (8398.95, 0.0), (8153.26, 314.38, 0.0))

# Each block of the table: its title, the measure, and the format of its numbers.
_BLOCKS = (
    ("Spearman correlation among entropy of attention heads", "spearman", ".3f"),
    ("Distance of JS matrices: mean of absolute differences", "distance_mean", ".5f"),
    ("Distance of JS matrices: sum of absolute differences", "distance_sum", ".2f"),
    ("Distance of JS matrices summed over tokens: mean", "distance_over_tokens", ".2f"),
)
ENTROPY_PLOT = "entropy_by_depth.png"
_MODEL_NAME = re.compile(r"[\w.+-][\w .+-]{0,39}")


def _ignore_progress(model: str, done: int, total: int) -> None:
    """Do nothing."""


# ---- the analysis --------------------------------------------------------------------


def run_attention(  # noqa: PLR0913 - the options of a command
    model: Sequence[str],
    notes: Sequence[NotePlace],
    out: Path,
    *,
    sample: int = 200,
    length: int = 128,
    seed: int = 1,
    categories: Collection[str] = (),
    progress: ReadingProgress = _ignore_progress,
) -> dict[str, Any]:
    """Compare the attention heads of models on passages of notes.

    It writes attention.json, attention.md and, if matplotlib is installed,
    entropy_by_depth.png. The same notes, sample, length and seed give the same
    passages, whatever the models.

    Args:
        model: Each model as NAME=DIR.
        notes: Files, folders or databases that `read_notes` reads.
        out: The folder for the results.
        sample: Number of passages.
        length: Tokens of a passage.
        seed: Seed of the drawn passages.
        categories: Read only notes of these categories; all notes if empty.
        progress: Called while a model reads the passages.

    Returns:
        The facts, as input for `format_attention_page`.

    Raises:
        FednotesError: As in `parse_models`, `read_notes`, `draw_passages` and
            `measure_models`; or `out` is not writable or another user's link, which is
            checked before any model reads.
    """
    models = parse_models(model)
    with raising_os_errors_as(FednotesError, out):
        out = follow_links(out)
        out.mkdir(parents=True, exist_ok=True)
    texts = draw_passages(_read_texts(notes, categories), sample, length, seed)
    if not texts:
        places = ", ".join(map(str, notes)) or "no file"
        raise DataError(f"no note in {places} contains text: give other notes")
    heads = measure_models(models, texts, length=length, progress=progress)
    facts = _gather_facts(heads, length=length, seed=seed)

    write_text(out / "attention.json", _to_json(facts), private=False)
    try:
        plot_entropy(heads, out / ENTROPY_PLOT)
    except MissingExtra as missing:
        ending = f"No plot: {missing}."
    else:
        ending = f"Plot: {ENTROPY_PLOT}."
    page = f"{format_attention_page(facts)}\n{ending}\n"
    write_text(out / "attention.md", page, private=False)
    return facts


def parse_models(pairs: Iterable[str]) -> dict[str, str]:
    """Return the directory of each model by its name.

    Args:
        pairs: Each model as NAME=DIR.

    Raises:
        ParameterError: There is no model, an entry is not NAME=DIR, or two share a
            name.
    """
    directories: dict[str, str] = {}
    for pair in pairs:
        name, sign, directory = (part.strip() for part in pair.partition("="))
        if not sign or not directory or not _MODEL_NAME.fullmatch(name):
            raise ParameterError(
                f"`model` {pair!r}: write NAME=DIR, such as base=minilm; a name has at "
                "most 40 letters, digits, spaces, '.', '+' and '-'"
            )
        if name in directories:
            raise ParameterError(
                f"`model`: two models are called {name!r}: give each its own name"
            )
        directories[name] = directory
    if not directories:
        raise ParameterError("`model`: give at least one model as NAME=DIR")
    return directories


def _read_texts(
    notes: Iterable[NotePlace], categories: Collection[str]
) -> Iterator[str]:
    """Yield the texts of notes."""
    for path in notes:
        for note in read_notes(path, categories=categories):
            yield note.text


def measure_models(
    models: Mapping[str, Path | str],
    texts: Sequence[str],
    *,
    length: int = 128,
    progress: ReadingProgress = _ignore_progress,
) -> dict[str, Heads]:
    """Measure the heads of models on texts.

    Comparability is checked before any model reads the texts. Only one model is in
    memory at a time.

    Args:
        models: "minilm" or a Hugging Face directory for each model by name.
        texts: The texts.
        length: Largest number of tokens of a text.
        progress: Called after each batch of texts.

    Raises:
        ConfigError: There is no model, the models cannot be compared, or one cannot
            read this length.
        DataError: There is no text.
        ModelError: A model cannot be used.
        MissingExtra: An optional package is missing.
    """
    if not models:
        raise ConfigError("the attention analysis needs at least one model")
    if not texts:
        raise DataError("the attention analysis needs at least one text")
    traits: dict[str, Traits] = {}
    for name, directory in models.items():
        traits[name] = Traits.of(open_attention_model(directory), texts, length)
        require_comparable(traits)

    heads = {}
    for name, directory in models.items():
        batches = compute_attention_maps(open_attention_model(directory), texts, length)
        heads[name] = measure_heads(
            _report_progress(batches, name, len(texts), progress)
        )
    return heads


def _report_progress(
    batches: Iterable[Batch], name: str, total: int, progress: ReadingProgress
) -> Iterator[Batch]:
    """Yield batches; after each, report how many texts the model has read."""
    done = 0
    for attention, lengths in batches:
        yield attention, lengths
        done += len(lengths)
        progress(name, done, total)


def _gather_facts(
    heads: Mapping[str, Heads], *, length: int, seed: int
) -> dict[str, Any]:
    """Return everything that is reported about the models."""
    first = next(iter(heads.values()))
    layers, heads_per_layer = first.entropy.shape
    return {
        "models": list(heads),
        "texts": first.texts,
        "tokens": first.positions,
        "length": length,
        "seed": seed,
        "layers": layers,
        "heads": heads_per_layer,
        **compare_models(heads),
        "trend": {name: each.measure_depth_trend() for name, each in heads.items()},
        "entropy_by_depth": {
            name: each.average_by_layer() for name, each in heads.items()
        },
        "entropy": {name: each.entropy for name, each in heads.items()},
        "divergence": {name: each.divergence for name, each in heads.items()},
    }


def _to_json(facts: Mapping[str, Any]) -> str:
    """Return the facts as JSON, with a line for each fact.

    With a line for each number, matrices would be very long.
    """
    lines = [
        f"  {json.dumps(name)}: {json.dumps(_to_plain(value))}"
        for name, value in facts.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _to_plain(value: Any) -> Any:
    """Return a value without arrays, for JSON; numbers have six digits, NaN is None."""
    if isinstance(value, dict):
        return {name: _to_plain(inner) for name, inner in value.items()}
    if isinstance(value, np.ndarray):
        return [_to_plain(inner) for inner in value]
    if isinstance(value, float):
        return round(float(value), 6) if math.isfinite(value) else None
    return value


# ---- the page ------------------------------------------------------------------------


def format_attention_page(facts: Mapping[str, Any]) -> str:
    """Return the analysis as Markdown.

    The page has Table 2 of the paper for these models, the paper's own figures, and the
    mean entropy of each layer.
    """
    return join_paragraphs(_list_paragraphs(facts))


def _list_paragraphs(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paragraphs and tables of the page."""
    yield "### Analysis of attention heads"
    yield (
        f"The models have {facts['layers']} layers of {facts['heads']} heads. They "
        f"read {facts['texts']:,} texts with {facts['tokens']:,} tokens (at most "
        f"{facts['length']} per text; the texts are drawn with seed {facts['seed']}). "
        "Divergences are in nats, and are means over tokens unless the row says that "
        "they are summed."
    )
    blocks = [(title, facts[name], form) for title, name, form in _BLOCKS]
    yield _format_triangles(facts["models"], blocks)
    yield from _list_paper_paragraphs()
    yield (
        "The mean entropy of a layer's heads, in nats. In the paper, it decreases with "
        "depth."
    )
    yield _format_layer_table(facts)


def _list_paper_paragraphs() -> Iterator[str]:
    """Yield the paper's own figures, and an interpretation of its distance."""
    yield (
        "The paper's own figures are for BERT-base, with 12 layers of 12 heads, and "
        "MIMIC-III."
    )
    title = _BLOCKS[0][0]
    yield _format_triangles(
        PAPER_MODELS,
        [
            (title, PAPER_SPEARMAN, ".2f"),
            ("Distances among JS matrices", PAPER_DISTANCE, ".2f"),
        ],
    )
    yield (
        "The paper calls its distance a mean of absolute differences. A mean over "
        "tokens is at most ln 2 = 0.693, so 8398.95 is either a sum "
        f"({8398.95 / 144**2:.3f} for each of 144² entries) or a mean of divergences "
        "summed over tokens, as the program of Clark et al. 2019 gives them, which "
        "grows with the sample. All three are reported."
    )


def _format_layer_table(facts: Mapping[str, Any]) -> str:
    """Return the table of the mean entropy of each layer and model."""
    by_model = facts["entropy_by_depth"].values()
    rows = []
    for layer, means in enumerate(zip(*by_model, strict=True), 1):
        rows.append([str(layer), *(f"{mean:.3f}" for mean in means)])
    trends = [_format_cell(trend, ".3f") for trend in facts["trend"].values()]
    rows.append(["Spearman correlation of layer and entropy", *trends])
    return format_markdown_table(("layer", *facts["models"]), rows)


def _format_triangles(
    names: Sequence[str],
    blocks: Sequence[tuple[str, Sequence[Sequence[float]] | Floats, str]],
) -> str:
    """Return a table with the lower triangle of each block.

    Args:
        names: The models.
        blocks: The title of each block, its values (models, models), and the format of
            a value.
    """
    rows = []
    for title, values, form in blocks:
        rows.append([f"*{title}*", *[""] * len(names)])
        for row, name in enumerate(names):
            cells = [_format_cell(values[row][column], form) for column in range(row)]
            cells.append(_format_cell(values[row][row], ".0f"))
            cells += [""] * (len(names) - len(cells))
            rows.append([name, *cells])
    return format_markdown_table(("", *names), rows)


def _format_cell(value: float, form: str) -> str:
    """Return a number in a format; "none" if it is not finite."""
    return format(float(value), form) if math.isfinite(value) else "none"
