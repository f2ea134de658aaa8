"""Where the tests run: kernels on the GPU if there is one, else in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when it is first imported, so before any test module can import it
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device():
    """Where `impl="triton"` runs here."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
