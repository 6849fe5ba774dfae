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
      high + 24,
      "Schedule " +
        s.name +
        ": " +
        s.devices +
        " devices, " +
        s.micro_batches +
        " micro-batches, makespan " +
        (s.unit ? time : short)(s.makespan),
    ),
    said = s.unit ? time : short;
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
            said(b.start) +
            " to " +
            said(b.end),
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
      text: s.unit ? "" : "makespan " + said(s.makespan),
    }),
  );
  const how = "A number is a micro-batch: forward; b backward, w weight gradient; odd micro-batches are darker.";
  return el("div", {}, scrolled(svg, width), el("p", { class: "soft", text: how }));
}
// The machines of a plan: nodes with their ranks, what joins them inside, switches between nodes.
const DEVICE = { width: 100, height: 44 },
  RAIL = 96,
  MOST_NODES = 32;

function topology(m) {
  const nodes = m.nodes.slice(0, MOST_NODES),
    wide = Math.min(Math.max(4, ...nodes.map(n => n.ranks.length)), 12),
    left = m.tiers.length * RAIL,
    width = left + wide * (DEVICE.width + 6) + 20,
    ranks = m.nodes.reduce((sum, n) => sum + n.ranks.length, 0);
  let y = 4;
  const svg = chart(
      width,
      100,
      "Where each rank of the plan stands: " +
        ranks +
        " ranks on " +
        m.nodes.length +
        " nodes" +
        m.tiers.map(t => ", joined by " + t.name).join(""),
    ),
    middles = nodes.map(n => {
      const at = y;
      y += station(svg, n, left, y, width - left - 2) + 14;
      return (at + y - 14) / 2;
    });
  rails(svg, m.tiers, nodes, middles, left);
  svg.setAttribute("viewBox", "0 0 " + width + " " + y);
  svg.style.maxWidth = width + "px";
  return el(
    "div",
    {},
    scrolled(svg, width),
    m.nodes.some(n => n.ranks.some(r => r.short))
      ? el("p", { class: "soft", text: "In each box: the rank, its place in the pipeline (pp), data (dp), context (cp) and tensor (tp) parallel groups, and its device. A colour is a pipeline stage." })
      : null,
    m.nodes.length > nodes.length
      ? el("p", { class: "soft", text: "the first " + nodes.length + " of " + m.nodes.length + " nodes" })
      : null,
  );
}
function station(svg, node, x, y, width) {
  // one node; its height
  const wide = Math.max(1, Math.floor((width - 10) / (DEVICE.width + 6))),
    high = 28 + Math.ceil(node.ranks.length / wide) * (DEVICE.height + 6) + (node.inside ? 24 : 2);
  svg.append(
    draw("rect", { x, y, width, height: high, rx: 8, style: "fill:var(--card);stroke:var(--line)" }),
    draw("text", { x: x + 9, y: y + 18, class: "soft", text: node.name }),
  );
  if (node.out && width > 260)
    svg.append(
      draw("text", {
        x: x + width - 9,
        y: y + 18,
        "text-anchor": "end",
        class: "soft",
        text: node.out + " out",
      }),
    );
  node.ranks.forEach((r, k) =>
    svg.append(
      device(r, x + 8 + (k % wide) * (DEVICE.width + 6), y + 26 + Math.floor(k / wide) * (DEVICE.height + 6)),
    ),
  );
  if (node.inside)
    svg.append(
      draw("line", {
        x1: x + 10,
        x2: x + Math.min(node.ranks.length, wide) * (DEVICE.width + 6),
        y1: y + high - 20,
        y2: y + high - 20,
        style: "stroke:var(--accent);stroke-width:3",
      }),
      draw("text", { x: x + 10, y: y + high - 5, class: "soft", text: node.inside + " inside" }),
    );
  return high;
}
function device(r, x, y) {
  const box = draw(
    "g",
    {},
    draw("title", { text: "rank " + r.rank + (r.device ? " on " + r.device : "") + ": " + r.where }),
    draw("rect", {
      x,
      y,
      width: DEVICE.width,
      height: DEVICE.height,
      rx: 5,
      style: "fill:hsl(" + HUES[r.stage % HUES.length] + " 60% " + (r.copy % 2 ? 62 : 74) + "%)",
    }),
    draw("text", { x: x + 5, y: y + 15, class: "on", style: "font-weight:600", text: r.rank }),
    draw("text", { x: x + 5, y: y + 36, class: "on", style: "font-size:10px", text: cut(r.device, 14) }),
  );
  box.append(
    draw("text", {
      x: x + DEVICE.width - 5,
      y: y + 15,
      class: "on",
      "text-anchor": "end",
      style: "font-size:10px",
      text: cut(r.short, 15),
    }),
  );
  return box;
}
function rails(svg, tiers, nodes, middles, left) {
  // a tier of switches is a vertical line beside the nodes it joins, the innermost nearest to them
  tiers.forEach((tier, t) =>
    tier.groups.forEach((group, g) => {
      const mine = group.filter(n => n < nodes.length);
      if (!mine.length) return;
      const x = left - 14 - t * RAIL,
        tops = mine.map(n => middles[n]),
        [top, end] = [Math.min(...tops) - 10, Math.max(...tops) + 10];
      svg.append(
        draw("line", { x1: x, x2: x, y1: top, y2: end, style: "stroke:var(--ink);stroke-width:4" }),
        draw("text", {
          x: x - 8,
          y: (top + end) / 2 + 4,
          "text-anchor": "end",
          text: tier.name + (tier.groups.length > 1 ? " " + g : ""),
        }),
        tier.up[g]
          ? draw("text", {
              x: x - 8,
              y: (top + end) / 2 + 20,
              "text-anchor": "end",
              class: "soft",
              style: "font-size:10px",
              text: tier.up[g] + " up",
            })
          : "",
      );
      if (t === 0)
        for (const n of mine)
          svg.append(
            draw(
              "g",
              {},
              draw("title", { text: nodes[n].out }),
              draw("line", { x1: x, x2: left, y1: middles[n], y2: middles[n], style: "stroke:var(--ink)" }),
            ),
          );
      else
        svg.append(
          draw("line", {
            x1: x,
            x2: x + RAIL,
            y1: (top + end) / 2,
            y2: (top + end) / 2,
            style: "stroke:var(--ink);stroke-dasharray:3 3",
          }),
        );
    }),
  );
}
function grid(p) {
  // layers placed one by one: a row a run of layers, a column a device, samples in the cells
  const ranks = p.machines.nodes.flatMap((n, k) => n.ranks.map(r => ({ ...r, node: k, host: n.name }))),
    left = 250,
    cell = Math.min(90, Math.max(26, 900 / ranks.length)),
    width = left + ranks.length * cell + 8,
    most = Math.max(1, ...p.grid.flatMap(row => Object.values(row.cells))),
    svg = chart(
      width,
      p.grid.length * 26 + 44,
      "Which devices run which layers: " +
        p.grid.map(r => r.name + " on ranks " + Object.keys(r.cells).join(", ")).join("; "),
    );
  ranks.forEach((r, k) =>
    svg.append(
      draw("text", {
        x: left + (k + 0.5) * cell,
        y: 12,
        "text-anchor": "middle",
        class: "soft",
        text: !k || r.node !== ranks[k - 1].node ? cut("node " + r.node, 8) : "",
      }),
      draw("text", { x: left + (k + 0.5) * cell, y: 28, "text-anchor": "middle", text: r.rank }),
    ),
  );
  p.grid.forEach((row, n) => {
    const y = 36 + n * 26;
    svg.append(
      draw("text", { x: 0, y: y + 16, text: cut(row.name, 26) }),
      draw("text", { x: left - 10, y: y + 16, class: "soft", "text-anchor": "end", text: row.way }),
    );
    ranks.forEach((r, k) => {
      const samples = row.cells[r.rank];
      if (samples === undefined) return;
      svg.append(
        draw(
          "g",
          {},
          draw("title", {
            text: row.name + " on rank " + r.rank + " (" + r.device + "): " + (samples || "all") + " samples",
          }),
          draw("rect", {
            x: left + k * cell + 1,
            y,
            width: cell - 2,
            height: 22,
            rx: 3,
            style: "fill:hsl(210 70% " + (88 - (38 * (samples || most)) / most) + "%)",
          }),
          draw("text", {
            x: left + (k + 0.5) * cell,
            y: y + 15,
            "text-anchor": "middle",
            class: "on",
            text: samples || "■",
          }),
        ),
      );
    });
  });
  return scrolled(svg, width);
}
function messages(list) {
  // gradients sent together, in the order they leave; as wide as their bytes, or as they are many
  const sized = list.every(b => b.bytes),
    weight = b => (sized ? b.bytes : b.names.length),
    total = list.reduce((sum, b) => sum + weight(b), 0),
    width = 1180,
    gap = 2,
    least = 5,
    room = width - list.length * (gap + least),
    svg = chart(
      width,
      54,
      list.length + " messages" + (sized ? " of " + size(total) : "") + ", in the order they leave",
    );
  let x = 0;
  list.forEach((b, k) => {
    const w = least + (Math.max(room, 0) * weight(b)) / total,
      text = sized ? size(b.bytes) : b.names.length + " parameters";
    const box = draw(
      "g",
      {},
      draw("title", { text: "message " + k + ": " + text + "\n" + b.names.join("\n") }),
      draw("rect", {
        x,
        y: 0,
        width: w,
        height: 34,
        rx: 3,
        style: "fill:hsl(" + HUES[k % HUES.length] + " 60% 72%)",
      }),
    );
    if (w > 24) box.append(draw("text", { x: x + 5, y: 15, class: "on", style: "font-weight:600", text: k }));
    if (w > text.length * 6.4 + 10)
      box.append(draw("text", { x: x + 5, y: 29, class: "on", style: "font-size:10px", text }));
    svg.append(box);
    x += w + gap;
  });
  svg.append(
    draw("text", {
      x: 0,
      y: 50,
      class: "soft",
      text: "first to leave at the left; as wide as " + (sized ? "their bytes" : "they have parameters"),
    }),
  );
  return el(
    "div",
    {},
    el("h3", { text: "Gradient buckets" }),
    scrolled(svg, width),
    folded(
      "All " + list.length + " messages",
      table(
        ["#>", "parameters", "how many>", "bytes>"],
        list.map((b, k) => [
          String(k),
          b.names.join(", "),
          String(b.names.length),
          b.bytes ? size(b.bytes) : "",
        ]),
      ),
    ),
  );
}
const MOST_REGIONS = 48;
function regions(list) {
  // each kernel a box of its ops; what is recomputed for it has a broken frame
  const kernel = names =>
    el(
      "li",
      {},
      ...names.map(n =>
        el("span", {
          class: n.endsWith("*") ? "op again" : "op",
          title: n.endsWith("*") ? n.slice(0, -1) + ", recomputed here" : n,
          text: cut(n, 34),
        }),
      ),
    );
  return el(
    "div",
    {},
    el("h3", { text: "Ops fused" }),
    el("p", {
      class: "soft",
      text: "A frame is one kernel; an op with a broken frame (*) is recomputed instead of being kept.",
    }),
    el("ol", { class: "kernels" }, ...list.slice(0, MOST_REGIONS).map(kernel)),
    list.length > MOST_REGIONS
      ? folded(
          "And " + (list.length - MOST_REGIONS) + " more",
          el("ol", { class: "kernels", start: MOST_REGIONS + 1 }, ...list.slice(MOST_REGIONS).map(kernel)),
        )
      : null,
  );
}
