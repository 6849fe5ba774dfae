"""An Ethernet switch of our own, for links with a delay: rate and delay of every port are kept.

    python -m foretell.pytorch.ranks.switch TAG RATE,RATE,… DELAY

It opens one TAP device a port, hands each to the namespace TAG0, TAG1, … as `eth0`, says `ready`,
and forwards frames until its input ends. A frame leaves the sender when its link has room, and
arrives at the receiver when that link has had room too, `DELAY` seconds later. There is no burst
credit.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

_SET = 0x400454CA  # TUNSETIFF, linux/if_tun.h
_TAP = 0x0002 | 0x1000  # IFF_TAP | IFF_NO_PI
_MTU = 16000  # bytes: fewer, larger frames cost this process less
_QUEUE = 0.4  # seconds a frame may wait for its link before it is dropped, as tbf's latency


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
        told = sys.stdin.fileno()
        while True:
            now = time.monotonic()
            while self.waiting and self.waiting[0][0] <= now:
                _, _, port, frame = heapq.heappop(self.waiting)
                _write(self.ports[port], frame)
            wait = max(0.0, self.waiting[0][0] - now) if self.waiting else 1.0
            for fd in select.select([told, *self.ports], [], [], wait)[0]:
                if fd == told:
                    return
                self._read(fd, where[fd])

    def _read(self, fd: int, port: int) -> None:
        for _ in range(16):  # then see to what is due
            try:
                frame = os.read(fd, _MTU + 64)
            except BlockingIOError:
                return
            self.take(port, frame, time.monotonic())


def _write(fd: int, frame: bytes) -> None:
    try:
        os.write(fd, frame)
    except OSError:
        return  # the other end is down or full: a frame is lost, as on any wire


def opened(tag: str, port: int) -> int:
    """A TAP device in the namespace of a port, by its file."""
    name = f"{tag}t{port}"
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _SET, struct.pack("16sH22x", name.encode(), _TAP))
    move = ["ip", "link", "set", name, "netns", f"{tag}{port}", "name", "eth0", "mtu", str(_MTU)]
    subprocess.run(move, check=True)
    return fd


def main(tag: str, rates: str, delay: str) -> None:
    """Open the ports and forward."""
    speeds = [float(r) for r in rates.split(",")]
    switch = Switch([opened(tag, port) for port in range(len(speeds))], speeds, float(delay))
    print("ready", flush=True)
    switch.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
