import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest
import yaml
from child_processes import program

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE)["services"]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
ONE_SHOT = {"prepare", "airflow-init", "mlflow-users"}
SECRET = re.compile(r"PASSWORD|SECRET|FERNET|SQL_ALCHEMY|_KEY\b|LEDGER|DATABASE|STORE_URI")


def environments() -> Iterator[tuple[str, str, str]]:
    for service, settings in SERVICES.items():
        for name, value in (settings.get("environment") or {}).items():
            yield service, name, str(value)


def test_ports_are_published_on_loopback_only():
    published = [port for settings in SERVICES.values() for port in settings.get("ports", [])]
    assert published, "nothing is published: nobody could look at it"
    assert [port for port in published if not str(port).startswith("127.0.0.1:")] == []


def test_every_secret_is_a_variable_without_a_default():
    held = [(s, n, v) for s, n, v in environments() if SECRET.search(n)]
    assert len(held) > 8
    for service, name, value in held:
        references = re.findall(r"\$\{([A-Z_]+)(:?[-?][^}]*)?\}", value)
        secret = [r for r in references if r[0].endswith(("PASSWORD", "_KEY", "_SECRET"))]
        assert secret or "@" not in value, f"{service}: {name} holds a literal password"
        assert all(r[1].startswith(":?") for r in secret), f"{service}: {name} has a default"


def test_settings_documented_in_operate_md_reach_a_service():
    text = (ROOT / "docs" / "operate.md").read_text()
    tables = re.findall(
        r"^### (?:Schedules|Settings in `\.env`)\n(.+?)(?=^### )", text, re.M | re.S
    )
    first_cells = re.findall(r"^\|([^|]+)\|", "\n".join(tables), re.M)
    named = set(re.findall(r"`([A-Z_]+)`", " ".join(first_cells)))
    assert len(named) > 12
    assert sorted(name for name in named if f"${{{name}:" not in COMPOSE) == []


