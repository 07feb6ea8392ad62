"""The corpora that the readers and experiments know: what they are and where to obtain them.

None ships with fednotes. They stand in `catalogue.toml`; `licence` and `source` tell a person
what to expect; the site that gives a corpus out decides on its terms. Sizes are those of the
publications, or of the files.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Corpus:
    """One corpus.

    name: as used in job files. what: texts and annotation. size: roughly. licence: terms in
    words. source: where a person obtains it. reference: DOI of the publication or official
    site. format: the reader (`data/formats`) that takes it, "" where no notes are annotated
    with spans. types: entity types, if it has any. restricted: needs an agreement.
    """

    name: str
    what: str
    size: str
    licence: str
    source: str
    reference: str
    format: str = ""
    types: tuple[str, ...] = ()
    restricted: bool = False


def corpora() -> list[Corpus]:
    """All of them."""
    text = resources.files("fednotes.data").joinpath("catalogue.toml").read_text("utf-8")
    return [
        Corpus(name, **fields | {"types": tuple(fields.get("types", ()))})
        for name, fields in tomllib.loads(text).items()
    ]
