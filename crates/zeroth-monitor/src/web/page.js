// The page: everything that comes from a run is set as text, never as markup.
(() => {
  const find = (id) => document.getElementById(id);
  let runs = [], selected = 0, shownTimeline = null, shownConfig = -1, settings = [];
  const PANELS = [
    ["loss", "Loss", true], ["lr", "Learning rate"], ["grad_norm", "Gradient norm"],
    ["tokens_per_second", "Tokens per second"], ["mfu", "MFU"],
  ];
  const charts = new Map();
  const timeline = new StepTimeline(find("timeline"));

  const duration = (seconds) => {
    const whole = Math.round(seconds), two = (value) => String(value).padStart(2, "0");
    if (whole < 60) return whole + "s";
    if (whole < 3600) return Math.floor(whole / 60) + "m " + two(whole % 60) + "s";
    if (whole < 86400) return Math.floor(whole / 3600) + "h " + two(Math.floor(whole / 60) % 60) + "m";
    return Math.floor(whole / 86400) + "d " + two(Math.floor(whole / 3600) % 24) + "h";
  };
  const ago = (time) => (time > 0 ? duration(Math.max(0, Date.now() / 1000 - time)) + " ago" : "–");
  const tone = (state) => (["failed", "lost"].includes(state) ? "bad" : ["stopped", "unknown", "stopped by a signal"].includes(state) ? "warn" : "good");
  const points = (run, name) => (run.curves.get(name) || { points: [] }).points;
  const last = (run, name) => { const all = points(run, name); return all.length ? all[all.length - 1][4] : null; };

  function table(heads, rows) {
    const made = element("table"), head = element("tr");
    for (const [title, isNumber] of heads) head.append(element("th", isNumber ? "num" : "", title));
    const top = element("thead"), body = element("tbody");
    top.append(head);
    for (const { cells, name } of rows) {
      const row = element("tr", name || "");
      cells.forEach((cell, at) => {
        const made = element("td", heads[at][1] ? "num" : heads[at][2] || "");
        if (cell instanceof Node) made.append(cell); else made.textContent = cell;
        row.append(made);
      });
      body.append(row);
    }
    made.append(top, body);
    return made;
  }

  function showRuns() {
    find("runs").replaceChildren(...runs.map((run, at) => {
      const button = element("button");
      button.type = "button";
      button.setAttribute("aria-pressed", String(at === selected));
      button.append(element("i", "swatch s" + (at % 6)), document.createTextNode(run.name + " · "), element("span", "state-" + tone(run.state), run.state));
      button.addEventListener("click", () => { selected = at; shownTimeline = null; shownConfig = -1; show(); });
      return button;
    }));
  }

  function tile(label, value, name, share) {
    const made = element("div", "tile");
    made.append(element("span", "", label), element("b", name || "", value));
    made.title = value;
    if (share !== undefined) {
      const bar = element("div", "bar"), fill = element("i");
      fill.style.width = Math.min(100, 100 * share) + "%";
      bar.append(fill);
      made.append(bar);
    }
    return made;
  }

  function showTiles(run) {
    const tiles = [tile("State", run.state, "state-" + tone(run.state))];
    const total = run.steps ? "Step of " + run.steps.toLocaleString("en") : "Step";
    tiles.push(tile(total, run.step.toLocaleString("en"), "", run.steps ? run.step / run.steps : undefined));
    for (const [name, label] of [["loss", "Loss"], ["eval_loss", "Eval loss"], ["lr", "Learning rate"], ["grad_norm", "Gradient norm"], ["tokens_per_second", "Tokens/s"], ["mfu", "MFU"]]) {
      const value = last(run, name);
      if (value !== null) tiles.push(tile(label, formatOf(name)(value)));
    }
    if (run.seconds_left !== null) tiles.push(tile("Time left", duration(run.seconds_left)));
    if (run.model) tiles.push(tile(run.device === "cuda" ? "Model on GPU" : "Model on CPU", run.model.split("/").pop()));
    if (run.garbage_lines) tiles.push(tile("Unreadable lines", String(run.garbage_lines), "state-warn"));
    if (run.problem) tiles.push(tile("Problem", run.problem, "state-bad"));
    find("tiles").replaceChildren(...tiles);
  }

  function showCharts(run) {
    const there = PANELS.filter(([name]) => name === "loss" || runs.some((one) => points(one, name).length));
    for (const [name, title, isWide] of there) {
      if (!charts.has(name)) {
        charts.set(name, new Chart(title, isWide));
        find(isWide ? "large" : "small").append(charts.get(name).card);
      }
      const curves = [];
      if (runs.length > 1) {
        runs.forEach((one, at) => {
          curves.push({ label: one.name, name, number: at, points: points(one, name) });
          if (name === "loss" && at === selected) curves.push({ label: one.name + " eval", name, number: at, points: points(one, "eval_loss"), dashed: true });
        });
      } else {
        curves.push({ label: name === "loss" ? "train" : "", name, number: 0, points: points(run, name) });
        if (name === "loss") {
          curves.push({ label: "eval", name, number: 1, points: points(run, "eval_loss") });
          let number = 2;
          for (const part of run.curves.keys()) {
            if (part.endsWith("_loss") && part !== "eval_loss") curves.push({ label: part.replace("_loss", ""), name, number: number++, points: points(run, part), dashed: true });
          }
        }
      }
      charts.get(name).show(curves, run.seams);
    }
  }

  function showRanks(run) {
    const rows = run.ranks.map((rank) => ({
      name: ["dead", "silent"].includes(rank.health) ? "bad" : "",
      cells: [
        String(rank.rank), element("span", "pill " + rank.health, rank.health), rank.step.toLocaleString("en"), rank.op || "–",
        rank.heartbeat_age === null || run.ended ? "–" : rank.heartbeat_age.toFixed(1) + " s",
        rank.pss_bytes === null ? "–" : bytes(rank.pss_bytes), rank.gpu_bytes === null ? "–" : bytes(rank.gpu_bytes),
        rank.pid === null ? "–" : String(rank.pid), rank.host,
      ],
    }));
    const heads = [["rank", true], ["state"], ["step", true], ["op", false, "mono"], ["heartbeat", true], ["host memory", true], ["GPU", true], ["pid", true], ["host"]];
    find("ranks").replaceChildren(rows.length ? table(heads, rows) : element("div", "empty", "no status of ranks yet"));
  }

  function memoryBar(title, used, parts, planned) {
    const made = element("div", "mem"), head = element("header");
    head.append(element("b", "", title), element("span", "", (used === null ? "–" : bytes(used) + " in use") + " · " + bytes(planned) + " planned"));
    const most = Math.max(planned, used || 0, 1);
    const plan = element("div", "track"), measured = element("div", "track"), keys = element("div", "keys");
    parts.filter(([, size]) => size > 0).forEach(([name, size], at) => {
      const part = element("i", "s" + (at % 6));
      part.style.width = (100 * size) / most + "%";
      plan.append(part);
      const key = element("span");
      key.append(element("i", "swatch s" + (at % 6)), document.createTextNode(name + " " + bytes(size)));
      keys.append(key);
    });
    plan.title = "planned";
    measured.title = "in use";
    if (used !== null) {
      const part = element("i");
      part.style.width = (100 * used) / most + "%";
      part.style.background = used > planned * 1.05 ? colour("--warn") : colour("--soft");
      measured.append(part);
    }
    made.append(head, plan, measured, keys);
    return made;
  }

  function showMemory(run) {
    const most = (name) => run.ranks.reduce((most, rank) => (rank[name] === null ? most : Math.max(most || 0, rank[name])), null);
    const tier = (name) => run.planned.find((tier) => tier.tier === name) || { categories: [], total: 0 };
    const device = tier("device"), host = tier("host"), overhead = run.overhead || 0, bars = [];
    if (run.device === "cuda") {
      bars.push(memoryBar("GPU", most("gpu_bytes"), device.categories, device.total));
      bars.push(memoryBar("Host", most("pss_bytes"), [...host.categories, ["overhead", overhead]], host.total + overhead));
    } else {
      const parts = new Map();
      for (const [name, size] of [...device.categories, ...host.categories, ["overhead", overhead]]) parts.set(name, (parts.get(name) || 0) + size);
      bars.push(memoryBar("Host", most("pss_bytes"), [...parts], device.total + host.total + overhead));
    }
    const planned = run.planned.length || overhead;
    find("memory").replaceChildren(...(planned ? bars : [element("div", "empty", "the run has no plan")]));
  }

  function showEvents(run) {
    const rows = run.events.map((event) => ({
      name: event.event === "rank_lost" ? "bad" : "",
      cells: [ago(event.time), element("span", "pill " + event.event.replace(/[^a-z_]/g, ""), event.event), event.step === null ? "" : event.step.toLocaleString("en"), event.detail],
    }));
    find("events").replaceChildren(rows.length ? table([["when"], ["event"], ["step", true], ["", false, "wrap"]], rows) : element("div", "empty", "nothing has happened yet"));
    const saved = run.checkpoints.map((one) => ({ cells: [one.step.toLocaleString("en"), bytes(one.bytes), ago(one.time)] }));
    find("checkpoints").replaceChildren(saved.length ? table([["step", true], ["size", true], ["when"]], saved) : element("div", "empty", "none yet: a file save-now in the run folder asks for one"));
  }

  async function get(path) {
    const answer = await fetch(path, { credentials: "same-origin", referrerPolicy: "no-referrer" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    return answer.json();
  }

  function showTimelines(run) {
    const select = find("timelines"), known = [...select.options].map((option) => option.value);
    if (known.join() !== run.timelines.join()) {
      select.replaceChildren(...run.timelines.map((name) => {
        const option = element("option", "", name.replace(".trace.json", "").replace("-", " "));
        option.value = name;
        return option;
      }));
    }
    select.hidden = !run.timelines.length;
    if (!run.timelines.length) {
      if (shownTimeline !== "") timeline.message("none yet: a file trace-now in the run folder asks for one");
      shownTimeline = "";
      find("timeline-note").textContent = "";
      return;
    }
    const name = run.timelines.includes(select.value) ? select.value : run.timelines[0];
    if (shownTimeline === selected + name) return;
    shownTimeline = selected + name;
    get("/api/timeline?run=" + selected + "&name=" + name).then((data) => {
      timeline.show(data);
      find("timeline-note").textContent = (data.length / 1000).toFixed(2) + " ms" + (data.left_out ? " · the shortest " + data.left_out + " are left out" : "");
    }, (error) => timeline.message(error.message));
  }

  function showSettings() {
    const wanted = find("filter").value.toLowerCase();
    const found = settings.filter((one) => one.key.toLowerCase().includes(wanted) || one.value.toLowerCase().includes(wanted));
    found.sort((one, other) => (one.origin === "default") - (other.origin === "default"));
    const rows = found.map((one) => ({ name: one.origin === "default" ? "default" : "", cells: [one.key, one.value, one.origin] }));
    find("config").replaceChildren(rows.length ? table([["key", false, "mono"], ["value", false, "mono wrap"], ["origin", false, "wrap"]], rows) : element("div", "empty", "no key"));
  }

  function showConfig() {
    if (shownConfig === selected) return;
    shownConfig = selected;
    get("/api/config?run=" + selected).then((found) => { settings = found; showSettings(); }, (error) => find("config").replaceChildren(element("div", "empty", error.message)));
  }

  function show() {
    const run = runs[selected];
    if (!run) return;
    document.title = (run.steps ? Math.floor((100 * run.step) / run.steps) + " % · " : "") + run.name + " · zeroth";
    showRuns();
    showTiles(run);
    showCharts(run);
    showRanks(run);
    showMemory(run);
    showEvents(run);
    showTimelines(run);
    showConfig();
  }

  function take(message) {
    runs = message.runs.map((fresh, at) => {
      const curves = message.whole ? new Map(fresh.curves.map((curve) => [curve.name, curve])) : runs[at].curves;
      for (const [name, added] of fresh.new || []) {
        if (!curves.has(name)) curves.set(name, { name, points: [] });
        const curve = curves.get(name);
        curve.points = appended(curve.points, added);
      }
      return { ...fresh, curves };
    });
    show();
  }

  function listen() {
    const link = find("link"), source = new EventSource("/api/stream");
    const say = (text, name) => { link.textContent = text; link.className = "link " + name; };
    source.onopen = () => say("live", "live");
    source.onmessage = (event) => take(JSON.parse(event.data));
    source.onerror = () => say(source.readyState === 2 ? "the monitor has ended" : "reconnecting", "lost");
  }

  find("theme").addEventListener("click", () => {
    const root = document.documentElement, isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    show();
    timeline.draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { show(); timeline.draw(); });
  find("timelines").addEventListener("change", () => { shownTimeline = null; show(); });
  find("filter").addEventListener("input", showSettings);
  listen();
})();
