import ast
import re
import tomllib
from pathlib import Path

import pytest

from scripts import namespace

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
# A string of exactly this form is renamed as a module: a key of data must not look like one.
BARE = {
    "dp_core/cluster/ray_cluster.py", "tasks/context.py", "tasks/protocol/fork_server.py",
    "tasks/protocol/step_process.py",
}  # fmt: skip


@pytest.mark.cases
def test_modules_and_only_modules_are_renamed(source, installed):
    assert namespace.installed_source(source) == installed


def test_installed_package_names_no_module_of_the_checkout(tmp_path):
    package = namespace.write(tmp_path)
    for file in package.rglob("*.py"):
        source = file.read_text()
        assert namespace.bare_names(source) == []
        original = CHECKOUT / file.relative_to(package)
        if original.is_file():  # the same program apart from the names
            restored = re.sub(r"confide\.(?=dp_core|tasks|dags)", "", source)
            assert restored == original.read_text()
    data = {file.relative_to(package) for file in package.rglob("*") if file.suffix != ".py"}
    for name in namespace.PACKAGES:
        files = (f for f in (CHECKOUT / name).rglob("*") if "__pycache__" not in f.parts)
        assert {f.relative_to(CHECKOUT) for f in files if f.suffix != ".py"} <= data


@pytest.mark.cases
def test_name_of_the_checkout_is_detected_and_refused(tmp_path, source):
    assert namespace.bare_names(source)
    assert not namespace.bare_names('x = folder / "dags"\n')
    for name in namespace.PACKAGES:
        (tmp_path / name).mkdir()
    (tmp_path / "tasks" / "a.py").write_text("import tasks\n")
    with pytest.raises(ValueError, match=r"tasks/a\.py, line 1: import tasks"):
        namespace.write(tmp_path / "out", tmp_path)


def test_strings_that_equal_a_package_are_modules_or_paths():
    files = set()
    for file in (f for name in namespace.PACKAGES for f in (CHECKOUT / name).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        paths = {node.right for node in nodes if isinstance(node, ast.BinOp)}
        words = {node for node in nodes if isinstance(node, ast.Constant)} - paths
        if any(node.value in namespace.PACKAGES for node in words):
            files.add(str(file.relative_to(CHECKOUT)))
    assert files == BARE


def test_names_of_the_package_are_those_of_the_library(tmp_path):
    (tmp_path / "tasks").mkdir()
    assert namespace.public_names(tmp_path) == []
    (tmp_path / namespace.PYTHON_API).write_text('__all__ = ["train", "Ledger"]\n')
    assert namespace.public_names(tmp_path) == ["Ledger", "train"]


# --- the requirements


def required(lines: list[str]) -> set[str]:
    """Return the names that requirements name, and those of the extras that they include."""
    names = set()
    for line in lines:
        included = re.fullmatch(r"confide\[(\w+)\]", line)
        names |= required(EXTRAS[included[1]]) if included else {re.match(r"[\w-]+", line)[0]}
    return names


def grouped(name: str) -> set[str]:
    """Return the names that a dependency group requires, and those of the groups in it."""
    lines = PROJECT["dependency-groups"][name]
    included = [grouped(line["include-group"]) for line in lines if isinstance(line, dict)]
    return required([line for line in lines if isinstance(line, str)]).union(*included)


@pytest.mark.cases
def test_extras_require_the_packages_of_their_group(group, extras, only_there):
    core = required(PROJECT["project"]["dependencies"])
    wheel = core.union(*(required(EXTRAS[extra]) for extra in extras))
    assert wheel - core <= grouped(group).difference(only_there) <= wheel


def test_ranges_admit_the_locked_versions():
    specifiers = pytest.importorskip("packaging.requirements")
    lines = [*PROJECT["project"]["dependencies"], *(line for e in EXTRAS.values() for line in e)]
    checked = 0
    for lock in ("task", "orchestrator", "task-gpu", "task-tpu"):
        text = (CHECKOUT / "requirements" / f"{lock}.txt").read_text()
        locked = dict(re.findall(r"^([a-z0-9-]+)(?:\[\w+\])?==([^\s;\\]+)", text, re.M))
        for wanted in map(specifiers.Requirement, lines):
            if version := locked.get(wanted.name):
                assert wanted.specifier.contains(version), f"{wanted} in {lock}.txt is {version}"
                checked += 1
    assert checked > len(lines)
