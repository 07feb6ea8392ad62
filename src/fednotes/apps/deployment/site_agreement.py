"""The agreement of the sites before round 1, without seeing each other's notes.

Each site describes itself by public facts: the entity types that it annotates and how
it maps labels to them, or its phenotypes and the dictionary with which it reads notes.
The server collects the descriptions and sends all of them to every site. The server and
each site then derive the method's configuration independently, from stubs that have a
description but no notes. A site that is described wrongly refuses (`site.AgreedSite`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, field
from functools import partial
from typing import Annotated, Any

import torch
from annotated_types import Interval

import fednotes
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError
from fednotes.core.parsing import parse_json
from fednotes.core.settings import build, checked, expand_home
from fednotes.core.tables import fingerprint_table
from fednotes.core.types import PublicNotes, Scheme, SiteData, TagSet
from fednotes.core.update import Tensors
from fednotes.encoders.pretrained import (
    compute_folder_fingerprint,
    find_encoder_directory,
)
from fednotes.engines.launch import Setup
from fednotes.jobs.job import Job
from fednotes.jobs.parts import configure
from fednotes.taggers.saving import list_encoder_keys
from fednotes.training.site_sampling import count_drawn_sites

AGREE = "agree"
DESCRIBE = "@describe"
SCORES = "@scores"
MAX_TYPES = 100  # entity types that sites annotate and the job does not name
_MAX_BYTES = 2**20
_MAX_WIDTH = 2**40  # features of patients; PyTorch refuses a model of 2**62


@checked(frozen=True)
class Description:
    """The public facts of one site.

    Attributes:
        version: Version of fednotes at the site.
        encoder: Digest of the pretrained encoder that models start from; "" for none.
        types: Entity types of a site with annotations.
        scheme: Tagging scheme of a site with annotations.
        overlaps: Whether mentions of different types may overlap at such a site.
        label_map: How a site with annotations maps labels to entity types.
        width: Number of features of a site with patients.
        dense: Whether these features are dense.
        features: Source of these features, with the fingerprint of the dictionary or
            encoder.
        phenotypes: Phenotypes of a site with patients.
        coded: Whether the site knows billing codes of its patients.
        vectors: Digest of the public word vectors that stage 1 starts from; "" for
            none.
        public: Digest of the public notes that the method reads; "" for none.
    """

    version: str = fednotes.__version__
    encoder: str = ""
    types: tuple[str, ...] = ()
    scheme: Scheme = "BIO"
    overlaps: bool = False
    label_map: Mapping[str, str] = field(default_factory=dict)
    width: Annotated[int, Interval(ge=0, le=_MAX_WIDTH)] = 0
    dense: bool = False
    features: str = ""
    phenotypes: tuple[str, ...] = ()
    coded: bool = False
    vectors: str = ""
    public: str = ""

    def __post_init__(self) -> None:
        if len(set(self.types)) < len(self.types):
            raise ConfigError("describes itself with an entity type that occurs twice")
        try:
            json.dumps(asdict(self), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            # No model with this name in its files could be saved.
            raise ConfigError("describes itself with a lone surrogate") from error


Descriptions = Mapping[str, Description]


def compute_sum_threshold(job: Job, setup: Setup, num_sites: int | None = None) -> int:
    """Return the minimum number of sites with which a sum may be opened.

    For a secure sum, the number is more than half of the sites.

    Args:
        job: The job.
        setup: Start-up data of this side of the job.
        num_sites: Number of sites for which the sum is meant, such as those of a round;
            None for all sites.
    """
    if num_sites is None:
        num_sites = len(setup.sites)
    if not job.federation.secure_sum:
        return min(setup.min_sites, num_sites)
    min_sites = job.federation.min_sites or num_sites
    return max(min_sites, num_sites // 2 + 1)


def make_threshold_function(job: Job, setup: Setup) -> Callable[[int], int] | None:
    """Return a function from the number of a sum's sites to the sum's threshold.

    Returns:
        The function; None if all sites take part in each round, so that every sum has
        the same threshold.
    """
    if count_drawn_sites(job.config) is None:
        return None
    return partial(compute_sum_threshold, job, setup)


def count_sites_per_sum(job: Job, setup: Setup) -> int:
    """Return the number of sites for which the sums of a round are meant."""
    return count_drawn_sites(job.config) or len(setup.sites)


def name_key_exchange(fingerprint: str, run: str) -> str:
    """Return the job name under which the sites of one submission exchange keys.

    An approved job can be submitted more than once. If sites of two submissions could
    be in one sum, the server could compute one site's update from the difference of two
    sums.

    Args:
        fingerprint: The approved job's fingerprint.
        run: Name of the submission.
    """
    return f"{fingerprint} {run}"


def count_planned_rounds(job: Job, config: Any) -> int | None:
    """Return the number of rounds of a job; None if it depends on the sites' notes."""
    rounds_of_one_note, _ = job.module.plan_rounds(config, [1])
    rounds_of_many_notes, _ = job.module.plan_rounds(config, [1_000_000])
    if rounds_of_one_note != rounds_of_many_notes:
        return None
    return int(rounds_of_one_note)


