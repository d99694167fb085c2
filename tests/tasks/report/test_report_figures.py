import io
import math
import re
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from report_examples import (
    attacked_by_epoch,
    causal_sweep_report,
    exposure_rows,
    job_report,
    sweep_report,
)

from dp_core.audit.exposure import EMBEDDED
from dp_core.labels import Label
from dp_core.privacy.statement import DatasetTotal
from tasks.report import figures, sweep_figures
from tasks.report.figures import Drawing, Panel
from tasks.report.model import Cost, Edition, Exposures, ModelRow, Withheld
from tasks.report.page import figures_of, report_page

REPORT = attacked_by_epoch(job_report())


@cache
def _drawn() -> dict[str, Drawing]:
    drawn = (
        *report_page(REPORT, Edition.OPERATOR).drawings,
        sweep_figures.sweep_figure(sweep_report().models),
    )
    return {drawing.key: drawing for drawing in drawn if drawing is not None}


def _texts(drawing: Drawing) -> list[str]:
    root = ET.fromstring(drawing.svg)  # noqa: S314 - our own file
    elements = root.iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()).strip() for text in elements]


def _sweep(points: Sequence[ModelRow]) -> Drawing:
    drawing = sweep_figures.sweep_figure(points)
    assert drawing is not None
    return drawing


KEYS = ["exposure", "training", "epochs", "leakage", "rarity", "entities", "sweep"]


@pytest.mark.parametrize("key", KEYS)
def test_figure_is_as_wide_as_the_page_and_its_text_is_readable(key):
    drawing = _drawn()[key]
    height, width, _ = imread(io.BytesIO(drawing.png)).shape
    assert width == 1536 and height > 500
    assert drawing.title and len(drawing.caption) > 60
    sizes = [float(s) for s in re.findall(r"font(?:-size)?: ([\d.]+)px", drawing.svg)]
    assert len(sizes) > 10 and min(sizes) >= 10
    root = ET.fromstring(drawing.svg)  # noqa: S314 - our own file
    right, bottom = (float(x) for x in root.attrib["viewBox"].split()[2:])
    places = re.findall(r'<text[^>]*transform="translate\(([\d.-]+) ([\d.-]+)\)', drawing.svg)
    places += re.findall(r'<text[^>]* x="([\d.-]+)" y="([\d.-]+)"', drawing.svg)
    assert places
    assert all(0 <= float(x) <= right and 0 <= float(y) <= bottom for x, y in places)


SHOWN = tomllib.loads(Path(__file__).with_name("figure_texts.toml").read_text())


@pytest.mark.parametrize("key", SHOWN)
def test_figure_names_its_panels_models_and_values(key):
    assert set(SHOWN[key]) <= set(_texts(_drawn()[key]))


def test_name_of_an_entity_type_is_no_formula():
    name = r"US$ or $\mathrm{A}$"
    models = [replace(model, f1_by_type={name: model.f1}) for model in REPORT.models]
    drawing = figures.entity_figure(models)
    assert drawing is not None and name in _texts(drawing)


def test_figure_omits_models_with_withheld_values():
    hidden = [
        replace(model, exposures=Withheld(), f1=Withheld(), f1_by_type={})
        for model in REPORT.models
    ]
    drawing = figures.exposure_figure([*REPORT.models[:2], hidden[2]])
    assert drawing is not None and "Non-private" not in _texts(drawing)
    assert figures.exposure_figure(hidden) is None
    assert figures.training_figure([], REPORT.models) is None


def test_figures_of_attacks_and_losses_are_for_the_operator():
    private = attacked_by_epoch(job_report(made_up=False))
    drawn = {e: {d.key: d for d in report_page(private, e).drawings} for e in Edition}
    assert set(drawn[Edition.OPERATOR]) == set(KEYS) - {"sweep"}
    shown = drawn[Edition.PUBLISHABLE]
    assert set(shown) == {"exposure", "training", "epochs"}
    texts = {*_texts(shown["epochs"]), *shown["epochs"].caption.split("; ")}
    assert {"Exposure, mean, bits", "DP"} <= texts
    assert not {"Strict entity F1", "Loss on held-out text, nats", "Non-private"} & texts


def test_models_saved_once_have_no_figures_by_epoch():
    once = job_report()
    assert figures.epochs_figure((), once.models) is figures.rarity_figure(once.models) is None
    leakages = figures_of(once)["leakage"]
    assert leakages and figures.leakage_figure(leakages, figures.styles_of(once.models)) is None


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("scale", ["share", "zero", "log", "values"])
def test_points_bars_and_level_lines_are_inside_the_axes(scale, log_x):
    lines = {
        "first": [(1.0, 0.5, 0.02, 0.9), (3.0, 0.6, 0.6, 0.6)],
        "level": [(math.inf, 0.98, 0.98, 0.98)],
    }
    panel = Panel("", lines, "x", {1.0: "1", 3.0: "3"}, log_x, scale, 1.2 if log_x else 0.3)
    _, (axes,) = figures.canvas(1, 1, 3.9)
    figures._draw(axes, panel, dict.fromkeys(lines, ("#000000", "o")))
    figures.frame(axes, panel.ends, panel.y)
    low, high = axes.get_ylim()
    assert low <= 0.02 and high >= 0.98
    points, *ends = [line for line in axes.lines if line.get_marker() in ("o", "_")]
    left, right = axes.get_xlim()
    assert all(left < x < right for x in points.get_xdata())
    # Only the interval that is not empty has a bar.
    assert [np.isfinite(end.get_ydata()).tolist() for end in ends] == [[True, False]] * 2


