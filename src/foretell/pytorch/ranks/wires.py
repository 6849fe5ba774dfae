"""Networks between local ranks: their names, network namespaces, and a switch that keeps delays.

Everything made here carries the process id in its name: what a killed process left behind is
found by the next one and taken away. Rates are token buckets of the kernel (tbf), on both ends of
each link.
A delay needs netem, which many kernels lack, so those links run through a switch of our own on TAP
devices (→ switch.py).

Networks between local ranks as words: `loopback`, `100mbit`, `1gbit+100mbit`, `100mbit~5ms`.

Rates are those of each rank's own link, both ways at once, joined by `+` where they differ (the
last counts for all that follow); behind `~` stands the delay of every link, one way. `veth` is a
link of its own without a limit, `loopback` none at all.

An Ethernet switch of our own, for links with a delay: rate and delay of every port are kept.

    python -m foretell.pytorch.ranks.wires TAG RATE,RATE,… DELAY

It opens one TAP device a port, hands each to the namespace TAG0, TAG1, … as `eth0`, says `ready`,
and forwards frames until its input ends. A frame leaves the sender when its link has room, and
arrives at the receiver when that link has had room too, `DELAY` seconds later. There is no burst
credit.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from foretell.errors import InputError

_RATE = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}  # bytes/s
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LOOPBACK, VETH = "loopback", "veth"


_SET = 0x400454CA  # TUNSETIFF, linux/if_tun.h
_TAP = 0x0002 | 0x1000  # IFF_TAP | IFF_NO_PI
_LARGEST_FRAME = 16000  # bytes: fewer, larger frames cost this process less
_QUEUE = 0.4  # seconds a frame may wait for its link before it is dropped, as tbf's latency
_SUBNET = "10.99.0"
_NAMED = re.compile(r"fl(\d+)[a-z]+\d*")
_BURST_SECONDS = 2e-3  # of a link's rate: below that tbf does not reach 1 Gbit/s
_MTU = "9000"  # bytes, of a loopback: its own packets of 64 KiB are more than a bucket holds
_BURST_LEAST = 65536  # bytes: one packet as the kernel hands them over


@dataclass(frozen=True)
class Network:
    """What every rank's link lets through."""

    name: str
    rates: tuple[float, ...] = ()  # bytes/s by rank; the last for all that follow; empty: no limit
    delay: float = 0.0  # seconds, one way

    @property
    def wires(self) -> str:
        """How it is built: `lo` not at all, `veth` by the kernel, `tap` by a switch of our own."""
        if self.name == LOOPBACK:
            return "lo"
        return "tap" if self.delay else "veth"

    def rate(self, rank: int) -> float:
        """Bytes/s of one rank's link, 0 where there is no limit."""
        return self.rates[min(rank, len(self.rates) - 1)] if self.rates else 0.0

    def __str__(self) -> str:
        return self.name


def network(text: str) -> Network:
    """The network that a text stands for."""
    name = text.strip().lower()
    if name in (LOOPBACK, VETH):
        return Network(name)
    rates, _, delay = name.partition("~")
    found = tuple(_amount(part, _RATE, text) for part in rates.split("+"))
    return Network(name, found, _amount(delay, _TIME, text) if delay else 0.0)


