"""One connection: uvicorn's protocol with deadlines, errors in JSON, and clients that close their side first.

A client may close its sending side after its request (shutdown) and wait for the answer. A client that has disconnected
looks the same, until something is sent to it: its system then resets the connection. Every response begins with the
same bytes, so these are sent one at a time before there is an answer, and a request whose client has disconnected ends.
"""

import asyncio
import dataclasses
import http
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvjax.serve.api_errors import ApiError

if TYPE_CHECKING:
    from kvjax.serve.connections import Connections

BEGINNING = b"HTTP/1.1 "  # of every response
PIECE = 16 << 10  # bytes that h11 is given at once
PROBE_SECONDS = 0.2  # from the first byte that is sent early to the second; twice as long to each further one

#: Waits for a request; receives its body; waits for the answer or sends it; reads what is left of a body whose request
#: has been answered; closes.
Phase = Literal["head", "body", "answer", "drain", "closing"]


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long a connection may take, in seconds. It is checked once a second.

    Attributes:
      head: to send the line and the headers of a request; also the longest that a new connection may be silent.
      idle: to begin the next request.
      body: to send a body, in addition to the time that its bytes take at `rate`.
      rate: bytes a second, at the least.
      rest: to send what is left of a body whose request has been answered.
      write: to take anything of what is sent.
    """

    head: float = 10.0
    idle: int = 5
    body: float = 20.0
    rate: int = 64 << 10
    rest: float = 5.0
    write: float = 60.0


class Connection(H11Protocol):
    """The protocol of one connection.

    Attributes:
      address: of the client.
      phase_began: when its phase began, or when that was noticed.
      ended: whether the server has given it up.
    """

    transport: "_Transport"

    def __init__(self, connections: "Connections", **arguments: Any):
        super().__init__(**arguments)
        self.address, self.phase_began, self.ended = "", time.monotonic(), False
        self._all, self._deadlines = connections, connections.deadlines
        self._received, self._before = 0, 0  # bytes: of all; of all when the phase began
        self._last: tuple[Any, ...] = ("head", None, None)
        self._stalls, self._half_closed = 0, False

    @property
    def phase(self) -> Phase:
        """The phase of the connection."""
        if self.transport.is_closing():
            return "closing"
        if self.cycle is None or self.cycle.response_complete:
            return "drain" if self.conn.their_state is h11.SEND_BODY else "head"
        return "body" if self.cycle.more_body else "answer"

    def refuse(self, error: ApiError) -> None:
        """Answers a request with an error, if an answer has not begun, and closes the connection.

        A connection on which nothing was asked is closed without a word.
        """
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # The application reads that the client has disconnected, and what it sends is dropped.
            cycle.disconnected = True
            cycle.message_event.set()
        begun = self._partial or self.conn.their_state is not h11.IDLE
        if begun and not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = [*error.headers.items(), ("content-length", str(len(body))), ("connection", "close")]
            reason = http.HTTPStatus(error.status).phrase
            head = h11.Response(status_code=error.status, headers=headers, reason=reason)
            for event in (head, h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def end(self) -> None:
        """Closes the connection at once, whatever has not been sent."""
        self.ended = True
        self.transport.abort()

    def waits(self, now: float) -> bool:
        """Returns whether its client has to send a whole request or to take an answer; updates `phase_began`."""
        self._notice_phase(now)
        return (self.phase != "answer" or self.flow.write_paused) and not self.ended

    def check(self, now: float) -> None:
        """Ends what has taken too long.

        Args:
          now: by `time.monotonic`.
        """
        self._notice_phase(now)
        phase, stalled = self.phase, self.flow.write_paused
        passed, limits = now - self.phase_began, self._deadlines
        if phase == "closing":
            if passed > (limits.rest if self.transport.lingers and not stalled else limits.write):
                self.end()
        elif stalled and passed > limits.write:
            self._all.notice("write", f"{self.address} has not read its response for {passed:.0f} s")
            self.end()
        elif phase == "drain" and passed > limits.rest:
            self.end()
        elif phase == "head" and passed > limits.head:
            self._all.notice("head", f"{self.address} has not sent complete headers in {passed:.0f} s: closed")
            self.refuse(ApiError(408, f"no complete request headers were received within {limits.head:g} s."))
        elif phase == "body" and passed > limits.body + (self._received - self._before) / limits.rate:
            self._all.notice("body", f"{self.address} has not sent the complete body in {passed:.0f} s: closed")
            self.refuse(ApiError(408, f"the body was received too slowly: the limit is {limits.body:g} s plus one "
                                 f"second per {limits.rate:,} bytes."))  # fmt: skip

    # What asyncio and uvicorn call.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        wrapped = _Transport(transport, lambda: self._partial or self.conn.their_state in (h11.SEND_BODY, h11.ERROR))
        super().connection_made(wrapped)
        self.address = self.client[0] if self.client else "unknown"
        self._all.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # read so that the client can read its answer
        self._received += len(data)
        # h11 compares with its limit of headers what has come and is not a whole request.
        for start in range(0, len(data), PIECE):
            if not self.transport.is_closing():
                super().data_received(data[start : start + PIECE])

    def eof_received(self) -> bool:  # type: ignore[override]
        if self.transport.is_closing():
            return False
        if self.phase == "answer":
            self._half_closed = True
            self._probe(PROBE_SECONDS)
            return True
        if self._partial or self.phase == "body":
            self.refuse(ApiError(400, "the connection was closed before the request was complete."))
        return False

    def send_400_response(self, msg: str) -> None:
        # It is called while h11's error is handled, which knows the status.
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self.refuse(ApiError(status, f"this is not a valid HTTP request: {error or msg}."))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Unless a further request had come, which is then being answered.
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def pause_writing(self) -> None:
        self._stalls += 1
        super().pause_writing()

    def shutdown(self) -> None:
        self.transport.patient = False
        if self.transport.is_closing():
            self.end()
        else:
            super().shutdown()

    @property
    def _partial(self) -> bool:
        """Whether a part of the headers has come."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _notice_phase(self, now: float) -> None:
        state = (self.phase, self.cycle, self._stalls if self.flow.write_paused else None)
        if state != self._last:
            self._last, self.phase_began, self._before = state, now, self._received

    def _probe(self, seconds: float) -> None:
        """Sends a byte of a response that has not begun. If the client has disconnected, sending the next one fails."""
        if self.phase == "answer" and not self.cycle.response_started and self.transport.write_early():
            self.loop.call_later(seconds, self._probe, 2 * seconds)


