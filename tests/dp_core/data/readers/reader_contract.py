"""Conformance tests of the readers of all formats, which each reader's test class inherits."""

import errno
import gzip
import json
import lzma
import os
import random
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from corruption import corrupted

from dp_core.data.readers import registry
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput

SECRET = "zyxsecret"  # represents the text of a note
NAME = "doe_john_1961"  # a file may be named after a patient
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".xz": lzma.compress,
}


class BadItem(NamedTuple):
    files: dict[str, bytes]
    reason: Reason
    where: str
    kept: int  # number of usable items


def raw_bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _reader(readers: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def read(
        format: str, path: Path, quarantine: Quarantine | None = None, **fields: Any
    ) -> Iterator[Any]:
        quarantine = Quarantine() if quarantine is None else quarantine
        return registry.read_source(readers(**fields), format, path, quarantine)

    return read


read_corpus, read_sentences = map(_reader, (registry.corpus_readers, registry.sentence_readers))
read_labelled_texts = _reader(registry.labelled_text_readers)


def reader_of(format: str) -> Callable[..., Iterator[Any]]:
    if format == "tsv":
        return read_labelled_texts
    if format in registry.sentence_readers():
        return read_sentences
    # Only public text may hold many documents in one file.
    return partial(read_corpus, public=format == "text")


def read_format(
    format: str, path: Path, share: float = 1.0, **fields: Any
) -> tuple[list[Any], Quarantine]:
    quarantine = Quarantine(share)
    return list(reader_of(format)(format, path, quarantine, **fields)), quarantine


def _socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(file.parent)  # a socket's path is short
        try:
            made.bind(file.name)
        finally:
            os.chdir(here)


def _outside(file: Path) -> Path:
    folder = file.parents[1] / "outside"
    folder.mkdir(exist_ok=True)
    (folder / "note.txt").write_text("good")
    return folder


STRANGE: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "endless": lambda p: p.symlink_to("/dev/zero"),
    "dangling": lambda p: p.symlink_to("nowhere"),
    "linked file": lambda p: p.symlink_to(_outside(p) / "note.txt"),
    "linked folder": lambda p: p.symlink_to(_outside(p)),
    "linked within": lambda p: p.symlink_to(next(f for f in p.parent.iterdir() if f.is_file())),
    "loop": lambda p: p.symlink_to(p.name),
}


