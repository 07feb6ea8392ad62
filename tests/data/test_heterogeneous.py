"""Tag sets drawn at random: what always holds, and how often each outcome comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError
from fednotes.data.tags import TagSets, appendix_d, disjoint

Exact = dict[TagSets, Fraction]
NAMES = tuple("GECAFBDHJI")  # in no alphabetic order: the order given is the order kept


def misfit(draw: Callable[[int], TagSets], exact: Exact, draws: int) -> float:
    """How far the draws of seeds 0, 1, … are from the exact probabilities.

    Pearson's statistic, standardised by Wilson and Hilferty (1931): near a standard normal.
    """
    counts = Counter(draw(seed) for seed in range(draws))
    assert set(counts) <= set(exact)
    expected = {outcome: float(p) * draws for outcome, p in exact.items()}
    assert min(expected.values()) > 5
    statistic = sum((counts[o] - e) ** 2 / e for o, e in expected.items())
    freedom = len(exact) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def in_order(types: str, sets: list[set[str]]) -> TagSets:
    return tuple(tuple(t for t in types if t in own) for own in sets)


def deals(types: str, sizes: tuple[int, ...]) -> Iterator[TagSets]:
    """Every way to cut an order of the types into sets of these sizes; repeats are wanted."""
    for order in permutations(types):
        rest = list(order)
        yield in_order(types, [{rest.pop() for _ in range(size)} for size in sizes])


def exact_disjoint(types: str, all_sizes: list[tuple[int, ...]]) -> Exact:
    found = Counter(deal for sizes in all_sizes for deal in deals(types, sizes))
    return {deal: Fraction(n, found.total()) for deal, n in found.items()}


def exact_appendix_d(types: str, sites: int) -> Exact:
    """Every path through Appendix D's text with its probability, as a tree."""
    own = list(permutations(types, sites))
    paths = {(u, in_order(types, [{t} for t in u])): Fraction(1, len(own)) for u in own}
    for label in types:
        grown: dict[tuple[tuple[str, ...], TagSets], Fraction] = {}
        for (unique, sets), p in paths.items():
            options = [(sets, Fraction(1))]
            if label not in unique:
                options = []
                for n in (1, 2):
                    places = list(combinations(range(sites), n))
                    for place in places:
                        more = [{*s, label} if i in place else set(s) for i, s in enumerate(sets)]
                        options.append((in_order(types, more), Fraction(1, 2 * len(places))))
            for after, q in options:
                grown[unique, after] = grown.get((unique, after), Fraction(0)) + p * q
        paths = grown
    outcomes: Exact = {}
    for (_, sets), p in paths.items():
        outcomes[sets] = outcomes.get(sets, Fraction(0)) + p
    assert sum(outcomes.values()) == 1
    return outcomes


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10), st.integers(1, 6), st.integers(0, 3), st.integers(-5, 2**40))
def test_disjoint_sets_have_no_type_in_common(
    number: int, sites: int, per_site: int, seed: int
) -> None:
    types = NAMES[:number]
    if number < sites or sites * per_site > number:
        with pytest.raises(ConfigError, match=f"{sites} sites"):
            disjoint(types, sites, per_site, seed)
        return
    sets = disjoint(types, sites, per_site, seed)
    named = [t for own in sets for t in own]
    assert len(sets) == sites
    assert len(named) == len(set(named)) == (sites * per_site or number)
    sizes = {len(own) for own in sets}
    assert sizes == {per_site} if per_site else max(sizes) - min(sizes) <= 1
    assert all(list(own) == [t for t in types if t in own] for own in sets)
    assert sets == disjoint(types, sites, per_site, seed)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 10), st.integers(2, 6), st.integers(-5, 2**40))
def test_appendix_d_gives_each_site_a_type_of_its_own(number: int, sites: int, seed: int) -> None:
    types = NAMES[:number]
    if number < sites:
        with pytest.raises(ConfigError, match="cannot each annotate a type of its own"):
            appendix_d(types, sites, seed)
        return
    sets = appendix_d(types, sites, seed)
    times = Counter(t for own in sets for t in own)
    assert set(times) == set(types)
    assert set(times.values()) <= {1, 2}
    assert all(any(times[t] == 1 for t in own) for own in sets)
    assert all(list(own) == [t for t in types if t in own] for own in sets)
    assert sets == appendix_d(types, sites, seed)


def test_ten_types_over_six_sites() -> None:
    assert sorted(len(own) for own in disjoint(NAMES, 6, 0, 3)) == [1, 1, 2, 2, 2, 2]
    assert len({disjoint(NAMES, 6, 0, seed) for seed in range(5)}) == 5


def test_disjoint_sets_come_equally_often() -> None:
    """Against the enumeration of every order of the types."""
    assert misfit(lambda s: disjoint("abcd", 2, 1, s), exact_disjoint("abcd", [(1, 1)]), 3000) < 3
    both = exact_disjoint("abc", [(2, 1), (1, 2)])
    assert len(both) == 6
    assert misfit(lambda s: disjoint("abc", 2, 0, s), both, 3000) < 3


@pytest.mark.parametrize(("types", "sites"), [("abc", 2), ("abcd", 3), ("ab", 2)])
def test_appendix_d_comes_as_often_as_its_text_says(types: str, sites: int) -> None:
    """Against the enumeration of every path through the paper's text, in fractions."""
    exact = exact_appendix_d(types, sites)
    assert misfit(lambda seed: appendix_d(types, sites, seed), exact, 4000) < 3


def test_a_coin_that_is_not_fair_would_be_seen() -> None:
    """The measure that the tests above rely on: outcomes of another design are told apart."""
    exact = exact_appendix_d("abc", 2)
    one_place = [deal for deal in exact if sum(map(len, deal)) == 3]
    assert misfit(lambda seed: one_place[seed % len(one_place)], exact, 4000) > 10


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: disjoint("abc", 2, 2), "need 4 types, there are 3: lower per_site"),
        (lambda: disjoint("abc", 4), r"4 sites cannot .* there are 3 types \(a, b, c\)"),
        (lambda: disjoint("abc", 2, -1), "lower per_site"),
        (lambda: disjoint("aba", 2), "a type is named twice"),
        (lambda: disjoint("abc", 0), "one site or more"),
        (lambda: appendix_d("", 2), r"0 types \(none\)"),
        (lambda: appendix_d("abc", 1), "2 sites or more"),
    ],
)
def test_what_cannot_be_dealt_is_refused(draw: Callable[[], TagSets], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw()
