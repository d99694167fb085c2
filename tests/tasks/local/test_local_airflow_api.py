import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tasks.local.airflow_api import AirflowApi, AirflowAway, AirflowRefused

CODES: list[int] = []  # status codes of the next answers; then 200


class Airflow(BaseHTTPRequestHandler):
    """A fake Airflow that accepts every login and has one run."""

    def do_POST(self) -> None:
        self._answer(200, {"access_token": "t"})

    def do_GET(self) -> None:
        code = CODES.pop(0) if CODES else 200
        self._answer(code, {"state": "running"} if code == 200 else {"detail": "in words"})

    def _answer(self, code: int, body: dict[str, str]) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[AirflowApi]:
    CODES.clear()
    with HTTPServer(("127.0.0.1", 0), Airflow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield AirflowApi(f"http://127.0.0.1:{server.server_port}", "confide", "secret")
        server.shutdown()


@pytest.mark.parametrize(
    ("code", "error"),
    [(code, AirflowAway) for code in (500, 502, 503, 504)]
    + [(code, AirflowRefused) for code in (400, 404, 409, 422)],
)
def test_server_error_is_no_refusal_and_the_client_asks_again(api, code, error):
    CODES.append(code)
    with pytest.raises(error, match="in words"):
        api.run_state("dp_bert", "run")
    assert api.run_state("dp_bert", "run") == "running"


def test_a_login_that_has_run_out_is_renewed(api):
    CODES.append(401)
    assert api.run_state("dp_bert", "run") == "running"
    assert CODES == []
