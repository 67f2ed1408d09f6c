# Sourced by bench/lab.sh and bench/fabric_lab.sh, which set `lab`: namespaces that are removed in any case, and links of given rates.

[ "$(id -u)" -eq 0 ] || { echo "skipped: network namespaces need root"; exit 0; }

# The namespaces of nodes, and all others of the lab.
nodes=()
others=()
down() {
    for node in ${nodes[@]+"${nodes[@]}"} ${others[@]+"${others[@]}"}; do
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
packet_of() {
    local burst
    burst=$(burst_of "$1") || exit 2
    echo $((burst / 4 > 65536 ? 65536 : burst / 4))
}
shape() { ip netns exec "$1" tc qdisc add dev "$2" root tbf rate "$3" burst "$(burst_of "$3")" latency 100ms; }
