"""What sites must agree on before round 1, though none sees another's notes.

Each site describes itself by public facts: the entity types that it annotates and how
it maps labels to them, or the dictionary that it reads notes with and the phenotypes.
The server gathers all descriptions and sends all of them to everybody. Each side then
makes the method's configuration for itself, from stubs of sites that hold a description
and no notes, and a site that finds itself described wrongly refuses
(`deployment.AgreedSite`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

import torch

import fednotes
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError
from fednotes.core.parsing import parse_json
from fednotes.core.settings import build, checked
from fednotes.core.tables import table_fingerprint
from fednotes.core.types import Scheme, SiteData, TagSet
from fednotes.core.update import Tensors
from fednotes.encoders.pretrained import encoder_directory, folder_fingerprint
from fednotes.engines.launch import Setup
from fednotes.jobs.job import Job
from fednotes.taggers.saving import PLACES

AGREE, DESCRIBE, SCORES = "agree", "@describe", "@scores"
_MOST_BYTES = 2**20


@checked(frozen=True)
class Description:
    """One site in public.

    version: of fednotes. encoder: digest of the pretrained encoder that models begin
        from. types,
    scheme, label_map: of sites with annotations. width, dense,
    features, phenotypes, coded: of sites with patients: their features (with the
    fingerprint of the dictionary or encoder), the phenotypes, and whether codes are
    known. vectors: digest of the public vectors that stage 1 starts from.
    """

    version: str = fednotes.__version__
    encoder: str = ""
    types: tuple[str, ...] = ()
    scheme: Scheme = "BIO"
    label_map: Mapping[str, str] = field(default_factory=dict)
    width: int = 0
    dense: bool = False
    features: str = ""
    phenotypes: tuple[str, ...] = ()
    coded: bool = False
    vectors: str = ""

    def __post_init__(self) -> None:
        if len(set(self.types)) < len(self.types):
            raise ConfigError("describes itself in a way that cannot be")


Descriptions = Mapping[str, Description]


def threshold(job: Job, setup: Setup) -> int:
    """Least number of sites that a sum is opened with: of a secure sum more than half."""
    sites = len(setup.sites)
    if not job.federation.secure_sum:
        return setup.min_sites
    return max(job.federation.min_sites or sites, sites // 2 + 1)


def planned_rounds(job: Job, config: Any) -> int | None:
    """The most rounds that a job can take; None if that depends on how many notes sites
    have."""
    few, many = (job.module.planned(config, [n])[0] for n in (1, 1_000_000))
    return int(few) if few == many else None


def can_round_counts(job: Job) -> bool:
    """Return whether the sites of a job's method can send their counts as multiples of
    a step."""
    return bool(getattr(job.module.Site, "rounds_counts", False))


def describe(job: Job, data: Any) -> Description:
    """A site's own description. job: with this site alone. data: what it holds."""
    facts = dict(job.kind.describe(job, data))
    if job.kind.stub is None:  # models of patients begin from no encoder
        facts["encoder"] = encoder_of(job)
    return Description(**facts)


def encoder_of(job: Job) -> str:
    """Digest of the encoder that the job's models begin from, as this machine has it;
    "" for none.

    Raises ModelError where it is not here, MissingExtra.
    """
    spec = next(
        filter(None, (getattr(job.config.model, key, "") for key in PLACES)), ""
    )
    name = spec if Path(spec).expanduser().is_dir() else spec.partition("#")[0]
    return folder_fingerprint(encoder_directory(name, spec)) if spec else ""


def packed(value: Any) -> torch.Tensor:
    """A JSON value as it travels: the bytes of its text."""
    raw = json.dumps(value, separators=(",", ":")).encode("ascii")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def unpacked(value: torch.Tensor, **bounds: Any) -> Any:
    """The JSON value of a tensor. bounds: of `parse_json`. Raises ValueError."""
    if value.dtype != torch.uint8:
        raise ValueError("not bytes")
    return parse_json(value.numpy().tobytes(), **bounds)


def as_text(descriptions: Descriptions) -> str:
    """All descriptions, in the sites' order, as one line of ASCII."""
    tables = {site: asdict(own) for site, own in descriptions.items()}
    return json.dumps(tables, separators=(",", ":"))


def agreement_of(job: Job, descriptions: Descriptions) -> str:
    """The fingerprint that all sides must have before round 1; the order of sites
    counts."""
    sites = [{"site": site, **asdict(own)} for site, own in descriptions.items()]
    return table_fingerprint({"method": job.method, "sites": sites})


def from_text(text: str) -> dict[str, Description]:
    """Raises ConfigError for anything that `as_text` does not write."""
    try:
        tables = parse_json(text).items()
    except (ValueError, AttributeError) as error:
        raise ConfigError("the sites' descriptions are not readable") from error
    return {site: build(Description, own, f"site {site!r}") for site, own in tables}


