"""The command line of every experiment: flags, help, compiled programs that are kept, and errors as one paragraph.

This module does not import jax, which ``--help`` and errors in a command do without: what needs it imports it.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

from absl import flags
from ml_collections import config_flags

from experiments import fields, help_text
from experiments.config import ExperimentConfig
from kvjax.errors import ConfigError, KvjaxError

USAGE_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
#: Seconds after which an interruption that had no effect is repeated.
INTERRUPT_AGAIN = 5.0
CACHE_FLAG = "compilation_cache"
DISTRIBUTED, COORDINATOR, COUNT, NUMBER = "distributed", "coordinator_address", "num_processes", "process_id"
#: Flags of every program, as ``--help`` groups them.
COMMON = {"Compiled programs": [CACHE_FLAG], "Several processes": [DISTRIBUTED, COORDINATOR, COUNT, NUMBER]}


class _Parser(flags.ArgumentParser):
    """Reads one kind of field; defaults come as values and pass through."""

    def __init__(self, kind: Any):
        self.kind = kind

    def parse(self, argument: object) -> Any:
        return fields.read(self.kind, argument) if isinstance(argument, str) else argument

    def flag_type(self) -> str:
        return self.kind.__metadata__[0]


class CountList(flags.ListParser):
    """Reads whole numbers of at least `lower_bound`, separated by commas."""

    def __init__(self, lower_bound: int = 1):
        super().__init__()
        self.lower_bound = lower_bound

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument  # a default
        given = super().parse(argument)
        if not given or not all(each.isdecimal() and int(each) >= self.lower_bound for each in given):
            raise ValueError(f"must be whole numbers of at least {self.lower_bound}, separated by commas")
        return [int(each) for each in given]


for _kind in fields.KINDS:
    config_flags.register_flag_parser_for_type(_kind, _Parser(_kind))


def parse(
    argv: Sequence[str],
    *,
    about: str,
    define: Callable[[flags.FlagValues], None] = lambda values: None,
    cls: type = ExperimentConfig,
) -> tuple[Any, flags.FlagValues]:
    """Reads ``--config=NAME --config.field=value ...`` and a program's own flags.

    Args:
      argv: as `sys.argv`, the program first.
      about: the program's docstring, for ``--help``.
      define: adds the program's own flags.
      cls: the class of the program's configs.

    Returns:
      The resolved config and all flag values.

    Raises:
      ConfigError: an unknown config, field, flag or value, with the valid ones.
      SystemExit: 0, after ``--help``.
    """
    # --config first: a field can only be overridden once there is a config.
    argv = [*argv[:1], *sorted(argv[1:], key=lambda argument: not argument.startswith(("--config=", "-config=")))]
    values = flags.FlagValues()
    define(values)
    define_compilation_cache(values)
    define_processes(values)
    if help_text.HELP & set(argv[1:]):
        print(help_text.of_config(argv, about, values, cls, COMMON))
        raise SystemExit(0)
    for argument in argv[1:]:
        if override := re.match(r"--?(?:no)?config\.([^=]*)", argument):
            fields.kind_of(override[1], cls)
    given = sum(re.match(r"--?config(=|$)", argument) is not None for argument in argv[1:])
    if given != 1:
        what = "give --config=NAME" if not given else "--config=NAME was given more than once"
        raise ConfigError(f"{what}; known configs: {', '.join(fields.names(cls))}.")
    config_flags.DEFINE_config_dataclass(
        "config", cls(), "what to run", flag_values=values, sys_argv=argv,
        parse_fn=lambda name: fields.by_name(name, cls),
    )  # fmt: skip
    try:
        rest = values(argv)
    except flags.UnrecognizedFlagError as error:
        known = ", ".join(f"--{name}" for name in sorted(values) if "." not in name)
        raise ConfigError(f"unknown flag --{error.flagname}; known flags: {known}, --config.FIELD, --help.") from None
    except flags.Error as error:
        raise ConfigError(str(error).removeprefix("flag ")) from None
    if rest[1:]:
        raise ConfigError(f"unexpected argument {rest[1]!r}; every setting is of the form --config.FIELD=VALUE.")
    start_processes(values)
    prepare_programs(values)
    return values.config, values


def parse_flags(
    argv: Sequence[str],
    *,
    about: str,
    define: Callable[[flags.FlagValues], None],
    positional: int = 0,
    groups: help_text.Groups = MappingProxyType({}),
) -> tuple[list[str], flags.FlagValues]:
    """Reads the flags of a program without a config, and keeps compiled programs as they say.

    Args:
      argv: as `sys.argv`, the program first.
      about: the program's docstring, for ``--help``.
      define: adds the program's flags.
      positional: the most arguments that are no flags.
      groups: the program's flags as ``--help`` groups them; those in no group are first.

    Returns:
      The arguments that are no flags, and all flag values.

    Raises:
      ConfigError: an unknown flag, a wrong value or an argument too many, with the known flags.
      SystemExit: 0, after ``--help``.
    """
    values = flags.FlagValues()
    define(values)
    define_compilation_cache(values)
    if help_text.HELP & set(argv[1:]):
        print(help_text.of_program(argv, about, values, {**groups, **COMMON}))
        raise SystemExit(0)
    known = f"known flags: {', '.join(f'--{name}' for name in sorted(values))}, --help."
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        raise ConfigError(f"{str(error).removeprefix('flag ').rstrip('.')}; {known}") from None
    if rest[positional:]:
        raise ConfigError(f"unexpected argument {rest[positional]!r}; {known}")
    prepare_programs(values)
    return rest, values


def define_compilation_cache(values: flags.FlagValues) -> None:
    """Adds the flag that `prepare_programs` reads."""
    about = "folder for compiled programs, or none; default: $JAX_COMPILATION_CACHE_DIR, or the user's cache folder"
    flags.DEFINE_string(CACHE_FLAG, None, about, flag_values=values)


def prepare_programs(values: flags.FlagValues) -> None:
    """Keeps compiled programs in a folder, and lets them use kvjax's own products even if these must be built first.

    Where no folder is given, the environment decides; see `kvjax.keep_programs`.

    Raises:
      ConfigError: a folder that was asked for and cannot be written.
    """
    from kvjax import host, products

    given = values[CACHE_FLAG].value
    if given is None:
        host.keep_programs_by_default()
    elif given.strip().lower() in ("none", ""):
        host.keep_programs(False)
    elif not host.keep_programs(given):
        raise ConfigError(f"--{CACHE_FLAG}={given!r} cannot be written; give a folder of your own, or none.")
    products.await_native()


def define_processes(values: flags.FlagValues) -> None:
    """Adds the flags that `start_processes` reads."""
    about = "join the processes that SLURM, a Cloud TPU slice, Open MPI or Kubernetes started with this command"
    flags.DEFINE_bool(DISTRIBUTED, False, about, flag_values=values)
    about = "HOST:PORT of the first of several processes, if the environment does not set it"
    flags.DEFINE_string(COORDINATOR, None, about, flag_values=values)
    flags.DEFINE_integer(COUNT, None, "number of processes, if the environment does not set it", flag_values=values)
    flags.DEFINE_integer(NUMBER, None, "index of this process from 0, likewise", flag_values=values)


def start_processes(values: flags.FlagValues) -> None:
    """Joins the other processes, if there are any; all but the first print nothing on stdout from here on.

    Raises:
      ConfigError: see `kvjax.parallel.distributed.initialize`.
    """
    given = [values[name].value for name in (COORDINATOR, COUNT, NUMBER)]
    if not values[DISTRIBUTED].value and given == [None] * 3:
        return
    from kvjax.parallel import distributed

    distributed.initialize(*given)
    if not distributed.is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, until the process ends


def _leave_others(status: int, report: Callable[[], None] = lambda: None) -> None:
    """Ends this process if it is one of several: the others may never come to the end that JAX would wait for.

    Args:
      status: the exit status.
      report: called before the process ends.
    """
    distributed = sys.modules.get("kvjax.parallel.distributed")  # not imported: there are no other processes
    if distributed is not None and distributed.count() > 1:
        report()
        distributed.leave(status)


@contextlib.contextmanager
def _repeated_interrupts() -> Iterator[None]:
    """Repeats the KeyboardInterrupt of a Ctrl-C until one leaves the block.

    A single one can be lost: JAX calls Python from C++ (hashes, comparisons, callbacks), and some of these calls
    discard whatever exception they meet. One of 24 interruptions of a compiling run was.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    has_timers = hasattr(signal, "setitimer")  # not on Windows
    if not (in_main_thread and has_timers and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        # Only the main thread may set handlers, and another handler stays.
        yield
        return

    def interrupt(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, INTERRUPT_AGAIN)
        raise KeyboardInterrupt

    alarm = signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, alarm)


def main(program: Callable[[Sequence[str]], int], interrupted: str = "no unfinished result was kept.") -> None:
    """Runs a program and exits: errors of the user as one paragraph (status 2), an interruption as one line (130)."""
    try:
        with _repeated_interrupts():
            status = program(sys.argv)
    except KvjaxError as error:
        print(f"error: {error}", file=sys.stderr)
        status = USAGE_ERROR
        _leave_others(status)
    except BrokenPipeError:  # as in `... --help | head`, which ends before everything is printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = PIPE_CLOSED
    except Exception:
        _leave_others(1, report=traceback.print_exc)
        raise
    except KeyboardInterrupt:
        print(f"\ninterrupted: {interrupted}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: threads that still compile would crash an interpreter that is being taken down.
        os._exit(INTERRUPTED)
    sys.exit(status)
