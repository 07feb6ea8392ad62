"""Damaged saved states, which checkpoints and the states of sites consist of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from saved_folder_suite import SavedFolderSuite

from fednotes.core.tensors import load_state, save_state

FILES = ("tensors.safetensors", "facts.json")


class TestState(SavedFolderSuite):
    description = "manifest.json"
    weights = FILES[0]
    has_one_type = False
    least_refusals = 50

    @staticmethod
    def save(folder: Path) -> None:
        tensors = {"w": torch.ones(2), "n": torch.arange(3)}
        save_state(folder, tensors, {"round": 3, "sites": {"a": 1}})

    @staticmethod
    def load(folder: Path) -> object:
        return load_state(folder)

    def seal(self, folder: Path) -> None:
        sums = {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in FILES
        }
        path = folder / self.description
        path.write_text(json.dumps({"format": 1, "sha256": sums}))
