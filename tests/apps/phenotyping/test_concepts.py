"""Terms in texts, their context, bags of concepts, and the output of cTAKES.

Matches are compared with a brute-force matcher. The expected contexts follow the
definitions of NegEx and ConText.
"""

from __future__ import annotations

import copy
import random
import re
import stat
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fednotes.apps.phenotyping.concepts import Matcher, group_by_patient, make_bags
from fednotes.apps.phenotyping.context import (
    KINDS,
    compute_rules_fingerprint,
    find_contexts,
    read_phrases,
)
from fednotes.apps.phenotyping.ctakes import Mention, make_bags_of_mentions, read_ctakes
from fednotes.apps.phenotyping.dictionary import (
    Dictionary,
    build_dictionary,
    read_dictionary,
)
from fednotes.apps.phenotyping.words import (
    explain_no_match,
    list_plurals,
    make_singular,
    split_into_words,
)
from fednotes.core.errors import DataError, MissingExtra
from fednotes.data.notes import Note

File = Callable[..., Path]
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
    return Matcher(build_dictionary(terms), **({"context": "off"} | options))  # type: ignore[arg-type]


def mentions(text: str, finder: Matcher) -> list[tuple[int, int, tuple[int, ...]]]:
    return [
        (a, b, tuple(finder.find_concepts([term])[0].tolist()))
        for a, b, term in finder.find(text)
    ]


def terms_in(text: str, finder: Matcher) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (text[start:end], concepts) for start, end, concepts in mentions(text, finder)
    ]


# The brute-force program: characters folded one by one, words and their places by a
# loop, and at each word all terms tried, the longest first.


def folded(character: str) -> str:
    parts = unicodedata.normalize("NFKD", character.casefold())
    return "".join(c for c in parts if not "\u0300" <= c <= "\u036f")


def brute_words(text: str) -> list[tuple[str, int, int]]:
    # (folded character, its place in the text); accents belong to what they follow
    stream = []
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
        words = tuple(make_singular(word) for word, _, _ in brute_words(term))
        if explain_no_match(words):
            continue
        terms.setdefault(words, set()).update(dictionary.get_concepts(at))
    words = brute_words(text)
    result, at = [], 0
    while at < len(words):
        for size in range(6, 0, -1):
            key = tuple(make_singular(word) for word, _, _ in words[at : at + size])
            if len(key) == size and key in terms:
                last = words[at + size - 1]
                result.append((words[at][1], last[2], tuple(sorted(terms[key]))))
                at += size
                break
        else:
            at += 1
    return result


@pytest.mark.parametrize("seed", range(40))
def test_mentions_equal_those_of_brute_force(seed: int) -> None:
    """`brute` is an independent program that shares only `make_singular` with the matcher."""
    rng = random.Random(seed)
    words = "renal cysts cyst Straße strasse café cafe\u0301 ﬁbroma fibromas β12 İ Crohn abcd".split()
    terms = [
        (f"C{rng.randrange(20):07}", " ".join(rng.choices(words, k=rng.randint(1, 4))))
        for _ in range(rng.randint(1, 25))
    ]
    finder = Matcher(build_dictionary(terms), context="off")
    parts = [
        *words,
        *words,
        "x",
        "'s",
        "’s",
        "- ",
        ".",
        "_",
        "\n\n",
        "\u0301",
        "½",
        "ǆ",
        "🙂",
    ]
    text = "".join(
        rng.choice(parts) + rng.choice(("", " ", " ", ", ")) for _ in range(300)
    )
    actual = mentions(text, finder)
    assert actual == brute(text, finder.dictionary)
    assert finder.make_bag(text).tolist() == [
        c for _, _, concepts in actual for c in concepts
    ]


def test_terms_with_equal_beginnings_and_ends_are_matched() -> None:
    """Compared with `brute`; the library's own longest match misses some of these."""
    rng = random.Random(0)
    for _ in range(300):
        terms = [
            ("C1", " ".join(rng.choices(["aaa", "bbb", "ccc"], k=rng.randint(1, 5))))
            for _ in range(6)
        ]
        dictionary = build_dictionary(terms)
        text = " ".join(rng.choices(["aaa", "bbb", "ccc", "ddd"], k=25))
        assert mentions(text, Matcher(dictionary, "off")) == brute(text, dictionary)


