"""Whatever a form holds, a launcher's command has the same five words, and no shell reads them."""

import base64
import io
from types import SimpleNamespace

import pytest

from dags.launcher import docker as by_docker
from dags.launcher import process as by_process
from dags.launcher.process import progress_file
from dags.launcher.work import Work
from tasks.protocol import JobSettings, RunContext, dp_bert_steps, spec_from_json

HOSTILE = ["; touch here", "$(touch here)", "`touch here`", "\n--spec\nx", "' || touch here '"]


def work(words: str, root: str = "gs://bucket/store") -> Work:
    told = {"private_format": "jsonl", "private_path": f"/data/{words}", "declared_units": 1000}
    settings = JobSettings.model_validate(told | {"private_dataset": "ward-notes"})
    spec = dp_bert_steps(settings, root)["private_corpus"]
    key = f"dp_bert/{words}/../../x"
    return Work(spec, RunContext(run_key=key, run_name=words, task="private_corpus"))


@pytest.mark.parametrize("words", HOSTILE)
def test_a_container_s_command_is_a_list_of_the_same_words(words, monkeypatch):
    asked = []
    client = SimpleNamespace(
        create_container=lambda **options: asked.append(options) or {"Id": "x"},
        create_host_config=lambda **options: options,
    )
    monkeypatch.setattr(by_docker.DockerStep, "cli", client)
    by_docker.DockerStep(task_id="private_corpus", plan=lambda *_: {})._create(work(words))
    command = asked[0]["command"]
    assert command[:4] == ["-m", "tasks", "corpus", "--spec"]
    sent = spec_from_json(base64.b64decode(command[4].partition(",")[2]))
    assert len(command) == 5
    assert sent.path == f"/data/{words}"


@pytest.mark.parametrize("words", HOSTILE)
def test_a_process_gets_the_same_words_and_no_shell(words, monkeypatch, tmp_path):
    started = []

    class Popen:
        def __init__(self, command, **options):
            started.append((command, options))
            self.stdout = io.StringIO("")

        def wait(self):
            return 0

    monkeypatch.setattr(by_process.subprocess, "Popen", Popen)
    step = by_process.ProcessStep(task_id="private_corpus", plan=lambda *_: {})
    step._run(work(words), tmp_path / "progress")
    ((command, options),) = started
    assert command[1:5] == ["-m", "tasks", "corpus", "--spec"]
    assert len(command) == 6
    assert not options.get("shell")


@pytest.mark.parametrize("words", HOSTILE)
def test_a_run_s_name_leads_to_no_other_folder(words, monkeypatch, tmp_path):
    monkeypatch.setenv("CONFIDE_HOME", str(tmp_path))
    file = progress_file(work(words))
    assert file.parent.parent == tmp_path / "progress"
