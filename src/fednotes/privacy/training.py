"""Training with differential privacy: any method whose sites can descend one gradient
together.

Abadi et al. 2016, "Deep learning with differential privacy", with the noise of many
sites in whole numbers (Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian
mechanism").

    q           `Privacy.rate`: each unit of a site is in a round by chance, whoever else is
    g_u         the gradient of a unit's mean loss: of shared and private layers, one vector
    C           `Privacy.clip`: g_u · min(1, C / |g_u|), then cut to the grid towards zero
    σ           `Promise.noise`, of a sum; a site adds `Promise.share` to what is shared, and all
                of it to its private layers, which nobody else's noise hides
    N           `Config.batch_size`, a constant: no number of units leaves a site or divides here

A site adds whole numbers of its grid, so a sum is exact, under the secure sum too, and
its sensitivity is C: cutting towards zero lengthens no vector. What leaves is that sum:
no loss, no number of sentences, no count of an evaluation. docs/privacy.md has the
argument.
"""

from __future__ import annotations

import logging
import math
import platform
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.federation import Federation, Method, MethodSite, State
from fednotes.core.tensors import (
    below,
    load_into,
    nbytes,
    prefixed,
    seed_torch,
    shapes_of,
    snapshot,
    tensor_fingerprint,
)
from fednotes.core.types import Document, SiteData
from fednotes.core.update import Tensors, Total, Update
from fednotes.data.text import normalise
from fednotes.metrics.spans import SpanCounts
from fednotes.privacy.noise import SCALE, Stream, chosen, cut, discrete_gaussian
from fednotes.privacy.promise import COUNTS, Promise, Unit
from fednotes.privacy.secure_sum.crypto import digest, receipt
from fednotes.training.sites import Adam, Best, RoundServer

NOISY = "noisy_gradients"  # the task of a round
AGREED = "agreed."  # before names of what was agreed before training, in states
TOGETHER = 64  # sentences of a unit in one pass
logger = logging.getLogger("fednotes.privacy.training")


@dataclass(frozen=True)
class Counting:
    """What sites count once, with the noise of `Privacy.counts`.

    size(config): of so many numbers. units(site, unit): what is counted, of each unit.
    own(site, one): places among these numbers, and the numbers there, of one.
    agree(config, counts, deviation): of the sum of all sites, each number with noise of
    that deviation, what the training begins with; None: the last model is counted.
    initial(config, agreed): what sites share then, before training.
    """

    size: Callable[[Any], int]
    units: Callable[[Any, Unit], Sequence[Any]]
    own: Callable[
        [Any, Any], tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]
    ]
    agree: Callable[[Any, np.ndarray, float], Tensors] | None = None
    initial: Callable[[Any, Tensors], dict[str, Tensor]] = lambda config, agreed: {}


MENTIONS = Counting(
    size=lambda config: 3,
    units=lambda site, unit: owned(site.id, site.data.valid, unit),
    own=lambda site, documents: _mentions(site, documents),
)


@dataclass(frozen=True)
class Privately:
    """What a method says of itself, that it can be trained so.

    settings: those that must have one value; a job need not say so. initial(config):
    what sites share, before training. loss(site, indices): mean loss of some sentences.
    rounds(config, epoch): the most rounds, of so many to an epoch. units(site, unit):
    the sentences (or what `loss` takes in their place) of each unit. content(data): a
    digest of what a site holds. before(site, round, kept): before each answer, the
    parameters of its question being there; those that require no gradient then rest.
    What it gives is kept for the next one, and may be made of parameters alone.
    begin(site, agreed): before the first one, with what all sites agreed on
    (`Counting`). counts: mentions found rightly, found, and annotated; None: it has
    none. behind: what a site's policy calls the examples of a sum.
    """

    settings: Mapping[str, Any]
    initial: Callable[[Any], dict[str, Tensor]]
    loss: Callable[[Any, np.ndarray], Tensor]
    rounds: Callable[[Any, int], int]
    units: Callable[[Any, Unit], list[np.ndarray]] = lambda site, unit: units_of(
        site, unit
    )
    content: Callable[[Any], bytes] = lambda data: _digest(data)
    before: Callable[[Any, int, Tensors], Tensors] = lambda site, round, kept: kept
    begin: Callable[[Any, Tensors], None] = lambda site, agreed: None
    counts: Counting | None = MENTIONS
    behind: tuple[str, ...] = ("batch",)

    def require(self, config: Any) -> None:
        """Raises ConfigError for a setting that no promise can be kept with."""
        if config.privacy.counts and not (self.counts and self.counts.size(config)):
            raise ConfigError(
                "[privacy] counts: this job has nothing to count: leave it out"
            )
        for name, value in self.settings.items():
            if getattr(config, name) != value:
                raise ConfigError(
                    f"{name} = {getattr(config, name)!r}: under [privacy] it must be {value!r}, "
                    "where each round is one sum of clipped gradients and nothing else leaves"
                )

    def promise(self, config: Any) -> Promise:
        """What a job with these settings promises.

        Raises ConfigError where it cannot be.
        """
        own = config.privacy
        rounds = self.rounds(config, own.epoch)
        return Promise.of(own, rounds, config.sites, config.min_sites)

    def first(self, config: Any) -> Counting | None:
        """The noisy counts that training begins with, if any."""
        before = config.privacy.counts and self.counts and self.counts.agree
        return self.counts if before else None


