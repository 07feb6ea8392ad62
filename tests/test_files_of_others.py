"""Files that others may have written are opened without waiting for a FIFO."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from time_limits import no_waiting
from tiny_models import save_encoder

import fednotes
from fednotes.core.errors import FednotesError
from fednotes.core.parsing import read_json, read_regular
from fednotes.core.types import TagSet
from fednotes.encoders.elmo import Elmo
from fednotes.encoders.pretrained import (
    compute_file_sha256,
    open_config,
    open_tokenizer,
)
from fednotes.encoders.vectors import load_vectors
from fednotes.metrics.calibration import hash_weights
from fednotes.taggers.saving import (
    build_model,
    load_model,
    read_model_config,
    save_model,
)

SOURCE = Path(fednotes.__file__).parent

# Calls that open a file without `open_regular`, and whose file it is. Nobody but the
# owner of a kit or a cache may write there; output and locks are opened in
# `core/store.py` alone, which has its own checks (`test_other_users.py`).
_SHIPPED = "a file of the package"
_TEMPORARY = "a temporary file of this process"
_KIT = "a file of a kit, which only its owner may write"
_CACHE = "a file of the cache, which only its owner may write"
_RUN = "a file of a run that this process writes"
_CHECKED = "the same file was opened with `open_regular` just before"
OWN_FILES = {
    "apps/deployment/commands/site.py:site_rules": _CHECKED,
    "apps/deployment/nvflare/gate.py:shortening_socket_path": _KIT,
    "apps/deployment/nvflare/presence.py:hash_kit_location": _KIT,
    "apps/deployment/nvflare/processes.py:_rotate": _KIT,
    "apps/deployment/nvflare/renewal.py:install_renewal": _KIT,
    "apps/deployment/preflight.py:explain_other_listener": _KIT,
    "apps/deployment/rules/differences.py:_read": _KIT,
    "apps/deployment/server.py:_agree_on_config": _KIT,
    "apps/deployment/server.py:_run": _RUN,
    "apps/deployment/run_secrets.py:load_or_create_secret": _KIT,
    "apps/deployment/site_file.py:install_site_file": _CHECKED,
    "apps/deployment/status.py:_read_tail": _KIT,
    "apps/experiments/work.py:run_command": _RUN,
    "apps/phenotyping/config.py:": _SHIPPED,
    "apps/phenotyping/context.py:read_phrases": _SHIPPED,
    "apps/phenotyping/dictionary.py:": _SHIPPED,
    "apps/phenotyping/synthetic.py:": _SHIPPED,
    "apps/phenotyping/words.py:": _SHIPPED,
    "apps/tracking/tensorboard.py:add_files": _TEMPORARY,
    "apps/ui/review.py:export": _TEMPORARY,
    "cli/app.py:main": "the null device",
    "core/errors.py:_read_install_record": "a file of the installation",
    "core/parsing.py:open_regular": "it checks what it has opened",
    "core/parsing.py:read_shipped_table": _SHIPPED,
    "core/tensors.py:fill": _TEMPORARY,
    "core/tensors.py:load_state": _CHECKED,
    "encoders/elmo.py:_reading_weights": _CHECKED,
    "encoders/features.py:_is_locked": _CACHE,
    "encoders/features.py:locking": _CACHE,
    "encoders/features.py:open_complete": _CACHE,
    "encoders/token_cache.py:_write_corpus": _CACHE,
    "engines/history.py:_read_lines": _KIT,
    "engines/history.py:find_reply": _KIT,
    "engines/history.py:read_request": _KIT,
    "jobs/prediction_files.py:write_conll": _TEMPORARY,
    "jobs/show.py:show_job": _CHECKED,
    "jobs/workers/actor.py:read_processor": "a file of the system",
    "jobs/workers/dealing.py:_read_quota": "a file of the system",
    "jobs/workers/process.py:main": "the null device",
    "methods/__init__.py:read_presets": _SHIPPED,
    "taggers/saving.py:_fill_folder": _TEMPORARY,
}


def bare_openings(tree: ast.AST, function: str = "") -> Iterator[str]:
    """The innermost function of each call that opens a file without `open_regular`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and _opens(node):
            yield function
        is_function = isinstance(node, ast.FunctionDef)
        yield from bare_openings(node, node.name if is_function else function)


