"""Decide on a first job from facts about the sites' notes.

    sites annotate                              method      model
    the same entity types                       finetune    a pre-trained encoder
    the same entity types, and no encoder       fedner      a light tagger
    different entity types                      distill     one model for all types
    labels of patients                          phenotype   a frozen encoder
    nothing                                     pretrain    a pre-trained encoder

A site without annotations is left out of a job on mentions. A single corpus is dealt
out to simulated sites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fednotes.core.cleaning import NAME, clean_to_one_line
from fednotes.core.errors import DataError, ParameterError, suggest_name
from fednotes.core.wording import format_count, list_names
from fednotes.jobs.label_maps import LabelMap, find_label_maps
from fednotes.jobs.proposal.facts import Facts, Holds, SiteFacts
from fednotes.jobs.unshared_types import (
    FEW_MENTIONS,
    describe_pooled,
    find_common_types,
    find_unshared_types,
    is_unannotated,
)

# Methods for annotated mentions that can be proposed.
_MENTION_METHODS = ("finetune", "fedner", "distill", "personal")
# What a job learns from, if sites hold several of these: the first one.
_PREFERENCE: tuple[Holds, ...] = ("mentions", "patients", "notes")
_HOLDS_WORDS: Mapping[Holds, str] = {
    "mentions": "annotated mentions",
    "patients": "labels of patients",
    "notes": "no annotations",
}
_MISSING = {"mentions": "annotations", "patients": "labels of patients"}
ALL_CONDITIONS = ("alone", "federated", "pooled")
# Conditions of methods for sites with different types, which cannot be pooled.
_CONDITIONS = {
    "distill": ("alone", "federated"),
    "personal": ("alone", "own-mix", "federated"),
}
_NEEDS_ENCODER = ("finetune", "personal", "pretrain")
MINILM = "minilm"
_MAX_SILOS = 5
_MIN_SILOS = 2
_FEW_NOTES = 10  # with fewer notes, a site lacks types by chance
_MAX_CLAUSES = 3  # sites that a remark describes one by one
_SUM_SITES = 3  # sites that a secure sum needs


@dataclass(frozen=True)
class Choices:
    """A user's decisions; everything else is proposed.

    Attributes:
        method: The method; "" proposes one.
        encoder: "minilm", a directory of an encoder, or "none" for a light tagger; ""
            proposes "minilm" if it is installed.
        silos: Number of simulated sites of one corpus; 0 proposes one.
        label_maps: Whether to rename a type, by site and old name, if the user
            overrides the proposal.
    """

    method: str = ""
    encoder: str = ""
    silos: int = 0
    label_maps: Mapping[tuple[str, str], bool] = field(default_factory=dict)


class Choice(NamedTuple):
    """One decision.

    Attributes:
        value: The chosen value.
        reason: The reason, in one sentence.
    """

    value: str
    reason: str


@dataclass(frozen=True)
class Silos:
    """Simulated sites that one corpus is dealt out to.

    Attributes:
        number: Number of sites.
        by: Unit that is never divided between them: "patient" or "document".
    """

    number: int
    by: str


@dataclass(frozen=True)
class Proposal:
    """A proposed job.

    Attributes:
        facts: The facts behind the proposal.
        sites: The sites of the job.
        method: The method, and why.
        model: The encoder, or "none" for a light tagger, and why.
        label_maps: Entity types that are, or may be, renamed.
        common_types: Types with which all sites have the same tag set, so that the
            pooled model is one model of all notes; empty if they have it anyway, or if
            nothing is pooled.
        silos: The simulated sites, if there is only one corpus.
        conditions: The conditions to train.
        remarks: Further remarks about the notes.
    """

    facts: Facts
    sites: tuple[SiteFacts, ...]
    method: Choice
    model: Choice
    label_maps: tuple[LabelMap, ...] = ()
    common_types: tuple[str, ...] = ()
    silos: Silos | None = None
    conditions: tuple[str, ...] = ALL_CONDITIONS
    remarks: tuple[str, ...] = ()

    @property
    def is_light(self) -> bool:
        """Whether the model is a light tagger without a pre-trained encoder."""
        return self.model.value == "none"


def propose(facts: Facts, choices: Choices, *, has_minilm: bool) -> Proposal:
    """Return a job for the notes of sites.

    Args:
        facts: The facts about the notes.
        choices: The user's decisions.
        has_minilm: Whether the encoder "minilm" is installed.

    Raises:
        ConfigError: A choice does not match the notes.
        DataError: One corpus has too few notes for several sites.
    """
    available = {site.holds for site in facts.sites}
    holds = next(each for each in _PREFERENCE if each in available)
    sites = tuple(site for site in facts.sites if site.holds == holds)
    _require_method(choices.method, sites)
    _require_same_labels(sites)

    encoder = choices.encoder
    if not encoder:
        encoder = MINILM if has_minilm else "none"
    original_types = {site.name: site.types for site in sites}
    label_maps = _decide_label_maps(original_types, choices)
    types = rename_types(original_types, label_maps)
    method = _choose_method(sites, types, encoder, choices)
    needs_encoder = holds == "patients" or method.value in _NEEDS_ENCODER
    if encoder == "none" and needs_encoder:
        encoder = MINILM
    conditions = _CONDITIONS.get(method.value, ALL_CONDITIONS)
    remarks = [*_list_remarks(facts, sites, types)]
    unannotated_types = _find_unannotated_types(sites, types)
    if unannotated_types:
        remarks.insert(0, _describe_unannotated_types(unannotated_types, types))
    unshared_types = find_unshared_types(list(types.values()))
    common_types: tuple[str, ...] = ()
    if "pooled" in conditions and unshared_types:
        # With these types alone, the pooled model is one model of all notes.
        common_types = tuple(find_common_types(types))
        advice = ""
        if common_types:
            advice = "; a comment in the job gives the types that all sites share"
        remarks.insert(0, describe_pooled(unshared_types) + advice)
    return Proposal(
        facts=facts,
        sites=sites,
        method=method,
        model=_choose_model(method.value, holds, encoder, choices),
        label_maps=label_maps,
        common_types=common_types,
        silos=_choose_silos(sites, choices.silos),
        conditions=conditions,
        remarks=(*facts.remarks, *remarks),
    )


def _find_unannotated_types(
    sites: Sequence[SiteFacts], types: Mapping[str, Counter[str]]
) -> dict[str, list[str]]:
    """Return the types that each site seems not to annotate: site → types.

    The types that are most frequent at the other sites come first.
    """
    notes = {site.name: site.notes for site in sites}
    total = sum(types.values(), Counter[str]())
    unannotated_types = {}
    for site in _list_informative_sites(sites):
        labels = [
            label
            for label, _ in total.most_common()
            if is_unannotated(label, site.name, types, notes)
        ]
        if labels:
            unannotated_types[site.name] = labels
    return unannotated_types


def _describe_unannotated_types(
    unannotated_types: Mapping[str, Sequence[str]], types: Mapping[str, Counter[str]]
) -> str:
    """Return which site never annotates which types, and what that may mean.

    Args:
        unannotated_types: The types that each site never annotates.
        types: Number of mentions by entity type, for each site.
    """
    clauses = [
        f"{site} never annotates {_join_names(labels)}, which "
        f"{_describe_mentions_elsewhere(labels, types)}"
        for site, labels in unannotated_types.items()
    ]
    num_unshown = len(clauses) - _MAX_CLAUSES
    if num_unshown > 0:
        more_sites = format_count(num_unshown, "more site")
        clauses[_MAX_CLAUSES:] = [f"types are missing at {more_sites}, too"]
    return (
        f"{'; '.join(clauses)}: either annotators leave such mentions out (then method "
        '"distill" fits, which learns a type only where it is annotated), or the notes '
        'there hold none (then method "finetune" fits)'
    )


def _describe_mentions_elsewhere(
    labels: Sequence[str], types: Mapping[str, Counter[str]]
) -> str:
    """Return which sites have mentions of some types, and how many, in words.

    Args:
        labels: The types.
        types: Number of mentions by entity type, for each site.
    """
    annotating_sites = [
        site
        for site, counts in types.items()
        if any(label in counts for label in labels)
    ]
    num_mentions = sum(
        types[site][label] for site in annotating_sites for label in labels
    )
    times = format_count(num_mentions, "time")
    if len(annotating_sites) == 1:
        return f"{annotating_sites[0]} has {times}"
    return f"other sites have {times}"


def _find_lacking_types(
    sites: Sequence[SiteFacts], types: Mapping[str, Counter[str]]
) -> list[str]:
    """Return the types that a site lacks although it has enough notes to show them."""
    judged = [types[site.name] for site in _list_informative_sites(sites)]
    all_labels = {label for counts in types.values() for label in counts}
    return sorted(
        label for label in all_labels if any(label not in counts for counts in judged)
    )


def _list_informative_sites(sites: Sequence[SiteFacts]) -> list[SiteFacts]:
    """Return the sites whose notes show which types they annotate.

    A few notes lack many types by chance, so sites with few notes do not count unless
    all sites have few.
    """
    return [site for site in sites if not _has_few_notes(site)] or list(sites)


def _has_few_notes(site: SiteFacts) -> bool:
    """Return whether a site has so few notes that it lacks types by chance."""
    return site.notes < _FEW_NOTES


def list_methods(sites: Sequence[SiteFacts]) -> tuple[str, ...]:
    """Return the methods that can learn from the data of sites.

    Args:
        sites: Sites that all hold data of the same kind.
    """
    first_site, *_ = sites
    if first_site.labels is not None:
        return (first_site.labels.method,)
    if first_site.holds == "mentions":
        return _MENTION_METHODS
    return ("pretrain",)


def _require_method(method: str, sites: Sequence[SiteFacts]) -> None:
    """Raise ParameterError if the user chose a method for other notes."""
    suitable_methods = list_methods(sites)
    if method and method not in suitable_methods:
        raise ParameterError(
            f"`method` {method}: the notes have {_HOLDS_WORDS[sites[0].holds]}: "
            f"{suggest_name(method, suitable_methods)}"
        )


def _require_same_labels(sites: Sequence[SiteFacts]) -> None:
    """Raise DataError if two sites label their patients for different phenotypes."""
    first, *others = sites
    for site in others:
        if first.labels is None or site.labels is None:
            continue
        unshared = sorted(first.labels.counts.keys() ^ site.labels.counts.keys())
        if unshared:
            raise DataError(
                f"{site.labels.path}: {_join_names(unshared)} are labelled at only "
                f"one of the sites {first.name} and {site.name}: add an empty column "
                "for each where it is missing"
            )


# ---- label maps ----------------------------------------------------------------------


def _decide_label_maps(
    types: Mapping[str, Mapping[str, int]], choices: Choices
) -> tuple[LabelMap, ...]:
    """Return the proposals to rename types, with the user's decisions applied."""
    return tuple(
        LabelMap(
            each.site,
            each.old,
            each.new,
            each.reason,
            is_active=choices.label_maps.get((each.site, each.old), each.is_active),
        )
        for each in find_label_maps(types)
    )


