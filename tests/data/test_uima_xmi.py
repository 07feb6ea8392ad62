"""UIMA XMI of INCEpTION: `dkpro-cassis` writes what we read and reads what we write."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cassis import Cas, TypeSystem, load_cas_from_xmi, load_typesystem
from cassis.typesystem import Type
from time_limits import processor_time_below
from tiny_notes import NOTE
from typer.testing import CliRunner

from fednotes.cli.app import app
from fednotes.core import bounds
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats import (
    LossyError,
    convert,
    examine,
    guess_format,
    read,
    write,
)
from fednotes.jobs.inputs import open_inputs

File = Callable[..., Path]

NAMED_ENTITY = "de.tudarmstadt.ukp.dkpro.core.api.ner.type.NamedEntity"
SEGMENTATION = "de.tudarmstadt.ukp.dkpro.core.api.segmentation.type"
TEXT = 'Had 😀 "rash"\r\n\t& 💩 fever.'


def make_types() -> TypeSystem:
    """Return the types of a project of INCEpTION, as far as they matter here."""
    types = TypeSystem()
    for name, features in (
        (NAMED_ENTITY, ("value", "identifier")),
        (f"{SEGMENTATION}.Sentence", ()),
        (f"{SEGMENTATION}.Token", ("order",)),
        ("de.tudarmstadt.ukp.dkpro.core.api.lexmorph.type.pos.POS", ("PosValue",)),
        ("webanno.custom.Finding", ("kind",)),
        ("webanno.custom.Drug", ("name", "dose")),
    ):
        type = types.create_type(name)
        for feature in features:
            types.create_feature(type, feature, "uima.cas.String")
    types.create_type(f"{NAMED_ENTITY.rpartition('.')[0]}.Person", NAMED_ENTITY)
    return types


def make_cas(types: TypeSystem, text: str = TEXT) -> Cas:
    """Return a CAS with a text and no annotation."""
    cas = Cas(types)
    cas.sofa_string = text
    cas.sofa_mime = "text/plain"
    return cas


def annotate(cas: Cas, name: str, form: str, /, **features: str) -> None:
    """Add an annotation of the first place with a form."""
    type: Type = cas.typesystem.get_type(name)
    begin = cas.sofa_string.index(form)
    cas.add(type(begin=begin, end=begin + len(form), **features))


def save(cas: Cas, folder: Path, name: str = "n1.xmi") -> Path:
    """Write a CAS and its type system into a folder, and return the folder."""
    folder.mkdir(exist_ok=True)
    cas.typesystem.to_xml(folder / "TypeSystem.xml")
    cas.to_xmi(folder / name)
    return folder


def forms(document: Document) -> list[tuple[str, str]]:
    """Return the text and label of each mention."""
    return [(document.text[s.start : s.end], s.label) for s in document.spans]


# ---- what another program reads and writes -------------------------------------------


def test_another_program_reads_what_is_written(tmp_path: Path) -> None:
    spans = (Span(4, 5, '<Emoji> & "co"\n'), Span(6, 12, "ADE"), Span(6, 12, "ADE"))
    document = Document(
        "ward 7/a", TEXT, spans, sentences=((0, 12),), tokens=((0, 3), (4, 5), (6, 12))
    )
    assert not write([document], tmp_path / "out", "uima-xmi")
    with open(tmp_path / "out/TypeSystem.xml", "rb") as file:
        types = load_typesystem(file)
    with open(tmp_path / "out/ward 7/a.xmi", "rb") as file:
        cas = load_cas_from_xmi(file, types)
    assert cas.sofa_string == TEXT
    found = [(a.begin, a.end, a.value) for a in cas.select(NAMED_ENTITY)]
    assert sorted(found) == sorted((s.start, s.end, s.label) for s in spans)
    for name, places in (("Sentence", document.sentences), ("Token", document.tokens)):
        rows = cas.select(f"{SEGMENTATION}.{name}")
        assert tuple((row.begin, row.end) for row in rows) == places


def test_a_file_of_another_program_is_read(tmp_path: Path) -> None:
    """Offsets in UTF-16 units, a type derived from the layer, sentences and tokens."""
    cas = make_cas(make_types())
    annotate(cas, NAMED_ENTITY, '"rash"', value="ADE")
    annotate(cas, f"{NAMED_ENTITY.rpartition('.')[0]}.Person", "💩", value="PER")
    for form in ("Had", "😀", "fever"):
        annotate(cas, f"{SEGMENTATION}.Token", form, order=form)
    annotate(cas, f"{SEGMENTATION}.Sentence", TEXT)
    folder = save(cas, tmp_path / "corpus")
    assert guess_format(folder) == "uima-xmi"
    (document,) = read(folder)
    assert (document.id, document.text) == ("n1", TEXT)
    assert forms(document) == [('"rash"', "ADE"), ("💩", "PER")]
    assert document.sentences == ((0, len(TEXT)),)
    assert [TEXT[a:b] for a, b in document.tokens] == ["Had", "😀", "fever"]


def test_a_corpus_survives_a_round_trip_through_another_program(tmp_path: Path) -> None:
    write([NOTE], tmp_path / "out", "uima-xmi", allow_loss=True)
    with open(tmp_path / "out/TypeSystem.xml", "rb") as file:
        types = load_typesystem(file)
    with open(tmp_path / "out/n1.xmi", "rb") as file:
        cas = load_cas_from_xmi(file, types)
    ours = read(tmp_path / "out")
    assert read(save(cas, tmp_path / "again")) == ours
    assert ours[0].text == NOTE.text


@pytest.mark.parametrize("names", [("n1.xmi",), ("a/n1.xmi", "a/n2.xmi")])
def test_an_archive_is_read_with_its_type_system(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    cas = make_cas(make_types())
    annotate(cas, f"{NAMED_ENTITY.rpartition('.')[0]}.Person", "💩", value="PER")
    folder = save(cas, tmp_path / "files")
    path = tmp_path / "corpus" / "export.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "TypeSystem.xml", "TypeSystem.xml")
        for name in names:
            archive.write(folder / "n1.xmi", name)
    for source in (path, path.parent):
        assert guess_format(source) == "uima-xmi"
        documents = read(source)
        assert [forms(document) for document in documents] == [[("💩", "PER")]] * len(
            names
        )
    ids = ["export"] if len(names) == 1 else ["export/a/n1", "export/a/n2"]
    assert [document.id for document in documents] == ids


# ---- which layer ---------------------------------------------------------------------


def test_the_only_layer_in_use_holds_the_mentions(tmp_path: Path) -> None:
    """Named entities are declared in each project, but nobody has annotated one here."""
    cas = make_cas(make_types())
    annotate(cas, "webanno.custom.Finding", "fever", kind="Symptom")
    annotate(cas, "de.tudarmstadt.ukp.dkpro.core.api.lexmorph.type.pos.POS", "Had")
    folder = save(cas, tmp_path / "corpus")
    assert forms(read(folder)[0]) == [("fever", "Symptom")]
    (folder / "TypeSystem.xml").unlink()
    assert forms(read(folder)[0]) == [("fever", "Symptom")]


def test_one_of_several_layers_must_be_chosen(tmp_path: Path) -> None:
    cas = make_cas(make_types())
    annotate(cas, "webanno.custom.Finding", "fever", kind="Symptom")
    annotate(cas, "webanno.custom.Drug", "rash", name="ASA", dose="5 mg")
    folder = save(cas, tmp_path / "corpus")
    with pytest.raises(
        DataError,
        match=r"several layers: webanno\.custom\.Drug/dose, webanno\.custom\.Drug/name, "
        r"webanno\.custom\.Finding/kind; choose one after the name of the format",
    ):
        read(folder)
    for choice, expected in (
        ("webanno.custom.Drug/dose", ("rash", "5 mg")),
        ("Finding/kind", ("fever", "Symptom")),
    ):
        documents, problems = examine(folder, f"uima-xmi:{choice}")
        assert forms(documents[0]) == [expected]
        assert problems.ignored == {"annotations of other layers": 1}
    with pytest.raises(DataError, match=r"no layer is called Nothing/kind: choose one"):
        read(folder, "uima-xmi:Nothing/kind")
    with pytest.raises(ConfigError, match="'Finding' is not a layer: expected a layer"):
        read(folder, "uima-xmi:Finding")


def test_a_layer_is_refused_for_a_format_without_layers(file: File) -> None:
    with pytest.raises(
        ConfigError, match="conll offers no choice: give the name alone"
    ):
        read(file("rash\tB-ADE\n", "a.conll"), "conll:x/y")


def test_mentions_are_written_into_the_chosen_layer(tmp_path: Path) -> None:
    document = Document("a", "Had 😀 rash.", (Span(6, 10, "ADE"),))
    format = "uima-xmi:webanno.custom.Finding/kind"
    assert not write([document], tmp_path / "out", format)
    assert read(tmp_path / "out") == (document,)
    with open(tmp_path / "out/TypeSystem.xml", "rb") as file:
        types = load_typesystem(file)
    with open(tmp_path / "out/a.xmi", "rb") as file:
        cas = load_cas_from_xmi(file, types)
    (finding,) = cas.select("webanno.custom.Finding")
    assert (finding.begin, finding.end, finding.kind) == (6, 10, "ADE")


def test_commands_take_the_choice_after_the_format(tmp_path: Path) -> None:
    cas = make_cas(make_types(), "He had fever after aspirin.")
    annotate(cas, "webanno.custom.Finding", "fever", kind="Symptom")
    annotate(cas, "webanno.custom.Drug", "aspirin", name="ASA", dose="5 mg")
    folder = save(cas, tmp_path / "corpus")
    format = "uima-xmi:webanno.custom.Drug/name"
    checked = CliRunner().invoke(app, ["check", str(folder), "--format", format])
    assert checked.exit_code == 0, checked.output
    (note,) = open_inputs(str(folder), format=format)  # as `predict` reads it
    assert forms(note) == [("aspirin", "ASA")]
    lost = convert(folder, tmp_path / "a.jsonl", "jsonl", format, allow_loss=True).lost
    assert lost == {"annotations of other layers": 1}
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(line)["spans"] == [{"start": 19, "end": 26, "label": "ASA"}]


# ---- what is left out, and what is refused -------------------------------------------


def test_annotations_that_are_not_mentions_are_counted(tmp_path: Path) -> None:
    cas = make_cas(make_types())
    annotate(cas, NAMED_ENTITY, "fever", value="ADE")
    annotate(cas, NAMED_ENTITY, "rash", identifier="C1")
    annotate(cas, NAMED_ENTITY, "", value="ADE")
    unindexed = cas.typesystem.get_type(NAMED_ENTITY)(begin=0, end=3, value="Old")
    folder = save(cas, tmp_path / "corpus")
    xmi = (folder / "n1.xmi").read_text("utf-8")
    deleted = '<type:NamedEntity xmi:id="99" sofa="1" begin="0" end="3" value="Old"/><cas:Sofa '
    (folder / "n1.xmi").write_text(xmi.replace("<cas:Sofa ", deleted), "utf-8")
    assert unindexed.value == "Old"
    (document,), problems = examine(folder)
    assert forms(document) == [("fever", "ADE")]
    assert problems.ignored == {
        "annotations without a label": 1,
        "annotations without text": 1,
    }
    with pytest.raises(LossyError, match="annotations without a label: 1"):
        convert(folder, tmp_path / "a.jsonl", "jsonl")


XMI = (
    '<xmi:XMI xmlns:xmi="http://www.omg.org/XMI" xmlns:cas="http:///uima/cas.ecore" '
    'xmlns:t="http:///de/tudarmstadt/ukp/dkpro/core/api/ner/type.ecore">%s</xmi:XMI>'
)
SOFA = '<cas:Sofa xmi:id="1" sofaID="%s" sofaString="Zyxwolan 😀"/>'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is not XML"),
        ("<a/>", "it has no element xmi:XMI"),
        (XMI % "", r"document 1: it has 0 texts \(sofa\)"),
        (XMI % (SOFA % "a" + SOFA % "b"), r"document 1: it has 2 texts \(sofa\)"),
        (XMI % '<cas:Sofa xmi:id="1" sofaURI="x"/>', "its text is in another file"),
        (
            XMI
            % ('<t:NamedEntity sofa="1" begin="a" end="3" value="X"/>' + SOFA % "a"),
            "the begin or end of an annotation is not a number",
        ),
        (
            XMI
            % ('<t:NamedEntity sofa="1" begin="0" end="99" value="X"/>' + SOFA % "a"),
            "document 1: .* is not a span of the text",
        ),
        (
            XMI
            % ('<t:NamedEntity sofa="1" begin="9" end="10" value="X"/>' + SOFA % "a"),
            "document 1: 9:10 begins or ends inside a character",
        ),
        (
            '<!DOCTYPE a [<!ENTITY b "Zyxwolan">]>' + XMI % "&b;",
            "the file has a DOCTYPE",
        ),
        (SOFA, "it has no element xmi:XMI"),
        (XMI % "<a>", "the file is not XML"),
    ],
)
def test_a_malformed_file_is_refused_with_the_reason(
    content: str, message: str, file: File
) -> None:
    path = file(content, "n.xmi")
    with pytest.raises(DataError, match=message) as caught:
        read(path, "uima-xmi")
    assert str(path) in str(caught.value)
    assert "Zyxwolan" not in str(caught.value)


def test_a_damaged_type_system_is_refused(tmp_path: Path) -> None:
    folder = save(make_cas(make_types()), tmp_path / "corpus")
    (folder / "TypeSystem.xml").write_text("<typeSystemDescription>")
    with pytest.raises(DataError, match=r"TypeSystem\.xml:1: the file is not XML"):
        read(folder)


def test_malicious_xmi_is_refused_quickly(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many attributes, a chain of types, and many annotations."""
    with processor_time_below(15):
        attributes = " ".join(f'a{number}=""' for number in range(400_000))
        with pytest.raises(DataError, match="a tag has more than 100,000 attributes"):
            read(file(XMI % f"<cas:Sofa {attributes}/>", "a.xmi"))
        types = "".join(
            f"<typeDescription><name>t{number}</name><supertypeName>t{number - 1}"
            "</supertypeName></typeDescription>"
            for number in range(20_000)
        )
        path = file(XMI % (SOFA % "a"), "b/b.xmi")
        file(f"<types>{types}</types>", "b/TypeSystem.xml")
        with pytest.raises(DataError, match="more than 10,000 types"):
            read(path)
        monkeypatch.setattr(bounds, "TOKENS", 50)
        monkeypatch.setattr(bounds, "MENTIONS", 50)
        many = '<t:NamedEntity sofa="1" begin="0" end="3" value="X"/>' * 101
        with pytest.raises(DataError, match="more than 100 annotations: split it"):
            read(file(XMI % (many + SOFA % "a"), "c.xmi"))


def test_malicious_archives_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zip"
    monkeypatch.setattr(bounds, "PACKED_FREE", 100_000)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.xmi", XMI % (" " * 1_000_000))
    with pytest.raises(DataError, match="a file in the archive is too large"):
        read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.xmi", XMI % (" " * 200_000))
    with pytest.raises(DataError, match="the archive has more than 100,000 bytes"):
        read(path, "uima-xmi")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.xmi", XMI % (SOFA % "a"))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"Zyxwolan", b"Zyxwolen"))  # the sum is wrong
    with pytest.raises(DataError, match="cannot be unpacked: export it again"):
        read(path)
    path.write_bytes(content[:-30])
    with pytest.raises(DataError, match="the ZIP archive is damaged"):
        read(path, "uima-xmi")


def test_long_texts_in_one_attribute_are_read_quickly(file: File) -> None:
    """A text of 8 MB is in one tag, which a parser must not read anew in each piece."""
    with processor_time_below(10):
        text = "He had rash = fever. " * 400_000
        path = file(XMI % f'<cas:Sofa xmi:id="1" sofaString="{text}"/>', "a.xmi")
        (document,) = read(path)
        assert len(document.text) == len(text)
