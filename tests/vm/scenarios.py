"""What happens between two machines: the scenarios of tests/vm/run.py, and what they are told with.

A scenario is a function of the two machines under `@scenario`. It fails by an exception, `check` raises one in words, and
whatever it has started or broken is put right after it.
"""

import itertools
import shlex
import time

ALL = []  # in the order of this file
RAILS = 2  # cards of each machine that ranks use for RDMA
CONTROL = 2  # the card that ranks meet over, which stays up when rails go down
CARDS = 3
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

ENDLESS = "flexring perf -b 256K -e 256K -w 1 -n 1000000"
LASTING = "flexring perf -b 64K -e 64K -w 1 -n 1500"  # long enough for a rail to break meanwhile
ONCE = "flexring perf -b 8 -e 8 -w 0 -n 1"


def launch(machines, command, of_rank=None, **environment):
    """Starts a command as rank 0, 1, ... of a world, a rank for each machine named, and returns the jobs.

    A machine may be named more than once. Settings are given as they are called: `FLEXRING_TRANSPORT="tcp"`; those of
    single ranks as `of_rank={1: {"FLEXRING_IB_FAMILY": "ipv6"}}`.
    """
    world = {
        "FLEXRING_WORLD_SIZE": len(machines),
        "FLEXRING_MASTER_ADDR": address(machines[0], CONTROL),
        "FLEXRING_MASTER_PORT": next(_ports),
        "FLEXRING_TIMEOUT_MS": 30000,
        "FLEXRING_CONNECT_TIMEOUT_MS": 20000,
        "FLEXRING_SOCKET_IFNAME": f"eth{CONTROL}",
        # A quarter of a second: a busy machine is no dead one.
        "FLEXRING_IB_TIMEOUT": 16,
        "FLEXRING_IB_HCA": "=" + ",".join(f"rxe{rail}" for rail in range(RAILS)),
        **environment,
    }
    jobs = []
    for rank, machine in enumerate(machines):
        settings = {**world, "FLEXRING_RANK": rank, **(of_rank or {}).get(rank, {})}
        words = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in settings.items())
        jobs.append(machine.start(f"export {words}; {command}"))
    return jobs


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
    for card in range(CARDS):
        rail_up(machine, card)
        queue(machine, card, "")


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
    netem(machines[0], CONTROL, "loss 1% delay 5ms 2ms")
    measured(both(machines, "flexring perf -b 8 -e 64K -f 64 -n 3 -w 1", FLEXRING_TRANSPORT="tcp"))


@scenario
def a_rank_that_is_killed_is_named_by_the_other(machines):
    jobs = launch(machines, "flexring perf -b 1M -e 1M -n 100000", FLEXRING_TRANSPORT="tcp")
    check(jobs[0].wait_for("#wrong"), "the ranks do not meet")
    time.sleep(1)
    jobs[1].signal()
    results = finish(jobs, 30)
    check(results[0].code not in (0, 124) and "rank 1" in results[0].output, "rank 0 does not say that rank 1 died", *results)


# RDMA, all of it over both rails unless a scenario says otherwise.

def sent(machine):
    """Packets that each rail has sent so far."""
    return [rdma_counters(machine, rail)["sent_pkts"] for rail in range(RAILS)]


def running(machines, command=ENDLESS, **environment):
    """A world that reduces, once it is at it over every rail."""
    before = sent(machines[0])
    jobs = launch(machines, command, FLEXRING_TRANSPORT="verbs", **environment)
    check(jobs[0].wait_for("#wrong"), "the ranks do not meet")
    wait_until(lambda: all(now > then + 500 for now, then in zip(sent(machines[0]), before)), "a rail carries nothing")
    return jobs


