"""Records of a server's observations while a job trains, and of the ground truth.

`ObservingEngine` is the in-process engine; it keeps what each sum reveals to a server
that follows the protocol, as `Observation`s. `recording_batches` listens to the sites'
models and records what they were trained on, as `TrainingRecord`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from fednotes.core.errors import ConfigError
from fednotes.core.federation import EVALUATE, Option, SiteTasks
from fednotes.core.tensors import copy_tensors
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import CommittedRound
from fednotes.training.compression import decode_change, unpack_total

MAX_ROUNDS = 200  # maximum number of rounds to wait for an evaluation
FULL_SUMS = 8  # sums whose tensors are kept; also first and last rounds to run
STAGE_FACTOR = 3  # factor for the number of sums if each round has several
Reply = TypeVar("Reply", Total, dict[str, Update])


@dataclass
class TrainingRecord:
    """What one site's model was trained on for one update.

    Attributes:
        row_counts: By the name of a word table, (rows,) how often each row was read. ""
            is the word table of a Hugging Face encoder; "masked" counts the tokens to
            be predicted.
        sequences: (texts, places) token ids that an encoder embedded.
        batches: Corpora of models that find mentions, each with the indices of its
            sentences.
    """

    row_counts: dict[str, np.ndarray] = field(default_factory=dict)
    sequences: list[np.ndarray] = field(default_factory=list)
    batches: list[tuple[Any, np.ndarray]] = field(default_factory=list)

    def is_empty(self) -> bool:
        """Return whether the model was not trained."""
        return not self.row_counts and not self.batches

    def add_rows(self, table: str, ids: np.ndarray, rows: int) -> None:
        """Count `ids`, of any shape, in a table with `rows` rows."""
        counts = np.bincount(ids.ravel(), minlength=rows)
        self.row_counts[table] = counts + self.row_counts.get(table, 0)


def find_present_and_absent(
    table: str, records: Sequence[TrainingRecord]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows,) whether the first site read each row, and whether no site did."""
    counts = [
        record.row_counts[table] for record in records if table in record.row_counts
    ]
    return counts[0] > 0, np.sum(counts, axis=0) == 0


@dataclass(frozen=True, eq=False)
class Observation:
    """What the server sees of one task, and the ground truth.

    The server sees the first four. The others serve to judge an attack.

    Attributes:
        task: Name of the task.
        sent_to_site: The parameters that the sites computed with.
        tensors: The tensors from the audited site; under a secure sum, from all sites
            together.
        metrics: The metrics from the same source.
        audited_update: The audited site's own update.
        other_updates: The updates of the other sites.
        total: The sum of all updates.
        records: What each site was trained on, the audited site first.
    """

    task: str
    sent_to_site: Tensors
    tensors: Tensors
    metrics: Mapping[str, float]
    audited_update: Update
    other_updates: Sequence[Update]
    total: Total
    records: Sequence[TrainingRecord]

    def compute_descent(self, name: str) -> Tensor | None:
        """Return the direction in which training moves a tensor, as float64.

        This is the change of a returned parameter, or the negative gradient. It is None
        if the tensor was not sent in a readable form.
        """
        value = self.tensors.get(name)
        if value is None or not value.numel():
            return None
        before = self.sent_to_site.get(name)
        if self.task == "train" and before is not None and before.shape == value.shape:
            return value.double() - before.double()
        return -value.double()


class EnoughObserved(Exception):
    """Ends a training early: the attacks need no further rounds."""


