"""Coins belong to their unit and their key, and to nothing else."""

import numpy as np
import pytest

from dp_core.data.hashing import coin, digest64, generator, seed_key


def test_parts_cannot_be_shifted_into_one_another() -> None:
    assert digest64(b"k", "p", "ab", "c") != digest64(b"k", "p", "a", "bc")
    assert digest64(b"k", "p", "ab") != digest64(b"k", "pa", "b")
    assert digest64(b"k", "p", "a") != digest64(b"l", "p", "a")


def test_values_do_not_change_between_versions() -> None:
    # A changed hash would change every mask and every bounded sample of a resumed run.
    assert digest64(b"key", "unit", "P000001") == 0xA63FF39563A7E483
    assert digest64(b"k" * 100, "unit", "P000001") == 0xB7D2E156F6378C51


@pytest.mark.statistical
def test_coins_are_uniform_over_units_and_keys() -> None:
    for values in (
        [coin(b"k", "p", str(i)) for i in range(20_000)],
        [coin(seed_key(i), "p", "u") for i in range(20_000)],
    ):
        cells = np.histogram(values, bins=20, range=(0, 1))[0]
        chi2 = ((cells - 1000) ** 2 / 1000).sum()
        assert chi2 < 68  # 19 degrees of freedom: exceeded once in 2·10^7


def test_generators_repeat() -> None:
    assert generator(b"k", "p", "u").random() == generator(b"k", "p", "u").random()
    assert generator(b"k", "p", "u").random() != generator(b"k", "p", "v").random()
