import json

import numpy as np
import pytest
from small_models import random_model

from dp_core.errors import BadInput
from dp_core.models.config import BertConfig, Gpt2Config, LlamaConfig, RobertaConfig
from dp_core.models.hugging_face import load_with_vocabulary, read_vocabulary, save
from dp_core.models.parameters import WORD, Model
from dp_core.vocabulary.byte_level import ALPHABET

SIZES = {"hidden": 64, "layers": 1, "heads": 2, "intermediate": 12, "max_positions": 5}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OLD = [*SPECIAL, "pain", *(f"old{i}" for i in range(200))]
NEW = [*SPECIAL, "fever", "pain", *(f"new{i}" for i in range(100))]


def folder_of(config, folder):
    """Write a model with a table of nonzero mean."""
    model = random_model(config)
    model.parameters[WORD][:] += 0.5
    save(model, folder)
    return model, folder


@pytest.fixture()
def bert(tmp_path):
    old, folder = folder_of(BertConfig(vocab_size=len(OLD), **SIZES), tmp_path)
    (folder / "vocab.txt").write_text("".join(f"{p}\n" for p in OLD))
    return old, folder


def test_shared_tokens_keep_their_rows_and_new_tokens_are_sampled_like_the_old_table(bert):
    old, folder = bert
    new, same, other = (load_with_vocabulary(folder, NEW, seed=seed) for seed in (3, 3, 4))
    assert new.config.vocab_size == len(NEW)
    for name in (WORD, "mlm/bias"):
        np.testing.assert_array_equal(new.parameters[name][6], old.parameters[name][5])
        np.testing.assert_array_equal(new.parameters[name][:5], old.parameters[name][:5])
    kernel = "layer_0/output/kernel"
    np.testing.assert_array_equal(new.parameters[kernel], old.parameters[kernel])
    table, drawn = old.parameters[WORD], new.parameters[WORD][7:]
    assert drawn.mean() == pytest.approx(table.mean(), abs=0.02)
    assert drawn.std() == pytest.approx(0.88 * table.std(), rel=0.05)  # cut at two deviations
    assert len(np.unique(drawn, axis=0)) == len(drawn)
    mean = old.parameters["mlm/bias"].mean()
    np.testing.assert_allclose(new.parameters["mlm/bias"][7:], mean, rtol=1e-5)
    np.testing.assert_array_equal(new.parameters[WORD], same.parameters[WORD])
    assert not np.array_equal(drawn, other.parameters[WORD][7:])
    strange = load_with_vocabulary(folder, ["a", "b"], seed=0)  # no token of the old vocabulary
    assert np.isfinite(strange.parameters[WORD]).all()


GPT2 = {"pain": 0, "Ġpain": 1, "ĠcafÃ©": 2, "ing": 3, "<|endoftext|>": 4, "Ġ": 5}
LLAMA = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁pain": 3, "▁café": 5, "pain": 4, "ing": 0}
PIECES = ["[CLS]", "[SEP]", "pain", "##pain", "café", "##ing"]


@pytest.mark.parametrize(
    ("config", "file", "vocabulary", "before"),
    [
        (Gpt2Config(vocab_size=6, **SIZES), "vocab.json", GPT2, [4, 4, 1, 0, 2, 3]),
        (Gpt2Config(vocab_size=6, **SIZES), "tokenizer.json", GPT2, [4, 4, 1, 0, 2, 3]),
        *(  # markers are recognised by their ids
            (
                LlamaConfig(vocab_size=6, **SIZES, tied=tied, begin=1, end=2),
                *("tokenizer.json", LLAMA, [1, 2, 3, 4, 5, 0]),
            )
            for tied in (False, True)
        ),
    ],
)
def test_tokens_are_matched_by_their_wordpiece_form(tmp_path, config, file, vocabulary, before):
    """A token with GPT-2's or SentencePiece's mark begins a word."""
    old, folder = folder_of(config, tmp_path)
    whole = {"model": {"type": "BPE", "vocab": vocabulary}}
    (folder / file).write_text(json.dumps(vocabulary if file == "vocab.json" else whole))
    new = load_with_vocabulary(folder, [*PIECES, "new"], seed=0)
    np.testing.assert_array_equal(new.parameters[WORD][:6], old.parameters[WORD][before])
    if (head := new.parameters.get("head/kernel")) is not None:
        np.testing.assert_array_equal(head[:, :6], old.parameters["head/kernel"][:, before])
        assert np.isfinite(head).all()
        assert head.shape == (64, 7)
    assert (new.config.begin, new.config.end) == (2, 3)


