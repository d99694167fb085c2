"""A link between two hosts of a training: frames, encrypted and authenticated by a shared secret.

What hosts tell each other is private: gradient sums before noise, who was drawn, weights before
their release. So every frame is sealed with AES-256-GCM under keys of this one connection, made
from the secret and fresh random bytes of both ends (HMAC-SHA256), a key for each direction. A
frame's number is its nonce: one that was altered, left out, repeated or sent back is refused, and
so is whoever does not know the secret. A frame holds its kind in clear; kinds tell nothing.

Both ends say hello: version and 32 random bytes; then, sealed, who they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dp_core.errors import ConfideError

LARGEST_FRAME = 1 << 21  # bytes: what is longer is no frame of ours
LEAST_SECRET = 32  # bytes
_VERSION = b"confide hosts 1\n"
_RANDOM = 32
_HEADER = struct.Struct("<IB")  # length of what is sealed, kind of frame
_TAG = 16
_HELLO = ord("h")
_SILENT = (5, 2, 3)  # seconds before the first probe of a silent link, between probes; how many
_UNSENT_MS = 15_000  # how long what was sent may stay unanswered


class LinkBroken(ConfideError):
    """The other end is gone, or is not who it should be. A fault: it may be tried again."""


class Link:
    """One end of a link. Any thread may send; one at a time receives.

    Use `connect` to make one.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self._connection = connection
        self._sealing, self._opening = AESGCM(sending), AESGCM(receiving)
        self._sent = self._received = 0
        self._turn = threading.Lock()

    def send(self, kind: int, body: bytes | memoryview) -> None:
        """Send one frame.

        Args:
            kind: below 256.
            body: at most `LARGEST_FRAME` bytes.

        Raises:
            LinkBroken: the other end is gone.
        """
        header = _HEADER.pack(len(body) + _TAG, kind)
        with self._turn:
            sealed = self._sealing.encrypt(_nonce(self._sent), body, header)
            self._sent += 1
            try:
                self._connection.sendall(b"".join((header, sealed)))
            except OSError:
                raise _gone() from None

    def receive(self) -> tuple[int, bytes]:
        """Wait for a frame; return its kind and body.

        Raises:
            LinkBroken: the other end is gone, or what came is not what it sent.
        """
        header = _exactly(self._connection, _HEADER.size)
        length, kind = _HEADER.unpack(header)
        if not _TAG <= length <= LARGEST_FRAME + _TAG:
            raise _not_ours()
        sealed = _exactly(self._connection, length)
        try:
            body = self._opening.decrypt(_nonce(self._received), sealed, header)
        except InvalidTag:
            raise _not_ours() from None
        self._received += 1
        return kind, body

    def close(self) -> None:
        """End the link; whoever waits at either end is told."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def connect(
    connection: socket.socket,
    secret: bytes,
    *,
    called: bool,
    tell: dict[str, Any],
    expect: dict[str, Any],
    patience: float,
) -> Link:
    """Make a connection a link: find out that both know the secret, and who the other one is.

    Args:
        connection: to the other host; it belongs to the link from now on, and is closed if there
            is none.
        secret: of the training, at least `LEAST_SECRET` bytes.
        called: whether the other end made the connection.
        tell: who we are.
        expect: what the other end must tell.
        patience: seconds for all of it.

    Raises:
        LinkBroken: the other end does not know the secret, is another, or does not answer.
    """
    try:
        if len(secret) < LEAST_SECRET:
            raise LinkBroken(f"a secret of fewer than {LEAST_SECRET} bytes", where="hosts")
        connection.settimeout(patience)
        _watch(connection)
        own = secrets.token_bytes(_RANDOM)
        connection.sendall(_VERSION + own)
        hello = _exactly(connection, len(_VERSION) + _RANDOM)
        if not hello.startswith(_VERSION):
            raise _not_ours()
        theirs = hello[len(_VERSION) :]
        both = theirs + own if called else own + theirs
        calling, answering = (
            hmac.new(secret, label + both, hashlib.sha256).digest()
            for label in (b"from who called\n", b"from who was called\n")
        )
        link = Link(connection, *((answering, calling) if called else (calling, answering)))
        link.send(_HELLO, json.dumps(tell, sort_keys=True).encode())
        kind, said = link.receive()
        if kind != _HELLO or json.loads(said) != expect:
            raise LinkBroken("another host than expected is at the other end", where="hosts")
        connection.settimeout(None)
    except TimeoutError:
        connection.close()
        raise LinkBroken("a host does not answer", where="hosts") from None
    except OSError:
        connection.close()
        raise _gone() from None
    except LinkBroken:
        connection.close()
        raise
    return link


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """Receive so many bytes.

    Raises:
        LinkBroken: the connection ended before.
        TimeoutError: they did not come in the connection's time.
    """
    content = bytearray(size)
    view, have = memoryview(content), 0
    while have < size:
        try:
            more = connection.recv_into(view[have:])
        except TimeoutError:
            raise
        except OSError:
            raise _gone() from None
        if not more:
            raise _gone()
        have += more
    return content


def _watch(connection: socket.socket) -> None:
    """Have the kernel find out within seconds that the other machine is gone without a word."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), _SILENT, strict=True):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_MS)


def _gone() -> LinkBroken:
    return LinkBroken(
        "a host of the training is gone",
        where="hosts",
        fix="Try again: the training goes on from its last checkpoint.",
    )


def _not_ours() -> LinkBroken:
    return LinkBroken(
        "what came over the network is not what a host of this training sent",
        where="hosts",
        fix="Give all hosts one secret and one version of the software.",
    )
