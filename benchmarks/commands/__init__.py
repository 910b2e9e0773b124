"""The subcommands of `python -m benchmarks`, one file each; driver.py has what they share."""
