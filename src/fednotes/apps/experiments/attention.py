"""Table 2 of Liu and Miller 2020: do differently pre-trained models attend alike?

A fixed sample of stretches of notes is read by every model. Of each head: its
attention's mean entropy, and its Jensen–Shannon divergence from every other head of the
same model. Of each two models: Spearman's correlation of the entropies, and the
distance of the JS matrices.

After Clark et al. 2019, "What does BERT look at?", sections 3.3 (entropy) and 6
(clustering of heads). A query position's attention is a distribution over the text's
tokens; every position of every text counts the same, the special tokens too, padding
never. Everything is a sum over positions, so batches of maps come and go: no more than
one is in memory. Entropies and divergences are in nats.

A batch: attention (texts, layers, heads, tokens, tokens), each row over the last axis a
distribution, and lengths (texts,), tokens before the padding. Head h of layer l is
number l * heads + h.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fednotes.apps.experiments.tables import grid_table, page
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    MissingExtra,
    ModelError,
    needs,
    on_disk,
)
from fednotes.core.seeds import rng_of
from fednotes.core.store import write_out, write_text
from fednotes.data.clinical import sentences
from fednotes.data.notes import read_notes
from fednotes.data.text import tokenize
from fednotes.encoders.pretrained import (
    encoder_directory,
    open_pretrained,
    positions_of,
    require_complete,
)

# Told apart with every common colour vision, and by marker.
_COLOURS = ("#0072b2", "#c85200", "#00835f", "#a3487f", "#7d6608", "#5f6b78")
_MARKS = tuple(zip(_COLOURS, "osD^vP", strict=True))
Floats = NDArray[np.float64]
Batch = tuple[np.ndarray, np.ndarray]
_FLOATS = 2**24  # of the maps of one batch: 64 MB


@dataclass(frozen=True, eq=False)
class AttentionModel:
    """An encoder that gives its attention. positions: tokens that it can read at once."""

    directory: Path
    tokenizer: Any
    model: Any
    layers: int
    heads: int
    positions: int


def open_attention_model(spec: str | Path) -> AttentionModel:
    """A model for `attention_maps`: "minilm" or a Hugging Face directory.

    Of an encoder-decoder it is the encoder. Raises ModelError (no such directory,
    damaged, gives no attention, layers with different numbers of heads), MissingExtra.
    """
    directory = encoder_directory(str(spec))
    # Only the plain implementation keeps the maps.
    tokenizer, model, missing = open_pretrained(
        directory, "AutoModel", attn_implementation="eager"
    )
    require_complete(directory, tuple(name for name in missing if "pooler" not in name))
    positions = positions_of(tokenizer, model)
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    model = model.eval().requires_grad_(False)
    ids = np.array([[tokenizer.pad_token_id or 0]])
    try:
        _, layers, heads, *_ = _run(model, ids, np.ones_like(ids)).shape
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{directory}: gives no attention maps; give a text encoder such as BERT, all of "
            "whose layers have the same number of heads"
        ) from error
    return AttentionModel(directory, tokenizer, model, layers, heads, positions)


def _run(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(batch, layers, heads, tokens, tokens) float32."""
    with torch.inference_mode():
        result = model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            output_attentions=True,
            return_dict=True,
        )
        maps: np.ndarray = torch.stack(
            [a.float() for a in result.attentions], 1
        ).numpy()
    return maps


