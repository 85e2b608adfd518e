"""The pages of policies, storages and selections, from their registries, docstrings and measured files."""

import functools
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import CacheSpec
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.numerics.statistics import Statistic, by_name
from kvjax.policies import full
from kvjax.units import size
from kvjax_site import combine_page, leaderboard, peers, pictures, reading, survivors
from kvjax_site.docstrings import markdown, paper_links, papers, summary
from kvjax_site.entries import MORE, Entry

Drawn = Mapping[str, Sequence[str]]  # name of a policy or a selection -> its pictures, one for each KV head
MEASURED = Path("experiments", "measured")
DIM = 128  # channels of a head, in tables of bytes
SLOTS = 8192  # of a head, in tables of what selections read
TITLES = {
    "policy": "By name", "plan of heads, layers or phases": "By head, layer or phase",
    "combinator": "Made of other policies", "merge": "Merges, instead of dropping",
    "storage": "By name", "selection": "By name",
}  # fmt: skip
ABOUT = {
    "policies": """\
# Policies

A policy says which slots of a cache stay. It ranks the slots of each KV head, and the cache evicts the lowest until the
head is within its budget. [](../../policies.md) says how to write one, [](../../budgets.md) what a budget is, and
[](../../combinations.md) which storages and selections each goes with. On the command line a policy is written as in
Python: `--config.policy.name='after_prefill(snapkv(window=16), then=roco)'`.
""",
    "storages": """\
# Storages

A storage says how a slot holds its key and its value. [](../../storages.md) compares them, says what runs on which
hardware and how to write one; [](../../combinations.md) says which policies and selections each goes with. Bytes are
those of a slot of one KV head, the key and the value of 128 channels, scales and other parameters included.
""",
    "selections": """\
# Selections

A selection says which of the slots that are held a decoding query reads. It frees no memory. [](../../selections.md)
says how to write one, and [](../../combinations.md) which policies and storages each goes with.
""",
}


def page_name(entry: Entry) -> str:
    """Returns the name of an entry's page, relative to the folder of generated pages."""
    return f"{entry.axis}/{entry.name}.md"


def overview(axis: str, entries: Sequence[Entry]) -> str:
    """Returns the page that lists the entries of an axis."""
    lines = [ABOUT[axis]]
    kinds = list(dict.fromkeys(entry.kind for entry in entries))
    for kind in kinds:
        own = [entry for entry in entries if entry.kind == kind]
        if len(kinds) > 1:
            lines += [f"## {TITLES[kind]}", ""]
        lines += _table(axis, own)
    names = "\n".join(entry.name for entry in entries)
    lines += ["```{toctree}", ":hidden:", "", names, "```", ""]
    return "\n".join(lines)


def _table(axis: str, entries: Sequence[Entry]) -> list[str]:
    if axis == "storages":
        lines = ["| storage | bytes of a slot, from 512 | what a slot holds | paper |", "|---|---|---|---|"]
        cells = [[str(bytes_of(entry, entry.example, "bfloat16"))] for entry in entries]
    else:
        lines = ["| name | what it does | paper |", "|---|---|---|"]
        cells = [[] for _ in entries]
    for entry, more in zip(entries, cells, strict=True):
        row = (f"[`{entry.name}`]({entry.name}.md)", *more, markdown(summary(entry.doc)), paper_links(papers_of(entry)))
        lines.append("| " + " | ".join(row) + " |")
    return [*lines, ""]


def papers_of(entry: Entry) -> list[str]:
    """Returns the papers that a factory names; if it names none, those that its module begins with."""
    module = sys.modules[inspect.unwrap(entry.factory).__module__]
    return papers(entry.doc) or papers((module.__doc__ or "").split("\n")[0])


def page(entry: Entry, root: Path, drawn: Drawn) -> str:
    """Returns the page of an entry.

    Args:
      entry: of a registry.
      root: the folder of the repository.
      drawn: the pictures, relative to the page.
    """
    facts = {"policies": policy_facts, "storages": storage_facts, "selections": selection_facts}[entry.axis]
    about = [entry.kind] + ([paper_links(papers_of(entry))] if papers_of(entry) else [])
    lines = [f"# {entry.name}", "", " · ".join(about), "", "## Definition", "", *definition(entry)]
    lines += facts(entry, root, drawn)
    lines += [*combine_page.section(entry), *peers.lines(entry.name)]
    return "\n".join(lines).rstrip() + "\n"


def definition(entry: Entry) -> list[str]:
    """Returns the lines that show the factory's docstring, and an example."""
    return [
        "```{eval-rst}", f".. autofunction:: {entry.full_name}", "   :no-index:", "```", "", "For example:", "",
        "```python", f"from kvjax import {entry.module.__name__.rpartition('.')[2]}", "",
        _python(entry), "```", "",
    ]  # fmt: skip


