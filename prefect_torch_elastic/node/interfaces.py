"""Which network interface has an address: gloo is told a name, not an address."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)  # in a `struct ifreq`, of an AF_INET address


def find_interface(address: str) -> str:
    """Return the name of this machine's interface with an IPv4 address, empty if it is not known."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if wanted.is_loopback:  # all of 127.0.0.0/8 is here, though the interface names one address
        return "lo"
    return next((name for _, name in socket.if_nameindex() if _read_address(name) == str(wanted)), "")


def _read_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", name.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[_ADDRESS])
        except OSError:  # it has no IPv4 address
            return ""
