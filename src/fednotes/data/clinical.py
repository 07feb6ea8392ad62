"""Clinical notes → sentences for pre-training, after Alsentzer et al. 2019, section
3.1.

    blocks         headers, answers to headers, list items, paragraphs; rules are dropped
    sentences      within a block, lines that were broken for their width put together

Placeholders of de-identification are text like any other, here as in annotated notes,
whose spans' offsets count them: what a model reads in pre-training it reads in
fine-tuning, evaluation and prediction. Their program (clinicalBERT's
`format_mimic_for_BERT.py`) keeps them too. It drops the first item of a list under a
header and cuts sentences with a learnt parser; here nothing but rules and white space
is lost, and nothing is learnt from notes. Every function is pure.
"""

from __future__ import annotations

import re
from typing import Final

from fednotes.core.types import Document
from fednotes.data.text import split_sentences

# raise it when the same note gives other sentences: caches name it
RECIPE: Final = "clinical-3"

# Of de-identification, in MIMIC-III and i2b2: [**2130-1-1**], [**Hospital1 18**].
# MIMIC-IV has ___.
PLACEHOLDER: Final = re.compile(r"\[\*\*([^\[\]]{0,200}?)\*\*\]")
_RULE = re.compile(r"[-_=*~#]{4,}")
_ONLY_RULE = re.compile(r"\s*[-_=*~#]{3,}\s*")
_ITEM = re.compile(
    r"\s*(?:(?:\d{1,2}|[a-zA-Z])[.)]\s+\S|#?\d{1,2}[.)]\s+\S|[-*•·+>#]{1,2}\s*[^\W_])"
)
_HEADER = re.compile(r"\s*([A-Z][^:\n]{0,60}):(?:\s|$)")
_COLUMN = re.compile(r"[ \t]{2,}(?=[A-Z][A-Za-z ]{1,40}:(?:\s|$))")
_BRACKETS = re.compile(r"\([^)]*\)")
_SMALL = frozenset("of on or and the for in to with at by from a an per".split())
_MOST_WORDS, _LONGEST = 8, 60  # words and characters of a header


def is_header(line: str) -> bool:
    """Whether a line is a section's title and nothing else.

    "History of Present Illness:", or "CHIEF COMPLAINT" in capitals without a colon.
    """
    body = line.strip()
    if len(body) > _LONGEST:
        return False
    if body.endswith(":"):
        return _is_title(body[:-1])
    letters = body.replace(" ", "").replace("/", "").replace("&", "")
    return letters.isalpha() and letters.isupper() and len(letters) > 3


def _is_title(text: str) -> bool:
    """Whether all words but small ones begin in upper case, and they are few."""
    words = _BRACKETS.sub(" ", text).split()
    few = 0 < len(words) <= _MOST_WORDS and text != "Disp"
    return few and all(word in _SMALL or word[0].isupper() for word in words)


def blocks(text: str) -> list[str]:
    """What a note is made of, in order, each block one line of text with single spaces.

    A block is a header with its one-line answer, a header, a list item, or a paragraph whose
    lines were broken for their width. Rules (`----`, `____`) end a block and are dropped.
    """
    width = _wrap_width(text)
    made: list[str] = []
    lines: list[str] = []
    for line in (*_lines(text), None):
        if lines and not _continues(lines[-1], line, width):
            made.append(" ".join(" ".join(lines).split()))
            lines = []
        if line is None:
            made.append("")  # a gap: a header is answered across no more than one
        else:
            lines.append(line)
    return _answered(made)


def _lines(text: str) -> list[str | None]:
    """Lines without rules, columns apart; None for a blank line or a rule."""
    found: list[str | None] = []
    for line in text.split("\n"):
        if not line or line.isspace() or _ONLY_RULE.fullmatch(line):
            found.append(None)
            continue
        for part in _RULE.split(line) if _RULE.search(line) else (line,):
            if part and not part.isspace():
                found.extend(p for p in _COLUMN.split(part) if p and not p.isspace())
            else:
                found.append(None)
    return found


_NARROWEST, _WIDEST = 50, 140  # characters of text that was broken for its width


def _wrap_width(text: str) -> int | None:
    """The width that a note's lines were broken for; None where each paragraph is one
    line.

    The upper quartile of lines that are long enough: tables and single wide lines
    hardly move it.
    """
    lengths = sorted(n for n in map(len, text.split("\n")) if n >= _NARROWEST)
    if not lengths:
        return None
    width = lengths[(3 * len(lengths)) // 4]
    return width if width <= _WIDEST else None


def _continues(before: str, line: str | None, width: int | None) -> bool:
    """Whether a line goes on with what stands in the line before it."""
    if line is None or is_header(before) or is_header(line):
        return False
    header = _HEADER.match(line)
    if _ITEM.match(line) or (header and _is_title(header.group(1))):
        return False
    body = line.lstrip()
    if body[0].islower():
        indented = len(line) - len(body) > len(before) - len(before.lstrip())
        return indented or len(before.rstrip()) >= 40
    if width is None:
        return False
    # The next word did not fit: the break was the margin's, not the writer's.
    return len(before.rstrip()) + 1 + len(body.split(None, 1)[0]) > width


def _answered(made: list[str]) -> list[str]:
    """Headers joined with an answer of one short line ("Allergies: Penicillins"); no
    gaps."""
    result: list[str] = []
    for position, block in enumerate(made):
        if not block:
            continue
        alone = (
            position + 1 == len(made)
            or not made[position + 1]
            or is_header(made[position + 1])
        )
        answers = position > 0 and made[position - 1] and is_header(made[position - 1])
        short = (
            len(block) <= _NARROWEST and not _ITEM.match(block) and not is_header(block)
        )
        if answers and alone and short and result[-1].endswith(":"):
            result[-1] = f"{result[-1]} {block}"
        else:
            result.append(block)
    return result


def sentences(text: str) -> list[str]:
    """The sentences of a note; none is empty, none holds a line end.

    All visible characters but those of rules are there, in order. A line end inside a
    placeholder parts nothing.
    """
    whole = PLACEHOLDER.sub(lambda match: " ".join(match.group().split()), text)
    found: list[str] = []
    for block in blocks(whole):
        found.extend(_cut(block))
    return found


# characters; the rule's time grows with the square of a stretch without an end
_WINDOW = 4000
_INSIDE = re.compile(r"(?<![.!?])[.!?]+[\"'\u201d\u2019)\]]*\s")


def _cut(block: str) -> list[str]:
    """The sentences of one block; one longer than the window is cut at a space."""
    found: list[str] = []
    at = 0
    while at < len(block):
        window = block[at : at + _WINDOW]
        bounds = [(0, len(window))]
        if _INSIDE.search(window):
            bounds = split_sentences(Document("", window))
        if len(window) == len(block) - at:
            at = len(block)
        elif len(bounds) > 1:
            at += bounds.pop()[0]  # the last one may go on: again, with what follows
        else:
            space = window.rfind(" ")
            bounds = [(0, space if space > 0 else len(window))]
            at += bounds[0][1]
        found += [window[start:end].strip() for start, end in bounds]
    return [sentence for sentence in found if sentence]
