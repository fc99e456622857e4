"use strict";
// Curves on a canvas: an envelope of minimum and maximum with the last value as a line, axes with round numbers, and the
// values at the pointer.
const MOST_POINTS = 3000;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const curveColour = (number) => colour("--c" + (number % 6));

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function figure(value) {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return "–";
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return (unit && value < 100 ? value.toPrecision(3) : Math.round(value)) + " " + units[unit];
}

const FORMATS = {
  mfu: (value) => (100 * value).toFixed(1) + " %",
  lr: (value) => (value === 0 ? "0" : value.toExponential(2)),
  bytes: bytes,
};
const formatOf = (name) => FORMATS[name.endsWith("_bytes_peak") ? "bytes" : name] || figure;

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count) {
  const parts = Math.max(count, 1), raw = high / parts - low / parts;
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * power).find((step) => step >= raw);
  const first = Math.ceil(low / step), found = [];
  // Counted: where a step is below the precision of the values, a sum of steps stands still.
  for (let number = 0; number <= parts + 1; number += 1) {
    const at = (first + number) * step;
    if (!(at <= high + step * 1e-9)) break;
    if (!found.length || at > found[found.length - 1]) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found.length ? found : [low];
}

// Points are [first step, last step, minimum, maximum, last value].
function appended(points, fresh) {
  for (const [step, value] of fresh) points.push([step, step, value, value, value]);
  if (points.length <= MOST_POINTS) return points;
  const few = [];
  for (let at = 0; at < points.length; at += 2) {
    const one = points[at], two = points[at + 1] || one;
    few.push([one[0], two[1], Math.min(one[2], two[2]), Math.max(one[3], two[3]), two[4]]);
  }
  return few;
}

