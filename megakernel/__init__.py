"""Decoding a DeepSeek-V2-Lite in one persistent kernel launch: its configuration, weights, reference and task graph."""

from megakernel.config import TINY, V2_LITE, ModelConfig
from megakernel.engine import Decoded, DecodeEngine
from megakernel.launch import Deadlock

__all__ = ["TINY", "V2_LITE", "Deadlock", "DecodeEngine", "Decoded", "ModelConfig"]
