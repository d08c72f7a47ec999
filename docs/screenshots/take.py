"""Take the pictures of Prefect's UI for the pages: a real flow over three work pools, in a real browser.

    .venv/bin/python docs/screenshots/take.py                       # all pictures, into this folder
    .venv/bin/python docs/screenshots/take.py --home .demo          # of the last run that a stack has already

It takes Linux, a Chromium with emojis (`apt install chromium fonts-noto-color-emoji`) and five minutes on two
cores. A Prefect server and three workers of its own are started; nothing of yours is touched, and the browser
reaches nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from browser import HEIGHT, Browser, BrowserError, find_program

from prefect_torch_elastic.dev.plan import StackPlan
from prefect_torch_elastic.dev.stack import DevStack, find_stack
from prefect_torch_elastic.errors import ElasticError

HERE = Path(__file__).resolve().parent
FLOW = HERE.parent.parent / "flows" / "pretrain.py"
FLOW_NAME = "pretraining"
STEPS = ("tokenize", "train")
# Pages about the step `train`, by the beginning of their keys: words that are on each, and how high it is.
PAGES = {
    "progress": ("Progress", HEIGHT),
    "metrics": ("Metrics of", HEIGHT),
    "run-report": ("Goodput", 2 * HEIGHT),
    "incident": ("What to do", 2 * HEIGHT),
}
PARAMETERS = {"steps": 300, "kill_at": 150}
LIMIT_BYTES = 300_000

RESTART = "The ranks start again"
CLICK_ON_TAB = """(name) => {
    for (const tab of document.querySelectorAll("li.p-tab"))
        if (tab.textContent.trim() === name) tab.click();
}"""
CLICK_ON_TAB_V2 = """(name) => {
    for (const tab of document.querySelectorAll('[role="tab"]'))
        if (tab.textContent.trim() === name && tab.getAttribute("aria-selected") !== "true") {
            tab.dispatchEvent(new MouseEvent("mousedown", {bubbles: true, button: 0}));
            tab.click();
        }
}"""
# Bars in the order of their start: each child run is then right below its task.
ORDER_GRAPH = """async (layout) => {
    const pause = () => new Promise((resolve) => setTimeout(resolve, 1000));
    const find = (kind, words) =>
        [...document.querySelectorAll(kind)].find((element) => element.textContent.trim() === words);
    const gear = [...document.querySelectorAll("button")].filter(
        (button) => !button.textContent.trim() && !button.getAttribute("aria-label")).at(-1);
    if (!gear || window.isOrdered) return;
    window.isOrdered = true;
    gear.click();
    await pause();
    find("label", layout).click();
    await pause();
    find("button", "+").click();
    find("button", "+").click();
    gear.click();
    await pause();
    document.activeElement.blur();
}"""
SCROLL_LOG = """(words) => {
    const has = (element) => element.textContent.includes(words);
    const log = [...document.querySelectorAll("div")].find(
        (div) => getComputedStyle(div).overflowY === "auto" && div.textContent.includes("INFO"));
    if (!log) return;
    const line = [...log.querySelectorAll("*")].filter(has).at(-1);  // the innermost one
    const far = line ? line.getBoundingClientRect().top - log.getBoundingClientRect().top - 16 : 300;
    log.scrollTop += far;
}"""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture: where it is taken, and what has to be on the page before.

    Attributes:
        name: Of the file.
        path: Of the page, on the server.
        expected: Words that show that the page is complete.
        action: Script that is run on the page again and again until it is still.
        height: Of the window, in pixels.
    """

    name: str
    path: str
    expected: tuple[str, ...]
    action: str = ""
    height: int = HEIGHT


@dataclass(frozen=True, kw_only=True)
class Runs:
    """A run of the flow and what the pictures show of it, as the API has them.

    Attributes:
        flow_run: The run of the driver.
        children: The child runs of its steps, by the name of the step.
        train: The task run of the step `train`.
        pages: Its artifacts, by the beginning of their keys.
    """

    flow_run: dict[str, Any]
    children: dict[str, dict[str, Any]]
    train: dict[str, Any]
    pages: dict[str, dict[str, Any]]

    def pictures(self) -> list[Picture]:
        """Return the pictures."""
        flow_run, child, task_run = self.flow_run["id"], self.children["train"]["id"], self.train["id"]
        names = tuple(run["name"] for run in (self.flow_run, *self.children.values()))
        log = (self.train["name"], "[rank 0]")
        return [
            Picture(
                name="flow-run",
                path=f"/v2/runs/flow-run/{flow_run}?tab=SubflowRuns",
                expected=names,
                action=_call(ORDER_GRAPH, "Temporal sequence"),
            ),
            Picture(
                name="flow-run-v1",
                path=f"/runs/flow-run/{flow_run}",
                expected=(*names, f"{len(STEPS)} Flow runs"),
                action=_call(CLICK_ON_TAB, "Subflow Runs"),
            ),
            Picture(name="train-task-run", path=f"/v2/runs/task-run/{task_run}", expected=log),
            Picture(
                name="train-restart",
                path=f"/v2/runs/task-run/{task_run}",
                expected=(self.train["name"], RESTART),
                action=_call(SCROLL_LOG, RESTART),
            ),
            Picture(name="train-flow-run", path=f"/v2/runs/flow-run/{child}", expected=log),
            Picture(
                name="train-artifacts",
                path=f"/v2/runs/task-run/{task_run}?tab=Artifacts",
                expected=(self.train["name"], "run-report"),
                action=_call(CLICK_ON_TAB_V2, "Artifacts"),
            ),
            *(
                Picture(
                    name=f"page-{name}",
                    path=f"/v2/artifacts/artifact/{self.pages[name]['id']}",
                    expected=(words,),
                    height=height,
                )
                for name, (words, height) in PAGES.items()
            ),
        ]


