import ast
import errno
import json
import math
import os
import shlex
import signal
import sys
import time
import tomllib

import pytest
from child_processes import completed
from command_line import refused_commands, set_options

from dp_core.errors import OUT_OF_MEMORY, fault_line
from dp_core.privacy.accounting.accountants import gaussian_epsilon
from dp_core.privacy.ledger import Entry, Ledger
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from tasks import cli
from tasks.commands.output import write_table
from tasks.execution import run_job as process
from tasks.execution.run_job import Job, JobOutcome
from tasks.protocol import CHECKOUT
from tasks.protocol.job import budget_of_run
from tasks.protocol.settings import JobSettings
from tasks.releases.charge import plans_of
from tasks.runtime.deployment import Deployment

pytestmark = pytest.mark.usefixtures("at_home")

ON_NOTES = {"private_format": "text", "private_path": "/notes", "private_dataset": "notes"}


def test_calibrated_noise_reaches_its_target(confide):
    target = ["--epsilon", "2", "--delta", "1e-5", "--sampling-rate", "0.02"]
    answer = confide.json("calibrate", "training", *target, "--steps", "200")
    assert 1.98 <= answer["epsilon"] <= 2
    sigma = ["--noise-multiplier", answer["noise_multiplier"]]
    assert confide.json("calibrate", "training", *target, *sigma)["steps"] >= 200
    for more in ([], ["--steps", "10", "--noise-multiplier", "1"]):
        err = confide.refused("calibrate", "training", *target, *more)
        assert "--steps" in err or "--noise-multiplier" in err


@pytest.mark.cases
def test_each_sampling_is_calibrated_under_its_neighbouring_relation(confide, sampling, neighbours):
    options = f"--delta 1e-5 --sampling-rate 0.05 --sampling {sampling}".split()
    command = ["calibrate", "training", "--epsilon", "4", *options]
    calibrated = confide.json(*command, "--steps", "40")
    assert (calibrated["neighbours"], calibrated["sampling"]) == (neighbours, sampling.split()[0])
    sigma = ["--noise-multiplier", calibrated["noise_multiplier"]]
    accounted = confide.json("epsilon", *options, *sigma, "--steps", "40")
    assert accounted["epsilon_pld"] == pytest.approx(calibrated["epsilon"])
    assert 3.98 <= calibrated["epsilon"] <= 4
    back = confide.json(*command, *sigma)
    assert back["steps"] == 40


@pytest.mark.parametrize(
    ("rate", "steps", "epochs"), [(0.01024, 97, 1), (0.01024, 98, 2), (0.5, 3, 2), (0.6, 3, 3)]
)
def test_an_epoch_of_shuffled_batches_has_whole_batches_only(confide, rate, steps, epochs):
    common = ["--noise-multiplier", 1, "--delta", 1e-6, "--sampling-rate", rate, "--steps", steps]
    answer = confide.json("epsilon", *common, "--sampling", "shuffled")
    expected = [gaussian_epsilon(1e-6, move * math.sqrt(epochs)) for move in (1, 1, 2)]
    shown = [f"epsilon_{name}" for name in ("pld", "unamplified", "unamplified_replace_one")]
    assert [answer[name] for name in shown] == pytest.approx(expected, rel=1e-3)


def test_sampling_rate_without_a_whole_batch_is_refused(confide):
    words = "epsilon --sampling fixed-size --units 100 --noise-multiplier 1 --steps 5"
    common = [*words.split(), "--delta", "1e-3", "--sampling-rate"]
    # rounding to 0.01 would yield an ε that is too small
    assert "give 0.02" in confide.refused(*common, "0.0144")
    assert confide(*common, "0.02")[0] == 0
    common[common.index("1e-3")] = "0.01"
    assert "not between 0 and 1/100" in confide(*common, "0.02")[2]


def test_calibrated_vocabulary_has_a_lower_threshold_than_the_paper(confide):
    words = "calibrate vocabulary --epsilon 0.5178 --delta 1e-9 --tuple-words 256"
    answer = confide.json(*words.split())
    assert answer["threshold"] < 1369  # the threshold that σ = 200 needs
    assert answer["delta_earned"] <= 1e-9
    # The paper prints σ = 200, C = 982.5 and a δ that is not 1e-9.
    paper = confide.json(*words.split(), "--mode", "paper")
    assert paper["sigma"] == pytest.approx(200, rel=1e-4)
    assert paper["threshold"] == pytest.approx(982.54, abs=0.05)
    assert paper["delta_earned"] == pytest.approx(1.18e-4, rel=0.01)
    assert paper["right_threshold"] == pytest.approx(1369.39, abs=0.05)
    shown = confide(*words.split(), "--mode", "paper")[1]
    assert "delta_earned, not delta" in shown


