# The steps: TensorFlow, MLflow's client, the algorithms. No Airflow.
# Dependencies change rarely and come first; the code comes last. With `ENGINE=spark` it holds Spark
# and Java, too, as three more layers below the code: for the cluster, and for the steps that use it.
ARG ENGINE=here
# By its digest where make-env --pin found one.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS environment
ARG PIP_INDEX_URL
WORKDIR /build
COPY docker/install-lock requirements/installer.txt requirements/task.txt ./
RUN --mount=type=cache,target=/root/.cache ./install-lock task.txt /opt/confide/environment

FROM ${BASE} AS spark-alone
ARG PIP_INDEX_URL
WORKDIR /build
COPY docker/install-lock requirements/installer.txt requirements/spark.txt ./
RUN --mount=type=cache,target=/root/.cache ./install-lock spark.txt /opt/confide/spark

FROM ${BASE} AS here
ARG BASE
LABEL org.opencontainers.image.base.name=${BASE}
# 10001 owns what the steps write and nothing else; the code belongs to root and is read only.
RUN groupadd --gid 10001 confide && useradd --uid 10001 --gid 10001 --no-create-home confide \
 && install -d -o confide -g confide -m 0700 /var/lib/confide /var/lib/confide-seeds /var/lib/confide/keys
COPY --from=environment /opt/confide/environment /opt/confide/environment
ENV PATH=/opt/confide/environment/bin:$PATH \
    PYTHONPATH=/opt/confide \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TF_CPP_MIN_LOG_LEVEL=2 \
    MPLCONFIGDIR=/tmp/matplotlib \
    MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT=true \
    HOME=/tmp \
    CONFIDE_HOME=/var/lib/confide \
    CONFIDE_SEEDS=/var/lib/confide-seeds \
    CONFIDE_TASK_PYTHON=/opt/confide/environment/bin/python

FROM here AS spark
# Debian's package writes its manual pages, for which there is no folder in a slim image.
RUN install -d /usr/share/man/man1 \
 && apt-get update && apt-get install --yes --no-install-recommends openjdk-17-jre-headless \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
COPY --from=spark-alone /opt/confide/spark /opt/confide/spark
COPY --chmod=755 docker/spark-node /usr/local/bin/
ENV PYTHONPATH=/opt/confide:/opt/confide/spark/lib/python3.11/site-packages \
    SPARK_HOME=/opt/confide/spark/lib/python3.11/site-packages/pyspark

FROM ${ENGINE}
ARG BASE
# What the image is made of; an environment that is not its locks' ends the build.
RUN --mount=type=bind,source=docker/sbom.py,target=/tmp/sbom.py \
    --mount=type=bind,source=requirements,target=/tmp/requirements \
    install -d /usr/share/confide \
 && if [ -n "${SPARK_HOME:-}" ]; then name=confide-task-spark more="--lock /tmp/requirements/spark.txt"; \
    else name=confide-task more=; fi \
 && python /tmp/sbom.py $name --lock /tmp/requirements/task.txt $more \
      --base "${BASE}" >/usr/share/confide/sbom.cdx.json
WORKDIR /opt/confide
COPY docker/mlflow_sync.py docker/prepare.py ./
COPY dp_core ./dp_core
COPY tasks ./tasks
RUN python -m compileall -q mlflow_sync.py prepare.py dp_core tasks
USER 10001:10001
# Process 1 passes SIGTERM on, reaps, and ends the step at its deadline or with its lease.
ENTRYPOINT ["python", "-P", "-S", "-E", "/opt/confide/tasks/protocol/supervisor.py", "python"]
CMD ["-m", "tasks", "--help"]
