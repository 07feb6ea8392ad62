"""OntoNotes 5.0 in the columns of the CoNLL-2012 shared task: a token a line.

    #begin document (nw/wsj/00/wsj_0001); part 000
    nw/wsj/00/wsj_0001   0   1   Vinken   NNP   *)   -   -   -   -   *)   *)   (8)

Columns, parted by white space: document, part, number of the word, word, part of
speech, parse bit, lemma, frameset, sense, speaker, named entity, then one column for
each predicate of the sentence and, last, coreference. Only word and named entity are
read; `(GPE)`, `(ORG*`, `*` and `*)` open and close mentions. Pradhan et al. 2013; the
words have to be filled in from the LDC's release first, by the scripts that come with
the columns.
"""

from __future__ import annotations

import re
from pathlib import Path
from sys import intern

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import read_first_line, read_text
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather
from fednotes.data.formats.mentions import lay_out
from fednotes.data.formats.problems import Problems

LOOSE = 0
_BEGIN = re.compile(r"#begin document \(([^()\s]+)\)(?:;\s*part\s+(\d+))?\s*")
_WORD, _ENTITY = 3, 10  # columns
_BIT = re.compile(r"((?:\([^()*\s]+)*)(\*?)(\)*)")
_BRACKETS = {
    "-LRB-": "(",
    "-RRB-": ")",
    "-LSB-": "[",
    "-RSB-": "]",
    "-LCB-": "{",
    "-RCB-": "}",
}
_FORMS = {**_BRACKETS, "/.": ".", "/?": "?", "/-": "-"}


class _Part:
    """One part of a document while it is read."""

    def __init__(self, name: str, part: int, line: int) -> None:
        self.name, self.part, self.line = name, part, line
        self._sentences: list[list[str]] = [[]]
        self._number = 0  # words so far
        self._open: list[tuple[int, str]] = []  # first word, type
        self._mentions: list[tuple[int, int, str]] = []  # first and last word, type

    def add(self, row: list[str]) -> None:
        """One more word of the sentence. Raises DataError for a row that is none."""
        if len(row) <= _ENTITY:
            raise DataError(f"{len(row)} columns, expected 12 or more")
        found = _BIT.fullmatch("*" if row[_ENTITY] == "-" else row[_ENTITY])
        if found is None:
            raise DataError(
                "column 11 is no named entity: expected *, (TYPE*, *) or (TYPE)"
            )
        self._open += [
            (self._number, intern(label)) for label in found[1].split("(")[1:]
        ]
        if len(found[3]) > len(self._open):
            raise DataError("column 11 closes a named entity that is not open")
        for _ in found[3]:
            first, label = self._open.pop()
            self._mentions.append((first, self._number, label))
        self._sentences[-1].append(_FORMS.get(row[_WORD], row[_WORD]))
        self._number += 1

    def end_sentence(self) -> None:
        """Close the sentence. Raises DataError for a mention that goes on."""
        if self._open:
            raise DataError(
                f"a {self._open[-1][1]} is still open at the end of its sentence"
            )
        if self._sentences[-1]:
            self._sentences.append([])

    def document(self) -> Document:
        text, sentences, tokens = lay_out(self._sentences[:-1])
        spans = [
            Span(tokens[a][0], tokens[b][1], label) for a, b, label in self._mentions
        ]
        return Document(
            f"{self.name}:{self.part}",
            text,
            tuple(sorted(spans, key=lambda s: (s.start, -s.end, s.label))),
            meta={"genre": self.name.partition("/")[0]},
            sentences=sentences,
            tokens=tokens,
        )


def accepts(path: Path) -> bool:
    """Whether the file begins with a document of the shared task."""
    return _BEGIN.fullmatch(read_first_line(path)) is not None


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document for each part of each document; `meta["genre"]`: nw, bc, bn, mz, tc,
    wb or pt.

    Words are joined by a space, sentences by a line end; brackets get their own form
    back (-LRB- is "("). Of a folder's files only those called `…gold_conll` are read if
    there are
    any: the same texts with automatic columns lie beside them. Noted, with the line, is
    what is wrong; with it its part of a document is left out.
    """
    files = find_corpus_files(path, accepts, "OntoNotes in CoNLL-2012 columns")
    gold = [file for file in files if file.name.endswith("gold_conll")]
    return gather(gold or files, _read_file, problems)


def _read_file(path: Path, problems: Problems) -> list[ReadDocument]:
    documents: list[ReadDocument] = []
    part: _Part | None = None
    number, damaged, before = 0, False, problems.number
    for number, line in enumerate(read_text(path).split("\n"), 1):
        row = line.split()
        if damaged and not line.startswith("#begin"):
            continue
        with problems.collect("document", path, number) as wrong:
            if line.startswith("#begin"):
                part, damaged = _begun(line, part, number), False
            elif part is None:
                if row:
                    raise DataError("this stands before `#begin document (…)`")
            elif not row or line.startswith("#end"):
                part.end_sentence()
                if row:
                    document = part.document()
                    documents += (
                        [ReadDocument(document, path, part.line)]
                        if document.tokens
                        else []
                    )
                    part = None
            else:
                part.add(row)
        if wrong:
            part, damaged = None, True
    if part is not None:
        problems.note("document", path, number, "the file ends before `#end document`")
    if not documents and problems.number == before:
        raise DataError("the file holds no tokens")
    # The columns as they are given out have no words.
    if documents and all(
        set(found.document.text.split()) <= {"[WORD]"} for found in documents
    ):
        raise DataError(
            "the words are missing ([WORD]): fill them in from the LDC's release with "
            "the script skeleton2conll of the shared task"
        )
    return documents


def _begun(line: str, before: _Part | None, number: int) -> _Part:
    begin = _BEGIN.fullmatch(line)
    if begin is None:
        raise DataError("no name of a document")
    if before is not None:
        raise DataError("a document begins inside another")
    return _Part(begin[1], int(begin[2] or 0), number)
