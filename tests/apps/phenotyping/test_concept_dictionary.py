"""Dictionaries from UMLS files, ontologies and tables, with damaged rows."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from time_limits import processor_time_below

from fednotes.apps.phenotyping.dictionary import (
    TYPES,
    Dictionary,
    build_dictionary,
    clean_term,
    read_dictionary,
)
from fednotes.core.errors import ConfigError, DataError

File = Callable[..., Path]


def conso(
    cui: str,
    text: str,
    source: str = "SNOMEDCT_US",
    kind: str = "SY",
    language: str = "ENG",
    suppress: str = "N",
    preferred: str = "S|VO|N",
) -> str:
    ts, stt, ispref = preferred.split("|")
    fields = [
        cui,
        language,
        ts,
        "L1",
        stt,
        "S1",
        ispref,
        "A1",
        "",
        "",
        "",
        source,
        kind,
        "1",
        text,
    ]
    return "|".join([*fields, "0", suppress, "", ""])


def terms(dictionary: Dictionary) -> dict[str, list[str]]:
    """Return the ids of each term."""
    return {
        term: [dictionary.concepts[c] for c in dictionary.get_concepts(at)]
        for at, term in enumerate(dictionary.terms)
    }


ROWS = [
    conso("C0011849", "Diabetes mellitus", kind="PT", preferred="P|PF|Y"),
    conso("C0011849", "Diabetes mellitus (disorder)", kind="FN"),
    conso("C0011849", "DM - Diabetes mellitus"),
    conso("C0020538", "High blood pressure"),
    conso("C0020538", "Hypertension", preferred="P|PF|Y"),
    conso("C0020538", "Hypertension", source="MSH"),
    conso("C0020538", "Hipertensión", language="SPA"),
    conso("C0004057", "Aspirin", source="RXNORM", kind="IN"),
    conso("C0004057", "ASA 81 MG", source="RXNORM", kind="SCD"),
    conso("C0004057", "acetylsalicyl", source="RXNORM", kind="SY"),
    conso("C0000003", "old", suppress="O"),
    conso("C0000004", "obsolete", kind="OAP"),
    conso("C0000005", "Hypertension"),
]


def test_terms_of_the_umls_are_read(file: File) -> None:
    dictionary = read_dictionary(file("\n".join(ROWS) + "\n", "MRCONSO.RRF"))
    assert dictionary.concepts == ("C0000005", "C0004057", "C0011849", "C0020538")
    assert terms(dictionary) == {
        "Aspirin": ["C0004057"],
        "DM - Diabetes mellitus": ["C0011849"],
        "Diabetes mellitus": ["C0011849"],
        "High blood pressure": ["C0020538"],
        "Hypertension": ["C0000005", "C0020538"],
    }


def test_umls_options_select_terms(file: File) -> None:
    path = file("\r\n".join(ROWS), "MRCONSO.RRF")
    spanish = read_dictionary(path, language="SPA")
    assert spanish.terms == ("Hipertensión",)
    mesh = read_dictionary(path, sources=["MSH"])
    assert mesh.concepts == ("C0020538",)
    everything = read_dictionary(path, left_out_kinds=())
    assert {"ASA 81 MG", "obsolete"} <= set(everything.terms)
    with pytest.raises(
        DataError, match="sources MESH: the file has the sources SNOMEDCT_US, RX"
    ):
        read_dictionary(path, sources=["MESH"])


def test_the_order_of_umls_rows_does_not_matter(file: File) -> None:
    first = read_dictionary(file("\n".join(ROWS), "a/MRCONSO.RRF"))
    two = read_dictionary(file("\n".join(reversed(ROWS)), "b/MRCONSO.RRF"))
    shorter = read_dictionary(file("\n".join(ROWS[:-1]), "c/MRCONSO.RRF"))
    assert first.fingerprint == two.fingerprint != shorter.fingerprint


def test_umls_semantic_types_select_concepts(file: File) -> None:
    path = file("\n".join(ROWS), "MRCONSO.RRF")
    types = [
        "C0011849|T047|B2|Disease or Syndrome|AT1||",
        "C0020538|T047|B2|Disease|AT2||",
    ]
    types += [
        "C0004057|T109|A1|Organic Chemical|AT3||",
        "C0000005|T170|A2|Book|AT4||",
        "damaged",
    ]
    file("\n".join(types), "MRSTY.RRF")
    dictionary = read_dictionary(path)
    assert dictionary.concepts == ("C0004057", "C0011849", "C0020538")
    assert read_dictionary(path, types=["T109"]).concepts == ("C0004057",)
    assert len(read_dictionary(path, types=[])) == 4
    with pytest.raises(ConfigError, match="such as T047"):
        read_dictionary(path, types=["Disease"])
    (path.parent / "MRSTY.RRF").unlink()
    with pytest.raises(DataError, match="MRSTY"):
        read_dictionary(path, types=["T047"])
    assert all(re.fullmatch(r"T\d{3}", name) for name in TYPES)
    assert {"T047", "T184", "T061", "T121", "T023"} <= TYPES


def test_damaged_umls_rows_are_left_out(file: File) -> None:
    bad = [
        b"C0011849|ENG|cut off",
        conso("X1", "no id").encode(),
        conso("C0000009", " ").encode(),
    ]
    bad += [conso("C0000010", "caf").encode() + b"\xe9|", b""]
    path = file(b"\n".join([row.encode() for row in ROWS] + bad), "MRCONSO.RRF")
    assert len(read_dictionary(path)) == 4


def test_compressed_umls_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "MRCONSO.RRF.gz"
    path.write_bytes(gzip.compress("\n".join(ROWS).encode()))
    (tmp_path / "MRSTY.RRF.gz").write_bytes(gzip.compress(b"C0004057|T109|A|B|C||"))
    assert read_dictionary(path).concepts == ("C0004057",)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="check that the file is complete"):
        read_dictionary(path)


@pytest.mark.parametrize("name", ["MRCONSO.RRF", "a.obo", "t.csv"])
@pytest.mark.parametrize("content", ["", "some words\n" * 300, b"\x00\xff\xfe" * 5000])
def test_a_wrong_file_is_refused_in_one_line(
    name: str, content: str | bytes, file: File
) -> None:
    path = file(content, name)
    with pytest.raises(DataError, match=re.escape(str(path))) as caught:
        read_dictionary(path)
    assert "\n" not in str(caught.value)
    assert "words" not in str(caught.value)
    with pytest.raises(DataError, match="no such file"):
        read_dictionary(path.with_name(f"x{name}"))


OBO = r"""format-version: 1.2
synonymtypedef: x "Y"