def rename_types(
    types: Mapping[str, Mapping[str, int]], label_maps: Sequence[LabelMap]
) -> dict[str, Counter[str]]:
    """Return the number of mentions after renaming: site → type → number."""
    new_names = {
        (each.site, each.old): each.new for each in label_maps if each.is_active
    }
    new_types: dict[str, Counter[str]] = {}
    for site, counts in types.items():
        new_counts: Counter[str] = Counter()
        for label, mentions in counts.items():
            new_counts[new_names.get((site, label), label)] += mentions
        new_types[site] = new_counts
    return new_types


# ---- method and model ----------------------------------------------------------------


def _choose_method(
    sites: Sequence[SiteFacts],
    types: Mapping[str, Counter[str]],
    encoder: str,
    choices: Choices,
) -> Choice:
    """Return the method, and why it suits the notes.

    Args:
        sites: The sites, which all hold data of the same kind.
        types: Number of mentions by entity type, for each site.
        encoder: The encoder, or "none".
        choices: The user's decisions.
    """
    if choices.method:
        return Choice(choices.method, "You chose it.")
    first_site, *_ = sites
    if first_site.labels is not None:
        return Choice(
            first_site.labels.method,
            "Patients are labelled and no mention is annotated, so sites learn the "
            "labels from all notes of a patient.",
        )
    if first_site.holds == "notes":
        return Choice(
            "pretrain",
            "The notes have no annotations, so sites can pre-train a language model on "
            "them.",
        )
    if _find_unannotated_types(sites, types):
        return Choice(
            "distill",
            "The sites annotate different entity types, and distillation trains one "
            "model for all of them.",
        )
    unshared_types = _find_lacking_types(sites, types)
    reason = "The sites annotate the same entity types"
    if len(types) == 1:
        reason = "All notes are annotated with the same entity types"
    elif unshared_types:
        reason += f", except rare ones ({_join_names(unshared_types)})"
    if encoder == "none":
        missing = "no pre-trained encoder is installed"
        if choices.encoder == "none":
            missing = "you want no pre-trained encoder"
        return Choice("fedner", f"{reason}, and {missing}: a light tagger.")
    return Choice(
        "finetune",
        f"{reason}, and fine-tuning an encoder comes close to a model of all notes in "
        "one place.",
    )


