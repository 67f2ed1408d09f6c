#!/usr/bin/env python3
"""Virtual machines with Soft-RoCE devices: boots them, runs commands in them, and always powers them off.

    tests/vm/vm.py [--nics N] [--vms N] [--add FILE[=PLACE]]... -- COMMAND

runs COMMAND, a shell command line, in one machine or in several at once ($MACHINE is 1, 2, ...), and passes on its output and
exit status. Card ethN of machine M has the address 198.18.N.M; its device is rxeN, with this address at GID index 1. The cards
N of all machines are one network. Files are placed in /usr/bin, programs with their libraries.

    with vm.boot(2, nics=2, add=["target/release/flexring"]) as (one, two):
        code, output = one.run("ping -c 1 198.18.0.2", timeout=10)

The machines leave nothing behind: their disks are in memory, their wires are ports of the loopback, and they end with this
process.
"""

import argparse
import collections
import contextlib
import os
import queue
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMAGE = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent.parent / "target")) / "vm"
# Commands that a machine can run at once. One more channel is for ending them.
CHANNELS = 12
# Seconds for booting a machine.
BOOT_LIMIT = 90
# Bytes in flight on a wire, with the kernel's overhead; the kernel may grant less.
WIRE = 4 << 20

# Prints name, state and kernel stack of all threads of a session.
THREAD_STACKS = """for process in $(grep -lx "NSsid:[[:space:]]*%d" /proc/[0-9]*/status); do
    for thread in ${process%%status}task/*; do
        sed -n "s/^Name:[[:space:]]*//p; s/^State:[[:space:]]*//p" $thread/status; cat $thread/stack
    done
done 2>/dev/null"""

Result = collections.namedtuple("Result", "code output")


class Failure(Exception):
    """A machine does not boot or does not answer."""


class Impossible(Exception):
    """Virtual machines are not available here."""


