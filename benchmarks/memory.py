"""Peak resident memory of this process, from Linux' own counters.

Not `ru_maxrss`: a new process inherits its parent's. `VmHWM` belongs to the memory map, which
starts anew with `exec`, and writing 5 to `clear_refs` sets it back to what is resident now.
"""

from __future__ import annotations

from pathlib import Path

_CLEAR = Path("/proc/self/clear_refs")


def mebibytes(field: str, process: int | str = "self") -> float:
    """Return a field of a process's status, as VmHWM or VmRSS."""
    status = Path(f"/proc/{process}/status")
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in {status}")


class PeakMemory:
    """Make one when the model stands and no step has been made; read it after the steps."""

    def __init__(self) -> None:
        _CLEAR.write_text("5")
        self._before = mebibytes("VmRSS")

    def figures(self) -> dict[str, float]:
        """Return the peak, and by how much it is above the process with its model."""
        highest = mebibytes("VmHWM")
        return {"peak_mib": highest, "step_mib": highest - self._before}
