"""kill -9 at the worst places, again and again: the end is bit for bit that of a quiet run."""

from __future__ import annotations

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
    import hashlib, json, os, signal, sys
    from pathlib import Path
    from dp_core.models.config import (BertConfig)
    from dp_core.data.token_store import (TokenStoreWriter)
    from dp_core.privacy.execution_plan import (AdaptiveClipping)
    from dp_core.privacy.execution_plan import (ExecutionPlan)
    from dp_core.privacy.seed_store import (PrivacySeed)
    from dp_core.training import checkpoints as checkpoint
    from dp_core.training import checkpoints as checkpoint_places
    from dp_core.training import loop as progress
    from dp_core.training.checkpoints import (LocalFolder)
    from dp_core.training.loop import (PrivateUpdates, pretrain)
    from dp_core.config.training import (TrainingConfig)
    from dp_core.training.trainer import (Trainer)

    folder, name, place, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

    def dying(owner, attribute, *, halve=False):
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

    match place:
        case "before the weights move": dying(Trainer, "apply_update")
        case "half a checkpoint": dying(checkpoint, "save_file", halve=True)
        case "before its name": dying(checkpoint_places, "_sync")
        case "before the old one goes": dying(checkpoint.Checkpoints, "_drop")

    writer = TokenStoreWriter(folder / f"store-{name}", 8, 20)
    for unit in range(12):
        writer.add_unit(str(unit), [[2, 5 + unit % 9, 6 + unit % 7, 7, 3]] * 2)
    plan = ExecutionPlan.poisson(unit="patient", declared_units=12, expected_batch=4, steps=30,
                                noise_multiplier=1.0, clip_norm=0.5, delta=1e-3,
                                adaptive=AdaptiveClipping(0.5, 1.0))
    progress.REPORT_SECONDS, progress.CURVE_POINTS = 0.0, 7  # points lie between checkpoints
    model = pretrain(
        model=BertConfig(vocab_size=20, hidden=8, layers=1, heads=2, intermediate=8,
                         max_positions=8),
        store=writer.finish(), updates=PrivateUpdates(plan, PrivacySeed.fixed(0), b"m"),
        config=TrainingConfig(learning_rate=0.01, checkpoint_every=3, micro_rows=4), init_seed=0,
        checkpoints=LocalFolder(folder / f"checkpoints-{name}"), device="cpu",
        progress=lambda p: print(json.dumps([p.update, repr(p.loss), p.batch, p.clipped]),
                                 flush=True))
    content = b"".join(model.parameters[n].tobytes() for n in sorted(model.parameters))
    print(json.dumps(hashlib.sha256(content).hexdigest()))
"""


def run_script(folder, name, place="nowhere", when=0):
    """Run the script to its end, or until it is killed; return what it told."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), name, place, str(when)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == (-signal.SIGKILL if when else 0), done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_killed_anywhere_and_resumed_equals_undisturbed_bit_for_bit(tmp_path):
    *undisturbed, weights = run_script(tmp_path, "undisturbed")
    assert [point[0] for point in undisturbed] == list(range(1, 31))
    done, kept, curve = 0, 0, []
    for place, when in (
        ("before its name", 1),  # the very first checkpoint: nothing is left, it begins anew
        ("half a checkpoint", 2),
        ("before the old one goes", 1),
        ("before the weights move", 8),
    ):
        told = run_script(tmp_path, "killed", place, when)
        first = told[0][0] if told else done + 1
        # On from a checkpoint at most 3 updates back, whose update it tells once more.
        assert kept <= first <= done + 1, place
        done = told[-1][0] if told else done
        kept = (done // 3 - 1) * 3 if done >= 3 else 0
        curve += told
    *told, resumed = run_script(tmp_path, "killed")
    assert told[0][0] > 3
    assert resumed == weights
    # What it says of its losses is what the undisturbed run says, whatever it had to do twice.
    assert all(point in undisturbed for point in curve + told)
    assert {point[0] for point in curve + told} == set(range(1, 31))
