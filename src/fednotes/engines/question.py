"""What a site was asked, as one digest: under a secure sum only equal questions are added.

A server that lies could ask each site for something else under one name, so that the others'
parts of the sum are nothing or known, and the sum is one site's update. So the digest of the
question is part of what the masks are made for (`secure_site`), and sites show each other by
receipts that they were asked the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from fednotes.core.tensors import fingerprint
from fednotes.core.update import Tensors
from fednotes.engines.wire import Request
from fednotes.privacy.masks import digest


@dataclass(frozen=True)
class Asked:
    """What led to a site's newest update, as digests of 32 bytes; b"" for nothing.

    prepared: all tasks before the first round, in their order. told: the tensors that came
    last. given: those that the present round's tasks compute with. question: all of these, with
    the newest task, its options and its round. waits: the question of a task that counts only
    once a sum of it was opened.
    """

    prepared: bytes = b""
    told: bytes = b""
    given: bytes = b""
    question: bytes = b""
    waits: bytes = b""

    def next(self, request: Request, tensors: Tensors) -> Asked:
        """With one task more. tensors: what the site's task is given, also from memory.

        A task before the first round is the same whenever a site does it; what it changes at
        the site stays, so it is part of every later question.
        """
        told = fingerprint(tensors) if tensors else self.told
        if tensors or not request.first:
            given = told if tensors else self.given
        else:
            given = told if request.told else b""
        options = json.dumps(dict(request.options), sort_keys=True)
        round = -1 if request.preparing else request.round
        question = digest("question", self.prepared, request.task, round, options, given)
        if request.preparing:
            return Asked(digest("prepared", question), told, given, question)
        return replace(self, told=told, given=given, question=question, waits=question)


def of_call(task: str, tensors: Tensors, options: object) -> bytes:
    """The question of a call in this process, where all sites are told the same."""
    return digest("question", task, repr(options), fingerprint(tensors))
