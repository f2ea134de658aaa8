"""What the notebooks of the decoder measure: rows, the checks behind them, and figures."""
