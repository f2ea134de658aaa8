"""Compiles every kernel for GPUs that need not be there: `python -m fmms.kernels.cross_compile [TARGET ...]`.

Proves that the kernels compile for a target and shows what they take (registers, spills, shared memory), not that they
run. Prints one JSON object per kernel, target and variant; exit status 1 if one failed. TRITON_INTERPRET must be unset.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fmms.kernels import edits, launch, select, stage1, stage2, stored

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
}

_TYPES = {
    "bias": "*fp32", "allowed": "*i32", "banned": "*i64", "temperature": "*fp32", "seeds": "*i64", "positions": "*i64",
    "gumbels": "*fp32", "uniforms": "*fp64", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32",
    "logits": "*fp32", "raw": "*fp32", "group_max": "*fp32", "group_sum": "*fp32", "threshold": "*fp32",
    "last_tie": "*i32", "units": "*i32", "keys": "*i64", "values": "*fp32",
    "out_key": "*fp64", "out_id": "*i32", "out_logit": "*fp32", "out_raw": "*fp32", "out_max": "*fp32",
    "out_sum": "*fp32", "out_dot": "*fp32", "raw_max": "*fp32", "raw_sum": "*fp32", "row_max": "*fp32",
    "row_sum": "*fp32", "row_dot": "*fp32", "in_key": "*fp64", "in_id": "*i32", "in_logit": "*fp32", "in_raw": "*fp32",
    "in_max": "*fp32", "in_sum": "*fp32", "bad": "*i1", "ids": "*i64", "logprobs": "*fp32", "raw_logprobs": "*fp32",
    "final_logprobs": "*fp32", "lse": "*fp32", "max_logit": "*fp32", "log_total": "*fp32", "entropy": "*fp32",
    "valid": "*i1", "temperature_value": "fp32", "logit_scale": "fp32", "softcap": "fp32", "top_p_value": "fp32",
    "min_p_value": "fp32", "seed_value": "i64", "position_value": "i64",
}  # fmt: skip


def compile_kernel(kernel, target: str, constants: dict, types: dict, divisible=(), **options):
    """Compiles `kernel` for a target of TARGETS; arguments that are neither constants nor typed are int32. Pointers and
    the integers named in `divisible` are promised to be multiples of 16, as a launch finds them for real shapes."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else {**_TYPES, **types}.get(n, "i32") for n in names}
    wide = [n for n in names if signature[n].startswith("*") or n in divisible]
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in wide}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs=aligned,
    )
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(compiled, target: str) -> dict:
    """Registers and stack bytes (CUDA targets, from cuobjdump) and shared memory of a compiled kernel."""
    found = {"shared_bytes": compiled.metadata.shared}
    if TARGETS[target].backend == "cuda":
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        match = re.search(r"REG:(\d+) STACK:(\d+)", text)
        if match:
            found |= {"registers": int(match[1]), "stack_bytes": int(match[2])}
    return found


def scattered_reductions(ttgir: str) -> list[str]:
    """Layouts along whose reduced axis the lanes of a warp are not consecutive ones, in Triton's GPU code.

    Triton before 3.8 reduces those over the wrong lanes: a maximum over a group misses members and takes in others.
    """
    layouts = dict(re.findall(r"^#(\w+) = #ttg.linear<\{(.*)\}>$", ttgir, re.MULTILINE))
    found = []
    for axis, operand in re.findall(
        r'"tt\.reduce".*?axis = (\d+).*?\}\) : \(tensor<[^#]*(#.*?)>[,)]', ttgir, re.DOTALL
    ):
        name = re.search(r"#(?!ttg)(\w+)", operand)[1]
        if name not in layouts:
            continue
        lanes = json.loads(re.search(r"lane = (\[.*?\]), warp", layouts[name])[1])
        axes = list(range(len(lanes[0])))
        for dropped in re.findall(r"dim = (\d+)", operand)[::-1]:  # a slice of a layout lacks an axis
            del axes[int(dropped)]
        at = [bit for bit, lane in enumerate(lanes) if lane[axes[int(axis)]]]
        if at and at != list(range(at[0], at[0] + len(at))):
            found.append(f"axis {axis} of {operand}: lane bits {at}")
    return found


