"""The graph that the DAGs of a job and of a sweep share: all steps before the private trainings.

It reads from top to bottom like the method section of Hoory et al. 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from airflow.sdk import BaseOperator, TriggerRule, task_group

from dags.launcher import TRAINING, Plan, step

BY_POINT = "{{ point_name }}"
DESCRIPTIONS = {  # of the steps that train or measure one model
    "pretraining": "Trains a model with DP-SGD, which is **charged: ε_T**, or a model to compare.",
    "finetuning": "Fine-tunes the model on labels and scores it.",
    "exposure": "Measures how well the model remembers its canaries.",
    "membership": "Attacks the model by membership inference.",
}


@dataclass(frozen=True)
class Front:
    """The tasks of the front half that later tasks wait for."""

    reserve: BaseOperator
    entities: BaseOperator
    private_store: BaseOperator
    public_store: BaseOperator
    public_pretraining: BaseOperator
    phrases_pretraining: BaseOperator


def front_half(
    first: Any, plan: Plan, plan_of_run: Plan, public_point: Mapping[str, Any] | None = None
) -> Front:
    """Draw the steps before the private trainings.

    Args:
        first: the task that checks the settings.
        plan: function from the run's parameters to the specs of these steps.
        plan_of_run: likewise for `budget` and `reserve`, which are about all models of the run.
        public_point: the point of the public model in a sweep.
    """
    light, of_run = partial(step, plan=plan), partial(step, plan=plan_of_run)
    training = partial(light, pool=TRAINING)

    # A run that does not fit its budget is refused before anything is read.
    budget = of_run("budget", doc_md="Records the sources; **refuses a run over the budget.**")

    # The data: confidential notes, public text, and labelled text.
    private_corpus = light("private_corpus", doc_md="Reads the notes and groups them by unit.")
    public_corpus = light("public_corpus", doc_md="Reads public text, which needs no privacy.")
    entities = light("entities", doc_md="Reads labelled text for training and test.")
    checkpoint = light("checkpoint", doc_md="Reads the tokens to keep from a public model.")
    sources = [private_corpus, public_corpus, entities, checkpoint]
    first >> budget >> sources

    # The whole run is charged only after text and labels have been read and checked.
    reserve = of_run(
        "reserve",
        trigger_rule=TriggerRule.NONE_FAILED,  # labels and checkpoint are optional
        doc_md="Registers all releases together: **either all of them fit, or the run ends.**",
    )
    sources >> reserve

    # The vocabulary consists of public words, which are free, and of private words that public
    # text lacks, chosen by noised counts: the first release (ε_V). Alternatively, the tokens of a
    # public model are kept.
    vocabulary = light(
        "vocabulary",
        doc_md="Learns tokens from public words and noised counts of private words. "
        "**Charged: ε_V.**",
    )
    reserve >> vocabulary

    # Canaries are drawn after the vocabulary, so that they cannot influence it, and are planted
    # by unit.
    canaries = light("canaries", doc_md="Draws canaries from the vocabulary with public coins.")
    private_store = light("private_store", doc_md="Writes private rows of tokens with canaries.")
    public_store = light("public_store", doc_md="Writes public rows of token ids.")
    vocabulary >> canaries >> private_store
    [vocabulary, public_corpus] >> public_store

    # Phrases that many units share, and text written from them, are optional and another release
    # (ε_P).
    phrases = light("phrases", doc_md="Counts phrases in rounds with noise. **Charged: ε_P.**")
    written_text = light(
        "written_text", doc_md="Writes text from released phrases, at no further privacy cost."
    )
    phrases_store = light("phrases_store", doc_md="Writes rows of tokens of the written text.")
    canaries >> phrases >> written_text >> phrases_store

    # Pre-training begins with public text, and continues on the written text.
    public_pretraining = training(
        "public_pretraining", point=public_point, doc_md="Trains the language model on public text."
    )
    phrases_pretraining = training(
        "phrases_pretraining", doc_md="Continues the training on the written text."
    )
    [public_store, private_store] >> public_pretraining
    [public_pretraining, phrases_store] >> phrases_pretraining
    return Front(
        reserve, entities, private_store, public_store, public_pretraining, phrases_pretraining
    )


def each_point(
    group: str,
    points: Any,
    plan: Plan,
    *names: str,
    training: str = "",
    rule: TriggerRule = TriggerRule.ALL_SUCCESS,
) -> Any:
    """Draw a mapped group of tasks that train or measure one model, and expand it over points.

    Args:
        group: name of the group.
        points: output of the task that lists the points.
        plan: function from the run's parameters to the specs of a point's steps.
        names: names of the measurements of each point.
        training: name of the training that precedes the measurements; empty if there is none.
        rule: trigger rule of the first tasks of the group.
    """

    @task_group(group_id=group)
    def of_point(coordinates: dict[str, Any]) -> None:
        def task_of(name: str, rule: TriggerRule) -> BaseOperator:
            return step(
                name,
                plan=plan,
                pool=TRAINING,
                point=coordinates,
                map_index_template=BY_POINT,
                trigger_rule=rule,
                doc_md=DESCRIPTIONS[name.removeprefix("dp_")],
            )

        if training:
            model = task_of(training, rule)
            for name in names:
                model >> task_of(name, TriggerRule.ALL_SUCCESS)
        else:
            for name in names:
                task_of(name, rule)

    return of_point.expand(coordinates=points)
