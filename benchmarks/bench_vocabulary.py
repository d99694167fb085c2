"""Vocabularies by source: how they fit private and public text, and what models make of them.

    python benchmarks/bench_vocabulary.py made-up [--patients 2000] [--epsilons 1,3,8] [--fit-only]
    CONFIDE_DATA=folder python benchmarks/bench_vocabulary.py real-text

One job for each source and ε of the vocabulary, everything else alike, by the steps of `dp_bert`;
the trainings are short, and their figures there to be compared with each other. Sources that
release nothing have one row. Each row is written into benchmarks/results/vocabulary.json as soon as
it is there, and a row that is there is not measured again: whoever stops this can go on.

`real-text`: clinical notes of a thousand patients and WikiText-2 as public text, entities of
BC5CDR, from the folders `noteevents_format`, `wikitext-2` and `ner_bc5cdr` of CONFIDE_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CONFIDE_TRACKING"] = "http://127.0.0.1:9"  # no tracker is needed

from dp_core.privacy.ledger import Ledger
from tasks.protocol import JobSettings, RunContext, StepResult, dp_bert_steps
from tasks.releases.declarations import declare_public
from tasks.report.results import totals
from tasks.runtime import step as contract
from tasks.runtime.deployment import Deployment

RESULT = ROOT / "benchmarks" / "results" / "vocabulary.json"
SOURCES = ("private", "public", "public+private", "nonprivate")
CHARGED = ("private", "public+private")
ALIKE: dict[str, Any] = {  # short trainings
    "nonprivate": False, "device": "cpu", "public_steps": 300, "epochs": 4, "finetune_epochs": 2,
    "vocabulary_delta": 1e-6, "canary_patterns": "HS", "canaries_per_group": 1,
}  # fmt: skip
FIT = ("coverage", "fertility", "unknown_words")
SKIPPED = ("public_exposure", "dp_exposure", "report", "budget")
TRAINED = ("entities", "public_pretraining", "dp_pretraining", "public_finetuning", "dp_finetuning")


def made_up(patients: int) -> dict[str, Any]:
    """Return the settings of the demo's made-up notes."""
    return {"synthetic_patients": patients, "declared_units": patients, "batch_size": 256}


def real_text(data: Path) -> dict[str, Any]:
    """Return the settings of clinical notes, WikiText-2 and BC5CDR."""
    preset = json.loads((ROOT / "tasks" / "presets" / "real-text.json").read_text())
    return preset | {
        "private_path": str(data / "noteevents_format" / "NOTEEVENTS_derived.csv.xz"),
        "public_path": str(data / "wikitext-2" / "train.txt.xz"),
        "entities_train": str(data / "ner_bc5cdr" / "train.tsv"),
        "entities_test": str(data / "ner_bc5cdr" / "test.tsv"),
        "max_examples_per_unit": 8,
    }


def measured(settings: JobSettings, left_out: tuple[str, ...]) -> dict[str, Any]:
    """Run the job in a deployment of its own; return what its steps measured."""
    with tempfile.TemporaryDirectory() as home:
        deployment = Deployment.from_environment({"CONFIDE_HOME": home, **_tracking()})
        deployment.prepare()
        ledger = Ledger.open(deployment.ledger)
        if settings.private_format != "synthetic":
            ledger.register_made_up(settings.private_dataset)  # public: it has no budget
            for path in (settings.private_path, settings.public_path, settings.entities_train,
                         settings.entities_test):  # fmt: skip
                declare_public(path, deployment, known_private=True)
        results: dict[str, StepResult] = {}
        for task, spec in dp_bert_steps(settings, deployment.store).items():
            if task not in left_out:
                who = RunContext(run_key="bench", run_name="bench", task=task)
                results[task] = contract.run_step(spec, deployment, who)
        return _row(results)


def _tracking() -> dict[str, str]:
    return {"CONFIDE_TRACKING": os.environ["CONFIDE_TRACKING"]}


def _row(results: dict[str, StepResult]) -> dict[str, Any]:
    last = {task: {m.name: m.value for m in result.metrics} for task, result in results.items()}
    vocabulary = results["vocabulary"]
    row: dict[str, Any] = {
        "tokens": vocabulary.facts["vocabulary_size"],
        "words_released": vocabulary.facts["words_released"],
        "threshold": vocabulary.facts.get("threshold"),
    }
    for role in ("public", "private"):
        row |= {f"{name}_{role}": last[f"{role}_store"].get(name) for name in FIT}
    if "dp_finetuning" not in results:
        return row
    for model in ("public", "dp"):
        for role in ("public", "private"):
            row[f"{model}_mlm_{role}"] = last[f"{model}_pretraining"].get(f"mlm_accuracy_{role}")
        row[f"{model}_f1"] = last[f"{model}_finetuning"].get("f1")
    total = totals(results["dp_pretraining"].releases)
    row["epsilon"] = str(total[0].epsilon) if total else "0"
    return row


def main() -> None:
    """Measure the rows that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=["made-up", "real-text"])
    parser.add_argument("--patients", type=int, default=2000)
    parser.add_argument("--epsilons", default="1,3,8")
    parser.add_argument("--sources", default=",".join(SOURCES))
    parser.add_argument("--minutes", type=float, default=600, help="begin no row after this time")
    parser.add_argument("--fit-only", action="store_true", help="train nothing")
    told = parser.parse_args()
    left_out = (*SKIPPED, *TRAINED) if told.fit_only else SKIPPED
    base = (
        made_up(told.patients) if told.data == "made-up"
        else real_text(Path(os.environ["CONFIDE_DATA"]))
    )  # fmt: skip
    name = f"made-up, {told.patients} patients" if told.data == "made-up" else "real text"
    started = time.monotonic()
    for epsilon in told.epsilons.split(","):
        for source in told.sources.split(","):
            key = f"{name} · {source}" + (f" · ε_V {epsilon}" if source in CHARGED else "")
            known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
            done = key in known and (told.fit_only or "dp_f1" in known[key])
            if done or time.monotonic() - started > 60 * told.minutes:
                continue
            changes = {"vocabulary_source": source, "vocabulary_epsilon": float(epsilon)}
            begun = time.monotonic()
            row = measured(JobSettings.model_validate(ALIKE | base | changes), left_out)
            known[key] = row | {"seconds": round(time.monotonic() - begun)}
            RESULT.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
            print(key, json.dumps(known[key]), flush=True)


if __name__ == "__main__":
    main()
