from dataclasses import replace

import numpy as np
import pytest

from dp_core.data.labelled_text import LabelledText, Sentence, tags_of_types
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig
from dp_core.models.hugging_face import load, save
from dp_core.models.parameters import fresh
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.finetune import Epochs, finetune, store_by_unit
from dp_core.training.heads import ClassHead, TaggingHead
from dp_core.training.loop import PrivateUpdates
from dp_core.vocabulary import subwords

KIND = {"pain": "B-problem", "fever": "B-problem", "aspirin": "B-drug", "and": "O", "no": "O"}
TAGS = TaggingHead(tags_of_types(["drug", "problem"]))
CLASSES = ClassHead(("ill", "well"))
LENGTH = 16
TEXTS, EXPECTED_BATCH = 60, 20


def sentences(n, seed):
    rng = np.random.default_rng(seed)
    drawn = [tuple(str(w) for w in rng.choice(list(KIND), rng.integers(2, 9))) for _ in range(n)]
    return [Sentence(w, tuple(KIND[x] for x in w), f"note {i}") for i, w in enumerate(drawn)]


def pairs(n, seed):
    """Pairs: ill if the SECOND text mentions fever, for any first text."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(n):
        first, second = (" ".join(rng.choice(list(KIND), rng.integers(1, 4))) for _ in range(2))
        out.append(LabelledText(first, second, CLASSES.labels["fever" not in second.split()]))
    return out


TASKS = {"tags": (TAGS, sentences), "classes": (CLASSES, pairs)}


@pytest.fixture(scope="module")
def tokenizer():
    return subwords.learn(dict.fromkeys(KIND, 50), 80)


@pytest.fixture(scope="module")
def start_of(tokenizer):
    def make(type_vocab=2, length=LENGTH):
        shape = BertConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden=16, layers=1, heads=2, intermediate=32,
            max_positions=length, initializer_range=0.1, type_vocab=type_vocab,
        )  # fmt: skip
        return fresh(shape, 0)

    return make


@pytest.fixture()
def run(start_of, tokenizer, plan_of, config_of, tmp_path):
    """Fine-tune with privacy, or without it if `epochs` are given."""

    def run(task="tags", train=None, name="a", epochs=0, updates=60, noise=0.01, **changes):
        head, texts = TASKS[task]
        train = texts(TEXTS, 0) if train is None else train
        plan = plan_of(
            declared_units=TEXTS, expected_batch=EXPECTED_BATCH, steps=updates,
            noise_multiplier=noise, clip_norm=1.0, examples_per_step=1,
        )  # fmt: skip
        settings = {
            "head": head,
            "updates": Epochs(epochs, 8)
            if epochs
            else PrivateUpdates(plan, PrivacySeed.fixed(3), b"m"),
            "config": config_of(learning_rate=0.02, micro_rows=16),
            "seed": 1,
            "max_length": LENGTH,
            "checkpoints": LocalFolder(tmp_path / name),
        }
        start = changes.pop("start", None) or start_of()
        return finetune(start, train, tokenizer, **(settings | changes))

    return run


def examples_of(head, items, units, tokenizer, max_length=LENGTH):
    """Return the store of labelled texts, and the function that makes their examples."""
    store, ordered = store_by_unit(
        head.rows(items, tokenizer, LENGTH),
        units,
        max_length=max_length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=0,
    )
    objective = head.objective(ordered, max_length)
    return store, lambda rows: objective.examples(store, rows, np.zeros(len(rows), np.uint64))


@pytest.mark.parametrize("epochs", [0, 8], ids=["private", "without privacy"])
@pytest.mark.cases
def test_fine_tuned_model_predicts_unseen_texts_and_is_saved_and_read(
    run, start_of, tokenizer, tmp_path, task, type_vocab, epochs
):
    """Classes follow from the order of a pair. A DistilBERT has no token types (`type_vocab` 0).

    The labels of predicted texts have no effect.
    """
    head, texts = TASKS[task]
    model, test = run(task, start=start_of(type_vocab), epochs=epochs), texts(40, 1)
    guesses = head.predict(model, test, tokenizer, max_length=LENGTH)
    if task == "tags":
        right = [g == t for s, tags in zip(test, guesses, strict=True)
                 for g, t in zip(tags, s.tags, strict=True)]  # fmt: skip
        blind = [replace(s, tags=("O",) * len(s.tokens)) for s in test]
    else:
        right = [g == t.label for g, t in zip(guesses, test, strict=True)]
        blind = [replace(t, label="ill") for t in test]
        usual = max(np.mean([t.label == label for t in test]) for label in head.labels)
        assert usual < 0.8
    assert np.mean(right) > 0.9
    save(model, tmp_path / "saved")  # in the format of `transformers`
    read = load(tmp_path / "saved")
    assert read.labels == head.labels
    assert head.predict(read, blind, tokenizer, max_length=4 * LENGTH) == guesses


@pytest.mark.parametrize("epochs", [0, 1])
def test_fine_tuning_is_deterministic_and_reports_every_epoch(run, epochs):
    reports = []
    first, again = (
        run(name=name, epochs=2 * epochs, updates=2, progress=reports.append) for name in "ab"
    )
    for name, value in first.parameters.items():
        np.testing.assert_array_equal(value, again.parameters[name])
    points = {(now.update, now.updates) for now in reports if now.at_point}
    assert points == ({(8, 16), (16, 16)} if epochs else {(1, 2), (2, 2)})


def test_with_much_noise_the_model_hardly_depends_on_the_classes(run, start_of):
    wrong = [LabelledText(t.first, t.second, "well") for t in pairs(TEXTS, 0)]
    settings = {"task": "classes", "noise": 1000.0, "updates": 2}
    right, other = run(name="right", **settings), run(name="wrong", train=wrong, **settings)
    begun = CLASSES.begin(start_of(), 1)
    first, true_labels, other_labels = (
        m.parameters["classifier/kernel"] for m in (begun, right, other)
    )
    assert np.abs(true_labels - other_labels).max() < 0.1 * np.abs(true_labels - first).max()


def test_sentences_of_one_document_are_one_unit(tokenizer):
    train = sentences(4, 0)
    store, examples = examples_of(TAGS, train, ["b", "a", "b", "a"], tokenizer)
    assert store.n_units == 2
    for unit, sentences_of_unit in enumerate([[1, 3], [0, 2]]):  # unit a, unit b
        made = examples(np.array(store.rows_of(unit)))
        assert made.positions.shape == (2, LENGTH - 2)  # for any length of the sentences
        for i, sentence in enumerate(sentences_of_unit):
            asked = made.weights[i] == 1
            assert tuple(TAGS.labels[t] for t in made.labels[i][asked]) == train[sentence].tags
            pieces = made.input_ids[i][made.positions[i][asked]]
            assert [tokenizer.id_to_token(p) for p in pieces] == list(train[sentence].tokens)


def test_rows_are_sorted_by_unit_and_unlisted_classes_teach_nothing(tokenizer):
    train = [LabelledText("pain", "", label) for label in ("well", "secret", "ill")]
    store, examples = examples_of(CLASSES, train, ["b", "a", "a"], tokenizer)
    assert store.n_units == 2
    made = examples(np.arange(3))
    assert made.weights.ravel().tolist() == [0, 1, 1]  # unit a: secret, ill; unit b: well
    assert made.labels.ravel().tolist() == [0, 0, 1]
    assert made.input_ids.shape == (3, LENGTH)  # `max_length`, not the longest text


def test_longer_text_of_a_pair_is_shortened_first(tokenizer):
    for first, second in ((1, 20), (20, 1), (20, 20), (2, 3), (20, 0)):
        text = LabelledText(" ".join(["pain"] * first), " ".join(["fever"] * second), "ill")
        (row,) = CLASSES.rows([text], tokenizer, LENGTH)
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
    for head, text in (
        (CLASSES, LabelledText("[SEP] pain [MASK]")),
        (TAGS, Sentence(("[SEP]", "pain", "[MASK]"), ("O",) * 3)),
    ):
        (row,) = head.rows([text], tokenizer, LENGTH)
        assert not {tokenizer.token_to_id(t) for t in ("[SEP]", "[MASK]")} & set(row.ids[1:-1])


def test_heads_of_the_starting_model_are_dropped(start_of):
    model = TAGS.begin(start_of(), 1)
    assert not any(n.startswith("mlm/") for n in model.parameters)
    again = TaggingHead(("O",)).begin(model, 1)
    assert again.parameters["tagger/kernel"].shape == (16, 1)


@pytest.mark.cases
def test_arguments_that_do_not_fit_each_other_are_refused(run, changes, words):
    with pytest.raises(BadInput, match=words):
        run(updates=1, **changes)


@pytest.mark.parametrize("labels", [("ill",), ("ill", "ill"), ()])
def test_fewer_than_two_classes_are_refused(labels):
    with pytest.raises(BadInput, match="fewer than two classes, or one of them twice"):
        ClassHead(labels)


def test_rows_and_padding_do_not_exceed_the_models_positions(run, start_of, tokenizer):
    train = [Sentence(("pain", "and") * 20, ("B-problem", "O") * 20) for _ in range(8)]
    model = run(train=train, epochs=1, max_length=4 * LENGTH)
    odd = TAGS.begin(start_of(length=LENGTH + 3), 0)
    for each in (model, odd):
        tags = TAGS.predict(each, train, tokenizer, max_length=4 * LENGTH)
        assert [len(t) for t in tags] == [40] * 8
