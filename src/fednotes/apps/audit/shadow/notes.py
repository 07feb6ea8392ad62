"""A site with notes that are not annotated, whose model predicts masked words.

Notes that are not judged stay on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from fednotes.apps.audit.shadow.secrets import Planted, Secret, SecretKind
from fednotes.apps.audit.shadow.subject import log_odds
from fednotes.core.seeds import rng_of
from fednotes.data.notes import Note
from fednotes.data.notes.sites import SiteNotes
from fednotes.encoders.packing import IGNORED, Masked, Sequences

MASKS = 4  # number of random masks for judging a note
MASKED_FRACTION = 0.15
MAX_TOKENS = 126  # maximum number of a note's tokens that are judged
ROWS_A_CALL = 64
TEMPLATES: dict[SecretKind, str] = {
    "name": "{} was seen in the clinic today.",
    "number": "The number of this record is {}.",
}


class PlainNotes:
    """See `Subject`; a unit is a note."""

    kinds: ClassVar[tuple[SecretKind, ...]] = ("name", "number")
    carriers = 1  # the template

    def __init__(self, data: SiteNotes, rng: np.random.Generator, most: int) -> None:
        """Choose at most `most` notes to judge."""
        numbers = rng.permutation(data.train_notes)[:most]
        self.data = data
        self._judged_numbers = set(numbers.tolist())
        self.judged = [
            note
            for number, note in enumerate(data.train())
            if number in self._judged_numbers
        ]

    def training_data(
        self, is_member: np.ndarray, planted: Sequence[Planted], repeats: int
    ) -> SiteNotes:
        """Return the site with its members, and a new note for each planted secret."""
        members = zip(self.judged, is_member, strict=True)
        notes = [note for note, chosen in members if chosen] * repeats
        for number, (secret, _) in enumerate(planted):
            name = f"planted{number}"
            text = TEMPLATES[secret.kind].format(secret.guesses[0])
            notes.append(Note(name, text, name, None, "planted"))

        def read() -> Iterator[Note]:
            yield from notes
            if repeats > 1:
                return
            for number, note in enumerate(self.data.train()):
                if number not in self._judged_numbers:
                    yield note

        return replace(self.data, train=read, content="")

    def score_units(self, site: Any) -> dict[str, np.ndarray]:
        """Return (judged,) log-odds of masked words; all models get the same masks."""
        texts = []
        for note in self.judged:
            ids = token_ids(site.model, note.text)
            drawn = rng_of(0, "audit masks", note.text).random((MASKS, MAX_TOKENS))
            texts.append(MaskedText(ids, drawn[:, : len(ids)] < MASKED_FRACTION))
        return {"": log_odds(masked_losses(site.model, texts))}

    def guess_losses(self, site: Any, secret: Secret) -> np.ndarray:
        """Return (guesses,) pseudo-losses: each token of a guess is masked in turn.

        Salazar et al. 2020, "Masked Language Model Scoring".
        """
        before, after = TEMPLATES[secret.kind].split("{}")
        start = len(token_ids(site.model, before))
        num_after = len(token_ids(site.model, after))
        texts = []
        for guess in secret.guesses:
            ids = token_ids(site.model, before + guess + after)
            places = np.arange(start, len(ids) - num_after)
            texts.append(MaskedText(ids, np.arange(len(ids)) == places[:, None]))
        return masked_losses(site.model, texts)


class MaskedText(NamedTuple):
    """A text with several masks.

    Attributes:
        ids: (tokens,) without special tokens.
        masks: (masks, tokens) which tokens each mask hides.
    """

    ids: np.ndarray
    masks: np.ndarray


def token_ids(model: Any, text: str) -> np.ndarray:
    """Return the (tokens,) ids of a text's beginning, without special tokens."""
    ids: list[list[int]] = model.tokenizer.tokenize([text])
    return np.array(ids[0][: min(MAX_TOKENS, model.positions - 2)], np.int64)


def masked_losses(model: Any, texts: Sequence[MaskedText]) -> np.ndarray:
    """Return the (texts,) loss of hidden tokens, summed over each text's masks."""
    rows = [
        (number, text.ids, mask)
        for number, text in enumerate(texts)
        for mask in text.masks
        if mask.any()
    ]
    rows.sort(key=lambda row: len(row[2]))  # similar lengths need little padding
    model.eval()
    losses = np.zeros(len(texts))
    for start in range(0, len(rows), ROWS_A_CALL):
        numbers, ids, masks = zip(*rows[start : start + ROWS_A_CALL], strict=True)
        np.add.at(losses, list(numbers), _row_losses(model, ids, masks))
    return losses


def _row_losses(
    model: Any, ids: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the (rows,) loss of each row's hidden tokens.

    Args:
        model: The language model, in evaluation mode.
        ids: The (tokens,) ids of each row.
        masks: (tokens,) whether each token is hidden.
    """
    special = model.specials
    framed = [np.array([special.cls, *row, special.sep]) for row in ids]
    tokens = _padded(framed, special.pad)
    hidden = _padded([np.pad(mask, 1) for mask in masks], padding=False)
    # A denoising model predicts the complete text, others only the hidden tokens.
    is_target = tokens != special.pad if model.config.objective == "denoise" else hidden
    sequences = Sequences(
        tokens, np.zeros_like(tokens), np.array([len(row) for row in framed]), None
    )
    masked = Masked(
        np.where(hidden, special.mask, tokens), np.where(is_target, tokens, IGNORED)
    )
    losses: np.ndarray = model.losses(sequences, masked).double().cpu().numpy()
    return losses


def _padded(rows: Sequence[np.ndarray], padding: int) -> np.ndarray:
    """Return (rows, longest) with `padding` at the end of shorter rows."""
    tensors = [torch.from_numpy(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding).numpy()
