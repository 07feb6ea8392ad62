"""What the reader of every format must do, as tests that run over its corpus.

A subclass in a test module names the format and writes a small corpus of it:

    class TestMyFormat(ReaderContract):
        format = "my-format"

        @staticmethod
        def write(folder):
            path = folder / "notes.txt"
            path.write_text(f"SHOUTED\\nRASH after {SECRET}\\n")
            return path

What a reader finds in a given file is no part of the contract: each format has tests of
its own for that.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from time_limits import no_waiting

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats import guess_format, read, stream
from fednotes.data.formats.problems import Problems

# A word that no message may repeat. The notes below mention it.
SECRET = "Zyxwolan"
NOTES = (
    Document(
        "n1",
        f"Upper 😀 belly pain.\r\nTook {SECRET}.",
        (Span(0, 13, "ADE", ((0, 5), (8, 13))), Span(26, 34, "Drug", (), 0.75)),
        patient="7",
    ),
    Document("n2", f"No rash. Stopped {SECRET}.", (Span(17, 25, "Drug"),)),
)
REPLACEMENTS = (b"-1", b"null", b"[]", b'"', b"9" * 12, b"\0", b"<a>")
UNCHECKED = (
    "the reader does not check what it reads. Use `require_in_text` of "
    "data/formats/mentions.py, or make a record for `jsonl.parse_record`, which checks "
    'everything ("A new reader" in CONTRIBUTING.md)'
)
CHANGES = [
    pytest.param(30, id="30 changes"),
    pytest.param(600, id="600 changes", marks=pytest.mark.slow),
]


def list_files(path: Path) -> list[Path]:
    """Return the files of a corpus, which is a file or a folder."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one to three places overwritten, moved or cut out."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(changed))
        source = rng.randrange(len(changed))
        piece = rng.choice((*REPLACEMENTS, bytes(changed[source : source + 5])))
        changed[start : start + rng.randint(0, 9)] = piece or b" "
    return bytes(changed)


class ReaderContract:
    """Tests of the reader of one format.

    Attributes:
        format: The name of the format.
        write: Writes a corpus with at least one mention, and `SECRET` in its text, into
            an empty folder. Returns the path to read, a file or a folder.
        guessed_as: The format that a reader without a name of one takes; "" where it is
            this one.
        has_empty_notes: Whether an empty file is a note without text.
    """

    format: ClassVar[str]
    write: ClassVar[Callable[[Path], Path]]
    guessed_as: ClassVar[str] = ""
    has_empty_notes: ClassVar[bool] = False

    @pytest.fixture
    def corpus(self, tmp_path: Path) -> Path:
        folder = tmp_path / "corpus"
        folder.mkdir()
        return self.write(folder)

    @pytest.fixture(autouse=True)
    def _reading_ends(self) -> Iterator[None]:
        """Fail a test whose reader waits without end."""
        with no_waiting(60):
            yield

    def refusal(self, path: Path) -> str:
        """Return the message that refuses a corpus; "" where it is read."""
        try:
            documents = read(path, self.format)
        except DataError as error:
            message = str(error)
            assert "\n" not in message
            assert SECRET not in message
            assert str(path) in message
            return message
        self.check_offsets(documents)
        return ""

    def check_offsets(self, documents: tuple[Document, ...]) -> None:
        """Check that all that has a place in a text lies inside it, in order."""
        for document in documents:
            length = len(document.text)
            for span in document.spans:
                where = f"{span} in a text of {length} characters: {UNCHECKED}"
                assert 0 <= span.start < span.end <= length, where
                assert span.label, where
                assert span.confidence is None or 0 <= span.confidence <= 1, where
                edges = [edge for piece in span.fragments for edge in piece]
                assert edges == sorted(edges), where
                is_whole = not edges or (edges[0], edges[-1]) == (span.start, span.end)
                assert is_whole, where
            for pieces in (document.sentences, document.tokens):
                where = f"{pieces} in a text of {length} characters: {UNCHECKED}"
                edges = [edge for piece in pieces for edge in piece]
                assert edges == sorted(edges), where
                assert all(0 <= edge <= length for edge in edges), where

    def test_the_format_is_guessed_from_the_content(self, corpus: Path) -> None:
        assert guess_format(corpus) == (self.guessed_as or self.format)
        assert read(corpus) == read(corpus, self.format)

    def test_documents_have_unique_ids_and_mentions_inside_their_texts(
        self, corpus: Path
    ) -> None:
        documents = read(corpus, self.format)
        self.check_offsets(documents)
        assert len({document.id for document in documents}) == len(documents)
        assert any(document.spans for document in documents)
        assert any(SECRET in document.text for document in documents)

    def test_reading_documents_one_by_one_equals_reading_them_together(
        self, corpus: Path
    ) -> None:
        problems = Problems()
        assert tuple(stream(corpus, problems, self.format)) == read(corpus, self.format)
        assert not problems.listed

    def test_reading_changes_no_file(self, corpus: Path) -> None:
        before = {file: file.read_bytes() for file in list_files(corpus)}
        read(corpus, self.format)
        assert {file: file.read_bytes() for file in list_files(corpus)} == before

    @pytest.mark.parametrize(
        "content",
        [b"", b"\xef\xbb\xbf\n \n", b"\x00\xff\x89PNG\r\n" + bytes(40)],
        ids=["empty", "blank", "picture"],
    )
    def test_a_corpus_of_files_without_notes_is_refused(
        self, content: bytes, corpus: Path
    ) -> None:
        for file in list_files(corpus):
            file.write_bytes(content)
        if self.has_empty_notes and not content.decode("utf-8-sig", "replace").strip():
            assert not any(document.spans for document in read(corpus, self.format))
        else:
            assert self.refusal(corpus)

    def test_a_file_that_ends_early_is_read_or_refused(self, corpus: Path) -> None:
        for file in list_files(corpus):
            content = file.read_bytes()
            for twentieth in range(20):
                file.write_bytes(content[: len(content) * twentieth // 20])
                self.refusal(corpus)
            file.write_bytes(content)

    @pytest.mark.parametrize("count", CHANGES)
    def test_a_file_with_changed_bytes_is_read_or_refused(
        self, count: int, corpus: Path
    ) -> None:
        rng = random.Random(self.format)
        contents = {file: file.read_bytes() for file in list_files(corpus)}
        for _ in range(count):
            file = rng.choice(list(contents))
            file.write_bytes(change_bytes(contents[file], rng))
            self.refusal(corpus)
            file.write_bytes(contents[file])

    def test_a_fifo_in_place_of_a_file_is_refused(self, corpus: Path) -> None:
        for file in list_files(corpus):
            content = file.read_bytes()
            file.unlink()
            os.mkfifo(file)
            assert "a FIFO, but only files are read" in self.refusal(corpus)
            file.unlink()
            file.write_bytes(content)
