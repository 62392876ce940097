# The whole pipeline on a machine without a GPU: OpenRLHF, Ray, vLLM for CPUs, DeepSpeed, pinned by requirements/cpu.lock.
#
#   docker build -f docker/cpu.Dockerfile -t sg-rlhf:cpu .
#   docker run --rm -it --shm-size=2g --ulimit nofile=65536:65536 -v "$PWD":/workspace sg-rlhf:cpu \
#     train --config configs/kk/grpo_sg_tiny_cpu.yaml
#
# docs/deploy.md says what /dev/shm and the limits are for. An index of your own: --secret id=pip,src=pip.conf.

# A tag can be moved. To pin these very bytes, append what this prints as python:...@sha256:...
#   docker buildx imagetools inspect python:3.11.14-slim-bookworm --format '{{.Manifest.Digest}}'
FROM python:3.11.14-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# g++ is for torch.compile (the CPU recipes use none), libnuma1 is vLLM's, tini ends what Ray leaves behind.
# Without versions: Debian takes a superseded one off its mirrors, and the build with it would fail from then on.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 tini \
    && rm -rf /var/lib/apt/lists/*

# What decides about the packages, and the check before them, comes first: editing the rest installs none of them again.
WORKDIR /opt/sg_rlhf
COPY requirements requirements
COPY scripts scripts
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY sg_rlhf/__init__.py sg_rlhf/
COPY sg_rlhf/doctor sg_rlhf/doctor

RUN --mount=type=cache,target=/root/.cache \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    SG_HARDWARE=cpu UV_LINK_MODE=copy scripts/bootstrap.sh

COPY configs configs
COPY sg_rlhf sg_rlhf
COPY eval eval

# Open folders, as `--user "$(id -u)"` is how a bind mount gets files that its owner may delete.
RUN .venv/bin/python -m compileall -q sg_rlhf eval \
    && useradd --uid 1000 --user-group --create-home sg \
    && install -d -m 1777 /cache /workspace /home/sg

# USER, as a user id that the image does not know has no name otherwise, and torch asks for one.
ENV PATH=/opt/sg_rlhf/.venv/bin:$PATH \
    HOME=/home/sg \
    USER=sg \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1

# Models of the hub; and the working directory: data/ and runs/ of the recipes are relative to it.
VOLUME ["/cache", "/workspace"]
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "sg-rlhf"]
CMD ["--help"]
