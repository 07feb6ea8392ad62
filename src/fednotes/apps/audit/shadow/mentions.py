"""A site with annotated notes, whose model finds mentions.

A name is planted in place of a mention, and annotated as that mention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from fednotes.apps.audit.shadow.secrets import Planted, Secret, SecretKind
from fednotes.apps.audit.shadow.subject import convert_to_log_odds
from fednotes.core.errors import DataError
from fednotes.core.types import Document, SiteData, Span
from fednotes.data.split import make_sentence_documents
from fednotes.privacy.units import group_documents

MAX_CARRIERS = 3  # maximum number of carrying sentences used to guess a name
SENTENCES_A_CALL = 64


class AnnotatedNotes:
    """See `Subject`; a unit is a sentence, a note, or a patient's notes."""

    kinds: ClassVar[tuple[SecretKind, ...]] = ("name",)

    def __init__(
        self, data: SiteData, rng: np.random.Generator, max_units: int, unit: Any
    ) -> None:
        """Choose the units to judge, and the sentences that can carry a name.

        Args:
            data: The site's notes.
            rng: The random generator for the choice.
            max_units: Maximum number of units to judge.
            unit: The kind of unit.

        Raises:
            DataError: No sentence can carry a name.
        """
        if unit == "sentence":
            units = [[sentence] for sentence in make_sentence_documents(data.train)]
        else:
            units = group_documents(data.id, data.train, unit)
        units = [units[number] for number in rng.permutation(len(units)).tolist()]
        # Names are planted into the others, because a copy of a judged unit would be
        # trained on.
        count = min(max_units, len(units) * 4 // 5)
        self.data = data
        self.judged_units = units[:count]
        self.others = units[count:]
        self._carriers = [
            (sentence, span)
            for sentence in make_sentence_documents(
                list(chain.from_iterable(self.others))
            )
            for span in _list_replaceable(sentence)[:1]
        ]
        self.num_carriers = len(self._carriers)
        if not self.num_carriers:
            raise DataError(
                f"site {data.id!r} has no mentions that a planted name could replace: "
                "audit it with more annotated notes"
            )

    def make_training_data(
        self,
        is_member: np.ndarray,
        planted: Sequence[Planted],
        *,
        copies: int,
        with_others: bool,
    ) -> SiteData:
        """Return the site with its members, and sentences with planted names.

        The arguments are those of `Subject.make_training_data`.
        """
        members = zip(self.judged_units, is_member, strict=True)
        units = [unit for unit, chosen in members if chosen] * copies
        if with_others:
            units += self.others
        notes = list(chain.from_iterable(units))
        for number, (secret, carrier) in enumerate(planted):
            name = f"planted{number}"
            sentence = self._insert_name(carrier, secret.guesses[0])
            notes.append(replace(sentence, id=name, patient=name, meta={}))
        return replace(self.data, train=tuple(notes))

    def score_units(self, site: Any) -> dict[str, np.ndarray]:
        """Return (judged_units,) log-odds of each unit's annotation."""
        return {"": convert_to_log_odds(self._measure_losses(site, self.judged_units))}

    def measure_guess_losses(self, site: Any, secret: Secret) -> np.ndarray:
        """Return (guesses,) losses of the carrying sentences with each guess."""
        carriers = secret.carriers[:MAX_CARRIERS]
        guesses = [
            [self._insert_name(carrier, guess) for carrier in carriers]
            for guess in secret.guesses
        ]
        return self._measure_losses(site, guesses)

    def _measure_losses(
        self, site: Any, units: Sequence[Sequence[Document]]
    ) -> np.ndarray:
        """Return (units,) the losses of the units' annotations.

        The loss of a unit is the sum over its sentences.
        """
        model = site.model.eval()
        documents = list(chain.from_iterable(units))
        corpus = model.annotate(
            model.prepare(documents), documents, self.data.tags.types
        )
        losses = np.zeros(corpus.sentences)
        numbers = np.arange(corpus.sentences)
        starts = range(SENTENCES_A_CALL, corpus.sentences, SENTENCES_A_CALL)
        for part in np.split(numbers, starts):
            losses[part] = model.losses(corpus, part).source.double().cpu().numpy()
        unit_of_document = np.repeat(np.arange(len(units)), [len(u) for u in units])
        unit_of_sentence = unit_of_document[corpus.encoded.sentence_document]
        summed: np.ndarray = np.bincount(unit_of_sentence, losses, len(units))
        return summed

    def _insert_name(self, carrier: int, name: str) -> Document:
        """Return a carrying sentence with a name in place of its mention."""
        sentence, mention = self._carriers[carrier]
        shift = len(name) - (mention.end - mention.start)
        index = sentence.spans.index(mention)  # spans are sorted by their start
        later = [
            replace(span, start=span.start + shift, end=span.end + shift)
            for span in sentence.spans[index + 1 :]
        ]
        planted = replace(mention, end=mention.end + shift)
        text = sentence.text[: mention.start] + name + sentence.text[mention.end :]
        return replace(
            sentence,
            text=text,
            spans=(*sentence.spans[:index], planted, *later),
            sentences=(),
            tokens=(),
        )


def _list_replaceable(sentence: Document) -> list[Span]:
    """Return the mentions that overlap no other; none if one is discontinuous."""
    spans = sentence.spans
    if any(span.fragments for span in spans):
        return []
    return [
        span
        for span in spans
        if sum(span.start < other.end and other.start < span.end for other in spans)
        == 1  # itself
    ]
