"""Fine-tuning heads on public labelled text, from a fresh small model.

    python benchmarks/bench_heads.py [--seeds 3]

Reads data from CONFIDE_DATA, and prints a message if it is not set: sentence pairs of three classes
(evidence_inference_pairs, in place of a paper's MedNLI), and BC5CDR's entities by document in rows
that are too short for most documents, which are cut into adjacent or overlapping windows, with and
without a CRF. Scores are means over seeds with a 95% interval by the bootstrap over documents and
seeds; differences are paired. Writes benchmarks/results/heads.json.

Without pre-training the scores are low; they compare heads, not models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tokenizers import Tokenizer

from dp_core.config.training import TrainingConfig
from dp_core.data.labelled_text import Score, class_scores, joined, label_set, owner_of, score
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import labelled_text_readers, read_source, sentence_readers
from dp_core.data.tokens import split_words
from dp_core.models.config import BertConfig
from dp_core.models.parameters import Bert, fresh
from dp_core.training.bootstrap import Replicate, f1_difference, mean_f1
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.finetune import Epochs, finetune
from dp_core.training.heads import ClassHead, TaggingHead
from dp_core.vocabulary import subwords

RESULT = ROOT / "benchmarks" / "results" / "heads.json"
LAYERS, HIDDEN, TOKENS, BATCH, RATE = 2, 128, 4000, 32, 1e-3
Counts = dict[str, tuple[int, int, int]]


def encoder(tokenizer: Tokenizer, length: int, seed: int) -> Bert:
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden=HIDDEN,
        layers=LAYERS,
        heads=2,
        intermediate=4 * HIDDEN,
        max_positions=length,
    )
    return fresh(config, seed)


def vocabulary(texts: Sequence[str]) -> Tokenizer:
    counts = Counter(word for text in texts for word in split_words(text))
    return subwords.learn(counts, TOKENS)


def trained(head: Any, items: Sequence[Any], tokenizer: Tokenizer, **how: int) -> Bert:
    with tempfile.TemporaryDirectory() as folder:
        return finetune(
            encoder(tokenizer, how["length"], how["seed"]),
            items,
            tokenizer,
            head=head,
            updates=Epochs(how["epochs"], BATCH),
            config=TrainingConfig(learning_rate=RATE),
            max_length=how["length"],
            seed=how["seed"],
            checkpoints=LocalFolder(Path(folder)),
        )


def by_owner(items: Sequence[Any], count: Callable[[list[int]], tuple[int, int, int]]) -> Counts:
    numbers: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        numbers.setdefault(owner_of(item), []).append(number)
    return {owner: count(own_numbers) for owner, own_numbers in numbers.items()}


def summary_of(counts: Sequence[Counts]) -> dict[str, Any]:
    mean = mean_f1([Replicate(str(i), 0, own) for i, own in enumerate(counts)])
    return {"mean": mean.mean, "sd_over_seeds": mean.seed_deviation, "interval": mean.interval}


def pairs(data: Path, seeds: int) -> dict[str, Any]:
    readers = labelled_text_readers(pairs=True)
    train, test = (
        list(read_source(readers, "tsv", data / f"{part}.tsv", Quarantine()))
        for part in ("train", "test")
    )
    tokenizer = vocabulary([f"{t.first} {t.second}" for t in train])
    labels = tuple(sorted({t.label for t in train}))
    accuracies, macro = [], []
    for seed in range(seeds):
        head = ClassHead(labels)
        model = trained(head, train, tokenizer, length=128, epochs=10, seed=seed)
        guesses = head.predict(model, test, tokenizer, max_length=128)
        macro.append(class_scores([t.label for t in test], guesses).macro_f1)

        def count(numbers: list[int], guesses: list[str] = guesses) -> tuple[int, int, int]:
            return sum(guesses[i] == test[i].label for i in numbers), len(numbers), len(numbers)

        accuracies.append(by_owner(test, count))
    usual = Counter(t.label for t in train).most_common(1)[0][0]
    return {
        "accuracy": summary_of(accuracies),
        "macro_f1": sum(macro) / seeds,
        "accuracy_of_the_most_frequent_class": sum(t.label == usual for t in test) / len(test),
        "test": {"pairs": len(test), "documents": len(accuracies[0])},
    }


TAGGERS = {
    "sentence": ("sentence", 0.5, False),
    "sentence, CRF": ("sentence", 0.5, True),
    "document, no overlap": ("document", 0.0, False),
    "document": ("document", 0.5, False),
    "document, CRF": ("document", 0.5, True),
}


def tagging(data: Path, seeds: int) -> dict[str, Any]:
    files = (data / f"pubtator_{part}.txt" for part in ("train", "test"))
    parts = [
        list(read_source(sentence_readers(), "pubtator", file, Quarantine())) for file in files
    ]
    tokenizer = vocabulary([" ".join(s.tokens) for s in parts[0]])
    labels = label_set(parts[0])
    counts_by_tagger: dict[str, list[Counts]] = {}
    for name, (context, overlap, crf) in TAGGERS.items():
        train, test = ([*map(joined, parts)]) if context == "document" else parts
        head = TaggingHead(labels, crf, overlap)
        for seed in range(seeds):
            model = trained(head, train, tokenizer, length=64, epochs=5, seed=seed)
            guesses = head.predict(model, test, tokenizer, max_length=64)

            def count(
                numbers: list[int], test: Any = test, guesses: Any = guesses
            ) -> tuple[int, int, int]:
                micro: Score = score(
                    [test[i] for i in numbers], [guesses[i] for i in numbers]
                ).micro
                return micro.correct, micro.predicted, micro.expected

            counts_by_tagger.setdefault(name, []).append(by_owner(test, count))
            print(name, seed, summary_of(counts_by_tagger[name])["mean"], flush=True)

    def difference(second: str, first: str) -> dict[str, Any]:
        micro, two = (
            [Replicate(str(i), 0, numbers) for i, numbers in enumerate(counts_by_tagger[name])]
            for name in (first, second)
        )
        less = f1_difference(micro, two)
        assert less is not None
        return {"value": less.value, "interval": less.interval, "p": less.p_value}

    return {
        "f1": {name: summary_of(counts) for name, counts in counts_by_tagger.items()},
        "overlap less none": difference("document", "document, no overlap"),
        "CRF less none, by sentence": difference("sentence, CRF", "sentence"),
        "CRF less none, by document": difference("document, CRF", "document"),
        "document less sentence": difference("document", "sentence"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    root = Path(os.environ.get("CONFIDE_DATA", ""))
    if not os.environ.get("CONFIDE_DATA"):
        print("skipped: CONFIDE_DATA does not name a folder of data sets")
        return
    result: dict[str, Any] = {"seeds": seeds}
    for name, folder, measure in (
        ("pairs", "evidence_inference_pairs", pairs),
        ("tagging", "ner_bc5cdr", tagging),
    ):
        if (root / folder).is_dir():
            result[name] = measure(root / folder, seeds)
            print(json.dumps(result[name], indent=1), flush=True)
        else:
            print(f"skipped: CONFIDE_DATA has no {folder}")
    if len(result) == 3:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
