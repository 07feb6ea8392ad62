"""The server's transcript of the secure sum reveals the sum and no summand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from secagg import Exchange

from fednotes.core.messages import to_json_values
from fednotes.core.update import Update
from fednotes.privacy.secure_sum import crypto, server
from fednotes.privacy.secure_sum import site as secagg_site
from fednotes.privacy.secure_sum.crypto import SHARE_BYTES, add_streams, combine_shares
from fednotes.privacy.secure_sum.fixed_point import SumLayout, encode_update
from fednotes.privacy.secure_sum.messages import UnmaskMessage
from fednotes.privacy.secure_sum.site import derive_pair_mask_key, derive_self_mask_key

A, B, C, D = "abcd"
SIZE = 40_000


class Oracle:
    """Streams as truly random functions of their keys: a table, in place of ChaCha20.

    The streams of pairs are known by the pair, whoever derives the key."""

    def __init__(
        self, patch: pytest.MonkeyPatch, shifts: dict[frozenset[str], Any]
    ) -> None:
        self.pairs: dict[bytes, frozenset[str]] = {}
        self.shifts = shifts

        def named(
            secret: bytes, session: bytes, first: str, second: str, layout: bytes
        ) -> bytes:
            key = derive_pair_mask_key(secret, session, first, second, layout)
            self.pairs[key] = frozenset((first, second))
            return key

        def added(words: crypto.Words, streams: list[tuple[bytes, int]]) -> None:
            add_streams(words, streams)
            for key, sign in streams:
                shift = self.shifts.get(self.pairs.get(key, frozenset()))
                if shift is not None:
                    (np.add if sign > 0 else np.subtract)(words, shift, out=words)

        patch.setattr(secagg_site, "derive_pair_mask_key", named)
        patch.setattr(server, "derive_pair_mask_key", named)
        patch.setattr(crypto, "add_streams", added)


def tables(sent: list[Any]) -> list[Any]:
    return [
        (
            to_json_values(message, "words"),
            getattr(message, "words", np.empty(0)).tobytes(),
        )
        for message in sent
    ]


@pytest.mark.parametrize("dropped", [(), (D,)])
def test_the_transcript_does_not_determine_a_summand(
    monkeypatch: pytest.MonkeyPatch, dropped: tuple[str, ...]
) -> None:
    """An algebraic proof. Let p(u, v) be the stream of a pair, y(u) = x(u) + b(u) + Σ ±
    p(u, v). For any x' with Σ x' = Σ x put d = x' - x and

        p'(a, b) = p(a, b) - d(a),   p'(b, c) = p(b, c) - d(a) - d(b) = p(b, c) + d(c).

    Then y'(a) = y(a) + d(a) - d(a), y'(b) = y(b) + d(b) + d(a) - d(a) - d(b), y'(c) =
    y(c) + d(c) - d(c): every message is the same. The streams between survivors are
    never opened, so with ideal streams x and x' are equally likely, whoever dropped
    out. The test plays both."""
    sites = (A, B, C, D)[: 3 + len(dropped)]
    first = {s: Update({"w": torch.arange(4.0) + i}, 1.0 + i, {"n": 5.0 * i})
             for i, s in enumerate(sites)}  # fmt: skip
    alternative = {
        A: Update({"w": torch.tensor([1000.0, -7.0, 0.5, 0.0])}, 2.0, {"n": 15.0}),
        B: Update({"w": torch.zeros(4)}, 3.0, {"n": 0.0}),
    }
    remaining = [float(sum(first[s].weight * first[s].tensors["w"][i] for s in (A, B, C)))
            - float(sum(u.weight * u.tensors["w"][i] for u in alternative.values()))
            for i in range(4)]  # fmt: skip
    alternative[C] = Update({"w": torch.tensor(remaining)}, 1.0, {"n": 0.0})
    alternative |= {site: first[site] for site in dropped}
    layout = SumLayout.of(first[A], len(sites))
    d = {
        s: encode_update(alternative[s], layout) - encode_update(first[s], layout)
        for s in (A, B, C)
    }
    assert not (d[A] + d[B] + d[C]).any()
    assert all(part.any() for part in d.values())

    real = Exchange(sites, seed="same")
    with monkeypatch.context() as patch:
        Oracle(patch, {})
        total = real.run(first, no_update=dropped)
    with monkeypatch.context() as patch:
        Oracle(patch, {frozenset((A, B)): np.uint64(0) - d[A], frozenset((B, C)): d[C]})
        fake = Exchange(sites, seed="same")
        assert torch.equal(
            fake.run(alternative, no_update=dropped).tensors["w"], total.tensors["w"]
        )
    assert tables(fake.sent) == tables(real.sent)
    plain = Exchange(sites, seed="same")  # other inputs under the first masks show up
    plain.run(alternative, no_update=dropped)
    assert tables(plain.sent) != tables(real.sent)


def uniform(words: crypto.Words) -> float:
    """Return the p-value of Pearson's chi-square test of the bytes being uniform."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    return float(stats.chisquare(counts).pvalue)


