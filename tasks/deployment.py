"""Where this deployment keeps things: read once from the environment, then passed along."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dp_core.errors import BadInput

CHECKOUT = Path(__file__).resolve().parents[1]
LAUNCHERS = ("process", "docker", "kubernetes")

Launcher = Literal["process", "docker", "kubernetes"]


@dataclass(frozen=True)
class Deployment:
    """The places and the launcher of one deployment.

    Attributes:
        home: folder for everything that the deployment writes on this machine.
        store: URI under which every step writes; no step writes anywhere else.
        ledger: SQLAlchemy URL of the privacy ledger.
        seeds: folder of the secret privacy seeds (mode 0700).
        tracking: MLflow tracking URI.
        tracking_ui: address of MLflow's pages for a browser; empty when nothing serves them.
        launcher: how Airflow starts steps.
        task_python: the Python that runs `python -m tasks`.
    """

    home: Path
    store: str
    ledger: str
    seeds: Path
    tracking: str
    tracking_ui: str
    launcher: Launcher
    task_python: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Deployment:
        """Return the deployment that the `CONFIDE_*` variables describe.

        Raises:
            BadInput: a variable holds a value that cannot be meant.
        """
        env = os.environ if environment is None else environment
        home = Path(env.get("CONFIDE_HOME") or CHECKOUT / ".confide").expanduser().resolve()
        launcher = env.get("CONFIDE_LAUNCHER") or "process"
        if launcher not in LAUNCHERS:
            raise BadInput(
                f"unknown launcher {launcher!r}",
                where="CONFIDE_LAUNCHER",
                fix=f"Use one of {', '.join(LAUNCHERS)}.",
            )
        tracking = env.get("CONFIDE_TRACKING") or f"sqlite:///{home}/mlflow.db"
        served = tracking if tracking.startswith(("http://", "https://")) else ""
        return cls(
            home=home,
            store=(env.get("CONFIDE_STORE") or (home / "store").as_uri()).rstrip("/"),
            ledger=env.get("CONFIDE_LEDGER") or f"sqlite:///{home}/ledger.db",
            seeds=Path(env.get("CONFIDE_SEEDS") or home / "seeds").expanduser().resolve(),
            tracking=tracking,
            tracking_ui=(env.get("CONFIDE_TRACKING_UI") or served).rstrip("/"),
            launcher=launcher,  # type: ignore[arg-type]  # checked above
            task_python=env.get("CONFIDE_TASK_PYTHON")
            or str(CHECKOUT / ".venv" / "task" / "bin" / "python"),
        )

    def prepare(self) -> None:
        """Make the home folder, for its owner alone: it will hold private text.

        Raises:
            BadInput: a file is in its place, or it may not be made or written.
        """
        try:
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise refused(error, f"{self.home} cannot be made", where="CONFIDE_HOME") from None
        if not os.access(self.home, os.W_OK | os.X_OK):
            raise BadInput(
                f"{self.home} cannot be written",
                where="CONFIDE_HOME",
                fix="Name a folder that you may write.",
            )

    @property
    def work(self) -> Path:
        """Local folder of unfinished work: checkpoints and staged outputs."""
        return self.home / "work"

    @property
    def cache(self) -> Path:
        """Local copies of what lies in a remote store."""
        return self.home / "cache"

    @property
    def outbox(self) -> Path:
        """What the tracker has still to be told."""
        return self.home / "outbox"

    @property
    def artifacts(self) -> Path:
        """MLflow's artifacts when no server keeps them."""
        return self.home / "mlruns"

    @property
    def logs(self) -> Path:
        """Logs of the steps that the CLI started."""
        return self.home / "logs"


def is_full_disk(error: OSError) -> bool:
    """Whether there was no room: nobody's mistake, and later it may do."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def refused(error: OSError, what: str, *, where: str) -> Exception:
    """Return what to raise where a folder that somebody named cannot be made or written."""
    if is_full_disk(error):
        return error
    reason = os.strerror(error.errno or 0)
    return BadInput(f"{what} ({reason})", where=where, fix="Name a folder that you may write.")
