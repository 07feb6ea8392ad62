"""What sites must agree on before round 1, though none sees another's notes.

Each site describes itself by public facts: the entity types that it annotates and how it maps
labels to them, or the dictionary that it reads notes with and the phenotypes. The server gathers
all descriptions and sends all of them to everybody. Each side then makes the method's
configuration for itself, from stubs of sites that hold a description and no notes, and a site
that finds itself described wrongly refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

import fednotes
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.federation import Option, SiteTasks, State
from fednotes.core.parsing import parse_json
from fednotes.core.settings import build
from fednotes.core.store import write_json
from fednotes.core.types import Scheme, SiteData, TagSet
from fednotes.core.update import Tensors, Update
from fednotes.jobs.job import Job
from fednotes.patients.cohort import Cohort, ConceptVectors, FeatureSpace, SitePatients, Vectors
from fednotes.rules.approval import SiteLabels, fingerprint, mismatch

AGREE, DESCRIBE, SCORES = "agree", "@describe", "@scores"
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Description:
    """One site in public.

    version: of fednotes. types, scheme, test_types, label_map: of sites with annotations.
    width, dense, features, phenotypes, coded: of sites with patients: their features (with the
    fingerprint of the dictionary or encoder), the phenotypes, and whether codes are known.
    vectors: digest of the public vectors that stage 1 starts from.
    """

    version: str = fednotes.__version__
    types: tuple[str, ...] = ()
    scheme: Scheme = "BIO"
    test_types: tuple[str, ...] = ()
    label_map: Mapping[str, str] = field(default_factory=dict)
    width: int = 0
    dense: bool = False
    features: str = ""
    phenotypes: tuple[str, ...] = ()
    coded: bool = False
    vectors: str = ""

    @property
    def labels(self) -> SiteLabels:
        """As approvals compare them."""
        return SiteLabels(self.types, self.scheme, self.label_map)


Descriptions = Mapping[str, Description]


def describe(job: Job, data: Any) -> Description:
    """A site's own description. job: with this site alone. data: what it holds."""
    if job.data == "notes":
        return Description()
    if job.data == "patients":
        space: FeatureSpace = data.space
        return Description(
            width=space.width,
            dense=space.dense,
            features=space.fingerprint,
            phenotypes=tuple(data.phenotypes),
            coded=bool(data.codes),
            vectors=data.vectors.digest if data.vectors else "",
        )
    own = job.sites[data.id]
    tags: TagSet = data.tags
    return Description(
        types=tags.types,
        scheme=tags.scheme,
        test_types=data.test_types,
        label_map=dict(own.label_map),
    )


def as_text(descriptions: Descriptions) -> str:
    """All descriptions, in the sites' order, as one line of ASCII."""
    tables = {site: asdict(own) for site, own in descriptions.items()}
    return json.dumps(tables, separators=(",", ":"))


def agreement_of(job: Job, descriptions: Descriptions) -> str:
    """The fingerprint that all sides must have before round 1; the order of sites counts."""
    sites = [{"site": site, **asdict(own)} for site, own in descriptions.items()]
    return fingerprint({"method": job.method, "sites": sites})


