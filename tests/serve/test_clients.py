"""Who a client is, what each may have, keys, and addresses."""

import asyncio
import os
import socket

import pytest

from kvjax.errors import ConfigError
from kvjax.serve import address
from kvjax.serve.api_keys import bearer_token, is_among, read_keys
from kvjax.serve.clients import Client, FairQueue, client_of

pytest.importorskip("starlette", reason="the server needs kvjax[serve]")
from kvjax.serve import bodies
from kvjax.serve.api_errors import ApiError
from kvjax.serve.bodies import Bodies

A, B, C = Client("a"), Client("b"), Client("c")


def filled(queue, client, most):
    """Adds requests while they fit, and no more than `most`; returns how many."""
    count = 0
    while count < most and queue.fits(client, 1, 10):
        queue.add(client, (client, count))
        count += 1
    return count


def test_a_client_that_floods_leaves_each_other_one_its_share():
    queue = FairQueue()
    assert filled(queue, A, 100) == 10
    assert filled(queue, B, 100) == 5 and filled(queue, C, 100) == 3
    # As rows become free, the client that has the fewest takes the next.
    taken = [queue.take()[0].outer for _ in range(9)]
    assert sorted(taken) == list("aaabbbccc")
    assert not queue.fits(A, 1, 10) and not queue.fits(B, 1, 10)
    while queue.take() is not None:
        pass
    for client, count in ((A, 10), (B, 5), (C, 3)):
        for _ in range(count):
            queue.end(client)
    assert queue.open == 0 and queue.fits(A, 10, 10) and not queue.fits(A, 11, 10)


def test_the_highest_priority_is_first_and_then_clients_share():
    queue = FairQueue(lambda item: item[1])
    assert queue.priority is None
    for client, priority in ((A, 0), (A, 2), (A, 0), (B, 0), (C, 2), (A, 3)):
        queue.add(client, (client.outer, priority, queue.open))
    assert queue.priority == 3
    # Of the two of priority 2, that of the client which has none running; A's others wait for those of B.
    assert [queue.take() for _ in range(6)] == [
        ("a", 3, 5), ("c", 2, 4), ("a", 2, 1), ("b", 0, 3), ("a", 0, 0), ("a", 0, 2)
    ]  # fmt: skip
    assert queue.take() is None and queue.priority is None


def test_keys_that_are_made_up_take_nothing_from_other_addresses():
    queue = FairQueue()
    for number in range(1000):
        filled(queue, Client("a", str(number)), 1)
    assert queue.open <= 20
    assert filled(queue, B, 100) >= 5
    taken = [queue.take()[0].outer for _ in range(10)]
    assert taken.count("b") == 5
    # Nor do many addresses take more than some places each.
    for number in range(1000):
        filled(queue, Client(str(number)), 1)
    assert queue.open <= 40


def test_clients_of_one_address_share_by_their_keys():
    queue = FairQueue()
    assert filled(queue, Client("a", "flood"), 100) == 10
    assert filled(queue, Client("a", "patient"), 100) == 5
    assert queue.take()[0].inner == "flood" and queue.take()[0].inner == "patient"
    assert queue.remove(Client("a", "patient"), (Client("a", "patient"), 1))
    assert not queue.remove(Client("a", "patient"), (Client("a", "patient"), 1))
    assert len(queue.clear()) == 12 and queue.open == 2 and queue.take() is None


def test_who_a_client_is():
    assert client_of("10.0.0.7", b"key", verified=False) == Client("10.0.0.7", b"key")
    assert client_of("10.0.0.7", b"key", verified=True) == Client(b"key", "10.0.0.7")
    assert client_of("::ffff:10.0.0.7", b"", verified=False).outer == "10.0.0.7"
    same = {client_of(f"2001:db8::{end}", b"", verified=False).outer for end in ("1", "2", "ffff:1%eth0")}
    assert same == {"2001:db8::/64"} and client_of("unix", b"", verified=False).outer == "unix"


