"""The cost of privacy for a training step: engines interleaved in one run.

    make bench            (or: python benchmarks/bench_clipping.py [--rounds N] [--models 4x256])
    make bench-opacus     the same, also with Opacus' ghost clipping

Writes benchmarks/results/clipping.json: per model and engine the median seconds of a step (wall and
CPU), the ratio to the non-private step of the same round (median over rounds), rows per second and
peak memory. `sum` is the gradient sum of one micro-batch. `update` is another gradient sum, plus
noise (if private) and AdamW: the cost of an update whose batch is a single micro-batch.
`accumulated` is an update of eight micro-batches, in fewer rounds.

The ordinary step uses the same model, forward pass, optimizer and compiled graph, without clipping.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import dp_core  # noqa: F401 - before TensorFlow, whose environment it sets

# isort: split
import numpy as np
import tensorflow as tf
from cases import CASES, Case
from clipping_reference import ENGINES, ReferenceClipper
from clocks import clocks
from memory import PeakMemory
from rich.console import Console
from rich.table import Table

from dp_core.models.config import BertConfig
from dp_core.models.parameters import fresh
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import MicroBatch
from dp_core.training.devices import strategy_for
from dp_core.training.trainer import AdamW, Trainer

RESULT = ROOT / "benchmarks" / "results" / "clipping.json"
ORDINARY, (FAST, *SLOW) = "non-private", ENGINES
OPACUS = ROOT / ".venv" / "bench" / "bin" / "python"
SEED = PrivacySeed.fixed(0)
WARM_UP, SLOW_ROUNDS = 2, 2
MICRO_BATCHES = 8  # of the `accumulated` update
# TensorFlow mistakes the first traces of several trainers for retracing
tf.get_logger().setLevel("ERROR")
Figures = dict[str, float]


def trainer_of(engine: str, c: Case) -> Trainer:
    tf.config.experimental.enable_op_determinism()  # as in training
    config = BertConfig.of_size(vocab_size=c.words, hidden=c.hidden, layers=c.layers)
    return Trainer(
        strategy_for("cpu"),
        config,
        fresh(config, 0).parameters,
        AdamW(0.9, 0.999, 0.01),
        None if engine == ORDINARY else ReferenceClipper(1.0, engine),
    )


def batch_of(c: Case, real: int) -> MicroBatch:
    """Return a batch whose first `real` units are real and whose other units are padding."""
    rng = np.random.default_rng(0)
    rows, places = (c.units, c.rows_per_unit), (c.units, c.rows_per_unit, c.predictions)
    shares = np.full(rows, 1 / c.rows_per_unit, np.float32)
    shares[real:] = 0
    return MicroBatch(
        rng.integers(0, c.words, (*rows, c.length)).astype(np.int32),
        np.full(rows, c.length, np.int32),
        rng.integers(0, c.length, places).astype(np.int32),
        rng.integers(0, c.words, places).astype(np.int32),
        np.ones(places, np.float32),
        shares,
        np.zeros(rows, np.uint32),
    )


def update(
    trainer: Trainer, batch: MicroBatch, private: bool, t: int, micro_batches: int = 1
) -> None:
    noise = UpdateNoise(SEED, b"benchmark", t, 1.0, 1.0) if private else None
    for _ in range(micro_batches):
        trainer.add(batch)
    trainer.apply_update(step=t, learning_rate=1e-6, divisor=32.0, noise=noise)


def step(trainer: Trainer, batch: MicroBatch, private: bool, t: int) -> Figures:
    """Time a gradient sum, then a whole update; on a CPU, calls are synchronous."""
    start = clocks()
    trainer.add(batch)
    between = clocks()
    update(trainer, batch, private, t)
    sum_, whole = between - start, clocks() - between
    return {"sum": sum_[0], "sum_cpu": sum_[1], "update": whole[0], "update_cpu": whole[1]}


def accumulated(
    trainers: Mapping[str, Trainer], batch: MicroBatch, rounds: int
) -> dict[str, Figures]:
    """Time updates of several micro-batches, the engines in turn."""
    seconds: dict[str, list[float]] = {engine: [] for engine in trainers}
    for t in range(rounds):
        for engine, trainer in trainers.items():
            start = clocks()
            update(trainer, batch, engine != ORDINARY, t, MICRO_BATCHES)
            seconds[engine].append((clocks() - start)[0])
    ratios = {e: np.divide(times, seconds[ORDINARY]) for e, times in seconds.items()}
    return {
        engine: {
            "accumulated_seconds": statistics.median(times),
            "accumulated_ratio": float(np.median(ratios[engine])),
        }
        for engine, times in seconds.items()
    }


def side_by_side(c: Case, engines: Sequence[str], rounds: int) -> dict[str, Figures]:
    """Alternate the engines with the ordinary step, so that other load affects both."""
    trainers = {engine: trainer_of(engine, c) for engine in (ORDINARY, *engines)}
    seconds: dict[str, list[Figures]] = {engine: [] for engine in trainers}
    for t in range(rounds + WARM_UP):
        batch = batch_of(c, c.units if t >= WARM_UP else t * c.units // 2)
        for engine, trainer in trainers.items():
            timed = step(trainer, batch, engine != ORDINARY, t)
            if t >= WARM_UP:
                seconds[engine].append(timed)
    out: dict[str, Figures] = {}
    for engine, figures in seconds.items():
        out[engine] = {f"{k}_seconds": statistics.median(s[k] for s in figures) for k in figures[0]}
        out[engine]["rows_per_second"] = c.rows / out[engine]["update_seconds"]
        for kind in figures[0]:
            pairs = zip(figures, seconds[ORDINARY], strict=True)
            out[engine][f"{kind}_ratio"] = statistics.median(a[kind] / b[kind] for a, b in pairs)
        out[engine]["compilations"] = trainers[engine]._add.experimental_get_tracing_count()
    if FAST in trainers:
        figures = accumulated(trainers, batch_of(c, c.units), max(2, rounds // 3))
        out = {engine: out[engine] | figures[engine] for engine in trainers}
    return out


def peak_memory(name: str, engine: str) -> Figures:
    """Measure two updates in a separate process."""
    answer = subprocess.run(
        [sys.executable, __file__, "--peak", name, engine],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def print_peak(name: str, engine: str) -> None:
    c = CASES[name]
    trainer, batch = trainer_of(engine, c), batch_of(c, c.units)
    memory = PeakMemory()
    for t in range(2):
        update(trainer, batch, engine != ORDINARY, t)
    print(json.dumps(memory.figures()))


def opacus(name: str, rounds: int, with_memory: bool) -> dict[str, Figures]:
    """Return the figures of PyTorch's ordinary step and of Opacus' step, from their environment."""

    def ask(*words: str) -> Any:
        command = [OPACUS, ROOT / "benchmarks" / "opacus_ghost.py", *words]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(answer.stdout.splitlines()[-1])

    out: dict[str, Figures] = ask("times", name, str(rounds))
    for engine, figures in out.items():
        if with_memory:
            figures.update(ask("peak", name, engine))
    return out


def measure(name: str, rounds: int, with_memory: bool) -> dict[str, Figures]:
    c = CASES[name]
    results = side_by_side(c, [FAST], rounds)
    for engine in SLOW:  # many times slower, so in fewer rounds, each with a separate ordinary step
        results[engine] = side_by_side(c, [engine], min(rounds, SLOW_ROUNDS))[engine]
        gc.collect()  # trainers and their graphs refer to each other
    if with_memory:
        for engine, figures in results.items():
            figures.update(peak_memory(name, engine))
    if OPACUS.exists():
        results |= opacus(name, min(rounds, 3 * SLOW_ROUNDS), with_memory)
    else:
        print(
            "Opacus is not measured: .venv/bench is missing. Run `make bench-opacus`.", flush=True
        )
    if with_memory:
        for engine, figures in results.items():
            base = results["pytorch non-private" if "opacus" in engine else ORDINARY]
            for field in ("peak", "step"):
                figures[f"{field}_memory_ratio"] = figures[f"{field}_mib"] / base[f"{field}_mib"]
    return results


def processor() -> str:
    """Return the processor's name; ratios depend on its arithmetic and memory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    name, family, model = (fields.get(key, "?") for key in ("model name", "cpu family", "model"))
    return f"{platform.machine()}, {name}, family {family}, model {model}"


