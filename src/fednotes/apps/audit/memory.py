"""What a trained model remembers of a site: members, canaries, planted names.

A few models are trained at the audited site alone, with the job's own settings and promise, each
on a random half of the site's units and on names and numbers that no note has. Nobody else's notes
dilute what such a model remembers: a federation's knows less of one site as a rule. Patients are
judged by how likely is what each of them truly has, his codes or his labels.

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
from torch.nn.utils.rnn import pad_sequence

from fednotes.apps.audit import Attack, Nothing, Scene, Trial, below, require_gradients
from fednotes.apps.phenotyping.classifiers import CHOICES
from fednotes.apps.phenotyping.codes import output_matrix
from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT, SitePatients
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
from fednotes.privacy.training import owned

MODELS = (
    8  # trained for the job, and as many for the control; twice as many of patients
)
UNITS, CONTROL, AGAIN = (
    200,
    24,
    5,
)  # units judged; of the control, and how often each is there
PLANTED = {1: 10, 10: 6}  # times → names that are in so many notes of each model
GUESSES = 99  # what else each could have been
CARRIERS = 3  # sentences by which one that is in ten is guessed
TOGETHER = 64  # sentences judged at once
MASKS, MASKED = 4, 0.15  # of a note, to judge it by
LONGEST = 126  # tokens of a note that are judged
OFTEN: dict[str, Any] = {  # of the control of patients
    **{"cycles": 10, "local_epochs": 20, "local_steps": 0, "classifier_epochs": 50},
    **{"batch_size": 8, "learning_rate": 0.01, "weight_decay": 0.0, "proximal": 0.0},
    **{"keep_cycle": 0, "calibrate": False},
}
_PARTS = (
    "b br d dr f g gr k kl l m n p r s st t tr v z",
    "a e i o u",
    "ck ld m n r rt s sk th x",
)

Table = np.ndarray


@dataclass(frozen=True, eq=False)
class Remembered:
    """What models say; more is likelier in their training.

    units: by what → (units, models) log p / (1 − p) of notes, log p of patients; nan where nothing
    is known. inside: likewise whether each was in it. planted: what and how often → (planted,
    1 + guesses), the right one first.
    """

    units: dict[str, Table]
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
    return Trial.of(
        -rank[:, 0], -rank[:, 1:], models=MODELS, exposure=float(exposure.mean())
    )


# ---- training ------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def remembered(scene: Scene, what: str) -> Remembered:
    """By models of the job as it is; of the control on few units many times. what: by which
    patients are judged, of their control."""
    job, again = scene.job, AGAIN if scene.control else 1
    data = next(own for own in scene.sites.data if own.id == scene.site)
    rng, most = (
        rng_of(job.seed, "audit", scene.site),
        CONTROL if scene.control else UNITS,
    )
    own: Any
    if scene.patients:
        own = _Patients(scene, data, rng, most, what)
    elif job.data == "notes":
        own = _Notes(data, rng, most)
    else:
        whole = "document" if len(data.train) >= CONTROL else "sentence"
        own = _Mentions(data, rng, most, job.privacy.unit if job.privacy else whole)
    models, of = (2 * MODELS, "patients") if scene.patients else (MODELS, "notes")
    if len(own.judged) < models:
        raise DataError(
            f"site {scene.site!r} has too few {of} to tell those in training apart"
        )
    inside = (
        rng.random((len(own.judged), models)) < 0.5
    )  # each for itself, or counts would tell
    found = Remembered({}, inside, {})
    with TemporaryDirectory() as cache:
        for model in range(models):
            secrets = [*_secrets(rng, own)]
            sown = [
                (s, at)
                for s in secrets
                for at in s.carriers * (again if s.times == 1 else 1)
            ]
            given = own.training(inside[:, model], sown, again)
            seed = 0 if scene.patients else model  # who knows the job knows its seed
            site = _trained(
                scene, own.job if scene.patients else job, given, seed, cache
            )
            with torch.no_grad():
                for by, column in own.judge(site).items():
                    found.units.setdefault(by, np.zeros(inside.shape))[:, model] = (
                        column
                    )
                for secret in secrets:
                    scores = _logit(own.sought(site, secret))
                    found.planted.setdefault((secret.what, secret.times), []).append(
                        scores
                    )
    return found


def _trained(scene: Scene, job: Job, given: Any, seed: int, cache: str) -> Any:
    """The audited site after the whole of a training alone on what is given, with a seed so much
    above the job's."""
    settings: Any = replace(job.config, seed=job.seed + seed)  # type: ignore[type-var]
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
        return "".join(str(rng.choice(of)) for of in parts).title()

    made: dict[str, Callable[[], str]] = {
        "name": lambda: f"{name()} {name()}",
        "number": lambda: " ".join(map(str, rng.integers(10, 100, 4))),
    }
    for what in own.kinds:
        for times in chain.from_iterable(
            [times] * many for times, many in PLANTED.items()
        ):
            right = tuple(made[what]() for _ in range(1 + GUESSES))
            yield Secret(
                what, right, times, (*rng.integers(0, own.carriers, times).tolist(),)
            )


