"""fmms.run and fmms.notebooks: parameters are checked first, failures are named, a stopped run continues."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from tiny_notebooks import PARAMETERS, add, project

import fmms
from fmms import cli, notebooks, progress, run
from fmms.notebooks import NotebookError

pytest.importorskip("papermill")
HERE = str(Path(fmms.__file__).resolve().parent.parent)


@pytest.fixture
def root(tmp_path, monkeypatch):
    project(tmp_path / "p")
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path / "p"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "p"


def start(root, *arguments):
    """`python -m fmms run ...` in a process of its own."""
    environment = {**os.environ, "FMMS_ROOT": str(root), "PYTHONPATH": HERE}
    return subprocess.Popen(
        [sys.executable, "-m", "fmms", "run", *arguments],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# names and parameters ------------------------------------------------------------------------------------------------


def test_names_mean_numbers_stems_and_paths(root):
    for name in ("10_c", "00_a", "01_b"):
        add(root, name)
    stems = lambda *names: [path.stem for path in notebooks.find(list(names))]  # noqa: E731
    assert stems() == ["00_a", "01_b", "10_c"]
    assert stems("10", "00_a", "00") == ["00_a", "10_c"]
    assert stems(str(root / "notebooks" / "01_b.ipynb")) == ["01_b"]
    with pytest.raises(NotebookError, match=r"'2'; there are: 00_a, 01_b, 10_c"):
        notebooks.find(["2"])


TYPED = "\n".join(
    (
        'profile: str = "cpu"  # where',
        "n: int = 1  # how many",
        "p: float = 0.5  # how likely",
        'model: str = "x"  # which',
        "fast: bool = True  # whether",
        "sizes: list[int] = [1]  # which sizes",
    )
)


def test_values_take_the_declared_types(root):
    path = add(root, "00_a", parameters=TYPED, n=2)
    overrides = {"p": "1e-3", "model": "2", "fast": "no", "sizes": "[1, 2]"}
    assert notebooks.job(path, "cpu", overrides).parameters == {
        "profile": "cpu",
        "n": 2,
        "p": 0.001,
        "model": "2",
        "fast": False,
        "sizes": [1, 2],
    }
    assert notebooks.job(path, "cpu", {"p": "2"}).parameters["p"] == 2.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n": "1.5"}, "n is 1.5 .from -p., a float; expected int: how many"),
        ({"n": "yes"}, "n is True"),
        ({"n": "'3'"}, "n is '3'"),
        ({"p": "much"}, "p is 'much'"),
        ({"p": "true"}, "p is True"),
        ({"fast": "1"}, "fast is 1"),
        ({"sizes": "3"}, "sizes is 3"),
        ({"sizes": "[a]"}, "sizes is 'a'"),
        ({"n": "[1"}, "no valid YAML"),
        ({"m": "1"}, "00_a has no parameter m .from -p.; it knows: profile: str, n: int"),
        ({"profile": "h200"}, "use --profile h200"),
    ],
)
def test_wrong_parameters_are_refused(root, overrides, message):
    path = add(root, "00_a", parameters=TYPED)
    with pytest.raises(NotebookError, match=message):
        notebooks.job(path, "cpu", overrides)


@pytest.mark.parametrize(("typed", "value"), [("", ""), ("null", "null"), ("[1", "[1"), ("2024-13-45", "2024-13-45")])
def test_a_text_parameter_takes_what_was_typed(root, typed, value):
    assert notebooks.job(add(root, "00_a", parameters=TYPED), "cpu", {"model": typed}).parameters["model"] == value


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"model: \xff", "00_a.yaml is not UTF-8"), (b"n: 1\nn: 2", "sets n more than once"), (b"n: [", "no valid YAML")],
)
def test_a_bad_parameter_file_is_named(root, content, message):
    path = add(root, "00_a")
    notebooks.parameter_file(path, "cpu").write_bytes(content)
    with pytest.raises(NotebookError, match=message):
        notebooks.job(path, "cpu")


def test_unknown_parameters_are_refused_before_anything_runs(root, capsys):
    add(root, "00_a", "open('ran', 'w')")
    add(root, "01_b", typo=1)
    assert cli.main(["run"]) == 2
    error = capsys.readouterr().err
    assert "01_b has no parameter typo (from notebooks/params/cpu/01_b.yaml); it knows: profile: str, n: int" in error
    assert not (root / "ran").exists()
    assert not (root / "build").exists()


def test_missing_profile_and_bad_calls_say_what_there_is(root, capsys):
    add(root, "00_a")
    assert cli.main(["run", "--profile", "h200"]) == 2
    assert "(profiles: cpu)" in capsys.readouterr().err
    assert cli.main(["run", "-p", "n"]) == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err
    for wrong in ("0", "-1", "nan", "inf"):
        assert cli.main(["run", f"--timeout={wrong}"]) == 2
        assert "expected more than 0" in capsys.readouterr().err
    assert cli.main(["run", "--profile", "../x"]) == 2


def test_a_missing_papermill_says_what_to_install(root, monkeypatch, capsys):
    add(root, "00_a")
    monkeypatch.setitem(sys.modules, "papermill", None)
    assert cli.main(["run"]) == 2
    assert "pip install -e '.[notebooks]'" in capsys.readouterr().err


# running -------------------------------------------------------------------------------------------------------------

FACTS = """import os, sys, json
facts = dict(python=sys.executable, interpret=os.environ["TRITON_INTERPRET"], n=n, cwd=os.getcwd(),
             path=sys.path, command=os.environ["FMMS_COMMAND"])
