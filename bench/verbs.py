#!/usr/bin/env python3
"""Compares flexring over RDMA with perftest in one Soft-RoCE machine, and two rails with one and Open MPI over UCX between two machines.

    bench/verbs.py [--flexring PROGRAM] [--out FILE] [--only PART]... [--short]

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
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "vm"))

import scenarios  # noqa: E402
import vm  # noqa: E402
import vm_openmpi  # noqa: E402

ROUNDS = 5
# Beside Open MPI, where one takes two minutes.
UCX_ROUNDS = 3
# The rate of a rail between two machines, so that rails are the bottleneck and not the emulation.
RAIL = "tbf rate 32mbit burst 32k latency 200ms"
# The lengths of vectors, and how often each is summed beside Open MPI.
SIZES = {8: 1000, 64: 1000, 512: 1000, 4 << 10: 500, 32 << 10: 200, 256 << 10: 50, 2 << 20: 10, 16 << 20: 4, 64 << 20: 2}
SHORT_SIZES = {8: 100, 4 << 10: 100, 256 << 10: 10, 4 << 20: 2}
# Seconds that a program may take for one of them.
SIZE_LIMIT = 180
ONE_RAIL = {"FLEXRING_TRANSPORT": "verbs", "FLEXRING_IB_HCA": "=rxe0", "FLEXRING_CONNECT_TIMEOUT_MS": 60000, "FLEXRING_TIMEOUT_MS": 60000}


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


def in_one(flexring, rounds):
    """Measures two processes of one machine, over one device."""
    small, large = 8, 4 << 20
    samples = {"half round trip us": [], "exchange us": [], "exchange of one us": [], "call us": [], "write MB/s": [], "call MB/s": []}
    with vm.boot(1, 1, [flexring], trusts_tsc=True) as (machine,):
        # Frames as long as the largest RDMA packets.
        scenarios.must(machine, "ip link set eth0 mtu 4200")
        for _ in range(rounds):
            samples["half round trip us"].append(perftest(machine, "ib_write_lat -s 8 -n 500")[4])
            # Both directions at once: the cost of an exchange of short messages.
            samples["exchange us"].append(2 / perftest(machine, "ib_write_bw -b -s 8 -n 2000")[4])
            # The same with one write in flight on each side, as in calls of which each waits for the one before.
            samples["exchange of one us"].append(2 / perftest(machine, "ib_write_bw -b -s 8 -n 2000 -t 1")[4])
            samples["call us"].append(local(machine, [small], 500)[small])
            # perftest reports MiB/s, and the sum of both directions.
            samples["write MB/s"].append(perftest(machine, "ib_write_bw -b -s 4194304 -n 20")[3] * 1.048576)
            samples["call MB/s"].append(2 * large / local(machine, [large], 10)[large])
    return {name: statistics.median(values) for name, values in samples.items()}


def rails(flexring, rounds):
    """Measures two ranks on two machines, over one rail and over two."""
    bytes_, samples = 2 << 20, {1: [], 2: []}
    with vm.boot(2, scenarios.CARDS, [flexring], trusts_tsc=True) as machines:
        for machine in machines:
            for rail in range(scenarios.RAILS):
                scenarios.queue(machine, rail, RAIL)
        for _ in range(rounds):
            for count in samples:
                command = f"flexring perf -b {bytes_} -e {bytes_} -n 4 -w 1"
                results = scenarios.both(machines, command, 120, FLEXRING_TRANSPORT="verbs", FLEXRING_IB_RAILS=count)
                scenarios.measured(results)
                samples[count].append(times(results[0].output)[bytes_] / 1000)
    return {f"{count} rails ms": statistics.median(values) for count, values in samples.items()}


def beside_ucx(flexring, rounds, sizes):
    """Measures two ranks on two machines by size: flexring and Open MPI over UCX, by turns, each over one rail."""
    samples = {size: {"flexring us": [], "Open MPI us": []} for size in sizes}
    with tempfile.TemporaryDirectory() as folder, \
            vm.boot(2, scenarios.CARDS, [flexring, *vm_openmpi.files(folder)], trusts_tsc=True) as machines:
        for machine in machines:
            scenarios.must(machine, "ip link set eth0 mtu 4200")
        hosts = [scenarios.address(machine, scenarios.CONTROL) for machine in machines]
        vm_openmpi.listen(machines[1])
        scenarios.must(machines[1], f"until netstat -ltn | grep -q :{vm_openmpi.PORT}; do sleep 0.05; done")
        for _ in range(rounds):
            for size, iterations in sizes.items():
                command = f"flexring perf -b {size} -e {size} -n {iterations} -w {max(1, iterations // 10)}"
                results = scenarios.both(machines, command, SIZE_LIMIT, **ONE_RAIL)
                scenarios.measured(results)
                samples[size]["flexring us"].append(times(results[0].output)[size])
                samples[size]["Open MPI us"].append(vm_openmpi.all_reduce(machines[0], hosts, size, iterations, SIZE_LIMIT))
                shown = ", ".join(f"{name[:-3]} {values[-1]:.0f} us" for name, values in samples[size].items())
                print(f"  {size} B: {shown}", file=sys.stderr, flush=True)
    return {size: {name: statistics.median(values) for name, values in of.items()} for size, of in samples.items()}


def report_one(one):
    print("one Soft-RoCE machine, two processes, packets of 4096 bytes")
    print(f"  4 MiB   ib_write_bw -b {one['write MB/s']:6.1f} MB/s   all-reduce, both directions {one['call MB/s']:6.1f} MB/s   {one['call MB/s'] / one['write MB/s']:.2f}")
    print(f"  8 B     ib_write_lat, half round trip {one['half round trip us']:5.1f} us   ib_write_bw -b, an exchange {one['exchange us']:5.1f} us, with one write in flight {one['exchange of one us']:5.1f} us   all-reduce {one['call us']:5.1f} us")


def report_rails(two):
    print("two machines, 2 MiB, rails of 32 Mbit/s")
    ratio = two["1 rails ms"] / two["2 rails ms"]
    print(f"  one rail {two['1 rails ms']:.0f} ms   two rails {two['2 rails ms']:.0f} ms   {ratio:.2f}x")


def report_ucx(ucx):
    print("two machines, one rail, packets of 4096 bytes, all-reduce in place")
    for size, of in ucx.items():
        ours, theirs = of["flexring us"], of["Open MPI us"]
        print(f"  {size:9} B   flexring {ours:10.1f} us   Open MPI over UCX {theirs:10.1f} us   {ours / theirs:.2f}")


def main():
    parser = argparse.ArgumentParser(description="Measures flexring over RDMA beside perftest.")
    parser.add_argument("--flexring", default="target/release/flexring", help="the command")
    parser.add_argument("--out", default=str(HERE / "out" / "verbs.json"), help="the output file")
    parser.add_argument("--only", action="append", choices=["one", "rails", "ucx"], help="measure only this part")
    parser.add_argument("--short", action="store_true", help="one round and few sizes: shows that it works, and no figures")
    options = parser.parse_args()
    parts, rounds = options.only or ["one", "rails", "ucx"], 1 if options.short else ROUNDS
    ucx_rounds = min(rounds, UCX_ROUNDS)
    vm.end_on_signals()
    try:
        vm.image()
    except vm.Impossible as why:
        print(f"skipped: {why}")
        return
    result = {"machine": platform.platform(), "cores": os.cpu_count()}
    if "one" in parts:
        result["one"] = in_one(options.flexring, rounds)
        report_one(result["one"])
    if "rails" in parts:
        result["two"] = rails(options.flexring, rounds)
        report_rails(result["two"])
    if "ucx" in parts and (reason := vm_openmpi.missing()):
        print(f"skipped: Open MPI over UCX: {reason}")
    elif "ucx" in parts:
        result["ucx"] = beside_ucx(options.flexring, ucx_rounds, SHORT_SIZES if options.short else SIZES)
        report_ucx(result["ucx"])
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
