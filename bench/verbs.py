#!/usr/bin/env python3
"""Compares flexring over RDMA with perftest in one Soft-RoCE machine, and two rails with one between two machines.

    bench/verbs.py [--flexring PROGRAM] [--out FILE]

Processors are emulated and two cores do everything, so only ratios within one run are meaningful. Every value is the median
of rounds in which the programs take turns.
"""

import argparse
import json
import os
import platform
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "vm"))

import scenarios  # noqa: E402
import vm  # noqa: E402

ROUNDS = 5
# The rate of a rail between two machines, so that rails are the bottleneck and not the emulation.
RAIL = "tbf rate 32mbit burst 32k latency 200ms"


def perftest(machine, command):
    """Runs perftest's server and client in one machine. Returns the numbers of the last line of output."""
    command += " -d rxe0 -x 1 -F"
    server = machine.start(command)
    scenarios.must(machine, "until netstat -ltn | grep -q :18515; do sleep 0.05; done")
    code, printed = machine.run(f"{command} 127.0.0.1", 60)
    server.wait()
    lines = [line.split() for line in printed.splitlines() if re.match(r"^ *\d", line)]
    if code or not lines:
        raise SystemExit(f"{command}: {printed}")
    return [float(field) for field in lines[-1]]


def times(printed):
    """Microseconds of `flexring perf` by size, in place."""
    rows = [line.split() for line in printed.splitlines() if re.match(r"^ +\d+ +\d+ +float", line)]
    return {int(row[0]): float(row[9]) for row in rows}


def local(machine, sizes, iterations):
    command = f"FLEXRING_TRANSPORT=verbs flexring perf --ranks 2 -b {sizes[0]} -e {sizes[-1]} -f {sizes[-1] // sizes[0] or 2} -n {iterations} -w 5"
    return times(scenarios.must(machine, command, 120))


def in_one(flexring):
    """Measures two processes of one machine, over one device."""
    small, large = 8, 4 << 20
    samples = {"half round trip us": [], "exchange us": [], "call us": [], "write MB/s": [], "call MB/s": []}
    with vm.boot(1, 1, [flexring]) as (machine,):
        # Frames as long as the largest RDMA packets.
        scenarios.must(machine, "ip link set eth0 mtu 4200")
        for _ in range(ROUNDS):
            samples["half round trip us"].append(perftest(machine, "ib_write_lat -s 8 -n 500")[4])
            # Both directions at once: the cost of an exchange of short messages.
            samples["exchange us"].append(2 / perftest(machine, "ib_write_bw -b -s 8 -n 2000")[4])
            samples["call us"].append(local(machine, [small], 500)[small])
            # perftest reports MiB/s, and the sum of both directions.
            samples["write MB/s"].append(perftest(machine, "ib_write_bw -b -s 4194304 -n 20")[3] * 1.048576)
            samples["call MB/s"].append(2 * large / local(machine, [large], 10)[large])
    return {name: statistics.median(values) for name, values in samples.items()}


def rails(flexring):
    """Measures two ranks on two machines, over one rail and over two."""
    bytes_, samples = 2 << 20, {1: [], 2: []}
    with vm.boot(2, scenarios.CARDS, [flexring]) as machines:
        for machine in machines:
            for rail in range(scenarios.RAILS):
                scenarios.queue(machine, rail, RAIL)
        for _ in range(ROUNDS):
            for count in samples:
                command = f"flexring perf -b {bytes_} -e {bytes_} -n 4 -w 1"
                results = scenarios.both(machines, command, 120, FLEXRING_TRANSPORT="verbs", FLEXRING_IB_RAILS=count)
                scenarios.measured(results)
                samples[count].append(times(results[0].output)[bytes_] / 1000)
    return {f"{count} rails ms": statistics.median(values) for count, values in samples.items()}


def main():
    parser = argparse.ArgumentParser(description="Measures flexring over RDMA beside perftest.")
    parser.add_argument("--flexring", default="target/release/flexring", help="the command")
    parser.add_argument("--out", default=str(HERE / "out" / "verbs.json"), help="the output file")
    options = parser.parse_args()
    vm.end_on_signals()
    try:
        vm.image()
    except vm.Impossible as why:
        print(f"skipped: {why}")
        return
    one, two = in_one(options.flexring), rails(options.flexring)
    print("one Soft-RoCE machine, two processes, packets of 4096 bytes")
    print(f"  4 MiB   ib_write_bw -b {one['write MB/s']:6.1f} MB/s   all-reduce, both directions {one['call MB/s']:6.1f} MB/s   {one['call MB/s'] / one['write MB/s']:.2f}")
    print(f"  8 B     ib_write_lat, half round trip {one['half round trip us']:5.1f} us   ib_write_bw -b, an exchange {one['exchange us']:5.1f} us   all-reduce {one['call us']:5.1f} us")
    print("two machines, 2 MiB, rails of 32 Mbit/s")
    ratio = two["1 rails ms"] / two["2 rails ms"]
    print(f"  one rail {two['1 rails ms']:.0f} ms   two rails {two['2 rails ms']:.0f} ms   {ratio:.2f}x")
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": platform.platform(), "cores": os.cpu_count(), "one": one, "two": two}, indent=2) + "\n")


if __name__ == "__main__":
    main()
