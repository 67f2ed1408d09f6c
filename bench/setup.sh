#!/usr/bin/env bash
# Installs the named Debian packages as root on Debian; elsewhere reports which are missing.
set -euo pipefail
missing=()
for package in "$@"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed \
        || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
        tail -20 "$log"
        echo "some packages could not be installed; tests that need them are skipped"
    fi
else
    echo "not installed: ${missing[*]}; tests that need them are skipped"
    echo "(as root: apt-get install ${missing[*]})"
fi
