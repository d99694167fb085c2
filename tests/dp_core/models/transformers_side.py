"""Real `transformers` on model folders. Runs in `.venv/transformers`, not in pytest.

    python transformers_side.py make FOLDER   writes small random models, and their logits
    python transformers_side.py read FOLDER   reads models, and writes their logits
    python transformers_side.py peft FOLDER   reads models with their adapters, likewise

A model's folder contains `asked.npz`: ids (M, S), lengths (M,), and types (M, S) for a classifier.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
)

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{c}" for c in "abcde")]
WORDS = len(PIECES)
SIZES = {"vocab_size": WORDS, "initializer_range": 0.3}
SHAPES = json.loads(Path(__file__).with_name("transformers_sizes.json").read_text())
BERT, DISTILBERT, GPT2, LLAMA3 = (SHAPES[n] for n in ("bert", "distilbert", "gpt2", "llama3"))
ROBERTA = BERT | {"type_vocab_size": 1}  # padding is 1, so its rows have 10 positions
LLAMA = BERT | {"num_attention_heads": 4, "num_key_value_heads": 2}
LABELS = {"id2label": {0: "O", 1: "B-x", 2: "I-x"}, "label2id": {"O": 0, "B-x": 1, "I-x": 2}}


def make(folder: Path) -> None:
    """Write models as `save_pretrained` does, with a BERT vocabulary."""
    torch.manual_seed(0)
    models = {
        "bert": transformers.BertForMaskedLM(BertConfig(**SIZES, **BERT)),
        "distilbert": transformers.DistilBertForMaskedLM(DistilBertConfig(**SIZES, **DISTILBERT)),
        "roberta": transformers.RobertaForMaskedLM(RobertaConfig(**SIZES, **ROBERTA)),
        "gpt2": transformers.GPT2LMHeadModel(GPT2Config(**SIZES, **GPT2)),
        "llama": transformers.LlamaForCausalLM(LlamaConfig(**SIZES, **LLAMA)),
        "tied-llama": transformers.LlamaForCausalLM(
            LlamaConfig(
                **SIZES,
                **LLAMA,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            )
        ),
        "llama-3": transformers.LlamaForCausalLM(
            LlamaConfig(**SIZES, **LLAMA, head_dim=8, rope_parameters=LLAMA3)
        ),
        "tagger": transformers.BertForTokenClassification(BertConfig(**SIZES, **BERT, **LABELS)),
        "classifier": transformers.BertForSequenceClassification(
            BertConfig(**SIZES, **BERT, **LABELS)
        ),
        "distilled-classifier": transformers.DistilBertForSequenceClassification(
            DistilBertConfig(**SIZES, **DISTILBERT, **LABELS)
        ),
        "roberta-classifier": transformers.RobertaForSequenceClassification(
            RobertaConfig(**SIZES, **ROBERTA, **LABELS)
        ),
    }
    for name, model in models.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        (folder / name / "vocab.txt").write_text("".join(f"{p}\n" for p in PIECES))
        rng = np.random.default_rng(0)
        asked = {
            "ids": rng.integers(2, WORDS, (3, 9)),  # RoBERTa gives padding no position
            "lengths": np.array([9, 4, 7]),
            "types": (np.arange(9) >= np.array([[9], [3], [5]])).astype(int),
        }
        np.savez(folder / name / "asked.npz", **asked)
        np.save(folder / name / "logits.npy", logits_of(model, asked))


def read(folder: Path) -> None:
    """Read every model with the class that its `config.json` names."""
    for model_folder in sorted(folder.iterdir()):
        words = json.loads((model_folder / "config.json").read_text())["architectures"]
        model, about = getattr(transformers, words[0]).from_pretrained(
            model_folder, output_loading_info=True, dtype=torch.float32
        )
        np.save(
            model_folder / "logits.npy",
            logits_of(model, dict(np.load(model_folder / "asked.npz", allow_pickle=False))),
        )
        loading = {key: sorted(map(str, about[key])) for key in ("missing_keys", "unexpected_keys")}
        if (model_folder / "tokenizer.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(model_folder)
            loading["pieces"] = tokenizer("ab fa bed")["input_ids"]
            loading["words"] = tokenizer.decode(loading["pieces"], skip_special_tokens=True)
        (model_folder / "loading.json").write_text(json.dumps(loading))


def peft(folder: Path) -> None:
    """Read each `base` with its `adapter`, and merge the two."""
    from peft import PeftModel

    for model_folder in sorted(folder.iterdir()):
        words = json.loads((model_folder / "base" / "config.json").read_text())["architectures"]
        task = json.loads((model_folder / "adapter" / "adapter_config.json").read_text())[
            "task_type"
        ]
        name = words[0]
        if task == "TOKEN_CLS":  # the classifier is in the adapter, not in the base
            name = name.replace("ForMaskedLM", "ForTokenClassification")
        kind, labels = getattr(transformers, name), LABELS if task == "TOKEN_CLS" else {}
        base = kind.from_pretrained(model_folder / "base", dtype=torch.float32, **labels)
        asked = dict(np.load(model_folder / "asked.npz", allow_pickle=False))
        model = PeftModel.from_pretrained(base, model_folder / "adapter")
        np.save(model_folder / "logits.npy", logits_of(model, asked))
        zero = [n for n, p in model.named_parameters() if "lora_" in n and not p.any()]
        count = sum("lora_" in n for n, _ in model.named_parameters())
        (model_folder / "loading.json").write_text(json.dumps({"zero": zero, "tensors": count}))
        np.save(model_folder / "merged.npy", logits_of(model.merge_and_unload(), asked))


def logits_of(model: torch.nn.Module, asked: dict[str, np.ndarray]) -> np.ndarray:
    model.eval()
    s = asked["ids"].shape[1]
    inputs = {
        "input_ids": torch.tensor(asked["ids"]),
        "attention_mask": torch.tensor(np.arange(s) < asked["lengths"][:, None]).long(),
    }
    if type(model).__name__ == "BertForSequenceClassification":
        inputs["token_type_ids"] = torch.tensor(asked["types"])
    with torch.no_grad():
        return model(**inputs).logits.numpy()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    {"make": make, "read": read, "peft": peft}[sys.argv[1]](Path(sys.argv[2]))
