"""Pre-training of a language model across sites.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using
clinical notes from multiple silos", section 3.2. Each global cycle trains one epoch at
every site. The mean of the sites' parameters, weighted by their numbers of patients, is
the start of the next cycle (`averaging.py`, Eq. 1). Objectives: Devlin et al. 2018
(masked tokens, next sentence), Lewis et al. 2019 (infilling).

By default the word embeddings and the output bias are frozen. Otherwise the sign of the
bias's gradient would reveal every masked token of a batch, and the changed rows of the
embeddings its words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge

from fednotes.core.counts import round_count, scale_sum
from fednotes.core.errors import ConfigError, DataError, naming_place
from fednotes.core.federation import Federation, MethodSite, State
from fednotes.core.numbers import (
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
)
from fednotes.core.seeds import Draws
from fednotes.core.settings import FilledIn, checked
from fednotes.core.tensors import copy_tensors, load_into, nbytes
from fednotes.core.update import Tensors, Update, require_metrics
from fednotes.data.clinical import list_note_sentences
from fednotes.data.notes.sites import (
    NoteSource,
    SiteNotes,
    fingerprint_notes,
    pool_notes,
)
from fednotes.encoders.features import find_default_cache
from fednotes.encoders.language_model import (
    LanguageModel,
    LanguageModelConfig,
    build_language_model,
    read_language_model_config,
)
from fednotes.encoders.packing import (
    Masked,
    SequencePlan,
    Sequences,
    denoise,
    gather_sequences,
    mask,
    plan_full,
    plan_pairs,
)
from fednotes.encoders.token_cache import Tokens, tokenize_with_cache
from fednotes.methods import read_presets
from fednotes.methods.averaging import (
    KEEP_BEST,
    Averaging,
    AveragingSite,
    AveragingWithDP,
    Server,
    count_examples,
    count_steps,
    estimate_traffic,
    list_size_warnings,
    make_alone_configs,
    remove_federation_settings,
    run_cycles,
)
from fednotes.methods.base import Method
from fednotes.privacy.promise import Privacy, Unit
from fednotes.privacy.units import make_unit_key, require_patients
from fednotes.training.local_trainer import Step
from fednotes.training.server_steps import fill_in_sites, needs_each_update
from fednotes.training.sites import select_final

EVALUATION_BATCH = 64  # sequences in a forward pass of an evaluation


@checked(frozen=True)
class Config(Averaging):
    """Settings of pre-training a language model.

    Attributes:
        model: The language model.
        length: Number of tokens in a training sequence.
        long_length: Number of tokens in a sequence of the long cycles; at most as many
            as the model can read.
        long_cycles: Number of cycles with sequences of `long_length`; they are the last
            ones up to the cycle that is kept. The original BERT trains nine tenths of
            its steps on 128 tokens and the rest on 512. A cycle with 512 tokens has a
            quarter of the steps, so 3 of 10 cycles are a tenth of the steps.
        masked: Fraction of the tokens to predict.
        whole_words: Whether the sub-words of a word are masked together.
        infilled: Fraction of the words that lie in infilled spans, for model.objective
            = "denoise".
        head_cycles: Number of extra cycles, before the first one, that train only the
            prediction head. They are run only if the directory has no head and it
            starts from random numbers.
        head_learning_rate: Learning rate of the prediction head in the cycles of
            `head_cycles`.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    model: FilledIn[LanguageModelConfig] = field(default_factory=LanguageModelConfig)
    length: Annotated[int, Ge(8)] = 128
    long_length: Annotated[int, Ge(8)] = 512
    long_cycles: NonNegativeInt = 0
    masked: PositiveFraction = 0.15
    whole_words: bool = False
    infilled: PositiveFraction = 0.3
    head_cycles: NonNegativeInt = 1
    head_learning_rate: PositiveFloat = 3e-3
    privacy: FilledIn[Privacy | None] = None
    min_sites: FilledIn[int] = 0

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: No run can have these settings.
        """
        super().__post_init__()
        if self.long_cycles > self.cycles:
            raise ConfigError(
                f"long_cycles = {self.long_cycles}: expected 0 to cycles = "
                f"{self.cycles}"
            )
        if self.privacy and self.model.objective == "mlm+nsp":
            raise ConfigError(
                '[model] objective = "mlm+nsp" puts text of one patient beside '
                "another's, so [privacy] cannot separate the units: set "
                'objective = "mlm"'
            )
        crowded = self.batch == "shared" and self.sites > self.batch_size
        if self.long_cycles and (self.local_epochs % 1 or crowded):
            raise ConfigError(
                "long_cycles need whole epochs: set either long_cycles or parts of "
                'epochs, and with batch = "shared" a batch_size of at least one '
                "sequence a site"
            )

    def count_warm_up_cycles(self, *, has_new_head: bool) -> int:
        """Return the number of cycles before the first one."""
        return self.head_cycles if has_new_head else 0


def train(federation: Federation, config: Config) -> State:
    """Run the global cycles of section 3.2; see `averaging.run_cycles`.

    Args:
        federation: The sites.
        config: The settings of the run.

    Returns:
        The server's final state.
    """
    shared = open_shared_model(config.model, config.seed, "cpu")
    server = Server(
        config,
        shared.initial,
        summarise_masked,
        federation.resume(),
        warm_up_cycles=config.count_warm_up_cycles(has_new_head=shared.model.new_head),
        warm_up=shared.head,
    )
    return run_cycles(federation, server)


def summarise_masked(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the held-out loss and accuracy over all sites' masked tokens."""
    require_metrics(metrics, "examples", "loss", "right", "pairs", "pairs_right")
    masked = compute_scores(metrics).get("masked")
    if masked is None:
        return {"held_out": -math.inf}
    return {
        "held_out": -masked["loss"],
        "valid_loss": masked["loss"],
        "valid_accuracy": masked["accuracy"],
    }


