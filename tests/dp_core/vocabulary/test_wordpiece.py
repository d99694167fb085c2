import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from dp_core.data.tokens import SPECIAL_TOKENS
from dp_core.errors import BadInput
from dp_core.vocabulary import subwords, tokenizer_files

RELEASED = {
    "patient": 500,
    "patients": 300,
    "pain": 400,
    "painful": 70,
    ".": 900,
    "120": 50,
    "é": 9,
}


def pieces(tokenizer: Tokenizer) -> list[str]:
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(categories=["Ll", "Nd", "Po"]), min_size=1, max_size=8),
        st.integers(1, 2000), min_size=1, max_size=30,
    ),
    st.integers(20, 200),
)  # fmt: skip
def test_vocabulary_depends_only_on_released_words(released, size):
    tokenizer = subwords.learn(released, size)
    vocabulary = pieces(tokenizer)
    assert len(vocabulary) <= size
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(vocabulary)))
    assert tuple(vocabulary[:5]) == SPECIAL_TOKENS
    characters = {c for word in released for c in word}
    assert {c for piece in vocabulary[5:] for c in piece.removeprefix("##")} <= characters


def test_remaining_room_is_for_parts_of_all_words():
    """Parts of known words spell unknown ones, although known words are whole tokens."""
    counts = {"amoxicillin": 9, "penicillin": 8, "ampicillin": 7}
    tokenizer = subwords.learn(counts, 400, list(counts))
    for word in counts:
        assert tokenizer.encode(word, add_special_tokens=False).tokens == [word]
    assert set(pieces(tokenizer)) >= set(pieces(subwords.learn(counts, 400)))
    parts = tokenizer.encode("oxacillin", add_special_tokens=False).tokens
    assert parts == ["o", "##x", "##a", "##ci", "##ll", "##in"]


def test_released_words_become_pieces_and_unknown_words_are_spelled():
    tokenizer = subwords.learn(RELEASED, 200)
    assert tokenizer.encode("The Patients").tokens[-2:] == ["patients", "[SEP]"]
    assert tokenizer.encode("painfulness", add_special_tokens=False).tokens == [
        "painful", "##n", "##e", "##s", "##s",
    ]  # fmt: skip
    assert tokenizer.encode("Pain w", add_special_tokens=False).tokens == ["pain", "[UNK]"]


def test_equal_histograms_give_equal_vocabularies_in_any_process():
    code = (
        "from dp_core.vocabulary import subwords; import json, sys;"
        "v = subwords.learn(json.load(sys.stdin), 120).get_vocab();"
        "print(json.dumps(v, sort_keys=True))"
    )
    words = {f"{a}{b}{c}": 100 for a in "abc" for b in "aeiou" for c in "xyz"}  # only ties
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(dict(items)),
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[3],
        ).stdout
        for items in (words.items(), reversed(words.items()), words.items())
    }
    assert len(runs) == 1


def test_a_small_vocabulary_keeps_the_most_frequent_characters():
    vocabulary = pieces(subwords.learn({"aaa": 100, "bbb": 90, "ccc": 80, "ddd": 1, "eee": 1}, 20))
    assert {"a", "##a", "b", "##b", "c", "##c"} <= set(vocabulary)
    assert "d" not in vocabulary


def test_continuation_flags_mark_tokens_that_continue_a_word():
    tokenizer = subwords.learn(RELEASED | {"#": 20}, 200)
    mask = tokenizer_files.continuation_tokens(tokenizer)
    assert mask.dtype == np.bool_
    assert {p for p in pieces(tokenizer) if p.startswith("##") and p != "##"} == {
        p for p, i in tokenizer.get_vocab().items() if mask[i]
    }


def test_invalid_vocabularies_are_refused(tmp_path):
    with pytest.raises(BadInput, match="no word passed"):
        subwords.learn({}, 100)
    with pytest.raises(BadInput, match="too few"):
        subwords.learn({"a": 1}, 5)
    with pytest.raises(BadInput, match="no readable vocabulary"):
        tokenizer_files.load(tmp_path)
    Tokenizer(WordPiece({"[PAD]": 0, "[UNK]": 1, "a": 2})).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInput, match=r"lacks \[CLS\]"):
        tokenizer_files.load(tmp_path)