def test_masked_uploads_look_uniform() -> None:
    """SciPy's chi-square on all bytes and on each byte of the word, Pearson's
    correlation of every bit with the input; the bare encoding fails both. Fixed seed:
    no chance of 1 in 10^4."""
    draw = np.random.default_rng(0)
    values = np.where(draw.random(SIZE) < 0.5, 1.0, -1.0) * draw.uniform(1, 1000, SIZE)
    updates = {
        s: Update({"w": torch.from_numpy(values).float()}, 10.0) for s in (A, B, C)
    }
    run = Exchange((A, B, C), seed="uniform")
    messages = run.upload(updates)
    bare = encode_update(updates[A], messages[A].layout)
    assert uniform(bare) < 1e-100
    for message in messages.values():
        assert uniform(message.words) > 1e-4
        by_place = message.words.view(np.uint8).reshape(-1, 8)
        for place in range(8):
            assert (
                stats.chisquare(np.bincount(by_place[:, place], minlength=256)).pvalue
                > 1e-4
            )

    def correlation(words: crypto.Words) -> float:
        bits = (
            np.unpackbits(words[:SIZE].view(np.uint8)).reshape(SIZE, 64).astype(float)
        )
        bits -= bits.mean(0)
        with np.errstate(invalid="ignore"):
            each = (
                (bits * (values - values.mean())[:, None]).mean(0)
                / values.std()
                / bits.std(0)
            )
        return float(np.nanmax(np.abs(each)))

    assert correlation(bare) > 0.5
    for first, second in ((A, B), (B, C), (C, A)):
        assert correlation(messages[first].words) < 4.5 / SIZE**0.5
        assert (
            correlation(messages[first].words + messages[second].words)
            < 4.5 / SIZE**0.5
        )


def test_equal_updates_under_fresh_keys_look_unrelated() -> None:
    """The difference of two uploads of the same numbers is uniform, in two exchanges
    and at two sites, and so is an upload of zeros."""
    updates = {s: Update({"w": torch.zeros(SIZE)}) for s in (A, B, C)}
    uploads = []
    for number in (0, 1):
        run = Exchange(
            (A, B, C), context=crypto.join_parts("job", number), seed=f"fresh {number}"
        )
        uploads.append(run.upload(updates))
    assert uniform(uploads[0][A].words) > 1e-4
    assert uniform(uploads[0][A].words - uploads[1][A].words) > 1e-4
    assert uniform(uploads[0][A].words - uploads[0][B].words) > 1e-4


def opened(
    run: Any, answers: list[UnmaskMessage], dropped: str
) -> tuple[bytes, dict[str, bytes]]:
    """Return what a recovery gives the server.

    That is the masking key of a dropped site and the seeds of the others.
    """

    def points(shares: dict[str, bytes]) -> dict[int, bytes]:
        return {run.names.index(site) + 1: share for site, share in shares.items()}

    key = combine_shares(points({a.site: a.keys[dropped] for a in answers}))
    seeds = {
        s: combine_shares(points({a.site: a.masks[s] for a in answers}))
        for s in answers[0].masks
    }
    return key, seeds


