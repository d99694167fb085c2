"""The speed of making rows compared with the speed of training on them, in one run.

    make bench        (or: python benchmarks/bench_feeding.py [--rows N] [--model 4x256])

Writes benchmarks/results/feeding.json: rows per second of each feeder on one core (Poisson sampling
of units, choosing and masking rows, packing micro-batches), rows per second of the private trainer
on the whole machine, their ratio, and the feeder's peak memory on a corpus and on a corpus eight
times as large. Feeder and trainer alternate, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from clocks import clocks

from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.models.config import BertConfig
from dp_core.models.parameters import fresh
from dp_core.privacy.execution_plan import Clipper, ExecutionPlan
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import Batches, masked_examples
from dp_core.training.devices import strategy_for
from dp_core.training.loop import PrivateUpdates
from dp_core.training.trainer import AdamW, Trainer

RESULT = ROOT / "benchmarks" / "results" / "feeding.json"
SEED, MANIFEST = PrivacySeed.fixed(0), b"benchmark"
WORDS, LENGTH, MICRO, BATCH = 8192, 128, 32, 2048
ROUNDS = 5


def corpus(folder: Path, rows: int) -> TokenStore:
    """Write units of four random rows each."""
    rng = np.random.default_rng(0)
    writer = TokenStoreWriter(folder, LENGTH, WORDS)
    for unit in range(rows // 4):
        ids = rng.integers(5, WORDS, (4, LENGTH))
        ids[:, 0], ids[:, -1] = 2, 3
        writer.add_unit(str(unit), ids.tolist())
    return writer.finish()


def plan_for(store: TokenStore) -> ExecutionPlan:
    return ExecutionPlan.poisson(
        unit="document",
        declared_units=store.n_units,
        expected_batch=BATCH,
        steps=ROUNDS + 1,
        noise_multiplier=1.0,
        clip_norm=1.0,
        delta=1e-9,
    )


def batches(store: TokenStore, continuation: np.ndarray | None = None) -> Batches:
    """Return Poisson-sampled units with masked rows."""
    updates = PrivateUpdates(plan_for(store), SEED, MANIFEST)
    examples = partial(masked_examples, continuation=continuation)
    return Batches(store, updates.sampler(store), updates.rows(MICRO, devices=1), examples)


def feeders(store: TokenStore) -> dict[str, Batches]:
    """Return micro-batches of masked tokens, and of masked words with a third of continuations."""
    return {"pieces": batches(store), "whole words": batches(store, np.arange(WORDS) % 3 == 0)}


def fed(source: Batches, t: int) -> np.ndarray:
    """Return the rows per second of making update t, by wall time and by processor time."""
    start, rows = clocks(), 0
    for batch in source.micro_batches(t):
        rows += int((batch.shares > 0).sum())
    return rows / (clocks() - start)


def trained(trainer: Trainer, source: Batches, t: int) -> np.ndarray:
    """Return the rows per second of one private update of a few micro-batches, as `fed` does."""
    batches = list(itertools.islice(source.micro_batches(t), 3))
    start = clocks()
    for batch in batches:
        trainer.add(batch)
    noise = UpdateNoise(SEED, MANIFEST, t, 1.0, 1.0)
    trainer.apply_update(step=t, learning_rate=1e-6, divisor=BATCH, noise=noise)
    return len(batches) * MICRO / (clocks() - start)


def peak(folder: Path) -> float:
    """Return the peak MiB of Python and NumPy while opening a corpus and making one batch."""
    tracemalloc.start()
    store = TokenStore.open(folder)
    for _ in batches(store).micro_batches(0):
        pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / 2**20


def middle(values: list[np.ndarray]) -> list[float]:
    """Return the medians of (wall, processor)."""
    return [round(float(x), 1) for x in np.median(values, axis=0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=40_000, help="rows of the smaller corpus")
    parser.add_argument("--model", default="4x256", help="layers x hidden")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    layers, hidden = map(int, options.model.split("x"))
    config = BertConfig.of_size(vocab_size=WORDS, hidden=hidden, layers=layers)
    trainer = Trainer(
        strategy_for("cpu"),
        config,
        fresh(config, 0).parameters,
        AdamW(0.9, 0.98, 0.01),
        Clipper(1.0),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = corpus(folder / "one", options.rows)
        corpus(folder / "eight", 8 * options.rows)
        sources = feeders(store)
        speeds: dict[str, list[np.ndarray]] = {name: [] for name in ("trainer", *sources)}
        for t in range(ROUNDS + 1):
            speed = {"trainer": trained(trainer, sources["pieces"], t)}
            speed |= {name: fed(source, t) for name, source in sources.items()}
            for name, value in speed.items() if t else ():  # the first round compiles
                speeds[name].append(value)
        memory = {size: peak(folder / size) for size in ("one", "eight")}
    cores = os.cpu_count() or 1
    # The trainer may use every core and a feeder only one; on an idle machine both ratios agree.
    everything = np.array([1.0, cores])
    result = {
        "model": options.model,
        "rows": {"one": options.rows, "eight": 8 * options.rows},
        "cores": cores,
        "load": os.getloadavg()[0],
        "rows_per_second": {name: middle(values)[0] for name, values in speeds.items()},
        "rows_per_cpu_second": {name: middle(values)[1] for name, values in speeds.items()},
        "times_the_trainer": {
            name: dict(
                zip(
                    ("wall", "cpu"),
                    middle(
                        [f / (m * everything) for f, m in zip(v, speeds["trainer"], strict=True)]
                    ),
                    strict=True,
                )
            )
            for name, v in speeds.items()
            if name != "trainer"
        },
        "peak_memory_mib": {size: round(value, 2) for size, value in memory.items()},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
