"""What leaks from what a job would send: a careful adversary, played at home on one's own notes.

Nothing leaves. The job's first rounds run in this process with their real settings (mini-batch,
local steps, frozen layers, secure sum, noise), and each attack has what a server that follows the
protocol would have. Beside that it is made on the same notes without defence, the control: where
the control fails, the attack proves nothing.

    success   the share of what is there that the adversary names while he names 1 % of what is not
              (Carlini et al. 2022, "Membership Inference Attacks From First Principles", section 3)
    chance    what naming at random gives: 0.01 on that scale, with few decoys more

An attack is one file of this folder, or one of its kin: a module with `ATTACKS` is found by lying
there. No result holds a word of any note.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.apps.deployment.rules.approval import fingerprint
from fednotes.apps.deployment.site_file import job_at_home, load_deployed
from fednotes.core import plugins
from fednotes.core.errors import ConfigError, FednotesError, TrainingError
from fednotes.core.federation import EVALUATE, Option, SiteTasks
from fednotes.core.parsing import mapping
from fednotes.core.tensors import snapshot
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import CommittedRound
from fednotes.jobs.job import Job, Sites, load_sites
from fednotes.jobs.job_file import load_job, parse_job
from fednotes.jobs.results import Audit, Leak
from fednotes.jobs.simulate import Part, is_run, members_of, recorded
from fednotes.metrics.calibration import wilson
from fednotes.training.compression import decode
from fednotes.training.compression import opened as opened_code
from fednotes.training.word_rows import IDS

FALSE = 0.01  # of what is not there, named all the same
MOST = 200  # rounds after which no evaluation is waited for
KEPT = 8  # sums whose tensors are kept
Answer = TypeVar("Answer", Total, dict[str, Update])


@dataclass(frozen=True)
class Trial:
    """How an attack went: fractions. low, high: where success lies in 95 % of such trials.

    details: further numbers for people, by name.
    """

    success: float
    chance: float
    low: float
    high: float
    details: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, inside: Any, outside: Any, **details: float) -> Self:
        """Of scores, more being more likely there, of what is there and of what is not.

        Between two thresholds the adversary draws lots, so who sees nothing has the chance, a bit
        more than FALSE where decoys are few: now and then none is high.
        Raises ConfigError where either is empty, or a score is no number.
        """
        there, absent = (np.asarray(s, np.float64).ravel() for s in (inside, outside))
        if not len(there) or not len(absent):
            raise ConfigError(
                "an attack needs something that is there and something that is not"
            )
        levels = np.unique(np.concatenate((there, absent)))[::-1]
        if not np.isfinite(levels).all():
            raise ConfigError(
                "a score is no number: training went astray, lower learning_rate"
            )
        named, wrong = (
            np.append(0.0, len(s) - np.searchsorted(np.sort(s), levels)) / len(s)
            for s in (there, absent)
        )
        last = (
            int(np.searchsorted(wrong, FALSE, side="right")) - 1
        )  # there is one after it: 1.0
        more = (FALSE - wrong[last]) / (wrong[last + 1] - wrong[last])
        success = float(
            named[last] + more * (named[last + 1] - named[last])
        )  # [audit named]
        auc = float(np.trapezoid(named, wrong))
        counts = {"targets": float(len(there)), "decoys": float(len(absent))}
        chance = (1 + int(FALSE * len(absent) + 1e-9)) / (
            1 + len(absent)
        )  # without any order
        return cls.share(success, len(there), chance, auc=auc, **counts, **details)

    @classmethod
    def order(cls, scores: Any, times: np.ndarray, **details: float) -> Self:
        """Of pairs of words, or of words and places.

        times: (sites, *scores.shape) how often each pair is there, first at the audited site. The
        chance is that of who knows how often each of the two is in a pair, and of no pair whether
        it is there.
        """
        own, there, nowhere = times[0], times[0] > 0, times.sum(0) == 0
        known = np.outer(own.sum(1), own.sum(0))
        found = cls.of(scores[there], scores[nowhere], **details)
        chance = max(found.chance, cls.of(known[there], known[nowhere]).success)
        return replace(found, chance=chance)

    @classmethod
    def share(cls, success: float, of: int, chance: float, **details: float) -> Self:
        """A share of so many, with the interval of Wilson 1927."""
        return cls(success, chance, *wilson(success, of), details)

    @property
    def whole(self) -> Self:
        """The same of all that there is, and not of a sample of it: without an interval."""
        return replace(self, low=self.success, high=self.success)


@dataclass
class Read:
    """What a site's model was trained on for one answer; the truth that attacks are judged by.

    rows: how often each row of a word table was read, by the table's name ("": the embedding of an
    encoder's library; "masked": the words to be guessed). sequences: (texts, places) ids that were
    embedded there. batches: corpora of models that find mentions, and numbers of the sentences.
    """

    rows: dict[str, np.ndarray] = field(default_factory=dict)
    sequences: list[np.ndarray] = field(default_factory=list)
    batches: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def anything(self) -> bool:
        """Whether there was something to train on."""
        return bool(self.rows or self.batches)

    def note(self, table: str, ids: np.ndarray, size: int) -> None:
        """Rows that were read."""
        self.rows[table] = np.bincount(ids.ravel(), minlength=size) + self.rows.get(
            table, 0
        )


def known(table: str, reads: Sequence[Read]) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of a table the first site read, and which nobody."""
    every = [read.rows[table] for read in reads if table in read.rows]
    return every[0] > 0, np.sum(every, axis=0) == 0


