"""A third-party package adds a method, a tagger, a format and a command.

It is built as a wheel and installed by pip into a folder of its own, as a user would
install it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, get_args

import pytest
from acme import ROOT, install_acme, run_python, unpack_acme

from fednotes.core import plugins
from fednotes.core.errors import ConfigError
from fednotes.data.formats._registry import Formats, find_format
from fednotes.methods import find_method
from fednotes.methods.base import Method
from fednotes.taggers.model import Kind
from fednotes.taggers.saving import find_config_class, read_model_config

SAMPLES = ROOT / "tests" / "data" / "samples"

METHOD = '''
"""FedNER with half the default rate."""

from fednotes.methods.fedner import FedNER


class SlowFedNER(FedNER):
    presets = {"best": {"training": {"learning_rate": 5e-4}}}


METHOD = SlowFedNER()
'''
COMMAND = '''
"""A command that greets."""


def greet(name: str) -> None:
    """Greet somebody."""
    print(f"hello {name}")
'''
ENTRY_POINTS = """\
[fednotes.methods]
slow_fedner = acme_notes.slow_fedner:METHOD

[fednotes.taggers]
capitals = acme_notes.capitals:KIND

[fednotes.formats]
loud-notes = acme_notes.loud_notes

[fednotes.commands]
greet = acme_notes.greet:greet

[fednotes.api]
greet = acme_notes.greet:greet

[fednotes.jobs]
acme = acme_notes
"""
SIMULATE = """
import sys
import fednotes as fn

tables = {
    "method": "distill",
    "synthetic": {"sites": 3, "sentences": 30},
    "conditions": ["federated"],
    "training": {"rounds": 1, "weighting": False},
    "model": {"kind": "capitals"},
}
result = fn.simulate(fn.job(tables), sys.argv[1])
print(sorted(result.sites))
"""


API = """
import json
import sys
import fednotes as fn

