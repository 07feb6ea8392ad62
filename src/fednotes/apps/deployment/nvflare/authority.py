"""A project's authority, and the start-up kits that it signs: one folder for the
server, each site and the admin, to hand over.

    OUT/authority/project.json               what its kits were made with, and their names
    OUT/authority/PROJECT/state/cert.json    its root and key, and the numbers of what it signed
    OUT/trust.pem                            what it says (`certificates.py`), for servers and sites

A kit holds a key, a certificate, where the server is, and the rules that its owner's
machine keeps: no job with code from anyone, one class that a job may name, no remote
shell, no logs that travel. The authority's folder stays with whoever provisions; its
key may lie there under a passphrase, which is asked for where something is to be
signed. Nothing here uses the network.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fednotes.apps.deployment.nvflare.certificates import (
    MOST_BYTES,
    RENEWAL,
    ROOTS,
    TOLERANCE,
    TRUST,
    Trust,
    certificate_of,
    issued,
    names_of,
    new_key_pem,
    signer,
    stems,
    to_pem,
)
from fednotes.apps.deployment.nvflare.kit import (
    ADMIN,
    KIT_FILE,
    NAME,
    SERVER,
    SITE,
    WATCH,
    Kit,
    build_kit_files,
)
from fednotes.core.errors import ConfigError, RefusedError, nearest, needs
from fednotes.core.parsing import read_json
from fednotes.core.settings import checked
from fednotes.core.store import (
    make_private,
    private_folder,
    write_folder,
    write_json,
    write_text,
)

with needs("cryptography", "deploy"):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import AttributeOID, NameOID

STATE = "cert.json"
DAYS, ROOT_DAYS = 360, 3650  # that a kit's certificate lives, and a root
Secret = Callable[[str], bytes]  # what it is for → the passphrase
_USES = (
    *(
        "digital_signature",
        "key_cert_sign",
        "crl_sign",
        "content_commitment",
        "key_encipherment",
    ),
    *("data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
)
_SIGNS = (  # what makes a certificate an authority's
    (x509.BasicConstraints(True, None), True),
    (x509.KeyUsage(**{use: use in _USES[:3] for use in _USES}), True),
)
_HOST = re.compile(
    r"([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
)
_EMAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}")
_RESERVED = frozenset({"server", "admin", "watch", "authority"})
_RECORD = "project.json"  # in the authority's folder
logger = logging.getLogger("fednotes.apps.deployment.nvflare.authority")


# ---- the authority -------------------------------------------------------------------


class _State(BaseModel):
    """`cert.json`; what has a default was not kept by earlier versions.

    PEM, and hexadecimal.
    """

    root_cert: str
    root_pri_key: str
    former: str = ""
    trust: str = ""
    serials: dict[str, list[str]] = {}


def no_secret(what: str) -> bytes:
    """For a key without a passphrase."""
    raise ConfigError(f"{what} is needed, and nobody can be asked for it")


@dataclass
class Authority:
    """What signs. secret: asked for the key's passphrase, once, where it has one.

    former: roots that this one replaced. serials: kit → those of its certificates.
    """

    folder: Path
    project: str
    secret: Secret
    root: Any = None
    stored: str = field(default="", repr=False)  # the key, as it lies on disk
    former: tuple[Any, ...] = ()
    said: Trust = field(default_factory=lambda: Trust(()))
    serials: dict[str, list[str]] = field(default_factory=dict)
    _key: Any = field(default=None, repr=False)

    @classmethod
    def of(
        cls, folder: Path, project: str, secret: Secret, *, make: bool = True
    ) -> Authority:
        """That of a folder, or a new one.

        Raises ConfigError if the folder's cannot be read, or there is none and `make`
            is false.
        """
        own = cls(folder, project, secret)
        if not own._path.exists():
            if not make:
                raise ConfigError(
                    f"{folder}: holds no authority of project {project!r}"
                )
            own._begin()
            own._say(())
            return own
        try:
            kept = _State.model_validate(read_json(own._path))
            own.root = x509.load_pem_x509_certificate(kept.root_cert.encode())
            own.stored, own.serials = kept.root_pri_key, kept.serials
            if kept.former:
                own.former = tuple(
                    x509.load_pem_x509_certificates(kept.former.encode())
                )
            own.said = Trust.parsed(kept.trust.encode()) if kept.trust else own.said
        except (OSError, ValueError, TypeError, RefusedError) as error:
            raise ConfigError(
                f"{own._path}: no authority can be read from it"
            ) from error
        if own.said.listed is None:  # as earlier versions kept it
            own._say(())
        return own

    @property
    def _path(self) -> Path:
        return self.folder / self.project / "state" / STATE

    @property
    def roots(self) -> tuple[Any, ...]:
        """Those that kits trust now, the one that is being replaced first, as NVFlare
        needs it."""
        have = Trust((*self.former, self.root), self.said.bridges)
        return tuple(r for r in have.roots if datetime.now(UTC) < have.end(r))

    @property
    def key(self) -> Any:
        """Raises ConfigError if the passphrase is not the key's."""
        if self._key is None:
            given = None
            if "ENCRYPTED" in self.stored:
                given = self.secret("the passphrase of the authority's key")
            try:
                self._key = load_pem_private_key(self.stored.encode(), given)
            except (ValueError, TypeError) as error:
                said = f"{self._path}: the key cannot be read"
                raise ConfigError(
                    f"{said}; is the passphrase right?" if given else said
                ) from error
        return self._key

    def keep(self) -> None:
        """Write what changed, and what the authority says where it can be handed on."""
        kept = _State(
            root_cert=to_pem([self.root]).decode(),
            root_pri_key=self.stored,
            former=to_pem(self.former).decode(),
            trust=self.said.pem().decode(),
            serials=self.serials,
        )
        write_json(self._path, kept.model_dump())
        write_text(self.folder.parent / TRUST, self.said.pem().decode())

    def protect(self) -> None:
        """Put a passphrase on the key, or another one."""
        key = self.key
        new = self.secret("a new passphrase for the authority's key")
        if not new:
            raise ConfigError(
                "an empty passphrase protects nothing; nothing was changed"
            )
        self.stored = _pem_of(key, BestAvailableEncryption(new))

    # ---- what it signs ---------------------------------------------------------------

    def certify(
        self,
        kit: str,
        key: bytes,
        name: str,
        org: str,
        right: str | None,
        hosts: Sequence[str],
    ) -> bytes:
        """A new certificate for a key of a kit, as PEM. right: NVFlare's name for a
        person's.

        hosts: names and addresses by which its owner is reached, its name among them.
        """
        parts = {NameOID.COMMON_NAME: name, NameOID.ORGANIZATION_NAME: org}
        if right:
            parts[NameOID.UNSTRUCTURED_NAME] = right
        subject = x509.Name(
            [x509.NameAttribute(oid, text) for oid, text in parts.items()]
        )
        public = load_pem_private_key(key, None).public_key()
        names = x509.SubjectAlternativeName(
            [_host(host) for host in dict.fromkeys(hosts)]
        )
        return self._issue(kit, subject, public, names)

    def _issue(self, kit: str, subject: Any, public_key: Any, names: Any) -> bytes:
        """With the bridge to it where one leads there."""
        end = min(datetime.now(UTC) + timedelta(DAYS), self.root.not_valid_after_utc)
        certificate = self._signed(subject, public_key, end, (names, False))
        self.serials.setdefault(kit, []).append(f"{certificate.serial_number:x}")
        bridges = [
            bridge for bridge in self.said.bridges if issued(certificate, bridge)
        ]
        return to_pem((certificate, *bridges))

    def _signed(
        self,
        subject: Any,
        public_key: Any,
        end: datetime,
        *extensions: Any,
        key: Any = None,
    ) -> Any:
        """A certificate of this project's root, by its key or another. It begins some
        minutes ago: clocks differ."""
        signs, issuer = key or self.key, self.root.subject if self.root else subject
        builder = (
            x509.CertificateBuilder(issuer, subject, public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.now(UTC) - TOLERANCE)
            .not_valid_after(end)
        )
        own = x509.SubjectKeyIdentifier.from_public_key(public_key)
        of = x509.AuthorityKeyIdentifier.from_issuer_public_key(signs.public_key())
        for extension, critical in (*extensions, (own, False), (of, False)):
            builder = builder.add_extension(extension, critical)
        return builder.sign(signs, hashes.SHA256())

    def revoke(self, kits: Mapping[str, Path]) -> None:
        """Say that these kits count no more. kits: name → its folder, if that is still
        at hand.

        Raises ConfigError where a kit's certificate is not known.
        """
        serials: list[int] = []
        for kit, folder in kits.items():
            known = {int(text, 16) for text in self.serials.get(kit, ())}
            # not all below: a job's folder has the certificate of the admin who handed
            # it in
            at_hand = (
                *folder.glob("startup/*.crt"),
                *folder.glob(f"{WATCH}/startup/*.crt"),
            )
            known |= {
                certificate_of(path.with_suffix("")).serial_number for path in at_hand
            }
            if not known:
                raise ConfigError(
                    f"{kit}: its certificate is not on record, for an earlier version made it; "
                    "replace the root instead (--new-root), and renew the other kits"
                )
            serials += sorted(known)
        self._say(serials)

    def replace(self, overlap: int) -> None:
        """Make a new root and key; kits of the old one count for `overlap` days more.

        Raises ConfigError while an earlier replacement is under way.
        """
        if len(self.roots) > 1:
            end = Trust(self.former, self.said.bridges).end(self.former[-1])
            raise ConfigError(
                f"{self.folder}: its root is being replaced until {end:%Y-%m-%d}; wait until then"
            )
        old, old_key, protected = self.root, self.key, "ENCRYPTED" in self.stored
        before = self.said.listed
        end = min(datetime.now(UTC) + timedelta(overlap), old.not_valid_after_utc)
        self._begin()
        bridge = self._signed(
            old.subject, self.key.public_key(), end, *_SIGNS, key=old_key
        )
        self.former, self.said = (old,), Trust((), (), before)
        self._say((), (bridge,))
        if protected:
            self.protect()

    def renew(self, request: bytes, kit_of: Callable[[str], str]) -> bytes:
        """Sign the requests of a kit that shows that it is the holder's
        (`certificates.request`).

        kit_of: name in a certificate → kit. Raises RefusedError, and signs nothing,
        where a request is not signed by a key whose certificate counts now.
        """
        if len(request) > MOST_BYTES:
            raise RefusedError("too long for the request of a kit")
        trust, signed = Trust(self.roots, self.said.bridges, self.said.listed), []
        form = (
            b"-----BEGIN CERTIFICATE REQUEST-----.*?-----END CERTIFICATE REQUEST-----"
        )
        for block in re.findall(form, request, re.DOTALL):
            try:
                asked = x509.load_pem_x509_csr(block)
                public = asked.public_key()
                value = asked.attributes.get_attribute_for_oid(
                    AttributeOID.UNSTRUCTURED_NAME
                ).value
                text = public.public_bytes(
                    Encoding.DER, PublicFormat.SubjectPublicKeyInfo
                )
                shown = signer(
                    trust, text, base64.b64decode(value, validate=True), RENEWAL
                )
            except (ValueError, TypeError, x509.AttributeNotFound) as error:
                raise RefusedError("no request of a kit can be read") from error
            if (
                shown is None
                or shown.subject != asked.subject
                or not asked.is_signature_valid
            ):
                raise RefusedError("the request is not signed by a kit that counts now")
            signed.append((shown, public))
        if not signed:
            raise RefusedError("no request of a kit can be read")
        answer = b""
        for shown, public in signed:
            hosts = shown.extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            ).value
            answer += self._issue(
                kit_of(names_of(shown)[0]), shown.subject, public, hosts
            )
        return answer + self.said.pem()

    # ---- its own ---------------------------------------------------------------------

    def _begin(self) -> None:
        """A key, and a root of it."""
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=3072)
        self.stored = _pem_of(self._key, NoEncryption())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.project)])
        end = datetime.now(UTC) + timedelta(ROOT_DAYS)
        self.root = self._signed(name, self._key.public_key(), end, *_SIGNS)

    def _say(
        self, serials: Iterable[int], bridges: tuple[Any, ...] | None = None
    ) -> None:
        """Make a new list, of what was revoked before and could still be in use, and
        these."""
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder(self.root.subject)
        builder = builder.last_update(now - TOLERANCE).next_update(
            self.root.not_valid_after_utc
        )
        builder = builder.add_extension(
            x509.CRLNumber(self.said.number + 1), critical=False
        )
        before = {
            e.serial_number: e.revocation_date_utc for e in self.said.listed or ()
        }
        dates = dict.fromkeys(serials, now) | before
        for serial, when in dates.items():
            if now - when < timedelta(DAYS + 1):  # later its certificate is over anyhow
                entry = x509.RevokedCertificateBuilder(serial, when)
                builder = builder.add_revoked_certificate(entry.build())
        listed = builder.sign(self.key, hashes.SHA256())
        if bridges is None:
            bridges = tuple(b for b in self.said.bridges if now < b.not_valid_after_utc)
        said = Trust((self.root,), bridges, listed)
        if len(said.pem()) > MOST_BYTES:
            raise ConfigError(
                "more kits are revoked than a list holds; replace the root instead"
            )
        self.said = said


