"""A project's authority, and the kits that it signs: the server, the sites, the admin.

    OUT/authority/project.json               the kits' common settings, and their names
    OUT/authority/PROJECT/state/cert.json    the authority's root and key, and serial
                                             numbers of the certificates that it signed
    OUT/trust.pem                            the newest trust list (`trust.py`)

A kit is a folder to hand over to its owner. It holds a private key, its certificate,
the server's address, and the rules for the owner's machine: no job carries code, a job
may name only one class, there is no remote shell, and no log leaves the machine.

The authority's folder stays with the person who provisions the network. Its key may be
encrypted; signing then asks for the passphrase. Nothing here uses the network.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from fednotes.apps.deployment.nvflare.certificates import (
    RENEWAL_PURPOSE,
    find_signer,
    find_stems,
    list_owner_names,
    read_certificate,
)
from fednotes.apps.deployment.nvflare.kit import (
    ADMIN,
    KIT_FILE,
    NAME,
    SERVER,
    WATCH,
    Kit,
    build_kit_files,
)
from fednotes.apps.deployment.nvflare.renewal import create_key_pem
from fednotes.apps.deployment.nvflare.trust import (
    CLOCK_TOLERANCE,
    MAX_BYTES,
    ROOTS_FILE,
    TRUST_FILE,
    Trust,
    encode_pem,
    is_issued_by,
)
from fednotes.core.errors import (
    ConfigError,
    ParameterError,
    RefusedError,
    needs,
    suggest_name,
)
from fednotes.core.parsing import read_json, read_json_table
from fednotes.core.settings import checked
from fednotes.core.store import (
    create_private_folder,
    make_private,
    reserving_folder,
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
        KeySerializationEncryption,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import AttributeOID, NameOID

AUTHORITY_FOLDER = "authority"  # beside the kits
STATE_FILE = "cert.json"
CERTIFICATE_DAYS = 360  # validity of a kit's certificate
ROOT_DAYS = 3650  # validity of a root
# Takes the purpose of a passphrase, and returns the passphrase.
AskPassphrase = Callable[[str], bytes]
_RECORD_FILE = "project.json"  # in the authority's folder
_RESERVED_NAMES = frozenset({"server", "admin", "watch", "authority"})
_MAX_HOST = 64  # characters; the limit for a name in a certificate
_HOST = re.compile(
    r"([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
)
_EMAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}")
_REQUEST = re.compile(
    b"-----BEGIN CERTIFICATE REQUEST-----.*?-----END CERTIFICATE REQUEST-----",
    re.DOTALL,
)
# An extension of a certificate, and whether it is critical.
_Extension = tuple[x509.ExtensionType, bool]
# The extensions that let a certificate sign others and revoke them.
_AUTHORITY_EXTENSIONS: tuple[_Extension, ...] = (
    (x509.BasicConstraints(ca=True, path_length=None), True),
    (
        x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        ),
        True,
    ),
)
logger = logging.getLogger("fednotes.apps.deployment.nvflare.authority")


# ---- the authority -------------------------------------------------------------------


class _State(BaseModel):
    """`cert.json`. Fields with a default are missing in files of earlier versions.

    Attributes:
        root_cert: The root, in PEM.
        root_pri_key: The root's private key, in PEM, possibly encrypted.
        former: The roots that were replaced, in PEM.
        trust: The newest trust list, in PEM.
        serials: Name of each kit to the serial numbers of its certificates, in
            hexadecimal.
    """

    root_cert: str
    root_pri_key: str
    former: str = ""
    trust: str = ""
    serials: dict[str, list[str]] = {}


def refuse_passphrase(what: str) -> bytes:
    """Raise ParameterError, because there is nobody to ask for a passphrase.

    Args:
        what: What the passphrase is for, in words.
    """
    raise ParameterError(f"{what} is needed: pass `ask_passphrase`")


@dataclass
class Authority:
    """The certificate authority of one project.

    Changes are in memory until `save` writes them to disk.

    Attributes:
        folder: The authority's folder.
        project: The project's name.
        ask_passphrase: Returns the key's passphrase, if the key has one.
        root: The root certificate.
        stored_key: The root's private key as stored on disk, in PEM.
        former_roots: The roots that this one replaced.
        trust_list: The newest trust list.
        serials: Name of each kit to the serial numbers of its certificates, in
            hexadecimal.
    """

    folder: Path
    project: str
    ask_passphrase: AskPassphrase
    root: Any = None
    stored_key: str = field(default="", repr=False)
    former_roots: tuple[Any, ...] = ()
    trust_list: Trust = field(default_factory=lambda: Trust(()))
    serials: dict[str, list[str]] = field(default_factory=dict)
    _key: Any = field(default=None, repr=False)

    @classmethod
    def open(
        cls,
        folder: Path,
        project: str,
        ask_passphrase: AskPassphrase,
        *,
        create: bool = True,
    ) -> Authority:
        """Read the authority in a folder, or create one.

        Args:
            folder: The authority's folder.
            project: The project's name.
            ask_passphrase: Returns the key's passphrase, if the key has one.
            create: Whether to create an authority if the folder holds none.

        Raises:
            ConfigError: The folder holds no authority, or an unreadable one.
        """
        authority = cls(folder, project, ask_passphrase)
        if authority._state_file.exists():
            authority._read_state()
        elif create:
            authority._create_root()
        else:
            raise ConfigError(
                f"{folder}: contains no authority of project {project!r}: create "
                "the project's kits first, or name their folder"
            )
        # It is None if the authority is new, or was written by an earlier version.
        if authority.trust_list.revocations is None:
            authority._update_trust_list()
        return authority

    @property
    def _state_file(self) -> Path:
        return self.folder / self.project / "state" / STATE_FILE

    def _read_state(self) -> None:
        """Read the state from disk.

        Raises:
            ConfigError: The state cannot be read.
        """
        try:
            state = _State.model_validate(read_json(self._state_file))
            self.root = x509.load_pem_x509_certificate(state.root_cert.encode())
            self.stored_key = state.root_pri_key
            self.serials = state.serials
            if state.former:
                self.former_roots = tuple(
                    x509.load_pem_x509_certificates(state.former.encode())
                )
            if state.trust:
                self.trust_list = Trust.parse(state.trust.encode())
        except (OSError, ValueError, TypeError, RefusedError) as error:
            raise ConfigError(
                f"{self._state_file}: cannot be read as the state of an authority: "
                "restore it from a backup"
            ) from error

    def save(self) -> None:
        """Write the state, and the trust list to the folder of the kits."""
        state = _State(
            root_cert=encode_pem([self.root]).decode(),
            root_pri_key=self.stored_key,
            former=encode_pem(self.former_roots).decode(),
            trust=self.trust_list.encode().decode(),
            serials=self.serials,
        )
        write_json(self._state_file, state.model_dump())
        write_text(self.folder.parent / TRUST_FILE, self.trust_list.encode().decode())

    def list_valid_roots(self) -> tuple[Any, ...]:
        """Return the roots that kits currently trust.

        A root that is being replaced comes first, as NVFlare requires.
        """
        trust = Trust((*self.former_roots, self.root), self.trust_list.bridges)
        now = datetime.now(UTC)
        return tuple(root for root in trust.roots if now < trust.find_root_expiry(root))

    def load_key(self) -> Any:
        """Return the root's private key; ask for its passphrase if it has one.

        Raises:
            ConfigError: The key cannot be read, or the passphrase is wrong.
        """
        if self._key is not None:
            return self._key
        passphrase = None
        hint = ": restore the file from a copy"
        if self._is_encrypted():
            passphrase = self.ask_passphrase("the passphrase of the authority's key")
            hint = ": check the passphrase"
        try:
            self._key = load_pem_private_key(self.stored_key.encode(), passphrase)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._state_file}: cannot read the key{hint}"
            ) from error
        return self._key

    def _is_encrypted(self) -> bool:
        """Return whether the key on disk has a passphrase."""
        return "ENCRYPTED" in self.stored_key

    def encrypt_key(self) -> None:
        """Encrypt the key with a new passphrase.

        Raises:
            ConfigError: The old passphrase is wrong, or the new one is empty.
        """
        key = self.load_key()
        passphrase = self.ask_passphrase("a new passphrase for the authority's key")
        if not passphrase:
            raise ConfigError(
                "an empty passphrase protects nothing; nothing was changed"
            )
        self.stored_key = _encode_key(key, BestAvailableEncryption(passphrase))

    # ---- certificates ----------------------------------------------------------------

    def certify(
        self,
        kit: str,
        key: bytes,
        *,
        name: str,
        org: str,
        right: str | None,
        hosts: Sequence[str],
    ) -> bytes:
        """Return a new certificate for a kit's key.

        Args:
            kit: The kit's name.
            key: The private key, in PEM.
            name: The name of the certificate's owner.
            org: The owner's organisation.
            right: NVFlare's name for the rights of a person; None for a machine.
            hosts: Names and addresses by which the owner is reached, including `name`.

        Returns:
            The certificate, and the bridges to it, in PEM.
        """
        attributes = {NameOID.COMMON_NAME: name, NameOID.ORGANIZATION_NAME: org}
        if right:
            attributes[NameOID.UNSTRUCTURED_NAME] = right
        subject = x509.Name(
            [x509.NameAttribute(oid, text) for oid, text in attributes.items()]
        )
        public_key = load_pem_private_key(key, None).public_key()
        host_names = x509.SubjectAlternativeName(
            [_encode_host(host) for host in dict.fromkeys(hosts)]
        )
        return self._issue(kit, subject, public_key=public_key, host_names=host_names)

    def _issue(
        self,
        kit: str,
        subject: x509.Name,
        *,
        public_key: Any,
        host_names: x509.SubjectAlternativeName,
    ) -> bytes:
        """Return a kit's new certificate and the bridges to it, in PEM.

        The serial number of the certificate is recorded.
        """
        end = min(
            datetime.now(UTC) + timedelta(days=CERTIFICATE_DAYS),
            self.root.not_valid_after_utc,
        )
        certificate = self._sign(
            subject, public_key, end=end, extensions=[(host_names, False)]
        )
        self.serials.setdefault(kit, []).append(f"{certificate.serial_number:x}")
        bridges = [
            bridge
            for bridge in self.trust_list.bridges
            if is_issued_by(certificate, bridge)
        ]
        return encode_pem((certificate, *bridges))

    def _sign(
        self,
        subject: x509.Name,
        public_key: Any,
        *,
        end: datetime,
        extensions: Iterable[_Extension],
        key: Any = None,
    ) -> x509.Certificate:
        """Return a new certificate whose issuer is this project's root.

        Its validity begins a few minutes ago, because the clocks of machines differ.

        Args:
            subject: The owner.
            public_key: The owner's public key.
            end: When the certificate expires.
            extensions: Further extensions.
            key: The private key that signs; None for the root's key.
        """
        signing_key = key or self.load_key()
        issuer = self.root.subject if self.root else subject
        builder = (
            x509.CertificateBuilder(issuer, subject, public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.now(UTC) - CLOCK_TOLERANCE)
            .not_valid_after(end)
        )
        key_ids: list[_Extension] = [
            (x509.SubjectKeyIdentifier.from_public_key(public_key), False),
            (
                x509.AuthorityKeyIdentifier.from_issuer_public_key(
                    signing_key.public_key()
                ),
                False,
            ),
        ]
        for extension, is_critical in (*extensions, *key_ids):
            builder = builder.add_extension(extension, is_critical)
        return builder.sign(signing_key, hashes.SHA256())

    def _create_root(self) -> None:
        """Create a new key and its root."""
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=3072)
        self.stored_key = _encode_key(self._key, NoEncryption())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.project)])
        self.root = self._sign(
            name,
            self._key.public_key(),
            end=datetime.now(UTC) + timedelta(days=ROOT_DAYS),
            extensions=_AUTHORITY_EXTENSIONS,
        )

    def replace_root(self, overlap: int) -> None:
        """Create a new root and key.

        Args:
            overlap: Days for which the kits of the old root stay valid.

        Raises:
            ConfigError: An earlier replacement has not ended yet.
        """
        if len(self.list_valid_roots()) > 1:
            former_trust = Trust(self.former_roots, self.trust_list.bridges)
            end = former_trust.find_root_expiry(self.former_roots[-1])
            raise ConfigError(
                f"{self.folder}: its root is being replaced until {end:%Y-%m-%d}: wait "
                "until then"
            )
        old_root = self.root
        old_key = self.load_key()
        was_encrypted = self._is_encrypted()
        end_of_overlap = datetime.now(UTC) + timedelta(days=overlap)

        self._create_root()
        # The bridge certifies the new key with the old one. While it is valid, kits
        # that trust the old root also trust certificates of the new root.
        bridge = self._sign(
            old_root.subject,
            self.load_key().public_key(),
            end=min(end_of_overlap, old_root.not_valid_after_utc),
            extensions=_AUTHORITY_EXTENSIONS,
            key=old_key,
        )
        self.former_roots = (old_root,)
        self._update_trust_list(bridges=(bridge,))
        if was_encrypted:
            self.encrypt_key()

    # ---- revocation ------------------------------------------------------------------

    def revoke(self, kits: Mapping[str, Path]) -> None:
        """Revoke kits.

        Args:
            kits: Name of each kit to its folder, which need not exist.

        Raises:
            ConfigError: The serial number of a kit's certificate is unknown.
        """
        revoked_serials: list[int] = []
        for kit, folder in kits.items():
            kit_serials = self._find_serials(kit, folder)
            if not kit_serials:
                raise ParameterError(
                    f"{kit}: its certificate is not on record, because an earlier "
                    "version of fednotes created it: use `replace_root` instead, and "
                    "renew the other kits"
                )
            revoked_serials += sorted(kit_serials)
        self._update_trust_list(revoked_serials)

    def _find_serials(self, kit: str, folder: Path) -> set[int]:
        """Return the known serial numbers of a kit's certificates.

        They are those on record, and those of the certificates in the kit's folder.

        Args:
            kit: The kit's name.
            folder: The kit's folder, which need not exist.
        """
        serials = {int(text, 16) for text in self.serials.get(kit, ())}
        # No other folders are searched: that of a job in the kit holds the certificate
        # of the admin who submitted the job.
        for startup in (folder / "startup", folder / WATCH / "startup"):
            for path in startup.glob("*.crt"):
                certificate = read_certificate(path.with_suffix(""))
                serials.add(certificate.serial_number)
        return serials

    def _update_trust_list(
        self, serials: Iterable[int] = (), bridges: tuple[Any, ...] | None = None
    ) -> None:
        """Replace the trust list by a new one.

        The new list also revokes the certificates that the current list revokes.
        Expired ones are left out only if there is no room for all, because this
        machine's clock may be wrong.

        Args:
            serials: Serial numbers of further certificates to revoke.
            bridges: The bridges to the current root; None for the valid ones of the
                current list.

        Raises:
            ConfigError: The list would be too long.
        """
        if bridges is None:
            now = datetime.now(UTC)
            bridges = tuple(
                bridge
                for bridge in self.trust_list.bridges
                if now < bridge.not_valid_after_utc
            )
        serials = list(serials)
        for with_expired in (True, False):
            revocations = self._sign_revocations(serials, with_expired=with_expired)
            trust_list = Trust((self.root,), bridges, revocations)
            if len(trust_list.encode()) <= MAX_BYTES:
                self.trust_list = trust_list
                return
        raise ParameterError(
            "more kits are revoked than a trust list can contain: use `replace_root` "
            "instead"
        )

    def _sign_revocations(
        self, serials: Iterable[int], *, with_expired: bool
    ) -> x509.CertificateRevocationList:
        """Return a new list of revoked certificates, signed by the root's key.

        Args:
            serials: Serial numbers of certificates that the current list may not have.
            with_expired: Whether certificates stay on the list after they have expired.
        """
        now = datetime.now(UTC)
        builder = (
            x509.CertificateRevocationListBuilder(self.root.subject)
            .last_update(now - CLOCK_TOLERANCE)
            .next_update(self.root.not_valid_after_utc)
            .add_extension(x509.CRLNumber(self.trust_list.number + 1), critical=False)
        )
        current_dates = {
            entry.serial_number: entry.revocation_date_utc
            for entry in self.trust_list.revocations or ()
        }
        dates = dict.fromkeys(serials, now) | current_dates
        for serial, date in dates.items():
            has_expired = now - date > timedelta(days=CERTIFICATE_DAYS + 1)
            if with_expired or not has_expired:
                entry = x509.RevokedCertificateBuilder(serial, date).build()
                builder = builder.add_revoked_certificate(entry)
        return builder.sign(self.load_key(), hashes.SHA256())

    # ---- renewal ---------------------------------------------------------------------

    def sign_requests(self, data: bytes, find_kit: Callable[[str], str]) -> bytes:
        """Sign a kit's requests for new certificates (`renewal.request_renewal`).

        Args:
            data: The requests, in PEM.
            find_kit: Takes the owner's name in a certificate, and returns the name of
                the kit.

        Returns:
            The new certificates, and the newest trust list, in PEM.

        Raises:
            RefusedError: A request cannot be read, or is not signed with the key of a
                valid certificate. No certificate was issued.
        """
        if len(data) > MAX_BYTES:
            raise RefusedError(
                "too long for a request of `fednotes kit renew`: check that this is "
                "the right file"
            )
        trust = Trust(
            self.list_valid_roots(),
            self.trust_list.bridges,
            self.trust_list.revocations,
        )
        requests = [_verify_request(block, trust) for block in _REQUEST.findall(data)]
        if not requests:
            raise RefusedError("not a readable request of `fednotes kit renew`")

        new_certificates = b""
        for request in requests:
            # The request chooses only the key; all else is as in the old certificate.
            certificate = request.certificate
            host_names = certificate.extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            ).value
            owner, *_ = list_owner_names(certificate)
            new_certificates += self._issue(
                find_kit(owner),
                certificate.subject,
                public_key=request.public_key,
                host_names=host_names,
            )
        return new_certificates + self.trust_list.encode()


class _RenewalRequest(NamedTuple):
    """A verified request for a new certificate.

    Attributes:
        certificate: The current certificate of the kit's holder.
        public_key: The public key to certify.
    """

    certificate: x509.Certificate
    public_key: Any


def _verify_request(block: bytes, trust: Trust) -> _RenewalRequest:
    """Verify a request for a new certificate.

    Args:
        block: The request, in PEM.
        trust: The roots, bridges and revocations of the authority.

    Raises:
        RefusedError: The request is not signed by a key whose certificate is valid.
    """
    try:
        request = x509.load_pem_x509_csr(block)
        public_key = request.public_key()
        proof = request.attributes.get_attribute_for_oid(AttributeOID.UNSTRUCTURED_NAME)
        certificate = find_signer(
            trust,
            public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
            base64.b64decode(proof.value, validate=True),
            purpose=RENEWAL_PURPOSE,
        )
    except (ValueError, TypeError, x509.AttributeNotFound) as error:
        raise RefusedError("not a readable request of `fednotes kit renew`") from error
    if (
        certificate is None
        or certificate.subject != request.subject
        or not request.is_signature_valid
    ):
        raise RefusedError("the request is not signed by a currently valid kit")
    return _RenewalRequest(certificate, public_key)


def _encode_host(name: str) -> x509.GeneralName:
    """Return a host name or an IP address in the form that a certificate contains."""
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _encode_key(key: Any, encryption: KeySerializationEncryption) -> str:
    """Return a private key in PEM."""
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return pem.decode("ascii")


# ---- a project -----------------------------------------------------------------------


@checked(frozen=True)
class ProjectConfig:
    """A network of sites.

    Attributes:
        name: The project's name.
        server: The host name by which sites reach the server.
        sites: The names of the sites, in any order.
        port: The server's only port.
        hosts: Further host names or addresses of the server.
        admin: The e-mail address of the person who submits jobs.
        organisations: Name of a site to its organisation; "server" to the organisation
            of the server and the admin.
    """

    name: str
    server: str
    sites: tuple[str, ...]
    port: int = 8002
    hosts: tuple[str, ...] = ()
    admin: str = "admin@fednotes.org"
    organisations: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._check_names()
        self._check_addresses()
        self._check_organisations()

    def _check_names(self) -> None:
        """Raise ConfigError unless the project and each site have a usable name."""
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"name {self.name!r}: use letters, digits, '_', '.' and '-' only"
            )
        for site in self.sites:
            # NVFlare interprets the part after a dot as a job.
            if not NAME.fullmatch(site) or "." in site:
                raise ConfigError(
                    f"site {site!r}: use letters, digits, '_' and '-' only"
                )
        if not self.sites:
            raise ConfigError("sites are missing: give at least one")
        reserved_names = [site for site in self.sites if site in _RESERVED_NAMES]
        if reserved_names:
            raise ConfigError(
                f"sites {reserved_names}: these names belong to the project's server, "
                "its admin and its authority: name each site after its hospital or "
                f"ward, such as {reserved_names[0] + '-hospital'!r}"
            )
        # The name in a certificate identifies a participant, so each name is unique.
        numbers = Counter([*set(self.sites) & {self.server, self.name}, *self.sites])
        repeated_names = sorted(site for site, number in numbers.items() if number > 1)
        if repeated_names:
            raise ConfigError(
                f"sites {repeated_names}: these names are used twice in the project: "
                "choose a different name for each site"
            )
        _require_distinguishable(self.sites)

    def _check_addresses(self) -> None:
        """Raise ConfigError unless the hosts, the port and the admin are valid."""
        hosts = [("server", self.server), *(("hosts", host) for host in self.hosts)]
        for key, host in hosts:
            if not _HOST.fullmatch(host) or len(host) > _MAX_HOST:
                raise ConfigError(
                    f"{key} {host!r}: expected a host name, such as fl.hospital.org, "
                    "or an IPv4 address, by which sites reach the server"
                )
        if not 0 < self.port < 65536:
            raise ConfigError(f"port {self.port}: expected 1 to 65535")
        if not _EMAIL.fullmatch(self.admin):
            raise ConfigError(f"admin {self.admin!r}: expected an e-mail address")

    def _check_organisations(self) -> None:
        """Raise ConfigError unless each organisation belongs to a participant."""
        owners = (*self.sites, SERVER)
        for owner, organisation in (self.organisations or {}).items():
            if owner not in owners:
                raise ConfigError(
                    f"organisations: unknown site {owner!r}: "
                    f"{suggest_name(owner, owners)}"
                )
            if not re.fullmatch(r"[A-Za-z0-9_]+", organisation):
                raise ConfigError(
                    f"organisations: {owner} = {organisation!r}: use letters, digits "
                    "and '_' only"
                )

    @property
    def watch(self) -> str:
        """The identity with which the server's machine queries the server."""
        return "watch@" + self.admin.partition("@")[2]

    def find_kit(self, owner: str) -> str:
        """Return the name of the kit whose certificate has this owner's name."""
        kits = {self.server: SERVER, self.watch: SERVER, self.admin: ADMIN}
        return kits.get(owner, owner)

    def find_organisation(self, kit: str) -> str:
        """Return the organisation of a kit's owner.

        The server and the admin share one, by default named after the project. The
        default of a site is named after the site.
        """
        key = SERVER
        default_name = self.name
        if kit in self.sites:
            key = kit
            default_name = kit
        organisations = self.organisations or {}
        return organisations.get(key, re.sub(r"\W", "_", default_name))


