"""The command line of every experiment: flags, help, compiled programs that are kept, and errors as one paragraph.

This module does not import jax, which ``--help`` and errors in a command do without: what needs it imports it.
"""

import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from experiments import fields
from experiments.config import ExperimentConfig
from kvjax.errors import ConfigError, KvjaxError

USAGE_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
FULL_HELP = "--helpfull"
HELP = {"--help", "-h", "-help", FULL_HELP}
WIDTH = 120  # columns of a help text
CACHE_FLAG = "compilation_cache"
DISTRIBUTED, COORDINATOR, COUNT, NUMBER = "distributed", "coordinator_address", "num_processes", "process_id"


class _Parser(flags.ArgumentParser):
    """Reads one kind of field; defaults come as values and pass through."""

    def __init__(self, kind: Any):
        self.kind = kind

    def parse(self, argument: object) -> Any:
        return fields.read(self.kind, argument) if isinstance(argument, str) else argument

    def flag_type(self) -> str:
        return self.kind.__metadata__[0]


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
    if HELP & set(argv[1:]):
        print(_help(argv, about, values, cls))
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
    argv: Sequence[str], *, about: str, define: Callable[[flags.FlagValues], None], positional: int = 0
) -> tuple[list[str], flags.FlagValues]:
    """Reads the flags of a program without a config, and keeps compiled programs as they say.

    Args:
      argv: as `sys.argv`, the program first.
      about: the program's docstring, for ``--help``.
      define: adds the program's flags.
      positional: the most arguments that are no flags.

    Returns:
      The arguments that are no flags, and all flag values.

    Raises:
      ConfigError: an unknown flag, a wrong value or an argument too many, with the known flags.
      SystemExit: 0, after ``--help``.
    """
    values = flags.FlagValues()
    define(values)
    define_compilation_cache(values)
    if HELP & set(argv[1:]):
        print("\n".join([_about(argv, about), *_flags(values)]))
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
    about = "folder in which compiled programs are kept, or none; else $JAX_COMPILATION_CACHE_DIR, or the user's cache"
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
        raise ConfigError(f"--{CACHE_FLAG}={given!r} cannot be written: give a folder of your own, or none.")
    products.await_native()


def define_processes(values: flags.FlagValues) -> None:
    """Adds the flags that `start_processes` reads."""
    about = "join the processes that SLURM, a Cloud TPU slice, Open MPI or Kubernetes has started with this command"
    flags.DEFINE_bool(DISTRIBUTED, False, about, flag_values=values)
    about = "HOST:PORT of the first of several processes, where the environment does not say it"
    flags.DEFINE_string(COORDINATOR, None, about, flag_values=values)
    flags.DEFINE_integer(COUNT, None, "number of processes, likewise", flag_values=values)
    flags.DEFINE_integer(NUMBER, None, "number of this process, from 0, likewise", flag_values=values)


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


def _help(argv: Sequence[str], about: str, values: flags.FlagValues, cls: type) -> str:
    """Returns the help of a program with a config; with --helpfull, which imports jax, also the names of caches."""
    lines = [_about(argv, about), "", "Configs, by --config=NAME; one of your own by --config=FILE.py:"]
    lines += [_filled(", ".join(fields.names(cls)), "  ", "  "), *_flags(values)]
    lines += ["", "Fields of the config, with the defaults of a config that does not set them:"]
    meanings, defaults, group = fields.meanings(cls), cls(), ""
    for path in fields.leaves(cls):
        if path.rpartition(".")[0] != group:
            group = path.rpartition(".")[0]
            lines.append("")
        meaning = meanings.get(path) or fields.kind_of(path, cls).__metadata__[0]
        default = _default(fields.value_of(defaults, path))
        lines.append(_filled(f"--config.{path}: {meaning.replace('`', '')} ({default})"))
    lines += _cache_names() if FULL_HELP in argv else ["", f"{FULL_HELP} also lists policies, storages and selections."]
    return "\n".join(lines)


def _about(argv: Sequence[str], about: str) -> str:
    """Returns a program's docstring, with the names of the console command if the program was started by it."""
    if argv[0].startswith("kvjax "):
        module = r"python -m (?:experiments|kvjax)\.(\w+)"
        about = re.sub(module, lambda found: f"kvjax {found[1].replace('_', '-')}", about)
    return about.strip()


def _flags(values: flags.FlagValues) -> list[str]:
    """Returns the lines of a program's own flags, and then of those that all have."""
    common = {CACHE_FLAG, DISTRIBUTED, COORDINATOR, COUNT, NUMBER}
    groups = {"Flags:": lambda name: name not in common, "Flags of every program:": lambda name: name in common}
    lines = []
    for title, belongs in groups.items():
        if names := [name for name in values if belongs(name)]:
            lines += ["", title, *(_flag(name, values[name]) for name in names)]
    return lines


def _flag(name: str, flag: flags.Flag) -> str:
    unset = flag.default is None or flag.default is False or flag.default in ([], "")
    return _filled(f"--{name}: {flag.help}{'' if unset else f' ({_default(flag.default)})'}")


def _default(value: object) -> str:
    """Returns a default as the command line would have it."""
    if value is None or value == ():
        return "default none"
    if value == "":
        return "default empty"
    return f"default {','.join(map(str, value)) if isinstance(value, tuple | list) else value}"


def _filled(text: str, first: str = "  ", others: str = "      ") -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def _cache_names() -> list[str]:
    from kvjax import policies, selection, storage
    from kvjax.models import shapes

    known = {
        "Policies": policies.names(),
        "Storages": storage.names(),
        "Selections": selection.names(),
        "Shapes of --config.model.shape": sorted(shapes.SHAPES),
    }
    return [line for title, names in known.items() for line in ("", f"{title}:", _filled(", ".join(names), "  ", "  "))]


def main(program: Callable[[Sequence[str]], int], interrupted: str = "no unfinished result was kept.") -> None:
    """Runs a program and exits: errors of the user as one paragraph (status 2), an interruption as one line (130)."""
    try:
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
