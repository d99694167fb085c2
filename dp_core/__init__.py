"""The shared algorithms of Confide: they know neither Airflow nor MLflow nor Docker."""

import os

# Before TensorFlow is imported. By itself it takes oneDNN's products only on processors with
# AVX-512 VNNI; on others too they are the faster ones at 12 layers of 768.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
