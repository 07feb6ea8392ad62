"""Pre-training of a language model across silos.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using
clinical notes from multiple silos", section 3.2. Each global cycle trains an epoch at
every silo; the mean of their parameters, weighted by numbers of patients, is the next
cycle's start (`averaging.py`, Eq. 1). Objectives: Devlin et al. 2018 (masked tokens,
next sentence), Lewis et al. 2019 (infilling).

By default the word embeddings and the output bias stay as they were: the sign of the
bias' gradient tells every masked token of a batch, and the embedding's rows that change
tell its words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge

from fednotes.core.counts import round_count, scale_sum
from fednotes.core.errors import ConfigError, DataError, within
from fednotes.core.federation import Federation, Method, MethodSite, State
from fednotes.core.seeds import Draws
from fednotes.core.settings import checked
from fednotes.core.tensors import load_into, nbytes, snapshot
from fednotes.core.update import Tensors, Update, require_metrics
from fednotes.data.clinical import sentences
from fednotes.data.notes.sites import NoteSource, SiteNotes, fingerprint, pooled_notes
from fednotes.encoders.features import default_cache
from fednotes.encoders.language_model import (
    LanguageModel,
    LanguageModelConfig,
    build_language_model,
    language_model_config,
)
from fednotes.encoders.packing import (
    Masked,
    Plan,
    Sequences,
    denoise,
    gather,
    mask,
    plan_full,
    plan_pairs,
)
from fednotes.encoders.token_cache import Tokens, cached_tokens
from fednotes.methods import presets
from fednotes.methods.averaging import (
    Averaging,
    AveragingSite,
    Server,
    Step,
    central,
    examples_of,
    parts,
    private_by,
    run_cycles,
    size_warnings,
    traffic_of,
)
from fednotes.privacy.promise import Privacy, Unit
from fednotes.privacy.training import owner_of, require_patients
from fednotes.training.server_steps import by_each, for_names
from fednotes.training.sites import Number, Rate, Share, ended

EVALUATED = 64  # sequences judged at once


@checked(frozen=True)
class Config(Averaging):
    """Settings of pre-training a language model.

    Attributes:
        model: The language model.
        length: Number of tokens of a sequence.
        long_length: Number of tokens of a sequence in the long cycles, or as many as
            the model reads.
        long_cycles: Number of cycles, the last ones up to the one that is kept, with
            sequences of `long_length`. The original BERT trains nine tenths of its
            steps on 128 tokens and the rest on 512; a cycle of the latter has a quarter
            of the steps, so 3 of 10 cycles are a tenth of the steps.
        masked: Fraction of the tokens that are guessed.
        whole_words: Whether the sub-words of a word are masked together.
        infilled: Fraction of the words that lie in infilled spans, for model.objective
            = "denoise".
        head_cycles: Number of cycles before the first one that train only the
            prediction head, where the directory has none and it starts from random
            numbers.
        head_learning_rate: Learning rate of the prediction head in these cycles.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    length: Annotated[int, Ge(8)] = 128
    long_length: Annotated[int, Ge(8)] = 512
    long_cycles: Number = 0
    masked: Share = 0.15
    whole_words: bool = False
    infilled: Share = 0.3
    head_cycles: Number = 1
    head_learning_rate: Rate = 3e-3
    privacy: Privacy | None = None
    min_sites: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no run can have."""
        super().__post_init__()
        if self.long_cycles > self.cycles:
            raise ConfigError(
                f"long_cycles = {self.long_cycles}: 0 to cycles = {self.cycles}"
            )
        if self.privacy and self.model.objective == "mlm+nsp":
            raise ConfigError(
                '[model] objective = "mlm+nsp" sets text of one patient beside another\'s, so no '
                'unit could be told apart under [privacy]: set objective = "mlm"'
            )
        crowded = self.batch == "shared" and self.sites > self.batch_size
        if self.long_cycles and (self.local_steps or self.local_epochs % 1 or crowded):
            raise ConfigError(
                "long_cycles are of whole epochs: set long_cycles or parts of epochs, and with "
                'batch = "shared" a batch_size of at least one sequence a site'
            )

    def warm_up_cycles(self, new_head: bool) -> int:
        """Cycles before the first one."""
        return self.head_cycles if new_head else 0


def train(federation: Federation, config: Config) -> State:
    """Global cycles of section 3.2; see `averaging.run_cycles`."""
    shared = shared_model(config.model, config.seed, "cpu")
    before = config.warm_up_cycles(shared.model.new_head)
    resumed = federation.resume()
    return run_cycles(
        federation,
        Server(
            config, shared.initial, judged, resumed, before=before, warm_up=shared.head
        ),
    )


def judged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Held-out loss and accuracy over all sites' masked tokens."""
    require_metrics(metrics, "examples", "loss", "right", "pairs", "pairs_right")
    masked = scores(metrics).get("masked")
    if masked is None:
        return {"held_out": -math.inf}
    return {
        "held_out": -masked["loss"],
        "valid_loss": masked["loss"],
        "valid_accuracy": masked["accuracy"],
    }