def test_the_leftmost_longest_mentions_are_found_without_overlap() -> None:
    """Neighbouring mentions do not overlap; no term is found inside a word."""
    finder = matcher()
    assert terms_in("Congestive heart failure; heart  failures, failure.", finder) == [
        ("Congestive heart failure", (1,)),
        ("heart  failures", (0,)),
        ("failure", (2,)),
    ]
    assert len(terms_in("fever fever,heart failure fever", finder)) == 4
    assert terms_in("feverish myfever fever_2 afever", finder) == [("fever", (5, 6))]


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
def test_offsets_refer_to_the_original_text(text: str, form: str) -> None:
    assert [part for part, _ in terms_in(text, matcher())] == [form]


def test_a_mention_may_have_several_concepts() -> None:
    finder = matcher()
    assert mentions("FEVERS", finder) == [(0, 6, (5, 6))]
    assert finder.make_bag(["fever", "heart failure"]).tolist() == [5, 6, 0]
    assert finder.make_bag("").dtype == np.int32
    assert finder.make_bag([]).tolist() == []


def test_plurals_become_singulars() -> None:
    for plural, singular_form in {
        **{"biopsies": "biopsy", "abscesses": "abscess", "reflexes": "reflex"},
        **{"stenoses": "stenosis", "metastases": "metastasis", "tumors": "tumor"},
        **{"headaches": "headache", "diseases": "disease", "sepsis": "sepsis"},
        **{"virus": "virus", "aids": "aids", "lens": "lens"},
    }.items():
        assert make_singular(plural) == make_singular(singular_form) == singular_form
        assert plural in list_plurals(singular_form)


def test_ambiguous_and_useless_terms_are_dropped() -> None:
    terms = [("C1", t) for t in ("MI", "all", "12 34", "word " * 21, "was it", "cold")]
    finder = matcher(terms)
    assert finder.dropped == {"short": 1, "ambiguous": 1, "no letter": 1, "long": 1}
    assert [form for form, _ in terms_in("mi all 12 34 was it cold", finder)] == [
        "was it",
        "cold",
    ]
    with pytest.raises(
        DataError, match=r"none of the dictionary's 1 terms .*no letter"
    ):
        matcher([("C1", "12")])


def test_context_drops_or_marks_concepts_in_bags() -> None:
    text = "No fever. Mother had heart failure. Diabetes mellitus."
    assert matcher().make_bag(text).tolist() == [5, 6, 0, 7]
    assert matcher(context="drop").make_bag(text).tolist() == [7]
    marking = matcher(context="mark")
    assert marking.vocabulary == 16
    assert marking.make_bag(text).tolist() == [13, 14, 8, 7]


def test_an_error_about_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_bags_are_built_per_patient() -> None:
    progress_calls: list[tuple[int, int]] = []
    inputs = make_bags(
        NOTES,
        matcher(),
        progress=lambda n, m: progress_calls.append((n, m)),
        max_concepts=20,
    )
    assert inputs.patients == ("p1", "p2", "p4", "p5")
    assert inputs.values.offsets.tolist() == [0, 6, 6, 6, 9]
    assert inputs.values.concepts.tolist() == [5, 6, 0, 3, 5, 6, 7, 7, 7]
    counts = inputs.counts
    characters = sum(len(text) for texts in NOTES.values() for text in texts)
    assert counts == {
        **{"patients": 5, "notes": 7, "characters": characters},
        **{"left_out": 1, "without_features": 2},
    }
    assert progress_calls == [(n, 7) for n in range(1, 8)]
    for limit in (59, 60):  # exactly the limit stays
        assert ("p3" in make_bags(NOTES, matcher(), max_concepts=limit).patients) == (
            limit == 60
        )
    nobody = make_bags({}, matcher(), processes=2)
    assert (nobody.patients, len(nobody.values)) == ((), 0)


def test_parallel_extraction_equals_serial_extraction() -> None:
    many = {
        f"{name}-{n}": texts * n for n in range(1, 6) for name, texts in NOTES.items()
    }
    serial, parallel = (
        make_bags(many, matcher(context="drop")),
        make_bags(many, matcher(context="drop"), processes=2),
    )
    assert parallel.patients == serial.patients
    assert parallel.counts == serial.counts
    np.testing.assert_array_equal(parallel.values.concepts, serial.values.concepts)
    np.testing.assert_array_equal(parallel.values.offsets, serial.values.offsets)


