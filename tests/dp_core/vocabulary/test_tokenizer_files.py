"""Tokenizers of checkpoints; those of real `transformers` need `make test-transformers`."""

import json
import os
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dp_core.config.privacy import VocabularyConfig
from dp_core.data.tokens import SPECIAL_TOKENS, Segmentation, SpecialIds, bert_segmentation
from dp_core.errors import BadInput
from dp_core.vocabulary import subwords, tokenizer_files
from dp_core.vocabulary.tokenizer_files import GPT2, WHOLE, of_checkpoint, stored_ids

HERE = Path(__file__).parent
SCRIPTS = tomllib.loads((HERE / "ten_scripts.toml").read_text())
TEXTS = [text for texts in SCRIPTS.values() for text in texts]
PYTHON = HERE.parents[2] / ".venv" / "transformers" / "bin" / "python"
KINDS = [
    *("uncased BERT", "cased BERT", "uncased BERT with accents", "cased BERT of Chinese runs"),
    *("RoBERTa", "RoBERTa with a space before", "GPT-2"),
]
FORMS = [*KINDS, *(f"{kind} without tokenizer.json" for kind in KINDS), "ModernBERT", "Llama 3"]
needs_transformers = pytest.mark.skipif(
    not PYTHON.exists(), reason="no .venv/transformers: run `make test-transformers`"
)


def transformers(command: str, folder: Path) -> None:
    script = HERE / "transformers_tokenizers.py"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command_line = [PYTHON, script, command, folder, json.dumps(TEXTS)]
    subprocess.run(command_line, check=True, env=os.environ | offline)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers that transformers saved, and their ids of each text."""
    folder = tmp_path_factory.mktemp("theirs")
    transformers("make", folder)
    return folder


@pytest.fixture(scope="module")
def ours(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizers as this project saves them, and the ids of transformers."""
    folder = tmp_path_factory.mktemp("ours")
    for name in FORMS:
        tokenizer_files.save(of_checkpoint(theirs / name), folder / name)
    transformers("read", folder)
    return folder


@needs_transformers
@pytest.mark.parametrize("name", FORMS)
def test_checkpoint_is_tokenized_as_by_transformers(theirs, name):
    tokenizer, (old, _) = of_checkpoint(theirs / name), stored_ids(theirs / name)
    assert SpecialIds.of(tokenizer) == SpecialIds()
    expected = json.loads((theirs / name / "ids.json").read_text())
    for text, ids in zip(TEXTS, expected, strict=True):
        tokens = tokenizer.encode(text, add_special_tokens=False).tokens
        assert [old[token] for token in tokens] == ids, text


@needs_transformers
@pytest.mark.parametrize("name", FORMS)
def test_transformers_reads_saved_tokenizers(ours, name):
    tokenizer = tokenizer_files.load(ours / name)
    expected = json.loads((ours / name / "ids.json").read_text())
    assert [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)] == expected
    assert of_checkpoint(ours / name).to_str() == tokenizer.to_str()


