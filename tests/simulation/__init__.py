"""Plays admission with simulated time: days of traffic in seconds, on the very code that decides in a worker."""
