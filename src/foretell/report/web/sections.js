// The sections of the page, each from its part of the data.
const SHORT = { goes: "Where time goes", kernels: "Kernels", measured: "Measured", trust: "Sources" }; // titles of links
const here = { prefix: "", nav: null }; // of several pages in one: what ids begin with, where links go
function section(name, title, about, ...kids) {
  const id = here.prefix + name,
    nav = here.nav || document.getElementById("contents");
  nav.append(
    el("a", {
      href: "#" + id,
      text: SHORT[name] || title,
      onclick: e => {
        e.preventDefault(); // the address keeps what it holds
        document.getElementById(id).scrollIntoView();
      },
    }),
  );
  return el(
    "section",
    { id, "aria-labelledby": id + "-h" },
    el("h2", { id: id + "-h", text: title }),
    about ? el("p", { class: "soft", text: about }) : null,
    ...kids,
  );
}
function cards(figures) {
  return el(
    "div",
    { class: "cards" },
    ...figures.map(f =>
      el(
        "div",
        { class: "card" },
        el("p", { class: "what", text: f.what }),
        el("div", {
          class: "big",
          text: f.seconds !== undefined ? time(f.seconds) : f.bytes !== undefined ? size(f.bytes) : f.text,
        }),
        f.gain !== undefined && f.gain !== null
          ? el("p", {
              class: "more " + (f.gain > 0 ? "good" : "bad"),
              text: share(Math.abs(f.gain)) + (f.gain > 0 ? " shorter" : " longer") + (f.per === "sample" ? " a sample" : ""),
            })
          : null,
        f.then ? el("p", { class: "more", text: f.then }) : null,
        f.low !== undefined && f.low !== null
          ? el("p", { class: "more" }, el("span", { class: "nb", text: interval(f.low, f.high) }), " ", el("span", { class: "nb", text: "(80 % interval)" }))
          : null,
        f.more ? el("p", { class: "more", text: f.more }) : null,
      ),
    ),
  );
}
function advised(a) {
  const rows = a.ranked.map(r => [
    r.changes.join(" "),
    r.does || "",
    time(r.predicted_s),
    interval(r.low_s, r.high_s),
    signed(-r.gain),
    r.peak_bytes ? size(r.peak_bytes) : "",
    r.code.length ? el("code", { text: r.code.join("\n") }) : "",
    r.why,
  ]);
  const best = a.together,
    parts = [];
  if (a.path && a.path.length) parts.push(el("h3", { text: "In this order" }), route(a));
  if (best && best.code.length) parts.push(el("h3", { text: "All of it, to paste" }), code(best.code.join("\n")), el("p", { text: best.why }));
  if (parts.length) parts.push(el("h3", { text: "Every change alone" }));
  parts.push(
    el("figure", {}, ranking(a)),
    folded(
      "All numbers, code and reasons",
      table(["change", "what it does", "step>", "80 % interval>", "time a sample>", "memory>", "code", "why"], rows),
    ),
  );
  if (a.refused.length)
    parts.push(
      folded(
        "Does not apply (" + a.refused.length + ")",
        table(
          ["change", "because"],
          a.refused.map(r => [r.change, r.reason]),
        ),
      ),
    );
  return section(
    "changes",
    "What would help",
    "Every change was made to a copy of the step and simulated. Whiskers are 80 % intervals. Times are for the samples of the current step, so that a larger batch compares.",
    ...parts,
  );
}
function route(a) {
  // the changes of the best combination one after the other: and what each adds
  const sized = a.path.some(r => r.peak_bytes);
  let before = a.baseline_s;
  return table(
    ["#>", "change", "step>", "80 % interval>", "speedup in all>", ...(sized ? ["memory>"] : [])],
    a.path.map((r, k) => {
      const had = k ? a.path[k - 1].changes : [],
        added = r.changes.filter(c => !had.includes(c)),
        alone = a.ranked.filter(x => added.includes(x.changes[0])),
        row = [
          String(k + 1),
          el("span", {}, el("b", { text: (k ? "+ " : "") + added.join(" + ") }), el("span", { class: "soft", text: "  " + alone.map(x => x.does || "").join(" ") })),
          time(before) + " → " + time(r.predicted_s),
          interval(r.low_s, r.high_s),
          short(1 / (1 - r.gain)) + " ×",
          ...(sized ? [r.peak_bytes ? size(r.peak_bytes) : ""] : []),
        ];
      before = r.predicted_s;
      return row;
    }),
  );
}
function code(text) {
  // lines to paste, with a button that copies them
  const button = el("button", {
    type: "button",
    text: "Copy",
    onclick: () =>
      navigator.clipboard &&
      navigator.clipboard.writeText(text).then(
        () => (button.textContent = "Copied"),
        () => (button.textContent = "Select and copy by hand"),
      ),
  });
  return el("div", { class: "code" }, el("pre", { tabindex: 0 }, el("code", { text })), button);
}
function goes(split, idle) {
  const total = Math.max(...split.map(s => s.total), 1e-12),
    rows = split.map(s => [
      s.name,
      ...PARTS.map(([k]) => time(s.values[k] || 0)),
      time(s.hidden),
      time(s.total),
    ]);
  return section(
    "goes",
    "Where the step goes",
    "One step in steady state" +
      (split.some(s => s.ranks > 1) ? ", the mean over ranks" : "") +
      ". Every moment counts once: as compute where a kernel runs, as exposed communication where only a collective runs, as CPU where the GPU waits for the host" +
      (split.some(s => s.values.bubble) ? ", as waiting for other ranks (a pipeline's bubble) where another rank works" : "") +
      ", else as idle.",
    bars(
      split,
      PARTS,
      total,
      "Where the step goes: " +
        split
          .map(s => s.name + " " + PARTS.map(([k]) => k + " " + time(s.values[k] || 0)).join(", "))
          .join("; "),
      time,
    ),
    folded(
      "As a table",
      table(["timeline", ...PARTS.map(([k]) => (PART_NAMES[k] || k) + ">"), "hidden communication>", "step>"], rows),
    ),
    idle && idle.causes.length ? gaps(idle) : null,
  );
}
const HELD_FOR = {
  activation: "activations kept for the backward pass",
  parameter: "parameters",
  gradient: "gradients",
  optimizer: "optimizer state",
  workspace: "workspaces of kernels",
  library: "libraries (cuBLAS, cuDNN)",
  input: "the batch",
  other: "temporary tensors",
};
function held(m) {
  // what the peak consists of, the largest parts by name
  const parts = Object.entries(m.kinds).sort((a, b) => b[1] - a[1]).filter(([, b]) => b > 0.05 * m.peak).slice(0, 3);
  return parts.length ? "holds " + parts.map(([k, b]) => (HELD_FOR[k] || k) + " (" + Math.round((100 * b) / m.peak) + " %)").join(", ") + "." : "";
}
function memories(items, lower) {
  const kinds = [...new Set(items.flatMap(m => Object.keys(m.kinds)))],
    first = items.slice(0, 6);
  return section(
    "memory",
    "Memory",
    "The peak, " + size(items[0].peak) + " (" + items[0].name + "), " + (items[0].explained ? "is " + items[0].explained.replaceAll("`", "") + ". It " : "") + held(items[0]),
    el("div", { class: "pair" }, ...first.map(m => el("div", {}, el("h3", { text: cut(m.name, 60) }), memoryPlot(m, Math.max(...first.map(f => f.peak)))))),
    el(
      "div",
      { class: "pair" },
      table(
        ["at the peak", ...first.map(m => cut(m.name, 28) + ">")],
        [
          ["peak", ...first.map(m => size(m.peak))],
          ...kinds.map(k => [k, ...first.map(m => (m.kinds[k] ? size(m.kinds[k]) : ""))]),
        ],
      ),
      lower && lower.length
        ? table(
            ["what would lower the peak", "peak>", "time a sample>"],
            lower.map(r => [r.changes.join(" "), size(r.peak_bytes), signed(-r.gain)]),
          )
        : null,
    ),
    ...items
      .slice(0, 2)
      .filter(m => m.holders.length)
      .map(m =>
        folded(
          "The largest at the peak: " + m.name,
          table(
            ["what", "kind", "bytes>"],
            m.holders.map(h => [h.name || "(unnamed)", h.kind, size(h.bytes)]),
          ),
        ),
      ),
  );
}
function scaling(o, n) {
  const names = [...new Set(o.rows.map(r => r.strategy))],
    of = (key, f) =>
      names
        .map(name => ({
          name,
          points: o.rows
            .filter(r => r.strategy === name && r[key])
            .sort((a, b) => a.gpus - b.gpus)
            .map(f),
        }))
        .filter(s => s.points.length);
  const title = r =>
      r.strategy +
      " on " +
      r.gpus +
      ": " +
      time(r.step_s) +
      ", " +
      size(r.peak_bytes) +
      (r.fits ? "" : " — does not fit") +
      "\n" +
      r.plan,
    parts = [];
  if (new Set(o.rows.map(r => r.gpus)).size > 1) {
    parts.push(
      el(
        "div",
        {},
        el("h3", { text: "Step against devices" }),
        plot({
          series: of("step_s", r => ({ x: r.gpus, y: r.step_s, title: title(r), hollow: !r.fits })),
          xText: v => String(v),
          yText: time,
          xName: "devices",
          yName: "step",
          log: true,
          points: true,
          label: "Step time of each strategy against the number of devices",
        }),
      ),
    );
    if (o.rows.some(r => r.samples_per_s))
      parts.push(
        el(
          "div",
          {},
          el("h3", { text: "Samples a second against devices" }),
          plot({
            series: of("samples_per_s", r => ({
              x: r.gpus,
              y: r.samples_per_s,
              title: title(r),
              hollow: !r.fits,
            })),
            xText: v => String(v),
            yText: short,
            xName: "devices",
            yName: "samples/s",
            log: true,
            points: true,
            label: "Throughput of each strategy against the number of devices",
          }),
        ),
      );
  }
  parts.push(
    el(
      "div",
      {},
      el("h3", { text: "Time against memory" }),
      plot({
        series: [
          ...of("step_s", r => ({ x: r.peak_bytes, y: r.step_s, title: title(r), hollow: !r.fits })).map(
            s => ({ ...s, apart: true }),
          ),
          {
            name: "Pareto front on the most devices",
            front: true,
            points: o.front.map(r => ({ x: r.peak_bytes, y: r.step_s, title: title(r) })),
          },
        ],
        xText: size,
        yText: time,
        xName: "peak memory of the fullest rank",
        yName: "step",
        points: true,
        log: true,
        label: "Step time against peak memory of every layout; the Pareto front is joined",
      }),
    ),
  );
  const rows = o.rows.map(r => [
    String(r.gpus),
    r.strategy,
    time(r.step_s),
    size(r.peak_bytes),
    r.fits ? "yes" : "no",
    r.plan,
    r.says || "",
  ]);
  return section(
    "oracle" + n,
    "Layouts: " + o.name,
    "× does not fit in memory.",
    el("div", { class: "pair" }, ...parts),
    folded(
      "All " + rows.length + " layouts",
      table(["devices>", "strategy", "step>", "memory>", "fits", "plan", "says"], rows),
    ),
  );
}
function planned(p, n) {
  const parts = [el("pre", { tabindex: 0, class: "wrap" }, el("code", { text: p.text.replaceAll(",", ",\u200b") }))];
  if (p.baselines.length) {
    const top = Math.max(...p.baselines.map(b => b.seconds));
    parts.push(
      bars(
        p.baselines.map(b => ({ name: b.name, total: b.seconds, values: { step: b.seconds } })),
        [["step", "--kernel"]],
        top,
        "The plan and its baselines: " +
          p.baselines.map(b => b.name + " " + time(b.seconds)).join(", "),
        time,
      ),
    );
  }
  if (p.machines.nodes.length) parts.push(el("h3", { text: "Placement on the machines" }), topology(p.machines));
  if (p.grid.length) parts.push(el("h3", { text: "Layers by device" }), grid(p));
  if (p.schedule) parts.push(el("h3", { text: "Pipeline order" }), schedule(p.schedule));
  if (p.buckets.length) parts.push(messages(p.buckets));
  if (p.regions.length) parts.push(regions(p.regions));
  if (p.sync.length)
    parts.push(el("h3", { text: "Gradient synchronization" }), table(["parameter", "by"], p.sync));
  return section("plan" + n, "Plan: " + p.name, "", ...parts);
}
function trusted(D) {
  const names = Object.keys(SOURCES),
    rows = D.sources.map(s => ({ name: s.name, total: 1, values: s.shares }));
  return section(
    "trust",
    "How much was measured",
    "Where the seconds of all tasks come from. Measured: the profiler, or a table of this device. Then changed: scaled by a what-if, or less the profiler's own overhead. Learned, formula: predicted. Given: set by a change or by hand.",
    bars(
      rows,
      names.map(k => [k, SOURCES[k]]),
      1,
      "Where prices come from: " +
        D.sources
          .map(
            s =>
              s.name +
              ": " +
              Object.entries(s.shares)
                .map(([k, v]) => share(v) + " " + k)
                .join(", "),
          )
          .join("; "),
      share,
    ),
    folded(
      "As a table",
      table(
        ["timeline", ...names.map(k => k + ">")],
        D.sources.map(s => [s.name, ...names.map(k => (s.shares[k] ? share(s.shares[k]) : ""))]),
      ),
    ),
  );
}
// All sections of a page, in their order.
function head(D) {
  // what comes first: the verdict, the cards, what a person should know about them
  const parts = [],
    X = D.diagnosis || {};
  if (X.verdict) parts.push(verdict(X.verdict));
  if (D.figures.length || D.notes.length)
    parts.push(
      cards(D.figures),
      ...D.notes.filter(n => !n.startsWith("assuming ")).map(n => el("p", { class: "soft", text: n })),
      D.notes.some(n => n.startsWith("assuming "))
        ? folded(
            "Assumptions",
            el(
              "ul",
              {},
              ...D.notes.filter(n => n.startsWith("assuming ")).map(n => el("li", { text: n.slice(9) })),
            ),
          )
        : null,
    );
  return parts.filter(p => p);
}
function sectionsOf(D) {
  const parts = [],
    X = D.diagnosis || {};
  const plans = D.plans.map((p, n) => planned(p, n)),
    first = !D.advice && plans.length; // a plan alone: what it is, before where its step goes
  if (first) parts.push(...plans);
  if (D.advice) parts.push(advised(D.advice));
  if (D.split.length) parts.push(goes(D.split, X.idle));
  if (X.modules && X.modules.seconds) parts.push(modules(X.modules));
  if (X.kernels && X.kernels.some(k => k.kernel || k.roofline)) parts.push(kernelTable(X.kernels, X.roofline, X.bound_by));
  if (X.communication && X.communication.length) parts.push(collectives(X.communication, X.machines));
  if (X.ranks && X.ranks.length) parts.push(rankTable(X.ranks, X.step_s, X.verdict));
  if (D.lines.length) {
    const late = (X.ranks || []).reduce((a, b) => (!a || b.waited_for_s > a.waited_for_s ? b : a), null);
    for (const line of D.lines) line.straggler = late && late.waited_for_s > 0.03 * X.step_s ? late.rank : undefined;
    const keys = [
      ["drag", "← →"],
      ["wheel (once clicked)", "+ −"],
      ["all", "0"],
      ["next, previous task", "N P"],
      ["its cause", "C"],
      ["frame it", "F"],
    ];
    parts.push(
      section(
        "timeline",
        "Timeline",
        "Time zero is the end of the previous step; what the CPU queues before it is shaded. Underlined bars are on the critical path: only shortening those shortens the step. Marks of a change: ▾ shorter, ▴ longer, + new, × gone, ‹ earlier, › later.",
        el(
          "p",
          { class: "soft" },
          ...keys.flatMap(([what, k]) => [what + " ", el("kbd", { text: k }), "   "]),
        ),
        timelines(D.lines),
        ...D.changes.map(c =>
          folded(
            "What differs most: “" + c.before + "” → “" + c.after + "”",
            table(
              ["op", "tasks before>", "after>", "time before>", "after>", "difference>"],
              c.rows.map(r => [
                r.op,
                count(r.tasks_before),
                count(r.tasks_after),
                time(r.before_s),
                time(r.after_s),
                (r.after_s < r.before_s ? "−" : "+") + time(Math.abs(r.after_s - r.before_s)),
              ]),
            ),
          ),
        ),
        ...D.lines
          .filter(l => l.path_ops.length)
          .map(l =>
            folded(
              "Critical path of “" + l.name + "” by op (" + count(l.path.length) + " tasks)",
              table(
                ["op", "time>", "of the step>"],
                l.path_ops.map(([op, s]) => [op, time(s), share(s / l.step_s)]),
              ),
            ),
          ),
      ),
    );
  }
  if (D.memory.length) parts.push(memories(D.memory, X.lower_memory));
  else if (D.advice)
    parts.push(section("memory", "Memory", "Unknown: this step has no tensor sizes. Record the trace with record_shapes=True, or with foretell profile train.py."));
  if (X.compared && X.compared.length) parts.push(measured(X.compared));
  D.oracle.forEach((o, n) => parts.push(scaling(o, n)));
  if (!first) parts.push(...plans);
  D.schedules.forEach((s, n) =>
    parts.push(
      section(
        "schedule" + n,
        "Schedule: " + s.name,
        s.says,
        schedule(s),
        table(
          ["device>", "peak memory>"],
          s.peak_memory.map((m, d) => [String(d), short(m)]),
        ),
      ),
    ),
  );
  if (D.sources.length) parts.push(trusted(D));
  return parts.filter(p => p);
}
