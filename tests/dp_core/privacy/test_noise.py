import numpy as np

from dp_core.privacy.noise import SUMMANDS, noise_key
from dp_core.privacy.seeds import PrivacySeed

SEED = PrivacySeed.fixed("noise")


def test_a_key_is_a_function_of_everything_it_is_bound_to() -> None:
    base = noise_key(SEED, b"manifest", 3, "encoder/0/kernel", 0)
    assert base.shape == (2,)
    assert base.dtype == np.int64
    assert np.array_equal(base, noise_key(SEED, b"manifest", 3, "encoder/0/kernel"))
    others = [
        noise_key(PrivacySeed.fixed("other"), b"manifest", 3, "encoder/0/kernel", 0),
        noise_key(SEED, b"manifesT", 3, "encoder/0/kernel", 0),
        noise_key(SEED, b"manifest", 4, "encoder/0/kernel", 0),
        noise_key(SEED, b"manifest", 3, "encoder/1/kernel", 0),
        noise_key(SEED, b"manifest", 3, "encoder/0/kernel", 1),
    ]
    assert all(not np.array_equal(base, other) for other in others)


def test_keys_leave_room_for_the_summands_of_a_draw() -> None:
    keys = [noise_key(SEED, b"m", t, "v", d) for t in range(200) for d in range(4)]
    assert all(int(key[1]) % SUMMANDS == 0 for key in keys)
    assert len({tuple(key) for key in keys}) == 800
    # all other bits are used: each of them is set in some keys and not in others
    words = np.array(keys).view(np.uint64)
    for word, free in ((words[:, 0], 64), (words[:, 1] >> np.uint64(2), 62)):
        ones = [int(np.sum(word >> np.uint64(bit) & np.uint64(1))) for bit in range(free)]
        assert min(ones) > 300
        assert max(ones) < 500


def test_keys_do_not_change_between_releases() -> None:
    # A changed key would give a resumed run other noise for the same update.
    key = noise_key(SEED, b"manifest", 3, "encoder/0/kernel", 1)
    assert key.tolist() == [-1339014391909308107, -907769432361358692]
