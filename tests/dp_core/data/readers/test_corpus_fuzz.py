"""Corrupted corpora: a document, a count in quarantine, or one BadInput; never anything else."""

import gzip
import json
import lzma
import random
from pathlib import Path

import pytest

from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import read_corpus
from dp_core.errors import BadInput

SECRET = "zyxsecret"
ROWS = [{"text": f"{SECRET} note {i}\nline", "patient_id": i % 5} for i in range(30)]
CSV_ROWS = [f'{i},{i % 5},1,,"{SECRET} note ""{i}""\nline"\n' for i in range(30)]
SOURCES = {
    "jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "noteevents": "ROW_ID,SUBJECT_ID,HADM_ID,ISERROR,TEXT\n" + "".join(CSV_ROWS),
    "text": f"{SECRET} one\n = Title = \ntwo\n" * 10,
}
SUFFIX = {"jsonl": ".jsonl", "noteevents": ".csv", "text": ".txt"}
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


MARKS = [b'"', b"\0", b"\n", b"\r", b"\\", b"\xef\xbb\xbf"]


def corrupt(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        before, after = data[:at], data[at:]
        noise = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
        data = rng.choice(
            [
                before,
                before + noise + after,
                before + after[rng.randint(1, 40) :],
                before + rng.choice(MARKS) + after,
                before + after[:200] * 3 + after,
            ]
        )
    return data


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("packing", PACKERS)
def test_corrupted_files(tmp_path: Path, source: str, packing: str) -> None:
    rng = random.Random(f"{source}{packing}")
    file = tmp_path / f"n{SUFFIX[source]}{packing}"
    refused = 0
    for _ in range(40):
        raw = SOURCES[source].encode()
        inside = rng.random() < 0.5  # corrupt what is packed, or the package
        data = (
            PACKERS[packing](corrupt(raw, rng)) if inside else corrupt(PACKERS[packing](raw), rng)
        )
        file.write_bytes(data)
        q = Quarantine()
        try:
            taken = len(list(read_corpus(source, file, q)))
        except BadInput as error:
            refused += 1
            assert SECRET not in str(error)
            assert "\n" not in str(error)
        else:
            assert taken == q.taken > 0
        assert SECRET not in json.dumps(q.summary())
    assert 0 < refused < 40
