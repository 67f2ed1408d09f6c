#!/usr/bin/env bash
# Packs all that tests/gpu/first_contact and tests/gpu/run need on a machine with a GPU, without Rust and without a network:
#
#   tests/gpu/bundle.sh ARCHIVE
#
# Unpack it there and run tests/gpu/first_contact. Debug information is left out. Fails if the archive exceeds
# 64 MiB, or if no kernels are compiled into the programs.
set -euo pipefail
cd "$(dirname "$0")/../.."
archive=$(realpath -m "${1:?usage: bundle.sh ARCHIVE}")
most=$((64 << 20))
# Machine code for all architectures, in the test binaries too.
export FLEXRING_CUDA_KERNELS=nvcc

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree"/{bin,lib,tests/gpu,bench/peers} "${archive%/*}"
tests/gpu/run --programs | while IFS=$'\t' read -r name path; do
    case $name in
    library) cp -L "$path" "$tree/lib/libflexring.so" ;;
    *) cp -L "$path" "$tree/bin/$name" ;;
    esac
done
# The release build of the workspace, which --programs has made, contains it.
cp -L "${CARGO_TARGET_DIR:-target}/release/libflexring_nccl.so" "$tree/lib/"
for program in flexring suite gpu_latency gpu_replays; do [ -e "$tree/bin/$program" ]; done
[ -e "$tree/lib/libflexring.so" ]
kernels=$("$tree/bin/flexring" doctor | grep "GPU kernels:" || true)
if [[ $kernels != *"machine code"* ]]; then
    echo "the bundle would have no compiled kernels, which a machine without NVRTC cannot run: $kernels" >&2
    exit 1
fi
# A GPU refuses kernels that use local memory; this test reads their machine code.
"${CARGO:-cargo}" test -p flexring --lib --quiet -- device::cuda::image::tests
# A library keeps the symbols that programs link to.
strip "$tree"/bin/*
strip --strip-unneeded "$tree"/lib/*
cp -r tests/gpu/{first_contact,run,nccl_tests,*.py,steps,cells,peers} "$tree/tests/gpu/"
cp tests/report.py "$tree/tests/"
cp bench/peers/nccl_allreduce.py "$tree/bench/peers/"
cp -r python examples include "$tree/"
find "$tree" -name __pycache__ -prune -exec rm -rf {} +
# Each program contains the same kernels: a window as long as all of them packs these once.
tar -C "$tree" -c . | xz --lzma2=preset=1,dict=512MiB >"$archive.part"
size=$(stat -c %s "$archive.part")
if [ "$size" -gt "$most" ]; then
    rm -f "$archive.part"
    echo "the bundle has $size bytes, more than $most" >&2
    exit 1
fi
mv "$archive.part" "$archive"
echo "$archive: $((size >> 20)) MiB"
