"""Takes a screenshot of every view of a run's live page (`make screenshots`). Needs Debian's chromium and its driver.

python docs/screenshots.py runs/latest docs/images
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from headrace.launch.page import read_place
from headrace.launch.runs import find

VIEWS = (
    *("overview", "actors", "groups", "trajectories", "behaviour"),
    *("ledger", "letters", "regions", "feedback", "scavenger"),
)
READY = (
    "return !!window.headrace && headrace.state.users !== null && document.querySelector('#view').innerText.length > 20"
)


def passed_attempt(url: str, key: str) -> str:
    """The view of an attempt that passed with several turns, or of any attempt; empty when none has a score."""
    request = urllib.request.Request(f"{url}api/history", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        scores = [record for record in json.load(answer)["records"] if record["type"] == "score"]
    best = sorted(scores, key=lambda score: (not score["passed"], -score.get("turns", 0)))
    return f"t/{best[0]['trajectory_seq']}" if best else ""


def main(run: str, out: Path) -> None:
    """Serve the run's page, and write a picture per view."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", "-m", "headrace.cli", "dashboard", run]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    server.stdout.readline()  # the address: the page is served
    place = read_place(find(run).path)
    assert place is not None, "headrace dashboard wrote no page.json"
    options = Options()
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,950",
    ):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        driver.get(place.address())
        for view in (*VIEWS, passed_attempt(place.page, place.key)):
            if view:
                driver.get("about:blank")
                driver.get(f"{place.page}#/{view}")
                WebDriverWait(driver, 60).until(lambda page: page.execute_script(READY))
                driver.execute_async_script("setTimeout(arguments[0], 800)")  # the charts' first frame
                name = "attempt" if view.startswith("t/") else view
                driver.save_screenshot(str(out / f"{name}.png"))
    finally:
        driver.quit()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
