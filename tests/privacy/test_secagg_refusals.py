"""A server that lies to the sites of a secure sum, and what each lie would reveal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from secagg import Ed25519Identity, Exchange, identities, powers

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.update import Update
from fednotes.privacy.secure_sum import Parties, crypto
from fednotes.privacy.secure_sum.crypto import add_streams, combine_shares
from fednotes.privacy.secure_sum.fixed_point import encode_update
from fednotes.privacy.secure_sum.messages import (
    KeysMessage,
    MaskedMessage,
    UnmaskRequest,
)
from fednotes.privacy.secure_sum.site import (
    SecureSite,
    compute_session_id,
    derive_pair_mask_key,
    derive_self_mask_key,
)

A, B, C, D, E = "abcde"
FIVE = (A, B, C, D, E)


def signing(
    sites: tuple[str, ...],
) -> tuple[dict[str, SecureSite], dict[str, KeysMessage]]:
    """Return sites that sign their keys, and the keys."""
    sites_signing = {
        s: SecureSite(s, Parties(sites), b"x", site_identity)
        for s, site_identity in identities(sites).items()
    }
    return sites_signing, {s: site.make_keys() for s, site in sites_signing.items()}


def ask_to_unmask(sites: tuple[str, ...], dropped: tuple[str, ...] = ()) -> Any:
    """Run an exchange up to the server's requests to unmask."""
    run = Exchange(sites)
    run.upload({s: u for s, u in powers(sites).items() if s not in dropped})
    run.requests = run.server.make_requests()
    return run


def test_dishonest_lists_of_survivors_are_refused() -> None:
    run = ask_to_unmask((A, B, C, D), dropped=(D,))
    fair = run.requests[A]
    assert (fair.survivors, fair.dropped) == ((A, B, C), (D,))
    lies: list[tuple[dict[str, Any], str]] = [
        ({"dropped": (C, D)}, "'c' is listed as a survivor and as dropped"),
        ({"survivors": (A, B, C, C)}, "contain a site twice"),
        (
            {"survivors": (A, B), "dropped": (C, D)},
            "2 sites in the list of survivors: .* 3",
        ),
        ({"survivors": (B, C, D), "dropped": (A,)}, "leaves out this site, 'a'"),
        ({"dropped": ()}, "'d' is either in the sum or in the lists"),
        ({"dropped": (D, "x")}, "'x' is either in the sum or in the lists"),
        (
            {"survivors": (A, B, C, D), "dropped": ()},
            "sites 'd' and 'a' received different requests",
        ),
        ({"receipts": {}}, "sites '[bc]' and 'a' received different requests"),
        (
            {"receipts": {B: fair.receipts[C], C: fair.receipts[B]}},
            "sites '[bc]' and 'a' received different requests",
        ),
        (
            {"receipts": run.requests[B].receipts},
            "sites '[bc]' and 'a' received different requests",
        ),
        ({"exchange": bytes(32)}, "another exchange"),
    ]
    for lie, why in lies:
        with pytest.raises(RefusedError, match=why):
            run.sites[A].unmask(replace(fair, **lie))
    answer = run.sites[A].unmask(fair)  # no lie has spoilt the exchange
    assert (set(answer.masks), set(answer.keys)) == ({A, B, C}, {D})


def test_only_one_list_of_survivors_is_answered() -> None:
    """First c is a survivor, then it is said to have dropped out: both shares together
    would open its update."""
    run = ask_to_unmask((A, B, C, D))
    fair = run.requests[A]
    second_request = replace(fair, survivors=(A, B, D), dropped=(C,))
    answer = run.sites[A].unmask(fair)
    with pytest.raises(RefusedError, match="'unmask' is refused"):
        run.sites[A].unmask(second_request)
    assert run.sites[A].unmask(fair) == answer
    assert run.sites[A].unmask(replace(fair, survivors=(D, C, B, A))) == answer
    run.sites[B].confirm(run.requests[B])
    with pytest.raises(
        RefusedError, match="already answered another list of survivors"
    ):
        run.sites[B].unmask(replace(run.requests[B], survivors=(A, B, D), dropped=(C,)))
    assert set(run.sites[B].unmask(run.requests[B]).keys) == set()


