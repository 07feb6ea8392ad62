"""Find names of entity types at different sites that seem to mean the same.

Names that differ only in case, punctuation or plural are mapped. If one name has all
the words of another ("Disease_disorder" and "Disease"), a person has to decide.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_MIN_PLURAL = 4  # minimum length of a word that may be a plural
_MAX_WORDS = 20  # of a broader name; each number of words costs time
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


class _Rank(NamedTuple):
    """The sort key of a name among those of its spelling.

    The smallest rank is that of the name that most sites use. Ties go to the name with
    most mentions, and then to one that is not in capitals.
    """

    negative_sites: int
    negative_mentions: int
    is_upper: bool
    label: str


class _Spelling:
    """The names of sites that have one spelling.

    Args:
        names: The names of each site.

    Attributes:
        names: The same.
        first_rank: The rank of the name that most sites use.
        names_per_site: The number of names of each site.
    """

    def __init__(self, names: Sequence[_Name]) -> None:
        self.names = names
        self.first_rank = _find_first_rank(names)
        self.names_per_site = Counter(name.site for name in names)


def find_label_maps(
    types: Mapping[str, Mapping[str, int]],
) -> tuple[LabelMap, ...]:
    """Return proposals to rename entity types, so that sites agree.

    Args:
        types: Number of mentions by entity type, for each site.
    """
    names = KnownNames(types)
    spelling_maps = list(names.map_spellings())
    mapped_names = {(proposal.site, proposal.old) for proposal in spelling_maps}
    broader_maps = names.map_to_broader_names(mapped_names)
    return (*spelling_maps, *broader_maps)


class KnownNames:
    """The names that sites give to entity types.

    Names are looked up by their words, so that the time grows with their number and not
    with that of pairs of sites or of names.

    Args:
        types: Number of mentions by entity type, for each site.
    """

    def __init__(self, types: Mapping[str, Mapping[str, int]]) -> None:
        self._types = types
        self._mentions: Counter[str] = Counter()  # at all sites
        self._sites: Counter[str] = Counter()  # number of sites that use a name
        names = []
        for site, counts in types.items():
            self._mentions.update(counts)
            self._sites.update(counts.keys())
            names += _list_names(site, counts)
        self._spellings = {
            spelling: _Spelling(names_of_spelling)
            for spelling, names_of_spelling in _group_by_spelling(names).items()
        }
        # For each sequence of words, the name with the most mentions.
        self._best_of_words: dict[tuple[str, ...], str] = {}
        for label in sorted(self._mentions, key=self._rank):
            self._best_of_words[_split_into_words(label)] = label
        lengths = {len(words) for words in self._best_of_words}
        self._lengths = sorted(n for n in lengths if 1 <= n <= _MAX_WORDS)

    def _rank(self, label: str) -> tuple[int, str]:
        """Return a sort key; the name with the largest key is proposed."""
        return self._mentions[label], label

    def map_spellings(self) -> Iterator[LabelMap]:
        """Yield proposals for names that differ only in spelling."""
        for spelling in self._spellings.values():
            common_label = spelling.first_rank.label
            yield from _map_to(common_label, spelling.names, spelling.names_per_site)

    def map_to_broader_names(
        self, mapped_names: set[tuple[str, str]]
    ) -> Iterator[LabelMap]:
        """Yield proposals for names with all words of a broader name at one end.

        The broader name is one of another site, and has at most `_MAX_WORDS` words. A
        site that has both names distinguishes the two, so nothing is proposed; nor is
        anything for a name that other sites have too. Of several broader names, the one
        with the most mentions is proposed.

        Args:
            mapped_names: The site and name of earlier proposals.
        """
        for site, counts in self._types.items():
            lone = [
                label
                for label in counts
                if self._sites[label] == 1 and (site, label) not in mapped_names
            ]
            yield from self._map_lone_names(site, lone, counts)

    def map_new_names(self, site: str, new: Mapping[str, int]) -> Iterator[LabelMap]:
        """Yield proposals for new names of a site, which no site has used so far.

        Args:
            site: The site.
            new: Number of mentions by new name.
        """
        mapped_names = set()
        for spelling, names in _group_by_spelling(_list_names(site, new)).items():
            first_rank = _find_first_rank(names)
            num_names = len(names)
            known_spelling = self._spellings.get(spelling)
            if known_spelling is not None:
                first_rank = min(first_rank, known_spelling.first_rank)
                num_names += known_spelling.names_per_site[site]
            for proposal in _map_to(first_rank.label, names, {site: num_names}):
                mapped_names.add(proposal.old)
                yield proposal
        lone = [label for label in new if label not in mapped_names]
        labels_of_site = [*self._types.get(site, {}), *new]
        yield from self._map_lone_names(site, lone, labels_of_site)

    def _map_lone_names(
        self, site: str, lone: Iterable[str], labels_here: Iterable[str]
    ) -> Iterator[LabelMap]:
        """Yield proposals for names that only one site has (`map_to_broader_names`).

        Args:
            site: The site.
            lone: The names.
            labels_here: All names of the site.
        """
        spellings_here = set(map(_join_words, labels_here))
        for label in lone:
            broader = self._list_broader_names(label, spellings_here)
            if broader:
                most_used = max(broader, key=self._rank)
                reason = (
                    f"contains all words of {most_used!r} and may be narrower: decide "
                    "whether they are the same"
                )
                yield LabelMap(site, label, most_used, reason, is_active=False)

    def _list_broader_names(self, label: str, spellings_here: set[str]) -> list[str]:
        """Return the names whose words are the first or the last words of a name.

        Args:
            label: The name.
            spellings_here: The spellings of all names of its site. A broader name with
                one of these spellings is left out, because the site has it, too.
        """
        words = _split_into_words(label)
        return [
            self._best_of_words[part]
            for length in self._lengths
            if length < len(words)
            for part in (words[:length], words[-length:])
            if part in self._best_of_words and "".join(part) not in spellings_here
        ]


def _list_names(site: str, counts: Mapping[str, int]) -> list[_Name]:
    """Return the names of a site."""
    return [_Name(site, label, mentions) for label, mentions in counts.items()]


def _group_by_spelling(names: Iterable[_Name]) -> dict[str, list[_Name]]:
    """Return names by their spelling, without those that have no letter or digit."""
    groups: defaultdict[str, list[_Name]] = defaultdict(list)
    for name in names:
        spelling = _join_words(name.label)
        if spelling:
            groups[spelling].append(name)
    return groups


def _map_to(
    common_label: str, names: Iterable[_Name], names_per_site: Mapping[str, int]
) -> Iterator[LabelMap]:
    """Yield proposals to rename variants of a name to the most common one.

    Args:
        common_label: The most common one.
        names: The variants; the most common one may be among them.
        names_per_site: The number of variants of each site.
    """
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


def _find_first_rank(names: Iterable[_Name]) -> _Rank:
    """Return the rank of the name that most sites use; see `_Rank`."""
    sites: Counter[str] = Counter()
    mentions: Counter[str] = Counter()
    for name in names:
        sites[name.label] += 1
        mentions[name.label] += name.mentions
    return min(
        _Rank(-number, -mentions[label], label.isupper(), label)
        for label, number in sites.items()
    )


def _join_words(label: str) -> str:
    """Return the words of a name without the spaces between them."""
    return "".join(_split_into_words(label))


@lru_cache(maxsize=2**14)  # a name occurs at many sites
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
