import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tasks.protocol import CHECKOUT
from tasks.protocol.step_classes import STEP_CLASSES
from tasks.releases.manifest import BY_VALUE, code_digest, code_of, imports_of

MODULES = tomllib.loads(Path(__file__).with_name("release_modules.toml").read_text())
AFTERWARDS, UNRELATED = MODULES["afterwards"], MODULES["unrelated"]


@pytest.fixture(scope="module")
def imports() -> Any:
    """The import graph of dp_core by grimp, without the modules that enter by value."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("dp_core", exclude_type_checking_imports=True, cache_dir=None)
    for package in BY_VALUE:
        for module in {package, *graph.find_descendants(package)} & graph.modules:
            graph.remove_module(module)
    return graph


@pytest.mark.parametrize("kind", [name for name, spec in STEP_CLASSES.items() if spec.code])
def test_manifest_depends_on_code_that_determines_the_release(kind, imports):
    """A module that a step newly calls must be added to the spec's `code` or to AFTERWARDS."""
    code = set(code_of(kind)[0])
    expected = [f"{kind}_step"] + ["training_files"] * (kind in ("pretrain", "select"))
    steps = {module for module in code if module.startswith("tasks.steps")}
    assert steps >= {f"tasks.steps.{step}" for step in expected}
    assert not code & set(UNRELATED)
    files = [CHECKOUT.joinpath(*step.split(".")).with_suffix(".py") for step in steps]
    for name in (name for file in files for name in imports_of(file)):
        if name.startswith("dp_core") and not name.startswith(BY_VALUE):
            assert {name, name.rpartition(".")[0]} & (code | set(AFTERWARDS[kind])), name
    entries = [name for name in STEP_CLASSES[kind].code if name.startswith("dp_core")]
    upstream = set(entries).union(*(imports.find_upstream_modules(e) for e in entries))
    packages = {".".join(m.split(".")[:n]) for m in upstream for n in range(1, m.count(".") + 1)}
    beside = {m for package in packages for m in imports.find_upstream_modules(package)}
    core = {name for name in code if name.startswith("dp_core")}
    assert upstream <= core <= upstream | packages | beside


def test_digest_changes_with_the_text_of_the_code(tmp_path):
    for package in ("dp_core", "tasks"):
        shutil.copytree(CHECKOUT / package, tmp_path / package)
    file = tmp_path / "dp_core" / "privacy" / "seed_store.py"
    before = code_digest.__wrapped__("vocabulary", tmp_path)
    file.write_text(file.read_text() + "# edited\n")
    assert code_digest.__wrapped__("vocabulary", tmp_path) != before


def test_libraries_that_compute_a_release_are_named_with_their_versions(monkeypatch):
    libraries = set(code_of("pretrain")[1])
    assert {"tensorflow", "numpy", "numba", "cryptography", "tokenizers"} <= libraries
    assert "tensorflow" not in code_of("vocabulary")[1]
    before = code_digest.__wrapped__("vocabulary")
    monkeypatch.setattr(
        "tasks.releases.manifest.metadata.version", lambda name: f"not that of {name}"
    )
    assert code_digest.__wrapped__("vocabulary") != before


def test_code_digest_imports_none_of_the_modules():
    program = (
        "import sys; from tasks.releases.manifest import code_digest; code_digest('pretrain'); "
        "assert not {'tensorflow', 'numba', 'dp_core.training'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, check=True)
