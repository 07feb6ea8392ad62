"""Corpora in many formats: read and write documents, one module per format.

A module of this folder, or of `published/`, is a format if it has these two functions;
the format's name is that of the module:

    accepts(path)           whether one file looks like the format, by its content
    read(path, problems)    the documents of a file or folder; the reader notes what it
                            cannot use and continues

A format may also have `stream(path, problems)`, which yields the documents one by one,
each with its place, and `write(documents, path)`. What a format cannot represent is not
declared but measured: `write` reads everything that it wrote and compares it before it
puts it in its place. Other packages add formats by entry points (`core/plugins.py`).

Modules whose names begin with an underscore hold the functions below; the others
(`files`, `folders`, `problems`, `gathering`, `mentions`, …) are what readers share.
"""

from fednotes.data.formats._comparison import differences
from fednotes.data.formats._conversion import Conversion, convert, format_table
from fednotes.data.formats._reading import examine, read, stream
from fednotes.data.formats._registry import (
    FORMATS,
    discover,
    guess_format,
    known_corpora,
    writable_formats,
)
from fednotes.data.formats._writing import LossyError, measure_loss, write
from fednotes.data.formats.problems import OnError, Problems

__all__ = [
    "FORMATS",
    "Conversion",
    "LossyError",
    "OnError",
    "Problems",
    "convert",
    "differences",
    "discover",
    "examine",
    "format_table",
    "guess_format",
    "known_corpora",
    "measure_loss",
    "read",
    "stream",
    "writable_formats",
    "write",
]