def asked_of(
    run: Any, lists: dict[str, tuple[str, ...]], messages: dict[str, MaskedMessage]
) -> dict[str, UnmaskRequest]:
    """Return the requests of a server that shows each site a list of its own."""
    return {
        to: UnmaskRequest(
            run.server.exchange,
            listed,
            tuple(s for s in FIVE if s not in listed),
            {s: messages[s].receipts.get(to, bytes(32)) for s in listed if s != to},
        )
        for to, listed in lists.items()
    }


def short_roster() -> tuple[Any, dict[str, UnmaskRequest]]:
    """Return an exchange in which site a sees a roster of a, b, c, the others one of
    five.

    Then b and c "drop out".
    """
    run = Exchange(FIVE)
    boxes = run.set_up()
    boxes[A] = {s: boxes[A][s] for s in (B, C)}
    run.masked = {
        s: run.sites[s].mask_update(boxes[s], u) for s, u in powers(FIVE).items()
    }
    roster = (A, D, E)
    # b and c are asked too, as survivors of lists of their own
    lists = {D: roster, E: roster, B: (A, B, D, E), C: (A, C, D, E)}
    return run, asked_of(run, lists, run.masked)


def test_a_short_roster_for_one_site_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without receipts this opens a single site's update, with no site having given
    both shares of any other: the second half does it, with the check of receipts
    switched off."""
    run, requests = short_roster()
    for to, request in requests.items():
        with pytest.raises(
            RefusedError, match=r"sites 'a' and '.' received different requests"
        ):
            run.sites[to].unmask(request)

    run, requests = short_roster()
    anything = lambda first, second: True  # noqa: E731
    monkeypatch.setattr("fednotes.privacy.secure_sum.site.compare_digest", anything)
    answers = {to: run.sites[to].unmask(request) for to, request in requests.items()}
    assert not any(a.masks.keys() & a.keys.keys() for a in answers.values())

    def secret(part: str, owner: str) -> bytes:
        shares = {
            s: getattr(a, part)[owner]
            for s, a in answers.items()
            if owner in getattr(a, part)
        }
        assert len(shares) >= 3
        return combine_shares(
            {FIVE.index(s) + 1: share for s, share in list(shares.items())[:3]}
        )

    keys, words = run.server.collect_keys(), run.masked[A].words.copy()
    layout = run.masked[A].layout.compute_digest()
    session = compute_session_id(run.server.exchange, list(keys.values()))
    streams = [(derive_self_mask_key(secret("masks", A), session, layout), -1)]
    for site in (B, C):
        shared = crypto.compute_shared_secret(
            crypto.load_private_key(secret("keys", site)), keys[A].masking, A
        )
        streams.append((derive_pair_mask_key(shared, session, A, site, layout), -1))
    add_streams(words, streams)
    assert (words == encode_update(powers(FIVE)[A], run.masked[A].layout)).all()


def two_lists(confirmed: bool) -> tuple[Any, dict[str, UnmaskRequest]]:
    """Return two lists for five sites, t = 3, that open the sum of a and b alone.

    Each of c, d and e is left out by three sites.
    """
    run = Exchange(FIVE, confirmed=confirmed)
    messages = run.upload(powers(FIVE))
    lists = {A: (A, B, C), B: (A, B, D), C: (A, B, C), D: (A, B, D), E: (A, B, E)}
    return run, asked_of(run, lists, messages)


def test_confirmation_detects_different_lists() -> None:
    """With confirmation no site opens anything. Without it, the lists give shares
    enough for a sum of two, never of one:
    `test_a_lying_server_cannot_open_a_sum_of_one_site` says so.
    """
    run, requests = two_lists(confirmed=True)
    confirmations = {
        to: run.sites[to].confirm(request) for to, request in requests.items()
    }
    for to, request in requests.items():
        received = {
            s: c.confirmations[to]
            for s, c in confirmations.items()
            if to in c.confirmations
        }
        with pytest.raises(
            RefusedError, match=r"received another list|confirmed the survivors"
        ):
            run.sites[to].unmask(replace(request, confirmations=received))
        with pytest.raises(
            RefusedError, match="1 sites confirmed the survivors, 3 are needed"
        ):
            run.sites[to].unmask(request)
        same = {
            s: raw
            for s, raw in received.items()
            if requests[s].survivors == request.survivors
        }
        with pytest.raises(RefusedError, match=r"[12] sites confirmed"):
            run.sites[to].unmask(
                replace(request, confirmations={**same, "x": b"", to: b""})
            )

    run, requests = two_lists(confirmed=False)
    answers = [run.sites[to].unmask(request) for to, request in requests.items()]
    masks_of = {s: sum(s in a.masks for a in answers) for s in FIVE}
    keys_of = {s: sum(s in a.keys for a in answers) for s in FIVE}
    assert {s for s in FIVE if masks_of[s] >= 3} == {A, B}
    assert {s for s in FIVE if keys_of[s] >= 3} == {C, D, E}


def test_a_confirmed_exchange_gives_the_same_total() -> None:
    for dropped in ((), (D, E)):
        plain, sure = Exchange(FIVE), Exchange(FIVE, confirmed=True)
        plain_total, confirmed_total = (
            run.run(powers(FIVE), no_update=dropped) for run in (plain, sure)
        )
        assert torch.equal(plain_total.tensors["w"], confirmed_total.tensors["w"])
        assert plain_total.included == confirmed_total.included
    mixed = SecureSite(A, Parties(FIVE, confirmed=True), b"job/run/0")
    with pytest.raises(RefusedError, match="another exchange"):
        plain.server.__class__(Parties(FIVE, confirmed=False), b"job/run/0").add_keys(
            mixed.make_keys()
        )


def test_dishonest_lists_of_keys_are_refused() -> None:
    run = Exchange((A, B, C))
    fair = {name: site.make_keys() for name, site in run.sites.items()}
    own_keys = fair[A]
    lies: list[tuple[dict[str, KeysMessage], str]] = [
        ({A: own_keys}, "1 sites in the list of keys: a sum needs at least 2"),
        ({B: fair[B], C: fair[C]}, "leaves out this site"),
        ({**fair, "x": replace(own_keys, site="x")}, "site 'x' in the list of keys"),
        (
            {**fair, A: replace(own_keys, sharing=fair[B].sharing)},
            "keys for this site that it did not send",
        ),
        ({**fair, B: replace(fair[B], site=C)}, "keys of site 'c' are listed as 'b'"),
        ({**fair, B: replace(fair[B], sharing=fair[C].sharing)}, "same key twice"),
        ({**fair, B: replace(fair[B], masking=own_keys.masking)}, "same key twice"),
        ({**fair, B: replace(fair[B], sharing=b"short")}, "wrong length"),
        ({**fair, B: replace(fair[B], exchange=bytes(32))}, "another exchange"),
        ({**fair, B: replace(fair[B], sharing=bytes(32))}, "not a usable X25519 key"),
    ]
    for keys, why in lies:
        fresh = Exchange((A, B, C)).sites[A]
        fresh._own_keys = own_keys
        with pytest.raises(RefusedError, match=why):
            fresh.make_shares(keys)


def test_different_keys_for_two_sites_are_detected_by_the_second() -> None:
    """The server puts another commitment or its own masking key in b's place, for a
    only: a and b then disagree on the digest of all keys, which every box is bound to.
    """
    theirs = crypto.derive_public_key(crypto.load_private_key(b"7" * 32))
    for change in ({"commitment": bytes(32)}, {"masking": theirs}):
        run = Exchange((A, B, C))
        fair = {name: site.make_keys() for name, site in run.sites.items()}
        from_a = run.sites[A].make_shares({**fair, B: replace(fair[B], **change)})
        from_b, from_c = run.sites[B].make_shares(fair), run.sites[C].make_shares(fair)
        with pytest.raises(RefusedError, match="shares of site 'a' cannot be opened"):
            run.sites[B].mask_update(
                {A: from_a.boxes[B], C: from_c.boxes[B]}, powers((A,))[A]
            )
    with pytest.raises(RefusedError, match="shares of site 'b' cannot be opened"):
        run.sites[A].mask_update({B: from_b.boxes[A]}, powers((A,))[A])
    with pytest.raises(RefusedError, match="1 sites in the list of shares"):
        run.sites[A].mask_update({}, powers((A,))[A])
    with pytest.raises(RefusedError, match="shares of site 'c' cannot be opened"):
        run.sites[B].mask_update(
            {C: from_c.boxes[A]}, powers((A,))[A]
        )  # meant for another
    with pytest.raises(RefusedError, match="site 'x' in the list of shares"):
        run.sites[B].mask_update({C: from_c.boxes[B], "x": b""}, powers((A,))[A])
    good = run.sites[B].mask_update({C: from_c.boxes[B]}, powers((A,))[A])
    assert set(good.receipts) == {C}


def test_signed_keys_cannot_be_replaced() -> None:
    """A server in the middle with keys of its own would read every share; signatures,
    whose keys it does not hold, stop it at the first step."""
    parties, identity = Parties((A, B, C)), identities((A, B, C))[B]
    honest_sites, keys = signing((A, B, C))
    theirs = crypto.derive_public_key(crypto.load_private_key(b"7" * 32))
    forged = replace(keys[B], sharing=theirs)
    signed = replace(forged, signature=Ed25519Identity(b"8" * 32, {}).sign(b""))
    unsigned = SecureSite(B, parties, b"x").make_keys()
    old_keys = SecureSite(B, parties, b"y", identity).make_keys()
    replayed = replace(old_keys, exchange=keys[B].exchange)
    # the server would believe another seed
    committed = replace(keys[B], commitment=bytes(32))
    for lie in (
        forged,
        signed,
        unsigned,
        replayed,
        committed,
        replace(keys[C], site=B),
    ):
        with pytest.raises(RefusedError, match="site 'b' are not signed by it"):
            honest_sites[A].make_shares({**keys, B: lie})
    assert set(honest_sites[A].make_shares(keys).boxes) == {B, C}


def test_a_site_refuses_its_own_messages() -> None:
    """One key for each direction: a server that sends a site its own box or receipts
    back, as another's, has nothing of it."""
    run = Exchange((A, B, C, D))
    boxes = run.set_up()
    own_boxes = run.server._boxes[A].boxes
    with pytest.raises(RefusedError, match="shares of site 'b' cannot be opened"):
        run.sites[A].mask_update({**boxes[A], B: own_boxes[B]}, powers((A,))[A])
    messages = run.upload(powers((A, B, C, D)), boxes)
    assert messages[A].receipts[B] != messages[B].receipts[A]
    request = run.server.make_requests()[A]
    reflected = replace(
        request, receipts={**request.receipts, B: messages[A].receipts[B]}
    )
    with pytest.raises(
        RefusedError, match="sites 'b' and 'a' received different requests"
    ):
        run.sites[A].unmask(reflected)
    run.sites[A].unmask(request)


