"""fmms.backends: lazy look-up of peers, reasons for what is missing, one way to call them all."""

import subprocess
import sys
import types

import pytest
import torch

from fmms import backends, controls, plotting
from fmms.backends import registry
from fmms.bench import kernel_speed

DESIGN_NAMES = [
    "matmul", "fmms", "fmms-token", "fmms-topk-topp", "torch-multinomial", "torch-gumbel", "flashinfer-logits",
    "flashinfer-topk-topp",
]  # fmt: skip


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 16, generator=generator), torch.randn(50, 16, generator=generator) / 4
    return hidden, weight, torch.tensor([0.5, 1.0, 2.0]), torch.arange(3)


@pytest.fixture
def registered(monkeypatch):
    """Registrations of a test end with it."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture
def without_flashinfer(monkeypatch):
    for name in ("flashinfer", "flashinfer.sampling"):
        monkeypatch.setitem(sys.modules, name, None)


def test_the_systems_have_the_names_of_the_figures():
    assert set(DESIGN_NAMES) <= set(backends.known())
    assert list(kernel_speed.SYSTEMS) == DESIGN_NAMES
    assert set(DESIGN_NAMES) <= set(plotting.SYSTEMS)


@pytest.mark.parametrize("modules", ["fmms", "fmms, fmms.backends"])
def test_importing_imports_no_optional_library(modules):
    code = (
        f"import sys; import {modules}; "
        "print(*({'flashinfer', 'vllm', 'scipy', 'pandas', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    "name", ["matmul", "fmms", "fmms-token", "fmms-topk-topp", "torch-multinomial", "torch-gumbel"]
)
def test_a_backend_takes_the_common_arguments(name, inputs):
    assert backends.probe(name, "cpu")
    backend = backends.make(name, "cpu")
    out = backend(*inputs)
    if backend.returns == "logits":
        torch.testing.assert_close(out, inputs[0] @ inputs[1].T)
    else:
        assert out.shape == (3,)
        assert not out.is_floating_point()
        assert out.min() >= 0 and out.max() < 50
    if backend.seeded:
        assert torch.equal(out, backend(*inputs))
        many = torch.stack([backend(*inputs[:3], inputs[3] + 100 * k) for k in range(4)])
        assert not (many == many[0]).all()


def test_a_missing_library_is_a_reason(without_flashinfer):
    status = backends.probe("flashinfer-logits", "cuda")
    assert isinstance(status, backends.Unavailable)
    assert not status
    assert "flashinfer" in status.reason
    assert "pip install flashinfer-python" in status.reason
    with pytest.raises(RuntimeError, match="flashinfer-logits' is not available"):
        backends.make("flashinfer-logits", "cuda")


def test_a_moved_name_is_found_and_a_wrong_device_refused(monkeypatch):
    library = types.ModuleType("flashinfer")
    library.sampling_from_logits = lambda logits: logits.argmax(-1)
    moved = types.ModuleType("flashinfer.sampling")
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", moved)
    status = backends.probe("flashinfer-logits", "cuda")
    assert status
    assert status.found == {"sample": "flashinfer.sampling_from_logits"}
    assert "not on cpu" in backends.probe("flashinfer-logits", "cpu").reason
    lost = backends.probe("flashinfer-topk-topp", "cuda").reason
    assert "flashinfer.sampling has no top_k_top_p_sampling_from_logits" in lost


def test_a_library_that_breaks_on_import_is_a_reason(monkeypatch, tmp_path, registered):
    (tmp_path / "broken_peer.py").write_text("raise OSError('libcudart.so.99: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    backends.register("peer", lambda *a, draw: None, requires={"draw": [("broken_peer", "draw")]})
    assert "importing broken_peer failed: OSError: libcudart.so.99" in backends.probe("peer", "cpu").reason


def test_flashinfer_is_called_as_its_interface_says(monkeypatch, inputs):
    seen = {}

    def draw(logits, top_k, top_p, filter_apply_order=None):
        seen.update(logits=logits, top_k=top_k, top_p=top_p, order=filter_apply_order)
        return logits.argmax(-1).int()

    library = types.ModuleType("flashinfer.sampling")
    library.top_k_top_p_sampling_from_logits = draw
    library.sampling_from_logits = lambda logits, seed=None, offset=None: logits.argmax(-1).int()
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", library)
    hidden, weight, temperature, _ = inputs
    scaled = (hidden @ weight.T) / temperature[:, None]
    truncated, plain = (backends.make(f"flashinfer-{name}", "cuda") for name in ("topk-topp", "logits"))
    assert torch.equal(truncated(*inputs), scaled.argmax(-1).int())
    torch.testing.assert_close(seen["logits"], scaled)
    assert (seen["top_k"], seen["top_p"], seen["order"]) == (50, 0.9, "top_k_first")
    assert (truncated.exact, truncated.top_k, truncated.top_p) == (False, 50, 0.9)
    assert torch.equal(plain(*inputs), scaled.argmax(-1).int())


def test_both_truncating_systems_truncate_alike():
    facts = backends.registry._entries
    ours, theirs = (facts[name].facts for name in ("fmms-topk-topp", "flashinfer-topk-topp"))
    assert {name: ours[name] for name in ("exact", "top_k", "top_p")} == {"exact": False, "top_k": 50, "top_p": 0.9}
    assert (ours["top_k"], ours["top_p"]) == (theirs["top_k"], theirs["top_p"])
    assert (ours["scheme"], ours["seeded"], ours["graph"]) == ("group", True, True)


def test_the_truncating_system_draws_from_the_kept_tokens(inputs):
    hidden, weight, temperature, seeds = inputs
    weight = weight.repeat(2, 1) + 0.01 * torch.arange(100)[:, None]
    backend = backends.make("fmms-topk-topp", "cpu")
    ids = torch.stack([backend(hidden, weight, temperature, seeds + call) for call in range(8)], 1)
    allowed = controls.allowed_set(hidden @ weight.T, temperature, 50, 0.9)
    assert allowed.gather(1, ids).all()
    assert len(set(ids.flatten().tolist())) > 3


def test_a_user_registers_a_sampler_in_three_lines(registered, inputs):
    @backends.register("mine", about="the largest logit", exact=False)
    def mine(hidden, weight, temperature, seeds):
        return (hidden @ weight.T).argmax(-1)

    assert backends.known()[-1] == "mine"
    backend = backends.make("mine", "cpu")
    assert (backend.about, backend.exact, backend.graph) == ("the largest logit", False, False)
    assert torch.equal(backend(*inputs), mine(*inputs))


def test_bad_registrations_and_names_are_named(registered):
    with pytest.raises(ValueError, match="backend is 'nosuch'; expected one of matmul"):
        backends.probe("nosuch")
    with pytest.raises(ValueError, match="unknown colour"):
        backends.register("x", lambda *a: None, colour="red")
    with pytest.raises(ValueError, match="returns is 'tokens'"):
        backends.register("x", lambda *a: None, returns="tokens")
    with pytest.raises(ValueError, match="got both"):
        backends.register("x", lambda *a: None, build=lambda: None)
