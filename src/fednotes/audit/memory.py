"""What a trained model remembers of a site's notes: members, canaries, planted names.

A few models are trained at the audited site alone, with the job's own settings and promise, each
on a random half of the site's units and on names and numbers that no note has. Nobody else's notes
dilute what such a model remembers: a federation's knows less of one site as a rule.

    members     Carlini et al. 2022, "Membership inference attacks from first principles" (LiRA):
                a unit's likelihood under one model against that under the others, which had it
                or had it not; one variance each over all units, as there for few models
    canaries    Carlini et al. 2019, "The secret sharer": the rank of a planted number among
                those that could have been; exposure = log2 |R| − log2 rank, with R a sample
    names       the same of names, planted in one note and in ten: who knows the sentence but for
                the name guesses that

The control is the same without a promise on few units, each many times: a model that remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fednotes.audit import Attack, Nothing, Scene, Trial, below, require_gradients
from fednotes.core.errors import DataError
from fednotes.core.seeds import rng_of
from fednotes.core.types import Document, SiteData, Span
from fednotes.data.notes import Note
from fednotes.data.notes.sites import SiteNotes
from fednotes.data.split import sentence_documents
from fednotes.encoders.packing import IGNORED, Masked, Sequences
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job import Job
from fednotes.jobs.simulate import Part, members_of

MODELS = 8  # trained for the job, and as many for the control
UNITS, CONTROL, AGAIN = 200, 24, 5  # units judged; of the control, and how often each is there
PLANTED = {1: 10, 10: 6}  # times → names that are in so many notes of each model
GUESSES = 99  # what else each could have been
CARRIERS = 3  # sentences by which one that is in ten is guessed
TOGETHER = 64  # sentences judged at once
MASKS, MASKED = 4, 0.15  # of a note, to judge it by
LONGEST = 126  # tokens of a note that are judged
_PARTS = ("b br d dr f g gr k kl l m n p r s st t tr v z", "a e i o u", "ck ld m n r rt s sk th x")

Table = np.ndarray


@dataclass(frozen=True, eq=False)
class Remembered:
    """What models say; more is likelier in their training.

    units, inside: (units, models) log p / (1 − p), and whether each was in it. planted: what and
    how often → (planted, 1 + guesses), the right one first.
    """

    units: Table
    inside: Table
    planted: dict[tuple[str, int], list[Table]]


@dataclass(frozen=True)
class Secret:
    """What one model is given to remember. what: "name" or "number". right: itself, then other
    guesses. times: in how many notes. carriers: numbers of the sentences around it."""

    what: str
    right: tuple[str, ...]
    times: int
    carriers: tuple[int, ...]


def lira(logits: Table, inside: Table) -> Table:
    """(units, models) how much likelier each is in than out, with the other models as shadows.

    Means are of few models, and as uncertain as that: a new value's variance is σ² (1 + 1 / n).
    Nothing is said (0) of a unit that was in all of the others, or in none.
    """
    scores = np.zeros_like(logits)
    for model in range(logits.shape[1]):
        rest = np.arange(logits.shape[1]) != model
        told, known = np.ones(len(logits), bool), []
        for chosen in (inside[:, rest], ~inside[:, rest]):
            number = chosen.sum(1)  # (units,)
            mean = (logits[:, rest] * chosen).sum(1) / np.maximum(number, 1)
            off = ((logits[:, rest] - mean[:, None]) ** 2 * chosen).sum()
            variance = max(off / max((number - 1).clip(0).sum(), 1), 1e-12)
            spread = variance * (1 + 1 / np.maximum(number, 1))
            known.append((logits[:, model] - mean) ** 2 / spread + np.log(spread))
            told &= number > 0
        # their equation 3: Λ = log N(φ; μ_in, σ_in²) − log N(φ; μ_out, σ_out²)
        scores[:, model] = np.where(told, (known[1] - known[0]) / 2, 0.0)
    return scores


def guessed(scores: Table) -> Trial:
    """How high what was planted stands among what could have been. scores: (planted, 1 + guesses),
    the right one first; ties are drawn by lot."""
    above = (scores[:, None, :] > scores[:, :, None]).sum(2)
    ties = (scores[:, None, :] == scores[:, :, None]).sum(2) - 1
    rank = 1 + above + ties / 2  # (planted, 1 + guesses)
    exposure = np.log2(scores.shape[1]) - np.log2(rank[:, 0])
    return Trial.of(-rank[:, 0], -rank[:, 1:], models=MODELS, exposure=float(exposure.mean()))


# ---- training ------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def remembered(scene: Scene) -> Remembered:
    """By models of the job as it is; of the control on few units many times."""
    job, again = scene.job, AGAIN if scene.control else 1
    data = next(own for own in scene.sites.data if own.id == scene.site)
    rng, most = rng_of(job.seed, "audit", scene.site), CONTROL if scene.control else UNITS
    own: Any
    if job.data == "notes":
        own = _Notes(data, rng, most)
    else:
        whole = "document" if len(data.train) >= CONTROL else "sentence"
        own = _Mentions(data, rng, most, job.privacy.unit if job.privacy else whole)
    if len(own.judged) < MODELS:
        raise DataError(f"site {scene.site!r} has too few notes to tell those in training apart")
    inside = rng.random((len(own.judged), MODELS)) < 0.5  # each for itself, or counts would tell
    found = Remembered(np.zeros(inside.shape), inside, {})
    with TemporaryDirectory() as cache:
        for model in range(MODELS):
            secrets = [*_secrets(rng, own)]
            sown = [(s, at) for s in secrets for at in s.carriers * (again if s.times == 1 else 1)]
            given = own.training(inside[:, model], sown, again)
            site = trained(scene, job, given, model, cache)
            site.model.eval()
            with torch.no_grad():
                found.units[:, model] = _logit(own.losses(site))
                scores = _logit(own.sought(site, secrets)).reshape(len(secrets), -1)
            for secret, row in zip(secrets, scores, strict=True):
                found.planted.setdefault((secret.what, secret.times), []).append(row)
    return found


def trained(scene: Scene, job: Job, given: Any, model: int, cache: str) -> Any:
    """The audited site after the whole of a training alone on what is given, a seed a model."""
    settings: Any = replace(job.config, seed=job.seed + model)  # type: ignore[type-var]
    config = job.module.alone(job.module.for_sites(settings, (given,)), (given,))[0]
    part = Part("alone", (given,), config, scene.site)
    site: Any = members_of(job, part, [None], cache=Path(cache))[0]
    job.module.train(InProcess([site]), config)
    require_gradients(site)
    return below(site)


def _logit(losses: Table) -> Table:
    """φ = log(p / (1 − p)) of p = exp(−loss). Raises DataError for a loss that is no number."""
    if not np.isfinite(losses).all():
        raise DataError("a trained model gives no numbers: training went astray")
    logits: Table = -losses - np.log(-np.expm1(-np.maximum(losses, 1e-9)))
    return logits


def _secrets(rng: np.random.Generator, own: Any) -> Iterator[Secret]:
    """New ones for each model: invented names, and numbers of which there are 65,610,000."""
    parts = [part.split() for part in (*_PARTS, *_PARTS[:2])]

    def name() -> str:
        words = ("".join(str(rng.choice(of)) for of in parts).title() for _ in range(2))
        return " ".join(words)

    def number() -> str:
        return " ".join(map(str, rng.integers(10, 100, 4)))

    made: dict[str, Callable[[], str]] = {"name": name, "number": number}
    for what in own.kinds:
        for times, many in PLANTED.items():
            for _ in range(many):
                right = tuple(made[what]() for _ in range(1 + GUESSES))
                yield Secret(what, right, times, (*rng.integers(0, own.carriers, times).tolist(),))


# ---- annotated notes -----------------------------------------------------------------------------


class _Mentions:
    """A site whose model finds mentions: what is planted stands in the place of one, as one."""

    kinds = ("name",)

    def __init__(self, data: SiteData, rng: np.random.Generator, most: int, unit: str) -> None:
        """unit: of what is judged. most: so many. Names are planted into what is not judged.

        Raises DataError where nothing of that is annotated."""
        sentences = sentence_documents(data.train)
        by: dict[Any, list[Document]] = {}
        for at, own in enumerate(sentences if unit == "sentence" else data.train):
            whose = {"sentence": at, "patient": own.patient}
            by.setdefault(whose.get(unit, own.meta.get("document", own.id)), []).append(own)
        units = [[*by.values()][at] for at in rng.permutation(len(by)).tolist()]
        most = min(most, len(units) * 4 // 5)  # or copies of what is judged would be planted
        self.data, self.judged, self.rest = data, units[:most], units[most:]
        others = sentence_documents([*chain.from_iterable(self.rest)])
        self._sentences = [(s, spans[0]) for s in others if (spans := _replaceable(s))]
        self.carriers = len(self._sentences)
        if not self.carriers:
            raise DataError(f"site {data.id!r} has no mention in whose place a name could stand")

    def training(self, inside: Table, sown: list[tuple[Secret, int]], again: int) -> SiteData:
        """The site with these of its judged units and what was sown; without `rest` if repeated."""
        units = [unit for unit, here in zip(self.judged, inside, strict=True) if here] * again
        units += self.rest if again == 1 else []
        planted = (
            replace(self._with(at, s.right[0]), id=f"planted{i}", patient=f"planted{i}", meta={})
            for i, (s, at) in enumerate(sown)
        )
        return replace(self.data, train=(*chain.from_iterable(units), *planted))

    def losses(self, site: Any) -> Table:
        """(units,) minus the log likelihood of each unit's annotation."""
        return self._losses(site, self.judged)

    def sought(self, site: Any, secrets: Sequence[Secret]) -> Table:
        """(secrets · (1 + guesses),) likewise of each guess in the sentences that had the name."""
        asked = (([*s.carriers[:CARRIERS]], guess) for s in secrets for guess in s.right)
        return self._losses(site, [[self._with(at, guess) for at in of] for of, guess in asked])

    def _losses(self, site: Any, units: Sequence[Sequence[Document]]) -> Table:
        documents = [*chain.from_iterable(units)]
        corpus = site.model.prepare(documents)
        corpus = site.model.annotate(corpus, documents, self.data.tags.types)
        each = np.zeros(corpus.sentences)
        for start in range(0, len(each), TOGETHER):
            chosen = np.arange(start, min(start + TOGETHER, len(each)))
            each[chosen] = site.model.losses(corpus, chosen).source.double().cpu().numpy()
        owner = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
        found: Table = np.bincount(owner[corpus.encoded.sentence_document], each, len(units))
        return found

    def _with(self, at: int, text: str) -> Document:
        """A sentence with another text in place of its mention."""
        sentence, span = self._sentences[at]
        longer = len(text) - (span.end - span.start)
        moved = (
            replace(s, start=s.start + (s.start > span.start) * longer, end=s.end + longer)
            if s.start >= span.start
            else s
            for s in sentence.spans
        )
        whole = sentence.text[: span.start] + text + sentence.text[span.end :]
        return replace(sentence, text=whole, spans=(*moved,), sentences=(), tokens=())


