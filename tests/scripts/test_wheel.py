"""The package in a new environment outside of the checkout: `make test-wheel`."""

import csv
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
TRANSFORMERS = CHECKOUT / ".venv" / "transformers" / "bin" / "python"
TINY = {
    "vocabulary_size": 300, "layers": 1, "hidden": 64, "sequence_length": 16, "epochs": 1,
    "public_steps": 2, "public_batch_size": 8, "device": "cpu", "target_epsilon": 8,
}  # fmt: skip
IMPORT_ALL = """
import importlib, pkgutil, sys, confide
assert "tensorflow" not in sys.modules and confide.__version__
for module in pkgutil.walk_packages(confide.__path__, "confide."):
    if not module.name.startswith("confide.dags") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert all(getattr(confide, name) for name in confide.__all__)
assert not {"dp_core", "tasks", "dags"} & set(sys.modules)
"""
LOAD = """
import sys, torch, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1])
logits = model(**tokenizer("the patient went home", return_tensors="pt")).logits
assert torch.isfinite(logits).all() and logits.shape[-1] == len(tokenizer)
"""

pytestmark = pytest.mark.wheel


def run(*words: object, **options) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, CHECKOUT / "scripts" / "release.py", folder, cwd=CHECKOUT)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory, dist) -> tuple[Path, Path, dict[str, str]]:
    """The environment's folder of commands, an empty folder, and variables without the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    (wheel,) = dist.glob("*.whl")
    run(
        sys.executable, CHECKOUT / "scripts" / "release.py",
        "install", f"confide[cpu] @ {wheel.as_uri()}", folder / "venv",
    )  # fmt: skip
    (folder / "empty").mkdir()
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("CONFIDE_", "PYTHON"))}
    return folder / "venv" / "bin", folder / "empty", kept | {"HOME": str(folder)}


def test_wheel_holds_one_typed_package_with_its_data(dist):
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"confide", "confide-0.1.0.dist-info"}
    assert {
        "confide/py.typed", "confide/tasks/presets/demo.json",
        "confide/dags/launcher/pods/cpu.yaml",
        "confide/tasks/report/templates/job.html.j2", "confide/tasks/commands/commands.toml",
    } <= names  # fmt: skip
    bill = json.loads((dist / "confide-0.1.0.cdx.json").read_text())
    assert {"tensorflow-cpu", "dp-accounting"} <= {part["name"] for part in bill["components"]}


def test_installed_package_has_commands_and_leaves_other_names_alone(installed):
    commands, empty, variables = installed
    options = {"cwd": empty, "env": variables}
    assert run(commands / "confide", "--version", **options) == "confide 0.1.0\n"
    advice = run(commands / "confide", "advise", "--units", 500, "--epsilon", 3, **options)
    assert re.search(r"ε in total, as charged\s+3\b", advice)
    run(commands / "python", "-c", IMPORT_ALL, **options)
    for name in ("dp_core", "tasks", "dags"):
        answer = subprocess.run(
            [commands / "python", "-c", f"import {name}"], stderr=subprocess.PIPE, **options
        )
        assert b"ModuleNotFoundError" in answer.stderr
    assert not list(empty.iterdir())


@pytest.mark.skipif(not TRANSFORMERS.exists(), reason="no .venv/transformers: make test-wheel")
def test_twenty_strings_become_a_private_model_that_transformers_loads(installed):
    commands, empty, variables = installed

    def confide(*words: object) -> str:
        return run(commands / "confide", *words, cwd=empty, env=variables)

    with (empty / "notes.csv").open("w", newline="") as stream:
        rows = ((n, f"patient {n % 7} came with fever, home on day {n % 5}") for n in range(20))
        csv.writer(stream).writerows([("PatNr", "NoteText"), *rows])
    confide("init", "notes.csv", "--out", "settings.json")
    confide("ledger", "register", "notes", "--unit", "patient", "--epsilon", 8, "--delta", 1e-4)
    sizes = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    confide("run", "--settings", "settings.json", *sizes)
    confide("export", "model")
    (budget,) = json.loads(confide("ledger", "--json")).values()
    assert f"ε = {budget['epsilon']:g}" in (empty / "model" / "PRIVACY.md").read_text()
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1"}
    run(TRANSFORMERS, "-c", LOAD, empty / "model", env=variables | offline)
