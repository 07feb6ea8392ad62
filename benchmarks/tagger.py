"""A training step of FedNER's tagger, and of one written with torch and pytorch-crf.

    python benchmarks/tagger.py [--steps 12] [--repeats 3]

The plain program is what one would write first: randomly drawn sentences padded to the
longest one, an embedding of words, a Conv1d over the characters of every token, a Conv1d
over words, a packed nn.LSTM, and pytorch-crf. Both programs have the same parameters and
see the same sentences; before timing, the losses of each batch are compared. A step is
loss, backward and Adam (torch.optim.Adam in the plain program, the project's in the
other) on 32 sentences, on one thread, with dropout as in training. The
frozen parts (300 columns of word vectors, 384 of contextual features) are available to
both and are random here, because their values do not affect the time. The sentences are
those of PsyTAR in $FEDNOTES_CORPORA if it is set, and otherwise random words with a
similar distribution of lengths.

The plain program computes in float32, and the tagger in float32 and with `precision =
"bfloat16"`. The ratio of bfloat16 is measured only on a processor that has instructions
for it; others emulate them, which is slower than float32.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torchcrf import CRF

from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import draw_epoch_batches
from fednotes.data.formats import read
from fednotes.data.tags import list_types
from fednotes.encoders.vectors import WordVectors
from fednotes.taggers.corpora import TaggerCorpus
from fednotes.taggers.layers import INVENTORY
from fednotes.taggers.tagger import PRESETS, Tagger
from fednotes.training.precision import (
    Precision,
    has_bfloat16,
    setting_precision,
)
from fednotes.training.sites import Adam

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
from random_encoder import RandomEncoder

BATCH, WORD_DIM, CONTEXT_DIM = 32, 300, RandomEncoder.dim


class Plain(nn.Module):
    """The tagger written with torch and pytorch-crf, with a tagger's parameters."""

    def __init__(self, tagger: Tagger) -> None:
        super().__init__()
        config = tagger.config
        filters, units, tags = (
            config.char_filters,
            config.lstm_units,
            len(tagger.tagset.tags),
        )
        inputs = WORD_DIM + filters + CONTEXT_DIM
        self.words = nn.Embedding.from_pretrained(tagger.vectors.table, freeze=True)
        self.characters = nn.Embedding(INVENTORY, config.char_dim, padding_idx=0)
        self.char_cnn = nn.Conv1d(
            config.char_dim, filters, config.char_width, padding=1
        )
        self.cnn = nn.Conv1d(inputs, config.cnn_filters, 3, padding=1)
        self.lstm = nn.LSTM(
            config.cnn_filters, units, bidirectional=True, batch_first=True
        )
        self.project = nn.Linear(2 * units, tags)
        self.crf = CRF(tags, batch_first=True)
        self.dropout = nn.Dropout(config.dropout)
        self._copy(tagger)

    @torch.no_grad()
    def _copy(self, tagger: Tagger) -> None:
        self.characters.weight.copy_(tagger.characters.embedding)
        self.characters.weight[0] = 0.0
        self.char_cnn.weight.copy_(tagger.characters.weight.permute(1, 2, 0))
        self.char_cnn.bias.copy_(tagger.characters.bias)
        self.cnn.weight.copy_(tagger.cnn.weight_3.permute(1, 2, 0))
        self.cnn.bias.copy_(tagger.cnn.bias_3)
        for d, end in enumerate(("", "_reverse")):
            getattr(self.lstm, f"weight_ih_l0{end}").copy_(tagger.lstm.weight_ih_l0[d])
            getattr(self.lstm, f"weight_hh_l0{end}").copy_(tagger.lstm.weight_hh_l0[d])
            getattr(self.lstm, f"bias_ih_l0{end}").copy_(tagger.lstm.bias_l0[d])
            getattr(self.lstm, f"bias_hh_l0{end}").zero_()
        self.project.load_state_dict(tagger.crf.project.state_dict())
        crf = tagger.crf.crf
        # pytorch-crf forbids no transitions, so they get a very low score.
        self.crf.start_transitions.copy_(crf.start.masked_fill(~crf.start_mask, -1e4))
        self.crf.transitions.copy_(
            crf.transitions.masked_fill(~crf.transition_mask, -1e4)
        )
        self.crf.end_transitions.copy_(crf.end)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean negative log likelihood of the sentences."""
        characters, mask = batch["characters"], batch["mask"]  # (B, L, C), (B, L)
        embedded = self.characters(characters.flatten(0, 1)).transpose(1, 2)
        convolved = self.char_cnn(embedded)  # (B · L, filters, C)
        padding = characters.flatten(0, 1).eq(0)
        padding[:, 0] = False  # a padded token still needs one position
        pooled = convolved.masked_fill(padding[:, None], -torch.inf).amax(dim=2).relu()
        pooled = pooled.view(*mask.shape, -1) * mask[:, :, None]
        x = torch.cat([self.words(batch["words"]), pooled, batch["context"]], dim=2)
        x = self.cnn(self.dropout(x).transpose(1, 2)).relu().transpose(1, 2)
        lengths = mask.sum(1)
        packed = pack_padded_sequence(
            self.dropout(x), lengths, batch_first=True, enforce_sorted=False
        )
        x, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return -self.crf(
            self.project(self.dropout(x)), batch["tags"], mask, reduction="mean"
        )


def plain_batch(prepared: TaggerCorpus, indices: np.ndarray) -> dict[str, Tensor]:
    """Return the padded tensors of some sentences."""
    encoded = prepared.encoded
    lengths = prepared.lengths[indices]
    step = np.arange(lengths.max())
    mask = step[None, :] < lengths[:, None]
    token = np.where(mask, encoded.bounds[indices][:, None] + step[None, :], 0)
    form = encoded.form[token]
    longest = prepared.character_lengths[form].max(initial=0, where=mask)
    valid = torch.from_numpy(mask)
    return {
        "mask": valid,
        "words": prepared.word[torch.from_numpy(form)] * valid,
        "characters": torch.from_numpy(
            prepared.characters[form][:, :, :longest] * mask[:, :, None]
        ).long(),
        "context": torch.from_numpy(prepared.context[token][:, :, 0]).float()
        * valid[:, :, None],
        "tags": torch.from_numpy(encoded.tags[token]) * valid,
    }


def corpus() -> tuple[str, tuple[Document, ...]]:
    """Return a name for the sentences, and the sentences."""
    root = os.environ.get("FEDNOTES_CORPORA")
    if root:
        return "PsyTAR", read(Path(root) / "psytar" / "train.txt")
    rng = np.random.default_rng(1)
    letters = np.array(list("etaoinshrdlu"))
    pool = ["".join(rng.choice(letters, rng.integers(1, 12))) for _ in range(5000)]
    ranks = np.minimum(rng.zipf(1.3, size=40_000) - 1, len(pool) - 1)
    documents, start = [], 0
    for length in np.clip(np.exp(rng.normal(2.6, 0.6, size=1500)), 2, 100).astype(int):
        words = [pool[r] for r in ranks[start : start + length]]
        spans = (Span(0, len(words[0]), "ADR"),) if rng.random() < 0.5 and words else ()
        documents.append(Document(str(len(documents)), " ".join(words), spans))
        start += length
    return "random words", tuple(documents)


def build(documents: tuple[Document, ...]) -> tuple[Tagger, TaggerCorpus]:
    """Return an ELMoNER tagger with random frozen tables, and its prepared corpus."""
    words = sorted(
        {word.lower() for document in documents for word in document.text.split()}
    )
    table = torch.randn(len(words) + 1, WORD_DIM, generator=torch.manual_seed(0)) * 0.4
    table[0] = 0.0
    vectors = WordVectors(
        Path("random"), {w: i + 1 for i, w in enumerate(words)}, table
    )
    config = replace(PRESETS["elmoner"], word_vectors="random", contextual="random")
    tagger = Tagger(config, TagSet(list_types(documents)), 1, vectors, RandomEncoder())
    return tagger, tagger.prepare(documents)


def timed(
    compute_loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | Adam
) -> float:
    """Take a training step; return its CPU seconds."""
    start = time.process_time()
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.zero_grad(set_to_none=True)  # the other clears them after its step
    compute_loss().backward()
    optimizer.step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="mini-batches per repeat")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    name, documents = corpus()
    tagger, prepared = build(documents)
    plain = Plain(tagger)
    rng = np.random.default_rng(7)
    chosen = rng.choice(prepared.sentences, args.steps * BATCH, replace=False)
    tokens = int(prepared.lengths[chosen].sum())
    print(
        f"{name}: {len(chosen)} sentences, {tokens / len(chosen):.1f} tokens each, batch {BATCH}"
    )
    random = np.split(chosen, args.steps)
    bucketed = [
        chosen[b] for b in draw_epoch_batches(prepared.lengths[chosen], BATCH, rng)
    ]

    tagger.eval(), plain.eval()
    with torch.no_grad():
        gap = max(
            abs(
                float(tagger.loss(prepared, b))
                - float(plain.loss(plain_batch(prepared, b)))
            )
            for b in random
        )
    print(f"largest difference of a batch's loss: {gap:.1e}")
    if gap > 1e-4:
        raise SystemExit("the two compute different losses")

    def loss_of_tagger(batch: np.ndarray, precision: Precision) -> Tensor:
        with setting_precision(precision, tagger.device):
            return tagger.loss(prepared, batch)

    tagger.train(), plain.train()
    fast_adam = Adam(tagger.trainable(), 1e-3)
    plain_adam = torch.optim.Adam(
        [p for p in plain.parameters() if p.requires_grad], 1e-3
    )
    timed(lambda: loss_of_tagger(bucketed[0], "float32"), fast_adam)  # compiles
    measures_bfloat16 = has_bfloat16(tagger.device)
    if measures_bfloat16:
        timed(lambda: loss_of_tagger(bucketed[0], "bfloat16"), fast_adam)
    timed(lambda: plain.loss(plain_batch(prepared, random[0])), plain_adam)
    fast, low, slow = [], [], []
    # In turns, so that other load on the machine affects both.
    for _ in range(args.repeats):
        for ours, theirs in zip(bucketed, random, strict=True):
            fast.append(timed(lambda b=ours: loss_of_tagger(b, "float32"), fast_adam))
            if measures_bfloat16:
                low.append(
                    timed(lambda b=ours: loss_of_tagger(b, "bfloat16"), fast_adam)
                )
            slow.append(
                timed(lambda b=theirs: plain.loss(plain_batch(prepared, b)), plain_adam)
            )

    def compute_ratio(seconds: Sequence[float]) -> float:
        """Return how many times as fast as the plain program the median repeat was."""
        sums = [
            np.array(each).reshape(args.repeats, -1).sum(1) for each in (slow, seconds)
        ]
        return float(np.median(sums[0]) / np.median(sums[1]))

    print(
        f"plain {np.mean(slow) * 1e3:.1f} ms a step, fednotes {np.mean(fast) * 1e3:.1f} ms"
    )
    if measures_bfloat16:
        print(f"fednotes in bfloat16 {np.mean(low) * 1e3:.1f} ms a step")
        print(
            f"tagger-step-bfloat16 ratio={compute_ratio(low):.1f} against plain "
            "composition"
        )
    else:
        print("bfloat16 not measured: this processor has no instructions for it")
    print(f"tagger-step ratio={compute_ratio(fast):.1f} against plain composition")


if __name__ == "__main__":
    main()