def make_env(folder: Path) -> dict[str, str]:
    """Run make-env in an otherwise empty copy of the checkout; return the written variables."""
    (folder / "docker").mkdir(exist_ok=True)
    script = folder / "docker" / "make-env"
    script.write_text((ROOT / "docker" / "make-env").read_text())
    subprocess.run(["sh", str(script)], check=True)
    lines = (folder / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def test_make_env_writes_every_required_variable_and_draws_secrets_for_the_owner_only(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = make_env(tmp_path / "a"), make_env(tmp_path / "b")
    required = set(re.findall(r"\$\{([A-Z_]+):\?", COMPOSE))
    assert required
    assert required <= first.keys()
    assert (tmp_path / "a" / ".env").stat().st_mode & 0o777 == 0o600
    secrets = [n for n in first if n.endswith(("PASSWORD", "_KEY", "_SECRET"))]
    assert len(secrets) == 12
    for name in secrets:
        assert len(first[name]) >= 44
        assert first[name] != second[name]
    assert len({first[name] for name in secrets}) == len(secrets)


def test_make_env_keeps_existing_values(tmp_path):
    first = make_env(tmp_path)
    text = (tmp_path / ".env").read_text().replace("MLFLOW_PORT=5000", "MLFLOW_PORT=5555")
    (tmp_path / ".env").write_text(text)
    assert make_env(tmp_path) == {**first, "MLFLOW_PORT": "5555"}


@pytest.mark.parametrize("service", sorted(SERVICES.keys() - ONE_SHOT))
def test_long_running_services_have_health_checks_and_restart(service):
    assert SERVICES[service]["healthcheck"]["test"][0] == "CMD"
    assert SERVICES[service]["restart"] == "unless-stopped"


@pytest.mark.parametrize("service", SERVICES)
def test_services_have_no_capabilities_no_new_privileges_and_no_root(service):
    assert SERVICES[service]["cap_drop"] == ["ALL"]
    assert SERVICES[service]["security_opt"] == ["no-new-privileges:true"]
    assert not SERVICES[service].get("privileged")
    build = SERVICES[service].get("build")
    shares = [s for s in SERVICES.values() if s["image"] == SERVICES[service]["image"]]
    if build is None and not any("build" in s for s in shares):
        assert SERVICES[service]["user"] not in ("root", "0", 0)
        return
    file = (build or next(s["build"] for s in shares if "build" in s))["dockerfile"]
    (user,) = re.findall(r"^USER (\S+)$", (ROOT / file).read_text(), re.M)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that Kubernetes can check it"


def test_only_the_scheduler_mounts_the_docker_socket_and_the_steps_network_is_internal():
    assert yaml.safe_load(COMPOSE)["networks"]["steps"]["internal"] is True
    holders = [n for n, s in SERVICES.items() if "docker.sock" in str(s.get("volumes"))]
    assert holders == ["scheduler"]


def test_only_mlflow_services_know_the_admin_password():
    """Steps, and the services that start them or send for them, log as an ordinary user."""
    holders = {s for s, _, value in environments() if "${MLFLOW_PASSWORD:" in value}
    assert holders == {"mlflow", "mlflow-users"}
    users = {s: v for s, n, v in environments() if n == "MLFLOW_TRACKING_USERNAME"}
    assert users == {
        "mlflow-users": "confide",
        "prepare": "steps",
        "courier": "steps",
        "scheduler": "steps",
    }


def test_only_services_that_run_steps_know_the_ledger_and_readers_are_a_separate_user():
    values = {(s, n): v for s, n, v in environments()}
    assert {s for s, n in values if n == "CONFIDE_LEDGER"} == {"prepare", "scheduler"}
    reader = values["scheduler", "CONFIDE_LEDGER_READER"]
    assert "//ledger_reader:${LEDGER_READER_DATABASE_PASSWORD:" in reader
    assert "//ledger:" in values["scheduler", "CONFIDE_LEDGER"]
    assert "CONFIDE_LEDGER_READER" not in SERVICES["prepare"]["environment"]


def test_seeds_and_sources_are_not_mounted_for_every_step():
    environment = SERVICES["scheduler"]["environment"]
    every = environment["CONFIDE_DOCKER_MOUNTS"].split()
    targets = [word.partition(":")[2] for word in every]
    assert targets == ["/var/lib/confide", "/var/lib/confide/keys:ro"]
    assert environment["CONFIDE_DOCKER_SEEDS"].endswith("_seeds:/var/lib/confide-seeds")
    assert environment["CONFIDE_DOCKER_SOURCES"] == "${CONFIDE_DATA_MOUNT:-}"
    holders = {n for n, s in SERVICES.items() if "seeds:" in str(s.get("volumes"))}
    assert holders == {"prepare"}


def test_every_base_image_can_be_pinned_by_digest():
    built = [s["build"] for s in SERVICES.values() if "build" in s]
    assert {build["dockerfile"] for build in built} == {f"docker/{f.name}" for f in DOCKERFILES}
    for build in built:
        base = {"BASE": "${CONFIDE_PYTHON_IMAGE:-python:3.11-slim-bookworm}"}
        of_task = {"LOCK": "${CONFIDE_TASK_LOCK:-task}"} if "task." in build["dockerfile"] else {}
        assert build["args"] == base | of_task
    assert SERVICES["postgres"]["image"] == "${CONFIDE_POSTGRES_IMAGE:-postgres:15-bookworm}"


def test_ray_nodes_hold_only_the_secrets_of_the_cluster():
    cluster = {n: s for n, s in SERVICES.items() if n.startswith("ray-")}
    assert len(cluster) == 2
    for service in cluster.values():
        assert service["profiles"] == ["ray"]
        assert service["networks"] == ["steps"]
        assert service["image"] == SERVICES["prepare"]["image"]
        assert not service.get("ports")
        assert service["volumes"] == ["cluster:/var/lib/confide-cluster:ro"]
        assert not re.search("LEDGER|PASSWORD|SEED", " ".join(service["environment"]))
    assert [n for n, s in SERVICES.items() if "profiles" in s and n not in cluster] == []
    holders = {n for n, s in SERVICES.items() if "cluster:" in str(s.get("volumes"))}
    assert holders == {*cluster, "prepare"}


DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize("known", [True, False])
def test_make_env_pins_base_images_with_known_digests(tmp_path, monkeypatch, known):
    says = f"echo docker.io/library/python@{DIGEST}" if known else "echo; exit 0"
    program(tmp_path / "bin" / "docker", says)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    names = ("CONFIDE_PYTHON_IMAGE", "CONFIDE_POSTGRES_IMAGE")
    written = make_env(tmp_path)
    assert [name in written for name in names] == [known, known]
    if known:
        assert written["CONFIDE_PYTHON_IMAGE"] == f"python:3.11-slim-bookworm@{DIGEST}"
        assert written["CONFIDE_POSTGRES_IMAGE"] == f"postgres:15-bookworm@{DIGEST}"


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.name)
def test_images_use_a_pinned_lock_and_a_public_base(file):
    text = file.read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.M))
    froms = set(re.findall(r"^FROM (\S+)", text, re.M))
    assert froms - stages == {"${BASE}"}
    assert re.findall(r"^ARG BASE=(.*)$", text, re.M) == ["python:3.11-slim-bookworm"]
    written = text.replace(
        "${LOCK}.txt ", "task.txt requirements/task-gpu.txt requirements/task-tpu.txt "
    )
    locks = set(re.findall(r"requirements/([\w.-]+\.txt)", written)) - {"installer.txt"}
    assert locks
    for lock in locks:
        pinned = (ROOT / "requirements" / lock).read_text()
        packages = re.findall(r"^[a-z0-9][^\s#]*==\S+ \\$", pinned, re.M)
        assert packages
        assert len(packages) == len(re.findall(r"^\S+.*==", pinned, re.M))
        assert "--hash=sha256:" in pinned


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.name)
def test_dependencies_are_copied_before_code(file):
    text = file.read_text()
    code = [m.start() for m in re.finditer(r"^COPY (?:dp_core|tasks|dags|docker)\S* ", text, re.M)]
    code_after_lock = [i for i in code if "install-lock" not in text[i:].partition("\n")[0]]
    assert code_after_lock
    assert all(text.rindex("COPY --from=environment") < start for start in code_after_lock)


@pytest.mark.cases
def test_image_contains_every_imported_module(image, entries):
    text = (ROOT / "docker" / f"{image}.Dockerfile").read_text()
    sources = " ".join(re.findall(r"^COPY (?!--)(.+) \S+$", text, re.M)).split()
    copied = [path for path in sources if re.match("dags|tasks|dp_core", path)]
    graph = grimp.build_graph("dags", "tasks", "dp_core")
    modules = {m for m in graph.modules if m.startswith(tuple(entries))}
    modules |= set().union(*(graph.find_upstream_modules(m) for m in modules))
    parents = {m.rpartition(".")[0] for m in modules} - {""}
    held = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in copied]
    whole = tuple(f"{h}." for h, path in zip(held, copied, strict=True) if (ROOT / path).is_dir())
    missing = {m for m in modules | parents if m not in held and not m.startswith(whole)}
    assert missing == set()
    assert not [path for path in copied if not (ROOT / path).exists()]


def test_dockerignore_is_a_list_of_permitted_files():
    text = (ROOT / ".dockerignore").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    for line in lines[1:]:
        assert line.startswith(("!", "**/")), f"{line}: what is not named stays out anyway"
    assert not any(".env" in line or ".git" in line for line in lines if line.startswith("!"))
