"""FQN globs: `*` stays inside one segment of a module's name, `**` crosses segments."""

from __future__ import annotations

import re

from .errors import SelectionError

# One piece of a segment: a wildcard, a character class (a leading "]" belongs to it), or plain text.
_PIECE = re.compile(r"(?P<wild>[*?])|\[(?P<negated>!?)(?P<members>\]?[^\]]*)\]|(?P<text>[^*?\[\]]+)")
_RANGE = re.compile(r"(.)-(.)|(.)", re.DOTALL)

# Any segments, each with its dot, or none; and at the end of a glob one segment at least, because
# "layers.**" is what is below `layers` and not `layers` itself.
_SEGMENTS_BEFORE = r"(?:[^.]+\.)*"
_SEGMENTS_BELOW = r"[^.]+(?:\.[^.]+)*"


def is_literal(glob: str) -> bool:
    """Tell whether a glob has no wildcard, so that it is the name of one module."""
    return not any(character in glob for character in "*?[")


def compile_glob(glob: str) -> re.Pattern[str]:
    """Turn an FQN glob into a pattern whose `fullmatch` decides whether an FQN matches.

    `*` stands for any characters inside one segment, `?` for one, `[abc]`, `[a-z]` and `[!abc]` for one of
    a class; none of them stands for a dot. `**`, alone between dots, stands for any number of segments, none
    included; at the end of a glob, where it says "below", for one or more. No glob matches the model
    itself, whose FQN is empty.

    Raises:
        SelectionError: the glob is empty or not a string, a segment is empty, `**` is not alone in its
            segment, or a bracket is not closed.
    """
    if not isinstance(glob, str):
        raise SelectionError(f"an FQN glob is a str or an re.Pattern, not {glob!r} ({type(glob).__name__})")
    if not glob:
        raise _bad(glob, "it is empty; the model itself is what is selected when no selector is given")
    *above, last = glob.split(".")
    parts = [_SEGMENTS_BEFORE if segment == "**" else _segment(segment, glob) + r"\." for segment in above]
    # Neighbouring "**" mean what one means, and would only cost the matcher time.
    parts = [part for i, part in enumerate(parts) if part != _SEGMENTS_BEFORE or parts[i - 1 : i] != [part]]
    parts.append(_SEGMENTS_BELOW if last == "**" else _segment(last, glob))
    return re.compile("(?s:(?=.))" + "".join(parts))


def _segment(segment: str, glob: str) -> str:
    if not segment:
        raise _bad(glob, "it has an empty segment (a dot at an end, or two in a row)")
    if "**" in segment:
        raise _bad(glob, "'**' stands alone between dots, as in '**.mlp'; inside a segment use '*'")
    parts: list[str] = []
    position = 0
    while position < len(segment):
        piece = _PIECE.match(segment, position)
        if piece is None:
            raise _bad(
                glob,
                "a '[' or ']' has no partner (classes stay inside one segment; '[[]' is a bracket itself)",
            )
        parts.append(_translate(piece, glob))
        position = piece.end()
    return "".join(parts)


def _translate(piece: re.Match[str], glob: str) -> str:
    if piece["text"]:
        return re.escape(piece["text"])
    if piece["wild"]:
        return "[^.]*" if piece["wild"] == "*" else "[^.]"
    if not piece["members"]:
        raise _bad(glob, "a character class is empty")
    members = ""
    for low, high, single in _RANGE.findall(piece["members"]):
        if low > high:
            raise _bad(glob, f"the range {low}-{high} runs backwards")
        members += re.escape(single) if single else f"{re.escape(low)}-{re.escape(high)}"
    # The lookahead keeps a range that spans the dot, and a negated class, inside the segment.
    return rf"(?!\.)[{'^' if piece['negated'] else ''}{members}]"


def _bad(glob: str, why: str) -> SelectionError:
    return SelectionError(f"bad FQN glob {glob!r}: {why}")
