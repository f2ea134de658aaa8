"""HTML that opens offline: a page per executed notebook and `figures/<profile>/index.html` over them.

Everything a page shows is inside it, and its content policy forbids the browser to fetch anything or to run scripts.
Running notebooks is fmms.run's work.
"""

import base64
import json
import re
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

from fmms import atomic, notebooks, paths
from fmms.notebooks import NotebookError, UnreadableError
from fmms.run import read_state

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:"
_DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"


def render(profile: str, faults: list[str] | None = None) -> Path:
    """Renders every executed notebook of a profile and the index; returns the index's path relative to the project.

    faults: gets a sentence for each file that cannot be read or rendered; the others are rendered all the same.
    Raises NotebookError when no notebook has been executed with this profile on this machine (an index that a GPU host
    wrote is then left as it is), or when nbconvert is missing.
    """
    try:
        import jinja2
        import nbconvert  # noqa: F401
    except ImportError as error:
        raise NotebookError(notebooks.EXTRA) from error
    build, folder = paths.build_dir(profile), paths.figures_dir(profile)
    entries = [_entry(path.stem, build, profile) for path in _known(build)]
    if not any(entry["copy"] for entry in entries):
        unread = "".join(f"{fault}\n" for entry in entries for fault in entry["faults"])
        raise NotebookError(
            f"{unread}no notebook has been executed with profile {profile!r} here (build/{profile}/ holds none); "
            f"run them first: fmms run --profile {profile}"
        )
    for entry in entries:
        if entry["copy"]:
            line = f"{entry['name']} · profile {profile} · {entry['status']} {entry['finished']} · {entry['machine']}"
            try:
                page = page_html(entry["copy"], entry["title"], line, entry["error"])
            except Exception as error:  # whatever a notebook holds, the others are rendered
                shown = entry["copy"].relative_to(paths.project_root())
                what = " ".join(str(error).split())[:160]
                entry["faults"].append(f"{shown} cannot be rendered: {type(error).__name__}: {what}")
            else:
                atomic.write_text(folder / f"{entry['name']}.html", page)
        entry["page"] = f"{entry['name']}.html" if (folder / f"{entry['name']}.html").is_file() else None
    if faults is not None:
        faults += [fault for entry in entries for fault in entry["faults"]]
    machine = next((entry["machine"] for entry in reversed(entries) if entry["machine"]), "")
    _deal_out_figures(entries, folder)
    environment = jinja2.Environment(autoescape=True)
    index = environment.from_string(_template("index.html.j2")).render(
        profile=profile, entries=entries, machine=machine, css=_template("page.css"), policy=POLICY
    )
    atomic.write_text(folder / "index.html", index)
    return (folder / "index.html").relative_to(paths.project_root())


def page_html(notebook: Path, title: str, line: str, error: str = "") -> str:
    """One executed notebook as a self-contained HTML page. line: the small print at its top; error: what stopped it."""
    import nbconvert
    import nbformat
    from pygments.formatters import HtmlFormatter

    # `pip install --target` puts the templates beside the package, where Jupyter's own search doesn't look.
    beside = Path(nbconvert.__file__).parent.parent / "share" / "jupyter" / "nbconvert" / "templates"
    elsewhere = [str(beside)] if beside.is_dir() else []
    exporter = nbconvert.HTMLExporter(
        template_name="basic",
        extra_template_basedirs=elsewhere,
        extra_template_paths=elsewhere,
        raw_template=_template("notebook.html.j2"),
        exclude_anchor_links=True,
    )
    # A progress bar's hundred rewritten lines become the last one.
    exporter.register_preprocessor(nbconvert.preprocessors.CoalesceStreamsPreprocessor, enabled=True)
    css = "\n".join(
        (
            _template("page.css"),
            HtmlFormatter(style="default").get_style_defs(".highlight"),
            "@media (prefers-color-scheme: dark) {",
            HtmlFormatter(style="github-dark").get_style_defs(".highlight"),
            "}",
        )
    )
    about = {"title": title, "line": line, "css": css, "policy": POLICY, "error": error}
    executed = nbformat.read(notebook, as_version=4)
    executed.cells = _without_markers(executed.cells)
    body, _ = exporter.from_notebook_node(executed, resources={"fmms": about})
    # Where the checkout lies is this machine's business, and pages of GPU profiles are committed.
    root = re.escape(str(paths.project_root()))
    return re.sub(rf"{root}(?![\w.-])", ".", re.sub(rf"{root}/", "", body))


def machine_line(state: dict) -> str:
    """The machine that a run's state file names, in one line; "" when there is none."""
    machine = state.get("machine")
    if not machine:
        return ""
    gpus = [f"{gpu['name']} (driver {gpu['driver']})" for gpu in machine["gpus"]]
    versions = ", ".join(
        f"{name} {machine['versions'][name]}" for name in ("python", "torch", "triton") if name in machine["versions"]
    )
    commit = machine["git"]["commit"]
    source = f"commit {commit[:12]}{' with changes' if machine['git']['dirty'] else ''}" if commit else ""
    return ", ".join(filter(None, (f"{machine['cores']} cores of {machine['cpu']}", ", ".join(gpus), versions, source)))


