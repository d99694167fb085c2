"""Templates expand as written."""

from random import Random

import pytest

from tasks.demo_data.language import Piece, expand, phrase


class Slots:
    def fill(self, name: str) -> list[Piece]:
        return [(name.upper(), "label")]


def test_choices_nest_and_may_be_empty() -> None:
    rng = Random(0)
    seen = {phrase("a (b|c(d|)|) e", rng) for _ in range(200)}
    assert seen == {"a b e", "a cd e", "a c e", "a  e"}


def test_slots_keep_their_label() -> None:
    assert expand("x {drug} y", Random(0), Slots()) == [("x ", ""), ("DRUG", "label"), (" y", "")]


@pytest.mark.parametrize("template", ["a (b", "a b)", "a {b", "(a|{b)"])
def test_bad_templates_are_noticed(template: str) -> None:
    with pytest.raises(ValueError, match="template"):
        expand(template, Random(0), Slots())


def test_a_phrase_has_no_slots() -> None:
    with pytest.raises(ValueError, match="no slot"):
        phrase("{drug}", Random(0))
