"""Helpers to test sampling kernels, this package's and yours.

- `inputs`: problems with known logits, common offsets, awkward strides, poisoned memory.
- `statistics`: chi-square over the whole vocabulary, exact intervals, uniformity, independence.
- `margins`: how far a draw or a truncation is from going another way, and interval widths by bisection.
- `samplers`: whole checks (distribution, heavy tail, invariance, independence) of a sampler given as a function.
"""

from fmms.testing.inputs import integer_problem, known_logits, pad_width, poisoned_memory, strided_copy, with_offset
from fmms.testing.margins import decision_margin, filter_margin, group_intervals, hard_groups, interval_widths
from fmms.testing.samplers import (
    Sampler,
    check_distribution,
    check_heavy_tail,
    check_independence,
    check_invariance,
    draw_many,
)
from fmms.testing.statistics import (
    binomial_interval,
    binomial_tail,
    chi_square,
    draws_histogram,
    ecdf_band,
    independence,
    uniform_p_values,
)

__all__ = [
    "Sampler",
    "binomial_interval",
    "binomial_tail",
    "check_distribution",
    "check_heavy_tail",
    "check_independence",
    "check_invariance",
    "chi_square",
    "decision_margin",
    "draw_many",
    "draws_histogram",
    "ecdf_band",
    "filter_margin",
    "group_intervals",
    "hard_groups",
    "independence",
    "integer_problem",
    "interval_widths",
    "known_logits",
    "pad_width",
    "poisoned_memory",
    "strided_copy",
    "uniform_p_values",
    "with_offset",
]