def from_text(text: str) -> dict[str, Description]:
    """Raises ConfigError for anything that `as_text` does not write."""
    try:
        tables = parse_json(text)
        found = {site: build(Description, own, f"site {site!r}") for site, own in tables.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError("the sites' descriptions are not readable") from error
    for site, own in found.items():
        if own.scheme not in get_args(Scheme) or len(set(own.types)) < len(own.types):
            raise ConfigError(f"site {site!r} describes itself in a way that cannot be")
    return found


def as_tensors(own: Description) -> Tensors:
    """A description as it travels."""
    raw = as_text({"": own}).encode("ascii")
    return {"description": torch.from_numpy(np.frombuffer(raw, np.uint8).copy())}


def from_tensors(site: str, tensors: Tensors) -> Description:
    """Raises ConfigError where a site sent something else."""
    value = tensors.get("description")
    if value is None or value.dtype != torch.uint8 or not 0 < value.numel() <= _MOST_BYTES:
        raise ConfigError(f"site {site!r} does not describe itself: does it run this version?")
    try:
        return from_text(value.numpy().tobytes().decode("ascii"))[""]
    except (ConfigError, KeyError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"site {site!r} describes itself in a way that this version does not read: install "
            f"the same fednotes everywhere, here it is {fednotes.__version__}"
        ) from error


def stubs(job: Job, descriptions: Descriptions) -> tuple[Any, ...]:
    """Sites with nothing in them, for `for_sites` of a method."""
    return tuple(_stub(job.data, site, own) for site, own in descriptions.items())


def _stub(kind: str, site: str, own: Description) -> Any:
    if kind == "patients":
        space = FeatureSpace(own.width, own.dense, {"fingerprint": own.features})
        empty = Cohort(
            site,
            (),
            Vectors(np.zeros((0, own.width), np.float32)),
            np.zeros((0, len(own.phenotypes)), np.int8),
            own.phenotypes,
        )
        codes = {"": frozenset[str]()} if own.coded else {}
        none = np.zeros((0, 0))
        vectors = ConceptVectors(none, none, own.vectors) if own.vectors else None
        return SitePatients(site, space, empty, empty, empty, codes, vectors)
    return SiteData(site, TagSet(own.types, own.scheme), (), (), (), own.test_types)


def agreed_config(job: Job, descriptions: Descriptions) -> Any:
    """The method's configuration for these sites.

    Raises ConfigError, DataError or RefusedError where they do not go together.
    """
    versions = {own.version for own in descriptions.values()}
    if versions - {fednotes.__version__}:
        named = ", ".join(
            f"{site} {clean(own.version, NAME)}" for site, own in descriptions.items()
        )
        raise ConfigError(
            f"the sites run different versions of fednotes ({named}; here "
            f"{fednotes.__version__}): install the same one everywhere"
        )
    if job.tags is not None:
        for label in job.tags.types:
            if not any(label in own.types for own in descriptions.values()):
                own_types = "; ".join(
                    f"{site}: {clean(', '.join(own.types), 10 * NAME)}"
                    for site, own in descriptions.items()
                )
                raise ConfigError(
                    f"[tags] types has {label!r}, which no site annotates ({own_types})"
                )
    return job.module.for_sites(job.config, stubs(job, descriptions))


def require_as_declared(job: Job, descriptions: Descriptions) -> None:
    """What the job's own tables say of a site's labels is what that site does.

    Raises ConfigError with the labels on both sides and the remedy.
    """
    if job.data != "documents":
        return
    here, there = {}, {}
    for site, own in descriptions.items():
        table = job.sites[site]
        if table.types:
            label_map = table.label_map or own.label_map
            here[site] = SiteLabels(table.types, table.scheme, label_map)
            there[site] = own.labels
    if lines := mismatch(here, there, ("the job", "the site")):
        raise ConfigError("; ".join(lines))


class AgreedSite:
    """A site that has a method's tasks once all have agreed.

    sites: all of the job's, in its order. make: builds the method's site of its configuration.
    own: what it said of itself.
    results: the folder that its own scores are written to.
    """

    def __init__(
        self,
        id: str,
        job: Job,
        sites: tuple[str, ...],
        own: Description,
        make: Callable[[Any], SiteTasks],
        results: Path,
    ) -> None:
        self.id, self._job, self._own, self._make = id, job, own, make
        self._sites = sites
        self._results = results
        self.tasks: frozenset[str] = frozenset({AGREE}) | job.module.Site.tasks
        self._text = ""
        self.site: Any = None

    def agree(self, tensors: Tensors, *, descriptions: str, agreed: str) -> Update:
        """Take all the sites' descriptions, and become a site of the method.

        Raises RefusedError where this side makes something else of them than the server.
        """
        self._become(descriptions, agreed)
        return Update(metrics={"agreed": 1.0})

    def _become(self, text: str, agreed: str) -> None:
        all_sites = from_text(text)
        if tuple(all_sites) != self._sites:  # how many there are bounds a part of a batch
            raise RefusedError(
                f"site {self.id!r} is told of {len(all_sites)} sites that agree; the approved job "
                f"is of {', '.join(self._sites)}, in this order"
            )
        theirs = all_sites[self.id]
        if theirs != self._own:
            here, there = {self.id: self._own.labels}, {self.id: theirs.labels}
            lines = mismatch(here, there, ("this site", "the agreement")) or (
                f"site {self.id!r} was described with another dictionary, encoder or version "
                "than it has now",
            )
            raise RefusedError("; ".join(lines))
        if agreement_of(self._job, all_sites) != agreed:
            raise RefusedError(
                f"site {self.id!r} makes another configuration of this job than the server: "
                "start both from the same job and the same version of fednotes"
            )
        self.site = self._make(agreed_config(self._job, all_sites))
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("tasks", ()):
            raise AttributeError(name)
        if self.site is None:
            raise TrainingError(f"site {self.id!r} has not agreed with the others yet")
        return getattr(self.site, name)

    def finish(self, tensors: Tensors, **options: Option) -> Update:
        """The method's own; the site's scores are then in its own folder."""
        update: Update = self.__getattr__("finish")(tensors, **options)
        if scores := getattr(self.site, "scores", None):
            write_json(self._results / "scores.json", scores)
        return update

    def covered(self, task: str) -> Mapping[str, int]:
        """Tokens, steps and patients behind an update of this task, as far as known."""
        told = getattr(self.site, "covered", None)
        return told(task) if told is not None else {}

    def state(self) -> State:
        """The agreement, and what the method's site keeps."""
        if self.site is None:
            return State(0, {}, {"descriptions": "", "own": {}})
        kept: State = self.site.state()
        return State(
            kept.round, kept.tensors, {"descriptions": self._text, "own": dict(kept.facts)}
        )

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        text = state.facts["descriptions"]
        if not text:
            return
        self._become(text, agreement_of(self._job, from_text(text)))
        self.site.restore(State(state.round, state.tensors, state.facts["own"]))
