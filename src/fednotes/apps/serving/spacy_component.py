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

from fednotes.core.errors import ModelError, raising_if_unreadable
from fednotes.core.parsing import open_regular
from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.core.wording import format_count
from fednotes.encoders.pretrained import compute_fingerprint
from fednotes.jobs.models import load_mention_model

Alignment = Literal["expand", "contract", "strict"]

_FINGERPRINT_FILE = "fingerprint"
_MAX_FINGERPRINT = 1000  # maximum number of bytes to read from the file


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
        nlp: Language,  # noqa: ARG002 - spaCy passes it to every component
        name: str,  # noqa: ARG002 - spaCy passes it to every component
        model: str,
        spans_key: str = "",
        threshold: float = 0.0,
        alignment: Alignment = "expand",
        device: str = "cpu",
    ) -> None:
        self.path = Path(model).resolve()
        self.model = load_mention_model(model, device)
        self.spans_key = spans_key
        self.threshold = threshold
        self.alignment = alignment
        self.lost = 0
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
            lost_before = self.lost
            texts = (doc.text for doc in docs)
            predictions = self.model.stream(texts, threshold=self.threshold)
            for doc, prediction in zip(docs, predictions, strict=True):
                self._set_mentions(doc, prediction)
            lost = self.lost - lost_before
            if lost:
                warnings.warn(
                    f"fednotes: dropped {format_count(lost, 'mention')} in "
                    f"{format_count(len(docs), 'document')}, because the boundaries "
                    "do not align with spaCy's tokens (alignment = "
                    f"{self.alignment!r})",
                    stacklevel=2,
                )
            yield from docs

    def _set_mentions(self, doc: Doc, prediction: Document) -> None:
        """Align the predicted spans with a Doc's tokens and set them."""
        aligned: list[Span] = []
        for mention in prediction.spans:
            span = doc.char_span(
                mention.start,
                mention.end,
                mention.label,
                alignment_mode=self.alignment,
            )
            if span is not None:
                span._.set("confidence", mention.confidence)
                aligned.append(span)
        # Aligned spans may overlap; spaCy's filter keeps the longer one.
        spans = filter_spans(aligned)
        self.lost += len(prediction.spans) - len(spans)
        if self.spans_key:
            self._fill_group(doc, spans)
        else:
            _set_entities(doc, spans)

    def _fill_group(self, doc: Doc, spans: list[Span]) -> None:
        """Set the spans and their confidences as a span group."""
        doc.spans[self.spans_key] = spans
        confidences = [span._.get("confidence") for span in spans]
        group = doc.spans[self.spans_key]
        group.attrs["scores"] = np.array(confidences, np.float32)

    def to_bytes(
        self,
        *,
        exclude: Iterable[str] = (),  # noqa: ARG002 - of spaCy's interface
    ) -> bytes:
        """Return the model's fingerprint; the pipeline does not store its weights."""
        return compute_fingerprint(self.path.glob("*.safetensors")).encode()

    def from_bytes(
        self,
        data: bytes,
        *,
        exclude: Iterable[str] = (),  # noqa: ARG002 - of spaCy's interface
    ) -> Self:
        """Check the fingerprint with which the pipeline was saved.

        Raises:
            ModelError: The folder contains a different model.
        """
        if data != self.to_bytes():
            raise ModelError(
                f"{self.path}: this is not the model with which the pipeline was "
                "saved: give the folder of that model: spacy.load(…, "
                'config={"components": {"fednotes": {"model": "FOLDER"}}})'
            )
        return self

    def to_disk(
        self,
        path: str | Path,
        *,
        exclude: Iterable[str] = (),  # noqa: ARG002 - of spaCy's interface
    ) -> None:
        """Write the fingerprint.

        The model's path is in the pipeline's configuration.
        """
        write_out(Path(path) / _FINGERPRINT_FILE, self.to_bytes())

    def from_disk(
        self,
        path: str | Path,
        *,
        exclude: Iterable[str] = (),  # noqa: ARG002 - of spaCy's interface
    ) -> Self:
        """Read the fingerprint and check it.

        Raises:
            ModelError: The fingerprint cannot be read, or the folder contains a
                different model.
        """
        file = Path(path) / _FINGERPRINT_FILE
        with (
            raising_if_unreadable(file, ModelError),
            open(file, "rb", opener=open_regular) as stream,
        ):
            return self.from_bytes(stream.read(_MAX_FINGERPRINT))


def _set_entities(doc: Doc, spans: list[Span]) -> None:
    """Set entities; keep earlier ones that do not overlap with them."""
    tokens = {index for span in spans for index in range(span.start, span.end)}
    earlier = [
        entity
        for entity in doc.ents
        if tokens.isdisjoint(range(entity.start, entity.end))
    ]
    doc.set_ents([*spans, *earlier])


make = Language.factory(
    "fednotes", func=Recogniser, assigns=["doc.ents", "doc.spans", "span._.confidence"]
)
