"""Measuring training steps."""
