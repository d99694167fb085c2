"""How every figure looks and how it is written: colours, fonts, SVG for the page, PNG beside it."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dp_core.report.model import Kind

# Okabe and Ito's palette: told apart with any kind of colour vision; markers differ as well.
COLOURS: dict[Kind, str] = {"public": "#6b6b6b", "dp": "#0072b2", "nonprivate": "#d55e00"}
MARKERS: dict[Kind, str] = {"public": "s", "dp": "o", "nonprivate": "^"}
EPSILON_RED, SCORE_BLUE, PALE, INK = "#c1272d", "#0072b2", "#e8e8e4", "#1f2933"
WIDTH = 9.6  # inches, the width of the page's column

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#eceff1",
    "axes.axisbelow": True,
    "lines.linewidth": 2.0,
    "lines.markersize": 6.5,
    "svg.fonttype": "none",  # text stays text: searchable, and read aloud
    "svg.hashsalt": "confide",  # the same figure is the same bytes
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Drawing:
    """A figure as it is shown and kept."""

    key: str  # also its file name
    title: str
    caption: str  # says what is seen, so that it can stand for the figure
    svg: str  # a file of its own
    png: bytes

    @property
    def inline_svg(self) -> str:
        """The SVG as it stands within an HTML page: no prologue, no namespaces, ids of its own.

        HTML parsers know SVG without namespaces; two figures on a page must not share ids.
        """
        body = self.svg[self.svg.index("<svg") :]
        body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body).replace("xlink:href", "href")
        body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
        body = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{self.key}-", body)
        return re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", body, count=1)


def canvas(panels: int, columns: int, row_height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of the page's width with that many panels, row by row."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, row_height * rows), layout="constrained")
        return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def twin(axes: Axes) -> Axes:
    """Return a second y axis on the right, in the figures' style and without a grid of its own."""
    with matplotlib.rc_context(_STYLE):
        other = axes.twinx()
    other.grid(visible=False)
    other.spines["right"].set_visible(True)
    return other


def finish(figure: Figure, key: str, title: str, caption: str) -> Drawing:
    """Write the figure as SVG and PNG."""
    with matplotlib.rc_context(_STYLE):
        vector, pixels = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", metadata=_NO_METADATA)
        figure.set_layout_engine("none")  # laid out once: both forms are the same picture
        figure.savefig(pixels, format="png", dpi=160)
    return Drawing(key, title, caption, vector.getvalue(), pixels.getvalue())
