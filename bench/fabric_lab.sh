#!/usr/bin/env bash
# Nodes on one machine that are cabled to each other without a switch: one network namespace per node, and a pair of veth devices per link.
#
#   bench/fabric_lab.sh RATE LINK... -- COMMAND...
#
# Each LINK is two node numbers, such as 0-1; every link has the RATE, in the notation of `tc`. Node n has the address 198.18.0.(n + 1) on
# its loopback device. It reaches its neighbours by their links; all other nodes forward, by the fewest links, for control connections.
# COMMAND runs with the nodes' namespaces in LAB_NODES and their addresses in LAB_ADDRESSES. Everything is removed afterwards. Needs root.
set -euo pipefail

[ $# -gt 3 ] || { sed -n 's/^# \{0,1\}//;2,9p' "$0"; exit 2; }
rate=$1; shift
links=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do links+=("$1"); shift; done
[ $# -gt 1 ] || { echo "expected -- and a command" >&2; exit 2; }
shift
lab="ff$$"
. "$(dirname "$0")/lab_links.sh"

most=0
for link in "${links[@]}"; do for end in ${link/-/ }; do [ "$end" -le "$most" ] || most=$end; done; done
addresses=()
for number in $(seq 0 "$most"); do
    node="$lab-n$number"
    nodes+=("$node")
    addresses+=("198.18.0.$((number + 1))")
    ip netns add "$node"
    ip -n "$node" link set lo up
    ip -n "$node" addr add "${addresses[number]}/32" dev lo
    ip netns exec "$node" sysctl -qw net.ipv4.ip_forward=1
done
packet=$(packet_of "$rate")
neighbours=()
for link in "${links[@]}"; do
    one=${link%-*} other=${link#*-}
    ip -n "${nodes[one]}" link add "to$other" type veth peer name "to$one" netns "${nodes[other]}"
    for ends in "$one $other" "$other $one"; do
        read -r from to <<<"$ends"
        neighbours[from]="${neighbours[from]-} $to"
        ip -n "${nodes[from]}" link set "to$to" up gso_max_size "$packet"
        shape "${nodes[from]}" "to$to" "$rate"
    done
done
# The fewest links from each node to all others.
for from in "${!nodes[@]}"; do
    declare -A first=([$from]=self)
    queue=("$from")
    while [ ${#queue[@]} -gt 0 ]; do
        at=${queue[0]}; queue=("${queue[@]:1}")
        for to in ${neighbours[at]}; do
            [ -z "${first[$to]-}" ] || continue
            if [ "$at" = "$from" ]; then first[$to]=$to; else first[$to]=${first[$at]}; fi
            queue+=("$to")
            ip -n "${nodes[from]}" route add "${addresses[to]}/32" dev "to${first[$to]}" src "${addresses[from]}" \
                $([ "${first[$to]}" = "$to" ] || echo via "inet ${addresses[${first[$to]}]}" onlink)
        done
    done
    unset first
done
LAB_NODES="${nodes[*]}" LAB_ADDRESSES="${addresses[*]}" "$@"
