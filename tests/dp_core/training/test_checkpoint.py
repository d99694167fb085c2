"""Checkpoints: newest whole one, others refused, nothing lost when the disk is full."""

from __future__ import annotations

import numpy as np
import pytest

from dp_core.errors import BadInput, ConfideError
from dp_core.training import checkpoint as module
from dp_core.training.checkpoint import Checkpoint, CheckpointFolder, run_digest


def at(update):
    return Checkpoint(update, {"w": np.full((3, 2), update, np.float32)})


def test_the_newest_is_read_and_the_last_two_are_kept(folder):
    kept = CheckpointFolder(folder, "run", keep=2)
    assert kept.latest() is None
    for update in (1, 2, 10):
        kept.save(at(update))
    assert kept.latest().update == 10
    np.testing.assert_array_equal(kept.latest().arrays["w"], at(10).arrays["w"])
    assert sorted(p.name for p in folder.iterdir()) == ["update-0000000002", "update-0000000010"]


@pytest.mark.parametrize("damage", ["flip", "cut", "no about", "no arrays", "half an about"])
def test_a_corrupt_newest_gives_the_one_before(folder, damage):
    kept = CheckpointFolder(folder, "run")
    kept.save(at(1))
    kept.save(at(2))
    newest = folder / "update-0000000002"
    arrays, about = newest / "state.safetensors", newest / "about.json"
    content = arrays.read_bytes()
    match damage:
        case "flip":
            arrays.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut":
            arrays.write_bytes(content[: len(content) // 2])
        case "no about":
            about.unlink()
        case "no arrays":
            arrays.unlink()
        case "half an about":
            about.write_text(about.read_text()[:20])
    assert kept.latest().update == 1


def test_a_half_written_one_does_not_count(folder):
    kept = CheckpointFolder(folder, "run")
    kept.save(at(1))
    (folder / "update-0000000002.partial").mkdir()
    assert kept.latest().update == 1
    kept.save(at(2))
    assert kept.latest().update == 2


def test_another_runs_checkpoint_is_refused(folder):
    CheckpointFolder(folder, run_digest(b"manifest", 1)).save(at(1))
    with pytest.raises(BadInput, match="belongs to another run"):
        CheckpointFolder(folder, run_digest(b"manifesto", 1)).latest()
    with pytest.raises(BadInput, match="belongs to another run"):
        CheckpointFolder(folder, run_digest(b"manifest", 2)).latest()
    assert CheckpointFolder(folder, run_digest(b"manifest", 1)).latest().update == 1


def test_a_full_disk_is_one_clear_line_and_keeps_the_last_good_one(folder, monkeypatch):
    kept = CheckpointFolder(folder, "run")
    kept.save(at(1))

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(ConfideError, match="not written: No space left on device"):
        kept.save(at(2))
    assert kept.latest().update == 1
    assert [p.name for p in folder.iterdir()] == ["update-0000000001"]


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfideError, match="checkpoint not written"):
        CheckpointFolder(tmp_path / "file" / "checkpoints", "run").save(at(1))
