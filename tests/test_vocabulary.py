"""The field's words, in what people read and in what they open: none of the old dialect is left.

`WORDS` has, for every phrase that is not used, the phrase that is; a pattern says precisely where
the same letters are another, legitimate word. Read are comments, docstrings and messages of the
source, the documents, and what commands print. `NAMES` has names of files, classes and functions.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretell.cli.main import COMMANDS, foretell

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "src/foretell").rglob("*.py"), *(ROOT / "lab/src").rglob("*.py")])
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

# not → but → how it is recognised
WORDS = {
    "the device holds the step up": ("GPU-bound", r"\b(device|GPU) holds (the step|it) up\b"),
    "the host holds the step up": ("CPU-bound", r"\b(host|CPU) holds (the step|it) up\b"),
    "who holds the step up": ("bottleneck", r"\b(who|what) holds (the|a) step up\b"),
    "the device waits 78 %": ("GPU idle 78 %", r"\bdevice waits \d+ ?%"),
    "foretold": ("predicted", r"\bforetold\b"),
    "told": ("predicted, given", r"\b(is|are|was|were) told\b(?! (apart|of|from|that|to|not|in))"),
    "held against": ("compared with", r"\bheld against\b"),
    "held back by": ("bottleneck", r"\bheld back by\b"),
    # `of peak memory` is memory at its peak, `of the peak` in a formula is the device's peak rate
    "of peak": ("MFU", r"\d ?% of (the )?peak\b(?! (memory|rate|bandwidth))"),
    "4 of 5 cases, four times in five": (
        "80 % interval",
        r"\b(four times in five|four in five|4 of 5 cases)\b",
    ),
    "in the range": ("in the 80 % interval", r"\bin the range\b|\bmeasured steps in five\b"),
    "a step as it is": ("current step", r"\ba step as it is\b"),
    # a product of numbers, degrees, matrices or sizes is one
    "products": ("matmuls", r"\bproducts\b(?! of)(?<!cross products)(?<!inner products)"),
    "noughts": ("zeros", r"\bnoughts?\b"),
    "X ends at N": ("max useful degree", r"\b(data|tensor|pipeline) ends at \d"),
    "not beaten in time, memory and cost at once": ("Pareto front", r"\bnot beaten in\b"),
    "63.3 GiB too many": ("out of memory by 63.3 GiB", r"\b[GM]iB too (many|much)\b"),
    "what is taken for granted": ("assumptions", r"\bfor granted\b"),
    "dealt out": ("sharded, split", r"\bdealt\b|\bdeals? out\b"),
    "handed on": ("sent to the next stage", r"\bhand(s|ed) on\b"),
    # to play with something is what the studio is for; self-play and games are the policy's
    "a play, to play": (
        "simulation, to simulate",
        r"(?<!self-)(?<!names )\bplay(s|ed|ing)?\b(?! with)(?! (no|a) part)(?!-)(?! (game|off))",
    ),
    # talking heads are a published kind of attention (Shazeer et al. 2020)
    "talk": ("communication", r"\btalk(s|ed|ing)?\b(?! heads)"),
    "computed again": ("recomputed", r"\bcompute[sd]? again\b"),
    "gradients go together": ("gradients bucketed together", r"\bgradients go together\b"),
    "an op asked for": ("requested op", r"\bop asked for\b"),
    "nobody, somebody, whoever": ("the thing itself", r"\b(no|some)body\b|\bwhoever\b"),
    "what came of it": ("result, outcome", r"\bcame of\b"),
    "a quick one of its kind": ("a fast call of its kind", r"\bquick ones?\b"),
    "where nothing is said": ("by default", r"\b(is|are|was|were|been) said\b"),
    "truth values": ("booleans", r"\btruth values?\b"),
    "in the words of": ("as X names it, under the keys of", r"\bin the words of\b"),
    "the person": ("the user", r"\bthe person\b"),
    "pushes out": ("sends", r"\bpush(es)? out\b"),
    "What a notebook shows, Who runs it": (
        "the thing itself: HTML for notebooks, its ranks",
        r'^"""Whom? (?!.*\?)|\b(the|a) person who\b',
    ),
}
PATTERNS = {left: re.compile(pattern, re.IGNORECASE) for left, (_, pattern) in WORDS.items()}

