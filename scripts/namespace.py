"""Put the packages `dp_core`, `tasks` and `dags` below the one package `confide`, for the wheel.

    scripts/python3 scripts/namespace.py FOLDER      # writes FOLDER/confide

In the checkout, the three packages are top-level modules. Installed packages with such names would
collide with other software, so the copy in the wheel names every module `confide.…`: in imports,
and in the strings and comments that name a module. Standard library only.
"""

import ast
import io
import re
import shutil
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dp_core", "tasks", "dags")
NAMESPACE = "confide"
PYTHON_API = Path("tasks/python_api.py")  # the Python API; its __all__ are the names of `confide`
_TOP = f"({'|'.join(PACKAGES)})"
_DOTTED = re.compile(rf"(?<![\w./{{-]){_TOP}\.(\w+)")  # a module, if there is such a file
_COMMAND = re.compile(rf"(-m |import ){_TOP}\b")
_WHOLE = re.compile(rf"""([rfRF]*["']){_TOP}(\.?["'])""")  # "tasks", or the prefix "tasks."
_INIT = '''"""Confide trains language models on confidential text under differential privacy.

The names below are imported on first use, because they import large packages.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
{imports}

__version__ = metadata.version("confide")
__all__ = {names!r}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'confide' has no attribute {{name!r}}")
    try:
        return getattr(import_module("confide.tasks.python_api"), name)
    except ModuleNotFoundError as error:
        from confide.tasks.protocol import SETUP

        what = f"confide.{{name}} needs the package {{error.name}}"
        raise ImportError(f"{{what}}. Run: {{SETUP}}") from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
'''


def installed_source(text: str, root: Path = ROOT) -> str:
    """Return a module's source with every module of the three packages named `confide.…`."""
    starts = [0]  # of the lines
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    edits = []  # start and end in the text, and the new text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_inside(node.module or ""):
            place = starts[node.lineno - 1] + node.col_offset + len("from ")
            edits.append((place, place, f"{NAMESPACE}."))
    last = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT) and last != "/":  # no path
            start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            edits.append((start, end, _renamed(token.string, root)))
        last = token.string
    parts, position = [], 0
    for start, end, new in sorted(edits):
        parts += [text[position:start], new]
        position = end
    return "".join([*parts, text[position:]])


def _renamed(words: str, root: Path) -> str:
    """Return a string literal or comment with its modules renamed."""

    def dotted(found: re.Match[str]) -> str:
        place = root / found[1] / found[2]
        exists = place.is_dir() or place.with_suffix(".py").is_file()
        return f"{NAMESPACE}.{found[0]}" if exists else found[0]

    words = _WHOLE.sub(rf"\1{NAMESPACE}.\2\3", words) if _WHOLE.fullmatch(words) else words
    return _DOTTED.sub(dotted, _COMMAND.sub(rf"\1{NAMESPACE}.\2", words))


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def bare_names(text: str) -> list[str]:
    """Return the expressions of a source that name a module of the three packages by its old name.

    A string after `/` is a path.
    """
    tree, found = ast.parse(text), []
    paths = {node.right for node in ast.walk(tree) if isinstance(node, ast.BinOp)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                old = any(_is_inside(name.name) for name in names)
            case ast.ImportFrom(module=str(module), level=0):
                old = _is_inside(module)
            case ast.Constant(value=str(value)) if node not in paths:
                old = bool(
                    re.fullmatch(rf"{_TOP}\.?", value)
                    or _COMMAND.search(value)
                    or re.search(rf"(?<![\w./-]){_TOP}\.[a-z_]", value)
                )
            case _:
                continue
        if old:
            found.append(f"line {node.lineno}: {ast.unparse(node)[:80]}")
    return found


def public_names(root: Path = ROOT) -> list[str]:
    """Return the names that the Python API exports; none if there is no API."""
    file = root / PYTHON_API
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else ():
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return sorted(ast.literal_eval(value))
    return []


def write(folder: Path, root: Path = ROOT) -> Path:
    """Write the package `confide` into a folder, and return its path.

    Raises:
        ValueError: a source would still name a module by its name in the checkout.
    """
    package = folder / NAMESPACE
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in PACKAGES:
        shutil.copytree(root / name, package / name, ignore=ignored)
    for file in package.rglob("*.py"):
        source = installed_source(file.read_text(encoding="utf-8"), root)
        if old := bare_names(source):
            raise ValueError(f"{file.relative_to(package)}, {old[0]}: no rule renames this module")
        file.write_text(source, encoding="utf-8")
    names = public_names(root)
    imports = "".join(f"    from confide.tasks.python_api import {n} as {n}\n" for n in names)
    init = _INIT.format(names=names, imports=imports.rstrip("\n") or "    pass")
    (package / "__init__.py").write_text(init, encoding="utf-8")
    (package / "py.typed").touch()
    return package


if __name__ == "__main__":
    write(Path(sys.argv[1]))
