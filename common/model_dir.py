"""From a MODEL argument to a local directory. Knows nothing of what the directory holds, and imports nothing heavy."""

import os
from pathlib import Path

from depthbatch.common.errors import DownloadError, ModelError

DEMO_DIR = Path(__file__).resolve().parent.parent / "training" / "demo"
_DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def resolve_model_dir(name: str) -> Path:
    """The directory behind a model name: a local directory, a name shipped in the package, or a Hugging Face repo id.

    Raises ModelError when there is no such directory or repository, DownloadError when it cannot be downloaded now.
    """
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return path
    demo = DEMO_DIR / name
    if name.startswith("demo") and "/" not in name and os.path.isdir(demo):
        return demo
    if os.path.exists(path):
        raise ModelError(f"model '{name}' is a file; give the directory that holds config.json")
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "/", "~")):
        raise ModelError(f"model directory '{name}' does not exist")
    return _download(name)


def _download(repo: str) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    of_the_user = (errors.HFValidationError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
    try:
        return Path(snapshot_download(repo, allow_patterns=_DOWNLOAD_PATTERNS))
    except Exception as error:  # the client raises a dozen unrelated types, offline ones included
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        kind = ModelError if isinstance(error, of_the_user) or constants.HF_HUB_OFFLINE else DownloadError
        raise kind(
            f"model '{repo}' is neither a local directory nor could it be downloaded from Hugging Face: {reason}"
        ) from None
