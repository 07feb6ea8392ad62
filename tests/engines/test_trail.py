"""The identity of a site's question: everything its answer depends on, and no more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from fault_toy import JOB

from fednotes.core.federation import State
from fednotes.core.messages import (
    CHECKPOINT,
    Frame,
    Reply,
    Request,
    decode_reply,
    encode_message,
)
from fednotes.core.tensors import fingerprint_tensors, load_state, save_state
from fednotes.core.update import Tensors, Update
from fednotes.engines.history import Trail
from fednotes.engines.host import SiteHost

X = {"x": torch.ones(4)}
Y = {"x": torch.full((4,), 2.0)}
COUNTED = Update(metrics={"n": 1.0})
REQUEST = Request(
    JOB, 1, 7, "train", round=3, first=True, tensors_of_request=5, options={"round": 3}
)


def received(tensors: Tensors) -> bytes:
    return fingerprint_tensors(tensors) if tensors else b""


def ask(trail: Trail, request: Request, tensors: Tensors, update: Update) -> Trail:
    question = trail.add_request(request, received(tensors))
    return question.add_answer(update, is_read_only=False)


# the parts of a question


def test_the_question_covers_each_part_that_an_answer_depends_on() -> None:
    trail = Trail(state=b"s", newest_tensors=b"t")

    def question(before: Trail, tensors: Tensors, **changes: Any) -> bytes:
        return before.add_request(
            replace(REQUEST, **changes), received(tensors)
        ).question

    different = [
        question(trail, {}),
        question(replace(trail, state=b"another"), {}),
        question(replace(trail, newest_tensors=b"others"), {}),
        question(trail, {}, tensors_of_request=0),
        question(trail, X),
        question(trail, Y),
        question(trail, {"y": X["x"]}),
        question(trail, {}, task="evaluate"),
        question(trail, {}, options={"round": 4}),
        question(trail, {}, options={}),
    ]
    assert len(set(different)) == len(different)


def test_the_question_does_not_depend_on_numbers_of_requests_rounds_and_runs() -> None:
    trail = Trail(state=b"s")
    question = trail.add_request(REQUEST, received(X)).question
    other_numbers = replace(
        REQUEST,
        server_start=2,
        number=90,
        round=8,
        preparing=True,
        counted={"a": 6},
        checkpoint_numbers=(1, 2),
        each=True,
    )
    assert trail.add_request(other_numbers, received(X)).question == question


def test_tensors_that_are_sent_again_give_the_same_question() -> None:
    """A server that was restarted sends what the site remembered before."""
    evaluate = replace(REQUEST, task="evaluate", tensors_of_request=0)
    trail = ask(Trail(), evaluate, X, COUNTED)
    remembered = trail.add_request(REQUEST, received({})).question
    assert (
        trail.add_request(replace(REQUEST, tensors_of_request=0), received(X)).question
        == remembered
    )


def test_the_question_covers_every_earlier_task() -> None:
    trails = [
        Trail(),
        ask(Trail(), REQUEST, X, COUNTED),
        ask(Trail(), REQUEST, Y, COUNTED),
        ask(ask(Trail(), REQUEST, X, COUNTED), REQUEST, Y, COUNTED),
        ask(ask(Trail(), REQUEST, Y, COUNTED), REQUEST, X, COUNTED),
        ask(Trail(), replace(REQUEST, task="prepare"), X, Update()),
    ]
    questions = {trail.add_request(REQUEST, received(X)).question for trail in trails}
    assert len(questions) == len(trails)


# tasks that may be repeated


def test_a_read_only_task_does_not_change_later_questions() -> None:
    before = ask(Trail(), REQUEST, X, COUNTED)
    mark = replace(REQUEST, task="mark")
    after = before.add_request(mark, received({})).add_answer(
        COUNTED, is_read_only=True
    )
    assert after.state == before.state


def test_a_repeated_setting_does_not_change_later_questions() -> None:
    """Only if it is the newest of its task, and only tasks that answer nothing are."""
    prepare = replace(REQUEST, task="prepare", tensors_of_request=0)
    begin = replace(REQUEST, task="begin", tensors_of_request=0)
    trail = ask(Trail(), prepare, X, Update())
    trail = ask(trail, begin, Y, Update())
    trail = ask(trail, REQUEST, X, COUNTED)
    assert ask(trail, prepare, X, Update()).state == trail.state
    changed = ask(trail, prepare, Y, Update())
    assert changed.state != trail.state
    assert ask(changed, prepare, X, Update()).state not in (trail.state, changed.state)
    counted = ask(trail, prepare, X, COUNTED)
    assert counted.state != trail.state
    assert ask(trail, prepare, X, Update(weight=2.0)).state != trail.state


# a site behind its host


class Asking:
    """A site with a task of each kind, which remembers the order of its tasks."""

    tasks: ClassVar[frozenset[str]] = frozenset({"prepare", "train", "look"})

    def __init__(self) -> None:
        self.id = "b"
        self.trained = 0

    def prepare(self, tensors: Tensors) -> Update:
        return Update()

    def train(self, tensors: Tensors) -> Update:
        self.trained += 1
        return Update(metrics={"trained": self.trained})

    def look(self, tensors: Tensors) -> Update:
        return Update(metrics={"trained": self.trained})

    def state(self) -> State:
        return State(self.trained)

    def restore(self, state: State) -> None:
        self.trained = state.round


class Questions:
    """A guard that allows everything and collects the question of each new update."""

    def __init__(self) -> None:
        self.questions: list[bytes] = []

    def check_request(self, request: Request) -> None:
        pass

    def require_room(self, more: int) -> None:
        pass

    def check_refusal(
        self, request: Request, question: bytes, error: Exception
    ) -> None:
        pass

    def check_reply(
        self,
        request: Request,
        reply: Frame,
        update: Update | None,
        reason: str = "",
        *,
        question: bytes = b"",
    ) -> None:
        if update is not None:
            assert question
            self.questions.append(question)


class Server:
    """A server that asks one site; `counted` is the last request that counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.guard = Questions()
        self.number = 0
        self.counted = 0
        self.restart_site()

    def restart_site(self) -> None:
        self.host = SiteHost(
            Asking,
            self.folder,
            job=JOB,
            name="b",
            guard=self.guard,
            read_only={"look"},
        )

    def ask(self, task: str, tensors: Tensors | None = None, **fields: Any) -> bytes:
        """Ask for a task, and return the site's digest of the question."""
        self.number += 1
        request = Request(
            JOB,
            1,
            self.number,
            task,
            tensors=tensors or {},
            counted={"b": self.counted},
            first=True,
            **fields,
        )
        reply: Reply = decode_reply(self.host.handle(encode_message(request)))
        assert reply.update is not None, reply.refusal
        if task != CHECKPOINT:
            self.counted = self.number
        return self.guard.questions[-1] if self.guard.questions else b""


