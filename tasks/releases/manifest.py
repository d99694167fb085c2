"""Manifests: the inputs, plan, code and libraries that determine a release.

The noise of a release is drawn for one manifest. The code is not listed by hand: it consists of all
modules that the entry modules of the step's spec (`StepSpec.code`) import, found in their sources
without importing them (TensorFlow takes seconds). The step's file counts too, because it decides
which rows, weights and seed are used. Two kinds of code are left out: code whose results enter the
manifest by value (the plan's numbers, the digests of the inputs), and code that reads a release
afterwards (the report, the audits, the made-up notes).
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from itertools import accumulate
from pathlib import Path

from dp_core.models.parameters import Arrays
from tasks.protocol.step_classes import STEP_CLASSES

SOURCES = Path(__file__).resolve().parents[__name__.count(".")]  # holds the top-level package
BY_VALUE = (  # packages whose results are in the manifest as numbers or digests
    "dp_core.data.readers",
    "dp_core.privacy.accounting",
    "dp_core.vocabulary.selection_calibration",
)


def manifest(*, kind: str, **parts: str | int | float | dict[str, object]) -> bytes:
    """Return the manifest of a release as canonical JSON, with the digest of its code.

    Args:
        kind: the releasing step, by its name.
        parts: keyed digests of its inputs, its plan, and everything else that shapes its output.
    """
    body = {**parts, "kind": kind, "code": code_digest(kind)}
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


@cache
def code_digest(kind: str, root: Path = SOURCES) -> str:
    """Return SHA-256 over the sources and the library versions that shape a release, in hex."""
    modules, libraries = code_of(kind, root)
    digest = hashlib.sha256()
    for name in modules:
        file = _file(name, root)
        for source in (file, file.with_suffix(".toml")):  # a module may have a table of data
            if source.exists():
                content = source.read_bytes()
                digest.update(f"{name} {len(content)}\n".encode() + content)
    distributions = metadata.packages_distributions()
    for library in libraries:
        names = sorted(set(distributions.get(library, [])))
        versions = " ".join(f"{name} {metadata.version(name)}" for name in names)
        digest.update(f"{library} {versions}\n".encode())
    digest.update(f"python {platform.python_implementation()} {sys.version_info[:2]}".encode())
    return digest.hexdigest()


def code_of(kind: str, root: Path = SOURCES) -> tuple[list[str], list[str]]:
    """Return the modules and the libraries that shape releases of a step, by name.

    They are all that its entry modules import.
    """
    modules = {f"tasks.steps.{kind}_step"}
    libraries: set[str] = set()
    waiting = list(STEP_CLASSES[kind].code)
    while waiting:
        module = waiting.pop()
        if module in modules or module.startswith(BY_VALUE):
            continue
        modules.add(module)
        if module.startswith("tasks."):
            continue  # the entry modules cover what a step's file imports from dp_core
        for imported in imports_of(_file(module, root)):
            if imported.startswith("dp_core."):
                waiting += _modules_on_the_way(imported, root)
            elif (library := imported.partition(".")[0]) not in sys.stdlib_module_names:
                libraries.add(library)
    return sorted(modules), sorted(libraries)


def imports_of(file: Path) -> Iterator[str]:
    """Yield the imports of a source file at any depth, as dotted names, without type checking."""
    waiting: list[ast.AST] = [ast.parse(file.read_bytes())]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=otherwise):
                waiting += otherwise
                continue
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{name.name}" for name in names)
        waiting += ast.iter_child_nodes(node)


def _modules_on_the_way(name: str, root: Path) -> list[str]:
    """Return the packages and the module that importing a dotted name runs."""
    every = accumulate(name.split("."), "{}.{}".format)
    return [module for module in every if _file(module, root).exists()]


def _file(module: str, root: Path) -> Path:
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def words_digest(words: Iterable[str]) -> str:
    """Return a digest of a set of words, whatever their order."""
    return hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()


def counts_released(noised: Mapping[str, int]) -> bytes:
    """Return a digest of a released histogram: words and noised counts."""
    return hashlib.sha256(json.dumps(sorted(noised.items())).encode()).digest()


def weights_released(weights: Arrays, *kept: Arrays) -> bytes:
    """Return a digest of a release: names, shapes and every bit of its model's weights.

    Args:
        weights: of the model.
        kept: weights of the models of earlier epochs, in their order.
    """
    digest = hashlib.sha256()
    for model in (weights, *kept):
        for name, values in sorted(model.items()):
            digest.update(f"{name} {values.dtype.str} {values.shape}".encode())
            digest.update(values.tobytes())
    return digest.digest()
