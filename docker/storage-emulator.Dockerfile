# An object store on a volume, compatible with the google-cloud-storage client.
# docker/make-env replaces the tag by a digest if it knows one.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS environment
ARG PIP_INDEX_URL
WORKDIR /build
COPY docker/install-lock requirements/installer.txt requirements/storage-emulator.txt ./
RUN --mount=type=cache,target=/root/.cache ./install-lock storage-emulator.txt /opt/confide/environment

FROM ${BASE}
ARG BASE
LABEL org.opencontainers.image.base.name=${BASE}
RUN groupadd --gid 10003 storage && useradd --uid 10003 --gid 10003 --no-create-home storage \
 && install -d -o storage -g storage -m 0700 /var/lib/storage
COPY --from=environment /opt/confide/environment /opt/confide/environment
# The software bill of materials; the build fails if the environment differs from its lock.
RUN --mount=type=bind,source=docker/sbom.py,target=/tmp/sbom.py \
    --mount=type=bind,source=requirements/storage-emulator.txt,target=/tmp/lock.txt \
    install -d /usr/share/confide \
 && /opt/confide/environment/bin/python /tmp/sbom.py confide-storage-emulator --lock /tmp/lock.txt \
      --base "${BASE}" >/usr/share/confide/sbom.cdx.json
ENV PATH=/opt/confide/environment/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    STORAGE_BASE=/var/lib/storage
COPY docker/storage_server.py /usr/local/lib/
WORKDIR /var/lib/storage
USER 10003:10003
EXPOSE 9023
ENTRYPOINT ["python", "/usr/local/lib/storage_server.py", "--host=0.0.0.0", "--port=9023"]
CMD ["--default-bucket=confide"]
