#!/usr/bin/env python3.11
"""Set up the project's virtual environments from its hash-pinned locks. Standard library only.

    python3.11 scripts/environments.py ensure task orchestrator
    python3.11 scripts/environments.py ensure task-dev orchestrator-dev
    python3.11 scripts/environments.py lock

`ensure` costs nothing when an environment already holds its lock. uv installs; where uv cannot
(no wheel of it, an index it does not understand), pip does, from the same lock.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venv"
LOCKS = ROOT / "requirements"
LOWEST_PYTHON = "3.11.2"  # Debian 12's, and so the images': the locks must hold there too


class SetupError(Exception):
    """What went wrong, in one line with what to do about it."""


@dataclass(frozen=True)
class Environment:
    """One set of packages: the folder it lives in, its lock, and the locks that this one holds."""

    folder: str
    lock: str
    holds: tuple[str, ...] = ()


ENVIRONMENTS = {
    "task": Environment("task", "task.txt"),
    "task-dev": Environment("task", "dev.txt", holds=("task.txt",)),
    "orchestrator": Environment("orchestrator", "orchestrator.txt"),
    "orchestrator-dev": Environment(
        "orchestrator", "orchestrator-dev.txt", holds=("orchestrator.txt",)
    ),
    "audit": Environment("audit", "audit.txt"),  # `make check` asks with it
    "browser": Environment("browser", "browser.txt"),  # `docker/ci`, with the system's Chromium
    "transformers": Environment("transformers", "transformers-test.txt"),  # `make test-…`
    "newest-tensorflow": Environment("newest-tensorflow", "newest-tensorflow.txt"),
    "bench": Environment("bench", "bench.txt"),  # `make bench-opacus`
}


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    commands = parser.add_subparsers(dest="command", required=True)
    ensure = commands.add_parser("ensure", help="set up environments that are missing or stale")
    ensure.add_argument("names", nargs="+", choices=ENVIRONMENTS)
    commands.add_parser("lock", help="resolve requirements/*.in into hash-pinned *.txt")
    arguments = parser.parse_args()
    try:
        if sys.version_info[:2] != (3, 11):
            raise SetupError(
                f"Python 3.11 is needed, this is {sys.version.split()[0]}: "
                "install python3.11 or set CONFIDE_PYTHON to it."
            )
        if arguments.command == "lock":
            resolve_locks()
        else:
            for name in arguments.names:
                ensure_environment(name)
    except SetupError as error:
        print(f"confide: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def ensure_environment(name: str) -> None:
    """Make the environment hold exactly its lock; return at once where it does already."""
    environment = ENVIRONMENTS[name]
    if is_current(environment):
        return
    VENVS.mkdir(exist_ok=True)
    with (VENVS / f"{environment.folder}.lock").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)  # two commands at once: the second finds it done
        if not is_current(environment):
            install(environment)


def is_current(environment: Environment) -> bool:
    """Whether the stamp of the environment's lock is there and of this very content."""
    stamp = stamp_of(environment.folder, environment.lock)
    held = stamp.read_text() if stamp.exists() else ""
    return held == digest_of(environment.lock) and python_of(environment.folder).exists()


def install(environment: Environment) -> None:
    """Install the lock with uv, or else with pip, and leave stamps for what it holds."""
    folder = VENVS / environment.folder
    started = time.monotonic()
    print(f"Setting up .venv/{environment.folder} from {environment.lock} …", flush=True)
    installer = installer_python()
    for stamp in folder.glob(".installed-*"):
        stamp.unlink()
    if not works(python_of(environment.folder)):
        shutil.rmtree(folder, ignore_errors=True)
        make_venv(folder)
    lock = LOCKS / environment.lock
    if not (sync_with_uv(installer, folder, lock) or install_with_pip(installer, folder, lock)):
        raise SetupError(
            f"requirements/{environment.lock} could not be installed (the reason stands above). "
            "Check the network and pip's index settings (`pip config list`), then try again."
        )
    for held in (environment.lock, *environment.holds):
        stamp_of(environment.folder, held).write_text(digest_of(held))
    print(f"  done in {time.monotonic() - started:.0f} s", flush=True)


def sync_with_uv(installer: Path, folder: Path, lock: Path) -> bool:
    """Make the environment equal to the lock with uv; False where uv could not."""
    uv = installer.parent / "uv"
    if not uv.exists():
        return False
    command = [uv, "pip", "sync", "--quiet", "--require-hashes", "--compile-bytecode"]
    answer = run([*command, "--python", python_in(folder), lock], uv_environment(installer))
    if answer != 0:
        print("uv could not install it; trying pip.", file=sys.stderr, flush=True)
    return answer == 0


def install_with_pip(installer: Path, folder: Path, lock: Path) -> bool:
    """Install the lock with the installer's pip (it compiles bytecode of its own accord)."""
    command = [installer, "-m", "pip", "--python", python_in(folder), "install", "--quiet"]
    return run([*command, "--require-hashes", "--no-deps", "-r", lock], product_environment()) == 0