def variants():
    """(kernel, name, constants, types, options) of everything that ships, at the tile sizes that a GPU gets."""
    heads = [(rows, "bf16", grouped, "draw") for rows in (1, 64, 128) for grouped in (True, False)]
    heads += [(64, "fp32", grouped, "draw") for grouped in (True, False)]
    heads += [(64, "bf16", grouped, "draw, all arguments") for grouped in (True, False)]
    heads += [(1, "bf16", True, "draw, all arguments"), (1, "bf16", True, "store, all arguments")]
    heads += [(rows, "bf16", True, "store") for rows in (1, 128)]
    for rows, dtype, grouped, way in heads:
        tiles = launch.choose_tiles(rows, 151936, 4096, 4 if dtype == "fp32" else 2)
        full, store = "all" in way, way.startswith("store")
        absent = ["out_key", "out_id", "out_logit", "out_raw"] if store else ["group_max", "group_sum", "raw"]
        if not full:
            absent += ["bias", "allowed", "banned", "gumbels", "uniforms"]
            absent += ["raw", "out_dot", "raw_max", "raw_sum", "out_raw", *([] if store else ["logits"])]
        constants = dict.fromkeys(absent) | {
            "BLOCK_H": tiles.block_h, "BLOCK_V": tiles.block_v, "BLOCK_D": tiles.block_d, "EVEN_D": not full,
            "TMA": False, "VOCAB_ON_M": tiles.vocab_on_m, "GROUPED": grouped, "UPCAST": False, "SOFTCAP": full,
            "DRAW": not store, "GENERAL": full,
        }  # fmt: skip
        types = {"hidden": f"*{dtype}", "weight": f"*{dtype}"}
        name = f"fused_head[H={rows}, {dtype}, {'group' if grouped else 'token'}, {way}]"
        divisible = () if full else ("D", "V", "stride_h", "stride_w")
        yield stage1.fused_head, name, constants, types, {"divisible": divisible, **launch.stage1_options(tiles)}
    # stored logits of a vocabulary that is a multiple of 16, and of one that is not: other loads, other layouts
    for divisible in (("V",), ()):
        which = "" if divisible else ", odd V"
        options = {"divisible": divisible, **launch.OPTIONS}
        for grouped in (True, False):
            blocks = {"BLOCK_H": 1, "BLOCK_V": 1024 if grouped else 256}
            constants = dict.fromkeys(["gumbels", "uniforms"]) | blocks | {"GROUPED": grouped}
            yield stored.draw, f"draw[{'group' if grouped else 'token'}{which}]", constants, {}, options
        yield stored.summarise, f"summarise[{which[2:]}]", {"BLOCK_H": 1, "BLOCK_V": 1024}, {}, options
        for order in ("top_k_first", "joint", "min_p_first"):
            constants = {"MIN_P_FIRST": order == "min_p_first", "JOINT": order == "joint"}
            constants |= {"BLOCK_G": 8192, "BLOCK_U": launch.CANDIDATE_GROUPS}
            options = {"divisible": divisible, **launch.SELECT_OPTIONS}
            yield select.cut_rows, f"cut_rows[{order}{which}]", constants, {}, options
    yield edits.apply_edits, "apply_edits", {"BLOCK": 128}, {}, launch.OPTIONS
    plain = ["in_raw", "row_dot", "raw_max", "raw_sum", "raw", "bad", "banned", "raw_logprobs", "final_logprobs"]
    plain += ["log_total", "entropy"]
    for stored_logits, general in itertools.product((False, True), repeat=2):
        absent = ([] if general else plain) + ([] if stored_logits else ["row_max", "row_sum"])
        constants = dict.fromkeys(absent) | {"BLOCK_DRAWS": 1, "BLOCK_TILES": 1024}
        constants |= {"STORED": stored_logits, "GENERAL": general}
        name = f"reduce_tiles[stored {stored_logits}, general {general}]"
        yield stage2.reduce_tiles, name, constants, {}, launch.OPTIONS


def main(targets: list[str]) -> int:
    unknown = set(targets) - set(TARGETS)
    if unknown:
        print(f"unknown target {', '.join(sorted(unknown))}; known: {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    if launch.INTERPRETED:
        print("TRITON_INTERPRET is set: unset it, the interpreter compiles nothing", file=sys.stderr)
        return 2
    failed = 0
    for target in targets or TARGETS:
        for kernel, name, constants, types, options in variants():
            row = {"target": target, "kernel": name}
            try:
                compiled = compile_kernel(kernel, target, constants, types, **options)
                row |= resources(compiled, target)
                scattered = scattered_reductions(compiled.asm["ttgir"])
                if scattered and tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8):
                    raise ValueError(f"reductions that Triton before 3.8 gets wrong: {'; '.join(scattered)}")
            except Exception as error:
                failed += 1
                row["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(row), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
