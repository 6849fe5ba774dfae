"use strict";
// The studio: what is chosen, what the server answers to it, and the report's own drawings of the answers.
const base = location.pathname.replace(/[^/]*$/, ""),
  by = id => document.getElementById(id),
  TABS = ["step", "layouts", "compare"],
  START = { tab: "step", step: "", changes: [], own: "", on: "", model: "llama-3.1-8b", sizes: {}, gpu: "h100", count: "8", text: "", plan: {}, planner: "strategies", gpus: "", picked: "" };
let state = { ...START },
  offers = null,
  asking = 0, // the newest question about the step; older answers are dropped
  advice = {}, // the job that tried every change, by step and machines
  gains = {}, // of each change, where every one was tried
  refused = {}; // why a change does not apply

async function ask(name, request = {}) {
  const answer = await fetch(base + "call/" + name, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
  });
  if (!answer.ok) throw new Error("the studio refused the call (" + answer.status + ")");
  if ((answer.headers.get("Content-Type") || "").startsWith("text/plain")) return unpacked(await answer.text());
  const found = await answer.json();
  if (found.error) throw new Error(found.error + (found.hint ? "\nhint: " + found.hint : ""));
  return found;
}
// What is chosen stands in the address, so that it can be sent and found again.
function remember() {
  const kept = {};
  for (const [key, value] of Object.entries(state))
    if (JSON.stringify(value) !== JSON.stringify(START[key])) kept[key] = value;
  const text = Object.keys(kept).length ? "#" + encodeURIComponent(JSON.stringify(kept)) : "";
  history.replaceState(null, "", location.pathname + text);
}
function recall() {
  try {
    const kept = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}");
    for (const key of Object.keys(START)) if (typeof kept[key] === typeof START[key]) state[key] = kept[key];
  } catch (error) {
    state = { ...START };
  }
  if (!TABS.includes(state.tab)) state.tab = "step";
}
function set(changes) {
  Object.assign(state, changes);
  remember();
}
// Tabs: one panel at a time; arrow keys go from one to the next.
function show(tab) {
  set({ tab });
  for (const name of TABS) {
    by("panel-" + name).hidden = name !== tab;
    by("tab-" + name).setAttribute("aria-selected", String(name === tab));
    by("tab-" + name).tabIndex = name === tab ? 0 : -1;
  }
  if (tab === "compare") compared();
  dispatchEvent(new Event("resize"));
}
const specs = () => [...state.changes, ...state.own.split(/\s+/).filter(Boolean)];
const tried = () => advice[state.step + " " + state.on] || {}; // the search that tried every change
const stepAsked = () => ({ step: state.step, cluster: state.on, changes: specs(), advice: tried().done ? tried().job : "" });