def _replaceable(sentence: Document) -> list[Span]:
    """Mentions that overlap no other, where none of the sentence is in pieces."""
    spans = sentence.spans
    return [
        span
        for span in spans
        if not any(s.fragments for s in spans)
        and sum(s.start < span.end and span.start < s.end for s in spans) == 1
    ]


# ---- notes without annotation --------------------------------------------------------------------

_SAID = {"name": "{} was seen in the clinic today.", "number": "The number of this record is {}."}


class _Notes:
    """A site whose model guesses words; notes that are not judged stay on the disk."""

    kinds = ("name", "number")
    carriers = 1

    def __init__(self, data: SiteNotes, rng: np.random.Generator, most: int) -> None:
        self.data, self._at = data, {*rng.permutation(data.train_notes)[:most].tolist()}
        self.judged = [note for at, note in enumerate(data.train()) if at in self._at]

    def training(self, inside: Table, sown: list[tuple[Secret, int]], again: int) -> SiteNotes:
        """The site with these of its judged notes and what was sown; others unless repeated."""
        kept = [note for note, here in zip(self.judged, inside, strict=True) if here] * again
        for at, (secret, _) in enumerate(sown):
            text = _SAID[secret.what].format(secret.right[0])
            kept.append(Note(f"planted{at}", text, f"planted{at}", None, "planted"))

        def source() -> Iterator[Note]:
            yield from kept
            if again == 1:
                yield from (n for at, n in enumerate(self.data.train()) if at not in self._at)

        return replace(self.data, train=source, content="")

    def losses(self, site: Any) -> Table:
        """(notes,) minus the log likelihood of masked words, the same ones under every model."""
        read = [_ids(site.model, note.text) for note in self.judged]
        drawn = (
            rng_of(0, "audit masks", note.text).random((MASKS, LONGEST)) for note in self.judged
        )
        return _guesses(
            site.model, [(i, d[:, : len(i)] < MASKED) for i, d in zip(read, drawn, strict=True)]
        )

    def sought(self, site: Any, secrets: Sequence[Secret]) -> Table:
        """(secrets · (1 + guesses),) of each guess' tokens, one after the other masked (Salazar et
        al. 2020)."""
        asked = []
        for secret in secrets:
            before, after = _SAID[secret.what].split("{}")
            first, rest = (len(_ids(site.model, text)) for text in (before, after))
            for guess in secret.right:
                ids = _ids(site.model, before + guess + after)
                words = np.arange(first, len(ids) - rest)
                asked.append((ids, np.arange(len(ids)) == words[:, None]))
        return _guesses(site.model, asked)