def test_data_set_is_registered_once_by_command(confide):
    confide.register()
    answer = confide.json("ledger")["notes"]
    assert (answer["epsilon"], answer["share"]) == (8, 0)
    assert confide.json("ledger", "history", "notes") == []
    other = "ledger register notes --unit patient --epsilon 9 --delta 1e-5"
    assert "notes" in confide.refused(*other.split())
    assert confide.register(dataset="study", epsilon=1e6)["of_study"]
    shown = confide("ledger", "remaining", "study")[1].split()
    assert "stays with the operator" in " ".join(shown)
    for none in ("inf", "nan", "0"):
        assert "'--epsilon'" in confide.refused(
            *other.split()[:-4], "--epsilon", none, "--delta", "1e-5"
        )


def test_cost_shows_the_way_and_exits_with_3_if_the_run_does_not_fit(confide, tmp_path):
    confide.register(epsilon=12)
    (tmp_path / "settings.json").write_text(json.dumps(ON_NOTES))
    words = ["ledger", "cost", "--settings", tmp_path / "settings.json"]
    cheap = confide.json(*words, "--set", "epochs=1")
    code, out, _ = confide(*words, "--set", "epochs=500", "--json")
    dear = json.loads(out)
    assert code == 3
    assert (cheap["way"], dear["way"]) == ("any sequence", None)
    assert "and as one plan ε" in dear["refusal"]
    assert cheap["fits"] and not dear["fits"]
    assert 0 < cheap["share"] < 1 < dear["share"]
    assert cheap["new_releases"] == cheap["releases"] == 2


def test_cost_of_made_up_data_needs_no_registration(confide, deployment):
    words = ["ledger", "cost"]
    first = confide.json(*words)
    assert (first["fits"], first["charge"], first["new_releases"]) == (True, None, 2)
    ledger = Ledger.open(deployment.ledger)
    assert ledger.datasets() == {}
    ledger.register_made_up("synthetic-notes")
    assert confide.json(*words) == first
    assert "confide ledger register" in confide.refused(*words, *set_options(**ON_NOTES))


@pytest.mark.cases
def test_cost_names_a_vocabulary_that_is_not_charged(confide, deployment, source, note):
    words = ["ledger", "cost", "--set", f"vocabulary_source={source}"]
    text = confide(*words)[1]
    assert note in text and ("The vocabulary" in text) is bool(note)
    answer = confide.json(*words)
    assert answer["new_releases"] == (1 if note else 2)


def test_cost_of_a_registered_run_is_zero(confide, deployment):
    confide.register(epsilon=12)
    words = ["ledger", "cost", *set_options(**ON_NOTES)]
    before, settings = confide.json(*words), JobSettings.model_validate(ON_NOTES)
    (planned,) = plans_of(budget_of_run(settings).charged, {}, run="r").values()
    Ledger.open(deployment.ledger).register_plan(planned)
    after = confide.json(*words)
    assert (after["share"], after["new_releases"], after["fits"]) == (0, 0, True)
    assert after["left_after"] == pytest.approx(before["left_after"])
    shown = confide(*words)[1]
    assert "nothing new: the ledger holds all of it" in shown
    assert "no limit" not in shown
    assert f"{after['left_after']:.1%}" in shown


def test_ledger_shows_history_and_remaining_budget(confide, deployment):
    assert "No data set" in confide("ledger")[1]
    confide.register("--order", "inf", epsilon=2)
    ledger, event = Ledger.open(deployment.ledger), PoissonGaussian.single(1.0, 5.0, 1)
    for number in (1, 2):
        spec = f"spec-{number}"
        run = Entry("notes", PrivacyUnit.PATIENT, event, 1e-6, spec, "p" + spec, f"run-{number}")
        (entry,) = ledger.register_plan([run])
        answer = confide.json("ledger")["notes"]
        shown = confide("ledger")[1]
        epsilon = gaussian_epsilon(1e-6, 1 / 5)
        assert answer["left"] == pytest.approx(1 - number * epsilon / 2, abs=1e-3)
        assert [r["run"] for r in answer["history"]] == [f"run-{n + 1}" for n in range(number)]
        assert answer["history"][-1]["epsilon"] == pytest.approx(epsilon, rel=1e-3)
        assert entry.id[:8] in shown and "add-or-" in shown