class Chart {
  constructor(title, isWide) {
    this.card = element("article", isWide ? "card wide" : "card");
    this.head = element("h2", "", title);
    this.legend = element("span", "legend");
    this.head.append(this.legend);
    this.plot = element("div", "plot");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", title + " over steps");
    this.tip = element("div", "tip");
    this.tip.hidden = true;
    this.plot.append(this.canvas, this.tip);
    this.card.append(this.head, this.plot);
    this.curves = [];
    this.seams = [];
    this.pointer = null;
    const point = (event) => { this.pointer = event.clientX - this.canvas.getBoundingClientRect().left; this.draw(); };
    this.canvas.addEventListener("pointermove", point);
    this.canvas.addEventListener("pointerdown", point);
    this.canvas.addEventListener("pointerleave", () => { this.pointer = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // Curves are {label, name, number, points, dashed}.
  show(curves, seams) {
    this.curves = curves.filter((curve) => curve.points.length);
    this.seams = seams;
    this.legend.replaceChildren(...this.curves.map((curve) => {
      const key = element("span");
      key.append(element("i", "swatch s" + (curve.number % 6)));
      const last = curve.points[curve.points.length - 1][4];
      key.append(document.createTextNode(curve.label + " " + formatOf(curve.name)(last)));
      return key;
    }));
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    if (!this.curves.length) {
      pen.fillStyle = colour("--soft");
      pen.textAlign = "center";
      pen.fillText("no steps yet", width / 2, height / 2);
      return;
    }
    const format = formatOf(this.curves[0].name);
    let left = Infinity, right = -Infinity, low = Infinity, high = -Infinity;
    for (const { points } of this.curves) {
      left = Math.min(left, points[0][0]);
      right = Math.max(right, points[points.length - 1][1]);
      for (const point of points) { low = Math.min(low, point[2]); high = Math.max(high, point[3]); }
    }
    if (right <= left) { left -= 0.5; right += 0.5; }
    const pad = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
    const floor = low >= 0 && low - pad < 0 ? 0 : low - pad;
    const ceiling = high + pad;
    const yTicks = ticks(floor, ceiling, Math.max(3, Math.floor(height / 45)));
    const labels = yTicks.map(format);
    const edge = Math.ceil(Math.max(...labels.map((label) => pen.measureText(label).width))) + 10;
    const box = { x: edge, y: 6, w: width - edge - 8, h: height - 28 };
    const x = (step) => box.x + ((step - left) / (right - left)) * box.w;
    const y = (value) => box.y + (1 - (value - floor) / (ceiling - floor)) * box.h;
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    yTicks.forEach((tick, at) => {
      pen.strokeStyle = colour("--grid");
      pen.beginPath(); pen.moveTo(box.x, Math.round(y(tick)) + 0.5); pen.lineTo(box.x + box.w, Math.round(y(tick)) + 0.5); pen.stroke();
      pen.fillStyle = colour("--soft");
      pen.fillText(labels[at], box.x - 6, y(tick));
    });
    pen.textBaseline = "alphabetic";
    const xTicks = ticks(left, right, Math.max(2, Math.floor(box.w / (box.w < 400 ? 45 : 70)))).filter((tick) => Number.isInteger(tick));
    for (const tick of xTicks) {
      const label = tick.toLocaleString("en"), half = pen.measureText(label).width / 2;
      pen.textAlign = "center";
      pen.fillText(label, Math.min(Math.max(x(tick), box.x + half), box.x + box.w - half), height - 6);
    }
    pen.setLineDash([2, 4]);
    pen.strokeStyle = colour("--soft");
    for (const seam of this.seams.filter((seam) => seam > left && seam < right)) {
      pen.beginPath(); pen.moveTo(x(seam), box.y); pen.lineTo(x(seam), box.y + box.h); pen.stroke();
      pen.textAlign = "left";
      pen.fillText("resumed", x(seam) + 4, box.y + 10);
    }
    pen.setLineDash([]);
    for (const curve of this.curves) {
      const ink = curveColour(curve.number), points = curve.points;
      pen.fillStyle = ink;
      pen.globalAlpha = 0.16;
      pen.beginPath();
      points.forEach((point, at) => (at ? pen.lineTo(x(point[0]), y(point[3])) : pen.moveTo(x(point[0]), y(point[3]))));
      for (let at = points.length - 1; at >= 0; at -= 1) pen.lineTo(x(points[at][0]), y(points[at][2]));
      pen.closePath();
      pen.fill();
      pen.globalAlpha = 1;
      pen.strokeStyle = ink;
      pen.lineWidth = 1.6;
      pen.lineJoin = "round";
      pen.setLineDash(curve.dashed ? [5, 4] : []);
      pen.beginPath();
      points.forEach((point, at) => (at ? pen.lineTo(x(point[1]), y(point[4])) : pen.moveTo(x(point[1]), y(point[4]))));
      pen.stroke();
      pen.setLineDash([]);
      if (points.length < 40) {
        for (const point of points) { pen.beginPath(); pen.arc(x(point[1]), y(point[4]), 2.2, 0, 7); pen.fill(); }
      }
    }
    this.hover(pen, box, x, y, left, right, format);
  }

  hover(pen, box, x, y, left, right, format) {
    if (this.pointer === null || this.pointer < box.x || this.pointer > box.x + box.w) { this.tip.hidden = true; return; }
    const wanted = left + ((this.pointer - box.x) / box.w) * (right - left);
    const rows = [];
    let step = null;
    for (const curve of this.curves) {
      let from = 0, to = curve.points.length - 1;
      while (from < to) { const middle = (from + to) >> 1; if (curve.points[middle][1] < wanted) from = middle + 1; else to = middle; }
      const before = curve.points[from - 1], at = curve.points[from];
      const point = before && wanted - before[1] < at[1] - wanted ? before : at;
      if (step === null) step = point[1];
      rows.push([curve, point]);
      pen.fillStyle = curveColour(curve.number);
      pen.beginPath(); pen.arc(x(point[1]), y(point[4]), 3.5, 0, 7); pen.fill();
    }
    pen.strokeStyle = colour("--soft");
    pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(x(step), box.y); pen.lineTo(x(step), box.y + box.h); pen.stroke();
    this.tip.replaceChildren(element("div", "", "step " + step.toLocaleString("en")), ...rows.map(([curve, point]) => {
      const row = element("div");
      row.append(element("i", "swatch s" + (curve.number % 6)));
      const spread = point[0] === point[1] ? "" : "  (" + format(point[2]) + " to " + format(point[3]) + ")";
      row.append(document.createTextNode(curve.label + " " + format(point[4]) + spread));
      return row;
    }));
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth, place = x(step) + 12;
    this.tip.style.left = Math.max(0, place + wide > box.x + box.w ? x(step) - wide - 12 : place) + "px";
  }
}