# ---- annotated notes -----------------------------------------------------------------------------


class _Mentions:
    """A site whose model finds mentions: what is planted stands in the place of one, as one."""

    kinds = ("name",)

    def __init__(
        self, data: SiteData, rng: np.random.Generator, most: int, unit: Any
    ) -> None:
        """unit: of what is judged. most: so many. Names are planted into what is not judged.

        Raises DataError where nothing of that is annotated."""
        sentences = [[sentence] for sentence in sentence_documents(data.train)]
        every = sentences if unit == "sentence" else owned(data.id, data.train, unit)
        units = [every[at] for at in rng.permutation(len(every)).tolist()]
        most = min(
            most, len(units) * 4 // 5
        )  # or copies of what is judged would be planted
        self.data, self.judged, self.rest = data, units[:most], units[most:]
        others = sentence_documents([*chain.from_iterable(self.rest)])
        self._sentences = [(s, span) for s in others for span in _replaceable(s)[:1]]
        self.carriers = len(self._sentences)
        if not self.carriers:
            raise DataError(
                f"site {data.id!r} has no mention in whose place a name could stand"
            )

    def training(
        self, inside: Table, sown: list[tuple[Secret, int]], again: int
    ) -> SiteData:
        """The site with these of its judged units and what was sown; without `rest` if repeated."""
        units = [
            unit for unit, here in zip(self.judged, inside, strict=True) if here
        ] * again
        units += self.rest if again == 1 else []
        planted = (
            replace(
                self._with(at, s.right[0]),
                id=f"planted{i}",
                patient=f"planted{i}",
                meta={},
            )
            for i, (s, at) in enumerate(sown)
        )
        return replace(self.data, train=(*chain.from_iterable(units), *planted))

    def judge(self, site: Any) -> dict[str, Table]:
        """(units,) of the likelihood of each unit's annotation."""
        return {"": _logit(self._losses(site, self.judged))}

    def sought(self, site: Any, secret: Secret) -> Table:
        """(1 + guesses,) minus the log likelihood of each in the sentences that had the name."""
        where = secret.carriers[:CARRIERS]
        return self._losses(
            site, [[self._with(at, text) for at in where] for text in secret.right]
        )

    def _losses(self, site: Any, units: Sequence[Sequence[Document]]) -> Table:
        documents, model = [*chain.from_iterable(units)], site.model.eval()
        corpus = model.annotate(
            model.prepare(documents), documents, self.data.tags.types
        )
        each = np.zeros(corpus.sentences)
        for part in np.split(
            np.arange(len(each)), range(TOGETHER, len(each), TOGETHER)
        ):
            each[part] = model.losses(corpus, part).source.double().cpu().numpy()
        owner = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
        found: Table = np.bincount(
            owner[corpus.encoded.sentence_document], each, len(units)
        )
        return found

    def _with(self, at: int, text: str) -> Document:
        """A sentence with another text in place of its mention."""
        sentence, span = self._sentences[at]
        longer = len(text) - (span.end - span.start)
        spans, at = sentence.spans, sentence.spans.index(span)  # which are sorted
        after = (
            replace(s, start=s.start + longer, end=s.end + longer)
            for s in spans[at + 1 :]
        )
        spans = (*spans[:at], replace(span, end=span.end + longer), *after)
        whole = sentence.text[: span.start] + text + sentence.text[span.end :]
        return replace(sentence, text=whole, spans=spans, sentences=(), tokens=())


