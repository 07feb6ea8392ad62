"""Copies of this process that continue from the place where each one begins."""

from __future__ import annotations

import os
import pickle
import shutil
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Branches:
    """Starts copies of this process, each of which ends with a value for this one.

    A copy has its own memory and its own copy of the working directory, so nothing that
    it changes below a relative path is changed here.

    Args:
        folder: Where the copies of the working directory are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing: int | None = None
        self.values: list[Any] = []  # of the copies that have ended

    @property
    def is_copy(self) -> bool:
        """Return whether this process is a copy."""
        return self._writing is not None

    def begin(self) -> bool:
        """Start a copy. Return True in the copy at once, and False here after its end.

        Raises:
            AssertionError: The copy died, or ended with an exception.
        """
        folder = self._folder / str(len(self.values))
        shutil.copytree(Path.cwd(), folder)
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # Other threads of this process only wait for messages of the test runner.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            self._writing = writing
            os.chdir(folder)
            return True

        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(process, 0)
        shutil.rmtree(folder)
        assert answer, "the copy of this process died"
        value, error = pickle.loads(answer)
        assert not error, error
        self.values.append(value)
        return False

    def run(self, action: Callable[[], Any]) -> Any:
        """Run an action in which copies begin; a copy ends with it.

        The action calculates in one thread. A copy has none of this process's other
        threads, so a product of matrices that waits for them would never end.

        Args:
            action: Returns the value of a copy; what it returns here is returned.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            value = action()
        except BaseException:
            if not self.is_copy:
                raise
            self._exit((None, traceback.format_exc()))
        finally:
            torch.set_num_threads(threads)
        if self.is_copy:
            self._exit((value, ""))
        return value

    def _exit(self, answer: tuple[Any, str]) -> None:
        """Write what a copy ends with, and end it at once."""
        assert self._writing is not None
        try:
            with open(self._writing, "wb") as pipe:
                pipe.write(pickle.dumps(answer))
        finally:
            os._exit(0)