@dataclass(frozen=True, eq=False)
class Seen:
    """What the server sees of one task. sent: with what sites computed. tensors, metrics: what came
    from the audited site, under a secure sum from all. The rest is not for it: own, that site's
    update; rest, the others'; their total; reads, what each site was trained on, this one first."""

    task: str
    sent: Tensors
    tensors: Tensors
    metrics: Mapping[str, float]
    own: Update
    rest: Sequence[Update]
    total: Total
    reads: Sequence[Read]

    def change(self, name: str) -> Tensor | None:
        """What a tensor says of the training: a gradient, or what became of a parameter; float64.

        None where it did not travel in a form that can be read.
        """
        value = self.tensors.get(name)
        if value is None or not value.numel():
            return None
        before = self.sent.get(name)
        if self.task == "train" and before is not None and before.shape == value.shape:
            return value.double() - before.double()
        return -value.double()  # against the gradient, as a step goes


class Scene:
    """What is attacked: a job on notes, and one site of it.

    part: its federated training; part.sites and part.config are what members are made of.
    control: whether nothing is defended in it.
    """

    def __init__(
        self, job: Job, sites: Sites, site: str = "", control: bool = False
    ) -> None:
        """Raises ConfigError where the job has no such site."""
        names = [data.id for data in sites.data]
        self.site = site or names[0]
        if self.site not in names:
            raise ConfigError(f"--site {site}: the job's sites are {', '.join(names)}")
        self.job, self.sites, self.control = job, sites, control
        config = job.module.for_sites(job.config, sites.data)
        self.part = Part("federated", sites.data, config, method=job.module)

    def bare(self, model: Mapping[str, Any] | None = None, **settings: Any) -> Scene:
        """The same notes in a job without secure sum and noise, with these settings of its method
        and of its model; those that they lack are left out."""
        config: Any = self.job.config
        changes: dict[str, Any] = dict.fromkeys(
            ("min_tokens", "min_steps", "min_patients"), 0
        )
        changes |= {"compression": "none", "aggregation": "mean", "privacy": None}
        changes |= (
            {"minimum": 1} if self.job.privacy else {}
        )  # under which no code is counted
        changes |= {**settings, "model": _changed(config.model, model or {})}
        plain = replace(self.job.federation, secure_sum=False, min_sites=0)
        job = replace(
            self.job, config=_changed(config, changes), privacy=None, federation=plain
        )
        return Scene(job, self.sites, self.site, control=True)

    @cached_property
    def plain(self) -> Scene:
        """The same without defence, once for all attacks."""
        return self.bare()

    @cached_property
    def members(self) -> list[Any]:
        """The sites, of which nothing is written."""
        return members_of(self.job, self.part, [None] * len(self.part.sites))

    @property
    def member(self) -> Any:
        """The audited site; of one that adds noise what is below."""
        return below(next(m for m in self.members if m.id == self.site))

    @property
    def patients(self) -> bool:
        """Whether the job is of patients."""
        return self.job.data == "patients"

    @torch.no_grad()
    def sent(self, seen: Seen) -> Any:
        """The audited site, with the parameters that it computed an answer with."""
        for name, parameter in (member := self.member).model.trainable().items():
            if (value := seen.sent.get(name)) is not None:
                parameter[seen.sent.get(name + IDS, slice(None))] = value
        return member

    @cached_property
    def seen(self) -> list[Seen]:
        """What the server sees of the first rounds, in order. Raises FednotesError."""
        wire = _Wire(self)
        own = (
            [] if self.patients else self.members
        )  # patients' models are read otherwise
        models = {id(m): m for m in (below(site).model for site in own)}
        with hearing(models.values(), lambda: wire.now), suppress(_Ended):
            self.job.module.train(wire, self.part.config)
        require_gradients(next(m for m in self.members if m.id == self.site))
        return wire.seen

    @property
    def answers(self) -> list[Seen]:
        """Those that tell of training."""
        return [seen for seen in self.seen if seen.tensors and seen.reads[0].anything]


class Nothing(FednotesError):
    """An attack is none for a job; says why."""