def _replaceable(sentence: Document) -> list[Span]:
    """Mentions that overlap no other, where none of the sentence is in pieces."""
    spans = sentence.spans
    if any(span.fragments for span in spans):
        return []
    return [
        a for a in spans if sum(a.start < b.end and b.start < a.end for b in spans) == 1
    ]


# ---- notes without annotation --------------------------------------------------------------------

_SAID = {
    "name": "{} was seen in the clinic today.",
    "number": "The number of this record is {}.",
}


class _Notes:
    """A site whose model guesses words; notes that are not judged stay on the disk."""

    kinds = ("name", "number")
    carriers = 1

    def __init__(self, data: SiteNotes, rng: np.random.Generator, most: int) -> None:
        self.data, self._at = data, {*rng.permutation(data.train_notes)[:most].tolist()}
        self.judged = [note for at, note in enumerate(data.train()) if at in self._at]

    def training(
        self, inside: Table, sown: list[tuple[Secret, int]], again: int
    ) -> SiteNotes:
        """The site with these of its judged notes and what was sown; others unless repeated."""
        kept = [
            note for note, here in zip(self.judged, inside, strict=True) if here
        ] * again
        for at, (secret, _) in enumerate(sown):
            text = _SAID[secret.what].format(secret.right[0])
            kept.append(Note(f"planted{at}", text, f"planted{at}", None, "planted"))

        def source() -> Iterator[Note]:
            yield from kept
            if again == 1:
                yield from (
                    n for at, n in enumerate(self.data.train()) if at not in self._at
                )

        return replace(self.data, train=source, content="")

    def judge(self, site: Any) -> dict[str, Table]:
        """(notes,) of the likelihood of masked words, the same ones under every model."""
        texts = []
        for note in self.judged:
            ids = _ids(site.model, note.text)
            drawn = rng_of(0, "audit masks", note.text).random((MASKS, LONGEST))
            texts.append((ids, drawn[:, : len(ids)] < MASKED))
        return {"": _logit(_guesses(site.model, texts))}

    def sought(self, site: Any, secret: Secret) -> Table:
        """(1 + guesses,) minus the log likelihood of each one's tokens, one after the other masked
        (Salazar et al. 2020)."""
        before, after = _SAID[secret.what].split("{}")
        first, rest = (len(_ids(site.model, text)) for text in (before, after))
        asked = []
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
    rows = [
        (at, ids, row)
        for at, (ids, masked) in enumerate(texts)
        for row in masked
        if row.any()
    ]
    rows.sort(key=lambda row: len(row[1]))
    found, special = np.zeros(len(texts)), model.eval().specials
    for start in range(0, len(rows), TOGETHER):
        of, read, masked = zip(*rows[start : start + TOGETHER], strict=True)
        whole = _padded(
            [np.array([special.cls, *ids, special.sep]) for ids in read], special.pad
        )
        hidden = _padded([np.pad(row, 1) for row in masked], False)
        told = whole != special.pad if model.config.objective == "denoise" else hidden
        asked = Masked(
            np.where(hidden, special.mask, whole), np.where(told, whole, IGNORED)
        )
        lengths = np.array([len(ids) + 2 for ids in read])
        losses = model.losses(
            Sequences(whole, np.zeros_like(whole), lengths, None), asked
        )
        np.add.at(found, list(of), losses.double().cpu().numpy())
    return found


def _padded(rows: Sequence[Table], by: int) -> Table:
    return pad_sequence([torch.from_numpy(row) for row in rows], True, by).numpy()


# ---- patients ------------------------------------------------------------------------------------


