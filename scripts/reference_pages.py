"""Write the pages of the reference for `make docs`, from the code that they describe.

.venv/task/bin/python scripts/reference_pages.py build/reference
"""

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from dp_core import errors
from dp_core.data.readers.registry import corpus_readers, labelled_text_readers, sentence_readers
from tasks.cli import TASKS, cli
from tasks.evidence.audits import AUDITS
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import PRESETS, preset
from tasks.protocol.sweep import SweepSettings

LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
METRICS = Path(__file__).resolve().parents[1] / "tasks" / "tracking" / "metrics.toml"
API = (  # packages and modules for a person who programs with Confide
    "tasks.python_api",
    "dp_core.privacy.execution_plan",
    "dp_core.privacy.mechanisms",
    "dp_core.privacy.accounting.accountants",
    "dp_core.privacy.ledger.ledger",
    "dp_core.privacy.statement",
    "dp_core.errors",
)


def settings_page(title: str, fields: Mapping[str, dict[str, Any]], job: str) -> str:
    """Return a page with a section for each setting."""
    parts = [f"# {title}", f"`confide run {job}` and the trigger form of `{job}` have them."]
    for section, group in groupby(fields.items(), lambda field: str(field[1]["section"])):
        parts.append(f"## {section}")
        for name, field in group:
            parts += [f"### `{name}` {{ #{name} }}", kind(field), text(field["description"])]
    return "\n\n".join(parts) + "\n"


def kind(field: Mapping[str, Any]) -> str:
    """Return a setting's title, type, limits and default in one line."""
    choices = field.get("enum") or ([field["const"]] if "const" in field else [])
    type = "one of " + ", ".join(f"`{c}`" for c in choices) if choices else field.get("type", "any")
    limits = [f"{sign} {field[key]:g}" for key, sign in LIMITS.items() if key in field]
    default = field.get("default")
    shown = "empty" if default in (None, "") else f"`{json.dumps(default)}`"
    return f"*{field['title']}* · {', '.join([type, *limits])} · default: {shown}"


def text(words: str) -> str:
    """Return plain words as Markdown."""
    return words.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")


def presets_page() -> str:
    """Return a page with the settings of each preset."""
    parts = ["# Presets", "`confide run --preset NAME` starts from the settings of a preset."]
    for name in PRESETS:
        content = json.dumps(preset(name), indent=2, ensure_ascii=False)
        parts += [f"## `{name}` {{ #{name} }}", f"```json\n{content}\n```"]
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """Return a page with the help of each command."""
    parts = ["# Commands"]
    root = click.Context(cli, info_name="confide")
    for task, verbs in TASKS.items():
        parts.append(f"## {task}")
        for verb, (_, line) in verbs.items():
            command = cli.get_command(root, verb)
            parts += [f"### `confide {verb}` {{ #{verb} }}", text(line)]
            for context in contexts(command, verb, root):
                parts.append(f"```text\n{context.get_help()}\n```")
    return "\n\n".join(parts) + "\n"


def contexts(command: click.Command, name: str, parent: click.Context) -> Iterator[click.Context]:
    """Yield the context of a command, and of its subcommands."""
    context = click.Context(command, info_name=name, parent=parent, max_content_width=80)
    yield context
    for child, each in getattr(command, "commands", {}).items():
        yield from contexts(each, child, context)


def exit_codes_page() -> str:
    """Return a table of the errors by exit code."""
    kinds = [errors.ConfideError, *subclasses(errors.ConfideError)]
    rows = [
        f"| {kind.exit_code} | `{kind.__name__}` | {(kind.__doc__ or '').splitlines()[0]} |"
        for kind in sorted(kinds, key=lambda kind: kind.exit_code)
        if "exit_code" in vars(kind)
    ]
    head = "# Exit codes\n\n| code | error | meaning |\n| --- | --- | --- |"
    return "\n".join([head, "| 0 | | The command or step succeeded. |", *rows]) + "\n"


def subclasses(kind: type[errors.ConfideError]) -> Iterator[type[errors.ConfideError]]:
    """Yield the subclasses of an error in the module of errors, at any depth."""
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield each
            yield from subclasses(each)


def audits_page() -> str:
    """Return a table of the audits and their measures."""
    rows = [f"| {a.name} | {a.measured} | `{a.step or '–'}` | `{a.key}` |" for a in AUDITS]
    head = "# Audits\n\n| audit | measured | step | key of findings |\n| --- | --- | --- | --- |"
    return "\n".join([head, *rows]) + "\n"


def metrics_page() -> str:
    """Return a table of the metrics, for each kind of step."""
    parts = ["# Metrics", "Each step logs its metrics to MLflow; `{}` is a placeholder."]
    for kind, metrics in tomllib.loads(METRICS.read_text()).items():
        rows = [
            f"| `{name}` | {labels} | {text(words)} |" for name, (labels, words) in metrics.items()
        ]
        head = "| metric | label | meaning |\n| --- | --- | --- |"
        parts.append("\n".join([f"## {kind.capitalize()}\n", head, *rows]))
    return "\n\n".join(parts) + "\n"


def modules_page(title: str, modules: Sequence[str], *, members: bool) -> str:
    """Return a page with the docstrings of modules, and of their members."""
    option = "" if members else "\n    options:\n      members: false"
    return "\n\n".join([f"# {title}", *(f"::: {module}{option}" for module in modules)]) + "\n"


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    jobs, sweeps = JobSettings.form_schema(), SweepSettings.form_schema()
    grid = {name: field for name, field in sweeps.items() if name not in jobs}
    formats = (corpus_readers(), sentence_readers(), labelled_text_readers())
    readers = [reader for by_format in formats for reader in by_format.values()]
    modules = list(dict.fromkeys(getattr(each, "func", each).__module__ for each in readers))
    return {
        "settings": settings_page("Settings of a job", jobs, "dp_bert"),
        "sweep-settings": settings_page("Further settings of a sweep", grid, "dp_sweep"),
        "presets": presets_page(),
        "commands": commands_page(),
        "exit-codes": exit_codes_page(),
        "audits": audits_page(),
        "metrics": metrics_page(),
        "formats": modules_page("Formats", modules, members=False),
        "python": modules_page("Python API", API, members=True),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for name, content in pages().items():
        (folder / f"{name}.md").write_text(content)
