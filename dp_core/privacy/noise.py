"""Noise without TensorFlow: the keys of the training noise, and the exact discrete Gaussian."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dp_core.errors import BadInput
from dp_core.privacy.exact_coins import WordStream, bernoulli_exp_minus, uniform_below
from dp_core.privacy.seeds import PrivacySeed

LARGEST_SIGMA = 2.0**31
SUMMANDS = 4  # normals added up by `tf_noise.gaussian`; their keys differ in the low bits


def noise_key(
    seed: PrivacySeed, manifest: bytes, t: int, variable: str, draw: int = 0
) -> NDArray[np.int64]:
    """Return the key [2] of the noise that variable `variable` gets in update `t`.

    HMAC-SHA256 of (manifest, t, variable, draw) under the seed: it depends on nothing of the
    layout, so that a resumed run, or one on other devices, draws the very same noise. `draw`
    numbers the streams where the plan adds several (one per shard and micro-batch, the paper's
    way). The last two bits are zero: they number the summands within one draw.
    """
    digest = seed.derive("noise", manifest, t, variable, draw)
    key = np.frombuffer(digest[:16], dtype="<i8").astype(np.int64)
    key[1] &= ~np.int64(SUMMANDS - 1)
    return key


def discrete_gaussian(
    sigma: float, size: int, seed: PrivacySeed, context: bytes
) -> NDArray[np.int64]:
    """Return `size` exact draws from the discrete Gaussian N_Z(0, σ²), int64.

    Algorithm 3 of Canonne, Kamath and Steinke (2020, arXiv:2004.00010): rejection from a
    discrete Laplace. Every coin is decided by integers (σ as the rational number that the
    float is), so no low bit of a float can leak, and the pmf is proportional to
    exp(−x²/2σ²) exactly. Time, not output, depends on the values drawn.

    Args:
        sigma: scale σ of the mechanism, in counts.
        size: number of draws.
        seed: the secret seed of the release.
        context: what the noise is for (digests of the release's inputs). The same seed and
            context give the same noise, so different data must come with different context.

    Raises:
        BadInput: σ is not in (0, 2³¹], or the context is empty.
    """
    if not 0 < sigma <= LARGEST_SIGMA:
        raise BadInput(f"σ = {sigma} is not in (0, 2^31]", where="discrete Gaussian")
    if not context:
        raise BadInput("noise must be bound to what it is drawn for", where="discrete Gaussian")
    exact = Fraction(sigma)
    stream = WordStream(seed.derive("discrete-gaussian", context, repr(sigma), size))
    drawn: list[NDArray[np.int64]] = []
    missing = size
    while missing > 0:
        # about 3/4 (σ large) to 2/5 (σ small) of the proposals survive; the rest is made up for
        accepted = _accepted(exact, missing + missing // 2 + 16, stream)[:missing]
        drawn.append(accepted)
        missing -= len(accepted)
    return np.concatenate(drawn) if drawn else np.zeros(0, np.int64)


def _accepted(sigma: Fraction, proposals: int, stream: WordStream) -> NDArray[np.int64]:
    """Return those of `proposals` discrete Laplace draws that Algorithm 3 keeps."""
    t = int(sigma) + 1
    y = _discrete_laplace(t, proposals, stream)
    values, index = np.unique(np.abs(y), return_inverse=True)
    square = sigma * sigma
    exponents = [(int(value) - square / t) ** 2 / (2 * square) for value in values]
    return y[bernoulli_exp_minus(exponents, index, stream)]


def _discrete_laplace(t: int, size: int, stream: WordStream) -> NDArray[np.int64]:
    """Return `size` draws with pmf proportional to exp(−|x|/t) (Algorithm 2 with s = 1)."""
    drawn: list[NDArray[np.int64]] = []
    missing = size
    while missing > 0:
        remainder = uniform_below(t, 2 * missing + 16, stream)
        values, index = np.unique(remainder, return_inverse=True)
        kept = bernoulli_exp_minus([Fraction(int(v), t) for v in values], index, stream)
        remainder = remainder[kept]
        magnitude = remainder + t * _geometric(len(remainder), stream)
        negative = uniform_below(2, len(magnitude), stream) == 1
        valid = ~(negative & (magnitude == 0))  # zero would count twice
        accepted = np.where(negative, -magnitude, magnitude)[valid][:missing]
        drawn.append(accepted)
        missing -= len(accepted)
    return np.concatenate(drawn) if drawn else np.zeros(0, np.int64)


def _geometric(size: int, stream: WordStream) -> NDArray[np.int64]:
    """Return, `size` times, how many Bernoulli(exp(−1)) come up before the first that does not."""
    count = np.zeros(size, np.int64)
    alive = np.arange(size)
    while len(alive):
        again = bernoulli_exp_minus([Fraction(1)], np.zeros(len(alive), np.int64), stream)
        alive = alive[again]
        count[alive] += 1
    return count