def test_recovery_in_one_exchange_opens_no_other() -> None:
    """The server uses everything that it learnt in exchange 0, where c dropped out,
    against the messages of exchange 1, as an attacker would; the same steps do open c's
    pair masks of 0."""
    updates = {s: Update({"w": torch.ones(50)}) for s in (A, B, C)}
    runs = [
        Exchange((A, B, C), context=crypto.join_parts("job", number))
        for number in (0, 1)
    ]
    boxes = [run.set_up() for run in runs]
    sent = [
        runs[0].upload({s: updates[s] for s in (A, B)}, boxes[0]),
        runs[1].upload(updates, boxes[1]),
    ]
    # arrived too late for the sum
    late = runs[0].sites[C].mask_update(boxes[0][C], updates[C])
    key, seeds = opened(runs[0], list(runs[0].answers().values()), C)

    def stripped(number: int, with_seed: bytes | None) -> crypto.Words:
        """Return c's update of an exchange less every mask that `key` and `with_seed`
        give."""
        message, keys = (late, sent[1][C])[number], runs[number].server.collect_keys()
        layout = message.layout.compute_digest()
        session = secagg_site.compute_session_id(
            runs[number].server.exchange, list(keys.values())
        )
        streams = []
        for site in (A, B):
            secret = crypto.compute_shared_secret(
                crypto.load_private_key(key), keys[site].masking, site
            )
            sign = -1 if site > C else 1
            streams.append(
                (derive_pair_mask_key(secret, session, site, C, layout), sign)
            )
        if with_seed is not None:
            streams.append((derive_self_mask_key(with_seed, session, layout), -1))
        words = message.words.copy()
        add_streams(words, streams)
        return words

    bare = encode_update(updates[C], late.layout)
    own_seed = runs[0].sites[C]._seed
    assert (
        stripped(0, own_seed) == bare
    ).all()  # key and seed of 0 open its update of 0 …
    assert C not in seeds
    # … but the seed of who dropped out is not opened
    assert (stripped(0, None) != bare).all()
    for seed in (own_seed, *seeds.values()):
        assert (stripped(1, seed) != bare).all()
    public = [
        {k.sharing, k.masking, k.commitment}
        for r in runs
        for k in r.server.collect_keys().values()
    ]
    assert len(set.union(*public)) == 3 * len(public)
    secrets = [key, own_seed, *seeds.values()]
    for site in (A, B):  # boxes of exchange 1 under whatever exchange 0 opened
        box, keys = boxes[1][site][C], runs[1].server.collect_keys()
        session = secagg_site.compute_session_id(
            runs[1].server.exchange, list(keys.values())
        )
        for raw in secrets:
            secret = crypto.compute_shared_secret(
                crypto.load_private_key(raw), keys[site].sharing, site
            )
            use = crypto.derive_key(secret, session, "shares", C, site)
            assert crypto.unseal(use, box, session) is None
    used = runs[1].sites[C]._held[C][:SHARE_BYTES]
    assert used not in runs[0].sites[A]._held.values()


def test_secrets_are_deleted_after_the_answer() -> None:
    """No attribute of a site that answered, at any depth, holds a secret of the
    exchange."""
    run = Exchange((A, B, C), seed="gone")
    source = Exchange((A, B, C), seed="gone")
    secrets_before = [(s._seed, s._masking_bytes) for s in source.sites.values()]
    run.run({s: Update({"w": torch.ones(2)}) for s in (A, B, C)})
    for site, (seed, key) in zip(run.sites.values(), secrets_before, strict=True):
        text = repr(vars(site))
        assert repr(seed) not in text
        assert repr(key) not in text
        assert site._held == site._secrets == {}
        assert crypto.derive_public_key(site._masking) != crypto.derive_public_key(
            crypto.load_private_key(key)
        )
