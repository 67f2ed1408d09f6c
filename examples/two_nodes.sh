#!/usr/bin/env bash
# Starts a training example on two uneven nodes: network namespaces with two ranks and one rank, and a link of 1 Gbit/s.
#
#   examples/two_nodes.sh examples/train_gpt.py --backend flexring
#
# Paths are relative to the repository. Needs root. PYTHON is the interpreter, by default python3.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${LAB_NODES-}" ]; then
    [ $# -gt 0 ] || { sed -n 's/^# \{0,1\}//;2,6p' "$0"; exit 2; }
    exec bench/lab.sh 1gbit 1gbit -- examples/two_nodes.sh "$@"
fi

read -ra nodes <<<"$LAB_NODES"
read -ra addresses <<<"$LAB_ADDRESSES"
ranks=(2 1)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# Both torchruns name the first node's address. Gloo must know the interface, flexring finds it.
for node in 1 0; do
    GLOO_SOCKET_IFNAME=up0 ip netns exec "${nodes[node]}" "${PYTHON:-python3}" -m torch.distributed.run \
        --nnodes 2 --node_rank "$node" --nproc_per_node "${ranks[node]}" --master_addr "${addresses[0]}" --master_port 29500 \
        --redirects 1 --tee 1 --log_dir "$logs/$node" "$@" &
    processes+=($!)
done
status=0
for process in "${processes[@]}"; do wait "$process" || status=$?; done
exit $status
