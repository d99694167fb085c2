from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from dp_core.errors import BadInput, ConfideError
from dp_core.training.checkpoints import Checkpoint, Checkpoints, LocalFolder, run_digest

ROOT = Path(__file__).parents[3]
NAMES = [f"update-{u:010d}.safetensors" for u in range(30)]


def at(update):
    return Checkpoint(update, {"w": np.full((3, 2), update, np.float32), "c": np.array([0.1])})


def kept_in(folder, run="run", keep=2):
    return Checkpoints(LocalFolder(folder), run, keep)


def test_newest_checkpoint_is_read_and_the_last_ones_are_kept(folder):
    kept = kept_in(folder, keep=3)
    assert kept.latest() is None
    for update in (1, 2, 3, 10):
        kept.save(at(update))
    assert kept.latest().update == 10
    np.testing.assert_array_equal(kept.latest().arrays["w"], at(10).arrays["w"])
    assert kept.latest().arrays["c"][0] == 0.1  # float64 keeps its precision
    assert sorted(p.name for p in folder.iterdir()) == [NAMES[2], NAMES[3], NAMES[10]]


def test_checkpoints_are_readable_only_by_their_owner(folder):
    umask = os.umask(0)
    try:
        kept_in(folder).save(at(1))
    finally:
        os.umask(umask)
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / NAMES[1]).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "header", "other update"])
def test_damaged_checkpoint_is_logged_and_the_previous_one_is_used(folder, damage, caplog):
    kept = kept_in(folder)
    kept.save(at(1))
    kept.save(at(2))
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
            kept.save(at(1))
            newest.write_bytes((folder / NAMES[1]).read_bytes())
    with caplog.at_level(logging.WARNING):
        assert kept.latest().update == 1
    [record] = caplog.records
    assert "update 2 is damaged" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_continuing_after_damage_keeps_intact_checkpoints(folder):
    kept = kept_in(folder)
    for update in (1, 2, 9):
        kept.save(at(update))
    (folder / NAMES[9]).write_bytes(b"torn")
    kept.save(at(3))  # after continuing from 2
    assert sorted(p.name for p in folder.iterdir()) == [NAMES[2], NAMES[3]]


def test_partial_files_of_a_killed_run_are_ignored(folder):
    kept = kept_in(folder)
    kept.save(at(1))
    (folder / ".partial").mkdir()
    (folder / ".partial" / NAMES[2]).write_bytes(b"half")
    assert kept.latest().update == 1
    kept.save(at(2))
    assert kept.latest().update == 2
    assert not (folder / ".partial").exists()


def test_checkpoint_of_another_run_is_refused(folder):
    kept_in(folder, run_digest(b"manifest", 1)).save(at(1))
    with pytest.raises(BadInput, match="belongs to another run"):
        kept_in(folder, run_digest(b"manifesto", 1)).latest()
    with pytest.raises(BadInput, match="belongs to another run"):
        kept_in(folder, run_digest(b"manifest", 2)).latest()
    assert kept_in(folder, run_digest(b"manifest", 1)).latest().update == 1


WRITER = """
    import resource, signal, sys
    from pathlib import Path
    import numpy as np
    from dp_core.errors import (ConfideError)
    from dp_core.training.checkpoints import (Checkpoint, Checkpoints)
    from dp_core.training.checkpoints import (LocalFolder)

    kept = Checkpoints(LocalFolder(Path(sys.argv[1])), "run")
    kept.save(Checkpoint(1, {"w": np.zeros(64, np.float32)}))
    if len(sys.argv) > 2:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
    try:
        kept.save(Checkpoint(2, {"w": np.zeros(1 << 20, np.float32)}))
    except ConfideError as error:
        print(error)
    print(kept.latest().update)
"""


def write_two(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITER), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_failed_write_is_one_line_and_keeps_the_last_checkpoint(folder):
    """The system refuses a write in the middle of a file."""
    line, latest = write_two(folder, 100_000)
    assert line.startswith(f"{folder}: checkpoint not written: File too large.")
    assert latest == "1"
    assert [p.name for p in folder.iterdir()] == [NAMES[1]]


def test_full_disk_is_reported_in_one_line(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        line, latest = write_two(disk / "checkpoints")
        assert "checkpoint not written: No space left on device. Make room" in line
        assert latest == "1"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_place_that_cannot_be_written_or_read_is_reported_and_does_not_restart_a_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfideError, match="checkpoint not written: Not a directory"):
        kept_in(tmp_path / "file" / "checkpoints").save(at(1))
    with pytest.raises(ConfideError, match="checkpoints cannot be read: Not a directory"):
        kept_in(tmp_path / "file").latest()
