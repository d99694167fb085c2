"""Vocabularies by source and mechanism: their fit to a text, and the accuracy of models.

    CONFIDE_DATA=folder python -m benchmarks.bench_vocabulary            # both parts, both corpora
    python -m benchmarks.bench_vocabulary fits --corpora noteevents_format --seeds 1
    python -m benchmarks.bench_vocabulary trainings --minutes 30 --home folder

`fits` learns vocabularies as the step does and tokenizes held-out text with them, without training.
`trainings` runs the steps of `dp_bert` with few updates, so its figures are only comparable with
each other. Every row is written to results/vocabulary.json at once, and an existing row is not
measured again, so a stopped run can be resumed. Text is read from CONFIDE_DATA
(`vocabulary_corpora.py`); without it nothing is measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from benchmarks.real_text import PUBLIC
from benchmarks.selection_mechanisms import COMPARED, comparison_plan
from benchmarks.vocabulary_corpora import (
    CORPORA,
    Held,
    held_by,
    item_sets,
    novels_counts,
    public_counts,
    units,
)
from dp_core.data.privacy_units import is_held_out
from dp_core.data.tokens import BERT, SPECIAL_TOKENS, split_words
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.privacy.statement import totals
from dp_core.vocabulary import wordpiece
from dp_core.vocabulary.item_sets import ItemSets
from dp_core.vocabulary.subwords import Fit, in_turns, whole_words
from dp_core.vocabulary.tokenizer_files import WORD_PIECE, learned
from tasks.execution import contract
from tasks.protocol.job import job_steps, names_of, point_and_task
from tasks.protocol.messages import StepResult
from tasks.protocol.points import DP_MODEL
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import RunContext
from tasks.releases.declarations import declare_public
from tasks.runtime.deployment import Deployment

RESULT = ROOT / "benchmarks" / "results" / "vocabulary.json"
DEFAULT = "elimination"
PRODUCT = (DEFAULT, "gaussian", "paper")  # mechanisms that a job can name
MECHANISMS = (*PRODUCT, *COMPARED)
EPSILONS = (1.0, 3.0, 8.0)
DELTA, WORDS_PER_UNIT, SIZE, HOLDOUT = 1e-6, 512, 4000, 0.05


@dataclass(frozen=True)
class Row:
    """A vocabulary: its source and, if private words are released, its mechanism and ε.

    The paper's mechanism has its own ε and δ.
    """

    source: str
    mechanism: str | None = None
    epsilon: float | None = None

    @property
    def name(self) -> str:
        """The name of the row in the results."""
        parts = [self.source, self.mechanism, self.epsilon and f"ε {self.epsilon:g}"]
        return " · ".join(str(part) for part in parts if part)


def fit_rows() -> Iterator[Row]:
    """Yield every source, with every mechanism at every ε."""
    yield from (Row(source) for source in ("public", "checkpoint", "nonprivate"))
    yield from (Row("checkpoint+private", DEFAULT, epsilon) for epsilon in EPSILONS)
    for mechanism in MECHANISMS:
        for epsilon in EPSILONS if mechanism != "paper" else (None,):
            yield from (Row(source, mechanism, epsilon) for source in ("private", "public+private"))


def training_rows() -> Iterator[Row]:
    """Yield every source at ε 3, every mechanism of a job at ε 3, and the default at all ε."""
    yield Row("public+private", DEFAULT, 3.0)
    yield Row("public")
    yield Row("private", DEFAULT, 3.0)
    yield Row("nonprivate")
    yield from (Row("public+private", DEFAULT, epsilon) for epsilon in (1.0, 8.0))
    for mechanism in PRODUCT:
        if mechanism != DEFAULT:
            yield Row("public+private", mechanism, None if mechanism == "paper" else 3.0)


# --- fits


class Texts:
    """A private corpus and the corresponding public texts, counted once."""

    def __init__(self, name: str, folder: Path) -> None:
        corpus = units(name, folder)
        self.name, self.declared_units = name, CORPORA[name].declared_units
        self.held: Held = held_by(corpus)
        self.exact = Counter(word for _, words in self.held for word in words)
        self.measured = Counter(  # running words of the units that the steps hold out
            word
            for unit in corpus
            if is_held_out(unit.unit_id, HOLDOUT, b"benchmark")
            for text in unit.texts
            for word in split_words(text)
        )
        self.public = public_counts(folder)
        self.whole = whole_words(self.public, wordpiece.learn(self.public, SIZE))
        ids = wordpiece.learn(novels_counts(folder), SIZE).get_vocab()
        self.checkpoint = sorted(ids, key=ids.__getitem__)
        self.known: dict[str, frozenset[str]] = {
            "private": frozenset(),
            "public+private": self.whole,
            "checkpoint+private": frozenset(self.checkpoint),
        }
        self.shard = functools.lru_cache(4)(self._shard)

    def _shard(self, source: str, words: int, seed: int) -> ItemSets:
        coins = PrivacySeed.fixed(seed).derive("contribution bounding")
        return item_sets(self.held, words, coins, exclude=self.known[source])

    def tokenizer(self, row: Row, seed: int) -> tuple[Tokenizer, int, dict[str, float]]:
        """Return a row's tokenizer, the number of private words in it, and the charged ε and δ."""
        if row.source == "public":
            return wordpiece.learn(self.public, SIZE), 0, {}
        if row.source == "nonprivate":
            return wordpiece.learn(self.exact, SIZE), len(self.exact), {}
        if row.source == "checkpoint":
            return tokenizer_of(self.checkpoint), 0, {}
        assert row.mechanism is not None
        plan = comparison_plan(
            row.mechanism,
            row.epsilon or 1.0,
            DELTA,
            WORDS_PER_UNIT,
            declared_units=self.declared_units,
        )
        shard = self.shard(row.source, plan.items_per_unit, seed)
        released = plan.release([shard], PrivacySeed.fixed(seed), row.name.encode())
        charged = {"epsilon": plan.epsilon, "delta": plan.delta}
        if row.source == "checkpoint+private":
            words = sorted(released, key=lambda word: (-released[word], word))
            return tokenizer_of([*self.checkpoint, *words]), len(released), charged
        both = row.source == "public+private"
        counts, whole = (
            (self.public, in_turns(self.public, released)) if both else (Counter[str](), [])
        )
        if not counts and not released:
            # every word is unknown
            return tokenizer_of([]), 0, charged
        tokenizer = wordpiece.learn(counts + Counter(released), SIZE, whole)
        return tokenizer, len(released), charged


