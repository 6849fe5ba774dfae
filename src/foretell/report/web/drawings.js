// Drawings: schedules (devices × time), plans on their machines, buckets and fused regions.
const DOES = {
  F: ["forward", 210],
  B: ["backward", 28],
  I: ["input gradient", 28],
  W: ["weight gradient", 140],
  C: ["communication", 280],
};

function schedule(s) {
  const left = 70,
    width = 1180,
    row = 26,
    high = s.devices * row,
    svg = chart(
      width,
      high + 44,
      "Schedule " +
        s.name +
        ": " +
        s.devices +
        " devices, " +
        s.micro_batches +
        " micro-batches, makespan " +
        short(s.makespan),
    );
  const X = t => left + ((width - left - 6) * t) / (s.makespan || 1);
  for (let d = 0; d < s.devices; d++)
    svg.append(
      draw("text", { x: 0, y: d * row + 17, class: "soft", text: "device " + d }),
      draw("rect", {
        x: left,
        y: d * row + 2,
        width: width - left - 6,
        height: row - 4,
        style: "fill:var(--faint)",
      }),
    );
  for (const b of s.blocks)
    for (const d of b.devices) {
      const [what, hue] = DOES[b.kind] || ["block", 210],
        w = Math.max(X(b.end) - X(b.start) - 0.7, 0.6);
      const box = draw(
        "g",
        {},
        draw("title", {
          text:
            what +
            " " +
            b.block +
            " of micro-batch " +
            b.micro_batch +
            ": " +
            short(b.start) +
            " to " +
            short(b.end),
        }),
        draw("rect", {
          x: X(b.start),
          y: d * row + 2,
          width: w,
          height: row - 4,
          rx: 2,
          style: "fill:hsl(" + hue + " 62% " + (b.micro_batch % 2 ? 60 : 74) + "%)",
        }),
      );
      const text = (b.kind === "W" ? "w" : b.kind === "B" || b.kind === "I" ? "b" : "") + b.micro_batch;
      if (w > text.length * 7 + 2)
        box.append(
          draw("text", {
            x: X(b.start) + w / 2,
            y: d * row + 17,
            "text-anchor": "middle",
            class: "on",
            text,
          }),
        );
      svg.append(box);
    }
  if (s.repetend) {
    const [a, b] = s.repetend;
    svg.append(
      draw("rect", {
        x: X(a),
        y: -2,
        width: X(b) - X(a),
        height: high + 4,
        fill: "none",
        style: "stroke:var(--mark);stroke-width:2;stroke-dasharray:6 3",
      }),
      draw("text", {
        x: X(a),
        y: high + 18,
        style: "fill:var(--mark)",
        text: "repeats every " + short(s.period),
      }),
    );
  }
  svg.append(
    draw("text", {
      x: width - 6,
      y: high + 18,
      "text-anchor": "end",
      class: "soft",
      text: "makespan " + short(s.makespan),
    }),
    draw("text", {
      x: left,
      y: high + 38,
      class: "soft",
      text: "numbers are micro-batches; b backward, w weight gradient; every other micro-batch is darker",
    }),
  );
  return svg;
}
function machines(p) {
  // ranks of a plan in their nodes: stage by hue, data-parallel copy and tensor slice in words
  const per = p.per_node,
    nodes = Math.ceil(p.ranks.length / per),
    shown = Math.min(nodes, 32),
    box = 62,
    columns = Math.min(2, shown),
    wide = Math.min(per, 8),
    rows = Math.ceil(per / wide);
  const w = wide * box + 16,
    h = rows * 40 + 30,
    svg = chart(
      columns * (w + 14),
      Math.ceil(shown / columns) * (h + 14),
      "Where each rank of the plan stands: " + p.ranks.length + " ranks on " + nodes + " nodes",
    );
  for (let n = 0; n < shown; n++) {
    const x = (n % columns) * (w + 14),
      y = Math.floor(n / columns) * (h + 14);
    svg.append(
      draw("rect", { x, y, width: w, height: h, rx: 8, style: "fill:var(--card);stroke:var(--line)" }),
      draw("text", { x: x + 8, y: y + 17, class: "soft", text: p.nodes[n] || "node " + n }),
    );
    p.ranks.slice(n * per, (n + 1) * per).forEach((r, k) => {
      const a = x + 8 + (k % wide) * box,
        b = y + 25 + Math.floor(k / wide) * 40;
      svg.append(
        draw(
          "g",
          {},
          draw("title", { text: "rank " + r.rank + " on " + r.device + ": " + r.where }),
          draw("rect", {
            x: a,
            y: b,
            width: box - 4,
            height: 36,
            rx: 5,
            style: "fill:hsl(" + HUES[r.stage % HUES.length] + " 60% " + (r.copy % 2 ? 62 : 74) + "%)",
          }),
          draw("text", { x: a + 5, y: b + 14, class: "on", style: "font-weight:600", text: r.rank }),
          draw("text", { x: a + 5, y: b + 29, class: "on", style: "font-size:9.5px", text: r.short }),
        ),
      );
    });
  }
  return el(
    "div",
    {},
    svg,
    nodes > shown ? el("p", { class: "soft", text: "the first " + shown + " of " + nodes + " nodes" }) : null,
  );
}
function groups(title, list, first) {
  // buckets or fused regions, one row each
  return el(
    "div",
    {},
    el("h3", { text: title }),
    table(
      ["#>", first, "how many>"],
      list.slice(0, 60).map((names, k) => [String(k), cut(names.join(", "), 160), String(names.length)]),
    ),
    list.length > 60 ? el("p", { class: "soft", text: "and " + (list.length - 60) + " more" }) : null,
  );
}