def test_a_spawned_process_builds_the_same_matcher() -> None:
    """`copy` rebuilds from `__reduce__`, as a spawned process does."""
    finder = matcher(context="mark")
    copied = copy.copy(finder)
    assert copied.fingerprint == finder.fingerprint
    assert (
        copied.make_bag("No fever. Fevers.").tolist()
        == finder.make_bag("No fever. Fevers.").tolist()
    )


class Unused(Matcher):
    def bag(self, *_: object, **__: object) -> np.ndarray:
        raise AssertionError("the cache was not used")


def test_the_cache_is_reused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = make_bags(NOTES, matcher(), cache=folder, max_concepts=20)
    again = make_bags(
        NOTES,
        Unused(build_dictionary(TERMS), context="off"),
        cache=folder,
        max_concepts=20,
    )
    assert again.patients == first.patients
    assert again.counts == first.counts
    np.testing.assert_array_equal(again.values.concepts, first.values.concepts)
    (entry,) = folder.iterdir()
    assert (
        stat.S_IMODE(folder.stat().st_mode)
        == stat.S_IMODE(entry.stat().st_mode)
        == 0o700
    )
    for file in entry.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert b"p1" not in file.read_bytes()


@pytest.mark.parametrize("name", ["tensors.safetensors", "facts.json", "manifest.json"])
def test_a_damaged_cache_entry_is_computed_again(name: str, tmp_path: Path) -> None:
    first = make_bags(NOTES, matcher(), cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    (entry / name).write_bytes(b"{")
    again = make_bags(NOTES, matcher(), cache=tmp_path)
    assert again.counts == first.counts
    np.testing.assert_array_equal(again.values.concepts, first.values.concepts)
    assert (entry / name).stat().st_size > 1


def test_the_cache_key_depends_on_texts_and_rules(tmp_path: Path) -> None:
    options: list[dict[str, object]] = [{}, {"context": "drop"}, {"context": "mark"}]
    for count, settings in enumerate(options, 1):
        make_bags(NOTES, matcher(**settings), cache=tmp_path)
        assert len(list(tmp_path.iterdir())) == count
    moved = NOTES | {"p1": ["Fever and heart failure.Crohn disease, no fever."]}
    make_bags(moved, matcher(), cache=tmp_path)
    make_bags(NOTES, matcher([*TERMS, ("C0000009", "cough")]), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_notes_are_grouped_by_patient() -> None:
    notes = [Note("1", "a", "p", None, "f"), Note("2", "b", None, None, "f")]
    notes += [Note("3", "c", "p", None, "f")]
    assert group_by_patient(notes) == {"p": ["a", "c"], "2": ["b"]}


def test_texts_are_divided_into_words() -> None:
    assert split_into_words("Crohn’s B12-deficiency, 5.5mg a_b O'Neill's") == (
        "crohn b12 deficiency 5 5mg a b o neill".split()
    )


# ---- context ---------------------------------------------------------------------------------
# The expected values follow Chapman et al. 2001 (negation phrases before and after,
# pseudo-negation, ends of scope) and Harkema et al. 2009 (experiencer, hypothetical), worked out
# by hand. A mention stands in square brackets.


def parsed(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans = "", []
    for part in marked.split("["):
        inside, closed, behind = part.partition("]")
        if closed:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + behind
    return text, spans


def kinds(context: int) -> str:
    return " ".join(kind for bit, kind in enumerate(KINDS) if context & 1 << bit)


NEGATED = """
He denies chest [pain].
No [fever].
There is no evidence of [pneumonia].
Patient without [edema].
The [effusion] was ruled out.
[Pneumonia] has been ruled out by imaging.
[Nodules] are not seen.
[Influenza] negative.
[Fever]: no
[Diabetes]: denies.
Negative for [hepatitis] and [cirrhosis].
Denies chest [pain], shortness of [breath], nausea, vomiting, abdominal pain, fevers, or [chills].
She doesn’t have [asthma].
Absence of [rash]
No
  [adenopathy] was palpated
He was never diagnosed, no [cancer]
Neither here nor [edema]
"""
HOLDS = """
He has chest [pain].
No fever but [cough].
No fever. [Cough] today.
No fever; [cough].
No fever

[Cough]
No fever
- [cough]
No fever
Assessment: [cough]
No change in [edema].
Not only [fever]
No increase in the [effusion]
[Embolism] cannot be ruled out.
[Pneumonia] was not ruled out
Gram negative [sepsis]
No improvement of the [anemia].
No murmurs, however [bruit].
No pain secondary to [arthritis].
There was no fracture on the film that was taken on the day when he fell off and had [pain]
[Fever] and then after some days of rest it was absent
[Fever] with a hematocrit of 40 and negative cultures
Mother reports [fever].
Mother says he has [cough].
Lives with his mother. Has [asthma].
Seen with mother for [asthma].
Sister is well but patient has [asthma].
Known [cirrhosis], no ascites
If not [sepsis]
Notable [pain]
Dr. Noah saw [asthma]
"""
FAMILY = """
Family history of [diabetes].
Family history: [gout]
Mother had breast [cancer].
His father died of [stroke].
[Diabetes] in his mother.
[Cancer] in maternal aunt
[Hypertension] runs in the family.
FH: [gout]
"""
HYPOTHETICAL = """
Return if [fever] develops.
Call for [pain].
Rule out [embolism].
Risk of [stroke].
Should she develop [rash], stop.
Prophylaxis against [thrombosis]
"""


def cases(table: str) -> list[str]:
    """Return the cases of a table; an indented line continues the case before it."""
    sentences: list[str] = []
    for line in table.strip().split("\n"):
        if sentences and "[" not in sentences[-1]:
            sentences[-1] += "\n" + line
        else:
            sentences.append(line)
    return sentences


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        *((case, "negated") for case in cases(NEGATED)),
        *((case, "") for case in cases(HOLDS)),
        *((case, "family") for case in cases(FAMILY)),
        *((case, "hypothetical") for case in cases(HYPOTHETICAL)),
        ("No family history of [gout]", "negated family"),
        ("Mother denied [gout]", "negated"),
        ("Dr. Smith saw no [gout]", "negated"),
        ("No pain, per Dr. Smith, or [gout]", "negated"),
        ("İİİİİİİİİİİİ. No [fever]. İ", "negated"),  # `İ`.lower() has two characters
        *(("no " + n * "word " + "[fever]", "negated" * (n < 12)) for n in range(15)),
        *(
            ("[fever] " + n * "word " + "was ruled out", "negated" * (n < 6))
            for n in range(9)
        ),
    ],
)
def test_contexts_follow_their_definitions(sentence: str, expected: str) -> None:
    """The last cases test how many words may stand between a trigger and a mention."""
    text, spans = parsed(sentence)
    assert spans
    assert [kinds(context) for context in find_contexts(text, spans)] == [
        expected
    ] * len(spans)


def test_each_mention_of_a_text_has_its_own_context() -> None:
    marked = "No [fever] but [cough]. Father: [gout]. [Asthma]. [Rash] absent; return if [pain]."
    text, spans = parsed(marked)
    expected = ["negated", "", "family", "", "negated", "hypothetical"]
    assert [kinds(context) for context in find_contexts(text, spans)] == expected
    assert find_contexts(text, []) == []


def test_the_fingerprint_of_the_context_rules_is_unchanged() -> None:
    """Models and caches name the digest of all phrases, which their order changes."""
    assert compute_rules_fingerprint() == (
        "23a6b445deae2405f8c1d3e92719342bb733e6126cad9fc889cfeee698387cb3"
    )


def test_tables_hold_only_lower_case_words() -> None:
    for table in read_phrases().values():
        for phrase in (
            phrase for phrases_of_kind in table.values() for phrase in phrases_of_kind
        ):
            assert phrase == " ".join(phrase.lower().split())
            assert 0 < len(phrase.split()) <= 8
            assert phrase.replace(" ", "").replace("'", "").isalnum()


# ---- cTAKES --------------------------------------------------------------------------

XMI = """<?xml version="1.0" encoding="UTF-8"?>
<xmi:XMI xmlns:xmi="http://www.omg.org/XMI"
  xmlns:textsem="http:///org/apache/ctakes/typesystem/type/textsem.ecore"
  xmlns:refsem="http:///org/apache/ctakes/typesystem/type/refsem.ecore"
  xmlns:cas="http:///uima/cas.ecore" xmi:version="2.0">
  <cas:Sofa xmi:id="1" sofaString="No fever. &lt;b&gt; Mother had gout."/>
  {body}
  <cas:View sofa="1" members="1 20"/>
</xmi:XMI>
"""
BODY = """
  <textsem:DiseaseDisorderMention xmi:id="21" sofa="1" begin="28" end="32"
    ontologyConceptArr="12" polarity="1" subject="family_member" conditional="false"/>
  <textsem:SignSymptomMention xmi:id="20" sofa="1" begin="3" end="8"
    ontologyConceptArr="10 11 13" polarity="-1" subject="patient" conditional="false"/>
  <textsem:MedicationMention xmi:id="22" sofa="1" begin="40" end="44"
    ontologyConceptArr="30" polarity="1" conditional="true"/>
  <textsem:DiseaseDisorderMention xmi:id="23" sofa="1" begin="50" end="54"
    ontologyConceptArr="14" polarity="1"/>
  <textsem:EventMention xmi:id="24" sofa="1" begin="60" end="64" polarity="1"/>
  <refsem:UmlsConcept xmi:id="10" codingScheme="SNOMEDCT_US" code="1" cui="C0015967" tui="T184"/>
  <refsem:UmlsConcept xmi:id="11" codingScheme="SNOMEDCT_US" code="2" cui="C0015967" tui="T184"/>
  <refsem:UmlsConcept xmi:id="12" codingScheme="SNOMEDCT_US" code="3" cui="C0018099" tui="T047"/>
  <refsem:UmlsConcept xmi:id="13" codingScheme="SNOMEDCT_US" code="4" cui="C0000013" tui="T047"/>
  <refsem:OntologyConcept xmi:id="14" codingScheme="RXNORM" code="5"/>
  <cas:FSArray xmi:id="30" elements="12 13"/>
"""
EXPECTED = [
    Mention(("C0015967", "C0000013"), False),  # negated
    Mention(("C0018099",), False),  # of the family
    Mention(("C0018099", "C0000013"), False),  # hypothetical
]


def test_mentions_of_an_xmi_file_are_read(file: File) -> None:
    path = file(XMI.format(body=BODY), "notes/n1.txt.xmi")
    assert read_ctakes(path)[0] == {"n1": EXPECTED}
    holding = BODY.replace('"-1"', '"1"').replace("family_member", "Patient")
    spoken = read_ctakes(file(XMI.format(body=holding), "n3.xmi"))[0]["n3"]
    assert [mention.holds for mention in spoken] == [True, True, False]
    file(XMI.format(body=""), "notes/n2.xmi")
    file("a README", "notes/README.md")
    by_note, report = read_ctakes(path.parent)
    assert by_note == {"n1": EXPECTED, "n2": []}
    assert report.rows == 2


@pytest.mark.parametrize("number", [1000, 1001])
def test_a_list_that_mentions_share_is_bounded(number: int, file: File) -> None:
    """A million mentions of a million concepts would need a few megabytes."""
    mention = '<textsem:M begin="0" end="4" ontologyConceptArr="l"/>'
    concepts = "".join(
        f'<refsem:UmlsConcept xmi:id="{n}" cui="C{n % number:07}"/>'
        for n in range(2 * number)
    )
    elements = " ".join(map(str, range(2 * number)))
    shared = f'<cas:FSArray xmi:id="l" elements="{elements}"/>'
    path = file(XMI.format(body=f"{mention * 3}{concepts}{shared}"), "n.xmi")
    if number == 1000:
        mentions = read_ctakes(path)[0]["n"]
        assert [len(mention.cuis) for mention in mentions] == [1000] * 3
        return
    with pytest.raises(DataError, match="a mention has more than 1,000 concepts"):
        read_ctakes(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (XMI.format(body=BODY)[:900], "the file is not XML"),
        ("", "the file is not XML"),
        ("no xml", "the file is not XML"),
        ("<a/>", "not an XMI file of cTAKES"),
        (
            XMI.format(body='<textsem:M begin="x" end="4" ontologyConceptArr="1"/>'),
            "begin and end",
        ),
        (
            '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]>\n<xmi:XMI>&c;</xmi:XMI>',
            "DOCTYPE",
        ),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd">\n<xmi:XMI/>', "DOCTYPE"),
    ],
)
def test_malformed_xmi_is_refused(content: str, message: str, file: File) -> None:
    path = file(content, "n.xmi")
    with pytest.raises(DataError, match=message) as caught:
        read_ctakes(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "p1\tC0000001 C0000002 -C0000001\np2\np1 C0000003\n",
        "p1,C0000001,C0000002,-C0000001\np2,\np1,C0000003",
        "patient|cuis\np1|C0000001|C0000002|-C0000001\np2\np1|C0000003",
    ],
)
def test_flat_lines_of_concepts_are_read(content: str, file: File) -> None:
    by_id, report = read_ctakes(file(content, "cuis.txt"))
    assert (report.rows, report.damaged) == (3, 0)
    assert by_id["p1"] == [
        Mention(("C0000001",)),
        Mention(("C0000002",)),
        Mention(("C0000001",), False),
        Mention(("C0000003",)),
    ]
    assert by_id["p2"] == []