def run_flow(home: Path) -> None:
    """Run the split flow on the stack of `home`; what it logs goes to stderr."""
    parameters = {**PARAMETERS, "out": str(home / "data")}
    command = [str(Path(sys.executable).parent / "prefect-torch-elastic"), "dev", "run", str(FLOW)]
    for name, value in parameters.items():
        command += ["-p", f"{name}={value}"]
    subprocess.run([*command, "--home", str(home)], check=True, stdout=subprocess.DEVNULL)


def fetch_runs(api_url: str) -> Runs:
    """Return the newest run of the flow, its child runs, and the task run of the step `train`."""
    with httpx.Client(base_url=api_url, trust_env=False) as client:

        def fetch(what: str, **wanted: Any) -> list[dict[str, Any]]:
            answer = client.post(f"/{what}/filter", json=wanted)
            answer.raise_for_status()
            return answer.json()

        newest = fetch("flow_runs", flows={"name": {"any_": [FLOW_NAME]}}, sort="START_TIME_DESC", limit=1)
        if not newest:
            raise BrowserError(f"{api_url} has no run of `{FLOW_NAME}`. Run `{FLOW}` there first.")
        of_run = {"any_": [newest[0]["id"]]}
        children = {
            step: fetch(
                "flow_runs", flows={"name": {"any_": [step]}}, flow_runs={"parent_flow_run_id": of_run}
            )
            for step in STEPS
        }
        if missing := [step for step in STEPS if not children[step]]:
            raise BrowserError(f"the run {newest[0]['name']!r} has no child runs of {missing}.")
        train = {"name": {"any_": [children["train"][0]["name"]]}}
        tasks = fetch("task_runs", flow_runs={"id": of_run}, task_runs=train)
        found = fetch("artifacts", artifacts={"task_run_id": {"any_": [tasks[0]["id"]]}})
        pages = {name: one for name in PAGES for one in found if (one["key"] or "").startswith(name)}
    if missing := sorted(PAGES.keys() - pages.keys()):
        raise BrowserError(f"the step `train` of {newest[0]['name']!r} has no artifacts of {missing}.")
    return Runs(
        flow_run=newest[0],
        children={step: runs[0] for step, runs in children.items()},
        train=tasks[0],
        pages=pages,
    )


def _call(function: str, argument: str) -> str:
    """Return the script that calls a function of the page."""
    return f"({function})({json.dumps(argument)})"


def take_pictures(stack: DevStack, program: str, folder: Path) -> None:
    """Take all pictures of the newest run of a stack."""
    pictures = fetch_runs(stack.api_url).pictures()
    with Browser.start(program) as browser:
        for picture in pictures:
            url = stack.ui_url + picture.path
            data = browser.show(url, expected=picture.expected, action=picture.action, height=picture.height)
            if len(data) > LIMIT_BYTES:
                raise BrowserError(f"`{picture.name}.png` has {len(data)} bytes, more than {LIMIT_BYTES}.")
            (folder / f"{picture.name}.png").write_bytes(data)
            say(f"{picture.name}.png: {len(data) / 1000:.0f} KB of {picture.path}")


def take_fresh_pictures(program: str, folder: Path) -> None:
    """Run the flow on a stack of its own, and take all pictures of it."""
    with (
        tempfile.TemporaryDirectory(prefix="pte-", ignore_cleanup_errors=True) as home,
        DevStack(StackPlan(home=Path(home)), show=say) as stack,
    ):
        run_flow(stack.plan.home)
        take_pictures(stack, program, folder)


def say(line: str) -> None:
    """Show progress."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201  (a program)


def main() -> int:
    """Run the flow, unless a stack has one, and take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", type=Path, help="take them of the newest run of the stack that runs there")
    parser.add_argument("--browser", help="program of a Chromium or Chrome (default: the first on PATH)")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="where they are written (default: %(default)s)"
    )
    given = parser.parse_args()
    try:
        program = find_program(given.browser)
        if given.home is None:
            take_fresh_pictures(program, given.out)
        elif (stack := find_stack(given.home)) is not None:
            take_pictures(stack, program, given.out)
        else:
            raise BrowserError(
                f"no stack runs in `{given.home}`. Leave `--home` out, or start it: `make ui`."
            )
    except (BrowserError, ElasticError) as error:
        say(str(error))
        return 1
    say("Look at them before you commit them.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
