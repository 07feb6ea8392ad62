"""Sentences with the answers of NegEx's and ConText's published definitions.

The expected values follow Chapman et al. 2001 (negation phrases before and after, pseudo-negation,
ends of scope) and Harkema et al. 2009 (experiencer, hypothetical), worked out by hand. A mention
stands in square brackets.
"""

from __future__ import annotations

import pytest

from fednotes.patients.concepts import KINDS, contexts, fingerprint_of_rules, phrases


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
    """One case a line; a line that is indented or begins a new block belongs to the one before."""
    found: list[str] = []
    for line in table.strip().split("\n"):
        if found and "[" not in found[-1]:
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found


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
        *(("[fever] " + n * "word " + "was ruled out", "negated" * (n < 6)) for n in range(9)),
    ],
)
def test_what_the_definitions_say(sentence: str, expected: str) -> None:
    """The last ones: how many words may stand between a trigger and a mention."""
    text, spans = parsed(sentence)
    assert spans
    assert [kinds(context) for context in contexts(text, spans)] == [expected] * len(spans)


def test_each_mention_of_a_text_has_its_own() -> None:
    marked = "No [fever] but [cough]. Father: [gout]. [Asthma]. [Rash] absent; return if [pain]."
    text, spans = parsed(marked)
    expected = ["negated", "", "family", "", "negated", "hypothetical"]
    assert [kinds(context) for context in contexts(text, spans)] == expected
    assert contexts(text, []) == []


def test_saved_models_know_these_rules() -> None:
    """Models and caches name the hash of all phrases: another order of them is another one."""
    assert fingerprint_of_rules() == (
        "23a6b445deae2405f8c1d3e92719342bb733e6126cad9fc889cfeee698387cb3"
    )


def test_tables_hold_lower_case_words_alone() -> None:
    for table in phrases().values():
        for phrase in (phrase for own in table.values() for phrase in own):
            assert phrase == " ".join(phrase.lower().split())
            assert 0 < len(phrase.split()) <= 8
            assert phrase.replace(" ", "").replace("'", "").isalnum()
