"""An array that grows on disk, so that memory does not: an `.npy` file in the end."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_FLUSH = 1 << 16  # values


class GrowingArray:
    """Values appended to a file.

    Args:
        path: of the finished array; until then its values lie beside it, under `.partial`.
        dtype: of the values.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        self._raw = path.with_suffix(".partial")
        self._raw.write_bytes(b"")
        self._pending: list[int] = []
        self._written = 0

    def __len__(self) -> int:
        """Return how many values there are."""
        return self._written + len(self._pending)

    def extend(self, values: Sequence[int]) -> None:
        """Append values."""
        self._pending += values
        if len(self._pending) >= _FLUSH:
            self._flush()

    def finish(self) -> npt.NDArray[Any]:
        """Complete the file and return the array, read from disk as it is used."""
        self._flush()
        descr = self._dtype.str
        header = {"descr": descr, "fortran_order": False, "shape": (self._written,)}
        with self._path.open("wb") as file, self._raw.open("rb") as raw:
            np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
            shutil.copyfileobj(raw, file)
        self.discard()
        return open_array(self._path)

    def discard(self) -> None:
        """Remove the values that are not finished."""
        self._raw.unlink(missing_ok=True)

    def _flush(self) -> None:
        with self._raw.open("ab") as file:
            file.write(np.array(self._pending, self._dtype).tobytes())
        self._written += len(self._pending)
        self._pending.clear()


def open_array(path: Path) -> npt.NDArray[Any]:
    """Return an `.npy` file's array, mapped into memory and not read."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
