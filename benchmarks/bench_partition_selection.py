"""Items released by each mechanism of partition selection, at equal (ε, δ), unit and bound.

    python -m benchmarks.bench_partition_selection            # made-up text, and CONFIDE_DATA's
    python -m benchmarks.bench_partition_selection --seeds 1 --words-per-unit 1024

Corpora: `made-up`, sets of items by Zipf's law from the generator below; `pmc_rct_articles`, a unit
an article; `noteevents_format`, a unit a patient. Each with every word counted, and with the words
of `wikitext-2` taken as public: those are free, and left out. Also measured: how far the estimated
counts are from the true ones, and the seconds that aggregation and release take beside those that
`set_counts` and `release` of the plain histogram take.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import os
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from dp_core.data.privacy_units import Unit
from dp_core.data.tokens import split_words
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary.dp_histogram import set_counts
from dp_core.vocabulary.mechanism_choice import selection_plan
from dp_core.vocabulary.partition_selection import ItemSets, item_sets

RESULTS = Path(__file__).parent / "results" / "partition_selection.json"
MECHANISMS = ("gaussian", "weighted", "policy", "mad", "mad2r", "elimination")
EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-6
DECLARED = 6000
_KEY = b"benchmark"

Held = list[tuple[str, set[str]]]


def made_up(units: int = 5000, items: int = 200_000, seed: int = 0) -> Held:
    """Return sets of items: Zipf's law with exponent 1.1, log-normal lengths of about 250 words."""
    rng = np.random.default_rng(seed)
    mass = np.cumsum(1 / (np.arange(items) + 2.7) ** 1.1)
    lengths = rng.lognormal(5.5, 0.8, units).astype(int) + 5
    return [
        (str(u), {f"w{i}" for i in np.searchsorted(mass, rng.random(n) * mass[-1])})
        for u, n in enumerate(lengths)
    ]


def texts(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (unit, texts) of a corpus in CONFIDE_DATA."""
    if name == "pmc_rct_articles":
        with lzma.open(folder / name / "articles.jsonl.xz", "rt", encoding="utf-8") as file:
            for line in file:
                article = json.loads(line)
                yield article["doc_id"], [article["text"]]
        return
    csv.field_size_limit(1 << 30)
    by_patient: dict[str, list[str]] = {}
    path = folder / name / "NOTEEVENTS_derived.csv.xz"
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            by_patient.setdefault(row["SUBJECT_ID"], []).append(row["TEXT"])
    yield from by_patient.items()


def held_by(units: Iterable[tuple[str, list[str]]]) -> Held:
    """Return each unit's distinct words."""
    return [(unit, {w for text in mine for w in split_words(text)}) for unit, mine in units]


def public_words(folder: Path) -> set[str]:
    """Return the distinct words of wikitext-2."""
    with lzma.open(folder / "wikitext-2" / "train.txt.xz", "rt", encoding="utf-8") as file:
        return {word for line in file for word in split_words(line)}


def measured(
    shard: ItemSets,
    words: int,
    seeds: int,
    noted: dict[str, str | int],
    mechanisms: Iterable[str],
    epsilons: Iterable[float],
) -> list[dict]:
    """Return a row for each mechanism and ε."""
    true = dict(zip(shard.items, np.bincount(shard.members).tolist(), strict=True))
    rows = []
    for mechanism in mechanisms:
        for epsilon in epsilons:
            plan = selection_plan(mechanism, epsilon, DELTA, words, declared_units=DECLARED)
            released, errors, seconds = [], [], []
            for seed in range(seeds):
                start = time.process_time()
                out = plan.release([shard], PrivacySeed.fixed(seed), b"benchmark")
                seconds.append(time.process_time() - start)
                released.append(len(out))
                if out:
                    off = [abs(n / true[item] - 1) for item, n in out.items()]
                    errors.append(float(np.median(off)))
            row = noted | {
                "mechanism": mechanism,
                "epsilon": epsilon,
                "items_released": round(float(np.mean(released)), 1),
                "least_and_most": [min(released), max(released)],
                "median_error_of_counts": round(float(np.mean(errors)), 3) if errors else None,
                "release_seconds": round(min(seconds), 2),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def aggregation(units: list[tuple[str, list[str]]], words: int) -> dict[str, float]:
    """Return the seconds of processor that counting takes: plain, and as sets of items."""
    start = time.process_time()
    set_counts((Unit(u, mine) for u, mine in units), words, _KEY)
    plain = time.process_time() - start
    start = time.process_time()
    split = ((u, chain.from_iterable(map(split_words, mine))) for u, mine in units)
    item_sets(split, words, _KEY)
    sets = time.process_time() - start
    return {"set_counts_seconds": round(plain, 2), "item_sets_seconds": round(sets, 2)}


def main() -> None:
    """Measure, and write `results/partition_selection.json` (each bound N replaces its own)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--words-per-unit", type=int, default=128)
    parser.add_argument("--corpora", default="made-up,noteevents_format,pmc_rct_articles")
    parser.add_argument("--mechanisms", default=",".join(MECHANISMS))
    parser.add_argument("--epsilons", default=",".join(str(e) for e in EPSILONS))
    options = parser.parse_args()
    mechanisms = options.mechanisms.split(",")
    epsilons = [float(e) for e in options.epsilons.split(",")]
    data = os.environ.get("CONFIDE_DATA")
    folder = Path(data) if data else None
    public = public_words(folder) if folder else set()
    said = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "aggregation": []}
    words, names = options.words_per_unit, options.corpora.split(",")
    for name in names:
        if name != "made-up" and folder is None:
            continue
        if name == "made-up":
            held, free = made_up(), {f"w{i}" for i in range(1000)}
        else:
            assert folder is not None
            units = list(texts(name, folder))
            times = {"corpus": name, "words_per_unit": words, **aggregation(units, words)}
            said["aggregation"] = [
                r
                for r in said["aggregation"]
                if (r["corpus"], r["words_per_unit"]) != (name, words)
            ] + [times]
            held, free = held_by(units), public
        for excluded in (False, True):
            shard = item_sets(held, words, _KEY, exclude=free if excluded else frozenset())
            noted: dict[str, str | int] = {
                "corpus": name,
                "units": shard.units,
                "words_per_unit": words,
                "public_words": "left out" if excluded else "counted",
                "delta": DELTA,
                "seeds": options.seeds,
            }
            same = [noted[k] for k in ("corpus", "words_per_unit", "public_words")]
            said["rows"] = [
                r
                for r in said["rows"]
                if [r[k] for k in ("corpus", "words_per_unit", "public_words")] != same
            ] + measured(shard, words, options.seeds, noted, mechanisms, epsilons)
            RESULTS.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
