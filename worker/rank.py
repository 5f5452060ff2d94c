"""``python -m depthbatch.worker.rank FD RANK PARENT_PID``: a rank of a tensor-parallel worker, started by its rank 0."""

import socket
import sys

from depthbatch.common.os_process import die_with_parent, die_with_threads


def main() -> int:
    """The exit status: 0, rank 0 has ended; an exception is a bug, and the end of the worker."""
    descriptor, rank, parent_pid = map(int, sys.argv[1:])
    die_with_parent(parent_pid)
    from depthbatch.common.config import EngineConfig
    from depthbatch.common.errors import DepthbatchError
    from depthbatch.common.logging import setup_logging
    from depthbatch.worker.build import build_rank
    from depthbatch.worker.rank_processes import Channel
    from depthbatch.worker.ranks import Follower

    setup_logging(f"rank{rank}")
    die_with_threads()
    channel = Channel(socket.socket(fileno=descriptor))
    config = EngineConfig.from_json(channel.receive().decode())
    follower = Follower(channel, rank, config.tensor_parallel_size)
    try:
        runner = build_rank(config, follower)
    except DepthbatchError as error:
        follower.fail(error)
        return 0
    follower.run(runner)
    return 0


if __name__ == "__main__":
    sys.exit(main())
