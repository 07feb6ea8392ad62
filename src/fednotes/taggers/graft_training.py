"""Training of a grafted decoder on public text; the encoder and the shared table stay frozen.

Two objectives, a step of either:

denoising   BART's (Lewis et al. 2020): spans of the source are masked, the original is
            predicted through the tied embeddings. The softmax runs over the pieces of the batch
            and of some other sentences, because the whole table is most of the cost.
listing     the target of `taggers/pointer.py`: [first, last, type] of each span, then the end,
            scored as there: label words and the end mark against their embeddings, positions
            against (encoder output + token embedding) / 2.

A decoder that is to be steered by prompts has to be one that prompts steer. So what a sentence
lists differs from row to row: some classes of `graft_tasks`, and each class is told to the
decoder as one key and value joined to those of each self-attention, where prompt tuning will put
its own. They are the decoder's projections of (a vector of the class + the embedding of the word
that names it this time), and half of the time that word is any word: the type's token has to be
read off the prompt, not learnt by heart. The classes' vectors are thrown away in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.seeds import rng_of, seed_of
from fednotes.taggers.graft_tasks import SURFACE, Mark, Pieces, cluster, disjoint, infill
from fednotes.taggers.pointer import encode_entities

TOLD = 50  # steps between two calls of `progress`
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Schedule:
    """batch: pieces a step. listing: share of the steps that list; the others denoise.

    pool: pieces at most; a piece is listed again and again, each time other classes of it, and
    what the frozen encoder says of it is kept (half precision, 23 kB a piece of MiniLM's).
    kinds: clusters of head words. masked: share of the sub-words that denoising hides.
    negatives: other pieces whose sub-words denoising has to rule out.
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
    """On held-out pieces: mean cross-entropy a target of each objective, and the share of
    listing's targets whose best candidate is the right one."""

    listing: float
    denoising: float
    right: float


@dataclass(frozen=True)
class Classes:
    """What can be listed. spans: of each piece, with class numbers. labels: (words, width)
    embeddings of words that may name a class; the first ones name their own."""

    names: tuple[str, ...]
    spans: tuple[tuple[Mark, ...], ...]
    labels: Tensor


@dataclass(frozen=True)
class Rows:
    """A batch that lists. ids, mask: (batch, sub-words). told: (batch, told) class numbers, and
    called: the numbers of their label words. words: (labels,) numbers of all label words of the
    batch. targets: (batch, steps) candidates: 0 the end, then `words`, then the sub-words of the
    text; -1 none."""

    ids: Tensor
    mask: Tensor
    told: Tensor
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
    """Train the decoder of a BartModel in place: held-out losses before and after.

    tokenizer: the Hugging Face tokenizer of the model. The global random state is left alone.
    """
    classes = make_classes(model, pieces, tokenizer, schedule.kinds, seed)
    trainer = _Trainer(model, pieces, classes, int(tokenizer.mask_token_id), schedule, seed)
    before = trainer.measure()
    trainer.run(progress)
    return before, trainer.measure()


@torch.no_grad()
def make_classes(model: Any, pieces: Pieces, tokenizer: Any, kinds: int, seed: int) -> Classes:
    """Surface classes, and clusters of the head words that occur twice or more."""
    table = model.shared.weight
    long = np.array([len(head) > 2 for head in pieces.heads])
    frequent = np.flatnonzero((pieces.counts > 1) & long)
    kinds = min(kinds, len(frequent) // 4)
    words, spans = [*SURFACE], [list(piece.spans) for piece in pieces.pieces]
    heads = [_meant(table, tokenizer, pieces.heads[i]) for i in frequent]
    if kinds:
        means = torch.stack(heads)
        vectors = F.normalize(means - means.mean(0), dim=1).double().numpy()
        of, centres = cluster(vectors, pieces.counts[frequent], kinds, seed)
        words += [pieces.heads[frequent[i]] for i in (vectors @ centres.T).argmax(0)]
        kind = np.full(len(pieces.heads), -1)  # of each head word
        kind[frequent] = len(SURFACE) + of
        for own, piece in zip(spans, pieces.pieces, strict=True):
            own += [(a, b, int(kind[h])) for a, b, h in piece.phrases if kind[h] >= 0]
    named = [_meant(table, tokenizer, word) for word in words]
    return Classes(tuple(words), tuple(map(tuple, spans)), torch.stack(named + heads))


def _meant(table: Tensor, tokenizer: Any, word: str) -> Tensor:
    """The mean of the embeddings of a word's sub-words: (width,)."""
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    return table[torch.tensor(ids or [tokenizer.unk_token_id])].mean(0)


class _Trainer:
    """The loop. Batches come from the seed, so a run repeats to the bit on one thread."""

    def __init__(
        self, model: Any, pieces: Pieces, classes: Classes, mask: int, schedule: Schedule, seed: int
    ) -> None:
        self.model, self.classes, self.schedule, self.seed = model, classes, schedule, seed
        self.ids = [piece.ids for piece in pieces.pieces]
        self.mask_id, self.pad = mask, int(model.config.pad_token_id)
        self.states: dict[int, Tensor] = {}
        held = max(1, min(schedule.held_out, len(self.ids) // 10))
        self.held, self.train = np.arange(held), np.arange(held, len(self.ids))
        model.requires_grad_(False).eval()  # without dropout: no sentence is seen often
        own = [p for n, p in model.decoder.named_parameters() if not n.startswith("embed_tokens")]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, "graft", "classes"))
            width = model.config.d_model
            self.told = nn.Parameter(0.02 * torch.randn(len(classes.names), width))
        self.parameters = [*(p.requires_grad_(True) for p in own), self.told]

    def run(self, progress: Progress | None) -> None:
        steps, rng = self.schedule.steps, rng_of(self.seed, "graft", "steps")
        optimizer = torch.optim.AdamW(self.parameters, lr=self.schedule.learning_rate)
        warm = max(1.0, self.schedule.warm_up * steps)
        batches = self._batches(rng)
        for step in range(steps):
            rate = min((step + 1) / warm, (steps - step) / max(1.0, steps - warm))
            optimizer.param_groups[0]["lr"] = self.schedule.learning_rate * rate
            lists = rng.random() < self.schedule.listing
            chosen = next(batches)
            loss, _ = self.listing(chosen, rng) if lists else self.denoising(chosen, rng)
            optimizer.zero_grad(set_to_none=True)
            loss.mean().backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            optimizer.step()
            if progress is not None and ((step + 1) % TOLD == 0 or step + 1 == steps):
                progress(step + 1, steps)
        self.model.requires_grad_(False)

    def _batches(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Pieces of like length, for ever."""
        size = self.schedule.batch
        while True:
            order = rng.permutation(self.train)
            for start in range(0, len(order), 8 * size):
                some = order[start : start + 8 * size]
                some = some[np.argsort([len(self.ids[i]) for i in some], kind="stable")]
                parts = [some[at : at + size] for at in range(0, len(some), size)]
                yield from (parts[i] for i in rng.permutation(len(parts)))

    @torch.no_grad()
    def measure(self) -> Measured:
        """Both losses on the held-out pieces, whose tasks and noise are the same each time."""
        rng = rng_of(self.seed, "graft", "held out")
        size = self.schedule.batch
        parts = [self.held[at : at + size] for at in range(0, len(self.held), size)]
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
        """(targets,) cross-entropy and whether the best candidate is right."""
        rows = make_rows(self.ids, self.classes, chosen, self.pad, rng)
        model, table = self.model, self.model.shared.weight
        states = self._remembered(chosen, rows)  # (batch, sub-words with marks, width)
        sources = table[rows.ids[:, 1:]]
        marks = torch.stack([table[model.config.eos_token_id], *self.classes.labels[rows.words]])
        marks = marks.expand(len(chosen), -1, -1)  # (batch, 1 + labels, width)
        start = table[model.config.decoder_start_token_id].expand(len(chosen), 1, -1)
        before = rows.targets[:, :-1].clamp(min=0)
        inputs = torch.cat([start, _take(torch.cat([marks, sources], 1), before)], 1)
        told = self.told[rows.told] + self.classes.labels[rows.called]  # (batch, told, width)
        hidden = decode(model, inputs, states, rows.mask, told)  # (batch, steps, width)
        candidates = torch.cat([marks, (states[:, 1:] + sources) / 2], 1)
        scores = hidden @ candidates.transpose(1, 2)  # (batch, steps, candidates)
        text = rows.mask[:, 1:].bool() & (rows.ids[:, 1:] != model.config.eos_token_id)
        allowed = F.pad(text, (marks.shape[1], 0), value=True)
        scores = scores.masked_fill(~allowed[:, None], -torch.inf)
        used = rows.targets >= 0
        scores, wanted = scores[used], rows.targets[used]
        return F.cross_entropy(scores, wanted, reduction="none"), scores.argmax(1) == wanted

    def denoising(
        self, chosen: Sequence[int] | np.ndarray, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """As `listing`, of the sub-words behind the begin mark."""
        noisy = [infill(self.ids[i], self.mask_id, self.schedule.masked, rng) for i in chosen]
        source, mask = padded(noisy, self.pad)
        whole, known = padded([self.ids[i] for i in chosen], self.pad)
        others = rng.integers(len(self.ids), size=self.schedule.negatives)
        pool = np.unique(np.concatenate([self.ids[i] for i in [*chosen, *others]]))
        table = self.model.shared.weight
        hidden = decode(self.model, table[whole[:, :-1]], self._encode(source, mask), mask, None)
        used = known[:, 1:].bool()
        scores = hidden[used] @ table[torch.from_numpy(pool)].T  # (targets, candidates)
        wanted = torch.from_numpy(np.searchsorted(pool, whole[:, 1:][used].numpy()))
        return F.cross_entropy(scores, wanted, reduction="none"), scores.argmax(1) == wanted

    def _remembered(self, chosen: Sequence[int] | np.ndarray, rows: Rows) -> Tensor:
        """The encoder's states of whole pieces, computed once: (batch, sub-words, width)."""
        new = [n for n, i in enumerate(chosen) if int(i) not in self.states]
        if new:
            fresh = self._encode(rows.ids[new], rows.mask[new])
            for n, state in zip(new, fresh, strict=True):
                piece = int(chosen[n])
                self.states[piece] = state[: len(self.ids[piece])].half()
        known = [self.states[int(i)].float() for i in chosen]
        return nn.utils.rnn.pad_sequence(known, batch_first=True)

    @torch.no_grad()
    def _encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self.model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return states


def make_rows(
    ids: Sequence[np.ndarray],
    classes: Classes,
    chosen: Sequence[int] | np.ndarray,
    pad: int,
    rng: np.random.Generator,
) -> Rows:
    """Draw for each piece one to four classes to list, and a word that names each."""
    count = min(int(rng.integers(1, 5)), len(classes.names))
    told, called, listed = [], [], []
    for i in chosen:
        some = _some_classes([s[2] for s in classes.spans[i]], count, len(classes.names), rng)
        words = [c if rng.random() < 0.5 else int(rng.integers(len(classes.labels))) for c in some]
        words = words if len(set(words)) == count else some
        told.append(some)
        called.append(words)
        name = dict(zip(some, words, strict=True))
        listed.append(
            [(a, b, name[c]) for a, b, c in disjoint(s for s in classes.spans[i] if s[2] in name)]
        )
    words_used = np.unique(np.array(called))
    place = {int(word): n for n, word in enumerate(words_used)}
    # pointer.py's ids without BEGIN and PAD; its positions do not count the begin mark.
    targets = [
        np.maximum(
            encode_entities(np.array([(a - 1, b - 1, place[w]) for a, b, w in row]), len(place))
            - 2,
            0,
        )
        for row in listed
    ]
    source, mask = padded([ids[i] for i in chosen], pad)
    return Rows(
        source,
        mask,
        torch.tensor(told),
        torch.tensor(called),
        torch.from_numpy(words_used),
        padded(targets, -1)[0],
    )


def _some_classes(
    present: Sequence[int], count: int, known: int, rng: np.random.Generator
) -> list[int]:
    """Different classes, mostly of those present; rare ones as likely as common ones."""
    here = rng.permutation(np.unique(np.array(present, np.int64))).tolist()
    some: list[int] = []
    while len(some) < count:
        new = here.pop() if here and rng.random() < 0.7 else int(rng.integers(known))
        if new not in some:
            some.append(new)
    return some


def padded(rows: Sequence[np.ndarray], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, both (rows, longest) int64."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for n, row in enumerate(rows):
        ids[n, : len(row)] = torch.from_numpy(row)
        mask[n, : len(row)] = 1
    return ids, mask


def _take(candidates: Tensor, index: Tensor) -> Tensor:
    """(batch, candidates, width) at (batch, steps) → (batch, steps, width)."""
    return candidates.gather(1, index[..., None].expand(-1, -1, candidates.shape[-1]))


def decode(model: Any, inputs: Tensor, states: Tensor, mask: Tensor, told: Tensor | None) -> Tensor:
    """The decoder's last hidden states: (batch, steps, width).

    inputs: (batch, steps, width) embeddings without positions. told: (batch, told, width)
    embeddings whose keys and values are joined to every self-attention's; they take no
    position. The library's cache counts them as positions before the first one: what it adds
    to `inputs` too much is taken off beforehand.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    decoder, cache = model.decoder, None
    if told is not None:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        read = decoder.layernorm_embedding(told)
        for number, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            shape = (*told.shape[:2], attention.num_heads, attention.head_dim)
            key, value = (
                p(read).view(shape).transpose(1, 2) for p in (attention.k_proj, attention.v_proj)
            )
            cache.self_attention_cache.update(key, value, number)
        positions = decoder.embed_positions.weight[decoder.embed_positions.offset :]
        steps, count = inputs.shape[1], told.shape[1]
        inputs = inputs + positions[:steps] - positions[count : count + steps]
    hidden: Tensor = decoder(
        inputs_embeds=inputs,
        encoder_hidden_states=states,
        encoder_attention_mask=mask,
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    return hidden
