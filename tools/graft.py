"""Make a small BART from a BERT: its encoder, and a decoder trained on public text.

    python tools/graft.py OUT [--text PATH]... [--encoder minilm] [--layers 2] [--steps
    N]

BART's encoder layer is the same as BERT's (both normalise after the residual sum), so
the weights of a BERT directory can be used unchanged. The position table is BERT's plus
its token type 0, two rows further down. One word table serves the encoder, the decoder
and the output. Decoder layers start as BERT's upper layers, with their cross-attention
copied from the same layers' self-attention. [CLS] begins source and target, and [SEP]
ends both. The directory's config.json contains BERT's "layer_norm_eps", which BART's
code does not know.

The decoder learns from pieces of public text. Each step is one of these two:

denoising   BART's own task (Lewis et al. 2020): spans of the source are masked, and the original
            is predicted among the words of the batch and of some other sentences.
listing     The target of `taggers/pointer.py`: [first, last, type] of each span, then the end.
            Which classes a sentence lists differs from row to row. The decoder is told about each
            class by one key and value beside those of each self-attention, where prompt tuning
            will put its own. Half of the time, the word that names the class is replaced by any
            word, so that the type has to be read from the prompt.

Spans belong to surface classes (number, name, abbreviation, bracket, long word, phrase)
or to kinds: phrases whose last word, the head, is in one of several clusters of word
vectors. A span is (first, last, class), with inclusive positions among the sub-words;
the begin mark has position 0. No annotation is read.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, DataError, FednotesError, ModelError
from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.store import write_folder
from fednotes.core.types import Document
from fednotes.data.formats import read
from fednotes.data.formats.files import read_text
from fednotes.data.formats.folders import list_files
from fednotes.data.synthetic import generate
from fednotes.data.text import split_sentences
from fednotes.encoders.bart import find_cache_keyword, set_layer_norm_eps
from fednotes.encoders.pretrained import (
    FINGERPRINTED,
    compute_fingerprint,
    find_encoder_directory,
    open_encoder,
    silencing_library,
    write_pretrained,
)
from fednotes.taggers.pointer import encode_entities

SURFACE = ("number", "name", "abbreviation", "bracket", "long word", "phrase")
NUMBER, NAME, ABBREVIATION, BRACKET, LONG, PHRASE = range(len(SURFACE))
STOP_WORDS = frozenset(
    "a an the and or but nor not no so if than then that this these those there here of in on at "
    "to from by with without for as into onto over under after before during until since about "
    "between among through per via within against toward towards up down out off is are was were "
    "be been being am do does did done has have had having will would can could may might must "
    "shall should he she it they we you i his her hers its their our your my him them us me who "
    "whom whose which what when where why how all any both each few more most other some such "
    "only own same too very also just however while because although though yet still again once "
    "s t m d ll re ve".split()
)
_WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*|\d+(?:[.,/:]\d+)*%?|\S")
_BRACKET = re.compile(r"[(\[]([^()\[\]]{2,60})[)\]]")
_MOST_WORDS = 5  # in a phrase
_GENERATED = 1500  # sentences of each generated site
_SHORTEST_CELL = 20  # characters; a shorter CSV cell counts as a code

Mark = tuple[int, int, int]


@dataclass(frozen=True)
class Piece:
    """A sentence, or a part of one, as sub-words.

    Attributes:
        ids: (sub-words,) with begin and end marks.
        spans: The spans of surface classes.
        phrases: Each phrase as (first, last, number of its head word in `Pieces.heads`).
    """

    ids: np.ndarray
    spans: tuple[Mark, ...]
    phrases: tuple[Mark, ...]


@dataclass(frozen=True)
class Pieces:
    """The pieces of a text, in a random order that depends on the seed.

    Attributes:
        pieces: The pieces.
        heads: The head words in lower case; a word's index is its number.
        counts: (heads,) how often each head word occurs.
    """

    pieces: tuple[Piece, ...]
    heads: tuple[str, ...]
    counts: np.ndarray


def read_texts(paths: Sequence[Path], seed: int) -> tuple[list[str], list[str]]:
    """Return the texts of corpora, and the names of the corpora.

    A corpus is a file or folder that `data.formats` reads, or one of .txt and .csv files.
    Each cell of a .csv file that is too long for a code is a text. Without paths, return
    generated notes.
    """
    if paths:
        return [text for path in paths for text in _read_one(path)], [
            p.name for p in paths
        ]
    generated = generate(num_sites=3, sentences_per_site=_GENERATED, seed=seed)
    return [note.text for site in generated for note in site.data.train], ["generated"]


def _read_one(path: Path) -> list[str]:
    try:
        return [document.text for document in read(path)]
    except DataError:
        plain = list_files(path, recursive=True) if path.is_dir() else [path]
        plain = [file for file in plain if file.suffix.lower() in (".txt", ".csv")]
        if not plain:
            raise  # the error of `read`, which names the problem
    return [text for file in plain for text in _plain(file)]


def _plain(file: Path) -> list[str]:
    if file.suffix.lower() == ".txt":
        return [read_text(file, may_be_empty=True)]
    try:
        rows = list(csv.reader(read_text(file).splitlines(keepends=True)))
    except csv.Error as error:
        raise DataError(f"{file}: not a CSV file: {error}") from None
    return [
        cell
        for row in rows
        for cell in row
        if len(cell) >= _SHORTEST_CELL and " " in cell
    ]


def make_pieces(
    texts: Iterable[str],
    tokenizer: Any,
    marks: tuple[int, int],
    longest: int,
    limit: int,
    seed: int,
) -> Pieces:
    """Cut texts into different pieces of sub-words, and draw some of them.

    Args:
        texts: The texts.
        tokenizer: The tokenizer.
        marks: Ids of the begin and end marks.
        longest: Maximum number of sub-words of a piece.
        limit: Maximum number of pieces.
        seed: Seed of the draw.

    Raises:
        ConfigError: There is too little text.
    """
    sentences = dict.fromkeys(  # without repetitions, in order
        text[start:end]
        for text in texts
        for start, end in split_sentences(Document("", text))
        if end - start >= _SHORTEST_CELL
    )
    chosen = list(sentences)
    order = rng_of(seed, "graft", "pieces").permutation(len(chosen))[:limit]
    numbers: dict[str, int] = {}
    counts: Counter[int] = Counter()
    pieces: list[Piece] = []
    for sentence, coded in zip(
        (chosen[i] for i in order),
        tokenizer.encode_batch([chosen[i] for i in order], add_special_tokens=False),
        strict=True,
    ):
        marks_in_text = _spans(sentence, numbers)
        for low, high in _windows(coded.word_ids, longest - 2):
            piece = _piece(coded, low, high, marks_in_text, marks)
            pieces.append(piece)
            counts.update(head for _, _, head in piece.phrases)
    if len(pieces) < 2 or not numbers:
        raise ConfigError(
            "the text is too short to train on: two sentences of words or more"
        )
    return Pieces(
        tuple(pieces[:limit]),
        tuple(numbers),
        np.array([counts[i] for i in range(len(numbers))]),
    )


def _windows(words: Sequence[int | None], capacity: int) -> list[tuple[int, int]]:
    """Return the parts of a sentence of at most `capacity` sub-words, as (low, high).

    A part ends before the first sub-word of a word, unless the word itself is too long.
    """
    parts, low = [], 0
    while len(words) - low > capacity:
        high = low + capacity
        while high > low + 1 and words[high] == words[high - 1]:
            high -= 1
        high = high if high > low + 1 else low + capacity
        parts.append((low, high))
        low = high
    return [*parts, (low, len(words))] if low < len(words) else parts


def _piece(
    coded: Any,
    low: int,
    high: int,
    marks_in_text: Sequence[Mark],
    marks: tuple[int, int],
) -> Piece:
    """Return the sub-words low:high as a piece, with the spans that lie completely in it.

    Args:
        coded: The sentence, as the tokenizer returns it.
        low: The first sub-word.
        high: The sub-word after the last one.
        marks_in_text: The spans of the sentence in characters, as `_spans` returns them.
        marks: Ids of the begin and end marks.
    """
    ids = np.array([marks[0], *coded.ids[low:high], marks[1]], np.int64)
    starts = np.array([a for a, _ in coded.offsets[low:high]])
    ends = np.array([b for _, b in coded.offsets[low:high]])
    spans: list[Mark] = []
    phrases: list[Mark] = []
    for start, end, mark in marks_in_text:
        first, last = (
            int(np.searchsorted(starts, start)),
            int(np.searchsorted(ends, end)),
        )
        if (
            first < len(starts)
            and last < len(ends)
            and starts[first] == start
            and ends[last] == end
        ):
            target_spans = phrases if mark < 0 else spans
            target_spans.append((first + 1, last + 1, -1 - mark if mark < 0 else mark))
    return Piece(ids, tuple(spans), tuple(phrases))


def _spans(text: str, numbers: dict[str, int]) -> list[Mark]:
    """Return the spans in a sentence as (start, end, class), in characters.

    A phrase with head word h is also returned as (start, end, -1 - h).

    Args:
        text: The sentence.
        numbers: The number of each head word; new head words are added.
    """
    words = [(m.start(), m.end(), m.group()) for m in _WORD.finditer(text)]
    marks = [(m.start(1), m.end(1), BRACKET) for m in _BRACKET.finditer(text)]
    run: list[tuple[int, int, str]] = []
    for start, end, word in [*words, (len(text), len(text), ".")]:
        plain = word[0].isalpha() and word.casefold() not in STOP_WORDS
        if plain and len(run) < _MOST_WORDS:
            run.append((start, end, word))
            continue
        if run:
            head = numbers.setdefault(run[-1][2].casefold(), len(numbers))
            marks.append((run[0][0], run[-1][1], -1 - head))
            if len(run) > 1:
                marks.append((run[0][0], run[-1][1], PHRASE))
        run = [(start, end, word)] if plain else []
    for i, (start, end, word) in enumerate(words):
        if word[0].isdigit():
            marks.append((start, end, NUMBER))
        if len(word) > 1 and word.isupper() and word.isalpha():
            marks.append((start, end, ABBREVIATION))
        elif (
            i
            and word[0].isupper()
            and word[1:].islower()
            and word.casefold() not in STOP_WORDS
        ):
            if marks and marks[-1][2] == NAME and start - marks[-1][1] == 1:
                start = marks.pop()[0]  # two capitalised words in a row are one name
            marks.append((start, end, NAME))
        if len(word) >= 10 and word[0].isalpha():
            marks.append((start, end, LONG))
    return marks


def cluster(
    vectors: np.ndarray, weights: np.ndarray, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cluster unit vectors by spherical k-means.

    Args:
        vectors: (words, dim) of length 1.
        weights: (words,) how often each word occurs; its square root is the word's weight.
        count: Number of clusters.
        seed: Seed of the initial centres.

    Returns:
        The cluster of each word (words,), and the centres (count, dim).
    """
    rng = rng_of(seed, "graft", "clusters")
    strength = np.sqrt(weights)
    chosen = rng.choice(
        len(vectors), size=count, replace=False, p=strength / strength.sum()
    )
    centres = vectors[chosen]
    for _ in range(15):
        nearest = (vectors @ centres.T).argmax(1)  # (words,)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, vectors * strength[:, None])
        length = np.linalg.norm(sums, axis=1, keepdims=True)
        centres = np.where(length > 1e-9, sums / np.maximum(length, 1e-9), centres)
    return (vectors @ centres.T).argmax(1), centres