def _python(entry: Entry) -> str:
    """Returns the example as a user writes it, after an import of the package."""
    package = entry.module.__name__.rpartition(".")[2]
    text = survivors.example_of(entry) if entry.kind == "merge" else entry.example
    names = set(vars(entry.module))
    out, word = "", ""
    for letter in text + " ":
        if letter.isidentifier() or (word and letter.isalnum()):
            word += letter
            continue
        out += f"{package}.{word}" if word in names and letter == "(" else word
        out, word = out + letter, ""
    return out.rstrip()


def policy_facts(entry: Entry, root: Path, drawn: Drawn) -> list[str]:
    """Returns the parts of a policy's page that follow its definition."""
    return [*_parts(entry), *_kept(entry, drawn), *_costs(entry, root), *leaderboard.section(entry.name, root)]


def _parts(entry: Entry) -> list[str]:
    """Returns the lines that say which importance, scope and budget a policy is made of."""
    if entry.kind == "merge":
        return _class(entry, entry.build())
    made = entry.build()
    lines = []
    for role in ("importance", "scope", "merge", "budget"):
        part = getattr(made, role, None)
        name = type(part).__name__
        if part is not None and name in entry.module.__all__ and name not in ("Slots", "Unprotected"):
            doc = inspect.getdoc(type(part)) or ""
            lines.append(f"| {role} | {{py:obj}}`{name} <{entry.module.__name__}.{name}>` | {markdown(summary(doc))} |")
    return ["Made of:", "", "| | | |", "|---|---|---|", *lines, ""] if lines else []


def _class(entry: Entry, *made: object) -> list[str]:
    """Returns the lines that show the docstrings of public classes, each once."""
    lines = []
    for name in dict.fromkeys(type(each).__name__ for each in made):
        if name in entry.module.__all__:
            about = [f".. autoclass:: {entry.module.__name__}.{name}", "   :no-index:", "   :no-members:"]
            lines += ["```{eval-rst}", *about, "```", ""]
    return lines


def _kept(entry: Entry, drawn: Drawn) -> list[str]:
    """Returns the lines that show which tokens a policy keeps."""
    if entry.name not in drawn:
        return []
    spec = survivors.spec_of(entry)
    prompt = survivors.LONG_PROMPT if survivors.compresses(spec) else survivors.PROMPT
    about = f"Map of the tokens that each query of kvjax-tiny saw under {entry.name}, in KV head"
    return [
        "## What it keeps", "", *pictures.lines(drawn[entry.name], about),
        f"Both KV heads of layer {survivors.DRAWN} of kvjax-tiny under `{survivors.example_of(entry)}`, on a story of "
        f"{survivors.LENGTH} tokens, of which the first {prompt}, to the dashed line, are the prompt. A "
        "row is a query, a column is a token: dark where the query saw the token, light where it had been evicted"
        f"{' or, later, was not chosen again' if entry.name in ('lru', 'counter') else ''}.", "",
    ]  # fmt: skip


def _read(entry: Entry, drawn: Drawn) -> list[str]:
    """Returns the lines that show which slots each step reads under a selection."""
    if entry.name not in drawn:
        return []
    about = f"Map of the slots that each decoding step of kvjax-tiny reads under {entry.name}, in KV head"
    steps = survivors.LENGTH - survivors.LONG_PROMPT
    return [
        "## What it reads of a story", "", *pictures.lines(drawn[entry.name], about),
        f"Both KV heads of layer {survivors.DRAWN} of kvjax-tiny under `{reading.example_of(entry)}` and `full()`, in "
        f"{steps} decoding steps after a prompt of {survivors.LONG_PROMPT} tokens. A row is a step, a column a slot, "
        "in the order of the text: dark where the step reads the slot, light where the slot is kept and not read, "
        "blank where it is still empty.", "",
    ]  # fmt: skip


def _costs(entry: Entry, root: Path) -> list[str]:
    made = survivors.spec_of(entry)
    made = getattr(made, "policy", made)
    needs = by_name(made.needs)
    remembers = tuple(getattr(made, "remembers", ()))
    lines = ["## What it costs", "", "| | |", "|---|---|"]
    lines.append(f"| statistics of attention | {', '.join(f'`{each.name}`' for each in needs) or 'none'} |")
    if remembers:
        lines.append(f"| additional statistics | {', '.join(f'`{each}`' for each in remembers)} |")
    total = sum(_bytes(each) for each in needs) + 4 * len(remembers)
    lines.append(f"| bytes of a slot for these | {total}, besides 4 for its position |")
    reads = sorted(getattr(made, "reads", ()))
    lines.append(f"| ranking reads | {' and '.join(f'{each}s' for each in reads) or 'no keys and no values'} |")
    when = {"step": "at every step", "prompt_end": "once, when the prompt ends"}.get(getattr(made, "when", ""), "")
    evicts = when if made.budget is not None else ("nothing" if entry.name == "full" else "by its parts")
    lines.append(f"| evicts | {evicts or 'when the prompt ends, and then at every step'} |")
    time = _relative_times(root).get(_bench_name(entry))
    if time is not None:
        lines.append(
            f"| time of a decoding step, times that of h2o on the same 512 slots | {time:.2f} "
            "([measured](../../measured.md)) |"
        )
    return [*lines, ""]


