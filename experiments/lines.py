"""Lines of files: a line feed ends a line, and nothing else does.

JSON leaves U+2028, U+2029 and U+0085 in strings as they are, and allows a carriage return between its values;
`str.splitlines` and text files in the mode of universal newlines would end a line there.
"""

from typing import AnyStr

JSON_SPACE = " \t\n\r"  # white space of JSON (RFC 8259, section 2)


def divided(content: AnyStr) -> list[AnyStr]:
    """Returns the lines of a file's content, without their line feeds."""
    end, empty = ("\n", "") if isinstance(content, str) else (b"\n", b"")
    found: list[AnyStr] = content.split(end)
    return found[:-1] if found[-1] == empty else found


def numbered(content: AnyStr) -> list[tuple[int, AnyStr]]:
    """Returns the lines that hold more than white space of JSON, with their numbers from 1."""
    space = JSON_SPACE if isinstance(content, str) else JSON_SPACE.encode()
    return [(number, line) for number, line in enumerate(divided(content), 1) if line.strip(space)]