def can_round_counts(job: Job) -> bool:
    """Return whether a method's sites can send their counts as multiples of a step."""
    return bool(getattr(job.module.site_class, "rounds_counts", False))


def describe_site(job: Job, data: Any) -> Description:
    """Return the description of this site.

    Args:
        job: The job as this site reads it.
        data: The site's notes.
    """
    facts = dict(job.kind.describe(job, data))
    if job.kind.make_stub is None:
        facts["encoder"] = digest_encoder(job)
    return Description(**facts)


def digest_encoder(job: Job) -> str:
    """Return a digest of the encoder that a job's models start from; "" for none.

    It is also "" if each site may have a different model.

    Raises:
        ModelError: This machine does not have the encoder.
        MissingExtra: A package that reads the encoder is missing.
    """
    # Models of patients start from no encoder.
    if job.kind.make_stub is not None or job.module.site_keys:
        return ""
    model = job.config.model
    specs = [getattr(model, key) for key in list_encoder_keys(model)]
    spec = next((spec for spec in specs if spec), "")
    if not spec:
        return ""
    is_folder = os.path.isdir(expand_home(spec))
    name = spec if is_folder else spec.partition("#")[0]
    return compute_folder_fingerprint(find_encoder_directory(name, spec))


# ---- encoding of descriptions --------------------------------------------------------


def pack_json(value: Any) -> torch.Tensor:
    """Return the bytes of a value's JSON text, as a tensor."""
    raw = json.dumps(value, separators=(",", ":")).encode("ascii")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def unpack_json(tensor: torch.Tensor, **bounds: Any) -> Any:
    """Return the value whose JSON text a tensor of bytes holds.

    Args:
        tensor: The bytes, uint8.
        **bounds: Bounds on the value, as `parse_json` takes them.

    Raises:
        ValueError: The tensor holds no JSON text, or the value exceeds a bound.
    """
    if tensor.dtype != torch.uint8:
        raise ValueError("not bytes")
    return parse_json(tensor.numpy().tobytes(), **bounds)


def encode_descriptions(descriptions: Descriptions) -> str:
    """Return all descriptions, in the sites' order, as one line of ASCII."""
    tables = {site: asdict(facts) for site, facts in descriptions.items()}
    return json.dumps(tables, separators=(",", ":"))


def decode_descriptions(text: str) -> dict[str, Description]:
    """Return the descriptions that `encode_descriptions` wrote.

    Raises:
        ConfigError: The text is not in this format.
    """
    try:
        tables = parse_json(text).items()
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            "the sites' descriptions are not readable: install the same "
            "version of fednotes everywhere"
        ) from error
    return {site: build(Description, table, f"site {site!r}") for site, table in tables}


def read_site_description(site: str, tensors: Tensors) -> Description:
    """Return the description that a site sent.

    Raises:
        ConfigError: The tensors are not a description.
    """
    value = tensors.get("description")
    if value is None or not 0 < value.numel() <= _MAX_BYTES:
        raise ConfigError(
            f"site {site!r} does not describe itself: install this version of "
            "fednotes there"
        )
    try:
        return build(Description, unpack_json(value), f"site {site!r}")
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            f"this version cannot read the description that site {site!r} sent: "
            "install the same version of fednotes at all sites (here: "
            f"{fednotes.__version__})"
        ) from error


