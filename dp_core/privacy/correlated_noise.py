"""Correlated training noise C⁻¹z in whole numbers, which update t adds in place of z_t.

*The recursion.* z_t are the whole numbers that `noise_addition` draws for update t, of deviation
S = 2²⁸ steps. With c₀ = 1 and k = 4,

    y_t = z_t − F_t,    F_t = ⌊½ + Σᵢ cᵢ·2ᵏ·p_{t−i}⌋ over i = 1 … b − 1,    p_s = ⌊y_s / 2ᵏ⌋,

is C⁻¹z up to rounding, and y_t is added to the rounded clipped sum G_t. The coefficients are
multiples of 2⁻¹⁶ and the p_s have 32 bits, so float64 computes every F_t exactly.

*Accounting.* The data and the released r_s = G_s + y_s for s < t determine F_t, because
p_s = ⌊(r_s − G_s)/2ᵏ⌋. So update t releases the whole number M_t = G_t − F_t, a function of the
data and of earlier releases, plus independent noise z_t: the lattice mechanism of
`noise_addition`, adaptively composed. Rounding y is a part of this mechanism and no approximation
of it. If the sums of neighbours differ by D in at most one update of every b, their M differ by
CD, and in each of the b − 1 rows after such an update by less than 2ᵏ|cᵢ| + 1 more a value.
`lattice_scale` covers this cost of rounding by more noise (1.1·10⁻⁴ of it for 10⁶ values, σ = 1,
8 bands). The whole argument, with sampling, is in docs/proofs.md, "Correlated noise".

p is cut to 32 bits, at 128·S. This function of y does not increase the distance of any two values,
so it costs no privacy. It hardly ever changes a value, as y is sub-Gaussian of deviation at most
4·S (`is_calm`).

*Memory and resuming.* b − 1 earlier p are kept in memory, four bytes a value each, and never
written to disk, because they and a released model together reveal its raw sums. A resumed run
recomputes them from the seed, from the first update on, at the cost of the noise of those updates.
"""

import numpy as np
from numpy.typing import NDArray

from dp_core.privacy.lattice import PAST_BITS
from dp_core.privacy.matrix_factorization import COEFFICIENT_BITS, ToeplitzStrategy
from dp_core.privacy.noise_addition import (
    Integers,
    UpdateNoise,
    Vector,
    add_noise,
    compiled,
    lattice_noise,
    noise_key,
)
from dp_core.privacy.seed_store import Bytes, Words

Floats = NDArray[np.float64]
_CHUNK = 1 << 12  # values whose sum is kept in the first-level cache
_STEP = float(1 << PAST_BITS)
_HIGHEST, _LOWEST = 2.0**31 - 1, -(2.0**31)


class PastNoise:
    """The state of a run's correlated noise: the last b − 1 p of each block of values.

    Each block is stored under the key of its first noise, so blocks of other seeds or manifests are
    never used. A block that does not fit the update is recomputed from update 0.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[bytes, int], _Block] = {}

    def add(
        self,
        noise: UpdateNoise,
        name: str,
        block: int,
        total: Vector,
        scale: float,
        divisor: float,
        out: Vector,
    ) -> None:
        """Round a sum to the lattice, add the update's correlated noise, divide.

        Args:
            noise: of the update.
            name: of the parameter.
            block: number of this stretch of values under its key.
            total: (n,), a clipped sum.
            scale: lattice steps per 1 in the sum, from `lattice_scale`.
            divisor: of the noised sum.
            out: (n,), receives the mean.
        """
        first = noise_key(noise.seed, noise.manifest, 0, name).tobytes(), block
        kept = self._blocks.get(first)
        if kept is None or kept.update > noise.t or not kept.fits(noise.strategy, total.size):
            kept = _Block(noise.strategy, total.size)
        self._blocks[first] = kept
        while kept.update < noise.t:
            kept.next(noise_key(noise.seed, noise.manifest, kept.update, name), block)
        drawn = kept.next(noise.key(name), block)
        add_noise(total, drawn, scale, 1 / (scale * divisor), out)


class _Block:
    """The recursion of one block of values, from update 0 on."""

    def __init__(self, strategy: ToeplitzStrategy, size: int) -> None:
        self.update, self._strategy = 0, strategy
        self._past = np.zeros((strategy.bands - 1, size), np.int32)
        self._coefficients = np.array(strategy.coefficients[1:], np.float64)

    def fits(self, strategy: ToeplitzStrategy, size: int) -> bool:
        return self._strategy == strategy and self._past.shape[1] == size

    def next(self, key: Bytes, block: int) -> Floats:
        """Return y (n,) of the next update, whose z have this key: whole numbers."""
        drawn = lattice_noise(key, self._past.shape[1], block)
        noise, kept = np.empty(drawn.size), len(self._past)
        latest_first = np.array([(self.update - i) % kept for i in range(1, kept + 1)], np.int64)
        _correlate(drawn, self._past, latest_first, self._coefficients, noise)
        self.update += 1
        return noise


@compiled
def _correlate(
    drawn: Integers, past: Words, rows: Integers, coefficients: Floats, noise: Floats
) -> None:
    """Set noise = y, and overwrite the oldest p, in the last of `rows`, by the new p."""
    sums, weight = np.empty(_CHUNK), _STEP / (1 << COEFFICIENT_BITS)
    for start in range(0, drawn.size, _CHUNK):
        stop = min(start + _CHUNK, drawn.size)
        correlated = sums[: stop - start]
        correlated[:] = 0.0
        for i in range(rows.size):
            earlier, coefficient = past[rows[i], start:stop], coefficients[i]
            for j in range(correlated.size):
                correlated[j] += coefficient * np.float64(earlier[j])
        oldest = past[rows[rows.size - 1], start:stop]
        made, z = noise[start:stop], drawn[start:stop]
        for j in range(correlated.size):
            y = np.float64(z[j]) - np.floor(correlated[j] * weight + 0.5)
            made[j] = y
            oldest[j] = np.int32(min(max(np.floor(y / _STEP), _LOWEST), _HIGHEST))
