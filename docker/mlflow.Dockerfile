# The tracking server, with a separate small lock.
# docker/make-env replaces the tag by a digest if it knows one.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS environment
ARG PIP_INDEX_URL
WORKDIR /build
COPY docker/install-lock requirements/installer.txt requirements/mlflow.txt ./
RUN --mount=type=cache,target=/root/.cache ./install-lock mlflow.txt /opt/confide/environment

FROM ${BASE}
ARG BASE
LABEL org.opencontainers.image.base.name=${BASE}
RUN groupadd --gid 10002 mlflow && useradd --uid 10002 --gid 10002 --no-create-home mlflow \
 && install -d -o mlflow -g mlflow -m 0700 /var/lib/mlflow
COPY --from=environment /opt/confide/environment /opt/confide/environment
# The software bill of materials; the build fails if the environment differs from its lock.
RUN --mount=type=bind,source=docker/sbom.py,target=/tmp/sbom.py \
    --mount=type=bind,source=requirements/mlflow.txt,target=/tmp/lock.txt \
    install -d /usr/share/confide \
 && /opt/confide/environment/bin/python /tmp/sbom.py confide-mlflow --lock /tmp/lock.txt \
      --base "${BASE}" >/usr/share/confide/sbom.cdx.json
ENV PATH=/opt/confide/environment/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MPLCONFIGDIR=/tmp/matplotlib \
    HOME=/tmp
COPY docker/mlflow-server docker/mlflow-users /usr/local/bin/
WORKDIR /var/lib/mlflow
USER 10002:10002
EXPOSE 5000
ENTRYPOINT ["mlflow-server"]
