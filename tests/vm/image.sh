#!/usr/bin/env bash
# Builds the image of a test machine: Debian's kernel, and a root with busybox, Soft-RoCE and the programs to inspect it.
# Installs nothing.
#
#   tests/vm/image.sh [FOLDER]
#
# Writes `kernel` and `initramfs` to FOLDER (target/vm), unless they are up to date. Exits with 3 and prints the reason if
# this machine cannot build the image.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-${CARGO_TARGET_DIR:-$here/../../target}/vm}

cannot() { echo "$*" >&2; exit 3; }
[ "$(uname -m)" = x86_64 ] || cannot "the test machine is for x86-64"
packages=(busybox-static cpio ibverbs-providers ibverbs-utils iproute2 kmod perftest binutils xz-utils)
missing=$(comm -23 <(printf '%s\n' "${packages[@]}" | sort) \
    <(dpkg-query --show --showformat='${db:Status-Status} ${Package}\n' 2>/dev/null | sed -n 's/^installed //p' | sort))
[ -z "$missing" ] || cannot "not installed:" $missing

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
exec 9>"$folder/lock"
flock 9 # two processes may build it at once
stamp=$({ cat "$here"/{image.sh,pack.sh,init,channel}; dpkg-query --show "${packages[@]}"; } | sha256sum)
[ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ] && exit 0
rm -f "$folder/stamp"

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# The package of the kernel. It is kept, as only its download takes long.
if ! ls "$folder"/linux-image-*.deb >/dev/null 2>&1; then
    fetch() {
        # The name of the package contains the version; linux-image-amd64 depends on it.
        local name
        name=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p')
        cd "$build" && timeout 300 apt-get -q download $name && mv linux-image-*.deb "$folder/"
    }
    (fetch) >/dev/null 2>&1 || timeout 120 apt-get update >/dev/null 2>&1 || true
    ls "$folder"/linux-image-*.deb >/dev/null 2>&1 || said=$(fetch 2>&1) || cannot "cannot download a kernel: ${said##*$'\n'}"
fi
dpkg -x "$(ls "$folder"/linux-image-*.deb | tail -1)" "$build/kernel"
release=$(ls "$build/kernel/lib/modules")

# Under emulation, a kernel spends most of its boot time on unpacking itself, so it is unpacked here. xz reports an error for
# the bytes that follow the packed part. A kernel that is packed in another way is used as it is.
image=$build/kernel/boot/vmlinuz-$release
start=$(LC_ALL=C grep -obUaP '\xfd7zXZ' "$image" | head -1 | cut -d: -f1) || true
tail -c "+$((start + 1))" "$image" | xz -dc >"$folder/kernel" 2>/dev/null || true
head -c 4 "$folder/kernel" | grep -q ELF || cp "$image" "$folder/kernel"

# The modules for boot, and those that the kernel loads itself: shaping, loss and delay.
modules=(virtio_pci virtio_net virtio_console crc32_generic rdma_rxe ib_uverbs rdma_ucm
    sch_netem sch_tbf sch_prio sch_ingress cls_u32 cls_matchall act_gact act_mirred)
depmod -b "$build/kernel" "$release"
for module in "${modules[@]}"; do
    modprobe -d "$build/kernel" -S "$release" --show-depends "$module"
done | sed -n "s|^insmod $build/kernel/\([^ ]*\).*|\1|p" | sort -u >"$build/modules"
mkdir -p "$build/few" "$build/root/usr/bin"
(cd "$build/kernel" && cpio --quiet -pdm "$build/few" <"$build/modules")
cp "$build/kernel/lib/modules/$release"/modules.{builtin,builtin.modinfo,order} "$build/few/lib/modules/$release/"
depmod -b "$build/few" "$release"

# busybox provides all programs that are not packed separately. Its applets that start programs would prefer its own `ip`
# and `tc`, so shell, env and similar programs are not those of busybox.
for applet in $(busybox --list); do ln -s busybox "$build/root/usr/bin/$applet"; done
programs=(busybox dash=/usr/bin/sh env nice nohup setpriv setsid timeout xargs ip tc rdma
    ibv_devices ibv_devinfo ibv_rc_pingpong ib_write_bw ib_write_lat ib_read_bw ib_send_bw ib_send_lat)
files=()
for program in "${programs[@]}"; do
    path=$(PATH=$PATH:/usr/sbin:/sbin command -v "${program%%=*}")
    files+=("$path${program#"${program%%=*}"}")
done
provider=$(dpkg -L ibverbs-providers | grep '/librxe-')
"$here/pack.sh" "$folder/initramfs" "$build/root=/" "$build/few/lib/modules=/usr/lib/modules" "${files[@]}" \
    "$here/init=/init" "$here/channel=/usr/bin/channel" \
    "$provider=$provider" /etc/libibverbs.d/rxe.driver=/etc/libibverbs.d/rxe.driver
echo "$stamp" >"$folder/stamp"
