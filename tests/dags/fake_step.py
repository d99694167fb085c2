"""A fake step, which follows the step contract without computing anything.

The launchers call it as `PYTHON -m tasks NAME --spec URI`. The variables FAKE_* make it fail.
"""

import base64
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import unquote, urlparse

sys.path.insert(0, str(Path.cwd()))
from tasks.protocol import messages
from tasks.protocol.step_classes import spec_from_json


def read(uri: str) -> bytes:
    if uri.startswith("data:"):
        return base64.b64decode(uri.partition(",")[2])
    return Path(uri).read_bytes()


_, module, name, _, uri = sys.argv[1:]
spec = spec_from_json(read(uri))
context = json.loads(os.environ["CONFIDE_RUN_CONTEXT"])
task = context["task"]
print(f"{task}: working", file=sys.stderr)
channel = Path(os.environ["CONFIDE_MESSAGES"])


def send(message: messages.Message) -> None:
    with channel.open("a") as file:
        print(message.model_dump_json(), file=file)


send(messages.TrackedAt(url=f"http://127.0.0.1:5000/#/experiments/1/runs/{task}"))
Path(f"{channel}.env").write_text(json.dumps(dict(os.environ)))
for done in range(1, 3):
    send(messages.StepProgress(done=done, total=2, note="pretending"))
    time.sleep(float(os.environ.get("FAKE_SECONDS", "0")) / 2)

order = Path(os.environ["CONFIDE_HOME"]) / "fail"  # for a running stack, whose variables are fixed
words = order.read_text() if order.exists() else os.environ.get("FAKE_EXIT", "")
fails = dict(item.split("=") for item in filter(None, words.split(";")))
if os.environ.get("FAKE_POINT_FAILS") == f"{task} · {context['point']}":
    fails[task] = "2"
code = fails.get(task) or fails.get(f"{task}@{context['point'].split(' ')[0].removeprefix('σ=')}")
if code:
    send(messages.Failed(exit_code=int(code), reason=f"made to fail with {code}"))
    sys.exit(int(code))

address = os.environ.get("CONFIDE_STORE") or f"{os.environ['CONFIDE_HOME']}/store"
store = Path(unquote(urlparse(address).path))
output = store / spec.output.removeprefix("store://")
output.mkdir(parents=True, exist_ok=True)
result = messages.StepResult(
    step=spec.step,
    spec_hash=spec.digest(),
    outputs={},
    metrics=[
        messages.MetricRecord(name="epsilon", value=1.5, label="dp"),
        messages.MetricRecord(name="loss", value=9.0, label="operator"),
    ],
)
(output / "result.json").write_text(result.model_dump_json())
(output / "spec.json").write_text(spec.model_dump_json())
print(f"{spec.output}/result.json")
