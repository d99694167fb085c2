"""What a step is told and what it answers: versioned, frozen, and light enough for a DAG file.

Imports pydantic, `dp_core.config` and the standard library only, so that Airflow can parse it in
milliseconds.
"""

from dp_core.config.black_box import BlackBoxAuditConfig
from dp_core.config.fields import one_line
from tasks.protocol.job import (
    budget_of_run,
    dp_bert_steps,
    missing_file,
    privacy_audit_spec,
    promote_spec,
    sweep_point_steps,
    sweep_report,
    sweep_steps,
    sweep_training,
)
from tasks.protocol.least_privilege import Need, NoReader, environment_for, needs
from tasks.protocol.promotion import Promotion, promotion
from tasks.protocol.result import EXACT_WORDS, MetricRecord, ReleaseRecord, StepResult
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import (
    AuditSpec,
    BudgetSpec,
    CanariesSpec,
    Charged,
    CheckpointSpec,
    CorpusSpec,
    EntitiesSpec,
    ExposureSpec,
    FinetuneSpec,
    MembershipSpec,
    PhrasesSpec,
    PretrainSpec,
    PrivacyAuditSpec,
    PrivacyPlan,
    PromoteSpec,
    ReportSpec,
    RunContext,
    SelectSpec,
    Source,
    StepSpec,
    SweepReportSpec,
    TokenStoreSpec,
    VocabularySpec,
    WrittenTextSpec,
    spec_from_json,
)
from tasks.protocol.sweep import SweepPoint, SweepSettings

__all__ = [
    "EXACT_WORDS",
    "AuditSpec",
    "BlackBoxAuditConfig",
    "BudgetSpec",
    "CanariesSpec",
    "Charged",
    "CheckpointSpec",
    "CorpusSpec",
    "EntitiesSpec",
    "ExposureSpec",
    "FinetuneSpec",
    "JobSettings",
    "MembershipSpec",
    "MetricRecord",
    "Need",
    "NoReader",
    "PhrasesSpec",
    "PretrainSpec",
    "PrivacyAuditSpec",
    "PrivacyPlan",
    "PromoteSpec",
    "Promotion",
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
    "WrittenTextSpec",
    "budget_of_run",
    "dp_bert_steps",
    "environment_for",
    "missing_file",
    "needs",
    "one_line",
    "privacy_audit_spec",
    "promote_spec",
    "promotion",
    "spec_from_json",
    "sweep_point_steps",
    "sweep_report",
    "sweep_steps",
    "sweep_training",
]
