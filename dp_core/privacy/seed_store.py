"""Privacy seeds: the secrets from which all sampling and noise of one release are drawn.

A person who knows a seed can subtract the noise. So a seed is drawn by the operating system and
kept in one file that only its owner can read; public records hold a salted hash. Each reservation
in the ledger has a separate seed: two models a and b with one seed, at σ = 1 and σ = 2, would
reveal the raw gradient as 2a − b. Training noise is drawn from the keystream of a key that a seed
derives: AES-256 in counter mode.
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Self, TextIO

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from dp_core.errors import BadInput

SECRET_BYTES = 32
_SALT_BYTES = 16
_FILE_VERSION = 1
_LEDGER = "ledger"  # no key's file: those end in .json
_STALE_SECONDS = 3600
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

Context = bytes | int | str


class PrivacySeed:
    """A secret of 256 bits, and the only way to draw from it: `derive`.

    Attributes:
        known: true for a seed that was not drawn in secret (in tests).
            Every release made with it must be marked *not private: known seed*.
    """

    __slots__ = ("_salt", "_secret", "known")

    def __init__(self, secret: bytes, salt: bytes, *, known: bool) -> None:
        if len(secret) < 16:
            raise BadInput("a privacy seed needs at least 128 bits", where="privacy seed")
        self._secret = secret
        self._salt = salt
        self.known = known

    @classmethod
    def draw(cls) -> Self:
        """Return a fresh seed from the operating system's generator."""
        return cls(secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(_SALT_BYTES), known=False)

    @classmethod
    def fixed(cls, value: int | str) -> Self:
        """Return a repeatable seed, marked as known: it protects nothing."""
        digest = hashlib.sha512(b"confide known seed\0" + str(value).encode()).digest()
        return cls(digest[:SECRET_BYTES], digest[SECRET_BYTES : SECRET_BYTES + 16], known=True)

    def derive(self, purpose: str, *context: Context) -> bytes:
        """Return 32 bytes for one purpose and context: HMAC-SHA256 under the secret.

        The parts are encoded with type and length, so that no two lists of parts share a
        message: ("a", "bc") and ("ab", "c") give unrelated bytes.
        """
        message = b"".join(_encode(part) for part in (purpose, *context))
        return hmac.new(self._secret, message, hashlib.sha256).digest()

    def salted_hash(self) -> str:
        """Return the hash for public records: `salt:SHA-256(salt ∥ secret)` in hex.

        It identifies the seed and does not reveal it, since the secret has 256 random bits.
        """
        return f"{self._salt.hex()}:{hashlib.sha256(self._salt + self._secret).hexdigest()}"

    def __repr__(self) -> str:
        return f"PrivacySeed({'known' if self.known else 'secret'})"

    def __reduce__(self) -> str:
        raise TypeError("a privacy seed does not leave its process: give its key in the store")

    def _to_json(self) -> str:
        body = {"secret": self._secret.hex(), "salt": self._salt.hex(), "known": self.known}
        return json.dumps({"version": _FILE_VERSION, **body})


def _encode(part: Context) -> bytes:
    if isinstance(part, bytes):
        tag, body = b"b", part
    elif isinstance(part, str):
        tag, body = b"s", part.encode()
    else:
        tag, body = b"i", str(int(part)).encode()
    return tag + len(body).to_bytes(8, "big") + body


