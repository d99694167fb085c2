import re
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "scripts"))
import architecture  # noqa: E402


def test_diagram_shows_the_imports_of_the_code():
    page = architecture.PAGE.read_text()
    now = architecture.mermaid(architecture.reduced(architecture.measured()))
    assert architecture.drawn_into(page, now) == page, "imports changed: `make picture`"
    assert now in page


def test_reduced_arrows_reach_the_same_packages():
    arrows = {("a", "b"), ("b", "c"), ("a", "c"), ("c", "b"), ("a", "d")}
    left = architecture.reduced(arrows)
    assert left == {("a", "c"), ("b", "c"), ("c", "b"), ("a", "d")}
    for room in "abcd":
        assert architecture.reached(left, room) == architecture.reached(arrows, room)


def test_table_lists_every_package():
    page = architecture.PAGE.read_text()
    packages = {
        f"{file.parent.parent.name}.{file.parent.name}"
        for top in architecture.HOUSES
        for file in (CHECKOUT / top).glob("*/__init__.py")
    }
    table = page.partition("```mermaid")[0]
    assert [room for room in sorted(packages) if f"`{room.partition('.')[2]}`" not in table] == []


@pytest.mark.cases
def test_files_that_answer_a_question_exist_and_are_few(question, most):
    answer = architecture.PAGE.read_text().partition(f"### {question}\n")[2].partition("\n#")[0]
    files = re.findall(r"^\d+\. `([\w/.]+)`", answer, re.M)
    assert 5 <= len(files) <= most
    assert [file for file in files if not (CHECKOUT / file).is_file()] == []


def test_picture_of_the_site_has_every_room_and_arrow():
    arrows = architecture.reduced(architecture.measured())
    picture = architecture.svg(architecture.mermaid(arrows))
    assert picture.count('marker-end="url(#head)"') == len(arrows)
    rooms = {room for pair in arrows for room in pair} | set(architecture.HOUSES)
    assert len({*map(architecture.title, rooms)}) == len(rooms) == picture.count("</text>")
