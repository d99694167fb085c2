import uuid
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from dp_core.cluster.node import make_secrets
from dp_core.cluster.ray_cluster import RayCluster
from dp_core.data.corpus import Document, Shard, documents_of, read_shard, shards_of, write_corpus
from dp_core.errors import BadInput
from tasks import context as contexts
from tasks.context import StepContext, StoredShard
from tasks.protocol.job import job_steps
from tasks.protocol.least_privilege import environment_for, for_workers
from tasks.protocol.messages import StepResult
from tasks.protocol.settings import JobSettings
from tasks.runtime.deployment import Deployment
from tasks.storage.store import RESULT, Store

ADDRESS = "ray-head:6379"


@pytest.fixture
def published(bucket: str, tmp_path: Path) -> tuple[str, list[Shard]]:
    written = [Document(str(i), f"p{i}", f"note {i} of nobody's") for i in range(40)]
    write_corpus(written, tmp_path / "corpus", 4)
    root = f"gs://{bucket}/{uuid.uuid4().hex}"
    Store(root, tmp_path / "cache").publish(tmp_path / "corpus", f"{root}/corpus/x")
    return f"{root}/corpus/x", shards_of(tmp_path / "corpus")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONFIDE_HOME", str(tmp_path / "worker"))
    return tmp_path / "worker"


def of_bucket(published: tuple[str, list[Shard]]) -> list[StoredShard]:
    uri, shards = published
    return [StoredShard(f"{uri}/{shard.name}", shard.sha256, size(shard)) for shard in shards]


def size(shard: Shard) -> int:
    return Path(shard.uri.removeprefix("file://")).stat().st_size


def copies_in(home: Path) -> list[Path]:
    return [file for file in home.rglob("*.parquet") if file.is_file()]


def test_pickled_shard_is_read_from_the_bucket_once(published, home, monkeypatch):
    for local, remote in zip(published[1], of_bucket(published), strict=True):
        arrived = ForkingPickler.loads(bytes(ForkingPickler.dumps(remote)))
        assert list(read_shard(arrived)) == list(read_shard(local))
    assert len(copies_in(home)) == 4
    assert {file.stat().st_mode & 0o077 for file in (home / "cache").iterdir()} == {0}
    monkeypatch.setattr(contexts.Store, "get", None)  # the second read needs no download
    assert list(read_shard(of_bucket(published)[0])) == list(read_shard(published[1][0]))


def test_shards_of_equal_content_share_one_copy(bucket, home, tmp_path):
    write_corpus([Document("1", "p", "x")], tmp_path / "corpus", 8)
    uri = f"gs://{bucket}/{uuid.uuid4().hex}/corpus/x"
    Store(uri.rpartition("/corpus/")[0], tmp_path / "cache").publish(tmp_path / "corpus", uri)
    shards = of_bucket((uri, shards_of(tmp_path / "corpus")))
    assert [d.text for shard in shards for d in read_shard(shard)] == ["x"]
    assert len(copies_in(home)) == len({shard.sha256 for shard in shards}) == 2


def test_damaged_copy_of_a_shard_and_missing_shard_are_refused(published, home):
    (shard, *_) = of_bucket(published)
    list(read_shard(shard))
    (copy,) = copies_in(home)
    copy.write_bytes(copy.read_bytes()[:-1] + b"x")
    with pytest.raises(BadInput, match="damaged"):
        list(read_shard(shard))
    missing = StoredShard(f"{published[0]}/shard-9999.parquet", "0" * 64, 1)
    with pytest.raises(BadInput, match="missing or damaged"):
        list(read_shard(missing))


def test_cache_of_shards_keeps_the_latest_within_its_limit(published, home, monkeypatch):
    shards = of_bucket(published)
    limit = 2 * max(shard.size for shard in shards) + 1
    monkeypatch.setattr(contexts, "SHARD_BYTES", limit)
    for shard in shards:
        list(read_shard(shard))
    left = copies_in(home)
    assert shards[-1].sha256 in {file.parent.name for file in left}
    assert sum(file.stat().st_size for file in left) <= limit
    assert list(read_shard(shards[0]))  # a deleted copy is fetched again


class Bench(StepContext):
    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.store = deployment, deployment.open_store()


def deployment(home: Path, **variables: str) -> Deployment:
    return Deployment.from_environment({"CONFIDE_HOME": str(home), **variables})