def test_keys(tmp_path):
    assert read_keys(None) == () and read_keys("s\xe9cret") == ("s\xe9cret".encode(),)
    (file := tmp_path / "keys").write_bytes("\ufeffone\r\n\n  zw\xf6lf  \n".encode())
    assert read_keys(f"@{file}") == (b"one", "zw\xf6lf".encode())
    # What a terminal gave that is not UTF-8.
    for given in ("", " ", "\t", "\xa0", "\u3000", "\u200b", "a\nb", "a\x00b", os.fsdecode(b"s\xe9cret"), "@\x00"):
        with pytest.raises(ConfigError, match="api-key"):
            read_keys(given)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_keys(f"@{file}")
    with pytest.raises(ConfigError, match="directory"):
        read_keys(f"@{tmp_path}")
    assert bearer_token(b"Bearer  zw\xc3\xb6lf ") == bearer_token(b"bearer zw\xc3\xb6lf") == "zw\xf6lf".encode()
    assert bearer_token(b"") == bearer_token(b"zw") == bearer_token(b"Basic zw") == b""
    assert is_among(b"two", (b"one", b"two")) and not is_among(b"", (b"one",)) and not is_among(b"\xe9", (b"one",))


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.1", True), ("127.1", True), ("2130706433", True), ("127.0.0.5", True),
     ("0.0.0.0", False), ("0", False), ("::1", True), ("::ffff:127.0.0.1", True), ("::", False)],
)  # fmt: skip
def test_whether_a_server_is_local_is_read_from_its_socket(host, local):
    try:
        listener = address.bound(host, 0)
    except ConfigError:
        assert ":" in host and not socket.has_dualstack_ipv6()
        pytest.skip("this machine has no IPv6")
    with listener:
        assert address.is_local(listener) == local
        allowed = address.names(listener, host)
    assert address.is_called("localhost:8000", allowed) and address.is_called("127.0.0.1", allowed)
    assert address.is_called("[::1]:80", allowed) and address.is_called("LOCALHOST.", allowed)
    assert address.is_called("", allowed) == address.is_called("a-page.com:8000", allowed) == (not local)


def test_a_host_of_a_star_is_no_permission():
    """Some systems take it for this machine; a web page may not call it by any name for that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not address.is_called("a-page.com", address.names(listener, "*"))


class Body:
    """A request whose body comes in parts."""

    def __init__(self, parts, announced=None):
        self.headers = {} if announced is None else {"content-length": str(announced)}
        self._parts = parts

    async def stream(self):
        for part in self._parts:
            yield part


def test_bytes_of_bodies_count_before_they_come(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BYTES", 1000)
    monkeypatch.setattr(bodies, "SMALL_BYTES", 10)

    async def take(counted, body, client):
        async with counted.receive(body, client) as content:
            return bytes(content)

    async def refused(counted, body, client):
        with pytest.raises(ApiError) as error:
            await take(counted, body, client)
        return error.value.status

    async def run():
        counted = Bodies(2000)
        assert await refused(counted, Body([], 1001), "a") == 413
        assert await refused(counted, Body([b"x" * 600] * 2), "a") == 413
        async with counted.receive(Body([], 990), "a"):  # of which nothing has come
            assert await refused(counted, Body([b"x"], 100), "a") == 503
            assert await refused(counted, Body([b"x" * 40] * 3), "a") == 503
            assert await take(counted, Body([b"x"] * 10), "a") == b"x" * 10
            async with counted.receive(Body([b"x" * 500] * 2), "b") as content:
                assert len(content) == 1000
                assert await refused(counted, Body([], 100), "c") == 503
                assert await take(counted, Body([b"x"] * 10, 10), "c") == b"x" * 10
            assert await take(counted, Body([b"x"], 100), "c") == b"x"
        assert await take(counted, Body([b"x" * 900], 900), "a") == b"x" * 900 and not counted._held

    asyncio.run(run())


def test_requests_in_line_are_submitted_in_their_order():
    from kvjax.serve.admission import Admission
    from kvjax.serve.engine import Busy

    class Engine:
        """Has room for as many requests as it is given."""

        def __init__(self):
            self.room, self.submitted, self.cancelled = 0, [], []

        def submit(self, asked, client, *, places):
            if asked == "wrong":
                raise ConfigError("wrong")
            if not self.room:
                raise Busy("full")
            self.room -= 1
            self.submitted.append(asked)
            return [asked]

        def full(self, client, *, places):
            return not self.room

        def cancel(self, ticket):
            self.cancelled.append(ticket)

    async def run():
        engine = Engine()
        admission = Admission(engine, lambda: 8 * 4, patience=0.3)  # four in line
        waiting = [asyncio.create_task(admission.submit(name, A)) for name in ("1", "2", "wrong")]
        await asyncio.sleep(0.05)
        engine.room = 1
        # One that comes later does not go first.
        waiting.append(asyncio.create_task(admission.submit("3", A)))
        await asyncio.sleep(0.1)
        assert engine.submitted == ["1"] and await waiting[0] == ["1"]
        for _ in range(2):
            waiting.append(asyncio.create_task(admission.submit("4", A)))
        await asyncio.sleep(0)
        assert admission.full(A)
        waiting[1].cancel()
        await asyncio.sleep(0)
        engine.room = 1
        await asyncio.sleep(0.1)
        assert isinstance(waiting[2].exception(), ConfigError)
        results = await asyncio.gather(*waiting[3:], return_exceptions=True)
        assert results[0] == ["3"] and [type(each) for each in results[1:]] == [Busy, Busy]
        assert engine.submitted == ["1", "3"] and not admission._lines and not engine.cancelled
        line = [asyncio.create_task(admission.submit("5", A)) for _ in range(4)]
        await asyncio.sleep(0)
        assert admission.full(A) and admission.full(B)
        with pytest.raises(Busy):
            await admission.submit("6", B)
        await asyncio.gather(*line, return_exceptions=True)

    asyncio.run(run())
