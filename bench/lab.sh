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
lab="fr$$"
switch="$lab-switch"
. "$(dirname "$0")/lab_links.sh"
others=("$switch")

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
    local packet
    packet=$(packet_of "$1")
    ip -n "$node" link set up0 up gso_max_size "$packet"
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
