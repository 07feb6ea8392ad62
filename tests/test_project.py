"""Versions, commands, sizes and paths that the project's files state are right."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from papers import is_of_deleted_app

import fednotes

ROOT = Path(__file__).parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# One-letter classes, or this file would find itself.
MACHINE_PATH = re.compile(r"(?<![\w.<])/(?:[w]ork|[r]oot|tmp/[d]ev)(?:/|\b)")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _project_files() -> list[Path]:
    """What git holds or would hold; in a tree without git, everything but hidden and
    built."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        hidden = re.compile(r"(^|/)(\.(?!ci/)[^/]*/|runs/|build/|dist/|__pycache__/)")
        paths = [p for p in ROOT.rglob("*") if not hidden.search(_name(p))]
    else:
        paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def _make_targets() -> set[str]:
    return set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    )


def test_all_files_state_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == fednotes.__version__


def test_the_citation_has_this_version_and_names_the_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == fednotes.__version__
    papers = " ".join((ROOT / "docs" / "papers.md").read_text("utf-8").split())
    assert len(citation["references"]) == 4
    for paper in citation["references"]:
        assert paper["title"] in papers
        assert all(author["family-names"] in papers for author in paper["authors"])


def test_the_workflow_runs_the_two_commands_on_every_named_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = re.findall(
        r"^Programming Language :: Python :: (3\.\d+)$",
        "\n".join(project["classifiers"]),
        re.MULTILINE,
    )
    workflow = yaml.safe_load(
        (ROOT / ".github" / "workflows" / "test.yml").read_text("utf-8")
    )
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == versions
    assert project["requires-python"] == f">={versions[0]}"
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make demo PYTHON=python", "make test PYTHON=python"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_few_permissions_and_pin_their_actions(path: Path) -> None:
    """A token may read the code; a job that needs more says so itself."""
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)
        commands = " ".join(step.get("run", "") for step in job["steps"])
        assert set(re.findall(r"\bmake ([a-z]+)", commands)) <= _make_targets()
        assert "${{ github.event" not in commands  # text of others is no command


def test_every_issue_template_warns_against_posting_note_text() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [path for path in folder.glob("*.yml") if path.stem != "config"]
    assert len(forms) == 2
    for path in forms:
        body = yaml.safe_load(path.read_text("utf-8"))["body"]
        assert "no text of a real note" in body[0]["attributes"]["value"]
        (promise,) = body[-1]["attributes"]["options"]
        assert promise["required"]
        assert "real note" in promise["label"]


def test_every_extra_is_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    rows = re.findall(
        r"^\| (`.*?) \|", (ROOT / "docs" / "install.md").read_text("utf-8"), re.M
    )
    documented = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(documented) == sorted(project["optional-dependencies"]), (
        "docs/install.md, its table"
    )


def test_the_changelog_starts_with_this_version_or_unreleased_changes() -> None:
    """Its top entry is either what is not released yet or this very version."""
    headings = re.findall(
        r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M
    )
    assert headings
    assert headings[0] in {"Unreleased", fednotes.__version__}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_commands_in_the_documents_exist(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    code = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code += re.findall(r"`([^`\n]+)`", text)
    # `make`, then settings such as PYTHON=… and ARGS="…", then the target.
    command = re.compile(r"\bmake((?:[ ]+[A-Z]+=(?:\"[^\"]*\"|\S+)|[ ]+[a-z]+\b)+)")
    named = {
        word
        for block in code
        for arguments in command.findall(block)
        for word in re.sub(r"[A-Z]+=(\"[^\"]*\"|\S+)", "", arguments).split()
    }
    assert named
    assert named <= _make_targets(), f"{page} names targets that the Makefile has not"


def test_the_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("path", BENCHMARKS, ids=_name)
def test_each_benchmark_prints_a_ratio(path: Path) -> None:
    assert "ratio=" in path.read_text("utf-8"), (
        f"{_name(path)} prints no line with ratio="
    )


def test_no_file_contains_a_path_of_one_machine() -> None:
    places = []
    for path in _project_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # an image
        places += [
            f"{_name(path)}:{number}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    assert places == []


@pytest.mark.parametrize("name", ["README.md", "docs/install.md"])
def test_pytorch_for_cpus_is_installed_before_what_would_bring_cuda(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    cpu_build = "\npip install torch --index-url https://download.pytorch.org/whl/cpu"
    first_install = re.search(r"^pip install .+", text, re.MULTILINE)
    assert first_install is not None
    assert f"\n{first_install[0]}".startswith(cpu_build)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("cd /@work/main", True),
        ("'/@root/x'", True),
        ("/tmp/@dev/bin/activate", True),
        ("https://example.org/@work/x", False),
        ("/@workers/3", False),
        ("../shared/data", False),
    ],
)
def test_the_path_check_detects_paths_of_one_machine(line: str, wrong: bool) -> None:
    """The @ keeps these lines from being found themselves."""
    assert bool(MACHINE_PATH.search(line.replace("@", ""))) is wrong


@pytest.mark.parametrize("name", ["Makefile", ".ci/run"])
def test_tests_that_are_run_by_name_exist(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    places = re.findall(r"(?<![\w/])tests/[\w/]+(?:\.py)?", text)
    assert places
    missing = [place for place in places if not (ROOT / place).exists()]
    assert [place for place in missing if not is_of_deleted_app(place)] == []


def test_ci_leaves_out_the_tests_of_deleted_applications(tmp_path: Path) -> None:
    text = (ROOT / ".ci" / "run").read_text("utf-8")
    (function,) = re.findall(r"^present\(\) \{\n.*?^\}\n", text, re.M | re.S)
    package = tmp_path / "src" / "fednotes" / "apps" / "one" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    paths = (
        "tests/apps/one tests/apps/two/test_x.py tests/jobs tests/apps/one/test_y.py"
    )
    completed = subprocess.run(
        ["bash", "-c", f"{function}present {paths}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout == "tests/apps/one tests/jobs tests/apps/one/test_y.py "


def test_the_ci_script_is_executable_bash() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)
