// The page: which sections there are, in which order, and what happens to all of them.
function filled(D) {
  const main = document.getElementById("main"),
    parts = [];
  const X = D.diagnosis || {};
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
  if (D.advice) parts.push(advised(D.advice));
  if (D.split.length) parts.push(goes(D.split, X.idle));
  if (X.modules && X.modules.seconds) parts.push(modules(X.modules));
  if (X.kernels && X.kernels.length) parts.push(kernelTable(X.kernels, X.roofline));
  if (X.communication && X.communication.length) parts.push(collectives(X.communication));
  if (X.ranks && X.ranks.length) parts.push(rankTable(X.ranks, X.step_s));
  if (D.lines.length) {
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
        "Zero is the end of the step before; what the CPU does ahead of it lies on grey ground. Underlined bars are on the critical path: only shortening those shortens the step. What differs: ▾ shorter, ▴ longer, + new, × gone, ‹ earlier, › later.",
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
  if (D.memory.length) parts.push(memories(D.memory));
  if (X.compared && X.compared.length) parts.push(measured(X.compared));
  D.oracle.forEach((o, n) => parts.push(scaling(o, n)));
  D.plans.forEach((p, n) => parts.push(planned(p, n)));
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
  main.replaceChildren(...parts.filter(p => p));
}
const theme = document.getElementById("theme");
theme.addEventListener("change", () => {
  if (theme.value) document.documentElement.dataset.theme = theme.value;
  else delete document.documentElement.dataset.theme;
  redrawers.forEach(f => f());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redrawers.forEach(f => f()));
addEventListener("beforeprint", () => {
  printing = true;
  document.querySelectorAll("details").forEach(d => {
    d.open = true;
  });
  redrawers.forEach(f => f());
  if (window.foretellView) foretellView.paint();
});
addEventListener("afterprint", () => {
  printing = false;
  redrawers.forEach(f => f());
});
unpacked(document.getElementById("packed").textContent).then(
  D => {
    filled(D);
    document.documentElement.dataset.ready = "yes";
  },
  error => {
    document.getElementById("loading").textContent =
      "This browser cannot unpack the report (" + error.message + "). Browsers of 2023 and later can.";
  },
);
