"""What released phrases are worth: how many come out, and what a model learns of text from them.

    python benchmarks/bench_phrases.py --corpus demo|noteevents [--lengths 2,3,5] [--per-unit 2000]
        [--epsilon 4] [--mechanism elimination] [--updates 600,1800]

Releases a vocabulary (from public text, with private words) and phrases, writes text, trains from
the public model on it, and measures MLM accuracy on private units that were held out of everything;
with `--updates ""` it only releases. `--epsilon` and `--lengths` may be several, the latter between
slashes (2,3,5/3,5), then too. `--nonprivate` trains on the private rows without privacy instead,
for the same number of updates: the whole gain. `--epsilon-words` is what the vocabulary has of ε.
Writes a line of benchmarks/results/phrases.json.
The noise has a known seed: for measuring only. `noteevents` reads real text through CONFIDE_DATA
(noteevents_format, wikitext-2).

A phrase is *common* if as many units hold it as plain counts of 300 phrases a unit in two rounds
need at this ε and δ: the same set for every mechanism, lengths and bound.
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
from typing import get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dp_core.config.privacy import MechanismName
from dp_core.config.training import ArchitectureConfig, TrainingConfig
from dp_core.data.corpus import Document, open_corpus, write_corpus
from dp_core.data.hashing import seed_key
from dp_core.data.privacy_units import Unit, in_blocks, is_held_out, units_of
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import read_corpus
from dp_core.data.token_store import TokenStore, TokenStoreWriter, rows_of_units
from dp_core.data.tokens import split_words
from dp_core.models.parameters import AnyModel, fresh
from dp_core.phrases.ngram_release import release_phrases
from dp_core.phrases.phrase_calibration import calibrate
from dp_core.phrases.text_generator import write_documents
from dp_core.privacy.mechanisms import PrivacyUnit, ThresholdedHistogram
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.evaluate import mlm_accuracy
from dp_core.training.loop import OrdinaryUpdates, pretrain
from dp_core.vocabulary import wordpiece
from dp_core.vocabulary.item_sets import item_sets
from dp_core.vocabulary.mechanism_choice import selection_plan
from dp_core.vocabulary.subwords import document_counts, in_turns, whole_words
from tasks.demo_data.notes import notes
from tasks.demo_data.public_text import public_text
from tasks.steps.training_inputs import config_of

RESULT = ROOT / "benchmarks" / "results" / "phrases.json"
SETTINGS = {  # as in the demo, and in tasks/presets/real-text.json
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
        read_corpus("noteevents", private, Quarantine()),
        read_corpus("text", data / "wikitext-2", Quarantine(), public=True),
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


def words_of(
    folder: Path, own: dict[str, float], private: Iterable[Unit]
) -> tuple[dict[str, int], dict[str, int]]:
    """Learn the tokens as the product does; return the known words, and the released ones."""
    public = document_counts(public_units(folder), split_words)
    known = whole_words(public, wordpiece.learn(public, TOKENS))
    plan = selection_plan(
        "elimination", own["epsilon_v"], own["delta_v"], int(own["words"]),
        declared_units=int(own["units"]),
    )  # fmt: skip
    held = ((u.unit_id, chain.from_iterable(map(split_words, u.texts))) for u in private)
    shard = item_sets(held, plan.items_per_unit, seed_key(SEED), exclude=known)
    released = dict(plan.release([shard], PrivacySeed.fixed("words"), b"bench"))
    counts = public + Counter(released)
    wordpiece.save(wordpiece.learn(counts, TOKENS, in_turns(public, released)), folder)
    return dict(counts), released


def share_within(texts: Iterable[list[str]], phrases: Iterable[str], length: int) -> float:
    """Return the share of running words that lie within one of the phrases."""
    known, words, within = set(phrases), 0, 0
    for text in texts:
        found = [False] * len(text)
        for i in range(len(text) - length + 1):
            if " ".join(text[i : i + length]) in known:
                found[i : i + length] = [True] * length
        words, within = words + len(text), within + sum(found)
    return within / words


def public_units(folder: Path) -> Iterator[Unit]:
    return units_of(open_corpus(folder / "public"), PrivacyUnit.DOCUMENT, 1)


def plain_threshold(epsilon: float, delta: float) -> int:
    """Return how many units plain counts take, 300 phrases a unit in two rounds (`common`)."""
    plan = calibrate(epsilon, delta, (3, 5), 300, declared_units=6000, mechanism="gaussian")
    event = plan.each_round.event()
    assert isinstance(event, ThresholdedHistogram)
    return event.threshold


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", choices=tuple(SETTINGS), default="demo")
    parser.add_argument("--patients", type=int, default=6000, help="of the made-up notes")
    parser.add_argument("--lengths", default="2,3,5")
    parser.add_argument("--per-unit", type=int, default=2000)
    parser.add_argument("--mechanism", choices=get_args(MechanismName), default="elimination")
    parser.add_argument("--epsilon", default="4")
    parser.add_argument("--epsilon-words", type=float, default=0.0, help="0: as in the preset")
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--documents", type=int, default=6000)
    parser.add_argument("--updates", default="600,1800")
    parser.add_argument("--nonprivate", action="store_true")
    parser.add_argument("--public-updates", type=int, default=0, help="0: as in the preset")
    parser.add_argument("--work", type=Path, help="keeps what was made, to go on from there")
    asked = parser.parse_args()
    own = SETTINGS[asked.corpus]
    with tempfile.TemporaryDirectory() as name:
        folder = asked.work or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for part, documents in zip(
            ("private", "public"), corpora(asked.corpus, asked.patients), strict=True
        ):
            if not (folder / part).exists():
                write_corpus(documents, folder / part)

        every = list(units_of(open_corpus(folder / "private"), PrivacyUnit.PATIENT, 1))

        def private(*, held: bool) -> Iterator[Unit]:
            return split(every, held=held)

        own |= {"epsilon_v": asked.epsilon_words or own["epsilon_v"]}
        words, alone = words_of(folder, own, private(held=False))
        held_texts = [split_words(text) for unit in private(held=True) for text in unit.texts]
        true: dict[int, Counter[str]] = {}
        told: dict[str, object] = {}
        line: dict[str, object] = {}
        for epsilon, lengths in product(asked.epsilon.split(","), asked.lengths.split("/")):
            told = {k: v for k, v in vars(asked).items() if k != "work"}
            told |= {"epsilon": float(epsilon), "lengths": lengths}
            told |= {"epsilon_words": own["epsilon_v"]}
            plan = calibrate(
                float(epsilon), asked.delta, tuple(map(int, lengths.split(","))), asked.per_unit,
                declared_units=int(own["units"]), mechanism=asked.mechanism,
            )  # fmt: skip
            units = list(private(held=False))
            phrases = release_phrases(
                lambda sets, units=units: [sets(in_blocks(units))],
                *(plan, words, PrivacySeed.fixed("phrases"), b"bench"),
            )
            line = told | {"mechanism of a round": plan.each_round.event().describe()}
            line["common"] = plain_threshold(float(epsilon), asked.delta)
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
            write(line, told)
        if not asked.updates:
            return
        stores = Stores(wordpiece.load(folder), own["length"], folder)
        held_out = stores.of("held", private(held=True), own["rows"])
        public_rows = stores.of("public rows", public_units(folder), ALL)
        size = wordpiece.load(folder).get_vocab_size()
        start: AnyModel = fresh(config_of(ArchitectureConfig(), size, own["length"]), SEED)
        updates = asked.public_updates or own["public"]
        start = train(start, public_rows, updates, own["rate"], folder / "c public")
        if asked.nonprivate:
            rows = stores.of("train", private(held=False), own["rows"])
        else:
            text = {1: alone, **phrases}
            written = write_documents(text, asked.documents, WORDS_OF_A_DOCUMENT, SEED)
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
