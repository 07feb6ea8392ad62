"""The loop of a worker: a request comes, and its replies go out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fednotes.core.messages import Request, decode_message
from fednotes.core.pipes import PipeClosedError
from fednotes.engines.carried import make_failure

Send = Callable[[bytes], None]  # sends an encoded reply
Receive = Callable[[], bytearray]  # waits for the next encoded request
Answer = Callable[[Request], Iterator[bytes]]  # yields the encoded replies


def answer_requests(send: Send, receive: Receive, answer: Answer) -> None:
    """Answer requests until nobody reads the replies.

    An error is a reply, too.
    """
    while True:
        request = decode_message(receive(), checked=True)
        assert isinstance(request, Request)
        try:
            for reply in answer(request):
                send(reply)
        except PipeClosedError:
            return
        except Exception as error:
            send(make_failure(request, "", error))
