"""A lying server never gets a sum over sites that were asked different questions.

An honest engine stands behind a transport that rewrites what single sites are asked,
and behind a server's side of the secure sum that adds whatever came. Before sites
masked for the question, each of these lies gave the server the numbers of one site.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fault_net import STRICT, Net, seal_of
from fault_toy import JOB, SITES, Toy
from hospital_jobs import FEDMD, corpus
from hospitals import Hospitals
from tiny_taggers import MODEL, generated

from fednotes.apps.deployment.rules.guard import SiteGuard, settle_job
from fednotes.apps.deployment.rules.ledger import Ledger, read_ledger_lines
from fednotes.apps.deployment.rules.policy import Policy as Rules
from fednotes.core.errors import FednotesError, TrainingError
from fednotes.core.federation import State
from fednotes.core.messages import (
    BEGIN,
    CHECKPOINT,
    Attached,
    Frame,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode_message,
)
from fednotes.core.store import measure_disk_usage
from fednotes.core.tensors import fingerprint_tensors
from fednotes.core.update import Update
from fednotes.engines.history import OPENED, QuestionHistory
from fednotes.engines.host import SiteHost
from fednotes.engines.requests import Participants, Patience
from fednotes.engines.secure import SecureSeal, SecureSum
from fednotes.methods import fedmd, fedner
from fednotes.privacy.secure_sum.messages import (
    MaskedMessage,
    UnmaskRequest,
    pack_requests,
)
from fednotes.privacy.secure_sum.server import SecureServer
from fednotes.training.sites import unite_tags

VICTIM = "a"
X = {"x": torch.ones(4)}
TABLE = {"name": "toy", "sites": list(SITES), "min_sites": 3}
OPEN = Rules(min_sites=2, secure_sum="off", freeze_embeddings=False)
Lie = Callable[[Request], Request]


@contextmanager
def one_layout() -> Iterator[None]:
    """Let a server add updates of any layout, and request all of them to be opened."""
    add, layouts = SecureServer.add_masked, dict[bytes, Any]()

    def add_anyway(self: SecureServer, message: MaskedMessage) -> None:
        layout = layouts.setdefault(message.exchange, message.layout)
        add(self, replace(message, layout=layout))

    with mock.patch.object(SecureServer, "add_masked", add_anyway):
        yield


class Case(Net):
    """Three sites with rules and ledgers, all needed in each sum, and the server that
    lies.

    lies: by task, what changes the requests to all but the victim. rules: of each site.
    secure: whether the job's sums are secure.
    """

    def __init__(
        self,
        folder: Path,
        threshold: int = 3,
        rules: Rules = OPEN,
        *,
        secure: bool = True,
    ) -> None:
        super().__init__({}, folder)
        self.threshold, self.lies = threshold, dict[str, Lie]()
        self.rules, self.secure = rules, secure
        self.messages = {site: list[str]() for site in SITES}
        for site in SITES:
            self.begin(site)
        self.server = self.served()

    @property
    def members(self) -> Participants:
        return self.server._members

    def begin(self, site: str) -> None:
        kit = self.folder / "kits" / site
        rules: Any = {
            "secure": self.secure,
            "threshold": self.threshold,
            "folders": [self.folder / site],
        }
        settle_job(kit, TABLE, approve=True, by="a test")
        self.hosts[site] = SiteHost(
            lambda: Toy(site),
            self.folder / site,
            job=JOB,
            name=site,
            guard=SiteGuard(kit, site, "run", TABLE, lambda: self.rules, **rules),
            sealer=seal_of(self.folder, site, self.threshold) if self.secure else None,
            builds_on=Toy.builds_on,
            tell=self.messages[site].append,
        )

    def exchange(
        self, frames: Mapping[str, Frame], **options: Any
    ) -> Iterator[tuple[str, Frame]]:
        requests = {}
        for site, frame in frames.items():
            request = decode_request(frame)
            lie = self.lies.get(request.task)
            requests[site] = (
                encode_message(lie(request)) if lie and site != VICTIM else frame
            )
        yield from super().exchange(requests, **options)

    def ask(self, site: str, request: Request) -> Reply:
        return decode_reply(self.hosts[site].handle(encode_message(request)))

    def served(self, patience: Patience = STRICT) -> Any:
        """Return a server that was just started."""
        if not self.secure:
            return self.engine(SITES, patience)
        record = self.folder / OPENED
        summing = SecureSum(SITES, job=JOB, threshold=self.threshold, record=record)
        return self.engine(SITES, patience, summing=summing)

    def prepared(self) -> None:
        """Run the toy job up to its first round."""
        sizes = int(self.server.sum("count").metrics["size"])
        self.server.sum("share", sizes=sizes)
        next(self.server.rounds(0, 9))

    def play(self, turn: Any, tensors: Any = X) -> None:
        """Run one round of the toy job."""
        self.server.sum("train", tensors, round=turn.number)
        self.server.sum("send", {"scale": torch.ones(4)})
        turn.commit(State(turn.number + 1, X, {}), {}, evaluated=True)

    def stand(self, state: Mapping[str, int]) -> None:
        """Move sites to states that the server chooses, by its claims of what
        counts."""
        self.members.counted.update(state)
        self.server._active_sites = {}

    def opened(self) -> int:
        """Return how many answers of any site opened a sum."""
        tasks = {request.number: request.task for _, request, _ in self.sent}
        replies = (decode_reply(frame) for _, frame in self.came)
        return sum(
            tasks[r.number] == "@unmask" and r.update is not None for r in replies
        )

    def refuses(self, *arguments: Any, **options: Any) -> str:
        """Why there is no such sum, even of a server that adds whatever came; none is
        opened."""
        before = self.opened()
        with one_layout(), pytest.raises(FednotesError) as caught:
            self.server.sum(*arguments, **options)
        assert self.opened() == before
        return str(caught.value)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    prepared_case = Case(tmp_path)
    prepared_case.prepared()
    return prepared_case


def dead(request: Request) -> Request:
    """Return parameters under which a site's numbers are 0."""
    return replace(
        request, tensors={name: value * 0 for name, value in request.tensors.items()}
    )


