"""What correlated noise costs an update by its bands, and what it gains at equal ε, in one run.

    make bench        (or: python benchmarks/bench_correlated_noise.py [--values N] [--rounds N])

Writes benchmarks/results/correlated_noise.json. Cost: nanoseconds of one core for each value, draw,
recursion, addition and division included, of 1, 2, 4 and 8 bands in turn. Gain: root mean square
noise of the prefix sums beside DP-SGD's at the same ε (δ = 1e-6), with σ, for plans of several
sizes; computed, so without a spread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from clocks import clocks

from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.accounting.calibration import noise_for
from dp_core.privacy.accounting.noise_bands import prefix_error, with_bands
from dp_core.privacy.correlated_noise import PastNoise
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.matrix_factorization import least_error_strategy
from dp_core.privacy.noise_addition import UpdateNoise, lattice_scale, noised_mean
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.devices import keep_freed_memory

RESULT = ROOT / "benchmarks" / "results" / "correlated_noise.json"
BANDS = (1, 2, 4, 8)
BLOCK = 1 << 18  # values: as `dp_core.privacy.noise_addition` cuts them
UPDATES, SEED = 1000, PrivacySeed.fixed("benchmark")
PLANS = {  # updates, times that a unit takes part, ε
    "282 updates, 12 turns, ε 5.44": (282, 12, 5.44),
    "282 updates, 48 turns, ε 5.44": (282, 48, 5.44),
    "1000 updates, 10 turns, ε 1": (1000, 10, 1.0),
    "2000 updates, 20 turns, ε 3": (2000, 20, 3.0),
    "2000 updates, 4 turns, ε 8": (2000, 4, 8.0),
}


def cost(values: int, rounds: int) -> dict[str, float]:
    """Return nanoseconds a value by bands, each the median over rounds taken in turn."""
    total = np.random.default_rng(0).normal(size=values).astype(np.float32)
    out = np.empty_like(total)
    blocks = [slice(start, start + BLOCK) for start in range(0, values, BLOCK)]
    past = {bands: PastNoise() for bands in BANDS}

    def update(bands: int, t: int) -> None:
        strategy = least_error_strategy(bands, UPDATES)
        noise = UpdateNoise(SEED, b"", t, 1.0, 1.0, strategy)
        scale, key = lattice_scale(1.0, 1.0, values, strategy), noise.key("w")
        for j, own in enumerate(blocks):
            if bands == 1:
                noised_mean(total[own], key, j, scale, 1024.0, out[own])
            else:
                past[bands].add(noise, "w", j, total[own], scale, 1024.0, out[own])

    taken: dict[int, list[float]] = {bands: [] for bands in BANDS}
    for t in range(rounds + 1):
        for bands in BANDS:
            before = clocks()
            update(bands, t)
            spent = clocks() - before
            if t:  # the first compiles
                taken[bands].append(spent[1] / values * 1e9)
    return {str(bands): round(statistics.median(times), 2) for bands, times in taken.items()}


def gain(updates: int, turns: int, epsilon: float) -> dict[str, dict[str, float]]:
    """Return σ, and the error of the prefix sums beside DP-SGD's, by bands."""
    units = 1_000_000
    plan = ExecutionPlan.poisson(
        unit="patient",
        declared_units=units,
        expected_batch=units * turns / updates,
        steps=updates,
        noise_multiplier=1.0,
        clip_norm=1.0,
        delta=5e-7,
    )
    rows, alone = {}, 0.0
    for bands in (1, 2, 4, 8, 16, 32):
        if bands * turns > updates:
            break
        made = with_bands(plan, bands)
        sigma = noise_for(
            lambda s, made=made: replace(made, noise_multiplier=s).event(), epsilon, 1e-6
        )
        made = replace(made, noise_multiplier=sigma)
        alone = alone or prefix_error(made)
        assert epsilon_pld(made.event(), 1e-6) <= epsilon
        rows[str(bands)] = {"σ": sigma, "error": round(prefix_error(made) / alone, 3)}
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=20)
    told = parser.parse_args()
    keep_freed_memory()  # as in training
    result = {
        "values": told.values,
        "rounds": told.rounds,
        "nanoseconds a value, by bands": cost(told.values, told.rounds),
        "load": os.getloadavg()[0],
        "error of prefix sums beside DP-SGD, by bands": {
            name: gain(*of) for name, of in PLANS.items()
        },
    }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