def test_damaged_flat_lines_are_left_out(file: File) -> None:
    path = file(
        b"p1 C0000001\np2 C1\n\xff C0000001\nC0000002 C0000003\np3 C0000001\np4 C0000001\n"
    )
    by_id, report = read_ctakes(path)
    assert sorted(by_id) == ["p1", "p3", "p4"]
    assert (report.rows, report.damaged) == (6, 3)
    with pytest.raises(
        DataError, match=r"other\.txt:2: 1 of 1 lines .* an id and CUIs on each line"
    ):
        read_ctakes(file("some words\nof a note\n", "other.txt"))
    with pytest.raises(DataError, match="expected an id and CUIs on each line"):
        read_ctakes(file("", "empty.txt"))


def test_a_folder_of_cui_files_is_read(file: File) -> None:
    path = file("C0000001 C0000002\n-C0000003\n", "flat/p1.txt")
    file("", "flat/p2.txt")
    file("C0000001\n???\n", "flat/p3.txt")
    by_id, report = read_ctakes(path.parent)
    assert [len(mentions_of_one) for mentions_of_one in by_id.values()] == [
        3,
        0,
        1,
    ]
    assert (report.rows, report.damaged) == (4, 1)
    file("words of a note\nand more\nand more\n", "flat/p4.txt")
    with pytest.raises(DataError, match="4 of 7 lines are not CUIs"):
        read_ctakes(path.parent)


