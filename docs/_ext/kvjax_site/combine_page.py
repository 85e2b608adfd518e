"""Pages that say what combines: the matrices of docs/combinations.md, and a section of each entry's own page."""

import functools
import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvjax.cache import CacheSpec
from kvjax_site import combine
from kvjax_site.combine import PLAIN, Products
from kvjax_site.entries import Entry

YES, ONE_SHOT = "yes", "one shot"
CASES = {
    "h2o[masked]": 'h2o(variant="masked")', "h2o[global]": 'h2o(variant="global")',
    "h2o[local]": 'h2o(variant="local")', "h2o+cam": "h2o(merge=cam())", "h2o+d2o": "h2o(merge=d2o())",
    "h2o+kvmerger": "h2o(merge=kvmerger())", "h2o+anchors": "h2o(merge=anchors())",
    "h2o+lococo": "h2o(merge=lococo())",
    "h2o@cache": 'h2o(positions="cache")', "knorm@cache": 'knorm(positions="cache")',
    "int4+8": "int4(residual=...)", "host": 'dense(memory="host")', "with_heavy_hitters": "with_heavy_hitters(h2o)",
    "value_norm": "value_norm(roco)", "adakv": "adakv(pyramidkv)", "after_prefill": "after_prefill(snapkv, then=roco)",
    "from_layer": "from_layer(h2o)", "by_page": "by_page(h2o)", "split_heads": "split_heads(..., roco, tova)",
    "split_layers": "split_layers(roco, full(), ...)", "duo_attention": "duo_attention(...)",
    "razor_attention": "razor_attention(...)", "rotated": "rotated(int4)",
    "caote": "caote(h2o(every=2))", "critical": "critical(h2o(every=2))", "value_aware": "value_aware(snapkv)",
    "chunkkv": "chunkkv(snapkv)", "phases": "phases(full(), h2o)",
}  # fmt: skip
AXIS_NAMES = ("policies", "storages", "selections")