def _require_distinguishable(sites: Iterable[str]) -> None:
    """Refuse names that differ only by a suffix that may be the start of a token.

    NVFlare's server signs a site's name and its token (lower-case hexadecimal digits
    and '-') without a separator. The signature for `h1` with the token `0e…` would
    therefore be valid for `h10` with the token `e…`.

    Raises:
        ConfigError: There are such names.
    """
    names = set(sites)
    for other in sorted(names):
        for end in range(1, len(other)):
            name = other[:end]
            if name in names and set(other[end:]) <= set("0123456789abcdef-"):
                raise ConfigError(
                    f"sites {name!r} and {other!r} could be confused: choose names of "
                    "the same length, such as h01 and h10"
                )


# ---- the kits of a project -----------------------------------------------------------


def list_kit_folders(project: ProjectConfig, out: Path) -> dict[str, Path]:
    """Return the folders in which a project's kits are created.

    Args:
        project: The project.
        out: The folder of all kits.

    Returns:
        The folder of each kit, by its name: "server", "admin" or a site's.
    """
    sites = {site: out / "sites" / site for site in project.sites}
    return {SERVER: out / SERVER, ADMIN: out / ADMIN, **sites}


def provision(
    project: ProjectConfig,
    out: Path,
    *,
    again: Sequence[str] = (),
    revoke: Sequence[str] = (),
    ask_passphrase: AskPassphrase = refuse_passphrase,
) -> dict[str, Path]:
    """Create the kits of a project that were never created; keep existing ones.

    The authority in `out`/authority holds no private key but its own.

    Args:
        project: The project.
        out: The folder of all kits.
        again: Kits that were lost. Each is revoked and recreated with a new key.
        revoke: Kits to revoke. The new trust list is `out`/trust.pem.
        ask_passphrase: Returns the passphrase of the authority's key, if the key has
            one and signs something.

    Returns:
        The folder of each kit, by its name. The folder of a kit that was handed over
        does not exist.

    Raises:
        ConfigError: The existing kits do not match the project, a new site's name could
            be mistaken for another's, or a kit to revoke or to recreate is unknown.
        BusyError: Another process changes the authority.
    """
    create_private_folder(out)
    with holding_authority(out):
        return _provision(
            project, out, again=again, revoke=revoke, ask_passphrase=ask_passphrase
        )