json.dump(facts, open("facts.json", "w"))"""


def test_a_failure_is_named_and_the_others_run_then_a_rerun_skips(root, capsys, monkeypatch):
    # A registered kernel that points elsewhere, as after moving an environment.
    spec = {"argv": ["/nowhere/python", "-f", "{connection_file}"], "display_name": "x", "language": "python"}
    elsewhere = root / "elsewhere" / "kernels" / "python3" / "kernel.json"
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(root / "elsewhere"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    add(root, "00_a", "x = 1", "# why\ny = 1 / 0", "z = 3")
    add(root, "01_b", FACTS, n=4)

    assert cli.main(["run", "-p", "n=5"]) == 1
    said = capsys.readouterr().out
    assert "[1/2] 00_a  failed  4/5 cells" in said
    assert "cell 4 of 5: # why" in said
    assert "ZeroDivisionError: division by zero" in said
    assert "[2/2] 01_b  passed  3/3 cells" in said
    assert "1 of 2 notebooks are in order, 1 failed" in said
    assert "figures/cpu/index.html" in said
    facts = json.loads((root / "facts.json").read_text())
    assert facts["python"] == sys.executable
    assert facts["interpret"] == "1"
    assert facts["n"] == 5
    assert Path(facts["cwd"]) == root.resolve()
    assert HERE in facts["path"]
    assert facts["command"] == "fmms run 01_b --profile cpu -p n=5"
    build = root / "build" / "cpu"
    assert sorted(path.name for path in build.glob("*.ipynb")) == ["00_a.failed.ipynb", "01_b.ipynb"]
    assert not list(build.glob(".*.ipynb"))
    assert os.environ["JUPYTER_PATH"] == str(root / "elsewhere")

    # Mended: only what failed runs again.
    add(root, "00_a", "x = 1")
    assert cli.main(["run", "-p", "n=5"]) == 0
    said = capsys.readouterr().out
    assert "00_a  passed" in said
    assert "01_b  up to date since" in said
    assert sorted(path.name for path in build.glob("*.ipynb")) == ["00_a.ipynb", "01_b.ipynb"]


def test_what_makes_a_notebook_run_again(root, monkeypatch):
    path = add(root, "00_a", "import pathlib\npathlib.Path('data/cpu').mkdir(parents=True, exist_ok=True)\n"
               "pathlib.Path('data/cpu/00_a.csv').write_text('x')")  # fmt: skip
    assert run.run(None, "cpu") == 0
    job = notebooks.job(path, "cpu")
    state = run.read_state("cpu", "00_a")
    assert state["outputs"] == ["data/cpu/00_a.csv"]
    stamp = run.digest(job)
    assert run._up_to_date(job, state, stamp)
    assert run.digest(notebooks.job(path, "cpu", {"n": "2"})) != stamp
    with monkeypatch.context() as patch:
        patch.setattr(run, "_version", lambda package: "0")
        assert run.digest(job) != stamp
    (root / "data" / "cpu" / "00_a.csv").unlink()
    assert not run._up_to_date(job, state, stamp)
    path.write_text(path.read_text().replace("# Title", "# Another title"))
    assert run.digest(job) != stamp


def test_library_sources_count(root, tmp_path, monkeypatch):
    job = notebooks.job(add(root, "00_a"), "cpu")
    package = tmp_path / "lib" / "fmms"
    (package / "kernels").mkdir(parents=True)
    monkeypatch.setattr(run, "__file__", str(package / "run.py"))
    first = run.digest(job)
    (package / "kernels" / "stage1.py").write_text("x = 1")
    second = run.digest(job)
    (tmp_path / "lib" / "megakernel" / "csrc").mkdir(parents=True)
    (tmp_path / "lib" / "megakernel" / "csrc" / "portable.h").write_text("int x;")
    assert len({first, second, run.digest(job)}) == 3


def test_timeouts_and_dead_kernels_are_failures_like_others(root, capsys):
    add(root, "00_slow", "import time\ntime.sleep(60)")
    add(root, "01_dead", "import os\nos._exit(3)")
    begin = time.monotonic()
    assert cli.main(["run", "--timeout", "4"]) == 1
    assert time.monotonic() - begin < 40
    said = capsys.readouterr().out
    assert "cell 3 of 3: import time" in said
    assert "longer than its 4 s" in said
    assert "cell 3 of 3: import os" in said
    assert "the kernel died" in said
    assert (root / "figures" / "cpu" / "index.html").is_file()


def test_a_tiny_timeout_is_kept(root, capsys):
    add(root, "00_quick", "x = 1")
    assert cli.main(["run", "--timeout", "0.001"]) == 1
    assert "longer than its 0.001 s" in capsys.readouterr().out


SLOW = """import os, pathlib, time
pathlib.Path("pid").write_text(str(os.getpid()))
pathlib.Path("started").touch()
time.sleep(float(os.environ.get("TINY_SLEEP", "60")))"""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["KILL", "INT", "TERM"],
)
def test_a_stopped_run_leaves_nothing_half_and_continues(root, number, status, monkeypatch, capsys):
    add(root, "00_done", "x = 1")
    add(root, "01_slow", SLOW)
    process = start(root)
    wait_for((root / "started").exists)
    kernel = int((root / "pid").read_text())
    assert alive(kernel)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == status
    if number != signal.SIGKILL:
        assert "stopped during 01_slow; done: 00_done" in said
        assert "Traceback" not in said
    wait_for(lambda: not alive(kernel), 10)
    build = root / "build" / "cpu"
    assert [path.name for path in sorted(build.glob("*.ipynb")) if path.name[0] != "."] == ["00_done.ipynb"]
    nbformat.read(build / "00_done.ipynb", as_version=4)
    assert run.read_state("cpu", "00_done")["status"] == "passed"
    assert run.read_state("cpu", "01_slow") == {}

    monkeypatch.setenv("TINY_SLEEP", "0")
    assert cli.main(["run"]) == 0
    said = capsys.readouterr().out
    assert "00_done  up to date" in said
    assert "01_slow  passed" in said
    assert not list(build.glob(".*.ipynb"))


def test_two_runs_in_one_build_folder_are_refused(root):
    add(root, "00_a")
    folder = root / "build" / "cpu"
    folder.mkdir(parents=True)
    with run._sole_user(folder), pytest.raises(NotebookError, match="another `fmms run`"):
        run.run(None, "cpu")


def test_plain_papermill_takes_the_same_files(root):
    path = add(root, "00_a", "assert n == 7", n=7)
    out = root / "out.ipynb"
    file = notebooks.parameter_file(path, "cpu")
    command = [sys.executable, "-m", "papermill", str(path), str(out), "-f", str(file), "--no-progress-bar"]
    subprocess.run(command, check=True, capture_output=True)
    assert out.is_file()


# progress and lint ---------------------------------------------------------------------------------------------------


class Stream(list):
    def __init__(self, terminal):
        self.terminal = terminal

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.append(text)

    def flush(self):
        pass


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_reads_well_on_a_terminal_and_in_a_log(terminal):
    stream = Stream(terminal)
    cells = [nbformat.v4.new_code_cell(f"x = {i}") for i in range(4)]
    cells[1].metadata["tags"] = ["injected-parameters"]
    with progress.Progress("[2/3] 01_b", stream) as line:
        line.LOG_CELLS = 0
        for index in range(4):
            line.cell(cells, index)
        line.end("passed")
    assert (line.number, line.total, line.source) == (3, 3, "x = 3")
    text = "".join(stream)
    assert "[2/3] 01_b  cell 2/3 ...  0 s" in text
    assert text.endswith("[2/3] 01_b  passed  3/3 cells  0 s\n")
    assert ("\r" in text) == terminal
    assert terminal or all(one.endswith("\n") for one in stream)


def test_lint_names_each_fault_and_fix_clears_outputs(root, capsys):
    path = add(
        root,
        "00_a",
        "1 + 1",
        parameters=PARAMETERS + "\nm = 3\nk: int = 4\nj: int | None = 1  # papermill cannot read it",
    )
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].execution_count = 3
    notebook.cells[0].source += "\n\nSo $x^2$ holds; `$HOME` and US$ do no harm."
    notebook.metadata.kernelspec.name = "mine"
    nbformat.write(notebook, path)
    faults = "\n".join(notebooks.lint(path))
    for part in ("cell 3 holds outputs", "$maths$", "'mine'", "'m = 3'", "'k: int = 4'", "'j: int | None"):
        assert part in faults
    assert len(faults.splitlines()) == 6
    assert cli.main(["lint-notebooks", "--fix"]) == 1
    assert "00_a.ipynb: cleared" in capsys.readouterr().out
    assert "holds outputs" not in "\n".join(notebooks.lint(path))
    assert not notebooks.clear(path)
    (path.parent / "01_b.ipynb").write_text("{}")
    assert "cannot be read" in notebooks.lint(path.parent / "01_b.ipynb")[0]
