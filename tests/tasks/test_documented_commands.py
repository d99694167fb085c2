"""The commands in README and docs: executed on small files, judged, or marked with their needs.

`<!-- needs: … -->` before a block marks it: its commands are only read by the parser, and its
settings judged. `confide run` is never executed here; the tests of whole jobs train.
"""

import csv
import gzip
import re
import shlex
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path

import click
import pytest

from dp_core.config.fields import named_paths
from tasks.cli import cli
from tasks.demo_data.notes import notes
from tasks.protocol import CHECKOUT
from tasks.protocol.sweep import SweepSettings

SWEEPS = CHECKOUT / "docs" / "sweeps.md"
# CHANGELOG.md describes earlier versions, so its commands need not exist today.
PAGES = [
    page
    for page in [*sorted(CHECKOUT.glob("*.md")), *sorted((CHECKOUT / "docs").rglob("*.md"))]
    if page.name != "CHANGELOG.md" and re.search("```|`make |confide ", page.read_text())
]
FENCE = re.compile(r"(?:^ *<!-- needs: (.+?) -->\n)?^( *)```(\w*)\n(.*?)^\2```$", re.M | re.S)
LANGUAGES = {"sh", "python", "json", "toml", "ini", "text", "mermaid"}
EXECUTED = ("init", "advise", "epsilon", "calibrate", "ledger", "paper-table", "doctor", "backup")
FOLDERS = ("tests/", "docker/", "scripts/", "benchmarks/", "examples/", "docs/")


def name_of(page: Path) -> str:
    return str(page.relative_to(CHECKOUT))


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the needs and the words of each command in a block, without variables and ellipses."""
    for needs, _, language, script in FENCE.findall(page.read_text()):
        for line in script.replace("\\\n", " ").splitlines() if language == "sh" else ():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
            lexer.whitespace_split = True
            for is_end, words in groupby(lexer, lambda word: set(word) <= set("&|;")):
                command = [w for w in words if w != "…" and not re.match("[A-Z_]+=", w)]
                if command and not is_end:
                    yield needs, command


def words_of_confide(command: list[str]) -> list[str] | None:
    """Return the words after `confide`; None for another program."""
    if command[:1] in (["confide"], ["./confide"]):
        return command[1:]
    if "tasks.cli" in command:  # in a container
        return command[command.index("tasks.cli") + 1 :]
    return ["run", *command] if command[:1] == ["--set"] else None


def parsed(words: list[str], **options: bool) -> None:
    """Read a command line as the program does, without executing it."""
    group, parent = cli, click.Context(cli, info_name="confide")
    while isinstance(group, click.Group) and words and not words[0].startswith("-"):
        name, group, words = group.resolve_command(parent, words)
    if not isinstance(group, click.Group):
        group.make_context(name, list(words), parent=parent, **options)


@pytest.fixture
def small_files(at_home, tmp_path, monkeypatch):
    """Files of the names in the pages, in the current folder."""
    monkeypatch.chdir(tmp_path)
    rows = [("subject_id", "text"), *((n.patient_id, n.text) for n in notes(50, seed=5))]
    for name, opened in {"notes.csv": open, "discharge.csv.gz": gzip.open}.items():
        with opened(name, "wt", newline="") as stream:
            csv.writer(stream).writerows(rows)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("Public words.")
    (tmp_path / "ward.json").write_text('{"declared_units": 400}')
    (search,) = re.findall(r"`search.json` contains, .*?`(.+?)`", SWEEPS.read_text())
    (tmp_path / "search.json").write_text(f"{{{search}}}")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_the_page_run_or_are_marked(confide, small_files, page):
    for needs, command in commands(page):
        words = words_of_confide(command)
        if words is None:
            known = command[0] in ("make", "export", "eval")
            assert known or needs, f"mark the needs of: {shlex.join(command)}"
        elif words[0] == "run":
            settings = confide.json(*words, "--show-settings")
            values = {name: field["value"] for name, field in settings.items()}
            named = chain(*named_paths(SweepSettings, values).values())
            lacking = [path for path in named if not Path(path).exists()]
            assert not lacking or needs, f"mark the block: it needs {lacking}"
        elif needs or words[0] not in EXECUTED:
            parsed(words)
        else:
            code, _, err = confide(*words)
            assert code == 0, (words, err)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_within_the_text_have_known_verbs_and_options(page):
    for code in re.findall(r"`(?:\./)?confide ([^`]+)`", page.read_text()):
        parsed([w for w in shlex.split(code) if w != "…"], resilient_parsing=True)  # a part


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_files_and_languages_of_blocks_exist(page):
    """A block without a language would escape the tests of commands."""
    text, makefile = page.read_text(), (CHECKOUT / "Makefile").read_text()
    assert {language for _, _, language, _ in FENCE.findall(text)} <= LANGUAGES
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert set(re.findall(r"`make ([a-z][a-z-]*)", text)) <= targets
    for _, command in commands(page):
        assert command[0] != "make" or command[1] in targets
        files = [word.partition("::")[0] for word in command if word.startswith(FOLDERS)]
        assert [file for file in files if not (CHECKOUT / file).exists()] == []
