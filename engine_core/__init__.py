"""Scheduling and the step loop: everything that decides what the device does next."""
