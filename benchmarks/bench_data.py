"""The data plane: reading, splitting, counting and cutting of text, in one process and in a pool.

The same run also measures, on the same text, the counting with which `tokenizers` starts to train a
WordPiece vocabulary, on all cores. The text is made up (`made_up_text`). Every measurement is a
separate process; its peak memory and the peak of its workers are read from Linux.

    python -m benchmarks.bench_data                                # 60 MB, about two minutes
    python -m benchmarks.bench_data --megabytes 200,1000,5000      # memory at several sizes
    python -m benchmarks.bench_data --with-datasets PYTHON         # also `datasets.map`

PYTHON is the interpreter of any environment with `datasets` and `tokenizers` (`python -m venv X &&
X/bin/pip install datasets tokenizers`); neither is in the project's locks. Writes
`benchmarks/results/data.json`: megabytes (10⁶ bytes) of text and rows per second of wall time, and
per second of processor time, because wall time is unreliable on a shared machine. The processor
time of a pool includes the start of its processes, some seconds each.
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
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from benchmarks import made_up_text
from benchmarks.memory import mebibytes
from dp_core.cluster.shard_map import ProcessPool, ShardMap
from dp_core.data.corpus import open_corpus, shards_of, write_corpus
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import corpus_readers, read_source
from dp_core.data.token_store import ShardRows, TokenStoreWriter
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary import subwords, tokenizer_files
from dp_core.vocabulary.item_sets import BoundedSets, GatheredSets
from dp_core.vocabulary.selection_calibration import selection_plan
from dp_core.vocabulary.subwords import UnitWords, word_counts

RESULT = ROOT / "benchmarks/results/data.json"
UNIT = UnitWords(PrivacyUnit.PATIENT, 1)
PER_UNIT, LENGTH = 512, 128


def all_rows(_: str, rows: list[list[int]]) -> list[list[int]]:
    """Return the rows unchanged, without canaries."""
    return rows


# --- measured functions, each run in a separate process and returning further figures


def read(_: ShardMap, work: Path) -> dict[str, Any]:
    """Write the corpus from its source file."""
    texts = read_source(corpus_readers(), "jsonl", work / "text.jsonl", Quarantine())
    write_corpus(texts, work / "corpus")
    return {}


def counts(engine: ShardMap, work: Path) -> dict[str, Any]:
    """Count the patients who have each word, without bounds."""
    distinct = word_counts(engine, shards_of(work / "corpus"), UNIT)
    return {"distinct_words": len(distinct)}


def sets(engine: ShardMap, work: Path) -> dict[str, Any]:
    """Gather each patient's distinct words, bounded to N, as a private release counts them."""
    of_shard = BoundedSets(UNIT, PER_UNIT, b"key")
    with GatheredSets(work / "gathered") as gathered:
        gathered.extend(engine.map(of_shard, shards_of(work / "corpus")))
        return {"units": gathered.units}


def released(engine: ShardMap, work: Path) -> dict[str, Any]:
    """Gather the same sets, merge them, and release by the default mechanism in eight rounds."""
    of_shard = BoundedSets(UNIT, PER_UNIT, b"key")
    plan = selection_plan("elimination", 3.0, 1e-6, PER_UNIT, declared_units=200_000)
    with GatheredSets(work / "gathered") as gathered:
        gathered.extend(engine.map(of_shard, shards_of(work / "corpus")))
        # The seed need not be secret, because the text is made up.
        chosen = plan.release(gathered, PrivacySeed.fixed(0), b"benchmark")
        return {"distinct_words": gathered.distinct, "released": len(chosen)}


def merges(_: ShardMap, work: Path) -> dict[str, Any]:
    """Learn 4,000 tokens from half of the text's distinct words, then from all of them.

    A search for the next merge that read all words would take four times as long for twice as many.
    """
    known = word_counts(ProcessPool(1), shards_of(work / "corpus"), UNIT)
    half = dict(sorted(known.items())[::2])
    times = [time.process_time()]
    for counted in (half, known):
        subwords.learn(counted, 4000)
        times.append(time.process_time())
    of_half, of_all = np.diff(times)
    return {"distinct_words": len(known), "all_to_half_of_the_words": round(of_all / of_half, 2)}


