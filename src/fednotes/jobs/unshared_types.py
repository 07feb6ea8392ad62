"""Entity types that some sites lack, which decide what the pooled model is.

If all sites have the same types, one model is trained on all notes. Otherwise each site
has an output layer of its own on top of layers that all notes train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from fednotes.core.cleaning import NAME, one_line
from fednotes.core.wording import list_names

# Types that some sites lack are rare if at most this fraction of all mentions has them,
# because sites lack rare types by chance.
_RARE = 0.05
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


def are_rare(labels: Collection[str], types: Mapping[str, Mapping[str, int]]) -> bool:
    """Return whether only few mentions of all sites have one of these types.

    Args:
        labels: The types.
        types: Number of mentions by type, for each site.
    """
    total: Counter[str] = Counter()
    for counts in types.values():
        total.update(counts)
    return sum(total[label] for label in labels) <= _RARE * total.total()


def describe_pooled(unshared: Sequence[str]) -> str:
    """Return what the pooled model is if sites lack some types.

    Args:
        unshared: The types that at least one site lacks.
    """
    names = list_names([one_line(label, NAME) for label in unshared], _MAX_NAMES)
    lack = f"some sites lack {names}" if unshared else "the sites' tag sets differ"
    return (
        f"{lack}, so pooled is one trunk with an output layer for each site, which is "
        "not an upper bound"
    )
