#!/usr/bin/env python3
"""Opens the web view of a real run in Chromium and looks: charts that move, memory, ranks, a timeline, no error on the
console, no request to another host, light and dark, a phone's width. Writes screenshots.

    apt-get install chromium prometheus      # promtool comes with prometheus
    python3 -m venv venv && venv/bin/pip install playwright
    venv/bin/python tests/browser/monitor.py target/release/zeroth SCREENSHOTS

Needs Chromium at /usr/bin/chromium (or in $CHROMIUM). promtool is used where it is installed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

BINARY = os.path.abspath(sys.argv[1])
SHOTS = Path(sys.argv[2])
ROOT = Path(__file__).resolve().parents[2]


def start_run(folder, name, ranks, more=()):
    numbers = ROOT / "examples/numbers"
    return subprocess.Popen(
        [BINARY, "train", "--device", "cpu", "--model", str(numbers / "tiny-qwen3"), "--data", str(numbers / "train.jsonl"),
         "--eval-data", str(numbers / "held-out.jsonl"), "--eval-steps", "20", "--save-steps", "25", "--ranks", str(ranks),
         "--deepspeed", "zero3", "--per-device-train-batch-size", "4", "--learning-rate", "3e-3", "--warmup-steps", "20",
         "--max-steps", "100000", "--output", str(folder / name), *more],
        stderr=subprocess.DEVNULL)


def steps(run):
    try:
        return sum(1 for _ in open(run / "metrics.jsonl"))
    except OSError:
        return 0


def wait(what, seconds, is_so):
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - begun


def main():
    SHOTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        first = start_run(folder, "first", 2)
        wait("a first run of 60 steps", 300, lambda: steps(folder / "first") >= 60)
        first.send_signal(signal.SIGINT)
        first.wait()
        first = start_run(folder, "first", 2, ["--resume", "auto"])
        second = start_run(folder, "second", 1, ["--learning-rate", "1e-3"])
        wait("the first resumed", 120, lambda: steps(folder / "first") >= 90)
        wait("the second started", 120, lambda: steps(folder / "second") >= 20)
        (folder / "first/trace-now").touch()
        wait("a timeline", 60, lambda: list((folder / "first/logs").glob("step-*.trace.json")))
        web = subprocess.Popen([BINARY, "monitor", str(folder / "first"), str(folder / "second"), "--web", "--format", "json"],
                               stdout=subprocess.PIPE, text=True)
        try:
            text = ""
            while not text.rstrip().endswith("}"):
                text += web.stdout.readline()
            look(json.loads(text), folder, first)
        finally:
            for process in (web, first, second):
                process.kill()
                process.wait()


def look(server, folder, first):
    base = server["url"].split("?")[0]
    try:
        urllib.request.urlopen(base)
        raise AssertionError("the page was shown without a token")
    except urllib.error.HTTPError as error:
        assert error.code == 403, error.code
    request = urllib.request.Request(base + "metrics", headers={"Authorization": "Bearer " + server["bearer"]})
    metrics = urllib.request.urlopen(request).read()
    if shutil.which("promtool"):
        checked = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True)
        assert checked.returncode == 0, checked.stderr.decode()
        print("promtool accepts /metrics:", len(metrics), "bytes")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1440, "height": 1000}, color_scheme="light")
        page = context.new_page()
        problems, hosts = [], set()
        page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(server["url"])
        page.wait_for_selector("#link.live")
        assert "token" not in page.url, page.url
        cookies = context.cookies()
        assert [(one["httpOnly"], one["sameSite"]) for one in cookies] == [(True, "Strict")], cookies
        page.wait_for_selector("#ranks .pill.running")
        page.wait_for_selector("#timeline canvas")
        assert page.locator("#memory .track").count() >= 2
        assert page.locator("#ranks tbody tr").count() == 2
        assert page.locator("#config tbody tr").count() > 20
        step = lambda: int(page.locator("#tiles .tile b").nth(1).inner_text().replace(",", ""))
        delays = []
        for _ in range(5):
            shown = step()
            written = steps(folder / "first")
            wait("a step more", 30, lambda: steps(folder / "first") > written + 1)
            delays.append(wait("the page follows", 5, lambda: step() > shown))
        print("the page follows a step within", f"{max(delays):.2f} s")
        box = page.locator("#large canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
        page.wait_for_selector("#large .tip:not([hidden])")
        print("values at the pointer:", page.locator("#large .tip").inner_text().replace("\n", " · "))
        page.screenshot(path=SHOTS / "web-light.png")
        page.mouse.move(5, 5)
        page.screenshot(path=SHOTS / "web-light-whole.png", full_page=True)
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(700)
        page.screenshot(path=SHOTS / "web-dark-whole.png", full_page=True)
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_timeout(700)
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"the page is {overflow} px wider than a phone"
        page.screenshot(path=SHOTS / "web-phone.png")
        page.set_viewport_size({"width": 1440, "height": 1000})
        page.emulate_media(color_scheme="light")
        ranks = [rank["pid"] for rank in json.loads((folder / "first/status.json").read_text())["ranks"]]
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        page.wait_for_selector("#ranks .pill.dead", timeout=6000)
        print(f"a killed rank is red after {time.monotonic() - killed:.2f} s")
        page.wait_for_timeout(4000)
        page.screenshot(path=SHOTS / "web-failed.png")
        assert hosts == {base.split("/")[2]}, hosts
        assert not problems, problems
        print("no error on the console, no request to another host")
        browser.close()


if __name__ == "__main__":
    main()