// The step: the number first; what explains it follows, so that a drawing delays nothing.
async function renew() {
  const mine = ++asking;
  by("empty").hidden = Boolean(state.step);
  by("acts").hidden = !state.step;
  if (!state.step) {
    by("headline").replaceChildren();
    by("sections").replaceChildren();
    return;
  }
  by("sections").classList.add("busy");
  try {
    const found = await ask("whatif", stepAsked());
    if (mine !== asking) return;
    by("problem").textContent = "";
    by("headline").replaceChildren(cards(quick(found)));
    by("code").replaceChildren(...(found.code.length ? [el("h2", { text: "The changes, to paste" }), code(found.code.join("\n"))] : []));
    await detail(mine);
  } catch (error) {
    if (mine === asking) by("problem").textContent = error.message;
  } finally {
    if (mine === asking) by("sections").classList.remove("busy");
  }
}
function quick(found) {
  const list = [{ what: "current step", seconds: found.baseline_s }];
  if (found.changes.length)
    list.push({ what: "with changes", more: found.changes.join(" + "), seconds: found.predicted_s, gain: found.gain, per: found.per, low: found.low_s, high: found.high_s });
  if (found.peak_bytes) list.push({ what: "peak memory", bytes: found.peak_bytes });
  return list;
}
async function detail(mine) {
  const D = await ask("view", stepAsked());
  if (mine !== asking) return;
  by("contents").replaceChildren();
  redrawers.length = 0;
  here.prefix = "";
  here.nav = by("contents");
  if (!specs().length && D.figures.length) D.figures = D.figures.filter(f => f.what !== "with changes" || D.advice);
  by("headline").replaceChildren(...head(D));
  by("sections").replaceChildren(...sectionsOf(D));
  if (D.advice) {
    gains = Object.fromEntries(D.advice.ranked.map(r => [r.changes.join(" "), r.gain]));
    refused = Object.fromEntries(D.advice.refused.map(r => [r.change, r.reason]));
  }
  showGains();
  document.documentElement.dataset.ready = "yes";
}
// Beside each change its gain, where every change was tried: the best first, those that do not apply last.
const of = (table, spec) => (table[spec] === undefined ? table[spec.split(":")[0]] : table[spec]);
function showGains() {
  const labels = [...by("changes").querySelectorAll("label")],
    place = label => (refused[label.dataset.spec] ? 3 : of(gains, label.dataset.spec) === undefined ? 2 : 1);
  for (const label of labels) {
    const spec = label.dataset.spec,
      gain = of(gains, spec),
      why = refused[spec],
      span = label.querySelector(".gain");
    span.textContent = why ? "n/a" : gain === undefined ? "" : signed(-gain);
    span.className = "gain " + (gain > 0.005 ? "good" : gain < -0.005 ? "bad" : "soft");
    label.classList.toggle("refused", Boolean(why));
    label.title = label.dataset.does + (why ? "\nDoes not apply: " + why : "");
  }
  labels
    .sort((a, b) => place(a) - place(b) || (of(gains, b.dataset.spec) || 0) - (of(gains, a.dataset.spec) || 0))
    .forEach(label => by("changes").append(label));
}
async function rankAll() {
  const key = state.step + " " + state.on;
  if (!state.step || advice[key]) return;
  try {
    const { job } = await ask("rank", stepAsked());
    advice[key] = { job, done: false };
    by("rank").hidden = true;
    by("stop-rank").hidden = false;
    follow(
      job,
      found => (by("rank-says").textContent = found.says),
      found => {
        by("stop-rank").hidden = true;
        by("rank").hidden = found.state === "done";
        by("rank-says").textContent = found.state === "done" ? "" : found.says;
        if (found.state !== "done") return delete advice[key];
        advice[key].done = true;
        if (key === state.step + " " + state.on) renew();
      },
    );
  } catch (error) {
    by("rank-says").textContent = error.message;
  }
}
async function follow(job, step, end) {
  for (;;) {
    let found;
    try {
      found = await ask("job", { job });
    } catch (error) {
      found = { state: "failed", says: error.message, trail: [] };
    }
    step(found);
    if (found.state !== "running") return end(found);
    await new Promise(done => setTimeout(done, 400));
  }
}
async function listed(chosen) {
  const { steps, scenarios } = await ask("desk");
  if (chosen) set({ step: chosen });
  if (!steps.some(s => s.key === state.step)) set({ step: steps.length ? steps[steps.length - 1].key : "" });
  by("steps").hidden = !steps.length; // an empty group of choices is none
  by("steps").replaceChildren(
    ...steps.map(s =>
      el(
        "label",
        {},
        el("input", {
          type: "radio",
          name: "step",
          value: s.key,
          checked: s.key === state.step,
          onchange: () => {
            set({ step: s.key });
            gains = {};
            refused = {};
            showGains();
            by("rank").hidden = false;
            renew();
          },
        }),
        s.name,
      ),
    ),
  );
  by("empty").replaceChildren(
    el("h2", { text: "No step yet" }),
    el("p", { text: "Drop a trace of torch.profiler on the side, or make one of your script:" }),
    el("pre", { tabindex: 0 }, el("code", { text: "foretell profile train.py -o step.json.gz" })),
    el("p", { text: "No trace at hand? Look at one that comes with foretell, or build the step of a model from its sizes:" }),
    el(
      "div",
      { class: "row" },
      el("button", { type: "button", class: "main", id: "sample", text: "Open the sample trace", onclick: sample }),
      el("button", { type: "button", text: "Build a model under Layouts", onclick: () => show("layouts") }),
    ),
  );
  return scenarios;
}
async function sample() {
  by("sample").textContent = "Reading …";
  try {
    const { step } = await ask("sample");
    await listed(step);
    await renew();
    rankAll();
  } catch (error) {
    by("problem").textContent = error.message;
  }
}
// Files go to the studio as they are; what is too large is said so.
async function send(file) {
  const say = text => (by("upload-says").textContent = text);
  say("Reading " + file.name + " …");
  try {
    const answer = await fetch(base + "upload?name=" + encodeURIComponent(file.name), { method: "POST", body: file }),
      found = await answer.json().catch(() => ({ error: answer.status === 413 ? file.name + " is too large" : "the studio refused " + file.name }));
    if (found.error) return say(found.error);
    say(found.name + " is loaded");
    await listed(found.step);
    renew();
  } catch (error) {
    say(file.name + " could not be sent: it is too large, or the studio was closed");
  }
}
// Machines: a GPU and how many, or a named system; as a file would say them, to be edited.
function machinePicker(place, prefix, value, changed) {
  const field = (name, label, node) => el("div", { class: "field" }, el("label", { for: prefix + name, text: label }), node),
    group = (label, names) => el("optgroup", { label }, ...names.map(n => el("option", { value: n, text: n }))),
    kind = el("select", { id: prefix + "kind" }, prefix === "step-" ? el("option", { value: "", text: "those of the step" }) : null, group("GPUs", offers.gpus), group("Systems", offers.machines)),
    many = el("input", { id: prefix + "count", type: "number", min: 1, max: 16384, value: value.count || "" }),
    says = el("p", { class: "says", role: "status", id: prefix + "says" }),
    area = el("textarea", { id: prefix + "text", spellcheck: "false" });
  kind.value = value.gpu;
  const spec = () => (kind.value ? kind.value + (many.value ? ":gpus=" + many.value : "") : ""),
    tell = async request => {
      try {
        const found = await ask("cluster", request);
        says.textContent = found.ranks
          ? Object.entries(found.devices).map(([n, k]) => k + " × " + n).join(", ") + " on " + plural(found.nodes, "node") + (found.price ? ", " + Math.round(found.price) + " $/h" : "")
          : "";
        area.value = found.text;
        return found.cluster;
      } catch (error) {
        says.textContent = error.message;
        return null;
      }
    },
    preset = async () => {
      const key = await tell({ cluster: spec() });
      if (key !== null) changed(key, kind.value, many.value);
    };
  kind.addEventListener("change", preset);
  many.addEventListener("change", preset);
  place.replaceChildren(
    field("kind", "GPU or system", kind),
    field("count", "How many GPUs", many),
    says,
    el(
      "details",
      {},
      el("summary", { text: "Edit links and prices" }),
      field("text", "The machines as a file would say them", area),
      el("button", {
        type: "button",
        text: "Use this text",
        onclick: async () => {
          const key = await tell({ text: area.value });
          if (key) changed(key, kind.value, many.value);
        },
      }),
    ),
  );
  tell({ cluster: spec() });
}
// The model: published ones and families, with the sizes people change.
function modelPicker() {
  const pick = by("model"),
    group = (label, names) => el("optgroup", { label }, ...names.map(n => el("option", { value: n, text: n })));
  pick.replaceChildren(group("Published", offers.models.published), group("Known by name", offers.models.named), group("By sizes", offers.models.family));
  pick.value = state.model;
  pick.addEventListener("change", () => {
    set({ model: pick.value, sizes: {} });
    sizes();
  });
  sizes();
}
function sizes() {
  const known = offers.sizes[state.model] || [
    { name: "batch", default: "" },
    ...(offers.models.published.includes(state.model) ? [{ name: "seq", default: "" }] : []),
  ];
  by("sizes").replaceChildren(...known.map(f => numberField("size-", f.name, state.sizes[f.name] === undefined ? f.default : state.sizes[f.name], "default", value => set({ sizes: { ...state.sizes, [f.name]: value } }))));
}
function numberField(prefix, name, value, hint, changed) {
  const input = el("input", { id: prefix + name, type: "number", min: 0, value: String(value), placeholder: hint });
  input.addEventListener("change", () => changed(input.value));
  return el("div", {}, el("label", { for: prefix + name, text: name.replace(/_/g, " ") }), input);
}
function workload() {
  const family = offers.sizes[state.model] || [],
    given = { ...Object.fromEntries(family.filter(f => f.default !== "").map(f => [f.name, f.default])), ...state.sizes },
    text = Object.entries(given).filter(([, v]) => v !== "" && v !== null).map(([k, v]) => k + "=" + v).join(",");
  return state.model + (text ? ":" + text : "");
}
function machines(count = state.count) {
  // those that are chosen; a system whose size is left open is taken as a whole
  return state.text || state.gpu + (state.count && count ? ":gpus=" + count : "");
}
// A plan of one's own: a field each, plain values left out.
function planPicker() {
  by("plan").replaceChildren(
    ...offers.plan.map(f => {
      const id = "plan-" + f.name,
        value = state.plan[f.name] === undefined ? f.default : state.plan[f.name],
        keep = v => set({ plan: { ...state.plan, [f.name]: v } });
      if (f.kind === "tick") {
        const box = el("input", { id, type: "checkbox", checked: value === true || value === "yes" });
        box.addEventListener("change", () => keep(box.checked ? "yes" : false));
        return el("div", { class: "tick" }, box, el("label", { for: id, text: f.name, title: f.name === "sp" ? "sequence parallel" : undefined }));
      }
      if (f.kind === "choice") {
        const pick = el("select", { id }, ...f.options.map(o => el("option", { value: o, text: o || "default" })));
        pick.value = String(value);
        pick.addEventListener("change", () => keep(pick.value));
        return el("div", {}, el("label", { for: id, text: f.name === "zero" ? "ZeRO" : f.name }), pick);
      }
      return numberField("plan-", f.name, f.name === "dp" && state.plan.dp === undefined ? "" : value || "", "auto", keep);
    }),
  );
}
function planText() {
  const degree = name => Number(state.plan[name]) || 1,
    rest = Number(state.count) / (degree("tp") * degree("pp") * degree("cp")),
    dp = Number(state.plan.dp) || (rest >= 1 && Number.isInteger(rest) ? rest : 1);
  return [["dp", dp]]
    .concat(chosen())
    .map(([name, value]) => name + "=" + value)
    .join(",");
}
function chosen() {
  return offers.plan
    .filter(f => f.name !== "dp" && state.plan[f.name] !== undefined && state.plan[f.name] !== "" && String(state.plan[f.name]) !== String(f.default) && state.plan[f.name] !== false)
    .map(f => [f.name, state.plan[f.name]]);
}
// Layouts: points by time, memory and cost while they are found; one of them opens.
let job = "";
async function explore() {
  const request = { workload: workload(), cluster: machines(), planner: state.planner, gpus: state.gpus };
  by("layouts-empty").hidden = true;
  by("job-says").textContent = "starting";
  try {
    job = (await ask("explore", request)).job;
  } catch (error) {
    by("job-says").textContent = error.message;
    return;
  }
  by("stop").disabled = false;
  by("explore").disabled = true;
  for (const id of ["charts", "found-table", "picked", "plan-contents", "plan-sections"]) by(id).replaceChildren();
  follow(
    job,
    found => {
      by("job-says").textContent = found.says + (found.seconds > 1 ? " · " + found.seconds.toFixed(0) + " s" : "");
      searched(found.says);
      progress(found.trail || []);
      if (Array.isArray(found.answer)) points(found.answer);
    },
    found => {
      by("stop").disabled = true;
      by("explore").disabled = false;
      by("job-bar").hidden = true;
      by("job-says").textContent = found.state === "done" ? plural(found.answer.length, "layout") + " in " + found.seconds.toFixed(1) + " s" : found.says;
    },
  );
}
function searched(says) {
  // a bar that is filled where the search tells how far it is, and only moves where it does not
  const [, done, all] = /(\d+) of (\d+)/.exec(says) || [],
    bar = by("job-bar");
  bar.hidden = false;
  if (all) (bar.max = Number(all)), (bar.value = Number(done));
  else bar.removeAttribute("value");
}
function progress(trail) {
  if (trail.length < 2) return by("progress").replaceChildren();
  const width = 460,
    high = 70,
    end = trail[trail.length - 1][0] || 1,
    values = trail.map(t => t[1]),
    [low, top] = [Math.min(...values), Math.max(...values)],
    svg = chart(width, high, "The best so far, over " + end.toFixed(1) + " s of search: from " + short(values[0]) + " to " + short(values[values.length - 1]));
  svg.style.maxWidth = width + "px";
  svg.append(
    draw("path", {
      d: trail.map(([t, v], k) => (k ? "L" : "M") + ((width - 10) * t) / end + " " + (high - 8 - ((high - 20) * (v - low)) / (top - low || 1))).join(""),
      fill: "none",
      style: "stroke:var(--accent);stroke-width:2",
    }),
    draw("text", { x: 0, y: 10, class: "soft", text: "best so far" }),
  );
  by("progress").replaceChildren(svg);
}
const per = row => 1000 / row.samples_per_s;
function points(rows) {
  const priced = rows.every(r => r.cost !== null),
    cost = r => (priced ? 1000 * r.cost : (1000 * r.gpus) / r.samples_per_s);
  by("charts").replaceChildren(
    el(
      "div",
      { class: "pair points" },
      el("div", {}, el("h2", { text: "Time and memory" }), pareto(rows.filter(r => r.peak_bytes), r => r.peak_bytes, size, "peak memory a GPU")),
      el("div", {}, el("h2", { text: "Time and cost" }), pareto(rows, cost, priced ? v => short(v) + " $" : v => short(v) + " GPU·s", priced ? "cost of 1,000 samples" : "GPU-seconds of 1,000 samples")),
    ),
    legend([...new Set(rows.map(r => r.strategy))].slice(0, 14).map((name, k) => [SHAPES[k % SHAPES.length] + " " + name, hueOf(k)])),
    el("p", { class: "soft", text: "× out of memory. The line joins the Pareto front: no other layout is better in time and memory and cost." }),
  );
  const ranked = [...rows].sort((a, b) => b.fits - a.fits || b.samples_per_s - a.samples_per_s);
  by("found-table").replaceChildren(
    table(
      ["GPUs>", "strategy (✓ Pareto)", "step>", "samples/s>", "MFU>", "memory>", "plan", "limits"],
      ranked.slice(0, 60).map(r => [
        String(r.gpus),
        r.plan ? el("button", { type: "button", class: "link", text: r.strategy + (r.front ? " ✓" : ""), onclick: () => pick(r.plan, r.gpus) }) : r.strategy,
        time(r.step_s),
        short(r.samples_per_s),
        r.mfu ? share(r.mfu) : "",
        (r.peak_bytes ? size(r.peak_bytes) : "") + (r.fits ? "" : " OOM"),
        el("span", { class: "plan" }, ...cut(r.plan, 90).split(/(?<=,)/).flatMap(t => [t, el("wbr")])),
        cut(r.says || "", 60),
      ]),
    ),
  );
}
const hueOf = k => "hsl(" + HUES[k % HUES.length] + " 70% var(--point))";
function pareto(rows, x, xText, xName) {
  const width = 460,
    high = 270,
    left = 60,
    names = [...new Set(rows.map(r => r.strategy))],
    xs = rows.map(x),
    ys = rows.map(per),
    log = Math.log,
    [x0, x1] = [Math.min(...xs) / 1.15, Math.max(...xs) * 1.15],
    [y0, y1] = [Math.min(...ys) / 1.15, Math.max(...ys) * 1.15],
    X = v => left + ((width - left - 14) * (log(v) - log(x0))) / (log(x1) - log(x0) || 1),
    Y = v => high - ((high - 14) * (log(v) - log(y0))) / (log(y1) - log(y0) || 1),
    svg = draw("svg", { viewBox: "0 -16 " + width + " " + (high + 58), role: "group", "aria-label": "Layouts by time and " + xName + "; each is a button" });
  if (!rows.length) return el("p", { class: "soft", text: "Nothing to draw: the planner tells no memory." });
  for (const v of ticks(x0, x1, 5, true, xText === size))
    svg.append(
      draw("line", { x1: X(v), x2: X(v), y1: 8, y2: high, class: "axis" }),
      draw("text", { x: X(v), y: high + 16, "text-anchor": "middle", class: "soft", text: xText(v) }),
    );
  for (const v of ticks(y0, y1, 7, true))
    svg.append(
      draw("line", { x1: left, x2: width - 14, y1: Y(v), y2: Y(v), class: "axis" }),
      draw("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end", class: "soft", text: time(v) }),
    );
  svg.append(
    draw("text", { x: (left + width) / 2, y: high + 36, "text-anchor": "middle", class: "soft", text: xName }),
    draw("text", { x: 0, y: -4, class: "soft", text: "time of 1,000 samples" }),
  );
  const front = rows.filter(r => r.front).sort((a, b) => x(a) - x(b));
  if (front.length > 1)
    svg.append(draw("path", { d: front.map((r, k) => (k ? "L" : "M") + X(x(r)) + " " + Y(per(r))).join(""), fill: "none", style: "stroke:var(--mark);stroke-width:1.6;stroke-dasharray:5 3" }));
  rows.forEach(r => {
    const k = names.indexOf(r.strategy),
      text = r.strategy + " on " + r.gpus + " GPUs: " + time(r.step_s) + " a step, " + (r.peak_bytes ? size(r.peak_bytes) + ", " : "") + xText(x(r)) + (r.fits ? "" : ", out of memory") + (r.front ? ", Pareto" : "") + "\n" + r.plan,
      open = () => r.plan && pick(r.plan, r.gpus),
      node = draw(
        "text",
        {
          x: X(x(r)), y: Y(per(r)) + 5, "text-anchor": "middle", tabindex: 0, role: "button", "aria-label": text,
          class: state.picked === r.plan ? "chosen" : "", style: "fill:" + hueOf(k) + ";font-size:" + (r.front ? 19 : 14) + "px;fill-opacity:" + (r.fits ? 1 : 0.5),
          onclick: open,
          onkeydown: e => {
            if (e.key === "Enter" || e.key === " ") {
              e.preventDefault();
              open();
            }
          },
          onpointerenter: e => tip(text, e),
          onpointerleave: () => tip(""),
        },
      );
    node.textContent = r.fits ? SHAPES[k % SHAPES.length] : "×";
    svg.append(node);
  });
  return svg;
}
// One plan: predicted, on its machines, its pipeline and its timeline.
async function pick(plan, gpus) {
  set({ picked: plan });
  by("layouts-empty").hidden = true;
  by("picked").replaceChildren(el("p", { class: "says", role: "status", text: "Predicting " + cut(plan || "dp=1", 120) + " …" }));
  const cluster = machines(gpus);
  try {
    const D = await ask("plan", { workload: workload(), plan, cluster });
    by("plan-contents").replaceChildren();
    redrawers.length = 0;
    here.prefix = "plan-";
    here.nav = by("plan-contents");
    const acts = el(
      "div",
      { class: "row" },
      el("button", { type: "button", text: "Export plan", id: "export-plan", onclick: () => exported("plan", { plan }, by("plan-says")) }),
      el(
        "select",
        { id: "export-to", "aria-label": "The plan as settings of another program", onchange: e => settings(plan, e.target.value) },
        ...["", ...offers.programs].map(p => el("option", { value: p, text: p || "Settings for …" })),
      ),
      el("button", { type: "button", text: "Save to compare", onclick: () => keep({ workload: workload(), plan, cluster }) }),
      el("button", { type: "button", text: "Add as a step", onclick: () => build(plan, cluster) }),
      el("span", { id: "plan-says", class: "says", role: "status" }),
    );
    by("picked").replaceChildren(el("h2", { text: "The plan" }), ...head(D), acts, el("div", { id: "settings" }));
    by("plan-sections").replaceChildren(...sectionsOf(D));
    by("picked").scrollIntoView();
  } catch (error) {
    by("picked").replaceChildren(el("p", { class: "problem", role: "alert", text: error.message }));
  }
}
async function settings(plan, to) {
  // the plan as files of another program, to paste
  by("plan-says").textContent = "";
  by("settings").replaceChildren();
  if (!to) return;
  try {
    const { files } = await ask("export", { form: "settings", plan: plan || "dp=1", to });
    by("settings").replaceChildren(...Object.entries(files).flatMap(([name, text]) => [el("h3", { text: to + ": " + name }), code(text)]));
  } catch (error) {
    by("plan-says").textContent = error.message;
  }
}
async function keep(request) {
  try {
    await ask("save-plan", request);
    by("plan-says").textContent = "saved: see Compare";
  } catch (error) {
    by("plan-says").textContent = error.message;
  }
}
async function build(plan, cluster) {
  by("build-says").textContent = "building …";
  try {
    const { step } = await ask("build", { workload: workload(), plan, cluster: cluster || machines() });
    by("build-says").textContent = "added to Step";
    set({ changes: [], own: "", on: "" });
    offerChanges();
    await listed(step);
    show("step");
    renew();
  } catch (error) {
    by("build-says").textContent = error.message;
  }
}
// Scenarios beside each other.
async function compared() {
  const { scenarios } = await ask("desk");
  by("compare-empty").hidden = scenarios.length > 0;
  if (!scenarios.length) {
    by("compared").replaceChildren();
    by("compared-table").replaceChildren();
    return;
  }
  const most = Math.max(...scenarios.map(s => Math.max(s.found.high_s, s.found.baseline_s || 0))),
    width = 1000,
    left = 320,
    X = s => left + ((width - left - 120) * s) / most,
    svg = chart(width, scenarios.length * 34 + 8, "Predicted step of each scenario with its 80 % interval: " + scenarios.map(s => s.title + " " + time(s.found.predicted_s)).join("; "));
  scenarios.forEach((s, k) => {
    const y = k * 34 + 18;
    svg.append(
      draw("text", { x: left - 12, y: y + 4, "text-anchor": "end", text: cut(s.number + ": " + s.title, 46) }),
      draw("rect", { x: left, y: y - 9, width: X(s.found.predicted_s) - left, height: 18, rx: 3, style: "fill:var(--kernel)" }),
      s.found.baseline_s ? draw("line", { x1: X(s.found.baseline_s), x2: X(s.found.baseline_s), y1: y - 14, y2: y + 14, style: "stroke:var(--ink);stroke-dasharray:4 3" }) : "",
      draw("path", { d: "M" + X(s.found.low_s) + " " + y + "H" + X(s.found.high_s), style: "stroke:var(--ink);stroke-width:1.5" }),
      draw("text", { x: width - 110, y: y + 4, text: time(s.found.predicted_s) }),
    );
  });
  by("compared").replaceChildren(
    el("h2", { text: "Scenarios" }),
    el("p", { class: "soft", text: "The dashed line is the current step of each; the whisker is the 80 % interval." }),
    scrolled(svg, width),
  );
  by("compared-table").replaceChildren(
    table(
      ["scenario", "of", "current>", "predicted>", "80 % interval>", "gain>", "memory>", ""],
      scenarios.map(s => [
        s.number + ": " + s.title,
        s.step,
        s.found.baseline_s ? time(s.found.baseline_s) : "",
        time(s.found.predicted_s),
        s.found.high_s > s.found.low_s ? interval(s.found.low_s, s.found.high_s) : "",
        s.found.changes.length ? signed(-s.found.gain) + (s.found.per === "sample" ? " a sample" : "") : "",
        s.found.peak_bytes ? size(s.found.peak_bytes) : "",
        el("button", { type: "button", text: "Forget", "aria-label": "Forget scenario " + s.number, onclick: () => ask("forget", { numbers: [s.number] }).then(compared) }),
      ]),
    ),
  );
}
async function exported(form, request, says) {
  says.textContent = "writing …";
  try {
    const { file } = await ask("export", { ...request, form });
    says.replaceChildren(el("a", { href: base + "out/" + file, target: "_blank", id: form === "plan" ? "plan-link" : "export-link", text: "Open " + file }));
  } catch (error) {
    says.textContent = error.message;
  }
}
function offerChanges() {
  by("changes").replaceChildren(
    ...offers.changes.map(({ spec, does }) =>
      el(
        "label",
        { "data-spec": spec, "data-does": does, title: does },
        el("input", {
          type: "checkbox",
          value: spec,
          checked: state.changes.includes(spec),
          onchange: e => {
            set({ changes: e.target.checked ? [...state.changes, spec] : state.changes.filter(s => s !== spec) });
            renew();
          },
        }),
        spec,
        el("span", { class: "gain" }),
      ),
    ),
  );
  showGains();
  by("own").value = state.own;
}
function wire() {
  TABS.forEach((name, k) => {
    by("tab-" + name).addEventListener("click", () => show(name));
    by("tab-" + name).addEventListener("keydown", e => {
      const to = { ArrowRight: k + 1, ArrowLeft: k - 1, Home: 0, End: TABS.length - 1 }[e.key];
      if (to === undefined) return;
      e.preventDefault();
      const next = TABS[(to + TABS.length) % TABS.length];
      show(next);
      by("tab-" + next).focus();
    });
  });
  const drop = by("drop");
  by("file").addEventListener("change", e => e.target.files.length && send(e.target.files[0]));
  drop.addEventListener("dragover", e => {
    e.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", e => {
    e.preventDefault();
    drop.classList.remove("over");
    if (e.dataTransfer.files.length) send(e.dataTransfer.files[0]);
  });
  by("own").addEventListener("change", e => {
    set({ own: e.target.value });
    renew();
  });
  by("save").addEventListener("click", () =>
    ask("save", stepAsked()).then(
      () => (by("exported").textContent = "saved: see Compare"),
      error => (by("exported").textContent = error.message),
    ),
  );
  for (const form of ["report", "trace"]) by(form).addEventListener("click", () => exported(form, stepAsked(), by("exported")));
  by("rank").addEventListener("click", rankAll);
  by("stop-rank").addEventListener("click", () => {
    const mine = advice[state.step + " " + state.on];
    if (mine) ask("stop", { job: mine.job });
  });
  by("explore").addEventListener("click", explore);
  by("stop").addEventListener("click", () => ask("stop", { job }));
  by("predict").addEventListener("click", () => pick(planText()));
  by("build").addEventListener("click", () => build(planText()));
  by("gpus").value = state.gpus;
  by("gpus").addEventListener("change", e => set({ gpus: e.target.value }));
  by("planner").replaceChildren(...offers.planners.map(p => el("option", { value: p, text: p === "strategies" ? "every strategy (ParaDL)" : p })));
  by("planner").value = state.planner;
  by("planner").addEventListener("change", e => set({ planner: e.target.value }));
  by("share").addEventListener("click", () => {
    const done = text => (by("share").textContent = text);
    if (navigator.clipboard) navigator.clipboard.writeText(location.href).then(() => done("Copied"), () => done("Copy the address"));
    else done("Copy the address");
  });
  const theme = by("theme");
  theme.addEventListener("change", () => {
    if (theme.value) document.documentElement.dataset.theme = theme.value;
    else delete document.documentElement.dataset.theme;
    redrawers.forEach(f => f());
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redrawers.forEach(f => f()));
}
// What the empty view of layouts offers: a question with its fields filled in.
const EXAMPLES = [
  ["Llama 3.1 8B on 8 H100", { model: "llama-3.1-8b", gpu: "h100", count: "8" }],
  ["Llama 3.1 70B on 64 H100", { model: "llama-3.1-70b", gpu: "h100", count: "64" }],
  ["Qwen3 30B-A3B (experts) on 32 H200", { model: "qwen3-30b-a3b", gpu: "h200", count: "32" }],
];
function examples() {
  const offered = EXAMPLES.filter(([, e]) => offers.models.published.includes(e.model) && offers.gpus.includes(e.gpu));
  by("layouts-examples").replaceChildren(
    ...offered.map(([name, fields]) =>
      el("button", {
        type: "button",
        text: name,
        onclick: () => {
          set({ ...fields, sizes: {}, text: "" });
          by("model").value = fields.model;
          sizes();
          by("on-kind").value = fields.gpu;
          by("on-count").value = fields.count;
          by("on-count").dispatchEvent(new Event("change"));
          explore();
        },
      }),
    ),
  );
}
async function begin() {
  recall();
  offers = await ask("choices");
  offerChanges();
  modelPicker();
  planPicker();
  const [onGpu, onCount] = state.on.split(":gpus=");
  machinePicker(by("step-machines"), "step-", { gpu: onGpu || "", count: onCount || "" }, key => {
    set({ on: key });
    renew();
  });
  machinePicker(by("machines"), "on-", { gpu: state.gpu, count: state.count }, (key, gpu, count) => set({ gpu, count, text: key.startsWith("text ") ? key : "" }));
  wire();
  examples();
  await listed();
  show(state.tab);
  await renew();
  if (state.step) rankAll();
  document.documentElement.dataset.ready = "yes";
  if (state.tab === "layouts" && state.picked) pick(state.picked);
}
begin();
