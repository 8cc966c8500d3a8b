"""Delivery: handlers, groups of remote consumers, credit, and fair sharing between subscriptions."""
