"""The queue before the model, which batches the texts of concurrent requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fednotes.apps.serving.metrics import Metrics
from fednotes.core.errors import ModelError
from fednotes.core.types import Document
from fednotes.core.work import reporting_to

# Maximum number of inputs, and of characters, in one call of the model.
BATCH_INPUTS = 32
BATCH_CHARACTERS = 200_000

# The estimate of `ModelQueue.estimate_waiting_seconds` is at most this long.
_MAX_WAITING_SECONDS = 60
# Weight of the latest call in the moving average of the seconds per input.
_LATEST_WEIGHT = 0.2

_Waiting = tuple[Any, asyncio.Future[Any]]


class _NobodyWaits(Exception):
    """All requests of a call have ended, because their clients have gone."""


class _Watch:
    """Ends the work of a call when nobody waits for its results; a `WorkListener`.

    The model reports its work in the thread in which it runs.

    Args:
        batch: The inputs of the call.
    """

    def __init__(self, batch: Sequence[_Waiting]) -> None:
        self._futures = [future for _, future in batch]

    def begin(self, _name: str, _total: int | None) -> None:
        """Raise _NobodyWaits if nobody waits; see `WorkListener`."""
        self.advance(0)

    def advance(self, _done: int) -> None:
        """Raise _NobodyWaits if nobody waits; see `WorkListener`."""
        if all(future.done() for future in self._futures):
            raise _NobodyWaits

    def end(self) -> None:
        """Do nothing; see `WorkListener`."""


class ModelQueue:
    """Groups the inputs of concurrent requests into joint calls of the model.

    A call receives up to `BATCH_INPUTS` inputs and stops growing at `BATCH_CHARACTERS`
    characters. It ends early if all its requests have ended.

    Args:
        model: Maps inputs (texts, documents, or the list of a patient's texts) to one
            result each. It runs in a thread of its own and is never called
            concurrently.
        metrics: Counts the texts.
    """

    def __init__(
        self, model: Callable[[list[Any]], Sequence[Any]], metrics: Metrics
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._seconds_per_input = 0.1  # moving average

    async def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Return one result per input; raise the model's exception if one fails."""
        for model_input in inputs:
            for text in _list_texts(model_input):
                self._metrics.count_text(len(text))

        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Any]] = []
        for model_input in inputs:
            future = loop.create_future()
            futures.append(future)
            self._waiting.put_nowait((model_input, future))
        try:
            return list(await asyncio.gather(*futures))
        finally:
            # If one input failed, nobody waits for the results of the others.
            for future in futures:
                future.cancel()

    def estimate_waiting_seconds(self) -> int:
        """Return the estimated time in seconds until the waiting inputs are done."""
        seconds = math.ceil(self._seconds_per_input * self._waiting.qsize())
        return min(_MAX_WAITING_SECONDS, max(1, seconds))

    async def run(self) -> None:
        """Process waiting inputs until cancelled."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "model")
        try:
            while True:
                batch = await self._take_batch()
                start = time.perf_counter()
                results = await loop.run_in_executor(thread, self._call_model, batch)
                for (_, future), result in zip(batch, results, strict=True):
                    _set_result(future, result)
                seconds = (time.perf_counter() - start) / max(1, len(batch))
                change = seconds - self._seconds_per_input
                self._seconds_per_input += _LATEST_WEIGHT * change
        finally:
            thread.shutdown(wait=False)

    async def _take_batch(self) -> list[_Waiting]:
        """Wait for inputs and return the next batch, without cancelled ones."""
        batch = [await self._waiting.get()]
        characters = 0
        while len(batch) < BATCH_INPUTS and not self._waiting.empty():
            latest_input, _ = batch[-1]
            characters += sum(map(len, _list_texts(latest_input)))
            if characters >= BATCH_CHARACTERS:
                break
            batch.append(self._waiting.get_nowait())
        return [
            (model_input, future) for model_input, future in batch if not future.done()
        ]

    def _call_model(self, batch: list[_Waiting]) -> list[Any]:
        """Return one result per input, or the exception that this input caused.

        If a joint call fails, each input is tried on its own, so that an input that the
        model cannot process does not affect the others.
        """
        if not batch:
            return []
        try:
            with reporting_to(_Watch(batch)):
                results = list(self._model([model_input for model_input, _ in batch]))
            if len(results) != len(batch):
                raise ModelError(
                    f"the model returned {len(results)} results for {len(batch)} inputs"
                )
            return results
        except _NobodyWaits:
            return [None] * len(batch)
        except Exception as error:
            if len(batch) == 1:
                return [error]
        results = []
        for each in batch:
            results += self._call_model([each])
        return results


def _list_texts(model_input: Any) -> Iterator[str]:
    """Yield the texts of an input: a text, a document, or a list of texts."""
    if isinstance(model_input, str):
        yield model_input
    elif isinstance(model_input, Document):
        yield model_input.text
    else:
        yield from model_input


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    """Set a future's result, or its exception."""
    if future.done():
        return
    if isinstance(result, StopIteration):  # a future cannot have this exception
        result = ModelError("the model stopped before its result")
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