def privately(method: Method) -> Method:
    """A method that has `private`, with training of this module in place of its own."""
    how: Privately = method.private

    class Site(PrivateSite):
        of, made = how, method.Site

    def server(federation: Federation, config: Any) -> State:
        return train(federation, config, how)

    def alone(config: Any, sites: Sequence[SiteData]) -> tuple[Any, ...]:
        # no number of this site's divides
        given = {"sites": 1, "batch_size": config.batch_size}
        return tuple(replace(own, **given) for own in method.alone(config, sites))

    def pooled(config: Any, sites: Any, complete: Any) -> tuple[tuple[Any, ...], Any]:
        together, own = method.pooled(config, sites, complete)
        return together, replace(own, sites=len(together))

    def planned(config: Any, sizes: Sequence[int]) -> tuple[int, int]:
        return how.promise(config).rounds, math.ceil(config.privacy.rate * sum(sizes))

    def traffic(config: Any, sizes: Sequence[int]) -> tuple[int, int]:
        rounds, each = how.promise(config).rounds, nbytes(how.initial(config))
        return 2 * rounds * each, (rounds + 1) * each  # eight bytes a number

    return replace(
        method,
        Site=Site,
        train=server,
        alone=alone,
        pooled=pooled,
        planned=planned,
        traffic=traffic,
        trains=(),
        promise=how.promise,
    )


def train(federation: Federation, config: Any, how: Privately) -> State:
    """All rounds of a promise: a sum of clipped gradients each, and a step of Adam
    along it."""
    promise, resumed = how.promise(config), federation.resume()
    agreed: Tensors = below(resumed.tensors, AGREED) if resumed else {}
    counting = how.first(config)
    if counting and counting.agree and resumed is None:
        total = federation.sum(COUNTS, round=0)
        total.require({COUNTS: (counting.size(config),)})
        counts = total.tensors[COUNTS].double() * promise.counted
        deviation = promise.counted * SCALE * math.sqrt(max(1, config.sites))
        agreed = counting.agree(config, counts.numpy(), deviation)
        federation.sum("begin", agreed)
    given = counting.initial(config, agreed) if counting else how.initial(config)
    server = Server(config, promise, given, resumed)
    server.agreed = agreed
    every = config.evaluate_every * promise.privacy.epoch
    for round in federation.rounds(server.round, promise.rounds):
        server.step(federation.sum(NOISY, server.shared, round=round.number))
        last = server.round == promise.rounds
        told = server.round % every == 0 or last
        server.metrics = {"epsilon": promise.epsilon(server.round)} if told else {}
        if last and promise.privacy.counts and counting is None:
            server.judge(federation.sum(COUNTS, server.shared, round=round.number))
        round.commit(server.state(), server.metrics, evaluated=told)
    federation.sum("finish", server.shared)
    return server.state()


