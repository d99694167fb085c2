"""Hooks of MkDocs: pages from outside of docs/, and links between them that work as on GitHub.

README, SECURITY, CONTRIBUTING and CHANGELOG become pages of the site, as do the generated pages of
the reference and each file of the code to which a page links.
"""

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # MkDocs runs this file alone

from scripts import architecture  # noqa: E402

REFERENCE = ROOT / "build" / "reference"  # by scripts/reference_pages.py
NOTEBOOKS = ROOT / "build" / "notebooks"  # by scripts/notebooks.py, with outputs
PAGES = {f"{n}.md": f"{n.lower()}.md" for n in ("README", "SECURITY", "CONTRIBUTING", "CHANGELOG")}
LANGUAGES = {".py": "python", ".json": "json", ".jsonl": "json", ".toml": "toml", ".yaml": "yaml"}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]*)(#[^)\s]*)?(\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
NEEDS = re.compile(r"^( *)<!-- needs: (.+?) -->$", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, and the files to which pages link."""
    for name, place in PAGES.items():
        add(files, config, place, (ROOT / name).read_text())
    for page in sorted(REFERENCE.glob("*.md")):
        add(files, config, f"reference/{page.name}", page.read_text())
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        add(
            files,
            config,
            f"notebooks/{notebook.stem}.md",
            markdown(json.loads(notebook.read_text())),
        )
    linked: set[str] = set()
    for file in list(files.documentation_pages()):
        linked.update(links_to_code(file.content_string, origin(file.src_uri)))
    linked.update(*([f"{path}/{name}" for name in listed(path)] for path in linked))
    for path in sorted(linked):
        add(files, config, f"source/{path}.md", source_page(path))
    return files


def add(files: Files, config: MkDocsConfig, place: str, content: str) -> None:
    """Add a page with this content."""
    files.append(File.generated(config, place, content=content))


def origin(page: str) -> str:
    """Return the path of a page's file in the repository."""
    outside = {place: name for name, place in PAGES.items()}
    return outside.get(page, f"docs/{page}")


def links_to_code(text: str, file: str) -> set[str]:
    """Return the files and folders, outside of the site's pages, to which a text links.

    MkDocs itself reports links to files that do not exist.
    """
    targets = {resolved(link[1], file) for link in LINK.findall(FENCE.sub("", text))} - {""}
    outside = (path for path in targets - PAGES.keys() if not path.startswith("docs/"))
    return {path for path in outside if (ROOT / path).exists()}


def resolved(target: str, file: str) -> str:
    """Return the repository's path of a relative link; empty for others."""
    if not target or re.match(r"[a-z]+:", target) or file.startswith(("docs/reference", "source/")):
        return ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), target))


def listed(path: str) -> list[str]:
    """Return the names of the files in a folder of the code; none if the path is a file."""
    folder = ROOT / path
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if Path(name).suffix in LANGUAGES)


def source_page(path: str) -> str:
    """Return the page of a file of the code, or of a folder with links to its files."""
    file, head = ROOT / path, f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    if file.is_dir():
        return head + "".join(f"- [{name}]({file.name}/{name}.md)\n" for name in listed(path))
    return f"{head}````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````\n"


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Draw diagrams, rewrite links to the site's places, and show the needs of marked commands."""
    here, file = posixpath.dirname(page.file.src_uri), origin(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        path = resolved(match[2], file)
        if not path:
            return match[0]
        place = PAGES.get(path) or path.removeprefix("docs/").replace(".ipynb", ".md")
        if not path.startswith("docs/") and path not in PAGES:
            place = f"source/{path}.md"
        return f"{match[1]}{posixpath.relpath(place, here or '.')}{match[3] or ''}{match[4]}"

    text = MERMAID.sub(lambda diagram: f"<div>{architecture.svg(diagram[1])}</div>", text)
    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(rewritten, part) for part in parts[::2]]
    return NEEDS.sub(r"\1Needs \2:\n\1{ .needs }\n", "".join(parts))


def markdown(notebook: dict[str, Any]) -> str:
    """Return an executed notebook as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        shown = (each for each in cell.get("outputs", []) if each.get("name") != "stderr")
        for output in shown:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                parts.append(f"![Output](data:image/png;base64,{''.join(data['image/png'])})")
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
