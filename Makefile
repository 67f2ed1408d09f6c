# What a developer and CI run: `make check` while working, `make lint test` before a commit lands.

CARGO ?= cargo
# A build from nothing is faster without the data for incremental builds.
ifdef CI
export CARGO_INCREMENTAL = 0
endif
PREFIX ?= /usr/local
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
# Major version of the C ABI, which the shared library's SONAME carries (crates/flexring-c/build.rs).
ABI = $(firstword $(subst ., ,$(VERSION)))
# That of NCCL's ABI (nccl/build.rs).
NCCL_ABI = 2

# Debian packages: for the check against rdma-sys, for the tests, and for their virtual machines.
VERBS_PACKAGES = pkg-config libibverbs-dev librdmacm-dev libclang-dev
TEST_PACKAGES = gcc g++ libibverbs-dev pkg-config iproute2 iperf3 openmpi-bin libopenmpi-dev mpich slurm-wlm munge python3 python3-torch mypy \
	gcc-aarch64-linux-gnu libc6-dev-arm64-cross
VERSUS_PACKAGES = gcc libc6-dev libopenmpi-dev openmpi-bin libmpich-dev mpich python3-torch python3-matplotlib iproute2 iperf3 python3
VM_PACKAGES = qemu-system-x86 busybox-static cpio kmod xz-utils binutils iproute2 ibverbs-utils ibverbs-providers perftest python3

# rdma-sys, with which the bindings of libibverbs are compared, can be built where its libraries are. Evaluated when a recipe
# runs, after the packages came.
RDMA_SYS = $(shell pkg-config --exists libibverbs librdmacm 2>/dev/null && echo yes)

# cargo-nextest runs each test in a process of its own; without it, cargo test runs them in one. Many tests wait for a time-out:
# on 2 cores the suite took 456 s with 2 tests at a time and 390 s with 3; later, with others, 291 s with 3 and 259 s with 4.
NEXTEST = $(shell command -v cargo-nextest >/dev/null && echo nextest run --test-threads $$(( $$(nproc) * 2 )) || echo test)
# What precedes names of tests.
FILTERS = $(if $(findstring nextest,$(NEXTEST)),,--)
# All crates, tests/suite and nccl/tests, in one build.
TESTS = --lib --bins --test suite --test nccl

