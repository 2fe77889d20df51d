"""Puts a font for equations beside the pages: without one, browsers set scripts and fractions badly.

It is STIX Two Math, which ziamath brings along, cut down to the characters that formulas use.
"""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from fontTools.subset import Options, Subsetter, load_font, save_font

_CHARACTERS = [
    *range(0x20, 0x7F),  # Latin
    *range(0xA0, 0x100),
    *range(0x391, 0x3D7),  # Greek
    *range(0x2010, 0x2060),  # dashes, primes
    *range(0x2190, 0x2300),  # arrows, operators
    *range(0x1D434, 0x1D468),  # letters and Greek in italics
    *range(0x1D6FC, 0x1D71C),
    0x210E,  # the italic h
]


def on_post_build(config: Any, **_: Any) -> None:
    options = Options(flavor="woff", layout_features=["*"], drop_tables=["DSIG"])
    with as_file(files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf") as path:
        font = load_font(path, options)
    subsetter = Subsetter(options)
    subsetter.populate(unicodes=_CHARACTERS)
    subsetter.subset(font)
    save_font(font, Path(config.site_dir) / "assets" / "math.woff", options)