def other_round(request: Request) -> Request:
    return replace(request, options={**request.options, "round": 10**6})


def later(request: Request) -> Request:
    return replace(request, round=request.round + 1)


@pytest.mark.parametrize("lie", [dead, other_round, later])
def test_different_questions_to_sites_give_no_sum(lie: Lie, case: Case) -> None:
    """Sites that were asked otherwise say so in their logs and ledgers; so does the
    victim."""
    case.lies = {"train": lie}
    refusal = case.refuses("train", X, round=0)
    assert "received different requests" in refusal
    for site in SITES:
        assert any(
            "received different requests" in line for line in case.messages[site]
        ), site
        ledger = list(
            read_ledger_lines(Ledger.in_kit(case.folder / "kits" / site).path)
        )
        assert "asked-otherwise" in {
            line["reason"] for line in ledger if line["refusal"]
        }, site
    case.lies = {}
    assert case.served().sum("count").metrics == {"size": 15.0}  # and honest ones do


def test_an_honest_server_reports_what_differs(case: Case) -> None:
    case.lies = {"train": dead}
    with pytest.raises(
        TrainingError, match="received different tasks, rounds, options or"
    ):
        case.server.sum("train", X, round=0)


def test_earlier_broadcasts_are_part_of_the_question(case: Case) -> None:
    """A round that begins without tensors means those that came last. No sum of an
    evaluation of other parameters is opened; where the server counts it all the same,
    no later one is."""
    case.server.sum("train", X, round=0)
    case.server.sum("send", {"scale": torch.ones(4)})
    case.lies = {"evaluate": dead}
    case.refuses("evaluate", X)
    case.lies = {}
    last = {site: case.hosts[site]._journal.last for site in SITES}
    case.stand(last)
    case.server._sent_number, case.members.newest_tensors_at = last["a"], dict(last)
    assert "received different requests" in case.refuses("train", round=1)


