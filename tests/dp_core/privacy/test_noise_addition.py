import itertools
import math
from decimal import Decimal, localcontext
from unittest.mock import Mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from scipy import stats
from scipy.integrate import quad
from scipy.special import ndtr

from dp_core.errors import PlanError
from dp_core.privacy import noise_addition as module
from dp_core.privacy.lattice import DEVIATION, SMOOTHING, lattice_scale
from dp_core.privacy.noise_addition import (
    alias_table,
    decide,
    lattice_noise,
    noise_key,
    noised_mean,
)
from dp_core.privacy.seed_store import PrivacySeed, keystream

SEED = PrivacySeed.fixed("gaussian noise")
MANIFEST = b"manifest"
KEY = noise_key(SEED, MANIFEST, 5, "kernel")
UNIT = module._UNIT  # masses of rectangles are multiples of 1/UNIT
BIN = 1 << module._BIN


def noised(
    sums: NDArray[np.float32],
    *,
    sigma: float = 1.0,
    clip: float = 1.0,
    divisor: float = 1.0,
    key: NDArray[np.uint8] = KEY,
    block: int = 0,
) -> NDArray[np.float32]:
    mean = np.empty_like(sums)
    noised_mean(sums, key, block, lattice_scale(sigma, clip, sums.size), divisor, mean)
    return mean


def zeros(size: int) -> NDArray[np.float32]:
    return np.zeros(size, np.float32)


def fits(noise: NDArray[np.floating], sigma: float) -> float:
    return float(stats.kstest(noise.ravel(), "norm", (0, sigma)).pvalue)


KEY_SEED = PrivacySeed.fixed("noise")


def test_a_key_is_a_function_of_everything_it_is_bound_to():
    base = noise_key(KEY_SEED, b"manifest", 3, "encoder/0/kernel")
    assert base.shape == (32,)
    assert base.dtype == np.uint8
    assert np.array_equal(base, noise_key(KEY_SEED, b"manifest", 3, "encoder/0/kernel"))
    others = [
        noise_key(PrivacySeed.fixed("other"), b"manifest", 3, "encoder/0/kernel"),
        noise_key(KEY_SEED, b"manifesT", 3, "encoder/0/kernel"),
        noise_key(KEY_SEED, b"manifest", 4, "encoder/0/kernel"),
        noise_key(KEY_SEED, b"manifest", 3, "encoder/1/kernel"),
    ]
    assert all(not np.array_equal(base, other) for other in others)


@pytest.mark.parametrize("block", [0, 3, 2**40 + 1])
def test_keystream_equals_test_vectors_of_the_standard(block):
    """By NIST SP 800-38D, each 128 bits encrypt a nonce and a counter that starts at 2."""
    key = np.arange(32, dtype=np.uint8)
    ecb = Cipher(algorithms.AES(key.tobytes()), modes.ECB()).encryptor()  # noqa: S305
    nonce = block.to_bytes(12, "big")
    counters = b"".join(nonce + i.to_bytes(4, "big") for i in range(2, 300_002))
    expected = np.frombuffer(ecb.update(counters), dtype="<i4")
    for words in (1, 7, 300_000 * 4 - 5):  # the last needs several pieces
        stream = keystream(key, words, block)
        assert stream.dtype == np.int32
        assert stream.ctypes.data % 64 == 0
        assert np.array_equal(stream, expected[:words])


@pytest.mark.statistical
@pytest.mark.parametrize(("sigma", "clip"), [(0.01, 1.0), (1.0, 0.3), (37.5, 2.0)])
def test_noise_has_its_scale_and_no_other(sigma, clip):
    noise = noised(zeros(60_000), sigma=sigma, clip=clip, divisor=5.0) * 5
    assert noise.dtype == np.float32
    assert fits(noise, sigma * clip) > 1e-4
    assert fits(noise, sigma * clip * 2 / 3) < 1e-9
    assert fits(noise, sigma * clip * 3 / 2) < 1e-9


