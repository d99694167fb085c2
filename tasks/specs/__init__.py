"""What a step is told and what it answers: versioned, frozen, and light enough for a DAG file.

Imports pydantic and the standard library only, so that Airflow can parse it in milliseconds.
"""

from tasks.specs.base import RunContext, StepSpec
from tasks.specs.job import dp_bert_steps
from tasks.specs.local_files import missing_file
from tasks.specs.result import MetricRecord, ReleaseRecord, StepResult
from tasks.specs.settings import JobSettings, one_line
from tasks.specs.steps import (
    CAUSAL,
    BudgetSpec,
    CanariesSpec,
    CorpusSpec,
    EntitiesSpec,
    ExposureSpec,
    FinetuneSpec,
    ModelShape,
    PretrainSpec,
    PrivacyPlan,
    ReportSpec,
    SelectSpec,
    SweepReportSpec,
    TokenStoreSpec,
    VocabularySpec,
    spec_from_json,
)
from tasks.specs.sweep import sweep_point_steps, sweep_report
from tasks.specs.sweep_settings import SweepPoint, SweepSettings

__all__ = [
    "CAUSAL",
    "BudgetSpec",
    "CanariesSpec",
    "CorpusSpec",
    "EntitiesSpec",
    "ExposureSpec",
    "FinetuneSpec",
    "JobSettings",
    "MetricRecord",
    "ModelShape",
    "PretrainSpec",
    "PrivacyPlan",
    "ReleaseRecord",
    "ReportSpec",
    "RunContext",
    "SelectSpec",
    "StepResult",
    "StepSpec",
    "SweepPoint",
    "SweepReportSpec",
    "SweepSettings",
    "TokenStoreSpec",
    "VocabularySpec",
    "dp_bert_steps",
    "missing_file",
    "one_line",
    "spec_from_json",
    "sweep_point_steps",
    "sweep_report",
]
