"""Sentences with the answers of NegEx's and ConText's published definitions.

The expected values follow Chapman et al. 2001 (negation phrases before and after, pseudo-negation,
ends of scope) and Harkema et al. 2009 (experiencer, hypothetical), worked out by hand. A mention
stands in square brackets.
"""

from __future__ import annotations

import pytest

from fednotes.core.errors import ConfigError
from fednotes.patients.context import (
    AFTER,
    BEFORE,
    KINDS,
    NOTHING,
    PSEUDO,
    TERMINATORS,
    Context,
    Rules,
    context_of,
    contexts,
)


def parsed(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans = "", []
    for part in marked.split("["):
        inside, closed, behind = part.partition("]")
        if closed:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + behind
    return text, spans


def kinds(context: Context) -> str:
    return " ".join(kind for kind, holds in zip(KINDS, context, strict=True) if holds)


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
    joined = table.strip().replace("\n\n[", "\n\n[")
    found: list[str] = []
    for line in joined.split("\n"):
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
    ],
)
def test_what_the_definitions_say(sentence: str, expected: str) -> None:
    text, spans = parsed(sentence)
    assert spans
    assert [kinds(c) for c in contexts(text, spans)] == [expected] * len(spans)
    assert [kinds(context_of(text, *span)) for span in spans] == [expected] * len(spans)


def test_each_mention_of_a_text_has_its_own() -> None:
    marked = "No [fever] but [cough]. Father: [gout]. [Asthma]. [Rash] absent; return if [pain]."
    text, spans = parsed(marked)
    expected = ["negated", "", "family", "", "negated", "hypothetical"]
    assert [kinds(c) for c in contexts(text, spans)] == expected
    assert contexts(text, []) == []


def test_windows() -> None:
    """`window` words may stand between trigger and mention, itself not counted; 11 of 12 do."""
    for between in range(15):
        text, (span,) = parsed(f"no {'word ' * between}[fever]")
        assert context_of(text, *span).negated == (between < 12)
        assert context_of(text, *span, Rules(window=3)).negated == (between < 3)
    for between in range(9):
        text, (span,) = parsed(f"[fever] {'word ' * between}was ruled out")
        assert context_of(text, *span).negated == (between < 6)
        assert context_of(text, *span, Rules(window_after=2)).negated == (between < 2)


def test_kinds_can_be_chosen() -> None:
    text, (span,) = parsed("No family history of [gout]")
    assert context_of(text, *span, Rules(kinds=("family",))) == Context(False, True, False)
    assert context_of(text, *span, Rules(kinds=())) is NOTHING
    text, (span,) = parsed("[Gout]: no")
    assert context_of(text, *span, Rules(kinds=("family",))) is NOTHING


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="did you mean 'negated'"):
        Rules(kinds=("negate",))
    with pytest.raises(ConfigError, match="1 word"):
        Rules(window=0)


def test_fingerprint_tells_rules_apart() -> None:
    prints = {Rules().fingerprint, Rules(window=3).fingerprint, Rules(kinds=()).fingerprint}
    assert len(prints) == 3
    assert Rules().fingerprint == Rules().fingerprint


def test_offsets_hold_where_lower_case_is_longer() -> None:
    """`İ`.lower() has two characters."""
    text, (span,) = parsed("İİİİİİİİİİİİ. No [fever]. İ")
    assert context_of(text, *span).negated


def test_tables_hold_lower_case_words_alone() -> None:
    tables = [phrases for table in (BEFORE, AFTER, TERMINATORS) for phrases in table.values()]
    for phrases in (*tables, PSEUDO):
        for phrase in phrases:
            assert phrase == " ".join(phrase.lower().split())
            assert 0 < len(phrase.split()) <= 8
            assert phrase.replace(" ", "").replace("'", "").isalnum()
