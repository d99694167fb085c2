"""Test files in bfloat16, which NumPy lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the upper half of each float32, which is a bfloat16, as an integer."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def call_them_bfloat16(file: Path) -> None:
    """Rename the type of a safetensors file's integers of 16 bits."""
    content = file.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    named = header.replace(b'"dtype":"U16"', b'"dtype":"BF16"')
    file.write_bytes(len(named).to_bytes(8, "little") + named + content[8 + len(header) :])
