"""What a worker process that predicts notes does, and what it replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fednotes.core.messages import Request
from fednotes.engines.carried import make_reply, read_values
from fednotes.jobs.models import MentionModel, PatientModel, find_model_class
from fednotes.jobs.saved_models import LoadOptions, NoteFeatures, SavedModel
from fednotes.jobs.workers.answering import Receive, Send, answer_requests
from fednotes.jobs.workers.events import RESULT, make_event
from fednotes.jobs.workers.prediction_messages import (
    COMPUTE_FEATURES,
    LOAD,
    PREDICT,
    decode_notes,
    encode_spans,
)


class PredictionWorker:
    """Serves the requests of the process that started this one.

    Args:
        send: Sends an encoded reply.
        receive: Waits for the next encoded request and returns it.
    """

    def __init__(self, send: Send, receive: Receive) -> None:
        self._send = send
        self._receive = receive
        self._model: SavedModel | None = None
        self._commands: dict[str, Callable[[Any], Any]] = {
            LOAD: self._load,
            PREDICT: self._predict,
            COMPUTE_FEATURES: self._compute_features,
        }

    def serve(self) -> None:
        """Answer requests until nobody reads the replies."""
        answer_requests(self._send, self._receive, self._answer)

    def _answer(self, request: Request) -> Iterator[bytes]:
        """Yield the encoded reply to a command."""
        result = self._commands[request.task](read_values(request))
        yield make_reply(request, "", make_event(RESULT, result))

    def _load(self, values: Any) -> tuple[str, ...]:
        """Load the model; return what it predicts."""
        torch.set_num_threads(values["threads"])
        folder = Path(values["folder"])
        options = LoadOptions(**values["options"])
        self._model = find_model_class(folder).load(folder, options)
        return self._model.types

    def _predict(self, values: Any) -> list[list[list[Any]]]:
        """Return the spans of each note of a window."""
        assert isinstance(self._model, MentionModel)
        window = decode_notes(values["notes"])
        predicted = self._model.predict_windows([window], values["threshold"])
        return encode_spans(predicted)

    def _compute_features(self, texts: list[str]) -> list[NoteFeatures]:
        """Return the features of each text of a window."""
        assert isinstance(self._model, PatientModel)
        return [self._model.compute_note_features(text) for text in texts]