@contextmanager
def holding_authority(out: Path) -> Iterator[None]:
    """Keep other processes from changing an authority while the context is open.

    A change reads the authority's state, may ask for a passphrase, and writes the
    state. A change by another process in between, such as a revocation, would be lost.

    Args:
        out: The folder of all kits.

    Raises:
        BusyError: Another process changes the authority.
    """
    if not out.exists():  # there is no authority
        yield
        return
    with reserving_folder(out / AUTHORITY_FOLDER):
        yield


def _provision(
    project: ProjectConfig,
    out: Path,
    *,
    again: Sequence[str],
    revoke: Sequence[str],
    ask_passphrase: AskPassphrase,
) -> dict[str, Path]:
    """Create the kits of a project whose authority this process holds.

    The arguments and the result are those of `provision`.
    """
    kits = list_kit_folders(project, out)
    folder = out / AUTHORITY_FOLDER
    record = _read_record(project, folder)
    recorded_kits = set(record["kits"])
    site_names = {*project.sites, *recorded_kits} - {SERVER, ADMIN}
    _require_distinguishable(sorted(site_names))
    _require_can_make_again(again, kits)
    _require_known(set(revoke) - set(again), recorded_kits)
    kits_on_disk = {name for name, kit in kits.items() if (kit / KIT_FILE).exists()}
    new_kits = []
    for name in kits:
        is_wanted = name not in recorded_kits or name in again
        if is_wanted and name not in kits_on_disk:
            new_kits.append(name)

    create_private_folder(folder)
    _make_authority_private(folder)
    authority = Authority.open(folder, project.name, ask_passphrase)
    kits_to_revoke = [*revoke, *_find_revocable(again, authority)]
    if kits_to_revoke:
        authority.revoke(
            {name: kits.get(name, out / "sites" / name) for name in kits_to_revoke}
        )
    authority.save()  # a lost kit is revoked before it is recreated
    old_kits = {*recorded_kits, *kits_on_disk}
    write_json(folder / _RECORD_FILE, {**record, "kits": sorted(old_kits)})
    for name in new_kits:
        _make_kit(project, name, kits[name], authority=authority)
        authority.save()
    make_private(folder)
    all_kits = sorted({*old_kits, *new_kits})
    write_json(folder / _RECORD_FILE, {**record, "kits": all_kits})
    return kits


