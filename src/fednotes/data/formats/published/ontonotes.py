"""OntoNotes 5.0 in the columns of the CoNLL-2012 shared task: a token per line.

    #begin document (nw/wsj/00/wsj_0001); part 000
    nw/wsj/00/wsj_0001   0   1   Vinken   NNP   *)   -   -   -   -   *)   *)   (8)

Columns, separated by white space: document, part, number of the word, word, part of
speech, parse bit, lemma, frameset, sense, speaker, named entity, then one column for
each predicate of the sentence and, last, coreference. Only word and named entity are
read; `(GPE)`, `(ORG*`, `*` and `*)` open and close mentions (Pradhan et al. 2013). The
words must first be filled in from the LDC's release, with the scripts of the shared
task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from sys import intern

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import read_first_line, read_text
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents
from fednotes.data.formats.mentions import lay_out
from fednotes.data.formats.problems import Problems

LOOSE = 0
_BEGIN = re.compile(r"#begin document \(([^()\s]+)\)(?:;\s*part\s+([0-9]{1,9}))?\s*")
_WORD_COLUMN = 3
_ENTITY_COLUMN = 10
_ENTITY = re.compile(r"((?:\([^()*\s]+)*)(\*?)(\)*)")
_MISSING_WORD = "[WORD]"
# The spelling of words in the original texts.
_ORIGINAL_FORMS = {
    "-LRB-": "(",
    "-RRB-": ")",
    "-LSB-": "[",
    "-RSB-": "]",
    "-LCB-": "{",
    "-RCB-": "}",
    "/.": ".",
    "/?": "?",
    "/-": "-",
}


class _Part:
    """A part of a document while it is read.

    Args:
        name: The name of the document.
        number: The number of the part.
        line: The line that begins it.
    """

    def __init__(self, name: str, number: int, line: int) -> None:
        self.line = line
        self._name = name
        self._number = number
        self._sentences: list[list[str]] = [[]]
        self._words = 0
        self._open: list[tuple[int, str]] = []  # first word and type
        self._mentions: list[tuple[int, int, str]] = []  # first and last word, type

    def add_word(self, row: list[str]) -> None:
        """Add a word to the sentence.

        Raises:
            DataError: The row has too few columns, or no valid named entity.
        """
        if len(row) <= _ENTITY_COLUMN:
            raise DataError(f"{len(row)} columns, expected 12 or more")
        entity = "*" if row[_ENTITY_COLUMN] == "-" else row[_ENTITY_COLUMN]
        match = _ENTITY.fullmatch(entity)
        if match is None:
            raise DataError(
                "column 11 is not a named entity: expected *, (TYPE*, *) or (TYPE)"
            )
        opening, _, closing = match.groups()
        for label in opening.split("(")[1:]:
            self._open.append((self._words, intern(label)))
        if len(closing) > len(self._open):
            raise DataError("column 11 closes a named entity that is not open")
        for _ in closing:
            first, label = self._open.pop()
            self._mentions.append((first, self._words, label))
        word = row[_WORD_COLUMN]
        self._sentences[-1].append(_ORIGINAL_FORMS.get(word, word))
        self._words += 1

    def end_sentence(self) -> None:
        """End the sentence.

        Raises:
            DataError: A mention is still open.
        """
        if self._open:
            _, label = self._open[-1]
            raise DataError(f"a {label} is still open at the end of its sentence")
        if self._sentences[-1]:
            self._sentences.append([])

    def to_document(self) -> Document:
        """Return the document of the part."""
        text, sentences, tokens = lay_out(self._sentences[:-1])
        spans = [
            Span(tokens[first][0], tokens[last][1], label)
            for first, last, label in self._mentions
        ]
        return Document(
            id=f"{self._name}:{self._number}",
            text=text,
            spans=tuple(sorted(spans, key=lambda s: (s.start, -s.end, s.label))),
            meta={"genre": self._name.partition("/")[0]},
            sentences=sentences,
            tokens=tokens,
        )


def accepts(path: Path) -> bool:
    """Return whether the file begins with a document of the shared task."""
    return _BEGIN.fullmatch(read_first_line(path)) is not None


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document for each part.

    `meta["genre"]` is nw, bc, bn, mz, tc, wb or pt. Words are joined by spaces and
    sentences by line ends; brackets get their original form (-LRB- is "("). If a folder
    contains files whose names end in `gold_conll`, only these are read, because the
    others are the same texts with automatic columns. An error is added to `problems`
    with its line, and its part is left out.
    """
    files = find_corpus_files(path, accepts, "OntoNotes in CoNLL-2012 columns")
    gold_files = [file for file in files if file.name.endswith("gold_conll")]
    return gather_documents(gold_files or files, _read_file, problems)


def _read_file(path: Path, problems: Problems) -> list[ReadDocument]:
    """Return the documents of a file."""
    problems_before = problems.number
    documents = list(_read_parts(path, problems))
    if not documents and problems.number == problems_before:
        raise DataError("the file contains no tokens")
    # The corpus is published without its words.
    if documents and all(_lacks_words(item.document) for item in documents):
        raise DataError(
            "the words are missing ([WORD]): fill them in from the LDC's release with "
            "the script skeleton2conll of the shared task"
        )
    return documents


def _lacks_words(document: Document) -> bool:
    """Return whether all words of a document are placeholders."""
    return set(document.text.split()) <= {_MISSING_WORD}


def _read_parts(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the parts of a file that have tokens."""
    part: _Part | None = None
    is_damaged = False
    number = 0
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if is_damaged and not line.startswith("#begin"):
            continue
        is_damaged = False
        before = part
        with problems.collecting("document", path, number) as errors:
            part = _read_line(line, part, number)
        if errors:
            part = None
            is_damaged = True
        elif before is not None and part is None:
            document = before.to_document()
            if document.tokens:
                yield ReadDocument(document, path, before.line)
    if part is not None:
        problems.note("document", path, number, "the file ends before `#end document`")


def _read_line(line: str, part: _Part | None, number: int) -> _Part | None:
    """Return the current part after a line; None at its end.

    Args:
        line: The line.
        part: The current part, if any.
        number: The number of the line.

    Raises:
        DataError: The line does not belong here.
    """
    if line.startswith("#begin"):
        return _begin_part(line, part, number)
    row = line.split()
    if part is None:
        if row:
            raise DataError("this line comes before `#begin document (…)`")
        return None
    if line.startswith("#end"):
        part.end_sentence()
        return None
    if row:
        part.add_word(row)
    else:
        part.end_sentence()
    return part


def _begin_part(line: str, current: _Part | None, number: int) -> _Part:
    """Return the part that a line begins.

    Args:
        line: The line.
        current: The current part, if any.
        number: The number of the line.

    Raises:
        DataError: The line has no name, or the previous part has not ended.
    """
    match = _BEGIN.fullmatch(line)
    if match is None:
        raise DataError("not the name of a document")
    if current is not None:
        raise DataError("a document begins inside another")
    return _Part(match[1], int(match[2] or 0), number)
