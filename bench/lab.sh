#!/usr/bin/env bash
# A cluster on one machine: one network namespace per node, connected to one switch by links of given rates.
#
#   bench/lab.sh RATE... -- COMMAND...
#
# Each RATE (in the notation of `tc`: 1gbit, 500mbit) creates a node. The nodes between `[` and `]` have a switch of
# their own, whose link to the first switch has the RATE after `]`: [ 1gbit 1gbit ] 500mbit 1gbit. COMMAND runs with the nodes' namespaces in
# LAB_NODES and their addresses in LAB_ADDRESSES, both separated by blanks. Everything is removed afterwards, also
# when the command fails. Needs root. Addresses are in 198.18.0.0/15, which is reserved for benchmarks (RFC 2544).
# A link that was idle lets the bytes of 2.1 ms pass at once, and at least 32 KiB. RATE is a whole number of gbit or mbit.
set -euo pipefail

words=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do words+=("$1"); shift; done
[ ${#words[@]} -gt 0 ] && [ "${1-}" = -- ] && [ $# -gt 1 ] || { sed -n 's/^# \{0,1\}//;4,10p' "$0"; exit 2; }
shift
[ "$(id -u)" -eq 0 ] || { echo "skipped: network namespaces need root"; exit 0; }

lab="fr$$"
switch="$lab-switch"
nodes=()
down() {
    for node in ${nodes[@]+"${nodes[@]}"} "$switch"; do
        # All processes in the namespaces of this lab were started by it.
        for pid in $(ip netns pids "$node" 2>/dev/null); do kill -9 "$pid" 2>/dev/null || true; done
        ip netns del "$node" 2>/dev/null || true
    done
    # Open MPI names its segments by host, and leaves them behind when its ranks are killed during a call.
    rm -f /dev/shm/vader_segment."$lab"-n*
}
trap down EXIT
trap 'exit 130' INT TERM

# Limits the rate at which one end of a link sends, with a queue of at most 100 ms. Packets before segmentation are shorter than the
# burst, so that a timer that is late costs no bandwidth.
burst_of() {
    local mbit
    case $1 in
    *gbit) mbit=$((${1%gbit} * 1000)) ;;
    *mbit) mbit=$((${1%mbit})) ;;
    *) echo "$1: expected a rate such as 1gbit or 500mbit" >&2; exit 2 ;;
    esac
    # With the bytes of 0.26 ms, links of 1 Gbit/s carry 13 to 20 % less on two busy cores, and with those of 2.1 ms 1 %.
    local bytes=$((mbit * 262))
    echo $((bytes < 32768 ? 32768 : bytes))
}
shape() { ip netns exec "$1" tc qdisc add dev "$2" root tbf rate "$3" burst "$(burst_of "$3")" latency 100ms; }

ip netns add "$switch"
add_bridge() {
    ip -n "$switch" link add "$1" type bridge
    ip -n "$switch" link set "$1" up
}
add_bridge bridge
addresses=()
bridge=bridge
racks=0
add_node() {
    local number=${#nodes[@]} node="$lab-n${#nodes[@]}"
    nodes+=("$node")
    addresses+=("198.18.0.$((number + 1))")
    ip netns add "$node"
    ip -n "$node" link set lo up
    ip -n "$node" link add up0 type veth peer name "port$number" netns "$switch"
    ip -n "$node" addr add "${addresses[number]}/24" dev up0
    local burst
    burst=$(burst_of "$1")
    ip -n "$node" link set up0 up gso_max_size $((burst / 4 > 65536 ? 65536 : burst / 4))
    ip -n "$switch" link set "port$number" master "$bridge"
    ip -n "$switch" link set "port$number" up
    shape "$node" up0 "$1"
    shape "$switch" "port$number" "$1"
}
# Connects the switch of the last rack to the first one.
add_uplink() {
    ip -n "$switch" link add "up$racks" type veth peer name "down$racks"
    ip -n "$switch" link set "up$racks" master "rack$racks" up
    ip -n "$switch" link set "down$racks" master bridge up
    shape "$switch" "up$racks" "$1"
    shape "$switch" "down$racks" "$1"
}
rack_ends=
for word in "${words[@]}"; do
    case $word in
    '[') racks=$((racks + 1)); bridge="rack$racks"; add_bridge "$bridge" ;;
    ']') bridge=bridge; rack_ends=1 ;;
    *) if [ "$rack_ends" ]; then add_uplink "$word"; rack_ends=; else add_node "$word"; fi ;;
    esac
done
LAB_NODES="${nodes[*]}" LAB_ADDRESSES="${addresses[*]}" "$@"