@pytest.mark.statistical
def test_updates_variables_blocks_and_places_are_independent():
    noises = [
        lattice_noise(noise_key(SEED, MANIFEST, t, v), 60_000, b) / DEVIATION
        for t in (0, 1)
        for v in ("a", "b")
        for b in (0, 1)
    ]
    limit = 5 / math.sqrt(60_000)
    for i, one in enumerate(noises):
        for two in noises[i + 1 :]:
            assert abs(np.corrcoef(one, two)[0, 1]) < limit
            assert abs(np.corrcoef(np.abs(one), np.abs(two))[0, 1]) < limit
        # Values that share a word are 30,000 places apart.
        for lag in (1, 2, 30_000):
            assert abs(np.corrcoef(one[lag:], one[:-lag])[0, 1]) < limit * math.sqrt(2)
            assert abs(np.corrcoef(np.abs(one[lag:]), np.abs(one[:-lag]))[0, 1]) < limit * 1.5


@pytest.mark.statistical
def test_the_tail_is_there():
    noise = np.abs(lattice_noise(KEY, 4_000_000)) / DEVIATION
    for far in (3.5, 4.0, 4.5):  # rectangles end at 4
        expected = len(noise) * 2 * stats.norm.sf(far)
        seen = int(np.sum(noise > far))
        assert stats.poisson.sf(seen - 1, expected) > 1e-4
        assert stats.poisson.cdf(seen, expected) > 1e-4


@pytest.mark.statistical
@pytest.mark.parametrize("modulus", [2, 3, 7, 16, 1000])
def test_every_place_is_reached_low_bits_and_all(modulus):
    drawn = lattice_noise(KEY, 400_000)
    seen = np.bincount(drawn % modulus, minlength=modulus)
    assert stats.chisquare(seen).pvalue > 1e-6


# --- distribution: rectangles and remainder together are the discrete Gaussian


def density(value: int) -> Decimal:
    """Return N_ℤ(0, S²) at a value, as a multiple of the height of a rectangle of one unit."""
    with localcontext(prec=60):
        root = (2 * Decimal("3.14159265358979323846264338327950288419716939937510")).sqrt()
        mass = (-(Decimal(value) ** 2) / 2 / DEVIATION**2).exp() / (root * DEVIATION)
        return mass * UNIT * 2 * BIN


def test_rectangles_fit_under_the_density_and_leave_less_than_a_unit():
    for j in (*range(0, module._SLOTS - 1, 37), module._SLOTS - 2):
        inside = module._INSIDE[j]
        assert inside <= density((j + 1) * BIN) < inside + 1
    assert module._INSIDE[-1] == 0  # the outermost bin represents the remainder


def test_a_slot_gives_each_bin_exactly_its_mass():
    masses = np.zeros(module._SLOTS, np.int64)
    for slot, entry in enumerate(module._SLOT.tolist()):
        threshold, other = divmod(entry, module._SLOTS)
        masses[slot] += threshold
        masses[other] += (1 << module._COIN) - threshold
    assert masses.sum() == UNIT
    assert masses[:-1].tolist() == module._INSIDE[:-1]
    # The remainder has the mass of the density outside of the rectangles.
    edges = 2 * ndtr(np.arange(-4, 1e-6, BIN / DEVIATION))  # both sides
    outside = UNIT * (edges[0] + np.diff(edges).sum()) - sum(module._INSIDE)
    assert masses[-1] == pytest.approx(outside, abs=1e-3)
    assert UNIT / masses[-1] == pytest.approx(2170, abs=1)  # as documented in the module