class _Transport(asyncio.Transport):
    """The transport of a connection.

    A socket that is closed while the client sends is reset, and the client may lose the answer. So the sending side is
    closed first, and what comes is read for a while.

    Attributes:
      lingers: whether only the sending side is closed.
      patient: whether it may linger.
    """

    def __init__(self, transport: asyncio.Transport, sending: Callable[[], bool]):
        """Begins.

        Args:
          transport: asyncio's.
          sending: whether the client may be in the middle of a request.
        """
        super().__init__()
        self.lingers, self.patient = False, True
        self._transport, self._sending, self._early = transport, sending, 0

    def write(self, data: Any) -> None:
        skipped = min(self._early, len(data))
        self._early -= skipped
        if not self.is_closing():
            self._transport.write(data[skipped:])

    def write_early(self) -> bool:
        """Writes the next byte of `BEGINNING`, which `write` then leaves out; returns whether there was one."""
        if self._early == len(BEGINNING):
            return False
        self._transport.write(BEGINNING[self._early : self._early + 1])
        self._early += 1
        return True

    def close(self) -> None:
        if self.is_closing():
            return
        if self.patient and self._sending():
            self.lingers = True
            try:
                self._transport.write_eof()
                self._transport.resume_reading()
            except OSError:  # the client has reset it
                self._transport.abort()
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._transport.get_extra_info(name, default)
