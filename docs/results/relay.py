"""A switch in user space that holds every packet for a time: delays between hosts where the kernel has no netem.

    python -m docs.results.relay --delay 10ms --hosts 4

`jobs/bench/net.sh --delay 10ms` starts it inside its namespaces. Each host's eth0 is a TUN device whose packets come here. One
goes to the host of its destination, 10.77.0.HOST, when the delay is over. Rates are those of token buckets, on the way out.
"""

import argparse
import fcntl
import heapq
import os
import select
import struct
import time
from itertools import count

from oktopk.replay.links import seconds_of

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LONGEST = 1 << 16


def device(name):
    """A new TUN device; returns its file descriptor, whose reads and writes are IP packets."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def last_byte(packet):
    """Of the destination of an IPv4 packet; None of another packet."""
    return packet[19] if len(packet) >= 20 and packet[0] >> 4 == 4 else None


def relay(ports, delay, host_of=last_byte, until=float("inf")):
    """Pass packets on between file descriptors, each after a time.

    Args:
        ports: host -> file descriptor, which does not block.
        delay: seconds that a packet is held.
        host_of: of a packet's bytes; packets of no host in `ports` are dropped.
        until: time of `time.monotonic` at which it ends.
    """
    numbers = count()  # packets of one time keep their order
    waiting = []
    while (now := time.monotonic()) < until:
        while waiting and waiting[0][0] <= now:
            _, _, host, packet = heapq.heappop(waiting)
            try:
                os.write(ports[host], packet)
            except OSError:  # a device that is down or full drops it, as a switch does
                continue
        rest = min(until, waiting[0][0] if waiting else until) - now
        ready, _, _ = select.select([*ports.values()], [], [], min(rest, 1.0))
        for file in ready:
            try:
                packet = os.read(file, _LONGEST)
            except OSError:  # it is down
                continue
            host = host_of(packet)
            if host in ports:
                heapq.heappush(waiting, (time.monotonic() + delay, next(numbers), host, packet))


def main(arguments=None):
    """The command: makes the devices t1, t2, ... and t254, says so, and passes packets on until it is killed."""
    parser = argparse.ArgumentParser(prog="docs.results.relay", description="Hold packets between hosts.")
    parser.add_argument("--delay", type=seconds_of, required=True, help="Of each packet, such as 10ms")
    parser.add_argument("--hosts", type=int, required=True)
    options = parser.parse_args(arguments)
    ports = {host: device(f"t{host}") for host in [*range(1, options.hosts + 1), 254]}
    print("ready", flush=True)
    relay(ports, options.delay)


if __name__ == "__main__":
    main()
