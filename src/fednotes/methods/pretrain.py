"""Pre-training of a language model across silos.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using clinical
notes from multiple silos", section 3.2. Each global cycle trains an epoch at every silo; the
mean of their parameters, weighted by numbers of patients, is the next cycle's start
(`averaging.py`, Eq. 1). Objectives: Devlin et al. 2018 (masked tokens, next sentence), Lewis
et al. 2019 (infilling).

By default the word embeddings and the output bias stay as they were: the sign of the bias'
gradient tells every masked token of a batch, and the embedding's rows that change tell its words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fednotes.core.errors import ConfigError
from fednotes.core.tensors import nbytes
from fednotes.data.note_sites import SiteNotes, pooled_notes
from fednotes.federation import Federation, State
from fednotes.methods.averaging import Averaging, Server, run_cycles
from fednotes.methods.pretrain_site import Site as Site
from fednotes.methods.pretrain_site import scores, shared_model
from fednotes.models.language_model import LanguageModelConfig, language_model_config

DATA = "notes"


@dataclass(frozen=True)
class Config(Averaging):
    """The settings of one pre-training run; see also `Averaging`.

    length: tokens of a sequence; long_length (or as many as the model reads) in the last
        long_cycles cycles up to the one that is kept (the original BERT trains nine tenths of
        its steps on 128 tokens, the rest on 512).
    masked: share of the tokens to guess. whole_words: a word's sub-words are masked together.
    infilled: share of the words in infilled spans, for the objective "denoise".
    head_cycles: cycles before the first one that train the prediction head alone, with
        head_learning_rate, where the directory has none (its initial values are random).
    """

    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    length: int = 128
    long_length: int = 512
    long_cycles: int = 0
    masked: float = 0.15
    whole_words: bool = False
    infilled: float = 0.3
    head_cycles: int = 1
    head_learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no run can have."""
        super().__post_init__()
        for name in ("length", "long_length"):
            if getattr(self, name) < 8:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 8 tokens")
        for name in ("masked", "infilled"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: above 0 and at most 1")
        if self.head_cycles < 0:
            raise ConfigError(f"head_cycles = {self.head_cycles}: at least 0 is needed")
        if not 0 <= self.long_cycles <= self.cycles:
            raise ConfigError(f"long_cycles = {self.long_cycles}: 0 to cycles = {self.cycles}")
        if not 0 < self.head_learning_rate < math.inf:
            raise ConfigError(
                f"head_learning_rate = {self.head_learning_rate}: a number above 0 is needed"
            )

    def warm_up_cycles(self, new_head: bool) -> int:
        """Cycles before the first one."""
        return self.head_cycles if new_head else 0


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "training": {
            "cycles": 15,
            "keep_cycle": 10,
            "local_epochs": 1,
            "batch_size": 256,
            "accumulate": 8,
            "learning_rate": 1e-4,
            "warmup": 0.01,
            "decay": "linear",
            "weight_decay": 0.01,
            "clip": 1.0,
            "length": 128,
            "long_length": 512,
            "long_cycles": 1,
            "masked": 0.15,
            "whole_words": False,
            "server": "average",
            "compression": "none",
        },
        "model": {"objective": "mlm+nsp", "train": "all"},
    },
    "best": {"training": {"precision": "auto"}},
}


def train(federation: Federation, config: Config) -> State:
    """Global cycles of section 3.2; see `averaging.run_cycles`."""
    shared = shared_model(config.model, config.seed, "cpu")
    before = config.warm_up_cycles(shared.model.new_head)
    server = Server(config, shared.initial, judged, federation.resume(), before=before)
    return run_cycles(federation, config, server, warm_up=shared.head)


def judged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Held-out loss and accuracy over all sites' masked tokens."""
    masked = scores(metrics).get("masked")
    if masked is None:
        return {"held_out": -math.inf}
    return {
        "held_out": -masked["loss"],
        "valid_loss": masked["loss"],
        "valid_accuracy": masked["accuracy"],
    }


# what a job asks of a method


def model_config(table: Mapping[str, Any]) -> LanguageModelConfig:
    """The [model] table. Raises ConfigError."""
    return language_model_config(table)


def for_sites(config: Config, sites: Sequence[SiteNotes]) -> Config:
    """Nothing here depends on the sites together."""
    return config


def alone(config: Config, sites: Sequence[SiteNotes]) -> tuple[Config, ...]:
    """Each site's configuration where it trains by itself."""
    return (config,) * len(sites)


def pooled(
    config: Config, sites: Sequence[SiteNotes], complete: Sequence[SiteNotes] | None
) -> tuple[tuple[SiteNotes, ...], Config]:
    """One model trained on all sites' notes: the paper's centralised pre-training."""
    return (pooled_notes(sites),), config


def planned(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Cycles, and the sequences of each at all sites together."""
    new_head = shared_model(config.model, config.seed, "cpu").model.new_head
    return config.warm_up_cycles(new_head) + config.last_cycle, sum(sizes) * config.local_epochs


def traffic(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run, before any compression."""
    shared = shared_model(config.model, config.seed, "cpu")
    each = nbytes(shared.initial)
    head = nbytes({name: shared.initial[name] for name in shared.head})
    before = config.warm_up_cycles(shared.model.new_head)
    up = before * head + config.cycles * each
    return up, up + max(1, before) * each  # what was judged is not sent again


def warnings(config: Config) -> tuple[str, ...]:
    """What a person should know before training."""
    if config.model.train != "all":
        return ()
    return (
        'train = "all" shares the word embeddings and the output bias: their updates tell which '
        'words a site\'s notes have (train = "encoder" keeps them as they are)',
    )


def one_model(config: Config) -> bool:
    """Whether sites end with equal models, of which one copy is kept."""
    return True
