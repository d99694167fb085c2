"""Tests that the histogram's words are exactly BERT's words."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_core.data.tokens import NORMALIZER, PRE_TOKENIZER, split_words, word_starts

ASCII = st.text(st.characters(max_codepoint=127), max_size=80)
ODD = st.text(
    st.sampled_from("aB9.- \t\n\r\x0b\x1c\x85\xa0\u2028\u0301éİß中\ud800\ufffd"), max_size=40
)
ANY = st.one_of(ASCII, st.text(max_size=60), ODD)  # unusual spaces, marks and letters


def bert_words(text: str) -> list[str]:
    return [w for w, _ in PRE_TOKENIZER.pre_tokenize_str(NORMALIZER.normalize_str(text))]


@given(ANY)
def test_words_equal_the_words_of_the_tokenizer(text: str) -> None:
    assert split_words(text) == bert_words(text.encode("utf-8", "replace").decode())


@given(ANY, st.integers(1, 5))
def test_cutting_at_word_starts_changes_no_word(text: str, n: int) -> None:
    text = text.encode("utf-8", "replace").decode()
    cuts = [*word_starts([text])[0][::n], len(text)]
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert [w for p in pieces for w in split_words(p)] == split_words(text)
    assert all(len(split_words(p)) <= n for p in pieces)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("BP 120/80, O2-sat 98%.", ["bp", "120", "/", "80", ",", "o2", "-", "sat", "98", "%", "."]),
        ("Sjögren's\tSyndrome\r\n", ["sjogren", "'", "s", "syndrome"]),
        ("a\x0bb\x00c d_e", ["abc", "d", "_", "e"]),  # control characters join, `_` splits
        ("\ud800 x", ["?", "x"]),  # a lone surrogate is replaced
        ("", []),
    ],
)
def test_known_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words
