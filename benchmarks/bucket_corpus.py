"""A corpus of gigabytes through `gs://`: the steps corpus and vocabulary, as a job runs them.

    python -m benchmarks.bucket_corpus --megabytes 5000 --folder /srv/scratch

Made-up text (`made_up_text`) is read as private JSON lines, published as shards to the object store
of the compose stack (docker/storage_server.py, run as a local process), counted from there by the
default engine and released. Each step is a separate process with its workers, whose peak memory is
read from Linux. The benchmark needs three times the size on the folder's disk, so it is run by
hand. Results: benchmarks/results/bucket_corpus.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import made_up_text
from benchmarks.large_object import serve
from benchmarks.memory import mebibytes
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.protocol.specs import CorpusSpec, StepSpec, VocabularySpec
from tasks.protocol.step_process import data_uri

RESULT = ROOT / "benchmarks/results/bucket_corpus.json"
STORE = "gs://b/store"
COMMON: dict[str, Any] = {"made_up": False, "seed": 1, "dataset": "ward"}


def specs(text: Path, units: int) -> list[StepSpec]:
    """Return the two steps."""
    corpus = CorpusSpec(
        role="private", format="jsonl", path=str(text), data_version="1",
        synthetic_patients=50, **COMMON,
    )  # fmt: skip
    config = {
        "vocabulary_source": "private", "declared_units": units, "words_per_unit": 512,
        "vocabulary_epsilon": 3.0, "vocabulary_delta": 1e-6, "vocabulary_size": 8000,
    }  # fmt: skip
    counted = {"corpus_uri": corpus.output, "config": config, **COMMON}
    return [corpus, VocabularySpec.model_validate(counted)]


def workers_of(process: int) -> list[int]:
    """Return the descendants of a process."""
    descendants = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                descendants += [child, *workers_of(child)]
    return descendants


def measured(spec: StepSpec, store: int) -> dict[str, Any]:
    """Run one step; return its time, and the peak memory of the step, its workers and the store."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    spec_uri = data_uri(spec.model_dump_json().encode())
    step = subprocess.Popen(
        [sys.executable, "-m", "tasks", spec.step, "--spec", spec_uri], cwd=ROOT
    )
    peaks: dict[int, float] = {}
    while step.poll() is None:
        for process in (step.pid, *workers_of(step.pid)):
            with suppress(OSError, RuntimeError):  # the process has just ended
                peaks[process] = mebibytes("VmHWM", process)
        time.sleep(0.2)
    if step.returncode:
        raise SystemExit(f"the step {spec.step} failed")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    step_peak = peaks.pop(step.pid)
    return {
        "seconds": round(time.monotonic() - begun, 1),
        "processor_seconds": round(
            ended.ru_utime + ended.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
        "peak_mib": round(step_peak),
        "peak_of_a_worker_mib": round(max(peaks.values(), default=0)),
        "peak_of_the_store_mib": round(mebibytes("VmHWM", store)),
    }


def main() -> None:
    """Write the text, run both steps, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=5000)
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder on a disk with enough space"
    )
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.folder))
    made_up_text.write(work / "text.jsonl", options.megabytes)
    store, address = serve(work / "served")
    os.environ |= {
        "STORAGE_EMULATOR_HOST": address,
        "CONFIDE_STORE": STORE,
        "CONFIDE_HOME": str(work / "home"),
        "CONFIDE_LEDGER": f"sqlite:///{work}/ledger.db",
    }
    try:
        ledger = Ledger.open(os.environ["CONFIDE_LEDGER"])
        ledger.register_dataset("ward", PrivacyUnit.PATIENT, 8.0, 1e-5)
        figures: dict[str, Any] = {"load_at_the_start": round(os.getloadavg()[0], 1)}
        for spec in specs(work / "text.jsonl", 200_000):
            figures[spec.step] = measured(spec, store.pid)
            print(json.dumps({spec.step: figures[spec.step]}), flush=True)
        objects = [f for f in (work / "served").rglob("*") if f.is_file()]
        cached = [f for f in (work / "home/cache").rglob("*") if f.is_file()]
        figures["bytes_in_the_store"] = sum(f.stat().st_size for f in objects)
        figures["bytes_in_the_cache"] = sum(f.stat().st_size for f in cached)
    finally:
        store.kill()
        store.wait()
        shutil.rmtree(work)
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    results[f"{options.megabytes} MB"] = figures
    RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