@dataclass(frozen=True, eq=False)
class Shared:
    """One model for all the sites of a process: pre-training keeps nothing private.

    initial: its parameters before training; every task begins with the server's.
    """

    model: LanguageModel
    parameters: dict[str, torch.nn.Parameter]
    head: tuple[str, ...]
    initial: dict[str, torch.Tensor]


@lru_cache(maxsize=2)
def shared_model(config: LanguageModelConfig, seed: int, device: str) -> Shared:
    """The process's one model of this configuration."""
    model = build_language_model(config, seed, device)
    parameters = model.trainable()
    return Shared(model, parameters, tuple(model.head()), snapshot(parameters))


@dataclass(frozen=True)
class _Masked(Step):
    """Some sequences to guess in."""

    model: LanguageModel
    sequences: Sequences
    masked: Masked

    @property
    def examples(self) -> int:
        return len(self.masked.positions)

    def loss(self, batch: Sequence[_Masked]) -> torch.Tensor:
        """Masked tokens count alike in the whole batch, and so do its pairs."""
        found = self.model.loss(self.sequences, self.masked)
        tokens = self.examples / max(1, sum(part.examples for part in batch))
        rows = len(self.masked.inputs) / sum(len(part.masked.inputs) for part in batch)
        return found.masked * tokens + found.next_sentence * rows

    def rows(self, chosen: slice) -> _Masked:
        """Some of the sequences."""
        s, m = self.sequences, self.masked
        labels = None if s.random_next is None else s.random_next[chosen]
        part = Sequences(s.ids[chosen], s.segments[chosen], s.lengths[chosen], labels)
        return _Masked(self.model, part, Masked(m.inputs[chosen], m.labels[chosen]))


