"""Decoding a DeepSeek-V2-Lite in one persistent kernel launch.

from megakernel import V2_LITE, DecodeEngine

engine = DecodeEngine.random(V2_LITE, seed=0, device="cuda")
engine.prefill(prompt)
engine.decode(32, temperature=0.8, seed=7).tokens
"""

from typing import Any

_PLACES = {
    "TINY": "config",
    "V2_LITE": "config",
    "ModelConfig": "config",
    "DecodeEngine": "engine",
    "Decoded": "engine",
    "Deadlock": "launch",
    "Knobs": "knobs",
    "PRESETS": "knobs",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """Imports on first use: `python -m megakernel.graph` needs no engine, and must not find itself imported already."""
    from importlib import import_module

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
