from collections import Counter

import numpy as np
import pytest

from dp_core.errors import BadInput
from dp_core.models.causal import TOP_K, continuations
from dp_core.models.config import BertConfig, FeedForwardConfig, Gpt2Config
from dp_core.models.parameters import AnyModel, fresh

V, END = 60, 3


def model_of(logits: dict[int, float], after: dict[int, int] | None = None) -> AnyModel:
    """A bigram model: fixed logits, −30 for the others; some tokens have a fixed successor."""
    model = fresh(
        FeedForwardConfig(vocab_size=V, hidden=V, window=1, units=(V,), max_positions=12), 0
    )
    p = model.parameters
    p["embeddings/word"][:] = np.eye(V)
    p["layer_0/intermediate/kernel"][:] = np.eye(V)
    p["head/kernel"][:] = 0
    p["head/bias"][:] = -30
    for token, logit in logits.items():
        p["head/bias"][token] = logit
    for token, follower in (after or {}).items():
        p["head/kernel"][token, follower] = 90
    return model


def test_tokens_are_sampled_by_their_probabilities():
    chances = {7: 0.6, 8: 0.3, 9: 0.1}
    model = model_of({token: float(np.log(chance)) for token, chance in chances.items()})
    drawn = continuations(model, [5], texts=4000, tokens=1, seed=1)
    counts = Counter(token for (token,) in drawn)
    assert counts.keys() == chances.keys()
    for token, chance in chances.items():  # five deviations
        assert counts[token] / 4000 == pytest.approx(chance, abs=5 * (chance / 4000) ** 0.5)


def test_only_the_top_k_tokens_are_sampled():
    model = model_of({token: 1e-4 * token for token in range(5, V)})
    drawn = {t for (t,) in continuations(model, [5], texts=4000, tokens=1, seed=1)}
    assert drawn == set(range(V - TOP_K, V))


def test_text_continues_its_own_tokens_and_stops_at_the_end_token():
    model = model_of({7: 0.0}, after={7: 8, 8: 9, 9: END})
    assert continuations(model, [6], texts=2, tokens=8, seed=1) == [[7, 8, 9]] * 2
    assert continuations(model, [6], texts=1, tokens=2, seed=1) == [[7, 8]]
    # A row holds 12 tokens, the first of them the begin marker.
    assert [len(t) for t in continuations(model_of({7: 0.0}), [6], texts=1, tokens=50, seed=1)] == [
        10
    ]


def test_special_tokens_are_never_sampled():
    model = model_of({0: 50.0, 1: 50.0, 2: 50.0, 4: 50.0, 7: 0.0})
    assert continuations(model, [], texts=3, tokens=2, seed=1) == [[7, 7]] * 3


def test_texts_are_determined_by_the_seed():
    model = fresh(Gpt2Config.of_size(vocab_size=V, hidden=64, layers=1, max_positions=12), 0)
    once, again, other = (
        continuations(model, [5, 6], texts=3, tokens=6, seed=seed) for seed in (1, 1, 2)
    )
    assert once == again != other
    assert len({tuple(text) for text in once}) == 3


def test_invalid_generation_requests_are_refused():
    masked = fresh(BertConfig.of_size(vocab_size=V, hidden=64, layers=1), 0)
    with pytest.raises(BadInput, match="generates no text"):
        continuations(masked, [], texts=1, tokens=1, seed=1)
    with pytest.raises(BadInput, match="leaves no room"):
        continuations(model_of({7: 0.0}), [5] * 11, texts=1, tokens=1, seed=1)
    broken = model_of({7: float("nan")})
    with pytest.raises(BadInput, match="not finite"):
        continuations(broken, [], texts=1, tokens=1, seed=1)
