"""The pages as a user sees them in headless Chromium, from the log-in to the report.

`docker/ci` starts the stack, sets CONFIDE_STACK and runs this file in `.venv/browser`; elsewhere
the tests are skipped. A screenshot of each page is saved in `ci-artifacts/screenshots`.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_stack import LONGEST, ROOT, TINY, Stack, on_the_stack

playwright = pytest.importorskip(
    "playwright.sync_api", reason="SKIPPED, no page is looked at: playwright is in .venv/browser"
)
expect = playwright.expect

CHROMIUM = os.environ.get("CONFIDE_CHROMIUM") or shutil.which("chromium") or ""
SCREENSHOTS = ROOT / "ci-artifacts" / "screenshots"
PATIENCE = 180_000  # milliseconds for a page, on a machine that also trains models

pytestmark = [
    *on_the_stack("no page is looked at"),
    pytest.mark.skipif(
        not CHROMIUM, reason="SKIPPED, no page is looked at: there is no chromium here"
    ),
]


class Person:
    """A user with a browser who saves a screenshot of every page."""

    def __init__(self, stack: Stack, context: Any) -> None:
        self.stack = stack
        self._context = context
        self.page = context.new_page()
        self._pictures = 0

    def keep(self, name: str) -> None:
        self._pictures += 1
        # drawers and charts are animated without an event at the end
        self.page.wait_for_timeout(1500)
        self.page.screenshot(path=SCREENSHOTS / f"{self._pictures:02d}-{name}.png")

    def log_in(self) -> None:
        self.page.goto(self.stack.airflow)
        self.page.fill("input[name=username]", "confide")
        self.page.fill("input[name=password]", self.stack.secrets["AIRFLOW_PASSWORD"])
        self.keep("log-in")
        self.page.click("button[type=submit]")
        self.page.wait_for_url(f"{self.stack.airflow}/")

    def open_form(self) -> Any:
        """Open the trigger form of dp_bert; return the dialog."""
        self.page.goto(f"{self.stack.airflow}/dags/dp_bert")
        self.page.get_by_role("button", name="Trigger").first.click()
        dialog = self.page.get_by_role("dialog")
        expect(dialog.get_by_role("button", name="Essentials")).to_be_visible()
        return dialog

    def fill(self, dialog: Any, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            field = self.page.locator(f"[name=element_{name}]")
            menu = self.page.locator(f"div#element_{name}")
            section = dialog.locator("[data-part=item]").filter(has=field)
            trigger = section.locator("[data-part=item-trigger]")
            if trigger.get_attribute("aria-expanded") != "true":
                trigger.click()
            if menu.count():
                menu.click()
                self.page.get_by_role("option", name=str(value), exact=True).click()
            else:
                field.fill(str(value))
                field.blur()

    def start(self, settings: dict[str, Any], picture: str = "") -> str:
        """Return the run that the filled form starts."""
        before = {run["dag_run_id"] for run in self.stack.runs("dp_bert")}
        dialog = self.open_form()
        self.fill(dialog, settings)
        if picture:
            self.keep(picture)
        dialog.get_by_role("button", name="Trigger").last.click()
        expect(dialog).to_be_hidden()
        (run,) = (r for r in self.stack.runs("dp_bert") if r["dag_run_id"] not in before)
        assert {name: run["conf"][name] for name in settings} == settings
        self.page.goto("about:blank")  # Airflow's page of a run takes half a core until it ends
        return str(run["dag_run_id"])

    def open_task(self, run: str, task: str) -> None:
        self.page.goto(f"{self.stack.airflow}/dags/dp_bert/runs/{run}/tasks/{task}/details")

    def follow(self, link: str) -> None:
        """Follow a link that opens a new tab, and continue in that tab."""
        with self._context.expect_page() as opened:
            # The task and its breadcrumb may have the name of the link.
            self.page.locator("a[target=_blank]").filter(has_text=re.compile(f"^{link}$")).click()
        self.page.close()
        self.page = opened.value


@pytest.fixture(scope="module")
def person(stack: Stack) -> Iterator[Person]:
    shutil.rmtree(SCREENSHOTS, ignore_errors=True)
    SCREENSHOTS.mkdir(parents=True)
    arguments = ["--disable-background-networking"]
    if os.getuid() == 0:
        arguments.append("--no-sandbox")  # Chromium's sandbox refuses to start for root
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=arguments)
        context = browser.new_context(
            viewport={"width": 1600, "height": 1000},
            http_credentials={
                "username": "confide",
                "password": stack.secrets["MLFLOW_PASSWORD"],
                "origin": stack.mlflow,
            },
        )
        context.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        someone = Person(stack, context)
        someone.log_in()
        yield someone
        browser.close()


@pytest.fixture(scope="module")
def run(stack: Stack, person: Person) -> str:
    """Return a successful run that was started by the form, with two trainings at a time."""
    stack.train_together(2)
    name = person.start(TINY)
    assert stack.wait("dp_bert", name, LONGEST) == "success"
    return name


def test_start_page_lists_the_jobs(person):
    person.page.goto(f"{person.stack.airflow}/dags")
    for name in ("dp_bert · train privately, then measure", "dp_sweep"):
        expect(person.page.get_by_text(name).first).to_be_visible()
    person.keep("jobs")


def test_page_of_a_job_shows_its_documentation(person):
    person.page.goto(f"{person.stack.airflow}/dags/dp_bert")
    person.page.get_by_role("button", name="Dag Docs").click()
    expect(person.page.get_by_text("Hoory et al. 2021, Learning and Evaluating")).to_be_visible()
    person.keep("what-dp_bert-does")


def test_invalid_value_is_refused_with_its_reason(stack, person):
    before = stack.runs("dp_bert")
    dialog = person.open_form()
    person.keep("form")
    person.fill(dialog, {"layers": 1, "noise_multiplier": -1})
    person.page.locator("[name=element_noise_multiplier]").scroll_into_view_if_needed()
    person.keep("form-privacy")
    dialog.get_by_role("button", name="Trigger").last.click()
    reason = dialog.get_by_text("noise_multiplier: -1 is less than the minimum of 0.01")
    expect(reason.first).to_be_visible()
    reason.first.scroll_into_view_if_needed()
    person.keep("form-refused")
    assert stack.runs("dp_bert") == before


def test_run_started_by_the_form_succeeds(person, run):
    person.page.goto(f"{person.stack.airflow}/dags/dp_bert/runs/{run}")
    for group in ("Data", "Vocabulary", "Train", "Measure", "Report"):
        link = person.page.get_by_role("link", name=re.compile(rf"^{group}\b"))
        expect(link.first).to_be_visible()
    expect(person.page.get_by_text("Success", exact=True).first).to_be_visible()
    person.keep("run")


def test_mlflow_shows_epsilon_f1_and_exposure(person, run):
    person.open_task(run, "report")
    expect(person.page.get_by_role("link", name="MLflow run", exact=True)).to_be_visible()
    person.keep("last-task")
    person.follow("MLflow run")
    person.stack.tracked(run)  # every event has arrived
    person.page.reload()
    person.page.get_by_role("button", name="Close", exact=True).first.click()  # MLflow's assistant
    for metric in ("epsilon", "f1", "exposure", "exposure_largest"):
        expect(person.page.get_by_text(metric, exact=True).first).to_be_attached()
    expect(person.page.get_by_role("link", name=re.compile("^dp_bert 20"))).to_be_visible()
    person.page.get_by_text("epsilon", exact=True).first.scroll_into_view_if_needed()
    person.keep("mlflow-run")
    person.page.get_by_role("tab", name="Model metrics").click()
    expect(person.page.get_by_text("exposure_largest").first).to_be_visible()
    expect(person.page.locator(".js-plotly-plot .bars path").nth(2)).to_be_visible()
    person.keep("mlflow-metrics")


def test_mlflow_shows_the_figures(person, run):
    person.page.get_by_role("tab", name="Artifacts").click()
    folder = person.page.get_by_text("report", exact=True)
    expect(folder).to_have_count(2)  # the run's name, and its folder
    folder.last.click()
    person.page.get_by_text("exposure.png", exact=True).click()
    figure = person.page.locator("img[src^='blob:'], img[src*='exposure']").first
    expect(figure).to_be_visible()
    assert figure.evaluate("image => image.naturalWidth") > 400
    person.keep("mlflow-figure")


def test_table_of_models_shows_epsilon_f1_and_exposure(person, run):
    view = "#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey=models"
    person.page.goto(f"{person.stack.mlflow}/{view}")
    expect(person.page.get_by_role("link", name=re.compile("^With DP · ε ")).first).to_be_visible()
    for column in ("epsilon", "delta", "f1", "exposure"):
        expect(person.page.get_by_text(column, exact=True).first).to_be_visible()
    person.keep("mlflow-models")


def test_report_opens_from_the_page_of_the_task(person, run):
    person.open_task(run, "report")
    person.follow("Report")
    page = person.page.frame_locator("iframe").first
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    for heading in ("Privacy guarantee", "Memory of canaries", "Privacy ledger"):
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
    person.keep("report")


HEADER = "PatNr;DokNr;Datum;Befundtext"
WARD: dict[str, Any] = json.loads(Path(__file__).with_name("ward_job.json").read_text())


def test_csv_of_a_hospital_becomes_an_exported_model_through_the_form(stack, person):
    rows = [
        f"{note % 40};{note};{note % 28 + 1:02}.03.2024;Übergabe: Puls {60 + note % 30}, stabil."
        for note in range(120)
    ]
    stack.put(WARD["private_path"], "\n".join([HEADER, *rows]))
    stack.confide(
        "ledger", "register", "station-5", "--unit=patient", "--epsilon=20", "--delta=1e-4"
    )
    before = stack.confide("ledger", "--json")

    wrong = person.start(WARD | {"private_columns": "text:Befundtext,patient:Patient"})
    assert stack.wait("dp_bert", wrong, LONGEST) == "failed"
    refusal = stack.log("dp_bert", wrong, "private_corpus")
    assert "a header lacks Patient" in refusal and HEADER.replace(";", ", ") in refusal
    assert stack.tasks("dp_bert", wrong)["reserve"]["state"] == "upstream_failed"
    assert stack.confide("ledger", "--json") == before

    right = WARD | {"private_columns": "text:Befundtext,patient:PatNr"}
    run = person.start(right, picture="form-ward")
    assert stack.wait("dp_bert", run, LONGEST) == "success"
    model = stack.outputs("dp_bert", run)["pretraining · With DP"].replace("store/", "store://", 1)
    assert "Privacy statement" in stack.confide(
        "export", "/var/lib/confide/ward-model", "--uri", model
    )
    person.page.goto(f"{stack.airflow}/dags/dp_bert/runs/{run}")
    person.keep("ward-run")


def test_every_page_has_a_screenshot(person):
    pictures: list[Path] = sorted(SCREENSHOTS.glob("*.png"))
    assert len(pictures) >= 11
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
