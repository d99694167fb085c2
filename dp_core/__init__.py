"""The algorithms of Confide, without Airflow, MLflow and Docker."""

import os

# Set before TensorFlow is imported. By default TensorFlow uses oneDNN's products only on
# processors with AVX-512 VNNI; on other processors they are also faster at 12 layers of 768.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
