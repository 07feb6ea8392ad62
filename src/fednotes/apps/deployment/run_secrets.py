"""Secrets of a run that one participant keeps with the run's state."""

from __future__ import annotations

import secrets
from pathlib import Path

from fednotes.core.store import create_private_folder, replace_file
from fednotes.privacy.secure_sum.crypto import KEY_BYTES


def load_or_create_secret(path: Path) -> bytes:
    """Return a secret of a run, which is the same after a restart.

    A file that is missing or incomplete is replaced by one with a new secret. The site
    then draws new noise, so repeated answers count as new ones and cost privacy budget.

    Args:
        path: The file of the secret.
    """
    secret = path.read_bytes() if path.is_file() else b""
    if len(secret) != KEY_BYTES:
        secret = secrets.token_bytes(KEY_BYTES)
        create_private_folder(path.parent)
        replace_file(path, secret)
    return secret
