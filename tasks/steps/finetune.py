"""Fine-tune a model for entity extraction, and score it by strict entity F1."""

from __future__ import annotations

from dp_core.bert.weights import save
from dp_core.ner.scoring import score
from dp_core.privacy.labels import Dp, Operator
from dp_core.privacy.units import PrivacyUnit
from dp_core.training.finetune import finetune
from dp_core.vocab import wordpiece
from tasks.charging import record_operator_use
from tasks.specs import FinetuneSpec
from tasks.statements import write_operator_notice, write_statement
from tasks.steps.entities import read_part
from tasks.workbench import Answer, Workbench


def run(spec: FinetuneSpec, bench: Workbench) -> Answer:
    """Train on the training part, tag the test part, score.

    F1 of a released model on public labels is `dp`; of a model without privacy, or on private
    labels (this training adds no noise), it is the operator's.
    """
    model = bench.input(spec.model_uri)
    entities = bench.input(spec.entities_uri)
    if not entities.facts["public"]:
        record_operator_use(
            bench,
            dataset=entities.facts["dataset"],
            unit=PrivacyUnit(entities.facts["unit"]),
            reason="fine-tuning on private labels without privacy",
        )
    releasable = entities.facts["public"] and not model.facts["operator_only"]
    test = read_part(entities.folder, "test")
    outcome = finetune(
        model.folder,
        read_part(entities.folder, "train"),
        test,
        wordpiece.load(model.folder),
        epochs=spec.epochs,
        batch_size=spec.batch_size,
        learning_rate=spec.learning_rate,
        max_length=spec.sequence_length,
        seed=spec.seed,
        device=spec.device,
        # In per cent: how many updates there are says how many sentences.
        progress=lambda done, total: bench.progress(100 * done // total, 100),
    )
    label = Dp if releasable else Operator
    for epoch, loss in enumerate(outcome.losses, 1):
        bench.measure("finetuning_loss", label(loss), epoch)
    scores = score([s.tags for s in test], outcome.predictions)
    bench.measure("f1", label(scores.micro.f1))
    bench.measure("precision", label(scores.micro.precision))
    bench.measure("recall", label(scores.micro.recall))
    for kind, own in scores.by_type.items():
        bench.measure(f"f1/{kind}", label(own.f1))
    save(outcome.model, bench.out, model.folder)
    if releasable:
        write_statement(bench.out, model.result.releases, made_up=bench.made_up)
    else:
        write_operator_notice(bench.out)
    return Answer(
        outputs={"model": ""},
        releases=model.result.releases,
        facts={
            "operator_only": not releasable,
            "entity_types": sorted(scores.by_type) if entities.facts["public"] else [],
        },
    )
