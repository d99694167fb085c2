"""Several hosts of one training as real processes: killed, gone on with, and what is charged."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from child_processes import alive, free_port
from pretrain_example import Prepared, prepare
from safetensors.numpy import load

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger, State
from tasks.protocol.least_privilege import (
    HOSTS,
    HOSTS_AT,
    HOSTS_SECRET,
    WITHHELD,
    for_helpers,
)
from tasks.runtime.context import read_result
from tasks.runtime.deployment import Deployment
from tasks.steps import training_hosts

UPDATES = 40
SOON = 30.0  # seconds until all have noticed and ended, on a machine with much else to do


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, in order."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def told(prepared: Prepared) -> dict[str, object]:
    """Return what a run leaves for others, but for numbers that may round otherwise."""
    result = read_result(prepared.store(), prepared.spec.output)
    assert result is not None
    facts = {n: v for n, v in result.facts.items() if n != "weights_digest"}
    return {
        "releases": [record.model_dump() for record in result.releases],
        "facts": facts,
        "spec": result.spec_hash,
        "points": sorted((m.name, m.label, m.step) for m in result.metrics),
        "public": sorted((m.name, m.step, m.value) for m in result.metrics if m.label == "public"),
    }


@pytest.mark.slow
def test_a_host_killed_ends_all_and_the_training_goes_on_with_nothing_charged(
    untracked: Deployment, tmp_path: Path
) -> None:
    prepared = prepare(untracked, UPDATES)
    home, kept = prepared.deployment.home, tmp_path / "kept"
    ledger = Ledger.open(prepared.deployment.ledger)
    code, said = prepared.run(time_box_minutes=1e-6)  # reserved, and one update done
    assert code == 75, said
    (reserved,) = ledger.history("notes")
    shutil.copytree(home, kept)
    assert prepared.run()[0] == 0
    one, one_told, spent = prepared.weights(), told(prepared), ledger.remaining("notes")
    (settled,) = ledger.history("notes")
    # Once more from the same point, under the same seed: on three hosts.
    shutil.rmtree(home)
    shutil.copytree(kept, home)
    process = prepared.start(hosts=3, checkpoint_every=4)
    while not any("0000000001." not in name for name in prepared.checkpoints()):
        assert process.poll() is None
        time.sleep(0.05)
    helpers = children(process.pid)
    assert len(helpers) == 2
    os.kill(helpers[1], signal.SIGKILL)  # the last: the one in the middle has to pass it on
    killed = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - killed < SOON
    assert process.returncode == 1, said  # a fault: tried again
    assert "a host of the training is gone" in said.splitlines()[-1]
    assert not any(map(alive, helpers))
    assert [(e.id, e.state) for e in ledger.history("notes")] == [(reserved.id, State.RESERVED)]
    # And to its end, on two.
    code, said = prepared.run(hosts=2)
    assert code == 0, said
    assert "training on 2 hosts" in said
    assert [(e.id, e.state, e.event) for e in ledger.history("notes")] == [
        (settled.id, State.SETTLED, settled.event)
    ]
    assert ledger.remaining("notes") == spent
    assert told(prepared) == one_told
    first, second = load(one), load(prepared.weights())
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_allclose(second[name], values, atol=2e-3, err_msg=name)
    assert not [left for left in home.glob("work/*") if left.is_dir()]


def test_helpers_are_given_the_store_and_nothing_else() -> None:
    told = for_helpers(
        {
            "CONFIDE_STORE": "gs://bucket/store",
            "CONFIDE_HOME": "/home",
            "CONFIDE_LEDGER": "postgresql://ledger:hunter2@db/ledger",
            "CONFIDE_LEDGER_READER": "postgresql://reader:hunter2@db/ledger",
            "CONFIDE_SEEDS": "/seeds",
            "CONFIDE_KEYS": "/keys",
            "CONFIDE_TRACKING": "https://user:hunter2@mlflow",
            "MLFLOW_TRACKING_PASSWORD": "hunter2",
            "CONFIDE_MESSAGES": "/messages",
            "CONFIDE_RUN_CONTEXT": "{}",
            HOSTS_SECRET: "hunter2",
        }
    )
    assert told == {
        "CONFIDE_STORE": "gs://bucket/store",
        "CONFIDE_HOME": "/home",
        "CONFIDE_LEDGER": f"sqlite:///{WITHHELD}",
        "CONFIDE_SEEDS": WITHHELD,
        "CONFIDE_KEYS": WITHHELD,
    }


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (HOSTS, "0"),
        (HOSTS, "two"),
        (HOSTS, "99999"),
        (HOSTS_AT, "host-{}:1"),
        (HOSTS_AT, "a:1 h-{}"),
    ],
)
def test_settings_that_cannot_be_meant_are_one_line(variable: str, value: str) -> None:
    with pytest.raises(BadInput, match=variable):
        Deployment.from_environment({variable: value})


def test_the_hosts_of_a_deployment_are_in_no_spec(
    untracked: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = prepare(untracked).spec
    before = spec.digest()
    monkeypatch.setenv(HOSTS, "4")
    again = type(spec).model_validate_json(spec.model_dump_json())
    assert again.digest() == before
    assert Deployment.from_environment().hosts == 4
    assert not re.findall(r'"[a-z_]*hosts?"', spec.model_dump_json())


def test_hosts_of_several_machines_find_each_other_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TCP: a stranger and one with another secret are not answered, the helper is."""
    port = free_port()
    at = f"step:{port} helper-{{}}:7"
    deployment = Deployment.from_environment({HOSTS: "3", HOSTS_AT: at})
    addresses = [training_hosts._address(deployment, number) for number in range(3)]
    assert addresses == [("step", port), ("helper-0", 7), ("helper-1", 7)]
    monkeypatch.setenv(HOSTS_SECRET, secrets.token_hex(32))
    monkeypatch.setattr(training_hosts, "_AGAIN", 0.05)
    monkeypatch.setattr(training_hosts, "_ANSWERING", 2.0)
    monkeypatch.setattr(training_hosts, "_address", lambda deployment, number: ("127.0.0.1", port))
    with ThreadPoolExecutor(1) as threads, training_hosts._listening(deployment, 0) as door:
        waiting = threads.submit(training_hosts._answered, door, deployment, 0)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            with pytest.raises(training_hosts.LinkBroken):
                training_hosts._link(
                    socket.create_connection(("127.0.0.1", port)),
                    b"x" * 32, deployment, 1, called=False, patience=5.0,
                )  # fmt: skip
        ours = training_hosts._call(deployment, 1)
        theirs = waiting.result(10)
    ours.send(7, b"hello")
    assert theirs.receive() == (7, b"hello")
    for link in (ours, theirs):
        link.close()


def test_several_machines_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS_SECRET, "short")
    with pytest.raises(BadInput, match=HOSTS_SECRET):
        training_hosts._secret()
