"""The deployment's addresses and folders, read once from the environment, then passed along."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from dp_core.errors import BadInput, is_full_disk, without_password
from tasks.protocol import HOME, TASK_PYTHON
from tasks.protocol.least_privilege import CLUSTER, CLUSTER_SECRETS, HOSTS, WITHHELD
from tasks.storage.copies import BOUND, bytes_from
from tasks.storage.store import Store

# A folder with one of these belongs to Confide, so closing it locks out no other program.
_CONFIDE_FILES = (
    "ledger.db",
    "seeds",
    "keys",
    "store",
    "work",
    "cache",
    "events",
    "messages",
    "specs",
    "logs",
    "mlflow.db",
    "airflow",
)
MOST_HOSTS = 4096
_PLACES = ("home", "store", "ledger", "seeds", "keys", "tracking")

Launcher = Literal["process", "docker", "kubernetes"]


@dataclass(frozen=True)
class Deployment:
    """The addresses, the folders and the launcher of one deployment.

    Attributes:
        home: folder for all files that the deployment writes on this machine.
        store: URI below which every step writes; no step writes anywhere else.
        ledger: SQLAlchemy URL of the privacy ledger.
        seeds: folder of the secret privacy seeds (mode 0700), for the steps that charge.
        keys: folder of the key of content digests (mode 0700), for every step.
        tracking: MLflow tracking URI.
        tracking_ui: address of MLflow's pages for a browser; empty if there is no server.
        launcher: how Airflow starts steps.
        cache_bytes: bound on local copies of a remote store; None for half of the free disk.
        task_python: the Python that runs `python -m tasks`.
        hosts: number of cluster hosts that share a pre-training; 0 trains in the step's process. It
            is no part of a spec, because training, charge and release are the same.
        cluster: where functions of shards run (`dp_core.cluster`); the results are the same.
        cluster_secrets: folder of the cluster's token and certificate authority.
    """

    home: Path
    store: str
    ledger: str
    seeds: Path
    keys: Path
    tracking: str
    tracking_ui: str
    launcher: Launcher
    task_python: str
    hosts: int = 0
    cluster: str = "pool"
    cluster_secrets: Path | None = None
    cache_bytes: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Deployment:
        """Return the deployment that the `CONFIDE_*` variables describe.

        Raises:
            BadInput: a variable holds an invalid value, or a relative path, whose meaning would
                depend on the folder in which a command is started.
        """
        env = os.environ if environment is None else environment
        home = _folder(env, "CONFIDE_HOME", HOME)
        launcher = env.get("CONFIDE_LAUNCHER") or "process"
        if launcher not in get_args(Launcher):
            raise BadInput(
                f"unknown launcher {launcher!r}",
                where="CONFIDE_LAUNCHER",
                fix=f"Use one of {', '.join(get_args(Launcher))}.",
            )
        tracking = _address(env, "CONFIDE_TRACKING", sqlite_url(home / "mlflow.db"))
        served = tracking if tracking.startswith(("http://", "https://")) else ""
        cluster = env.get(CLUSTER) or "pool"
        secrets = _folder(env, CLUSTER_SECRETS, home) if env.get(CLUSTER_SECRETS) else None
        return cls(
            home=home,
            store=_address(env, "CONFIDE_STORE", (home / "store").as_uri()).rstrip("/"),
            ledger=_address(env, "CONFIDE_LEDGER", sqlite_url(home / "ledger.db")),
            seeds=_folder(env, "CONFIDE_SEEDS", home / "seeds"),
            keys=_folder(env, "CONFIDE_KEYS", home / "keys"),
            tracking=tracking,
            tracking_ui=(env.get("CONFIDE_TRACKING_UI") or without_password(served)).rstrip("/"),
            launcher=launcher,  # type: ignore[arg-type]  # checked above
            task_python=env.get("CONFIDE_TASK_PYTHON") or str(TASK_PYTHON),
            hosts=_hosts(env.get(HOSTS) or "0", cluster),
            cluster=cluster,
            cluster_secrets=secrets,
            cache_bytes=bytes_from(env.get(BOUND, "")),
        )

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which a step of this deployment finds its places."""
        places = {name: getattr(self, name) for name in _PLACES}
        return {f"CONFIDE_{name.upper()}": str(place) for name, place in places.items()}

    def open_store(self) -> Store:
        """Return the store, with the cache of this machine."""
        return Store(self.store, self.cache, self.cache_bytes)

    def prepare(self) -> None:
        """Make the home folder, for its owner alone, because it will hold private text.

        If others can reach an existing folder, it is closed to them, provided that it belongs to
        Confide and to this user.

        Raises:
            BadInput: a file has this path, the folder cannot be made or written, or others can
                reach a folder that also holds other files.
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
        status = self.home.stat()
        if not stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
            return
        inside = {entry.name for entry in self.home.iterdir()}
        if status.st_mode & stat.S_ISVTX or (inside and inside.isdisjoint(_CONFIDE_FILES)):
            raise BadInput(
                f"others can reach {self.home}, and it holds more than Confide's files",
                where="CONFIDE_HOME",
                fix=f"Name a folder of its own, or: chmod 700 {self.home}",
            )
        self.home.chmod(0o700)

    @property
    def ledger_place(self) -> str:
        """The file of the ledger, or its URL without the password if a server keeps it."""
        file = sqlite_file(self.ledger)
        return str(file) if file else without_password(self.ledger)

    @property
    def holds_seeds(self) -> bool:
        """Whether this process has the seeds; steps that read external files do not have them."""
        return str(self.seeds) != WITHHELD

    @property
    def work(self) -> Path:
        """Local folder of unfinished work: checkpoints and staged outputs."""
        return self.home / "work"

    @property
    def cache(self) -> Path:
        """Local copies of files in a remote store."""
        return self.home / "cache"

    @property
    def events(self) -> Path:
        """Event logs of steps: of unfinished work, and of events not yet sent to MLflow."""
        return self.home / "events"

    @property
    def logs(self) -> Path:
        """Logs of the steps that the CLI started."""
        return self.home / "logs"


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)
    part.replace(file)


def sqlite_url(file: Path) -> str:
    """Return the SQLAlchemy URL of a SQLite file; characters that a URL reserves are encoded."""
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(file)).render_as_string(hide_password=False)


def sqlite_file(url: str) -> Path | None:
    """Return the file that a SQLAlchemy URL names, or None if a server keeps the database."""
    if not url.startswith("sqlite"):
        return None
    from sqlalchemy.engine import make_url

    return Path(make_url(url).database or "")


def is_executable(program: Path) -> bool:
    """Return whether this user may run a program.

    `Path.exists` raises an error if a folder on the way to the program is closed to this user.
    """
    return os.access(program, os.X_OK)


def _hosts(text: str, cluster: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= MOST_HOSTS):
        raise BadInput(
            f"{text!r} is no number of hosts", where=HOSTS, fix=f"Use 0 to {MOST_HOSTS}."
        )
    if int(text) and cluster in ("pool", "in-process"):
        raise BadInput(
            f"{text} hosts need a Ray cluster",
            where=HOSTS,
            fix=f"Set {CLUSTER} to local:N or HOST:PORT.",
        )
    return int(text)


def _folder(env: Mapping[str, str], name: str, default: Path) -> Path:
    value = env.get(name) or str(default)
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise BadInput(f"no home folder is known for {value!r}", where=name) from None
    if not path.is_absolute():
        raise _relative(name)
    return path.resolve()


def _address(env: Mapping[str, str], name: str, default: str) -> str:
    """Return an address from the environment, which must not be relative."""
    address = env.get(name) or default
    scheme, separator, path = address.partition("://")
    if not separator:
        relative = not address.startswith(("/", "~"))
    elif scheme.startswith("sqlite"):
        relative = path.startswith("/") and not path.startswith("//")
    else:
        relative = scheme == "file" and not path.startswith("/")
    if relative:
        raise _relative(name)
    return address


def _relative(name: str) -> BadInput:
    return BadInput(
        "a relative place is another one in every folder that a command is started in",
        where=name,
        fix="Write the whole path, from / on (sqlite:////srv/confide/ledger.db: four slashes).",
    )


def refused(error: OSError, what: str, *, where: str) -> Exception:
    """Return the exception for a configured folder that cannot be made or written."""
    if is_full_disk(error):
        return error
    reason = os.strerror(error.errno or 0)
    return BadInput(f"{what} ({reason})", where=where, fix="Name a folder that you may write.")
