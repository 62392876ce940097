# The whole pipeline for NVIDIA GPUs: OpenRLHF, Ray, vLLM, DeepSpeed, pinned by requirements/cuda.lock.
#
#   docker build -f docker/cuda.Dockerfile -t sg-rlhf:cuda .
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 --ulimit nofile=65536:65536 \
#     -v "$PWD":/workspace -v sg-rlhf-cache:/cache sg-rlhf:cuda \
#     train --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml
#
# docs/running.md explains /dev/shm and the limits. For your own package index: --secret id=pip,src=pip.conf.
# The host needs a driver for CUDA 13 (580 or later) and the NVIDIA container toolkit.

# Plain Debian with Python: torch's wheels contain CUDA's libraries, so an nvidia/cuda base would hold them twice. Nothing
# here is compiled by nvcc.
# Tags can move. To pin the image, append the digest that this prints, as python:...@sha256:...
#   docker buildx imagetools inspect python:3.11.14-slim-bookworm --format '{{.Manifest.Digest}}'
FROM python:3.11.14-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# g++ is for Triton and torch.compile; ibverbs lets NCCL use InfiniBand between nodes; tini ends Ray's leftover
# processes.
# No pinned versions: Debian removes superseded ones from its mirrors, and the build would fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ibverbs-providers libibverbs1 libnuma1 tini \
    && rm -rf /var/lib/apt/lists/*

# First the files that decide about the packages: editing other files then reinstalls nothing.
WORKDIR /opt/sg_rlhf
COPY requirements requirements
COPY scripts scripts
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY sg_rlhf/__init__.py sg_rlhf/

# SG_HARDWARE is set because a build sees no GPU.
RUN --mount=type=cache,target=/root/.cache \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    SG_HARDWARE=cuda UV_LINK_MODE=copy scripts/bootstrap.sh

COPY configs configs
COPY sg_rlhf sg_rlhf
COPY eval eval

# All bytecode now: a user of the image may not write it. A few templates are no Python (|| true).
# World-writable folders, so that `--user "$(id -u)"` works: files in a bind mount then belong to their owner.
RUN .venv/bin/python -m compileall -q sg_rlhf eval \
    && { .venv/bin/python -m compileall -q -j 0 -x '/tests?/' .venv/lib || true; } \
    && useradd --uid 1000 --user-group --create-home sg \
    && install -d -m 1777 /cache /workspace /home/sg

# NVIDIA_*: the container toolkit brings in the driver, and refuses an older one before anything starts.
# USER: torch asks for a user name, and an unknown user id has none.
ENV PATH=/opt/sg_rlhf/.venv/bin:$PATH \
    HOME=/home/sg \
    USER=sg \
    HF_HOME=/cache/huggingface \
    VLLM_CACHE_ROOT=/cache/vllm \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA=cuda>=13.0

# The hub's models, what vLLM and Triton compile, and the working directory: the recipes' data/ and runs/ are relative to it.
VOLUME ["/cache", "/workspace"]
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "sg-rlhf"]
CMD ["--help"]
