"""A machine of a Ray cluster: a process that starts Ray's processes and ends with them.

    python -m dp_core.cluster.node head PORT FOLDER SECRETS
    python -m dp_core.cluster.node worker HOST:PORT FOLDER SECRETS
    python -m dp_core.cluster.node step HOST:PORT FOLDER SECRETS
    python -m dp_core.cluster.node local CPUS FOLDER SECRETS
    python -m dp_core.cluster.node secrets FOLDER
    python -m dp_core.cluster.node certificate FOLDER SECRETS ADDRESS...

`head` and `worker` are the containers of a cluster. `step` joins a step's machine to a cluster: a
driver needs a node of the cluster on its machine, on which no task may run. `local` is a cluster
that consists of this machine. Both print the cluster's address when they are ready, and end when
their standard input ends, which happens even if the step crashes. `secrets` makes a cluster's
secrets, and `certificate` a member's certificate if another program starts Ray there (KubeRay).

Every member of a cluster reads the same folder with three files:

- `token`: Ray's token authentication, sent with every call between processes;
- `ca.crt`, `ca.key`: the authority by which members recognise each other.

Ray verifies the address of the machine that it talks to, so each machine needs its own certificate.
A member makes its certificate when it starts; keys of members never travel. TLS 1.3 exchanges a
fresh key for each connection, so a stolen authority does not open recorded traffic.
"""

from __future__ import annotations

import ctypes
import datetime
import ipaddress
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dp_core.errors import BadInput

STARTING = 600  # seconds for the processes of a node to start on a machine with other work
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray would send usage statistics to its makers
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call without a connection would start an open cluster
    "RAY_DEDUP_LOGS": "0",
    "RAY_task_oom_retries": "3",  # by default a task that lacks memory is retried without limit
    # Ray's own limits for the start of its processes are 30 to 60 seconds.
    "RAY_gcs_server_port_wait_time_s": f"{STARTING}",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{STARTING}",
    "RAY_raylet_start_wait_time_s": f"{STARTING}",
    "RAY_agent_register_timeout_ms": f"{STARTING * 1000}",
    "RAY_worker_register_timeout_seconds": f"{STARTING}",
}
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - Linux's shared memory of all processes
_OBJECTS = 0.6  # share of the free shared memory
_LEAST_OBJECTS = 80_000_000  # bytes; Ray refuses less
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
TOKEN, AUTHORITY, AUTHORITY_KEY = "token", "ca.crt", "ca.key"
_VALID_DAYS = 3650  # of the authority; members make their certificates anew when they start
_MEMBER_DAYS = 400  # longer than any step runs
_SKEW = datetime.timedelta(hours=1)  # clocks of machines differ
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "confide cluster")])
_MEMBER = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "confide cluster member")])


# --- secrets and certificates


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
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


# --- processes


def main(words: list[str]) -> int:
    """Run the command; return the exit code."""
    os.umask(0o077)
    match words:
        case ["secrets", folder]:
            make_secrets(Path(folder))
            return 0
        case ["certificate", folder, secrets, *addresses]:
            member_environment(Path(secrets), Path(folder), *addresses)
            return 0
        case [("head" | "worker" | "step" | "local") as kind, target, folder, secrets]:
            pass
        case _:
            sys.exit(__doc__)
    Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    # Without a head's address, any address will do: nothing is sent.
    address = address_towards(target.rpartition(":")[0] or "192.0.2.1")
    os.environ |= RAY_SETTINGS | member_environment(Path(secrets), Path(folder), address)
    common = ["start", "--block", "--disable-usage-stats", f"--node-ip-address={address}"]
    # Without this bound, a small /dev/shm moves the objects to the disk.
    objects = max(_LEAST_OBJECTS, int(_OBJECTS * shutil.disk_usage(_SHARED_MEMORY).free))
    common += [f"--object-store-memory={objects}"]
    head = ["--head", "--include-dashboard=false"]
    match kind:
        case "head":
            return _run([*common, *head, f"--port={target}", "--num-cpus=0"])
        case "worker":
            return _run([*common, f"--address={target}"])
        case "step":
            return _run([*common, f"--address={target}", "--num-cpus=0"], step_of=target)
    port = _free_port()
    options = [f"--port={port}", f"--num-cpus={target}", f"--temp-dir={folder}"]
    return _run([*common, *head, *options], step_of=f"{address}:{port}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _run(words: list[str], *, step_of: str = "") -> int:
    """Run Ray's command as a child that ends with this process; return its exit code.

    Args:
        words: arguments of the command.
        step_of: address of the cluster that this machine joins for a step.
    """
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-u", "-m", "ray.scripts.scripts", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_end_with_parent,  # safe: this process has no threads yet
    ) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        if step_of:
            threading.Thread(target=_after_input, args=(process.terminate,), daemon=True).start()
        assert process.stdout is not None  # noqa: S101 - a pipe
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if step_of and "Ray runtime started" in line:
                print(step_of, flush=True)
        return process.wait()


def _after_input(end: Callable[[], None]) -> None:
    sys.stdin.buffer.read()
    end()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
