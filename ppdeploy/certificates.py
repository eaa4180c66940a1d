"""The cluster's own CA and what it signs: made once on the controller, beside the inventory, renewed by an apply.

One CA for both: clients trust it for the gateways' certificates, and gateways trust it for each other's. Its key never
leaves the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ppdeploy.api_keys import gateway_dir, held_folder, write_secret
from ppdeploy.errors import InputError
from ppdeploy.spec import is_ip_address

CA_LIFE = timedelta(days=3650)
LEAF_LIFE = timedelta(days=825)
"""Some clients accept none that lasts longer (Apple, since 2019)."""

RENEW_BEFORE = timedelta(days=180)
"""An apply within this time before the end makes a new one."""

CA_WARNING = timedelta(days=365)
"""An apply says, within this time before the CA's end, that clients will have to trust another one."""

_SKEW = timedelta(hours=1)
"""Clocks of clients and hosts may be behind the controller's."""


_ANEW = "remove ca.pem and ca.key: the next apply makes a new CA, which clients have to trust anew"


def ca_file(inventory_dir: Path) -> Path:
    """Return the CA's certificate, which clients are to trust."""
    return gateway_dir(inventory_dir) / "ca.pem"


def certificate_file(inventory_dir: Path, host: str) -> Path:
    """Return the certificate and key that a head shows to clients."""
    return gateway_dir(inventory_dir) / f"{host}.gateway.pem"


def peer_file(inventory_dir: Path, host: str) -> Path:
    """Return the certificate and key that a head shows to other gateways."""
    return gateway_dir(inventory_dir) / f"{host}.peer.pem"


def ensure_ca(inventory_dir: Path, cluster: str, now: datetime) -> bool:
    """Make the cluster's CA where there is none; say whether it was made. InputError as `check_ca`."""
    folder = gateway_dir(inventory_dir)
    with held_folder(folder):
        key_path, path = folder / "ca.key", ca_file(inventory_dir)
        if check_ca(inventory_dir, now):
            return False
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ppdeploy {cluster}"[:64])])
        signed = (
            _builder(name, name, key.public_key(), now, CA_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        write_secret(key_path, _key_pem(key))
        write_secret(path, signed.public_bytes(serialization.Encoding.PEM))
        # Whoever uses the inventory may hand it to clients.
        path.chmod(0o644)
        return True


def check_ca(inventory_dir: Path, now: datetime) -> datetime | None:
    """Return when the cluster's CA ends; None where there is none yet.

    Raises InputError for one that is broken, not valid at `now`, or of which a part is missing: a new one in its place,
    by itself, would be one that no client trusts.
    """
    path = ca_file(inventory_dir)
    # Its key alone is what an apply left that was ended in between, while it has signed nothing.
    if not path.exists() and not (path.with_name("ca.key").exists() and any(path.parent.glob("*.pem"))):
        return None
    ca, _ = _read_ca(inventory_dir)
    _lasts(inventory_dir, ca, now)
    return ca.not_valid_after_utc


def ca_warning(inventory_dir: Path, now: datetime) -> list[str]:
    """Return what to say of a CA that ends within `CA_WARNING`; InputError as `check_ca`."""
    ends = check_ca(inventory_dir, now)
    if ends is None or ends - now >= CA_WARNING:
        return []
    what = f"the cluster's CA ends on {ends:%Y-%m-%d}, and from then on no client believes the gateways"
    return [f"{what} ({ca_file(inventory_dir)}): on a day of your choice before, {_ANEW}"]


def ensure_leaf(
    inventory_dir: Path, path: Path, common_name: str, names: Sequence[str], now: datetime, *, client: bool = False
) -> bool:
    """Make a certificate with its key where there is none that fits and lasts; say whether it was made.

    `names` are those that it is good for; with `client` it is shown to other gateways as a client, too.
    """
    with held_folder(gateway_dir(inventory_dir)):
        ca, ca_key = _read_ca(inventory_dir)
        _lasts(inventory_dir, ca, now)
        if _fits(path, ca, names, now):
            return False
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if client else [])]
        life = min(LEAF_LIFE, ca.not_valid_after_utc - now)
        signed = (
            _builder(subject, ca.subject, key.public_key(), now, life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
                critical=False,
            )
            .sign(ca_key, hashes.SHA256())
        )
        write_secret(path, signed.public_bytes(serialization.Encoding.PEM) + _key_pem(key))
        return True


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    if is_ip_address(name):
        return x509.IPAddress(ip_address(name))
    try:
        # Clients look for a name as DNS has it; an inventory's ansible_host may have letters beyond ASCII.
        return x509.DNSName(name if name.isascii() else name.encode("idna").decode("ascii"))
    except ValueError:
        raise InputError(
            f"no certificate can be made for the name {name!r}",
            where="ansible_host or ppdeploy_gateway_names",
            remedy="write an IP address or a name of DNS",
        ) from None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_ca(inventory_dir: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    path = ca_file(inventory_dir)
    try:
        ca = x509.load_pem_x509_certificate(path.read_bytes())
        key = serialization.load_pem_private_key(path.with_name("ca.key").read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
            raise ValueError("key and certificate do not belong together")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"the cluster's CA cannot be used: {_reason(error)}",
            where=str(path),
            remedy=f"bring ca.pem and ca.key back from a backup, or {_ANEW}",
        ) from None
    return ca, key


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    return str(error).splitlines()[0]


def _lasts(inventory_dir: Path, ca: x509.Certificate, now: datetime) -> None:
    """Raise InputError for a CA that nobody believes at this moment."""
    if ca.not_valid_before_utc > now:
        raise InputError(
            f"the cluster's CA is not valid before {ca.not_valid_before_utc:%Y-%m-%d %H:%M} UTC",
            where=str(ca_file(inventory_dir)),
            remedy=f"set this machine's clock, which says {now:%Y-%m-%d %H:%M} UTC; if it is right now and was wrong "
            f"when the CA was made, {_ANEW}",
        )
    if ca.not_valid_after_utc <= now:
        raise InputError(
            f"the cluster's CA has ended on {ca.not_valid_after_utc:%Y-%m-%d}",
            where=str(ca_file(inventory_dir)),
            remedy=f"set this machine's clock if it is wrong ({now:%Y-%m-%d %H:%M} UTC); else {_ANEW}",
        )


def _fits(path: Path, ca: x509.Certificate, names: Sequence[str], now: datetime) -> bool:
    """Say whether a certificate is there with its key, by this CA, for just these names, and valid for long enough."""
    try:
        data = path.read_bytes()
        found = x509.load_pem_x509_certificate(data)
        key = serialization.load_pem_private_key(data, password=None)
        found.verify_directly_issued_by(ca)
        own = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    # None lasts longer than the CA: one that ends with it cannot be bettered.
    ends_with_ca = found.not_valid_after_utc >= ca.not_valid_after_utc
    ends = found.not_valid_after_utc - (timedelta() if ends_with_ca else RENEW_BEFORE)
    return (
        key.public_key() == found.public_key()
        and list(own) == [_general(name) for name in names]
        and found.not_valid_before_utc <= now < ends
    )