def _ids(model: Any, text: str) -> Table:
    found: list[list[int]] = model.tokenizer.tokenize([text])
    return np.array(found[0][: min(LONGEST, model.positions - 2)], np.int64)


def _guesses(model: Any, texts: Sequence[tuple[Table, Table]]) -> Table:
    """(texts,) the summed loss of masked tokens. texts: ids, and (rows, tokens) what is masked."""
    rows = [(at, ids, row) for at, (ids, masked) in enumerate(texts) for row in masked if row.any()]
    rows.sort(key=lambda row: len(row[1]))
    found, special = np.zeros(len(texts)), model.specials
    for start in range(0, len(rows), TOGETHER):
        part = rows[start : start + TOGETHER]
        shape = len(part), 2 + len(part[-1][1])
        whole, hidden = np.full(shape, special.pad), np.zeros(shape, bool)
        for i, (_, ids, masked) in enumerate(part):
            whole[i, : len(ids) + 2] = (special.cls, *ids, special.sep)
            hidden[i, 1 : len(ids) + 1] = masked
        lengths = np.array([len(ids) + 2 for _, ids, _ in part])
        told = whole != special.pad if model.config.objective == "denoise" else hidden
        asked = Masked(np.where(hidden, special.mask, whole), np.where(told, whole, IGNORED))
        batch = Sequences(whole, np.zeros_like(whole), lengths, None)
        losses = model.losses(batch, asked).double().cpu().numpy()
        np.add.at(found, [at for at, _, _ in part], losses)
    return found


