import base64
import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dp_core.errors import BadInput, ConfideError
from tasks.protocol.step_process import data_uri
from tasks.storage import backends
from tasks.storage.backends import GoogleStorageBackend, keyed_digest, read_spec, stage_source
from tasks.storage.store import CHECKSUMS, Store


@pytest.fixture(params=["path", "file", "gs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A root URI of each kind; local paths contain characters that URIs must escape."""
    if request.param == "gs":
        name = request.getfixturevalue("bucket")
        return f"gs://{name}/{tmp_path.name}/store"
    folder = tmp_path / "a store % σ"
    return str(folder) if request.param == "path" else folder.as_uri()


@pytest.fixture
def store(root: str, tmp_path: Path) -> Store:
    return Store(root, tmp_path / "cache")


def _folder(place: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def test_published_folder_replaces_an_earlier_one_and_is_read_back_completely(
    store, root, tmp_path
):
    uri = f"{root}/step/one"
    files = {"x.bin": bytes(range(256)) * 5000, "deep/er/y.txt": "σ".encode(), "empty": b""}
    store.publish(_folder(tmp_path / "first", {"old": b"1", "empty": b"full"}), uri)
    store.publish(_folder(tmp_path / "made", files), uri)
    copy = store.local_copy(uri)
    assert {n: (copy / n).read_bytes() for n in files} == files
    assert not (copy / "old").exists() and store.read(f"{uri}/old") is None
    store.remove(f"{uri}/{CHECKSUMS}")  # as after an interrupted upload
    with pytest.raises(BadInput, match="no complete folder"):
        store.local_copy(uri)


def test_skipped_files_are_neither_checked_nor_copied(store, root, tmp_path):
    uri, files = f"{root}/step/shards", {"a/one": b"1" * 1000, "a/two": b"2", "three": b"3"}
    store.publish(_folder(tmp_path / "made", files), uri)
    store.write(f"{uri}/three", b"damaged")
    copy = store.local_copy(uri, without=lambda name: name == "three")
    assert [(copy / name).read_bytes() for name in ("a/one", "a/two")] == [b"1" * 1000, b"2"]
    if root.startswith("gs"):
        assert not (copy / "three").exists()


def test_interrupted_download_is_resumed(tmp_path, bucket, monkeypatch):
    root = f"gs://{bucket}/{tmp_path.name}"
    store, uri = Store(root, tmp_path / "cache"), f"{root}/step/one"
    files = {"a": b"a" * 100, "b": b"b" * 100, "c": b"c" * 100}
    store.publish(_folder(tmp_path / "made", files), uri)
    get, fetched = GoogleStorageBackend.get, []

    def breaks(self: GoogleStorageBackend, key: str, to: Path, size: int | None = None) -> None:
        fetched.append(to.name)
        if fetched == ["a", "b"]:
            to.write_bytes(b"b" * 50 + bytes(50))
            raise OSError("the connection was lost")
        get(self, key, to, size)

    monkeypatch.setattr(GoogleStorageBackend, "get", breaks)
    with pytest.raises(OSError, match="lost"):
        store.local_copy(uri)
    copy = Store(root, tmp_path / "cache").local_copy(uri)
    assert {name: (copy / name).read_bytes() for name in files} == files
    assert fetched == ["a", "b", "b", "c"]


@pytest.mark.parametrize("change", [b"x", b"", b"more than there was"])
def test_changed_published_file_is_refused(store, root, tmp_path, change):
    store.publish(_folder(tmp_path / "made", {"data": b"w"}), f"{root}/s/bad")
    store.write(f"{root}/s/bad/data", change)
    with pytest.raises(BadInput, match="data is missing or damaged"):
        store.local_copy(f"{root}/s/bad")


def test_objects_outside_the_root_are_refused(store, root):
    tails = ("/../elsewhere", "/a/../../elsewhere", "", "x/y")
    elsewhere = ("gs://another/store/x", "/etc/passwd", "file:///etc/passwd")
    for uri in (*(f"{root}{tail}" for tail in tails), *elsewhere):
        for use in (store.read, lambda uri: store.write(uri, b"no")):
            with pytest.raises(BadInput, match="not below"):
                use(uri)


def test_symbolic_link_out_of_the_root_is_refused(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("private")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "link").symlink_to(tmp_path / "secret")
    store = Store(str(tmp_path / "store"), tmp_path / "cache")
    with pytest.raises(BadInput):
        store.read(f"{tmp_path}/store/link/file")


def test_published_name_outside_the_cache_is_refused(tmp_path, bucket):
    root = f"gs://{bucket}/{tmp_path.name}"
    store = Store(root, tmp_path / "cache")
    checksums = {"../../escaped": {"sha256": "0" * 64, "bytes": 1}}
    store.write(f"{root}/s/evil/{CHECKSUMS}", json.dumps(checksums).encode())
    with pytest.raises(BadInput):
        store.local_copy(f"{root}/s/evil")
    assert not (tmp_path / "escaped").exists()


def test_spec_is_read_from_every_kind_of_uri(tmp_path, bucket):
    file = tmp_path / "a spec.json"
    file.write_bytes(b'{"a": "\xcf\x83"}')
    content = file.read_bytes()
    remote = f"gs://{bucket}/{tmp_path.name}"
    Store(remote, tmp_path / "cache").write(f"{remote}/spec.json", content)
    plain = "data:application/json," + content.decode()
    for uri in (str(file), file.as_uri(), f"{remote}/spec.json", data_uri(content), plain):
        assert read_spec(uri) == content


def test_truncated_data_uri_is_refused():
    whole = data_uri(b"{}" * 50)
    assert base64.b64decode(whole.partition(",")[2]) == b"{}" * 50
    with pytest.raises(BadInput, match="base64"):
        read_spec(whole[:-3])
    with pytest.raises(BadInput, match="cannot read the spec"):
        read_spec("/no/such/spec.json")


def test_remote_source_is_staged(tmp_path, bucket):
    root = f"gs://{bucket}/{tmp_path.name}"
    store = Store(root, tmp_path / "cache")
    store.write(f"{root}/notes/a/one.txt", b"1")
    store.write(f"{root}/notes/two.txt", b"2")
    folder = stage_source(f"{root}/notes", tmp_path / "staged", field="private_path")
    assert sorted(f.name for f in folder.rglob("*.txt")) == ["one.txt", "two.txt"]
    file = stage_source(f"{root}/notes/two.txt", tmp_path / "staged", field="private_path")
    assert file.read_bytes() == b"2"
    with pytest.raises(BadInput, match="private_path"):
        stage_source(f"{root}/nothing", tmp_path / "staged", field="private_path")


@pytest.mark.parametrize("name", ["sizes", "get"])
def test_bucket_that_does_not_answer_is_named_without_its_objects(tmp_path, monkeypatch, name):
    def broken(key: str, *_: object) -> None:
        raise OSError(errno.EIO, "the bucket answered ServiceUnavailable") from ValueError("Meier")

    answers = {"sizes": lambda name: {"notes/Meier.txt": 1}, "get": None, name: broken}
    monkeypatch.setattr(backends, "backend_for", lambda uri: SimpleNamespace(**answers))
    with pytest.raises(ConfideError) as refused:
        stage_source("gs://ward/notes", tmp_path, field="private_path")
    assert str(refused.value).startswith("private_path gs://ward/notes: it cannot be read now: the")
    assert refused.value.exit_code == 1 and refused.value.__suppress_context__


def test_keyed_digest_depends_on_key_names_and_content(tmp_path):
    folder = _folder(tmp_path / "notes", {"a": b"1", "b": b"2"})
    first = keyed_digest(folder, b"key")
    assert first == keyed_digest(folder, b"key") != keyed_digest(folder, b"other key")
    (folder / "b").write_bytes(b"3")
    assert keyed_digest(folder, b"key") != first
    (folder / "b").write_bytes(b"2")
    (folder / "b").rename(folder / "c")
    assert keyed_digest(folder, b"key") != first
