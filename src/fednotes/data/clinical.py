"""Sentence splitting of clinical notes for pre-training, after Alsentzer et al. 2019.

    blocks         headers, answers to headers, list items and paragraphs; rules (----)
                   are dropped
    sentences      within a block, after joining wrapped lines

De-identification placeholders are ordinary text, as in annotated notes, where they
count in the offsets of spans: a model then reads the same text in pre-training as in
fine-tuning, evaluation and prediction. The authors' program (clinicalBERT's
`format_mimic_for_BERT.py`) also keeps them (section 3.1). However, it drops the first
item of a list under a header and splits sentences with a trained parser. Here only
rules and white space are lost, and nothing is learned from notes. Every function is
pure.
"""

from __future__ import annotations

import re
from typing import Final

from fednotes.core.types import Document
from fednotes.data.text import split_sentences

# Part of cache keys: change it if the same note yields different sentences.
RECIPE: Final = "clinical-3"

# De-identification in MIMIC-III and i2b2: [**2130-1-1**], [**Hospital1 18**]. MIMIC-IV
# has ___.
PLACEHOLDER: Final = re.compile(r"\[\*\*([^\[\]]{0,200}?)\*\*\]")
_RULE = re.compile(r"[-_=*~#]{4,}")
_ONLY_RULE = re.compile(r"\s*[-_=*~#]{3,}\s*")
_ITEM = re.compile(
    r"\s*(?:(?:\d{1,2}|[a-zA-Z])[.)]\s+\S|#?\d{1,2}[.)]\s+\S|[-*•·+>#]{1,2}\s*[^\W_])"
)
_HEADER = re.compile(r"\s*([A-Z][^:\n]{0,60}):(?:\s|$)")
# The match starts at the first blank; otherwise it would be tried from each one.
_COLUMN = re.compile(r"(?<![ \t])[ \t]{2,}+(?=[A-Z][A-Za-z ]{1,40}:(?:\s|$))")
_BRACKETS = re.compile(r"\([^)]*\)")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]+[\"'\u201d\u2019)\]]*\s")
_SMALL_WORDS = frozenset("of on or and the for in to with at by from a an per".split())
_MAX_HEADER_WORDS = 8
_MAX_HEADER_LENGTH = 60  # characters
_MIN_CAPITALS = 4  # minimum letters of a header in capitals
# Lengths of wrapped lines, in characters.
_MIN_WIDTH = 50
_MAX_WIDTH = 140
_MIN_CONTINUED = 40  # minimum characters of a line that continues in lower case
# Characters that are split at once; the sentence rule takes quadratic time in a stretch
# without an end mark.
_WINDOW = 4000


def is_header(line: str) -> bool:
    """Return whether a line consists only of a section title.

    Examples are "History of Present Illness:", and "CHIEF COMPLAINT" in capitals
    without a colon.
    """
    body = line.strip()
    if len(body) > _MAX_HEADER_LENGTH:
        return False
    if body.endswith(":"):
        return _is_title(body[:-1])
    letters = body.replace(" ", "").replace("/", "").replace("&", "")
    return letters.isalpha() and letters.isupper() and len(letters) >= _MIN_CAPITALS


def _is_title(text: str) -> bool:
    """Return whether a text is a few words, capitalised except small ones."""
    words = _BRACKETS.sub(" ", text).split()
    if not words or len(words) > _MAX_HEADER_WORDS or text == "Disp":
        return False
    return all(word in _SMALL_WORDS or word[0].isupper() for word in words)


def list_note_blocks(text: str) -> list[str]:
    """Return the blocks of a note in order, each as one line with single spaces.

    A block is a header with its one-line answer, a header, a list item, or a paragraph
    of wrapped lines. Rules (`----`, `____`) end a block and are dropped.
    """
    width = _guess_wrap_width(text)
    parts: list[str] = []  # blocks, with "" for gaps
    lines: list[str] = []
    for line in (*_split_lines(text), None):
        if lines and not _is_continuation(lines[-1], line, width):
            parts.append(" ".join(" ".join(lines).split()))
            lines = []
        if line is None:
            parts.append("")
        else:
            lines.append(line)
    return _join_answers(parts)


