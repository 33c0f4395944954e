"""Takes the pictures of README and of docs/operating.md from a finished run (`make screenshots`).

Every view of its live page; for README the first view and the report's first curve, each in light and dark. Needs
Debian's chromium and its driver.

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
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from headrace.launch.page import read_place
from headrace.launch.runs import find

VIEWS = (
    *("overview", "steps", "actors", "groups", "trajectories", "behaviour"),
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


def shown(driver: webdriver.Chrome) -> None:
    """Wait until the live page shows its records and the charts' first frame."""
    WebDriverWait(driver, 60).until(lambda page: page.execute_script(READY))
    driver.execute_async_script("setTimeout(arguments[0], 800)")


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
        for scheme in ("light", "dark"):
            preference = {"name": "prefers-color-scheme", "value": scheme}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference]})
            driver.get(place.users(minutes=10))
            shown(driver)
            driver.save_screenshot(str(out / f"live-{scheme}.png"))
            driver.get((find(run).path / "report.html").resolve().as_uri())
            curve = driver.find_element(By.TAG_NAME, "figure")
            driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", curve)
            curve.screenshot(str(out / f"curve-{scheme}.png"))
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        driver.get(place.users(minutes=10))
        for view in (*VIEWS, passed_attempt(place.page, place.key)):
            if view:
                driver.get("about:blank")
                driver.get(f"{place.page}#/{view}")
                shown(driver)
                name = "attempt" if view.startswith("t/") else view
                driver.save_screenshot(str(out / f"{name}.png"))
    finally:
        driver.quit()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
