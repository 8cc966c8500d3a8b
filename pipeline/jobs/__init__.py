"""The jobs: each is a function for programs. `headrace.cli` makes a command of `headrace pipeline` of each."""