def _opens(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    method = called.rpartition(".")[2] if "." in called else ""
    if called in ("open", "os.open"):
        return not any(word.arg == "opener" for word in call.keywords)
    if method == "open":
        modes = [*call.args[:1], *(w.value for w in call.keywords if w.arg == "mode")]
        return not call.args or any(
            isinstance(mode, ast.Constant) and isinstance(mode.value, str)
            for mode in modes
        )
    return method in ("read_text", "read_bytes", "File") or called in (
        "load_file",
        "safe_open",
    )


def test_every_foreign_file_is_opened_without_waiting() -> None:
    """A new call belongs into `OWN_FILES`, or uses `open_regular` or `read_regular`."""
    actual = set[str]()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if name != "core/store.py":
            tree = ast.parse(path.read_text("utf-8"))
            actual |= {f"{name}:{function}" for function in bare_openings(tree)}
    assert actual == set(OWN_FILES)


@pytest.mark.parametrize(
    ("code", "is_bare"),
    [
        ("open(path)", True),
        ("open(path, 'rb', opener=open_regular)", False),
        ("os.open(path, 0)", True),
        ("path.open()", True),
        ("path.open('rb')", True),
        ("path.open(mode='r')", True),
        ("Authority.open(folder, name)", False),
        ("path.read_text()", True),
        ("(a / b).read_bytes()", True),
        ("read_text(path)", False),
        ("load_file(path)", True),
        ("h5py.File(path)", True),
    ],
)
def test_each_unguarded_way_to_open_a_file_is_recognised(
    code: str, is_bare: bool
) -> None:
    tree = ast.parse(f"def read():\n    return {code}")
    assert list(bare_openings(tree)) == ["read"] * is_bare


def _model_with_a_pipe(folder: Path) -> None:
    config = read_model_config({"kind": "tagger", "char_filters": 6, "cnn_filters": 5})
    save_model(build_model(config, TagSet(("ADR",)), 1), folder / "model")
    weights = next((folder / "model").glob("*.safetensors"))
    weights.unlink()
    os.mkfifo(weights)
    load_model(folder / "model")


def _encoder_with_a_pipe(
    name: str, open_it: Callable[[Path], object]
) -> Callable[[Path], object]:
    def open_folder(folder: Path) -> None:
        save_encoder(folder / "encoder", words=["a"])
        (folder / "encoder" / name).unlink(missing_ok=True)
        os.mkfifo(folder / "encoder" / name)
        open_it(folder / "encoder")

    return open_folder


def _of_a_pipe(
    name: str, open_it: Callable[[Path], object]
) -> Callable[[Path], object]:
    def open_folder(folder: Path) -> None:
        os.mkfifo(folder / name)
        open_it(folder / name)

    return open_folder


READERS: dict[str, Callable[[Path], Any]] = {
    "a file": _of_a_pipe("a", read_regular),
    "JSON": _of_a_pipe("a.json", read_json),
    "word vectors": _of_a_pipe("a.txt", load_vectors),
    "binary word vectors": _of_a_pipe("a.bin", load_vectors),
    "a file's digest": _of_a_pipe("a", compute_file_sha256),
    "weights for a digest": _of_a_pipe(
        "a.safetensors", lambda path: hash_weights(path.parent)
    ),
    "a tagger": _model_with_a_pipe,
    "a tokenizer": _encoder_with_a_pipe("tokenizer.json", open_tokenizer),
    "further marks": _encoder_with_a_pipe("added_tokens.json", open_tokenizer),
    "a configuration": _encoder_with_a_pipe("config.json", open_config),
    "ELMo": _of_a_pipe("weights.hdf5", lambda path: _open_elmo(path)),
}


def _open_elmo(weights: Path) -> None:
    cnn = {
        "activation": "relu",
        "embedding": {"dim": 2},
        "filters": [[1, 2]],
        "max_characters_per_token": 50,
    }
    lstm = {"dim": 2, "projection_dim": 2, "use_skip_connections": False}
    options = weights.with_name("options.json")
    options.write_text(json.dumps({"char_cnn": cnn, "lstm": lstm}))
    Elmo(options, weights)


@pytest.mark.parametrize("reader", READERS)
def test_a_fifo_in_place_of_a_file_is_refused_without_waiting(
    reader: str, tmp_path: Path
) -> None:
    with (
        no_waiting(60),
        pytest.raises(
            (FednotesError, OSError), match="a FIFO, but only files are read"
        ),
    ):
        READERS[reader](tmp_path)
