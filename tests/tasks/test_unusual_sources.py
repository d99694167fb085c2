import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import spec_examples
from spec_examples import spec_of

from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.context import omissions_of
from tasks.protocol.job import missing_file
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import CorpusSpec, EntitiesSpec, StepSpec
from tasks.results import read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.backends import keyed_digest, read_spec, stage_source
from tasks.storage.store import Store

NAME = "doe_john_1961"
pytestmark = pytest.mark.usefixtures("at_home", "tracked", "time_limit")


@pytest.fixture
def time_limit() -> Iterator[None]:
    """A step that waits on a pipe fails its test instead of blocking the test run."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def link(place: Path, to: str) -> None:
    place.symlink_to(to)


ENTRIES: dict[str, Callable[[Path], None]] = {
    "pipe": lambda p: os.mkfifo(p),
    "endless": lambda p: link(p, "/dev/zero"),
    "linked folder": lambda p: link(p, "/etc"),
    "linked file": lambda p: link(p, "/etc/hostname"),
    "dangling": lambda p: link(p, "nowhere"),
    "latin-1": lambda p: os.mkdir(os.fsencode(p) + b"\xe9"),  # noqa: PTH102 - bytes
}


Run = Callable[[StepSpec], tuple[int, str]]


@pytest.fixture
def run(deployment: Deployment, capfd: pytest.CaptureFixture[str]) -> Run:
    Ledger.open(deployment.ledger).register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)

    def run_step(spec: StepSpec) -> tuple[int, str]:
        code = spec_examples.run(spec)
        captured = capfd.readouterr()
        assert NAME not in captured.out + captured.err
        lines = (captured.out + captured.err).splitlines(keepends=True)
        return code, "".join(line for line in lines if not line.startswith("tracking is down"))

    return run_step


def corpus(path: Path, format: str = "text") -> CorpusSpec:
    return spec_of(CorpusSpec, format=format, path=str(path))


@pytest.mark.parametrize("kind", ENTRIES)
def test_folder_with_an_irregular_entry_is_refused(tmp_path, run, kind):
    (tmp_path / "in" / "ward").mkdir(parents=True)
    (tmp_path / "in" / "ward" / "note.txt").write_text("zyxsecret")
    ENTRIES[kind](tmp_path / "in" / "ward" / NAME)
    paths = dict.fromkeys(("train_path", "test_path"), str(tmp_path / "in"))
    labels = spec_of(EntitiesSpec, format="pubtator", dataset="notes", **paths)
    for spec, field in ((corpus(tmp_path / "in"), "private_path"), (labels, "entities_train")):
        code, output = run(spec)
        assert (code, output.count("\n")) == (2, 1), output
        assert field in output
    with pytest.raises(BadInput, match="in it") as error:
        keyed_digest(tmp_path / "in", b"key")
    assert NAME not in str(error.value)


@pytest.mark.parametrize(
    "path", ["pipe", "/dev/zero", "/dev/null", "x" * 300, "nowhere", "note.txt/deeper", "round"]
)
def test_irregular_source_path_is_refused(tmp_path, run, path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "note.txt").write_text("good")
    (tmp_path / "round").symlink_to("round")
    for format in ("text", "jsonl", "csv", "parquet"):
        code, output = run(corpus(tmp_path / path, format))
        assert (code, output.count("\n")) == (2, 1), output
    # "neither a file nor a folder" or "no such file"
    with pytest.raises(BadInput, match="public_model: n"):
        stage_source(str(tmp_path / path), tmp_path / "staged", field="public_model")
    with pytest.raises(BadInput):
        keyed_digest(tmp_path / path, b"key")
    for missing in (path, f"{path}\0"):
        name, reason = missing_file(JobSettings(public_model=str(tmp_path / missing)))
        assert name == "public_model" and reason.startswith(("no such", "neither a file nor"))


def test_notes_that_are_not_utf8_are_counted_for_the_operator(tmp_path, deployment, run):
    (tmp_path / "in").mkdir()
    for number in range(20):
        (tmp_path / "in" / f"{number}.txt").write_text("no fever")
    for number, text in enumerate(("39.2 ° of fever", "fiancé at the bedside")):
        (tmp_path / "in" / f"{NAME}{number}.txt").write_text(text, encoding="windows-1252")
    (tmp_path / "in" / "readme.md").write_text("notes")
    spec = corpus(tmp_path / "in")
    code, output = run(spec)
    assert (code, "UTF-8" in output) == (0, False)  # logs may be published
    result = read_result(deployment.open_store(), spec.output)
    assert omissions_of(result) == (
        "files of other formats passed over: 1; documents left out: 2 (not UTF-8: 2); "
        "`iconv -f WINDOWS-1252 -t UTF-8` converts text of older Windows systems",
        Label.OPERATOR,
    )


def test_digest_refuses_links_that_readers_refuse(tmp_path):
    folder = tmp_path / "in"
    (folder / "p").mkdir(parents=True)
    (folder / "p" / "n.txt").write_text("x")
    first = keyed_digest(folder, b"key")
    (tmp_path / "named").symlink_to(folder)
    assert keyed_digest(tmp_path / "named", b"key") == first
    (folder / "p" / "note").symlink_to("n.txt")
    with pytest.raises(BadInput):
        keyed_digest(folder, b"key")


@pytest.mark.parametrize("uri", ["/a\0b", "/" + "x" * 300, "file:///a%00b"])
def test_spec_at_an_invalid_path_is_refused(uri):
    with pytest.raises(BadInput, match="cannot read the spec"):
        read_spec(uri)


def test_bucket_objects_with_impossible_file_names_are_refused(tmp_path, bucket):
    root = f"gs://{bucket}/{tmp_path.name}"
    store = Store(root, tmp_path / "cache")
    store.write(f"{root}/one/{NAME}", b"1")
    store.write(f"{root}/one/{NAME}/note.txt", b"2")
    store.write(f"{root}/two/{'x' * 300}.txt", b"3")
    for folder in ("one", "two"):
        with pytest.raises(BadInput, match="cannot be a file's") as error:
            stage_source(f"{root}/{folder}", tmp_path / "staged", field="private_path")
        assert NAME not in str(error.value)
    store._backend.write("three/", b"")  # an empty folder created in the cloud console
    store.write(f"{root}/three/note.txt", b"4")
    staged = stage_source(f"{root}/three", tmp_path / "staged", field="private_path")
    assert [f.name for f in staged.iterdir()] == ["note.txt"]


def test_deeply_nested_model_config_is_refused(tmp_path):
    from dp_core.models.hugging_face import CONFIG, load_model

    (tmp_path / CONFIG).write_text("[" * 100_000)
    with pytest.raises(BadInput, match="cannot be read"):
        load_model(tmp_path)
