"""A method is one file: laid into a folder of methods it is found and trained by a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fednotes import methods
from fednotes.core.errors import ConfigError
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import simulate

METHOD = '''
"""Averages the sites' taggers after each epoch: federated averaging in its plainest form."""

from dataclasses import field, replace
from typing import ClassVar

from fednotes.core.federation import EVALUATE, TRAIN, State
from fednotes.core.numbers import PositiveInt
from fednotes.core.settings import FilledIn, checked
from fednotes.core.tensors import load_into, snapshot
from fednotes.core.types import TagSet
from fednotes.core.update import Update
from fednotes.data.batches import buckets
from fednotes.data.split import pool
from fednotes.methods.base import Method
from fednotes.training.sites import Adam
from fednotes.training.sites import MentionSite, all_tags, finite, judged_mentions
from fednotes.taggers.saving import build_model
from fednotes.taggers.tagger import TaggerConfig, tagger_config


@checked(frozen=True)
class Config:
    model: FilledIn[TaggerConfig] = field(default_factory=TaggerConfig)
    rounds: PositiveInt = 2
    seed: FilledIn[int] = 0
    tags: FilledIn[TagSet] = field(default_factory=lambda: TagSet(()))


def train(federation, config):
    resumed = federation.resume()
    shared = dict(build_model(config.model, config.tags, config.seed).trainable())
    start, shared = (resumed.round, resumed.tensors) if resumed else (0, snapshot(shared))
    for round in federation.rounds(start, config.rounds):
        total = federation.sum(TRAIN, shared, round=round.number)
        shared = total.mean()
        metrics = {"loss": total.metrics["loss"] / total.metrics["examples"]}
        metrics |= judged_mentions(federation.sum(EVALUATE, shared).metrics)
        round.commit(State(round.number + 1, shared), metrics, evaluated=True)
    federation.sum("finish", shared)
    return State(config.rounds, shared)


class Site(MentionSite):
    tasks: ClassVar = frozenset({TRAIN, EVALUATE, "finish"})

    def __init__(self, data, config, **options):
        super().__init__(data, config, config.tags, **options)
        self.adam = Adam(self.model.trainable(), 0.01)

    def described(self):
        return "everything is shared"

    def train(self, tensors, *, round):
        load_into(self.model.trainable(), tensors)
        self.model.train()
        loss = 0.0
        rng = self.draws.rng_of("order", self.id, round)
        for batch in buckets(self.train_set.lengths, 8, rng):
            mean = self.model.losses(self.train_set, batch).source.mean()
            loss += finite(mean, self.id, f"in round {round}") * len(batch)
            mean.backward()
            self.adam.step()
        told = {"loss": loss, "examples": self.num_examples}
        return Update(snapshot(self.model.trainable()), self.num_examples, told)

    def evaluate(self, tensors):
        load_into(self.model.trainable(), tensors)
        return Update(metrics=self.counts("valid").to_metrics())

    def finish(self, tensors):
        load_into(self.model.trainable(), tensors)
        return self.tested()

    def state(self):
        return State(0, self.adam.state())

    def restore(self, state):
        self.adam.restore(state.tensors)


class PlainAveraging(Method):
    config_class = Config
    site_class = Site
    presets = {"best": {}}

    def train(self, federation, config):
        return train(federation, config)

    def read_model_config(self, table):
        return tagger_config(table)

    def plan_rounds(self, config, sizes):
        return config.rounds, sum(sizes)

    def configure(self, config, sites):
        return replace(config, tags=all_tags(sites))

    def configure_pooled(self, config, sites, complete):
        together = pool(complete or sites)
        return (together,), replace(config, tags=together.tags)

    def summarise(self, metrics):
        return judged_mentions(metrics)


METHOD = PlainAveraging()
'''
JOB = {
    "method": "plain_averaging",
    "conditions": ["federated", "pooled"],
    "synthetic": {"sites": 2, "sentences": 40},
    "model": {
        "hashed_words": 50,
        "word_dim": 4,
        "char_dim": 4,
        "char_filters": 4,
        "lstm_units": 4,
    },
}


def test_a_method_in_a_folder_of_its_own_is_found_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_averaging.py").write_text(METHOD)
    (tmp_path / "no_method.py").write_text("")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "fednotes.methods.plain_averaging", raising=False)
    assert {"fedner", "plain_averaging"} <= set(methods.names())
    with pytest.raises(
        ConfigError, match=r"plain_averagin'; did you mean 'plain_averaging'\?"
    ):
        methods.find("plain_averagin")
    with pytest.raises(ConfigError, match="method = 'no_method'"):
        methods.find("no_method")
    job = parse_job(JOB, "job", tmp_path, "job.toml")
    simulate(job, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [
        json.loads(line)["loss"] for line in lines if '"part": "federated"' in line
    ]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    for site in (tmp_path / "run" / "federated" / "sites").iterdir():
        assert {path.name for path in site.iterdir()} == {"model", "scores.json"}
