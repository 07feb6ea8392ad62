"""Rows of word tables instead of whole tables: the same numbers, fewer bytes, nothing missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_taggers import MODEL, assert_same, generated, resumed, values

from fednotes.core.errors import TrainingError
from fednotes.core.tensors import nbytes
from fednotes.core.types import SiteData
from fednotes.core.update import Total
from fednotes.engines.inprocess import InProcess
from fednotes.methods import fedner, word_rows
from fednotes.methods.sites import all_tags

LARGE = replace(MODEL, hashed_words=2048)  # a table that travels by rows


@pytest.fixture(scope="module")
def sites() -> list[SiteData]:
    return generated(30)


def config(sites: list[SiteData], **changes: Any) -> fedner.Config:
    tags = all_tags(sites)
    base = fedner.Config(model=LARGE, batch_size=12, epochs=2, seed=3, tags=tags, sites=3)
    return replace(base, **changes)


def trained(sites: list[SiteData], settings: fedner.Config, **options: Any) -> Any:
    members = [fedner.Site(site, settings) for site in sites]
    return members, fedner.train(InProcess(members, **options), settings)


@pytest.mark.parametrize(
    ("private", "secure"), [(("lstm", "crf"), False), ((), False), (("lstm", "crf"), True)]
)
def test_a_run_has_the_bits_of_whole_tables(
    sites: list[SiteData],
    private: tuple[str, ...],
    secure: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Server, its optimizer's moments and every site; moments move rows that no batch has. Under
    the secure sum marks are integers, exact there: a row that nobody reads stays out; the grid of
    rounding is of the largest sum, which is that of the whole table."""
    settings = config(sites, private=private, epochs=1 if secure else 2)
    by_rows, state = trained(sites, settings, secure=secure)
    assert by_rows[0].tables == ("words.hashed",)
    monkeypatch.setattr(word_rows, "LEAST", 10_000)
    plain, expected = trained(sites, settings, secure=secure)
    assert plain[0].tables == ()
    assert_same(state.tensors, expected.tensors)
    assert state.facts == expected.facts
    for one, other in zip(by_rows, plain, strict=True):
        assert_same(one.model.trainable(), other.model.trainable())
        assert one.scores == other.scores


class Lossy:
    """A federation that loses chosen sites' replies to tasks, by how often each was asked."""

    def __init__(self, members: list[fedner.Site], lost: Mapping[tuple[str, int], tuple[int, ...]]):
        self.members, self.lost = members, lost
        self.asked: dict[str, int] = {}
        self.sent: list[tuple[str, int, int]] = []  # task, bytes there, bytes back

    def sum(self, task: str, tensors: Any = None, /, **options: Any) -> Total:
        number = self.asked[task] = self.asked.get(task, -1) + 1
        updates = [getattr(m, task)(tensors or {}, **options) for m in self.members]
        self.sent.append((task, nbytes(tensors or {}), nbytes(updates[0].tensors)))
        left_out = self.lost.get((task, number), ())
        return Total.of(u for i, u in enumerate(updates) if i not in left_out)


def rounds(
    federation: Lossy, settings: fedner.Config, number: int, **changes: Any
) -> fedner.Server:
    """The loop of `fedner.train`, a round a turn. changes: tables = () sends them whole."""
    server = fedner.Server(settings, None)
    server._tables = changes.get("tables", server._tables)
    fedner.agree_on_shares(federation)  # type: ignore[arg-type]
    for round in range(number):
        if server.lacks_rows:
            server.mark(federation.sum("mark", round=round))
        server.step(federation.sum("gradients", server.sent, round=round))
    return server


def test_after_a_lost_reply_rows_are_asked_for_anew(sites: list[SiteData]) -> None:
    """With the third site's reply of round 1 its marks for round 2 are lost; the run has the bits
    of whole tables with the same reply lost."""
    settings = config(sites)
    lost = {("gradients", 1): (2,)}
    by_rows = Lossy([fedner.Site(site, settings) for site in sites], lost)
    server = rounds(by_rows, settings, 5)
    assert by_rows.asked == {"count": 0, "take_share": 0, "mark": 1, "gradients": 4}
    plain = Lossy([fedner.Site(site, settings) for site in sites], lost)
    for member in plain.members:
        member.tables = ()
    expected = rounds(plain, settings, 5, tables=())
    assert "mark" not in plain.asked
    assert_same(server.shared, expected.shared)
    assert_same(server._adam.state(), expected._adam.state())
    for one, other in zip(by_rows.members, plain.members, strict=True):
        assert_same(one.private, other.private)


def test_a_site_that_misses_the_marks_too_trains_on_the_rows_it_had(sites: list[SiteData]) -> None:
    """Its gradient counts in the rows that came; marks are asked for until all sites are back."""
    settings = config(sites)
    lost = {("gradients", 1): (2,), ("gradients", 2): (2,), ("mark", 1): (2,), ("mark", 2): (2,)}
    federation = Lossy([fedner.Site(site, settings) for site in sites], lost)
    server = rounds(federation, settings, 5)
    assert federation.asked["mark"] == 2  # before rounds 0, 2 and 3
    assert [member.steps for member in federation.members] == [5, 5, 5]
    assert all(bool(torch.isfinite(value).all()) for value in server.shared.values())


