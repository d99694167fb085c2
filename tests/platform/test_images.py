"""The built images: their user, their contents, and the contents that they must not have.

The tests need a Docker engine and the images (`docker compose build`); a skipped test states the
reason.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from child_processes import completed, wait_for
from test_sbom import faults

ROOT = Path(__file__).parents[2]
TAG = os.environ.get("CONFIDE_TAG") or "local"
NAMES = ("airflow", "task", "mlflow", "storage-emulator")
# Patterns that are searched for in all files of an image except package files.
SCAN = r"""
import os, re, sys
secret = re.compile(
    rb"-----BEGIN (RSA |EC |OPENSSH )?PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b"
    rb"|\bgh[pousr]_[A-Za-z0-9]{36}\b|\bxox[baprs]-[0-9A-Za-z-]{10,}"
    rb"|://[^/\s:@'\"{}<>$]+:[^/\s:@'\"{}<>$]+@"
)
found = []
for top in ("/opt/confide", "/root", "/home", "/tmp", "/var/lib", "/usr/local/bin", "/srv"):
    for folder, folders, files in os.walk(top):
        folders[:] = [f for f in folders if f not in ("environment", "dpkg", "apt")]
        for name in files:
            path = os.path.join(folder, name)
            if name.startswith(".env") or name in (".netrc", ".git-credentials", "id_rsa"):
                found.append(path)
            try:
                content = open(path, "rb").read()
            except OSError:
                continue
            if secret.search(content):
                found.append(path)
print("\n".join(found))
"""
WRITABLE = r"""
import os
found = []
for folder, folders, files in os.walk("/"):
    folders[:] = [f for f in folders if os.path.join(folder, f) not in ("/proc", "/sys", "/dev")
                  and not os.path.islink(os.path.join(folder, f))]
    if os.access(folder, os.W_OK):
        found.append(folder)
        folders[:] = []
print("\n".join(found))
"""


def docker(*words: str) -> str:
    answer = completed("docker", *words)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def available() -> str:
    if shutil.which("docker") is None:
        return "there is no docker command"
    if completed("docker", "info").returncode:
        return "no Docker engine answers"
    if completed("docker", "buildx", "version").returncode:
        return "docker has no buildx, with which the images are built"
    for name in NAMES:
        if completed("docker", "image", "inspect", f"confide-{name}:{TAG}").returncode:
            return f"the image confide-{name}:{TAG} is not built (docker compose build)"
    return ""


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    if reason := available():
        pytest.skip(f"SKIPPED, the images are NOT looked at: {reason}")


@pytest.fixture(params=NAMES)
def image(request: pytest.FixtureRequest) -> str:
    return f"confide-{request.param}:{TAG}"


def python(image: str, program: str, *options: str) -> str:
    return docker(
        "run", "--rm", "--network=none", *options, "--entrypoint=python", image, "-c", program
    )


def test_image_runs_as_an_unprivileged_user(image):
    user = docker("image", "inspect", "-f", "{{.Config.User}}", image).strip()
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert python(image, "import os; print(os.getuid())").strip() == user.partition(":")[0]


def test_only_data_folders_are_writable(image):
    writable = set(python(image, WRITABLE).split())
    data = {"/var/lib/airflow", "/var/lib/confide", "/var/lib/confide-seeds"}
    data |= {"/var/lib/confide-cluster"}  # the mount of the Ray cluster's secrets, for a volume
    data |= {"/var/lib/mlflow", "/var/lib/storage"}
    assert writable <= data | {"/tmp", "/var/tmp", "/run/lock", "/var/lock"}  # noqa: S108


SBOM = "/usr/share/confide/sbom.cdx.json"


def bill_of(image: str) -> dict[str, Any]:
    bill: dict[str, Any] = json.loads(docker("run", "--rm", "--entrypoint=cat", image, SBOM))
    return bill


def test_bill_of_materials_lists_every_package(image):
    """The bill lists exactly the locked packages with their digests and the Debian packages."""
    name = image.partition(":")[0].removeprefix("confide-")
    lock = {"airflow": "orchestrator"}.get(name, name)
    bill = bill_of(image)
    assert faults(bill) == []
    listed = {c["purl"]: c for c in bill["components"]}
    pinned = (ROOT / "requirements" / f"{lock}.txt").read_text()
    locked = set(re.findall(r"^([a-z0-9][\w.-]*)(?:\[.*\])?==(\S+)", pinned, re.M))
    python_packages = {c["name"]: c for p, c in listed.items() if p.startswith("pkg:pypi/")}
    assert {(n, c["version"]) for n, c in python_packages.items()} == locked
    digests = {h["content"] for c in python_packages.values() for h in c["hashes"]}
    assert digests == set(re.findall(r"sha256:([0-9a-f]{64})", pinned))
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n"]
    lines = docker("run", "--rm", f"--entrypoint={query[0]}", image, *query[1:]).splitlines()
    debian = {tuple(line.split()[1:]) for line in lines if line.startswith("installed ")}
    assert len(debian) > 50
    packages = [c for p, c in listed.items() if p.startswith("pkg:deb/")]
    assert {(c["name"], c["version"]) for c in packages} == debian


def test_bill_of_materials_states_the_base_image(image):
    label = '{{index .Config.Labels "org.opencontainers.image.base.name"}}'
    base = docker("image", "inspect", "-f", label, image).strip()
    properties = {p["name"]: p["value"] for p in bill_of(image)["metadata"]["properties"]}
    name, _, digest = base.partition("@")
    assert name == properties["confide:base-image"] == "python:3.11-slim-bookworm"
    assert properties["confide:base-digest"] == (digest or "unknown: the build was told a tag only")


def test_image_contains_no_secret(image):
    assert python(image, SCAN, "--user=0").strip() == ""
    settings = json.loads(docker("image", "inspect", image))[0]["Config"]
    names = [variable.partition("=")[0] for variable in settings["Env"]]
    assert not [n for n in names if re.search("PASSWORD|SECRET|TOKEN|KEY", n)]
    history = docker("history", "--no-trunc", "--format={{.CreatedBy}}", image)
    assert not re.search(r"PASSWORD=|SECRET=|TOKEN=", history)


def test_image_contains_no_secret_of_this_deployment(image):
    env = ROOT / ".env"
    if not env.exists():
        pytest.skip("SKIPPED: no .env here to look for")
    held = dict(line.split("=", 1) for line in env.read_text().splitlines() if "=" in line)
    secrets = [v for n, v in held.items() if n.endswith(("PASSWORD", "_KEY", "_SECRET"))]
    assert secrets
    text = docker("image", "inspect", image) + docker("history", "--no-trunc", image)
    assert not [value for value in secrets if value in text]


def test_scan_finds_a_planted_secret(tmp_path):
    planted = tmp_path / "settings.py"
    planted.write_text("URL = 'postgresql://somebody:hunter22@db/x'\n")
    tmp_path.chmod(0o755)
    planted.chmod(0o644)  # the scan runs as another user
    output = python(f"confide-task:{TAG}", SCAN, f"-v{tmp_path}:/srv/planted:ro")
    assert output.split() == ["/srv/planted/settings.py"]


@pytest.mark.cases
def test_image_contains_no_package_of_other_environments(name, without):
    program = f"""
