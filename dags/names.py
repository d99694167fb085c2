"""What tasks are called on the pages of Airflow; logs, links and MLflow keep to their ids."""

from __future__ import annotations

NAMES = {
    "settings": "Check the settings",
    "grid": "Lay out the grid",
    "budget": "Reserve the privacy budget",
    "private_corpus": "Read private notes",
    "public_corpus": "Read public text",
    "entities": "Read labelled sentences",
    "checkpoint": "Read a public model's tokens",
    "vocabulary": "Learn the vocabulary (ε_V)",
    "canaries": "Draw canaries",
    "private_store": "Tokenise private notes",
    "public_store": "Tokenise public text",
    "public_pretraining": "Pre-train: public",
    "dp_pretraining": "Pre-train: private (ε_T)",
    "nonprivate_pretraining": "Pre-train: no privacy",
    "public_finetuning": "F1: public",
    "dp_finetuning": "F1: private",
    "nonprivate_finetuning": "F1: no privacy",
    "public_exposure": "Exposure: public",
    "dp_exposure": "Exposure: private",
    "nonprivate_exposure": "Exposure: no privacy",
    "points_that_failed": "Points that failed",
    "report": "Write the report",
    "events": "What has been announced",
    "job": "Check the announcement",
    "train": "Start dp_bert",
}
