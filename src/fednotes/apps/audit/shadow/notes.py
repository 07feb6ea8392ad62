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
from fednotes.apps.audit.shadow.subject import convert_to_log_odds
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
    num_carriers = 1  # the template

    def __init__(
        self, data: SiteNotes, rng: np.random.Generator, max_units: int
    ) -> None:
        """Choose at most `max_units` notes to judge."""
        numbers = rng.permutation(data.train_notes)[:max_units]
        self.data = data
        self._judged_numbers = set(numbers.tolist())
        self.judged_units = [
            note
            for number, note in enumerate(data.train())
            if number in self._judged_numbers
        ]

    def make_training_data(
        self,
        is_member: np.ndarray,
        planted: Sequence[Planted],
        *,
        copies: int,
        with_others: bool,
    ) -> SiteNotes:
        """Return the site with its members, and a new note for each planted secret.

        The arguments are those of `Subject.make_training_data`.
        """
        members = zip(self.judged_units, is_member, strict=True)
        notes = [note for note, chosen in members if chosen] * copies
        for number, (secret, _) in enumerate(planted):
            name = f"planted{number}"
            text = TEMPLATES[secret.kind].format(secret.guesses[0])
            notes.append(Note(name, text, name, None, "planted"))

        def read() -> Iterator[Note]:
            """Yield the notes; those that are not judged are read from disk."""
            yield from notes
            if not with_others:
                return
            for number, note in enumerate(self.data.train()):
                if number not in self._judged_numbers:
                    yield note

        return replace(self.data, train=read, content="")

    def score_units(self, site: Any) -> dict[str, np.ndarray]:
        """Return (judged_units,) log-odds of masked words.

        All models get the same masks.
        """
        texts = []
        for note in self.judged_units:
            ids = tokenize_beginning(site.model, note.text)
            drawn = rng_of(0, "audit masks", note.text).random((MASKS, MAX_TOKENS))
            texts.append(MaskedText(ids, drawn[:, : len(ids)] < MASKED_FRACTION))
        return {"": convert_to_log_odds(measure_masked_losses(site.model, texts))}

    def measure_guess_losses(self, site: Any, secret: Secret) -> np.ndarray:
        """Return (guesses,) pseudo-losses: each token of a guess is masked in turn.

        Salazar et al. 2020, "Masked Language Model Scoring".
        """
        before, after = TEMPLATES[secret.kind].split("{}")
        start = len(tokenize_beginning(site.model, before))
        num_after = len(tokenize_beginning(site.model, after))
        texts = []
        for guess in secret.guesses:
            ids = tokenize_beginning(site.model, before + guess + after)
            places = np.arange(start, len(ids) - num_after)
            texts.append(MaskedText(ids, np.arange(len(ids)) == places[:, None]))
        return measure_masked_losses(site.model, texts)


class MaskedText(NamedTuple):
    """A text with several masks.

    Attributes:
        ids: (tokens,) without special tokens.
        masks: (masks, tokens) which tokens each mask hides.
    """

    ids: np.ndarray
    masks: np.ndarray


def tokenize_beginning(model: Any, text: str) -> np.ndarray:
    """Return the (tokens,) ids of a text's beginning, without special tokens."""
    ids: list[list[int]] = model.tokenizer.tokenize([text])
    return np.array(ids[0][: min(MAX_TOKENS, model.positions - 2)], np.int64)


def measure_masked_losses(model: Any, texts: Sequence[MaskedText]) -> np.ndarray:
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
        np.add.at(losses, list(numbers), _measure_row_losses(model, ids, masks))
    return losses


def _measure_row_losses(
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
    tokens = _pad_rows(framed, special.pad)
    hidden = _pad_rows([np.pad(mask, 1) for mask in masks], padding=False)
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


def _pad_rows(rows: Sequence[np.ndarray], padding: int) -> np.ndarray:
    """Return (rows, longest) with `padding` at the end of shorter rows."""
    tensors = [torch.from_numpy(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding).numpy()