class ReaderContract:
    """Only files and folders of bounded size are read, and no error quotes private text."""

    FORMAT: ClassVar[str]
    SUFFIX: ClassVar[str]
    GOOD: ClassVar[str | bytes]  # content of a file with one item
    MANY: ClassVar[str | bytes]  # content with many items, SECRET in each
    BESIDE: ClassVar[tuple[str, str]] = ("", "")  # suffix and content of a second file
    BAD_ITEMS: ClassVar[Sequence[BadItem]]

    def write(self, folder: Path, name: str, content: str | bytes, packing: str = "") -> Path:
        """Write a file of the format; return the path to read: the file, or a folder of several."""
        folder.mkdir(exist_ok=True)
        raw = raw_bytes(content)
        file = folder / f"{name}{self.SUFFIX}{packing}"
        file.write_bytes(PACKERS[packing](raw))
        suffix, beside = self.BESIDE
        if suffix:
            (folder / f"{name}{suffix}").write_text(beside if content == self.MANY else "")
            return folder
        return file

    def source(self, top: Path) -> Path:
        self.write(top / "source", "good", self.GOOD)
        return top / "source"

    @pytest.mark.parametrize("packing", PACKERS)
    def test_a_file_or_a_folder_plain_or_packed(self, tmp_path, packing):
        path = self.write(tmp_path / "source", "n", self.MANY, packing)
        items, quarantine = read_format(self.FORMAT, path)
        assert items == read_format(self.FORMAT, path.parent if path.is_file() else path)[0]
        plain = read_format(self.FORMAT, self.write(tmp_path / "plain", "n", self.MANY))[0]
        assert items == plain
        assert (quarantine.taken, quarantine.rejected) == (len(items), 0)
        assert len(items) > 9

    def test_each_bad_item_is_counted_with_its_location(self, tmp_path):
        for number, bad_item in enumerate(self.BAD_ITEMS):
            source = tmp_path / f"{number}"
            source.mkdir()
            for name, content in bad_item.files.items():
                (source / name).write_bytes(content)
            items, quarantine = read_format(self.FORMAT, source)
            assert len(items) == bad_item.kept
            assert quarantine.counts == {bad_item.reason: 1}
            assert quarantine.locations == {bad_item.reason: [bad_item.where]}
            with pytest.raises(BadInput, match=str(bad_item.reason)) as refusal:
                read_format(self.FORMAT, source, share=0.05)
            assert SECRET not in str(refusal.value) + json.dumps(quarantine.summary())

    @pytest.mark.parametrize("content", ["", "\n", "\n \n"], ids=range(3))
    def test_nothing_to_read_is_refused(self, tmp_path, content):
        with pytest.raises(BadInput, match=r"nothing to read|no text|a header lacks"):
            read_format(self.FORMAT, self.write(tmp_path / "source", "n", content))

    @pytest.mark.parametrize("packing", PACKERS)
    def test_corrupted_files_are_read_counted_or_refused(self, tmp_path, packing):
        rng, refused = random.Random(f"{self.FORMAT}{packing}"), 0
        pack = PACKERS[packing]
        for _ in range(60):
            path = self.write(tmp_path, "n", self.MANY, packing)
            raw = raw_bytes(self.MANY)
            inside = rng.random() < 0.5  # corrupt the content, or the package
            data = pack(corrupted(raw, rng)) if inside else corrupted(pack(raw), rng)
            (tmp_path / f"n{self.SUFFIX}{packing}").write_bytes(data)
            if self.BESIDE[0] and rng.random() < 0.5:
                beside = corrupted(self.BESIDE[1].encode(), rng)
                (tmp_path / f"n{self.BESIDE[0]}").write_bytes(beside)
            quarantine = Quarantine()
            try:
                items = list(reader_of(self.FORMAT)(self.FORMAT, path, quarantine))
            except BadInput as error:
                refused += 1
                assert SECRET not in str(error)
                assert "\n" not in str(error)
            else:
                assert len(items) == quarantine.taken > 0
            assert SECRET not in json.dumps(quarantine.summary())
        assert refused > 6
        assert refused < 60 or self.FORMAT == "parquet"  # whose pages fit together or not at all

    @pytest.mark.parametrize("packing", [".gz", ".xz"])
    def test_a_half_written_package_is_refused_and_not_named(self, tmp_path, packing):
        self.write(tmp_path, NAME, self.MANY)
        (tmp_path / f"{NAME}{self.SUFFIX}").unlink()
        whole = PACKERS[packing](raw_bytes(self.MANY))
        (tmp_path / f"{NAME}{self.SUFFIX}{packing}").write_bytes(whole[: len(whole) // 2])
        quarantine = Quarantine()
        with pytest.raises(BadInput, match="half-written") as refusal:
            list(reader_of(self.FORMAT)(self.FORMAT, tmp_path, quarantine))
        assert NAME not in str(refusal.value)
        assert SECRET not in str(refusal.value)
        assert refusal.value.__cause__ is None
        assert [NAME in place for place in quarantine.locations[Reason.UNREADABLE]] == [True]

    @pytest.mark.parametrize("kind", STRANGE)
    def test_a_link_or_pipe_or_device_refuses_the_source(self, tmp_path, kind):
        source = self.source(tmp_path)
        STRANGE[kind](source / f"{NAME}{self.SUFFIX}")
        with pytest.raises(BadInput, match="a link, a pipe or a device") as refusal:
            read_format(self.FORMAT, source)
        assert NAME not in str(refusal.value)
        listed = str(refusal.value).split("`")[-2]  # the command with which the operator finds it
        result = subprocess.run(["sh", "-c", listed], capture_output=True, text=True, check=True)
        assert NAME in result.stdout
        assert result.stdout.count("\n") == 1

    @pytest.mark.parametrize("call", ["scandir", "open"])
    def test_a_folder_or_file_that_may_not_be_read_refuses_the_source(
        self, tmp_path, monkeypatch, call
    ):
        source, allowed = self.source(tmp_path), getattr(os, call)
        bad = source / NAME
        if call == "scandir":
            bad.mkdir()
        else:
            self.write(source, NAME, self.GOOD)
            bad = bad.with_suffix(self.SUFFIX)

        def denied(path: str | Path, *how: int) -> object:
            if Path(path) == bad:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return allowed(path, *how)

        monkeypatch.setattr(os, call, denied)
        quarantine = Quarantine()
        with pytest.raises(BadInput, match=r"a folder in it may not be read|unreadable") as refusal:
            list(reader_of(self.FORMAT)(self.FORMAT, source, quarantine))
        assert NAME not in str(refusal.value)
        if call == "open":
            assert quarantine.locations[Reason.UNREADABLE] == [bad.name]

    @pytest.mark.parametrize("is_folder", [True, False])
    def test_a_name_that_is_not_utf_8_refuses_the_source(self, tmp_path, is_folder):
        source = self.source(tmp_path)
        name = os.fsencode(source) + b"/caf\xe9"
        try:
            if is_folder:
                os.mkdir(name)  # noqa: PTH102 - bytes
            else:
                os.close(os.open(name + b".md", os.O_CREAT | os.O_WRONLY))
        except OSError:
            pytest.skip("this file system holds UTF-8 names alone")
        with pytest.raises(BadInput, match="a name in it is not UTF-8") as refusal:
            read_format(self.FORMAT, source)
        assert "caf" not in str(refusal.value)
        str(refusal.value).encode()

    @pytest.mark.parametrize("name", ["missing", "x" * 300, "x/" * 3000, "a\0b"], ids=range(4))
    def test_a_missing_path_is_refused(self, tmp_path, name):
        with pytest.raises(BadInput, match="no such file or folder"):
            read_format(self.FORMAT, tmp_path / name)

    def test_a_folder_without_a_file_of_the_format_is_refused(self, tmp_path):
        with pytest.raises(BadInput, match=rf"the folder has no \{self.SUFFIX}"):
            read_format(self.FORMAT, tmp_path)

    def test_files_of_another_kind_are_listed(self, tmp_path):
        source = self.source(tmp_path)
        (source / "deep").mkdir()
        (source / "deep" / "note.text").write_text("a patient's, misnamed")
        items, quarantine = read_format(self.FORMAT, source)
        assert len(items) == 1
        assert quarantine.summary()["locations_passed_over"] == ["deep/note.text"]
        assert (quarantine.rejected, quarantine.passed_over) == (0, 1)