def tokenizer_of(tokens: list[str]) -> Tokenizer:
    """Return an uncased tokenizer of tokens, to which the special ones are added."""
    return learned(list(dict.fromkeys((*SPECIAL_TOKENS, *tokens))), BERT, **WORD_PIECE)


def fit_of(tokenizer: Tokenizer, words: Counter[str]) -> Fit:
    """Return the fit of a vocabulary to a text given by word counts, as `subwords.fit` does."""
    unknown = tokenizer.token_to_id("[UNK]")
    cut = tokenizer.encode_batch(list(words), add_special_tokens=False)
    ids = [encoding.ids for encoding in cut]
    times = np.array(list(words.values()))
    lengths = np.array([len(i) for i in ids])
    lost = np.array([unknown in i for i in ids])
    total = times.sum()
    return Fit(
        float(times @ ((lengths == 1) & ~lost) / total),
        float(times @ lengths / total),
        float(times @ lost / total),
    )


def fitted(texts: Texts, row: Row, seeds: int) -> dict[str, Any]:
    """Return a row: means over releases, and the range of released words and coverage."""
    drawn = seeds if row.mechanism else 1
    fits: list[dict[str, float]] = []
    for seed in range(drawn):
        tokenizer, released, charged = texts.tokenizer(row, seed)
        fit = fit_of(tokenizer, texts.measured)
        fits.append(
            {"words_released": released, "tokens": tokenizer.get_vocab_size(),
             "coverage": fit.coverage, "fertility": fit.fertility, "unknown": fit.unknown}
        )  # fmt: skip
    means = {k: round(float(np.mean([f[k] for f in fits])), 4) for k in fits[0]}
    spans = {
        f"{k}_least_and_most": [min(f[k] for f in fits), max(f[k] for f in fits)]
        for k in ("words_released", "coverage")
    }
    return means | spans | charged | {"releases": drawn}


# --- trainings

ALIKE: dict[str, Any] = {  # short trainings of a small model
    "private_dataset": "benchmark", "public_format": "text", "entities_format": "columns",
    "entities_public": True, "all_public": True, "words_per_unit": WORDS_PER_UNIT,
    "vocabulary_delta": DELTA, "vocabulary_size": SIZE, "noise_multiplier": 1.0, "delta": 1e-5,
    "max_examples_per_unit": 8, "examples_per_step": 4, "layers": 2, "hidden": 64,
    "sequence_length": 64, "batch_size": 128, "epochs": 4, "learning_rate": 0.002,
    "public_steps": 400, "public_batch_size": 32, "public_learning_rate": 0.003,
    "finetune_epochs": 2, "nonprivate": False, "device": "cpu", "canary_patterns": "HS",
    "canary_rates": "0.1", "canaries_per_group": 1,
}  # fmt: skip
SKIPPED = ("exposure", "report", "budget", "reserve")
STORE = {"coverage": "coverage", "fertility": "fertility", "unknown_words": "unknown"}


