"""The cost of privacy for an update of some parameters: LoRA and the other choices.

    python benchmarks/bench_adapters.py [--rounds N] [--models 4x256] [--kinds lora,all]

Writes benchmarks/results/adapters.json: per model and choice of trained parameters, the median
seconds of an ordinary and of a private update of the same parameters, interleaved in one run, their
ratio (median over rounds), the number of trained parameters, and the peak memory of the private
update. The ordinary update uses the same model, forward pass, optimizer and compiled graph, without
clipping.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from bench_clipping import ROOT, batch_of, processor, update
from cases import CASES, Case
from clocks import clocks
from memory import PeakMemory

import tensorflow as tf  # isort: skip - after bench_clipping, which sets environment variables

from dp_core.config.training import AdapterConfig
from dp_core.models.adapters import prepared, trained_names
from dp_core.models.config import BertConfig
from dp_core.models.parameters import fresh
from dp_core.privacy.execution_plan import Clipper
from dp_core.training.devices import strategy_for
from dp_core.training.trainer import AdamW, Trainer

RESULT = ROOT / "benchmarks" / "results" / "adapters.json"
KINDS = ("all", "lora", "biases-and-norms", "no-embeddings", "top-layer")
WARM_UP = 2


def trainer_of(kind: Any, c: Case, private: bool) -> Trainer:
    tf.config.experimental.enable_op_determinism()  # as in training
    config = BertConfig.of_size(vocab_size=c.words, hidden=c.hidden, layers=c.layers)
    adapters = AdapterConfig(trained_parameters=kind)
    start = prepared(fresh(config, 0), adapters, 0)
    return Trainer(
        strategy_for("cpu"),
        config,
        start.parameters,
        AdamW(0.9, 0.999, 0.01),
        Clipper(1.0) if private else None,
        trained=trained_names(start, adapters),
    )


def side_by_side(kind: str, c: Case, rounds: int) -> dict[str, Any]:
    """Alternate private and ordinary updates, so that other load on the machine affects both."""
    trainers = {private: trainer_of(kind, c, private) for private in (False, True)}
    batch = batch_of(c, c.units)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for t in range(rounds + WARM_UP):
        for private, trainer in trainers.items():
            start = clocks()
            update(trainer, batch, private, t)
            if t >= WARM_UP:
                seconds[private].append(float((clocks() - start)[0]))
    ratios = [p / o for p, o in zip(seconds[True], seconds[False], strict=True)]
    weights = trainers[True].weights()
    return {
        "trained_parameters": sum(weights[n].size for n in trainers[True].names),
        "ordinary_seconds": statistics.median(seconds[False]),
        "private_seconds": statistics.median(seconds[True]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def peak_memory(name: str, kind: str, private: bool) -> dict[str, float]:
    """Measure two updates in a separate process."""
    words = [name, kind, "private" if private else "ordinary"]
    answer = subprocess.run(
        [sys.executable, __file__, "--peak", *words], capture_output=True, text=True, check=True
    )
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def print_peak(name: str, kind: str, how: str) -> None:
    c, private = CASES[name], how == "private"
    trainer, batch = trainer_of(kind, c, private), batch_of(c, c.units)
    memory = PeakMemory()
    for t in range(2):
        update(trainer, batch, private, t)
    print(json.dumps(memory.figures()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default="2x128,4x256")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak", nargs=3, metavar=("MODEL", "KIND", "HOW"))
    options = parser.parse_args()
    if options.peak:
        print_peak(*options.peak)
        return
    about: dict[str, Any] = {
        "command": "python benchmarks/bench_adapters.py",
        "machine": {"cpus": os.cpu_count(), "processor": processor()},
        "tensorflow": tf.__version__,
        "rounds": options.rounds,
    }
    results: dict[str, Any] = {}
    for name in options.models.split(","):
        figures = results[name] = vars(CASES[name]) | {"load_before": os.getloadavg()[0]}
        for kind in options.kinds.split(","):
            figures[kind] = side_by_side(kind, CASES[name], options.rounds)
            gc.collect()  # trainers and their graphs refer to each other
            if not options.no_memory:
                for how, private in (("ordinary", False), ("private", True)):
                    figures[kind] |= {
                        f"{how}_{k}": v for k, v in peak_memory(name, kind, private).items()
                    }
            print(name, kind, json.dumps(figures[kind]), flush=True)
            RESULT.write_text(json.dumps(about | {"results": results}, indent=2) + "\n")
    print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