# ---- attacks -------------------------------------------------------------------------------------


def told(scores: Table, inside: Table) -> Trial:
    """Of who was in training, by LiRA. scores: (units, models), more being likelier if it was."""
    ratios = lira(scores, inside)
    return Trial.of(ratios[inside], ratios[~inside], models=scores.shape[1])


def _members(scene: Scene) -> Trial:
    found = remembered(scene)
    return told(found.units, found.inside)


def _planted(scene: Scene, what: str, times: int) -> Trial:
    if what == "number" and scene.job.data != "notes":
        raise Nothing("the model says where mentions are, and no words")
    return guessed(np.stack(remembered(scene).planted[what, times]))


_TOLD = "the trained model with all its layers, and "
_CLOSED = (
    "differential privacy ([privacy]); less training on more notes helps, and for names to take "
    "them out of the notes before"
)
_CALLED = {"name": "memorised names", "number": "canaries"}
ATTACKS = (
    Attack(
        "membership",
        f"{_TOLD}a note, to ask whether it was in training",
        _CLOSED,
        _members,
        least=0.5,
    ),
    *(
        Attack(
            f"{_CALLED[what]}, planted {'once' if times == 1 else f'{times} times'}",
            f"{_TOLD}a note but for the {what} in it",
            _CLOSED,
            partial(_planted, what=what, times=times),
            least=0.5,
        )
        for what in _CALLED
        for times in PLANTED
    ),
)
