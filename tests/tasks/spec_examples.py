"""The smallest valid specs, of which tests change some fields, and a function that runs them."""

import json
from pathlib import Path
from typing import Any, TypeVar

from tasks.execution import contract
from tasks.protocol.specs import ChargedPrivacyConfig, FinetuneSpec, PretrainSpec, StepSpec
from tasks.protocol.step_process import data_uri

Spec = TypeVar("Spec", bound=StepSpec)

_EXAMPLES = json.loads(Path(__file__).with_name("spec_examples.json").read_text())
PLAN = ChargedPrivacyConfig.model_validate(_EXAMPLES["plan"])
_TRAINING = _EXAMPLES["training"] | {"plan": PLAN}


def spec_of(kind: type[Spec], **changes: Any) -> Spec:
    """Return a spec of that kind, of private data, with these fields in place of the defaults."""
    shared = _TRAINING if kind in (PretrainSpec, FinetuneSpec) else {}
    defaults = _EXAMPLES["specs"].get(kind.__name__, {})
    return kind.model_validate({"made_up": False, "seed": 1, **shared, **defaults, **changes})


def run(spec: StepSpec) -> int:
    return contract.main(spec.step, data_uri(spec.model_dump_json().encode()))