def settings_of(name: str, folder: Path, row: Row) -> JobSettings:
    """Return the job that trains a row's models."""
    corpus = CORPORA[name]
    of_row: dict[str, Any] = {
        "private_format": corpus.format, "private_path": str(folder / corpus.abstracts),
        "private_columns": corpus.columns, "unit": corpus.unit,
        "declared_units": corpus.declared_units, "public_path": str(folder / PUBLIC),
        "entities_train": str(folder / "ner_bc5cdr/train.tsv"),
        "entities_test": str(folder / "ner_bc5cdr/test.tsv"),
        "vocabulary_source": row.source,
    }  # fmt: skip
    if row.mechanism:
        of_row |= {"vocabulary_mechanism": row.mechanism}
    if row.epsilon:
        of_row |= {"vocabulary_epsilon": row.epsilon}
    return JobSettings.model_validate(ALIKE | of_row)


def trained(settings: JobSettings, home: Path) -> dict[str, Any]:
    """Run the job's steps and return their figures; finished steps of other rows are reused.

    Args:
        settings: the job.
        home: the deployment, which keeps finished steps.
    """
    # no server listens there
    places = {"CONFIDE_HOME": str(home), "CONFIDE_TRACKING": "http://127.0.0.1:9"}
    deployment = Deployment.from_environment(places)
    deployment.prepare()
    ledger = Ledger.open(deployment.ledger)
    if settings.private_dataset not in ledger.datasets():
        ledger.register_made_up(settings.private_dataset)  # public, so without a budget
        for path in (settings.private_path, settings.public_path, settings.entities_train,
                     settings.entities_test):  # fmt: skip
            declare_public(path, deployment, known_private=True)
    results: dict[str, StepResult] = {}
    for name, spec in job_steps(settings).items():
        point, task = point_and_task(name)
        if task not in SKIPPED:
            context = RunContext(run_key="bench", run_name="bench", task=task, point=point)
            results[name] = contract.run_step(spec, deployment, context)
    last = {name: {m.name: m.value for m in result.metrics} for name, result in results.items()}
    vocabulary = results["vocabulary"].facts
    row: dict[str, Any] = {
        "words_released": vocabulary["words_released"], "tokens": vocabulary["vocabulary_size"]
    }  # fmt: skip
    row |= {column: last["private_store"].get(name) for name, column in STORE.items()}
    steps = {"public": names_of(settings.points()[0]), "dp": names_of(DP_MODEL)}
    for mode, names in steps.items():
        row[f"{mode}_mlm"] = last[names["pretraining"]].get("mlm_accuracy_private")
        row[f"{mode}_f1"] = last[names["finetuning"]].get("f1")
    total = totals(results[steps["dp"]["pretraining"]].releases)
    row["epsilon_in_all"] = str(total[0].epsilon) if total else "0"
    return row


# --- results


def known() -> dict[str, Any]:
    """Return the existing rows: part, corpus, name of the row."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def note(part: str, corpus: str, row: Row, figures: dict[str, Any]) -> None:
    """Add one row to the results file."""
    rows = known()
    rows.setdefault(part, {}).setdefault(corpus, {})[row.name] = figures
    RESULT.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print(part, corpus, row.name, json.dumps(figures), flush=True)


def measure_missing(
    part: str, corpus: str, rows: Iterator[Row], until: float, measure: Callable[[Row], dict]
) -> None:
    """Measure the missing rows, until the time to start one is over."""
    for row in rows:
        if row.name not in known().get(part, {}).get(corpus, {}) and time.monotonic() < until:
            begun = time.monotonic()
            note(part, corpus, row, measure(row) | {"seconds": round(time.monotonic() - begun)})


def main() -> None:
    """Measure the missing rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part",
        nargs="?",
        choices=["fits", "trainings"],
        help="the part to measure; both by default",
    )
    parser.add_argument("--corpora", default=",".join(CORPORA))
    parser.add_argument("--seeds", type=int, default=3, help="number of releases per row of `fits`")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--minutes", type=float, default=600, help="start no row after this time")
    parser.add_argument("--home", type=Path, help="folder that keeps finished steps of `trainings`")
    options = parser.parse_args()
    if not os.environ.get("CONFIDE_DATA"):
        print("CONFIDE_DATA names no folder: nothing is measured", file=sys.stderr)
        return
    folder = Path(os.environ["CONFIDE_DATA"])
    until = time.monotonic() + 60 * options.minutes
    for corpus in options.corpora.split(","):
        if options.part != "trainings":
            texts = Texts(corpus, folder)
            rows = (row for row in fit_rows() if options.only in row.name)
            measure_missing(
                "fits",
                corpus,
                rows,
                until,
                lambda row: fitted(texts, row, options.seeds),  # noqa: B023
            )
        if options.part != "fits":
            rows = (row for row in training_rows() if options.only in row.name)
            home_context = (
                nullcontext(options.home / corpus)
                if options.home
                else tempfile.TemporaryDirectory()
            )
            with home_context as home:
                measure_missing(
                    "trainings", corpus, rows, until,
                    lambda row: trained(settings_of(corpus, folder, row), Path(home)),  # noqa: B023
                )  # fmt: skip


if __name__ == "__main__":
    main()
