"""Entity types that some sites lack, which decide what the pooled model is.

If all sites have the same types, one model is trained on all notes. Otherwise each site
has an output layer of its own on top of layers that all notes train.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fednotes.core.cleaning import NAME, clean_to_one_line
from fednotes.core.wording import list_names

# If a site is expected to have fewer mentions of a type than this, it may have none by
# chance. The expected number is computed only if the other sites have at least this
# many mentions; with fewer, it would be too uncertain.
MIN_EXPECTED = 5
FEW_MENTIONS = 10  # with fewer mentions, a model hardly learns a type
_MAX_NAMES = 5


def find_unshared_types(types: Sequence[Collection[str]]) -> list[str]:
    """Return the types that at least one site lacks, sorted.

    Args:
        types: The types of each site.
    """
    all_labels = {label for labels in types for label in labels}
    return sorted(
        label for label in all_labels if any(label not in labels for labels in types)
    )


def find_common_types(mention_counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the types of which every site has enough mentions to train, sorted.

    With these types alone, the pooled model is one model of all notes.

    Args:
        mention_counts: Number of mentions by type, for each site.
    """
    labels = set.intersection(*(set(counts) for counts in mention_counts.values()))
    return sorted(
        label
        for label in labels
        if all(counts[label] >= FEW_MENTIONS for counts in mention_counts.values())
    )


def are_missing_by_chance(
    labels: Collection[str],
    mention_counts: Mapping[str, Mapping[str, int]],
    note_counts: Mapping[str, int],
) -> bool:
    """Return whether each site may lack these types by chance.

    Args:
        labels: The types.
        mention_counts: Number of mentions by type, for each site.
        note_counts: Number of notes, for each site.
    """
    return not any(
        is_unannotated(label, site, mention_counts, note_counts)
        for site in mention_counts
        for label in labels
    )


def is_unannotated(
    label: str,
    site: str,
    mention_counts: Mapping[str, Mapping[str, int]],
    note_counts: Mapping[str, int],
) -> bool:
    """Return whether a site seems not to annotate a type that other sites annotate.

    This is the case if the site has no mention of the type, but would be expected to
    have at least `MIN_EXPECTED` at the other sites' rate per note. If the other sites
    have fewer than `MIN_EXPECTED` mentions in all, their rate is too uncertain, and the
    result is False.

    Args:
        label: The type.
        site: The site.
        mention_counts: Number of mentions by type, for each site.
        note_counts: Number of notes, for each site.
    """
    if label in mention_counts[site]:
        return False
    others = [other for other in mention_counts if other != site]
    mentions_elsewhere = sum(mention_counts[other].get(label, 0) for other in others)
    if mentions_elsewhere < MIN_EXPECTED:
        return False

    notes_elsewhere = sum(note_counts[other] for other in others)
    expected_mentions = note_counts[site] * mentions_elsewhere / notes_elsewhere
    return expected_mentions >= MIN_EXPECTED


def describe_pooled(unshared: Sequence[str]) -> str:
    """Return what the pooled model is if sites lack some types.

    Args:
        unshared: The types that at least one site lacks.
    """
    names = list_names(
        [clean_to_one_line(label, NAME) for label in unshared], _MAX_NAMES
    )
    lack = f"some sites lack {names}" if unshared else "the sites' tag sets differ"
    return (
        f"{lack}, so the pooled model has an output layer for each site, and all notes "
        "train the layers below; a federated model may score higher than such a model"
    )
