"""fmms.report: pages that need no network, show text and figures first, and an index that says how each run ended."""

import html
import json
import re
from pathlib import Path

import nbformat
import pytest
from tiny_notebooks import add, project

from fmms import cli, paths, plotting, report, run

pytest.importorskip("nbconvert")

# What makes a browser load something: attributes of tags, and addresses in style sheets and scripts.
LOADS = re.compile(
    r"""<script|<iframe|<object|<embed|@import"""
    r"""|<(?!a\b)[a-z][^>]*\s(?:src|href|srcset|poster|data|xlink:href)\s*=\s*["']?(?!data:|\#)[^\s"'>]+"""
    r"""|url\(\s*["']?(?!data:|\#)[^)]+""",
    re.IGNORECASE,
)


def loads(page):
    """The places where a page would fetch something that is not inside it."""
    return [match[0] for match in LOADS.finditer(page)]


@pytest.mark.parametrize(
    "planted",
    [
        '<script src="https://x.y/a.js"></script>',
        "<script>1</script>",
        '<link rel="stylesheet" href="//x.y/a.css">',
        '<img alt="a" src="http://x.y/a.png">',
        "<img src=a.png>",
        "<style>@import 'a.css';</style>",
        "<style>a { background: url(https://x.y/a.png) }</style>",
        '<image xlink:href="https://x.y/a.png"/>',
    ],
)
def test_the_check_itself_sees_planted_loads(planted):
    assert loads(planted)


def test_the_check_lets_embedded_content_pass():
    assert not loads('<a href="https://x.y">z</a> <img src="data:image/png;base64,AA"> url(#a) <use xlink:href="#b"/>')