[Term]
id: DOID:2
name: hypertension
def: "High. [x]" []
synonym: "HTN" EXACT []
synonym: "high blood pressure (disorder)" EXACT [SNOMED:1]
synonym: "say \"pressure\"" EXACT []
synonym: "pressure" RELATED []
synonym: "renal hypertension NOS" NARROW []
xref: UMLS_CUI:C0020538
xref: UMLS_CUI:C0000005
xref: ICD10CM:I10 {source="x"}
xref: MSH:D1

[Term]
id: DOID:1
name: gout, NOS
xref: UMLS_CUI:C0018099

[Term]
id: DOID:3
name: obsolete thing
is_obsolete: true

[Term]
id: DOID:4
name: flu
synonym: broken
synonym: "HTN" EXACT []

[Term]
name: without id

[Typedef]
id: part_of
name: part of
"""


def test_terms_of_an_ontology_are_read(file: File) -> None:
    dictionary = read_dictionary(file(OBO, "d.obo"))
    assert dictionary.concepts == ("DOID:1", "DOID:2", "DOID:4")
    assert terms(dictionary) == {
        "HTN": ["DOID:2", "DOID:4"],
        "flu": ["DOID:4"],
        "gout": ["DOID:1"],
        "high blood pressure": ["DOID:2"],
        "hypertension": ["DOID:2"],
        'say "pressure"': ["DOID:2"],
    }


@pytest.mark.parametrize(
    "line", [b'synonym: "bronchial', b"synonym: broken", b"def: a\xff"]
)
def test_an_obo_file_with_broken_lines_is_refused_or_read_without_them(
    file: File, line: bytes
) -> None:
    """A broken line is left out; if most terms have one, the file is refused."""
    first, others = b"[Term]\nid: D:1\nname: asthma\n", b"[Term]\nid: D:2\nname: gout\n"
    dictionary = read_dictionary(file(first + line + b"\n" + others, "d.obo"))
    assert terms(dictionary) == {"asthma": ["D:1"], "gout": ["D:2"]}
    with pytest.raises(DataError, match=r"1: this is not a stanza .* 1 of 1 rows"):
        read_dictionary(file(first + line + b"\n", "d.obo"))


def test_a_table_with_a_broken_line_before_its_header_keeps_all_terms(
    file: File,
) -> None:
    rows = b"note\xff,x\nterm,id\nasthma,C1\ngout,C2\n"
    dictionary = read_dictionary(file(rows, "d.csv"))
    assert terms(dictionary) == {"asthma": ["C1"], "gout": ["C2"]}


def test_obo_options_select_terms_and_ids(file: File) -> None:
    path = file(OBO, "d.obo")
    wide = read_dictionary(path, scopes=("EXACT", "RELATED", "NARROW"))
    assert {"pressure", "renal hypertension"} <= set(wide.terms)
    cuis = read_dictionary(path, ids="UMLS_CUI")
    assert cuis.concepts == ("C0000005", "C0018099", "C0020538")
    assert terms(cuis)["HTN"] == ["C0000005", "C0020538"]
    with pytest.raises(DataError, match="no term has a cross-reference to UMLS:"):
        read_dictionary(path, ids="UMLS")
    with pytest.raises(ConfigError, match="did you mean 'EXACT'"):
        read_dictionary(path, scopes=["EXAKT"])


def test_a_term_with_too_many_cross_references_is_refused(file: File) -> None:
    """Each of them would get all synonyms: 1 MB of text would give 400 million."""
    lines = ["[Term]", "id: HP:1", "name: gout"]
    lines += [f'synonym: "gout {number}" EXACT []' for number in range(1000)]
    lines += [f"xref: UMLS_CUI:C{number:07d}" for number in range(1000)]
    path = file("\n".join(lines), "d.obo")
    with pytest.raises(DataError, match="term HP:1 has 1,000 cross-references to UMLS"):
        read_dictionary(path, ids="UMLS_CUI")
    assert read_dictionary(path).concepts == ("HP:1",)


def test_a_term_of_too_many_concepts_is_refused_in_linear_time() -> None:
    """Each mention of the term in a note would get all of them."""
    entries = [(f"C{number}", "gout") for number in range(60_000)]
    refusal = pytest.raises(
        DataError, match="term 'gout' of the dictionary has 60,000 con"
    )
    with processor_time_below(5), refusal:  # it was half a minute
        build_dictionary(entries)
    assert build_dictionary(entries[:1000]).get_concepts(0) == tuple(range(1000))


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ('C1,heart failure\nC2,gout\nC1,"failure, heart"\n', "t.csv"),
        ("C1\theart failure\nC2\tgout\nC1\tfailure, heart\n", "t.tsv"),
        ("\ufeffcui\tterm\nC1\theart failure\nC2\tgout\nC1\tfailure, heart\n", "t.txt"),
        ('Term,x,ID\nheart failure,1,C1\ngout,2,C2\n"failure, heart",3,C1', "t.csv"),
    ],
)
def test_terms_of_a_table_are_read(content: str, name: str, file: File) -> None:
    dictionary = read_dictionary(file(content, name))
    assert terms(dictionary) == {
        "failure, heart": ["C1"],
        "gout": ["C2"],
        "heart failure": ["C1"],
    }


def test_damaged_rows_of_a_table_are_left_out(file: File) -> None:
    dictionary = read_dictionary(
        file('C1,a\nC2\nC3,b,c\n,d\nC4,\nC5,e\nC6,"f\nC7,g\nC8,h\nC9,i\nC10,j\n')
    )
    assert dictionary.concepts == ("C1", "C10", "C5", "C7", "C8", "C9")


def test_unknown_options_are_refused(file: File) -> None:
    path = file("C1,gout\n", "t.csv")
    with pytest.raises(ConfigError, match="did you mean 'scopes'"):
        read_dictionary(path, "obo", scope=["EXACT"])
    with pytest.raises(ConfigError, match="does not apply to format table"):
        read_dictionary(path, ids="x")


def test_tags_and_affixes_are_removed_from_terms() -> None:
    for term, clean in {
        **{
            "Rheumatic disease NOS (disorder)": "Rheumatic disease",
            "[X]Gout, NOS": "Gout",
        },
        **{"  two   words ": "two words", "lymphoma (clinical)": "lymphoma (clinical)"},
        **{"NOS": "NOS", "diagnosis": "diagnosis", "(disorder)": "(disorder)"},
    }.items():
        assert clean_term(term) == clean


def test_prefixes_commas_and_tags_are_removed_in_linear_time() -> None:
    """The time of an earlier version grew with the cube of a term's length."""
    with processor_time_below(5):
        for term in (
            "[X]" * 300 + "," * 3000 + "y",
            "x" + "," * 2600 + "y" + " NOS" * 330,
            "x" + "," * 2600 + "y" + " (cell)" * 180,
        ):
            assert clean_term(term).endswith("y")
        assert clean_term("[X] (NOS)") == "[X] (NOS)"


def test_a_dictionary_is_built_from_pairs() -> None:
    dictionary = build_dictionary([("B", "x"), ("A", "y"), ("A", "x"), ("A", "x")])
    assert dictionary.concepts == ("A", "B")
    assert terms(dictionary) == {"x": ["A", "B"], "y": ["A"]}
    assert len(build_dictionary([])) == 0


@pytest.mark.corpora
def test_the_disease_ontology_has_the_expected_terms(corpora: Path) -> None:
    """The number of terms is that of [Term] without is_obsolete, counted in the text."""
    path = corpora / "disease_ontology" / "HumanDO.obo"
    lines = path.read_text("utf-8").splitlines()
    dictionary = read_dictionary(path)
    assert len(dictionary) == lines.count("[Term]") - lines.count("is_obsolete: true")
    assert "DOID:10763" in terms(dictionary)["hypertension"]
