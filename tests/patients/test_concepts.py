"""Matching terms in texts: against a brute-force matcher, offsets, bags, pools, the cache."""

from __future__ import annotations

import copy
import random
import re
import stat
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from fednotes.core.errors import DataError, MissingExtra
from fednotes.data.notes import Note
from fednotes.patients.concepts import Matcher, bags, by_patient
from fednotes.patients.dictionary import (
    Dictionary,
    dictionary_of,
    plurals_of,
    read_dictionary,
    singular,
    unfit,
    words_of,
)

TERMS = [
    ("C0000001", "heart failure"),
    ("C0000002", "congestive heart failure"),
    ("C0000003", "failure"),
    ("C0000004", "Crohn's disease"),
    ("C0000005", "Sjögren syndrome"),
    ("C0000006", "fever"),
    ("C0000007", "Fever"),
    ("C0000008", "diabetes mellitus"),
]


def matcher(terms: list[tuple[str, str]] = TERMS, **options: object) -> Matcher:
    return Matcher(dictionary_of(terms), **({"context": "off"} | options))  # type: ignore[arg-type]


def mentions(text: str, own: Matcher) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(a, b, tuple(own.concepts_of([term])[0].tolist())) for a, b, term in own.find(text)]


def found(text: str, own: Matcher) -> list[tuple[str, tuple[int, ...]]]:
    return [(text[start:end], concepts) for start, end, concepts in mentions(text, own)]


# The brute-force program: characters folded one by one, words and their places by a loop, and
# at each word all terms tried, the longest first.


def folded(character: str) -> str:
    parts = unicodedata.normalize("NFKD", character.casefold())
    return "".join(c for c in parts if not "\u0300" <= c <= "\u036f")


def brute_words(text: str) -> list[tuple[str, int, int]]:
    stream = []  # (folded character, its place in the text); accents belong to what they follow
    for at, character in enumerate(text):
        if "\u0300" <= character <= "\u036f":
            continue
        end = at + 1
        while end < len(text) and "\u0300" <= text[end] <= "\u036f":
            end += 1
        stream += [(part, at, end) for part in folded(character)]
    flat = "".join("'" if part in "'’" else part for part, _, _ in stream)
    flat = re.sub(r"'s(?![\w']|_)", lambda m: "  ", flat)
    runs = re.finditer(r"[^\W_]+", flat)
    return [(m.group(), stream[m.start()][1], stream[m.end() - 1][2]) for m in runs]


def brute(text: str, dictionary: Dictionary) -> list[tuple[int, int, tuple[int, ...]]]:
    terms: dict[tuple[str, ...], set[int]] = {}
    for at, term in enumerate(dictionary.terms):
        words = tuple(singular(word) for word, _, _ in brute_words(term))
        if unfit(words):
            continue
        terms.setdefault(words, set()).update(dictionary.of(at))
    words = brute_words(text)
    result, at = [], 0
    while at < len(words):
        for size in range(6, 0, -1):
            key = tuple(singular(word) for word, _, _ in words[at : at + size])
            if len(key) == size and key in terms:
                last = words[at + size - 1]
                result.append((words[at][1], last[2], tuple(sorted(terms[key]))))
                at += size
                break
        else:
            at += 1
    return result


@pytest.mark.parametrize("seed", range(40))
def test_finds_what_brute_force_finds(seed: int) -> None:
    """`brute` is the independent program; it shares `singular` alone with the matcher."""
    rng = random.Random(seed)
    words = (
        "renal cysts cyst Straße strasse café cafe\u0301 ﬁbroma fibromas β12 İ Crohn abcd".split()
    )
    terms = [
        (f"C{rng.randrange(20):07}", " ".join(rng.choices(words, k=rng.randint(1, 4))))
        for _ in range(rng.randint(1, 25))
    ]
    own = Matcher(dictionary_of(terms), context="off")
    parts = [*words, *words, "x", "'s", "’s", "- ", ".", "_", "\n\n", "\u0301", "½", "ǆ", "🙂"]
    text = "".join(rng.choice(parts) + rng.choice(("", " ", " ", ", ")) for _ in range(300))
    got = mentions(text, own)
    assert got == brute(text, own.dictionary)
    assert own.bag(text).tolist() == [c for _, _, concepts in got for c in concepts]


