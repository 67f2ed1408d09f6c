#!/usr/bin/env bash
# The benchmarks of `make bench`. Results are written to bench/out/; published results are in bench/results/.
set -euo pipefail
cd "$(dirname "$0")/.."
bench/setup.sh gcc libopenmpi-dev openmpi-bin iproute2 iperf3 python3
mkdir -p bench/out
bench/compare.py node --out bench/out/node.json
bench/lab.sh 1gbit 1gbit -- bench/compare.py link --out bench/out/link.json
