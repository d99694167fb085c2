"""Draw the diagram of rooms and their imports in docs/architecture.md, from the source code.

    .venv/task/bin/python scripts/architecture.py

A room is a package or module two levels deep. Arrows that a path of other arrows implies are
omitted. All imports of `dp_core` by `tasks` form one arrow. GitHub draws the diagram; for the site,
`svg` does.
"""

import itertools
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
HOUSES = ("dags", "tasks", "dp_core")
FOR_ALL = {"dp_core.errors", "dp_core.labels"}  # any room may import these
ROW, WIDTH, HEIGHT, GAP = 46, 112, 24, 44  # pixels: rows, boxes, and the space between houses
START, END = "<!-- drawn by scripts/architecture.py -->\n", "<!-- end -->\n"

Arrow = tuple[str, str]


def measured() -> set[Arrow]:
    """Return the imports between rooms, with one arrow for all imports of `dp_core` by `tasks`."""
    import grimp  # the environment of the docs only draws

    graph = grimp.build_graph(*HOUSES)
    arrows = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            here, there = ".".join(module.split(".")[:2]), ".".join(imported.split(".")[:2])
            if house(here) == "tasks" and house(there) == "dp_core":
                here, there = "tasks", "dp_core"
            if here != there and there not in FOR_ALL | set(HOUSES[:2]):
                arrows.add((here, there))
    return arrows


def house(room: str) -> str:
    """Return the top-level package of a room."""
    return room.partition(".")[0]


def title(room: str) -> str:
    """Return the name of a room without its package; of a whole package, its name."""
    return room.rpartition(".")[2]


def reached(arrows: set[Arrow], start: str) -> set[str]:
    """Return the rooms that a path of arrows from `start` reaches."""
    rooms, fresh = set(), {start}
    while fresh:
        fresh = {there for here, there in arrows if here in fresh} - rooms
        rooms |= fresh
    return rooms


def reduced(arrows: set[Arrow]) -> set[Arrow]:
    """Remove, one after another, the arrows that a path of the remaining arrows implies."""
    left = set(arrows)
    for here, there in sorted(arrows):
        if there in reached(left - {(here, there)}, here):
            left.discard((here, there))
    return left


def mermaid(arrows: set[Arrow]) -> str:
    """Return the diagram as a Mermaid flowchart. No two rooms have one name."""
    lines = ["```mermaid", "flowchart TB"]
    for top in HOUSES:
        rooms = sorted({room for arrow in arrows for room in arrow if room.startswith(f"{top}.")})
        lines += [f"  subgraph {top}"]
        lines += [f"    {title(room)}" for room in rooms] + ["  end"]
    lines += [f"  {title(here)} --> {title(there)}" for here, there in sorted(arrows)]
    return "\n".join([*lines, "```", ""])


def drawn_into(page: str, picture: str) -> str:
    """Return the page with its diagram replaced by `picture`."""
    pattern = re.compile(f"(?<={re.escape(START)}).*(?={re.escape(END)})", re.S)
    return pattern.sub(lambda _: picture, page)


