"""A damaged checkpoint leads to the previous one or to an error with a remedy."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_net import toys
from fault_toy import SITES, Toy, toy_job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fednotes.core.errors import ModelError
from fednotes.core.federation import State
from fednotes.core.tensors import load_state, save_state
from fednotes.engines.deployed import Deployed
from fednotes.engines.inprocess import InProcess

NAMES = ("tensors.safetensors", "facts.json", "manifest.json")
JUNK = st.one_of(
    st.binary(max_size=80),
    st.sampled_from(
        [b"", b"{}", b"[]", b"null", b"[" * 100_000, b'{"a":' * 5_000, b"\xff\xfe"]
    ),
    st.sampled_from(
        [b'{"format":1}', b'{"format":1,"sha256":{}}', b'{"format":1,"sha256":null}']
    ),
)
VALUES: Any = st.sampled_from(
    [None, True, -1, 1.5, "x", [], {}, [1], {"a": None}, "9" * 30, [[]]]
)
DTYPES = (torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places in a JSON value, including its tables."""
    if path:
        yield path
    inside = dict(enumerate(value)) if isinstance(value, list) else value
    for key, inner in inside.items() if isinstance(inside, dict) else ():
        yield from leaves(inner, (*path, key))


def sealed(folder: Path, facts: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the content, under correct checksums."""
    (folder / "facts.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "tensors.safetensors")
    sums = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in NAMES[:2]}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "sha256": sums}))


@st.composite
def damages(draw: Any) -> Callable[[Path], str]:
    """Return a kind of damage to a folder; "" if the folder may still be whole."""
    kind = draw(
        st.sampled_from(
            ["cut", "junk", "gone", "flip", "facts", "key", "dtype", "shape"]
        )
    )
    name, number = draw(st.sampled_from(NAMES)), draw(st.integers(0))
    junk, value = draw(JUNK), draw(VALUES)

    def damage(folder: Path) -> str:
        file, raw = folder / name, (folder / name).read_bytes()
        tensors = load_file(folder / NAMES[0])
        facts = json.loads((folder / NAMES[1]).read_text())
        if kind == "cut":
            file.write_bytes(raw[: number % len(raw)])
        elif kind == "junk":
            file.write_bytes(junk)
        elif kind == "gone":
            file.unlink()
        elif kind == "flip":
            at = number % len(raw)
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        elif kind in ("facts", "key"):
            places = list(leaves(facts))
            *outer, last = places[number % len(places)]
            inside: Any = facts
            for key in outer:
                inside = inside[key]
            if kind == "facts":
                inside[last] = value
            else:
                del inside[last]
            sealed(folder, facts, tensors)
            return ""
        else:
            tensor_name = sorted(tensors)[number % len(tensors)]
            changed = tensors[tensor_name].to(DTYPES[number % len(DTYPES)])
            tensors[tensor_name] = (
                changed if kind == "dtype" else tensors[tensor_name].reshape(1, -1)
            )
            sealed(folder, facts, tensors)
            return ""
        return kind

    return damage


def embedded(folder: Path, *, resume: bool = False) -> InProcess:
    return InProcess([Toy(site) for site in SITES], directory=folder, resume=resume)


def deployed(folder: Path) -> Deployed:
    return toys(folder).engine(SITES)


@pytest.fixture(scope="module")
def intact_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a run of each engine, with two checkpoints each."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("embedded", "deployed")}
    toy_job(embedded(folders["embedded"]), {})
    toy_job(deployed(folders["deployed"]), {})
    return folders


LONG = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def outcome(resume: Callable[[], State | None]) -> tuple[int, str]:
    """Return the round from which a run resumes, or why it does not."""
    try:
        state = resume()
    except ModelError as error:
        return -1, str(error)
    return (state.round if state else 0), ""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["embedded", "deployed"])
@LONG
@given(damages())
def test_an_engine_falls_back_to_an_earlier_checkpoint_or_reports_the_damage(
    engine: str,
    intact_checkpoints: dict[str, Path],
    tmp_path: Path,
    damage: Callable[[Path], str],
) -> None:
    folder = tmp_path / "c"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(intact_checkpoints[engine], folder)
    surely = damage(max(folder.rglob("round-*")))
    resumed = {
        "embedded": lambda: embedded(folder, resume=True).resume(),
        "deployed": lambda: deployed(folder).resume(),
    }
    round, why = outcome(resumed[engine])
    if surely:
        assert (round, why) == (2, "")
    assert round in (2, 4) or "has the sites" in why or "start a new run" in why


@pytest.mark.parametrize("names", [[1, None], [["a"]], [], 3])
def test_a_checkpoint_with_invalid_site_names_is_refused(
    names: Any, intact_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Under right checksums; a number in the older one that is none is passed over."""
    shutil.copytree(intact_checkpoints["deployed"], tmp_path / "c")
    older, newer = sorted((tmp_path / "c").rglob("round-*"))

    def change(folder: Path, **changes: Any) -> None:
        facts = json.loads((folder / "facts.json").read_text())
        facts["progress"] |= changes
        sealed(folder, facts, load_file(folder / NAMES[0]))

    change(older, number=float("inf"))
    state = deployed(tmp_path / "c").resume()
    assert state is not None
    assert state.round == 4
    change(older, counted=names)
    change(newer, counted=names)
    with pytest.raises(ModelError, match="start a new run"):
        deployed(tmp_path / "c")


def test_an_error_names_the_reason_if_all_checkpoints_are_damaged(
    intact_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(intact_checkpoints["embedded"], tmp_path / "c")
    for folder in (tmp_path / "c").glob("round-*"):
        (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(
        ModelError,
        match=r"start again without `resume` \(the newest: .*nested too deeply",
    ):
        embedded(tmp_path / "c", resume=True)


@pytest.mark.parametrize(
    "sums", ["{}", "null", '{"facts.json": ""}', '{"facts.json": "", "x": 1}']
)
def test_a_file_without_its_checksum_is_refused(tmp_path: Path, sums: str) -> None:
    save_state(tmp_path / "s", {"w": torch.ones(2)}, {})
    (tmp_path / "s" / "manifest.json").write_text(f'{{"format": 1, "sha256": {sums}}}')
    with pytest.raises(ModelError, match=r"a checksum for each file|cannot read"):
        load_state(tmp_path / "s")
