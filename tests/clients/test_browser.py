"""A headless Chromium on /docs: the page has its content without a network and without scripts."""

import subprocess
from pathlib import Path

from fakes.serve_process import ServeProcess

CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,1400"]
PNG = b"\x89PNG\r\n\x1a\n"


def test_docs_page(server: ServeProcess, tmp_path: Path) -> None:
    """The document that the browser has built holds every operation and field, and it draws something."""
    dom = subprocess.run([*CHROMIUM, "--dump-dom", server.url + "/docs"], capture_output=True, text=True, timeout=120)
    for text in ("/v1/chat/completions", "exit_threshold", "/tokenizer_info", "num_loops"):
        assert text in dom.stdout
    picture = tmp_path / "docs.png"
    subprocess.run([*CHROMIUM, f"--screenshot={picture}", server.url + "/docs"], capture_output=True, timeout=120)
    data = picture.read_bytes()
    assert data.startswith(PNG) and len(data) > 20_000
