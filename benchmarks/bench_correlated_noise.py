"""The cost of correlated noise by number of bands, and its gain at equal ε, in one run.

    make bench        (or: python benchmarks/bench_correlated_noise.py [--values N] [--rounds N])

Writes benchmarks/results/correlated_noise.json. Cost: nanoseconds of one core per value (drawing,
recursion, addition and division) with 1, 2, 4 and 8 bands in turn; seconds of all cores compared
with an ordinary update (AdamW on one micro-batch, without privacy) of two models; and the cost of
recomputing noise from the seed instead of keeping buffers. Gain: root mean square noise of the
weights relative to DP-SGD at the same ε (δ = 1e-6), with σ, for plans of several sizes, for the
prefix-sum workload and for the shipped AdamW, with the strategy of either; these values are
computed, so they have no spread.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import tensorflow as tf
from bench_clipping import ORDINARY, batch_of, trainer_of, update
from cases import CASES
from clocks import clocks

from dp_core.config.training import OptimizerConfig
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.calibration import noise_for, with_bands, workload_error
from dp_core.privacy.correlated_noise import PastNoise
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.lattice import lattice_scale
from dp_core.privacy.matrix_factorization import Workload, least_error_strategy
from dp_core.privacy.mechanisms import MechanismEvent
from dp_core.privacy.noise_addition import UpdateNoise, noised_mean, noised_means
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.devices import keep_freed_memory

RESULT = ROOT / "benchmarks" / "results" / "correlated_noise.json"
BANDS = (1, 2, 4, 8)
BLOCK = 1 << 18  # values per block, as in `dp_core.privacy.noise_addition`
UPDATES, SEED = 1000, PrivacySeed.fixed("benchmark")
RESUMED = 16  # number of an update whose noise is recomputed from the seed
MODELS = ("2x128", "4x256")
PLANS = {  # updates, participations per unit, ε
    "282 updates, 12 turns, ε 5.44": (282, 12, 5.44),
    "282 updates, 48 turns, ε 5.44": (282, 48, 5.44),
    "1000 updates, 10 turns, ε 1": (1000, 10, 1.0),
    "2000 updates, 20 turns, ε 3": (2000, 20, 3.0),
    "2000 updates, 4 turns, ε 8": (2000, 4, 8.0),
}


def adamw(updates: int) -> Workload:
    """Return the workload of the shipped optimiser."""
    config = OptimizerConfig()
    rates = tuple(config.learning_rate_at(t, updates) for t in range(updates))
    return Workload(rates, config.beta1)


def cost(values: int, rounds: int) -> dict[str, float]:
    """Return nanoseconds per value by bands, each the median over rounds taken in turn."""
    total = np.random.default_rng(0).normal(size=values).astype(np.float32)
    out = np.empty_like(total)
    blocks = [slice(start, start + BLOCK) for start in range(0, values, BLOCK)]
    past = {bands: PastNoise() for bands in BANDS}

    def update(bands: int, t: int) -> None:
        strategy = least_error_strategy(bands, adamw(UPDATES))
        noise = UpdateNoise(SEED, b"", t, 1.0, 1.0, strategy)
        scale, key = lattice_scale(1.0, 1.0, values, strategy), noise.key("w")
        for j, block in enumerate(blocks):
            if bands == 1:
                noised_mean(total[block], key, j, scale, 1024.0, out[block])
            else:
                past[bands].add(noise, "w", j, total[block], scale, 1024.0, out[block])

    taken: dict[int, list[float]] = {bands: [] for bands in BANDS}
    for t in range(rounds + 1):
        for bands in BANDS:
            before = clocks()
            update(bands, t)
            spent = clocks() - before
            if t:  # the first round compiles
                taken[bands].append(spent[1] / values * 1e9)
    return {str(bands): round(statistics.median(times), 2) for bands, times in taken.items()}


def compared_with_update(name: str, rounds: int) -> dict[str, float]:
    """Return seconds of all cores by kind, and the cost of 8 bands relative to ordinary updates."""
    case = CASES[name]
    trainer, batch = trainer_of(ORDINARY, case), batch_of(case, case.units)
    shapes = {n: a.shape for n, a in trainer.weights().items()}
    totals = {n: tf.ones(shape) for n, shape in shapes.items()}
    past = {bands: PastNoise() for bands in BANDS}

    def noised(bands: int, t: int, kept: PastNoise | None) -> None:
        strategy = least_error_strategy(bands, adamw(UPDATES))
        noised_means(totals, UpdateNoise(SEED, b"", t, 1.0, 1.0, strategy, kept), 1024.0)

    taken: dict[str, list[float]] = {}
    for t in range(rounds + 1):
        ways = {f"noise of {b} bands": functools.partial(noised, b, t, past[b]) for b in BANDS}
        ways["ordinary update"] = functools.partial(update, trainer, batch, False, t)
        if t % 4 == 1:
            ways[f"noise of 8 bands, update {RESUMED} from the seed"] = functools.partial(
                noised, 8, RESUMED, None
            )
        for way, run_once in ways.items():
            before = clocks()
            run_once()
            if t:  # the first round compiles
                taken.setdefault(way, []).append((clocks() - before)[1])
    ordinary, single_band = taken["ordinary update"], taken["noise of 1 bands"]
    more = zip(taken["noise of 8 bands"], single_band, ordinary, strict=True)
    return {
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "rows": case.rows,
        **{way: round(statistics.median(times), 5) for way, times in taken.items()},
        "8 bands more than 1, in ordinary updates": round(
            statistics.median((b - a) / c for b, a, c in more), 4
        ),
    }


def gain(updates: int, turns: int, epsilon: float) -> dict[str, dict[str, float]]:
    """Return σ and errors relative to DP-SGD by bands, for pairs of strategy → evaluation."""
    units, sums, real = 1_000_000, Workload((1.0,) * updates), adamw(updates)
    plan = ExecutionPlan.poisson(
        unit="patient",
        declared_units=units,
        expected_batch=units * turns / updates,
        steps=updates,
        noise_multiplier=1.0,
        clip_norm=1.0,
        delta=5e-7,
    )
    rows = {}
    for bands in (1, 2, 4, 8, 16, 32):
        if bands * turns > updates:
            break

        def event(sigma: float, bands: int = bands) -> MechanismEvent:
            made = with_bands(plan, bands, sums)
            return replace(made, noise_multiplier=sigma).event()

        sigma = noise_for(event, epsilon, 1e-6)
        assert epsilon_pld(event(sigma), 1e-6) <= epsilon
        felt = {"sums": (sums, sums), "sums → AdamW": (sums, real), "AdamW": (real, real)}
        rows[str(bands)] = {"σ": sigma} | {
            name: workload_error(
                replace(with_bands(plan, bands, by), noise_multiplier=sigma), where
            )
            for name, (by, where) in felt.items()
        }
    alone = dict(rows["1"])
    return {
        bands: {
            name: value if name == "σ" else round(value / alone[name], 3)
            for name, value in row.items()
        }
        for bands, row in rows.items()
    }


def main() -> None:
    """Run all measurements and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    keep_freed_memory()  # as in training
    result = {
        "values": options.values,
        "rounds": options.rounds,
        "nanoseconds a value, by bands": cost(options.values, options.rounds),
        "seconds of all cores beside an ordinary update": {
            name: compared_with_update(name, options.rounds) for name in MODELS
        },
        "load": os.getloadavg()[0],
        "error beside DP-SGD, by bands": {name: gain(*sizes) for name, sizes in PLANS.items()},
    }
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if "trainings" in kept:  # measured separately with the models of bench_recipe
        result["trainings"] = kept["trainings"]
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
