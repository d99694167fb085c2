"""What a step is told and what it answers: versioned, frozen, and light enough for a DAG file.

Imports pydantic and the standard library only, so that Airflow can parse it in milliseconds.
"""

from tasks.protocol.job import (
    budget_of_run,
    dp_bert_steps,
    missing_file,
    sweep_point_steps,
    sweep_report,
)
from tasks.protocol.least_privilege import Need, NoReader, environment_for, needs
from tasks.protocol.result import MetricRecord, ReleaseRecord, StepResult
from tasks.protocol.settings import JobSettings, one_line
from tasks.protocol.specs import (
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
    RunContext,
    SelectSpec,
    Source,
    StepSpec,
    SweepReportSpec,
    TokenStoreSpec,
    VocabularySpec,
    spec_from_json,
)
from tasks.protocol.sweep_settings import SweepPoint, SweepSettings

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
    "Need",
    "NoReader",
    "PretrainSpec",
    "PrivacyPlan",
    "ReleaseRecord",
    "ReportSpec",
    "RunContext",
    "SelectSpec",
    "Source",
    "StepResult",
    "StepSpec",
    "SweepPoint",
    "SweepReportSpec",
    "SweepSettings",
    "TokenStoreSpec",
    "VocabularySpec",
    "budget_of_run",
    "dp_bert_steps",
    "environment_for",
    "missing_file",
    "needs",
    "one_line",
    "spec_from_json",
    "sweep_point_steps",
    "sweep_report",
]
