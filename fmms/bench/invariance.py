"""What must not change a draw, and what must: tile sizes, batch slot and batch size; rows, steps, samples and seeds."""

import torch

import fmms
from fmms import noise, testing
from fmms.bench.exactness import check_row, exact_row, experiment_seed
from fmms.request import Request


def tile_shapes() -> list:
    """Tile sizes of stage 1 that differ in everything they can."""
    from fmms.kernels.launch import Tiles

    return [
        Tiles(16, 128, 16, False, num_stages=2),
        Tiles(16, 256, 32, True, num_stages=2),
        Tiles(16, 512, 64, False, num_stages=2),
        Tiles(32, 128, 64, True, num_stages=2),
    ]


def changed_ids(
    scheme, impl, device="cpu", rows: int = 24, vocab_size: int = 1500, samples: int = 4, alone: int = 8, seed: int = 0
) -> list[dict]:
    """How many ids change when only the circumstances of a call do; every row must count 0.

    The logits are exact in any order of summation, temperatures, seeds and positions differ by row. Compared are tile
    sizes (impl "triton"), the order of the rows, a row alone or half a batch against the whole batch, and the first
    sample alone against `samples` of them.
    """
    hidden, weight = testing.integer_problem(rows, vocab_size, 48, device=device, generator_seed=seed)
    temperature = torch.tensor([1.0, 0.3, 0.0, 2.0], device=device).repeat(rows // 4 + 1)[:rows]
    seeds = noise.row_seeds(seed, rows, device)
    positions = torch.arange(rows, device=device) * 7

    def draw(index, count=samples):
        return fmms.sample(
            hidden[index], weight, temperature[index], seed=seeds[index], position=positions[index],
            num_samples=count, noise_scheme=scheme, impl=impl,
        ).ids  # fmt: skip

    everything = torch.arange(rows, device=device)
    whole = draw(everything)
    compared = {}
    if impl == "triton":
        from fmms import kernels

        launch = kernels.launch_module(torch.device(device))
        request = Request(
            hidden, weight, temperature=temperature, seeds=seeds, positions=positions, samples=samples, scheme=scheme
        )
        for tiles in tile_shapes():
            ids = launch.sample(request, tiles).ids
            across = "V x H" if tiles.vocab_on_m else "H x V"
            compared[f"tiles {tiles.block_h} x {tiles.block_v} x {tiles.block_d}, {across}"] = (ids, whole)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).to(device)
    compared["batch slot: rows permuted"] = draw(order), whole[order]
    single = torch.linspace(0, rows - 1, alone, device=device).long()
    compared["batch size: a row alone"] = torch.cat([draw(single[i : i + 1]) for i in range(alone)]), whole[single]
    half = torch.cat([draw(everything[: rows // 2]), draw(everything[rows // 2 :])])
    compared["batch size: half a batch"] = half, whole
    compared["samples: the first alone"] = draw(everything, 1), whole[:, :1]
    return [
        exact_row("ids that change", case, scheme, impl, a.numel(), int((a != b).sum()), 0)
        for case, (a, b) in compared.items()
    ]


def independence(pairs, scheme, impl, device="cpu", seed: int = 0, rate: float = 1e-6, vocab_size: int = 8):
    """Chi-square tests of independence (contingency tables) between draws that must not share noise.

    Tested are neighbouring rows of one call, consecutive steps and consecutive samples of a row, and rows whose seeds
    are consecutive integers. Each compares `pairs` pairs of draws.
    """
    seed = experiment_seed(seed, "independence", scheme, impl)
    weight = torch.linspace(0, -1, vocab_size, device=device)[:, None]
    hidden = torch.ones(2 * pairs, 1, device=device)
    seeds = torch.arange(2 * pairs, device=device) + seed
    options = dict(noise_scheme=scheme, impl=impl)
    rows = fmms.sample(hidden, weight, seed=seed, **options).ids
    steps = [fmms.sample(hidden[:pairs], weight, seed=seed, position=p, **options).ids for p in (5, 6)]
    two = fmms.sample(hidden[:pairs], weight, seed=seed + 1, num_samples=2, **options).ids
    consecutive = fmms.sample(hidden, weight, seed=seeds, **options).ids
    compared = {
        "neighbouring rows": (rows[0::2], rows[1::2]),
        "consecutive steps": steps,
        "consecutive samples": (two[:, 0], two[:, 1]),
        "consecutive seeds": (consecutive[0::2], consecutive[1::2]),
    }
    return [
        check_row("independence", case, scheme, impl, pairs, testing.independence(a, b, vocab_size), rate)
        for case, (a, b) in compared.items()
    ]
