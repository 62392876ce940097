# The whole pipeline for NVIDIA GPUs: OpenRLHF, Ray, vLLM, DeepSpeed, pinned by requirements/cuda.lock.
#
#   docker build -f docker/cuda.Dockerfile -t sg-rlhf:cuda .
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 --ulimit nofile=65536:65536 \
#     -v "$PWD":/workspace -v sg-rlhf-cache:/cache sg-rlhf:cuda \
#     train --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml
#
# docs/deploy.md says what /dev/shm and the limits are for. An index of your own: --secret id=pip,src=pip.conf.
# Needs a driver for CUDA 13 (580 or later) on the host, and the NVIDIA container toolkit, which brings it in.

# Plain Debian with Python: torch's wheels carry CUDA's libraries, so an nvidia/cuda base would hold them twice, and
# nothing here is compiled by nvcc.
# A tag can be moved. To pin these very bytes, append what this prints as python:...@sha256:...
#   docker buildx imagetools inspect python:3.11.14-slim-bookworm --format '{{.Manifest.Digest}}'
FROM python:3.11.14-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# g++ compiles what Triton and torch.compile make; ibverbs lets NCCL use InfiniBand between
# nodes; tini ends what Ray leaves behind.
# Without versions: Debian takes a superseded one off its mirrors, and the build with it would fail from then on.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ibverbs-providers libibverbs1 libnuma1 tini \
    && rm -rf /var/lib/apt/lists/*

# What decides about the packages, and the check before them, comes first: editing the rest installs none of them again.
WORKDIR /opt/sg_rlhf
COPY requirements requirements
COPY scripts scripts
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY sg_rlhf/__init__.py sg_rlhf/
COPY sg_rlhf/doctor sg_rlhf/doctor

# Named, as no build sees a GPU.
RUN --mount=type=cache,target=/root/.cache \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    SG_HARDWARE=cuda UV_LINK_MODE=copy scripts/bootstrap.sh

COPY configs configs
COPY sg_rlhf sg_rlhf
COPY eval eval

# Open folders, as `--user "$(id -u)"` is how a bind mount gets files that its owner may delete.
RUN .venv/bin/python -m compileall -q sg_rlhf eval \
    && useradd --uid 1000 --user-group --create-home sg \
    && install -d -m 1777 /cache /workspace /home/sg

# NVIDIA_*: what the container toolkit brings in, and that it refuses an older driver before anything starts.
# USER, as a user id that the image does not know has no name otherwise, and torch asks for one.
ENV PATH=/opt/sg_rlhf/.venv/bin:$PATH \
    HOME=/home/sg \
    USER=sg \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA=cuda>=13.0

# Models of the hub; and the working directory: data/ and runs/ of the recipes are relative to it.
VOLUME ["/cache", "/workspace"]
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "sg-rlhf"]
CMD ["--help"]
