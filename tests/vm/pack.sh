#!/usr/bin/env bash
# Packs files into an archive that a kernel unpacks at boot, and programs with the libraries that they need.
#
#   tests/vm/pack.sh ARCHIVE FILE[=PLACE]...
#
# Without a PLACE, a file is placed in /usr/bin. A folder needs a PLACE for its contents. Debug information is removed: it
# is most of a test binary.
set -euo pipefail
[ $# -ge 2 ] || { sed -n 's/^# \{0,1\}//;2,7p' "$0"; exit 2; }

archive=$1
shift
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
# These are equal in every archive: if one has a link, the folder of a later archive would replace it.
mkdir -p "$tree"/usr/{bin,lib,lib64}
ln -s usr/bin "$tree/bin"
ln -s usr/bin "$tree/sbin"
ln -s bin "$tree/usr/sbin"
ln -s usr/lib "$tree/lib"
ln -s usr/lib64 "$tree/lib64"

for item in "$@"; do
    file=${item%%=*}
    place=${item#"$file"}
    place=${place#=}
    if [ -d "$file" ]; then
        mkdir -p "$tree$place"
        cp -a "$file/." "$tree$place"
        continue
    fi
    place=$tree${place:-/usr/bin/${file##*/}}
    mkdir -p "${place%/*}"
    cp -L --remove-destination "$file" "$place"
    # For a file that is not a dynamic program, ldd lists nothing and strip changes nothing.
    for library in $(ldd "$file" 2>/dev/null | grep -o '/[^ ]*' || true); do
        [ -e "$tree$library" ] && continue
        mkdir -p "$tree${library%/*}"
        cp -L "$library" "$tree$library"
    done
    strip --strip-debug "$place" 2>/dev/null || true
done
(cd "$tree" && find . -mindepth 1 | cpio --quiet -o -H newc -R 0:0) >"$archive"
