"""The attacks that come with fednotes, one family per file."""

from __future__ import annotations

from fednotes.apps.audit.attack import Attack
from fednotes.apps.audit.attacks import (
    counts,
    encoder_tokens,
    membership,
    memorisation,
    patient_counts,
    patient_updates,
    tagger_words,
    word_order,
    word_tables,
)

# In the order of the report.
BUILT_IN: tuple[Attack, ...] = (
    *counts.ATTACKS,
    *membership.NOTE_ATTACKS,
    *memorisation.ATTACKS,
    *membership.PATIENT_ATTACKS,
    *patient_updates.CONCEPT_ATTACKS,
    patient_counts.PRESENCE_ATTACK,
    *patient_updates.OUTPUT_ATTACKS,
    patient_counts.EXACT_ATTACK,
    *encoder_tokens.ATTACKS,
    *tagger_words.ATTACKS,
    *word_order.ATTACKS,
    *word_tables.ATTACKS,
)
