"""Exact sampling fused with the LM-head matmul: `ids = fmms.sample(hidden, weight, temperature).ids`.

The names below are the public interface. Importing the package needs torch and numpy only; Triton, transformers and
plotting libraries are imported by the calls that need them.
"""

from importlib.util import find_spec as _find_spec

from fmms._version import __version__

if _find_spec("torch") is not None:
    from fmms.controls import history_edits, pack_mask
    from fmms.generation import GenerateOutput, GenerateStep, generate
    from fmms.noise import NOISE_VERSION
    from fmms.sampling import SampleOutput, sample
else:  # so that `fmms doctor` can say it

    def __getattr__(name: str):
        raise AttributeError(f"fmms.{name} needs PyTorch, which is not installed: pip install 'torch>=2.11'")


__all__ = [
    "NOISE_VERSION",
    "GenerateOutput",
    "GenerateStep",
    "SampleOutput",
    "__version__",
    "generate",
    "history_edits",
    "pack_mask",
    "sample",
]