def test_terms_that_begin_and_end_alike() -> None:
    """Against `brute`, where failure links matter: the library's own longest match misses some."""
    rng = random.Random(0)
    for _ in range(300):
        terms = [
            ("C1", " ".join(rng.choices(["aaa", "bbb", "ccc"], k=rng.randint(1, 5))))
            for _ in range(6)
        ]
        dictionary = dictionary_of(terms)
        text = " ".join(rng.choices(["aaa", "bbb", "ccc", "ddd"], k=25))
        assert mentions(text, Matcher(dictionary, "off")) == brute(text, dictionary)


def test_leftmost_longest_without_overlap() -> None:
    own = matcher()
    assert found("Congestive heart failure; heart  failures, failure.", own) == [
        ("Congestive heart failure", (1,)),
        ("heart  failures", (0,)),
        ("failure", (2,)),
    ]


def test_neighbouring_mentions_share_no_boundary() -> None:
    text = "fever fever,heart failure fever"
    assert len(found(text, matcher())) == 4


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("has Sjögren’s syndrome.", "Sjögren’s syndrome"),
        ("has Sjo\u0308gren syndromes", "Sjo\u0308gren syndromes"),
        ("ß ﬁ İ ½ 🙂 CROHN DISEASE!", "CROHN DISEASE"),
        ("crohn's-disease", "crohn's-disease"),
        ("ß\u0301\u0301 fe\u0301ve\u0301r\u0301 x", "fe\u0301ve\u0301r\u0301"),
        ("\u0301\u0301fever", "fever"),
    ],
)
def test_offsets_are_those_of_the_text(text: str, form: str) -> None:
    assert [part for part, _ in found(text, matcher())] == [form]


def test_no_match_inside_words() -> None:
    assert found("feverish myfever fever_2 afever", matcher()) == [("fever", (5, 6))]


def test_a_mention_of_several_concepts() -> None:
    own = matcher()
    assert mentions("FEVERS", own) == [(0, 6, (5, 6))]
    assert own.bag(["fever", "heart failure"]).tolist() == [5, 6, 0]
    assert own.bag("").dtype == np.int32
    assert own.bag([]).tolist() == []


@pytest.mark.parametrize(
    ("plural", "one"),
    [
        ("biopsies", "biopsy"),
        ("abscesses", "abscess"),
        ("reflexes", "reflex"),
        ("stenoses", "stenosis"),
        ("metastases", "metastasis"),
        ("tumors", "tumor"),
        ("headaches", "headache"),
        ("diseases", "disease"),
        ("sepsis", "sepsis"),
        ("virus", "virus"),
        ("aids", "aids"),
        ("lens", "lens"),
    ],
)
def test_plurals(plural: str, one: str) -> None:
    assert singular(plural) == singular(one) == one
    assert plural in plurals_of(one)


def test_terms_that_are_not_matched() -> None:
    terms = [("C1", t) for t in ("MI", "all", "12 34", "word " * 21, "was it", "cold")]
    own = matcher(terms)
    assert own.dropped == {"short": 1, "ambiguous": 1, "no letter": 1, "long": 1}
    assert [form for form, _ in found("mi all 12 34 was it cold", own)] == ["was it", "cold"]
    with pytest.raises(DataError, match=r"none of the dictionary's 1 terms .*no letter"):
        matcher([("C1", "12")])


def test_context_in_bags() -> None:
    text = "No fever. Mother had heart failure. Diabetes mellitus."
    assert matcher().bag(text).tolist() == [5, 6, 0, 7]
    assert matcher(context="drop").bag(text).tolist() == [7]
    marking = matcher(context="mark")
    assert marking.vocabulary == 16
    assert marking.bag(text).tolist() == [13, 14, 8, 7]


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ahocorasick", None)
    with pytest.raises(MissingExtra, match=r"pyahocorasick.*fednotes\[concepts\]"):
        matcher()


NOTES = {
    "p1": ["Fever and heart failure.", "Crohn disease, no fever."],
    "p2": ["nothing to see"],
    "p3": ["fever " * 30],
    "p4": [],
    "p5": ["diabetes mellitus"] * 3,
}


def test_bags_of_patients() -> None:
    seen: list[tuple[int, int]] = []
    made = bags(NOTES, matcher(), progress=lambda n, m: seen.append((n, m)), most=20)
    assert made.patients == ("p1", "p2", "p4", "p5")
    assert made.values.offsets.tolist() == [0, 6, 6, 6, 9]
    assert made.values.concepts.tolist() == [5, 6, 0, 3, 5, 6, 7, 7, 7]
    counts = made.counts
    characters = sum(len(text) for texts in NOTES.values() for text in texts)
    assert counts == {
        **{"patients": 5, "notes": 7, "characters": characters, "mentions": 69},
        **{"left_out": 1, "without": 2},
    }
    assert seen == [(n, 5) for n in range(1, 6)]


