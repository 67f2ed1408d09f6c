"""The scenarios of tests/vm/run.py between two machines, and the functions that they use.

A scenario is a function of two machines, decorated with `@scenario`. It fails by raising an exception, for example with
`check`. After each scenario, `restore` ends its commands and repairs the network. CI runs those with `short=True`.
"""

import itertools
import json
import shlex
import time

ALL = []  # in the order of this file
SHORT = []  # those that CI runs
RAILS = 2  # network cards of each machine that ranks use for RDMA, from 0
CONTROL = 2  # the card for rendezvous, which stays up when rails go down
CARDS = 3  # network cards of each machine
_ports = itertools.count(20000)


class Failed(Exception):
    """A scenario did not have the expected result."""


class Skipped(Exception):
    """A scenario that does not apply here."""


def scenario(function=None, short=False):
    """Adds a scenario; with `short`, also to those that CI runs."""
    if function is None:
        return lambda function: scenario(function, short)
    ALL.append(function)
    if short:
        SHORT.append(function)
    return function


def check(holds, why, *results):
    """Fails with this message, and the output of commands, if `holds` is false."""
    if not holds:
        raise Failed("\n".join([why, *(f"[exit status {result.code}]\n{result.output.rstrip()}" for result in results)]))


# The commands in the machines.

ENDLESS = "flexring perf -b 256K -e 256K -w 1 -n 1000000"
LASTING = "flexring perf -b 64K -e 64K -w 1 -n 1500"  # long enough for a rail to go down during the calls
LASTING_LIMIT = 180  # seconds; on two cores that do much else besides, 2900 of its 3000 calls took 90 s
ONCE = "flexring perf -b 8 -e 8 -w 0 -n 1"


def launch(machines, command, of_rank=None, **environment):
    """Starts a command as rank 0, 1, ... of a world, a rank for each machine named, and returns the jobs.

    A machine may appear more than once. Settings are keyword arguments, such as `FLEXRING_TRANSPORT="tcp"`; those of single
    ranks are given as `of_rank={1: {"FLEXRING_IB_FAMILY": "ipv6"}}`.
    """
    world = {
        "FLEXRING_WORLD_SIZE": len(machines),
        "FLEXRING_MASTER_ADDR": address(machines[0], CONTROL),
        "FLEXRING_MASTER_PORT": next(_ports),
        "FLEXRING_TIMEOUT_MS": 30000,
        "FLEXRING_CONNECT_TIMEOUT_MS": 20000,
        "FLEXRING_SOCKET_IFNAME": f"eth{CONTROL}",
        # A quarter of a second, as an emulated machine may be slow.
        "FLEXRING_IB_TIMEOUT": 16,
        "FLEXRING_IB_HCA": "=" + ",".join(f"rxe{rail}" for rail in range(RAILS)),
        **environment,
    }
    jobs = []
    for rank, machine in enumerate(machines):
        settings = {**world, "FLEXRING_RANK": rank, **(of_rank or {}).get(rank, {})}
        variables = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in settings.items())
        jobs.append(machine.start(f"export {variables}; {command}"))
    return jobs


def finish(jobs, timeout=60):
    """Waits for jobs to end and returns the result of each."""
    return [job.wait(timeout) for job in jobs]


def both(machines, command, timeout=60, **environment):
    """Runs a command as a world, as `launch` does: exit status and output by rank."""
    return finish(launch(machines, command, **environment), timeout)


def measured(results):
    """Fails unless these are the results of ranks of `flexring perf` that found no wrong sum."""
    check(all(result.code == 0 for result in results), "flexring perf failed", *results)
    check("# Out of bounds values : 0 OK" in results[0].output, "there are wrong sums", *results)


# The network. Packets are delayed, lost or shaped when they leave a machine. Packets of a machine to itself use no card.

def address(machine, rail):
    return f"198.18.{rail}.{machine.number}"


def netem(machine, rail, how):
    """Delays, loses or reorders packets: `netem(one, 0, "loss 1% delay 2ms")`; "" ends that."""
    queue(machine, rail, f"netem limit 100000 {how}" if how else "")


