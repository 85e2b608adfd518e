"""The help texts of commands: flags and fields in groups, each with its meaning and default, and the valid names.

This module does not import jax; with ``--helpfull``, which lists what each name takes, it does.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from absl import flags

from experiments import fields
from kvjax.errors import ConfigError
from kvjax.specs import names as known

FULL = "--helpfull"
HELP = {"--help", "-h", "-help", FULL}
WIDTH = 120  # columns of a help text
PREFIX = "config."  # of the fields of a config among flags
Groups = Mapping[str, Sequence[str]]  # the title of a group -> the flags in it
_TASKS = Path(__file__).resolve().parent / "tasks"
# A meaning that says what holds if the flag is not given.
_DESCRIBED = re.compile(r"; else |; default|\(default |; if not given|; without it ")
_AT_LEAST = re.compile(r"at least \d+")  # in how a field is described that has a minimum
_BOUNDED = re.compile(r"at least \d|from [\d.]+ to [\d.]+")  # a meaning that says the bounds of a number
#: Flags and fields -> the kinds of names that they take.
TAKES = {
    "policies": ("policy.name", "policy", "policies", "caches", "baselines", "unlimited", "add"),
    "storages": ("storage", "caches", "baselines"),
    "selections": ("selection", "caches", "baselines"),
    "shapes": ("model.shape", "shape"),
    "weights": ("model.weights", "weights"),
    "dtypes": ("model.dtype",),
    "recall tasks": ("recall.tasks",),
    "tasks": ("tasks.names",),
    "topologies": ("topology",),
}


def of_config(argv: Sequence[str], about: str, values: flags.FlagValues, cls: type, common: Groups) -> str:
    """Returns the help of a program with a config.

    Defaults are those of the config that is given beside ``--help``, or else of the class.

    Args:
      argv: as `sys.argv`.
      about: the program's docstring.
      values: the program's flags.
      cls: the class of its configs.
      common: flags of every program, the last groups.
    """
    name, config = _config(argv, cls)
    lines = [described(argv, about), "", "Configs for --config=NAME; --config=FILE.py takes one of your own:"]
    lines += [filled(", ".join(fields.names(cls)), "  ", "  "), *of_flags(values, common)]
    where = f"of --config={name}" if name else "where the config does not set them"
    lines += ["", f"Fields of the config, with their defaults {where}:"]
    meanings, leaves = fields.meanings(cls), fields.leaves(cls)
    for group, about_group in {"": "", **fields.groups(cls)}.items():
        if own := [path for path in leaves if path.rpartition(".")[0] == group]:
            about_group = "" if about_group.startswith("see ") else about_group
            lines += ["", f"{group}: {about_group}".rstrip() if group else "fields in no group:"]
        for path in own:
            kind = fields.kind_of(path, cls).__metadata__[0]
            meaning, least = meanings.get(path) or kind, _AT_LEAST.search(kind)
            notes = _notes(meaning, least[0] if least else "", shown(fields.value_of(config, path)))
            lines.append(filled(f"--{PREFIX}{path}: {meaning.replace('`', '')}{notes}"))
    return "\n".join([*lines, *of_names([*values, *(PREFIX + path for path in leaves)], full=FULL in argv)])


def of_program(argv: Sequence[str], about: str, values: flags.FlagValues, groups: Groups) -> str:
    """Returns the help of a program without a config; see `of_config`."""
    return "\n".join([described(argv, about), *of_flags(values, groups), *of_names(values, full=FULL in argv)])


def _config(argv: Sequence[str], cls: type) -> tuple[str, object]:
    """Returns the name of the config that a command gives, and the config; its class's defaults where it gives none."""
    given = [argument.partition("=")[2] for argument in argv if argument.startswith(("--config=", "-config="))]
    if len(given) == 1:
        try:
            return given[0], fields.by_name(given[0], cls)
        except ConfigError:  # the help says which there are
            pass
    return "", cls()


def described(argv: Sequence[str], about: str) -> str:
    """Returns a program's docstring, with the names of the console command if the program was started by it."""
    if argv[0].startswith("kvjax "):
        module = r"python -m (?:experiments|kvjax)\.(\w+)"
        about = re.sub(module, lambda found: f"kvjax {found[1].replace('_', '-')}", about)
    return about.strip()


def of_flags(values: flags.FlagValues, groups: Groups) -> list[str]:
    """Returns the lines of flags: those in no group first, then group by group."""
    grouped = {name for names in groups.values() for name in names}
    titled = {"Flags": [name for name in values if name not in grouped], **groups}
    lines = []
    for title, names in titled.items():
        if own := [name for name in names if name in values]:
            lines += ["", f"{title}:", *(_flag(name, values[name]) for name in own)]
    return lines


