"""OntoNotes in CoNLL-2012 columns; the sentences are invented."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.errors import DataError
from fednotes.core.types import Span
from fednotes.data.formats import conll, guess_format, read

SAMPLE = """\
#begin document (nw/made/00/made_0001); part 000
nw/made/00/made_0001   0    0      Ada     NNP  (TOP(S(NP*   -   -   -   -   (PERSON*   (ARG0*   (3
nw/made/00/made_0001   0    1   Sample     NNP           *)   -   -   -   -          *)       *)   3)
nw/made/00/made_0001   0    2     left     VBD        (VP*   leave   01   2   -          *     (V*)    -
nw/made/00/made_0001   0    3    Basel     NNP        (NP*)   -   -   -   -       (GPE)   (ARG1*)    -
nw/made/00/made_0001   0    4    -LRB-   -LRB-        (PRN*   -   -   -   -          *        *    -
nw/made/00/made_0001   0    5      two      CD        (NP*   -   -   -   -      (DATE*   (TMP*    -
nw/made/00/made_0001   0    6    years     NNS           *   -   -   -   -          *        *    -
nw/made/00/made_0001   0    7      ago      RB         *))   -   -   -   -         *)       *)    -
nw/made/00/made_0001   0    8    -RRB-   -RRB-           *)   -   -   -   -          *        *    -
nw/made/00/made_0001   0    9       /.       .          *))   -   -   -   -          *        *    -

nw/made/00/made_0001   0    0      She     PRP   (TOP(S(NP*)   -   -   -   -          *   (3)
nw/made/00/made_0001   0    1    slept     VBD       (VP*))   -   -   -   -          *    -

#end document
#begin document (nw/made/00/made_0001); part 001
nw/made/00/made_0001   1    0      Bank     NN        (TOP*   -   -   -   -   (ORG(NORP*   -
nw/made/00/made_0001   1    1        of     IN           *   -   -   -   -          *   -
nw/made/00/made_0001   1    2     Hills     NN           *)   -   -   -   -         *))   -

#end document
"""  # noqa: E501


def sample(path: Path, text: str = SAMPLE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_sample_as_one_reads_it(tmp_path: Path) -> None:
    """Expected by eye from the columns above."""
    path = sample(tmp_path / "made_0001.v4_gold_conll")
    assert guess_format(path) == "ontonotes"
    assert not conll.accepts(path)
    first, second = read(path)
    assert (first.id, second.id) == ("nw/made/00/made_0001:0", "nw/made/00/made_0001:1")
    assert first.meta == second.meta == {"genre": "nw"}
    assert first.text == "Ada Sample left Basel ( two years ago ) .\nShe slept"
    found = [(s.label, first.text[s.start : s.end]) for s in first.spans]
    assert found == [("PERSON", "Ada Sample"), ("GPE", "Basel"), ("DATE", "two years ago")]
    assert [first.text[a:b] for a, b in first.sentences] == first.text.split("\n")
    assert [first.text[a:b] for a, b in first.tokens] == first.text.split()
    assert {(s.label, second.text[s.start : s.end]) for s in second.spans} == {
        ("ORG", "Bank of Hills"),
        ("NORP", "Bank of Hills"),
    }


def test_a_folder_is_read_to_its_end_without_automatic_columns(tmp_path: Path) -> None:
    for genre, name in (("nw", "a"), ("bc", "b"), ("tc", "c")):
        text = SAMPLE.replace("nw/made", f"{genre}/made").replace("made_0001", name)
        sample(tmp_path / "data" / genre / "00" / f"{name}.gold_conll", text)
        sample(tmp_path / "data" / genre / "00" / f"{name}.auto_conll", text)
    (tmp_path / "README").write_text("what this is\n")
    assert guess_format(tmp_path) == "ontonotes"
    documents = read(tmp_path)
    assert [d.meta["genre"] for d in documents] == ["bc", "bc", "nw", "nw", "tc", "tc"]
    assert read(sample(tmp_path / "data" / "x.conll12")) == read(
        sample(tmp_path / "y.v9_gold_conll")
    )


mentions = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 2), st.sampled_from(["GPE", "WORK_OF_ART"])),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(mentions, min_size=1, max_size=3))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, made: list) -> None:
    """A writer of this test's own: mentions of 1 to 3 words with 0 to 2 words between."""
    lines, expected, words = ["#begin document (wb/x/00/x_1); part 002"], [], []
    position = 0
    for sentence in made:
        bits: list[tuple[str, str]] = []
        for length, gap, label in sentence:
            names = [f"w{len(words) + len(bits) + i}" for i in range(length)]
            middle = [(n, "*") for n in names[1:-1]]
            ends = [(names[-1], "*)")] if length > 1 else []
            start = position + sum(len(w) + 1 for w, _ in bits)
            expected.append(Span(start, start + len(" ".join(names)), label))
            bits += [(names[0], f"({label}*" if length > 1 else f"({label})"), *middle, *ends]
            bits += [(f"gap{i}", "*") for i in range(gap)]
        lines += [f"wb/x/00/x_1 2 {i} {w} X * - - - - {b} -" for i, (w, b) in enumerate(bits)]
        lines += [""]
        words += [w for w, _ in bits]
        position += sum(len(w) + 1 for w, _ in bits)
    path = sample(tmp_path_factory.mktemp("x") / "x", "\n".join([*lines, "#end document", ""]))
    (document,) = read(path)
    assert document.text.split() == words
    assert list(document.spans) == expected
    assert len(document.sentences) == len(made)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(GPE)", "GPE", ":5: column 11 is no named entity"),
        ("(GPE)", "*)", ":5: column 11 closes a named entity that is not open"),
        ("        *)       *)    -\n", "        *       *)    -\n", ":12: a DATE is still open"),
        ("   -   -   -   -       (GPE)   (ARG1*)    -", "", ":5: 6 columns, expected 12"),
        ("part 000\n", "part 000\n#begin document (a/b)\n", ":2: a document begins inside"),
        ("(nw/made/00/made_0001); part 000", "", ":1: no name of a document"),
        ("#end document\n#begin", "#end document\nstray\n#begin", ":17: this stands before"),
        ("#end document\n#begin", "#begin", ":16: a document begins inside"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in SAMPLE
    path = sample(tmp_path / "bad", SAMPLE.replace(old, new, 1))
    with pytest.raises(DataError, match=f"bad{message}"):
        read(path, "ontonotes")


def test_a_file_cut_short_or_without_words_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cut:22: the file ends before `#end document`"):
        read(sample(tmp_path / "cut", SAMPLE.removesuffix("#end document\n")))
    lines = ["#begin document (nw/a); part 000", "nw/a 0 0 [WORD] X * - - - - * -", "", "#end"]
    with pytest.raises(DataError, match="the words are missing"):
        read(sample(tmp_path / "a.gold_skel", "\n".join(lines)), "ontonotes")
    with pytest.raises(DataError, match="holds no tokens"):
        read(sample(tmp_path / "none", "#begin document (nw/a); part 000\n#end\n"), "ontonotes")
