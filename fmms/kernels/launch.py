"""Launches the portable kernels: which ones a request needs, tile sizes, grids, the buffers between them.

Two ways. Without truncation and sparse edits the fused kernel draws, and the logits are never stored. With them it
stores the logits, and kernels over stored logits edit, truncate and draw. Nothing here synchronises with the host or
allocates in a way that a CUDA graph cannot capture.
"""

import contextlib
import threading
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fmms import controls
from fmms import device as device_facts
from fmms.kernels import edits, select, stage1, stage2, stored, tile
from fmms.request import Request, Results

INTERPRETED = triton.knobs.runtime.interpret
_interpreter_lock = threading.Lock()
"""The interpreter patches triton.language while it runs a kernel, for all threads."""

TILE_RESULTS = 1 << 24
"""Most tile results (tiles x draws x rows, 16 bytes each) that are kept between the stages."""

CANDIDATE_GROUPS = 1 << 20 if INTERPRETED else 128
"""Groups of 32 tokens that truncation keeps in registers; more candidates than these are read again in each step."""

STORED_IDS = 1 << 20 if INTERPRETED else 1024
"""Most ids of a tile of stored logits."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of stage 1. They change the speed of a call, never the ids that it returns."""

    block_h: int
    block_v: int
    block_d: int
    vocab_on_m: bool
    tma: bool = False
    num_warps: int = 4
    num_stages: int = 4
    programs_per_sm: int = 2


def tma_allowed(*operands: torch.Tensor) -> bool:
    """Whether Hopper's tensor copy engine can load these matrices: base address and row stride in whole 16 bytes."""
    device = operands[0].device
    if INTERPRETED or device.type != "cuda" or torch.version.hip or device_facts.facts(device).capability < (9, 0):
        return False
    return all(
        x.data_ptr() % 16 == 0
        and x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
        and x.stride(0) * x.element_size() % 16 == 0
        for x in operands
    )