def test_exposure_figure_with_many_groups_uses_two_rows_of_panels():
    many = tuple(
        replace(row, expected_occurrences=occurrences, pattern=pattern)
        for row in exposure_rows({}, 3)[-1:]
        for pattern in ("HS", "HSH", "SH", "HHSHH", "HHHS")
        for occurrences in (1, 10, 100, 1000, 10_000, 100_000)
    )
    drawing = figures.exposure_figure(
        [replace(REPORT.models[1], exposures=(Exposures(Label.DP, many),))]
    )
    assert drawing is not None and "100\u202f000" in _texts(drawing)
    assert imread(io.BytesIO(drawing.png)).shape[0] > 1000  # two rows of panels


def test_sweep_figure_of_fine_tuning_settings_has_only_their_panels():
    point = sweep_report().models[0]
    points = [
        replace(point, finetuning={"finetune_epochs": e, "finetune_learning_rate": r})
        for e in (1, 2, 4)
        for r in (1e-4, 1e-3)
    ]
    texts = _texts(_sweep(points))
    assert "Fine-tuning epochs" in texts and "Fine-tuning rate" in texts
    assert "Noise multiplier σ" not in texts  # it does not vary


def test_sweep_exposure_figure_has_one_line_per_batch_size_and_number_of_updates():
    points = sweep_report().models
    drawing = sweep_figures.sweep_exposure_figure(points)
    assert drawing is not None
    lines = {text for text in _texts(drawing) if text.startswith("bs=")}
    assert len(lines) == 6
    assert lines == {f"bs={point.batch_size} step={point.updates} σ=1" for point in points}
    one_line = [point for point in points if point.batch_size == 128 and point.epochs == 5]
    assert sweep_figures.sweep_exposure_figure(one_line) is None  # only σ varies
    hidden = [replace(point, exposures=Withheld()) for point in points]
    assert sweep_figures.sweep_exposure_figure(hidden) is None


def test_exposure_line_over_seeds_is_the_mean_with_bars_over_all_intervals():
    seeds = [[row for row in exposure_rows({}, seed) if row.context == EMBEDDED] for seed in (1, 2)]
    for row, first, second in zip(sweep_figures._over_seeds(seeds), *seeds, strict=True):
        assert row.exposure == pytest.approx((first.exposure + second.exposure) / 2)
        assert (row.low, row.high) == (min(first.low, second.low), max(first.high, second.high))


def test_sweep_figure_renders_a_single_point_and_withheld_scores():
    point = sweep_report().models[0]
    flat = replace(point, cost=Cost(DatasetTotal(("notes",), None, math.pi, 1e-6)))
    for points in ([point], [replace(point, f1=Withheld())], [flat]):
        assert "ε in total" in _texts(_sweep(points))
    assert sweep_figures.sweep_figure([]) is None


def test_sweep_figure_of_causal_models_omits_baselines_with_another_vocabulary():
    points = causal_sweep_report().models
    drawing = _sweep(points)
    texts = _texts(drawing)
    assert "Perplexity of private text, lower is better" in texts
    assert "public training" in texts and "public text only" not in texts
    assert "%" not in "".join(texts) and "over seeds)" in drawing.caption
    hidden = [replace(point, perplexity_private=Withheld(), spread=Withheld()) for point in points]
    drawing = _sweep(hidden)
    words = ("public training", "Perplexity")
    assert not [text for text in _texts(drawing) if text.startswith(words)]
    assert "perplexity" not in drawing.caption and "level" not in drawing.caption


def test_sweep_figure_of_a_star_of_points_goes_through_its_centre():
    """The middle of two values is ambiguous, but (1.1, 64, 10) lies on every line."""
    points = [(1.1, 64.0, 10.0), (0.55, 64.0, 10.0), (1.1, 64.0, 5.0), (1.1, 32.0, 10.0)]
    assert sweep_figures._middle(points) == points[0]
    grid = [(s, b, 1.0) for s in (1.0, 2.0) for b in (8.0, 9.0)]
    assert sweep_figures._middle(grid) == grid[0]


def test_noise_that_is_scaled_with_the_batch_size_makes_one_line_over_batch_sizes():
    point, settings = sweep_report().models[0], ((0.5, 64), (1.0, 256), (2.0, 1024))
    points = [replace(point, noise_multiplier=s, batch_size=b) for s, b in settings]
    drawings = [sweep_figures.sweep_figure(points, scaled=scaled) for scaled in (False, True)]
    assert ["σ = 1·√(B / 256)" in _texts(drawing) for drawing in drawings] == [False, True]
    pale = [len(re.findall(r"opacity: 0\.22", drawing.svg)) for drawing in drawings]
    assert 0 < pale[1] < 0.6 * pale[0]  # one of two panels has pale lines


def test_baselines_of_one_kind_have_different_dashes():
    points = causal_sweep_report().models
    (level,) = (point for point in points if point.baseline == "public-training")
    level = replace(level, baseline="nonprivate-training", kind="nonprivate")
    kinds = [replace(level, name=f"training · epochs={e}", epochs=e) for e in (5.0, 10.0)]
    drawing = _sweep([*points[:2], *kinds])
    red = re.findall(r"stroke-dasharray: ([^;]+);[^\"]*stroke: #d55e00", drawing.svg)
    assert len(set(red)) == 2
