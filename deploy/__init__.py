"""What runs the processes: command line, process supervision."""
