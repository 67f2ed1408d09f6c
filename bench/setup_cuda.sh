#!/usr/bin/env bash
# Installs CUDA's compiler NVRTC from PyPI into a folder; reports the reason if it cannot. It is optional for building and
# running. CUDA 12.9 is the last version whose machine code runs on drivers from 525 on and on GPUs of sm_70.
set -euo pipefail
folder=$1
wheels="nvidia-cuda-nvrtc-cu12==12.9.86"
[ "$(cat "$folder/.wheels" 2>/dev/null)" = "$wheels" ] && exit 0
skip() {
    echo "no CUDA compiler in $folder: $1; GPU kernels are embedded as source, and tests of the compiler are skipped"
    exit 0
}
[ "$(uname -s)" = Linux ] || skip "the wheel supports Linux only"
python3 -m pip --version >/dev/null 2>&1 || skip "python3 has no pip"
echo "installing CUDA's compiler into $folder"
unfinished=$folder.unfinished
log=$(mktemp)
trap 'rm -rf "$log" "$unfinished"' EXIT
rm -rf "$unfinished"
# shellcheck disable=SC2086
python3 -m pip install --quiet --no-deps --only-binary=:all: --target "$unfinished" $wheels >"$log" 2>&1 \
    || skip "$(grep -m 1 ERROR "$log" || tail -n 1 "$log")"
# Another build of the same compiler, which nothing here opens.
rm -f "$unfinished"/nvidia/cuda_nvrtc/lib/libnvrtc.alt.so* "$unfinished"/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.alt.so*
echo "$wheels" >"$unfinished/.wheels"
rm -rf "$folder"
mv "$unfinished" "$folder"
# Cargo runs the build script again, which did not find a compiler before.
touch "$(dirname "$0")/../build.rs"
