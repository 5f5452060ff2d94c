"""C kernels for the CPU: sources, build, ctypes bindings."""
