// What the viewer of chrome://tracing (Catapult) makes of a trace: node viewer.js VIEWER.html TRACE.json
const fs = require("fs"),
  vm = require("vm"),
  [, , viewer, trace] = process.argv,
  page = fs.readFileSync(viewer, "utf8"),
  begin = page.lastIndexOf("'use strict'", page.indexOf("global.tr")), // its own code, behind Polymer's
  code = page.slice(begin, page.lastIndexOf("</script>"));
// Its drawing asks for a document: anything will do, since only what it reads is looked at.
const anything = new Proxy(function () {}, {
  get: (_, key) => (key === Symbol.toPrimitive ? () => "" : key === "prototype" ? {} : anything),
  apply: () => anything,
  construct: () => ({}),
  set: () => true,
});
const room = { console, Polymer: anything, document: anything, isVinn: true, setTimeout, clearTimeout };
room.performance = { now: () => Date.now() };
room.global = room;
vm.createContext(room);
try {
  vm.runInContext(code, room);
} catch (error) {
  if (!room.tr?.importer?.Import) throw error; // what reads is there; what draws needs a page
}
const model = new room.tr.Model();
new room.tr.importer.Import(model).importTraces([fs.readFileSync(trace, "utf8")]);
const processes = model.getAllProcesses().map(p => ({
  name: p.name,
  threads: Object.values(p.threads).map(t => [t.name, t.sliceGroup.slices.length]),
  counters: Object.values(p.counters).map(c => [c.name, c.timestamps.length]),
}));
console.log(
  JSON.stringify({
    processes,
    flows: model.flowEvents.length,
    tied: model.flowEvents.filter(f => f.startSlice && f.endSlice).length,
    span: model.bounds.max - model.bounds.min,
    warnings: model.importWarnings.map(w => w.message),
  }),
);
