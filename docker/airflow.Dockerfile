# Airflow and the DAGs, which know only the specs and settings of the steps. No TensorFlow, no algorithms.
# docker/make-env replaces the tag by a digest if it knows one.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS environment
ARG PIP_INDEX_URL
WORKDIR /build
COPY docker/install-lock requirements/installer.txt requirements/orchestrator.txt ./
RUN --mount=type=cache,target=/root/.cache ./install-lock orchestrator.txt /opt/confide/environment

FROM ${BASE}
ARG BASE
LABEL org.opencontainers.image.base.name=${BASE}
RUN groupadd --gid 10000 airflow && useradd --uid 10000 --gid 10000 --no-create-home airflow \
 && install -d -o airflow -g airflow -m 0750 /var/lib/airflow /var/lib/airflow/logs
COPY --from=environment /opt/confide/environment /opt/confide/environment
# The software bill of materials; the build fails if the environment differs from its lock.
RUN --mount=type=bind,source=docker/sbom.py,target=/tmp/sbom.py \
    --mount=type=bind,source=requirements/orchestrator.txt,target=/tmp/lock.txt \
    install -d /usr/share/confide \
 && /opt/confide/environment/bin/python /tmp/sbom.py confide-airflow --lock /tmp/lock.txt \
      --base "${BASE}" >/usr/share/confide/sbom.cdx.json
ENV PATH=/opt/confide/environment/bin:$PATH \
    PYTHONPATH=/opt/confide \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    AIRFLOW_HOME=/var/lib/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/confide/dags \
    AIRFLOW__CORE__LOAD_EXAMPLES=False \
    AIRFLOW__LOGGING__BASE_LOG_FOLDER=/var/lib/airflow/logs
WORKDIR /opt/confide
COPY docker/airflow-component docker/healthy.py /usr/local/bin/
COPY tasks/__init__.py ./tasks/__init__.py
COPY tasks/protocol ./tasks/protocol
COPY tasks/presets ./tasks/presets
COPY dp_core/__init__.py dp_core/errors.py ./dp_core/
COPY dp_core/config ./dp_core/config
COPY dags ./dags
RUN python -m compileall -q tasks dp_core dags
USER 10000:10000
ENTRYPOINT ["airflow-component"]
CMD ["api-server"]
