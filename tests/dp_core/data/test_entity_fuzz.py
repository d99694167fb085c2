"""Corrupted entity files: sentences, a count in quarantine, or one BadInput; nothing else."""

import gzip
import json
import random
from pathlib import Path

import pytest

from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import read_sentences
from dp_core.errors import BadInput

SECRET = "zyxsecret"
MARKS = [b'"', b"\0", b"\n", b"\t", b"|", b":", b"\xff", b"\r"]
SOURCES = {
    "columns": {"a.tsv": f"Has O\n{SECRET} B-problem\npain I-problem\n\n" * 20},
    "pubtator": {
        "a.txt": "".join(
            f"{i}|t|Has {SECRET} pain.\n{i}|a|It went.\n{i}\t4\t13\t{SECRET}\tDisease\tD\n\n"
            for i in range(20)
        )
    },
    "i2b2": {
        "a.txt": f"Has {SECRET} pain .\n" * 20,
        "a.con": "".join(f'c="{SECRET} pain" {i}:1 {i}:2||t="problem"\n' for i in range(1, 21)),
    },
}


def corrupt(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(data) + 1)
        before, after = data[:at], data[at:]
        data = rng.choice(
            [before, before + rng.choice(MARKS) + after, before + after[rng.randint(1, 30) :]]
        )
    return data


@pytest.mark.parametrize("source", SOURCES)
def test_corrupted_files(tmp_path: Path, source: str) -> None:
    rng = random.Random(source)
    taken = refused = 0
    for _ in range(120):
        for name, text in SOURCES[source].items():
            (tmp_path / name).write_bytes(corrupt(text.encode(), rng))
        q = Quarantine()
        path = tmp_path if source == "i2b2" else tmp_path / next(iter(SOURCES[source]))
        try:
            found = list(read_sentences(source, path, q))
        except BadInput as error:
            refused += 1
            assert SECRET not in str(error)
            assert "\n" not in str(error)
        else:
            taken += 1
            assert len(found) == q.taken > 0
        assert SECRET not in json.dumps(q.summary())
    assert taken > 10
    assert refused > 10


@pytest.mark.parametrize("source", ["columns", "pubtator"])
def test_half_written_packages(tmp_path: Path, source: str) -> None:
    whole = gzip.compress("".join(f"{SECRET}{i * i}\tO\n" for i in range(3000)).encode())
    file = tmp_path / ("a.tsv.gz" if source == "columns" else "a.txt.gz")
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match="half-written"):
        list(read_sentences(source, file))