class Reasons:
    """Numbers of distinct reasons, in the order in which they are first named."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1

    def listed(self) -> str:
        """Returns the reasons as an ordered list, to which the cells lead."""
        items = (f'<li id="reason-{number}">{_sentence(text)}</li>' for number, text in enumerate(self.texts, 1))
        return '<ol class="reasons">\n' + "\n".join(items) + "\n</ol>"


def _sentence(text: str) -> str:
    plain = html.escape(text, quote=False).rstrip(".")
    return f"{plain[0].upper()}{plain[1:]}."


def _code(name: str) -> str:
    return f"<code>{html.escape(CASES.get(name, name), quote=False)}</code>"


def _names(names: Iterable[str]) -> str:
    return " ".join(_code(name) for name in names)


def cell(reason: str | None, reason_in_blocks: str | None, reasons: Reasons) -> str:
    """Returns a cell of a matrix: that it works, that it takes prompts in one shot, or the number of the reason."""
    if reason is not None:
        number = reasons.number(reason)
        return f'<td class="no"><a href="#reason-{number}" title="{html.escape(reason)}">{number}</a></td>'
    if reason_in_blocks is not None:
        number = reasons.number(reason_in_blocks)
        text = html.escape(reason_in_blocks)
        return f'<td class="part"><a href="#reason-{number}" title="{text}">one shot</a></td>'
    return '<td class="yes">✓</td>'


def matrix(found: Products, rows: int, columns: int, reasons: Reasons) -> str:
    """Returns two axes as a table of HTML; rows and columns that are alike are one.

    Args:
      found: what the products are.
      rows: number of the axis of the rows.
      columns: number of the axis of the columns.
      reasons: of the page.
    """
    across, down = found.axis(columns), found.axis(rows)

    @functools.cache
    def verdict(row: str, column: str) -> tuple[str | None, str | None]:
        reason = found.pair((rows, row), (columns, column))
        (third,) = {0, 1, 2} - {rows, columns}
        triple = [""] * 3
        triple[rows], triple[columns], triple[third] = row, column, PLAIN[third]
        one, two, three = triple
        return reason, found.blocks.get((one, two, three)) if reason is None else None

    groups = combine.alike(across, lambda column: tuple(verdict(row, column) for row in down))
    kinds = combine.alike(down, lambda row: tuple(verdict(row, names[0]) for names in groups.values()))
    head = "".join(f"<th>{_names(names)}</th>" for names in groups.values())
    lines = [f'<thead><tr><th class="corner">{AXIS_NAMES[rows]} × {AXIS_NAMES[columns]}</th>{head}</tr></thead>']
    lines.append("<tbody>")
    for names in kinds.values():
        cells = "".join(cell(*verdict(names[0], group[0]), reasons) for group in groups.values())
        lines.append(f"<tr><th>{_names(names)}</th>{cells}</tr>")
    return '<div class="matrix"><table>\n' + "\n".join([*lines, "</tbody>"]) + "\n</table></div>"


PREFIX = {"block": "in one block", "step": "token by token"}
BLOCKS = {"yes": "✓", "other": "✓, keeps others"}


def traits_table(number: int, reasons: Reasons) -> str:
    """Returns how the values of an axis go with prompts in blocks, saved states and meshes, as a table of HTML."""
    specs = _specs(number)
    rows = combine.alike(list(specs), lambda name: combine.traits(specs[name]))
    lines = [
        "<thead><tr><th></th><th>prompts in blocks</th><th>what follows a saved state is fed</th>"
        "<th>slots over devices</th></tr></thead>",
        "<tbody>",
    ]
    for found, names in rows.items():
        blocks = BLOCKS.get(found.blocks)
        prefix = PREFIX.get(found.prefix)
        mesh = {None: "✓", "XLA": "by XLA"}.get(found.mesh)
        cells = (
            _trait(blocks, found.blocks, reasons), _trait(prefix, found.prefix, reasons),
            _trait(mesh, found.mesh or "", reasons),
        )  # fmt: skip
        lines.append(f"<tr><th>{_names(names)}</th>{''.join(cells)}</tr>")
    return '<div class="matrix"><table>\n' + "\n".join([*lines, "</tbody>"]) + "\n</table></div>"


def _trait(text: str | None, reason: str, reasons: Reasons) -> str:
    if text is None:
        return cell(reason, None, reasons)
    return f'<td class="{"yes" if text.startswith("✓") else "part"}">{text}</td>'


def _specs(number: int) -> dict[str, Callable[[], CacheSpec]]:
    """Returns a cache for each value of an axis, with the plain values of the others that it goes with."""
    policies, held, read = combine.policy_rows(), combine.storage_rows(), combine.selection_rows()
    found = combine.products()
    made: dict[str, Callable[[], CacheSpec]] = {}
    for name in found.axis(number):
        policy = next(
            each
            for each in ("full", "h2o", *policies)
            if number == 0 or found.one_shot[_with(number, name, each)] is None
        )
        given: list[Any] = [policies[policy], held[PLAIN[1]], read[PLAIN[2]]]
        given[number] = (policies, held, read)[number][name]
        made[name] = functools.partial(CacheSpec, *given)
    return made


def _with(number: int, name: str, policy: str) -> combine.Triple:
    return (policy, name, PLAIN[2]) if number == 1 else (policy, PLAIN[1], name)


def combinations() -> str:
    """Returns the generated part of docs/combinations.md."""
    found, reasons = combine.products(), Reasons()
    works = sum(reason is None for reason in found.one_shot.values())
    exceptions = found.exceptions()
    tables = {
        "Policies and storages": matrix(found, 0, 1, reasons),
        "Policies and selections": matrix(found, 0, 2, reasons),
        "Storages and selections": matrix(found, 1, 2, reasons),
    }
    parts = [
        f"All {len(found.one_shot):,} products of {len(found.axis(0))} policies, {len(found.axis(1))} storages and "
        f"{len(found.axis(2))} selections were lowered when this page was built: {works:,} work, and "
        f"{len(found.one_shot) - works:,} are refused. **A product works if all three pairs of its values do**, "
        f"which the three tables say{', with these exceptions:' if exceptions else '.'}",
        *(
            f"- `{CASES.get(one, one)}`, `{CASES.get(two, two)}` and `{CASES.get(three, three)}`: {reason}"
            for (one, two, three), reason in exceptions.items()
        ),
    ]
    for title, table in tables.items():
        parts += [f"## {title}", table]
    parts += ["## Blocks, saved states and meshes", TRAITS]
    for number, noun in enumerate(("policy", "storage", "selection")):
        parts += [f"### By {noun}", traits_table(number, reasons)]
    parts += ["## Reasons", "The numbers are those of the tables.", reasons.listed()]
    return "\n\n".join(parts) + "\n"


TRAITS = """\
*Prompts in blocks* are fed with `prefill_block=m`. A policy that evicts at every step then evicts after each block, and
keeps others than it would of a prompt in one shot. A *saved state* is the cache after a context
(`kvjax.serve.Runner.prefix`, [](../generation.md)); the tokens that continue it go in as one block where that changes
nothing but rounding, or else one by one. *Slots over devices* are those of one head, divided over an axis of a
[mesh](../meshes.md) that does not divide the heads; where kvjax does not divide them, each device holds all of them,
and the cache works nevertheless. Rows and heads are divided in any case."""


def section(entry: Entry) -> list[str]:
    """Returns the lines of an entry's page that say what it goes with."""
    number = AXIS_NAMES.index(entry.axis)
    found, name = combine.products(), entry.name
    lines = ["## What it combines with", ""]
    if entry.kind == "merge":
        name = f"h2o+{name}"
    for other in sorted({0, 1, 2} - {number}):
        lines += _against(found, number, name, other)
    return [*lines, "[What combines](../../combinations.md) has all of it, for prompts in blocks and meshes too.", ""]


def _against(found: Products, number: int, name: str, other: int) -> list[str]:
    refused: dict[str, list[str]] = {}
    works: list[str] = []
    for each in found.axis(other):
        reason = found.pair((number, name), (other, each))
        if reason is None:
            works.append(each)
        else:
            refused.setdefault(reason, []).append(each)
    title = AXIS_NAMES[other].capitalize()
    if not refused:
        return [f"**{title}**: all.", ""]
    lines = [f"**{title}**: {_listed(works) if works else 'none'}. Refused:", ""]
    lines += [f"- {_listed(names)}: {reason}" for reason, names in refused.items()]
    return [*lines, ""]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{CASES.get(name, name)}`" for name in names)
