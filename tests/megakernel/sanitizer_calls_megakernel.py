"""Small decodes through every path of the device code, for compute-sanitizer: `test_gpu.py` runs this file.

compute-sanitizer --tool racecheck python tests/megakernel/sanitizer_calls_megakernel.py static 1
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable

import torch

from megakernel import build, graph, reference
from megakernel import weights as weights_of
from megakernel.config import TINY
from megakernel.knobs import PRESETS, Knobs
from megakernel.memory import Memory
from megakernel.native import Native
from megakernel.schedule import static
from megakernel.table import Table, pack

PROMPT, FORCED = [20, 21, 22, 300, 17, 5, 5, 599], [7, 301]
SPIN_BUDGET = 2**40
"""A sanitizer makes a poll cost thousands of times what it does otherwise: only a real deadlock may end a launch, and
that by the time limit of whoever runs this file."""
WORKERS = 6
ROOM = ("x_items", "slots", "scratch")


def target() -> str:
    """Of builds for the GPU of this machine."""
    return "gfx942" if torch.version.hip else "sm_90a"


def shared_build(tables: Iterable[Table], where: str, **shape: int) -> build.BuildConfig:
    """One build with room for all tables: each further one takes the GPU's compiler a minute.

    Args:
        where: of `build.TARGETS`.
        shape: as for `build.configure`.
    """
    configs = [build.configure(table, where, **shape) for table in tables]
    most = {name: max(getattr(config, name) for config in configs) for name in ROOM}
    return dataclasses.replace(configs[0], **most)


def knobs() -> list[Knobs]:
    """Every preset, and the ops that no preset has."""
    apart = dict(fold_norm=False, fold_merge=False, fold_mla_prep=False, split_qkv=False, split_shared=False)
    chosen = [*PRESETS.values(), dataclasses.replace(PRESETS["h200"], **apart), Knobs(**apart)]
    return [dataclasses.replace(one, tokens=24, workers=WORKERS, attn_rows=min(one.attn_rows, 8)) for one in chosen]


def tables(schedule: str) -> list[Table]:
    """The tables of `knobs`.

    Args:
        schedule: "static" or "dynamic".
    """
    graphs = [graph.build(TINY, one) for one in knobs()]
    return [pack(one, static(one, WORKERS)) if schedule == "static" else pack(one) for one in graphs]


def main(
    schedule: str, device: torch.device | str = "cuda", count: int | None = None, every_thread: bool = False
) -> int:
    """Decodes two or three tokens by each table, greedy and sampled, and returns how many launches that were.

    Args:
        count: how many of the tables; None is all.
        every_thread: as for `build.BuildConfig`.
    """
    made = tables(schedule)
    where = "host" if torch.device(device).type == "cpu" else target()
    config = shared_build([*made, *tables("static")], where, every_thread=every_thread)
    weights = weights_of.random(TINY, 3)  # on the CPU, as the prefill: the sanitizer has enough to watch
    _, cache = reference.prefill(weights, TINY, PROMPT)
    launches, seen = 0, set()
    for table in made[:count]:
        memory = Memory.of(table, weights, device)
        memory.load_cache(cache)
        launcher = Native(table, memory, config)
        settings = dict(iterations=2, position=len(PROMPT), forced=FORCED, spin_budget=SPIN_BUDGET)
        greedy = launcher.run(trace=True, **settings)
        launcher.run(iterations=1, position=len(PROMPT) + 2, spin_budget=SPIN_BUDGET)
        sampled = launcher.run(temperature=0.8, seed=5, **settings)
        assert greedy.logits.isfinite().all() and (sampled.tokens >= 0).all()
        seen.add(tuple(sampled.tokens.tolist()))
        launches += 3
    assert len(seen) == 1, f"tokens depend on the knobs: {seen}"
    return launches


if __name__ == "__main__":
    print(f"{main(sys.argv[1], every_thread=bool(int(sys.argv[2])))} launches decoded valid tokens")
