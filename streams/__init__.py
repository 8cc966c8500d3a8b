"""The vocabulary of headrace: streams, events, positions, subscriptions, errors."""