def wait_until(holds, why, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        check(time.monotonic() < end, why)
        time.sleep(0.1)


def named_within(jobs, seconds, *words):
    """All ranks end with an error that has these words, in this time; what each of them said."""
    results = finish(jobs, seconds)
    for result in results:
        check(result.code not in (0, 124), f"a rank did not fail within {seconds} s", *results)
        check(all(word in result.output for word in words), f"a rank does not say {words}", *results)
    return results


@scenario
def rdma_measures_without_a_wrong_sum_over_both_rails(machines):
    before = sent(machines[0])
    results = both(machines, "flexring perf -b 8 -e 1M -f 8 -n 5 -w 1", FLEXRING_TRANSPORT="verbs")
    measured(results)
    check(" verbs to 1 rank" in results[0].output, "something else than RDMA was used", *results)
    check(all(now > then + 100 for now, then in zip(sent(machines[0]), before)), "a rail was not used", *results)


@scenario
def rdma_of_two_ranks_on_each_machine_is_used_between_them_alone(machines):
    one, two = machines
    results = finish(launch([one, one, two, two], "flexring perf -b 64 -e 256K -f 64 -n 3 -w 1", FLEXRING_IB_QPS_PER_RAIL=2))
    measured(results)
    check("shm to 1 rank, verbs to 2 ranks" in results[0].output, "something else was chosen", *results)


@scenario
def rdma_bears_loss_and_delay(machines):
    for machine in machines:
        for rail in range(RAILS):
            netem(machine, rail, "loss 1% delay 2ms")
    results = both(machines, "flexring perf -b 8 -e 256K -f 32 -n 5 -w 1", FLEXRING_TRANSPORT="verbs")
    measured(results)


@scenario
def a_rail_that_goes_down_costs_no_sum_and_is_told(machines):
    jobs = running(machines, LASTING)
    rail_down(machines[1], 1)
    results = finish(jobs, 90)
    measured(results)
    told = "a queue pair to rank"
    check(any(told in result.output for result in results), "nobody says that a rail went down", *results)


@scenario
def the_first_rail_may_go_down_too(machines):
    jobs = running(machines, LASTING)
    rail_down(machines[0], 0)
    measured(finish(jobs, 90))


@scenario
def when_all_rails_are_down_every_rank_names_its_peer(machines):
    jobs = running(machines)
    for rail in range(RAILS):
        rail_down(machines[1], rail)
    results = named_within(jobs, 30)
    check("rank 0" in results[1].output and "rank 1" in results[0].output, "a rank does not name its peer", *results)
    check(any("retry" in result.output for result in results) or any("status" in result.output for result in results),
          "nobody tells the completion's status", *results)


@scenario
def a_rank_that_is_killed_amid_rdma_is_named(machines):
    jobs = running(machines)
    jobs[1].signal()
    results = finish(jobs, 30)
    check(results[0].code not in (0, 124) and "rank 1" in results[0].output, "rank 0 does not say that rank 1 died", *results)


@scenario
def a_rank_that_calls_nothing_for_long_is_waited_for(machines):
    # Rank 0 prints the head of its table into a full pipe, so it makes no call until somebody reads that.
    stuck = f"(head -c 65536 /dev/zero; {ONCE}) | (until [ -e read ]; do sleep 0.1; done; rm read; tail -c +65537)"
    command = f'if [ "$FLEXRING_RANK" = 0 ]; then {stuck}; else {ONCE}; fi'
    jobs = launch(machines, command, FLEXRING_TRANSPORT="verbs", FLEXRING_HEARTBEAT_MS=200, FLEXRING_LOG="info")
    check(jobs[1].wait_for("verbs to 1 rank"), "the ranks do not meet")
    time.sleep(6)  # thirty heartbeats; a rank that is silent for twenty counts as dead
    check("#wrong" not in jobs[0].output and jobs[1].running(), "rank 1 does not wait for rank 0")
    must(machines[0], "touch read")
    measured(finish(jobs))


@scenario
def a_world_without_devices_uses_tcp_and_says_why(machines):
    one, two = machines
    rail_down(two, 0)
    rail_down(two, 1)
    results = both(machines, ONCE)
    measured(results)
    check("use tcp, not RDMA devices: rank 1 on" in results[0].output, "nobody says why RDMA is not used", *results)
    check("ip link set" in results[0].output, "nobody says what mends it", *results)
    named_within(launch(machines, ONCE, FLEXRING_TRANSPORT="verbs"), 30, "rank 1 on", "ip link set")


@scenario
def settings_that_leave_no_device_are_refused_in_words(machines):
    for setting, word in [("FLEXRING_IB_HCA", "mlx5"), ("FLEXRING_IB_GID_INDEX", "200")]:
        named_within(launch(machines, ONCE, FLEXRING_TRANSPORT="verbs", **{setting: word}), 30, setting)


@scenario
def peers_with_nothing_in_common_are_told_so(machines):
    two = machines[1]
    # An address of the other family on one side alone.
    for rail in range(RAILS):
        must(two, f"ip -6 addr add 2001:db8:{rail}::2/64 dev eth{rail} nodad")
    try:
        jobs = launch(machines, ONCE, {1: {"FLEXRING_IB_FAMILY": "ipv6"}}, FLEXRING_TRANSPORT="verbs")
        named_within(jobs, 30, "rank 0", "rank 1", "IPv4", "IPv6")
    finally:
        for rail in range(RAILS):
            must(two, f"ip -6 addr del 2001:db8:{rail}::2/64 dev eth{rail}")


@scenario
def too_little_memory_that_may_be_locked_is_told_with_the_mend(machines):
    little = f"setpriv --bounding-set=-ipc_lock sh -c 'ulimit -l 64; exec {ONCE}'"
    named_within(launch(machines, little, FLEXRING_TRANSPORT="verbs"), 30, "ibv_", "ulimit -l unlimited")
    results = both(machines, little)
    measured(results)
    check("use tcp" in results[0].output, "nobody says that RDMA is not used", *results)


@scenario
def the_doctor_tells_of_devices_and_addresses(machines):
    words = must(machines[0], "flexring doctor")
    check("rxe0" in words and "198.18.0.1" in words, "the doctor overlooks a device")


@scenario
def nothing_of_the_devices_stays_in_use(machines):
    for machine in machines:
        for device, used in rdma_resources(machine).items():
            check((used["pd"], used["cq"], used["qp"], used["mr"], used["ctx"]) == (1, 1, 1, 0, 0), f"{machine.name}: {device} has {used}")