@pytest.mark.parametrize("threshold", [2, 3])
@pytest.mark.parametrize("lies", [False, True])
@pytest.mark.parametrize("task_between", [False, True])
def test_the_second_task_of_a_round_is_bound_to_the_first(
    threshold: int,
    lies: bool,
    task_between: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tensors are equal at all sites, but those of the first task were not. No sum
    of the first task was opened, but the server claims that it counts."""
    case = Case(tmp_path, threshold)
    case.prepared()
    case.lies = {"train": dead}
    case.refuses("train", X, round=0)
    case.lies = {}
    case.stand({site: case.hosts[site]._journal.last for site in SITES})
    if task_between:
        with suppress(FednotesError):
            case.server.sum("evaluate", X)
        case.stand({site: case.hosts[site]._journal.last for site in SITES})
    if lies:
        make_request = case.members.make_request

        def claim_a_new_round(task: str, **fields: Any) -> Request:
            request = make_request(task, **fields)
            return replace(request, first=True, round=request.round + 1)

        monkeypatch.setattr(case.members, "make_request", claim_a_new_round)
    assert "received different" in case.refuses("send", {"scale": torch.ones(4)})


def test_rewinding_one_site_alone_gives_no_sum(case: Case) -> None:
    """Two sums of one task, between which one site's private state alone was moved,
    would differ by that site's numbers: as it was after its round, after the round
    before, or new."""
    positions = []
    for turn in case.server.rounds(0, 3):
        positions.append(dict(case.members.counted))
        case.play(turn)
    for moved in (positions[1][VICTIM], case.members.counted[VICTIM], 0):
        case.stand({**positions[2], VICTIM: moved})
        case.members.prepared[VICTIM] = 2
        case.members.round = 2
        case.refuses("train", X, round=2)
    case.stand(positions[2])  # all of them together: as after a fault
    case.members.round = 2
    case.server._summing._history = ""
    if case.hosts[VICTIM]._journal.last == positions[2][VICTIM]:
        assert case.server.sum("train", X, round=2).included == SITES


@pytest.mark.parametrize("first_state", ["later", "earlier"])
def test_sites_with_different_earlier_tasks_give_no_sum(
    first_state: str, case: Case
) -> None:
    """The server asks a alone to do an opened task once more, or to go back to before
    it, and then all for the same: two sums over all sites would differ by what a's
    state changed."""
    members = case.members
    before = dict(members.counted)
    case.server.sum("train", X, round=0)
    if first_state == "earlier":
        case.stand({"a": before["a"]})
        assert "received different requests" in case.refuses("train", X, round=1)
        return
    requests = [
        request
        for site, request, _ in case.sent
        if (site, request.task) == ("a", "train")
    ]
    again = replace(
        requests[-1], number=members.take_next_number(), counted=dict(members.counted)
    )
    assert case.ask("a", again).update is not None
    # b and c as before it, a as after two of it
    case.stand({**before, "a": again.number})
    assert "received different requests" in case.refuses("train", X, round=0)
    case.stand(before)  # and all of them from the same place give the same sum again
    assert case.server.sum("train", X, round=0).metrics == {"steps": 3.0}


@pytest.mark.parametrize("way", ["sent back", "new disk", "damaged"])
def test_only_a_site_that_lost_its_own_history_adopts_that_of_others(
    way: str, case: Case
) -> None:
    """A site that lost its own, by what happened at its own disk; never one that the
    server sent back to where it was new."""
    turns = case.server.rounds(0, 9)
    for turn in turns:
        case.play(turn)
        if turn.number == 1:
            break
    next(turns)
    members, states = case.members, case.folder / "b" / "states"
    if way == "sent back":
        members.counted["b"] = members.prepared["b"] = 0
        case.refuses("train", X, round=2)
        return
    if way == "new disk":
        del case.hosts["b"]
        shutil.rmtree(case.folder / "b")
    else:  # the newest state; the one before it has trained too
        *_, before, newest = sorted(states.iterdir())
        (newest / "facts.json").write_text("{}")
        case.begin("b")
        reply = case.ask("b", members.make_request("@begin"))
        assert "has lost its state" in reply.refusal
        assert reply.has == int(before.name) > 0
    case.begin("b")
    assert case.server.sum("train", X, round=2).included == SITES
    case.server.sum("send", {"scale": torch.ones(4)})
    case.begin("b")  # what it adopted is kept
    assert case.server.sum("evaluate", X).included == SITES


def test_different_tensors_of_an_earlier_step_give_no_sum(case: Case) -> None:
    """The second task of a round computes with what the first one told."""
    case.lies = {"train": dead}
    case.refuses("train", X, round=0)
    case.lies = {}
    refusal = case.refuses("send", {"scale": torch.ones(4)})
    assert "sites can be added" in refusal or "received different requests" in refusal


def test_requests_before_the_first_round_are_part_of_every_question(
    tmp_path: Path,
) -> None:
    """A site that makes up for a task of before the first round sends nothing of it, so
    that no sum tells whether it was the others' task: every later sum does."""
    case = Case(tmp_path)
    case.server.sum("count")
    case.lies = {"share": lambda r: replace(r, options={"sizes": 2**50})}
    case.refuses("share", sizes=15)
    members = case.members
    for site, sizes in zip(SITES, (15, 2**50, 2**50), strict=True):
        request = members.make_request(
            "share", preparing=True, options={"sizes": sizes}
        )
        reply = case.ask(site, request)
        assert (reply.update, reply.attached, reply.refusal) == (
            Update(),
            Attached(),
            "",
        )
        members.counted[site] = request.number
    case.lies = {}
    next(case.server.rounds(0, 9))
    assert "received different requests" in case.refuses("train", X, round=0)


def test_a_restarted_site_remembers_its_earlier_questions(
    case: Case,
) -> None:
    """From the state that it kept at the end of a round, and from its journal after
    that."""
    turns = case.server.rounds(0, 3)
    for turn in turns:
        tensors = {} if turn.number == 2 else X
        case.server.sum("train", tensors, round=turn.number)
        if turn.number == 0:
            case.begin("a")  # in the middle of a round
        case.server.sum("send", {"scale": torch.ones(4)})
        case.server.sum("evaluate", X)
        turn.commit(State(turn.number + 1, X, {}), {}, evaluated=True)
        case.begin("b")
        assert case.hosts["b"]._asked == QuestionHistory()
    assert case.server.sum("finish", X).included == SITES


def test_questions_are_equal_only_if_every_part_is_equal() -> None:
    """Two questions are equal only if all is: by changing one thing after the other."""
    request = Request(
        JOB,
        1,
        1,
        "train",
        round=3,
        first=True,
        tensors_of_request=7,
        options={"round": 3},
    )
    history = QuestionHistory(prepared=b"p", history=b"h", newest_tensors=b"t")

    def add(
        now: QuestionHistory, request: Request, received: bytes, *, strict: bool = True
    ) -> QuestionHistory:
        return now.add_request(
            request, received, builds_on=Toy.builds_on, strict=strict
        )

    def received(tensors: Any) -> bytes:
        return fingerprint_tensors(tensors) if tensors else b""

    def question(now: QuestionHistory, tensors: Any = None, **changes: Any) -> bytes:
        changed = replace(request, **changes)
        return add(now, changed, received(tensors)).question

    different = [
        question(history),
        question(QuestionHistory(prepared=b"q", history=b"h", newest_tensors=b"t")),
        question(QuestionHistory(prepared=b"p", history=b"i", newest_tensors=b"t")),
        question(QuestionHistory(prepared=b"p", history=b"h", newest_tensors=b"u")),
        question(history, X),
        question(history, {"y": X["x"]}),
        question(history, {"x": X["x"].double()}),
        question(history, {"x": X["x"].reshape(2, 2)}),
        question(history, {"x": X["x"] + 2.0**-20}),
        question(history, task="send"),
        question(history, round=4),
        question(history, options={"round": 4}),
        question(history, options={}),
        question(history, tensors_of_request=0),
        question(history, preparing=True),
    ]
    assert len(set(different)) == len(different)
    same = (
        question(history),
        question(
            history, number=9, server_start=2, counted={"a": 3}, checkpoint_numbers=(2,)
        ),
    )
    assert len(set(same)) == 1
    loose = {
        add(now, request, b"", strict=False).question
        for now in (
            history,
            QuestionHistory(prepared=b"p", history=b"i", newest_tensors=b"t"),
        )
    }
    assert len(loose) == 1  # where sums leave sites out, histories differ
    first_question = add(history, request, received(X))
    goes_on = replace(request, first=False, tensors_of_request=0)
    assert (
        add(first_question, goes_on, b"").round_tensors
        == first_question.round_tensors
        != b""
    )
    assert add(first_question, replace(goes_on, first=True), b"").round_tensors == b""
    assert question(history, preparing=True, round=0) == question(
        history, preparing=True, round=5
    )
    early = add(history, replace(request, preparing=True), b"")
    assert early.prepared not in (b"p", b"")
    assert (early.trained, first_question.trained, first_question.prepared) == (
        False,
        True,
        b"p",
    )
    assert len({early.history, first_question.history, b"h"}) == 3
    assert QuestionHistory.from_json(first_question.to_json()) == QuestionHistory(
        first_question.prepared,
        first_question.history,
        True,
        task_questions={"train": first_question.question},
    )


def test_a_question_includes_those_of_the_tasks_that_it_builds_on() -> None:
    """Also after a restart, and whatever a request claims about its round."""
    train, send, evaluate = (
        Request(JOB, 1, 1, task, round=3) for task in ("train", "send", "evaluate")
    )

    def add(
        history: QuestionHistory, request: Request, received: bytes
    ) -> QuestionHistory:
        return history.add_request(
            request, received, builds_on=Toy.builds_on, strict=False
        )

    def ask_to_send(first_tensors: bytes, *, first: bool, between: bool) -> bytes:
        history = add(QuestionHistory(), train, first_tensors)
        if between:
            history = add(history, evaluate, b"w")
        restored = QuestionHistory.from_json(history.to_json())
        return add(restored, replace(send, first=first), b"s").question

    for first in (False, True):
        for between in (False, True):
            questions = [
                ask_to_send(tensors, first=first, between=between)
                for tensors in (b"x", b"y", b"x")
            ]
            assert questions[0] != questions[1]
            assert questions[0] == questions[2]


def test_a_task_of_a_round_is_refused_outside_the_secure_sum(case: Case) -> None:
    """Or a site's private layers could be spoilt by a task that no other site sees."""
    members = case.members
    for changes in ({}, {"first": True}):
        request = members.make_request(
            "train", tensors=X, options={"round": 0}, **changes
        )
        reply = case.ask("a", request)
        assert "was requested outside the secure sum" in reply.refusal


def test_options_outside_the_job_are_refused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    with pytest.raises(
        TrainingError, match="'count' of the approved job does not accept the options"
    ):
        case.server.sum("count", batch_size=1)


def test_a_server_cannot_choose_the_file_of_a_sites_predictions(tmp_path: Path) -> None:
    """The round is part of the name of the file of what a site sends."""
    data = corpus(tmp_path / "notes", sentences=10)
    public = data["posts"]["valid"]
    data = {name: {**table, "public": public} for name, table in data.items()}
    job = FEDMD.replace("timeout = 20", "timeout = 1")
    hospitals = Hospitals(tmp_path, job, data)
    notes = tmp_path / "elsewhere.tsv"
    notes.write_text("a file of the site")
    elsewhere = f"0/{'../' * 40}{notes.with_suffix('')}"
    exchange = hospitals.network.exchange

    def lie(frames: Mapping[str, Frame], **options: Any) -> Iterator[Any]:
        requests = {site: decode_request(frame) for site, frame in frames.items()}
        changed = {
            site: encode_message(replace(request, options={"round": elsewhere}))
            if request.task == fedmd.PREDICT
            else frames[site]
            for site, request in requests.items()
        }
        return exchange(changed, **options)

    with (
        mock.patch.object(hospitals.network, "exchange", lie),
        pytest.raises(TrainingError, match="does not accept the options round"),
    ):
        hospitals.run()
    assert notes.read_text() == "a file of the site"


LOOSE = Patience(min_sites=2, timeout=10, knock=1, knock_every=0, pause=1, give_up=30)


def test_a_repeated_task_is_opened_only_for_the_same_sites(tmp_path: Path) -> None:
    """With two of three: the sum of all, then the server "was restarted" and calls c
    dropped. The difference of the two sums would be c's number."""
    case = Case(tmp_path, threshold=2)
    assert case.server.sum("count").included == SITES
    case.down = {"c"}
    with pytest.raises(TrainingError, match="was opened with c before the fault"):
        case.served(patience=LOOSE).sum("count")

    def nothing_before(self: SecureSeal, question: bytes) -> tuple[str, ...]:
        return ()

    before = case.opened()
    with (  # a server that does not listen to it, and asks all the same
        mock.patch(
            "fednotes.engines.history.OpenedSums.find_survivors", nothing_before
        ),
        pytest.raises(
            TrainingError, match="a sum of this task has been opened for the"
        ),
    ):
        case.served(patience=LOOSE).sum("count")
    assert case.opened() == before
    for site in ("a", "b"):  # nor after these sites were started again
        case.begin(site)
    with pytest.raises(TrainingError, match="was opened with c before the fault"):
        case.served(patience=LOOSE).sum("count")
    case.down = set()
    assert case.served(patience=LOOSE).sum("count").metrics == {"size": 15.0}


def test_a_sum_is_repeated_after_a_fault_without_the_sites_that_missed_it(
    tmp_path: Path,
) -> None:
    """c was away, and is back when the server was restarted: it waits for the next sum."""
    case = Case(tmp_path, threshold=2)
    case.down = {"c"}
    assert case.served(patience=LOOSE).sum("count").included == ("a", "b")
    case.down = set()
    again = case.served(patience=LOOSE)
    assert again.sum("count").included == ("a", "b")
    assert again.sum("count").included in (("a", "b"), SITES)


def test_an_older_exchange_is_not_opened_under_a_newer_task(tmp_path: Path) -> None:
    """The server asks to open what was masked before, while a newer task waits: what is
    noted as opened is what was masked in that exchange."""
    case = Case(tmp_path)
    seal = case.hosts["a"]._sealer
    assert isinstance(seal, SecureSeal)
    case.prepared()
    case.server.sum("train", X, round=0)
    assert seal._opened.find_survivors(seal._newest_mask.question)
    questions = len(seal._opened._survivors)
    mask = seal._newest_mask
    seal._newest_mask = type(mask)(mask.exchange + 5, b"another")
    number = case.members.make_request("@unmask").number
    blank = UnmaskRequest(bytes(32), SITES, (), {})
    attached = pack_requests(mask.exchange, {}, dict.fromkeys(SITES, blank))
    request = replace(
        case.members.make_request("@unmask", attached=attached), number=number + 1
    )
    reply = case.ask("a", request)
    assert "sent no masked update in it" in reply.refusal
    assert len(seal._opened._survivors) == questions


# what a server asks for by single updates, and what it says after a start of its own

EACH = replace(OPEN, individual_updates=True, share_scores=True)


def looks_at_each(request: Request) -> Request:
    return replace(request, each=True)


def test_single_updates_are_masked_under_the_secure_sum(tmp_path: Path) -> None:
    """A server that says it looks at single updates gets masked ones, where sites
    permit it."""
    case = Case(tmp_path, rules=EACH)
    case.prepared()
    case.lies = {"train": looks_at_each}
    assert case.server.sum("train", X, round=0).included == SITES
    numbers = {request.number for _, request, _ in case.sent if request.task == "train"}
    replies = [decode_reply(frame) for _, frame in case.came]
    answers = [reply for reply in replies if reply.number in numbers]
    assert len(answers) == len(SITES)
    assert all(reply.update == Update() for reply in answers)
    assert all(set(reply.attached.tensors) == {"words"} for reply in answers)


def test_a_site_that_does_not_permit_single_updates_refuses_such_a_request(
    case: Case,
) -> None:
    """Its rules stand above what the server says of a request, whatever the job was."""
    case.lies = {"train": looks_at_each}
    assert "refused by individual_updates" in case.refuses("train", X, round=0)
    for site in ("b", "c"):
        assert case.hosts[site]._journal.last == case.members.counted[site]


@pytest.mark.parametrize("way", ["each", "sum", "secure sum"])
def test_a_site_counts_its_updates_whatever_round_a_server_claims(
    way: str, tmp_path: Path
) -> None:
    """With two rounds permitted: a server that is started again, sends all sites back,
    and calls every round the first one gets no third update of other parameters."""
    case = Case(tmp_path, rules=replace(EACH, max_rounds=2), secure=way == "secure sum")
    case.prepared()
    start = dict(case.members.counted)

    def asks(size: float) -> Any:
        number = case.members.number
        case.server = case.served()
        case.members.number = number
        case.members.prepared.update(dict.fromkeys(SITES, 2))
        next(case.server.rounds(0, 9))
        case.stand(start)
        ask = case.server.each if way == "each" else case.server.sum
        return ask("train", {"x": torch.full((4,), size)}, round=0)

    first = asks(1.0)
    again = asks(1.0)  # the same answer once more, as after a fault
    if way == "each":
        assert all(
            torch.equal(first[s].tensors["least"], again[s].tensors["least"])
            for s in SITES
        )
    else:
        torch.testing.assert_close(first.tensors["least"], again.tensors["least"])
    asks(2.0)
    with pytest.raises(TrainingError, match="refused by max_rounds"):
        asks(3.0)


def every_mark(request: Request) -> Request:
    """Claim that the server may go back to any request of the run."""
    return replace(request, checkpoint_numbers=tuple(range(request.number)))


def no_state(request: Request) -> Request:
    """Let a site save no state, so that it needs all requests of the run."""
    if request.task == CHECKPOINT:
        return replace(request, task=BEGIN)
    return replace(request, first=False)


def test_a_server_that_keeps_every_checkpoint_cannot_fill_the_disk(case: Case) -> None:
    """Its sites store no more than one that is asked honestly."""
    case.lies = {"train": every_mark, CHECKPOINT: every_mark}
    for turn in case.server.rounds(0, 12):
        case.play(turn)
    used = {site: measure_disk_usage(case.folder / site) for site in SITES}
    assert used["b"] <= used[VICTIM]
    assert used["c"] <= used[VICTIM]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain sum", "secure sum"])
def test_a_server_that_lets_sites_forget_nothing_cannot_fill_the_disk(
    way: str, tmp_path: Path
) -> None:
    rules = replace(OPEN, share_scores=True, max_stored_bytes=1_400_000)
    case = Case(tmp_path, rules=rules, secure=way == "secure sum")
    case.prepared()
    case.lies = {"train": no_state, CHECKPOINT: no_state}
    rounds = 0

    def play_on() -> None:
        nonlocal rounds
        for turn in case.server.rounds(0, 99):
            case.play(turn)
            rounds += 1

    refused = "refused by max_stored_bytes of this site's policy"
    with pytest.raises(TrainingError, match=refused):
        play_on()
    assert rounds > 5
    for site in SITES:
        assert measure_disk_usage(case.folder / site) < rules.max_stored_bytes
    assert "this site allows at most 1,400,000" in "\n".join(case.messages["b"])


@pytest.mark.parametrize("claimed", ["a round before", "the round's end", "new"])
def test_a_restarted_server_cannot_rewind_one_site_alone(
    claimed: str, case: Case
) -> None:
    """Its checkpoint, as it tells of it, has one site somewhere else than it was."""
    positions = []
    for turn in case.server.rounds(0, 2):
        positions.append(dict(case.members.counted))
        case.play(turn)
    victims_message = {
        "a round before": positions[1][VICTIM],
        "the round's end": None,
        "new": 0,
    }[claimed]
    others = {site: number for site, number in positions[1].items() if site != VICTIM}
    case.server = case.served()
    assert case.server.resume().round == 2
    next(case.server.rounds(2, 9))
    case.stand(others if victims_message is None else {VICTIM: victims_message})
    case.members.prepared[VICTIM] = 2
    case.refuses("train", X, round=2)


@pytest.mark.parametrize("lost", [False, True])
def test_a_history_invented_by_a_restarted_server_gives_no_sum(
    lost: bool, case: Case
) -> None:
    """Sites that have their own do not hear of it; one that lost its disk takes it, and
    then has no sum with the others."""
    for turn in case.server.rounds(0, 2):
        case.play(turn)
    if lost:
        del case.hosts["b"]
        shutil.rmtree(case.folder / "b")
        case.begin("b")
    case.server = case.served()
    case.server._summing._history = b"\1" * 32
    next(case.server.rounds(2, 9))
    if lost:
        assert "received different requests" in case.refuses("train", X, round=2)
    else:
        assert case.server.sum("train", X, round=2).included == SITES


def test_a_request_that_claims_to_follow_a_later_one_is_refused(case: Case) -> None:
    """A site that did it would keep it as if it had come before, and what it keeps on
    disk would not be what led to its state."""
    case.server.sum("train", X, round=0)
    counted = dict(case.members.counted)
    last_number = case.hosts["a"]._journal.last
    for number in (1, counted["a"]):
        request = case.members.make_request("train", tensors=X, options={"round": 0})
        late = replace(request, server_start=request.server_start + 1, number=number)
        assert "claims to follow request" in case.ask("a", late).refusal
        assert case.hosts["a"]._journal.last == last_number


class FedNERSite:
    """One site of FedNER in a plain sum, whose CRF stays private, with its rules."""

    def __init__(self, folder: Path, rules: Rules) -> None:
        sites = generated(12)
        config = fedner.Config(
            model=MODEL, batch_size=12, private=("crf",), tags=unite_tags(sites)
        )
        guard = SiteGuard(
            folder, "a", "run", TABLE, lambda: rules, secure=False, threshold=3
        )
        settle_job(folder, TABLE, approve=True, by="a test")

        def make() -> fedner.Site:
            site = fedner.Site(sites[0], config)
            guard.count_covered, guard.find_model_digest = (
                site.count_covered,
                site.find_model_digest,
            )
            return site

        self.parameters = fedner.make_initial_parameters(config)
        self.host = SiteHost(make, folder / "state", job=JOB, name="a", guard=guard)
        self.number = 0

    def saturated(self, signs: int) -> dict[str, torch.Tensor]:
        """Return parameters under which every shared gradient is exactly zero.

        All gates of the LSTM are so far from zero that their derivatives vanish. The
        private CRF sees a vector of -1 and 1 that the server chooses.

        Args:
            signs: Its bits say which cells of the first direction are positive.
        """
        tensors = {
            name: torch.zeros_like(value) for name, value in self.parameters.items()
        }
        units = MODEL.lstm_units
        gates = torch.full((2, 4, units), 1e4)
        gates[:, 1] = -1e4  # forget
        for unit in range(units):
            gates[0, 2, unit] *= 1 if signs >> unit & 1 else -1
        tensors["lstm.bias_l0"] = gates.reshape(2, 4 * units)
        return tensors

    def gradients(self, tensors: Mapping[str, torch.Tensor]) -> Reply:
        """Ask for the first round's gradients under some parameters."""
        self.number += 1
        request = Request(
            JOB,
            1,
            self.number,
            "gradients",
            tensors=tensors,
            options={"round": 0},
            counted=dict.fromkeys(SITES, 0),
            first=True,
        )
        return decode_reply(self.host.handle(encode_message(request)))


def test_parameters_without_gradients_count_as_rounds(
    tmp_path: Path,
) -> None:
    """The gradients of all questions are zero, and each loss tells about another one."""
    site = FedNERSite(tmp_path, replace(OPEN, share_scores=True, max_rounds=2))
    replies = [site.gradients(site.saturated(signs)) for signs in range(7)]
    answered = [reply.update for reply in replies if reply.update is not None]
    assert len(answered) == 2
    assert len({update.metrics["loss"] for update in answered}) == 2
    for update in answered:
        assert not any(value.any() for value in update.tensors.values())
    assert "refused by max_rounds" in replies[-1].refusal
    again = site.gradients(site.saturated(0)).update
    assert again is not None
    assert again.metrics == answered[0].metrics


def test_parameters_that_fail_for_single_words_count_as_rounds(
    tmp_path: Path,
) -> None:
    """The gradient is not finite if one of the words in some rows occurs in the notes.

    Without a limit, one refusal after the other would list a site's words, whatever
    the sums hide.
    """
    site = FedNERSite(tmp_path, replace(OPEN, share_scores=True, max_rounds=3))
    table = site.parameters["words.hashed"]
    replies = []
    for row in range(len(table)):
        trap = table.clone()
        trap[row] = 3e38
        replies.append(site.gradients({**site.parameters, "words.hashed": trap}))
    refused = ["not finite" in reply.refusal for reply in replies]
    answered = [reply.update is not None for reply in replies]
    assert any(refused), "no row is a trap"
    assert sum(refused) + sum(answered) == 3
    for reply in replies[3:]:
        assert "refused by max_rounds" in reply.refusal