def test_run_names_for_withdraw_are_not_truncated_on_a_narrow_terminal(
    confide, monkeypatch, deployment
):
    monkeypatch.setenv("COLUMNS", "80")
    ledger, event = Ledger.open(deployment.ledger), PoissonGaussian.single(0.01, 2.0, 10)
    entries = []
    for name in ("a-data-set-of-a-long-name", "another-data-set-of-a-long-name"):
        ledger.register_dataset(name, PrivacyUnit.PATIENT, 8.0, 1e-5, order=math.inf)
        run = f"cli/dp_bert/2026-07-01T12:00:00/{name}/123456789"
        reservation = Entry(name, PrivacyUnit.PATIENT, event, 1e-6, "a", plan_key="p", run=run)
        entries += ledger.register_plan([reservation])
    for words in (["ledger"], ["ledger", "history", "a-data-set-of-a-long-name"]):
        shown = confide(*words)[1]
        for entry in entries if words == ["ledger"] else entries[:1]:
            assert entry.run in shown and entry.id[:8] in shown
        assert shown.count("planned: nothing read yet, can be withdrawn") == 1
        assert "…" not in shown


def test_planned_run_can_be_withdrawn(confide, deployment):
    assert confide.register("--order", "inf")["renyi_order"] == "infinity"
    event = PoissonGaussian.single(0.01, 2.0, 10)
    Ledger.open(deployment.ledger).register_plan(
        [Entry("notes", PrivacyUnit.PATIENT, event, 1e-6, "a", plan_key="p", run="run-1")]
    )
    withdraw = ["ledger", "withdraw", "notes", "run-1"]
    (withdrawn,) = confide.json(*withdraw)
    assert withdrawn["state"] == "withdrawn"
    left = confide.json("ledger", "remaining", "notes")
    assert (left["share"], left["unsettled"]) == (0, 0)
    assert "no planned release" in confide.refused(*withdraw)


@pytest.mark.cases
def test_epsilon_of_samplings_and_schedules_matches_reference_values(confide, words, reference):
    common = ["epsilon", "--noise-multiplier", "1", "--delta", "1e-6", "--group", "3"]
    answer = confide.json(*common, *words.split())
    assert answer["epsilon_pld"] == pytest.approx(reference, rel=0.01)
    if "--cap" not in words:  # truncated batches have no accounting by RDP
        assert reference < answer["epsilon_rdp"] < answer["epsilon_unamplified"]
    if "--phase" not in words:  # epochs of phases are counted per phase
        assert answer["epsilon_unamplified"] == pytest.approx(20.65, rel=0.001)
        assert answer["epsilon_unamplified_replace_one"] == pytest.approx(52.78, rel=0.001)
    epsilon, group = answer["epsilon_pld"], answer["group"]
    assert group["epsilon"] == pytest.approx(3 * epsilon)
    odds = math.exp(epsilon)
    assert group["delta"] == pytest.approx(1e-6 * (1 + odds + odds**2))


@pytest.mark.parametrize(("command", "reason"), refused_commands("errors"))
def test_error_is_one_line_with_exit_code_2(confide, command, reason):
    assert reason in confide.refused(*shlex.split(command))


def test_word_in_another_encoding_is_refused(confide):
    assert "not UTF-8" in confide.refused("ledger", "history", os.fsdecode(b"n\xf6tes"))


@pytest.mark.cases
def test_unusable_home_is_refused(confide, monkeypatch, tmp_path, place, reason):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CONFIDE_HOME", str(tmp_path / place))
    if not place:
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    err = confide.refused("ledger")
    assert "CONFIDE_HOME: " in err and f"cannot {reason}" in err


def test_confide_lists_its_commands_by_task_and_states_the_version_of_the_project(confide):
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert confide("--version")[1] == f"confide {project['version']}\n"
    _, out, err = confide()
    assert "confide: Usage" not in out + err
    for task, verbs in cli.TASKS.items():
        section = (out + err).partition(f"{task}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == list(verbs)


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_command_shows_an_example_that_it_understands(confide, verb):
    code, shown, _ = confide(verb, "--help")
    examples = shown.partition("Example:\n")[2].splitlines()
    assert code == 0 and examples and max(map(len, shown.splitlines())) <= 80
    for example in examples:
        name, *words = example.split()
        assert (name, words[0]) == ("confide", verb)
        assert confide(*words, "--help")[0] == 0


@pytest.mark.cases
def test_mistyped_command_or_option_gets_a_suggestion(confide, words, suggestion):
    assert f"'{suggestion}'" in confide.refused(*words)


def test_shell_completion_offers_commands_and_options():
    def completions(words: str, position: int) -> set[str]:
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(position)}
        variables = os.environ | asked | {"_CONFIDE_COMPLETE": "bash_complete"}
        done = completed(sys.executable, "-m", "tasks.cli", env=variables)
        return set(done.stdout.split())

    assert completions("confide e", 1) == {
        f"plain,{verb}" for verb in ("epsilon", "errors", "evidence", "export")
    }
    assert completions("confide doctor --js", 2) == {"plain,--json"}