from importlib.util import find_spec
def there(name):
    parent = name.rpartition(".")[0]
    return (not parent or find_spec(parent)) and find_spec(name)
print([name for name in {without} if there(name)])
"""
    assert python(f"confide-{name}:{TAG}", program).strip() == "[]"


@pytest.mark.cases
def test_bytecode_is_compiled(name, module):
    program = f"import importlib.util as u; print(u.find_spec({module!r}).cached)"
    cached = python(f"confide-{name}:{TAG}", program).strip()
    exists = f"import os; print(os.path.exists({cached!r}))"
    assert python(f"confide-{name}:{TAG}", exists) == "True\n"


@pytest.mark.parametrize("name", ["task", "airflow"])
def test_change_of_code_reuses_the_environment_layer(name, tmp_path):
    for place in ("dags", "dp_core", "tasks", "docker", "requirements"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / place, tmp_path / place, ignore=ignored)
    for file in (".dockerignore", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    mark = f"# {uuid.uuid4()}\n"
    (tmp_path / "tasks" / "__init__.py").write_text(mark)
    tag = f"confide-test-{name}:{uuid.uuid4().hex[:12]}"
    words = ["docker", "build", "--progress=plain", f"--tag={tag}", "."]
    words += [f"--file=docker/{name}.Dockerfile"]
    answer = completed(*words, cwd=tmp_path)
    log = answer.stdout + answer.stderr
    try:
        assert answer.returncode == 0, log
        read = "print(open('/opt/confide/tasks/__init__.py').read())"
        assert python(tag, read).strip() == mark.strip(), "the image holds the change"
        # The layer of the environment, of one or two gigabytes, is reused.
        assert re.search(r"install-lock [\s\S]*?\n#\d+ CACHED", log), log
        sizes = re.findall(r"transferring context: ([\d.]+)(k?B|MB)", log)
        assert sizes
        assert all(unit != "MB" or float(size) < 5 for size, unit in sizes), sizes
    finally:
        completed("docker", "rmi", "-f", tag)


@pytest.mark.parametrize("name", ["task", "airflow"])
def test_code_is_in_small_separate_layers(name):
    words = ["history", "--human=false", "--format={{.Size}} {{.CreatedBy}}"]
    layers = docker(*words, f"confide-{name}:{TAG}").splitlines()  # newest first
    part = "/opt/confide/environment /"
    environment = min(i for i, line in enumerate(layers) if part in line)
    assert environment > 3
    assert sum(int(line.split()[0]) for line in layers[:environment]) < 10_000_000


@pytest.fixture
def container() -> Iterator[str]:
    name = f"confide-test-{uuid.uuid4().hex[:12]}"
    yield name
    completed("docker", "rm", "-f", name)


def test_first_process_forwards_sigterm(container):
    program = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143));"
        " print('ready', flush=True); time.sleep(60)"
    )
    docker("run", "-d", "--network=none", "--name", container, f"confide-task:{TAG}", "-c", program)
    wait_for(lambda: "ready" in docker("logs", container), 60, what="the signal's handler")
    docker("stop", "-t", "20", container)
    assert docker("inspect", "-f", "{{.State.ExitCode}}", container).strip() == "143"
