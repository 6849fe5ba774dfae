// The timelines painted: all that is in sight, one row after the other.
const left = v => (v.rows.clientWidth < 700 ? 110 : 190);
const scale = v => (v.rows.clientWidth - left(v)) / (v.state.to - v.state.from);

function paint(v) {
  const { canvas, rows, spacer, made } = v;
  const ratio = devicePixelRatio || 1,
    w = rows.clientWidth,
    full = made.height + AXIS,
    h = Math.min(full, Math.max(160, printing ? full : innerHeight * 0.74));
  if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) {
    canvas.width = Math.round(w * ratio);
    canvas.height = Math.round(h * ratio);
    canvas.style.height = h + "px";
    spacer.style.height = Math.max(0, full - h) + "px";
    spacer.style.marginTop = 0;
  }
  const g = canvas.getContext("2d", { alpha: false }),
    ink = {
      ground: css("--ground"),
      ink: css("--ink"),
      soft: css("--soft"),
      line: css("--line"),
      faint: css("--faint"),
      mark: css("--mark"),
      on: css("--on"),
      accent: css("--accent"),
    };
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.fillStyle = ink.ground;
  g.fillRect(0, 0, w, h);
  g.font = "11px system-ui, sans-serif";
  g.textBaseline = "middle";
  const l = left(v),
    top = AXIS - rows.scrollTop;
  axis(v, g, ink, l, w, h);
  g.save();
  g.beginPath();
  g.rect(0, AXIS, w, h - AXIS);
  g.clip();
  for (const row of made.rows) {
    const y = top + row.y;
    if (y + row.height < AXIS || y > h) continue;
    if (row.kind === "title") title(g, ink, row, y, w);
    else lane(v, g, ink, row, y, l, w);
  }
  chain(v, g, ink, top, l, w);
  g.restore();
}
function axis(v, g, ink, l, w, h) {
  const { state } = v,
    k = scale(v);
  const span = state.to - state.from,
    rough = span / Math.max(2, (w - l) / 110),
    ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(m => m * ten >= rough) * ten;
  g.fillStyle = ink.soft;
  g.strokeStyle = ink.faint;
  g.lineWidth = 1;
  g.textAlign = "left";
  g.beginPath();
  for (let t = Math.ceil(state.from / step) * step; t <= state.to; t += step) {
    const x = Math.round(l + (t - state.from) * k) + 0.5;
    g.moveTo(x, AXIS - 6);
    g.lineTo(x, h);
    if (x < w - 50)
      g.fillText(time(Math.abs(t) < step / 1e6 ? 0 : Number(t.toPrecision(10))).replace("-", "−"), x + 3, AXIS / 2);
  }
  g.stroke();
  if (state.from < 0 && state.to > 0) {
    const x = Math.round(l - state.from * k) + 0.5;
    g.strokeStyle = ink.soft;
    g.beginPath();
    g.moveTo(x, AXIS - 6);
    g.lineTo(x, h);
    g.stroke();
  }
}
function title(g, ink, row, y, w) {
  g.fillStyle = ink.faint;
  g.fillRect(0, y + 3, w, TITLE - 5);
  g.fillStyle = ink.ink;
  g.font = "600 12px system-ui, sans-serif";
  const hidden = row.line.hidden
    ? ", " + FIRST_RANKS + " of " + (FIRST_RANKS + row.line.hidden) + " ranks"
    : "";
  g.fillText(cut(row.line.name, 90) + "  —  " + time(row.line.step_s) + " a step" + hidden, 8, y + TITLE / 2 + 1);
  g.font = "11px system-ui, sans-serif";
}
function lane(v, g, ink, row, y, l, w) {
  const { state } = v,
    { line, ids } = row,
    k = scale(v) * line.tick,
    shift = (state.from + line.zero) / line.tick,
    colourOf = v.hues.get(line).of,
    hits = v.matches.get(line);
  const ends = reach(row),
    last = (state.to + line.zero) / line.tick,
    high = ROW - 4;
  let runAt = 0,
    runTo = -1,
    runColour = "",
    lastPath = -1,
    lastSign = -1;
  const flush = () => {
    if (runTo > runAt) {
      g.fillStyle = runColour;
      g.fillRect(runAt, y + 2, runTo - runAt, high);
    }
    runTo = -1;
  };
  g.fillStyle = row.isPath ? ink.mark : ink.soft;
  g.textAlign = "left";
  g.fillText(cut(row.name, l < 150 ? 16 : 30), 8, y + ROW / 2);
  g.save();
  g.beginPath();
  g.rect(l, y, w - l, ROW);
  g.clip();
  if (line.zero > 0 && state.from < 0) {
    g.fillStyle = ink.faint; // before the step: what the host does ahead of the device
    g.fillRect(l, y, (Math.min(0, state.to) - state.from) * scale(v), ROW);
  }
  const labels = [],
    marks = [],
    signs = [];
  for (let n = firstAfter(ends, shift); n < ids.length; n++) {
    const i = ids[n],
      s = line.start[i];
    if (s > last) break;
    let a = l + (s - shift) * k,
      b = a + line.length[i] * k;
    if (b - a < 1) {
      a = Math.floor(a);
      b = a + 1;
      if (a < runTo && !hits) {
        if (state.path && !row.isPath && line.onPath[i] && a > lastPath) {
          marks.push(a, 1);
          lastPath = a;
        }
        continue;
      }
    }
    a = Math.max(a, l - 2);
    b = Math.min(b, w + 2);
    const colour = hits && !hits[i] ? ink.faint : colourOf(i);
    if (b - a > 3) {
      flush();
      g.fillStyle = colour;
      g.fillRect(a, y + 2, b - a - 0.6, high);
      if (b - a > 34) labels.push(i, a, b);
    } else if (colour === runColour && a - runTo < 0.6 && runTo >= 0) runTo = b;
    else {
      flush();
      runAt = a;
      runTo = b;
      runColour = colour;
    }
    if (state.path && !row.isPath && line.onPath[i]) {
      marks.push(a, Math.max(b - a - 0.6, 1));
      lastPath = b;
    }
    if (
      state.changes &&
      !row.isPath &&
      line.change[i] &&
      (b - a > 9 || line.change[i] < 4 || line.change[i] > 5) &&
      a > lastSign + 6
    ) {
      signs.push(line.change[i], a, b - a);
      lastSign = a;
    }
    if (line === state.line && i === state.task) {
      flush();
      g.strokeStyle = ink.ink;
      g.lineWidth = 2;
      g.strokeRect(a + 1, y + 2, Math.max(b - a - 2, 2), high);
    }
  }
  flush();
  g.fillStyle = ink.mark;
  for (let m = 0; m < marks.length; m += 2) g.fillRect(marks[m], y + ROW - 4, marks[m + 1], 3);
  for (let m = 0; m < signs.length; m += 3) {
    g.fillStyle = ink.ink;
    if (signs[m + 2] > 9) {
      g.font = "bold 11px system-ui";
      g.fillText(SIGNS[signs[m]], signs[m + 1] + 1, y + 7);
      g.font = "11px system-ui, sans-serif";
    } else g.fillRect(signs[m + 1], y, Math.max(1, signs[m + 2]), 2);
  }
  g.fillStyle = ink.on;
  for (let m = 0; m < labels.length; m += 3) {
    const a = Math.max(labels[m + 1], l) + (state.changes && !row.isPath && line.change[labels[m]] ? 12 : 4),
      room = labels[m + 2] - a - 6;
    const name = line.label_of(labels[m]),
      letters = Math.floor((room * name.length) / (g.measureText(name).width || 1));
    if (letters >= Math.min(6, name.length) && !(hits && !hits[labels[m]])) g.fillText(cut(name, letters), a, y + ROW / 2 - 0.5);
  }
  g.restore();
}
// What let the chosen task start, back to the beginning.
function chain(v, g, ink, top, l, w) {
  const { state, made } = v,
    { line, task } = state,
    k = scale(v);
  if (!line || task < 0 || !line.cause.length) return;
  const at = i => {
    const row = made.rows.find(r => r.line === line && r.lane === line.lane[i]);
    return row ? top + row.y + ROW / 2 : null;
  };
  g.save();
  g.beginPath();
  g.rect(l, AXIS, w - l, 1e5);
  g.clip();
  g.strokeStyle = ink.ink;
  g.lineWidth = 1.2;
  g.setLineDash([3, 3]);
  g.beginPath();
  let i = task;
  for (let n = 0; n < 400 && line.cause[i] >= 0; n++) {
    const c = line.cause[i],
      y1 = at(i),
      y0 = at(c);
    if (y0 === null || y1 === null) break;
    const x1 = l + (line.from(i) - state.from) * k,
      x0 = l + (line.from(c) + line.for(c) - state.from) * k;
    if (x1 < l) break;
    if (y0 !== y1) {
      g.moveTo(Math.max(x0, -1e4), y0);
      g.lineTo(Math.min(x1, 1e5), y1);
    }
    i = c;
  }
  g.stroke();
  g.restore();
}
