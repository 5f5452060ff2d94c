"""``python -m depthbatch`` is the ``depthbatch`` console script."""

from depthbatch.deploy.cli.main import main

raise SystemExit(main())
