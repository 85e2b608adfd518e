"""Renders chat templates in a process of its own; `kvjax.checkpoint.sandbox` starts it and says what goes in and out.

This file is run as a script and imports Jinja and the standard library alone, so that it starts in a tenth of a second.
Templates are not trusted. The kernel ends this process when one exceeds its time, whatever the process is doing, and
refuses memory beyond a limit; the process ends by itself when the pipe of the one that started it closes.
"""

import datetime
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser

LENGTH_BYTES = 8  # of the length before each request and each answer
TEXT, ERROR, LAST_ERROR = b"T", b"E", b"L"  # kinds of answers; after the last error this process ends
START_SECONDS = 30.0  # until Jinja is imported
TEMPLATES = 32  # compiled ones that are kept
MAX_REASON = 300  # characters of an error's message


def main(processor_seconds: float, seconds: float, memory: int, characters: int) -> None:
    """Answers requests until the pipe closes.

    Args:
      processor_seconds: processor time of one request.
      seconds: wall time of one request.
      memory: bytes of address space.
      characters: of the text that a template makes.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    _limit_memory(memory)
    for name in ("SIGINT", "SIGTERM"):  # are for the process that started this one, whose end closes the pipe
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _limit_time(START_SECONDS, START_SECONDS)
    _environment()
    _limit_time(0, 0)
    while header := requests.read(LENGTH_BYTES):
        request = requests.read(int.from_bytes(header, "little"))
        _limit_time(processor_seconds, seconds)
        kind, answer = _answer(request, characters)
        _limit_time(0, 0)
        _write(answers, kind, answer)
        if kind == LAST_ERROR:
            break


def _limit_memory(memory: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(processor_seconds: float, seconds: float) -> None:
    """Lets the kernel end this process after these times; 0 for never."""
    for timer, name, maximum in (("ITIMER_PROF", "SIGPROF", processor_seconds), ("ITIMER_REAL", "SIGALRM", seconds)):
        if hasattr(signal, timer):  # not on Windows
            # What the process that started this one ignores or blocks is inherited.
            signal.signal(getattr(signal, name), signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {getattr(signal, name)})
            signal.setitimer(getattr(signal, timer), maximum)


def _answer(request: bytes, characters: int) -> tuple[bytes, bytes]:
    """Renders a template.

    Args:
      request: JSON of the template (``source``) and what it is given (``variables``).
      characters: see `main`.

    Returns:
      The kind of the answer, and the text or the reason why there is none.
    """
    try:
        given = json.loads(request)
        text = "".join(_limited(_compiled(given["source"]).generate(given["variables"]), characters))
        return TEXT, text.encode("utf-8", "surrogatepass")
    except Exception as error:  # a template can raise whatever Python and Jinja can
        # A template that took all memory may have left some of it in use.
        kind = LAST_ERROR if isinstance(error, MemoryError) else ERROR
        return kind, _reason(error).encode("utf-8", "backslashreplace")


def _limited(parts: Iterator[str], characters: int) -> Iterator[str]:
    left = characters
    for part in parts:
        left -= len(part)
        if left < 0:
            raise OverflowError(f"the text has more than {characters:,} characters")
        yield part


def _reason(error: Exception) -> str:
    from jinja2.exceptions import TemplateError

    text = str(error)[:MAX_REASON]
    return text if isinstance(error, TemplateError) and text else f"{type(error).__name__}{text and ': '}{text}"


def _write(answers: BinaryIO, kind: bytes, answer: bytes) -> None:
    answers.write(kind + len(answer).to_bytes(LENGTH_BYTES, "little"))
    answers.write(answer)
    answers.flush()


@functools.lru_cache(TEMPLATES)
def _compiled(source: str) -> "jinja2.Template":
    return _environment().from_string(source)


@functools.cache
def _environment() -> "jinja2.Environment":
    """Returns what templates are written for (transformers' documentation, "Chat templates")."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    def refuse(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Generation(jinja2.ext.Extension):
        """The block ``generation``, which marks what a model wrote, for training; here it is its contents."""

        tags = {"generation"}  # noqa: RUF012  # Jinja's type

        def parse(self, parser: "jinja2.parser.Parser") -> "list[jinja2.nodes.Node]":
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