@pytest.mark.parametrize("place", ["pool", "in-process", "local:2"])
def test_step_opens_a_corpus_without_downloading_shards(published, tmp_path, home, place):
    uri, shards = published
    context = Bench(deployment(tmp_path, CONFIDE_CLUSTER=place))
    context.store = Store(uri.rpartition("/corpus/")[0], tmp_path / "cache")
    context.made_up, context.releases = False, []
    content = StepResult(step="corpus", outputs={"corpus": uri}, metrics=[], spec_hash="x")
    context.store.write(f"{uri}/{RESULT}", content.model_dump_json().encode())
    corpus = context.input(uri)
    assert [file.name for file in corpus.folder.iterdir()] == ["corpus.json"]
    corpus_shards = context.shards(corpus)
    assert {type(shard) for shard in corpus_shards} == {StoredShard}
    assert [shard.sha256 for shard in corpus_shards] == [shard.sha256 for shard in shards]
    assert len(list(documents_of(corpus_shards))) == 40


def test_step_opens_one_cluster_connection_and_closes_it(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(RayCluster, "close", lambda self: closed.append(self))
    make_secrets(tmp_path / "secrets")
    settings = {"CONFIDE_CLUSTER": ADDRESS, "CONFIDE_CLUSTER_SECRETS": str(tmp_path / "secrets")}
    context = Bench(deployment(tmp_path, **settings))
    context.close()
    assert closed == [], "it was not used"
    cluster = context.cluster
    assert context.cluster is cluster
    context.close()
    assert closed == [cluster]


def test_cluster_without_secrets_is_refused(tmp_path):
    with pytest.raises(BadInput, match="without token and TLS"):
        assert Bench(deployment(tmp_path, CONFIDE_CLUSTER=ADDRESS)).cluster
    settings = {"CONFIDE_CLUSTER": ADDRESS, "CONFIDE_CLUSTER_SECRETS": str(tmp_path)}
    with pytest.raises(BadInput, match="token cannot be read"):
        assert Bench(deployment(tmp_path, **settings)).cluster


def test_local_workers_do_not_receive_the_secrets_of_the_step(tmp_path):
    secret = {
        "CONFIDE_LEDGER": "postgresql://ledger:password@host/ledger",
        "CONFIDE_LEDGER_READER": "postgresql://reader:password@host/ledger",
        "CONFIDE_SEEDS": str(tmp_path / "seeds-of-the-step"),
        "CONFIDE_KEYS": str(tmp_path / "keys-of-the-step"),
        "CONFIDE_TRACKING": "https://user:password@mlflow",
        "CONFIDE_CLUSTER_SECRETS": "/secrets",
        "CONFIDE_MESSAGES": "/messages",
        "CONFIDE_RUN_CONTEXT": "{}",
        "MLFLOW_TRACKING_PASSWORD": "password",
    }
    public = {"CONFIDE_STORE": "gs://bucket/store", "CONFIDE_HOME": str(tmp_path), "PATH": "/bin"}
    received = for_workers(secret | public)
    assert received.items() >= public.items()
    assert set(received) == {*public, "CONFIDE_LEDGER", "CONFIDE_SEEDS", "CONFIDE_KEYS"}
    assert not any(value in received.values() for value in secret.values())
    assert not Deployment.from_environment(received).holds_seeds


def test_only_steps_that_need_the_cluster_receive_its_address():
    settings = {
        "CONFIDE_CLUSTER": ADDRESS, "CONFIDE_CLUSTER_SECRETS": "/secrets", "CONFIDE_HOSTS": "2",
    }  # fmt: skip
    steps = job_steps(JobSettings())
    for name in ("vocabulary", "private_store", "With DP / pretraining"):
        assert environment_for(steps[name], settings, apart=True).items() >= settings.items()
    for name in ("budget", "private_corpus", "report"):
        assert environment_for(steps[name], settings, apart=True).keys().isdisjoint(settings)


@pytest.mark.cases
def test_invalid_number_of_hosts_is_refused(tmp_path, cluster, hosts):
    with pytest.raises(BadInput, match="CONFIDE_HOSTS"):
        deployment(tmp_path, CONFIDE_CLUSTER=cluster, CONFIDE_HOSTS=hosts)