@dataclass(frozen=True, eq=False)
class Shared:
    """One model for all sites of a process, because pre-training keeps nothing private.

    Attributes:
        model: The model. Every task begins with the server's parameters.
        parameters: All trained parameters by name.
        head: Names of the parameters of the prediction head.
        initial: The parameters before training.
    """

    model: LanguageModel
    parameters: dict[str, torch.nn.Parameter]
    head: tuple[str, ...]
    initial: dict[str, torch.Tensor]


@lru_cache(maxsize=2)
def open_shared_model(config: LanguageModelConfig, seed: int, device: str) -> Shared:
    """Return this process's only model with these settings; build it if necessary."""
    model = build_language_model(config, seed, device)
    parameters = model.trainable()
    return Shared(
        model, parameters, tuple(model.select_head()), copy_tensors(parameters)
    )


@dataclass(frozen=True)
class _Masked(Step):
    """A batch of sequences with masked tokens to predict."""

    model: LanguageModel
    sequences: Sequences
    masked: Masked

    @property
    def examples(self) -> int:
        """The number of masked tokens."""
        return len(self.masked.positions)

    def loss(self, batch: Sequence[_Masked]) -> torch.Tensor:
        """Return this part's contribution to the batch's mean loss, ().

        All masked tokens of the batch have equal weight, and so have its sentence
        pairs.
        """
        losses = self.model.loss(self.sequences, self.masked)
        all_tokens = max(1, sum(part.examples for part in batch))
        all_rows = sum(len(part.masked.inputs) for part in batch)
        tokens = self.examples / all_tokens
        rows = len(self.masked.inputs) / all_rows
        return losses.masked * tokens + losses.next_sentence * rows

    def select_rows(self, rows: slice) -> _Masked:
        """Return a slice of the sequences."""
        sequences = self.sequences
        masked = self.masked
        random_next = sequences.random_next
        return _Masked(
            self.model,
            Sequences(
                sequences.ids[rows],
                sequences.segments[rows],
                sequences.lengths[rows],
                None if random_next is None else random_next[rows],
            ),
            Masked(masked.inputs[rows], masked.labels[rows]),
        )


