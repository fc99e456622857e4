// Checks the ticks of axes over extreme and random ranges. Usage: node ticks.js chart.js
"use strict";
const assert = require("node:assert");
const fs = require("node:fs");
const vm = require("node:vm");

const context = vm.createContext({ ranges: [] });
vm.runInContext(fs.readFileSync(process.argv[2], "utf8"), context);

// A finite number of any magnitude, from its bits.
const words = new Uint32Array(2), number = new Float64Array(words.buffer);
let state = 42n;
function word() {
  state = (state * 6364136223846793005n + 1442695040888963407n) & 0xffffffffffffffffn;
  return Number(state >> 32n);
}
function any() {
  do { words[0] = word(); words[1] = word(); } while (!Number.isFinite(number[0]));
  return number[0];
}
// The next larger number.
function above(value) {
  if (value === 0) return Number.MIN_VALUE;
  number[0] = value;
  let bits = (BigInt(words[1]) << 32n) | BigInt(words[0]);
  bits += value > 0 ? 1n : -1n;
  words[0] = Number(bits & 0xffffffffn);
  words[1] = Number(bits >> 32n);
  return number[0];
}

const ranges = [
  [0, 0], [0, 1], [-1, 1], [0, 10], [0, Number.MIN_VALUE], [1, above(1)], [0.1, above(0.1)], [-above(3), -3],
  [2 ** 53, 2 ** 53 + 2], [-Number.MAX_VALUE, Number.MAX_VALUE], [0, Infinity], [-Infinity, Infinity], [NaN, 1], [5, 4],
];
for (let at = 0; at < 2000; at += 1) {
  const value = any(), other = any();
  if (Number.isFinite(above(value))) ranges.push([value, above(value)]);
  ranges.push(value < other ? [value, other] : [other, value]);
  const near = value + Math.abs(value) * 2 ** -(word() % 53);
  if (Number.isFinite(near)) ranges.push([value, near]);
}
for (const [low, high] of ranges) {
  for (const count of [1, 3, 17]) {
    Object.assign(context, { low, high, count });
    const what = `ticks(${low}, ${high}, ${count})`;
    // A loop that does not end is stopped, and an error.
    const found = Array.from(vm.runInContext("ticks(low, high, count)", context, { timeout: 60000 }));
    assert(found.length >= 1 && found.length <= count + 2, `${what}: ${found.length} ticks`);
    assert(found.every((tick, at) => at === 0 || tick > found[at - 1]), `${what} stands still: ${found}`);
  }
}
Object.assign(context, { low: 0, high: 1, count: 4 });
assert.deepStrictEqual(Array.from(vm.runInContext("ticks(low, high, count)", context)), [0, 0.25, 0.5, 0.75, 1]);
console.log(ranges.length + " ranges");
