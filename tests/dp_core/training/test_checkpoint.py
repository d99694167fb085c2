import logging
import os
import resource
import subprocess

import numpy as np
import pytest

from dp_core.errors import BadInput, ConfideError
from dp_core.training.checkpoints import Checkpoints, LocalFolder, run_digest

NAMES = [f"update-{u:010d}.safetensors" for u in range(30)]


def arrays_of(update):
    return {"w": np.full((3, 2), update, np.float32), "c": np.array([0.1])}


def kept_in(folder, run="run", keep=2):
    return Checkpoints(LocalFolder(folder), run, keep)


def test_newest_checkpoint_is_read_and_the_last_ones_are_kept(folder):
    kept = kept_in(folder, keep=3)
    assert kept.latest() is None
    for update in (1, 2, 3, 10):
        kept.save(update, arrays_of(update))
    assert kept.latest()[0] == 10
    for name, array in arrays_of(10).items():
        np.testing.assert_array_equal(kept.latest()[1][name], array)  # float64, too
    assert sorted(p.name for p in folder.iterdir()) == [NAMES[2], NAMES[3], NAMES[10]]


def test_checkpoints_are_readable_only_by_their_owner(folder):
    umask = os.umask(0)
    try:
        kept_in(folder).save(1, arrays_of(1))
    finally:
        os.umask(umask)
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / NAMES[1]).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "header", "other update"])
def test_damaged_checkpoint_is_logged_and_the_previous_one_is_used(folder, damage, caplog):
    kept = kept_in(folder)
    kept.save(1, arrays_of(1))
    kept.save(2, arrays_of(2))
    newest = folder / NAMES[2]
    content = newest.read_bytes()
    match damage:
        case "flip":
            newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut":
            newest.write_bytes(content[: len(content) // 2])
        case "empty":
            newest.write_bytes(b"")
        case "header":
            newest.write_bytes(content.replace(b'"run":"run"', b'"run":"ram"'))
        case "other update":
            (folder / NAMES[1]).rename(folder / NAMES[0])  # under a wrong name
            (folder / NAMES[0]).replace(newest)
            kept.save(1, arrays_of(1))
            newest.write_bytes((folder / NAMES[1]).read_bytes())
    with caplog.at_level(logging.WARNING):
        assert kept.latest()[0] == 1
    [record] = caplog.records
    assert "update 2 is damaged" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_continuing_after_damage_keeps_intact_checkpoints(folder):
    kept = kept_in(folder)
    for update in (1, 2, 9):
        kept.save(update, arrays_of(update))
    (folder / NAMES[9]).write_bytes(b"torn")
    kept.save(3, arrays_of(3))  # after continuing from 2
    assert sorted(p.name for p in folder.iterdir()) == [NAMES[2], NAMES[3]]


def test_partial_files_of_a_killed_run_are_ignored(folder):
    kept = kept_in(folder)
    kept.save(1, arrays_of(1))
    (folder / ".partial").mkdir()
    (folder / ".partial" / NAMES[2]).write_bytes(b"half")
    assert kept.latest()[0] == 1
    kept.save(2, arrays_of(2))
    assert kept.latest()[0] == 2
    assert not (folder / ".partial").exists()


def test_checkpoint_of_another_run_is_refused(folder):
    kept_in(folder, run_digest(b"manifest", 1)).save(1, arrays_of(1))
    with pytest.raises(BadInput, match="belongs to another run"):
        kept_in(folder, run_digest(b"manifesto", 1)).latest()
    with pytest.raises(BadInput, match="belongs to another run"):
        kept_in(folder, run_digest(b"manifest", 2)).latest()
    assert kept_in(folder, run_digest(b"manifest", 1)).latest()[0] == 1


def refusal_of_a_large_checkpoint(folder):
    """Return the error of a second checkpoint, which is too large; the first one stays."""
    kept = kept_in(folder)
    kept.save(1, arrays_of(1))
    with pytest.raises(ConfideError) as refused:
        kept.save(2, {"w": np.zeros(1 << 20, np.float32)})
    assert kept.latest()[0] == 1
    assert [p.name for p in folder.iterdir()] == [NAMES[1]]
    return str(refused.value)


def test_failed_write_is_one_line_and_keeps_the_last_checkpoint(folder):
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, usual[1]))
    try:
        line = refusal_of_a_large_checkpoint(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert line.startswith(f"{folder}: checkpoint not written: File too large.")


def test_full_disk_is_reported_in_one_line(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        line = refusal_of_a_large_checkpoint(disk / "checkpoints")
        assert "checkpoint not written: No space left on device. Make room" in line
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_place_that_cannot_be_written_or_read_is_reported_and_does_not_restart_a_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfideError, match="checkpoint not written: Not a directory"):
        kept_in(tmp_path / "file" / "checkpoints").save(1, arrays_of(1))
    with pytest.raises(ConfideError, match="checkpoints cannot be read: Not a directory"):
        kept_in(tmp_path / "file").latest()
