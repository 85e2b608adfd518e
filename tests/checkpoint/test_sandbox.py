"""Untrusted chat templates: each ends in time, within its memory, and with an error that a caller can catch."""

import os
import subprocess
import sys
import threading
import time

import pytest

from kvjax.checkpoint import sandbox
from kvjax.checkpoint.sandbox import ChatTemplateError, Sandbox
from kvjax.errors import InputError
from tests.conftest import ROOT

pytest.importorskip("jinja2", reason="chat templates need jinja2: pip install 'kvjax[chat]'")

LIMITS = {"processor_seconds": 0.3, "seconds": 20.0, "memory": 512 << 20, "characters": 1 << 20}
WAIT = 60  # seconds, beside other tests
DOUBLED = "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
#: Name -> a template, what it is given, and what the error says.
HOSTILE = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "processor time",
    ),
    "loops that write": (
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "characters",
    ),
    "doubled strings": (DOUBLED, "MemoryError|characters|processor time|memory"),
    "doubled lists": (DOUBLED.replace("'x'", "[1]").replace("{{ ns.s }}", ""), "MemoryError|processor time|memory"),
    "lipsum": ("{{ lipsum(n=10**7) }}", "processor time|MemoryError"),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
    "long string": ("{{ 'x' * 10**9 }}", "MemoryError|characters"),
    "long string of a variable": ("{{ s * 10**9 }}", "MemoryError|characters"),
    "power": ("{{ 9**(9**9) }}", "processor time"),
    "power of a variable": ("{{ n**(n**n) }}", "processor time"),
    "digits": ("{{ (10**n)**5000 | string }}", "ValueError|TypeError"),
    "center": ("{{ s|center(10**9) }}", "MemoryError|characters"),
    "indent": ("{{ 'x\\n' * 10**5 |indent(10**6) }}", "MemoryError|characters|TypeError|processor time"),
    "width": ("{{ '%999999999d' % 1 }}", "MemoryError|characters"),
    "width of a format": ("{{ '{:>999999999}'.format(1) }}", "MemoryError|characters"),
    "width of a filter": ("{{ '%999999999s'|format('x') }}", "MemoryError|characters"),
    "recursion of a macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "recursion of a loop": ("{% for x in s recursive %}{{ loop(s) }}{% endfor %}", "RecursionError"),
    "deep expression": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError|SyntaxError|code"),
    "deep operators": ("{{ " + "-" * 50_000 + "1 }}", "RecursionError|SyntaxError|code"),
    "deep blocks": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "RecursionError|SyntaxError|IndentationError|code"),
    "replaced": ("{{ (s * 10**5).replace('x', s * 10**5) }}", "MemoryError|characters"),
    "joined": ("{{ range(99999)|join(s * 10**6) }}", "MemoryError|characters"),
    "json": ("{{ {'a': 1}|tojson(indent=10**9) }}", "MemoryError|characters|processor time"),
    "time": ("{{ strftime_now('%Y' * 10**8) }}", "MemoryError|characters|processor time|ValueError"),
    "sorted": ("{{ (range(99999)|list * 300)|sort|length }}", "MemoryError|processor time"),
    "zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "value": ("{{ '%d' % s }}", "TypeError|ValueError"),
    "value of int": ("{{ [1, 2].index(3) }}", "ValueError"),
    "key": ("{{ '{a}'.format() }}", "KeyError"),
    "index": ("{{ '{}'.format() }}", "IndexError"),
    "type": ("{{ s + 1 }}", "TypeError: can only concatenate"),
    "overflow": ("{{ (n * 1.0) ** 9999 }}", "OverflowError"),
    "unicode": ("{{ 'é'.encode('ascii') }}", "UnicodeEncodeError"),
    "lookup": ("{{ s.encode('nothing') }}", "LookupError"),
    "filter": ("{{ s|nothing }}", "No filter named"),
    "syntax": ("{% for %}", "Expected an expression"),
    "undefined": ("{{ a.b.c }}", "'a' is undefined"),
    "sandbox": ("{{ s.__class__.__mro__ }}", "unsafe"),
    "a message that is no text": ("{{ raise_exception({'a': s * 10**6}) }}", "^the chat template refuses.{0,500}$"),
    "import": ("{% import 'os' as os %}", "no loader"),
}


@pytest.fixture(scope="module")
def small():
    made = Sandbox(**LIMITS)
    yield made
    made.stop()


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", HOSTILE)
def test_every_template_ends_with_an_error_of_its_own(name, small):
    source, message = HOSTILE[name]
    began = time.monotonic()
    with pytest.raises(ChatTemplateError, match=message):
        small.render(source, {"s": "x", "n": 9999})
    assert time.monotonic() - began < LIMITS["seconds"] + 5
    assert small.render("{{ s }}", {"s": "after"}) == "after"


