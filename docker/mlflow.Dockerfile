# The tracking server, with its own small lock.
FROM python:3.11-slim-bookworm AS environment
ARG PIP_INDEX_URL
WORKDIR /build
COPY docker/install-lock requirements/installer.txt requirements/mlflow.txt ./
RUN --mount=type=cache,target=/root/.cache ./install-lock mlflow.txt /opt/confide/environment

FROM python:3.11-slim-bookworm
RUN groupadd --gid 10002 mlflow && useradd --uid 10002 --gid 10002 --no-create-home mlflow \
 && install -d -o mlflow -g mlflow -m 0700 /var/lib/mlflow
COPY --from=environment /opt/confide/environment /opt/confide/environment
ENV PATH=/opt/confide/environment/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MPLCONFIGDIR=/tmp/matplotlib \
    HOME=/tmp
COPY docker/mlflow-server /usr/local/bin/
WORKDIR /var/lib/mlflow
USER 10002:10002
EXPOSE 5000
ENTRYPOINT ["mlflow-server"]