def _find_revocable(lost_kits: Sequence[str], authority: Authority) -> list[str]:
    """Return the lost kits whose certificates are on record; warn about the others."""
    revocable_kits = [name for name in lost_kits if authority.serials.get(name)]
    for name in set(lost_kits) - set(revocable_kits):
        logger.warning(
            "%s: its earlier certificate is not on record, so it stays valid "
            "until the root certificate is replaced",
            name,
        )
    return revocable_kits


def _require_can_make_again(again: Iterable[str], kits: Mapping[str, Path]) -> None:
    """Raise ConfigError if a lost kit is unknown, or still exists."""
    _require_known(again, kits)
    for name in again:
        if kits[name].exists():
            raise ConfigError(
                f"{kits[name]} already exists: move it away to create the kit again"
            )


def _require_known(names: Iterable[str], kits: Iterable[str]) -> None:
    """Raise ConfigError if a name is not the name of a kit."""
    kit_names = set(kits)
    for name in names:
        if name not in kit_names:
            raise ConfigError(
                f"{name!r} is not a kit of this project: "
                f"{suggest_name(name, kit_names)}"
            )


def _make_authority_private(folder: Path) -> None:
    """Make the authority's folder private; warn if it was not."""
    earlier_modes = make_private(folder)
    if earlier_modes:
        logger.warning(
            "%s: other users of this machine could open %d files and folders "
            "until now; the key that signs kits is here, so if there are "
            "such users, create all kits again in another folder",
            folder,
            len(earlier_modes),
        )