def rows(engine: ShardMap, work: Path) -> dict[str, Any]:
    """Cut all text into rows of token ids."""
    tokenizer = tokenizer_files.load(work / "vocabulary")
    of_shard = ShardRows(
        PrivacyUnit.PATIENT, 1, tokenizer.to_str(), LENGTH, 1 << 30, b"key", 0.0, all_rows
    )
    writer = TokenStoreWriter(work / "store", LENGTH, tokenizer.get_vocab_size())
    for cut in engine.map(of_shard, shards_of(work / "corpus")):
        writer.add_packed(cut.train)
    store = writer.finish()
    return {"rows": store.n_rows, "tokens": int(np.sum(store.lengths, dtype=np.int64))}


def tokenizers_counts(_: ShardMap, work: Path) -> dict[str, Any]:
    """Let `tokenizers` count words: its training, stopped before the first merge."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
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
    f"merges, {IN_PROCESS}": merges,
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
    """Run one case in this process; return its figures, including its worker processes."""
    pool = ProcessPool(len(os.sched_getaffinity(0)))
    begun, worked = time.perf_counter(), time.process_time()
    figures = CASES[name](pool if name.endswith(POOL) else ProcessPool(1), work)
    figures["seconds"] = round(time.perf_counter() - begun, 2)
    worked = time.process_time() - worked
    workers = [mebibytes("VmHWM", child.pid) for child in multiprocessing.active_children()]
    pool.close()  # Linux counts the time of processes that have ended
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures["processor_seconds"] = round(worked + ended.ru_utime + ended.ru_stime, 2)
    figures["peak_mib"] = round(mebibytes("VmHWM"))
    if workers:
        figures["peak_of_a_worker_mib"] = round(max(workers))
    return figures


def measured(
    megabytes: int, work: Path, python: str, only: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of each case at one size."""
    made_up_text.write(work / "text.jsonl", megabytes)
    texts = 0
    with (work / "text.jsonl").open() as lines:
        for line in lines:
            texts += len(json.loads(line)["text"].encode())
    spent = [sys.executable, str(Path(__file__).resolve()), "--work", str(work), "--case"]
    for name in CASES:
        if not any(part in name for part in only):
            continue
        answer = subprocess.run([*spent, name], check=True, stdout=subprocess.PIPE, cwd=ROOT)
        figures = json.loads(answer.stdout.splitlines()[-1])
        yield name, with_rates(figures, texts)
        if name == next(iter(CASES)):
            known = word_counts(ProcessPool(1), shards_of(work / "corpus")[:1], UNIT)
            tokenizer = subwords.learn(dict(known.most_common(20_000)), 8000)
            tokenizer_files.save(tokenizer, work / "vocabulary")
            tokenizer.save(str(work / "tokenizer.json"))
    if python:
        cores = str(len(os.sched_getaffinity(0)))
        command = [python, "-c", DATASETS, str(work), str(LENGTH), cores]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        yield (
            f"datasets.map, {cores} processes",
            with_rates(json.loads(answer.stdout.splitlines()[-1]), texts),
        )


def with_rates(figures: dict[str, Any], texts: int) -> dict[str, Any]:
    """Return figures with megabytes, rows and tokens per second."""
    rates = {"mb_per_second": round(texts / 1e6 / figures["seconds"], 1)}
    if "processor_seconds" in figures:
        rates["mb_per_processor_second"] = round(texts / 1e6 / figures["processor_seconds"], 1)
    for field in ("rows", "tokens"):
        if field in figures:
            rates[f"{field}_per_second"] = round(figures[field] / figures["seconds"])
    return figures | rates


def main() -> None:
    """Measure every size and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", default="60", help="sizes of the text, comma-separated")
    parser.add_argument("--only", default="", help="cases with one of these in their name, by ;")
    parser.add_argument("--with-datasets", default="", metavar="PYTHON")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.work)))
        return
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for megabytes in map(int, options.megabytes.split(",")):
        with tempfile.TemporaryDirectory() as name:
            figures_of_size = results.get(f"{megabytes} MB", {}) if options.only else {}
            figures_of_size["load_at_the_start"] = os.getloadavg()[0]
            for case, figures in measured(
                megabytes, Path(name), options.with_datasets, options.only.split(";")
            ):
                figures_of_size[case] = figures
                print(f"{megabytes} MB, {case}: {json.dumps(figures)}", flush=True)
        results[f"{megabytes} MB"] = figures_of_size
        RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
