"""Tokenizers of real `transformers`. Runs in `.venv/transformers`, not in pytest.

    python transformers_tokenizers.py make FOLDER TEXTS   writes tokenizers as they are published
    python transformers_tokenizers.py read FOLDER TEXTS   reads tokenizers with `AutoTokenizer`

TEXTS is a JSON list. Both write the ids of each text to `ids.json` in the tokenizer's folder.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
)

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BERTS = {  # as bert-base-uncased, bert-base-cased, and bert-base-multilingual-cased state it
    "uncased BERT": {"do_lower_case": True},
    "cased BERT": {"do_lower_case": False},
    "uncased BERT with accents": {"do_lower_case": True, "strip_accents": False},
    "cased BERT of Chinese runs": {"do_lower_case": False, "tokenize_chinese_chars": False},
}


def word_pieces(texts: list[str], do_lower_case: bool, **options: bool) -> dict[str, int]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=do_lower_case,
        strip_accents=options.get("strip_accents"),
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
    )
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    special = ["[PAD]", "[unused1]", "[unused2]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, special_tokens=special, show_progress=False, limit_alphabet=200
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def byte_level(texts: list[str], splitter: object, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, special_tokens=special,
        initial_alphabet=pre.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def made(texts: list[str]) -> dict[str, PreTrainedTokenizerFast]:
    tokenizers = {}
    for name, stated in BERTS.items():
        tokenizers[name] = BertTokenizer(vocab=word_pieces(texts, **stated), **stated)
    usual = pre.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    for name, space in (("RoBERTa", False), ("RoBERTa with a space before", True)):
        about = json.loads(byte_level(texts, usual, special).to_str())["model"]
        vocab = about["vocab"] | {"<mask>": len(about["vocab"])}
        merges = [tuple(pair) for pair in about["merges"]]
        tokenizers[name] = RobertaTokenizer(vocab=vocab, merges=merges, add_prefix_space=space)
    about = json.loads(byte_level(texts, usual, []).to_str())["model"]
    vocab = about["vocab"] | {"<|endoftext|>": len(about["vocab"])}
    tokenizers["GPT-2"] = GPT2Tokenizer(
        vocab=vocab, merges=[tuple(pair) for pair in about["merges"]]
    )
    neox = byte_level(texts, usual, ["<|padding|>", "<|endoftext|>"])
    neox.normalizer = normalizers.NFC()
    neox.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    neox.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", AddedToken("[MASK]", lstrip=True)])
    neox.add_tokens(["[unused0]", "[unused1]"])
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "cls", "sep", "pad", "mask")}
    tokenizers["ModernBERT"] = PreTrainedTokenizerFast(tokenizer_object=neox, **roles)
    splitter = pre.Sequence(
        [
            pre.Split(Regex(LLAMA_3), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    about = json.loads(byte_level(texts, splitter, []).to_str())
    about["model"]["ignore_merges"] = True
    llama = Tokenizer.from_str(json.dumps(about))
    llama.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    tokenizers["Llama 3"] = PreTrainedTokenizerFast(
        tokenizer_object=llama, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )
    return tokenizers


def make(folder: Path, texts: list[str]) -> None:
    for name, tokenizer in made(texts).items():
        for form in (name, f"{name} without tokenizer.json"):
            tokenizer.save_pretrained(folder / form)
        about = json.loads((folder / form / "tokenizer.json").read_text())["model"]
        if isinstance(tokenizer, BertTokenizer | RobertaTokenizer | GPT2Tokenizer):
            ids = tokenizer.get_vocab()
            tokens = sorted(ids, key=ids.__getitem__)
            if "merges" in about:
                (folder / form / "vocab.json").write_text(json.dumps(ids))
                lines = (" ".join(pair) for pair in about["merges"])
                (folder / form / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]))
            else:
                (folder / form / "vocab.txt").write_text("".join(f"{t}\n" for t in tokens))
            config = json.loads((folder / form / "tokenizer_config.json").read_text())
            kept = {k: v for k, v in config.items() if k not in ("strip_accents",) or v is not None}
            (folder / form / "tokenizer_config.json").write_text(json.dumps(kept))
            (folder / form / "tokenizer.json").unlink()
        else:
            for file in (folder / form).iterdir():
                file.unlink()
            (folder / form).rmdir()
    read(folder, texts, special=False)


def read(folder: Path, texts: list[str], special: bool = True) -> None:
    for inner in sorted(folder.iterdir()):
        tokenizer = AutoTokenizer.from_pretrained(inner)
        ids = [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
        (inner / "ids.json").write_text(json.dumps(ids))


if __name__ == "__main__":
    {"make": make, "read": read}[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]))
