"""Set up `.venv/NAME` from requirements/NAME.txt, or resolve those locks. Standard library only.

    scripts/python3 scripts/environments.py ensure task orchestrator-dev
    scripts/python3 scripts/environments.py lock [--upgrade]

The names are the dependency groups of pyproject.toml. `NAME-dev` contains the lock of NAME and
shares its folder. On a machine with a GPU or TPU, `task` is the lock task-gpu or task-tpu, in the
same folder. uv installs the packages; if uv fails, pip installs them from the same lock.
"""

import ast
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venv"
INSTALLER = VENVS / "installer" / "bin"
LOCKS = ROOT / "requirements"
INCLUDED = "steps"  # a group that only others include; it has no lock
# If both locks have a package, the key's lock takes the version from the value's lock.
CONSTRAINTS = {"task-dev": "task", "orchestrator-dev": "orchestrator", "mlflow": "task"}
UV_NAMES = {  # pip's settings, which uv does not read -> uv's names
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}


def target(glibc: str = "2_28") -> tuple[str, ...]:
    """Return uv's options for the Python of Debian 12 and of the images, and the oldest glibc.

    The same versions install on Python 3.12 and 3.13.
    """
    return ("--python-version", "3.11.2", "--python-platform", f"x86_64-manylinux_{glibc}")


def lock_for(name: str, devices: Path = Path("/dev")) -> str:
    """Return the lock of an environment: for `task`, with the TensorFlow that drives this machine.

    The lock `task-dev` has TensorFlow for CPUs on every machine.
    """
    if name != "task":
        return name
    if shutil.which("nvidia-smi"):
        return "task-gpu"
    return "task-tpu" if any(devices.glob("accel*")) else name


def ensure(name: str) -> None:
    """Install the environment's lock, unless it is installed already."""
    folder, name = VENVS / name.removesuffix("-dev"), lock_for(name)
    if holds(folder, name):
        return
    VENVS.mkdir(exist_ok=True)
    with Path(f"{folder}.lock").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)  # a concurrent command waits for this installation
        if not holds(folder, name):
            install(folder, name)


def holds(folder: Path, name: str) -> bool:
    """Return whether the folder was last filled from this lock and its Python exists."""
    stamp = folder / ".locks"
    filled_from = stamp.read_text().split() if stamp.exists() else []
    return digest(name) in filled_from and (folder / "bin" / "python").exists()


def digest(name: str) -> str:
    """Return the SHA-256 of a lock."""
    return hashlib.sha256((LOCKS / f"{name}.txt").read_bytes()).hexdigest()


def install(folder: Path, name: str) -> None:
    """Install the lock, and record its digest in the folder."""
    began = time.monotonic()
    device = {"task-gpu": "; this machine has a GPU", "task-tpu": "; this machine has a TPU"}
    lock = f"requirements/{name}.txt{device.get(name, '')}"
    print(f"Setting up .venv/{folder.name} from {lock} …", flush=True)
    python, packages = folder / "bin" / "python", LOCKS / f"{name}.txt"
    (folder / ".locks").unlink(missing_ok=True)  # an interrupted setup starts again
    if not python.exists():
        shutil.rmtree(folder, ignore_errors=True)
        with_pip = [] if name == "installer" else ["--without-pip"]
        if not run(sys.executable, "-m", "venv", *with_pip, folder):
            sys.exit("confide: no virtual environment: on Debian, apt install python3-venv.")
    if not (pip(python, packages) if name == "installer" else sync(python, packages)):
        advice = "check the network and pip's index settings (`pip config list`), then try again."
        sys.exit(f"confide: requirements/{name}.txt could not be installed: {advice}")
    (folder / ".locks").write_text(f"{digest(name)}\n{digest(name.removesuffix('-dev'))}")
    print(f"  done in {time.monotonic() - began:.0f} s", flush=True)


def sync(python: Path, packages: Path) -> bool:
    """Make the environment equal to the lock with uv, or install the lock with pip."""
    ensure("installer")
    if uv("sync", "--require-hashes", "--compile-bytecode", "--python", python, packages):
        return True
    print("uv could not install it; trying pip.", file=sys.stderr, flush=True)
    return pip(python, packages)


def pip(python: Path, packages: Path) -> bool:
    """Install the lock with the installer's pip."""
    words = ("-m", "pip", "--python", python, "install", "-q", "--require-hashes", "--no-deps")
    return run(INSTALLER / "python", *words, "-r", packages)


def lock(options: list[str]) -> None:
    """Resolve each dependency group, keeping the locked versions that still fit."""
    ensure("installer")
    portable = ("--generate-hashes", "--no-emit-index-url", "--no-header")
    os.chdir(ROOT)
    groups = tomllib.loads(Path("pyproject.toml").read_text())["dependency-groups"]
    for name in (group for group in groups if group != INCLUDED):
        words = ["--group", name, "-o", f"requirements/{name}.txt", *options]
        words += target("2_31") if name == "task-tpu" else target()  # as libtpu's wheels need
        if name in CONSTRAINTS:
            words += ["-c", f"requirements/{CONSTRAINTS[name]}.txt"]
        print(f"Resolving {name} …", flush=True)
        if not uv("compile", *portable, *words):
            sys.exit(f"confide: the group {name} has no solution (the reason is printed above).")


def uv(*words: object) -> bool:
    """Run `uv pip`."""
    return run(INSTALLER / "uv", "pip", *words, "-q", environment=uv_environment())


def uv_environment() -> dict[str, str]:
    """Return uv's environment: pip's index settings; the user's UV_* settings take precedence."""
    config = [str(INSTALLER / "python"), "-m", "pip", "config", "list"]
    listed = subprocess.run(config, capture_output=True, text=True, check=False)  # noqa: S603
    return {**uv_settings(listed.stdout), **os.environ}


def uv_settings(pip_config: str) -> dict[str, str]:
    """Return uv's variables for the output of `pip config list`; environment overrides files."""
    # By default, uv uses the first index that knows a name. With hashes, pip's way is safe too:
    # the best match of all indexes.
    settings = {"UV_SYSTEM_CERTS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    for section in ("global.", "install.", ":env:."):
        for line in pip_config.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section) and (name := UV_NAMES.get(key.removeprefix(section))):
                words = str(ast.literal_eval(value)).split()
                settings[name] = ("," if name == "UV_FIND_LINKS" else " ").join(words)
    return settings


def run(*words: object, environment: dict[str, str] | None = None) -> bool:
    """Run a command with its output shown; return whether it succeeded."""
    command = [str(word) for word in words]
    return not subprocess.run(command, env=environment, check=False).returncode  # noqa: S603


def main(words: list[str]) -> None:
    """Run the command that the command-line words name."""
    match words:
        case ["ensure", *names] if all((LOCKS / f"{name}.txt").exists() for name in names):
            for each in names:
                ensure(each)
        case ["lock", *compile_options]:
            lock(compile_options)
        case _:
            sys.exit(__doc__)


def command_line(words: list[str]) -> None:
    """Run the command; exit with a one-line error if this user may not use a required file."""
    try:
        main(words)
    except PermissionError as error:
        sys.exit(
            f"confide: this user may not use {error.filename}, which belongs to another user: "
            "make the environments in a checkout that this user owns (make setup)."
        )


if __name__ == "__main__":
    for variable in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        os.environ.pop(variable, None)  # they would change the installed packages or their folder
    command_line(sys.argv[1:])
