"""Readers answer a corrupted file with a result or with a one-line error that quotes no content."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corruption import corrupted, misshapen

from dp_core.audit.canaries import draw
from dp_core.config.data import CanaryConfig
from dp_core.data.corpus import Document, open_corpus, write_corpus
from dp_core.data.labelled_text import LabelledText, Sentence
from dp_core.data.readers.labelled_texts import Diagnoses
from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.errors import ConfideError
from dp_core.models import hugging_face as weights
from dp_core.models.config import BertConfig
from dp_core.models.parameters import Model, initial_values, parameter_shapes
from dp_core.privacy.mechanisms import MechanismEvent
from dp_core.privacy.seed_store import SeedStore
from dp_core.training.checkpoints import Checkpoints, LocalFolder
from dp_core.vocabulary import subwords, tokenizer_files
from tasks.commands.settings_options import settings_from
from tasks.execution import contract
from tasks.protocol.job import job_steps
from tasks.protocol.settings import JobSettings
from tasks.results import read_result
from tasks.steps import canaries_step, entities_step
from tasks.storage.store import Store

SECRET = "zyxsecret"  # represents the private text of a note
CORRUPTIONS = 40
VOCABULARY = {SECRET: 900, "pain": 800, "has": 700, "fever": 600}
TINY = BertConfig(vocab_size=24, hidden=64, layers=1, heads=1, intermediate=64, max_positions=16)


Make = Callable[[Path], Path]  # writes a valid example in a folder


def corpus(file: str, folder: Path) -> Path:
    notes = (Document(f"d{i}", f"p{i % 3}", f"{SECRET} {i}", "") for i in range(9))
    write_corpus(notes, folder, 1)
    return folder / file


def labelled(item: Sentence | LabelledText, folder: Path) -> Path:
    folder.mkdir()
    entities_step.write_items([item] * 5, folder / "train.jsonl")
    return folder / "train.jsonl"


SENTENCE = Sentence((SECRET, "pain"), ("B-problem", "I-problem"), "d")
TEXT = LabelledText(SECRET, "pain", "yes", "d", "p")


def vocabulary(folder: Path) -> Path:
    tokenizer_files.save(subwords.learn(VOCABULARY, 200), folder)
    return folder / "tokenizer.json"


def canaries(folder: Path) -> Path:
    vocabulary(folder / "v")
    file = folder / canaries_step.FILE
    config = CanaryConfig(canary_patterns="HS", canary_rates="0.01", canaries_per_group=2)
    drawn = draw(folder / "v", config, 1)
    file.write_text(json.dumps([vars(canary) for canary in drawn]))
    return file


def store(file: str, folder: Path) -> Path:
    writer = TokenStoreWriter(folder, 8, 300)
    for unit in range(6):
        writer.add_unit(f"{SECRET}{unit}", [[unit + 5, 7, 8]] * (unit % 2 + 1))
    writer.finish()
    return folder / file


def every_row(folder: Path) -> object:
    opened = TokenStore.open(folder)
    return [
        opened.tokens[opened.rows_of(u)] for u in range(opened.n_units)
    ], opened.content_digest()


def model(file: str, folder: Path) -> Path:
    values = initial_values(parameter_shapes(TINY), 0.1, 1)
    weights.save(Model(TINY, values), folder)
    return folder / file


def checkpoint(folder: Path) -> Path:
    arrays = {"a": np.arange(40, dtype=np.float32), "b": np.ones((3, 4), np.float32)}
    Checkpoints(LocalFolder(folder), "run").save(3, arrays)
    return next(folder.glob("*.safetensors"))


def newest(folder: Path) -> object:
    """A damaged checkpoint is skipped: training resumes from the previous one or starts again."""
    if Checkpoints(LocalFolder(folder), "run").latest() is None:
        raise ConfideError("no checkpoint is whole")
    return folder


def seed(folder: Path) -> Path:
    SeedStore(folder / "seeds").create("release")
    return folder / "seeds" / "release.json"


def written(name: str, content: object, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder / name


SPEC = json.loads(job_steps(JobSettings())["With DP / pretraining"].model_dump_json())
RESULT: dict[str, Any] = {
    "step": "corpus",
    "spec_hash": "ab",
    "outputs": {"corpus": "file:///s/x"},
    "metrics": [{"name": "documents", "value": 1.0, "label": "operator", "step": 0}],
    "facts": {"made_up": True, "note": 1},
}
EVENT = {"kind": "histogram", "version": 1, "unit": "patient", "sigma": 20.0}
CHECKSUMS = {"a.txt": {"sha256": "0" * 64, "bytes": 3}, "b/c.txt": {"sha256": "1" * 64, "bytes": 1}}


def diagnoses(folder: Path) -> Path:
    folder.mkdir()
    rows = "".join(f'{i % 7},{SECRET},"{SECRET} {i}"\n' for i in range(30))
    (folder / "codes.csv").write_text("SUBJECT_ID,HADM_ID,ICD9_CODE\n" + rows)
    return folder / "codes.csv"


CASES: dict[str, tuple[Make, Callable[[Path], object]]] = {  # how each file is made and read
    "a table of codes": (diagnoses, Diagnoses),
    "a shard of a corpus": (partial(corpus, "shard-0000.parquet"), lambda f: list(open_corpus(f))),
    "a corpus's mark": (partial(corpus, "corpus.json"), lambda f: list(open_corpus(f))),
    "sentences": (
        partial(labelled, SENTENCE),
        lambda f: entities_step.read_items(f, "train", "entities"),
    ),
    "texts": (partial(labelled, TEXT), lambda f: entities_step.read_items(f, "train", "classes")),
    "tokenizer.json": (vocabulary, tokenizer_files.load),
    "a checkpoint's tokenizer": (vocabulary, tokenizer_files.of_checkpoint),
    "canaries.json": (canaries, canaries_step.read_canaries),
    "store.json": (partial(store, "store.json"), every_row),
    "tokens.bin": (partial(store, "tokens.bin"), every_row),
    "unit_rows.bin": (partial(store, "unit_rows.bin"), every_row),
    "lengths.bin": (partial(store, "lengths.bin"), every_row),
    "config.json": (partial(model, "config.json"), weights.load_model),
    "model.safetensors": (partial(model, "model.safetensors"), weights.load_model),
    "checkpoint": (checkpoint, newest),
    "seed": (seed, lambda f: SeedStore(f / "seeds").get("release")),
    "spec": (
        partial(written, "s.json", SPEC),
        lambda f: contract._spec("pretrain", str(f / "s.json")),
    ),
    "settings": (
        partial(written, "s.json", {"layers": 3, "canary_rates": "0.5", "data_version": "2"}),
        lambda f: settings_from(JobSettings, file=f / "s.json"),
    ),
    "result.json": (
        partial(written, "result.json", RESULT),
        lambda f: read_result(Store(str(f.parent), f / "cache"), str(f)),
    ),
    "checksums.json": (
        partial(written, "checksums.json", CHECKSUMS),
        lambda f: Store(str(f.parent), f / "cache").local_copy(str(f)),
    ),
}
AS_JSON = {
    *("tokenizer.json", "a checkpoint's tokenizer"),
    *("canaries.json", "store.json", "config.json", "seed", "spec", "settings"),
    *("result.json", "checksums.json"),
}


@pytest.mark.filterwarnings("ignore:Reading .*npy")  # NumPy tries a header of Python 2 first
@pytest.mark.parametrize("name", CASES)
def test_corrupted_file_is_read_or_refused_without_its_content(name, tmp_path, capfd):
    (make, read), rng = CASES[name], random.Random(name)
    file = make(tmp_path / "x")
    good, refused = file.read_bytes(), 0
    for number in range(CORRUPTIONS):
        bad = misshapen(good, rng) if name in AS_JSON and number % 2 else corrupted(good, rng)
        file.write_bytes(bad)
        try:
            read(tmp_path / "x")
        except ConfideError as error:
            refused += 1
            assert SECRET not in str(error)
            assert "\n" not in str(error)
        except Exception as error:  # noqa: BLE001 - names the case, so that it can be repeated
            pytest.fail(f"{name}, number {number}: {type(error).__name__}: {bad[:300]!r}")
    assert refused > CORRUPTIONS // 8, "the corruption does not corrupt"
    output = capfd.readouterr()
    assert SECRET not in output.out + output.err


def test_misshapen_events_are_refused():
    rng = random.Random("events")
    good = json.dumps(EVENT).encode()
    refused = 0
    for _ in range(CORRUPTIONS):
        try:
            MechanismEvent.from_json(json.loads(misshapen(good, rng)))
        except ConfideError:
            refused += 1
    assert refused