@pytest.mark.parametrize("width", [40, 80])
def test_tables_break_lines_between_words_and_keep_every_word(monkeypatch, capsys, width):
    """Rows of which the longest words do not fit next to each other become lists."""
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["a-name-of-twenty-four-xx", "add-or-remove-one", "reconstructed"]
    columns = ["data set", "neighbours", "explanation", "ε"]
    write_table("Title", columns, [[*words[:2], f"{words[2]} " * 9, 0.25]])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    for word in [*words, *columns[1:], "0.25"]:
        assert word in shown
    assert shown.count("reconstructed") == 9


@pytest.mark.parametrize("released", [True, False])
def test_failed_run_states_whether_anything_was_spent(confide, monkeypatch, released):
    def fails(job: Job, deployment: Deployment, watch: object) -> JobOutcome:
        ledger = Ledger.open(deployment.ledger)
        ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
        event, key = PoissonGaussian.single(0.01, 2.0, 10), job.run_key
        planned = Entry("notes", PrivacyUnit.PATIENT, event, 1e-6, "a", plan_key="p", run=key)
        (entry,) = ledger.register_plan([planned])
        if released:
            ledger.reserve(entry)
        return JobOutcome(job, deployment.logs, exit_code=2, failed="pretrain: wrong")

    monkeypatch.setattr(process, "run_job", fails)
    monkeypatch.setattr(process, "send_all", lambda _: None)
    code, _, err = confide("run")
    assert code == 2 and f"this run charged {int(released)} releases. The same command" in err


def test_doctor_reports_faults_with_their_fix(confide, monkeypatch, untracked):
    monkeypatch.setenv("CONFIDE_TRACKING", untracked.tracking)
    untracked.seeds.mkdir(mode=0o755)
    untracked.seeds.chmod(0o755)
    code, out, _ = confide("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(out)["findings"]}
    assert code == 1
    assert not findings["privacy seeds"]["ok"]
    assert "chmod 700" in findings["privacy seeds"]["fix"]
    assert not findings["MLflow"]["ok"]
    assert findings["store"]["ok"] and findings["ledger"]["ok"]


@pytest.mark.cases
def test_steps_with_a_result_and_light_commands_import_no_heavy_libraries(words, permitted):
    module = "cli" if words else "execution.contract"
    script = (
        f"import sys, tasks.{module} as module\n"
        "sys.argv[0] = 'confide'\n"
        "sys.argv[1:] and module.main()\n"
        "heavy='tensorflow mlflow dp_accounting scipy scipy.stats sklearn sqlalchemy matplotlib'\n"
        "print([name for name in heavy.split() if name in sys.modules], file=sys.stderr)\n"
    )
    done = completed(sys.executable, "-c", script, *words)
    assert set(ast.literal_eval(done.stderr.strip().splitlines()[-1])) <= set(permitted)


def test_exhausted_memory_ends_with_one_line_without_memory_to_build_it(monkeypatch, capfd):
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cli.cli, "main", exhausted)
    monkeypatch.setattr(cli, "fault_line", exhausted)
    assert cli.main() == 1
    assert capfd.readouterr().err == f"confide: {OUT_OF_MEMORY}\n"


def test_import_errors_by_exhausted_memory_are_reported_as_such():
    unmapped = ImportError("libx.so: failed to map segment from shared object")
    for error in (MemoryError(), unmapped, OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert fault_line(error) == OUT_OF_MEMORY
    assert fault_line(ImportError("no module named x")) != OUT_OF_MEMORY


def test_faults_with_little_memory_read_no_source_file():
    """The handler of `MemoryError` must not need memory for the lines of a traceback."""
    script = (
        "import resource, sys\n"
        "from tasks import cli\n"
        "def exhaust(*_, **__):\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))\n"
        "    bytearray(1 << 34)\n"
        "cli.cli.main = exhaust\n"
        "sys.exit(cli.main())\n"
    )
    done = completed(sys.executable, "-c", script, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"confide: {OUT_OF_MEMORY}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_run_names_the_command_that_continues_it(monkeypatch, confide, at_home, number):
    def stopped(*_: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr(process, "run_job", stopped)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        confide("run")
    assert ended.value.code == 128 + number
    err = confide.captured.readouterr().err
    assert err == "confide: stopped. The same command continues the run: confide run\n"
    assert signal.getsignal(signal.SIGTERM) is before
