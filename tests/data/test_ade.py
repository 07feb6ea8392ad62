"""ADE Corpus V2: mentions are found where the rows' offsets put them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.core.types import Document, Span
from fednotes.data.formats import guess_format, read

File = Callable[..., Path]
Forms = Callable[[Document], list[tuple[str, str]]]
Complains = Callable[..., None]


def _corpus(seed: int) -> tuple[dict[str, str], dict[tuple[str, str], set[Span]]]:
    """Invented abstracts in the corpus' files, and the spans that were put into them.

    Words repeat within a sentence, so that only the offsets tell which occurrence is meant;
    each sentence has three rows or more, one of them a dose.
    """
    rng = random.Random(seed)
    words = ["rash", "fever", "aspirin", "lithium", "and", "with", "rash", "aspirin"]
    files: dict[str, list[str]] = {"DRUG-AE.rel": [], "DRUG-DOSE.rel": [], "ADE-NEG.txt": []}
    truth: dict[tuple[str, str], set[Span]] = {}
    for pmid in ("11", "22"):
        position = rng.randrange(50)
        for number in range(6):
            forms = [rng.choice(words) for _ in range(7)] + [
                "rash",
                "aspirin",
                "5mg",
                f"x{number}.",
            ]
            rng.shuffle(forms)
            sentence = " ".join(forms)
            starts = [sum(len(f) + 1 for f in forms[:i]) for i in range(len(forms))]
            spans = truth.setdefault((pmid, sentence), set())

            def place(names: tuple[str, ...], forms=forms, starts=starts) -> tuple[str, int]:
                i = rng.choice([i for i, f in enumerate(forms) if f in names])
                return forms[i], starts[i]

            for row in range(4):
                name, label, kind = ("DRUG-AE.rel", "ADE", ("rash", "fever"))
                if row == 3:
                    name, label, kind = "DRUG-DOSE.rel", "Dosage", ("5mg",)
                ends = []
                for form, start in (place(kind), place(("aspirin", "lithium"))):
                    what = label if form in kind else "Drug"
                    spans.add(Span(start, start + len(form), what))
                    ends += [form, str(position + start), str(position + start + len(form))]
                files[name].append("|".join([pmid, sentence, *ends]))
            if number == 0:
                files["ADE-NEG.txt"].append(f"{pmid} NEG {sentence}")
            position += len(sentence) + rng.randrange(1, 40)
        files["ADE-NEG.txt"].append(f"{pmid} NEG Nothing was | seen.")
        truth[pmid, "Nothing was | seen."] = set()
    return {name: "\n".join(lines) + "\n" for name, lines in files.items()}, truth


@pytest.mark.parametrize("seed", range(12))
def test_ade_spans_are_where_they_were_put(file: File, seed: int) -> None:
    """`_corpus` puts mentions at random occurrences; the reader must find just those."""
    files, truth = _corpus(seed)
    for name, text in files.items():
        file(text, f"ade/{name}")
    folder = file("about", "ade/README").parent
    assert guess_format(folder) == "ade"
    documents = read(folder)
    assert len(documents) == len({d.id for d in documents}) == len(truth)
    assert {(d.meta["pmid"], d.text): set(d.spans) for d in documents} == truth
    assert not any("unplaced" in d.meta for d in documents)


def test_ade_alone_rows(file: File, forms: Forms) -> None:
    """One row: the distance of the two offsets decides; case and spaces are forgiven."""
    text = "7|Rash after aspirin; no rash after  Lithium salt.|rash|125|129|lithium salt|137|149\n"
    (document,) = read(file(text))
    assert forms(document) == [("rash", "ADE"), ("Lithium salt", "Drug")]
    assert document.spans[0].start == 23
    assert document.id == "7:1"
    assert document.meta["relations"] == (("ADE", 23, 27, 35, 47),)


def test_ade_row_that_fits_nowhere(file: File, complains: Complains) -> None:
    """1 of 21 is counted, 1 of 1 is an error with its line."""
    good = [f"7|Rash {i} after aspirin.|Rash|0|4|aspirin|13|20" for i in range(20)]
    bad = "7|Rash 3 after aspirin.|fever|0|4|aspirin|13|20"
    documents = read(file("\n".join([*good, bad])))
    assert sum(d.meta.get("unplaced", 0) for d in documents) == 1
    complains(file(bad), r"f.txt:1: a mention is not in its sentence \(1 of 1 rows\)")


@pytest.mark.parametrize("line", ["7|a|b|1|2|c|3", "7|a|b|1|x|c|3|4", "7|a| |1|2|c|3|4", "7 POS a"])
def test_ade_errors(file: File, line: str, complains: Complains) -> None:
    """A cut line, a word for a number, an empty mention, another mark."""
    complains(file(f"7 NEG Fine.\n{line}\n"), "f.txt:2: expected PMID", "ade")
