"""What privacy costs a training step: engines side by side, interleaved in one run.

    make bench            (or: python benchmarks/bench_clipping.py [--rounds N] [--models 4x256])
    make bench-opacus     the same with Opacus' ghost clipping beside it

Writes benchmarks/results/clipping.json: per model and engine the median seconds of a step (wall
and CPU), the ratio to the non-private step of the same round (median over rounds), rows per second
and peak memory. `sum` is the gradient sum of one micro-batch; `update` is another one, plus noise
(where private) and AdamW: what a run pays when a batch is a single micro-batch; `accumulated` is an
update of eight of them, in fewer rounds.

The ordinary step is the same model, forward pass, optimizer and compiled graph, without clipping.
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

import dp_core  # noqa: F401 - before TensorFlow: it chooses whose products are used

# isort: split
import numpy as np
import tensorflow as tf
from cases import CASES, Case
from clocks import clocks
from memory import PeakMemory
from rich.console import Console
from rich.table import Table

from dp_core.models.config import BertConfig
from dp_core.models.parameters import fresh
from dp_core.privacy.clipping.reference import ENGINES
from dp_core.privacy.execution_plan import Clipper
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
tf.get_logger().setLevel("ERROR")  # it takes the trainers' first traces together for retracing
Figures = dict[str, float]


def trainer_of(engine: str, c: Case) -> Trainer:
    tf.config.experimental.enable_op_determinism()  # as training does
    config = BertConfig.of_size(vocab_size=c.words, hidden=c.hidden, layers=c.layers)
    return Trainer(
        strategy_for("cpu"),
        config,
        fresh(config, 0).parameters,
        AdamW(0.9, 0.999, 0.01),
        None if engine == ORDINARY else Clipper(1.0, engine=engine),
    )


def batch_of(c: Case, real: int) -> MicroBatch:
    """Return a batch of which the first `real` units are there, the others padding."""
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
    )


def update(
    trainer: Trainer, batch: MicroBatch, private: bool, t: int, micro_batches: int = 1
) -> None:
    noise = UpdateNoise(SEED, b"benchmark", t, 1.0, 1.0) if private else None
    for _ in range(micro_batches):
        trainer.add(batch)
    trainer.apply_update(step=t, learning_rate=1e-6, divisor=32.0, noise=noise)


def step(trainer: Trainer, batch: MicroBatch, private: bool, t: int) -> Figures:
    """Make a gradient sum, then a whole update; on a CPU, calls wait."""
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
    ratios = {e: np.divide(own, seconds[ORDINARY]) for e, own in seconds.items()}
    return {
        engine: {
            "accumulated_seconds": statistics.median(own),
            "accumulated_ratio": float(np.median(ratios[engine])),
        }
        for engine, own in seconds.items()
    }


def side_by_side(c: Case, engines: Sequence[str], rounds: int) -> dict[str, Figures]:
    """Alternate the engines with the ordinary step: what else the machine does hits both."""
    trainers = {engine: trainer_of(engine, c) for engine in (ORDINARY, *engines)}
    seconds: dict[str, list[Figures]] = {engine: [] for engine in trainers}
    for t in range(rounds + WARM_UP):
        batch = batch_of(c, c.units if t >= WARM_UP else t * c.units // 2)
        for engine, trainer in trainers.items():
            timed = step(trainer, batch, engine != ORDINARY, t)
            if t >= WARM_UP:
                seconds[engine].append(timed)
    out: dict[str, Figures] = {}
    for engine, own in seconds.items():
        out[engine] = {f"{k}_seconds": statistics.median(s[k] for s in own) for k in own[0]}
        out[engine]["rows_per_second"] = c.rows / out[engine]["update_seconds"]
        for kind in own[0]:
            pairs = zip(own, seconds[ORDINARY], strict=True)
            out[engine][f"{kind}_ratio"] = statistics.median(a[kind] / b[kind] for a, b in pairs)
        out[engine]["compilations"] = trainers[engine].compilations
    if FAST in trainers:
        own = accumulated(trainers, batch_of(c, c.units), max(2, rounds // 3))
        out = {engine: out[engine] | own[engine] for engine in trainers}
    return out


def peak_memory(name: str, engine: str) -> Figures:
    """Measure two updates in a process of their own."""
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
    """Return the figures of PyTorch's own step and of Opacus', from their environment."""

    def ask(*words: str) -> Any:
        command = [OPACUS, ROOT / "benchmarks" / "opacus_ghost.py", *words]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(answer.stdout.splitlines()[-1])

    out: dict[str, Figures] = ask("times", name, str(rounds))
    for engine, own in out.items():
        if with_memory:
            own.update(ask("peak", name, engine))
    return out


def measure(name: str, rounds: int, with_memory: bool) -> dict[str, Figures]:
    c = CASES[name]
    results = side_by_side(c, [FAST], rounds)
    for engine in SLOW:  # many times slower, so fewer rounds, each beside its own ordinary
        results[engine] = side_by_side(c, [engine], min(rounds, SLOW_ROUNDS))[engine]
        gc.collect()  # trainers and their graphs point at each other
    if with_memory:
        for engine, own in results.items():
            own.update(peak_memory(name, engine))
    if OPACUS.exists():
        results |= opacus(name, min(rounds, 3 * SLOW_ROUNDS), with_memory)
    else:
        print("Opacus is left out: no .venv/bench. `make bench-opacus` sets it up.", flush=True)
    if with_memory:
        for engine, own in results.items():
            base = results["pytorch non-private" if "opacus" in engine else ORDINARY]
            for field in ("peak", "step"):
                own[f"{field}_memory_ratio"] = own[f"{field}_mib"] / base[f"{field}_mib"]
    return results


def processor() -> str:
    """Return what the system calls its processor: ratios depend on its arithmetic and memory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name, family, model = (told.get(key, "?") for key in ("model name", "cpu family", "model"))
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
    for engine, own in results.items():
        cells = (f"{own[key]:.4g}" if key in own else "–" for key in columns)
        table.add_row(engine, *cells)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "ENGINE"))
    told = parser.parse_args()
    if told.peak:
        print_peak(*told.peak)
        return
    about: dict[str, Any] = {
        "command": "make bench",
        "machine": {"cpus": os.cpu_count(), "processor": processor()},
        "tensorflow": tf.__version__,
    }
    kept = json.loads(told.output.read_text()) if told.output.exists() else {}
    if any(kept.get(field) != value for field, value in about.items()):
        kept = {}  # another machine's: nothing to set beside this one's
    cases, results = kept.get("cases", {}), kept.get("results", {})
    told.output.parent.mkdir(exist_ok=True)
    for name in told.models.split(","):
        load = os.getloadavg()[0]
        results[name] = measure(name, told.rounds, not told.no_memory)
        show(name, results[name])
        loads = {"load_before": load, "load_after": os.getloadavg()[0]}
        cases[name] = vars(CASES[name]) | {"rounds": told.rounds} | loads
        record = about | {"cases": cases, "results": results}
        told.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written: {told.output}")


if __name__ == "__main__":
    main()