# What people open: no module, class or function has these names.
MODULES = {
    "plan/made", "plan/ends", "plan/sheet", "plan/draft", "plan/chains", "plan/pieces",
    "plan/finish", "plan/parts", "plan/stack", "plan/places", "plan/hold", "plan/talk",
    "plan/cut", "plan/groups", "plan/group_rows", "plan/reslice", "plan/captured",
    "cluster/tour", "cluster/page", "cluster/table", "cluster/tables",
    "schedule/ticks", "schedule/states", "deploy/refuse",
}  # fmt: skip
CLASSES = {
    "Holding", "Made", "Sheet", "Stack", "Stretch", "Bill", "Placing", "Fusing", "Judge", "Worth",
    "Pulse", "Stand",
}  # fmt: skip

# Words that no function or class is called by, wherever it stands, tests among them.
NAMES = {"foretold", "told", "dealt", "nobody", "somebody", "whoever", "nought", "noughts", "talks",
         "bill", "counsel", "judged"}  # fmt: skip
CODE = ("src", "lab", "tests", "benchmarks", "docs")
# Words that no identifier has in it (a class, a function, an argument, an attribute, a variable):
# not → but.
IDENTIFIERS = {"asked": "request", "told": "answer", "spoken": "positional", "dealt": "shared",
               "nobody": "none", "foretold": "predicted"}  # fmt: skip


def prose(path: Path) -> list[tuple[int, str]]:
    """Lines that people read in a file: a page but for its code; comments and texts of source."""
    text = path.read_text(encoding="utf-8")
    return _source(text) if path.suffix == ".py" else _page(text)


def _page(text: str) -> list[tuple[int, str]]:
    found, is_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            found.append((number, _plain(line)))
    return found


def _source(text: str) -> list[tuple[int, str]]:
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_text = token.type == tokenize.COMMENT
        is_text |= token.type == tokenize.STRING and " " in token.string
        is_text |= tokenize.tok_name[token.type] == "FSTRING_MIDDLE" and " " in token.string
        if is_text:
            lines = enumerate(token.string.splitlines(), token.start[0])
            found += [(number, _plain(line)) for number, line in lines]
    return found


def _plain(line: str) -> str:
    """A line without names of code, what is filled in, links and file names."""
    return re.sub(r"`[^`]*`|\{[^{}]*\}|\]\([^)]*\)|\b[\w/]+\.(py|md|toml|json|graph)\b", " ", line)


def dialect(lines: list[tuple[int, str]]) -> list[tuple[int, str, str]]:
    """(line, what is not said, the text) of every line that says it."""
    return [
        (number, left, text.strip())
        for number, text in lines
        for left, pattern in PATTERNS.items()
        if pattern.search(text)
    ]


@pytest.mark.parametrize("folder", ["src/foretell", "lab/src", "docs"])
def test_what_people_read_is_in_the_field_s_words(folder):
    under = ROOT / folder
    paths = [p for p in (*SOURCES, *PAGES) if p.is_relative_to(under)]
    paths += [p for p in PAGES if folder == "docs" and p.parent == ROOT]
    said = [
        f"{p.relative_to(ROOT)}:{n}: {left}: {t}" for p in paths for n, left, t in dialect(prose(p))
    ]
    assert said == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_is_in_the_field_s_words(name):
    done = CliRunner().invoke(foretell, [name, "--help"])
    assert dialect(list(enumerate(done.output.splitlines()))) == []


STEP = "docs/guides/step.txt"
GPT = "gpt:layers=4,hidden=512,heads=8,seq=256,vocab=1000"
PRINTED = (
    "", f"simulate {STEP}", f"show {STEP}", f"whatif {STEP} faster-host:times=2 -v",
    f"advise {STEP} faster-host:times=2 -v", f"compare {STEP} {STEP}",
    f"predict {GPT} --on dgx-a100:gpus=8 --plan dp=8 -v",
    f"predict {GPT} --on dgx-a100:gpus=8 --plan dp=8,micro_batch=4096,global_batch=32768",
    f"oracle {GPT} --on dgx-a100 --gpus 1..8 -v",
    f"plan {GPT} --on dgx-a100:gpus=2 --with oracle -v", "schedule v:devices=4 --no-cache",
    "explain", "explain amp", "explain fsdp", "explain placement",
)  # fmt: skip