(document,) = fn.read(sys.argv[1])
job = fn.job({"method": "slow_fedner", "synthetic": {"sites": 3}})
print(json.dumps({
    "text": document.text,
    "spans": [[span.start, span.end, span.label] for span in document.spans],
    "learning rate": job.config.learning_rate,
}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    modules = {
        "slow_fedner": METHOD,
        "greet": COMMAND,
        "capitals": (SAMPLES / "capitals.py.txt").read_text(),
        "loud_notes": (SAMPLES / "loud_notes.py.txt").read_text(),
    }
    return install_acme(tmp_path_factory.mktemp("acme"), ENTRY_POINTS, modules)


def test_a_command_of_a_package_runs(environment: dict[str, str]) -> None:
    assert run_python(environment, "-m", "fednotes", "greet", "Ada") == "hello Ada\n"
    assert "Greet somebody." in run_python(environment, "-m", "fednotes", "--help")


def test_a_function_of_a_package_appears_in_the_python_api(
    environment: dict[str, str],
) -> None:
    program = "import fednotes as fn; fn.greet('Ada'); print('greet' in dir(fn))"
    assert run_python(environment, "-c", program) == "hello Ada\nTrue\n"


@pytest.mark.slow
def test_a_job_file_of_a_package_is_loaded_by_its_name(
    environment: dict[str, str],
) -> None:
    output = run_python(environment, "-m", "fednotes", "job", "show", "acme/small")
    assert 'title = "A small job of Acme"' in output


@pytest.fixture(scope="module")
def answers(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the Python API finds of the package, in one process."""
    notes = tmp_path_factory.mktemp("loud") / "notes.txt"
    notes.write_text("SHOUTED\nno PAIN today\n")
    answers_of_api: dict[str, Any] = json.loads(
        run_python(environment, "-c", API, notes)
    )
    return answers_of_api


@pytest.mark.slow
def test_a_format_of_a_package_is_recognised_and_read(answers: dict[str, Any]) -> None:
    """The format takes words in capitals for mentions."""
    assert answers["text"] == "no PAIN today"
    assert answers["spans"] == [[3, 7, "Loud"]]


@pytest.mark.slow
def test_a_tagger_of_a_package_is_trained_saved_and_loaded(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    output = run_python(environment, "-c", SIMULATE, run)
    model = next(run.rglob("model.json"))
    assert json.loads(model.read_text())["kind"] == "capitals"
    assert output.count("'") == 6  # three sites
    predicted = run_python(
        environment,
        "-m",
        "fednotes",
        "predict",
        model.parent,
        "--text",
        "Took Aspirin.",
    )
    assert json.loads(predicted)["text"] == "Took Aspirin."


def test_a_method_of_a_package_has_its_own_preset(answers: dict[str, Any]) -> None:
    assert answers["learning rate"] == 0.0005


def test_an_error_names_a_package_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The other commands still work, and are listed."""
    broken = unpack_acme(
        tmp_path / "broken",
        "[fednotes.commands]\ngreet = acme_notes.greet:greet\n",
        {"greet": "raise RuntimeError('out of order')"},
    )

    def run_command(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fednotes", *words]
        return subprocess.run(command, capture_output=True, text=True, env=broken)

    help_run = run_command("--help")
    assert help_run.returncode == 0
    assert "simulate" in help_run.stdout
    for completed in (help_run, run_command("greet")):
        assert "the package 'acme-notes' cannot be loaded" in completed.stderr
        assert "out of order" in completed.stderr
    assert run_command("greet").returncode == 2
    version = run_command("--version")
    assert version.stdout.startswith("fednotes ")
    assert version.stderr == ""


def test_a_package_that_exits_does_not_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a check would succeed without having checked anything."""
    (tmp_path / "exits_at_once.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("mine", "exits_at_once", "fednotes.formats")
    message = "'exits_at_once' cannot be loaded .*: SystemExit: 0"
    with pytest.raises(ConfigError, match=message):
        plugins.load_module(entry, ())


@pytest.mark.slow
def test_a_format_that_cannot_be_loaded_does_not_affect_the_others(
    tmp_path: Path,
) -> None:
    """To guess a format, all are asked, so the broken package is named then."""
    broken = unpack_acme(
        tmp_path / "broken",
        "[fednotes.formats]\nloud-notes = acme_notes.loud_notes\n",
        {"loud_notes": "raise RuntimeError('out of order')"},
    )
    notes = tmp_path / "notes.jsonl"
    notes.write_text('{"id": "a", "text": "no pain", "spans": []}\n')
    read_notes = "import sys, fednotes as fn; print(fn.read(*sys.argv[1:])[0].text)"

    def read(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", read_notes, str(notes), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=broken)

    assert read("jsonl").stdout == "no pain\n"
    for completed in (read("loud-notes"), read()):
        assert "the package 'acme-notes' cannot be loaded" in completed.stderr
        assert "out of order" in completed.stderr


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def accepts(path): return True", "`read`"),
        ("def read(path, problems): return ()", "`accepts`"),
        ("read = None", "`accepts` and `read`"),
    ],
)
def test_a_format_without_a_required_function_cannot_be_loaded(
    source: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_format.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "half_a_format", raising=False)
    entry = EntryPoint("half", "half_a_format", "fednotes.formats")
    formats = Formats({}, {"half": entry})
    message = (
        rf"the package 'half_a_format' cannot be loaded \(fednotes.formats: half = "
        rf"half_a_format: the module does not define {missing}\): update or uninstall"
    )
    for use in (lambda: formats["half"], formats.list_in_order_of_trial):
        with pytest.raises(ConfigError, match=message):
            use()


def test_a_package_cannot_replace_a_command_of_an_application(tmp_path: Path) -> None:
    command = next(
        name
        for name, entry in plugins.list_entries("commands").items()
        if entry.module.startswith("fednotes.apps.")
    )
    greedy = unpack_acme(
        tmp_path / "greedy",
        f"[fednotes.commands]\n{command} = acme_notes.greet:greet\n",
        {"greet": COMMAND},
    )
    completed = subprocess.run(
        [sys.executable, "-m", "fednotes", command],
        capture_output=True,
        text=True,
        env=greedy,
    )
    assert completed.returncode == 2
    assert f"the package 'acme-notes' registers {command!r}" in completed.stderr
    assert "which is built in" in completed.stderr


@pytest.mark.slow
def test_a_package_cannot_replace_a_built_in_name(tmp_path: Path) -> None:
    greedy = unpack_acme(
        tmp_path / "greedy",
        "[fednotes.methods]\nfedner = acme_notes.slow_fedner:METHOD\n",
        {"slow_fedner": METHOD},
    )
    program = "from fednotes import methods; methods.list_method_names()"
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=greedy
    )
    assert "the package 'acme-notes' registers 'fedner'" in completed.stderr
    assert "which is built in" in completed.stderr


def test_contributing_shows_a_whole_package_and_an_entry_of_every_group() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    tables = [
        tomllib.loads(t) for t in re.findall(r"```toml\n(.+?)```", page, re.DOTALL)
    ]
    project_table = next(table for table in tables if "build-system" in table)
    assert {"name", "version", "dependencies", "entry-points"} <= set(
        project_table["project"]
    )
    groups = [set(table["project"]["entry-points"]) for table in tables]
    assert {f"fednotes.{group}" for group in get_args(plugins.Group)} in groups


@pytest.mark.parametrize(
    ("group", "value", "expected", "message"),
    [
        (
            "methods",
            "fednotes.methods.fedner:FedNER",
            Method,
            "registers the class FedNER as 'mine' in fednotes.methods: register an "
            r"instance, such as METHOD = FedNER\(…\)",
        ),
        (
            "taggers",
            "fednotes.methods.fedner:FedNER",
            Kind,
            "registers the class FedNER as 'mine' in fednotes.taggers, expected Kind: ",
        ),
        (
            "methods",
            "fednotes.taggers.tagger:KIND",
            Method,
            "registers Kind as 'mine' in fednotes.methods, expected Method: update",
        ),
        (
            "formats",
            "fednotes.data.formats.brattt",
            object,
            r"\(fednotes.formats: mine = fednotes.data.formats.brattt: ModuleNotFound",
        ),
    ],
)
def test_an_error_names_the_wrong_entry_point(
    group: str, value: str, expected: type, message: str
) -> None:
    entry = EntryPoint("mine", value, f"fednotes.{group}")
    with pytest.raises(ConfigError, match=message):
        plugins.load_entry(entry, expected)


@pytest.mark.parametrize(
    ("group", "find"),
    [
        ("methods", find_method),
        ("taggers", find_config_class),
        ("taggers", lambda name: read_model_config({"kind": name})),
        ("formats", find_format),
    ],
)
def test_the_error_of_an_unknown_name_names_a_misspelt_group(
    group: str, find: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_entry_points(**selection: str) -> EntryPoints:
        misspelt = group.removesuffix("s")
        entries = EntryPoints([EntryPoint("mine", "acme:MINE", f"fednotes.{misspelt}")])
        return entries.select(**selection)

    monkeypatch.setattr(plugins, "entry_points", list_entry_points)
    message = (
        rf"the package 'acme' registers it in fednotes.{group[:-1]}: rename this group "
        rf"to fednotes.{group}, and install the package again"
    )
    with pytest.raises(ConfigError, match=message):
        find("mine")


def test_a_kind_is_registered_under_the_value_of_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = "fednotes.taggers.token_classifier:KIND"
    entry = EntryPoint("my_cnn", value, "fednotes.taggers")
    monkeypatch.setattr(plugins, "list_entries", lambda group: {"my_cnn": entry})
    message = (
        "registered as 'my_cnn' in fednotes.taggers, and .* TokenClassifierConfig has "
        "kind = 'token-classifier': rename the entry point to 'token-classifier', the value of"
    )
    with pytest.raises(ConfigError, match=message):
        read_model_config({"kind": "my_cnn"})