def _split_lines(text: str) -> list[str | None]:
    """Return the lines of a note, split at rules and columns; None stands for a gap."""
    lines: list[str | None] = []
    for line in text.split("\n"):
        if not line or line.isspace() or _ONLY_RULE.fullmatch(line):
            lines.append(None)
            continue
        parts = _RULE.split(line) if _RULE.search(line) else [line]
        for part in parts:
            if not part or part.isspace():
                lines.append(None)
                continue
            columns = _COLUMN.split(part)
            lines += [each for each in columns if each and not each.isspace()]
    return lines


def _guess_wrap_width(text: str) -> int | None:
    """Return the width at which a note's lines were wrapped; None if they were not.

    It is the upper quartile of sufficiently long lines, which tables and single wide
    lines hardly affect. If each paragraph is one line, the quartile is too large for a
    width.
    """
    lengths = sorted(len(line) for line in text.split("\n") if len(line) >= _MIN_WIDTH)
    if not lengths:
        return None
    width = lengths[(3 * len(lengths)) // 4]
    return width if width <= _MAX_WIDTH else None


def _is_continuation(before: str, line: str | None, width: int | None) -> bool:
    """Return whether a line continues the sentence or paragraph of the line before.

    Args:
        before: The line before.
        line: The line; None for a gap or the end of the note.
        width: The width at which the note's lines were wrapped, or None.
    """
    if line is None or is_header(before) or is_header(line):
        return False
    header = _HEADER.match(line)
    if _ITEM.match(line) or (header and _is_title(header.group(1))):
        return False
    body = line.lstrip()
    if body[0].islower():
        is_indented = len(line) - len(body) > len(before) - len(before.lstrip())
        return is_indented or len(before.rstrip()) >= _MIN_CONTINUED
    if width is None:
        return False
    # If the next word would not have fitted, the line was wrapped at the margin.
    first_word = body.split(None, 1)[0]
    return len(before.rstrip()) + 1 + len(first_word) > width


def _join_answers(parts: list[str]) -> list[str]:
    """Return blocks, joining each header with an answer of one short line.

    An example is "Allergies: Penicillins".

    Args:
        parts: Blocks, and "" for gaps.
    """
    joined: list[str] = []
    for position, block in enumerate(parts):
        if not block:
            continue
        if _is_answer(parts, position) and joined[-1].endswith(":"):
            joined[-1] = f"{joined[-1]} {block}"
        else:
            joined.append(block)
    return joined


def _is_answer(parts: list[str], position: int) -> bool:
    """Return whether a block is a single short line after a header."""
    if position == 0 or not is_header(parts[position - 1]):
        return False
    block = parts[position]
    if len(block) > _MIN_WIDTH or _ITEM.match(block) or is_header(block):
        return False
    if position + 1 == len(parts):
        return True
    following = parts[position + 1]
    return not following or is_header(following)


def list_note_sentences(text: str) -> list[str]:
    """Return the sentences of a note, none of them empty or with a line end.

    All visible characters except those of rules are kept, in order. A line end inside a
    placeholder does not separate sentences.
    """
    unbroken = PLACEHOLDER.sub(lambda match: " ".join(match.group().split()), text)
    return [
        sentence
        for block in list_note_blocks(unbroken)
        for sentence in _cut_sentences(block)
    ]


def _cut_sentences(block: str) -> list[str]:
    """Return the sentences of one block, cutting very long ones at a space."""
    cut: list[str] = []
    at = 0
    while at < len(block):
        window = block[at : at + _WINDOW]
        bounds = [(0, len(window))]
        if _SENTENCE_END.search(window):
            bounds = split_sentences(Document("", window))
        if len(window) == len(block) - at:
            at = len(block)
        elif len(bounds) > 1:
            # The last sentence may continue, so it is split again with the text that
            # follows.
            last_start, _ = bounds.pop()
            at += last_start
        else:
            space = window.rfind(" ")
            end = space if space > 0 else len(window)
            bounds = [(0, end)]
            at += end
        cut += [window[start:end].strip() for start, end in bounds]
    return [sentence for sentence in cut if sentence]