def choose_tiles(rows: int, vocab: int, width: int, itemsize: int, tma: bool = False) -> Tiles:
    """Tile sizes for a problem [rows, width] x [vocab, width] of elements of `itemsize` bytes."""
    block_h = max(16, triton.next_power_of_2(rows))
    if INTERPRETED:
        # NumPy's cost is per operation more than per element: few, large tiles, of at most 2**20 elements (Triton's
        # limit) and narrow along D (measured: 5 times faster than square ones at V = 49152, D = 576)
        block_h = min(512, block_h)
        block_v = min(1 << 14, (1 << 20) // block_h, max(128, triton.next_power_of_2(vocab)))
        return Tiles(block_h, block_v, min(64, max(16, triton.next_power_of_2(width))), vocab_on_m=False)
    block_h = min(128, block_h)
    if itemsize == 4:
        return Tiles(min(block_h, 32), 128, 32, False, tma, num_warps=4, num_stages=3)
    if block_h == 16:
        return Tiles(16, 128, 128, False, tma, num_warps=4, num_stages=3, programs_per_sm=2)
    # from 17 rows on in 64s, Hopper's matrix instruction: 32 rows on the older one spill registers and take longer
    return Tiles(max(64, block_h), 128, 64, False, tma, num_warps=8, num_stages=5, programs_per_sm=1)


OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
SELECT_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def stage1_options(tiles: Tiles) -> dict:
    """Compiler options of stage 1. No fused multiply-adds: several threads hold copies of one row's sum, each adding
    its own product last, and fused ones round differently from copy to copy, so which was stored would be chance."""
    return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": False}


_thread = threading.local()


@contextlib.contextmanager
def _launch_context(device: torch.device):
    """Triton launches on the current device, which need not be the tensors'. The interpreter is NumPy, which warns of
    the log of an empty group's sum and of NaN inputs; both are handled in the kernels."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            if not getattr(_thread, "has_context", False):
                # a new thread has no CUDA context until some work gives it one, and tensor descriptors need it
                torch.zeros(1, device=device)
                _thread.has_context = True
            yield
    else:
        ignored = warnings.catch_warnings(action="ignore", category=RuntimeWarning)
        with _interpreter_lock, np.errstate(all="ignore"), ignored:
            yield


def sample(request: Request, tiles: Tiles | None = None) -> Results:
    """Serves a request on its tensors' device. `tiles` overrides the choice of tile sizes of the matmul. Draws beyond
    TILE_RESULTS tile results take further passes: over the weight, or over the stored logits."""
    hidden, weight = request.hidden, request.weight
    tma = tma_allowed(hidden, weight)
    tiles = tiles or choose_tiles(request.rows, request.vocab, hidden.shape[1], hidden.element_size(), tma)
    with _launch_context(request.device):
        return _Launch(request, tiles).run()


def top_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 [H, count] and logits fp32 of the largest logits fp32 [H, V], the lowest id first on a tie."""
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    lowest_first = 0xFFFFFFFF - torch.arange(logits.shape[1], device=logits.device)
    ids = 0xFFFFFFFF - (((order << 32) | lowest_first).topk(count, dim=1).values & 0xFFFFFFFF)
    return ids, logits.gather(1, ids)


class _Launch:
    """The launches of one request and the buffers that they share."""

    def __init__(self, request: Request, tiles: Tiles):
        self.request, self.tiles = request, tiles
        self.rows, self.vocab = request.rows, request.vocab
        self.n_tiles = triton.cdiv(self.vocab, tiles.block_v)
        self.n_groups = 4 * triton.cdiv(self.vocab, 128)
        self.stored = request.filters or request.edits
        self.features = (
            (tile.BIAS.value if request.bias is not None else 0)
            | (tile.ALLOWED.value if request.allowed_mask is not None else 0)
            | (tile.BANNED.value if request.banned_ids is not None else 0)
            | (tile.ENTROPY.value if request.want_entropy else 0)
            | (tile.RAW.value if request.want_raw_logprobs else 0)
            | (tile.LOGITS.value if request.want_logits or request.top_logprobs else 0)
            | (tile.BAD.value if request.edits else 0)
        )
        self.logits = self.raw = self.group_max = self.group_sum = self.threshold = self.last_tie = self.bad = None
        self.row_max = self.row_sum = self.row_dot = self.raw_max = self.raw_sum = None
        self.stand_ins = {}

    def run(self) -> Results:
        request = self.request
        if self.stored or self.features & tile.LOGITS.value:
            self.logits = self._empty(self.rows, self.vocab)
        if request.want_raw_logprobs:
            self.raw = self._empty(self.rows, self.vocab) if self.stored else None
            self.raw_max, self.raw_sum = (self._empty(self.n_tiles, self.rows) for _ in range(2))
        if request.want_entropy:
            self.row_dot = self._empty(self.n_tiles, self.rows)
        draw_tiles = self.n_tiles
        if self.stored:
            self.group_max, self.group_sum = (self._empty(self.rows, self.n_groups) for _ in range(2))
            self.row_max, self.row_sum = (self._empty(self.n_tiles, self.rows) for _ in range(2))
            self._fused_head(None, 0, 0, None, None)
            if request.edits:
                self._edit()
            if request.filters:
                self._cut()
            draw_tiles = triton.cdiv(self.vocab, self._stored_blocks()[1])
        at_once = max(1, TILE_RESULTS // (draw_tiles * self.rows))
        parts = [
            self._draw(draw_tiles, first, min(at_once, request.samples - first))
            for first in range(0, request.samples, at_once)
        ]
        found = parts[0]
        if len(parts) > 1:
            wanted = {"ids": True, "logprobs": request.want_logprobs, "raw_logprobs": request.want_raw_logprobs}
            wanted["final_logprobs"] = request.want_final_logprobs
            found |= {name: torch.cat([part[name] for part in parts], 1) for name in wanted if wanted[name]}
        return self._results(found)

    def _empty(self, *shape, dtype=torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.request.device)

    def _pointer(self, tensor: torch.Tensor | None, dtype=torch.float32) -> torch.Tensor:
        """The tensor, or one in its place that no kernel reads or writes: a missing pointer would be another type, and
        so another compilation."""
        if tensor is not None:
            return tensor
        if dtype not in self.stand_ins:
            self.stand_ins[dtype] = self._empty(1, dtype=dtype)
        return self.stand_ins[dtype]

    def _stored_blocks(self) -> tuple[int, int]:
        """Rows and ids of a tile of stored logits."""
        if INTERPRETED:
            block_h = min(64, triton.next_power_of_2(self.rows))
            return block_h, min(STORED_IDS, (1 << 17) // block_h, max(128, triton.next_power_of_2(self.vocab)))
        # the noise of 1,024 tokens would spill
        return 1, STORED_IDS if self.request.scheme == "group" else min(256, STORED_IDS)

    def _fused_head(self, draws: dict | None, first_sample: int, count: int, gumbels, uniforms) -> None:
        """The matmul; with `draws` also the draw, else the stored logits and their summaries."""
        request, tiles, hidden, weight = self.request, self.tiles, self.request.hidden, self.request.weight
        hidden_operand, weight_operand = hidden, weight
        if tiles.tma:
            hidden_operand = TensorDescriptor.from_tensor(hidden, [tiles.block_h, tiles.block_d])
            weight_operand = TensorDescriptor.from_tensor(weight, [tiles.block_v, tiles.block_d])
        hidden_tiles = triton.cdiv(self.rows, tiles.block_h)
        programs = self.n_tiles
        if request.device.type == "cuda":
            sm_count = device_facts.facts(request.device).sm_count
            programs = min(programs, max(1, sm_count * tiles.programs_per_sm // hidden_tiles))
        extras = [None] * 3
        logits, raw, dot, raw_max, raw_sum, out_raw = self.logits, None, None, None, None, None
        if self.features:
            bias = None if request.bias is None else request.bias.float()
            extras = [
                self._pointer(bias),
                self._pointer(request.allowed_mask, torch.int32),
                self._pointer(request.banned_ids, torch.int64),
            ]
            logits, raw, dot, raw_max, raw_sum = (
                self._pointer(x) for x in (self.logits, self.raw, self.row_dot, self.raw_max, self.raw_sum)
            )
        key = token = logit = None
        row_max, row_sum, group_max, group_sum = self.row_max, self.row_sum, self.group_max, self.group_sum
        if draws is not None:
            key, token, logit, row_max, row_sum = (draws[name] for name in ("key", "id", "logit", "max", "sum"))
            out_raw = self._pointer(draws["raw"]) if self.features else None
            raw = group_max = group_sum = None
        # one dimension: the others end at 65,535, which 2 million rows exceed
        stage1.fused_head[(programs * hidden_tiles,)](
            hidden_operand, weight_operand, self.features, *extras,
            request.temperature, request.seeds, request.positions, gumbels, uniforms,
            logits, raw, group_max, group_sum, row_max, row_sum, dot, raw_max, raw_sum, key, token, logit, out_raw,
            self.rows, self.vocab, hidden.shape[1], count, hidden.stride(0), weight.stride(0),
            0 if request.allowed_mask is None else request.allowed_mask.stride(0),
            0 if gumbels is None else gumbels.shape[-1], self.n_groups, self.n_tiles, request.temperature_value,
            request.seed_value, request.position_value, first_sample, request.logit_scale, request.softcap,
            BLOCK_H=tiles.block_h, BLOCK_V=tiles.block_v, BLOCK_D=tiles.block_d,
            EVEN_D=hidden.shape[1] % tiles.block_d == 0, TMA=tiles.tma, VOCAB_ON_M=tiles.vocab_on_m,
            GROUPED=request.scheme == "group" or self.stored, UPCAST=INTERPRETED, SOFTCAP=request.softcap != 0.0,
            DRAW=draws is not None, GENERAL=self.features != 0,
            **({} if INTERPRETED else stage1_options(tiles)),
        )  # fmt: skip

    def _edit(self) -> None:
        """Sparse edits of the stored logits, then their summaries."""
        request, mask = self.request, self.request.allowed_mask
        keys, values, self.bad = edits.sort_edits(request)
        if len(keys):
            block = 4096 if INTERPRETED else 128
            edits.apply_edits[(triton.cdiv(len(keys), block),)](
                self.logits, keys, values, mask, request.banned_ids, len(keys), self.vocab,
                0 if mask is None else mask.stride(0), BLOCK=block, **self._options(OPTIONS),
            )  # fmt: skip
        block_h, block_v = self._stored_blocks()
        n_tiles = triton.cdiv(self.vocab, block_v)
        self.row_max, self.row_sum, self.row_dot = (self._empty(n_tiles, self.rows) for _ in range(3))
        stored.summarise[(n_tiles * triton.cdiv(self.rows, block_h),)](
            self.logits, request.temperature, request.temperature_value, self.group_max, self.group_sum,
            self.row_max, self.row_sum, self.row_dot, self.rows, self.vocab, self.n_groups,
            BLOCK_H=block_h, BLOCK_V=block_v, **self._options(OPTIONS),
        )  # fmt: skip

    def _cut(self) -> None:
        """Where truncation cuts each row."""
        request = self.request
        self.threshold, self.last_tie = self._empty(self.rows), self._empty(self.rows, dtype=torch.int32)
        units = self._empty(self.rows, self.n_groups, dtype=torch.int32)
        groups = triton.next_power_of_2(self.n_groups)
        given = (
            (select.TOP_K.value if request.top_k is not None else 0)
            | (select.TOP_P.value if request.top_p is not None else 0)
            | (select.MIN_P.value if request.min_p is not None else 0)
        )
        select.cut_rows[(self.rows,)](
            self.logits, self.group_max, self.group_sum, request.temperature, given,
            units if request.top_k is None else request.top_k,
            *(self.group_max if share is None else share for share in (request.top_p, request.min_p)),
            units, self.threshold, self.last_tie,
            self.vocab, self.n_groups, request.temperature_value, request.top_k_value, request.top_p_value,
            request.min_p_value, MIN_P_FIRST=request.filter_order == "min_p_first",
            JOINT=request.filter_order == "joint", BLOCK_G=groups, BLOCK_U=min(groups, CANDIDATE_GROUPS),
            **self._options(SELECT_OPTIONS),
        )  # fmt: skip

    def _draw(self, n_tiles: int, first: int, count: int) -> dict:
        """Draws `first` to `first + count` of every row."""
        request = self.request
        gumbels, uniforms = (
            None if noise is None else noise[:, first : first + count].contiguous()
            for noise in (request.gumbels, request.uniforms)
        )
        draws = {
            "key": self._empty(n_tiles, count, self.rows, dtype=torch.float64),
            "id": self._empty(n_tiles, count, self.rows, dtype=torch.int32),
            "logit": self._empty(n_tiles, count, self.rows),
            "max": self._empty(n_tiles, self.rows),
            "sum": self._empty(n_tiles, self.rows),
            "raw": self._empty(n_tiles, count, self.rows) if request.want_raw_logprobs and not self.stored else None,
        }
        if self.stored:
            block_h, block_v = self._stored_blocks()
            stored.draw[(n_tiles * triton.cdiv(self.rows, block_h),)](
                self.logits, self.group_max, self.threshold, self.last_tie, request.temperature, request.seeds,
                request.positions, gumbels, uniforms, draws["max"], draws["sum"], draws["key"], draws["id"],
                draws["logit"],
                self.rows, self.vocab, count, self.n_groups, 0 if gumbels is None else gumbels.shape[-1],
                request.temperature_value, request.seed_value, request.position_value, first, BLOCK_H=block_h,
                BLOCK_V=block_v, GROUPED=request.scheme == "group", **self._options(OPTIONS),
            )  # fmt: skip
        else:
            self._fused_head(draws, first, count, gumbels, uniforms)
        return self._reduce(draws, n_tiles, count)

    def _reduce(self, draws: dict, n_tiles: int, count: int) -> dict:
        request = self.request
        out = {
            "ids": self._empty(self.rows, count, dtype=torch.int64),
            "logprobs": self._empty(self.rows, count),
            "lse": self._empty(self.rows),
            "max_logit": self._empty(self.rows),
            "valid": self._empty(self.rows, dtype=torch.bool),
            "raw_logprobs": None,
            "final_logprobs": None,
            "log_total": None,
            "entropy": None,
        }
        general = self.features != 0 or request.want_final_logprobs
        extras = [None] * 6
        if general:
            out["raw_logprobs"] = self._empty(self.rows, count) if request.want_raw_logprobs else self._pointer(None)
            out["final_logprobs"] = self._empty(self.rows, count)
            out["log_total"], out["entropy"] = self._empty(self.rows), self._empty(self.rows)
            extras = [
                *(self._pointer(x) for x in (self.row_dot, self.raw_max, self.raw_sum, self.raw)),
                self._pointer(self.bad, torch.bool), self._pointer(request.banned_ids, torch.int64),
            ]  # fmt: skip
        in_raw = self._pointer(draws["raw"]) if general else None
        row_tiles = n_tiles if self.row_max is None else self.row_max.shape[0]
        most_tiles = max(n_tiles, row_tiles, self.n_tiles)
        block = 512 if INTERPRETED else 1
        stage2.reduce_tiles[(triton.cdiv(self.rows * count, block),)](
            self.features, draws["key"], draws["id"], draws["logit"], in_raw, draws["max"], draws["sum"],
            self.row_max, self.row_sum, *extras, request.temperature, request.temperature_value, *out.values(),
            self.rows, self.vocab, count, n_tiles, row_tiles, self.n_tiles,
            BLOCK_DRAWS=block, BLOCK_TILES=min(1024, max(16, triton.next_power_of_2(most_tiles))),
            GENERAL=general, STORED=self.stored, **self._options(OPTIONS),
        )  # fmt: skip
        return out

    def _results(self, found: dict) -> Results:
        request = self.request
        top_ids = top_logprobs = None
        if request.top_logprobs:
            top_ids, top = top_tokens(self.logits, request.top_logprobs)
            inverse = 1.0 / controls.divisors(request.per_row("temperature"))
            relative = (top - found["max_logit"][:, None]).double() * inverse[:, None]
            valid = found["valid"][:, None]
            top_ids = torch.where(valid, top_ids, -1)
            top_logprobs = torch.where(valid, (relative - found["log_total"][:, None]).float(), torch.nan)
        return Results(
            ids=found["ids"],
            logprobs=found["logprobs"] if request.want_logprobs else None,
            raw_logprobs=found["raw_logprobs"] if request.want_raw_logprobs else None,
            final_logprobs=found["final_logprobs"] if request.want_final_logprobs else None,
            lse=found["lse"],
            max_logit=found["max_logit"],
            valid=found["valid"],
            entropy=found["entropy"] if request.want_entropy else None,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            logits=self.logits if request.want_logits else None,
        )

    @staticmethod
    def _options(options: dict) -> dict:
        return {} if INTERPRETED else options