def title_and_sentence(cells) -> tuple[str, str]:
    """A notebook's first heading, and the first sentence of the text below it, as plain text."""
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    title = re.search(r"^#+\s+(.+?)\s*$", text, re.MULTILINE)
    below = text[title.end() :] if title else text
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", below)]
    prose = next((part for part in paragraphs if part and not re.match(r"[#|<>`*-]\s?", part)), "")
    sentence = re.match(r".+?[.!?](?=\s|$)", prose)
    return _plain(title[1]) if title else "", _plain(sentence[0] if sentence else prose)


def _known(build: Path) -> list[Path]:
    """The project's notebooks, and executed ones from elsewhere, by number."""
    own = {path.stem: path for path in sorted((paths.project_root() / "notebooks").glob("*.ipynb"))}
    for copy in sorted(build.glob("*.ipynb")):
        name = copy.stem.removesuffix(".failed")
        if not copy.name.startswith("."):
            own.setdefault(name, copy.with_name(f"{name}.ipynb"))
    return [own[name] for name in sorted(own)]


def _entry(name: str, build: Path, profile: str) -> dict:
    state = read_state(profile, name)
    passed, failed = build / f"{name}.ipynb", build / f"{name}.failed.ipynb"
    copies = [path for path in (passed, failed) if path.is_file()]
    if state.get("status") == "failed":
        copies.reverse()
    executed, copy, faults = None, None, []
    for path in (*copies, paths.project_root() / "notebooks" / f"{name}.ipynb"):
        try:
            executed = notebooks.read(path)
        except UnreadableError as error:
            if path.exists():
                faults.append(str(error))
            if path in copies:
                state = {}  # what it says is about a copy that is no more
        else:
            copy = path if path in copies else None
            break
    title, sentence = title_and_sentence(_without_markers(executed.cells)) if executed else ("", "")
    status, finished, seconds = state.get("status"), state.get("finished", ""), state.get("seconds", "")
    if status is None and copy:
        # Executed by papermill itself, or an older copy of a run that is not finished.
        note = executed.metadata.get("papermill") or {}
        status = "failed" if note.get("exception") else "passed"
        finished, seconds = (note.get("end_time") or "")[:19], round(note.get("duration") or 0, 1)
    error = state.get("error")
    note = f"{error['where']}: {error['what'].splitlines()[0]}" if error else "; ".join(faults)
    if status is None and not note and (kept := _kept(name, profile)):
        # Executed elsewhere; its results, figures and page came with the checkout.
        status, finished, note = "kept", kept.get("utc", "")[:19], f"results of commit {kept['git']['commit'][:12]}"
    return {
        "name": name,
        "copy": copy,
        "title": title or name,
        "sentence": sentence,
        "status": status or "not run",
        "finished": finished.replace("T", " ").replace("+00:00", ""),
        "seconds": seconds,
        "error": note,
        "faults": faults,
        "machine": machine_line(state),
    }


def _kept(name: str, profile: str) -> dict | None:
    """What was written down about the newest results of a notebook, if they are there and say from which commit."""
    found = []
    for path in (paths.project_root() / "data" / profile).glob(f"{name}*.json"):
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(about, dict) and isinstance(about.get("git"), dict) and about["git"].get("commit"):
            found.append(about)
    return max(found, key=lambda about: str(about.get("utc")), default=None)


def _without_markers(cells: list) -> list:
    """The notebook's own cells: papermill adds large red headings to a failed one, which our page says in its way."""
    return [cell for cell in cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])]


def _deal_out_figures(entries: list[dict], folder: Path) -> None:
    """Gives each figure to the notebook whose name it begins with; the rest get a section of their own."""
    figures = {path.stem: _figure(path) for path in sorted(folder.glob("*.svg"))}
    for entry in entries:
        own = [
            stem
            for stem in figures
            if stem == entry["name"] or stem.startswith((f"{entry['name']}_", f"{entry['name']}-"))
        ]
        entry["figures"] = [figures.pop(stem) for stem in own]
    if figures:
        others = {"name": "figures", "title": "Other figures", "status": "", "figures": list(figures.values())}
        entries.append(others)


def _figure(svg: Path) -> dict:
    """Title and caption, which fmms.plotting keeps inside the SVG, and the picture as a data address."""
    content = svg.read_bytes()
    about = {"title": svg.stem, "caption": ""}
    try:
        tree = ElementTree.fromstring(content)
        about["title"] = tree.findtext(f".//{_DUBLIN_CORE}title") or svg.stem
        about["caption"] = tree.findtext(f".//{_DUBLIN_CORE}description") or ""
    except ElementTree.ParseError:
        pass
    return {**about, "file": svg.name, "data": f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"}


def _plain(markdown: str) -> str:
    """Markdown's inline marks removed: links become their text, emphasis and code their words."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return re.sub(r"(\*\*|__|`|(?<!\w)[*_]|[*_](?!\w))", "", text).strip()


def _template(name: str) -> str:
    return (resources.files("fmms") / "templates" / name).read_text(encoding="utf-8")
