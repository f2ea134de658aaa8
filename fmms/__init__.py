"""Exact sampling fused with the LM-head matmul: `ids = fmms.sample(hidden, weight, temperature).ids`.

The names below are the public interface. Importing the package needs torch and numpy only; Triton, transformers and
plotting libraries are imported by the calls that need them.
"""

from fmms._version import __version__
from fmms.generation import GenerateOutput, GenerateStep, generate
from fmms.noise import NOISE_VERSION
from fmms.sampling import SampleOutput, sample

__all__ = ["NOISE_VERSION", "GenerateOutput", "GenerateStep", "SampleOutput", "__version__", "generate", "sample"]
