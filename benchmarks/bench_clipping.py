"""What privacy costs a training step: engines side by side, interleaved in one run.

    make bench        (or: python benchmarks/bench_clipping.py [--rounds N] [--models 4x256,12x768])

Writes benchmarks/results/clipping.json: per model and engine the median seconds of a step (wall
and CPU), the ratio to the non-private step of the same round (median over rounds), rows per second
and peak memory. `sum` is the gradient sum of one micro-batch; `update` is that, plus noise (where
private) and AdamW: what a run pays when a batch is a single micro-batch.

The non-private step is the same model, forward pass, optimizer and compiled graph, without taps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from dp_core.bert.config import BertConfig  # noqa: E402
from dp_core.bert.parameters import fresh  # noqa: E402
from dp_core.privacy.seeds import PrivacySeed  # noqa: E402
from dp_core.training.adamw import AdamW  # noqa: E402
from dp_core.training.devices import strategy_for  # noqa: E402
from dp_core.training.rows import MicroBatch  # noqa: E402
from dp_core.training.trainer import Clipping, Trainer  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "clipping.json"
PRIVATE, ORDINARY = "book-keeping", "non-private"
SEED = PrivacySeed.fixed(0)


@dataclass(frozen=True)
class Case:
    """A model and a micro-batch."""

    config: BertConfig
    units: int
    rows_per_unit: int
    length: int
    predictions: int

    @property
    def rows(self) -> int:
        return self.units * self.rows_per_unit


def case(layers: int, hidden: int, words: int, units: int, rows: int, length: int, k: int) -> Case:
    config = BertConfig.of_size(vocab_size=words, hidden=hidden, layers=layers)
    return Case(config, units, rows, length, k)


CASES = {
    "2x128": case(2, 128, 4096, 32, 2, 64, 10),  # the demo's
    "4x256": case(4, 256, 8192, 32, 1, 128, 20),
    "12x768": case(12, 768, 30522, 4, 1, 128, 20),
}


def trainer_of(engine: str, config: BertConfig) -> Trainer:
    clipping = Clipping(1.0, 1.0) if engine == PRIVATE else None
    parameters = fresh(config, 0).parameters
    return Trainer(strategy_for("cpu"), config, parameters, AdamW(0.9, 0.999, 0.01), clipping)


def batch_of(c: Case) -> MicroBatch:
    rng = np.random.default_rng(0)
    rows, places = (c.units, c.rows_per_unit), (c.units, c.rows_per_unit, c.predictions)
    return MicroBatch(
        rng.integers(0, c.config.vocab_size, (*rows, c.length)).astype(np.int32),
        np.full(rows, c.length, np.int32),
        rng.integers(0, c.length, places).astype(np.int32),
        rng.integers(0, c.config.vocab_size, places).astype(np.int32),
        np.ones(places, np.float32),
        np.full(rows, 1 / c.rows_per_unit, np.float32),
    )


def step(trainer: Trainer, batch: MicroBatch, private: bool, t: int) -> dict[str, float]:
    """Make one update; return wall and CPU seconds of its two halves (on a CPU, calls wait)."""
    keys = trainer.noise.keys(SEED, b"benchmark", t, 1) if private else None
    at = [(time.perf_counter(), time.process_time())]
    trainer.add(batch)
    at.append((time.perf_counter(), time.process_time()))
    trainer.move(t=t, rate=1e-6, divisor=32.0, keys=keys)
    at.append((time.perf_counter(), time.process_time()))
    return {
        "sum": at[1][0] - at[0][0],
        "sum_cpu": at[1][1] - at[0][1],
        "update": at[2][0] - at[0][0],
        "update_cpu": at[2][1] - at[0][1],
    }


def side_by_side(c: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Alternate the engines, so that whatever else the machine does hits both."""
    batch = batch_of(c)
    trainers = {engine: trainer_of(engine, c.config) for engine in (ORDINARY, PRIVATE)}
    seconds: dict[str, list[dict[str, float]]] = {engine: [] for engine in trainers}
    for t in range(rounds + 2):
        for engine, trainer in trainers.items():
            timed = step(trainer, batch, engine == PRIVATE, t)
            if t >= 2:  # the first trace and warm up
                seconds[engine].append(timed)
    out: dict[str, dict[str, float]] = {}
    for engine, own in seconds.items():
        out[engine] = {f"{k}_seconds": statistics.median(s[k] for s in own) for k in own[0]}
        out[engine]["rows_per_second"] = c.rows / out[engine]["update_seconds"]
        for kind in own[0]:
            pairs = zip(own, seconds[ORDINARY], strict=True)
            out[engine][f"{kind}_ratio"] = statistics.median(a[kind] / b[kind] for a, b in pairs)
        traces = trainers[engine]._add.experimental_get_tracing_count()
        out[engine]["compilations"] = traces
    return out


def peak_memory(name: str, engine: str) -> float:
    """Return the peak resident memory, in MiB, of a process that makes three updates."""
    command = [sys.executable, __file__, "--peak", name, engine]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(output.split()[-1])


def print_peak(name: str, engine: str) -> None:
    c = CASES[name]
    trainer, batch = trainer_of(engine, c.config), batch_of(c)
    for t in range(3):
        step(trainer, batch, engine == PRIVATE, t)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", default="2x128,4x256,12x768")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "ENGINE"))
    told = parser.parse_args()
    if told.peak:
        print_peak(*told.peak)
        return
    results = {}
    for name in told.models.split(","):
        results[name] = side_by_side(CASES[name], told.rounds)
        for engine, own in results[name].items():
            if not told.no_memory:
                own["peak_mib"] = peak_memory(name, engine)
                own["peak_ratio"] = own["peak_mib"] / results[name][ORDINARY]["peak_mib"]
            figures = ", ".join(f"{k} {v:.4g}" for k, v in own.items())
            print(f"{name} {engine}: {figures}", flush=True)
    about = {
        "command": "make bench",
        "rounds": told.rounds,
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine()},
        "load_before": os.getloadavg()[0],
        "tensorflow": tf.__version__,
        "cases": {n: {"rows": CASES[n].rows, "length": CASES[n].length} for n in results},
        "results": results,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(about, indent=2) + "\n")
    print(f"written: {RESULT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