def svg(diagram: str) -> str:
    """Return the diagram as an SVG in the colours of the page that contains it.

    A house is a frame, and a room is in the row above the lowest room that it imports. An arrow
    that passes other rows has a place in each of them.
    """
    rooms_of = {
        name: inside.split()
        for name, inside in re.findall(r"^  subgraph (\S+)$(.*?)^  end$", diagram, re.M | re.S)
    }
    house_of = {room: name for name, rooms in rooms_of.items() for room in (name, *rooms)}
    arrows = set(re.findall(r"^ +(\S+) --> (\S+)$", diagram, re.M))
    parts, frames, places, top, widest = [], {}, {}, 8, 0
    for name, rooms in rooms_of.items():
        inside = {(here, there) for here, there in arrows if {here, there} <= set(rooms)}
        rows, paths = _rows(rooms, inside)
        for number, row in enumerate(rows):
            for place, room in enumerate(row):
                places[room] = (place - (len(row) - 1) / 2) * (WIDTH + 16), top + 34 + number * ROW
            widest = max(widest, len(row) * (WIDTH + 16))
        frames[name] = (top, len(rows) * ROW + 26)
        top += frames[name][1] + GAP
        parts += [_line([places[room] for room in path]) for path in paths]
    left = -widest / 2 - 12
    for lane, (here, there) in enumerate(
        sorted(a for a in arrows if len({*map(house_of.get, a)}) > 1)
    ):
        if here == "tasks":
            y, height = frames[here]
            parts.append(_line([(0, y + height - 26), (0, frames[there][0] - 2)]))
            continue
        (x, y), (to, below) = places[here], places[there]
        edge, start = left - 14 - 12 * lane, x - WIDTH / 2
        parts.append(
            f'<path d="M{start},{y + 12}H{edge}V{below + 31}H{to}V{below + HEIGHT + 2}" {_STROKE}/>'
        )
    for name, (y, height) in frames.items():
        box = f'x="{left}" y="{y}" width="{-2 * left}" height="{height}"'
        parts.append(f'<rect {box} rx="6" fill="none" stroke="currentColor" opacity=".35"/>')
        parts.append(f'<text x="{left + 8}" y="{y + 17}" font-weight="bold">{name}</text>')
    for room in sorted(house_of.keys() - rooms_of.keys()):
        x, y = places[room]
        box = f'x="{x - WIDTH / 2}" y="{y}" width="{WIDTH}" height="{HEIGHT}"'
        parts.append(f'<rect {box} rx="4" class="room" stroke="currentColor"/>')
        parts.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{room}</text>')
    edge = left - 44
    view = f'viewBox="{edge} 0 {-left - edge + 8} {top - GAP + 8}"'
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8z" fill="currentColor"/></marker>'
        "</defs>"
    )
    words = 'role="img" aria-label="Rooms and their imports" class="rooms"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view} {words}>{head}{"".join(parts)}</svg>'


_STROKE = 'fill="none" stroke="currentColor" opacity=".7" marker-end="url(#head)"'


def _rows(rooms: list[str], arrows: set[Arrow]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of a house from the top, and each arrow as a path of places in them."""
    height: dict[str, int] = {}
    while len(height) < len(rooms):
        for room in set(rooms) - height.keys():
            below = [there for here, there in arrows if here == room]
            if all(there in height for there in below):
                height[room] = 1 + max((height[there] for there in below), default=-1)
    rows: list[list[str]] = [[] for _ in range(1 + max(height.values()))]
    for room in sorted(rooms):
        rows[max(height.values()) - height[room]].append(room)
    paths = []
    for here, there in sorted(arrows):
        passed = range(height[here] - 1, height[there], -1)
        path = [here, *(f"{here} {there} {level}" for level in passed), there]
        for level, place in zip(passed, path[1:-1], strict=True):
            rows[max(height.values()) - level].append(place)
        paths.append(path)
    links = {pair for path in paths for pair in itertools.pairwise(path)}
    for _ in range(8):  # move each place towards the places that it is linked to
        for row in (*rows, *reversed(rows)):
            middles = {}
            for one in rows:
                middles |= {place: n - (len(one) - 1) / 2 for n, place in enumerate(one)}
            ends = {
                place: [middles[b if a == place else a] for a, b in links if place in (a, b)]
                for place in row
            }
            row.sort(key=lambda p: (sum(ends[p]) / len(ends[p]) if ends[p] else middles[p], p))
    return rows, paths


def _line(points: list[tuple[float, float]]) -> str:
    """Return a smooth line from the lower edge of the first box to the upper edge of the last."""
    (x, y), *later = points
    y += HEIGHT
    words = f"M{x},{y}"
    for number, (to, below) in enumerate(later, 1):
        end = below - 2 if number == len(later) else below + HEIGHT / 2
        middle = (y + end) / 2
        words += f"C{x},{middle} {to},{middle} {to},{end}"
        x, y = to, end
    return f'<path d="{words}" {_STROKE}/>'


if __name__ == "__main__":
    PAGE.write_text(drawn_into(PAGE.read_text(), mermaid(reduced(measured()))))
