"""The part that every step spec shares: version, hash, and where the output goes."""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A value object: immutable, and unknown fields are refused rather than ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunContext(Frozen):
    """Which run a step belongs to. Never hashed: the same work in another run is the same work."""

    run_key: str  # one MLflow parent run per key: the DAG run's id
    run_name: str
    task: str  # the task's name within the run, for example `dp_pretraining`
    point: str = ""  # the sweep point's name, empty outside sweeps


class Source(Frozen):
    """A file or folder outside the store that a step reads."""

    field: str  # the setting that names it
    uri: str
    public: bool  # the spec says so; only the operator's declaration in the ledger makes it true
    dataset: str = ""  # whose text it is; empty for what belongs to no data set


class StepSpec(Frozen):
    """What one step is told. Subclasses add the fields; `step` names them in JSON."""

    version: ClassVar[int] = 2  # of version 1, results named no use without a guarantee
    unhashed: ClassVar[frozenset[str]] = frozenset()  # fields that no output depends on

    step: str
    root: str  # URI of the store under which every output has its own folder
    made_up: bool  # every input is made up or public: nothing needs hiding

    def digest(self) -> str:
        """Return the spec hash: SHA-256 over everything that determines the output, in hex."""
        body = {"version": self.version, **self.hashed()}
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def hashed(self) -> dict[str, Any]:
        """Return what the output depends on, as plain JSON data."""
        return self.model_dump(mode="json", exclude=set(self.unhashed))

    @property
    def sources(self) -> tuple[Source, ...]:
        """What the step reads from outside, and whether it calls it public."""
        return ()

    @property
    def output(self) -> str:
        """URI of the folder that this step, and no other, writes."""
        return f"{self.root}/{self.step}/{self.digest()[:16]}"
