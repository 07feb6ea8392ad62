"""Speed and memory of dictionary matching with 1 million terms; a plain loop's speed.

    python benchmarks/concepts.py [--terms 1000000] [--characters 4000000]

Terms of one to six words, and texts, are drawn from the same invented vocabulary (by
Zipf's law), so that about one word in five is part of a mention. The plain program keeps
a dict of n-grams and tries the longest n-gram first at each word. Both must return the
same bags. Memory is the process's peak after the matcher was built. "with context" drops
negated, family and hypothetical mentions.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from fednotes.apps.phenotyping.concepts import Matcher
from fednotes.apps.phenotyping.dictionary import Dictionary, build_dictionary
from fednotes.apps.phenotyping.words import (
    explain_no_match,
    make_singular,
    split_into_words,
)

LONGEST = 6


def vocabulary(size: int, rng: np.random.Generator) -> list[str]:
    """Return invented words, frequent ones first."""
    parts = [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < size:
        words[
            "".join(parts[i] for i in rng.integers(0, len(parts), rng.integers(2, 6)))
        ] = None
    return list(words)


def draw_words(words: list[str], count: int, rng: np.random.Generator) -> list[str]:
    """Draw words approximately by Zipf's law."""
    at = (len(words) ** rng.random(count) - 1).astype(np.int64)
    return [words[i] for i in at.tolist()]


def dictionary(terms: int, words: list[str], rng: np.random.Generator) -> Dictionary:
    """Return a dictionary of different terms, with four terms for each concept."""
    phrases: dict[str, None] = {}
    while len(phrases) < terms:
        pool = draw_words(words, 400_000, rng)
        sizes = rng.integers(1, LONGEST + 1, len(pool) // LONGEST).tolist()
        for row, size in enumerate(sizes):
            phrases[" ".join(pool[row * LONGEST : row * LONGEST + size])] = None
    chosen = list(phrases)[:terms]
    return build_dictionary((f"C{at // 4:07}", term) for at, term in enumerate(chosen))


def texts(characters: int, words: list[str], rng: np.random.Generator) -> list[str]:
    """Return notes of about 2,000 characters; four of five words occur in no term."""
    unknown_words = [f"{word}x" for word in words]
    notes, total = [], 0
    while total < characters:
        known, unknown = (
            draw_words(words, 300, rng),
            draw_words(unknown_words, 300, rng),
        )
        mixed = [known[i] if rng.random() < 0.2 else unknown[i] for i in range(300)]
        for at in range(9, 300, 12):
            mixed[at] += "."
        for at in range(4, 300, 40):
            mixed[at] = "no"
        notes.append(" ".join(mixed))
        total += len(notes[-1])
    return notes


class Plain:
    """A plain matcher, which takes the longest match from a dict of n-grams."""

    def __init__(self, terms_given: Dictionary) -> None:
        self.terms: dict[str, set[int]] = {}
        for at, term in enumerate(terms_given.terms):
            key = " ".join(map(make_singular, split_into_words(term)))
            if explain_no_match(split_into_words(term)):
                continue
            self.terms.setdefault(key, set()).update(terms_given.get_concepts(at))

    def make_bag(self, notes: list[str]) -> list[int]:
        """Return the concepts in notes."""
        bag: list[int] = []
        for text in notes:
            words, at = list(map(make_singular, split_into_words(text))), 0
            while at < len(words):
                for size in range(min(LONGEST, len(words) - at), 0, -1):
                    concepts = self.terms.get(" ".join(words[at : at + size]))
                    if concepts is not None:
                        bag.extend(sorted(concepts))
                        at += size
                        break
                else:
                    at += 1
        return bag


def peak() -> float:
    """Return the process's peak memory so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--terms", type=int, default=1_000_000)
    parser.add_argument("--characters", type=int, default=4_000_000)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    words = vocabulary(200_000, rng)
    known_terms = dictionary(arguments.terms, words, rng)
    notes = texts(arguments.characters, words, rng)
    characters = sum(map(len, notes))
    begin = time.perf_counter()
    matcher = Matcher(known_terms, "off")
    print(
        f"{len(known_terms.terms):,} terms built in {time.perf_counter() - begin:.1f} s",
        flush=True,
    )
    print(f"peak memory with dictionary and texts {peak():.2f} GB")
    rates = {}
    for context in ("off", "drop"):
        matcher.context = context  # type: ignore[assignment]
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            bag = matcher.make_bag(notes)
            seconds.append(time.perf_counter() - begin)
        rates[context] = characters / min(seconds)
        share = 1e3 * len(bag) / characters
        print(
            f"context {context}: {rates[context] / 1e6:.2f} million characters a second, ",
            end="",
        )
        print(f"{len(bag):,} concepts ({share:.1f} in 1,000 characters)", flush=True)
    plain = Plain(known_terms)
    begin = time.perf_counter()
    expected = plain.make_bag(notes)
    rate = characters / (time.perf_counter() - begin)
    print(f"plain loop: {rate / 1e6:.2f} million characters a second")
    matcher.context = "off"
    if matcher.make_bag(notes).tolist() != expected:
        raise SystemExit("the plain loop found other concepts")
    print(f"concepts ratio={rates['off'] / rate:.1f} against a plain loop over n-grams")


if __name__ == "__main__":
    main()
