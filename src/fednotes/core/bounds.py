"""Bounds for data from files and from other parties.

For any input, a reader ends within seconds and in bounded memory. Each bound is far
above anything in clinical corpora, so a user who exceeds one has probably named the
wrong file. Readers look bounds up on use (`bounds.NOTE`), so a test can set them in one
place.
"""

from __future__ import annotations

# ---- text ----------------------------------------------------------------------------

NOTE = 2**24  # characters of one note; the longest note of MIMIC-III has some 55,000
# Characters of a line of JSON or of a row of a table; more is an unclosed quote.
LINE = 2**26
TOKEN_LINE = 2**20  # characters of a line of CoNLL, which holds one token
FILE = 2**26  # bytes of a file that is read as a whole: JSON, a text, its annotations
MARKUP = 2**20  # bytes of one tag, comment or declaration of XML

# ---- packed files --------------------------------------------------------------------

# Text compresses to about a tenth of its size, so a file that grows a hundredfold is a
# decompression bomb. Short files may be more regular, so anything up to PACKED_FREE
# bytes is unpacked.
PACKED_RATIO = 100
PACKED_FREE = 2**24

# ---- annotations ---------------------------------------------------------------------

MENTIONS = 100_000  # in one document
TOKENS = 2**20  # in one document with its own tokens
PIECES = 1000  # in one discontinuous mention
ENTITY_TYPES = 10_000  # in one corpus

# ---- JSON ----------------------------------------------------------------------------

# A parsed value takes up to a hundred times the memory of its text, and nesting uses
# the interpreter's stack, so both are bounded before parsing.
JSON_VALUES = 2**21  # about 400 MB of memory at worst
JSON_DEPTH = 64  # nested objects and lists

# ---- binary corpora ------------------------------------------------------------------

ARROW_BYTES = 2**28  # of one batch of rows in Parquet or Arrow
DOCBIN_BYTES = 2**29  # of a DocBin, unpacked
