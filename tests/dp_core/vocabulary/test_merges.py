import json
import random

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from dp_core.vocabulary.merges import learn_merges, whole_words_apart

SPECIAL = ["[PAD]", "[UNK]"]


def theirs(learner: Tokenizer, trainer, words: dict[str, int]) -> list[str]:
    learner.pre_tokenizer = WhitespaceSplit()
    learner.train_from_iterator([f"{word} " * count for word, count in words.items()], trainer)
    vocab = learner.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def trainer_settings(size: int, base: list[str]) -> dict:
    return {
        "vocab_size": size, "min_frequency": 0, "special_tokens": base, "limit_alphabet": 0,
        "show_progress": False,
    }  # fmt: skip


def made_up(seed: int) -> tuple[dict[str, int], list[str], int]:
    """Words of few letters: many ties, repeated letters, tokens that two pairs spell."""
    rng = random.Random(seed)
    letters = "abcdefgh"[: rng.randint(1, 8)]
    counts = (3,) if seed % 2 else (1, 1, 2, 3, 50)
    words = {
        "".join(rng.choice(letters) for _ in range(rng.randint(1, 9))): rng.choice(counts)
        for _ in range(rng.randint(1, 60))
    }
    return words, sorted({c for word in words for c in word}), rng.randint(10, 150)


@pytest.mark.parametrize("block", range(5))
def test_word_pieces_equal_tokenizers(block):
    for seed in range(40 * block, 40 * (block + 1)):
        words, letters, size = made_up(seed)
        base = [*SPECIAL, *letters, *("##" + c for c in letters)]
        trainer = WordPieceTrainer(continuing_subword_prefix="##", **trainer_settings(size, base))
        expected = theirs(Tokenizer(WordPiece(unk_token="[UNK]")), trainer, words)
        assert learn_merges(words, base, size, prefix="##")[0] == expected, seed


@pytest.mark.parametrize("block", range(5))
def test_byte_pairs_equal_tokenizers_in_order(block):
    for seed in range(1000 + 40 * block, 1000 + 40 * (block + 1)):
        words, letters, size = made_up(seed)
        base = [*SPECIAL, *letters]
        learner = Tokenizer(BPE())
        expected = theirs(learner, BpeTrainer(**trainer_settings(size, base)), words)
        tokens, merges = learn_merges(words, base, size)
        assert tokens == expected, seed
        assert [list(m) for m in merges] == json.loads(learner.to_str())["model"]["merges"], seed


def test_counts_of_any_size_are_exact():
    """A difference of one in 10¹⁸ decides; a scaled count would be a tie."""
    large = {"ab": 10**18, "cd": 10**18 + 1}
    assert learn_merges(large, list("abcd"), 5)[0][-1] == "cd"
    assert learn_merges(large | {"cd": 10**18}, list("abcd"), 5)[0][-1] == "ab"


def test_characters_outside_the_alphabet_are_left_out():
    tokens, merges = learn_merges({"axb": 5, "ab": 1}, ["a", "b"], 9)
    assert (tokens, merges) == (["a", "b", "ab"], [("a", "b")])


def test_vocabulary_does_not_exceed_its_size():
    words = {"abcd": 3, "bcd": 2}
    for size in range(4, 9):
        assert len(learn_merges(words, list("abcd"), size)[0]) == min(size, 7)
    assert learn_merges(words, list("abcd"), 2) == (list("abcd"), [])


def test_whole_words_take_at_most_three_quarters_of_the_room_in_order():
    counts = {"a": 9, "ab": 8, "bc": 7, "cd": 6, "de": 5, "ef": 4}
    left, tokens = whole_words_apart(counts, ["[PAD]", "a"], 6, ["a", "de", "zz", "bc", "cd"])
    assert tokens == ["[PAD]", "a", "de", "zz", "bc"]
    assert left == {"a": 9, "ab": 8, "cd": 6, "ef": 4}
    assert whole_words_apart(counts, ["[PAD]", "a"], 1, ["de"]) == (counts, ["[PAD]", "a"])
