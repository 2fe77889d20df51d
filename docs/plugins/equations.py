"""Turns the LaTeX of a page into MathML when the site is built: browsers draw that by themselves, without a script."""

import html
import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    content = _DISPLAY.sub(lambda found: f'<div class="equation">{_mathml(found[1], "block")}</div>', content)
    return _INLINE.sub(lambda found: _mathml(found[1], "inline"), content)


def _mathml(latex: str, display: str) -> str:
    mathml = convert(html.unescape(latex.strip()), display=display)
    mathml = re.sub(
        r"<mo>(\w+)</mo>", r"<mi>\1</mi>", mathml
    )  # max and min are names: an operator has blanks around it
    ElementTree.fromstring(mathml)  # what latex2mathml does not know, such as `aligned`, comes out broken
    return mathml
