"""The unit and the container of a saved model run `fednotes serve`."""

from __future__ import annotations

from units import CONTAINER, installed_extras, is_command, service, unit_of, words_of


def test_the_unit_runs_an_existing_command() -> None:
    path = unit_of("fednotes-serve")
    assert words_of(path)[0] == "serve"
    assert is_command("serve")
    assert "ReadWritePaths" not in service(path)  # it writes nothing


def test_the_container_can_run_the_server() -> None:
    assert "fednotes serve /model" in CONTAINER
    assert "serve" in installed_extras()
