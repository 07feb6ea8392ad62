"""The bounds of what is read from files and from other parties.

A reader ends within seconds and in bounded memory, whatever it is given. Each bound
lies far above what clinical corpora hold, so whoever meets one has most likely named
the wrong file. Readers look a bound up when they need it (`bounds.NOTE`), so a test can
set it in this one place.
"""

from __future__ import annotations

# ---- text ----------------------------------------------------------------------------

NOTE = 2**24  # characters of one note; the longest note of MIMIC-III has some 55,000
LINE = (
    2**26
)  # characters of a line of JSON or of a row of a table; more is an unclosed quote
TOKEN_LINE = 2**20  # characters of a line of CoNLL, which holds one token
FILE = 2**26  # bytes of a file that is read as a whole: JSON, a text, its annotations
MARKUP = 2**20  # bytes of one tag, comment or declaration of XML

# ---- packed files --------------------------------------------------------------------

# Text packs to a tenth or so of its size, so a file that grows a hundredfold is a bomb.
# Short files may be more regular than that: up to PACKED_FREE bytes, anything is
# unpacked.
PACKED_RATIO = 100
PACKED_FREE = 2**24

# ---- annotations ---------------------------------------------------------------------

MENTIONS = 100_000  # of one document
TOKENS = 2**20  # of one document that brings its own tokens
PIECES = 1000  # of one discontinuous mention
ENTITY_TYPES = 10_000  # of one corpus

# ---- JSON ----------------------------------------------------------------------------

# A value in memory takes up to a hundred times its bytes of text, and a nested one the
# interpreter's stack; so both are bounded before anything is parsed.
JSON_VALUES = 2**21  # about 400 MB of memory at worst
JSON_DEPTH = 64  # tables and lists in each other

# ---- binary corpora ------------------------------------------------------------------

ARROW_BYTES = 2**28  # of one batch of rows of Parquet or Arrow
DOCBIN_BYTES = 2**29  # of a DocBin, unpacked
