"""The data plane: a corpus read, split, counted and cut into rows, in one process and in a pool.

Beside it, in the same run and on the same text, the counting with which `tokenizers` begins to
train a WordPiece vocabulary, on all cores. Made-up text (`made_up_text`); every measurement is a
process of its own, whose peak memory, with that of its workers, Linux tells.

    python -m benchmarks.bench_data                                # 60 MB, about two minutes
    python -m benchmarks.bench_data --megabytes 200,1000,5000      # memory at several sizes
    python -m benchmarks.bench_data --with-datasets PYTHON         # beside `datasets.map`

PYTHON is that of any environment with `datasets` and `tokenizers` (`python -m venv X && X/bin/pip
install datasets tokenizers`): neither is in the project's locks. Writes
`benchmarks/results/data.json`: megabytes (10⁶ bytes) of text and rows a second on the wall, and of
processor time beside, since a shared machine makes the wall slow; that of a pool holds the start of
its processes, some seconds each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer

from benchmarks import made_up_text
from benchmarks.memory import mebibytes
from dp_core.cluster.interfaces import ShardMap
from dp_core.cluster.shard_map import InProcess, ProcessPool
from dp_core.data.corpus import open_corpus, shards_of, write_corpus
from dp_core.data.readers.registry import read_corpus
from dp_core.data.token_store import ShardRows, TokenStoreWriter
from dp_core.data.tokens import NORMALIZER, PRE_TOKENIZER
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary import wordpiece
from dp_core.vocabulary.gathered_sets import GatheredSets
from dp_core.vocabulary.mechanism_choice import selection_plan
from dp_core.vocabulary.shard_words import UnitWords, WordSets, word_counts, word_sets

RESULT = ROOT / "benchmarks/results/data.json"
UNIT = UnitWords(PrivacyUnit.PATIENT, 1)
PER_UNIT, LENGTH = 512, 128


def all_rows(_: str, rows: list[list[int]]) -> list[list[int]]:
    """No canaries."""
    return rows


# --- what is measured, each in a process of its own: returns further figures


def read(_: ShardMap, work: Path) -> dict[str, Any]:
    """Make the corpus of the source."""
    write_corpus(read_corpus("jsonl", work / "text.jsonl"), work / "corpus")
    return {}


def counts(engine: ShardMap, work: Path) -> dict[str, Any]:
    """Count, of each word, the patients who have it: nothing bounded."""
    found = word_counts(engine, shards_of(work / "corpus"), UNIT)
    return {"distinct_words": len(found)}


def sets(engine: ShardMap, work: Path) -> dict[str, Any]:
    """Gather each patient's distinct words, bounded to N: what a private release counts."""
    of_shard = WordSets(UNIT, PER_UNIT, b"key")
    with GatheredSets(work / "gathered") as gathered:
        word_sets(engine, shards_of(work / "corpus"), of_shard, gathered)
        return {"units": gathered.units}


def released(engine: ShardMap, work: Path) -> dict[str, Any]:
    """Gather the same, merge them, and release by the default mechanism, in its eight rounds."""
    of_shard = WordSets(UNIT, PER_UNIT, b"key")
    plan = selection_plan("elimination", 3.0, 1e-6, PER_UNIT, declared_units=200_000)
    with GatheredSets(work / "gathered") as gathered:
        word_sets(engine, shards_of(work / "corpus"), of_shard, gathered)
        # A seed that is no secret: the text is made up.
        found = plan.release(gathered, PrivacySeed.fixed(0), b"benchmark")
        return {"distinct_words": gathered.distinct, "released": len(found)}


def rows(engine: ShardMap, work: Path) -> dict[str, Any]:
    """Cut all text into rows of token ids."""
    tokenizer = wordpiece.load(work / "vocabulary")
    of_shard = ShardRows(
        PrivacyUnit.PATIENT, 1, tokenizer.to_str(), LENGTH, 1 << 30, b"key", 0.0, all_rows
    )
    writer = TokenStoreWriter(work / "store", LENGTH, tokenizer.get_vocab_size())
    for cut in engine.map(of_shard, shards_of(work / "corpus")):
        writer.add_packed(cut.train)
    store = writer.finish()
    return {"rows": store.n_rows, "tokens": int(np.sum(store.lengths, dtype=np.int64))}


