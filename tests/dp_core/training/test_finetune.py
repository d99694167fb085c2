"""Fine-tuning learns what words alone tell, and repeats itself."""

from __future__ import annotations

import numpy as np
import pytest

from dp_core.data.ner import Sentence, score
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig
from dp_core.models.hugging_face import save
from dp_core.models.parameters import fresh
from dp_core.training.finetune import finetune
from dp_core.vocabulary import wordpiece

KIND = {"pain": "B-problem", "fever": "B-problem", "aspirin": "B-drug", "and": "O", "no": "O"}


def sentences(n, seed):
    rng = np.random.default_rng(seed)
    drawn = [tuple(str(w) for w in rng.choice(list(KIND), rng.integers(2, 9))) for _ in range(n)]
    return [Sentence(words, tuple(KIND[w] for w in words)) for words in drawn]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = wordpiece.learn(dict.fromkeys(KIND, 50), 80)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden=16,
        layers=1,
        heads=2,
        intermediate=32,
        max_positions=16,
    )
    wordpiece.save(tokenizer, folder)
    save(fresh(config, 0), folder)
    return folder


def run(folder, **changes):
    settings = {"epochs": 6, "batch_size": 8, "learning_rate": 0.01, "max_length": 16, "seed": 1}
    return finetune(
        folder,
        changes.pop("train", sentences(60, 0)),
        sentences(20, 1),
        wordpiece.load(folder),
        **(settings | changes),
    )


def test_it_learns_and_repeats_itself(folder):
    told = []
    first = run(folder, progress=lambda done, total: told.append((done, total)))
    assert score([s.tags for s in sentences(20, 1)], first.predictions).micro.f1 > 0.95
    assert first.losses[-1] < first.losses[0] / 3
    assert told == [(i + 1, 48) for i in range(48)]
    again = run(folder)
    assert again.predictions == first.predictions
    for name, value in first.model.parameters.items():
        np.testing.assert_array_equal(value, again.model.parameters[name])
    assert first.model.labels == ("O", "B-drug", "I-drug", "B-problem", "I-problem")
    assert not any(n.startswith("mlm/") for n in first.model.parameters)


def test_the_tests_tags_are_not_looked_at(folder):
    blind = [Sentence(s.tokens, ("O",) * len(s.tokens)) for s in sentences(20, 1)]
    settings = {"epochs": 1, "batch_size": 8, "learning_rate": 0.01, "max_length": 16, "seed": 1}
    tokenizer = wordpiece.load(folder)
    seen = finetune(folder, sentences(60, 0), sentences(20, 1), tokenizer, **settings)
    unseen = finetune(folder, sentences(60, 0), blind, tokenizer, **settings)
    assert seen.predictions == unseen.predictions


def test_nothing_to_train_on_is_refused(folder):
    with pytest.raises(BadInput, match="no sentences"):
        run(folder, train=[])
