"""Shells complete commands, options and values with the scripts of `completion`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from applications import has_app, needs_app
from typer.main import get_group

from fednotes.cli.app import app
from fednotes.cli.completion import VARIABLE, Shell
from fednotes.core import plugins
from fednotes.core.errors import ConfigError
from fednotes.data.formats import FORMATS, list_writable_formats
from fednotes.jobs.built_in_jobs import list_built_in_jobs

Run = Callable[..., tuple[str, str]]
Complete = Callable[..., set[str]]

# In place of the installed program, which may be that of another folder.
PROGRAM = """\
#!{python}
import sys
sys.argv[0] = "fednotes"
from fednotes.cli.app import main
main()
"""
BASH = """\
eval "$(fednotes completion bash)"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_fednotes_completion fednotes
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables with which a shell finds fednotes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "fednotes"
    program.write_text(PROGRAM.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def complete(environment: dict[str, str], tmp_path: Path) -> Complete:
    """Return a function that asks bash what may follow words; the last is begun."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "mine.toml").touch()

    def ask(*words: str) -> set[str]:
        ended = subprocess.run(
            [bash, "--norc", "-c", BASH, "bash", "fednotes", *words],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stderr == ""
        return {*ended.stdout.split()}

    return ask


@pytest.mark.slow
def test_bash_completes_commands_and_groups(complete: Complete) -> None:
    assert complete("") == {*get_group(app).commands}
    assert complete("co") == {"compare", "completion", "convert", "corpus"}
    assert complete("corpus", "s") == {"stats", "synthesise"}


def test_bash_completes_options_but_no_old_names(complete: Complete) -> None:
    assert complete("convert", "a", "b", "--f") == {"--format"}  # was --from
    assert complete("evaluate", "m", "x", "--t") == {"--type"}  # was --types


@pytest.mark.slow
def test_bash_completes_formats(complete: Complete) -> None:
    offered = complete("convert", "a", "b", "--format", "")
    assert offered > {*FORMATS}
    assert complete("convert", "a", "b", "--to", "") == {*list_writable_formats()}
    assert complete("predict", "m", "--to", "") == {
        *("jsonl", "parquet", "omop", "omop-parquet", "brat", "conll", "csv")
    }


@pytest.mark.slow
def test_bash_completes_jobs(complete: Complete) -> None:
    assert complete("simulate", "") == {"mine.toml", *list_built_in_jobs()}
    assert complete("job", "show", "de") == {"demo"}
    if has_app("deployment"):
        assert complete("run", "mi") == {"mine.toml"}


def test_files_whose_names_a_shell_would_run_are_not_completed(
    complete: Complete, tmp_path: Path
) -> None:
    """Zsh ran the command in the first name as soon as Tab was pressed."""
    for name in (r"\$(touch run)", "$(touch run)", "`touch run`", "a b", "=run", "a;b"):
        (tmp_path / "work" / f"{name}.toml").touch()
    assert complete("simulate", "") == {"mine.toml", *list_built_in_jobs()}


def test_bash_completes_experiments(complete: Complete) -> None:
    needs_app("experiments")
    offered = complete("reproduce", "fedner-")
    assert "fedner-table2" in offered
    assert all(name.startswith("fedner-") for name in offered)


def test_bash_completes_files_where_nothing_else_is_known(complete: Complete) -> None:
    """An empty answer lets `complete -o default` offer files."""
    assert complete("corpus", "stats", "") == set()
    assert complete("simulate", "folder/") == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_get_completions_in_their_formats(
    environment: dict[str, str], shell: str
) -> None:
    asked = {
        VARIABLE: f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "fednotes completion ",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    ended = subprocess.run(
        ["fednotes"],
        env={**environment, **asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
    answers = {
        "zsh": '_arguments \'*: :(("bash"\n"zsh"\n"fish"))\'\n',
        "fish": "bash\nzsh\nfish\n",
    }
    assert ended.stdout == answers[shell]


@pytest.mark.parametrize("shell", [each.value for each in Shell])
def test_each_shell_accepts_its_script(run: Run, shell: str, tmp_path: Path) -> None:
    script, err = run("completion", shell)
    assert err == ""
    assert VARIABLE in script
    if shell == "zsh":  # which reads a file only if it begins so
        assert script.startswith("#compdef fednotes\n")
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(script, encoding="utf-8")
    subprocess.run([program, "-n", str(path)], check=True)


@pytest.mark.parametrize(
    "words", ["", "simulate ", "simulate --", "check mine", "job show d"]
)
def test_completion_imports_no_large_package(words: str) -> None:
    """Each Tab starts a process, so it must start fast."""
    program = (
        "import sys\n"
        "from fednotes.cli.app import main\n"
        "sys.argv[:] = ['fednotes']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    large = {'torch', 'numba', 'numpy'} & {*sys.modules}\n"
        "    print(sorted(large), file=sys.stderr)\n"
    )
    asked = {
        VARIABLE: "complete_bash",
        "COMP_WORDS": f"fednotes {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == "[]\n"


def test_a_package_that_cannot_be_imported_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = EntryPoint("broken", "there_is_no_such_module:x", "fednotes.commands")
    monkeypatch.setattr(
        plugins, "list_added_entries", lambda group, built_in: {"broken": broken}
    )
    group = get_group(app)
    context = group.context_class(group, resilient_parsing=True)
    offered = [item.value for item in group.shell_complete(context, "")]
    assert "simulate" in offered
    assert "broken" not in offered
    context = group.context_class(group)
    with pytest.raises(ConfigError, match="there_is_no_such_module"):
        group.get_command(context, "broken")
