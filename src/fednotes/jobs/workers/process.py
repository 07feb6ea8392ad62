"""The program of a worker process.

    python -m fednotes.jobs.workers.process sites|predictions

It computes for the sites of a simulation, or predicts notes with a saved model.

The process that starts it writes requests to its stdin and reads replies from its
stdout. A worker ends when its stdin closes, whatever it is doing. So no worker stays
behind, however the process that started it ends.
"""

from __future__ import annotations

import os
import sys
import threading
from queue import SimpleQueue

from fednotes.core.importing import importing_for_good
from fednotes.core.pipes import FramePipe, PipeClosedError


def main(work: str) -> None:
    """Answer requests until stdin closes.

    Args:
        work: What to answer, "sites" or "predictions".
    """
    pipe = FramePipe(os.dup(0), os.dup(1))
    # What a library prints must not come between the frames.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    requests: SimpleQueue[bytearray] = SimpleQueue()
    reader = threading.Thread(
        target=_queue_requests, args=(pipe, requests), daemon=True
    )
    reader.start()

    # Imported while stdin is watched, because it takes seconds.
    from fednotes.jobs.workers.child_process import PREDICTIONS

    if work == PREDICTIONS:
        with importing_for_good():
            from fednotes.jobs.workers.prediction_worker import PredictionWorker

        PredictionWorker(pipe.send, requests.get).serve()
    else:
        with importing_for_good():
            from fednotes.jobs.workers.worker import Worker

        Worker(pipe.send, requests.get).serve()


def _queue_requests(pipe: FramePipe, requests: SimpleQueue[bytearray]) -> None:
    """Pass requests on until stdin closes, then end the process at once.

    No file is left half-written: each is written under another name and then renamed.
    """
    try:
        while True:
            requests.put(pipe.receive())
    except PipeClosedError:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