def settled(words: NDArray[np.int32], size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the values that the table gives for these words, and the numbers of the others."""
    drawn, others = np.empty(size, np.int64), np.empty(size, np.int32)
    zeros = np.zeros(size, np.float32)
    count = module._add_settled(words, module._SLOT, zeros, 1.0, 1.0, drawn, others)
    return drawn, others[:count]


def test_a_coin_at_the_threshold_is_the_other_items():
    """Coins below a slot's threshold select its first item, and all others the second one."""
    thresholds, others = np.divmod(module._SLOT.astype(np.int64), module._SLOTS)
    slots = np.arange(module._SLOTS)
    for short, expected in ((1, slots), (0, others)):
        coins = np.maximum(thresholds - short, 0)
        words = np.zeros((3, len(slots)), np.int32)
        words[0], words[2] = slots, coins
        numbers = settled(words, len(slots))[0] >> module._BIN
        sure = thresholds >= short  # no coin is below a threshold of 0
        assert np.array_equal(numbers[sure], expected[sure])


def test_the_sign_bit_mirrors_a_magnitude_between_minus_one_and_zero():
    """The two signs of a magnitude m give m and −1 − m, so every value has one encoding."""
    words = np.random.default_rng(3).integers(0, 1 << 31, (3, 500)).astype(np.int32)
    words[:2] &= 0x7FFFFFFF
    positive, _ = settled(words, 1000)
    words[:2] |= np.int32(-1 << 31)
    assert positive.min() >= 0
    assert np.array_equal(settled(words, 1000)[0], -1 - positive)


def test_weights_of_the_remainder_cover_density_above_the_rectangles():
    weights = module._WEIGHTS
    assert len(weights) * BIN == 15 * DEVIATION
    assert max(weights) < 1 << 53  # exact as floats
    scale = 1 << module._TAIL_FINE
    for j in (*range(0, len(weights), 511), len(weights) - 1):
        inside = module._INSIDE[j] if j < module._SLOTS else 0
        needed = (density(j * BIN) - inside) * scale
        assert needed <= weights[j] <= needed + 3
    masses = [0] * len(module._TAIL_SLOT)
    for slot, entry in enumerate(module._TAIL_SLOT.tolist()):
        threshold, other = divmod(entry, len(masses))
        masses[slot] += threshold
        masses[other] += (1 << module._TAIL_COIN) - threshold
    assert masses[: len(weights)] == weights
    assert sum(masses) == 1 << 64


def accepted(place: int, coin: int) -> tuple[bool, bool]:
    """Return whether a trial of the remainder accepts a place, and whether float64 is in doubt."""
    magnitude, negative = max(place, -1 - place), place < 0
    number = magnitude >> module._BIN
    pick = number << module._TAIL_COIN
    assert int(module._TAIL_SLOT[number]) >> 64 - module._TAIL_COIN > 0
    low = coin << module._UNIFORM | negative << module._BIN | magnitude & (BIN - 1)
    words = np.array([pick, low, 0, 0], np.uint64)
    drawn = np.zeros(1, np.int64)
    tables = (module._TAIL_SLOT, module._TAIL_BIN)
    done, position, doubtful = module._reject(words, 0, *tables, drawn, 0)
    assert (position, drawn[0]) == (module._TRIAL, place)
    return done == 1, doubtful


@pytest.mark.parametrize(
    "place", [0, 5, -1, BIN - 1, 700 * BIN + 3, -700 * BIN, 3 * DEVIATION + 9, -5 * DEVIATION]
)
def test_a_trial_takes_a_place_with_the_probability_that_is_left_there(place):
    number = max(place, -1 - place) >> module._BIN
    height = density(place) - int(module._TAIL_BIN[number, 1])
    most = 1 << 64 - module._UNIFORM
    exact = height * (1 << module._TAIL_FINE) / module._WEIGHTS[number] * most
    doubt = int(exact * Decimal(2) ** -20) + 2**13
    low, high = int(exact) - doubt, int(exact) + doubt
    if low >= 0:
        assert accepted(place, low) == (True, False)
    if high < most:
        assert accepted(place, high) == (False, False)
    if exact < most:
        assert accepted(place, int(exact))[1]
        assert decide(place, [int(exact) - 1, 0])
        assert not decide(place, [int(exact) + 1, 0])
        # The digits that follow the trial's digits decide.
        behind = int((exact - int(exact)) * (1 << 64))
        assert decide(place, [int(exact), behind - 2**40])
        assert not decide(place, [int(exact), behind + 2**40])


def test_draw_continues_after_a_comparison_that_float64_cannot_decide(monkeypatch):
    before, exact = module._draw_tail(KEY, 0, 300), module._reject
    deciding = Mock(wraps=decide)
    monkeypatch.setattr(module, "decide", deciding)

    def doubting(words, position, slots, bins, drawn, done):  # type: ignore[no-untyped-def]
        """Report each place that is tried as doubtful."""
        if done == drawn.size:
            return done, position, False
        trial = np.zeros(1, np.int64)
        now, position, doubtful = exact(words, position, slots, bins, trial, 0)
        if now == 0 and not doubtful:
            return done, position, False
        drawn[done] = trial[0]
        return done, position, True

    monkeypatch.setattr(module, "_reject", doubting)
    after = module._draw_tail(KEY, 0, 300)
    assert deciding.call_count >= 300
    # Decimals accept the same places as float64, but then the next trial is two words later.
    assert np.isin(after, before).mean() > 0.2
    assert abs(after).max() < 8 * DEVIATION


def test_an_alias_table_is_exact_for_any_masses():
    generator = np.random.default_rng(5)
    for size, bits in itertools.product((1, 2, 7, 64), (3, 10)):
        cuts = np.sort(generator.integers(0, size << bits, size - 1))
        masses = np.diff([0, *cuts, size << bits]).tolist()
        threshold, other = alias_table(masses, bits)
        totals = list(threshold)
        for t, item in zip(threshold, other, strict=True):
            totals[item] += (1 << bits) - t
        assert totals == masses
        assert all(0 <= t < 1 << bits for t in threshold)


def test_a_discrete_gaussian_is_a_continuous_one_that_was_rounded_at_random():
    """Check the module's first claim by quadrature, at a width with a measurable error."""
    tau = 1.0
    wide = 0.2  # small enough not to hide the error
    error = 2 * math.exp(-2 * math.pi**2 * tau**2) * 1.01  # 5e-9
    whole = np.arange(-80, 81)

    def rounded(x: int) -> float:
        def integrand(y: float) -> float:
            kernel = math.exp(-((x - y) ** 2) / 2 / tau**2)
            kernel /= np.exp(-((whole - y) ** 2) / 2 / tau**2).sum()
            return kernel * math.exp(-(y**2) / 2 / wide**2) / wide / math.sqrt(2 * math.pi)

        return float(quad(integrand, -3, 3, epsabs=0, epsrel=1e-12, limit=200)[0])

    exact = np.exp(-(whole**2) / 2 / (tau**2 + wide**2))
    exact /= exact.sum()
    worst = 0.0
    for x in (0, 1, 3):
        ratio = rounded(x) / exact[x + 80]
        worst = max(worst, abs(ratio - 1))
    assert error / 100 < worst < 2.1 * error
    assert 2 * math.exp(-2 * math.pi**2 * SMOOTHING**2) < 1e-136


@pytest.mark.parametrize("size", [1, 2, 999, 1000, 70_001])
def test_the_mean_is_rounded_sum_plus_noise_divided(size):
    sums = np.linspace(-3, 3, size).astype(np.float32)
    places = lattice_scale(0.7, 1.5, size)
    whole = np.rint(sums.astype(np.float64) * places) + lattice_noise(KEY, size, 3)
    exact = (whole * (1 / (places * 2.0))).astype(np.float32)
    mean = noised(sums, sigma=0.7, clip=1.5, divisor=2.0, block=3)
    assert np.array_equal(mean, exact)


def test_the_rest_is_among_the_values_and_their_places_are_right():
    drawn, others = settled(module.noise_words(KEY, 50_000), 50_000)
    assert 4 < len(others) < 60  # one in 2,170 is in the remainder
    mask = np.ones(50_000, bool)
    mask[others] = False
    everything = lattice_noise(KEY, 50_000)
    assert np.array_equal(everything[mask], drawn[mask])
    assert np.abs(drawn[mask]).max() < 4 * DEVIATION
    assert np.array_equal(everything[~mask], module._draw_tail(KEY, 0, len(others)))


def test_a_sum_out_of_all_proportion_is_cut_and_noised_all_the_same():
    mean = noised(np.array([3e38, -3e38, np.inf, -np.inf], np.float32))
    assert np.all(np.isfinite(mean))
    assert np.all(np.abs(mean) == pytest.approx(2.0**51 / DEVIATION, rel=1e-4))


@pytest.mark.parametrize("values", [1, 10**8, 10**9])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 10.0])
def test_the_noise_is_the_plans_multiple_of_what_rounding_makes_of_the_clip_norm(sigma, values):
    places = lattice_scale(sigma, 0.25, values)
    sensitivity = 0.25 * places + 1.5 * math.sqrt(values)
    continuous = math.sqrt(DEVIATION**2 - 16)
    assert continuous / sensitivity == pytest.approx(sigma, rel=1e-12)
    # Rounding makes the noise larger than the plan's by at most this factor.
    assert 1 <= DEVIATION / places / (sigma * 0.25) < 1 + 2e-9 * sigma * math.sqrt(values) * 4


