"""The list of backends: how one is registered, found on this machine, and made."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

Candidates = Sequence[tuple[str, str]]
_RETURNS = ("ids", "logits")


@dataclass(frozen=True)
class Backend:
    """A sampler ready to be called: `backend(hidden [H, D], weight [V, D], temperature [H], seeds [H])`."""

    name: str
    function: Callable[..., torch.Tensor]
    about: str = ""
    """What it computes, in a line."""
    returns: str = "ids"
    """"ids" [H], or "logits" [H, V] for a yardstick that doesn't sample."""
    exact: bool = True
    """Whether it draws from softmax(logits / T) itself; False for a truncated or approximate distribution."""
    seeded: bool = False
    """Whether `seeds` decide the draw; else PyTorch's generator of the device, or the peer's own, does."""
    graph: bool = False
    """Whether a CUDA graph can capture the call."""
    scheme: str | None = None
    """Noise scheme of `fmms.reference` whose draws it repeats id by id, if any."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    """Truncation that it applies: the top_k largest logits, then top_p of what is left, renormalised; and min_p."""

    def __call__(self, hidden, weight, temperature, seeds) -> torch.Tensor:
        return self.function(hidden, weight, temperature, seeds)


@dataclass(frozen=True)
class Available:
    """The backend can be made here. `found` says where its optional parts come from: {name: "module.attribute"}."""

    found: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Unavailable:
    """The backend can't be made here, and why: what is missing and how to get it."""

    reason: str

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class _Entry:
    build: Callable[..., Callable]
    requires: Mapping[str, Candidates]
    install: str
    devices: tuple[str, ...]
    check: Callable[[torch.device], str | None] | None
    facts: dict


_entries: dict[str, _Entry] = {}


def register(
    name: str,
    function: Callable[..., torch.Tensor] | None = None,
    *,
    build: Callable[..., Callable] | None = None,
    requires: Mapping[str, Candidates] | None = None,
    install: str = "",
    devices: Sequence[str] = ("cpu", "cuda"),
    check: Callable[[torch.device], str | None] | None = None,
    **facts,
):
    """Adds a backend; also a decorator of its function. A name registered again replaces the former.

    Args:
        name: the system's name in tables and figures.
        function: `function(hidden, weight, temperature, seeds, **parts)`; `parts` are what `requires` found.
        build: in place of `function`: `build(**parts)` returns the function, for one that keeps a state.
        requires: {part: [(module, attribute), ...]}; the first candidate that can be imported is taken.
        install: what installs the missing library, such as "pip install flashinfer-python".
        devices: kinds of device that it runs on.
        check: `check(device)` returns why it can't run there, or None.
        facts: `about`, `returns`, `exact`, `seeded`, `graph`, `scheme`, `top_k`, `top_p`, `min_p` as `Backend`
            explains them.

    Raises:
        ValueError: neither or both of function and build, or an unknown fact.
    """
    if function is None and build is None:
        return functools.partial(
            _register_function, name, requires=requires, install=install, devices=devices, check=check, **facts
        )
    if function is not None and build is not None:
        raise ValueError(f"backend {name!r}: expected function or build, got both")
    known_facts = set(Backend.__dataclass_fields__) - {"name", "function"}
    unknown = sorted(set(facts) - known_facts)
    if unknown:
        raise ValueError(f"backend {name!r}: unknown {', '.join(unknown)}; it takes {', '.join(sorted(known_facts))}")
    if facts.get("returns", "ids") not in _RETURNS:
        raise ValueError(f"backend {name!r}: returns is {facts['returns']!r}; expected one of {', '.join(_RETURNS)}")
    if build is None:

        def build(**parts):
            return functools.partial(function, **parts) if parts else function

    _entries[name] = _Entry(build, dict(requires or {}), install, tuple(devices), check, facts)
    return function


def _register_function(name, function, **options):
    return register(name, function, **options)


def known() -> list[str]:
    """Names of all backends, whether this machine can run them or not, in the order of registration."""
    return list(_entries)


def probe(name: str, device: torch.device | str | None = None) -> Available | Unavailable:
    """Whether a backend can be made for `device` (default: the GPU if there is one, else the CPU).

    It imports the optional libraries but launches nothing. ValueError for a name that is not registered.
    """
    entry = _entry(name)
    device = _device(device)
    try:
        found = {part: where for part, (_, where) in _resolve(entry).items()}
    except ImportError as error:
        return Unavailable(str(error))
    if device.type not in entry.devices:
        return Unavailable(f"runs on {' or '.join(entry.devices)}, not on {device.type}")
    reason = entry.check(device) if entry.check else None
    return Unavailable(reason) if reason else Available(found)


def make(name: str, device: torch.device | str | None = None) -> Backend:
    """The backend, ready to be called on tensors of `device`.

    Raises:
        ValueError: no backend has this name.
        RuntimeError: it is not available here; the message is the reason that `probe` gives.
    """
    status = probe(name, device)
    if not status:
        raise RuntimeError(f"backend {name!r} is not available: {status.reason}")
    entry = _entry(name)
    parts = {part: value for part, (value, _) in _resolve(entry).items()}
    return Backend(name, entry.build(**parts), **entry.facts)


def _entry(name: str) -> _Entry:
    if name not in _entries:
        raise ValueError(f"backend is {name!r}; expected one of {', '.join(_entries)}, or register() it")
    return _entries[name]


def _device(device) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _resolve(entry: _Entry) -> dict[str, tuple[object, str]]:
    """{part: (object, "module.attribute")}; ImportError that lists what was tried."""
    return {part: _first(candidates, entry.install) for part, candidates in entry.requires.items()}


def _first(candidates: Candidates, install: str) -> tuple[object, str]:
    faults = {}
    for module, attribute in candidates:
        try:
            return getattr(importlib.import_module(module), attribute), f"{module}.{attribute}"
        except ModuleNotFoundError as error:
            faults[str(error)] = None
        except AttributeError:
            faults[f"{module} has no {attribute}"] = None
        except Exception as error:  # a library that breaks on import is as good as none, and its error says why
            faults[f"importing {module} failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"] = None
    raise ImportError("; ".join(faults) + (f" ({install})" if install else ""))