def from_tensors(site: str, tensors: Tensors) -> Description:
    """A description as it travelled.

    Raises ConfigError where a site sent something else.
    """
    value = tensors.get("description")
    if value is None or not 0 < value.numel() <= _MOST_BYTES:
        raise ConfigError(
            f"site {site!r} does not describe itself: does it run this version?"
        )
    try:
        return build(Description, unpacked(value), f"site {site!r}")
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            f"site {site!r} describes itself in a way that this version does not read: install "
            f"the same fednotes everywhere, here it is {fednotes.__version__}"
        ) from error


def _stub(job: Job, site: str, own: Description) -> Any:
    """A site with nothing in it, for `for_sites` of a method."""
    if job.kind.stub is not None:
        return job.kind.stub(site, own)
    return SiteData(site, TagSet(own.types, own.scheme), (), (), ())


def agreed_config(job: Job, descriptions: Descriptions) -> Any:
    """The method's configuration for these sites.

    Raises ConfigError, DataError or RefusedError where they do not go together.
    """
    here = fednotes.__version__
    if any(own.version != here for own in descriptions.values()):
        named = ", ".join(
            f"{s} {clean(own.version, NAME)}" for s, own in descriptions.items()
        )
        raise ConfigError(
            f"the sites run different versions of fednotes ({named}; here {here}): install the "
            "same one everywhere"
        )
    ours = encoder_of(job) if job.kind.stub is None else ""
    for site, own in descriptions.items():
        if own.encoder != ours:
            raise ConfigError(
                f"site {_text(site)} has another encoder ({clean(own.encoder, NAME) or 'none'}) "
                f"than is here ({ours or 'none'}): give every site and the server one folder"
            )
    every = {label for own in descriptions.values() for label in own.types}
    for label in job.tags.types if job.tags is not None else ():
        if label not in every:
            own_types = "; ".join(
                f"{site}: {clean(', '.join(own.types), 10 * NAME)}"
                for site, own in descriptions.items()
            )
            raise ConfigError(
                f"[tags] types has {label!r}, which no site annotates ({own_types})"
            )
    stubs = tuple(_stub(job, site, own) for site, own in descriptions.items())
    return job.module.for_sites(job.config, stubs)


def require_as_declared(job: Job, descriptions: Descriptions) -> None:
    """What the job's own tables say of a site's labels is what that site does.

    Raises ConfigError with the labels on both sides and the remedy.
    """
    lines = []
    for site, own in descriptions.items():
        table = job.sites[site]
        if job.data == "documents" and table.types:
            label_map = table.label_map or own.label_map
            declared = Description(
                types=table.types, scheme=table.scheme, label_map=label_map
            )
            lines.append(mismatch(site, declared, own, ("the job", "the site")))
    if any(lines):
        raise ConfigError("; ".join(filter(None, lines)))


def mismatch(
    site: str, here: Description, there: Description, names: tuple[str, str]
) -> str:
    """Where two sides' ideas of a site's labels differ: the labels on both sides, and
    the remedy. "" where they agree. names: what messages call both sides."""
    ours, theirs = names
    sets = f"{ours} has {{{_list(here.types)}}}, {theirs} has {{{_list(there.types)}}}"
    head = f"site {_text(site)}: {sets}"
    odd = {
        ours: [label for label in here.types if label not in there.types],
        theirs: [label for label in there.types if label not in here.types],
    }
    if any(odd.values()):
        sides = "; ".join(
            f"only {who}: {_list(types)}" for who, types in odd.items() if types
        )
        return f"{head} ({sides}): map the labels in label_map, or correct types, on one side"
    if here.types != there.types:
        return f"{head}: the order differs, and a tag's id is its place: give types in one order"
    if here.scheme != there.scheme:
        return (
            f"{head}, written as {here.scheme} and as {there.scheme}: set scheme alike"
        )
    shown = "; ".join(
        f"{_text(key)} → {_target(here, key)} at {ours}, {_target(there, key)} at {theirs}"
        for key in sorted(here.label_map.keys() | there.label_map.keys())
        if here.label_map.get(key) != there.label_map.get(key)
    )
    told = f"{head}, but label_map differs ({shown}): make it the same on both sides"
    return told if shown else ""


def _target(own: Description, key: str) -> str:
    label = own.label_map.get(key)
    return "not mapped" if label is None else _text(label) if label else "dropped"


def _list(types: Iterable[str]) -> str:
    return ", ".join(clean(label, NAME) for label in types)


def _text(value: str) -> str:
    return clean(json.dumps(value, ensure_ascii=False), None)
