// Words and elements: numbers as people write them, nodes made without any markup from data.
const MEASURE = /(\d) (?=(?:%|×|[µmn]?s|min|h|d|[KMGT]?i?B(?:\/s)?|[kMGTP]?flop(?:\/s)?)(?![\w/]))/g;
const kept = text => String(text).replace(MEASURE, "$1\u00a0"); // a number stays with its unit
const el = (tag, props = {}, ...kids) => {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "class") made.className = value || "";
    else if (key === "text") made.textContent = tag === "p" ? kept(value) : value;
    else if (key === "style") made.style.cssText = value; // not an attribute: policies forbid those
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...kids.filter(k => k !== null && k !== undefined));
  return made;
};
const draw = (tag, props = {}, ...kids) => {
  const made = document.createElementNS(document.getElementById("blank").namespaceURI, tag);
  for (const [key, value] of Object.entries(props))
    if (key === "text") made.textContent = value;
    else if (key === "style") made.style.cssText = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  made.append(...kids);
  return made;
};
const short = v => (Math.abs(v) >= 1000 ? v.toFixed(0) : String(Number(v.toPrecision(3))));
const ALMOST = 0.9995; // of a unit: what three digits round to one
const plural = (n, what) => count(n) + " " + what + (n === 1 ? "" : "s");
const LONG = [
  [86400, "d", 3600, "h"],
  [3600, "h", 60, "min"],
  [60, "min", 1, "s"],
];
function duration(s) {
  // from two minutes on: two units that matter
  for (const [unit, name, smaller, rest] of LONG) {
    const left = Math.round(Math.abs(s) / smaller),
      whole = Math.floor(left / (unit / smaller)),
      more = left % (unit / smaller);
    if (whole) return (s < 0 ? "−" : "") + count(whole) + " " + name + (more ? " " + more + " " + rest : "");
  }
  return short(s) + " s";
}
const time = s => {
  if (!s) return "0 s";
  if (Math.abs(s) >= 120) return duration(s);
  for (const [unit, name] of [
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "µs"],
  ])
    if (Math.abs(s) >= ALMOST * unit) return short(s / unit) + " " + name;
  return short(s / 1e-9) + " ns";
};
const interval = (low, high) => {
  // the unit once where it is the same
  const [first, last] = [time(low), time(high)],
    [number, unit] = first.split(" ");
  return (last.split(" ")[1] === unit && first.split(" ").length === 2 ? number : first) + " to " + last;
};
const size = b => {
  for (const [unit, name] of [
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ])
    if (Math.abs(b) >= ALMOST * unit) return short(b / unit) + " " + name;
  return b.toFixed(0) + " B";
};
const rate = (v, unit) => {
  for (const [scale, name] of [
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (v >= ALMOST * scale) return short(v / scale) + " " + name + unit;
  return v ? short(v) + " " + unit : "";
};
const count = n => n.toLocaleString("en");
const share = x => (100 * x).toFixed(1) + " %";
const signed = x => (x < 0 ? "−" : "+") + (100 * Math.abs(x)).toFixed(1) + " %";
const cut = (text, most) =>
  text.length <= most
    ? text
    : text.slice(0, (most - 1) >> 1) + "…" + text.slice(text.length - (most - 1 - ((most - 1) >> 1)));
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function table(heads, rows, caption) {
  const cell = (tag, v, k) =>
    el(
      tag,
      { class: heads[k].endsWith(">") ? "n" : undefined, scope: tag === "th" ? "col" : undefined },
      v,
    );
  return el(
    "div",
    {
      class: "scroll",
      tabindex: 0,
      role: "group",
      "aria-label": caption || "Table: " + heads.map(h => h.replace(">", "")).join(", "),
    },
    el(
      "table",
      {},
      caption ? el("caption", { text: caption }) : null,
      el("thead", {}, el("tr", {}, ...heads.map((h, k) => cell("th", h.replace(">", ""), k)))),
      el("tbody", {}, ...rows.map(r => el("tr", {}, ...r.map((v, k) => cell("td", v, k))))),
    ),
  );
}
const folded = (title, ...kids) => el("details", {}, el("summary", { text: title }), ...kids);
const legend = items =>
  el(
    "ul",
    { class: "legend" },
    ...items.map(([name, colour]) => el("li", {}, el("i", { style: "background:" + colour }), name)),
  );