class Site(AveragingSite, MethodSite):
    """One site: its notes, tokenised once, and the tasks that the server requests.

    Args:
        data: The site's notes.
        config: The settings of the run.
        directory: Folder for the finished model; None writes nothing.
        device: Device of the model.
        cache: Folder in which tokens are cached for the next run.
        progress: Ignored; accepted because other methods' sites use it.
        draws: Random draws for packing, order, masks and dropout; None derives them
            from the job's seed.
        count_step: As in `AveragingSite`.

    Attributes:
        apart: Under differential privacy, sequences each of which has text of one unit
            only.

    Raises:
        ConfigError: An update would reveal too much, because the embeddings are trained
            on fewer tokens or steps than the settings require.
    """

    apart: SequencePlan
    rounds_counts = True

    def __init__(  # noqa: PLR0913 - the options of every method
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
        del progress
        self.data = data
        self.config = config
        self.directory = directory
        self.draws = draws or Draws(config.seed)
        shared = open_shared_model(config.model, config.seed, device)
        self.model = shared.model
        self._initial = shared.initial
        if config.length > self.model.positions:
            raise ConfigError(
                f"length = {config.length}: {config.model.encoder} reads at most "
                f"{self.model.positions} tokens"
            )
        self._folder = (cache or find_default_cache()) / "tokens"
        self.train_set = self._tokenize(data.train)
        self.valid_set = self._tokenize(data.valid) if data.valid_patients else None
        self._planned_epoch: tuple[int, SequencePlan] | None = None
        self.num_examples = len(self._plan(0))
        self.scores: dict[str, Any] = {}
        super().__init__(
            data.id,
            config,
            shared.parameters,
            weight=max(1, self.train_set.patients),  # n_k: the number of patients
            examples=self.num_examples,
            warm_up_cycles=config.count_warm_up_cycles(
                has_new_head=self.model.new_head
            ),
            warm_up=shared.head,
            warm_up_rate=config.head_learning_rate,
            device=device,
            draws=self.draws,
            count_step=count_step,
        )
        if self.model.revealing:
            self.require_covered()
            if config.long_cycles:  # they have fewer steps
                self._plan(self._last_epoch)
                self.require_covered()

    def describe_parameters(self) -> str:
        """Describe how many parameters are trained and shared."""
        trained = sum(p.numel() for p in self.shared.values())
        total = sum(p.numel() for p in self.model.parameters())
        return f"{trained:,} of {total:,} parameters are trained and shared"

    def begin_warm_up(self) -> None:
        """Reset the encoder, which other sites of this process may have trained.

        The server does not send the encoder in a warm-up.
        """
        load_into(self.shared, self._initial)

    # Sequences.

    def _tokenize(self, notes: NoteSource) -> Tokens:
        """Return the tokens of notes, from the cache if it has them."""
        tokenizer = self.model.tokenizer
        with naming_place(f"site {self.data.id!r}", DataError):
            return tokenize_with_cache(
                notes,
                tokenizer.tokenize,
                tokenizer.fingerprint,
                self.model.vocabulary,
                self._folder,
            )

    def _choose_length(self, epoch: int) -> int:
        """Return the tokens per sequence in an epoch; long cycles have more."""
        config = self.config
        cycle = epoch // max(1, int(config.local_epochs))
        warm_up = config.count_warm_up_cycles(has_new_head=self.model.new_head)
        if cycle < warm_up + config.last_cycle - config.long_cycles:
            return config.length
        return min(config.long_length, self.model.positions)

    @property
    def _last_epoch(self) -> int:
        """The number of the run's last epoch."""
        warm_up = self.config.count_warm_up_cycles(has_new_head=self.model.new_head)
        epochs_per_cycle = max(1, int(self.config.local_epochs))
        return (warm_up + self.config.last_cycle) * epochs_per_cycle - 1

    def count_example_tokens(self) -> np.ndarray:
        """Return the number of tokens of each sequence, (sequences,)."""
        assert self._planned_epoch is not None
        _, plan = self._planned_epoch
        return plan.count_tokens()

    def _plan(self, epoch: int) -> SequencePlan:
        """Return the sequences of an epoch, caching the latest epoch."""
        if self._planned_epoch is None or self._planned_epoch[0] != epoch:
            plan = self._pack(self.train_set, self._choose_length(epoch), epoch)
            self._planned_epoch = (epoch, plan)
        return self._planned_epoch[1]

    def _pack(self, tokens: Tokens, length: int, epoch: int) -> SequencePlan:
        """Plan an epoch's sequences; they are pairs with next-sentence prediction."""
        has_pairs = self.config.model.objective == "mlm+nsp"
        pack = plan_pairs if has_pairs else plan_full
        return pack(tokens, length, self.draws.seed, epoch)

    def iterate_steps(self, epoch: int, first: int = 0) -> Iterator[list[Step]]:
        """Yield the epoch's mini-batches of sequences, in a random order."""
        plan = self._plan(epoch)
        self.model.train()
        order = self.draws.rng_of("order", self.id, epoch).permutation(len(plan))
        batches = -(-len(order) // self.share)
        size = self._part_size
        for number in range(first, batches):
            rows = order[number * self.share : (number + 1) * self.share]
            rng = self.draws.rng_of("mask", self.id, epoch, number)
            batch = self._mask_sequences(self.train_set, plan, rows, rng)
            yield [
                batch.select_rows(slice(start, start + size))
                for start in range(0, len(rows), size)
            ]

    def _mask_sequences(
        self,
        tokens: Tokens,
        plan: SequencePlan,
        rows: np.ndarray,
        rng: np.random.Generator,
    ) -> _Masked:
        """Return some sequences of a plan, with masked tokens or infilled spans."""
        config = self.config
        specials = self.model.specials
        sequences = gather_sequences(tokens, plan, rows, specials)
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

    # Evaluation and the final model.

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Return counts on the held-out notes, with the same masks every time."""
        del cycle
        self.load(tensors)
        return self._report_counts(self._judge(self.valid_set, self.id))

    def _report_counts(self, counts: Mapping[str, float]) -> Update:
        """Return counts on held-out notes, rounded as they leave the site.

        The mean loss is unchanged.
        """
        reported = {
            name: float(round_count(count, self.count_step))
            for name, count in counts.items()
            if name != "loss"
        }
        loss = scale_sum(counts["loss"], int(counts["examples"]), self.count_step)
        return Update(metrics={"loss": loss, **reported})

    @torch.no_grad()
    def _judge(self, tokens: Tokens | None, site: str) -> dict[str, float]:
        """Return counts on the held-out notes of a site.

        Args:
            tokens: The notes; None if there are none.
            site: The site's name, from which the masks are derived, whichever site
                trained the model.
        """
        names = ("loss", "examples", "right", "pairs", "pairs_right")
        counts = dict.fromkeys(names, 0.0)
        if tokens is None:
            return counts

        plan = self._pack(tokens, self.config.length, 0)
        rng = self.draws.rng_of("held out", site)
        self.model.eval()
        for start in range(0, len(plan), EVALUATION_BATCH):
            rows = np.arange(start, min(start + EVALUATION_BATCH, len(plan)))
            batch = self._mask_sequences(tokens, plan, rows, rng)
            with self.trainer.setting_precision():
                result = self.model.loss(batch.sequences, batch.masked)
            counts["loss"] += float(result.token_loss)
            counts["examples"] += result.predictions
            counts["right"] += result.right
            counts["pairs"] += result.pairs
            counts["pairs_right"] += result.pair_right
        return counts

    def score_on(self, site: SiteNotes) -> dict[str, Any]:
        """Return this model's scores on another site's held-out notes."""
        held_out = self._tokenize(site.valid) if site.valid_patients else None
        return compute_scores(self._judge(held_out, site.id))

    @property
    def valid_score(self) -> float | None:
        """The negative held-out loss of the kept model; None without held-out notes."""
        masked = self.scores.get("masked")
        return None if masked is None else -float(masked["loss"])

    def finish(self, tensors: Tensors) -> Update:
        """Evaluate the kept model and save it as a Hugging Face directory."""
        self.load_kept(tensors)
        counts = self._judge(self.valid_set, self.id)
        self.scores = compute_scores(counts)
        if self.directory is not None:
            self.model.save(self.directory / "model")
        return self._report_counts(counts)


def compute_scores(counts: Mapping[str, float]) -> dict[str, Any]:
    """Return scores computed from counts on held-out notes.

    Returns:
        "masked": mean loss in nats, perplexity, accuracy and number of tokens.
        "next_sentence": accuracy, if there are pairs. Empty if nothing is held out.
    """
    examples = counts["examples"]
    if not examples:
        return {}
    loss = counts["loss"] / examples
    by_objective = {
        "masked": {
            "loss": loss,
            "perplexity": math.exp(min(loss, 50.0)),
            "accuracy": counts["right"] / examples,
            "tokens": examples,
        }
    }
    if counts["pairs"]:
        accuracy = counts["pairs_right"] / counts["pairs"]
        by_objective["next_sentence"] = {"accuracy": accuracy}
    return by_objective


# The interface to jobs.


class PretrainWithDP(AveragingWithDP):
    """Pre-training with differential privacy.

    Units are packed separately, so that no sequence has text of two units.
    """

    required_settings = MappingProxyType(
        {**AveragingWithDP.required_settings, "head_cycles": 0, "long_cycles": 0}
    )

    def make_initial_parameters(
        self, config: Config, agreed: Tensors
    ) -> dict[str, torch.Tensor]:
        """Return the shared parameters before training."""
        del agreed
        return copy_tensors(open_shared_model(config.model, config.seed, "cpu").initial)

    def group_units(self, site: Site, unit: Unit) -> list[np.ndarray]:
        """Pack each unit's notes separately into `Site.apart`; return each unit's rows.

        Raises:
            ConfigError: The unit is a sentence, or it is a patient and a note names no
                patient.
        """
        if unit == "sentence":
            raise ConfigError(
                '[privacy] unit = "sentence": a language model reads stretches of '
                'notes: set unit = "document" or "patient"'
            )
        require_patients(site.id, unit, (note.patient for note in site.data.train()))
        plans = [
            _pack_apart(site.train_set, documents, site.config.length, site.draws)
            for documents in _group_documents_by_unit(site, unit)
        ]
        site.apart = _join_plans(plans)
        first_rows = np.cumsum([len(plan) for plan in plans])[:-1]  # from unit 1 on
        return np.split(np.arange(len(site.apart)), first_rows)

    def loss(self, site: Site, indices: np.ndarray) -> torch.Tensor:
        """Return the mean loss of some sequences of `Site.apart`.

        Masks are drawn from torch's generator, which is seeded for their unit.
        """
        rng = np.random.default_rng(int(torch.randint(2**62, ())))
        part = site._mask_sequences(site.train_set, site.apart, indices, rng)
        return part.loss([part])

    def hash_data(self, data: SiteNotes) -> bytes:
        """Return a digest of a site's notes."""
        return fingerprint_notes(data).encode()

    def count_size(self, config: Config) -> int:
        """Return 0, because there is nothing to count."""
        del config
        return 0


def _group_documents_by_unit(site: Site, unit: Unit) -> list[list[int]]:
    """Return each unit's documents as positions in the site's tokens."""
    tokenize = site.model.tokenizer.tokenize
    documents: dict[tuple[str, ...], list[int]] = {}
    place = 0
    for note in site.data.train():
        if site.train_set.dropped and not any(tokenize(list_note_sentences(note.text))):
            continue  # it was dropped from the tokens
        key = make_unit_key(
            note.patient, f"{note.source}/{note.id}", unit
        )  # [abadi units]
        documents.setdefault(key, []).append(place)
        place += 1
    return list(documents.values())


def _join_plans(plans: Sequence[SequencePlan]) -> SequencePlan:
    """Join plans without pairs into one plan with all their sequences."""
    stretches = np.concatenate([plan.stretches for plan in plans])
    bounds = []
    first_stretch = 0
    for plan in plans:
        bounds.append(plan.bounds[:-1] + first_stretch)
        first_stretch += len(plan.stretches)
    return SequencePlan(
        stretches,
        bounds=np.append(np.concatenate(bounds), first_stretch),
        random_next=None,
    )


def _pack_apart(
    tokens: Tokens, documents: list[int], length: int, draws: Draws
) -> SequencePlan:
    """Plan sequences of some documents only, as stretches of the corpus.

    Args:
        tokens: The corpus.
        documents: The documents' indices.
        length: Maximum number of tokens in a sequence.
        draws: Source of the order of the documents.
    """
    first = tokens.documents
    # The bounds of each document's sentences in the corpus.
    bounds_by_document = [
        tokens.sentences[first[d] : first[d + 1] + 1] for d in documents
    ]

    # A corpus of these documents alone, whose positions count from 0.
    sizes = np.concatenate([np.diff(bounds) for bounds in bounds_by_document])
    sentence_bounds = np.cumsum([0, *sizes])
    document_bounds = np.cumsum(
        [0, *(len(bounds) - 1 for bounds in bounds_by_document)]
    )
    alone = Tokens(tokens.ids, sentence_bounds, document_bounds)
    plan = plan_full(alone, length, draws.seed, 0)

    # Convert positions within these documents to positions in the corpus.
    starts = sentence_bounds[document_bounds[:-1]]
    document = np.searchsorted(starts, plan.stretches[:, 0], side="right") - 1
    offsets = np.array([bounds[0] for bounds in bounds_by_document]) - starts
    return replace(plan, stretches=plan.stretches + offsets[document, None])


class Pretrain(Method):
    """Pre-training as in Liu and Miller 2020, for a job."""

    config_class = Config
    site_class = Site
    presets = read_presets("pretrain")
    holds = "notes"
    dp = PretrainWithDP()
    length_key = "cycles"
    keep_best = KEEP_BEST

    def train(self, federation: Federation, config: Config) -> State:
        """Run the global cycles of section 3.2."""
        return train(federation, config)

    def read_model_config(self, table: Mapping[str, Any]) -> LanguageModelConfig:
        """Return the settings of a language model."""
        return read_language_model_config(table, where="")

    def list_models(self) -> Mapping[str, type[Any]]:
        """Return the class of the language model's settings."""
        return {"": LanguageModelConfig}

    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the held-out loss and accuracies."""
        return summarise_masked(metrics)

    def configure(self, config: Config, sites: Sequence[SiteNotes]) -> Config:
        """Return the settings with the number of sites filled in."""
        return fill_in_sites(config, [site.id for site in sites])

    def configure_alone(
        self, config: Config, sites: Sequence[SiteNotes]
    ) -> tuple[Config, ...]:
        """Return each site's settings, with its part of a shared mini-batch."""
        return make_alone_configs(config, [site.train_characters for site in sites])

    def configure_pooled(
        self,
        config: Config,
        sites: Sequence[SiteNotes],
        complete: Sequence[SiteNotes] | None,
    ) -> tuple[tuple[SiteNotes, ...], Config]:
        """Return the pooled data and the settings of centralised pre-training."""
        del complete
        return (pool_notes(sites),), remove_federation_settings(config)

    def plan_rounds(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the number of cycles and the sequences per cycle over all sites."""
        new_head = open_shared_model(config.model, config.seed, "cpu").model.new_head
        cycles = config.count_warm_up_cycles(has_new_head=new_head) + config.last_cycle
        return cycles, count_examples(config, sizes)

    def count_steps(self, config: Config, sizes: Sequence[int]) -> int:
        """Return the steps of a site in all cycles, as the mean over the sites."""
        return count_steps(config, sizes)

    def sends_integers(self, config: Config) -> bool:
        """Return whether updates are packed into integers."""
        return config.compression == "packed"

    def estimate_traffic(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that a site sends and receives."""
        del sizes
        shared = open_shared_model(config.model, config.seed, "cpu")
        return estimate_traffic(
            config,
            shared.initial,
            warm_up_cycles=config.count_warm_up_cycles(
                has_new_head=shared.model.new_head
            ),
            warm_up_bytes=nbytes({name: shared.initial[name] for name in shared.head}),
        )

    def list_warnings(self, config: Config) -> tuple[str, ...]:
        """Warn if the word embeddings and the output bias are shared."""
        if config.model.train != "all":
            return ()
        return (
            'train = "all" shares the word embeddings and the output bias: their '
            'updates reveal which words a site\'s notes have (train = "encoder" keeps '
            "them as they are)",
        )

    def list_size_warnings(
        self, config: Config, sizes: Sequence[int]
    ) -> tuple[str, ...]:
        """Return a warning if the parts add up to much more than the mini-batch."""
        return list_size_warnings(config, sizes)

    def ends_with_one_model(self, config: Config) -> bool:
        """Return True, because nothing is private."""
        del config
        return True

    def save_model(self, config: Config, final: State, folder: Path) -> bool:
        """Write the language model as a Hugging Face directory."""
        shared = open_shared_model(config.model, config.seed, "cpu")
        load_into(shared.parameters, select_final(final, shared.parameters))
        shared.model.save(folder)
        return True

    def needs_each_update(self, config: Config) -> bool:
        """Return whether the aggregation looks at each site's update."""
        return needs_each_update(config)


METHOD = Pretrain()
