"""The number of released phrases, and the accuracy of models trained on text written from them.

    python benchmarks/bench_phrases.py --corpus demo|noteevents [--lengths 2,3,5] [--per-unit 2000]
        [--epsilon 4] [--mechanism elimination] [--updates 600,1800]

Releases a vocabulary (from public text, with private words) and phrases, writes text, continues the
training of the public model on this text, and measures MLM accuracy on private units that were held
out of everything. With `--updates ""` it only releases; then `--epsilon` may be several values, and
`--lengths` several lists between slashes (2,3,5/3,5). `--nonprivate` trains on the private rows
without privacy for the same number of updates, which yields the largest possible gain.
`--epsilon-words` is the part of ε for the vocabulary. Writes a line of
benchmarks/results/phrases.json. The noise has a known seed, so the results are for measuring only.
`noteevents` reads real text from CONFIDE_DATA (noteevents_format, wikitext-2).

A phrase is *common* if at least as many units hold it as plain counts of 300 phrases per unit in
two rounds need at this ε and δ, which is the same set for every mechanism, length and bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.vocabulary_corpora import document_counts, item_sets
from dp_core.config.training import ArchitectureConfig, TrainingConfig
from dp_core.data.corpus import Document, open_corpus, write_corpus
from dp_core.data.hashing import seed_key
from dp_core.data.privacy_units import Unit, in_blocks, is_held_out, units_of
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import corpus_readers, read_source
from dp_core.data.token_store import TokenStore, TokenStoreWriter, rows_of_units
from dp_core.data.tokens import split_words
from dp_core.models.parameters import AnyModel, fresh
from dp_core.privacy.mechanisms import PrivacyUnit, ThresholdedHistogram
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import loop
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import OrdinaryUpdates
from dp_core.training.objectives import mlm_accuracy, objective_for
from dp_core.vocabulary import subwords, tokenizer_files
from dp_core.vocabulary.ngram_release import calibrate, release_phrases
from dp_core.vocabulary.selection_calibration import selection_plan
from dp_core.vocabulary.subwords import in_turns, whole_words
from dp_core.vocabulary.text_generator import write_documents
from tasks.demo_data.notes import notes
from tasks.demo_data.public_text import public_text
from tasks.steps.training_files import config_of

RESULT = ROOT / "benchmarks" / "results" / "phrases.json"
SETTINGS = {  # the settings of the demo and of tasks/presets/real-text.json
    "demo": {"units": 6000, "words": 128, "epsilon_v": 2.0, "delta_v": 1e-7, "length": 32,
             "rows": 4, "public": 900, "rate": 3e-3},
    "noteevents": {"units": 1200, "words": 512, "epsilon_v": 3.0, "delta_v": 1e-6, "length": 64,
                   "rows": 32, "public": 1500, "rate": 2e-3},
}  # fmt: skip
HOLDOUT, SEED, WORDS_OF_A_DOCUMENT, ALL, TOKENS = 0.05, 1, 120, 1_000_000, 4000


def corpora(name: str, patients: int) -> tuple[Iterable[Document], Iterable[Document]]:
    """Return the private and the public documents."""
    if name == "demo":
        return notes(patients, SEED), public_text(2 * patients, SEED)
    data = Path(os.environ["CONFIDE_DATA"])
    private = data / "noteevents_format" / "NOTEEVENTS_derived.csv.xz"
    return (
        read_source(corpus_readers(), "noteevents", private, Quarantine()),
        read_source(corpus_readers(public=True), "text", data / "wikitext-2", Quarantine()),
    )


class Stores:
    """Cuts units into rows with one vocabulary."""

    def __init__(self, tokenizer: object, length: int, folder: Path) -> None:
        self.tokenizer, self.length, self.folder = tokenizer, length, folder

    def of(self, name: str, units: Iterable[Unit], rows: int) -> TokenStore:
        size, key = self.tokenizer.get_vocab_size(), seed_key(SEED)  # type: ignore[attr-defined]
        if (self.folder / name / "store.json").exists():
            return TokenStore.open(self.folder / name)
        writer = TokenStoreWriter(self.folder / name, self.length, size, key=key)
        cut = rows_of_units(
            units, self.tokenizer, sequence_length=self.length,  # type: ignore[arg-type]
            max_examples_per_unit=rows, key=key,
        )  # fmt: skip
        for unit, unit_rows in cut:
            writer.add_unit(unit.unit_id, [row for _, row in unit_rows])
        return writer.finish()


def split(units: Iterable[Unit], *, held: bool) -> Iterator[Unit]:
    return (u for u in units if is_held_out(u.unit_id, HOLDOUT, seed_key(SEED)) is held)


def true_counts(units: Iterable[Unit], length: int) -> Counter[str]:
    """Return the number of units that hold each phrase, unbounded and without noise (private)."""
    counts: Counter[str] = Counter()
    for unit in units:
        words = [split_words(text) for text in unit.texts]
        counts.update(
            {" ".join(w[i : i + length]) for w in words for i in range(len(w) - length + 1)}
        )
    return counts


def train(model: AnyModel, store: TokenStore, updates: int, rate: float, place: Path) -> AnyModel:
    return loop.train(
        model, objective_for(model.config), store=store,
        updates=OrdinaryUpdates(updates, 64, SEED), config=TrainingConfig(learning_rate=rate),
        seed=SEED, checkpoints=LocalFolder(place),
    )  # fmt: skip


def words_of(
    folder: Path, settings: dict[str, float], private: Iterable[Unit]
) -> tuple[dict[str, int], dict[str, int]]:
    """Learn the tokens as the product does; return the known words and the released words."""
    public = document_counts(public_units(folder), split_words)
    known = whole_words(public, subwords.learn(public, TOKENS))
    plan = selection_plan(
        "elimination", settings["epsilon_v"], settings["delta_v"], int(settings["words"]),
        declared_units=int(settings["units"]),
    )  # fmt: skip
    held = ((u.unit_id, chain.from_iterable(map(split_words, u.texts))) for u in private)
    shard = item_sets(held, plan.items_per_unit, seed_key(SEED), exclude=known)
    released = dict(plan.release([shard], PrivacySeed.fixed("words"), b"bench"))
    counts = public + Counter(released)
    tokenizer_files.save(subwords.learn(counts, TOKENS, in_turns(public, released)), folder)
    return dict(counts), released


def share_within(texts: Iterable[list[str]], phrases: Iterable[str], length: int) -> float:
    """Return the share of running words that lie within one of the phrases."""
    known, words, within = set(phrases), 0, 0
    for text in texts:
        covered = [False] * len(text)
        for i in range(len(text) - length + 1):
            if " ".join(text[i : i + length]) in known:
                covered[i : i + length] = [True] * length
        words, within = words + len(text), within + sum(covered)
    return within / words


def public_units(folder: Path) -> Iterator[Unit]:
    return units_of(open_corpus(folder / "public"), PrivacyUnit.DOCUMENT, 1)


def plain_threshold(epsilon: float, delta: float) -> int:
    """Return the number of units that plain counts need for 300 phrases per unit in two rounds."""
    plan = calibrate(epsilon, delta, (3, 5), 300, declared_units=6000, mechanism="gaussian")
    event = plan.each_round.event()
    assert isinstance(event, ThresholdedHistogram)
    return event.threshold


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", choices=tuple(SETTINGS), default="demo")
    parser.add_argument(
        "--patients", type=int, default=6000, help="number of patients of the made-up notes"
    )
    parser.add_argument("--lengths", default="2,3,5")
    parser.add_argument("--per-unit", type=int, default=2000)
    parser.add_argument("--mechanism", choices=("elimination", "gaussian"), default="elimination")
    parser.add_argument("--epsilon", default="4")
    parser.add_argument(
        "--epsilon-words", type=float, default=0.0, help="0: the value of the preset"
    )
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--documents", type=int, default=6000)
    parser.add_argument("--updates", default="600,1800")
    parser.add_argument("--nonprivate", action="store_true")
    parser.add_argument("--public-updates", type=int, default=0, help="0: as in the preset")
    parser.add_argument(
        "--work", type=Path, help="folder that keeps intermediate results for a later run"
    )
    options = parser.parse_args()
    settings = SETTINGS[options.corpus]
    with tempfile.TemporaryDirectory() as name:
        folder = options.work or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for part, documents in zip(
            ("private", "public"), corpora(options.corpus, options.patients), strict=True
        ):
            if not (folder / part).exists():
                write_corpus(documents, folder / part)

        every = list(units_of(open_corpus(folder / "private"), PrivacyUnit.PATIENT, 1))

        def private(*, held: bool) -> Iterator[Unit]:
            return split(every, held=held)

        settings |= {"epsilon_v": options.epsilon_words or settings["epsilon_v"]}
        words, alone = words_of(folder, settings, private(held=False))
        held_texts = [split_words(text) for unit in private(held=True) for text in unit.texts]
        true: dict[int, Counter[str]] = {}
        used: dict[str, object] = {}
        line: dict[str, object] = {}
        for epsilon, lengths in product(options.epsilon.split(","), options.lengths.split("/")):
            used = {k: v for k, v in vars(options).items() if k != "work"}
            used |= {"epsilon": float(epsilon), "lengths": lengths}
            used |= {"epsilon_words": settings["epsilon_v"]}
            plan = calibrate(
                float(epsilon), options.delta, tuple(map(int, lengths.split(","))),
                options.per_unit, declared_units=int(settings["units"]),
                mechanism=options.mechanism,
            )  # fmt: skip
            units = list(private(held=False))
            phrases = release_phrases(
                lambda sets, units=units: [sets(units)],
                *(in_blocks, plan, words, PrivacySeed.fixed("phrases"), b"bench"),
            )
            line = used | {"mechanism of a round": plan.each_round.event().describe()}
            line["common"] = plain_threshold(float(epsilon), options.delta)
            for length, released in phrases.items():
                if length not in true:
                    true[length] = true_counts(private(held=False), length)
                common = {p for p, n in true[length].items() if n >= line["common"]}
                line[f"released of {length} words"] = len(released)
                line[f"held-out words within one of {length} words"] = round(
                    share_within(held_texts, released, length), 4
                )
                line[f"common, {length} words"] = len(common)
                line[f"common and released, {length} words"] = len(common & set(released))
                shared = {p for p, n in true[length].items() if n >= 70}
                line[f"in 70 units or more, {length} words"] = len(shared)
                line[f"in 70 units or more and released, {length} words"] = len(
                    shared & set(released)
                )
            print(json.dumps(line), flush=True)
            write(line, used)
        if not options.updates:
            return
        stores = Stores(tokenizer_files.load(folder), settings["length"], folder)
        held_out = stores.of("held", private(held=True), settings["rows"])
        public_rows = stores.of("public rows", public_units(folder), ALL)
        size = tokenizer_files.load(folder).get_vocab_size()
        start: AnyModel = fresh(config_of(ArchitectureConfig(), size, settings["length"]), SEED)
        updates = options.public_updates or settings["public"]
        start = train(start, public_rows, updates, settings["rate"], folder / "c public")
        if options.nonprivate:
            rows = stores.of("train", private(held=False), settings["rows"])
        else:
            text = {1: alone, **phrases}
            written = write_documents(text, options.documents, WORDS_OF_A_DOCUMENT, SEED)
            rows = stores.of("written", units_of(written, PrivacyUnit.DOCUMENT, 1), ALL)
        scores = {"public only": mlm_accuracy(start, held_out, seed=SEED)}
        for updates in map(int, options.updates.split(",")):
            model = train(start, rows, updates, settings["rate"], folder / f"c {updates}")
            scores[f"{updates} updates"] = mlm_accuracy(model, held_out, seed=SEED)
            print(scores, flush=True)
            line["mlm accuracy, private, held out"] = {k: round(v, 4) for k, v in scores.items()}
            write(line, used)


def write(line: dict[str, object], used: dict[str, object]) -> None:
    """Write a line of results in place of an earlier line with the same settings."""
    lines = json.loads(RESULT.read_text()) if RESULT.exists() else []
    lines = [earlier for earlier in lines if not earlier.items() >= used.items()]
    RESULT.write_text(json.dumps([*lines, line], indent=1) + "\n")


if __name__ == "__main__":
    main()
