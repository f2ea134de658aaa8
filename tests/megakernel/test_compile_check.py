"""Small device sources compile without a GPU, and what they take beyond a limit is named. Skips where tools miss."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from megakernel import compile_check as c

DEVICE = Path(__file__).parent / "device"
FETCHED = Path(__file__).parents[2] / "build/compile_check/cuda"
AMD = {"vgprs", "sgprs", "agprs", "vgpr_spills", "sgpr_spills", "scratch_bytes", "lds_bytes", "dynamic_stack"}
NVIDIA = {"registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "shared_bytes"}


@pytest.fixture
def build(tmp_path):
    """A build folder, with the nvcc that `--fetch-nvcc` installed in the checkout."""
    if FETCHED.is_dir():
        (tmp_path / "cuda").symlink_to(FETCHED)
    return tmp_path


def check(target, name, build, **fields):
    try:
        return c.check(target, c.Unit(name, DEVICE / f"{name}.cu", **fields), build)
    except c.ToolMissing as error:
        pytest.skip(str(error))


def run(*arguments):
    return c.main([str(word) for word in arguments])


# -------------------------------------------------------------------------------------------------------- stored output


def test_notes_of_an_amd_code_object():
    usages = {usage.kernel: usage for usage in c.parse_amd_notes((DEVICE / "notes.txt").read_text())}
    assert list(usages) == ["spills", "plain", "_Z6secondILi3EEvPi"]
    assert all(set(usage.figures) == AMD and usage.entry for usage in usages.values())
    assert usages["spills"].figures["vgprs"] == 128 and usages["spills"].figures["vgpr_spills"] == 600
    assert usages["spills"].figures["scratch_bytes"] == 1604 and usages["plain"].figures["lds_bytes"] == 1024
    assert usages["plain"].figures["dynamic_stack"] == 0


def test_notes_in_another_format():
    text = (DEVICE / "notes.txt").read_text()
    with pytest.raises(c.CompileFailed, match=r"kernel spills lack .vgpr_spill_count"):
        c.parse_amd_notes(text.replace("    .vgpr_spill_count", "    .vgprs_spilled"))
    assert c.parse_amd_notes("") == []


def test_output_of_ptxas():
    usages = c.parse_ptxas((DEVICE / "ptxas.txt").read_text())
    figures = {usage.kernel: usage.figures for usage in usages if usage.entry}
    assert set(figures) == {"plain", "_Z6secondILi3EEvPi", "local", "_Z5callsILi400EEvPfPKfi"}
    assert all(set(of) == NVIDIA for of in figures.values())
    assert figures["plain"]["shared_bytes"] == 1024 and figures["local"]["shared_bytes"] == 0
    assert figures["_Z5callsILi400EEvPfPKfi"]["registers"] == 64
    assert figures["_Z5callsILi400EEvPfPKfi"]["stack_bytes"] == 1504
    # a function that was not inlined: its spills are no kernel's
    (function,) = [usage for usage in usages if not usage.entry]
    assert function.kernel == "_Z4bodyILi400EEvPfPKfi"
    assert c.over_limits(function, c.TARGETS["sm_90a"]) == [
        "spill_store_bytes 2968, 2968 over the budget of 0",
        "spill_load_bytes 2992, 2992 over the budget of 0",
    ]


def test_ptxas_in_another_format():
    text = (DEVICE / "ptxas.txt").read_text()
    with pytest.raises(c.CompileFailed, match="registers, shared_bytes for kernel"):
        c.parse_ptxas(text.replace("Used", "Takes"))


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "s.cu:4:28: error: local memory (80000) exceeds limit (65536) in 'big'\n",
            "kernel big: 80000 bytes of shared memory, 14464 over the limit of 65536",
        ),
        (
            "ptxas error   : Entry function 'big' uses too much shared data (0x3a980 bytes, 0x38c00 max)\n",
            "kernel big: 240000 bytes of shared memory, 7552 over the limit of 232448",
        ),
        ("a note\nk.cu(4): error: expected a ;\n  float x\n", "k.cu(4): error: expected a ;\n  float x"),
        ("", "the compiler failed without a message"),
    ],
)
def test_errors(text, expected):
    assert c.parse_errors(text) == expected


@pytest.mark.parametrize("target, limit", [("gfx942", 65536), ("sm_90a", 232448)])
def test_shared_memory_at_the_limit_and_beyond(target, limit):
    name = c.TARGETS[target].shared
    assert c.over_limits(c.Usage("k", {name: limit}), c.TARGETS[target]) == []
    expected = [f"{name} {limit + 1}, 1 over the limit of {limit}"]
    assert c.over_limits(c.Usage("k", {name: limit + 1}), c.TARGETS[target]) == expected


@pytest.mark.parametrize(
    "line, size",
    [
        ("     7: 0000000000000000 0x36881 OBJECT  LOCAL  DEFAULT   20 compile_check_at_launch", 0x36880),
        ("     4: 000000000001b530     1 OBJECT  GLOBAL DEFAULT    10 compile_check_at_launch\n  rest", 0),
        ("     4: 000000000001b530     1 OBJECT  GLOBAL DEFAULT    10 __hip_cuid_8ea5288d47b43fdc", 0),
    ],
)
def test_symbol_with_the_shared_memory_of_the_launch(line, size):
    assert c.parse_at_launch(f"Symbol table '.symtab' contains 8 entries:\n{line}\n") == size


def test_table_lines_up():
    rows = [
        {"target": "sm_90a", "unit": "u", "kernel": "one", "entry": True, "registers": 8, "stack_bytes": 0},
        {"target": "sm_90a", "unit": "u", "kernel": "body<3>", "entry": False, "stack_bytes": 1504},
    ]
    assert c.table(rows, ("registers", "stack_bytes")).splitlines() == [
        "target  kernel                 registers  stack_bytes",
        "sm_90a  u: one                         8            0",
        "sm_90a  u: body<3> (function)          -         1504",
    ]


def test_defaults_give_way_to_options():
    assert c._defaults(("-DX", "-std=c++20"), ("-O3", "-std=c++17")) == ["-O3"]
    assert c._defaults(("-O1",), ("-O3", "-std=c++17")) == ["-std=c++17"]


def test_ci_installs_the_packages_that_the_message_names():
    script = (Path(__file__).parents[2] / ".ci/run").read_text()
    assert all(re.search(rf"[ (]{re.escape(package)}[ ;)]", script) for package in c.DEBIAN_PACKAGES)


# ------------------------------------------------------------------------------------------------------------ compilers


@pytest.mark.parametrize("target", c.TARGETS)
def test_plain_source_is_within_limits(target, build):
    before = sorted(DEVICE.iterdir())
    result = check(target, "plain", build)
    rows = {row["kernel"]: row for row in result["rows"]}
    assert set(rows) == {"plain", "second<3>"}
    shared = c.TARGETS[target].shared
    assert rows["plain"][shared] == 1024 and rows["second<3>"][shared] == 0
    assert not any(row["over"] for row in result["rows"])
    assert all(set(c.TARGETS[target].columns) <= set(row) for row in result["rows"])
    assert result["warnings"] == "" and result["seconds"] > 0
    if target == "gfx942-hipify":  # it translates a copy, headers too, and writes nowhere else
        copy = build / "gfx942-hipify/plain"
        assert "hip/hip_runtime.h" in (copy / "plain.hip").read_text()
        assert "cuda_runtime.h" not in (copy / "portable_hip.h").read_text()
    assert sorted(DEVICE.iterdir()) == before


def test_names_that_hipify_takes_are_found(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "csrc/platform").mkdir(parents=True)
    for platform, header in (("cuda", "cuda_runtime.h"), ("hip", "hip/hip_runtime.h")):
        (tmp_path / f"csrc/platform/{platform}.h").write_text(f"#include <{header}>\n// {platform}\n")
    source = tmp_path / "csrc/kernel.cu"
    source.write_text('#ifdef __HIP__\n#include "platform/hip.h"\n#else\n#include "platform/cuda.h"\n#endif\n')
    with pytest.raises(c.CompileFailed, match=r"hipify overwrites platform/hip\.h with .* another file"):
        c.hipify(c.Unit("kernel", source), tmp_path / "copy")


@pytest.mark.parametrize("target", ["gfx942", "sm_90a"])
def test_spills_are_named(target, build):
    (row,) = check(target, "spills", build)["rows"]
    counts = {"gfx942": "vgpr_spills", "sm_90a": "spill_store_bytes"}
    assert row[counts[target]] > 0
    figure = f"{counts[target]} {row[counts[target]]}, {row[counts[target]]} over the budget of 0"
    assert figure in row["over"]


@pytest.mark.parametrize("target", ["gfx942", "sm_90a"])
def test_shared_memory_of_the_launch_counts(target, build):
    limit, shared = c.TARGETS[target].shared_limit, c.TARGETS[target].shared
    options = (f"-DAT_LAUNCH={limit - 1023}",)
    rows = {row["kernel"]: row for row in check(target, "plain", build, options=options)["rows"]}
    assert rows["plain"]["over"] == [f"{shared} {limit + 1}, 1 over the limit of {limit}"]
    assert rows["second<3>"]["over"] == []


@pytest.mark.parametrize("target", ["gfx942", "sm_90a"])
@pytest.mark.parametrize(
    "name, message",
    [
        ("shared", "kernel shared: 240000 bytes of shared memory, .* over the limit"),
        ("broken", r"broken.cu.*expected .*;"),
        ("empty", "no kernel came out of .*empty.cu"),
    ],
)
def test_failures(target, name, message, build):
    with pytest.raises(c.CompileFailed, match=message):
        check(target, name, build)


def test_options_reach_the_compiler(build):
    for target in ("gfx942", "sm_90a"):
        result = check(target, "empty", build, options=("-DNEVER_DEFINED", "-std=c++20"))
        assert [row["kernel"] for row in result["rows"]] == ["absent"] and result["warnings"] == ""


# --------------------------------------------------------------------------------------------------------- command line


def test_status_and_json_of_a_failure(build, capsys):
    check("gfx942", "plain", build)  # skips without clang
    arguments = ("--target", "gfx942", "--build-dir", build, "--json", "--source")
    assert run(*arguments, DEVICE / "spills.cu") == c.FAILED
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert row["kernel"] == "spills" and row["vgpr_spills"] > 0 and len(row["over"]) == 2
    assert "kernel spills: vgpr_spills" in err and "over the budget of" in err
    assert run(*arguments, DEVICE / "broken.cu") == c.FAILED
    assert "expected ';'" in json.loads(capsys.readouterr().out)["error"]
    assert run(*arguments, DEVICE / "plain.cu") == 0
    assert {json.loads(line)["kernel"] for line in capsys.readouterr().out.splitlines()} == {"plain", "second<3>"}


def test_missing_tools_are_no_pass(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(c, "_SYSTEM", tmp_path)
    arguments = ("--build-dir", tmp_path / "build", "--json", "--source", DEVICE / "plain.cu")
    assert run(*arguments) == c.MISSING
    out, err = capsys.readouterr()
    assert [json.loads(line)["target"] for line in out.splitlines()] == list(c.TARGETS)
    assert all("missing" in json.loads(line) for line in out.splitlines())
    assert all(package in err for package in c.DEBIAN_PACKAGES) and "--fetch-nvcc" in err
    monkeypatch.setattr(c, "find_spec", lambda name: None)
    with pytest.raises(c.ToolMissing, match="torch"):
        c.hipify(c.Unit("plain", DEVICE / "plain.cu"), tmp_path / "copy")


def test_a_failure_outweighs_a_missing_tool(tmp_path, monkeypatch):
    def check(target, unit, build_dir):
        raise c.ToolMissing("no") if target == "gfx942" else c.CompileFailed("bad")

    monkeypatch.setattr(c, "check", check)
    arguments = ("--build-dir", tmp_path, "--source", DEVICE / "plain.cu", "--target")
    assert run(*arguments, "gfx942", "sm_90a") == run(*arguments, "sm_90a", "gfx942") == c.FAILED
    assert run(*arguments, "gfx942") == c.MISSING


def test_wrong_command_lines(tmp_path, capsys):
    for arguments in (("--target", "sm_3"), ("--source", tmp_path / "absent.cu")):
        with pytest.raises(SystemExit) as error:
            run(*arguments)
        assert error.value.code == 2
    assert "absent.cu" in capsys.readouterr().err


def test_nvcc_comes_from_wheels_where_there_is_none(tmp_path, monkeypatch, capsys):
    commands = []

    def pip(command, **_):
        commands.append(command)
        nvcc = Path(command[command.index("--target") + 1]) / "nvidia/cu13/bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(c.shutil, "which", lambda name: None if name == "nvcc" else f"/usr/bin/{name}")
    monkeypatch.setattr(c.subprocess, "run", pip)
    with pytest.raises(c.ToolMissing, match="--fetch-nvcc"):
        c.find_nvcc(tmp_path)
    assert run("--fetch-nvcc", "--build-dir", tmp_path) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "cuda/nvidia/cu13/bin/nvcc")
    assert set(c.NVCC_WHEELS) <= set(commands[0])
    assert run("--fetch-nvcc", "--build-dir", tmp_path) == 0 and len(commands) == 1
    failed = subprocess.CompletedProcess([], 1, "", "no index")
    monkeypatch.setattr(c.subprocess, "run", lambda *_, **__: failed)
    assert run("--fetch-nvcc", "--build-dir", tmp_path / "other") == c.MISSING
    assert "no index" in capsys.readouterr().err
