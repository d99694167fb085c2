import json
from pathlib import Path

import pytest
from spec_examples import spec_of
from step_outputs import publish

from dp_core.data.labelled_text import Sentence
from tasks.protocol.specs import FinetuneSpec
from tasks.runtime.deployment import Deployment
from tasks.steps.entities_step import write_items
from tasks.steps.finetune_step import ERRORS, errors_of, task_of

TEST = [
    Sentence(("no", "pain", "today"), ("O", "B-problem", "O"), "n1"),
    Sentence(("quorvathin", "was", "given"), ("B-drug", "O", "O"), "n2"),
]


@pytest.fixture
def tuned(at_home: None, deployment: Deployment, tmp_path: Path) -> str:
    """A fine-tuning whose only prediction is a drug with a wrong boundary."""
    store = deployment.open_store()
    labelled, made = tmp_path / "labelled", tmp_path / "made"
    labelled.mkdir()
    made.mkdir()
    write_items(TEST, labelled / "test.jsonl")
    place = f"store://entities/{'b' * 16}"
    entities = publish(store, place, labelled, head="entities", public=False)
    spec = spec_of(FinetuneSpec, model_uri="model", entities_uri=entities, plan=None)
    predicted = [("O", "O", "O"), ("B-drug", "I-drug", "O")]
    content = {"spec": spec.model_dump(mode="json"), **errors_of(task_of(spec), TEST, predicted)}
    (made / ERRORS).write_text(json.dumps(content))
    return publish(store, f"store://finetune/{'a' * 16}", made, artifacts={ERRORS: "operator"})


def test_errors_are_shown_with_words_of_the_labelled_text(confide, tuned):
    answer = confide.json("errors", "--uri", tuned)
    assert answer["counts"] == {"drug": {"wrong boundary": 1}, "problem": {"missed": 1}}
    assert answer["errors"] == [
        {"document": "n1", "error": "missed", "expected": "problem: pain", "predicted": "–",
         "context": "no pain today"},
        {"document": "n2", "error": "wrong boundary", "expected": "drug: quorvathin",
         "predicted": "drug: quorvathin was", "context": "quorvathin was given"},
    ]  # fmt: skip
    code, out, _ = confide("errors", "--uri", tuned)
    assert code == 0 and "for the operator alone" in out and "quorvathin" in out


def test_output_without_an_error_list_is_refused(confide, tuned):
    for uri in (tuned.replace("a" * 16, "c" * 16), tuned.replace("finetune/" + "a", "entities/b")):
        assert "no list of errors there" in confide.refused("errors", "--uri", uri)
    assert "there is no report yet" in confide.refused("errors")