def open_authority(
    project: ProjectConfig, out: Path, ask_passphrase: AskPassphrase = refuse_passphrase
) -> Authority:
    """Return the authority that signs the kits in a folder.

    Args:
        project: The project.
        out: The folder of all kits.
        ask_passphrase: Returns the passphrase of the authority's key, if it has one.

    Raises:
        ConfigError: There is no authority, or it belongs to another project.
    """
    folder = out / AUTHORITY_FOLDER
    _read_record(project, folder)  # raises if there is none of this project
    return Authority.open(folder, project.name, ask_passphrase, create=False)


def _build_common_settings(project: ProjectConfig) -> dict[str, Any]:
    """Return the settings common to all kits of a project."""
    organisations = {
        name: project.find_organisation(name)
        for name in list_kit_folders(project, Path())
    }
    return {
        "name": project.name,
        "server": project.server,
        "port": project.port,
        "admin": project.admin,
        "hosts": list(project.hosts),
        "organisations": organisations,
    }


def _read_record(project: ProjectConfig, folder: Path) -> dict[str, Any]:
    """Return an authority's record of the kits that it has created.

    Args:
        project: The project.
        folder: The authority's folder.

    Returns:
        The kits' common settings, and their names under "kits".

    Raises:
        ConfigError: The record cannot be read, or its kits were created with settings
            other than the project's.
    """
    record: dict[str, Any] = {}
    try:
        record = dict(read_json(folder / _RECORD_FILE))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder / _RECORD_FILE}: cannot be read: restore it from a copy"
        ) from error

    settings = _build_common_settings(project)
    organisations = record.get("organisations", {})
    _require_equal(folder.parent, "", recorded=record, present=settings)
    _require_equal(
        folder.parent,
        "organisations.",
        recorded=organisations,
        present=settings["organisations"],
    )
    kits = record.get("kits") or _list_kits_of_earlier_version(project, folder)
    return {
        **settings,
        "organisations": {**organisations, **settings["organisations"]},
        "kits": kits,
    }