def test_bags_are_built_from_ctakes_mentions() -> None:
    mentions = {"p1": EXPECTED, "p2": [], "p3": [Mention(("C0018099",))] * 9}
    vocabulary = ("C0015967", "C0018099")
    patients, values, counts = make_bags_of_mentions(
        mentions, vocabulary, max_concepts=8
    )
    assert patients == ("p1", "p2")
    assert values.concepts.tolist() == []
    assert counts == {
        "patients": 3,
        "mentions": 9,
        "unknown": 0,
        "left_out": 1,
        "without_features": 2,
    }
    patients, values, counts = make_bags_of_mentions(
        mentions, vocabulary, context="mark"
    )
    assert values.vocabulary == 4
    assert values.take([0]).concepts.tolist() == [2, 3, 3]
    assert values.take([2]).concepts.tolist() == [1] * 9
    assert counts["unknown"] == 2
    _, values, _ = make_bags_of_mentions(mentions, vocabulary, context="off")
    assert values.take([0]).concepts.tolist() == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.corpora
def test_codiesp_cases_have_the_expected_concepts_of_the_disease_ontology(
    corpora: Path,
) -> None:
    """The counts are those at the time of writing; two cases are checked by `brute`."""
    files = [
        f
        for part in ("train", "dev")
        for f in (corpora / "codiesp" / part).rglob("*.txt")
    ]
    texts = {file.stem: [file.read_text("utf-8")] for file in sorted(files)}
    dictionary = read_dictionary(corpora / "disease_ontology" / "HumanDO.obo")
    finder = Matcher(dictionary, context="off")
    for name in sorted(texts)[:2]:
        assert mentions(texts[name][0], finder) == brute(texts[name][0], dictionary)
    inputs = make_bags(texts, Matcher(dictionary, context="off"))
    distinct = np.bincount(
        inputs.values.count_concepts()[0], minlength=len(inputs.values)
    )
    assert inputs.counts["patients"] == 750
    assert distinct.mean() == pytest.approx(2.99, abs=0.01)
    assert inputs.counts["without_features"] == 86