class Site(AveragingSite, MethodSite):
    """One silo: its notes, tokenised once, and the tasks that the server may ask for.

    apart: of training with differential privacy, sequences that no two units share.
    directory: where the finished model and its scores are written; None writes nothing.
    cache: folder below which tokens are kept for the next run. draws: of packing,
    orders, masks and dropout; None: the job's seed. count_step: as in `AveragingSite`.

    Raises ConfigError where an update would tell too much: the embeddings are trained
    on fewer tokens or steps than the configuration asks for.
    """

    apart: Plan
    rounds_counts = True

    def __init__(
        self,
        data: SiteNotes,
        config: Config,
        *,
        directory: Path | None = None,
        device: str = "cpu",
        cache: Path | None = None,
        progress: Any = None,
        draws: Draws | None = None,
        count_step: int = 1,
    ) -> None:
        self.data, self.config, self.directory = data, config, directory
        self.draws = draws or Draws(config.seed)
        shared = shared_model(config.model, config.seed, device)
        self.model, self._initial = shared.model, shared.initial
        if config.length > self.model.positions:
            raise ConfigError(
                f"length = {config.length}: {config.model.encoder} reads {self.model.positions} "
                "tokens at most"
            )
        self._folder = (cache or default_cache()) / "tokens"
        self.train_set = self._tokens(data.train)
        self.valid_set = self._tokens(data.valid) if data.valid_patients else None
        self._planned_epoch: tuple[int, Plan] | None = None
        self.num_examples = len(self._plan(0))
        super().__init__(
            data.id,
            config,
            shared.parameters,
            weight=max(1, self.train_set.patients),  # n_k, the number of patients
            examples=self.num_examples,
            tokens=len(self.train_set.ids),
            before=config.warm_up_cycles(self.model.new_head),
            warm_up=shared.head,
            first_rate=config.head_learning_rate,
            device=device,
            draws=self.draws,
            count_step=count_step,
        )
        if self.model.revealing:
            self.require_covered()
        self.scores: dict[str, Any] = {}

    def described(self) -> str:
        """What is shared and what stays as it was."""
        shared = sum(p.numel() for p in self.shared.values())
        whole = sum(p.numel() for p in self.model.parameters())
        return f"{shared:,} of {whole:,} parameters are trained and shared"

    def begin_warm_up(self) -> None:
        """The encoder is not sent in a warm-up; another site or run may have trained
        it."""
        load_into(self.shared, self._initial)

    # sequences

    def _tokens(self, notes: NoteSource) -> Tokens:
        tokenizer = self.model.tokenizer
        with within(f"site {self.data.id!r}", DataError):
            return cached_tokens(
                notes,
                tokenizer.tokenize,
                tokenizer.fingerprint,
                self.model.vocabulary,
                self._folder,
            )

    def _length(self, epoch: int) -> int:
        """Tokens of a sequence: `length`, from the last cycles up to the kept one
        `long_length`."""
        config = self.config
        cycle = epoch // max(1, int(config.local_epochs))
        last = config.warm_up_cycles(self.model.new_head) + config.last_cycle
        if cycle < last - config.long_cycles:
            return config.length
        return min(config.long_length, self.model.positions)

    def _plan(self, epoch: int) -> Plan:
        if self._planned_epoch is None or self._planned_epoch[0] != epoch:
            plan = self._laid_out(self.train_set, self._length(epoch), epoch)
            self._planned_epoch = (epoch, plan)
        return self._planned_epoch[1]

    def _laid_out(self, tokens: Tokens, length: int, epoch: int) -> Plan:
        make = plan_pairs if self.config.model.objective == "mlm+nsp" else plan_full
        return make(tokens, length, self.draws.seed, epoch)

    def steps(self, epoch: int, first: int = 0) -> Iterator[list[Step]]:
        """The epoch's mini-batches, in an order of its own."""
        plan, size = self._plan(epoch), self._part
        self.model.train(True)
        order = self.draws.rng_of("order", self.id, epoch).permutation(len(plan))
        for number in range(first, -(-len(order) // self.share)):
            rows = order[number * self.share : (number + 1) * self.share]
            rng = self.draws.rng_of("mask", self.id, epoch, number)
            batch = self._masked(self.train_set, plan, rows, rng)
            yield [batch.rows(slice(at, at + size)) for at in range(0, len(rows), size)]

    def _masked(
        self, tokens: Tokens, plan: Plan, rows: np.ndarray, rng: np.random.Generator
    ) -> _Masked:
        config, specials = self.config, self.model.specials
        sequences = gather(tokens, plan, rows, specials)
        if config.model.objective == "denoise":
            masked = denoise(sequences.ids, specials, rng, rate=config.infilled)
        else:
            continues = self.model.tokenizer.continues if config.whole_words else None
            masked = mask(
                sequences.ids,
                specials,
                self.model.vocabulary,
                rng,
                rate=config.masked,
                continues=continues,
            )
        return _Masked(self.model, sequences, masked)

    # judging

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Counts on the site's held-out notes, masked in the same way every time."""
        self.load(tensors)
        return self._report(self._judge(self.valid_set, self.id))

    def _report(self, counts: Mapping[str, float]) -> Update:
        """Return counts on held-out notes as they leave the site, the mean loss
        unchanged."""
        reported = {
            name: float(round_count(count, self.count_step))
            for name, count in counts.items()
            if name != "loss"
        }
        loss = scale_sum(counts["loss"], int(counts["examples"]), self.count_step)
        return Update(metrics={"loss": loss, **reported})

    @torch.no_grad()
    def _judge(self, tokens: Tokens | None, of: str) -> dict[str, float]:
        """Counts on held-out notes of the site `of`, whoever has trained."""
        counts = dict.fromkeys(
            ("loss", "examples", "right", "pairs", "pairs_right"), 0.0
        )
        if tokens is None:
            return counts
        plan = self._laid_out(tokens, self.config.length, 0)
        rng = self.draws.rng_of("held out", of)
        self.model.train(False)
        for start in range(0, len(plan), EVALUATED):
            rows = np.arange(start, min(start + EVALUATED, len(plan)))
            batch = self._masked(tokens, plan, rows, rng)
            with self._precision():
                found = self.model.loss(batch.sequences, batch.masked)
            counts["loss"] += float(found.token_loss)
            counts["examples"] += found.predictions
            counts["right"] += found.right
            counts["pairs"] += found.pairs
            counts["pairs_right"] += found.pair_right
        return counts

    def scores_on(self, site: SiteNotes) -> dict[str, Any]:
        """This model's scores on another site's held-out notes."""
        held_out = self._tokens(site.valid) if site.valid_patients else None
        return scores(self._judge(held_out, site.id))

    @property
    def valid_score(self) -> float | None:
        """Minus the held-out loss of the model that was kept; None where nothing is
        held out."""
        masked = self.scores.get("masked")
        return None if masked is None else -float(masked["loss"])

    def finish(self, tensors: Tensors) -> Update:
        """Judge the model that was kept, and save it as a Hugging Face directory."""
        self.load_kept(tensors)
        counts = self._judge(self.valid_set, self.id)
        self.scores = scores(counts)
        if self.directory is not None:
            self.model.save(self.directory / "model")
        return self._report(counts)


def scores(counts: Mapping[str, float]) -> dict[str, Any]:
    """Mean loss (nats), perplexity and share of right guesses; of next sentences, if
    any.

    Empty where nothing is held out.
    """
    examples = counts["examples"]
    if not examples:
        return {}
    loss = counts["loss"] / examples
    found = {
        "masked": {
            "loss": loss,
            "perplexity": math.exp(min(loss, 50.0)),
            "accuracy": counts["right"] / examples,
            "tokens": examples,
        }
    }
    if counts["pairs"]:
        found["next_sentence"] = {"accuracy": counts["pairs_right"] / counts["pairs"]}
    return found


# what a job asks of a method


def for_sites(config: Config, sites: Sequence[SiteNotes]) -> Config:
    """The configuration with the number of sites."""
    return for_names(config, [site.id for site in sites])


def alone(config: Config, sites: Sequence[SiteNotes]) -> tuple[Config, ...]:
    """Each site's configuration where it trains by itself."""
    return parts(config, [site.train_characters for site in sites])


def pooled(
    config: Config, sites: Sequence[SiteNotes], complete: Sequence[SiteNotes] | None
) -> tuple[tuple[SiteNotes, ...], Config]:
    """One model trained on all sites' notes: the paper's centralised pre-training."""
    return (pooled_notes(sites),), central(config)


def planned(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Cycles, and the sequences of each at all sites together."""
    new_head = shared_model(config.model, config.seed, "cpu").model.new_head
    return config.warm_up_cycles(new_head) + config.last_cycle, examples_of(
        config, sizes
    )


def traffic(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run."""
    shared = shared_model(config.model, config.seed, "cpu")
    head = nbytes({name: shared.initial[name] for name in shared.head})
    before = config.warm_up_cycles(shared.model.new_head)
    return traffic_of(config, shared.initial, before, head)


def private_units(site: Site, unit: Unit) -> list[np.ndarray]:
    """The sequences of each unit, rows of `Site.apart`, which are of its own notes
    alone.

    Raises ConfigError for a sentence, and where a note's patient is not known.
    """
    if unit == "sentence":
        raise ConfigError(
            '[privacy] unit = "sentence": a language model reads stretches of notes: set unit = '
            '"document" or "patient"'
        )
    require_patients(site.id, unit, (note.patient for note in site.data.train()))
    tokenize, owned = site.model.tokenizer.tokenize, dict[tuple[str, ...], list[int]]()
    tokens, at = site.train_set, 0
    for note in site.data.train():
        if tokens.dropped and not any(tokenize(sentences(note.text))):
            continue  # it has no place in the tokens
        name = f"{note.source}/{note.id}"
        # [abadi units]
        owned.setdefault(owner_of(note.patient, name, unit), []).append(at)
        at += 1
    plans = [
        _of_unit(tokens, own, site.config.length, site.draws) for own in owned.values()
    ]
    bounds = np.cumsum([0, *(len(plan.stretches) for plan in plans)])
    rows = [
        plan.bounds[:-1] + start for plan, start in zip(plans, bounds, strict=False)
    ]
    site.apart = Plan(
        np.concatenate([plan.stretches for plan in plans]),
        np.append(np.concatenate(rows), bounds[-1]),
        None,
    )
    return np.split(
        np.arange(len(site.apart)), np.cumsum([len(plan) for plan in plans])[:-1]
    )


def _of_unit(tokens: Tokens, documents: list[int], length: int, draws: Draws) -> Plan:
    """Sequences of some documents alone, as stretches of the corpus."""
    first = tokens.documents
    lines = [tokens.sentences[first[d] : first[d + 1] + 1] for d in documents]
    sizes = np.concatenate([np.diff(own) for own in lines])
    ends = np.cumsum([0, *(len(own) - 1 for own in lines)])
    bounds = np.cumsum([0, *sizes])
    plan = plan_full(Tokens(tokens.ids, bounds, ends), length, draws.seed, 0)
    starts = bounds[ends[:-1]]  # of the documents among themselves
    owner = np.searchsorted(starts, plan.stretches[:, 0], side="right") - 1
    moved = np.array([own[0] for own in lines]) - starts
    return replace(plan, stretches=plan.stretches + moved[owner, None])


def private_loss(site: Site, rows: np.ndarray) -> torch.Tensor:
    """The mean loss of some sequences of `Site.apart`; what is masked follows from
    torch's generator, which is seeded for their unit."""
    rng = np.random.default_rng(int(torch.randint(2**62, ())))
    part = site._masked(site.train_set, site.apart, rows, rng)
    return part.loss([part])


def warnings(config: Config) -> tuple[str, ...]:
    """What a person should know before training."""
    if config.model.train != "all":
        return ()
    return (
        'train = "all" shares the word embeddings and the output bias: their updates tell which '
        'words a site\'s notes have (train = "encoder" keeps them as they are)',
    )


def save(config: Config, final: State, folder: Path) -> bool:
    """The language model of a run's last state, as a Hugging Face directory."""
    shared = shared_model(config.model, config.seed, "cpu")
    load_into(shared.parameters, ended(final, shared.parameters))
    shared.model.save(folder)
    return True


METHOD = Method(
    Config,
    Site,
    train,
    language_model_config,
    presets("pretrain"),
    planned,
    pooled,
    judged,
    holds="notes",
    models=lambda: {"": LanguageModelConfig},
    for_sites=for_sites,
    alone=alone,
    traffic=traffic,
    warnings=warnings,
    size_warnings=size_warnings,
    one_model=lambda config: True,
    save=save,
    each=by_each,
    private=private_by(
        lambda config: snapshot(shared_model(config.model, config.seed, "cpu").initial),
        private_loss,
        settings={"head_cycles": 0, "long_cycles": 0},
        units=private_units,
        content=lambda data: fingerprint(data).encode(),
        counts=None,
    ),
)
