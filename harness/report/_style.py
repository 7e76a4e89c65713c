"""Colours, sizes and settings of the figures: fixed, so that bytes are reproducible."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart under the common kinds of colour blindness.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE = "#666666", "#BBBBBB"

CONTENDERS = {
    "reference": (GREY, (0, (4, 2))),
    "cold": (BLACK, "-"),
    "nvrx": (ORANGE, "-"),
    "torchft_pg": (BLUE, "-"),
    "accelpact": (VERMILION, "-"),
    "comm_only": (PURPLE, (0, (1, 1))),
}
"""Contender -> colour and line style, the same in every figure of every report."""

_OTHERS = ((GREEN, "-."), (SKY, "-."), (PURPLE, "-."), (BLACK, "-."), (BLUE, "--"), (ORANGE, "--"))

PHASES = {
    "detection": PALE,
    "repair in place": VERMILION,
    "restart": BLACK,
    "restore": BLUE,
    "replay": ORANGE,
    "not named": "#FFFFFF",
    "guard": BLACK,
    "admit": SKY,
    "retire": BLUE,
    "rebuild": GREEN,
    "rebind": YELLOW,
    "validate": ORANGE,
    "release": PURPLE,
}
_OTHER_PHASES = (PURPLE, GREEN, SKY, YELLOW)

SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "accelpact",
    "svg.fonttype": "path",
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "hatch.linewidth": 0.6,
}


@contextlib.contextmanager
def fixed() -> Iterator[None]:
    """Draw with these settings whatever the reader's own matplotlib settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        for name, value in SETTINGS.items():
            mpl.rcParams[name] = value
        yield


def new_figure(*, width: float, height: float) -> Figure:
    """Make a figure of a fixed size in inches, without any window system."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasSVG(figure)
    return figure


def svg(figure: Figure) -> bytes:
    """Write the figure as SVG without a date, creator or other metadata."""
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    return buffer.getvalue()


def contender_style(name: str, names: Sequence[str]) -> tuple[str, object]:
    """Colour and line style of a contender; unknown ones take theirs in order of name."""
    if name in CONTENDERS:
        return CONTENDERS[name]
    unknown = sorted(each for each in names if each not in CONTENDERS)
    return _OTHERS[unknown.index(name) % len(_OTHERS)]


def phase_colour(name: str, names: Sequence[str]) -> str:
    """Colour of a phase; unknown ones take theirs in order of name."""
    if name in PHASES:
        return PHASES[name]
    unknown = sorted(each for each in names if each not in PHASES)
    return _OTHER_PHASES[unknown.index(name) % len(_OTHER_PHASES)]


def empty(axes: Axes, text: str) -> None:
    """Say inside the axes that there is nothing to draw."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