def installer_python() -> Path:
    """Return the Python of `.venv/installer`, which has pip and, where it can be had, uv."""
    VENVS.mkdir(exist_ok=True)
    with (VENVS / "installer.lock").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)  # it is one for all environments, each with its own lock
        return make_installer()


def make_installer() -> Path:
    """Make `.venv/installer`, unless it is of its lock already."""
    folder, python = VENVS / "installer", python_of("installer")
    stamp = stamp_of("installer", "installer.txt")
    if works(python) and stamp.exists() and stamp.read_text() == digest_of("installer.txt"):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    make_venv(folder)
    lock = LOCKS / "installer.txt"
    command = [python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", lock]
    if run(command, product_environment()) == 0:
        stamp.write_text(digest_of("installer.txt"))
    else:
        print("uv is not to be had here; pip will do, more slowly.", file=sys.stderr, flush=True)
    return python


def make_venv(folder: Path) -> None:
    """Create an empty virtual environment of this Python."""
    if run([sys.executable, "-m", "venv", folder], product_environment()) != 0:
        raise SetupError(
            "`python3.11 -m venv` failed (the reason stands above): on Debian and Ubuntu, "
            "apt install python3.11-venv."
        )


def resolve_locks() -> None:
    """Resolve every `requirements/*.in` anew, for the lowest Python that the project runs on."""
    installer = installer_python()
    uv = installer.parent / "uv"
    if not uv.exists():
        raise SetupError("uv is needed to resolve the locks and could not be installed.")
    platform = ["--python-platform", "x86_64-manylinux_2_28"]
    override = ["--override", "task-overrides.txt"]
    for name, options in {
        "installer": [],
        "task": override,
        "dev": override,
        "orchestrator": platform,
        "orchestrator-dev": platform,
        "mlflow": platform,
        "storage-emulator": platform,
        "browser": platform,
        "transformers-test": platform,
        "newest-tensorflow": platform,
        "bench": platform,
        "audit": platform,
    }.items():
        print(f"Resolving requirements/{name}.in …", flush=True)
        compile_ = [uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-emit-index-url"]
        compile_ += ["--no-header", "--python-version", LOWEST_PYTHON, *options]
        if run([*compile_, f"{name}.in", "-o", f"{name}.txt"], uv_environment(installer), LOCKS):
            raise SetupError(f"requirements/{name}.in has no solution (the reason stands above).")


def uv_environment(installer: Path) -> dict[str, str]:
    """Return the environment for uv, with pip's settings handed on: uv does not read them."""
    answer = subprocess.run(  # noqa: S603 - fixed words
        [installer, "-m", "pip", "config", "list"],
        env=product_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    handed_on = uv_settings(answer.stdout, os.environ)
    return product_environment() | handed_on


def uv_settings(pip_config: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return uv's variables for what `pip config list` printed; the user's own UV_* win.

    An extra index means to pip "the best of all", to uv "the first that knows the name": the
    strategy is set to pip's meaning, which the locks' hashes make safe.
    """
    pip = parse_pip_config(pip_config)
    lists = {key: value.split() for key, value in pip.items()}
    settings = {
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        "UV_INDEX": " ".join(lists.get("extra-index-url", [])),
        "UV_FIND_LINKS": ",".join(lists.get("find-links", [])),
        "UV_INSECURE_HOST": " ".join(lists.get("trusted-host", [])),
        "UV_HTTP_TIMEOUT": pip.get("timeout", pip.get("default-timeout", "")),
        "SSL_CERT_FILE": pip.get("cert", ""),
        "ALL_PROXY": pip.get("proxy", ""),
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_SYSTEM_CERTS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    return {name: value for name, value in settings.items() if value and name not in environ}


def parse_pip_config(text: str) -> dict[str, str]:
    """Return pip's settings by option name: environment over `[install]` over `[global]`."""
    ranks = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        section, dot, option = key.rpartition(".")
        if not (equals and dot and section in ranks):
            continue
        try:
            plain = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            continue
        if ranks[section] >= found.get(option, (-1, ""))[0]:
            found[option] = (ranks[section], plain)
    return {option: value for option, (_, value) in found.items()}


def product_environment() -> dict[str, str]:
    """Return the environment without what would change the product's own environments."""
    unwanted = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def run(command: list[object], environment: dict[str, str], folder: Path = ROOT) -> int:
    """Run a command with its output shown; return its exit code."""
    words = [str(word) for word in command]
    return subprocess.run(words, env=environment, cwd=folder, check=False).returncode  # noqa: S603


def works(python: Path) -> bool:
    """Whether this interpreter is there and runs (a moved checkout leaves dead links)."""
    try:
        answer = subprocess.run([python, "-c", ""], capture_output=True, check=False)  # noqa: S603
        return answer.returncode == 0
    except OSError:
        return False


def python_in(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / "bin" / "python"


def python_of(name: str) -> Path:
    """Return the interpreter of the named environment."""
    return python_in(VENVS / name)


def stamp_of(folder: str, lock: str) -> Path:
    """Return the file that says which content of a lock an environment holds."""
    return VENVS / folder / f".installed-{lock}"


def digest_of(lock: str) -> str:
    """Return the SHA-256 of a lock."""
    return hashlib.sha256((LOCKS / lock).read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