def test_special_tokens_of_roberta_and_added_tokens_keep_their_roles(tmp_path):
    theirs = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "Ġpain": 4}
    old, folder = folder_of(RobertaConfig(vocab_size=6, **SIZES), tmp_path)
    added = [{"content": "<mask>", "id": 5}]
    whole = {"model": {"type": "BPE", "vocab": theirs}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    table = old.parameters[WORD][[1, 3, 0, 2, 5, 4]]
    for tokens in ([*SPECIAL, "Ġpain", *ALPHABET], [*SPECIAL, "pain"]):
        new = load_with_vocabulary(folder, tokens, seed=0).parameters[WORD]
        np.testing.assert_array_equal(new[:6], table)


def test_byte_level_tokens_are_matched_unchanged(tmp_path):
    vocabulary = {"pain": 0, "Ġpain": 1, "ing": 2, "s": 3, "<|endoftext|>": 4, "Ġ": 5}
    old, folder = folder_of(Gpt2Config(vocab_size=6, **SIZES), tmp_path)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    tokens = ["[CLS]", "[SEP]", "Ġpain", "pain", *ALPHABET, "Ġpains", "ĠĠing"]
    table = load_with_vocabulary(folder, tokens, seed=0).parameters[WORD]
    theirs = old.parameters[WORD]
    np.testing.assert_array_equal(table[:4], theirs[[4, 4, 1, 0]])
    np.testing.assert_allclose(table[-2], theirs[[1, 3]].mean(0), rtol=1e-6)
    np.testing.assert_allclose(table[-1], theirs[[5, 5, 2]].mean(0), rtol=1e-6)


def test_new_token_starts_as_the_mean_of_its_old_pieces(bert):
    old, folder = bert
    with (folder / "vocab.txt").open("w") as file:
        rest = ["pain", "##ful", "##f", "pa", "##in"]
        file.write("".join(f"{t}\n" for t in [*SPECIAL, *rest, *OLD[10:]]))
    table = load_with_vocabulary(
        folder, [*SPECIAL, "painful", "##fulf", "painx"], seed=3
    ).parameters[WORD]
    theirs = old.parameters[WORD]
    np.testing.assert_allclose(table[5], theirs[[5, 6]].mean(0), rtol=1e-6)  # pain ##ful
    np.testing.assert_allclose(table[6], theirs[[6, 7]].mean(0), rtol=1e-6)  # ##ful ##f
    assert np.abs(table[7] - theirs[[5, 9]].mean(0)).max() > 0.01  # x has no pieces: random


def test_vocabulary_is_read_from_tokenizer_json_if_there_is_no_other(bert):
    _, folder = bert
    (folder / "vocab.txt").unlink()
    vocabulary = {piece: i for i, piece in enumerate(OLD)}
    whole = {"model": {"type": "WordPiece", "vocab": vocabulary}}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    assert read_vocabulary(folder) == vocabulary


def test_missing_vocabulary_and_vocabulary_larger_than_the_table_are_refused(bert):
    _, folder = bert
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")
    with pytest.raises(BadInput, match="larger than the model's table"):
        load_with_vocabulary(folder, NEW, seed=0)
    (folder / "vocab.txt").unlink()
    with pytest.raises(BadInput, match="no readable vocab"):
        load_with_vocabulary(folder, NEW, seed=0)


def test_labels_survive_a_new_vocabulary(bert, tmp_path):
    old, folder = bert
    encoder = {n: a for n, a in old.parameters.items() if not n.startswith("mlm/")}
    head = {"tagger/kernel": np.ones((64, 1), "f"), "tagger/bias": np.ones(1, "f")}
    save(Model(old.config, encoder | head, ("O",)), folder)
    assert load_with_vocabulary(folder, NEW, seed=0).labels == ("O",)
