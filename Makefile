# What a developer and CI run. `make test` is everything; parts have names of their own.

CARGO ?= cargo
PREFIX ?= /usr/local
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
# Debian packages that tests need beyond Rust; without root they are named, not installed.
PACKAGES = gcc g++ pkg-config iproute2 openmpi-bin libopenmpi-dev python3 python3-torch

# And those that the virtual machines of test-verbs are made of.
VM_PACKAGES = qemu-system-x86 busybox-static cpio kmod xz-utils binutils iproute2 ibverbs-utils ibverbs-providers perftest python3

.PHONY: all build test lint bench bench-lab install setup test-rust test-loom test-verbs

all: build

build:
	$(CARGO) build --release

test: setup build test-rust test-loom

# Tests run the release build's library and command too, as users do.
test-rust:
	$(CARGO) test

# Every interleaving of the shared-memory ring that the memory model allows.
test-loom:
	RUSTFLAGS="--cfg loom" $(CARGO) test --no-default-features --lib --target-dir target/loom lane

# On RDMA devices, which virtual machines bring along.
test-verbs:
	@bench/setup.sh $(VM_PACKAGES)
	tests/vm/run.py

lint:
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --lib

bench: build
	bench/run.sh

# Clusters of network namespaces, beside Gloo, Open MPI and what the links allow; needs root, takes some minutes.
bench-lab: build
	@bench/setup.sh gcc libopenmpi-dev openmpi-bin python3-torch iproute2 iperf3 python3
	bench/lab_compare.py --out bench/out/lab.json

setup:
	@bench/setup.sh $(PACKAGES)

install: build
	install -Dm644 include/flexring.h $(DESTDIR)$(PREFIX)/include/flexring.h
	install -Dm644 target/release/libflexring.a $(DESTDIR)$(PREFIX)/lib/libflexring.a
	install -Dm755 target/release/libflexring.so $(DESTDIR)$(PREFIX)/lib/libflexring.so
	install -Dm755 target/release/flexring $(DESTDIR)$(PREFIX)/bin/flexring
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' flexring.pc.in > $(DESTDIR)$(PREFIX)/lib/pkgconfig/flexring.pc