def _amount(part: str, units: dict[str, float], text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", part.strip())
    if match is None or match[2] not in units or not float(match[1]):
        raise InputError(
            f"`{part}` in the network `{text}` is none of {', '.join(units)}",
            hint="write loopback, veth, 100mbit, 1gbit+100mbit or 100mbit~5ms",
        )
    return float(match[1]) * units[match[2]]


class Switch:
    """Ports with a rate each, one delay for all, and the frames under way."""

    def __init__(self, ports: list[int], rates: list[float], delay: float) -> None:
        self.ports, self.rates, self.delay = ports, rates, delay
        self.up, self.down = [0.0] * len(ports), [0.0] * len(ports)  # when a link is free again
        self.known: dict[bytes, int] = {}  # port by hardware address
        self.waiting: list[tuple[float, int, int, bytes]] = []
        self.count = 0

    def take(self, port: int, frame: bytes, now: float) -> None:
        """A frame has come in: when and where does it go out?"""
        self.known[frame[6:12]] = port
        sent = self._pass(self.up, port, len(frame), now)
        to = self.known.get(frame[:6])
        targets = [to] if to is not None else [p for p in range(len(self.ports)) if p != port]
        for target in targets:
            free = self._pass(self.down, target, len(frame), sent)
            if free - now < self.delay + _QUEUE:
                self.count += 1
                heapq.heappush(self.waiting, (free + self.delay, self.count, target, frame))

    def _pass(self, free: list[float], port: int, size: int, now: float) -> float:
        rate = self.rates[port]
        free[port] = max(free[port], now) + (size / rate if rate else 0.0)
        return free[port]

    def run(self) -> None:
        """Forward until the process that started this is gone."""
        where = {fd: port for port, fd in enumerate(self.ports)}
        control = sys.stdin.fileno()
        while True:
            now = time.monotonic()
            while self.waiting and self.waiting[0][0] <= now:
                _, _, port, frame = heapq.heappop(self.waiting)
                with suppress(OSError):  # the other end is down or full: a frame is lost
                    os.write(self.ports[port], frame)
            wait = max(0.0, self.waiting[0][0] - now) if self.waiting else 1.0
            for fd in select.select([control, *self.ports], [], [], wait)[0]:
                if fd == control:
                    return
                self._read(fd, where[fd])

    def _read(self, fd: int, port: int) -> None:
        for _ in range(16):  # then see to what is due
            try:
                frame = os.read(fd, _LARGEST_FRAME + 64)
            except BlockingIOError:
                return
            self.take(port, frame, time.monotonic())


def opened(tag: str, port: int) -> int:
    """A TAP device in the namespace of a port, by its file."""
    name = f"{tag}t{port}"
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _SET, struct.pack("16sH22x", name.encode(), _TAP))
    move = f"ip link set {name} netns {tag}{port} name eth0 mtu {_LARGEST_FRAME}"
    subprocess.run(move.split(), check=True)
    return fd


def main(tag: str, rates: str, delay: str) -> None:
    """Open the ports and forward."""
    speeds = [float(r) for r in rates.split(",")]
    switch = Switch([opened(tag, port) for port in range(len(speeds))], speeds, float(delay))
    print("ready", flush=True)
    switch.run()


def refusal() -> str:
    """Why no namespaces can be made here, or nothing."""
    if sys.platform != "linux":
        return f"network namespaces are a thing of Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need the rights of root"
    name = f"fl{os.getpid()}probe"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
        probe = subprocess.run(["tc", "-V"], capture_output=True, check=False)
    except (InputError, FileNotFoundError) as why:
        return f"no network namespaces: {str(why).splitlines()[0]}"
    return "" if probe.returncode == 0 else "there is no `tc` to shape links"