class ObservingEngine(InProcess):
    """The in-process engine, which keeps what the server sees of each sum.

    It ends the training with `EnoughObserved` after two rounds that train and one
    evaluation. A job on patients runs for the first round of each of its two stages;
    under differential privacy, both stages are one run, so several rounds at its start
    and at its end are observed. For later sums, only the counts are kept, because
    tensors would need too much memory.

    Args:
        sites: The sites' tasks, in their fixed order.
        audited: Name of the audited site.
        secure: Whether sums are secure.
        has_patients: Whether the job is on patients.
    """

    def __init__(
        self,
        sites: Sequence[SiteTasks],
        *,
        audited: str,
        secure: bool,
        has_patients: bool,
    ) -> None:
        super().__init__(sites, secure=secure)
        self.observations: list[Observation] = []
        self.record = TrainingRecord()  # record of the site that is computing
        self._audited = audited
        self._has_patients = has_patients
        self._evaluates = any(EVALUATE in site.tasks for site in sites)
        self._full_sums = FULL_SUMS * (STAGE_FACTOR if has_patients else 1)
        self._sent: dict[str, Tensor] = {}
        self._updates: dict[str, tuple[Update, TrainingRecord]] = {}  # of this sum

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """Add the sites' updates and keep what the server sees of them."""
        return self._observe(super().sum, task, tensors, options)

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> dict[str, Update]:
        """Return the sites' updates and keep what the server sees of them."""
        return self._observe(super().each, task, tensors, options)

    def run(
        self, site: SiteTasks, task: str, sent: Tensors, options: Mapping[str, Option]
    ) -> Update:
        """Run one site's task and keep its update and what it was trained on."""
        self.record = TrainingRecord()
        update = super().run(site, task, sent, options)
        if self._keeps_tensors():
            self._updates[site.id] = update, self.record
        else:
            self._updates[site.id] = Update(metrics=update.metrics), TrainingRecord()
        return update

    def rounds(self, start: int, stop: int) -> Iterator[CommittedRound]:
        """Yield as many rounds as the attacks need.

        Raises:
            EnoughObserved: The job is not on patients, and enough has been observed.
        """
        limit = FULL_SUMS
        if self._evaluates:
            limit = 1 if self._has_patients else MAX_ROUNDS
        for number in super().rounds(start, min(stop, start + limit)):
            yield number
            if not self._has_patients and self._has_observed_enough():
                break
        if not self._has_patients:
            raise EnoughObserved
        if not self._evaluates:
            # Under differential privacy, the last rounds belong to the second stage.
            yield from super().rounds(max(start + FULL_SUMS, stop - FULL_SUMS), stop)

    def _keeps_tensors(self) -> bool:
        """Return whether the tensors of the next sum are kept, not only its counts."""
        return len(self.observations) < self._full_sums

    def _has_observed_enough(self) -> bool:
        """Return whether two rounds have trained, and one was evaluated if any is."""
        # Under differential privacy, a round may train on nothing by chance, so count
        # the others.
        trained = sum(not seen.records[0].is_empty() for seen in self.observations)
        tasks = {seen.task for seen in self.observations}
        return trained > 1 and (not self._evaluates or EVALUATE in tasks)

    def _observe(
        self,
        ask: Callable[..., Reply],
        task: str,
        tensors: Tensors | None,
        options: Mapping[str, Option],
    ) -> Reply:
        """Run a task at all sites, and keep what the server sees of it."""
        keeps_tensors = self._keeps_tensors()
        sent: dict[str, Tensor] = {}
        if keeps_tensors:
            sent = copy_tensors(
                tensors or {}
            )  # a server may change its tensors in place
            # Each tensor is sent only once, so earlier ones must be kept.
            self._sent = {**self._sent, **sent}
        else:
            self._sent = {}

        reply = ask(task, tensors, **options)
        total = reply if isinstance(reply, Total) else Total.of(reply.values())
        if not keeps_tensors:
            total = replace(total, tensors={})
        observation = self._make_observation(task, total)
        if task == "send" and sent:  # the second half of a compressed update
            observation = self._decompress(observation, sent, int(options["sites"]))
        self.observations.append(observation)
        return reply

    def _make_observation(self, task: str, total: Total) -> Observation:
        """Return what the server sees of the sum of `_updates`, and clear them."""
        audited_update, audited_record = self._updates.pop(self._audited)
        others = list(self._updates.values())
        self._updates.clear()
        visible = audited_update
        if self.summing is not None:
            mean = total.mean() if total.weight > 0 else {}
            visible = Update(mean, metrics=total.metrics)
        return Observation(
            task=task,
            sent_to_site=self._sent,
            tensors=visible.tensors,
            metrics=visible.metrics,
            audited_update=audited_update,
            other_updates=[update for update, _ in others],
            total=total,
            records=[audited_record, *(record for _, record in others)],
        )

    def _decompress(
        self, compressed: Observation, code: Tensors, sites: int
    ) -> Observation:
        """Return the training that ends with `compressed`, with the decoded update.

        A site reports mean squares of its change and then, in the task "send", the
        change in whole steps of the agreed sizes (`training/compression.py`).
        """
        training = self.observations.pop()
        shapes = {name: training.sent_to_site[name] for name in training.tensors}
        total = compressed.total
        if self.summing is None:
            total = Total.of([compressed.audited_update])
        mean = unpack_total(total, shapes, sites).mean()
        change = decode_change(mean, code, shapes)
        before = training.sent_to_site
        tensors = {name: before[name] + value for name, value in change.items()}
        return replace(training, tensors=tensors)


@contextmanager
def recording_batches(
    models: Iterable[Any],
    current_record: Callable[[], TrainingRecord],
    *,
    only_training: bool = True,
) -> Iterator[None]:
    """Record what models read while the context is open.

    Args:
        models: Models that find mentions, or language models.
        current_record: Returns the record to write to.
        only_training: Whether to ignore what a model reads in evaluation mode.

    Raises:
        ConfigError: A model does not announce its batches.
    """

    def note_batch(model: Any, first: Any, second: Any) -> None:
        if model.training or not only_training:
            _note_batch(current_record(), model, first, second)

    def note_tokens(table: nn.Embedding, inputs: tuple[Tensor, ...]) -> None:
        if table.training or not only_training:
            _note_tokens(current_record(), table, inputs[0])

    with ExitStack() as stack:
        for model in models:
            listeners = getattr(model, "batch_listeners", None)
            if listeners is None:
                raise ConfigError(
                    f"models of type {type(model).__name__} cannot be audited, "
                    "because they do not announce their mini-batches "
                    "(core/listeners.py)"
                )
            word_table = _find_largest_embedding(model)
            if word_table is not None:
                handle = word_table.register_forward_pre_hook(note_tokens)
                stack.callback(handle.remove)
            stack.enter_context(listeners.listening(note_batch))
        yield


def _note_batch(record: TrainingRecord, model: Any, first: Any, second: Any) -> None:
    """Record a batch that a model announced.

    Args:
        record: The record to write to.
        model: The model.
        first: The corpus; for a language model, the sequences.
        second: The indices of the sentences; for a language model, the masked
            positions.
    """
    if hasattr(model, "tagset"):
        record.batches.append((first, second))
    else:
        labels = second.labels
        record.add_rows("masked", labels[labels >= 0], model.vocabulary)
    if hasattr(model, "find_word_rows"):
        for table, ids in model.find_word_rows(first, second).items():
            record.add_rows(table, ids, len(model.get_parameter(table)))


def _note_tokens(record: TrainingRecord, table: nn.Embedding, ids: Tensor) -> None:
    """Record (texts, places) ids, without padding, that a word embedding looks up."""
    record.sequences.append(ids.cpu().numpy())
    words = ids[ids != table.padding_idx].cpu().numpy()
    record.add_rows("", words, table.num_embeddings)


def _find_largest_embedding(model: nn.Module) -> nn.Embedding | None:
    """Return the embedding with the most rows, which is the words', if there is one."""
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    return max(tables, key=lambda table: table.num_embeddings, default=None)
