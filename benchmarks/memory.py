"""Peak resident memory of this process, from Linux' counters.

`ru_maxrss` is unsuitable, because a new process inherits it from its parent. `VmHWM` belongs to the
memory map, which `exec` replaces, and writing 5 to `clear_refs` resets it to the present resident
size.
"""

from __future__ import annotations

from pathlib import Path

_CLEAR = Path("/proc/self/clear_refs")


def mebibytes(field: str, process: int | str = "self") -> float:
    """Return a field of a process's status, such as VmHWM or VmRSS."""
    status = Path(f"/proc/{process}/status")
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in {status}")


class PeakMemory:
    """Create it after the model and before the first step; read it after the steps."""

    def __init__(self) -> None:
        _CLEAR.write_text("5")
        self._before = mebibytes("VmRSS")

    def figures(self) -> dict[str, float]:
        """Return the peak, and its difference to the process with its model."""
        highest = mebibytes("VmHWM")
        return {"peak_mib": highest, "step_mib": highest - self._before}
