"""What a site tells the server of an error: what it is about, and never a file, a line or a path.

A note's file name may hold a patient's name or record number, so no name of a file leaves, of
whatever file. The whole message is in the site's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    MissingExtra,
    ModelError,
    RefusedError,
    TrainingError,
)
from fednotes.engines.host import explained
from fednotes.privacy.policy import Policy
from fednotes.site_file import SITE_FILE

logger = logging.getLogger("fednotes.deployment")
_OPEN = (RefusedError, TrainingError, MissingExtra)  # they speak of rules, numbers and packages
_ABOUT: tuple[tuple[type[FednotesError], str], ...] = (
    (DataError, "its notes cannot be read"),
    (ConfigError, "its notes or its file do not fit the job"),
    (ModelError, "a model or a kept state of it cannot be read"),
    (FednotesError, "a file there cannot be read or written"),
)


def outward(error: Exception, site: str) -> str:
    """One line for an error, as it may leave the site."""
    if isinstance(error, _OPEN) or not isinstance(error, FednotesError):
        return explained(error, site)
    about = next(words for kind, words in _ABOUT if isinstance(error, kind))
    cause = error.__cause__
    disk = f"{cause.strerror}; " if isinstance(cause, OSError) and cause.strerror else ""
    return f"site {site!r}: {about} ({disk}see the site's log)"


@contextmanager
def discreet(site: str) -> Iterator[None]:
    """An error keeps its kind, and says no more than `outward`; the whole goes to the log."""
    try:
        yield
    except FednotesError as error:
        told = outward(error, site)
        if told == str(error):
            raise
        logger.error("%s", error)
        kind = RefusedError if isinstance(error, RefusedError) else type(error)
        raise kind(told) from error


def unplaced(policy: Policy) -> Policy:
    """A policy whose refusals do not say where the site's kit lies."""
    return replace(policy, source=f"[policy] of {SITE_FILE}")
