"""What deploy/kubernetes ships fits the schemas of Kubernetes, which a package of its own carries: no cluster, no network."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VALIDATE = ROOT / ".venv-clients" / "bin" / "kubernetes-validate"
MANIFEST = ROOT / "deploy" / "kubernetes" / "depthbatch.yaml"


def validate(path: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [str(VALIDATE), "--strict", "-k", version, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("version", ["1.26", "1.37"])
def test_manifests_fit_the_schemas(version: str) -> None:
    """Deployment, Service and HorizontalPodAutoscaler, unknown fields refused."""
    run = validate(MANIFEST, version)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_field_that_is_none_is_found(tmp_path: Path) -> None:
    """The validator does look: a misspelt field in the pod, and a number where a text belongs."""
    for wrong in (("readinessProbe:", "readynessProbe:"), ('averageValue: "4"', "averageValue: [4]")):
        assert wrong[0] in MANIFEST.read_text()
        path = tmp_path / "wrong.yaml"
        path.write_text(MANIFEST.read_text().replace(*wrong))
        assert validate(path, "1.37").returncode != 0
