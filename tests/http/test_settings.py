"""Options of the server beside the engine's: one command line, one environment, one TOML file for both."""

import argparse
from pathlib import Path

import pytest

from depthbatch.common.config import FIELDS, add_config_arguments, add_option_arguments, to_toml
from depthbatch.common.errors import ConfigError
from depthbatch.frontend.http.settings import HTTP_FIELDS, HttpConfig, configs_from_sources


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    add_option_arguments(parser, HTTP_FIELDS, "HTTP options")
    return parser.parse_args(words)


def test_sources_of_both(tmp_path: Path) -> None:
    """Command line over environment over file, for options of either kind in the same file."""
    path = tmp_path / "server.toml"
    path.write_text('port = 1111\nhost = "0.0.0.0"\nmax-num-seqs = 3\ndrain_s = 5\n')
    environment = {"DEPTHBATCH_PORT": "2222", "DEPTHBATCH_MAX_N": "4", "DEPTHBATCH_API_KEY": "a, b"}
    engine, http = configs_from_sources(parse("--config", str(path), "--port", "3333"), "demo", environment)
    assert (http.port, http.host, http.drain_s, http.max_n) == (3333, "0.0.0.0", 5, 4)
    assert engine.max_num_seqs == 3 and engine.model == "demo" and http.api_keys == (b"a", b"b")


@pytest.mark.parametrize(
    ("words", "toml", "says"),
    [
        (("--port", "99999"), "", "--port"),
        (("--port", "http"), "", "--port"),
        (("--max-requests", "0"), "", "--max-requests"),
        ((), "porrt = 1", "did you mean 'port'"),
        ((), 'port = "8000"', "port"),
        ((), "drain_s = -1", "drain_s"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, words: tuple[str, ...], toml: str, says: str) -> None:
    """One line that names the option or key."""
    path = tmp_path / "server.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError, match=says):
        configs_from_sources(parse("--config", str(path), *words), "demo", {})


def test_printed_options_read_back(tmp_path: Path) -> None:
    """What --print-config prints is a file with the same meaning, and no option has two owners."""
    assert not set(FIELDS) & set(HTTP_FIELDS)
    http = HttpConfig(port=1234, api_key="k", default_timeout_s=2.5)
    path = tmp_path / "server.toml"
    path.write_text(to_toml(http))
    assert configs_from_sources(parse("--config", str(path)), "demo", {})[1] == http