class SeedStore:
    """A folder (mode 0700) with one file (mode 0600) per seed, written once and never changed.

    The folder also records the identity of the ledger under which its seeds were drawn, so that a
    deleted or exchanged ledger is detected.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)

    def create(self, key: str) -> PrivacySeed:
        """Return the seed called `key`, drawing it if there is none: idempotent and atomic.

        The file is complete and on disk before it gets its name, and the name is taken by
        `link`, which fails when another process was first: every caller reads the same seed.

        Raises:
            BadInput: a key that is no file name, or a folder or file that others can read.
        """
        path = self._path(key)
        self._prepare_directory()
        if not path.exists():
            self._put(path, PrivacySeed.draw()._to_json())
        return self.get(key)

    def get(self, key: str) -> PrivacySeed:
        """Return the seed called `key`.

        Raises:
            BadInput: there is none, or others can read it, or it is not a seed file.
        """
        path = self._path(key)
        try:
            mode = path.stat().st_mode
            content = path.read_bytes()
        except FileNotFoundError:
            raise BadInput(
                f"there is no seed {key}",
                where="seed store",
                fix="A lost seed cannot be replaced: reserve again, which is a new charge.",
            ) from None
        _refuse_shared(path, mode)
        try:
            body = json.loads(content)
            if body["version"] != _FILE_VERSION:
                raise ValueError
            return PrivacySeed(
                bytes.fromhex(body["secret"]), bytes.fromhex(body["salt"]), known=body["known"]
            )
        except (ValueError, KeyError, TypeError):
            # `from None`: the cause may quote the file, which is a secret
            raise BadInput(
                f"{key} is not a seed file of this version", where="seed store"
            ) from None

    def drawn(self) -> set[str]:
        """Return the keys of all seeds that were drawn."""
        return {file.stem for file in self._directory.glob("[!.]*.json")}

    def remember_ledger(self, identity: str) -> None:
        """Record the ledger under which the seeds are drawn. Only the first call has an effect.

        Raises:
            BadInput: a folder that others can read.
        """
        if self.remembered_ledger() is None:
            self._prepare_directory()
            self._put(self._directory / _LEDGER, f"{identity}\n")

    def remembered_ledger(self) -> str | None:
        """Return the identity of the ledger under which the seeds were drawn; None if unknown."""
        try:
            return (self._directory / _LEDGER).read_text("ascii").strip()
        except FileNotFoundError:
            return None

    def _put(self, path: Path, text: str) -> None:
        """Write a file whole, then give it its name, unless that is taken."""
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            try:
                self._link_nameless(directory, path.name, text)
            except OSError:  # not every file system can; any other error occurs again below
                self._link_named(path, text)
            self._remove_stale()
            os.fsync(directory)
        finally:
            os.close(directory)

    def _link_nameless(self, directory: int, name: str, text: str) -> None:
        """Write into a file without a name, which vanishes if the process is killed."""
        if not hasattr(os, "O_TMPFILE"):
            raise OSError
        file = os.open(self._directory, os.O_WRONLY | os.O_TMPFILE, 0o600)
        with os.fdopen(file, "w") as stream:
            _write(stream, text)
            with contextlib.suppress(FileExistsError):
                os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=directory)

    def _link_named(self, path: Path, text: str) -> None:
        """Write into a file with a temporary name, for file systems without nameless files."""
        temporary = self._directory / f".{path.stem[:64]}.{secrets.token_hex(8)}"
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as stream:
                _write(stream, text)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _remove_stale(self) -> None:
        """Remove the temporary files of killed processes."""
        for file in self._directory.glob(".*"):
            with contextlib.suppress(OSError):
                status = file.stat()
                if status.st_nlink > 1 or time.time() - status.st_mtime > _STALE_SECONDS:
                    file.unlink()

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise BadInput(
                "a seed's key is 1 to 128 letters, digits, dots, dashes", where="seed store"
            )
        return self._directory / f"{key}.json"

    def _prepare_directory(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(self._directory, self._directory.stat().st_mode)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
    os.fsync(stream.fileno())


def _refuse_shared(path: Path, mode: int) -> None:
    if stat.S_IMODE(mode) & 0o077:
        right = "700" if stat.S_ISDIR(mode) else "600"
        raise BadInput(
            f"others than its owner can reach {path.name}",
            where="seed store",
            fix=f"Privacy seeds are secrets: chmod {right} it.",
        )


# --- the keystream of a key

Bytes = NDArray[np.uint8]
Words = NDArray[np.int32]

ALIGNMENT = 64  # bytes: an array that begins at such an address needs no copy to be a tensor
_ZEROS = np.zeros(1 << 20, np.uint8)  # plaintext: encrypting zeros gives the keystream


def keystream(key: Bytes, words: int, block: int = 0) -> Words:
    """Return `words` 32-bit words, indistinguishable from uniform ones without the key.

    AES-256 in counter mode; the counters are (block, 2), (block, 3), … in 96 and 32 bits (NIST SP
    800-38A, 6.5). No counter repeats: each key has one stream, and each block of it is made once.
    Other threads can run meanwhile.

    Args:
        key: (32,).
        words: how many, at most 2³³.
        block: number of the stream under this key.
    """
    mode = modes.CTR(block.to_bytes(12, "big") + (2).to_bytes(4, "big"))
    cipher = Cipher(algorithms.AES256(key.tobytes()), mode).encryptor()
    size = 4 * words
    stream = aligned_bytes(size + 15)  # the library needs room for one more block
    for start in range(0, size, len(_ZEROS)):
        count = min(len(_ZEROS), size - start)
        cipher.update_into(_ZEROS[:count].data, stream[start:].data)
    return stream[:size].view("<i4")


def aligned_bytes(size: int) -> Bytes:
    """Return uninitialised memory that TensorFlow takes as a tensor without a copy: (size,)."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
