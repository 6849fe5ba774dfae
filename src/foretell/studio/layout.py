"""What the studio's page holds: a side for what goes in, tabs for what comes out."""

from __future__ import annotations

from typing import Any

from foretell.advise.advise import TRIED
from foretell.studio.desk import Desk
from foretell.studio.figures import nothing

# Beside what a line of PyTorch changes: more devices, other links, another host.
OFFERED = (
    *TRIED, "data-parallel:ranks=8", "fsdp:ranks=8", "network:times=2", "faster-host:times=2",
)  # fmt: skip
WORKLOAD = "gpt:layers=24,hidden=1024,heads=16,seq=1024,vocab=51200"


def page(desk: Desk) -> Any:
    """The whole page, made anew for every tab."""
    from dash import dcc, html

    stores = [dcc.Store(id=name) for name in ("uploaded", "now", "machine", "job", "saved")]
    return html.Div(
        [
            html.Header([html.P("foretell", className="brand"), html.H1("Studio")]),
            html.Div([_side(desk), _main()], className="columns"),
            *stores,
            dcc.Interval(id="beat", interval=2500),
            dcc.Interval(id="poll", interval=400, disabled=True),
            html.Div(id="focus-here"),
        ]
    )


def options(desk: Desk) -> list[dict[str, str]]:
    """The steps on the desk, to choose one."""
    with desk.lock:
        return [{"label": one.name, "value": key} for key, one in desk.steps.items()]


def _side(desk: Desk) -> Any:
    from dash import dcc, html

    steps = options(desk)
    return html.Aside(
        [
            html.H2("Step"),
            html.Div(id="drop", className="drop"),  # assets/studio.js fills it
            html.P(id="upload-says", role="status", className="says"),
            dcc.RadioItems(id="steps", options=steps, value=steps[-1]["value"] if steps else None),
            html.Details([html.Summary("From a model"), *_model()]),
            html.H2("Cluster"),
            _field("cluster", "Preset, such as dgx-a100:nodes=2", list="clusters"),
            _clusters(),
            html.Details([html.Summary("Edit it"), *_editor()]),
            html.P(id="cluster-says", role="status", className="says"),
            html.H2("Changes"),
            dcc.Checklist(id="changes", options=list(OFFERED), value=[]),
            _field("own", "Others, one after the other, with spaces"),
        ],
        **{"aria-label": "What goes in"},
    )


def _model() -> list[Any]:
    from dash import html

    return [
        _field("workload", "Workload", value=WORKLOAD),
        _field("plan", "Plan", value="dp=8"),
        html.Button("Build", id="build", type="button"),
        html.P(id="build-says", role="status", className="says"),
    ]


def _editor() -> list[Any]:
    from dash import dcc, html

    return [
        html.Label("The cluster as a file would say it", htmlFor="cluster-text"),
        dcc.Textarea(id="cluster-text", value="", spellCheck=False),
        html.Button("Use this text", id="use-text", type="button"),
        html.Button("Back to the preset", id="use-preset", type="button"),
    ]


def _clusters() -> Any:
    from dash import html

    from foretell.cluster import names

    return html.Datalist([html.Option(value=name) for name in names()], id="clusters")


def _field(name: str, label: str, **more: Any) -> Any:
    from dash import dcc, html

    field = dcc.Input(id=name, type="text", debounce=True, autoComplete="off", **more)
    return html.Div([html.Label(label, htmlFor=name), field], className="field")


TABS = {"whatif": "What if", "layouts": "Layouts", "compare": "Compare"}


def _main() -> Any:
    from dash import html

    made = {"whatif": _whatif, "layouts": _layouts, "compare": _compare}
    tabs = [
        html.Button(text, id=f"tab-{name}", type="button", role="tab", className="tab",
                    **{"aria-controls": f"panel-{name}", "aria-selected": _is(name == "whatif")})
        for name, text in TABS.items()
    ]  # fmt: skip
    panels = [
        html.Section(made[name](), id=f"panel-{name}", role="tabpanel", hidden=name != "whatif",
                     **{"aria-labelledby": f"tab-{name}"})
        for name in TABS
    ]  # fmt: skip
    return html.Main([html.Div(tabs, role="tablist", className="tabs"), *panels])


def _is(value: bool) -> str:
    return "true" if value else "false"


def _whatif() -> list[Any]:
    from dash import dcc, html

    buttons = [("save", "Save this scenario"), ("report", "Report"), ("trace", "Trace")]
    return [
        html.Div(id="headline", role="status", className="cards"),
        html.P(id="problem", role="alert", className="problem"),
        html.Div(
            [html.Button(text, id=name, type="button") for name, text in buttons], className="row"
        ),
        html.P(id="exported", role="status", className="says"),
        html.H2("Where the step goes"),
        dcc.Graph(id="goes", figure=nothing(), config={"displayModeBar": False}),
        html.H2("Why"),
        html.P(id="why"),
        html.Ul(id="assumed", className="soft"),
    ]


def _layouts() -> list[Any]:
    from dash import dcc, html

    return [
        html.P("Layouts of the workload under “From a model”, on the cluster on the side."),
        html.Div(
            [
                _field("gpus", "Devices, such as 1..64", value="1..64"),
                html.Button("Every strategy", id="run-oracle", type="button"),
                _field("planner", "Planner", value="oracle"),
                html.Button("Find a plan", id="run-plan", type="button"),
                html.Button("Stop", id="stop", type="button", disabled=True),
            ],
            className="row",
        ),
        html.P(id="job-says", role="status", className="says"),
        dcc.Graph(id="found", figure=nothing(), config={"displayModeBar": False}),
        html.Div(id="found-table", className="scroll", tabIndex="0"),
    ]


def _compare() -> list[Any]:
    from dash import dcc, html

    return [
        html.P("Scenarios that were saved, in this tab or another."),
        dcc.Graph(id="compared", figure=nothing(), config={"displayModeBar": False}),
        html.Div(id="compared-table", className="scroll", tabIndex="0"),
        dcc.Checklist(id="chosen", options=[], value=[]),
        html.Button("Forget those ticked", id="forget", type="button"),
    ]