def test_a_server_that_resumes_a_run_asks_the_same_questions(tmp_path: Path) -> None:
    """It sets the site up again, and looks at it once more, before it goes on."""
    server = Server(tmp_path)
    server.ask("prepare", X)
    server.ask("train", X)
    server.ask(CHECKPOINT)
    checkpoint = server.counted
    second = server.ask("train", Y)
    third = server.ask("train", X)
    server.counted = checkpoint
    server.restart_site()
    server.ask("look")
    server.ask("prepare", X)
    assert server.ask("train", Y) == second
    assert server.ask("train", X) == third


def test_questions_of_a_rewound_site_follow_its_state(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path)
    server.ask("prepare", X)
    prepared = server.counted
    first = server.ask("train", X)
    assert server.ask("train", X) != first
    server.counted = prepared
    assert server.ask("train", X) == first
    server.counted = 0
    assert server.ask("train", X) != first


def test_a_state_of_an_earlier_version_is_accepted(tmp_path: Path) -> None:
    """Its site goes on with questions of its own, which are the same after a restart."""
    server = Server(tmp_path)
    server.ask("train", X)
    server.ask(CHECKPOINT)
    folder = tmp_path / "states" / f"{server.counted:08d}"
    tensors, facts = load_state(folder)
    assert json.dumps(facts.pop("trail"))
    save_state(folder, tensors, facts)
    checkpoint = server.counted
    questions = []
    for _ in range(2):
        server.restart_site()
        server.counted = checkpoint
        questions.append(server.ask("train", Y))
    assert questions[0] == questions[1]
    to_a_new_site = Request(JOB, 1, 1, "train", first=True)
    assert Trail().add_request(to_a_new_site, received(Y)).question not in questions