@dataclass(frozen=True)
class Attack:
    """One way to read notes off what leaves.

    sees, closes: what the adversary must see, and what closes it; for people. trial: against a job
    as it is, or without defence as the control, where its success must be `least` at least; raises
    Nothing where it is none. patients: whether it is of models of patients; None: of both kinds.
    """

    name: str
    sees: str
    closes: str
    trial: Callable[[Scene], Trial]
    least: float = 0.9
    patients: bool | None = False

    def on(self, scene: Scene) -> Leak:
        """Both trials, where it is one for this job."""
        told: Any = {"attack": self.name, "sees": self.sees, "closes": self.closes}
        found: Trial | None = None
        try:
            if self.patients is not None and self.patients != scene.patients:
                raise Nothing("it is of models of another kind")
            found = self.trial(scene)
            control = self.trial(scene.plain)
        except FednotesError as error:
            if found is None and isinstance(error, Nothing):
                return Leak(**told, applies=False, why=str(error))
            return Leak(**told, why=f"could not be tried: {error}")
        told |= {"control": control.success, "proven": control.success >= self.least}
        return Leak(**told, **asdict(found))


def attacks() -> Iterator[Attack]:
    """Yield the attacks of this folder's modules, then those that other packages register."""
    for module in pkgutil.iter_modules(__path__):
        yield from importlib.import_module(f"{__name__}.{module.name}").ATTACKS
    for entry in plugins.registered("attacks").values():
        yield from plugins.load(entry, (tuple, list))


def audit(
    job: Job,
    site: str = "",
    *,
    declared: str = "",
    command: str = "",
    progress: Callable[[str], None] = lambda name: None,
) -> Audit:
    """Every attack on a job. site: which one's notes; the first if not given. declared: fingerprint
    of the job. progress: told the name of each attack. Raises FednotesError."""
    started = time.monotonic()
    torch.set_num_threads(job.threads)
    scene, found = Scene(job, load_sites(job), site), []
    for attack in attacks():
        progress(attack.name)
        found.append(attack.on(scene))
    return Audit(
        title=job.title,
        method=job.method,
        site=scene.site,
        fingerprint=declared,
        command=command,
        seconds=time.monotonic() - started,
        attacks=found,
    )


def opened(
    target: str,
    settings: tuple[str, ...],
    site: str,
    site_file: Path | None,
    total: int,
    out: Path | None,
) -> tuple[Job, str, Path]:
    """The job to audit, the fingerprint of its table as real sites are shown it, and the folder
    for what is found: `out`, or that of its run. site_file, total: of a site at home, as
    `job_at_home` takes them.

    Raises ConfigError, also where `out` is the run of another job.
    """
    if (site_file is not None or total) and not (site and site_file and total):
        raise ConfigError("--site-file, --site and --total go together")
    if is_run(place := Path(target)):
        if settings or total:
            raise ConfigError(
                f"{target} is a run, which was made as it is: give its job in place"
            )
        known = recorded(place)
        table, folder = mapping(known.get("table")), Path(str(known.get("folder")))
        job, out = parse_job(table, place.name, folder, target), out or place
    else:
        if site_file is not None:
            job = job_at_home(target, settings, site, site_file, total)
        else:
            job = load_job(target, settings)
        table = job.table
        with suppress(ConfigError):  # what generates notes runs between no real sites
            real, declared = load_deployed(target, settings)
            job, table = replace(job, federation=real.federation), declared["job"]
    if out is None:
        raise ConfigError(f"{target} is a job: give --out FOLDER for what is found")
    key = fingerprint(table)
    if is_run(out) and key != (own := fingerprint(mapping(recorded(out).get("table")))):
        told = "whose card would show this audit: give another --out, or audit that run"
        raise ConfigError(
            f"--out {out}: a run of another job ({own[:12]}, not {key[:12]}), {told}"
        )
    return job, key, out


def _changed(config: Any, settings: Mapping[str, Any]) -> Any:
    return replace(
        config, **{n: value for n, value in settings.items() if hasattr(config, n)}
    )


def below(site: Any) -> Any:
    """A site; of one that adds noise what is below."""
    return getattr(site, "site", site)


def require_gradients(site: Any) -> None:
    """Raises TrainingError where a site that adds noise sent nothing else, for all of a round's
    gradients failed: that nothing is read off noise alone would prove nothing."""
    if lost := getattr(site, "lost", 0):
        raise TrainingError(
            f"site {site.id!r}: no gradient of {lost:,} noisy sums can be computed"
        )


# ---- listening -----------------------------------------------------------------------------------


class _Ended(Exception):
    """Enough was heard."""


