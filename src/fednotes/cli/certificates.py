"""The commands at a kit's certificate: to renew it, and to take in whom the project trusts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from fednotes.cli.groups import say
from fednotes.cli.server import Kit, require_stopped
from fednotes.core.errors import ConfigError, RefusedError

kit = typer.Typer(help="A kit's certificate.", no_args_is_help=True)


@kit.command("renew")
def renew(
    kit: Kit,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where the request goes; NAME.request.pem if not given."),
    ] = None,
    take: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="The answer to the request: put it in its place."),
    ] = None,
) -> None:
    """Ask for a new certificate, for a new key that stays here; then --take the answer."""
    from fednotes.core.store import write_text
    from fednotes.engines.nvflare.certificates import (
        bytes_of,
        check_kit,
        request,
        take_renewal,
        valid_until,
    )
    from fednotes.engines.nvflare.kit import read_kit

    facts = read_kit(kit)
    if take is None:
        check_kit(kit)
        out = out or Path(f"{facts['name']}.request.pem")
        write_text(out, request(kit).decode())
        say(f"{out}: holds no secret; the new key is in {kit / 'renewal'}")
        say(f"next: to the coordinator: fednotes provision PROJECT --out KITS --sign {out.name}")
        say(f"      then here: fednotes kit renew {kit} --take FILE")
        return
    require_stopped(kit, str(facts["role"]))
    try:
        take_renewal(kit, bytes_of(take))
    except RefusedError as error:
        raise ConfigError(f"{take}: {error}; the kit is as it was") from error
    say(f"renewed until {min(valid_until(kit).values()):%Y-%m-%d}; runs go on as they were")
    say(f"next: fednotes preflight {kit}")


@kit.command("trust")
def trust(
    kit: Kit, file: Annotated[Path, typer.Argument(help="trust.pem of the project's authority.")]
) -> None:
    """Take in what the authority says: kits that count no more, and a new root."""
    from fednotes.engines.nvflare import certificates, processes
    from fednotes.engines.nvflare.kit import read_kit

    role = read_kit(kit)["role"]
    before = certificates.Trust.of(kit / "startup")
    try:
        news = certificates.take(kit, certificates.bytes_of(file))
    except RefusedError as error:
        raise ConfigError(f"{file}: {error}; the kit is as it was") from error
    now = certificates.Trust.of(kit / "startup")
    if not news:
        say(f"nothing new: this kit has number {now.number} already")
        return
    say(f"taken in as number {now.number}: {len(list(now.listed))} certificates count no more")
    if len(now.roots) > len(before.roots):
        say(f"a new root; the one before counts until {now.end(before.roots[-1]):%Y-%m-%d}")
        if role != "admin" and processes.status(kit).running:
            say(f"next: within that time: fednotes {role} stop {kit}, then start")
        say(f"next: within that time: fednotes kit renew {kit}")
