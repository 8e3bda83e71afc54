"""Observation: metrics, rates, memory, log lines, traces and the report page of a run."""
