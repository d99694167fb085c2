"""The keystream from which noise is drawn: AES-256 in counter mode."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

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
    mode = _fastest_mode()(block.to_bytes(12, "big"))
    cipher = Cipher(algorithms.AES256(key.tobytes()), mode).encryptor()
    size = 4 * words
    stream = aligned_bytes(size + 15)  # the library needs room for one more block
    for start in range(0, size, len(_ZEROS)):
        count = min(len(_ZEROS), size - start)
        cipher.update_into(_ZEROS[:count].data, stream[start:].data)
    return stream[:size].view("<i4")


def _counter_mode(nonce: bytes) -> modes.CTR:
    return modes.CTR(nonce + (2).to_bytes(4, "big"))


@functools.cache
def _fastest_mode() -> Callable[[bytes], modes.CTR | modes.GCM]:
    """Return the faster of counter mode and AES-GCM on this machine; their streams are the same.

    AES-GCM (NIST SP 800-38D, 6.5 and 7.1) also computes a tag, which is not used here. It can be
    faster because OpenSSL uses the wide instructions of newer processors for AES-GCM alone.
    """
    out = aligned_bytes(len(_ZEROS) + 15)

    def seconds(mode: Callable[[bytes], modes.CTR | modes.GCM]) -> float:
        cipher = Cipher(algorithms.AES256(bytes(32)), mode(bytes(12))).encryptor()
        begun = time.perf_counter()
        cipher.update_into(_ZEROS.data, out.data)
        return time.perf_counter() - begun

    known: list[Callable[[bytes], modes.CTR | modes.GCM]] = [_counter_mode, modes.GCM]
    return min(known, key=lambda mode: min(seconds(mode) for _ in range(3)))


def aligned_bytes(size: int) -> Bytes:
    """Return uninitialised memory that TensorFlow takes as a tensor without a copy: (size,)."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