def test_a_server_that_leaves_rows_out_learns_less(sites: list[SiteData]) -> None:
    """The same weight and counts, and the whole table's gradient in the rows that were asked for:
    nothing tells whether the site reads others."""
    settings = config(sites)
    one, other = fedner.Site(sites[0], settings), fedner.Site(sites[0], settings)
    shared = values(one.shared)
    other.tables = ()
    dense = other.gradients(shared, round=0)
    read = torch.nonzero(dense.tensors["words.hashed"].abs().sum(1)).flatten()
    asked = torch.unique(torch.cat([read[::2], torch.tensor([7])]))
    assert 1 < len(asked) < len(read)
    update = one.gradients(word_rows.some(shared, {"words.hashed": asked}), round=0)
    assert (update.weight, update.metrics) == (dense.weight, dense.metrics)
    assert torch.equal(update.tensors["words.hashed"], dense.tensors["words.hashed"][asked])
    assert_same(one.private, other.private)


def test_marks_are_of_the_rows_that_a_batch_reads(sites: list[SiteData]) -> None:
    """Against the gradient of a dense table: not zero there and nowhere else; and no two sites or
    steps have the same numbers."""
    settings = config(sites)
    member = fedner.Site(sites[0], settings)
    marks = member.mark({}, round=0).tensors["words.hashed.marks"]
    assert (marks.dtype, tuple(marks.shape)) == (torch.int32, (2048,))
    again = member.mark({}, round=0).tensors["words.hashed.marks"]
    assert torch.equal(marks, again)  # a request that comes again has the same reply
    other = fedner.Site(sites[0], settings)
    other.restore(member.state())
    assert torch.equal(marks, other._marks()["words.hashed.marks"])
    fresh = fedner.Site(sites[0], replace(settings, model=replace(LARGE, dropout=0.0)))
    assert not torch.equal(marks, fresh._marks()["words.hashed.marks"])
    assert torch.equal(marks != 0, fresh._marks()["words.hashed.marks"] != 0)
    fresh._backward(fresh._batch(0))
    gradient = fresh.shared["words.hashed"].grad
    assert gradient is not None
    assert torch.equal(marks != 0, gradient.abs().sum(1) > 0)
    assert marks.abs().max() > 2**20
    assert bool((marks < 0).any() and (marks > 0).any())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words.hashed.ids": torch.tensor([3, 3])}, "numbers of rows, 0 to 2,047, ascending"),
        ({"words.hashed.ids": torch.tensor([5, 3])}, "ascending"),
        ({"words.hashed.ids": torch.tensor([-1, 3])}, "ascending"),
        ({"words.hashed.ids": torch.tensor([3, 2048])}, "ascending"),
        ({"words.hashed.ids": torch.tensor([[3, 4]])}, "ascending"),
        ({"words.hashed.ids": torch.tensor([3.0, 4.0])}, "expected torch.int64"),
        ({"words.hashed": torch.zeros(3, 4)}, r"expected shape \(2, 4\)"),
        ({"words.hashed.ids": None}, "'words.hashed.ids' is expected but not received"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    sites: list[SiteData], change: dict[str, Any], message: str
) -> None:
    member = fedner.Site(sites[0], config(sites))
    good = word_rows.some(
        values(member.shared),
        {"words.hashed": torch.tensor([3, 4])},
    )
    before = values(member.shared)
    wrong = {n: v for n, v in (good | change).items() if v is not None}
    with pytest.raises(TrainingError, match=message):
        member.gradients(wrong, round=0)
    assert_same(before, values(member.shared))


def test_bytes_of_a_round(sites: list[SiteData]) -> None:
    """A table of 20,000 rows of 50: 4 MB whole each way; by rows four bytes a row for the marks,
    and the union's rows."""
    settings = config(sites, model=replace(LARGE, hashed_words=20_000, word_dim=50))
    federation = Lossy([fedner.Site(site, settings) for site in sites], {})
    server = rounds(federation, settings, 3)
    table = 20_000 * 50 * 4
    rest = nbytes({n: v for n, v in server.shared.items() if n != "words.hashed"})
    for task, there, back in federation.sent:
        if task == "gradients":
            assert rest < there < rest + table / 50
            assert rest < back < rest + 4 * 20_000 + table / 50


def test_resumed_after_a_kill_is_bit_identical(sites: list[SiteData], tmp_path: Path) -> None:
    settings = config(sites)
    whole, state = trained(sites, settings)
    members, again = resumed(lambda **options: trained(sites, settings, **options), tmp_path, 8)
    assert_same(state.tensors, again.tensors)
    for one, other in zip(whole, members, strict=True):
        assert_same(one.model.trainable(), other.model.trainable())
