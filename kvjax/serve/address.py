"""The address that the server listens on, and the names by which it may be called."""

import ipaddress
import socket
from collections.abc import Sequence

from kvjax.errors import ConfigError

LOCAL = ("127.0.0.1", "localhost", "[::1]")  # what this machine calls itself
BACKLOG = 2048  # connections that wait to be accepted, as many as uvicorn allows


def bound(host: str, port: int) -> socket.socket:
    """Takes an address, so that it is known before anything is loaded whether it is free.

    Raises:
      ConfigError: it is in use, or is none of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A host name may have addresses of both kinds; IPv4 is preferred, because every client can reach it.
        family, kind, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host={host} --port={port} cannot be listened on: {getattr(error, 'strerror', error)}."
        ) from None
    return made


def is_local(listener: socket.socket) -> bool:
    """Whether this machine alone can reach the address that a socket is bound to, however that was spelled."""
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def names(listener: socket.socket, host: str) -> Sequence[str]:
    """The names by which clients may call the server; ``*`` stands for all.

    No web page can reach a local server under the page's name. One that others can reach may have any name.

    Args:
      listener: bound to the address.
      host: the address as the user gave it.
    """
    if not is_local(listener):
        return ("*",)
    given = {host, listener.getsockname()[0]} - {"*"}
    # As the header Host has it, where an IPv6 address stands in brackets.
    return (*LOCAL, *(f"[{name}]" if ":" in name else name for name in given))


def is_called(header: str, allowed: Sequence[str]) -> bool:
    """Whether a header Host, with or without a port, has one of the names."""
    name, colon, port = header.strip().lower().rpartition(":")
    if not colon or (port and not port.isdigit()):
        name = header.strip().lower()
    return "*" in allowed or name.removesuffix(".") in {each.lower() for each in allowed}
