"""Classes of texts and pairs: learned with and without privacy, deterministic, exported."""

from __future__ import annotations

import numpy as np
import pytest

from dp_core.config.training import TrainingConfig
from dp_core.data.labelled_text import LabelledText
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig
from dp_core.models.hugging_face import load, save
from dp_core.models.parameters import fresh
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.finetune import Epochs, finetune, store_by_unit
from dp_core.training.heads import ClassHead
from dp_core.training.loop import PrivateUpdates
from dp_core.vocabulary import wordpiece

WORDS = ("pain", "fever", "no", "and")
LABELS, LENGTH, UPDATES = ("ill", "well"), 12, 40
HEAD = ClassHead(LABELS)


def texts(n: int, seed: int) -> list[LabelledText]:
    """Pairs: ill if the SECOND text mentions fever, for any first text."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        first, second = (" ".join(rng.choice(WORDS, rng.integers(1, 4))) for _ in range(2))
        out.append(LabelledText(first, second, LABELS["fever" not in second.split()]))
    return out


@pytest.fixture(scope="module")
def tokenizer():
    return wordpiece.learn(dict.fromkeys(WORDS, 50), 80)


@pytest.fixture(scope="module")
def start(tokenizer):
    size = tokenizer.get_vocab_size()
    return fresh(
        BertConfig(
            vocab_size=size,
            hidden=16,
            layers=1,
            heads=2,
            intermediate=32,
            max_positions=LENGTH,
            initializer_range=0.1,
        ),
        0,
    )


@pytest.fixture()
def run(start, tokenizer, tmp_path):
    def run(name="a", train=None, *, private=True, updates=UPDATES, noise=0.01, **changes):
        train = texts(120, 0) if train is None else train
        settings = {
            "head": HEAD,
            "config": TrainingConfig(learning_rate=0.02),
            "max_length": LENGTH,
            "seed": 1,
            "checkpoints": LocalFolder(tmp_path / name),
        }
        if not private:
            arguments = {"updates": Epochs(updates // 3, 40)}
            return finetune(start, train, tokenizer, **(settings | arguments | changes))
        plan = ExecutionPlan.poisson(
            unit="document",
            declared_units=120,
            expected_batch=40,
            steps=updates,
            noise_multiplier=noise,
            clip_norm=1.0,
            delta=1e-4,
        )
        arguments = {
            "units": [str(i) for i in range(len(train))],
            "updates": PrivateUpdates(plan, PrivacySeed.fixed(3), b"m"),
        }
        return finetune(start, train, tokenizer, **(settings | arguments | changes))

    return run


@pytest.mark.parametrize("private", [True, False])
def test_fine_tuning_learns_the_order_of_a_pair(run, tokenizer, tmp_path, private):
    model = run(private=private)
    test = texts(60, 1)
    assert len({t.label for t in test}) == 2
    guesses = HEAD.predict(model, test, tokenizer, max_length=LENGTH)
    right = np.mean([g == t.label for g, t in zip(guesses, test, strict=True)])
    usual = max(np.mean([t.label == label for t in test]) for label in LABELS)
    assert right > 0.9 > usual + 0.1
    save(model, tmp_path / "saved")  # in the format of `transformers`
    read = load(tmp_path / "saved")
    assert read.labels == LABELS
    assert HEAD.predict(read, test, tokenizer, max_length=4 * LENGTH) == guesses


def test_with_much_noise_the_model_hardly_depends_on_the_classes(run, start):
    wrong = [LabelledText(t.first, t.second, "well") for t in texts(120, 0)]
    settings = {"noise": 1000.0, "updates": 2}
    right, other = run("right", **settings), run("wrong", wrong, **settings)
    begun = HEAD.begin(start, 1)
    first, true_labels, other_labels = (
        m.parameters["classifier/kernel"] for m in (begun, right, other)
    )
    assert np.abs(true_labels - other_labels).max() < 0.1 * np.abs(true_labels - first).max()


def test_longer_text_of_a_pair_is_shortened_first(tokenizer):
    for first, second in ((1, 20), (20, 1), (20, 20), (2, 3), (20, 0)):
        text = LabelledText(" ".join(["pain"] * first), " ".join(["fever"] * second), "ill")
        (row,) = HEAD.rows([text], tokenizer, LENGTH)
        pieces = [tokenizer.id_to_token(i) for i in row.ids]
        asked = first + second + 2 + bool(second)
        assert len(pieces) == min(LENGTH, asked)
        assert pieces[0] == "[CLS]"
        assert pieces.count("[SEP]") == 1 + bool(second)
        kept = pieces.count("pain"), pieces.count("fever")
        assert kept[0] == first or kept[0] >= kept[1]
        assert kept[1] == second or kept[1] >= kept[0] - 1
        assert row.positions[0] == (pieces.index("[SEP]") + 1 if second else 0)


def test_special_tokens_in_text_are_ordinary_text(tokenizer):
    (row,) = HEAD.rows([LabelledText("[SEP] pain [MASK]")], tokenizer, LENGTH)
    assert not {tokenizer.token_to_id(t) for t in ("[SEP]", "[MASK]")} & set(row.ids[1:-1])


def test_rows_are_sorted_by_unit_and_unlisted_classes_teach_nothing(tokenizer):
    train = [LabelledText("pain", "", label) for label in ("well", "secret", "ill")]
    rows = HEAD.rows(train, tokenizer, LENGTH)
    store, ordered = store_by_unit(
        rows,
        ["b", "a", "a"],
        max_length=16,
        vocabulary=tokenizer.get_vocab_size(),
        pad=0,
    )
    objective = HEAD.objective(ordered, 16)
    assert store.n_units == 2
    made = objective.examples(store, np.arange(3), np.zeros(3, np.uint64))
    assert made.weights.ravel().tolist() == [0, 1, 1]  # unit a: secret, ill; unit b: well
    assert made.labels.ravel().tolist() == [0, 0, 1]
    assert made.input_ids.shape == (3, 16)  # `max_length`, not the longest text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"units": ["a"]}, "the numbers of units and texts differ"),
        ({"max_length": 13}, "max_length"),
        ({"private": False, "train": []}, "no texts"),
    ],
)
def test_inconsistent_arguments_are_refused(run, changes, words):
    with pytest.raises(BadInput, match=words):
        run(updates=1, **changes)


@pytest.mark.parametrize("labels", [("ill",), ("ill", "ill"), ()])
def test_fewer_than_two_classes_are_refused(labels):
    with pytest.raises(BadInput, match="fewer than two classes, or one of them twice"):
        ClassHead(labels)