def compute_agreement_fingerprint(job: Job, descriptions: Descriptions) -> str:
    """Return a digest of the agreement, which must be equal at the server and sites.

    It depends on the order of the sites.
    """
    sites = [{"site": site, **asdict(facts)} for site, facts in descriptions.items()]
    return fingerprint_table({"method": job.method, "sites": sites})


# ---- the agreement -------------------------------------------------------------------


def derive_config(job: Job, descriptions: Descriptions) -> Any:
    """Return the method's configuration for the sites with these descriptions.

    Raises:
        ConfigError: The sites have different versions, encoders or entity types.
        DataError: The sites do not match the method.
        RefusedError: The sites do not match the method.
    """
    _require_same_version(descriptions)
    if job.kind.make_stub is None:
        _require_encoder(descriptions, digest_encoder(job))
    else:
        _require_encoder(descriptions, "")
    if job.tags is not None:
        _require_annotated(job.tags.types, descriptions)
    _require_listed_or_few_types(job, descriptions)
    stubs = tuple(_make_stub(job, site, facts) for site, facts in descriptions.items())
    return configure(job, stubs)


def _require_same_version(descriptions: Descriptions) -> None:
    """Raise ConfigError unless all sites run this version of fednotes."""
    version = fednotes.__version__
    if any(facts.version != version for facts in descriptions.values()):
        versions = ", ".join(
            f"{site} {clean(facts.version, NAME)}"
            for site, facts in descriptions.items()
        )
        raise ConfigError(
            f"the sites run different versions of fednotes ({versions}; here "
            f"{version}): install the same version at all sites"
        )


def _require_encoder(descriptions: Descriptions, encoder: str) -> None:
    """Raise ConfigError unless all sites have the encoder with this digest, or none."""
    for site, facts in descriptions.items():
        if facts.encoder != encoder:
            raise ConfigError(
                f"site {_quote_json(site)} has a different encoder "
                f"({clean(facts.encoder, NAME) or 'none'}) than this machine "
                f"({encoder or 'none'}): give every site and the server the same "
                "folder"
            )


def _require_annotated(types: Iterable[str], descriptions: Descriptions) -> None:
    """Raise ConfigError unless each of these entity types is annotated at some site."""
    annotated_types = {
        label for facts in descriptions.values() for label in facts.types
    }
    for label in types:
        if label not in annotated_types:
            site_types = "; ".join(
                f"{site}: {clean(', '.join(facts.types), 10 * NAME)}"
                for site, facts in descriptions.items()
            )
            raise ConfigError(
                f"[tags] types has {label!r}, which no site annotates "
                f"({site_types}): remove it, or correct a site's types"
            )


def _require_listed_or_few_types(job: Job, descriptions: Descriptions) -> None:
    """Raise ConfigError if sites add entity types that the job does not list.

    A model has a parameter for each pair of types, and with soft targets a site keeps a
    number for each pair and sentence. One site could therefore exhaust the memory of
    all other sites and of the server. A person at each site has approved the types that
    the job lists. If it lists all types, no site may have others; otherwise, the sites
    may add `MAX_TYPES`.
    """
    if job.data != "documents":
        return
    if job.tags is not None and job.tags.types:
        _require_listed(frozenset(job.tags.types), descriptions)
        return
    undeclared: set[str] = set()
    for site, facts in descriptions.items():
        is_declared = site in job.sites and bool(job.sites[site].types)
        if not is_declared:
            undeclared.update(facts.types)
        if len(undeclared) > MAX_TYPES:
            raise ConfigError(
                f"site {_quote_json(site)} annotates {len(facts.types):,} entity "
                f"types, but a site may add only {MAX_TYPES:,} that the job does not "
                "list: list those to learn in [tags] types of the job"
            )


def _require_listed(listed: Collection[str], descriptions: Descriptions) -> None:
    """Raise ConfigError if a site annotates a type that is not one of these."""
    for site, facts in descriptions.items():
        for label in facts.types:
            if label not in listed:
                raise ConfigError(
                    f"site {_quote_json(site)} annotates {clean(label, NAME)}, which "
                    "[tags] types of the job does not list: map it in label_map of "
                    "this site, or add it to the job"
                )


