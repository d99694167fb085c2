import json
from pathlib import Path

import pytest
from spec_examples import run, spec_of
from step_outputs import output_folder

from dp_core.data.corpus import open_corpus
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.protocol.specs import CorpusSpec
from tasks.runtime.deployment import Deployment
from tasks.steps import corpus_step
from tasks.storage.store import Store

SHARD = "shard-0002.parquet"


@pytest.fixture
def spec(deployment: Deployment, at_home: None, no_mlflow: None, tmp_path: Path) -> CorpusSpec:
    Ledger.open(deployment.ledger).register_dataset("ward", PrivacyUnit.PATIENT, 8.0, 1e-5)
    rows = [{"patient_id": f"p{i}", "document_id": str(i), "text": f"note {i}"} for i in range(40)]
    source = tmp_path / "ward.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = spec_of(
        CorpusSpec, role="private", format="jsonl", path=str(source),
        dataset="ward", corpus_shards=4,
    )  # fmt: skip
    assert run(made) == 0
    return made


def folder(spec: CorpusSpec) -> Path:
    return output_folder(Deployment.from_environment(), spec.output)


@pytest.mark.parametrize("harm", ["missing", "altered", "of another length"])
def test_repeated_step_remakes_only_the_damaged_shard(spec, deployment, harm, monkeypatch):
    before = {f.name: (f.read_bytes(), f.stat().st_ino) for f in folder(spec).iterdir()}
    shard = folder(spec) / SHARD
    good = before[SHARD][0]
    shard.unlink()
    if harm != "missing":
        shard.write_bytes(good[:-1] + (b"" if harm == "of another length" else b"!"))
    assert Store(deployment.store, deployment.cache).damaged(spec.output) == [SHARD]
    assert run(spec) == 0
    assert {f.name for f in folder(spec).iterdir()} == set(before)
    for name, (content, inode) in before.items():
        assert (folder(spec) / name).read_bytes() == content
        assert name == SHARD or (folder(spec) / name).stat().st_ino == inode
    assert len(list(open_corpus(folder(spec)))) == 40
    monkeypatch.setattr(corpus_step, "remake_shards", None)
    assert run(spec) == 0  # nothing is remade in an intact corpus


def test_no_shard_is_remade_from_a_changed_source(spec, capsys):
    (folder(spec) / SHARD).unlink()
    with Path(spec.path).open("a") as source:
        source.write("\n")
    assert run(spec) == 2
    assert "have changed since" in capsys.readouterr().err
    assert not (folder(spec) / SHARD).exists()


def test_damaged_corpus_index_is_refused(spec, capsys):
    (folder(spec) / "corpus.json").write_text("{}")
    assert run(spec) == 2
    assert capsys.readouterr().err.count("\n") == 1
