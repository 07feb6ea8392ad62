"""A saved model as a component of a spaCy pipeline: `nlp.add_pipe("fednotes",
config={…})`.

spaCy alone imports this module, by the entry point of its factories. The model reads a
document's text as `fednotes predict` does, with its own sentences and words; its spans
are then laid on spaCy's tokens. Entities that earlier components set stay where the
model finds nothing.
"""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, Self

import numpy as np
from spacy.language import Language
from spacy.tokens import Doc, Span
from spacy.util import filter_spans, minibatch

from fednotes.core.errors import ConfigError, ModelError, readable
from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.encoders.pretrained import fingerprint
from fednotes.jobs.models import MentionModel, load

Alignment = Literal["expand", "contract", "strict"]
_FILE = "fingerprint"


class Recogniser:
    """The component. lost: how many mentions did not fit on tokens, or on each other,
    so far.

    model: the saved model's folder. spans_key: the span group that is filled; "" for
        `doc.ents`.
    alignment: of a span that begins or ends within a token: "expand" takes the whole
    token, "contract" leaves it out, "strict" drops the span. threshold: spans of less
    confidence are left out. Raises ConfigError for a model of patients, ModelError for
    a folder without a model.
    """

    def __init__(
        self,
        nlp: Language,
        name: str,
        model: str,
        spans_key: str = "",
        threshold: float = 0.0,
        alignment: Alignment = "expand",
        device: str = "cpu",
    ) -> None:
        opened = load(model, device)
        if not isinstance(opened, MentionModel):
            raise ConfigError(f"{model}: is a model of patients: it finds no mentions")
        self.path, self.model, self.lost = Path(model).resolve(), opened, 0
        self.spans_key, self.threshold, self.alignment = spans_key, threshold, alignment
        if not Span.has_extension("confidence"):
            Span.set_extension("confidence", default=None)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that it sets."""
        return self.model.types

    def __call__(self, doc: Doc) -> Doc:
        """The document with what the model finds."""
        return next(self.pipe([doc]))

    def pipe(self, stream: Iterable[Doc], *, batch_size: int = 128) -> Iterator[Doc]:
        """The same of several, their sentences read in batches of like length."""
        for docs in minibatch(stream, batch_size):
            before = self.lost
            found = self.model.stream(
                (doc.text for doc in docs), threshold=self.threshold
            )
            for doc, document in zip(docs, found, strict=True):
                self._lay(doc, document)
            if self.lost > before:
                warnings.warn(
                    f"fednotes: {self.lost - before} mention(s) of {len(docs)} document(s) did not "
                    f"fit on spaCy's tokens (alignment = {self.alignment!r}) and were left out",
                    stacklevel=2,
                )
            yield from docs

    def _lay(self, doc: Doc, document: Document) -> None:
        """Put a document's spans on a Doc's tokens."""
        laid = []
        for span in document.spans:
            fit = doc.char_span(
                span.start, span.end, span.label, alignment_mode=self.alignment
            )
            if fit is not None:
                fit._.set("confidence", span.confidence)
                laid.append(fit)
        # Two may want one token once they are laid on tokens; the longer has it.
        kept = filter_spans(laid)
        self.lost += len(document.spans) - len(kept)
        if self.spans_key:
            doc.spans[self.spans_key] = kept
            scores = [s._.get("confidence") for s in kept]
            doc.spans[self.spans_key].attrs["scores"] = np.array(scores, np.float32)
            return
        taken = {i for span in kept for i in range(span.start, span.end)}
        earlier = [e for e in doc.ents if taken.isdisjoint(range(e.start, e.end))]
        doc.set_ents([*kept, *earlier])

    def to_bytes(self, *, exclude: Iterable[str] = ()) -> bytes:
        """What tells this model from others; it is not copied."""
        return fingerprint(self.path.glob("*.safetensors")).encode()

    def from_bytes(self, data: bytes, *, exclude: Iterable[str] = ()) -> Self:
        """Raises ModelError if the model is not the one that the pipeline was saved
        with."""
        if data != self.to_bytes():
            raise ModelError(
                f"{self.path}: is not the model that this pipeline was saved with; name that one: "
                'spacy.load(…, config={"components": {"fednotes": {"model": "its folder"}}})'
            )
        return self

    def to_disk(self, path: str | Path, *, exclude: Iterable[str] = ()) -> None:
        """As `to_bytes`; where the model is stands in the pipeline's configuration."""
        write_out(Path(path) / _FILE, self.to_bytes())

    def from_disk(self, path: str | Path, *, exclude: Iterable[str] = ()) -> Self:
        """As `from_bytes`."""
        file = Path(path) / _FILE
        with readable(file, ModelError):
            return self.from_bytes(file.read_bytes()[:1000])


make = Language.factory(
    "fednotes", func=Recogniser, assigns=["doc.ents", "doc.spans", "span._.confidence"]
)