def _host(name: str) -> Any:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem_of(key: Any, encryption: Any) -> str:
    return str(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption), "ascii"
    )


# ---- a project, and its kits ---------------------------------------------------------


@checked(frozen=True)
class ProjectConfig:
    """A network of sites.

    name: of the project. server: the host name by which sites reach the server. port:
    its one port. sites: their names, in any order. hosts: further names of the server.
    admin: e-mail address of who submits jobs. organisations: site → organisation; of
    "server" too, which is also the admin's.
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
                # NVFlare takes what follows for a job
                dot = ", '.'" if what == "name" else ""
                raise ConfigError(
                    f"{what} {name!r}: letters, digits, '_'{dot} and '-' only"
                )
        # a certificate each, known by its name
        taken = _RESERVED | {self.server, self.name}
        wrong = sorted({s for s in self.sites if s in taken or self.sites.count(s) > 1})
        if not self.sites or wrong:
            raise ConfigError(
                f"sites {wrong or 'are missing'}: each needs a name of its own"
            )
        _require_apart(self.sites)
        for what, host in (
            ("server", self.server),
            *(("hosts", h) for h in self.hosts),
        ):
            # a certificate's name is no longer
            if not _HOST.fullmatch(host) or len(host) > 64:
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
                raise ConfigError(
                    f"organisations: unknown site {place!r}; {nearest(place, known)}"
                )
            if not re.fullmatch(r"[A-Za-z0-9_]+", organisation):
                said = f"organisations: {place} = {organisation!r}"
                raise ConfigError(f"{said}: letters, digits and '_' only")

    @property
    def watch(self) -> str:
        """The identity by which the server's machine asks the server how it stands, and
        no more."""
        return "watch@" + self.admin.partition("@")[2]

    def kit_of(self, person: str) -> str:
        """The kit whose certificate bears a name."""
        ours = {self.server: SERVER, self.watch: SERVER, self.admin: ADMIN}
        return ours.get(person, person)

    def organisation(self, site: str) -> str:
        """Whose a site is; the server and the admin are one organisation's, the
        project's own."""
        place, own = (site, site) if site in self.sites else (SERVER, self.name)
        return (self.organisations or {}).get(place, re.sub(r"\W", "_", own))


