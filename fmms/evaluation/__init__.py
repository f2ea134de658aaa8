"""What a claim about text quality or serving speed needs: statistics, GSM8K answers, serving logs, names for a paper.

Each module imports by itself; `import fmms` imports none of them.
"""
