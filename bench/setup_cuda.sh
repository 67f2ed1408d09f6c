#!/usr/bin/env bash
# Installs CUDA's compilers from PyPI into a folder; reports the reason if it cannot. They are optional for building and
# running.
set -euo pipefail
folder=$1
wheels="nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
    nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-cccl==13.0.85"
[ "$(cat "$folder/.wheels" 2>/dev/null)" = "$wheels" ] && exit 0
skip() {
    echo "no CUDA compilers in $folder: $1; GPU kernels are embedded as source, and tests of their compilers are skipped"
    exit 0
}
[ "$(uname -s)" = Linux ] || skip "the wheels support Linux only"
python3 -m pip --version >/dev/null 2>&1 || skip "python3 has no pip"
echo "installing CUDA's compilers into $folder"
unfinished=$folder.unfinished
log=$(mktemp)
trap 'rm -rf "$log" "$unfinished"' EXIT
rm -rf "$unfinished"
# shellcheck disable=SC2086
python3 -m pip install --quiet --no-deps --only-binary=:all: --target "$unfinished" $wheels >"$log" 2>&1 \
    || skip "$(grep -m 1 ERROR "$log" || tail -n 1 "$log")"
echo "$wheels" >"$unfinished/.wheels"
rm -rf "$folder"
mv "$unfinished" "$folder"