def queue(machine, rail, discipline):
    """Sets the queueing discipline of a card in the syntax of `tc`: `queue(one, 0, "tbf rate 50mbit burst 64k latency 100ms")`."""
    change = f"replace dev eth{rail} root {discipline}" if discipline else f"del dev eth{rail} root 2>/dev/null || true"
    must(machine, f"tc qdisc {change}")


def rail_down(machine, rail):
    must(machine, f"ip link set eth{rail} down")


def rail_up(machine, rail):
    must(machine, f"ip link set eth{rail} up; until grep -q ACTIVE /sys/class/infiniband/rxe{rail}/ports/1/state; do sleep 0.05; done")


def rdma_resources(machine):
    """The numbers of objects of each kind, by device: `{"rxe0": {"qp": 1, "mr": 0, ...}, ...}`. On each device, the kernel
    itself has one protection domain, one completion queue and one queue pair."""
    devices = {}
    for line in must(machine, "rdma resource").splitlines():
        _, name, *counts = line.replace(":", "").split()
        devices[name] = dict(zip(counts[::2], map(int, counts[1::2])))
    return devices


def rdma_counters(machine, rail):
    """The device's counters: `sent_pkts`, `rcvd_seq_err`, `retry_exceeded_err`, ..."""
    fields = must(machine, f"rdma statistic show link rxe{rail}/1").split()[2:]
    return dict(zip(fields[::2], map(int, fields[1::2])))


def must(machine, command, timeout=20):
    """Runs a command that must succeed, and returns its output."""
    result = machine.run(command, timeout)
    check(result.code == 0, f"{machine.name}: {command}", result)
    return result.output


def restore(machine):
    """Ends the commands of a scenario and restores the network."""
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
def a_rail_goes_down_and_up_again(machines):
    one, two = machines
    rail_down(one, 1)
    check("state DOWN" in must(one, "rdma link show rxe1/1"), "the device is up although its card is down")
    check(one.run(f"ping -c 1 -W 1 {address(two, 1)}").code != 0, "a card that is down carries packets")
    must(one, f"ping -c 1 -W 5 {address(two, 0)}")
    rail_up(one, 1)
    must(one, f"ping -c 5 -W 5 {address(two, 1)}")


@scenario
def tcp_sums_are_right(machines):
    measured(both(machines, "flexring perf -b 8 -e 1M -f 64 -n 3 -w 1", FLEXRING_TRANSPORT="tcp"))


@scenario
def tcp_sums_are_right_with_loss_and_delay(machines):
    netem(machines[0], CONTROL, "loss 1% delay 5ms 2ms")
    measured(both(machines, "flexring perf -b 8 -e 64K -f 64 -n 3 -w 1", FLEXRING_TRANSPORT="tcp"))


@scenario
def a_killed_rank_is_named_over_tcp(machines):
    jobs = launch(machines, "flexring perf -b 1M -e 1M -n 100000", FLEXRING_TRANSPORT="tcp")
    check(jobs[0].wait_for("#wrong"), "the ranks do not connect")
    time.sleep(1)
    jobs[1].signal()
    results = finish(jobs, 30)
    check(results[0].code not in (0, 124) and "rank 1" in results[0].output, "rank 0 does not report that rank 1 died", *results)


# RDMA, over both rails unless a scenario changes that.

def sent(machine):
    """The number of packets that each rail has sent."""
    return [rdma_counters(machine, rail)["sent_pkts"] for rail in range(RAILS)]


def running(machines, command=ENDLESS, **environment):
    """Starts a world and waits until its calls use every rail."""
    before = sent(machines[0])
    jobs = launch(machines, command, FLEXRING_TRANSPORT="verbs", **environment)
    check(jobs[0].wait_for("#wrong"), "the ranks do not connect")
    wait_until(lambda: all(now > then + 500 for now, then in zip(sent(machines[0]), before)), "a rail carries nothing")
    return jobs


