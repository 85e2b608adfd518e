"""The page of capacities: a table of caches for each result of experiments.capacity in a folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from experiments import results
from kvjax.typing import Json
from kvjax.units import size

PAGE = "README.md"
INTRODUCTION = """\
The largest batch that fits into every device with five caches, prompts included, and what its tokens would cost. No
device was here.

Bytes are those of one device. "Needs" is what prompts or decoding take, whichever is more, and which of both; tokens a
second are an upper bound, of the whole mesh while it decodes, as if memory, arithmetic, host link and interconnect were
busy at the same time, and "limit" is the slowest of them. Dollars are for a million new tokens at that speed, at the
price above each table. Every row of a table is a result of the command above it, which `--config.baselines` and
`--config.policy.name` cut down to one."""
COMPILED = """\
TPUs: their own compiler compiled programs of three and of four layers, and prompts through all layers for batches that
are slightly too large, of which it says how much memory they need. Batches were searched to within 2 %; "fits" in the
column "compiled whole" means that prompts through all layers were compiled for the very batch."""
SHAPES = """\
GPUs have no compiler here: their rows are from shapes alone, without scratch memory and without what GPUs exchange, and
their batches are upper bounds (marked by "at most")."""


def write(folder: Path) -> Path:
    """Writes the page of the results in a folder.

    Returns:
      The page.
    """
    results.write(folder / PAGE, page(folder))
    return folder / PAGE


def page(folder: Path) -> str:
    """Returns the page of the results in a folder, by model and devices."""
    found = [each for path in sorted(folder.glob("*.json")) if (each := results.read_json(path))]
    found.sort(key=lambda each: (each["caches"][0]["weights"] * _count(each["caches"][0]), each["topology"] or ""))
    versions = sorted({_versions(each["environment"]) for each in found})
    shapes = {each["caches"][0]["binds"] == "shapes" for each in found}
    head = [
        "# Capacities",
        INTRODUCTION,
        *([COMPILED] if False in shapes else []),
        *([SHAPES] if True in shapes else []),
    ]
    head += [f"With {'; '.join(versions)}."]
    return "\n\n".join([*head, *(section(each) for each in found)]) + "\n"


def section(result: Mapping[str, Json]) -> str:
    """Returns the part of the page that is about one result."""
    caches = result["caches"]
    first = caches[0]
    held = f"{result['dtype']}, weights {result['weights']}" if result["weights"] else result["dtype"]
    block = f" in blocks of {result['prefill_block']}" if result["prefill_block"] else ""
    about = (
        f"{result['prompt_length']}{block} + {result['new_tokens']} tokens, {held}; {_count(first)} devices of "
        f"{size(first['memory'])}, weights {size(first['weights'])} on each. {price_line(result['price'])}"
    )
    programs = sum(each["programs"] for each in caches)
    cost = f" {programs} programs, {result['cpu_seconds'] / 60:.1f} CPU minutes." if programs else ""
    table = tabulate(rows(caches), headers="keys", tablefmt="github", disable_numparse=True)
    refused = [f"Not planned: {name}: {reason}" for name, reason in result["refused"].items()]
    title = f"## {result['model']} on {first['target']}"
    return "\n\n".join([title, about + cost, f"    {result['command']}", table, *refused])


def rows(caches: Sequence[Mapping[str, Json]]) -> list[dict[str, str]]:
    """Returns a row for each cache. Columns in which no row has anything are left out."""
    most = max((each["batch"] for each in caches if each["policy"] == "full"), default=0)
    made = [_row(each, most) for each in caches]
    return [{name: text for name, text in row.items() if any(other[name] for other in made)} for row in made]


def price_line(price: Mapping[str, Json] | None) -> str:
    """Says which price was taken, of which day and from where."""
    if price is None:
        return "No price: --price gives one."
    amount = f"{price['amount']:.2f} {price['currency']} for an hour of a chip"
    if "date" not in price:
        return f"{amount}, by {price['source']}."
    return f"{amount} on demand, {price['provider']}, region {price['region']}, {price['date']} ({price['source']})."


def _row(each: Mapping[str, Json], most: int) -> dict[str, str]:
    seconds, shapes = each["seconds"], each["binds"] == "shapes"
    step, dollars, tokens = each["step_seconds"], each["dollars_per_million"], each["tokens_per_second"]
    return {
        "cache": each["policy"],
        "mesh": ",".join(f"{name}:{count}" for name, count in each["mesh"].items() if count > 1),
        "largest batch": f"{'at most ' * shapes}{each['batch']:,}",
        "of full": f"{each['batch'] / most:.2f}" if most else "",
        "cache bytes": size(each["cache"]),
        "needs": "" if shapes else f"{size(max(each['decode'], each['prefill']))}, {each['binds']}",
        "compiled whole": "fits" if each.get("verified") else "",
        "collectives": _exchanged(each["collectives"], seconds.get("collectives")),
        "of merges": _exchanged(each["merging"], None),
        "from host": _in_time(each["link"], seconds.get("host link")),
        "experts read": f"{each['experts_read']:.3g} of {each['experts']}" if each["experts"] else "",
        "ms of a step": "" if step is None else f"{1e3 * step:.3g}",
        "tokens/s at most": "" if tokens is None else f"{tokens:,.0f}",
        "limit": each["limit"] or "",
        "$ per million": "" if dollars is None else f"{dollars:.3g}",
    }


def _exchanged(asked: Mapping[str, float] | None, seconds: float | None) -> str:
    """Formats collectives: their number, bytes and time."""
    return f"{asked['number']:.0f}, {_in_time(asked['moved'], seconds)}" if asked and asked["number"] else ""


def _in_time(moved: float, seconds: float | None) -> str:
    """Formats bytes, and how long they take if that is known."""
    if not moved:
        return ""
    return f"{size(moved)}, {1e3 * seconds:.3g} ms" if seconds else size(moved)


def _count(cache: Mapping[str, Json]) -> int:
    """Returns the number of devices."""
    count = 1
    for size_of_axis in cache["mesh"].values():
        count *= size_of_axis
    return count


def _versions(environment: Mapping[str, Json]) -> str:
    compiler = f", libtpu {environment['libtpu']}" if environment["libtpu"] else ""
    return f"jax {environment['jax']}{compiler}, commit {environment['commit']}"
