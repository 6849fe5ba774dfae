"""Ranks of unequal speed behind unequal links: measured steps beside predicted ones, and factors.

    python benchmarks/mixed.py -o FOLDER --minutes 20      # runs what is missing, then the tables
    python benchmarks/mixed.py -o FOLDER --minutes 0       # the tables alone
    python benchmarks/mixed.py -o FOLDER --more            # four ranks
    python benchmarks/mixed.py -o FOLDER --factors         # small batches, factors by the program

Needs the rights of root: network namespaces, and quotas of a core.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from statistics import mean

from foretell.plan import Plan
from foretell.search.placement.problem import Node, Wire, solve
from foretell_lab.emulation import mixed, mixed_plans
from foretell_lab.emulation.mixed import Comparison, Mixed, Setting

PLANS = ("even", "proportional", "server", "factors", "stages", "apart")
PLACES = (  # links, ranks, shares of a core
    ("200mbit", 2, "0.4+0.2"),
    ("100mbit+300mbit", 2, "0.5+0.15"),
    ("300mbit+50mbit", 2, "0.3+0.3"),
    ("400mbit+100mbit", 2, "0.15+0.5"),
    ("300mbit+100mbit+200mbit", 3, "0.4+0.3+0.15"),
)
MORE = (  # more ranks: wants as many idle cores
    ("400mbit+100mbit+200mbit+300mbit", 4, "0.6+0.5+0.3+0.2"),
    ("200mbit", 4, "0.6+0.6+0.2+0.2"),
)
MODELS = ("mlp", "wide", "vgg", "bert")
THREADS = tuple(Setting(m, "200mbit", 2, "1+0.5", "2+1") for m in ("mlp", "vgg"))


SMALL = tuple(  # few samples of layers with many parameters: what factors are for
    Setting(model, network, ranks, share)
    for model in ("wide:16", "vgg:4", "bert:1")
    for network, ranks, share in (
        ("50mbit", 2, "0.4"),
        ("200mbit", 2, "0.4"),
        ("1gbit", 2, "0.4"),
        ("100mbit", 3, "0.3"),
    )
)


def settings() -> list[Setting]:
    """All that is run: models in every place, and two of unequal numbers of threads."""
    found = [Setting(m, *place) for place in PLACES for m in MODELS]
    return [*found, *THREADS]


def main() -> None:
    """Run and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("-o", "--output", type=Path, default=Path("mixed"))
    options.add_argument("--minutes", type=float, default=20.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--more", action="store_true")
    options.add_argument("--factors", action="store_true")
    given = options.parse_args()
    own = {"program": by_program}
    where, plans = (SMALL, ("proportional", "program")) if given.factors else (settings(), PLANS)
    if given.more:
        where = [Setting(model, *place) for place in MORE for model in MODELS]
    if given.minutes:
        for number in (signal.SIGTERM, signal.SIGINT):  # nothing stays behind
            signal.signal(number, stop)
        mixed.run(
            given.output, where, plans, rounds=given.rounds, steps=given.steps, own=own,
            seconds=60 * given.minutes, tell=lambda words: print(f"  {words}", flush=True),
        )  # fmt: skip
    found = mixed.compared(given.output, own)
    print_rows(found)
    print_figures(found)
    print_factors(found)


def stop(*_: object) -> None:
    """End as by Ctrl-C, whoever asks for it."""
    raise KeyboardInterrupt


def by_program(lab: Mixed, setting: Setting) -> Plan | None:
    """Samples by speed, and factors where the exact program puts them, at what bench measured."""
    profile, worth = lab.profiles[setting.model], mixed.worth_of(lab, setting, rounds=1)
    plain = mixed_plans.plan("proportional", profile, [1 / s for s in worth.stretch])
    assert plain is not None, "there is always one"
    most, nodes, wires = max(plain.shares), [], []
    for layer, (width, out, each) in profile["linear"].items():
        names = [n for n in profile["parameters"] if n.rpartition(".")[0] == layer]
        product = profile["factors"][layer][1] * each * max(worth.stretch)
        again = product * (most * setting.ranks - min(plain.shares))
        size = sum(profile["parameters"][n] for n in names)
        saved = worth.prices.seconds("all_reduce", size)
        gather = worth.prices.seconds("all_gather", 4 * most * each * (width + out))
        nodes += [Node(layer, again, saved), Node(f"rows of {layer}", 0.0, fixed=True)]
        wires.append(Wire(f"rows of {layer}", (layer,), gather))
    chosen = solve(nodes, wires)
    sent = [n for n in profile["parameters"] if n.rpartition(".")[0] in chosen]
    return plain.but(sync=tuple((name, "factors") for name in sent)) if sent else None


def print_rows(found: list[Comparison]) -> None:
    """One line a plan and setting."""
    for row in sorted(found, key=lambda r: (str(r.setting), r.plan)):
        print(f"{row.setting!s:60} {row.plan:13} measured {1e3 * row.measured:7.0f} ms "
              f"+-{row.spread:4.0%} of {row.runs}  predicted {1e3 * row.predicted:7.0f} ms "
              f"({row.error:+.1%})")  # fmt: skip


def print_figures(found: list[Comparison]) -> None:
    """Spread first, then errors and picks; unequal threads apart."""
    for name, some in (
        ("unequal shares of a core", [r for r in found if r.setting.threads == "1"]),
        ("unequal threads", [r for r in found if r.setting.threads != "1"]),
    ):
        if not some:
            continue
        picked = mixed.picks(some)
        best = sum(p["ours"] == p["best"] for p in picked)
        near = sum(p["regret"] <= mixed.NEAR for p in picked)
        noisy = sum(p["regret"] <= max(mixed.NEAR, p["spread"]) for p in picked)
        print(f"\n{name}: {len(picked)} configurations, {len(some)} plans; runs of the same lie "
              f"{mean(r.spread for r in some):.1%} apart (mean)")  # fmt: skip
        print(f"  mean |error| {mean(abs(r.error) for r in some):.1%}, bias "
              f"{mean(r.error for r in some):+.1%}; best plan picked {best} of {len(picked)}, "
              f"within 3 % of it {near}, within 3 % or the spread {noisy}")  # fmt: skip
        for plan in dict.fromkeys(r.plan for r in some):
            mine = [r for r in some if r.plan == plan]
            if mine:
                size, bias = mean(abs(r.error) for r in mine), mean(r.error for r in mine)
                print(f"  {plan:13} {len(mine):3} mean |error| {size:.1%} bias {bias:+.1%}")
        for p in picked:
            if p["regret"] > mixed.NEAR:
                print(f"  missed: {p['setting']}: {p['ours']} for {p['best']} "
                      f"(+{p['regret']:.1%}, runs {p['spread']:.1%} apart)")  # fmt: skip


def print_factors(found: list[Comparison]) -> None:
    """The same plan with and without factors: bytes of messages, predicted and measured steps."""
    rows = {(r.setting, r.plan): r for r in found}
    print("\nfactors: MB of messages and ms of a step, without -> with")
    for setting in dict.fromkeys(r.setting for r in found):
        plain = rows.get((setting, "proportional"))
        sent = rows.get((setting, "program")) or rows.get((setting, "factors"))
        if plain and sent:
            print(f"  {setting!s:60} {_pair(plain.bytes, sent.bytes, 1e-6, 2)} MB  predicted "
                  f"{_pair(plain.predicted, sent.predicted)} ms  measured "
                  f"{_pair(plain.measured, sent.measured)} ms")  # fmt: skip


def _pair(before: float, after: float, times: float = 1e3, digits: int = 0) -> str:
    return f"{times * before:6.{digits}f} -> {times * after:5.{digits}f}"


if __name__ == "__main__":
    main()
