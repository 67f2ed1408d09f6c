#!/bin/sh
# Builds the simulated CUDA driver: libcuda.so.1 and libcuda.so in the folder OUT.
#
#   [HIDE="cuFoo cuBar"] tests/gpu/driver/build.sh OUT [test]
#
# A program finds it with LD_LIBRARY_PATH=OUT. The functions in HIDE are not exported, as if the driver were too old to
# have them. With `test`, its own tests are built beside it and run, also with ThreadSanitizer (OUT/tsan) where the compiler
# has it; FLEXRING_NO_TSAN=1 leaves that out. What is up to date is left alone.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build.sh OUT [test]}
kernels=$here/../../../kernels
cxx=${CXX:-g++}
flags="-std=c++17 -g -fPIC -pthread ${CXXFLAGS:-}"
warnings="-Wall -Wextra -Werror"

mkdir -p "$out"
out=$(cd "$out" && pwd)
exec 9>"$out/lock"
flock 9 # two may want it at once

# A stamp says what something was made of; without it, or with another one, it is made again.
stamp_of() { sha256sum | cut -d " " -f 1; }

# build FOLDER FLAGS OPTIMIZATION: the library in FOLDER, compiled with FLAGS in addition; its kernels with OPTIMIZATION.
build() {
    folder=$1
    objects=$folder/objects
    mkdir -p "$objects"
    all="$flags $2"
    stamp=$({ echo "$cxx $all"; cat "$here"/build.sh "$here"/*.cpp "$here"/*.h "$kernels"/*.* "$kernels"/host/*; } | stamp_of)
    if [ "$(cat "$folder/objects.stamp" 2>/dev/null)" != "$stamp" ]; then
        rm -f "$folder/objects.stamp" "$objects"/*.o
        # The kernels must round as a GPU does, so nothing is contracted.
        "$cxx" $all $3 -ffp-contract=off -I "$kernels" -c "$kernels/host/launch.cpp" -o "$objects/kernels.o" &
        pid=$!
        for source in "$here"/*.cpp; do
            echo "-c $source -o $objects/$(basename "$source" .cpp).o"
        done | xargs -P "$(nproc)" -L 1 "$cxx" $all -O1 -fvisibility=hidden $warnings
        wait "$pid"
        echo "$stamp" >"$folder/objects.stamp"
    fi

    stamp="$stamp ${HIDE:-}"
    if [ "$(cat "$folder/libcuda.stamp" 2>/dev/null)" != "$stamp" ]; then
        rm -f "$folder/libcuda.stamp"
        # Only cu* is to be seen. Threads of the program may call until the very end, so the library is never unloaded.
        hidden=$(for name in ${HIDE:-}; do printf '%s; ' "$name"; done)
        echo "{ global: cu*; local: $hidden*; };" >"$objects/exports"
        # Whole or not at all, for others may be using what is there.
        "$cxx" $all -shared -Wl,-soname,libcuda.so.1 -Wl,-z,nodelete -Wl,--version-script="$objects/exports" \
            -o "$folder/libcuda.so.1.new" "$objects"/*.o
        mv "$folder/libcuda.so.1.new" "$folder/libcuda.so.1"
        ln -sf libcuda.so.1 "$folder/libcuda.so"
        echo "$stamp" >"$folder/libcuda.stamp"
    fi
}

# selftest FOLDER FLAGS [RUNNER]: builds the tests in FOLDER and runs them, as arguments of RUNNER if given.
selftest() {
    "$cxx" $flags $2 -O1 $warnings -o "$1/selftest" "$here"/selftest/*.cpp -ldl
    env LD_LIBRARY_PATH="$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" ${3:-} "$1/selftest"
}

build "$out" "" -O2
[ "${2:-}" = test ] || exit 0
selftest "$out" ""

[ "${FLEXRING_NO_TSAN:-0}" = 1 ] && exit 0
tsan="-fsanitize=thread"
if ! echo "int main() {}" | "$cxx" $tsan -x c++ - -o "$out/objects/probe" 2>/dev/null; then
    echo "skipped: $cxx has no ThreadSanitizer"
    exit 0
fi
build "$out/tsan" "$tsan -g1" -O1
# ThreadSanitizer does not start with the kernel's widest randomisation of addresses.
runner=""
"$out/objects/probe" 2>/dev/null || runner="setarch -R"
export TSAN_OPTIONS="exitcode=66 handle_segv=0 handle_abort=0 ${TSAN_OPTIONS:-}"
selftest "$out/tsan" "$tsan -g1" "$runner"
