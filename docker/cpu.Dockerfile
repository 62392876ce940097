# The whole pipeline on a machine without a GPU: OpenRLHF, Ray, vLLM for CPUs, DeepSpeed, pinned by requirements/cpu.lock.
#
#   docker build -f docker/cpu.Dockerfile -t sg-rlhf:cpu .
#   docker run --rm -it --shm-size=2g --ulimit nofile=65536:65536 -v "$PWD":/workspace sg-rlhf:cpu \
#     train --config configs/kk/grpo_sg_tiny_cpu.yaml
#
# docs/running.md explains /dev/shm and the limits. For your own package index: --secret id=pip,src=pip.conf.

# Tags can move. To pin the image, append the digest that this prints, as python:...@sha256:...
#   docker buildx imagetools inspect python:3.11.14-slim-bookworm --format '{{.Manifest.Digest}}'
FROM python:3.11.14-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# g++ is for torch.compile (the CPU recipes do not use it), libnuma1 for vLLM; tini ends Ray's leftover processes.
# No pinned versions: Debian removes superseded ones from its mirrors, and the build would fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 tini \
    && rm -rf /var/lib/apt/lists/*

# First the files that decide about the packages: editing other files then reinstalls nothing.
WORKDIR /opt/sg_rlhf
COPY requirements requirements
COPY scripts scripts
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY sg_rlhf/__init__.py sg_rlhf/

RUN --mount=type=cache,target=/root/.cache \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    SG_HARDWARE=cpu UV_LINK_MODE=copy scripts/bootstrap.sh

COPY configs configs
COPY sg_rlhf sg_rlhf
COPY eval eval

# All bytecode now: a user of the image may not write it. A few templates are no Python (|| true).
# World-writable folders, so that `--user "$(id -u)"` works: files in a bind mount then belong to their owner.
RUN .venv/bin/python -m compileall -q sg_rlhf eval \
    && { .venv/bin/python -m compileall -q -j 0 -x '/tests?/' .venv/lib || true; } \
    && useradd --uid 1000 --user-group --create-home sg \
    && install -d -m 1777 /cache /workspace /home/sg

# USER: torch asks for a user name, and an unknown user id has none.
ENV PATH=/opt/sg_rlhf/.venv/bin:$PATH \
    HOME=/home/sg \
    USER=sg \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1

# The hub's models, and the working directory: the recipes' data/ and runs/ are relative to it.
VOLUME ["/cache", "/workspace"]
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "sg-rlhf"]
CMD ["--help"]