class Server(RoundServer):
    """What sites share, and its optimizer. agreed: before training."""

    agreed: Tensors

    def __init__(
        self,
        config: Any,
        promise: Promise,
        initial: dict[str, Tensor],
        resumed: State | None,
    ) -> None:
        self._adam = Adam(initial, config.learning_rate)
        # [abadi descent]
        self._unit, self._counted = (
            promise.grids[0] / config.batch_size,
            promise.counted,
        )
        super().__init__(config, initial, Best(False, "never"), resumed)

    def step(self, total: Total) -> None:
        """θ_s ← θ_s − α (Σ clipped g_u + noise) / N, by Adam."""
        # [abadi descent]
        shapes = shapes_of(self.shared)  # in each of two stages, of what learns there
        total.require({name: shapes[name] for name in total.tensors if name in shapes})
        gradient = {
            n: (value * self._unit).float() for n, value in total.tensors.items()
        }
        self._adam.step({**dict.fromkeys(self.shared), **gradient})  # [abadi descent]
        self.round += 1

    def judge(self, total: Total) -> None:
        """F1 of what the sites' noisy counts say."""
        total.require({COUNTS: (MENTIONS.size(self.config),)})
        right, found, gold = (total.tensors[COUNTS].double() * self._counted).tolist()
        self.metrics["valid_f1"] = min(
            1.0, max(0.0, 2 * right / max(1.0, found + gold))
        )

    def state(self) -> State:
        """Everything that the next round depends on."""
        state = super().state()
        agreed = prefixed(AGREED, self.agreed)
        return replace(state, tensors={**state.tensors, **agreed, **self._adam.state()})

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self._adam.restore(state.tensors)


