"""What training on several hosts costs, with processes of this machine for hosts, in one run.

    make bench        (or: python benchmarks/bench_hosts.py [--hosts 1,2,4] [--model 2x128])

Writes benchmarks/results/hosts.json. First, on its own, what an update sends: weights down the
chain and sums up, against one all-reduce of the same size by MultiWorkerMirroredStrategy, in turn.
Then seconds of an update of one batch on 1, 2 and 4 hosts, all on the same cores: they can only
share the work, so what is above the time of one host is what several cost. Last, a helper is
killed, and the seconds are counted until the first host knows.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from dp_core.training.hosts import Helper, Hosts, help_train
from dp_core.training.links import connect

from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.errors import ConfideError
from dp_core.models.config import BertConfig
from dp_core.models.parameters import parameter_shapes
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import PrivateUpdates, pretrain

RESULT = ROOT / "benchmarks" / "results" / "hosts.json"
WORDS, LENGTH, UNITS, BATCH, UPDATES, ROUNDS = 8192, 64, 512, 128, 5, 5
PIECE = 1 << 18  # values of an array of the sums that are only sent


def link(end: socket.socket, secret: str, number: int, *, called: bool) -> Any:
    """Return a link of host `number`: to the one behind it, which called, or to the one before."""
    other = number + 1 if called else number - 1
    told = {"tell": {"host": number}, "expect": {"host": other}}
    return connect(end, secret.encode(), called=called, patience=600.0, **told)


@contextmanager
def hosts_of(count: int, task: str, rows: dict[str, str]) -> Iterator[tuple[Any, list[Any]]]:
    """Give the hosts of a training, and their processes."""
    if count == 1:
        yield None, []
        return
    secret, pairs = secrets.token_hex(32), [socket.socketpair() for _ in range(count - 1)]
    processes = []
    threads = {"TF_NUM_INTRAOP_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    for number in range(1, count):
        ends = [pairs[number - 1][1]] + ([pairs[number][0]] if number < count - 1 else [])
        words = [task, number, count, secret, *(end.fileno() for end in ends)]
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, "--helper", *map(str, words)],
                pass_fds=[end.fileno() for end in ends],
                env=os.environ | threads,
            )
        )
    for pair in pairs[1:]:
        pair[0].close()
    for _, end in pairs:
        end.close()
    hosts = Hosts(count, link(pairs[0][0], secret, 0, called=True), rows)
    try:
        yield hosts, processes
    finally:
        hosts.end()
        for process in processes:
            process.kill()
            process.wait()


def help_one(task: str, number: str, count: str, secret: str, *ends: str) -> None:
    """Be a helper."""
    sockets = [socket.socket(fileno=int(end)) for end in ends]
    links = [
        link(end, secret, int(number), called=called)
        for end, called in zip(sockets, (False, True), strict=False)
    ]
    helper = Helper(int(number), int(count), links[0], links[1] if len(links) > 1 else None)
    if task == "train":
        help_train(helper, lambda rows: TokenStore.open(rows["folder"]))
        return
    with suppress(ConfideError):
        while (told := helper.weights(0)) is not None:
            helper.send_sums(0, told[1], np.zeros(4))


def sent(count: int, values: int) -> float:
    """Return seconds, at best, of sending so many weights down and as many sums up."""
    arrays = [np.ones(min(PIECE, values - i), np.float32) for i in range(0, values, PIECE)]
    times = []
    with hosts_of(count, "send", {}) as (hosts, _):
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            hosts.start_update(0, 1.0, arrays)
            totals, _ = hosts.add_up(0, arrays)
            times.append(time.perf_counter() - begun)
            assert all((total == count).all() for total in totals)
    return min(times)


def all_reduced(count: int, values: int) -> float:
    """Return seconds, at best, of one all-reduce of so many values by TensorFlow's strategy."""
    ports = []
    for _ in range(count):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--collective", str(number), str(values)],
            env=os.environ
            | {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
                        "task": {"type": "worker", "index": number},
                    }
                )
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for number in range(count)
    ]
    told = [process.communicate()[0] for process in processes]
    return float(told[0].split()[-1])


