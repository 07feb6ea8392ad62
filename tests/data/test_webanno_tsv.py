"""WebAnno TSV 3: expected values by hand, from the format's published specification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from time_limits import processor_time_below
from typer.testing import CliRunner

from fednotes.cli.app import app
from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats import (
    LossyError,
    convert,
    examine,
    guess_format,
    read,
    write,
)

File = Callable[..., Path]

ENTITIES = "#T_SP=de.tudarmstadt.ukp.dkpro.core.api.ner.type.NamedEntity"


def make_file(
    *lines: str, header: str = f"{ENTITIES}|value", version: str = "3.3"
) -> str:
    """Return a file with a header and the lines of its sentences."""
    return "\n".join([f"#FORMAT=WebAnno TSV {version}", header, "", "", *lines, ""])


def forms(document: Document) -> list[tuple[str, str]]:
    """Return the text and label of each mention."""
    return [(document.text[s.start : s.end], s.label) for s in document.spans]


# ---- reading -------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.2", "3.3"])
def test_multi_token_and_stacked_mentions_are_read(version: str, file: File) -> None:
    path = file(
        make_file(
            "#Sentence.id=s1",
            "#Text=Upper belly pain since May .",
            "1-1\t0-5\tUpper\tADE[1]\t",
            "1-2\t6-11\tbelly\tADE[1]|Site[2]\t",
            "1-3\t12-16\tpain\tADE[1]\t",
            "1-4\t17-22\tsince\t_\t",
            "1-5\t23-26\tMay\tDate\t",
            "1-6\t27-28\t.\t_\t",
            version=version,
        ),
        "a.tsv",
    )
    assert guess_format(path) == "webanno-tsv"
    (document,) = read(path)
    assert document.id == "a"
    assert forms(document) == [
        ("Upper belly pain", "ADE"),
        ("belly", "Site"),
        ("May", "Date"),
    ]
    assert document.sentences == ((0, 28),)
    assert len(document.tokens) == 6


def test_offsets_count_utf_16_units(file: File) -> None:
    path = file(
        make_file(
            "#Text=I like 😊 rash .",
            "1-1\t0-1\tI\t_\t",
            "1-2\t2-6\tlike\t_\t",
            "1-3\t7-9\t😊\tEmoji\t",
            "1-4\t10-14\trash\tADE\t",
            "1-5\t15-16\t.\t_\t",
            "",
            "#Text=💩 !",
            "2-1\t17-19\t💩\tEmoji\t",
            "2-2\t20-21\t!\t_\t",
        )
    )
    (document,) = read(path)
    assert document.text == "I like 😊 rash .\n💩 !"
    assert forms(document) == [("😊", "Emoji"), ("rash", "ADE"), ("💩", "Emoji")]
    assert document.sentences == ((0, 15), (16, 19))


def test_mentions_of_parts_of_tokens_are_read(file: File) -> None:
    """A mention may begin inside one token and end inside another one."""
    path = file(
        make_file(
            "#Text=aaaaaa bbbbbb cccccc",
            "1-1\t0-6\taaaaaa\t_\t",
            "1-1.1\t3-6\taaa\tX[1]\t",
            "1-2\t7-13\tbbbbbb\tX[1]\t",
            "1-2.1\t7-10\tbbb\tY\t",
            "1-2.2\t9-13\tbbbb\tZ[2]|Z[3]\t",
            "1-2.3\t13-13\t\tEmpty\t",
            "1-3\t14-20\tcccccc\t_\t",
            "1-3.1\t14-17\tccc\tX[1]\t",
        )
    )
    documents, problems = examine(path)
    assert documents[0].spans == (
        Span(3, 17, "X"),
        Span(7, 10, "Y"),
        Span(9, 13, "Z"),
        Span(9, 13, "Z"),
    )
    assert documents[0].tokens == ((0, 6), (7, 13), (14, 20))
    assert +problems.ignored == {"annotations without text": 1}


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (r"a\|b", "a|b"),
        (r"a\[1\]", "a[1]"),
        (r"a\[1\][7]", "a[1]"),
        (r"\_", "_"),
        (r"\*", "*"),
        (r"a\->b\;c", "a->b;c"),
        (r"a\\", "a\\"),
        (r"a\\[3]", "a\\"),
        (r"a\tb\nc", "a\tb\nc"),
        ("some.Type:value", "some.Type:value"),
    ],
)
def test_escaped_values_are_read(value: str, label: str, file: File) -> None:
    path = file(make_file("#Text=rash", f"1-1\t0-4\trash\t{value}\t"))
    assert forms(read(path)[0]) == [("rash", label)]


def test_texts_with_several_lines_and_gaps_between_sentences_are_read(
    file: File,
) -> None:
    """A tab, a backslash and a return are escaped; other gaps become white space."""
    path = file(
        make_file(
            r"#Text=Had\t\\ rash\r",
            "#Text=today.",
            "1-1\t2-5\tHad\t_\t",
            "1-2\t6-7\t\\\\\t_\t",
            "1-3\t8-12\trash\tADE\t",
            "1-4\t14-19\ttoday\t_\t",
            "1-5\t19-20\t.\t_\t",
            "",
            "#Text=No",
            "2-1\t20-22\tNo\t_\t",
            "",
            "#Text=pain",
            "3-1\t25-29\tpain\tADE\t",
        )
    )
    (document,) = read(path)
    assert document.text == "  Had\t\\ rash\r\ntoday.No\n  pain"
    assert forms(document) == [("rash", "ADE"), ("pain", "ADE")]


SEVERAL = "\n".join(
    (
        f"{ENTITIES}|identifier|value",
        "#T_SP=webanno.custom.Drug|dose|name",
        "#T_SP=webanno.custom.Empty|",
        "#T_SP=webanno.custom.Frame|ROLE_webanno.custom.Frame:Roles_webanno.custom.FrameRolesLink"
        "|uima.tcas.Annotation|kind",
        "#T_CH=de.tudarmstadt.ukp.dkpro.core.api.coref.type.CoreferenceLink|referenceType"
        "|referenceRelation",
        "#T_RL=webanno.custom.Relation|value|BT_webanno.custom.Drug",
    )
)


def row(*values: str) -> str:
    """Return a token with the columns of `SEVERAL`."""
    return "\t".join(("1-1", "0-4", "rash", *values, ""))


def test_the_columns_of_each_layer_are_read(file: File) -> None:
    """Slots have two columns, a layer without features one, relations one more."""
    path = file(
        make_file(
            "#Text=rash",
            row(
                "*",
                "*",
                "5 mg",
                "ASA",
                "*",
                "r",
                "1-1",
                "K",
                "c[1]",
                "*->1-1",
                "v",
                "1-1",
            ),
            header=SEVERAL,
        )
    )
    for choice, expected in (
        ("Drug/name", ["ASA"]),
        ("webanno.custom.Drug/dose", ["5 mg"]),
        ("Frame/kind", ["K"]),
    ):
        documents, _ = examine(path, f"webanno-tsv:{choice}")
        assert [span.label for span in documents[0].spans] == expected
    documents, problems = examine(path)
    assert documents[0].spans == ()
    assert problems.ignored == {
        "annotations without a label": 1,
        "annotations of other layers": 3,
    }
    with pytest.raises(
        DataError, match=r"no layer is called Nothing/x: choose one of "
    ):
        read(path, "webanno-tsv:Nothing/x")


def test_the_only_layer_in_use_holds_the_mentions(file: File) -> None:
    none = ["_"] * 12
    drug = [*none[:3], "ASA", *none[4:]]
    path = file(make_file("#Text=rash", row(*drug), header=SEVERAL))
    assert forms(read(path)[0]) == [("rash", "ASA")]
    both = [*none[:2], "5 mg", "ASA", *none[4:]]
    path = file(make_file("#Text=rash", row(*both), header=SEVERAL))
    with pytest.raises(
        DataError, match=r"several layers: webanno\.custom\.Drug/dose, .*; choose one"
    ):
        read(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1-1\t0-4\trash\t_\t"], "f.txt:5: a token comes before the text of its"),
        (["#Text=rash"], "f.txt: a sentence has no tokens"),
        (["#Text=rash", "1-1\t0-4\trash"], "f.txt:6: expected the number, place and"),
        (["#Text=rash", "1-1\t0-x\trash\t_\t"], "f.txt:6: expected the number, place"),
        (
            ["#Text=rash", "1-1\t4-0\trash\t_\t"],
            "f.txt:6: the token at 4-0 ends before",
        ),
        (
            ["#Text=rash", "1-1\t0-9\trash\t_\t"],
            "f.txt:6: the token at 0-9 is not in its",
        ),
        (
            ["#Text=rash", "1-1\t0-3\tras\t_\t", "1-2\t1-4\tras\t_\t"],
            "f.txt:7: .* differs",
        ),
        (
            ["#Text=rush", "1-1\t0-4\trash\t_\t"],
            "f.txt:6: .* offsets must count UTF-16",
        ),
        (["#Text=a", "1-1\t900000000-900000001\ta\t_\t"], "f.txt:6: .* is far from it"),
        (
            ["#Text=a", "1-1\t0-1\ta\t_\t", "#Text=b"],
            "f.txt:7: .* before the empty line that ends the previous",
        ),
        (
            ["#Text=ab", "1-1\t0-2\tab\t_\t", "", "#Text=c", "2-1\t1-2\tc\t_\t"],
            "f.txt:9: the sentence at 1 overlaps",
        ),
        (
            ["#Text=Zyxwolan", "1-1\t0-8\tZyxwolan\tX[1]\t", "1-1.1\t2-2\t\tX[1]\t"],
            "",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(
    lines: list[str], message: str, file: File
) -> None:
    path = file(make_file(*lines), "f.txt")
    if not message:
        assert len(read(path)[0].spans) == 1
        return
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert "Zyxwolan" not in str(caught.value)


@pytest.mark.parametrize("version", ["3.0", "3.1", "3.4", "3"])
def test_other_versions_are_refused(version: str, file: File) -> None:
    path = file(make_file("#Text=a", "1-1\t0-1\ta\t_\t", version=version))
    with pytest.raises(
        DataError, match=r"f.txt:1: only versions 3\.2 and 3\.3 of WebAnno"
    ):
        read(path, "webanno-tsv")


# ---- writing -------------------------------------------------------------------------


def test_the_written_file_equals_one_made_by_hand(tmp_path: Path) -> None:
    text = "Upper 😊 pain.\r\nTook a_b [x]\tnow \n"
    spans = (
        Span(0, 12, "ADE"),  # three tokens
        Span(6, 7, "Emoji|*"),  # shares a token
        Span(9, 11, "Part"),  # of "pain"
        Span(20, 23, "Drug"),
    )
    assert text[9:11] == "ai"
    write([Document("ward/a", text, spans)], tmp_path / "out", "webanno-tsv")
    content = (tmp_path / "out/ward/a.tsv").read_text("utf-8")
    assert content == make_file(
        "#Text=Upper 😊 pain.\\r",
        "1-1\t0-5\tUpper\tADE[1]\t",
        "1-2\t6-8\t😊\tADE[1]|Emoji\\|\\*[2]\t",
        "1-3\t9-13\tpain\tADE[1]\t",
        "1-3.1\t10-12\tai\tPart\t",
        "1-4\t13-14\t.\t_\t",
        "",
        "#Text=Took a_b [x]\\tnow ",
        "#Text=",
        "2-1\t16-20\tTook\t_\t",
        "2-2\t21-22\ta\tDrug[3]\t",
        "2-3\t22-23\t_\tDrug[3]\t",
        "2-4\t23-24\tb\tDrug[3]\t",
        "2-5\t25-26\t[\t_\t",
        "2-6\t26-27\tx\t_\t",
        "2-7\t27-28\t]\t_\t",
        "2-8\t29-32\tnow\t_\t",
    )
    (again,) = read(tmp_path / "out")
    assert (again.id, again.text, again.spans) == ("ward/a", text, spans)


def test_both_formats_of_inception_give_the_same_documents(tmp_path: Path) -> None:
    text = "No rash 😊.\nTook aspirin."
    document = Document("a", text, (Span(3, 9, "ADE"), Span(16, 23, "Drug")))
    format = "webanno-tsv:webanno.custom.Finding/kind"
    write([document], tmp_path / "tsv", format)
    convert(tmp_path / "tsv", tmp_path / "xmi", "uima-xmi:webanno.custom.Finding/kind")
    assert read(tmp_path / "xmi") == read(tmp_path / "tsv")
    assert read(tmp_path / "xmi")[0].spans == document.spans


def test_mentions_of_white_space_are_reported_as_lost(tmp_path: Path) -> None:
    document = Document("a", "Had rash  now", (Span(4, 10, "X"), Span(8, 10, "Y")))
    with pytest.raises(LossyError) as caught:
        write([document], tmp_path / "out", "webanno-tsv")
    assert caught.value.lost.total() == 2


def test_commands_read_and_write_the_format(tmp_path: Path) -> None:
    write(
        [Document("a", "Had rash.", (Span(4, 8, "ADE"),))],
        tmp_path / "a.jsonl",
        "jsonl",
    )
    run = CliRunner().invoke
    out = str(tmp_path / "out")
    converted = run(
        app, ["convert", str(tmp_path / "a.jsonl"), out, "--to", "webanno-tsv"]
    )
    assert converted.exit_code == 0, converted.output
    checked = run(app, ["check", out])
    assert checked.exit_code == 0, checked.output


@pytest.mark.slow
def test_large_files_are_read_quickly_within_bounds(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many sentences take time that grows with their number, not with its square."""
    lines = [
        f"#Text=ab\n{n + 1}-1\t{3 * n}-{3 * n + 2}\tab\tX[1]\t\n" for n in range(50_000)
    ]
    with processor_time_below(10):
        (document,) = read(file(make_file(*lines), "a.tsv"))
        assert document.spans == (Span(0, 149_999, "X"),)
    monkeypatch.setattr(bounds, "TOKENS", 50)
    monkeypatch.setattr(bounds, "MENTIONS", 50)
    with pytest.raises(DataError, match="more than 100 tokens: split it into notes"):
        read(file(make_file(*lines), "b.tsv"))
