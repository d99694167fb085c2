import json
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.vocabulary_corpora import item_sets
from dp_core.data.tokens import BERT, SpecialIds, split_words
from dp_core.vocabulary import subwords, tokenizer_files
from dp_core.vocabulary.tokenizer_files import GPT2

WORDS = {"pain": 50, "pains": 1, "arm": 40, "x": 5}


def test_fit_equals_a_hand_computed_example():
    tokenizer = subwords.learn({"pain": 50, "arm": 40, "s": 1}, 80)
    fit = subwords.fit(tokenizer, ["Pain pains,", "arm ?"])
    # pain | pain ##s | [UNK] for the comma | arm | [UNK]: five words, six tokens
    assert fit == subwords.Fit(coverage=2 / 5, fertility=6 / 5, unknown=2 / 5)
    assert subwords.fit(tokenizer, ["", " "]) is None


def test_byte_level_vocabulary_has_no_unknown_words():
    tokenizer = subwords.learn({"Ġpain": 9, "arm": 5}, 300, (), GPT2)
    fit = subwords.fit(tokenizer, ["arm pain\udc80 leg"])  # arm, Ġpain, ?, and Ġ l e g
    assert fit == subwords.Fit(coverage=3 / 4, fertility=7 / 4, unknown=0)


def test_whole_words_are_single_tokens():
    tokenizer = subwords.learn(WORDS, 200)
    known = subwords.whole_words(WORDS | {"armpit": 1}, tokenizer)
    assert known == {w for w in WORDS if len(tokenizer.encode(w).tokens) == 3}


def test_different_vocabularies_have_different_digests():
    one, two = subwords.learn(WORDS, 200), subwords.learn(WORDS | {"leg": 3}, 200)
    assert subwords.vocabulary_digest(one) == subwords.vocabulary_digest(subwords.learn(WORDS, 200))
    assert subwords.vocabulary_digest(one) != subwords.vocabulary_digest(two)


@pytest.mark.parametrize(("words", "size"), [(BERT, 90), (GPT2, 275)])
def test_wanted_words_are_single_tokens_and_the_others_are_learned(words, size, tmp_path):
    counts = {"the": 90, "pain": 50, "pains": 40, "mood": 30, "zymosis": 1}
    learned = subwords.learn(counts, size, ["zymosis", "the", "pains"], words)
    assert learned.get_vocab_size() <= size
    tokenizer_files.save(learned, tmp_path)
    by_library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for tokenizer in (learned, tokenizer_files.load(tmp_path), by_library):
        for word in counts:
            assert tokenizer.encode(word, add_special_tokens=False).tokens == [word]
        ids = tokenizer.get_vocab()  # parts of whole words use the remaining room, if any
        beginnings = [ids[part] for part in ("zy", "zym", "th") if part in ids]
        assert all(part > max(ids[word] for word in counts) for part in beginnings)


@pytest.mark.parametrize("words", [BERT, GPT2])
def test_first_ids_are_special_tokens_and_text_never_contains_them(words, tmp_path):
    learned = subwords.learn(WORDS, 300, (), words)
    tokenizer_files.save(learned, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["mask_token"] == "[MASK]"
    by_library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Patients' painful é 12."
    assert by_library.encode(text).ids == learned.encode(text).ids
    for tokenizer in (learned, tokenizer_files.load(tmp_path)):
        assert tokenizer.encode(text).ids == learned.encode(text).ids
        assert SpecialIds.of(tokenizer) == SpecialIds()
        ids = tokenizer.encode("[MASK] pain [CLS]").ids
        assert (ids[0], ids[-1]) == (2, 3)
        assert not {0, 2, 3, 4} & set(ids[1:-1])


# --- exclusion of public words


def counted(
    texts: list[str], n: int, exclude: set[str], split: Callable[[str], list[str]] = split_words
) -> Counter[str]:
    units = ((str(i), split(text)) for i, text in enumerate(texts))
    shard = item_sets(units, n, b"key", exclude=exclude)
    held = np.bincount(shard.members, minlength=len(shard.items)).tolist()
    return Counter(dict(zip(shard.items.to_pylist(), held, strict=True)))


def test_excluded_public_words_make_room_for_others():
    counts = counted(["the of and pain arm"] * 20, 2, {"the", "of", "and"})
    assert counts == {"pain": 20, "arm": 20}


def test_word_is_excluded_in_the_form_in_which_it_is_counted():
    """`PAIN` and `Pain` are the public word `pain`; in GPT-2, ` pain` and `pain` differ."""
    assert set(counted(["PAIN Páin pain. Fever"], 9, {"pain", "."})) == {"fever"}
    cased = counted(["pain pain Pain"], 9, {"Ġpain"}, GPT2.split)
    assert set(cased) == {"pain", "ĠPain"}


def test_words_of_two_sources_alternate_without_a_common_scale():
    public = {"the": 900, "of": 800, "pain": 3}
    for scale in (1, 1000):
        released = {"pain": 40 * scale, "edema": 30 * scale}
        assert subwords.in_turns(public, released) == ["the", "pain", "of", "edema"]
    assert subwords.in_turns({"b": 1, "a": 1}) == ["a", "b"]  # ties by spelling
    assert subwords.in_turns({}, {}) == []