class _Wire(InProcess):
    """The embedded engine with an ear on it, until two trainings and an evaluation were heard.

    Of patients the first round of both stages, or with noise, which is new in each, several. Of
    later sums the counts alone are kept, for they need little room."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.members, secure=scene.job.federation.secure_sum)
        self._site, self._patients = scene.site, scene.patients
        self._kept = KEPT * (3 if scene.patients else 1)
        self._judges = any(EVALUATE in site.tasks for site in scene.members)
        self.seen: list[Seen] = []
        self._known: dict[str, Tensor] = {}
        self._answers: dict[str, tuple[Update, Read]] = {}  # of one sum
        self._compression: Any = getattr(scene.part.config, "compression", "none")

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """As there."""
        return self._heard(super().sum, task, tensors, options)

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> dict[str, Update]:
        """As there."""
        return self._heard(super().each, task, tensors, options)

    def _heard(
        self,
        asked: Callable[..., Answer],
        task: str,
        tensors: Tensors | None,
        options: Mapping[str, Option],
    ) -> Answer:
        given = (
            {} if (late := self._late) else snapshot(tensors or {})
        )  # a server may change its own
        self._known = {} if late else {**self._known, **given}  # nothing is sent twice
        answer = asked(task, tensors, **options)
        total = answer if isinstance(answer, Total) else Total.of(answer.values())
        total = replace(total, tensors={}) if late else total
        audited = self._answers.pop(self._site)
        (own, *rest), reads = zip(audited, *self._answers.values(), strict=True)
        self._answers.clear()
        told = own
        if self.summing is not None:
            told = Update(
                total.mean() if total.weight > 0 else {}, metrics=total.metrics
            )
        seen = Seen(
            task, self._known, told.tensors, told.metrics, own, rest, total, reads
        )
        if task == "send" and given:  # of a change, in a code
            seen = self._plain(seen, given, int(options["sites"]))
        self.seen.append(seen)
        return answer

    @property
    def _late(self) -> bool:
        return len(self.seen) >= self._kept

    def _plain(self, coded: Seen, code: Tensors, sites: int) -> Seen:
        """An answer of training, of what a server reads in a code (`training/compression.py`)."""
        asked, secure = self.seen.pop(), self.summing is not None
        like = {name: asked.sent[name] for name in asked.tensors}
        whole = coded.total if secure else Total.of([coded.own])
        mean = opened_code(whole, like, self._compression, sites).mean()
        change = decode(mean, code, like, self._compression)
        return replace(asked, tensors={n: asked.sent[n] + change[n] for n in change})

    def run(
        self, site: SiteTasks, task: str, sent: Tensors, options: Mapping[str, Option]
    ) -> Update:
        """As there."""
        self.now = Read()
        update = super().run(site, task, sent, options)
        counts = Update(metrics=update.metrics), Read()
        self._answers[site.id] = counts if self._late else (update, self.now)
        return update

    def rounds(self, start: int, stop: int) -> Iterator[CommittedRound]:
        """As there, as many as are needed."""
        few = 1 if self._patients else MOST
        for round in super().rounds(
            start, min(stop, start + (few if self._judges else KEPT))
        ):
            yield round
            trained = sum(
                seen.reads[0].anything for seen in self.seen
            )  # none by chance, of noise
            judged = not self._judges or EVALUATE in {seen.task for seen in self.seen}
            if trained > 1 and judged and not self._patients:
                break
        if not self._patients:
            raise _Ended
        if (
            not self._judges
        ):  # of one promise for both stages, the last ones are the second's
            yield from super().rounds(max(start + KEPT, stop - KEPT), stop)


@contextmanager
def hearing(
    models: Iterable[Any], now: Callable[[], Read], trains: bool = True
) -> Iterator[None]:
    """Note what models are given, by default while they train. now: where."""

    def given(model: Any, asked: Callable[..., Any], *texts: Any, **more: Any) -> Any:
        if model.training >= trains:
            read = now()
            if hasattr(model, "tagset"):
                read.batches.append(texts[:2])
            else:
                labels = texts[1].labels
                read.note("masked", labels[labels >= 0], model.vocabulary)
            rows = model.word_rows(*texts[:2]) if hasattr(model, "word_rows") else {}
            for table, ids in rows.items():
                read.note(table, ids, len(model.get_parameter(table)))
        return asked(*texts, **more)

    def embedded(table: nn.Embedding, texts: tuple[Tensor, ...]) -> None:
        if table.training >= trains:
            now().sequences.append(texts[0].cpu().numpy())
            words = texts[0][texts[0] != table.padding_idx]
            now().note("", words.cpu().numpy(), table.num_embeddings)

    with ExitStack() as stack:
        for model in models:
            tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
            for words in sorted(tables, key=lambda table: -table.num_embeddings)[:1]:
                stack.callback(words.register_forward_pre_hook(embedded).remove)
            name = "_read" if hasattr(model, "_read") else "loss"
            setattr(model, name, partial(given, model, getattr(model, name)))
            stack.callback(delattr, model, name)
        yield
