"""Draw the diagram of rooms and their imports in docs/architecture.md, from the source code.

    .venv/task/bin/python scripts/architecture.py

A room is a package or module two levels deep. Arrows that a path of other arrows implies are
omitted. All imports of `dp_core` by `tasks` form one arrow.
"""

import re
from pathlib import Path

import grimp

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
HOUSES = ("dags", "tasks", "dp_core")
FOR_ALL = {"dp_core.errors", "dp_core.labels"}  # any room may import these
START, END = "<!-- drawn by scripts/architecture.py -->\n", "<!-- end -->\n"

Arrow = tuple[str, str]


def measured() -> set[Arrow]:
    """Return the imports between rooms, with one arrow for all imports of `dp_core` by `tasks`."""
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
    """Return the diagram as a Mermaid flowchart."""
    lines = ["```mermaid", "flowchart TB"]
    for top in HOUSES:
        rooms = sorted({room for arrow in arrows for room in arrow if room.startswith(f"{top}.")})
        lines += [f"  subgraph {top}"]
        lines += [f"    {room}[{room.partition('.')[2]}]" for room in rooms] + ["  end"]
    lines += [f"  {here} --> {there}" for here, there in sorted(arrows)]
    return "\n".join([*lines, "```", ""])


def drawn_into(page: str, picture: str) -> str:
    """Return the page with its diagram replaced by `picture`."""
    pattern = re.compile(f"(?<={re.escape(START)}).*(?={re.escape(END)})", re.S)
    return pattern.sub(lambda _: picture, page)


if __name__ == "__main__":
    PAGE.write_text(drawn_into(PAGE.read_text(), mermaid(reduced(measured()))))