class Wires:
    """Ranks each in a namespace of its own, on one bridge or one switch; used with `with`."""

    def __init__(self, ranks: int, kind: str) -> None:
        self.ranks, self.kind = ranks, kind  # `lo`, `veth` or `tap`
        self.tag = f"fl{os.getpid()}{kind[0]}{ranks}"
        self._switch: subprocess.Popen[bytes] | None = None
        self._shaped = ""

    def __enter__(self) -> Self:
        if self.kind != "lo":
            sweep()
        try:
            if self.kind == "veth":
                self._join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prefix(self, rank: int) -> list[str]:
        """What to put before a command so that it runs on a rank."""
        return [] if self.kind == "lo" else ["ip", "netns", "exec", self._space(rank)]

    def address(self, rank: int) -> str:
        """Where a rank is reached."""
        return "127.0.0.1" if self.kind == "lo" else f"{_SUBNET}.{rank + 1}"

    @property
    def interface(self) -> str:
        """The name of the link inside a rank's namespace."""
        return "lo" if self.kind == "lo" else "eth0"

    def shape(self, network: Network) -> None:
        """Give every link its rate and delay."""
        if network.wires != self.kind:
            raise InputError(f"`{network}` cannot be had on {self.kind} links")
        if network.name == self._shaped:
            return
        for rank in range(self.ranks if self.kind == "veth" else 0):
            self._limit(rank, network.rate(rank))
        if self.kind == "tap":
            self._start_switch(network)
        self._shaped = network.name

    def close(self) -> None:
        """Take everything away; what is gone already is no error."""
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
        if self.kind != "lo":
            _remove(f"{self.tag}x")

    def _space(self, rank: int) -> str:
        return f"{self.tag}x{rank}"

    def _join(self) -> None:
        _ip("link", "add", f"{self.tag}xb", "type", "bridge")
        _ip("link", "set", f"{self.tag}xb", "up")
        for rank in range(self.ranks):
            space, outer = self._space(rank), f"{self.tag}xv{rank}"
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", f"{self.tag}xb", "up")
            self._address(rank)

    def _address(self, rank: int) -> None:
        space = self._space(rank)
        _ip("-n", space, "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def _limit(self, rank: int, rate: float) -> None:
        ends: tuple[tuple[list[str], str], ...] = (
            (["-n", self._space(rank)], "eth0"),
            ([], f"{self.tag}xv{rank}"),
        )
        for where, device in ends:
            known = _run(["tc", *where, "qdisc", "show", "dev", device]).split()[1:2] == ["tbf"]
            if rate:
                _run(["tc", *where, "qdisc", "replace", "dev", device, "root", *_bucket(rate)])
            elif known:
                _run(["tc", *where, "qdisc", "del", "dev", device, "root"])

    def _start_switch(self, network: Network) -> None:
        if self._switch is not None:
            raise InputError("a switch has one network for all its life", hint="open another pool")
        for rank in range(self.ranks):
            _ip("netns", "add", self._space(rank))
        rates = ",".join(str(network.rate(rank)) for rank in range(self.ranks))
        command = [sys.executable, "-m", "foretell.pytorch.ranks.wires", f"{self.tag}x", rates]
        self._switch = subprocess.Popen(
            [*command, str(network.delay)],
            stdin=subprocess.PIPE,  # never written to: it ends with us, and the switch with it
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline().strip() != b"ready":
            raise InputError(
                "the switch between ranks could not be started", hint="is there a TUN?"
            )
        for rank in range(self.ranks):
            self._address(rank)


@contextmanager
def shaped_loopback(network: Network, ranks: int) -> Iterator[list[str]]:
    """What to put before a command so that its ranks meet on a loopback of a limited rate.

    All of them send through one queue, which is given the rates of all of them together.
    """
    why = refusal() if network.wires != "lo" else ""
    if why or network.delay:
        raise InputError(why or f"a loopback has no delay, as `{network}` asks for")
    if network.wires == "lo":
        yield []
        return
    sweep()
    space = f"fl{os.getpid()}lo"
    rate = sum(network.rate(rank) for rank in range(ranks))
    try:
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "lo", "mtu", _MTU, "up")
        if rate:
            _run(["tc", "-n", space, "qdisc", "add", "dev", "lo", "root", *_bucket(rate)])
        yield ["ip", "netns", "exec", space]
    finally:
        _remove(space)


def _bucket(rate: float) -> list[str]:
    burst = max(_BURST_LEAST, int(rate * _BURST_SECONDS))
    return ["tbf", "rate", f"{int(rate * 8)}bit", "burst", f"{burst}b", "latency", "400ms"]


def sweep() -> None:
    """Take away what labs left behind whose process is gone."""
    for name in _spaces() + _links():
        match = _NAMED.match(name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(name)


def _remove(start: str) -> None:
    """Remove links and namespaces whose names begin so; those of a namespace go with it."""
    for name in [n for n in _links() if n.startswith(start)]:
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    for name in [n for n in _spaces() if n.startswith(start)]:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _spaces() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _links() -> list[str]:
    lines = _run(["ip", "-o", "link", "show"]).splitlines()
    return [line.split(":")[1].strip().split("@")[0] for line in lines]


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().splitlines() or ["it failed"]
        raise InputError(f"`{' '.join(command)}`: {why[0]}", hint="use --network loopback")
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
