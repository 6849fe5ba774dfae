// The timeline in hand: moved, zoomed, searched and queried, by mouse and by keys.
function timelines(lines) {
  lines.forEach(prepared);
  const first = -Math.max(...lines.map(l => l.zero), 0),
    last = Math.max(...lines.map(l => l.end_s - l.zero), 1e-12),
    total = last - first;
  const state = {
    from: Math.max(first, -0.15 * last), // what lies further back is seen with "See all"
    to: last,
    all: false,
    path: true,
    changes: true,
    mode: "kind",
    find: "",
    line: null,
    task: -1,
    hover: null,
  };
  const canvas = el("canvas", {
    tabindex: 0,
    role: "application",
    "aria-roledescription": "timeline",
    "aria-label":
      "Timelines of " +
      lines.map(l => l.name).join(", ") +
      ". Arrow keys move, plus and minus zoom, N and P go from task to task, C to the cause; the chosen task is described below.",
  });
  const spacer = el("div"),
    rows = el("div", { class: "rows" }, canvas, spacer);
  const described = el("div", {
    class: "task",
    role: "status",
    "aria-live": "polite",
    text: "Hover, click or use the keys to see a task: what it is, when it ran and what let it start.",
  });
  const keys = el("ul", { class: "legend", "aria-hidden": "true" }),
    found = el("span", { class: "soft", role: "status" });
  const v = { canvas, rows, spacer, state, made: rowsOf(lines, false), hues: new Map(), matches: new Map() };
  let frame = 0;

  const redraw = () => {
    if (!frame)
      frame = requestAnimationFrame(() => {
        frame = 0;
        paint(v);
      });
  };
  const view = (from, to) => {
    const least = total / 1e7,
      span = Math.min(Math.max(to - from, least), total);
    from = Math.min(Math.max(from, first), last - span);
    state.from = from;
    state.to = from + span;
    redraw();
  };
  const move = part =>
    view(state.from + part * (state.to - state.from), state.to + part * (state.to - state.from));
  const zoom = (factor, at = 0.5) => {
    const span = state.to - state.from,
      c = state.from + at * span;
    view(c - at * span * factor, c + (1 - at) * span * factor);
  };
  const under = e => {
    const box = canvas.getBoundingClientRect(),
      x = e.clientX - box.left,
      y = e.clientY - box.top - AXIS + rows.scrollTop;
    const row =
      e.clientY - box.top > AXIS &&
      v.made.rows.find(r => r.kind === "lane" && y >= r.y && y < r.y + r.height);
    if (!row || x < left(v)) return null;
    const t = (state.from + row.line.zero + (x - left(v)) / scale(v)) / row.line.tick,
      slack = 1.5 / scale(v) / row.line.tick;
    for (
      let n = firstAfter(reach(row), t - slack);
      n < row.ids.length && row.line.start[row.ids[n]] <= t + slack;
      n++
    ) {
      const i = row.ids[n];
      if (row.line.start[i] + row.line.length[i] >= t - slack) return { line: row.line, task: i };
    }
    return null;
  };
  function say(line, i) {
    const words = [
      line.title_of(i),
      line.kinds[line.kind[i]] +
        " " +
        line.words[line.op[i]] +
        (line.layer[i] ? " in " + line.words[line.layer[i]] : "") +
        (line.phases[line.phase[i]] !== "none" ? ", " + line.phases[line.phase[i]] : "") +
        (line.onPath[i] ? " · on the critical path" : ""),
    ];
    words.push(
      "from " +
        time(line.from(i)) +
        " for " +
        time(line.for(i)) +
        " · price " +
        (line.sources[line.source[i]] === "none" ? "given" : line.sources[line.source[i]]),
    );
    if (line.cause.length)
      words.push(
        "started when it did because: " +
          (line.cause[i] >= 0
            ? line.why[line.because[i]] + " " + cut(line.title_of(line.cause[i]), 110)
            : line.why[0]),
      );
    if (line.origin.length && line.against >= 0) {
      const other = lines[line.against],
        o = line.origin[i];
      words.push(
        o < 0
          ? "not in “" + other.name + "”"
          : "in “" +
              other.name +
              "” from " +
              time(other.from(o)) +
              " for " +
              time(other.for(o)) +
              (line.change[i] ? " (here " + CHANGES[line.change[i]] + ")" : ""),
      );
    } else if (line.change[i]) words.push(CHANGES[line.change[i]]);
    return words.join("\n");
  }
  const choose = (line, i, follow) => {
    state.line = line;
    state.task = i;
    described.textContent = i < 0 ? "" : line.name + ": " + say(line, i);
    if (follow && i >= 0) {
      const a = line.from(i),
        b = a + line.for(i),
        span = state.to - state.from;
      if (a < state.from || b > state.to) view(a + (b - a) / 2 - span / 2, a + (b - a) / 2 + span / 2);
      const row = v.made.rows.find(r => r.line === line && r.lane === line.lane[i]),
        high = canvas.clientHeight - AXIS;
      if (row && (row.y < rows.scrollTop || row.y + ROW > rows.scrollTop + high))
        rows.scrollTop = row.y - high / 2;
    }
    redraw();
  };
  const beside = by => {
    const line = state.line || lines[lines.length - 1];
    if (state.task < 0)
      return choose(line, (line.path.length ? line.path : line.byLane[line.order[0]])[0], true);
    const ids =
        line.onPath[state.task] && state.path ? line.path : line.byLane[line.lane[state.task]] || line.path,
      n = ids.indexOf(state.task) + by;
    if (ids[n] !== undefined) choose(line, ids[n], true);
  };
  const acts = {
    ArrowLeft: () => move(-0.12),
    ArrowRight: () => move(0.12),
    ArrowUp: () => {
      rows.scrollTop -= 60;
    },
    ArrowDown: () => {
      rows.scrollTop += 60;
    },
    "+": () => zoom(1 / 1.4),
    "=": () => zoom(1 / 1.4),
    "-": () => zoom(1.4),
    0: () => view(first, last),
    Home: () => view(first, first + state.to - state.from),
    End: () => view(last, last + state.to - state.from),
    n: () => beside(1),
    p: () => beside(-1),
    c: () => {
      const c = state.line && state.task >= 0 && state.line.cause.length ? state.line.cause[state.task] : -1;
      if (c >= 0) choose(state.line, c, true);
    },
    f: () => {
      if (state.task >= 0) {
        const a = state.line.from(state.task),
          d = Math.max(state.line.for(state.task), total / 1e6);
        view(a - d, a + 2 * d);
      }
    },
    Escape: () => choose(null, -1),
  };
  canvas.addEventListener("keydown", e => {
    const act = !e.ctrlKey && !e.metaKey && acts[e.key.length === 1 ? e.key.toLowerCase() : e.key];
    if (act) {
      e.preventDefault();
      act();
    }
  });
  canvas.addEventListener(
    "wheel",
    e => {
      if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
        e.preventDefault();
        move((e.deltaX || e.deltaY) / 900);
        return;
      }
      if (!(e.ctrlKey || e.metaKey || document.activeElement === canvas)) return; // the page scrolls until the timeline is taken in hand
      e.preventDefault();
      zoom(
        e.deltaY > 0 ? 1.18 : 1 / 1.18,
        Math.min(1, Math.max(0, (e.offsetX - left(v)) / (rows.clientWidth - left(v)))),
      );
    },
    { passive: false },
  );
  let grip = null;
  canvas.addEventListener("pointerdown", e => {
    grip = { x: e.clientX, moved: 0 };
    canvas.setPointerCapture(e.pointerId);
    canvas.classList.add("drag");
  });
  canvas.addEventListener("pointerup", e => {
    if (grip && grip.moved < 4) {
      const hit = under(e);
      hit ? choose(hit.line, hit.task) : choose(null, -1);
    }
    grip = null;
    canvas.classList.remove("drag");
  });
  canvas.addEventListener("pointermove", e => {
    if (grip) {
      const by = grip.x - e.clientX;
      grip.moved += Math.abs(by);
      grip.x = e.clientX;
      if (grip.moved >= 4) view(state.from + by / scale(v), state.to + by / scale(v));
      return;
    }
    const hit = under(e);
    tip(hit ? say(hit.line, hit.task) : "", e);
  });
  canvas.addEventListener("pointerleave", () => tip(""));
  rows.addEventListener("scroll", redraw);
  const renew = () => {
    v.hues = new Map(lines.map(l => [l, colours(state.mode, l)]));
    keys.replaceChildren();
    for (const [name, colour] of v.hues.get(lines[0]).legend)
      keys.append(el("li", {}, el("i", { style: "background:" + colour }), name));
    redraw();
  };
  const search = text => {
    state.find = text.trim().toLowerCase();
    v.matches = new Map();
    let tasks = 0,
      spent = 0;
    if (state.find)
      for (const line of lines) {
        const hit = line.words.map(w => w.toLowerCase().includes(state.find)),
          mask = new Uint8Array(line.start.length);
        tasks = 0;
        spent = 0;
        for (let i = 0; i < mask.length; i++)
          if (hit[line.title[i]] || hit[line.op[i]] || hit[line.layer[i]]) {
            mask[i] = 1;
            tasks++;
            spent += line.for(i);
          }
        v.matches.set(line, mask);
      }
    found.textContent = state.find
      ? count(tasks) + " tasks, " + time(spent) + " in “" + cut(lines[lines.length - 1].name, 30) + "”"
      : "";
    redraw();
  };
  const check = (name, key) =>
    el(
      "label",
      {},
      el("input", {
        type: "checkbox",
        checked: true,
        onchange: e => {
          state[key] = e.target.checked;
          redraw();
        },
      }),
      name,
    );
  const bar = el(
    "div",
    { class: "bar" },
    el(
      "label",
      {},
      "Colour by",
      el(
        "select",
        {
          onchange: e => {
            state.mode = e.target.value;
            renew();
          },
        },
        ...["kind", "phase", "op", "source"].map(m => el("option", { value: m, text: m })),
      ),
    ),
    check("critical path", "path"),
    lines.some(l => l.change.some(c => c)) ? check("what differs", "changes") : null,
    lines.some(l => new Set(l.lanes.map(x => x.rank)).size > FIRST_RANKS)
      ? el(
          "label",
          {},
          el("input", {
            type: "checkbox",
            onchange: e => {
              state.all = e.target.checked;
              v.made = rowsOf(lines, state.all);
              redraw();
            },
          }),
          "all ranks",
        )
      : null,
    el(
      "label",
      {},
      "Find",
      el("input", { type: "search", placeholder: "op, name or layer", oninput: e => search(e.target.value) }),
    ),
    found,
    el("button", { type: "button", text: "−", "aria-label": "Zoom out", onclick: () => zoom(1.6) }),
    el("button", { type: "button", text: "+", "aria-label": "Zoom in", onclick: () => zoom(1 / 1.6) }),
    el("button", { type: "button", text: "See all", onclick: () => view(first, last) }),
  );
  new ResizeObserver(redraw).observe(rows);
  redrawers.push(renew);
  renew();
  window.foretellView = { view, first, total, state, paint: () => paint(v) };
  return el("div", {}, el("div", { class: "view" }, bar, rows, described), keys);
}
const redrawers = [];
let printing = false;
function tip(text, e) {
  const box = document.getElementById("tip");
  if (!text) {
    box.style.display = "none";
    return;
  }
  box.textContent = text;
  box.style.display = "block";
  box.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - box.offsetWidth - 8)) + "px";
  box.style.top =
    (e.clientY + 20 + box.offsetHeight > innerHeight ? e.clientY - box.offsetHeight - 12 : e.clientY + 18) +
    "px";
}
