"""What happens between two machines: the scenarios of tests/vm/run.py, and what they are told with.

A scenario is a function of the two machines under `@scenario`. It fails by an exception, `check` raises one in words, and
whatever it has started or broken is put right after it.
"""

import itertools
import shlex
import time

ALL = []  # in the order of this file
RAILS = 2  # cards of each machine
_ports = itertools.count(20000)


class Failed(Exception):
    """What a scenario saw is not what it should have seen."""


class Skipped(Exception):
    """A scenario that means nothing here."""


def scenario(function):
    ALL.append(function)
    return function


def check(holds, why, *results):
    """Fails with these words, and what commands printed, unless it holds."""
    if not holds:
        raise Failed("\n".join([why, *(f"[exit status {result.code}]\n{result.output.rstrip()}" for result in results)]))


# What runs in the machines.

def launch(machines, command, **environment):
    """Starts a command as rank 0, 1, ... of a world, a rank for each machine named, and returns the jobs.

    A machine may be named more than once. Settings are given as they are called: `FLEXRING_TRANSPORT="tcp"`.
    """
    world = {
        "FLEXRING_WORLD_SIZE": len(machines),
        "FLEXRING_MASTER_ADDR": address(machines[0], 0),
        "FLEXRING_MASTER_PORT": next(_ports),
        "FLEXRING_TIMEOUT_MS": 30000,
        "FLEXRING_CONNECT_TIMEOUT_MS": 20000,
        **environment,
    }
    settings = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in world.items())
    return [machine.start(f"export {settings} FLEXRING_RANK={rank}; {command}") for rank, machine in enumerate(machines)]


def finish(jobs, timeout=60):
    """Waits for jobs to end and returns what became of each."""
    return [job.wait(timeout) for job in jobs]


def both(machines, command, timeout=60, **environment):
    """Runs a command as a world, as `launch` does: exit status and output by rank."""
    return finish(launch(machines, command, **environment), timeout)


def measured(results):
    """Fails unless these are the ranks of a `flexring perf` that found nothing wrong."""
    check(all(result.code == 0 for result in results), "flexring perf failed", *results)
    check("# Out of bounds values : 0 OK" in results[0].output, "there are wrong sums", *results)


# The network. Only what leaves a machine is delayed, lost or shaped; a machine does not send to itself over a card.

def address(machine, rail):
    return f"198.18.{rail}.{machine.number}"


def netem(machine, rail, how):
    """Delays, loses, reorders: `netem(one, 0, "loss 1% delay 2ms")`; nothing for "" ."""
    queue(machine, rail, f"netem limit 100000 {how}" if how else "")


def queue(machine, rail, discipline):
    """Puts a queueing discipline in front of a card, as `tc` writes it: `queue(one, 0, "tbf rate 50mbit burst 64k latency 100ms")`."""
    change = f"replace dev eth{rail} root {discipline}" if discipline else f"del dev eth{rail} root 2>/dev/null || true"
    must(machine, f"tc qdisc {change}")


def rail_down(machine, rail):
    must(machine, f"ip link set eth{rail} down")


def rail_up(machine, rail):
    must(machine, f"ip link set eth{rail} up; until grep -q ACTIVE /sys/class/infiniband/rxe{rail}/ports/1/state; do sleep 0.05; done")


def rdma_resources(machine):
    """What of every kind is in use on each device: `{"rxe0": {"qp": 1, "mr": 0, ...}, ...}`. The kernel itself has one
    protection domain, completion queue and queue pair of each."""
    devices = {}
    for line in must(machine, "rdma resource").splitlines():
        _, name, *counts = line.replace(":", "").split()
        devices[name] = dict(zip(counts[::2], map(int, counts[1::2])))
    return devices


def rdma_counters(machine, rail):
    """The device's counters: `sent_pkts`, `rcvd_seq_err`, `retry_exceeded_err`, ..."""
    words = must(machine, f"rdma statistic show link rxe{rail}/1").split()[2:]
    return dict(zip(words[::2], map(int, words[1::2])))


def must(machine, command, timeout=20):
    """Runs a command that has no business to fail, and returns what it prints."""
    result = machine.run(command, timeout)
    check(result.code == 0, f"{machine.name}: {command}", result)
    return result.output


def tidy(machine):
    """Puts right whatever a scenario left."""
    machine.end_jobs()
    for rail in range(RAILS):
        rail_up(machine, rail)
        queue(machine, rail, "")


# The scenarios.

@scenario
def every_rail_carries_rdma(machines):
    one, two = machines
    for rail in range(RAILS):
        command = f"ib_write_bw -d rxe{rail} -x 1 -F -s 65536 -n 20"
        before = rdma_counters(one, rail)["sent_pkts"]
        server = two.start(command)
        must(two, "until netstat -ltn | grep -q :18515; do sleep 0.05; done")
        results = [one.run(f"{command} {address(two, rail)}"), server.wait()]
        check(all(result.code == 0 for result in results), f"rail {rail}", *results)
        check(rdma_counters(one, rail)["sent_pkts"] >= before + 20 * 64, f"rail {rail} was not used", *results)


@scenario
def a_rail_that_is_down_is_seen_and_comes_back(machines):
    one, two = machines
    rail_down(one, 1)
    check("state DOWN" in must(one, "rdma link show rxe1/1"), "the device does not know that its card is down")
    check(one.run(f"ping -c 1 -W 1 {address(two, 1)}").code != 0, "a card that is down carries packets")
    must(one, f"ping -c 1 -W 5 {address(two, 0)}")
    rail_up(one, 1)
    must(one, f"ping -c 5 -W 5 {address(two, 1)}")


@scenario
def tcp_measures_without_a_wrong_sum(machines):
    measured(both(machines, "flexring perf -b 8 -e 1M -f 64 -n 3 -w 1", FLEXRING_TRANSPORT="tcp"))


@scenario
def tcp_bears_loss_and_delay(machines):
    netem(machines[0], 0, "loss 1% delay 5ms 2ms")
    measured(both(machines, "flexring perf -b 8 -e 64K -f 64 -n 3 -w 1", FLEXRING_TRANSPORT="tcp"))


@scenario
def a_rank_that_is_killed_is_named_by_the_other(machines):
    jobs = launch(machines, "flexring perf -b 1M -e 1M -n 100000", FLEXRING_TRANSPORT="tcp")
    check(jobs[0].wait_for("#wrong"), "the ranks do not meet")
    time.sleep(1)
    jobs[1].signal()
    results = finish(jobs, 30)
    check(results[0].code not in (0, 124) and "rank 1" in results[0].output, "rank 0 does not say that rank 1 died", *results)


@scenario
def nothing_of_the_devices_stays_in_use(machines):
    for machine in machines:
        for device, used in rdma_resources(machine).items():
            check((used["pd"], used["cq"], used["qp"], used["mr"], used["ctx"]) == (1, 1, 1, 0, 0), f"{machine.name}: {device} has {used}")
