// Charts as SVG: every one says in words what it shows, and a table beside it holds its numbers.
const PARTS = [
  ["compute", "--kernel"],
  ["exposed communication", "--collective"],
  ["host", "--copy"],
  ["bubble", "--send"],
  ["idle", "--sync"],
];
const PART_NAMES = { host: "CPU", bubble: "waits for other ranks" }; // what is shown for a key of an answer
const SOURCES = {
  measured: "--load",
  "measured, then changed": "--send",
  learned: "--kernel",
  formula: "--copy",
  guessed: "--collective",
  given: "--host",
};
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 4", "10 4"];
const SHAPES = ["●", "■", "▲", "◆", "★", "▼", "○", "□", "△", "◇", "☆", "▽", "◐", "◧"];
let patterns = 0;

function chart(width, height, label) {
  return draw("svg", {
    viewBox: "0 0 " + width + " " + height,
    role: "img",
    "aria-label": label,
    style: "max-width:" + width * 1.4 + "px",
  });
}
function scrolled(svg, width) {
  // a drawing that is not made smaller than can be read: a narrow page scrolls it sideways
  svg.style.minWidth = Math.min(width, 640) + "px";
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": svg.getAttribute("aria-label") },
    svg,
  );
}
function hatch(svg, variable, n) {
  // a colour and, for those who do not see it, a direction of lines
  const id = "hatch" + patterns++,
    lines = ["", "M0 8L8 0", "M0 0L8 8", "M4 0V8", "M0 4H8"][n % 5];
  const made = draw(
    "pattern",
    { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
    draw("rect", { width: 8, height: 8, style: "fill:var(" + variable + ")" }),
  );
  if (lines)
    made.append(
      draw("path", { d: lines, style: "stroke:var(--ground);stroke-opacity:.55;stroke-width:1.5" }),
    );
  svg.append(draw("defs", {}, made));
  return "url(#" + id + ")";
}
function bars(rows, parts, total, label, value) {
  // rows: {name, values by part}; one stacked bar each, on one scale; of one part, thin ones
  const left = 230,
    width = 1000,
    thin = parts.length === 1,
    step = thin ? 26 : 44,
    svg = chart(width, rows.length * step + (thin ? 4 : 30), label),
    fills = parts.map(([, variable], n) => hatch(svg, variable, n));
  rows.forEach((row, r) => {
    const y = r * step + 4;
    let x = left;
    svg.append(
      draw("text", { x: 0, y: y + (thin ? 13 : 16), text: cut(row.name, thin ? 20 : 30) }),
      draw("text", {
        x: thin ? left - 10 : 0,
        y: y + (thin ? 13 : 31),
        "text-anchor": thin ? "end" : "start",
        class: "soft",
        text: value(row.total),
      }),
    );
    parts.forEach(([name], n) => {
      const w = ((width - left) * (row.values[name] || 0)) / total;
      if (w <= 0) return;
      svg.append(stretch(x, y, w, thin ? 18 : 34, fills[n], (PART_NAMES[name] || name) + " " + value(row.values[name]), !thin));
      x += w;
    });
  });
  if (!thin) keyed(svg, parts, fills, left, rows.length * step, new Set(rows.flatMap(r => Object.keys(r.values).filter(k => r.values[k]))));
  return scrolled(svg, width);
}
function stretch(x, y, w, height, fill, text, labelled) {
  // one part of a bar, with its number in it where there is room
  const piece = draw(
    "g",
    {},
    draw("title", { text }),
    draw("rect", { x, y, width: Math.max(w - 1, 0.5), height, rx: 3, fill }),
  );
  if (labelled && w > text.length * 7.6 + 16)
    piece.append(
      draw("rect", {
        x: x + 6,
        y: y + 8,
        width: text.length * 7.6 + 6,
        height: 18,
        rx: 4,
        style: "fill:var(--ground);fill-opacity:.78",
      }),
      draw("text", { x: x + 10, y: y + 21, text }),
    );
  return piece;
}
function keyed(svg, parts, fills, x, y, used) {
  parts.forEach(([name], n) => {
    if (!used.has(name)) return;
    svg.append(
      draw("rect", { x, y: y + 8, width: 12, height: 12, rx: 2, fill: fills[n] }),
      draw("text", { x: x + 17, y: y + 18, class: "soft", text: PART_NAMES[name] || name }),
    );
    x += (PART_NAMES[name] || name).length * 7 + 40;
  });
}
function ranking(advice) {
  const rows = [...(advice.together ? [{ ...advice.together, isBest: true }] : []), ...advice.ranked];
  // A change of the batch is shown by the time it takes for the samples of today's step.
  const base = advice.baseline_s,
    each = r => (base * (1 - r.gain)) / r.predicted_s,
    most = Math.max(base * 1.05, ...rows.map(r => Math.min(r.high_s * each(r), base * 3))),
    left = 300,
    width = 1000,
    at = s => left + ((width - left - 150) * Math.min(s, most)) / most;
  const svg = chart(
    width,
    rows.length * 28 + 40,
    "Predicted step of each change with its 80 % interval; the current step is " +
      time(base),
  );
  svg.append(
    draw("line", {
      x1: at(base),
      x2: at(base),
      y1: 0,
      y2: rows.length * 28 + 8,
      style: "stroke:var(--ink);stroke-dasharray:4 3",
    }),
    draw("text", {
      x: at(base),
      y: rows.length * 28 + 24,
      "text-anchor": "middle",
      text: "current step " + time(base),
    }),
  );
  rows.forEach((row, r) => {
    const part = each(row),
      low = at(row.low_s * part),
      high = at(row.high_s * part);
    const y = r * 28 + 14,
      helps = row.gain > 0.005,
      name = (row.isBest ? "together: " : "") + row.changes.join(" ");
    const shown = draw(
      "g",
      {},
      draw("title", {
        text:
          name +
          "\n" +
          (row.does ? row.does + "\n" : "") +
          time(row.predicted_s) +
          (Math.abs(part - 1) > 1e-6 ? " for more samples, " : ", ") +
          time(row.low_s) +
          " to " +
          time(row.high_s) +
          "\n" +
          row.why,
      }),
    );
    shown.append(
      draw("text", {
        x: left - 12,
        y: y + 4,
        "text-anchor": "end",
        style: row.isBest ? "font-weight:600" : "",
        text: cut(name, row.isBest ? 34 : 42),
      }),
    );
    shown.append(
      draw("rect", {
        x: left,
        y: y - 8,
        width: Math.max(at(row.predicted_s * part) - left, 1),
        height: 16,
        rx: 3,
        style: "fill:var(" + (helps ? "--kernel" : "--sync") + ");fill-opacity:" + (row.isBest ? 1 : 0.75),
      }),
    );
    shown.append(
      draw("path", {
        d:
          "M" +
          low +
          " " +
          y +
          "H" +
          high +
          "M" +
          low +
          " " +
          (y - 5) +
          "v10M" +
          high +
          " " +
          (y - 5) +
          "v10",
        style: "stroke:var(--ink);stroke-width:1.5;fill:none",
      }),
    );
    shown.append(
      draw("text", { x: width - 122, y: y + 4, text: time(row.predicted_s * part) }),
      draw("text", {
        x: width,
        y: y + 4,
        "text-anchor": "end",
        style: "fill:var(" + (helps ? "--good" : row.gain < -0.005 ? "--bad" : "--soft") + ")",
        text: signed(-row.gain),
      }),
    );
    svg.append(shown);
  });
  return scrolled(svg, width);
}
function ticks(low, high, wanted, log, byTwos) {
  // round numbers of an axis: 1, 2, 5, 10 …, or powers of two for bytes and GPUs
  if (log) {
    const found = [];
    for (let e = Math.floor(byTwos ? Math.log2(low) : Math.log10(low)); found.length < 60 && (byTwos ? 2 : 10) ** e <= high * 1.001; e++)
      for (const t of byTwos ? [2 ** e] : [1, 2, 5].map(m => m * 10 ** e)) if (t >= low * 0.999 && t <= high * 1.001) found.push(t);
    if (found.length < 3 && !byTwos) return ticks(low, high, wanted);
    return found.length > wanted ? found.filter((_, k) => k % Math.ceil(found.length / wanted) === 0) : found;
  }
  if (byTwos) {
    let step = 2 ** Math.ceil(Math.log2((high - low) / wanted));
    const found = [];
    for (let t = 0; t <= high; t += step) found.push(t);
    return found;
  }
  const rough = (high - low || 1) / wanted,
    ten = 10 ** Math.floor(Math.log10(rough)),
    step = [1, 2, 5, 10].find(m => m * ten >= rough) * ten,
    found = [];
  for (let t = Math.ceil(low / step) * step; t <= high; t += step) found.push(t);
  return found;
}
const tint = (s, n) => (s.front ? "var(--ink)" : "hsl(" + HUES[n % HUES.length] + " 65% 52%)");
function plot({ series, x, y, xText, yText, xName, yName, log, label, step, points, mark }) {
  // series: {name, points: [{x, y, title, hollow}]}
  const width = 640,
    height = 330,
    l = 72,
    b = 46,
    r = 14,
    t = 10,
    all = series.flatMap(s => s.points),
    svg = chart(width, height, label);
  const span = (key, isLog) => {
    const v = all.map(p => p[key]),
      low = isLog ? Math.min(...v) : 0,
      high = Math.max(...v, isLog ? low * 2 : 1e-12);
    return isLog ? [low * 0.9, high * 1.15] : [low, high * 1.06];
  };
  const [x0, x1] = log ? span("x", true) : [Math.min(...all.map(p => p.x)), Math.max(...all.map(p => p.x))],
    [y0, y1] = span("y", log);
  const put = (v, low, high, a, z, isLog) =>
    a + (z - a) * (isLog ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low || 1));
  const X = v => put(v, x0, x1, l, width - r, log),
    Y = v => put(v, y0, y1, height - b, t, log);
  for (const v of ticks(x0, x1, 8, log, log))
    svg.append(
      draw("line", { class: "axis", x1: X(v), x2: X(v), y1: t, y2: height - b, "stroke-opacity": 0.5 }),
      draw("text", { class: "soft", x: X(v), y: height - b + 17, "text-anchor": "middle", text: xText(v) }),
    );
  for (const v of ticks(y0, y1, 6, log, yText === size))
    svg.append(
      draw("line", { class: "axis", x1: l, x2: width - r, y1: Y(v), y2: Y(v), "stroke-opacity": 0.5 }),
      draw("text", { class: "soft", x: l - 8, y: Y(v) + 4, "text-anchor": "end", text: yText(v) }),
    );
  svg.append(
    draw("text", {
      class: "soft",
      x: (l + width - r) / 2,
      y: height - 8,
      "text-anchor": "middle",
      text: xName,
    }),
    draw("text", { class: "soft", x: l, y: t - 1, text: yName }),
  );
  if (mark !== undefined && mark <= y1)
    svg.append(
      draw("line", {
        x1: l,
        x2: width - r,
        y1: Y(mark),
        y2: Y(mark),
        style: "stroke:var(--bad);stroke-dasharray:5 4",
      }),
    );
  series.forEach((s, n) => {
    const colour = tint(s, n),
      sign = s.front ? "" : SHAPES[n % SHAPES.length];
    const path = s.points
      .map((p, k) =>
        k
          ? step
            ? "H" + X(p.x).toFixed(1) + "V" + Y(p.y).toFixed(1)
            : "L" + X(p.x).toFixed(1) + " " + Y(p.y).toFixed(1)
          : "M" + X(p.x).toFixed(1) + " " + Y(p.y).toFixed(1),
      )
      .join("");
    if (!s.apart)
      svg.append(
        draw("path", {
          d: path,
          fill: "none",
          style:
            "stroke:" + colour + ";stroke-width:2;stroke-dasharray:" + (DASHES[n % DASHES.length] || "none"),
        }),
      );
    if (points)
      for (const p of s.points)
        svg.append(
          draw(
            "g",
            {},
            draw("title", { text: p.title || "" }),
            draw("text", {
              x: X(p.x),
              y: Y(p.y) + 4.5,
              "text-anchor": "middle",
              style: "fill:" + colour + ";font-size:13px;fill-opacity:" + (p.hollow ? 0.45 : 1),
              text: p.hollow ? "×" : sign,
            }),
          ),
        );
  });
  return el(
    "figure",
    { style: "margin:0" },
    svg,
    el(
      "ul",
      { class: "legend" },
      ...series.map((s, n) =>
        el(
          "li",
          {},
          el("i", { style: "background:" + tint(s, n) }),
          (points && !s.front ? SHAPES[n % SHAPES.length] + " " : "") + s.name,
        ),
      ),
    ),
  );
}
const HOLDS = {
  parameter: 210,
  gradient: 28,
  optimizer: 275,
  activation: 145,
  input: 50,
  workspace: 350,
  library: 0,
  bucket: 185,
  other: 240,
};
function memoryPlot(m, most) {
  // what is held over the step, one layer of the stack for each purpose; plots share a scale
  const isTime = m.x === "seconds",
    left = 70,
    width = 620,
    high = 230,
    kinds = Object.keys(m.stacked),
    end = m.at[m.at.length - 1] || 1,
    top = most * 1.06 || 1,
    X = x => left + ((width - left - 8) * x) / end,
    Y = y => high - ((high - 14) * y) / top;
  const svg = chart(
    width,
    high + 40,
    "Memory of " +
      m.name +
      " over the step, peak " +
      size(m.peak) +
      ": " +
      kinds.map(k => k + " up to " + size(m.stacked[k].reduce((a, b) => Math.max(a, b), 0))).join(", "),
  );
  for (let k = 0; k <= 4; k++) {
    const value = (most * k) / 4;
    svg.append(
      draw("line", { x1: left, x2: width - 8, y1: Y(value), y2: Y(value), class: "axis" }),
      draw("text", { x: left - 8, y: Y(value) + 4, "text-anchor": "end", class: "soft", text: size(value) }),
    );
  }
  const below = new Float64Array(m.at.length);
  for (const kind of kinds) {
    const part = m.stacked[kind],
      up = [],
      down = [];
    for (let i = 0; i < m.at.length; i++) {
      const from = X(m.at[i]).toFixed(1) + " ",
        to = X(m.at[Math.min(i + 1, m.at.length - 1)]).toFixed(1) + " ", // bytes are held until the next instant
        low = Y(below[i]).toFixed(1);
      below[i] += part[i];
      const top = Y(below[i]).toFixed(1);
      down.push(from + low, to + low);
      up.push(from + top, to + top);
    }
    svg.append(
      draw(
        "g",
        {},
        draw("title", { text: kind }),
        draw("path", {
          d: "M" + up.join("L") + "L" + down.reverse().join("L") + "Z",
          style: "fill:hsl(" + (HOLDS[kind] === undefined ? 240 : HOLDS[kind]) + " 55% 62%)",
        }),
      ),
    );
  }
  let at = 0;
  for (let i = 0; i < m.held.length; i++) if (m.held[i] > m.held[at]) at = i;
  svg.append(
    draw("line", { x1: X(m.at[at]), x2: X(m.at[at]), y1: 4, y2: high, style: "stroke:var(--ink);stroke-dasharray:3 3" }),
    draw("text", {
      x: X(m.at[at]) + (m.at[at] > end * 0.7 ? -5 : 5),
      y: 12,
      "text-anchor": m.at[at] > end * 0.7 ? "end" : "start",
      text: "peak " + size(m.peak),
    }),
    draw("text", {
      x: (left + width) / 2,
      y: high + 34,
      "text-anchor": "middle",
      class: "soft",
      text: isTime ? "time, " + time(end) : "operators in the order they run, " + count(Math.round(end) + 1),
    }),
  );
  return el(
    "figure",
    {},
    svg,
    legend(kinds.map(k => [k, "hsl(" + (HOLDS[k] === undefined ? 240 : HOLDS[k]) + " 55% 62%)"])),
  );
}
