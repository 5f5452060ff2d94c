"""What crosses a process boundary: configuration, messages, frame layouts, transport."""