def written(folder: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


TOKENS = ["[PAD]", "[unused1]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "Pain", "pain", "Ödem", "odem"]
LISTED = "".join(f"{token}\n" for token in TOKENS)
WORD_PIECES = {"type": "WordPiece", "vocab": {token: i for i, token in enumerate(TOKENS)}}


@pytest.mark.cases
@pytest.mark.parametrize("whole", [False, True])
def test_checkpoint_is_normalized_as_it_states(tmp_path, stated, tokens, whole):
    written(tmp_path, {"vocab.txt": LISTED, "tokenizer_config.json": stated})
    if whole:  # as in transformers, the configuration has precedence
        about = bert_segmentation().to_json() | {"model": WORD_PIECES}
        about["normalizer"]["strip_accents"] = None
        written(tmp_path, {"tokenizer.json": about})
    tokenizer = of_checkpoint(tmp_path)
    assert tokenizer.encode("Pain Ödem odem", add_special_tokens=False).tokens == tokens
    ids = tokenizer.get_vocab()
    assert sorted(ids, key=ids.__getitem__) == [*SPECIAL_TOKENS, "[unused1]", *TOKENS[6:]]
    more = tokenizer_files.with_words(tokenizer, ["Fieber", "pain"])
    assert more.get_vocab() == ids | {"Fieber": len(ids)}
    tokenizer_files.save(more, tmp_path / "saved")
    for kept in (of_checkpoint(tmp_path / "saved"), tokenizer_files.load(tmp_path / "saved")):
        assert kept.to_str() == more.to_str()


BPE = {"type": "BPE", "vocab": {b: i for i, b in enumerate(tokenizer_files.ALPHABET)}, "merges": []}
SPLIT = {"pre_tokenizer": GPT2.to_json()["pre_tokenizer"]}
OTHER_MERGES = {"vocab.json": BPE["vocab"], "merges.txt": "#version: 0.2\nx yz\n"}
JAPANESE = {"tokenizer_class": "BertJapaneseTokenizer"}


def whole(**parts: object) -> dict[str, object]:
    return {"tokenizer.json": parts}


REFUSED = {
    "an empty folder": ({}, "no readable vocab.txt"),
    "damaged": ({"tokenizer.json": "{"}, "no readable"),
    "ids that are no numbers": (whole(model={"vocab": {"a": "b"}}, **SPLIT), "no readable"),
    "Unigram": (whole(model={"type": "Unigram", "vocab": [["a", 0.0]]}), "no readable"),
    "a normalizer": (
        whole(model=BPE, normalizer={"type": "Replace"}, **SPLIT),
        "it has the normalizer Replace",
    ),
    "SentencePiece": (
        whole(model=BPE, pre_tokenizer={"type": "Metaspace"}),
        "it has the pre_tokenizer Metaspace",
    ),
    "BPE of characters": (whole(model=BPE | {"vocab": {"a": 0}}, **SPLIT), "all 256 bytes"),
    "random merges": (whole(model=BPE | {"dropout": 0.1}, **SPLIT), "it has dropout"),
    "no merges": ({"vocab.json": BPE["vocab"]}, "no merges.txt"),
    "merges of other tokens": (OTHER_MERGES, "merges that do not fit its tokens"),
    "a class": (
        {"vocab.txt": LISTED, "tokenizer_config.json": JAPANESE},
        "it has the class BertJapaneseTokenizer",
    ),
    "words that are commands": (
        whole(model=WORD_PIECES, pre_tokenizer={"type": "WhitespaceSplit"}),
        "special tokens that occur in texts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokenizer_that_cannot_be_reproduced_is_refused_with_the_supported_ones(name, tmp_path):
    files, reason = REFUSED[name]
    with pytest.raises(BadInput, match=reason) as refusal:
        of_checkpoint(written(tmp_path, files))
    assert "Supported are WordPiece, and byte-level BPE" in str(refusal.value)
    assert "\n" not in str(refusal.value)


# --- learned vocabularies


@pytest.mark.parametrize("script", SCRIPTS)
def test_cased_vocabulary_keeps_accents_and_vowel_signs(script, tmp_path):
    """In ten scripts, no letter of a word is lost or replaced, if the case is kept."""
    text = " ".join(SCRIPTS[script]).replace("\u200d", "").replace("\xa0", " ")
    words = subwords.segmentation("wordpiece", VocabularyConfig(lowercase=False))
    assert "".join(words.split(text)) == "".join(text.split())
    tokenizer = subwords.learn(Counter(words.split(text)), 2000, words.split(text), words)
    tokenizer_files.save(tokenizer, tmp_path)
    read = tokenizer_files.load(tmp_path).encode(text, add_special_tokens=False)
    assert "".join(token.removeprefix("##") for token in read.tokens) == "".join(text.split())


def test_normalization_is_part_of_a_vocabulary_and_of_its_digest(tmp_path):
    counts, digests = {"pain": 9, "ödem": 8}, set()
    for lowercase, strip in ((True, True), (True, False), (False, False)):
        words = bert_segmentation(lowercase, strip)
        tokenizer_files.save(subwords.learn(counts, 100, (), words), tmp_path)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert (config["do_lower_case"], config["strip_accents"]) == (lowercase, strip)
        loaded = tokenizer_files.load(tmp_path)
        assert Segmentation.of(loaded) == words
        digests.add(subwords.vocabulary_digest(loaded))
    assert len(digests) == 3


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level-bpe"])
def test_placeholder_is_one_public_token(kind, tmp_path):
    kept = ("[**Name**]", "___")
    words = subwords.segmentation(kind, VocabularyConfig(placeholders="___ [**Name**]"))
    text = "Seen by [**Name**]___ [**name**] today"
    counts = Counter(words.split(text))
    assert [counts[placeholder] for placeholder in kept] == [1, 1]
    tokenizer_files.save(subwords.learn(counts, 300, list(counts), words), tmp_path)
    for tokenizer in (tokenizer_files.load(tmp_path), Tokenizer.from_file(f"{tmp_path}/{WHOLE}")):
        tokens = tokenizer.encode(text, add_special_tokens=False).tokens
        assert [tokens.count(placeholder) for placeholder in kept] == [1, 1]
        assert [tokenizer.token_to_id(placeholder) for placeholder in kept] == [5, 6]
    with pytest.raises(BadInput, match=r"\[MASK\] is a special token"):
        subwords.segmentation(kind, VocabularyConfig(placeholders="[MASK]"))
