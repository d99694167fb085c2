"""Secrets of a Ray cluster: one token, one certificate authority, one certificate per machine.

Every member of a cluster reads the same folder with three files:

- `token`: Ray's token authentication, sent with every call between processes;
- `ca.crt`, `ca.key`: the authority by which members recognise each other.

Ray verifies the address of the machine that it talks to, so each machine needs its own certificate.
A member makes its certificate when it starts; keys of members never travel. TLS 1.3 exchanges a
fresh key for each connection, so a stolen authority does not open recorded traffic.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import socket
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dp_core.errors import BadInput

TOKEN, AUTHORITY, AUTHORITY_KEY = "token", "ca.crt", "ca.key"
_VALID_DAYS = 3650  # of the authority; members make their certificates anew when they start
_MEMBER_DAYS = 400  # longer than any step runs
_SKEW = datetime.timedelta(hours=1)  # clocks of machines differ
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "confide cluster")])
_MEMBER = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "confide cluster member")])


def make_secrets(folder: Path) -> None:
    """Write the three files of a new cluster, readable only by their owner; existing files stay."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / TOKEN).exists():
        _write(folder / TOKEN, secrets.token_hex(32).encode())
    if (folder / AUTHORITY).exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    authority = (
        _certificate(_NAME, key, days=_VALID_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / AUTHORITY_KEY, _pem(key))
    _write(folder / AUTHORITY, authority.public_bytes(serialization.Encoding.PEM))


def require_secrets(folder: Path | None, where: str) -> Path:
    """Return the folder of a cluster's secrets.

    Raises:
        BadInput: no folder is named, or one of its files is missing.
    """
    fix = "Name the folder with the cluster's token, ca.crt and ca.key."
    if folder is None:
        raise BadInput(
            "a cluster without token and TLS would give private text to its network",
            where=where,
            fix=fix,
        )
    for name in (TOKEN, AUTHORITY, AUTHORITY_KEY):
        if not os.access(folder / name, os.R_OK):
            raise BadInput(f"{folder / name} cannot be read", where=where, fix=fix)
    return folder


def member_environment(secrets_folder: Path, folder: Path, *addresses: str) -> dict[str, str]:
    """Make this machine's certificate; return the variables by which Ray uses it.

    No value is a secret: they are names of files.

    Args:
        secrets_folder: see `make_secrets`.
        folder: receives the certificate and its key.
        addresses: addresses and names of this machine, as the other members see it.
    """
    authority = x509.load_pem_x509_certificate((secrets_folder / AUTHORITY).read_bytes())
    signer = serialization.load_pem_private_key((secrets_folder / AUTHORITY_KEY).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)  # noqa: S101 - narrows the type
    names = map(_general_name, {"localhost", "127.0.0.1", socket.gethostname(), *addresses})
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _certificate(_MEMBER, key, days=_MEMBER_DAYS)
        .issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA256())
    )
    _write(folder / "member.key", _pem(key))
    _write(folder / "member.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(secrets_folder / TOKEN),
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / "member.crt"),
        "RAY_TLS_SERVER_KEY": str(folder / "member.key"),
        "RAY_TLS_CA_CERT": str(secrets_folder / AUTHORITY),
    }


def address_towards(host: str) -> str:
    """Return the address by which a host sees this machine; no packet is sent.

    Args:
        host: a name or address. Without a route to it, the result is the address of this machine's
            host name.

    Raises:
        OSError: neither name is known.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=_NAME if subject is _NAME else None,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _SKEW,
        not_valid_after=now + datetime.timedelta(days=days),
    )


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
