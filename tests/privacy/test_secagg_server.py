"""What the server refuses of a site, and a sum that is made in spite of wrong shares."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from signing import Ed25519Identity

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.update import Update
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum.masks import SHARE_BYTES, share_bytes
from fednotes.privacy.secure_sum.messages import UnmaskMessage
from fednotes.privacy.secure_sum.site import SecureSite

A, B, C, D, E, F = "abcdef"
SIX = (A, B, C, D, E, F)


def ones(sites: tuple[str, ...]) -> dict[str, Update]:
    """Powers of two: their sum tells who is in it."""
    return {s: Update({"w": torch.full((4,), 2.0**i)}) for i, s in enumerate(sites)}


def test_a_layout_for_another_number_of_sites_is_refused(exchange: type) -> None:
    """Of three and four sites the grid is the same, so only the number tells them apart."""
    run = exchange((A, B, C))
    boxes = run.set_up()
    message = run.sites[A].masked(boxes[A], ones((A,))[A])
    with pytest.raises(RefusedError, match="for another number of sites"):
        run.server.add_masked(replace(message, layout=replace(message.layout, sites=4)))
    run.server.add_masked(message)
    assert run.server.heard == (A,)


@pytest.mark.parametrize("length", [0, SHARE_BYTES - 1, SHARE_BYTES + 1])
def test_opened_shares_of_another_length_are_refused(length: int, exchange: type) -> None:
    run = exchange((A, B, C, D))
    run.upload(ones((A, B, C)), run.set_up())
    answer = run.answers()[A]
    for part, site in (("masks", B), ("keys", D)):
        given = dict(getattr(answer, part))
        given[site] = (given[site] + bytes(1))[:length]
        with pytest.raises(RefusedError, match="opened shares of site 'a' are not what was asked"):
            run.server.add_unmask(replace(answer, **{part: given}))
    run.server.add_unmask(answer)


# keys


def test_a_commitment_is_signed_and_the_same_for_all(exchange: type) -> None:
    """Another commitment would have the server believe another seed."""
    sites = (A, B, C)
    private = {s: bytes([i]) * 32 for i, s in enumerate(sites, start=1)}
    known = {s: Ed25519Identity(private[s], {}).public for s in sites}
    parties = Parties(sites)
    made = {s: SecureSite(s, parties, b"x", Ed25519Identity(private[s], known)) for s in sites}
    keys = {s: site.keys() for s, site in made.items()}
    with pytest.raises(RefusedError, match="site 'b' are not signed by it"):
        made[A].shares({**keys, B: replace(keys[B], commitment=bytes(32))})
    run = exchange(sites)  # without signatures: shown to a alone, it is seen by the others
    fair = {name: site.keys() for name, site in run.sites.items()}
    from_a = run.sites[A].shares({**fair, B: replace(fair[B], commitment=bytes(32))})
    from_c = run.sites[C].shares(fair)
    run.sites[B].shares(fair)
    with pytest.raises(RefusedError, match="shares of site 'a' cannot be opened"):
        run.sites[B].masked({A: from_a.boxes[B], C: from_c.boxes[B]}, ones((A,))[A])


def test_what_a_site_sent_is_no_message_to_itself(exchange: type) -> None:
    """One key for each direction: a server that sends a site its own box or receipts back, as
    another's, has nothing of it."""
    run = exchange((A, B, C, D))
    boxes = run.set_up()
    own = run.server._boxes[A].boxes
    with pytest.raises(RefusedError, match="shares of site 'b' cannot be opened"):
        run.sites[A].masked({**boxes[A], B: own[B]}, ones((A,))[A])
    messages = run.upload(ones((A, B, C, D)), boxes)
    assert messages[A].receipts[B] != messages[B].receipts[A]
    request = run.server.requests()[A]
    reflected = replace(request, receipts={**request.receipts, B: messages[A].receipts[B]})
    with pytest.raises(RefusedError, match="site 'b' was asked something else"):
        run.sites[A].unmask(reflected)
    run.sites[A].unmask(request)


# wrong shares


def spoilt(answer: UnmaskMessage) -> UnmaskMessage:
    """All shares in it, each another number of the field."""

    def wrong(share: bytes) -> bytes:
        return bytes(1) + hashlib.sha256(share).digest()

    return replace(
        answer,
        masks={s: wrong(raw) for s, raw in answer.masks.items()},
        keys={s: wrong(raw) for s, raw in answer.keys.items()},
    )


def opened(exchange: type, liars: str, threshold: int, gone: str = "") -> tuple[Any, Any]:
    """The server and its total, with wrong shares from the liars."""
    run = exchange(SIX, threshold)
    run.upload({s: u for s, u in ones(SIX).items() if s not in gone}, run.set_up())
    for site, answer in run.answers().items():
        run.server.add_unmask(spoilt(answer) if site in liars else answer)
    return run.server, run.server.total()


@pytest.mark.parametrize("liars", ["a", "c", "f", "ab", "cd", "af"])
def test_the_sum_is_made_without_the_wrong_shares(liars: str, exchange: type) -> None:
    """Against the plain sum. Sites that the server did not need lied to nobody: f is among the
    first four of no attempt unless another one is left out."""
    server, total = opened(exchange, liars, 4)
    assert total.tensors["w"].tolist() == [63.0] * 4
    assert total.included == SIX
    named = {site for site, _ in server.doubtful}
    assert named == (set() if liars == "f" else set(liars))
    server, total = opened(exchange, liars[:1], 4, gone="e")  # its key is rebuilt too
    assert total.tensors["w"].tolist() == [63.0 - 16.0] * 4
    assert {site for site, _ in server.doubtful} == named & {liars[0]}


def test_where_no_answer_can_be_spared_the_sum_is_given_up(exchange: type) -> None:
    for liars, threshold in (("b", 6), ("ab", 5), ("abc", 4)):
        with pytest.raises(TrainingError, match="shares of the mask of site 'a' do not fit"):
            opened(exchange, liars, threshold)


def test_a_site_that_dealt_a_wrong_share_is_named_with_who_opened_it(exchange: type) -> None:
    """Nobody can tell which of the two it was; for all other secrets b's shares are right."""
    run = exchange(SIX, 4)
    run.upload(ones(SIX), run.set_up())
    other = share_bytes(bytes(32), 4, range(1, 7))
    for site, answer in run.answers().items():
        dealt = {**answer.masks, D: other[2]} if site == B else answer.masks
        run.server.add_unmask(replace(answer, masks=dealt))
    assert run.server.total().tensors["w"].tolist() == [63.0] * 4
    assert run.server.doubtful == [(B, D)]
