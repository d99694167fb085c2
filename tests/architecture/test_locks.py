import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LOCKS = CHECKOUT / "requirements"
INCLUDED = "steps"  # other groups include it; it has no lock
GROUPS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["dependency-groups"]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")


def pins(name: str) -> dict[str, str]:
    lines = (LOCKS / f"{name}.txt").read_text().splitlines()
    return dict(match.groups() for match in map(PIN.match, lines) if match)


def test_every_group_has_a_lock_and_every_lock_a_group():
    assert {file.stem for file in LOCKS.iterdir()} == set(GROUPS) - {INCLUDED}


@pytest.mark.parametrize("name", [name for name in GROUPS if name != INCLUDED])
def test_lock_pins_and_hashes_every_requirement_and_contains_no_index_url(name):
    required = [re.match(r"[\w.-]+", r)[0].lower() for r in GROUPS[name] if isinstance(r, str)]
    assert set(required) <= pins(name).keys()
    text = (LOCKS / f"{name}.txt").read_text()
    assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host|https?://", text)
    entries = [part for part in re.split(r"\n(?=\S)", text) if part and not part.startswith("#")]
    assert entries
    for entry in entries:
        assert PIN.match(entry), entry.splitlines()[0]
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


@pytest.mark.parametrize("larger", [name for name in GROUPS if name.endswith("-dev")])
def test_developer_locks_contain_the_product_locks(larger):
    """`scripts/environments.py` relies on this rule to use one environment for both groups."""
    assert pins(larger).items() >= pins(larger.removesuffix("-dev")).items()


def test_task_and_orchestrator_locks_do_not_share_their_frameworks():
    assert not [name for name in pins("task") if name.startswith("apache-airflow")]
    orchestrator = pins("orchestrator")
    assert "mlflow" not in orchestrator
    assert not [name for name in orchestrator if name.startswith("tensorflow")]
    assert "tensorflow" not in pins("task")  # The group uses tensorflow-cpu instead.


BINDING = re.compile(r"(?<!L)\bA?GPL|(?<!Lesser )General Public License", re.IGNORECASE)
FREE = re.compile(r"MIT|BSD|Apache|Artistic|Python Software|Mozilla|MPL|ISC|LGPL|Lesser")


def binding_licences(*folders: Path) -> list[str]:
    """Return the installed packages that are licensed under GPL or AGPL only."""
    binding = []
    for package in metadata.distributions(path=[str(folder) for folder in folders]):
        about = package.metadata
        classes = [c for c in about.get_all("Classifier") or [] if c.startswith("License ::")]
        short = str(about.get("License") or "").splitlines()[:1]
        words = " | ".join([str(about.get("License-Expression") or ""), *short, *classes])
        if BINDING.search(words) and not FREE.search(words):
            binding.append(f"{about['Name']}: {words.strip(' |')}")
    return binding


def test_no_installed_package_is_licensed_under_gpl_only():
    assert binding_licences(*CHECKOUT.glob(".venv/*/lib/python3.*/site-packages")) == []


@pytest.mark.cases
def test_package_licensed_under_gpl_only_is_reported(tmp_path, licence, binds):
    about = tmp_path / "x-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: x\nVersion: 1\n{licence}\n")
    assert bool(binding_licences(tmp_path)) is binds