def _bytes(statistic: Statistic) -> int:
    shape = jax.eval_shape(lambda: statistic.empty((1, 1, 1)))
    return int(shape.size * shape.dtype.itemsize)


def _bench_name(entry: Entry) -> str:
    named = {"value_norm": "value_norm(h2o)", "with_heavy_hitters": "with_heavy_hitters(window)"}
    return f"h2o(merge={entry.name})" if entry.kind == "merge" else named.get(entry.name, entry.name)


@functools.cache
def _relative_times(root: Path) -> dict[str, float]:
    found = json.loads((root / MEASURED / "epyc" / "policies.json").read_text())
    return {row["policy"]: row["times h2o"] for row in found["policies"]}


def bytes_of(entry: Entry, text: str, dtype: str) -> int:
    """Returns the bytes of a slot of one KV head with `DIM` channels."""
    count: int = entry.build(text).bytes_per_slot(DIM, dtype)
    return count


def storage_facts(entry: Entry, root: Path, drawn: Drawn) -> list[str]:
    """Returns the parts of a storage's page that follow its definition."""
    made = entry.build()
    dense = {"bfloat16": 4 * DIM, "float32": 8 * DIM}
    lines = [
        *_class(entry, made.key, made.value),
        "## What a slot takes", "",
        f"Bytes of one key and one value of {DIM} channels, for models in bfloat16 and in float32:", "",
        f"| storage | bfloat16, from {dense['bfloat16']} | float32, from {dense['float32']} | bits a number |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for text in (entry.example, *MORE.get(entry.name, ())):
        half, whole = (bytes_of(entry, text, dtype) for dtype in dense)
        lines.append(f"| `{text}` | {half} | {whole} | {8 * half / (2 * DIM):g} |")
    return [*lines, "", *_perplexity(entry, root)]


def _perplexity(entry: Entry, root: Path) -> list[str]:
    found = json.loads((root / MEASURED / "storages" / "smollm2.json").read_text())
    own = [row for row in found["storages"] if row["storage"].partition("(")[0] == entry.name]
    if not own or entry.name == "dense":
        return []
    lines = [
        "## What it costs in perplexity", "",
        f"{found['model']} in float32 under the full cache: perplexity of 128 tokens after 512 above exact slots', "
        "with 95 % intervals over 16 rows of two texts.", "",
        "| storage | perplexity |", "|---|---|",
    ]  # fmt: skip
    lines += [
        f"| `{row['storage']}` | {row['above']:+.1f} % ({row['low']:+.1f} to {row['high']:+.1f}) |" for row in own
    ]
    return [*lines, "", "[](../../storages.md) compares all that were measured.", ""]


def selection_facts(entry: Entry, root: Path, drawn: Drawn) -> list[str]:
    """Returns the parts of a selection's page that follow its definition."""
    made = entry.build()
    layout = _selecting(made)
    group = layout.decode[-1][0]
    width = group.selection.width(group.capacity)
    held = layout.bytes() / len(layout.decode)
    index = layout.index_bytes() / len(layout.decode)
    reads = "every slot" if made.reads_all else (f"at most {width:,}" if width else "a number that depends on the step")
    lines = [
        *_class(entry, made),
        "## What a step reads", "",
        f"Under `full()`, a layer with one KV head of {DIM} channels in bfloat16 and {SLOTS:,} slots, with "
        f"`{entry.example}`:", "",
        "| | |", "|---|---|",
        f"| slots that a query reads | {reads} |",
        f"| layers that read everything | {f'those before layer {made.first_layer}' if made.first_layer else 'none'} |",
        f"| index | {size(int(index))}, {100 * index / held:.1f} % of keys and values |",
        f"| ranking reads every key that is held | {'yes' if made.ranks_by_keys else 'no'} |",
        f"| slots are chosen | {f'{made.unit} at a time' if made.unit > 1 else 'one by one'} |",
        f"| chosen before the layer begins | {'yes: slots can be fetched meanwhile' if made.ahead else 'no'} |",
    ]  # fmt: skip
    return [*lines, "", *_read(entry, drawn), *leaderboard.section(entry.name, root)]


@functools.cache
def _selecting(made: Any) -> Any:
    """Returns the layout of a cache that keeps all of `SLOTS` tokens and reads what a selection chooses."""
    config = DecoderConfig(
        family="llama", vocab_size=64, hidden_size=DIM, num_layers=3, num_heads=1, num_kv_heads=1, head_dim=DIM,
        mlp_size=64, max_positions=2 * SLOTS, rope=Rope(dim=DIM),
    )  # fmt: skip
    lengths, limits = np.array([SLOTS - 64]), Limits(prompt=SLOTS - 64, new_tokens=65, shortest=SLOTS - 64)
    sizes = sizes_for(lengths, 64, width=SLOTS - 64, block=None, limits=limits, last_fed=True)
    return lower(CacheSpec(full(), selection=made), config, sizes, lengths, dtype="bfloat16").layout
