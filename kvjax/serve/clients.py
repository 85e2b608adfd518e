"""Who sends a request, and what clients that flood the server leave to others.

A client is its address, and within an address the key that it sends. Where the server has keys, which cannot be made
up, it is the key, and within a key the address. The first has its share first, so that a client gets no more by making
up many of the second. Headers such as X-Forwarded-For are not read, since anybody can send them.
"""

import collections
import dataclasses
import ipaddress
import math
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
BEYOND = 4  # times the number of places, which clients that hold less than their share may take at the most


class Client(NamedTuple):
    """Who sends a request.

    Attributes:
      outer: what has a share of the whole.
      inner: what has a share of that.
    """

    outer: str | bytes = ""
    inner: str | bytes = ""


def client_of(address: str, token: bytes, *, verified: bool) -> Client:
    """Says who sends a request.

    Args:
      address: of its connection.
      token: the key that it sends; empty for none.
      verified: whether that is a key of the server.
    """
    place = _network(address)
    return Client(token, place) if verified else Client(place, token)


def _network(address: str) -> str:
    """An address; of IPv6 the first half, since one client has all of the second."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)


@dataclasses.dataclass(eq=False)
class _Group(Generic[Item]):
    """The requests and the bodies of a client.

    Attributes:
      open: its requests that have not ended.
      running: those that were taken.
      turn: when one was taken last.
      waiting: those that were not taken, of an inner client, by falling priority.
      inner: the inner clients of an outer one.
    """

    open: int = 0
    running: int = 0
    turn: int = -1
    waiting: collections.deque[Item] = dataclasses.field(default_factory=collections.deque)
    inner: "dict[str | bytes, _Group[Item]]" = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of requests that wait."""
        return self.open - self.running


class FairQueue(Generic[Item]):
    """Requests of several clients.

    The next one is of the highest priority; among equal ones, of the client that has the fewest running, and then in
    turn.

    Attributes:
      open: the number of requests that have not ended.
      shared: when several clients had some last, by `time.monotonic`.
    """

    def __init__(self, priority: Callable[[Item], int] = lambda _: 0) -> None:
        """Begins without requests.

        Args:
          priority: of a request.
        """
        self.open, self.shared = 0, -math.inf
        self._turns, self._priority_of = 0, priority
        self._outer: dict[str | bytes, _Group[Item]] = {}

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(group.count for group in self._outer.values())

    @property
    def priority(self) -> int | None:
        """The priority of the next request; None if none waits."""
        return max(map(self._priority, self._ready(self._outer)), default=None)

    def fits(self, client: Client, count: int, places: int) -> bool:
        """Whether a client may add requests.

        It may while there are places. Otherwise it may hold its equal share of them all the same.

        Args:
          client: the client.
          count: how many requests.
          places: the number of requests that may be open, in addition to those of clients that hold less than their
            share.
        """
        if self.open + count <= places:
            return True
        if self.open + count > BEYOND * places:
            return False
        outer = self._outer.get(client.outer, _Group())
        share = self._share(places, self._outer, client.outer)
        if outer.open + count <= share:
            return True
        inner = outer.inner.get(client.inner, _Group())
        part = self._share(share, outer.inner, client.inner)
        return inner.open + count <= part and outer.open + count <= places + share

    def add(self, client: Client, item: Item) -> None:
        """Adds a request, which waits."""
        outer = self._outer.setdefault(client.outer, _Group())
        inner = outer.inner.setdefault(client.inner, _Group())
        place = len(inner.waiting)
        while place and self._priority_of(inner.waiting[place - 1]) < self._priority_of(item):
            place -= 1
        inner.waiting.insert(place, item)
        self._count(client, 1, 0)
        if len(self._outer) > 1 or len(outer.inner) > 1:
            self.shared = time.monotonic()

    def take(self) -> Item | None:
        """Takes the next request that waits, which then runs."""
        name, outer = self._next(self._outer)
        if outer is None:
            return None
        key, inner = self._next(outer.inner)
        assert inner is not None
        self._turns += 1
        outer.turn = inner.turn = self._turns
        self._count(Client(name, key), 0, 1)
        return inner.waiting.popleft()

    def remove(self, client: Client, item: Item) -> bool:
        """Removes a request that waits; returns whether it did."""
        outer = self._outer.get(client.outer)
        inner = None if outer is None else outer.inner.get(client.inner)
        if inner is None or item not in inner.waiting:
            return False
        inner.waiting.remove(item)
        self._count(client, -1, 0)
        return True

    def end(self, client: Client) -> None:
        """Says that a request that ran has ended."""
        self._count(client, -1, -1)

    def clear(self) -> list[Item]:
        """Removes all requests that wait."""
        found: list[Item] = []
        for name, outer in list(self._outer.items()):
            for key, inner in list(outer.inner.items()):
                found += inner.waiting
                self._count(Client(name, key), -len(inner.waiting), 0)
                inner.waiting.clear()
        return found

    def _count(self, client: Client, opened: int, running: int) -> None:
        self.open += opened
        outer = self._outer[client.outer]
        for group in (outer, outer.inner[client.inner]):
            group.open += opened
            group.running += running
        if not outer.inner[client.inner].open:
            del outer.inner[client.inner]
        if not outer.open:
            del self._outer[client.outer]

    @staticmethod
    def _share(whole: int, groups: "dict[str | bytes, _Group[Item]]", name: str | bytes) -> int:
        return max(1, whole // (len(groups) + (name not in groups)))

    def _next(self, groups: "dict[str | bytes, _Group[Item]]") -> "tuple[str | bytes, _Group[Item] | None]":
        ready = [(name, group) for name, group in groups.items() if group.count]
        return min(
            ready, key=lambda each: (-self._priority(each[1]), each[1].running, each[1].turn), default=("", None)
        )  # fmt: skip

    @staticmethod
    def _ready(groups: "dict[str | bytes, _Group[Item]]") -> "list[_Group[Item]]":
        return [group for group in groups.values() if group.count]

    def _priority(self, group: "_Group[Item]") -> int:
        """The highest priority of the requests of a client that wait, of which there is one."""
        if group.waiting:
            return self._priority_of(group.waiting[0])
        return max(map(self._priority, self._ready(group.inner)))