def _choose_model(method: str, holds: Holds, encoder: str, choices: Choices) -> Choice:
    """Return the encoder of a method, and why."""
    if holds == "patients":
        return Choice(
            encoder,
            "A frozen encoder needs no dictionary of concepts; with a dictionary, "
            "classifiers learn from the concepts in the notes.",
        )
    if method == "fedner":
        if encoder == "none":
            return Choice(
                "none",
                "Hashed words, prefixes, suffixes and shapes need no file; a frozen "
                "encoder of clinical text may find more mentions.",
            )
        return Choice(encoder, "A frozen encoder gives the light tagger its features.")
    if encoder == "none":
        missing = "The extra `transformers` is not installed"
        if choices.encoder == "none":
            missing = "You want no pre-trained encoder"
        return Choice(
            "none",
            f"{missing}, so a light tagger learns from words and characters alone.",
        )
    if encoder == MINILM:
        return Choice(
            MINILM,
            "MiniLM is small and comes with the extra `transformers`; a larger encoder "
            "of clinical text learns more and takes longer.",
        )
    return Choice(encoder, "You named it.")


# ---- simulated sites -----------------------------------------------------------------


def _choose_silos(sites: Sequence[SiteFacts], number: int) -> Silos | None:
    """Return the simulated sites of one corpus; None if there are several sites.

    Args:
        sites: The sites of the job.
        number: The number of simulated sites that the user requests; 0 for none.

    Raises:
        ConfigError: The user requests too many, or already has several sites.
        DataError: There are too few notes for two sites.
    """
    if len(sites) > 1:
        if number:
            raise ParameterError(
                f"`silos` {number}: the notes already come from {len(sites)} sites: "
                "leave it out, or give only one folder"
            )
        return None
    (site,) = sites
    by = "document"
    unit_name = "notes"
    if site.patients or site.labels is not None:
        by = "patient"
        unit_name = "patients"
    # Each silo needs a unit in each part that the site has.
    max_silos = min((units for units in site.units.values() if units), default=0)
    if max_silos < _MIN_SILOS:
        raise DataError(
            f"{site.root}: a part of the notes has fewer than two {unit_name}, too few "
            "to simulate several sites: give more notes, or a folder for each site"
        )
    if number > max_silos or number == 1 or number < 0:
        raise ParameterError(
            f"`silos` {number}: expected 2 to {max_silos}, because the smallest part "
            f"has {max_silos} {unit_name}"
        )
    return Silos(number or min(max_silos, _MAX_SILOS), by)


