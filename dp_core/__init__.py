"""The algorithms of Confide, without Airflow, MLflow and Docker."""

import os
from pathlib import Path

# Set before TensorFlow is imported. By default TensorFlow uses oneDNN's products only on
# processors with AVX-512 VNNI; on other processors they are also faster at 12 layers of 768.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# Without a TPU, the import of TensorFlow for TPUs would wait minutes for Google's metadata server.
if not [*Path("/dev").glob("accel*"), *Path("/dev").glob("vfio/[0-9]*")]:
    os.environ.setdefault("TPU_LIBRARY_PATH", os.devnull)
