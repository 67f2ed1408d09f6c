#!/usr/bin/env bash
# Downloads NVIDIA's nccl.h from PyPI into a folder; reports the reason if it cannot. Only tests of libflexring_nccl.so need it.
set -euo pipefail
folder=$1
wheel="nvidia-nccl-cu13==2.30.7"
[ "$(cat "$folder/.wheel" 2>/dev/null)" = "$wheel" ] && exit 0
skip() {
    echo "no nccl.h in $folder: $1; C programs for NCCL are not tested"
    exit 0
}
python3 -m pip --version >/dev/null 2>&1 || skip "python3 has no pip"
echo "downloading nccl.h into $folder"
unfinished=$folder.unfinished
log=$(mktemp)
trap 'rm -rf "$log" "$unfinished"' EXIT
rm -rf "$unfinished"
timeout 120 python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$unfinished" "$wheel" >"$log" 2>&1 \
    || skip "$(grep -m 1 ERROR "$log" || tail -n 1 "$log")"
python3 - "$unfinished" <<'PYTHON' || skip "the wheel has none"
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
wheel = next(folder.glob("*.whl"))
(folder / "nccl.h").write_bytes(zipfile.ZipFile(wheel).read("nvidia/nccl/include/nccl.h"))
wheel.unlink()
PYTHON
echo "$wheel" >"$unfinished/.wheel"
rm -rf "$folder"
mv "$unfinished" "$folder"
