// The diagnosis: what binds the step, time by module, kernels against the roofline, gaps, collectives, ranks.
function verdict(v) {
  return el(
    "div",
    { class: "verdict", role: "region", "aria-label": "Verdict" },
    el("p", { class: "bound", text: v.sentence }),
    v.ranks && !v.ranks.startsWith("No straggler") ? el("p", { text: v.ranks }) : null,
    v.first ? el("p", { text: v.first }) : null,
    v.then ? el("p", { text: v.then }) : null,
  );
}
const CAUSES = {
  launch: "the CPU launches kernels too late",
  sync: "the CPU waited for the GPU, then had to launch again",
  input: "the data loader",
  communication: "exposed communication",
  "other ranks": "ranks that arrive later at a collective",
  bubble: "other ranks: stages of the pipeline before or behind it",
  "between kernels": "the next kernel: gaps below 4 µs that every stream of kernels has",
  unexplained: "step time that no simulated task accounts for",
};
const joined = text => text.replaceAll(" ", "\u00a0"); // a name that is not broken over two lines
function gaps(idle) {
  return el(
    "div",
    {},
    el("h3", { text: (typeof idle.rank === "number" ? "GPU of rank " + idle.rank : "GPU") + " idle " + time(idle.seconds) + " a step, by cause" }),
    el(
      "div",
      { class: "pair" },
      table(
        ["cause", "idle>", "gaps>", "the GPU waits for"],
        idle.causes.map(c => [joined(c.cause), time(c.seconds), count(c.gaps), CAUSES[c.cause] || ""]),
      ),
      idle.gaps.length
        ? table(
            ["longest, at>", "idle>", "cause", "before", "module"],
            idle.gaps.slice(0, 6).map(g => [time(g.at_s), time(g.seconds), joined(g.cause), whole(g.before, 18), whole(g.module, 14)]),
          )
        : null,
    ),
  );
}
// Time by module: an icicle in which a click opens a part, and the same as a table.
const PHASES = ["forward", "backward", "other"];
function modules(root) {
  const place = el("div"),
    trail = el("p", { class: "trail", "aria-label": "Path", role: "group" }),
    rows = el("div");
  const open = path => {
    const node = path[path.length - 1],
      parts = [...node.parts].sort((a, b) => b.seconds - a.seconds);
    trail.replaceChildren(
      ...path.flatMap((n, k) => [
        k ? " › " : "",
        el("button", { type: "button", text: n.name, onclick: () => open(path.slice(0, k + 1)) }),
      ]),
      " " + time(node.seconds) + " of GPU time",
    );
    place.replaceChildren(icicle(path, open));
    rows.replaceChildren(
      table(
        ["module", ...PHASES.map(p => p + ">"), "GPU time>", "share>"],
        parts
          .slice(0, 40)
          .map(p => [
            p.parts.length
              ? el("button", { type: "button", class: "link", text: p.name, onclick: () => open([...path, p]) })
              : p.name,
            ...p.phases.map(s => (s ? time(s) : "")),
            time(p.seconds),
            share(p.seconds / (root.seconds || 1)),
          ]),
      ),
      parts.length > 40
        ? el("p", { class: "soft", text: "and " + (parts.length - 40) + " smaller ones" })
        : "",
    );
  };
  open([root]);
  return section(
    "modules",
    "Time by module",
    "GPU time of the first rank by nn.Module or record_function name, operators last; where a trace has no such names, by operator. Width is time; click to open a part.",
    trail,
    place,
    folded("As a table", rows),
  );
}
function icicle(path, open) {
  const root = path[path.length - 1],
    width = 1180,
    row = 26,
    depth = n => 1 + Math.max(0, ...n.parts.map(depth)),
    levels = Math.min(depth(root), 9),
    svg = chart(
      width,
      levels * row + 4,
      "Time of " +
        root.name +
        " by module: " +
        [...root.parts]
          .sort((a, b) => b.seconds - a.seconds)
          .slice(0, 8)
          .map(p => p.name + " " + time(p.seconds))
          .join(", "),
    );
  let hue = 0;
  const add = (node, chain, x, level, colour) => {
    const w = (width * node.seconds) / (root.seconds || 1);
    if (w < 0.7 || level >= levels) return;
    const box = draw(
      "g",
      node.parts.length ? { style: "cursor:zoom-in", onclick: () => open(chain) } : {},
      draw("title", {
        text:
          chain.map(n => n.name).join(" › ") +
          "\n" +
          time(node.seconds) +
          ", " +
          share(node.seconds / (root.seconds || 1)) +
          "\n" +
          PHASES.map((p, k) => (node.phases[k] ? p + " " + time(node.phases[k]) : ""))
            .filter(Boolean)
            .join(", "),
      }),
      draw("rect", {
        x,
        y: level * row + 1,
        width: Math.max(w - 0.8, 0.6),
        height: row - 2,
        rx: 3,
        style: "fill:hsl(" + colour + " 58% " + (68 + (level % 3) * 4) + "%)",
      }),
    );
    const text = node.name + (w > 150 ? "  " + time(node.seconds) : "");
    const room = Math.floor((w - 8) / 7.6); // letters; a name cut to fewer than six says nothing
    if (room >= Math.min(6, node.name.length))
      box.append(draw("text", { x: x + 5, y: level * row + 17, class: "on", text: cut(text, room) }));
    svg.append(box);
    let at = x;
    for (const part of node.parts) {
      add(part, [...chain, part], at, level + 1, level ? colour : HUES[hue++ % HUES.length]);
      at += (width * part.seconds) / (root.seconds || 1);
    }
  };
  add(root, path, 0, 0, 210);
  return scrolled(svg, width);
}
// Kernels: a table by time, and each as a point under the roofs of the device.
function kernelTable(kernels, roof, bound) {
  const known = kernels.some(k => k.roofline > 0),
    named = kernels.some(k => k.kernel),
    placed = kernels.some(k => k.module);
  return section(
    "kernels",
    "Kernels against the roofline",
    known
      ? "The longest kernels, and what share of the device's peak compute or bandwidth they reach, from the flop and bytes of the operators that launched them."
      : "The longest kernels. Their rates need a known device (--on) and a trace recorded with record_shapes=True.",
    known && roof ? el("div", { class: "pair" }, roofline(kernels, roof), bound ? limits(bound) : null) : null,
    table(
      ["op", ...(named ? ["kernel"] : []), ...(placed ? ["module"] : []), "calls>", "time>", "share>", "compute>", "memory>", "bound by", "of roofline>"],
      kernels.map(k => [
        whole(k.op, 21),
        ...(named ? [whole(k.kernel, 17)] : []),
        ...(placed ? [whole(k.module || "", 14)] : []),
        count(k.count),
        time(k.step_s),
        share(k.share),
        rate(k.flops_s, "flop/s"),
        rate(k.bytes_s, "B/s"),
        k.bound,
        k.roofline ? share(k.roofline) : "",
      ]),
    ),
  );
}
const whole = (name, most) => el("span", { class: "nb", title: name, text: cut(name, most) });
function limits(bound) {
  // what bounds the time of all kernels, and how far from the roofline they are together
  const rows = [
      ["compute", "the peak flop/s of the device"],
      ["memory", "its memory bandwidth"],
      ["latency", "their own launch: too short to fill the device"],
      ["unknown", "no shapes recorded, or unknown operators"],
    ].filter(([k]) => bound[k] > 0),
    total = rows.reduce((sum, [k]) => sum + bound[k], 0) || 1;
  return el(
    "div",
    {},
    el("h3", { text: "What bounds the kernels" }),
    table(
      ["bound by", "time>", "share>", "what that is"],
      rows.map(([k, what]) => [k, time(bound[k]), share(bound[k] / total), what]),
    ),
    bound.roofline_s
      ? el("p", {
          text:
            "At the roofline these kernels would take " + time(bound.roofline_s) + " instead of " + time(bound.known_s) +
            ": they reach " + share(bound.roofline_s / bound.known_s) + " of what the device can do in these number formats.",
        })
      : null,
  );
}
function roofline(kernels, roof) {
  const counted = kernels.filter(k => k.intensity > 0 && k.flops_s > 0),
    top = Math.max(...Object.values(roof.peaks)) * 1.6,
    points = counted.filter(k => k.intensity >= 0.01 && k.flops_s >= top / 1e6), // the others are no arithmetic to speak of
    left = 74,
    width = 590,
    high = 300,
    ridge = top / roof.bandwidth,
    x0 = Math.min(ridge / 30, ...points.map(k => k.intensity / 1.5)),
    x1 = Math.max(ridge * 8, ...points.map(k => k.intensity * 2)),
    y0 = Math.min(top / 1e3, ...points.map(k => k.flops_s / 2)),
    log = Math.log10,
    X = v => left + ((width - left - 10) * (log(v) - log(x0))) / (log(x1) - log(x0)),
    Y = v => high - ((high - 10) * (log(v) - log(y0))) / (log(top) - log(y0)),
    clip = v => Math.min(Math.max(v, y0), top);
  const svg = chart(
    width,
    high + 40,
    "Roofline: " +
      points
        .slice(0, 8)
        .map(k => k.op + " " + rate(k.flops_s, "flop/s") + ", " + share(k.roofline) + " of the roofline")
        .join("; "),
  );
  for (let e = Math.ceil(log(x0)); e <= log(x1); e++)
    svg.append(
      draw("line", { x1: X(10 ** e), x2: X(10 ** e), y1: 10, y2: high, class: "axis" }),
      draw("text", { x: X(10 ** e), y: high + 16, "text-anchor": "middle", class: "soft", text: short(10 ** e) }),
    );
  for (let e = Math.ceil(log(y0)); e <= log(top); e++)
    svg.append(
      draw("line", { x1: left, x2: width - 10, y1: Y(10 ** e), y2: Y(10 ** e), class: "axis" }),
      draw("text", { x: left - 6, y: Y(10 ** e) + 4, "text-anchor": "end", class: "soft", text: rate(10 ** e, "flop/s") }),
    );
  for (const [name, peak] of Object.entries(roof.peaks)) {
    const knee = peak / roof.bandwidth,
      low = clip(x0 * roof.bandwidth);
    svg.append(
      draw("path", {
        d:
          "M" + X(low / roof.bandwidth) + " " + Y(low) + "L" + X(knee) + " " + Y(peak) + "H" + X(x1),
        fill: "none",
        style: "stroke:var(--ink);stroke-width:1.6",
      }),
      draw("text", {
        x: X(x1),
        y: Y(peak) - 5,
        "text-anchor": "end",
        text: name + " " + rate(peak, "flop/s"),
      }),
    );
  }
  svg.append(
    draw("text", {
      x: (left + width) / 2,
      y: high + 34,
      "text-anchor": "middle",
      class: "soft",
      text: "flop per byte of memory traffic; the slope is " + rate(roof.bandwidth, "B/s") + "; area is time",
    }),
  );
  const colour = { compute: "--kernel", memory: "--copy", latency: "--collective" };
  for (const k of points)
    svg.append(
      draw(
        "g",
        {},
        draw("title", {
          text:
            k.op + " " + k.kernel + "\n" + time(k.step_s) + ", " + rate(k.flops_s, "flop/s") + ", " +
            rate(k.bytes_s, "B/s") + "\n" + k.bound + ", " + share(k.roofline) + " of the roofline",
        }),
        draw("circle", {
          cx: X(k.intensity),
          cy: Y(k.flops_s),
          r: 4 + 22 * Math.sqrt(k.share),
          style: "fill:var(" + (colour[k.bound] || "--host") + ");fill-opacity:.65;stroke:var(--ink);stroke-width:.6",
        }),
      ),
    );
  svg.style.maxWidth = width + "px";
  return el(
    "figure",
    {},
    scrolled(svg, width - 90),
    legend(Object.entries(colour).filter(([k]) => points.some(p => p.bound === k)).map(([k, v]) => [k + "-bound", "var(" + v + ")"])),
  );
}
function collectives(rows, machines) {
  const on = machines && machines.name ? (machines.assumed ? "assumed " : "") + machines.name : "",
    faster = machines && machines.assumed && rows.some(r => r.possible && r.reached > 1.05 * r.possible);
  return section(
    "communication",
    "Communication",
    "Collectives of the first rank. Bandwidth is message bytes over time, NCCL's algorithm bandwidth. Possible is what the links of the machines" + (on ? " (" + on + ")" : "") + " allow undisturbed. Exposed: no kernel runs meanwhile." +
      (rows.some(r => !r.bytes) ? " Bytes are left out where a plan gives only the time of a layer's collectives." : "") +
      (faster ? " More than possible was reached: the machines are others than assumed; name yours with --on." : ""),
    table(
      ["collective", "ranks>", "calls>", "bytes>", "time>", "exposed>", "bandwidth>", "possible>", "of possible>"],
      rows.map(r => [
        r.op,
        r.ranks ? String(r.ranks) : "",
        count(r.count),
        r.bytes ? size(r.bytes) : "",
        time(r.seconds),
        time(Math.max(r.exposed_s, 0)),
        rate(r.reached, "B/s"),
        r.possible ? rate(r.possible, "B/s") : "",
        r.possible ? Math.round((100 * r.reached) / r.possible) + " %" : "",
      ]),
    ),
  );
}
function rankTable(ranks, step, verdict) {
  const said = (verdict && verdict.ranks) || "",
    parts = [
      ["compute", "--kernel"],
      ["exposed communication", "--collective"],
      ["waits for other ranks", "--send"],
      ["host", "--copy"],
      ["idle", "--sync"],
    ];
  const late = ranks.reduce((a, b) => (b.waited_for_s > a.waited_for_s ? b : a), ranks[0]),
    first = ranks.slice(0, 16),
    drawn = first.includes(late) ? first : [...ranks.slice(0, 15), late];
  const rows = drawn.map(r => ({
    name: "rank " + r.rank + (r === late && r.waited_for_s > 0.03 * step ? " (straggler)" : ""),
    total: step,
    values: { compute: r.compute_s, "exposed communication": r.exposed_s, "waits for other ranks": r.waits_s, host: r.host_s, idle: r.idle_s },
  }));
  return section(
    "ranks",
    "Ranks",
    said + " A rank waits for others in collectives that they have not reached, and in a pipeline's bubbles.",
    bars(rows, parts, Math.max(step, 1e-12), "Where the step of each rank goes. " + said, time),
    ranks.length > drawn.length ? el("p", { class: "soft", text: drawn.length + " of " + ranks.length + " ranks are drawn" }) : null,
    folded(
      "As a table",
      table(
        ["rank>", "compute>", "exposed comm.>", "hidden comm.>", "waits for others>", "CPU>", "idle>", "others wait for it>", "while profiled>"],
        ranks.map(r => [
          String(r.rank),
          ...[r.compute_s, r.exposed_s, r.hidden_s, r.waits_s, r.host_s, r.idle_s, r.waited_for_s].map(time),
          r.measured_waited_for_s === null ? "" : time(r.measured_waited_for_s),
        ]),
      ),
    ),
  );
}
function measured(rows) {
  return section(
    "measured",
    "Measured and predicted",
    "The same step, measured and simulated. Every other number of this page is of the current step without the profiler.",
    table(
      ["step", "measured>", "simulated>", "error>", "how the time is known"],
      rows.map(r => [
        r.what,
        time(r.measured_s),
        time(r.predicted_s),
        signed(r.predicted_s / r.measured_s - 1),
        r.more || "",
      ]),
    ),
  );
}