OUTPUTS = r"""import sys, warnings
from IPython.display import HTML, Javascript, Markdown, display
print("\x1b[31mred\x1b[0m plain <b>")
for i in range(50): print(f"\rstep {i}", end="", file=sys.stderr)
warnings.warn("a warning")
display(Javascript("1"))
display(HTML("<table><tr><td>cell</td></tr></table>"), Markdown("# more"))
display({"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "widget"}, raw=True)"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A project after `fmms run`: one notebook with every kind of output and a figure, one that fails."""
    root = project(tmp_path_factory.mktemp("report"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FMMS_ROOT", str(root))
        text = "# Is *it* [exact](a.md)?\n\n> a quotation\n\nYes: **it** is `exact` at 0.5 nats. And more."
        add(root, "10_a", OUTPUTS, "x = 1\nimport os; os.getcwd()", text=text)
        add(root, "11_b", "y = 1 / 0")
        add(root, "12_never")
        fig, axes = plotting.figure()
        axes.plot([1, 2])
        axes.set_title("What is <drawn>?")
        plotting.save(fig, "10_a_line", "cpu", "n = 2 & more")
        plotting.save(fig, "other", "cpu")
        assert cli.main(["run", "10", "11"]) == 1
        yield root, {path.name: path.read_text() for path in paths.figures_dir("cpu").glob("*.html")}


def test_pages_load_nothing(pages):
    _, texts = pages
    assert set(texts) == {"index.html", "10_a.html", "11_b.html"}
    for text in texts.values():
        assert not loads(text)
        assert "default-src 'none'" in html.unescape(text)


def test_a_page_shows_outputs_and_folds_code_and_noise(pages):
    root, texts = pages
    page = texts["10_a.html"]
    assert "<summary>code [3]</summary>" in page
    assert "<summary>parameters of this run [2]</summary>" in page
    assert "<td>cell</td>" in page
    assert "red</span> plain &lt;b&gt;" in page
    assert re.search(r"<summary>messages: \d+ lines</summary>", page)
    assert "step 48" not in page, "a progress bar is one line, not fifty"
    assert page.count("<details") == page.count("</details>")
    assert "<title>Is it exact?</title>" in page
    assert str(root) not in page


def test_a_failed_page_leads_to_its_error(pages):
    page = pages[1]["11_b.html"]
    assert 'Stopped by an error at <a href="#error">cell 3 of 3: y = 1 / 0: ZeroDivisionError' in page
    assert 'id="error"' in page
    assert page.count('<details class="code" open') == 1
    assert "papermill" not in page.lower()


def test_index_says_what_ran_and_shows_figures(pages):
    index = pages[1]["index.html"]
    assert '<a href="10_a.html">Is it exact?</a>' in index
    assert "<p>Yes: it is exact at 0.5 nats.</p>" in index
    assert re.search(r'<td class="passed">passed</td>\s*<td class="time">\d{4}-\d\d-\d\d \d\d:\d\d:\d\d</td>', index)
    assert "failed: cell 3 of 3: y = 1 / 0: ZeroDivisionError: division by zero" in index
    assert '<td class="not run">not run</td>' in index
    assert "<strong>What is &lt;drawn&gt;?</strong> n = 2 &amp; more" in index
    assert index.index("What is &lt;drawn&gt;?") < index.index("Other figures")
    assert "cores of" in index
    assert "torch" in index


def test_results_from_elsewhere_are_not_called_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    folder = tmp_path / "data" / "h200"
    folder.mkdir(parents=True)
    for name, utc, commit in (
        ("12_x", "2026-01-02T03:04:05+00:00", "a" * 40),
        ("12_x_more", "2026-01-03T03:04:05+00:00", "b" * 40),
        ("13_y", "2026-01-04T03:04:05+00:00", None),
    ):
        (folder / f"{name}.json").write_text(json.dumps({"utc": utc, "git": {"commit": commit}}))
    (folder / "14_z.json").write_text("{")
    assert report._kept("12_x", "h200")["git"]["commit"] == "b" * 40
    assert report._kept("13_y", "h200") is None
    assert report._kept("14_z", "h200") is None


def test_report_alone_renders_again(pages, monkeypatch, capsys):
    root, texts = pages
    monkeypatch.setenv("FMMS_ROOT", str(root))
    (root / "figures" / "cpu" / "10_a.html").unlink()
    assert cli.main(["report"]) == 0
    assert capsys.readouterr().out.strip() == "figures/cpu/index.html"
    assert (root / "figures" / "cpu" / "10_a.html").read_text() == texts["10_a.html"]


def test_report_of_nothing_leaves_a_committed_index(pages, monkeypatch, capsys):
    root, _ = pages
    monkeypatch.setenv("FMMS_ROOT", str(root))
    index = root / "figures" / "h200" / "index.html"
    index.parent.mkdir()
    index.write_text("measured elsewhere")
    assert cli.main(["report", "--profile", "h200"]) == 2
    assert "fmms run --profile h200" in capsys.readouterr().err
    assert index.read_text() == "measured elsewhere"


def test_copies_made_by_papermill_itself_are_rendered(tmp_path, monkeypatch):
    root = project(tmp_path)
    monkeypatch.setenv("FMMS_ROOT", str(root))
    notebook = nbformat.read(add(root, "10_a"), as_version=4)
    notebook.metadata["papermill"] = {"exception": None, "end_time": "2026-01-02T03:04:05.6+00:00", "duration": 1.234}
    (root / "build" / "cpu").mkdir(parents=True)
    nbformat.write(notebook, root / "build" / "cpu" / "10_a.ipynb")
    index = (root / report.render("cpu")).read_text()
    assert '<td class="passed">passed</td>' in index
    assert "2026-01-02 03:04:05" in index


NOTES = ["[]", "null", '"x"', '{"status":"failed","error":"boom"}', '{"status":"passed","finished":null}', "[" * 99999]


@pytest.fixture
def done(tmp_path, monkeypatch):
    """A project with two notebooks, both executed."""
    root = project(tmp_path)
    monkeypatch.setenv("FMMS_ROOT", str(root))
    add(root, "10_a", "x = 1")
    add(root, "11_b", "x = 1")
    assert cli.main(["run"]) == 0
    return root


def test_an_unusable_note_is_none(done, capsys):
    file = run.state_file("cpu", "10_a")
    good = json.loads(file.read_text())
    assert run.read_state("cpu", "10_a") == good
    wrong = [
        {"outputs": None},
        {"machine": []},
        {"error": "x"},
        {"seconds": "1"},
        {"status": "failed"},
        {"outputs": [1]},
    ]
    for note in [*NOTES, *(json.dumps({**good, **one}) for one in wrong)]:
        file.write_text(note)
        assert run.read_state("cpu", "10_a") == {}
        assert cli.main(["report"]) == 0
    capsys.readouterr()
    assert cli.main(["run"]) == 0
    said = capsys.readouterr().out
    assert "10_a  passed" in said and "11_b  up to date" in said


def test_an_unreadable_copy_is_named_and_made_again(done, capsys):
    copy = done / "build" / "cpu" / "10_a.ipynb"
    copy.write_bytes(copy.read_bytes()[:200])
    (done / "figures" / "cpu" / "11_b.html").unlink()
    assert cli.main(["report"]) == 1
    assert "build/cpu/10_a.ipynb cannot be read" in capsys.readouterr().err
    assert (done / "figures" / "cpu" / "11_b.html").is_file()
    assert cli.main(["run"]) == 0
    said = capsys.readouterr().out
    assert "10_a  passed" in said and "11_b  up to date" in said


@pytest.mark.parametrize("content", ["{", "[1]", '{"cells":[{}]}'])
def test_a_broken_notebook_is_a_failure_of_its_own(tmp_path, monkeypatch, capsys, content):
    root = project(tmp_path)
    monkeypatch.setenv("FMMS_ROOT", str(root))
    add(root, "10_a").write_text(content)
    assert cli.main(["run"]) == 1, "nothing else to run, nothing to render"
    add(root, "11_b", "x = 1")
    capsys.readouterr()
    assert cli.main(["run"]) == 1
    said = capsys.readouterr().out
    assert "[1/2] 10_a  failed  notebooks/10_a.ipynb cannot be read" in said
    assert "11_b  passed" in said and "1 of 2 notebooks are in order, 1 failed" in said
    assert (root / "figures" / "cpu" / "11_b.html").is_file()
    assert cli.main(["lint-notebooks", "--fix"]) == 1
    assert "10_a.ipynb cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# T\n\nOne. Two.", ("T", "One.")),
        ("No heading here", ("", "No heading here")),
        ("# T", ("T", "")),
        ("intro\n\n## `T` *x*\n\n- list\n\n| table |\n\nAt 3.5 it\nis so! Yes.", ("T x", "At 3.5 it is so!")),
    ],
)
def test_title_and_first_sentence(text, expected):
    assert report.title_and_sentence([nbformat.v4.new_markdown_cell(text)]) == expected


def test_templates_beside_the_package_are_found(tmp_path, monkeypatch):
    """As `pip install --target FOLDER` leaves them, on a host where JUPYTER_PATH doesn't name that folder."""
    import nbconvert
    from jupyter_core.paths import jupyter_path
    from nbconvert.exporters import templateexporter

    monkeypatch.setenv("FMMS_ROOT", str(project(tmp_path / "p")))
    path = add(tmp_path / "p", "10_a", text="# Found")
    templates, *_ = [folder for folder in jupyter_path("nbconvert", "templates") if (Path(folder) / "basic").is_dir()]
    (tmp_path / "share" / "jupyter" / "nbconvert").mkdir(parents=True)
    (tmp_path / "share" / "jupyter" / "nbconvert" / "templates").symlink_to(templates)
    monkeypatch.setattr(templateexporter, "jupyter_path", lambda *parts: [])
    monkeypatch.setattr(nbconvert, "__file__", str(tmp_path / "nbconvert" / "__init__.py"))
    assert "Found</h1>" in report.page_html(path, "Found", "")
