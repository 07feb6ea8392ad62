"""The reader of every format satisfies the contract of readers."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import ClassVar

import pytest
from other_packages import leave_out_others
from reader_contract import NOTES, SECRET, ReaderContract

from fednotes.data.formats import FORMATS, write

SAMPLES = Path(__file__).parent / "samples"


def read_sample(name: str, word: str) -> str:
    """Return a file of the samples with the secret in place of a word."""
    return (SAMPLES / name).read_text("utf-8").replace(word, SECRET)


class OneFile(ReaderContract):
    """A format of which a corpus is one file here.

    Attributes:
        name: The name of the file.
        content: What is in it.
    """

    name: ClassVar[str]
    content: ClassVar[str]

    @classmethod
    def write(cls, folder: Path) -> Path:
        path = folder / cls.name
        path.write_text(cls.content, "utf-8")
        return path


class Written(ReaderContract):
    """A format that fednotes writes.

    Attributes:
        name: The name of the file or folder.
    """

    name: ClassVar[str]

    @classmethod
    def write(cls, folder: Path) -> Path:
        path = folder / cls.name
        write(NOTES, path, cls.format, allow_loss=True)
        return path


class TestAde(OneFile):
    format = "ade"
    name = "DRUG-AE.rel"
    content = f"7|Rash after {SECRET}; no more.|rash|125|129|{SECRET}|136|144\n"


class TestBigbio(Written):
    format = "bigbio"
    name = "notes.jsonl"


class TestBioc(Written):
    format = "bioc"
    name = "notes.xml"


class TestBiocInJson(Written):
    format = "bioc"
    name = "notes.json"


class TestBrat(Written):
    format = "brat"
    name = "notes"
    has_empty_notes = True


class TestConll(Written):
    format = "conll"
    name = "notes.conll"


class TestDocbin(Written):
    format = "docbin"
    name = "notes.spacy"

    @pytest.fixture(autouse=True)
    def _spacy(self) -> None:
        pytest.importorskip("spacy")


class TestDoccano(Written):
    format = "doccano"
    name = "notes.jsonl"
    guessed_as = "jsonl"


class TestFhir(Written):
    format = "fhir"
    name = "notes.json"


class TestI2b2(ReaderContract):
    format = "i2b2"

    @staticmethod
    def write(folder: Path) -> Path:
        (folder / "n1.txt").write_text(f"Admission :\nTook {SECRET} and slept .\n")
        (folder / "n1.con").write_text(f'c="{SECRET.lower()}" 2:1 2:1||t="treatment"\n')
        return folder


class TestI2b22012(OneFile):
    format = "i2b2-2012"
    name = "1.xml"
    # As long as the word that it replaces and a space, so that offsets stay right.
    content = read_sample("i2b2_2012.xml", "aspirin ").replace('"68"', '"69"')


class TestJsonl(Written):
    format = "jsonl"
    name = "notes.jsonl"


class TestLabelStudio(Written):
    format = "label-studio"
    name = "notes.json"


class TestMedcattrainer(Written):
    format = "medcattrainer"
    name = "notes.json"


class TestOmop(Written):
    format = "omop"
    name = "notes"


class TestOntonotes(OneFile):
    format = "ontonotes"
    name = "notes.gold_conll"
    content = read_sample("ontonotes.conll", "Basel")


class TestParquet(Written):
    format = "parquet"
    name = "notes.parquet"


class TestProdigy(Written):
    format = "prodigy"
    name = "notes.jsonl"
    guessed_as = "jsonl"


class TestPubtator(OneFile):
    format = "pubtator"
    name = "notes.txt"
    content = f"1|t|Took {SECRET}.\n1|a|\n1\t5\t13\t{SECRET}\tChemical\tD1\n\n"


class TestUimaXmi(Written):
    format = "uima-xmi"
    name = "notes"


class TestUimaXmiInAnArchive(ReaderContract):
    format = "uima-xmi"

    @staticmethod
    def write(folder: Path) -> Path:
        write(NOTES, folder / "notes", "uima-xmi", allow_loss=True)
        path = folder / "corpus" / "notes.zip"
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted((folder / "notes").iterdir()):
                archive.write(file, file.name)
        return path


class TestWebannoTsv(Written):
    format = "webanno-tsv"
    name = "notes"


def test_every_format_has_a_contract_class() -> None:
    classes = [
        value
        for name, value in globals().items()
        if name.startswith("Test") and issubclass(value, ReaderContract)
    ]
    tested = {value.format for value in classes}
    missing = set(leave_out_others("formats", FORMATS)) - tested
    assert not missing, (
        f"add a class for {', '.join(sorted(missing))} to this module that derives from "
        "ReaderContract (tests/helpers/reader_contract.py)"
    )
    assert tested <= set(FORMATS)
