"""The command line: quick to ask, pure JSON, errors in one line."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dp_core.privacy.accounting import gaussian_epsilon
from dp_core.privacy.events import PoissonGaussian
from dp_core.privacy.ledger import Ledger, Reservation
from dp_core.privacy.units import PrivacyUnit
from tasks import cli
from tasks.deployment import Deployment


def _confide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["confide", *words])
    code = cli.main()
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, deployment: Deployment) -> None:
    monkeypatch.setenv("CONFIDE_HOME", str(deployment.home))
    monkeypatch.delenv("CONFIDE_DEBUG", raising=False)


def test_epsilon_has_the_reference_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "epsilon --sampling-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5 --json"
    code, out, _ = _confide(monkeypatch, capsys, *words.split())
    found = json.loads(out)
    assert code == 0
    assert found["epsilon_pld"] == pytest.approx(0.947, rel=0.01)
    assert found["epsilon_rdp"] == pytest.approx(1.0355, rel=0.01)
    assert found["epsilon_unamplified"] > 10


def test_calibrated_noise_reaches_its_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--epsilon", "2", "--delta", "1e-5", "--sampling-rate", "0.02"]
    words = ["calibrate", "training", *target, "--steps", "200", "--json"]
    found = json.loads(_confide(monkeypatch, capsys, *words)[1])
    assert 1.98 <= found["epsilon"] <= 2
    words = ["calibrate", "training", *target, "--json", "--noise-multiplier"]
    words.append(str(found["noise_multiplier"]))
    assert json.loads(_confide(monkeypatch, capsys, *words)[1])["steps"] >= 200
    for more in ([], ["--steps", "10", "--noise-multiplier", "1"]):
        code, _, err = _confide(monkeypatch, capsys, "calibrate", "training", *target, *more)
        assert code == 2
        assert "--steps" in err or "--noise-multiplier" in err


@pytest.mark.parametrize(
    ("sampling", "neighbours"),
    [
        ("truncated-poisson --units 1000 --cap 60", "add-or-remove-one"),
        ("fixed-size --units 1000", "replace-one"),
        ("shuffled", "zero-out-one"),
    ],
)
def test_every_sampling_is_calibrated_by_what_is_proven_for_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sampling: str,
    neighbours: str,
) -> None:
    said = f"--delta 1e-5 --sampling-rate 0.05 --json --sampling {sampling}".split()
    asked = ["calibrate", "training", "--epsilon", "4", *said]
    found = json.loads(_confide(monkeypatch, capsys, *asked, "--steps", "40")[1])
    assert (found["neighbours"], found["sampling"]) == (neighbours, sampling.split()[0])
    sigma = ["--noise-multiplier", str(found["noise_multiplier"])]
    told = json.loads(_confide(monkeypatch, capsys, "epsilon", *said, *sigma, "--steps", "40")[1])
    assert told["epsilon_pld"] == pytest.approx(found["epsilon"])
    assert 3.98 <= found["epsilon"] <= 4
    back = json.loads(_confide(monkeypatch, capsys, *asked, *sigma)[1])
    assert back["steps"] == (40 if sampling != "shuffled" else 40 // 20 * 20)


def test_no_batch_is_rounded_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "epsilon --sampling fixed-size --units 100 --noise-multiplier 1 --steps 5 --json"
    common = [*words.split(), "--delta", "1e-3", "--sampling-rate"]
    code, out, err = _confide(monkeypatch, capsys, *common, "0.0144")  # the ε of 0.01 is too small
    assert (code, out) == (2, "")
    assert "give 0.02" in err
    assert _confide(monkeypatch, capsys, *common, "0.02")[0] == 0
    common[common.index("1e-3")] = "0.01"
    assert "below 1/100" in _confide(monkeypatch, capsys, *common, "0.02")[2]


def test_calibrated_vocabulary_is_better_than_the_papers_noise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "calibrate vocabulary --epsilon 0.5178 --delta 1e-9 --tuple-words 256 --json"
    found = json.loads(_confide(monkeypatch, capsys, *words.split())[1])
    assert found["threshold"] < 1369  # what σ = 200 needs
    assert found["delta_earned"] <= 1e-9
    # as the paper prints it: σ = 200, C = 982.5, and a δ that is not 1e-9
    paper = json.loads(_confide(monkeypatch, capsys, *words.split(), "--mode", "paper")[1])
    assert paper["sigma"] == pytest.approx(200, rel=1e-4)
    assert paper["threshold"] == pytest.approx(982.54, abs=0.05)
    assert paper["delta_earned"] == pytest.approx(1.18e-4, rel=0.01)
    assert paper["right_threshold"] == pytest.approx(1369.39, abs=0.05)
    shown = _confide(monkeypatch, capsys, *words.split()[:-1], "--mode", "paper")[1]
    assert "delta_earned, not delta" in shown


def test_the_ledger_by_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register = "ledger register notes --unit patient --epsilon 8 --delta 1e-5 --json"
    assert _confide(monkeypatch, capsys, *register.split())[0] == 0
    found = json.loads(_confide(monkeypatch, capsys, "ledger", "--json")[1])
    assert found["notes"]["epsilon"] == 8
    assert found["notes"]["share"] == 0
    history = _confide(monkeypatch, capsys, "ledger", "history", "notes", "--json")
    assert json.loads(history[1]) == []
    raised = register.replace("8", "9")
    code, _, err = _confide(monkeypatch, capsys, *raised.split())
    assert code == 2
    assert len(err.strip().splitlines()) == 1


def test_the_next_runs_cost_is_told_beforehand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    register = "ledger register notes --unit patient --epsilon 12 --delta 1e-5"
    _confide(monkeypatch, capsys, *register.split())
    (tmp_path / "settings.json").write_text(
        json.dumps({"private_format": "text", "private_path": "/notes", "private_dataset": "notes"})
    )
    words = ["ledger", "cost", "--settings", str(tmp_path / "settings.json"), "--json"]
    cheap = json.loads(_confide(monkeypatch, capsys, *words, "--set", "epochs=1")[1])
    dear = json.loads(_confide(monkeypatch, capsys, *words, "--set", "epochs=500")[1])
    assert cheap["fits"] and not dear["fits"]
    assert 0 < cheap["share_of_budget"] < 1 < dear["share_of_budget"]


def test_the_ledger_shows_history_what_is_left_and_whether_the_last_run_fits_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], deployment: Deployment
) -> None:
    assert "No data set" in _confide(monkeypatch, capsys, "ledger")[1]
    words = "ledger register notes --unit patient --epsilon 2 --delta 1e-5 --order inf --json"
    _confide(monkeypatch, capsys, *words.split())
    ledger, event = Ledger.open(deployment.ledger), PoissonGaussian.single(1.0, 5.0, 1)
    for number in (1, 2):
        spec = f"spec-{number}"
        run = Reservation(
            "notes", PrivacyUnit.PATIENT, event, 1e-6, spec, "p" + spec, f"run-{number}"
        )
        (entry,) = ledger.register_plan([run])
        found = json.loads(_confide(monkeypatch, capsys, "ledger", "--json")[1])["notes"]
        shown = _confide(monkeypatch, capsys, "ledger")[1]
        one = gaussian_epsilon(1e-6, 1 / 5)
        assert found["left"] == pytest.approx(1 - number * one / 2, abs=1e-3)
        assert [r["run"] for r in found["history"]] == [f"run-{n + 1}" for n in range(number)]
        assert found["history"][-1]["epsilon"] == pytest.approx(one, rel=1e-3)
        again = found["like_the_last_run"]
        assert (again["run"], again["fits"]) == (f"run-{number}", number == 1)
        assert ("REFUSED" in shown) is (number == 2)
        assert entry.id[:8] in shown and "add/remove" in shown


def test_a_run_that_was_registered_and_never_began_can_be_given_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], deployment: Deployment
) -> None:
    words = "ledger register notes --unit patient --epsilon 8 --delta 1e-5 --order inf --json"
    assert json.loads(_confide(monkeypatch, capsys, *words.split())[1])["renyi_order"] == "infinity"
    event = PoissonGaussian.single(0.01, 2.0, 10)
    Ledger.open(deployment.ledger).register_plan(
        [Reservation("notes", PrivacyUnit.PATIENT, event, 1e-6, "a", plan_key="p", run="run-1")]
    )
    withdraw = ["ledger", "withdraw", "notes", "run-1", "--json"]
    (gone,) = json.loads(_confide(monkeypatch, capsys, *withdraw)[1])
    assert gone["state"] == "withdrawn"
    left = json.loads(_confide(monkeypatch, capsys, "ledger", "remaining", "notes", "--json")[1])
    assert (left["share"], left["unsettled"]) == (0, 0)
    code, _, err = _confide(monkeypatch, capsys, *withdraw)
    assert code == 2 and "no planned release" in err


@pytest.mark.parametrize(
    ("words", "reference"),
    [  # computed outside the project: n = 100k, B = 1024, 977 updates, σ = 1, δ = 1e-6
        ("--sampling-rate 0.01024 --steps 977", 2.16),
        ("--phase 0.01024 500 --phase 0.01024 477", 2.16),
        ("--sampling-rate 0.01024 --steps 977 --sampling truncated-poisson --units 100000 "
         "--cap 1152", 2.77),
    ],
)  # fmt: skip
def test_epsilon_of_every_sampling_and_of_schedules(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    reference: float,
) -> None:
    common = ["epsilon", "--noise-multiplier", "1", "--delta", "1e-6", "--group", "3", "--json"]
    found = json.loads(_confide(monkeypatch, capsys, *common, *words.split())[1])
    assert found["epsilon_pld"] == pytest.approx(reference, rel=0.01)
    if "--phase" not in words:  # whose epochs are counted phase by phase
        assert found["epsilon_unamplified"] == pytest.approx(19.4, rel=0.01)
        assert found["epsilon_unamplified_replace_one"] == pytest.approx(49.3, rel=0.01)
    epsilon, group = found["epsilon_pld"], found["group"]
    assert group["epsilon"] == pytest.approx(3 * epsilon)
    odds = math.exp(epsilon)
    assert group["delta"] == pytest.approx(1e-6 * (1 + odds + odds**2))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--set", "epochs=-1"], "epochs"),
        (["run", "--set", "nonsense=1"], "unknown setting"),
        (["run", "--set", "epochs"], "not key=value"),
        (["ledger", "history", "nobody"], "nobody"),
        (["report"], "no report yet"),
        (["nonsense"], "nonsense"),
        (["epsilon", "--steps", "1"], "Missing option"),
        (
            ["epsilon", "--sampling-rate=2", "--noise-multiplier=1", "--steps=1", "--delta=.1"],
            "sampling rate",
        ),
    ],
)
def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    code, out, err = _confide(monkeypatch, capsys, *words)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("confide: ")
    assert said in err


def test_doctor_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untracked: Deployment
) -> None:
    monkeypatch.setenv("CONFIDE_TRACKING", untracked.tracking)
    untracked.seeds.mkdir(mode=0o755)
    untracked.seeds.chmod(0o755)
    code, out, _ = _confide(monkeypatch, capsys, "doctor", "--json")
    found = {f["name"]: f for f in json.loads(out)["findings"]}
    assert code == 1
    assert not found["privacy seeds"]["ok"]
    assert "chmod 700" in found["privacy seeds"]["fix"]
    assert not found["MLflow"]["ok"]
    assert found["store"]["ok"] and found["ledger"]["ok"]


def test_no_password_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untracked: Deployment
) -> None:
    monkeypatch.setenv("CONFIDE_TRACKING", untracked.tracking)
    monkeypatch.setenv("CONFIDE_LEDGER", "postgresql+psycopg2://confide:hunter2@127.0.0.1:1/ledger")
    _, out, err = _confide(monkeypatch, capsys, "doctor")
    assert "127.0.0.1:1/ledger" in out
    assert "hunter2" not in out + err


def test_asking_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from tasks import cli\n"
        "sys.argv = ['confide'] + sys.argv[1:]\n"
        "cli.main()\n"
        "heavy = {'tensorflow', 'mlflow', 'scipy', 'sqlalchemy', 'matplotlib'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\n"
    )

    def heavy(*words: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ,
        )
        found: list[str] = ast.literal_eval(done.stderr.strip().splitlines()[-1])
        return found

    assert heavy("--help") == []
    epsilon = ["epsilon", "--sampling-rate=.1", "--noise-multiplier=4", "--steps=1", "--delta=.1"]
    assert {"tensorflow", "mlflow", "sqlalchemy", "matplotlib"}.isdisjoint(heavy(*epsilon))
