#!/bin/sh
# Builds the simulated CUDA driver: libcuda.so.1 and libcuda.so in the folder OUT.
#
#   [HIDE="cuFoo cuBar"] tests/gpu/driver/build.sh OUT [test]
#
# A program finds it with LD_LIBRARY_PATH=OUT. The functions in HIDE are not exported, as if the driver were too old to
# have them. With `test`, its own tests are built beside it and run. What is up to date is left alone.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build.sh OUT [test]}
kernels=$here/../../../kernels
cxx=${CXX:-g++}
flags="-std=c++17 -g -fPIC -pthread ${CXXFLAGS:-}"
warnings="-Wall -Wextra -Werror"

mkdir -p "$out"
out=$(cd "$out" && pwd)
objects=$out/objects
mkdir -p "$objects"
exec 9>"$out/lock"
flock 9 # two may want it at once

# A stamp says what something was made of; without it, or with another one, it is made again.
stamp_of() { sha256sum | cut -d " " -f 1; }

stamp=$({ echo "$cxx $flags"; cat "$here"/build.sh "$here"/*.cpp "$here"/*.h "$kernels"/*.* "$kernels"/host/*; } | stamp_of)
if [ "$(cat "$out/objects.stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -f "$out/objects.stamp" "$objects"/*.o
    # The kernels must round as a GPU does, so nothing is contracted.
    "$cxx" $flags -O2 -ffp-contract=off -I "$kernels" -c "$kernels/host/launch.cpp" -o "$objects/kernels.o" &
    for source in "$here"/*.cpp; do
        echo "-c $source -o $objects/$(basename "$source" .cpp).o"
    done | xargs -P "$(nproc)" -L 1 "$cxx" $flags -O1 -fvisibility=hidden $warnings
    wait $!
    echo "$stamp" >"$out/objects.stamp"
fi

stamp="$stamp ${HIDE:-}"
if [ "$(cat "$out/libcuda.stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -f "$out/libcuda.stamp"
    # Only cu* is to be seen. Threads of the program may call until the very end, so the library is never unloaded.
    hidden=$(for name in ${HIDE:-}; do printf '%s; ' "$name"; done)
    echo "{ global: cu*; local: $hidden*; };" >"$objects/exports"
    # Whole or not at all, for others may be using what is there.
    "$cxx" $flags -shared -Wl,-soname,libcuda.so.1 -Wl,-z,nodelete -Wl,--version-script="$objects/exports" \
        -o "$out/libcuda.so.1.new" "$objects"/*.o
    mv "$out/libcuda.so.1.new" "$out/libcuda.so.1"
    ln -sf libcuda.so.1 "$out/libcuda.so"
    echo "$stamp" >"$out/libcuda.stamp"
fi

[ "${2:-}" = test ] || exit 0
"$cxx" $flags -O1 $warnings -o "$out/selftest" "$here"/selftest/*.cpp -ldl
LD_LIBRARY_PATH=$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$out/selftest"
