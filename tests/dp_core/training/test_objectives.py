import math

import numpy as np
import pytest

from dp_core.data.token_store import TokenStoreWriter
from dp_core.errors import BadInput
from dp_core.models.config import Gpt2Config
from dp_core.models.parameters import fresh
from dp_core.training.loop import OrdinaryUpdates
from dp_core.training.objectives import causal_examples, mlm_accuracy, perplexity

LENGTH, WORDS = 12, 40
GPT2 = Gpt2Config(
    vocab_size=WORDS, hidden=16, layers=1, heads=2, intermediate=32, max_positions=LENGTH
)


def test_causal_model_learns_the_next_token(train, store, config_of):
    """An odd word follows its even word; an even word is uniform among 17."""
    model = train(OrdinaryUpdates(250, 24, seed=1), model=GPT2, config=config_of(micro_rows=24))
    before = perplexity(fresh(GPT2, 1), store, seed=0)
    assert perplexity(model, store, seed=0) < 1.3 * np.sqrt(17) < before / 4


@pytest.fixture()
def biased(config):
    """A model whose logits are its output bias: 0 except for three words."""
    model = fresh(config, 0)
    model.parameters["mlm/norm/gain"][:] = 0
    model.parameters["mlm/bias"][[7, 8, 9]] = [3.0, 2.0, -1.0]
    return model


def test_accuracy_counts_first_guesses(biased, store):
    """The model always predicts word 7, so its accuracy is the share of masked 7s."""
    counts = np.bincount(store.tokens.ravel(), minlength=40)
    shares = counts[5:] / counts[5:].sum()
    accuracy = mlm_accuracy(biased, store, seed=0)
    assert abs(accuracy - shares[2]) < 0.12
    biased.parameters["mlm/bias"][5] = 9.0  # a word that does not occur
    assert mlm_accuracy(biased, store, seed=0) == 0


def test_accuracy_is_determined_by_its_seed(config, store):
    model = fresh(config, 3)
    model.parameters["mlm/bias"][8:14:2] = 1.0
    values = [mlm_accuracy(model, store, seed=s, max_rows=30) for s in (0, 0, 1, 2, 3)]
    assert values[0] == values[1]
    assert len(set(values)) > 1


@pytest.fixture()
def model():
    return fresh(GPT2, 0)


def test_perplexity_of_a_uniform_model_is_the_vocabulary_size(model, store):
    model.parameters["final_norm/gain"][:] = 0  # every logit is 0
    assert perplexity(model, store, seed=0) == pytest.approx(WORDS, rel=1e-4)
    for rows in (1, 5, 33):  # padding of the last batch has no effect
        assert perplexity(model, store, seed=0, max_rows=rows) == pytest.approx(WORDS, rel=1e-4)


def test_perplexity_averages_over_pieces_and_not_over_rows(model, tmp_path):
    """Words 7 and 8 have constant logits; rows have different lengths."""
    writer = TokenStoreWriter(tmp_path, LENGTH, WORDS)
    writer.add_unit("a", [[2, 7, 7, 7, 7, 7, 3], [2, 8, 3]])
    store = writer.finish()
    model.parameters["final_norm/gain"][:] = 0
    model.parameters["final_norm/bias"][:] = np.eye(16)[0]
    model.parameters["embeddings/word"][:, 0] = 0
    model.parameters["embeddings/word"][7, 0] = 3.0
    norm = math.log(math.exp(3) + WORDS - 1)
    expected = math.exp((5 * (norm - 3) + norm) / 6)
    assert perplexity(model, store, seed=0) == pytest.approx(expected, rel=1e-4)


def test_markers_and_unknown_pieces_are_not_predicted(tmp_path):
    writer = TokenStoreWriter(tmp_path, 8, WORDS)
    writer.add_unit("a", [[2, 9, 1, 10, 3]])
    made = causal_examples(writer.finish(), np.array([0]), np.zeros(1, np.uint64))
    assert made.weights.tolist() == [[1, 0, 1, 0, 0, 0, 0]]
    assert made.labels.tolist() == [[9, 0, 10, 0, 0, 0, 0]]
    assert made.input_ids.tolist() == [[2, 9, 1, 10, 3, 0, 0, 0]]


def test_perplexity_without_predictions_or_of_nan_losses_is_nan(model, store, tmp_path):
    writer = TokenStoreWriter(tmp_path, LENGTH, WORDS)
    writer.add_unit("a", [[2, 1, 3]])
    assert math.isnan(perplexity(model, writer.finish(), seed=0))
    model.parameters["final_norm/bias"][:] = np.nan
    assert math.isnan(perplexity(model, store, seed=0))


def test_metric_that_does_not_fit_the_model_is_refused(model, config, store):
    with pytest.raises(BadInput, match="no perplexity"):
        perplexity(fresh(config, 0), store, seed=0)
    with pytest.raises(BadInput, match="no MLM accuracy"):
        mlm_accuracy(model, store, seed=0)
