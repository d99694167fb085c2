# The steps: TensorFlow, MLflow's client and the algorithms. No Airflow. Nodes of a Ray cluster use
# this image too. LOCK is task, task-gpu or task-tpu. Dependencies change rarely, so they come first.
# docker/make-env replaces the tag by a digest if it knows one.
ARG BASE=python:3.11-slim-bookworm
ARG LOCK=task
FROM ${BASE} AS environment
ARG PIP_INDEX_URL
ARG LOCK
WORKDIR /build
COPY docker/install-lock requirements/installer.txt requirements/${LOCK}.txt ./
RUN --mount=type=cache,target=/root/.cache ./install-lock ${LOCK}.txt /opt/confide/environment

FROM ${BASE}
ARG BASE
ARG LOCK
LABEL org.opencontainers.image.base.name=${BASE}
# User 10001 owns only the folders that the steps write. The code belongs to root and is read-only.
RUN groupadd --gid 10001 confide && useradd --uid 10001 --gid 10001 --no-create-home confide \
 && install -d -o confide -g confide -m 0700 \
      /var/lib/confide /var/lib/confide-seeds /var/lib/confide/keys /var/lib/confide-cluster
COPY --from=environment /opt/confide/environment /opt/confide/environment
ENV PATH=/opt/confide/environment/bin:$PATH \
    PYTHONPATH=/opt/confide \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TF_CPP_MIN_LOG_LEVEL=2 \
    TF_USE_LEGACY_KERAS=1 \
    MPLCONFIGDIR=/tmp/matplotlib \
    MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT=true \
    HOME=/tmp \
    CONFIDE_HOME=/var/lib/confide \
    CONFIDE_SEEDS=/var/lib/confide-seeds \
    CONFIDE_TASK_PYTHON=/opt/confide/environment/bin/python
# The software bill of materials; the build fails if the environment differs from its lock.
RUN --mount=type=bind,source=docker/sbom.py,target=/tmp/sbom.py \
    --mount=type=bind,source=requirements,target=/tmp/requirements \
    install -d /usr/share/confide \
 && python /tmp/sbom.py confide-task --lock /tmp/requirements/${LOCK}.txt \
      --base "${BASE}" >/usr/share/confide/sbom.cdx.json
WORKDIR /opt/confide
COPY docker/mlflow_sync.py docker/prepare.py ./
COPY pyproject.toml ./
COPY dp_core ./dp_core
COPY tasks ./tasks
RUN python -m compileall -q mlflow_sync.py prepare.py dp_core tasks
USER 10001:10001
# Engines start it with their init process (`docker run --init`, compose's `init: true`).
ENTRYPOINT ["python"]
CMD ["-m", "tasks", "--help"]
