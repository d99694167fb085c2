import io

import pytest
from rich.console import Console

from dp_core.errors import ConfideError
from tasks.local import demo
from tasks.local.airflow_api import AirflowAway
from tasks.protocol.messages import Failed, StepProgress, channel_file


def task(name, state, *, index=-1, seconds=1.5, label=None):
    return {
        "task_id": name,
        "map_index": index,
        "rendered_map_index": label,
        "state": state,
        "duration": seconds,
        "end_date": f"2026-01-01T00:00:0{int(seconds)}Z",
        "try_number": 1,
    }


class Script:
    def __init__(self, *looks):
        self.looks = list(looks)

    def run_state(self, dag, run_id):
        if isinstance(self.looks[0], Exception):
            raise self.looks.pop(0)
        return self.looks[0][0]

    def task_instances(self, dag, run_id):
        return self.looks.pop(0)[1]


def tell(home, *messages, task_name="dp_pretraining", index=-1):
    file = channel_file(home, "dp_bert/run", task_name, index)
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{message.model_dump_json()}\n" for message in messages))


def watch(tmp_path, monkeypatch, *looks, terminal=False):
    monkeypatch.setattr(demo, "_EVERY", 0.3 if terminal else 0.0)  # terminals redraw at intervals
    written = io.StringIO()
    console = Console(file=written, width=100, force_terminal=terminal)
    follower = demo.RunFollower(Script(*looks), "run", tmp_path, lambda: None, console)
    return follower.until_end(), written.getvalue()


def test_each_finished_task_is_printed_once(tmp_path, monkeypatch):
    corpus, done = task("corpus", "success"), task("vocabulary", "success")
    looks = [("running", [corpus, task("vocabulary", "running")])]
    looks += [("running", [corpus, done]), ("success", [corpus, done])]
    (state, _), text = watch(tmp_path, monkeypatch, *looks)
    assert state == "success"
    assert [line.split()[2] for line in text.splitlines()] == ["corpus", "vocabulary"]


def test_points_and_groups_are_printed_by_name_without_unreached_tasks(tmp_path, monkeypatch):
    tasks = [
        task("pretraining", "failed", index=0, label="σ=1 · B=256"),
        task("exposure", "upstream_failed", index=0),
        task("more.dp_pretraining", "skipped"),
        task("dp_pretraining", "success"),
    ]
    _, text = watch(tmp_path, monkeypatch, ("failed", tasks))
    names = [" ".join(line.split()[1:4]) for line in text.splitlines()]
    assert names[0].startswith("✗ pretraining (σ=1")
    assert [name.split()[:2] for name in names[1:]] == [
        ["–", "more.dp_pretraining"], ["✓", "dp_pretraining"]
    ]  # fmt: skip


def test_a_running_steps_own_progress_is_shown(tmp_path, monkeypatch):
    later = StepProgress(done=127, total=313, note="ε 1.44")
    tell(tmp_path, StepProgress(done=1, total=313), later)
    looks = [("running", [task("dp_pretraining", "running")])] * 2
    looks.append(("success", [task("dp_pretraining", "success")]))
    _, text = watch(tmp_path, monkeypatch, *looks, terminal=True)
    assert "127/313" in text and "ε 1.44" in text


def test_a_short_silence_of_airflow_is_waited_out_and_a_long_one_is_not(tmp_path, monkeypatch):
    end = ("success", [task("corpus", "success")])
    (state, _), _ = watch(tmp_path, monkeypatch, AirflowAway("restarting"), end)
    assert state == "success"
    monkeypatch.setattr(demo, "_PATIENCE", -1.0)
    with pytest.raises(ConfideError, match="does not answer"):
        watch(tmp_path, monkeypatch, AirflowAway("gone"), end)


def test_first_failure_is_reported_with_the_reason_of_its_step(tmp_path):
    tasks = [task("b", "failed", seconds=5), task("a", "failed", seconds=2), task("c", "success")]
    assert demo.first_failure(tasks)["task_id"] == "a"
    assert demo.first_failure(tasks[2:]) is None
    tell(tmp_path, Failed(exit_code=2, reason="no such file"), task_name="pretraining", index=3)
    follower = demo.RunFollower(Script(), "run", tmp_path, lambda: None, Console())
    failed = task("pretraining", "failed", index=3)
    assert follower.told(failed).reason("failed") == "no such file"
    assert follower.told(task("settings", "failed")).reason("failed") == "failed"
