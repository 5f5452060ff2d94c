"""Options of a configuration as its fields declare them, and the four sources of their values, weakest first: defaults, TOML
file, environment, command line.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from depthbatch.common.errors import ConfigError
from depthbatch.common.logging import LOG_LEVELS
from depthbatch.common.text_files import read_text

ENVIRONMENT_PREFIX = "DEPTHBATCH_"
OTHER_VARIABLES = (
    "LOG_LEVEL",
    "CACHE_DIR",
    "CPU_KERNELS",
    "RUN_DIR",
    "PYTHON",
    "STOP_WAIT_S",
)  # with the prefix, no option
# what Kubernetes tells a pod of a service that is named depthbatch, or depthbatch-something
KUBERNETES = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=|(\w+_)?PORT=(tcp|udp|sctp)://"
)

Natural = Annotated[int, Meta(ge=1)]


def option(help: str, choices: tuple[str, ...] | None = None, bare: str | None = None) -> Meta:
    """What a field's command-line option needs beside its type: help, the values it may take, and what it means without
    a value."""
    return Meta(description=help, extra={"choices": choices, "bare": bare})


class Option(NamedTuple):
    """One option of a configuration, as its field declares it."""

    name: str
    hint: Any  # what msgspec checks: the field's type, or a Literal of its choices
    kind: type  # int, float or str: that type without None and ranges
    default: Any
    help: str
    choices: tuple[str, ...] | None
    low: float | None
    high: float | None
    bare: str | None

    def check(self, value: Any, source: str) -> None:
        """Type, choices and range of one value; raises ConfigError naming ``source`` and the value."""
        if _is_a(value, self.hint):
            return
        if self.choices is not None:
            raise ConfigError(f"{source} must be one of {', '.join(self.choices)}, not {value!r}")
        if not _is_a(value, self.kind):
            raise ConfigError(f"{source} must be {self.kind.__name__}, not {value!r}")
        bounds = f"at least {self.low}" if self.high is None else f"between {self.low} and {self.high}"
        raise ConfigError(f"{source} must be {bounds}, not {value!r}")

    def parse(self, text: str, source: str) -> Any:
        """A value from text; an empty one clears a field that may be None. Raises ConfigError."""
        if self.default is None and not text:
            return None
        try:
            value = self.kind(text)
        except ValueError:
            article = "a whole number" if self.kind is int else "a number"
            raise ConfigError(f"{source} must be {article}, not {text!r}") from None
        self.check(value, source)
        return value


def _is_a(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter of bytes on a command line that are no UTF-8
        return False
    return True


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of configurations. Making one raises ConfigError on a value that its field's type does not hold."""

    def __post_init__(self) -> None:
        for entry in options_of(type(self)).values():
            entry.check(getattr(self, entry.name), entry.name)


@cache
def options_of(kind: type[Options]) -> Mapping[str, Option]:
    """The options of a configuration, by name."""
    return {field.name: _option(field) for field in msgspec.structs.fields(kind)}


def _option(field: msgspec.structs.FieldInfo) -> Option:
    info = msgspec.inspect.type_info(field.type)
    assert isinstance(info, msgspec.inspect.Metadata) and info.extra_json_schema and info.extra
    arms = info.type.types if isinstance(info.type, msgspec.inspect.UnionType) else (info.type,)
    arm = next((each for each in arms if isinstance(each, msgspec.inspect.StrType)), arms[0])
    choices = info.extra["choices"]
    literal = Literal[choices] if choices else None  # type: ignore[valid-type]
    return Option(
        name=field.name,
        hint=field.type if literal is None else literal if field.default is not None else literal | None,
        kind={msgspec.inspect.IntType: int, msgspec.inspect.FloatType: float}.get(type(arm), str),
        default=field.default,
        help=info.extra_json_schema["description"],
        low=getattr(arm, "ge", None),
        high=getattr(arm, "le", None),
        **info.extra,
    )


# --- the four sources


def add_option_arguments(
    parser: argparse.ArgumentParser, options: Mapping[str, Option], title: str, names: Collection[str] = ()
) -> None:
    """An argument for every option of a configuration."""
    group = parser.add_argument_group(title)
    for name, entry in options.items():
        if name == "model" or (names and name not in names):
            continue
        default = "" if entry.default is None else f" (default {entry.default})"
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            default=argparse.SUPPRESS,
            nargs=None if entry.bare is None else "?",
            const=entry.bare,
            metavar="|".join(entry.choices) if entry.choices else entry.kind.__name__.upper(),
            help=entry.help.replace("%", "%%") + default,
        )


def values_from_sources(
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    options: Mapping[str, Option],
    others: Mapping[str, Option] = MappingProxyType({}),
) -> dict[str, Any]:
    """The values of ``options`` that some source gives. ``others``: fields of other configurations, which the TOML
    file may hold too. Raises ConfigError."""
    values: dict[str, Any] = {}
    path = getattr(arguments, "config", None)
    if path is not None:
        table = read_toml(Path(path), {**options, **others})
        values |= {name: value for name, value in table.items() if name in options}
    for name, entry in options.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environ.get(variable) and not _is_of_kubernetes(name.upper(), environ[variable]):
            values[name] = entry.parse(environ[variable], variable)
    for name, entry in options.items():
        if name in arguments and name != "model":
            values[name] = entry.parse(getattr(arguments, name), "--" + name.replace("_", "-"))
    return values


def _is_of_kubernetes(name: str, value: str) -> bool:
    return KUBERNETES.match(f"{name}={value}") is not None


def check_environment(environ: Mapping[str, str], options: Collection[str]) -> None:
    """Raises ConfigError for a variable with our prefix that is neither an option nor anything else that is ours, and
    for a log level that is none; empty ones are taken for unset."""
    for variable, value in environ.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if variable == "DEPTHBATCH_LOG_LEVEL" and value and value.upper() not in LOG_LEVELS:
            raise ConfigError(f"{variable} must be one of {', '.join(LOG_LEVELS)}, not {value!r}")
        if name == variable or not value or name in OTHER_VARIABLES or _is_of_kubernetes(name, value):
            continue
        if name.lower() not in options or name != name.upper():
            raise ConfigError(f"environment variable {variable} is no option{did_you_mean(name.lower(), options)}")


def read_toml(path: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    """The options of a TOML file; names with dashes or underscores. Raises ConfigError naming file, key and value."""
    try:
        table = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in options:
            raise ConfigError(f"{path}: unknown key {key!r}{did_you_mean(name, options)}")
        options[name].check(value, f"{path}: {key}")
        values[name] = value
    return values


def to_toml(config: Options, hidden: Collection[str] = ()) -> str:
    """What --print-config prints: a file that --config reads back as the same configuration, but for what is
    ``hidden``. What is unset, by nobody or by an empty value, is a comment that says so."""
    lines = []
    for name, value in msgspec.structs.asdict(config).items():
        if value is not None and name in hidden:
            lines.append(f"# {name} = (set, not shown)")
            continue
        lines.append(f"# {name} = (unset)" if value is None else f"{name} = {json.dumps(value)}")
    return "\n".join(lines)


def did_you_mean(name: str, known: Collection[str]) -> str:
    import difflib  # only on the way to an error

    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