def _require_equal(
    out: Path,
    prefix: str,
    *,
    recorded: Mapping[str, Any],
    present: Mapping[str, Any],
) -> None:
    """Check that settings still have the values with which kits were created.

    Args:
        out: The folder of the kits.
        prefix: Prefix of the settings' names in messages.
        recorded: The settings with which the kits were created.
        present: The settings of the project.

    Raises:
        ConfigError: A setting has another value.
    """
    for key in sorted(present.keys() & recorded.keys() - {"organisations"}):
        if recorded[key] != present[key]:
            raise ConfigError(
                f"{out}: its kits were created with {prefix}{key} = "
                f"{json.dumps(recorded[key])}, but the project says "
                f"{json.dumps(present[key])}: change it back, or choose another "
                "folder and hand out all kits again"
            )


def _list_kits_of_earlier_version(project: ProjectConfig, folder: Path) -> list[str]:
    """Return the names of the kits of an authority that an earlier version created.

    The state of this authority holds a table for each participant.

    Args:
        project: The project.
        folder: The authority's folder.
    """
    state_file = folder / project.name / "state" / STATE_FILE
    participants = {
        name
        for name, value in read_json_table(state_file).items()
        if isinstance(value, dict) and name != "serials"
    }
    if not participants:
        return []
    sites = {
        name for name in participants if "@" not in name and name != project.server
    }
    return sorted(sites | {SERVER, ADMIN})