def disjoint(spans: Iterable[Mark]) -> list[Mark]:
    """Return spans that do not overlap, from left to right.

    Of overlapping spans, the leftmost is kept; of those that begin together, the longest;
    of equal spans, the one with the lowest class.
    """
    apart: list[Mark] = []
    for span in sorted(spans, key=lambda s: (s[0], -s[1], s[2])):
        if not apart or span[0] > apart[-1][1]:
            apart.append(span)
    return apart


def infill(
    ids: np.ndarray, mask: int, share: float, rng: np.random.Generator
) -> np.ndarray:
    """Return sub-words with BART's noise: masks in place of some spans.

    Args:
        ids: The sub-words with begin and end marks.
        mask: The id of the mask.
        share: Fraction of the sub-words that are masked, in spans of Poisson(3) sub-words.
            Each span becomes one mask.
        rng: Draws the spans.
    """
    inner = len(ids) - 2
    hidden = np.zeros(len(ids) + 1, bool)
    for _ in range(4 * inner):
        if hidden.sum() >= share * inner:
            break
        first = 1 + int(rng.integers(inner))
        hidden[first : min(first + max(1, int(rng.poisson(3))), len(ids) - 1)] = True
    starts = hidden & ~np.roll(hidden, 1)
    out = np.where(starts[:-1], mask, ids)
    result: np.ndarray = out[~hidden[:-1] | starts[:-1]]
    return result


