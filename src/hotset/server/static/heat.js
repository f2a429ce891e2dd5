// Layers x experts on a canvas: who has a slot, and who was used, fading over a few seconds.

// Bits of a digit of `heat.layers`, as server/live.py writes them.
const RESIDENT = 1;
const HIT = 2;
const MISSED = 4;

// Share of a use's colour that is left after each picture; without motion there is only the latest.
const FADE = 0.6;
const LEAST_CELL = 3; // CSS pixels; wider models scroll
const MOST_CELL = 22;
const LEAST_HEIGHT = 4;
const MOST_HEIGHT = 16;

const calm = matchMedia("(prefers-reduced-motion: reduce)");

function words(bits) {
  const used = [];
  if (bits & HIT) used.push("used from its slot");
  if (bits & MISSED) used.push("used over the link");
  return [bits & RESIDENT ? "has a slot" : "no slot", ...used].join(", ");
}

function ground(selector) {
  return getComputedStyle(document.querySelector(selector)).backgroundColor;
}

export class HeatPicture {
  // `note`: says the picture in words; `cell`: what is under the pointer.
  constructor(canvas, { note, cell }) {
    this.canvas = canvas;
    this.note = note;
    this.cell = cell;
    this.layers = [];
    this.glow = [];
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { cell.textContent = "\u00a0"; });
  }

  show({ seconds, layers }) {
    this.layers = layers.map((row) => Uint8Array.from(row, Number));
    const fade = calm.matches ? 0 : FADE;
    this.glow = this.layers.map((row, layer) => {
      const old = this.glow[layer]?.length === row.length ? this.glow[layer] : null;
      return Array.from(row, (bits, expert) => {
        if (bits & MISSED) return { missed: true, level: 1 };
        if (bits & HIT) return { missed: false, level: 1 };
        const before = old?.[expert];
        return before ? { missed: before.missed, level: before.level * fade } : null;
      });
    });
    this.say(seconds);
    this.draw();
  }

  say(seconds) {
    const count = { all: 0, resident: 0, hit: 0, missed: 0 };
    for (const row of this.layers) {
      for (const bits of row) {
        count.all += 1;
        if (bits & RESIDENT) count.resident += 1;
        if (bits & MISSED) count.missed += 1;
        else if (bits & HIT) count.hit += 1;
      }
    }
    const n = (number) => number.toLocaleString("en");
    this.note.textContent =
      `Layers from top to bottom, experts from left to right. ${n(count.resident)} of ` +
      `${n(count.all)} experts have a slot; in the last ${seconds.toFixed(1)} s ${n(count.hit)} ` +
      `were used from their slots and ${n(count.missed)} over the link.`;
  }

  size() {
    const width = this.canvas.parentElement.clientWidth;
    const across = Math.max(1, ...this.layers.map((row) => row.length));
    const cell = Math.min(MOST_CELL, Math.max(LEAST_CELL, width / across));
    return { across, cell, height: Math.min(MOST_HEIGHT, Math.max(LEAST_HEIGHT, cell)) };
  }

  draw() {
    if (!this.layers.length) return;
    const { across, cell, height } = this.size();
    const scale = devicePixelRatio;
    const css = { width: across * cell, height: this.layers.length * height };
    this.canvas.style.width = `${css.width}px`;
    this.canvas.style.height = `${css.height}px`;
    this.canvas.width = Math.round(css.width * scale);
    this.canvas.height = Math.round(css.height * scale);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const colours = {
      empty: getComputedStyle(this.canvas).color,
      resident: ground(".swatch.resident"),
      hit: ground(".swatch.hit"),
      missed: ground(".swatch.missed"),
    };
    const gap = Math.min(cell, height) >= 5 ? 1 : 0;
    this.layers.forEach((row, layer) => {
      row.forEach((bits, expert) => {
        const box = [expert * cell, layer * height, cell - gap, height - gap];
        context.fillStyle = bits & RESIDENT ? colours.resident : colours.empty;
        context.fillRect(...box);
        const glow = this.glow[layer][expert];
        if (glow && glow.level > 0.05) {
          context.globalAlpha = glow.level;
          context.fillStyle = glow.missed ? colours.missed : colours.hit;
          context.fillRect(...box);
          context.globalAlpha = 1;
        }
      });
    });
  }

  point(event) {
    const { cell, height } = this.size();
    const expert = Math.floor(event.offsetX / cell);
    const layer = Math.floor(event.offsetY / height);
    const bits = this.layers[layer]?.[expert];
    if (bits !== undefined) {
      this.cell.textContent = `Layer ${layer}, expert ${expert}: ${words(bits)}`;
    }
  }
}