def test_rounding_moves_neighbours_apart_by_no_more_than_is_paid_for():
    generator = np.random.default_rng(1)
    one = generator.normal(size=4096).astype(np.float32)
    step = generator.normal(size=4096)
    two = (one + step / np.linalg.norm(step)).astype(np.float32)
    places = 32.0  # so coarse that rounding is measurable
    apart = np.linalg.norm(
        np.rint(one.astype(np.float64) * places) - np.rint(two.astype(np.float64) * places)
    )
    exact = np.linalg.norm(one.astype(np.float64) - two) * places
    assert exact < apart < exact + 1.5 * math.sqrt(one.size)


@pytest.mark.parametrize("sigma", [1e-320, 2.0**21, 1e9])
def test_a_noise_multiplier_that_no_lattice_can_hold_is_refused(sigma):
    with pytest.raises(PlanError, match="noise multiplier"):
        lattice_scale(sigma, 1.0, 10**8)


@pytest.mark.parametrize("word", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_the_extreme_words_of_the_first_stream_give_noise(monkeypatch, word):
    def filled(key: NDArray[np.uint8], words: int, block: int) -> NDArray[np.int32]:
        if block >= module._TAIL_BLOCKS:
            return keystream(key, words, block)
        return np.full(words, word, np.int64).astype(np.int32)

    monkeypatch.setattr(module, "keystream", filled)
    assert np.abs(lattice_noise(KEY, 6)).max() < 8 * DEVIATION


def test_the_two_streams_of_a_key_share_no_counter():
    blocks = {0, 1, 2**31}
    rest = {block + times * module._TAIL_BLOCKS for block in blocks for times in range(1, 5)}
    assert not blocks & rest
    assert max(rest) < 1 << 96  # fits the nonce of a counter
    first, second = (keystream(KEY, 1000, block) for block in (0, module._TAIL_BLOCKS))
    assert np.mean(first == second) < 0.01


def test_keys_and_noise_do_not_change_between_releases() -> None:
    # The key depends on the digest of the code. Otherwise, other noise for the same key would be a
    # second noise under the same charge. A changed key would give a resumed run other noise.
    key = noise_key(KEY_SEED, b"manifest", 3, "encoder/0/kernel").tobytes().hex()
    assert key == "362160756b5170834ce7f84d9cb133599b7d938486e0a00870012e58e227b863"
    drawn = lattice_noise(np.arange(32, dtype=np.uint8), 4)
    assert drawn.tolist() == [-128314204, -152295475, 539187866, -129603859]
