"""Parses a text from anywhere as one Python expression, in linear time, without running anything.

What Python's parser refuses by other errors than `SyntaxError`, what is nested so deeply that code which walks it would
exceed Python's stack, and numbers so large that Python does not print them are refused here, once.
"""

import ast
import re

MAX_DEPTH = 64  # of nodes in nodes
MAX_NODES = 100_000
MAX_BITS = 64  # of a whole number
SHOWN = 200  # characters of a text in a message
#: Texts with fields, which Python's parser takes quadratic time for; none of them has a meaning here.
_FORMATTED = re.compile(r"(?<!\w)(?:[fFtT][rR]?|[rR][fFtT])['\"]")


def parse(text: str) -> ast.expr:
    """Parses an expression.

    Raises:
      ValueError: it is none; it is nested more than `MAX_DEPTH` deep or has more than `MAX_NODES` nodes; or it has a
        constant that is not a text, None, True, False, a real number or a whole number of up to `MAX_BITS` bits. The
        message says why, as the end of a sentence.
    """
    if _FORMATTED.search(text):
        raise ValueError("contains a string with a prefix")
    try:
        body = ast.parse(text, mode="eval").body
    except RecursionError:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep") from None
    except MemoryError:  # of the parser's own stack
        raise ValueError("is nested too deeply or too large to be parsed") from None
    except (SyntaxError, ValueError):  # a NUL, half a pair of surrogates, a number of thousands of digits
        raise ValueError("is not an expression") from None
    # Not by recursion, and a node at a time.
    waiting: list[tuple[ast.AST, int]] = [(body, 1)]
    count = 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if count > MAX_NODES:
            raise ValueError(f"has more than {MAX_NODES:,} parts")
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested more than {MAX_DEPTH} deep")
        if isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, int) and value.bit_length() > MAX_BITS:
                raise ValueError(f"contains an integer of more than {MAX_BITS} bits")
            if not isinstance(value, int | float | str | None):
                raise ValueError(f"contains a constant of type {type(value).__name__}")
        waiting.extend((each, depth + 1) for each in ast.iter_child_nodes(node))
    return body


def short(text: str) -> str:
    """Returns a text for a message, in quotes, its middle left out if it is long."""
    half = SHOWN // 2
    return repr(text if len(text) <= SHOWN else f"{text[:half]} ... {text[-half:]}")
