import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from dp_core.data.tokens import SPECIAL_TOKENS
from dp_core.errors import BadInput
from dp_core.vocabulary import byte_level, tokenizer_files
from dp_core.vocabulary.tokenizer_files import GPT2

COUNTS = {"Ġpatient": 500, "Ġpatients": 300, "Ġpain": 400, "Patient": 70, "Ġ120": 50, ".": 900}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level.learn(COUNTS, 300)


def test_vocabulary_equals_tokenizers_on_the_same_text():
    text = "the theme of the thesis is then these things, the THE The " * 3 + "pain pains painful"
    counts: dict[str, int] = {}
    for word in GPT2.split(text):
        counts[word] = counts.get(word, 0) + 1
    theirs = Tokenizer(BPE())
    theirs.pre_tokenizer = ByteLevel(add_prefix_space=False)
    theirs.train_from_iterator(
        [text],
        BpeTrainer(
            vocab_size=290, min_frequency=0, show_progress=False,
            special_tokens=[*SPECIAL_TOKENS, *tokenizer_files.ALPHABET], limit_alphabet=0,
        ),
    )  # fmt: skip
    assert byte_level.learn(counts, 290).get_vocab() == theirs.get_vocab()


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_every_text_is_encoded_and_decoded_unchanged(text):
    tokenizer = byte_level.learn(COUNTS, 300)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert not set(ids) & set(range(5))
    assert tokenizer.decode(ids) == text


def test_invalid_vocabularies_are_refused():
    with pytest.raises(BadInput, match="no word"):
        byte_level.learn({}, 300)
    with pytest.raises(BadInput, match="Use 261 or more"):
        byte_level.learn(COUNTS, 260)
    assert len(byte_level.learn(COUNTS, 261).get_vocab()) == 261
