import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dp_core.audit.canaries import Canary, candidates, carries, draw, plant
from dp_core.config.data import CanaryConfig
from dp_core.data.tokens import SPECIAL_TOKENS
from dp_core.errors import BadInput
from dp_core.vocabulary import subwords, tokenizer_files

CANARY = Canary("HSH-1-0", "HSH", 1.0, (901, 902, 903))
OTHER = Canary("HS-1-0", "HS", 1.0, (904, 905))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    words = {a + b + c: 900 for a in "bdfgk" for b in "aeiou" for c in "lmnrst"}
    tokenizer_files.save(subwords.learn(words | {"x2": 500, "ab": 500, ".": 500}, 600), folder)
    return folder


def config(patterns: str, rates: str, count: int = 3) -> CanaryConfig:
    return CanaryConfig(canary_patterns=patterns, canary_rates=rates, canaries_per_group=count)


def test_canaries_follow_their_patterns(vocabulary):
    drawn = draw(vocabulary, config("HS,HHSHH", "0.01,0.5"), 1)
    counts = Counter((c.pattern, c.canary_rate) for c in drawn)
    groups = itertools.product(("HS", "HHSHH"), ((0.01, 3), (0.5, 3), (0.0, 32)))
    assert counts == {(pattern, rate): count for pattern, (rate, count) in groups}
    assert len({c.id for c in drawn}) == len(drawn)
    tokenizer = tokenizer_files.load(vocabulary)
    allowed = set(candidates(tokenizer))
    for c in drawn:
        assert len(c.tokens) == len(set(c.tokens)) == len(c.pattern)
        assert c.secret == c.tokens[c.pattern.index("S")]
        assert set(c.tokens) <= allowed
    kept_out = set(range(tokenizer.get_vocab_size())) - allowed
    assert {tokenizer.id_to_token(i) for i in kept_out} == set(SPECIAL_TOKENS)
    once, again, other = (draw(vocabulary, config("HS", "0.1"), seed) for seed in (1, 1, 2))
    assert once == again != other


@pytest.mark.cases
def test_bad_patterns_and_rates_are_refused(patterns, rates):
    with pytest.raises(ValidationError):
        config(patterns, rates)


def test_a_vocabulary_with_too_few_pieces_has_no_canaries(tmp_path):
    tokenizer_files.save(subwords.learn({"an": 5}, 100), tmp_path)
    with pytest.raises(BadInput, match="too few pieces"):
        draw(tmp_path, config("HHSHH", "0.1"), 1)


def test_references_are_never_planted():
    reference = Canary("r", "HS", 0.0, (904, 905))
    rows = [[2, 7, 8, 3]]
    for unit in range(200):
        assert plant(str(unit), rows, [reference], 1, 16) == rows


def position(row: list[int], canary: Canary) -> int:
    n = len(canary.tokens)
    hits = [i for i in range(len(row)) if tuple(row[i : i + n]) == canary.tokens]
    assert len(hits) == 1
    return hits[0]


@given(
    st.lists(st.lists(st.integers(5, 900), max_size=14), min_size=1, max_size=4),
    st.text(max_size=4),
)
def test_planting_keeps_canaries_whole_and_rows_in_bounds(bodies, unit):
    rows = [[2, *body, 3] for body in bodies]
    made = plant(unit, rows, [CANARY, OTHER], 1, 16)
    assert len(made) == len(rows)
    inserted = 0
    for before, after in zip(rows, made, strict=True):
        assert after[0] == 2
        assert after[-1] == 3
        assert len(after) <= 16
        kept = [i for i in after[1:-1] if i <= 900]
        assert kept == before[1:-1][: len(kept)]  # cut only at the end
        grown = len(after) - 2 - len(kept)
        assert len(kept) == min(len(before) - 2, 14 - grown)  # no more than needed
        inserted += grown
    assert inserted == 5
    flat = [i for row in made for i in row]
    position(flat, CANARY)
    position(flat, OTHER)
    assert plant(unit, rows, [CANARY, OTHER], 1, 16) == made


def test_places_are_random_over_rows_and_positions():
    rows = [[2, *range(10, 20), 3], [2, *range(30, 40), 3]]
    seen = set()
    for unit in range(600):
        made = plant(str(unit), rows, [CANARY], 1, 32)
        row = next(i for i, r in enumerate(made) if 901 in r)
        seen.add((row, position(made[row], CANARY)))
    assert seen == {(r, p) for r in (0, 1) for p in range(1, 12)}


def test_a_canary_for_which_a_unit_has_no_room_is_left_out():
    """An error would reveal the unit to an author of canaries that do not fit into this unit."""
    (row,) = plant("u", [[2, 7, 3]], [CANARY, OTHER], 1, 2 + len(CANARY.tokens))
    assert row in ([2, *CANARY.tokens, 3], [2, *OTHER.tokens, 3])
    assert plant("u", [[2, 7, 3]], [CANARY, OTHER], 1, 3) == [[2, 7, 3]]
    assert plant("u", [], [CANARY], 1, 16) == []


@pytest.mark.statistical
def test_canaries_are_carried_independently_of_each_other_with_their_rates():
    rates = (0.005, 0.3, 0.3)
    canaries = [Canary(str(number), "HS", rate, (1, 2)) for number, rate in enumerate(rates)]
    carried = np.array([[carries(c, str(u), 3) for c in canaries] for u in range(20_000)])
    shares = [*carried.mean(0), carried[:, 1:].all(1).mean()]
    for share, rate in zip(shares, (*rates, 0.3 * 0.3), strict=True):
        assert abs(share - rate) < 6 * np.sqrt(rate * (1 - rate) / 20_000)
