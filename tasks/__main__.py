"""`python -m tasks NAME --spec URI`: run one step."""

from __future__ import annotations

import os
import sys

# Set before TensorFlow is imported: messages of its native code would only confuse users.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# TensorFlow then does not load Keras 3, which no step uses: almost half of its import's CPU time.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

from tasks.execution.contract import command_line

if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
