"""What deploy/ ships for clusters names metrics, options and routes that are there. Whether Kubernetes would take it is asked
by tests/clients/test_manifests.py."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from depthbatch.deploy.cli.serve import add_serve_arguments
from depthbatch.frontend.http.edge import OPEN_PATHS
from depthbatch.frontend.http.settings import configs_from_sources
from depthbatch.frontend.metrics import PREFIX

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NAMES = DEPLOY.parent / "docs" / "names.md"


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """By kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "depthbatch.yaml").read_text())}


def listed_metrics() -> set[str]:
    """The page of names has exactly what is exported (test_dashboards.py)."""
    page = NAMES.read_text().split("## Prometheus\n")[1].split("\n## ")[0]
    return {PREFIX + name for name in re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)}


def test_mapping_for_llm_d_names_exported_metrics() -> None:
    """Every gauge of the extractor is there, and the one engine is the one that unlabelled pods are taken for."""
    config = yaml.safe_load((DEPLOY / "llm-d" / "epp-config.yaml").read_text())
    (extractor,) = [each for each in config["plugins"] if each["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    assert engine["name"] == extractor["parameters"]["defaultEngine"]
    specs = [value for name, value in engine.items() if name.endswith("Spec") and value]
    assert len(specs) == 4 and set(specs) <= listed_metrics()
    plugins = {each["type"] for each in config["plugins"]}
    assert {each["pluginRef"] for each in config["schedulingProfiles"][0]["plugins"]} <= plugins


def test_servers_start_with_the_options_of_the_manifest(manifests: dict[str, Any]) -> None:
    """Its arguments are parsed as the command does, and the pod is given more time to end than the server takes."""
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    arguments = parser.parse_args(server["args"])
    engine, http = configs_from_sources(arguments, arguments.model, {})
    assert engine.prefix_caching == "on" and http.port == server["ports"][0]["containerPort"]
    assert pod["terminationGracePeriodSeconds"] >= http.drain_s + 30
    assert server["env"][0]["name"] == "DEPTHBATCH_API_KEY"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["path"] in OPEN_PATHS, "probes have no key"
    assert server["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_names_in_the_manifests_fit_each_other(manifests: dict[str, Any]) -> None:
    """The service and the autoscaler find the deployment's pods, volumes are mounted, and the autoscaler's metrics are what the
    adapter makes of exported ones."""
    deployment, service, scaler = (manifests[kind] for kind in ("Deployment", "Service", "HorizontalPodAutoscaler"))
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (server,) = template["spec"]["containers"]
    assert service["spec"]["ports"][0]["targetPort"] == server["ports"][0]["name"]
    mounts = {each["name"] for each in server["volumeMounts"]}
    assert mounts == {each["name"] for each in template["spec"]["volumes"]}
    (rule,) = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    series = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert series is not None
    shown = {
        re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), name)
        for name in listed_metrics()
        if re.search(series[1], name)
    }
    assert {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]} == shown and len(shown) == 2


@pytest.mark.parametrize("unit", ["vllm-router.service", "smg.service"])
def test_router_units_ask_what_servers_answer(unit: str) -> None:
    """The command is one command, and the route by which a server is taken out is one that needs no key."""
    text = (DEPLOY / unit).read_text().replace("\\\n", " ")
    found = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert found is not None
    arguments = shlex.split(found[1])
    assert arguments[arguments.index("--health-check-endpoint") + 1] == "/ready"
    assert arguments[arguments.index("--policy") + 1] == "cache_aware"
