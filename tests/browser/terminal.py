#!/usr/bin/env python3
"""Captures the terminal view in tmux: 40, 80 and 160 columns, resized while it runs, without colour, and left by q and
by a signal with the terminal restored. Writes the captures as text, and one as a picture (by Chromium).

    apt-get install tmux chromium
    python3 -m venv venv && venv/bin/pip install playwright
    venv/bin/python tests/browser/terminal.py target/release/zeroth RUN CAPTURES
"""

import html
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

BINARY, RUN, CAPTURES = os.path.abspath(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
SESSION = f"zeroth-monitor-{os.getpid()}"
COLOURS = {30: "#15181f", 31: "#f87171", 32: "#4ade80", 33: "#fbbf24", 34: "#6ea8ff", 35: "#c4a1ff", 36: "#67e8f9",
           37: "#e7eaf0", 90: "#7b8496", 91: "#f9a8d4"}


def tmux(*arguments):
    return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True).stdout


def capture(*more):
    return tmux("capture-pane", "-p", "-t", SESSION, *more)


def wait(what, is_so, seconds=20):
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < seconds, f"{what}:\n{capture()}"
        time.sleep(0.1)


def start(columns, rows, variables=""):
    tmux("new-session", "-d", "-s", SESSION, "-x", str(columns), "-y", str(rows), "bash --norc --noprofile")
    tmux("send-keys", "-t", SESSION, f"PS1='$ '; env -u NO_COLOR {variables} {BINARY} monitor {RUN}", "Enter")
    wait("the view is drawn", lambda: "loss" in capture() and "q" in capture().rstrip().splitlines()[-1])


def resize(columns, rows):
    tmux("resize-window", "-t", SESSION, "-x", str(columns), "-y", str(rows))
    time.sleep(1.2)


def restored():
    wait("the shell is back", lambda: capture().rstrip().endswith("$"))
    tmux("send-keys", "-t", SESSION, "stty -a | grep -o -w -e '-\\?echo' -e '-\\?icanon'", "Enter")
    wait("the terminal echoes", lambda: re.search(r"^icanon$", capture(), re.M) and re.search(r"^echo$", capture(), re.M))
    tmux("kill-session", "-t", SESSION)
    # The server ends with its last session.
    time.sleep(1)


def cells(text):
    """Glyphs of a fallback font may have another width: each gets a cell of its own."""
    return "".join(html.escape(c) if c.isascii() else f'<b style="display:inline-block;width:1ch;overflow:hidden;vertical-align:top;font-weight:400">{c}</b>'
                   for c in text)


def picture(ansi, path):
    spans, style = [], {}
    for part in re.split(r"(\x1b\[[0-9;]*m)", ansi):
        found = re.fullmatch(r"\x1b\[([0-9;]*)m", part)
        if not found:
            rules = []
            back, front = ("#15181f", style.get("fg", "#e7eaf0"))
            if style.get("reverse"):
                back, front = front, back
                rules.append(f"background:{back}")
            rules.append(f"color:{front}")
            if style.get("bold"):
                rules.append("font-weight:700")
            spans.append(f'<span style="{";".join(rules)}">{cells(part)}</span>')
            continue
        palette = re.fullmatch(r"38;5;(\d+)", found.group(1))
        if palette:
            number = int(palette.group(1))
            style["fg"] = COLOURS.get(30 + number if number < 8 else 82 + number, "#e7eaf0")
            continue
        for code in [int(code or 0) for code in found.group(1).split(";")]:
            if code == 0:
                style = {}
            elif code == 1:
                style["bold"] = True
            elif code == 7:
                style["reverse"] = True
            elif code == 39:
                style.pop("fg", None)
            elif code in COLOURS:
                style["fg"] = COLOURS[code]
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 800})
        page.set_content('<body style="margin:0;background:#15181f"><pre style="margin:0;padding:14px;display:inline-block;'
                         "font:13px/1.18 'DejaVu Sans Mono',monospace\">" + "".join(spans) + "</pre>")
        page.locator("pre").screenshot(path=path)
        browser.close()


def main():
    CAPTURES.mkdir(parents=True, exist_ok=True)
    start(160, 45)
    time.sleep(1)
    (CAPTURES / "160.txt").write_text(capture())
    picture(capture("-e"), CAPTURES / "terminal.png")
    for columns, rows in ((80, 24), (40, 24), (120, 40), (20, 6), (80, 30)):
        resize(columns, rows)
        text = capture()
        (CAPTURES / f"{columns}.txt").write_text(text)
        assert all(len(line) <= columns for line in text.splitlines()), text
    for key, wanted in (("2", "memory per rank"), ("3", "checkpoints"), ("4", "config"), ("1", "loss")):
        tmux("send-keys", "-t", SESSION, key)
        wait(f"key {key}", lambda: wanted in capture())
        (CAPTURES / f"tab-{key}.txt").write_text(capture())
    tmux("send-keys", "-t", SESSION, "q")
    restored()
    start(80, 24, "NO_COLOR=1")
    coloured = [code for code in re.findall(r"\x1b\[([0-9;]*)m", capture("-e")) if any(3 <= int(part or 0) // 10 <= 4 and part not in ("39", "49") for part in code.split(";"))]
    assert not coloured, coloured
    (CAPTURES / "no-colour.txt").write_text(capture())
    shell = tmux("display-message", "-p", "-t", SESSION, "#{pane_pid}").strip()
    view = subprocess.run(["pgrep", "-P", shell], check=True, capture_output=True, text=True).stdout.split()[0]
    os.kill(int(view), signal.SIGTERM)
    restored()
    print("captures in", CAPTURES)


if __name__ == "__main__":
    main()