def _flag(name: str, flag: flags.Flag) -> str:
    about = " ".join(str(flag.help).replace("repeat this option to specify a list of values", "").split()).rstrip(";")
    default = shown(flag.default)
    if isinstance(flag.default, bool):
        default = f"default {'on' if flag.default else 'off'}"
    elif flag.default in (None, [], "") and _DESCRIBED.search(about):
        default = ""
    switch = "[no]" if isinstance(flag.default, bool) else ""
    return filled(f"--{switch}{name}: {about}{_notes(about, bounds(flag.parser), default)}")


def _notes(meaning: str, limits: str, default: str) -> str:
    """Returns what follows a meaning in brackets: the bounds of a number, if it does not say them, and the default."""
    notes = ["" if _BOUNDED.search(meaning) else limits, default]
    return f" ({', '.join(filter(None, notes))})" if any(notes) else ""


def bounds(parser: object) -> str:
    """Returns the least and the largest number that the parser of a flag takes; empty if it has no bounds."""
    least, most = (getattr(parser, side, None) for side in ("lower_bound", "upper_bound"))
    if least is None:
        return "" if most is None else f"at most {most:g}"
    return f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"


def shown(value: object) -> str:
    """Returns a default as the command line would have it."""
    if value is None or value == () or value == []:
        return "default none"
    if value == "":
        return "default empty"
    return f"default {','.join(map(str, value)) if isinstance(value, tuple | list) else value}"


def filled(text: str, first: str = "  ", others: str = "      ") -> str:
    """Returns a paragraph in lines of at most `WIDTH` columns."""
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def listed() -> dict[str, list[str]]:
    """Returns the names of each kind of `TAKES`; those of policies that are made of others end in ``(...)``."""
    made = [f"{name}(...)" for kind in ("combinators", "head plans") for name in known.names(kind)]
    tasks = [
        *known.keys(_TASKS / "multiple_choice.py", "TASKS"), *known.keys(_TASKS / "published.py", "SOURCES"),
        *known.keys(_TASKS / "needles.py", "FORMS"), "reconstruction", "alpaca", "FILE.jsonl",
        *(f"ruler_{name}" for name in (*known.keys(_TASKS / "ruler.py", "NEEDLES"), "vt", "cwe", "fwe")),
        *(f"ruler_{name}" for name in known.keys(_TASKS / "ruler_questions.py", "SOURCES")),
        *(f"recall_{name}" for name in known.keys(_TASKS / "recall_turns.py", "KINDS")),
        *known.keys(_TASKS / "scbench.py", "TASKS"),
    ]  # fmt: skip
    own, chips = ["FILE.py:factory"], [f"{name}:AxB[xC]" for name in known.names("TPUs")]
    return {
        "policies": [*known.names("policies"), *made, *own], "storages": [*known.names("storages"), *own],
        "selections": [*known.names("selections"), *own], "shapes": known.names("shapes"),
        "weights": [*known.names("weights"), "stored"], "dtypes": list(known.DTYPES),
        "recall tasks": list(known.keys(_TASKS / "recall.py", "TASKS")), "tasks": tasks,
        "topologies": [*chips, *(f"{name}:N" for name in known.names("GPUs"))],
    }  # fmt: skip


def of_names(takers: Iterable[str], *, full: bool) -> list[str]:
    """Returns the lines of the names that flags and fields take.

    Args:
      takers: names of flags, those of fields with `PREFIX`.
      full: whether policies, storages and selections are listed with their arguments, one in each line.
    """
    have, lines = set(takers), []
    for kind, found in listed().items():
        if where := [f"--{name}" for each in TAKES[kind] for name in (each, PREFIX + each) if name in have]:
            lines += ["", f"{kind[0].upper()}{kind[1:]} ({', '.join(where)}):"]
            lines += (_signatures(kind) if full else []) or [filled(", ".join(found), "  ", "  ")]
    return [*lines, *([] if full or not lines else ["", f"{FULL} also shows the arguments of each name."])]


def _signatures(kind: str) -> list[str]:
    """Returns a line for each factory of a kind, with its arguments and the first line of its docstring."""
    from kvjax import policies, selection, storage

    tables: dict[str, Mapping[str, Callable[..., object]]] = {
        "policies": policies.POLICIES | policies.COMBINATORS | policies.HEAD_PLANS, "storages": storage.STORAGES,
        "selections": selection.SELECTIONS,
    }  # fmt: skip
    lines = []
    for name, factory in tables.get(kind, {}).items():
        signature = inspect.signature(factory)
        plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        arguments = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
        about = (inspect.getdoc(factory) or "").partition("\n")[0]
        lines.append(filled(f"{name}{arguments}: {about}"))
    return lines
