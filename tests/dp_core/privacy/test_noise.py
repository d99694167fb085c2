import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dp_core.privacy.discrete_gaussian import keystream, noise_key
from dp_core.privacy.seed_store import PrivacySeed

SEED = PrivacySeed.fixed("noise")


def test_a_key_is_a_function_of_everything_it_is_bound_to() -> None:
    base = noise_key(SEED, b"manifest", 3, "encoder/0/kernel")
    assert base.shape == (32,)
    assert base.dtype == np.uint8
    assert np.array_equal(base, noise_key(SEED, b"manifest", 3, "encoder/0/kernel"))
    others = [
        noise_key(PrivacySeed.fixed("other"), b"manifest", 3, "encoder/0/kernel"),
        noise_key(SEED, b"manifesT", 3, "encoder/0/kernel"),
        noise_key(SEED, b"manifest", 4, "encoder/0/kernel"),
        noise_key(SEED, b"manifest", 3, "encoder/1/kernel"),
    ]
    assert all(not np.array_equal(base, other) for other in others)


def test_every_bit_of_a_key_is_used() -> None:
    keys = np.stack([noise_key(SEED, b"m", t, v) for t in range(200) for v in "abcd"])
    assert len({key.tobytes() for key in keys}) == 800
    ones = np.unpackbits(keys, axis=1).sum(axis=0)
    assert ones.min() > 300
    assert ones.max() < 500


@pytest.mark.parametrize("block", [0, 3, 2**40 + 1])
def test_the_keystream_is_that_of_the_standard(block: int) -> None:
    """NIST SP 800-38D: 128 bits of it are the plain cipher of a nonce and a number from 2."""
    key = np.arange(32, dtype=np.uint8)
    ecb = Cipher(algorithms.AES(key.tobytes()), modes.ECB()).encryptor()  # noqa: S305
    nonce = block.to_bytes(12, "big")
    counters = b"".join(nonce + i.to_bytes(4, "big") for i in range(2, 300_002))
    expected = np.frombuffer(ecb.update(counters), dtype="<i4")
    for words in (1, 7, 300_000 * 4 - 5):  # the last is made in several pieces
        stream = keystream(key, words, block)
        assert stream.dtype == np.int32
        assert stream.ctypes.data % 64 == 0
        assert np.array_equal(stream, expected[:words])


def test_keys_do_not_change_between_releases() -> None:
    # A changed key would give a resumed run other noise for the same update.
    key = noise_key(SEED, b"manifest", 3, "encoder/0/kernel")
    assert key.tobytes().hex() == (
        "362160756b5170834ce7f84d9cb133599b7d938486e0a00870012e58e227b863"
    )
