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

# Measures the page with all details open. Text may overlap lines and bars, but not other text.
_PROBE = """
<script>
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  const found = {page: [document.documentElement.scrollWidth, innerWidth], cut: [], outside: [],
                 overlaps: [], texts: 0};
  for (const box of document.querySelectorAll(".scroll, .card, pre"))
    if (box.scrollWidth > box.clientWidth + 1)
      found.cut.push((box.querySelector("table") || box).id + " " + box.className);
  for (const svg of document.querySelectorAll("figure svg")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim());
    const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
    found.texts += boxes.length;
    boxes.forEach(([name, b], i) => {
      if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 ||
          b.bottom > frame.bottom + 1) found.outside.push(name);
      for (const [other, c] of boxes.slice(i + 1)) {
        const wide = Math.min(b.right, c.right) - Math.max(b.left, c.left);
        const high = Math.min(b.bottom, c.bottom) - Math.max(b.top, c.top);
        if (wide > 1 && high > 3) found.overlaps.push(name + " / " + other);
      }
    });
  }
  top.document.body.textContent = "PROBE" + JSON.stringify(found) + "ENDPROBE";
});
</script></body>"""


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
