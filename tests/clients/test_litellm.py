"""litellm, which many gateways are made of, as a text-completion client: plain, streamed, errors."""

import json
import subprocess
from pathlib import Path

from fakes.serve_process import ServeProcess

PYTHON = Path(__file__).resolve().parents[2] / ".venv-clients" / "bin" / "python"
SCRIPT = """
import json, sys
import litellm

base = {"model": "text-completion-openai/demo", "api_base": sys.argv[1] + "/v1", "api_key": "none", "num_retries": 0}
ask = {"prompt": "12+30=", "max_tokens": 8, "temperature": 0}
plain = litellm.text_completion(**base, **ask)
pieces = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**base, **ask, stream=True)]
try:
    litellm.text_completion(**base, prompt="x", temperature=99)
    refused = None
except litellm.BadRequestError as error:
    refused = str(error)
print(json.dumps({"plain": plain.choices[0].text, "streamed": "".join(pieces), "refused": refused,
                  "tokens": plain.usage.completion_tokens}))
"""


def test_text_completion(server: ServeProcess) -> None:
    """The stream joins to the plain answer, the usage is read, and a 400 arrives as litellm's own exception."""
    run = subprocess.run([PYTHON, "-c", SCRIPT, server.url], capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["plain"] == result["streamed"] and 0 < result["tokens"] <= 8
    assert "temperature" in result["refused"]