def image():
    """The folder with kernel and root; builds them if they are missing."""
    for program in ("qemu-system-x86_64", "setpriv"):
        if not shutil.which(program):
            raise Impossible(f"{program} is not installed")
    built = subprocess.run([HERE / "image.sh", IMAGE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if built.returncode == 3:
        raise Impossible(built.stdout.strip())
    if built.returncode:
        raise Failure(f"cannot build the image: {built.stdout.strip()}")
    return IMAGE


def in_memory(name, *parts):
    """A file in memory with these contents."""
    file = os.fdopen(os.memfd_create(name, 0), "r+b")
    for part in parts:
        file.write(part)
    file.flush()
    return file


def wire():
    """Both ends of a wire between two cards. It drops packets that are not received, while a stream would block the sender."""
    ends = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WIRE)
        end.bind(("127.0.0.1", 0))
    for end, other in zip(ends, reversed(ends)):
        end.connect(other.getsockname())
    return ends


@contextlib.contextmanager
def boot(machines=1, nics=1, add=(), memory=1536, cpus=2, trusts_tsc=False):
    """Boots machines whose cards of the same number are connected, and yields them when all are up.

    `add` lists files to copy into the machines, as `FILE` or `FILE=PLACE`. With `trusts_tsc`, for measurements on a quiet machine, reading the
    clock is no system call. A kernel that boots on a busy one can find a wrong rate of its clock then: it ran six times too fast once.
    """
    if machines > 2:
        raise Impossible("at most two machines")  # a wire is a pair of sockets; more machines need a switch
    folder = image()
    roots = [(folder / "initramfs").read_bytes()]
    if add:
        with tempfile.NamedTemporaryFile() as archive:
            subprocess.run([HERE / "pack.sh", archive.name, *map(str, add)], check=True)
            roots.append(Path(archive.name).read_bytes())
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(in_memory("initramfs", *roots))
        wires = [wire() if machines == 2 else (None,) for _ in range(nics)]
        running = []
        for number in range(1, machines + 1):
            ends = [pair[number - 1] for pair in wires]
            machine = Machine(number, folder / "kernel", root, ends, memory, cpus, trusts_tsc)
            stack.callback(machine.poweroff)
            running.append(machine)
        for ends in wires:
            for end in filter(None, ends):
                end.close()
        for machine in running:
            machine.wait_for_boot()
        if trusts_tsc:
            for machine in running:
                machine.check_clock()
        yield running


class Machine:
    """A virtual machine that is booting or running."""

    def __init__(self, number, kernel, root, wires, memory, cpus, trusts_tsc):
        self.number = number
        self.name = f"vm{number}"
        self.log = tempfile.TemporaryFile()  # output of the kernel and the emulator
        self.free = queue.Queue()
        self.jobs = []
        started = time.monotonic()
        self.boot_deadline = started + BOOT_LIMIT
        ours, theirs = zip(*(socket.socketpair() for _ in range(CHANNELS + 1)))
        # The emulated timer is late on a busy host, which the kernel takes for a timer that is not connected, and panics.
        arguments = f"console=ttyS0 quiet panic=-1 mitigations=off no_timer_check machine={number} channels={CHANNELS + 1}"
        if trusts_tsc:
            # The kernel distrusts the emulated time stamp counter, and otherwise reads each time from an emulated device by a system call.
            arguments += " tsc=reliable"
        command = [
            # The emulator ends with this process, even if this process is killed.
            *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"),
            *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", cpus, "-m", memory, "-machine", "q35"),
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"),
            *("-kernel", kernel, "-initrd", f"/proc/self/fd/{root.fileno()}", "-append", arguments),
            *("-device", f"virtio-serial-pci,max_ports={CHANNELS + 2}"),
        ]
        for channel, end in enumerate(theirs, 1):
            command += ["-chardev", f"socket,id=channel{channel},fd={end.fileno()}"]
            command += ["-device", f"virtserialport,chardev=channel{channel},nr={channel}"]
        for card, wire in enumerate(wires):
            # A card without another machine needs a network, even an empty one, to be up.
            network = f"dgram,local.type=fd,local.str={wire.fileno()}" if wire else "user,restrict=on,ipv6=off"
            command += ["-netdev", f"{network},id=net{card}"]
            command += ["-device", f"virtio-net-pci,netdev=net{card},romfile=,mac=52:54:00:00:{card:02x}:{number:02x}"]
        passed = [root, *theirs, *filter(None, wires)]
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, pass_fds=[file.fileno() for file in passed],
        )
        for end in theirs:
            end.close()
        self.channels = ours
        self.control = threading.Lock()
        for channel in ours[1:]:
            self.free.put(channel)

    def check_clock(self):
        """Fails unless the machine's clock runs as fast as the clock here."""
        def both():
            return float(self.run("cut -d' ' -f1 /proc/uptime", 20).output), time.monotonic()

        (inside, here), _, (inside_later, here_later) = both(), time.sleep(2), both()
        rate = (inside_later - inside) / (here_later - here)
        if not 0.9 < rate < 1.1:
            self.fail(f"has a clock that runs {rate:.2f} times as fast as the one here: boot it on a quiet machine")

    def wait_for_boot(self):
        Job(self, self.channels[0], "true").wait(max(0, self.boot_deadline - time.monotonic()))

    def run(self, command, timeout=60, sink=None):
        """Runs a command line until it ends. Returns its exit status and output.

        After `timeout` seconds it is killed, and its status is 124. `sink` is called with pieces of output as they arrive.
        """
        return self.start(command, sink).wait(timeout)

    def start(self, command, sink=None):
        """Starts a command line and returns its `Job`."""
        try:
            channel = self.free.get(timeout=10)
        except queue.Empty:
            raise Failure(f"{self.name} already runs {CHANNELS} commands") from None
        job = Job(self, channel, command, sink, lambda: self.free.put(channel))
        self.jobs = [other for other in self.jobs if other.running()] + [job]
        return job

    def end_jobs(self):
        """Kills all running commands."""
        for job in self.jobs:
            if job.running():
                job.signal()
            job._end(10)
        self.jobs = []

    def alive(self):
        return self.process.poll() is None

    def log_tail(self):
        """The last output of kernel and emulator."""
        self.log.flush()
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()

    def fail(self, why):
        """Raises a failure with the last output of kernel and emulator."""
        tail = self.log_tail()
        raise Failure(f"{self.name} {why}" + (f"; its last output:\n{tail}" if tail else ""))

    def poweroff(self):
        """Stops the machine immediately; it has no data to save."""
        self.process.kill()
        self.process.wait()
        for channel in self.channels:
            channel.close()


