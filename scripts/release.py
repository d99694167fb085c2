"""Build a release, and check it: sdist, wheel, and the bill of materials of its requirements.

    scripts/python3 scripts/release.py FOLDER
    scripts/python3 scripts/release.py install REQUIREMENT FOLDER   # a new environment

Standard library only; uv builds and resolves, and twine checks the metadata.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "docker"))

import environments
import sbom


def build(folder: Path) -> None:
    """Write sdist, wheel, locked requirements and bill of materials into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("confide-*"):
        file.unlink()
    environments.ensure("release")
    uv("build", "--quiet", "--python", sys.executable, "--out-dir", folder, environments.ROOT)
    wheel, sdist = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    twine = environments.VENVS / "release" / "bin" / "twine"
    if not environments.run(twine, "check", "--strict", wheel, sdist):
        sys.exit("confide: twine refuses the metadata (the reason is printed above).")
    name = sdist.name.removesuffix(".tar.gz")
    wanted, lock = folder / "wanted.in", folder / f"{name}-requirements.txt"
    wanted.write_text(f"confide[cpu] @ {wheel.as_uri()}\n")
    resolve = ("--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate")
    options = ("--no-emit-package", "confide", *environments.target())
    uv("pip", "compile", "--quiet", *resolve, *options, wanted, "-o", lock)
    wanted.unlink()
    components = list(sbom.python(lock.read_text()))
    bill = sbom.bill(name, "", components)
    bill["metadata"] = {"component": {"type": "library", "bom-ref": "wheel", "name": name}}
    (folder / f"{name}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.glob('confide-*')))}")


def install(requirement: str, folder: Path) -> None:
    """Install a requirement, such as a wheel with its extras, into a new environment."""
    environments.ensure("installer")
    if not environments.run(sys.executable, "-m", "venv", "--without-pip", folder):
        sys.exit("confide: no virtual environment: on Debian, apt install python3-venv.")
    uv("pip", "install", "--quiet", "--python", folder / "bin" / "python", requirement)


def uv(*words: object) -> None:
    """Run uv outside of the project's own settings, which are those of its locks."""
    environments.ensure("installer")
    if not environments.run(
        environments.INSTALLER / "uv", *words, "--no-config",
        environment=environments.uv_environment(),
    ):  # fmt: skip
        sys.exit("confide: uv failed (the reason is printed above).")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install", requirement, target]:
            install(requirement, Path(target).resolve())
        case [target]:
            build(Path(target).resolve())
        case _:
            sys.exit(__doc__)
