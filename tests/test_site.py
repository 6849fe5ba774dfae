"""The site: guides print what they show, figures come from what was kept, nothing is loaded."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.alike import alike

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NEEDS = {"doing": "torch", "tutorial": "torch"}  # they run scripts
LONG = ("doing", "mixed", "tutorial")  # 10 seconds and more


def module(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


guide, figures = module("guide"), module("figures")


def held(name):
    """Hold what a guide prints and its page against what is recorded."""
    found = guide.run(name)
    assert alike(guide.out(found), (guide.GUIDES / f"{name}.out").read_text()) == ""
    assert alike(guide.page(name, found), (guide.GUIDES / f"{name}.md").read_text()) == ""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in guide.NAMES]
)
def test_a_guide_prints_what_is_recorded(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    held(name)


def test_what_a_guide_records_shows_in_its_page():
    for name in guide.NAMES:
        page = (guide.GUIDES / f"{name}.md").read_text()
        lines = (guide.GUIDES / f"{name}.out").read_text().splitlines()
        assert [line for line in lines if line not in page] == []


def test_every_script_is_a_guide_and_every_guide_a_page():
    scripts = {path.stem for path in guide.GUIDES.glob("*.py")} - {"shell", "first_graph"}
    assert scripts == set(guide.NAMES)
    assert [n for n in guide.NAMES if not (guide.GUIDES / f"{n}.md").exists()] == []


def test_cells_are_distinguished():
    text, code = guide.cells("# %% [markdown]\n# # Title\n#\n# words\n\n# %%\nprint(1)\n")
    assert (text.is_text, text.source) == (True, "# Title\n\nwords")
    assert (code.is_text, code.source) == (False, "print(1)")


@pytest.mark.parametrize("page", figures.PAGES)
def test_figures_are_those_that_were_kept(page):
    kept = json.loads((figures.KEPT / f"{page}.json").read_text())
    assert figures.lay_out(page, kept) == (DOCS / f"{page}.md").read_text()
    assert len(kept["tables"]) == len(figures.PAGES[page])
    assert all(table["rows"] for table in kept["tables"])


def test_the_navigation_leads_to_pages_that_exist():
    named = re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) == len(set(named)) > 40
    assert [page for page in named if not (DOCS / page).exists()] == []


def test_what_the_python_reference_names_is_there():
    page = (DOCS / "reference" / "python.md").read_text()
    named = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert len(named) > 20
    for name in named:
        if "pytorch" not in name:
            where, _, last = name.rpartition(".")
            found = importlib.import_module(where)
            assert hasattr(found, last) or importlib.import_module(name)


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    loads = re.compile(r"<(?:script|img|iframe|link(?! rel=.canonical))[^>]*(?:src|href)=.?https?:")
    assert [page.name for page in pages if loads.search(page.read_text())] == []
    styles = "".join(path.read_text() for path in tmp_path.rglob("*.css"))
    assert not re.search(r"(?:url\(|@import )[\"']?https?:", styles)


def test_the_table_of_rooms_names_every_room():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| package |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row[:40])}
    source = ROOT / "src" / "foretell"
    rooms = {path.parent.name for path in source.glob("*/__init__.py")}
    rooms |= {path.stem for path in source.glob("[a-z]*.py")}
    assert sorted(rooms - named) == []


def test_the_walk_through_the_code_is_short_and_leads_somewhere():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    walk = page.partition("## A walk through the code")[2].partition("\n## ")[0]
    files = set(re.findall(r"`([\w/]+\.py)`", walk)) - {"docs/from_scratch.py"}
    assert 15 <= len(files) <= 25
    assert [name for name in files if not (ROOT / "src" / "foretell" / name).exists()] == []


def test_pages_name_files_of_the_code_that_exist():
    folders = ("src", "lab", "tests", "benchmarks", "docs")
    known = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    known |= {path.name for path in ROOT.glob("*.py")}
    ours = (
        r"`((?:[a-z]\w*/)*\w+\.py)`"  # accuracy's pages and decisions name files of others, or old
    )
    pages = [*ROOT.glob("*.md"), *(DOCS / "concepts").glob("*.md"), *DOCS.glob("reference/*.md")]
    gone = [
        f"{page.name}: {name}"
        for page in pages
        if page.name != "CHANGELOG.md"
        for name in re.findall(ours, page.read_text())
        if name.rpartition("/")[2] not in known | {"train.py", "toy.py"}
    ]
    assert gone == []