# ---- remarks -------------------------------------------------------------------------


def _list_remarks(
    facts: Facts, sites: Sequence[SiteFacts], types: Mapping[str, Counter[str]]
) -> Iterator[str]:
    """Yield remarks about the notes for the user."""
    other_sites = [site.name for site in facts.sites if site not in sites]
    if other_sites:
        missing = _MISSING[sites[0].holds]
        yield (
            f"{_join_names(other_sites)}: no {missing}, so this job leaves it out; run "
            "`fednotes init` on these notes alone for a job of their own"
        )
    if len(sites) == 2:
        yield (
            f"two sites: between real sites, a secure sum needs {_SUM_SITES}, so each "
            "of two sites can compute what the other one sent"
        )
    if len(sites) > 1 and any(types.values()):
        shared_types = set.intersection(*(set(counts) for counts in types.values()))
        if not shared_types:
            yield (
                "no entity type is annotated at all sites; if each site needs only its "
                'own types, method "personal" trains a model for each'
            )
    yield from _list_rare_types(types)
    yield from _list_unused_columns(sites)
    for site in sites:
        yield from _list_site_remarks(site, types[site.name])


def _list_rare_types(types: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Yield one remark on the types of which sites have few mentions.

    Args:
        types: Number of mentions by entity type, for each site.
    """
    clauses = []
    for name, counts in types.items():
        rare_types = sorted(
            label for label, number in counts.items() if number < FEW_MENTIONS
        )
        if rare_types:
            clauses.append(f"{name} of {_join_names(rare_types)}")
    if clauses:
        yield (
            f"fewer than {FEW_MENTIONS} mentions, too few for a model to learn a type: "
            f"{_join_clauses(clauses)}"
        )


def _list_unused_columns(sites: Sequence[SiteFacts]) -> Iterator[str]:
    """Yield one remark on the columns of tables of notes that nothing reads."""
    names_of_sites: dict[tuple[str, ...], list[str]] = {}
    for site in sites:
        if site.unused_columns:
            names_of_sites.setdefault(site.unused_columns, []).append(site.name)
    clauses = [
        f"{_join_names(columns)} ({list_names(names, limit=3)})"
        for columns, names in names_of_sites.items()
    ]
    if not clauses:
        return
    advice = ""
    if any(site.unused_columns and not site.patients for site in sites):
        advice = (
            "; if one of them identifies the patient, name it `patient`, so that a "
            "patient's notes stay together"
        )
    yield f"columns that are not used: {_join_clauses(clauses)}{advice}"


def _join_clauses(clauses: Sequence[str]) -> str:
    """Return the first clauses on sites, and the number of the others."""
    shown = "; ".join(clauses[:_MAX_CLAUSES])
    unshown = len(clauses) - _MAX_CLAUSES
    return f"{shown}; and {unshown} more" if unshown > 0 else shown


def _list_site_remarks(site: SiteFacts, types: Counter[str]) -> Iterator[str]:
    """Yield remarks about the notes of one site for the user."""
    if types and _has_few_notes(site):
        yield (
            f"{site.name}: {format_count(site.notes, 'note')} cannot show which types "
            "the site annotates, so the types that it lacks do not decide the method"
        )
    if site.are_sentences:
        yield (
            f"{site.name}: the files do not say where documents begin, so each "
            "sentence counts as a note"
        )
    if site.overlapping:
        yield (
            f"{site.name}: {site.overlapping:,} of {site.mentions:,} mentions lie "
            "within or across another one; the job keeps the outermost"
        )
    if site.discontinuous:
        yield (
            f"{site.name}: {site.discontinuous:,} mentions have several pieces; the "
            "job takes each as one stretch"
        )
    if site.split_by:
        yield (
            f"{site.name}: too few notes to split, so sentences of one note are in "
            "several parts and scores are too high"
        )
    if site.left_out:
        counts = ", ".join(f"{n:,} {kind}" for kind, n in site.left_out.items())
        yield f"{site.name}: left out because it cannot be used: {counts}"


def _join_names(labels: Sequence[str]) -> str:
    """Return names from files as one line of text, without control characters."""
    return list_names([clean_to_one_line(label, NAME) for label in labels], limit=5)
