"""Check the package in a new environment, outside of the checkout: `make test-wheel`.

    scripts/python3 scripts/check_wheel.py [PYTHON_WITH_TRANSFORMERS]

The first failed rule ends the script with exit code 1. Standard library only.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import environments
import release

SIZES = {
    "vocabulary_size": 300, "layers": 1, "hidden": 64, "sequence_length": 16, "epochs": 1,
    "public_steps": 2, "public_batch_size": 8, "device": "cpu", "target_epsilon": 8,
}  # fmt: skip
DATA = {
    "py.typed", "tasks/presets/demo.json", "dags/launcher/pods/cpu.yaml",
    "tasks/report/templates/job.html.j2", "tasks/commands/commands.toml",
}  # fmt: skip
IMPORT_ALL = """
import importlib, pkgutil, sys, confide
assert "tensorflow" not in sys.modules and confide.__version__
for module in pkgutil.walk_packages(confide.__path__, "confide."):
    if not module.name.startswith("confide.dags") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert all(getattr(confide, name) for name in confide.__all__)
for name in ("dp_core", "tasks", "dags"):
    assert name not in sys.modules and importlib.util.find_spec(name) is None, name
"""
IMPORT_DAGS = """
import importlib, pkgutil, confide.dags
for module in pkgutil.walk_packages(confide.dags.__path__, "confide.dags."):
    importlib.import_module(module.name)
"""
IMPORT_AUDIT = """
import importlib, google.cloud.storage
for name in ("advise", "audit", "epsilon", "export", "ledger", "report"):
    importlib.import_module(f"confide.tasks.commands.{name}_command")
"""
REFUSED = """
import contextlib, io, sys, confide
from confide.tasks import cli

def names_the_extras(line):
    return "\\n" not in line.strip() and all(f"[{name}]" in line for name in ("cpu", "gpu", "tpu"))

for name in confide.__all__:
    try:
        getattr(confide, name)
    except ImportError as error:
        assert names_the_extras(str(error)), error
    else:
        raise AssertionError
for verb in ("run", "doctor", "advise"):
    sys.argv, errors = ["confide", verb], io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert cli.main() == 1
    assert names_the_extras(errors.getvalue()), errors.getvalue()
"""
LOAD = """
import sys, torch, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1])
logits = model(**tokenizer("the patient went home", return_tensors="pt")).logits
assert torch.isfinite(logits).all() and logits.shape[-1] == model.config.vocab_size
"""


def rule(holds: bool, words: str) -> None:
    """Print a rule that holds; exit if it does not."""
    print(
        f"{time.monotonic() - BEGAN:4.0f} s  {'holds' if holds else 'FAILS'}: {words}", flush=True
    )
    if not holds:
        sys.exit(1)


def run(*words: object, folder: Path, home: Path) -> str:
    """Return the output of a command that must succeed, without variables of the checkout."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("CONFIDE_", "PYTHON"))}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(  # noqa: S603 - our words
        list(map(str, words)), cwd=folder, env=kept | offline | {"HOME": str(home)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        rule(False, " ".join(map(str, words))[:100])
    return done.stdout


def check_extras(wheel: Path, folder: Path) -> None:
    """Resolve every extra of the wheel, and use the environments without TensorFlow."""
    metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if "/METADATA" in name)
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    for extra in (line.split(": ")[1] for line in lines if line.startswith("Provides-Extra: ")):
        (folder / "wanted.in").write_text(f"confide[{extra}] @ {wheel.as_uri()}\n")
        resolved = environments.run(
            environments.INSTALLER / "uv", "pip", "compile", "--quiet", "--no-config",
            *environments.target("2_31" if extra == "tpu" else "2_28"),  # as the locks
            folder / "wanted.in", "-o", folder / "locked.txt",
            environment=environments.uv_environment(),
        )  # fmt: skip
        rule(resolved, f"the extra {extra} resolves")
    for extras, code in (("", REFUSED), ("[airflow]", IMPORT_DAGS), ("[audit,gcs]", IMPORT_AUDIT)):
        place = folder / f"confide{extras}"
        release.install(f"confide{extras} @ {wheel.as_uri()}", place)
        run(place / "bin" / "python", "-c", code, folder=folder, home=folder)
        rule(True, f"confide{extras} does what it says")


def check(folder: Path, transformers: str | None) -> None:
    """Build, install and use the package in a folder."""
    release.build(folder / "dist")
    (wheel,) = (folder / "dist").glob("*.whl")
    version = wheel.name.split("-")[1]
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    rule(tops == {"confide", f"confide-{version}.dist-info"}, "the wheel has one package")
    rule({f"confide/{name}" for name in DATA} <= names, "the wheel has its data")
    bill = json.loads((folder / "dist" / f"confide-{version}.cdx.json").read_text())
    parts = {part["name"] for part in bill["components"]}
    rule({"tensorflow-cpu", "dp-accounting"} <= parts, "the bill of materials lists requirements")

    check_extras(wheel, folder)
    release.install(f"confide[cpu] @ {wheel.as_uri()}", folder / "venv")
    commands, empty = folder / "venv" / "bin", folder / "empty"
    empty.mkdir()

    def confide(*words: object) -> str:
        return run(commands / "confide", *words, folder=empty, home=folder)

    rule(confide("--version") == f"confide {version}\n", "confide --version")
    rule("ε in total" in confide("advise", "--units", 500, "--epsilon", 3), "confide advise")
    run(commands / "python", "-c", IMPORT_ALL, folder=empty, home=folder)
    rule(not list(empty.iterdir()), "every module is imported, and no other name is taken")

    with (empty / "notes.csv").open("w", newline="") as stream:
        rows = ((n, f"patient {n % 7} came with fever, home on day {n % 5}") for n in range(20))
        csv.writer(stream).writerows([("PatNr", "NoteText"), *rows])
    confide("init", "notes.csv", "--units", 30, "--out", "settings.json")
    confide("ledger", "register", "notes", "--unit", "patient", "--epsilon", 8, "--delta", 1e-4)
    sizes = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]
    confide("run", "--settings", "settings.json", *sizes)
    confide("export", "model")
    (budget,) = json.loads(confide("ledger", "--json")).values()
    statement = (empty / "model" / "PRIVACY.md").read_text()
    rule(f"ε = {budget['epsilon']:g}" in statement, "twenty strings become a private model")
    if transformers:
        run(transformers, "-c", LOAD, empty / "model", folder=empty, home=folder)
        rule(True, "transformers loads the model")


if __name__ == "__main__":
    BEGAN = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        check(Path(scratch), sys.argv[1] if sys.argv[1:] else None)
