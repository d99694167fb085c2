import json

import pytest
from command_line import refused_commands

from dp_core.privacy.execution_plan import ExecutionPlan

pytestmark = pytest.mark.usefixtures("at_home")
SMALL = ["audit-engine", "--updates", "2", "--sampling-rate", "1"]


def test_audit_that_could_not_contradict_is_inconclusive_and_states_its_power(confide):
    words = ["--white-box-canaries", "400", "--black-box-canaries", "0", "--json"]
    code, out, _ = confide(*SMALL, *words)
    audit = json.loads(out)["white-box"]
    assert code == 0
    assert audit["verdict"] == "inconclusive" and audit["allowed"] == audit["guesses"]
    assert audit["canaries"] >= 400
    assert audit["lower_bounds"].keys() == audit["power"].keys()
    assert audit["lower_bounds"]["trade-off"] <= audit["power"]["trade-off"]
    assert audit["null_alarms"] <= 10


def test_contradicted_claim_fails_the_command(confide, monkeypatch):
    monkeypatch.setattr(ExecutionPlan, "gradient_noise_multiplier", lambda plan: 0.05)
    words = ["--epsilon", "1", "--white-box-canaries", "10000", "--black-box-canaries", "0"]
    code, out, err = confide(*SMALL, *words)
    assert code == 1
    assert "contradicted" in out
    assert "white-box audit" in err
    assert "400 of 400 guesses were right" in err


@pytest.mark.parametrize(("command", "reason"), refused_commands("engine"))
def test_invalid_audit_options_are_refused_in_one_line(confide, command, reason):
    assert reason in confide.refused("audit-engine", *command.split())
