"""Which part of the page answers to which: thin, everything is worked out in `answers`."""

from __future__ import annotations

from functools import partial
from typing import Any

from foretell.errors import ForetellError
from foretell.report import words
from foretell.studio import answers, figures
from foretell.studio.desk import Desk, built, foretold
from foretell.studio.jobs import Jobs
from foretell.studio.layout import TABS, options
from foretell.studio.machines import chosen, written

EMPTY: dict[str, Any] = {"data": [], "layout": {"height": 60, "xaxis": {"visible": False},
                         "yaxis": {"visible": False}, "paper_bgcolor": "rgba(0,0,0,0)",
                         "plot_bgcolor": "rgba(0,0,0,0)"}}  # fmt: skip


class Machines:
    """Clusters that tabs have named or written, by a key the page keeps."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._texts: dict[str, Any] = {}

    def put(self, text: str) -> str:
        """Keep the cluster of a text; its key."""
        cluster = written(text, self._desk.folder)
        key = "text " + cluster.fingerprint()
        self._texts[key] = cluster
        return key

    def of(self, machine: str | None, preset: str | None) -> Any:
        """The cluster a tab has chosen, None where it has not."""
        return self._texts[machine] if machine in self._texts else chosen(preset)


def connect(app: Any, desk: Desk, jobs: Jobs, prefix: str) -> None:
    """Join the parts of the page."""
    machines = Machines(desk)
    _tabs(app)
    _steps(app, desk, machines)
    _cluster(app, machines)
    _result(app, desk, machines)
    _exports(app, desk, machines, prefix)
    _scenarios(app, desk)
    _searches(app, jobs, machines)
    _follow(app, desk, jobs, prefix)


# In the browser: show one panel, say which, and let its figures take their room.
_SHOW = """
(...clicks) => {
  const names = %s, from = window.dash_clientside.callback_context.triggered_id || "tab-whatif";
  setTimeout(() => window.dispatchEvent(new Event("resize")), 30);
  return [...names.map(n => "tab-" + n !== from), ...names.map(n => String("tab-" + n === from))];
}
"""


def _tabs(app: Any) -> None:
    from dash import Input, Output

    app.clientside_callback(
        _SHOW % list(TABS),
        [Output(f"panel-{name}", "hidden") for name in TABS]
        + [Output(f"tab-{name}", "aria-selected") for name in TABS],
        [Input(f"tab-{name}", "n_clicks") for name in TABS],
        prevent_initial_call=True,
    )


def _steps(app: Any, desk: Desk, machines: Machines) -> None:
    """What lies on the desk: told by whoever put it there, and by a beat for the other tabs.

    Apart from each other: of a callback that is asked again, Dash drops the answer still to come.
    """
    from dash import Input, Output, State, ctx, no_update

    @app.callback(
        Output("steps", "options"), Output("steps", "value"), Output("build-says", "children"),
        Input("uploaded", "data"), Input("build", "n_clicks"),
        State("workload", "value"), State("plan", "value"), State("cluster", "value"),
        State("machine", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def steps(uploaded: Any, _: Any, workload: str, plan: str, preset: str, machine: str) -> Any:
        if ctx.triggered_id == "uploaded":
            return options(desk), uploaded["step"] if uploaded else no_update, no_update
        try:
            cluster = machines.of(machine, preset) or chosen("dgx-a100:nodes=1")
            assert cluster is not None
            key = built(desk, workload or "", plan or "", cluster)
        except ForetellError as error:
            return no_update, no_update, str(error)
        return options(desk), key, "built"

    @app.callback(
        Output("steps", "options", allow_duplicate=True), Input("beat", "n_intervals"),
        State("steps", "options"), prevent_initial_call=True,
    )  # fmt: skip
    def listed(_: Any, shown: Any) -> Any:
        return no_update if shown == options(desk) else options(desk)


def _cluster(app: Any, machines: Machines) -> None:
    from dash import Input, Output, State, ctx, no_update

    @app.callback(
        Output("machine", "data"), Output("cluster-text", "value"),
        Output("cluster-says", "children"),
        Input("cluster", "value"), Input("use-text", "n_clicks"), Input("use-preset", "n_clicks"),
        State("cluster-text", "value"), prevent_initial_call=True,
    )  # fmt: skip
    def cluster(preset: str, _: Any, __: Any, text: str) -> Any:
        try:
            if ctx.triggered_id == "use-text":
                key = machines.put(text or "")
                return key, no_update, f"using the text: {machines.of(key, None).size} ranks"
            found = chosen(preset)
        except ForetellError as error:
            return no_update, no_update, str(error)
        if found is None:
            return "", "", ""
        return "", found.text(), f"{found.size} ranks on {found.num_nodes} node(s)"


def _result(app: Any, desk: Desk, machines: Machines) -> None:
    """The number first; what explains it follows, so that nobody waits for a drawing."""
    from dash import Input, Output, State, html, no_update

    @app.callback(
        Output("headline", "children"), Output("problem", "children"),
        Output("assumed", "children"), Output("now", "data"),
        Input("steps", "value"), Input("changes", "value"), Input("own", "value"),
        Input("cluster", "value"), Input("machine", "data"),
    )  # fmt: skip
    def result(key: str, ticked: Any, own: str, preset: str, machine: str) -> Any:
        if not key:
            text = "Load a trace or a graph on the side, or build a step from a model."
            return [], text, [], None
        try:
            specs = answers.ordered(ticked or [], own)
            found = foretold(desk.on(key, machines.of(machine, preset)), specs)
        except ForetellError as error:
            return no_update, str(error), no_update, None
        assumed = [html.Li(f"assuming {text}") for text in found["assumptions"]]
        return _cards(found), "", assumed, {**found, "specs": list(specs)}

    @app.callback(
        Output("goes", "figure"), Output("why", "children"), Input("now", "data"),
        State("steps", "value"), State("cluster", "value"), State("machine", "data"),
    )  # fmt: skip
    def explained(now: Any, key: str, preset: str, machine: str) -> Any:
        if not now or not key:
            return (no_update, no_update) if key else (EMPTY, "")
        step, specs = desk.on(key, machines.of(machine, preset)), tuple(now["specs"])
        return figures.goes(answers.timelines(step, specs)), answers.reason(step, specs)


def _cards(found: Any) -> list[Any]:
    from dash import html

    return [
        html.Div([html.P(what, className="what"), html.Div(value, className="big"), html.P(more)],
                 className="card")
        for what, value, more in answers.cards(found)
    ]  # fmt: skip


def _exports(app: Any, desk: Desk, machines: Machines, prefix: str) -> None:
    from dash import Input, Output, State, ctx, html

    @app.callback(
        Output("exported", "children"), Input("report", "n_clicks"), Input("trace", "n_clicks"),
        State("steps", "value"), State("changes", "value"), State("own", "value"),
        State("cluster", "value"), State("machine", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def export(_: Any, __: Any, key: str, ticked: Any, own: str, preset: str, machine: str) -> Any:
        try:
            step = desk.on(key, machines.of(machine, preset))
            specs = answers.ordered(ticked or [], own)
            name = answers.exported(desk, key, step, specs, str(ctx.triggered_id))
        except ForetellError as error:
            return str(error)
        return html.A(f"Open {name}", href=f"{prefix}out/{name}", target="_blank", id="export-link")


def _scenarios(app: Any, desk: Desk) -> None:
    from dash import Input, Output, State, ctx, html

    @app.callback(
        Output("saved", "data"), Input("save", "n_clicks"), Input("forget", "n_clicks"),
        State("now", "data"), State("steps", "value"), State("chosen", "value"),
        prevent_initial_call=True,
    )  # fmt: skip
    def keep(_: Any, __: Any, now: Any, key: str, ticked: Any) -> Any:
        if ctx.triggered_id == "forget":
            desk.forget(ticked or [])
        elif now and key:
            desk.save(" ".join(now["changes"]) or "as it is", key, now)
        return len(desk.scenarios)

    @app.callback(
        Output("compared", "figure"), Output("compared-table", "children"),
        Output("chosen", "options"), Output("chosen", "value"),
        Input("saved", "data"), Input("beat", "n_intervals"), State("chosen", "value"),
    )  # fmt: skip
    def compare(_: Any, __: Any, ticked: Any) -> Any:
        kept = list(desk.scenarios)
        labels = [f"{s.number}: {s.title} — {s.step}" for s in kept]
        rows = [(words.cut(label, 48), s.found) for label, s in zip(labels, kept, strict=True)]
        shown = figures.compared(rows) if rows else EMPTY
        numbers = [s.number for s in kept]
        pairs = zip(labels, numbers, strict=True)
        choices = [{"label": label, "value": n} for label, n in pairs]
        still = [n for n in ticked or [] if n in numbers]
        heads = ("scenario", "step", "80 % interval", "a sample", "memory")
        return shown, _table(heads, map(_compared, labels, kept), html), choices, still


def _compared(label: str, scenario: Any) -> tuple[str, ...]:
    f = scenario.found
    low, high = words.seconds(f["low_s"]), words.seconds(f["high_s"])
    size = words.size(f["peak_bytes"]) if f["peak_bytes"] else ""
    return label, words.seconds(f["predicted_s"]), f"{low} – {high}", f"{-f['gain']:+.1%}", size


def _table(heads: Any, rows: Any, html: Any) -> Any:
    head = html.Thead(html.Tr([html.Th(h, scope="col") for h in heads]))
    return html.Table([head, html.Tbody([html.Tr([html.Td(c) for c in row]) for row in rows])])


def _searches(app: Any, jobs: Jobs, machines: Machines) -> None:
    """Start a search, or ask it to stop."""
    from dash import Input, Output, State, ctx, no_update

    @app.callback(
        Output("job", "data"), Output("job-says", "children", allow_duplicate=True),
        Output("poll", "disabled", allow_duplicate=True),
        Input("run-oracle", "n_clicks"), Input("run-plan", "n_clicks"), Input("stop", "n_clicks"),
        State("workload", "value"), State("cluster", "value"), State("machine", "data"),
        State("gpus", "value"), State("planner", "value"), State("job", "data"),
        prevent_initial_call=True,
    )  # fmt: skip
    def start(_: Any, __: Any, ___: Any, workload: str, preset: str, machine: str, gpus: str,
              planner: str, job: str) -> Any:  # fmt: skip
        if ctx.triggered_id == "stop":
            if job in jobs:
                jobs[job].stop.set()
            return no_update, "stopping …", False
        try:
            if ctx.triggered_id == "run-oracle":
                work = partial(answers.strategies, workload or "", preset or "", gpus or "")
            else:
                on = machines.of(machine, preset)
                work = partial(answers.planned, workload or "", on, planner or "")
            return jobs.start(str(ctx.triggered_id), work), "started", False
        except ForetellError as error:
            return no_update, str(error), no_update


def _follow(app: Any, desk: Desk, jobs: Jobs, prefix: str) -> None:
    """Tell how far a search is, and show what it found."""
    from dash import Input, Output, State, html, no_update

    @app.callback(
        Output("job-says", "children"), Output("found", "figure"),
        Output("found-table", "children"), Output("poll", "disabled"), Output("stop", "disabled"),
        Input("poll", "n_intervals"), State("job", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def follow(_: Any, key: str) -> Any:
        if key not in jobs:
            return no_update, no_update, no_update, True, True
        job = jobs[key]
        if job.state == "running":
            return (
                f"{job.says or 'working'} · {job.seconds:.0f} s",
                no_update,
                no_update,
                False,
                False,
            )
        if job.state != "done":
            return job.says, no_update, no_update, True, True
        rows = job.answer
        heads = ("devices", "strategy", "step", "memory", "fits", "plan")
        parts = [_table(heads, map(_layout, rows), html)]
        fitting = [r for r in rows if r["fits"] and r["plan"]]
        best = max(fitting, key=lambda r: r["samples_per_s"], default=None)
        if best:
            name = answers.plan_file(desk, best["plan"])
            link = html.A("Download the best plan", href=f"{prefix}out/{name}", id="plan-link")
            parts.insert(0, html.P(link))
        said = f"{len(rows)} layouts in {job.seconds:.1f} s"
        return said, figures.layouts(rows), parts, True, True


def _layout(row: Any) -> tuple[str, ...]:
    size = words.size(row["peak_bytes"]) if row["peak_bytes"] else ""
    fits = "yes" if row["fits"] else "no"
    return str(row["gpus"]), row["strategy"], words.seconds(row["step_s"]), size, fits, row["plan"]
