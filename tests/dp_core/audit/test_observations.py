from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from dp_core.audit import observations
from dp_core.audit import observations as scores
from dp_core.audit.canaries import MaskedContexts
from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.models.causal import causal_logits
from dp_core.models.config import BertConfig, FeedForwardConfig, Gpt2Config, LlamaConfig
from dp_core.models.parameters import AnyModel, fresh
from dp_core.nn import Layers
from dp_core.training.objectives import objective_for

V, S, MASKS = 40, 12, 3
SHAPES = {
    "bert": partial(BertConfig.of_size),
    "distilbert": partial(BertConfig.of_size, type_vocab=0),
    "gpt2": Gpt2Config.of_size,
    "llama": LlamaConfig.of_size,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    rng, folder = np.random.default_rng(1), Path(tmp_path_factory.mktemp("store"))
    writer = TokenStoreWriter(folder, S, V)
    for unit in range(5):
        lengths = rng.integers(3, S + 1, 2)
        writer.add_unit(str(unit), [[2, *rng.integers(5, V, n - 2), 3] for n in lengths])
    return writer.finish()


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest) -> AnyModel:
    shape = SHAPES[request.param](vocab_size=V, hidden=128, layers=2, max_positions=S)
    return fresh(shape, 4)


def asked(store: TokenStore, numbers: list[int]) -> observations.Rows:
    return observations.Rows(store, np.array(numbers), coins=77, masks=MASKS)


def test_losses_are_the_mean_over_fresh_masks_of_each_rows_own(store, model):
    rows = asked(store, [7, 0, 3])
    objective = objective_for(model.config)
    draws = MASKS if objective.masks else 1
    layers = Layers({n: tf.constant(v) for n, v in model.parameters.items()})
    losses = observations.losses_of(model, [rows])
    for row, loss in zip(rows.numbers, losses.mean, strict=True):
        total = asked_of = 0.0
        for draw in range(draws):
            part = np.array([row])
            made = objective.examples(store, part, rows.keys(part, draw))
            batch = (made.input_ids, store.lengths[part], made.positions, made.labels, made.weights)
            mean = objective.row_losses(layers, model.config, *(tf.constant(a) for a in batch))
            total += float(mean[0]) * made.weights.sum()
            asked_of += made.weights.sum()
        assert loss == pytest.approx(total / asked_of, rel=1e-4)


def test_masks_differ_between_draws_and_rows_and_come_again(store):
    rows = asked(store, [0, 1, 2])
    every = [rows.keys(rows.numbers, draw).tolist() for draw in range(MASKS)]
    assert len({key for keys in every for key in keys}) == 3 * MASKS
    assert rows.keys(rows.numbers[1:], 0).tolist() == every[0][1:]  # independent of other rows
    other = observations.Rows(store, rows.numbers, coins=78, masks=MASKS)
    assert not set(other.keys(other.numbers, 0).tolist()) & set(every[0])


@pytest.mark.parametrize("model", ["bert", "llama"], indirect=True)  # masked and causal
def test_rows_in_parts_are_rows_at_once(store, model, monkeypatch):
    def observed(*sides: observations.Rows) -> list[np.ndarray]:
        losses, features = (
            observations.losses_of(model, sides),
            observations.features_of(model, sides),
        )
        return [losses.mean, losses.lowest, features["attention"], features["gradients"]]

    whole = observed(asked(store, list(range(10))))
    monkeypatch.setattr(scores, "_ROWS_AT_ONCE", 4)
    monkeypatch.setattr(scores, "_GRADIENTS_AT_ONCE", 3)
    parts = observed(asked(store, list(range(7))), asked(store, [7, 8, 9]))
    for expected, other in zip(whole, parts, strict=True):
        assert len(expected) == 10
        np.testing.assert_allclose(expected, other, rtol=1e-3, atol=1e-3)


def test_a_model_without_attention_has_features_of_gradients_alone(store):
    shape = FeedForwardConfig(vocab_size=V, hidden=16, window=3, units=(12,), max_positions=S)
    model = fresh(shape, 1)
    assert observations.features_of(model, [asked(store, [0, 1])]).keys() == {"gradients"}


class _Kept(Layers):
    weights: list[np.ndarray]

    def attention_weights(self, name: str, scores: tf.Tensor) -> tf.Tensor:
        weights = super().attention_weights(name, scores)
        self.weights.append(weights.numpy())
        return weights