# cust is linked to libcuda.so and looks for it in the folder lib64 of this one: the simulated driver's.
CUST = $(CURDIR)/target/tmp/simulated-cuda/cust
# For a few tests the optimizer costs more than it saves. Dependencies are shared.
QUICK = $(patsubst %,--config profile.test.package.%.opt-level=0,flexring $(notdir $(wildcard crates/*)))

.PHONY: all build check lint test test-long bench bench-gate bench-growth bench-lab bench-papers bench-prediction bench-training bench-verbs versus install \
	setup setup-cuda fmt clippy doc deny portable \
	test-build test-rust test-gpu test-cust test-loom test-verbs test-verbs-long test-rust-long test-valgrind test-wheel test-torch fuzz gpu-bundle

all: build

build:
	$(CARGO) build --release

# The quick loop: needs nothing but Rust, installs nothing. Property tests run with a tenth of their cases.
check: fmt
	$(CARGO) clippy --all-targets -- -D warnings
	FLEXRING_TEST_EFFORT=0.1 $(CARGO) $(NEXTEST) $(QUICK) --lib --bins
	FLEXRING_TEST_EFFORT=0.1 $(CARGO) $(NEXTEST) $(QUICK) --test suite $(FILTERS) pipeline:: planners:: imports::

# What CI runs. Each word is a target below, those behind `--` run three at a time; the time of each is printed at the end, with
# what was skipped and why.
lint:
	@MAKE="$(MAKE)" tests/stages setup fmt -- clippy portable deny doc

test:
	@MAKE="$(MAKE)" tests/stages setup test-cust test-build -- test-rust test-gpu test-verbs test-loom

# A release build, ten times as many cases of property tests, all scenarios of the virtual machines, C programs under valgrind, and fuzzing.
# The last results are in docs/status.md.
test-long:
	@MAKE="$(MAKE)" tests/stages setup build test-cust test-rust-long test-loom test-gpu test-verbs-long test-valgrind test-wheel test-torch fuzz

# rustfmt has no limit for comments; tables, code and links in them have none here either.
fmt:
	$(CARGO) fmt --all --check
	! LC_ALL=C.UTF-8 grep -rnP --include='*.rs' '^(?=.{111})\s*//[/!]? (?!\||   )(?!.*\]: )' build.rs bench crates examples nccl src tests

# All features that can be built here, in one pass; then a build without features. The compiler compares the bindings of libibverbs with rdma-sys.
clippy: $(CUST)
	@if [ -d $(CUST)/lib64 ] && [ -n "$(RDMA_SYS)" ]; then set -x; \
	CUDA_LIBRARY_PATH=$(CUST) $(CARGO) clippy --all-targets --all-features -- -D warnings; \
	else echo "skipped: clippy of the feature cust, and bindings beside rdma-sys: no g++, libibverbs-dev or librdmacm-dev"; set -x; \
	$(CARGO) clippy --all-targets -- -D warnings; fi
	$(CARGO) clippy -p flexring -p flexring-ffi -p flexring-cli --no-default-features --tests -- -D warnings

# With examples, cargo chooses the features of dependencies that clippy has, and compiles them once for both.
DOCUMENTED = --no-deps --workspace --exclude flexring-c --exclude flexring-gate --exclude flexring-loom --lib --examples

# The documentation, and the public API beside tests/public_api.txt; FLEXRING_BLESS=1 writes a new one.
doc: $(CUST)
	@if [ -d $(CUST)/lib64 ] && [ -n "$(RDMA_SYS)" ]; then set -x; \
	CUDA_LIBRARY_PATH=$(CUST) RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(DOCUMENTED) --all-features; \
	else set -x; RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(DOCUMENTED); fi
	tests/public_api.py

# Licences, sources and duplicate versions of dependencies; with cargo-deny also security advisories.
deny:
	@if command -v cargo-deny >/dev/null; then set -x; $(CARGO) deny --workspace --all-features check licenses bans sources; \
	timeout 60 $(CARGO) deny fetch && $(CARGO) deny --workspace --all-features check advisories \
	|| echo "skipped: security advisories: their database cannot be fetched"; \
	else echo "skipped: security advisories: no cargo-deny (cargo install --locked cargo-deny)"; \
	tests/dependencies.py; fi

# With the minimum Rust version, and for aarch64.
portable:
	tests/portable

# What test-rust, test-gpu and test-verbs run.
test-build:
	$(CARGO) test --no-run $(TESTS)

test-rust:
	$(CARGO) $(NEXTEST) $(TESTS)
	$(CARGO) test --doc

test-rust-long:
	FLEXRING_TEST_EFFORT=10 $(CARGO) $(NEXTEST) $(if $(findstring nextest,$(NEXTEST)),--profile long) $(TESTS)

# Each fuzz target under libFuzzer, for FLEXRING_FUZZ_SECONDS (600).
fuzz:
	CARGO=$(CARGO) tests/fuzz

# The C programs of the tests under memcheck, with the static library that the build stage made.
test-valgrind: build
	tests/valgrind target/release/libflexring.a

# The source distribution, the wheel that cargo builds from it, and its annotations; needs PyPI.
test-wheel:
	tests/wheel

# What test-wheel makes, rebuilt only if its sources have changed. There is no wheel where pip cannot get what builds it.
WHEEL = target/wheel/built
$(WHEEL): $(wildcard $(shell git ls-files Cargo.* build.rs crates pyproject.toml include kernels python src 2>/dev/null))
	tests/wheel

# The backend for torch.distributed with several versions of torch (5 GB each), in target/torch; needs PyPI. TORCH="2.15.0"
# chooses versions, TORCH="--discard" removes each one after its checks.
test-torch: $(WHEEL)
	@if ls target/wheel/dist/*.whl >/dev/null 2>&1; then set -x; \
	python3 python/tests/torch_versions.py --wheel target/wheel/dist/*.whl $(TORCH); \
	else echo "skipped: PyTorch's versions: there is no wheel"; fi

# Vectors on GPUs on the simulated driver: no GPU is needed. On a machine with one, tests/gpu/run does more.
test-gpu:
	CARGO=$(CARGO) tests/gpu/run --simulated

# All that tests/gpu/first_contact needs on a machine with a GPU that has neither Rust nor a network.
gpu-bundle: setup
	CARGO=$(CARGO) tests/gpu/bundle.sh target/gpu-bundle.tar.xz

# The feature cust, which needs a libcuda.so to be built. Of all packages, so that they are compiled as for the other tests, once.
test-cust: $(CUST)
	@if [ -d $(CUST)/lib64 ]; then set -x; \
	CUDA_LIBRARY_PATH=$(CUST) LD_LIBRARY_PATH=$(CUST)/lib64 WORLDS=gpu \
	$(CARGO) test --config profile.test.package.flexring.opt-level=0 --features flexring/cust --test cust; \
	else echo "skipped: no g++ for the simulated CUDA driver, which cust is linked to"; fi

.PHONY: $(CUST)
$(CUST):
	@mkdir -p $(CUST)
	@if command -v g++ >/dev/null; then tests/gpu/driver/build.sh $(CUST)/.. && ln -sfn .. $(CUST)/lib64; fi

# The memory orders of the order of calls, of shared memory and of the GPU engine, under loom.
test-loom:
	$(CARGO) test -p flexring-loom

# On RDMA devices, which virtual machines bring along: the short selection of CI, and everything.
test-verbs:
	tests/vm/run.py --short

test-verbs-long:
	tests/vm/run.py

# The interpreter that has Debian's packages, matplotlib among them, if another python3 comes first in PATH.
DRAWING = $(firstword $(wildcard /usr/bin/python3) python3)

bench: build
	bench/run.sh

# The clusters alone, beside the other libraries and what the links allow; needs root.
bench-lab: build
	@bench/setup.sh $(VERSUS_PACKAGES)
	$(DRAWING) bench/versus/versus.py --only clusters --out bench/out/lab

# flexring beside other libraries, on one node and on clusters of namespaces; ARGS=--short takes 5 minutes instead of 60.
versus: build
	@bench/setup.sh $(VERSUS_PACKAGES)
	$(DRAWING) bench/versus/versus.py $(ARGS)

# How calls, creation and memory grow with ranks and bytes on one node, beside the simulator; 3 minutes at most.
bench-growth: build
	@bench/setup.sh gcc libc6-dev python3 python3-matplotlib
	$(DRAWING) bench/growth.py $(ARGS)

# A ResNet and a GPT by DistributedDataParallel over flexring, Gloo and Open MPI, on one node and on clusters of namespaces; ARGS=--short takes
# 3 minutes instead of 15. PYTHON names an interpreter with torch 2.8 or later (pip install torch).
bench-training: build
	@bench/setup.sh iproute2 openmpi-bin python3 python3-matplotlib
	$(DRAWING) bench/training/train.py $(ARGS)

# Times that the simulator predicts from a profile of `flexring tune`, beside measured ones, on clusters of namespaces; ARGS=--short takes 3
# minutes instead of 15.
bench-prediction: build
	@bench/setup.sh iproute2 python3 python3-matplotlib
	$(DRAWING) bench/prediction/predict.py $(ARGS)

# Instructions of the hot paths, by callgrind, beside the committed counts; fails above 3 %. ARGS=--update writes new ones.
# The harness is not among the default members, so it is linted here.
bench-gate:
	@bench/setup.sh valgrind libc6-dev python3
	$(CARGO) clippy -p flexring-gate --all-targets -- -D warnings
	CARGO=$(CARGO) bench/gate/gate.py $(ARGS)

# What the papers report beside the cost model and the simulator, in bench/results/papers.md.
bench-papers:
	@bench/setup.sh python3 python3-matplotlib
	@mkdir -p bench/out
	$(CARGO) bench --bench papers > bench/out/papers.json
	$(DRAWING) bench/papers/report.py bench/out/papers.json

# RDMA beside perftest in a virtual machine, and between two of them rails beside what each can carry, and Open MPI over UCX.
bench-verbs: build
	@bench/setup.sh $(VM_PACKAGES) gcc libc6-dev openmpi-bin libopenmpi-dev
	bench/verbs.py $(ARGS)

MSRV = $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
ARM = aarch64-unknown-linux-gnu
# Everything that the tests and lints use beyond stable Rust: Debian packages; by rustup, if it can be had, the minimum Rust
# version and the target aarch64; from PyPI the compiler of GPU kernels (109 MB), and nccl.h (in a wheel of 216 MB).
setup:
	@bench/setup.sh $(VERBS_PACKAGES) $(TEST_PACKAGES) $(VM_PACKAGES)
	@rustup run $(MSRV) cargo --version >/dev/null 2>&1 || timeout 120 rustup -q toolchain install $(MSRV) --profile minimal >/dev/null 2>&1 || true
	@timeout 120 rustup -q target add $(ARM) --toolchain $(MSRV) >/dev/null 2>&1 || timeout 120 rustup -q target add $(ARM) >/dev/null 2>&1 || true
	@$(MAKE) --no-print-directory setup-cuda
	@bench/setup_nccl.sh target/nccl-header

setup-cuda:
	@bench/setup_cuda.sh target/cuda-toolkit

install: build
	install -Dm644 include/flexring.h $(DESTDIR)$(PREFIX)/include/flexring.h
	install -Dm644 target/release/libflexring.a $(DESTDIR)$(PREFIX)/lib/libflexring.a
	strip --strip-debug $(DESTDIR)$(PREFIX)/lib/libflexring.a
	install -Dm755 target/release/libflexring.so $(DESTDIR)$(PREFIX)/lib/libflexring.so.$(ABI)
	ln -sfn libflexring.so.$(ABI) $(DESTDIR)$(PREFIX)/lib/libflexring.so
	install -Dm755 target/release/libflexring_nccl.so $(DESTDIR)$(PREFIX)/lib/libflexring_nccl.so.$(NCCL_ABI)
	ln -sfn libflexring_nccl.so.$(NCCL_ABI) $(DESTDIR)$(PREFIX)/lib/libflexring_nccl.so
	install -d $(DESTDIR)$(PREFIX)/lib/flexring/nccl
	ln -sfn ../../libflexring_nccl.so.$(NCCL_ABI) $(DESTDIR)$(PREFIX)/lib/flexring/nccl/libnccl.so.$(NCCL_ABI)
	install -Dm755 target/release/flexring $(DESTDIR)$(PREFIX)/bin/flexring
	rm -rf target/share
	target/release/flexring generate target/share
	cd target/share && find . -type f -exec install -Dm644 {} $(abspath $(DESTDIR)$(PREFIX)/share)/{} \;
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' flexring.pc.in > $(DESTDIR)$(PREFIX)/lib/pkgconfig/flexring.pc
