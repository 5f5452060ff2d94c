"""The ``depthbatch`` command."""
