"""Audits of the engine, and their power against wrong noise.

    python benchmarks/bench_audit.py [--repeats N] [--updates N] [--white N] [--black N] [--more]

Writes benchmarks/results/audit.json. `trainings`: the engine, white box and black box, at a claim
of ε = 4, δ = 1e-5: lower bounds at 95%, the power as computed in advance, and the p-value of the
claim. `power`: the share of 200 simulated audits of each size that contradict the claim at p ≤
0.001, with the planned noise and with less noise; the distribution of the noised sums of a correct
engine is known. `null`: false alarms of bounds on uninformative scores. With `--more`, trainings
are added to the existing results, and nothing else is measured. A count of 0 canaries skips the
training.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks.threshold_scan import best_epsilon, surest_first
from dp_core.audit.canaries import throw_coins
from dp_core.audit.engine_audit import (
    DiracCanaries,
    NewTokenCanaries,
    audited_plan,
    black_box_scores,
    white_box_observations,
    white_box_scores,
)
from dp_core.audit.lower_bounds import BOUNDS, GuessOutcome, trade_off_refuted
from dp_core.audit.one_run import Claim, Guesses, audit_claim, planned_guesses
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.seed_store import PrivacySeed

RESULT = ROOT / "benchmarks" / "results" / "audit.json"
EPSILON, DELTA, RATE = 4.0, 1e-5, 0.5
SIMULATED = 200
NOISE = {"as planned": 1.0, "1/√2": 0.5**0.5, "half": 0.5, "a third": 1 / 3}


def trained(kind: str, count: int, updates: int, rate: float) -> dict[str, Any]:
    coins_of, training = PrivacySeed.draw(), PrivacySeed.draw()
    if kind == "white box":
        dirac = DiracCanaries.at_least(count)
        plan = audited_plan(dirac.count, EPSILON, DELTA, sampling_rate=rate, steps=updates)
        coins = throw_coins(coins_of, dirac.count)
        seen = white_box_observations(dirac, plan, coins, training, micro_rows=1024)
        # Only the sum is used; the choice of the score was fixed before the training.
        scores = white_box_scores(plan, seen)[:1]
    else:
        tokens = NewTokenCanaries(count)
        plan = audited_plan(tokens.units, EPSILON, DELTA, sampling_rate=rate, steps=updates)
        coins = throw_coins(coins_of, tokens.count)
        scores = [black_box_scores(tokens, plan, coins, training, micro_rows=256)]
    claim = Claim.of_event(plan.event(), plan.delta)
    verdict = audit_claim(claim, scores, coins, planned_guesses(len(coins), EPSILON), coins_of)
    return {
        "kind": kind,
        "canaries": verdict.outcome.canaries,
        "updates": updates,
        "sampling_rate": rate,
        "noise_multiplier": plan.noise_multiplier,
        "guesses": verdict.outcome.guesses,
        "right": verdict.outcome.right,
        "lower_bounds": verdict.lower_bounds,
        "power": verdict.power,
        "p_value": verdict.p_value,
        "null_alarms": verdict.null_alarms,
        "verdict": verdict.word,
    }


def power(canaries: int, inside: int, updates: int) -> dict[str, Any]:
    """Simulate sums of noised sums, with a fraction of the planned noise."""
    plan = audited_plan(canaries, EPSILON, DELTA, sampling_rate=RATE, steps=updates)
    curve, rng = PrivacyProfile.of_event(plan.event()), np.random.default_rng(0)
    guesses, sigma = Guesses(inside, 0), plan.noise_multiplier
    shares, known = {}, dict[int, bool]()
    for name, factor in NOISE.items():
        refuted = 0
        for _ in range(SIMULATED):
            coins = rng.random(canaries) < 0.5
            noise = rng.normal(0, factor * sigma * updates**0.5, canaries)
            right = guesses.right(rng.binomial(updates, RATE, canaries) * coins + noise, coins)
            if right not in known:
                known[right] = trade_off_refuted(
                    GuessOutcome(canaries, inside, right), curve, 0.001
                )
            refuted += known[right]
        shares[name] = refuted / SIMULATED
    return {
        "canaries": canaries,
        "guesses": inside,
        "updates": updates,
        "sampling_rate": RATE,
        "contradicted": shares,
    }


def null(canaries: int, trials: int = 1000) -> dict[str, Any]:
    """Count the bounds above 0, at 99.9%, on uninformative scores."""
    rng, alarms = np.random.default_rng(0), {}
    for bound in BOUNDS:
        fixed = scanned = 0
        for _ in range(trials):
            coins, scores = rng.random(canaries) < 0.5, rng.normal(size=canaries)
            guesses = Guesses(canaries // 10, canaries // 10)
            outcome = GuessOutcome(canaries, guesses.total, guesses.right(scores, coins))
            fixed += bound.refutes(outcome, 0.0, DELTA, 0.001)
            if bound.name != "Gaussian":
                right = surest_first(scores, coins)
                scanned += best_epsilon(bound, right, DELTA, 0.999) > 0
        alarms[bound.name] = {"fixed": fixed, "all thresholds": scanned}
    return {"canaries": canaries, "trials": trials, "alarms": alarms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--white", type=int, default=20_000)
    parser.add_argument("--black", type=int, default=4_000)
    parser.add_argument("--rate", type=float, default=RATE, help="sampling rate of trainings")
    parser.add_argument("--more", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {"epsilon": EPSILON, "delta": DELTA}
    if options.more:
        result = json.loads(RESULT.read_text())
    else:
        result["null"] = null(60)
        result["power"] = [
            power(m, inside, options.updates)
            for m, inside in ((4_096, 200), (20_736, 400), (20_736, 1_000))
        ]
        result["trainings"] = []
    for _ in range(options.repeats):
        for kind, count in (("white box", options.white), ("black box", options.black)):
            if not count:
                continue
            result["trainings"].append(trained(kind, count, options.updates, options.rate))
            print(json.dumps(result["trainings"][-1]), flush=True)
            RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
