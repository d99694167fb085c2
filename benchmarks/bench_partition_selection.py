"""Mechanisms of partition selection compared at equal (ε, δ), unit and bound.

    python -m benchmarks.bench_partition_selection             # all parts; uses CONFIDE_DATA if set
    python -m benchmarks.bench_partition_selection planted

`released`: the number of released items and the error of their estimated counts, on made-up sets of
items (`made_up`; the 1,000 most common items are counted, or excluded as public) and on 4.2 million
words of `pmc_rct_articles` in tuples of 256, with the unit `example`. Existing rows are kept.
`planted`: the rate at which items of a single unit are released, compared with δ. `throughput`:
counting and release compared with plain counts, in turns within one process; only the ratios of
these times are meaningful. Vocabularies from released words are measured by `bench_vocabulary.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.selection_mechanisms import comparison_plan
from benchmarks.vocabulary_corpora import document_counts, item_sets, made_up, tuples, units
from dp_core.data.privacy_units import Unit
from dp_core.data.tokens import split_words
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary.item_sets import ItemSets
from dp_core.vocabulary.partition_selection import PartitionSelection
from dp_core.vocabulary.selection_calibration import paper_parameters

RESULTS = ROOT / "benchmarks" / "results" / "partition_selection.json"
MECHANISMS = (
    "elimination", "policy", "weighted", "gaussian", "mad2r", "mad",
)  # fmt: skip
EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-6
_KEY = b"benchmark"
TUPLES = "4.2M words in tuples of 256"
_CORPORA = ((TUPLES, "counted"), ("made-up", "counted"), ("made-up", "left out"))

Named = tuple[str, str, str, float]  # corpus, public items, mechanism, ε


# --- released items


def released(seeds: int, folder: Path | None, there: set[Named]) -> Iterator[dict[str, Any]]:
    """Yield a row for each corpus, mechanism and ε that is not in `there`."""
    wanted = [(m, e) for m in MECHANISMS for e in EPSILONS]
    for corpus, public_items in _CORPORA:
        missing = [w for w in wanted if (corpus, public_items, *w) not in there]
        if not missing or (corpus == TUPLES and folder is None):
            continue
        if corpus == TUPLES:
            assert folder is not None
            declared = 20_000
            shard = item_sets(tuples(units("pmc_rct_articles", folder), 256, 4_200_000), 256, _KEY)
        else:
            declared = 6000
            free = {f"w{i}" for i in range(1000)} if public_items == "left out" else set[str]()
            shard = item_sets(made_up(), 128, _KEY, exclude=free)
        true = dict(zip(shard.items, np.bincount(shard.members).tolist(), strict=True))
        for mechanism, epsilon in missing:
            plan = comparison_plan(
                mechanism, epsilon, DELTA, shard.items_per_unit, declared_units=declared
            )
            outs = [plan.release([shard], PrivacySeed.fixed(s), _KEY) for s in range(seeds)]
            off = [np.median([abs(n / true[i] - 1) for i, n in out.items()]) for out in outs if out]
            yield {
                "corpus": corpus,
                "public_items": public_items,
                "units": shard.units,
                "items_per_unit": shard.items_per_unit,
                "declared_units": declared,
                "delta": DELTA,
                "mechanism": mechanism,
                "epsilon": epsilon,
                "releases": seeds,
                "items_released": round(float(np.mean([len(out) for out in outs])), 1),
                "least_and_most": [min(map(len, outs)), max(map(len, outs))],
                "median_error_of_counts": round(float(np.mean(off)), 3) if off else None,
            }


# --- planted items


def planted(
    epsilon: float = 3.0, delta: float = 0.002, n: int = 16, draws: int = 10_000
) -> Iterator[dict[str, Any]]:
    """Yield the rate at which items that no other unit holds reveal a unit, compared with δ.

    δ is large so that some thousands of draws suffice. Each unit holds one unique item, or N,
    whichever is released more often. Every release has 400 such units, and the number of releases
    follows from the draws; a unit counts once.
    """
    in_one = 400
    for mechanism in MECHANISMS:
        plan = comparison_plan(mechanism, epsilon, delta, n, declared_units=in_one)
        given = 0
        for unique in (1, n):
            held = [(str(u), [f"{u} {i}" for i in range(unique)]) for u in range(in_one)]
            shard = item_sets(held, n, _KEY)
            outs = (
                plan.release([shard], PrivacySeed.fixed(s), _KEY) for s in range(draws // in_one)
            )
            given = max(given, sum(len({item.split()[0] for item in out}) for out in outs))
        yield _judged(mechanism, n, epsilon, delta, draws, given)
    # Hoory et al.'s formulas at the same δ and N, and with the paper's figures: N = 256, δ = 1e-9.
    for sigma, claimed, words, many in ((20.0, delta, n, draws), (200.0, 1e-9, 256, 40_000)):
        paper = paper_parameters(sigma, claimed, words)
        given = _given_by_counts(paper.plan(), words, many)
        name = f"the paper's σ = {sigma:g}, C = {paper.threshold:.1f}"
        row = _judged(name, words, paper.epsilon, claimed, many, given)
        yield row | {"true_delta": paper.plan().delta}


def _given_by_counts(plan: PartitionSelection, words: int, draws: int) -> int:
    """Return the number of units, each with N unique words, that a histogram reveals."""
    in_one = 1000
    given = 0
    for s in range(draws // in_one):
        held = [(str(u), [f"{u} {i}" for i in range(words)]) for u in range(in_one)]
        out = plan.release([item_sets(held, words, _KEY)], PrivacySeed.fixed(s), _KEY)
        given += len({item.split()[0] for item in out})
    return given


def _judged(
    name: str, n: int, epsilon: float, delta: float, draws: int, given: int
) -> dict[str, Any]:
    test = binomtest(given, draws, delta, alternative="greater")
    return {
        "mechanism": name,
        "items_per_unit": n,
        "epsilon": round(epsilon, 4),
        "delta": delta,
        "draws": draws,
        "given_away": given,
        "at_most": round(delta * draws, 5),
        "least_rate_95": float(f"{test.proportion_ci(0.95).low:.3g}"),  # exact (Clopper-Pearson)
        "p_value": float(f"{test.pvalue:.3g}"),
    }


# --- throughput


def throughput(folder: Path, turns: int = 3) -> Iterator[dict[str, Any]]:
    """Yield megabytes and units per second of counting, and the seconds of each release."""
    n, key = 512, _KEY
    for name in ("noteevents_format",):
        corpus = units(name, folder)
        megabytes = sum(len(t.encode()) for u in corpus for t in u.texts) / 1e6

        def sets(corpus: list[Unit] = corpus) -> ItemSets:
            return item_sets(
                ((u.unit_id, chain.from_iterable(map(split_words, u.texts))) for u in corpus),
                n,
                key,
            )

        shard = sets()
        ways: dict[str, Callable[[], Any]] = {
            "split only": lambda corpus=corpus: [split_words(t) for u in corpus for t in u.texts],
            "plain counts": lambda corpus=corpus: document_counts(corpus, split_words),
            "sets of items": sets,
        }
        for mechanism in MECHANISMS:
            plan = comparison_plan(mechanism, 3.0, DELTA, n, declared_units=1200)
            ways[f"release: {mechanism}"] = lambda plan=plan, shard=shard: plan.release(
                [shard], PrivacySeed.fixed(0), key
            )
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(turns):
            for way, run in ways.items():
                begun = time.process_time()
                run()
                best[way] = min(best[way], time.process_time() - begun)
        for way, seconds in best.items():
            yield {
                "corpus": name,
                "what": way,
                "processor_seconds": round(seconds, 3),
                "megabytes_a_second": round(megabytes / seconds, 1),
                "units_a_second": round(len(corpus) / seconds),
                "times_plain_counts": round(seconds / best["plain counts"], 2),
            }


def main() -> None:
    """Run the measurements; every row is written to `results/partition_selection.json` at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("released", "planted", "throughput")
    parser.add_argument(
        "part", nargs="?", choices=parts, help="the part to measure; all by default"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of releases per row of `released`"
    )
    options = parser.parse_args()
    data = os.environ.get("CONFIDE_DATA")
    folder = Path(data) if data else None
    for part in parts:
        if options.part not in (None, part) or (part == "throughput" and folder is None):
            continue
        rows = _known().get(part, []) if part == "released" else []
        measured: Iterator[dict[str, Any]]
        if part == "released":
            there = {(r["corpus"], r["public_items"], r["mechanism"], r["epsilon"]) for r in rows}
            measured = released(options.seeds, folder, there)
        elif part == "planted":
            measured = planted()
        else:
            assert folder is not None
            measured = throughput(folder)
        for row in measured:
            rows.append(row)
            print(part, json.dumps(row, ensure_ascii=False), file=sys.stderr, flush=True)
            results = _known() | {part: rows}
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def _known() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


if __name__ == "__main__":
    main()