def test_exactly_the_limit_stays() -> None:
    assert "p3" in bags(NOTES, matcher(), most=60).patients
    assert "p3" not in bags(NOTES, matcher(), most=59).patients


def test_no_patient_at_all() -> None:
    made = bags({}, matcher(), processes=2)
    assert made.patients == ()
    assert len(made.values) == 0


def test_parallel_equals_serial() -> None:
    many = {f"{name}-{n}": texts * n for n in range(1, 6) for name, texts in NOTES.items()}
    one, two = bags(many, matcher(context="drop")), bags(many, matcher(context="drop"), processes=2)
    assert two.patients == one.patients
    assert two.counts == one.counts
    np.testing.assert_array_equal(two.values.concepts, one.values.concepts)
    np.testing.assert_array_equal(two.values.offsets, one.values.offsets)


def test_a_spawned_process_builds_the_same() -> None:
    """`copy` rebuilds as the spawn method does: from what `__reduce__` gives."""
    own = matcher(context="mark")
    other = copy.copy(own)
    assert other.fingerprint == own.fingerprint
    assert other.bag("No fever. Fevers.").tolist() == own.bag("No fever. Fevers.").tolist()


class Unused(Matcher):
    def bag(self, *_: object, **__: object) -> np.ndarray:
        raise AssertionError("the cache was not used")


def test_cache_is_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = bags(NOTES, matcher(), cache=folder, most=20)
    again = bags(NOTES, Unused(dictionary_of(TERMS), context="off"), cache=folder, most=20)
    assert again.patients == first.patients
    assert again.counts == first.counts
    np.testing.assert_array_equal(again.values.concepts, first.values.concepts)
    (entry,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(entry.stat().st_mode) == 0o700
    for file in entry.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert b"p1" not in file.read_bytes()


@pytest.mark.parametrize("name", ["tensors.safetensors", "facts.json", "manifest.json"])
def test_a_damaged_cache_is_made_anew(name: str, tmp_path: Path) -> None:
    first = bags(NOTES, matcher(), cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    (entry / name).write_bytes(b"{")
    again = bags(NOTES, matcher(), cache=tmp_path)
    assert again.counts == first.counts
    np.testing.assert_array_equal(again.values.concepts, first.values.concepts)
    assert (entry / name).stat().st_size > 1


def test_the_cache_knows_texts_and_rules(tmp_path: Path) -> None:
    options: list[dict[str, object]] = [{}, {"context": "drop"}, {"context": "mark"}]
    for count, given in enumerate(options, 1):
        bags(NOTES, matcher(**given), cache=tmp_path)
        assert len(list(tmp_path.iterdir())) == count
    moved = NOTES | {"p1": ["Fever and heart failure.Crohn disease, no fever."]}
    bags(moved, matcher(), cache=tmp_path)
    bags(NOTES, matcher([*TERMS, ("C0000009", "cough")]), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_notes_by_patient() -> None:
    notes = [Note("1", "a", "p", None, "f"), Note("2", "b", None, None, "f")]
    notes += [Note("3", "c", "p", None, "f")]
    assert by_patient(notes) == {"p": ["a", "c"], "2": ["b"]}


def test_words() -> None:
    assert words_of("Crohn’s B12-deficiency, 5.5mg a_b O'Neill's") == (
        "crohn b12 deficiency 5 5mg a b o neill".split()
    )


@pytest.mark.corpora
def test_codiesp_cases_with_the_disease_ontology(corpora: Path) -> None:
    """Counts measured when this was written; two cases against `brute`."""
    files = [f for part in ("train", "dev") for f in (corpora / "codiesp" / part).rglob("*.txt")]
    texts = {file.stem: [file.read_text("utf-8")] for file in sorted(files)}
    dictionary = read_dictionary(corpora / "disease_ontology" / "HumanDO.obo")
    own = Matcher(dictionary, context="off")
    for name in sorted(texts)[:2]:
        assert mentions(texts[name][0], own) == brute(texts[name][0], dictionary)
    made = bags(texts, Matcher(dictionary, context="off"))
    distinct = np.bincount(made.values.counts()[0], minlength=len(made.values))
    assert made.counts["patients"] == 750
    assert distinct.mean() == pytest.approx(2.99, abs=0.01)
    assert made.counts["without"] == 86
