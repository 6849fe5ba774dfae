// What the canvas shows: timelines made ready, their rows, and what colour a task has.
const ROW = 22,
  TITLE = 28,
  AXIS = 24,
  GAP = 8,
  FIRST_RANKS = 4;
const HUES = [210, 28, 145, 275, 50, 350, 185, 310, 95, 240];
const CHANGES = ["", "shorter", "longer", "new", "earlier", "later", "gone"];
const SIGNS = ["", "▾", "▴", "+", "‹", "›", "×"];

function rowsOf(lines, all) {
  const rows = [];
  let y = 0;
  const add = (row, height) => {
    row.y = y;
    row.height = height;
    y += height;
    rows.push(row);
  };
  for (const line of lines) {
    add({ line, kind: "title" }, TITLE);
    if (line.path.length)
      add({ line, kind: "lane", name: "critical path", ids: line.path, isPath: true }, ROW);
    const ranks = [...new Set(line.lanes.map(l => l.rank))].sort((a, b) => a - b);
    const shown = new Set(all ? ranks : firstRanks(ranks, line.straggler));
    line.hidden = ranks.length - shown.size;
    for (const k of line.order) {
      const lane = line.lanes[k];
      if (shown.has(lane.rank))
        add(
          {
            line,
            kind: "lane",
            name: (ranks.length > 1 ? "rank " + lane.rank + " · " : "") + lane.name,
            ids: line.byLane[k],
            lane: k,
          },
          ROW,
        );
    }
    y += GAP;
  }
  return { rows, height: y };
}

// The first few ranks, the straggler among them.
const firstRanks = (ranks, straggler) =>
  ranks.includes(straggler) && !ranks.slice(0, FIRST_RANKS).includes(straggler)
    ? [...ranks.slice(0, FIRST_RANKS - 1), straggler]
    : ranks.slice(0, FIRST_RANKS);

function prepared(line) {
  const lists = line.lanes.map(() => []);
  for (let i = 0; i < line.lane.length; i++) if (line.lane[i] >= 0) lists[line.lane[i]].push(i);
  for (let k = 0; k < line.held[0].length; k++) lists[line.held[1][k]].push(line.held[0][k]);
  line.byLane = lists.map(ids => Int32Array.from(ids).sort((a, b) => line.start[a] - line.start[b] || a - b));
  line.order = line.lanes
    .map((_, k) => k)
    .filter(k => line.byLane[k].length)
    .sort((a, b) => line.lanes[a].rank - line.lanes[b].rank || a - b);
  line.onPath = new Uint8Array(line.start.length);
  for (const i of line.path) line.onPath[i] = 1;
  line.from = i => line.start[i] * line.tick - line.zero;
  line.for = i => line.length[i] * line.tick;
  line.label_of = i => {
    const name = line.words[line.title[i]];
    return name.length > 48 && line.op[i] ? line.words[line.op[i]] : name || line.words[line.op[i]] || "";
  };
  line.title_of = i => line.words[line.title[i]] || line.words[line.op[i]] || "task " + i;
  return line;
}
// The furthest end up to each place, so that the first visible task of a row can be found by halving.
function reach(row) {
  if (row.reach) return row.reach;
  const { line, ids } = row,
    ends = new Float64Array(ids.length);
  let most = 0;
  for (let k = 0; k < ids.length; k++) {
    most = Math.max(most, line.start[ids[k]] + line.length[ids[k]]);
    ends[k] = most;
  }
  return (row.reach = ends);
}
function firstAfter(sorted, value) {
  let low = 0,
    high = sorted.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (sorted[mid] < value) low = mid + 1;
    else high = mid;
  }
  return low;
}

function colours(mode, line) {
  const kinds = ["--host", "--kernel", "--copy", "--collective", "--send", "--load", "--sync"].map(css);
  if (mode === "kind")
    return { of: i => kinds[line.kind[i]], legend: line.kinds.map((k, i) => [k, kinds[i]]) };
  const column = { phase: line.phase, source: line.source, op: line.op }[mode];
  const hue = k =>
    "hsl(" + HUES[k % HUES.length] + " 62% " + (66 - 8 * (Math.floor(k / HUES.length) % 3)) + "%)";
  const names = { phase: line.phases, source: line.sources, op: line.words }[mode];
  const used = [...new Set(column)].sort((a, b) => a - b),
    table = {};
  used.forEach((k, n) => {
    table[k] = k === 0 ? css("--host") : hue(mode === "op" ? n : k);
  });
  return {
    of: i => table[column[i]],
    legend: mode === "op" ? [] : used.map(k => [names[k] || "none", table[k]]),
  };
}