def token_ids(
    model: AttentionModel, texts: Sequence[str], length: int
) -> list[list[int]]:
    """Each text's ids with the model's marks, cut to `length`.

    Raises ConfigError for a length that the model cannot read, DataError for a text
    without a token (its number counts from 1).
    """
    if not 1 <= length <= model.positions:
        raise ConfigError(
            f"{model.directory}: reads 1 to {model.positions} tokens at once, length={length} "
            "is asked"
        )
    marks = model.tokenizer.num_special_tokens_to_add()
    if length <= marks:
        raise ConfigError(
            f"length={length} leaves no room beside the {marks} marks of the model"
        )
    if not texts:
        return []  # which tokenizers do not take
    result = model.tokenizer(
        [text.encode("utf-8", "replace").decode("utf-8") for text in texts],
        truncation=True,
        max_length=length,
        padding=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids: list[list[int]] = result["input_ids"]
    empty = next((number for number, line in enumerate(ids, 1) if not line), None)
    if empty is not None:
        raise DataError(f"text {empty} of {len(texts)} has no token: leave it out")
    return ids


def attention_maps(
    model: AttentionModel, texts: Sequence[str], length: int
) -> Iterator[Batch]:
    """The attention of all heads on the texts, in their order, 64 MB of maps at a time.

    Yields attention float32 and lengths int64; what lies behind a length is padding.
    length: tokens of a text at most, the marks included. Raises what `token_ids`
    raises.
    """
    size = max(1, _FLOATS // (model.layers * model.heads * length * length))
    pad = model.tokenizer.pad_token_id or 0
    ids = token_ids(model, texts, length)
    for start in range(0, len(ids), size):
        lines = ids[start : start + size]
        lengths = np.array([len(line) for line in lines], np.int64)
        # (batch, tokens)
        padded = np.full((len(lines), int(lengths.max())), pad, np.int64)
        mask = (np.arange(padded.shape[1]) < lengths[:, None]).astype(np.int64)
        padded[mask == 1] = np.concatenate(lines)
        yield _run(model.model, padded, mask), lengths


class Traits(NamedTuple):
    """What must be equal for two models' heads to be compared on the same texts.

    vocabulary: the tokenizer's entries; ids: what it makes of the texts.
    """

    layers: int
    heads: int
    vocabulary: Mapping[str, int]
    ids: Sequence[Sequence[int]]

    @classmethod
    def of(cls, model: AttentionModel, texts: Sequence[str], length: int) -> Traits:
        """A model's traits on these texts. Raises as `token_ids`."""
        ids = token_ids(model, texts, length)
        return cls(model.layers, model.heads, model.tokenizer.get_vocab(), ids)


def require_comparable(models: Mapping[str, Traits]) -> None:
    """All models have the first one's heads and tokenizer. Raises ConfigError."""
    (name, first), *others = models.items()
    for other, traits in others:
        if first == traits:
            continue
        if first[:2] != traits[:2]:
            why = (
                f"{name!r} has {first.layers} layers of {first.heads} heads, {other!r} "
                f"{traits.layers} of {traits.heads}"
            )
        elif first.vocabulary != traits.vocabulary:
            sizes = f"{len(first.vocabulary)} and {len(traits.vocabulary)} entries"
            why = f"their tokenizers differ ({sizes}, not the same)"
        else:
            why = (
                "their tokenizers have the same entries but cut the texts differently (case, "
                "accents or marks)"
            )
        raise ConfigError(
            f"models {name!r} and {other!r} cannot be compared head by head: {why}; give models "
            "that were trained from the same one"
        )


# Columns of a block: heads * 2048 floats and their logarithms stay in a core's own
# cache.
_COLUMNS = 2048
_TINY = np.float32(1e-30)  # makes 0 log 0 zero, without a branch


@dataclass(frozen=True, eq=False)
class Heads:
    """What is known of one model's heads on a sample.

    entropy: (layers, heads). divergence: (layers * heads, layers * heads), symmetric,
    zero on the diagonal. Both are means over `positions`, the tokens of `texts` texts.
    """

    entropy: Floats
    divergence: Floats
    positions: int
    texts: int

    @property
    def by_depth(self) -> Floats:
        """(layers,): the mean entropy of each layer's heads."""
        return self.entropy.mean(axis=1)

    @property
    def trend(self) -> float:
        """Rank correlation of a head's layer and its entropy; < 0 where it falls."""
        return spearman(
            np.indices(self.entropy.shape)[0], self.entropy
        )  # [bert table 2 depth]


def measure(batches: Iterable[Batch]) -> Heads:
    """Entropies and divergences of all heads in one pass.

    Raises DataError (no position).
    """
    entropies, divergences, positions, texts = np.zeros(1), np.zeros(1), 0, 0
    for attention, lengths in batches:
        entropies = entropies + entropy_sum(attention, lengths)
        divergences = divergences + divergence_sum(attention, lengths)
        positions += int(np.sum(lengths))
        texts += len(lengths)
    if not positions:
        raise DataError("attention was measured on no token: give at least one text")
    return Heads(entropies / positions, divergences / positions, positions, texts)


def _unpadded(attention: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Each text's maps without padding: (heads in all, tokens, tokens) float32."""
    for maps, length in zip(attention, lengths, strict=True):
        kept = maps[:, :, :length, :length]
        yield np.ascontiguousarray(kept, np.float32).reshape(-1, length, length)


def entropy_sum(attention: np.ndarray, lengths: np.ndarray) -> Floats:
    """(layers, heads): the entropies of one batch, summed over its positions."""
    layers, heads = attention.shape[1:3]
    total = np.zeros(layers * heads)
    for maps in _unpadded(attention, lengths):
        rows = np.einsum(
            "hqk,hqk->hq", maps, np.log(maps + _TINY)
        )  # [bert table 2 entropy]
        total -= rows.sum(axis=1, dtype=np.float64)
    # A distribution on one token may come out a rounding error below zero.
    return np.maximum(total, 0.0).reshape(layers, heads)


def divergence_sum(attention: np.ndarray, lengths: np.ndarray) -> Floats:
    """(heads in all, heads in all): JS of one batch, summed over its positions.

    Clark et al.'s program first mixes 0.1 % of the uniform distribution into each head,
    because its formula divides by it; here 0 log 0 is 0.

    JS(p, q) = H(m) − (H(p) + H(q)) / 2 with m = (p + q) / 2: of each pair of heads only
    m's entropy is new, one logarithm a pair and key.
    """
    count = attention.shape[1] * attention.shape[2]
    total = np.zeros((count, count))
    for maps in _unpadded(attention, lengths):
        halves = maps.reshape(count, -1) * np.float32(0.5) + _TINY
        for start in range(0, halves.shape[1], _COLUMNS):
            total += _pair_sums(
                np.ascontiguousarray(halves[:, start : start + _COLUMNS])
            )
    # m = p: minus the heads' own entropies, by the same additions
    own = total.diagonal()
    found = (own[:, None] + own) / 2 - total  # [bert table 2 divergence]
    upper = np.triu(np.maximum(found, 0.0), 1)
    return upper + upper.T


def _pair_sums(halves: np.ndarray) -> Floats:
    """Σ m log m for each two rows' sum m, in the upper triangle: (rows, rows)."""
    found = np.zeros((len(halves), len(halves)))
    sums, logs = np.empty_like(halves), np.empty_like(halves)
    for first in range(len(halves)):
        m = np.add(halves[first:], halves[first], out=sums[first:])
        log = np.log(m, out=logs[first:])
        found[first, first:] = np.einsum("hk,hk->h", m, log)
    return found


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation of two lists of numbers, of any shape but the same
    size.

    NaN where all values of one are equal. Raises DataError (sizes differ, fewer than
    two values), MissingExtra without SciPy.
    """
    with needs("scipy", "plot"):
        from scipy.stats import spearmanr
    x, y = np.ravel(a), np.ravel(b)
    if len(x) != len(y) or len(x) < 2:
        sizes = f"{len(x)} and {len(y)} values"
        raise DataError(
            f"a rank correlation of {sizes}: give two lists of one size, two or more"
        )
    alike = np.ptp(x) == 0 or np.ptp(y) == 0  # of which SciPy warns
    return (
        math.nan if alike else float(spearmanr(x, y).statistic)
    )  # [bert table 2 spearman]


def matrix_distance(a: ArrayLike, b: ArrayLike) -> tuple[float, float]:
    """Mean and sum over all entries of the absolute differences of two JS matrices.

    The paper names the mean, which of matrices of mean divergences is ln 2 at most.
    Raises DataError where the shapes differ.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or not x.size:
        raise DataError(
            f"JS matrices of {x.shape} and {y.shape}: the models' heads differ"
        )
    difference = np.abs(x - y)  # [bert table 2 distance]
    return float(difference.mean()), float(difference.sum())  # [bert table 2 distance]


Tell = Callable[[str, int, int], None]  # model, texts that it has read, all texts

PAPER_MODELS = ("BERTbase", "ClinicalBERT", "Fed_ClinicalBERT")
PAPER_SPEARMAN = ((1.0,), (0.25, 1.0), (0.96, 0.27, 1.0))
PAPER_DISTANCE = ((0.0,), (8398.95, 0.0), (8153.26, 314.38, 0.0))


def compared(heads: Mapping[str, Heads]) -> dict[str, Floats]:
    """Numbers of each two models, by name: (models, models).

    spearman: rank correlation of the heads' entropies; NaN where it has none.
    distance_mean (at most ln 2), distance_sum: of the absolute differences of JS
    matrices. distance_over_tokens: the mean, of divergences summed over tokens as Clark
    et al. do.
    """
    rows = tuple(heads.values())
    pairs = [
        (spearman(a.entropy, b.entropy), *matrix_distance(a.divergence, b.divergence))
        for a, b in product(rows, repeat=2)
    ]
    correlation, mean, whole = np.array(pairs).T.reshape(3, len(rows), len(rows))
    over_tokens = mean * rows[0].positions
    names = ("spearman", "distance_mean", "distance_sum", "distance_over_tokens")
    return dict(zip(names, (correlation, mean, whole, over_tokens), strict=True))


def _facts(heads: Mapping[str, Heads], length: int, seed: int | None) -> dict[str, Any]:
    """What is told of the models. length: tokens of a text at most."""
    first = next(iter(heads.values()))
    layers, width = first.entropy.shape
    return {
        "models": list(heads),
        "texts": first.texts,
        "tokens": first.positions,
        "length": length,
        "seed": seed,
        "layers": layers,
        "heads": width,
        **compared(heads),
        "trend": {name: each.trend for name, each in heads.items()},
        "entropy_by_depth": {name: each.by_depth for name, each in heads.items()},
        "entropy": {name: each.entropy for name, each in heads.items()},
        "divergence": {name: each.divergence for name, each in heads.items()},
    }


def _plain(value: Any) -> Any:
    """For JSON; None for a correlation that there is none of."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return round(float(value), 6) if math.isfinite(value) else None
    return value


def analyse(
    models: Mapping[str, Path | str],
    texts: Sequence[str],
    *,
    length: int = 128,
    progress: Tell = lambda model, done, texts: None,
) -> dict[str, Heads]:
    """Every model's heads on the texts. models: name → Hugging Face directory or
    "minilm".

    Whether the models can be compared is seen before any reads the texts. One model is
    in memory at a time. Raises ConfigError (no model, models that do not fit each
    other, a length that they cannot read), DataError (no text), ModelError,
    MissingExtra.
    """
    if not models:
        raise ConfigError("the attention analysis needs at least one model: NAME=DIR")
    if not texts:
        raise DataError("the attention analysis needs at least one text")
    traits: dict[str, Traits] = {}
    for name, spec in models.items():
        traits[name] = Traits.of(open_attention_model(spec), texts, length)
        require_comparable(traits)

    def told(name: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        done = 0
        for batch in batches:
            yield batch
            done += len(batch[1])
            progress(name, done, len(texts))

    return {
        name: measure(
            told(name, attention_maps(open_attention_model(spec), texts, length))
        )
        for name, spec in models.items()
    }


def markdown(facts: Mapping[str, Any]) -> str:
    """Table 2's shape, the paper's own figures below it, and the entropy of every
    layer."""
    return page(_parts(facts))


_KINDS = (  # title of the block, attribute, format
    ("Spearman correlation among entropy of attention heads", "spearman", ".3f"),
    ("Distance of JS matrices: mean of absolute differences", "distance_mean", ".5f"),
    ("Distance of JS matrices: sum of absolute differences", "distance_sum", ".2f"),
    ("Distance of JS matrices summed over tokens: mean", "distance_over_tokens", ".2f"),
)


def _parts(facts: Mapping[str, Any]) -> Iterator[str]:
    seed = "" if facts["seed"] is None else f", seed {facts['seed']}"
    yield "### Analysis of attention heads"
    yield (
        f"{facts['texts']} texts, {facts['tokens']} tokens (at most {facts['length']} a "
        f"text{seed}); {facts['layers']} layers of {facts['heads']} heads. Divergences in nats, "
        "the mean over tokens unless summed."
    )
    yield _triangles(
        facts["models"], [(title, facts[name], form) for title, name, form in _KINDS]
    )
    yield "The paper's own figures (BERT-base, 12 layers of 12 heads; MIMIC-III)."
    distances = ("Distances among JS matrices", PAPER_DISTANCE, ".2f")
    yield _triangles(PAPER_MODELS, [(_KINDS[0][0], PAPER_SPEARMAN, ".2f"), distances])
    yield (
        "The paper calls its distance a mean of absolute differences. A mean over tokens is at "
        f"most ln 2 = 0.693, so 8398.95 is either a sum ({8398.95 / 144**2:.3f} for each of "
        "144² entries) or a mean of divergences summed over tokens, as the program of Clark "
        "et al. 2019 gives them, which grows with the sample. All three are reported."
    )
    yield "Mean entropy of a layer's heads, in nats (the paper: it decreases with depth)."
    columns = facts["entropy_by_depth"].values()
    rows = [
        [str(layer), *(f"{mean:.3f}" for mean in means)]
        for layer, means in enumerate(zip(*columns, strict=True), 1)
    ]
    trend = [_cell(value, ".3f") for value in facts["trend"].values()]
    rows.append(["Spearman correlation of layer and entropy", *trend])
    yield grid_table(("layer", *facts["models"]), rows)


def _triangles(
    names: Sequence[str],
    blocks: Sequence[tuple[str, Sequence[Sequence[float]] | Floats, str]],
) -> str:
    rows = []
    for title, values, form in blocks:
        rows.append([f"*{title}*", *[""] * len(names)])
        for row, name in enumerate(names):
            cells = [_cell(values[row][column], form) for column in range(row)]
            cells += [_cell(values[row][row], ".0f"), *[""] * (len(names) - row - 1)]
            rows.append([name, *cells])
    return grid_table(("", *names), rows)


def _cell(value: float, form: str) -> str:
    return format(float(value), form) if math.isfinite(value) else "none"


_NAME = re.compile(r"[\w.+-][\w .+-]{0,39}")


def named_models(pairs: Iterable[str]) -> dict[str, str]:
    """["NAME=DIR", …] → {name: directory}, in order. Raises ConfigError."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, directory = (part.strip() for part in pair.partition("="))
        if not equals or not directory or not _NAME.fullmatch(name):
            raise ConfigError(
                f"model {pair!r}: write NAME=DIR, such as base=minilm; a name has letters, "
                "digits, spaces, '.', '+', '-' and at most 40 of them"
            )
        if name in found:
            raise ConfigError(f"two models are called {name!r}: give each its own name")
        found[name] = directory
    if not found:
        raise ConfigError("the attention analysis needs at least one model: NAME=DIR")
    return found


def run_attention(
    models: Sequence[str],
    notes: Sequence[Path],
    out: Path,
    sample: int = 200,
    length: int = 128,
    seed: int = 1,
    *,
    categories: Collection[str] = (),
    progress: Tell = lambda model, done, texts: None,
) -> dict[str, Any]:
    """The analysis of models "NAME=DIR" on stretches of notes, as `markdown` takes it,
    and its files in `out`.

    notes: files or folders that `read_notes` reads; categories: of these notes only.
    sample: how many stretches. The same notes, sample, length and seed give the same
    texts, whatever the models. Writes attention.json, attention.md and, where
    matplotlib is installed, entropy_by_depth.png.

    Raises FednotesError: what `named_models`, `read_notes`, `stretches` and `analyse`
    raise, and where `out` cannot be written, before any model runs.
    """
    named = named_models(models)
    with on_disk(out, FednotesError):
        out.mkdir(parents=True, exist_ok=True)
    read = (
        note.text for path in notes for note in read_notes(path, categories=categories)
    )
    texts = stretches(read, sample, length, seed)
    if not texts:
        raise DataError(
            f"no note with text in {', '.join(map(str, notes)) or 'no file'}"
        )
    heads = analyse(named, texts, length=length, progress=progress)
    facts = _facts(heads, length, seed)
    # a line for each: matrices of a line a number are long
    lines = ",\n".join(
        f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in _plain(facts).items()
    )
    write_text(out / "attention.json", f"{{\n{lines}\n}}\n", private=False)
    ending = "Plot: entropy_by_depth.png."
    try:
        plot(heads, out / "entropy_by_depth.png")
    except MissingExtra as missing:
        ending = f"No plot: {missing}."
    write_text(out / "attention.md", f"{markdown(facts)}\n{ending}\n", private=False)
    return facts


def stretches(notes: Iterable[str], sample: int, length: int, seed: int) -> list[str]:
    """`sample` texts of about `length` words or more, each consecutive sentences of one
    note.

    Each note is as likely as any other; a note gives a second stretch only when every
    one drawn has given its first. Fewer where the notes have no more. Memory: `sample`
    notes.
    Raises ConfigError (sample or length < 1).
    """
    if sample < 1 or length < 1:
        raise ConfigError(f"sample={sample}, length={length}: give 1 or more of each")
    rng = rng_of(seed, "attention", "notes")
    kept: list[str] = []
    for number, note in enumerate(notes):  # reservoir sampling: Vitter's algorithm R
        if len(kept) < sample:
            kept.append(note)
        elif (place := int(rng.integers(number + 1))) < sample:
            kept[place] = note
    rng = rng_of(seed, "attention", "stretches")
    queues = []
    for note in kept:
        cut = list(_cut(sentences(note), length))
        queues.append([cut[i] for i in rng.permutation(len(cut))])
    found: list[str] = []
    while len(found) < sample and any(queues):
        found += [queue.pop() for queue in queues if queue]
    return found[:sample]


def _cut(lines: Sequence[str], length: int) -> Iterator[str]:
    """Sentences put together up to `length` words; a short rest only where it is all.

    A word has one sub-word at least, so that models cut what is too long to equal
    lengths.
    """
    part: list[str] = []
    words, whole = 0, False
    for line in lines:
        part.append(line)
        words += len(tokenize(line))
        if words >= length:
            yield " ".join(part)
            part, words, whole = [], 0, True
    if part and (not whole or words >= length / 2):
        yield " ".join(part)


def plot(heads: Mapping[str, Heads], path: Path) -> None:
    """Entropies by depth as a picture, whole or not there.

    Raises MissingExtra without matplotlib, FednotesError where the file cannot be
        written.
    """
    picture = io.BytesIO()
    _entropy_by_depth(heads).savefig(picture, dpi=130, format="png")
    write_out(path, picture.getvalue())


def _entropy_by_depth(heads: Mapping[str, Heads]) -> Any:
    """A dot a head, a line through the layers' means, a colour a model (Clark et al.,
    fig. 4)."""
    with needs("matplotlib", "plot"):
        from matplotlib.figure import Figure
    layers = len(next(iter(heads.values())).entropy)
    size = (max(5.2, 2.2 + 0.55 * layers), 3.9)
    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    places = np.arange(1, layers + 1)
    step = 0.48 / len(heads)  # models stand side by side within a layer
    for number, ((name, each), (colour, marker)) in enumerate(
        zip(heads.items(), cycle(_MARKS))
    ):
        x = places + (number - (len(heads) - 1) / 2) * step
        across = np.repeat(x, each.entropy.shape[1])
        y = each.entropy.ravel()
        panel.scatter(
            across, y, s=16, c=colour, marker=marker, alpha=0.45, linewidths=0
        )
        panel.plot(
            x, each.by_depth, color=colour, marker=marker, ms=5, lw=2, label=name
        )
    bottom = -0.02 * panel.get_ylim()[1]  # a head on one token lies at 0: all of it
    panel.set(xticks=places, xlabel="layer", ylabel="entropy of attention (nats)")
    panel.set_ylim(bottom=bottom)
    panel.set_title("Entropy of attention heads by depth", loc="left")
    panel.grid(axis="y", color="#e3e6e9", lw=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, title="line: mean of a layer", alignment="left")
    return figure
