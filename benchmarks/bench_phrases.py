"""What released phrases are worth: how many come out, and what a model learns of text from them.

    python benchmarks/bench_phrases.py --corpus demo|noteevents [--lengths 3,5] [--per-unit 300]
        [--epsilon 4] [--updates 600,1800]

Releases a vocabulary and phrases, writes text, trains from the public model on it, and measures MLM
accuracy on private units that were held out of everything; with `--updates ""` it only releases.
`--nonprivate` trains on the private rows without privacy instead, for the same number of updates:
the whole gain. Writes a line of benchmarks/results/phrases.json. The noise has a known seed: for
measuring only. `noteevents` reads real text through CONFIDE_DATA (noteevents_format, wikitext-2).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dp_core.config.training import ArchitectureConfig, TrainingConfig
from dp_core.data.corpus import Document, open_corpus, write_corpus
from dp_core.data.hashing import seed_key
from dp_core.data.privacy_units import Unit, is_held_out, units_of
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import read_corpus
from dp_core.data.token_store import TokenStore, TokenStoreWriter, rows_of_units
from dp_core.data.tokens import split_words
from dp_core.models.parameters import AnyModel, fresh
from dp_core.phrases.calibration import calibrate
from dp_core.phrases.ngram_release import release_phrases
from dp_core.phrases.text_generator import write_documents
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.evaluate import mlm_accuracy
from dp_core.training.loop import OrdinaryUpdates, pretrain
from dp_core.vocabulary import calibration, wordpiece
from dp_core.vocabulary.dp_histogram import release, set_counts
from tasks.demo_data.notes import notes
from tasks.demo_data.public_text import public_text
from tasks.steps.training_inputs import config_of

RESULT = ROOT / "benchmarks" / "results" / "phrases.json"
SETTINGS = {  # as in the demo, and in tasks/presets/real-text.json
    "demo": {"words": 128, "epsilon_v": 2.0, "delta_v": 1e-7, "length": 32, "rows": 4,
             "public": 900, "rate": 3e-3},
    "noteevents": {"words": 512, "epsilon_v": 3.0, "delta_v": 1e-6, "length": 64, "rows": 32,
                   "public": 1500, "rate": 2e-3},
}  # fmt: skip
HOLDOUT, SEED, WORDS_OF_A_DOCUMENT, ALL = 0.05, 1, 120, 1_000_000


def corpora(name: str, patients: int) -> tuple[Iterable[Document], Iterable[Document]]:
    """Return the private and the public documents."""
    if name == "demo":
        return notes(patients, SEED), public_text(2 * patients, SEED)
    data = Path(os.environ["CONFIDE_DATA"])
    private = data / "noteevents_format" / "NOTEEVENTS_derived.csv.xz"
    return (
        read_corpus("noteevents", private, Quarantine()),
        read_corpus("text", data / "wikitext-2", Quarantine()),
    )


class Stores:
    """Makes rows of units with one vocabulary."""

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
        for unit_id, unit_rows in cut:
            writer.add_unit(unit_id, unit_rows)
        return writer.finish()


def split(units: Iterable[Unit], *, held: bool) -> Iterator[Unit]:
    return (u for u in units if is_held_out(u.unit_id, HOLDOUT, seed_key(SEED)) is held)


def true_counts(units: Iterable[Unit], length: int) -> Counter[str]:
    """Return in how many units each phrase is, unbounded and without noise: private."""
    counts: Counter[str] = Counter()
    for unit in units:
        words = [split_words(text) for text in unit.texts]
        counts.update(
            {" ".join(w[i : i + length]) for w in words for i in range(len(w) - length + 1)}
        )
    return counts


def train(model: AnyModel, store: TokenStore, updates: int, rate: float, place: Path) -> AnyModel:
    return pretrain(
        model=model, store=store, updates=OrdinaryUpdates(updates, 64, SEED),
        config=TrainingConfig(learning_rate=rate), init_seed=SEED,
        checkpoints=LocalFolder(place), device="cpu", progress=lambda _: None,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", choices=tuple(SETTINGS), default="demo")
    parser.add_argument("--patients", type=int, default=6000, help="of the made-up notes")
    parser.add_argument("--lengths", default="3,5")
    parser.add_argument("--per-unit", type=int, default=300)
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--documents", type=int, default=6000)
    parser.add_argument("--updates", default="600,1800")
    parser.add_argument("--nonprivate", action="store_true")
    parser.add_argument("--public-updates", type=int, default=0, help="0: as in the preset")
    parser.add_argument("--work", type=Path, help="keeps what was made, to go on from there")
    asked = parser.parse_args()
    own = SETTINGS[asked.corpus]
    lengths = tuple(int(n) for n in asked.lengths.split(","))
    with tempfile.TemporaryDirectory() as name:
        folder = asked.work or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for part, documents in zip(
            ("private", "public"), corpora(asked.corpus, asked.patients), strict=True
        ):
            wanted = part == "private" or asked.updates
            if wanted and not (folder / part).exists():
                write_corpus(documents, folder / part)

        def private(*, held: bool) -> Iterator[Unit]:
            return split(
                units_of(open_corpus(folder / "private"), PrivacyUnit.PATIENT, 1), held=held
            )

        plan_v = calibration.calibrate(own["epsilon_v"], own["delta_v"], own["words"])
        counted = set_counts(private(held=False), own["words"], seed_key(SEED))
        words = release(counted, plan_v, PrivacySeed.fixed("words"), b"bench")
        tokenizer = wordpiece.learn(words, 4000)
        wordpiece.save(tokenizer, folder)
        plan = calibrate(asked.epsilon, asked.delta, lengths, asked.per_unit)
        phrases = release_phrases(
            lambda: [private(held=False)], plan, words, PrivacySeed.fixed("phrases"), b"bench"
        )
        told = {name: value for name, value in vars(asked).items() if name != "work"}
        line: dict[str, object] = told | {"sigma": plan.sigma, "threshold": plan.threshold}
        for length, released in phrases.items():
            above = {p for p, c in true_counts(private(held=False), length).items()
                     if c >= plan.threshold}  # fmt: skip
            line[f"released of {length} words"] = len(released)
            line[f"share of those above the threshold, {length} words"] = round(
                len(above & set(released)) / max(1, len(above)), 3
            )
        print(json.dumps(line), flush=True)
        if not asked.updates:
            write(line, told)
            return
        stores = Stores(wordpiece.load(folder), own["length"], folder)
        held_out = stores.of("held", private(held=True), own["rows"])
        public = units_of(open_corpus(folder / "public"), PrivacyUnit.DOCUMENT, 1)
        public_rows = stores.of("public rows", public, ALL)
        size = tokenizer.get_vocab_size()
        start: AnyModel = fresh(config_of(ArchitectureConfig(), size, own["length"]), SEED)
        start = train(
            start,
            public_rows,
            asked.public_updates or own["public"],
            own["rate"],
            folder / "c public",
        )
        if asked.nonprivate:
            rows = stores.of("train", private(held=False), own["rows"])
        else:
            written = write_documents(phrases, asked.documents, WORDS_OF_A_DOCUMENT, SEED)
            rows = stores.of("written", units_of(written, PrivacyUnit.DOCUMENT, 1), ALL)
        scores = {"public only": mlm_accuracy(start, held_out, seed=SEED)}
        for updates in map(int, asked.updates.split(",")):
            model = train(start, rows, updates, own["rate"], folder / f"c {updates}")
            scores[f"{updates} updates"] = mlm_accuracy(model, held_out, seed=SEED)
            print(scores, flush=True)
            line["mlm accuracy, private, held out"] = {k: round(v, 4) for k, v in scores.items()}
            write(line, told)


def write(line: dict[str, object], told: dict[str, object]) -> None:
    """Write a line of results in place of an earlier one of the same settings."""
    lines = json.loads(RESULT.read_text()) if RESULT.exists() else []
    lines = [one for one in lines if not one.items() >= told.items()]
    RESULT.write_text(json.dumps([*lines, line], indent=1) + "\n")


if __name__ == "__main__":
    main()
