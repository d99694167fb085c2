"""Writes the software bill of materials of an image during its build: CycloneDX 1.5, as JSON.

    sbom.py NAME --lock LOCK… --base IMAGE >sbom.cdx.json    (in an image's own build)
    sbom.py NAME --base IMAGE --dpkg STATUS >sbom.cdx.json   (of an image that others built)

It lists every package of the hash-pinned lock with the digests that pip accepts for it, every
Debian package, Python, and the base image with its digest if the build knows one. The build fails
here if the environment differs from its lock. The same image gives the same bytes, without times
and random numbers. The script needs only the standard library and no network.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG = Path("/var/lib/dpkg/status")
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==(\S+)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_SAME = uuid.UUID("5b0a2a3e-6f43-4a39-9d3c-0f8f2a5d2b11")  # the namespace of the serial numbers

Component = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--base", required=True, help="the image's base, NAME or NAME@sha256:…")
    parser.add_argument(
        "--lock",
        type=Path,
        action="append",
        default=[],
        help="hash-pinned requirements of its environment; several make one environment together",
    )
    parser.add_argument("--dpkg", type=Path, default=DPKG, help="dpkg's status file")
    asked = parser.parse_args(arguments)
    components = list(debian(asked.dpkg.read_text(encoding="utf-8")))
    if asked.lock:
        locked = [one for lock in asked.lock for one in python(lock.read_text(encoding="utf-8"))]
        if wrong := differences(locked, dict(installed())):
            print("\n".join(f"sbom: {line}" for line in wrong), file=sys.stderr)
            return 1
        components += [*locked, interpreter()]
    json.dump(bill(asked.name, asked.base, components), sys.stdout, indent=1)
    return 0


def bill(name: str, base: str, components: list[Component]) -> dict[str, Any]:
    """Return the bill of materials of an image."""
    base_name, _, digest = base.partition("@")
    known = (
        {"name": "confide:base-image", "value": base_name},
        {
            "name": "confide:base-digest",
            "value": digest or "unknown: the build was told a tag only",
        },
    )
    body = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "bom-ref": "image", "name": name},
            "properties": list(known),
        },
        "components": components,
    }
    told = json.dumps(body, sort_keys=True)
    return {**body, "serialNumber": f"urn:uuid:{uuid.uuid5(_SAME, told)}"}


def library(name: str, version: str, purl: str) -> Component:
    """Return a package as a component; `purl` is its package URL."""
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def python(lock: str) -> Iterator[Component]:
    """Yield the packages that a lock names, with the digests of the files that it accepts."""
    pins = list(_PIN.finditer(lock))
    for pin, following in zip(pins, [*pins[1:], None], strict=True):
        name, version = normal(pin[1]), pin[2]
        entry = lock[pin.end() : following.start() if following else len(lock)]
        hashes = [{"alg": "SHA-256", "content": one} for one in _HASH.findall(entry)]
        purl = f"pkg:pypi/{quote(name)}@{quote(version)}"
        yield {**library(name, version, purl), "hashes": hashes}


def debian(status: str) -> Iterator[Component]:
    """Yield the installed packages that dpkg's status file names."""
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status") != "install ok installed":
            continue
        name, version, kind = fields["Package"], fields["Version"], fields["Architecture"]
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={kind}"
        yield library(name, version, purl)


def interpreter() -> Component:
    """Return the image's Python, which runs this script."""
    version = platform.python_version()
    purl = f"pkg:generic/python@{version}"
    return {"type": "platform", "bom-ref": purl, "name": "python", "version": version, "purl": purl}


def installed() -> Iterator[tuple[str, str]]:
    """Yield name and version of each package in this Python's environment."""
    for package in metadata.distributions():
        yield normal(package.metadata["Name"]), package.version


def differences(locked: list[Component], present: dict[str, str]) -> list[str]:
    """Return a line for each package whose version differs between environment and lock."""
    wanted = {package["name"]: package["version"] for package in locked}
    return [
        f"{name}: locked {wanted.get(name, 'not at all')}, installed {present.get(name, 'not')}"
        for name in sorted(wanted.keys() | present.keys())
        if wanted.get(name) != present.get(name)
    ]


def normal(name: str) -> str:
    """Return the normalized name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
