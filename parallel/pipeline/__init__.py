"""Schedules as data, the queues of a stage's messages, and what runs them."""
