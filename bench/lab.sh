#!/usr/bin/env bash
# A cluster on one machine: one network namespace per node, connected to one switch by links of given rates.
#
#   bench/lab.sh RATE... -- COMMAND...
#
# Each RATE (in the notation of `tc`: 1gbit, 500mbit) creates a node. COMMAND runs with the nodes' namespaces in
# LAB_NODES and their addresses in LAB_ADDRESSES, both separated by blanks. Everything is removed afterwards, also
# when the command fails. Needs root. Addresses are in 198.18.0.0/15, which is reserved for benchmarks (RFC 2544).
set -euo pipefail

rates=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do rates+=("$1"); shift; done
[ ${#rates[@]} -gt 0 ] && [ "${1-}" = -- ] && [ $# -gt 1 ] || { sed -n 's/^# \{0,1\}//;4,10p' "$0"; exit 2; }
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

# Limits the rate at which one end of a link sends, with a queue of at most 100 ms.
shape() { ip netns exec "$1" tc qdisc add dev "$2" root tbf rate "$3" burst 256kb latency 100ms; }

ip netns add "$switch"
ip -n "$switch" link add bridge type bridge
ip -n "$switch" link set bridge up
addresses=()
for number in "${!rates[@]}"; do
    node="$lab-n$number"
    nodes+=("$node")
    addresses+=("198.18.0.$((number + 1))")
    ip netns add "$node"
    ip -n "$node" link set lo up
    ip -n "$node" link add up0 type veth peer name "port$number" netns "$switch"
    ip -n "$node" addr add "${addresses[number]}/24" dev up0
    ip -n "$node" link set up0 up
    ip -n "$switch" link set "port$number" master bridge up
    shape "$node" up0 "${rates[number]}"
    shape "$switch" "port$number" "${rates[number]}"
done
LAB_NODES="${nodes[*]}" LAB_ADDRESSES="${addresses[*]}" "$@"
