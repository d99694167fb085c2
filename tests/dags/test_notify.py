import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from dags.launcher.outcome import addresses, log_failure, message, notify
from dags.launcher.step_operator import failure

PRIVATE = "Quendoline"


def context(error, **more):
    ti = SimpleNamespace(dag_id="dp_bert", task_id="report", run_id="manual__1", map_index=2)
    ti.log_url = "http://airflow/log"
    return {"ti": ti, "exception": error, **more}


def test_one_line_says_what_failed_why_and_where_the_log_is(caplog):
    for error in (failure(3, "2.1 of 2.0 would be spent"), None, ValueError("two\nlines")):
        failed = context(error)
        failed["ti"].rendered_map_index = "σ=1" if error else None
        log_failure(failed)
    said, lost, two = (record.getMessage() for record in caplog.records)
    assert said == (
        "FAILED dp_bert · report [σ=1], run manual__1: 2.1 of 2.0 would be spent "
        "(exit code 3: privacy budget exceeded, not retried). Log: http://airflow/log"
    )
    assert "[2]" in lost and "its process was lost" in lost
    assert "\n" not in two


@pytest.fixture
def hook():
    heard = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(500 if self.path == "/broken" else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield SimpleNamespace(heard=heard, url=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    thread.join()


def test_no_notification_is_sent_without_addresses(monkeypatch):
    monkeypatch.delenv("CONFIDE_NOTIFY", raising=False)
    assert addresses() == ()
    notify(context(failure(3, "over")))


@pytest.mark.cases
def test_notification_contains_the_reason_if_it_is_public(code, head, public):
    subject, text = message(context(failure(code, f"because of {PRIVATE}")))
    assert subject == f"Confide: {head}: dp_bert · report"
    assert "run manual__1" in text and "http://airflow/log" in text
    assert (PRIVATE in text) == public


def test_a_strangers_exception_is_never_quoted():
    for error in (ValueError(PRIVATE), None):
        assert PRIVATE not in "".join(message(context(error)))


def test_a_webhook_hears_it_and_its_address_is_never_logged(hook, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("CONFIDE_NOTIFY", f"{hook.url}/broken {hook.url}/token123")
    notify(context(failure(4, "ε = 4: contradicted by Bound.")))
    assert len(hook.heard) == 2  # after an error, later addresses are still notified
    assert "contradicted by Bound" in hook.heard[1].encode().decode("unicode_escape")
    said = [record for record in caplog.records if record.name == "airflow.task"]
    assert [r.getMessage() for r in said] == [
        "CONFIDE_NOTIFY: address 1 was not notified (HTTPStatusError)"
    ]
    assert not [r for r in caplog.records if r.name == "httpx"]


def test_mail_goes_by_airflows_own_provider_and_nothing_of_it_is_a_template(monkeypatch):
    sent = []

    def hold(self, context):
        sent.append((self.to, self.subject, self.html_content))

    monkeypatch.setattr("airflow.providers.smtp.notifications.smtp.SmtpNotifier.notify", hold)
    monkeypatch.setenv("CONFIDE_NOTIFY", "mailto:dpo@example.org")
    notify(context(failure(3, "2.1 of <2.0> {{ 7 * 7 }}")))
    ((to, subject, body),) = sent
    assert to in ("dpo@example.org", ["dpo@example.org"])
    assert "refused" in subject
    assert "&lt;2.0&gt; {{ 7 * 7 }}" in body


@pytest.mark.parametrize("wrong", ["token123", "ftp://x/token123", "mailto:token123", "https://"])
def test_an_address_that_is_none_is_refused_and_not_quoted(wrong, monkeypatch):
    monkeypatch.setenv("CONFIDE_NOTIFY", f"mailto:a@b {wrong}")
    with pytest.raises(ValueError, match="address 2 is neither") as refused:
        addresses()
    assert "token123" not in str(refused.value)


def test_every_task_of_every_dag_logs_its_failure_and_sends_notifications(dags):
    for dag in dags.values():
        for task in dag.tasks:
            assert {log_failure, notify} <= set(task.on_failure_callback), task.task_id
