# The whole pipeline in an image; without another command it runs the demo.
#
#   docker build -t novelty .
#   docker run --rm -v novelty-data:/data novelty
#
# CUDA: a base with its libraries, and torch's own build for it:
#   docker build -t novelty --build-arg BASE=nvidia/cuda:12.6.3-base-ubuntu22.04 \
#       --build-arg TORCH=cuda .
#   docker run --rm --gpus all -v novelty-data:/data novelty
#
# Any base of Debian 12 or Ubuntu 22.04 will do. docs/install.md has more.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Build of torch: empty (what pip finds first), cpu, cuda, or the URL of an index.
ARG TORCH=
ARG EXTRAS=all
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates make \
 && if ! command -v python3.11; then \
      apt-get install --yes --no-install-recommends python3.11 python3.11-venv; \
    fi \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY . .
# As root, setup installs the libraries of X and GL that are missing.
RUN apt-get update \
 && make setup TORCH="${TORCH}" EXTRAS="${EXTRAS}" \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home novelty \
 && install -d -o novelty -g novelty /data

USER novelty
VOLUME /data
ENV PATH=/app/.venv/bin:$PATH NOVELTY_LAKE=/data/lake SAMPLE=/data/sample
CMD ["make", "demo"]
