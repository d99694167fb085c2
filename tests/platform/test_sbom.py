import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from child_processes import completed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docker" / "sbom.py"
DIGEST = "sha256:" + "ab" * 32
STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Description: a library
 Version: of no meaning here

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0
"""
LOCK = f"""numpy==1.26.4 \\
    --hash=sha256:{"1" * 64} \\
    --hash=sha256:{"2" * 64}
    # via x
Some_Thing[extra]==2.0 ; python_version < "4" \\
    --hash=sha256:{"3" * 64}
"""
# The requirements of CycloneDX 1.5's schema for the fields that the bills use.
HASH = re.compile(r"[a-f0-9]{64}")
TYPES = {"application", "library", "platform", "container", "operating-system"}
SERIAL = re.compile(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ALLOWED = {"type", "bom-ref", "name", "version", "purl", "hashes"}


def faults(bill: dict[str, Any]) -> list[str]:
    """Return the deviations of a bill from CycloneDX 1.5."""
    deviations = []
    top = {"bomFormat", "specVersion", "version", "serialNumber", "metadata", "components"}
    deviations += [f"unknown field {name}" for name in bill.keys() ^ top]
    head = (bill.get("bomFormat"), bill.get("specVersion"), bill.get("version"))
    if head != ("CycloneDX", "1.5", 1):
        deviations.append("another format")
    if not SERIAL.fullmatch(str(bill.get("serialNumber"))):
        deviations.append("no serial number")
    parts = [bill["metadata"]["component"], *bill["components"]]
    for part in parts:
        if part.get("type") not in TYPES or not part.get("name") or part.keys() - ALLOWED:
            deviations.append(f"no component: {part.get('name')}")
        for digest in part.get("hashes", []):
            if digest.keys() != {"alg", "content"} or not HASH.fullmatch(digest["content"]):
                deviations.append(f"no digest: {part['name']}")
    references = [part["bom-ref"] for part in parts]
    if len(set(references)) != len(references):
        deviations.append("a reference twice")
    return deviations


def run_script(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    status = folder / "status"
    status.write_text(STATUS)
    return completed(sys.executable, SCRIPT, "confide-task", "--dpkg", status, *words)


def test_bill_lists_debian_packages_and_the_base_image(tmp_path):
    answer = run_script(tmp_path, "--base", f"python:3.11-slim-bookworm@{DIGEST}")
    bill = json.loads(answer.stdout)
    assert faults(bill) == []
    assert [c["purl"] for c in bill["components"]] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64"
    ]
    properties = {p["name"]: p["value"] for p in bill["metadata"]["properties"]}
    assert properties["confide:base-digest"] == DIGEST


def test_bill_is_reproducible_and_marks_a_base_without_digest_as_unknown(tmp_path):
    first, again, other = (run_script(tmp_path, "--base", base).stdout for base in "aab")
    assert first == again != other
    assert "unknown: the build was told a tag only" in first


def test_every_pin_has_all_digests(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import sbom  # type: ignore[import-not-found]  # a script of docker/

    first, second = sbom.python(LOCK)
    assert (first["name"], first["version"]) == ("numpy", "1.26.4")
    assert [h["content"] for h in first["hashes"]] == ["1" * 64, "2" * 64]
    assert (second["name"], len(second["hashes"])) == ("some-thing", 1)
    for lock in ("task", "orchestrator", "mlflow", "storage-emulator"):
        text = (ROOT / "requirements" / f"{lock}.txt").read_text()
        parts = list(sbom.python(text))
        assert len(parts) == len(re.findall(r"^\S+==", text, re.M))
        assert sum(len(p["hashes"]) for p in parts) == text.count("--hash=sha256:")


def test_environment_that_differs_from_its_lock_gets_no_bill(tmp_path):
    lock = tmp_path / "lock.txt"
    lock.write_text(LOCK)
    answer = run_script(tmp_path, "--base", "a", "--lock", lock)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert "some-thing: locked 2.0, installed not" in answer.stderr


def test_format_check_detects_faults(tmp_path):
    bill = json.loads(run_script(tmp_path, "--base", "a").stdout)
    bill["components"] *= 2
    bill["components"][0]["hashes"] = [{"alg": "SHA-256", "content": "no"}]
    assert len(faults(bill)) >= 2
