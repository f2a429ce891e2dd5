// Asks `/hotset/live` once a second and shows what it says. Makes rates of two answers.

import { Chart } from "./chart.js";
import { startChat } from "./chat.js";
import { HeatPicture } from "./heat.js";
import { ask, keepKey } from "./server.js";

const POLL_MS = 1000;
const RETRY_MS = 3000;
const GIB = 2 ** 30;

const at = (id) => document.getElementById(id);
const put = (id, text) => { at(id).textContent = text; };
const grouped = (number) => number.toLocaleString("en");
const gib = (bytes) => (bytes / GIB >= 10 ? (bytes / GIB).toFixed(1) : (bytes / GIB).toFixed(2));
const brief = (number) => (number >= 100 ? number.toFixed(0) : number.toFixed(1));

const speedChart = new Chart(at("speed-chart"), { unit: "tokens per second" });
const hitsChart = new Chart(at("hits-chart"), { unit: "percent", top: 100 });
const heat = new HeatPicture(at("heat"), { note: at("heat-note"), cell: at("heat-cell") });

let earlier = null;

// `live`: whether the figures on the page are of now.
function setStatus(word, { live = false } = {}) {
  put("status", word);
  at("status").dataset.word = word;
  document.body.classList.toggle("stale", !live);
}

// A bar from 0 to 1; `null` hides it. More than 1 is full, in another colour.
function setMeter(id, share) {
  const meter = at(id);
  meter.hidden = share === null;
  if (share === null) return;
  const percent = Math.round(100 * Math.min(1, share));
  meter.setAttribute("aria-valuenow", String(percent));
  meter.classList.toggle("over", share > 1);
  meter.firstElementChild.style.width = `${percent}%`;
}

function showMemory(id, peak, planned, absent) {
  const known = Boolean(peak && planned);
  put(id, known ? `${gib(peak)} GiB` : absent);
  put(`${id}-note`, known ? `at most, of ${gib(planned)} GiB planned` : "");
  setMeter(`${id}-meter`, known ? peak / planned : null);
}

function showLink(rate, limit) {
  setMeter("link-meter", limit === undefined ? null : rate / limit);
  if (limit === undefined) {
    put("link", "\u2013");
    put("link-note", "no GPU, or its limit is not known");
    return;
  }
  put("link", `${brief(rate)} GB/s`);
  put("link-note", `of ${brief(limit)} GB/s that it can carry`);
}

function showTotals(live) {
  document.title = `${live.model} \u00b7 hotset`;
  put("model", live.model);
  setStatus(live.status, { live: true });
  put("running", grouped(live.requests.running));
  const ended = Object.values(live.requests.finished).reduce((sum, count) => sum + count, 0);
  put("queue", `running; ${grouped(live.requests.waiting)} waiting, ${grouped(ended)} ended`);
  const gauges = live.gauges;
  showMemory("device", gauges.device_peak_bytes, gauges.device_planned_bytes, "no GPU");
  showMemory("host", gauges.host_peak_bytes, gauges.host_planned_bytes, "\u2013");
  const blocks = live.kv_blocks;
  setMeter("cache-meter", blocks.all ? blocks.used / blocks.all : null);
  put("cache", blocks.all ? `${Math.round((100 * blocks.used) / blocks.all)}%` : "\u2013");
  put("cache-note", blocks.all ? `of ${grouped(blocks.all)} blocks` : "the model has its own");
}

// Tokens so far and, where rates of the machine are known, the share of the speed of light that the
// decode steps of these seconds came to; `light` is what it was before them.
function showGenerated(live, seconds, light) {
  const reached = live.decode.light_seconds === null ? 0 : live.decode.light_seconds - light;
  const percent = seconds > 0 ? Math.round((100 * reached) / seconds) : 0;
  const words = percent > 0 ? `; steps at ${percent}% of the speed of light` : "";
  put("speed-note", `${grouped(live.tokens.generated)} tokens since the start${words}`);
}

// What happened between two answers, `seconds` apart.
function showRates(before, live, seconds) {
  const speed = (live.tokens.generated - before.tokens.generated) / seconds;
  put("speed", brief(speed));
  showGenerated(live, live.decode.seconds - before.decode.seconds, before.decode.light_seconds);
  speedChart.add(speed);

  const used = live.experts.used - before.experts.used;
  const hits = live.experts.hits - before.experts.hits;
  const rate = used > 0 ? (100 * hits) / used : null;
  if (rate !== null) put("hits", `${rate.toFixed(1)}%`);
  hitsChart.add(rate);

  const link = (live.experts.link_bytes - before.experts.link_bytes) / seconds / 1e9;
  showLink(link, live.gauges.link_limit_gbps);

  const begun = live.first_tokens.num - before.first_tokens.num;
  if (begun > 0) showFirst((live.first_tokens.seconds - before.first_tokens.seconds) / begun);
}

function showFirst(seconds) {
  put("first", seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`);
}

function showSinceStart(live) {
  const { used, hits } = live.experts;
  if (used > 0) put("hits", `${((100 * hits) / used).toFixed(1)}%`);
  if (live.first_tokens.num > 0) showFirst(live.first_tokens.seconds / live.first_tokens.num);
  showGenerated(live, live.decode.seconds, 0);
  showLink(0, live.gauges.link_limit_gbps);
}

function show(live) {
  // A clock that went back is another server's.
  if (earlier !== null && live.clock < earlier.clock) earlier = null;
  showTotals(live);
  if (earlier === null) showSinceStart(live);
  else if (live.clock > earlier.clock) showRates(earlier, live, live.clock - earlier.clock);
  if (earlier === null || live.clock > earlier.clock) heat.show(live.heat);
  earlier = live;
}

async function look() {
  const answer = await ask("hotset/live");
  at("key-form").hidden = answer.status !== 401;
  if (answer.ok) show(await answer.json());
  else setStatus(answer.status === 401 ? "needs a key" : `error ${answer.status}`);
}

async function poll() {
  let wait = POLL_MS;
  try {
    if (!document.hidden) await look();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // what `fetch` makes of a lost connection
    setStatus("not reachable");
    wait = RETRY_MS;
  } finally {
    setTimeout(poll, wait);
  }
}

function startTheme() {
  const root = document.documentElement;
  const kept = localStorage.getItem("theme");
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  at("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const next = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
    root.dataset.theme = next;
    localStorage.setItem("theme", next);
    heat.draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => heat.draw());
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(at("key").value);
  at("key").value = "";
});

startTheme();
startChat({ model: () => earlier?.model ?? null });
poll();
