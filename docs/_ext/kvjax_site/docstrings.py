"""Parts of docstrings, and Markdown of them."""

import re


def summary(doc: str) -> str:
    """Returns the first paragraph of a docstring in one line."""
    return " ".join(doc.strip().split("\n\n")[0].split())


def markdown(text: str) -> str:
    """Returns a line of a docstring as Markdown: literals of two backticks are those of one."""
    return escaped(text.replace("``", "`"))


def escaped(text: str) -> str:
    """Escapes what a table or HTML would take for its own, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = [re.sub(r"([*_|<>\[\]])", r"\\\1", each) for each in parts[::2]]
    code = [each.replace("|", "\\|") for each in parts[1::2]]
    return "".join(each for pair in zip(plain, [*code, ""], strict=True) for each in pair)


def papers(doc: str) -> list[str]:
    """Returns the numbers of arXiv that a docstring names, each once."""
    lists = re.findall(r"arXiv:(\d{4}\.\d{4,5}(?:, \d{4}\.\d{4,5})*)", doc)
    return list(dict.fromkeys(number for found in lists for number in found.split(", ")))


def paper_links(numbers: list[str]) -> str:
    """Returns Markdown links to papers of arXiv."""
    return ", ".join(f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in numbers)


#: A literal, a role, or emphasis of whole words, none of which is escaped.
_KEPT = re.compile(r"``.+?``|`[^`]*`|(?<![\w*])\*\w[\w ]*\*(?![\w*])", re.DOTALL)


def literal(text: str, names: set[str]) -> str:
    """Makes literals of some names in backticks, which otherwise are links to what has such a name."""
    return re.sub(r"(?<!`)`(\w+)`(?!`)", lambda found: f"``{found[1]}``" if found[1] in names else found[0], text)


def without_accidents(doc: str) -> str:
    """Escapes what is text and would be read as structure: a result with a colon as a type, "S." as a numbered list."""
    doc = re.sub(r"^( *(?:\*{0,2}\w+: )?[A-Za-z])\.(?=\s|$)", r"\1\.", doc, flags=re.MULTILINE)
    # An empty line of text comes first, in which napoleon looks for the colon.
    return re.sub(r"^(Returns|Yields):\n( +)(?=\S)", r"\1:\n\2\\ \n\2", doc, flags=re.MULTILINE)


def escaped_rst(text: str) -> str:
    """Escapes asterisks and bars, which formulas and shapes have, for reStructuredText."""
    parts, end = [], 0
    for found in _KEPT.finditer(text):
        parts += [re.sub(r"([*|])", r"\\\1", text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, re.sub(r"([*|])", r"\\\1", text[end:])])