def _require_apart(sites: Iterable[str]) -> None:
    """Refuse names of which one is the beginning of another, and the rest may begin a
    token.

    NVFlare's server signs a site's name and its token (lower-case hexadecimal digits
    and '-') with nothing between: the signature for `h1` and a token `0e…` is one for
    `h10` and `e…`.
    """
    for name in sites:
        for other in sites:
            rest = other[len(name) :]
            if (
                rest
                and other.startswith(name)
                and set(rest) <= set("0123456789abcdef-")
            ):
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

    again: kits that were lost; each is revoked and gets a new key. revoke: kits that
    count no more; the list of them is `out/trust.pem`. secret: asked for the passphrase
    of the authority's key, if it has one and signs something. Returns `folders`; the
    folder of a kit that was handed over does not exist. `out/authority` keeps the key
    that signs, and no other.
    Raises ConfigError if `out` has kits that do not fit the project, or a site whose
    name a new one's could be taken for.
    """
    kits, place = folders(project, out), out / "authority"
    record = _record(project, place)
    known = set(record["kits"])
    _require_apart(sorted({*project.sites, *known} - {SERVER, ADMIN}))
    for name in (*again, *revoke):
        there = {*kits} if name in again else known
        if name not in there:
            raise ConfigError(
                f"{name!r} is no kit of this project; {nearest(name, there)}"
            )
        if name in again and kits[name].exists():
            raise ConfigError(f"{kits[name]}: is there; move it away to make it anew")
    there = {name for name, kit in kits.items() if (kit / KIT_FILE).exists()}
    new = [
        name
        for name in kits
        if name not in there and (name not in known or name in again)
    ]
    private_folder(place)
    if closed := make_private(place):  # it holds the key that signs new kits
        logger.warning(
            "%s: other users of this machine could open %d files and folders until now; if there "
            "are such users, make all kits anew in another folder",
            place,
            len(closed),
        )
    authority = Authority.of(place, project.name, secret)
    lost = [name for name in again if authority.serials.get(name)]
    for name in set(again) - set(lost):
        logger.warning(
            "%s: what was made before is not on record, and counts on: --new-root", name
        )
    if revoke or lost:
        places = {
            name: kits.get(name, out / "sites" / name) for name in (*revoke, *lost)
        }
        authority.revoke(places)
    authority.keep()  # what is revoked is so before a kit is made anew
    write_json(place / _RECORD, {**record, "kits": sorted({*known, *there})})
    for name in new:
        _make(project, name, kits[name], authority)
        authority.keep()
    make_private(place)
    write_json(place / _RECORD, {**record, "kits": sorted({*known, *there, *new})})
    return kits


def authority_of(
    project: ProjectConfig, out: Path, secret: Secret = no_secret
) -> Authority:
    """What signs the kits of `out`: `renew`, `replace`, `protect`, and `keep` at the
    end.

    Raises ConfigError if there is none, or it is another project's.
    """
    _record(project, out / "authority")
    return Authority.of(out / "authority", project.name, secret, make=False)


def _made_with(project: ProjectConfig) -> dict[str, Any]:
    """What all the kits of a project are made with."""
    facts = {key: getattr(project, key) for key in ("name", "server", "port", "admin")}
    names = {name: project.organisation(name) for name in folders(project, Path())}
    return {**facts, "hosts": list(project.hosts), "organisations": names}


def _record(project: ProjectConfig, authority: Path) -> dict[str, Any]:
    """What an authority keeps of the kits that were made, with their names under
    "kits".

    Raises ConfigError where they keep what they were made with, and new ones would not
    go with them.
    """
    try:
        there, ours = dict(read_json(authority / _RECORD)), _made_with(project)
    except FileNotFoundError:
        there, ours = {}, _made_with(project)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{authority / _RECORD}: cannot be read") from error
    there.setdefault("organisations", {})
    both = there["organisations"], ours["organisations"]
    for places, before, now in (("", there, ours), ("organisations.", *both)):
        for key in now.keys() & before.keys() - {"organisations"}:
            if before[key] != now[key]:
                raise ConfigError(
                    f"{authority.parent}: its kits were made with {places}{key} = "
                    f"{json.dumps(before[key])}, the project says {json.dumps(now[key])}: set it "
                    "back, or choose another folder and hand all kits out anew"
                )
    state = authority / project.name / "state" / STATE
    if not there.get("kits") and state.exists():  # as earlier versions kept it
        kept = read_json(state)
        signed = {name for name, value in kept.items() if isinstance(value, dict)} - {
            "serials"
        }
        names = {name for name in signed if "@" not in name and name != project.server}
        there["kits"] = sorted(names | ({SERVER, ADMIN} if signed else set()))
    organisations = {**there["organisations"], **ours["organisations"]}
    return {**ours, "organisations": organisations, "kits": there.get("kits", [])}


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
        for path, table in build_kit_files(facts, kit.resolve()).items():
            write_json(folder / path, table)
        write_json(folder / KIT_FILE, facts.model_dump())
        for stem, who in stems(folder).items():
            key = new_key_pem()
            stem.with_suffix(".key").write_bytes(key)
            hosts = (who, *project.hosts) if stem.name == SERVER else (who,)
            certificate = authority.certify(
                name, key, who, facts.org, rights.get(who), hosts
            )
            stem.with_suffix(".crt").write_bytes(certificate)
            stem.with_name(ROOTS).write_bytes(Trust(authority.roots).pem())
            stem.with_name(TRUST).write_bytes(authority.said.pem())
        for place in (folder, folder / WATCH) if role == SERVER else (folder,):
            (place / "transfer").mkdir()  # NVFlare's, for what is handed in and fetched

    write_folder(kit, fill)
