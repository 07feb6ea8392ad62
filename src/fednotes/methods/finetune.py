"""Fine-tuning of a pre-trained encoder for entity recognition across silos.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using clinical
notes from multiple silos", sections 3.2 and 3.3. One epoch at every silo in each global cycle,
then the mean of their parameters, weighted by numbers of notes (`averaging.py`, Eq. 1).

One site, or all sites' notes pooled, is ordinary fine-tuning. `private` keeps layers at their
sites, as FedNER does: with `["classifier"]` sites may have different entity types. Without it,
a site with fewer types than the others trains on what it annotated alone, its silence about
other types being no negative example; the methods `distill` and `adversarial` go further, on
this same model (`kind = "token-classifier"`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from torch import Tensor

from fednotes.core.errors import ConfigError
from fednotes.core.tensors import nbytes
from fednotes.core.types import SiteData, TagSet
from fednotes.data.split import pool
from fednotes.federation import Federation, State
from fednotes.methods.averaging import Averaging, Server, run_cycles
from fednotes.methods.finetune_site import Site as Site
from fednotes.methods.finetune_site import layer
from fednotes.metrics.spans import SpanCounts
from fednotes.models.build import ModelConfig, build_model, kind_of
from fednotes.models.build import model_config as any_model
from fednotes.models.token_classifier import TokenClassifierConfig

KINDS = ("token-classifier", "encoder-tagger")


@dataclass(frozen=True)
class Config(Averaging):
    """The settings of one fine-tuning run; see also `Averaging`.

    private: layers that never leave a site: "classifier", "encoder" ("crf", "lora", "prompts"
        of an encoder-tagger).
    tags: the complete tag set, the union over the sites; a job fills it in.
    """

    model: ModelConfig = field(default_factory=TokenClassifierConfig)
    cycles: int = 6
    learning_rate: float = 2e-5
    private: tuple[str, ...] = ()
    tags: TagSet = field(default_factory=lambda: TagSet(()))


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "training": {
            "cycles": 6,
            "keep_cycle": 0,
            "local_epochs": 1,
            "batch_size": 32,
            "learning_rate": 2e-5,
            "warmup": 0.1,
            "decay": "linear",
            "weight_decay": 0.01,
            "clip": 1.0,
            "private": [],
            "server": "average",
            "compression": "none",
        },
        "model": {"kind": "token-classifier", "train": "all", "context": "sentence"},
    },
    "best": {"training": {"precision": "auto"}},
}


def train(federation: Federation, config: Config) -> State:
    """Global cycles of section 3.2; see `averaging.run_cycles`."""
    server = Server(config, initial(config), judged, federation.resume())
    return run_cycles(federation, config, server)


def initial(config: Config) -> dict[str, Tensor]:
    """What sites share, before training. Raises ConfigError for a private layer that is none."""
    model = build_model(config.model, config.tags, config.seed)
    _require_layers(config.private, {layer(name) for name in model.trainable()})
    shared = {n: p for n, p in model.trainable().items() if layer(n) not in config.private}
    return {name: parameter.detach() for name, parameter in shared.items()}


def judged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Micro F1, strict, over all sites' validation mentions."""
    counts = SpanCounts.from_metrics(metrics)
    f1 = counts.scores()["strict"]["f1"]
    return {"held_out": f1 if counts.total.gold else -math.inf, "valid_f1": f1}


def _require_layers(private: tuple[str, ...], known: set[str]) -> None:
    for name in private:
        if name not in known:
            raise ConfigError(
                f"private = {list(private)}: no layer is called {name!r}; this model has "
                f"{', '.join(sorted(known))}"
            )
    if known <= set(private):
        raise ConfigError(
            f"private = {list(private)}: nothing is left to share; to train each site by itself "
            'set conditions = ["alone"]'
        )


# what a job asks of a method


def model_config(table: Mapping[str, Any]) -> ModelConfig:
    """The [model] table; kind = "token-classifier" if none is given. Raises ConfigError."""
    config = any_model({"kind": "token-classifier"} | dict(table))
    if kind_of(config) not in KINDS:
        raise ConfigError(
            f'kind = {kind_of(config)!r} is no model for method = "finetune", which takes '
            f"{' and '.join(KINDS)}; the methods fedner and distill take others"
        )
    return config


def for_sites(config: Config, sites: Sequence[SiteData]) -> Config:
    """The configuration with the union of the sites' entity types."""
    return replace(config, tags=reduce(TagSet.union, (site.tags for site in sites)))


def alone(config: Config, sites: Sequence[SiteData]) -> tuple[Config, ...]:
    """Each site's configuration where it trains by itself, on its own types."""
    return tuple(replace(config, tags=site.tags) for site in sites)


def pooled(
    config: Config, sites: Sequence[SiteData], complete: Sequence[SiteData] | None
) -> tuple[tuple[SiteData, ...], Config]:
    """One model trained on all sites' notes: the paper's centralised fine-tuning.

    Where sites annotate different types and no complete annotation is known, each keeps a
    classifier of its own over an encoder trained on all: a reference, not a bound.
    """
    if complete is None and len({frozenset(site.tags.types) for site in sites}) > 1:
        return tuple(sites), replace(config, private=("classifier",))
    together = pool(complete or sites)
    return (together,), replace(config, tags=together.tags, private=())


def planned(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Cycles, and the sentences of each at all sites together."""
    return config.last_cycle, sum(sizes) * config.local_epochs


def traffic(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run, before any compression."""
    each = nbytes(initial(config))
    return config.cycles * each, (config.cycles + 1) * each  # what was judged is not sent again


def warnings(config: Config) -> tuple[str, ...]:
    """What a person should know before training."""
    if getattr(config.model, "train", "") != "all":
        return ()
    return (
        'train = "all" shares the word embeddings: the rows that change tell which words a '
        'site\'s notes have (train = "encoder" keeps them as they are)',
    )


def one_model(config: Config) -> bool:
    """Whether sites end with equal models, of which one copy is kept."""
    return not config.private
