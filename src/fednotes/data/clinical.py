"""Clinical notes → sentences for pre-training, after Alsentzer et al. 2019, section 3.1.

    placeholders   [**2130-1-1**] → date, [**Hospital1 18**] → hospital, ___ → name …
    blocks         headers, answers to headers, list items, paragraphs; rules are dropped
    sentences      within a block, lines that were broken for their width put together

Their program (clinicalBERT's `format_mimic_for_BERT.py`) drops the first item of a list under a
header and cuts sentences with a learnt parser; here nothing but placeholders, rules and white
space is lost, and nothing is learnt from notes. Every function is pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from fednotes.core.types import Document
from fednotes.data.text import split_sentences

RECIPE: Final = "clinical-2"  # raise it when the same note gives other sentences: caches name it

_PLACEHOLDER = re.compile(r"\[\*\*([^\[\]]{0,200}?)\*\*\]")
_DIGITS = re.compile(r"[\s/.:-]*\d[\d\s/.:-]*")
_LONG_NUMBER = re.compile(r"\D*\d{5,}\D*")
# The first kind one of whose words is in the placeholder names it.
_KINDS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    (
        "date",
        re.compile(
            r"date|month|year|holiday|day\b|january|february|march|april|may\b|june|july|august"
            r"|september|october|november|december"
        ),
    ),
    ("hospital", re.compile(r"hospital|ward|clinic\b|medical center|\bunit name|\bicu\b")),
    (
        "number",
        re.compile(r"number|numeric|telephone|fax|pager|phone|\bage\b|identifier|\bzip\b|\bssn\b"),
    ),
    (
        "place",
        re.compile(r"location|address|street|\bcity\b|state|country|po box|apartment|\burl\b"),
    ),
    ("organization", re.compile(r"company|university|college|organi[sz]ation|institut")),
)
_OTHER = "name"  # first, last, doctor's, initials … and anything rare


# MIMIC-IV: three underscores, whatever they hide. Alone on a line they answer nothing and go as
# any rule does; four or more are a rule in both.
_BLANK = re.compile(r"(?<!_)___(?!_)")
_LABEL = re.compile(r"([^:\n]{1,40}):\s*\Z")
_LAST_WORD = re.compile(r"([A-Za-z]+)\W{0,3}\Z")
_AGE = re.compile(r"[\s-]{0,2}(?:y/?o\b|y\.o|years?\b|yrs?\b)", re.IGNORECASE)
_NUMBERED = re.compile(r"\bno\b|#|\bmrn\b|\bid\b")
_AFTER: Final = dict.fromkeys("on in since until during before after".split(), "date") | (
    dict.fromkeys("at to from".split(), "hospital")
)


def replace_placeholders(text: str) -> str:
    """De-identification placeholders of MIMIC-III and MIMIC-IV as one neutral word each.

    The word is date, hospital, number, place, organization or name. MIMIC-IV's `___` says
    nothing of what it hides: a label before it, a preposition, or an age after it tells, else
    it is a name. A space parts the word from a letter or digit that touches it. An opening
    `[**` that is never closed stays.
    """
    text = _replaced(_PLACEHOLDER, text, lambda match: _kind(match.group(1)))
    return _replaced(_BLANK, text, _kind_of_blank) if "___" in text else text


def _replaced(
    pattern: re.Pattern[str], text: str, word: Callable[[re.Match[str]], str | None]
) -> str:
    """Each match replaced by its word, set apart from what touches it; None leaves it."""
    parts: list[str] = []
    end = 0
    for match in pattern.finditer(text):
        neutral = word(match)
        if neutral is None:
            continue
        start = match.start()
        parts.append(text[end:start])
        if start and (start == end or text[start - 1].isalnum()):
            parts.append(" ")
        parts.append(neutral)
        end = match.end()
        if text[end : end + 1].isalnum():
            parts.append(" ")
    return "".join(parts) + text[end:] if parts else text


def _kind_of_blank(match: re.Match[str]) -> str | None:
    """The neutral word for `___` by what stands around it; None where it fills its line."""
    text, start, end = match.string, match.start(), match.end()
    before = text[max(0, start - 60) : start].rpartition("\n")[2]
    after = text[end : end + 60].partition("\n")[0]
    if not before.strip() and not after.strip():
        return None
    if _AGE.match(after):
        return "number"
    if label := _LABEL.search(before):
        lower = label.group(1).lower()
        found = next((word for word, pattern in _KINDS if pattern.search(lower)), None)
        return found or ("number" if _NUMBERED.search(lower) else _OTHER)
    last = _LAST_WORD.search(before)
    return _AFTER.get(last.group(1).lower(), _OTHER) if last else _OTHER


def _kind(content: str) -> str:
    """The neutral word for what a placeholder says it hides."""
    if _DIGITS.fullmatch(content):
        return "number" if _LONG_NUMBER.fullmatch(content) else "date"
    lower = " ".join(content.lower().split())
    return next((word for word, pattern in _KINDS if pattern.search(lower)), _OTHER)


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
_NO_HEADERS = frozenset({"Disp"})


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
    if not words or len(words) > _MOST_WORDS or text in _NO_HEADERS:
        return False
    return all(word in _SMALL or word[0].isupper() for word in words)


def _begins_with_title(line: str) -> bool:
    found = _HEADER.match(line)
    return found is not None and _is_title(found.group(1))


def blocks(text: str) -> list[str]:
    """What a note is made of, in order, each block one line of text with single spaces.

    A block is a header with its one-line answer, a header, a list item, or a paragraph whose
    lines were broken for their width. Rules (`----`, `____`) end a block and are dropped.
    """
    width = _wrap_width(text)
    made: list[str] = []
    lines: list[str] = []
    for line in _lines(text):
        if lines and not _continues(lines[-1], line, width):
            made.append(" ".join(" ".join(lines).split()))
            lines = []
        if line is None:
            made.append("")  # a gap: a header is answered across no more than one
        else:
            lines.append(line)
    if lines:
        made.append(" ".join(" ".join(lines).split()))
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
    """The width that a note's lines were broken for; None where each paragraph is one line.

    The upper quartile of lines that are long enough: tables and single wide lines hardly move it.
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
    if _ITEM.match(line) or _begins_with_title(line):
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
    """Headers joined with an answer of one short line ("Allergies: Penicillins"); no gaps."""
    result: list[str] = []
    for position, block in enumerate(made):
        if not block:
            continue
        alone = position + 1 == len(made) or not made[position + 1] or is_header(made[position + 1])
        answers = position > 0 and made[position - 1] and is_header(made[position - 1])
        short = len(block) <= _NARROWEST and not _ITEM.match(block) and not is_header(block)
        if answers and alone and short and result[-1].endswith(":"):
            result[-1] = f"{result[-1]} {block}"
        else:
            result.append(block)
    return result


