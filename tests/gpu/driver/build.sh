#!/bin/sh
# Builds the simulated CUDA driver: libcuda.so.1 and libcuda.so in the folder OUT.
#
#   tests/gpu/driver/build.sh OUT [test]
#
# A program finds it with LD_LIBRARY_PATH=OUT. With `test`, its own tests are built beside it and run.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build.sh OUT [test]}
kernels=$here/../../../kernels
cxx=${CXX:-g++}
warnings="-Wall -Wextra -Werror"

mkdir -p "$out"
out=$(cd "$out" && pwd)
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT

# The kernels must round as a GPU does, so nothing is contracted.
"$cxx" -std=c++17 -O2 -fPIC -ffp-contract=off -I "$kernels" -c "$kernels/host/launch.cpp" -o "$objects/kernels.o" &
for source in "$here"/*.cpp; do
    name=$(basename "$source" .cpp)
    [ "$name" = selftest ] || echo "-c $source -o $objects/$name.o"
done | xargs -P "$(nproc)" -L 1 "$cxx" -std=c++17 -O1 -g -fPIC -fvisibility=hidden $warnings
wait $!

# Threads of the program may call until the very end, so the library is never unloaded. Only cu* is to be seen.
echo '{ global: cu*; local: *; };' >"$objects/exports"
"$cxx" -shared -Wl,-soname,libcuda.so.1 -Wl,-z,nodelete -Wl,-z,defs -Wl,--version-script="$objects/exports" \
    -o "$out/libcuda.so.1.new" "$objects"/*.o -pthread
# Whole or not at all, for others may be using what is there.
mv "$out/libcuda.so.1.new" "$out/libcuda.so.1"
ln -sf libcuda.so.1 "$out/libcuda.so"

[ "${2:-}" = test ] || exit 0
"$cxx" -std=c++17 -O1 -g $warnings -o "$out/selftest" "$here/selftest.cpp" -ldl -pthread
LD_LIBRARY_PATH=$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$out/selftest"
