"""Find names of entity types at different sites that seem to mean the same.

Names that differ only in case, punctuation or plural are mapped. If one name has all
the words of another ("Disease_disorder" and "Disease"), a person has to decide.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
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
    spellings = list(_map_spellings(types))
    mapped = {(each.site, each.old) for each in spellings}
    return (*spellings, *_map_broader(types, mapped))


def _map_spellings(types: Mapping[str, Mapping[str, int]]) -> Iterator[LabelMap]:
    """Yield proposals for names that differ only in spelling."""
    groups: defaultdict[str, list[_Name]] = defaultdict(list)
    for site, counts in types.items():
        for label, mentions in counts.items():
            groups["".join(_words(label))].append(_Name(site, label, mentions))
    for key, names in groups.items():
        labels = {name.label for name in names}
        if not key or len(labels) < 2:
            continue
        common_label = _most_common(names)
        sites = Counter(name.site for name in names)
        for name in names:
            if name.label == common_label:
                continue
            is_only_one = sites[name.site] == 1
            reason = (
                f"differs from {common_label!r} in case, punctuation or plural only"
            )
            if not is_only_one:
                reason += ", but this site has several of these names"
            yield LabelMap(
                name.site, name.label, common_label, reason, is_active=is_only_one
            )


def _most_common(names: list[_Name]) -> str:
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


def _map_broader(
    types: Mapping[str, Mapping[str, int]], mapped: set[tuple[str, str]]
) -> Iterator[LabelMap]:
    """Yield proposals for names that begin or end with all words of another name.

    Args:
        types: As in `find_label_maps`.
        mapped: The site and name of earlier proposals.
    """
    for site, counts in types.items():
        labels_elsewhere: Counter[str] = Counter()
        for other_site, other_counts in types.items():
            if other_site != site:
                labels_elsewhere.update(other_counts)
        keys_here = {"".join(_words(label)) for label in counts}
        for label in counts:
            if (site, label) in mapped or label in labels_elsewhere:
                continue
            broader = [
                candidate
                for candidate in labels_elsewhere
                if _is_part(_words(candidate), _words(label))
                and "".join(_words(candidate)) not in keys_here
            ]
            if broader:
                most_used = max(
                    broader, key=lambda name: (labels_elsewhere[name], name)
                )
                reason = (
                    f"has all words of {most_used!r} and may be narrower, so decide "
                    "yourself"
                )
                yield LabelMap(site, label, most_used, reason, is_active=False)


def _is_part(few: tuple[str, ...], many: tuple[str, ...]) -> bool:
    """Return whether a name begins or ends with all words of a shorter one."""
    number = len(few)
    return 0 < number < len(many) and few in (many[:number], many[-number:])


def _words(label: str) -> tuple[str, ...]:
    """Return the words of a name in the singular, without case and punctuation."""
    words = re.split(r"[\W_]+", _HUMP.sub(" ", label).casefold())
    return tuple(_singular(word) for word in words if word)


def _singular(word: str) -> str:
    if len(word) < _MIN_PLURAL or not word.endswith("s"):
        return word
    if word.endswith(_SINGULAR_ENDS):
        return word
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1]
