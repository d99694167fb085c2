import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")]
# CHANGELOG.md describes earlier versions, so its paths need not exist today.
LIVING = [page for page in PAGES if page.name != "CHANGELOG.md"]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(CHECKOUT)))
def test_link_targets_and_anchors_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", LIVING, ids=lambda p: str(p.relative_to(CHECKOUT)))
def test_paths_in_the_text_exist(page):
    starts = "dp_core|tasks|dags|tests|docs|docker|scripts|benchmarks|requirements"
    words = re.findall(rf"`((?:{starts})/[\w./\-*]+)`", page.read_text())
    assert [word for word in words if not list(CHECKOUT.glob(word.rstrip("/")))] == []


@pytest.mark.parametrize("page", LIVING, ids=lambda p: str(p.relative_to(CHECKOUT)))
def test_names_imported_by_documented_examples_exist(page):
    for example in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and re.match("dp_core|tasks", node.module or ""):
                defined = dir(import_module(node.module))
                assert {name.name for name in node.names} <= set(defined), node.module
