# Everything that `make lint test` needs, so that none of it is installed on your machine:
#
#   docker build -f docker/dev.Dockerfile -t flexring-dev .
#   docker run --rm -it --privileged -v "$PWD":/flexring flexring-dev make lint test
#
# --privileged is for network namespaces and virtual machines; `make check` needs none.
FROM rust:1-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends make python3-pip valgrind python3-matplotlib \
    && rm -rf /var/lib/apt/lists/*
RUN rustup component add clippy rustfmt \
    && curl -LsSf https://get.nexte.st/latest/linux | tar xzf - -C "$CARGO_HOME/bin"

# What `make setup` reads. It fills target/ again in the mounted checkout, with NVRTC and nccl.h.
WORKDIR /setup
COPY Makefile Cargo.toml ./
COPY bench/setup.sh bench/setup_cuda.sh bench/setup_nccl.sh bench/
RUN make setup && rm -rf /setup /var/lib/apt/lists/*

WORKDIR /flexring
RUN git config --global --add safe.directory /flexring
