"""Execute the notebooks of docs/ for `make docs`, and write them with their outputs.

    .venv/docs/bin/python scripts/notebooks.py build/notebooks

A notebook runs in an empty folder, in the environment of the steps (.venv/task), where the product
runs. That environment has no Jupyter: the kernel is found at the end of its path, in this one.
"""

import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 1800  # seconds of a cell, on a machine that also runs other tests
KERNEL = "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"


def install_kernel(folder: Path) -> None:
    """Write the specification of the kernel `confide`, and name its folder to Jupyter."""
    site = sysconfig.get_path("purelib")
    program = f"import sys; sys.path.append({site!r}); {KERNEL}"
    python = str(ROOT / ".venv" / "task" / "bin" / "python")
    kernel = folder / "kernels" / "confide" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    words = [python, "-c", program, "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": words, "display_name": "Confide", "language": "python"}))
    os.environ["JUPYTER_PATH"] = str(folder)


def execute(notebook: Path, target: Path) -> None:
    """Execute a notebook, whose first failing cell ends the program, and write it with outputs."""
    began, content = time.monotonic(), nbformat.read(notebook, as_version=4)
    with TemporaryDirectory() as folder:
        os.environ["CONFIDE_HOME"] = f"{folder}/home"
        options = {"timeout": LONGEST, "kernel_name": "confide"}
        place = {"metadata": {"path": folder}}
        NotebookClient(content, resources=place, **options).execute()
    target.mkdir(parents=True, exist_ok=True)
    nbformat.write(content, target / notebook.name)
    print(f"{notebook.name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)
    with TemporaryDirectory() as jupyter:
        install_kernel(Path(jupyter))
        for each in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
            execute(each, Path(sys.argv[1]))
