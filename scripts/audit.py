#!/usr/bin/env python3.11
"""Ask about known vulnerabilities of every locked package, and about licences. Standard library.

    python3.11 scripts/audit.py            # part of `make check`
    python3.11 scripts/audit.py --strict   # fails, too, where nobody could be asked

Exit code 1 where a package has a known vulnerability that `requirements/accepted.toml` does not
accept with a reason and an end, or a licence that would bind this project's users. On a machine
that reaches no vulnerability service (only an index, say) it says loudly that nothing was
audited, and does not fail; the service of the asking tool answers "nothing known" there too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
ACCEPTED = LOCKS / "accepted.toml"
PROBE = "installer.txt"  # one package: whether anybody answers is asked with little
_TOOL = ROOT / ".venv" / "audit" / "bin" / "pip-audit"
_PATIENCE = 900  # seconds for one lock
_NOT_LOCKS = ("task-overrides.txt",)
_BINDING = re.compile(r"(?<!L)\bA?GPL|(?<!Lesser )General Public License", re.IGNORECASE)
_FREE = re.compile(r"MIT|BSD|Apache|Artistic|Python Software|Mozilla|MPL|ISC|LGPL|Lesser")


@dataclass(frozen=True)
class Found:
    """A vulnerability that somebody knows."""

    package: str
    version: str
    id: str
    aliases: tuple[str, ...]
    fixed_in: tuple[str, ...]


@dataclass(frozen=True)
class StepOutput:
    """What the service said of one lock: what it knows, and how many packages it looked at."""

    found: tuple[Found, ...]
    looked_at: int
    unknown: tuple[str, ...]  # packages that it could not look at


Ask = Callable[[Path], StepOutput | None]  # None: nobody answered


def main(arguments: list[str] | None = None, ask: Ask | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--strict", action="store_true", help="fail where nobody could be asked")
    strict = parser.parse_args(arguments).strict
    accepted = read_accepted(ACCEPTED, datetime.now(UTC).date())
    bad = list(binding_licences())
    for line in bad:
        print(f"LICENCE  {line}")
    answers = audit(ask or with_pip_audit)
    if answers is None:
        print(
            "NOT AUDITED: no vulnerability service answers from here. Nothing is known about the "
            "locked packages, neither good nor bad: run `make audit` where one does.",
            file=sys.stderr,
        )
        return 1 if bad or strict else 0
    open_ones = [f for answer in answers.values() for f in answer.found if not accepts(accepted, f)]
    for each in sorted(set(open_ones), key=lambda f: (f.package, f.id)):
        fix = f"fixed in {', '.join(each.fixed_in)}" if each.fixed_in else "no fix yet"
        print(f"VULNERABLE  {each.package} {each.version}: {each.id} ({fix})")
    unknown = sorted({name for answer in answers.values() for name in answer.unknown})
    if unknown:
        print(f"NOT AUDITED: {', '.join(unknown)}", file=sys.stderr)
    looked_at = max(answer.looked_at for answer in answers.values())
    print(f"Audited {len(answers)} locks, the largest of {looked_at} packages.")
    return 1 if open_ones or bad or (strict and unknown) else 0


def audit(ask: Ask) -> dict[str, StepOutput] | None:
    """Return what is known, by lock; None where nobody answers."""
    probe = ask(LOCKS / PROBE)
    if probe is None or not probe.looked_at:
        return None
    answers = {PROBE: probe}
    for lock in sorted(LOCKS.glob("*.txt")):
        if lock.name in (PROBE, *_NOT_LOCKS):
            continue
        answer = ask(lock)
        if answer is None:
            return None
        answers[lock.name] = answer
    return answers


def with_pip_audit(lock: Path) -> StepOutput | None:
    """Ask by pip-audit; it exits with 1 both for a finding and for a service that is away."""
    words = [_TOOL, "-r", lock, "--disable-pip", "--require-hashes", "-f", "json"]
    try:
        answer = subprocess.run(  # noqa: S603 - fixed words
            [*words, "--progress-spinner", "off"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parsed(answer.stdout)


def parsed(output: str) -> StepOutput | None:
    """Return what pip-audit's JSON says; None where it is none."""
    try:
        packages = json.loads(output)["dependencies"]
        looked_at = [p for p in packages if "skip_reason" not in p]
        found = tuple(
            Found(p["name"], p["version"], v["id"], tuple(v["aliases"]), tuple(v["fix_versions"]))
            for p in looked_at
            for v in p["vulns"]
        )
        unknown = tuple(p["name"] for p in packages if "skip_reason" in p)
    except (ValueError, KeyError, TypeError):
        return None
    return StepOutput(found, len(looked_at), unknown)


def read_accepted(file: Path, today: date) -> Mapping[str, str]:
    """Return package by id, of the vulnerabilities that are accepted today.

    Raises:
        SystemExit: an entry without a package, a reason or an end.
    """
    accepted = {}
    for entry in tomllib.loads(file.read_text()).get("accepted", []):
        if not (entry.get("reason") and entry.get("package") and entry.get("until")):
            raise SystemExit(f"{file.name}: {entry.get('id')} needs package, reason and until")
        if entry["until"] >= today:
            accepted[entry["id"]] = entry["package"]
    return accepted


def accepts(accepted: Mapping[str, str], found: Found) -> bool:
    """Return whether a vulnerability is accepted, under any of its names."""
    return any(accepted.get(name) == found.package for name in (found.id, *found.aliases))


def binding_licences(folders: list[Path] | None = None) -> Iterator[str]:
    """Yield the installed packages that come under nothing but a GPL or an AGPL."""
    if folders is None:
        folders = sorted(ROOT.glob(".venv/*/lib/python3.*/site-packages"))
    seen = set()
    for package in metadata.distributions(path=[str(folder) for folder in folders]):
        about = package.metadata
        classes = [c for c in about.get_all("Classifier") or [] if c.startswith("License ::")]
        short = str(about.get("License") or "").splitlines()[:1]
        words = " | ".join([str(about.get("License-Expression") or ""), *short, *classes])
        name = str(about["Name"])
        if _BINDING.search(words) and not _FREE.search(words) and name not in seen:
            seen.add(name)
            yield f"{name}: {words.strip(' |')}"


if __name__ == "__main__":
    sys.exit(main())
