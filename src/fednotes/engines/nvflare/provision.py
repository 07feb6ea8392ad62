"""Start-up kits: one folder for the server, each site and the admin, to hand over.

A kit holds a key, a certificate of the project's own authority, where the server is, and the
rules that its owner's machine keeps: no job with code from anyone, one class that a job may name,
no remote shell, no logs that travel. The authority's folder stays with whoever provisions; it
serves to add a site later. Nothing here uses the network.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.parsing import read_json
from fednotes.core.store import make_private, private_folder, write_folder, write_json
from fednotes.engines.nvflare.authority import STATE, Authority, Secret, no_secret
from fednotes.engines.nvflare.certificates import ROOTS, TRUST, Trust, new_key_pem, stems
from fednotes.engines.nvflare.kit import ADMIN, KIT_FILE, NAME, SERVER, SITE, WATCH, Kit, kit_files

_HOST = re.compile(
    r"([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
)
_EMAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}")
_RESERVED = frozenset({"server", "admin", "watch", "authority"})
_RECORD = "project.json"  # in the authority's folder
logger = logging.getLogger("fednotes.engines.nvflare.provision")


@dataclass(frozen=True, slots=True)
class ProjectConfig:
    """A network of sites.

    name: of the project. server: the host name by which sites reach the server. port: its one
    port. sites: their names, in any order. hosts: further names of the server.
    admin: e-mail address of who submits jobs. organisations: site → organisation; of "server"
    too, which is also the admin's.
    """

    name: str
    server: str
    sites: tuple[str, ...]
    port: int = 8002
    hosts: tuple[str, ...] = ()
    admin: str = "admin@fednotes.org"
    organisations: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for what, name in (("name", self.name), *(("site", s) for s in self.sites)):
            if not NAME.fullmatch(name) or (what == "site" and "." in name):
                dot = ", '.'" if what == "name" else ""  # NVFlare takes what follows for a job
                raise ConfigError(f"{what} {name!r}: letters, digits, '_'{dot} and '-' only")
        taken = _RESERVED | {self.server, self.name}  # a certificate each, known by its name
        wrong = sorted({s for s in self.sites if s in taken or self.sites.count(s) > 1})
        if not self.sites or wrong:
            raise ConfigError(f"sites {wrong or 'are missing'}: each needs a name of its own")
        _require_apart(self.sites)
        for what, host in (("server", self.server), *(("hosts", h) for h in self.hosts)):
            if not _HOST.fullmatch(host) or len(host) > 64:  # a certificate's name is no longer
                raise ConfigError(
                    f"{what} {host!r}: expected a host name, such as fl.hospital.org, or an "
                    "IPv4 address, by which sites reach the server"
                )
        if not 0 < self.port < 65536:
            raise ConfigError(f"port {self.port}: expected 1 to 65535")
        if not _EMAIL.fullmatch(self.admin):
            raise ConfigError(f"admin {self.admin!r}: expected an e-mail address")
        for place, organisation in (self.organisations or {}).items():
            if place not in (*self.sites, "server"):
                known = (*self.sites, "server")
                raise ConfigError(f"organisations: unknown site {place!r}; {nearest(place, known)}")
            if not re.fullmatch(r"[A-Za-z0-9_]+", organisation):
                said = f"organisations: {place} = {organisation!r}"
                raise ConfigError(f"{said}: letters, digits and '_' only")

    @property
    def watch(self) -> str:
        """The identity by which the server's machine asks the server how it stands, and no more."""
        return "watch@" + self.admin.partition("@")[2]

    def kit_of(self, person: str) -> str:
        """The kit whose certificate bears a name."""
        ours = {self.server: SERVER, self.watch: SERVER, self.admin: ADMIN}
        return ours.get(person, person)

    def organisation(self, site: str) -> str:
        """Whose a site is; the server and the admin are one organisation's, the project's own."""
        place, own = (site, site) if site in self.sites else (SERVER, self.name)
        return (self.organisations or {}).get(place, re.sub(r"\W", "_", own))


def _require_apart(sites: Sequence[str]) -> None:
    """Refuse names of which one is the beginning of another, and the rest may begin a token.

    NVFlare's server signs a site's name and its token (lower-case hexadecimal digits and '-')
    with nothing between: the signature for `h1` and a token `0e…` is one for `h10` and `e…`.
    """
    for name in sites:
        for other in sites:
            rest = other[len(name) :]
            if rest and other.startswith(name) and set(rest) <= set("0123456789abcdef-"):
                raise ConfigError(
                    f"sites {name!r} and {other!r} could be taken for one another: choose names of "
                    "one length, such as h01 and h10"
                )


def folders(project: ProjectConfig, out: Path) -> dict[str, Path]:
    """Where the kits of a project are made: "server", "admin" and one per site."""
    sites = {site: out / "sites" / site for site in project.sites}
    return {SERVER: out / SERVER, ADMIN: out / ADMIN, **sites}


