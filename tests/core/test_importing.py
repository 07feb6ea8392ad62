"""Imports without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from fednotes.core.importing import importing_fast, importing_for_good

CONTEXTS = (importing_fast, importing_for_good)


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """Collect garbage before and after each test, and freeze nothing for others."""
    gc.enable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("importing", CONTEXTS)
def test_nothing_is_collected_while_modules_are_imported(
    importing: Callable[[], AbstractContextManager[None]],
) -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("importing", CONTEXTS)
def test_collection_resumes_after_an_import_that_fails(
    importing: Callable[[], AbstractContextManager[None]],
) -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    with importing_fast():
        pass
    assert not gc.isenabled()


def test_only_modules_that_are_imported_for_good_are_never_looked_at_again() -> None:
    gc.unfreeze()
    with importing_fast():
        pass
    assert not gc.get_freeze_count()
    with importing_for_good():
        pass
    assert gc.get_freeze_count()
