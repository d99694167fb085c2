"""The manifest of a Ray cluster on Kubernetes as text: secrets, probes, devices.

Its fields were compared with KubeRay's published schema; no Kubernetes cluster has run it.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dp_core.cluster.node import AUTHORITY, TOKEN, make_secrets, member_environment

ROOT = Path(__file__).parents[2]
CLUSTER = yaml.safe_load((ROOT / "docker" / "raycluster.yaml").read_text())
GROUPS = {"head": CLUSTER["spec"]["headGroupSpec"]} | {
    group["groupName"]: group for group in CLUSTER["spec"]["workerGroupSpecs"]
}


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = GROUPS[name]["template"]["spec"]
    return spec


def test_groups_are_a_head_and_workers_for_every_device():
    assert (CLUSTER["apiVersion"], CLUSTER["kind"]) == ("ray.io/v1", "RayCluster")
    assert list(GROUPS) == ["head", "cpu", "gpu", "tpu"]
    assert GROUPS["head"]["rayStartParams"]["num-cpus"] == "0"
    assert GROUPS["tpu"]["numOfHosts"] == 1
    for name, resource in (("gpu", "nvidia.com/gpu"), ("tpu", "google.com/tpu")):
        (container,) = pod(name)["containers"]
        assert int(container["resources"]["limits"][resource]) >= 1
    locked = (ROOT / "requirements" / "task.txt").read_text()
    assert f"\nray=={CLUSTER['spec']['rayVersion']} " in locked


@pytest.mark.parametrize("name", GROUPS)
def test_every_member_uses_the_variables_of_token_and_tls(name, tmp_path):
    make_secrets(tmp_path)
    expected = member_environment(tmp_path, tmp_path, "10.0.0.1")
    (container,) = pod(name)["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables.items() >= {"RAY_AUTH_MODE": "token", "RAY_USE_TLS": "1"}.items()
    assert variables.items() >= {"RAY_USAGE_STATS_ENABLED": "0"}.items()
    for variable, file in expected.items():
        assert Path(variables[variable]).name == Path(file).name
    (certificate,) = pod(name)["initContainers"]
    folder, secrets, *addresses = certificate["args"]
    assert variables["RAY_TLS_SERVER_KEY"].startswith(f"{folder}/")
    assert variables["RAY_AUTH_TOKEN_PATH"] == f"{secrets}/{TOKEN}"
    assert variables["RAY_TLS_CA_CERT"] == f"{secrets}/{AUTHORITY}"
    assert addresses == ["$(POD_IP)", "confide-head-svc.confide.svc.cluster.local"]


@pytest.mark.parametrize("name", GROUPS)
def test_members_have_no_seed_no_ledger_and_no_root_rights(name):
    assert not re.search("seed|ledger|mlflow|tracking|keys", str(pod(name)), re.I)
    assert pod(name)["securityContext"]["runAsNonRoot"] is True
    for container in (*pod(name)["containers"], *pod(name)["initContainers"]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert "exec" in pod(name)["containers"][0]["readinessProbe"]
