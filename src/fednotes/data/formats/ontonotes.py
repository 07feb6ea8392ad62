"""OntoNotes 5.0 in the columns of the CoNLL-2012 shared task: a token a line.

    #begin document (nw/wsj/00/wsj_0001); part 000
    nw/wsj/00/wsj_0001   0   1   Vinken   NNP   *)   -   -   -   -   *)   *)   (8)

Columns, parted by white space: document, part, number of the word, word, part of speech, parse
bit, lemma, frameset, sense, speaker, named entity, then one column for each predicate of the
sentence and, last, coreference. Only word and named entity are read; `(GPE)`, `(ORG*`, `*` and
`*)` open and close mentions. Pradhan et al. 2013; the words have to be filled in from the LDC's
release first, by the scripts that come with the columns.
"""

from __future__ import annotations

import re
from pathlib import Path
from sys import intern

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import head, listing, read_text
from fednotes.data.formats.problems import Found, Problems, unique

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
    "/.": ".",
    "/?": "?",
    "/-": "-",
}


class _Part:
    """One part of a document while it is read."""

    def __init__(self, name: str, part: int) -> None:
        self.name, self.part = name, part
        self.lines: list[str] = []
        self.spans: list[Span] = []
        self.tokens: list[tuple[int, int]] = []
        self.bounds: list[tuple[int, int]] = []
        self._words: list[str] = []
        self._open: list[tuple[int, str]] = []
        self._begin = self._at = 0

    def add(self, word: str, bit: str) -> str:
        """One more word of the sentence; returns what is wrong with its entity column, or ""."""
        found = _BIT.fullmatch("*" if bit == "-" else bit)
        if found is None or not bit:
            return "column 11 is no named entity: expected *, (TYPE*, *) or (TYPE)"
        opened, _, closed = found.groups()
        start, end = self._at, self._at + len(word)
        self._open += [(start, intern(label)) for label in opened.split("(")[1:]]
        if len(closed) > len(self._open):
            return "column 11 closes a named entity that is not open"
        for _ in closed:
            begun, label = self._open.pop()
            self.spans.append(Span(begun, end, label))
        self._words.append(word)
        self.tokens.append((start, end))
        self._at = end + 1
        return ""

    def end_sentence(self) -> str:
        """Close the sentence; returns what is wrong with it, or ""."""
        if self._open:
            return f"a {self._open[-1][1]} is still open at the end of its sentence"
        if self._words:
            self.lines.append(" ".join(self._words))
            self.bounds.append((self._begin, self._at - 1))
            self._words, self._begin = [], self._at
        return ""

    def document(self) -> Document:
        return Document(
            f"{self.name}:{self.part}",
            "\n".join(self.lines),
            tuple(sorted(self.spans, key=lambda s: (s.start, -s.end, s.label))),
            meta={"genre": self.name.partition("/")[0]},
            sentences=tuple(self.bounds),
            tokens=tuple(self.tokens),
        )


def accepts(path: Path) -> bool:
    """Whether the file begins with a document of the shared task."""
    lines = head(path)
    return bool(lines) and _BEGIN.fullmatch(lines[0]) is not None


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document for each part of each document; `meta["genre"]`: nw, bc, bn, mz, tc, wb or pt.

    Words are joined by a space, sentences by a line end; brackets get their own form back
    (-LRB- is "("). Of a folder's files only those called `…gold_conll` are read if there are
    any: the same texts with automatic columns lie beside them. Noted, with the line, is
    what is wrong; with it its part of a document is left out.
    """
    files = listing(path, accepts, "OntoNotes in CoNLL-2012 columns")
    gold = [file for file in files if file.name.endswith("gold_conll")]
    found: list[Found] = []
    for file in gold or files:
        with problems.passing("file"):
            found += _read_file(file, problems)
    return unique(found, problems)


def _read_file(path: Path, problems: Problems) -> list[Found]:
    documents: list[Found] = []
    part: _Part | None = None
    number = begun = 0
    damaged, before = False, problems.number
    for number, line in enumerate(read_text(path).split("\n"), 1):
        row = line.split()
        wrong = ""
        if damaged and not line.startswith("#begin"):
            continue
        if line.startswith("#begin"):
            begin = _BEGIN.fullmatch(line)
            if begin is None or part is not None:
                wrong = "a document begins inside another" if begin else "no name of a document"
            else:
                part, begun, damaged = _Part(begin[1], int(begin[2] or 0)), number, False
        elif part is None:
            wrong = "this stands before `#begin document (…)`" if row else ""
        elif not row or line.startswith("#end"):
            wrong = part.end_sentence()
            if row and not wrong:
                documents += [Found(part.document(), path, begun)] if part.tokens else []
                part = None
        elif len(row) <= _ENTITY:
            wrong = f"{len(row)} columns, expected 12 or more"
        else:
            wrong = part.add(_BRACKETS.get(row[_WORD], row[_WORD]), row[_ENTITY])
        if wrong:
            problems.add(DataError.at(path, number, wrong), "document")
            part, damaged = None, True
    if part is not None:
        error = DataError.at(path, number, "the file ends before `#end document`")
        problems.add(error, "document")
    if not documents and problems.number == before:
        raise DataError.at(path, 0, "the file holds no tokens")
    return _with_words(path, documents)


def _with_words(path: Path, documents: list[Found]) -> list[Found]:
    """The columns as they are given out have no words, only [WORD]."""
    if documents and all(set(found.document.text.split()) <= {"[WORD]"} for found in documents):
        raise DataError.at(
            path,
            0,
            "the words are missing ([WORD]): fill them in from the LDC's release with "
            "the script skeleton2conll of the shared task",
        )
    return documents
