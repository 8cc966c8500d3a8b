"""What people run on their streams: each job is a function for programs, and a command for `headrace pipeline`."""