class Job:
    """A command in a machine, running or ended."""

    def __init__(self, machine, channel, command, sink=None, done=lambda: None):
        self.machine = machine
        self.code = None
        self.printed = bytearray()
        self._pid = queue.Queue()
        # No command prints this mark, so it delimits the output of this command.
        mark = f"\x1e{secrets.token_hex(8)}"
        first = f"printf '{mark} %d\\n' $$; eval \"$1\""
        line = f"setsid sh -c {shlex.quote(first)} sh {shlex.quote(command)} </dev/null; printf '{mark} %d\\n' $?\n"
        self._listener = threading.Thread(target=self._listen, args=(channel, line, mark.encode(), sink, done), daemon=True)
        self._listener.start()

    def _listen(self, channel, line, mark, sink, done):
        pattern = re.compile(re.escape(mark) + rb" (\d+)\n")
        pending = b""
        pid = None
        try:
            channel.sendall(line.encode())
            while data := channel.recv(1 << 16):
                pending += data
                if pid is None:
                    if not (start := pattern.search(pending)):
                        continue
                    pid = int(start[1])
                    self._pid.put(pid)
                    pending = pending[start.end():]
                end = pattern.search(pending)
                # Hold back bytes that may be the beginning of the mark.
                cut = end.start() if end else pending.rfind(mark[:1], -len(mark) - 12)
                text, pending = (pending, b"") if cut < 0 else (pending[:cut], pending[cut:])
                self.printed += text
                if sink and text:
                    sink(text)
                if end:
                    self.code = int(end[1])
                    done()
                    return
        except OSError:
            pass  # the machine is down

    @property
    def output(self):
        """The output so far."""
        return bytes(self.printed).decode(errors="replace")

    def running(self):
        return self._listener.is_alive()

    def wait_for(self, text, timeout=20):
        """Waits until the output contains this text. Returns False if the command ends or the time passes before that."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if not self.running() or time.monotonic() > deadline:
                return text in self.output
            time.sleep(0.02)
        return True

    def signal(self, name="KILL"):
        """Sends a signal to the process group of the command."""
        with self.machine.control:
            pid = self.pid()
            if self.running():
                Job(self.machine, self.machine.channels[0], f"kill -s {name} -- -{pid}")._end(10)

    def pid(self):
        """The process id of the command's session and group."""
        try:
            pid = self._pid.get(timeout=10)
        except queue.Empty:
            self.machine.fail("does not start a command")
        self._pid.put(pid)
        return pid

    def wait(self, timeout=60):
        """Waits for the end of the command. Returns its exit status and output. After `timeout` seconds it is killed, its status
        is 124, and the output has the stacks of its threads."""
        self._listener.join(timeout)
        late = self.running()
        stacks = self._thread_stacks() if late else ""
        if late:
            self.signal()
        self._end(10)
        return Result(124 if late else self.code, self.output + stacks)

    def _thread_stacks(self):
        """Name, state and kernel stack of each thread of the command, for finding out why it does not end."""
        with self.machine.control:
            listing = Job(self.machine, self.machine.channels[0], THREAD_STACKS % self.pid())
            listing._end(10)
        return f"\n[not done; its threads:]\n{listing.output}"

    def _end(self, limit):
        self._listener.join(limit)
        if self.running():
            self.machine.fail("does not answer")
        if self.code is None:
            self.machine.fail("is down")


def end_on_signals():
    """Makes SIGTERM and SIGHUP raise SystemExit, so that machines are powered off."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def main():
    parser = argparse.ArgumentParser(description="Runs a command in a virtual machine with Soft-RoCE devices.")
    parser.add_argument("--vms", type=int, default=1, help="machines; the command runs in all of them (1)")
    parser.add_argument("--nics", type=int, default=1, help="network cards, each with its rxe device (1)")
    parser.add_argument("--add", action="append", default=[], metavar="FILE[=PLACE]", help="a file to copy into the machines")
    parser.add_argument("--memory", type=int, default=1536, help="MiB (1536)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that the command may take (600)")
    parser.add_argument("--log", action="store_true", help="print the output of the kernels at the end")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    end_on_signals()

    lock = threading.Lock()

    def show(text):
        with lock:
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()

    def lines(prefix):
        """Prints whole lines only, so that lines of several machines do not mix."""
        held = bytearray()

        def sink(text):
            held.extend(text)
            while (end := held.find(b"\n")) >= 0:
                show(prefix + held[:end + 1])
                del held[:end + 1]

        return sink

    try:
        with boot(options.vms, options.nics, options.add, options.memory) as machines:
            deadline = time.monotonic() + options.timeout
            sink = show if len(machines) == 1 else None
            jobs = [machine.start(" ".join(options.command), sink or lines(machine.name.encode() + b"| ")) for machine in machines]
            codes = [job.wait(max(0, deadline - time.monotonic())).code for job in jobs]
            if options.log:
                for machine in machines:
                    print(f"--- {machine.name}\n{machine.log_tail()}", file=sys.stderr)
        if 124 in codes:
            print(f"not done after {options.timeout:g} s", file=sys.stderr)
        sys.exit(next(filter(None, codes), 0))
    except (Failure, Impossible) as why:
        sys.exit(str(why))


if __name__ == "__main__":
    main()
