"""Instruments: they read a run folder or call public functions. Training needs none of them."""
