"""Decisions about a job, given what was observed and the time. Pure: imports neither kopf nor kubernetes."""
