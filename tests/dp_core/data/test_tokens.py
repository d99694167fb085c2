import json
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel

from dp_core.data.tokens import (
    Segmentation,
    WordCodes,
    bert_segmentation,
    encode_bert_words,
    encode_with,
    held_items,
    joined_items,
    split_words,
    without_surrogates,
    word_starts,
)
from dp_core.vocabulary.tokenizer_files import GPT2

UNUSUAL = "aB9.-_ \t\n\r\x00\x0b\x1c\x7f\x85\xa0\u2028\u0301éİßK中\ud800\ufffd😀"
PARTS = [*UNUSUAL, "[**Name**]", "___", "[**"]
ODD_TEXT = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)
ASCII = st.text(st.characters(max_codepoint=127), max_size=80)
ANY = st.one_of(ASCII, st.text(max_size=60), ODD_TEXT)
TEXTS = st.lists(ANY, max_size=8)


@given(ANY, st.integers(1, 5))
def test_cutting_at_word_starts_changes_no_word(text, n):
    text = text.encode("utf-8", "replace").decode()
    cuts = [*word_starts(text)[::n], len(text)]
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert [w for p in pieces for w in split_words(p)] == split_words(text)
    assert all(len(split_words(p)) <= n for p in pieces)


def test_known_words():
    known = {
        "BP 120/80, O2-sat 98%.": "bp 120 / 80 , o2 - sat 98 % .",
        "Sjögren's\tSyndrome\r\n": "sjogren ' s syndrome",
        "a\x0bb\x00c d_e": "abc d _ e",  # control characters join, `_` splits
        "\ud800 x": "? x",  # a lone surrogate is replaced
        "": "",
    }
    assert {text: " ".join(split_words(text)) for text in known} == known


def arrow(texts: list[str]) -> pa.Array:
    return pa.array([t.encode("utf-8", "replace").decode() for t in texts], pa.large_string())


def spelled(encoded: WordCodes) -> list[list[str]]:
    words = np.array([*encoded.words.to_pylist(), ""], object)
    pairs = zip(encoded.starts[:-1], encoded.starts[1:], strict=True)
    return [list(words[encoded.codes[a:b]]) for a, b in pairs]


PLACEHOLDERS = ("-é", "[**Name**]", "__", "___")
SEGMENTATIONS = [
    *(
        bert_segmentation(lowercase, strip, placeholders)
        for lowercase, strip in product((True, False), repeat=2)
        for placeholders in ((), PLACEHOLDERS)
    ),
    GPT2,
    replace(GPT2, placeholders=PLACEHOLDERS),
]


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.integers(0, 3), st.sampled_from(SEGMENTATIONS))
def test_words_of_many_texts_equal_the_words_of_each_text(texts, skipped, segmentation):
    sliced = arrow(texts).slice(min(skipped, len(texts)))
    for encoded in (segmentation.encode(sliced), encode_with(segmentation, sliced)):
        assert spelled(encoded) == [segmentation.split(text) for text in texts[skipped:]]
        assert len(set(encoded.words.to_pylist())) == len(encoded.words)


@settings(max_examples=400, deadline=None)
@given(ANY, st.sampled_from(SEGMENTATIONS))
def test_counted_words_are_the_words_of_the_tokenizer(text, segmentation):
    """A tokenizer of `tokenizers` whose tokens are these words reads no other word."""
    words = segmentation.split(text)
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(["[UNK]", *set(words)])}, "[UNK]"))
    if "Bert" in segmentation.normalizer:
        flags = json.loads(segmentation.normalizer)
        flags.pop("type")
        tokenizer.normalizer = BertNormalizer(**flags)
        tokenizer.pre_tokenizer = BertPreTokenizer()
    else:
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens([AddedToken(p, normalized=False) for p in segmentation.placeholders])
    assert tokenizer.encode(without_surrogates(text)).tokens == words
    assert Segmentation.of(tokenizer) == segmentation


@pytest.mark.parametrize(
    "texts",
    [
        [], [""], ["", ""], ["a", "b"], ["a", "", "b"], ["é", "é"], ["a\x00", "\x00b"], ["\x00"],
        ["é.", "x y"], ["x\u0301 a", "b"], ["a" * 70_000, "é" * 70_000], ["\ud800", "\udfff x"],
    ],
)  # fmt: skip
def test_texts_are_kept_apart(texts):
    assert spelled(encode_bert_words(arrow(texts))) == [split_words(text) for text in texts]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(ODD_TEXT, max_size=3), min_size=1, max_size=6), st.integers(1, 3))
def test_units_hold_their_distinct_words(units, of_a_block):
    blocks = []
    for start in range(0, len(units), of_a_block):
        block = units[start : start + of_a_block]
        words = encode_bert_words(arrow([text for texts in block for text in texts]))
        rows = np.cumsum([0, *map(len, block)])
        ids = [str(start + i) for i in range(len(block))]
        blocks.append(held_items(ids, words, words.starts[rows]))
    held = joined_items(iter(blocks))
    items = held.items.to_pylist()
    assert len(set(items)) == len(items)
    assert list(held.unit_ids) == [str(i) for i in range(len(units))]
    for i, texts in enumerate(units):
        mine = [items[m] for m in held.members[held.starts[i] : held.starts[i + 1]]]
        assert len(mine) == len(set(mine))
        assert set(mine) == {word for text in texts for word in split_words(text)}
