"""What both libraries measure and report with. Result records live in `fmms.bench.records`."""
