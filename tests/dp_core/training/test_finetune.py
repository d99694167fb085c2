"""Fine-tuning with and without privacy: it learns, is deterministic, and has public shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dp_core.data.labelled_text import Sentence, score, tags_of_types
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig
from dp_core.models.hugging_face import load, save
from dp_core.models.parameters import fresh
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.finetune import Epochs, finetune, store_by_unit
from dp_core.training.heads import TaggingHead
from dp_core.training.loop import PrivateUpdates
from dp_core.vocabulary import wordpiece

KIND = {"pain": "B-problem", "fever": "B-problem", "aspirin": "B-drug", "and": "O", "no": "O"}
LABELS = tags_of_types(["drug", "problem"])
HEAD = TaggingHead(LABELS)
UPDATES, LENGTH = 60, 16


def sentences(n, seed, document="note"):
    rng = np.random.default_rng(seed)
    drawn = [tuple(str(w) for w in rng.choice(list(KIND), rng.integers(2, 9))) for _ in range(n)]
    return [Sentence(w, tuple(KIND[x] for x in w), f"{document} {i}") for i, w in enumerate(drawn)]


@pytest.fixture(scope="module")
def pretrained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = wordpiece.learn(dict.fromkeys(KIND, 50), 80)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden=16,
        layers=1,
        heads=2,
        intermediate=32,
        max_positions=LENGTH,
        type_vocab=getattr(request, "param", 2),
    )
    wordpiece.save(tokenizer, folder)
    save(fresh(config, 0), folder)
    return folder


@pytest.fixture()
def run(plan_of, config_of, tmp_path):
    def run(folder, train=None, name="a", updates=UPDATES, **changes):
        train = sentences(60, 0) if train is None else train
        plan = plan_of(
            declared_units=60,
            expected_batch=20,
            steps=updates,
            noise_multiplier=changes.pop("noise_multiplier", 0.01),
            clip_norm=1.0,
            examples_per_step=1,
        )
        settings = {
            "head": HEAD,
            "units": [s.document_id for s in train],
            "updates": PrivateUpdates(plan, PrivacySeed.fixed(3), b"m"),
            "config": config_of(learning_rate=0.02, micro_rows=16),
            "seed": 1,
            "max_length": LENGTH,
            "checkpoints": LocalFolder(tmp_path / name),
        }
        tokenizer = wordpiece.load(folder)
        return finetune(folder, train, tokenizer, **(settings | changes))

    return run


@pytest.mark.parametrize("pretrained", [2, 0], ids=["BERT", "DistilBERT"], indirect=True)
def test_private_fine_tuning_learns_with_little_noise(pretrained, run):
    test = sentences(20, 1)
    tags = HEAD.predict(run(pretrained), test, wordpiece.load(pretrained), max_length=LENGTH)
    assert score(test, tags).micro.f1 > 0.95


def test_with_much_noise_the_model_hardly_depends_on_the_tags(pretrained, run):
    wrong = [Sentence(s.tokens, ("B-drug",) * len(s.tags), s.document_id) for s in sentences(60, 0)]
    settings = {"noise_multiplier": 1000.0, "updates": 3}
    right = run(pretrained, name="right", **settings)
    other = run(pretrained, name="wrong", train=wrong, **settings)
    start = HEAD.begin(load(pretrained), 1)
    first, true_tags, other_tags = (m.parameters["tagger/kernel"] for m in (start, right, other))
    assert np.abs(true_tags - other_tags).max() < 0.1 * np.abs(true_tags - first).max()


def test_fine_tuning_is_deterministic_and_its_model_is_saved_and_read(pretrained, run, tmp_path):
    first, again = (run(pretrained, name=name, updates=2) for name in "ab")
    for name, value in first.parameters.items():
        np.testing.assert_array_equal(value, again.parameters[name])
    save(first, tmp_path / "saved")
    read = load(tmp_path / "saved")
    assert read.labels == LABELS
    for name, value in first.parameters.items():
        np.testing.assert_array_equal(value, read.parameters[name])


def test_unlisted_tags_count_as_outside(pretrained, run):
    """A tag of only one private note must not become an output of the model."""
    odd = [*sentences(5, 0), Sentence(("pain",), ("B-secret",), "note 9")]
    model = run(pretrained, train=odd, updates=1)
    assert model.labels == LABELS
    assert model.parameters["tagger/kernel"].shape == (16, len(LABELS))


def test_compiled_shapes_do_not_depend_on_the_sentences(pretrained):
    """The longest sentence of a private corpus is private, so S and K are settings."""
    tokenizer = wordpiece.load(pretrained)
    shapes = set()
    for words in (2, 9):
        long = [Sentence(("pain",) * words, ("O",) * words, "a")]
        rows = HEAD.rows(long, tokenizer, LENGTH)
        store, ordered = store_by_unit(
            rows, ["a"], max_length=LENGTH, vocabulary=tokenizer.get_vocab_size(), pad=0
        )
        objective = HEAD.objective(ordered, LENGTH)
        made = objective.examples(store, np.array([0]), np.zeros(1, np.uint64))
        shapes.add((made.input_ids.shape, made.positions.shape))
    assert shapes == {((1, LENGTH), (1, LENGTH - 2))}


def test_sentences_of_one_document_are_one_unit(pretrained):
    tokenizer = wordpiece.load(pretrained)
    train = sentences(4, 0)
    rows = HEAD.rows(train, tokenizer, LENGTH)
    store, ordered = store_by_unit(
        rows,
        ["b", "a", "b", "a"],
        max_length=LENGTH,
        vocabulary=tokenizer.get_vocab_size(),
        pad=0,
    )
    objective = HEAD.objective(ordered, LENGTH)
    assert store.n_units == 2
    expected = [[1, 3], [0, 2]]  # unit a, unit b
    for unit, sentences_of_unit in enumerate(expected):
        numbers = np.array(store.rows_of(unit))
        made = objective.examples(store, numbers, np.zeros(len(numbers), np.uint64))
        for i, sentence in enumerate(sentences_of_unit):
            asked = made.weights[i] == 1
            assert tuple(LABELS[t] for t in made.labels[i][asked]) == train[sentence].tags
            pieces = made.input_ids[i][made.positions[i][asked]]
            assert [tokenizer.id_to_token(p) for p in pieces] == list(train[sentence].tokens)


def test_heads_of_the_starting_model_are_dropped(pretrained):
    model = HEAD.begin(load(pretrained), 1)
    assert not any(n.startswith("mlm/") for n in model.parameters)
    again = TaggingHead(("O",)).begin(model, 1)
    assert again.parameters["tagger/kernel"].shape == (16, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"units": ["a"]}, "the numbers of units and texts differ"),
        ({"max_length": 17}, "max_length"),
        ({"max_length": 3}, "max_length"),
    ],
)
def test_inconsistent_arguments_are_refused(pretrained, run, changes, words):
    with pytest.raises(BadInput, match=words):
        run(pretrained, updates=1, **changes)


@pytest.fixture()
def run_ordinary(config_of, tmp_path):
    def run(folder, train=None, name="a", **changes):
        settings = {
            "head": HEAD,
            "updates": Epochs(changes.pop("epochs", 6), 8),
            "config": config_of(),
            "max_length": LENGTH,
            "seed": 1,
            "checkpoints": LocalFolder(tmp_path / name),
        }
        train = sentences(60, 0) if train is None else train
        return finetune(folder, train, wordpiece.load(folder), **(settings | changes))

    return run


def test_fine_tuning_without_privacy_learns_and_is_deterministic(pretrained, run_ordinary):
    points = []
    first = run_ordinary(
        pretrained, progress=lambda now: points.append(now) if now.at_point else None
    )
    tags = HEAD.predict(first, sentences(20, 1), wordpiece.load(pretrained), max_length=LENGTH)
    assert score(sentences(20, 1), tags).micro.f1 > 0.95
    assert [(now.update, now.updates) for now in points] == [(8 * (i + 1), 48) for i in range(6)]
    assert points[-1].loss < points[0].loss / 3
    again = run_ordinary(pretrained, name="b")
    for name, value in first.parameters.items():
        np.testing.assert_array_equal(value, again.parameters[name])
    assert first.labels == ("O", "B-drug", "I-drug", "B-problem", "I-problem")
    assert not any(n.startswith("mlm/") for n in first.parameters)


def test_rows_longer_than_the_models_positions_are_cut_in_training_and_tagging(
    pretrained, run_ordinary
):
    train = [Sentence(("pain", "and") * 20, ("B-problem", "O") * 20) for _ in range(8)]
    model = run_ordinary(pretrained, train=train, epochs=1, max_length=4 * LENGTH)
    tags = HEAD.predict(model, train, wordpiece.load(pretrained), max_length=4 * LENGTH)
    assert [len(t) for t in tags] == [40] * 8


def test_padding_does_not_exceed_the_models_positions(pretrained):
    config = replace(load(pretrained).config, max_positions=LENGTH + 3)
    model = HEAD.begin(fresh(config, 0), 0)
    long = [Sentence(("pain",) * 40, ("O",) * 40)]
    (tags,) = HEAD.predict(model, long, wordpiece.load(pretrained), max_length=LENGTH + 3)
    assert len(tags) == 40


def test_fine_tuning_without_texts_is_refused(pretrained, run_ordinary):
    with pytest.raises(BadInput, match="no texts"):
        run_ordinary(pretrained, train=[])


def test_tagging_ignores_the_tags_of_test_sentences(pretrained, run_ordinary):
    model, tokenizer = run_ordinary(pretrained, epochs=1), wordpiece.load(pretrained)
    blind = [Sentence(s.tokens, ("O",) * len(s.tokens)) for s in sentences(20, 1)]
    seen, unseen = (
        HEAD.predict(model, test, tokenizer, max_length=LENGTH)
        for test in (sentences(20, 1), blind)
    )
    assert seen == unseen
