"""The command line: `headrace COMMAND`. Commands are imported when they are called."""
