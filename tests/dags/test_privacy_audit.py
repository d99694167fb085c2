import pytest
from airflow.sdk.exceptions import AirflowFailException

from tasks.protocol.specs import Need

FILES = {"given_members": "/in.txt", "given_held_out": "/out.txt"}


@pytest.fixture
def plan(dags):
    (task,) = dags["privacy_audit"].tasks
    return lambda **params: task.plan(params, None)["privacy_audit"]


def test_a_model_of_the_store_is_an_input_and_a_folder_a_source(plan):
    of_run = plan(audited_model="store://pretrain/0123456789abcdef", **FILES)
    assert of_run.model_uri == "store://pretrain/0123456789abcdef"
    assert [source.field for source in of_run.sources] == ["given_members", "given_held_out"]
    of_others = plan(audited_model="/models/x", given_canaries="/c.txt")
    assert of_others.model_uri == ""
    assert [source.field for source in of_others.sources] == ["audited_model", "given_canaries"]
    assert not of_others.made_up and not any(source.public for source in of_others.sources)


def test_who_reads_strangers_files_holds_neither_ledger_nor_seeds(plan):
    assert plan(audited_model="/models/x", **FILES).needs == {Need.SOURCES}


@pytest.mark.cases
def test_audit_without_canaries_and_texts_is_refused_in_one_line(plan, params, words):
    with pytest.raises(AirflowFailException, match=words) as refused:
        plan(**params)
    assert "\n" not in str(refused.value)