def tokenizers_counts(_: ShardMap, work: Path) -> dict[str, Any]:
    """Let `tokenizers` count: its training, stopped before it merges anything."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer, tokenizer.pre_tokenizer = NORMALIZER, PRE_TOKENIZER
    texts = (document.text for document in open_corpus(work / "corpus"))
    trainer = WordPieceTrainer(vocab_size=1, show_progress=False, min_frequency=1 << 60)
    tokenizer.train_from_iterator(texts, trainer)
    return {}


IN_PROCESS, POOL = "in process", "pool"
CASES: dict[str, Callable[[ShardMap, Path], dict[str, Any]]] = {
    f"source into shards, {IN_PROCESS}": read,
    f"words counted, {IN_PROCESS}": counts,
    f"words counted, {POOL}": counts,
    f"bounded sets of words, {IN_PROCESS}": sets,
    f"bounded sets of words, {POOL}": sets,
    f"words released, {POOL}": released,
    "tokenizers counts, all cores": tokenizers_counts,
    f"rows, {IN_PROCESS}": rows,
    f"rows, {POOL}": rows,
}


DATASETS = """
import json, sys, time
from datasets import load_dataset
from tokenizers import Tokenizer
work, length, cores = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tokenizer = Tokenizer.from_file(work + "/tokenizer.json")
data = load_dataset("json", data_files=work + "/text.jsonl", cache_dir=work + "/hf", split="train")
def cut(batch):
    ids = [e.ids for e in tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)]
    return {"row": [i[a:a + length - 2] for i in ids for a in range(0, len(i), length - 2)]}
begun = time.perf_counter()
made = data.map(cut, batched=True, num_proc=cores, remove_columns=data.column_names)
print(json.dumps({"seconds": time.perf_counter() - begun, "rows": len(made)}))
"""


# --- measuring


def measure(name: str, work: Path) -> dict[str, Any]:
    """Run one case here; return its figures, also of the worker processes that it started."""
    pool = ProcessPool(len(os.sched_getaffinity(0)))
    begun, worked = time.perf_counter(), time.process_time()
    figures = CASES[name](pool if name.endswith(POOL) else InProcess(), work)
    figures["seconds"] = round(time.perf_counter() - begun, 2)
    worked = time.process_time() - worked
    workers = [mebibytes("VmHWM", child.pid) for child in multiprocessing.active_children()]
    pool.close()  # ended, so that Linux counts their time
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures["processor_seconds"] = round(worked + ended.ru_utime + ended.ru_stime, 2)
    figures["peak_mib"] = round(mebibytes("VmHWM"))
    if workers:
        figures["peak_of_a_worker_mib"] = round(max(workers))
    return figures


def measured(
    megabytes: int, work: Path, python: str, only: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case's figures at one size."""
    made_up_text.write(work / "text.jsonl", megabytes)
    texts = 0
    with (work / "text.jsonl").open() as lines:
        for line in lines:
            texts += len(json.loads(line)["text"].encode())
    spent = [sys.executable, str(Path(__file__).resolve()), "--work", str(work), "--case"]
    for name in CASES:
        if not any(part in name for part in only):
            continue
        told = subprocess.run([*spent, name], check=True, stdout=subprocess.PIPE, cwd=ROOT)
        figures = json.loads(told.stdout.splitlines()[-1])
        yield name, with_rates(figures, texts)
        if name == next(iter(CASES)):
            known = word_counts(InProcess(), shards_of(work / "corpus")[:1], UNIT)
            tokenizer = wordpiece.learn(dict(known.most_common(20_000)), 8000)
            wordpiece.save(tokenizer, work / "vocabulary")
            tokenizer.save(str(work / "tokenizer.json"))
    if python:
        cores = str(len(os.sched_getaffinity(0)))
        asked = [python, "-c", DATASETS, str(work), str(LENGTH), cores]
        told = subprocess.run(asked, check=True, stdout=subprocess.PIPE)
        yield (
            f"datasets.map, {cores} processes",
            with_rates(json.loads(told.stdout.splitlines()[-1]), texts),
        )


def with_rates(figures: dict[str, Any], texts: int) -> dict[str, Any]:
    """Return figures with megabytes, rows and tokens a second."""
    rates = {"mb_per_second": round(texts / 1e6 / figures["seconds"], 1)}
    if "processor_seconds" in figures:
        rates["mb_per_processor_second"] = round(texts / 1e6 / figures["processor_seconds"], 1)
    for what in ("rows", "tokens"):
        if what in figures:
            rates[f"{what}_per_second"] = round(figures[what] / figures["seconds"])
    return figures | rates


def main() -> None:
    """Measure every size; write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", default="60", help="sizes of the text, comma-separated")
    parser.add_argument("--only", default="", help="cases with one of these in their name, by ;")
    parser.add_argument("--with-datasets", default="", metavar="PYTHON")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(measure(asked.case, asked.work)))
        return
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for megabytes in map(int, asked.megabytes.split(",")):
        with tempfile.TemporaryDirectory() as name:
            found: dict[str, Any] = {"load_at_the_start": os.getloadavg()[0]}
            for case, figures in measured(
                megabytes, Path(name), asked.with_datasets, asked.only.split(";")
            ):
                found[case] = figures
                print(f"{megabytes} MB, {case}: {json.dumps(figures)}", flush=True)
        results[f"{megabytes} MB"] = found
        RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