@pytest.mark.parametrize("line", PRINTED)
def test_answers_are_in_the_field_s_words(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(foretell, line.split())
    assert done.exit_code == 0, done.output
    assert dialect(list(enumerate(done.output.splitlines()))) == []


def test_what_people_open_has_names_of_the_field():
    opened = {f"{p.parent.name}/{p.stem}" for p in SOURCES}
    assert sorted(opened & MODULES) == []
    ours = (p for p in SOURCES if p.is_relative_to(ROOT / "src"))  # a model of the lab is a Stack
    trees = (ast.walk(ast.parse(p.read_text())) for p in ours)
    classes = {node.name for tree in trees for node in tree if isinstance(node, ast.ClassDef)}
    assert sorted(classes & CLASSES) == []


def named(text: str) -> list[tuple[int, str]]:
    """Line and name of every function and class that is called by one of our old words.

    What is compiled keeps its name: libraries that were built know it by that.
    """
    return [
        (node.lineno, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if NAMES.intersection(map(str.lower, re.findall("[A-Z]?[a-z]+", node.name)))
        if not any(ast.unparse(d).startswith("compiled") for d in node.decorator_list)
    ]


@pytest.mark.parametrize("folder", CODE)
def test_functions_and_classes_have_names_of_the_field(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert [f"{p.relative_to(ROOT)}:{x}" for p in paths for x in named(p.read_text())] == []


def identifiers(text: str) -> list[tuple[int, str]]:
    """Line and name of every identifier that has one of our old words in it."""
    nodes = [node for node in ast.walk(ast.parse(text)) if hasattr(node, "lineno")]
    names = [(node.lineno, name) for node in nodes for name in _names(node)]
    return [
        (line, name)
        for line, name in names
        if IDENTIFIERS.keys() & {w.lower() for w in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)}
    ]


def _names(node: ast.AST) -> list[str]:
    found = [getattr(node, key, None) for key in ("name", "id", "attr", "arg", "asname")]
    return [name for name in found if isinstance(name, str)]


def test_identifiers_have_words_of_the_field():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in identifiers(path.read_text(encoding="utf-8"))
    ]
    assert found == []


# The test itself can fail


def test_old_identifiers_are_recognised():
    text = "def f(asked): ...\nclass Asked: ...\nx.is_told = 1\nf(asked=2)\nbasked = masked = 1\n"
    assert sorted({line for line, _ in identifiers(text)}) == [1, 2, 3, 4]


def test_old_names_are_recognised():
    text = "def _told(): ...\nclass Counsel: ...\nclass A:\n  def is_dealt(self): ...\n"
    assert [line for line, _ in named(text)] == [1, 2, 4]
    assert named("@compiled\ndef told(): ...\ndef untold(): ...\ndef soldered(): ...\n") == []


def test_the_dialect_is_recognised():
    lines = [
        "a step foretold",
        "the host holds it up",
        "samples dealt out",
        "it talks",
        "nobody asks",
    ]
    lines += ["batched products", "it is played again", "lies there four times in five"]
    lines += ["what came of it", "none where nothing is said", "quick ones", '"""Who runs it']
    found = dialect(list(enumerate(lines)))
    assert [number for number, _, _ in found] == list(range(len(lines)))


def test_legitimate_words_are_not():
    lines = ["the product of degrees", "products of degrees", "told apart", "self-play", "replayed"]
    lines += ["a page to play with", "40 % of peak memory", "the walk table", "predicted"]
    assert dialect(list(enumerate(lines))) == []


def test_code_is_not_prose():
    text = 'nobody = f"a step {told} of `nobody`"  # fine\n"""products"""\n'
    assert dialect(_source(text)) == []
    assert dialect(_source('x = "somebody said"  # dealt out\n')) != []
    assert dialect(_page("```\nnobody\n```\n    nobody\n[x](nobody.md)\n")) == []
