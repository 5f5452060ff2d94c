"""Options of the server beside the engine's: one command line, one environment, one TOML file for both."""

import argparse
from pathlib import Path

import pytest

from depthbatch.common.config import FIELDS, add_config_arguments
from depthbatch.common.errors import ConfigError
from depthbatch.common.options import add_option_arguments, to_toml
from depthbatch.deploy.cli.main import main
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


@pytest.mark.parametrize("given", ["", " ", ",", " , ,"])
def test_an_api_key_that_is_none_is_refused(given: str) -> None:
    """Bug: an empty --api-key, or one of commas, served everybody without a word."""
    with pytest.raises(ConfigError, match=r"api.key (holds no key|is empty)"):
        configs_from_sources(parse("--api-key", given), "demo", {})
    assert configs_from_sources(parse("--api-key", "a,"), "demo", {})[1].api_keys == (b"a",)


def test_variables_that_name_no_option() -> None:
    """Bug: DEPTHBATCH_MAX_NUM_SEQ was ignored, and so the default served; an empty variable was an error where the option
    is a number; a pod whose service is named depthbatch did not start, for Kubernetes sets DEPTHBATCH_PORT there."""
    with pytest.raises(ConfigError, match=r"DEPTHBATCH_MAX_NUM_SEQ is no option .did you mean 'max_num_seqs'"):
        configs_from_sources(parse(), "demo", {"DEPTHBATCH_MAX_NUM_SEQ": "3"})
    with pytest.raises(ConfigError, match=r"DEPTHBATCH_LOG_LEVEL must be one of DEBUG, .*, not 'verbose'"):
        configs_from_sources(parse(), "demo", {"DEPTHBATCH_LOG_LEVEL": "verbose"})  # bug: was INFO without a word
    configs_from_sources(parse(), "demo", {"DEPTHBATCH_LOG_LEVEL": "debug"})
    pod = {
        "DEPTHBATCH_PORT": "tcp://10.0.0.1:80", "DEPTHBATCH_SERVICE_HOST": "10.0.0.1", "DEPTHBATCH_SERVICE_PORT": "80",
        "DEPTHBATCH_SERVICE_PORT_HTTP": "80", "DEPTHBATCH_PORT_80_TCP": "tcp://10.0.0.1:80",
        "DEPTHBATCH_PORT_80_TCP_PROTO": "tcp", "DEPTHBATCH_PORT_80_TCP_PORT": "80", "DEPTHBATCH_WEB_PORT": "tcp://1:2",
        "DEPTHBATCH_PORT_80_TCP_ADDR": "10.0.0.1", "DEPTHBATCH_CACHE_DIR": "/c", "DEPTHBATCH_MAX_N": "",
        "DEPTHBATCH_API_KEY": "", "DEPTHBATCH_NOTHING": "",
    }  # fmt: skip
    http = configs_from_sources(parse(), "demo", pod)[1]
    assert http == HttpConfig()
    with pytest.raises(ConfigError, match="DEPTHBATCH_PORT must be"):
        configs_from_sources(parse(), "demo", {"DEPTHBATCH_PORT": "http"})


def test_other_commands_look_at_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEPTHBATCH_PORT", "8001")  # the server's, which a command of the same shell may have
    assert main(["generate", "--print-config"]) == 0
    monkeypatch.setenv("DEPTHBATCH_SEEED", "3")
    assert main(["generate", "--print-config"]) == 2 and "DEPTHBATCH_SEEED" in capsys.readouterr().err


def test_a_byte_order_mark_in_the_file(tmp_path: Path) -> None:
    """Bug: a TOML file that an editor of Windows had saved was "not TOML"."""
    path = tmp_path / "server.toml"
    path.write_bytes(b"\xef\xbb\xbfport = 1111\n")
    assert configs_from_sources(parse("--config", str(path)), "demo", {})[1].port == 1111


def test_keys_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: --print-config wrote the keys into whatever log keeps its output."""
    assert main(["serve", "--print-config", "--api-key", "sesame"]) == 0
    out = capsys.readouterr().out
    assert "sesame" not in out and "# api_key = (set, not shown)\n" in out


def test_printed_options_read_back(tmp_path: Path) -> None:
    """What --print-config prints is a file with the same meaning, and no option has two owners."""
    assert not set(FIELDS) & set(HTTP_FIELDS)
    http = HttpConfig(port=1234, api_key="k", default_timeout_s=2.5)
    path = tmp_path / "server.toml"
    path.write_text(to_toml(http))
    assert configs_from_sources(parse("--config", str(path)), "demo", {})[1] == http