PROGRESS_STEPS = 50  # between two calls of `progress`
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Schedule:
    """The settings of training.

    Attributes:
        steps: Number of steps.
        batch: Number of pieces in a step.
        pool: Maximum number of pieces.
        learning_rate: The largest learning rate.
        warm_up: Fraction of the steps over which the learning rate rises.
        listing: Fraction of the steps that list; the others denoise.
        kinds: Number of clusters of head words.
        masked: Fraction of the sub-words that denoising masks.
        negatives: Number of other pieces, whose sub-words are candidates in denoising, too.
        held_out: Maximum number of pieces that are held out.
    """

    steps: int = 2500
    batch: int = 16
    pool: int = 12_000
    learning_rate: float = 1e-3
    warm_up: float = 0.1
    listing: float = 0.8
    kinds: int = 64
    masked: float = 0.3
    negatives: int = 48
    held_out: int = 96


@dataclass(frozen=True)
class Measured:
    """The quality of a decoder on held-out pieces.

    Attributes:
        listing: Mean cross-entropy of a target in listing.
        denoising: Mean cross-entropy of a target in denoising.
        right: Fraction of the targets in listing whose best candidate is right.
    """

    listing: float
    denoising: float
    right: float


@dataclass(frozen=True)
class Classes:
    """The classes that can be listed.

    Attributes:
        names: The word that names each class.
        spans: The spans of each piece, with the numbers of classes.
        labels: (words, width) embeddings of the words that may name a class. The first ones
            are those of `names`.
    """

    names: tuple[str, ...]
    spans: tuple[tuple[Mark, ...], ...]
    labels: Tensor


