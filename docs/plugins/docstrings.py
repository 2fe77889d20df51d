"""Turns docstrings into Markdown for the reference: roles become links, doctests code blocks, and comments items."""

import re
from typing import Any

import griffe

_PACKAGE = "variable_batch_size"
_ROLE = re.compile(r":(?:class|meth|func|data|attr):`([^`]+)`")
_DOCTEST = re.compile(r"^( *)(>>> .*(?:\n\1(?! *$).*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring of the package as it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._rewrite(pkg, public=set(pkg.members))

    def _rewrite(self, thing: griffe.Object, public: set[str]) -> None:
        if thing.docstring is not None:
            text = _DOCTEST.sub(_as_block, thing.docstring.value)
            if "experimental" in [str(decorator.value) for decorator in getattr(thing, "decorators", ())]:
                text += '\n\n!!! warning "Experimental"\n    May change or be removed in any [version](../versions.md).'
            if thing.is_class and "NamedTuple" in map(str, thing.bases):
                text = text.replace("Args:\n", "Attributes:\n")  # griffe does not know that they are arguments, too
            if thing.is_class and not re.search("^(Args|Attributes):$", text, re.MULTILINE):
                text += _fields(thing)
            thing.docstring.value = _ROLE.sub(lambda found: _as_link(found[1], thing, public), text)
        for member in thing.members.values():
            if not member.is_alias:
                self._rewrite(member, public)


def _fields(thing: griffe.Object) -> str:
    """The comments next to the fields of a dataclass or named tuple, as the descriptions of its attributes."""
    if "dataclass" not in thing.labels and "NamedTuple" not in map(str, thing.bases):
        return ""
    lines = thing.lines_collection[thing.filepath]
    declared = {name: lines[field.endlineno - 1] for name, field in thing.members.items() if field.is_attribute}
    comments = {name: line.partition("  # ")[2] for name, line in declared.items()}
    items = [f"    {name}: {comment}." for name, comment in comments.items() if comment]
    return "\n\n" + "\n".join(["Attributes:", *items]) if items else ""


def _as_block(found: re.Match[str]) -> str:
    indent, lines = found.groups()
    return f"{indent}```pycon\n{indent}{lines}\n{indent}```"


def _as_link(name: str, thing: griffe.Object, public: set[str]) -> str:
    """A link to a public name or to a method of the class at hand; plain code for what the reference leaves out."""
    if name.split(".")[0] in public:
        return f"[`{name}`][{_PACKAGE}.{name}]"
    home = thing if thing.is_class else thing.parent
    if home is not None and home.is_class and name in home.members and home.name in public:
        return f"[`{name}`][{_PACKAGE}.{home.name}.{name}]"
    return f"`{name}`"