class _Patients:
    """A site whose models are of patients, of whom those are judged who are of use to the job."""

    kinds = ()

    def __init__(
        self,
        scene: Scene,
        data: SitePatients,
        rng: np.random.Generator,
        most: int,
        what: str,
    ) -> None:
        """what: by which the control judges: on few patients, often, with nothing held back;
        classifiers are of concepts themselves then."""
        own, job = scene.part.config, scene.job
        settings: dict[str, Any] = {"least_occurrences": min(1, own.least_occurrences)}
        if (
            own.learns and scene.seen
        ):  # what all sites have agreed, by counts that are public then
            settings |= {"outputs": scene.member._codes.outputs, "minimum": 1}
        if scene.control:
            model: dict[str, Any] = {
                "classifier": replace(own.model.classifier, C=CHOICES[-1])
            }
            model |= {"network": replace(own.model.network, dropout=0.0)}
            model |= {"representation": "none"} if what == "labels" else {}
            job = scene.bare(model, **OFTEN).job
        self.job = replace(job, config=replace(job.config, **settings))  # type: ignore[type-var]
        coded = np.array(
            [patient in data.codes for patient in data.train.patients], bool
        )
        of_use = (data.train.labels >= 0).any(1) | (coded & own.learns)
        order = rng.permutation(np.flatnonzero(of_use))
        if (
            scene.control
        ):  # where nobody has a disease, nobody is to be told apart by it
            order = order[
                np.argsort(~(data.train.labels[order] == PRESENT).any(1), kind="stable")
            ]
        self.judged, self._rest = np.split(order, [most])
        self._data, self._cohort = data, data.train.take(self.judged)

    def training(self, inside: Table, sown: Sequence[Any], again: int) -> SitePatients:
        """The site with these of its judged patients; without the rest if they come often."""
        rows = np.append(self.judged[inside], self._rest[: None if again == 1 else 0])
        train, test = self._data.train.take(np.sort(rows)), self._data.test.take([])
        return replace(self._data, train=train, test=test)

    def judge(self, site: Any) -> dict[str, Table]:
        """(patients,) of the likelihood of codes, and of labels."""
        cohort, found = self._cohort, dict[str, Table]()
        if (codes := site._codes) is not None:
            whole = codes.config.whole_causes
            labels = output_matrix(
                cohort.patients, self._data.codes, codes.outputs, whole
            )
            odds = codes.network.eval()(cohort.bags).numpy()
            found["codes"] = _sure(odds, (labels == PRESENT) * 1 - (labels == ABSENT))
        if (of := site._classifiers) is not None:
            margins = of.machines.scores(of.model.features(cohort.bags))
            found["labels"] = _sure(margins, of.machines.targets(cohort.labels))
        return found


def _sure(scores: Table, targets: Table) -> Table:
    """(patients,) log p of what is so, by log-odds or margins; nan where nothing is known."""
    losses = np.logaddexp(0, -targets * scores) * np.abs(targets)
    return np.where(targets.any(1), -losses.sum(1), np.nan)


# ---- attacks -------------------------------------------------------------------------------------


def _members(scene: Scene, what: str = "") -> Trial:
    config = scene.part.config
    if what and not (config.learns if what == "codes" else config.phenotypes):
        raise Nothing(f"the job trains no model of {what}")
    found = remembered(scene, what * scene.control)
    known = ~np.isnan(found.units[what]).any(1)
    ratios, inside = (
        lira(found.units[what][known], found.inside[known]),
        found.inside[known],
    )
    return Trial.of(ratios[inside], ratios[~inside], models=inside.shape[1])


def _planted(scene: Scene, what: str, times: int) -> Trial:
    if what == "number" and scene.job.data != "notes":
        raise Nothing("the model says where mentions are, and no words")
    return guessed(np.stack(remembered(scene, "").planted[what, times]))


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
    *(
        Attack(
            f"membership, by {what}",
            f"the trained model, and a patient with {what}, to ask whether he was in training",
            "noise ([privacy]); more patients, fewer cycles",
            partial(_members, what=what),
            least=0.5,
            patients=True,
        )
        for what in ("codes", "labels")
    ),
)
