"""Find names of entity types at different sites that seem to mean the same.

Names that differ only in case, punctuation or plural are mapped. If one name has all
the words of another ("Disease_disorder" and "Disease"), a person has to decide.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_MIN_PLURAL = 4  # minimum length of a word that may be a plural
_SINGULAR_ENDS = ("ss", "is", "us")


@dataclass(frozen=True)
class LabelMap:
    """A proposal to rename an entity type of a site.

    Attributes:
        site: The site.
        old: The name in its files.
        new: The name at other sites.
        reason: Why the two may be the same.
        is_active: Whether the job renames it. Otherwise the line is a comment in the
            job, and a person decides.
    """

    site: str
    old: str
    new: str
    reason: str
    is_active: bool


class _Name(NamedTuple):
    """How often a site uses a name."""

    site: str
    label: str
    mentions: int


def find_label_maps(
    types: Mapping[str, Mapping[str, int]],
) -> tuple[LabelMap, ...]:
    """Return proposals to rename entity types, so that sites agree.

    Args:
        types: Number of mentions by entity type, for each site.
    """
    spelling_maps = list(_map_spellings(types))
    mapped_names = {(proposal.site, proposal.old) for proposal in spelling_maps}
    return (*spelling_maps, *_map_to_broader_names(types, mapped_names))


def _map_spellings(types: Mapping[str, Mapping[str, int]]) -> Iterator[LabelMap]:
    """Yield proposals for names that differ only in spelling."""
    names_by_spelling: defaultdict[str, list[_Name]] = defaultdict(list)
    for site, counts in types.items():
        for label, mentions in counts.items():
            spelling = "".join(_split_into_words(label))
            names_by_spelling[spelling].append(_Name(site, label, mentions))
    for spelling, names in names_by_spelling.items():
        has_variants = len({name.label for name in names}) > 1
        if spelling and has_variants:
            yield from _map_to_most_common(names)


def _map_to_most_common(names: list[_Name]) -> Iterator[LabelMap]:
    """Yield proposals to rename variants of a name to the most common one."""
    common_label = _find_most_common_label(names)
    names_per_site = Counter(name.site for name in names)
    for name in names:
        if name.label == common_label:
            continue
        is_only_one = names_per_site[name.site] == 1
        reason = f"differs from {common_label!r} in case, punctuation or plural only"
        if not is_only_one:
            reason += ", but this site has several of these names"
        yield LabelMap(
            name.site, name.label, common_label, reason, is_active=is_only_one
        )


def _find_most_common_label(names: list[_Name]) -> str:
    """Return the name that most sites use; ties go to the name with most mentions.

    If names are still tied, one that is not in capitals is preferred.
    """
    sites = Counter(name.label for name in names)
    mentions: Counter[str] = Counter()
    for name in names:
        mentions[name.label] += name.mentions
    return min(
        sites,
        key=lambda label: (
            -sites[label],
            -mentions[label],
            label.isupper(),
            label,
        ),
    )


def _map_to_broader_names(
    types: Mapping[str, Mapping[str, int]], mapped_names: set[tuple[str, str]]
) -> Iterator[LabelMap]:
    """Yield proposals for names that begin or end with all words of a broader name.

    The broader name is one of another site. A site that has both names distinguishes
    the two, so nothing is proposed; nor is anything for a name that other sites have
    too. Of several broader names, the one with the most mentions is proposed.

    Args:
        types: As in `find_label_maps`.
        mapped_names: The site and name of earlier proposals.
    """
    for site, counts in types.items():
        labels_elsewhere: Counter[str] = Counter()
        for other_site, other_counts in types.items():
            if other_site != site:
                labels_elsewhere.update(other_counts)
        spellings_here = {"".join(_split_into_words(label)) for label in counts}
        broader_labels = _BroaderLabels(
            label
            for label in sorted(
                labels_elsewhere, key=lambda name: (labels_elsewhere[name], name)
            )
            if "".join(_split_into_words(label)) not in spellings_here
        )
        for label in counts:
            if (site, label) in mapped_names or label in labels_elsewhere:
                continue
            most_used = broader_labels.find(label)
            if most_used is None:
                continue
            reason = (
                f"contains all words of {most_used!r} and may be narrower: decide "
                "whether they are the same"
            )
            yield LabelMap(site, label, most_used, reason, is_active=False)


class _BroaderLabels:
    """Finds the last of some names with whose words a longer name begins or ends.

    Names are looked up by their words, so that the time grows with their number and not
    with its square.

    Args:
        labels: The names, in ascending order of preference.
    """

    def __init__(self, labels: Iterable[str]) -> None:
        self._rank_of_words: dict[tuple[str, ...], int] = {}
        self._labels = list(labels)
        for rank, label in enumerate(self._labels):
            self._rank_of_words[_split_into_words(label)] = rank
        self._lengths = sorted({len(words) for words in self._rank_of_words} - {0})

    def find(self, label: str) -> str | None:
        """Return the last name whose words begin or end a longer name, or None."""
        words = _split_into_words(label)
        best_rank = -1
        for length in self._lengths:
            if length >= len(words):
                break
            for part in (words[:length], words[-length:]):
                best_rank = max(best_rank, self._rank_of_words.get(part, -1))
        return None if best_rank < 0 else self._labels[best_rank]


def _split_into_words(label: str) -> tuple[str, ...]:
    """Return the words of a name in the singular, without case and punctuation."""
    words = re.split(r"[\W_]+", _HUMP.sub(" ", label).casefold())
    return tuple(_make_singular(word) for word in words if word)


def _make_singular(word: str) -> str:
    """Return an English word in the singular, as far as its ending shows."""
    if len(word) < _MIN_PLURAL or not word.endswith("s"):
        return word
    if word.endswith(_SINGULAR_ENDS):
        return word
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1]