def _make_stub(job: Job, site: str, facts: Description) -> Any:
    """Return a site without notes, from which a method derives its configuration."""
    if job.kind.make_stub is not None:
        return job.kind.make_stub(site, facts)
    public = PublicNotes(facts.public) if facts.public else None
    tags = TagSet(facts.types, facts.scheme, facts.overlaps)
    return SiteData(site, tags, (), (), (), public=public)


def require_as_declared(job: Job, descriptions: Descriptions) -> None:
    """Raise ConfigError if a site's labels are not those that the job declares for it.

    The message has the labels of both sides and the remedy.
    """
    if job.data != "documents":
        return
    problems = []
    for site, facts in descriptions.items():
        table = job.sites[site]
        if not table.types:
            continue
        declared = Description(
            types=table.types,
            scheme=table.scheme,
            overlaps=table.keeps_overlaps,
            label_map=table.label_map or facts.label_map,
        )
        problem = explain_mismatch(site, declared, facts, names=("the job", "the site"))
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError("; ".join(problems))


def explain_mismatch(
    site: str, left: Description, right: Description, *, names: tuple[str, str]
) -> str:
    """Explain how two descriptions of a site's labels differ.

    Args:
        site: The site.
        left: One description.
        right: The other description.
        names: How messages refer to the two sides.

    Returns:
        The labels of both sides and the remedy; "" if the descriptions agree.
    """
    left_name, right_name = names
    both_types = (
        f"site {_quote_json(site)}: {left_name} has {{{_format_types(left.types)}}}, "
        f"{right_name} has {{{_format_types(right.types)}}}"
    )
    type_differences = _compare_types(left, right, names)
    if type_differences:
        return (
            f"{both_types} ({type_differences}): map the labels in label_map, or "
            "correct types, on one side"
        )
    if left.types != right.types:
        return (
            f"{both_types}: the order differs, and a tag's id is its position: give "
            "types in the same order on both sides"
        )
    if left.scheme != right.scheme:
        return (
            f"{both_types}, written as {left.scheme} and as {right.scheme}: set the "
            "same scheme on both sides"
        )
    if left.overlaps != right.overlaps:
        keeping, other = names if left.overlaps else names[::-1]
        return (
            f"site {_quote_json(site)}: {keeping} keeps overlapping mentions (flatten "
            f'= "keep"), {other} does not: set the same `flatten` on both sides'
        )
    map_differences = _compare_label_maps(left, right, names)
    if map_differences:
        return (
            f"{both_types}, but label_map differs ({map_differences}): make it the "
            "same on both sides"
        )
    return ""


def _compare_types(
    left: Description, right: Description, names: tuple[str, str]
) -> str:
    """Name the entity types that only one of two descriptions has; "" for none."""
    left_name, right_name = names
    only_left = [label for label in left.types if label not in right.types]
    only_right = [label for label in right.types if label not in left.types]
    differences = []
    if only_left:
        differences.append(f"only {left_name}: {_format_types(only_left)}")
    if only_right:
        differences.append(f"only {right_name}: {_format_types(only_right)}")
    return "; ".join(differences)


def _compare_label_maps(
    left: Description, right: Description, names: tuple[str, str]
) -> str:
    """Name the labels that two descriptions map to different types; "" for none."""
    left_name, right_name = names
    labels = sorted(left.label_map.keys() | right.label_map.keys())
    return "; ".join(
        f"{_quote_json(label)} → {_describe_target(left, label)} at {left_name}, "
        f"{_describe_target(right, label)} at {right_name}"
        for label in labels
        if left.label_map.get(label) != right.label_map.get(label)
    )


def _describe_target(facts: Description, label: str) -> str:
    """Return the entity type to which a label is mapped, in words."""
    target = facts.label_map.get(label)
    if target is None:
        return "not mapped"
    return _quote_json(target) if target else "dropped"


def _format_types(types: Iterable[str]) -> str:
    """Return entity types from outside, sanitised and separated by commas."""
    return ", ".join(clean(label, NAME) for label in types)


def _quote_json(value: str) -> str:
    """Return a name from outside as JSON text, sanitised."""
    return clean(json.dumps(value, ensure_ascii=False), None)
