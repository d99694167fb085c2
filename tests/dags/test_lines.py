"""Lines of two streams that arrive in pieces, however they are cut and mixed."""

from __future__ import annotations

import random

import pytest

from dags.launcher.lines import whole_lines
from dags.launcher.links import tracked_at

URL = "http://127.0.0.1:5000/#/experiments/1/runs/ab12"


def test_a_line_of_one_stream_does_not_run_into_one_of_the_other() -> None:
    said = list(
        whole_lines(
            [
                (None, f"MLflow: {URL}".encode()),
                (b"gs://bucket/store/report/1/result.json\n", None),
                (None, b"\n"),
            ]
        )
    )
    assert said == [
        ("stdout", "gs://bucket/store/report/1/result.json"),
        ("stderr", f"MLflow: {URL}"),
    ]
    assert tracked_at(said[1][1]) == URL


def test_the_last_line_needs_no_end_and_empty_ones_are_left_out() -> None:
    assert list(whole_lines([(b"one\r\n\n  \ntwo", None)])) == [
        ("stdout", "one"),
        ("stdout", "two"),
    ]
    assert list(whole_lines([])) == []


def test_what_is_no_text_is_marked() -> None:
    assert list(whole_lines([(b"\xff1\n\xe2\x82", None)])) == [
        ("stdout", "�1"),
        ("stdout", "�"),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_no_cut_and_no_mixture_changes_a_line(size: int, seed: int) -> None:
    chance = random.Random(seed)
    lines: dict[str, list[str]] = {
        "stdout": ["gs://bucket/result.json", "naïve — 数", "x" * 90],
        "stderr": [f"MLflow: {URL}", "€", "12/20"],
    }
    waiting = {
        stream: "".join(f"{one}\n" for one in said).encode() for stream, said in lines.items()
    }
    pieces: list[tuple[bytes | None, bytes | None]] = []
    while left := [stream for stream in waiting if waiting[stream]]:
        stream, cut = chance.choice(left), chance.randint(1, size)
        piece, waiting[stream] = waiting[stream][:cut], waiting[stream][cut:]
        pieces.append((piece, None) if stream == "stdout" else (None, piece))
    said = list(whole_lines(pieces))
    assert {stream: [line for s, line in said if s == stream] for stream in lines} == lines