def test_attention_features_are_the_papers(store, model):
    """C(a) = Σ a ln a of each head and token: mean, 5th, 50th and 95th percentiles over tokens."""
    rows, config = asked(store, [4, 9]), model.config
    observed = observations.attention_features(model, [rows])
    assert observed.shape == (2, config.layers * config.heads * 4)
    layers = _Kept({n: tf.constant(v) for n, v in model.parameters.items()})
    for row, features in zip(rows.numbers, observed, strict=True):
        layers.weights, part = [], np.array([row])
        made = objective_for(config).examples(store, part, rows.keys(part, 0))
        ids, lengths = tf.constant(made.input_ids), tf.constant(store.lengths[part])
        if isinstance(config, BertConfig):
            scores.encode(layers, config, ids, lengths)
        else:
            scores.causal_logits(layers, config, ids)
        expected = []
        for weights in layers.weights:  # (1, H, S, S)
            for head in weights[0].astype(np.float64):
                real = head[: store.lengths[row]]
                with np.errstate(divide="ignore", invalid="ignore"):
                    c = np.where(real > 0, real * np.log(real), 0.0).sum(1)
                expected += [c.mean(), *np.percentile(c, (5, 50, 95))]
        np.testing.assert_allclose(features, expected, rtol=1e-3, atol=1e-4)


def test_gradient_features_are_each_layers_squared_norm(store, model):
    """Expected values: automatic differentiation of one row at a time, summed over a layer."""
    rows, objective = asked(store, [2, 5]), objective_for(model.config)
    norms = np.exp(observations.gradient_features(model, [rows]))
    parameters = {n: tf.Variable(v) for n, v in model.parameters.items()}
    for row, features in zip(rows.numbers, norms, strict=True):
        part = np.array([row])
        made = objective.examples(store, part, rows.keys(part, 0))
        batch = (made.input_ids, store.lengths[part], made.positions, made.labels, made.weights)
        with tf.GradientTape() as tape:
            loss = objective.row_losses(
                Layers(parameters), model.config, *(tf.constant(a) for a in batch)
            )
        by_layer: dict[str, float] = {}
        for name, gradient in tape.gradient(loss, parameters).items():
            layer = name.rpartition("/")[0]
            if layer in ("embeddings", "mlm"):  # tables, and the bias of the tied projection
                layer = "tables"
            squared = float(np.sum(np.square(tf.convert_to_tensor(gradient).numpy())))
            by_layer[layer] = by_layer.get(layer, 0.0) + squared
        np.testing.assert_allclose(sorted(features), sorted(by_layer.values()), rtol=2e-3)


IDS = np.tile(np.arange(10, dtype=np.int32), (3, 1))
POSITIONS = np.array([1, 2, 3], np.int32)


def contexts(secrets: list[int], ids: np.ndarray = IDS) -> MaskedContexts:
    return MaskedContexts(ids, np.full(3, 10, np.int32), POSITIONS, np.array(secrets, np.int32))


RANKING_GPT2 = Gpt2Config(
    vocab_size=40, hidden=16, layers=2, heads=2, intermediate=32, max_positions=12
)
RANKING_BERT = BertConfig.of_size(vocab_size=40, hidden=64, layers=1, max_positions=12)


@pytest.fixture()
def ranking_model():
    """Return a model whose logits are its output bias for any input: 0 except for three words."""
    model = fresh(RANKING_BERT, 0)
    model.parameters["mlm/norm/gain"][:] = 0
    model.parameters["mlm/bias"][[7, 8, 9]] = [3.0, 2.0, -1.0]
    return model


@pytest.mark.parametrize(
    ("candidates", "secrets", "ranks"),
    [(None, [7, 8, 9], [1, 2, 40]), ([8, 9, 11], [8, 9, 11], [1, 3, 2])],
)
def test_ranks_equal_the_order_of_the_candidates_logits(ranking_model, candidates, secrets, ranks):
    assert observations.ranker(ranking_model, candidates)(contexts(secrets)).tolist() == ranks


def test_ties_are_averaged(ranking_model):
    assert observations.ranker(ranking_model)(contexts([0, 20, 39])).tolist() == [(3 + 39) / 2] * 3


def test_an_answer_that_is_not_a_number_has_no_rank(ranking_model):
    ranking_model.parameters["mlm/bias"][30] = np.nan
    assert np.isnan(observations.ranker(ranking_model)(contexts([1, 2, 3]))).all()


@pytest.mark.parametrize("candidates", [None, list(range(6, 40, 2))])
def test_a_causal_model_ranks_the_secret_as_the_next_piece(candidates, monkeypatch):
    monkeypatch.setattr(scores, "_CONTEXTS_AT_ONCE", 2)  # the second part repeats its row
    model, secrets = fresh(RANKING_GPT2, 3), [8, 20, 38]
    logits = causal_logits(Layers(model.parameters), RANKING_GPT2, tf.constant(IDS)).numpy()
    logits = logits.reshape(3, 10, 40)
    among = range(40) if candidates is None else candidates
    expected = [
        1 + sum(logits[i, POSITIONS[i] - 1, v] > logits[i, POSITIONS[i] - 1, secret] for v in among)
        for i, secret in enumerate(secrets)
    ]
    ranks = observations.ranker(model, candidates)(contexts(secrets))
    assert ranks.tolist() == expected
    assert len(set(expected)) > 1
    # Neither the mask nor the tokens after it reach a causal model.
    changed = IDS.copy()
    for row, place in enumerate(POSITIONS):
        changed[row, place:] = np.random.default_rng(row).integers(0, 40, 10 - place)
    assert observations.ranker(model, candidates)(contexts(secrets, changed)).tolist() == expected
