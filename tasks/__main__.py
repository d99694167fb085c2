"""`python -m tasks NAME --spec URI`: run one step."""

from __future__ import annotations

import argparse
import os
import sys

# Before anything imports TensorFlow: what its native code writes, nobody could place.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tasks.runtime.step import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one step.")
    parser.add_argument("name", help="the step, for example pretrain")
    parser.add_argument(
        "--spec", required=True, metavar="URI", help="a path, file://, gs:// or data: URI"
    )
    parser.add_argument("--context", default="", metavar="JSON", help="which run it belongs to")
    arguments = parser.parse_args()
    sys.exit(main(arguments.name, arguments.spec, arguments.context))
