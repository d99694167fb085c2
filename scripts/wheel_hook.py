"""Hatchling's build hook: the wheel holds the package that `namespace.py` writes."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NamespaceHook(BuildHookInterface[Any]):
    """Replaces the three packages of the checkout by the one package `confide`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the package, and list it as the wheel's content."""
        if version == "editable":
            raise ValueError("no editable installation: a checkout has the command ./confide")
        sys.path.insert(0, str(Path(self.root) / "scripts"))
        import namespace

        self._folder = tempfile.TemporaryDirectory()
        package = namespace.write(Path(self._folder.name), Path(self.root))
        build_data["force_include"][str(package)] = namespace.NAMESPACE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the written package."""
        self._folder.cleanup()
