"""``python -m depthbatch`` is the ``depthbatch`` console script."""

from depthbatch.deploy.cli import main

raise SystemExit(main())
