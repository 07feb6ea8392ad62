"""What every folder that fednotes saves and loads must do if it is damaged.

A subclass in a test module says how one is saved and loaded:

    class TestTagger(SavedFolderSuite):
        error = ModelError

        @staticmethod
        def save(folder): ...

        @staticmethod
        def load(folder): ...
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from fednotes.core import store
from fednotes.core.errors import FednotesError, ModelError

ODD = (None, True, -1, 1.5, 10**30, "x", [], {}, [1], [[]], {"a": None})
DEEP = ("[" * 100_000, '{"a":' * 20_000, '{"format":' * 60 + "1" + "}" * 60)
DTYPES = (torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64)


def list_places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value in a JSON value, and of the whole as ()."""
    yield path
    inside = dict(enumerate(value)) if isinstance(value, list) else value
    for key, inner in inside.items() if isinstance(inside, dict) else ():
        yield from list_places(inner, (*path, key))


def with_value(value: Any, path: tuple[Any, ...], replacement: Any) -> Any:
    """Return a copy of a JSON value with another value at a place."""
    if not path:
        return replacement
    changed = copy.deepcopy(value)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = replacement
    return changed


class SavedFolderSuite:
    """Tests of a saved folder.

    Attributes:
        description: The name of its JSON file that describes it.
        weights: The name of its file of tensors.
        ignored: Keys of the description that are for people alone.
        varied: The keys of the description whose values are replaced; all if empty.
        has_one_type: Whether all tensors must have the type that they are saved with.
        least_refusals: How many odd values of the description must be refused.
        has_checksum: Whether the description has the checksum of the tensors.
        has_version: Whether the description has the version of its format.
        writers: The functions that write the files, of which none works when the disk
            is full.
    """

    description: ClassVar[str]
    weights: ClassVar[str]
    ignored: ClassVar[tuple[str, ...]] = ()
    varied: ClassVar[tuple[str, ...]] = ()
    has_one_type: ClassVar[bool] = True
    least_refusals: ClassVar[int] = 100
    has_checksum: ClassVar[bool] = True
    has_version: ClassVar[bool] = True
    writers: ClassVar[tuple[str, ...]] = (
        "pathlib.Path.write_bytes",
        "fednotes.core.tensors.save_file",
    )
    save: ClassVar[Callable[[Path], None]]
    load: ClassVar[Callable[[Path], Any]]

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("saved") / "whole"
        cls.save(folder)
        return folder

    @pytest.fixture
    def folder(self, saved: Path, tmp_path: Path) -> Path:
        """A copy that a test may damage."""
        return shutil.copytree(saved, tmp_path / "copy")

    def refusal(self, folder: Path) -> str:
        """Return the one line that refuses a folder; "" where it loads."""
        try:
            self.load(folder)
        except ModelError as error:
            line = str(error)
            assert "\n" not in line
            assert str(folder) in line
            return line
        return ""

    def seal(self, folder: Path) -> None:
        """Write the right checksum of the tensors, where the description has it."""
        if not self.has_checksum:
            return
        path = folder / self.description
        facts = json.loads(path.read_text())
        weights = (folder / self.weights).read_bytes()
        facts["sha256"] = hashlib.sha256(weights).hexdigest()
        path.write_text(json.dumps(facts))

    def test_an_undamaged_folder_loads(self, folder: Path) -> None:
        assert self.refusal(folder) == ""

    @pytest.mark.parametrize("file", ["description", "weights"])
    @pytest.mark.parametrize(
        "damage", ["gone", "empty", "cut", "a byte more", "another byte", "junk"]
    )
    def test_a_damaged_file_is_refused_in_one_line(
        self, damage: str, file: str, folder: Path
    ) -> None:
        if damage == "another byte" and file == "weights" and not self.has_checksum:
            pytest.skip("nothing says which bytes the tensors have")
        path = folder / str(getattr(self, file))
        content = path.read_bytes()
        path.unlink()
        damaged = {
            "empty": b"",
            "cut": content[: len(content) // 2],
            "a byte more": content + b"\x00",
            "another byte": content[:-1] + bytes([content[-1] ^ 1]),
            "junk": b"\xff\xfe\x00{",
        }
        if damage in damaged:
            path.write_bytes(damaged[damage])
        assert self.refusal(folder)

    @pytest.mark.parametrize("text", DEEP, ids=["list", "tables", "formats"])
    def test_a_nested_description_is_refused_in_one_line(
        self, text: str, folder: Path
    ) -> None:
        (folder / self.description).write_text(text)
        assert self.refusal(folder)

    def test_a_description_with_an_odd_value_loads_or_is_refused_in_one_line(
        self, folder: Path
    ) -> None:
        """Every value of the description in turn is replaced by every odd one."""
        path = folder / self.description
        description = json.loads(path.read_text())
        refusals = 0
        for place in list_places(description):
            key = place[0] if place else ""
            if key in self.ignored or (self.varied and key not in ("", *self.varied)):
                continue
            for odd in ODD:
                path.write_text(json.dumps(with_value(description, place, odd)))
                refusals += bool(self.refusal(folder))
        assert refusals >= self.least_refusals

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_tensors_of_another_dtype_are_refused_in_one_line(
        self, dtype: torch.dtype, folder: Path
    ) -> None:
        if not self.has_one_type:
            pytest.skip("tensors may have any type")
        path = folder / self.weights
        tensors = load_file(path)
        name = next(name for name in sorted(tensors) if tensors[name].dtype != dtype)
        save_file(tensors | {name: tensors[name].to(dtype)}, path)
        self.seal(folder)
        assert self.refusal(folder)

    def test_a_later_format_version_is_refused_with_a_remedy(
        self, folder: Path
    ) -> None:
        if not self.has_version:
            pytest.skip("its format is another program's")
        path = folder / self.description
        facts = json.loads(path.read_text())
        path.write_text(json.dumps(facts | {"format": 99, "fednotes": "77.0"}))
        line = self.refusal(folder)
        assert "format 99" in line
        assert "version" in line

    @pytest.mark.parametrize("when", ["at once", "at the last step"])
    def test_a_full_disk_leaves_the_earlier_folder_unchanged(
        self, when: str, folder: Path
    ) -> None:
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with ExitStack() as stack:
            if when == "at once":
                for writer in self.writers:
                    stack.enter_context(mock.patch(writer, full))
            else:
                stack.enter_context(mock.patch.object(store.os, "replace", full))
            with pytest.raises(FednotesError, match="No space left on device"):
                self.save(folder)
        assert full.called
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
