"""What a point of a sweep takes beyond its steps' own work: four points of trivial size.

Takes more than two minutes, so `make bench` leaves it out:

    .venv/task/bin/python benchmarks/sweep_overhead.py

A step's own work is the `seconds` of its result; all else between its start and that of the next is
overhead. A sweep that is repeated finds everything done: then all of it is overhead, and is told in
seconds of processor too, which a busy machine does not change. Each with the fork server, and with
a process started anew for every step; writes benchmarks/results/sweeps.json.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from tasks.protocol import SweepSettings, sweep_steps
from tasks.protocol.fork_server import OFF, SERVER
from tasks.protocol.messages import Progress
from tasks.runtime.deployment import Deployment
from tasks.runtime.process import Job, run_job

RESULTS = Path(__file__).parent / "results" / "sweeps.json"
SETTINGS = SweepSettings(
    synthetic_patients=200, declared_units=240, words_per_unit=64, vocabulary_epsilon=8.0,
    vocabulary_size=400, layers=1, hidden=64, sequence_length=32, batch_size=32, epochs=0.5,
    public_steps=20, public_batch_size=8, max_examples_per_unit=2, finetune_epochs=1,
    canary_patterns="HS", canary_rates="0.2", canaries_per_group=2, delta=1e-6, device="cpu",
    sweep_noise_multipliers="1,2", sweep_batch_sizes="32,64", sweep_epochs="0.5",
)  # fmt: skip


def both() -> dict[str, Any]:
    """Return what the sweep takes, made and found, both ways."""
    found: dict[str, Any] = {}
    for name, server in (("anew", OFF), ("forked", "")):
        os.environ[SERVER] = server
        with tempfile.TemporaryDirectory() as folder:
            os.environ["CONFIDE_HOME"] = str(Path(folder) / "home")
            found[name] = {"made": measured(), "found": measured()}
    return {"load": round(os.getloadavg()[2], 1), "processors": os.cpu_count(), **found}


def measured() -> dict[str, Any]:
    """Return wall-clock and processor seconds of the sweep, and of a point beyond its work."""
    deployment = Deployment.from_environment()
    steps = sweep_steps(SETTINGS, deployment.store)
    started: dict[str, float] = {}

    def watch(name: str, progress: Progress) -> None:
        started.setdefault(name, time.monotonic())

    made = not any(Path(deployment.home).glob("store/sweep_report/*"))
    before, begun = _processor_seconds(), time.monotonic()
    finished = run_job(Job("dp_sweep", "benchmark", "benchmark", steps), deployment, watch)
    assert not finished.exit_code, finished.failed
    ended = time.monotonic()
    own = {n: result.seconds if made else 0.0 for n, result in finished.results.items()}
    moments = [*started.items(), ("", ended)]
    beyond = sum(
        after - start - own[name]
        for (name, start), (_, after) in itertools.pairwise(moments)
        if " · " in name
    )
    return {
        "steps": len(steps),
        "wall_seconds": round(ended - begun, 1),
        "processor_seconds": round(_processor_seconds() - before, 1),
        "seconds_inside_the_steps": round(sum(own.values()), 1),
        "seconds_of_a_point_beyond_its_steps_work": round(beyond / len(SETTINGS.points()), 2),
    }


def _processor_seconds() -> float:
    """Return what ended processes have taken: a fork server's steps are among its own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    results = both()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
