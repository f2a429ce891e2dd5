// A line over the last minutes, as SVG. Knows numbers and their unit only.

const MOST = 120; // points: two minutes, one a second
const WIDTH = 120;
const HEIGHT = 40;
const NAMESPACE = "http://www.w3.org/2000/svg";

export class Chart {
  // `top`: of the axis, where it is known; otherwise the largest value.
  constructor(svg, { unit, top = null }) {
    this.svg = svg;
    this.unit = unit;
    this.top = top;
    this.values = [];
    this.title = svg.getAttribute("aria-label");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    this.area = svg.appendChild(document.createElementNS(NAMESPACE, "path"));
    this.area.setAttribute("class", "area");
    this.line = svg.appendChild(document.createElementNS(NAMESPACE, "path"));
  }

  // `null` where there is nothing to say of this second: the line has a gap.
  add(value) {
    this.values.push(value);
    if (this.values.length > MOST) this.values.shift();
    const known = this.values.filter((each) => each !== null);
    const most = Math.max(...known, 1e-9);
    const lines = this.runs().map((run) => run.map((point) => this.place(point, most)));
    this.line.setAttribute("d", lines.map((line) => `M${line.join("L")}`).join(""));
    const filled = lines.map((line) => {
      const [left, right] = [line[0], line.at(-1)].map((point) => point.split(" ")[0]);
      return `M${left} ${HEIGHT}L${line.join("L")}L${right} ${HEIGHT}Z`;
    });
    this.area.setAttribute("d", filled.join(""));
    const now = value === null ? "nothing" : value.toFixed(1);
    const words = `${this.title}: now ${now}, at most ${most.toFixed(1)} ${this.unit}`;
    this.svg.setAttribute("aria-label", words);
  }

  // Stretches without a gap, each a list of [index, value].
  runs() {
    const found = [[]];
    this.values.forEach((value, index) => {
      if (value === null) found.push([]);
      else found.at(-1).push([index, value]);
    });
    return found.filter((run) => run.length > 0);
  }

  place([index, value], most) {
    const x = WIDTH - this.values.length + 1 + index;
    const top = this.top ?? most;
    return `${x} ${(HEIGHT - 2 - (value / top) * (HEIGHT - 4)).toFixed(2)}`;
  }
}
