"""Notes → silos, as in Liu and Miller 2020, section 3.2: by patient, or by note.

A silo stands for a hospital: a patient's notes are in one of them only. Deals depend on the
seed and on which patients there are, not on the order of the notes.

Which entity types each site annotates: random tag sets over a complete one.

    disjoint      every type at one site at most (Wang et al. 2023, section 5.2)
    appendix_d    a type of its own for each site, the others at one or two (Appendix D)

Both are functions of their seed. A site's types come in the order of the complete tag set;
documents are restricted to them by `data/tags.py::relabel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import rng_of
from fednotes.data.notes import Note

Key = tuple[str, ...]


def patient_of(note: Note) -> Key:
    """Whose note it is. A note without a patient counts as a patient of its own."""
    if note.patient is not None:
        return ("patient", note.patient)
    return ("note", note.source, note.id)


def assign(keys: Iterable[Key], silos: int, seed: int = 0) -> dict[Key, int]:
    """A silo (from 0) for each key; silos' numbers of keys differ by one at most.

    For a file too large to hold: one pass over the notes for the keys, a second one that sends
    each note to its silo. Raises ConfigError for fewer than one silo, DataError for fewer keys
    than silos.
    """
    if silos < 1:
        raise ConfigError(f"the number of silos must be at least 1, not {silos}")
    distinct = sorted(set(keys))
    if len(distinct) < silos:
        raise DataError(
            f"{len(distinct)} patients or notes cannot fill {silos} silos: "
            f"ask for {len(distinct) or 'fewer'} at most, or give more notes"
        )
    order = rng_of(seed, "silos").permutation(len(distinct))
    return {distinct[at]: position % silos for position, at in enumerate(order.tolist())}


TagSets = tuple[tuple[str, ...], ...]


def disjoint(types: Sequence[str], sites: int, per_site: int = 0, seed: int = 0) -> TagSets:
    """Types drawn for each site without replacement, uniformly; no type at two sites.

    per_site: types of each site; types beyond sites · per_site are annotated nowhere. 0 deals
        all of them out as evenly as can be, the spare ones to random sites.

    Raises ConfigError where there are too few types, or a type is named twice.
    """
    _check(types, sites)
    if per_site < 0 or sites * per_site > len(types):
        raise ConfigError(
            f"{sites} sites with {per_site} types each and none in common need "
            f"{sites * max(per_site, 1)} types, there are {len(types)}: lower per_site"
        )
    rng = rng_of(seed, "tags", "disjoint")
    drawn = rng.permutation(len(types)).tolist()
    spare = set(rng.permutation(sites)[: len(types) % sites].tolist())
    sets: list[set[str]] = []
    for site in range(sites):
        size = per_site or len(types) // sites + (site in spare)
        sets.append({types[drawn.pop()] for _ in range(size)})
    return _ordered(types, sets)


def appendix_d(types: Sequence[str], sites: int, seed: int = 0) -> TagSets:
    """Appendix D: one type for each site that no other site annotates, drawn uniformly without
    replacement; each remaining type at n ∈ {1, 2} sites by a fair coin, n sites drawn uniformly.

    Raises ConfigError for fewer than two sites, fewer types than sites, or a type named twice.
    """
    _check(types, sites)
    if sites < 2:
        raise ConfigError("a type may be annotated at two sites: 2 sites or more are needed")
    rng = rng_of(seed, "tags", "appendix-d")
    drawn = rng.permutation(len(types)).tolist()
    sets = [{types[own]} for own in drawn[:sites]]  # [tagsets appendix d]
    for index in sorted(drawn[sites:]):
        number = 1 + int(rng.integers(2))  # [tagsets appendix d]
        # [tagsets appendix d]
        for site in rng.choice(sites, size=number, replace=False).tolist():
            sets[site].add(types[index])
    return _ordered(types, sets)


def _check(types: Sequence[str], sites: int) -> None:
    if len(set(types)) < len(types):
        raise ConfigError(f"types = {list(types)}: a type is named twice")
    if sites < 1:
        raise ConfigError(f"{sites} sites: tag sets are drawn for one site or more")
    if len(types) < sites:
        raise ConfigError(
            f"{sites} sites cannot each annotate a type of its own: there are "
            f"{len(types)} types ({', '.join(types) or 'none'})"
        )


def _ordered(types: Sequence[str], sets: Sequence[set[str]]) -> TagSets:
    return tuple(tuple(t for t in types if t in chosen) for chosen in sets)