def provision(
    project: ProjectConfig,
    out: Path,
    again: Sequence[str] = (),
    revoke: Sequence[str] = (),
    secret: Secret = no_secret,
) -> dict[str, Path]:
    """Make the kits that `out` never had; kits that are there stay as they are.

    again: kits that were lost; each is revoked and gets a new key. revoke: kits that count no
    more; the list of them is `out/trust.pem`. secret: asked for the passphrase of the authority's
    key, if it has one and signs something. Returns `folders`; the folder of a kit that was handed
    over does not exist. `out/authority` keeps the key that signs, and no other.
    Raises ConfigError if `out` has kits that do not fit the project, or a site whose name a new
    one's could be taken for.
    """
    kits, place = folders(project, out), out / "authority"
    _require_same(project, place)
    known = _known(project, place)
    _require_apart(sorted({*project.sites, *known} - {SERVER, ADMIN}))
    for name in (*again, *revoke):
        there = {*kits} if name in again else known
        if name not in there:
            raise ConfigError(f"{name!r} is no kit of this project; {nearest(name, there)}")
        if name in again and kits[name].exists():
            raise ConfigError(f"{kits[name]}: is there; move it away to make it anew")
    there = {name for name, kit in kits.items() if (kit / KIT_FILE).exists()}
    new = [name for name in kits if name not in there and (name not in known or name in again)]
    private_folder(place)
    make_private(place)  # it holds the key that signs new kits
    authority = Authority.of(place, project.name, secret)
    lost = [name for name in again if authority.serials.get(name)]
    for name in set(again) - set(lost):
        logger.warning("%s: what was made before is not on record, and counts on: --new-root", name)
    if revoke or lost:
        places = {name: kits.get(name, out / "sites" / name) for name in (*revoke, *lost)}
        authority.revoke(places)
    authority.keep()  # what is revoked is so before a kit is made anew
    _keep(project, place, {*known, *there})
    for name in new:
        _make(project, name, kits[name], authority)
        authority.keep()
    make_private(place)
    _keep(project, place, {*known, *there, *new})
    return kits


def authority_of(project: ProjectConfig, out: Path, secret: Secret = no_secret) -> Authority:
    """What signs the kits of `out`: `renew`, `replace`, `protect`, and `keep` at the end.

    Raises ConfigError if there is none, or it is another project's.
    """
    _require_same(project, out / "authority")
    return Authority.of(out / "authority", project.name, secret, make=False)


def _keep(project: ProjectConfig, authority: Path, kits: set[str]) -> None:
    """Remember what the kits were made with."""
    organisations = _record(authority).get("organisations", {})
    facts = {**_facts(project), "kits": sorted(kits)}
    write_json(
        authority / _RECORD, {**facts, "organisations": {**organisations, **_names(project)}}
    )


def _facts(project: ProjectConfig) -> dict[str, Any]:
    """What all the kits of a project were made with."""
    return {
        **{"name": project.name, "server": project.server, "port": project.port},
        **{"hosts": list(project.hosts), "admin": project.admin},
    }


def _record(authority: Path) -> dict[str, Any]:
    try:
        return dict(read_json(authority / _RECORD))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{authority / _RECORD}: cannot be read") from error


def _require_same(project: ProjectConfig, authority: Path) -> None:
    """Kits that were made keep what they were made with, and new ones would not go with them."""
    there, ours = _record(authority), _facts(project)
    if any(there.get(key, ours[key]) != ours[key] for key in ("name", "server")):
        raise ConfigError(
            f"{authority.parent}: holds kits of project {there['name']!r} at "
            f"{there['server']!r}, not of {project.name!r} at {project.server!r}: "
            "choose another folder"
        )
    were, organisations = there.get("organisations", {}), _names(project)
    changed = {k: (there[k], ours[k]) for k in ours if k in there and there[k] != ours[k]}
    changed |= {
        f"organisations.{name}": (were[name], now)
        for name, now in organisations.items()
        if were.get(name, now) != now
    }
    for key, (before, now) in changed.items():
        raise ConfigError(
            f"{authority.parent}: its kits were made with {key} = {json.dumps(before)}, the "
            f"project says {json.dumps(now)}: set it back, or choose another folder and hand all "
            "kits out anew"
        )


def _names(project: ProjectConfig) -> dict[str, str]:
    return {name: project.organisation(name) for name in folders(project, Path())}


def _known(project: ProjectConfig, authority: Path) -> set[str]:
    """The kits that were ever made here."""
    record = _record(authority)
    names = set(record.get("kits", ()))
    if not names:  # as earlier versions kept it
        with suppress(FileNotFoundError):
            kept = read_json(authority / project.name / "state" / STATE)
            signed = {name for name, value in kept.items() if isinstance(value, dict)}
            names = {name for name in signed if "@" not in name and name != project.server}
            names |= {SERVER, ADMIN} if signed else set()
    return names


def _make(project: ProjectConfig, name: str, kit: Path, authority: Authority) -> None:
    """A kit, with keys that are nowhere else, and the rules in its `local` folder."""
    role: Any = name if name in (SERVER, ADMIN) else SITE
    facts = Kit(
        name=name,
        role=role,
        project=project.name,
        server=project.server,
        port=project.port,
        person={ADMIN: project.admin, SERVER: project.watch}.get(role, ""),
        org=project.organisation(name),
    )
    rights = {project.admin: "project_admin", project.watch: "lead"}

    def fill(folder: Path) -> None:
        for path, table in kit_files(facts, kit.resolve()).items():
            write_json(folder / path, table)
        write_json(folder / KIT_FILE, facts.model_dump())
        for stem, who in stems(folder).items():
            key = new_key_pem()
            stem.with_suffix(".key").write_bytes(key)
            hosts = (who, *project.hosts) if stem.name == SERVER else (who,)
            certificate = authority.certify(name, key, who, facts.org, rights.get(who), hosts)
            stem.with_suffix(".crt").write_bytes(certificate)
            stem.with_name(ROOTS).write_bytes(Trust(authority.roots).pem())
            stem.with_name(TRUST).write_bytes(authority.said.pem())
        for place in (folder, folder / WATCH) if role == SERVER else (folder,):
            (place / "transfer").mkdir()  # NVFlare's, for what is handed in and fetched

    write_folder(kit, fill)
