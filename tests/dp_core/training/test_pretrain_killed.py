import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SCRIPT = """
    import hashlib, json, os, signal, sys, traceback
    from pathlib import Path
    from dp_core.config.training import TrainingConfig
    from dp_core.data.token_store import TokenStoreWriter
    from dp_core.models.config import BertConfig
    from dp_core.models.parameters import fresh
    from dp_core.privacy.execution_plan import AdaptiveClipping, ExecutionPlan
    from dp_core.privacy.seed_store import PrivacySeed
    from dp_core.training import checkpoints, loop
    from dp_core.training.objectives import objective_for
    from dp_core.training.trainer import Trainer

    folder = Path(sys.argv[1])

    def dying(owner, attribute, when, *, halve=False):
        original, calls = getattr(owner, attribute), 0

        def die(*arguments, **named):
            nonlocal calls
            calls += 1
            if calls == when:
                if halve:  # a file of which half is on disk
                    original(*arguments, **named)
                    os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        setattr(owner, attribute, die)

    def train(name, place, when):
        match place:
            case "before the weights move": dying(Trainer, "apply_update", when)
            case "half a checkpoint": dying(checkpoints, "save_file", when, halve=True)
            case "before its name": dying(checkpoints, "_sync", when)
            case "before the old one goes": dying(checkpoints.Checkpoints, "_drop", when)

        writer = TokenStoreWriter(folder / f"store-{name}", 8, 20)
        for unit in range(12):
            writer.add_unit(str(unit), [[2, 5 + unit % 9, 6 + unit % 7, 7, 3]] * 2)
        plan = ExecutionPlan.poisson(unit="patient", declared_units=12, expected_batch=4, steps=30,
                                    noise_multiplier=1.0, clip_norm=0.5, delta=1e-3,
                                    adaptive=AdaptiveClipping(0.5, 1.0))
        loop.REPORT_SECONDS, loop.CURVE_POINTS = 0.0, 7  # points lie between checkpoints
        shape = BertConfig(vocab_size=20, hidden=8, layers=1, heads=2, intermediate=8,
                           max_positions=8)
        model = loop.train(
            fresh(shape, 0), objective_for(shape),
            store=writer.finish(), updates=loop.PrivateUpdates(plan, PrivacySeed.fixed(0), b"m"),
            config=TrainingConfig(learning_rate=0.01, checkpoint_every=3, micro_rows=4),
            seed=0, checkpoints=checkpoints.LocalFolder(folder / f"checkpoints-{name}"),
            progress=lambda p: print(json.dumps([p.update, repr(p.loss), p.batch, p.clipped]),
                                     flush=True))
        content = b"".join(model.parameters[n].tobytes() for n in sorted(model.parameters))
        print(json.dumps(hashlib.sha256(content).hexdigest()), flush=True)

    for number, case in enumerate(json.loads(sys.argv[2])):
        child = os.fork()  # TensorFlow is imported, and has not begun to work
        if not child:
            sys.stdout = (folder / f"told-{number}").open("w")
            try:
                train(*case)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
DEATHS = (
    ("before its name", 1),  # the first checkpoint: no file is left, and the run starts anew
    ("half a checkpoint", 2),
    ("before the old one goes", 1),
    ("before the weights move", 8),
)


def reports_of(folder, *cases):
    """Run each case in a separate process, to its end or until it is killed; return its lines."""
    words = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), json.dumps(cases)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    codes = [int(line) for line in done.stdout.splitlines()]
    expected = [-signal.SIGKILL if when else 0 for _, _, when in cases]
    assert codes == expected, done.stderr[-2000:]
    files = [folder / f"told-{number}" for number in range(len(cases))]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.slow
def test_run_killed_anywhere_and_resumed_ends_in_the_same_bits(tmp_path):
    killed = [("killed", place, when) for place, when in DEATHS]
    (*undisturbed, weights), *lives, (*last, resumed) = reports_of(
        tmp_path, ("undisturbed", "nowhere", 0), *killed, ("killed", "nowhere", 0)
    )
    assert [point[0] for point in undisturbed] == list(range(1, 31))
    done, kept, curve = 0, 0, []
    for (place, _), reports in zip(DEATHS, lives, strict=True):
        first = reports[0][0] if reports else done + 1
        # It continues from a checkpoint at most 3 updates back, and reports that update again.
        assert kept <= first <= done + 1, place
        done = reports[-1][0] if reports else done
        kept = (done // 3 - 1) * 3 if done >= 3 else 0
        curve += reports
    assert last[0][0] > 3
    assert resumed == weights
    # It reports the same losses as an uninterrupted run, even for repeated updates.
    assert all(point in undisturbed for point in curve + last)
    assert {point[0] for point in curve + last} == set(range(1, 31))
