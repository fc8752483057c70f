"""Audit a verifier with constructed responses: the command `probe`."""
