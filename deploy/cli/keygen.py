"""``depthbatch keygen``: a pair of CURVE keys for the native API over tcp."""

import argparse
from pathlib import Path

from depthbatch.frontend.zmq_keys import make_certificate


def add_keygen_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the server or client that the keys are for")
    parser.add_argument("--output", default=".", metavar="DIR", help="directory of the two files (default .)")


def run_keygen(args: argparse.Namespace) -> int:
    """Writes NAME.key and NAME.key_secret and says which is which. Raises ConfigError."""
    public, secret = make_certificate(Path(args.output), args.name)
    print(f"{public}  public, for those that {args.name} talks to")
    print(f"{secret}  secret, stays where it is used")
    return 0