def show(name: str, results: dict[str, Figures]) -> None:
    columns = {
        "sum_ratio": "sum ×",
        "update_ratio": "update ×",
        "accumulated_ratio": f"of {MICRO_BATCHES} ×",
        "update_cpu_ratio": "CPU ×",
        "update_seconds": "seconds",
        "rows_per_second": "rows/s",
        "peak_mib": "peak MiB",
        "peak_memory_ratio": "peak ×",
        "step_memory_ratio": "step's memory ×",
        "compilations": "compilations",
    }
    table = Table("engine", *columns.values(), title=name)
    for engine, figures in results.items():
        cells = (f"{figures[key]:.4g}" if key in figures else "–" for key in columns)
        table.add_row(engine, *cells)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "ENGINE"))
    options = parser.parse_args()
    if options.peak:
        print_peak(*options.peak)
        return
    about: dict[str, Any] = {
        "command": "make bench",
        "machine": {"cpus": os.cpu_count(), "processor": processor()},
        "tensorflow": tf.__version__,
    }
    kept = json.loads(options.output.read_text()) if options.output.exists() else {}
    if any(kept.get(field) != value for field, value in about.items()):
        kept = {}  # results of another machine are not comparable
    cases, results = kept.get("cases", {}), kept.get("results", {})
    options.output.parent.mkdir(exist_ok=True)
    for name in options.models.split(","):
        load = os.getloadavg()[0]
        results[name] = measure(name, options.rounds, not options.no_memory)
        show(name, results[name])
        loads = {"load_before": load, "load_after": os.getloadavg()[0]}
        cases[name] = vars(CASES[name]) | {"rounds": options.rounds} | loads
        record = about | {"cases": cases, "results": results}
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