def collective(number: str, values: str) -> None:
    """Be a worker of MultiWorkerMirroredStrategy, and say how long an all-reduce takes."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = tf.Variable(
            np.ones(int(values), np.float32),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    reduce = tf.function(lambda: tf.identity(strategy.reduce("SUM", total, axis=None)))
    reduce()
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        reduce().numpy()
        times.append(time.perf_counter() - begun)
    print(min(times), flush=True)
    time.sleep(1.0)  # who leaves first makes the others fail


def updated(count: int, config: BertConfig, store: TokenStore, folder: Path) -> list[float]:
    """Return seconds of each update but the first two, which compile."""
    plan = ExecutionPlan.poisson(
        unit="document", declared_units=UNITS, expected_batch=BATCH, steps=UPDATES,
        noise_multiplier=1.0, clip_norm=1.0, delta=1e-9,
    )  # fmt: skip
    times: list[float] = []
    with hosts_of(count, "train", {"folder": str(folder / "rows")}) as (hosts, _):
        pretrain(
            model=config, store=store, config=TrainingConfig(micro_rows=16),
            updates=PrivateUpdates(plan, PrivacySeed.fixed(0), b"benchmark"), init_seed=0,
            checkpoints=LocalFolder(folder / f"kept-{count}"), device="cpu", hosts=hosts,
            progress=lambda now: times.append(time.perf_counter()),
        )  # fmt: skip
    return np.diff(times[1:]).tolist()


def noticed() -> float:
    """Return seconds from a helper's death to the first host's error."""
    with hosts_of(3, "send", {}) as (hosts, processes):
        hosts.start_update(0, 1.0, [np.ones(9, np.float32)])
        hosts.add_up(0, [np.ones(9, np.float32)])
        begun = time.perf_counter()
        processes[-1].kill()
        while time.perf_counter() - begun < 60:
            try:
                hosts.check()
            except ConfideError:
                return time.perf_counter() - begun
            time.sleep(0.001)
    raise SystemExit("nobody noticed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", default="1,2,4")
    parser.add_argument("--model", default="2x128", help="layers x hidden")
    parser.add_argument("--helper", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--collective", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULT)
    told = parser.parse_args()
    if told.helper:
        return help_one(*told.helper)
    if told.collective:
        return collective(*told.collective)
    layers, hidden = map(int, told.model.split("x"))
    counts = [int(word) for word in told.hosts.split(",")]
    config = BertConfig.of_size(vocab_size=WORDS, hidden=hidden, layers=layers)
    values = sum(int(np.prod(shape)) for shape in parameter_shapes(config).values())
    several = [count for count in counts if count > 1]
    chain = {count: sent(count, values) for count in several}
    theirs = {count: all_reduced(count, values) for count in several}
    with tempfile.TemporaryDirectory() as name:
        writer = TokenStoreWriter(Path(name) / "rows", LENGTH, WORDS)
        rng = np.random.default_rng(0)
        for unit in range(UNITS):
            writer.add_unit(str(unit), [[2, *rng.integers(6, WORDS, LENGTH - 2).tolist(), 3]])
        store = writer.finish()
        updates = {count: updated(count, config, store, Path(name)) for count in counts}
    result = {
        "model": told.model,
        "values": values,
        "bytes_each_way_on_a_link": 4 * values,
        "batch": BATCH,
        "row_length": LENGTH,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "seconds_down_and_up": {str(n): round(s, 4) for n, s in chain.items()},
        "seconds_of_an_all_reduce_by_tensorflow": {str(n): round(s, 4) for n, s in theirs.items()},
        "seconds_of_an_update": {
            str(n): {"median": round(float(np.median(s)), 3), "best": round(min(s), 3)}
            for n, s in updates.items()
        },
        "seconds_until_a_death_is_noticed": round(noticed(), 4),
    }
    told.output.parent.mkdir(parents=True, exist_ok=True)
    told.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return None


if __name__ == "__main__":
    main()
