"""Tests of the generated pages of the reference, and of the site's navigation."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dp_core.errors import ConfideError
from tasks.cli import COMMANDS
from tasks.protocol.settings_file import PRESETS
from tasks.protocol.sweep import SweepSettings

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "scripts"))
import reference_pages  # noqa: E402


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference_pages.pages()


def test_every_setting_has_one_section_with_its_description_and_default(pages):
    text = pages["settings"] + pages["sweep-settings"]
    assert sorted(re.findall(r"\{ #(\w+) \}", text)) == sorted(SweepSettings.model_fields)
    section = text.partition("{ #target_epsilon }")[2].partition("###")[0]
    assert "number, ≥ 0.01, ≤ 100 · default: empty" in section
    assert SweepSettings.model_fields["target_epsilon"].description[:40] in section


def test_every_verb_preset_and_exit_code_is_described(pages):
    assert re.findall(r"\{ #([\w-]+) \}", pages["commands"]) == list(COMMANDS)
    assert "confide ledger register [OPTIONS]" in pages["commands"]
    assert re.findall(r"\{ #([\w.-]+) \}", pages["presets"]) == list(PRESETS)
    codes = {kind.exit_code for kind in reference_pages.subclasses(ConfideError)} | {0, 1}
    assert set(map(int, re.findall(r"^\| (\d+) ", pages["exit-codes"], re.M))) == codes


def test_navigation_names_every_generated_page_of_existing_modules(pages):
    """MkDocs itself refuses pages of docs/ that the navigation lacks."""
    named = re.findall(r"reference/([\w-]+)\.md", (CHECKOUT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(pages)
    modules = re.findall(r"^::: (\S+)", "".join(pages.values()), re.M)
    assert [module for module in modules if not find_spec(module)] == []
