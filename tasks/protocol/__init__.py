"""The inputs and results of steps, as versioned, frozen models.

The package imports only pydantic, `dp_core.config` and the standard library, so that Airflow parses
a DAG file in milliseconds.
"""

from dp_core.config.audit_settings import BlackBoxAuditConfig
from dp_core.config.fields import one_line
from dp_core.config.release import EXACT_WORDS, ReleaseRecord
from tasks.protocol.job import (
    budget_of_run,
    is_of_job,
    job_steps,
    missing_file,
    names_of,
    point_and_task,
    point_steps,
)
from tasks.protocol.least_privilege import (
    environment_for,
    needs_in,
)
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.protocol.points import Point
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import Promotion, promotion
from tasks.protocol.specs import (
    AuditSpec,
    BudgetSpec,
    CanariesSpec,
    Charged,
    ChargedPrivacyConfig,
    CheckpointSpec,
    CorpusSpec,
    EntitiesSpec,
    ExposureSpec,
    FinetuneSpec,
    GiveBackSpec,
    MembershipSpec,
    Need,
    PhrasesSpec,
    PretrainSpec,
    PrivacyAuditSpec,
    PromoteSpec,
    ReportSpec,
    ReserveSpec,
    RunContext,
    SelectSpec,
    Source,
    StepSpec,
    TokenStoreSpec,
    VocabularySpec,
    WrittenTextSpec,
    spec_from_json,
)
from tasks.protocol.sweep import SweepSettings