class PrivateSite(MethodSite):
    """One site of a method, of which nothing leaves but noisy sums.

    secret: 32 bytes that are this site's alone, for who knows them can take its noise
    off; new ones if none are given. Other options are those of the method's own site.

    Which units are in a round, and their dropout, follow from the secret and all that
    the round's answer depends on; their noise from these and from the very sum that it
    is added to. So what is done again after a fault has the same answer, and no two
    sums have the same noise, whatever makes them differ.

    question: what the secure sum knows the present request by; one sum of it is opened
        at most.
    count_step: has no effect, because no number of this site leaves without noise.

    Raises ConfigError where training data do not say which unit they are of.
    """

    tasks: ClassVar[frozenset[str]] = frozenset({NOISY, COUNTS, "begin", "finish"})
    rounds_counts = True
    of: ClassVar[Privately]
    made: ClassVar[type[Any]]

    def __init__(
        self,
        data: SiteData,
        config: Any,
        *,
        secret: bytes | None = None,
        question: Callable[[], bytes] = bytes,
        count_step: int = 1,
        **options: Any,
    ) -> None:
        self.promise = self.of.promise(config)
        self.site = self.made(data, config, **options)
        self.site.tells_forms = False
        self.num_examples, self.scores = self.site.num_examples, self.site.scores
        self._secret, self._question = secret or secrets.token_bytes(32), question
        self.units = self.of.units(self.site, self.promise.privacy.unit)
        if self.promise.privacy.delta * len(self.units) >= 1:
            raise ConfigError(
                f"delta = {self.promise.privacy.delta:g}: site {data.id!r} has {len(self.units):,} "
                "units; a delta of 1 / units and more promises none of them anything"
            )
        self._counting = self.of.counts if config.privacy.counts else None
        self._counted: Sequence[Any] = ()
        if self._counting is not None:
            self._counted = self._counting.units(self.site, config.privacy.unit)
        self._config, self.steps, self.lost = config, 0, 0
        self._kept: Tensors = {}
        self._data = self.of.content(data)
        self._begin({})

    def begin(self, tensors: Tensors) -> Update:
        """What all sites agreed on, by their noisy counts."""
        other = self._agreed and tensor_fingerprint(self._agreed) != tensor_fingerprint(
            tensors
        )
        if self.steps or other or self.of.first(self._config) is None:
            raise RefusedError(
                f"site {self.id!r}: there is nothing to agree on, or no more"
            )
        self._begin(tensors)
        return Update()

    def _begin(self, agreed: Tensors) -> None:
        """Nothing, where it is to be agreed on yet."""
        if agreed or self.of.first(self._config) is None:
            self.of.begin(self.site, agreed)
        self._agreed = snapshot(agreed)
        self._shared: dict[str, torch.nn.Parameter] = self.site.shared
        self._own: dict[str, torch.nn.Parameter] = self.site.private
        self._adam = Adam(self._own, self._config.learning_rate)
        share, whole = self.promise.grids
        self._grids = dict.fromkeys(self._shared, share) | dict.fromkeys(
            self._own, whole
        )

    def noisy_gradients(self, tensors: Tensors, *, round: int) -> Update:
        """Σ of the round's units' clipped gradients, with noise, in whole numbers of
        the grid."""
        if self.steps >= self.promise.rounds:
            raise RefusedError(
                f"site {self.id!r}: the job's promise is of {self.promise.rounds:,} rounds, and "
                "all of them are done"
            )
        load_into(self._shared, tensors)
        self._kept = self.of.before(self.site, round, self._kept)
        key, failed = self._key(round), Counter[str]()
        stream = Stream(key)
        total = {
            n: torch.zeros(p.shape, dtype=torch.int64)
            for n, p in self._learning.items()
        }
        self.site.model.train(True)
        # By chance that nobody knows: dropout by a public seed would be another for
        # every unit behind one that is left out, and all of these would move the sum.
        dropout = stream.words(len(self.units)) >> np.uint64(1)
        device = next(iter(self._parameters.values())).device
        for unit in np.flatnonzero(
            chosen(stream, len(self.units), self.promise.privacy.rate)
        ):
            seed_torch(int(dropout[unit]), device)
            try:
                clipped = self.clipped(self.units[unit])
            except Exception as error:
                # a refusal would tell of the unit, which adds nothing
                failed[type(error).__name__] += 1
                continue
            for name, part in clipped.items():
                total[name] += part  # [abadi noise]
        if failed:  # for this site's people alone
            logger.warning("gradients that cannot be computed: %s", dict(failed))
            self.lost += not any(value.any() for value in total.values())
        stream = Stream(receipt(key, "noise", tensor_fingerprint(total)))
        for value in total.values():
            noise = torch.from_numpy(discrete_gaussian(stream, value.numel()))
            value += noise.reshape(value.shape)  # [abadi noise]
        self.steps += 1
        if self._own:
            unit = self.promise.grids[1] / self._config.batch_size
            self._adam.step({n: (total[n] * unit).to(p) for n, p in self._own.items()})
        return Update(
            {name: value for name, value in total.items() if name in self._shared}
        )

    @property
    def _learning(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self._parameters.items() if p.requires_grad}

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {**self._shared, **self._own}

    def clipped(self, indices: np.ndarray) -> dict[str, Tensor]:
        """A unit's gradient, at most C long, in whole numbers. indices: of its
        sentences.

        No other unit is in a pass with it: by rounding they would move what it gives.
        """
        found, parameters = dict[str, Tensor](), self._learning
        for at in range(0, len(indices), TOGETHER):
            part = indices[at : at + TOGETHER]
            loss = self.of.loss(self.site, part) * (len(part) / len(indices))
            if not loss.requires_grad:  # of nothing that learns now
                continue
            own = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
            for name, gradient in zip(parameters, own, strict=True):
                if gradient is not None:
                    found[name] = found[name] + gradient if name in found else gradient
        return cut(found, self.promise.privacy.clip, self._grids)

    def _key(self, round: int) -> bytes:
        """Of the randomness of the next answer."""
        now = {n: p.detach() for n, p in self._parameters.items()}
        now |= prefixed("kept.", self._kept) | prefixed(AGREED, self._agreed)
        sent = tensor_fingerprint(now)
        about = (
            repr(self.promise),
            repr(self._config),
            self.steps,
            round,
            self._question(),
            sent,
        )
        where = (platform.node(), torch.__version__, torch.get_num_threads())
        return receipt(self._secret, *about, self._data, *where)

    def noisy_counts(self, tensors: Tensors, *, round: int) -> Update:
        """Σ of what each unit counts, `Privacy.counted` at most (L2), with noise, in
        whole numbers; before the first round, or of the last round's model alone."""
        how, grid, most = (
            self._counting,
            self.promise.counted,
            self.promise.privacy.counted,
        )
        first = self.of.first(self._config) is not None
        if how is None or self.steps != (0 if first else self.promise.rounds):
            raise RefusedError(
                f"site {self.id!r}: the job has no counts, or none but "
                f"{'before it begins' if first else 'at its end'}"
            )
        load_into({} if first else self._shared, tensors)
        total = torch.zeros(how.size(self._config), dtype=torch.int64)
        for one in self._counted:
            # a refusal would tell of the unit, which adds nothing
            with suppress(Exception):
                places, own = map(torch.as_tensor, how.own(self.site, one))
                found = cut({COUNTS: own}, most, {COUNTS: grid})[
                    COUNTS
                ]  # [abadi counts]
                total.index_add_(0, places, found)
        stream = Stream(
            receipt(self._key(round), COUNTS, tensor_fingerprint({COUNTS: total}))
        )
        total += torch.from_numpy(
            discrete_gaussian(stream, len(total))
        )  # [abadi counts]
        return Update({COUNTS: total})

    def finish(self, tensors: Tensors) -> Update:
        """Test the last round's model, and save it; what comes of it stays here.

        Raises RefusedError for parameters that are no numbers.
        """
        if not all(bool(value.isfinite().all()) for value in tensors.values()):
            raise RefusedError(
                f"site {self.id!r}: the model that came is not of finite numbers"
            )
        load_into(self._shared, tensors)
        self.site.finish(tensors)
        self.scores = self.site.scores
        return Update()

    # what a job asks of a site

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return str(self.site.id)

    def described(self) -> str:
        """What is shared, what stays, and what is promised."""
        return f"{self.site.described()}; {self.promise}"

    def scores_on(self, site: SiteData) -> dict[str, Any]:
        """The finished model's scores on another site's test data."""
        found: dict[str, Any] = self.site.scores_on(site)
        return found

    def document_counts(self, site: str) -> NDArray[np.int64] | None:
        """Return the counts of the finished model; see `MethodSite`."""
        counts: NDArray[np.int64] | None = self.site.document_counts(site)
        return counts

    def covered(self, task: str) -> dict[str, int]:
        """One step, of as many sentences, or patients, as are expected."""
        expected = int(self.promise.privacy.rate * self.num_examples)
        behind = {NOISY: expected, COUNTS: len(self._counted)}
        if task not in behind:
            return {}
        return {"steps": 1, **dict.fromkeys(self.of.behind, behind[task])}

    def state(self) -> State:
        """Private layers, their optimizer, what is kept of earlier parameters, the
        secret."""
        own = prefixed("private.", {name: p.detach() for name, p in self._own.items()})
        own |= (
            prefixed("kept.", self._kept)
            | prefixed(AGREED, self._agreed)
            | self._adam.state()
        )
        return State(self.steps, own, {"secret": self._secret.hex()})

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        self._begin(below(state.tensors, AGREED))
        load_into(self._own, below(state.tensors, "private."))
        self._kept = below(state.tensors, "kept.")
        self._adam.restore(state.tensors)
        self._secret, self.steps = bytes.fromhex(state.fact("secret", str)), state.round


