"""Use a saved model in a spaCy pipeline: `nlp.add_pipe("fednotes", config={…})`.

Only spaCy imports this module, through its entry point for factories. The model reads
the text of a document as `fednotes predict` does, with its own sentences and words; the
component then aligns the predicted spans with spaCy's tokens. Entities of earlier
components remain unless they overlap with a predicted one.
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
    """spaCy component that sets the mentions that a saved model finds.

    Args:
        nlp: The pipeline.
        name: The name of the component in the pipeline.
        model: The folder of the saved model.
        spans_key: The span group to fill; "" sets `doc.ents`.
        threshold: Minimum confidence (0 to 1) of the mentions to set.
        alignment: The treatment of a span that begins or ends within a token: "expand"
            includes the whole token, "contract" excludes it, "strict" drops the span.
        device: The device on which the model runs.

    Attributes:
        lost: Number of mentions dropped so far because they did not align with tokens
            or overlapped with a longer mention.

    Raises:
        ConfigError: The model predicts patients, not mentions.
        ModelError: The folder does not contain a model.
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
        """The labels that the component can set."""
        return self.model.types

    def __call__(self, doc: Doc) -> Doc:
        """Set the mentions of one document and return it."""
        return next(self.pipe([doc]))

    def pipe(self, stream: Iterable[Doc], *, batch_size: int = 128) -> Iterator[Doc]:
        """Set the mentions of many documents and yield them in order.

        The model reads `batch_size` documents together, in batches of sentences of
        similar length.
        """
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
        """Align the predicted spans with a Doc's tokens and set them."""
        laid = []
        for span in document.spans:
            fit = doc.char_span(
                span.start, span.end, span.label, alignment_mode=self.alignment
            )
            if fit is not None:
                fit._.set("confidence", span.confidence)
                laid.append(fit)
        # Aligned spans may overlap; spaCy's filter keeps the longer one.
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
        """Return a fingerprint of the model; the pipeline does not store its weights."""
        return fingerprint(self.path.glob("*.safetensors")).encode()

    def from_bytes(self, data: bytes, *, exclude: Iterable[str] = ()) -> Self:
        """Check the fingerprint with which the pipeline was saved.

        Raises:
            ModelError: The folder contains a different model.
        """
        if data != self.to_bytes():
            raise ModelError(
                f"{self.path}: is not the model that this pipeline was saved with; name that one: "
                'spacy.load(…, config={"components": {"fednotes": {"model": "its folder"}}})'
            )
        return self

    def to_disk(self, path: str | Path, *, exclude: Iterable[str] = ()) -> None:
        """Write the fingerprint; the pipeline's configuration has the model's path."""
        write_out(Path(path) / _FILE, self.to_bytes())

    def from_disk(self, path: str | Path, *, exclude: Iterable[str] = ()) -> Self:
        """Read the fingerprint and check it; raises as `from_bytes`."""
        file = Path(path) / _FILE
        with readable(file, ModelError):
            return self.from_bytes(file.read_bytes()[:1000])


make = Language.factory(
    "fednotes", func=Recogniser, assigns=["doc.ents", "doc.spans", "span._.confidence"]
)
