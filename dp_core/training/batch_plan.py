"""Batches written in step order beforehand, so that accelerators read sequentially.

The road to pods of Chua et al. 2024 (arXiv:2411.04205): which units take part in which update is
drawn once, by many workers (`dp_core.beam`), and training reads files one after the other. The
draws are those of `private_batches`, bit for bit, so the plan's accounting is untouched.

**A batch plan is as secret as the seed**: it says who was sampled, and amplification by sampling
holds only while nobody knows. Its files are for their owner alone, and a folder that others can
reach is not read. Each file carries a digest under the seed: other batches than the sampler's are
refused, for their ε would be another.

An update is one or more parts of stacked micro-batches, `0000000007-00000.safetensors` and on;
the last one says that it is.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from dp_core.errors import BadInput
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.recipe import Recipe
from dp_core.training.rows import MicroBatch

_PART = 1 << 26  # bytes of micro-batches in one file
_NAMES = ("ids", "lengths", "positions", "labels", "weights", "shares")
Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class BatchPlanKey:
    """Whose batches these are: the secret under which files are signed.

    Args:
        seed: of the reservation.
        manifest: what the run's noise is drawn for.
        plan: sampling and schedule.
        recipe: rows of a unit and of a micro-batch, masking.
        store_digest: `TokenStore.digest` of the rows.
        devices: that share a micro-batch.
    """

    seed: PrivacySeed
    manifest: bytes
    plan: TrainingPlan
    recipe: Recipe
    store_digest: str
    devices: int

    def sign(self, t: int, part: int, *, last: bool, arrays: Arrays) -> str:
        """Return the digest of a part under the seed, in hex."""
        told = json.dumps(
            {
                "plan": self.plan.digest(),
                "recipe": self.recipe.identity(),
                "store": self.store_digest,
                "devices": self.devices,
                "place": [t, part, last],
            },
            sort_keys=True,
        )
        content = hashlib.sha256()
        for name, array in sorted(arrays.items()):
            content.update(f"{name} {array.dtype.str} {array.shape}".encode())
            content.update(np.ascontiguousarray(array).data)
        return self.seed.derive("batch plan", self.manifest, told, content.digest()).hex()


def write_update(
    folder: Path, key: BatchPlanKey, t: int, batches: Iterable[MicroBatch], part_bytes: int = _PART
) -> None:
    """Write the micro-batches of update t; what is there already is replaced.

    Memory is that of one part, however large the batch is.

    Raises:
        BadInput: others than its owner can reach the folder.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_shared(folder)
    pending: list[MicroBatch] = []
    size = part = 0
    for batch in batches:
        if pending and size >= part_bytes:
            _write(folder, key, t, part, pending, last=False)
            pending, size, part = [], 0, part + 1
        pending.append(batch)
        size += sum(array.nbytes for array in batch.arrays())
    _write(folder, key, t, part, pending, last=True)


class BatchPlan:
    """A batch plan to train from: the `batches` of `pretrain`.

    Args:
        folder: that a pipeline or `write_update` wrote.
        key: of this very run.

    Raises:
        BadInput: others than its owner can reach the folder, or it is not there.
    """

    def __init__(self, folder: Path, key: BatchPlanKey) -> None:
        self._folder, self._key = folder, key
        if not folder.is_dir():
            raise BadInput("no such folder", where="batch plan", fix="Write the batches first.")
        _refuse_shared(folder)

    def update(self, t: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of update t, one part in memory at a time.

        Raises:
            BadInput: a part is missing, damaged, of another run, or open to others.
        """
        part, last = 0, False
        while not last:
            arrays, last = self._read(t, part)
            if arrays:
                columns = [arrays[name] for name in _NAMES]
                for values in zip(*columns, strict=True):
                    yield MicroBatch(*values)
            part += 1

    def _read(self, t: int, part: int) -> tuple[Arrays, bool]:
        path = self._folder / _name(t, part)
        try:
            _refuse_shared(path)
            with safe_open(path, framework="numpy") as file:
                about = file.metadata() or {}
            arrays = load_file(path)
        except (OSError, SafetensorError, ValueError) as error:
            raise _unfit(t, "missing or damaged") from error
        last = about.get("last") == "1"
        signed = self._key.sign(t, part, last=last, arrays=arrays)
        if not hmac.compare_digest(signed, about.get("signed", "")):
            raise _unfit(t, "damaged, or of another run")
        return arrays, last


def _write(
    folder: Path, key: BatchPlanKey, t: int, part: int, batches: list[MicroBatch], *, last: bool
) -> None:
    stacked = zip(*(batch.arrays() for batch in batches), strict=True)
    arrays: Arrays = {n: np.stack(a) for n, a in zip(_NAMES, stacked, strict=False)}
    signed = key.sign(t, part, last=last, arrays=arrays)
    path = folder / _name(t, part)
    partial = path.with_suffix(f".{signed[:16]}")  # two workers may be given the same update
    save_file(arrays, partial, metadata={"signed": signed, "last": "1" if last else "0"})
    partial.chmod(0o600)
    partial.replace(path)


def _name(t: int, part: int) -> str:
    return f"{t:010d}-{part:05d}.safetensors"


def _refuse_shared(path: Path) -> None:
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        right = "700" if path.is_dir() else "600"
        raise BadInput(
            "others than its owner can reach it",
            where="batch plan",
            fix=f"It says who was sampled, which is as secret as the seed: chmod {right}.",
        )


def _unfit(t: int, what: str) -> BadInput:
    return BadInput(
        f"the batches of update {t} are {what}", where="batch plan", fix="Write them again."
    )
