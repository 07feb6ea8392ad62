"""What a site was asked, as one digest: under a secure sum only equal questions are added.

A server that lies could ask each site for something else under one name, so that the others'
parts of the sum are nothing or known, and the sum is one site's update. So the digest of the
question is part of what the masks are made for (`secure_site`), and sites show each other by
receipts that they were asked the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fednotes.core.tensors import fingerprint
from fednotes.core.update import Tensors
from fednotes.engines.wire import Request
from fednotes.privacy.masks import digest


@dataclass(frozen=True)
class Asked:
    """What led to a site's newest update, as digests of 32 bytes; b"" for nothing.

    prepared: all tasks before the first round, in their order. history: all tasks that are in
    the site's state, in theirs. trained: whether one of a round is among them. told: the tensors
    that came last. given: those that the present round's tasks compute with. question: the
    newest task with all of these, its options and its round.
    """

    prepared: bytes = b""
    history: bytes = b""
    trained: bool = False
    told: bytes = b""
    given: bytes = b""
    question: bytes = b""

    def next(self, request: Request, tensors: Tensors, *, strict: bool) -> Asked:
        """With one task more. tensors: what the site's task is given, also from memory.

        A task before the first round is the same whenever a site does it; what it changes at
        the site stays, so it is part of every later question. strict: all sites are in every
        sum, so all have one history, and that is part of the question too: a server that has
        one site go back, or do what the others did not, gets no sum with it any more.
        """
        told = fingerprint(tensors) if tensors else self.told
        if tensors or not request.first:
            given = told if tensors else self.given
        else:
            given = told if request.told else b""
        options = json.dumps(dict(request.options), sort_keys=True)
        round = -1 if request.preparing else request.round
        before = self.history if strict else b""
        asked = (request.task, round, options, given)
        question = digest("question", self.prepared, before, *asked)
        prepared = digest("prepared", question) if request.preparing else self.prepared
        trained = self.trained or not request.preparing
        return Asked(prepared, after(question), trained, told, given, question)

    def kept(self) -> dict[str, Any]:
        """What a state of the site is kept with, as JSON values."""
        digests = {"prepared": self.prepared.hex(), "history": self.history.hex()}
        return {**digests, "trained": self.trained}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Asked:
        """From what was kept. Raises ValueError, KeyError, TypeError for anything else."""
        prepared, history = (bytes.fromhex(kept[name]) for name in ("prepared", "history"))
        return cls(prepared, history, bool(kept["trained"]))


def after(question: bytes) -> bytes:
    """The history that ends with a question."""
    return digest("history", question)


def of_call(task: str, tensors: Tensors, options: object) -> bytes:
    """The question of a call in this process, where all sites are told the same."""
    return digest("question", task, repr(options), fingerprint(tensors))
