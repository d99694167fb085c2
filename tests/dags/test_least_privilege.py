from pathlib import Path

import pytest
from launcher_conformance import JOB

from tasks.protocol.specs import Need, StepSpec
from tasks.protocol.step_classes import _ADAPTER, STEP_CLASSES

CHECKOUT = Path(__file__).resolve().parents[2]


def reads_from_outside(spec: StepSpec) -> bool:
    """Whether a spec names a file that is not an output of an earlier step."""
    named = spec.model_dump(include={"path", "train_path", "test_path", "public_model"})
    return any(named.values())


def test_every_step_has_one_spec_that_declares_its_privileges():
    files = (CHECKOUT / "tasks" / "steps").glob("*_step.py")
    assert {file.stem.removesuffix("_step") for file in files} == set(STEP_CLASSES)
    assert all("privileges" in vars(kind) for kind in STEP_CLASSES.values())


def test_who_reads_files_from_outside_holds_no_seed_and_no_password():
    readers = {name: spec.needs for name, spec in JOB.items() if reads_from_outside(spec)}
    assert set(readers) == {
        *("private_corpus", "public_corpus", "entities"),
        *("checkpoint", "public_pretraining"),
    }
    for name, held in readers.items():
        assert Need.SOURCES in held, name
        assert Need.CHARGING not in held, name


@pytest.mark.parametrize("mode", ["dp", "nonprivate"])
def test_no_hand_made_spec_has_seeds_and_files_from_outside(mode):
    body = JOB["pretraining"].model_dump() | {"mode": mode, "public_model": "/data/model"}
    with pytest.raises(ValueError, match="public_model"):
        _ADAPTER.validate_python(body)


def test_who_reads_no_file_from_outside_is_not_shown_any():
    """The exception is `budget`, which computes digests of the run's files, but parses none."""
    assert JOB["budget"].needs == {Need.SOURCES, Need.CHARGING}
    others = [
        spec for spec in JOB.values() if not reads_from_outside(spec) and spec.step != "budget"
    ]
    assert len(others) > 8
    assert not [spec.step for spec in others if Need.SOURCES in spec.needs]


def test_the_cluster_is_for_steps_that_read_corpora_or_train_and_parse_nothing():
    """Cluster secrets allow code execution where private text is read, so no parser has them."""
    steps = {spec.step for spec in JOB.values() if Need.CLUSTER in spec.needs}
    assert steps == {"vocabulary", "token_store", "pretrain"}
    assert Need.CLUSTER in STEP_CLASSES["phrases"].privileges
    both = {Need.CLUSTER, Need.SOURCES}
    assert not [step for step, kind in STEP_CLASSES.items() if both <= kind.privileges]
