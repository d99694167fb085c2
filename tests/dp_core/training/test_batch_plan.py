"""Batches written beforehand are those that would be drawn; nobody else may see or change them."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

from dp_core.errors import BadInput
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.batch_plan import BatchPlan, BatchPlanKey, write_update
from dp_core.training.batch_source import private_batches
from dp_core.training.checkpoint_places import LocalFolder
from dp_core.training.pretrain import pretrain
from dp_core.training.rows import masked_examples

SEED = PrivacySeed.fixed(4)


@pytest.fixture()
def key(store, plan_of, recipe_of):
    return BatchPlanKey(SEED, b"manifest", plan_of(), recipe_of(), store.digest, 1)


@pytest.fixture()
def drawn(store, key):
    return private_batches(store, key.plan, key.recipe, SEED, devices=1, examples=masked_examples)


@pytest.fixture()
def written(folder, key, drawn):
    for t in reversed(range(key.plan.steps)):
        write_update(folder, key, t, drawn.update(t), part_bytes=600)
    return folder


def alike(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a.arrays(), b.arrays(), strict=True))


def test_what_is_read_is_what_would_be_drawn(written, key, drawn):
    plan = BatchPlan(written, key)
    for t in range(key.plan.steps):
        pairs = list(zip(plan.update(t), drawn.update(t), strict=True))
        assert all(alike(read, made) for read, made in pairs)
    assert len(list(written.glob("0000000000-*"))) > 1  # an update in several parts


def test_training_from_files_gives_the_same_bits(written, key, store, config, tmp_path):
    models = [
        pretrain(
            model=config,
            store=store,
            plan=key.plan,
            recipe=key.recipe,
            seed=SEED,
            manifest=b"manifest",
            init_seed=1,
            checkpoints=LocalFolder(tmp_path / name),
            device="cpu",
            progress=lambda p: None,
            batches=batches,
        )
        for name, batches in (("drawn", None), ("read", BatchPlan(written, key)))
    ]
    for name, values in models[0].parameters.items():
        np.testing.assert_array_equal(values, models[1].parameters[name])


def test_an_update_without_units_is_written_too(folder, key):
    write_update(folder, key, 0, iter(()))
    assert list(BatchPlan(folder, key).update(0)) == []


def test_only_the_owner_can_reach_the_files(written):
    assert written.stat().st_mode & 0o077 == 0
    for file in written.iterdir():
        assert file.stat().st_mode & 0o177 == 0


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_can_reach_is_not_used(written, key, what):
    file = written / "0000000000-00000.safetensors"
    (written if what == "folder" else file).chmod(0o755)
    with pytest.raises(BadInput, match=r"others than its owner.*who was sampled"):
        list(BatchPlan(written, key).update(0))


def test_a_group_is_others_too(written, key):
    written.chmod(0o750)
    with pytest.raises(BadInput, match="others than its owner"):
        BatchPlan(written, key)


def test_nothing_is_written_where_others_can_reach(tmp_path, key, drawn):
    umask = os.umask(0)
    try:
        (tmp_path / "open").mkdir()
        with pytest.raises(BadInput, match="others than its owner"):
            write_update(tmp_path / "open", key, 0, drawn.update(0))
        write_update(tmp_path / "new", key, 0, drawn.update(0))
    finally:
        os.umask(umask)
    assert all(f.stat().st_mode & 0o077 == 0 for f in (tmp_path / "new").iterdir())


def test_batches_of_another_run_are_refused(written, key, plan_of, recipe_of):
    for change in (
        {"seed": PrivacySeed.fixed(5)},
        {"manifest": b"other"},
        {"plan": plan_of(noise_multiplier=0.8)},
        {"recipe": recipe_of(micro_rows=4)},
        {"store_digest": "0" * 64},
        {"devices": 2},
    ):
        with pytest.raises(BadInput, match="update 1 are damaged, or of another run"):
            list(BatchPlan(written, dataclasses.replace(key, **change)).update(1))


@pytest.mark.parametrize("damage", ["swap", "flip", "cut", "gone", "last"])
def test_what_is_not_the_samplers_is_refused(written, key, damage):
    first, second = (written / f"000000000{t}-00000.safetensors" for t in (0, 1))
    content = first.read_bytes()
    match damage:
        case "swap":  # another update's units, honestly signed
            first.write_bytes(second.read_bytes())
        case "flip":
            first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut":
            first.write_bytes(content[:-100])
        case "gone":
            first.unlink()
        case "last":  # a batch that ends early
            first.write_bytes(content.replace(b'"last":"0"', b'"last":"1"'))
    with pytest.raises(BadInput, match="update 0 are"):
        list(BatchPlan(written, key).update(0))


def test_a_folder_that_is_not_there_is_said_so(tmp_path, key):
    with pytest.raises(BadInput, match="no such folder"):
        BatchPlan(tmp_path / "nothing", key)