@dataclass(frozen=True)
class Rows:
    """A batch of the objective listing.

    Attributes:
        ids: (batch, sub-words).
        mask: (batch, sub-words).
        class_numbers: (batch, classes) numbers of the classes to list.
        called: (batch, classes) numbers of the words that name them.
        words: (labels,) numbers of all words that name a class in the batch.
        targets: (batch, steps) candidates: 0 is the end; then come `words`, then the
            sub-words of the text. -1 is padding.
    """

    ids: Tensor
    mask: Tensor
    class_numbers: Tensor
    called: Tensor
    words: Tensor
    targets: Tensor


def train_decoder(
    model: Any,
    pieces: Pieces,
    tokenizer: Any,
    schedule: Schedule,
    seed: int,
    progress: Progress | None = None,
) -> tuple[Measured, Measured]:
    """Train the decoder of a BartModel in place.

    Returns:
        Its quality on held-out pieces, before and after.
    """
    classes = make_classes(model, pieces, tokenizer, schedule.kinds, seed)
    trainer = _Trainer(
        model, pieces, classes, int(tokenizer.mask_token_id), schedule, seed
    )
    before = trainer.measure()
    trainer.run(progress)
    return before, trainer.measure()


@torch.no_grad()
def make_classes(
    model: Any, pieces: Pieces, tokenizer: Any, kinds: int, seed: int
) -> Classes:
    """Return the surface classes, and clusters of the head words that occur at least twice."""
    table = model.shared.weight
    long = np.array([len(head) > 2 for head in pieces.heads])
    frequent = np.flatnonzero((pieces.counts > 1) & long)
    kinds = min(kinds, len(frequent) // 4)
    words, spans = [*SURFACE], [list(piece.spans) for piece in pieces.pieces]
    heads = [_meant(table, tokenizer, pieces.heads[i]) for i in frequent]
    if kinds:
        means = torch.stack(heads)
        vectors = F.normalize(means - means.mean(0), dim=1).double().numpy()
        cluster_of, centres = cluster(vectors, pieces.counts[frequent], kinds, seed)
        words += [pieces.heads[frequent[i]] for i in (vectors @ centres.T).argmax(0)]
        kind = np.full(len(pieces.heads), -1)  # of each head word
        kind[frequent] = len(SURFACE) + cluster_of
        for class_spans, piece in zip(spans, pieces.pieces, strict=True):
            class_spans += [
                (a, b, int(kind[h])) for a, b, h in piece.phrases if kind[h] >= 0
            ]
    named = [_meant(table, tokenizer, word) for word in words]
    return Classes(tuple(words), tuple(map(tuple, spans)), torch.stack(named + heads))


def _meant(table: Tensor, tokenizer: Any, word: str) -> Tensor:
    """Return the mean embedding (width,) of a word's sub-words."""
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    return table[torch.tensor(ids or [tokenizer.unk_token_id])].mean(0)


class _Trainer:
    """Trains the decoder.

    Batches depend only on the seed, so runs on one thread are bit-identical.
    """

    def __init__(
        self,
        model: Any,
        pieces: Pieces,
        classes: Classes,
        mask: int,
        schedule: Schedule,
        seed: int,
    ) -> None:
        self.model, self.classes, self.schedule, self.seed = (
            model,
            classes,
            schedule,
            seed,
        )
        self.ids = [piece.ids for piece in pieces.pieces]
        self.mask_id, self.pad = mask, int(model.config.pad_token_id)
        self.states: dict[int, Tensor] = {}
        held_out = max(1, min(schedule.held_out, len(self.ids) // 10))
        self.held_out, self.train = (
            np.arange(held_out),
            np.arange(held_out, len(self.ids)),
        )
        # Without dropout, because no sentence is seen often.
        model.requires_grad_(False).eval()
        trained = [
            p
            for n, p in model.decoder.named_parameters()
            if not n.startswith("embed_tokens")
        ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, "graft", "classes"))
            width = model.config.d_model
            self.class_states = nn.Parameter(
                0.02 * torch.randn(len(classes.names), width)
            )
        self.parameters = [
            *(p.requires_grad_(True) for p in trained),
            self.class_states,
        ]

    def run(self, progress: Progress | None) -> None:
        """Train for all steps."""
        steps, rng = self.schedule.steps, rng_of(self.seed, "graft", "steps")
        optimizer = torch.optim.AdamW(self.parameters, lr=self.schedule.learning_rate)
        warm = max(1.0, self.schedule.warm_up * steps)
        batches = self._batches(rng)
        for step in range(steps):
            rate = min((step + 1) / warm, (steps - step) / max(1.0, steps - warm))
            optimizer.param_groups[0]["lr"] = self.schedule.learning_rate * rate
            lists = rng.random() < self.schedule.listing
            chosen = next(batches)
            loss, _ = (
                self.listing(chosen, rng) if lists else self.denoising(chosen, rng)
            )
            optimizer.zero_grad(set_to_none=True)
            loss.mean().backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            optimizer.step()
            if progress is not None and (
                (step + 1) % PROGRESS_STEPS == 0 or step + 1 == steps
            ):
                progress(step + 1, steps)
        self.model.requires_grad_(False)

    def _batches(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Yield batches of pieces of similar length, without end."""
        size = self.schedule.batch
        while True:
            order = rng.permutation(self.train)
            for start in range(0, len(order), 8 * size):
                window = order[start : start + 8 * size]
                window = window[
                    np.argsort([len(self.ids[i]) for i in window], kind="stable")
                ]
                parts = [window[at : at + size] for at in range(0, len(window), size)]
                yield from (parts[i] for i in rng.permutation(len(parts)))

    @torch.no_grad()
    def measure(self) -> Measured:
        """Measure both losses on the held-out pieces, with the same tasks and noise each time."""
        rng = rng_of(self.seed, "graft", "held out")
        size = self.schedule.batch
        parts = [
            self.held_out[at : at + size] for at in range(0, len(self.held_out), size)
        ]
        listed = [self.listing(part, rng) for part in parts for _ in range(2)]
        restored = [self.denoising(part, rng) for part in parts]
        return Measured(
            float(torch.cat([loss for loss, _ in listed]).mean()),
            float(torch.cat([loss for loss, _ in restored]).mean()),
            float(torch.cat([right for _, right in listed]).float().mean()),
        )

    def listing(
        self, chosen: Sequence[int] | np.ndarray, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of each target, and whether its best candidate is right.

        Both are (targets,).
        """
        rows = make_rows(self.ids, self.classes, chosen, self.pad, rng)
        model, table = self.model, self.model.shared.weight
        states = self._remembered(chosen, rows)  # (batch, sub-words with marks, width)
        sources = table[rows.ids[:, 1:]]
        marks = torch.stack(
            [table[model.config.eos_token_id], *self.classes.labels[rows.words]]
        )
        marks = marks.expand(len(chosen), -1, -1)  # (batch, 1 + labels, width)
        start = table[model.config.decoder_start_token_id].expand(len(chosen), 1, -1)
        before = rows.targets[:, :-1].clamp(min=0)
        inputs = torch.cat([start, _take(torch.cat([marks, sources], 1), before)], 1)
        # (batch, classes, width)
        class_states = (
            self.class_states[rows.class_numbers] + self.classes.labels[rows.called]
        )
        hidden = decode(
            model, inputs, states, rows.mask, class_states
        )  # (batch, steps, width)
        candidates = torch.cat([marks, (states[:, 1:] + sources) / 2], 1)
        scores = hidden @ candidates.transpose(1, 2)  # (batch, steps, candidates)
        text = rows.mask[:, 1:].bool() & (rows.ids[:, 1:] != model.config.eos_token_id)
        allowed = F.pad(text, (marks.shape[1], 0), value=True)
        scores = scores.masked_fill(~allowed[:, None], -torch.inf)
        used = rows.targets >= 0
        scores, expected = scores[used], rows.targets[used]
        return F.cross_entropy(scores, expected, reduction="none"), scores.argmax(
            1
        ) == expected

    def denoising(
        self, chosen: Sequence[int] | np.ndarray, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the same as `listing`; the targets are the sub-words after the begin mark."""
        noisy = [
            infill(self.ids[i], self.mask_id, self.schedule.masked, rng) for i in chosen
        ]
        source, mask = padded(noisy, self.pad)
        sequences, known = padded([self.ids[i] for i in chosen], self.pad)
        others = rng.integers(len(self.ids), size=self.schedule.negatives)
        pool = np.unique(np.concatenate([self.ids[i] for i in [*chosen, *others]]))
        table = self.model.shared.weight
        hidden = decode(
            self.model, table[sequences[:, :-1]], self._encode(source, mask), mask, None
        )
        used = known[:, 1:].bool()
        scores = hidden[used] @ table[torch.from_numpy(pool)].T  # (targets, candidates)
        expected = torch.from_numpy(
            np.searchsorted(pool, sequences[:, 1:][used].numpy())
        )
        return F.cross_entropy(scores, expected, reduction="none"), scores.argmax(
            1
        ) == expected

    def _remembered(self, chosen: Sequence[int] | np.ndarray, rows: Rows) -> Tensor:
        """Return the encoder's states (batch, sub-words, width) of pieces, each computed once."""
        missing = [n for n, i in enumerate(chosen) if int(i) not in self.states]
        if missing:
            fresh = self._encode(rows.ids[missing], rows.mask[missing])
            for n, state in zip(missing, fresh, strict=True):
                piece = int(chosen[n])
                self.states[piece] = state[: len(self.ids[piece])].half()
        known = [self.states[int(i)].float() for i in chosen]
        return nn.utils.rnn.pad_sequence(known, batch_first=True)

    @torch.no_grad()
    def _encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the encoder's last hidden states."""
        states: Tensor = self.model.encoder(
            input_ids=ids, attention_mask=mask
        ).last_hidden_state
        return states


def make_rows(
    ids: Sequence[np.ndarray],
    classes: Classes,
    chosen: Sequence[int] | np.ndarray,
    pad: int,
    rng: np.random.Generator,
) -> Rows:
    """Draw one to four classes to list for each piece, and a word that names each class."""
    count = min(int(rng.integers(1, 5)), len(classes.names))
    class_numbers, called, listed = [], [], []
    for i in chosen:
        classes_shown = _some_classes(
            [s[2] for s in classes.spans[i]], count, len(classes.names), rng
        )
        words = [
            c if rng.random() < 0.5 else int(rng.integers(len(classes.labels)))
            for c in classes_shown
        ]
        words = words if len(set(words)) == count else classes_shown
        class_numbers.append(classes_shown)
        called.append(words)
        name = dict(zip(classes_shown, words, strict=True))
        listed.append(
            [
                (a, b, name[c])
                for a, b, c in disjoint(s for s in classes.spans[i] if s[2] in name)
            ]
        )
    words_used = np.unique(np.array(called))
    place = {int(word): n for n, word in enumerate(words_used)}
    # `encode_entities` also numbers BEGIN and PAD, which are not candidates here, and
    # its positions do not count the begin mark.
    targets = [
        np.maximum(
            encode_entities(
                np.array([(a - 1, b - 1, place[w]) for a, b, w in row]), len(place)
            )
            - 2,
            0,
        )
        for row in listed
    ]
    source, mask = padded([ids[i] for i in chosen], pad)
    return Rows(
        source,
        mask,
        torch.tensor(class_numbers),
        torch.tensor(called),
        torch.from_numpy(words_used),
        padded(targets, -1)[0],
    )


def _some_classes(
    present: Sequence[int], count: int, known: int, rng: np.random.Generator
) -> list[int]:
    """Draw different classes, most of them among those that are present.

    Rare classes are drawn as often as common ones.

    Args:
        present: The classes of the piece's spans.
        count: Number of classes to draw.
        known: Number of all classes.
        rng: Draws them.
    """
    present_classes = rng.permutation(np.unique(np.array(present, np.int64))).tolist()
    classes_drawn: list[int] = []
    while len(classes_drawn) < count:
        candidate = (
            present_classes.pop()
            if present_classes and rng.random() < 0.7
            else int(rng.integers(known))
        )
        if candidate not in classes_drawn:
            classes_drawn.append(candidate)
    return classes_drawn


def padded(rows: Sequence[np.ndarray], pad: int) -> tuple[Tensor, Tensor]:
    """Return padded ids and their mask, both (rows, longest) int64."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for n, row in enumerate(rows):
        ids[n, : len(row)] = torch.from_numpy(row)
        mask[n, : len(row)] = 1
    return ids, mask


def _take(candidates: Tensor, index: Tensor) -> Tensor:
    """Return the candidates (batch, candidates, width) at an index (batch, steps)."""
    return candidates.gather(1, index[..., None].expand(-1, -1, candidates.shape[-1]))


def decode(
    model: Any,
    inputs: Tensor,
    states: Tensor,
    mask: Tensor,
    class_states: Tensor | None,
) -> Tensor:
    """Return the decoder's last hidden states (batch, steps, width).

    Args:
        model: The BartModel.
        inputs: (batch, steps, width) embeddings without positions.
        states: The encoder's states.
        mask: The mask of the encoder's input.
        class_states: (batch, classes, width) or None. Their keys and values are added to
            those of each self-attention, without a position. The library counts them as
            earlier positions, so the difference is subtracted from `inputs`.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    decoder, cache = model.decoder, None
    if class_states is not None:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        normed = decoder.layernorm_embedding(class_states)
        for number, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            shape = (*class_states.shape[:2], attention.num_heads, attention.head_dim)
            key, value = (
                p(normed).view(shape).transpose(1, 2)
                for p in (attention.k_proj, attention.v_proj)
            )
            cache.self_attention_cache.update(key, value, number)
        positions = decoder.embed_positions.weight[decoder.embed_positions.offset :]
        steps, count = inputs.shape[1], class_states.shape[1]
        inputs = inputs + positions[:steps] - positions[count : count + steps]
    hidden: Tensor = decoder(
        inputs_embeds=inputs,
        encoder_hidden_states=states,
        encoder_attention_mask=mask,
        use_cache=cache is not None,
        **{find_cache_keyword(decoder): cache},
    ).last_hidden_state
    return hidden


LONGEST = 64  # sub-words of a training piece, including the two marks
FACTS = "graft.json"


def graft(
    encoder: str | Path,
    out: Path,
    *,
    decoder_layers: int = 2,
    texts: Sequence[str],
    seed: int = 0,
    sources: Sequence[str] = (),
    schedule: Schedule = Schedule(),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build a BART directory from a BERT directory, and train its decoder.

    The same arguments give the same files on one thread.

    Args:
        encoder: "minilm", or a BERT directory.
        out: An empty or new folder, or an earlier graft, which is replaced.
        decoder_layers: Number of layers of the decoder.
        texts: The texts to train on.
        seed: Seed of all random choices.
        sources: Names of the corpora, which are recorded.
        schedule: The settings of training.
        progress: Is called with the number of steps that are done, and of all.

    Returns:
        The measurements, and the facts that `graft.json` holds.

    Raises:
        ModelError: The directory is not a BERT.
        ConfigError: A setting is impossible, there is too little text, or `out` holds
            something else.
    """
    if decoder_layers < 1 or schedule.steps < 0 or schedule.batch < 1:
        raise ConfigError(
            "a graft needs at least one decoder layer, no negative number of steps, and "
            "at least one piece in a batch"
        )
    if (
        out.exists()
        and not (out / FACTS).is_file()
        and (out.is_file() or any(out.iterdir()))
    ):
        raise ConfigError(
            f"{out}: has files that do not belong to a graft: give a new folder"
        )
    directory = find_encoder_directory(str(encoder))
    bert, tokenizer = _open_bert(directory)
    marks = (int(tokenizer.cls_token_id), int(tokenizer.sep_token_id))
    longest = min(LONGEST, bert.config.max_position_embeddings)
    pieces = make_pieces(
        texts, tokenizer.backend_tokenizer, marks, longest, schedule.pool, seed
    )
    model = bart_of(bert, tokenizer, decoder_layers)
    difference = encoder_difference(model, bert, pieces)
    started = time.monotonic()
    before, after = train_decoder(model, pieces, tokenizer, schedule, seed, progress)
    facts = {
        "encoder": {
            "name": "minilm" if str(encoder) == "minilm" else directory.name,
            "fingerprint": compute_fingerprint(
                {file for form in FINGERPRINTED for file in directory.glob(form)},
                kind="graft",
            ),
        },
        "decoder_layers": decoder_layers,
        "seed": seed,
        "schedule": asdict(schedule),
        "objectives": ["denoising", "listing"],
        "text": {"sources": list(sources), "pieces": len(pieces.pieces)},
        "encoder_difference": difference,
        "before": asdict(before),
        "after": asdict(after),
    }

    def fill(folder: Path) -> None:
        write_pretrained(folder, model, tokenizer)
        (folder / FACTS).write_text(
            json.dumps(facts, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )
        # The library made these files readable for their owner only.
        for weights in folder.glob("*.safetensors"):
            weights.chmod((folder / FACTS).stat().st_mode)

    write_folder(out, fill, private=False)
    named = {name: p.numel() for name, p in model.named_parameters()}
    return facts | {
        "seconds": time.monotonic() - started,
        "parameters": sum(named.values()),
        "decoder_parameters": sum(
            n for name, n in named.items() if name.startswith("decoder.")
        ),
    }


def main() -> int:
    about = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    about.add_argument(
        "out", type=Path, help="new folder, in Hugging Face's BART layout"
    )
    about.add_argument(
        "--text",
        type=Path,
        action="append",
        default=[],
        help="public text; may be repeated; generated notes by default",
    )
    about.add_argument("--encoder", default="minilm", help="minilm or a BERT directory")
    about.add_argument("--layers", type=int, default=2, help="layers of the decoder")
    about.add_argument(
        "--steps", type=int, default=Schedule.steps, help="training steps"
    )
    about.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed; the same seed gives the same backbone",
    )
    arguments = about.parse_args()
    try:
        texts, names = read_texts(arguments.text, arguments.seed)
        facts = graft(
            arguments.encoder, arguments.out, texts=texts, seed=arguments.seed, sources=names,
            decoder_layers=arguments.layers, schedule=Schedule(steps=arguments.steps),
            progress=lambda done, total: print(f"step {done} of {total}", file=sys.stderr),
        )  # fmt: skip
    except FednotesError as error:
        print(error, file=sys.stderr)
        return 2
    before, after = facts["before"], facts["after"]
    print(
        f"encoder: differs from the original by at most {facts['encoder_difference']:.1e}"
    )
    print(
        f"held-out loss per target: listing {before['listing']:.3f} → {after['listing']:.3f}, "
        f"denoising {before['denoising']:.3f} → {after['denoising']:.3f}; "
        f"best candidate right in listing {before['right']:.1%} → {after['right']:.1%}"
    )
    print(
        f"decoder trained for {facts['seconds']:.0f} s on {facts['text']['pieces']:,} pieces; "
        f"{facts['parameters']:,} parameters, of which {facts['decoder_parameters']:,} are the decoder's"
    )
    print(f'in a job: [model] kind = "prompt-bart", backbone = "{arguments.out}"')
    return 0


@torch.no_grad()
def bart_of(bert: Any, tokenizer: Any, decoder_layers: int) -> Any:
    """Return a BartModel whose encoder computes the same as a BertModel; see the module."""
    from transformers import BartModel

    with torch.random.fork_rng(devices=[]), silencing_library():
        model = BartModel(_bart_config(bert.config, tokenizer, decoder_layers)).eval()
    set_layer_norm_eps(model)
    source = bert.state_dict()
    table = source["embeddings.word_embeddings.weight"]
    positions = source["embeddings.position_embeddings.weight"]
    positions = positions + source["embeddings.token_type_embeddings.weight"][0]
    state: dict[str, Tensor] = {"shared.weight": table}
    for side in ("encoder", "decoder"):
        state[f"{side}.embed_tokens.weight"] = table
        state[f"{side}.embed_positions.weight"] = nn.functional.pad(
            positions, (0, 0, 2, 0)
        )
        for kind in ("weight", "bias"):
            norm = source[f"embeddings.LayerNorm.{kind}"]
            state[f"{side}.layernorm_embedding.{kind}"] = norm
    encoder_layers = bert.config.num_hidden_layers
    for number in range(encoder_layers):
        state |= _layer(source, number, f"encoder.layers.{number}", cross=False)
    for number in range(decoder_layers):
        upper = max(0, encoder_layers - decoder_layers) + number
        upper = min(upper, encoder_layers - 1)
        state |= _layer(source, upper, f"decoder.layers.{number}", cross=True)
    # Loading is strict: each tensor of the model must be in `state`.
    model.load_state_dict(state)
    return model


_PARTS = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}


def _layer(
    source: dict[str, Tensor], number: int, name: str, cross: bool
) -> dict[str, Tensor]:
    """Return the tensors of a BERT layer under BART's names.

    Args:
        source: The tensors of the BertModel.
        number: The layer.
        name: The layer's name in BART.
        cross: Whether to copy the self-attention as cross-attention, too.
    """
    parts = [*_PARTS.items()]
    if cross:
        self_attention = [
            (bert_name, bart_name)
            for bert_name, bart_name in parts
            if bart_name.startswith("self_attn")
        ]
        parts += [
            (bert_name, bart_name.replace("self_attn", "encoder_attn"))
            for bert_name, bart_name in self_attention
        ]
    return {
        f"{name}.{bart_name}.{kind}": source[
            f"encoder.layer.{number}.{bert_name}.{kind}"
        ]
        for bert_name, bart_name in parts
        for kind in ("weight", "bias")
    }


def _bart_config(bert: Any, tokenizer: Any, decoder_layers: int) -> Any:
    from transformers import BartConfig

    heads, ffn = bert.num_attention_heads, bert.intermediate_size
    return BartConfig(
        vocab_size=bert.vocab_size,
        d_model=bert.hidden_size,
        max_position_embeddings=bert.max_position_embeddings,
        encoder_layers=bert.num_hidden_layers,
        encoder_attention_heads=heads,
        encoder_ffn_dim=ffn,
        decoder_layers=decoder_layers,
        decoder_attention_heads=heads,
        decoder_ffn_dim=ffn,
        activation_function=bert.hidden_act,
        dropout=bert.hidden_dropout_prob,
        attention_dropout=bert.attention_probs_dropout_prob,
        init_std=bert.initializer_range,
        pad_token_id=int(tokenizer.pad_token_id),
        bos_token_id=int(tokenizer.cls_token_id),
        eos_token_id=int(tokenizer.sep_token_id),
        decoder_start_token_id=int(tokenizer.cls_token_id),
        forced_eos_token_id=None,
        layer_norm_eps=bert.layer_norm_eps,
    )


@torch.no_grad()
def encoder_difference(model: Any, bert: Any, pieces: Pieces) -> float:
    """Return the largest absolute difference of the last hidden states on a batch of text."""
    ids, mask = padded(
        [piece.ids for piece in pieces.pieces[:16]], int(model.config.pad_token_id)
    )
    ours = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    theirs = bert(input_ids=ids, attention_mask=mask).last_hidden_state
    return float((ours - theirs)[mask.bool()].abs().max())


def _open_bert(directory: Path) -> tuple[Any, Any]:
    """Return a BertModel and its tokenizer.

    Raises:
        ModelError: The directory has another model, or the tokenizer lacks a special token.
    """
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory}: has no config.json: give a BERT directory")
    tokenizer, bert = open_encoder(directory, "cpu")
    kind = getattr(bert.config, "model_type", None)
    if (
        kind != "bert"
        or getattr(bert.config, "position_embedding_type", "absolute") != "absolute"
    ):
        raise ModelError(
            f"{directory}: is a {kind} model: give a BERT with learnt positions"
        )
    marks = ("cls", "sep", "pad", "mask", "unk")
    lacking = [m for m in marks if getattr(tokenizer, f"{m}_token_id", None) is None]
    if lacking:
        raise ModelError(
            f"{directory}: the tokenizer has no [{lacking[0].upper()}]: give another "
            "BERT directory"
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return bert, tokenizer


if __name__ == "__main__":
    raise SystemExit(main())
