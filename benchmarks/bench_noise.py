"""The cost of exact noise compared with float32 Box-Muller normals on a grid, in one run.

    make bench        (or: python benchmarks/bench_noise.py [--values N] [--rounds N])

Writes benchmarks/results/noise.json: nanoseconds of one core per value (random bits, noise,
addition and division) of both ways in turn, and the median of their ratios, on this processor and
on this processor without instructions that older ones lack. The Box-Muller way, which Confide used
before its noise was exact, is implemented below, including its random bits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numba
import numpy as np
from clocks import clocks
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from dp_core.privacy.lattice import lattice_scale
from dp_core.privacy.noise_addition import noised_mean
from dp_core.privacy.seed_store import aligned_bytes
from dp_core.training.devices import keep_freed_memory

RESULT = ROOT / "benchmarks" / "results" / "noise.json"
KEY = np.arange(32, dtype=np.uint8)
BLOCK = 1 << 18  # values per block, as in `dp_core.privacy.noise_addition`
ZEROS = np.zeros(6 * BLOCK, np.uint8)
# Hides wide AES (VAES, VPCLMULQDQ) and AVX-512 from OpenSSL, and gives AVX2 to the compiler.
OLDER = {"OPENSSL_ia32cap": ":~0x600C0030000", "NUMBA_CPU_NAME": "skylake"}
PROCESSORS: dict[str, dict[str, str]] = {"this one": {}, "without wide AES and AVX-512": OLDER}
_f, _i = np.float32, np.int32
_LOG = tuple(
    _f(c)
    for c in (
        *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
        *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    )
)
_SINE = tuple(_f(c) for c in (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
_COSINE = tuple(_f(c) for c in (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))


def compiled(function):  # type: ignore[no-untyped-def]
    return numba.njit(function, nogil=True, fastmath={"contract"})


@compiled
def polynomial(x, coefficients):  # type: ignore[no-untyped-def]
    value = coefficients[0]
    for c in coefficients[1:]:
        value = value * x + c
    return value


@compiled
def pair(coarse, fine, turn):  # type: ignore[no-untyped-def]
    a, b = _f(_i(coarse & _i(0x7FFFFFFF))), _f(_i(fine & _i(0x7FFFFFFF)))
    uniform = _f(a * _f(2.0**-31) + (b + _f(0.5)) * _f(2.0**-62))
    bits = _f(uniform).view(_i)
    exponent = _i(_i(bits - _i(0x3F3504F3)) >> _i(23))
    m = _i(bits - _i(exponent << _i(23))).view(_f) - _f(1)
    log = _f(exponent) * _f(math.log(2)) + (m + m * m * (m * polynomial(m, _LOG) - _f(0.5)))
    radius = np.sqrt(_f(-2) * log)
    angle = _f(_i(turn >> _i(2))) * _f(math.pi / 4 * 2.0**-29)
    square = angle * angle
    sine = angle + angle * square * polynomial(square, _SINE)
    cosine = _f(1) - _f(0.5) * square + square * square * polynomial(square, _COSINE)
    if _i(turn & _i(2)) != 0:
        radius = -radius
    if _i(turn & _i(1)) != 0:
        sine, cosine = cosine, -sine
    return radius * cosine, radius * sine


def galois_words(size: int, block: int) -> NDArray[np.int32]:
    """Return the words of `noise_words`, by AES-GCM on every processor."""
    mode, out = modes.GCM(block.to_bytes(12, "big")), aligned_bytes(6 * size + 15)
    cipher = Cipher(algorithms.AES256(KEY.tobytes()), mode).encryptor()
    cipher.update_into(ZEROS[: 6 * size].data, out.data)
    return out[: 6 * size].view("<i4").reshape(3, size // 2)


@compiled
def box_muller(total, words, stddev, places, factor, out):  # type: ignore[no-untyped-def]
    n = words.shape[1]
    coarse, fine, turn = words[0], words[1], words[2]
    low, high = total[:n], total[n:]
    low_out, high_out = out[:n], out[n:]
    for i in range(len(high)):
        x, y = pair(coarse[i], fine[i], turn[i])
        low_out[i] = np.rint((low[i] + stddev * x) * places) * factor
        high_out[i] = np.rint((high[i] + stddev * y) * places) * factor


def ways(values: int) -> dict[str, Callable[[], None]]:
    """Return both ways to add noise to `values` values, block by block."""
    total = np.random.default_rng(0).normal(size=values).astype(np.float32)
    out = np.empty_like(total)
    blocks = [slice(start, start + BLOCK) for start in range(0, values, BLOCK)]
    scale = lattice_scale(1.0, 1.0, 10**8)

    def exact() -> None:
        for j, block in enumerate(blocks):
            noised_mean(total[block], KEY, j, scale, 1024.0, out[block])

    def floats() -> None:
        for j, block in enumerate(blocks):
            words = galois_words(total[block].size, j)
            box_muller(total[block], words, _f(1), _f(2048), _f(2.0**-21), out[block])

    return {"exact": exact, "box-muller": floats}


def measured(values: int, rounds: int) -> dict[str, Any]:
    """Return the cost of both ways on this processor, as the environment configures it."""
    keep_freed_memory()  # as in training
    taken: dict[str, list[float]] = {"exact": [], "box-muller": []}
    both = ways(values)
    for way in both.values():
        way()  # the first call compiles
    for _ in range(rounds):
        for name, way in both.items():
            before = clocks()
            way()
            spent = clocks() - before
            taken[name].append(spent[1] / values * 1e9)
    ratios = [a / b for a, b in zip(taken["exact"], taken["box-muller"], strict=True)]
    return {
        "nanoseconds a value": {n: round(statistics.median(t), 3) for n, t in taken.items()},
        "exact / box-muller": round(statistics.median(ratios), 3),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--here", action="store_true", help="measure this processor only, and write nothing"
    )
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options.values, options.rounds)))
        return
    command = [sys.executable, __file__, "--here"]
    command += ["--values", str(options.values), "--rounds", str(options.rounds)]
    result: dict[str, Any] = {"values": options.values, "rounds": options.rounds}
    for processor, changes in PROCESSORS.items():
        answer = subprocess.run(
            command, env=os.environ | changes, check=True, capture_output=True, text=True
        )
        result[processor] = json.loads(answer.stdout.splitlines()[-1])
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