def require_patients(site: str, unit: Unit, patients: Iterable[str | None]) -> None:
    """Raises ConfigError where units are patients and a document's is not known."""
    known = (
        [bool(normalise(patient or "")) for patient in patients]
        if unit == "patient"
        else []
    )
    if unknown := known.count(False):
        raise ConfigError(
            f'[privacy] unit = "patient": {unknown:,} of {len(known):,} training documents '
            f"of site {site!r} have no patient; the largest unit that is known is a document: "
            'set unit = "document", or name the patients in the files'
        )


def owner_of(patient: str | None, note: str, unit: Unit) -> tuple[str, ...]:
    """What is one unit has one; patients whose names differ in case or blanks alone are
    one."""
    return (normalise(patient or ""), *(() if unit == "patient" else (note,)))


def owned(site: str, documents: Sequence[Document], unit: Unit) -> list[list[Document]]:
    """The documents of each patient, or the sentences of each document.

    Raises ConfigError where a document's patient is not known.
    """
    require_patients(site, unit, (document.patient for document in documents))
    found: dict[tuple[str, ...], list[Document]] = {}
    for document in documents:
        note = document.meta.get("document", document.id)
        # [abadi units]
        found.setdefault(owner_of(document.patient, note, unit), []).append(document)
    return [*found.values()]


def units_of(site: Any, unit: Unit) -> list[np.ndarray]:
    """The sentences of each unit of a site's corpus, all of them together in one.

    Raises ConfigError where a document's patient is not known.
    """
    corpus = site.train_set
    owners = corpus.encoded.sentence_document
    if unit == "sentence":
        # one less would change the rest
        if getattr(site.model.config, "context", unit) != unit:
            raise ConfigError(
                '[privacy] unit = "sentence": this model reads whole documents: set unit = '
                '"document" or "patient", or [model] context = "sentence"'
            )
        return [np.array([at]) for at in range(len(owners))]
    # [abadi units]
    of = {
        id(d): n
        for n, own in enumerate(owned(site.id, corpus.documents, unit))
        for d in own
    }
    number = np.array([of[id(d)] for d in corpus.documents])[owners]
    order = np.argsort(number, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(number[order])) + 1)


def _mentions(site: Any, documents: Sequence[Document]) -> tuple[range, list[float]]:
    """Strict counts over the types that a site annotates."""
    types = site.data.tags.types
    found = SpanCounts.of(documents, site.model.predict(documents), types=types).total
    return range(3), [float(found.strict), float(found.predicted), float(found.gold)]


def _digest(data: SiteData) -> bytes:
    """Of the training data."""
    parts = ((d.id, str(d.patient), d.text, repr(d.spans)) for d in data.train)
    return digest(*(part for document in parts for part in document))
