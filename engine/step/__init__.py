"""The machine: the driver steps searches, the runner evaluates passes."""
