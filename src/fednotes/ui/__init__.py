"""The local page. Called, as `fednotes.ui(…)`, `pages.ui`."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *given: Any, **options: Any) -> Any:
        return import_module(f"{__name__}.pages").ui(*given, **options)


sys.modules[__name__].__class__ = _Room
