"""What the documents show is what the code does: scripts, sessions, texts and links."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretell.cli.main import COMMANDS, foretell
from foretell.graph import COLUMNS, load, parse, text
from foretell.graph.graph import BufferKind, Kind, LaneKind, WaitKind
from foretell.whatif import WHATIFS, DoesNotApply
from tests.alike import alike

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GUIDE = DOCS / "guides" / "first_graph.py"
COMING: set[str] = set()  # pages named before they are written
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def ran():
    """What the guide's script defines, and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = runpy.run_path(str(GUIDE))
    return names, printed.getvalue()


def test_the_guide_prints_what_is_recorded(ran):
    assert alike(ran[1], GUIDE.with_suffix(".out").read_text()) == ""


def test_the_guide_shows_its_script_and_its_output(ran):
    page = DOCS / "guides" / "first-graph.md"
    code, shown = blocks(page, "python"), blocks(page, "text")
    assert len(code) == 7
    assert len(shown) == 6
    assert [block for block in code if block not in GUIDE.read_text()] == []
    recorded = GUIDE.with_suffix(".out").read_text()
    assert [block for block in shown if block not in recorded] == []


def test_the_step_file_is_the_guide_s_graph(ran):
    step = load(DOCS / "guides" / "step.txt")
    assert text(step) == text(ran[0]["shared"])


def test_the_session_in_the_readme_is_real(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    sessions = blocks(ROOT / "README.md", "console")
    assert len(sessions) >= 3
    for session in sessions:
        command, _, shown = session.partition("\n")
        assert command.startswith("$ foretell ")
        result = CliRunner().invoke(foretell, command.removeprefix("$ foretell ").split())
        assert result.exit_code == 0, result.output
        assert alike(result.stdout, shown) == ""


def test_the_text_form_in_the_reference_reads_back():
    (shown,) = blocks(DOCS / "reference" / "graph-file.md", "text")
    assert text(parse(shown)) == shown


def test_every_command_and_what_if_is_described():
    page = (DOCS / "reference" / "cli.md").read_text()
    assert [name for name in COMMANDS if f"\n## {name}\n" not in page] == []
    described = set(re.findall(r"^\| `([a-z0-9-]+)[:`]", page, re.MULTILINE))
    assert sorted(set(WHATIFS) - described) == []


def test_every_option_is_described():
    page = (DOCS / "reference" / "cli.md").read_text()
    assert "`--quiet`" in page.partition("\n## ")[0]  # every command has it
    assert "`--verbose`" in page.partition("\n## ")[0]
    for name in COMMANDS:
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        command = foretell.get_command(None, name)
        options = {max(p.opts, key=len) for p in command.params if p.opts[0].startswith("-")}
        options -= {"--quiet", "--verbose"}  # said once, of all
        assert [option for option in options if option not in section] == [], name


def test_the_what_ifs_in_the_reference_can_be_asked(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (DOCS / "reference" / "cli.md").read_text()
    section = page.partition("\n## whatif\n")[2].partition("\n## ")[0]
    specs = re.findall(r"^\| `([a-z0-9-]+:\S+)`", section, re.M)
    assert len(specs) >= 20
    for spec in specs:
        spec = spec.replace("op=dropout*", "op=lau*")  # the step has no dropout
        result = CliRunner().invoke(foretell, ["whatif", "docs/guides/step.txt", spec, "--json"])
        is_not_for_it = isinstance(result.exception, DoesNotApply)  # the step lacks such tasks
        assert result.exit_code == 0 or is_not_for_it, result.exception


def test_every_column_and_kind_is_named():
    graph = (DOCS / "concepts" / "graph.md").read_text()
    assert [name for name in COLUMNS if f"`{name}`" not in graph] == []
    page = (DOCS / "reference" / "graph-file.md").read_text()
    kinds = [k.name.lower() for words in (Kind, LaneKind, WaitKind, BufferKind) for k in words]
    assert [kind for kind in kinds if f"`{kind}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    missing = []
    for target in targets:
        path, _, anchor = target.partition("#")
        if "://" in path or path in COMING:
            continue
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_the_navigation_names_every_page():
    nav = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r": ([\w/.-]+\.md)$", nav, re.MULTILINE))
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert there <= named