def _make_kit(
    project: ProjectConfig, name: str, kit: Path, *, authority: Authority
) -> None:
    """Create a kit with new keys, of which no copy exists elsewhere.

    Args:
        project: The project.
        name: The kit's name.
        kit: The kit's folder.
        authority: The authority that signs its certificates.
    """
    role: Literal["server", "site", "admin"] = "site"
    person = ""
    if name == SERVER:
        role = "server"
        person = project.watch
    elif name == ADMIN:
        role = "admin"
        person = project.admin
    facts = Kit(
        name=name,
        role=role,
        project=project.name,
        server=project.server,
        port=project.port,
        person=person,
        org=project.find_organisation(name),
    )

    def fill(folder: Path) -> None:
        """Write the files of the kit."""
        for path, table in build_kit_files(facts, kit.resolve()).items():
            write_json(folder / path, table)
        write_json(folder / KIT_FILE, facts.model_dump())
        for stem, owner in find_stems(folder).items():
            _write_identity(
                stem, owner, project=project, facts=facts, authority=authority
            )
        # NVFlare's folder for uploads and downloads.
        (folder / "transfer").mkdir()
        if role == SERVER:
            (folder / WATCH / "transfer").mkdir()

    write_folder(kit, fill)


def _write_identity(
    stem: Path, owner: str, *, project: ProjectConfig, facts: Kit, authority: Authority
) -> None:
    """Write a new key with its certificate, and the roots and the trust list.

    Args:
        stem: Path of the key and the certificate, without a suffix.
        owner: The name of the certificate's owner.
        project: The project.
        facts: The facts of the kit.
        authority: The authority that signs the certificate.
    """
    rights = {project.admin: "project_admin", project.watch: "lead"}
    hosts: tuple[str, ...] = (owner,)
    if stem.name == SERVER:
        hosts = (owner, *project.hosts)
    key = create_key_pem()
    certificate = authority.certify(
        facts.name,
        key,
        name=owner,
        org=facts.org,
        right=rights.get(owner),
        hosts=hosts,
    )
    stem.with_suffix(".key").write_bytes(key)
    stem.with_suffix(".crt").write_bytes(certificate)
    stem.with_name(ROOTS_FILE).write_bytes(encode_pem(authority.list_valid_roots()))
    stem.with_name(TRUST_FILE).write_bytes(authority.trust_list.encode())
