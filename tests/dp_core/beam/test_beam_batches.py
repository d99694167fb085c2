"""Apache Beam writes the very batches that training would draw, and never sees the seed."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
from beam_example import CONTINUATION, plans, recipe

from dp_core.corpus.token_store import TokenStore, TokenStoreWriter
from dp_core.privacy.seeds import SeedStore
from dp_core.training.batch_plan import BatchPlan, BatchPlanKey
from dp_core.training.batch_source import private_batches
from dp_core.training.rows import masked_examples

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("CONFIDE_BEAM_PYTHON") or ROOT / ".venv" / "beam" / "bin" / "python")

SCRIPT = """
    import sys
    from pathlib import Path
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
    sys.path.insert(0, sys.argv[2])
    import beam_example as shared
    from dp_core.beam.batches import BatchJob, WriteBatchPlan

    folder = Path(sys.argv[1])
    for name, plan in shared.plans().items():
        job = BatchJob(
            store=str(folder / "store"), seeds=str(folder / "seeds"), seed_key="run",
            manifest=b"manifest", plan=plan, recipe=shared.recipe(), devices=2,
            folder=str(folder / name), continuation=shared.CONTINUATION)
        options = PipelineOptions(["--runner=DirectRunner"])
        with beam.Pipeline(options=options) as pipeline:
            pipeline | WriteBatchPlan(job) | beam.Map(lambda t: None)
    assert "tensorflow" not in sys.modules
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("needs the environment of Apache Beam: make test-beam")
    folder = tmp_path_factory.mktemp("beam")
    writer = TokenStoreWriter(folder / "store", 12, 30)
    rng = np.random.default_rng(0)
    for unit in range(40):
        writer.add_unit(str(unit), [[2, *rng.integers(5, 30, 9).tolist(), 3]] * (1 + unit % 3))
    writer.finish()
    SeedStore(folder / "seeds").create("run")
    done = subprocess.run(
        [PYTHON, "-c", textwrap.dedent(SCRIPT), str(folder), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", ["poisson", "truncated"])
def test_the_pipelines_batches_are_those_that_training_draws(written, name):
    plan, store = plans()[name], TokenStore.open(written / "store")
    seed = SeedStore(written / "seeds").get("run")
    key = BatchPlanKey(seed, b"manifest", plan, recipe(), store.digest, 2)

    def examples(*arguments):
        return masked_examples(*arguments, continuation=np.array(CONTINUATION))

    drawn = private_batches(store, plan, recipe(), seed, devices=2, examples=examples)
    read = BatchPlan(written / name, key)
    for t in range(plan.steps):
        batches = list(read.update(t))
        assert len(batches) == len(list(drawn.update(t)))
        for ours, theirs in zip(batches, drawn.update(t), strict=True):
            for a, b in zip(ours.arrays(), theirs.arrays(), strict=True):
                np.testing.assert_array_equal(a, b)


def test_its_files_are_the_owners_alone(written):
    files = [f for name in plans() for f in (written / name).iterdir()]
    assert len(files) == 10
    assert all(f.stat().st_mode & 0o077 == 0 for f in files)
