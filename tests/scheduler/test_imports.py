"""The scheduler process stays light: what it imports is what architecture.md lets it import."""

import subprocess
import sys


def test_scheduler_imports_neither_torch_nor_transformers() -> None:
    """In a fresh interpreter, because this one has torch already. numpy is named as a control: the check sees modules."""
    code = "import sys, depthbatch.scheduler.process; print(' '.join(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in modules
    own = {name for name in modules if name.startswith("depthbatch.")}
    assert not {"torch", "transformers", "tokenizers"} & set(modules)
    assert all(name.split(".")[1] in ("common", "scheduler") for name in own)
