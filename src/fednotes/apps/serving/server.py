"""Serve the predictions of a saved model over HTTP (`fednotes serve MODEL`).

`gate.py` decides which requests are answered, `app.py` answers them, and
`model_queue.py` puts the texts of all waiting requests to the model in joint batches.
FastAPI, uvicorn and prometheus-client come with the extra `serve`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from fednotes.apps.serving.app import create_app
from fednotes.apps.serving.gate import is_loopback
from fednotes.apps.serving.limits import Limits
from fednotes.core.errors import ConfigError, ParameterError, raising_if_unreadable
from fednotes.core.http_server import serve_application
from fednotes.core.parsing import open_regular
from fednotes.jobs.models import open_model
from fednotes.jobs.saved_models import SavedModel

PathLike = str | Path

# Minimum length of a token in characters.
MIN_TOKEN = 20
# Number of bytes read from a token file.
_TOKEN_FILE_BYTES = 4096


def serve(  # noqa: PLR0913 - what a person may want to set
    model: PathLike | SavedModel,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    token_file: PathLike | None = None,
    certificate: PathLike | None = None,
    key: PathLike | None = None,
    limits: Limits | None = None,
    batch: bool = False,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve a model's predictions until SIGINT or SIGTERM.

    Args:
        model: A model from `load`, or its folder.
        host: The address to listen on; any address but loopback needs a token.
        port: The TCP port; 0 takes a free one.
        token_file: A file with the token that only its owner can read.
        certificate: The server's TLS certificate (PEM).
        key: The certificate's private key (PEM).
        limits: The limits on requests; the defaults if None.
        batch: Whether `POST /batch` accepts tables of notes.
        tell: Receives a line with the address, and a warning if TLS is missing.

    Raises:
        ConfigError: The parameters contradict each other or do not match the model.
        FednotesError: The server cannot listen on this address.
        MissingExtra: The extra "serve" is not installed.
    """
    token = "" if token_file is None else read_token(token_file)
    if not token and not is_loopback(host):
        raise ParameterError(
            f"other machines can reach the `host` {host}: give a file with a token in "
            "`token_file`"
        )
    if (certificate is None) != (key is None):
        raise ParameterError("`certificate` and `key` go together: give both")

    loaded = open_model(model)
    app = create_app(loaded, limits, token, batch=batch)
    # The first call compiles and loads code that later calls reuse.
    loaded(["Aspirin was given."])
    if not is_loopback(host) and certificate is None:
        tell(
            "note: without a certificate, others on the network can read the notes and "
            "the token"
        )
    serve_application(
        app,
        host,
        port,
        ready=lambda address: tell(f"listening at {address}"),
        certificate=certificate,
        key=key,
    )


def read_token(path: PathLike) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: The file cannot be read, other users can read it, or it does not
            contain one token of at least `MIN_TOKEN` characters.
    """
    with (
        raising_if_unreadable(path, ConfigError),
        open(path, "rb", opener=open_regular) as file,
    ):
        mode = os.fstat(file.fileno()).st_mode
        content = file.read(_TOKEN_FILE_BYTES)
    if mode & 0o077:
        raise ConfigError(
            f"{path}: other users can read this file: run chmod 600 {path}"
        )
    token = content.decode("latin-1").strip()
    is_word = re.fullmatch(r"[\w.~+/=-]+", token, re.ASCII)
    if not is_word or len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{path}: expected one word of at least {MIN_TOKEN} letters and digits: "
            "`openssl rand -hex 32` prints one"
        )
    return token
