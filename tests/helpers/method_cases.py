"""Small jobs of the core's methods, with sites that train in a second or two.

An application brings the cases of its methods in `tests/apps/NAME/helpers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from made_sites import made_notes, mentions, read_patient_notes
from method_runs import LEAST_MISSED, Case, MakeCase
from tiny_models import save_bert

from fednotes.core.types import Document, PublicNotes, SiteData, TagSet
from fednotes.encoders.language_model import LanguageModelConfig
from fednotes.methods import (
    adversarial,
    distill,
    fedmd,
    fedner,
    finetune,
    personal,
    pretrain,
)
from fednotes.taggers.encoder_tagger import EncoderTaggerConfig
from fednotes.taggers.tagger import TaggerConfig
from fednotes.taggers.token_classifier import TokenClassifierConfig

NAMES = ("a", "b", "c", "d")
TAGGER = TaggerConfig(
    char_dim=6,
    char_filters=8,
    cnn_filters=10,
    lstm_units=5,
    hashed_words=50,
    word_dim=4,
)


# ---- the methods ---------------------------------------------------------------------

DRUGS, THINGS = TagSet(("drug",)), TagSet(("thing",))


def documents(number: int = 4, count: int = 24) -> list[SiteData]:
    """Return sites with equal numbers of sentences, so that they divide a batch
    equally."""
    return [mentions(name, seed, count) for seed, name in enumerate(NAMES[:number])]


def of_two_types() -> list[SiteData]:
    """Return the same sites, of which every second one annotates another type."""

    def renamed(document: Document) -> Document:
        return replace(
            document, spans=tuple(replace(s, label="thing") for s in document.spans)
        )

    def relabel(site: SiteData) -> SiteData:
        parts = {
            part: tuple(map(renamed, getattr(site, part)))
            for part in ("train", "valid", "test")
        }
        return replace(site, tags=THINGS, **parts)

    return [
        relabel(site) if place % 2 else site for place, site in enumerate(documents())
    ]


def settings_of(module: Any, base: Any) -> Callable[[Sequence[Any]], Any]:
    return lambda sites: module.METHOD.configure(base, sites)


def fedner_case(model: TaggerConfig = TAGGER, **changes: Any) -> Case:
    base = fedner.Config(model=model, seed=3, least_share=1, **changes)

    def settings(
        sites: Sequence[Any],
    ) -> Any:  # whoever writes the jobs makes equal parts
        return fedner.METHOD.configure(replace(base, batch_size=6 * len(sites)), sites)

    by_weights = base.exchange == "weights"
    task = "train" if by_weights else "gradients"
    return Case(fedner.METHOD, settings, documents(), task, is_change=by_weights)


def distill_case(task: str, **changes: Any) -> Case:
    base = distill.Config(model=TAGGER, rounds=2, seed=3, learning_rate=0.01, **changes)
    settings = settings_of(distill, base)
    return Case(
        distill.METHOD,
        settings,
        of_two_types(),
        task,
        is_change=task == "train",
        # A target gradient is over half of the sentences: little of it is drawn.
        least_missed=0.15 if task == "begin" else LEAST_MISSED,
    )


def adversarial_case(**changes: Any) -> Case:
    base = adversarial.Config(
        model=TAGGER, rounds=2, seed=3, learning_rate=0.01, **changes
    )
    settings = settings_of(adversarial, base)
    return Case(adversarial.METHOD, settings, of_two_types(), "train", is_change=True)


BY_BERT = (1e-4, 1e-5)  # how close runs of encoders end
BY_LEVELS = (0.0, 1e-2)  # a packed number may round to the next of 25 levels


def finetune_case(bert: Path, **changes: Any) -> Case:
    base = finetune.Config(
        model=TokenClassifierConfig(encoder=str(bert)), cycles=2, batch_size=4,
        learning_rate=3e-3, warmup=0.0, seed=3, min_tokens=0, min_steps=0,
    )  # fmt: skip
    settings = settings_of(finetune, replace(base, **changes))
    close = BY_LEVELS if "compression" in changes else BY_BERT
    return Case(finetune.METHOD, settings, documents(), "train", True, close)


def personal_case(bert: Path, **changes: Any) -> Case:
    model = TokenClassifierConfig(encoder=str(bert), train="lora")
    base = personal.Config(
        model=model,
        cycles=2,
        batch_size=4,
        learning_rate=3e-3,
        warmup=0.0,
        distil_epochs=1,
    )
    settings = settings_of(personal, replace(base, **changes))
    close = BY_LEVELS if "compression" in changes else BY_BERT
    return Case(personal.METHOD, settings, documents(), "train", True, close)


def fedmd_case(bert: Path) -> Case:
    """Return sites of three kinds of models: light, with a softmax, and with a CRF."""
    own_models = {
        "b": TokenClassifierConfig(encoder=str(bert), train="lora"),
        "c": EncoderTaggerConfig(encoder=str(bert), tuning="none"),
    }
    base = fedmd.Config(
        model=TAGGER,
        rounds=2,
        first_epochs=1,
        local_epochs=1,
        public_sentences=6,
        seed=3,
    )
    site_configs = {name: replace(base, model=own) for name, own in own_models.items()}
    public = PublicNotes.of(mentions("public", 9, 8).train)
    sites = [replace(site, public=public) for site in documents()]
    settings = settings_of(fedmd, replace(base, site_configs=site_configs))
    # A site's predictions follow from its notes: which of them are in which batch
    # changes little, so secret draws hide little.
    return Case(fedmd.METHOD, settings, sites, "predict", True, BY_BERT, 0.05)


def pretrain_case(bert: Path, objective: str, **changes: Any) -> Case:
    model = LanguageModelConfig(encoder=str(bert), objective=objective)
    base = pretrain.Config(
        model=model, cycles=2, batch_size=4, length=24, learning_rate=1e-3, warmup=0.0, seed=5,
        head_cycles=0,
    )  # fmt: skip
    sites = [
        read_patient_notes(name, made_notes(seed, 12))
        for seed, name in enumerate(NAMES)
    ]
    settings = settings_of(pretrain, replace(base, **changes))
    return Case(pretrain.METHOD, settings, sites, "train", True, BY_BERT)


def new_head_case(bert: Path) -> Case:
    """Return pre-training of an encoder whose prediction head begins at random."""
    bare = bert.with_name("bert without a head")
    if not bare.exists():
        save_bert(bare, head=False)
    return pretrain_case(bare, "mlm", cycles=1, head_cycles=2, server="yogi")


CASES: dict[str, MakeCase] = {
    "fedner, gradients": lambda bert: fedner_case(),
    "fedner, weights": lambda bert: fedner_case(exchange="weights"),
    "distill": lambda bert: distill_case("train", weighting=False),
    "distill, target gradient": lambda bert: distill_case("begin"),
    "adversarial": lambda bert: adversarial_case(),
    "finetune": finetune_case,
    "personal": personal_case,
    "fedmd": fedmd_case,
    "pretrain": lambda bert: pretrain_case(bert, "mlm"),
    "pretrain, pairs": lambda bert: pretrain_case(bert, "mlm+nsp"),
}
FURTHER: dict[str, MakeCase] = {
    # a word table that travels by rows
    "fedner, word rows": lambda bert: fedner_case(replace(TAGGER, hashed_words=1500)),
    "distill, by size": lambda bert: distill_case(
        "train", aggregation="size", trace=True, unannotated="soft", weighting=False
    ),
    "adversarial, Peng": lambda bert: adversarial_case(variant="peng", select="best"),
    "adversarial, Hong": lambda bert: adversarial_case(variant="hong", select="best"),
    "finetune, shared batch, packed": lambda bert: finetune_case(
        bert, batch="shared", batch_size=16, compression="packed", server="yogi"
    ),
    "finetune, biases": lambda bert: finetune_case(
        bert, model=TokenClassifierConfig(encoder=str(bert), train="biases")
    ),
    "finetune, private classifier": lambda bert: finetune_case(
        bert, private=("classifier",), keep_cycle=-1, cycles=3, evaluate_every=2
    ),
    "personal, shared batch": lambda bert: personal_case(
        bert,
        batch="shared",
        batch_size=9,
        server="nesterov",
        local_epochs=0.5,
        keep_cycle=-1,
    ),
    "pretrain, new head": new_head_case,
}
# The other cases of these methods are alike, or have no differential privacy.
PRIVATE = ("fedner, gradients", "distill", "finetune", "personal", "pretrain")