def test_a_time_on_the_clock_ends_a_template_too():
    made = Sandbox(**LIMITS | {"processor_seconds": 100.0, "seconds": 0.3})
    with pytest.raises(ChatTemplateError, match=r"takes more than 0\.3 s\."):
        made.render(HOSTILE["nested loops"][0], {})
    made.stop()


IGNORING = """
import signal
from kvjax.checkpoint.sandbox import ChatTemplateError, Sandbox
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
spin = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
try:
    Sandbox(processor_seconds=0.2).render(spin, {})
except ChatTemplateError as error:
    assert "processor time" in str(error)
else:
    raise AssertionError
"""


def test_signals_that_this_process_ignores_or_blocks_still_end_a_template():
    """In another process: what is ignored here would be so for the other tests."""
    subprocess.run([sys.executable, "-c", IGNORING], check=True, timeout=WAIT, cwd=ROOT)


def test_texts_that_utf_8_cannot_hold_come_back(small):
    assert small.render("{{ s }}", {"s": "é\ud800\U0001f600"}) == "é\ud800\U0001f600"
    with pytest.raises(ChatTemplateError, match="refuses the conversation"):
        small.render("{{ raise_exception(s) }}", {"s": "\ud800"})


def test_variables_that_json_cannot_hold(small):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for wrong in ({1}, deep, 10**5000):
        with pytest.raises(InputError, match="must be JSON values"):
            small.render("", {"x": wrong})


def test_ordinary_renders_are_fast_and_share_a_process(small):
    small.render("{{ s }}", {"s": "x"})
    began = time.process_time()
    for number in range(200):
        assert small.render("{{ s }}{{ n }}", {"s": "x", "n": number}) == f"x{number}"
    assert time.process_time() - began < 200 * 0.005


def test_a_template_that_spins_keeps_nobody_else_waiting(small):
    def spin():
        with pytest.raises(ChatTemplateError):
            small.render(HOSTILE["nested loops"][0], {})

    small.render("", {})
    thread = threading.Thread(target=spin)
    thread.start()
    for _ in range(20):
        assert small.render("{{ 1 }}", {}) == "1"
    thread.join(WAIT)
    assert not thread.is_alive()


def test_many_threads_get_their_own_texts(small):
    found = [""] * 40

    def ask(number):
        found[number] = small.render("{{ n }}" * 100, {"n": number})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert found == [str(number) * 100 for number in range(len(found))]


def test_stop_ends_what_is_running():
    made, caught = Sandbox(processor_seconds=1000, seconds=1000), []

    def spin():
        try:
            made.render(HOSTILE["nested loops"][0], {})
        except ChatTemplateError as error:
            caught.append(str(error))

    thread = threading.Thread(target=spin)
    thread.start()
    deadline = time.monotonic() + WAIT
    while thread.is_alive() and time.monotonic() < deadline:
        made.stop()
        time.sleep(0.05)
    thread.join(1)
    assert caught and "was not rendered" in caught[0]
    assert made.render("{{ 1 }}", {}) == "1"
    made.stop()


PARENT = """
import os, sys, threading
from kvjax.checkpoint.sandbox import Sandbox
made = Sandbox(processor_seconds=2, seconds=10)
made.render("", {})
(worker,) = made._all
print(worker.process.pid, flush=True)
if len(sys.argv) > 1:
    threading.Thread(target=made.render, args=(sys.argv[1], {})).start()
sys.stdin.read()
"""


@pytest.mark.parametrize("spins", [False, True])
def test_a_process_ends_with_its_parent_however_that_ends(spins):
    arguments = [HOSTILE["nested loops"][0]] if spins else []
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ) as parent:  # fmt: skip
        worker = int(parent.stdout.readline())
        if spins:
            time.sleep(0.5)
        parent.kill()
        parent.wait(WAIT)
    deadline = time.monotonic() + WAIT
    while is_running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Whether a process that is no child of this one runs; one that waits for its parent's interest does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


FORK = """
import os
from kvjax.checkpoint.sandbox import Sandbox
made = Sandbox()
assert made.render("{{ 1 }}", {}) == "1"
child = os.fork()
if child == 0:
    ok = made.render("{{ 2 }}", {}) == "2"
    made.stop()
    os._exit(0 if ok else 1)
assert made.render("{{ 3 }}", {}) == "3"
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert made.render("{{ 4 }}", {}) == "4"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_has_processes_of_its_own():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=WAIT, cwd=ROOT)


def test_the_worker_imports_neither_jax_nor_numpy():
    code = f"import runpy, sys; runpy.run_path({sandbox.template_worker.__file__!r}); "
    code += "print(sorted({'jax', 'numpy', 'kvjax'} & sys.modules.keys()))"
    made = subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=WAIT, stdout=subprocess.PIPE, cwd="/")
    assert made.stdout.strip() == b"[]"
