"""Train a secret random number of randomly drawn candidates, and release only the best model.

The selection follows Papernot and Steinke 2022 (arXiv:2110.03620), and is charged as
`RandomCountSelection`. The number of trainings, and all models but the best, must stay hidden: this
step reports no progress, and its duration is not recorded. The score is accuracy on public text, so
a training with its score is as private as the training.
"""

from __future__ import annotations

from dataclasses import dataclass

from dp_core.errors import BadInput
from dp_core.labels import Dp, Operator
from dp_core.models.hugging_face import load
from dp_core.models.parameters import Bert, language_model
from dp_core.privacy.mechanisms import RandomCountSelection
from dp_core.privacy.private_selection import draw_candidate, draw_count, training_seed
from dp_core.training.loop import PrivateUpdates, train
from dp_core.training.objectives import objective_for
from dp_core.vocabulary import tokenizer_files
from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import PretrainSpec, SelectSpec
from tasks.releases.charge import charge, planned_release, training_plan
from tasks.releases.manifest import manifest, weights_released
from tasks.releases.provenance import private_units
from tasks.runtime.log import silence
from tasks.steps.training_files import (
    TrainingInputs,
    held_out,
    model_facts,
    private_parts,
    score,
    write_model,
)
from tasks.storage.store import sha256_of


@dataclass(frozen=True)
class _Trained:
    """One training's model and score; equal scores are ordered by the weights."""

    candidate: int  # −1 if no training was run
    model: Bert
    score: float

    @property
    def rank(self) -> tuple[float, bytes]:
        return self.score, weights_released(self.model.parameters)


def run(spec: SelectSpec, context: StepContext) -> StepOutput:
    """Reserve one release, draw the number and the candidates, train, keep the best, settle."""
    first = spec.candidates[0]
    inputs = TrainingInputs.open(first, context)
    units = private_units(inputs.rows)
    plans = [training_plan(candidate, units.max_examples_per_unit) for candidate in spec.candidates]
    public = held_out(inputs.public)
    if public is None:
        raise BadInput("no public text was held out to choose by", where="select")
    assert inputs.initial is not None  # noqa: S101 - every candidate names it
    planned = planned_release(spec)
    content = manifest(
        kind="select",
        store=inputs.rows.facts["digest"],
        vocabulary=inputs.vocabulary.facts["digest"],
        initial=sha256_of(inputs.initial.folder / "model.safetensors"),
        candidates={str(i): plan.to_json() for i, plan in enumerate(plans)},
        training_configs={str(i): c.training.identity() for i, c in enumerate(spec.candidates)},
        event=planned.event.to_json(),  # the distribution of numbers and candidates
        seed=first.seed,
        device=first.device,
        dtype=first.training.precision,
    )
    charged = charge(context, units, planned, content=content)
    # The rows may be read only after the charge.
    store, event = inputs.train_store(first, context), charged.entry.event
    assert isinstance(event, RandomCountSelection)  # noqa: S101 - as reserved
    words = tokenizer_files.continuation_tokens(tokenizer_files.load(inputs.vocabulary.folder))
    start = language_model(load(inputs.initial.folder))

    def trained(number: int) -> _Trained:
        drawn = draw_candidate(event, charged.seed, number)
        candidate = spec.candidates[drawn]
        model = train(
            start,
            objective_for(start.config, words if candidate.training.whole_words else None),
            store=store,
            updates=PrivateUpdates(plans[drawn], training_seed(charged.seed, number), content),
            config=candidate.training,
            seed=candidate.seed,
            checkpoints=context.checkpoints(f"selection-{charged.entry.id}-{number}"),
            device=candidate.device,
        )  # without progress, which would reveal the number of trainings
        return _Trained(drawn, model, score(model, public, candidate.seed)[1])

    with silence():  # TensorFlow's warnings would reveal the number of trainings
        trainings = map(trained, range(draw_count(event, charged.seed)))
        best = max(trainings, key=lambda training: training.rank, default=None)
        if best is None:  # K = 0: an output that does not depend on the data
            best = _Trained(-1, start, score(start, public, first.seed)[1])
    record = charged.settle(weights_released(best.model.parameters))
    context.measure("mlm_accuracy_public", Dp(best.score))
    for name, private in private_parts(inputs.private, first.development_share).items():
        with silence():  # TensorFlow's warnings depend on the number of earlier traces
            _, accuracy = score(best.model, private, first.seed)
        context.measure(f"mlm_accuracy_{name}", Operator(accuracy))
    write_model(context, best.model, inputs.vocabulary)
    shown = max(best.candidate, 0)
    return StepOutput(
        outputs={"model": ""},
        facts={
            "mode": "dp",
            "public_documents": False,
            "chosen": _point(spec.candidates[shown]) if best.candidate >= 0 else None,
            **model_facts(
                context,
                best.model,
                inputs.vocabulary,
                plans[shown],
                record.epsilon,
                spec.candidates[shown].training,
            ),
        },
        model=f"confide-{units.dataset}",
    )


def _point(spec: PretrainSpec) -> dict[str, float]:
    assert spec.plan is not None  # noqa: S101 - narrows the type
    return {
        "noise_multiplier": spec.plan.noise_multiplier or 0.0,
        "batch_size": spec.batches.batch_size,
        "epochs": round(spec.updates * spec.batches.batch_size / spec.plan.declared_units, 3),
    }