def test_steps_are_accepted_once_and_in_order() -> None:
    run = Exchange((A, B, C))
    site, update = run.sites[A], powers((A,))[A]
    nothing = UnmaskRequest(site.exchange, (A, B, C), (), {})
    with pytest.raises(RefusedError, match=r"'masked' is refused.*is at 'keys'"):
        site.mask_update({}, update)
    with pytest.raises(RefusedError, match="'unmask' is refused"):
        site.unmask(nothing)
    boxes = run.set_up()
    with pytest.raises(RefusedError, match="'shares' is refused"):
        site.make_shares(run.server.collect_keys())
    with pytest.raises(RefusedError, match="'unmask' is refused"):
        site.unmask(nothing)
    site.mask_update(boxes[A], update)
    with pytest.raises(RefusedError, match="'masked' is refused"):
        # two updates under one mask would show their difference
        site.mask_update(boxes[A], update)
    site.forget()
    with pytest.raises(RefusedError, match="is at 'closed'"):
        site.unmask(nothing)


def test_a_server_cannot_try_limits_one_after_the_other() -> None:
    """A search for the largest value ends after two refusals, also if a third limit
    would fit."""
    run = Exchange((A, B, C))
    boxes, update = run.set_up(), Update({"w": torch.full((2,), 5.0)})
    for limit in (0, 1):
        with pytest.raises(TrainingError, match="limit"):
            run.sites[A].mask_update(boxes[A], update, limits={"w": limit})
    with pytest.raises(RefusedError, match="is at 'closed'"):
        run.sites[A].mask_update(boxes[A], update, limits={"w": 3})
    with pytest.raises(TrainingError, match="limit"):
        run.sites[B].mask_update(boxes[B], update, limits={"w": 0})
    assert run.sites[B].mask_update(boxes[B], update, limits={"w": 3}).site == B
