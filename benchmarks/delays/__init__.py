"""Queues with delays in Redis: headrace's beside plain redis-py, taskiq and arq.

python -m benchmarks.delays --help
"""
