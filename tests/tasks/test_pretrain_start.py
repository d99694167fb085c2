from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_core.config.training import BatchConfig
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig, Gpt2Config
from dp_core.models.hugging_face import save
from dp_core.models.parameters import WORD, AnyModel, fresh
from dp_core.vocabulary import subwords, tokenizer_files
from tasks.context import StepContext, content_key
from tasks.protocol.job import job_steps
from tasks.protocol.points import OF_JOB, Mode
from tasks.protocol.settings import JobSettings
from tasks.releases.declarations import declare_public
from tasks.runtime.deployment import Deployment
from tasks.steps import pretrain_step as pretrain
from tasks.steps.training_files import TrainingInputs
from tasks.storage.store import Store

WORDS = {"pain": 50, "fever": 40, "cough": 30, "rash": 20}


def deployment_in(tmp_path: Path) -> Deployment:
    return Deployment.from_environment({"CONFIDE_HOME": str(tmp_path / "home")})


def start(tmp_path: Path, mode: Mode = "public", **settings: Any) -> AnyModel:
    shape: dict[str, Any] = {} if "public_model" in settings else {"layers": 1, "hidden": 64}
    spec = job_steps(JobSettings(**shape | settings))[f"{OF_JOB[mode]} / pretraining"]
    tokenizer = subwords.learn(WORDS, 60)
    folder = tmp_path / "vocabulary"
    folder.mkdir(exist_ok=True)
    tokenizer_files.save(tokenizer, folder)
    facts = {"vocabulary_size": tokenizer.get_vocab_size()}
    vocabulary = SimpleNamespace(folder=folder, facts=facts)
    inputs = cast(TrainingInputs, SimpleNamespace(vocabulary=vocabulary, initial=None))
    ours = deployment_in(tmp_path)
    key = content_key(ours, "content-digest")
    kept = Store(ours.store, ours.cache)
    attributes = {"durable": tmp_path / "work", "deployment": ours, "store": kept}
    attributes |= {"content_key": lambda: key, "source_digests": {}}
    context = cast(StepContext, SimpleNamespace(**attributes))
    store = cast(Any, SimpleNamespace(sequence_length=16))
    return pretrain._start(spec, context, store, inputs)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "gpt2"])
def test_fresh_model_has_the_requested_kind(tmp_path, kind):
    model = start(tmp_path, model_kind=kind)
    assert model.config.kind == kind
    assert (model.config.layers, model.config.hidden) == (1, 64)


def test_embeddings_of_shared_tokens_are_copied_from_the_public_model(tmp_path):
    theirs, public = subwords.learn({"pain": 9, "leaf": 9}, 40), tmp_path / "public"
    public.mkdir()
    tokenizer_files.save(theirs, public)
    shape = BertConfig.of_size(
        vocab_size=theirs.get_vocab_size(), hidden=128, layers=2, max_positions=16
    )
    model = fresh(shape, 3)
    save(model, public)
    with pytest.raises(BadInput, match="confide ledger declare-public"):
        start(tmp_path, public_model=str(public))
    declare_public(str(public), deployment_in(tmp_path), known_private=False)
    initial = start(tmp_path, public_model=str(public))
    ours = subwords.learn(WORDS, 60)
    assert (initial.config.layers, initial.config.hidden) == (2, 128)
    assert initial.config.vocab_size == ours.get_vocab_size()
    rows = [(ours.token_to_id(p), theirs.token_to_id(p)) for p in ("[MASK]", "p")]
    for new, old in rows:
        np.testing.assert_array_equal(initial.parameters[WORD][new], model.parameters[WORD][old])


@pytest.mark.parametrize(("kind", "other"), [("bert", "gpt2"), ("gpt2", "bert")])
def test_public_model_of_another_architecture_is_refused(tmp_path, kind, other):
    theirs, public = subwords.learn({"pain": 9, "leaf": 9}, 40), tmp_path / "public"
    public.mkdir()
    tokenizer_files.save(theirs, public)
    size = {"vocab_size": theirs.get_vocab_size(), "hidden": 64, "layers": 1, "max_positions": 16}
    config = Gpt2Config.of_size(**size) if kind == "bert" else BertConfig.of_size(**size)
    save(fresh(config, 3), public)
    declare_public(str(public), deployment_in(tmp_path), known_private=False)
    with pytest.raises(BadInput, match=f"model_kind is {other} in the folder.*Set model_kind"):
        start(tmp_path, public_model=str(public), model_kind=kind)
    with pytest.raises(BadInput, match="layers is 1 in the folder, but 2 in the settings"):
        start(tmp_path, public_model=str(public), model_kind=other, layers=2)
    assert start(tmp_path, public_model=str(public), model_kind=other).config.kind == other


def test_private_trainings_start_from_the_public_step_only(tmp_path):
    steps = job_steps(JobSettings(public_model="/bert"))
    modes: tuple[Mode, ...] = ("dp", "nonprivate")
    for mode in modes:
        spec = steps[f"{OF_JOB[mode]} / pretraining"]
        assert (spec.public_model, bool(spec.init_uri)) == ("", True)
    with pytest.raises(BadInput, match="no such file"):
        start(tmp_path, public_model=str(tmp_path / "nowhere"))


@given(
    rows=st.lists(st.integers(1, 8), min_size=60, max_size=200),
    missing=st.integers(0, 200),
    most=st.integers(1, 8),
    batch=st.integers(16, 60),
    epochs=st.floats(0.5, 20),
)
def test_training_without_privacy_reads_its_epochs_over_the_real_rows(
    rows, missing, most, batch, epochs
):
    declared = len(rows) + missing
    settings = JobSettings(declared_units=declared, batch_size=16, nonprivate_batch_size=batch)
    updates = settings.updates_after("nonprivate", epochs)
    store = cast(Any, SimpleNamespace(unit_rows=np.cumsum([0, *rows])))
    batches = BatchConfig(batch_size=batch, examples_per_step=most)
    read = updates * pretrain.rows_per_update(store, batches, declared)
    of_an_epoch = sum(min(count, most) for count in rows)
    # Both the number of updates and the rows of an update are whole numbers.
    slack = (updates + 1) * 0.5 + of_an_epoch * batch / declared
    assert abs(read - epochs * of_an_epoch) <= slack