def sections(text: str) -> list[list[str]]:
    """The blocks of a note, a list for each section: a header opens one."""
    made: list[list[str]] = []
    for block in blocks(text):
        if not made or is_header(block) or _begins_with_title(block):
            made.append([])
        made[-1].append(block)
    return made


def sentences(text: str) -> list[str]:
    """The sentences of a note, placeholders replaced; none is empty, none holds a line end.

    All visible characters outside placeholders and rules are there, in order.
    """
    found: list[str] = []
    for block in blocks(replace_placeholders(text)):
        found.extend(_cut(block))
    return found


_WINDOW = 4000  # characters; the rule's time grows with the square of a stretch without an end
_INSIDE = re.compile(r"(?<![.!?])[.!?]+[\"'\u201d\u2019)\]]*\s")


def _cut(block: str) -> list[str]:
    """The sentences of one block; one longer than the window is cut at a space."""
    found: list[str] = []
    at = 0
    while at < len(block):
        window = block[at : at + _WINDOW]
        whole = len(window) == len(block) - at
        if _INSIDE.search(window) is None:
            bounds = [(0, len(window))]
        else:
            bounds = split_sentences(Document("", window))
        if not whole and len(bounds) > 1:
            at += bounds.pop()[0]  # the last one may go on: again, with what follows
        elif not whole:
            space = window.rfind(" ")
            bounds = [(0, space if space > 0 else len(window))]
            at += bounds[0][1]
        else:
            at = len(block)
        found.extend(window[start:end].strip() for start, end in bounds)
    return [sentence for sentence in found if sentence]
