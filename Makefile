# What a developer and CI run. `make test` is everything; parts have names of their own.

CARGO ?= cargo
PREFIX ?= /usr/local
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
# Debian packages that tests need beyond Rust; without root they are named, not installed.
PACKAGES = gcc g++ pkg-config iproute2 openmpi-bin libopenmpi-dev python3 python3-torch

# Those that links over RDMA are built with, and those that the virtual machines of test-verbs are made of.
VERBS_PACKAGES = pkg-config libibverbs-dev librdmacm-dev libclang-dev
VM_PACKAGES = qemu-system-x86 busybox-static cpio kmod xz-utils binutils iproute2 ibverbs-utils ibverbs-providers perftest python3

.PHONY: all build test lint bench bench-lab bench-verbs install setup setup-verbs setup-cuda test-rust test-cuda test-gpu test-cust \
	gpu-bundle test-loom test-verbs

# The code for RDMA is tested and linted too wherever it can be built. Asked when a recipe runs, after its packages came.
FEATURES = $(shell pkg-config --exists libibverbs librdmacm 2>/dev/null && echo --features verbs)

# cust is linked to libcuda.so, which it looks for in the folder lib64 of this one; it is the simulated driver's.
CUST = $(CURDIR)/target/tmp/simulated-cuda/cust

all: build

build:
	$(CARGO) build --release

test: setup setup-verbs setup-cuda build test-rust test-cuda test-gpu test-cust test-loom test-verbs

# Tests run the release build's library and command too, as users do.
test-rust:
	$(CARGO) test
	@if [ -n "$(FEATURES)" ]; then set -x; $(CARGO) test $(FEATURES) --lib transport::verbs; fi

# Builds embed machine code where there is an nvcc, which all other tests ran with; here is the other way, in which the
# source is compiled by NVRTC when it is needed.
test-cuda: setup-cuda
	LD_LIBRARY_PATH=target/cuda-toolkit/nvidia/cu13/lib:$$LD_LIBRARY_PATH XDG_CACHE_HOME=$(CURDIR)/target/nvrtc/cache \
	FLEXRING_CUDA_KERNELS=nvrtc $(CARGO) test --no-default-features --features cuda --lib --target-dir target/nvrtc \
		--config profile.test.opt-level=0 --config profile.test.debug=0 what_is_embedded

# Vectors on GPUs, by the simulated driver: no GPU is needed. On a machine with one, tests/gpu/run does more.
test-gpu: setup-cuda
	CARGO=$(CARGO) tests/gpu/run --simulated

# All that tests/gpu/run needs on a machine with a GPU that has neither Rust nor a network.
gpu-bundle: setup-cuda
	CARGO=$(CARGO) tests/gpu/bundle.sh target/gpu-bundle.tar.gz

# The feature `cust`, which needs a libcuda.so to be built.
test-cust: $(CUST)
	@if [ -d $(CUST)/lib64 ]; then set -x; \
	CUDA_LIBRARY_PATH=$(CUST) LD_LIBRARY_PATH=$(CUST)/lib64 WORLDS=gpu $(CARGO) test --features cust --test cust; \
	else echo "skipped: no g++ for the simulated CUDA driver, which cust is linked to"; fi

.PHONY: $(CUST)
$(CUST):
	@mkdir -p $(CUST)
	@if command -v g++ >/dev/null; then tests/gpu/driver/build.sh $(CUST)/.. && ln -sfn .. $(CUST)/lib64; fi

# Every interleaving of the shared-memory ring that the memory model allows.
test-loom:
	RUSTFLAGS="--cfg loom" $(CARGO) test --no-default-features --lib --target-dir target/loom transport::shm

# On RDMA devices, which virtual machines bring along.
test-verbs: setup-verbs
	@bench/setup.sh $(VM_PACKAGES)
	@if [ -n "$(FEATURES)" ]; then tests/vm/run.py $(FEATURES); \
	else echo "skipped: libibverbs-dev and librdmacm-dev are not installed"; fi

lint: setup-verbs setup-cuda $(CUST)
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	@if [ -n "$(FEATURES)" ]; then set -x; $(CARGO) clippy --all-targets $(FEATURES) -- -D warnings; fi
	@if [ -d $(CUST)/lib64 ]; then set -x; \
	CUDA_LIBRARY_PATH=$(CUST) $(CARGO) clippy --features cust --lib --test cust -- -D warnings; \
	else echo "skipped: no g++ for the simulated CUDA driver, which cust is linked to"; fi
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --lib $(FEATURES)

bench: build
	bench/run.sh

# Clusters of network namespaces, beside Gloo, Open MPI and what the links allow; needs root, takes some minutes.
bench-lab: build
	@bench/setup.sh gcc libopenmpi-dev openmpi-bin python3-torch iproute2 iperf3 python3
	bench/lab_compare.py --out bench/out/lab.json

# RDMA beside perftest, in a virtual machine; and rails beside what each of them can carry.
bench-verbs: setup-verbs
	@bench/setup.sh $(VM_PACKAGES)
	$(CARGO) build --release $(FEATURES) --target-dir target/verbs
	bench/verbs.py --flexring target/verbs/release/flexring

setup:
	@bench/setup.sh $(PACKAGES)

setup-verbs:
	@bench/setup.sh $(VERBS_PACKAGES)

# What compiles GPU kernels, from PyPI: an nvcc that `cargo build` finds, and NVRTC for tests. 0.5 GB.
setup-cuda:
	@bench/setup_cuda.sh target/cuda-toolkit

install: build
	install -Dm644 include/flexring.h $(DESTDIR)$(PREFIX)/include/flexring.h
	install -Dm644 target/release/libflexring.a $(DESTDIR)$(PREFIX)/lib/libflexring.a
	install -Dm755 target/release/libflexring.so $(DESTDIR)$(PREFIX)/lib/libflexring.so
	install -Dm755 target/release/flexring $(DESTDIR)$(PREFIX)/bin/flexring
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' flexring.pc.in > $(DESTDIR)$(PREFIX)/lib/pkgconfig/flexring.pc
