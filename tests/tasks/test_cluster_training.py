import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_processes import alive, wait_for
from pretrain_example import Prepared, prepare
from safetensors.numpy import load

from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger, State
from tasks.results import read_result
from tasks.steps.training_files import StoredRows

UPDATES = 40


def record(prepared: Prepared) -> dict[str, Any]:
    """Return the parts of a result that do not depend on rounding."""
    result = read_result(prepared.store(), prepared.spec.output)
    facts = {n: v for n, v in result.facts.items() if n != "weights_digest"}
    return {  # `released`, too, is a digest of the weights
        "releases": [release.model_dump(exclude={"released"}) for release in result.releases],
        "facts": facts,
        "spec": result.spec_hash,
        "points": sorted((m.name, m.label, m.step) for m in result.metrics),
        "public": sorted((m.name, m.step, m.value) for m in result.metrics if m.label == "public"),
    }


def workers(prepared: Prepared) -> list[int]:
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:  # the process has ended
            continue
        home = f"CONFIDE_HOME={prepared.deployment.home}".encode()
        if b"ray::HostProcess" in line and home in environ:
            processes.append(int(folder.name))
    return processes


@pytest.mark.slow
@pytest.mark.ray
def test_training_survives_killed_hosts_and_step_with_one_charge(untracked, tmp_path):
    prepared = prepare(untracked, UPDATES)
    home, kept = prepared.deployment.home, tmp_path / "kept"
    ledger = Ledger.open(prepared.deployment.ledger)
    # the release is reserved, and one update is done
    code, errors = prepared.run(time_box_minutes=1e-6)
    assert code == 75, errors
    (reserved,) = ledger.history("notes")
    shutil.copytree(home, kept)
    assert prepared.run()[0] == 0
    weights, alone, spent = prepared.weights(), record(prepared), ledger.remaining("notes")
    (settled,) = ledger.history("notes")
    # Restart from the same state, under the same seed, on two hosts; the step is killed.
    shutil.rmtree(home)
    shutil.copytree(kept, home)
    step = prepared.start(hosts=2, checkpoint_every=2)
    wait_for(lambda: any("0000000001." not in name for name in prepared.checkpoints()), 200)
    hosts = workers(prepared)
    step.kill()
    step.communicate()
    assert hosts
    wait_for(lambda: not any(map(alive, hosts)), 60)
    assert [(e.id, e.state) for e in ledger.history("notes")] == [(reserved.id, State.RESERVED)]
    # Restart again; a host is killed, and the step continues.
    step = prepared.start(hosts=2, checkpoint_every=2)
    victim = wait_for(lambda: workers(prepared), 200)[0]
    time.sleep(1)
    os.kill(victim, signal.SIGKILL)
    _, errors = step.communicate(timeout=300)
    assert step.returncode == 0, errors
    assert "training on 2 hosts" in errors
    assert [(e.id, e.state, e.event) for e in ledger.history("notes")] == [
        (settled.id, State.SETTLED, settled.event)
    ]
    assert ledger.remaining("notes") == spent
    assert record(prepared) == alone
    first, second = load(weights), load(prepared.weights())
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_allclose(second[name], values, atol=2e-3, err_msg=name)
    assert not [left for left in home.glob("work/*") if left.is_dir()]


def test_host_opens_only_rows_of_the_deployment_store(untracked, monkeypatch, tmp_path):
    spec = prepare(untracked).spec
    monkeypatch.setenv("CONFIDE_HOME", str(untracked.home))
    monkeypatch.setenv("CONFIDE_STORE", untracked.store)
    assert isinstance(StoredRows(spec.store_uri)(), TokenStore)
    with pytest.raises(BadInput):
        StoredRows((tmp_path / "elsewhere").as_uri())()
