import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest
from report_examples import job_report, sweep_report

from tasks.report.model import Edition
from tasks.report.page import report_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NOT CHECKED IN A BROWSER: no chromium (apt-get install chromium)"
)

_PROBE = f"<script>{Path(__file__).with_name('report_probe.js').read_text()}</script></body>"


_NARROWEST = 500  # pixels of chromium's narrowest window; narrower pages are in a frame


def _measure(html: str, width: int, folder: Path) -> dict[str, list[str]]:
    page = folder / "probe.html"
    probed = html.replace("</body>", _PROBE)
    if width < _NARROWEST:
        probed = (
            f'<body><iframe width="{width}" height="2000" style="border: 0" '
            f'srcdoc="{escape(probed)}"></iframe></body>'
        )
    page.write_text(probed, encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={max(width, _NARROWEST)},2000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search("PROBE({.*})ENDPROBE", done.stdout)
    assert match is not None, done.stderr[-2000:]
    measured: dict[str, list[str]] = json.loads(unescape(match[1]))
    return measured


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {
        "job": report_page(job_report(), Edition.OPERATOR).html,
        "sweep": report_page(sweep_report(), Edition.OPERATOR).html,
    }


@pytest.mark.parametrize("width", [1240, 1920])
@pytest.mark.parametrize("name", ["job", "sweep"])
def test_desktop_page_cuts_no_content_and_overlaps_no_text(pages, name, width, tmp_path):
    layout = _measure(pages[name], width, tmp_path)
    assert layout["texts"] > 20
    assert layout["page"] == [width, width]
    assert layout["cut"] == []
    assert layout["outside"] == []
    assert layout["overlaps"] == []


def test_page_on_a_phone_scrolls_tables_but_not_the_page(pages, tmp_path):
    layout = _measure(pages["job"], 390, tmp_path)
    assert layout["page"] == [390, 390]
    assert "table-closing scroll" in layout["cut"]
    assert all(box.endswith("scroll") for box in layout["cut"])


def test_probe_notices_cut_content_and_overlapping_text(pages, tmp_path):
    """The probe must report a long word in a table and a duplicated label."""
    broken = pages["job"].replace("Non-private</span>", "Non" + "W" * 200 + "</span>")
    twice = re.sub(r"(<text[^>]*>Exposure, bits</text>)", r"\1\1", broken)
    assert twice != broken
    layout = _measure(twice, 1240, tmp_path)
    assert any("table-closing" in box for box in layout["cut"])
    assert "Exposure, bits / Exposure, bits" in layout["overlaps"]