def wait_until(holds, why, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        check(time.monotonic() < end, why)
        time.sleep(0.1)


def named_within(jobs, seconds, *words):
    """Checks that all ranks fail within this time, with errors that contain these words. Returns their results."""
    results = finish(jobs, seconds)
    for result in results:
        check(result.code not in (0, 124), f"a rank did not fail within {seconds} s", *results)
        check(all(word in result.output for word in words), f"the error of a rank does not contain {words}", *results)
    return results


def check_rail_counters(results):
    """Checks that the report on rank 0's output says what each rail has carried."""
    text = results[0].output
    ranks = json.JSONDecoder().raw_decode(text[text.index('{\n  "version"'):])[0]["ranks"]
    check([len(rank["rails"]) for rank in ranks] == [RAILS, RAILS], f"not all rails are counted: {ranks}", *results)
    for mine, theirs in ((ranks[0], ranks[1]), (ranks[1], ranks[0])):
        for sent, received in zip(mine["rails"], theirs["rails"]):
            check(sent["bytes_sent"] > 1 << 20, f"a rail has carried little: {sent}", *results)
            check(sent["retransmissions"] is not None, f"the driver's counters were not read: {sent}", *results)
            # The counters of the two ranks are read at different times, and other messages than data take the first rail.
            ratio = received["bytes_received"] / sent["bytes_sent"]
            check(0.9 < ratio < 1.1, f"{sent} and {received} differ", *results)


@scenario
def rdma_sums_are_right_over_both_rails(machines):
    before = sent(machines[0])
    perf = "flexring perf -b 8 -e 1M -f 8 -n 5 -w 1 --json /report.json"
    command = f"rm -f /report.json; {perf} && if [ -f /report.json ]; then cat /report.json; fi"
    results = both(machines, command, FLEXRING_TRANSPORT="verbs")
    measured(results)
    check(" verbs to 1 rank" in results[0].output, "another transport than RDMA was used", *results)
    check_rail_counters(results)
    check(all(now > then + 100 for now, then in zip(sent(machines[0]), before)), "a rail was not used", *results)


@scenario
def rdma_is_used_between_machines_only(machines):
    one, two = machines
    results = finish(launch([one, one, two, two], "flexring perf -b 64 -e 256K -f 64 -n 3 -w 1", FLEXRING_IB_QPS_PER_RAIL=2))
    measured(results)
    check("shm to 1 rank, verbs to 2 ranks" in results[0].output, "other transports were chosen", *results)


@scenario
def calls_make_the_rdma_links_that_plans_do_not_use(machines):
    one, two = machines
    before = [rdma_resources(machine) for machine in machines]
    # In the ring, each rank has one neighbour on the other machine; the others are linked when calls need them.
    settings = {"FLEXRING_ALGO": "ring", "FLEXRING_LOG": "debug"}
    makes, keeps = "which its plans do not use", "verbs to 2 ranks"
    for collective in ("alltoall", "sendrecv", "broadcast", "gather", "scatter", "reduce"):
        command = f"flexring perf --collective {collective} -b 64 -e 256K -f 64 -n 3 -w 1"
        results = finish(launch([one, one, two, two], command, **settings))
        check(all(result.code == 0 for result in results), f"flexring perf failed for {collective}", *results)
        check(keeps in results[0].output, "other transports were chosen", *results)
        if collective == "alltoall":
            check(all(result.output.count(makes) == 1 for result in results), "each rank makes one further link", *results)
    results = finish(launch([one, one, two, two], "flexring perf -b 64 -e 64K -f 64 -n 3 -w 1", **settings))
    measured(results)
    check(not any(makes in result.output for result in results), "an all-reduce made a further link", *results)
    after = [rdma_resources(machine) for machine in machines]
    check(before == after, f"RDMA objects are left: {before} before, {after} after")


@scenario(short=True)
def rdma_sums_are_right_with_loss_and_delay(machines):
    for machine in machines:
        for rail in range(RAILS):
            netem(machine, rail, "loss 1% delay 2ms")
    results = both(machines, "flexring perf -b 8 -e 256K -f 32 -n 5 -w 1", FLEXRING_TRANSPORT="verbs")
    measured(results)


@scenario
def sums_are_right_when_a_rail_goes_down(machines):
    jobs = running(machines, LASTING)
    rail_down(machines[1], 1)
    results = finish(jobs, LASTING_LIMIT)
    measured(results)
    warning = "a queue pair to rank"
    check(any(warning in result.output for result in results), "no rank warns that a rail went down", *results)


RETURNING = "flexring perf -b 64K -e 64K -w 1 -n 500"  # long enough for a rail to go down and come back


@scenario(short=True)
def a_rail_that_comes_back_is_used_again(machines):
    one, two = machines
    jobs = running(machines, RETURNING)
    rail_down(two, 1)
    check(jobs[0].wait_for("broke"), "rank 0 does not notice that a rail went down")
    rail_up(two, 1)
    check(jobs[0].wait_for("works again", LASTING_LIMIT), "the rail is not connected again")
    before = sent(one)
    wait_until(lambda: all(now > then + 200 for now, then in zip(sent(one), before)), "a rail carries nothing again")
    measured(finish(jobs, LASTING_LIMIT))


@scenario
def sums_are_right_when_all_rails_go_down_and_one_comes_back(machines):
    jobs = running(machines, RETURNING, FLEXRING_IB_RECONNECT_MS=90000, FLEXRING_TIMEOUT_MS=120000)
    for rail in range(RAILS):
        rail_down(machines[1], rail)
    check(jobs[0].wait_for("the last queue pair"), "rank 0 does not notice that all rails went down")
    rail_up(machines[1], 1)
    measured(finish(jobs, LASTING_LIMIT))


@scenario
def sums_are_right_when_the_first_rail_goes_down(machines):
    jobs = running(machines, LASTING)
    rail_down(machines[0], 0)
    measured(finish(jobs, LASTING_LIMIT))


@scenario
def every_rank_names_its_peer_when_all_rails_are_down(machines):
    jobs = running(machines, FLEXRING_IB_RECONNECT_MS=2000)
    for rail in range(RAILS):
        rail_down(machines[1], rail)
    results = named_within(jobs, 30)
    check("rank 0" in results[1].output and "rank 1" in results[0].output, "a rank does not name its peer", *results)
    check(any("retry" in result.output for result in results) or any("status" in result.output for result in results),
          "no rank reports the status of a completion", *results)


@scenario
def a_killed_rank_is_named_over_rdma(machines):
    jobs = running(machines)
    jobs[1].signal()
    results = finish(jobs, 30)
    check(results[0].code not in (0, 124) and "rank 1" in results[0].output, "rank 0 does not report that rank 1 died", *results)


@scenario
def a_rank_without_calls_is_not_taken_for_dead(machines):
    # Rank 0 writes the header of its table to a full pipe, so it makes no call until the pipe is read.
    stuck = f"(head -c 65536 /dev/zero; {ONCE}) | (until [ -e read ]; do sleep 0.1; done; rm read; tail -c +65537)"
    command = f'if [ "$FLEXRING_RANK" = 0 ]; then {stuck}; else {ONCE}; fi'
    jobs = launch(machines, command, FLEXRING_TRANSPORT="verbs", FLEXRING_HEARTBEAT_MS=200, FLEXRING_LOG="info")
    check(jobs[1].wait_for("verbs to 1 rank"), "the ranks do not connect")
    time.sleep(6)  # thirty heartbeats; after twenty without a sign of life, a rank counts as dead
    check("#wrong" not in jobs[0].output and jobs[1].running(), "rank 1 does not wait for rank 0")
    must(machines[0], "touch read")
    measured(finish(jobs))


@scenario
def a_rank_without_usable_devices_is_an_error_unless_tcp_is_allowed(machines):
    one, two = machines
    rail_down(two, 0)
    rail_down(two, 1)
    named_within(launch(machines, ONCE), 30, "rank 0 on", "rank 1 on", "ip link set", "FLEXRING_TRANSPORT=auto-tcp")
    report = must(two, "FLEXRING_IB_HCA==rxe0,rxe1 flexring doctor || true")
    check("FLEXRING_TRANSPORT=auto-tcp" in report, f"the doctor does not report what would happen: {report}")
    results = both(machines, ONCE, FLEXRING_TRANSPORT="auto-tcp")
    measured(results)
    check("use tcp, not RDMA devices: rank 1 on" in results[0].output, "no rank reports why RDMA is not used", *results)
    check("ip link set" in results[0].output, "no rank reports the fix", *results)
    named_within(launch(machines, ONCE, FLEXRING_TRANSPORT="verbs"), 30, "rank 1 on", "ip link set")


@scenario
def a_rail_that_cannot_be_connected_is_left_out_and_named(machines):
    one, two = machines
    must(two, "ip link set eth1 arp off")
    must(one, "ip neigh flush dev eth1")
    try:
        before = sent(one)
        results = both(machines, "flexring perf -b 64 -e 64K -f 64 -n 3 -w 1", FLEXRING_TRANSPORT="verbs")
        measured(results)
        check("does not use rxe1:1" in results[0].output, "the rail is not named", *results)
        check(sent(one)[0] > before[0] + 20, "the other rail was not used", *results)
    finally:
        must(two, "ip link set eth1 arp on")


@scenario
def ranks_without_usable_devices_use_tcp(machines):
    for machine in machines:
        rail_down(machine, 0)
        rail_down(machine, 1)
    results = both(machines, ONCE)
    measured(results)
    check(" tcp to 1 rank" in results[0].output, "another transport than TCP was used", *results)


@scenario
def settings_that_exclude_all_devices_are_errors(machines):
    for setting, value in [("FLEXRING_IB_HCA", "mlx5"), ("FLEXRING_IB_GID_INDEX", "200")]:
        named_within(launch(machines, ONCE, FLEXRING_TRANSPORT="verbs", **{setting: value}), 30, setting)


@scenario
def peers_without_a_common_address_family_are_an_error(machines):
    two = machines[1]
    # One machine only has addresses of the other family.
    for rail in range(RAILS):
        must(two, f"ip -6 addr add 2001:db8:{rail}::2/64 dev eth{rail} nodad")
    try:
        jobs = launch(machines, ONCE, {1: {"FLEXRING_IB_FAMILY": "ipv6"}}, FLEXRING_TRANSPORT="verbs")
        named_within(jobs, 30, "rank 0", "rank 1", "IPv4", "IPv6")
    finally:
        for rail in range(RAILS):
            must(two, f"ip -6 addr del 2001:db8:{rail}::2/64 dev eth{rail}")


@scenario
def a_low_memlock_limit_is_reported_with_the_fix(machines):
    little = f"setpriv --bounding-set=-ipc_lock sh -c 'ulimit -l 64; exec {ONCE}'"
    named_within(launch(machines, little, FLEXRING_TRANSPORT="verbs"), 30, "ibv_", "ulimit -l unlimited")
    named_within(launch(machines, little), 30, "ulimit -l unlimited", "FLEXRING_TRANSPORT=auto-tcp")
    results = both(machines, little, FLEXRING_TRANSPORT="auto-tcp")
    measured(results)
    check("use tcp" in results[0].output, "no rank reports that RDMA is not used", *results)


@scenario
def the_doctor_lists_devices_and_addresses(machines):
    report = must(machines[0], "flexring doctor")
    check("rxe0" in report and "198.18.0.1" in report, "the doctor does not list a device")


@scenario
def the_doctor_tests_the_rails_between_machines(machines):
    results = both(machines, "flexring doctor --pair", 150)
    check(all(result.code == 0 for result in results), "flexring doctor --pair failed", *results)
    check("all 2 rails between 2 ranks work" in results[0].output, "a rail was not tested", *results)
    rail_down(machines[1], 1)
    results = both(machines, "flexring doctor --pair", 150)
    check(all(result.code == 1 for result in results), "a rail that is down is no failure", *results)
    check("different numbers of ports" in results[0].output, "a rail that is down is not named", *results)


@scenario
def all_objects_of_the_devices_are_released(machines):
    for machine in machines:
        for device, used in rdma_resources(machine).items():
            check((used["pd"], used["cq"], used["qp"], used["mr"], used["ctx"]) == (1, 1, 1, 0, 0), f"{machine.name}: {device} has {used}")
