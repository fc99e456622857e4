// The timeline of a step: a lane for each queue of each rank.
class StepTimeline {
  constructor(parent) {
    this.parent = parent;
    this.data = null;
    this.plot = element("div", "plot");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "timeline of a step");
    this.tip = element("div", "tip");
    this.tip.hidden = true;
    this.plot.append(this.canvas, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  show(data) {
    this.data = data;
    this.parent.replaceChildren(this.plot);
    this.draw();
  }

  message(text) {
    this.data = null;
    this.parent.replaceChildren(element("div", "empty", text));
  }

  geometry() {
    const edge = this.plot.clientWidth < 500 ? 84 : 130;
    return { edge, row: 22, width: this.plot.clientWidth - edge - 10 };
  }

  draw() {
    if (!this.data || !this.plot.clientWidth) return;
    const { edge, row, width } = this.geometry();
    const height = this.data.lanes.length * row + 26;
    if (this.plot.style.height !== height + "px") this.plot.style.height = height + "px";
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.plot.clientWidth * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.plot.clientWidth, height);
    pen.font = "11px system-ui, sans-serif";
    const x = (time) => edge + (time / (this.data.length || 1)) * width;
    for (const tick of ticks(0, this.data.length, Math.max(1, Math.floor(width / 100)))) {
      pen.strokeStyle = colour("--grid");
      pen.beginPath(); pen.moveTo(x(tick), 0); pen.lineTo(x(tick), height - 22); pen.stroke();
      pen.fillStyle = colour("--soft");
      pen.textAlign = "center";
      const label = this.data.length >= 2000 ? figure(tick / 1000) + " ms" : figure(tick) + " µs";
      pen.fillText(label, Math.min(x(tick), edge + width - 14), height - 6);
    }
    pen.textBaseline = "middle";
    this.data.lanes.forEach((lane, at) => {
      const top = at * row;
      pen.textAlign = "right";
      pen.fillStyle = colour("--soft");
      pen.fillText("rank " + lane.rank + " · " + lane.queue, edge - 8, top + row / 2, edge - 12);
      for (const [begin, duration, name] of lane.spans) {
        pen.fillStyle = curveColour(name);
        pen.fillRect(x(begin), top + 3, Math.max((duration / (this.data.length || 1)) * width, 0.7), row - 6);
      }
    });
    pen.textBaseline = "alphabetic";
  }

  point(event) {
    if (!this.data) return;
    const { edge, row, width } = this.geometry();
    const box = this.canvas.getBoundingClientRect();
    const at = Math.floor((event.clientY - box.top) / row);
    const time = ((event.clientX - box.left - edge) / width) * this.data.length;
    const lane = this.data.lanes[at], slack = this.data.length / width;
    const span = lane && lane.spans.find(([begin, duration]) => time >= begin - slack && time <= begin + duration + slack);
    this.tip.hidden = !span;
    if (!span) return;
    this.tip.textContent = this.data.names[span[2]] + " · " + (span[1] >= 1000 ? figure(span[1] / 1000) + " ms" : figure(span[1]) + " µs");
    this.tip.style.top = at * row + row + "px";
    const place = event.clientX - box.left + 10;
    this.tip.style.left = Math.max(0, Math.min(place, box.width - this.tip.offsetWidth)) + "px";
  }
}
